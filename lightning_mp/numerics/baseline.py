"""The saved fp32 run that others are judged by: its curve, what identifies it, and what has to be equal for a comparison.

Two runs differ far less when they start from the same weights and see the same data in the same order: their noise then cancels
(block means differ by some 0.0005 nats instead of 0.04). So a baseline holds fingerprints of both, and a comparison is *paired*
only if they match. A run with another batch size, schedule or optimizer is not a comparison of precisions at all, whatever its
curve looks like; ``differences`` names what differs and says whether it decides that.

A baseline is one JSON file of some 200 KB at most, with the name and version of its schema. It is read as something that may be
broken or hostile: every value is checked before it is used.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_mp.files import write_text
from lightning_mp.numerics.curve import LossCurve

SCHEMA = "lightning-mp-baseline"
SCHEMA_VERSION = 1
LARGEST_FILE_MIB = 64  # of JSON; 300 seeds' worth
LOSS_COLUMNS = ("train/loss", "train_loss", "train_loss_step", "loss", "loss_step")
SAMPLES_COLUMN = "throughput/samples"
TOKENS_COLUMN = "throughput/tokens"
LARGEST_TOTAL = 2**53  # of steps, samples and tokens in a CSV: float64 holds all whole numbers up to here
PENDING_ROWS = 100_000  # rows of a CSV that wait for the next known total
LEARNING_RATE_TOLERANCE = 1e-6  # relative; the schedule's own rounding is 1e-15
TOKENS_TOLERANCE = 0.01  # relative; padding lets tokens per step vary a little

Status = Literal["recording", "finished", "stopped"]
STATUSES: tuple[str, ...] = get_args(Status)
#: Settings that are numbers, and those that are texts or lists of them.
NUMBERS = (
    "global_batch_samples",
    "tokens_per_step",
    "parameters",
    "trainable_parameters",
    "dataset_samples",
    "gradient_clip_val",
    "max_steps",
)
TEXTS = ("optimizer", "data", "gradient_clip_algorithm")


class BaselineError(ValueError):
    """A baseline is missing, broken, of another schema, or cannot be used. The message begins with its path.

    Example:
        >>> try:
        ...     read_baseline("no such file.json")
        ... except BaselineError as error:
        ...     print(error)
        no such file.json: there is no such file. Record a baseline with BaselineRecorder, or correct the path.
    """


@dataclass(frozen=True)
class BaselineRun:
    """One recorded run.

    Attributes:
        curve: the true loss of each optimizer step against steps, samples and tokens.
        status: "recording" while the run goes, "finished" at its planned end, "stopped" if it ended before.
        precision: as the Trainer names it.
        is_fp32: whether the run computed in fp32 throughout.
        seed: the global seed, if one was set.
        weights: fingerprint of the initial weights, or None if it is not known.
        data_order: hash of the sample consumed at a position on rank 0; the keys are positions counted from 1, as strings.
        settings: what decides whether a run can be compared with this one. All keys are optional, and only what both runs
            know is compared: ``global_batch_samples`` (samples that most optimizer steps take, over all ranks),
            ``tokens_per_step`` (the median), ``optimizer``, ``hyperparameters`` (a list of optimizers, each a list of groups,
            each a mapping of numbers), ``learning_rates`` (of the first group at an optimizer step; the keys are steps, as
            strings), ``parameters``, ``trainable_parameters``, ``dataset_samples``, ``data``, ``gradient_clip_val``,
            ``gradient_clip_algorithm`` ("norm" where there is none), ``max_steps``.
        validation: for each metric its values, as mappings of ``step``, ``samples``, ``tokens`` and ``value``.
        numbers: ``peak_gib`` or ``peak_rss_gib`` (GiB), ``tokens_per_s``, ``step_time_ms``, ``bytes_per_parameter``.
        device: the device's name.
        versions: of torch, Lightning and this package.

    Example:
        >>> curve = LossCurve()
        >>> curve.add(1, 2.5, samples=8)
        >>> BaselineRun(curve, seed=1).status
        'finished'
    """

    curve: LossCurve
    status: Status = "finished"
    precision: str = "32-true"
    is_fp32: bool = True
    seed: int | None = None
    weights: str | None = None
    data_order: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation: Mapping[str, Sequence[Mapping[str, float | int | None]]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The run as plain containers, a key for each attribute."""
        return {
            "status": self.status,
            "precision": self.precision,
            "is_fp32": self.is_fp32,
            "seed": self.seed,
            "weights": self.weights,
            "data_order": dict(self.data_order),
            "settings": dict(self.settings),
            "validation": {name: [dict(row) for row in rows] for name, rows in self.validation.items()},
            "numbers": dict(self.numbers),
            "device": self.device,
            "versions": dict(self.versions),
            "curve": self.curve.as_dict(),
        }

    @classmethod
    def from_json(cls, value: Any) -> BaselineRun:
        """Build the run that ``as_json`` described. Keys that this version does not know are ignored.

        Raises:
            ValueError: a value is missing or is not legal; the message names it.
        """
        run = _mapping(value, "the run")
        curve = LossCurve.from_dict(_mapping(run.get("curve"), "curve"))
        status = run.get("status")
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}; it must be one of {', '.join(STATUSES)}")
        seed, weights, is_fp32 = run.get("seed"), run.get("weights"), run.get("is_fp32")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed is {seed!r}; it must be a whole number or null")
        if weights is not None and not isinstance(weights, str):
            raise ValueError(f"weights is {weights!r}; it must be a fingerprint or null")
        if not isinstance(is_fp32, bool):
            raise ValueError(f"is_fp32 is {is_fp32!r}; it must be true or false")
        settings = _settings(run.get("settings", {}))
        numbers = _mapping(run.get("numbers", {}), "numbers")
        for name, number in numbers.items():
            _check_number(f"numbers[{name!r}]", number)
        order = _strings(run.get("data_order", {}), "data_order")
        _check_positions("data_order", order)
        return cls(
            curve,
            status,
            _string(run.get("precision"), "precision"),
            is_fp32,
            seed,
            weights,
            order,
            settings,
            _validation(run.get("validation", {})),
            numbers,
            _string(run.get("device", ""), "device"),
            _strings(run.get("versions", {}), "versions"),
        )


