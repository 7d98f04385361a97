"""Faults of loss scaling that users of neighbouring projects reported, met by the plugin in both fp16 precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp import AdaptiveLossScale, DynamicLossScale, MasterWeightPrecision, NoLossScale, StaticLossScale
from tests.modules import UNIT_SGD, M, assert_same, quiet_trainer, random_rows, values
from tests.reference import fp32_run, same_bits

pytestmark = pytest.mark.usefixtures("seeded")
both = pytest.mark.parametrize("precision", ["16-mixed", "16-master"])

# relative to the quantity compared
TOLERANCES = {
    "gradient norms": 0.01,  # operands are rounded to fp16, 2^-11 each, and errors of a fit are differences of such
    "weights": 0.01,
}


def fp16(precision: str, loss_scale: Any = None, **settings: Any) -> MasterWeightPrecision:
    return MasterWeightPrecision(precision, loss_scale=loss_scale, **settings)


class Watch(Callback):
    """What is seen after each batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []  # for the next backward
        self.used: list[float] = []
        self.applied: list[int] = []
        self.skipped: list[int] = []
        self.lrs: list[float] = []
        self.weights: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        plugin = trainer.precision_plugin
        self.scales.append(plugin.loss_scale.scale)
        self.used.append(plugin.gradient_scale)
        self.applied.append(plugin.applied_steps)
        self.skipped.append(plugin.skipped_steps)
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.weights.append([value.clone() for value in plugin.masters().values()])


def fit(module: M, plugin: Any, **settings: Any) -> Watch:
    watch = Watch()
    callbacks = [] if plugin is None else [watch]
    quiet_trainer(plugin, callbacks=callbacks, **settings).fit(module)
    return watch


def reference(make: Any, **settings: Any) -> M:
    torch.manual_seed(0)
    module = make()
    quiet_trainer(None, **settings).fit(module)
    return module


class Rows(M):
    """The gradient of its loss is the batch's row, formed in fp16, whatever the weight."""

    def __init__(self, rows: Tensor, optimizer: Any = UNIT_SGD) -> None:
        super().__init__(nn.Linear(rows.shape[1], 1, bias=False), optimizer, (rows, rows[:, :1]), batch=1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).float().sum()


# --- B1: the schedule advances with applied steps, Lightning-AI/pytorch-lightning#18828 -------------------------------------


class Scheduled(M):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, lambda k: 1 / (1 + k)), "interval": "step"},
        }


class InfiniteLoss(Scheduled):
    """Its loss is infinite in the given batches."""

    bad: tuple[int, ...] = ()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * math.inf if batch_idx in self.bad else loss


@both
@pytest.mark.parametrize("bad", [(0, 1, 2), (1, 2, 3), (0, 2, 3)])
def test_three_of_four_infinite_losses_leave_the_schedule_at_one_step(precision, bad, said):
    module = InfiniteLoss()
    module.bad = bad
    plugin = fp16(precision)
    watch = fit(module, plugin)
    good = ({0, 1, 2, 3} - set(bad)).pop()
    assert watch.lrs == [0.1 if batch < good else 0.05 for batch in range(4)]
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (1, 3, 3)
    assert module.trainer.global_step == 4
    assert "lr_scheduler.step" not in said
    assert len(module.gradients) == 1


@both
def test_overflows_hold_the_schedule_back_as_infinite_losses_do(precision, said):
    rows = torch.tensor([[1.0, 8.0], [2.0, 1.0], [1.0, 8.0], [1.0, 8.0]])

    class ScheduledRows(Rows):
        configure_optimizers = Scheduled.configure_optimizers

    plugin = fp16(precision, 2**14)
    watch = fit(ScheduledRows(rows), plugin)
    assert watch.skipped == [1, 1, 2, 3]
    assert watch.lrs == [0.1, 0.05, 0.05, 0.05]
    assert plugin.nonfinite_losses == 0
    assert "lr_scheduler.step" not in said


