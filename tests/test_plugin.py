"""What the plugin promises to a run: laws 1, 2, 4, 5, 7 and 9, its features, and what it says to bad input."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

import lightning_mp
from lightning_mp import AdaptiveLossScale, MasterWeightPrecision, Trainer
from lightning_mp.cost.devices import check_bf16
from lightning_mp.numerics.split import split
from lightning_mp.strategies import check_strategy
from tests.modules import QUIET, M, Manual, assert_replays, assert_same, bf16_master, quiet_trainer, random_rows, values
from tests.reference import fp32_run, same_bits

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:.*You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
both_storages = pytest.mark.parametrize("storage", ["split", "copy"])
BF16, FP32 = torch.bfloat16, torch.float32
SLOW_SGD, DECAYING = partial(SGD, lr=0.05), partial(AdamW, lr=0.01, weight_decay=0.1)

# relative to the quantity compared
TOLERANCES = {
    "a gradient rounded to bf16 once": 2**-8,  # clipping writes its result to a bf16 gradient, to within half an ulp
    "an edit in forward": 2**-8,  # what the documentation promises for an edit between forward and the step: half an ulp
    "an fp32 sum": 1e-6,  # fp32 arithmetic in another order
}


# --- law 1: outside step() the optimizer is an ordinary one over the module's parameters ------------------------------


def assert_ordinary(module: nn.Module, optimizers: list[Optimizer], dtype: torch.dtype | None = None) -> None:
    own = {id(param) for param in module.parameters()}
    for optimizer in optimizers:
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert held
        assert {id(param) for param in held} <= own
        assert {id(param) for param in optimizer.state} <= own
        assert dtype is None or {param.dtype for param in held} == {dtype}


class LooksEverywhere(Callback):
    """Looks at the optimizers in every hook that there is."""

    def __init__(self) -> None:
        self.hooks: set[str] = set()


def _look(hook: str) -> Callable[..., None]:
    def look(self: LooksEverywhere, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.optimizers:
            self.hooks.add(hook)
            # in the last two the run is over, and the module fp32 again
            assert_ordinary(pl_module, trainer.optimizers, FP32 if hook in ("on_fit_end", "teardown") else BF16)

    return look


for _hook in [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]:
    setattr(LooksEverywhere, _hook, _look(_hook))


class LooksInItsHooks(M):
    looks = 0

    def look(self) -> None:
        self.looks += 1
        assert_ordinary(self, self.trainer.optimizers, BF16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.look()
        return self.loss(batch)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.look()
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        self.look()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.look()
        scheduler.step()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.look()
        super().optimizer_step(*args, **kwargs)
        self.look()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@both_storages
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.1)], ids=["SGD", "AdamW"])
def test_groups_and_state_hold_the_modules_parameters_in_every_hook(storage, optimizer, tmp_path):
    looks = LooksEverywhere()
    module = LooksInItsHooks(optimizer=optimizer)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trainer = quiet_trainer(bf16_master(storage), callbacks=[looks, saver], enable_checkpointing=True)
    trainer.fit(module)
    assert module.looks >= 4 * 6
    assert {
        "on_fit_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_batch_end",
        "on_save_checkpoint",
        "on_train_end",
        "on_fit_end",
        "teardown",
    } <= looks.hooks
    assert_ordinary(module, trainer.optimizers, FP32)
    assert len(trainer.optimizers[0].state) == 2


def test_the_look_at_the_optimizers_notices_a_stranger():
    module = M()
    optimizer = SGD([*module.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(AssertionError):
        assert_ordinary(module, [optimizer])


def test_an_lr_schedule_and_its_monitor_work_as_in_fp32(plugin):
    class Scheduled(M):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            self.lrs = [*getattr(self, "lrs", []), optimizer.param_groups[0]["lr"]]

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters())
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = Scheduled(optimizer=partial(SGD, lr=0.1, momentum=0.9))
    before = values(module)
    quiet_trainer(plugin, max_epochs=2).fit(module)
    params = [nn.Parameter(value) for value in before]
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
    lrs = []
    for gradients in module.gradients:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.float()
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert module.lrs == lrs
    assert_same(module.parameters(), params)


def test_the_learning_rate_finder_sets_a_rate_and_leaves_the_masters_as_they_were(plugin, tmp_path):
    class Tunable(M):
        lr = 0.1

        def on_train_start(self) -> None:
            self.gradients.clear()
            self.first = self.plugin.masters()
            self.state_at_start = len(self.trainer.optimizers[0].state)

        def configure_optimizers(self) -> Optimizer:
            return Adam(self.parameters(), lr=self.lr)

    module = Tunable(rows=random_rows(64))
    before = values(module)
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=20, early_stop_threshold=None)
    quiet_trainer(plugin, callbacks=[finder], default_root_dir=tmp_path).fit(module)
    assert finder.optimal_lr is not None
    assert module.lr != 0.1
    assert_same(module.first.values(), before)
    assert module.state_at_start == 0
    assert_replays(module, before, partial(Adam, lr=module.lr))


def test_the_batch_size_finder_leaves_the_masters_as_they_were(plugin, tmp_path):
    class Tunable(M):
        def on_train_start(self) -> None:
            self.gradients.clear()
            self.first = self.plugin.masters()

    module = Tunable(optimizer=partial(Adam, lr=0.1))
    before = values(module)
    finder = BatchSizeFinder(steps_per_trial=2, init_val=2, max_trials=2, batch_arg_name="batch")
    quiet_trainer(plugin, callbacks=[finder], default_root_dir=tmp_path).fit(module)
    assert module.batch > 2
    assert_same(module.first.values(), before)
    assert_replays(module, before)


def test_an_optimizer_over_named_parameters_keeps_its_names(plugin):
    class Named(M):
        def configure_optimizers(self) -> Optimizer:
            return SGD(self.named_parameters(), lr=0.1)

    module = Named()
    before = values(module)
    trainer = quiet_trainer(plugin)
    trainer.fit(module)
    assert trainer.optimizers[0].param_groups[0]["param_names"] == ["layer.weight", "layer.bias"]
    assert_replays(module, before)


def test_a_group_that_is_added_in_mid_run_is_stepped_on_masters(plugin):
    class AddsGroup(M):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.steps_before = len(self.gradients)
                self.optimizers().add_param_group({"params": [self.layer.bias], "lr": 0.01})
                assert_ordinary(self, self.trainer.optimizers)

        def configure_optimizers(self) -> Optimizer:
            return SGD([self.layer.weight], lr=0.1)

    module = AddsGroup()
    before = values(module)
    quiet_trainer(plugin, max_epochs=2).fit(module)
    weight = fp32_run(before[:1], [gradients[:1] for gradients in module.gradients], partial(SGD, lr=0.1))
    late = module.gradients[module.steps_before :]
    bias = fp32_run(before[1:], [gradients[1:] for gradients in late], partial(SGD, lr=0.01))
    # under SGD over the weight alone nobody cleared the bias's gradient, so its first one is a sum over the first epoch
    assert_same(module.parameters(), [*weight, *bias])


def test_a_parameter_that_is_made_in_mid_run_trains_as_the_fp32_parameter_that_it_is(plugin):
    class Grows(M):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.extra = nn.Linear(4, 1)
                self.extra_before = values(self.extra)
                self.optimizers().add_param_group({"params": self.extra.parameters()})

        def loss(self, batch: list[Tensor]) -> Tensor:
            extra = self.extra(batch[0]) if hasattr(self, "extra") else 0.0
            return nn.functional.mse_loss((self.layer(batch[0]) + extra).float(), batch[1])

    module = Grows()
    quiet_trainer(plugin, max_epochs=2).fit(module)
    assert {param.dtype for param in module.parameters()} == {FP32}
    late = [gradients[2:] for gradients in module.gradients if len(gradients) == 4]
    assert len(late) == 4
    assert_same(module.extra.parameters(), fp32_run(module.extra_before, late, partial(SGD, lr=0.1)))


def test_gradient_norms_are_logged_as_in_fp32(plugin):
    class LogsNorms(M):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            self.norms = grad_norm(self, 2)
            self.log_dict(self.norms)

    module = LogsNorms()
    trainer = quiet_trainer(plugin)
    trainer.fit(module)
    weight, bias = (gradient.float() for gradient in module.gradients[-1])
    expected = {
        "grad_2.0_norm/layer.weight": weight.norm(),
        "grad_2.0_norm/layer.bias": bias.norm(),
        "grad_2.0_norm_total": torch.cat([weight.flatten(), bias]).norm(),
    }
    for name, value in expected.items():
        assert trainer.callback_metrics[name].item() == pytest.approx(value.item(), rel=2**-8)


# --- law 2: masters are exact -----------------------------------------------------------------------------------------


class Deep(M):
    def __init__(self, optimizer: Any = DECAYING, **kwargs: Any) -> None:
        net = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        super().__init__(net, optimizer, **kwargs)


@both_storages
@pytest.mark.parametrize("bucket_mib", [4.0, 0.0])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        partial(AdamW, lr=0.01, weight_decay=0.1),
        partial(Adagrad, lr=0.1, initial_accumulator_value=0.3),
    ],
    ids=["SGD", "AdamW", "Adagrad"],
)
def test_a_fit_gives_the_masters_of_an_fp32_run_on_the_same_gradients_bit_for_bit(storage, bucket_mib, accumulate, optimizer):
    module = Deep(optimizer)
    before = values(module)
    plugin = bf16_master(storage, bucket_mib=bucket_mib)
    quiet_trainer(plugin, max_epochs=10, accumulate_grad_batches=accumulate).fit(module)
    assert_replays(module, before)


def test_the_replay_notices_a_single_rounded_master(plugin):
    class Rounds(M):
        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.gradients) == 2:
                self.plugin.set_masters({"layer.weight": self.master().bfloat16()})

    module = Rounds()
    before = values(module)
    quiet_trainer(plugin).fit(module)
    with pytest.raises(AssertionError):
        assert_replays(module, before)


class Tied(M):
    """The decoder's weight is the encoder's; so is the weight of a third layer, in a module that is registered twice."""

    def __init__(self, optimizer: Any = SLOW_SGD) -> None:
        super().__init__(nn.Identity(), optimizer)
        self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.twice = self.encoder
        self.head = nn.Linear(4, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.decoder(self.encoder(batch[0]))).float(), batch[1])


def test_tied_weights_have_one_master_and_stay_tied(plugin):
    class Looks(Tied):
        def on_train_end(self) -> None:
            self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.plugin.master_tensors())
            self.names = [*self.plugin.masters()]
            self.saved = self.state_dict()

    module = Looks()
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert module.decoder.weight is module.encoder.weight is module.twice.weight
    assert_replays(module, before)
    assert module.bytes == (2 if plugin.master == "split" else 4) * (16 + 5)
    assert module.names == ["encoder.weight", "head.weight", "head.bias"]
    aliases = ["encoder.weight", "decoder.weight", "twice.weight"]
    assert_same([module.saved[name] for name in aliases], [module.encoder.weight] * 3)
    assert len({module.saved[name].data_ptr() for name in aliases}) == 1


def test_two_parameters_that_share_memory_stay_together_or_are_reported(plugin, said):
    class Shares(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.decoder.weight = nn.Parameter(self.encoder.weight.data)  # in fp32 what one learns the other knows

    module = Shares()
    quiet_trainer(plugin).fit(module)
    assert torch.equal(module.encoder.weight, module.decoder.weight) or "encoder.weight|decoder.weight|memory" in said


def test_a_parameter_in_two_optimizers_has_one_master(plugin):
    class TwoOptimizers(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> list[Optimizer]:
            return [SGD(self.parameters(), lr=0.1, momentum=0.9), Adam([self.layer.weight], lr=0.01)]

        def on_train_end(self) -> None:
            self.count = len(self.plugin.master_tensors())

    module = TwoOptimizers()
    params = [nn.Parameter(value) for value in values(module)]
    quiet_trainer(plugin).fit(module)
    optimizers = [SGD(params, lr=0.1, momentum=0.9), Adam(params[:1], lr=0.01)]
    for step, gradients in enumerate(module.gradients):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.float()
        optimizers[step % 2].step()
    assert_same(module.parameters(), params)
    assert module.count == 2


def test_a_parameter_that_is_unfrozen_late_starts_from_its_fp32_value(plugin):
    class Unfreezes(M):
        def __init__(self) -> None:
            super().__init__(optimizer=partial(AdamW, lr=0.1, weight_decay=0.5))
            self.layer.weight.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                assert_same([self.master()], [self.start])
                self.layer.weight.requires_grad_(True)

    module = Unfreezes()
    before = values(module)
    module.start = before[0]
    quiet_trainer(plugin, max_epochs=4).fit(module)
    assert module.gradients[0][0] is None
    assert module.gradients[-1][0] is not None
    assert_replays(module, before)


# --- law 4: gradients that a user sees are true, and changes of them take effect --------------------------------------


def _double(module: M) -> None:
    for param in module.parameters():
        param.grad.mul_(2)


def _replace(module: M) -> None:
    for param in module.parameters():
        param.grad = torch.full_like(param, 0.25)


def _drop_one(module: M) -> None:
    module.layer.weight.grad = None


def _zero_one(module: M) -> None:
    module.layer.bias.grad.zero_()


def _through_data(module: M) -> None:
    module.layer.weight.grad.data.sign_()


CHANGES = [_double, _replace, _drop_one, _zero_one, _through_data]


@both_storages
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_what_a_user_does_to_gradients_before_the_step_takes_effect(storage, accumulate, change):
    class Changes(M):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            change(self)
            super().on_before_optimizer_step(optimizer)

    module = Changes(optimizer=partial(AdamW, lr=0.1))
    before = values(module)
    quiet_trainer(bf16_master(storage), max_epochs=2, accumulate_grad_batches=accumulate).fit(module)
    assert_replays(module, before)
    if change is _drop_one:
        assert_same([module.layer.weight], before[:1])
    if change is _replace:
        assert {gradient.unique().item() for gradients in module.gradients for gradient in gradients} == {0.25}


def test_hooks_that_users_put_on_parameters_before_the_fit_take_effect(plugin):
    module = M()
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    seen: list[torch.dtype] = []
    module.layer.weight.register_hook(lambda grad: grad * mask.to(grad.dtype))
    module.layer.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.dtype))
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, before)
    assert_same([module.layer.weight[0, 1::2]], [before[0][0, 1::2]])
    assert seen == [BF16] * 4
    nn.functional.mse_loss(module.layer(module.rows[0]), module.rows[1]).backward()
    assert seen == [BF16] * 4 + [FP32]


def test_a_gradient_penalty_trains_on_masters(plugin):
    class Penalty(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            inputs = batch[0].clone().requires_grad_()
            out = torch.tanh(self.layer(inputs)).float().sum()
            (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((slope.float().norm() - 1.0).square())
            optimizer.step()

    module = Penalty()
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, before)


def test_gradients_in_on_before_optimizer_step_are_those_of_the_fp32_run(plugin):
    rows = torch.tensor([[0.5, -1.0, 2.0, 0.25]] * 4), torch.tensor([[1.0]] * 4)
    fp32 = M(optimizer=partial(SGD, lr=0.0), rows=rows)
    nn.init.constant_(fp32.layer.weight, 0.5)  # all of forward and backward is exact in bf16
    nn.init.constant_(fp32.layer.bias, 0.25)
    module = copy.deepcopy(fp32)
    quiet_trainer("32-true", accumulate_grad_batches=2).fit(fp32)
    quiet_trainer(plugin, accumulate_grad_batches=2).fit(module)
    for gradients, expected in zip(module.gradients, fp32.gradients, strict=True):
        assert_same([gradient.float() for gradient in gradients], expected)
        assert all(gradient.ne(0).any() for gradient in gradients)


def clipped_run(module: M, before: list[Tensor], clip: Callable[[list[nn.Parameter]], Any]) -> list[nn.Parameter]:
    """An fp32 run of SGD on the gradients that ``module`` saw before clipping, with clipping in fp32."""
    params = [nn.Parameter(value.clone()) for value in before]
    optimizer = module.make_optimizer(params)
    for gradients in module.gradients:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.float()
        clip(params)
        optimizer.step()
    return params


CLIPPING = {"norm": partial(clip_grad_norm_, max_norm=0.1), "value": partial(clip_grad_value_, clip_value=0.1)}


@both_storages
@pytest.mark.parametrize("algorithm", CLIPPING)
def test_accumulated_gradients_are_clipped_as_in_fp32_bit_for_bit(storage, algorithm):
    module = Deep(partial(SGD, lr=0.1))
    before = values(module)
    settings = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    quiet_trainer(bf16_master(storage), max_epochs=3, **settings).fit(module)
    kept = {id(param) for child in module.modules() if isinstance(child, nn.LayerNorm) for param in child.parameters()}
    for param, gradient in zip(module.parameters(), module.gradients[0], strict=True):
        assert gradient.dtype == FP32 or id(param) in kept
    assert_same(module.parameters(), clipped_run(module, before, CLIPPING[algorithm]))


@both_storages
@pytest.mark.parametrize("algorithm", CLIPPING)
def test_gradients_are_clipped_as_in_fp32_to_within_one_rounding(storage, algorithm):
    module = Deep(partial(SGD, lr=0.1))
    before = values(module)
    quiet_trainer(bf16_master(storage), max_epochs=3, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm).fit(module)
    expected = clipped_run(module, before, CLIPPING[algorithm])
    moved = sum(0.1 * 0.1 for _ in module.gradients)  # lr times the largest clipped gradient
    assert not any(torch.equal(param, value) for param, value in zip(module.parameters(), before, strict=True))
    for param, value in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param, value, rtol=0, atol=moved * TOLERANCES["a gradient rounded to bf16 once"])


def test_the_norm_that_clips_is_computed_in_fp32(plugin):
    class Wide(M):
        """Gradients of 1: 257 in bf16 and one in fp32, which shows the factor. Their norm is 16.06, or 16.0 in bf16."""

        def __init__(self) -> None:
            net = nn.ModuleDict({"low": nn.Linear(257, 1, bias=False), "norm": nn.LayerNorm(1, bias=False)})
            super().__init__(net, partial(SGD, lr=1.0))

        def loss(self, batch: list[Tensor]) -> Tensor:
            return self.layer["low"].weight.float().sum() + self.layer["norm"].weight.sum()

    module = Wide()
    quiet_trainer(plugin, gradient_clip_val=8.0, max_steps=1, limit_val_batches=0).fit(module)
    factor = 1.0 - module.layer["norm"].weight.item()
    assert factor == pytest.approx(8.0 / math.sqrt(258.0), rel=TOLERANCES["an fp32 sum"])


def test_an_override_of_configure_gradient_clipping_clips_as_it_does_in_fp32(plugin):
    class Overrides(M):
        def configure_gradient_clipping(
            self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.seen = [param.grad.clone() for param in self.parameters()]
            assert_same(self.seen, self.gradients[-1])
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.layer.bias.grad.clamp_(min=0.0)

    def clip(params: list[nn.Parameter]) -> None:
        clip_grad_norm_(params, 0.5)
        params[1].grad.clamp_(min=0.0)

    module = Overrides()
    before = values(module)
    quiet_trainer(plugin, max_epochs=2, accumulate_grad_batches=2).fit(module)
    assert_same(module.parameters(), clipped_run(module, before, clip))


# --- law 5: edits to weights are kept ---------------------------------------------------------------------------------


def _load(module: M) -> list[Tensor]:
    new = {name: torch.randn(value.shape) for name, value in module.state_dict().items()}
    module.load_state_dict(new)
    return [*new.values()]


def _load_child(module: M) -> list[Tensor]:
    bias = module.master("layer.bias")
    new = torch.randn(1, 4)
    module.layer.load_state_dict({"weight": new}, strict=False)
    return [new, bias]


def _load_by_assignment(module: M) -> list[Tensor]:
    new = {name: torch.randn(value.shape) for name, value in module.state_dict().items()}
    held = [*module.parameters()]
    module.load_state_dict(new, assign=True)
    if not all(one is other for one, other in zip(held, module.parameters(), strict=True)):
        module.optimizers().param_groups[0]["params"] = [*module.parameters()]
    return [*new.values()]


def _load_float64(module: M) -> list[Tensor]:
    new = torch.randn(1, 4, dtype=torch.float64)
    bias = module.master("layer.bias")
    module.load_state_dict({"layer.weight": new, "layer.bias": bias})
    return [new.float(), bias]


def _reinit(module: M) -> list[Tensor]:
    module.layer.reset_parameters()
    return [param.detach().float() for param in module.parameters()]


def _fill(module: M) -> list[Tensor]:
    bias = module.master("layer.bias")
    with torch.no_grad():
        module.layer.weight.fill_(-2.3)
    return [module.layer.weight.detach().float(), bias]


def _one_element(module: M) -> list[Tensor]:
    weight, bias = module.plugin.masters().values()
    with torch.no_grad():
        module.layer.weight[0, 1] = -3.0
    weight[0, 1] = -3.0
    return [weight, bias]


def _prune_through_data(module: M) -> list[Tensor]:
    weight, bias = module.plugin.masters().values()
    module.layer.weight.data.mul_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    return [weight * torch.tensor([0.0, 1.0, 0.0, 0.0]), bias]


def _assign_data_bf16(module: M) -> list[Tensor]:
    bias = module.master("layer.bias")
    module.layer.weight.data = torch.full((1, 4), -2.3, dtype=BF16)
    return [torch.full((1, 4), -2.3, dtype=BF16).float(), bias]


def _assign_data_fp32(module: M) -> list[Tensor]:
    bias = module.master("layer.bias")
    module.layer.weight.data = torch.full((1, 4), -2.3)
    return [torch.full((1, 4), -2.3), bias]


EDITS = [
    _load,
    _load_child,
    _load_by_assignment,
    _load_float64,
    _reinit,
    _fill,
    _one_element,
    _prune_through_data,
    _assign_data_bf16,
    _assign_data_fp32,
]
BETWEEN_STEPS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
]


def edited(where: str, edit: Callable[[M], list[Tensor]]) -> M:
    """A module that edits itself once, in the hook ``where``; ``start`` is then what the next step has to start from."""

    def hook(self: Any, *args: Any) -> Any:
        if self.start is None:
            self.gradients.clear()
            self.start = [value.clone() for value in edit(self)]
            # signed zeros apart: 0 times a negative number is -0
            if edit is not _prune_through_data:
                assert_same(self.plugin.masters().values(), self.start)
        return getattr(super(cls, self), where)(*args)

    cls: Any = type("Edited", (M,), {where: hook, "start": None})
    return cls(optimizer=partial(SGD, lr=0.1))


@both_storages
@pytest.mark.parametrize("where", BETWEEN_STEPS)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__[1:])
def test_the_next_step_starts_from_the_edited_value_and_other_elements_keep_their_bits(storage, where, edit):
    module = edited(where, edit)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    assert module.start is not None
    assert_replays(module, module.start)


@both_storages
@pytest.mark.parametrize("edit", [_load, _load_child, _load_by_assignment, _load_float64], ids=lambda edit: edit.__name__[1:])
def test_a_state_dict_that_is_loaded_in_a_step_before_forward_is_taken_exactly(storage, edit):
    module = edited("training_step", edit)
    quiet_trainer(bf16_master(storage)).fit(module)
    assert_replays(module, module.start)


SIGNED = torch.tensor([[-1e-3, 1.005e-3, 0.3, -0.3]])
assert split(SIGNED)[1][0, :2].sign().tolist() == [1, -1]  # remainders of both signs stand beside what is going to be zero


class EditsBy(M):
    """Zeroes the first two elements of its weight and sets the third to 0.7, once, after the second step; lr is 0 after that.

    The gradient is never zero, so the weight after the run shows what the edit became.
    """

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        with torch.no_grad():
            self.layer.weight.copy_(SIGNED)
        self.through_data = through_data
        self.is_edited = False
        self.before: Tensor | None = None

    def edit(self, *_: Any, **__: Any) -> None:
        if self.is_edited or len(self.gradients) < 2:
            return
        self.is_edited = True
        self.before = self.master()
        assert split(self.before)[1][0, :2].sign().unique().tolist() == [-1, 1], "not both signs of a remainder"
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.0
        edit = torch.tensor([[0.0, 0.0, 0.7, 9.0]], dtype=self.layer.weight.dtype)
        mask = torch.tensor([[True, True, True, False]])
        if self.through_data:
            self.layer.weight.data[mask] = edit[mask]
        else:
            with torch.no_grad():
                self.layer.weight[mask] = edit[mask]

    def configure_optimizers(self) -> Optimizer:
        # steps too small to change the sign of a remainder
        return SGD(self.parameters(), lr=1e-7)


def check_edited(module: EditsBy, exactly: bool) -> None:
    assert module.is_edited
    weight = module.layer.weight.detach()
    assert weight.isfinite().all(), f"an edit became {weight}"
    # zero is zero, unless nothing can notice the edit; then it is zero to half an ulp of bf16
    assert weight[0, :2].abs().max() <= (0.0 if exactly or not module.through_data else 2.0**-134)
    assert_same([weight[0, 3:]], [module.before[0, 3:]])
    wanted = torch.tensor(0.7).bfloat16().item()
    assert weight[0, 2].item() == pytest.approx(wanted, rel=0 if exactly else TOLERANCES["an edit in forward"], abs=0)


through_what = pytest.mark.parametrize("through_data", [False, True], ids=["no_grad", "data"])


@both_storages
@through_what
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_an_edit_by_a_lambda_callback_is_kept_exactly(storage, through_data, hook):
    module = EditsBy(through_data)
    callback = LambdaCallback(**{hook: lambda trainer, pl_module, *_: pl_module.edit()})
    quiet_trainer(bf16_master(storage), max_epochs=2, callbacks=[callback]).fit(module)
    check_edited(module, exactly=True)


class MySGD(SGD):
    """An optimizer that is not known to update each parameter by itself."""


@both_storages
@through_what
@pytest.mark.parametrize("optimizer", [SGD, MySGD], ids=["known", "unknown"])
def test_an_edit_by_a_hook_of_the_optimizer_after_its_step_is_kept_exactly(storage, through_data, optimizer):
    class Projects(EditsBy):
        def configure_optimizers(self) -> Optimizer:
            made = optimizer(self.parameters(), lr=1e-7)
            made.register_step_post_hook(self.edit)
            return made

    module = Projects(through_data)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    check_edited(module, exactly=True)


@both_storages
@through_what
def test_an_edit_by_a_learning_rate_scheduler_is_kept_exactly(storage, through_data):
    class Schedules(EditsBy):
        def configure_optimizers(self) -> Any:
            module = self

            class Editing(torch.optim.lr_scheduler.ConstantLR):
                def step(self, epoch: Any = None) -> None:
                    super().step()
                    module.edit()

            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": Editing(optimizer, factor=1.0), "interval": "step"}]

    module = Schedules(through_data)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    check_edited(module, exactly=True)


@both_storages
@through_what
def test_an_edit_in_validation_step_is_kept_exactly(storage, through_data):
    class Validates(EditsBy):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.edit()

    module = Validates(through_data)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    check_edited(module, exactly=True)


@both_storages
@through_what
def test_an_edit_between_two_manual_steps_of_one_batch_is_kept_exactly(storage, through_data):
    class Critic(EditsBy):
        def __init__(self, through_data: bool) -> None:
            super().__init__(through_data)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for _ in range(3):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.edit()

    module = Critic(through_data)
    quiet_trainer(bf16_master(storage)).fit(module)
    check_edited(module, exactly=True)


IN_STEP = ["training_step", "forward_pre_hook", "on_before_zero_grad", "on_before_backward", "on_after_backward", "before_step"]


@both_storages
@through_what
@pytest.mark.parametrize("where", IN_STEP)
def test_an_edit_between_the_start_of_a_step_and_its_end_is_kept_to_bf16_precision(storage, through_data, where):
    class InStep(EditsBy):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if where == "training_step":
                self.edit()
            return self.loss(batch)

        def on_before_zero_grad(self, *_: Any) -> None:
            if where == "on_before_zero_grad":
                self.edit()

        def on_before_backward(self, *_: Any) -> None:
            if where == "on_before_backward":
                self.edit()

        def on_after_backward(self) -> None:
            if where == "on_after_backward":
                self.edit()

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            if where == "before_step":
                self.edit()

    module = InStep(through_data)
    if where == "forward_pre_hook":
        module.layer.register_forward_pre_hook(lambda layer, _: module.edit())
    if where == "on_before_backward" and not through_data:
        module.layer.forward = lambda x: nn.functional.linear(x, module.layer.weight.clone(), module.layer.bias)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    check_edited(module, exactly=storage == "copy")


@both_storages
@through_what
def test_elements_that_change_places_in_a_step_stay_finite(storage, through_data):
    first = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1e-3, 1.005e-3, 0.3, -0.3]])
    assert split(first)[1][0, 4:].sign().unique().tolist() == [-1, 1]

    class Rolls(M):
        """No sum over the weight's bits tells that this happened."""

        def on_after_backward(self) -> None:
            weight = self.layer.weight
            with torch.no_grad():
                (weight.data if through_data else weight).copy_(weight.detach().roll(4))

    module = Rolls(nn.Linear(8, 1), partial(SGD, lr=0.0), random_rows(8, 8))
    with torch.no_grad():
        module.layer.weight.copy_(first)
    quiet_trainer(bf16_master(storage), max_steps=3).fit(module)
    torch.testing.assert_close(module.layer.weight.detach(), first.roll(4), rtol=2**-8, atol=2.0**-134)


