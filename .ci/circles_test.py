#!/usr/bin/env python3
"""Tests of circles.py: what counts as a need of a file, and which circles must be found."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import circles


def needs(**files):
    """Which file needs which, in a crate of these files: `lib` is its root, `a__b` is `a/b.rs`."""
    sources = {Path("src") / (name.replace("__", "/") + ".rs"): text for name, text in files.items()}

    def read(path):
        if path not in sources:
            raise FileNotFoundError(path)
        return sources[path]

    found = circles.Crate(Path("src/lib.rs"), read).needs()
    name = lambda path: str(path.relative_to("src").with_suffix(""))
    return {(name(start), name(end)): sorted(lines) for (start, end), lines in found.items()}


class Needs(unittest.TestCase):
    def test_imports_and_paths_count_with_their_lines(self):
        found = needs(
            lib="mod a;\nmod b;\nmod c;\n",
            a="use crate::b::{self, Item, deep::{Other as Renamed}};\nfn f() {\n    crate::c::call::<u8>();\n    b::g();\n}\n",
            b="pub struct Item;\npub fn g() {}\npub mod deep { pub struct Other; }\n",
            c="pub fn call() {}\n",
        )
        self.assertEqual(found[("a", "b")], [(1, "crate::b::Item"), (1, "crate::b::deep::Other"), (4, "b::g")])
        self.assertEqual(found[("a", "c")], [(3, "crate::c::call")])
        self.assertEqual(set(found), {("a", "b"), ("a", "c")})

    def test_super_and_self_are_followed_from_inline_modules(self):
        found = needs(
            lib="mod a;\nmod b;\n",
            a="mod inner {\n    use super::super::b::Item;\n    fn f() -> self::Item { super::g() }\n}\nfn g() {}\n",
            b="pub struct Item;\n",
        )
        self.assertEqual(set(found), {("a", "b")})

    def test_reexports_lead_to_the_file_that_defines(self):
        found = needs(
            lib="mod a;\nmod error;\nmod deep;\npub use error::Error;\npub use deep::*;\n",
            a="use crate::{Error, Item};\nuse super::Error as Again;\n",
            error="pub struct Error;\n",
            deep__mod="pub use item::Item;\nmod item;\n",
            deep__item="pub struct Item;\n",
        )
        self.assertEqual(set(found), {("a", "error"), ("a", "deep/item")})

    def test_module_and_its_parts_are_one_thing_downwards(self):
        found = needs(
            lib="mod a;\n",
            a__mod="mod part;\nuse part::Part;\npub struct Whole;\nfn f() { part::g(); Part::h() }\n",
            a__part="use super::Whole;\npub struct Part;\npub fn g() {}\n",
        )
        self.assertEqual(set(found), {("a/part", "a/mod")})

    def test_tests_comments_and_strings_do_not_count(self):
        found = needs(
            lib="mod a;\nmod b;\n#[cfg(test)]\nmod tests;\n",
            a='// crate::b::Item\n/* crate::b::Item /* again */ crate::b::Item */\n/// [`Item`](crate::b::Item)\nfn f() { g("crate::b::Item", r#"crate::b::"Item""#, \'"\') }\n'
            "#[cfg(test)]\nuse crate::b::Item;\n#[cfg(all(test, unix))]\nmod tests {\n    use crate::b::Item;\n}\n"
            "#[cfg(test)]\nfn h<A, B>(item: crate::b::Item) {\n    crate::b::Item;\n}\nstruct S {\n    #[cfg(test)]\n    field: crate::b::Item,\n}\n",
            b="pub struct Item;\n",
        )
        self.assertEqual(found, {})

    def test_code_after_a_test_counts(self):
        found = needs(
            lib="mod a;\nmod b;\n",
            a="#[cfg(test)]\nmod tests {}\n#[cfg(not(test))]\nuse crate::b::Item;\nfn f() -> impl Fn() + use<'static> {}\nfn g() { crate::b::h() }\n",
            b="pub struct Item;\npub fn h() {}\n",
        )
        self.assertEqual(found, {("a", "b"): [(4, "crate::b::Item"), (6, "crate::b::h")]})

    def test_paths_in_attributes_and_macros_count(self):
        found = needs(
            lib="mod log;\nmod a;\nmod b;\n",
            log="#[macro_export]\nmacro_rules! say { () => { $crate::b::call() } }\n",
            a='#[serde(with = "crate::b::form")]\nstruct S;\nfn f() { crate::say!() }\n',
            b="pub mod form {}\npub fn form() {}\npub fn call() {}\n",
        )
        self.assertEqual(set(found), {("log", "b"), ("a", "b"), ("a", "log")})

    def test_other_crates_do_not_count(self):
        found = needs(lib="mod a;\nmod log;\n", a="use anyhow::Result;\nuse log::log;\nfn f() -> std::io::Result<()> {}\n", log="pub fn log() {}\n")
        self.assertEqual(found, {})


class Circles(unittest.TestCase):
    def test_circles_of_any_length_are_found(self):
        graph = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "e"), ("e", "c"), ("a", "c"), ("f", "a")]
        self.assertEqual(sorted(map(sorted, circles.circles_of(graph))), [["a", "b"], ["c", "d", "e"]])

    def test_line_is_no_circle(self):
        self.assertEqual(circles.circles_of([("a", "b"), ("b", "c"), ("a", "c")]), [])

    def test_each_circle_is_printed_with_the_lines_that_make_it(self):
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            (root / "Cargo.toml").write_text('[package]\nname = "x"\n')
            (root / "src").mkdir()
            (root / "src/lib.rs").write_text("mod a;\nmod b;\n")
            (root / "src/a.rs").write_text("use crate::b::B;\npub struct A;\nfn f(b: crate::b::B) {}\n")
            (root / "src/b.rs").write_text("\npub struct B(super::a::A);\n")
            [root_file] = circles.roots_of(root)
            found = circles.Crate(root_file).needs()
            [circle] = circles.circles_of(found)
            text = "\n".join(circles.report(circle, found))
            self.assertIn("a.rs needs of", text)
            self.assertIn("crate::b::B (line 1, 3)", text)
            self.assertIn("super::a::A (line 2)", text)
            with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(circles.main([str(root)]), 1)
            self.assertEqual(printed.getvalue(), text + "\n")

    def test_product_has_none_and_is_looked_at(self):
        self.assertIn(circles.ROOT / "lib", circles.crates())
        self.assertNotIn(circles.ROOT / "e2e", circles.crates())
        edges = circles.Crate(circles.ROOT / "lib/src/lib.rs").needs()
        self.assertGreater(len(edges), 200)


if __name__ == "__main__":
    unittest.main()
