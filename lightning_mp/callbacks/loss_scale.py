"""Log the loss scale, what it costs in skipped steps, and how much room it leaves.

fp16 gradients live between 2^-24 and 65504, and the loss scale is what keeps them there. Three numbers say whether it does:
the scale itself, the steps that were skipped because it was too large, and the *headroom*, the bits by which the largest scaled
gradient stayed below 65504. Much headroom means that small gradients are flushed to zero without need; little means that the
next overflow is near.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_mp.callbacks.publish import Monitor, alert, is_logging_step, publish, update_summary

PREFIX = "loss_scale"
COUNTS = ("skipped_steps", "applied_steps", "nonfinite_losses")


class LossScaleMonitor(Monitor):
    """Logs the loss scale and the fate of each optimizer step.

    ===============================  ====================================================================================
    key                              meaning
    ===============================  ====================================================================================
    ``loss_scale/log2``              log2 of the scale that made the step's gradients
    ``loss_scale/skipped_steps``     steps that were dropped as gradients or loss were not finite, so far
    ``loss_scale/applied_steps``     steps that changed weights, so far
    ``loss_scale/nonfinite_losses``  those of the skipped steps whose loss was not finite, so far; it stays 0 where no step is
                                     skipped: without a loss scale and ``skip_nonfinite``
    ``loss_scale/headroom_bits``     log2(65504 / largest scaled gradient) of the step
    ===============================  ====================================================================================

    Values are taken once per attempt at an optimizer step, skipped ones included, at the end of its batch; several optimizers
    that step in one batch (manual optimization) make one row, as they are after the last of them. They are published every
    ``log_every_n_steps``; in ``trainer.callback_metrics``, for ``ModelCheckpoint`` and ``EarlyStopping``, they also change as
    soon as a step is skipped or the scale changes. A value that is unknown (the headroom of a skipped step, say) is not logged;
    the last known one stays in ``callback_metrics``.

    The parameter where the last overflow began, the first in backward order, is written to the Python log when it is another
    than the time before, and to the run summary of loggers that have one (Weights & Biases) as ``loss_scale/last_overflow``.

    It reads the attributes that a precision plugin of this package documents; they are numbers on the host, so there is no
    device-to-host sync. Under Lightning's own ``16-mixed`` it logs ``loss_scale/log2``, for which it reads the ``GradScaler``:
    one device-to-host sync for each logged step. A plugin with none of these is named in the log once, and nothing is done.

    Example:
        >>> from lightning_mp import LossScaleMonitor, Trainer
        >>> trainer = Trainer(
        ...     precision_plugin="bf16-master", callbacks=[LossScaleMonitor()], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._attempts: int | None = None
        self._published: int | None = None  # attempts by then
        self._fate: tuple[int, float | None] = (0, None)  # steps skipped and the scale, as published
        self._last_overflow: str | None = None
        self._is_at_floor = False
        self._log2_before_step: float | None = None  # under a stock GradScaler

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the plugin's counts: those of a resumed run do not begin at zero."""
        super().on_train_start(trainer, pl_module)
        self._reset()
        plugin = trainer.precision_plugin
        self._attempts = self._published = _attempts(plugin)
        self._last_overflow = getattr(plugin, "last_overflow", None)
        if self._last_overflow is not None:
            update_summary(trainer, {f"{PREFIX}/last_overflow": self._last_overflow})  # the run may be a new one
        if not _readings(plugin) and grad_scaler(plugin) is None:
            rank_zero_info(
                f"LossScaleMonitor has nothing to log: {type(plugin).__name__} (precision {plugin.precision!r}) has no loss"
                " scale and counts no steps. Remove the callback, or use a precision plugin of lightning_mp."
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Read the scale of a stock ``GradScaler`` before the step changes it. One device-to-host sync per logged step."""
        if self._log2_before_step is None and (scaler := grad_scaler(trainer.precision_plugin)) and is_logging_step(trainer):
            self._log2_before_step = _log2(scaler.get_scale())

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Publish the values if an optimizer step was attempted in this batch."""
        plugin = trainer.precision_plugin
        if self._log2_before_step is not None:
            publish(trainer, {f"{PREFIX}/log2": self._log2_before_step})
            self._log2_before_step = None
        attempts = _attempts(plugin)
        if attempts is None or attempts == self._attempts:
            return
        self._attempts = attempts
        is_due = is_logging_step(trainer)
        fate = getattr(plugin, "skipped_steps", 0), getattr(plugin, "gradient_scale", None)
        if is_due or fate != self._fate:
            self._fate, self._published = fate, attempts
            publish(trainer, _readings(plugin), to_loggers=is_due)
            self._report_overflow(trainer)
            self._alert_at_floor(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the fate of the last step in a row."""
        self.before_row(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the fate of the last step in a row."""
        self.before_row(trainer)
        super().on_exception(trainer, pl_module, exception)

    def before_row(self, trainer: Trainer) -> None:
        """Publish the fate of steps that no row has yet."""
        if self._attempts != self._published:
            self._published = self._attempts
            publish(trainer, _readings(trainer.precision_plugin), to_loggers=False)

    def _alert_at_floor(self, trainer: Trainer) -> None:
        scale: Any = getattr(trainer.precision_plugin, "loss_scale", None)
        is_at_floor = bool(getattr(scale, "is_at_floor", False))
        if is_at_floor and not self._is_at_floor:
            alert(
                trainer,
                "The loss scale is at its minimum",
                f"Gradients overflowed until the loss scale fell to {scale.scale:g}, its minimum. If they go on to, training"
                " stops. Lower the learning rate, or keep modules in fp32 with fp32_modules.",
            )
        self._is_at_floor = is_at_floor

    def _report_overflow(self, trainer: Trainer) -> None:
        """Say where the last overflow began, if that is news."""
        plugin = trainer.precision_plugin
        origin: str | None = getattr(plugin, "last_overflow", None)
        if origin is None or origin == self._last_overflow:
            return
        self._last_overflow = origin
        update_summary(trainer, {f"{PREFIX}/last_overflow": origin})
        log2 = _readings(plugin).get(f"{PREFIX}/log2")
        at = "" if log2 is None else f" at loss scale 2^{log2:g}"
        rank_zero_info(f"The gradients overflowed{at}, first in {origin!r}, so the optimizer step was skipped.")


def grad_scaler(plugin: Any) -> Any | None:
    """The enabled ``torch.amp.GradScaler`` of Lightning's own ``16-mixed`` plugin, or None."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _attempts(plugin: Any) -> int | None:
    """Optimizer steps so far, applied or skipped; None if the plugin does not count them."""
    counts = getattr(plugin, "applied_steps", None), getattr(plugin, "skipped_steps", None)
    return None if None in counts else sum(counts)  # type: ignore[arg-type]


def _readings(plugin: Any) -> dict[str, float]:
    """What the plugin knows, by key."""
    known = {name: getattr(plugin, name, None) for name in (*COUNTS, "headroom_bits")}
    known["log2"] = _log2(getattr(plugin, "gradient_scale", None))
    return {f"{PREFIX}/{name}": float(value) for name, value in known.items() if value is not None}


def _log2(scale: float | None) -> float | None:
    # a GradScaler that backs off for ever ends at 0
    return None if scale is None or not 0 < scale < math.inf else math.log2(scale)
