"""The rule: alignment, alarm, verdict, and the error rates that it promises."""

from __future__ import annotations

import functools
import io
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_mp.numerics import divergence_simulation
from lightning_mp.numerics.baseline import Baseline, BaselineError, BaselineRun, Difference
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import Block, DivergenceTest, Rule, Verdict, main
from lightning_mp.numerics.divergence_simulation import BLOCKS, NOISES, PAIR_SD, RUN_SD, binomial_upper_limit, noise, simulate
from lightning_mp.numerics.estimate import student_t_quantile

MARGIN = 0.01
RUNS = 2000
FLAT = Rule(relative_margin=0.0)  # the margin is 0.01 throughout


def loss_at(step: float) -> float:
    return 2.0 + 4.0 / (1.0 + step / 50.0)


def curve_of(
    steps: int,
    *,
    every: int = 1,
    seed: int | None = None,
    sd: float = 0.0,
    gap: float = 0.0,
    per_step: int = 8,
    max_points: int = 4096,
) -> LossCurve:
    curve, generator = LossCurve(max_points), random.Random(seed)
    for step in range(1, steps + 1):
        loss = loss_at(step) + gap + (generator.gauss(0.0, sd) if sd else 0.0)
        if step % every == 0:
            curve.add(step, loss, samples=per_step * step, tokens=64 * per_step * step)
    return curve


def baseline_of(*curves: LossCurve) -> Baseline:
    return Baseline(tuple(BaselineRun(curve, seed=number) for number, curve in enumerate(curves)), "fp32.json")


def feed(
    test: DivergenceTest, steps: range, *, gap: Any = 0.0, every: int = 1, seed: int | None = None, sd: float = 0.0
) -> DivergenceTest:
    generator = random.Random(seed)
    for step in steps:
        loss = loss_at(step) + (gap(step) if callable(gap) else gap) + (generator.gauss(0.0, sd) if sd else 0.0)
        if step % every == 0:
            test.add(step, loss, samples=8 * step, tokens=512 * step)
    return test


# --- alignment -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_points", [4096, 256, 128])
def test_thinning_splits_no_group_so_a_pair_of_equal_curves_has_no_gap(max_points: int) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(3000, max_points=max_points)), paired_with=0), range(1, 3001))
    assert len(test.blocks) == min(100, len(curve_of(3000, max_points=max_points)))
    assert max(abs(block.gap) for block in test.blocks) < 1e-12


def test_a_block_closes_with_the_step_that_reaches_its_end() -> None:
    test = DivergenceTest(baseline_of(curve_of(1000)), paired_with=0)
    closed = [step for step in range(1, 1001) if test.add(step, 1.0, 8 * step, 512 * step) is not None]
    assert closed == list(range(10, 1001, 10))
    assert [block.end for block in test.blocks] == [512.0 * step for step in closed]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 10), (10, 1), (7, 1), (1, 7), (50, 10), (40, 7)])
def test_other_logging_intervals_make_no_gap_that_alarms(ours: int, theirs: int) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(5000, every=theirs)), paired_with=0), range(1, 5001), every=ours)
    assert test.alarm is None
    verdict = test.verdict()
    assert verdict.status == "MATCHES"
    assert verdict.gap == pytest.approx(0.0, abs=1e-4)


def test_without_moving_along_the_slope_other_intervals_would_alarm() -> None:
    test = DivergenceTest(baseline_of(curve_of(5000, every=50)), paired_with=0)
    test._grid._slopes = [0.0] * len(test.edges)
    assert feed(test, range(1, 5001)).alarm is not None


def test_another_batch_size_is_aligned_on_tokens() -> None:
    test = DivergenceTest(baseline_of(curve_of(4000)), paired_with=0, axis="tokens")
    for step in range(1, 1001):  # four times the batch
        test.add(step, sum(loss_at(4 * step - back) for back in range(4)) / 4, 32 * step, 2048 * step)
    assert test.coverage == 1.0
    assert test.verdict().gap == pytest.approx(0.0, abs=1e-4)


def test_blocks_without_a_candidate_loss_are_left_out() -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0), range(1, 1001), every=25)
    assert [block.index for block in test.blocks][:4] == [2, 4, 7, 9]
    assert test.verdict().status == "MATCHES"


