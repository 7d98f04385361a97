"""Dispatch modes that see every tensor operation: one counts device-to-host syncs, one the bytes that are allocated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
#: Operations whose result the host has to wait for, if the tensors are on a device.
SYNCING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}


class CountSyncs(TorchDispatchMode):
    """Counts operations that would make the host wait: reading a value, or a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        boolean_index = func in (aten.index.Tensor, aten.index_put_.default) and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] or ()
        )
        if func in SYNCING or boolean_index:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class TrackBytes(TorchDispatchMode):
    """Tracks the bytes of storages that are made while it is active: those alive now, and the most alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.alive -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.alive += size
        self.peak = max(self.peak, self.alive)
