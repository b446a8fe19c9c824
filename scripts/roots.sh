# Sourced after common.sh by scripts that need clean Debian roots: makes them below $work, and runs in them.
# It needs root and debootstrap. Daemons end and mounts vanish with their namespaces.

[ "$(id -u)" -eq 0 ] || die "makes Debian roots and mounts in them: run it as root"
command -v debootstrap >/dev/null || apt-get install --quiet --yes debootstrap >/dev/null || die "needs debootstrap"
# This machine's release. Its C library is as new as that of the programs that were built here.
SUITE=${STEPFS_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")}
# A short name: the addresses of sockets have 108 bytes.
work=$(mktemp -d "${STEPFS_TEST_DIR:-/tmp}/stepfs-roots-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

# `debian_root NAME SUITE PACKAGES`: packages with commas between them.
debian_root() {
    debootstrap --variant=minbase --include="$3" "$2" "$work/$1" >"$work/log" 2>&1 || { tail "$work/log"; return 1; }
    # A machine that was booted has it, and engines of containers make it. fusermount3 needs it to unmount.
    ln -sf ../proc/self/mounts "$work/$1/etc/mtab"
    [ -e "$work/$1/dev/fuse" ] || mknod -m 666 "$work/$1/dev/fuse" c 10 229
}

# `in_root ROOT SCRIPT FROM:TO [unshare's options]`: runs a script of the root there, in namespaces of its own. It sees the directory FROM of
# this machine at TO, read-only; '' shows none. It is no chroot, because in one no user namespace can be made. Later mounts spread from it, as
# on a machine that systemd has booted.
in_root() {
    unshare --mount --pid --ipc --uts "${@:4}" --fork --kill-child --propagation private bash -ec '
        mount --bind "$1" "$1"
        cd "$1"
        mount -t proc proc proc
        mount --rbind /sys sys
        mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
        mount -t tmpfs tmpfs dev/shm
        mount -t tmpfs -o mode=755 tmpfs run
        if [ -n "$3" ]; then
            mkdir -p ".${3#*:}"
            mount --bind -o ro "${3%:*}" ".${3#*:}"
        fi
        mkdir -p .old
        pivot_root . .old
        umount -l /.old
        rmdir /.old
        mount --make-rshared /
        ip link set lo up
        exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 bash -eu "$2"
    ' - "$work/$1" "$2" "$3"
}
