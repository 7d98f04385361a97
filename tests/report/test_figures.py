"""The pictures of the report: what they show, what they say, and what they are made of."""

from __future__ import annotations

import io
import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from lightning_mp.report.page import drawing, figures, figures_loss, figures_range
from lightning_mp.report.page.drawing import NARROW, POINTS, WIDE, Look, Missing, Picture, styles, thin
from lightning_mp.report.page.images import to_png, to_svg
from lightning_mp.report.page.palette import DARK, LIGHT
from lightning_mp.report.story import Exponents, RunStory, Series, Story
from tests.report import story_examples as examples

STORIES = {name: getattr(examples, name)() for name in ("story", "twelve_runs", "hostile_numbers")}
NAMESPACE = "http://www.w3.org/2000/svg"
TEXT_ROLES = ("ink", "muted", "good", "bad", "unsure", "neutral", "better")


def drawn(story: Story) -> list[Picture]:
    return [picture for picture in figures.pictures(story) if isinstance(picture, Picture)]


def picture(story: Story, key: str) -> Picture:
    return next(one for one in drawn(story) if one.key == key)


def tags(svg: str) -> list[str]:
    return re.findall(r"<[^>]+>", svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{{{NAMESPACE}}}text")]


# --- thinning -----------------------------------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_extremes_and_its_order():
    y = np.random.default_rng(0).normal(size=100_000)
    y[[777, 54_321]] = 50, -50
    xs, ys = thin(Series(list(range(len(y))), y.tolist()))
    assert len(xs) <= POINTS
    assert (np.diff(xs) > 0).all()
    assert {(777, 50), (54_321, -50)} <= set(zip(xs.tolist(), ys.tolist(), strict=True))
    assert (y[xs.astype(int)] == ys).all()


def test_a_short_curve_is_not_thinned():
    xs, ys = thin(Series([1, 2, 3], [5.0, 4.0, 3.0]))
    assert (xs.tolist(), ys.tolist()) == ([1, 2, 3], [5, 4, 3])


def test_a_gap_stays_a_gap_when_a_curve_is_thinned():
    y = [1.0] * 5000 + [math.nan] * 5000 + [math.inf] * 5000 + [2.0] * 5000
    xs, ys = thin(Series(list(range(20_000)), y))
    assert np.isnan(ys[(xs > 5100) & (xs < 14_900)]).all()
    assert np.isfinite(ys[(xs < 4900) | (xs > 15_100)]).all()


def test_points_without_a_place_are_left_out():
    assert thin(Series([1, math.nan, 3], [1.0, 2.0, 3.0]))[0].tolist() == [1, 3]


# --- what the pictures say ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_every_picture_has_its_finding_with_numbers_and_a_whole_table(name):
    pictures = drawn(STORIES[name])
    assert len({one.key for one in pictures}) == len(pictures)
    for one in pictures:
        assert re.search(r"\d", one.finding), one.key
        assert one.table.rows, one.key
        assert {len(row) for row in one.table.rows} == {len(one.table.columns)}, one.key


def test_the_gap_and_its_interval_are_told_and_split_by_the_margin():
    one = picture(STORIES["story"], "verdicts")
    assert one.finding.startswith("Beyond the margin: bf16-true +0.1899. Within the margin: bf16-mixed")
    assert ("bf16-true", "DIVERGED", "+0.1899", "+0.1858 to +0.1940", "0.0128") in one.table.rows


def test_the_alarm_is_told_with_its_place_and_drawn_once_in_each_panel():
    one = picture(STORIES["story"], "loss")
    assert "Alarm: bf16-true at 230k tokens, with a gap of +0.0541." in one.finding
    with matplotlib.rc_context():
        figure = one.draw(Look(WIDE, LIGHT))
    lines = [line for axes in figure.axes for line in axes.lines if line.get_color() == LIGHT["bad"]]
    assert sum(list(line.get_xdata()) == [230_400.0, 230_400.0] for line in lines) == 2
    assert [list(line.get_ydata()) for line in lines if line.get_marker() == "o"] == [[STORIES["story"].runs[2].blocks[9].gap]]


def test_a_loss_that_is_no_longer_finite_is_told_and_marked():
    one = picture(STORIES["twelve_runs"], "loss")
    assert "not a number is not finite after 1.08M tokens." in one.finding  # step 700
    figure = one.draw(Look(WIDE, LIGHT))
    assert [float(line.get_xdata()[0]) for line in figure.axes[0].lines if line.get_marker() == "x"] == [700 * 1536]


def test_the_reference_is_drawn_with_the_means_that_the_others_were_judged_against():
    story = STORIES["story"]
    figure = picture(story, "loss").draw(Look(WIDE, LIGHT))
    baseline = [block.baseline for block in story.runs[1].blocks]
    assert any(list(line.get_ydata()) == baseline for line in figure.axes[0].lines)


def test_without_a_reference_among_the_runs_the_baseline_is_drawn_and_named():
    story = replace(STORIES["story"], reference=None, runs=STORIES["story"].runs[1:])
    one = picture(story, "loss")
    assert [style.name for style in one.legend][-1] == "the baseline"
    baseline = [block.baseline for block in story.runs[0].blocks]
    assert any(list(line.get_ydata()) == baseline for line in one.draw(Look(WIDE, LIGHT)).axes[0].lines)


def test_the_band_of_curves_is_the_lowest_and_highest_mean_of_the_seeds():
    low, high = Series(list(range(1, 121)), [2.0] * 120), Series(list(range(1, 121)), [3.0] * 60 + [1.0] * 60)
    story = examples.story_of(RunStory("run", "32-true", loss=low), baseline_curves=[low, high])
    x, lowest, highest = figures_loss._band(story)
    assert (x[0], x[-1]) == (2, 120)
    assert (lowest[:30] == 2).all()
    assert (highest[:30] == 3).all()
    assert (lowest[30:] == 1).all()
    assert (highest[30:] == 2).all()


def test_the_band_of_blocks_is_drawn_in_both_panels():
    story = STORIES["story"]
    axes = picture(story, "loss").draw(Look(WIDE, LIGHT)).axes
    block = story.runs[1].blocks[50]
    for panel, middle, place in ((axes[0], block.baseline, block.end - 15 * 1536 / 2), (axes[1], 0.0, block.end)):
        (band,) = (area for area in panel.collections if to_hex(area.get_facecolor()[0]) == LIGHT["band"])
        corners = band.get_paths()[0].vertices
        heights = corners[np.isclose(corners[:, 0], place), 1]
        assert [heights.min(), heights.max()] == pytest.approx([middle - 0.04, middle + 0.04])


def test_one_seed_has_no_band():
    story = examples.story_of(RunStory("run", "32-true"), baseline_curves=[Series([1, 2], [2.0, 2.0])])
    assert figures_loss._band(story) is None


def test_the_peak_of_a_process_does_not_press_the_parts_of_memory_flat():
    small = RunStory("a", "32-true", memory_gib={"weights": 0.1}, peak_gib=0.2)
    assert "upright mark" in picture(examples.story_of(small), "memory").reading
    assert "upright mark" not in picture(examples.story_of(replace(small, peak_gib=0.6)), "memory").reading


def test_memory_is_stacked_to_its_sum_and_compared_with_the_reference():
    story = STORIES["story"]
    one = picture(story, "memory")
    figure = one.draw(Look(WIDE, LIGHT))
    ends = [
        bar.get_x() + bar.get_width() for bar in figure.axes[0].patches if round(bar.get_y() + bar.get_height() / 2, 6) == 3.5
    ]
    assert max(ends) == pytest.approx(1024 * sum(story.runs[3].memory_gib.values()))
    assert "bf16-master 56.6 MiB (0.78x)" in one.finding
    assert "bf16-master 14.00" in one.finding


def test_parts_of_memory_that_have_no_name_of_ours_are_stacked_too():
    run = RunStory("a", "32-true", memory_gib={"caches": 0.5, "weights": 1.0})
    assert [style.name for style in picture(examples.story_of(run), "memory").legend] == ["weights", "caches"]


def test_steps_that_were_skipped_are_marked_at_the_scale_that_overflowed():
    one = picture(STORIES["story"], "loss-scale")
    assert "from 2^14 to 2^16, at the end 2^15; 4 skipped steps (step 3, 5, 622 and 1,105)." in one.finding
    axes = one.draw(Look(WIDE, LIGHT)).axes[0]
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    assert list(crosses.get_xdata()) == [3, 5, 622, 1105]
    assert list(crosses.get_ydata()) == [16, 15, 15, 15]


def test_a_loss_scale_may_be_known_by_its_changes_alone():
    dense = STORIES["story"].runs[4]
    sparse = replace(dense, loss_scale=Series([1, 4, 6, 1500], [16.0, 15.0, 14.0, 14.0]), skipped_steps=[3, 5, 1499])
    axes = picture(examples.story_of(sparse), "loss-scale").draw(Look(WIDE, LIGHT)).axes[0]
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    assert list(crosses.get_ydata()) == [16, 15, 14]


@pytest.mark.parametrize(
    ("precision", "scale", "shares"),
    [
        # bins of one power of two from 2^-26 on, 1 element each; fp16 is subnormal from 2^-24 to 2^-14, normal below 2^16
        ("16-master", 1.0, {"zero": 2, "subnormal": 10, "normal": 30, "over": 3}),
        ("16-mixed", 4.0, {"zero": 0, "subnormal": 10, "normal": 30, "over": 5}),
        ("bf16-master", 1.0, {"zero": 0, "subnormal": 0, "normal": 45, "over": 0}),
        ("32-true", 1.0, {"zero": 0, "subnormal": 0, "normal": 45, "over": 0}),
    ],
)
def test_elements_are_counted_against_the_limits_of_the_format(precision, scale, shares):
    run = RunStory("a", precision, exponents=Exponents(list(range(-26, 20)), [1.0] * 45, scale=scale))
    assert figures_range._range_shares(run) == {key: count / 45 for key, count in shares.items()}


def test_elements_that_were_flushed_belong_to_those_that_are_zero():
    run = RunStory("a", "16-master", exponents=Exponents([0, 1], [3.0], flushed=1.0))
    assert figures_range._range_shares(run) == {"zero": 0.25, "subnormal": 0.0, "normal": 0.75, "over": 0.0}


def test_the_limits_of_fp16_are_drawn_and_those_of_bf16_are_said_to_be_far_away():
    run = RunStory("a", "16-master", exponents=examples.exponents(-19))
    svg = to_svg(picture(examples.story_of(run), "gradients"))
    assert {"subnormal 2^-24", "normal 2^-14", "largest 65,504"} <= set(texts(svg))
    svg = to_svg(picture(examples.story_of(replace(run, precision="bf16-true")), "gradients"))
    assert {"\u2190 smallest normal 2^-126", "largest 2^128 \u2192"} <= set(texts(svg))


def test_a_story_without_data_has_no_picture_and_a_sentence_for_each():
    made = figures.pictures(examples.story_of(RunStory("a", "32-true")))
    assert all(isinstance(one, Missing) for one in made)
    assert all(one.sentence.endswith(".") for one in made)
    assert any("No run used a loss scale" in one.sentence for one in made)
    (missing,) = (one for one in figures.pictures(examples.story_of(RunStory("a", "16-mixed"))) if one.title == "Loss scale")
    assert "LossScaleMonitor" in missing.sentence


# --- who is who ---------------------------------------------------------------------------------------------------------------


def test_a_precision_has_its_colour_in_every_story_and_each_run_a_marker_of_its_own():
    runs = [
        RunStory(f"run {n}", precision) for n, precision in enumerate(["bf16-master", "16-mixed", "bf16-master", "32-true"])
    ]
    one, other = styles(examples.story_of(*runs)), styles(examples.story_of(*reversed(runs)))
    assert one[0].accent == one[2].accent == other[1].accent == other[3].accent
    assert len({style.accent for style in one}) == 3
    assert len({style.marker for style in one}) == 4


def test_runs_of_unknown_precision_have_colours_of_their_own():
    runs = [RunStory("a", "unknown"), RunStory("b", "unknown"), RunStory("32-true", "unknown"), RunStory("c", "32-true")]
    found = styles(examples.story_of(*runs))
    assert len({style.accent for style in found}) == 4
    assert found[3].accent == styles(examples.story_of(RunStory("d", "32-true")))[0].accent


def test_twelve_runs_can_be_told_apart_without_colours():
    assert len({style.marker for style in styles(STORIES["twelve_runs"])}) == 12


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_contrast_is_as_defined():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_have_enough_contrast(palette):
    for role, ground in itertools.product(TEXT_ROLES, ("paper", "panel")):
        assert contrast(palette[role], palette[ground]) >= 4.5, (role, ground)
    for role in palette:
        if role.startswith("part-"):
            assert contrast(palette["ink"], palette[role]) >= 4.5, role
        if role.startswith("accent-"):
            assert contrast(palette[role], palette["paper"]) >= 3, role
            assert contrast(palette[role], palette["margin"]) >= 3, role


def test_both_palettes_have_the_same_roles():
    assert list(LIGHT) == list(DARK)


# --- SVG and PNG --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_svg_has_colours_by_role_text_as_text_and_references_that_resolve(width):
    ids: list[str] = []
    for one in drawn(STORIES["story"]):
        svg = to_svg(one, width)
        assert not re.search(
            r"#[0-9a-fA-F]{6}\b|rgb\(|font-family|<style|<!DOCTYPE|<script|http", "".join(tags(svg)).replace(NAMESPACE, "")
        )
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= set(LIGHT)
        own = re.findall(r' id="([^"]+)"', svg)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) == set(own)
        assert all(text.strip() for text in texts(svg))
        ids += own
    assert len(set(ids)) == len(ids)


