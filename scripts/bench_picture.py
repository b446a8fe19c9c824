"""The picture of a benchmark's report: each row's ratio, with its spread."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Rows of `examples/speed` that are drawn, and their words.
STAGES = {
    "state 2: encode, all roles": "encode a difference",
    "state 2: verify": "read back and compare",
    "state 2: all stages": "all stages",
    "state 2: all stages with SHA-256": "all stages with SHA-256",
    "state 0, decoded: from the page cache, whole file": "decode a keyframe, page cache",
    "state 2, decoded: from the page cache, whole file": "decode a chain of 3, page cache",
    "state 2, decoded: with its base in memory, whole file": "decode, base in memory",
}


def of_codec(rows):
    """Bars by variant."""
    for name, row in rows.items():
        variant, _, stage = name.partition(": ")
        if stage in STAGES:
            yield variant, STAGES[stage], row


def of_disk(results):
    for r in results:
        if r["name"] in ("save", "again", "load"):
            yield {"save": "torch.save", "again": "torch.save right after another", "load": "torch.load, resident"}[r["name"]], r["ratio"]
        elif r["name"] == "writes":
            size = f"{r['piece'] >> 20} MiB" if r["piece"] >= 1 << 20 else f"{r['piece'] >> 10} KiB"
            yield f"writes of {size}, {r['how']}", r["ratio"]
        elif r["name"] == "chain":
            yield f"cold read, chain of {r['objects']}" + (f", disk of {r['disk'] / 1e9} GB/s" if "disk" in r else ""), r["ratio"]


def draw(report, path):
    codec = [row for r in report["results"] if r["name"] == "codec" for row in of_codec(r["rows"])]
    disk = list(of_disk(report["results"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    variants, stages = list(dict.fromkeys(row[0] for row in codec)), list(STAGES.values())
    for number, variant in enumerate(variants):
        bars = [(stages.index(stage) + (number - len(variants) / 2) * 0.2, row) for of, stage, row in codec if of == variant]
        medians = [row["median"] for _, row in bars]
        ends = [[row["median"] - row["least"] for _, row in bars], [row["largest"] - row["median"] for _, row in bars]]
        left.barh([at for at, _ in bars], medians, height=0.2, xerr=ends, label=variant)
    left.set_yticks(range(len(stages)), stages)
    left.set_xlabel(f"ratio to memcpy, one core ({report['processor']})")
    left.legend()
    right.barh([name for name, _ in disk], [ratio for _, ratio in disk])
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xlabel("ratio to a plain directory on the same disk")
    for axes in (left, right):
        axes.invert_yaxis()
    figure.savefig(path, dpi=80)
