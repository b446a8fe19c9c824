"""A slower disk: a limit on the reads of this process and of the programs that it starts, by a control group. Needs root.

Groups of version 2 are written as the kernel's documentation says; the figures of docs/PERFORMANCE.md are from version 1.
"""

import contextlib
import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def disk_of(folder):
    """MAJOR:MINOR of the whole disk below a folder: the kernel limits no partition."""
    device = os.stat(folder).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    if (block / "partition").exists():
        block = block.parent
    return (block / "dev").read_text().strip()


@contextlib.contextmanager
def reads_limited(folder, bytes_per_second):
    """Limit reads of the disk below `folder`. Fails with OSError where that is not possible; no reads are limited then.

    At the end this process returns to the group that it came from, and so do programs that still run.
    """
    disk = disk_of(folder)
    of_process = [entry.split(":", 2) for entry in Path("/proc/self/cgroup").read_text().splitlines()]
    if (GROUPS / "blkio").is_dir():
        parent, controllers, limit, line = GROUPS / "blkio", "blkio", "blkio.throttle.read_bps_device", f"{disk} {bytes_per_second}"
    else:
        parent, controllers, limit, line = GROUPS, "", "io.max", f"{disk} rbps={bytes_per_second}"
        (GROUPS / "cgroup.subtree_control").write_text("+io")
    home = parent / next((path for _, names, path in of_process if names == controllers), "/").lstrip("/")
    group = parent / f"stepfs-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(process)
        group.rmdir()
