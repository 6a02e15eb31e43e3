#!/usr/bin/env python3
"""Draws docs/top.svg: the screen of `shmesh top` beside three links, of which one has lost its receiver.

    cargo build --release --bin shmesh --bin shmesh-sidecar
    pip install pyte
    lib/cli/screenshot.py

Processes, links and numbers are real. The picture is what a terminal of 118 columns shows after some seconds.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS, LINES = 118, 15
# Name of each link, and milliseconds between two messages of its primary and of its secondary.
LINKS = [("fronthaul", 1, 1), ("control", 40, 100), ("weights", 5, 20)]
# The secondary of this link is killed.
HALF = "weights"
COLOURS = {"default": "#d8dee4", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "yellow": "#e3b341", "cyan": "#79c0ff"}
BACKGROUND = "#1b1f24"
# The key that selects the next link.
DOWN = b"\x1b[B"
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.0, 18, 12


def screen_of(command, environment, keys, seconds):
    """Runs a command in a terminal, presses these keys, and returns the screen after that time."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    os.kill(child, signal.SIGWINCH)
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    os.write(terminal, keys)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            stream.feed(os.read(terminal, 65536))
    os.write(terminal, b"q")
    os.waitpid(child, 0)
    return screen


def svg(screen):
    """The screen as a picture: text with the colours of the terminal."""
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, LINES * CELL_HEIGHT + 2 * MARGIN
    parts = []
    for y in range(LINES):
        row, x = screen.buffer[y], 0
        while x < COLUMNS:
            style = lambda at: (row[at].fg, row[at].bold, row[at].reverse)
            end = x
            while end < COLUMNS and style(end) == style(x):
                end += 1
            text = "".join(row[at].data for at in range(x, end))
            colour, background = COLOURS.get(row[x].fg, COLOURS["default"]), BACKGROUND
            left, top = MARGIN + x * CELL_WIDTH, MARGIN + y * CELL_HEIGHT
            if row[x].reverse:
                colour, background = background, colour
                parts.append(f'<rect x="{left}" y="{top}" width="{(end - x) * CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{background}"/>')
            bold = ' font-weight="bold"' if row[x].bold else ""
            # Word by word, so that columns stay columns in any font.
            for word in re.finditer(r"\S+", text):
                at, length = left + word.start() * CELL_WIDTH, len(word.group()) * CELL_WIDTH
                shape = f'fill="{colour}"{bold} textLength="{length}" lengthAdjust="spacingAndGlyphs"'
                parts.append(f'<text x="{at}" y="{top + 13}" {shape}>{escape(word.group())}</text>')
            x = end
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="The screen of shmesh top" '
        'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="13">'
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=ROOT / "target" / "release", help="directory of shmesh and shmesh-sidecar")
    parser.add_argument("--seconds", type=float, default=5.5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        environment = {**os.environ, "SHMESH_DIR": directory, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        shmesh = str(args.programs / "shmesh")
        config = Path(directory, "links.yaml")
        config.write_text("links:\n" + "".join(f"- {{name: {name}, latency: {{sample: 1}}}}\n" for name, _, _ in LINKS), encoding="utf-8")
        start = lambda *command: subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        processes = [start(str(args.programs / "shmesh-sidecar"), "--config", str(config), "--log", "warn")]
        try:
            for name, primary, secondary in LINKS:
                for side, every in (("primary", primary), ("secondary", secondary)):
                    talk = start(shmesh, "talk", name, "--side", side, "--every-ms", str(every))
                    processes.append(talk)
            time.sleep(2)
            # The last one is the secondary of the last link.
            assert LINKS[-1][0] == HALF
            processes.pop().kill()
            screen = screen_of([shmesh, "top"], environment, DOWN * 2, args.seconds)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait()
    (ROOT / "docs" / "top.svg").write_text(svg(screen), encoding="utf-8")
    print("\n".join(screen.display))


if __name__ == "__main__":
    main()