@dataclass(frozen=True)
class Baseline:
    """One run, or several seeds of the same run.

    Attributes:
        runs: at least one.
        source: where they came from; messages begin with it.

    Example:
        >>> curve = LossCurve()
        >>> curve.add(1, 2.5)
        >>> baseline = Baseline((BaselineRun(curve, seed=1),), "fp32.json")
        >>> Baseline.from_json(baseline.as_json(), "fp32.json") == baseline
        True
    """

    runs: tuple[BaselineRun, ...]
    source: str

    def as_json(self) -> dict[str, Any]:
        """The baseline as plain containers, with the schema's name and version."""
        return {"schema": SCHEMA, "version": SCHEMA_VERSION, "runs": [run.as_json() for run in self.runs]}

    @classmethod
    def from_json(cls, value: Any, source: str) -> Baseline:
        """Build the baseline that ``as_json`` described.

        Raises:
            BaselineError: it is of another schema or version, or a value is missing or not legal.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            found = value.get("schema") if isinstance(value, dict) else None
            raise BaselineError(
                f"{source}: not a baseline: its schema is {found!r}, not {SCHEMA!r}. Record one with BaselineRecorder."
            )
        if value.get("version") != SCHEMA_VERSION:
            raise BaselineError(
                f"{source}: its schema has version {value.get('version')!r}; this package reads version {SCHEMA_VERSION}. "
                "Record it again, or use the version of the package that wrote it."
            )
        runs = value.get("runs")
        if not isinstance(runs, list) or not runs:
            raise BaselineError(f"{source}: it holds no runs. Record it again with BaselineRecorder.")
        built = []
        for number, run in enumerate(runs, start=1):
            try:
                built.append(BaselineRun.from_json(run))
            except (ValueError, OverflowError) as error:
                raise BaselineError(f"{source}: run {number} is broken: {error}. Record it again.") from error
        return cls(tuple(built), source)


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read a baseline: a JSON file of ``write_baseline``, or, by its suffix, a CSV of Lightning's ``CSVLogger``.

    Raises:
        BaselineError: the file is missing, cannot be read, is broken or of another schema.
    """
    if Path(path).suffix.lower() == ".csv":
        return read_csv(path)
    try:
        size = os.path.getsize(path) / 2**20
        if size > LARGEST_FILE_MIB and not os.path.isdir(path):
            raise BaselineError(
                f"{path}: it has {size:,.0f} MiB; a baseline has some 0.2 MiB a run, {LARGEST_FILE_MIB} MiB at most."
            )
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: not a text file ({error}). Give a file that BaselineRecorder wrote.") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BaselineError(f"{path}: not a baseline: its values are nested too deeply.") from error
    except ValueError as error:  # JSONDecodeError among them
        what = "it is empty" if not text.strip() else f"not valid JSON ({error})"
        raise BaselineError(f"{path}: {what}; perhaps it was cut short. Record it again.") from error
    return Baseline.from_json(value, str(path))


