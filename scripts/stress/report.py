"""Counters of a run: a table for people, a dictionary for programs."""


def summary(run):
    daemon = {key: value for key, value in run.counts.items()}
    return {"scenario": run.scenario.name, "seed": run.scenario.seed, "seconds": run.scenario.seconds, "interrupted": run.interrupted,
            "failures": run.failures, "daemon": daemon, "actors": run.actors, "status": getattr(run, "status", None)}  # fmt: skip


def words(value):
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def table(run):
    """One line for each actor, its actions behind its name; then the daemon's own counts."""
    rows = sorted(run.actors.items())
    width = max([len(name) for name, _ in rows] + [8])
    lines = [f"  {name:<{width}}  " + ", ".join(f"{words(counts[what])} {what}" for what in sorted(counts)) for name, counts in rows]
    lines.append(f"  {'daemon':<{width}}  " + ", ".join(f"{value} {what}" for what, value in run.counts.items()))
    if status := getattr(run, "status", None):
        mb = lambda key: f"{status[key] / 1e6:.1f} MB"
        lines.append(f"  {'store':<{width}}  {status['files']} files, {status['released']} released; programs see {mb('logical_bytes')}, stored "
                     f"{mb('stored_bytes')}: {mb('resident_bytes')} resident, {mb('object_bytes')} objects ({mb('unnamed_bytes')} without a name)")
    errors = sum(counts.get("errors", 0) for counts in run.actors.values()) + len(run.failures)
    lines.append(f"  {'errors':<{width}}  {errors}")
    return "\n".join(lines)
