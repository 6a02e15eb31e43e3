"""Real programs that know nothing of shmesh, in two pods with one pool, as `shmesh.io/share` gives it to them.

A pod here is a process with its own pid, IPC, network and mount namespaces, `/tmp` and user, and the pool at `/dev/shm`. It takes root,
and packages from PyPI at the versions below and from Debian (`libboost-dev`, `ucx-utils`, `postgresql`); without them a test is skipped with
the reason. Two are too large to be fetched: `SHMESH_TORCH` is a Python with torch, and `SHMESH_AERON` a folder with Aeron's `aeronmd`,
`basic_publisher` and `basic_subscriber`, where every user may run them. docs/from-hostipc.md has the results.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmesh

pytestmark = pytest.mark.long

PACKAGES = ["tritonclient==2.73.0", "iceoryx2==0.10.0", "eclipse-zenoh==1.10.2", "numpy>=1.23"]
GROUP, ONE, OTHER = 60_001, 10_001, 20_002
SETUP = """
pool=$0; user=$1; shift
mount --bind "$pool" /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /tmp || exit 99
(cat /etc/passwd; echo "app:x:$user:$user::/tmp:/bin/sh") > /tmp/passwd && mount --bind /tmp/passwd /etc/passwd || exit 99
exec setpriv --reuid "$user" --regid "$user" --groups "$GROUP" --bounding-set -all --inh-caps -all --no-new-privs "$@"
"""
NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--mount", "--propagation", "private"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a program in a pod of its own. It ends with the test."""
    if os.getuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "setpriv", "mount")):
        pytest.skip("pods of different users take root, and unshare and setpriv of util-linux")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    monkeypatch.delenv("SHMESH_DIR")
    monkeypatch.setenv("GROUP", str(GROUP))
    pool = Path(tempfile.mkdtemp(prefix="shmesh-pool-", dir="/dev/shm"))
    os.chown(pool, -1, GROUP)
    pool.chmod(0o3770)
    started: list[subprocess.Popen[str]] = []

    def start(user: int, *command: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", SETUP, str(pool), str(user), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # The pod's first process, which the kernel lets live when `unshare` ends: it has another user.
        if process.poll() is None:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        process.communicate()
    shutil.rmtree(pool)


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that every user may run, with the packages."""
    place = Path(os.environ.get("SHMESH_PROGRAMS", Path(__file__).parents[3] / "target/python/programs"))
    python = place / "venv/bin/python"
    stamp = place / "packages"
    place.parent.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes, each of which would make it.
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
            base = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
            shutil.rmtree(place, ignore_errors=True)
            for command in ([base, "-m", "venv", str(place / "venv")], [str(python), "-m", "pip", "install", "-q", *PACKAGES]):
                ran = subprocess.run(command, capture_output=True, text=True)
                if ran.returncode != 0:
                    pytest.skip(f"{' '.join(command)}: {ran.stderr}")
            stamp.write_text("\n".join(PACKAGES))
    return str(python)


def said(process: "subprocess.Popen[str]", words: str) -> None:
    """Reads its output up to a line that contains this."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} is not in {lines}")


def output(process: "subprocess.Popen[str]") -> str:
    return process.communicate()[0]


def python(interpreter: str, text: str, *, with_shmesh: bool = False) -> list[str]:
    if not with_shmesh:
        return [interpreter, "-c", textwrap.dedent(text)]
    path = f"PYTHONPATH={Path(shmesh.__file__).parents[1]}"
    return ["env", path, interpreter, "-m", "shmesh.run", "-c", textwrap.dedent(text)]


@pytest.fixture
def library() -> str:
    """`libshmesh_posix.so` for `LD_PRELOAD`."""
    path = Path(__file__).parents[3] / "target/debug/libshmesh_posix.so"
    if not path.exists():
        pytest.skip(f"there is no {path}: cargo build -p shmesh-posix")
    return f"LD_PRELOAD={path}"


MAKES = """
    import sys
    from multiprocessing.shared_memory import SharedMemory
    block = SharedMemory("block", create=True, size=4096)
    block.buf[:5] = b"hello"
    print("made", flush=True)
    sys.stdin.readline()
    block.close()
    try:
        block.unlink()
        print("unlinked")
    except FileNotFoundError:
        print("another process has removed it")
"""
ATTACHES = """
    from multiprocessing.shared_memory import SharedMemory
    block = SharedMemory("block")
    print("read", bytes(block.buf[:5]))
    block.close()
"""


