"""Runs the fuzz targets that scripts/fuzz.sh built, counts executions in fuzz/executions.tsv, and writes docs/FUZZING.md."""

import concurrent.futures
import datetime
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import fuzz_corpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
PROGRAMS = FUZZ / "target" / f"{platform.machine()}-unknown-linux-gnu" / "release"
WORK = FUZZ / "target" / "corpus"
CRASHES = FUZZ / "target" / "artifacts"
RUNS = FUZZ / "executions.tsv"
PAGE = ROOT / "docs" / "FUZZING.md"
# Bytes of one input. Containers and objects need a few thousand to be whole.
LONG = {"container", "nested", "safetensors", "object_file", "object_index", "settings"}
# Limits of one input. A parser may take 0.7 GB for inputs of many MB; these inputs are small.
LIMITS = ["-timeout=25", "-rss_limit_mb=3000", "-malloc_limit_mb=700"]
# Limits for each target, so that all corpora together stay below 2 MB.
MOST_KEPT, MOST_INPUT = 60_000, 8_000
BEGIN, END = "<!-- table -->", "<!-- end -->"


def targets():
    return sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))


def length(target):
    return 16_384 if target in LONG else 4096


def kept(target):
    folders = [FUZZ / kind / target for kind in ("corpus", "findings")]
    return [str(folder) for folder in folders if folder.is_dir()]


def environment():
    # Several programs share the machine. Leaks are out of scope here, and threads of pools look like leaks.
    return os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "RAYON_NUM_THREADS": "2"}


def is_finding(target, path):
    """Whether it also fails alone. Any input is slow by the clock when its fuzzer waits for a core."""
    if path.name.startswith("slow-unit"):
        return False
    if path.name.startswith("timeout"):
        alone = subprocess.run([str(PROGRAMS / target), *LIMITS, str(path)], capture_output=True, env=environment(), check=False)
        return alone.returncode != 0
    return True


def run(target, seconds):
    """Fuzzes one target for `seconds` by the clock; returns its line for the table, with its CPU seconds."""
    own, crashes = WORK / target, CRASHES / target
    own.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    before = set(crashes.iterdir())
    command = [str(PROGRAMS / target), str(own), *kept(target), f"-max_total_time={seconds}", f"-max_len={length(target)}"]
    command += [*LIMITS, "-print_final_stats=1", "-use_value_profile=1", f"-artifact_prefix={crashes}/"]
    with open(WORK / f"{target}.log", "w", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())
        # The CPU time of this child alone: others run beside it, and the clock says nothing on a busy machine.
        _, child.returncode, usage = os.wait4(child.pid, 0)
    text = (WORK / f"{target}.log").read_text(errors="replace")
    count = [int(number) for number in re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)]
    count = count or [int(number) for number in re.findall(r"^#(\d+)\s", text, re.M)]
    covered = [int(number) for number in re.findall(r" cov: (\d+) ", text)]
    found = sorted(path for path in set(crashes.iterdir()) - before if is_finding(target, path))
    now = datetime.date.today().isoformat()
    seconds = round(usage.ru_utime + usage.ru_stime)
    line = [now, target, str(seconds), str(max(count, default=0)), str(max(covered, default=0)), str(len(found))]
    print(f"{target:22} {int(line[3]):>12,} executions, {line[4]:>6} edges, {len(found)} findings", flush=True)
    for path in found:
        print(f"    {path.relative_to(ROOT)}: see {WORK / target}.log", flush=True)
    return line


def write_page():
    """Writes the table of all recorded runs."""
    total = {}
    for line in RUNS.read_text().splitlines():
        day, target, seconds, count, covered, found = line.split("\t")
        row = total.setdefault(target, [0, 0, 0, 0, day])
        row[0] += int(seconds)
        row[1] += int(count)
        row[2] = max(row[2], int(covered))
        row[3] += int(found)
        row[4] = max(row[4], day)
    rows = ["| target | executions | CPU minutes | edges | findings | last run |", "|---|---|---|---|---|---|"]
    for target, (seconds, count, covered, found, day) in sorted(total.items()):
        rows.append(f"| {target} | {count:,} | {seconds / 60:.0f} | {covered:,} | {found} | {day} |")
    seconds, count, found = (sum(row[at] for row in total.values()) for at in (0, 1, 3))
    rows.append(f"| **all** | **{count:,}** | **{seconds / 60:.0f}** | | **{found}** | |")
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(head + BEGIN + "\n" + "\n".join(rows) + "\n" + END + tail)


def keep(target):
    """Keeps the smallest inputs that cover as much as all, within the limits."""
    own, merged = WORK / target, WORK / f"{target}.merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    sources = [str(own)] if own.is_dir() else []
    command = [str(PROGRAMS / target), "-merge=1", str(merged), *kept(target), *sources, f"-max_len={MOST_INPUT}", *LIMITS]
    command.append(f"-artifact_prefix={CRASHES / target}/")
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), check=False)
    inputs = sorted(merged.iterdir(), key=lambda path: path.stat().st_size)
    if not inputs:
        return
    folder = FUZZ / "corpus" / target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # From the smallest and from the largest: short inputs are quick, and long ones are hard to find again.
    room, chosen = MOST_KEPT, []
    for take in (inputs[: len(inputs) * 2 // 3], inputs[len(inputs) * 2 // 3 :]):
        for path in take:
            if path.stat().st_size <= room and path not in chosen:
                chosen.append(path)
                room -= path.stat().st_size
    for path in chosen:
        shutil.copyfile(path, folder / path.name[:16])
    fuzz_corpus.pack(target)
    print(f"{target:22} {len(chosen)} of {len(inputs)} inputs, {MOST_KEPT - room} bytes", flush=True)


def main():
    arguments = sys.argv[1:]
    jobs = int(os.environ.get("STEPFS_FUZZ_JOBS", os.cpu_count() or 1))
    WORK.mkdir(parents=True, exist_ok=True)
    fuzz_corpus.unpack()
    if arguments[:1] == ["--keep"]:
        for target in arguments[1:] or targets():
            keep(target)
        return 0
    seconds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 60
    wrong = set(arguments) - set(targets())
    if wrong:
        sys.exit(f"no such target: {', '.join(sorted(wrong))}; there are: {', '.join(targets())}")
    found = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, target, seconds) for target in arguments or targets()]):
            line = done.result()
            found += int(line[5])
            with open(RUNS, "a", encoding="utf-8") as runs:
                runs.write("\t".join(line) + "\n")
            write_page()
    print(f"{found} findings" + (": put each into fuzz/findings/TARGET/ under a name, mend it" if found else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
