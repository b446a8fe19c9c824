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
    newest = stepfs.latest(ckpts)
    assert newest is not None and newest.name == "step_380.npz", newest
    assert [c.step for c in stepfs.ls(ckpts)] == list(range(20, 381, 20)), stepfs.ls(ckpts)
    assert stepfs.status(ckpts).problems == ()
assert not os.path.ismount("try/ckpts")
END
show pip uninstall --yes stepfs
hash -r
! command -v stepfs || fail "the program is still there"
