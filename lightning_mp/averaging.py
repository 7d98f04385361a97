"""Let Lightning's weight-averaging callbacks average masters.

They read and write ``parameter.data``, and would so average rounded weights, and round the average. While one of their hooks
runs, the module's parameters are therefore fp32 (see :func:`lightning_mp.module.fp32_parameters`): what they read are the
masters, and what they write becomes the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging

AVERAGING = (StochasticWeightAveraging, WeightAveraging)
#: The hooks in which these callbacks read or write weights.
HOOKS = (
    "on_train_batch_end",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
)


class AverageInFp32:
    """Wraps the hooks of weight-averaging callbacks until it is removed.

    Args:
        callbacks: the trainer's; others than Lightning's averaging ones are left alone.
        fp32_parameters: makes a context in which the module's parameters are fp32.
    """

    def __init__(self, callbacks: Iterable[Callback], fp32_parameters: Callable[[], AbstractContextManager[None]]) -> None:
        self._wrapped: list[tuple[Callback, str]] = []
        for callback in callbacks:
            if not isinstance(callback, AVERAGING):
                continue
            for name in HOOKS:
                # on the instance; hooks that the callback does not have are not worth a copy of the weights
                if getattr(type(callback), name) is not getattr(Callback, name):
                    setattr(callback, name, _within(fp32_parameters, getattr(callback, name)))
                    self._wrapped.append((callback, name))

    def remove(self) -> None:
        """Give the callbacks their own hooks back."""
        for callback, name in self._wrapped:
            delattr(callback, name)
        self._wrapped = []


def _within(context: Callable[[], AbstractContextManager[None]], hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    return run
