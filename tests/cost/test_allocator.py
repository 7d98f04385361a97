"""Windows of a peak counter that several readers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp.cost import allocator
from lightning_mp.cost.allocator import HighWater, PeakReader, Peaks, allocator_stats, device_bytes, highest_before_resets
from lightning_mp.cost.memory import peak_cuda_bytes
from tests.callbacks.stand_ins import FakeAccelerator

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch)


def test_each_window_has_its_own_peak_and_the_run_the_highest(accelerator: FakeAccelerator) -> None:
    reader = PeakReader(DEVICE)
    seen = []
    for peak in (100, 700, 300):
        accelerator.use(peak)
        accelerator.use(50)
        seen.append(reader.close_window())
    assert [peaks.allocated for peaks in seen] == [100, 700, 300]
    assert [peaks.run_allocated for peaks in seen] == [100, 700, 700]
    assert [peaks.reserved for peaks in seen] == [200, 1400, 1400], "the allocator gives nothing back here"


def test_what_came_before_the_reader_is_not_its_peak(accelerator: FakeAccelerator) -> None:
    accelerator.use(10_000)
    accelerator.use(5)
    assert PeakReader(DEVICE).close_window().allocated == 5


def test_without_resets_a_window_below_an_earlier_one_is_unknown_and_the_counter_is_left_alone(
    accelerator: FakeAccelerator,
) -> None:
    accelerator.use(400)
    reader = PeakReader(DEVICE, resets=False)
    seen = []
    for peak in (300, 500, 450, 600):
        accelerator.use(peak)
        seen.append(reader.close_window())
    assert [peaks.allocated for peaks in seen] == [None, 500, None, 600]
    assert [peaks.run_allocated for peaks in seen] == [None, 500, 500, 600]
    assert accelerator.resets == 0


def test_two_readers_do_not_disturb_each_other(accelerator: FakeAccelerator) -> None:
    often, seldom, passive = PeakReader(DEVICE), PeakReader(DEVICE), PeakReader(DEVICE, resets=False)
    seen = []
    for peak in (300, 900, 200):
        accelerator.use(peak)
        accelerator.use(50)
        seen.append(often.close_window().allocated)
    assert seen == [300, 900, 200]
    assert seldom.close_window().allocated == 900
    assert passive.close_window().allocated == 900


def test_a_reset_by_others_is_noticed_by_a_reader_that_does_not_reset(accelerator: FakeAccelerator) -> None:
    reader = PeakReader(DEVICE, resets=False)
    accelerator.use(500)
    assert reader.close_window().allocated == 500
    accelerator.use(100)
    accelerator.reset()
    assert reader.close_window().allocated is None


def test_what_resets_wipe_is_in_the_peak_of_the_process(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: accelerator.stats[allocator.ALLOCATED])
    monkeypatch.setattr(allocator, "_HIGHEST", {})
    reader = PeakReader(DEVICE)
    assert highest_before_resets(DEVICE) == 0
    accelerator.use(800)
    reader.close_window()
    accelerator.use(100)
    assert peak_cuda_bytes(DEVICE) == 800
    accelerator.use(900)
    assert peak_cuda_bytes(DEVICE) == 900


def test_retries_are_counted_from_the_reader_on_and_are_unknown_if_the_count_was_reset(accelerator: FakeAccelerator) -> None:
    accelerator.stats[allocator.RETRIES] = 5
    reader = PeakReader(DEVICE)
    assert reader.close_window().alloc_retries == 0
    accelerator.stats[allocator.RETRIES] = 7
    assert reader.close_window().alloc_retries == 2
    accelerator.stats[allocator.RETRIES] = 0
    assert reader.close_window().alloc_retries is None


def test_an_allocator_that_was_not_used_yet_is_unknown_not_zero(accelerator: FakeAccelerator) -> None:
    stats, accelerator.stats = accelerator.stats, {}
    reader = PeakReader(DEVICE)
    assert reader.close_window() == Peaks()
    accelerator.stats = stats
    accelerator.use(70)
    assert reader.close_window().allocated == 70


def test_torch_cuda_serves_where_torch_accelerator_lacks_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator(monkeypatch, module=torch.cuda)
    reader = PeakReader(DEVICE)
    accelerator.use(300)
    assert reader.close_window().allocated == 300
    assert accelerator.resets == 2
    assert device_bytes(DEVICE) == accelerator.total


def test_a_cpu_has_no_allocator_to_ask() -> None:
    assert allocator_stats(torch.device("cpu")) is None
    assert device_bytes(torch.device("cpu")) is None
    assert PeakReader(torch.device("cpu")).close_window() == Peaks()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("close", 5)], [5]),
        ([("close", 5), ("close", 5)], [5, None]),
        ([("reset", 7), ("close", 3)], [7]),
        ([("close", 7), ("reset", 7), ("close", 3)], [7, None]),
        ([("close", 7), ("reset", 9), ("close", 3)], [7, 9]),
    ],
)
def test_a_high_water_mark_knows_what_it_can_know(events: list[Any], expected: list[int | None]) -> None:
    mark = HighWater(shown=1)
    seen = [mark.close(shown) if what == "close" else mark.before_reset(shown) for what, shown in events]
    assert [value for (what, _), value in zip(events, seen, strict=True) if what == "close"] == expected


@pytest.mark.gpu
def test_a_real_device_shows_the_peak_of_each_window() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    reader = PeakReader(device)
    for mib in (64, 256, 32):
        block = torch.empty(mib << 20, dtype=torch.uint8, device=device)
        del block
        peaks = reader.close_window()
        assert peaks.allocated is not None
        assert mib << 20 <= peaks.allocated < (mib + 16) << 20
    assert peaks.run_allocated is not None
    assert peaks.run_allocated >= 256 << 20
    assert (device_bytes(device) or 0) > 1 << 30
