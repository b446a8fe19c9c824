#!/usr/bin/env bash
# What stepfs makes of the checkpoints of many libraries, each with its own code. Exits with 1 if a library cannot go on from the newest
# checkpoint as from a plain directory, or rotates otherwise, or fails.
#   scripts/frameworks.sh [NAME...]          these writers only; without names all of them
#   scripts/frameworks.sh --page [NAME...]   then write docs/FRAMEWORKS.md; other rows are those of an earlier run
#   scripts/frameworks.sh --list             their names
#   FRAMEWORKS_VENV=DIR                      where the second environment lies; the default is .venv-frameworks/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
SECOND=$(realpath -m "${FRAMEWORKS_VENV:-$ROOT/.venv-frameworks}")
build
if [ "${1:-}" != --list ] && "$PYTHON" scripts/frameworks/table.py --needs-second "$@"; then
    scripts/frameworks/install.sh "$SECOND"
fi
export FRAMEWORKS_PYTHON=$SECOND/bin/python
exec "$PYTHON" scripts/frameworks/table.py "$@"
