"""The usual monitors in one call."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_mp.callbacks.fingerprint import FingerprintMonitor
from lightning_mp.callbacks.gradients import GradientRangeMonitor
from lightning_mp.callbacks.loss_scale import LossScaleMonitor
from lightning_mp.callbacks.memory import MemoryMonitor
from lightning_mp.callbacks.speed import SpeedMonitor


def monitors(
    *,
    speed: bool = True,
    memory: bool = True,
    loss_scale: bool = True,
    gradients: bool = True,
    gradients_every_n_steps: int = 100,
    fingerprints: bool = True,
) -> list[Callback]:
    """The callbacks that measure a run, with their defaults, in the order in which they disturb each other least.

    Args:
        speed: :class:`~lightning_mp.SpeedMonitor`: throughput, step time and its parts, MFU.
        memory: :class:`~lightning_mp.MemoryMonitor`: peak memory and its parts.
        loss_scale: :class:`~lightning_mp.LossScaleMonitor`: loss scale, skipped steps, headroom.
        gradients: :class:`~lightning_mp.GradientRangeMonitor`: underflow, and the updates that masters save.
        gradients_every_n_steps: how often gradients are sampled.
        fingerprints: :class:`~lightning_mp.callbacks.fingerprint.FingerprintMonitor`: hashes of the run's initial weights and
            first batches, for the config of Weights & Biases; reads all weights once.

    Example:
        >>> from lightning_mp import Trainer, monitors
        >>> [type(monitor).__name__ for monitor in monitors(gradients=False)]
        ['SpeedMonitor', 'MemoryMonitor', 'LossScaleMonitor', 'FingerprintMonitor']
        >>> trainer = Trainer(callbacks=monitors(), accelerator="cpu", logger=False, enable_checkpointing=False)
    """
    chosen: list[tuple[bool, Callback]] = [
        (speed, SpeedMonitor()),
        (memory, MemoryMonitor()),
        (loss_scale, LossScaleMonitor()),
        (gradients, GradientRangeMonitor(every_n_steps=gradients_every_n_steps)),
        (fingerprints, FingerprintMonitor()),
    ]
    return [callback for is_wanted, callback in chosen if is_wanted]
