"""Which of Lightning's strategies work with master weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    StrategyRegistry,
    XLAStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module

SUPPORTED = (SingleDeviceStrategy, DDPStrategy)
UNSUPPORTED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceXLAStrategy, XLAStrategy)


def check_strategy(strategy_or_module: Any) -> None:
    """Refuse a strategy that shards or replaces the optimizer step.

    Args:
        strategy_or_module: a strategy, the name of one, or a LightningModule that is attached to a trainer. ``"auto"``, names
            that Lightning does not know, and modules without a trainer pass.

    Raises:
        MisconfigurationException: with the strategy's name, and those that work.
    """
    strategy = strategy_or_module
    if isinstance(strategy, Module):
        trainer = getattr(strategy, "_trainer", None)
        if trainer is None:
            return
        strategy = trainer.strategy
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            return
        cls, given = StrategyRegistry[strategy]["strategy"], f"strategy={strategy!r}, which is "
    else:
        cls, given = type(strategy), ""
    if issubclass(cls, SUPPORTED) and not issubclass(cls, UNSUPPORTED):
        return
    raise MisconfigurationException(
        f"Master weights ('bf16-master', '16-master') do not work with {given}{cls.__qualname__}. It works with"
        f" {' and '.join(cls.__name__ for cls in SUPPORTED)}: pass strategy='auto' or 'ddp', or, for a strategy that shards,"
        " Lightning's precision='bf16-mixed' or '16-mixed', which keep fp32 parameters."
    )


def root_device(module: Module) -> torch.device:
    """The device on which the module is going to run: the trainer's, or else the one it is on."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        return torch.device(trainer.strategy.root_device)
    return next((param.device for param in module.parameters()), torch.device("cpu"))