def test_the_call_order_warning_can_be_seen(said):
    class Early(Scheduled):
        def on_train_start(self) -> None:
            self.lr_schedulers().step()

    quiet_trainer(None).fit(Early())
    assert "lr_scheduler.step" in said


# --- B2: each gradient is unscaled by the scale that made it, galilai-group/stable-pretraining#333 --------------------------


class TwoFromOneBackward(M):
    """One backward of a sum of two losses, then both optimizers step."""

    def __init__(self, rows: Tensor, order: tuple[int, int] = (0, 1)) -> None:
        layers = nn.ModuleList([nn.Linear(rows.shape[1], 1, bias=False) for _ in range(2)])
        super().__init__(layers, UNIT_SGD, (rows, rows[:, :1]), batch=1)
        self.automatic_optimization = False
        self.order = order

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(sum(layer(batch[0]).float().sum() for layer in self.layer))
        for index in self.order:
            optimizers[index].step()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return [SGD(layer.parameters(), lr=1.0) for layer in self.layer]


@both
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers_that_share_a_backward_both_apply_its_true_gradients(precision, order):
    rows = torch.tensor([[0.5, 2.0], [1.0, -0.25], [0.125, 1.0], [-2.0, 0.5]])
    module = TwoFromOneBackward(rows, order)
    before = values(module)
    plugin = fp16(precision, DynamicLossScale(init_scale=8.0, growth_interval=1))
    watch = fit(module, plugin)
    assert watch.scales == [16.0, 32.0, 64.0, 128.0]
    assert_same(module.parameters(), fp32_run(before, [[row[None]] * 2 for row in rows], UNIT_SGD))
    assert plugin.applied_steps == 8


# --- B3: no gradient, no step, Lightning-AI/pytorch-lightning#20116 ---------------------------------------------------------


@both
def test_an_optimizer_without_gradients_changes_nothing(precision):
    class OnlyFirst(TwoFromOneBackward):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            optimizers[0].zero_grad()
            self.manual_backward(self.layer[0](batch[0]).float().sum())
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [Adam(layer.parameters(), lr=0.1) for layer in self.layer]

        def on_train_end(self) -> None:
            self.last_state = [len(optimizer.state) for optimizer in self.trainer.optimizers]

    module = OnlyFirst(torch.ones(4, 2))
    before = values(module)
    plugin = fp16(precision, DynamicLossScale(init_scale=8.0, growth_interval=2))
    watch = fit(module, plugin)
    assert not same_bits(module.layer[0].weight.detach(), before[0])
    assert same_bits(module.layer[1].weight.detach(), before[1])
    assert module.last_state == [1, 0]
    assert watch.scales == [8.0, 16.0, 16.0, 32.0]
    assert (plugin.applied_steps, plugin.skipped_steps) == (4, 0)


class NoneOn(M):
    """``training_step`` returns None for the given batches."""

    none: tuple[int, ...] = ()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx in self.none else self.loss(batch)


@both
def test_a_training_step_that_returns_none_is_no_step_and_no_growth(precision):
    class NoneRows(NoneOn, Rows):
        none = (1, 3, 5)

    rows = torch.tensor([[float(k), 1.0] for k in range(1, 7)])
    module = NoneRows(rows)
    before = values(module)
    plugin = fp16(precision, DynamicLossScale(init_scale=8.0, growth_interval=2))
    watch = fit(module, plugin)
    assert watch.scales == [8.0, 8.0, 16.0, 16.0, 16.0, 16.0]
    assert (plugin.applied_steps, plugin.skipped_steps) == (3, 0)
    for batch in (1, 3, 5):
        assert_same(watch.weights[batch], watch.weights[batch - 1])
    assert_same(module.parameters(), fp32_run(before, [[rows[k][None]] for k in (0, 2, 4)], UNIT_SGD))


