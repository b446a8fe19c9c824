# Sourced in a root: prints each command, then runs it; and what the engines of containers have in common.
source /packages/tutorial.sh
IMAGE=stepfs-trial

# Waits for a condition: `await SECONDS COMMAND...`.
await() {
    local end=$((SECONDS + $1))
    while [ $SECONDS -lt $end ]; do
        "${@:2}" >/dev/null 2>&1 && return
        sleep .2
    done
    echo "FAILED: not within $1 s: ${*:2}" >&2
    return 1
}

# Runs doctor by a command, and looks for findings: `doctor "warning privileges root without" -- COMMAND...`. A problem is exit code 1.
doctor() {
    local expected=() text code=0 wanted=0
    while [ "$1" != -- ]; do expected+=("$1") && shift; done
    shift
    printf '$ %s\n' "$* stepfs doctor /data/ckpts.store"
    text=$("$@" stepfs doctor /data/ckpts.store 2>&1) || code=$?
    printf '%s\n' "$text"
    for finding in "${expected[@]}"; do
        grep -Eq "^${finding// / +}" <<<"$text" || fail "doctor should say: $finding"
        [ "${finding%% *}" != problem ] || wanted=1
    done
    [ $code -eq $wanted ] || fail "doctor's exit code is $code"
}

# A new store for the next recipe. Nobody else may write to /data, or --allow-other is refused.
clean_data() {
    rm -rf /data
    install -d -m 755 "$@" /data /ckpts
}

# docs/INSTALL.md with Docker or Podman as root: `engine docker run`, or with other words for the same.
rootful() {
    local fuse=(--device /dev/fuse) admin=(--device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined)
    clean_data
    doctor "problem /dev/fuse" "warning privileges root without" "warning passthrough none" -- "$@" -v /data:/data $IMAGE
    show "$@" -v /data:/data $IMAGE /trial/trial.sh import /data/ckpts.store /tmp/plain
    clean_data
    doctor "ok /dev/fuse" "warning privileges root without" "problem mount" "warning passthrough none" -- \
        "$@" "${fuse[@]}" -v /data:/data $IMAGE
    doctor "ok /dev/fuse" "ok privileges user 0 with CAP_SYS_ADMIN" "ok mount" "ok passthrough the kernel" "ok others" -- \
        "$@" "${admin[@]}" -v /data:/data $IMAGE
    show "$@" "${admin[@]}" -v /data:/data $IMAGE /trial/trial.sh mount kernel /data/ckpts.store /ckpts

    clean_data
    show stepfs mount --allow-other /data/ckpts.store /ckpts
    show "$@" -v /ckpts:/ckpts:rslave -v /data:/data:ro $IMAGE /trial/trial.sh train /ckpts
    # Training alone needs no store in the container. The commands of stepfs do, and say so.
    show "$@" -v /ckpts:/ckpts:rslave $IMAGE python3 /trial/train.py /ckpts /ckpts/step_400.npz
    ! "$@" -v /ckpts:/ckpts:rslave $IMAGE stepfs ls /ckpts || fail "the store should be missed"
    show stepfs umount /ckpts
}

# The two containers of the pod: the sidecar mounts for the trainer.
pod() {
    clean_data
    mkdir -p /shared/ckpts
    show "$@" --detach --name stepfs --privileged -v /data:/data -v /shared:/shared:rshared $IMAGE \
        stepfs mount --foreground --allow-other /data/ckpts.store /shared/ckpts
    await 30 mountpoint -q /shared/ckpts
    show "$@" --rm -v /shared:/shared:rslave -v /data:/data:ro $IMAGE /trial/trial.sh train /shared/ckpts
}
