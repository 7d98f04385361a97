"""The usual monitors in one call."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_mp.callbacks.divergence import Action, DivergenceMonitor
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
    baseline: str | list[str] | None = None,
    on_divergence: Action = "warn",
    force: bool = False,
) -> list[Callback]:
    """The callbacks that measure a run, with their defaults, in the order in which they disturb each other least.

    Args:
        speed: :class:`~lightning_mp.SpeedMonitor`: throughput, step time and its parts, MFU.
        memory: :class:`~lightning_mp.MemoryMonitor`: peak memory and its parts.
        loss_scale: :class:`~lightning_mp.LossScaleMonitor`: loss scale, skipped steps, headroom.
        gradients: :class:`~lightning_mp.GradientRangeMonitor`: underflow, and the updates that masters save.
        gradients_every_n_steps: how often gradients are sampled.
        fingerprints: :class:`~lightning_mp.callbacks.fingerprint.FingerprintMonitor`: hashes of the run's initial weights and
            order of data, for the config of Weights & Biases; reads all weights once.
        baseline: a file of a :class:`~lightning_mp.BaselineRecorder`, or several: adds a
            :class:`~lightning_mp.DivergenceMonitor`.
        on_divergence: what that does when the run diverges: "warn" says so; "stop" also ends training; "raise" raises an error;
            "alert" also sends an alert through Weights & Biases.
        force: whether to compare although settings differ from the baseline's.

    Raises:
        ValueError: a switch is not True or False, or another argument is out of range.

    Example:
        >>> from lightning_mp import Trainer, monitors
        >>> [type(monitor).__name__ for monitor in monitors(gradients=False)]
        ['SpeedMonitor', 'MemoryMonitor', 'LossScaleMonitor', 'FingerprintMonitor']
        >>> trainer = Trainer(callbacks=monitors(), accelerator="cpu", logger=False, enable_checkpointing=False)
    """
    switches = {
        "speed": speed,
        "memory": memory,
        "loss_scale": loss_scale,
        "gradients": gradients,
        "fingerprints": fingerprints,
    }
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ValueError(f"{name}={switch!r} must be True or False.")
    chosen: list[tuple[bool, Callback]] = [
        (speed, SpeedMonitor()),
        (memory, MemoryMonitor()),
        (loss_scale, LossScaleMonitor()),
        (gradients, GradientRangeMonitor(every_n_steps=gradients_every_n_steps)),
        (fingerprints, FingerprintMonitor()),
    ]
    callbacks = [callback for is_wanted, callback in chosen if is_wanted]
    if baseline is not None:
        callbacks.append(DivergenceMonitor(baseline, on_divergence=on_divergence, force=force))
    return callbacks