@both
@pytest.mark.parametrize("none", [(1, 3), (0, 2), (0, 1), (2, 3)])
def test_none_within_accumulation_and_clipping_is_as_in_fp32(precision, none):
    def make() -> M:
        module = NoneOn()
        module.none = none
        return module

    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    module = make()
    plugin = fp16(precision, 2**10)
    fit(module, plugin, **settings)
    expected = reference(make, **settings)
    for one, other in zip(values(module), values(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCES["weights"], atol=1e-4)
    assert plugin.skipped_steps == 0
    assert plugin.applied_steps == (1 if none in ((0, 1), (2, 3)) else 2)


# --- B4: gradients that a user sees are true, Lightning-AI/pytorch-lightning#4151 -------------------------------------------


class Norms(M):
    """Records gradient norms in every hook that can see gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, list[float]] = {}

    def _note(self, hook: str) -> None:
        self.norms.setdefault(hook, []).append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def on_after_backward(self) -> None:
        self._note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._note("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._note("configure_gradient_clipping")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


@both
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_norms_in_hooks_are_those_of_fp32(precision, accumulate):
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    module = Norms()
    fit(module, fp16(precision, 2**12), **settings)
    expected = reference(Norms, **settings)
    assert set(module.norms) == {"on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"}
    for hook, norms in module.norms.items():
        assert norms == pytest.approx(expected.norms[hook], rel=TOLERANCES["gradient norms"])


# --- B5: a run in which nothing trains is stopped, EleutherAI/gpt-neox#291 --------------------------------------------------


class NanFrom3(M):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * (math.nan if batch_idx >= 3 else 1.0)


@both
@pytest.mark.parametrize("limit", [50, 4])
def test_nan_losses_leave_the_scale_alone_warn_and_then_stop_the_run(precision, limit, said):
    module = NanFrom3(rows=random_rows(200))
    plugin = fp16(precision, DynamicLossScale(init_scale=1024.0), max_consecutive_skips=limit)
    watch = Watch()
    with pytest.raises(FloatingPointError, match=f"{limit} optimizer steps in a row") as caught:
        quiet_trainer(plugin, callbacks=[watch], max_epochs=1).fit(module)
    assert "loss itself was not finite" in str(caught.value)
    assert "layer" in str(caught.value)
    assert plugin.nonfinite_losses == plugin.skipped_steps == limit
    assert set(watch.scales) == {1024.0}
    assert_same(module.parameters(), watch.weights[2])
    assert "skipped|loss is not finite" in said


@both
def test_overflow_at_the_floor_stops_the_run_and_names_the_parameter_and_the_history(precision):
    module = Rows(torch.full((100, 2), 3e4))
    before = values(module)
    plugin = fp16(precision, DynamicLossScale(init_scale=64.0, min_scale=16.0))
    with pytest.raises(FloatingPointError) as caught:
        fit(module, plugin)
    message = str(caught.value)
    assert [word for word in ("layer.weight", "64 32 16", "loss was finite", "min_scale") if word not in message] == []
    assert plugin.loss_scale.scale == 16.0
    assert plugin.nonfinite_losses == plugin.applied_steps == 0
    assert_same(module.parameters(), before)


@both
def test_the_scale_does_not_pass_its_ceiling(precision):
    plugin = fp16(precision, DynamicLossScale(init_scale=4.0, growth_interval=1, max_scale=16.0))
    watch = fit(Rows(torch.ones(5, 2)), plugin)
    assert watch.scales == [8.0, 16.0, 16.0, 16.0, 16.0]
    assert watch.applied[-1] == 5


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-master"])
def test_nan_without_scaling_is_told_from_overflow(precision):
    plugin = MasterWeightPrecision(precision, skip_nonfinite=True, max_consecutive_skips=4)
    module = NanFrom3(rows=random_rows(40))
    with pytest.raises(FloatingPointError, match="loss itself was not finite"):
        quiet_trainer(plugin).fit(module)
    assert plugin.loss_scale == NoLossScale()
    assert plugin.nonfinite_losses == 4


# --- B6: clipping sees unscaled fp32 gradients, Lightning-AI/pytorch-lightning#9694 ------------------------------------------


class ClipsItself(Rows):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")


# the largest gradient, 300, fits into fp16 at scale 2^7; its square does not, at any
CLIPPED = torch.tensor([[300.0, 0.5], [0.75, -300.0], [0.0625, 0.03125], [1.0, 1.0]])


@both
@pytest.mark.parametrize("scale", [1.0, 2.0**7])
@pytest.mark.parametrize("algorithm", ["norm", "value", "override"])
def test_clipping_gives_the_update_of_fp32(precision, scale, algorithm):
    def make() -> M:
        return (ClipsItself if algorithm == "override" else Rows)(CLIPPED)

    settings = {} if algorithm == "override" else {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    torch.manual_seed(0)
    module = make()
    plugin = fp16(precision, scale)
    fit(module, plugin, **settings)
    expected = reference(make, **settings)
    assert plugin.applied_steps == 4
    torch.testing.assert_close(values(module), values(expected), rtol=1e-6, atol=1e-6)


@both
def test_small_gradients_at_a_large_scale_are_clipped_as_in_fp32(precision):
    class Small(Rows):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) / 16

    rows = torch.tensor([[0.5, 0.25], [8.0, -0.5]])
    settings = {"gradient_clip_val": 0.1}
    module = Small(rows)
    plugin = fp16(precision, 2**16)
    fit(module, plugin, **settings)
    assert plugin.applied_steps == 2
    expected = reference(lambda: Small(rows), **settings)
    torch.testing.assert_close(values(module), values(expected), rtol=1e-6, atol=1e-6)


@both
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_norm_that_is_not_finite_skips_the_step_and_zeroes_nothing(precision, algorithm):
    rows = torch.tensor([[1.0, 1.0], [300.0, 1.0], [1.0, 2.0]])
    module = Rows(rows)
    plugin = fp16(precision, 2**10)
    watch = fit(module, plugin, gradient_clip_val=1e3, gradient_clip_algorithm=algorithm)
    assert watch.skipped == [0, 1, 1]
    assert_same(watch.weights[1], watch.weights[0])
    assert not same_bits(watch.weights[2][0], watch.weights[1][0])


# --- B9: an fp16 loss at a large scale, Lightning-AI/pytorch-lightning#9799 --------------------------------------------------


class HalfLoss(M):
    """Its loss is 0.77 at first, an fp16 tensor of the given shape, and its gradients are 2^-6."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(2, 1, bias=False), UNIT_SGD, (torch.full((4, 2), 2.0**-6), torch.zeros(4, 1)), batch=1)
        nn.init.constant_(self.layer.weight, 0.0)
        self.shape = shape

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = (self.layer(batch[0]).half().sum() + 0.77).reshape(self.shape)
        assert loss.dtype == torch.float16
        return loss


@both
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("scaler", [DynamicLossScale, AdaptiveLossScale, StaticLossScale])
def test_an_fp16_loss_trains_from_the_first_step_at_any_initial_scale(precision, shape, scaler, said):
    module = HalfLoss(shape)
    plugin = fp16(precision, scaler(2.0**24))
    watch = fit(module, plugin)
    assert watch.used == [2.0**15] * 4
    assert (watch.applied, watch.skipped) == ([1, 2, 3, 4], [0, 0, 0, 0])
    assert said.count("fp16|2^15") == 1
    expected = fp32_run([torch.zeros(1, 2)], [[torch.full((1, 2), 2.0**-6)]] * 4, UNIT_SGD)
    assert_same(module.parameters(), expected)


@both
def test_why_a_step_was_skipped_and_how_many_were_is_in_the_log(precision, said):
    module = Rows(torch.tensor([[64.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    fit(module, fp16(precision, DynamicLossScale(init_scale=2**12)))
    assert said.count("skipped|overflowed|layer.weight|4096|2048|1 skipped and 0 applied") == 1
