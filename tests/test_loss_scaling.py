"""Loss scaling and skipped steps in real fits: what an fp32 run gives, and what a user sees on the way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from lightning_mp import AdaptiveLossScale, DynamicLossScale, MasterWeightPrecision, StaticLossScale, Trainer
from tests.modules import PLAIN_SGD, QUIET, UNIT_SGD, M, assert_same, quiet_trainer, random_rows, values
from tests.reference import fp32_run, same_bits

pytestmark = pytest.mark.usefixtures("seeded")
FP16 = ("16-mixed", "16-master")
both = pytest.mark.parametrize("precision", FP16)
unchecked = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-master"])
BIG = 1024.0  # as a gradient it overflows at scales of 64 and more

# relative to the quantity compared
TOLERANCES = {
    "a fit": 0.02,  # operands are rounded to fp16, 2^-11 each, and errors of a fit are differences of such
}


def plugin_of(precision: str, loss_scale: Any = None, **settings: Any) -> MasterWeightPrecision:
    return MasterWeightPrecision(precision, loss_scale=loss_scale, **settings)


def dynamic(init_scale: float = 8.0, growth_interval: int = 2000, **settings: Any) -> DynamicLossScale:
    return DynamicLossScale(init_scale=init_scale, growth_interval=growth_interval, **settings)


class Watch(Callback):
    """What is seen after each batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []  # for the next backward
        self.used: list[float] = []
        self.applied: list[int] = []
        self.skipped: list[int] = []
        self.was_skipped: list[bool] = []
        self.lrs: list[float] = []
        self.losses: list[Any] = []
        self.weights: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        plugin = trainer.precision_plugin
        self.scales.append(plugin.loss_scale.scale)
        self.used.append(plugin.gradient_scale)
        self.applied.append(plugin.applied_steps)
        self.skipped.append(plugin.skipped_steps)
        self.was_skipped.append(plugin.last_step_skipped)
        self.lrs += [group["lr"] for optimizer in trainer.optimizers[:1] for group in optimizer.param_groups[:1]]
        self.losses.append(None if not outputs else outputs["loss"])
        self.weights.append([value.clone() for value in plugin.masters().values()])


def fit(module: Any, plugin: Any, **settings: Any) -> Watch:
    watch = Watch()
    callbacks = [*settings.pop("callbacks", []), *([watch] if isinstance(plugin, MasterWeightPrecision) else [])]
    quiet_trainer(plugin, callbacks=callbacks, limit_val_batches=0, **settings).fit(module)
    return watch


def reference(make: Callable[[], Any], **settings: Any) -> Any:
    """The module after an fp32 run with the same seed."""
    torch.manual_seed(0)
    module = make()
    fit(module, None, **settings)
    return module


def assert_close_to_fp32(module: Any, make: Callable[[], Any], **settings: Any) -> None:
    expected = reference(make, **settings)
    for one, other in zip(values(module), values(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCES["a fit"], atol=1e-3)


class Rows(M):
    """The gradient of its loss is ``factor`` times the batch's row, whatever the weight, and formed in fp16."""

    factor = 1.0

    def __init__(self, rows: Any, optimizer: Any = UNIT_SGD) -> None:
        rows = torch.as_tensor(rows, dtype=torch.float32)
        super().__init__(nn.Linear(rows.shape[1], 1, bias=False), optimizer, (rows, rows[:, :1]), batch=1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).float().sum() * self.factor


class ManualRows(Rows):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.look()
        optimizer.step()

    def look(self) -> None:
        """Between backward and the step."""


def replay(before: list[Tensor], rows: Any, make: Any = UNIT_SGD) -> list[Tensor]:
    """What an fp32 run makes of ``before`` on the given rows as gradients."""
    rows = torch.as_tensor(rows, dtype=torch.float32)
    return fp32_run(before, [[row[None]] for row in rows], make)


# --- the loss is scaled in fp32 ---------------------------------------------------------------------------------------------


class LossOfDtype(Rows):
    """Its loss has a dtype and a shape; its gradients are 2^-26."""

    factor = 2.0**-17
    dtype = torch.float32
    shape: tuple[int, ...] = ()

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = (self.layer(batch[0]).to(self.dtype).sum() * self.factor).reshape(self.shape)
        assert loss.dtype == self.dtype
        return loss


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**17, 2.0**24])
def test_a_loss_of_any_dtype_and_shape_gives_true_gradients_at_large_scales(precision, shape, dtype, scale):
    module = LossOfDtype(torch.full((3, 2), 2.0**-9))
    module.dtype, module.shape = dtype, shape
    nn.init.zeros_(module.layer.weight)
    plugin = plugin_of(precision, scale)
    watch = fit(module, plugin)
    assert (watch.used, watch.applied) == ([scale] * 3, [1, 2, 3])
    assert_same(module.parameters(), replay([torch.zeros(1, 2)], torch.full((3, 2), 2.0**-26)))


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**16, 2.0**24])
def test_an_fp16_loss_caps_the_scale_and_says_so(precision, shape, scale, said):
    module = LossOfDtype(torch.full((3, 2), 2.0**-9))
    module.dtype, module.shape, module.factor = torch.float16, shape, 1.0
    plugin = plugin_of(precision, dynamic(scale))
    watch = fit(module, plugin)
    assert (watch.used, watch.applied) == ([2.0**15] * 3, [1, 2, 3])
    assert said.count("fp16|2^15") == (0 if scale == 2.0**15 else 1)


@both
def test_callbacks_and_hooks_see_the_loss_unscaled(precision):
    class Sees(Rows):
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen = [*getattr(self, "seen", []), loss.item()]

    module = Sees(torch.ones(3, 2), partial(SGD, lr=0.0))
    nn.init.constant_(module.layer.weight, 0.5)
    watch = fit(module, plugin_of(precision, 1024))
    assert module.seen == [1.0, 1.0, 1.0]
    assert [loss.item() for loss in watch.losses] == [1.0, 1.0, 1.0]


# --- gradients that a user sees are true ------------------------------------------------------------------------------------


HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class InHook(Rows):
    """Calls ``act`` in one of the hooks that see gradients."""

    hook = "on_after_backward"
    act: Callable[[Any], None] = staticmethod(lambda module: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, list[Tensor]] = {hook: [] for hook in HOOKS}

    def _in(self, hook: str) -> None:
        self.seen[hook].append(self.layer.weight.grad.detach().clone())
        if hook == self.hook:
            type(self).act(self)

    def on_after_backward(self) -> None:
        self._in("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._in("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._in("configure_gradient_clipping")


@both
def test_every_hook_sees_the_true_gradient_in_fp32_where_fp16_would_be_zero(precision):
    module = InHook(torch.full((2, 2), 2.0**-9))
    module.factor = 2.0**-17
    nn.init.zeros_(module.layer.weight)
    fit(module, plugin_of(precision, 2**17))
    for hook in HOOKS:
        assert_same(module.seen[hook], [torch.full((1, 2), 2.0**-26)] * 2)
    assert_same(module.parameters(), [torch.full((1, 2), -(2.0**-25))])


def double(module: Any) -> None:
    module.layer.weight.grad.mul_(2)


def replace_by_sevens(module: Any) -> None:
    module.layer.weight.grad = torch.full_like(module.layer.weight.grad, 7.0)


def drop(module: Any) -> None:
    module.layer.weight.grad = None


def spoil(module: Any) -> None:
    if module.global_step == 1:
        module.layer.weight.grad[0, 1] = math.nan


@both
@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_user_changes_in_a_gradient_takes_effect(precision, hook):
    rows = torch.tensor([[1.0, 2.0], [-0.5, 4.0]])
    for act, gradients in ((double, 2 * rows), (replace_by_sevens, torch.full((2, 2), 7.0))):
        cls = type("Edits", (InHook,), {"hook": hook, "act": staticmethod(act)})
        module: Any = cls(rows)
        before = values(module)
        fit(module, plugin_of(precision, 64))
        assert_same(module.parameters(), replay(before, gradients))


@both
def test_a_gradient_that_a_user_drops_after_backward_is_no_step(precision):
    class Drops(Rows):
        def on_after_backward(self) -> None:
            drop(self)

    module = Drops(torch.ones(3, 2))
    before = values(module)
    plugin = plugin_of(precision, 64)
    fit(module, plugin)
    assert_same(module.parameters(), before)
    assert (plugin.applied_steps, plugin.skipped_steps) == (0, 0)


@pytest.mark.parametrize("precision", [*FP16, "32-true", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("manual", [False, True])
def test_a_gradient_that_a_user_makes_nan_after_backward_is_skipped(precision, manual):
    class Spoils(ManualRows if manual else Rows):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            spoil(self)

    module = Spoils(torch.ones(3, 2))
    plugin = plugin_of(precision, 64 if precision in FP16 else None, skip_nonfinite=True)
    watch = fit(module, plugin)
    assert watch.skipped == [0, 1, 1]
    assert bool(torch.isfinite(module.layer.weight).all())


@both
def test_an_overflow_that_a_user_repairs_after_backward_is_stepped(precision):
    class Repairs(Rows):
        def on_after_backward(self) -> None:
            self.layer.weight.grad.nan_to_num_(0.0, 0.0, 0.0)

    module = Repairs([[1.0, BIG], [1.0, 1.0]])
    before = values(module)
    plugin = plugin_of(precision, 64)
    fit(module, plugin)
    assert_same(module.parameters(), replay(before, [[1.0, 0.0], [1.0, 1.0]]))
    assert plugin.skipped_steps == 0


@both
@pytest.mark.parametrize("kind", ["look", "torch norm", "torch value", "lightning norm", "lightning value", "edit"])
def test_right_after_manual_backward_gradients_are_true_and_fp32(precision, kind):
    class Looks(ManualRows):
        def look(self) -> None:
            grad = self.layer.weight.grad
            assert grad.dtype == torch.float32
            self.seen = [*getattr(self, "seen", []), grad.clone()]
            if kind == "torch norm":
                norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
                torch.testing.assert_close(norm, self.seen[-1].norm())
            elif kind == "torch value":
                nn.utils.clip_grad_value_(self.parameters(), 0.5)
            elif kind.startswith("lightning"):
                self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm=kind.split()[1])
            elif kind == "edit":
                grad.mul_(2)

    def edited(row: Tensor) -> Tensor:
        if kind.endswith("norm"):
            return row * (0.5 / (row.norm() + 1e-6)).clamp(max=1.0)
        if kind.endswith("value"):
            return row.clamp(-0.5, 0.5)
        return 2 * row if kind == "edit" else row

    # its square is beyond fp16
    rows = torch.tensor([[300.0, 0.25], [0.125, -0.25], [2.0**-12, 0.5]])
    module = Looks(rows)
    before = values(module)
    plugin = plugin_of(precision, 128)
    fit(module, plugin)
    assert plugin.applied_steps == 3
    assert_same(module.seen, [row[None] for row in rows])
    torch.testing.assert_close(values(module), replay(before, torch.stack([edited(row) for row in rows])))


# --- which optimizers step, and when the scale moves ------------------------------------------------------------------------


class Pair(M):
    """Two linear layers with an optimizer each, stepped by ``script(module, batch_idx, batch)``."""

    def __init__(self, rows: Any, script: Callable[[Any, int, list[Tensor]], None], lr: float = 1.0) -> None:
        rows = torch.as_tensor(rows, dtype=torch.float32)
        net = nn.ModuleList([nn.Linear(rows.shape[1] // 2, 1, bias=False) for _ in range(2)])
        super().__init__(net, partial(SGD, lr=lr), (rows, rows[:, :1]), batch=1)
        self.automatic_optimization = False
        self.script = script

    def losses(self, batch: list[Tensor]) -> list[Tensor]:
        """The gradient of the first is the first half of the row for the first layer, of the second accordingly."""
        return [layer(half).float().sum() for layer, half in zip(self.layer, batch[0].chunk(2, dim=1), strict=True)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.script(self, batch_idx, batch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(layer.parameters()) for layer in self.layer]


def shared_backward(module: Any, batch_idx: int, batch: list[Tensor], order: tuple[int, ...] = (0, 1)) -> None:
    optimizers = module.optimizers()
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(sum(module.losses(batch)))
    for index in order:
        optimizers[index].step()


@both
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("bad", [0, 1])
def test_only_the_optimizer_that_saw_the_overflow_is_skipped_and_the_scale_moves_once(precision, order, bad):
    rows = torch.ones(4, 4)
    rows[1, 2 * bad + 1] = BIG
    module = Pair(rows, partial(shared_backward, order=order))
    before = values(module)
    plugin = plugin_of(precision, dynamic(64.0))
    watch = fit(module, plugin)
    assert watch.scales == [64.0, 32.0, 32.0, 32.0]
    assert (plugin.applied_steps, plugin.skipped_steps) == (7, 1)
    assert plugin.last_overflow == f"layer.{bad}.weight"
    for index, (param, start) in enumerate(zip(module.parameters(), before, strict=True)):
        assert_same([param], replay([start], torch.ones(3 if index == bad else 4, 2)))


@both
@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 1)])
def test_an_optimizer_that_steps_twice_on_one_backward_applies_the_same_gradient_twice(precision, order):
    rows = torch.tensor([[1.0, 0.5, 2.0, 0.25]] * 3)
    module = Pair(rows, partial(shared_backward, order=order))
    before = values(module)
    plugin = plugin_of(precision, dynamic(4.0, growth_interval=1))
    watch = fit(module, plugin)
    assert watch.used == [4.0, 8.0, 16.0]
    assert watch.scales == [8.0, 16.0, 32.0]
    for index, (param, start) in enumerate(zip(module.parameters(), before, strict=True)):
        assert_same([param], replay([start], [[1.0, 0.5] if index == 0 else [2.0, 0.25]] * 3 * order.count(index)))


@both
def test_a_gan_with_toggled_optimizers_unscales_each_gradient_by_its_own_scale(precision):
    def gan(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        for index, optimizer in enumerate(module.optimizers()):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            module.manual_backward(sum(module.losses(batch)))
            assert module.layer[1 - index].weight.requires_grad is False
            optimizer.step()
            module.untoggle_optimizer(optimizer)

    rows = torch.tensor([[1.0, 0.5, 2.0, 0.25], [0.125, -4.0, 0.5, 1.0], [-1.0, 1.0, 0.0, 2.0]])
    module = Pair(rows, gan)
    before = values(module)
    watch = fit(module, plugin_of(precision, dynamic(4.0, growth_interval=1)))
    assert watch.used == [8.0, 32.0, 128.0]
    for param, start, half in zip(module.parameters(), before, rows.chunk(2, dim=1), strict=True):
        assert_same([param], replay([start], half))


@both
def test_a_gan_whose_second_network_overflows_goes_on_with_the_first(precision):
    def gan(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        for optimizer, loss in zip(module.optimizers(), module.losses(batch), strict=True):
            optimizer.zero_grad()
            module.manual_backward(loss)
            optimizer.step()

    rows = torch.ones(3, 4)
    rows[1, 2] = BIG
    module = Pair(rows, gan)
    before = values(module)
    plugin = plugin_of(precision, dynamic(64.0))
    watch = fit(module, plugin)
    assert watch.scales == [64.0, 32.0, 32.0]
    assert (plugin.applied_steps, plugin.skipped_steps) == (5, 1)
    for param, start, count in zip(module.parameters(), before, (3, 2), strict=True):
        assert_same([param], replay([start], torch.ones(count, 2)))


def every_second(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
    """The first optimizer steps on each batch, the second on the sum of two."""
    first, second = module.optimizers()
    first.zero_grad()
    if batch_idx % 2 == 0:
        second.zero_grad()
    module.manual_backward(sum(module.losses(batch)))
    first.step()
    if batch_idx % 2 == 1:
        second.step()


@both
def test_an_optimizer_that_steps_on_every_second_batch_sums_gradients_of_different_scales(precision):
    rows = torch.tensor([[1.0, 0.5, 2.0, 0.25], [0.125, -4.0, 0.5, 1.0], [-1.0, 1.0, 0.0, 2.0], [3.0, 1.0, 5.0, -0.5]])
    module = Pair(rows, every_second)
    before = values(module)
    watch = fit(module, plugin_of(precision, dynamic(4.0, growth_interval=1)))
    assert watch.used == [4.0, 8.0, 16.0, 32.0]
    first, second = rows.chunk(2, dim=1)
    assert_same([module.layer[0].weight], replay(before[:1], first))
    assert_same([module.layer[1].weight], replay(before[1:], torch.stack([second[0] + second[1], second[2] + second[3]])))


@both
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_drops_the_window_of_the_optimizer_that_waits_and_no_step_of_the_other(precision, bad):
    rows = torch.ones(4, 4)
    rows[bad, 3] = BIG
    module = Pair(rows, every_second)
    before = values(module)
    plugin = plugin_of(precision, dynamic(64.0))
    watch = fit(module, plugin)
    assert watch.scales == [64.0 if batch < bad else 32.0 for batch in range(4)]
    assert (plugin.applied_steps, plugin.skipped_steps) == (5, 1)
    assert watch.skipped == [0, 1, 1, 1]
    assert_same([module.layer[0].weight], replay(before[:1], torch.ones(4, 2)))
    assert_same([module.layer[1].weight], replay(before[1:], torch.full((1, 2), 2.0)))


@both
def test_gradients_that_are_left_over_are_added_to_as_in_fp32(precision):
    def leaves(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        """Only the first optimizer clears its gradients."""
        optimizers = module.optimizers()
        optimizers[0].zero_grad()
        module.manual_backward(sum(module.losses(batch)))
        for optimizer in optimizers:
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5, 2.0, 0.25], [0.125, -4.0, 0.5, 1.0], [-1.0, 1.0, 0.0, 2.0]])
    module = Pair(rows, leaves)
    before = values(module)
    fit(module, plugin_of(precision, dynamic(4.0, growth_interval=1)))
    first, second = rows.chunk(2, dim=1)
    assert_same([module.layer[0].weight], replay(before[:1], first))
    assert_same([module.layer[1].weight], replay(before[1:], second.cumsum(0)))


@both
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_loss_that_is_not_finite_skips_only_the_optimizer_with_its_gradients(precision, order):
    def two_backwards(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        optimizers = module.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, loss in enumerate(module.losses(batch)):
            module.manual_backward(loss * (math.nan if (batch_idx, index) == (1, 1) else 1.0))
        for index in order:
            optimizers[index].step()

    module = Pair(torch.ones(3, 4), two_backwards)
    before = values(module)
    plugin = plugin_of(precision, dynamic(64.0))
    watch = fit(module, plugin)
    assert watch.scales == [64.0] * 3
    assert plugin.nonfinite_losses == 1
    assert_same([module.layer[1].weight], replay(before[1:], torch.ones(2, 2)))
    assert_same([module.layer[0].weight], replay(before[:1], torch.ones(3, 2)))


def random_script(seed: int) -> list[tuple[Any, ...]]:
    """Operations of a manual loop: backward of one loss or both, steps and clearing, in no particular order."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    script: list[tuple[Any, ...]] = []
    for _ in range(60):
        kind = ("backward", "backward", "step", "step", "zero")[below(5)]
        script.append((kind, ((0,), (1,), (0, 1))[below(3)], below(4), bool(below(2))))
    return script


class Model:
    """What a manual loop over two optimizers is to do, worked out with plain tensors."""

    def __init__(self, weights: list[Tensor], scaler: DynamicLossScale, lr: float) -> None:
        self.weights, self.scaler, self.lr = weights, scaler, lr
        self.gradients: list[Any] = [None, None]
        self.applied = self.skipped = 0
        self.has_stepped = self.overflowed = False  # in this round

    def _is_infinite(self, index: int) -> bool:
        return self.gradients[index] is not None and not bool(self.gradients[index].isfinite().all())

    def backward(self, which: tuple[int, ...], row: Tensor) -> None:
        if self.has_stepped:
            self.scaler = self.scaler.update(finite=not self.overflowed)
            self.has_stepped = self.overflowed = False
        for index in which:
            new = row[:, 2 * index : 2 * index + 2]
            new = new.where(new * self.scaler.scale <= 65504, math.inf)
            # what was infinite before is no news
            self.overflowed |= bool(new.isinf().any()) and not self._is_infinite(index)
            self.gradients[index] = new if self.gradients[index] is None else self.gradients[index] + new

    def step(self, index: int) -> None:
        if self.gradients[index] is None:
            return
        self.has_stepped = True
        if self._is_infinite(index):
            self.skipped += 1
        else:
            self.weights[index] = self.weights[index] - self.lr * self.gradients[index]
            self.applied += 1

    def zero(self, index: int, to_none: bool) -> None:
        if self.gradients[index] is not None:
            self.gradients[index] = None if to_none else torch.zeros_like(self.gradients[index])


@both
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_any_order_of_backwards_steps_and_clearing_gives_the_weights_of_fp32(precision, overflows, seed):
    rows = torch.tensor([[1.0, 0.5, 2.0, 0.25], [0.125, -4.0, 0.5, 1.0], [-1.0, 1.0, 0.25, 2.0], [1.0, 1.0, 0.0, 0.5]])
    if overflows:
        rows[3, 1] = rows[2, 2] = BIG
    script, lr = random_script(seed), 2.0**-8
    scales: list[tuple[float, float]] = []

    def play(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        optimizers = module.optimizers()
        for kind, which, row, to_none in script:
            if kind == "backward":
                losses = module.losses([rows[row : row + 1]])
                module.manual_backward(sum(losses[index] for index in which))
                expected.backward(which, rows[row : row + 1])
                scales.append((module.plugin.gradient_scale, expected.scaler.scale))
            for index in which:
                if kind == "step":
                    optimizers[index].step()
                    expected.step(index)
                elif kind == "zero":
                    optimizers[index].zero_grad(set_to_none=to_none)
                    expected.zero(index, to_none)

    module = Pair(rows[:1], play, lr)
    scaler = dynamic(128.0, growth_interval=1, min_scale=2.0**-10, max_scale=256.0)
    expected = Model(values(module), scaler, lr)
    plugin = plugin_of(precision, scaler, max_consecutive_skips=10**6)
    fit(module, plugin)
    assert [used for used, _ in scales] == [wanted for _, wanted in scales]
    assert_same(module.parameters(), expected.weights)
    assert (plugin.applied_steps, plugin.skipped_steps) == (expected.applied, expected.skipped)


KINDS = ("healthy", "healthy", "overflow", "nan", "none")


@both
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_healthy_overflowing_nan_and_empty_batches(precision, to_none, accumulate, seed):
    generator = torch.Generator().manual_seed(seed)
    kinds = [KINDS[int(torch.randint(len(KINDS), (), generator=generator))] for _ in range(30)]
    rows = torch.randint(-8, 9, (30, 2), generator=generator) / 4
    rows[[kind == "overflow" for kind in kinds], 1] = BIG

    class Plays(Rows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            kind = kinds[batch_idx]
            return None if kind == "none" else self.loss(batch) * (math.nan if kind == "nan" else 1.0)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=to_none)

    make = partial(SGD, lr=2.0**-8, momentum=0.5)
    module = Plays(rows, make)
    weight = nn.Parameter(module.layer.weight.detach().clone())
    optimizer = make([weight])
    scaler = dynamic(256.0, growth_interval=2, min_scale=2.0**-10)
    plugin = plugin_of(precision, scaler, max_consecutive_skips=10**6)
    watch = fit(module, plugin, accumulate_grad_batches=accumulate)
    counts = {"applied": 0, "skipped": 0, "nonfinite": 0}
    for start in range(0, 30, accumulate):
        window = range(start, min(start + accumulate, 30))
        optimizer.zero_grad(set_to_none=to_none)
        overflowed = False
        for batch in window:
            assert watch.used[batch] == scaler.scale or kinds[batch] == "none"
            if kinds[batch] in ("healthy", "overflow"):
                row = rows[batch][None] / accumulate
                overflowed |= bool((row.abs() * scaler.scale > 65504).any())
                weight.grad = row if weight.grad is None else weight.grad + row
        if any(kinds[batch] == "nan" for batch in window):
            counts["skipped"] += 1
            counts["nonfinite"] += 1
            weight.grad = torch.zeros_like(weight)  # no longer None
        elif overflowed:
            counts["skipped"] += 1
            scaler = scaler.update(finite=False)
        elif weight.grad is not None:
            counts["applied"] += 1
            optimizer.step()
            if any(kinds[batch] != "none" for batch in window):
                scaler = scaler.update(finite=True)
    assert_same(module.parameters(), [weight])
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == tuple(counts.values())
    assert plugin.loss_scale == scaler


@both
@pytest.mark.parametrize("scaler", [partial(AdaptiveLossScale, window=2), partial(dynamic, growth_interval=1)])
@pytest.mark.parametrize("manual", [False, True])
def test_the_scale_does_not_depend_on_how_gradients_are_cleared(precision, scaler, manual):
    def scales(set_to_none: bool) -> list[float]:
        class Zeroes(Rows):
            factor = 2.0**-8

            def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
                optimizer.zero_grad(set_to_none=set_to_none)

        class ManuallyZeroes(ManualRows):
            factor = 2.0**-8

            def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
                optimizer: Any = self.optimizers()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

        return fit((ManuallyZeroes if manual else Zeroes)(rows), plugin_of(precision, scaler(8.0))).scales

    rows = torch.tensor([16.0, 16.0, 2.0, 2.0, 2.0, 2.0])[:, None].expand(6, 2)
    expected = scales(True)
    assert expected[-1] > expected[1]
    assert scales(False) == expected


# --- accumulation windows ---------------------------------------------------------------------------------------------------


class ManualWindows(ManualRows):
    """Steps after every second batch, and clears then."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def fit_windows(manual: bool, rows: Any, plugin: MasterWeightPrecision) -> tuple[Any, list[Tensor], Watch]:
    module = (ManualWindows if manual else Rows)(rows)
    before = values(module)
    return module, before, fit(module, plugin, **({} if manual else {"accumulate_grad_batches": 2}))


@both
@pytest.mark.parametrize("bad", [False, True])
def test_a_loss_of_many_elements_is_scaled_with_the_gradient_that_is_given(precision, bad):
    class Vector(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            output = self.layer(batch[0]).float().view(-1)
            losses = torch.stack([output.sum(), output.sum() * (math.nan if bad and batch_idx == 0 else 1.0)])
            self.manual_backward(losses, gradient=torch.tensor([0.25, 0.25]))
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Vector(rows)
    before, plugin = values(module), plugin_of(precision, 64)
    fit(module, plugin)
    assert (plugin.applied_steps, plugin.nonfinite_losses) == ((1, 1) if bad else (2, 0))
    assert_same(module.parameters(), replay(before, rows[int(bad) :] / 2))


@both
@pytest.mark.parametrize("manual", [False, True])
def test_the_scale_is_constant_in_a_window_and_windows_give_the_mean(precision, manual):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0], [2.0, 8.0], [-0.5, 0.5]])
    module, before, watch = fit_windows(manual, rows, plugin_of(precision, dynamic(4.0, growth_interval=1)))
    assert watch.used == [4.0, 4.0, 8.0, 8.0, 16.0, 16.0]
    assert watch.applied == [0, 1, 1, 2, 2, 3]
    assert_same(module.parameters(), replay(before, (rows[0::2] + rows[1::2]) / 2))


@both
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("bad", [(2,), (3,), (2, 3)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_overflow_in_any_micro_batch_drops_the_window_once_and_leaks_nothing(precision, manual, bad, sign):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0], [2.0, 8.0], [-0.5, 0.5]])
    for batch in bad:
        rows[batch, 1] = 2 * BIG * sign**batch
    plugin = plugin_of(precision, dynamic(128.0))
    module, before, watch = fit_windows(manual, rows, plugin)
    assert watch.used == [128.0, 128.0, 128.0, 128.0, 64.0, 64.0]
    assert watch.skipped == [0, 0, 0, 1, 1, 1]
    assert (plugin.applied_steps, plugin.nonfinite_losses) == (2, 0)
    assert_same(module.parameters(), replay(before, ((rows[0::2] + rows[1::2]) / 2)[[0, 2]]))


@both
def test_an_incomplete_window_at_the_end_of_an_epoch_is_stepped_or_dropped_by_itself(precision):
    rows = torch.tensor([[1.0, 0.5], [0.125, 4.0], [1.5 * BIG, 2.0]])  # the last overflows at 128, not at 64
    module = Rows(rows)
    before = values(module)
    watch = fit(module, plugin_of(precision, dynamic(128.0)), accumulate_grad_batches=2, max_epochs=2)
    assert watch.skipped == [0, 0, 1, 1, 1, 1]
    mean = (rows[0] + rows[1]) / 2
    assert_same(module.parameters(), replay(before, torch.stack([mean, mean, rows[2] / 2])))


# --- a skipped step changes nothing -----------------------------------------------------------------------------------------


def everything(trainer: Any) -> dict[str, Any]:
    """All that a step may change, copied."""
    plugin = trainer.precision_plugin
    return {
        "parameters": values(trainer.lightning_module),
        "masters": list(plugin.masters().values()),
        "state": [copy.deepcopy(list(optimizer.state.values())) for optimizer in trainer.optimizers],
        "groups": [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
        "schedules": [
            {key: value for key, value in config.scheduler.state_dict().items() if not callable(value)}
            for config in trainer.lr_scheduler_configs
        ],
    }


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return same_bits(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


class Snapshots(Callback):
    """Whether each batch left everything as it was, and how often the hooks of a step were called."""

    def __init__(self) -> None:
        self.unchanged: list[bool] = []
        self.calls: list[str] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.before = everything(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.unchanged.append(is_equal(self.before, everything(trainer)))

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls.append("on_before_optimizer_step")


OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(AdamW, lr=0.1, weight_decay=0.1),
    "AdamW fused": partial(AdamW, lr=0.1, weight_decay=0.1, fused=True),
    "Adagrad": partial(Adagrad, lr=0.1),
    "RMSprop": partial(RMSprop, lr=0.1, momentum=0.9),
}


class Scheduled(Rows):
    """With a schedule of the given kind."""

    schedule = staticmethod(lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k)))
    settings: dict[str, Any] = {"interval": "step"}  # noqa: RUF012

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": type(self).schedule(optimizer), **self.settings}}


class RowOrInfinity(torch.autograd.Function):
    """0, with the row as gradient; infinite where the row is 100 or more."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row.where(row < 100, math.inf).to(weight.dtype))
        return weight.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (row,) = ctx.saved_tensors
        return (row * grad).to(row.dtype), None


@pytest.mark.parametrize("precision", [*FP16, "32-true", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [(0,), (2,), (0, 1, 3)])
def test_a_skipped_step_changes_nothing_and_calls_no_hook_of_a_step(precision, name, bad):
    class Clips(Scheduled):
        clipped = 0

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) if precision in FP16 else RowOrInfinity.apply(self.layer.weight, batch[0])

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clipped += 1
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    rows[list(bad)] = BIG
    module = Clips(rows, OPTIMIZERS[name])
    snapshots = Snapshots()
    plugin = plugin_of(precision, 128 if precision in FP16 else None, skip_nonfinite=True)
    fit(module, plugin, callbacks=[snapshots], gradient_clip_val=10.0)
    assert snapshots.unchanged == [batch in bad for batch in range(4)]
    assert (plugin.skipped_steps, plugin.nonfinite_losses) == (len(bad), 0)
    assert len(snapshots.calls) == len(module.gradients) == module.clipped == 4 - len(bad)
    assert module.trainer.global_step == 4


BAD_ROWS = torch.tensor([[BIG, 1.0], [1.0, 1.0], [BIG, 1.0], [1.0, 2.0], [2.0, 1.0], [BIG, 1.0]])  # at scale 128
APPLIED = (0, 1, 1, 2, 3, 3)


def applied_only(make: Any, schedule: Any, steps: tuple[int, ...], lr: float = 0.1) -> list[float]:
    """The learning rate after each number of steps."""
    optimizer = make([nn.Parameter(torch.ones(1))])
    scheduler = schedule(optimizer)
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(max(steps)):
        optimizer.step()
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return [lrs[step] for step in steps]


SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=6),
}


@both
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overridden", [False, True])
def test_stepwise_schedules_advance_with_applied_steps_only_and_warn_of_nothing(precision, schedule, overridden, said):
    class Overrides(Scheduled):
        calls = 0

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls += 1
            scheduler.step()

    cls = type("Kind", (Overrides if overridden else Scheduled,), {"schedule": staticmethod(SCHEDULES[schedule])})
    module: Any = cls(BAD_ROWS, partial(SGD, lr=0.1, momentum=0.9))
    watch = fit(module, plugin_of(precision, 128))
    assert watch.lrs == applied_only(module.make_optimizer, SCHEDULES[schedule], APPLIED)
    assert "lr_scheduler.step" not in said
    assert "lr_scheduler_step" not in vars(module)
    assert not overridden or module.calls == 3


@both
def test_a_schedule_with_a_frequency_advances_only_where_the_step_was_applied(precision):
    class EverySecond(Scheduled):
        settings = {"interval": "step", "frequency": 2}  # noqa: RUF012

    watch = fit(EverySecond(BAD_ROWS, PLAIN_SGD), plugin_of(precision, 128))
    assert watch.was_skipped == [True, False, True, False, False, True]
    assert watch.lrs == [0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3, 0.1 / 3]


@both
def test_a_plateau_schedule_by_step_sees_applied_steps_only(precision):
    class Plateau(Scheduled):
        schedule = staticmethod(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
        settings = {"interval": "step", "monitor": "flat", "strict": True}  # noqa: RUF012

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self.log("flat", 1.0)
            return self.loss(batch)

    module = Plateau(BAD_ROWS, PLAIN_SGD)
    watch = fit(module, plugin_of(precision, 128))
    assert watch.lrs == [0.1, 0.1, 0.1, 0.1, 0.05, 0.025]  # seen before Lightning steps the schedule of the batch
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.025


@both
@pytest.mark.parametrize("all_bad", [False, True])
def test_epochwise_schedules_advance_with_epochs_without_a_warning(precision, all_bad, said):
    class Epochwise(Scheduled):
        settings = {"interval": "epoch"}  # noqa: RUF012

    rows = BAD_ROWS[[0, 2]] if all_bad else BAD_ROWS[:2]
    watch = fit(Epochwise(rows, PLAIN_SGD), plugin_of(precision, 128), max_epochs=3)
    assert watch.lrs == [0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3, 0.025]
    assert watch.applied[-1] == (0 if all_bad else 3)
    assert "lr_scheduler.step" not in said


@both
def test_a_stepwise_and_an_epochwise_schedule_side_by_side(precision):
    class Two(Rows):
        def configure_optimizers(self) -> Any:
            optimizer = SGD([{"params": self.parameters()}], lr=0.1)
            stepwise = {"scheduler": LambdaLR(optimizer, lambda k: 1 / (1 + k)), "interval": "step"}
            epochwise = {"scheduler": LambdaLR(optimizer, lambda k: 1.0), "interval": "epoch"}
            return [optimizer], [stepwise, epochwise]

        def on_train_end(self) -> None:
            self.steps = [config.scheduler.last_epoch for config in self.trainer.lr_scheduler_configs]

    module = Two(BAD_ROWS)
    fit(module, plugin_of(precision, 128), max_epochs=2)
    assert module.steps == [6, 2]


@both
def test_in_manual_optimization_a_schedule_can_follow_last_step_skipped(precision, said):
    class Follows(ManualRows):
        configure_optimizers = Scheduled.configure_optimizers
        schedule = Scheduled.schedule
        settings = Scheduled.settings

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if not self.plugin.last_step_skipped:
                self.lr_schedulers().step()

    watch = fit(Follows(BAD_ROWS, PLAIN_SGD), plugin_of(precision, 128))
    assert watch.lrs == [0.1 / (1 + steps) for steps in APPLIED]
    assert "lr_scheduler.step" not in said


@both
def test_a_manual_schedule_that_steps_in_any_case_is_not_warned_about(precision, said):
    class Steps(ManualRows):
        configure_optimizers = Scheduled.configure_optimizers
        schedule = Scheduled.schedule
        settings = Scheduled.settings

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

    fit(Steps(BAD_ROWS, PLAIN_SGD), plugin_of(precision, 128))
    assert "lr_scheduler.step" not in said


# --- a loss that is not finite ----------------------------------------------------------------------------------------------


class BadLoss(Rows):
    bad: dict[int, float] = {}  # noqa: RUF012
    adds = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        value = self.bad.get(batch_idx)
        return loss if value is None else loss + value if self.adds else loss * value


@both
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("adds", [False, True])  # added to, the gradient is finite
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_skips_without_a_change_of_the_scaler(precision, value, adds, accumulate):
    cls = type("Bad", (BadLoss,), {"bad": {2: value}, "adds": adds})
    module: Any = cls(torch.full((6, 2), 0.5))
    before = values(module)
    plugin = plugin_of(precision, dynamic(64.0, growth_interval=2))
    fit(module, plugin, accumulate_grad_batches=accumulate)
    applied = 6 // accumulate - 1
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (applied, 1, 1)
    expected = dynamic(64.0, growth_interval=2)
    for _ in range(applied):
        expected = expected.update(finite=True)
    assert plugin.loss_scale == expected
    assert plugin.last_overflow is None
    assert_same(module.parameters(), replay(before, torch.full((applied, 2), 0.5)))


@both
def test_a_loss_that_overflows_fp16_in_forward_is_no_reason_to_back_off(precision):
    class Overflows(Rows):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return (self.layer(batch[0]).half() * 60000).sum()

    plugin = plugin_of(precision, dynamic(64.0))
    module = Overflows([[4.0, 4.0]])
    nn.init.ones_(module.layer.weight)
    fit(module, plugin)
    assert plugin.loss_scale.scale == 64.0
    assert (plugin.nonfinite_losses, plugin.skipped_steps) == (1, 1)


# --- steps without gradients, closures --------------------------------------------------------------------------------------


class NoneOn(Rows):
    none: tuple[int, ...] = ()
    to_none = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx in self.none else self.loss(batch)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.to_none)


@both
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("none", [(0,), (1,), (0, 1), (2, 3), (1, 3), (3, 4, 5), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("clip_val", [None, 1.5])
def test_none_from_training_step_is_as_in_fp32(precision, to_none, none, accumulate, clip_val):
    def make() -> Any:
        cls = type("None_", (NoneOn,), {"none": none, "to_none": to_none})
        return cls(rows, partial(SGD, lr=0.5, momentum=0.5))

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0], [2.0, 8.0], [-0.5, 0.5]]) * 3
    module = make()
    plugin = plugin_of(precision, 64)
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip_val}
    fit(module, plugin, **settings)
    # the norm's bits depend on the kernel
    torch.testing.assert_close(values(module), values(reference(make, **settings)), rtol=1e-6 if clip_val else 0, atol=0)
    assert plugin.skipped_steps == 0


@both
def test_none_after_an_overflow_steps_on_cleared_gradients_as_in_fp32(precision):
    class Decays(NoneOn):
        none = (2,)
        to_none = False

    module = Decays([[1.0, 2.0], [BIG, 1.0], [0.0, 0.0], [1.0, 1.0]], partial(SGD, lr=1.0, momentum=0.5))
    before = values(module)
    plugin = plugin_of(precision, 128)
    watch = fit(module, plugin)
    assert watch.skipped == [0, 1, 1, 1]
    assert_same(module.parameters(), replay(before, [[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]], module.make_optimizer))


@both
@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_whose_parameters_are_frozen_or_unused_is_a_no_op(precision, clips):
    def some(module: Any, batch_idx: int, batch: list[Tensor]) -> None:
        optimizers = module.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        module.manual_backward(module.losses(batch)[0])
        for optimizer in reversed(optimizers):
            if clips:
                module.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
            optimizer.step()

    for frozen in (False, True):
        module = Pair(torch.ones(4, 4), some)
        module.layer[1].requires_grad_(not frozen)
        before = values(module)
        plugin = plugin_of(precision, dynamic(8.0, growth_interval=2))
        watch = fit(module, plugin)
        assert watch.scales == [8.0, 16.0, 16.0, 32.0]
        assert (plugin.applied_steps, plugin.skipped_steps) == (4, 0)
        assert_same([module.layer[1].weight], before[1:])
        assert_same([module.layer[0].weight], replay(before[:1], torch.ones(4, 2)))


@both
def test_a_manual_step_with_a_closure_scales_and_skips(precision):
    class Closes(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    module = Closes(BAD_ROWS)
    before = values(module)
    watch = fit(module, plugin_of(precision, 128))
    assert tuple(watch.applied) == APPLIED
    assert_same(module.parameters(), replay(before, BAD_ROWS[[1, 3, 4]]))


class NeedsClosure(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        closure()
        return loss


@pytest.mark.parametrize("precision", [*FP16, "32-true", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("optimizer", [LBFGS, partial(NeedsClosure, lr=0.1)])
@pytest.mark.parametrize("manual", [False, True])
def test_an_optimizer_that_evaluates_the_model_in_its_step_is_refused_by_name(precision, optimizer, manual):
    plugin = plugin_of(precision, skip_nonfinite=precision not in FP16)
    module = (ManualRows if manual else Rows)(torch.ones(2, 2), optimizer)
    before = values(module)
    with pytest.raises(MisconfigurationException, match=r"LBFGS|NeedsClosure"):
        fit(module, plugin)
    assert_same(module.parameters(), before)


# --- runs that are stopped --------------------------------------------------------------------------------------------------


class Deep(M):
    """Two layers; gradients of both overflow in batch 2 and later."""

    from_batch = 2

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), partial(Adam, lr=1e-3), random_rows(24))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * (1e9 if batch_idx >= self.from_batch else 1.0)


SCALERS = {
    "dynamic": lambda: dynamic(4.0, min_scale=1.0),
    "adaptive": lambda: AdaptiveLossScale(init_scale=4.0, min_scale=1.0, max_scale=4.0),
}


@both
@pytest.mark.parametrize("scaler", SCALERS)
def test_overflow_at_the_floor_stops_with_names_history_and_advice(precision, scaler, tmp_path):
    module = Deep()
    watch = Watch()
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    plugin = plugin_of(precision, SCALERS[scaler]())
    trainer = quiet_trainer(plugin, callbacks=[watch, keep], enable_checkpointing=True, limit_val_batches=0)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(module)
    message = str(caught.value)
    assert message.index("layer.1.") < message.index("layer.0.")
    assert [word for word in ("loss was finite", "4 4 4", "fp32_modules", "bf16-master") if word not in message] == []
    assert plugin.loss_scale.scale == 1.0
    assert plugin.applied_steps == 2
    assert all(param.dtype == torch.float32 for param in module.parameters())
    assert_same(module.parameters(), watch.weights[1])
    last = torch.load(max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns), weights_only=True)
    assert_same(last["state_dict"].values(), watch.weights[1])
    module.from_batch = 100
    again = plugin_of(precision, 64.0)
    fit(module, again)
    assert again.applied_steps == 12


@both
@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_skips_in_a_row_stop_and_an_applied_step_starts_the_count_again(precision, limit):
    rows = [[BIG, 1.0]] * (limit - 1) + [[1.0, 1.0]] + [[BIG, 1.0]] * limit + [[1.0, 1.0]]
    module = Rows(rows)
    plugin = plugin_of(precision, StaticLossScale(128.0), max_consecutive_skips=limit)
    with pytest.raises(FloatingPointError, match=f"{limit} optimizer steps in a row.*layer.weight"):
        fit(module, plugin)
    assert (plugin.applied_steps, plugin.skipped_steps) == (1, 2 * limit - 1)


@both
def test_one_overflow_at_the_floor_is_not_two_after_a_loss_that_was_not_finite(precision):
    cls = type("Bad", (BadLoss,), {"bad": {0: math.nan}})
    module: Any = cls([[1.0, 1.0], [BIG, 1.0], [1.0, 1.0]])
    plugin = plugin_of(precision, dynamic(128.0, min_scale=128.0))
    fit(module, plugin)
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (1, 2, 1)


@both
def test_skips_of_two_optimizers_are_counted_apart(precision):
    rows = torch.ones(4, 4)
    rows[0, 0] = rows[1, 2] = rows[2, 0] = rows[3, 2] = BIG
    plugin = plugin_of(precision, StaticLossScale(128.0), max_consecutive_skips=2)
    fit(Pair(rows, shared_backward), plugin)
    assert (plugin.applied_steps, plugin.skipped_steps) == (4, 4)


# --- fused optimizers, sparse gradients -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("make", [partial(AdamW, lr=0.1, fused=True), partial(SGD, lr=0.1, momentum=0.9, fused=True)])
def test_fused_optimizers_with_clipping_step_on_clipped_gradients(precision, algorithm, make):
    rows = torch.tensor([[1.0, 0.5], [BIG, 1.0], [0.125, -4.0], [-1.0, 2.0]])
    module = Rows(rows, make)
    before = values(module)
    plugin = plugin_of(precision, 128)
    fit(module, plugin, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    assert (plugin.applied_steps, plugin.skipped_steps) == (3, 1)
    kept = rows[[0, 2, 3]]
    norms = kept.norm(dim=1, keepdim=True)
    clipped = kept.clamp(-0.5, 0.5) if algorithm == "value" else kept * (0.5 / (norms + 1e-6)).clamp(max=1.0)
    torch.testing.assert_close(values(module), replay(before, clipped, make))


class Embeds(M):
    """An embedding with sparse gradients: row ``i`` gets ``factor`` for each time that it is looked up."""

    def __init__(self, indices: list[list[int]], make: Any, factor: float = 1.0, padding_idx: int | None = None) -> None:
        table = nn.Embedding(6, 4, sparse=True, padding_idx=padding_idx)
        rows = torch.tensor(indices)
        super().__init__(table, make, (rows, rows), batch=1)
        self.factor = factor

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).float().sum() * self.factor

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        grad = self.layer.weight.grad
        self.gradients.append([grad.to_dense().detach().clone()])
        self.was_sparse = grad.is_sparse
        self.dtype_seen = grad.dtype


SPARSE = {"SGD": partial(SGD, lr=0.5), "SparseAdam": partial(SparseAdam, lr=0.1)}


@both
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_are_unscaled_and_stepped_as_in_fp32(precision, name, accumulate):
    indices = [[0, 1, 1], [2, 2, 2], [5, 0, 1], [3, 3, 0]]
    module = Embeds(indices, SPARSE[name])
    fit(module, plugin_of(precision, dynamic(64.0, growth_interval=1)), accumulate_grad_batches=accumulate)
    expected = reference(lambda: Embeds(indices, SPARSE[name]), accumulate_grad_batches=accumulate)
    assert module.was_sparse
    assert module.dtype_seen == torch.float32
    assert_same([step[0] for step in module.gradients], [step[0] for step in expected.gradients])
    assert_same(module.parameters(), expected.parameters())


@both
def test_duplicates_of_a_sparse_gradient_whose_sum_is_beyond_fp16_are_summed_in_fp32(precision):
    module = Embeds([[1, 1, 2]], SPARSE["SGD"], factor=64000.0)
    before = values(module)
    plugin = plugin_of(precision, 1.0)
    fit(module, plugin)
    assert plugin.skipped_steps == 0
    expected = before[0].clone()
    expected[1] -= 64000.0
    expected[2] -= 32000.0
    assert_same(module.parameters(), [expected])


@both
@pytest.mark.parametrize("name", SPARSE)
def test_an_overflow_in_a_sparse_gradient_skips(precision, name):
    class Overflows(Embeds):
        def loss(self, batch: list[Tensor]) -> Tensor:
            factor = BIG if int(batch[0][0, 0]) == 1 else 1.0
            return (self.layer(batch[0]).half().sum() * factor).float()

    snapshots = Snapshots()
    module = Overflows([[0, 1], [1, 2], [2, 3]], SPARSE[name])
    plugin = plugin_of(precision, 128)
    fit(module, plugin, callbacks=[snapshots])
    assert snapshots.unchanged == [False, True, False]
    assert plugin.nonfinite_losses == 0


@both
def test_a_sparse_gradient_without_elements_is_no_error(precision):
    def make() -> Any:
        return Embeds([[0, 1], [0, 0], [1, 2]], SPARSE["SGD"], padding_idx=0)

    module = make()
    fit(module, plugin_of(precision, 64))
    assert_same(module.parameters(), reference(make).parameters())


# --- skipping without a scale -----------------------------------------------------------------------------------------------


@unchecked
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_skip_nonfinite_skips_without_a_scale_and_keeps_the_gradients_dtype(precision, value):
    class Sees(Scheduled):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self.loss(batch) * (value if batch_idx == 1 else 1.0)

        def on_after_backward(self) -> None:
            self.dtypes = [*getattr(self, "dtypes", []), self.layer.weight.grad.dtype]

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Sees(rows, partial(SGD, lr=0.5))
    snapshots = Snapshots()
    plugin = plugin_of(precision, skip_nonfinite=True)
    watch = fit(module, plugin, callbacks=[snapshots])
    assert snapshots.unchanged == [False, True, False, False]
    assert (watch.scales, watch.used) == ([1.0] * 4, [1.0] * 4)
    assert watch.lrs == [0.25, 0.25, 0.5 / 3, 0.125]
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (3, 1, 1)
    assert set(module.dtypes) == {torch.bfloat16 if precision == "bf16-master" else torch.float32}


@unchecked
def test_without_skip_nonfinite_a_nan_reaches_the_weights(precision):
    cls = type("Bad", (BadLoss,), {"bad": {1: math.nan}})
    module: Any = cls(torch.ones(3, 2))
    plugin = plugin_of(precision)
    fit(module, plugin)
    assert bool(module.layer.weight.isnan().all())
    assert plugin.applied_steps == 3


@unchecked
@pytest.mark.parametrize("accumulate", [1, 2])
def test_skip_nonfinite_changes_no_bit_of_a_healthy_run(precision, accumulate):
    def run(skips: bool) -> Any:
        torch.manual_seed(0)
        module = M(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), partial(AdamW, lr=0.1))
        fit(module, plugin_of(precision, skip_nonfinite=skips), accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
        return module

    assert_same(run(True).parameters(), run(False).parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-master"])
def test_a_loss_scale_without_fp16_changes_no_bit_of_the_update(precision):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Rows(rows)
    before = values(module)
    watch = fit(module, plugin_of(precision, dynamic(4.0, growth_interval=1)), accumulate_grad_batches=2)
    assert watch.used == [4.0, 4.0, 8.0, 8.0]
    assert_same(module.parameters(), replay(before, (rows[0::2] + rows[1::2]) / 2))


# --- odd things -------------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


@both
@pytest.mark.parametrize(
    "settings",
    [
        {"detect_anomaly": True},
        {"overfit_batches": 2, "max_epochs": 3},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"max_epochs": 3, "gradient_clip_val": 0.5},
    ],
    ids=str,
)
def test_a_fit_with_the_trainers_options_is_close_to_fp32(precision, settings):
    module = M(net())
    plugin = plugin_of(precision, 1024)
    fit(module, plugin, **settings)
    assert plugin.skipped_steps == 0
    assert_close_to_fp32(module, lambda: M(net()), **settings)


@both
@pytest.mark.parametrize("fresh_trainer", [True, False])
def test_a_second_fit_starts_its_scale_and_counts_afresh(precision, fresh_trainer):
    rows = torch.tensor([[1.0, 0.5], [BIG, 1.0], [0.125, -4.0]])
    plugin = plugin_of(precision, dynamic(128.0))
    first, second = Rows(rows), Rows(rows)
    before = values(second)
    trainer = quiet_trainer(plugin, limit_val_batches=0)
    trainer.fit(first)
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.loss_scale.scale) == (2, 1, 64.0)
    if fresh_trainer:
        trainer = quiet_trainer(plugin, limit_val_batches=0)
    else:
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = 1
    trainer.fit(second)
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.loss_scale.scale) == (2, 1, 64.0)
    assert_same(second.parameters(), replay(before, rows[[0, 2]]))


@both
def test_fitting_the_same_module_on_goes_on_from_its_masters(precision):
    rows = torch.tensor([[1.0, 2.0**-13], [0.125, -4.0]])
    module = Rows(rows)
    before = values(module)
    plugin = plugin_of(precision, 128)
    trainer = quiet_trainer(plugin, limit_val_batches=0)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert_same(module.parameters(), replay(before, rows.repeat(2, 1)))


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_after_an_exception_module_and_plugin_can_be_used_again(precision, error, where):
    def breaks(self: Any, *args: Any) -> Any:
        if self.global_step >= 1 and not self.broken:
            self.broken = True
            self.at_break = list(self.plugin.masters().values())
            raise error("broken off")
        return getattr(super(cls, self), where)(*args)

    cls: Any = type("Breaks", (Rows,), {where: breaks, "broken": False})
    rows = torch.tensor([[1.0, 0.5], [0.25, 1.0], [0.125, -4.0]])
    module = cls(rows)
    plugin = plugin_of(precision, dynamic(8.0, growth_interval=1))
    with pytest.raises((error, SystemExit)):
        fit(module, plugin)
    assert_same(module.parameters(), module.at_break)
    assert "lr_scheduler_step" not in vars(module)
    before = values(module)
    watch = fit(module, plugin)
    assert watch.used == [8.0, 16.0, 32.0]
    assert_same(module.parameters(), replay(before, rows))


@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_and_dropout_give_the_gradients_without_it(precision, reentrant):
    class Checkpoints(M):
        checkpoints = True

        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)))

        def loss(self, batch: list[Tensor]) -> Tensor:
            torch.manual_seed(7)
            inner, last = self.layer[:3], self.layer[3]
            x = batch[0].requires_grad_()
            x = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant) if self.checkpoints else inner(x)
            return nn.functional.mse_loss(last(x).float(), batch[1])

    class Plain(Checkpoints):
        checkpoints = False

    plugin = plugin_of(precision, 1024)
    module = Checkpoints()
    fit(module, plugin)
    torch.manual_seed(0)
    plain = Plain()
    fit(plain, plugin_of(precision, 1024))
    assert plugin.applied_steps == 4
    assert_same(module.parameters(), plain.parameters())


@both
def test_only_hooks_during_backward_see_scaled_gradients_and_they_may_change_them(precision):
    class Hooks(Rows):
        def on_train_start(self) -> None:
            self.seen: list[Tensor] = []
            self.handle = self.layer.weight.register_hook(lambda grad: (self.seen.append(grad.float()), grad * 2)[1])

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Hooks(rows)
    before = values(module)
    fit(module, plugin_of(precision, 64))
    assert_same(module.seen, [64 * row[None] for row in rows])
    assert_same(module.parameters(), replay(before, 2 * rows))


@both
def test_a_gradient_penalty_inside_the_step_sees_unscaled_gradients(precision):
    class Penalty(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            x = batch[0].clone().requires_grad_()
            out = self.layer(x).float()
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return nn.functional.mse_loss(out, batch[1]) + (slope.float().norm(dim=1) - 1).square().mean()

    def make() -> Any:
        return Penalty(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))

    module = make()
    plugin = plugin_of(precision, 1024)
    fit(module, plugin, max_epochs=2)
    assert plugin.applied_steps == 8
    assert_close_to_fp32(module, make, max_epochs=2)


@both
def test_two_backwards_through_one_retained_graph_are_summed(precision):
    class Retains(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(3 * loss)
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Retains(rows)
    before = values(module)
    watch = fit(module, plugin_of(precision, dynamic(8.0, growth_interval=1)))
    assert watch.used == [8.0, 16.0]
    assert_same(module.parameters(), replay(before, 4 * rows))


@both
def test_backward_of_a_vector_with_a_gradient_argument_is_scaled(precision):
    class Vector(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).float(), gradient=torch.full((1, 1), 0.5))
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Vector(rows)
    before = values(module)
    fit(module, plugin_of(precision, 64))
    assert_same(module.parameters(), replay(before, rows / 2))


class Direct(ManualRows):
    """Calls ``loss.backward()`` itself, on some batches or all; NaN in batch ``bad``."""

    through_us: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch) * (math.nan if batch_idx in self.bad else 1.0)
        if batch_idx in self.through_us:
            self.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()


@both
@pytest.mark.parametrize("through_us", [(), (0,), (0, 2), (1,), (3,)])
def test_a_backward_that_the_user_calls_directly_is_not_unscaled(precision, through_us):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module: Any = type("D", (Direct,), {"through_us": through_us})(rows)
    before = values(module)
    plugin = plugin_of(precision, dynamic(8.0, growth_interval=1))
    fit(module, plugin)
    assert_same(module.parameters(), replay(before, rows))
    assert plugin.applied_steps == 4


@pytest.mark.parametrize("precision", [*FP16, "32-true", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("through_us", [(), (0,), (0, 2), (1,), (0, 1)])
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1), (2,), (3,)])
def test_a_nan_of_a_backward_that_the_user_calls_directly_is_skipped(precision, through_us, bad):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module: Any = type("D", (Direct,), {"through_us": through_us, "bad": bad})(rows)
    before = values(module)
    plugin = plugin_of(precision, 8.0 if precision in FP16 else None, skip_nonfinite=True)
    watch = fit(module, plugin)
    assert watch.was_skipped == [batch in bad for batch in range(4)]
    assert_same(module.parameters(), replay(before, rows[[batch for batch in range(4) if batch not in bad]]))


@both
def test_one_loss_backwarded_directly_and_one_through_the_module_add_up(precision):
    class Mixes(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for direct in (True, False) if batch_idx % 2 else (False, True):
                loss = self.loss(batch)
                loss.backward() if direct else self.manual_backward(loss)
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Mixes(rows)
    before = values(module)
    fit(module, plugin_of(precision, 64))
    assert_same(module.parameters(), replay(before, 2 * rows))


@pytest.mark.parametrize("norm_too", [True, False])
def test_16_master_without_autocast_trains_on_fp16_inputs(norm_too):
    class Halves(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(batch[0].to(self.layer[0].weight.dtype)).float(), batch[1])

    def make() -> Any:
        return Halves(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8) if norm_too else nn.Tanh(), nn.Linear(8, 1)))

    module = make()
    plugin = plugin_of("16-master", 1024, autocast=False, fp32_modules=())
    fit(module, plugin)
    assert plugin.applied_steps == 4
    assert_close_to_fp32(module, make)


@both
def test_casting_norms_too_trains(precision):
    module = M(net())
    plugin = plugin_of(precision, 1024, fp32_modules=())
    fit(module, plugin)
    assert plugin.applied_steps == 4
    assert_close_to_fp32(module, lambda: M(net()))


class Exotic(M):
    """Beside a linear layer there are float64, complex and empty parameters, and a scalar."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(SGD, lr=0.25))
        self.f64 = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.c64 = nn.Parameter(torch.tensor([1.0 + 2.0j, 0.5 - 1.0j]))
        self.empty = nn.Parameter(torch.zeros(4, 0))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        loss = loss + (self.f64**2).sum().float() * 0.5 + self.c64.abs().square().sum() * 0.5
        return loss + self.scalar * 0.25 + self.empty.sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...


@both
@pytest.mark.parametrize("accumulate", [1, 2])
def test_float64_complex_empty_and_scalar_parameters_train_as_in_fp32(precision, accumulate):
    module = Exotic()
    plugin = plugin_of(precision, dynamic(64.0, growth_interval=1))
    fit(module, plugin, accumulate_grad_batches=accumulate)
    assert plugin.applied_steps == 4 // accumulate
    expected = reference(Exotic, accumulate_grad_batches=accumulate)
    for name in ("f64", "c64", "empty", "scalar"):
        assert getattr(module, name).dtype == getattr(expected, name).dtype
        torch.testing.assert_close(getattr(module, name), getattr(expected, name), rtol=1e-6, atol=1e-6)


@both
def test_a_module_without_an_fp32_parameter_trains(precision):
    class Doubles(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(batch[0].double()), batch[1].double())

    def make() -> Any:
        return Doubles(nn.Linear(4, 1, dtype=torch.float64))

    module = make()
    plugin = plugin_of(precision, 1024)
    fit(module, plugin, gradient_clip_val=0.5)
    assert plugin.applied_steps == 4
    torch.testing.assert_close(values(module), values(reference(make, gradient_clip_val=0.5)))


@both
def test_channels_last_convolutions_train_as_in_fp32(precision):
    class Convolves(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            image = batch[0].reshape(-1, 2, 4, 4).to(memory_format=torch.channels_last)
            return nn.functional.mse_loss(self.layer(image).float().mean((1, 2, 3))[:, None], batch[1])

    def make() -> Any:
        return Convolves(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), rows=random_rows(8, 32))

    module = make()
    plugin = plugin_of(precision, 1024)
    fit(module, plugin, accumulate_grad_batches=2)
    assert plugin.applied_steps == 2
    assert module.layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert_close_to_fp32(module, make, accumulate_grad_batches=2)


@both
@pytest.mark.parametrize("channels", [4, 1024])  # on a CPU small gradients are unscaled together
def test_unscaled_gradients_are_laid_out_like_their_parameters(precision, channels, said):
    class Strides(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            image = batch[0].reshape(-1, 2, 4, 4).to(memory_format=torch.channels_last)
            return self.layer(image).float().mean()

        def on_after_backward(self) -> None:
            grad = self.layer.weight.grad
            self.strides = [*getattr(self, "strides", []), grad.stride() == self.layer.weight.stride()]

    conv = nn.Conv2d(2, channels, 3).to(memory_format=torch.channels_last)
    module = Strides(conv, rows=random_rows(8, 32))
    fit(module, plugin_of(precision, 64), accumulate_grad_batches=2)
    assert module.strides == [True] * 4
    assert "gradient layout contract" not in said


@both
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_after_backward", "on_before_zero_grad"])
def test_parameters_that_join_an_optimizer_later_are_unscaled(precision, hook):
    def joins(self: Any, *args: Any) -> None:
        if not self.joined and (hook == "on_train_start" or self.global_step == 2):
            self.joined = True
            self.optimizers().optimizer.add_param_group({"params": [self.late.weight], "lr": 1.0})

    class Late(Rows):
        joined = False

        def __init__(self, rows: Any) -> None:
            super().__init__(rows)
            self.late = nn.Linear(2, 1, bias=False)

        def loss(self, batch: list[Tensor]) -> Tensor:
            return self.layer(batch[0]).float().sum() + self.late(batch[0]).float().sum()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.zero_grad()

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

        def configure_optimizers(self) -> Any:
            return self.make_optimizer(self.layer.parameters())

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module: Any = type("Joins", (Late,), {hook: joins})(rows)
    before = values(module)
    plugin = plugin_of(precision, 64)
    fit(module, plugin, max_epochs=2)
    assert plugin.skipped_steps == 0
    assert_same([module.layer.weight], replay(before[:1], rows.repeat(2, 1)))
    assert_same([module.late.weight], replay(before[1:], rows.repeat(2 if hook == "on_train_start" else 1, 1)))


@both
def test_a_parameter_that_only_the_optimizer_knows_is_unscaled(precision):
    class Outside(Rows):
        def __init__(self, rows: Any) -> None:
            super().__init__(rows)
            self.hidden = [nn.Parameter(torch.zeros(1, 2))]

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) + (self.hidden[0] * batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return UNIT_SGD([*self.parameters(), *self.hidden])

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Outside(rows)
    fit(module, plugin_of(precision, 64))
    assert_same(module.hidden, replay([torch.zeros(1, 2)], rows))


@both
def test_tied_weights_get_the_sum_of_their_gradients_unscaled_once(precision):
    class Tied(Rows):
        def __init__(self, rows: Any) -> None:
            super().__init__(rows)
            self.twin = nn.Linear(2, 1, bias=False)
            self.twin.weight = self.layer.weight

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) + self.twin(batch[0]).float().sum()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Tied(rows)
    before = values(module)
    fit(module, plugin_of(precision, 64))
    assert_same(module.parameters(), replay(before, 2 * rows))


@both
def test_the_scale_may_be_set_between_backward_and_step(precision):
    class Sets(Rows):
        def on_after_backward(self) -> None:
            self.plugin.loss_scale = StaticLossScale(4.0 if self.global_step % 2 else 32.0)

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Sets(rows)
    before = values(module)
    watch = fit(module, plugin_of(precision, 8.0))
    assert watch.used == [8.0, 32.0, 4.0, 32.0]
    assert_same(module.parameters(), replay(before, rows))


@both
def test_a_backbone_that_is_unfrozen_late_trains_with_true_gradients(precision):
    class Finetunes(M):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 1))
            self.backbone = nn.Linear(4, 4)

        def loss(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(self.backbone(batch[0])).float(), batch[1])

        def configure_optimizers(self) -> Any:
            return PLAIN_SGD(self.layer.parameters())

    settings = {"max_epochs": 3}
    module = Finetunes()
    plugin = plugin_of(precision, 1024)
    fit(module, plugin, callbacks=[BackboneFinetuning(1)], **settings)
    assert plugin.applied_steps == 12
    assert_close_to_fp32(module, Finetunes, callbacks=[BackboneFinetuning(1)], **settings)


