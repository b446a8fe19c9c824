#!/usr/bin/env python3
"""Writes tests/corpus/dcp: a distributed checkpoint of a small model, saved by two ranks under FSDP2.

The files are committed; run this only when torch's format changes. `tiny.pt` is the same state dict as one file of torch.save.
"""

import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent / "dcp"


def rank(number, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK=str(number), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    # The path is written into the checkpoint.
    os.chdir(HERE.parent)
    dcp.save({"model": weights, "optim": moments, "step": 1}, checkpoint_id=HERE.name)
    dist.destroy_process_group()


def main():
    warnings.filterwarnings("ignore")
    shutil.rmtree(HERE, ignore_errors=True)
    mp.spawn(rank, args=(2,), nprocs=2)
    dcp_to_torch_save(HERE, HERE / "tiny.pt")


if __name__ == "__main__":
    main()
