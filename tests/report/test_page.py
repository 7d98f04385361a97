"""The report page: what is on it, in which order, and that nothing in it comes from elsewhere."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from lightning_mp.report.page import render as page
from lightning_mp.report.story import RunStory, Series, Story
from tests.report import story_examples as examples

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Parsed(HTMLParser):
    """A page as a flat list of elements, each with its attributes and the text in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.texts: list[str] = []
        self.mistakes: list[str] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)
        self.close()
        self.mistakes += [f"<{tag}> is not closed" for tag, _, _ in self._open]

    def handle_starttag(self, tag, attributes):
        element = (tag, dict(attributes), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        if not self._open or self._open.pop()[0] != tag:
            self.mistakes.append(f"</{tag}> closes something else")

    def handle_data(self, data):
        for _, _, texts in self._open:
            texts.append(data)

    def all(self, *tags: str) -> list[tuple[str, dict[str, str | None], list[str]]]:
        return [element for element in self.elements if element[0] in tags]

    def text(self, element) -> str:
        return " ".join("".join(element[2]).split())

    def by_class(self, name: str) -> list[tuple[str, dict[str, str | None], list[str]]]:
        return [element for element in self.elements if name in (element[1].get("class") or "").split()]


@functools.cache
def rendered(name: str) -> str:
    return page.render(getattr(examples, name)())


@pytest.fixture
def html() -> str:
    return rendered("story")


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed(rendered("story"))


@pytest.fixture
def many() -> str:
    return rendered("twelve_runs")


# --- what it says -------------------------------------------------------------------------------------------------------------


def test_the_sections_stand_in_order_with_the_verdict_first(parsed):
    sections = [attributes["id"] for _, attributes, _ in parsed.all("section")]
    assert sections == [
        *("verdict", "numbers", "loss", "memory", "step-times", "throughput", "loss-scale", "gradients", "updates-lost", "what")
    ]
    links = [attributes["href"] for _, attributes, _ in parsed.all("a")]
    assert links == ["#verdict", *(f"#{section}" for section in sections)]


def test_the_headline_tells_the_verdicts_in_words_with_the_worst_first(parsed):
    (headline,) = parsed.by_class("headline")
    assert parsed.text(headline) == "bf16-true diverged from 32-true. bf16-mixed, bf16-master and 16-master match 32-true."


def test_each_candidate_has_a_card_with_its_verdict_and_the_numbers_behind_it(parsed):
    cards = [parsed.text(card) for card in parsed.by_class("card")]
    assert len(cards) == 4
    assert cards[0] == (
        f"bf16-true DIVERGED {examples.DIVERGED} gap+0.1899 natsinterval+0.1858 to +0.1940margin0.0128smallest visible0.0210"
        "comparedpaired: same weights, same datacoverage100% of the baselinealarmat 230k tokens, step 150"
    )
    assert all("MATCHES" in card and "alarmnone" in card for card in cards[1:])


def test_the_four_numbers_have_their_ratio_to_the_reference():
    reference = RunStory("fp32", "32-true", peak_gib=2.0, tokens_per_s=100.0, step_time_ms=40.0, tail_loss=2.5)
    run = RunStory("half", "bf16-true", peak_gib=1.5, tokens_per_s=130.0, step_time_ms=30.0, tail_loss=2.625)
    parsed = Parsed(page.render(examples.story_of(reference, run, reference="fp32")))
    rows = [
        [parsed.text(cell) for cell in parsed.all("td") if cell[1].get("data-label")][start : start + 4] for start in (0, 4)
    ]
    assert rows[0] == ["2.00 GiB", "100.0", "40.00 ms", "reference"]
    assert rows[1] == ["1.50 GiB0.75x", "130.01.30x", "30.00 ms0.75x", "+0.1250of tail losses"]


def test_without_a_reference_there_are_no_ratios():
    run = RunStory("half", "bf16-true", peak_gib=1.5, tokens_per_s=130.0, step_time_ms=30.0)
    assert not re.search(r"\d\.\d\dx", page.render(examples.story_of(run)))


@pytest.mark.parametrize(
    ("runs", "reference", "headline"),
    [
        ([], None, "There are no runs in this report."),
        ([RunStory("a", "32-true")], "a", "a is the only run, so there is nothing to compare it with."),
        ([RunStory("a", "32-true")], None, "a was not judged."),
        ([RunStory("a", "32", status="failed", error="no"), RunStory("b", "bf16-true")], "a", "a failed. b was not judged."),
        ([RunStory(name, "32-true", status="interrupted") for name in "ab"], None, "a and b did not finish."),
        ([RunStory("{a}", "32-true", status="non-finite")], None, "{a} had a loss that is not finite."),
    ],
)  # fmt: skip
def test_few_runs_and_runs_that_failed_are_said_to_be_so(runs, reference, headline):
    parsed = Parsed(page.render(examples.story_of(*runs, reference=reference)))
    assert parsed.text(parsed.by_class("headline")[0]) == headline
    assert parsed.mistakes == []


def test_every_outcome_is_told_with_a_word_and_a_shape(many):
    parsed = Parsed(many)
    statuses = [parsed.text(status) for status in parsed.by_class("status")]
    assert statuses == [
        *("DIVERGED", "DIVERGED", "DIVERGED", "NON-FINITE", "FAILED", "NOT COMPARABLE", "INCONCLUSIVE"),
        *("NOT JUDGED", "NOT JUDGED", "BETTER", "MATCHES"),
    ]
    shapes = dict(re.findall(r'<p class="status (\w+)"><svg[^>]*><use href="#icon-(\w+)"', many))
    assert shapes == {tone: tone for tone in ("bad", "neutral", "unsure", "better", "good")}


def test_what_differs_between_runs_is_told_by_run_and_what_does_not_once(parsed):
    (settings,) = parsed.by_class("settings")
    assert "optimizerAdamW, lr 1e-4" in parsed.text(settings)
    assert "torch2.13.0+cpu" in parsed.text(settings)
    (table,) = parsed.by_class("words")
    assert parsed.text(table).startswith("What differs between the runs runprecision 32-true32-true bf16-mixedbf16-mixed")


def test_the_command_stands_on_the_page_or_is_said_to_be_unknown(parsed):
    assert [parsed.text(code) for code in parsed.all("code")] == [examples.story().command]
    assert "is not known" in page.render(examples.two_runs())


def test_a_note_that_holds_for_several_runs_stands_once():
    runs = [RunStory(name, "32-true", notes=["It was cold."]) for name in "abc"]
    parsed = Parsed(page.render(examples.story_of(*runs)))
    assert parsed.text(parsed.by_class("notes")[0]) == "a, b and c: It was cold."


def test_what_is_missing_is_told_with_how_to_get_it():
    parsed = Parsed(page.render(examples.story_of(RunStory("a", "bf16-true"))))
    assert [attributes["id"] for _, attributes, _ in parsed.all("section")] == ["verdict", "numbers", "missing", "what"]
    text = parsed.text(parsed.by_class("missing")[0])
    for word in ("DivergenceMonitor", "BaselineRecorder", "MemoryMonitor", "SpeedMonitor", "GradientRangeMonitor"):
        assert word in text


def test_thinning_is_said_where_a_curve_was_thinned(html):
    assert "thinned to 600 points" in html
    short = RunStory("a", "32-true", loss=Series([1, 2], [3.0, 2.0]))
    assert "thinned" not in page.render(examples.story_of(short))


# --- what it is made of -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["story", "twelve_runs", "hostile_numbers"])
def test_the_markup_is_sound(name):
    parsed = Parsed(rendered(name))
    assert parsed.mistakes == []
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes, _ in parsed.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key) is None or attributes[key] in ids
        if tag in ("a", "use"):
            assert attributes["href"][1:] in ids
    levels = [int(tag[1]) for tag, _, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_it_can_be_used_with_a_screen_reader_and_a_keyboard(parsed):
    assert {"header", "main", "nav", "footer"} <= {tag for tag, _, _ in parsed.elements}
    assert parsed.all("html")[0][1]["lang"] == "en"
    assert parsed.all("a")[0][1] == {"class": "skip", "href": "#verdict"}
    assert len(parsed.all("caption")) == len(parsed.all("table")) > 8
    assert all(attributes.get("scope") in ("col", "row") for _, attributes, _ in parsed.all("th"))
    for _, attributes, _ in parsed.by_class("scroll"):
        assert attributes["tabindex"] == "0"
        assert attributes["role"] == "region"
        assert attributes.get("aria-label") or attributes.get("aria-labelledby")
    pictures = [attributes for _, attributes, _ in parsed.all("svg") if attributes.get("role") == "img"]
    assert len(pictures) == 2 * len(parsed.all("figure")) == 2 * len(parsed.all("details"))
    assert all(attributes["aria-labelledby"] and attributes["aria-describedby"] for attributes in pictures)
    others = [attributes for _, attributes, _ in parsed.all("svg") if attributes.get("role") != "img"]
    assert all(attributes["aria-hidden"] == "true" for attributes in others)


@pytest.mark.parametrize("name", ["story", "twelve_runs"])
def test_nothing_comes_from_elsewhere(name):
    parsed = Parsed(rendered(name))
    assert not parsed.all("script", "img", "iframe", "object", "embed", "base", "form")
    for tag, attributes, _ in parsed.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert value.startswith("#") or (tag, value) == ("link", "data:,")
    (style,) = parsed.all("style")
    assert not re.search(r"@import|url\(|https?:", parsed.text(style))
    assert "http" not in re.sub(r'xmlns="http://www.w3.org/2000/svg"|http-equiv', "", rendered(name))


def test_names_and_texts_are_escaped_wherever_they_stand(many):
    parsed = Parsed(many)
    assert not parsed.all("script", "img")
    assert many.count(examples.HOSTILE) == 0
    assert examples.HOSTILE in "".join(parsed.by_class("card")[4][2])  # the error of the failed run
    assert [parsed.text(title) for title in parsed.all("title")] == ["A comparison"]


def test_markup_in_every_field_stays_text():
    bad = "<b id=bad>&lt;"
    run = RunStory(
        bad, bad, error=bad, status="failed", peak_gib=1.0, peak_label=bad, memory_gib={bad: 1.0}, device=bad,
        what={bad: bad}, versions={bad + "2": bad}, notes=[bad], loss=Series([1], [2.0]),
    )  # fmt: skip
    found = examples.blocks(examples.curve(), examples.curve())
    judged = replace(run, name=bad + "2", blocks=found, verdict=examples.verdict("MATCHES", found, bad))
    html = page.render(Story(bad, bad, bad, "tokens", bad, [run, judged]))
    parsed = Parsed(html)
    assert not parsed.all("b")
    assert "bad" not in [attributes.get("id") for _, attributes, _ in parsed.elements]
    assert parsed.mistakes == []


def test_both_themes_and_paper_have_every_colour_that_is_used(html):
    used = set(re.findall(r"var\(--([\w-]+)\)", html)) - {"sans", "mono"}
    sheets = re.findall(r":root \{ (--paper[^}]*)\}", html)
    assert len(sheets) == 3
    for sheet in sheets:
        assert used <= set(re.findall(r"--([\w-]+):", sheet))
    assert sheets[0] == sheets[2] != sheets[1]


def test_twelve_runs_are_less_than_a_megabyte(many):
    assert len(many.encode()) < 1_000_000


def test_hundreds_of_thousands_of_points_a_run_are_less_than_a_megabyte():
    count = 300_000
    loss = np.random.default_rng(0).normal(3, 0.1, count)
    loss[123_456] = 9.875
    series = Series(range(count), loss)
    runs = [
        RunStory(
            name, precision, loss=series, step_times_ms=loss, tokens_per_s_series=series, loss_scale=series,
            skipped_steps=range(0, count, 7), skipped_count=42_858,
        )
        for name, precision in (("a", "32-true"), ("b", "16-master"))
    ]  # fmt: skip
    html = page.render(examples.story_of(*runs, reference="a"))
    assert len(html.encode()) < 1_000_000
    assert "9.88" in html  # the longest step


def test_numbers_that_are_not_never_reach_the_page():
    parsed = Parsed(rendered("hostile_numbers"))
    for text in parsed.all("td", "dd", "p", "text", "figcaption"):
        assert not re.search(r"\b(nan|inf|None)\b", parsed.text(text)), parsed.text(text)


def test_a_table_behind_a_curve_of_many_points_is_short_and_reaches_from_end_to_end():
    count = 10_000
    run = RunStory(
        "a", "32-true", loss=Series(list(range(1, count + 1)), [math.log(count / step) for step in range(1, count + 1)])
    )
    parsed = Parsed(page.render(examples.story_of(run)))
    rows = [parsed.text(row) for row in parsed.all("tr")]
    assert rows[-50].split()[0].startswith("1" + "9.2")
    assert rows[-1] == "10,0000"


# --- the file -----------------------------------------------------------------------------------------------------------------


def test_the_file_is_the_page_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "reports" / "report.html"
    page.write(path, examples.story_of(RunStory("first", "32-true")))
    page.write(path, examples.story_of(RunStory("second", "32-true")))
    assert path.read_text(encoding="utf-8") == page.render(examples.story_of(RunStory("second", "32-true")))
    assert [other.name for other in path.parent.iterdir()] == ["report.html"]


def test_a_name_that_utf8_cannot_hold_can_be_written(tmp_path):
    page.write(tmp_path / "report.html", examples.story_of(RunStory("broken-\udcff", "32-true", updates_lost_fraction=0.1)))
    assert "broken-" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_that_were_judged_by_something_else_are_not_said_to_match_the_reference():
    story = examples.on_a_cpu()
    text = page.render(story)
    assert "32-true matches the baseline." in text
    assert "bf16-mixed and bf16-master cannot be compared with the baseline." in text
    assert "gap to the baseline" in text
    assert str(story.judged_by) in text
    assert "bf16-mixed and bf16-master cannot be compared with 32-true." in page.render(replace(story, judged_by=None))


def test_the_only_run_can_be_judged_by_something_else():
    (alone, *_) = examples.on_a_cpu().runs
    text = page.render(examples.story_of(alone, reference="32-true", judged_by="fp32.json"))
    assert "32-true matches the baseline." in text
    assert "nothing to compare it with" not in text


def test_a_card_says_in_a_sentence_how_a_run_ended_that_is_not_ok():
    text = page.render(examples.on_a_cpu())
    assert "The run did not finish: it was stopped." in text
    assert "The run failed: killed by SIGKILL." in text
    assert "The run had to end: the loss became nan at step 3." in text
