#!/usr/bin/env bash
# Measures the checkpoints of many libraries on a mount, each written by the library's own code. Exits with 1 if a library fails,
# rotates otherwise than in a plain directory, or cannot go on from the newest checkpoint as from a plain one.
#   scripts/frameworks.sh [NAME...]          these writers only; without names all of them
#   scripts/frameworks.sh --page [NAME...]   then write docs/FRAMEWORKS.md; other rows stay from an earlier run
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
