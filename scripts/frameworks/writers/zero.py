"""DeepSpeed on two ranks: ZeRO 1, 2 and 3 in bf16 with fp32 masters, and the Universal checkpoint made of ZeRO 2."""

import argparse
import shutil

import deepspeed
import text
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

# DeepSpeed would compile this with the C++ compiler first, which takes minutes; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build(job):
    stage = 2 if job.variant == "universal" else int(job.variant)
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    model, _ = text.build()
    config = {"train_micro_batch_size_per_gpu": text.CONFIG.batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": text.CONFIG.rate, "torch_adam": True}},
              "checkpoint": {"load_universal": job.variant == "universal" and job.at > 0}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def update(engine, step, seed):
    engine.backward(text.gpt.loss_of(engine, *text.batch(step, seed, dist.get_rank())))
    engine.step()


def convert(folder, tag):
    """As `ds_to_universal.py` does; the checkpoint that it is made of goes."""
    if dist.get_rank() == 0:
        ds_to_universal.main(argparse.Namespace(input_folder=str(folder / tag), output_folder=str(folder / f"{tag}_universal"),
                                                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                                                inject_missing_state=True))
        shutil.rmtree(folder / tag)
    dist.barrier()


def train(job):
    engine = build(job)
    for step in job.steps():
        update(engine, step, job.seed)
        if job.due(step):
            engine.save_checkpoint(str(job.folder), tag=f"global_step{step}")
            if job.variant == "universal":
                convert(job.folder, f"global_step{step}")
            if dist.get_rank() == 0:
                job.rotate("global_step*")
            job.saved()


def resume(job):
    engine = build(job)
    tag = f"global_step{job.at}" + "_universal" * (job.variant == "universal")
    path, _ = engine.load_checkpoint(str(job.folder), tag=tag)
    assert path, f"DeepSpeed found nothing at {tag}"
    for step in job.steps():
        update(engine, step, job.seed)
    loss = torch.tensor(text.loss(engine))
    dist.barrier()
    return loss.item()
