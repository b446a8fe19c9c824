#!/usr/bin/env bash
# Build the daemon with a sanitizer and run concurrent work against it: short stress scenarios and the kill test. Fails when any
# process of stepfs reports something; the reports lie in target/sanitize-KIND.reports.
#   scripts/sanitize.sh            AddressSanitizer with LeakSanitizer: memory errors, and leaks at the end of a daemon or command
#   scripts/sanitize.sh thread     ThreadSanitizer; needs the component rust-src, see below
# STEPFS_SANITIZE_SECONDS (20) is the time of each scenario, STEPFS_KILLS (5) the number of kills. A first build takes minutes.
#
# AddressSanitizer: this program, its crates and their C code (zstd) are instrumented; the standard library is not. In the latter
# it checks calls of malloc, free, memcpy and the like, but not each read and write. scripts/sanitize/lsan.txt lists leaks on
# purpose.
#
# ThreadSanitizer must see every lock. A contended std::sync::Mutex is taken inside the standard library, and the one of a
# toolchain is not instrumented, so such a lock is invisible. scripts/sanitize/locked.rs is correct, and is reported for that
# reason. No list of suppressions tells those reports from true ones. So the standard library is built, too, and needs its
# sources: `rustup component add rust-src`. Without them the script says so and fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
kind=${1:-address}
target=x86_64-unknown-linux-gnu
reports=$ROOT/target/sanitize-$kind.reports
command -v cargo >/dev/null || source "$HOME/.cargo/env"
flags="-Zsanitizer=$kind" std=()
case $kind in
address) ;;
thread)
    flags+=" -Cunsafe-allow-abi-mismatch=sanitizer"
    if [ ! -e "$(rustc --print sysroot)/lib/rustlib/src/rust/library/std/Cargo.toml" ]; then
        probe=$(mktemp -d)
        RUSTC_BOOTSTRAP=1 rustc -O $flags --target $target scripts/sanitize/locked.rs -o "$probe/locked" 2>/dev/null
        count=$("$probe/locked" 2>&1 | grep -c '^SUMMARY' || true)
        rm -r "$probe"
        die "rust-src is missing. Without it ThreadSanitizer reports $count data races in a program that has none (scripts/sanitize/locked.rs)"
    fi
    std=(-Zbuild-std)
    ;;
*) die "usage: scripts/sanitize.sh [address|thread]" ;;
esac
scripts/setup.sh
rm -rf "$reports"
mkdir -p "$reports"

section "building with -Zsanitizer=$kind"
export STEPFS_BIN=$ROOT/target/sanitize-$kind/$target/debug/stepfs
# GCC 12 takes the end of a function for the end of its static tables, and zstd's are used again.
[ $kind != address ] || export CFLAGS="-fno-sanitize-address-use-after-scope ${CFLAGS:-}"
RUSTC_BOOTSTRAP=1 RUSTFLAGS=$flags nice -n 5 \
    cargo build --locked --quiet -j2 --no-default-features "${std[@]}" --target $target --target-dir "target/sanitize-$kind" --bin stepfs

# Each process writes its own file: a daemon's standard error is its log, and nobody waits for its exit code.
common="log_path=$reports/report:exitcode=99"
export ASAN_OPTIONS="$common:detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1"
export LSAN_OPTIONS="suppressions=$ROOT/scripts/sanitize/lsan.txt:print_suppressions=0"
export TSAN_OPTIONS="$common:history_size=4:second_deadlock_stack=1"
seconds=${STEPFS_SANITIZE_SECONDS:-20}
export STEPFS_KILLS=${STEPFS_KILLS:-5}

code=0
for scenario in churn kills ranks; do
    section "$scenario, $seconds s"
    "$PYTHON" scripts/stress.py $scenario --seconds "$seconds" || code=1
done
section "$STEPFS_KILLS kills"
"$PYTHON" -m pytest tests/real/faults/test_kill.py -p no:cacheprovider -q || code=1

section "reports"
shopt -s nullglob
found=("$reports"/report*)
if [ ${#found[@]} -gt 0 ]; then
    grep -h '^SUMMARY' "${found[@]}" | sort | uniq -c | sort -rn || true
    die "${#found[@]} processes reported something: $reports"
fi
[ $code -eq 0 ] || die "no reports, but something failed above"
note "no reports: $kind sanitizer, three scenarios of $seconds s, $STEPFS_KILLS kills"
