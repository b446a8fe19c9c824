#!/usr/bin/env bash
# Kill the daemon with SIGKILL at N random instants (default 100) in each mode (see common.sh), and check the store after each. Every
# third mount is without passthrough, so root has no run of its own for that.
#   scripts/kill.sh [N] [SEED] [MODE...]     default: the modes passthrough, helper and served
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
export STEPFS_KILLS=${1:-100}
[ -z "${2:-}" ] || export STEPFS_KILL_SEED=$2
modes=("${@:3}")
[ $# -gt 2 ] || modes=("${MODES[@]/daemon/}")
[[ " ${modes[*]} " != *" daemon "* ]] || die "every third mount is without passthrough: leave out the mode daemon"
for mode in ${modes[@]}; do
    section "$STEPFS_KILLS kills, $mode"
    in_mode "$mode" "$PYTHON" -m pytest "$ROOT/tests/real/faults/test_kill.py" -p no:cacheprovider -s
done
