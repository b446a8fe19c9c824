#!/usr/bin/env bash
# Measures each optimizer's checkpoints: stored share, codec of each slot, and iterations behind after a restore. Installs the
# optimizers' packages. Prints the table of docs/OPTIMIZERS.md.
#   scripts/optimizers.sh [--only NAME...] [--seeds N]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
# Large, so setup.sh does not install them. Without their dependencies: torch is there, in the version of the tests.
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps \
    bitsandbytes torchao
exec "$PYTHON" scripts/optimizers.py "$@"
