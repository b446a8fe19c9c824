#!/usr/bin/env bash
# Tries the packages in clean Debian roots: the wheel where there is only Python, the Debian package beside what apt brings with it.
# In each root: doctor, the steps of docs/START.md with numpy in place of torch, and for the Debian package a line in fstab and the
# unit of systemd. Needs root and debootstrap. Leaves nothing behind: all mounts end with their namespace.
#   scripts/packages.sh [DIR]     the packages in DIR instead of building them by scripts/package.sh
#   STEPFS_SUITE=NAME             the Debian release; its C library must be as new as this machine's (this machine's)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
[ "$(id -u)" -eq 0 ] || die "makes a Debian root and mounts in it: run it as root"
command -v debootstrap >/dev/null || apt-get install --quiet --yes debootstrap >/dev/null || die "needs debootstrap"
[ $# -gt 0 ] || scripts/package.sh
packages=$(realpath "${1:-target/package}")
suite=${STEPFS_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")}
work=$(mktemp -d "${STEPFS_TEST_DIR:-/tmp}/stepfs-packages-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

# Runs a file of scripts/packages/ in a root of its own. The daemons end and the mounts vanish with the namespaces of this shell.
in_root() {
    local root=$work/$1
    cp -a "$work/base" "$root"
    mkdir "$root/packages"
    cp scripts/packages/* "$packages"/*.whl "$packages"/*.deb "$root/packages/"
    [ -e "$root/dev/fuse" ] || mknod -m 666 "$root/dev/fuse" c 10 229
    unshare --mount --pid --fork --kill-child --propagation private bash -ec '
        mount --bind "$1" "$1"
        mount -t proc proc "$1/proc"
        mount -t devpts devpts "$1/dev/pts"
        chroot "$1" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 bash -eu "/packages/$2"
    ' - "$root" "$1.sh"
}

section "Debian $suite with Python"
debootstrap --variant=minbase --include=python3-venv,python3-numpy "$suite" "$work/base" >"$work/log" || { tail "$work/log"; die "debootstrap failed"; }
section "wheel"
in_root wheel
section "Debian package"
in_root deb
note "both packages work in a clean Debian $suite"
