# In a root: Podman's recipes, as root and as a user.
source /containers/steps.sh
show podman --version
quietly podman import /image.tar $IMAGE
# crun refuses a machine on which both versions of control groups have controllers, so only one is shown to it.
umount /sys/fs/cgroup/unified 2>/dev/null || true
run=(podman run --network none --cgroup-parent /stepfs-containers)
rootful "${run[@]}" --rm
pod "${run[@]}"
show podman stop --time 30 stepfs
! mountpoint -q /shared/ckpts || fail "the sidecar's mount stays"

# Rootless: what root in the container owns is the user's.
clean_data -o ada -g ada
as_ada() { setpriv --reuid ada --regid ada --init-groups env HOME=/home/ada XDG_RUNTIME_DIR=/run/user/ada "$@"; }
install -d -o ada -m 700 /run/user /run/user/ada
cd /home/ada
quietly as_ada podman import /image.tar $IMAGE
run=(as_ada podman run --rm --network none --cgroups disabled)
doctor "problem /dev/fuse" "warning privileges root without" -- "${run[@]}" -v /data:/data $IMAGE
doctor "ok /dev/fuse" "warning privileges root without" "problem mount" -- "${run[@]}" --device /dev/fuse -v /data:/data $IMAGE
run+=(--device /dev/fuse --cap-add SYS_ADMIN -v /data:/data $IMAGE)
doctor "ok /dev/fuse" "warning privileges CAP_SYS_ADMIN in a user namespace" "ok mount" "warning passthrough none" -- "${run[@]}"
show "${run[@]}" /trial/trial.sh mount daemon /data/ckpts.store /ckpts
