#!/usr/bin/env bash
# Kill the daemon with SIGKILL at N random instants (default 100) and check the store after each.
#   scripts/kill.sh [N] [SEED]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
export STEPFS_KILLS=${1:-100}
[ -z "${2:-}" ] || export STEPFS_KILL_SEED=$2
exec "$PYTHON" -m pytest tests/real/faults/test_kill.py -p no:cacheprovider -s
