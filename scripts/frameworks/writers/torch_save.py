"""Training scripts that call torch.save: a whole checkpoint in one file, or the weights alone."""

import text
import torch


def train(job):
    def save(model, optimizer, step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if job.variant == "weights":
            state = model.state_dict()
        torch.save(state, job.folder / f"step_{step}.pt", _use_new_zipfile_serialization=job.variant != "legacy")
        job.rotate("step_*.pt")

    text.train(job, save)


def resume(job):
    model, optimizer = text.build()
    state = torch.load(job.folder / f"step_{job.at}.pt")
    if job.variant == "weights":
        model.load_state_dict(state)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return text.go_on(job, model, optimizer)
