#!/usr/bin/env bash
# Runs every test: formatting, lints, Rust tests, then real programs on a real mount. Stops at the first failure. Arguments go to
# pytest, e.g.  scripts/test.sh -k trainer. The aim is 15 minutes on two cores with everything built.
#   STEPFS_TEST_JOBS=N    parallel tests of real programs (all cores)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
begin_steps
run setup scripts/setup.sh
command -v cargo >/dev/null || source "$HOME/.cargo/env"
run formatting cargo fmt --check
run "plain English" "$PYTHON" scripts/prose.py
run lints cargo clippy --all-targets --locked --quiet -- -D warnings
run "Rust tests" cargo test --locked --quiet
run "orders of threads" scripts/threads.sh 400
run "release build" cargo build --release --locked --quiet
run "real programs on a real mount" real tests/real "$@"
section "all tests passed in $((SECONDS - began)) s"
