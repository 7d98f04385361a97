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
| `bf16-master`, copy  | 2       | 4       | 2         | 8               | 16    |
| `16-master`          | 2       | 4       | 2 (4)     | 8               | 16    |

Gradients change size on the way. autograd makes them in the parameter's dtype; loss scaling then unscales fp16 ones into
fp32, and sums over micro-batches and averages over ranks are fp32 too. :func:`persistent_bytes` counts them as they are
when it is called; :class:`GradientWatch` as they are in backward, which is what the table has. The number in
brackets is what they take from unscaling until they are cleared.

Activations, temporary tensors and the allocator's own slack are not persistent, so they are not here: on an
accelerator :mod:`lightning_mp.cost.allocator` has the peak that includes them, on a CPU
:mod:`lightning_mp.cost.activations` counts activations, and :func:`peak_rss_bytes` is the peak of the whole process
(with the interpreter and every library).
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
from torch.utils.hooks import RemovableHandle

from lightning_mp.cost.allocator import highest_before_resets

#: Device and address of a storage.
StorageKey = tuple[torch.device, int]
#: Tensors that need no look inside, if they are dense.
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes that outlive a step, by category.

    Attributes:
        weights: the module's parameters.
        masters: what the precision plugin holds beside them: remainders or fp32 copies.
        gradients: the parameters' `.grad`; zero when measured after `zero_grad(set_to_none=True)`.
        optimizer_state: every tensor in `optimizer.state`, step counters included.
        buffers: the module's buffers. Not part of `total`, because no precision changes them.
        parameters: the number of parameter elements, each distinct parameter once, and of a sharded one the local
            shard. A count, not bytes.
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


def persistent_bytes(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    masters: Iterable[Tensor] = (),
    device: torch.device | None = None,
) -> PersistentBytes:
    """Count the bytes of every storage that `module`, `optimizers` and `masters` keep alive.

    Reads shapes and addresses only: no copy, no device-to-host sync.

    Args:
        module: the module in training. Measure while gradients are alive and after a first step, or they read zero.
        optimizers: torch optimizers over its parameters (or wrappers with a `state` mapping).
        masters: tensors that a precision plugin holds persistently; empty for a plugin that holds none.
        device: count only what is on this device; None counts everything, wherever it is.
    """
    parameters = list(module.parameters())  # each distinct parameter once
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [value for optimizer in optimizers for value in optimizer.state.values()]

    seen: set[StorageKey] = set()
    return PersistentBytes(
        weights=unseen_bytes(parameters, seen, device),
        masters=unseen_bytes(masters, seen, device),
        gradients=unseen_bytes(gradients, seen, device),
        optimizer_state=unseen_bytes(state, seen, device),
        buffers=unseen_bytes(module.buffers(), seen, device),
        parameters=sum(_local_numel(p) for p in parameters),
    )


def step_counter_bytes(optimizers: Iterable[Optimizer]) -> int:
    """The bytes of single numbers in the optimizer state that do not have their parameter's shape: step counters.

    AdamW keeps one of 4 bytes for each parameter tensor. They do not grow with the parameters, so bytes per parameter are
    stated without them.
    """
    return sum(
        tensor.numel() * tensor.element_size()
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if isinstance(param, Tensor)
        for tensor in tensors_in(state)
        if tensor.numel() == 1 and tensor.shape != param.shape
    )