def test_the_axis_is_the_best_that_both_know() -> None:
    test = DivergenceTest(baseline_of(curve_of(100)))
    test.add(1, 1.0, samples=8)
    assert test.axis == "samples"
    with pytest.raises(ValueError, match="samples consumed are not known at step 2"):
        test.add(2, 1.0)
    with pytest.raises(ValueError, match="knows tokens, samples, steps"):
        DivergenceTest(baseline_of(curve_of(100)), axis="hours")  # type: ignore[arg-type]


def test_seeds_of_other_lengths_and_thinning_are_compared_over_the_shortest() -> None:
    test = DivergenceTest(baseline_of(curve_of(3000, max_points=256), curve_of(2000), curve_of(2500)))
    assert test.edges[-1] == pytest.approx(2000 * 512, rel=0.01)
    feed(test, range(1, 2001))
    assert all(block.band_low is not None and abs(block.gap) < 0.02 for block in test.blocks)


def test_a_bigger_step_may_close_two_blocks_and_returns_the_later() -> None:
    test = DivergenceTest(baseline_of(curve_of(100)), paired_with=0, rule=Rule(blocks=10), axis="steps")
    test.add(5, 1.0)
    block = test.add(20, 1.0)
    assert block is not None
    assert [one.index for one in test.blocks] == [0, 1]
    assert block == test.blocks[-1]


# --- the alarm -------------------------------------------------------------------------------------------------------------


def test_the_worked_number_alarms_with_the_second_block() -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=FLAT), range(1, 21), gap=0.05)
    assert test.alarm is not None
    assert (test.alarm.block, test.alarm.step) == (1, 20)
    assert test.blocks[0].evidence == pytest.approx(6 / math.log(30_000))


@pytest.mark.parametrize("size", [1.0, 1e30, -1e30])
@pytest.mark.parametrize("blocks", [1, 2, 5, 100])
def test_one_spike_of_any_size_is_no_alarm(size: float, blocks: int) -> None:
    test = DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=Rule(blocks=blocks))
    feed(test, range(1, 1001), gap=lambda step: size if step == 505 else 0.0)
    assert test.alarm is None


def test_a_loss_that_is_not_finite_is_a_hard_stop_whatever_the_settings() -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0), range(1, 100))
    test.add(100, math.nan, 800, 51200)
    verdict = test.verdict(differences=[Difference("data", "the dataset is x", True)])
    assert (verdict.status, test.nonfinite_step) == ("DIVERGED", 100)
    assert "not finite at step 100" in verdict.explanation
    assert "the dataset is x" in verdict.explanation


def test_a_baseline_that_diverged_or_is_empty_is_refused() -> None:
    curve = curve_of(10)
    curve.add(11, math.inf)
    with pytest.raises(BaselineError, match=r"fp32.json: the baseline itself diverged.*at step 11"):
        DivergenceTest(baseline_of(curve))
    with pytest.raises(BaselineError, match=r"fp32.json: run 2 of the baseline holds no loss"):
        DivergenceTest(baseline_of(curve_of(10), LossCurve()))


@pytest.mark.parametrize(
    "value",
    [
        {"blocks": 0},
        {"alpha": 0},
        {"alpha": 1.0},
        {"margin": 0},
        {"relative_margin": -1},
        {"window": 2},
        {"clip": math.inf},
        {"tail_fraction": 0},
        {"min_coverage": 1.1},
        {"margin": math.nan},
        {"blocks": True},
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(value))} is .*; it must be"):
        Rule(**value)


# --- state -----------------------------------------------------------------------------------------------------------------


def seen(test: DivergenceTest) -> tuple[list[Block], Verdict, object]:
    return test.blocks, test.verdict(), test.alarm


@pytest.mark.parametrize("paired", [0, None])
@pytest.mark.parametrize("cut", [1, 10, 455, 600, 1000])
def test_a_restored_comparison_continues_exactly(cut: int, paired: int | None) -> None:
    baseline = baseline_of(*(curve_of(1000, seed=seed, sd=0.05) for seed in range(3)))
    whole = feed(DivergenceTest(baseline, paired_with=paired), range(1, 1201), seed=9, sd=0.05, gap=lambda s: 0.2 * (s > 500))
    first, generator = DivergenceTest(baseline, paired_with=paired), random.Random(9)
    losses = [loss_at(step) + 0.2 * (step > 500) + generator.gauss(0.0, 0.05) for step in range(1, 1201)]
    for step in range(1, cut + 1):
        first.add(step, losses[step - 1], 8 * step, 512 * step)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    for state in (torch.load(file, weights_only=True), json.loads(json.dumps(first.state_dict()))):
        second = DivergenceTest(baseline)
        second.load_state_dict(state)
        assert seen(second) == seen(first)
        for step in range(cut + 1, 1201):
            second.add(step, losses[step - 1], 8 * step, 512 * step)
        assert seen(second) == seen(whole)


