#!/usr/bin/env python3
"""Let machines die at random instants while four nodes save to one remote, and go on training from what the remote has.

    remote_deaths.py [--deaths 50] [--seed N] [--newest exact|quantized] [--kind file|s3] [--series DIR]

Each time four nodes save the checkpoints of a small GPT and files of other kinds. At a random instant the daemons of
one to four of them are killed, and their stores are removed. A fresh store then shows the remote. Each file that was
acknowledged must read there, and be equal, or differ by no more than its stated error. With `exact`, a close
acknowledges (`wait = "close"`). With `quantized`, `stepfs sync --remote` does, after every second save or so.

Then each run that lost its machine goes on from the newest file that the fresh store has. If that file is not equal to
the bit, its cost is counted in iterations, as docs/QUALITY.md does, against the run that did not die
(scripts/study/resumed.py).

--seed repeats the death of this seed. --series keeps the runs that nothing interrupts. STEPFS_BIN names the program.
tests/real/support/remotes.py says how to name another remote.
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
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import torch  # noqa: E402
from remotes import KINDS, Node, make_remote  # noqa: E402
from series import difference, tensors_of  # noqa: E402
from study import gaps, resumed  # noqa: E402

NODES = 4
WAIT = {"exact": "close", "quantized": "nothing"}


class Rank(threading.Thread):
    """Saves one run's checkpoints on one node until the node's daemon dies. Notes what was acknowledged."""

    def __init__(self, node, number, series, draw, wait, stop):
        super().__init__()
        self.node, self.number, self.series, self.draw, self.wait, self.stop = node, number, series, draw, wait, stop
        self.seed, self.begun, self.saved, self.acknowledged = series.seeds[number], [], [], 0
        self.dead, self.failure = False, None

    def run(self):
        try:
            # Runs are at different ages when they begin on this store.
            for place in range(self.draw.randrange(resumed.PLACES // 2), resumed.PLACES):
                if self.stop.is_set():
                    return
                self.save(place)
                if self.wait == "nothing" and self.draw.random() < 0.5:
                    so_far = len(self.saved)
                    self.node.pushed()
                    self.acknowledged = so_far
        except (OSError, AssertionError) as error:
            if not self.dead:
                self.failure = error

    def save(self, place):
        draw, folder = self.draw, self.node / f"rank_{self.number}"
        files = [(resumed.TASK.file(place), self.series.file(self.seed, place).read_bytes())]
        if place % 3 == 0:
            files.append((f"note_{place}.json", draw.randbytes(draw.randrange(2000))))
            files.append((f"data_{place}.bin", draw.randbytes(100_000)))
        os.makedirs(folder, exist_ok=True)
        for name, data in files:
            self.begun.append(name)
            with open(folder / f"{name}.part", "wb") as f:
                f.write(data)
            os.rename(folder / f"{name}.part", folder / name)
            self.saved.append((f"rank_{self.number}/{name}", data))
            if self.wait == "close":
                self.acknowledged = len(self.saved)


def check(fresh, rank):
    """Returns the number of files that were acknowledged, and of those that hold other values by now."""
    lossy = 0
    for name, data in rank.saved[: rank.acknowledged]:
        fresh.sees(name, 60)
        read = (fresh / name).read_bytes()
        if read == data:
            continue
        assert name.endswith(".pt"), f"{name} is no checkpoint, and has other bytes"
        said = {about["path"].replace("/", "."): about["max_abs_error"] for about in fresh.tensors(name)}
        was, now = (tensors_of(torch.load(io.BytesIO(data), weights_only=False)) for data in (data, read))
        assert was.keys() == now.keys()
        # Of two names of one tensor, `inspect` has one.
        stated = {was[path].data_ptr(): error for path, error in said.items() if path in was}
        wrong = {path: difference(was[path], now[path]) for path in was}
        within = all(error <= stated.get(was[path].data_ptr(), 0) for path, error in wrong.items())
        assert within, f"{name}: {wrong}, stated {said}"
        lossy += 1
    return rank.acknowledged, lossy


def go_on(fresh, rank, series):
    """Trains on from the newest checkpoint of a rank. Returns how many later ones it had saved, and the iterations that
    the restore costs, or None if the file is exact.
    """
    names = sorted(path.name for path in (fresh / f"rank_{rank.number}").glob("*.pt"))
    # The newest may have reached the remote although its save did not return.
    begun = [name for name in rank.begun if name.endswith(".pt")]
    saved = sum(name.endswith(".pt") for name, _ in rank.saved)
    lost = max(0, saved - 1 - begun.index(names[-1]))
    return lost, series.go_on(rank.seed, fresh / f"rank_{rank.number}/{names[-1]}")


def die(seed, series, args):
    """One death: the files that were acknowledged, those of them that are lossy, and what each restore costs."""
    draw = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    remote = make_remote(args.kind, base)
    settings = f'newest = "{args.newest}"\nwait = "{WAIT[args.newest]}"'
    nodes = [Node(base / f"node_{number}", remote, settings) for number in range(NODES)]
    fresh = Node(base / "fresh", remote)
    try:
        for node in nodes:
            node.mount()
        stop = threading.Event()
        ranks = [Rank(node, number, series, random.Random(seed * NODES + number), WAIT[args.newest], stop)
                 for number, node in enumerate(nodes)]
        for rank in ranks:
            rank.start()
        time.sleep(draw.uniform(0.1, args.longest))
        victims = draw.sample(range(NODES), draw.randint(1, NODES))
        for number in victims:
            ranks[number].dead = True
            nodes[number].kill()
            shutil.rmtree(nodes[number].store)
        stop.set()
        for rank in ranks:
            rank.join(300)
            assert not rank.is_alive(), "a save hangs"
            assert rank.failure is None, f"node {rank.number}, which had not died: {rank.failure}"
        fresh.mount()
        count, lossy = map(sum, zip(*(check(fresh, rank) for rank in ranks)))
        # A machine that died before its first file was acknowledged may leave nothing.
        went_on = [go_on(fresh, ranks[number], series) for number in sorted(victims) if ranks[number].acknowledged]
        shown = ", ".join("exact" if cost is None else f"{cost:+.1f}" for _, cost in went_on)
        print(f"seed {seed}: nodes {sorted(victims)} died; {count} acknowledged files read, {lossy} of them lossy; "
              f"iterations behind: {shown or 'nobody'}", flush=True)
        return count, lossy, went_on
    finally:
        for node in [*nodes, fresh]:
            node.close()
        remote.close()
        shutil.rmtree(base, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--newest", choices=WAIT, default="exact")
    parser.add_argument("--kind", choices=KINDS, default="file")
    parser.add_argument("--longest", type=float, default=15, help="seconds until a death, at most")
    parser.add_argument("--series", type=Path, metavar="DIR", help="where the runs are kept (default: nowhere)")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30)
    deaths = []
    with tempfile.TemporaryDirectory(prefix="stepfs-series-") as scratch:
        series = resumed.Series(args.series or scratch, range(1, NODES + 1), print)
        for seed in [args.seed] if args.seed is not None else range(first, first + args.deaths):
            try:
                deaths.append(die(seed, series, args))
            except BaseException:
                print(f"seed {seed}: FAILED", flush=True)
                raise
    went_on = [one for _, _, those in deaths for one in those]
    costs = [cost for _, cost in went_on if cost is not None]
    mean, half = gaps.mean_and_interval(costs)
    count, lossy = (sum(death[n] for death in deaths) for n in range(2))
    print(f"{len(deaths)} deaths; {count} acknowledged files read, {lossy} of them lossy, each within its stated error")
    print(f"{len(went_on)} runs went on, {len(went_on) - len(costs)} of them from an exact file; "
          f"{sum(lost for lost, _ in went_on)} checkpoints were newer than the remote")
    if costs:
        interval = f" ± {half:.2f}" if half else ""
        print(f"the {len(costs)} others: {mean:+.2f}{interval} iterations behind, from {min(costs):+.1f} to "
              f"{max(costs):+.1f}; the aim of balanced is {resumed.PROMISE}")


if __name__ == "__main__":
    main()
