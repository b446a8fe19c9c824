#!/usr/bin/env bash
# What stepfs makes of the checkpoints of many libraries, each with its own code: docs/FRAMEWORKS.md.
#   scripts/frameworks.sh [NAME...]    these writers only, and no page
#   scripts/frameworks.sh --list       their names
#   FRAMEWORKS_VENV=DIR                where the second environment lies; the default is .venv-frameworks/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
SECOND=$(realpath -m "${FRAMEWORKS_VENV:-$ROOT/.venv-frameworks}")
[ "${1:-}" != --list ] || exec "$PYTHON" scripts/frameworks/table.py --list
build
"$PYTHON" scripts/frameworks/table.py --needs-second "$@" && scripts/frameworks/install.sh "$SECOND"
export FRAMEWORKS_PYTHON=$SECOND/bin/python
exec "$PYTHON" scripts/frameworks/table.py "$@"
