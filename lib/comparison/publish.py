#!/usr/bin/env python3
"""Measures shmesh beside its peers and writes docs/comparison.json and docs/comparison.svg, which the README shows; or
measures the steps from a bare cache line to a message, and writes docs/steps.json and their table in docs/performance.md.

    lib/comparison/publish.py                    measure, and draw
    lib/comparison/publish.py --steps            measure the steps, and write the table
    lib/comparison/publish.py --from-json        draw what was measured before; also with --steps

All programs run in each round, so that a change of the machine meets all of them. Each bar is the median over the rounds,
near (two cores that share a cache) and apart (two that do not), as far as the machine had them at such places.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import measure

JSON = measure.ROOT / "docs" / "comparison.json"
SVG = measure.ROOT / "docs" / "comparison.svg"
STEPS_JSON = measure.ROOT / "docs" / "steps.json"
DOCUMENT = measure.ROOT / "docs" / "performance.md"
OURS = [
    ["--form", "inline", "--sizes", "48", "--wait", "poll", "--batch", "1"],
    ["--form", "pooled", "--sizes", "64", "--wait", "poll", "--batch", "1"],
]
OTHERS = "cacheline-rtt,iceoryx2-rtt,iceoryx2-oneway,pipe-rtt-poll,pipe-oneway,seqpacket-rtt-poll,seqpacket-oneway"
# From a bare cache line to a message of shmesh: what each step adds, and the rows of its round trip and of its stream.
STEPS = [
    ("a bare cache line, two atomics", "cacheline-rtt", None),
    ("in the ring: slots that are lines, with 48 bytes and a number", "inline-rtt", "inline-oneway"),
    ("**inline message, `spsc`**: seat, length, copy", "inline-rtt-48-spsc-poll", "inline-oneway-48-spsc-poll"),
    ("**inline message, `mpmc`**: cells, shared `tail` and `head`", "inline-rtt-48-mpmc-poll", "inline-oneway-48-mpmc-poll"),
    ("in a buffer: a ring of indices, and buffers in turn", "pooled-rtt", "pooled-oneway"),
    ("and a line with owner and descriptor, plain stores", "described-rtt", "described-oneway"),
    ("and the receiver takes and releases by exchanges", "released-rtt", "released-oneway"),
    ("and the sender claims by an exchange", "claimed-rtt", "claimed-oneway"),
    ("**pooled message, `spsc`**: hints, seat, the last buffer first", "pooled-rtt-64-spsc-poll", "pooled-oneway-64-spsc-poll"),
    ("**pooled message, `mpmc`**: shared `tail` and `head`", "pooled-rtt-64-mpmc-poll", "pooled-oneway-64-mpmc-poll"),
]
BEGIN, END = "<!-- begin: steps -->\n", "<!-- end: steps -->\n"
# Title, unit, and the rows of a panel: what is measured, and the label of its bar.
PANELS = [
    (
        "Round trip of one message, ns",
        [
            ("cacheline-rtt", "a bare cache line: the limit"),
            ("inline-rtt-48-spsc-poll", "shmesh, 48 bytes in the ring"),
            ("pooled-rtt-64-spsc-poll", "shmesh, buffers, one to one"),
            ("pooled-rtt-64-mpmc-poll", "shmesh, buffers, many to many"),
            ("iceoryx2-rtt", "iceoryx2"),
            ("pipe-rtt-poll", "pipe, polled"),
            ("seqpacket-rtt-poll", "Unix socket, polled"),
        ],
    ),
    (
        "One message of a stream, ns",
        [
            ("inline-oneway-48-spsc-poll", "shmesh, 48 bytes in the ring"),
            ("pooled-oneway-64-spsc-poll", "shmesh, buffers, one to one"),
            ("pooled-oneway-64-mpmc-poll", "shmesh, buffers, many to many"),
            ("iceoryx2-oneway", "iceoryx2"),
            ("pipe-oneway", "pipe"),
            ("seqpacket-oneway", "Unix socket"),
        ],
    ),
]


def run(others, rounds, seconds):
    target = os.environ.get("CARGO_TARGET_DIR")
    program = measure.build(measure.ROOT, target or measure.ROOT / "target")
    here = measure.ROOT / "lib" / "comparison"
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=here, check=True)
    peers = Path(target or here / "target") / "release" / "comparison"
    rows = []
    for number in range(rounds):
        for tests in OURS:
            rows += measure.bench(program, tests, seconds)
        command = [str(peers), "--only", others, "--seconds", str(seconds), "--repeat", "1", "--output", "json"]
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=measure.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, Linux {'.'.join(platform.release().split('.')[:2])}",
        "load": [round(value, 1) for value in os.getloadavg()],
        "rounds": rounds,
        "seconds": seconds,
        "rows": rows,
    }


def svg(result):
    """Bars; each panel has a scale of its own."""
    found = measure.medians(result["rows"])
    lines, y = [], 26
    for title, bars in PANELS:
        lines.append(f'<text x="10" y="{y}" class="title">{title}</text>')
        y += 12
        largest = max((found[key]["p50"] for key in found if key[0] in dict(bars)), default=1)
        for name, label in bars:
            places = [place for place in ("near", "apart") if (name, place) in found]
            if not places:
                continue
            kind = "ours" if label.startswith("shmesh") else "limit" if "limit" in label else "other"
            middle = y + 9 * len(places) + 2
            lines.append(f'<text x="235" y="{middle}" text-anchor="end">{label}</text>')
            for place in places:
                value = found[name, place]["p50"]
                width = max(1, 400 * value / largest)
                lines.append(f'<rect x="245" y="{y + 2}" width="{width:.1f}" height="12" class="{kind} {place}"/>')
                lines.append(f'<text x="{250 + width:.1f}" y="{y + 12}" class="value">{value:,.0f} {place}</text>')
                y += 15
            y += 6
        y += 24
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.value{font-size:11px}.ours{fill:#2a7f62}"
        ".other{fill:#9aa5ad}.limit{fill:#d0a94f}.apart{opacity:.55}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.other{fill:#6b767e}}"
    )
    label = "Round trips and streams of shmesh, iceoryx2, pipes and Unix sockets"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y - 14}" role="img" aria-label="{label}">'
        f"<style>{style}</style>\n" + "\n".join(lines) + "\n</svg>\n"
    )


def steps(result):
    """A table: nanoseconds of each step's round trip and stream, near and apart as far as both were measured."""
    found = measure.medians(result["rows"])
    places = [place for place in ("near", "apart") if any(where == place for _, where in found)]
    heads = "".join(f" {place}: round trip | one way |" for place in places)
    lines = [f"| |{heads}", "|---|" + "---|---|" * len(places)]
    for label, *names in STEPS:
        cells = [found.get((name, place)) for place in places for name in names]
        lines.append(f"| {label} | " + " | ".join(f"{cell['p50']:,.0f}" if cell else "" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def with_steps(document, table):
    """The document with this table between the marks."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table + END + after


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="the steps from a bare cache line to a message")
    parser.add_argument("--from-json", action="store_true", help="draw what was measured before")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each test in each round")
    args = parser.parse_args()
    bare = [name for step in STEPS for name in step[1:] if name and not name.endswith("-poll")]
    file, others = (STEPS_JSON, ",".join(bare)) if args.steps else (JSON, OTHERS)
    if args.from_json:
        result = json.loads(file.read_text(encoding="utf-8"))
    else:
        result = run(others, args.rounds, args.seconds)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.steps:
        DOCUMENT.write_text(with_steps(DOCUMENT.read_text(encoding="utf-8"), steps(result)), encoding="utf-8")
    else:
        SVG.write_text(svg(result), encoding="utf-8")
    for (name, place), median in sorted(measure.medians(result["rows"]).items()):
        ratio = median["p50"] / median["floor_ns"]
        print(f"{name:32} {place:6} {median['p50']:10,.1f}  {ratio:6.2f} of the floor  {median['runs']} runs")


if __name__ == "__main__":
    main()
