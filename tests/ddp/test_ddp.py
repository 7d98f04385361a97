"""Two ranks under DistributedDataParallel with gloo, against each other and against a single process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.ddp import worker
from tests.ddp.launch import free_port, scenarios_of
from tests.reference import fp32_run, same_bits

ROOT = Path(__file__).parents[2]
both_storages = pytest.mark.parametrize("storage", worker.STORAGES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The results of every scenario on both ranks, and their folder. One launch serves all tests."""
    return scenarios_of("tests.ddp.worker", tmp_path_factory.mktemp("ranks"))


def different(left: Any, right: Any) -> list[str]:
    """Where two lists of dicts of tensors differ."""
    left, right = ([x] if isinstance(x, dict) else x for x in (left, right))
    if [set(step) for step in left] != [set(step) for step in right]:
        return ["names"]
    return [
        f"{index}: {name}"
        for index, (a, b) in enumerate(zip(left, right, strict=True))
        for name in a
        if not same_bits(a[name], b[name])
    ]


def as_fp32(steps: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: value.float() for name, value in step.items()} for step in steps]


@pytest.mark.parametrize("option", worker.OPTIONS)
@both_storages
def test_two_ranks_have_the_masters_of_one_process_that_accumulates_their_halves(storage, option, two_ranks, single):
    first, second = two_ranks(f"automatic {storage} {option}")
    assert len(first["masters"]) == worker.STEPS + 1
    assert not different(first["masters"], second["masters"])
    one = single(worker.automatic, storage, option)
    assert not different(first["masters"], one["masters"])
    # the module comes back in fp32, with these masters, on both
    for result in (first, second):
        assert not different(result["after"], first["masters"][-1])
    assert different(first["masters"][0], first["masters"][-1])


@pytest.mark.parametrize("option", ["plain", "static-view"])
@both_storages
def test_tied_weights_have_one_master_that_is_the_same_on_both_ranks(storage, option, two_ranks):
    first, second = two_ranks(f"tied {storage} {option}")
    assert "third.weight" not in first["masters"][0]
    assert not different(first["masters"], second["masters"])
    assert not same_bits(first["masters"][0]["second.weight"], first["masters"][-1]["second.weight"])


@both_storages
def test_clipped_gradients_give_two_ranks_the_masters_of_one_process(storage, two_ranks, single):
    first, second = two_ranks(f"clipped {storage}")
    assert not different(first["masters"], second["masters"])
    assert not different(first["masters"], single(worker.clipped, storage)["masters"])
    unclipped = worker.fit(worker.Net(optimizer="sgd"), 1, storage, accumulate_grad_batches=2).masters
    assert different(first["masters"][1:], unclipped[1:])


@both_storages
def test_a_norm_layer_that_stays_fp32_is_averaged_in_fp32(storage, two_ranks, single):
    first, second = (result["masters"] for result in two_ranks(f"automatic {storage} plain"))
    start, end = first[0]["norm.weight"], first[-1]["norm.weight"]
    assert not same_bits(start, end)
    assert same_bits(end, second[-1]["norm.weight"])
    assert same_bits(end, single(worker.automatic, storage, "plain")["masters"][-1]["norm.weight"])


@both_storages
def test_ranks_that_start_from_different_weights_all_get_the_masters_of_rank_0(storage, two_ranks):
    first, second = two_ranks(f"different seeds {storage}")
    assert different(first["before"], second["before"])
    assert not different(first["masters"][0], first["before"])
    assert not different(first["masters"], second["masters"])
    assert not different(first["after"], second["after"])


@both_storages
def test_evaluation_gives_ranks_with_different_weights_those_of_rank_0_in_fp32(storage, two_ranks):
    first, second = two_ranks(f"evaluated {storage}")
    assert different(first["before"], second["before"])
    assert not different(first["after"], first["before"])
    assert not different(second["after"], first["before"])


# D2: NVIDIA/Megatron-LM#502


@both_storages
def test_gradients_are_averaged_over_ranks_in_fp32(storage, two_ranks):
    for result in two_ranks(f"two gradients {storage} fp32"):
        (expected,) = fp32_run([torch.tensor(1.0)], [[torch.tensor(0.5 + 2.0**-10)]], lambda p: torch.optim.SGD(p, lr=1.0))
        assert same_bits(result["masters"][-1]["weight"], expected)
        assert result["seen"] == [(torch.float32, 0.5 + 2.0**-10)]


@both_storages
def test_gradients_are_averaged_in_the_parameters_dtype_on_demand(storage, two_ranks):
    for result in two_ranks(f"two gradients {storage} parameter"):
        assert result["masters"][-1]["weight"].item() == 0.5
        assert result["seen"] == [(torch.bfloat16, 0.5)]


# D6: Lightning-AI/pytorch-lightning#18086


