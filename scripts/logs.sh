#!/usr/bin/env bash
# Measures small files and logs: a mount of stepfs against libfuse's own passthrough example (passthrough_ll) and a plain directory of
# the same disk, in turns, on an idle machine and with every core busy. Prints ratios; exits with 1 above the limits.
#   scripts/logs.sh [--rounds N] [--case append|create|steady] [--load idle|busy] [--dir DIR] ...      (scripts/logs.py --help)
#   STEPFS_BIN=PROGRAM     use this program instead of building one
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
EXAMPLES=/usr/share/doc/libfuse3-dev/examples
TOOLS=$ROOT/target/tools

missing=()
[ -e $EXAMPLES/passthrough_ll.c ] || missing+=(libfuse3-dev)
command -v gcc >/dev/null || missing+=(gcc)
command -v pkg-config >/dev/null || missing+=(pkg-config)
command -v fusermount3 >/dev/null || missing+=(fuse3)
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" -eq 0 ] || die "please install as root: apt-get install ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
mkdir -p "$TOOLS"
if [ ! -e "$TOOLS/passthrough_ll" ]; then
    # shellcheck disable=SC2046
    gcc -O2 -o "$TOOLS/passthrough_ll" $EXAMPLES/passthrough_ll.c $(pkg-config fuse3 --cflags --libs)
fi
if [ -z "${STEPFS_BIN:-}" ]; then
    command -v cargo >/dev/null || source "$HOME/.cargo/env"
    cargo build --release --locked --quiet
fi
exec python3 scripts/logs.py --stepfs "${STEPFS_BIN:-$STEPFS}" --example "$TOOLS/passthrough_ll" "$@"