@both
def test_a_compiled_module_trains(precision):
    module = M(net())
    try:
        module.layer.compile(backend="eager")
        module.layer(torch.ones(1, 4))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    plugin = plugin_of(precision, 1024)
    fit(module, plugin)
    assert plugin.applied_steps == 4
    assert_close_to_fp32(module, lambda: M(net()))


@both
@pytest.mark.parametrize("scale", [2.0**-4, 0.3, 1000.0, 2.0**10])
def test_any_static_scale_gives_the_true_gradient(precision, scale):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Rows(rows)
    before = values(module)
    plugin = plugin_of(precision, scale)
    fit(module, plugin)
    assert plugin.applied_steps == 2
    is_power = math.frexp(scale)[0] == 0.5
    torch.testing.assert_close(values(module), replay(before, rows), rtol=0.0 if is_power else 2e-3, atol=0.0)


@both
def test_gradients_beyond_fp16_are_trained_on_at_a_scale_below_1(precision):
    class Large(Rows):
        factor = 2.0**6

    rows = torch.full((24, 2), 2.0**12)
    module = Large(rows, partial(SGD, lr=2.0**-22))
    nn.init.zeros_(module.layer.weight)
    plugin = plugin_of(precision, AdaptiveLossScale())
    fit(module, plugin)
    assert 2.0**-6 <= plugin.loss_scale.scale <= 2.0**-3  # it overflows at 2^-2
    assert plugin.applied_steps >= 16
    assert plugin.nonfinite_losses == 0
    assert_same(module.parameters(), [torch.full((1, 2), -(2.0**-4) * plugin.applied_steps)])


