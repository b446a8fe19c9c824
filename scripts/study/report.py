"""The study as Markdown and as pictures."""

from .protocol import ULP

NAMES = {ULP: "1 ulp (control)"}


def number(pair, form="+.5f"):
    """A mean and its interval; a dash where there is none."""
    mean, half = pair
    if mean is None:
        return "-"
    return format(mean, form) + (f" ± {format(half, form.removeprefix('+'))}" if half is not None else "")


def both(held_out, train, form):
    return f"{number(held_out, form)} / {number(train, form)}"


def row(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(*cells):
    return [row(*cells), row(*["---"] * len(cells))]


def size_table(results):
    kinds = sorted({kind for result in results for report in result["sizes"].values() for kind in report["total"]["kinds"]} - {"framing", "skeleton"})
    yield "## Sizes"
    yield ""
    yield ("Released checkpoints, keyframes and super-steps included: objects and a stub of 4096 bytes for each, in % of their raw bytes. Each kind in % "
           "of its own raw bytes; skeleton and framing in % of the whole. The newest checkpoint stays exact, and is not in the sums.")
    yield ""
    words = [kind.replace("_", " ") for kind in kinds]
    yield from head("task", "profile", "files", "raw MB", "stored MB", "on disk (du)", "**whole**", "", *words, "skeleton", "framing")
    for result in results:
        for profile, report in result["sizes"].items():
            sums = report["total"]
            part = lambda kind: sums["kinds"].get(kind, {"raw_bytes": 0, "stored_bytes": 0})
            own = [f"{100 * part(kind)['stored_bytes'] / part(kind)['raw_bytes']:.2f} %" if part(kind)["raw_bytes"] else "-" for kind in kinds]
            rest = [f"{100 * part(kind)['stored_bytes'] / sums['raw_bytes']:.2f} %" for kind in ("skeleton", "framing")]
            sizes = [f"{sums[what] / 1e6:.2f}" for what in ("raw_bytes", "stored_bytes", "disk_bytes")]
            yield row(result["task"], profile, sums["files"], *sizes, f"**{100 * sums['share']:.2f} %**", f"{1 / sums['share']:.2f}x", *own, *rest)
    yield ""


def chain_table(results):
    offsets = sorted({k for result in results for chains in result["chains"].values() for chain in chains.values() for k in chain["offsets"]})
    if not any(chains for result in results for chains in result["chains"].values()):
        return
    yield "## Restores that add up"
    yield ""
    yield ("Gap: held-out loss less the uninterrupted run's at the same iteration, k iterations after a restore; the mean over all restores of a run (and seeds). "
           "On training batches: the same on the batches of all iterations from the 10th after a restore to the next crash, before each update. "
           "Behind: the mean of the gaps 10 and more iterations after each of the last third of the restores, in iterations of the uninterrupted run, by the slope "
           "of its smoothed loss. A restore: the slope of that lag over the number of restores, through the origin. Both on the held-out set / on training batches. "
           "End: the gap after the last iteration of the run. ± is a 95 % interval: over several seeds, or else over the restores of one run, "
           "which are not independent. "
           "`same bits`: the number of runs "
           "that ended in the state of the uninterrupted one; under `exact` all must.")
    yield ""
    columns = [f"gap, k = {k}" for k in offsets]
    yield from head("task", "profile", "restores", "same bits", *columns, "on training batches", "behind, in total", "a restore", "gap at the end")
    for result in results:
        if any(result["chains"].values()):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in result["base"]["figures"].items())
            loss = result["base"]["held_out"][max(result["base"]["held_out"], key=int)]
            yield row(result["task"], "never interrupted", 0, "", *[""] * (len(offsets) + 3), f"loss {loss:.4f}{', ' if figures else ''}{figures}")
        for profile, chains in result["chains"].items():
            for restores, chain in chains.items():
                gaps = [number(chain["offsets"][k]["held_out"]) if k in chain["offsets"] else "-" for k in offsets]
                same = f"{chain['same_bits']} of {chain['seeds']}"
                yield row(result["task"], NAMES.get(profile, profile), restores, same, *gaps, number(chain["train_mean"]), both(chain["behind"], chain["train_behind"], "+.1f"),
                          both(chain["per_restore"], chain["train_per_restore"], "+.2f"), number(chain["end_gap"]))
    yield ""