@pytest.mark.parametrize("option", worker.OPTIONS)
@both_storages
def test_manual_optimization_reduces_the_gradients_of_every_step(storage, option, two_ranks, single):
    first, second = two_ranks(f"manual {storage} {option}")
    assert len(first["masters"]) == worker.STEPS + 1
    assert not different(first["masters"], second["masters"])
    one = single(worker.manual, storage, option)
    assert not different(first["masters"], one["masters"])
    # what on_before_optimizer_step sees is the average
    assert not different(as_fp32(first["gradients"]), as_fp32(one["gradients"]))


@pytest.mark.parametrize("option", [option for option in worker.OPTIONS if "unused" not in option])
@both_storages
def test_clipping_in_manual_optimization_takes_effect_on_every_step(storage, option, two_ranks, single):
    first, second = two_ranks(f"manual clipped {storage} {option}")
    assert not different(first["masters"], second["masters"])
    one = single(worker.manual, storage, option, 0.05)
    assert not different(as_fp32(first["gradients"]), as_fp32(one["gradients"]))
    assert not different(first["masters"], one["masters"])


@both_storages
def test_two_optimizers_that_take_turns_give_two_ranks_the_masters_of_one_process(storage, two_ranks, single):
    first, second = two_ranks(f"two optimizers {storage}")
    assert not different(first["masters"], second["masters"])
    assert not different(first["masters"], single(worker.two_optimizers, storage)["masters"])


# A7 on two ranks: deepspeedai/DeepSpeed#1800


@pytest.mark.parametrize("option", ["plain", "view"])
@both_storages
def test_small_gradients_are_not_lost_beside_a_large_one_in_a_window(storage, option, two_ranks):
    for result in two_ranks(f"long window {storage} {option}"):
        assert result["seen"] == [(torch.float32, 256.0 + 64 * 0.25)]
        assert result["masters"][-1]["weight"].item() == -(256.0 + 64 * 0.25)


@pytest.mark.parametrize("option", ["plain", "static", "view", "static-view"])
@both_storages
def test_small_gradients_are_not_lost_in_a_window_that_is_synchronised_at_each_micro_batch(storage, option, two_ranks):
    for result in two_ranks(f"long manual window {storage} {option}"):
        assert result["seen"] == [(torch.float32, 256.0 + 8 * 0.375)]
        assert result["masters"][-1]["weight"].item() == -(256.0 + 8 * 0.375)


@pytest.mark.parametrize("option", ["plain", "view"])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "parameter"])
@both_storages
def test_accumulation_gives_both_ranks_the_same_masters(storage, reduce_dtype, option, two_ranks):
    first, second = two_ranks(f"accumulated {storage} {reduce_dtype} {option}")
    assert not different(first["masters"], second["masters"])
    assert different(first["masters"][0], first["masters"][-1])


@pytest.mark.parametrize("reduce_dtype", ["fp32", "parameter"])
@both_storages
def test_a_second_fit_goes_on_from_the_masters_of_the_first(storage, reduce_dtype, two_ranks, single):
    first, second = two_ranks(f"second fit {storage} {reduce_dtype}")
    assert len(first["masters"]) == 2 * (worker.STEPS + 1)
    assert not different(first["masters"], second["masters"])
    assert not different(first["masters"][worker.STEPS], first["masters"][worker.STEPS + 1])
    assert first["dtypes"] == second["dtypes"] == ["torch.float32"]
    if reduce_dtype == "fp32":
        assert not different(first["masters"], single(worker.second_fit, storage, reduce_dtype)["masters"])


@both_storages
def test_the_file_of_a_run_on_two_ranks_holds_the_masters_and_resumes_exactly(storage, two_ranks, single, tmp_path):
    first, second = two_ranks(f"files {storage}")
    path = two_ranks.folder / f"2-{storage}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    saved = checkpoint["state_dict"]
    assert not different(saved, first["half"][-1])
    for result in (first, second):
        assert not different(result["whole"], first["whole"])
        assert not different(result["rest"], first["whole"][worker.STEPS :])
    # and in one process
    alone = worker.fit(
        worker.Net(seed=6), 1, storage, max_epochs=2, ckpt_path=path, accumulate_grad_batches=2, default_root_dir=tmp_path
    )
    assert not different(alone.masters[0], saved)
    assert not different(worker.weights(worker.Net.load_from_checkpoint(path)), saved)


def test_after_a_spawned_run_the_module_of_the_main_process_has_the_exact_fp32_masters(single, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    net = worker.Net()
    trainer = worker.make_trainer(
        2, "split", ddp={"start_method": "spawn"}, callbacks=[ModelCheckpoint(tmp_path, "spawned")], default_root_dir=tmp_path
    )
    trainer.fit(net)
    expected = single(worker.automatic, "split", "plain")["after"]
    assert not different(worker.weights(net), expected)
    assert not different(torch.load(tmp_path / "spawned.ckpt", weights_only=True)["state_dict"], expected)
