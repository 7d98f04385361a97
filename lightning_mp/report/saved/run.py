"""What was read of one saved run, before it is set beside others.

Each run knows its own axes and may have been judged on another axis than the page is drawn on. `SavedRun.told` moves it to the
page's axis once that is known: positions are looked up on the run's own curve, between whose points they are interpolated.

Files are read as something that may be broken or hostile: every value is checked where it is taken.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from lightning_mp.numerics.baseline import BaselineRun, Difference
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import AXES, Alarm, Axis, Block, Outcome, Verdict
from lightning_mp.report.results import TAIL_FRACTION
from lightning_mp.report.story import RunStory, Series

LARGEST_JSON_MIB = 256  # a million steps of a comparison
KEPT_POINTS = 4096  # of a column, however long it is
SHOWN_SETTINGS = 60  # of a run
DEEPEST_SETTING = 4  # of mappings within mappings
OUTCOMES: tuple[str, ...] = get_args(Outcome)
FP32 = ("32", "32-true")

T = TypeVar("T")


class SourceError(ValueError):
    """A saved run is missing or broken. The message begins with its path and says what to do."""


@dataclass(frozen=True)
class SavedRun:
    """One run as it was saved.

    Attributes:
        story: what does not depend on other runs. `loss` and `tokens_per_s_series` are set by `told`; positions of the
            verdict and of the blocks are on `axis`.
        place: the folder or file that tells the run from others of its name.
        run: its curve, fingerprints and settings; None if there is no curve.
        rates: tokens per second by optimizer step.
        axis: what the ends of its blocks count; None if it has not been judged.
        seeds: runs of other seeds, which it makes a baseline with.
        judged_by: what its verdict is against; None if that is not known, or there is no verdict.
    """

    story: RunStory
    place: str
    run: BaselineRun | None = None
    rates: Sequence[tuple[int, float]] = ()
    axis: Axis | None = None
    seeds: tuple[BaselineRun, ...] = ()
    judged_by: str | None = None

    @property
    def is_fp32(self) -> bool:
        """Whether the run computed in fp32 throughout, as far as that is known."""
        return self.run.is_fp32 if self.run is not None else self.story.precision in FP32

    def told(self, name: str, axis: Axis) -> RunStory:
        """The run under a name that no other has, with every position on `axis`."""
        story = replace(self.story, name=name)
        if self.run is None:
            return story
        curve = self.run.curve
        verdict, blocks, notes = story.verdict, list(story.blocks), list(story.notes)
        if self.axis is not None and self.axis != axis:
            if not positions(curve, self.axis):
                notes.append(f"It was judged by {self.axis}, which its curve does not hold, so its blocks are not drawn.")
                blocks, verdict = [], verdict and replace(verdict, alarm=self._alarm_by_step(verdict.alarm, axis))
            else:
                ends = _moved([block.end for block in blocks], curve, self.axis, axis)
                blocks = [replace(block, end=end) for block, end in zip(blocks, ends, strict=True)]
                if verdict is not None and verdict.alarm is not None:
                    (position,) = _moved([verdict.alarm.position], curve, self.axis, axis)
                    verdict = replace(verdict, alarm=replace(verdict.alarm, position=position))
        places, rates = _moved([step for step, _ in self.rates], curve, "steps", axis), [rate for _, rate in self.rates]
        return replace(
            story,
            loss=loss_series(curve, axis),
            tokens_per_s_series=Series(places, rates) if rates and len(curve) else None,
            verdict=verdict,
            blocks=blocks,
            notes=notes,
        )

    def _alarm_by_step(self, alarm: Alarm | None, axis: Axis) -> Alarm | None:
        """An alarm whose position says nothing here, at the place of its step, if that can be told."""
        if alarm is None or alarm.step is None or self.run is None or not len(self.run.curve):
            return None
        (position,) = _moved([alarm.step], self.run.curve, "steps", axis)
        return replace(alarm, position=position)


def noted(saved: SavedRun, note: str) -> SavedRun:
    """The run with one more note."""
    return replace(saved, story=replace(saved.story, notes=[*saved.story.notes, note]))


def known_axes(curve: LossCurve) -> list[Axis]:
    """The axes on which a curve can be drawn, best first."""
    return [axis for axis in AXES if positions(curve, axis)]


def positions(curve: LossCurve, axis: Axis) -> list[int] | None:
    """Where the groups of a curve end; None if that is not known."""
    return {"tokens": curve.tokens, "samples": curve.samples, "steps": curve.steps}[axis]


def loss_series(curve: LossCurve, axis: Axis) -> Series | None:
    """The losses of a curve over an axis, NaN where there is none; None if the curve holds no loss."""
    places = positions(curve, axis)
    if not places or not (any(curve.counts) or curve.nonfinite_steps):
        return None
    return Series(places, [math.nan if loss is None else loss for loss in curve.losses])


def tail_loss(curve: LossCurve) -> float | None:
    """The mean loss over the last fifth of a curve, None if there is none."""
    tail = slice(-max(1, round(len(curve) * TAIL_FRACTION)), None)
    counted = [(loss, count) for loss, count in zip(curve.losses[tail], curve.counts[tail], strict=True) if loss is not None]
    steps = sum(count for _, count in counted)
    return math.fsum(loss * count for loss, count in counted) / steps if steps else None


def batch_settings(curve: LossCurve) -> dict[str, float]:
    """What an optimizer step consumes, if every step of the curve consumed as much: it decides whether runs are comparable."""
    found: dict[str, float] = {}
    for name, ends in (("global_batch_samples", curve.samples), ("tokens_per_step", curve.tokens)):
        if ends and curve.last_step:
            each = ends[-1] / curve.last_step
            if each and all(end == each * step for step, end in zip(curve.steps, ends, strict=True)):
                found[name] = int(each) if each.is_integer() else each
    return found


def _moved(places: Sequence[float], curve: LossCurve, source: Axis, target: Axis) -> list[float]:
    """Positions on one axis as they are on another; both have to be known to the curve."""
    if source == target or not places:
        return list(places)
    theirs, ours = positions(curve, source), positions(curve, target)
    assert theirs is not None
    assert ours is not None
    return [float(place) for place in np.interp(places, [0, *theirs], [0, *ours])]


@dataclass
class Evenly(Generic[T]):
    """At most `KEPT_POINTS` + 1 items of a stream, evenly spaced in number, with the first and the last one."""

    _kept: list[T] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0
    _last: list[T] = field(default_factory=list)

    def add(self, item: T) -> None:
        """Take the next item."""
        if self._seen % self._stride == 0:
            if len(self._kept) == KEPT_POINTS:
                del self._kept[1::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._kept.append(item)
        self._seen += 1
        self._last = [item]

    @property
    def items(self) -> list[T]:
        """What is kept."""
        ends_with_last = self._seen and (self._seen - 1) % self._stride == 0
        return self._kept + ([] if ends_with_last else self._last)


# --- checked values ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        SourceError: it is missing, too large, or no JSON.
    """
    try:
        size = os.path.getsize(path) / 2**20
        if size > LARGEST_JSON_MIB:
            raise SourceError(f"{path}: it has {size:,.0f} MiB; {LARGEST_JSON_MIB} MiB are read at most. Give another run.")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise SourceError(f"{path}: there is no such file. Give the folder of a whole run, or run it again.") from error
    except OSError as error:
        raise SourceError(f"{path}: it cannot be read: {error.strerror or error}. Check its permissions.") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError among them
        if isinstance(error, SourceError):
            raise
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise SourceError(f"{path}: not valid JSON ({reason}); perhaps it was cut short. Run it again.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which JSON does not have")


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A mapping; None is an empty one.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, not a mapping")
    return value


