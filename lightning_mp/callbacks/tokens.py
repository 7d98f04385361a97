"""Count the tokens and samples of a batch from its tensors, without waiting for the device they are on.

Sizes are known on the host wherever a tensor lies. How much of a batch is padding is not: that is in the values of the
attention mask. Its nonzero elements are counted on the device, and the count stays there, a 0-dim tensor, until somebody
reads many of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.callbacks.nesting import leaves

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}


class BatchCount(NamedTuple):
    """What one batch holds.

    Attributes:
        tokens: tokens without padding as far as padding is known; an int, or a 0-dim tensor where the batch is; None if
        unknown. positions: tokens with padding, which is what the device works through; None if unknown. samples: size of the
        batch; None if unknown. is_padding_known: whether an attention mask told padding apart. source: what was counted, in
        words, for the record. ignored_mask: dtype and shape of an ``attention_mask`` that says nothing about padding, if there
        is one.
    """

    tokens: int | Tensor | None
    positions: int | None
    samples: int | None
    is_padding_known: bool
    source: str
    ignored_mask: str | None = None


def count_batch(batch: Any) -> BatchCount:
    """Count a batch by its sizes and its attention mask. No device-to-host sync.

    * ``input_ids`` (B, T), or else the first integer tensor in the order of the batch's own nesting (mappings, sequences,
      dataclasses): its elements are the tokens, padding included. For a classifier that is the labels, one for each sample.
      Booleans are masks, not integers.
    * ``attention_mask``, boolean or integer, of the shape of ``input_ids`` (or of two dimensions where there are none): its
      nonzero elements are the tokens. A mask of another shape or of a floating dtype says nothing about padding.
    * the size of the batch is the first dimension of what was counted, or else of the first tensor that has dimensions.
    """
    if isinstance(batch, tuple | list) and batch and _is_integers(batch[0]) and batch[0].ndim:
        size = batch[0].numel()  # the usual batch of a language model, without a walk
        return BatchCount(size, size, batch[0].shape[0], False, "first integer tensor")
    named = batch if isinstance(batch, Mapping) else {}
    mask = named.get("attention_mask")
    if mask is not None and _is_padding_mask(mask, named.get("input_ids")):
        return BatchCount(torch.count_nonzero(mask), mask.numel(), mask.shape[0], True, "attention_mask")
    tensors = _tensors(batch)
    ids = _token_ids(batch, tensors)
    if ids is None:
        return BatchCount(None, None, _first_dimension(tensors), False, "unknown")
    ignored = f"{mask.dtype}, {tuple(mask.shape)}" if isinstance(mask, Tensor) else None
    positions = ids.numel()
    source = "input_ids" if ids is named.get("input_ids") else "first integer tensor"
    return BatchCount(positions, positions, ids.shape[0] if ids.ndim else _first_dimension(tensors), False, source, ignored)


def token_count(batch: Any) -> int | None:
    """The number of tokens in the batch, padding included, or None if it holds no integer tensor.

    As :func:`count_batch` counts them: the elements of ``input_ids``, or of the batch's first integer tensor.
    """
    ids = _token_ids(batch, _tensors(batch))
    return None if ids is None else ids.numel()


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of its nesting."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, list | tuple) and all(isinstance(item, Tensor) for item in batch):
        return list(batch)  # the usual batch, without a walk
    return [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)]


def _token_ids(batch: Any, tensors: list[Tensor]) -> Tensor | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids if isinstance(ids, Tensor) else next(filter(_is_integers, tensors), None)


def _is_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _INTEGERS


def _is_padding_mask(mask: Any, input_ids: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype.is_floating_point or mask.dtype.is_complex:
        return False
    return mask.shape == input_ids.shape if isinstance(input_ids, Tensor) else mask.ndim == 2


def _first_dimension(tensors: list[Tensor]) -> int | None:
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)
