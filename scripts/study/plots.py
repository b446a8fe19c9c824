"""Pictures of the study: losses, iterations behind, bytes."""

import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

COLOURS = {"exact": "#4c72b0", "balanced": "#dd8452", "compact": "#55a868", "ulp": "#8c8c8c"}
STYLE = {"font.size": 13, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110}
plt.rcParams.update(STYLE)


def colour(profile):
    return COLOURS.get(profile, "#8172b3")


def curve(held_out):
    points = sorted((int(n), loss) for n, loss in held_out.items())
    return [n for n, _ in points], [loss for _, loss in points]


def losses(what, base, chains, path):
    """Held-out loss of the uninterrupted run and of the restored ones, and below their distance."""
    figure, (top, low) = plt.subplots(2, 1, figsize=(9, 7.5), sharex=True, height_ratios=(2, 1))
    iterations, loss = curve(base["held_out"])
    top.plot(iterations, loss, color="black", linewidth=3, alpha=0.3, label="never interrupted")
    for profile, run in chains.items():
        for n, segment in enumerate(run["segments"]):
            iterations, loss = curve(segment["held_out"])
            label = f"{profile}, {len(run['segments'])} restores" if n == 0 else None
            top.plot(iterations, loss, ".-", color=colour(profile), linewidth=1.2, markersize=4, label=label)
            common = [i for i in iterations if str(i) in base["held_out"]]
            low.plot(common, [segment["held_out"][str(i)] - base["held_out"][str(i)] for i in common], ".-", color=colour(profile), linewidth=1.2, markersize=4)
    for axis in (top, low):
        for segment in next(iter(chains.values()))["segments"] if chains else ():
            axis.axvline(segment["at"], color="black", linewidth=0.6, alpha=0.35)
    top.set(ylabel="held-out loss", title=what)
    if min(base["held_out"].values()) * 5 < max(base["held_out"].values()):
        top.set_yscale("log")
    top.legend()
    low.axhline(0, color="black", linewidth=0.8)
    low.set(xlabel="iteration (vertical lines: restores)", ylabel="gap")
    save(figure, path)


def behind(results, path):
    """Iterations behind after each restore of the longest chains, one panel per task; the mean over seeds."""
    shown = [result for result in results if result["chains"]]
    if not shown:
        return
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7 * columns, 4 * rows), squeeze=False, layout="constrained")
    for axis, result in zip(axes.flat, shown):
        for profile, by_count in result["chains"].items():
            chains = by_count[max(by_count)]["rows"]
            points = []
            for n in range(len(chains[0])):
                known = [chain[n]["late_behind"] for chain in chains if chain[n]["late_behind"] is not None]
                if known:
                    points.append((n + 1, statistics.mean(known)))
            if points:
                axis.plot(*zip(*points), "o-", color=colour(profile), label="1 ulp (control)" if profile == "ulp" else profile)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(title=result["task"], xlabel="restores so far", ylabel="iterations behind")
        axis.legend()
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    save(figure, path)


def sizes(results, path):
    """Stored bytes in % of raw ones, stacked by kind of tensor."""
    bars = [(f"{result['task']}\n{profile}", report["total"]) for result in results for profile, report in result["sizes"].items()]
    if not bars:
        return
    kinds = sorted({kind for _, sums in bars for kind in sums["kinds"]})
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.55 * len(bars)))
    left = [0.0] * len(bars)
    for number, kind in enumerate([*kinds, "stubs"]):
        parts = []
        for _, sums in bars:
            stored = sums["stub_bytes"] if kind == "stubs" else sums["kinds"].get(kind, {"stored_bytes": 0})["stored_bytes"]
            parts.append(100 * stored / sums["raw_bytes"])
        axis.barh(range(len(bars)), parts, left=left, color=plt.get_cmap("tab10")(number % 10), label=kind.replace("_", " "))
        left = [a + b for a, b in zip(left, parts)]
    for place, whole in enumerate(left):
        axis.text(whole + 0.8, place, f"{whole:.1f} %", va="center")
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.set(xlabel="released checkpoints, % of their raw bytes", xlim=(0, max(left) * 1.12))
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.45, -1.3 / (1.5 + 0.55 * len(bars))), ncols=4)
    save(figure, path)


def save(figure, path):
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
