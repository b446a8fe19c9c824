#!/usr/bin/env bash
# A trainer-like load on one daemon for SECONDS (default 3600), with a sample of its memory, descriptors, threads and store every
# few seconds. Fails when memory or descriptors grow, or a read gives other bytes than were written. Writes OUT/soak.json and
# OUT/soak.png; OUT is target/soak by default.
#   scripts/soak.sh [SECONDS] [--out DIR] [--seed N] ...      (scripts/soak.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
# For the picture only, so setup.sh does not install it.
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
exec "$PYTHON" scripts/soak.py "$@"
