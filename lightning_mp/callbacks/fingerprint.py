"""Fingerprints: one short string that is equal when, and only when, the tensors behind it are equal bit for bit.

Two runs may be compared point by point when they start from the same weights and see the same data in the same order. A SHA-256
over names, dtypes, shapes and bytes settles both. The bits are hashed, not the values, so 0.0 and -0.0 differ.

**Data order by sample.** What is hashed are single samples that a process consumes: the first 32, then 16 while their number
doubles. Where a batch begins and ends is not in it, so runs of different batch sizes, or with other numbers of micro-batches
in a step, have the same probes as long as the samples come in the same order. A change of order is noticed at the next probe,
before 7% more samples were consumed; and all of it costs 16 samples copied to the host at each doubling. Two things make probes
differ that are no change of order: padding that depends on the rest of the batch, and another number of ranks. Of a sample,
tensors, numbers and texts are hashed; of another object only its type, and where there is nothing else, nothing is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp.callbacks.nesting import leaves
from lightning_mp.callbacks.publish import Monitor
from lightning_mp.callbacks.tokens import count_batch

#: A fingerprint in a run's config is of the probes up to this one.
LAST_EARLY_PROBE = 64
#: So many samples are hashed while their number doubles.
PROBES = 16


class Fingerprint:
    """A chain of SHA-256 over values: `update` in order, read `hexdigest` whenever.

    Args:
        round_to: a dtype that floating tensors are rounded to before they are hashed. With `torch.bfloat16` a batch has one
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
    """The fingerprints of a run: of its initial weights and of the order of its data. They go on after a resume.

    Attributes:
        weights: of the weights as they were before the precision plugin converted them; None if they were never seen (a
            strategy that does not convert, or weights without values).
        data_order: the hash, 16 hexadecimal digits, of the sample that this process consumed at each of the positions 1 to 32,
            34, 36, ... 64, 68, ..., :data:`PROBES` in each doubling, keyed by the position as a string. A change of the order
            is seen before the run is 7% longer. Floating tensors are rounded to bf16. A sample without tensors, numbers and
            texts has none.
        samples: how many samples this process consumed.
    """

    def __init__(self) -> None:
        self.weights: str | None = None
        self.data_order: dict[str, str] = {}
        self.samples = 0
        self._next_probe = 1
        self._has_loaded = False

    def watch(self, trainer: Trainer) -> None:
        """Look at the weights at the last moment before they are converted; to be called in ``setup``.

        However many watch the same trainer, the weights are read once.
        """
        plugin = trainer.precision_plugin
        convert = plugin.convert_module
        watchers: list[RunFingerprint] | None = getattr(convert, "watchers", None)
        if watchers is not None:
            watchers.append(self)
            return
        watchers = [self]

        # no hook lies between `configure_model` with checkpoint loading and the conversion
        def fingerprint_and_convert(module: nn.Module) -> nn.Module:
            plugin.__dict__.pop("convert_module", None)
            if not all(watcher._has_loaded for watcher in watchers):
                weights = weights_fingerprint(module)
                for watcher in watchers:
                    watcher.weights = watcher.weights if watcher._has_loaded else weights
            return convert(module)

        fingerprint_and_convert.watchers = watchers  # type: ignore[attr-defined]
        plugin.convert_module = fingerprint_and_convert  # type: ignore[method-assign]

    @staticmethod
    def unwatch(trainer: Trainer) -> None:
        """Leave the plugin as it was, also where the strategy never converted the module."""
        trainer.precision_plugin.__dict__.pop("convert_module", None)

    def add(self, batch: Any, samples: int | None) -> None:
        """Take a micro-batch in. Copies one sample of it to the host if a probe falls into it, which happens ever more rarely.

        Args:
            batch: any nesting of tensors.
            samples: its size, as :func:`~lightning_mp.callbacks.tokens.count_batch` tells; None, if it is not known, makes the
                batch one sample.
        """
        size = 1 if samples is None else samples
        while self._next_probe <= self.samples + size:
            row = None if samples is None else self._next_probe - self.samples - 1
            probe = _sample_hash(batch, row, size)
            if probe is not None:
                self.data_order[str(self._next_probe)] = probe[:16]
            self._next_probe = _probe_after(self._next_probe)
        self.samples += size

    @property
    def has_early_probes(self) -> bool:
        """Whether all probes up to :data:`LAST_EARLY_PROBE` were taken."""
        return self._next_probe > LAST_EARLY_PROBE

    def early_data_order(self) -> str | None:
        """One hash of the probes up to :data:`LAST_EARLY_PROBE`, 64 hexadecimal digits; None with fewer samples or no probe."""
        probes = {position: probe for position, probe in self.data_order.items() if int(position) <= LAST_EARLY_PROBE}
        if not self.has_early_probes or not probes:
            return None
        early = Fingerprint()
        early.update(probes)
        return early.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Keys: ``weights``, ``data_order``, ``samples``."""
        return {"weights": self.weights, "data_order": dict(self.data_order), "samples": self.samples}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The weights that are converted next are then not the initial ones."""
        self.weights = state_dict["weights"]
        self.data_order = dict(state_dict["data_order"])
        self.samples = state_dict["samples"]
        self._next_probe = _probe_after(self.samples)
        self._has_loaded = True


