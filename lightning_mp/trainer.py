"""Lightning's Trainer with a ``precision_plugin`` argument."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.precision import (  # the names that `precision` takes, and their short forms
    _PRECISION_INPUT,
    _PRECISION_INPUT_STR_ALIAS_CONVERSION,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.plugin import PRECISIONS, MasterWeightPrecision
from lightning_mp.strategies import check_strategy


class Trainer(pl.Trainer):
    """``lightning.Trainer`` plus ``precision_plugin``.

    Args:
        precision_plugin: the name of one of our precisions, ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-master"``,
            ``"16-master"`` or ``"auto"``, or a precision plugin. ``None`` leaves the choice to ``precision``.
        precision: Lightning's own argument. Beside ``precision_plugin`` it must be left out (in a config: ``null``), or mean
            the same.
        kwargs: all other arguments of ``lightning.Trainer``, by keyword.

    Raises:
        MisconfigurationException: ``precision`` and ``precision_plugin`` contradict each other, there is a precision plugin
            in ``plugins`` too, or the strategy cannot work with master weights.
        ValueError: the name is not one of ours.

    Example:
        >>> from lightning_mp import Trainer
        >>> trainer = Trainer(precision_plugin="bf16-master", accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.precision
        'bf16-master'
    """

    def __init__(
        self,
        *,
        precision_plugin: str | Precision | None = None,
        precision: _PRECISION_INPUT | None = None,
        **kwargs: Any,
    ) -> None:
        if precision in PRECISIONS and precision not in ("32-true", "bf16-mixed", "16-mixed"):
            raise MisconfigurationException(
                f"precision={precision!r} is a precision plugin of lightning_mp: pass precision_plugin={precision!r}, and leave"
                " precision out (in a config: precision: null)."
            )
        if precision_plugin is not None:
            if not isinstance(precision_plugin, str | Precision):
                raise ValueError(
                    f"Trainer(precision_plugin={precision_plugin!r}) must be one of {', '.join(map(repr, PRECISIONS))}, or a"
                    " precision plugin."
                )
            if isinstance(precision_plugin, str):
                try:
                    precision_plugin = MasterWeightPrecision(precision_plugin)  # type: ignore[arg-type]
                except ValueError as error:
                    raise ValueError(f"Trainer(precision_plugin={precision_plugin!r}): {error}") from error
            _check_agreement(precision, precision_plugin)
            precision = None
            plugins = kwargs.pop("plugins", None)
            plugins = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
            if others := [plugin for plugin in plugins if isinstance(plugin, Precision)]:
                raise MisconfigurationException(
                    f"precision_plugin={precision_plugin!r} and plugins={others!r} both choose the precision: keep one of them."
                )
            kwargs["plugins"] = [*plugins, precision_plugin]
            if getattr(precision_plugin, "has_masters", False):
                check_strategy(kwargs.get("strategy", "auto"))  # before Lightning complains about something else
        super().__init__(precision=precision, **kwargs)
        if isinstance(self.precision_plugin, MasterWeightPrecision) and self.precision_plugin.has_masters:
            check_strategy(self.strategy)


def _check_agreement(precision: Any, plugin: Precision) -> None:
    if precision is None:
        return
    canonical = _PRECISION_INPUT_STR_ALIAS_CONVERSION.get(str(precision), str(precision))
    if canonical != plugin.precision:
        raise MisconfigurationException(
            f"precision={precision!r} and precision_plugin={plugin.precision!r} contradict each other. precision_plugin chooses"
            " the precision: leave precision out (in a config: precision: null), or leave precision_plugin out for"
            " Lightning's own."
        )
