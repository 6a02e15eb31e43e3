"""Runs the examples of the documents."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def run(code: str, tmp_path: Path) -> str:
    """In a file, as a reader would: `spawn` imports it again."""
    program = tmp_path / "program.py"
    program.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_front_page(tmp_path: Path) -> None:
    (code,) = blocks("README.md")
    assert run(code, tmp_path) == "200 batches\n1.5 False\n"


@pytest.mark.parametrize("document", ["docs/python.md", "docs/from-sysv.md"])
def test_each_example(document: str, tmp_path: Path) -> None:
    """Examples of one document build on each other."""
    found = blocks(document)
    assert found
    run("\n".join(found), tmp_path)


@pytest.mark.long
def test_training_example(tmp_path: Path) -> None:
    example = ROOT / "lib/python/examples/train.py"
    arguments = ["--loaders", "2", "--batches", "20", "--batch-mib", "1"]
    done = subprocess.run([sys.executable, str(example), *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "40 batches" in done.stdout


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("batches.py", "100 batches, mean 49.5\n"),
        ("batches_asyncio.py", "total 4950; the loop went on meanwhile\n"),
        ("message_queue.py", "".join(f"rank {rank}: {4950 + 161_700}\n" for rank in range(3))),
        ("stream.py", "200 frames, mean 99.5\n"),
        ("broadcast.py", "".join(f"reader {rank}: 124750\n" for rank in range(3))),
        ("latest_value.py", "position 999; 999 were skipped\nposition 999\n"),
        ("many_links.py", "".join(f"a message on {name}\n" for name in ["fronthaul", "midhaul", "backhaul"])),
        ("reconnect.py", "new link: True; a job\nthe server died\nnew link: False; the last job\n"),
        ("kv_metadata.py", "".join(f"rank {rank}: 3000 blocks\n" for rank in range(2))),
        ("request_reply.py", "sum of 1000000 numbers: 499999500000\ncounted to 10\n"),
        ("weights.py", "".join(f"rank {rank}: version 4, 65536\n" for rank in range(2))),
    ],
)
@pytest.mark.long
def test_each_short_example(example: str, printed: str) -> None:
    program = ROOT / "lib/python/examples" / example
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # Processes print at once, and in any order.
    assert all(line in done.stdout for line in printed.splitlines()), done.stdout


def test_torch_example() -> None:
    pytest.importorskip("torch")
    example = ROOT / "lib/python/examples/torch_loader.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
