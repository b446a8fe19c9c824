"""`stepfs metrics`: the numbers of `status` for Prometheus."""

import json
import os
import re
import shutil
import stat
import subprocess

import harness
import pytest
from harness import BIN, LET_GO, OK, run, run_json, wait_until
from series import save_walk

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SAMPLE = re.compile(r'(stepfs_[a-z_]+)\{mount="((?:[^"\\\n]|\\.)*)",store="((?:[^"\\\n]|\\.)*)"\} (\d+(?:\.\d+)?)')
DASHBOARD = harness.ROOT / "packaging/grafana.json"


def parsed(text):
    """{name: {mount: number}} of the text format, whose rules it checks. Debian's promtool checks them too, if it is there."""
    numbers, declared = {}, None
    for line in text.splitlines():
        if line.startswith("# HELP"):
            declared = line.split()[2]
            assert declared not in numbers and line.endswith("."), line
        elif line.startswith("# TYPE"):
            assert line == f"# TYPE {declared} gauge"
        else:
            name, mount, _, number = SAMPLE.fullmatch(line).groups()
            assert name == declared
            numbers.setdefault(name, {})[mount] = float(number)
    assert text.endswith("\n")
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
    return numbers


def test_the_numbers_are_those_of_status(mount):
    mount.umount()
    settings = mount.store / "stepfs.toml"
    settings.write_text(settings.read_text().replace('# trash_for = "1d"', 'trash_for = "1d"'))
    mount.mount()
    names = save_walk(mount.dir, 5)
    mount.sync()
    (mount / names[0]).unlink()
    mount.sync()
    numbers, status = parsed(run("metrics").stdout), run_json("status", "--json", mount.dir)
    mine = {name.removeprefix("stepfs_"): of[str(mount.dir)] for name, of in numbers.items() if str(mount.dir) in of}
    assert mine["up"] == 1 and mine["released_files"] == status["released"] == 4 and mine["problems"] == len(status["problems"])
    same = ("files", "logical_bytes", "object_bytes", "resident_bytes", "stored_bytes", "trash_bytes")
    assert all(mine[name] == status[name] for name in same)
    assert (mine["trash_files"], mine["last_save_seconds"]) == (1, status["saves"][0]["milliseconds"] / 1000)
    assert "mirror_lag_seconds" not in mine


def test_a_daemon_that_died_is_down(mount):
    mount.kill()
    wait_until(lambda: parsed(run("metrics").stdout)["stepfs_up"].get(str(mount.dir)) == 0, 30, "it is shown as down")
    assert str(mount.dir) not in parsed(run("metrics").stdout).get("stepfs_files", {})


@needs_root
def test_root_is_told_of_mounts_that_it_may_not_ask(plain):
    """The kernel keeps root out of a user's mount. It is no mount that is down."""
    os.chmod(plain, 0o777)
    os.mknod(plain / "fuse", 0o666 | stat.S_IFCHR, os.makedev(10, 229))
    os.chmod(plain / "fuse", 0o666)
    user = f"setpriv --reuid 65534 --regid 65534 --clear-groups {BIN}"
    script = f"{LET_GO}; mount --bind {plain}/fuse /dev/fuse; {user} mount {plain}/store {plain}/mnt; {BIN} status; {BIN} metrics"
    done = subprocess.run(["unshare", "--mount", "bash", "-euc", f"{script}; {user} umount {plain}/mnt"], capture_output=True, text=True)
    assert done.returncode == OK and "the kernel keeps root out" in done.stderr and "stepfs_up" not in done.stdout, done


def test_the_dashboard_shows_the_numbers_that_there_are():
    asked = set(re.findall(r"stepfs_[a-z_]+", DASHBOARD.read_text()))
    source = (harness.ROOT / "src/cli/metrics.rs").read_text()
    assert asked == {f"stepfs_{name}" for name in re.findall(r'(?m)^    \("([a-z_]+)", "', source)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert all(target["expr"] for panel in panels for target in panel["targets"])