def write_baseline(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write a baseline atomically: whatever goes wrong, the old file stays whole.

    Raises:
        BaselineError: a value of it has no place in JSON, such as NaN.
        OSError: the file could not be written (a directory, no permission, a full disk); the message names the path.
    """
    try:
        text = json.dumps(baseline.as_json(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BaselineError(f"{path}: the baseline cannot be saved as JSON: {error}") from error
    try:
        write_text(Path(path), text + "\n")
    except OSError as error:
        raise OSError(error.errno, f"the baseline could not be written: {error.strerror or error}", str(path)) from error


def join_baselines(baselines: Sequence[Baseline]) -> Baseline:
    """Join the runs of several baselines into one baseline of several seeds.

    Raises:
        BaselineError: two runs cannot be compared with each other, or are the same run; the message names their files.
        ValueError: there is no baseline.
    """
    if not baselines:
        raise ValueError("there is no baseline to join; give at least one")
    runs = [(run, baseline.source) for baseline in baselines for run in baseline.runs]
    for (first, source), (second, other) in itertools.combinations(runs, 2):
        deciding = [difference.text for difference in differences(first, second) if difference.decides]
        if deciding:
            raise BaselineError(f"{other}: not a seed of the same run as {source}: {'; '.join(deciding)}.")
        if first.curve == second.curve or (first.seed == second.seed and is_paired(first, second)):
            seed = "" if first.seed is None else f" (seed {first.seed})"
            raise BaselineError(
                f"{other}: the same run{seed} as in {source}; a band needs runs of different seeds. Give each run once."
            )
    return Baseline(tuple(run for run, _ in runs), ", ".join(dict.fromkeys(baseline.source for baseline in baselines)))


def read_csv(path: str | os.PathLike[str], loss_key: str | None = None) -> Baseline:
    """Read the curve of a run from the ``metrics.csv`` of Lightning's ``CSVLogger``, row by row.

    Rows of the same ``step`` are one. Lightning counts that column from 0: the optimizer step is ``step`` + 1. Samples and
    tokens come from the columns ``throughput/samples`` and ``throughput/tokens``. Where a loss has no total on its own step,
    the total is interpolated on the step between the two nearest known ones (from 0 at step 0), and continued at the last rate
    behind the last one; both are exact where every step consumes the same. A loss of NaN or infinity counts as a non-finite
    loss.

    Args:
        path: the file.
        loss_key: the column of the loss; by default the first of ``train/loss``, ``train_loss``, ``train_loss_step``, ``loss``,
            ``loss_step`` that is there.

    Raises:
        BaselineError: the file is missing or broken, or has no such column.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # with or without a byte order mark
            run = BaselineRun(_curve_of(csv.DictReader(file), loss_key), precision="unknown", is_fp32=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, csv.Error) as error:
        raise BaselineError(f"{path}: {error}") from error
    return Baseline((run,), str(path))


@dataclass(frozen=True)
class Difference:
    """One thing in which a candidate differs from a baseline.

    Attributes:
        name: of the setting.
        text: a clause that names it as what it is, with both values.
        decides: whether it makes the runs NOT COMPARABLE.

    Example:
        >>> Difference("seed", "the seed is 2, the baseline's 1", decides=False).decides
        False
    """

    name: str
    text: str
    decides: bool


def differences(run: BaselineRun, candidate: BaselineRun) -> list[Difference]:
    """Say in what a candidate differs from a baseline's run, of all that both know; what decides comes first."""
    theirs, ours = run.settings, candidate.settings
    found = [
        *_batch_differences(theirs, ours),
        *_learning_rate_differences(theirs.get("learning_rates"), ours.get("learning_rates")),
        *_plain(theirs, ours, "optimizer", "the optimizer"),
        *_hyperparameter_differences(theirs.get("hyperparameters"), ours.get("hyperparameters")),
        *_plain(theirs, ours, "parameters", "the number of parameters"),
        *_trainable_differences(theirs, ours),
        *_plain(theirs, ours, "dataset_samples", "the number of samples in the dataset"),
        *_plain(theirs, ours, "data", "the dataset"),
        *_clipping_differences(theirs, ours),
        *_plain(theirs, ours, "max_steps", "max_steps", decides=False),
    ]
    if run.weights is not None and candidate.weights is not None and run.weights != candidate.weights:
        found.append(Difference("weights", "the initial weights differ", False))
    common = _common(run.data_order, candidate.data_order)
    unequal = [position for position in common if not _same_sample(run, candidate, position)]
    if unequal:
        same = max((position for position in common if position < unequal[0]), default=0)
        where = f"sample {unequal[0]}" if same + 1 == unequal[0] else f"one of the samples {same + 1} to {unequal[0]}"
        found.append(Difference("data_order", f"the data order differs from {where} on", False))
    if run.seed is not None and candidate.seed is not None and run.seed != candidate.seed:
        found.append(Difference("seed", f"the seed is {candidate.seed}, the baseline's {run.seed}", False))
    if run.device and candidate.device and run.device != candidate.device:
        found.append(Difference("device", f"the device is {candidate.device}, the baseline's {run.device}", False))
    return found


def is_paired(run: BaselineRun, candidate: BaselineRun) -> bool:
    """Whether both started from the same weights and saw the same data in the same order, as far as both know.

    The fingerprints of the weights have to be known and equal, and the data has to agree at all common positions, at least one.
    """
    common = _common(run.data_order, candidate.data_order)
    if run.weights is None or run.weights != candidate.weights or not common:
        return False
    return all(_same_sample(run, candidate, position) for position in common)


def _same_sample(run: BaselineRun, candidate: BaselineRun, position: int) -> bool:
    return run.data_order[str(position)] == candidate.data_order[str(position)]


def _common(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> list[int]:
    """The positions that both know, in order."""
    return sorted(int(key) for key in (theirs or {}).keys() & (ours or {}).keys())


def _plain(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str, words: str, *, decides: bool = True
) -> Iterator[Difference]:
    if name in theirs and name in ours and not _same(theirs[name], ours[name]):
        yield Difference(name, f"{words} is {_shown(ours[name])}, the baseline's {_shown(theirs[name])}", decides)


def _batch_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Difference]:
    name = "global_batch_samples"
    if theirs.get(name) is not None and ours.get(name) is not None:
        if theirs[name] != ours[name]:
            text = f"an optimizer step takes {_shown(ours[name])} samples, the baseline's {_shown(theirs[name])}"
            yield Difference(name, text, True)
        return
    name = "tokens_per_step"
    if theirs.get(name) and ours.get(name) and not math.isclose(theirs[name], ours[name], rel_tol=TOKENS_TOLERANCE):
        text = f"an optimizer step takes {_shown(ours[name])} tokens, the baseline's {_shown(theirs[name])}"
        yield Difference(name, text, True)


def _clipping_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Difference]:
    yield from _plain(theirs, ours, "gradient_clip_val", "gradient_clip_val")
    if theirs.get("gradient_clip_val") and ours.get("gradient_clip_val"):
        name = "gradient_clip_algorithm"
        yield from _plain({name: "norm", **theirs}, {name: "norm", **ours}, name, name)