def test_a_state_of_another_baseline_is_refused() -> None:
    state = feed(DivergenceTest(baseline_of(curve_of(1000))), range(1, 20)).state_dict()
    with pytest.raises(ValueError, match=r"another baseline than fp32.json"):
        DivergenceTest(baseline_of(curve_of(900))).load_state_dict(state)


@pytest.mark.parametrize("cut", [500, 507])
def test_dropping_forgets_later_blocks_and_their_alarm(cut: int) -> None:
    baseline = baseline_of(curve_of(1000))
    test = feed(DivergenceTest(baseline, paired_with=0), range(1, 701), gap=lambda step: 0.2 * (step > 500))
    assert test.alarm is not None
    test.drop_after(cut)
    assert (test.alarm, len(test.blocks), test.last_step) == (None, 50, 500)
    feed(test, range(cut + 1, 1001))
    assert len(test.blocks) == 100
    assert test.verdict().status == "MATCHES"


def test_a_block_that_a_forgotten_step_had_closed_is_open_again() -> None:
    test = DivergenceTest(baseline_of(curve_of(100)), paired_with=0, rule=Rule(blocks=10), axis="steps")
    for step in (5, 8, 14):
        test.add(step, float(step))
    test.drop_after(8)
    test.add(9, 9.0)
    test.add(10, 10.0)
    assert [(block.index, block.candidate) for block in test.blocks] == [(0, 8.0)]


def test_pairing_that_is_learned_late_judges_all_blocks_again() -> None:
    baseline = baseline_of(*(curve_of(1000, seed=seed, sd=0.3) for seed in range(3)))
    test = feed(DivergenceTest(baseline), range(1, 1001), seed=1, sd=0.3)
    test.set_pairing(1)
    assert max(abs(block.gap) for block in test.blocks) < 1e-12
    assert seen(test) == seen(feed(DivergenceTest(baseline, paired_with=1), range(1, 1001), seed=1, sd=0.3))
    with pytest.raises(ValueError, match=r"runs 0 to 2"):
        test.set_pairing(3)


@pytest.mark.parametrize(("step", "tokens"), [(10, 6000), (0, 6000), (11, 5000)])
def test_steps_and_totals_must_increase(step: int, tokens: int) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(100))), range(1, 11))
    with pytest.raises(ValueError, match=r"must increase|cannot shrink"):
        test.add(step, 1.0, 100, tokens)


# --- the verdict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "steps", "seeds", "paired", "status", "said"),
    [
        (0.0, 1000, 1, True, "MATCHES", "No action"),
        (0.0, 1500, 1, True, "MATCHES", "beyond the baseline's end was ignored"),
        (0.05, 1000, 1, True, "DIVERGED", "The alarm was raised at step"),
        (0.05, 300, 1, True, "DIVERGED", "The alarm was raised at step"),
        (-0.05, 1000, 1, True, "BETTER", "better than the baseline"),
        (0.0, 800, 1, True, "INCONCLUSIVE", "covers 80% of the baseline; a match needs 90%"),
        (-0.05, 800, 1, True, "INCONCLUSIVE", "covers 80%"),
        (0.0, 1000, 1, False, "INCONCLUSIVE", "has one seed"),
        (0.0, 1000, 2, False, "INCONCLUSIVE", "record three"),
        (0.0, 1000, 5, False, "MATCHES", "No action"),
        (0.5, 1000, 3, False, "DIVERGED", "The alarm was raised at step"),
        (0.0, 5, 1, True, "INCONCLUSIVE", "Only 0 of 100 blocks"),
        (0.0, 0, 1, True, "INCONCLUSIVE", "No step was seen"),
    ],
)
def test_each_status_is_reached_and_explained(gap: float, steps: int, seeds: int, paired: bool, status: str, said: str) -> None:
    sd = 0.001 if paired else 0.02
    curves = [curve_of(1000, seed=seed, sd=sd) for seed in range(seeds)]
    test = DivergenceTest(baseline_of(*curves), paired_with=0 if paired else None, rule=FLAT)
    verdict = feed(test, range(1, steps + 1), gap=gap, seed=99, sd=sd).verdict()
    assert verdict.status == status, verdict
    assert said in verdict.explanation
    assert (verdict.paired, verdict.seeds) == (paired, seeds)
    json.dumps(verdict.as_dict(), allow_nan=False)


