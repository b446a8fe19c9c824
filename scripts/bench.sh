#!/usr/bin/env bash
# Measure stepfs against a plain directory on the same disk, or against another revision of itself. Prints a table; --json FILE
# writes the numbers too.
#   scripts/bench.sh [--quick] [--dir DIR] [--json FILE] ...      (scripts/bench.py --help)
#   scripts/bench.sh --against REV [--rounds N] ...               (scripts/bench_against.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
scripts/setup.sh
command -v cargo >/dev/null || source "$HOME/.cargo/env"
case " $* " in *" --against"*) exec "$PYTHON" scripts/bench_against.py "$@" ;; esac
cargo build --release --locked --quiet
exec "$PYTHON" scripts/bench.py --stepfs "$STEPFS" "$@"
