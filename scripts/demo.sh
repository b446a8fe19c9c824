#!/usr/bin/env bash
# stepfs in three minutes: train a small GPT into a mount, look at the sizes of its checkpoints, use them, delete some.
#   scripts/demo.sh                 in a temporary directory that is removed at the end
#   scripts/demo.sh STORE MOUNT     on your own directories; STORE stays
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [ $# -eq 2 ]; then set -- "$(realpath -m "$1")" "$(realpath -m "$2")"; fi
cd "$ROOT"

section "setting up"
"$PYTHON" -c 'import torch, numpy' 2>/dev/null && [ -x target/release/stepfs ] ||
    note "The first time, this installs torch and numpy into .venv/ (some 5 GB) and compiles stepfs, which takes minutes."
scripts/setup.sh machine
command -v cargo >/dev/null || source "$HOME/.cargo/env"
fetch_python demo
show cargo build --release --locked
python_is_there
began=$SECONDS

temporary='' own_mount=''
if [ $# -eq 2 ]; then
    store=$1 mount=$2 log=$1.log
    [ -d "$mount" ] || own_mount=yes
elif [ $# -eq 0 ]; then
    # Work there, so that the commands below are short.
    temporary=$(mktemp -d "${TMPDIR:-/tmp}/stepfs-demo.XXXXXX")
    cd "$temporary"
    store=ckpts.store mount=ckpts log=stepfs.log
else
    die "usage: scripts/demo.sh [STORE MOUNT]"
fi
mkdir -p "$mount"
[ -z "$(ls -A "$mount")" ] || die "$mount is not empty"

mounted=''
finish() {
    local code=$?
    trap - EXIT INT TERM
    if [ -n "$mounted" ]; then
        "$STEPFS" umount "$mount" || fusermount3 -u -z "$mount" || umount -l "$mount" || true
    fi
    [ -z "$own_mount" ] || rmdir "$mount" 2>/dev/null || true
    # Never remove recursively through a mount.
    if [ -n "$temporary" ] && ! mountpoint -q "$mount"; then cd "$ROOT" && rm -rf "$temporary"; fi
    exit $code
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

weigh() { "$STEPFS" ls --json "$mount" | "$PYTHON" "$ROOT/scripts/weigh.py" "$mount"; }

section "a store, mounted as the checkpoint directory"
show "$STEPFS" mount "$store" "$mount" --log "$log"
mounted=yes
grep -F " $(realpath "$mount") " /proc/mounts

section "training: an ordinary script, plain torch.save, a checkpoint every 25 iterations"
show "$PYTHON" "$ROOT/scripts/gpt.py" --out "$mount" --iters 350 --every 25
newest=$(ls "$mount" | grep '^step_.*\.pt$' | tail -1)
oldest=$(ls "$mount" | grep '^step_.*\.pt$' | head -1)
before=$(sha256sum <"$mount/$newest")

section "the size of each checkpoint"
note "All but the newest may now be archived and released; sync waits until that is done."
show "$STEPFS" sync "$mount"
weigh

section "the files are whole"
show ls -l "$mount"
[ "$before" = "$(sha256sum <"$mount/$newest")" ] || die "$newest changed"
note "$newest, the newest, still has the bytes that were written (same SHA-256 before and after)."
show unzip -tq "$mount/$oldest"

section "resuming from the newest"
show "$PYTHON" "$ROOT/scripts/gpt.py" --out "$mount" --resume "$mount/$newest" --iters 25 --every 25

section "loading old ones: their loss now, beside the loss recorded when they were saved"
mapfile -t all < <(ls "$mount" | grep '^step_.*\.pt$')
chosen=("$mount/${all[0]}" "$mount/${all[${#all[@]} / 2]}" "$mount/${all[-2]}" "$mount/${all[-1]}")
show "$PYTHON" "$ROOT/scripts/gpt.py" --evaluate "${chosen[@]}"

section "deleting is rm"
doomed=()
for i in "${!all[@]}"; do
    # Every second one, the first included: the remaining ones were stored as differences to these.
    if [ $((i % 2)) -eq 0 ] && [ "$i" -lt $((${#all[@]} - 1)) ]; then doomed+=("$mount/${all[$i]}"); fi
done
show rm "${doomed[@]}"
show "$STEPFS" sync "$mount"
weigh
show "$PYTHON" "$ROOT/scripts/gpt.py" --evaluate "$mount"/step_*.pt
note "The rest loads as before: no checkpoint needs another one's name."
show "$STEPFS" status "$mount"

section "unmounting"
show "$STEPFS" umount "$mount"
mounted=''
resident=("$store"/tree/step_*.pt)
note "The newest is a plain file in the store; it needs no stepfs to be read:"
show "$PYTHON" "$ROOT/scripts/gpt.py" --evaluate "${resident[-1]}"
note "Done in $((SECONDS - began)) s."