@both
def test_a_module_without_an_optimizer_runs(precision):
    class NoOptimizer(Rows):
        def configure_optimizers(self) -> None:
            return None

    module = NoOptimizer(torch.ones(3, 2))
    before = values(module)
    plugin = plugin_of(precision, 64)
    fit(module, plugin)
    assert_same(module.parameters(), before)
    assert (plugin.applied_steps, plugin.skipped_steps) == (0, 0)


@both
def test_an_override_of_optimizer_step_that_steps_on_every_second_batch(precision):
    class Rarely(Rows):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            if batch_idx % 2:
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
            else:
                closure()

    rows = torch.tensor([[BIG, 0.5], [0.125, -4.0], [1.0, 1.0], [BIG, 1.0], [1.0, 1.0], [0.5, 1.0]])
    module = Rarely(rows, partial(SGD, lr=1.0))
    before = values(module)
    plugin = plugin_of(precision, 128)
    watch = fit(module, plugin)
    # the gradient of the batch before is cleared, so nothing of it may be counted
    assert watch.skipped == [0, 0, 0, 1, 1, 1]
    assert plugin.applied_steps == 2
    assert bool(torch.isfinite(module.layer.weight).all())
    assert not same_bits(module.layer.weight.detach(), before[0])


@both
def test_a_gradient_that_is_cleared_before_the_step_does_not_drop_it(precision):
    class Discards(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for row in (torch.tensor([[BIG, 1.0]]), batch[0]):
                optimizer.zero_grad(set_to_none=bool(batch_idx % 2))
                self.manual_backward(self.loss([row]))
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Discards(rows)
    before = values(module)
    plugin = plugin_of(precision, 128)
    fit(module, plugin)
    assert plugin.skipped_steps == 0
    assert_same(module.parameters(), replay(before, rows))


@both
@pytest.mark.parametrize("value", ["none", "dynamic", "adaptive", 4, 2.0])
def test_the_scaler_may_be_set_by_name_or_number_before_and_during_a_fit(precision, value):
    class Sets(Rows):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.plugin.loss_scale = value

    rows = torch.tensor([[1.0, 0.5], [0.125, -1.0], [-1.0, 0.25], [0.25, 1.0]])
    module = Sets(rows)
    before = values(module)
    plugin = plugin_of(precision)
    plugin.loss_scale = 8
    watch = fit(module, plugin)
    expected = {"none": 1.0, "dynamic": 2.0**15, "adaptive": 2.0**15}.get(value, value)
    assert watch.used[:3] == [8.0, 8.0, expected]
    assert_same(module.parameters(), replay(before, rows))


@both
def test_the_learning_rate_finder_works_and_leaves_the_weights_as_they_were(precision, tmp_path, monkeypatch):
    class Finds(M):
        lr = 0.1

        def __init__(self) -> None:
            super().__init__(net(), rows=random_rows(64))

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=self.lr)

    monkeypatch.chdir(tmp_path)
    module = Finds()
    before = values(module)
    plugin = plugin_of(precision, 64)
    trainer = quiet_trainer(plugin, limit_val_batches=0, default_root_dir=tmp_path, enable_checkpointing=True)
    found = Tuner(trainer).lr_find(module, num_training=20, update_attr=False, early_stop_threshold=None)
    assert len(found.results["lr"]) == 20
    assert_same(module.parameters(), before)
    trainer.fit(module)
    assert plugin.applied_steps == 32