def _probe_after(position: int) -> int:
    """The next position whose binary form has no more digits before its zeros than that of 2 * PROBES - 1."""
    apart = 1 << max(0, position.bit_length() - (2 * PROBES - 1).bit_length())
    return (position // apart + 1) * apart


class FingerprintMonitor(Monitor):
    """Writes the fingerprints of a run to its config in Weights & Biases.

    Two runs whose ``weights`` and ``data_order`` are equal started from the same weights and saw the same data in the same
    order, so that their curves can be compared point by point. The weights are those before the precision plugin converts them,
    so the fingerprint does not depend on the precision. It reads all weights once, when training is set up, and then 48 of the
    first 64 samples; each is copied to the host.

    Its ``state_dict`` holds ``weights``, ``data_order`` (hashes by position) and ``samples``, so that a resumed run has the
    fingerprints of its beginning.

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
        """Take the batch in, while it can change what is written."""
        if not self._found.has_early_probes:
            self._found.add(batch, count_batch(batch).samples)

    def recipe(self) -> dict[str, str | float]:
        """``weights`` and ``data_order``, 64 hexadecimal digits each, once enough samples were seen."""
        known = {"weights": self._found.weights, "data_order": self._found.early_data_order()}
        return {name: value for name, value in known.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """The fingerprints so far; see the class."""
        return self._found.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with those of a checkpoint."""
        self._found.load_state_dict(state_dict)


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


def _sample_hash(batch: Any, row: int | None, size: int) -> str | None:
    """The hash of one sample, or of the whole batch if `row` is None; None if no value in it can be hashed."""
    sample = batch if row is None else _sample(batch, row, size)
    if not any(isinstance(leaf, Tensor | str | bytes | int | float) for _, leaf in leaves(sample)):
        return None  # types alone would make any two orders of data equal
    fingerprint = Fingerprint(round_to=torch.bfloat16)
    fingerprint.update(sample)
    return fingerprint.hexdigest()


def _sample(value: Any, row: int, size: int) -> Any:
    """The row of everything that has as many as there are samples, tensors or lists of texts or numbers; the rest whole."""
    if isinstance(value, Tensor):
        return value[row] if value.ndim and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {key: _sample(item, row, size) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == size and all(isinstance(item, str | bytes | int | float) for item in value):
            return value[row]
        return [_sample(item, row, size) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _sample(getattr(value, field.name), row, size) for field in dataclasses.fields(value)}
    return value


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    # an object's default repr holds its address, which differs between equal runs
    return repr(leaf) if isinstance(leaf, str | bytes | int | float | bool | None) else type(leaf).__qualname__


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
