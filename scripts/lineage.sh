#!/usr/bin/env bash
# Train a lineage of 256 checkpoints into a store, then remove the first, the last, a half, all but every 16th. Measures the cost
# of reads and the freed space, and checks that no other file changes. Prints a table; fails when a goal is missed.
#   scripts/lineage.sh [--raw DIR] [--dir DIR] [--json FILE] ...      (scripts/lineage.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
if [ -z "${STEPFS_SURVIVORS:-}" ]; then
    build --example survivors
    export STEPFS_SURVIVORS=$ROOT/target/release/examples/survivors
fi
exec "$PYTHON" scripts/lineage.py "$@"