def _learning_rate_differences(theirs: Mapping[str, float] | None, ours: Mapping[str, float] | None) -> Iterator[Difference]:
    for step in _common(theirs, ours):
        assert theirs is not None
        assert ours is not None
        rate, reference = ours[str(step)], theirs[str(step)]
        if not math.isclose(rate, reference, rel_tol=LEARNING_RATE_TOLERANCE):
            times = f" ({rate / reference:.4g} times)" if reference else ""
            text = f"the learning rate at step {step} is {_shown(rate)}, the baseline's {_shown(reference)}{times}"
            yield Difference("learning_rates", text, True)
            return  # one schedule, one difference: the first step tells where it begins


def _hyperparameter_differences(theirs: Any, ours: Any) -> Iterator[Difference]:
    if theirs is None or ours is None:
        return
    name = "hyperparameters"
    if [len(groups) for groups in theirs] != [len(groups) for groups in ours]:
        have = ", ".join(str(len(groups)) for groups in ours)
        had = ", ".join(str(len(groups)) for groups in theirs)
        yield Difference(name, f"the optimizer has {have} parameter groups, the baseline's {had}", True)
        return
    pairs = [(mine, other) for a, b in zip(ours, theirs, strict=True) for mine, other in zip(a, b, strict=True)]
    for key in sorted({key for mine, other in pairs for key in mine.keys() & other.keys()}):
        unequal = [
            (mine[key], other[key])
            for mine, other in pairs
            if key in mine and key in other and not _same(mine[key], other[key])
        ]
        if unequal:
            values, references = (_distinct(side) for side in zip(*unequal, strict=True))
            where = f" for {len(unequal)} of {len(pairs)} groups"
            yield Difference(name, f"{key.replace('_', ' ')} is {values}{where}, the baseline's {references}", True)


