"""Fingerprints: one short string that is equal when, and only when, the tensors behind it are equal bit for bit.

Two runs may be compared point by point when they start from the same weights and see the same data in the same order.
A SHA-256 over names, dtypes, shapes and bytes settles both. The bits are hashed, not the values, so 0.0 and -0.0
differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp.callbacks.publish import Monitor

#: So many micro-batches are hashed.
FINGERPRINT_BATCHES = 8


class Fingerprint:
    """A chain of SHA-256 over values: `update` in order, read `hexdigest` whenever.

    Args:
        round_to: a dtype that floating tensors are rounded to before they are hashed. With `torch.bfloat16` a batch
            has one
            fingerprint whether or not a precision plugin already cast it, since rounding twice is rounding once.
    """

    def __init__(self, round_to: torch.dtype | None = None) -> None:
        self._digest = b""  # of everything so far: unlike a running hash object it can be copied and pickled
        self._round_to = round_to

    def update(self, value: Any) -> None:
        """Add a tensor, a number, a string, or any nesting of mappings, sequences and dataclasses of these.

        Copies tensors to the host: one device-to-host sync for each tensor on an accelerator.
        """
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and self._round_to is not None:
                leaf = leaf.detach().to(self._round_to)
            running = hashlib.sha256(self._digest)
            running.update(f"{path}:{_describe(leaf)};".encode())
            if isinstance(leaf, Tensor):
                running.update(_bytes(leaf))
            self._digest = running.digest()

    def hexdigest(self) -> str:
        """The fingerprint of everything so far, 64 hexadecimal digits."""
        return hashlib.sha256(self._digest).hexdigest()


class RunFingerprint:
    """The fingerprints of a fit: of its initial weights and of its first micro-batches.

    Attributes:
        weights: of the weights as they were before the precision plugin converted them; None if they were never seen (a
            strategy that does not convert, or weights without values).
    """

    def __init__(self) -> None:
        self.weights: str | None = None
        self._batches = Fingerprint(round_to=torch.bfloat16)
        self._batches_hashed = 0

    @property
    def batches(self) -> str:
        """Of the first :data:`FINGERPRINT_BATCHES` micro-batches, floating tensors rounded to bf16."""
        return self._batches.hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether all batches that count were seen."""
        return self._batches_hashed >= FINGERPRINT_BATCHES

    def watch(self, trainer: Trainer) -> None:
        """Look at the weights at the last moment before they are converted; to be called in ``setup``."""
        plugin = trainer.precision_plugin
        convert = plugin.convert_module  # perhaps that of another watcher

        # no hook lies between `configure_model` with checkpoint loading and the conversion
        def fingerprint_and_convert(module: nn.Module) -> nn.Module:
            plugin.__dict__.pop("convert_module", None)
            self.weights = weights_fingerprint(module)
            return convert(module)

        plugin.convert_module = fingerprint_and_convert  # type: ignore[method-assign]

    @staticmethod
    def unwatch(trainer: Trainer) -> None:
        """Leave the plugin as it was, also where the strategy never converted the module."""
        trainer.precision_plugin.__dict__.pop("convert_module", None)

    def add(self, batch: Any) -> None:
        """Take a micro-batch in, if it is among the first. Copies its tensors to the host."""
        if not self.is_complete:
            self._batches.update(batch)
            self._batches_hashed += 1


class FingerprintMonitor(Monitor):
    """Writes the fingerprints of a run to its config in Weights & Biases.

    Two runs whose ``weights`` and ``batches`` are equal started from the same weights and saw the same data in the same order,
    so that their curves can be compared point by point. The weights are those before the precision plugin converts them, so
    the fingerprint does not depend on the precision. It reads all weights once, when training is set up, and the first
    :data:`FINGERPRINT_BATCHES` micro-batches; each is copied to the host. Nothing after that.

    Example:
        >>> from lightning_mp import Trainer, monitors
        >>> trainer = Trainer(callbacks=monitors(), accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> [type(m).__name__ for m in monitors(speed=False, memory=False, loss_scale=False, gradients=False)]
        ['FingerprintMonitor']
    """

    def __init__(self) -> None:
        self._found = RunFingerprint()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start afresh."""
        if stage == "fit":
            self._found = RunFingerprint()
            self._found.watch(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the plugin as it was."""
        self._found.unwatch(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the plugin as it was; an error in set-up has no teardown."""
        super().on_exception(trainer, pl_module, exception)
        self._found.unwatch(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the first batches in."""
        self._found.add(batch)

    def recipe(self) -> dict[str, str | float]:
        """``weights`` and ``batches``, 64 hexadecimal digits each, once all of the first batches were seen."""
        known = {"weights": self._found.weights, "batches": self._found.batches if self._found.is_complete else None}
        return {name: value for name, value in known.items() if value is not None}


def weights_fingerprint(module: nn.Module) -> str | None:
    """The fingerprint of a module's parameters and buffers, or None if some have no values yet (meta or lazy).

    Copies every tensor to the host, one after another.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if any(tensor.is_meta or nn.parameter.is_lazy(tensor) for _, tensor in named):
        return None
    fingerprint = Fingerprint()
    for name, tensor in named:
        fingerprint.update({name: tensor})
    return fingerprint.hexdigest()


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of a nesting of mappings, sequences and dataclasses, in order, each with its path."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for key, item in items for leaf in leaves(item, f"{path}/{key}")]


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    # an object's default repr holds its address, which differs between equal runs
    return repr(leaf) if isinstance(leaf, str | bytes | int | float | bool | None) else type(leaf).__qualname__


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
