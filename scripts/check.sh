#!/usr/bin/env bash
# Run this before each commit: formatting, lints, the library's tests, and the quick tests of real programs. The aim is three
# minutes on two cores with everything built. scripts/test.sh runs everything.
#   scripts/check.sh [ROOM...]      only these directories of tests/real, such as life or tools (default: all but study)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
rooms=("$@")
[ $# -gt 0 ] || rooms=(frameworks life faults quality mirror tools)
for room in "${rooms[@]}"; do
    [ -e "tests/real/$room/" ] || die "no room $room; there are: frameworks life faults quality mirror tools study"
done
begin_steps
run setup scripts/setup.sh machine
command -v cargo >/dev/null || source "$HOME/.cargo/env"
fetch_python tests
run formatting cargo fmt --check
run "plain English" "$(command -v python3 || echo "$PYTHON")" scripts/prose.py
run lints cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
# One small test program brings the program, with the dependencies' features of scripts/test.sh: `cargo build` has others.
run build cargo test --workspace --locked --quiet --lib --test docs --no-run
# An eighth of the random cases; scripts/test.sh tries all. Some wait, so several run on each core.
run "the library's tests" env PROPTEST_CASES=32 RUST_TEST_THREADS=$(($(nproc) * 2)) \
    cargo test --workspace --locked --quiet --lib --test docs
run "Python packages" python_is_there
run "quick tests of real programs" real -m "not slow and not nightly and not alone" "${rooms[@]/#/tests/real/}"
end_steps "checked in $((SECONDS - began)) s; scripts/test.sh runs everything"
