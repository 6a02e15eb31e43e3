#!/usr/bin/env python3
"""Tests of what publish.py and compare_commits.py compute and write. They measure nothing."""

import json
import random
import subprocess
import tempfile
import unittest
from pathlib import Path

import compare_commits
import measure
import publish
import tables


def row(name, p50, floor_ns=110.0):
    return {"name": name, "p50": p50, "floor_ns": floor_ns}


def rounds_of(factor, count=20, floors=(110.0, 110.0)):
    """Rounds in which the second program takes `factor` times as long, with noise of 10 %."""
    chance = random.Random(7)
    noisy = lambda value: value * chance.uniform(0.95, 1.05)
    return [([row("a", noisy(100), floors[0])], [row("a", noisy(100 * factor), floors[1])]) for _ in range(count)]


class CompareTest(unittest.TestCase):
    def verdict(self, rounds):
        _, slower, too_few = compare_commits.compare(rounds, limit=0.05, chance=0.01)
        return slower, too_few

    def test_loss_above_the_limit_is_found(self):
        self.assertEqual(self.verdict(rounds_of(1.2)), (1, 0))

    def test_equal_and_faster_programs_pass(self):
        self.assertEqual(self.verdict(rounds_of(1.0)), (0, 0))
        self.assertEqual(self.verdict(rounds_of(0.8)), (0, 0))

    def test_loss_below_the_limit_passes(self):
        self.assertEqual(self.verdict(rounds_of(1.03)), (0, 0))

    def test_one_slow_round_is_no_loss(self):
        rounds = rounds_of(1.0)
        rounds[3] = ([row("a", 100)], [row("a", 900)])
        self.assertEqual(self.verdict(rounds), (0, 0))

    def test_rounds_at_different_places_are_left_out(self):
        self.assertEqual(self.verdict(rounds_of(5.0, floors=(110.0, 480.0))), (0, 1))
        self.assertEqual(self.verdict(rounds_of(5.0, floors=(9000.0, 9000.0))), (0, 1))

    def test_few_rounds_are_not_compared(self):
        self.assertEqual(self.verdict(rounds_of(2.0, count=compare_commits.PAIRS_MIN - 1)), (0, 1))


class MedianTest(unittest.TestCase):
    def test_places_have_medians_of_their_own(self):
        found = measure.medians([row("a", 1), row("a", 9), row("a", 2), row("a", 50, 480.0)])
        self.assertEqual((found["a", "near"]["p50"], found["a", "near"]["runs"]), (2, 3))
        self.assertEqual(found["a", "apart"]["p50"], 50)

    def test_permutation_test_finds_what_is_unlikely(self):
        self.assertLess(measure.sign_flip_test([1.0] * 12), 0.01)
        self.assertGreater(measure.sign_flip_test([1.0, -1.0] * 6), 0.5)


    def test_times_are_nanoseconds_and_rates_are_left_out(self):
        rows = [{**row("a", 2.5), "metric": "us_per_msg"}, {**row("a", 24.4), "metric": "gib_s"}]
        self.assertEqual(measure.medians(rows)["a", "near"]["p50"], 2500)


class PictureTest(unittest.TestCase):
    def test_each_measured_row_is_a_bar(self):
        names = [name for _, bars in publish.PANELS for name, _ in bars]
        rows = [row(name, 100) for name in names] + [row(name, 480, 480.0) for name in names]
        picture = publish.svg({"rows": rows})
        self.assertEqual(picture.count("<rect"), 2 * len(names))
        self.assertEqual(publish.svg({"rows": rows[:1]}).count("<rect"), 1)

    def test_bar_beyond_the_plot_is_cut(self):
        (_, bars), *_ = publish.PANELS
        values = [100, 200, 100 * publish.LONGEST + 1]
        picture = publish.svg({"rows": [row(name, value) for (name, _), value in zip(bars, values, strict=False)]})
        self.assertEqual(picture.count('class="cut"'), 1)
        self.assertEqual(picture.count('width="400.0"'), 2)