@both
def test_the_accumulation_may_change_from_epoch_to_epoch(precision):
    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0], [-1.0, 2.0], [0.25, 1.0]])
    module = Rows(rows)
    before = values(module)
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    fit(module, plugin_of(precision, dynamic(4.0, growth_interval=1)), callbacks=[schedule], max_epochs=2)
    assert_same(module.parameters(), replay(before, torch.cat([rows, (rows[0::2] + rows[1::2]) / 2])))


@both
@pytest.mark.parametrize("width", [3, 16_383, 16_384, 70_001])
@pytest.mark.parametrize("where", [0, -1])
def test_gradients_of_any_size_are_unscaled_exactly_and_checked_to_the_last_element(precision, width, where):
    rows = torch.randint(-8, 9, (3, width), generator=torch.Generator().manual_seed(0)) * 2.0**-6
    rows[1, where] = BIG
    module = Rows(rows)
    before = values(module)
    plugin = plugin_of(precision, 128)
    watch = fit(module, plugin)
    assert watch.was_skipped == [False, True, False]
    assert plugin.nonfinite_losses == 0
    assert_same(module.parameters(), replay(before, rows[[0, 2]]))


@both
@pytest.mark.parametrize("scale", [2.0**100, 2.0**126, 2.0**127])
def test_the_largest_scales_give_true_gradients(precision, scale):
    module = Rows([[1.0, 0.5], [0.25, -4.0]], partial(SGD, lr=2.0**100))
    module.factor = 2.0**-116
    nn.init.zeros_(module.layer.weight)
    plugin = plugin_of(precision, scale)
    fit(module, plugin)
    assert plugin.applied_steps == 2
    assert_same(module.parameters(), [torch.tensor([[-1.25, 3.5]]) * 2.0**-16])


