"""`shmesh.shared_memory` in the place of `multiprocessing.shared_memory`, and `shmesh.run`."""

import errno
import gc
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmesh import _family, shared_memory
from shmesh.shared_memory import ShareableList, SharedMemory, SharedMemoryManager

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.long), pytest.param("forkserver", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def alone(ipc: Path) -> Iterator[None]:
    """This process is a member while the test runs, and leaves before the directory has to be empty."""
    yield
    gc.collect()
    _family.leave()


def blocks(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def python(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


def program(text: str) -> subprocess.Popen[str]:
    """A family of its own, which waits for the end of its input."""
    imports = "import os, sys\nfrom shmesh.shared_memory import *\n"
    return python("-c", imports + textwrap.dedent(text), stdin=subprocess.PIPE)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    """Lets it end, in order."""
    output, _ = process.communicate("go on\n")
    assert process.returncode == 0, output


def test_block_has_a_name_a_size_and_contents(ipc: Path) -> None:
    block = SharedMemory("numbers", create=True, size=100)
    assert (block.name, block.size, blocks(ipc)) == ("numbers", 100, ["numbers"])
    assert block.buf is not None
    block.buf[:3] = b"abc"
    with pytest.raises(FileExistsError) as taken:
        SharedMemory("numbers", create=True, size=1)
    assert taken.value.errno == errno.EEXIST and taken.value.filename == str(ipc / "numbers")
    other = SharedMemory("numbers", track=False)
    assert other.buf is not None and bytes(other.buf[:3]) == b"abc" and "numbers" in repr(other)
    other.close()
    block.close()
    assert block.buf is None and blocks(ipc) == ["numbers"], "a name stays until it is unlinked"
    block.unlink()
    with pytest.raises(FileNotFoundError):
        block.unlink()


def test_memory_is_reserved_when_it_is_created(ipc: Path) -> None:
    room = os.statvfs(ipc)
    with pytest.raises(OSError, match=f"no room for a block of .* bytes: {ipc} has .* free") as full:
        SharedMemory("much", create=True, size=room.f_blocks * room.f_frsize * 2)
    assert full.value.errno == errno.ENOSPC and blocks(ipc) == []
    block = SharedMemory(create=True, size=1 << 20)
    assert (ipc / block.name).stat().st_blocks * 512 == 1 << 20
    block.close()
    block.unlink()


@pytest.mark.parametrize("name", ["a/b", "..", "/", "", "."])
def test_names_outside_of_the_directory_are_refused(name: str) -> None:
    with pytest.raises(OSError, match="choose another") as wrong:
        SharedMemory(name, create=True, size=1)
    assert wrong.value.errno == errno.EINVAL
    with pytest.raises(ValueError, match="null"):
        SharedMemory("a\0b", create=True, size=1)
    with pytest.raises(OSError) as long:
        SharedMemory("x" * 256, create=True, size=1)
    assert long.value.errno == errno.ENAMETOOLONG


def test_group_may_use_blocks_where_the_directory_gives_its_own(ipc: Path) -> None:
    def mode() -> int:
        block = SharedMemory(create=True, size=1)
        found = (ipc / block.name).stat().st_mode
        block.close()
        block.unlink()
        return stat.S_IMODE(found) & 0o777

    old = os.umask(0o077)
    try:
        assert mode() == 0o600
        ipc.chmod(0o3770)
        assert mode() == 0o660
    finally:
        os.umask(old)


def make(name: str) -> None:
    block = SharedMemory(name, create=True, size=4)
    assert block.buf is not None
    block.buf[0] = 7
    block.close()


@pytest.mark.parametrize("method", METHODS)
def test_block_of_a_child_that_has_ended_is_there(ipc: Path, method: str) -> None:
    _family.join(str(ipc))
    child = multiprocessing.get_context(method).Process(target=make, args=("result",))
    child.start()
    child.join()
    assert child.exitcode == 0
    block = SharedMemory("result")
    assert block.buf is not None and block.buf[0] == 7
    block.close()
    assert blocks(ipc) == ["result"], "this family's, which goes on"


def test_blocks_end_with_the_program(ipc: Path) -> None:
    end(program("a = SharedMemory('a', create=True, size=9); ShareableList([1, 'b']); SharedMemory('c', create=True, size=9).close()"))
    assert os.listdir(ipc) == []


def test_views_do_not_keep_blocks_after_the_program(ipc: Path) -> None:
    end(
        program("""
        import numpy as np
        a = SharedMemory("a", create=True, size=8)
        b = SharedMemory("b", create=True, size=8)
        lives_on = np.frombuffer(b.buf, np.uint8)
        del b
        also = np.frombuffer(a.buf, np.uint8)
        again = SharedMemory("a")
        """)
    )
    assert os.listdir(ipc) == []


def test_untracked_block_stays_until_it_is_unlinked(ipc: Path) -> None:
    end(program("SharedMemory('stays', create=True, size=9, track=False)"))
    assert os.listdir(ipc) == ["stays"]
    block = SharedMemory("stays")
    block.close()
    assert blocks(ipc) == ["stays"]
    block.unlink()


def test_process_that_attaches_does_not_remove(ipc: Path) -> None:
    block = SharedMemory("ours", create=True, size=4)
    end(program("SharedMemory('ours')"))
    assert blocks(ipc) == ["ours"]
    block.unlink()
    block.close()


def test_blocks_of_killed_programs_are_removed_by_the_next(ipc: Path) -> None:
    killed = program("""
        a, b = SharedMemory("a", create=True, size=9), SharedMemory("b", create=True, size=9)
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        sys.stdin.readline()
    """)
    child = int(said(killed))
    used = program("block = SharedMemory('a'); print('open', flush=True); sys.stdin.readline()")
    assert said(used) == "open"
    for pid in (killed.pid, child):
        os.kill(pid, signal.SIGKILL)
    # The forked child has the pipe too: its end means that both are gone.
    assert killed.stdout is not None and killed.stdout.read() == ""
    killed.communicate()
    assert blocks(ipc) == ["a", "b"]
    end(program(""))
    assert blocks(ipc) == ["a"], "which the other program has open"
    end(used)
    assert os.listdir(ipc) == []


def test_last_user_of_a_killed_programs_block_frees_it(ipc: Path) -> None:
    killed = program("a = SharedMemory('a', create=True, size=9); print('made', flush=True); sys.stdin.readline()")
    assert said(killed) == "made"
    block = SharedMemory("a")
    killed.kill()
    killed.communicate()
    assert blocks(ipc) == ["a"]
    block.close()
    assert blocks(ipc) == []


@pytest.mark.parametrize("method", METHODS)
def test_member_that_lives_longer_removes(ipc: Path, method: str) -> None:
    """The parent is killed, and its child ends in order."""
    text = f"""
        import multiprocessing, sys
        from shmesh.shared_memory import SharedMemory

        def child(orders):
            b = SharedMemory("b", create=True, size=9)
            print("made", flush=True)
            orders.readline() if orders else open(os.environ["ORDERS"]).read()

        if __name__ == "__main__":
            a = SharedMemory("a", create=True, size=9)
            multiprocessing.set_start_method("{method}")
            multiprocessing.Process(target=child, args=(None,)).start()
    """
    orders = ipc.parent / f"{ipc.name}-orders"
    os.mkfifo(orders)
    try:
        file = ipc / ".app.py"
        file.write_text("import os\n" + textwrap.dedent(text))
        parent = python(str(file), env={**os.environ, "ORDERS": str(orders)})
        assert said(parent) == "made"
        file.unlink()
        parent.kill()
        parent.wait()
        assert blocks(ipc) == ["a", "b"]
        with orders.open("w"):
            pass
        # Its standard output ends with the child.
        assert parent.stdout is not None and parent.stdout.read() == ""
        parent.stdout.close()
        end(program(""))
        assert os.listdir(ipc) == []
    finally:
        orders.unlink()


def test_list_keeps_its_types() -> None:
    shareable = ShareableList([1, "two", 3.0, None, b"four"], name="list")
    other = ShareableList(name="list")
    assert list(other) == [1, "two", 3.0, None, b"four"] and type(other) is ShareableList
    other[0] = 5
    assert shareable[0] == 5
    for one in (shareable, other):
        one.shm.close()
    shareable.shm.unlink()


def test_manager_unlinks_what_it_made(ipc: Path) -> None:
    _family.join(str(ipc))
    with SharedMemoryManager(ctx=multiprocessing.get_context("fork")) as manager:
        block = manager.SharedMemory(100)
        shareable = manager.ShareableList([1, 2])
        assert blocks(ipc) == sorted([block.name, shareable.shm.name])
        block.close()
        shareable.shm.close()
    assert blocks(ipc) == []


def test_array_over_a_block_is_said_at_close() -> None:
    block = SharedMemory(create=True, size=8)
    assert block.buf is not None
    view = np.frombuffer(block.buf, np.uint8)
    with pytest.raises(BufferError):
        block.close()
    del view
    block.close()
    block.unlink()


APP = """
import sys
from multiprocessing import Process, resource_tracker, set_start_method
from multiprocessing.shared_memory import SharedMemory

def work(name):
    block = SharedMemory(name, create=True, size=10)
    block.buf[0] = 5
    resource_tracker.unregister(block._name, "shared_memory")   # as many programs do
    print(SharedMemory.__module__, flush=True)

if __name__ == "__main__":
    set_start_method(sys.argv[1])
    child = Process(target=work, args=("made",))
    child.start()
    child.join()
    block = SharedMemory("made")
    print(block.buf[0], SharedMemory.__module__, __file__, sys.argv, sys.flags.optimize)
"""


@pytest.mark.parametrize("method", METHODS)
def test_unchanged_program_and_its_children(ipc: Path, tmp_path: Path, method: str) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    ran = python("-O", "-m", "shmesh.run", str(app), method, stderr=subprocess.PIPE)
    output, errors = ran.communicate()
    arguments = [str(app), method]
    assert output.splitlines() == ["shmesh.shared_memory", f"5 shmesh.shared_memory {app} {arguments} 1"], errors
    assert (ran.returncode, errors, os.listdir(ipc)) == (0, "", [])


@pytest.mark.long
def test_run_takes_modules_and_keeps_what_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('site')")
    (tmp_path / "package.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = python("-m", "shmesh.run", "-m", "package", "-x", env={**os.environ, "PYTHONPATH": paths})
    assert ran.communicate()[0].splitlines() == ["site", "site", "__main__ package ['-x']"]


@pytest.mark.long
def test_run_adds_only_its_own_folder_to_the_paths(tmp_path: Path) -> None:
    """Packages beside shmesh hide no module of the standard library, and other interpreters do not get them."""
    beside = tmp_path / "packages"
    beside.mkdir()
    (beside / "shmesh").symlink_to(Path(shared_memory.__file__).parent)
    (beside / "uuid.py").write_text("")
    (beside / "another.py").write_text("")
    app = tmp_path / "app.py"
    app.write_text(
        "import importlib.util, uuid\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "print(SharedMemory.__module__, hasattr(uuid, 'uuid4'), importlib.util.find_spec('another'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Found in the current folder, as it is in the sources.
    ran = python("-m", "shmesh.run", str(app), env=environment, cwd=beside)
    assert ran.communicate()[0].split() == ["shmesh.shared_memory", "True", "None"]


def test_interpreter_without_shmesh_keeps_the_standard_library(ipc: Path, tmp_path: Path) -> None:
    """A child that cannot import it says nothing, and runs the other `sitecustomize`, as without `shmesh.run`."""
    broken = tmp_path / "numpy.py"
    broken.write_text("raise ImportError('of another interpreter')")
    (tmp_path / "sitecustomize.py").write_text("print('site')")
    here = os.path.dirname(shared_memory.__file__)
    code = "from multiprocessing.shared_memory import SharedMemory; print(SharedMemory.__module__)"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.join(here, "_run"), str(tmp_path)]),
        "SHMESH_RUN_PACKAGE": os.path.dirname(here),
    }
    ran = python("-c", code, env=environment, stderr=subprocess.STDOUT, cwd=tmp_path)
    assert ran.communicate()[0].splitlines() == ["site", "multiprocessing.shared_memory"]
    shell = ["sh", "-c", 'SHMESH_RUN=$$ exec "$@"', "sh", sys.executable, "-c", "pass"]
    program = subprocess.run(shell, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert program.stdout == "site\n" and "of another interpreter" in program.stderr, "the program itself does not go on silently"


@pytest.mark.long
def test_run_says_what_it_needs() -> None:
    for arguments, words in [(["-m", "shmesh.run"], "usage: "), (["-E", "-c", "from shmesh.run import main; main()", "x"], "PYTHONPATH")]:
        if arguments[0] == "-E":
            arguments[2] = f"import sys; sys.path[:0] = {sys.path!r}; {arguments[2]}"
        ran = python(*arguments, stderr=subprocess.PIPE)
        assert words in ran.communicate()[1] and ran.returncode == 1


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_cpythons_own_tests(ipc: Path, method: str) -> None:
    pytest.importorskip("test._test_multiprocessing", reason="this Python is installed without its tests")
    own = Path(__file__).with_name("stdlib_tests.py")
    ran = python("-W", "ignore", "-m", "shmesh.run", str(own), method, stderr=subprocess.STDOUT)
    output, _ = ran.communicate()
    assert ran.returncode == 0 and "Ran 0 tests" not in output, output
    assert os.listdir(ipc) == []


def test_other_files_are_no_families(ipc: Path) -> None:
    """A file with the name of a family and other contents does no harm, and stays."""
    other = ipc / f".shmesh-family-{os.getuid()}-other"
    other.write_bytes(b"nonsense\0" + b"1 ../passwd\0" + b"2 half")
    _family.collect(str(ipc))
    other.unlink()


def test_files_that_are_no_family_of_this_user_stop_nothing(ipc: Path) -> None:
    def named(kind: str) -> Path:
        return ipc / f".shmesh-family-{os.geteuid()}-{kind}"

    named("link").symlink_to(named("link"))
    os.mkfifo(named("pipe"))
    named("folder").mkdir()
    with named("sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    if os.geteuid() == 0:
        kept = SharedMemory("kept", create=True, size=1, track=False)
        kept.close()
        # Marked, so that only the owner of the list protects it.
        (ipc / "kept").chmod(0o1600)
        named("other").write_bytes(b"\0%d kept\0" % (ipc / "kept").stat().st_ino)
        os.chown(named("other"), 12345, -1)
    end(program("SharedMemory(create=True, size=9)"))
    left = set(blocks(ipc))
    for path in ipc.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    assert left == ({"kept"} if os.geteuid() == 0 else set())


@pytest.mark.parametrize("name", ["folder/f", "../{here}/folder/f", "{ipc}/folder/f", "./folder/f"])
def test_lists_remove_nothing_outside_of_their_directory(ipc: Path, name: str) -> None:
    (ipc / "folder").mkdir()
    file = ipc / "folder" / "f"
    file.touch()
    file.chmod(0o1600)
    family = ipc / f".shmesh-family-{os.geteuid()}-other"
    family.write_bytes(b"\0%d %s\0" % (file.stat().st_ino, name.format(here=ipc.name, ipc=ipc).encode()))
    _family.collect(str(ipc))
    assert file.exists()
    file.unlink()
    file.parent.rmdir()
    family.unlink(missing_ok=True)


def test_unlink_after_the_family_has_ended_is_silent(ipc: Path) -> None:
    code = """if True:
        import atexit
        late = []
        atexit.register(lambda: late[0].unlink())
        from shmesh.shared_memory import SharedMemory

        class Owner:
            def __init__(self):
                self.block = SharedMemory("a", create=True, size=1)

            def __del__(self):
                self.block.close()
                self.block.unlink()

        owner = Owner()
        late.append(SharedMemory("b", create=True, size=1))
    """
    ran = python("-c", code, stderr=subprocess.PIPE)
    assert ran.communicate() == ("", "") and os.listdir(ipc) == []


def family_file(directory: Path) -> Path:
    (file,) = directory.glob(".shmesh-family-*")
    return file


def turn_over(rounds: int) -> None:
    for _ in range(rounds):
        block = SharedMemory(create=True, size=1)
        block.close()
        block.unlink()


@pytest.mark.long
def test_list_of_a_family_does_not_grow_with_blocks_that_are_gone(ipc: Path) -> None:
    kept = SharedMemory("kept", create=True, size=1)
    turn_over(2000)
    assert family_file(ipc).stat().st_blocks * 512 <= 32 << 10
    kept.close()
    _family.leave()
    assert os.listdir(ipc) == [], "the first block is still listed"


@pytest.mark.long
def test_members_that_are_killed_while_they_shorten_the_list_lose_no_entry(ipc: Path) -> None:
    _family.join(str(ipc))
    ready, says = os.pipe()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(8):
                    turn_over(200)
                    SharedMemory(f"kept-{number}-{_}", create=True, size=1).close()
                os.write(says, b"!")
                while True:
                    turn_over(100)
            finally:
                os._exit(1)
        children.append(child)
    said = b""
    while len(said) < len(children):
        said += os.read(ready, 8)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(ready)
    os.close(says)
    listed = {_family._parsed(entry)[1] for entry in _family._entries(_family.join(str(ipc)))}
    assert family_file(ipc).stat().st_blocks * 512 <= 64 << 10
    assert {f"kept-{number}-{block}" for number in range(3) for block in range(8)} <= listed
    _family.leave()
    # A block of a process that was killed before it could list it is for `shmesh rm --stale`.
    left = blocks(ipc)
    for name in left:
        (ipc / name).unlink()
    assert len(left) <= len(children) and not any(name.startswith("kept") for name in left)


@pytest.mark.long
def test_entries_survive_a_kill_just_after_memory_of_the_list_was_freed(ipc: Path) -> None:
    killed = program("""
        from shmesh import _family
        kept = SharedMemory("kept", create=True, size=1)
        free = _family._free
        _family._free = lambda *arguments: (free(*arguments), os.kill(os.getpid(), 9))
        while True:
            block = SharedMemory(create=True, size=1)
            block.close()
            block.unlink()
    """)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert {"kept"} <= set(blocks(ipc))
    end(program(""))
    assert os.listdir(ipc) == []


def test_close_looks_for_ended_families_only_after_the_last_user(ipc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = program("a = SharedMemory('a', create=True, size=1); print('made', flush=True); sys.stdin.readline(); os.kill(os.getpid(), 9)")
    assert said(other) == "made"
    SharedMemory("b", create=True, size=1).close()
    one, two = SharedMemory("a"), SharedMemory("a")
    scanned: list[object] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scanned.append(path) or scan(path))
    SharedMemory("a").close()
    SharedMemory("b").close()
    assert scanned == [], "others have the one open, and this family, which goes on, has made the other"
    other.communicate("end\n")
    one.close()
    assert (scanned, blocks(ipc)) == ([], ["a", "b"])
    two.close()
    assert (scanned, blocks(ipc)) == ([str(ipc)], ["b"])


@pytest.mark.parametrize(
    ("arguments", "is_child"),
    [
        (["-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", "--multiprocessing-fork"], True),
        (["-O", "-c", "from multiprocessing.forkserver import main; main(5, 6, [], **{})"], True),
        (["-m", "loky.backend.popen_loky_posix", "--process-name", "a", "--pipe", "9"], True),
        (["-m", "joblib.externals.loky.backend.popen_loky_posix", "--process-name", "a"], True),
        (["-c", "from multiprocessing.shared_memory import SharedMemory"], False),
        (["app.py", "from multiprocessing.spawn import spawn_main"], False),
        (["-m", "notloky.backend.popen_loky_posix"], False),
        (["app.py"], False),
    ],
)
def test_children_of_the_family_are_told_by_their_command(arguments: list[str], is_child: bool) -> None:
    assert _family._is_child([sys.executable, *arguments]) == is_child


def test_program_that_only_imports_from_multiprocessing_is_a_family_of_its_own(ipc: Path) -> None:
    mine = SharedMemory("mine", create=True, size=1)
    code = "from multiprocessing.shared_memory import SharedMemory; from shmesh import _family; print(_family._family)"
    assert python("-c", code).communicate()[0].strip() != _family._family
    mine.close()
    mine.unlink()


def test_import_does_not_replace_the_standard_library() -> None:
    import multiprocessing.shared_memory as standard

    assert standard.SharedMemory is not shared_memory.SharedMemory
