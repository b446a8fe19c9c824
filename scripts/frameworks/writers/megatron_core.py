"""Megatron-core's dist_checkpointing on two ranks: each saves half of the rows of each parameter and of its moments, under the names that
Megatron's distributed optimizer gives them. The tracker file is written in place, as by Megatron's training script."""

import text
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

# Its save waits for the GPU, and counts failures on it. There is none here.
torch.cuda.synchronize = lambda *device: None
torch.cuda.current_device = lambda: "cpu"
SLOTS = ("exp_avg", "exp_avg_sq")


def build():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, optimizer = text.build()
    return model, optimizer


def update(model, optimizer, step, seed):
    optimizer.zero_grad(set_to_none=True)
    text.backward(model, *text.batch(step, seed, dist.get_rank()))
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


def rows(key, tensor):
    """The share of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets(key, tensor.detach().chunk(world)[rank].contiguous(), (0, rank, world))


def sharded(model, optimizer, step):
    state = {"iteration": step, "model": {}, "optimizer": {slot: {} for slot in SLOTS}}
    for name, p in model.named_parameters():
        state["model"][name] = rows(name, p)
        for slot in SLOTS:
            moments = optimizer.state[p].get(slot, torch.zeros_like(p))
            state["optimizer"][slot][name] = rows(f"optimizer.state.{slot}.{name}", moments)
    return state


def train(job):
    model, optimizer = build()
    for step in job.steps():
        update(model, optimizer, step, job.seed)
        if not job.due(step):
            continue
        folder = job.folder / f"iter_{step:07d}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(sharded(model, optimizer, step), str(folder))
        dist.barrier()
        if dist.get_rank() == 0:
            (job.folder / "latest_checkpointed_iteration.txt").write_text(str(step))
            job.rotate("iter_*")
        job.saved()


def whole(part):
    """All ranks' rows together."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def resume(job):
    model, optimizer = build()
    state = dist_checkpointing.load(sharded(model, optimizer, 0), str(job.folder / f"iter_{job.at:07d}"))
    assert state["iteration"] == job.at
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(whole(state["model"][name]))
            optimizer.state[p] = {"step": torch.tensor(float(job.at))}
            optimizer.state[p] |= {slot: whole(state["optimizer"][slot][name]) for slot in SLOTS}
    for step in job.steps():
        update(model, optimizer, step, job.seed)
    return text.loss(model)
