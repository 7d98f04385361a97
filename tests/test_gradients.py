"""Unscaling: what the kernels for a CPU and for accelerators (run on a CPU here) do to a list of gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_mp import gradients
from lightning_mp.gradients import SMALL, scale_, unscale_
from tests.instruments import CountSyncs
from tests.reference import same_bits

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPES = [(3,), (), (0,), (5, 7), (SMALL - 1,), (SMALL,), (300_001,)]
# in fp16 the division loses bits: what widening is for
CASES = [
    (dtype, widen, scale)
    for dtype, widen, scale in product([FP16, BF16, FP32, FP64], [True, False], [1.0, 8.0, 2.0**-3, 2.0**40])
    if widen or dtype != FP16 or scale <= 1.0
]


@pytest.fixture(params=["cpu", "accelerator"])
def kernels(request, monkeypatch):
    if request.param == "accelerator":
        for name in ("_divide_each_", "_divide_together_"):
            monkeypatch.setattr(gradients, name, gradients._divide_on_accelerator_)
        for name in ("_widen_each_", "_widen_together_"):
            monkeypatch.setattr(gradients, name, gradients._widen_on_accelerator_)


def parameters(dtype: torch.dtype) -> tuple[list[Parameter], list[Tensor]]:
    torch.manual_seed(0)
    params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params, [param.grad.clone() for param in params]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "widen", "scale"), CASES)
def test_gradients_are_divided_exactly_and_the_largest_magnitude_is_found(dtype, widen, scale):
    params, before = parameters(dtype)
    params.append(Parameter(torch.zeros(2)))  # has no gradient
    amax = unscale_(params, scale, widen)
    assert amax is not None
    assert amax.item() == max(grad.abs().max().float().item() for grad in before if grad.numel())
    for param, grad in zip(params, before, strict=False):
        assert param.grad is not None
        if grad.numel():
            assert param.grad.dtype == (FP32 if widen and dtype in (FP16, BF16) else dtype)
        assert torch.equal(param.grad.double() * scale, grad.double())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("index", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_one_element_that_is_not_finite_shows_in_the_magnitude(dtype, index, bad):
    params, _ = parameters(dtype)
    gradient = params[index].grad
    assert gradient is not None
    if not gradient.numel():
        return
    gradient.view(-1)[-1] = bad
    amax = unscale_(params, 4.0, widen=True)
    assert amax is not None
    assert not amax.isfinite()
    assert unscale_(parameters(dtype)[0], 4.0, widen=True).isfinite()  # type: ignore[union-attr]


@pytest.mark.usefixtures("kernels")
def test_memory_layout_is_kept():
    for dtype in (FP16, FP32):
        param = Parameter(torch.zeros(4, 3, 2, 2, dtype=dtype).contiguous(memory_format=torch.channels_last))
        param.grad = torch.randn(4, 3, 2, 2).to(dtype).contiguous(memory_format=torch.channels_last)
        stride = param.grad.stride()
        unscale_([param], 2.0, widen=True)
        assert param.grad.stride() == stride


@pytest.mark.usefixtures("kernels")
def test_a_sparse_gradient_is_coalesced_in_fp32_before_it_is_measured():
    table = Parameter(torch.zeros(4, 1, dtype=FP16))
    table.grad = torch.sparse_coo_tensor([[1, 1, 3]], torch.tensor([[64000.0], [64000.0], [-1.0]], dtype=FP16), (4, 1))
    amax = unscale_([table], 2.0, widen=True)
    assert amax == 128000.0  # infinite in fp16
    assert table.grad.dtype == FP32
    assert table.grad.to_dense().view(-1).tolist() == [0.0, 64000.0, 0.0, -0.5]
    scale_([table], 2.0)
    assert table.grad.to_dense().view(-1).tolist() == [0.0, 128000.0, 0.0, -1.0]


@pytest.mark.usefixtures("kernels")
def test_a_sparse_gradient_without_elements_says_nothing():
    table = nn.Embedding(6, 4, sparse=True, padding_idx=0)
    table(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert unscale_([table.weight], 2.0, widen=True) is None
    dense = Parameter(torch.ones(3))
    dense.grad = torch.tensor([1.0, -8.0, 2.0])
    assert unscale_([table.weight, dense], 2.0, widen=True) == 8.0


@pytest.mark.usefixtures("kernels")
def test_a_complex_gradient_counts_by_its_parts():
    param = Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.tensor([3 - 4j, 1 + 0j], dtype=torch.complex64)
    assert unscale_([param], 2.0, widen=True) == 4.0
    assert param.grad.tolist() == [1.5 - 2j, 0.5 + 0j]


def test_scaling_and_unscaling_give_the_same_bits_back():
    params, before = parameters(FP32)
    scale_(params, 2.0**20)
    unscale_(params, 2.0**20, widen=True)
    for param, grad in zip(params, before, strict=True):
        assert same_bits(param.grad, grad)


@pytest.mark.usefixtures("kernels")
def test_nothing_waits_for_the_device():
    params, _ = parameters(FP16)
    with CountSyncs() as counter:
        amax = unscale_(params, 2.0, widen=True)
        scale_(params, 2.0)
        assert counter.seen == []
        assert amax is not None
        amax.item()
        assert counter.seen != []  # it does count
