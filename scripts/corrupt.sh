#!/usr/bin/env bash
# Damage every byte of the golden stores' objects in four ways, every length and every part, and repair what can be repaired: what
# the tests do with a sample. About an hour on two cores.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
STEPFS_CORRUPT=all exec cargo test --release --locked --test corruption -- "$@"
