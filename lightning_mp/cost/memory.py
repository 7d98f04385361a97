"""What training keeps in memory, counted from the tensors themselves.

The idea: walk over everything that lives from one optimizer step to the next (weights, masters, gradients, optimizer
state, buffers) and add up the bytes of the *storages* behind it. A storage counts once, in the first category that
meets it, so tied weights, views into a flat buffer and gradients that are views into a communication bucket are not
counted twice.

Worked example, AdamW, bytes per parameter (weights + masters + gradients + two moments):

| precision            | weights | masters | gradients | optimizer state | total |
|----------------------|---------|---------|-----------|-----------------|-------|
| fp32, `*-mixed`      | 4       | 0       | 4         | 8               | 16    |
| `bf16-true`          | 2       | 0       | 2         | 4               | 8     |
| `bf16-master`, split | 2       | 2       | 2         | 8               | 14    |

Activations, temporary tensors and the allocator's own slack are not persistent, so they are not here: on CUDA
`torch.cuda.max_memory_allocated` includes them, on CPU :func:`peak_rss_bytes` does (with the interpreter and every
library).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes that outlive a step, by category.

    Attributes:
        weights: the module's parameters.
        masters: what the precision plugin holds beside them: remainders or fp32 copies.
        gradients: the parameters' `.grad`; zero when measured after `zero_grad(set_to_none=True)`.
        optimizer_state: every tensor in `optimizer.state`, step counters included.
        buffers: the module's buffers. Not part of `total`, because no precision changes them.
        parameters: the number of parameter elements, each distinct parameter once. A count, not bytes.
    """

    weights: int
    masters: int
    gradients: int
    optimizer_state: int
    buffers: int
    parameters: int

    @property
    def total(self) -> int:
        """Weights + masters + gradients + optimizer state: the bytes that the choice of precision changes."""
        return self.weights + self.masters + self.gradients + self.optimizer_state

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes per parameter for each category and for `total`; all zero for a module without parameters."""
        counted = {name: value for name, value in asdict(self).items() if name != "parameters"}
        return {name: value / max(self.parameters, 1) for name, value in {**counted, "total": self.total}.items()}


def persistent_bytes(module: nn.Module, optimizers: Iterable[Optimizer], masters: Iterable[Tensor] = ()) -> PersistentBytes:
    """Count the bytes of every storage that `module`, `optimizers` and `masters` keep alive.

    Reads shapes and addresses only: no copy, no device-to-host sync.

    Args:
        module: the module in training. Measure while gradients are alive and after a first step, or they read zero.
        optimizers: torch optimizers over its parameters (or wrappers with a `state` mapping).
        masters: tensors that a precision plugin holds persistently; empty for a plugin that holds none.
    """
    parameters = list(module.parameters())  # each distinct parameter once
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [value for optimizer in optimizers for value in optimizer.state.values()]

    seen: set[tuple[str, int]] = set()
    return PersistentBytes(
        weights=_unseen_bytes(parameters, seen),
        masters=_unseen_bytes(masters, seen),
        gradients=_unseen_bytes(gradients, seen),
        optimizer_state=_unseen_bytes(state, seen),
        buffers=_unseen_bytes(module.buffers(), seen),
        parameters=sum(p.numel() for p in parameters),
    )


def peak_rss_bytes() -> int | None:
    """The largest resident set this process has had, or None where the system does not say.

    It covers the whole process: interpreter, libraries, data, activations. It never falls, and nothing here resets it.
    """
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)  # getrusage(2): bytes on macOS, KiB on Linux


def peak_cuda_bytes(device: torch.device) -> int | None:
    """Peak bytes that torch allocated on a CUDA `device` in this process, or None for another kind of device.

    It counts since the process began, or since somebody reset the counter; nothing here resets it.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _unseen_bytes(values: Iterable[Any], seen: set[tuple[str, int]]) -> int:
    """The bytes of the storages under `values` that are not in `seen`, which grows by them."""
    total = 0
    for value in values:
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            # a storage without an address (empty, or on the meta device) holds no memory
            if key[1] and key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every plain tensor in nested mappings and collections, and inside wrapper tensors (DTensor, quantised state)."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            yield from _tensors([getattr(value, name) for name in flatten()[0]])
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _tensors(item)
