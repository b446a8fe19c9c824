#!/usr/bin/env python3
"""Does training survive resuming from lossy checkpoints? Trains, crashes, restores through a mount, and prints the cost.

Each task (scripts/study/tasks.py) has one run that is never interrupted. For each profile, number of restores and seed there
is one run that crashes that often, and each time resumes from a *released* checkpoint. scripts/study/protocol.py describes the
runs, gaps.py the measurements. Single restores from many checkpoints give the papers' rework; sizes.py weighs the same series
in a store. `ulp` is a control: after exact restores each weight moves by one unit in the last place.

Under `exact` every run must end in the same bits as the uninterrupted one, however often it was interrupted; otherwise the
study fails. --raw keeps series and finished runs. They are computed again only after the program was rebuilt.

    resume_study.py --quick                                          everything in small, a minute or two
    resume_study.py --tasks gpt_i25,lenet_adam --profiles exact,balanced --restores 0,1,5,9,10 --seeds 3
    resume_study.py --judge second --seeds balanced=12,compact=4 --raw DIR        do the promises hold?
    (docs/study/held_out.md)

With --judge, chains of nine restores begin at three places of each run, and a chain is judged 20 to 60 iterations after each
of its restores. `--seeds balanced=3,ahead-balanced=3` also restores the newest state from a mirror, where it is quantized, after
its machine died. Several processes may share one --raw: each takes work that no other is busy with.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import harness  # noqa: E402
from study import chains, gaps, protocol, report, sizes, tasks  # noqa: E402

KNOWN = ("exact", "balanced", "compact")
REPORT = {tasks.CALIBRATION: "calibration.md", tasks.HELD_OUT: "first_held_out.md", tasks.HELD_OUT_2: "held_out.md"}


def say(line):
    print(line, file=sys.stderr, flush=True)


def available(where):
    """The known profiles that this build of stepfs accepts."""
    found = []
    for profile in KNOWN:
        base = Path(tempfile.mkdtemp(prefix="stepfs-study-", dir=where))
        try:
            with protocol.Workplace(profile, base):
                found.append(profile)
        except AssertionError:
            say(f"{harness.BIN} does not know the profile {profile}")
        finally:
            base.rmdir()
    return found


def study(task, arguments, kept):
    """Everything about one task."""
    seeds = range(1, arguments.seeds + 1)
    raw, where = arguments.raw, arguments.dir
    bases = [protocol.uninterrupted(task, seed, raw, arguments.again, say) for seed in seeds]
    result = {"task": task.name, "what": task.what, "base": bases[0], "bases": bases, "sizes": {}, "chains": {}, "runs": {}, "singles": {},
              "seconds": {"uninterrupted": sum(base["seconds"] for base in bases)}}
    spent = result["seconds"]
    for profile in arguments.profiles:
        files = [task.file(place) for place in range(task.count)]
        weigh = lambda: {"report": sizes.measure(protocol.folder(raw, task, 1), files[: arguments.released + 1], profile, where=where)}
        result["sizes"][profile] = kept.get(f"{task.name}-{profile}-sizes-{arguments.released}", task, profile, weigh, say)["report"]
    for profile in [*arguments.profiles, *([] if arguments.no_control else [protocol.ULP])]:
        result["chains"][profile], result["runs"][profile] = {}, {}
        for restores in filter(None, arguments.restores):
            runs = []
            for seed, base in zip(seeds, bases):
                name = f"{task.name}-{profile}-R{restores}-seed{seed}"
                runs.append(kept.get(name, task, profile, lambda: protocol.interrupted(task, seed, profile, protocol.places(task, restores), task.length, raw, where), say))
                if profile == "exact" and runs[-1]["digest"] != base["digest"]:
                    sys.exit(f"resume_study.py: {name} did not end in the state of the uninterrupted run, though nothing was lost")
            result["runs"][profile][restores] = runs[0]
            result["chains"][profile][restores] = gaps.of_runs(task, runs, bases)
            spent[profile] = spent.get(profile, 0) + sum(run["seconds"] for run in runs)
        if task.singles:
            runs = [kept.get(f"{task.name}-{profile}-singles-seed{seed}", task, profile, lambda: protocol.singles(task, seed, profile, raw, where), say) for seed in seeds]
            result["singles"][profile] = gaps.of_singles(task, runs, bases)
            spent[profile] = spent.get(profile, 0) + sum(run["seconds"] for run in runs)
    return result


def judge(chosen, arguments, kept):
    """Chains from several starts, and their verdicts on the promises: Markdown and data."""
    picked = lambda task: tuple(task.starts[n] for n in arguments.starts) if arguments.starts else task.starts
    bases = chains.bases(chosen, range(1, max(arguments.seeds.values()) + 1), arguments.raw, arguments.again, say, arguments.done_only)
    if arguments.bases_only:
        return "", []
    count_of = {profile: arguments.seeds.get(profile, arguments.seeds.get(ALL, 0)) for profile in [*arguments.profiles, *(name for name in arguments.seeds if name.startswith(protocol.AHEAD)), *([] if arguments.no_control else [protocol.ULP])]}
    seeds = {profile: range(1, count + 1) for profile, count in count_of.items() if count}
    extra = arguments.settings.read_text() if arguments.settings else ""
    runs = chains.chains(chosen, seeds, kept, arguments.raw, arguments.dir, say, extra, picked, arguments.done_only)
    results = [{"task": task.name, "what": task.what, "set": task.set, "profiles": chains.judged(task, seeds, runs, bases[task.name], picked)} for task in chosen]
    return report.verdicts(results, {"build": kept.build, "seeds": {profile: len(those) for profile, those in seeds.items()}, "quick": arguments.quick, "set": arguments.judge}), results


ALL = "all"


def counts(text):
    """`3`, or `balanced=12,compact=4`, as numbers by profile."""
    if text.isdigit():
        found = {ALL: int(text)}
    else:
        found = {name: int(number) for name, number in (word.split("=") for word in text.split(","))}
    if min(found.values()) < 1:
        raise ValueError(text)
    return found


def numbers(text):
    return sorted({int(word) for word in text.split(",")})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", help="(default: all but those for --judge, or those of its set)")
    parser.add_argument("--judge", choices=(tasks.CALIBRATION, tasks.HELD_OUT, tasks.HELD_OUT_2), help="do the promises hold on the tasks of this set?")
    parser.add_argument("--bases-only", action="store_true", help="with --judge: only the uninterrupted runs")
    parser.add_argument("--done-only", action="store_true", help="with --judge: report the finished chains, and begin none")
    parser.add_argument("--label", default="", help="with --judge: keep the runs apart from those with other settings in the environment")
    parser.add_argument("--profiles", help="of stepfs.toml (default: those of exact, balanced, compact that this build has)")
    parser.add_argument("--restores", type=numbers, help="how often to crash, one run each (default: 0,1,5,9,10)")
    parser.add_argument("--seeds", type=counts, default="1", help="runs of everything; from 3 on the intervals mean something (default: 1); with --judge also by "
                        "profile, such as balanced=12,compact=4, and none of others")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="with --judge: more settings for stepfs.toml; give a --label too")
    parser.add_argument("--starts", type=numbers, help="with --judge: these starts of a task (default: 0,1,2)")
    parser.add_argument("--raw", type=Path, help="where series and finished runs are kept (default: made, and removed at the end)")
    parser.add_argument("--out", type=Path, help="where RESUME_STUDY.md and the pictures go (default: no pictures)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers here; - for stdout")
    parser.add_argument("--dir", help="where mounts are made; decides the disk (default: the temporary directory)")
    parser.add_argument("--no-control", action="store_true", help="leave out the runs with weights moved by one unit in the last place")
    parser.add_argument("--again", action="store_true", help="do finished runs again")
    parser.add_argument("--quick", action="store_true", help="tiny models, few checkpoints: shows that it works, proves nothing else")
    parser.add_argument("--sizes-only", action="store_true", help="train where needed, and weigh the series only")
    arguments = parser.parse_args()
    known = {name: task for name, task in tasks.TASKS.items() if task.set == (arguments.judge or "")}
    names = arguments.tasks.split(",") if arguments.tasks else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no such task{f' to judge by, in the set {arguments.judge}' if arguments.judge else ''}: {', '.join(sorted(unknown))}")
    if not arguments.judge:
        if ALL not in arguments.seeds:
            parser.error("--seeds: by profile only with --judge")
        arguments.seeds = arguments.seeds[ALL]
    chosen = [known[name] for name in names]
    if arguments.starts and not all(0 <= n < len(task.starts) for task in chosen for n in arguments.starts):
        parser.error("--starts: a number for each of a task's starts, from 0")
    arguments.restores = arguments.restores or ([0, 1, 2] if arguments.quick else [0, 1, 5, 9, 10])
    if arguments.quick:
        chosen = [task.smoke() for task in chosen]
    arguments.released = min(32, min(task.count for task in chosen) - 1)
    for task in [] if arguments.judge else chosen:
        if arguments.restores[0] < 0 or arguments.restores[-1] > task.count - 2:
            parser.error(f"--restores: {task.name} has {task.count - 2} checkpoints to restore from")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no mount behind
    with tempfile.TemporaryDirectory(prefix="stepfs-study-raw-", dir=arguments.dir) as scratch:
        arguments.raw = arguments.raw or Path(scratch)
        usual = chains.PROMISES if arguments.judge else available(arguments.dir) if not arguments.profiles else ()
        arguments.profiles = arguments.profiles.split(",") if arguments.profiles else list(usual)
        folder = "-".join(filter(None, ["runs", "quick" if arguments.quick else "", arguments.label]))
        kept = chains.Kept(arguments.raw / folder, arguments.again)
        if arguments.quick:
            arguments.raw = arguments.raw / "quick"
        if arguments.sizes_only:
            arguments.restores, chosen = [], [task.without_restores() for task in chosen]
        if arguments.judge:
            text, results = judge(chosen, arguments, kept)
            if arguments.out and text:
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / REPORT[arguments.judge]).write_text(text)
            return finish(arguments, text, results)
        began, results = time.perf_counter(), []
        for task in chosen:
            results.append(study(task, arguments, kept))
        text = report.markdown(results, {"build": kept.build, "seeds": arguments.seeds, "quick": arguments.quick, "seconds": time.perf_counter() - began})
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "RESUME_STUDY.md").write_text(text)
            report.pictures(results, arguments.out)
    finish(arguments, text, [{key: value for key, value in result.items() if key not in ("runs", "base", "bases")} for result in results])


def finish(arguments, text, data):
    if arguments.json == "-":
        print(json.dumps(data, indent=2))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(data) + "\n")
        print(text)


if __name__ == "__main__":
    main()
