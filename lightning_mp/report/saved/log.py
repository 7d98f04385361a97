"""Read the log of one run: a CSV file of Lightning's `CSVLogger`, with the keys of our monitors beside the loss.

Rows are read one after another: of each column a few thousand values are kept at most, whatever the length of the file.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_mp.callbacks.divergence import VERDICT_FILE
from lightning_mp.callbacks.recorded_run import FULL_PRECISIONS
from lightning_mp.numerics.baseline import (
    LOSS_COLUMNS,
    SAMPLES_COLUMN,
    TOKENS_COLUMN,
    BaselineError,
    BaselineRun,
    read_csv,
)
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import AXES
from lightning_mp.report.saved.run import (
    Evenly,
    SavedRun,
    SourceError,
    batch_settings,
    blocks_from,
    flat,
    known_axes,
    mapping,
    noted,
    read_json,
    tail_loss,
    text,
    verdict_from,
)
from lightning_mp.report.story import UNKNOWN_PRECISION, RunStory, Series

RATE = "throughput/tokens_per_s"
STEP_TIME = "throughput/step_time_ms"
STEP_TIME_P95 = "throughput/step_time_p95_ms"
RUN_PEAK, PEAK, PEAK_RSS = "memory/run_peak_gib", "memory/peak_gib", "memory/peak_rss_gib"
BYTES_PER_PARAMETER = "memory/bytes_per_parameter"
PARTS = {f"memory/{part}_gib": part for part in ("weights", "masters", "gradients", "optimizer", "activations", "buffers")}
LOG2_SCALE, SKIPPED, NONFINITE = "loss_scale/log2", "loss_scale/skipped_steps", "loss_scale/nonfinite_losses"
UPDATES_LOST = "gradients/updates_lost_fraction"
MONITORED = (
    RATE,
    STEP_TIME,
    STEP_TIME_P95,
    SAMPLES_COLUMN,
    TOKENS_COLUMN,
    RUN_PEAK,
    PEAK,
    PEAK_RSS,
    BYTES_PER_PARAMETER,
    *PARTS,
    LOG2_SCALE,
    SKIPPED,
    NONFINITE,
    UPDATES_LOST,
)
PEAK_LABELS = {RUN_PEAK: "peak memory", PEAK: "peak memory", PEAK_RSS: "peak resident memory of the process"}
_LARGEST_YAML = 2**20  # bytes


def read_csv_log(path: Path) -> SavedRun:
    """The run whose log a CSV file is. `verdict.json`, `hparams.yaml` and `config.yaml` beside it are used if they are there.

    Raises:
        SourceError: the file is missing or broken, or has neither a loss nor a column of our monitors.
    """
    columns = read_columns(path)
    if not columns.has_any:
        raise SourceError(
            f"{path}: it has no loss column ({', '.join(LOSS_COLUMNS)}) and none of our monitors. Log the training loss, or "
            "attach lightning_mp.monitors()."
        )
    folder = path.resolve().parent
    notes: list[str] = []
    settings = _yaml(folder / "hparams.yaml", notes)
    precision = _precision(settings) or _precision(_yaml(folder / "config.yaml", notes).get("trainer")) or UNKNOWN_PRECISION
    name = folder.name if path.name == "metrics.csv" else path.stem
    if path.name == "metrics.csv" and (name.startswith("version_") or name == "metrics"):
        name = f"{folder.parent.name}/{name}"
    saved = log_run(name, str(folder), precision, curve_of(path, columns), columns)
    saved = replace(saved, story=replace(saved.story, what=flat(settings), notes=[*saved.story.notes, *notes]))
    return with_verdict(saved, folder / VERDICT_FILE)


def with_verdict(saved: SavedRun, path: Path) -> SavedRun:
    """The run with the verdict in a file, if there is such a file; a broken one is noted."""
    if not path.exists() or saved.run is None:
        return saved
    try:
        content = mapping(read_json(path), "it")
        by = text(content, "baseline")
        return replace(judged(saved, content, content.get("blocks"), content.get("axis")), judged_by=by)
    except ValueError as error:  # SourceError among them
        reason = str(error).removeprefix(f"{path}: ")
        return noted(saved, f"Its own verdict cannot be read: {path}: {reason}")


def judged(saved: SavedRun, verdict: Any, blocks: Any, axis: Any) -> SavedRun:
    """The run with a verdict and blocks that were saved as plain containers.

    Raises:
        ValueError: they are not legal.
    """
    assert saved.run is not None
    known = known_axes(saved.run.curve)
    if axis is not None and axis not in AXES:
        raise ValueError(f"axis is {axis!r}; it must be one of {', '.join(AXES)}")
    story = replace(saved.story, verdict=verdict_from(verdict), blocks=blocks_from(blocks))
    return replace(saved, story=story, axis=axis or next(iter(known), None))


@dataclass
class Columns:
    """What is kept of the columns of a log.

    Attributes:
        losses: those of the known loss columns that are there.
        last: the last value of each column of our monitors.
        highest: the highest.
        rates: tokens per second by optimizer step.
        step_times: in ms.
        scales: log2 of the loss scale by optimizer step, where it changed.
        skipped: steps that were skipped, where that can be told.
        totals: steps, samples and tokens without losses.
    """

    losses: list[str] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    rates: Evenly[tuple[int, float]] = field(default_factory=Evenly)
    step_times: Evenly[float] = field(default_factory=Evenly)
    scales: Evenly[tuple[int, float]] = field(default_factory=Evenly)
    skipped: Evenly[int] = field(default_factory=Evenly)
    totals: LossCurve = field(default_factory=LossCurve)
    last_step: int = 0
    _counted: tuple[int, float] = (0, 0.0)  # the step and the count of skipped steps there

    @property
    def has_any(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.losses or self.last)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take a row: finite numbers by column, at an optimizer step that counts from 1."""
        self.last_step = max(self.last_step, step)
        if LOG2_SCALE in values and values[LOG2_SCALE] != self.last.get(LOG2_SCALE):
            self.scales.add((step, values[LOG2_SCALE]))
        self.last.update(values)
        for name in (RUN_PEAK, PEAK, PEAK_RSS):
            if name in values:
                self.highest[name] = max(values[name], self.highest.get(name, -math.inf))
        if RATE in values:
            self.rates.add((step, values[RATE]))
        if STEP_TIME in values:
            self.step_times.add(values[STEP_TIME])
        if SKIPPED in values:
            self._count_skipped(step, values[SKIPPED])
        if not self.losses and step > self.totals.last_step:
            self.totals.add(step, None, _total(values, SAMPLES_COLUMN), _total(values, TOKENS_COLUMN))

    def _count_skipped(self, step: int, count: float) -> None:
        before, counted = self._counted
        if count > counted and count - counted == step - before:  # all of them, so it is known which
            for which in range(before + 1, step + 1):
                self.skipped.add(which)
        self._counted = (step, count)

    @property
    def loss_scale(self) -> Series | None:
        """Log2 of the loss scale over optimizer steps, up to the last one; None without loss scaling."""
        points = self.scales.items
        if not any(scale for _, scale in points):
            return None  # a scale of 1 throughout is none
        points = [*points, (self.last_step, self.last[LOG2_SCALE])] if points[-1][0] < self.last_step else points
        return Series([step for step, _ in points], [scale for _, scale in points])