def _trainable_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Difference]:
    name = "trainable_parameters"
    count, reference = ours.get(name), theirs.get(name)
    if count is None or reference is None or count == reference:
        return
    total, reference_total = ours.get("parameters"), theirs.get("parameters")
    of = f" of {total:,}" if total is not None else ""
    baseline = "all" if reference == reference_total else f"{reference:,}"
    yield Difference(name, f"trains {count:,}{of} parameters, the baseline {baseline}", True)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):  # JSON has no tuples
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _distinct(values: Iterable[Any]) -> str:
    return " and ".join(dict.fromkeys(_shown(value) for value in values))


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_shown(item) for item in value)})"
    return str(value)


def _curve_of(rows: csv.DictReader[str], loss_key: str | None) -> LossCurve:
    columns = list(rows.fieldnames or [])
    if not columns:
        raise ValueError("it is empty. Give the metrics.csv of a CSVLogger")
    listed = ", ".join(columns[:30]) + (", ..." if len(columns) > 30 else "")
    if "step" not in columns:
        raise ValueError(f"it has no column 'step'; its columns are {listed}")
    if loss_key is None:
        loss_key = next((name for name in LOSS_COLUMNS if name in columns), None)
    if loss_key not in columns:
        wanted = " or ".join(LOSS_COLUMNS) if loss_key is None else loss_key
        raise ValueError(f"it has no loss column {wanted}; its columns are {listed}. Name the loss with loss_key")
    curve = LossCurve()
    for step, loss, samples, tokens in _with_totals(
        _merged_rows(rows, loss_key), SAMPLES_COLUMN in columns, TOKENS_COLUMN in columns
    ):
        curve.add(step, loss, samples, tokens)
    if not len(curve):
        raise ValueError(f"its column {loss_key!r} holds no loss")
    return curve


