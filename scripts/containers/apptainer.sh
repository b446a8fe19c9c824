# In a root: Apptainer's recipes, as a user.
source /containers/steps.sh
echo "127.0.0.1 localhost" >/etc/hosts
show apptainer --version
as_ada() { setpriv --reuid ada --regid ada --init-groups env HOME=/home/ada "$@"; }
cd /home/ada
clean_data -o ada -g ada
show stepfs mount -o user=ada,create /data/ckpts.store /ckpts
show as_ada apptainer exec --bind /ckpts,/data:/data:ro /image /trial/trial.sh train /ckpts
show stepfs umount /ckpts

clean_data -o ada -g ada
doctor "ok /dev/fuse" "warning privileges CAP_SYS_ADMIN in a user namespace" "ok mount" "warning passthrough none" -- \
    as_ada apptainer exec --fakeroot --bind /data /image
inside=(as_ada apptainer exec --fakeroot --pid --bind /data /image sh -c)
show "${inside[@]}" '/trial/trial.sh mount daemon /data/ckpts.store /ckpts'
# With --pid nothing stays, although this one does not unmount, and the next mount need not wait.
show "${inside[@]}" 'stepfs mount /data/ckpts.store /ckpts && python3 /trial/train.py /ckpts'
! pgrep -u ada || fail "a daemon stays"
show "${inside[@]}" 'stepfs mount /data/ckpts.store /ckpts && stepfs ls /ckpts; stepfs umount /ckpts'
