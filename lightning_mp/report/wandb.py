"""Log a comparison to Weights & Biases: one run for each precision, all in one group. Only this module imports wandb.

The parent process logs, from the events that a worker sends. So wandb is not in the process that is measured, a
candidate that dies still has its curve, and one run is finished before the next begins.

| key                       | unit   | |
|---------------------------|--------|---|
| `train/loss`              | nats, or the loss's own unit | true loss of an optimizer step |
| `throughput/tokens`       | tokens | consumed so far; the x axis of every other key |
| `throughput/step_time_ms` | ms     | whole optimizer step, without waiting for data |

Summary: `memory/bytes_per_parameter`, `throughput/tokens_per_s`, `throughput/step_time_median_ms`, `train/tail_loss`;
also `divergence/verdict` and what belongs to it, with the names of `callbacks.divergence`; `memory/peak_rss_mib`,
`memory/peak_cuda_gib` on CUDA, `status`, and `error` if there was one. One more run of the group, `report`, has the pictures
of the report. Offline it needs no network and no key.
"""

from __future__ import annotations

import io
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.report.results import OK, Result

if TYPE_CHECKING:
    import wandb

MODES = ("offline", "online", "disabled")
Mode = Literal["offline", "online", "disabled"]
PROJECT = "lightning-mp"
TOKENS = "throughput/tokens"
LOSS = "train/loss"
STEP_TIME = "throughput/step_time_ms"


class RunLog(Protocol):
    """Where one precision's run is logged."""

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Add to the run's config; values become strings and numbers."""

    def log(self, records: Sequence[StepRecord]) -> None:
        """Log a chunk of steps."""

    def finish(self, result: Result) -> None:
        """Write the summary and close the run."""


class NoRunLog:
    """Logs nothing."""

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Do nothing."""

    def log(self, records: Sequence[StepRecord]) -> None:
        """Do nothing."""

    def finish(self, result: Result) -> None:
        """Do nothing."""


class WandbRunLog:
    """Logs to a wandb run of its own, whose files lie in `folder/wandb`.

    Args:
        mode: "offline" or "online".
        name: of the run.
        group: of all runs of one comparison.
        folder: where wandb puts its files.

    Raises:
        Exception: whatever wandb raises when it cannot start, such as a missing key when online.
    """

    def __init__(self, mode: Mode, name: str, group: str, folder: Path) -> None:
        import wandb

        self._run: wandb.Run = wandb.init(
            project=PROJECT,
            name=name,
            group=group,
            job_type="compare",
            dir=str(folder),
            mode=mode,
            id=uuid.uuid4().hex[:8],  # also where WANDB_RUN_ID is set: each precision is a run of its own
            # the parent's own output and load say nothing about the run
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False),
        )
        self._tokens = 0
        self._defined = False

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Add to the run's config; values become strings and numbers."""
        self._run.config.update(plain(settings), allow_val_change=True)

    def log(self, records: Sequence[StepRecord]) -> None:
        """Log a chunk of steps."""
        for record in records:
            self._define(has_tokens=record.tokens is not None)
            self._tokens += record.tokens or 0
            values = {LOSS: record.loss, STEP_TIME: record.step_time_ms}
            if record.tokens is not None:
                values[TOKENS] = self._tokens
            self._run.log({key: value for key, value in values.items() if value is not None}, step=record.step)

    def finish(self, result: Result) -> None:
        """Write the summary and close the run."""
        self._run.summary.update(summary(result))
        self._run.finish(exit_code=0 if result.status == OK else 1)

    def log_images(self, images: Mapping[str, Any]) -> None:
        """Log pictures, and close the run."""
        self._run.log(dict(images))
        self._run.finish()

    def _define(self, *, has_tokens: bool) -> None:
        if self._defined:
            return
        self._defined = True
        # exact names: a glob would also catch the axis itself. Without tokens the axis stays wandb's step.
        axis = TOKENS if has_tokens else None
        if axis:
            self._run.define_metric(TOKENS)
        for key in (LOSS, STEP_TIME):
            self._run.define_metric(key, step_metric=axis)


def open_run_log(mode: Mode, name: str, group: str, folder: Path) -> tuple[RunLog, str | None]:
    """Open the log for one precision; if wandb cannot start, log nothing and say why.

    Returns:
        the log, and a sentence if it is not the one that was asked for.
    """
    if mode == "disabled":
        return NoRunLog(), None
    try:
        return WandbRunLog(mode, name, group, folder), None
    except Exception as error:  # a comparison must not die of its logger, whatever it raises
        return NoRunLog(), f"not logged to Weights & Biases ({type(error).__name__}: {error}); see --wandb."


def log_pictures(mode: Mode, group: str, folder: Path, pictures: Mapping[str, bytes]) -> str | None:
    """Log the pictures of a report to a run of their own.

    Args:
        mode: "offline", "online" or "disabled".
        group: of the comparison.
        folder: where wandb puts its files.
        pictures: PNG files by name.

    Returns:
        a sentence if they could not be logged.
    """
    if mode == "disabled" or not pictures:
        return None
    try:
        import wandb
        from PIL import Image

        log = WandbRunLog(mode, "report", group, folder)
        images = {f"report/{name}": wandb.Image(Image.open(io.BytesIO(png))) for name, png in pictures.items()}
        log.log_images(images)
    except Exception as error:  # a comparison must not die of its logger, whatever it raises
        return f"The pictures were not logged to Weights & Biases ({type(error).__name__}: {error})."
    return None


def summary(result: Result) -> dict[str, str | float]:
    """The summary of a run, without what is unknown."""
    numbers = result.summary
    verdict: Mapping[str, Any] = result.verdict or {}
    low, high = verdict.get("interval") or (None, None)
    values: dict[str, Any] = {
        "status": result.status,
        "error": result.error,
        "memory/bytes_per_parameter": result.bytes_per_parameter,
        "memory/peak_rss_mib": result.peak_rss_bytes and result.peak_rss_bytes / 2**20,
        "memory/peak_cuda_gib": result.peak_cuda_bytes and result.peak_cuda_bytes / 2**30,
        "throughput/tokens_per_s": numbers.tokens_per_s,
        "throughput/step_time_median_ms": numbers.step_time_median_ms,
        "train/tail_loss": numbers.tail_loss,
        "divergence/verdict": result.verdict_status,
        "divergence/verdict_gap": verdict.get("gap"),
        "divergence/verdict_low": low,
        "divergence/verdict_high": high,
        **{
            f"divergence/{key}": verdict.get(key)
            for key in ("smallest_visible_gap", "coverage", "paired", "seeds", "explanation")
        },
        "loss_scale/skipped_steps": result.skipped_steps,
        "loss_scale/log2": result.loss_scale and math.log2(result.loss_scale),
    }
    return {key: value for key, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Mappings with string keys, lists, numbers and strings; anything else becomes its string."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
