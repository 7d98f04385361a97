"""The optimizer step on masters against the same torch optimizer in fp32, bit for bit."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import Parameter

from lightning_mp.masters import Masters
from lightning_mp.swap import BucketedStep, CoupledStep, is_coupled, prepare
from tests.reference import fp32_run, same_bits

optim = torch.optim
MIB = 2**20

OPTIMIZERS = {
    "AdamW": partial(optim.AdamW, lr=1e-3, weight_decay=0.1),
    "AdamW amsgrad": partial(optim.AdamW, lr=1e-3, amsgrad=True),
    "Adam amsgrad": partial(optim.Adam, lr=1e-3, amsgrad=True),
    "SGD": partial(optim.SGD, lr=1e-2),
    "SGD momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": partial(optim.RMSprop, lr=1e-3),
    "RMSprop centered": partial(optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": partial(optim.Adagrad, lr=1e-2, lr_decay=1e-3),
    "NAdam": partial(optim.NAdam, lr=1e-3),
    "RAdam": partial(optim.RAdam, lr=1e-3),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
    "Adamax": partial(optim.Adamax, lr=1e-3),
    "Adadelta": partial(optim.Adadelta, lr=1e-1),
    "ASGD": partial(optim.ASGD, lr=1e-2),
    "Rprop": partial(optim.Rprop, lr=1e-3),
}
FUSED = {"AdamW", "AdamW amsgrad", "Adam amsgrad", "SGD momentum", "SGD nesterov"}


def kernels(name: str) -> list[dict[str, bool]]:
    plain = [{"foreach": False}, {"foreach": True}]
    return [*plain, {"fused": True}] if name in FUSED else plain


CASES = [
    pytest.param(name, kernel, id=f"{name}-{'-'.join(k for k, v in kernel.items() if v) or 'plain'}")
    for name in OPTIMIZERS
    for kernel in kernels(name)
]


def parameters(seed: int = 0, empty: bool = True) -> list[torch.Tensor]:
    """A matrix that is sliced, a vector, a scalar, an empty one, and a convolution in channels-last layout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(96, 100), (7,), (), (4, 0), (8, 3, 3, 3)]
    values = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    return values if empty else [value for value in values if value.numel()]


