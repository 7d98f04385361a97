"""Fingerprints: one short string that is equal when, and only when, the tensors behind it are equal bit for bit.

Two runs may be compared point by point when they start from the same weights and see the same data in the same order.
A SHA-256 over names, dtypes, shapes and bytes settles both. The bits are hashed, not the values, so 0.0 and -0.0
differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from _hashlib import HASH


class Fingerprint:
    """A running SHA-256 over values: `update` in order, read `hexdigest` whenever.

    Args:
        round_to: a dtype that floating tensors are rounded to before they are hashed. With `torch.bfloat16` a batch
            has one
            fingerprint whether or not a precision plugin already cast it, since rounding twice is rounding once.
    """

    def __init__(self, round_to: torch.dtype | None = None) -> None:
        self._hash: HASH = hashlib.sha256()
        self._round_to = round_to

    def update(self, value: Any) -> None:
        """Add a tensor, a number, a string, or any nesting of mappings, sequences and dataclasses of these.

        Copies tensors to the host: one device-to-host sync for each tensor on an accelerator.
        """
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and self._round_to is not None:
                leaf = leaf.detach().to(self._round_to)
            self._hash.update(f"{path}:{_describe(leaf)};".encode())
            if isinstance(leaf, Tensor):
                self._hash.update(_bytes(leaf))

    def hexdigest(self) -> str:
        """The fingerprint of everything so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()


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
