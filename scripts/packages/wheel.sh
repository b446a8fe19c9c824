# In a clean root with Python alone: the wheel, by pip.
source /packages/tutorial.sh
python3 -m venv --system-site-packages /root/venv
. /root/venv/bin/activate
show pip install --no-index /packages/stepfs-*.whl
[ "$(command -v stepfs)" = /root/venv/bin/stepfs ] || fail "the program is not on the PATH"
tutorial
show pip uninstall --yes stepfs
hash -r
! command -v stepfs || fail "the program is still there"