def single_table(results):
    shown = [result for result in results if result["singles"]]
    if not shown:
        return
    offsets = sorted({k for result in shown for single in result["singles"].values() for k in single["offsets"]})
    yield "## Single restores, and rework"
    yield ""
    yield ("Each from another checkpoint of the uninterrupted run. Rework (Chen et al. 2020): iterations until the held-out loss returns to its value when the "
           "checkpoint was saved. It rewards states that happen to have a lower loss at once, so read it beside the gaps. ± over the restores.")
    yield ""
    yield from head("task", "profile", "restores", "rework", "worst", "never back", *[f"gap, k = {k}" for k in offsets], "iterations behind")
    for result in shown:
        for profile, single in result["singles"].items():
            gaps = [number(single["offsets"][k]) if k in single["offsets"] else "-" for k in offsets]
            yield row(result["task"], NAMES.get(profile, profile), single["restores"], number(single["rework"], ".2f"), single["worst_rework"], single["never_back"],
                      *gaps, number(single["behind"], "+.2f"))
    yield ""


def time_table(results):
    yield "## Time"
    yield ""
    profiles = list(dict.fromkeys(name for result in results for name in result["seconds"]))
    yield from head("task", *[f"{NAMES.get(profile, profile)}, s" for profile in profiles])
    for result in results:
        yield row(result["task"], *[f"{result['seconds'].get(profile, 0):.0f}" for profile in profiles])
    yield ""


def markdown(results, about):
    lines = ["# Training that resumes from released checkpoints", ""]
    if about["quick"]:
        lines += ["**A smoke run: tiny models and few checkpoints. The numbers mean nothing.**", ""]
    lines += ["Each run crashes, loses its newest checkpoint, and resumes from the previous one, read through the mount after it was released. Later checkpoints "
              "descend from it, so losses add up. Batches are the same as in the uninterrupted run. `1 ulp` is a control: after exact restores "
              "each weight moves by one unit in the last place. It shows the part of a gap that is arithmetic. The intervals show how far the gaps of one profile scatter "
              f"over restores and seeds. Seeds: {about['seeds']}. Made by `scripts/resume_study.sh`.", ""]
    lines += [f"- `{result['task']}`: {result['what']}" for result in results] + [""]
    for table in (size_table, chain_table, single_table, time_table):
        lines += table(results)
    return "\n".join(lines)


def verdict_table(results, profile, promise):
    shown = [(result["task"], result["profiles"][profile]) for result in results if result["profiles"].get(profile, {}).get("each")]
    offsets = sorted({k for _, found in shown for k, gap in found["gaps"].items() if k <= 10 and gap[0] is not None})
    columns = [f"gap, k = {k}" for k in offsets]
    yield from head("task", "stored", "seeds, chains", "iterations behind, a restore", "upper end", "aim", "by the mean of the states", "by single states", "upper end of each",
                    "on training batches", "least to most", *columns)
    end = lambda value: "-" if value is None else format(value, "+.2f")
    for name, found in shown:
        stored = f"{100 * found['total']['share']:.2f} %" if found["total"] else "-"
        each = sorted(found["each"])
        gaps = [number(found["gaps"][k], "+.4f") for k in offsets]
        word = "-" if found["verdict"] is None else f"<= {promise}: {'met' if found['verdict'] == 'met' else '**' + found['verdict'] + '**'}"
        yield row(name, stored, f"{found['seeds']}, {len(each)}", number(found["both"], "+.2f"), f"**{end(found['upper'])}**", word, number(found["behind"], "+.2f"),
                  number(found["states_behind"], "+.2f"), end(found["upper_each"]), number(found["train_behind"], "+.2f"), f"{each[0]:+.2f} to {each[-1]:+.2f}", *gaps)
    yield ""


