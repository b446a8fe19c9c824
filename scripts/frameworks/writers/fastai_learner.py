"""fastai: SaveModelCallback after every epoch, with its own Adam."""

import text
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam
from job import EVERY, LAST
from torch.utils.data import Subset


class Items(text.Windows):
    def __getitem__(self, i):
        return tuple(super().__getitem__(i).values())


class Saved(Callback):
    order = SaveModelCallback.order + 1

    def __init__(self, job):
        self.job = job

    def after_epoch(self):
        self.job.rotate("model_*.pth")
        self.job.saved()


def learner(job, first):
    size = text.CONFIG.batch * EVERY
    # An epoch is the steps from one save to the next; its data begins where the last one ended.
    items = Subset(Items(job.seed, 2 * LAST), range(first * size, (first + 1) * size))
    loader = DataLoader(items, bs=text.CONFIG.batch)
    model, _ = text.build()
    return Learner(DataLoaders(loader, loader), model, loss_func=lambda out, y: text.gpt.F.cross_entropy(out.flatten(0, 1), y.flatten()),
                   opt_func=Adam, lr=text.CONFIG.rate, path=job.folder, model_dir=".")


def train(job):
    again = learner(job, 0)
    with again.no_bar(), again.no_logging():
        again.fit(LAST // EVERY, cbs=[SaveModelCallback(every_epoch=True, with_opt=True, fname="model"), Saved(job)])


def resume(job):
    again = learner(job, job.at // EVERY)
    again.create_opt()
    again.load(f"model_{job.at // EVERY - 1}", with_opt=True)
    with again.no_bar(), again.no_logging():
        again.fit(1)
    return text.loss(again.model)
