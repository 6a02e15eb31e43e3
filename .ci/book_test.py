#!/usr/bin/env python3
"""Tests of book.py: which documents and links it reports. mdBook itself is not needed."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import book


class Arrange(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve() / "repository"
        for name, text in {
            "README.md": "[code](lib/a.rs), [elsewhere](https://example.com/x.md)\n",
            "lib/a.rs": "fn main() {}\n",
            "lib/b.rs": "fn main() {}\n",
            "docs/SUMMARY.md": "[shmesh](../README.md)\n\n- [a](a.md)\n",
            "docs/a.md": "[`b`] is code.\n\n[`b`]: ../lib/b.rs\n",
        }.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        # A git hook sets variables that name its own repository.
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            self.enterContext(mock.patch.dict(os.environ))
            del os.environ[name]
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        self.enterContext(mock.patch.object(book, "ROOT", self.root))
        self.src = self.root.parent / "src"

    def test_documents_keep_their_paths_and_come_with_what_they_link_to(self):
        self.assertEqual(book.arrange(self.src), set())
        found = {str(file.relative_to(self.src)) for file in self.src.rglob("*") if file.is_file()}
        self.assertEqual(found, {"README.md", "SUMMARY.md", "docs/a.md", "lib/a.rs", "lib/b.rs"})
        self.assertEqual((self.src / "SUMMARY.md").read_text(), "[shmesh](README.md)\n\n- [a](docs/a.md)\n")

    def test_document_outside_the_table_of_contents_is_reported(self):
        (self.root / "docs/b.md").write_text("# B\n")
        self.assertEqual(book.arrange(self.src), {"docs/b.md"})


class BrokenLinks(unittest.TestCase):
    def test_missing_files_and_anchors_are_reported(self):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder).resolve()
            (site / "docs").mkdir()
            (site / "docs/a.html").write_text('<h1 id="a-b"></h1><a href="#a-b"></a><a href="../index.html#top"></a>')
            (site / "index.html").write_text(
                '<p id="top"></p><a href="docs/a.html#a-b"></a><a href="docs/a.html#no"></a><img src="plot.svg"><a href="https://example.com"></a>'
            )
            self.assertEqual(list(book.broken_links(site)), ["index.html: docs/a.html#no", "index.html: plot.svg"])


if __name__ == "__main__":
    unittest.main()
