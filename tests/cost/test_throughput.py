"""Rates and times over a window, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mp.cost.throughput import StepFlops, TimedStep, quantile, summarise, usable


def step(time_ms: float = 10.0, **known: Any) -> TimedStep:
    values = {
        "data_wait_ms": 2.0, "forward_backward_ms": 6.0, "optimizer_ms": 2.0, "optimizer_steps": 1, "batches": 1,
        "tokens": 100, "positions": 120, "padded_tokens": 120, "samples": 4, "is_regular": True, **known,
    }  # fmt: skip
    return TimedStep(time_ms=time_ms, **values)


def test_rates_are_ratios_of_sums_and_times_are_told_by_median_and_tail() -> None:
    steps = [step(10), step(10), step(10), step(70, tokens=700, data_wait_ms=42.0)]
    found = summarise(steps)
    assert found["tokens_per_s"] == pytest.approx(1000 / 0.1)
    assert found["samples_per_s"] == pytest.approx(16 / 0.1)
    assert found["padded_tokens_per_s"] == pytest.approx(480 / 0.1)
    assert found["step_time_ms"] == 10
    assert found["step_time_p95_ms"] == pytest.approx(10 + 0.85 * 60)
    assert found["data_wait_ms"] == 12  # a mean: the stall shows
    assert (found["forward_backward_ms"], found["optimizer_ms"]) == (6, 2)
    assert "tflops_per_s" not in found


def test_an_unknown_count_leaves_out_its_rate_alone() -> None:
    found = summarise([step(), step(tokens=None)], StepFlops(1e9, "token"))
    assert not {"tokens_per_s", "tflops_per_s"} & found.keys()
    assert found["samples_per_s"] == 400


def test_a_part_that_is_unknown_for_one_step_is_the_mean_of_the_others() -> None:
    found = summarise([step(optimizer_ms=None), step(optimizer_ms=4.0), step(optimizer_ms=2.0)])
    assert found["optimizer_ms"] == 3
    assert "optimizer_ms" not in summarise([step(optimizer_ms=None)] * 2)


def test_several_optimizers_in_one_batch_are_several_steps() -> None:
    found = summarise([step(10, optimizer_steps=2)] * 2)
    assert (found["step_time_ms"], found["data_wait_ms"]) == (5, 1)
    assert found["tokens_per_s"] == 10_000


@pytest.mark.parametrize(("unit", "flops"), [("token", 200), ("position", 240), ("sample", 8), ("batch", 6), ("step", 2)])
def test_flops_go_with_their_unit(unit: str, flops: float) -> None:
    steps = [step(batches=3)] * 2
    assert StepFlops(1.0, unit).of(steps) == flops
    assert summarise(steps, StepFlops(1e12, unit))["tflops_per_s"] == pytest.approx(flops / 0.02)


def test_irregular_steps_count_only_where_there_is_nothing_else() -> None:
    regular, after_pause = step(10), step(90, is_regular=False)
    assert usable([regular, after_pause, regular]) == [regular, regular]
    assert usable([regular, after_pause, after_pause]) == [regular, after_pause, after_pause]
    assert usable([regular]) == usable([]) == []


def test_no_time_gives_no_rates() -> None:
    assert summarise([]) == {}
    assert summarise([step(0.0)] * 2) == {}


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0], 0.95) == 1
    assert quantile([1.0, 3.0], 0.5) == 2
    assert quantile([0.0, 1.0, 2.0, 3.0, 4.0], 0.95) == pytest.approx(3.8)
