#!/usr/bin/env python3
"""Measures shmesh beside its peers and writes docs/comparison.json, docs/comparison.svg, which the README shows, and the
tables of docs/performance.md; or measures the steps from a bare cache line to a message, and writes docs/steps.json and
their table.

    lib/comparison/publish.py                    measure all peers, draw, and write the tables
    lib/comparison/publish.py --peers boost      without the other peers whose builds need more than Rust; also `none`
    lib/comparison/publish.py --real-time        measure before all other programs (root)
    lib/comparison/publish.py --steps            measure the steps, and write their table
    lib/comparison/publish.py --from-json        draw and write what was measured before; also with --steps

All programs run in each round, so that a change of the machine meets all of them. Each figure is the median over the rounds,
near (two cores that share a cache) and apart (two that do not). A run that hardly ever had its cores at one of these places
shows what the last run measured there, under that run's date.
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
import tables

JSON = measure.ROOT / "docs" / "comparison.json"
SVG = measure.ROOT / "docs" / "comparison.svg"
STEPS_JSON = measure.ROOT / "docs" / "steps.json"
DOCUMENT = measure.ROOT / "docs" / "performance.md"
SMALL = [
    ["--form", "inline", "--sizes", "48", "--wait", "poll", "--batch", "1"],
    ["--form", "pooled", "--sizes", "64", "--wait", "poll", "--batch", "1,16"],
]
LARGE = [["--form", "pooled,data", "--sizes", "65536", "--ring", "spsc", "--wait", "poll", "--batch", "1"]]
# Title, unit, and the rows of a panel: what is measured, and the label of its bar.
PANELS = [
    (
        "Round trip of one message, ns",
        [
            ("cacheline-rtt", "a bare cache line: the limit"),
            ("inline-rtt-48-spsc-poll", "shmesh, 48 bytes in the ring"),
            ("pooled-rtt-64-spsc-poll", "shmesh, buffers, one to one"),
            ("pooled-rtt-64-mpmc-poll", "shmesh, buffers, many to many"),
            ("tachyon-rtt", "Tachyon, one to one"),
            ("boost-spsc-rtt", "boost spsc_queue, one to one"),
            ("boost-mpmc-rtt", "boost queue, many to many"),
            ("aeron-rtt", "Aeron IPC"),
            ("iceoryx2-rtt", "iceoryx2"),
            ("pipe-rtt-poll", "pipe, polled"),
            ("boost-mq-rtt-poll", "boost message_queue, polled"),
            ("seqpacket-rtt-poll", "Unix socket, polled"),
            ("zenoh-rtt", "Zenoh, shared memory"),
        ],
    ),
    (
        "One message of a stream, ns",
        [
            ("inline-oneway-48-spsc-poll", "shmesh, 48 bytes in the ring"),
            ("pooled-oneway-64-spsc-poll", "shmesh, buffers, one to one"),
            ("pooled-oneway-64-mpmc-poll", "shmesh, buffers, many to many"),
            ("tachyon-oneway", "Tachyon, one to one"),
            ("boost-spsc-oneway", "boost spsc_queue, one to one"),
            ("boost-mpmc-oneway", "boost queue, many to many"),
            ("aeron-oneway", "Aeron IPC"),
            ("iceoryx2-oneway", "iceoryx2"),
            ("pipe-oneway", "pipe"),
            ("boost-mq-oneway", "boost message_queue"),
            ("seqpacket-oneway", "Unix socket"),
            ("zenoh-oneway", "Zenoh, shared memory"),
        ],
    ),
]
# A bar that is longer than this many of the shortest is cut, or the short ones could not be distinguished.
LONGEST = 25


def build(peers):
    """Builds both programs, and returns their paths, the names of the tests that the second has, and what it lacks."""
    target = os.environ.get("CARGO_TARGET_DIR")
    program = measure.build(measure.ROOT, target or measure.ROOT / "target")
    here = measure.ROOT / "lib" / "comparison"
    subprocess.run(["cargo", "build", "--release", "--locked", "--features", peers], cwd=here, check=True)
    comparison = Path(target or here / "target") / "release" / "comparison"
    listed = subprocess.run([str(comparison), "--list"], check=True, capture_output=True, text=True)
    return program, comparison, listed.stdout.split(), listed.stderr.splitlines()


def commit(tree):
    """The commit of a working tree, followed by `+changes` if tracked files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+changes"]
    return subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def real_time():
    """Lets the programs that are measured go before all others."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


def run(args, wanted, tests):
    measured = commit(measure.ROOT)
    program, comparison, listed, missing = build("" if args.peers == "none" else args.peers)
    for line in missing:
        print(line, file=sys.stderr)
    if args.real_time:
        real_time()
    rows = []
    for number in range(args.rounds):
        for test in tests:
            rows += measure.bench(program, test, args.seconds)
        only = ",".join(name for name in wanted if name in listed)
        command = [str(comparison), "--only", only, "--seconds", str(args.seconds), "--repeat", "1", "--output", "json"]
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": measured,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, Linux {'.'.join(platform.release().split('.')[:2])}",
        "load": [round(value, 1) for value in os.getloadavg()],
        "real_time": args.real_time,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "missing": missing,
        "rows": rows,
    }


def text(value, key=None):
    """JSON with a line for each field and for each row, so that a diff of two results can be read."""
    if key == "rows":
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {text(inner, name)}" for name, inner in value.items()) + "\n}" + "\n" * (key is None)
    return json.dumps(value)


def svg(result):
    """Bars; each panel has a scale of its own, and a bar beyond it is cut."""
    found, heads = tables.shown(result)
    lines, y = [], 26
    for title, bars in PANELS:
        lines.append(f'<text x="10" y="{y}" class="title">{title}</text>')
        y += 12
        values = [median["p50"] for key, median in found.items() if key[0] in dict(bars)]
        largest = max((value for value in values if value <= LONGEST * min(values)), default=1)
        for name, label in bars:
            places = [place for place in heads if (name, place) in found]
            if not places:
                continue
            kind = "ours" if label.startswith("shmesh") else "limit" if "limit" in label else "other"
            middle = y + 9 * len(places) + 2
            lines.append(f'<text x="235" y="{middle}" text-anchor="end">{label}</text>')
            for place in places:
                value = found[name, place]["p50"]
                width, cut = min(400, max(1, 400 * value / largest)), value > largest
                lines.append(f'<rect x="245" y="{y + 2}" width="{width:.1f}" height="12" class="{kind} {place}"/>')
                if cut:
                    lines.append(f'<path d="M628 {y + 16}l6 -16m4 16l6 -16" class="cut"/>')
                lines.append(f'<text x="{250 + width:.1f}" y="{y + 12}" class="value">{value:,.0f} {place}</text>')
                y += 15
            y += 6
        y += 24
    remark = "; ".join([*(head for place, head in heads.items() if head != place), "a bar with a gap is longer than the plot"])
    lines.append(f'<text x="10" y="{y - 8}" class="value">{remark}</text>')
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.value{font-size:11px}.ours{fill:#2a7f62}"
        ".other{fill:#9aa5ad}.limit{fill:#d0a94f}.apart{opacity:.55}.cut{stroke:#fff;stroke-width:3}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.other{fill:#6b767e}.cut{stroke:#0d1117}}"
    )
    label = "Round trips and streams of shmesh, Tachyon, boost, Aeron, iceoryx2, Zenoh, pipes and Unix sockets"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y}" role="img" aria-label="{label}">'
        f"<style>{style}</style>\n" + "\n".join(lines) + "\n</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="the steps from a bare cache line to a message")
    parser.add_argument("--from-json", action="store_true", help="draw and write what was measured before")
    parser.add_argument("--peers", default="all-peers", help="features of lib/comparison: peers to compile in, or `none`")
    parser.add_argument("--real-time", action="store_true", help="measure with real-time priority")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each test in each round")
    args = parser.parse_args()
    file = STEPS_JSON if args.steps else JSON
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if args.from_json:
        result = before
    else:
        wanted = [name for step in tables.STEPS for name in step[1:] if name] if args.steps else tables.names()
        measured = run(args, wanted, SMALL if args.steps else SMALL + LARGE)
        result = tables.with_earlier(measured, before)
        file.write_text(text(result), encoding="utf-8")
    written = tables.steps(result) if args.steps else tables.comparison(result)
    DOCUMENT.write_text(tables.written(DOCUMENT.read_text(encoding="utf-8"), written), encoding="utf-8")
    if not args.steps:
        SVG.write_text(svg(result), encoding="utf-8")
    for (name, place), median in sorted(measure.medians(result["rows"]).items()):
        ratio = median["p50"] / median["floor_ns"]
        print(f"{name:36} {place:6} {median['p50']:10,.1f}  {ratio:6.2f} of the floor  {median['runs']} runs")


if __name__ == "__main__":
    main()
