#!/usr/bin/env bash
# Reproduce the published systems' figures, with stepfs's own profiles in the same tables: docs/COMPARISON.md and
# docs/comparison/*.png. Takes hours from nothing. --raw keeps finished runs for the next time.
#   scripts/compare_papers.sh [--quick] [--raw DIR] [--only lc,cnr,inshrinkerator,ours] ...      (scripts/compare_papers.py
#   --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build --bin stepfs --example published_figures
# For the pictures only, so setup.sh does not install it.
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
exec "$PYTHON" scripts/compare_papers.py "$@"
