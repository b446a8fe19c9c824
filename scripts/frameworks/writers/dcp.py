"""torch's distributed checkpoint under FSDP2 on two ranks: saved at once, in the background, or as Hugging Face's safetensors."""

import warnings

import text
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")


def build():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, optimizer = text.build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    for p in model.parameters():
        groups[p.dim() < 2]["params"].append(p)
    return model, torch.optim.AdamW(groups, lr=text.CONFIG.rate)


def state_of(model, optimizer, variant):
    weights, moments = get_state_dict(model, optimizer)
    if variant == "hf":
        # Tensors only, each with a name of its own.
        slots = {f"optim.{name}.{slot}": t for name, own in moments["state"].items() for slot, t in own.items() if t.dim()}
        return {f"model.{name}": t for name, t in weights.items() if name != "head.weight"} | slots
    return {"model": weights, "optim": moments}


def update(model, optimizer, step, seed):
    text.update(model, optimizer, step, seed, dist.get_rank())


def train(job):
    model, optimizer = build()
    # The thread that saves must not meet the training's own messages.
    background = dist.new_group(backend="gloo")
    for step in job.steps():
        update(model, optimizer, step, job.seed)
        if not job.due(step):
            continue
        folder, state = str(job.folder / f"step-{step}"), state_of(model, optimizer, job.variant)
        if job.variant == "async":
            dcp.async_save(state, checkpoint_id=folder, process_group=background).result()
        elif job.variant == "hf":
            dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True))
        else:
            dcp.save(state, checkpoint_id=folder)
        dist.barrier()
        if dist.get_rank() == 0:
            job.rotate("step-*")
        job.saved()


def resume(job):
    model, optimizer = build()
    state, folder = state_of(model, optimizer, job.variant), str(job.folder / f"step-{job.at}")
    if job.variant == "hf":
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=folder))
        weights, moments = get_state_dict(model, optimizer)
        for name, own in moments["state"].items():
            for slot in own:
                own[slot] = torch.tensor(float(job.at)) if slot == "step" else state[f"optim.{name}.{slot}"]
        weights |= {name: state[f"model.{name}"] for name in weights if name != "head.weight"}
        weights["head.weight"] = state["model.wte.weight"]
        state = {"model": weights, "optim": moments}
    else:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for step in job.steps():
        update(model, optimizer, step, job.seed)
    return text.loss(model)
