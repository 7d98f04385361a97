"""The arithmetic of a comparison, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.report.candidates import CANDIDATES, DEFAULT, parse_precisions
from lightning_mp.report.results import Comparison, Result, Summary, curve_json, pairing_notes, summarise

FP32 = PersistentBytes(weights=40, masters=0, gradients=40, optimizer_state=80, buffers=8, parameters=10)
MASTER = PersistentBytes(weights=20, masters=20, gradients=20, optimizer_state=80, buffers=8, parameters=10)


def records(times: list[float], losses: list[float | None] | None = None) -> list[StepRecord]:
    losses = losses or [1.0] * len(times)
    return [StepRecord(i + 1, losses[i], 50, time) for i, time in enumerate(times)]


def test_the_first_three_steps_are_warm_up() -> None:
    summary = summarise(records([1000, 1000, 1000, 10, 20, 30]))
    assert (summary.steps, summary.measured_steps) == (6, 3)
    assert summary.step_time_median_ms == 20
    assert summary.step_time_p95_ms == 30
    assert summary.tokens_per_s == pytest.approx(150 / 0.060)
    assert summary.tokens == 300


@pytest.mark.parametrize(("steps", "measured"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)])
def test_a_short_run_keeps_at_least_one_step(steps: int, measured: int) -> None:
    assert summarise(records([10.0] * steps)).measured_steps == measured


def test_p95_is_the_smallest_time_that_95_percent_do_not_exceed() -> None:
    assert summarise(records([0, 0, 0, *(float(i) for i in range(1, 101))])).step_time_p95_ms == 95


@pytest.mark.parametrize(("steps", "tail"), [(1, 1), (4, 1), (5, 1), (10, 2), (150, 30)])
def test_the_tail_is_a_fifth_of_the_steps_and_at_least_one(steps: int, tail: int) -> None:
    losses: list[float | None] = [100.0] * (steps - tail) + [2.0] * tail
    summary = summarise(records([1.0] * steps, losses))
    assert (summary.tail_steps, summary.tail_loss) == (tail, 2.0)


def test_unknown_stays_unknown() -> None:
    assert summarise([]) == Summary()
    unknown = summarise([StepRecord(1, None, None, 5.0)])
    assert (unknown.tail_loss, unknown.tokens, unknown.tokens_per_s) == (None, None, None)


def comparison(*results: Result) -> Comparison:
    return Comparison("c", (), (), (), 0, tuple(r.precision for r in results), results)


def test_ratios_and_gap_are_against_fp32() -> None:
    base = Result("32-true", "ok", memory=FP32, summary=summarise(records([10.0] * 10)))
    other = Result("bf16-master", "ok", memory=MASTER, summary=summarise(records([7.0] * 10, [1.5] * 10)))
    assert comparison(base, other).relative(other) == {
        "step_time_ratio": 0.7, "bytes_ratio": 14 / 16, "tail_loss_gap": 0.5,
    }  # fmt: skip


def test_tails_of_runs_of_different_length_are_not_subtracted() -> None:
    base = Result("32-true", "ok", summary=summarise(records([10.0] * 10)))
    short = Result("bf16-true", "failed", summary=summarise(records([10.0] * 4)))
    assert comparison(base, short).relative(short)["tail_loss_gap"] is None


def test_a_reference_that_failed_is_no_reference() -> None:
    base = Result("32-true", "failed", "x", summary=summarise(records([10.0] * 10)))
    assert set(comparison(base).relative(base).values()) == {None}


def test_a_curve_with_nan_is_still_plain_data() -> None:
    curve = curve_json("32-true", records([1.0, 2.0], [math.nan, None]))
    assert [row["tokens_so_far"] for row in curve["steps"]] == [50, 100]
    json.dumps(curve)


def test_other_weights_and_unknown_batches_are_named() -> None:
    base = Result("32-true", "ok", weights_fingerprint="a", data_order={"1": "b"})
    assert pairing_notes([base, replace(base, precision="bf16-mixed")]) == []
    notes = pairing_notes([base, Result("bf16-true", "ok", weights_fingerprint="z")])
    assert "bf16-true: not the same initial weights as 32-true" in notes[0]
    assert "bf16-true: order of data could not be fingerprinted" in notes[1]


def test_every_default_is_known_and_a_list_is_parsed_in_order() -> None:
    assert parse_precisions(",".join(DEFAULT)) == DEFAULT
    assert parse_precisions(" bf16-true , 32-true,") == ("bf16-true", "32-true")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("32-true,bf17", "'bf17'"),
        ("32-true,bf16-mixed,32-true", "32-true more than once"),
    ],
)
def test_a_bad_list_of_precisions_is_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_precisions(text)
    if "more than once" not in message:
        assert all(name in str(error.value) for name in CANDIDATES)
