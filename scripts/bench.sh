#!/usr/bin/env bash
# Measure stepfs against a plain directory on the same disk, or against another revision of itself. Prints a table; --json FILE
# writes the numbers too, --picture FILE draws them.
#   scripts/bench.sh [--quick] [--dir DIR] [--json FILE] ...      (scripts/bench.py --help)
#   scripts/bench.sh --against REV [--rounds N] ...               (scripts/bench_against.py --help)
#   scripts/bench.sh --release          measure everything and keep it in docs/bench.json and docs/bench.png
#   scripts/bench.sh --gate             fail if a ratio is below .85 of that release's in three runs, both in turns
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
scripts/setup.sh
command -v cargo >/dev/null || source "$HOME/.cargo/env"
case " $* " in
*" --gate "*) exec "$PYTHON" scripts/bench_against.py --only codec --rounds 3 --fail-below 0.85 ;;
*" --against"*) exec "$PYTHON" scripts/bench_against.py "$@" ;;
*" --release "*) set -- --json docs/bench.json --picture docs/bench.png ;;
esac
case " $* " in *" --picture"*)
    "$PYTHON" -c 'import matplotlib' 2>/dev/null || "$PYTHON" -m pip install --quiet --disable-pip-version-check matplotlib
    ;;
esac
cargo build --release --locked --quiet
exec "$PYTHON" scripts/bench.py --stepfs "$STEPFS" "$@"
