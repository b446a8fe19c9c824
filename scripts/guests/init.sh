#!/bin/busybox sh
# Process 1 of a guest. The initial file system has busybox, the kernel's modules in their order, and /guest: what this guest is.
# The guest's root is the host's, read only, with a layer in memory over it.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "guest: no $module"; done </modules/order
. /guest
hostname "$NAME"
ip link set lo up
# The first device reaches the host alone, the second one the other guests.
ip addr add "10.77.$NUMBER.2/24" dev vec0 && ip link set vec0 up
ip addr add "10.78.0.$NUMBER/24" dev vec1 && ip link set vec1 up
mkdir -p /lower /layer /root
mount -t hostfs -o ro none /lower
mount -t tmpfs -o mode=755,size=80% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work overlay /root
for at in proc sys dev; do mount -o move "/$at" "/root/$at"; done
mkdir -p /root/dev/shm /root/dev/pts /root/shared
mount -t tmpfs shm /root/dev/shm
mount -t devpts pts /root/dev/pts
mount -t tmpfs run /root/run
mkdir -p /root/run/guest
cp /guest /key /root/run/guest
# The shell takes up daemons that end.
exec switch_root /root /bin/busybox sh -c "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
ulimit -n 1048576
$PYTHON $HERE/agent.py </dev/null &
while :; do sleep 1; done"
