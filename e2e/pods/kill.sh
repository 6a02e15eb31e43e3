# kill.sh container ID | process NAME: kill -9 of every process of a container, or of that name, where PROC_ROOT is /proc.
set -eu
proc=${PROC_ROOT:-/proc}
what=${1:?container or process} which=${2:?its id or name}
case $what in
container)
    # A short id, or none, would be found in every path.
    case $which in *[!0-9a-f]*) echo "$which is not a container id" >&2; exit 2 ;; esac
    [ ${#which} -eq 64 ] || { echo "$which is not a container id" >&2; exit 2; }
    is_it() { grep -q "$which" "$1/cgroup" 2>/dev/null; }
    ;;
process)
    is_it() { [ "$(cat "$1/comm" 2>/dev/null)" = "$which" ]; }
    ;;
*)
    echo "$what: say container or process" >&2
    exit 2
    ;;
esac
killed=0
for dir in "$proc"/[0-9]*; do
    if is_it "$dir" && kill -9 "${dir##*/}" 2>/dev/null; then killed=$((killed + 1)); fi
done
echo "killed $killed of $what $which"
[ "$killed" -gt 0 ] || { echo "there is no $what $which on this node" >&2; exit 1; }
