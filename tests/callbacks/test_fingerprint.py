"""Fingerprints are equal for equal bits and differ for one bit, one name, one shape, one order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_mp.callbacks import fingerprint as fingerprint_module
from lightning_mp.callbacks.fingerprint import Fingerprint, FingerprintMonitor, RunFingerprint, weights_fingerprint
from tests.callbacks.language import Language, checkpoint, data, fit, probes, resumable


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


# --- the order of data -----------------------------------------------------------------------------------------------------


def order(batches: list[Any], sizes: list[int | None]) -> dict[str, str]:
    fingerprint = RunFingerprint()
    for batch, size in zip(batches, sizes, strict=True):
        fingerprint.add(batch, size)
    return fingerprint.data_order


def texts(samples: int) -> dict[str, Any]:
    """A batch with a tensor, a nested tensor, texts, and what all samples share."""
    values = torch.arange(float(samples))
    return {
        "x": values,
        "more": [torch.stack([values, -values], dim=1)],
        "name": [f"text {i}" for i in range(samples)],
        "scale": torch.ones(()),
        "mask": torch.ones(3, 3),
        "mode": "train",
    }


def cut(batch: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return {
        **batch,
        "x": batch["x"][begin:end],
        "more": [batch["more"][0][begin:end]],
        "name": batch["name"][begin:end],
    }


@pytest.mark.parametrize("size", [1, 2, 5, 20, 64])
def test_where_a_batch_ends_does_not_matter(size: int) -> None:
    whole = texts(64)
    parts = [cut(whole, begin, min(begin + size, 64)) for begin in range(0, 64, size)]
    found = order(parts, [len(part["x"]) for part in parts])
    assert found == order([whole], [64])
    assert list(found) == [str(position) for position in (*range(1, 33), *range(34, 65, 2))]
    assert len(set(found.values())) == 48


def test_32_samples_are_hashed_and_then_16_in_each_doubling() -> None:
    found = order([torch.arange(1024)], [1024])
    doublings = [*range(34, 65, 2), *range(68, 129, 4), *range(136, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    assert [int(key) for key in found] == [*range(1, 33), *doublings]
    assert probes(1024) == [int(key) for key in found], "other tests go by it"


def test_a_hash_has_16_hexadecimal_digits() -> None:
    for value in order([torch.arange(64)], [64]).values():
        assert len(value) == 16
        assert set(value) <= set("0123456789abcdef")


@pytest.mark.parametrize("position", [1, 2, 3, 4, 17, 31, 32, 33, 34, 50, 63, 64])
def test_another_order_shows_at_the_next_probe_and_not_before(position: int) -> None:
    samples = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = torch.cat([samples[: position - 1], samples[position - 1 :].roll(1)])
    base, other = order([samples], [64]), order([moved], [64])
    unequal = [int(key) for key in base if base[key] != other[key]]
    expected = [probe for probe in probes(64) if probe >= position]
    assert unequal == [probe for probe in expected if samples[probe - 1] != moved[probe - 1]]
    assert unequal or position == 64


@pytest.mark.parametrize("position", [33, 65, 129, 1000, 4097, 9000, 16_385, 30_001])
def test_a_change_of_order_in_the_middle_of_a_long_run_shows_before_the_run_is_7_percent_longer(position: int) -> None:
    samples = torch.arange(1, 32_769)
    changed = torch.cat([samples[: position - 1], -samples[position - 1 :]])
    base, other = order([samples], [32_768]), order([changed], [32_768])
    unequal = [int(key) for key in base if base[key] != other[key]]
    assert position <= unequal[0] <= 1.07 * position
    assert unequal == [int(key) for key in base if int(key) >= unequal[0]]


def test_a_batch_of_unknown_size_is_one_sample() -> None:
    assert order(["a", "b", "c", "d"], [None] * 4).keys() == {"1", "2", "3", "4"}
    assert order(["a", "b"], [None, None])["2"] != order(["a", "c"], [None, None])["2"]


def test_the_fingerprints_of_a_run_go_on_after_a_resume() -> None:
    batches = [torch.arange(3) + 3 * i for i in range(12)]
    for end in range(12):
        first, second = RunFingerprint(), RunFingerprint()
        first.weights = "abc"
        for batch in batches[:end]:
            first.add(batch, 3)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        for batch in batches[end:]:
            second.add(batch, 3)
        assert second.data_order == order(batches, [3] * 12)
        assert second.weights == "abc"


@pytest.mark.parametrize("end", [31, 32, 33, 63, 64, 65, 66, 67, 68, 131, 135, 136, 137, 500])
def test_after_a_resume_the_probes_go_on_at_the_next_one(end: int) -> None:
    samples = torch.arange(600)
    first, second = RunFingerprint(), RunFingerprint()
    first.add(samples[:end], end)
    second.load_state_dict(first.state_dict())
    second.add(samples[end:], 600 - end)
    assert [int(key) for key in second.data_order] == probes(600)
    assert second.data_order == order([samples], [600])


def test_the_fingerprint_for_a_config_is_of_the_first_probes_and_complete_after_64_samples() -> None:
    fingerprint = RunFingerprint()
    fingerprint.add(torch.arange(63), 63)
    assert fingerprint.early_data_order() is None
    fingerprint.add(torch.arange(1), 1)
    early = fingerprint.early_data_order()
    assert early is not None
    fingerprint.add(torch.arange(1000), 1000)
    assert fingerprint.early_data_order() == early
    other = RunFingerprint()
    other.add(torch.arange(64).flip(0), 64)
    assert other.early_data_order() not in (None, early)


def test_a_probe_is_rounded_so_that_the_precision_of_inputs_does_not_matter() -> None:
    rows = torch.randn(4, 5)
    assert order([rows], [4]) == order([rows.bfloat16()], [4])


def test_several_watchers_read_the_weights_once_and_leave_the_plugin_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(fingerprint_module, "weights_fingerprint", lambda module: read.append(module) or "w")
    trainer = SimpleNamespace(precision_plugin=Precision())
    watchers = [RunFingerprint() for _ in range(3)]
    watchers[0].load_state_dict({"weights": "initial", "data_order": {}, "samples": 0})
    for watcher in watchers:
        watcher.watch(trainer)  # type: ignore[arg-type]
    module = nn.Linear(1, 1)
    assert trainer.precision_plugin.convert_module(module) is module
    assert [watcher.weights for watcher in watchers] == ["initial", "w", "w"]
    assert len(read) == 1
    assert "convert_module" not in vars(trainer.precision_plugin)


def test_the_monitor_keeps_the_weights_of_the_beginning_over_a_resume(tmp_path: Path) -> None:
    first, second = FingerprintMonitor(), FingerprintMonitor()
    fit(Language(), first, checkpoint(tmp_path, 10), loader=resumable(), enable_checkpointing=True)
    assert set(first.recipe()) == {"weights", "data_order"}
    fit(Language(), second, loader=resumable(), ckpt=tmp_path / "step=10.ckpt")
    assert second.recipe() == first.recipe()
    third = FingerprintMonitor()
    fit(Language(seed=1), third, loader=data(seed=1))
    assert third.recipe()["weights"] != first.recipe()["weights"]
    assert third.recipe()["data_order"] != first.recipe()["data_order"]
