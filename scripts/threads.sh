#!/usr/bin/env bash
# Run shared structures (the inode table, the caches, the archive's queue) in many thread orders, by shuttle.
#   scripts/threads.sh [ORDERS]    orders of each test (200)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
STEPFS_ORDERS=${1:-200} cargo test --locked --quiet --features shuttle --lib interleaved
