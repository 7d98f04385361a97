"""Record what a comparison needs from one run: the true loss, tokens and time of each optimizer step, and the memory.

Three things are easy to get wrong, and each is settled here.

*The true loss.* In automatic optimization Lightning divides the loss by `accumulate_grad_batches` before callbacks
see it. It is multiplied back here and averaged in fp32 over the micro-batches of the step (the window).

*The time of a step.* The clock runs from batch start to batch end, summed over the window, so waiting for data,
validation and checkpoints are left out. On CUDA the host runs ahead of the device, so the clock is a pair of CUDA
events.

*Not disturbing what is measured.* Nothing is copied from the device during a step. Losses stay 0-dim tensors until
`chunk_steps` of them are read at once, outside the clock: one device-to-host sync for each chunk. For the fingerprint of
the data order single samples are copied, ever more rarely, before the clock of their batch starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.callbacks.clock import Clock, HostClock, clock_for
from lightning_mp.callbacks.fingerprint import RunFingerprint
from lightning_mp.callbacks.tokens import count_batch, token_count
from lightning_mp.cost.memory import GradientWatch, PersistentBytes, persistent_bytes


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: 1 for the first step of this fit.
        loss: mean over the window of the undivided loss, or None if `training_step` returned none.
        tokens: tokens that this process consumed in the window, or None if unknown. The module's `count_tokens(batch)`
            counts them if it has that method, else :func:`~lightning_mp.callbacks.tokens.token_count`.
        step_time_ms: time from batch start to batch end, summed over the window.
    """

    step: int
    loss: float | None
    tokens: int | None
    step_time_ms: float


@dataclass
class _Window:
    """The micro-batches of one optimizer step, still unread."""

    losses: list[Tensor] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # where batches began and ended
    tokens: int | None = None


