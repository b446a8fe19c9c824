#!/usr/bin/env bash
# Install missing requirements of stepfs. Safe to run again; that takes no time.
#   scripts/setup.sh            all that the tests and benchmarks need: forty Python packages
#   scripts/setup.sh demo       the needs of the demo: torch and numpy
#   scripts/setup.sh machine    Debian's packages alone, for building stepfs
#   scripts/setup.sh nightly    Chromium as well, which lays out the page of `stepfs report`
#   STEPFS_VENV=DIR             use this Python environment as it is instead of making .venv/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tier=${1:-tests}
case $tier in machine | demo | tests | nightly) ;; *) die "no tier $tier; there are: machine demo tests nightly" ;; esac

[ "$(uname -s)" = Linux ] || die "stepfs needs Linux (FUSE)"

# --- Rust: not installed for you, because the right way depends on how you keep toolchains.
command -v cargo >/dev/null || [ ! -r "$HOME/.cargo/env" ] || source "$HOME/.cargo/env"
command -v cargo >/dev/null || die "cargo not found. Install Rust first: https://rustup.rs (Debian: apt install rustup; rustup default stable)"
needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml")
present=$(cargo --version | awk '{print $2}')
[ "$(printf '%s\n' "$needed" "${present%%-*}" | sort -V | head -1)" = "$needed" ] ||
    die "cargo is $present, stepfs needs $needed or newer. Try: rustup update stable"

# --- Debian packages, each only if its command is absent.
missing=()
need() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
need fusermount3 fuse3
need getfattr attr
need unzip unzip
need rsync rsync
need cc gcc libc6-dev
need make make
# tests/attacks of crates/passthrough give the helper its capability.
need setcap libcap2-bin
[ "$tier" != nightly ] || need chromium chromium

python=''
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        python=$name
        break
    fi
done
if [ -z "${STEPFS_VENV:-}" ]; then
    if [ -z "$python" ]; then
        missing+=(python3 python3-venv)
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        missing+=(python3-venv)
    fi
fi
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || die "please install: ${missing[*]} (no apt-get here to do it with)"
    sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "please install as root: apt-get install ${missing[*]}"
        sudo=(sudo)
    fi
    note "installing ${missing[*]}"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    python=${python:-python3}
fi
[ -e /dev/fuse ] || die "/dev/fuse is missing. Try: modprobe fuse (in a container: run it with --device /dev/fuse --cap-add SYS_ADMIN)"

# --- Most inputs of the fuzzer, which lie in archives; `cargo test` replays them.
"${python:-$PYTHON}" "$ROOT/scripts/fuzz_corpus.py" unpack
[ "$tier" != machine ] || exit 0

# --- Python environment. A tier's stamp holds its list, so that a changed list installs again.
demo=(torch numpy)
packages=(zstandard safetensors transformers accelerate pytest pytest-xdist "moto[s3,server]" mypy)
# Libraries whose files the tests read: optimizers, and those of tests/real/quality/zoo; some 110 MB. Their other dependencies are
# large and not needed.
writers=(lion-pytorch schedulefree galore-torch pytorch_optimizer
    rsl-rl-lib stable-baselines3 gymnasium Farama-Notifications cloudpickle skrl pytorch-lightning lightning-utilities torchmetrics
    peft vector-quantize-pytorch einops einx frozendict loguru torch-einops-utils
    geoopt optuna colorlog
    h5py keras absl-py namex optree ml_dtypes rich
    joblib scikit-learn narwhals scipy threadpoolctl)
if [ -n "${STEPFS_VENV:-}" ]; then
    [ -x "$PYTHON" ] || die "STEPFS_VENV=$STEPFS_VENV has no bin/python"
    exit 0
fi
# install STAMP OPTIONS... -- PACKAGES...: pip's lines show a person what it fetches, some of it for minutes.
install() {
    local stamp=$VENV/.installed-$1 options=()
    shift
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    [ "$(cat "$stamp" 2>/dev/null)" != "$*" ] || return 0
    note "installing $* into ${VENV#"$ROOT"/}/"
    "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off "${options[@]}" "$@" |
        sed -u -n 's/^\(Successfully installed\) .*/\1/; /^ *\(Downloading\|Installing\|Successfully\)/p'
    printf '%s' "$*" >"$stamp"
}
# An interrupted one has no pip.
if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "current torch needs Python 3.10 or newer"
    "$python" -m venv "$VENV"
fi
install demo -- "${demo[@]}"
[ "$tier" != demo ] || exit 0
install tests -- "${packages[@]}"
install writers --no-deps -- "${writers[@]}"
