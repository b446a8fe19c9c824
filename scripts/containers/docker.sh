# In a root: Docker's recipes. Containers have no network, so the daemon needs no bridge and no iptables.
source /containers/steps.sh
setpriv --list-caps >/containers/capabilities
dockerd --bridge=none --iptables=false --cgroup-parent=/stepfs-containers --add-runtime=known=/containers/runc.py \
    --default-runtime=known >/root/dockerd.log 2>&1 &
await 60 docker info || { tail /root/dockerd.log; exit 1; }
show docker --version
docker import /image.tar $IMAGE >/dev/null
rootful docker run --rm --network none
pod docker run --network none
# SIGTERM takes the mount down.
show docker stop --time 30 stepfs
! mountpoint -q /shared/ckpts || fail "the sidecar's mount stays"
