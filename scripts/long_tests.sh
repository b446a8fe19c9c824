#!/usr/bin/env bash
# The tests of real programs with the marker `nightly`, on the release's program: those that train models for a study, or take minutes
# and say nothing of most changes. Before them the libraries' tests with 2,048 random cases each.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
scripts/setup.sh nightly
build --bin stepfs --example published_figures
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
PROPTEST_CASES=2048 cargo test --release --locked --quiet --lib -p stepfs-codec -p stepfs-formats -p stepfs-papers
real -m nightly tests/real "$@"
