"""Pictures of the comparison: bars with intervals, and lines, a panel for each task."""

from study.plots import plt, save


def _panels(count, width=6.5, height=4.2):
    columns = min(2, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")
    for axis in list(axes.flat)[count:]:
        axis.axis("off")
    return figure, axes.flat


OURS, THEIRS = "#dd8452", "#4c72b0"


def bars(panels, label, path, log=False):
    """`panels`: title to [(name, (value, half width of its interval or None))]. stepfs's own profiles have their own colour."""
    if not panels:
        return
    figure, axes = _panels(len(panels))
    for axis, (title, found) in zip(axes, panels.items()):
        values = [value for _, (value, _) in found]
        halves = [half or 0 for _, (_, half) in found]
        colours = [OURS if name in ("balanced", "compact") else THEIRS for name, _ in found]
        axis.bar(range(len(found)), values, yerr=halves if any(halves) else None, capsize=3, color=colours)
        axis.set_xticks(range(len(found)), [name for name, _ in found], rotation=40, ha="right", fontsize=10)
        axis.set(title=title, ylabel=label)
        if log:
            axis.set_yscale("log")
    save(figure, path)


def lines(panels, across, up, path, log=False):
    """`panels`: title to {name: (x, y)}."""
    panels = {title: found for title, found in panels.items() if found}
    if not panels:
        return
    figure, axes = _panels(len(panels))
    for axis, (title, found) in zip(axes, panels.items()):
        for name, (x, y) in found.items():
            axis.plot(x, y, ".-", label=name, linewidth=1.4)
        axis.set(title=title, xlabel=across, ylabel=up)
        if log:
            axis.set_yscale("log")
        axis.legend(fontsize=9)
    save(figure, path)