class TablesTest(unittest.TestCase):
    def test_each_step_has_its_numbers_where_it_was_measured(self):
        rows = [row("inline-rtt", 145), row("inline-oneway", 16), row("inline-rtt", 540, 480.0)]
        table = tables.steps({"rows": rows})["steps"]
        line = next(line for line in table.splitlines() if "in the ring: slots" in line)
        self.assertTrue(line.endswith("| 145 | 16 | 540 |  |"), line)

    def test_rows_that_were_not_measured_are_named(self):
        everything = tables.comparison({"rows": [row(name, 100) for name in tables.names()]})
        self.assertNotIn("Not measured", "".join(everything.values()))
        rest = [row(name, 100) for name in tables.names() if not name.startswith("tachyon")]
        for name, table in tables.comparison({"rows": rest}).items():
            self.assertIn("\n\nNot measured: Tachyon 0.5", table, name)
            self.assertNotIn("| Tachyon", table)

    def test_rows_of_a_table_have_as_many_cells_as_its_head(self):
        rows = [row(name, 100, floor) for name in tables.names() for floor in (110.0, 480.0)]
        for name, table in tables.comparison({"rows": rows}).items():
            self.assertEqual(len({line.count(" |") for line in table.splitlines() if not line.startswith("|---")}), 1, name)

    def test_each_peer_of_the_plot_is_in_the_tables(self):
        plotted = {name for _, bars in publish.PANELS for name, _ in bars}
        self.assertEqual(plotted - set(tables.names()), set())

    def test_document_has_the_marks_and_only_what_is_between_changes(self):
        document = publish.DOCUMENT.read_text(encoding="utf-8")
        for name in [*tables.comparison({"rows": []}), "steps"]:
            begin, end = tables.marks(name)
            changed = tables.written(document, {name: "| new |\n"})
            self.assertIn(begin + "| new |\n" + end, changed)
            old = document.split(begin)[1].split(end)[0]
            self.assertEqual(tables.written(changed, {name: old}), document)

    def test_document_is_what_its_data_say(self):
        document = publish.DOCUMENT.read_text(encoding="utf-8")
        for file, made in ((publish.JSON, tables.comparison), (publish.STEPS_JSON, tables.steps)):
            self.assertEqual(tables.written(document, made(json.loads(file.read_text(encoding="utf-8")))), document)
        result = json.loads(publish.JSON.read_text(encoding="utf-8"))
        self.assertEqual(publish.svg(result), publish.SVG.read_text(encoding="utf-8"))


class JsonTest(unittest.TestCase):
    def test_text_is_the_result_with_a_line_for_each_row(self):
        result = {"date": "x", "rows": [row("a", 1), row("b", 2)], "earlier": {"apart": {"date": "y", "rows": [row("a", 3)]}}}
        written = publish.text(result)
        self.assertEqual(json.loads(written), result)
        self.assertEqual(sum(line.startswith('{"name"') for line in written.splitlines()), 3)


class CommitTest(unittest.TestCase):
    def test_changes_of_tracked_files_are_recorded(self):
        with tempfile.TemporaryDirectory() as directory:
            git = ["git", "-C", directory, "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgSign=false"]
            file = Path(directory, "file")
            file.write_text("1", encoding="utf-8")
            for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "test"]):
                subprocess.run(git + arguments, check=True)
            Path(directory, "untracked").touch()
            clean = publish.commit(directory)
            self.assertRegex(clean, "^[0-9a-f]{8,}$")
            file.write_text("23", encoding="utf-8")
            self.assertEqual(publish.commit(directory), f"{clean}+changes")


class EarlierTest(unittest.TestCase):
    NEAR, APART = row("a", 100), row("a", 500, 480.0)

    def run_of(self, date, *rows):
        return {"date": date, "commit": "c", "machine": "m", "load": [0], "rows": list(rows)}

    def test_place_that_was_not_measured_shows_the_last_run_there_with_its_date(self):
        first = self.run_of("2026-01-01", self.NEAR, self.APART)
        second = tables.with_earlier(self.run_of("2026-02-02", self.NEAR), first)
        third = tables.with_earlier(self.run_of("2026-03-03", self.NEAR), second)
        for result in (second, third):
            found, heads = tables.shown(result)
            self.assertEqual(heads, {"near": "near", "apart": "apart (2026-01-01)"})
            self.assertEqual(found["a", "apart"]["p50"], 500)
            self.assertEqual(result["earlier"]["apart"]["rows"], [self.APART])

    def test_place_that_was_measured_replaces_the_earlier_run(self):
        first = self.run_of("2026-01-01", self.APART)
        second = tables.with_earlier(self.run_of("2026-02-02", row("a", 600, 480.0)), first)
        self.assertEqual((second["earlier"], tables.shown(second)[1]), ({}, {"apart": "apart"}))

    def test_few_rows_at_a_place_do_not_count(self):
        others = [row("a", 100)] * 3
        run = tables.with_earlier(self.run_of("2026-02-02", *others, self.APART), self.run_of("2026-01-01", self.APART))
        self.assertEqual(tables.shown(run)[1], {"near": "near", "apart": "apart (2026-01-01)"})


if __name__ == "__main__":
    unittest.main()
