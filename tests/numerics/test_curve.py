"""A loss curve of any length in bounded memory."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch

from lightning_mp.numerics.curve import LossCurve


def filled(steps: int, max_points: int = 8) -> LossCurve:
    curve = LossCurve(max_points)
    for step in range(1, steps + 1):
        curve.add(step, float(step % 7), samples=4 * step, tokens=64 * step)
    return curve


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 16, 17, 100, 1023])
def test_each_group_is_exactly_the_mean_of_its_steps(steps: int) -> None:
    curve = filled(steps)
    start = 0
    for end, loss, count, mean_step in zip(curve.steps, curve.losses, curve.counts, curve.mean_steps, strict=True):
        inside = range(start + 1, end + 1)
        assert count == len(inside) == (curve.group_size if end < steps else steps - start)
        assert loss == sum(step % 7 for step in inside) / len(inside)
        assert mean_step == sum(inside) / len(inside)
        start = end
    assert start == steps
    assert len(curve) <= 8
    assert curve.tokens == [64 * step for step in curve.steps]


@pytest.mark.parametrize("steps", [0, 1, 8, 9, 13, 100])
def test_a_curve_goes_through_json_and_the_safe_loader_and_continues_the_same(steps: int) -> None:
    curve = filled(steps)
    if steps:
        curve.add(steps + 1, math.nan, samples=4 * steps + 4, tokens=64 * steps + 64)
    file = io.BytesIO()
    torch.save(curve.as_dict(), file)
    file.seek(0)
    for value in (json.loads(json.dumps(curve.as_dict(), allow_nan=False)), torch.load(file, weights_only=True)):
        copy = LossCurve.from_dict(value)
        assert copy == curve
        assert vars(copy) == vars(curve)
        for twin in (copy, original := LossCurve.from_dict(curve.as_dict())):
            twin.add(steps + 2, 3.5)
        assert copy == original


def test_losses_that_are_not_finite_are_counted_and_not_averaged() -> None:
    curve = LossCurve(2)
    for step, loss in enumerate([1.0, math.nan, math.inf, 1e39, 3.0, None, 5.0], start=1):
        curve.add(step, loss)
    assert curve.losses == [1.0, 4.0]
    assert curve.counts == [1, 2]
    assert (curve.nonfinite_steps, curve.first_nonfinite_step) == (3, 2)


def test_an_unknown_total_makes_the_column_unknown() -> None:
    curve = LossCurve()
    curve.add(1, 1.0, samples=4, tokens=64)
    curve.add(2, 1.0, samples=8)
    curve.add(3, 1.0, samples=12, tokens=192)
    assert (curve.samples, curve.tokens, curve.last_tokens) == ([4, 8, 12], None, None)


@pytest.mark.parametrize("step", [0, -1, 5, 4])
def test_steps_must_increase(step: int) -> None:
    curve = filled(5)
    with pytest.raises(ValueError, match=f"step {step} does not come after step 5"):
        curve.add(step, 1.0)


@pytest.mark.parametrize("totals", [{"samples": 19}, {"tokens": -1}, {"tokens": 319, "samples": 30}])
def test_totals_cannot_shrink(totals: dict[str, int]) -> None:
    curve = filled(5)
    before = curve.as_dict()
    with pytest.raises(ValueError, match="cannot shrink"):
        curve.add(6, 1.0, **totals)
    assert curve.as_dict() == before


def test_dropping_at_a_group_end_is_as_if_the_rest_had_never_come() -> None:
    curve = filled(30)  # groups of 4
    curve.drop_after(16)
    for step in range(17, 31):
        curve.add(step, float(step % 7), samples=4 * step, tokens=64 * step)
    assert curve == filled(30)


def test_dropping_inside_a_group_counts_no_step_twice() -> None:
    curve = filled(30)
    curve.drop_after(18)
    assert (curve.last_step, curve.last_tokens) == (16, 1024)
    for step in range(19, 31):
        curve.add(step, float(step % 7), samples=4 * step, tokens=64 * step)
    assert sum(curve.counts) == 28


def test_dropping_everything_leaves_an_empty_curve_that_can_be_filled() -> None:
    curve = filled(5)
    curve.drop_after(0)
    assert (len(curve), curve.last_step, curve.samples) == (0, 0, None)
    curve.add(1, 2.0, samples=4, tokens=64)
    assert curve.losses == [2.0]


def test_a_dropped_loss_that_was_not_finite_is_forgotten() -> None:
    curve = filled(5)
    curve.add(6, math.nan)
    curve.drop_after(5)
    assert (curve.nonfinite_steps, curve.first_nonfinite_step) == (0, None)


@pytest.mark.parametrize("max_points", [0, 1, 3, -2, 2.0, True])
def test_an_odd_size_is_refused(max_points: object) -> None:
    with pytest.raises(ValueError, match="even number"):
        LossCurve(max_points)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", [2, 2, 3, 4, 5]),
        ("steps", [-1, 2, 3, 4, 5]),
        ("steps", "12345"),
        ("samples", [1, 2]),
        ("tokens", [5, 4, 3, 2, 1]),
        ("counts", [1, 1, 1, 1, -1]),
        ("counts", [1, 1, 1, 1, 2]),
        ("loss_sums", [1.0, math.nan, 1.0, 1.0, 1.0]),
        ("loss_sums", [1.0, 1e300, 1.0, 1.0, 1.0]),
        ("step_sums", [1, 2, 3, 4, 50]),
        ("group_size", 3),
        ("group_size", True),
        ("open_records", 2),
        ("max_points", 4),
        ("first_nonfinite_step", 3),
    ],
)
def test_a_broken_curve_is_refused_with_the_key(key: str, value: object) -> None:
    broken = filled(5).as_dict() | {key: value}
    with pytest.raises(ValueError, match=key.split("_")[-1]):
        LossCurve.from_dict(broken)
    del broken[key]
    if key not in ("samples", "tokens", "first_nonfinite_step"):
        with pytest.raises(ValueError, match=key):
            LossCurve.from_dict(broken)


def test_memory_and_size_do_not_grow_with_the_number_of_steps() -> None:
    curve = filled(100_000, 64)
    assert len(curve) <= 64
    assert sum(curve.counts) == 100_000
    assert sum(loss * count for loss, count in zip(curve.losses, curve.counts, strict=True)) == sum(  # type: ignore[operator]
        step % 7 for step in range(1, 100_001)
    )
