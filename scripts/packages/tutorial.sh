# Sourced in a clean root: prints each command, then runs it.
show() {
    printf '$ %s\n' "$*"
    "$@"
}

# The same without the command's output, unless it fails.
quietly() {
    printf '$ %s\n' "$*"
    "$@" >/root/output 2>&1 || { cat /root/output; fail "$1"; }
}

# Ends the script with a reason.
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

# The steps of docs/START.md, with numpy in place of torch.
tutorial() {
    mkdir -p /root/try
    cd /root/try
    show stepfs doctor
    mkdir ckpts
    show stepfs mount ckpts.store ckpts
    show python3 /packages/train.py ckpts
    newest=$(sha256sum <ckpts/step_200.npz)
    show stepfs sync ckpts
    show stepfs ls ckpts
    show stepfs ls -v ckpts | tee listing
    [ "$(grep -c '^released' listing)" -eq 9 ] || fail "nine of ten files should be released"
    grep -q '^sealed .* step_200.npz$' listing || fail "the newest file should be sealed"
    show stepfs inspect ckpts/step_100.npz
    sums=$(cd ckpts && sha256sum -- *)
    [ "$(cat ckpts/step_200.npz | sha256sum)" = "$newest" ] || fail "the newest file has changed"
    show python3 /packages/train.py ckpts ckpts/step_180.npz
    show stepfs umount ckpts
    [ -z "$(ls ckpts)" ] || fail "the mount is still there"
    grep -q "^$(stepfs cat ckpts.store step_100.npz | sha256sum | cut -d' ' -f1)  step_100.npz$" <<<"$sums" || fail "stepfs cat differs"
    show stepfs mount ckpts.store ckpts
    (cd ckpts && sha256sum --quiet -c - <<<"$(grep -v step_200 <<<"$sums")") || fail "a file has changed"
    show stepfs umount ckpts
    show stepfs verify ckpts.store
}
