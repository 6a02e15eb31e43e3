#!/usr/bin/env bash
# Tests of step.sh: a step that hangs ends at its bound and is named, and what a step leaves behind holds up nothing.
set -uo pipefail
cd "$(dirname "$0")"
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# script STATUS TEXT: runs TEXT after step.sh and expects that exit status. Its output goes through a pipe, as in CI.
script() {
    local status
    timeout 60 bash -euo pipefail -c "source ./step.sh; $2" 2>&1 | cat >"$out"
    status=${PIPESTATUS[0]}
    [ "$status" = "$1" ] || { echo "expected exit status $1, got $status: $2"; cat "$out"; exit 1; }
}
has() { grep -q -- "$1" "$out" || { echo "expected in the output: $1"; cat "$out"; exit 1; }; }

script 0 'f() { echo "said by f: $1"; }; export -f f; step 20 "a function" f hello; step 20 good echo done; note "a note"'
has 'said by f: hello'; has '^done$'; has '  a function$'; has '^a note$'

script 3 'step 20 bad bash -c "exit 3"; step 20 later echo never'
has 'bad: FAILED (exit status 3)'
! grep -q never "$out" || { echo "a step ran after one that failed"; exit 1; }

script 1 'f() { false; echo never; }; export -f f; step 20 "fails inside" f'
! grep -q never "$out" || { echo "a function went on after a command that failed"; exit 1; }

script 124 'step 1 hangs sleep 1000'
has 'step "hangs" did not end within 1 s'; has 'hangs: TIMED OUT'

script 124 'SHMESH_CI_LIMIT_S=1; ci_limit_s=1; step 1000 "the last one" sleep 1000'
has 'step "the last one" did not end within 1 s'

# Its child, in this group and in a session of its own, would hold a pipe for 1,000 s.
script 0 'step 20 leaves bash -c "sleep 1000 & disown; exit 0"; step 20 later echo later'
has 'left processes behind'; has '^later$'
script 0 'step 20 daemon bash -c "setsid sleep 50 & exit 0"; step 20 later echo later'
has '^later$'

# Parts of the background run beside the steps, in their order, with no claim to a processor.
script 0 'f() { echo "f says $1"; chrt --pid $$; }; export -f f
    in_background "part a" f "one two"; in_background "part b" bash -c "echo said by b"; start_background
    step 20 between echo between; collect 20 "part b"; collect 20 "part a"; step 20 later echo later'
has '^between$'; has '^f says one two$'; has 'SCHED_IDLE'; has '^said by b$'; has 'part a, begun in the background$'; has '^later$'

# One that fails ends the script at the next step, and what is left of the background is killed.
script 1 'f() { echo "f fails"; false; echo never; }; export -f f
    in_background fails f; in_background after echo never; start_background
    step 20 waits bash -c "sleep 2"; step 20 later echo never'
has '^f fails$'; has 'fails: FAILED in the background'
! grep -q never "$out" || { echo "something ran after a part that failed"; exit 1; }

script 2 'in_background a echo; start_background; collect 20 b'
has 'the background has no part "b"'
script 2 'in_background a echo; start_background; all_collected'
has 'not collected'

script 124 'in_background hangs sleep 1000.5; start_background; collect 1 hangs'
has 'hangs, begun in the background: TIMED OUT'
# The kernel takes a moment for it. If it is never gone, the bound of this step in .ci/run ends the test.
while pgrep -f 'sleep 1000\.5' >/dev/null; do sleep 0.1; done
echo "step.sh: all tests passed"
