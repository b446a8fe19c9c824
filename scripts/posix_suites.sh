#!/usr/bin/env bash
# Runs two POSIX suites on a mount in each mode (see common.sh): pjdfstest (its Rust version, from crates.io), and for root the quick
# group of xfstests' generic tests. In an ordinary user's modes pjdfstest skips what needs root, such as acting as another user.
# No package registry has xfstests, so it runs only if XFSTESTS_SOURCE names its source. The source is copied and built below
# target/tools/, under the name of its commit. A test is news if it fails here, passes on a plain directory, and is not in
# scripts/posix_known.txt. News makes the script exit with 1, and so does an entry of that list that passes.
#   scripts/posix_suites.sh [MODE...]     default: all modes
#   XFSTESTS_SOURCE=DIR    a checkout of xfstests-dev
#   STEPFS_POSIX_KNOWN=FILE  another list of known failures
#   STEPFS_BIN=PROGRAM     use this program, and the helper beside it, instead of building them
#   TMPDIR=DIR             the directory for stores and mounts
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
KNOWN=${STEPFS_POSIX_KNOWN:-$ROOT/scripts/posix_known.txt}
HELPER=/sbin/mount.fuse.stepfs

PJDFSTEST_VERSION=0.2.2

# --- this script runs itself in each mode
if [ -z "${STEPFS_MODE:-}" ]; then
    command -v cargo >/dev/null || source "$HOME/.cargo/env"
    cargo_tool pjdfstest $PJDFSTEST_VERSION
    build_program
    modes=("$@") failed=0
    [ $# -gt 0 ] || modes=("${MODES[@]}")
    for mode in "${modes[@]}"; do in_mode "$mode" bash "$ROOT/scripts/posix_suites.sh" || failed=1; done
    exit $failed
fi

scratch=$(mktemp -d)
mkdir "$scratch/mnt" "$scratch/plain"
# The suites of root act as other users, too.
chmod 755 "$scratch" "$scratch/mnt" "$scratch/plain"
allow=()
[ "$(id -u)" -ne 0 ] || allow=(--allow-other)
helper_is_ours='' other=''
cleanup() {
    "$STEPFS_BIN" umount "$scratch/mnt" >/dev/null 2>&1 || true
    [ -z "$helper_is_ours" ] || rm -f "$HELPER"
    [ -z "$other" ] || rm -rf "$other"
    rm -rf "$scratch"
}
trap cleanup EXIT

# Prints the path of a copy of a source, built once for each of its commits.
built() {
    local suite=$1 source=$2 commit copy
    shift 2
    [ -d "$source" ] || die "$suite: there is no directory $source"
    # git refuses to look at another user's checkout, unless it is told otherwise.
    commit=$(git -c safe.directory='*' -C "$source" describe --always --dirty --abbrev=12 2>/dev/null) || commit=unknown
    copy=$TOOLS/$suite-$commit
    # A source without a commit, or with changes beyond it, is always rebuilt.
    case $commit in unknown | *-dirty) rm -rf "$copy" ;; esac
    if [ ! -e "$copy/.built" ]; then
        rm -rf "$copy"
        mkdir -p "$TOOLS"
        cp -a "$source" "$copy"
        (cd "$copy" && "$@") >"$scratch/build.$suite" 2>&1 || {
            tail -n 20 "$scratch/build.$suite" >&2
            die "$suite: cannot be built; it may need: apt-get install autoconf automake libtool pkg-config gcc make" \
                "xfsprogs xfslibs-dev uuid-dev libattr1-dev libacl1-dev libaio-dev attr acl gawk bc"
        }
        touch "$copy/.built"
    fi
    echo "$copy"
}

# Prints and counts the tests that fail and are news: not known, and fine on a plain directory. Arguments: suite, file of failed
# tests, file of tests that failed on the plain directory, file of tests that ran.
unknown=0
judge() {
    local suite=$1 failed=$2 beside=$3 ran=$4 mode=$STEPFS_MODE name
    awk -v s="$suite" -v m="$mode" '$1 == s && ($3 == m || $3 == "all") { print $2 }' "$KNOWN" >"$scratch/known"
    while read -r name; do
        [ -n "$name" ] || continue
        if grep -qxF -- "$name" "$scratch/known"; then
            echo "$suite $name: fails with $mode, as scripts/posix_known.txt says"
        elif grep -qxF -- "$name" "$beside"; then
            echo "$suite $name: fails with $mode, and on a plain directory"
        else
            echo "$suite $name: FAILED with $mode"
            unknown=$((unknown + 1))
        fi
    done <"$failed"
    while read -r name; do
        if grep -qxF -- "$name" "$ran" && ! grep -qxF -- "$name" "$failed"; then
            echo "$suite $name: passes with $mode; take it out of scripts/posix_known.txt"
            unknown=$((unknown + 1))
        fi
    done <"$scratch/known"
    echo "$suite with $mode: $(wc -l <"$ran") tests, $(wc -l <"$failed") failed"
}