def test_multiprocessing_of_one_user_loses_the_block_to_a_tracker(pod: Start, interpreter: str) -> None:
    creator = pod(ONE, *python(interpreter, MAKES))
    said(creator, "made")
    # The tracker ends after its program.
    waits = '"$@"; while test -e /dev/shm/block; do sleep 0.1; done'
    assert "read b'hello'" in output(pod(ONE, "sh", "-c", waits, "sh", *python(interpreter, ATTACHES)))
    assert "another process has removed it" in creator.communicate("\n")[0]


def test_multiprocessing_of_two_users_is_refused(pod: Start, interpreter: str) -> None:
    said(pod(ONE, *python(interpreter, MAKES)), "made")
    assert "PermissionError" in output(pod(OTHER, *python(interpreter, ATTACHES)))


def test_multiprocessing_under_shmesh_run_meets_across_users(pod: Start, interpreter: str) -> None:
    creator = pod(ONE, *python(interpreter, MAKES, with_shmesh=True))
    said(creator, "made")
    assert "read b'hello'" in output(pod(OTHER, *python(interpreter, ATTACHES, with_shmesh=True)))
    assert "unlinked" in creator.communicate("\n")[0]


def test_multiprocessing_of_two_users_with_the_library(pod: Start, interpreter: str, library: str) -> None:
    creator = pod(ONE, "env", library, *python(interpreter, MAKES))
    said(creator, "made")
    assert "read b'hello'" in output(pod(OTHER, "env", library, *python(interpreter, ATTACHES)))
    assert "unlinked" in creator.communicate("\n")[0]


CLIENT = """
    import sys
    import numpy as np
    from tritonclient.utils import shared_memory as shm
    region = shm.create_shared_memory_region("input", "/input_key", 64)
    shm.set_shared_memory_region(region, [np.arange(16, dtype=np.float32)])
    print("set", flush=True)
    sys.stdin.readline()
    print("result", shm.get_contents_as_numpy(region, np.float32, [16])[0])
    shm.destroy_shared_memory_region(region)
    print("destroyed")
"""
# As `SharedMemoryManager` of the server: shm_open(key, O_RDWR), fstat, mmap.
SERVER = """
    import ctypes, mmap, os, struct
    librt = ctypes.CDLL("librt.so.1", use_errno=True)
    file = librt.shm_open(b"/input_key", os.O_RDWR, 0o600)
    if file < 0:
        raise SystemExit(os.strerror(ctypes.get_errno()))
    memory = mmap.mmap(file, os.fstat(file).st_size)
    print("sum", sum(struct.unpack_from("16f", memory)))
    struct.pack_into("f", memory, 0, 42.0)
"""


def test_tritonclient_of_two_users_with_the_library(pod: Start, interpreter: str, library: str) -> None:
    client = pod(ONE, "env", library, *python(interpreter, CLIENT))
    said(client, "set")
    assert "sum 120.0" in output(pod(OTHER, "env", library, *python(interpreter, SERVER)))
    last = client.communicate("\n")[0]
    assert "result 42.0" in last and "destroyed" in last, last


@pytest.mark.parametrize(
    ("user", "with_shmesh", "expected"),
    [(ONE, False, "sum 120.0"), (OTHER, False, "Permission denied"), (OTHER, True, "sum 120.0")],
    ids=["one-user", "two-users", "two-users-by-run"],
)
def test_tritonclient(pod: Start, interpreter: str, user: int, with_shmesh: bool, expected: str) -> None:
    client = pod(ONE, *python(interpreter, CLIENT, with_shmesh=with_shmesh))
    said(client, "set")
    assert expected in output(pod(user, *python(interpreter, SERVER)))
    last = client.communicate("\n")[0]
    assert "destroyed" in last and ("result 42.0" in last) == expected.startswith("sum")


NODE = """
    import ctypes, sys, time
    import iceoryx2 as iox2
    config = iox2.config.default()
    if sys.argv[1] != "default":
        config.global_cfg.root_path = iox2.Path.new(sys.argv[1])
    node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
    service = node.service_builder(iox2.ServiceName.new("a")).publish_subscribe(ctypes.c_uint64).open_or_create()
"""
PUBLISHES = NODE + """
    publisher = service.publisher_builder().create()
    print("publishes", flush=True)
    while True:
        publisher.loan_uninit().write_payload(ctypes.c_uint64(7)).send()
        time.sleep(0.01)
"""
SUBSCRIBES = NODE + """
    subscriber = service.subscriber_builder().create()
    end = time.monotonic() + float(sys.argv[2])
    while (sample := subscriber.receive()) is None and time.monotonic() < end:
        time.sleep(0.01)
    print("nothing" if sample is None else f"received {sample.payload().contents.value}")
"""