def role_table(results):
    """Stored bytes by role, in % of the role's own."""
    kinds = sorted({kind for result in results for found in result["profiles"].values() if found["total"] for kind in found["total"]["kinds"]} - {"framing"})
    yield from head("task", "profile", "whole", *[kind.replace("_", " ") for kind in kinds], "framing, of the whole")
    for result in results:
        for profile, found in result["profiles"].items():
            if sums := found["total"]:
                part = lambda kind: sums["kinds"].get(kind, {"raw_bytes": 0, "stored_bytes": 0})
                own = [f"{100 * part(kind)['stored_bytes'] / part(kind)['raw_bytes']:.2f} %" if part(kind)["raw_bytes"] else "-" for kind in kinds]
                yield row(result["task"], profile, f"{100 * sums['share']:.2f} %", *own, f"{100 * part('framing')['stored_bytes'] / sums['raw_bytes']:.2f} %")
    yield ""


def verdicts(results, about):
    """One table per profile: do the promises hold?"""
    from .chains import PROMISES
    from .protocol import AHEAD
    from .gaps import SEEDS
    from .tasks import CALIBRATION, JUDGED

    chosen = ", ".join(f"`{task.name}`" for task in JUDGED if task.set == CALIBRATION)
    judges = about["set"] != CALIBRATION
    seeds = ", ".join(f"{count} of `{NAMES.get(profile, profile)}`" for profile, count in about["seeds"].items())
    asked = ",".join(f"{profile}={count}" for profile, count in about["seeds"].items())
    lines = ["# The cost of restores on series that did not choose the steps" if judges else "# The series that choose the steps", ""]
    lines += [f"These series only judge. They were written down before any result of them was known. Only {chosen} may choose steps; [steps.md](steps.md) says which did."
              if judges else "Only these may choose steps. Others judge them.", ""]
    if about["quick"]:
        lines += ["**A smoke run: tiny models and few checkpoints. The numbers mean nothing.**", ""]
    lines += ["A run crashes nine times, 40 to 60 iterations apart, and each time resumes from a *released* checkpoint, read through the mount. Later checkpoints "
              "descend from it, so losses add up. Held-out losses judge each restore, 20 to 60 iterations after it or to the next crash. `Single states` has the losses of the "
              "states there. The other column has the loss of their mean: one state jumps about the path of its run, and the mean does not. The gap to the uninterrupted run, "
              "which had the same batches, is divided by the slope of its smoothed loss: iterations behind. A chain's number is the sum of that over its restores, divided by "
              "1 + 2 + ... + 9. `Iterations behind` is the mean of both estimates; they stand beside it.", "",
              "Chains begin at three places of each run. Each run has its own seed, from 1 on, and none is left out: "
              f"{seeds}. ± is the 95 % interval (Student's t). It is over the means of the seeds where there are {SEEDS} or more, because chains of one seed "
              "share the uninterrupted run. With fewer seeds it is over the chains. An aim is `met` when the upper end lies below it. It is `broken` when the whole interval lies "
              "above it. Else it is `not shown`: the noise is too large to tell. `Upper end of each` is the higher upper end of the two estimates. That rule is stricter, and it judged the first set. "
              "`On training batches` takes the losses before each update. `Least to most` gives the lowest and the highest chain. `Gap, k` is a difference of held-out losses k iterations "
              "after a restore: the restored run less the uninterrupted run, over all restores of all chains. Sizes are means of 32 released files of seed 1. "
              f"Build {about['build']}. Made by `scripts/resume_study.sh --judge {about['set']} --seeds {asked}`.", ""]
    lines += [f"- `{result['task']}`: {result['what']}" for result in results] + [""]
    for profile in about["seeds"]:
        lines += [f"## `{profile}`" if profile != ULP else f"## {NAMES[ULP]}", "", *verdict_table(results, profile, PROMISES.get(profile.removeprefix(AHEAD)))]
    return "\n".join([*lines, "## Sizes by role", "", "Each role in % of its own raw bytes; the whole with stubs.", "", *role_table(results)])


def pictures(results, out):
    from . import plots  # matplotlib is only needed here

    for result in results:
        longest = {profile: runs[max(runs)] for profile, runs in result["runs"].items() if runs and profile != ULP}
        if longest:
            plots.losses(result["what"], result["base"], longest, out / f"loss_{result['task']}.png")
    plots.behind(results, out / "iterations_behind.png")
    plots.sizes(results, out / "sizes.png")
