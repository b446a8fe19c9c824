#!/usr/bin/env bash
# N random histories (default 20) of 2,000 operations each against a model of the tree, from SEED (default 1) on.
#   scripts/histories.sh [N] [SEED]        STEPFS_HISTORY_OPERATIONS=500 for shorter ones
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
export STEPFS_HISTORIES=${1:-20} STEPFS_HISTORY_SEED=${2:-1} STEPFS_HISTORY_OPERATIONS=${STEPFS_HISTORY_OPERATIONS:-2000}
exec "$PYTHON" -m pytest tests/real/life/test_histories.py -p no:cacheprovider -q -s
