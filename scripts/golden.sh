#!/usr/bin/env bash
# Makes new golden stores, for a format that no release has written.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
find tests/golden -mindepth 1 -maxdepth 1 -type d -exec rm -r {} +
STEPFS_GOLDEN="$ROOT/tests/golden" cargo test --locked --test at_rest -- can_be_archived_today
exec cargo test --locked --test at_rest -- golden::
