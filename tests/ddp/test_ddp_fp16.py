"""Two ranks under DistributedDataParallel in fp16: they agree on what overflowed, and on everything that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ddp import fp16_worker as worker
from tests.ddp.launch import scenarios_of
from tests.ddp.test_ddp import as_fp32, different
from tests.reference import fp32_run, same_bits

ROOT = Path(__file__).parents[2]
both_fp16 = pytest.mark.parametrize("precision", worker.PRECISIONS)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The results of every scenario on both ranks, and their folder. One launch serves all tests."""
    return scenarios_of("tests.ddp.fp16_worker", tmp_path_factory.mktemp("fp16-ranks"), timeout_s=120)


def assert_agree(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Both ranks have the same masters, scales and counts all along, and moved."""
    assert not different(first["masters"], second["masters"])
    assert first["notes"] == second["notes"]
    assert first["state"] == second["state"]
    assert first["last"] == second["last"]
    assert not different(first["after"], second["after"])
    assert not different(first["after"], first["masters"][-1])
    assert different(first["masters"][0], first["masters"][-1])


def assert_is_one_process(result: dict[str, Any], one: dict[str, Any]) -> None:
    """The masters and counts are those of a single process, whose scale is twice as large."""
    assert not different(result["masters"], one["masters"])
    assert [(2 * scale, *counts) for scale, *counts in result["notes"]] == [tuple(note) for note in one["notes"]]
    assert not different(as_fp32(result["gradients"]), as_fp32(one["gradients"]))


# --- D4: hpcaitech/ColossalAI#1175 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "option"), worker.CASES)
def test_an_overflow_on_one_rank_is_skipped_by_both_and_all_else_is_as_in_one_process(precision, option, two_ranks, single):
    first, second = two_ranks(f"automatic {precision} {option}")
    assert_agree(first, second)
    scales = [note[0] / worker.SCALE for note in first["notes"]]
    # steps 1 and 2 overflow, each on one rank; step 4 has a NaN loss, and is no matter of the scale
    assert scales[:4] == [1, 1, 0.5, 0.25]
    assert first["notes"][-1][1:] == (3, 3, 1)
    for step in (1, 2, 4):
        assert not different(first["masters"][step], first["masters"][step + 1])
    assert_is_one_process(first, single(worker.automatic, precision, option))


@pytest.mark.parametrize("option", ["plain", "static-view", "unused"])
@both_fp16
def test_ranks_agree_on_an_adaptive_scale(precision, option, two_ranks):
    first, second = two_ranks(f"adaptive {precision} {option}")
    assert_agree(first, second)
    assert first["notes"][-1][1:] == (3, 3, 1)
    assert len(first["state"]["log2_amax"]) == 3
    assert first["last"][2] is not None


@pytest.mark.parametrize("option", worker.WINDOWED)
@both_fp16
def test_an_overflow_in_any_micro_batch_of_any_rank_drops_the_window_on_both(precision, option, two_ranks):
    first, second = two_ranks(f"windowed {precision} {option}")
    assert_agree(first, second)
    # windows 1 and 3 overflow, 2 has a NaN loss in its second half
    scales = [note[0] / worker.SCALE for note in first["notes"]]
    assert scales == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert first["notes"][-1][1:] == (1, 3, 1)
    assert not different(first["masters"][2], first["masters"][-1])


@both_fp16
def test_an_overflow_of_a_parameter_that_only_one_rank_has_is_skipped_by_both(precision, two_ranks):
    first, second = two_ranks(f"private {precision} 1")
    assert first["notes"] == second["notes"]
    assert first["state"] == second["state"]
    assert first["notes"][-1][1:] == (worker.STEPS - 1, 1, 0)
    shared = [
        [{name: value for name, value in step.items() if "private" not in name} for step in result["masters"]]
        for result in (first, second)
    ]
    assert not different(*shared)


@both_fp16
def test_a_layer_that_only_one_rank_has_may_overflow(precision, two_ranks):
    first, second = two_ranks(f"only one {precision}")
    assert not different(first["masters"], second["masters"])
    assert first["notes"] == second["notes"]
    assert first["state"] == second["state"]
    assert first["notes"][-1][1:] == (worker.STEPS - 1, 1, 0)
    assert not different(first["masters"][1], first["masters"][2])
    assert "private" in second["last"][1]


@both_fp16
def test_ranks_whose_gradients_are_finite_name_the_parameter_that_overflowed_elsewhere(precision, two_ranks):
    first, second = two_ranks(f"private {precision} 1")
    assert first["last"][1] == second["last"][1]
    assert first["last"][1] in ("private.weight", "private.bias")


@both_fp16
def test_parameters_that_only_one_rank_has_start_from_their_own_fp32_values(precision, two_ranks):
    results = two_ranks(f"private {precision} 1")
    assert different(results[0]["start"], results[1]["start"])
    for result in results:
        start = {name.removeprefix("private."): value for name, value in result["masters"][0].items() if "private" in name}
        assert not different(start, result["start"])


@pytest.mark.parametrize("accumulate", [1, 2])
@both_fp16
def test_parameters_that_only_one_rank_has_are_stepped_on_all_their_gradients(precision, accumulate, two_ranks):
    for rank, result in enumerate(two_ranks(f"private {precision} {accumulate}")):
        seen = [step["private.weight"] for step in result["gradients"]]
        windows = worker.STEPS // accumulate
        assert len(seen) == windows - 1  # the window of step 1 is dropped
        for gradient in seen:
            assert same_bits(gradient, torch.full((1, 4), rank + 1.0))
        # SGD with momentum 0.9 and lr 0.01, on those gradients
        start = result["masters"][0]["private.weight"]
        (expected,) = fp32_run([start], [[g] for g in seen], lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))
        assert same_bits(result["after"]["private.weight"], expected)


@both_fp16
def test_both_ranks_stop_with_the_same_error_when_one_overflows_for_good(precision, two_ranks):
    first, second = two_ranks(f"hopeless {precision}")
    for result in (first, second):
        assert result["error"] is not None
        assert "3 optimizer steps in a row" in result["error"]
        assert not different(result["after"], result["masters"][2])
    assert first["error"] == second["error"]
    assert not different(first["after"], second["after"])


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed", "32-true"])
def test_without_a_scale_ranks_agree_on_a_loss_that_is_not_finite(precision, two_ranks):
    first, second = two_ranks(f"without a scale {precision}")
    assert_agree(first, second)
    assert first["notes"][-1] == (1.0, worker.STEPS - 1, 1, 1)
    assert not different(first["masters"][1], first["masters"][2])


@both_fp16
def test_steps_without_gradients_on_any_rank_are_no_steps(precision, two_ranks):
    first, second = two_ranks(f"no gradients {precision}")
    assert_agree(first, second)
    # growth after 2 healthy steps: steps 0, 2 and 4 are such
    assert [note[0] / worker.SCALE for note in first["notes"]] == [1, 1, 1, 2, 2, 2, 2]
    assert first["notes"][-1][1:] == (3, 0, 0)


@pytest.mark.parametrize("option", ["plain", "static-view"])
@both_fp16
def test_gradients_that_are_left_over_from_an_overflow_are_no_news_on_either_rank(precision, option, two_ranks):
    first, second = two_ranks(f"left over {precision} {option}")
    assert_agree(first, second)
    # step 1 overflows; in step 2 its gradients are still there: skipped again, with no further backoff
    assert [note[2] for note in first["notes"]] == [0, 0, 1, 2, 2, 2, 2]
    assert min(note[0] for note in first["notes"]) == worker.SCALE / 2
    assert first["notes"][-1][1:] == (4, 2, 0)


# --- D6: Lightning-AI/pytorch-lightning#18086 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "option"), worker.CASES)
def test_manual_optimization_reduces_and_checks_the_gradients_of_every_step(precision, option, two_ranks, single):
    first, second = two_ranks(f"manual {precision} {option}")
    assert_agree(first, second)
    assert first["notes"][-1][1:] == (3, 3, 1)
    assert not different(as_fp32(first["gradients"]), as_fp32(second["gradients"]))
    assert_is_one_process(first, single(worker.manual, precision, option))


@pytest.mark.parametrize("option", worker.CLIPPED)
@both_fp16
def test_clipping_in_manual_optimization_clips_true_averages(precision, option, two_ranks, single):
    first, second = two_ranks(f"manual clipped {precision} {option}")
    assert_agree(first, second)
    for step in first["gradients"]:
        norm = torch.stack([gradient.norm() for gradient in step.values()]).norm()
        assert norm <= 0.05 * (1 + 1e-5)
        assert {gradient.dtype for gradient in step.values()} == {torch.float32}
    assert_is_one_process(first, single(worker.manual, precision, option, 0.05))


@both_fp16
def test_clipped_gradients_give_two_ranks_the_masters_of_one_process(precision, two_ranks, single):
    first, second = two_ranks(f"clipped {precision}")
    assert_agree(first, second)
    one = single(worker.clipped, precision)
    assert not different(first["masters"], one["masters"])


@pytest.mark.parametrize("scenario", ["gan", "shared backward"])
@both_fp16
def test_with_two_optimizers_only_the_one_that_overflowed_is_skipped_on_both_ranks(precision, scenario, two_ranks, single):
    first, second = two_ranks(f"{scenario} {precision}")
    assert_agree(first, second)
    assert first["notes"][-1][1:] == (2 * worker.STEPS - 1, 1, 0)
    before, after = first["masters"][1:3]
    assert not same_bits(before["a.weight"], after["a.weight"])
    assert same_bits(before["b.weight"], after["b.weight"])
    one = single(getattr(worker, scenario.replace(" ", "_")), precision)
    assert not different(first["masters"], one["masters"])
    assert [(2 * note[0], *note[1:]) for note in first["notes"]] == one["notes"]


# --- D2: NVIDIA/Megatron-LM#502 ----------------------------------------------------------------------------------------------


@both_fp16
def test_gradients_are_averaged_over_ranks_in_fp32(precision, two_ranks):
    for result in two_ranks(f"fine average {precision}"):
        assert result["seen"] == [(torch.float32, 0.5 + 2.0**-13)]
        (expected,) = fp32_run([torch.tensor(0.125)], [[torch.tensor(0.5 + 2.0**-13)]], lambda p: torch.optim.SGD(p, lr=1.0))
        assert same_bits(result["masters"][-1]["weight"], expected)


@both_fp16
def test_a_sum_over_ranks_that_fp16_cannot_hold_is_no_overflow(precision, two_ranks):
    for result in two_ranks(f"large average {precision}"):
        assert result["seen"] == [(torch.float32, 60000.0)]
        assert result["notes"][-1][1:] == (1, 0, 0)


def test_a_gradient_that_fp16_cannot_hold_on_one_rank_is_an_overflow_on_both(two_ranks):
    for result in two_ranks("too large 16-master"):
        assert result["seen"] == []
        assert result["notes"][-1][1:] == (0, 1, 0)
        assert result["masters"][-1]["weight"].item() == 0.125


@pytest.mark.parametrize("option", ["plain", "view"])
@both_fp16
def test_small_gradients_are_not_lost_beside_a_large_one_in_a_window(precision, option, two_ranks):
    for result in two_ranks(f"long window {precision} {option}"):
        assert result["seen"] == [(torch.float32, 256.0 + 8 * 0.25)]
        assert result["masters"][-1]["weight"].item() == -(256.0 + 8 * 0.25)


# --- start and resume --------------------------------------------------------------------------------------------------------


@both_fp16
def test_ranks_that_start_from_different_weights_all_get_the_masters_of_rank_0(precision, two_ranks):
    first, second = two_ranks(f"different seeds {precision}")
    assert different(first["before"], second["before"])
    assert not different(first["masters"][0], first["before"])
    assert_agree(first, second)


@both_fp16
def test_evaluation_gives_ranks_with_different_weights_those_of_rank_0_in_fp32(precision, two_ranks):
    first, second = two_ranks(f"evaluated {precision}")
    assert different(first["before"], second["before"])
    assert not different(first["after"], first["before"])
    assert not different(second["after"], first["before"])


@both_fp16
def test_a_run_on_two_ranks_resumes_with_masters_scale_and_counts(precision, two_ranks):
    first, second = two_ranks(f"files {precision}")
    checkpoint = torch.load(two_ranks.folder / f"fp16-2-{precision}.ckpt", weights_only=True)
    assert not different(checkpoint["state_dict"], first["half"]["masters"][-1])
    assert checkpoint["lightning_mp"]["loss_scaling"]["loss_scale"] == first["half"]["state"]
    for part in ("whole", "half", "rest"):
        assert_agree(first[part], second[part])
    assert not different(first["rest"]["masters"], first["whole"]["masters"][worker.STEPS :])
    assert first["rest"]["notes"] == first["whole"]["notes"][worker.STEPS :]
    assert first["rest"]["state"] == first["whole"]["state"]
