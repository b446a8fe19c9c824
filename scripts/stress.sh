#!/usr/bin/env bash
# Many programs at once on one mount: savers, readers, rm, mv, cp, stepfs commands, kills; everything seen is compared with
# what was written. Scenarios are files in tests/stress; all of them, one after the other, unless some are named.
#   scripts/stress.sh [SCENARIO...] [--seconds N] [--seed N] [--json FILE] ...      (scripts/stress.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
exec "$PYTHON" scripts/stress.py "$@"
