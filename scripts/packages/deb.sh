# In a clean root: the Debian package by apt, a line in fstab, the unit of systemd.
source /packages/tutorial.sh
export DEBIAN_FRONTEND=noninteractive
quietly apt-get update --quiet=2
quietly apt-get install --quiet=2 --yes /packages/stepfs_*.deb
command -v fusermount3 >/dev/null || fail "the package should bring fuse3"
tutorial

# docs/INSTALL.md, "A mount at boot, by fstab".
mkdir -p /data /ckpts
show stepfs mount /data/ckpts.store /ckpts
show stepfs umount /ckpts
echo "/data/ckpts.store  /ckpts  stepfs  nofail,allow_other,profile=compact  0 0" >>/etc/fstab
show mount /ckpts
grep '^/data/ckpts.store /ckpts fuse.stepfs ' /proc/mounts || fail "the mount is not in /proc/mounts"
grep -q '^default_profile = "compact"' /data/ckpts.store/stepfs.toml || fail "the option profile= has no effect"
show cp /root/try/ckpts.store/tree/step_380.npz /ckpts/
show umount /ckpts
show mount /ckpts
cmp /root/try/ckpts.store/tree/step_380.npz /ckpts/step_380.npz || fail "the file has changed"
show umount /ckpts

# docs/INSTALL.md, "A mount as a service of systemd": the service itself needs a machine that systemd runs.
quietly apt-get install --quiet=2 --yes --no-install-recommends systemd
mkdir -p /etc/stepfs
printf 'STORE=/data/ckpts.store\nDIR=/ckpts\nOPTIONS=--allow-other\n' >/etc/stepfs/ckpts.conf
show systemd-analyze verify --man=no stepfs@ckpts.service
for page in man1/stepfs-mount.1.gz man8/mount.stepfs.8.gz; do
    gzip -t "/usr/share/man/$page" || fail "no manual page $page"
done
quietly apt-get remove --quiet=2 --yes stepfs
hash -r
! command -v stepfs || fail "the program is still there"
[ -e /data/ckpts.store/stepfs.toml ] || fail "the store should stay"
