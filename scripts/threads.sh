#!/usr/bin/env bash
# Run what threads share (the inode table, the caches, the archive's queue) in many orders of the threads, by shuttle.
#   scripts/threads.sh [ORDERS]    so many orders of each test; 200 if nobody says
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
STEPFS_ORDERS=${1:-200} cargo test --locked --quiet --features shuttle --lib interleaved