def sequence(value: Any, name: str) -> Sequence[Any]:
    """A list; None is an empty one.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is a {type(value).__name__}, not a list")
    return value


def number(values: Mapping[str, Any], key: str) -> float | None:
    """The finite number under a key, None if there is none.

    Raises:
        ValueError: there is something else.
    """
    value = values.get(key)
    return None if value is None else _finite(value, key)


def needed(values: Mapping[str, Any], key: str) -> float:
    """The finite number under a key.

    Raises:
        ValueError: there is none.
    """
    return _finite(values.get(key), key)


def numbers(value: Any, name: str) -> list[float]:
    """A list of finite numbers.

    Raises:
        ValueError: it is something else.
    """
    return [_finite(item, name) for item in sequence(value, name)]


def whole(values: Mapping[str, Any], key: str) -> int | None:
    """The whole number of at least 0 under a key, None if there is none.

    Raises:
        ValueError: there is something else.
    """
    value = number(values, key)
    if value is not None and (value < 0 or value != int(value)):
        raise ValueError(f"{key} is {value!r}; it must be a whole number of at least 0")
    return None if value is None else int(value)


def text(values: Mapping[str, Any], key: str) -> str | None:
    """The text under a key, None if there is none.

    Raises:
        ValueError: there is something else.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}; it must be text")
    return value


