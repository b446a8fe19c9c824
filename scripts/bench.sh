#!/usr/bin/env bash
# Measure stepfs against a plain directory on the same disk. Prints a table; --json FILE writes the numbers too.
#   scripts/bench.sh [--quick] [--dir DIR] [--json FILE] ...      (scripts/bench.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
scripts/setup.sh
command -v cargo >/dev/null || source "$HOME/.cargo/env"
cargo build --release --locked --quiet
exec "$PYTHON" scripts/bench.py --stepfs "$STEPFS" "$@"
