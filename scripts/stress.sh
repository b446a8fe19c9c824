#!/usr/bin/env bash
# Many programs at once on one mount: savers, readers, rm, mv, cp, stepfs commands, kills. Everything they see is compared with
# the bytes written. Scenarios are files in tests/stress; without arguments all of them run, one after the other.
#   scripts/stress.sh [SCENARIO...] [--seconds N] [--seed N] [--json FILE] ...      (scripts/stress.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
build
exec "$PYTHON" scripts/stress.py "$@"
