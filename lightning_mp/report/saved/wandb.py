"""Read an offline run of Weights & Biases from its `.wandb` file, with wandb's own reader in a process of its own.

Its history is written as a CSV file like that of Lightning's `CSVLogger` first, so that there is one way to read both
(:mod:`lightning_mp.report.saved.log`). Its config says what was run, and its summary how it ended and how it was judged.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_mp.callbacks.wandb import STEP, is_number, offline_records
from lightning_mp.numerics.baseline import LOSS_COLUMNS, BaselineError
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.report.saved.log import (
    BYTES_PER_PARAMETER,
    LOG2_SCALE,
    MONITORED,
    PEAK_LABELS,
    PEAK_RSS,
    RATE,
    SKIPPED,
    Columns,
    curve_of,
    judged,
    log_run,
    read_columns,
)
from lightning_mp.report.saved.run import (
    SavedRun,
    SourceError,
    flat,
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
from lightning_mp.report.story import STATUSES, UNKNOWN_PRECISION, Exponents, RunStory

EXPONENTS = "gradients/exponents"


@dataclass
class _Offline:
    """What an offline run's file holds beside its history."""

    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exponents: Exponents | None = None
    exit_code: int | None = None
    losses: set[str] = field(default_factory=set)
    is_empty: bool = True


def read_wandb(path: Path) -> SavedRun:
    """The offline run of Weights & Biases in a `.wandb` file.

    Raises:
        SourceError: wandb cannot read the file, or it holds neither a loss nor a key of our monitors.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "history.csv"
        try:
            offline = _write_table(path, table)
            columns = read_columns(table, offline.losses)
            if not columns.has_any:
                raise SourceError(
                    f"{path}: its history has no loss ({', '.join(LOSS_COLUMNS)}) and no key of our monitors. Log the training "
                    "loss, or attach lightning_mp.monitors()."
                )
            curve = curve_of(table, columns, columns.losses[0] if columns.losses else None)
            return _saved_offline(path, offline, curve, columns)
        except ValueError as error:  # SourceError among them
            reason = str(error).removeprefix(f"{table}: ").removeprefix(f"{path}: ")
            remedy = "" if isinstance(error, SourceError) else ". Give the .wandb file of another run"
            raise SourceError(f"{path}: {reason}{remedy}") from error


def _saved_offline(path: Path, offline: _Offline, curve: LossCurve, columns: Columns) -> SavedRun:
    ours = mapping(offline.config.get("lightning_mp"), "config.lightning_mp")
    described = {**offline.config, **ours}
    precision = text(described, "precision") or UNKNOWN_PRECISION
    name = text(offline.run, "display_name") or text(offline.run, "run_id") or path.stem
    saved = log_run(name, str(path.resolve().parent), precision, curve, columns)
    story = saved.story
    # a comparison's `config` is what all its precisions share, so its precision is none of theirs
    hidden = ("lightning_mp", "versions", "device", "precision", "monitors", "config")
    what = {key: value for key, value in described.items() if key not in hidden}
    status, error = _end(offline, story)
    summary = offline.summary
    if not columns.rates.items:
        story = replace(story, **_compared(summary))
    saved = replace(
        saved,
        story=replace(
            story,
            status=status,
            error=error,
            exponents=offline.exponents,
            device=text(described, "device"),
            versions=texts(described.get("versions"), "versions"),
            what=flat(what),
        ),
    )
    return _with_own_verdict(saved, path, summary)


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a comparison puts into the summary of its runs, which have no monitors."""
    cuda, resident = number(summary, "memory/peak_cuda_gib"), number(summary, "memory/peak_rss_mib")
    size = number(summary, BYTES_PER_PARAMETER)
    found: dict[str, Any] = {
        "tokens_per_s": number(summary, RATE),
        "step_time_ms": number(summary, "throughput/step_time_median_ms"),
        "bytes_per_parameter": None if size is None else {"total": size},
        "skipped_count": whole(summary, SKIPPED),
        "peak_gib": cuda if cuda is not None or resident is None else resident / 2**10,
    }
    if cuda is None and resident is not None:
        found["peak_label"] = PEAK_LABELS[PEAK_RSS]
    return {name: value for name, value in found.items() if value is not None}


def _end(offline: _Offline, story: RunStory) -> tuple[str, str | None]:
    """How the run ended, and why not well."""
    said = offline.summary.get("status")
    if said in STATUSES:  # a comparison says it
        return said, text(offline.summary, "error")
    if story.status != "ok":
        return story.status, story.error
    if offline.exit_code is None:
        return "interrupted", "its file has no end: the run still goes on, or it was killed."
    return ("ok", None) if offline.exit_code == 0 else ("failed", f"the run ended with exit status {offline.exit_code}.")


