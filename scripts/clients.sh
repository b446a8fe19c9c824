#!/usr/bin/env bash
# Tests with libraries that need an environment of their own: ElasticDL's client, and TensorFlow. Makes the environments once. Exits
# with 4 if there is no Python 3.8, after the tests with TensorFlow.
#   PYTHON38=python3.8    for ElasticDL, which runs in no newer one
#   ELASTICDL_VENV=DIR    its environment, 1 GB; the default is .venv-elasticdl/
#   FRAMEWORKS_VENV=DIR   that of scripts/frameworks.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
second=$(realpath -m "${FRAMEWORKS_VENV:-$ROOT/.venv-frameworks}")
client=$(realpath -m "${ELASTICDL_VENV:-$ROOT/.venv-elasticdl}")
build
export STEPFS_BIN=${STEPFS_BIN:-$STEPFS}

section "TensorFlow"
scripts/frameworks/install.sh "$second"
FRAMEWORKS_PYTHON=$second/bin/python real tests/real/frameworks/test_tensorflow.py

section "ElasticDL"
if [ ! -e "$client/.installed" ]; then
    python=$(command -v "${PYTHON38:-python3.8}") && "$python" --version >/dev/null || {
        note "there is no Python 3.8: ElasticDL's client was not tried"
        exit 4
    }
    "$python" -m venv "$client"
    pip=("$client/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" --pre --no-deps elasticdl==0.2.0rc3
    "${pip[@]}" 'tensorflow-cpu==2.5.3' 'protobuf<3.21' odps pyodps
    touch "$client/.installed"
fi
STEPFS_ELASTICDL_PYTHON=$client/bin/python real tests/real/frameworks/test_elasticdl.py -k real_client
