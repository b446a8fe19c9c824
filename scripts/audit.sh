#!/usr/bin/env bash
# What stepfs is built from: licences, sources, versions that are there twice (deny.toml), and known vulnerabilities (RustSec).
# Installs cargo-deny and cargo-audit into target/tools/ if they are absent (some minutes, once).
# The advisories come from github.com. Where that cannot be reached everything else is checked, and the exit code is 4: nobody
# is to take it for a whole audit.  scripts/audit.sh --offline  leaves the advisories out on purpose, exit code 0.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"

DENY=0.20.2
AUDIT=0.22.2
TOOLS=$ROOT/target/tools
DATABASE=https://github.com/RustSec/advisory-db
NOT_WHOLE=4

tool() {
    "$TOOLS/bin/$1" --version 2>/dev/null | grep -qF "$2" && return
    note "installing $1 $2 into target/tools/"
    CARGO_TARGET_DIR=$TOOLS/build cargo install --quiet --locked --root "$TOOLS" "$1@$2"
    rm -rf "$TOOLS/build"
}

tool cargo-deny "$DENY"
section "licences, sources, versions"
"$TOOLS/bin/cargo-deny" --locked check licenses bans sources

[ "${1:-}" != --offline ] || { note "advisories: not asked for"; exit 0; }
section "advisories"
if ! timeout 20 git ls-remote --quiet "$DATABASE" HEAD >/dev/null 2>&1; then
    printf '%snot checked: %s cannot be reached from here. Everything else is in order.%s\n' "$RED" "$DATABASE" "$PLAIN" >&2
    exit $NOT_WHOLE
fi
"$TOOLS/bin/cargo-deny" --locked check advisories
# The same database, read by its own tool, which also looks at what the lock file has beyond what is built.
tool cargo-audit "$AUDIT"
"$TOOLS/bin/cargo-audit" audit --deny warnings
note "nothing is known of what stepfs is built from"