def test_what_decides_is_not_comparable_unless_forced() -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0), range(1, 1001))
    deciding = [Difference("data", "the dataset is x, the baseline's y", True)]
    verdict = test.verdict(differences=deciding)
    assert verdict.status == "NOT COMPARABLE"
    assert "the dataset is x, the baseline's y" in verdict.explanation
    assert verdict.gap == pytest.approx(0.0, abs=1e-9)
    assert test.verdict(differences=deciding, force=True).status == "MATCHES"
    assert test.verdict(differences=[Difference("seed", "the seed is 2", False)]).status == "MATCHES"


def test_an_alarm_that_has_recovered_is_said_and_not_held_against_the_run() -> None:
    test = feed(
        DivergenceTest(baseline_of(curve_of(1000)), paired_with=0), range(1, 1001), gap=lambda s: 0.1 * (200 < s <= 400)
    )
    verdict = test.verdict()
    assert test.alarm is not None
    assert verdict.status == "MATCHES"
    assert "It has recovered since" in verdict.explanation


def unfinished(status: Any, **settings: Any) -> Baseline:
    (run,) = baseline_of(curve_of(1000)).runs
    return Baseline((replace(run, status=status, settings=settings),), "fp32.json")


@pytest.mark.parametrize("status", ["stopped", "recording"])
@pytest.mark.parametrize(("gap", "otherwise"), [(0.0, "MATCHES"), (-0.05, "BETTER")])
def test_a_baseline_that_is_not_finished_matches_nothing_unless_forced(status: str, gap: float, otherwise: str) -> None:
    baseline = unfinished(status, max_steps=2000)
    test = feed(DivergenceTest(baseline, paired_with=0, rule=FLAT), range(1, 1001), gap=gap)
    verdict = test.verdict()
    assert verdict.status == "INCONCLUSIVE"
    cap = "The baseline is not a whole run: it ended at step 1,000 of 2,000. Record it to its end, or force the comparison."
    assert cap in verdict.explanation
    forced = test.verdict(force=True)
    assert forced.status == otherwise
    assert "not a whole run" not in forced.explanation
    assert (verdict.gap, verdict.interval) == (forced.gap, forced.interval)


@pytest.mark.parametrize("settings", [{}, {"max_steps": -1}])
def test_without_a_planned_end_only_the_last_step_of_an_unfinished_baseline_is_named(settings: dict[str, Any]) -> None:
    test = feed(DivergenceTest(unfinished("stopped", **settings), paired_with=0), range(1, 1001))
    assert "it ended at step 1,000. Record it" in test.verdict().explanation


def test_a_run_that_is_worse_than_an_unfinished_baseline_has_diverged() -> None:
    verdict = feed(DivergenceTest(unfinished("stopped"), paired_with=0, rule=FLAT), range(1, 1001), gap=0.05).verdict()
    assert verdict.status == "DIVERGED"
    assert "not a whole run" not in verdict.explanation


@pytest.mark.parametrize(("paired_with", "status"), [(0, "MATCHES"), (1, "INCONCLUSIVE"), (None, "INCONCLUSIVE")])
def test_of_several_seeds_the_one_that_the_run_is_paired_with_has_to_be_finished_and_all_if_there_is_none(
    paired_with: int | None, status: str
) -> None:
    runs = baseline_of(*(curve_of(1000, seed=seed, sd=0.001) for seed in range(5))).runs
    baseline = Baseline((runs[0], replace(runs[1], status="stopped"), *runs[2:]), "fp32.json")
    test = feed(DivergenceTest(baseline, paired_with=paired_with, rule=FLAT), range(1, 1001), seed=99, sd=0.001)
    assert test.verdict().status == status
    assert ("The baseline is not a whole run" in test.verdict().explanation) == (status == "INCONCLUSIVE")
    assert test.verdict(force=True).status == "MATCHES"


@pytest.mark.parametrize(
    ("gap", "steps", "status"), [(0.05, 1000, "DIVERGED"), (0.0, 500, "INCONCLUSIVE"), (0.0, 1000, "MATCHES")]
)
def test_the_explanation_says_what_differs_where_the_run_does_not_match(gap: float, steps: int, status: str) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=FLAT), range(1, steps + 1), gap=gap)
    beside = [Difference("seed", "the seed is 2, the baseline's 1", False), Difference("device", "the device is x", False)]
    verdict = test.verdict(differences=beside)
    assert verdict.status == status
    said = "What differs: the seed is 2, the baseline's 1; the device is x."
    assert (said in verdict.explanation) == (status != "MATCHES")
    assert "What differs" not in test.verdict().explanation