class RunRecorder(Callback):
    """Records every optimizer step of a fit, with any precision plugin. Logs nothing by itself.

    Put it first among the callbacks: its clock then stops before the others work.

    Args:
        on_step: called after each optimizer step with the step number; costs no sync.
        on_records: called with each chunk of records once they are read.
        chunk_steps: read the losses of this many steps at a time.
        stop_at_non_finite: stop training when a loss that was read is infinite or NaN.

    Attributes:
        records: a `StepRecord` for each optimizer step.
        memory: persistent bytes, taken at the second optimizer step, when there is optimizer state and gradients are
            alive; None before that.
        weights: fingerprint of the initial weights as they were before the precision plugin converted them; None if
            they were never seen (a strategy that does not convert, or weights without values).
        data_order: hashes of some of the samples that this process consumed, by position.
        non_finite_step: the first step whose loss was not finite, or None.
    """

    def __init__(
        self,
        on_step: Callable[[int], None] | None = None,
        on_records: Callable[[Sequence[StepRecord]], None] | None = None,
        chunk_steps: int = 50,
        stop_at_non_finite: bool = False,
    ) -> None:
        self._on_step = on_step or (lambda step: None)
        self._on_records = on_records or (lambda records: None)
        self._chunk_steps = chunk_steps
        self._stop_at_non_finite = stop_at_non_finite
        self._reset()

    def _reset(self) -> None:
        self.records: list[StepRecord] = []
        self.memory: PersistentBytes | None = None
        self.non_finite_step: int | None = None
        self._fingerprint = RunFingerprint()
        self._global_step = 0
        self._window = _Window()
        self._unread: list[_Window] = []
        self._clock: Clock = HostClock()
        self._began: Any = None  # a mark, while a batch is under way
        self._gradients: GradientWatch | None = None  # of a step whose memory is going to be counted

    @property
    def weights(self) -> str | None:
        """Fingerprint of the initial weights as they were before the precision plugin converted them; None if not seen."""
        return self._fingerprint.weights

    @property
    def data_order(self) -> dict[str, str]:
        """Hashes of some of the samples that this process consumed, by position; see ``RunFingerprint``."""
        return dict(self._fingerprint.data_order)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start afresh, and look at the weights at the last moment before they are converted."""
        if stage != "fit":
            return
        self._reset()
        self._fingerprint.watch(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the plugin as it was, also where the strategy never converted the module."""
        self._fingerprint.unwatch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimizer steps from here: a resumed run does not begin at zero."""
        self._global_step = trainer.global_step
        self._clock = clock_for(pl_module.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fingerprint the batch, then start the clock."""
        self._fingerprint.add(batch, count_batch(batch).samples)
        if self._gradients is None and self._counts_memory():
            self._gradients = GradientWatch(pl_module)
        self._began = self._clock.mark()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Take note of gradients that are there already."""
        if self._gradients is not None:
            self._gradients.before_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the persistent bytes, with the gradients as they were in backward."""
        if self._gradients is not None:
            masters = getattr(trainer.precision_plugin, "master_tensors", tuple)  # stock plugins hold none
            counted = persistent_bytes(pl_module, trainer.optimizers, masters())
            self.memory = replace(counted, gradients=self._gradients.bytes() or counted.gradients)
            self._stop_watching()

    def _counts_memory(self) -> bool:
        """Whether this is the second step; or, ever more rarely, a later one, while there is no optimizer state.

        The first steps may have left no state because they were skipped (fp16 overflow), or there may never be any (SGD).
        """
        steps = self._steps
        return steps > 0 and steps & (steps - 1) == 0 and (self.memory is None or not self.memory.optimizer_state)

    def _stop_watching(self) -> None:
        if self._gradients is not None:
            self._gradients.remove()
            self._gradients = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, add the micro-batch to the window, and close the window if an optimizer stepped."""
        window = self._window
        if self._began is not None:
            window.marks.append((self._began, self._clock.mark()))
            self._began = None
        loss = _loss(outputs)
        if loss is not None:
            undivided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            window.losses.append(loss.float() * undivided)
        tokens = getattr(pl_module, "count_tokens", token_count)(batch)
        if tokens is not None:
            window.tokens = (window.tokens or 0) + tokens

        if trainer.global_step == self._global_step:
            return  # still accumulating
        self._global_step = trainer.global_step
        self._unread.append(window)
        self._window = _Window()
        self._on_step(self._steps)
        if len(self._unread) >= self._chunk_steps:
            self._read(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is left."""
        self._stop_watching()
        self._read(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the steps that were finished before the exception."""
        self._fingerprint.unwatch(trainer)
        self._stop_watching()
        self._read(trainer)

    @property
    def _steps(self) -> int:
        return len(self.records) + len(self._unread)

    def _read(self, trainer: Trainer) -> None:
        """Turn the unread windows into records. One device-to-host sync."""
        windows, self._unread = self._unread, []
        if not windows:
            return
        losses = iter(torch.stack([loss for w in windows for loss in w.losses] or [torch.zeros(())]).tolist())
        marks = [mark for window in windows for pair in window.marks for mark in pair]
        if marks:
            self._clock.wait_for(marks[-1])
        chunk = []
        for window in windows:
            values = [next(losses) for _ in window.losses]
            record = StepRecord(
                step=len(self.records) + 1,
                loss=sum(values) / len(values) if values else None,
                tokens=window.tokens,
                step_time_ms=sum(self._clock.milliseconds(began, ended) for began, ended in window.marks),
            )
            self.records.append(record)
            chunk.append(record)
            if self.non_finite_step is None and record.loss is not None and not math.isfinite(record.loss):
                self.non_finite_step = record.step
        self._clock.release(marks)
        if self._stop_at_non_finite and self.non_finite_step is not None:
            trainer.should_stop = True
        self._on_records(chunk)


def _loss(outputs: Any) -> Tensor | None:
    """The 0-dim loss in what `training_step` led to: a tensor, a mapping with "loss", or nothing."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach().mean() if isinstance(loss, Tensor) else None
