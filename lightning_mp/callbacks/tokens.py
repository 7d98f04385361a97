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

from lightning_mp.callbacks.fingerprint import leaves


class BatchCount(NamedTuple):
    """What one batch holds.

    Attributes:
        tokens: tokens without padding as far as padding is known; an int, or a 0-dim tensor where the batch is; None if
        unknown. positions: tokens with padding, which is what the device works through; None if unknown. samples: size of the
        batch; None if unknown. is_padding_known: whether an attention mask told padding apart. source: what was counted, in
        words, for the record.
    """

    tokens: int | Tensor | None
    positions: int | None
    samples: int | None
    is_padding_known: bool
    source: str


def count_batch(batch: Any) -> BatchCount:
    """Count a batch by its sizes and its attention mask. No device-to-host sync.

    * ``input_ids`` (B, T), or else the first integer tensor in the order of the batch's own nesting (mappings, sequences,
      dataclasses): its elements are the tokens, padding included. For a classifier that is the labels, one for each sample.
      Booleans are masks, not integers.
    * ``attention_mask``, boolean or integer, of the shape of ``input_ids`` (or of two dimensions where there are none): its
      nonzero elements are the tokens. A mask of another shape or of a floating dtype says nothing about padding.
    * the size of the batch is the first dimension of what was counted, or else of the first tensor that has dimensions.
    """
    named = batch if isinstance(batch, Mapping) else {}
    mask = named.get("attention_mask")
    if mask is not None and _is_padding_mask(mask, named.get("input_ids")):
        return BatchCount(torch.count_nonzero(mask), mask.numel(), mask.shape[0], True, "attention_mask")
    ids = _token_ids(batch)
    if ids is None:
        return BatchCount(None, None, _first_dimension(batch), False, "unknown")
    positions = ids.numel()
    source = "input_ids" if ids is named.get("input_ids") else "first integer tensor"
    return BatchCount(positions, positions, ids.shape[0] if ids.ndim else _first_dimension(batch), False, source)


def token_count(batch: Any) -> int | None:
    """The number of tokens in the batch, padding included, or None if it holds no integer tensor.

    As :func:`count_batch` counts them: the elements of ``input_ids``, or of the batch's first integer tensor.
    """
    ids = _token_ids(batch)
    return None if ids is None else ids.numel()


def _token_ids(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids
    elif isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and _is_integer(batch[0]):
        return batch[0]  # the usual batch of a language model, without a walk
    return next((leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and _is_integer(leaf)), None)


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_padding_mask(mask: Any, input_ids: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype.is_floating_point or mask.dtype.is_complex:
        return False
    return mask.shape == input_ids.shape if isinstance(input_ids, Tensor) else mask.ndim == 2


def _first_dimension(batch: Any) -> int | None:
    return next((leaf.shape[0] for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
