# Steps that are bounded in time. Sourced by .ci/run; .ci/step_test.sh tests it.

# All steps together end before this, whatever the bound of each: CI itself is cut off after 90 minutes, and then says nothing.
ci_limit_s=${SHMESH_CI_LIMIT_S:-5100}
steps=() notes=() current= group= beside= since=$SECONDS
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

# beside FUNCTION: runs FUNCTION, whose steps compute while the steps that follow wait. `join` shows what it printed, because the
# output of two steps at once is hard to read, and ends the script if one of its steps failed.
beside() {
    beside_out=$(mktemp) beside_steps=$(mktemp)
    (
        steps=() notes=() current= group= beside=
        log=$(mktemp)
        trap 'exit 130' INT
        trap 'exit 143' TERM
        trap beside_report EXIT
        "$1"
    ) >"$beside_out" 2>&1 &
    beside=$!
}

beside_report() {
    local status=$?
    end_group
    printf 'step %s\n' "${steps[@]}" >"$beside_steps"
    [ ${#notes[@]} = 0 ] || printf 'note %s\n' "${notes[@]}" >>"$beside_steps"
    rm -f "$log"
    exit "$status"
}

join() {
    local status=0
    wait "$beside" || status=$?
    beside=
    show_beside
    [ "$status" = 0 ] || exit "$status"
}

show_beside() {
    local kind text
    cat "$beside_out"
    while IFS=' ' read -r kind text; do
        case $kind in
        step) steps+=("$(printf '%6s  beside: %s' "${text%%  *}" "${text#*  }")") ;;
        note) notes+=("$text") ;;
        esac
    done <"$beside_steps"
    rm -f "$beside_out" "$beside_steps"
}

# Kills the step that runs, and names it in the summary.
end_group() {
    [ -z "$group" ] || kill -KILL -- "-$group" 2>/dev/null || true
    [ -z "$current" ] || steps+=("$(printf '%5ds  %s: INTERRUPTED' "$((SECONDS - since))" "$current")")
}

report() {
    local status=$?
    end_group
    if [ -n "$beside" ]; then
        kill -TERM "$beside" 2>/dev/null || true
        wait "$beside" || true
        show_beside
    fi
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
