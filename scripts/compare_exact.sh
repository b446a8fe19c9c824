#!/usr/bin/env bash
# Compare the profile `exact` with zstd -19 --patch-from and ZipNN, on the study's series. Prints a table.
#   scripts/compare_exact.sh --raw DIR [--count N] [TASK...]      (scripts/compare_exact.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
"$PYTHON" -c 'import zstandard, zipnn' 2>/dev/null || "$PYTHON" -m pip install --quiet zstandard zipnn
exec "$PYTHON" scripts/compare_exact.py "$@"
