"""What the divergence monitor has to do with Weights & Biases: its pictures, and baselines that are kept there.

It stands beside the callbacks, as they cannot import the report, which builds on them. wandb is imported when it is used.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mp.numerics.baseline import Baseline, BaselineError, read_baseline, read_csv, write_baseline
from lightning_mp.numerics.divergence import Block

PREFIX = "wandb:"
CACHE_VARIABLE = "LIGHTNING_MP_CACHE"
STEP = "trainer/global_step"
COLUMNS = ("end", "candidate", "baseline", "gap", "margin", "evidence", "band_low", "band_high")


# --- pictures ----------------------------------------------------------------------------------------------------------------


def log_blocks(trainer: Trainer, blocks: Sequence[Block], axis: str) -> None:
    """Log the curves of candidate and baseline in one picture, and the table of blocks, to each Weights & Biases logger.

    Args:
        trainer: whose loggers get them, on rank 0.
        blocks: at least one.
        axis: what the blocks' ends count.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    if not trainer.is_global_zero or not loggers:
        return
    import wandb

    ends = [block.end for block in blocks]
    curves = {"candidate": [block.candidate for block in blocks], "baseline": [block.baseline for block in blocks]}
    for logger in loggers:
        logger.experiment.log(
            {
                "divergence/curves": wandb.plot.line_series(
                    xs=ends, ys=list(curves.values()), keys=list(curves), title="Loss against the baseline", xname=axis
                ),
                "divergence/blocks": wandb.Table(
                    columns=[axis, *COLUMNS[1:]], data=[[getattr(block, name) for name in COLUMNS] for block in blocks]
                ),
            }
        )


# --- baselines ---------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where what was fetched is kept: ``LIGHTNING_MP_CACHE``, or ``lightning_mp`` in the user's cache folder."""
    own = os.environ.get(CACHE_VARIABLE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_mp"


def read_reference(reference: str, loss_key: str | None = None) -> Baseline:
    """The baseline that a reference to Weights & Biases means; from the cache if it is there, and into it if not.

    Args:
        reference: ``wandb:entity/project/name:alias`` is an artifact that holds the file of a ``BaselineRecorder``;
            ``wandb:entity/project/run_id`` is a run, whose history is read.
        loss_key: which key of a run's history is the loss; see :func:`~lightning_mp.numerics.baseline.read_csv`.

    Raises:
        BaselineError: it is neither in the cache nor to be fetched, or is no baseline. The message has the remedy.
    """
    name = reference.removeprefix(PREFIX)
    is_artifact = ":" in name
    if len(name.split("/")) != 3 or not all(name.split("/")):
        raise BaselineError(
            f"{reference}: not a reference; write wandb:entity/project/name:alias for an artifact, or"
            " wandb:entity/project/run_id for a run"
        )
    kept = cache_folder() / "wandb" / (quote(name, safe="") + (".json" if is_artifact else ".csv"))
    if kept.exists():
        rank_zero_info(f"The baseline {reference} is taken from {kept}. Delete the file to fetch it again.")
    else:
        _fetch(reference, name, is_artifact, kept)
    found = read_baseline(kept) if is_artifact else read_csv(kept, loss_key)
    return replace(found, source=reference)


def _fetch(reference: str, name: str, is_artifact: bool, kept: Path) -> None:
    import wandb

    remedy = (
        f"It is not in the cache either ({kept}). Fetch it once on a machine that is online and copy the file there, or pass"
        " the path of the file that a BaselineRecorder wrote"
    )
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        raise BaselineError(f"{reference}: cannot be fetched, as WANDB_MODE is {os.environ['WANDB_MODE']!r}. {remedy}")
    try:
        if is_artifact:
            _fetch_artifact(wandb.Api().artifact(name), kept)
        else:
            _write_history(wandb.Api().run(name).scan_history(), kept)
    except BaselineError:
        raise
    except (wandb.errors.Error, ValueError, OSError) as error:  # OSError: what `requests` raises without a network
        raise BaselineError(f"{reference}: cannot be fetched ({type(error).__name__}: {error}). {remedy}") from error


def _fetch_artifact(artifact: Any, kept: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(Path(artifact.download(root=folder)).rglob("*.json"))
        if len(files) != 1:
            raise BaselineError(f"{artifact.name}: the artifact holds {len(files)} JSON files; a baseline is exactly one")
        write_baseline(kept, read_baseline(files[0]))


def read_offline(path: str | os.PathLike[str], loss_key: str | None = None) -> Baseline:
    """The baseline in the history of an offline run, a ``.wandb`` file. wandb's own reader reads it.

    Args:
        path: the file.
        loss_key: which key of the history is the loss; see :func:`~lightning_mp.numerics.baseline.read_csv`.

    Raises:
        BaselineError: the file is missing or broken, or has no such key.
    """
    if not Path(path).is_file():
        raise BaselineError(f"{path}: {'is a folder' if Path(path).is_dir() else 'there is no such file'}")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "history.csv"
        _write_history(offline_history(path), table)
        try:
            found = read_csv(table, loss_key)
        except BaselineError as error:
            raise BaselineError(f"{path}: {str(error).removeprefix(f'{table}: ')}") from error
    return replace(found, source=str(path))


def offline_history(path: str | os.PathLike[str]) -> Iterable[Mapping[str, Any]]:
    """The rows of an offline run's history, in order.

    Raises:
        BaselineError: wandb cannot read the file.
    """
    return (record["history"]["item"] for record in offline_records(path) if record.get("type") == "history")


def offline_records(path: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    """The records of an offline run's file, in order. The format is wandb's own, so its own reader reads it, in a process.

    Raises:
        BaselineError: it cannot.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8") as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
            code = process.wait()
        except ValueError as error:
            raise BaselineError(f"{path}: wandb's reader printed what is no record ({error}). Is it a .wandb file?") from error
        finally:
            process.kill()
        errors.seek(0)
        reason = errors.read().strip().splitlines()[-1:] or ["no reason given"]
    if code != 0:
        raise BaselineError(f"{path}: wandb cannot read it ({reason[0]}). Give the .wandb file of a run.")


def _write_history(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the numbers of a history as a CSV like that of Lightning's ``CSVLogger``, whose steps count from 0."""
    kept = [(row.get(STEP), row["_step"], {name: row[name] for name in row if is_number(row[name])}) for row in rows]
    has_steps = any(step is not None for step, _, _ in kept)
    # without Lightning's steps there are wandb's own, which whoever logs by optimizer steps counts from 1
    first = 0 if has_steps else min((own for _, own, _ in kept), default=0)
    table = [
        {**numbers, "step": int(own if step is None else step) - min(first, 1)}
        for step, own, numbers in kept
        if not has_steps or step is not None
    ]
    names = dict.fromkeys(("step", *(name for row in table for name in row)))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(sorted(table, key=lambda row: row["step"]))
    partial.replace(path)


def is_number(value: Any) -> bool:
    """Whether the value is a number; wandb writes those that JSON does not have as texts."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("NaN", "Infinity", "-Infinity")