def texts(value: Any, name: str) -> dict[str, str]:
    """A mapping of texts, without those that are null.

    Raises:
        ValueError: it is something else.
    """
    found = mapping(value, name)
    return {str(key): item for key in found if (item := text(found, key)) is not None}


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """The first `SHOWN_SETTINGS` plain values in nested mappings as text, with dots between the names of nested ones."""
    return dict(itertools.islice(_plain_values(values, "", DEEPEST_SETTING), SHOWN_SETTINGS))


def _plain_values(values: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if str(key).startswith("_"):
            continue
        if isinstance(value, Mapping) and depth:
            yield from _plain_values(value, f"{name}.", depth - 1)
        elif isinstance(value, str | int | float):
            yield name, str(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, str | int | float) for item in value):
            yield name, ", ".join(map(str, value))


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return value


# --- verdicts ----------------------------------------------------------------------------------------------------------------


def verdict_from(value: Any) -> Verdict:
    """The verdict that `Verdict.as_dict` described. What had no place in JSON, as it was not finite, is unknown.

    Raises:
        ValueError: a value is missing or not legal; the message names it.
    """
    found = mapping(value, "the verdict")
    status = found.get("status")
    if status not in OUTCOMES:
        raise ValueError(f"the verdict's status is {status!r}; it must be one of {', '.join(OUTCOMES)}")
    interval = sequence(found.get("interval"), "interval")
    alarm = mapping(found.get("alarm"), "alarm")
    return Verdict(
        status=status,
        gap=number(found, "gap"),
        interval=None
        if len(interval) != 2 or None in interval
        else (_finite(interval[0], "interval"), _finite(interval[1], "interval")),
        margin=number(found, "margin"),
        smallest_visible_gap=number(found, "smallest_visible_gap"),
        coverage=needed(found, "coverage"),
        paired=bool(found.get("paired")),
        seeds=whole(found, "seeds") or 0,
        alarm=_alarm(alarm) if alarm else None,
        lag_explained=number(found, "lag_explained"),
        explanation=text(found, "explanation") or "",
        differences=tuple(_difference(item) for item in sequence(found.get("differences"), "differences")),
    )


def blocks_from(value: Any) -> list[Block]:
    """The blocks that were saved as mappings of their fields. Losses that were not finite are NaN.

    Raises:
        ValueError: a value is missing or not legal; the message names it.
    """
    return [_block(mapping(item, "a block")) for item in sequence(value, "blocks")]


def _block(found: Mapping[str, Any]) -> Block:
    return Block(
        index=int(needed(found, "index")),
        end=needed(found, "end"),
        candidate=_or_nan(found, "candidate"),
        baseline=_or_nan(found, "baseline"),
        gap=_or_nan(found, "gap"),
        margin=_or_nan(found, "margin"),
        scale=_or_nan(found, "scale"),
        evidence=_or_nan(found, "evidence"),
        band_low=number(found, "band_low"),
        band_high=number(found, "band_high"),
    )


def _alarm(found: Mapping[str, Any]) -> Alarm:
    return Alarm(int(needed(found, "block")), needed(found, "position"), whole(found, "step"), _or_nan(found, "gap"))


def _difference(item: Any) -> Difference:
    found = mapping(item, "a difference")
    return Difference(text(found, "name") or "", text(found, "text") or "", bool(found.get("decides")))


def _or_nan(found: Mapping[str, Any], key: str) -> float:
    value = number(found, key)
    return math.nan if value is None else value
