"""The peaks of an accelerator's memory, for several readers of one counter.

The allocator keeps one peak for each device. It only rises until somebody resets it, and a reset takes it from everybody else.
So the peak of a *window*, the time between two readings, can be had in two ways:

* **with resets**: the counter is reset when a window begins, so what it shows at the end is the window's peak;
* **without**: only a counter that rose shows the window's peak. If it did not, all that is known is that the window stayed
  below an earlier one, and the answer is None.

Readers of this module tell each other before one of them resets the counter, so each has its own windows and its own peak of
the run, and :func:`highest_before_resets` keeps what was wiped. Others (``torch.cuda.max_memory_allocated`` in user code) see
the peak since the last reset.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALLOCATED, RESERVED = "allocated_bytes.all.peak", "reserved_bytes.all.peak"
RETRIES = "num_alloc_retries"


@dataclass(frozen=True)
class Peaks:
    """Bytes at the peaks of a window and of the run; None for what is not known.

    Attributes:
        allocated: the most bytes in tensors at a time, in the window.
        reserved: the most bytes that the allocator held, in the window.
        run_allocated: the most bytes in tensors at a time, since the reader was made.
        alloc_retries: how often an allocation failed at first, so that the allocator flushed its cache and tried again, since
            the reader was made.
    """

    allocated: int | None = None
    reserved: int | None = None
    run_allocated: int | None = None
    alloc_retries: int | None = None


class HighWater:
    """The windows of a counter that only rises between resets.

    Args:
        shown: what the counter shows now; None if it begins anew.

    Example:
        >>> mark = HighWater(shown=10)
        >>> mark.close(shown=12), mark.close(shown=12)  # nobody knows what the second window was
        (12, None)
        >>> mark.before_reset(shown=12)
        >>> mark.close(shown=3), mark.run  # 3 since the reset; before it, somewhere below 12
        (None, 12)
    """

    def __init__(self, shown: int | None) -> None:
        self.run: int | None = None  # highest since the beginning
        self._open(shown)

    def _open(self, shown: int | None) -> None:
        self._shown, self._highest, self._is_complete = shown, 0, True

    def before_reset(self, shown: int) -> None:
        """Take note of the counter before it is reset, in mid-window."""
        if self._shown is None or shown > self._shown:
            self._highest = max(self._highest, shown)
            self.run = max(self.run or 0, shown)
        else:
            self._is_complete = False
        self._shown = None

    def close(self, shown: int, is_reset: bool = False) -> int | None:
        """End a window and begin the next.

        Args:
            shown: what the counter shows now.
            is_reset: whether it is reset now.

        Returns:
            The window's peak, or None if it is not known.
        """
        self.before_reset(shown)
        peak = self._highest if self._is_complete else None
        self._open(None if is_reset else shown)
        return peak


_READERS: weakref.WeakSet[PeakReader] = weakref.WeakSet()
_HIGHEST: dict[torch.device, int] = {}


class PeakReader:
    """Reads the peaks of one accelerator, window by window. The first window begins when it is made.

    Args:
        device: an accelerator, with its index.
        resets: whether to reset the device's counter at the end of each window.

    It costs no device-to-host sync.
    """

    def __init__(self, device: torch.device, resets: bool = True) -> None:
        self.device = device
        self._resets = resets
        stats = allocator_stats(device) or {}
        self._retries = stats.get(RETRIES)
        if resets:
            _reset(device, stats)
        self._marks = {name: HighWater(None if resets else stats.get(name)) for name in (ALLOCATED, RESERVED)}
        _READERS.add(self)

    def close_window(self) -> Peaks:
        """The peaks since the last call; the next window begins."""
        stats = allocator_stats(self.device)
        if stats is None:
            return Peaks()
        windows = {name: mark.close(stats[name], self._resets) for name, mark in self._marks.items()}
        if self._resets:
            _reset(self.device, stats, but=self)
        retries = stats.get(RETRIES)
        if retries is not None:
            retries -= self._retries or 0
        return Peaks(
            allocated=windows[ALLOCATED],
            reserved=windows[RESERVED],
            run_allocated=self._marks[ALLOCATED].run,
            alloc_retries=retries if retries is not None and retries >= 0 else None,  # somebody may have reset it
        )

    def _before_reset(self, stats: Mapping[str, int]) -> None:
        for name, mark in self._marks.items():
            mark.before_reset(stats[name])


def allocator_stats(device: torch.device) -> Mapping[str, int] | None:
    """The allocator's counters for a device, or None if it keeps none (a CPU, or nothing was allocated yet)."""
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator
    if hasattr(accelerator, "memory_stats"):
        stats: Mapping[str, int] = accelerator.memory_stats(device)
    else:
        stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return stats if ALLOCATED in stats and RESERVED in stats else None


def device_bytes(device: torch.device) -> int | None:
    """The memory that the device has, or None for a CPU, or if it does not say. It asks the driver."""
    if device.type == "cpu":
        return None
    if hasattr(torch.accelerator, "get_memory_info"):
        return int(torch.accelerator.get_memory_info(device)[1])
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def highest_before_resets(device: torch.device) -> int:
    """The most bytes in tensors that a reader's reset has wiped from the device's counter; 0 if there was none."""
    return _HIGHEST.get(device, 0)


def _reset(device: torch.device, stats: Mapping[str, int], but: PeakReader | None = None) -> None:
    if ALLOCATED not in stats:
        return  # nothing was allocated yet
    for reader in _READERS:
        if reader.device == device and reader is not but:
            reader._before_reset(stats)
    _HIGHEST[device] = max(highest_before_resets(device), stats[ALLOCATED])
    if hasattr(torch.accelerator, "reset_peak_memory_stats"):
        torch.accelerator.reset_peak_memory_stats(device)
    elif device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
