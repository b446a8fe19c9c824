"""LeNet-5 and multinomial logistic regression on drawn digits, with SGD, SGD with momentum, or Adam."""

import torch
import torch.nn.functional as F
from torch import nn

from . import glyphs
from .training import Run, generator_of


def lenet():
    """61,706 parameters, as LeCun et al. (1998) count them with dense connections; 28 x 28 is padded to their 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))  # fmt: skip


def regression():
    """31,370 parameters: on pixels of half the size, since files below 64 KiB are never released, and 28 x 28 would make one."""
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(4 * glyphs.SIZE**2, 10))


MODELS = {"lenet": lenet, "mlr": regression}
OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
}


class Digits(Run):
    def __init__(self, seed, model="lenet", optimizer="sgd", rate=0.03, batch=64):
        super().__init__(seed)
        self.size = batch
        self.images, self.labels, self.held_images, self.held_labels = glyphs.data()
        self.model = MODELS[model]()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), rate)

    def loss(self, n):
        chosen = torch.randint(len(self.labels), (self.size,), generator=generator_of(self.seed, n))
        return F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])

    def evaluate(self):
        logits = torch.cat([self.model(images) for images in self.held_images.split(250)])  # as much as the core's cache holds
        right = (logits.argmax(1) == self.held_labels).float().mean().item()
        return F.cross_entropy(logits, self.held_labels).item(), {"accuracy": right}
