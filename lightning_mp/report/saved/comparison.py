"""Read the folder of a comparison: `comparison.json`, and for each precision its curve, its verdict and its log.

A precision whose files are broken becomes a run with status "failed" that says so; the others are read all the same.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_mp.callbacks.divergence import VERDICT_FILE
from lightning_mp.callbacks.recorded_run import FULL_PRECISIONS
from lightning_mp.numerics.baseline import BaselineError, BaselineRun, read_baseline
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.report.candidates import REFERENCE
from lightning_mp.report.compare import BASELINE_FILE
from lightning_mp.report.results import FAILED, INTERRUPTED, NON_FINITE, SCHEMA_VERSION, WARMUP_STEPS
from lightning_mp.report.saved.log import judged, monitored, read_columns, with_verdict
from lightning_mp.report.saved.run import (
    Evenly,
    SavedRun,
    SourceError,
    batch_settings,
    mapping,
    noted,
    number,
    numbers,
    read_json,
    sequence,
    text,
    texts,
    whole,
)
from lightning_mp.report.story import STATUSES, Exponents, RunStory, Series

FILE = "comparison.json"
LOG_FILE = Path("metrics", "metrics.csv")
GIB = 2**30
#: Parts of memory in the report, by their names in a comparison.
PARTS = {"weights": "weights", "masters": "masters", "gradients": "gradients", "optimizer_state": "optimizer"}
RATES = 100  # points of tokens per second over a run
#: What a log may add where a comparison does not know it.
FROM_LOG = ("loss_scale", "skipped_steps", "skipped_count", "updates_lost_fraction")


@dataclass(frozen=True)
class SavedComparison:
    """A comparison as it was saved.

    Attributes:
        name: of the comparison.
        command: the command that repeats it; empty if it is not known.
        runs: one for each precision, in the order in which they were asked for.
    """

    name: str
    command: str
    runs: tuple[SavedRun, ...]


def read_comparison(folder: Path) -> SavedComparison:
    """The comparison in a folder.

    Raises:
        SourceError: `comparison.json` is missing, broken, or of another schema.
    """
    path = folder / FILE
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version is None:
        raise SourceError(f"{path}: not a comparison: it has no schema_version. Give a folder of `lightning-mp compare`.")
    if version != SCHEMA_VERSION:
        raise SourceError(
            f"{path}: its schema has version {version!r}; this package reads version {SCHEMA_VERSION}. Run the comparison "
            "again, or use the version of the package that wrote it."
        )
    try:
        return _comparison(folder, content)
    except ValueError as error:
        raise SourceError(f"{path}: {error}. Run the comparison again.") from error


def _comparison(folder: Path, content: Mapping[str, Any]) -> SavedComparison:
    seeds, problems = _seeds(folder)
    runs: list[SavedRun] = []
    reader = _Reader(folder, content)
    for position, result in enumerate(sequence(content.get("results"), "results"), start=1):
        runs.append(reader.read(result, position))
    done = {run.story.name for run in runs}
    for name in map(str, sequence(content.get("precisions"), "precisions")):
        if name not in done:
            error = "the comparison ended, or still goes on, before it was run."
            runs.append(SavedRun(RunStory(name, name, status=INTERRUPTED, error=error), str(folder.resolve())))
    runs = [_with_seeds(run, seeds, problems) if run.story.name == REFERENCE else run for run in runs]
    command = shlex.join(str(part) for part in sequence(content.get("command"), "command"))
    return SavedComparison(text(content, "name") or folder.resolve().name, command, tuple(runs))


def _seeds(folder: Path) -> tuple[tuple[BaselineRun, ...], list[str]]:
    """The fp32 runs of further seeds, and what was wrong with those that cannot be read."""
    found: list[BaselineRun] = []
    problems: list[str] = []
    for path in sorted(folder.glob(f"{REFERENCE}-seed*/{BASELINE_FILE}")):
        try:
            found += read_baseline(path).runs
        except BaselineError as error:
            problems.append(f"A further seed cannot be read: {error}")
    return tuple(found), problems


def _with_seeds(run: SavedRun, seeds: tuple[BaselineRun, ...], problems: Sequence[str]) -> SavedRun:
    return replace(run, seeds=seeds, story=replace(run.story, notes=[*run.story.notes, *problems]))


class _Reader:
    """Reads the results of one comparison."""

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        self._folder = folder
        self._seed = whole(content, "seed")
        warmup = whole(content, "warmup_steps")
        self._warmup = WARMUP_STEPS if warmup is None else warmup
        self._what = {
            "seed": "" if self._seed is None else str(self._seed),
            "config": ", ".join(map(str, sequence(content.get("config_files"), "config_files"))),
            "overrides": " ".join(map(str, sequence(content.get("overrides"), "overrides"))),
        }
        self._place = str(folder.resolve())
        self._problems: list[str] = []
        # the files are named as they were then, and the folder may have been moved: whether fp32 has recorded one says more
        files = ", ".join(map(str, sequence(content.get("baselines"), "baselines")))
        self._judged_by = files if files and not (folder / REFERENCE / BASELINE_FILE).exists() else REFERENCE
        self._baseline = self._read_baseline(folder / REFERENCE / BASELINE_FILE)

    def _read_baseline(self, path: Path) -> BaselineRun | None:
        """The fp32 run as its own file has it: with its settings and its samples."""
        if not path.exists():
            return None
        try:
            return read_baseline(path).runs[0]
        except BaselineError as error:
            self._problems.append(f"Its baseline cannot be read, so its curve is used instead: {error}")
            return None

    def read(self, result: Any, position: int) -> SavedRun:
        """One result. Never raises for what is in it or in its files."""
        name = f"result {position}"
        try:
            found = mapping(result, name)
            name = text(found, "precision") or name
            if name in (".", "..") or Path(name).name != name:
                raise ValueError(f"precision is {name!r}; it must be the name of a folder")
            saved = SavedRun(self._story(name, found), self._place)
        except ValueError as error:
            return SavedRun(_broken(RunStory(name, name), f"{self._folder / FILE}: {error}"), self._place)
        try:
            saved = self._with_curve(saved, found)
        except ValueError as error:  # SourceError among them
            return replace(saved, story=_broken(saved.story, str(error)))
        saved = self._with_log(self._with_own_verdict(saved, found))
        return replace(saved, judged_by=self._judged_by) if saved.story.verdict is not None else saved

    def _story(self, name: str, found: Mapping[str, Any]) -> RunStory:
        status = found.get("status")
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}; it must be one of {', '.join(STATUSES)}")
        summary = mapping(found.get("summary"), "summary")
        started = mapping(found.get("started"), "started")
        memory = mapping(found.get("memory"), "memory")
        per_parameter = mapping(memory.get("per_parameter"), "per_parameter")
        peak, label = _peak(found)
        counted = {
            part: size / GIB
            for key, part in {**PARTS, "buffers": "buffers"}.items()
            if (size := number(memory, key)) is not None
        }
        told = mapping(found.get("memory_gib"), "memory_gib")
        steps = whole(summary, "steps")
        what = {
            **self._what,
            "steps": f"{steps:,}" if steps else "",
            "precision in use": text(started, "precision_in_use") or "",
        }
        skipped = found.get("skipped_at")
        return RunStory(
            name,
            name,
            status=status,
            error=text(found, "error"),
            tail_loss=number(summary, "tail_loss"),
            step_time_ms=number(summary, "step_time_median_ms"),
            tokens_per_s=number(summary, "tokens_per_s"),
            memory_gib={**counted, **{key: size for key in told if (size := number(told, key)) is not None}},
            bytes_per_parameter={part: size for key, part in PARTS.items() if (size := number(per_parameter, key)) is not None}
            or None,
            peak_gib=peak,
            peak_label=label,
            loss_scale=_loss_scale(found, steps),
            skipped_steps=None if skipped is None else [int(step) for step in numbers(skipped, "skipped_at")],
            skipped_count=whole(found, "skipped_steps"),
            exponents=_exponents(found.get("exponents")),
            updates_lost_fraction=number(found, "updates_lost_fraction"),
            what={key: value for key, value in what.items() if value},
            device=text(started, "device"),
            versions=texts(started.get("versions"), "versions"),
            notes=[str(note) for note in sequence(found.get("notes"), "notes")],
        )

    def _with_curve(self, saved: SavedRun, found: Mapping[str, Any]) -> SavedRun:
        """The run with its steps.

        Raises:
            ValueError: the curve is missing or broken.
        """
        story, folder = saved.story, self._folder / saved.story.name
        path = folder / "curve.json"
        if not path.exists() and story.status in (FAILED, INTERRUPTED):
            return saved
        try:
            steps = [mapping(step, "a step") for step in sequence(mapping(read_json(path), "it").get("steps"), "steps")]
            curve = self._curve(steps, mapping(found.get("started"), "started"), has_ended_badly=story.status == NON_FINITE)
            times = Evenly[float]()
            measured = steps[min(self._warmup, max(len(steps) - 1, 0)) :]
            for step in measured:
                if (time := number(step, "step_time_ms")) is not None:
                    times.add(time)
            rates = _rates(measured)
        except SourceError:
            raise
        except ValueError as error:
            raise SourceError(f"{path}: {error}. Run the comparison again.") from error
        if story.name == REFERENCE:
            story = replace(story, notes=[*story.notes, *self._problems])
        run = (self._baseline if story.name == REFERENCE else None) or BaselineRun(
            curve,
            precision=story.precision,
            is_fp32=story.precision in FULL_PRECISIONS,
            seed=self._seed,
            weights=text(found, "weights_fingerprint"),
            data_order=texts(found.get("data_order"), "data_order"),
            settings=batch_settings(curve),
            device=story.device or "",
            versions=story.versions,
        )
        return replace(saved, story=replace(story, step_times_ms=times.items), run=run, rates=rates)

    def _curve(self, steps: Sequence[Mapping[str, Any]], started: Mapping[str, Any], *, has_ended_badly: bool) -> LossCurve:
        """The losses of all steps. A loss that was not finite is null in the file."""
        ranks = whole(started, "world_size") or 1  # tokens are those of one process
        samples_at = _samples_at(self._baseline)
        curve = LossCurve()
        for record in steps:
            step, loss, tokens = whole(record, "step"), number(record, "loss"), whole(record, "tokens_so_far")
            if step is None:
                raise ValueError("a step has no number")
            if loss is None and has_ended_badly:
                loss = math.nan
            curve.add(step, loss, samples_at(step), None if tokens is None else ranks * tokens)
        return curve

    def _with_own_verdict(self, saved: SavedRun, found: Mapping[str, Any]) -> SavedRun:
        """The run with the verdict in its result, or in its own file."""
        verdict, file = found.get("verdict"), self._folder / saved.story.name / VERDICT_FILE
        if saved.run is None:
            return saved
        if verdict is None:
            return with_verdict(saved, file)
        try:
            content = mapping(verdict, "verdict")
            blocks, axis = found.get("blocks") or content.get("blocks"), content.get("axis")
            if (blocks is None or axis is None) and file.exists():
                own = mapping(read_json(file), VERDICT_FILE)
                blocks, axis = blocks or own.get("blocks"), axis or own.get("axis")
            return judged(saved, content, blocks, axis)
        except ValueError as error:
            return noted(saved, f"Its own verdict cannot be read: {error}")

    def _with_log(self, saved: SavedRun) -> SavedRun:
        """The run with what its log has of our monitors and its result has not."""
        path = self._folder / saved.story.name / LOG_FILE
        if not path.is_file():
            return saved
        try:
            columns = read_columns(path)
        except SourceError as error:
            return noted(saved, f"Its log cannot be read: {error}")
        log, story = monitored(columns), saved.story
        missing = {name: log[name] for name in FROM_LOG if getattr(story, name) is None}
        return replace(saved, story=replace(story, memory_gib={**log["memory_gib"], **story.memory_gib}, **missing))


def _broken(story: RunStory, reason: str) -> RunStory:
    note = f"It cannot be read: {reason}"
    return replace(story, status=FAILED, error=story.error or reason, notes=[*story.notes, note])


def _peak(found: Mapping[str, Any]) -> tuple[float | None, str]:
    told = number(found, "peak_gib")
    if told is not None:
        return told, text(found, "peak_label") or "peak memory"
    cuda, resident = number(found, "peak_cuda_bytes"), number(found, "peak_rss_bytes")
    if cuda is not None:
        return cuda / GIB, "peak memory"
    return None if resident is None else resident / GIB, "peak resident memory of the process"


def _loss_scale(found: Mapping[str, Any], steps: int | None) -> Series | None:
    """Log2 of the scale over steps, from where it changed, up to the last step."""
    changes = [
        numbers(change, "loss_scale_changes") for change in sequence(found.get("loss_scale_changes"), "loss_scale_changes")
    ]
    if not changes:
        return None
    if any(len(change) != 2 for change in changes):
        raise ValueError("loss_scale_changes must be pairs of a step and log2 of the scale")
    if steps and steps > changes[-1][0]:
        changes.append([steps, changes[-1][1]])
    return Series([step for step, _ in changes], [log2 for _, log2 in changes])


def _exponents(value: Any) -> Exponents | None:
    found = mapping(value, "exponents")
    if not found:
        return None
    scale = number(found, "scale")
    return Exponents(
        numbers(found.get("edges"), "edges"),
        numbers(found.get("counts"), "counts"),
        number(found, "flushed") or 0.0,
        1.0 if scale is None else scale,
    )


def _rates(measured: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Tokens per second in equal parts of a run, each at the step where it ends."""
    each = max(1, math.ceil(len(measured) / RATES))
    found = []
    for start in range(0, len(measured), each):
        part = measured[start : start + each]
        tokens, times = [number(step, "tokens") for step in part], [number(step, "step_time_ms") for step in part]
        step = whole(part[-1], "step")
        known_tokens, known_times = [t for t in tokens if t is not None], [t for t in times if t is not None]
        if len(known_tokens) == len(known_times) == len(part) and sum(known_times) > 0 and step is not None:
            found.append((step, sum(known_tokens) / sum(known_times) * 1e3))
    return found


def _samples_at(baseline: BaselineRun | None) -> Callable[[int], int | None]:
    """The samples consumed after a step, as far as the fp32 run knows them: the runs of a comparison consume the same."""
    samples = baseline.curve.samples if baseline is not None else None
    if baseline is None or samples is None:
        return lambda step: None
    ends = dict(zip(baseline.curve.steps, samples, strict=True))
    if baseline.curve.group_size == 1:
        return ends.get
    each = batch_settings(baseline.curve).get("global_batch_samples")
    return lambda step: None if each is None else int(step * each)
