"""compare_papers.py in small: it runs to the end, keeps finished runs, and its tables and pictures are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest
from harness import make_base, remove_base

FIGURES = Path(os.environ.get("STEPFS_FIGURES", harness.ROOT / "target/release/examples/published_figures"))


def figures_program():
    """The program that measures the codecs alone; built if only stepfs was."""
    if not FIGURES.exists():
        subprocess.run(["cargo", "build", "--release", "--locked", "--quiet", "--example", "published_figures"], cwd=harness.ROOT, check=True, timeout=1200)
    return FIGURES


def compare(base, *words):
    environment = {**os.environ, "STEPFS_BIN": harness.BIN, "STEPFS_FIGURES": str(figures_program())}
    command = [sys.executable, harness.ROOT / "scripts/compare_papers.py", "--quick", "--raw", base / "raw", "--dir", base, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.nightly
@pytest.mark.stepfs
def test_quick_comparison():
    pytest.importorskip("matplotlib", reason="scripts/compare_papers.sh installs it")
    base = make_base()
    try:
        done = compare(base, "--out", base / "out")
        assert done.returncode == 0, done.stderr
        text = (base / "out/COMPARISON.md").read_text()
        for figure in ("Figure 3:", "Figure 4:", "Figure 5:", "Figures 9 to 11", "Figure 14:", "Figures 15 to 17", "Figure 12:", "Table 7:", "### mlr_sgd5"):
            assert figure in text, figure
        tables = [line for line in text.splitlines() if line.startswith("| ")]
        assert not any("not run" in line for line in tables), text
        # `exact` loses nothing, so nothing runs again.
        assert re.search(r"\| mlr_sgd5 \|  \| exact \| [\d.]+% \| 4 \| 0.00 ", text), text
        linked = set(re.findall(r"\(comparison/(\w+\.png)\)", text))
        there = {path.name for path in (base / "out/comparison").iterdir()}
        assert linked == there and all((base / "out/comparison" / name).stat().st_size > 1000 for name in linked)
        again = compare(base, "--out", base / "again", "--minutes", "0")
        assert again.returncode == 0 and " ..." not in again.stderr, f"finished runs were done again:\n{again.stderr}"
        assert (base / "again/COMPARISON.md").read_text() == text
    finally:
        remove_base(base)


@pytest.mark.nightly
def test_what_was_not_run_is_not_made_up():
    """Without time nothing runs, and no table has a number of ours."""
    pytest.importorskip("torch")
    base = make_base()
    try:
        done = compare(base, "--minutes", "0", "--only", "lc,cnr,inshrinkerator")
        assert done.returncode == 0, done.stderr
        ours = [line for line in done.stdout.splitlines() if line.startswith("| ") and "published" not in line and "---" not in line]
        assert sum("not run" in line for line in ours) >= 20
        for line in ours:
            cells = {cell.strip() for cell in line.split("|")[2:-1]} - {"2.5x"}  # figure 17 has the published number beside ours
            assert not any(re.fullmatch(r"[-+\d.]+(%|x)?", cell) and "." in cell for cell in cells), line
    finally:
        remove_base(base)
