#!/usr/bin/env python3
"""Train the GPT of scripts/gpt.py under FSDP2, and save with torch's distributed checkpoint.

    dcp_gpt.py --ranks 2 --out DIR... --iters 100 --every 25

Each checkpoint goes into every DIR: `step_0025/__0_0.distcp`, ..., `.metadata`. Rank 0 prints the held-out loss at the end.
The same seed, ranks and threads give the same bytes. `--resume DIR...` continues from checkpoints of any number of ranks, one after
the other. `{rank}` in a DIR is the rank's number: each rank works in a mount of its own. With `--keep N` rank 0 removes older
checkpoints. The ranks are forks of one process: torch is imported once, which takes longer than such a training.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

warnings.filterwarnings("ignore")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", type=int, help="ranks that run here; others run on other machines")
    parser.add_argument("--master", help="rank 0's address and port, as others reach it")
    parser.add_argument("--out", nargs="*", default=[])
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--resume", nargs="*", default=[])
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="files that each rank writes")
    return parser.parse_args()


def state_of(model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "step": step}


def main():
    args = arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address, port = (args.master or f"127.0.0.1:{free.getsockname()[1]}").split(":")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port, WORLD_SIZE=str(args.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = []
    for rank in range(args.ranks) if args.only is None else args.only:
        # Nothing has computed yet, so no thread of torch is lost in the fork.
        if (pid := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            code = 1
            try:
                work(args)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        ranks.append(pid)
    # A rank that fails must not leave the others waiting for it.
    for _ in ranks:
        pid, status = os.wait()
        ranks[ranks.index(pid)] = None
        if status:
            # Below zero: the signal that ended it. A machine without memory sends 9.
            print(f"a rank ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            for other in filter(None, ranks):
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def work(args):
    """One rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for folder in args.resume or [None]:
        train(args, folder)
    dist.destroy_process_group()


def train(args, resume):
    torch.manual_seed(1)
    config = gpt.Config(layers=args.layers, width=args.width, batch=8)
    model, _ = gpt.build(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.99))
    done = 0
    if resume:
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=own(resume))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        done = state["step"]
    train, held_out = gpt.corpus()
    for step in range(done + 1, done + args.iters + 1):
        # Every rank has its own windows, the same whenever this step runs.
        draw = random.Random(1000 * step + dist.get_rank())
        x, y = gpt.batch(train, config, [draw.randrange(len(train) - config.context - 1) for _ in range(config.batch)])
        gpt.loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            for out in args.out:
                save(state_of(model, optimizer, step), f"{own(out)}/step_{step:04d}", args)
                dist.barrier()
                if args.keep and dist.get_rank() == 0:
                    for old in sorted(Path(own(out)).glob("step_*"))[:-args.keep]:
                        shutil.rmtree(old)
    loss = gpt.held_out_loss(model, config, held_out)
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f}", flush=True)


def own(folder):
    return folder.replace("{rank}", str(dist.get_rank()))


def save(state, folder, args):
    writer = dcp.FileSystemWriter(folder, thread_count=args.threads, single_file_per_rank=args.threads == 1)
    if args.async_save:
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer)


if __name__ == "__main__":
    main()
