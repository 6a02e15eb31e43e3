#!/usr/bin/env python3
"""Tests of the arithmetic of publish.py and compare_commits.py. They measure nothing."""

import random
import unittest

import compare_commits
import measure
import publish


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


class PictureTest(unittest.TestCase):
    def test_each_measured_row_is_a_bar(self):
        names = [name for _, bars in publish.PANELS for name, _ in bars]
        rows = [row(name, 100) for name in names] + [row(names[0], 480, 480.0)]
        picture = publish.svg({"rows": rows})
        self.assertEqual(picture.count("<rect"), len(names) + 1)
        self.assertEqual(publish.svg({"rows": rows[:1]}).count("<rect"), 1)


class StepsTest(unittest.TestCase):
    def test_each_step_has_its_numbers_where_it_was_measured(self):
        table = publish.steps({"rows": [row("inline-rtt", 145), row("inline-oneway", 16), row("inline-rtt", 540, 480.0)]})
        line = next(line for line in table.splitlines() if "in the ring: slots" in line)
        self.assertTrue(line.endswith("| 145 | 16 | 540 |  |"), line)
        self.assertEqual(len(table.splitlines()), len(publish.STEPS) + 2)

    def test_document_has_the_marks_and_only_what_is_between_changes(self):
        document = publish.DOCUMENT.read_text(encoding="utf-8")
        changed = publish.with_steps(document, "| new |\n")
        self.assertIn(publish.BEGIN + "| new |\n" + publish.END, changed)
        old = document.split(publish.BEGIN)[1].split(publish.END)[0]
        self.assertEqual(publish.with_steps(changed, old), document)
        self.assertEqual(len(old.splitlines()), len(publish.STEPS) + 2)


if __name__ == "__main__":
    unittest.main()
