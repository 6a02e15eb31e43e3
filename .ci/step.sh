# Steps that are bounded in time. Sourced by .ci/run; .ci/step_test.sh tests it.

# All steps together end before this, whatever the bound of each: CI itself is cut off after 90 minutes, and then says nothing.
ci_limit_s=${SHMESH_CI_LIMIT_S:-5100}
steps=() notes=() current= group= since=$SECONDS
log=$(mktemp)
# Of the background: its process group, the names and commands of its parts, and a folder with a log and a status of each.
background= background_names=() background_commands=() background_collected=() background_dir=$(mktemp -d)

# step SECONDS NAME COMMAND...: runs COMMAND for at most SECONDS, and ends the script with its exit status if it fails.
#
# COMMAND is a program or an exported function, in a process group of its own. It writes to a file, which is copied to our
# output while it runs: a process that it leaves behind can hold the file open, but not a pipe that CI reads to its end.
step() {
    local limit=$1 left=$((ci_limit_s - SECONDS)) status=0 reader
    stop_if_background_failed
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

# in_background NAME COMMAND...: a part of what `start_background` runs and `collect` waits for. COMMAND is as for `step`.
in_background() {
    background_names+=("$1")
    shift
    background_commands+=("${*@Q}")
}

# Runs the parts, one after the other, beside the steps. SCHED_IDLE gives them what the steps leave of the processors: no process
# of a step waits for them, so a part can take long, and has no bound but that of all steps before it is collected.
start_background() {
    # Job control gives it a process group of its own.
    set -m
    run_background </dev/null >/dev/null 2>&1 &
    background=$!
    set +m
}

run_background() {
    local number status started
    chrt --idle --pid 0 "$BASHPID" || renice -n 19 -p "$BASHPID" || true
    for number in "${!background_names[@]}"; do
        status=0 started=$SECONDS
        eval "timeout --foreground --kill-after=20 $ci_limit_s bash -euo pipefail -c '\"\$@\"' bash ${background_commands[number]}" >"$background_dir/$number.log" 2>&1 || status=$?
        echo "$status" $((SECONDS - started)) >"$background_dir/$number.part"
        mv "$background_dir/$number.part" "$background_dir/$number.status"
        [ "$status" = 0 ] || return
    done
}

# collect SECONDS NAME: a step that waits for a part of the background, and shows what it has written.
collect() {
    local number
    for number in "${!background_names[@]}"; do
        if [ "${background_names[number]}" = "$2" ]; then
            background_collected+=("$2")
            step "$1" "$2, begun in the background" collected "$background_dir/$number"
            return
        fi
    done
    echo "=== the background has no part \"$2\"" >&2
    exit 2
}

# The last line of a script: parts that no step collected would be killed without a word.
all_collected() {
    [ ${#background_collected[@]} = ${#background_names[@]} ] || { echo "=== some parts of the background were not collected" >&2; exit 2; }
}

collected() {
    local status seconds
    touch "$1.log"
    (until [ -e "$1.status" ]; do sleep 0.2; done) &
    tail -n +1 -s 0.2 -f --pid="$!" "$1.log"
    read -r status seconds <"$1.status"
    echo "it ran for $seconds s, most of them beside the steps before"
    return "$status"
}
export -f collected

# A part that fails is not found out at the end only.
stop_if_background_failed() {
    local number
    for number in "${!background_names[@]}"; do
        if [ -e "$background_dir/$number.status" ] && ! grep -q '^0 ' "$background_dir/$number.status"; then
            cat "$background_dir/$number.log"
            steps+=("       ${background_names[number]}: FAILED in the background")
            exit 1
        fi
    done
}

# note TEXT: a line of the summary.
note() { notes+=("$1"); }

report() {
    local status=$?
    [ -z "$group" ] || kill -KILL -- "-$group" 2>/dev/null || true
    [ -z "$background" ] || kill -KILL -- "-$background" 2>/dev/null || true
    [ -z "$current" ] || steps+=("$(printf '%5ds  %s: INTERRUPTED' "$((SECONDS - since))" "$current")")
    printf '\nSeconds per step:\n'
    printf '%s\n' "${steps[@]}"
    printf '%5ds  total\n' "$SECONDS"
    [ ${#notes[@]} = 0 ] || printf '%s\n' "${notes[@]}"
    rm -rf "$log" "$background_dir"
    exit "$status"
}
trap report EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
