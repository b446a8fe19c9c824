# In a root: the pod of docs/INSTALL.md on a kubelet of its own, which takes pods from files and containers from Docker.
# A claim needs a whole cluster, so a directory of the host stands for it. Without an overlay network pods have the host's.
source /containers/steps.sh
setpriv --list-caps >/containers/capabilities
dockerd --bridge=none --iptables=false --cgroup-parent=/stepfs-containers --add-runtime=known=/containers/runc.py \
    --default-runtime=known >/root/dockerd.log 2>&1 &
await 60 docker info || { tail /root/dockerd.log; exit 1; }
docker import /image.tar $IMAGE:1 >/dev/null
docker import --change 'CMD ["sleep", "infinity"]' /image.tar stepfs-pause:1 >/dev/null
hostname node
echo "127.0.0.1 localhost node" >/etc/hosts
ip address add 192.0.2.1/32 dev lo
clean_data
mkdir -p /etc/kubernetes
[ -e /dev/kmsg ] || mknod /dev/kmsg c 1 11
kubelet --pod-manifest-path=/etc/kubernetes --container-runtime=docker --pod-infra-container-image=stepfs-pause:1 --fail-swap-on=false \
    --cgroup-driver=cgroupfs --cgroups-per-qos=false --enforce-node-allocatable= --eviction-hard= --hairpin-mode=none \
    --node-ip=192.0.2.1 --healthz-port=0 --address=127.0.0.1 --read-only-port=10255 >/root/kubelet.log 2>&1 &
show kubelet --version
python3 - <<'END'
import re
[pod] = re.findall(r"```yaml\n(.*?)```", open("/containers/INSTALL.md").read(), re.S)
for here, there in {
    "IMAGE-WITH-STEPFS": "stepfs-trial:1",
    "TRAINER": "stepfs-trial:1",
    "python train.py": "/trial/trial.sh train",
    "persistentVolumeClaim: {claimName: ckpts}": "hostPath: {path: /data}",
    "restartPolicy: Never": "restartPolicy: Never\n  hostNetwork: true",
}.items():
    assert here in pod, here
    pod = pod.replace(here, there)
open("/etc/kubernetes/train.yaml", "w").write(pod)
END
cat /etc/kubernetes/train.yaml
of() { docker ps --all --quiet --filter "label=io.kubernetes.container.name=$1"; }
exited() { [ "$(docker inspect --format '{{.State.Status}}' "$(of trainer)")" = exited ]; }
await 90 exited || { tail /root/kubelet.log; docker ps --all; exit 1; }
docker logs "$(of trainer)"
[ "$(docker inspect --format '{{.State.ExitCode}}' "$(of trainer)")" -eq 0 ] || fail "the trainer failed"
show stepfs ls /data/ckpts.store
# The end of the pod takes the mount down.
grep -q fuse.stepfs /proc/mounts || fail "the sidecar should still serve"
rm /etc/kubernetes/train.yaml
gone() { [ -z "$(docker ps --quiet)" ] && ! grep -q fuse.stepfs /proc/mounts; }
await 90 gone || { grep fuse.stepfs /proc/mounts; tail /root/kubelet.log; exit 1; }
stepfs verify /data/ckpts.store