def test_what_would_decide_is_named_among_what_differs_when_it_is_forced() -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=FLAT), range(1, 1001), gap=0.05)
    found = [Difference("data", "the dataset is x", True), Difference("seed", "the seed is 2", False)]
    forced = test.verdict(differences=found, force=True)
    assert forced.status == "DIVERGED"
    assert "What differs: the dataset is x; the seed is 2." in forced.explanation
    refused = test.verdict(differences=found)
    assert refused.status == "NOT COMPARABLE"
    assert "What differs" not in refused.explanation


@pytest.mark.parametrize("gap", [1e-6, -1e-6])
def test_a_gap_that_rounds_to_zero_has_no_sign(gap: float) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=FLAT), range(1, 1001), gap=gap)
    explanation = test.verdict().explanation
    assert "the loss is 0.0000 from the baseline's, 95% interval 0.0000 to 0.0000; the margin is 0.0100." in explanation


@pytest.mark.parametrize(("gap", "where"), [(0.05, "just before step 20"), (1.05 * MARGIN, "where the gap begins to grow")])
def test_the_advice_after_a_divergence_says_where_to_look_and_what_to_try(gap: float, where: str) -> None:
    test = feed(DivergenceTest(baseline_of(curve_of(1000)), paired_with=0, rule=FLAT), range(1, 1001), gap=gap)
    verdict = test.verdict()
    assert (verdict.status, verdict.alarm is None) == ("DIVERGED", gap < 0.05)
    assert f"Compare the runs {where}: gradients, stalled parameters, data." in verdict.explanation
    assert "If only the precision differs, keep fp32 masters, keep more modules in fp32" in verdict.explanation


def test_a_pair_that_is_too_noisy_is_told_what_would_have_less_noise() -> None:
    test = DivergenceTest(baseline_of(curve_of(1000, seed=1, sd=0.01)), paired_with=0, rule=FLAT)
    verdict = feed(test, range(1, 1001), gap=MARGIN, seed=2, sd=0.01).verdict()
    assert verdict.status == "INCONCLUSIVE"
    assert verdict.smallest_visible_gap is not None
    visible = f"Only a gap of {verdict.smallest_visible_gap:.4f} or more would have been seen."
    assert f"{visible} A longer run or a larger batch has less noise." in verdict.explanation


def test_the_lag_is_skipped_steps_times_the_slope() -> None:
    curve = LossCurve()
    for step in range(1, 1001):
        curve.add(step, 10.0 - step / 1000)
    test = DivergenceTest(baseline_of(curve), paired_with=0)
    for step in range(1, 1001):
        test.add(step, 10.0 - step / 1000)
    verdict = test.verdict(skipped_steps=7)
    assert verdict.lag_explained == pytest.approx(0.007)
    assert "(7) put the run behind; at the baseline's slope there that is 0.0070" in verdict.explanation


def test_the_quantiles_of_students_t_are_those_of_the_tables() -> None:
    table = {
        (0.975, 1): 12.7062,
        (0.975, 2): 4.3027,
        (0.975, 5): 2.5706,
        (0.975, 19): 2.0930,
        (0.975, 1e7): 1.95996,
        (0.8, 3): 0.97847,
    }
    for (probability, freedom), quantile in table.items():
        assert student_t_quantile(probability, freedom) == pytest.approx(quantile, abs=5e-5)


# --- error rates -----------------------------------------------------------------------------------------------------------


@functools.cache
def series(kind: Any, correlation: float, sd: float, count: int) -> dict[int, torch.Tensor]:
    return noise(count, RUNS, kind, correlation, sd, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("seeds", "paired"), [(1, True), (1, False), (2, False), (3, False)])
