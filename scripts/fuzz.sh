#!/usr/bin/env bash
# Fuzz every parser of untrusted bytes and every codec, on all cores, and count it in docs/FUZZING.md. You may stop it at any
# time: the next run continues with the same corpora and counts.
#   scripts/fuzz.sh [SECONDS] [TARGET...]   seconds per target by the clock (60), these targets (all)
#   scripts/fuzz.sh --keep                  puts the smallest inputs with the same coverage into fuzz/corpus
#   STEPFS_FUZZ_JOBS=N                      targets at once (all cores)
#   STEPFS_FUZZ_QUICK=1                     builds in minutes: without AddressSanitizer, hardly optimized; panics are still found
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
if ! command -v g++ >/dev/null; then
    sudo=()
    [ "$(id -u)" -eq 0 ] || sudo=(sudo)
    note "installing g++ (libFuzzer is C++)"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ >/dev/null
fi
if ! command -v cargo-fuzz >/dev/null; then
    note "installing cargo-fuzz"
    cargo install cargo-fuzz --locked --quiet
fi
section "building the fuzz targets"
# Sanitizers and the coverage of none are unstable flags; the stable compiler has them, too.
export RUSTC_BOOTSTRAP=1
if [ -n "${STEPFS_FUZZ_QUICK:-}" ]; then
    # cargo-fuzz asks for one codegen unit and full optimization, which take most of the build.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 RUSTFLAGS="-Ccodegen-units=16" cargo fuzz build -s none
else
    cargo fuzz build -s address
fi
exec python3 scripts/fuzz.py "$@"
