#!/usr/bin/env bash
# The tests of real programs with the marker `nightly`, on the release's program: those that train models for a study, or take minutes
# and say nothing of most changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build --bin stepfs --example published_figures
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
real -m nightly tests/real "$@"
