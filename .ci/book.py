#!/usr/bin/env python3
"""Builds the documentation site: .ci/book.py OUT

docs/SUMMARY.md is its table of contents and docs/book.toml its configuration. mdBook takes pages from one folder only, so the documents
of the repository, and the files that they link to, are copied to OUT.src with their paths. Exit status 1 if a document is not in the
table of contents, or a link of the finished site leads nowhere. Installs mdBook if it is missing.
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )([^)#\s]+)", re.MULTILINE)
VERSION = "0.5.4"
# Without its server. It runs for seconds, so it is not optimised: that compiles in a third of the time.
INSTALL = f"cargo install --debug --locked --version {VERSION} mdbook --no-default-features --features search --root".split()


def documents():
    """Paths of all documents of the repository, those that are not committed yet too."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return {name for name in names if (ROOT / name).exists() and name != "docs/SUMMARY.md"}


def arrange(src):
    """Copies documents and what they link to below `src`; returns the documents that are not in the table of contents."""
    files = set(documents())
    summary = LINK.sub(lambda link: f"]({path_from_root(ROOT / 'docs', link[1])}", (ROOT / "docs/SUMMARY.md").read_text())
    missing = files - set(LINK.findall(summary))
    for name in sorted(files):
        for target in LINK.findall((ROOT / name).read_text()):
            if "://" not in target and ((ROOT / name).parent / target).is_file():
                files.add(path_from_root((ROOT / name).parent, target))
    for name in files:
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, src / name)
    (src / "SUMMARY.md").write_text(summary)
    return missing


def path_from_root(folder, target):
    return str((folder / target).resolve().relative_to(ROOT))


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value and tag not in ("link", "script"):
                self.links.add(value)


def broken_links(site):
    """Lines "page: link" of the links that lead to no file or id of the site."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    for file, page in pages.items():
        if file.name in ("print.html", "404.html", "toc.html"):
            continue
        for link in sorted(page.links):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(url.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                yield f"{file.relative_to(site)}: {link}"


def mdbook():
    """The path of mdBook, in this version. Installs it below target/ if it is missing."""
    place = ROOT / "target/mdbook"
    ours = place / "bin/mdbook"
    for program in ("mdbook", ours):
        found = shutil.which(program)
        if found and VERSION in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
            return found
    subprocess.run([*INSTALL, place], check=True)
    return ours


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1]).resolve()
    place = out.with_name(out.name + ".src")
    for folder in (out, place):
        shutil.rmtree(folder, ignore_errors=True)
    count = len(documents())
    missing = arrange(place / "src")
    shutil.copyfile(ROOT / "docs/book.toml", place / "book.toml")
    subprocess.run([mdbook(), "build", "--dest-dir", out, place], check=True)
    wrong = [f"docs/SUMMARY.md: {name} is not in it" for name in sorted(missing)]
    wrong += broken_links(out)
    print("\n".join(wrong) or f"{count} documents, all links resolve: {out / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