@both
def test_gradients_of_zero_step_and_say_nothing_about_the_scale(precision):
    module = Rows(torch.zeros(4, 2))
    before = values(module)
    plugin = plugin_of(precision, AdaptiveLossScale(init_scale=64.0))
    fit(module, plugin)
    assert (plugin.applied_steps, plugin.skipped_steps) == (4, 0)
    assert plugin.loss_scale == AdaptiveLossScale(init_scale=64.0)
    assert plugin.headroom_bits is None
    assert_same(module.parameters(), before)


@both
def test_hooks_of_the_optimizer_run_for_applied_steps_only(precision):
    class Counts(Rows):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            self.calls: list[str] = []
            optimizer.register_step_pre_hook(lambda *_: self.calls.append("pre"))
            optimizer.register_step_post_hook(lambda *_: self.calls.append("post"))
            return optimizer

    module = Counts(BAD_ROWS)
    fit(module, plugin_of(precision, 128))
    assert module.calls == ["pre", "post"] * 3


@both
def test_a_step_of_a_manual_closure_returns_its_loss_when_it_is_skipped_too(precision):
    class Returns(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss.detach()

            returned = optimizer.step(closure=closure)
            self.returned = [*getattr(self, "returned", []), returned]

    module = Returns(BAD_ROWS)
    fit(module, plugin_of(precision, 128))
    assert all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in module.returned)


