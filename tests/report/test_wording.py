"""Numbers and names as a reader sees them."""

from __future__ import annotations

import math

import pytest

from lightning_mp.report.page import wording

MINUS = wording.MINUS


@pytest.mark.parametrize(
    ("value", "text"),
    [(52345.4, "52,345"), (191.849, "191.8"), (0.012346, "0.01235"), (0, "0"), (-2.5, f"{MINUS}2.500"), (1.5e30, "1.500e+30")],
)
def test_numbers_have_four_significant_digits(value, text):
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.06, "+0.0600"), (-0.06, f"{MINUS}0.0600"), (-0.00001, "+0.0000"), (12.34, "+12.3"), (1e30, "+1.00e+30")],
)
def test_differences_have_a_sign_and_zero_is_not_negative(value, text):
    assert wording.signed(value) == text


@pytest.mark.parametrize("form", [wording.number, wording.signed, wording.percent, wording.memory])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_unknown(form, value):
    assert form(value) == "n/a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (1.0, "100%"),
        (0.621, "62.1%"),
        (0.00012, "0.012%"),
        (1e-9, "1e-07%"),
        (0.999, "99.9%"),
        (0.99971, "99.971%"),
        (0.999988, "99.9988%"),
        (1.25, "125.0%"),
    ],
)
def test_only_nothing_is_0_percent_and_only_all_is_100(value, text):
    assert wording.percent(value) == text


def test_ratios_need_two_numbers_and_a_base_that_is_not_zero():
    assert wording.ratio(3.0, 4.0) == "0.75x"
    assert wording.ratio(500.0, 1.0) == "500x"
    assert [wording.ratio(*pair) for pair in ((1.0, 0.0), (None, 1.0), (1.0, math.nan))] == [None, None, None]


@pytest.mark.parametrize(("gib", "text"), [(1.25, "1.25 GiB"), (0.0703125, "72.0 MiB"), (2**-20, "1.00 KiB"), (0.0, "0 KiB")])
def test_memory_has_the_unit_that_suits_it(gib, text):
    assert wording.memory(gib) == text


def test_long_lists_say_how_many_are_left_out():
    assert wording.listed(["a"]) == "a"
    assert wording.listed(list("abcd")) == "a, b, c and d"
    assert wording.listed(list("abcdef")) == "a, b, c and 3 more"
    assert wording.each(["a", "b"], ["1", "2"], [None, "2.00x"]) == "a 1, b 2 (2.00x)"
    assert wording.each(list("abc"), list("123"), most=2) == "a 1, b 2, and 1 more in the table"


def test_a_long_name_keeps_its_end_and_its_length_is_bounded():
    short = wording.shortened("run\n" + "x" * 100 + "-seed-17", 24)
    assert len(short) == 24
    assert short.startswith("run x")
    assert short.endswith("seed-17")
