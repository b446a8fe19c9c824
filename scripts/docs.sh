#!/usr/bin/env bash
# Builds a site from the documents into target/site/, with mdBook, and checks every link in it. Installs mdBook into target/tools/
# if it is absent (a minute, once). tests/docs.rs checks the documents' own links.
#   scripts/docs.sh            then open target/site/index.html
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
MDBOOK=0.5.4
BOOK=$ROOT/target/book
SITE=$ROOT/target/site
# The site needs no server and no watching.
cargo_tool mdbook "$MDBOOK" --no-default-features --features search
python3 scripts/site.py pages "$BOOK"
"$TOOLS/bin/mdbook" build --dest-dir "$SITE" "$BOOK"
python3 scripts/site.py check "$SITE"