def test_an_edit_in_a_step_is_reported_once(said):
    class Drifts(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
            return self.loss(batch)

    quiet_trainer(bf16_master("split"), max_epochs=2).fit(Drifts())
    assert said.count("layer.weight|bf16 precision|copy") == 1


@both_storages
@through_what
def test_weights_that_are_pruned_before_a_test_run_are_zero_after_it(storage, through_data):
    class Prunes(M):
        def on_test_start(self) -> None:
            mask = torch.tensor([0.0, 0.0, 1.0, 1.0])
            if through_data:
                self.layer.weight.data.mul_(mask)
            else:
                with torch.no_grad():
                    self.layer.weight.mul_(mask)

    module = Prunes()
    with torch.no_grad():
        module.layer.weight.copy_(SIGNED)
    quiet_trainer(bf16_master(storage)).test(module, verbose=False)
    weight = module.layer.weight.detach()
    assert weight.isfinite().all()
    assert weight[0, :2].abs().max() <= (2.0**-134 if through_data else 0.0)
    assert_same([weight[0, 2:]], [SIGNED[0, 2:]])


@both_storages
@pytest.mark.parametrize("lottery", [True, False], ids=["lottery", "plain"])
def test_the_pruning_callback_works_as_in_fp32(storage, lottery, tmp_path):
    class Pruned(Deep):
        def on_train_epoch_start(self) -> None:
            saved = {name: value for name, value in self.state_dict().items() if not name.endswith("_mask")}
            self.dtypes = {value.dtype for value in saved.values()}
            if isinstance(self.trainer.precision_plugin, MasterWeightPrecision) and self.plugin.precision == "bf16-master":
                assert_same([saved[name] for name in self.plugin.masters()], self.plugin.masters().values())
                self.compared = self.current_epoch

    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=lottery, use_global_unstructured=False)

    module = Pruned(partial(SGD, lr=0.05))
    fp32 = copy.deepcopy(module)
    quiet_trainer("32-true", max_epochs=3, callbacks=[pruning()]).fit(fp32)
    saver = ModelCheckpoint(tmp_path)
    quiet_trainer(bf16_master(storage), max_epochs=3, callbacks=[pruning(), saver], enable_checkpointing=True).fit(module)
    assert module.compared == 2
    assert module.dtypes == {FP32}
    for (name, param), expected in zip(module.named_parameters(), fp32.parameters(), strict=True):
        assert param.dtype == FP32
        assert param.isfinite().all()
        if name.endswith("weight"):
            assert (param == 0).sum() == (expected == 0).sum()
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert_same([saved[name] for name, _ in module.named_parameters()], module.parameters())


