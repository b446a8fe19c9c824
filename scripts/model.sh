#!/usr/bin/env bash
# N generated histories (default 10,000) against the model and a plain directory, half of them with kernel passthrough and half
# without, from SEED (default 1) on. Then as many again, a third of each, in several threads at once. Failures are shrunk.
#   scripts/model.sh [N] [SEED]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
N=${1:-10000}
export STEPFS_MODEL_HISTORIES=$(((N + 1) / 2)) STEPFS_MODEL_SEED=${2:-1}
cargo test --locked --quiet --test model -- --nocapture histories_with
export STEPFS_MODEL_HISTORIES=$(((N + 5) / 6))
exec cargo test --locked --quiet --test model -- --nocapture threads_with
