#!/usr/bin/env bash
# Damage every byte of the golden stores' objects in four ways, and every length and every part; then repair as much as possible.
# The tests do this with a sample. About an hour on two cores.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
STEPFS_CORRUPT=all exec cargo test --release --locked --test corruption -- "$@"
