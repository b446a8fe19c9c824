#!/usr/bin/env bash
# Runs each long script in turn, also after a failure, and prints a table at the end. The output lies in target/nightly/. Exits
# with 1 if one failed. Takes a night: about an hour each for soak.sh and corrupt.sh, and the others.
#   scripts/nightly.sh [NAME...]    only these, such as kill and soak
#   scripts/nightly.sh --list       all of them, with arguments
#   scripts/nightly.sh --names      their names as JSON, for the workflow file, which gives each a machine
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
LOGS=$ROOT/target/nightly
# The quickest first: name, then arguments. A script that takes a seed gets the date.
seed=$(date +%Y%m%d)
jobs=(
    "audit"
    "docs"
    "packages"
    "containers"
    "long_tests"
    "threads 2000"
    "kill 100 $seed"
    "stress"
    "histories 20 $seed"
    "model 10000 $seed"
    "posix"
    "crash"
    "sanitize"
    "frameworks"
    "clients"
    "ceph"
    "bench --gate"
    "fuzz 120"
    "corrupt"
    "soak"
)

if [ "${1:-}" = --list ]; then
    for job in "${jobs[@]}"; do read -r name arguments <<<"$job" && echo "scripts/$name.sh $arguments"; done
    exit 0
fi
names=("${jobs[@]%% *}")
if [ "${1:-}" = --names ]; then
    printf '%s\n' "${names[@]}" | sed 's/.*/"&"/' | paste -sd, | sed 's/.*/[&]/'
    exit 0
fi
for name in "$@"; do
    printf '%s\n' "${names[@]}" | grep -qx -- "$name" || die "no long script $name; there are: ${names[*]}"
done

mkdir -p "$LOGS"
table=() failed=0
for job in "${jobs[@]}"; do
    read -r name arguments <<<"$job"
    [ $# -eq 0 ] || printf '%s\n' "$@" | grep -qx -- "$name" || continue
    section "$name.sh $arguments"
    began=$SECONDS code=0
    # shellcheck disable=SC2086
    "scripts/$name.sh" $arguments </dev/null >"$LOGS/$name.log" 2>&1 || code=$?
    case $name:$code in
    *:0) result=passed ;;
    clients:4) result="not whole: there is no Python 3.8" ;;
    containers:4) result="not whole: no Apptainer or no kubelet" ;;
    ceph:4) result="not whole: no Ceph can be installed" ;;
    audit:4) result="not whole: the advisories cannot be reached" ;;
    *) result="FAILED, exit code $code" failed=1 && tail -20 "$LOGS/$name.log" ;;
    esac
    row=$(printf '%-10s %6d s   %s' "$name" $((SECONDS - began)) "$result")
    echo "$row"
    table+=("$row")
done
section "summary; output in ${LOGS#"$ROOT"/}/"
printf '%s\n' "${table[@]}" | tee "$LOGS/summary.txt"
exit $failed
