#!/usr/bin/env python3
"""Tests of prose.py: what it must find, and what it must leave alone."""

import unittest
from pathlib import Path

import prose


def rust(text):
    return {(rule, found) for _, rule, found in prose.findings_in_rust(text)}


def markdown(text):
    return {(rule, found) for _, rule, found in prose.findings_in(Path("a.md"), text)}


class Prose(unittest.TestCase):
    def test_who_without_antecedent_is_found(self):
        self.assertIn("who", {rule for rule, _ in markdown("Who sends waits.")})
        self.assertIn("who", {rule for rule, _ in markdown("The messages of who came late.")})
        self.assertIn("who", {rule for rule, _ in markdown("Open to whoever asks.")})

    def test_who_at_the_start_of_a_cell_or_clause_is_found(self):
        self.assertEqual({rule for rule, _ in markdown("| a | who asks | b |")}, {"who"})
        self.assertEqual({rule for rule, _ in markdown("A pickle is a program: who loads it runs it.")}, {"who"})
        self.assertEqual(markdown("| who asks | what happens |\n|---|---|"), set())

    def test_strings_of_several_lines_and_of_one_word_are_found(self):
        self.assertEqual(rust('let a = "charged to \\\n    whoever comes";'), {("who", "to whoever")})
        self.assertEqual(rust('const A: &str = "\\\nHelp:\nThe pages of who\ncomes";'), {("who", "of who")})
        self.assertEqual(rust('let a = json!({ "by": "nobody" });'), {("pronoun", "nobody")})
        self.assertEqual(rust('let a = r#"nobody is "here""#;'), {("pronoun", "nobody")})
        self.assertEqual(rust("let quote = '\"'; let nobody = 1; let b = '\"';"), set())
        self.assertEqual(rust('/// Sends a message now.\n///\n/// ```\n/// send(b"nobody listens");\n/// ```\nfn f() {}'), {("pronoun", "nobody")})

    def test_names_of_tests_without_subject_are_found(self):
        for name in ["a_reader_dies", "an_idle_node_sleeps", "the_ring_is_full", "it_is_zeroed", "who_asks_is_refused", "what_is_left_is_freed", "dead_reader_stops_nobody", "request_that_is_none", "retries_seldomly"]:
            found = {("test name", name)}
            self.assertEqual(rust(f"#[test]\nfn {name}() {{}}\n"), found)
            self.assertEqual(rust(f'#[tokio::test(start_paused = true)]\n#[ignore = "long: 2"]\nasync fn {name}() {{}}\n'), found)
            self.assertEqual(set(prose.test_names(f"class T:\n    def test_{name}(self):\n")), {(2, *list(found)[0])})
        self.assertEqual(rust("#[test]\nfn dead_reader_does_not_block_writer() {}\nfn what_is_left() {}\n"), set())

    def test_who_with_antecedent_or_in_a_question_is_left_alone(self):
        self.assertEqual(markdown("An operator who sees this restarts it."), set())
        self.assertEqual(markdown("Who holds the buffers?"), set())
        self.assertEqual(markdown("Run `shmesh who LINK`."), set())

    def test_pronoun_subjects_are_found(self):
        self.assertEqual(markdown("Nobody waits."), {("pronoun", "Nobody")})
        self.assertEqual(rust('fn f() { warn!("somebody holds the lock") }'), {("pronoun", "somebody")})

    def test_predicates_without_not_are_found_in_strings(self):
        self.assertEqual(rust('fn f() { bail!("{text:?} is no name of a pool") }'), {("no", "is no n")})
        self.assertEqual(rust('fn f() { bail!("the file {path} is not there") }'), {("no", "is not there")})
        self.assertEqual(rust('fn f() { bail!("there is no such link; it is no longer in use") }'), set())
        self.assertEqual(rust("/// A capture is no reader of the link.\nfn f() {}\n"), set())
        self.assertEqual({rule for _, rule, _ in prose.findings_in(Path("a.py"), 'raise Invalid(f"{name} is no name")')}, {"no"})

    def test_types_without_backticks_are_found_in_comments(self):
        def renamed(text):
            return {found for _, found in prose.renamed_words(text, {"LostCounts", "Link"})}

        self.assertEqual(renamed("/// The reader LostCounts messages.\nfn f() {}\n"), {"LostCounts"})
        self.assertEqual(renamed("/// Returns [`LostCounts`], `LostCounts` or [LostCounts] of a Link in a DaemonSet.\nfn f() {}\n"), set())

    def test_short_summaries_are_found(self):
        self.assertEqual(rust("/// The link.\nstruct Link;\n"), {("summary", "The link.")})
        self.assertEqual(rust("/// Closes the link for good.\nfn close() {}\n"), set())
        self.assertEqual(rust("/// A link of shared memory.\n///\n/// Short.\nstruct Link;\n"), set())

    def test_summaries_without_a_noun_are_found(self):
        for marker in ["///", "//!"]:
            found = {rule for rule, _ in rust(f"{marker} What the units of a resource stand for.\n")}
            self.assertEqual(found, {"summary"})
        self.assertEqual(rust("/// The meaning of the units.\n///\n/// What follows is prose.\nstruct Units;\n"), set())
        self.assertEqual(rust("// What follows is unsafe.\nfn f() {}\n"), set())

    def test_examples_are_not_prose(self):
        self.assertEqual(rust("/// Does a thing well.\n///\n/// ```\n/// let nobody = 1;\n/// ```\nfn f() {}\n"), set())

    def test_bare_participles_are_found(self):
        for name in ["Told", "Given", "Swept", "Advertised", "Listening", "What", "Whose"]:
            self.assertEqual(rust(f"pub(crate) struct {name};\n"), {("type", name)})
        for name in ["SweepReport", "Ring", "Shared", "Reader", "Setting"]:
            self.assertEqual(rust(f"pub(crate) struct {name};\n"), set())

    def test_old_names_are_found(self):
        self.assertEqual(rust("use shmesh_kubelet::Node;\n"), {("old name", "shmesh_kubelet")})
        self.assertEqual(rust("use shmesh_kubelet_api::Device;\n"), set())
        self.assertEqual(rust("pub(super) struct Room {\n"), {("old name", "struct Room")})
        self.assertEqual(rust("    fn gate(&self) -> u64;\n"), {("old name", "fn gate")})
        self.assertEqual(rust("// Room for the gate of a hub.\nlet gates = 1;\n"), set())

    def test_type_names_that_are_defined_again_are_found(self):
        def twice(*sources):
            return {name for _, _, name in prose.defined_twice(sources)}

        self.assertEqual(twice(("a", "a/x.rs", "struct Place;"), ("a", "a/y.rs", "pub(crate) type Place = u8;")), {"Place"})
        self.assertEqual(twice(*((crate, crate + "/x.rs", "pub enum Place {}") for crate in "abc")), {"Place"})
        self.assertEqual(twice(("a", "a/x.rs", "struct Place;"), ("b", "b/x.rs", "struct Place;")), {"Place"})
        self.assertEqual(twice(("a", "a/x.rs", "struct Link;"), ("b", "b/x.rs", "struct Link;")), set())
        self.assertEqual(twice(("a", "a/x.rs", "impl A {\n    type Item = u8;\n    type Item = u8;\n}\nenum Error {}\nenum Error {}")), set())

    def test_broken_links_are_found(self):
        def broken(text):
            return {found for _, _, found in prose.broken_links(prose.ROOT / "docs" / "a.md", text)}

        self.assertEqual(broken("[a](glossary.md) [b](../README.md#try-it) [c](https://example.com/x) [d](#top)\n# Top\n"), set())
        self.assertEqual(broken("[a](none.md) [b](../README.md#none) [c](#none)"), {"none.md", "../README.md#none", "#none"})
        self.assertEqual(broken("[a]: none.rs\n```\n[b](none.md)\n```\n"), {"none.rs", "none to another document"})

    def test_anchors_are_those_of_github(self):
        self.assertEqual(prose.anchors_of("# A `b`, c-d!\n## A b c-d\n"), {"a-b-c-d", "a-b-c-d-1"})

    def test_allow_list_fits_on_a_screen(self):
        self.assertLessEqual(len(prose.ALLOWED), 25)


if __name__ == "__main__":
    unittest.main()