def read_columns(path: Path, losses: Collection[str] = LOSS_COLUMNS) -> Columns:
    """Read the columns of our monitors in a CSV file, row by row.

    Args:
        path: the file.
        losses: names that a column of losses may have.

    Raises:
        SourceError: the file is missing or broken.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _columns(csv.reader(file), losses)
    except IsADirectoryError as error:
        raise SourceError(f"{path}: a directory, not a file. Give the CSV file in it.") from error
    except OSError as error:
        raise SourceError(f"{path}: it cannot be read: {error.strerror or error}. Check the path.") from error
    except (ValueError, csv.Error) as error:
        raise SourceError(f"{path}: {error}. Give the metrics.csv of a CSVLogger.") from error


def _columns(rows: Any, losses: Collection[str]) -> Columns:
    header: list[str] = next(rows, [])
    if "step" not in header:
        raise ValueError(f"it has no column 'step'; its columns are {', '.join(header[:30]) or 'none, as it is empty'}")
    at = header.index("step")
    monitored = [(header.index(name), name) for name in MONITORED if name in header]
    found = Columns(losses=[name for name in LOSS_COLUMNS if name in losses and name in header])
    for row in rows:
        if len(row) <= at or not row[at]:
            continue
        values: dict[str, float] = {}
        for place, name in monitored:
            if place < len(row) and row[place] and math.isfinite(value := _number(row[place], name, rows.line_num)):
                values[name] = value
        step = _number(row[at], "step", rows.line_num)
        if not 0 <= step < math.inf:
            raise ValueError(f"line {rows.line_num} has step {row[at]}; steps count from 0")
        found.add(int(step) + 1, values)
    return found


def _number(cell: str, column: str, line: int) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"line {line} has {cell[:40]!r} in column {column!r}, which is not a number") from None


def _total(values: Mapping[str, float], name: str) -> int | None:
    return round(values[name]) if name in values else None


def curve_of(path: Path, columns: Columns, loss_key: str | None = None) -> LossCurve:
    """The curve of a log, without losses if there is no column of them.

    Raises:
        SourceError: the file holds more than one run, or is broken.
    """
    if not columns.losses:
        return columns.totals
    try:
        return read_csv(path, loss_key).runs[0].curve
    except BaselineError as error:
        raise SourceError(f"{error}. Give the log of one run.") from error


def monitored(columns: Columns) -> dict[str, Any]:
    """What our monitors have told of a run, as attributes of a `RunStory`."""
    last, times = columns.last, columns.step_times.items
    peak = next((key for key in PEAK_LABELS if key in columns.highest), None)
    # a 95th percentile beside it says that each value is a median of many steps
    is_single = bool(times) and STEP_TIME_P95 not in last
    may_skip = SKIPPED in last and bool(columns.loss_scale or last[SKIPPED])
    return {
        "step_times_ms": times if is_single else (),
        "step_time_ms": statistics.median(times) if is_single else last.get(STEP_TIME),
        "tokens_per_s": last.get(RATE),
        "memory_gib": {part: last[key] for key, part in PARTS.items() if key in last},
        "bytes_per_parameter": {"total": last[BYTES_PER_PARAMETER]} if BYTES_PER_PARAMETER in last else None,
        "peak_gib": columns.highest[peak] if peak else None,
        "peak_label": PEAK_LABELS[peak or PEAK],
        "loss_scale": columns.loss_scale,
        "skipped_steps": columns.skipped.items if may_skip else None,
        "skipped_count": int(last[SKIPPED]) if may_skip else None,
        "updates_lost_fraction": last.get(UPDATES_LOST),
    }


def log_run(name: str, place: str, precision: str, curve: LossCurve, columns: Columns) -> SavedRun:
    """The run that a log tells of."""
    run = BaselineRun(curve, precision=precision, is_fp32=precision in FULL_PRECISIONS, settings=batch_settings(curve))
    status, error, notes = "ok", None, []
    if curve.nonfinite_steps > columns.last.get(NONFINITE, 0):
        status, error = "non-finite", f"the loss was not finite at step {curve.first_nonfinite_step}."
    elif curve.nonfinite_steps:
        notes.append(f"The loss was not finite in {curve.nonfinite_steps} steps, which were skipped.")
    if not columns.losses:
        notes.append(f"Its log has no loss; the columns that are looked for are {', '.join(LOSS_COLUMNS)}.")
    if STEP_TIME_P95 in columns.last:
        slowest = f"{columns.last[STEP_TIME_P95]:.4g} ms"
        notes.append(f"Its log holds medians of step times, not single ones; 95% of the last steps took at most {slowest}.")
    fields = monitored(columns)
    story = RunStory(name, precision, status=status, error=error, tail_loss=tail_loss(curve), notes=notes, **fields)
    return SavedRun(story, place, run, columns.rates.items)


def _yaml(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """A YAML file's mapping; empty if there is none. A broken one is noted."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST_YAML:
            raise ValueError(f"it has more than {_LARGEST_YAML} bytes")
        return mapping(yaml.safe_load(path.read_text(encoding="utf-8")), "it")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} beside the log cannot be read: {' '.join(str(error).split())[:200]}")
        return {}


def _precision(settings: Any) -> str | None:
    """The precision that a Trainer with such settings uses."""
    if not isinstance(settings, Mapping):
        return None
    for key in ("precision_plugin", "precision"):
        value = settings.get(key)
        if isinstance(value, Mapping):  # a class with its arguments
            arguments = value.get("init_args")
            value = arguments.get("precision") if isinstance(arguments, Mapping) else None
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return "32-true" if {"precision_plugin", "precision"} & settings.keys() else None
