#!/usr/bin/env bash
# Runs the recipes of docs/INSTALL.md, "Containers and clusters", with the real programs: Docker, Podman (as root and rootless), Slurm,
# Apptainer, and a kubelet. Each runs in a Debian root and namespaces of its own; nothing is left. Needs root and Debian's packages.
# Exits with 4 if one could not be tried: Apptainer's package is in Debian's unstable suite only, and no suite has a kubelet.
#   scripts/containers.sh [NAME...]     only these of: docker podman slurm apptainer kubernetes
#   STEPFS_KUBELET=FILE                 a kubelet that still speaks to Docker, 1.23 at most; without it only the pod's form is checked
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
source scripts/roots.sh
[ $# -gt 0 ] || set -- docker podman slurm apptainer kubernetes
NOT_WHOLE=4
scripts/setup.sh machine
build_program
clean_up() {
    rm -rf --one-file-system "$work"
    # A container that was killed leaves its control groups.
    find /sys/fs/cgroup -depth -type d -path '*/stepfs-containers*' -exec rmdir {} + 2>/dev/null || true
}
trap clean_up EXIT

# A root's programs for the recipes, and a user.
furnish() {
    local root=$work/$1
    mkdir -p "$root"/{containers,packages,trial,data,ckpts,shared}
    cp scripts/containers/* docs/INSTALL.md "$root/containers/"
    cp scripts/packages/tutorial.sh "$root/packages/"
    install -m 755 scripts/containers/trial.sh scripts/packages/train.py "$root/trial/"
    install -m 755 "$STEPFS_BIN" "$root/usr/bin/stepfs"
    ln -sf ../bin/stepfs "$root/usr/sbin/mount.stepfs"
    chroot "$root" useradd --create-home --uid 1000 ada
    printf 'ada:100000:65536\n' | tee "$root/etc/subuid" >"$root/etc/subgid"
}
# What runs in the containers, as a directory.
image() { [ -e "$work/image" ] || { debian_root image "$SUITE" python3-numpy && furnish image; } }

engines() {
    [ ! -e "$work/engines" ] || return 0
    debian_root engines "$SUITE" python3-numpy,iproute2,procps,fuse3,docker.io,podman,netavark,crun,uidmap,slurmctld,slurmd,slurm-client,munge
    furnish engines
    tar -C "$work/image" --exclude=./dev -cf "$work/engines/image.tar" .
}
sid() {
    [ ! -e "$work/sid" ] || return 0
    debian_root sid sid iproute2,procps,fuse3,apptainer,uidmap || return
    furnish sid
    cp -a "$work/image" "$work/sid/image"
}

# The pod of INSTALL has the form that Kubernetes' own schema asks for.
check_pod() {
    [ -x "$TOOLS/kubernetes/bin/kubernetes-validate" ] || {
        python3 -m venv "$TOOLS/kubernetes"
        "$TOOLS/kubernetes/bin/pip" install --quiet --disable-pip-version-check "kubernetes-validate==1.37.0"
    }
    sed -n '/^```yaml$/,/^```$/{/^```/d; p}' docs/INSTALL.md >"$work/pod.yaml"
    "$TOOLS/kubernetes/bin/kubernetes-validate" --strict "$work/pod.yaml"
}

section "Debian $SUITE, for the containers"
image
code=0
for name in "$@"; do
    section "$name"
    root=engines
    [ "$name" != apptainer ] || root=sid
    if ! $root; then
        [ $root = sid ] || die "Debian's packages cannot be installed"
        note "Apptainer was not tried: Debian's unstable suite cannot be installed here"
        code=$NOT_WHOLE
        continue
    fi
    if [ "$name" = kubernetes ]; then
        check_pod
        [ -n "${STEPFS_KUBELET:-}" ] || { note "the pod was not run: there is no kubelet (STEPFS_KUBELET)"; code=$NOT_WHOLE; continue; }
        install -m 755 "$STEPFS_KUBELET" "$work/engines/usr/bin/kubelet"
    fi
    in_root $root "/containers/$name.sh" '' --net
done
[ $code -ne 0 ] || note "all recipes work"
exit $code
