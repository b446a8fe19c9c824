"""The cost of restores: paired loss gaps, iterations behind, and the papers' rework.

The *paired gap* k iterations after a restore is the loss of the interrupted run less the uninterrupted one's. Both are of the
same iteration, on the same held-out examples, after the same batches. Divided by the slope of the uninterrupted run's smoothed
loss, it is a number of *iterations behind*. Both can be negative: a restore is also a small random step, and half of those
happen to help on a given set.
"""

import math
import statistics

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
       2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
LATE = 10  # from so many iterations after a restore on, its gap counts as lasting; earlier gaps also heal by themselves
FAR = 3  # beyond so many times the largest offset, the slope says nothing about the restore: the last segment is long
SPAN = 3  # bandwidth of the smoothing, in checkpoint intervals
LEAST_SPAN = 20  # but at least so many iterations


def t95(freedom):
    return T95[freedom - 1] if freedom <= len(T95) else 1.96


def mean_and_interval(values):
    """(mean, half width of its 95 % interval or None for fewer than two values)"""
    values = list(values)
    if len(values) < 2:
        return (values[0] if values else None), None
    return statistics.mean(values), t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def slope(held_out, iteration, every):
    """Change of the loss per iteration, smoothed: a line fitted with weights of a Gauss curve around `iteration`."""
    width = max(LEAST_SPAN, SPAN * every)
    points = [(int(n) - iteration, loss) for n, loss in held_out.items() if abs(int(n) - iteration) <= 3 * width]
    weights = [math.exp(-0.5 * (x / width) ** 2) for x, _ in points]
    total = sum(weights)
    x0 = sum(w * x for w, (x, _) in zip(weights, points)) / total
    y0 = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points))
    return sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points)) / spread


def behind(gap, fall):
    """Iterations behind; None where the loss does not fall, since the measure is undefined there."""
    return gap / -fall if fall < 0 else None


def of_segment(task, segment, base):
    """Gaps of one segment against the uninterrupted run, by iterations since the restore."""
    at = segment["at"]
    offsets = [k for k in task.offsets if str(at + k) in segment["held_out"]]
    held = {k: segment["held_out"][str(at + k)] - base["held_out"][str(at + k)] for k in offsets}
    train = {k: segment["train"][str(at + k)] - base["train"][str(at + k)] for k in offsets if k > 0}
    # Each training batch is small, but there is one at each iteration until the next crash.
    reach = min(segment["until"], at + FAR * max(task.offsets))
    batches = {n - at: segment["train"][str(n)] - base["train"][str(n)] for n in range(at + 1, reach + 1)}
    lasting = {k: gap for k, gap in batches.items() if k >= LATE} or batches
    middle = round(at + statistics.mean(lasting))
    steps = {k: behind(gap, slope(base["held_out"], at + k, task.every)) for k, gap in held.items()}
    late = [k for k in offsets if k >= LATE] or offsets[-1:]
    known = [steps[k] for k in late if steps[k] is not None]
    return {"at": at, "held_out": held, "train": train, "train_mean": statistics.mean(lasting.values()), "behind": steps,
            "train_behind": behind(statistics.mean(lasting.values()), slope(base["held_out"], middle, task.every)),
            "late_gap": statistics.mean(held[k] for k in late), "late_behind": statistics.mean(known) if known else None}


def end_gap(task, segment, base):
    return segment["held_out"][str(task.length)] - base["held_out"][str(task.length)]


def per_restore(rows, what="late_behind"):
    """Iterations that one restore costs: slope of `iterations behind` over `restores so far`, through the origin, and its 95 %
    interval. A chain never regains its loss, so its points are dependent, and the interval is rather too narrow.
    """
    points = [(n, row[what]) for n, row in enumerate(rows, 1) if row[what] is not None]
    if not points:
        return None, None
    squares = sum(n * n for n, _ in points)
    rate = sum(n * y for n, y in points) / squares
    if len(points) < 3:
        return rate, None
    rest = sum((y - rate * n) ** 2 for n, y in points) / (len(points) - 1)
    return rate, t95(len(points) - 1) * math.sqrt(rest / squares)


