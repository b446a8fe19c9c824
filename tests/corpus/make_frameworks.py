#!/usr/bin/env python3
"""Writes frameworks/: what DeepSpeed, torchtitan and Megatron-core save of a tiny GPT on two ranks, and fastai on one, with their own
code. Needs the second environment of scripts/frameworks.sh:

    python -m torch.distributed.run --standalone --nproc-per-node 2 make_frameworks.py deepspeed|torchtitan|megatron
    python make_frameworks.py fastai
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts/frameworks"))
import job  # noqa: E402

# Before the writers read them.
job.EVERY = job.LAST = 2
import text  # noqa: E402

text.CONFIG = text.gpt.Config(vocab=256, context=16, layers=1, heads=2, width=16, batch=2)
# Each name: the writer's module and variant, the file or directory that is kept, and its name here.
KEPT = {"deepspeed": ("zero", "1", "global_step2/mp_rank_00_model_states.pt", "deepspeed_model_states.pt"),
        "torchtitan": ("titan", "", "step-2/.metadata", "torchtitan.metadata"),
        "fastai": ("fastai_learner", "", "model_0.pth", "fastai.pth"),
        "megatron": ("megatron_core", "", "iter_0000002/.metadata", "megatron.metadata")}


def main():
    module, variant, file, name = KEPT[sys.argv[1]]
    folder = Path(tempfile.gettempdir()) / f"stepfs-corpus-{os.environ.get('MASTER_PORT', os.getpid())}"
    (folder / "run").mkdir(parents=True, exist_ok=True)
    try:
        __import__(f"writers.{module}", fromlist=["train"]).train(job.Job(folder=folder / "run", scratch=folder, variant=variant))
        if os.environ.get("RANK", "0") == "0":
            (HERE / "frameworks").mkdir(exist_ok=True)
            kept, here = folder / "run" / file, HERE / "frameworks" / name
            shutil.copyfile(kept, here)
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder)


# Megatron starts processes that import this file.
if __name__ == "__main__":
    main()
