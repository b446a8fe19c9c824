#!/usr/bin/env bash
# Checks the dependencies: licences, sources, duplicate versions (deny.toml), and known vulnerabilities (RustSec). Installs
# cargo-deny and cargo-audit into target/tools/ if they are absent (some minutes, once). The advisories come from github.com. If
# that is out of reach, the script checks everything else and exits with 4, because the audit is incomplete. scripts/audit.sh
# --offline leaves the advisories out and exits with 0.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"

DENY=0.20.2
AUDIT=0.22.2
DATABASE=https://github.com/RustSec/advisory-db
NOT_WHOLE=4

cargo_tool cargo-deny "$DENY"
section "licences, sources, versions"
"$TOOLS/bin/cargo-deny" --locked check licenses bans sources

[ "${1:-}" != --offline ] || { note "advisories: not asked for"; exit 0; }
section "advisories"
if ! timeout 20 git ls-remote --quiet "$DATABASE" HEAD >/dev/null 2>&1; then
    printf '%snot checked: %s cannot be reached from here. Everything else is in order.%s\n' "$RED" "$DATABASE" "$PLAIN" >&2
    exit $NOT_WHOLE
fi
"$TOOLS/bin/cargo-deny" --locked check advisories
# cargo-audit reads the same database, and also looks at packages of the lock file that are not built.
cargo_tool cargo-audit "$AUDIT"
"$TOOLS/bin/cargo-audit" audit --deny warnings
note "the dependencies have no known vulnerability"
