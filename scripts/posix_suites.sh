#!/usr/bin/env bash
# Runs two POSIX suites on a mount: pjdfstest, and the quick group of xfstests' generic tests. No package registry has them, so
# each runs only if an environment variable names its source. The source is copied and built below target/tools/, under the name
# of its commit. A test is news if it fails here, passes on a plain directory, and is not in scripts/posix_known.txt. News makes
# the script exit with 1, and so does an entry of that list that passes.
#   PJDFSTEST_SOURCE=DIR   a checkout of pjdfstest
#   XFSTESTS_SOURCE=DIR    a checkout of xfstests-dev
#   STEPFS_POSIX_KNOWN=FILE  another list of known failures
#   STEPFS_BIN=PROGRAM     use this program instead of building one
#   STEPFS_SCRATCH=DIR     the directory for stores and mounts (default: a new directory in /tmp)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
KNOWN=${STEPFS_POSIX_KNOWN:-$ROOT/scripts/posix_known.txt}
HELPER=/sbin/mount.fuse.stepfs

if [ -z "${PJDFSTEST_SOURCE:-}${XFSTESTS_SOURCE:-}" ]; then
    section "pjdfstest and xfstests: not run"
    note "Neither PJDFSTEST_SOURCE nor XFSTESTS_SOURCE is set. To run them, fetch a source and name its directory:"
    note "  git clone https://github.com/pjd/pjdfstest                         PJDFSTEST_SOURCE=\$PWD/pjdfstest"
    note "  git clone https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git   XFSTESTS_SOURCE=\$PWD/xfstests-dev"
    note "tests/mount_suites.rs and tests/mount_durable.rs test their earlier findings."
    exit 0
fi
[ "$(id -u)" -eq 0 ] || die "these suites change users, so they must run as root"
if [ -z "${STEPFS_BIN:-}" ]; then
    command -v cargo >/dev/null || source "$HOME/.cargo/env"
    cargo build --release --locked --quiet
fi
STEPFS=$(realpath "${STEPFS_BIN:-$STEPFS}")
scratch=$(realpath -m "${STEPFS_SCRATCH:-$(mktemp -d)}")
mkdir -p "$scratch/mnt" "$scratch/plain"
# The suites act as other users, too.
chmod 755 "$scratch" "$scratch/mnt" "$scratch/plain"
helper_is_ours=
cleanup() {
    "$STEPFS" umount "$scratch/mnt" >/dev/null 2>&1 || true
    [ -z "$helper_is_ours" ] || rm -f "$HELPER"
    [ -n "${STEPFS_SCRATCH:-}" ] || rm -rf "$scratch"
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

# Prints and counts the tests that fail in a mode and are news: not known, and fine on a plain directory. Arguments: suite, mode,
# file of failed tests, file of tests that failed on the plain directory, file of tests that ran.
unknown=0
judge() {
    local suite=$1 mode=$2 failed=$3 beside=$4 ran=$5 name
    awk -v s="$suite" -v m="$mode" '$1 == s && ($3 == m || $3 == "both") { print $2 }' "$KNOWN" >"$scratch/known"
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

# --- pjdfstest: names are paths below its tests/, such as chmod/00.t
build_pjdfstest() {
    [ ! -e configure.ac ] || { autoreconf -ifs && ./configure; }
    make pjdfstest
}

# Runs all tests in a directory. Arguments: the copy, the directory, the output file of failed tests, the output file of tests
# that ran.
run_pjdfstest() {
    local copy=$1 directory=$2 failed=$3 ran=$4 test
    : >"$failed"
    (cd "$copy/tests" && find . -name '*.t' | sed 's|^\./||' | sort) >"$ran"
    while read -r test; do
        mkdir "$directory/job"
        # Most of their time is waiting: some sleep for a second in each of many steps.
        (cd "$directory/job" && timeout 600 prove -q "$copy/tests/$test") >"$scratch/log" 2>&1 </dev/null || {
            echo "$test" >>"$failed"
            grep -E '^ +Failed tests?:|Bad plan|Dubious' "$scratch/log" | sed "s|^|  $test: |" >&2 || true
        }
        rm -rf "$directory/job"
    done <"$ran"
}

if [ -n "${PJDFSTEST_SOURCE:-}" ]; then
    copy=$(built pjdfstest "$PJDFSTEST_SOURCE" build_pjdfstest)
    section "$(basename "$copy")"
    run_pjdfstest "$copy" "$scratch/plain" "$scratch/beside" "$scratch/ran"
    for mode in passthrough daemon; do
        option=()
        [ $mode = passthrough ] || option=(--no-passthrough)
        "$STEPFS" mount --allow-other "${option[@]}" "$scratch/pjd.$mode" "$scratch/mnt"
        run_pjdfstest "$copy" "$scratch/mnt" "$scratch/failed" "$scratch/ran"
        "$STEPFS" umount "$scratch/mnt"
        judge pjdfstest $mode "$scratch/failed" "$scratch/beside" "$scratch/ran"
    done
else
    section "pjdfstest: not run"
    note "PJDFSTEST_SOURCE is not set; see the top of this script."
fi

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

if [ -n "${XFSTESTS_SOURCE:-}" ]; then
    [ ! -e "$HELPER" ] || die "there is $HELPER already, which this script would replace"
    copy=$(built xfstests "$XFSTESTS_SOURCE" build_xfstests)
    section "$(basename "$copy")"
    helper_is_ours=1
    for mode in passthrough daemon; do
        option=
        [ $mode = passthrough ] || option=--no-passthrough
        printf '#!/bin/sh\nexec %q mount --allow-other %s %q "$2"\n' "$STEPFS" "$option" "$scratch/xfs.$mode" >"$HELPER"
        chmod 755 "$HELPER"
        run_xfstests "$copy" "$scratch/xfs.$mode" "$scratch/failed" "$scratch/ran"
        "$STEPFS" umount "$scratch/mnt" >/dev/null 2>&1 || true
        # Its tests know how FUSE mounts differ from others, so a comparison with a plain directory proves nothing.
        judge xfstests $mode "$scratch/failed" /dev/null "$scratch/ran"
    done
else
    section "xfstests: not run"
    note "XFSTESTS_SOURCE is not set; see the top of this script."
fi

[ "$unknown" -eq 0 ] || die "$unknown tests differ from scripts/posix_known.txt"