def test_the_simulation_is_the_same_rule_as_the_class(seeds: int, paired: bool) -> None:
    generator = torch.Generator().manual_seed(seeds)
    blocks, runs = 40, 6
    baseline = 3.0 + 0.03 * torch.randn(blocks, seeds, runs, generator=generator, dtype=torch.float64)
    candidate = 3.0 + 0.03 * torch.randn(blocks, runs, generator=generator, dtype=torch.float64)
    candidate[blocks // 2 :] += torch.tensor([0.0, 0.05, 0.1, 0.3, 1.0, 100.0])
    simulated = simulate(candidate, baseline, paired=paired)
    for run in range(runs):
        curves = [LossCurve() for _ in range(seeds)]
        for index in range(blocks):
            for seed, curve in enumerate(curves):
                curve.add(index + 1, float(baseline[index, seed, run]))
        test = DivergenceTest(baseline_of(*curves), paired_with=0 if paired else None, rule=FLAT)
        for index in range(blocks):
            test.add(index + 1, float(candidate[index, run]))
        assert [block.evidence for block in test.blocks] == pytest.approx(simulated.evidence[:, run].tolist(), rel=1e-9)
        assert (test.alarm.block if test.alarm else -1) == int(simulated.block[run])
    assert (simulated.block >= 0).any()


@pytest.mark.parametrize(("kind", "correlation"), NOISES)
def test_healthy_runs_alarm_at_most_at_the_promised_rate(kind: Any, correlation: float) -> None:
    for blocks in BLOCKS:
        runs = series(kind, correlation, RUN_SD, 6)[blocks]
        pair = series(kind, correlation, PAIR_SD, 1)[blocks]
        designs = [(pair[:, 0], torch.zeros_like(pair), True)]
        designs += [(runs[:, 0], runs[:, 1 : 1 + seeds], False) for seeds in (1, 3, 5)]
        for candidate, baseline, paired in designs:
            healthy = simulate(candidate, baseline, paired=paired)
            assert binomial_upper_limit(int((healthy.block >= 0).sum()), RUNS) <= 1.5 * Rule().alpha


@pytest.mark.parametrize("blocks", BLOCKS)
def test_gaps_of_a_pair_are_caught_in_time(blocks: int) -> None:
    for kind, correlation in NOISES:
        pair = series(kind, correlation, PAIR_SD, 1)[blocks][:, 0].clone()
        baseline = torch.zeros_like(pair)[:, None]
        assert simulate(pair + 1.5 * MARGIN, baseline, paired=True).rate >= 0.95
        large = simulate(pair + 3 * MARGIN, baseline, paired=True)
        assert large.rate == 1.0
        assert large.median_delay is not None
        assert large.median_delay <= 5
        pair[blocks // 2] += 1e30
        assert simulate(pair, baseline, paired=True).rate == 0.0


def verdicts(gap: float, sd: float, correlation: float, seeds: int) -> list[str]:
    """Verdicts of 200 runs, paired for 0 seeds."""
    runs = noise(max(seeds, 1) + 1, 200, "blocks", correlation, sd, torch.Generator().manual_seed(5))[100]
    found = []
    for run in range(runs.shape[2]):
        curves = [LossCurve() for _ in range(max(seeds, 1))]
        for index in range(100):
            for seed, curve in enumerate(curves, start=1):
                curve.add(index + 1, 2.0 + (float(runs[index, seed, run]) if seeds else 0.0))
        test = DivergenceTest(baseline_of(*curves), paired_with=None if seeds else 0, rule=FLAT)
        for index in range(100):
            test.add(index + 1, 2.0 + gap + float(runs[index, 0, run]))
        found.append(test.verdict().status)
    return found


@pytest.mark.parametrize(("seeds", "sd", "correlation"), [(0, PAIR_SD, 0.9), (0, 0.01, 0.0), (0, 0.01, 0.5), (3, RUN_SD, 0.0)])
def test_the_verdict_is_rarely_wrong(seeds: int, sd: float, correlation: float) -> None:
    healthy, diverged = verdicts(0.0, sd, correlation, seeds), verdicts(2 * MARGIN, sd, correlation, seeds)
    assert healthy.count("DIVERGED") <= 0.03 * len(healthy)
    assert diverged.count("MATCHES") <= 0.03 * len(diverged)
    if sd == PAIR_SD:
        assert (healthy.count("MATCHES"), diverged.count("DIVERGED")) == (len(healthy), len(diverged))


def test_the_upper_limit_of_no_event_in_n_is_the_textbook_one() -> None:
    assert binomial_upper_limit(0, 2000) == pytest.approx(1 - 0.05 ** (1 / 2000), rel=1e-6)
    assert binomial_upper_limit(5, 10) == pytest.approx(0.7776, abs=1e-4)


def test_the_command_prints_a_row_for_each_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_simulation, "BLOCKS", (50,))
    monkeypatch.setattr(divergence_simulation, "NOISES", (("blocks", 0.5),))
    main(["--simulate", "--runs", "4"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("paired", "unpaired"))]
    assert len(rows) == 5
