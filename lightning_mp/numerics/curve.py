"""A loss curve of any length in bounded memory.

The curve is a row of groups; each is the sum of the losses of 2^k consecutive records. When all ``max_points`` groups are full,
neighbours are added in pairs and k grows by one. So a record costs O(1) on average, the curve never holds more than
``max_points`` groups, and each group is exactly the mean of its losses: nothing is sampled, and no loss is counted twice.

Worked number: with 4096 groups, 1,000,000 steps are 3907 groups of 256 steps; the group ends at step 256 j.

Sums are kept, not means: adding two sums in float64 loses nothing that matters (1e6 losses near 10 have a relative rounding
error of 1e-10 at the very most), and a merged group is the same as one that was summed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST_LOSS = (2.0 - 2.0**-23) * 2.0**127  # fp32's largest; a loss beyond it counts as not finite
LARGEST_TOTAL = 2**100  # of what a saved curve may count: beyond any use, and far from where float64 ends


class LossCurve:
    """The true loss of each optimizer step against steps, samples and tokens, thinned to at most ``max_points`` groups.

    Args:
        max_points: the largest number of groups; an even number, at least 2.

    Raises:
        ValueError: ``max_points`` is not such a number.

    Attributes:
        group_size: how many consecutive records a full group holds, a power of two.
        last_step: the last optimizer step that was added, 0 before the first.
        last_samples: samples consumed up to there; None if they are not known.
        last_tokens: tokens consumed up to there; None if they are not known.
        nonfinite_steps: how many losses were NaN or infinite. They enter no mean.
        first_nonfinite_step: the first such step, or None.

    Example:
        >>> curve = LossCurve(max_points=2)
        >>> for step, loss in enumerate([4.0, 2.0, 1.0, 1.0], start=1):
        ...     curve.add(step, loss, samples=8 * step)
        >>> curve.steps, curve.samples, curve.losses
        ([2, 4], [16, 32], [3.0, 1.0])
    """

    def __init__(self, max_points: int = 4096) -> None:
        if isinstance(max_points, bool) or not isinstance(max_points, int) or max_points < 2 or max_points % 2:
            raise ValueError(f"max_points is {max_points!r}; it must be an even number, at least 2")
        self.max_points = max_points
        self.group_size = 1
        self.last_step = 0
        self.last_samples: int | None = None
        self.last_tokens: int | None = None
        self.first_nonfinite_step: int | None = None
        self._steps: list[int] = []
        self._samples: list[int] | None = []
        self._tokens: list[int] | None = []
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._step_sums: list[int] = []  # of the steps whose losses are in the sum: says where the mean was taken
        self._nonfinite: list[int] = []
        self._open = 0  # records in the last group, once there is one

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LossCurve) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, step: int, loss: float | None, samples: int | None = None, tokens: int | None = None) -> None:
        """Add the loss of one optimizer step, and what had been consumed after it.

        Args:
            step: the optimizer step, counted from 1. Steps may be left out, not repeated.
            loss: the true loss, or None if it is not known; the totals move either way. A loss that is not finite is counted
                and enters no mean.
            samples: samples consumed up to and including this step, over all ranks. Once unknown, unknown for the whole curve.
            tokens: tokens, likewise.

        Raises:
            ValueError: ``step`` does not exceed the last one, or a total shrank or is negative.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} does not come after step {self.last_step}; steps count from 1 and must increase")
        if samples is not None and samples < (self.last_samples or 0):
            raise ValueError(_shrank("samples", step, samples, self.last_samples))
        if tokens is not None and tokens < (self.last_tokens or 0):
            raise ValueError(_shrank("tokens", step, tokens, self.last_tokens))
        if self._open == self.group_size or not self._steps:
            self._start_group()
        self._open += 1
        self.last_step = self._steps[-1] = step
        if self._samples is not None:
            if samples is None:
                self._samples = self.last_samples = None
            else:
                self.last_samples = self._samples[-1] = samples
        if self._tokens is not None:
            if tokens is None:
                self._tokens = self.last_tokens = None
            else:
                self.last_tokens = self._tokens[-1] = tokens
        if loss is None:
            return
        if -LARGEST_LOSS <= loss <= LARGEST_LOSS:  # False for NaN
            self._sums[-1] += loss
            self._counts[-1] += 1
            self._step_sums[-1] += step
        else:
            self._nonfinite[-1] += 1
            if self.first_nonfinite_step is None:
                self.first_nonfinite_step = step

    @property
    def steps(self) -> list[int]:
        """The last optimizer step of each group."""
        return list(self._steps)

    @property
    def samples(self) -> list[int] | None:
        """Samples consumed at the end of each group, or None if they are not known throughout."""
        return None if self._samples is None or not self._steps else list(self._samples)

    @property
    def tokens(self) -> list[int] | None:
        """Tokens consumed at the end of each group, or None if they are not known throughout."""
        return None if self._tokens is None or not self._steps else list(self._tokens)

    @property
    def losses(self) -> list[float | None]:
        """The mean of each group's finite losses; None for a group without one."""
        return [total / count if count else None for total, count in zip(self._sums, self._counts, strict=True)]

    @property
    def counts(self) -> list[int]:
        """How many losses each group's mean is made of."""
        return list(self._counts)

    @property
    def mean_steps(self) -> list[float | None]:
        """The mean of the steps whose losses are in each group: where on the curve its mean was taken."""
        return [total / count if count else None for total, count in zip(self._step_sums, self._counts, strict=True)]

    @property
    def nonfinite_steps(self) -> int:
        """How many losses were NaN or infinite."""
        return sum(self._nonfinite)

    def drop_after(self, step: int) -> None:
        """Forget what came after an optimizer step, as a resume from that step does.

        Exact where the step ends a group. Else the group that holds the step is forgotten with the rest, because its sum cannot
        be taken apart: up to ``group_size - 1`` records before the step are lost, never one counted twice.
        """
        if step >= self.last_step:
            return
        keep = sum(end <= step for end in self._steps)
        columns: list[list[Any] | None] = [self._steps, self._samples, self._tokens, self._sums, self._counts]
        for column in [*columns, self._step_sums, self._nonfinite]:
            if column is not None:
                del column[keep:]
        self._open = self.group_size if keep else 0
        self.last_step = self._steps[-1] if keep else 0
        self.last_samples = self._samples[-1] if self._samples and keep else None
        self.last_tokens = self._tokens[-1] if self._tokens and keep else None
        if self.first_nonfinite_step is not None and self.first_nonfinite_step > self.last_step:
            self.first_nonfinite_step = None

    def as_dict(self) -> dict[str, Any]:
        """The whole curve as plain lists and numbers, for JSON and for torch's safe loader.

        Keys: ``max_points``, ``group_size``, ``open_records`` (in the last group), ``first_nonfinite_step``, and a list for
        each of ``steps``, ``samples``, ``tokens`` (None if unknown), ``loss_sums``, ``counts``, ``step_sums``, ``nonfinite``.
        """
        return {
            "max_points": self.max_points,
            "group_size": self.group_size,
            "open_records": self._open,
            "first_nonfinite_step": self.first_nonfinite_step,
            "steps": list(self._steps),
            "samples": None if self._samples is None else list(self._samples),
            "tokens": None if self._tokens is None else list(self._tokens),
            "loss_sums": list(self._sums),
            "counts": list(self._counts),
            "step_sums": list(self._step_sums),
            "nonfinite": list(self._nonfinite),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LossCurve:
        """Build the curve that ``as_dict`` described, exactly.

        Raises:
            ValueError: a key is missing, or a value is not what a curve can hold; the message names the key.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"the curve is a {type(value).__name__}, not a mapping")
        curve = cls(_integer(value, "max_points", 2))
        curve.group_size = _integer(value, "group_size", 1)
        if curve.group_size & (curve.group_size - 1):
            raise ValueError(f"the curve's group_size is {curve.group_size}, not a power of two")
        curve._steps = _increasing(value, "steps", strictly=True)
        length = len(curve._steps)
        if length > curve.max_points:
            raise ValueError(f"the curve has {length} groups, more than its max_points, {curve.max_points}")
        curve._samples = None if value.get("samples") is None else _increasing(value, "samples", length)
        curve._tokens = None if value.get("tokens") is None else _increasing(value, "tokens", length)
        curve._counts = _integers(value, "counts", length)
        curve._nonfinite = _integers(value, "nonfinite", length)
        curve._step_sums = _integers(value, "step_sums", length)
        curve._sums = _finite_numbers(value, "loss_sums", length)
        curve._open = _integer(value, "open_records", 0)
        if not (curve._open <= curve.group_size and (curve._open > 0) == (length > 0)):
            raise ValueError(f"the curve's open_records is {curve._open}; a group holds 1 to {curve.group_size} records")
        if any(a + b > curve.group_size for a, b in zip(curve._counts, curve._nonfinite, strict=True)):
            raise ValueError(f"the curve's counts exceed its group_size, {curve.group_size}")
        curve._check_sums()
        if length:
            curve.last_step = curve._steps[-1]
            curve.last_samples = curve._samples[-1] if curve._samples else None
            curve.last_tokens = curve._tokens[-1] if curve._tokens else None
        first = value.get("first_nonfinite_step")
        curve.first_nonfinite_step = None if first is None else _integer(value, "first_nonfinite_step", 1)
        if (first is None) != (curve.nonfinite_steps == 0) or (first or 0) > curve.last_step:
            raise ValueError(f"the curve's first_nonfinite_step is {first!r}, its nonfinite steps are {curve.nonfinite_steps}")
        return curve

    def _check_sums(self) -> None:
        before = 0
        for end, total, count, step_sum in zip(self._steps, self._sums, self._counts, self._step_sums, strict=True):
            if not before * count <= step_sum <= end * count or abs(total) > count * LARGEST_LOSS:
                raise ValueError(f"the curve's sums at step {end} (loss {total}, steps {step_sum}) do not fit {count} losses")
            before = end

    def _start_group(self) -> None:
        if len(self._steps) == self.max_points:
            self._merge_pairs()
        self._steps.append(0)
        if self._samples is not None:
            self._samples.append(0)
        if self._tokens is not None:
            self._tokens.append(0)
        self._sums.append(0.0)
        self._counts.append(0)
        self._step_sums.append(0)
        self._nonfinite.append(0)
        self._open = 0

    def _merge_pairs(self) -> None:
        self._steps = self._steps[1::2]
        self._samples = self._samples and self._samples[1::2]
        self._tokens = self._tokens and self._tokens[1::2]
        self._sums = _pair_sums(self._sums)
        self._counts = _pair_sums(self._counts)
        self._step_sums = _pair_sums(self._step_sums)
        self._nonfinite = _pair_sums(self._nonfinite)
        self.group_size *= 2


def _pair_sums(values: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(values[::2], values[1::2], strict=True)]


def _shrank(name: str, step: int, value: int, last: int | None) -> str:
    return f"{name} at step {step} are {value}, after {last or 0}; they count everything so far and cannot shrink"


def _integer(value: Mapping[str, Any], key: str, lowest: int) -> int:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not lowest <= number <= LARGEST_TOTAL:
        raise ValueError(f"the curve's {key} is {number!r}; it must be a whole number from {lowest} to 2^100")
    return number


def _list(value: Mapping[str, Any], key: str, length: int | None) -> list[Any]:
    items = value.get(key)
    if not isinstance(items, list):
        raise ValueError(f"the curve's {key} is a {type(items).__name__}, not a list")
    if length is not None and len(items) != length:
        raise ValueError(f"the curve's {key} has {len(items)} values, its steps {length}")
    return items


def _integers(value: Mapping[str, Any], key: str, length: int | None) -> list[int]:
    items = _list(value, key, length)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= LARGEST_TOTAL:
            raise ValueError(f"the curve's {key} holds {item!r}; they are whole numbers from 0 to 2^100")
    return list(items)


def _increasing(value: Mapping[str, Any], key: str, length: int | None = None, *, strictly: bool = False) -> list[int]:
    items = _integers(value, key, length)
    last = 0
    for item in items:
        if item < last or (strictly and item == last):
            raise ValueError(f"the curve's {key} go from {last} to {item}; they must increase")
        last = item
    return items


def _finite_numbers(value: Mapping[str, Any], key: str, length: int) -> list[float]:
    items = _list(value, key, length)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
            raise ValueError(f"the curve's {key} holds {item!r}, which is not a finite number")
    return [float(item) for item in items]