@pytest.mark.parametrize(
    ("user", "root", "seconds", "expected"),
    [
        (ONE, "/dev/shm/iceoryx2", "60", "received 7"),
        (OTHER, "/dev/shm/iceoryx2", "60", "NodeCreationFailure"),
        (ONE, "default", "1", "nothing"),
    ],
    ids=["one-user", "two-users", "defaults"],
)
def test_iceoryx2(pod: Start, interpreter: str, user: int, root: str, seconds: str, expected: str) -> None:
    said(pod(ONE, *python(interpreter, PUBLISHES), root), "publishes")
    assert expected in output(pod(user, *python(interpreter, SUBSCRIBES), root, seconds))


def test_system_v_segments_stay_in_their_pod(pod: Start) -> None:
    one = pod(ONE, "sh", "-c", "ipcmk -M 4096 -p 0666; ipcs -m; read end")
    said(one, "0x")
    assert "0x" not in output(pod(ONE, "ipcs", "-m"))


def test_system_v_segments_are_shared_with_the_library(pod: Start, library: str) -> None:
    # `ipcmk` ends, and a segment is stale without a process that uses it; it is there until it is collected.
    one = pod(ONE, "env", library, "sh", "-c", "ipcmk -M 4096 -p 0660 && ipcs -m; read end")
    said(one, "4096")
    assert "4096" in output(pod(OTHER, "env", library, "ipcs", "-m"))


POSTGRES = """
set -e
data=/tmp/data
initdb -D $data --auth=trust --no-sync > /dev/null
test "$(grep -c "^dynamic_shared_memory_type = posix" $data/postgresql.conf)" = 1
pg_ctl -D $data -w -o "-k /tmp -c listen_addresses= " start > /dev/null
psql -qAt -h /tmp postgres <<'SQL'
create table numbers as select generate_series(1, 200000) as n;
analyze numbers;
set min_parallel_table_scan_size = 0;
set parallel_setup_cost = 0;
set parallel_tuple_cost = 0;
explain (analyze, costs off, timing off) select sum(n) from numbers;
select 'sum', sum(n) from numbers;
SQL
ls /dev/shm
"""


def test_postgresql_has_its_parallel_queries_in_the_pool(pod: Start) -> None:
    tools = ["initdb", "pg_ctl", "psql"]
    if any(shutil.which(tool) is None for tool in tools):
        pytest.skip(f"{', '.join(tools)} of PostgreSQL are not installed")
    result = output(pod(ONE, "sh", "-c", POSTGRES))
    assert "Workers Launched: 2" in result and "sum|20000100000" in result and "PostgreSQL." in result, result


THREE = pytest.mark.parametrize(
    ("user", "preloads"), [(ONE, False), (OTHER, False), (OTHER, True)], ids=["one-user", "two-users", "two-users-with-the-library"]
)


ZENOH = """
    import json, os, threading, time, zenoh, zenoh.shm
    os.umask(0o002)
    def session(**settings):
        config = zenoh.Config()
        for key, value in {"mode": "peer", "scouting/multicast/enabled": False, "transport/shared_memory/enabled": True, **settings}.items():
            config.insert_json5(key, json.dumps(value))
        return zenoh.open(config)
    SOCKET = ["unixsock-stream//dev/shm/socket"]
"""
ZENOH_PUBLISHES = ZENOH + """
    node = session(**{"listen/endpoints": SOCKET})
    publisher = node.declare_publisher("key")
    provider = zenoh.shm.ShmProvider.default_backend(1 << 20)
    print("publishes", flush=True)
    while True:
        memory = provider.alloc(65536, zenoh.shm.BlockOn(zenoh.shm.GarbageCollect()))
        memory[0:5] = b"hello"
        publisher.put(memory)
        time.sleep(0.05)
"""
ZENOH_SUBSCRIBES = ZENOH + """
    def receive(sample):
        assert sample.payload.to_bytes()[:5] == b"hello"
        print("received", len(sample.payload), "in shared memory", sample.payload.as_shm() is not None, flush=True)
        os._exit(0)
    node = session(**{"connect/endpoints": SOCKET, "listen/endpoints": []})
    subscriber = node.declare_subscriber("key", receive)
    threading.Event().wait(20)
"""

