"""Record a run as a baseline, the curve that other runs are judged by."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_mp.callbacks.recorded_run import FULL_PRECISIONS, RecordedRun, RecordingMonitor, published_numbers
from lightning_mp.numerics.baseline import Baseline, BaselineError, Status, read_baseline, write_baseline


class BaselineRecorder(RecordingMonitor):
    """Saves the true training loss of a run, and what decides whether another run can be compared with it, in one JSON file.

    The file holds the loss against steps, samples and tokens (thinned to at most 4096 points, each a mean), validation metrics,
    fingerprints of the initial weights and of the data order, the settings that decide comparability, and, if
    :func:`lightning_mp.monitors` measure the run, peak memory, speed and step time. It is written at the first log step, then
    at log steps (``log_every_n_steps``) when ``save_every_s`` have passed, after each validation, before each checkpoint, and
    at the end. Each time it is replaced as a whole, so it can be read at any moment, also after a crash. Rank 0 writes it.

    Record in fp32 (``precision="32-true"``); what else is recorded says so in the file and in a warning. A resumed run goes on
    with its curve, and steps that the checkpoint does not know are forgotten. Where no logger, no monitor or a stock precision
    is used, it works as well. With ``fast_dev_run`` nothing is written.

    Between log steps, validations and checkpoints nothing is read from the device, but a sample of the data ever more rarely;
    see :mod:`lightning_mp.callbacks.step_loss` and :mod:`lightning_mp.callbacks.fingerprint`.

    Args:
        path: the file, with the suffix ``.json``. Its folder is made if it is missing. A link is followed.
        overwrite: whether a finished baseline may be replaced. One that did not come to its end may be, which the log says.
        validation_metrics: names of the validation metrics to keep, as they are in ``trainer.callback_metrics``: with several
            validation loaders their names end in ``/dataloader_idx_0`` and so on. None for all.
        data: a name for the training data, if baselines and runs are to be compared only where it is the same.
        save_every_s: seconds between two writings at log steps, at least.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: before training, if the path cannot be written, or holds a finished baseline of another run
            and ``overwrite`` is not set, or holds something else.

    A file that cannot be written while training goes on is warned of once, tried again until the end, and never ends the run;
    what was saved before stays. Its ``state_dict`` is that of :class:`~lightning_mp.callbacks.recorded_run.RecordedRun`.

    Example:
        >>> from lightning_mp import Trainer
        >>> from lightning_mp.callbacks.baseline import BaselineRecorder
        >>> trainer = Trainer(
        ...     precision="32-true", callbacks=[BaselineRecorder("baselines/seed0.json")], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        validation_metrics: Sequence[str] | None = None,
        data: str | None = None,
        save_every_s: float = 30.0,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.suffix != ".json":
            raise ValueError(f"path={str(path)!r} must end in .json, as a baseline is a JSON file.")
        if isinstance(validation_metrics, str):
            raise ValueError(f"validation_metrics={validation_metrics!r} must be a list of names, or None for all.")
        if not save_every_s >= 0:
            raise ValueError(f"save_every_s={save_every_s!r} must be a number of seconds, 0 or more.")
        check_name_of_data(data)
        self.overwrite = overwrite
        self.validation_metrics = None if validation_metrics is None else tuple(validation_metrics)
        self.data = data
        self.save_every_s = save_every_s
        self._is_over = False  # training came to its end, whatever happens then
        self._last_write: float | None = None
        self._failure: Exception | None = None  # of the last attempt at writing

    # --- before training ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a path that cannot be written, and look at the weights before they are converted."""
        self._is_active = stage == "fit" and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if stage == "fit" and not self._is_active:
            rank_zero_warn(f"BaselineRecorder writes nothing to {self.path}, as fast_dev_run is on.")
        if not self._is_active:
            return
        # as it is now: the working folder may change, and a link is to be followed, not replaced
        self._file = Path(os.path.realpath(self.path))
        self._is_over = False
        self._last_write = self._failure = None
        on_all_ranks(trainer, self._check_path)
        if not self._run.steps.is_continued_by(trainer):
            self._run = RecordedRun()
            self._run.fingerprint.watch(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to replace a finished baseline, now that a checkpoint has been loaded if there is one."""
        if self._is_active:
            on_all_ranks(trainer, self._check_content)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up counts and settings, and warn of what is not fp32."""
        super().on_train_start(trainer, pl_module)
        if not self._is_active:
            return
        if self._run.steps.misses_steps_of(trainer):
            self._run = RecordedRun()
        self._run.start(trainer, pl_module, self.data, lambda: self._read_and_write(trainer))
        precision = self._run.as_run(trainer, "recording").precision
        if precision not in FULL_PRECISIONS:
            rank_zero_warn(
                f"BaselineRecorder records a run under precision {precision!r}, which is not fp32; the file says so. For a"
                " baseline to judge other precisions by, use precision='32-true', with torch's tf32 switched off."
            )
        if self._run.steps.joined_late:
            rank_zero_warn(
                f"BaselineRecorder begins at step {self._run.steps.step + 1} of a run whose checkpoint has no record of the"
                " steps before. Samples and tokens are unknown, and so are the initial weights; the curve can be compared by"
                " steps."
            )

    def _check_path(self) -> None:
        folder = next(parent for parent in self._file.parents if parent.exists())
        problem = None
        if self._file.is_dir():
            problem = "is a folder"
        elif not folder.is_dir():
            problem = f"is no possible path, as {folder} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = f"cannot be written, as {folder} allows no new files"
        if problem is not None:
            raise MisconfigurationException(
                f"BaselineRecorder(path={str(self.path)!r}): {self.path} {problem}. Pass the path of a file in a folder that"
                " you may write to."
            )

    def _check_content(self) -> None:
        if self.overwrite or not self._file.exists():
            return
        try:
            found = read_baseline(self._file)
        except BaselineError as error:
            raise MisconfigurationException(
                f"BaselineRecorder(path={str(self.path)!r}): the path holds a file that is no baseline ({error}). Pass another"
                " path, or overwrite=True to replace the file."
            ) from error
        if any(run.status == "finished" for run in found.runs) and not self._goes_on_from(found):
            raise MisconfigurationException(
                f"BaselineRecorder(path={str(self.path)!r}): the path holds a finished baseline. Pass another path,"
                " overwrite=True to replace it, or ckpt_path to resume the run that it is of."
            )
        if not self._goes_on_from(found):
            rank_zero_info(f"BaselineRecorder replaces {self.path}, the baseline of a run that did not come to its end.")

    def _goes_on_from(self, found: Baseline) -> bool:
        """Whether the run that is resumed is the one that the file is of."""
        known, (run, *others) = self._run.fingerprint, found.runs
        if others or not self._run.curve.last_step:
            return False
        if self._run.curve == run.curve:
            return True  # to the last step, so it needs no fingerprint
        return known.weights is not None and known.weights == run.weights and known.data_order.items() <= run.data_order.items()

    # --- training ----------------------------------------------------------------------------------------------------------

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Take the loss; at log steps read what is unread, and write the file if it is time."""
        if self._is_active and self._run.batch_end(trainer, pl_module, outputs):
            self._run.read(trainer)
            if self._last_write is None or time.monotonic() - self._last_write >= self.save_every_s:
                self._write(trainer, "recording")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics of the validation, and write the file."""
        if not self._is_active or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._run.read(trainer)
        if self._run.curve.last_step:
            self._run.add_validation(self._validation_values(trainer))
            self._write(trainer, "recording")

    def _validation_values(self, trainer: Trainer) -> dict[str, float | None]:
        logged = _validation_metrics(trainer)
        wanted = logged if self.validation_metrics is None else self.validation_metrics
        values = {name: float(logged[name]) for name in wanted if name in logged}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file to its end."""
        if not self._is_active:
            return
        self._run.read(trainer)
        self._is_over = True
        curve = self._run.curve
        if not curve.last_step:
            rank_zero_warn(f"BaselineRecorder has written nothing to {self.path}, as there was no optimizer step.")
            return
        if not sum(curve.counts):
            rank_zero_warn(
                f"The baseline in {self.path} has no loss, as training_step returned none that is finite. Nothing can be"
                " compared with it. In manual optimization, return the loss from training_step."
            )
        if not self._run.fingerprint.data_order and not self._run.steps.joined_late:
            rank_zero_warn(
                f"The baseline in {self.path} does not know the order of its data, as batches hold neither tensors nor numbers"
                " nor texts; no run can be paired with it. Let the loader give such batches, or record three seeds."
            )
        unknown = [name for name in self.validation_metrics or () if name not in self._run.validation]
        if unknown:
            rank_zero_warn(
                f"The baseline in {self.path} has no values of {', '.join(unknown)}, which no validation logged. It has:"
                f" {', '.join(self._run.validation) or 'none'}."
            )
        self._write(trainer, "finished" if _has_finished(trainer) else "stopped")
        if self._failure is not None:
            rank_zero_warn(
                f"The baseline was NOT saved to its end: {self.path} cannot be written ({self._failure}). What was saved before"
                " is still there."
            )
        else:
            rank_zero_info(f"The baseline of {self._run.curve.last_step:,} steps is in {self.path}.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what there is. Neither other ranks nor a device that may have failed are asked for what is unread."""
        super().on_exception(trainer, pl_module, exception)
        if self._is_active:
            if is_alone(trainer):
                self._run.read(trainer)
            if self._run.curve.last_step and self._last_write is not None and not self._is_over:
                self._write(trainer, "stopped")
            self._leave(trainer)

    # --- the file ----------------------------------------------------------------------------------------------------------

    def _read_and_write(self, trainer: Trainer) -> None:
        self._run.read(trainer)
        if self._run.curve.last_step:
            self._write(trainer, "recording")

    def _write(self, trainer: Trainer, status: Status) -> None:
        """Write the file on rank 0. A failure is warned of once."""
        self._last_write = time.monotonic()
        if not trainer.is_global_zero:
            return
        run = replace(self._run.as_run(trainer, status), numbers=published_numbers(trainer))
        try:
            write_baseline(self._file, Baseline((run,), str(self.path)))
        except (OSError, BaselineError) as error:
            if self._failure is None:
                rank_zero_warn(
                    f"BaselineRecorder cannot write {self.path} ({error}). Training goes on, what was saved before stays, and"
                    " writing is tried again."
                )
            self._failure = error
        else:
            self._failure = None

    def recipe(self) -> dict[str, str | float]:
        """``path``, and ``data`` if it has a name."""
        return {"path": str(self.path), **({} if self.data is None else {"data": self.data})}

    def state_dict(self) -> dict[str, Any]:
        """The curve and all that is recorded with it."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if self._is_active:  # a checkpoint that is validated or tested says nothing of the fit
            self._run.load_state_dict(state_dict)


def check_name_of_data(data: object) -> None:
    """Refuse what could be saved neither in a baseline nor in a checkpoint.

    Raises:
        ValueError: it is neither text nor None.
    """
    if data is not None and not isinstance(data, str):
        raise ValueError(f"data={data!r} must be a name of the training data, as text, or None.")


def on_all_ranks(trainer: Trainer, check: Callable[[], Any]) -> Any:
    """The result of a check that rank 0 makes, or its error, on all ranks. One broadcast if there are several.

    Rank 0 alone, as files may be on its machine only, and so that all ranks refuse together.
    """
    result: Any = None
    if trainer.is_global_zero:
        try:
            result = check()
        except Exception as error:  # raised below, on the other ranks too: they would else wait for an answer
            result = error
    if trainer.world_size > 1:
        result = trainer.strategy.broadcast(result)
    if isinstance(result, Exception):
        raise result
    return result


def is_alone(trainer: Trainer) -> bool:
    """Whether nobody else has to be asked for what is unread: neither another rank nor a device that may have failed."""
    return trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"


def _validation_metrics(trainer: Trainer) -> dict[str, Any]:
    """What the validation that has just ended logged, of all its loaders; `trainer.callback_metrics` has more than that."""
    results = trainer._results
    assert results is not None
    before, found = results.dataloader_idx, {}
    for index in dict.fromkeys(metric.meta.dataloader_idx for metric in results.values()):
        results.dataloader_idx = index
        found.update(results.metrics(on_step=False)["callback"])
    results.dataloader_idx = before
    return found


def _has_finished(trainer: Trainer) -> bool:
    """Whether training came to ``max_steps`` or ``max_epochs``."""
    by_steps = 0 < trainer.max_steps <= trainer.global_step
    by_epochs = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch
    # an epoch that was stopped within counts as completed, too
    return by_steps or (by_epochs and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
