#!/usr/bin/env bash
# All crashes and faults: every change of every history with many states of the device after it, each with another failure during
# recovery; and a fault at every call. Prints the counts.
#   scripts/crash.sh [SEEDS]      more seeds, more states (default 8)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
scripts/setup.sh
command -v cargo >/dev/null || source "$HOME/.cargo/env"
export STEPFS_CRASH_SEEDS=${1:-8} STEPFS_CRASH_EVERY=${1:-8} STEPFS_FAULT_STRIDE=1
exec cargo test --release --locked --quiet --test at_rest crash:: -- --nocapture
