"""stepfs's own profiles beside every published system: sizes of each series, and the cost of restores."""

import math

from study.report import head, number, row

from .lab import weight_share

OURS = ("balanced", "compact")
SERIES = ("gpt_i25", "gpt_i1", "gpt_bf16", "lenet_sgd5", "lenet_momentum5", "mlr_sgd5", "recommend")
SYSTEMS = (*OURS, "lc-2", "lc-3", "scar-5", "scar-10", "topn-5", "topn-10", "check-n-run-2", "check-n-run-4", "inshrinkerator-3", "inshrinkerator-4", "qd-compressor",
           "delta-dnn-2", "delta-dnn-3", "gobo-3")  # fmt: skip
# Restores of each series.
RESTORED = {"mlr_sgd5": 10, "lenet_sgd5": 10, "recommend": 10, "lenet_momentum5": 10, "gpt_i25": 9, "gpt_i1": 9, "gpt_bf16": 9}
# In these series a run with restores takes minutes. So only systems run whose weights are smaller than one of ours, or not much
# larger; the others cannot win.
SLOW = ("gpt_i25", "gpt_i1", "gpt_bf16")
MUCH = 1.1
QUICK = {"series": ("mlr_sgd5",), "systems": (*OURS, "lc-3", "inshrinkerator-4"), "restores": 2}


NOTES = {
    "gpt_i1": "All 33 checkpoints lie within 33 iterations, so the cost of a restore is the noise of as many steps, and a figure below 0 is "
              "luck. At best the gap at the end tells systems apart, and there `balanced` is ahead of all.",
}


def measure(lab):
    answer = {}
    for name in QUICK["series"] if lab.quick else SERIES:
        task = lab.task(name)
        found = {system: {"sizes": lab.sizes(task, system)} for system in (QUICK["systems"] if lab.quick else SYSTEMS)}
        for system in found:
            restored = lab.quick or is_restored(name, system, found)
            chain = lab.chain(task, system, QUICK["restores"] if lab.quick else RESTORED[name]) if restored else None
            found[system]["chain"] = chain and {what: chain[what] for what in ("restores", "per_restore", "behind", "end_gap", "late_gap")}
        answer[name] = {"what": task.what, "systems": found}
    return answer


def is_restored(name, system, found):
    if name not in SLOW or system in OURS:
        return True
    share = lambda system: weight_share(found[system]["sizes"]) if found[system]["sizes"] else None
    ours = [share(own) for own in OURS]
    return share(system) is None or None in ours or share(system) < MUCH * max(ours)


def markdown(found):
    yield "## stepfs beside all of them"
    yield ""
    yield ("Whole files: objects and stubs of all released checkpoints of a series, the first one included, in % of the raw bytes. Weights: "
           "the weights' part of it, in % of their raw bytes. The third column leaves out the first keyframe, which LC-Checkpoint, SCAR, TOPN"
           " and Delta-DNN keep whole. No paper covers optimizer state, so theirs is lossless, and whole files compare weights fairly only "
           "without it (SGD). Behind, a restore: iterations that each restore costs (docs/QUALITY.md), with the 95% interval of one run's "
           "restores, which are not independent. Gap at the end: held-out loss less the uninterrupted run's. Below each table stand the published "
           "systems that are smaller than a profile of stepfs.")
    yield ""
    for name, series in found.items():
        yield f"### {name}: {series['what']}"
        yield ""
        yield from head("system", "whole files", "weights", "weights without the first", "restores", "behind, a restore", "behind, in total", "gap at the end")
        for system, one in series["systems"].items():
            report, chain = one["sizes"], one["chain"]
            share = lambda value: f"{100 * value:.2f}%" if value is not None else "-"
            sizes = [share(report["total"]["share"]), share(weight_share(report, True)), share(weight_share(report))] if report else ["not run"] * 3
            cost = [chain["restores"], number(chain["per_restore"], "+.2f"), number(chain["behind"], "+.1f"), number(chain["end_gap"])] if chain else ["", *["not run"] * 3]
            yield row(f"**{system}**" if system in OURS else system, *sizes, *cost)
        yield ""
        if name in NOTES:
            yield NOTES[name]
            yield ""
        for own in OURS:
            for kind, size in (("whole files", lambda one: one["sizes"]["total"]["share"]), ("weights", lambda one: weight_share(one["sizes"]))):
                yield verdict(series["systems"], own, kind, size)
        yield ""
    yield "![weights](comparison/ours_weights.png)"
    yield ""


def verdict(systems, own, kind, size):
    """A line: the published systems that are smaller than one of ours, and whether their restores cost no more."""
    ours = systems.get(own)
    if not ours or not ours["sizes"]:
        return f"- `{own}`, {kind}: not run."
    smaller = [name for name, one in systems.items() if name not in OURS and one["sizes"] and size(one) < size(ours)]
    missing = [name for name, one in systems.items() if not one["sizes"]]
    known = f" (not run: {', '.join(missing)})" if missing else ""
    if not smaller:
        return f"- `{own}`, {kind}: smaller than every published system{known}."
    words = {True: "restores cost more", None: "restores were not compared", UNTOLD: "restores cost more by the mean, within the intervals"}
    groups = {}
    for name in smaller:
        groups.setdefault(costs_more(systems[name]["chain"], ours["chain"]), []).append(f"{name} ({100 * size(systems[name]):.2f}%)")
    parts = [f"**Smaller at equal or better loss: {', '.join(groups[False])}.**"] if False in groups else []
    parts += [f"Smaller, but {text}: {', '.join(groups[cost])}." for cost, text in words.items() if cost in groups]
    return f"- `{own}` ({100 * size(ours):.2f}%), {kind}{known}. {' '.join(parts)}"


UNTOLD = "untold"


def costs_more(chain, ours):
    """Whether restores cost more iterations than ours: False if the means say no, UNTOLD if the difference is less than both
    intervals, None if either was not run.
    """
    if not chain or not ours or chain["per_restore"][0] is None or ours["per_restore"][0] is None:
        return None
    (theirs, half), (own, own_half) = chain["per_restore"], ours["per_restore"]
    if theirs <= own:
        return False
    return True if theirs - own > math.hypot(half or 0, own_half or 0) else UNTOLD


def pictures(found, out):
    from . import plots

    panels = {}
    for name, series in found.items():
        bars = [(system, (100 * weight_share(one["sizes"]), None)) for system, one in series["systems"].items() if one["sizes"]]
        if bars:
            panels[name] = bars
    plots.bars(panels, "weights without the first, % of raw", out / "ours_weights.png", log=True)