def recorded_gradients(initial, steps: int, seed: int = 1, missing: bool = False):
    """bf16 gradients, laid out in memory as autograd does, like the parameter; with ``missing``, some are None."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            None
            if missing and (step + index) % 3 == 0
            else torch.empty_like(value, dtype=torch.bfloat16).copy_(
                torch.randn(value.shape, generator=generator) * 10.0 ** (step % 4 - 3)
            )
            for index, value in enumerate(initial)
        ]
        for step in range(steps)
    ]


def run_on_masters(initial, gradients, make_optimizer, storage="split", bucket_bytes=2 * MIB, grad_dtype=torch.bfloat16):
    masters = Masters(storage)
    params = [Parameter(value.clone()) for value in initial]
    for index, param in enumerate(params):
        masters.adopt(param, f"p{index}")
    optimizer = make_optimizer(params)
    prepare(optimizer, masters)
    stepper = BucketedStep(optimizer, masters, bucket_bytes)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = None if gradient is None else gradient.to(grad_dtype, copy=True)
        masters.settle()
        stepper.run()
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(left is right for left, right in zip(held, params, strict=True))
        assert all(any(key is param for param in params) for key in optimizer.state)
    return params, masters, optimizer


def assert_masters_equal(params, masters, expected):
    for param, value in zip(params, expected, strict=True):
        master = masters.get(param).value()
        assert same_bits(master, value)
        assert param.dtype == torch.bfloat16


@pytest.mark.parametrize("storage", ["split", "copy"])
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_200_steps_give_the_masters_of_an_fp32_run_bit_for_bit(name, kernel, storage):
    initial = parameters(empty=name != "Adafactor")  # torch's divides by the number of elements
    gradients = recorded_gradients(initial, 200)
    make = partial(OPTIMIZERS[name], **kernel)
    params, masters, _ = run_on_masters(initial, gradients, make, storage)
    assert_masters_equal(params, masters, fp32_run(initial, gradients, make))


@pytest.mark.parametrize("bucket_bytes", [0, 64, 40_000, 100_000, math.inf])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "NAdam", "ASGD", "Adafactor"])
def test_the_bucket_size_changes_no_bit(name, bucket_bytes):
    initial = parameters(empty=name != "Adafactor")
    gradients = recorded_gradients(initial, 12)
    params, masters, _ = run_on_masters(initial, gradients, OPTIMIZERS[name], bucket_bytes=bucket_bytes)
    assert_masters_equal(params, masters, fp32_run(initial, gradients, OPTIMIZERS[name]))


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_groups_with_different_settings_and_missing_gradients(storage):
    initial = parameters()
    gradients = recorded_gradients(initial, 30, missing=True)

    def make(params):
        groups = [
            {"params": params[:1], "lr": 1e-2},
            {"params": params[1:3], "weight_decay": 0.0, "betas": (0.5, 0.9)},
            {"params": params[3:]},
        ]
        return optim.AdamW(groups, lr=1e-3, weight_decay=0.3)

    params, masters, _ = run_on_masters(initial, gradients, make, storage, bucket_bytes=40_000)
    assert_masters_equal(params, masters, fp32_run(initial, gradients, make))


def test_fp32_gradients_are_used_as_they_are():
    initial = parameters()
    generator = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(value.shape, generator=generator) for value in initial] for _ in range(10)]
    params, masters, _ = run_on_masters(initial, gradients, OPTIMIZERS["AdamW"], grad_dtype=torch.float32)
    assert_masters_equal(params, masters, fp32_run(initial, gradients, OPTIMIZERS["AdamW"]))


def test_every_state_tensor_is_fp32_and_has_the_parameters_shape():
    initial = parameters()
    params, _, optimizer = run_on_masters(initial, recorded_gradients(initial, 3), OPTIMIZERS["AdamW"])
    for param in params:
        state = optimizer.state[param]
        assert state["step"].item() == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == torch.float32
            assert state[name].shape == param.shape


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_updates_below_half_an_ulp_are_not_lost(storage):
    # bf16 has 2^-8 below 1.0: an update of 1e-3 rounds away
    stuck = Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain = optim.SGD([stuck], lr=1e-3)
    masters = Masters(storage)
    param = Parameter(torch.ones(1))
    masters.adopt(param, "weight")
    optimizer = optim.SGD([param], lr=1e-3)
    stepper = BucketedStep(optimizer, masters, MIB)
    for _ in range(500):
        stuck.grad = torch.ones_like(stuck)
        plain.step()
        param.grad = torch.ones_like(param)
        masters.settle()
        stepper.run()
    assert stuck.item() == 1.0
    assert masters.get(param).value().item() == pytest.approx(0.5, abs=2e-5)
    assert param.item() == 0.5


def test_an_optimizer_that_raises_leaves_parameters_masters_and_groups_as_they_were():
    initial = parameters()

    def make(params):
        return optim.SGD(params, lr=0.1, momentum=0.9)

    gradients = recorded_gradients(initial, 2)
    params, masters, optimizer = run_on_masters(initial, gradients, make)
    before = [masters.get(param).value() for param in params]
    for param, gradient in zip(params, gradients[0], strict=True):
        param.grad = gradient
    stepper = BucketedStep(optimizer, masters, math.inf)
    optimizer.param_groups[0]["lr"] = "not a number"
    with pytest.raises(TypeError):
        stepper.run()
    assert all(left is right for left, right in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert all(any(key is param for param in params) for key in optimizer.state)
    for param, value in zip(params, before, strict=True):
        assert same_bits(masters.get(param).value(), value)


def test_step_hooks_of_users_run_once_and_see_the_modules_parameters():
    params = [Parameter(torch.randn(5000)) for _ in range(4)]
    masters = Masters("split")
    for index, param in enumerate(params):
        masters.adopt(param, str(index))
    optimizer = optim.AdamW(params)
    seen = []

    def record(optimizer, args, kwargs):
        seen.append([id(param) for param in optimizer.param_groups[0]["params"]])

    optimizer.register_step_pre_hook(record)
    optimizer.register_step_post_hook(record)
    for param in params:
        param.grad = torch.randn(5000).bfloat16()
    BucketedStep(optimizer, masters, 0).run()
    assert seen == [[id(param) for param in params]] * 2
    assert len(optimizer._optimizer_step_pre_hooks) == 1


class ByAttribute(optim.Optimizer):
    """SGD with a learning rate that the user sets on each parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * param.scale)


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_an_unknown_optimizer_gets_all_masters_with_the_attributes_of_their_parameters(storage):
    params = [Parameter(torch.full((3,), 1.001)), Parameter(torch.full((2,), -2.002))]
    masters = Masters(storage)
    for index, param in enumerate(params):
        masters.adopt(param, str(index))
        param.scale = 1e-4 * (index + 1)
        param.grad = torch.ones_like(param)
    optimizer = ByAttribute(params)
    assert is_coupled(optimizer)
    CoupledStep(optimizer, masters).run(lambda: None)
    for index, (param, start) in enumerate(zip(params, (1.001, -2.002), strict=True)):
        expected = torch.full_like(param, start, dtype=torch.float32) - torch.ones(()) * (1e-4 * (index + 1))
        assert same_bits(masters.get(param).value(), expected.detach())
        assert optimizer.param_groups[0]["params"][index] is param


def test_an_edited_parameter_takes_part_with_its_new_value():
    initial = parameters()
    gradients = recorded_gradients(initial, 1)
    for storage in ("split", "copy"):
        params, masters, _ = run_on_masters(initial, gradients, OPTIMIZERS["SGD"], storage)
        before = masters.get(params[0]).value()
        masters.end_step()
        params[0].data[0] = 0.5
        params[0].data[1, 0] = 0.0
        edited = before.clone()
        edited[0] = 0.5
        edited[1, 0] = 0.0
        assert same_bits(masters.get(params[0]).value(), edited)
        masters.settle()
        assert same_bits(masters.get(params[0]).value(), edited)


def test_an_edit_with_no_guard_up_is_kept_and_reported(caplog):
    param = Parameter(torch.full((4,), -1e-3))
    masters = Masters("split")
    masters.adopt(param, "weight")
    with torch.no_grad():
        param[0] = 0.0
        param[1] = 5.0
    masters.settle()
    value = masters.get(param).value()
    assert value[0] == 0
    assert value[1] == pytest.approx(5.0, rel=2**-9)
    assert same_bits(value[2:], torch.full((2,), -1e-3))
    assert "weight" in caplog.text
    assert "split" in caplog.text