# --- pjdfstest: names look like chmod::eexist. Its tests of EROFS are left out: they remount the file system, which may be the
# machine's own. The second file system is for EXDEV.
cat >"$scratch/pjdfstest.toml" <<'CONFIG'
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}

[settings]
# seconds: more than the granularity of the kernel's file times
naptime = 0.01

[dummy_auth]
entries = [["nobody", "nogroup"], ["games", "games"]]
CONFIG

# Runs all tests in a directory. Arguments: the directory, the output file of failed tests, the output file of tests that ran.
run_pjdfstest() {
    local directory=$1 failed=$2 ran=$3
    mkdir "$directory/job"
    chmod 755 "$directory/job"
    timeout 600 "$TOOLS/bin/pjdfstest" -c "$scratch/pjdfstest.toml" -s "$other" -p "$directory/job" >"$scratch/log" 2>&1 </dev/null || true
    grep -q '^Summary:' "$scratch/log" || { tail -n 20 "$scratch/log" >&2; die "pjdfstest did not run to its end"; }
    grep -A1 ' FAILED$' "$scratch/log" | sed 's/^/  /' >&2 || true
    sed -n 's/^\([a-z0-9_:]*\) *FAILED$/\1/p' "$scratch/log" | sort >"$failed"
    sed -n 's/^\([a-z0-9_:]*\) *\(ok\|FAILED\)$/\1/p' "$scratch/log" | sort >"$ran"
    rm -rf "$directory/job"
}

section "pjdfstest $PJDFSTEST_VERSION, $STEPFS_MODE"
other=$(mktemp -d -p /dev/shm)
run_pjdfstest "$scratch/plain" "$scratch/beside" "$scratch/ran"
echo "pjdfstest on a plain directory: $(wc -l <"$scratch/ran") tests, $(wc -l <"$scratch/beside") failed"
mount_in_mode "$scratch/pjd" "$scratch/mnt" "${allow[@]}"
run_pjdfstest "$scratch/mnt" "$scratch/failed" "$scratch/ran"
"$STEPFS_BIN" umount "$scratch/mnt"
judge pjdfstest "$scratch/failed" "$scratch/beside" "$scratch/ran"

# --- xfstests: names look like generic/001. It mounts by mount(8), which asks a helper in /sbin.
build_xfstests() { make -j2; }

# Arguments: the copy, the store, the output file of failed tests, the output file of tests that ran.
run_xfstests() {
    local copy=$1 store=$2 failed=$3 ran=$4
    # The suite tells mounts apart by their source, which is the store. It gets one store; tests that need a second one report
    # that they did not run.
    (cd "$copy" && FSTYP=fuse FUSE_SUBTYP=.stepfs TEST_DEV="$store" TEST_DIR="$scratch/mnt" MOUNT_OPTIONS='' TEST_FS_MOUNT_OPTS='' \
        ./check -g quick) >"$scratch/log.xfstests" 2>&1 || true
    grep -q '^Ran:' "$scratch/log.xfstests" || { tail -n 20 "$scratch/log.xfstests" >&2; die "xfstests did not run"; }
    # `Ran:` also names the tests that did not run.
    words() { sed -n "s/^$1://p" "$scratch/log.xfstests" | tail -n 1 | tr ' ' '\n' | grep / | sort -u || true; }
    words Failures >"$failed"
    comm -23 <(words Ran) <(words 'Not run') >"$ran"
}

if [ "$(id -u)" -ne 0 ]; then
    note "xfstests mounts, so it runs in root's modes only."
elif [ -n "${XFSTESTS_SOURCE:-}" ]; then
    [ ! -e "$HELPER" ] || die "there is $HELPER already, which this script would replace"
    copy=$(built xfstests "$XFSTESTS_SOURCE" build_xfstests)
    section "$(basename "$copy"), $STEPFS_MODE"
    helper_is_ours=1
    option=
    [ "$STEPFS_MODE" = passthrough ] || option=--no-passthrough
    printf '#!/bin/sh\nexec %q mount --allow-other %s %q "$2"\n' "$STEPFS_BIN" "$option" "$scratch/xfs" >"$HELPER"
    chmod 755 "$HELPER"
    run_xfstests "$copy" "$scratch/xfs" "$scratch/failed" "$scratch/ran"
    "$STEPFS_BIN" umount "$scratch/mnt" >/dev/null 2>&1 || true
    # Its tests know how FUSE mounts differ from others, so a comparison with a plain directory proves nothing.
    judge xfstests "$scratch/failed" /dev/null "$scratch/ran"
else
    note "xfstests does not run: XFSTESTS_SOURCE is not set. To run it, name a checkout:"
    note "  git clone https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git   XFSTESTS_SOURCE=\$PWD/xfstests-dev"
    note "tests/mount/suites.rs and tests/mount/durable.rs test its earlier findings."
fi

[ "$unknown" -eq 0 ] || die "$unknown tests differ from scripts/posix_known.txt"