@dataclass
class _Row:
    step: int
    loss: float | None = None
    samples: int | None = None
    tokens: int | None = None


def _merged_rows(rows: csv.DictReader[str], loss_key: str) -> Iterator[_Row]:
    present: _Row | None = None
    for cells in rows:
        if not cells.get("step"):
            continue
        line = rows.line_num
        step = _whole(cells["step"], "step", line) + 1
        if step < 1:
            raise ValueError(f"line {line} has step {step - 1}; steps count from 0")
        if present is not None and step < present.step:
            raise ValueError(
                f"line {line} goes back from step {present.step - 1} to {step - 1}; the file holds more than one run"
            )
        if present is None or step > present.step:
            if present is not None:
                yield present
            present = _Row(step)
        loss = cells.get(loss_key)
        if loss:
            if present.loss is not None:
                raise ValueError(f"line {line} repeats the loss of step {step - 1}; the file holds more than one run")
            present.loss = _cell(loss, loss_key, line)
        if cells.get(SAMPLES_COLUMN):
            present.samples = _whole(cells[SAMPLES_COLUMN], SAMPLES_COLUMN, line)
        if cells.get(TOKENS_COLUMN):
            present.tokens = _whole(cells[TOKENS_COLUMN], TOKENS_COLUMN, line)
    if present is not None:
        yield present


def _with_totals(
    rows: Iterator[_Row], has_samples: bool, has_tokens: bool
) -> Iterator[tuple[int, float, int | None, int | None]]:
    """Give each row that has a loss its totals. Rows wait until the totals behind them are known."""
    samples, tokens = _Totals(has_samples), _Totals(has_tokens)
    pending: list[_Row] = []
    for row in rows:
        samples.see(row.step, row.samples)
        tokens.see(row.step, row.tokens)
        if row.loss is not None:
            pending.append(row)
        if len(pending) > PENDING_ROWS:
            samples.give_up(pending[0].step)
            tokens.give_up(pending[0].step)
        if pending and samples.reaches(pending[-1].step) and tokens.reaches(pending[-1].step):
            yield from _filled(pending, samples, tokens)
            pending.clear()
    yield from _filled(pending, samples, tokens)


def _filled(pending: Sequence[_Row], samples: _Totals, tokens: _Totals) -> Iterator[tuple[int, float, int | None, int | None]]:
    for row in pending:
        assert row.loss is not None
        yield row.step, row.loss, samples.at(row.step), tokens.at(row.step)
    samples.forget()
    tokens.forget()


class _Totals:
    """Known totals by step, and lines between them."""

    def __init__(self, known: bool) -> None:
        self._known = known
        self._knots: list[tuple[int, int]] = [(0, 0)]
        self._next = 0

    def see(self, step: int, total: int | None) -> None:
        if total is None or not self._known:
            return
        if total < self._knots[-1][1]:
            raise ValueError(
                f"a total shrinks from {self._knots[-1][1]} to {total} at step {step - 1}; the file holds more than one run"
            )
        if step == self._knots[-1][0]:
            self._knots[-1] = (step, total)
        else:
            self._knots.append((step, total))

    def give_up(self, step: int) -> None:
        """So many rows without a total cannot be kept waiting; this total is then unknown."""
        if not self.reaches(step):
            self._known = False

    def reaches(self, step: int) -> bool:
        return not self._known or self._knots[-1][0] >= step

    def forget(self) -> None:
        """Keep only the last two knots: what comes lies behind them."""
        del self._knots[:-2]
        self._next = 0

    def at(self, step: int) -> int | None:
        """The total after a step; steps must be asked in order."""
        if not self._known or len(self._knots) < 2:
            return None
        while self._next < len(self._knots) - 2 and self._knots[self._next + 1][0] < step:
            self._next += 1
        (a, before), (b, after) = self._knots[self._next], self._knots[self._next + 1]
        return before + round((after - before) * (step - a) / (b - a))


