"""Real programs that know nothing of shmesh, in two pods with one pool, as `shmesh.io/share` gives it to them.

A pod here is a process with its own pid, IPC, network and mount namespaces, `/tmp` and user, and the pool at `/dev/shm`. It takes root,
and packages from PyPI at the versions below; without them a test is skipped with the reason. docs/from-hostipc.md has the results.
"""

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

PACKAGES = ["tritonclient==2.73.0", "iceoryx2==0.10.0", "numpy>=1.23"]
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
