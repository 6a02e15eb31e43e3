# left.sh POOL-SECONDS: what of shmesh is on this node, one path a line, where ROOT is its root; waits so long for empty pools.
set -eu
root=${ROOT:-/proc/1/root}
# An absolute link would lead into this container.
run=$root/run
[ -L "$root/var/run" ] || [ ! -d "$root/var/run" ] || run=$root/var/run
files() { find "$root/dev/shm/shmesh" ! -type d 2>/dev/null || true; }
tries=$((${1:?seconds} + 1))
while [ -n "$(files)" ] && [ "$tries" -gt 1 ]; do
    tries=$((tries - 1))
    sleep 1
done
{
    files
    find "$root/var/lib/kubelet/device-plugins" "$root/var/lib/kubelet/plugins_registry" -name 'shmesh*' 2>/dev/null || true
    find "$root/run/shmesh" -name '*.sock' 2>/dev/null || true
    find "$run/cdi" -name 'shmesh*' 2>/dev/null || true
} | while read -r path; do echo "left ${path#"$root"}"; done
echo "looked"
