"""transformers' Trainer on a mount: rotation by directory mtime, and resuming, while archiving and releasing go on."""

import os
import time

import pytest
import torch
from series import tensors_of
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Text(torch.utils.data.Dataset):
    """Fixed random tokens: enough to make updates."""

    def __init__(self):
        self.tokens = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class Watch(TrainerCallback):
    """After each save: wait for stepfs, and note the states of the checkpoints and the times of their directories."""

    def __init__(self, mount):
        self.mount, self.times, self.kept, self.released, self.changed = mount, {}, [], set(), []

    def look(self):
        now = {p.name: os.stat(p).st_mtime_ns for p in self.mount.dir.glob("checkpoint-*")}
        self.changed += [name for name in now if self.times.setdefault(name, now[name]) != now[name]]

    def on_save(self, args, state, control, **rest):
        self.look()
        self.mount.sync()
        self.look()
        self.released |= set(self.mount.released())
        self.kept.append(sorted((p.name for p in self.mount.dir.glob("checkpoint-*")), key=lambda n: int(n.split("-")[1])))
        # Trainer compares directory mtimes only when they lie more than a second apart.
        time.sleep(1.1)


def trainer(mount, steps, model=None):
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(1)
    arguments = TrainingArguments(output_dir=str(mount.dir), max_steps=steps, save_steps=5, save_total_limit=2, logging_steps=5,
                                  per_device_train_batch_size=4, use_cpu=True, report_to=[], seed=1, disable_tqdm=True,
                                  learning_rate=1e-3)
    watch = Watch(mount)
    return Trainer(model=model or GPT2LMHeadModel(config), args=arguments, train_dataset=Text(), callbacks=[watch]), watch


@pytest.mark.slow
def test_rotation_and_resume(both):
    mount = both
    job, watch = trainer(mount, 30)
    job.train()
    assert watch.kept == [[f"checkpoint-{n}" for n in range(max(5, last - 5), last + 1, 5)] for last in range(5, 31, 5)]
    assert not watch.changed, f"stepfs changed the mtime of {watch.changed}"
    assert any(name.endswith("model.safetensors") for name in watch.released), f"released: {watch.released}"

    # The newest is exact: it equals the job's memory.
    final = {name: t.clone() for name, t in job.model.state_dict().items()}
    read = GPT2LMHeadModel.from_pretrained(mount / "checkpoint-30").state_dict()
    assert all(torch.equal(read[name], t) for name, t in final.items())

    # The one before was released; training can resume from both.
    for last, goal in ((25, 30), (30, 35)):
        again, _ = trainer(mount, goal)
        again.train(resume_from_checkpoint=str(mount / f"checkpoint-{last}"))
        assert again.state.global_step == goal
        assert all(torch.isfinite(t).all() for t in tensors_of(again.model.state_dict()).values())

