# In a clean root with Python alone: the wheel, by pip.
source /packages/tutorial.sh
python3 -m venv --system-site-packages /root/venv
. /root/venv/bin/activate
show pip install --no-index /packages/stepfs-*.whl
[ "$(command -v stepfs)" = /root/venv/bin/stepfs ] || fail "the program is not on the PATH"
tutorial
# docs/PYTHON.md, in an environment without torch.
cd /root
show python - <<'END'
import os

import stepfs

with stepfs.mount("try/ckpts.store", "try/ckpts") as ckpts:
    # Right after the mount.
    newest = stepfs.latest(ckpts)
    assert newest is not None and newest.name == "step_380.npz", newest
    assert [c.step for c in stepfs.ls(ckpts)] == list(range(20, 381, 20)), stepfs.ls(ckpts)
    assert stepfs.status(ckpts).problems == ()
assert not os.path.ismount("try/ckpts")
END
show pip uninstall --yes stepfs
hash -r
! command -v stepfs || fail "the program is still there"
deactivate
[ -e /torch/torch ] || exit 0

# An ordinary user types docs/START.md and docs/PYTHON.md. The root's environment with torch is the one "of your training".
useradd --create-home ada
as_ada() { setpriv --reuid ada --regid ada --init-groups env HOME=/home/ada PATH="/home/ada/venv/bin:$PATH" "$@"; }
cd /home/ada
as_ada python3 -m venv venv
as_ada bash -c 'echo /torch >"$(echo venv/lib/python3*/site-packages)/torch.pth"'
cp /packages/stepfs-*.whl .
quietly as_ada pip install --no-index stepfs-*.whl
# The only thing that a user lacks here, with the command that brings it.
! as_ada stepfs doctor >findings || fail "doctor should miss fusermount3"
[ "$(grep -c ^problem findings)" -eq 1 ] || { cat findings; fail "one problem is expected"; }
mend=$(sed -n 's/^problem  fusermount3 .*; fix: //p' findings)
[ "$mend" = "apt-get install fuse3" ] || { cat findings; fail "doctor should name the package"; }
quietly apt-get update --quiet=2
quietly $mend --quiet=2 --yes --no-install-recommends
quietly as_ada pip uninstall --yes stepfs
as_ada python3 /packages/start.py /packages/START.md
as_ada bash -c 'mkdir python && cd python && sed -n "/^\`\`\`python/,/^\`\`\`/{/^\`\`\`/d; p}" /packages/PYTHON.md >page.py && python page.py'
