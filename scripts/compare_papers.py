#!/usr/bin/env python3
"""Reproduce the published systems' figures on this machine, with stepfs's own profiles beside them: docs/COMPARISON.md.

Trains the models of the study (scripts/study/tasks.py), restores them through mounts whose profile is the published system,
and weighs the same series under each. examples/published_figures.rs measures the codecs alone. --raw keeps everything that is
finished, so a stopped run continues. The document marks everything else as "not run".

    compare_papers.py --quick                            everything in small, under a minute
    compare_papers.py --raw ~/raw --only lc,cnr          hours, if nothing is finished yet
    compare_papers.py --raw ~/raw --minutes 0            only the document, from finished runs
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

from papers import check_n_run, inshrinkerator, lc, ours  # noqa: E402
from papers.lab import Lab  # noqa: E402

PAPERS = {"lc": lc, "cnr": check_n_run, "inshrinkerator": inshrinkerator, "ours": ours}
FIGURES = os.environ.get("STEPFS_FIGURES", str(ROOT / "target/release/examples/published_figures"))
HEAD = """# The published systems, and stepfs beside them

`scripts/compare_papers.sh` made this page from real runs on one machine: training, restores from released checkpoints through a mount whose profile is the system, and the
codecs by themselves. Beside each published figure stands why ours differs. **Models and data here are small**: 31 thousand to 2 million parameters, drawn digits, made-up clicks,
the text of Python's library. They train for hundreds of iterations on a processor; the papers' have up to terabytes. So only the order of the systems on one series carries over,
not the numbers. The heads of `crates/papers/src/*.rs` describe each system here, and the choices that its paper leaves open. "Not run" means that there was no time."""


def say(line):
    print(line, file=sys.stderr, flush=True)


def chosen(text):
    names = text.split(",")
    if unknown := set(names) - set(PAPERS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PAPERS)}")
    return [name for name in PAPERS if name in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen, default=list(PAPERS), metavar="LIST", help=f"of {','.join(PAPERS)} (default: all)")
    parser.add_argument("--raw", type=Path, help="where series and finished runs are kept (default: made, and removed at the end)")
    parser.add_argument("--out", type=Path, help="where COMPARISON.md and comparison/*.png go (default: docs; in --quick nowhere)")
    parser.add_argument("--minutes", type=float, help="begin no run after so many; what is missing is said to be (default: no end)")
    parser.add_argument("--dir", help="where mounts are made; decides the disk (default: the temporary directory)")
    parser.add_argument("--again", action="store_true", help="do finished runs again")
    parser.add_argument("--quick", action="store_true", help="tiny models, few checkpoints: shows that it works, proves nothing else")
    arguments = parser.parse_args()
    if not Path(FIGURES).exists():
        sys.exit(f"compare_papers.py: {FIGURES} is not there; scripts/compare_papers.sh builds it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no mount behind
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stepfs-papers-raw-", dir=arguments.dir) as scratch:
        lab = Lab(arguments.raw or Path(scratch), arguments.dir, arguments.quick, arguments.minutes, FIGURES, arguments.again)
        found = {}
        for name in arguments.only:
            say(f"== {name}")
            found[name] = PAPERS[name].measure(lab)
        lines = [HEAD, ""]
        if arguments.quick:
            lines += ["**A smoke run: tiny models and few checkpoints. The numbers mean nothing.**", ""]
        for name, part in found.items():
            lines += PAPERS[name].markdown(part)
        text = "\n".join(lines).rstrip() + "\n"
        out = arguments.out or (None if arguments.quick else ROOT / "docs")
        if out:
            (out / "comparison").mkdir(parents=True, exist_ok=True)
            for name, part in found.items():
                PAPERS[name].pictures(part, out / "comparison")
            (out / "COMPARISON.md").write_text(text)
            say(f"{out / 'COMPARISON.md'}, after {time.perf_counter() - began:.0f} s")
        else:
            print(text)
        if lab.missing:
            say(f"not run, for lack of time: {', '.join(dict.fromkeys(lab.missing))}")


if __name__ == "__main__":
    main()
