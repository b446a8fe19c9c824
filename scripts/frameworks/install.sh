#!/usr/bin/env bash
# The second environment of frameworks.sh: libraries that the tests do without, some 3 GB. A .pth file adds the first
# environment's packages, such as torch, without a second installation. A second run takes no time.
#   install.sh DIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
second=$1
packages=(tensorflow-cpu jax flax orbax-checkpoint optax equinox joblib pytorch-ignite mmengine fvcore timm torchvision
    paddlepaddle fastai ninja)
# Installed without their dependencies, which need a GPU or are for training on many machines.
alone=(megatron-core torchtitan torchdata tyro docstring-parser typeguard spmd_types)
[ "$(cat "$second/.installed" 2>/dev/null)" != "${packages[*]} ${alone[*]} deepspeed" ] || exit 0
note "installing ${packages[*]} ${alone[*]} deepspeed into ${second#"$ROOT"/}/ (minutes, once)"
"$PYTHON" -m venv "$second"
first=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$second/bin/python" -c 'import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "zz_first_environment.pth").write_text(sys.argv[1] + "\n")' "$first"
pip=("$second/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "${packages[@]}"
"${pip[@]}" --no-deps "${alone[@]}"
# It looks at torch while it is built. Nothing is compiled.
DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation deepspeed
printf '%s' "${packages[*]} ${alone[*]} deepspeed" >"$second/.installed"
