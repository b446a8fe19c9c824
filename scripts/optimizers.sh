#!/usr/bin/env bash
# What stepfs makes of each optimizer's checkpoints: stored share, codec of each slot, and iterations behind after a restore.
# Installs the optimizers' packages. The table is docs/OPTIMIZERS.md's.
#   scripts/optimizers.sh [--only NAME...] [--seeds N]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
# Large, so setup.sh does not install them. Without what they ask for: torch is there, and of the version that the tests use.
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps \
    bitsandbytes torchao
exec "$PYTHON" scripts/optimizers.py "$@"
