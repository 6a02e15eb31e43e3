# Steps that are bounded in time. Sourced by .ci/run; .ci/step_test.sh tests it.

# All steps together end before this, whatever the bound of each: CI itself is cut off after 90 minutes, and then says nothing.
ci_limit_s=${SHMESH_CI_LIMIT_S:-5100}
steps=() notes=() current= group= since=$SECONDS
log=$(mktemp)

# step SECONDS NAME COMMAND...: runs COMMAND for at most SECONDS, and ends the script with its exit status if it fails.
#
# COMMAND is a program or an exported function, in a process group of its own. It writes to a file, which is copied to our
# output while it runs: a process that it leaves behind can hold the file open, but not a pipe that CI reads to its end.
step() {
    local limit=$1 left=$((ci_limit_s - SECONDS)) status=0 reader
    current=$2 since=$SECONDS
    shift 2
    [ "$limit" -le "$left" ] || limit=$((left > 1 ? left : 1))
    printf '\n=== %5ds  %s (at most %d s)\n' "$SECONDS" "$current" "$limit"
    [ "$(type -t "$1")" != function ] || set -- bash -euo pipefail -c '"$@"' bash "$@"
    : >"$log"
    timeout --kill-after=20 "$limit" "$@" >"$log" 2>&1 </dev/null &
    group=$!
    tail -n +1 -s 0.2 -f --pid="$group" "$log" &
    reader=$!
    wait "$group" || status=$?
    wait "$reader" || true
    if [ $((SECONDS - since)) -ge "$limit" ] && { [ "$status" = 124 ] || [ "$status" = 137 ]; }; then
        echo "=== step \"$current\" did not end within $limit s and was killed: something hangs, or the bound in .ci/run is too short" >&2
        current="$current: TIMED OUT"
    elif [ "$status" != 0 ]; then
        current="$current: FAILED (exit status $status)"
    fi
    # What is left of the group has no parent that waits for it.
    if kill -KILL -- "-$group" 2>/dev/null; then
        echo "=== step \"$current\" left processes behind; they were killed"
    fi
    group=
    steps+=("$(printf '%5ds  %s' "$((SECONDS - since))" "$current")")
    current=
    [ "$status" = 0 ] || exit "$status"
}

# note TEXT: a line of the summary.
note() { notes+=("$1"); }

report() {
    local status=$?
    [ -z "$group" ] || kill -KILL -- "-$group" 2>/dev/null || true
    [ -z "$current" ] || steps+=("$(printf '%5ds  %s: INTERRUPTED' "$((SECONDS - since))" "$current")")
    printf '\nSeconds per step:\n'
    printf '%s\n' "${steps[@]}"
    printf '%5ds  total\n' "$SECONDS"
    [ ${#notes[@]} = 0 ] || printf '%s\n' "${notes[@]}"
    rm -f "$log"
    exit "$status"
}
trap report EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