class Wraps(Optimizer):
    """Keeps another optimizer and hands everything on."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrapped_lbfgs(params: Any) -> Optimizer:
    return Wraps(LBFGS(params))


@both
def test_a_wrapper_around_an_optimizer_that_needs_a_closure_is_refused_by_name(precision):
    module = Rows(torch.ones(2, 2), wrapped_lbfgs)
    before = values(module)
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(module, plugin_of(precision, 64))
    assert_same(module.parameters(), before)


@both
def test_two_optimizers_with_a_shared_parameter_step_on_its_true_gradient(precision):
    class Shares(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            optimizers[0].zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in optimizers:
                optimizer.step()

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

        def configure_optimizers(self) -> Any:
            return [SGD(self.parameters(), lr=1.0), SGD(self.parameters(), lr=0.5)]

    rows = torch.tensor([[1.0, 0.5], [BIG, 1.0], [0.125, -4.0]])
    module = Shares(rows)
    before = values(module)
    plugin = plugin_of(precision, dynamic(128.0))
    watch = fit(module, plugin)
    assert watch.scales == [128.0, 64.0, 64.0]
    assert (plugin.applied_steps, plugin.skipped_steps) == (4, 2)
    expected = before[0]
    for row in rows[[0, 2]]:
        expected = expected - row - 0.5 * row
    torch.testing.assert_close(module.layer.weight.detach(), expected, rtol=1e-6, atol=1e-6)


@both
def test_the_loss_that_is_logged_or_returned_in_a_dict_is_unscaled(precision):
    class Logs(Rows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return {"loss": loss, "extra": loss.detach()}

    module = Logs(torch.ones(3, 2), partial(SGD, lr=0.0))
    nn.init.constant_(module.layer.weight, 0.5)
    watch = fit(module, plugin_of(precision, 1024))
    assert [loss.item() for loss in watch.losses] == [1.0, 1.0, 1.0]
    assert module.trainer.callback_metrics["loss"].item() == 1.0


class Quadratic(M):
    """Its loss is 0.5 * (w x)^2, so the gradient is w x^2, and the second derivative x^2."""

    def __init__(self, script: Callable[[Any, Tensor], None]) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), PLAIN_SGD, (torch.full((3, 1), 0.5), torch.zeros(3, 1)), batch=1)
        nn.init.constant_(self.layer.weight, 2.0)
        self.automatic_optimization = False
        self.script = script

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.script(self, 0.5 * self.layer(batch[0]).float().square().sum())
        optimizer.step()


@both
def test_a_backward_that_keeps_its_graph_gives_true_second_derivatives(precision):
    def hessian(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss, create_graph=True)
        weight = module.layer.weight
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        module.seconds = [*getattr(module, "seconds", []), second.item()]

    module = Quadratic(hessian)
    plugin = plugin_of(precision, 64)
    fit(module, plugin)
    assert module.seconds == pytest.approx([0.25] * 3, rel=2**-9)
    expected = reference(lambda: Quadratic(hessian))
    assert module.layer.weight.item() == pytest.approx(expected.layer.weight.item(), rel=2**-9)


@both
def test_a_penalty_on_the_gradient_of_a_first_backward_is_as_in_fp32(precision):
    def penalty(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss, create_graph=True)
        module.manual_backward(module.layer.weight.grad.float().square().sum())

    module = Quadratic(penalty)
    plugin = plugin_of(precision, 64)
    fit(module, plugin)
    expected = reference(lambda: Quadratic(penalty))
    assert plugin.applied_steps == 3
    assert module.layer.weight.item() == pytest.approx(expected.layer.weight.item(), rel=2**-9)


class OverridesBackward(Rows):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class OverridesOptimizerStep(Rows):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class RunsTheClosureItself(Rows):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class ClearsInAHook(Rows):
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        drop(self)


class BackwardIntoGivenInputs(ManualRows):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), inputs=[self.layer.weight])
        optimizer.step()


class TogglesTheModel(ManualRows):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with self.optimizers().toggle_model(sync_grad=False):
            super().training_step(batch, batch_idx)


@both
@pytest.mark.parametrize(
    "cls",
    [
        OverridesBackward,
        OverridesOptimizerStep,
        RunsTheClosureItself,
        ClearsInAHook,
        BackwardIntoGivenInputs,
        TogglesTheModel,
    ],
)
def test_a_module_that_writes_its_own_loop_skips_and_steps_as_others(precision, cls):
    module = cls(BAD_ROWS)
    before = values(module)
    plugin = plugin_of(precision, 128)
    watch = fit(module, plugin)
    assert tuple(watch.applied) == APPLIED
    assert_same(module.parameters(), replay(before, BAD_ROWS[[1, 3, 4]]))


@both
def test_validation_between_steps_and_after_the_fit_changes_neither_scale_nor_counts(precision):
    plugin = plugin_of(precision, dynamic(128.0, growth_interval=2))
    module = Rows(torch.ones(5, 2))
    before = values(module)
    quiet_trainer(plugin, val_check_interval=1, num_sanity_val_steps=2).fit(module)
    after_fit = plugin.loss_scale
    assert (after_fit.scale, plugin.applied_steps) == (512.0, 5)
    assert_same(module.parameters(), replay(before, torch.ones(5, 2)))
    quiet_trainer(plugin).validate(module, verbose=False)
    assert plugin.loss_scale == after_fit
    assert plugin.applied_steps == 5


# --- what a newcomer meets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16-mixed", "16-master", "bf16-master"])
def test_a_step_of_the_bare_torch_optimizer_is_refused_with_the_remedy(precision):
    class Bare(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]

    module = Bare(torch.ones(2, 2))
    before = values(module)
    with pytest.raises(MisconfigurationException, match=r"bare torch optimizer.*self\.optimizers\(\)"):
        fit(module, MasterWeightPrecision(precision))
    assert_same(module.parameters(), before)


def test_a_step_of_the_bare_torch_optimizer_is_nobodys_business_without_masters_and_checks():
    class Bare(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]

    fit(Bare(torch.ones(2, 2)), MasterWeightPrecision("32-true"))


@both
def test_a_backward_that_passes_the_plugin_by_is_reported_once(precision, said):
    class Direct(ManualRows):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()

    rows = torch.tensor([[1.0, 0.5], [0.125, -4.0]])
    module = Direct(rows)
    before = values(module)
    fit(module, plugin_of(precision, 64))
    assert said.count("self.manual_backward(loss), not loss.backward()") == 1
    assert_same(module.parameters(), replay(before, rows))


@both
def test_the_error_tells_nan_gradients_from_infinite_ones_and_what_fits_the_scaler(precision):
    def error(factor: float, **settings: Any) -> str:
        module = Rows(torch.ones(9, 2))
        module.layer.weight.register_hook(lambda grad: grad * factor)
        with pytest.raises(FloatingPointError) as caught:
            fit(module, MasterWeightPrecision(precision, max_consecutive_skips=3, **settings))
        return str(caught.value)

    assert "no scale cures" in error(math.nan)
    assert "square root" in error(math.nan)
    infinite = error(math.inf)
    assert "no scale cures" not in infinite
    assert "min_scale" in infinite
    static = error(math.inf, loss_scale=4.0)
    assert "min_scale" not in static
    assert "'adaptive'" in static
    assert "loss scale is" not in error(math.inf, loss_scale="none")


@both
def test_the_error_for_a_loss_that_is_not_finite_names_fp16_as_a_cause(precision):
    class Beyond(Rows):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) * math.inf

    with pytest.raises(FloatingPointError, match=r"loss itself was not finite.*65504.*fp32_modules.*NaN in the data"):
        fit(Beyond(torch.ones(9, 2)), MasterWeightPrecision(precision, max_consecutive_skips=3))


def test_a_name_that_is_nearly_right_is_guessed_and_another_type_is_refused():
    for name, meant in (("16-masters", "16-master"), ("16_master", "16-master"), ("BF16-Mixed", "bf16-mixed")):
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            MasterWeightPrecision(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"precision_plugin=16.*'16-master'"):
        Trainer(precision_plugin=16, **QUIET)  # type: ignore[arg-type]


def test_scaler_settings_that_a_checkpoint_replaces_are_said(tmp_path, said):
    plugin = plugin_of("16-master", DynamicLossScale(growth_interval=7))
    module = Rows(torch.ones(2, 2))
    fit(module, plugin)
    path = tmp_path / "last.ckpt"
    module.trainer.save_checkpoint(path)
    again = plugin_of("16-master", DynamicLossScale(growth_interval=5))
    trainer = Trainer(precision_plugin=again, **{**QUIET, "max_epochs": 2})
    trainer.fit(Rows(torch.ones(2, 2)), ckpt_path=path)
    assert "growth_interval': 7|growth_interval': 5|precision_plugin.loss_scale" in said
    assert again.loss_scale.growth_interval == 7


@pytest.mark.parametrize("precision", ["bf16-master", "32-true", "16-mixed"])
def test_counts_go_on_after_a_resume_under_every_precision(precision, tmp_path):
    module = Rows(torch.ones(3, 2))
    fit(module, MasterWeightPrecision(precision))
    path = tmp_path / "last.ckpt"
    module.trainer.save_checkpoint(path)
    plugin = MasterWeightPrecision(precision)
    Trainer(precision_plugin=plugin, **{**QUIET, "max_epochs": 2}).fit(Rows(torch.ones(3, 2)), ckpt_path=path)
    assert plugin.applied_steps == 6
