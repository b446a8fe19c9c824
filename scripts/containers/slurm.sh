# In a root: a cluster of one node, with the Prolog and the Epilog of docs/INSTALL.md. What is left after each job would show.
source /containers/steps.sh
python3 - <<'END'
import re
for script in re.findall(r"```sh\n(#!/bin/sh\n# (?:Pro|Epi)log.*?)```", open("/containers/INSTALL.md").read(), re.S):
    open(f"/etc/slurm/{script[12:18].lower()}", "w").write(script)
END
chmod +x /etc/slurm/prolog /etc/slurm/epilog
cat >/etc/slurm/slurm.conf <<'END'
ClusterName=stepfs
SlurmctldHost=node
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
Prolog=/etc/slurm/prolog
Epilog=/etc/slurm/epilog
PrologFlags=Alloc
NodeName=node CPUs=2
PartitionName=all Nodes=ALL Default=YES
END
hostname node
# Slurm finds no name on a machine that has loopback alone.
ip address add 192.0.2.1/32 dev lo
echo "127.0.0.1 localhost node" >/etc/hosts
mkdir -p /var/spool/slurmctld /var/spool/slurmd
install -d -o munge /run/munge
install -d -m 755 /scratch
setpriv --reuid munge --regid munge --clear-groups munged
slurmctld -c -L /root/slurmctld.log
slurmd -L /root/slurmd.log
as_ada() { setpriv --reuid ada --regid ada --init-groups env HOME=/home/ada PATH="$PATH" "$@"; }
idle() { [ "$(sinfo -h -o %T)" = idle ]; }
await 30 idle || { tail /root/slurm*.log; exit 1; }
show sinfo --version
cd /home/ada
dir=/scratch/ada/ckpts

# `submit NAME OPTIONS... <<<COMMANDS`: prints the number of the job.
submit() {
    { echo '#!/bin/bash' && cat; } >"$1.job"
    as_ada sbatch --parsable --output="$1.log" "${@:2}" "$1.job"
}
is() { scontrol show job "$1" | grep -q "JobState=$2"; }
ended() { ! is "$1" '\(PENDING\|RUNNING\|CONFIGURING\|COMPLETING\)'; }
# `succeed NAME <<<COMMANDS`: submits a job and waits for its end.
succeed() {
    local job
    job=$(submit "$1")
    await 120 ended "$job"
    cat "$1.log"
    is "$job" COMPLETED || { tail /root/slurmd.log; fail "the job $1"; }
}
is_mounted() { grep -q " $dir fuse.stepfs " /proc/mounts; }
# After the last job: no mount, no process of the user, and the node serves on.
nothing_left() {
    await 100 idle || { sinfo -R; scontrol show node | grep -i state; tail -n 20 /root/slurmd.log; exit 1; }
    ! is_mounted || fail "the mount stays"
    ! pgrep -u ada >/dev/null || { ps -fu ada; fail "processes stay"; }
    [ ! -e /run/stepfs/ada ] || fail "a count of jobs stays"
}
LOOP="while :; do python3 /trial/train.py $dir \$(stepfs latest $dir || true); done"

section() { printf '\n# %s\n' "$*"; }
section "a job trains, and goes on from its checkpoint"
succeed train <<<"stepfs doctor $dir; /trial/trial.sh train $dir; stepfs status $dir"
grep -q '^served .*by the kernel' train.log || fail "the kernel should serve"
nothing_left
show as_ada stepfs ls /scratch/ada/ckpts.store

section "two jobs of one user: the end of one leaves the mount to the other"
long=$(submit long <<<"$LOOP")
await 30 is "$long" RUNNING
succeed short <<<"touch $dir/short"
is_mounted || fail "the mount went with the first job"

section "a job that is cancelled while it saves"
before=$(as_ada stepfs latest $dir)
grown() { [ "$(as_ada stepfs latest $dir)" != "$before" ]; }
await 60 grown
show scancel "$long"
await 60 is "$long" CANCELLED
nothing_left

section "a job beyond its time"
late=$(submit late --time 1 <<<"trap '' TERM; $LOOP")
await 150 is "$late" TIMEOUT
nothing_left
show as_ada stepfs verify /scratch/ada/ckpts.store
succeed again <<<"python3 /trial/train.py $dir \$(stepfs latest $dir)"
nothing_left
