"""What a forward keeps for its backward, counted from the autograd graph.

On an accelerator the allocator knows the peak, and what is not weights, masters, gradients or optimizer state is activations
and temporaries. A CPU has no such allocator, and the process's resident memory holds the interpreter, libraries and data
besides. So there activations are counted directly: the graph below the loss is walked just before backward begins, when as a
rule the most is alive, and the bytes of the *storages* that its nodes have saved are added up, each storage once.

The walk reads what is there. It puts no hooks into the forward (``torch.autograd.graph.saved_tensors_hooks`` makes
``torch.func.grad`` raise), unpacks nothing (under activation checkpointing that would compute the segment again), and keeps
nothing alive. Counted are

* tensors that operations saved, and custom ``autograd.Function``, with what it keeps as attributes of ``ctx``;
* what saved-tensor hooks made of them (``save_on_cpu``), and the inputs of checkpointed segments.

Not counted are parameters, buffers and the batch, which are there without a graph; temporaries of single operations; the
gradients of activations; and what a checkpointed segment computes again in backward. Under autocast the 16-bit copies of fp32
weights that operations save do count: they are memory that fp32 training does not need.

Worked example: ``Linear(4, 8)``, ``ReLU``, ``Linear(8, 1)`` in fp32 on a batch of 2 saves the input of each layer and the
output of the ReLU. The first is the batch, the other two are one storage of 2 * 8 * 4 = 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import Node

from lightning_mp.cost.memory import StorageKey, tensors_in, unseen_bytes

RAW = "_raw_saved_"
#: Names of the attributes that hold saved tensors, by the type of the node.
_NAMES: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def saved_bytes(root: Tensor, known: Iterable[StorageKey] = ()) -> int | None:
    """The bytes of the storages that the graph below ``root`` has saved for backward.

    Args:
        root: a tensor with a graph, such as the loss. Call this before its backward, which frees the graph.
        known: storages that are not to count (:func:`~lightning_mp.cost.memory.storage_keys` of parameters, buffers, batch).

    Returns:
        Bytes, or None if ``root`` has no graph, or this torch does not show saved tensors without unpacking them.

    Reads shapes and addresses only: no copy, no device-to-host sync. About 10 microseconds of host time for each node.

    Example:
        >>> import torch
        >>> x = torch.ones(1000, requires_grad=True)
        >>> saved_bytes(x.exp().sum())  # the derivative of exp is its result
        4000
    """
    if root.grad_fn is None:
        return None
    seen = set(known)
    total = 0
    for node in _nodes(root.grad_fn):
        for saved in _saved(node):
            if not isinstance(saved, Tensor) and not hasattr(saved, "data"):
                return None
            total += unseen_bytes(_held(saved), seen)
    return total


def _nodes(root: Node) -> Iterator[Node]:
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _saved(node: Node) -> Iterator[Any]:
    """What a node has saved: ``SavedTensor`` objects and, for custom functions, tensors among the attributes of ``ctx``."""
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(name for name in dir(kind) if name.startswith(RAW))
    for name in _NAMES[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            continue
        yield from (item for item in (value if isinstance(value, (tuple, list)) else (value,)) if item is not None)
    yield from tensors_in(list(getattr(node, "__dict__", {}).values()))


def _held(saved: Any) -> Iterator[Tensor]:
    """The tensors that a saved one keeps alive, without unpacking it."""
    if isinstance(saved, Tensor):
        yield saved
        return
    packed = saved.data  # the tensor, or what a hook made of it
    if packed is not None:
        yield from tensors_in(packed)
    if packed is None or isinstance(packed, Tensor):
        return
    # checkpointing packs a placeholder; the inputs from which to compute again are kept by the hook that unpacks it
    for cell in getattr(getattr(saved, "unpack_hook", None), "__closure__", None) or ():
        for value in list(getattr(cell.cell_contents, "__dict__", {}).values()):
            if isinstance(value, Node):  # torch before 2.12 saved them in a node
                for inner in _saved(value):
                    yield from _held(inner)
            for item in value if isinstance(value, (tuple, list)) else ():
                if type(item) is type(saved):
                    yield from _held(item)
                else:
                    yield from tensors_in(item)