def _write_table(path: Path, table: Path) -> _Offline:
    """Write the numbers of an offline run's history as a CSV file; what else the file holds is returned."""
    found = _Offline()
    names = ["step", *LOSS_COLUMNS, *MONITORED]
    before: float | None = None  # what wandb's own step counts from
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for record in _records(path):
            found.is_empty = False
            kind = record.get("type")
            body = mapping(record.get(str(kind)), str(kind))
            if kind == "run":
                found.run |= body
                found.config |= _updates(mapping(body.get("config"), "config"))
            elif kind == "config":
                found.config |= _updates(body)
            elif kind == "summary":
                found.summary |= _updates(body)
            elif kind == "exit":
                found.exit_code = int(number(body, "exit_code") or 0)
            elif kind == "history":
                item = mapping(body.get("item"), "history")
                row = {name: item[name] for name in names[1:] if is_number(item.get(name))}
                found.losses.update(row.keys() & set(LOSS_COLUMNS))
                found.exponents = _exponents(item) or found.exponents
                if not row:
                    continue
                step = number(item, STEP)
                if step is None:  # whoever logs by optimizer steps counts from 1
                    own = number(item, "_step") or 0.0
                    before = min(own, 1.0) if before is None else before
                    step = own - before
                writer.writerow({**row, "step": int(step)})
    if found.is_empty:
        raise SourceError(f"{path}: it holds no records. Give the .wandb file of a run that has logged something.")
    return found


def _updates(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(body.get("update"), "update")


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        yield from offline_records(path)
    except BaselineError as error:
        raise SourceError(str(error)) from error


def _exponents(item: Mapping[str, Any]) -> Exponents | None:
    """The histogram of gradient exponents in a row of the history. What fp16 has flushed is not in it."""
    edges, counts = item.get(f"{EXPONENTS}.bins"), item.get(f"{EXPONENTS}.values")
    if edges is None or counts is None:
        return None
    log2 = item.get(LOG2_SCALE)
    scale = 2.0**log2 if isinstance(log2, int | float) and abs(log2) < 1000 else 1.0
    return Exponents(numbers(edges, "bins"), numbers(counts, "values"), 0.0, scale)


def _with_own_verdict(saved: SavedRun, path: Path, summary: Mapping[str, Any]) -> SavedRun:
    """The run with the verdict that `DivergenceMonitor` left in its summary, and the table of blocks in its media files."""
    if "divergence/verdict" not in summary:
        return saved
    try:
        blocks, axis = _table_blocks(path, summary.get("divergence/blocks.path"))
    except ValueError as error:
        blocks, axis = [], None
        saved = noted(saved, f"The table of its blocks cannot be read: {error}")
    try:
        return judged(saved, _summary_verdict(summary, blocks), blocks, axis)
    except ValueError as error:
        return noted(saved, f"Its own verdict cannot be read: {error}")


def _summary_verdict(summary: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A verdict as plain containers. Margin and alarm are not in the summary; they follow from the blocks."""
    alarm = next((block for block in blocks if (number(block, "evidence") or 0.0) >= 1), None)
    low, high = summary.get("divergence/verdict_low"), summary.get("divergence/verdict_high")
    tail = [margin for block in blocks[-max(1, len(blocks) // 5) :] if (margin := number(block, "margin")) is not None]
    return {
        "status": summary["divergence/verdict"],
        "gap": summary.get("divergence/verdict_gap"),
        "interval": None if low is None or high is None else [low, high],
        "margin": statistics.fmean(tail) if tail else None,
        "smallest_visible_gap": summary.get("divergence/smallest_visible_gap"),
        "coverage": summary.get("divergence/coverage"),
        "paired": summary.get("divergence/paired"),
        "seeds": summary.get("divergence/seeds"),
        "alarm": alarm and {"block": alarm["index"], "position": alarm["end"], "step": None, "gap": alarm.get("gap")},
        "explanation": summary.get("divergence/explanation"),
    }


def _table_blocks(path: Path, logged: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of the table of blocks as mappings, and the axis that their ends are on. They do not hold the noise scale."""
    if not isinstance(logged, str):
        return [], None
    files = path.resolve().parent / "files"
    table = (files / logged).resolve()
    if not table.is_relative_to(files):
        raise ValueError(f"{logged} lies outside the run's folder")
    content = mapping(read_json(table), str(table))
    axis, *names = sequence(content.get("columns"), "columns") or [None]
    rows = [sequence(row, "a row") for row in sequence(content.get("data"), "data")]
    return [{"index": index, **dict(zip(("end", *names), row, strict=True))} for index, row in enumerate(rows)], axis
