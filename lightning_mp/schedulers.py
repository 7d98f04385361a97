"""Learning rate schedules that advance with applied steps only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl


class StepwiseSchedulers:
    """Holds back the step-wise schedulers of automatic optimization after an optimizer step that was skipped.

    Lightning calls the module's ``lr_scheduler_step`` after each batch that ended in an optimizer step. Until it is removed,
    this object stands in its place. Schedulers with ``interval="epoch"`` are passed through.

    Args:
        module: the module in training.
        schedulers: those with ``interval="step"``.
        last_step_skipped: tells whether the last optimizer step was skipped.
    """

    def __init__(self, module: pl.LightningModule, schedulers: Iterable[Any], last_step_skipped: Callable[[], bool]) -> None:
        self._module = module
        self._schedulers = list(schedulers)
        self._last_step_skipped = last_step_skipped
        self._before = module.__dict__.get("lr_scheduler_step")
        self._step = module.lr_scheduler_step
        module.lr_scheduler_step = self._step_if_applied  # type: ignore[method-assign]

    def _step_if_applied(self, scheduler: Any, metric: Any) -> None:
        if not (self._last_step_skipped() and any(scheduler is stepwise for stepwise in self._schedulers)):
            self._step(scheduler, metric)

    def remove(self) -> None:
        """Give the module its own hook back."""
        if self._before is None:
            self._module.__dict__.pop("lr_scheduler_step", None)
        else:
            self._module.lr_scheduler_step = self._before  # type: ignore[method-assign]
