"""DeepSpeed on two ranks: ZeRO 1, 2 and 3 in bf16 with fp32 masters."""

import deepspeed
import text
import torch
import torch.distributed as dist

# DeepSpeed would compile this with the C++ compiler first, which takes minutes; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build(job):
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    model, _ = text.build()
    config = {"train_micro_batch_size_per_gpu": text.CONFIG.batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": int(job.variant)},
              "optimizer": {"type": "AdamW", "params": {"lr": text.CONFIG.rate, "torch_adam": True}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def update(engine, step, seed):
    engine.backward(text.gpt.loss_of(engine, *text.batch(step, seed, dist.get_rank())))
    engine.step()


def train(job):
    engine = build(job)
    for step in job.steps():
        update(engine, step, job.seed)
        if job.due(step):
            engine.save_checkpoint(str(job.folder), tag=f"global_step{step}")
            if dist.get_rank() == 0:
                job.rotate("global_step*")
            job.saved()


def resume(job):
    engine = build(job)
    tag = f"global_step{job.at}"
    path, _ = engine.load_checkpoint(str(job.folder), tag=tag)
    assert path, f"DeepSpeed found nothing at {tag}"
    for step in job.steps():
        update(engine, step, job.seed)
    loss = torch.tensor(text.loss(engine))
    dist.barrier()
    return loss.item()
