#!/usr/bin/env python3
"""Run one writer in its environment: train, or resume and train on. Called by measure.py; speaks by a file of JSON.

    worker.py SPEC RESULT       SPEC: {"module", "variant", "packages", "tasks": [{"folder", "at", "seed", ...}]}
"""

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

# One thread, so that two runs of the same training give the same bits. The libraries read these when they are imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1", CUDA_VISIBLE_DEVICES="",
                  XLA_FLAGS="--xla_cpu_multi_thread_eigen=false", JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3", HF_HUB_OFFLINE="1",
                  TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE", DS_ACCELERATOR="cpu", WANDB_MODE="disabled")

from job import Job  # noqa: E402


def main():
    spec, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    writer = importlib.import_module(f"writers.{spec['module']}")
    losses = []
    with tempfile.TemporaryDirectory(prefix="stepfs-frameworks-") as scratch:
        for number, task in enumerate(spec["tasks"]):
            job = Job(folder=Path(task["folder"]), scratch=Path(scratch) / str(number), variant=spec["variant"], seed=task["seed"],
                      at=task["at"], after_save=task["after_save"])
            job.scratch.mkdir()
            job.folder.mkdir(parents=True, exist_ok=True)
            losses.append(float(writer.resume(job)) if job.at else writer.train(job))
    if int(os.environ.get("RANK", 0)) == 0:
        versions = {name: importlib.metadata.version(name) for name in spec["packages"]}
        result.write_text(json.dumps({"losses": losses, "versions": versions}))


if __name__ == "__main__":
    main()
