#!/usr/bin/env bash
# Measure a store of 20,000 files: how soon a mount of it serves, and how much removing slows programs that save and read
# meanwhile.
# Prints a table; --json FILE writes the numbers too.
#   scripts/bench_store.sh [--quick] [--dir DIR] [--json FILE] ...      (scripts/bench_store.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
exec "$PYTHON" scripts/bench_store.py "$@"
