"""Inshrinkerator (Agrawal et al. 2023): figure 12 and table 7."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from study import protocol
from study.report import head, row

CODED = ("gpt_i25", "lenet_sgd5", "recommend")
BINNED = ("lenet_sgd5", "recommend", "gpt_i25")
BINS = "8"  # of figure 12
CHECKPOINTS = 3  # of table 7, spread over the run
THRESHOLDS = (0.001, 0.01, 0.05)
METHODS = {"adaptive": "adaptive rows (Check-N-Run)", "uniform": "uniform (QD-Compressor)", "k-means": "k-means, L1 (GOBO)", "inshrinkerator": "Inshrinkerator"}
STAGES = {"huffman": "Huffman", "rle": "run lengths, Huffman", "rearranged": "rearranged, run lengths, Huffman"}


def measure(lab):
    small = ("lenet_sgd5",)
    coded = {name: lab.figures(lab.task(name), "stages", BINS) for name in (small if lab.quick else CODED)}
    return {"coded": coded, "bins": {name: bins(lab, lab.task(name)) for name in (small if lab.quick else BINNED)}}


def bins(lab, task):
    """For each method and threshold, the fewest bins that suffice, for each of some checkpoints; None if no number does."""
    files = lab.series(task)
    if not files:
        return None
    count = 1 if lab.quick else CHECKPOINTS
    places = sorted({(2 * n + 1) * task.count // (2 * count) for n in range(count)})
    return lab.measured(f"{task.name}-bins-{count}", task, lambda: {"checkpoints": [fewest(lab, task, files[place]) for place in places]})


def fewest(lab, task, file):
    state = protocol.load(file)
    run = task.make(1)
    run.load(state)
    exact = run.measure()[0]
    with tempfile.TemporaryDirectory(prefix="stepfs-bins-", dir=lab.where) as folder:
        written = lab.call("bins", folder, file)
        tried = {}
        for method in METHODS:
            tried[method] = []
            for one in sorted((one for one in written["files"] if one["method"] == method), key=lambda one: one["bins"]):
                loss = degraded(task, state, written["tensors"], Path(one["path"]))
                tried[method].append((one["bins"], (loss - exact) / exact))
                if tried[method][-1][1] <= min(THRESHOLDS):
                    break
    first = lambda method, threshold: next((bins for bins, worse in tried[method] if worse <= threshold), None)
    return {"iteration": state["step"], "loss": exact, "tried": tried, "fewest": {method: [first(method, threshold) for threshold in THRESHOLDS] for method in METHODS}}


def degraded(task, state, tensors, path):
    """Held-out loss with the weights of such a file in place of the checkpoint's."""
    values, at, model = np.fromfile(path, dtype=np.float32), 0, dict(state["model"])
    for tensor in tensors:
        size = int(np.prod(tensor["shape"]))
        part = torch.from_numpy(values[at : at + size]).reshape(tensor["shape"])
        at += size
        for name in tensor["paths"]:
            name = name.removeprefix("model/")
            if name in model:
                model[name] = part
    assert at == values.size, f"{path}: {values.size} values for {at}"
    run = task.make(1)
    run.load({**state, "model": model})
    return run.measure()[0]


def markdown(found):
    yield "## Inshrinkerator (2023)"
    yield ""
    yield from figure_12(found["coded"])
    yield from table_7(found["bins"])


def ratios(figures, stage):
    return [figures["raw"] / size for size in figures["stages"][stage]]


def figure_12(coded):
    yield "### Figure 12: stages of the delta encoder"
    yield ""
    yield (f"How many times smaller than fp32 the weights become with {BINS} bins (embeddings: 16), 10% pruned and .05% protected, by stages "
           "of the encoder. All: over all checkpoints of a series. Least and most: of a checkpoint after the first.")
    yield ""
    yield from head("task", *[f"{stage}: all" if not n else f"{stage}: {words}" for stage in STAGES.values() for n, words in enumerate(("all", "least", "most"))])
    for task, figures in coded.items():
        cells = []
        for stage in STAGES:
            if figures:
                each = ratios(figures, stage)[1:]
                whole = figures["raw"] * len(figures["stages"][stage]) / sum(figures["stages"][stage])
                cells += [f"{whole:.1f}x", f"{min(each):.1f}x", f"{max(each):.1f}x"]
            else:
                cells += ["not run"] * 3
        yield row(task, *cells)
    yield row("published, ResNet-152", "25x", "", "30x", "28x", "", "79x", "39x", "", "366x")
    yield ""
    yield ("Why ours differ: theirs rise to hundreds of times at the end of 90 epochs, when hardly a weight changes its bin between two "
           "checkpoints. Their search chooses bins and pruning (up to 40%). Ours are the first hundreds of iterations of small models with a "
           "fixed configuration. k-means makes other centroids of each checkpoint, so more weights change their bins. Where rearranging gains"
           " nothing over run lengths, two reasons are likely. Each group of each tile has its own code table, a cost for small tensors. In "
           "embeddings, changes lie together row by row, and rearranging scatters them. Where all weights move (the checkpoints that compress"
           " least), it does gain.")
    yield ""
    yield "![stages](comparison/inshrinkerator_figure_12.png)"
    yield ""


def table_7(found):
    yield "### Table 7: bins that a quality takes"
    yield ""
    yield (f"The fewest bins with which the held-out loss of a checkpoint is at most .1%, 1%, 5% worse, as the mean over {CHECKPOINTS} "
           "checkpoints. Brackets tell how many checkpoints count, if no number of bins sufficed for the others. There is no pruning, and no "
           "minimum for embeddings. Tried are 2, 3, 4, 6, 8, 12, ... 192 bins; for Check-N-Run and GOBO, which have bits, the powers of two "
           "to 256. Weights, vectors and embeddings are treated alike.")
    yield ""
    yield from head("task", *[f"{name}: {100 * threshold:g}%" for threshold in THRESHOLDS for name in METHODS.values()])
    for task, one in found.items():
        cells = []
        for n in range(len(THRESHOLDS)):
            for method in METHODS:
                if one is None:
                    cells.append("not run")
                    continue
                each = [checkpoint["fewest"][method][n] for checkpoint in one["checkpoints"]]
                known = [bins for bins in each if bins is not None]
                part = f" ({len(known)} of {len(each)})" if len(known) < len(each) else ""
                cells.append(f"{sum(known) / len(known):.1f}{part}" if known else "none did")
        yield row(task, *cells)
    yield ""
    yield ("Published: at .1%, Inshrinkerator takes 13.1 bins for VGG19 and 21.4 for ResNet50, adaptive bins take 50.5 and 46.4. Uniform bins"
           " fail at strict thresholds. Adaptive ones take 2 to 4 times as many as Inshrinkerator. Why ours differ: three checkpoints of "
           "models with 60 thousand to 2 million parameters, early in training, where noise in the weights can even lower the held-out loss. "
           "Uniform bins do about as well as clusters where no outliers stretch a layer's range, which is likely after hundreds of "
           "iterations. Adaptive bins have a range for each row here, as in Check-N-Run, which costs bytes that the number of bins does not "
           "show. GOBO moves its clusters for the sum of distances, which serves the many small weights.")
    yield ""


def pictures(found, out):
    from . import plots

    panels = {}
    for task, figures in found["coded"].items():
        if figures:
            panels[task] = {name: (list(range(1, len(ratios(figures, stage)))), ratios(figures, stage)[1:]) for stage, name in STAGES.items()}
    plots.lines(panels, "checkpoint", "times smaller than fp32", out / "inshrinkerator_figure_12.png")