class GradientWatch:
    """Measures the gradients of one optimizer step as backward makes them, before they are unscaled, averaged or clipped.

    A hook on each parameter looks at ``parameter.grad`` the moment autograd has added to it. What counts is the largest of

    * the gradients that the last backward made, at the size in which autograd left them, with those that were there already
      and that it did not touch;
    * the same for each earlier backward of the step (accumulation);
    * the gradients that were there when a backward began: fp32 sums of earlier micro-batches.

    Gradients that do not pass through autograd's accumulation (FSDP2's sharded ones) count as they are found.

    Args:
        module: the module in training. Parameters that do not require a gradient now are not watched.

    It reads sizes only: no device-to-host sync. Call :meth:`remove` when the step is over.

    Example:
        >>> module = nn.Linear(10, 10, bias=False).half()
        >>> watch = GradientWatch(module)
        >>> module(torch.ones(1, 10, dtype=torch.half)).sum().backward()
        >>> module.weight.grad_dtype = None
        >>> module.weight.grad = module.weight.grad.float()  # as loss scaling does
        >>> watch.bytes()
        200
        >>> watch.remove()
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = list(module.parameters())  # each distinct one once
        self._made: dict[int, int] = {}  # bytes, by the parameter's id
        self._largest: dict[torch.device | None, int] = {}  # of earlier backwards; None stands for all devices
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._look)
            for param in self._params
            if param.requires_grad and param.is_leaf
        ]

    def _look(self, param: Tensor) -> None:
        if param.grad is not None:
            self._made[id(param)] = sum(t.numel() * t.element_size() for t in tensors_in(param.grad))

    def before_backward(self) -> None:
        """Take note of the gradients that are there; a backward follows."""
        for device in {None, *(param.device for param in self._params)}:
            alive = [p.grad for p in self._params if p.grad is not None]
            before = unseen_bytes(alive, set(), device)
            self._largest[device] = max(self._largest.get(device, 0), self._now(device), before)
        self._made = {}

    def bytes(self, device: torch.device | None = None) -> int | None:
        """The largest so far.

        Args:
            device: count only gradients of parameters on this device; None counts all.

        Returns:
            Bytes, or None if there was no gradient at all.
        """
        return max(self._largest.get(device, 0), self._now(device)) or None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _now(self, device: torch.device | None) -> int:
        made = sum(self._made.get(id(p), 0) for p in self._params if device in (None, p.device))
        others = [p.grad for p in self._params if p.grad is not None and id(p) not in self._made]
        return made + unseen_bytes(others, set(), device)


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

    It counts since the process began, or since somebody reset the counter; nothing here resets it, and what the resets of
    :class:`~lightning_mp.cost.allocator.PeakReader` have wiped is counted.
    """
    if device.type != "cuda":
        return None
    return max(torch.cuda.max_memory_allocated(device), highest_before_resets(device))


def storage_keys(values: Iterable[Any]) -> set[StorageKey]:
    """Device and address of every storage under nested `values`, for :func:`unseen_bytes`."""
    seen: set[StorageKey] = set()
    unseen_bytes(values, seen)
    return seen


def unseen_bytes(values: Iterable[Any], seen: set[StorageKey], device: torch.device | None = None) -> int:
    """The bytes of the storages under `values` that are not in `seen`, which grows by them.

    Args:
        values: tensors, and nested mappings and collections of them.
        seen: storages that are counted already.
        device: count only storages on this device; None counts all.
    """
    total = 0
    for value in values:
        for tensor in (value,) if type(value) in PLAIN and value.layout is torch.strided else tensors_in(value):
            if device is not None and tensor.device != device:
                continue
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            # a storage without an address (empty, or on the meta device) holds no memory
            if key[1] and key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every dense tensor in nested mappings and collections, in sparse tensors, and in wrappers (DTensor, quantised state)."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            yield from tensors_in([getattr(value, name) for name in flatten()[0]])
        elif value.layout == torch.sparse_coo:
            yield from (value._indices(), value._values())
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (value.crow_indices(), value.col_indices(), value.values())
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (value.ccol_indices(), value.row_indices(), value.values())
        elif value.layout == torch.strided:  # the storages of others (mkldnn) cannot be seen
            yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from tensors_in(item)


def _local_numel(param: Tensor) -> int:
    """The elements that this process holds of a parameter."""
    local = getattr(param, "_local_tensor", param)  # of a DTensor
    return int(local.numel())
