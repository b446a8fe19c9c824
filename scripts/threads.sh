#!/usr/bin/env bash
# Run shared structures (the inode table, the caches, the archive's queue) in many thread orders, by shuttle.
#   scripts/threads.sh [--if-changed] [ORDERS]    orders of each test (200); with --if-changed only if this branch, its last commit or
#                                                 the working tree changed files that share structures
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
if [ "${1:-}" = --if-changed ]; then
    shift
    # A branch begins where it left the main one. On the main branch the last commit counts. Without history all is new.
    base=$(git merge-base HEAD origin/HEAD 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || true)
    [ -n "$base" ] && [ "$base" != "$(git rev-parse HEAD)" ] || base=HEAD~1
    mapfile -t shared < <(git grep -l 'crate::sync' -- src)
    shared+=(src/sync.rs src/recall src/fs src/archive Cargo.lock)
    if git diff --quiet "$base" -- "${shared[@]}" 2>/dev/null; then
        note "no file with shared structures changed since $base; scripts/nightly.sh runs them"
        exit 0
    fi
fi
command -v cargo >/dev/null || source "$HOME/.cargo/env"
STEPFS_ORDERS=${1:-200} cargo test --locked --quiet --features shuttle --lib interleaved
