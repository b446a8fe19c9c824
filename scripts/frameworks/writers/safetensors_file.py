"""A training script with safetensors: weights and moments in one file, or the weights alone."""

import text
import torch
from safetensors.torch import load_file, save_file


def names(model, optimizer):
    """{name: parameter} of the trained parameters; tied weights have one name."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if id(p) in trained}


def train(job):
    def save(model, optimizer, step):
        tensors = {f"model.{name}": p.detach() for name, p in names(model, optimizer).items()}
        for name, p in names(model, optimizer).items():
            for slot in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{name}.{slot}"] = optimizer.state[p][slot]
        save_file(tensors, job.folder / f"step_{step}.safetensors", metadata={"step": str(step)})
        job.rotate("step_*.safetensors")

    text.train(job, save)


def resume(job):
    model, optimizer = text.build()
    tensors = load_file(job.folder / f"step_{job.at}.safetensors")
    with torch.no_grad():
        for name, p in names(model, optimizer).items():
            p.copy_(tensors[f"model.{name}"])
            optimizer.state[p] = {"step": torch.tensor(float(job.at))}
            optimizer.state[p] |= {slot: tensors[f"optimizer.{name}.{slot}"] for slot in ("exp_avg", "exp_avg_sq")}
    return text.go_on(job, model, optimizer)
