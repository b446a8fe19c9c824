# Sourced by the other scripts: paths and output.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m "${STEPFS_VENV:-$ROOT/.venv}")
PYTHON=$VENV/bin/python
STEPFS=$ROOT/target/release/stepfs
TOOLS=$ROOT/target/tools

if [ -t 1 ]; then BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' PLAIN=$'\e[0m'; else BOLD='' DIM='' RED='' PLAIN=''; fi

# A heading, so that the log shows the step that failed.
section() { printf '\n%s== %s%s\n' "$BOLD" "$*" "$PLAIN"; }

# For a script of several steps: prints the time of each, and the name of the one that fails. `run NAME COMMAND...` is a step.
begin_steps() {
    step='' began=$SECONDS times=()
    trap 'code=$?; stop_fetching; [ $code -eq 0 ] || printf "\n%s%s failed after %d s%s\n" "$RED" "$step" $((SECONDS - began)) "$PLAIN" >&2' EXIT
}
run() {
    local start=$SECONDS
    step=$1
    shift
    section "$step"
    "$@"
    times+=("$(printf '%5d s  %s' $((SECONDS - start)) "$step")")
}
end_steps() {
    section "$1"
    printf '%s\n' "${times[@]}"
}

# The Python packages of a tier arrive while Rust compiles: pip waits for the network, cargo for the processor.
fetch_python() {
    mkdir -p "$ROOT/target"
    [ -n "$(trap -p EXIT)" ] || trap stop_fetching EXIT
    # A group of its own, since Ctrl-C does not reach a script's background.
    set -m
    "$ROOT/scripts/setup.sh" "$1" </dev/null >"$ROOT/target/setup.log" 2>&1 &
    set +m
    fetching=$!
}
python_is_there() {
    # While it lasts, its output is the progress.
    ! kill -0 "$fetching" 2>/dev/null || tail -n +1 -f --pid="$fetching" "$ROOT/target/setup.log"
    local code=0
    wait "$fetching" || code=$?
    fetching=''
    [ $code -eq 0 ] || { tail -20 "$ROOT/target/setup.log" && die "the Python packages could not be installed"; }
}
stop_fetching() { [ -z "${fetching:-}" ] || kill -- "-$fetching" 2>/dev/null || true; }

# Explanation between commands.
note() { printf '%s%s%s\n' "$DIM" "$*" "$PLAIN"; }

# Print a command as one would type it, then run it.
show() {
    local text="$*"
    text=${text//"$STEPFS"/stepfs}
    text=${text//"$PYTHON"/python}
    text=${text//"$ROOT/scripts/"/}
    printf '%s$ %s%s\n' "$BOLD" "$text" "$PLAIN"
    "$@"
}

# Install missing packages, then build the release's program (and other targets, if named). STEPFS_BIN replaces it. The tests of
# real programs use it too; alone, they run on the program that `cargo test` builds.
build() {
    "$ROOT/scripts/setup.sh"
    export STEPFS_BIN=${STEPFS_BIN:-$STEPFS}
    if [ "$STEPFS_BIN" = "$STEPFS" ] || [ $# -gt 0 ]; then
        command -v cargo >/dev/null || source "$HOME/.cargo/env"
        cargo build --release --locked --quiet "$@"
    fi
}

# Install a program of a crate into target/tools/, unless it is there: name, version, and options of cargo install.
cargo_tool() {
    "$TOOLS/bin/$1" --version 2>/dev/null | grep -qF "$2" && return
    note "installing $1 $2 into target/tools/"
    CARGO_TARGET_DIR=$TOOLS/build cargo install --quiet --locked --root "$TOOLS" "$1@$2" "${@:3}"
    rm -rf "$TOOLS/build"
}

# Tests of real programs on a real mount: five processes on two cores, since many wait for the device and for each other.
# Arguments go to pytest. It exits with 5 if they select no test; that is fine.
real() {
    local code=0
    "$PYTHON" -m pytest -p no:cacheprovider -q -n "${STEPFS_TEST_JOBS:-$(($(nproc) * 5 / 2))}" --durations 15 "$@" || code=$?
    [ $code -eq 5 ] || return $code
}

die() {
    printf '%s%s: %s%s\n' "$RED" "$(basename "$0")" "$*" "$PLAIN" >&2
    exit 1
}
