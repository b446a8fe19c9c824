#!/bin/bash
# In a container: trains into a mount, looks at the archive, goes on from the newest.
#   trial.sh mount BY STORE DIR    mounts the store itself; kernel or daemon must serve it
#   trial.sh train DIR             in a mount that is there already
#   trial.sh import STORE DIR      into a plain directory, without FUSE: imports each file after its save
set -eu
fail() { echo "FAILED: $*" >&2 && exit 1; }

train() {
    local dir=$1
    python3 /trial/train.py "$dir" | tail -1
    stepfs sync "$dir"
    [ "$(stepfs ls -v "$dir" | grep -c '^released')" -eq 9 ] || { stepfs ls -v "$dir" && fail "nine of ten files should be released"; }
    newest=$(stepfs latest "$dir")
    [ "$newest" = "$dir/step_200.npz" ] || fail "the newest is $newest"
    python3 /trial/train.py "$dir" "$newest" | tail -1
    echo "stepfs: trained, archived and resumed in $dir"
}

case $1 in
mount)
    by=$2 store=$3 dir=$4
    stepfs mount "$store" "$dir"
    stepfs status --json "$dir" | grep -q "\"by\": *\"$by\"" || { stepfs status "$dir" && fail "$by should serve"; }
    train "$dir"
    stepfs umount "$dir"
    ;;
train) train "$2" ;;
import)
    store=$2 dir=$3
    [ ! -e /dev/fuse ] || fail "there is FUSE"
    mkdir -p "$dir"
    python3 /trial/train.py "$dir" | tail -1
    before=
    for step in $(seq 20 20 200); do
        stepfs import "$store" "$dir/step_$step.npz"
        if [ -n "$before" ]; then rm "$before"; fi
        before=$dir/step_$step.npz
    done
    stepfs ls "$store"
    for step in 100 200; do stepfs export "$store" "step_$step.npz" "/tmp/step_$step.npz"; done
    cmp "$before" /tmp/step_200.npz || fail "the newest is not exact"
    [ "$(stepfs ls -v "$store" | grep -c '^released')" -eq 9 ] || fail "nine of ten files should be released"
    python3 /trial/train.py "$dir" /tmp/step_100.npz | tail -1
    ;;
esac