class NotesValidation(M):
    """Notes masters around each validation."""

    def on_train_start(self) -> None:
        self.around: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.trail: list[list[Tensor]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.trail.append([*self.plugin.masters().values()])
        self.latest = self.plugin.masters()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.within = self.plugin.masters()

    def on_validation_end(self) -> None:
        self.around.append((self.latest, self.plugin.masters()))


@both_storages
@pytest.mark.parametrize("averaging", [WeightAveraging, partial(EMAWeightAveraging, decay=0.5)], ids=["mean", "ema"])
def test_masters_survive_validation_with_averaged_weights(storage, averaging):
    module = NotesValidation(optimizer=partial(SGD, lr=0.05))
    quiet_trainer(bf16_master(storage), max_epochs=3, callbacks=[averaging()]).fit(module)
    assert len(module.around) == 3
    for before, after in module.around:
        assert_same(after.values(), before.values())
    assert not torch.equal(module.within["layer.weight"], module.latest["layer.weight"])


@both_storages
def test_the_average_of_weight_averaging_survives_validation(storage):
    class Watches(EMAWeightAveraging):
        def on_validation_epoch_start(self, *args: Any) -> None:
            self.before = values(self._average_model.module)
            super().on_validation_epoch_start(*args)

        def on_validation_epoch_end(self, *args: Any) -> None:
            super().on_validation_epoch_end(*args)
            assert_same(self._average_model.module.parameters(), self.before)

    callback = Watches(decay=0.9)
    quiet_trainer(bf16_master(storage), max_epochs=3, callbacks=[callback]).fit(M())
    assert callback.before


@both_storages
@pytest.mark.parametrize("validate", [True, False], ids=["with-validation", "without"])
def test_weight_averaging_ends_with_the_average_of_the_masters(storage, validate):
    module = NotesValidation(optimizer=partial(SGD, lr=0.05))
    before = values(module)
    callback = EMAWeightAveraging(decay=0.9)
    settings = {"limit_val_batches": 1.0 if validate else 0}
    quiet_trainer(bf16_master(storage), max_epochs=3, callbacks=[callback], **settings).fit(module)
    average = module.trail[0]  # the callback's first update is a copy
    for masters in module.trail[1:]:
        average = [0.9 * one + 0.1 * other for one, other in zip(average, masters, strict=True)]
    assert len(module.trail) == 12
    for param, expected, start in zip(module.parameters(), average, before, strict=True):
        assert param.dtype == FP32
        assert not torch.equal(param, start)
        torch.testing.assert_close(param, expected, rtol=TOLERANCES["an fp32 sum"], atol=1e-6)


def test_stochastic_weight_averaging_ends_with_finite_averaged_weights(plugin):
    module = Deep(partial(SGD, lr=0.05))
    fp32 = copy.deepcopy(module)
    quiet_trainer("32-true", max_epochs=6, callbacks=[StochasticWeightAveraging(0.01, 0.5)]).fit(fp32)
    quiet_trainer(plugin, max_epochs=6, callbacks=[StochasticWeightAveraging(0.01, 0.5)]).fit(module)
    for param, expected in zip(module.parameters(), fp32.parameters(), strict=True):
        assert param.dtype == FP32
        torch.testing.assert_close(param, expected, rtol=0, atol=0.02)


# --- law 7: parameters are cast and nothing else ----------------------------------------------------------------------


class Dtypes(M):
    def on_train_start(self) -> None:
        self.dtypes = {name: param.dtype for name, param in self.named_parameters()}

    @property
    def in_fp32(self) -> set[str]:
        return {name for name, dtype in self.dtypes.items() if dtype == FP32}


class SumsSquares(Dtypes):
    """Trains every parameter with no layer's forward, as torch has no BatchNorm of mixed dtypes for a CPU."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return torch.stack([param.float().square().sum() for param in self.parameters()]).sum()


class PreNorm(nn.Module):
    """A wrapper that has the word in its name, which is not to keep what it wraps in fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def kept_net() -> nn.Sequential:
    return nn.Sequential(PreNorm(nn.Linear(4, 4)), MyRMSNorm(), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(4, 1))


PRENORM, BATCHNORM, GROUPNORM, INNER, HEAD = (
    {f"layer.{name}.weight", f"layer.{name}.bias"} for name in ("0.norm", "2", "3", "0.inner", "4")
)
NORMS = {"layer.1.gain"} | PRENORM | BATCHNORM | GROUPNORM
KEPT = {
    "default": (None, NORMS),
    "none": ((), set()),
    "class": ((nn.Linear,), INNER | HEAD),
    "base class": ((nn.modules.batchnorm._BatchNorm,), BATCHNORM),
    "norms and a class": (("norm", nn.Linear), NORMS | INNER | HEAD),
    "module name": (("layer.4",), HEAD),
    "a module with its children": (("layer.0",), INNER | PRENORM),
    "module pattern": (("layer.0.*",), INNER | PRENORM),
    "parameter name": (("layer.4.bias",), {"layer.4.bias"}),
    "parameter pattern": (("*.bias",), {f"layer.{i}.bias" for i in ("0.norm", "0.inner", "2", "3", "4")}),
    "class name": (("PreNorm",), INNER | PRENORM),
    "class pattern": (("My*Norm", "Group*"), {"layer.1.gain"} | GROUPNORM),
    "a list": (["norm", "layer.4.bias"], NORMS | {"layer.4.bias"}),
}


@pytest.mark.parametrize("name", KEPT, ids=lambda name: name.replace(" ", "-"))
def test_fp32_modules_keep_their_parameters_in_fp32(name, said):
    entries, expected = KEPT[name]
    plugin = MasterWeightPrecision("bf16-master", **({} if entries is None else {"fp32_modules": entries}))
    module = SumsSquares(kept_net())
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert module.in_fp32 == expected
    assert set(module.dtypes.values()) <= {FP32, BF16}
    assert_replays(module, before)
    assert "fp32_modules" not in said


def test_a_pattern_that_matches_nothing_is_reported_with_what_would(said):
    plugin = MasterWeightPrecision("bf16-master", fp32_modules=("norm", "lm_head", "layer", nn.Conv2d))
    quiet_trainer(plugin).fit(Dtypes())
    assert said.count("fp32_modules|lm_head|Conv2d") == 1
    assert "fp32_modules|'norm'" not in said


def test_a_weight_that_is_shared_with_a_kept_module_stays_fp32_under_all_its_names(plugin):
    class KeepsOne(Tied):
        def on_train_start(self) -> None:
            self.dtypes = {name: param.dtype for name, param in self.named_parameters(remove_duplicate=False)}

    module = KeepsOne()
    plugin.fp32_modules = ("decoder",)
    quiet_trainer(plugin).fit(module)
    assert [name for name, dtype in module.dtypes.items() if dtype == FP32] == [
        "encoder.weight",
        "decoder.weight",
        "twice.weight",
    ]


def test_inputs_are_left_alone_and_meet_bf16_weights(plugin):
    class Looks(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen = [part.dtype for part in batch]
            assert same_bits(batch[0], self.rows[0][2 * batch_idx : 2 * batch_idx + 2])
            return nn.functional.mse_loss(self.layer(batch[0]).float(), batch[1].float())

        validation_step = test_step = training_step

    inputs, targets = random_rows()
    for dtype in (FP32, torch.float16, BF16):  # float64 inputs fit no more than they do in fp32
        module = Looks(rows=(inputs.to(dtype), targets.double()))
        quiet_trainer(copy.deepcopy(plugin)).fit(module)
        assert module.seen == [dtype, torch.float64]


def test_the_default_dtype_and_autocast_are_as_before_after_a_fit(plugin):
    quiet_trainer(plugin).fit(M())
    assert torch.get_default_dtype() == FP32
    assert not torch.is_autocast_enabled("cpu")


def test_without_autocast_forward_runs_in_the_dtype_of_the_parameters(plugin):
    class NoAutocast(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")
            out = self.layer(batch[0].to(self.layer.weight.dtype))
            assert out.dtype == self.layer.weight.dtype == BF16
            return nn.functional.mse_loss(out.float(), batch[1])

    module = NoAutocast()
    before = values(module)
    quiet_trainer(bf16_master(plugin.master, autocast=False), max_epochs=2).fit(module)
    assert_replays(module, before)


# --- law 9: nothing silent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capabilities", "chosen"), [({"avx512_bf16": True}, "bf16-master"), ({"avx2": True}, "32-true")])
def test_auto_chooses_by_the_device_and_says_what_and_why(capabilities, chosen, monkeypatch, said):
    class Looks(M):
        def on_train_start(self) -> None:
            self.seen = (self.trainer.precision, self.layer.weight.dtype)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    module = Looks()
    trainer = quiet_trainer("auto")
    trainer.fit(module)
    assert module.seen == (chosen, BF16 if chosen == "bf16-master" else FP32)
    assert said.count(f"'auto'|'{chosen}'|CPU|{'avx512_bf16' if chosen == 'bf16-master' else 'no'}") == 1
    assert {param.dtype for param in module.parameters()} == {FP32}


def test_auto_is_the_default_and_chooses_again_in_the_next_run(monkeypatch):
    plugin = MasterWeightPrecision()
    assert plugin.precision == "auto"
    chosen = []
    for capabilities in ({"avx512_bf16": True}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities, raising=False)

        class Looks(M):
            def on_train_start(self) -> None:
                chosen.append(self.trainer.precision)

        quiet_trainer(plugin).fit(Looks())
    assert chosen == ["bf16-master", "32-true"]


def test_a_value_that_bf16_cannot_hold_is_reported_and_its_master_stays_finite(plugin, said):
    huge = 3.4e38
    module = M()
    with torch.no_grad():
        module.layer.bias.fill_(huge)
    quiet_trainer(plugin).validate(module, verbose=False)
    assert said.count("layer.bias|bf16|fp32_modules") == 1
    assert module.layer.bias.item() == torch.tensor(huge).item()


def test_parameters_that_get_no_master_and_parameters_that_were_bf16_are_reported(plugin, said):
    class Odd(M):
        def __init__(self) -> None:
            super().__init__()
            self.fp16 = nn.Parameter(torch.ones(2, dtype=torch.float16))
            self.low = nn.Linear(2, 2).bfloat16()

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) + self.fp16.float().sum() + self.low(batch[0][:, :2]).float().square().sum()

    module = Odd()
    before = [value.float() for value in values(module)]
    quiet_trainer(plugin).fit(module)
    assert "fp16|float16" in said
    assert "low.weight|bf16" in said
    assert module.fp16.dtype == torch.float16
    expected = fp32_run(before, module.gradients, module.make_optimizer)
    assert_same(list(module.parameters())[1:], expected[1:])


def test_an_optimizer_that_needs_all_masters_at_once_is_reported(plugin, said):
    module = M(optimizer=partial(MySGD, lr=0.1))
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert said.count("MySGD|all fp32 masters") == 1
    assert_replays(module, before)


@pytest.mark.parametrize("optimizer", [SGD, MySGD], ids=["known", "unknown"])
def test_copy_keeps_full_copies_of_what_had_a_gradient_whatever_the_optimizer(optimizer):
    class Looks(M):
        def on_train_end(self) -> None:
            self.dtypes = [tensor.dtype for tensor in self.plugin.master_tensors()]

    module = Looks(optimizer=partial(optimizer, lr=0.1))
    quiet_trainer(bf16_master("copy")).fit(module)
    assert module.dtypes == [FP32, FP32]


def test_a_checkpoint_with_rounded_weights_is_reported(plugin, said, tmp_path):
    trainer = pl.Trainer(**{**QUIET, "precision": "bf16-true"})

    class Rounded(M):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(batch[0].bfloat16()), batch[1].bfloat16())

    trainer.fit(Rounded())
    trainer.save_checkpoint(tmp_path / "rounded.ckpt")
    module = M()
    quiet_trainer(plugin, max_epochs=2).fit(module, ckpt_path=tmp_path / "rounded.ckpt", weights_only=True)
    assert said.count("16-bit weights|rounded") == 1
    assert {param.dtype for param in module.parameters()} == {FP32}


# --- the other precisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fp32_and_mixed_precision_are_lightnings_own_bit_for_bit(precision):
    module = Deep()
    stock = copy.deepcopy(module)
    quiet_trainer(precision, max_epochs=3, gradient_clip_val=0.5).fit(module)
    pl.Trainer(**{**QUIET, "max_epochs": 3, "gradient_clip_val": 0.5}, precision=precision).fit(stock)
    assert_same(module.parameters(), stock.parameters())


def test_without_masters_the_plugin_gives_the_parameters_as_masters_or_says_why_not():
    class Asks(M):
        def on_train_start(self) -> None:
            with self.plugin.fp32_parameters():
                pass
            assert self.plugin.master_tensors() == []
            assert same_bits(self.plugin.masters()["layer.weight"], self.layer.weight.detach())
            assert list(self.plugin.masters(["layer.bias"])) == ["layer.bias"]
            with pytest.raises(KeyError, match=r"'bias'.*layer\.weight"):
                self.plugin.masters(["bias"])

    module = Asks()
    quiet_trainer("32-true").fit(module)
    with pytest.raises(RuntimeError, match="Trainer"):
        module.plugin.masters()


# --- runs -------------------------------------------------------------------------------------------------------------


class Gan(M):
    """Two networks, one optimizer each, toggled; the generator's loss goes through the discriminator."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.stepped: list[int] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.discriminator(self.generator(batch[0])).float().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            fake = self.loss(batch)
            loss = -fake if index == 0 else fake - self.discriminator(batch[0]).float().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.stepped.append(index)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[Optimizer]:
        return [Adam(self.generator.parameters(), lr=0.01), SGD(self.discriminator.parameters(), lr=0.05, momentum=0.5)]


def test_two_networks_with_an_optimizer_each_train_as_in_fp32(plugin):
    module = Gan()
    params = [nn.Parameter(value) for value in values(module)]
    quiet_trainer(plugin, max_epochs=3).fit(module)
    optimizers = [Adam(params[:2], lr=0.01), SGD(params[2:], lr=0.05, momentum=0.5)]
    owned = [range(2), range(2, 6)]
    for which, gradients in zip(module.stepped, module.gradients, strict=True):
        for index in owned[which]:
            params[index].grad = gradients[index].float()
        optimizers[which].step()
    assert_same(module.parameters(), params)
    assert set(module.stepped) == {0, 1}


@both_storages
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_that_returns_none_changes_nothing(storage, accumulate):
    class SkipsOdd(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            return self.loss(batch) if batch_idx % 4 < 2 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            now = self.plugin.masters()
            if batch_idx % 4 == 3:
                assert_same(now.values(), self.last.values())
                self.compared = True
            self.last = now

    module = SkipsOdd(optimizer=partial(AdamW, lr=0.1, weight_decay=0.5), rows=random_rows(16))
    before = values(module)
    quiet_trainer(bf16_master(storage), accumulate_grad_batches=accumulate).fit(module)
    assert module.compared
    skipped = {1: [False, False, True, True] * 2, 2: [False, True] * 2}[accumulate]
    assert [gradients[0] is None for gradients in module.gradients] == skipped
    assert_replays(module, before)


def test_a_training_step_that_never_returns_a_loss_leaves_every_bit(plugin):
    class Nothing(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            return None

    module = Nothing(optimizer=partial(AdamW, lr=0.1, weight_decay=0.5))
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert_same(module.parameters(), before)


def test_a_second_fit_on_the_same_trainer_goes_on_from_the_masters(plugin):
    module = M()
    before = values(module)
    trainer = quiet_trainer(plugin, max_epochs=2)
    trainer.fit(module)
    assert_replays(module, before)
    middle = values(module)
    module.gradients.clear()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module)
    assert len(module.gradients) == 8
    assert_replays(module, middle)


@pytest.mark.parametrize("second", ["bf16-master", "32-true", "bf16-mixed"])
def test_a_new_trainer_on_the_same_module_goes_on_from_the_masters(plugin, second):
    module = M()
    quiet_trainer(plugin).fit(module)
    middle = values(module)
    module.gradients.clear()
    quiet_trainer(second).fit(module)
    assert_replays(module, middle)


def test_one_plugin_serves_two_trainers_in_turn(plugin):
    one, other = M(), Deep()
    starts = values(one), values(other)
    quiet_trainer(plugin).fit(one)
    quiet_trainer(plugin).fit(other)
    assert_replays(one, starts[0])
    assert_replays(other, starts[1])


@both_storages
@pytest.mark.parametrize("task", ["validate", "test", "predict"])
def test_evaluation_alone_leaves_the_fp32_values_bit_for_bit(storage, task):
    class Looks(Deep):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen = {param.dtype for param in self.parameters()}
            return self.layer(batch[0])

        validation_step = test_step = predict_step  # type: ignore[assignment]

    module = Looks()
    before = values(module)
    flags = [param.requires_grad for param in module.parameters()]
    held = [*module.parameters()]
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    getattr(quiet_trainer(bf16_master(storage)), task)(module)
    assert module.seen == {BF16, FP32}
    assert_same(module.parameters(), before)
    assert all(one is other for one, other in zip(module.parameters(), held, strict=True))
    assert [param.requires_grad for param in module.parameters()] == flags
    assert_same(module.state_dict().values(), saved.values())


BREAK_IN = ["training_step", "on_before_optimizer_step", "on_train_batch_end", "on_fit_start", "validation_step"]


@both_storages
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", BREAK_IN)
def test_after_an_exception_the_module_is_fp32_with_its_masters(storage, error, hook):
    def breaks(self: Any, *args: Any) -> Any:
        if self.broken or len(self.gradients) >= 2 or hook == "on_fit_start":
            self.broken = True
            self.last = self.plugin.masters()
            raise error("broken off")
        return getattr(super(cls, self), hook)(*args)

    cls: Any = type("Breaks", (M,), {hook: breaks, "broken": False})
    module = cls()
    trainer = quiet_trainer(bf16_master(storage))
    with pytest.raises((error, SystemExit)):
        trainer.fit(module)
    assert_same(module.parameters(), module.last.values())
    if hook != "on_fit_start":
        assert_ordinary(module, trainer.optimizers, FP32)
    assert_same(module.state_dict().values(), module.last.values())
    module.broken = False
    module.gradients.clear()
    if hook == "training_step":
        # it trains on: no hook, no cast and no gradient dtype was left behind
        torch.nn.functional.mse_loss(module.layer(module.rows[0]), module.rows[1]).backward()
        assert {param.grad.dtype for param in module.parameters()} == {FP32}


@both_storages
def test_after_an_exception_the_same_trainer_and_plugin_fit_again(storage):
    class BreaksOnce(M):
        broken = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2 and not self.broken:
                self.broken = True
                raise RuntimeError("broken off")
            return self.loss(batch)

    module = BreaksOnce()
    before = values(module)
    trainer = quiet_trainer(bf16_master(storage))
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.fit(module)
    assert len(module.gradients) == 2
    assert_replays(module, before)
    before = values(module)
    module.gradients.clear()
    quiet_trainer(trainer.precision_plugin).fit(module)
    assert len(module.gradients) == 4
    assert_replays(module, before)


@pytest.mark.parametrize(
    "flags",
    [{"fast_dev_run": 2}, {"detect_anomaly": True}, {"overfit_batches": 2}, {"barebones": True}, {"num_sanity_val_steps": 2}],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_of_the_trainer_work(plugin, flags):
    module = M()
    before = values(module)
    settings = {name: None for name in QUIET if name.startswith("enable_") or name in ("logger", "num_sanity_val_steps")}
    quiet_trainer(plugin, **{**(settings if "barebones" in flags else {}), **flags}).fit(module)
    assert_replays(module, before)


def test_an_optimizer_that_raises_in_its_step_leaves_parameters_in_its_groups(plugin):
    class Fails(M):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            if len(self.gradients) == 3:
                self.last = self.plugin.masters()
                optimizer.param_groups[0]["lr"] = "not a number"

    module = Fails(optimizer=partial(SGD, lr=0.1, momentum=0.9))
    trainer = quiet_trainer(plugin)
    with pytest.raises(TypeError):
        trainer.fit(module)
    assert_ordinary(module, trainer.optimizers, FP32)
    assert len(trainer.optimizers[0].state) == 2
    assert_same(module.parameters(), module.last.values())


def test_after_a_fit_the_module_is_as_it_would_be_after_an_fp32_fit(plugin):
    module = Deep()
    held = [*module.parameters()]
    trainer = quiet_trainer(plugin, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module)
    assert all(one is other for one, other in zip(module.parameters(), held, strict=True))
    assert {param.dtype for param in module.parameters()} == {FP32}
    state = trainer.optimizers[0].state
    assert {value.dtype for entries in state.values() for value in entries.values()} == {FP32}
    for child in module.modules():
        assert not child._state_dict_hooks
        assert not child._load_state_dict_pre_hooks
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    for param in module.parameters():
        param.grad = torch.ones(param.shape)
    trainer.optimizers[0].step()


# --- copies -----------------------------------------------------------------------------------------------------------


OFF_DEFAULT = {
    "precision": "bf16-master",
    "master": "copy",
    "fp32_modules": ("norm", nn.Linear, "*.bias"),
    "autocast": False,
    "bucket_mib": 0.5,
    "reduce_dtype": "parameter",
}


def by_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def by_torch_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copiers = pytest.mark.parametrize("copier", [copy.deepcopy, by_pickle, by_torch_save], ids=lambda copier: copier.__name__)


@copiers
def test_a_copy_of_the_plugin_has_every_setting(copier):
    settings = dict(OFF_DEFAULT)
    plugin = MasterWeightPrecision(settings.pop("precision"), **settings)
    defaults = MasterWeightPrecision()
    twin = copier(plugin)
    assert repr(twin) == repr(plugin)
    for name, value in OFF_DEFAULT.items():
        assert getattr(twin, name) == value
        assert getattr(defaults, name) != value


@copiers
def test_a_copy_of_a_plugin_in_mid_run_is_a_plugin_without_a_run(copier, plugin):
    class Copies(M):
        def on_train_batch_end(self, *_: Any) -> None:
            self.twin = copier(self.plugin)

    module = Copies()
    before = values(module)
    quiet_trainer(plugin).fit(module)
    with pytest.raises(RuntimeError, match="no masters"):
        module.twin.masters()
    assert module.twin.master_tensors() == []
    assert_replays(module, before)
    other = M()
    before = values(other)
    quiet_trainer(module.twin).fit(other)
    assert_replays(other, before)


def test_a_copy_of_an_auto_plugin_is_auto_whatever_was_chosen(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    plugin = MasterWeightPrecision("auto")
    quiet_trainer(plugin).fit(M())
    assert copy.deepcopy(plugin).precision == "auto"


@pytest.mark.parametrize("copier", [copy.deepcopy, by_pickle], ids=lambda copier: copier.__name__)
def test_a_copy_of_a_trainer_fits(copier, plugin):
    trainer = copier(quiet_trainer(plugin))
    assert isinstance(trainer, Trainer)
    assert trainer.precision_plugin is not plugin
    module = M()
    before = values(module)
    trainer.fit(module)
    assert_replays(module, before)


def quarter(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * 0.25 + 1e-3 for name, value in state.items()}


class TakesCopies(M):
    """Copies itself in mid-run: right after a step, and in the middle of one."""

    def __init__(self, copier: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.copier = copier
        self.copies: list[tuple[M, dict[str, Tensor]]] = []

    def take(self) -> None:
        copies, self.copies = self.copies, []
        gradients, self.gradients = self.gradients, []
        twin = self.copier(self)
        self.copies, self.gradients = copies, gradients
        self.copies.append((twin, self.plugin.masters()))

    def on_after_backward(self) -> None:
        self.take()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.take()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.take()


@both_storages
@copiers
def test_a_copy_of_the_module_in_mid_run_has_the_masters_in_its_state_dict(storage, copier):
    module = TakesCopies(copier, optimizer=partial(SGD, lr=0.1))
    before = values(module)
    quiet_trainer(bf16_master(storage)).fit(module)
    assert_replays(module, before)
    assert len(module.copies) == 12
    for twin, masters in module.copies:
        assert all(one is not other for one, other in zip(twin.parameters(), module.parameters(), strict=True))
        assert [*twin.state_dict()] == [*masters]
        assert_same(twin.state_dict().values(), masters.values())


@both_storages
@copiers
def test_a_copy_of_the_module_in_mid_run_keeps_edits_and_loads(storage, copier):
    module = TakesCopies(copier)
    quiet_trainer(bf16_master(storage), max_steps=2).fit(module)
    finals = values(module)
    for twin, masters in module.copies:
        with torch.no_grad():
            twin.layer.weight[0, 1] = 0.0
        expected = masters["layer.weight"].clone()
        expected[0, 1] = 0.0
        assert_same([twin.state_dict()["layer.weight"]], [expected])
        twin.load_state_dict(quarter(masters))
        assert_same(twin.state_dict().values(), quarter(masters).values())
    assert_same(module.parameters(), finals)


@both_storages
def test_a_copy_of_the_module_in_mid_run_that_is_made_fp32_works_as_an_fp32_module(storage):
    module = TakesCopies(copy.deepcopy)
    quiet_trainer(bf16_master(storage), max_steps=2).fit(module)
    for twin, masters in module.copies:
        twin.float()
        assert {value.dtype for value in twin.state_dict().values()} == {FP32}
        for value, master in zip(twin.state_dict().values(), masters.values(), strict=True):
            torch.testing.assert_close(value, master, rtol=2**-8, atol=0)
        twin.load_state_dict(quarter(masters))
        assert_same(twin.parameters(), quarter(masters).values())
        assert_same(twin.state_dict().values(), quarter(masters).values())


@both_storages
def test_a_copy_of_a_child_in_mid_run_has_its_masters(storage):
    class CopiesChild(M):
        def on_train_batch_end(self, *_: Any) -> None:
            self.child = [copy.deepcopy(self.layer)]
            self.then = self.plugin.masters()

    module = CopiesChild()
    quiet_trainer(bf16_master(storage)).fit(module)
    assert_same(module.child[0].state_dict().values(), module.then.values())


# --- masters(), set_masters(), fp32_parameters() ----------------------------------------------------------------------


def in_mid_run(module_class: Any, do: Callable[[Any], None], **kwargs: Any) -> Any:
    """A module that calls ``do`` after its second step."""

    def hook(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.gradients.clear()
            do(self)
            self.done = True

    cls: Any = type(module_class.__name__, (module_class,), {"on_train_batch_end": hook, "done": False})
    return cls(**kwargs)


def test_masters_are_copies(plugin):
    def do(module: M) -> None:
        first = module.plugin.masters()
        for value in first.values():
            value.fill_(99.0)
        assert all(not torch.equal(value, first[name]) for name, value in module.plugin.masters().items())
        module.start = [*module.plugin.masters().values()]

    module = in_mid_run(Deep, do, optimizer=SLOW_SGD)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, module.start)


def test_set_masters_sets_masters_and_parameters(plugin):
    def do(module: Deep) -> None:
        new = {name: torch.randn(value.shape) for name, value in module.plugin.masters().items()}
        some = {**{name: new[name] for name in ("layer.0.weight", "layer.5.bias")}, "layer.1.weight": new["layer.1.weight"]}
        kept = module.plugin.masters()
        module.plugin.set_masters(some)
        module.start = [some.get(name, kept[name]) for name in new]
        assert_same(module.plugin.masters().values(), module.start)
        assert_same(module.state_dict().values(), module.start)
        assert_same([module.layer[1].weight], [new["layer.1.weight"]])
        for param, value in zip(module.parameters(), module.start, strict=True):
            torch.testing.assert_close(param.float(), value, rtol=2**-8, atol=0)

    module = in_mid_run(Deep, do, optimizer=partial(SGD, lr=0.05))
    quiet_trainer(plugin).fit(module)
    assert_replays(module, module.start)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64])
def test_set_masters_takes_any_floating_dtype(plugin, dtype):
    def do(module: M) -> None:
        new = torch.randn(1, 4).to(dtype)
        module.plugin.set_masters({"layer.weight": new})
        assert_same([module.master()], [new.float()])

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_set_masters_refuses_bad_names_and_shapes_and_then_changes_nothing(plugin):
    def do(module: M) -> None:
        before = module.plugin.masters()
        good = {"layer.weight": torch.zeros(1, 4)}
        with pytest.raises(KeyError, match=r"layer\.wieght.*layer\.weight"):
            module.plugin.set_masters({**good, "layer.wieght": torch.zeros(1, 4)})
        with pytest.raises(ValueError, match=r"layer\.bias.*\(1,\).*\(2, 2\)"):
            module.plugin.set_masters({**good, "layer.bias": torch.zeros(2, 2)})
        with pytest.raises(ValueError, match=r"layer\.bias.*\(1,\).*\(\)"):
            module.plugin.set_masters({**good, "layer.bias": torch.zeros(())})
        assert_same(module.plugin.masters().values(), before.values())

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_set_masters_knows_tied_weights_by_each_of_their_names(plugin):
    def do(module: Tied) -> None:
        new = torch.randn(4, 4)
        module.plugin.set_masters({"decoder.weight": new})
        assert_same([module.master("encoder.weight")], [new])
        module.start = [*module.plugin.masters().values()]

    module = in_mid_run(Tied, do)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, module.start)


def test_outside_a_run_there_are_no_masters_to_ask_for(plugin):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no masters now"):
            plugin.masters()
        with pytest.raises(RuntimeError, match="no masters now"):
            plugin.set_masters({})
        with plugin.fp32_parameters():
            pass
        assert plugin.master_tensors() == []
        quiet_trainer(plugin).fit(M())


def test_fp32_parameters_are_the_masters_and_what_is_written_to_them_becomes_the_masters(plugin):
    def do(module: Deep) -> None:
        held, flags = [*module.parameters()], [param.requires_grad for param in module.parameters()]
        masters = module.plugin.masters()
        with module.plugin.fp32_parameters():
            assert {param.dtype for param in module.parameters()} == {FP32}
            assert_same(module.parameters(), masters.values())
            assert [param.requires_grad for param in module.parameters()] == flags
            assert [name for name, _ in module.named_parameters()] == [*masters]
            with torch.no_grad():
                module.layer[0].weight[0, 0] = 0.123456789
                module.layer[5].bias.data.add_(1e-6)
        assert all(one is other for one, other in zip(module.parameters(), held, strict=True))
        masters["layer.0.weight"][0, 0] = 0.123456789
        masters["layer.5.bias"].add_(1e-6)
        assert_same(module.plugin.masters().values(), masters.values())
        module.start = [*masters.values()]

    module = in_mid_run(Deep, do, optimizer=partial(SGD, lr=0.05))
    quiet_trainer(plugin).fit(module)
    assert_replays(module, module.start)


def test_within_fp32_parameters_the_state_dict_shows_what_was_written(plugin):
    def do(module: M) -> None:
        with module.plugin.fp32_parameters():
            with torch.no_grad():
                module.layer.weight.fill_(0.123456789)
            assert_same([module.state_dict()["layer.weight"]], [torch.full((1, 4), 0.123456789)])

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_a_state_dict_that_is_loaded_within_fp32_parameters_becomes_the_masters(plugin):
    def do(module: M) -> None:
        new = {name: torch.randn(value.shape) for name, value in module.state_dict().items()}
        with module.plugin.fp32_parameters():
            module.load_state_dict(new)
            assert_same(module.parameters(), new.values())
        assert_same(module.plugin.masters().values(), new.values())

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_fp32_parameters_are_taken_back_after_an_exception(plugin):
    def do(module: M) -> None:
        held = [*module.parameters()]
        masters = module.plugin.masters()
        with pytest.raises(ZeroDivisionError), module.plugin.fp32_parameters():
            raise ZeroDivisionError
        assert all(one is other for one, other in zip(module.parameters(), held, strict=True))
        assert {param.dtype for param in module.parameters()} == {BF16}
        assert_same(module.plugin.masters().values(), masters.values())

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_fp32_parameters_can_be_nested(plugin):
    def do(module: M) -> None:
        masters = module.plugin.masters()
        with module.plugin.fp32_parameters(), module.plugin.fp32_parameters():
            with torch.no_grad():
                module.layer.weight.add_(1e-6)
            assert {param.dtype for param in module.parameters()} == {FP32}
        assert_same([module.master()], [masters["layer.weight"] + 1e-6])

    module = in_mid_run(M, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


def test_fp32_parameters_keep_tied_weights_tied(plugin):
    def do(module: Tied) -> None:
        with module.plugin.fp32_parameters():
            assert module.encoder.weight is module.decoder.weight
            with torch.no_grad():
                module.decoder.weight.add_(1e-5)
            wanted = module.encoder.weight.detach().clone()
        assert module.encoder.weight is module.decoder.weight
        assert_same([module.master("encoder.weight")], [wanted])

    module = in_mid_run(Tied, do)
    quiet_trainer(plugin).fit(module)
    assert module.done


class Recurrent(M):
    def __init__(self) -> None:
        rows = torch.randn(8, 5, 4), torch.randn(8, 1)
        super().__init__(nn.LSTM(4, 3, num_layers=2, batch_first=True), partial(SGD, lr=0.1), rows)

    def loss(self, batch: list[Tensor]) -> Tensor:
        out, _ = self.layer(batch[0])
        return nn.functional.mse_loss(out[:, -1, :1].float(), batch[1])


def test_a_recurrent_module_evaluates_with_fp32_parameters_and_trains_on(plugin):
    def do(module: Recurrent) -> None:
        twin = nn.LSTM(4, 3, num_layers=2, batch_first=True)
        twin.load_state_dict({name.removeprefix("layer."): value for name, value in module.plugin.masters().items()})
        with module.plugin.fp32_parameters(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            assert_same([module.layer(module.rows[0])[0]], [twin(module.rows[0])[0].detach()])
        module.start = [*module.plugin.masters().values()]

    module = in_mid_run(Recurrent, do)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, module.start)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_fp32_parameters_work_in_validation(plugin, inference_mode):
    class Validates(M):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            masters = self.plugin.masters()
            with self.plugin.fp32_parameters():
                assert_same(self.parameters(), masters.values())
            assert_same(self.plugin.masters().values(), masters.values())
            self.validated = True

    module = Validates()
    before = values(module)
    quiet_trainer(plugin, max_epochs=3, inference_mode=inference_mode).fit(module)
    assert module.validated
    assert_replays(module, before)


# --- torch's switches -------------------------------------------------------------------------------------------------

SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def switches() -> list[Any]:
    return [getattr(torch.backends.cuda.matmul, name) for name in SWITCHES]


@pytest.fixture(params=[True, False])
def switches_before(request):
    originals = switches()
    for name in SWITCHES:
        setattr(torch.backends.cuda.matmul, name, request.param)
    yield switches()
    for name, value in zip(SWITCHES, originals, strict=True):
        setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed"])
@pytest.mark.parametrize("fails", [False, True])
def test_reduced_precision_reductions_are_off_in_a_fit_and_as_before_after_it(precision, fails, switches_before):
    class Looks(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen = switches()
            if fails:
                raise RuntimeError("broken off")
            return self.loss(batch)

    module = Looks()
    if fails:
        with pytest.raises(RuntimeError, match="broken off"):
            quiet_trainer(precision).fit(module)
    else:
        quiet_trainer(precision).fit(module)
    assert module.seen == [False, False]
    assert switches() == switches_before


def test_the_switches_are_as_before_after_a_module_was_refused(switches_before):
    with pytest.raises(MisconfigurationException):
        quiet_trainer("bf16-master").fit(M(nn.LazyLinear(1)))
    assert switches() == switches_before


# --- how the plugin reaches a trainer ---------------------------------------------------------------------------------


def _by_name() -> pl.Trainer:
    return Trainer(precision_plugin="bf16-master", **QUIET)


def _by_plugins() -> pl.Trainer:
    return pl.Trainer(plugins=[MasterWeightPrecision("bf16-master")], **QUIET)


def _by_plugins_of_ours() -> pl.Trainer:
    return Trainer(plugins=MasterWeightPrecision("bf16-master"), **QUIET)


def _by_strategy() -> pl.Trainer:
    return pl.Trainer(strategy=SingleDeviceStrategy("cpu", precision_plugin=MasterWeightPrecision("bf16-master")), **QUIET)


def _by_strategy_of_ours() -> pl.Trainer:
    return Trainer(strategy=SingleDeviceStrategy("cpu", precision_plugin=MasterWeightPrecision("bf16-master")), **QUIET)


WAYS = [_by_name, _by_plugins, _by_plugins_of_ours, _by_strategy, _by_strategy_of_ours]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_every_way_to_pass_the_plugin_trains_the_same_bits(way):
    trainer = way()
    assert isinstance(trainer.precision_plugin, MasterWeightPrecision)
    assert trainer.precision == "bf16-master"
    module = Dtypes()
    before = values(module)
    trainer.fit(module)
    assert set(module.dtypes.values()) == {BF16}
    assert_replays(module, before)


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("bf16-mixed", "bf16-mixed"),
        ("bf16", "bf16-mixed"),
        ("32-true", "32-true"),
        ("32", "32-true"),
        (32, "32-true"),
        (None, "bf16-master"),
        ("bf16-mixed", MasterWeightPrecision("bf16-mixed")),
        ("bf16-mixed", MixedPrecision("bf16-mixed", "cpu")),
        (32, Precision()),
    ],
    ids=repr,
)
def test_precision_beside_precision_plugin_is_accepted_if_it_means_the_same(precision, plugin):
    trainer = Trainer(precision=precision, precision_plugin=plugin, **QUIET)
    assert trainer.precision == (plugin if isinstance(plugin, str) else plugin.precision)
    assert isinstance(plugin, str) or trainer.precision_plugin is plugin


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("bf16-mixed", "bf16-master"),
        ("16-mixed", "bf16-master"),
        ("bf16-true", "bf16-master"),
        ("64-true", "32-true"),
        (32, "bf16-master"),
        (16, "bf16-mixed"),
        ("bf16", "32-true"),
        ("bf16-mixed", "auto"),
    ],
)
def test_precision_that_contradicts_precision_plugin_is_refused_with_both_names(precision, plugin):
    with pytest.raises(MisconfigurationException) as caught:
        Trainer(precision=precision, precision_plugin=plugin, **QUIET)
    message = str(caught.value)
    assert f"precision={precision!r}" in message
    assert f"precision_plugin={plugin!r}" in message
    assert "leave" in message


@pytest.mark.parametrize("plugins", [[MasterWeightPrecision("bf16-mixed")], MasterWeightPrecision("bf16-mixed"), [Precision()]])
def test_two_precision_plugins_are_refused(plugins):
    with pytest.raises(MisconfigurationException, match=r"precision_plugin=.*plugins=.*keep one"):
        Trainer(precision_plugin="bf16-master", plugins=plugins, **QUIET)


@pytest.mark.parametrize("precision", ["bf16-master", "auto"])
def test_our_precisions_given_as_precision_are_refused_with_the_right_argument(precision):
    with pytest.raises(MisconfigurationException, match=f"precision_plugin='{precision}'"):
        Trainer(precision=precision, **QUIET)


def test_without_a_precision_plugin_the_trainer_is_lightnings():
    trainer = Trainer(precision="bf16-mixed", **QUIET)
    assert type(trainer.precision_plugin) is MixedPrecision
    assert trainer.precision == "bf16-mixed"
    assert lightning_mp.Trainer is Trainer


# --- kinds of modules -------------------------------------------------------------------------------------------------


class First(nn.Module):
    """The first output of a module with several."""

    def __init__(self, inner: nn.Module, *, inputs: int = 1) -> None:
        super().__init__()
        self.inner, self.inputs = inner, inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*[x] * self.inputs)[0]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(4)), "scale": nn.Parameter(torch.randn(()))})
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.many[0] + self.many[1] + self.named["shift"]) * self.named["scale"] * self.scalar
        return torch.cat([x, self.empty])


class Conv(nn.Sequential):
    def __init__(self) -> None:
        first, last = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 2)
        super().__init__(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), last)
        self.to(memory_format=torch.channels_last)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)


FLOATS, TOKENS, IMAGES, SEQUENCES = (8, 4), "tokens", (8, 1, 6, 6), (8, 5, 4)
NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "Linear": (lambda: nn.Linear(4, 4), FLOATS),
    "Conv1d": (lambda: nn.Conv1d(5, 3, 2), SEQUENCES),
    "Conv2d-channels-last": (Conv, IMAGES),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2)), TOKENS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), TOKENS),
    "LSTM": (lambda: First(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)), SEQUENCES),
    "LSTM-projection": (lambda: First(nn.LSTM(4, 3, proj_size=2)), SEQUENCES),
    "GRU": (lambda: First(nn.GRU(4, 3)), SEQUENCES),
    "RNN": (lambda: First(nn.RNN(4, 3)), SEQUENCES),
    "LSTMCell": (lambda: First(nn.LSTMCell(4, 3)), FLOATS),
    "GRUCell": (lambda: nn.GRUCell(4, 3), FLOATS),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), inputs=3), SEQUENCES),
    "MultiheadAttention-bias-kv": (lambda: First(nn.MultiheadAttention(4, 2, add_bias_kv=True), inputs=3), SEQUENCES),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), SEQUENCES),
    "TransformerDecoder": (lambda: First2(nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)), SEQUENCES),
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), FLOATS),
    "GroupNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), FLOATS),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), FLOATS),
    "RMSNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 2)), FLOATS),
    "InstanceNorm1d": (lambda: nn.Sequential(nn.Conv1d(5, 3, 1), nn.InstanceNorm1d(3, affine=True)), SEQUENCES),
    "PReLU": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 4), nn.PReLU(4)), FLOATS),
    "ParameterList": (Listed, FLOATS),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), FLOATS),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), FLOATS),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3), use_trivialization=False), FLOATS),
    "no parameter to cast": (lambda: nn.LayerNorm(4), FLOATS),
}


class First2(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Zoo(M):
    """Any network, on made-up rows, trained towards outputs of mean 1."""

    def __init__(self, net: nn.Module, shape: Any, optimizer: Any = SLOW_SGD, batch: int = 4) -> None:
        inputs = torch.randint(10, (8, 5)) if shape == TOKENS else torch.randn(shape)
        super().__init__(net, optimizer, (inputs, torch.ones(8, 1)), batch=batch)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layer(batch[0]).float().square().mean() - 1.0).square()

    def on_train_batch_end(self, *_: Any) -> None:
        masters, saved = self.plugin.masters(), self.state_dict()
        assert_same([saved[name] for name in masters], masters.values())
        with self.plugin.fp32_parameters(), torch.no_grad():
            self.loss([part[:4] for part in self.rows])


@pytest.mark.parametrize("name", NETS)
@both_storages
def test_modules_of_this_kind_train_validate_save_and_predict(storage, name):
    make, shape = NETS[name]
    module = Zoo(make(), shape)
    before = values(module)
    trainer = quiet_trainer(bf16_master(storage), max_epochs=2)
    trainer.fit(module)
    assert all(gradient.isfinite().all() for gradients in module.gradients for gradient in gradients if gradient is not None)
    assert_replays(module, before)
    trained = values(module)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    assert_same(module.parameters(), trained)


def test_sparse_gradients_are_stepped_on_masters(plugin):
    module = Zoo(nn.Embedding(10, 4, sparse=True), TOKENS, partial(SparseAdam, lr=0.05))
    before = values(module)
    quiet_trainer(plugin, max_epochs=2).fit(module)
    assert module.gradients[0][0].is_sparse
    assert_replays(module, before)


def test_an_embedding_with_a_largest_norm_keeps_to_it(plugin):
    module = Zoo(nn.Embedding(10, 4, max_norm=0.5), TOKENS)
    quiet_trainer(plugin, max_epochs=2).fit(module)
    module.layer(module.rows[0])
    fresh = Zoo(nn.Embedding(10, 4, max_norm=0.5), TOKENS)
    quiet_trainer(plugin, max_epochs=1, limit_train_batches=1).fit(fresh)
    assert fresh.layer.weight.isfinite().all()
    lr_times_gradient = 0.05 * fresh.gradients[0][0].float().norm(dim=1)
    seen = fresh.rows[0][:4].unique()
    assert (fresh.layer.weight[seen].norm(dim=1) <= 0.5 * (1 + 2**-7) + lr_times_gradient[seen]).all()


class TwoInputs(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


def test_a_layer_that_autocast_does_not_cover_trains_when_it_is_kept_in_fp32(plugin):
    module = Zoo(nn.Sequential(TwoInputs(4, 4, 3), nn.Linear(3, 2)), FLOATS)
    before = values(module)
    quiet_trainer(bf16_master(plugin.master, fp32_modules=("norm", nn.Bilinear)), max_epochs=2).fit(module)
    assert_replays(module, before)


def test_a_module_without_parameters_to_train_can_be_evaluated(plugin):
    module = Zoo(nn.Identity(), FLOATS)
    quiet_trainer(plugin).test(module, verbose=False)
    assert not [*module.parameters()]


def test_a_compiled_module_trains(plugin):
    module = Deep(partial(SGD, lr=0.05))
    before = values(module)
    compiled = torch.compile(module, backend="eager")
    quiet_trainer(plugin, max_epochs=2).fit(compiled)
    assert_replays(module, before)


def test_a_module_with_a_compiled_child_trains(plugin):
    module = M(nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 1)))
    before = values(module)
    quiet_trainer(plugin, max_epochs=2).fit(module)
    assert_replays(module, before)


def test_data_modules_and_configure_model_work(plugin):
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(*random_rows()), batch_size=2)

    class Late(M):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.layer, nn.Identity):
                self.layer = nn.Linear(4, 1)
                self.start = values(self)

    module = Late()
    quiet_trainer(plugin, limit_val_batches=0).fit(module, datamodule=Data())
    assert_replays(module, module.start)


# --- bad input --------------------------------------------------------------------------------------------------------

LEGAL = ("'32-true'", "'bf16-mixed'", "'bf16-master'", "'auto'")


@pytest.mark.parametrize("precision", ["bf16", "fp32", "32", 32, "BF16-MASTER", "", "bf16_master", None])
def test_an_unknown_precision_is_refused_with_the_legal_ones(precision):
    with pytest.raises(ValueError, match="precision") as caught:
        MasterWeightPrecision(precision)
    assert repr(precision) in str(caught.value)
    assert all(legal in str(caught.value) for legal in LEGAL)


def test_an_unknown_precision_plugin_is_refused_by_the_trainer_with_the_legal_ones():
    with pytest.raises(ValueError, match="bf16-masters") as caught:
        Trainer(precision_plugin="bf16-masters", **QUIET)
    assert all(legal in str(caught.value) for legal in LEGAL)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_precisions_without_masters_are_refused_with_a_hint(precision):
    with pytest.raises(ValueError, match=precision) as caught:
        Trainer(precision_plugin=precision, **QUIET)
    assert f"precision='{precision}'" in str(caught.value)
    assert all(legal in str(caught.value) for legal in LEGAL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"master": "full"}, ["master='full'", "'split'", "'copy'"]),
        ({"master": None}, ["master=None", "'split'", "'copy'"]),
        ({"reduce_dtype": "bf16"}, ["reduce_dtype='bf16'", "'fp32'", "'parameter'"]),
        ({"fp32_modules": "norm"}, ["fp32_modules='norm'", "['norm']"]),
        ({"fp32_modules": nn.Linear}, ["fp32_modules=", "Linear", "list"]),
        ({"fp32_modules": [3]}, ["fp32_modules", "3", "classes", "patterns"]),
        ({"fp32_modules": [int]}, ["fp32_modules", "int", "classes", "patterns"]),
        ({"fp32_modules": [nn.Linear(1, 1)]}, ["fp32_modules", "Linear", "classes", "patterns"]),
        ({"fp32_modules": None}, ["fp32_modules", "None", "list"]),
        ({"bucket_mib": -1}, ["bucket_mib=-1", "0 or more"]),
        ({"bucket_mib": math.nan}, ["bucket_mib=nan", "0 or more"]),
        ({"bucket_mib": "4"}, ["bucket_mib='4'", "0 or more"]),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_refused_with_its_value_and_the_legal_ones(settings, words):
    with pytest.raises(ValueError, match=next(iter(settings))) as caught:
        MasterWeightPrecision("bf16-master", **settings)
    assert [word for word in words if word not in str(caught.value)] == []


def make_strategy(cls: Any) -> Any:
    """One that need not have what its constructor asks for."""
    strategy = cls.__new__(cls)
    strategy._precision_plugin = None
    return strategy


def assert_names_the_strategies(error: BaseException, name: str) -> None:
    assert [word for word in (name, "SingleDeviceStrategy", "DDPStrategy", "bf16-master") if word not in str(error)] == []


@pytest.mark.parametrize("cls", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_shard_are_refused(cls):
    with pytest.raises(MisconfigurationException) as caught:
        check_strategy(make_strategy(cls))
    assert_names_the_strategies(caught.value, cls.__name__)


@pytest.mark.parametrize("cls", [ModelParallelStrategy, FSDPStrategy])
def test_the_trainer_refuses_strategies_that_shard_at_construction(cls):
    with pytest.raises(MisconfigurationException) as caught:
        quiet_trainer("bf16-master", strategy=cls())
    assert_names_the_strategies(caught.value, cls.__name__)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_the_trainer_refuses_strategies_that_shard_by_name(name):
    with pytest.raises(MisconfigurationException) as caught:
        quiet_trainer("bf16-master", strategy=name)
    assert_names_the_strategies(caught.value, name)


class Sharding(SingleDeviceStrategy):
    """Stands for a strategy of somebody else's that Lightning's checks do not know."""


def test_a_strategy_of_somebody_elses_is_taken_for_what_it_derives_from():
    assert quiet_trainer("bf16-master", strategy=Sharding("cpu")).precision == "bf16-master"


@pytest.fixture
def process_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_lightnings_trainer_refuses_a_strategy_that_shards_when_the_run_starts():
    class Configured(M):
        def configure_model(self) -> None:
            pass

    module = Configured()
    with pytest.raises(MisconfigurationException) as caught:
        pl.Trainer(**QUIET, strategy=ModelParallelStrategy(), plugins=[MasterWeightPrecision("bf16-master")]).fit(module)
    assert_names_the_strategies(caught.value, "ModelParallelStrategy")
    assert {param.dtype for param in module.parameters()} == {FP32}


def lazily() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))


def test_uninitialised_lazy_parameters_are_refused(plugin):
    with pytest.raises(MisconfigurationException, match=r"layer\.0\.weight.*lazy.*(configure_model|setup)"):
        quiet_trainer(plugin).fit(M(lazily()))


def test_lazy_parameters_that_were_initialised_train(plugin):
    net = lazily()
    net(torch.zeros(1, 4))
    module = M(net)
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert_replays(module, before)


def test_parameters_on_the_meta_device_are_refused(plugin):
    module = M(nn.Linear(4, 1, device="meta"))
    # not through a fit: Lightning cannot tear down a module on the meta device, whatever the precision
    module._trainer = SimpleNamespace(strategy=SingleDeviceStrategy("cpu"), training=True, state=TrainerState())
    with pytest.raises(MisconfigurationException, match=r"layer\.weight.*meta.*configure_model"):
        plugin.convert_module(module)


def test_a_cuda_device_without_bf16_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    for precision in ("bf16-master", "bf16-mixed"):
        with pytest.raises(MisconfigurationException, match="Tesla T4") as caught:
            check_bf16(precision, torch.device("cuda"))
        assert [word for word in (precision, "'32-true'", "'auto'", "8.0") if word not in str(caught.value)] == []


def on_device(device: str) -> nn.Module:
    module = M()
    module._trainer = SimpleNamespace(strategy=SingleDeviceStrategy(torch.device(device)), training=True, state=TrainerState())
    return module


def test_a_module_for_a_device_without_bf16_is_refused_and_left_fp32_and_auto_is_fp16(monkeypatch, said):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    module = on_device("cuda:0")
    for precision in ("bf16-master", "bf16-mixed"):
        plugin = MasterWeightPrecision(precision)
        with pytest.raises(MisconfigurationException, match="Tesla T4"):
            plugin.convert_module(module)
        plugin.teardown()
        assert {param.dtype for param in module.parameters()} == {FP32}
    plugin = MasterWeightPrecision("auto")
    plugin.convert_module(module)
    assert plugin.precision == "16-master"
    assert type(plugin.loss_scale) is AdaptiveLossScale
    assert "auto|16-master|Tesla T4" in said


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_auto_on_a_device_that_nothing_is_known_about_is_fp32_and_says_so(device, said):
    plugin = MasterWeightPrecision("auto")
    plugin.convert_module(on_device(device))
    assert plugin.precision == "32-true"
    assert f"auto|32-true|{device}" in said


class ZeroRedundancyOptimizer(SGD):
    """Stands for torch's, which needs a process group."""


def test_an_optimizer_that_shards_is_refused(plugin):
    with pytest.raises(MisconfigurationException, match=r"ZeroRedundancyOptimizer.*bf16-mixed"):
        quiet_trainer(plugin).fit(M(optimizer=partial(ZeroRedundancyOptimizer, lr=0.1)))


# --- parameters that come later ---------------------------------------------------------------------------------------


@both_storages
def test_a_bf16_parameter_that_is_added_in_mid_run_gets_a_master(storage):
    class Grows(M):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.late = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
                self.optimizers().add_param_group({"params": [self.late], "lr": 1e-3})

        def loss(self, batch: list[Tensor]) -> Tensor:
            # the gradient of `late` is 1; each update of 1e-3 is lost in bf16
            return super().loss(batch) + (self.late.float().sum() if hasattr(self, "late") else 0.0)

    module = Grows()
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    steps = module.trainer.global_step // 2
    assert module.late.dtype == FP32
    assert module.late.item() == pytest.approx(1 - 1e-3 * steps, abs=1e-6)
    assert module.state_dict()["late"].dtype == FP32


# --- faults that newcomers met ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-master"])
def test_a_checkpoint_outside_of_a_window_is_saved_without_a_word(precision, tmp_path, said):
    trainer = quiet_trainer(precision, max_epochs=1)
    trainer.fit(M())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert "accumulation window" not in said


@both_storages
def test_an_orthogonal_parametrization_trains(storage):
    class Orthogonal(M):
        def __init__(self) -> None:
            super().__init__()
            self.rotate = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

        def loss(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(self.rotate(batch[0])), batch[1])

    module = Orthogonal()
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    assert all(param.isfinite().all() for param in module.parameters())


@both_storages
def test_norm_layers_of_a_bf16_module_become_fp32(storage):
    class Normed(M):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert self.norm.weight.dtype == FP32
            assert self.layer.weight.dtype == BF16
            return nn.functional.mse_loss(self.layer(self.norm(batch[0])), batch[1])

    module = Normed().bfloat16()
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    assert {param.dtype for param in module.parameters()} == {FP32}
    assert (module.norm.weight != 1).any()


@both_storages
def test_a_wrapper_that_never_ran_the_constructor_of_optimizer_works(storage):
    class Wrapper(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:  # no super().__init__(), as in published Lookaheads
            self.inner = SGD(params, lr=lr)
            self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

    module = M(optimizer=partial(Wrapper, lr=0.01))
    plain = copy.deepcopy(module)
    plain.make_optimizer = partial(SGD, lr=0.01)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(module)
    quiet_trainer(bf16_master(storage), max_epochs=2).fit(plain)
    assert_same(module.parameters(), values(plain))


def test_a_copy_in_mid_run_is_reported_once(said):
    module = TakesCopies(copy.deepcopy)
    quiet_trainer(bf16_master("split"), max_steps=2).fit(module)
    assert said.count("fp32_parameters()|copied") == 1


def test_autocast_is_to_be_a_bool():
    with pytest.raises(ValueError, match=r"autocast='no'.*True or False"):
        MasterWeightPrecision("bf16-master", autocast="no")
