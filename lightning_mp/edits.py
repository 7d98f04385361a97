"""Who may edit weights between the end of an optimizer step and the next forward, and gradients before the step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback, ModelPruning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lightning_mp.averaging import AVERAGING

#: Hooks of a LightningModule in which user code runs then.
BETWEEN_STEPS = (
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_fit_start",
    "on_save_checkpoint",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_start",
    "optimizer_step",
    "transfer_batch_to_device",
)
#: Lightning's own callbacks that write to parameters, or run code that users give them.
EDITING = (LambdaCallback, ModelPruning, *AVERAGING)
TRUSTED_PACKAGES = ("lightning.pytorch.callbacks.", "lightning_mp.")


def may_edit_gradients(module: Module, trainer: pl.Trainer | None) -> bool:
    """Whether there is code that could write to gradients between the end of backward and the plugin's optimizer step.

    That is so in manual optimization, and where ``on_after_backward`` or ``optimizer_step`` is overridden.
    """
    return _has_own(module, trainer, module_hooks=("on_after_backward", "optimizer_step"), callback_hook="on_after_backward")


def may_use_old_gradients(module: Module, trainer: pl.Trainer | None) -> bool:
    """Whether the gradients of a finished step may be of use during the next forward, after which Lightning clears them.

    That is so in manual optimization, and where ``optimizer_zero_grad`` or ``on_before_zero_grad`` is overridden. That a
    ``training_step`` reads them is not looked for.
    """
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    return _has_own(module, trainer, module_hooks=hooks, callback_hook="on_before_zero_grad")


def _has_own(module: Module, trainer: pl.Trainer | None, module_hooks: tuple[str, ...], callback_hook: str) -> bool:
    """Whether optimization is manual, or a hook is overridden in the module or a callback. Without a trainer it is assumed."""
    if trainer is None or not isinstance(module, pl.LightningModule):
        return True
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    plain = getattr(pl.Callback, callback_hook)
    return (
        not module.automatic_optimization
        or any(is_overridden(hook, module) for hook in module_hooks)
        or any(getattr(type(callback), callback_hook) is not plain for callback in callbacks)
    )


def may_edit_between_steps(module: Module, trainer: pl.Trainer | None) -> bool:
    """Whether there is code that could write to parameters between steps.

    That is so in manual optimization, if the module overrides one of :data:`BETWEEN_STEPS`, and if there is a callback other
    than Lightning's own that leave weights alone. Without a trainer it is assumed. Code in unusual places (a validation step,
    a scheduler, a logger) is not looked for.
    """
    if trainer is None or not isinstance(module, pl.LightningModule):
        return True
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        not module.automatic_optimization
        or any(is_overridden(hook, module) for hook in BETWEEN_STEPS)
        or any(isinstance(cb, EDITING) or not f"{type(cb).__module__}.".startswith(TRUSTED_PACKAGES) for cb in callbacks)
    )
