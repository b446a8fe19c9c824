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

# Install missing packages, then build the release's program (and other targets, if named). The tests of real programs use it too;
# alone, they run on the program that `cargo test` builds.
build() {
    "$ROOT/scripts/setup.sh"
    build_program "$@"
}

# Build the program and its helper for passthrough. STEPFS_BIN replaces the program, and has the helper beside it.
build_program() {
    command -v cargo >/dev/null || source "$HOME/.cargo/env"
    if [ -z "${STEPFS_BIN:-}" ] || [ "$STEPFS_BIN" = "$STEPFS" ]; then
        export STEPFS_BIN=$STEPFS
        cargo build --release --locked --quiet -p stepfs -p stepfs-passthrough --bins
    fi
    STEPFS_BIN=$(realpath "$STEPFS_BIN")
    [ $# -eq 0 ] || cargo build --release --locked --quiet "$@"
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

# The ways in which a mount serves: root's with passthrough and without, an ordinary user's with the checked helper and without.
# Who is not root has the last.
MODES=(passthrough daemon helper served)
[ "$(id -u)" -eq 0 ] || MODES=(served)

# Runs a command in a mode: `in_mode MODE COMMAND...`. The last two modes are those of a user without privileges, who has copies of
# the program and the helper, and a /dev/fuse. Nobody else sees the user's mounts. `mount_in_mode` mounts there.
in_mode() {
    local -x STEPFS_MODE=$1
    shift
    [[ " ${MODES[*]} " == *" $STEPFS_MODE "* ]] || die "no mode $STEPFS_MODE; there are: ${MODES[*]}"
    case $(id -u):$STEPFS_MODE in
    0:helper | 0:served) ;;
    *) "$@"; return ;;
    esac
    (
        own=$(mktemp -d)
        # A program with a capability must not stay.
        trap 'rm -rf "$own"' EXIT
        chmod 755 "$own"
        # A short name: the addresses of sockets have 108 bytes.
        install -d -o 65534 -g 65534 "$own/u"
        mknod -m 666 "$own/fuse" c 10 229
        cp "$STEPFS_BIN" "$own/stepfs"
        if [ "$STEPFS_MODE" = helper ]; then
            cp "$(dirname "$STEPFS_BIN")/stepfs-passthrough" "$own"
            setcap cap_sys_admin=ep "$own/stepfs-passthrough"
        fi
        # Copies of other mounts would keep those from ending.
        unshare --mount --propagation private bash -ec 'umount --all --lazy --types fuse.stepfs || true
            mount --bind "$1/fuse" /dev/fuse
            export HOME="$1/u" TMPDIR="$1/u" STEPFS_BIN="$1/stepfs" STEPFS_PASSTHROUGH="$1/stepfs-passthrough"
            exec setpriv --reuid 65534 --regid 65534 --clear-groups "${@:2}"' - "$own" "$@"
    )
}

# `mount_in_mode STORE DIR [OPTIONS]`: mounts, and dies if it is not served as the mode says.
mount_in_mode() {
    local by=daemon
    case $STEPFS_MODE in passthrough) by=kernel ;; helper) by=helper ;; esac
    [ "$STEPFS_MODE" != daemon ] || set -- "$@" --no-passthrough
    "$STEPFS_BIN" mount "$@"
    "$STEPFS_BIN" status --json "$2" | grep -q "\"by\": *\"$by\"" || die "this mount is not served by the $by"
}
