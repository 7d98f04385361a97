"""Tokens and samples are counted from the batch, and nothing waits for the device."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp.callbacks.tokens import count_batch, token_count
from tests.instruments import CountSyncs

IDS = torch.zeros(2, 5, dtype=torch.int64)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
LABELS = torch.zeros(2, dtype=torch.int64)


@dataclass
class Record:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("batch", "tokens", "positions", "samples", "source"),
    [
        (IDS, 10, 10, 2, "first integer tensor"),
        ((IDS, IDS), 10, 10, 2, "first integer tensor"),
        ((torch.zeros(2, 3, 4), LABELS), 2, 2, 2, "first integer tensor"),
        ({"labels": LABELS, "input_ids": IDS}, 10, 10, 2, "input_ids"),
        ({"input_ids": IDS, "attention_mask": MASK}, 4, 10, 2, "attention_mask"),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, 4, 10, 2, "attention_mask"),
        # packed sequences are numbered in the mask: nonzero elements count, not their sum
        ({"input_ids": IDS, "attention_mask": 3 * MASK}, 4, 10, 2, "attention_mask"),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), 4, 10, 2, "attention_mask"),
        ({"inputs_embeds": torch.zeros(2, 5, 8), "labels": LABELS, "attention_mask": MASK}, 4, 10, 2, "attention_mask"),
        # which pairs of tokens may attend, or what is added to their scores, is not padding
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}, 10, 10, 2, "input_ids"),
        ({"input_ids": IDS, "attention_mask": MASK.float()}, 10, 10, 2, "input_ids"),
        ({"input_ids": IDS, "attention_mask": None}, 10, 10, 2, "input_ids"),
        (Record(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32)), 3, 3, 3, "first integer tensor"),
        ([torch.zeros(7, 3), torch.zeros(7)], None, None, 7, "unknown"),
        ({"a": ["words", {"b": torch.zeros(3, 1)}]}, None, None, 3, "unknown"),
        (torch.tensor(5), 1, 1, None, "first integer tensor"),
        (None, None, None, None, "unknown"),
        ("words", None, None, None, "unknown"),
    ],
)
def test_a_batch_is_counted_by_its_sizes_and_its_mask(batch, tokens, positions, samples, source) -> None:
    count = count_batch(batch)
    assert (None if count.tokens is None else int(count.tokens)) == tokens
    assert (count.positions, count.samples, count.source) == (positions, samples, source)
    assert count.is_padding_known == (source == "attention_mask")


def test_only_a_mask_makes_the_count_a_tensor_and_no_count_makes_the_host_wait() -> None:
    with CountSyncs() as syncs:
        plain = count_batch({"input_ids": IDS})
        masked = count_batch({"input_ids": IDS, "attention_mask": MASK})
        assert syncs.seen == []
        int(masked.tokens)
        assert syncs.seen != []
    assert isinstance(plain.tokens, int)
    assert isinstance(masked.tokens, Tensor)
    assert masked.tokens.ndim == 0


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (IDS, 10),
        ((torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32)), 2),
        ({"mask": torch.ones(4, dtype=torch.bool), "ids": torch.zeros(4, dtype=torch.uint8)}, 4),
        ({"input_ids": IDS, "attention_mask": MASK}, 10),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.complex64)], None),
        (None, None),
    ],
)
def test_the_token_count_has_padding_in_it(batch: Any, tokens: int | None) -> None:
    assert token_count(batch) == tokens