def test_text_is_not_below_eleven_pixels_on_a_phone():
    for one in drawn(STORIES["twelve_runs"]):
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", to_svg(one, NARROW))]
        assert sizes, one.key
        assert min(sizes) >= 11, one.key


def test_numbers_in_the_text_of_a_picture_keep_their_digits():
    assert "+0.1899" in texts(to_svg(picture(STORIES["story"], "verdicts")))


@pytest.mark.parametrize(
    "name",
    ["#00fe01", ' id="a"', "url(#a)", "1.23456789", "</text><script>", "$x^2$", "\\frac", "\u6f22\u5b57", "a\x00\x1b\ud800b"],
)
def test_a_name_may_look_like_anything(name):
    run = RunStory(name, "bf16-true", updates_lost_fraction=0.5)
    svg = to_svg(picture(examples.story_of(run), "updates-lost"))
    assert "<script" not in svg
    assert "".join(letter if letter.isprintable() else "\ufffd" for letter in name.strip()) in texts(svg)
    assert to_png(picture(examples.story_of(run), "updates-lost"))


def test_the_same_picture_is_the_same_bytes_whatever_the_readers_settings_are():
    one = picture(STORIES["story"], "step-times")
    before = to_svg(one)
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert to_svg(one) == before
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("dark", [False, True])
def test_png_is_light_or_dark(dark):
    pixels = imread(io.BytesIO(to_png(picture(STORIES["story"], "loss"), dark=dark)))
    paper = (DARK if dark else LIGHT)["paper"]
    assert [round(255 * float(part)) for part in pixels[0, 0, :3]] == [int(paper[i : i + 2], 16) for i in (1, 3, 5)]
    assert pixels.shape[1] > 1800


def test_png_names_the_runs():
    one = picture(STORIES["story"], "loss")
    assert not one.draw(Look(WIDE, LIGHT)).legends
    (legend,) = one.draw(Look(WIDE, LIGHT, has_legend=True)).legends
    assert [text.get_text() for text in legend.get_texts()] == [run.name for run in STORIES["story"].runs]


def test_a_name_that_is_not_shown_whole_fits_its_place():
    style = drawing.Style("x" * 500, "accent-1", "o")
    assert len(style.label) == 64


def test_runs_whose_lost_updates_were_not_measured_are_named():
    one = picture(STORIES["story"], "updates-lost")
    assert one.finding.endswith(" Not measured: bf16-true.")
    assert "Not measured" not in picture(examples.story_of(examples.run("a", "bf16-master")), "updates-lost").finding


def test_no_picture_touches_the_state_of_pyplot():
    code = (
        "import sys; from tests.report import story_examples as e; from lightning_mp.report.page import figures as f;"
        "[(f.to_svg(p), f.to_png(p)) for p in f.pictures(e.hostile_numbers()) if isinstance(p, f.Picture)];"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "False", done.stderr
