"""Clocks for work that may run on a device behind the host: mark moments now, read the time between them later.

On CUDA the host runs ahead of the device, so the host's clock would measure how fast kernels are launched. There a mark is a
CUDA event in the stream: recording one costs a few microseconds and waits for nothing, and the times between events are read
when somebody wants them, after one synchronisation. On other devices a mark is the host's ``perf_counter``; on an accelerator
that runs behind the host that is the time to launch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What marks moments. A mark is opaque; only the clock that made it can read it."""

    def mark(self) -> Any:
        """The present moment. Never waits."""

    def wait_for(self, mark: Any) -> None:
        """Wait until the moment has come on the device; needed before `milliseconds` of it and of earlier marks."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """The time between two marks."""

    def release(self, marks: Iterable[Any]) -> None:
        """Take back marks that nobody will read again."""


class HostClock:
    """The host's monotonic clock."""

    def mark(self) -> float:
        """Seconds of ``time.perf_counter``."""
        return time.perf_counter()

    def wait_for(self, mark: float) -> None:
        """Nothing to wait for."""

    def milliseconds(self, begin: float, end: float) -> float:
        """The time between two marks."""
        return (end - begin) * 1e3

    def release(self, marks: Iterable[float]) -> None:
        """Nothing is kept."""


class CudaClock:
    """CUDA events in the current stream of a device. Events that are released are recorded again, so few are ever made.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event in the device's current stream. No sync."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, mark: Any) -> None:
        """Wait for the device to reach the event. One synchronisation."""
        mark.synchronize()

    def milliseconds(self, begin: Any, end: Any) -> float:
        """The device's time between two events that it has reached."""
        return float(begin.elapsed_time(end))

    def release(self, marks: Iterable[Any]) -> None:
        """Keep the events for use by later marks."""
        self._free.extend(marks)


def clock_for(device: torch.device) -> Clock:
    """The clock that measures work on the device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
