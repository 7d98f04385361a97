"""Exact fp32 master weights for PyTorch Lightning, and the measurements that prove them.

The public names are imported on first use, so that ``import lightning_mp`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mp.callbacks.baseline import BaselineRecorder as BaselineRecorder
    from lightning_mp.callbacks.divergence import DivergenceError as DivergenceError
    from lightning_mp.callbacks.divergence import DivergenceMonitor as DivergenceMonitor
    from lightning_mp.callbacks.gradients import GradientRangeMonitor as GradientRangeMonitor
    from lightning_mp.callbacks.loss_scale import LossScaleMonitor as LossScaleMonitor
    from lightning_mp.callbacks.memory import MemoryMonitor as MemoryMonitor
    from lightning_mp.callbacks.monitors import monitors as monitors
    from lightning_mp.callbacks.speed import SpeedMonitor as SpeedMonitor
    from lightning_mp.numerics.baseline import BaselineError as BaselineError
    from lightning_mp.numerics.divergence import Rule as Rule
    from lightning_mp.numerics.loss_scale import AdaptiveLossScale as AdaptiveLossScale
    from lightning_mp.numerics.loss_scale import DynamicLossScale as DynamicLossScale
    from lightning_mp.numerics.loss_scale import NoLossScale as NoLossScale
    from lightning_mp.numerics.loss_scale import StaticLossScale as StaticLossScale
    from lightning_mp.plugin import MasterWeightPrecision as MasterWeightPrecision
    from lightning_mp.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "AdaptiveLossScale": "lightning_mp.numerics.loss_scale",
    "BaselineError": "lightning_mp.numerics.baseline",
    "BaselineRecorder": "lightning_mp.callbacks.baseline",
    "DivergenceError": "lightning_mp.callbacks.divergence",
    "DivergenceMonitor": "lightning_mp.callbacks.divergence",
    "DynamicLossScale": "lightning_mp.numerics.loss_scale",
    "GradientRangeMonitor": "lightning_mp.callbacks.gradients",
    "LossScaleMonitor": "lightning_mp.callbacks.loss_scale",
    "MasterWeightPrecision": "lightning_mp.plugin",
    "MemoryMonitor": "lightning_mp.callbacks.memory",
    "NoLossScale": "lightning_mp.numerics.loss_scale",
    "Rule": "lightning_mp.numerics.divergence",
    "SpeedMonitor": "lightning_mp.callbacks.speed",
    "StaticLossScale": "lightning_mp.numerics.loss_scale",
    "Trainer": "lightning_mp.trainer",
    "monitors": "lightning_mp.callbacks.monitors",
}
__all__ = [
    "AdaptiveLossScale",
    "BaselineError",
    "BaselineRecorder",
    "DivergenceError",
    "DivergenceMonitor",
    "DynamicLossScale",
    "GradientRangeMonitor",
    "LossScaleMonitor",
    "MasterWeightPrecision",
    "MemoryMonitor",
    "NoLossScale",
    "Rule",
    "SpeedMonitor",
    "StaticLossScale",
    "Trainer",
    "__version__",
    "monitors",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
