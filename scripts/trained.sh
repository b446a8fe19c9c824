#!/usr/bin/env bash
# The tests that train models for a study: restores of several tasks, and the comparison with papers, both in small. They say nothing
# about a change of the program that scripts/test.sh does not say, and take 4 minutes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build --bin stepfs --example published_figures
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
real -m nightly tests/real "$@"