@THREE
def test_zenoh_shared_memory(pod: Start, interpreter: str, library: str, user: int, preloads: bool) -> None:
    preload = ["env", library] if preloads else []
    publisher = pod(ONE, *preload, *python(interpreter, ZENOH_PUBLISHES))
    said(publisher, "publishes")
    # Without the library, a subscriber of another user is sent copies, and nothing says so.
    expected = f"received 65536 in shared memory {user == ONE or preloads}"
    assert expected in output(pod(user, *preload, *python(interpreter, ZENOH_SUBSCRIBES)))


BOOST = """
#include <boost/interprocess/managed_shared_memory.hpp>
#include <boost/interprocess/sync/interprocess_condition.hpp>
#include <boost/interprocess/sync/interprocess_mutex.hpp>
#include <iostream>
namespace ipc = boost::interprocess;
struct Board {
    ipc::interprocess_mutex mutex;
    ipc::interprocess_condition changed;
    int value = 0;
};
int main(int argc, char **) try {
    bool makes = argc == 1;
    auto memory = makes ? ipc::managed_shared_memory(ipc::create_only, "boost", 65536) : ipc::managed_shared_memory(ipc::open_only, "boost");
    Board *board = memory.find_or_construct<Board>("board")();
    ipc::scoped_lock<ipc::interprocess_mutex> lock(board->mutex);
    if (makes) {
        std::cout << "made" << std::endl;
        board->changed.wait(lock, [&] { return board->value != 0; });
    } else {
        board->value = 42;
        board->changed.notify_all();
    }
    std::cout << "value " << board->value << std::endl;
} catch (ipc::interprocess_exception &error) {
    std::cout << error.what() << std::endl;
}
"""


@THREE
def test_boost_interprocess(pod: Start, library: str, user: int, preloads: bool) -> None:
    # Where every user may run it.
    program = Path(__file__).parents[3] / "target/python/boost"
    program.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.exists("/usr/include/boost/interprocess/managed_shared_memory.hpp"):
        pytest.skip("libboost-dev is not installed")
    built = program.with_suffix(f".{os.getpid()}")
    subprocess.run(["c++", "-O1", "-x", "c++", "-o", str(built), "-"], input=BOOST, text=True, check=True)
    built.rename(program)
    preload = ["env", library] if preloads else []
    maker = pod(ONE, *preload, str(program))
    said(maker, "made")
    assert ("value 42" if user == ONE or preloads else "Permission denied") in output(pod(user, *preload, str(program), "uses"))
    if user == ONE or preloads:
        said(maker, "value 42")


def cable(*pods: "subprocess.Popen[str]") -> None:
    """Connects two pods, which have the addresses 10.99.0.1 and 10.99.0.2 from then on."""
    ends = [f"shm{os.getpid()}{end}" for end in "ab"]
    added = subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], capture_output=True, text=True)
    if added.returncode != 0:
        pytest.skip(f"this machine gives no pair of network devices: {added.stderr}")
    for number, (end, process) in enumerate(zip(ends, pods, strict=True), start=1):
        subprocess.run(["ip", "link", "set", end, "netns", str(process.pid)], check=True)
        configure = f"ip address add 10.99.0.{number}/24 dev {end} && ip link set {end} up && ip link set lo up"
        subprocess.run(["nsenter", f"--net=/proc/{process.pid}/ns/net", "sh", "-c", configure], check=True)


@THREE
def test_ucx_posix_does_not_leave_its_namespaces(pod: Start, library: str, user: int, preloads: bool) -> None:
    if any(shutil.which(tool) is None for tool in ("ucx_perftest", "ip", "nsenter")):
        pytest.skip("ucx_perftest of ucx-utils, ip of iproute2 or nsenter of util-linux is not installed")
    settings = ["env", "UCX_TLS=posix,self", "UCX_POSIX_USE_PROC_LINK=n", *([library] if preloads else [])]
    test = "ucx_perftest -t tag_bw -s 65536 -n 200 -w 10"
    server = pod(ONE, *settings, "sh", "-c", f"echo up; read go; exec {test}")
    client = pod(user, *settings, "sh", "-c", f"echo up; read go; exec {test} 10.99.0.1")
    for process in (server, client):
        said(process, "up")
    cable(server, client)
    assert server.stdin and client.stdin
    print(file=server.stdin, flush=True)
    listening = ":3419 00000000:0000 0A"
    while listening not in Path(f"/proc/{server.pid}/net/tcp").read_text():
        assert server.poll() is None, output(server)
    print(file=client.stdin, flush=True)
    last = output(client)
    assert "posix/memory - Destination is unreachable" in last, last


