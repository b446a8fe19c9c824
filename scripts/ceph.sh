#!/usr/bin/env bash
# Tests with a real Ceph on this machine: all tests of tests/real/mirror, with radosgw as S3 and CephFS as directory.
# CephFS has two clients. Nodes take them in turn, so what one client writes another reads. The script needs root, and
# installs Debian's packages; where it cannot, it exits with 4. The data take 6 GB at most.
#   scripts/ceph.sh                    the tests
#   scripts/ceph.sh COMMAND...         another command, with the bucket and the directories in its environment
# The daemons listen on loopback only. They and their data are gone at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
PACKAGES=(ceph-mon ceph-mgr ceph-osd ceph-mds radosgw ceph-fuse)

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    note "Ceph was not tried: it needs root and Debian's packages"
    exit 4
fi
if ! dpkg -s "${PACKAGES[@]}" >/dev/null 2>&1; then
    section "Debian's packages of Ceph"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null
fi
[ $# -gt 0 ] || build

base=$(mktemp -d -t stepfs-ceph-XXXXXX)
pids=()
stop() {
    code=$?
    trap - EXIT INT TERM
    for client in a b; do mountpoint -q "$base/$client" && umount -l "$base/$client"; done
    # The last one first: clients, then gateways, then storage.
    for ((n = ${#pids[@]} - 1; n >= 0; n--)); do
        kill "${pids[n]}" 2>/dev/null || continue
        for _ in {1..50}; do kill -0 "${pids[n]}" 2>/dev/null && sleep .2 || break; done
        kill -9 "${pids[n]}" 2>/dev/null || true
        wait "${pids[n]}" 2>/dev/null || true
    done
    if [ $code -ne 0 ] && ! $up; then tail -n 20 "$base"/log/*.out >&2; fi
    rm -rf "$base"
    exit $code
}
up=false
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Start a daemon in the background: its name, then the command. In a session of its own, Ctrl-C does not reach it
# before the tests have ended.
daemon() {
    setsid "${@:2}" -f </dev/null >"$base/log/$1.out" 2>&1 &
    pids+=($!)
}
# Wait for a condition, for so many seconds.
await() {
    for ((n = 0; n < $1 * 5; n++)); do
        "${@:2}" >/dev/null 2>&1 && return
        sleep .2
    done
    die "not within $1 s: ${*:2}"
}
ceph() { timeout 60 ceph "$@"; }

section "Ceph $(ceph --version | cut -d' ' -f3)"
mkdir "$base"/{log,run,mon,mgr,osd,mds,a,b}
read -r mon gateway < <("$PYTHON" -c '
import socket
found = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in found))')
fsid=$(cat /proc/sys/kernel/random/uuid)
export CEPH_CONF=$base/ceph.conf
# One copy of everything. The file of the storage daemon is sparse.
cat >"$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon_host = [v2:127.0.0.1:$mon]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = $base/run
keyring = $base/keyring
rgw_data = $base
admin_socket = $base/run/\$name.\$pid.asok
pid_file = $base/run/\$name.\$pid.pid
crash_dir = $base/run
log_file = $base/log/\$name.log
mon_data = $base/mon
mgr_data = $base/mgr
osd_data = $base/osd
mds_data = $base/mds
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
osd_objectstore = bluestore
bluestore_block_size = 6442450944
osd_memory_target = 1073741824
mgr_initial_modules =
rgw_gc_obj_min_wait = 60
rgw_gc_processor_period = 60
CONF
# The first monitor takes all keys over.
(umask 077 && : >"$base/keyring")
all=(--cap mon 'allow *' --cap osd 'allow *' --cap mds 'allow *' --cap mgr 'allow *')
for name in mon. client.admin mgr.a osd.0 mds.a client.rgw client.a client.b; do
    ceph-authtool "$base/keyring" --gen-key -n $name "${all[@]}"
done
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon]" "$base/monmap" >/dev/null
ceph-mon -i a --mkfs --monmap "$base/monmap" --keyring "$base/keyring"
daemon mon ceph-mon -i a
await 30 ceph mon stat
daemon mgr ceph-mgr -i a
osd=$(cat /proc/sys/kernel/random/uuid)
ceph osd new "$osd" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$osd" >"$base/log/osd.out" 2>&1
daemon osd ceph-osd -i 0
for pool in files.data files.meta; do ceph osd pool create $pool >/dev/null 2>&1; done
ceph fs new files files.meta files.data >/dev/null 2>&1
daemon mds ceph-mds -i a
daemon rgw radosgw -n client.rgw --rgw-frontends "beast endpoint=127.0.0.1:$gateway"
is_active() { ceph mds stat | grep -q 'up:active'; }
await 60 is_active
for client in a b; do
    daemon "client-$client" ceph-fuse -n "client.$client" "$base/$client"
    await 60 mountpoint -q "$base/$client"
done
answers() { (exec 3<>"/dev/tcp/127.0.0.1/$gateway"); }
await 120 answers
export AWS_ENDPOINT_URL=http://127.0.0.1:$gateway AWS_REGION=us-east-1 AWS_ACCESS_KEY_ID=stepfs AWS_SECRET_ACCESS_KEY
AWS_SECRET_ACCESS_KEY=$(cat /proc/sys/kernel/random/uuid)
timeout 120 radosgw-admin user create --uid=stepfs --display-name=stepfs --access-key="$AWS_ACCESS_KEY_ID" \
    --secret-key="$AWS_SECRET_ACCESS_KEY" >/dev/null
export STEPFS_TEST_BUCKET=stepfs STEPFS_TEST_DIRECTORIES=$base/a:$base/b
"$PYTHON" -c 'import boto3, os
boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket=os.environ["STEPFS_TEST_BUCKET"])'
up=true

if [ $# -gt 0 ]; then
    "$@"
else
    export STEPFS_BIN=${STEPFS_BIN:-$STEPFS}
    real tests/real/mirror
fi
