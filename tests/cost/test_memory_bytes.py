"""Persistent bytes are counted from the tensors, each storage once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mp.cost.memory import (
    GradientWatch,
    peak_cuda_bytes,
    peak_rss_bytes,
    persistent_bytes,
    step_counter_bytes,
)


def trained(dtype: torch.dtype, optimizer: Callable[[Iterable[Tensor]], Optimizer]) -> tuple[nn.Module, Optimizer]:
    """A linear layer of 10,000 weights after one step, with its gradients alive."""
    module = nn.Linear(100, 100, bias=False).to(dtype)
    stepper = optimizer(module.parameters())
    module(torch.ones(2, 100, dtype=dtype)).sum().backward()
    stepper.step()
    return module, stepper


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 16), (torch.bfloat16, 8)])
def test_adamw_keeps_16_bytes_per_parameter_in_fp32_and_8_in_bf16(dtype: torch.dtype, expected: int) -> None:
    module, optimizer = trained(dtype, AdamW)
    counted = persistent_bytes(module, [optimizer])
    assert counted.parameters == 10_000
    assert counted.total - 4 == expected * 10_000  # 4 bytes: the step counter
    half = torch.tensor([], dtype=dtype).element_size()
    assert (counted.weights, counted.gradients) == (half * 10_000, half * 10_000)


def test_split_masters_bring_bf16_to_14_bytes() -> None:
    module, optimizer = trained(torch.bfloat16, AdamW)
    remainders = [torch.zeros(100, 100, dtype=torch.int16)]
    moments = [torch.zeros(100, 100) for _ in range(2)]
    optimizer.state[next(module.parameters())] = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
    counted = persistent_bytes(module, [optimizer], remainders)
    assert counted.per_parameter == {
        "weights": 2, "masters": 2, "gradients": 2, "optimizer_state": 8, "buffers": 0, "total": 14,
    }  # fmt: skip


def test_tied_weights_count_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    counted = persistent_bytes(nn.Sequential(first, second), [])
    assert (counted.parameters, counted.weights) == (64, 256)


def test_views_of_one_storage_count_as_that_storage() -> None:
    flat = torch.zeros(128)
    module = nn.ParameterList([nn.Parameter(flat[:64]), nn.Parameter(flat[64:])])
    assert persistent_bytes(module, []).weights == 128 * 4


def test_a_tensor_in_two_categories_counts_in_the_first() -> None:
    module = nn.Linear(8, 8, bias=False)
    counted = persistent_bytes(module, [], masters=[module.weight.data])
    assert (counted.weights, counted.masters) == (256, 0)


def test_buffers_are_counted_but_are_not_in_the_total() -> None:
    counted = persistent_bytes(nn.BatchNorm1d(4), [])
    assert counted.buffers == 4 * 4 + 4 * 4 + 8
    assert counted.total == counted.weights == 2 * 4 * 4


def test_optimizer_state_is_found_in_nested_lists() -> None:
    module = nn.Linear(8, 8, bias=False)
    optimizer = SGD(module.parameters(), 0.1)
    optimizer.state[module.weight] = {"history": [torch.zeros(4), {"more": (torch.zeros(2),)}], "name": "text"}
    assert persistent_bytes(module, [optimizer]).optimizer_state == 24


def test_meta_and_empty_tensors_take_nothing() -> None:
    module = nn.ParameterList([nn.Parameter(torch.empty(4, device="meta")), nn.Parameter(torch.empty(4, 0))])
    counted = persistent_bytes(module, [])
    assert (counted.weights, counted.parameters) == (0, 4)


def test_a_module_without_parameters_has_no_bytes_per_parameter() -> None:
    assert set(persistent_bytes(nn.ReLU(), []).per_parameter.values()) == {0}


def test_peak_rss_grows_by_what_is_allocated_and_never_falls() -> None:
    before = peak_rss_bytes()
    block = bytearray(b"x") * (64 << 20)
    during = peak_rss_bytes()
    assert before is not None
    assert during is not None
    # the peak of earlier tests may hide a part of the block, never more than the block
    assert before <= during <= before + len(block) + (32 << 20)
    del block
    after = peak_rss_bytes()
    assert after is not None
    assert after >= during > 50 << 20


def test_cuda_peak_of_the_cpu_is_unknown_not_zero() -> None:
    assert peak_cuda_bytes(torch.device("cpu")) is None


def test_a_sparse_gradient_counts_its_indices_and_values() -> None:
    module = nn.Embedding(100, 8, sparse=True)
    module(torch.tensor([3, 5, 3])).sum().backward()
    assert persistent_bytes(module, []).gradients == 3 * 8 + 3 * 8 * 4


def test_of_a_sharded_parameter_the_local_shard_counts() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        module = nn.Linear(8, 8, bias=False)
        module.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 8), mesh, [Shard(0)]))
        module.weight.grad = DTensor.from_local(torch.zeros(2, 8), mesh, [Shard(0)])
        counted = persistent_bytes(module, [])
    finally:
        dist.destroy_process_group()
    assert module.weight.numel() == 64
    assert (counted.weights, counted.gradients, counted.parameters) == (64, 64, 16)


def test_only_what_is_on_the_device_counts_if_one_is_named() -> None:
    module, optimizer = trained(torch.float32, AdamW)
    assert persistent_bytes(module, [optimizer], device=torch.device("cpu")) == persistent_bytes(module, [optimizer])
    elsewhere = persistent_bytes(module, [optimizer], device=torch.device("cuda", 0))
    assert (elsewhere.total, elsewhere.buffers) == (0, 0)


def test_step_counters_are_the_single_numbers_that_do_not_have_their_parameters_shape() -> None:
    module = nn.Linear(3, 1)  # the bias and its moments are single numbers, too
    optimizer = AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert step_counter_bytes([optimizer]) == 2 * 4
    assert persistent_bytes(module, [optimizer]).total - step_counter_bytes([optimizer]) == 16 * 4


class TestGradientWatch:
    """Gradients as backward makes them."""

    def halves(self) -> tuple[nn.Module, Tensor]:
        module = nn.Linear(10, 10, bias=False).to(torch.bfloat16)
        module.weight.grad_dtype = None
        return module, torch.ones(1, 10, dtype=torch.bfloat16)

    def test_a_gradient_counts_in_the_dtype_that_autograd_gave_it(self) -> None:
        module, x = self.halves()
        watch = GradientWatch(module)
        assert watch.bytes() is None, "there is none yet, which is not the same as none of any size"
        module(x).sum().backward()
        module.weight.grad = module.weight.grad.float()  # type: ignore[union-attr]
        assert watch.bytes() == 200
        assert persistent_bytes(module, []).gradients == 400

    def test_a_sum_in_fp32_counts_as_such(self) -> None:
        module, x = self.halves()
        watch = GradientWatch(module)
        for _ in range(2):
            watch.before_backward()
            module(x).sum().backward()
            module.weight.grad = module.weight.grad.float()  # type: ignore[union-attr]
        assert watch.bytes() == 400

    def test_a_sum_that_is_taken_away_during_backward_counts_from_before(self) -> None:
        module, x = self.halves()
        module.weight.grad = torch.zeros(10, 10)
        watch = GradientWatch(module)
        watch.before_backward()
        module.weight.grad = None
        module(x).sum().backward()
        assert watch.bytes() == 400

    def test_a_gradient_counts_even_if_it_was_cleared_since(self) -> None:
        module, x = self.halves()
        watch = GradientWatch(module)
        module(x).sum().backward()
        module.zero_grad()
        assert watch.bytes() == 200

    def test_tied_and_frozen_parameters_and_sparse_gradients(self) -> None:
        module = nn.ModuleDict({"a": nn.Embedding(6, 4, sparse=True), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4, bias=False)})
        module["c"].weight = module["b"].weight
        module["b"].bias.requires_grad_(False)
        watch = GradientWatch(module)
        module["c"](module["b"](module["a"](torch.tensor([1, 1])))).sum().backward()
        assert watch.bytes() == 16 * 4 + (2 * 8 + 2 * 4 * 4)

    def test_only_parameters_on_the_device_count_if_one_is_named(self) -> None:
        module, x = self.halves()
        watch = GradientWatch(module)
        module(x).sum().backward()
        assert watch.bytes(torch.device("cpu")) == 200
        assert watch.bytes(torch.device("cuda", 0)) is None

    def test_removing_it_leaves_no_hook(self) -> None:
        module, x = self.halves()
        watch = GradientWatch(module)
        watch.remove()
        assert not module.weight._post_accumulate_grad_hooks
        module(x).sum().backward()
        module.zero_grad()
        assert watch.bytes() is None
