#!/usr/bin/env bash
# Build the installable packages into target/package/: a wheel for pip and a package for Debian, each with the same
# program, the wheel also with the Python package. Checks that the program has no symbols and stays small, that the wheel runs and
# `import stepfs` works in a new environment, and that the Debian package has the files of docs/INSTALL.md. Without dpkg-deb there is no Debian package.
#   STEPFS_PACKAGE_MB=N    most megabytes that the program may have (17)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
MOST=$((${STEPFS_PACKAGE_MB:-17} * 1000000))
OUT=$ROOT/target/package
STEPFS=$ROOT/target/dist/stepfs
command -v cargo >/dev/null || source "$HOME/.cargo/env"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$OUT"
mkdir -p "$OUT"

section "program"
cargo build --profile dist --locked --bin stepfs
bytes=$(stat -c %s "$STEPFS")
note "$bytes bytes"
[ "$bytes" -le "$MOST" ] || die "the program has $bytes bytes, more than $MOST; find the reason with: cargo tree -e normal"
! readelf -SW "$STEPFS" | grep -q '\.symtab\|\.debug_' || die "the program has symbols; Cargo.toml needs strip = true"

section "wheel"
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
"$work/tools/bin/maturin" build --quiet --profile dist --out "$OUT"
python3 -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet --disable-pip-version-check --no-index "$OUT"/stepfs-*.whl
said=$("$work/fresh/bin/stepfs" --version)
[ "$said" = "stepfs $version" ] || die "the wheel's program says: $said"
found=$("$work/fresh/bin/python" -Ic 'import stepfs; print(stepfs._program.program())')
[ "$found" = "$work/fresh/bin/stepfs" ] || die "the wheel's package finds the program: $found"
[ -e "$work"/fresh/lib/python3*/site-packages/stepfs/py.typed ] || die "the wheel's package has no py.typed"

section "Debian package"
if command -v dpkg-deb >/dev/null; then
    root=$work/root
    install -D -m 755 "$STEPFS" "$root/usr/bin/stepfs"
    mkdir -p "$root/usr/sbin" "$root/usr/share/man/man1" "$root/usr/share/man/man8" "$root/DEBIAN"
    # mount(8) looks for its helpers there.
    for name in mount.stepfs mount.fuse.stepfs; do ln -s ../bin/stepfs "$root/usr/sbin/$name"; done
    install -D -m 644 packaging/stepfs@.service "$root/usr/lib/systemd/system/stepfs@.service"
    "$STEPFS" man "$work/man"
    cp "$work"/man/*.1 "$root/usr/share/man/man1"
    cp "$work"/man/*.8 "$root/usr/share/man/man8"
    gzip -9n "$root"/usr/share/man/man[18]/*
    mkdir -p "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
        "$root/usr/share/fish/vendor_completions.d"
    "$STEPFS" completions bash >"$root/usr/share/bash-completion/completions/stepfs"
    "$STEPFS" completions zsh >"$root/usr/share/zsh/vendor-completions/_stepfs"
    "$STEPFS" completions fish >"$root/usr/share/fish/vendor_completions.d/stepfs.fish"
    install -D -m 644 README.md "$root/usr/share/doc/stepfs/README.md"
    cp docs/*.md "$root/usr/share/doc/stepfs/"
    cat LICENSE-MIT LICENSE-APACHE >"$root/usr/share/doc/stepfs/copyright"
    # The newest version of a C library symbol that the program needs.
    libc=$(grep -ao 'GLIBC_2\.[0-9]*' "$STEPFS" | sed 's/GLIBC_//' | sort -uV | tail -1)
    cat >"$root/DEBIAN/control" <<END
Package: stepfs
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The stepfs authors <https://github.com/stepfs/stepfs>
Depends: libc6 (>= $libc), libgcc-s1
Recommends: fuse3
Section: utils
Priority: optional
Homepage: https://github.com/stepfs/stepfs
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Description: filesystem for training checkpoints
 Mount it as a training job's checkpoint directory. The newest checkpoint
 stays as it was written; older ones are kept as quantized differences.
END
    deb=$OUT/stepfs_${version}_$(dpkg --print-architecture).deb
    dpkg-deb --build --root-owner-group "$root" "$deb" >/dev/null
    dpkg-deb --extract "$deb" "$work/extracted"
    for path in usr/sbin/mount.stepfs usr/sbin/mount.fuse.stepfs usr/lib/systemd/system/stepfs@.service \
        usr/share/man/man1/stepfs-mount.1.gz usr/share/man/man8/mount.stepfs.8.gz usr/share/doc/stepfs/INSTALL.md; do
        [ -e "$work/extracted/$path" ] || die "the Debian package has no $path"
    done
    said=$("$work/extracted/usr/bin/stepfs" --version)
    [ "$said" = "stepfs $version" ] || die "the Debian package's program says: $said"
else
    note "no dpkg-deb here, so there is no Debian package"
fi

section "package of the passthrough helper"
if command -v dpkg-deb >/dev/null; then
    cargo build --profile dist --locked --package stepfs-passthrough --bin stepfs-passthrough
    root=$work/helper
    install -D -m 750 target/dist/stepfs-passthrough "$root/usr/libexec/stepfs-passthrough"
    mkdir -p "$root/DEBIAN"
    cat >"$root/DEBIAN/control" <<END
Package: stepfs-passthrough
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The stepfs authors <https://github.com/stepfs/stepfs>
Depends: stepfs (= $version), libc6 (>= $libc), libcap2-bin, adduser
Section: utils
Priority: optional
Homepage: https://github.com/stepfs/stepfs
Description: passthrough for stepfs mounts of ordinary users
 A helper with CAP_SYS_ADMIN for the members of the group stepfs. The kernel
 then reads and writes their checkpoints at the speed of the disk.
END
    cat >"$root/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
getent group stepfs >/dev/null || addgroup --system stepfs
chgrp stepfs /usr/libexec/stepfs-passthrough
chmod 0750 /usr/libexec/stepfs-passthrough
# A change of the owner takes capabilities away, so this comes last.
setcap cap_sys_admin=ep /usr/libexec/stepfs-passthrough
END
    chmod 755 "$root/DEBIAN/postinst"
    dpkg-deb --build --root-owner-group "$root" "$OUT/stepfs-passthrough_${version}_$(dpkg --print-architecture).deb" >/dev/null
fi

section "packages"
(cd "$OUT" && ls -l)
