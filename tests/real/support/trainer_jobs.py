"""Jobs of transformers' Trainer. A test imports this where it uses it, since transformers takes seconds to import."""

import hashlib
import os
import shutil
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Text(torch.utils.data.Dataset):
    """Tokens that a model learns to say again."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def noise(count, seed):
    """Fixed random tokens. Learning one set makes another worse, so an early checkpoint is the best."""
    return Text(torch.randint(0, 256, (count, 32), generator=torch.Generator().manual_seed(seed)))


def model(width, layers, heads):
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0,
                                      eos_token_id=0))


def trainer(folder, model, text, callback, held_out=None, **options):
    """A Trainer on one processor that says nothing."""
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], seed=1, disable_tqdm=True, **options)
    return Trainer(model=model, args=arguments, train_dataset=text, eval_dataset=held_out, callbacks=[callback])


class Copy(TrainerCallback):
    """Keeps each checkpoint's original bytes, and lets stepfs work after each save."""

    def __init__(self, mount, plain):
        self.mount, self.plain = mount, plain

    def on_save(self, args, state, control, **rest):
        name = f"checkpoint-{state.global_step}"
        shutil.copytree(self.mount / name, self.plain / name, dirs_exist_ok=True)
        self.mount.sync()


class Pause(TrainerCallback):
    """Stops after each save, so that the next call continues there."""

    def on_save(self, args, state, control, **rest):
        control.should_training_stop = True


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


def rotate(folder, resume=None):
    """Trains five steps on, from the newest checkpoint or from this one, and saves; three checkpoints stay. Answers the weights' digests."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), default=None)
    job = trainer(folder, model(96, 3, 4), noise(64, 1), Pause(), max_steps=35, save_steps=5, save_total_limit=3, logging_steps=5,
                  per_device_train_batch_size=4, learning_rate=1e-3)
    job.train(resume_from_checkpoint=str(folder / resume if resume else newest) if newest else None)
    return digests(job.model)


def digests(model):
    """By name."""
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in model.state_dict().items()}


def load(folder):
    return digests(GPT2LMHeadModel.from_pretrained(folder))
