# Sourced by the other scripts: paths and output.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m "${STEPFS_VENV:-$ROOT/.venv}")
PYTHON=$VENV/bin/python
STEPFS=$ROOT/target/release/stepfs
TOOLS=$ROOT/target/tools

if [ -t 1 ]; then BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' PLAIN=$'\e[0m'; else BOLD='' DIM='' RED='' PLAIN=''; fi

# A heading, so that the log shows the step that failed.
section() { printf '\n%s== %s%s\n' "$BOLD" "$*" "$PLAIN"; }

# For a script of several steps: prints the name of the step that fails. `run NAME COMMAND...` is a step.
begin_steps() {
    step='' began=$SECONDS
    trap 'code=$?; [ $code -eq 0 ] || printf "\n%s%s failed after %d s%s\n" "$RED" "$step" $((SECONDS - began)) "$PLAIN" >&2' EXIT
}
run() {
    step=$1
    shift
    section "$step"
    "$@"
}

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

# Install missing packages, then build the program (and other targets, if named). STEPFS_BIN replaces the built program.
build() {
    "$ROOT/scripts/setup.sh"
    if [ -z "${STEPFS_BIN:-}" ] || [ $# -gt 0 ]; then
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

# Tests of real programs on a real mount: one process per core, then the tests that must run alone. Arguments go to pytest. pytest
# exits with 5 if it selects no test; that is fine for one of the two passes.
real() {
    local code=0 alone=0 select=()
    case " $* " in *" -m "*) ;; *) select=(-m "not alone") ;; esac
    "$PYTHON" -m pytest -p no:cacheprovider -q -n "${STEPFS_TEST_JOBS:-$(nproc)}" "${select[@]}" "$@" || code=$?
    [ $code -eq 0 ] || [ $code -eq 5 ] || return $code
    [ ${#select[@]} -gt 0 ] || return $code
    "$PYTHON" -m pytest -p no:cacheprovider -q -m alone "$@" || alone=$?
    [ $alone -ne 5 ] || return $code
    return $alone
}

die() {
    printf '%s%s: %s%s\n' "$RED" "$(basename "$0")" "$*" "$PLAIN" >&2
    exit 1
}
