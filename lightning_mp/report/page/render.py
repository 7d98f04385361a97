"""The report: one HTML file that opens from disk, with the verdict first.

It needs no network, no fonts and no scripts. It is light or dark as the reader's system is, and can be read on a phone, on
paper, by keyboard, and with a screen reader: every picture has its finding in words, and the numbers behind it in a table.

What it says comes from a :class:`~lightning_mp.report.story.Story`, the pictures from
:mod:`lightning_mp.report.page.figures`, and the looks from ``page.html.j2``. Names and texts are data: they are escaped,
whatever is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from lightning_mp.files import write_text
from lightning_mp.numerics.divergence import Verdict
from lightning_mp.report.page.drawing import NARROW, WIDE, Missing, Picture, Style, Table, styles
from lightning_mp.report.page.figures import pictures
from lightning_mp.report.page.figures_loss import interval_text
from lightning_mp.report.page.images import to_svg
from lightning_mp.report.page.palette import DARK, LIGHT
from lightning_mp.report.page.wording import (
    NAME_LENGTH,
    UNKNOWN,
    compact,
    known,
    listed,
    memory,
    number,
    percent,
    ratio,
    shortened,
    signed,
)
from lightning_mp.report.story import RunStory, Story

#: Each outcome with its tone, which has a colour and a shape, and what the headline says of one run, and of several.
#: Worst first: the order of the cards.
_OUTCOMES = {
    "DIVERGED": ("bad", "diverged from {reference}.", "diverged from {reference}."),
    "NON-FINITE": ("bad", "had a loss that is not finite.", "had losses that are not finite."),
    "FAILED": ("bad", "failed.", "failed."),
    "INTERRUPTED": ("unsure", "did not finish.", "did not finish."),
    "NOT COMPARABLE": ("neutral", "cannot be compared with {reference}.", "cannot be compared with {reference}."),
    "INCONCLUSIVE": ("unsure", "is inconclusive.", "are inconclusive."),
    "NOT JUDGED": ("neutral", "was not judged.", "were not judged."),
    "BETTER": ("better", "has a lower loss than {reference}.", "have a lower loss than {reference}."),
    "MATCHES": ("good", "matches {reference}.", "match {reference}."),
}


@dataclass(frozen=True)
class _Line:
    tone: str
    text: str


@dataclass(frozen=True)
class _Card:
    style: Style
    status: str
    tone: str
    explanation: str
    error: str | None
    facts: Sequence[tuple[str, str]]
    differences: Sequence[str]


@dataclass(frozen=True)
class _Row:
    style: Style
    note: str
    cells: Sequence[tuple[str, str | None]]


@dataclass(frozen=True)
class _Numbers:
    caption: str
    columns: Sequence[str]
    rows: Sequence[_Row]


@dataclass(frozen=True)
class _Drawn:
    picture: Picture
    wide: Markup
    narrow: Markup


def render(story: Story) -> str:
    """The page, as HTML.

    Example:
        >>> from lightning_mp.report.story import RunStory, Story
        >>> runs = [RunStory("32-true", "32-true", peak_gib=2.0), RunStory("bf16-master", "bf16-master", peak_gib=1.5)]
        >>> page = render(Story("Two runs", "2026-11-29", command="", axis="tokens", reference="32-true", runs=runs))
        >>> "1.50 GiB<small>0.75x</small>" in page
        True
    """
    made = pictures(story)
    drawn = [_draw(picture) for picture in made if isinstance(picture, Picture)]
    figures = [one for one in drawn if one.picture.key != "verdicts"]
    numbers = _numbers(story)
    missing = [one for one in made if isinstance(one, Missing)]
    shared, different = _settings(story)
    keys = ["verdict", *(["numbers"] if numbers.rows else []), *(one.picture.key for one in figures)]
    keys += [*(["missing"] if missing else []), "what was run"]
    html = _template().render(
        story=story,
        headline=_headline(story),
        contents=[(key.split()[0], key.replace("-", " ").capitalize()) for key in keys],
        cards=_cards(story),
        verdicts=next((one for one in drawn if one.picture.key == "verdicts"), None),
        numbers=numbers,
        figures=figures,
        missing=missing,
        shared=shared,
        different=different,
        notes=_notes(story),
        light=LIGHT,
        dark=DARK,
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # a file's name can hold what UTF-8 cannot


def write(path: Path, story: Story) -> None:
    """Write the page atomically: a reader sees the old page or the new one, never a part."""
    write_text(path, render(story))


@cache
def _template() -> Template:
    loader = PackageLoader("lightning_mp.report.page", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.j2")


def _draw(picture: Picture) -> _Drawn:
    # safe: matplotlib has escaped the texts in it
    return _Drawn(picture, Markup(to_svg(picture, WIDE)), Markup(to_svg(picture, NARROW)))


# --- the verdict --------------------------------------------------------------------------------------------------------------


def _outcome(run: RunStory) -> str:
    """The verdict, or why there is none."""
    if run.verdict is not None:
        return run.verdict.status
    return "NOT JUDGED" if run.status == "ok" else run.status.upper()


def _headline(story: Story) -> list[_Line]:
    if not story.runs:
        return [_Line("neutral", "There are no runs in this report.")]
    reference = story.reference_run
    label = shortened(story.reference, NAME_LENGTH) if story.reference is not None and not story.judged_by else "the baseline"
    by_outcome: dict[str, list[str]] = {}
    for run in _told(story):
        by_outcome.setdefault(_outcome(run), []).append(run.name)
    lines = []
    for outcome, (tone, of_one, of_several) in _OUTCOMES.items():
        names = by_outcome.get(outcome, [])
        if names:
            said = (of_one if len(names) == 1 else of_several).format(reference=label)
            lines.append(_Line(tone, f"{listed(names)} {said}"))
    if reference is not None and not story.candidates and reference.verdict is None:
        lines.append(_Line("neutral", f"{label} is the only run, so there is nothing to compare it with."))
    return lines


def _told(story: Story) -> list[RunStory]:
    """The runs that have a card: all but a reference that is as it should be."""
    return [run for run in story.runs if run is not story.reference_run or run.status != "ok" or run.verdict is not None]


def _cards(story: Story) -> list[_Card]:
    style_of = dict(zip(map(id, story.runs), styles(story), strict=True))
    order = list(_OUTCOMES)
    runs = sorted(_told(story), key=lambda run: order.index(_outcome(run)))
    return [_card(run, style_of[id(run)], story) for run in runs]


def _card(run: RunStory, style: Style, story: Story) -> _Card:
    outcome, verdict = _outcome(run), run.verdict
    tone = _OUTCOMES[outcome][0]
    if verdict is None:
        why = "It has no verdict: it was not compared with a baseline." if run.status == "ok" else _how_it_ended(run)
        return _Card(style, outcome, tone, why, None, [], [])
    error = _how_it_ended(run) if run.status != "ok" else None
    differences = [difference.text for difference in verdict.differences]
    return _Card(style, outcome, tone, verdict.explanation, error, _facts(verdict, story.axis), differences)


def _how_it_ended(run: RunStory) -> str:
    ended = {"failed": "The run failed", "interrupted": "The run did not finish", "non-finite": "The run had to end"}[
        run.status
    ]
    return f"{ended}: {run.error or 'no reason given'}"


def _facts(verdict: Verdict, axis: str) -> list[tuple[str, str]]:
    facts = [("gap", f"{signed(verdict.gap)} nats"), ("interval", interval_text(verdict.interval))]
    facts.append(("margin", number(verdict.margin, 3)))
    facts.append(("smallest visible", number(verdict.smallest_visible_gap, 3)))
    seeds = f"{verdict.seeds} {'seed' if verdict.seeds == 1 else 'seeds'}"
    facts.append(("compared", "paired: same weights, same data" if verdict.paired else f"unpaired, with {seeds}"))
    facts.append(("coverage", f"{percent(verdict.coverage)} of the baseline"))
    alarm = verdict.alarm
    if alarm is None:
        facts.append(("alarm", "none"))
    else:
        step = f", step {alarm.step:,}" if alarm.step is not None else ""
        facts.append(("alarm", f"at {compact(alarm.position)} {axis}{step}"))
    if known(verdict.lag_explained) and verdict.lag_explained:
        facts.append(("skipped steps", f"explain {signed(verdict.lag_explained)} of the gap"))
    return [(name, fact) for name, fact in facts if not fact.startswith(UNKNOWN)]


# --- the four numbers ---------------------------------------------------------------------------------------------------------


def _numbers(story: Story) -> _Numbers:
    reference = story.reference_run
    rows = [_row(run, style, story) for run, style in zip(story.runs, styles(story), strict=True)]
    labels = {run.peak_label for run in story.runs if known(run.peak_gib)}
    peak = labels.pop() if len(labels) == 1 else "peak memory"
    base = "the baseline" if story.judged_by else shortened(story.reference or "the baseline", 24)
    columns = [peak, "tokens per second", "step time", f"gap to {base}"]
    ratios = f", each with its ratio to {reference.name}" if reference is not None else ""
    return _Numbers(f"Cost and divergence{ratios}. Step time is the median; the gap is in nats of loss.", columns, rows)


def _row(run: RunStory, style: Style, story: Story) -> _Row:
    base = story.reference_run
    against = base if base is not None and base is not run else RunStory("none", "none")
    gap: tuple[str, str]
    if run.verdict is not None:
        gap = (signed(run.verdict.gap), run.verdict.status)
    elif run is base:
        gap = ("reference", "")
    elif base is not None and known(run.tail_loss) and known(base.tail_loss):
        gap = (signed(run.tail_loss - base.tail_loss), "of tail losses")
    else:
        gap = (UNKNOWN, "")
    step_time = f"{number(run.step_time_ms)} ms" if known(run.step_time_ms) else UNKNOWN
    cells = (
        (memory(run.peak_gib), ratio(run.peak_gib, against.peak_gib)),
        (number(run.tokens_per_s), ratio(run.tokens_per_s, against.tokens_per_s)),
        (step_time, ratio(run.step_time_ms, against.step_time_ms)),
        gap,
    )
    notes = [*([run.precision] if run.precision != run.name else []), *([run.status] if run.status != "ok" else [])]
    return _Row(style, ", ".join(notes), cells)


# --- what was run -------------------------------------------------------------------------------------------------------------


def _settings(story: Story) -> tuple[list[tuple[str, str]], Table | None]:
    """What all runs have in common, and a table of what they do not."""
    by_run = [_described(run) for run in story.runs]
    names = list(dict.fromkeys(name for described in by_run for name in described))
    shared, differing = [], []
    for name in names:
        values = {described.get(name, UNKNOWN) for described in by_run}
        if len(values) == 1:
            shared.append((name, values.pop()))
        else:
            differing.append(name)
    rows = [
        [run.name, *(described.get(name, UNKNOWN) for name in differing)]
        for run, described in zip(story.runs, by_run, strict=True)
        if any(name in described for name in differing)
    ]
    return shared, Table(["run", *differing], rows) if differing else None


def _described(run: RunStory) -> Mapping[str, str]:
    device = {"device": run.device} if run.device else {}
    return {**run.what, **device, **run.versions}


def _notes(story: Story) -> list[str]:
    """Each note once, with the runs that it is of."""
    names: dict[str, list[str]] = {}
    for run in story.runs:
        for note in run.notes:
            names.setdefault(note, []).append(run.name)
    return [f"{listed(of)}: {note}" for note, of in names.items()]
