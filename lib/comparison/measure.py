"""What publish.py and compare_commits.py share: running the benchmarks, and arithmetic on their rows."""

import json
import math
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# A bare cache line goes there and back in 110 to 230 ns between cores that share a cache, and in about 500 ns between others.
NEAR_MAX_NS = 300
# Above this, something else ran on one of the cores.
APART_MAX_NS = 900


def build(tree, target):
    """Builds the command of a working tree, and returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--bin", "shmesh", "--target-dir", str(target)]
    subprocess.run(command, cwd=tree, check=True)
    return Path(target) / "release" / "shmesh"


def bench(program, arguments, seconds):
    """Runs `shmesh bench` once, in an IPC directory of its own, and returns its rows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        command = [str(program), "bench", *arguments, "--seconds", str(seconds), "--repeat", "1", "--output", "json"]
        environment = {**os.environ, "SHMESH_DIR": directory}
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(ran.stdout)


def place_of(row):
    """Where the two cores were while this row was measured: `near`, `apart`, or `busy` if the machine was not left alone."""
    floor = row["floor_ns"]
    return "near" if floor < NEAR_MAX_NS else "apart" if floor < APART_MAX_NS else "busy"


def medians(rows):
    """The median of p50 and of the floor in ns for each name and place, with the number of rows behind it; without busy rows."""
    groups = {}
    for row in rows:
        # A rate says the same as the row with its time.
        if place_of(row) != "busy" and row.get("metric") != "gib_s":
            groups.setdefault((row["name"], place_of(row)), []).append(row)
    return {
        key: {
            "p50": statistics.median(row["p50"] for row in group) * (1000 if group[0].get("metric") == "us_per_msg" else 1),
            "floor_ns": statistics.median(row["floor_ns"] for row in group),
            "runs": len(group),
        }
        for key, group in groups.items()
    }


def sign_flip_test(differences, rounds=10_000, seed=1):
    """The probability that the mean of these paired differences is as far from zero as it is, if either order were as likely."""
    size = abs(statistics.fmean(differences))
    chance = random.Random(seed)
    extreme = sum(
        abs(statistics.fmean(value * chance.choice((-1, 1)) for value in differences)) >= size * (1 - 1e-9)
        for _ in range(rounds)
    )
    return (extreme + 1) / (rounds + 1)


def loss(before, after):
    """By how much `after` is slower than `before` (0.05 is 5 %), and the probability that this is chance. The lists are pairs."""
    logs = [math.log(new / old) for old, new in zip(before, after, strict=True)]
    return math.exp(statistics.median(logs)) - 1, sign_flip_test(logs)
