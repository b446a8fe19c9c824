#!/usr/bin/env python3
"""Let machines die at random instants while four nodes save to one remote with `wait = "close"`.

    remote_deaths.py [--deaths 50] [--seed N] [--newest exact|quantized] [--kind file|s3]

Each time: four nodes save small training states and files of other kinds; at a random instant the daemons of one to four
of them are killed, and their stores are removed. A fresh store then shows the remote. Each file whose close had returned
must read there, and be equal, or differ by no more than its stated error. Prints the seed of each death: --seed repeats one.
STEPFS_BIN names the program.
"""

import argparse
import io
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

import torch  # noqa: E402
from remotes import Directory, Moto, Node  # noqa: E402
from series import difference, tensors_of, walk  # noqa: E402

NODES = 4


def packed(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def save(node, rank, states, draw, acknowledged, stop):
    """Saves until its daemon dies. Notes what was acknowledged, in order."""
    try:
        for step, state in enumerate(states):
            if stop.is_set():
                return
            files = [(f"rank_{rank}/step_{step:04d}.pt", state)]
            if step % 3 == 0:
                files.append((f"rank_{rank}/note_{step}.json", draw.randbytes(draw.randrange(2000))))
                files.append((f"rank_{rank}/data_{step}.bin", draw.randbytes(100_000)))
            for name, data in files:
                os.makedirs(node / f"rank_{rank}", exist_ok=True)
                with open(node / f"{name}.part", "wb") as f:
                    f.write(data)
                os.rename(node / f"{name}.part", node / name)
                acknowledged.append((name, data))
    except OSError:
        # Its machine has died.
        pass


def check(fresh, acknowledged):
    """Returns the number of files that were acknowledged, and of those that hold other values by now."""
    lossy = 0
    for files in acknowledged:
        for name, data in files:
            fresh.sees(name, 60)
            read = (fresh / name).read_bytes()
            if read == data:
                continue
            assert name.endswith(".pt"), f"{name} is no checkpoint, and has other bytes"
            said = {about["path"].replace("/", "."): about["max_abs_error"] for about in fresh.tensors(name)}
            was, now = (tensors_of(torch.load(io.BytesIO(data), weights_only=False)) for data in (data, read))
            assert was.keys() == now.keys()
            wrong = {path: difference(was[path], now[path]) for path in was}
            assert all(error <= said.get(path, 0) for path, error in wrong.items()), f"{name}: {wrong}, stated {said}"
            lossy += 1
    return sum(map(len, acknowledged)), lossy


def die(seed, states, args):
    draw = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    remote = Directory(base) if args.kind == "file" else Moto()
    settings = f'newest = "{args.newest}"\nwait = "close"'
    nodes = [Node(base / f"node_{rank}", remote, settings) for rank in range(NODES)]
    fresh = Node(base / "fresh", remote)
    try:
        for node in nodes:
            node.mount()
        stop, acknowledged = threading.Event(), [[] for _ in nodes]
        threads = [threading.Thread(target=save, args=(node, rank, states, random.Random(seed * NODES + rank), acknowledged[rank], stop))
                   for rank, node in enumerate(nodes)]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.1, args.longest))
        victims = draw.sample(range(NODES), draw.randint(1, NODES))
        for rank in victims:
            nodes[rank].kill()
            shutil.rmtree(nodes[rank].store)
        stop.set()
        for thread in threads:
            thread.join(180)
            assert not thread.is_alive(), "a save hangs"
        fresh.mount()
        count, lossy = check(fresh, acknowledged)
        print(f"seed {seed}: nodes {sorted(victims)} died; {count} acknowledged files read, {lossy} of them lossy", flush=True)
    finally:
        for node in [*nodes, fresh]:
            node.close()
        remote.close()
        shutil.rmtree(base, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--newest", default="exact")
    parser.add_argument("--kind", choices=["file", "s3"], default="file")
    parser.add_argument("--longest", type=float, default=6, help="seconds until a death, at most")
    args = parser.parse_args()
    states = [packed(state) for state in walk(60, shapes={"wte.weight": (256, 128), "ln.weight": (128,)})]
    first = random.SystemRandom().randrange(1 << 30)
    for seed in [args.seed] if args.seed is not None else range(first, first + args.deaths):
        try:
            die(seed, states, args)
        except BaseException:
            print(f"seed {seed}: FAILED", flush=True)
            raise


if __name__ == "__main__":
    main()
