#!/usr/bin/env bash
# Runs fsx, fio --verify and stress-ng's file-system stressors on a mount in each mode (see common.sh), then pjdfstest, and xfstests
# if its source is at hand (see posix_suites.sh). A failing test also runs on a plain directory; if it fails there, stepfs is not
# at fault. Exits with 1 if a test fails on a mount only.
#   scripts/posix.sh [FSX_OPERATIONS] [SECONDS] [MODE...]     default: 100000, 5 seconds per stressor, and all modes
#   STEPFS_BIN=PROGRAM     use this program, and the helper beside it, instead of building them
#   STEPFS_POSIX_JOBS=REGEX only the jobs whose name matches, such as fio, or 'stress-ng (dir|rename)'
#   TMPDIR=DIR             the directory for stores and mounts
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
OPERATIONS=${1:-100000} SECONDS_EACH=${2:-5}
FSX_VERSION=0.3.2

# --- this script runs itself in each mode
if [ -z "${STEPFS_MODE:-}" ]; then
    missing=()
    for tool in fio stress-ng; do command -v $tool >/dev/null || missing+=($tool); done
    if [ ${#missing[@]} -gt 0 ]; then
        [ "$(id -u)" -eq 0 ] || die "please install as root: apt-get install ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
    command -v cargo >/dev/null || source "$HOME/.cargo/env"
    cargo_tool fsx $FSX_VERSION
    build_program
    modes=("${@:3}") failed=0 said=()
    [ $# -gt 2 ] || modes=("${MODES[@]}")
    cargo test --locked --quiet --test model --no-run
    STEPFS_MODEL=$(cargo test --locked --test model --no-run 2>&1 | sed -n 's,.*(\(.*/model-[^)]*\))$,\1,p')
    export STEPFS_MODEL
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    for mode in "${modes[@]}"; do
        in_mode "$mode" bash "$ROOT/scripts/posix.sh" "$OPERATIONS" "$SECONDS_EACH" | tee "$log" || failed=1
        said+=("$(tail -n 1 "$log")")
    done
    [ -n "${STEPFS_POSIX_JOBS:-}" ] || scripts/posix_suites.sh "${modes[@]}" || failed=1
    section "all modes"
    printf '%s\n' "${said[@]}"
    exit $failed
fi

scratch=$(mktemp -d)
mkdir "$scratch/plain" "$scratch/mnt"
trap '"$STEPFS_BIN" umount "$scratch/mnt" >/dev/null 2>&1 || true; rm -rf "$scratch"' EXIT

# --- the jobs: each gets its own directory and must exit with 0
cat >"$scratch/fsx.toml" <<CONFIG
# After each store: a disk would be all that is measured. Pages are synced by the operations that do.
nomsyncafterwrite = true
[weights]
close_open = 3
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 1
truncate = 5
fsync = 0.3
fdatasync = 0.3
posix_fallocate = 3
punch_hole = 5
sendfile = 3
posix_fadvise = 1
copy_file_range = 5
CONFIG
run_fsx() { "$TOOLS/bin/fsx" -q -N "$OPERATIONS" -S "$2" -f "$scratch/fsx.toml" -P "$scratch" "$1/file"; }

# Writes in a random order, then reads all back and compares checksums.
run_fio() {
    local directory=$1 engine=$2 more=("${@:3}")
    fio --name=verify --directory="$directory" --ioengine="$engine" --rw=randwrite --bsrange=512-64k --blockalign=512 \
        --size=96m --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_dump=0 --end_fsync=1 --output-format=terse \
        --randseed=1 --verify_state_save=0 "${more[@]}"
}

run_stressor() {
    stress-ng --"$2" 2 --timeout "${SECONDS_EACH}s" --verify --temp-path "$1" --no-rand-seed --log-brief
}

# The class `filesystem`, and others that work on files. Some are left out. These do not concern the file system under test:
# eventfd, procfs, bind-mount, binderfs, ioprio, and fanotify, which marks whole mounts. FUSE lacks these: chattr, inode-flags,
# file-ioctl, fiemap, verity (see "Deviations" in docs/SEMANTICS.md). iomix and io sync the whole machine.
STRESSORS=(access chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fcntl filename flock fpunch
    fsize fstat getdent handle hdd inotify lease link locka lockf lockofd mknod open rename symlink sync-file touch utime xattr
    seek sendfile splice aio readahead mmap mmapfork unlink)
known=$(stress-ng --stressors 2>&1)
jobs=("fsx $OPERATIONS operations|run_fsx @ 1"
    "fio psync|run_fio @ psync" "fio psync, O_DIRECT|run_fio @ psync --direct=1 --blockalign=4k --bsrange=4k-64k"
    "fio libaio, O_DIRECT|run_fio @ libaio --iodepth=16 --direct=1 --blockalign=4k --bsrange=4k-64k"
    "fio mmap|run_fio @ mmap --blockalign=4k --bsrange=4k-64k" "fio io_uring|run_fio @ io_uring --iodepth=16"
    "fio io_uring, O_DIRECT|run_fio @ io_uring --iodepth=16 --direct=1 --blockalign=4k --bsrange=4k-64k")
for stressor in "${STRESSORS[@]}"; do
    grep -qxF -- "$stressor" <<<"${known// /$'\n'}" && jobs+=("stress-ng $stressor|run_stressor @ $stressor")
done

chosen=()
for job in "${jobs[@]}"; do
    grep -qE -- "${STEPFS_POSIX_JOBS:-.}" <<<"${job%%|*}" && chosen+=("$job")
done
jobs=("${chosen[@]}")

# One job in one directory; answers ok, or the exit code. The mount must be empty again for the next.
one() {
    local directory=$1 command=$2 log=$3
    local own=$directory/job
    mkdir "$own"
    chmod 777 "$own"
    local code=0
    (eval "${command//@/\"\$own\"}") >"$log" 2>&1 || code=$?
    rm -rf "$own"
    [ $code -eq 0 ] && echo ok || echo "exit $code"
}

failed=0 good=0
section "$STEPFS_MODE"
mount_in_mode "$scratch/store" "$scratch/mnt"
for job in "${jobs[@]}"; do
    name=${job%%|*} command=${job#*|}
    began=$SECONDS
    result=$(one "$scratch/mnt" "$command" "$scratch/log")
    if [ "$result" = ok ]; then
        good=$((good + 1))
    else
        beside=$(one "$scratch/plain" "$command" "$scratch/log.plain")
        if [ "$beside" = ok ]; then
            failed=1
            result="FAILED ($result)"
            tail -n 20 "$scratch/log"
        else
            result="$result, beside it $beside"
        fi
    fi
    printf '%-40s %s, %d s\n' "$name" "$result" $((SECONDS - began))
done
"$STEPFS_BIN" umount "$scratch/mnt"
"$STEPFS_BIN" verify "$scratch/store" >"$scratch/verify" || { failed=1; cat "$scratch/verify"; }

# fsx keeps its file open, so it is never released. This does the same, also with direct and asynchronous I/O, on a file that is
# released every 150 operations.
if [ -z "${STEPFS_POSIX_JOBS:-}" ]; then
    section "fsx's operations on a file that is released and recalled between bursts, $STEPFS_MODE"
    with=with
    [ "$STEPFS_MODE" != daemon ] || with=without
    STEPFS_FSX_OPERATIONS=$OPERATIONS "$STEPFS_MODEL" --nocapture "exercised_between_releases_${with}_" || failed=1
fi
echo "$STEPFS_MODE: $good of ${#jobs[@]} jobs are ok, $([ $failed -eq 0 ] && echo "none fails on the mount only" || echo "FAILED")"
exit $failed
