"""From saved runs to the story that the report page tells.

A source is the folder of a comparison, a log of Lightning's `CSVLogger`, an offline run of Weights & Biases, or the file of a
`BaselineRecorder`; several can be mixed. Each is read by itself (:mod:`~lightning_mp.report.saved.comparison`,
:mod:`~lightning_mp.report.saved.log`, :mod:`~lightning_mp.report.saved.wandb`). Here they are set beside each other: they get
names that differ and one axis, and a run that was not judged while it trained is judged now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from lightning_mp.numerics.baseline import (
    SCHEMA,
    Baseline,
    BaselineError,
    BaselineRun,
    differences,
    is_paired,
    join_baselines,
    read_baseline,
)
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import AXES, Axis, DivergenceTest, Rule
from lightning_mp.report.saved.comparison import FILE, SavedComparison, read_comparison
from lightning_mp.report.saved.log import PEAK_LABELS, PEAK_RSS, RUN_PEAK, read_csv_log
from lightning_mp.report.saved.run import SavedRun, SourceError, flat, known_axes, loss_series, noted, positions, tail_loss
from lightning_mp.report.saved.wandb import read_wandb
from lightning_mp.report.story import RunStory, Series, Story

__all__ = ["SourceError", "story_of"]

LOG = "metrics.csv"
LOOKED_FOR = (
    f"{FILE} (of `lightning-mp compare`), {LOG} (of Lightning's CSVLogger) and *.wandb (of an offline run of Weights & Biases)"
)
#: Kept out of the settings that are shown: they are long, and there to be compared.
NOT_SHOWN = ("hyperparameters", "learning_rates")


def story_of(
    paths: Sequence[Path],
    *,
    baseline: Baseline | None = None,
    reference: str | None = None,
    force: bool = False,
    rule: Rule | None = None,
    title: str | None = None,
    command: str = "",
) -> Story:
    """The story of saved runs.

    With `baseline`, every run is judged by it, from its curve. Otherwise a run that was judged while it trained keeps its
    verdict, and any other is judged against the reference and its further seeds. Losses are aligned on the first of tokens,
    samples and steps that all curves know. Names are made to differ by the folders that the runs lie in, or by numbers.

    Args:
        paths: for each source, the folder of `lightning-mp compare`; a CSV of Lightning's `CSVLogger`, or the folder of its
            `metrics.csv`; the `.wandb` file of an offline run, or its folder; or the JSON file of a `BaselineRecorder`.
        baseline: what to judge against.
        reference: the name of the run that ratios refer to. By default the only fp32 run, if there is exactly one.
        force: judge although settings differ; also a run that was NOT COMPARABLE when it was judged.
        rule: blocks, margins and error rate of the test.
        title: the page's heading; by default the comparison's name.
        command: the command that repeats the runs; by default the comparison's.

    Raises:
        SourceError: a source is missing or broken; the message begins with its path. A single broken run of a comparison is a
            run with status "failed" instead.
        ValueError: there is no source, or no run has the name of the reference.

    Example:
        >>> import tempfile
        >>> from lightning_mp.numerics.baseline import write_baseline
        >>> curve = LossCurve()
        >>> for step in range(1, 101):
        ...     curve.add(step, 5.0 - step / 100, samples=8 * step)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_baseline(f"{folder}/fp32.json", Baseline((BaselineRun(curve, seed=1),), "fp32.json"))
        ...     story = story_of([Path(folder, "fp32.json")])
        >>> story.axis, story.reference, story.runs[0].loss.y[-1]
        ('samples', 'fp32', 4.0)
    """
    if not paths:
        raise ValueError("there is no run to report; give at least one folder, CSV, .wandb file or baseline")
    found = [_read(Path(path)) for path in paths]
    runs = [run for source in found for run in (source.runs if isinstance(source, SavedComparison) else source)]
    comparisons = [source for source in found if isinstance(source, SavedComparison)]
    names = _names(runs)
    chosen = _reference(names, runs, reference)
    against = baseline or _baseline_of(names, runs, chosen)
    axis = _axis(runs, against)
    judged = [
        _judge(run, against, axis, force=force, rule=rule, is_explicit=baseline is not None)
        if name != chosen or baseline is not None
        else run
        for name, run in zip(names, runs, strict=True)
    ]
    return Story(
        title=title or _title(found, comparisons, names),
        created=f"{datetime.now():%Y-%m-%d %H:%M}",
        command=command or "\n".join(dict.fromkeys(comparison.command for comparison in comparisons if comparison.command)),
        axis=axis,
        reference=chosen,
        runs=[run.told(name, axis) for name, run in zip(names, judged, strict=True)],
        baseline_curves=_baseline_curves(against, axis, is_explicit=baseline is not None),
        judged_by=_other_baseline(
            judged, None if chosen is None else runs[names.index(chosen)], against, is_given=baseline is not None
        ),
    )


# --- what a path is ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> SavedComparison | list[SavedRun]:
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise SourceError(f"{path}: there is no such file or folder. Correct the path.")
    if path.name == FILE:
        return read_comparison(path.parent)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return [read_csv_log(path)]
    if suffix == ".wandb":
        return [read_wandb(path)]
    if suffix == ".json":
        return _read_baseline(path)
    raise SourceError(f"{path}: a saved run is a folder or a file that ends in .csv, .wandb or .json. Give one of these.")


def _read_folder(folder: Path) -> SavedComparison | list[SavedRun]:
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise SourceError(f"{folder}: it cannot be read: {error.strerror or error}. Check its permissions.") from error
    if FILE in files:
        return read_comparison(folder)
    if LOG in files:
        return [read_csv_log(folder / LOG)]
    offline = [folder / name for name in files if name.endswith(".wandb")]
    if len(offline) == 1:
        return [read_wandb(offline[0])]
    if offline:
        raise SourceError(f"{folder}: it holds {len(offline)} .wandb files. Give one of them, such as {offline[0].name}.")
    below = sorted(path for pattern in (FILE, LOG, "*.wandb") for path in folder.glob(f"*/{pattern}"))
    remedy = f"Give {below[0].parent}" if below else "Give the folder of a saved run, or the file of a BaselineRecorder"
    raise SourceError(f"{folder}: no saved run is in it; looked for {LOOKED_FOR}. {remedy}.")


def _read_baseline(path: Path) -> list[SavedRun]:
    try:
        found = read_baseline(path)
    except BaselineError as error:
        raise SourceError(
            f"{error} (A .json file is read as a baseline, of schema {SCHEMA!r}, unless it is named {FILE}.)"
        ) from error
    name = path.resolve().parent.name if path.stem == "baseline" else path.stem
    several = len(found.runs) > 1
    return [_recorded(f"{name} seed {run.seed}" if several and run.seed is not None else name, path, run) for run in found.runs]


def _recorded(name: str, path: Path, run: BaselineRun) -> SavedRun:
    """The run in a baseline file."""
    curve, numbers = run.curve, run.numbers
    status, error = "ok", None
    if curve.nonfinite_steps:
        status, error = "non-finite", f"the loss was not finite at step {curve.first_nonfinite_step}."
    elif run.status != "finished":
        stopped = "it stopped before its planned end" if run.status == "stopped" else "it still goes on, or it was killed"
        status, error = "interrupted", f"{stopped}, at step {curve.last_step}."
    settings = {"seed": run.seed, **{key: value for key, value in run.settings.items() if key not in NOT_SHOWN}}
    peak = "peak_gib" if "peak_gib" in numbers else "peak_rss_gib"
    story = RunStory(
        name,
        run.precision,
        status=status,
        error=error,
        tail_loss=tail_loss(curve),
        step_time_ms=numbers.get("step_time_ms"),
        tokens_per_s=numbers.get("tokens_per_s"),
        bytes_per_parameter={"total": numbers["bytes_per_parameter"]} if "bytes_per_parameter" in numbers else None,
        peak_gib=numbers.get(peak),
        peak_label=PEAK_LABELS[RUN_PEAK if peak == "peak_gib" else PEAK_RSS],
        what=flat({key.replace("_", " "): value for key, value in settings.items()}),
        device=run.device or None,
        versions=run.versions,
    )
    return SavedRun(story, str(path.resolve().parent), run)


# --- beside each other -------------------------------------------------------------------------------------------------------


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """A name for each run that no other has: its own; where others share it, with its folder, or else with a number."""
    own = [run.story.name for run in runs]
    names: list[str] = []
    for run in runs:
        others = {other.place for other in runs if other is not run and other.story.name == run.story.name}
        names.append(f"{run.story.name} ({_ending(run.place, others)})" if others - {run.place} else run.story.name)
    unique: list[str] = []
    for name in names:
        taken = {*unique, *(other for other in own if own.count(other) == 1 and other != name)}
        unique.append(next(text for n in itertools.count(1) if (text := _numbered(name, n)) not in taken))
    return unique


def _ending(place: str, others: Iterable[str]) -> str:
    """The shortest end of a path that no other one has."""
    parts, rest = Path(place).parts, [Path(other).parts for other in others if other != place]
    length = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(other[-n:] != parts[-n:] for other in rest))
    return "/".join(parts[-length:])


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} {number}"


def _reference(names: Sequence[str], runs: Sequence[SavedRun], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in names:
            raise ValueError(f"no run is named {asked!r}; the reference can be one of {', '.join(map(repr, names))}")
        return asked
    fp32 = [name for name, run in zip(names, runs, strict=True) if run.is_fp32 and run.story.status != "failed"]
    return fp32[0] if len(fp32) == 1 else None


def _baseline_of(names: Sequence[str], runs: Sequence[SavedRun], reference: str | None) -> Baseline | None:
    """The reference with its further seeds, if it has a curve."""
    if reference is None:
        return None
    run = runs[names.index(reference)]
    if run.run is None or not any(run.run.curve.counts):
        return None
    first = Baseline((run.run,), reference)
    try:
        return join_baselines([first, *(Baseline((seed,), f"{reference}-seed{seed.seed}") for seed in run.seeds)])
    except BaselineError:  # further seeds of another config, or the same one again: they make no band
        return first


def _other_baseline(
    runs: Sequence[SavedRun], reference: SavedRun | None, against: Baseline | None, *, is_given: bool
) -> str | None:
    """What the verdicts are against, if not all are against the reference."""
    others: dict[str, None] = {}
    for run in runs:
        is_of_reference = (
            reference is not None
            and not is_given
            and (
                (run.judged_by == reference.story.name and run.place == reference.place)  # within its comparison
                or (against is not None and run.judged_by == against.source)  # now
            )
        )
        if run.story.verdict is not None and not is_of_reference:
            others[run.judged_by or "a baseline that is not known"] = None
    return ", ".join(others) or None


def _axis(runs: Sequence[SavedRun], against: Baseline | None) -> Axis:
    """The best axis that all curves know."""
    curves = [run.run.curve for run in runs if run.run is not None] + [run.curve for run in (against.runs if against else ())]
    return next((axis for axis in AXES if all(axis in known_axes(curve) for curve in curves if len(curve))), "steps")


def _judge(
    saved: SavedRun, against: Baseline | None, axis: Axis, *, force: bool, rule: Rule | None, is_explicit: bool
) -> SavedRun:
    """The run with a verdict, if there is something to judge it against and it has none that stands."""
    own = saved.story.verdict
    stands = own is not None and not is_explicit and not (force and own.status == "NOT COMPARABLE")
    if stands or saved.run is None or against is None or not any(saved.run.curve.counts):
        return saved
    paired = next((index for index, run in enumerate(against.runs) if is_paired(run, saved.run)), None)
    try:
        test = DivergenceTest(against, axis=axis, paired_with=paired, rule=rule)
    except BaselineError as error:
        if is_explicit:
            raise SourceError(str(error)) from error
        return noted(saved, f"It was not judged: {error}")
    _feed(test, saved.run.curve, has_diverged=saved.story.status == "non-finite")
    verdict = test.verdict(
        differences=differences(against.runs[paired or 0], saved.run),
        force=force,
        skipped_steps=saved.story.skipped_count or 0,
    )
    story = replace(saved.story, verdict=verdict, blocks=test.blocks)
    return replace(saved, story=story, axis=axis, judged_by=against.source)


def _feed(test: DivergenceTest, curve: LossCurve, *, has_diverged: bool) -> None:
    """Give a curve to a test: the mean of each group at the step where it was taken, then the group's end."""
    before = dict.fromkeys(AXES, 0)
    ends = {axis: positions(curve, axis) for axis in AXES}
    groups = zip(curve.steps, curve.losses, curve.mean_steps, strict=True)
    for index, (end, loss, mean_step) in enumerate(groups):
        at = {axis: values[index] if values else None for axis, values in ends.items()}
        middle = end if mean_step is None else int(mean_step)
        if middle < end:
            share = (middle - before["steps"]) / (end - before["steps"])
            inside = {
                axis: None if last is None else before[axis] + round(share * (last - before[axis])) for axis, last in at.items()
            }
            test.add(middle, loss, inside["samples"], inside["tokens"])
            loss = None
        test.add(end, loss, at["samples"], at["tokens"])
        before = {axis: last or 0 for axis, last in at.items()}
    if has_diverged:
        test.nonfinite_step = curve.first_nonfinite_step


def _baseline_curves(against: Baseline | None, axis: Axis, *, is_explicit: bool) -> list[Series]:
    """The curves of the baseline's seeds, unless the only one is a run of the story."""
    if against is None or (len(against.runs) == 1 and not is_explicit):
        return []
    found: Iterable[Series | None] = (loss_series(run.curve, axis) for run in against.runs)
    return [series for series in found if series is not None]


def _title(
    found: Sequence[SavedComparison | list[SavedRun]], comparisons: Sequence[SavedComparison], names: Sequence[str]
) -> str:
    if len(found) == len(comparisons) == 1:
        return comparisons[0].name
    return names[0] if len(names) == 1 else f"{len(names)} saved runs"
