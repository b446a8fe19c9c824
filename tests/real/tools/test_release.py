"""scripts/release.sh in a clone, with packages of its own: nothing is half done, and no golden store of a release changes."""

import json
import os
import subprocess

import pytest
from harness import ROOT, make_base, remove_base

pytestmark = pytest.mark.slow
PACKAGE = '#!/bin/sh\ncd "$(dirname "$0")/.."\nrm -rf target/package/ && mkdir -p target/package && echo program >target/package/stepfs.deb\n'
ME = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "me"), ("EMAIL", "me@here"))}


@pytest.fixture
def clone():
    base = make_base()
    git(base, "clone", "--quiet", "--no-local", "--no-tags", str(ROOT), "clone")
    (base / "clone/scripts/package.sh").write_text(PACKAGE)
    # The scripts of this checkout, even where they are not committed.
    for name in ("release.sh", "sbom.py", "common.sh"):
        (base / "clone/scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    git(base / "clone", "commit", "--quiet", "--all", "--message", "Make other packages")
    yield base / "clone"
    remove_base(base)


def git(folder, *words):
    return subprocess.run(["git", "-c", f"safe.directory={ROOT}/.git", "-c", f"safe.directory={ROOT}", *words], cwd=folder, check=True,
                          capture_output=True, text=True, env={**os.environ, **ME}).stdout


def release(folder, *words):
    return subprocess.run(["scripts/release.sh", *words], cwd=folder, capture_output=True, text=True, timeout=300,
                          env={**os.environ, **ME})


def test_a_release_is_whole_or_nothing(clone):
    version = subprocess.run("sed -n 's/^version = \"\\(.*\\)\"/\\1/p' Cargo.toml | head -1", shell=True, cwd=clone, text=True,
                             capture_output=True).stdout.strip()
    new = f"{version.split('.')[0]}.{int(version.split('.')[1]) + 1}.0"
    before = git(clone, "rev-parse", "HEAD")
    unchanged = lambda: (git(clone, "rev-parse", "HEAD"), git(clone, "tag", "--list", "v*")) == (before, "")
    for words, said in [((version,), f"must be above {version}"), (("next",), "such as 0.2.0"), ((), "such as 0.2.0"),
                        (("--packages", f"v{new}"), f"Cargo.toml has version {version}")]:
        done = release(clone, *words)
        assert done.returncode == 1 and said in done.stderr and unchanged(), (words, done)
    dry = release(clone, "--dry-run", new)
    assert dry.returncode == 0 and unchanged() and not git(clone, "status", "--porcelain"), dry
    package = clone / "target/package"
    assert sorted(path.name for path in package.iterdir()) == [
        "NOTES.md", "SHA256SUMS", "read_store.py", f"stepfs-{new}.cdx.json", "stepfs.deb"]
    subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=package, check=True)
    assert "### Added" in (package / "NOTES.md").read_text()
    bill = json.loads((package / f"stepfs-{new}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["version"] == new
    crates = {part["name"]: part for part in bill["components"]}
    assert crates["zstd"]["hashes"] and all(part.get("licenses") for part in crates.values()) and "proptest" not in crates
    done = release(clone, new)
    assert done.returncode == 0, done
    assert git(clone, "log", "-1", "--format=%s %D").startswith(f"Release {new} ") and git(clone, "tag") == f"v{new}\n"
    assert f'version = "{new}"' in (clone / "Cargo.toml").read_text() and f"\n## {new} - 20" in (clone / "CHANGELOG.md").read_text()
    assert release(clone, "--packages", f"v{new}").returncode == 0
    # From now on its golden stores stay.
    (clone / "tests/golden/adam/hashes.txt").write_text("other\n")
    git(clone, "commit", "--quiet", "--all", "--message", "Change a golden store")
    done = release(clone, "--dry-run", "9.0.0")
    assert done.returncode == 1 and f"golden stores of v{new} have changed: tests/golden/adam/hashes.txt" in done.stderr, done