def _cell(text: str, column: str, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"line {line} has {text[:40]!r} in column {column!r}, which is not a number") from None


def _whole(text: str, column: str, line: int) -> int:
    value = _cell(text, column, line)
    if not math.isfinite(value):
        raise ValueError(f"line {line} has {text[:40]!r} in column {column!r}, which must be finite")
    if abs(value) > LARGEST_TOTAL or value != round(value):
        raise ValueError(f"line {line} has {text[:40]!r} in column {column!r}, which must be a whole number up to 2^53")
    return round(value)


def _unreadable(path: str | os.PathLike[str], error: OSError) -> BaselineError:
    if isinstance(error, FileNotFoundError):
        return BaselineError(f"{path}: there is no such file. Record a baseline with BaselineRecorder, or correct the path.")
    if isinstance(error, IsADirectoryError):
        return BaselineError(f"{path}: a directory, not a file. Give the file in it.")
    return BaselineError(f"{path}: it cannot be read: {error.strerror or error}.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}, not a mapping")
    return value


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be text")
    return value


def _strings(value: Any, name: str) -> dict[str, str]:
    return {key: _string(item, f"{name}[{key!r}]") for key, item in _mapping(value, name).items()}


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")


def _check_positions(name: str, value: Mapping[str, Any]) -> None:
    for key in value:
        if not (key.isascii() and key.isdigit() and key[0] != "0" and len(key) <= 20):
            raise ValueError(f"{name} has the key {key[:40]!r}; its keys are whole numbers from 1, as text")


def _settings(value: Any) -> dict[str, Any]:
    """The settings that this version knows, each of them checked."""
    given = _mapping(value, "settings")
    names = (*NUMBERS, *TEXTS, "learning_rates", "hyperparameters")
    known = {name: given[name] for name in names if given.get(name) is not None}
    for name in NUMBERS:
        if name in known:
            _check_number(f"settings[{name!r}]", known[name])
    for name in TEXTS:
        if name in known:
            for text in known[name] if isinstance(known[name], list) else [known[name]]:
                _string(text, f"settings[{name!r}]")
    rates = _mapping(known.get("learning_rates", {}), "settings['learning_rates']")
    _check_positions("settings['learning_rates']", rates)
    for step, rate in rates.items():
        _check_number(f"settings['learning_rates'][{step!r}]", rate)
    _check_hyperparameters(known.get("hyperparameters", []))
    return known


def _check_hyperparameters(optimizers: Any) -> None:
    name = "settings['hyperparameters']"
    if not isinstance(optimizers, list) or not all(
        isinstance(groups, list) and all(isinstance(group, dict) for group in groups) for groups in optimizers
    ):
        raise ValueError(f"{name} must be a list of optimizers, each a list of groups, each a mapping")
    for key, value in itertools.chain.from_iterable(group.items() for groups in optimizers for group in groups):
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, bool):
                _check_number(f"{name}, {key}", item)


def _validation(value: Any) -> dict[str, list[Mapping[str, float | int | None]]]:
    checked = {}
    for name, rows in _mapping(value, "validation").items():
        if not isinstance(rows, list):
            raise ValueError(f"validation[{name!r}] is a {type(rows).__name__}, not a list")
        for row in rows:
            for key, number in _mapping(row, f"validation[{name!r}]").items():
                if number is not None:
                    _check_number(f"validation[{name!r}], {key}", number)
        checked[name] = rows
    return checked