def of_runs(task, runs, bases):
    """Chains of restores, one run per seed, combined. Intervals are over seeds; with one seed over its last restores."""
    rows = [[of_segment(task, segment, base) for segment in run["segments"]] for run, base in zip(runs, bases)]
    # With the noise of one run, one restore says little: the total is the mean after the last third of them.
    tails = [row[-max(1, len(row) // 3) :] for row in rows]

    def together(what):
        known = [[row[what] for row in tail if row[what] is not None] for tail in tails]
        if len(known) == 1:
            mean, half = mean_and_interval(known[0])
            return mean, half if len(known[0]) > 2 else None
        return mean_and_interval(statistics.mean(one) for one in known if one)

    def rate(what):
        found = [per_restore(row, what) for row in rows]
        return found[0] if len(found) == 1 else mean_and_interval(one for one, _ in found if one is not None)

    offsets = {}
    for k in task.offsets:
        every = [row for chain in rows for row in chain]
        offsets[k] = {what: mean_and_interval(row[what][k] for row in every if k in row[what]) for what in ("held_out", "train")}
    same = sum(run["digest"] == base["digest"] for run, base in zip(runs, bases))
    return {"restores": len(rows[0]), "seeds": len(runs), "same_bits": same, "offsets": offsets, "rows": rows,
            "late_gap": together("late_gap"), "train_mean": mean_and_interval(row["train_mean"] for chain in rows for row in chain),
            "behind": together("late_behind"), "per_restore": rate("late_behind"),
            "train_behind": together("train_behind"), "train_per_restore": rate("train_behind"),
            "end_gap": mean_and_interval(end_gap(task, run["segments"][-1], base) for run, base in zip(runs, bases))}


def rework(segment, base):
    """(iterations until the loss returns to its value at the time of the checkpoint, was it within reach?)

    Chen et al. 2020, section 4.2: the number of iterations from the restored state to the lost state.
    """
    goal = base["held_out"][str(segment["at"])]
    for n in sorted(map(int, segment["held_out"])):
        if segment["held_out"][str(n)] <= goal:
            return n - segment["at"], True
    return segment["until"] - segment["at"], False


def of_singles(task, runs, bases):
    """Restores that do not add up: rework and gaps, with intervals over all of them, treated as independent."""
    pairs = [(segment, base) for run, base in zip(runs, bases) for segment in run["segments"]]
    rows = [of_segment(task, segment, base) for segment, base in pairs]
    found = [rework(segment, base) for segment, base in pairs]
    return {"restores": len(rows), "rework": mean_and_interval(n for n, _ in found), "worst_rework": max(n for n, _ in found),
            "never_back": sum(not back for _, back in found), "offsets": {k: mean_and_interval(row["held_out"][k] for row in rows) for k in task.offsets},
            "behind": mean_and_interval(row["late_behind"] for row in rows if row["late_behind"] is not None)}


ROUND = 0.25  # bandwidth of the smoothing of the loss over the logarithm of the iteration


def fall(bases, iteration):
    """Change of the loss per iteration, smoothed over a quarter of the run so far and over all seeds.

    A line through the loss over the logarithm of the iteration, since a training's loss is nearly straight there.
    """

    def of(base):
        points = [(math.log(int(n) / iteration), loss) for n, loss in base["held_out"].items() if abs(math.log(int(n) / iteration)) <= 3 * ROUND]
        weights = [math.exp(-0.5 * (x / ROUND) ** 2) for x, _ in points]
        total = sum(weights)
        x0 = sum(w * x for w, (x, _) in zip(weights, points)) / total
        return sum(w * (x - x0) * y for w, (x, y) in zip(weights, points)) / sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points)) / iteration

    return statistics.mean(of(base) for base in bases)


def of_chain(task, segments, base, bases):
    """Iterations that a restore of one chain costs. It is a quotient. Above: the sum over its restores of the iterations that the
    run is behind, 20 and more iterations after each. Below: the sum of the numbers of restores so far, 1 + 2 + ... That is the
    slope through the origin with weights 1 / n, because a chain's lag varies more, the more restores it had.

    `behind` uses the held-out loss of the mean of the states of those iterations, `states_behind` the mean of their losses,
    `both` the mean of the two. `train_behind` uses the losses on training batches before each update.
    """
    rows = []
    for n, segment in enumerate(segments, 1):
        at = segment["at"]
        first, last = task.window(at)
        gap = lambda n, what: segment[what][str(n)] - base[what][str(n)]
        each = lambda what, found: statistics.mean(gap(n, what) / -fall(bases, n) for n in found)
        name = f"{first}-{last}"
        row = {"restores": n, "behind": (segment["averaged"][name] - base["averaged"][name]) / -fall(bases, (first + last) // 2),
               "states_behind": each("held_out", [at + k for k in task.offsets if first <= at + k <= last]),
               "train_behind": each("train", range(first, last + 1)),
               "gaps": {k: gap(at + k, "held_out") for k in task.offsets if at + k <= last}}  # fmt: skip
        row["both"] = (row["behind"] + row["states_behind"]) / 2
        rows.append(row)
    restores = sum(row["restores"] for row in rows)
    return {"rows": rows, **{what: sum(row[what] for row in rows) / restores for what in ESTIMATES}}


ESTIMATES = ("both", "behind", "states_behind", "train_behind")
SEEDS = 6  # from so many seeds on, an interval is over their means


def by_seed(values, seeds):
    """One mean for each seed if there are `SEEDS` seeds; otherwise the values themselves."""
    if len(set(seeds)) < SEEDS:
        return list(values)
    pairs = list(zip(values, seeds))
    return [statistics.mean(value for value, of in pairs if of == seed) for seed in sorted(set(seeds))]


def judge(task, chains):
    """Chains of several seeds and starts together; each is one number. Chains of one seed are compared with the same run, so the
    interval is over the means of seeds. With few seeds it is over chains, treated as independent. `lower` and `upper` are the
    ends of the interval of `both`; `upper_each` is the larger upper end of its two parts.
    """
    seeds = [chain["seed"] for chain in chains]
    over = {what: mean_and_interval(by_seed([chain[what] for chain in chains], seeds)) for what in ESTIMATES}
    gaps = {}
    for k in task.offsets:
        found = [(statistics.mean(row["gaps"][k] for row in chain["rows"]), chain["seed"]) for chain in chains if k in chain["rows"][0]["gaps"]]
        gaps[k] = mean_and_interval(by_seed(*zip(*found))) if found else (None, None)
    end = lambda what, sign: None if over[what][1] is None else over[what][0] + sign * over[what][1]
    each = [end(what, 1) for what in ("behind", "states_behind")]
    return {"chains": len(chains), "seeds": len(set(seeds)), **over, "gaps": gaps, "each": [chain["both"] for chain in chains],
            "lower": end("both", -1), "upper": end("both", 1), "upper_each": None if None in each else max(each)}  # fmt: skip


def verdict(found, promise):
    """`met` if the interval lies below the promise, `broken` if it lies above, `not shown` otherwise."""
    if promise is None or found["upper"] is None:
        return None
    if found["upper"] <= promise:
        return "met"
    return "broken" if found["lower"] > promise else "not shown"
