#!/usr/bin/env bash
# Prove that training survives restores from lossy checkpoints: train, crash, resume from released checkpoints, and compare with
# the uninterrupted run. Prints tables; fails when a run under `exact` differs in any bit.
#   scripts/resume_study.sh [--quick] [--tasks LIST] [--profiles LIST] [--out DIR] ...      (scripts/resume_study.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
# For the pictures only, so setup.sh does not install it.
"$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
exec "$PYTHON" scripts/resume_study.py "$@"
