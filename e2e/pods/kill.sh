# kill.sh container ID | process NAME | together SEED ID...: kill -9 of every process of a container, or of that name, where PROC_ROOT
# is /proc; or of several containers, in an order and with pauses that the seed determines.
set -eu
proc=${PROC_ROOT:-/proc}
what=${1:?container or process} which=${2:?its id or name}
check_id() {
    # A short id, or none, would be found in every path.
    case $1 in *[!0-9a-f]*) echo "$1 is not a container id" >&2; exit 2 ;; esac
    [ ${#1} -eq 64 ] || { echo "$1 is not a container id" >&2; exit 2; }
}
case $what in
container)
    check_id "$which"
    is_it() { grep -q "$which" "$1/cgroup" 2>/dev/null; }
    ;;
together)
    case $which in *[!0-9]*) echo "$which is not a seed" >&2; exit 2 ;; esac
    shift 2
    [ $# -gt 0 ] || { echo "together: say which containers" >&2; exit 2; }
    ids=
    for id; do check_id "$id"; ids="$ids|$id"; done
    is_it() { grep -qE "${ids#|}" "$1/cgroup" 2>/dev/null; }
    ;;
process)
    is_it() { [ "$(cat "$1/comm" 2>/dev/null)" = "$which" ]; }
    ;;
*)
    echo "$what: say container, process or together" >&2
    exit 2
    ;;
esac
killed=0
pids=
for dir in "$proc"/[0-9]*; do
    if is_it "$dir"; then pids="$pids ${dir##*/}"; fi
done
if [ "$what" = together ]; then
    # Shuffled, with pauses of up to 20 ms after half of them.
    plan=$(for pid in $pids; do echo "$pid"; done | awk -v seed="$which" '
        BEGIN { srand(seed) }
        { pause = rand() * 0.04 - 0.02; if (pause < 0) pause = 0; printf "%.9f %d %.3f\n", rand(), $1, pause }' | sort)
else
    plan=$(for pid in $pids; do echo "0 $pid 0.000"; done)
fi
while read -r _ pid pause; do
    if [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null; then killed=$((killed + 1)); fi
    [ "${pause:-0.000}" = 0.000 ] || sleep "$pause"
done <<EOF
$plan
EOF
echo "killed $killed of $what $which"
[ "$killed" -gt 0 ] || { echo "there is no $what $which on this node" >&2; exit 1; }
