"""Rates and times over a window of optimizer steps, as arithmetic over numbers that were measured.

Rates are ratios of sums (all tokens of the window over all its time), so that steps of different sizes weigh as they should.
The time of a step is told by its median, which one stall does not move, and its 95th percentile, which shows stalls. The
parts of a step are means, so that a loader that stalls at every tenth step shows and the parts add up to the mean step time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TimedStep(NamedTuple):
    """One optimizer step, or the several that different optimizers took in one batch, on one device. None is unknown.

    Attributes:
        time_ms: from the end of the step before to the end of this one, without pauses.
        data_wait_ms: of these, between batches.
        forward_backward_ms: from the start of a batch to its optimizer step, or to its end if it has none.
        optimizer_ms: from there to the end of the batch.
        optimizer_steps: how many optimizers stepped; times are divided by it.
        batches: the micro-batches that were accumulated.
        tokens: tokens of these, without padding where that is known.
        positions: tokens, padding included.
        padded_tokens: `positions`, if padding is known, else None.
        samples: the sizes of the micro-batches, summed.
        is_regular: whether it is fit for rates: not the first after a pause, and nothing was measured beside it.
    """

    time_ms: float
    data_wait_ms: float
    forward_backward_ms: float | None
    optimizer_ms: float | None
    optimizer_steps: int
    batches: int
    tokens: int | None
    positions: int | None
    padded_tokens: int | None
    samples: int | None
    is_regular: bool


@dataclass(frozen=True)
class StepFlops:
    """What a step costs in FLOPs on one device.

    Attributes:
        amount: FLOPs for each unit.
        unit: "token", "position" (a token, padding included), "sample", "batch" (a micro-batch), or "step" (an optimizer step).
    """

    amount: float
    unit: str

    def of(self, steps: Sequence[TimedStep]) -> float | None:
        """FLOPs of the steps, or None if a count that it takes is unknown."""
        counts: dict[str, Callable[[TimedStep], int | None]] = {
            "token": lambda step: step.tokens,
            "position": lambda step: step.positions,
            "sample": lambda step: step.samples,
            "batch": lambda step: step.batches,
            "step": lambda step: step.optimizer_steps,
        }
        units = total([counts[self.unit](step) for step in steps])
        return None if units is None else units * self.amount


def usable(steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
    """The regular steps of a window; all of them if fewer than two are regular; none if there are fewer than two at all."""
    regular = [step for step in steps if step.is_regular]
    chosen = regular if len(regular) >= 2 else steps
    return chosen if len(chosen) >= 2 else []


def summarise(steps: Sequence[TimedStep], flops: StepFlops | None = None) -> dict[str, float]:
    """Rates and times of one device over steps that took time. A value that is unknown is left out.

    Returns:
        by name: ``tokens_per_s``, ``samples_per_s``, ``padded_tokens_per_s``, ``tflops_per_s``, ``step_time_ms`` (median),
        ``step_time_p95_ms``, and the means ``data_wait_ms``, ``forward_backward_ms``, ``optimizer_ms`` per optimizer step.
    """
    seconds = sum(step.time_ms for step in steps) / 1e3
    if not seconds > 0:
        return {}
    times = sorted(step.time_ms / step.optimizer_steps for step in steps)
    sums = {
        "tokens_per_s": total([step.tokens for step in steps]),
        "samples_per_s": total([step.samples for step in steps]),
        "padded_tokens_per_s": total([step.padded_tokens for step in steps]),
    }
    parts = {
        "data_wait_ms": _mean_per_step([(step.data_wait_ms, step) for step in steps]),
        "forward_backward_ms": _mean_per_step([(step.forward_backward_ms, step) for step in steps]),
        "optimizer_ms": _mean_per_step([(step.optimizer_ms, step) for step in steps]),
    }
    work = None if flops is None else flops.of(steps)
    found = {
        **{name: None if value is None else value / seconds for name, value in sums.items()},
        "step_time_ms": quantile(times, 0.5),
        "step_time_p95_ms": quantile(times, 0.95),
        **parts,
        "tflops_per_s": None if work is None else work / seconds / 1e12,
    }
    return {name: value for name, value in found.items() if value is not None}


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """A quantile of ascending numbers, of which there is at least one, interpolated linearly between neighbours."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def total(values: Sequence[float | None]) -> float | None:
    """The sum, or None if one of the values is unknown or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean_per_step(parts: Sequence[tuple[float | None, TimedStep]]) -> float | None:
    """The mean over the optimizer steps whose part is known."""
    known = [(part, step.optimizer_steps) for part, step in parts if part is not None]
    return sum(part for part, _ in known) / sum(count for _, count in known) if known else None
