"""LC-Checkpoint (Chen et al., ICML 2020): figures 3, 4 and 5."""

import numpy as np
import torch
from study import protocol
from study.report import head, number, row

from .lab import weight_share

TASKS = ("mlr_sgd5", "lenet_sgd5")
AT = {"5%": ("lc-2", "scar-5", "topn-5"), "10%": ("lc-3", "scar-10", "topn-10")}
OURS = ("balanced", "compact")
EXACT = "exact"
STAGED = (*TASKS, "lenet_momentum5", "recommend", "gpt_i25")
INTERVALS = (10, 20, 30, 40, 50, 60)  # m of figure 5, in iterations
FROM = 4  # checkpoint that figure 5's difference begins at
SHOWN = 8  # buckets of figure 5 in the table: 3 bits keep as many


def measure(lab):
    rework = {}
    for task in map(lab.task, TASKS[:1] if lab.quick else TASKS):
        rework[task.name] = {}
        for system in (EXACT, *sum(levels(lab.quick).values(), ()), *OURS):
            rework[task.name][system] = {"singles": lab.singles(task, system), "sizes": lab.sizes(task, system)}
    stages = {name: lab.figures(lab.task(name), "lc") for name in (TASKS[:1] if lab.quick else STAGED)}
    return {"rework": rework, "levels": levels(lab.quick), "stages": stages, "buckets": {TASKS[0]: kept_buckets(lab, lab.task(TASKS[0]))}}


def levels(quick):
    """Sizes at which rework is compared, with the systems."""
    return dict([*AT.items()][:1]) if quick else AT


def kept_buckets(lab, task):
    files = lab.series(task)
    # stepfs has no part in it.
    found = files and lab.get(f"{task.name}-buckets", task, lambda: {"buckets": buckets(task, files)}, "none")
    return found and found["buckets"]


def buckets(task, files):
    """Figure 5: relative error of the loss at u + difference if one bucket of the difference is 0, by bucket, for each m."""
    start = FROM if task.count > FROM + INTERVALS[-1] // task.every else 0
    u = protocol.load(files[start])
    names = list(u["model"])
    answer = {}
    for m in INTERVALS:
        place = start + m // task.every
        if place >= task.count or m % task.every:
            continue
        after = protocol.load(files[place])["model"]
        difference = {name: (after[name] - u["model"][name]).numpy() for name in names}
        flat = np.concatenate([part.ravel() for part in difference.values()])
        of = flat.view(np.uint32) >> 23
        exponents = sorted({int(bucket) & 255 for bucket in np.unique(of[flat != 0])}, reverse=True)
        truth = loss_at(task, u, {name: u["model"][name] + torch.from_numpy(difference[name]) for name in names})
        found = []
        for bucket in [bucket for exponent in exponents for bucket in (exponent, 256 + exponent)]:
            inside = (of == bucket) & (flat != 0)
            if not inside.any():
                continue
            moved, at = {}, 0
            for name in names:
                part = difference[name]
                keep = ~inside[at : at + part.size].reshape(part.shape)
                moved[name] = u["model"][name] + torch.from_numpy(part * keep)
                at += part.size
            loss = loss_at(task, u, moved)
            found.append({"exponent": (bucket & 255) - 127, "sign": "+-"[bucket >> 8], "elements": int(inside.sum()), "error": abs(truth - loss) / truth})
        answer[str(m)] = {"loss": truth, "parameters": int(flat.size), "zeros": int((flat == 0).sum()), "buckets": found}
    return {"from": task.iteration(start), "intervals": answer}


def loss_at(task, state, model):
    run = task.make(1)
    run.load({**state, "model": model})
    return run.measure()[0]


def percent(share, digits=2):
    return "not run" if share is None else f"{100 * share:.{digits}f}%"


def markdown(found):
    yield "## LC-Checkpoint (ICML 2020)"
    yield ""
    yield from figure_3(found)
    yield from figure_4(found)
    yield from figure_5(found)


def figure_3(found):
    yield "### Figure 3: rework at 5% and 10%"
    yield ""
    yield ("Rework counts the iterations from the restored state until the loss is as low as before the crash (section 4.2). Each "
           "restore reads another released checkpoint of the run through a mount. Given are the mean and its 95% interval. Weights: stored "
           "bytes in % of raw ones, without the first keyframe, which these systems need. Behind: iterations lost for good, by the gap of the"
           " held-out loss 10 and more iterations later (docs/QUALITY.md). Rework alone rewards states that happen to have a lower loss.")
    yield ""
    yield from head("task", "at", "system", "weights", "restores", "rework", "worst", "never back", "behind", "SCAR, TOPN / LC, of rework")
    for task, systems in found["rework"].items():
        for at, names in (("", (EXACT,)), *found["levels"].items(), ("", OURS)):
            lc = systems[names[0]]["singles"]
            for name in names:
                singles, sizes = systems[name]["singles"], systems[name]["sizes"]
                share = percent(weight_share(sizes) if sizes else None)
                if not singles:
                    yield row(task, at, name, share, *["not run"] * 5, "")
                    continue
                times = ""
                if at and name != names[0] and lc:
                    times = f"{singles['rework'][0] / lc['rework'][0]:.1f}x" if lc["rework"][0] else "LC has none"
                yield row(task, at, name, share, singles["restores"], number(singles["rework"], ".2f"), singles["worst_rework"], singles["never_back"],
                          number(singles["behind"], "+.2f"), times)
    yield ""
    yield ("Published: at 5% LC-Checkpoint has 2.88 to 5.77 times less rework than SCAR and 2.17 to 4.06 times less than TOPN; at 10% 1.9 to "
           "4.82 and 1.52 to 2.17 times. Theirs are 50 repeats on MNIST and FashionMNIST (AlexNet and matrix factorization, too), with a "
           "checkpoint at each iteration. Ours are LeNet-5 and regression on drawn digits, with a checkpoint every 5 iterations. Our repeats "
           "are restores from different checkpoints of one run, and rework is cut off at the largest measured offset. `scar` updates by "
           "turns, so with 5% a parameter is up to 20 checkpoints old. `topn` counts elements, and the place of each doubles its bytes. Where"
           " TOPN is ahead, it has three to five times the bytes. The size of LC-Checkpoint follows from the data, so it is not exactly 5% "
           "and 10%.")
    yield ""
    yield "![rework](comparison/lc_figure_3.png)"
    yield ""