TORCH = """
    import multiprocessing, os, sys
    import torch
    from multiprocessing.connection import Client, Listener
    torch.multiprocessing.set_sharing_strategy(sys.argv[1])
    multiprocessing.current_process().authkey = b"key"
    os.umask(0o002)
"""
TORCH_SENDS = TORCH + """
    tensor = torch.arange(1000, dtype=torch.float32)
    listener = Listener("/dev/shm/listener", authkey=b"key")
    print("listens", flush=True)
    connection = listener.accept()
    connection.send(tensor)
    connection.recv()
    print("first", tensor[0].item(), flush=True)
"""
TORCH_RECEIVES = TORCH + """
    connection = Client("/dev/shm/listener", authkey=b"key")
    tensor = connection.recv()
    print("sum", tensor.sum().item())
    tensor[0] = 42
    connection.send("written")
"""
MAPS = """
    import sys, torch
    tensor = torch.from_file("/dev/shm/weights", shared=True, size=1000, dtype=torch.float32)
    if len(sys.argv) == 1:
        tensor[:] = torch.arange(1000)
        print("made", flush=True)
        sys.stdin.readline()
        print("first", tensor[0].item())
    else:
        print("sum", tensor.sum().item())
        tensor[0] = 42
"""


@pytest.fixture
def torch() -> str:
    path = os.environ.get("SHMESH_TORCH")
    if not path:
        pytest.skip("SHMESH_TORCH is not set: a Python with torch")
    return path


@pytest.mark.parametrize("strategy", ["file_system", "file_descriptor"])
@pytest.mark.parametrize(
    ("user", "place", "preloads", "expected"),
    [
        (ONE, "/tmp", False, "No such file or directory"),
        (ONE, "/dev/shm", False, "sum 499500.0"),
        (OTHER, "/dev/shm", False, "Permission denied"),
        (OTHER, "/dev/shm", True, "Permission denied"),
    ],
    ids=["one-user-by-default", "one-user", "two-users", "two-users-with-the-library"],
)
def test_torch(
    pod: Start, torch: str, library: str, strategy: str, user: int, place: str, preloads: bool, expected: str
) -> None:
    settings = ["env", f"TMPDIR={place}", *([library] if preloads else [])]
    sender = pod(ONE, *settings, *python(torch, TORCH_SENDS), strategy)
    said(sender, "listens")
    assert expected in output(pod(user, *settings, *python(torch, TORCH_RECEIVES), strategy))
    if expected.startswith("sum"):
        said(sender, "first 42.0")


@THREE
def test_torch_from_file(pod: Start, torch: str, library: str, user: int, preloads: bool) -> None:
    preload = ["env", library] if preloads else []
    maker = pod(ONE, *preload, *python(torch, MAPS))
    said(maker, "made")
    works = user == ONE or preloads
    assert ("sum 499500.0" if works else "Permission denied") in output(pod(user, *preload, *python(torch, MAPS), "uses"))
    assert f"first {42.0 if works else 0.0}" in maker.communicate("\n")[0]


@THREE
def test_aeron(pod: Start, library: str, user: int, preloads: bool) -> None:
    place = os.environ.get("SHMESH_AERON")
    if not place:
        pytest.skip("SHMESH_AERON is not set: a folder with aeronmd, basic_publisher and basic_subscriber")
    settings = ["env", "AERON_DIR=/dev/shm/aeron", f"LD_LIBRARY_PATH={place}/lib:{place}", *([library] if preloads else [])]
    channel = "-c aeron:ipc -s 1001"
    pod(ONE, *settings, "sh", "-c", f"umask 022; {place}/aeronmd & exec {place}/basic_publisher {channel} -m 10000")
    works = user == ONE or preloads
    # Its output is complete when it ends; without its driver it ends by itself.
    waits = "until ls /dev/shm/aeron/publications/*.logbuffer 2>/dev/null; do sleep 0.1; done"
    subscribes = f"{waits}; exec timeout --signal INT {3 if works else 30} {place}/basic_subscriber {channel}"
    last = output(pod(user, *settings, "sh", "-c", subscribes))
    assert ("Hello World!" if works else "CnC file not created") in last, last
