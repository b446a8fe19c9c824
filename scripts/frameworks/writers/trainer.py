"""transformers' Trainer with `save_total_limit`: a GPT-2; with PEFT, adapters of LoRA on it."""

import text
import torch
from job import EVERY, KEEP, LAST
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Saved(TrainerCallback):
    def __init__(self, job):
        self.job = job

    def on_save(self, args, state, control, **rest):
        self.job.saved()


class Windows(text.Windows):
    """Trainer's model shifts the labels itself."""

    def __getitem__(self, i):
        x = super().__getitem__(i)["x"]
        return {"input_ids": x, "labels": x}


def build(variant):
    torch.manual_seed(1)
    width = 256 if variant == "lora" else 96
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=width, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    if variant == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True))
    return model


def trainer(job):
    more = {"max_shard_size": "400KB"} if job.variant == "shards" else {}
    arguments = TrainingArguments(output_dir=str(job.scratch if job.at else job.folder), max_steps=job.last, save_steps=EVERY, logging_steps=EVERY,
                                  save_strategy="no" if job.at else "steps", save_total_limit=KEEP, per_device_train_batch_size=8, use_cpu=True,
                                  report_to=[], seed=1, disable_tqdm=True, learning_rate=1e-3, lr_scheduler_type="constant",
                                  train_sampling_strategy="sequential", ignore_data_skip=False, **more)
    # A resume skips the data that the run had seen. Its data is of the job's seed.
    return Trainer(model=build(job.variant), args=arguments, train_dataset=Windows(job.seed, 2 * LAST), callbacks=[Saved(job)])


def train(job):
    trainer(job).train()


def resume(job):
    again = trainer(job)
    again.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{job.at}"))
    x = torch.stack([text.HELD_OUT[at:at + 64] for at in range(0, 64 * 256, 256)])
    with torch.no_grad():
        return again.model.eval()(input_ids=x, labels=x).loss.item()