def figure_4(found):
    yield "### Figure 4: what each stage contributes"
    yield ""
    yield ("Weights only, in % of fp32, mean over the differences of a series. E: log2 k bits each for k buckets, and the buckets' values "
           "(section 3.1.1). E + P: x bits each. E + P + H: bytes that the codec wrote. E + H: the same without promotion. Each chain "
           "continues from its own reconstruction.")
    yield ""
    yield from head("task", "x", "k", "E", "E + P", "E + P + H", "E + H", "P brings", "H brings")
    for task, figures in found["stages"].items():
        if not figures:
            yield row(task, *["not run"] * 8)
            continue
        for one in figures["promoted"]:
            gains = [f"{100 * (figures['e'] - one['ep']):.2f} points", f"{100 * (one['ep'] - one['eph']):.2f} points"]
            yield row(task, one["bits"], f"{figures['buckets']:.1f}", percent(figures["e"]), percent(one["ep"]), percent(one["eph"]), percent(figures["eh"]), *gains)
    yield row("published, mean", 2, "below 2^5", "15%", "5.7%", "below 5%", "", "9.26 points", "2 points")
    yield row("published, mean", 3, "below 2^5", "15%", "8.8%", "below 10%", "", "6.23 points", "1.6 points")
    yield ""
    yield ("Why ours differ: k counts every bucket of the whole model that has an element, both signs, and one stray element makes a bucket. "
           "A few rare buckets raise E, and cost Huffman codes next to nothing. E + P includes 2^x values of 32 bits for x bits.")
    yield ""
    yield "![stages](comparison/lc_figure_4.png)"
    yield ""


def figure_5(found):
    yield "### Figure 5: which buckets matter"
    yield ""
    yield ("Logistic regression: one bucket of the difference (of m iterations) is set to 0. The table has the relative error of the held-out"
           f" loss at u + difference, for the {SHOWN} buckets with the largest exponents, then the largest error of any other bucket.")
    yield ""
    columns = [f"bucket {n + 1}" for n in range(SHOWN)]
    yield from head("task", "m", "buckets", *columns, "any other")
    for task, figures in found["buckets"].items():
        if not figures:
            yield row(task, *["not run"] * (SHOWN + 3))
            continue
        for m, one in figures["intervals"].items():
            errors = [f"{bucket['error']:.1e}" for bucket in one["buckets"]]
            rest = max((bucket["error"] for bucket in one["buckets"][SHOWN:]), default=0)
            yield row(task, m, len(errors), *(errors[:SHOWN] + ["-"] * (SHOWN - len(errors))), f"{rest:.1e}")
    yield ""
    for figures in found["buckets"].values():
        if figures:
            kept = {bits: [kept_error(one["buckets"], bits) for one in figures["intervals"].values()] for bits in (2, 3)}
            parts = [f"{bits} bits keep {100 * min(shares):.0f} to {100 * max(shares):.0f}%" for bits, shares in kept.items()]
            yield f"Of the sum of all buckets' errors, {' and '.join(parts)} (the 2^x - 1 buckets with the largest exponents)."
            yield ""
    yield ("Published: the buckets farthest from 0 have the largest errors for all m, and 3 bits (8 buckets) hold all that have an effect. "
           "The largest exponents of our differences have few elements each, so our error peaks some buckets below the largest.")
    yield ""
    yield "![buckets](comparison/lc_figure_5.png)"
    yield ""


def kept_error(found, bits):
    total = sum(bucket["error"] for bucket in found)
    return sum(bucket["error"] for bucket in found[: 2**bits - 1]) / total if total else 1.0


def pictures(found, out):
    from . import plots

    panels = {}
    for task, systems in found["rework"].items():
        bars = [(name, systems[name]["singles"]["rework"]) for name in (*sum(found["levels"].values(), ()), *OURS) if systems[name]["singles"]]
        if bars:
            panels[task] = bars
    plots.bars(panels, "rework, iterations", out / "lc_figure_3.png")
    stages = {}
    for task, figures in found["stages"].items():
        if figures:
            stages[task] = [("E", (100 * figures["e"], None))]
            for one in figures["promoted"]:
                stages[task] += [(f"E+P, {one['bits']}", (100 * one["ep"], None)), (f"E+P+H, {one['bits']}", (100 * one["eph"], None))]
    plots.bars(stages, "% of fp32", out / "lc_figure_4.png")
    for task, figures in found["buckets"].items():
        if figures:
            lines = {f"m = {m}": (list(range(1, len(one["buckets"]) + 1)), [bucket["error"] for bucket in one["buckets"]]) for m, one in figures["intervals"].items()}
            plots.lines({task: lines}, "bucket, by exponent from the largest on", "relative error", out / "lc_figure_5.png", log=True)
