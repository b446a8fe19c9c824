#!/usr/bin/env bash
# Runs every check of a change: formatting, lints, Rust tests, then real programs on a real mount, all on one build. Stops at the
# first failure. Arguments go to pytest, e.g.  scripts/test.sh -k trainer. The aim is 15 minutes on two cores with everything built.
#   STEPFS_TEST_JOBS=N    parallel tests of real programs (default: five on two cores)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
begin_steps
run setup scripts/setup.sh machine
command -v cargo >/dev/null || source "$HOME/.cargo/env"
fetch_python tests
run formatting cargo fmt --check
run "plain English" "$(command -v python3 || echo "$PYTHON")" scripts/prose.py
run lints cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
run build cargo test --workspace --locked --quiet --lib --tests --no-run
# A quarter of the random cases; scripts/long_tests.sh tries thousands.
export PROPTEST_CASES=${PROPTEST_CASES:-64}
RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(nproc) * 2))} run "Rust tests" cargo test --workspace --locked --quiet --lib --tests
run "orders of threads" scripts/threads.sh --if-changed 400
run "Python packages" python_is_there
run "real programs on a real mount" real -m "not nightly and not alone" tests/real "$@"
STEPFS_TEST_JOBS=0 run "many programs at once" real -m alone tests/real/faults/test_stress.py "$@"
end_steps "all tests passed in $((SECONDS - began)) s"
