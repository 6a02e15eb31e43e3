#!/usr/bin/env python3
"""Compares the speed of two commits, and fails if the second is slower. For use before a change of the hot path lands.

    lib/comparison/compare_commits.py main                          this working tree against main
    lib/comparison/compare_commits.py v0.1.0 HEAD --rounds 40       two commits
    lib/comparison/compare_commits.py main -- --metric rtt --sizes 64 --ring spsc --wait poll

Options after `--` are those of `shmesh bench`. Both programs run in each round, in random order. A test has become slower
if the median of its ratios is above the limit and a permutation test on the pairs says that this is not chance.
Ratios are of medians (p50); rounds in which the two runs had cores at different distances, or shared them, are
left out.

Exit status: 0 if nothing became slower, 1 if something did, 2 if too few rounds could be compared.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import measure

DEFAULT_TESTS = ["--form", "inline,pooled", "--sizes", "48,64", "--wait", "poll", "--batch", "1,16"]
# Below this number of pairs a permutation test cannot say that anything is unlikely.
PAIRS_MIN = 8


def compare(rounds, limit, chance):
    """The lines of the report, the number of tests that became slower, and that of tests with too few pairs."""
    lines, slower, too_few = [], 0, 0
    names = sorted({row["name"] for old, _ in rounds for row in old})
    for name in names:
        pairs = []
        for old, new in rounds:
            before = [row for row in old if row["name"] == name]
            after = [row for row in new if row["name"] == name]
            places = {measure.place_of(row) for row in before + after}
            if before and after and len(places) == 1 and "busy" not in places:
                pairs.append((before[0]["p50"], after[0]["p50"]))
        if len(pairs) < PAIRS_MIN:
            lines.append(f"{name:44} {len(pairs):3} pairs: too few to compare")
            too_few += 1
            continue
        lost, probability = measure.loss(*zip(*pairs, strict=True))
        is_slower = lost > limit and probability < chance
        slower += is_slower
        verdict = "SLOWER" if is_slower else ""
        lines.append(f"{name:44} {len(pairs):3} pairs  {lost:+7.1%}  p = {probability:.4f}  {verdict}".rstrip())
    return lines, slower, too_few


def checkout(commit, place):
    git = ["git", "-C", str(measure.ROOT)]
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(place), commit], check=True)


def main():
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)
    own, tests = own[:end], own[end + 1 :] or DEFAULT_TESTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("after", nargs="?", help="the commit that may have become slower; default: the working tree")
    parser.add_argument("--rounds", type=int, default=20, help="how often both are run")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each test in each round")
    parser.add_argument("--limit", type=float, default=5.0, help="percent by which a test may become slower")
    parser.add_argument("--chance", type=float, default=0.01, help="probability above which a difference counts as chance")
    args = parser.parse_args(own)
    target = measure.ROOT / "target" / "compare"

    with tempfile.TemporaryDirectory() as folder:
        places = []
        try:
            programs = []
            for label, commit in (("before", args.before), ("after", args.after)):
                place = measure.ROOT if commit is None else Path(folder) / label
                if commit is not None:
                    checkout(commit, place)
                    places.append(place)
                programs.append(measure.build(place, target / label))
            rounds = []
            for number in range(args.rounds):
                rows = [None, None]
                for which in random.sample((0, 1), 2):
                    rows[which] = measure.bench(programs[which], tests, args.seconds)
                rounds.append(tuple(rows))
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        finally:
            for place in places:
                subprocess.run(["git", "-C", str(measure.ROOT), "worktree", "remove", "--force", str(place)], check=False)
    lines, slower, too_few = compare(rounds, args.limit / 100, args.chance)
    print("\n".join(lines))
    sys.exit(1 if slower else 2 if too_few else 0)


if __name__ == "__main__":
    main()
