#!/usr/bin/env bash
# Tries the packages in clean Debian roots: the wheel where there is only Python, the Debian package beside what apt brings with it.
# In each root: doctor, the steps of docs/START.md with numpy in place of torch, and for the Debian package a line in fstab and the
# unit of systemd. With the wheel a user also types docs/START.md and docs/PYTHON.md as they are, if this machine's .venv has torch.
# Needs root and debootstrap. Leaves nothing behind: all mounts end with their namespace.
#   scripts/packages.sh [DIR]     the packages in DIR instead of building them by scripts/package.sh
#   STEPFS_SUITE=NAME             the Debian release; its C library must be as new as this machine's (this machine's)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
source scripts/roots.sh
[ $# -gt 0 ] || scripts/package.sh
packages=$(realpath "${1:-target/package}")

# Runs a file of scripts/packages/ in a copy of the root, which sees a directory of this machine: `try NAME FROM:TO`.
try() {
    cp -a "$work/base" "$work/$1"
    mkdir "$work/$1/packages"
    cp scripts/packages/* docs/START.md docs/PYTHON.md "$packages"/*.whl "$packages"/*.deb "$work/$1/packages/"
    in_root "$1" "/packages/$1.sh" "${2:-}"
}

section "Debian $SUITE with Python"
debian_root base "$SUITE" python3-venv,python3-numpy,iproute2 || die "debootstrap failed"
section "wheel"
torch=$("$PYTHON" -c 'import torch; print(torch.__path__[0])' 2>/dev/null || true)
try wheel "${torch:+$(dirname "$torch"):/torch}"
section "Debian package"
try deb
note "both packages work in a clean Debian $SUITE"
