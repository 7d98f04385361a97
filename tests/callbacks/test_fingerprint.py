"""Fingerprints are equal for equal bits and differ for one bit, one name, one shape, one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.callbacks.fingerprint import Fingerprint, weights_fingerprint


def of(*values: Any, round_to: torch.dtype | None = None) -> str:
    fingerprint = Fingerprint(round_to)
    for value in values:
        fingerprint.update(value)
    return fingerprint.hexdigest()


@dataclass
class Batch:
    x: Tensor


DIFFERENT = [
    torch.tensor([0.0, 1.0]),
    torch.tensor([-0.0, 1.0]),
    torch.tensor([0.0, 1.0], dtype=torch.bfloat16),
    torch.tensor([[0.0, 1.0]]),
    torch.tensor([1.0, 0.0]),
    {"x": torch.tensor([0.0, 1.0])},
    {"y": torch.tensor([0.0, 1.0])},
    [torch.tensor([0.0]), torch.tensor([1.0])],
    torch.tensor([0, 1]),
    torch.tensor([False, True]),
    torch.tensor([0j, 1j]),
    torch.tensor([0j, 1j]).conj(),
    "text",
    1,
    None,
]


def test_every_difference_shows() -> None:
    assert len({of(value) for value in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("value", [*DIFFERENT, Batch(torch.ones(2)), torch.zeros(()), torch.eye(2).to_sparse()])
def test_equal_values_have_equal_fingerprints(value: Any) -> None:
    assert of(value) == of(value)


def test_the_order_of_updates_counts() -> None:
    assert of(1, 2) != of(2, 1)


def test_memory_layout_does_not_count() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert of(matrix) == of(matrix.t().contiguous().t())


def test_a_batch_that_a_plugin_already_rounded_has_the_same_fingerprint() -> None:
    batch = torch.randn(100)
    assert of(batch, round_to=torch.bfloat16) == of(batch.to(torch.bfloat16), round_to=torch.bfloat16)
    assert of(batch) != of(batch.to(torch.bfloat16))


def test_objects_are_known_by_their_type_not_by_their_address() -> None:
    assert of(object()) == of(object())


def test_weights_include_buffers_and_names() -> None:
    module = nn.BatchNorm1d(2)
    before = weights_fingerprint(module)
    assert weights_fingerprint(nn.Sequential(module)) != before
    module.running_mean = torch.ones(2)
    assert weights_fingerprint(module) != before


def test_weights_without_values_have_no_fingerprint() -> None:
    assert weights_fingerprint(nn.Linear(2, 2, device="meta")) is None
    assert weights_fingerprint(nn.LazyLinear(2)) is None
