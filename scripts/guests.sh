#!/usr/bin/env bash
# Guests with kernels of their own (User-Mode Linux) that share a file system: the tests of a shared store, on NFS or CephFS.
# Guest 0 serves NFS, guests 1 and 2 mount the file system at /shared. All see the host's files, and change none: each has a layer
# in memory over them. They reach each other and this script, and nothing else.
#   scripts/guests.sh nfs                   the tests
#   scripts/guests.sh nfs COMMAND...        another command beside the guests; STEPFS_GUESTS names a file with their addresses
# It needs root, and installs Debian's packages; where it cannot, it exits with 4.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
PACKAGES=(user-mode-linux busybox-static nfs-common nfs-kernel-server kmod cpio iproute2)

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ ! -c /dev/net/tun ]; then
    note "guests were not tried: they need root, Debian's packages and /dev/net/tun"
    exit 4
fi
engine=${1:?nfs or ceph}
shift
[ "$engine" != ceph ] || PACKAGES+=(ceph-mon ceph-mgr ceph-osd ceph-mds ceph-common)
if ! dpkg -s "${PACKAGES[@]}" >/dev/null 2>&1; then
    section "Debian's packages of the guests"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null
fi
[ $# -gt 0 ] || { build && set -- "$PYTHON" -m pytest -q -x tests/real/shared; }
# The links to the guests are in a network of their own, which ends with the last process.
exec unshare --net "$PYTHON" scripts/guests/boot.py "$engine" "$@"
