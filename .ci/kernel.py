#!/usr/bin/env python3
"""Checks that only lib/sys talks to the kernel and the C library, but for lib/posix, which takes the C library's place in programs.

    .ci/kernel.py   exit status 1 and one line for each
      - crate of the product that depends on libc, nix or rustix
      - source that declares C functions or contains assembly
      - difference between the files with unsafe code and the tables in docs/architecture.md
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Crates that no product contains: doubles of kubelet and drivers, and the shared test code.
FAKES = {"e2e/devices/ascend", "e2e/devices/cuda", "e2e/kubelet", "lib/testing"}
KERNEL = {"libc", "nix", "rustix"}
ALLOWED = {"lib/sys": {"libc", "nix"}, "lib/posix": {"libc"}}
DECLARES_C = re.compile(r'^(?!\s*//).*(?:extern "[^"]*" \{|asm!\()', re.MULTILINE)
MAY_DECLARE_C = ("lib/sys/", "lib/posix/", "lib/src/device/", "lib/src/segment/lines.rs", "lib/testing/")
# The edge to C, as the section says below its tables.
UNSAFE_AS_A_WHOLE = {"lib/capi/src/lib.rs", "lib/capi/nvipc/src/lib.rs"}


def dependencies(manifest):
    """The crates that end up in a product: also those for one target, of build scripts, and under another name."""
    for tables in (manifest, *manifest.get("target", {}).values()):
        for kind in ("dependencies", "build-dependencies"):
            for name, value in tables.get(kind, {}).items():
                yield value.get("package", name) if isinstance(value, dict) else name


def listed(document):
    """The files in the tables of the section about unsafe code."""
    section = document.split("### Who may contain unsafe code")[1].split("\n#")[0]
    for row in re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE):
        directory = ""
        for word in re.findall(r"`([^`]*)`", row):
            if not word.endswith(".rs"):
                directory = word
            elif directory.startswith("device/"):
                yield f"lib/src/{directory}{word}"
            elif directory:
                yield f"{directory}/src/{word}"
            else:
                yield word if "/src/" in word else f"lib/src/{word}"


def findings():
    members = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["members"]
    assert FAKES <= set(members), members
    for member in sorted(set(members) - FAKES):
        found = KERNEL & set(dependencies(tomllib.loads((ROOT / member / "Cargo.toml").read_text())))
        if found != ALLOWED.get(member, set()):
            yield f"{member} depends on {sorted(found)}: use shmesh-sys, or add what it lacks"
    checked = [member for member in members if not member.startswith("e2e") and member != "lib/comparison"]
    paths = [path for member in checked for path in (ROOT / member / "src").rglob("*.rs")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    declaring = {path for path, text in sources.items() if DECLARES_C.search(text)}
    assert {"lib/sys/src/cancel.rs", "lib/posix/src/sys.rs"} <= declaring, declaring
    for path in sorted(declaring):
        if not path.startswith(MAY_DECLARE_C):
            yield f"{path} declares C functions or contains assembly: use shmesh-sys, or add what it lacks"
    unsafe = {path for path, text in sources.items() if "/tests" not in path and "unsafe_code" in text}
    tables = {*listed((ROOT / "docs/architecture.md").read_text()), *UNSAFE_AS_A_WHOLE}
    for path in sorted(unsafe ^ tables):
        yield f"{path}: {'not in' if path in unsafe else 'has no unsafe code; remove it from'} the tables of docs/architecture.md"


if __name__ == "__main__":
    found = list(findings())
    print("\n".join(found))
    sys.exit(bool(found))
