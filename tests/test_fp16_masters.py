"""fp16 parameters under fp32 masters: their values, edits of them, what a step costs, and settings that are refused."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lightning_mp.masters
from lightning_mp import (
    AdaptiveLossScale,
    DynamicLossScale,
    MasterWeightPrecision,
    NoLossScale,
    StaticLossScale,
)
from lightning_mp.cli import main
from tests.instruments import CountSyncs
from tests.modules import (
    PLAIN_SGD,
    LinearLoss,
    M,
    Manual,
    assert_replays,
    assert_same,
    quiet_trainer,
    random_rows,
    values,
)
from tests.reference import fp32_run, same_bits
from tests.test_cost_of_a_step import Net as CostNet

pytestmark = pytest.mark.usefixtures("seeded")
FP16, FP32 = torch.float16, torch.float32
both_fp16 = pytest.mark.parametrize("precision", ["16-master", "16-mixed"])
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


#: Low enough for the gradients of these modules, so that no step is skipped that a test does not make overflow.
LOW_SCALE = DynamicLossScale(init_scale=2.0**7)


def fp16_master(**settings: Any) -> MasterWeightPrecision:
    return MasterWeightPrecision("16-master", **{"loss_scale": LOW_SCALE, **settings})


def net(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))


class Looks(M):
    """Keeps the dtypes and masters at the start of the first training step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == 0:
            self.dtypes = {name: param.dtype for name, param in self.named_parameters()}
            self.first = self.plugin.masters()
            self.cast = {name: param.detach().clone() for name, param in self.named_parameters()}


# --- values ----------------------------------------------------------------------------------------------------------------


def test_masters_start_from_the_fp32_values_bit_for_bit():
    module = Looks(net())
    with torch.no_grad():  # ties, below fp16's range, subnormal in fp16
        module.layer[0].weight.view(-1)[:6] = torch.tensor([1 + 2.0**-11, 1 / 3, 1e-9, -0.0, 2.0**-25 * 1.5, 65519.0])
    initial = dict(module.named_parameters())
    initial = {name: param.detach().clone() for name, param in initial.items()}
    quiet_trainer(fp16_master(), max_steps=1).fit(module)
    assert module.dtypes["layer.0.weight"] == module.dtypes["layer.3.bias"] == FP16
    assert module.dtypes["layer.1.weight"] == FP32  # the norm
    assert_same(module.first.values(), initial.values())
    for name, param in module.cast.items():
        assert same_bits(param.float(), initial[name] if "1." in name else initial[name].half().float())


class MySGD(torch.optim.SGD):
    """One that is not known to update each parameter by itself."""


OPTIMIZERS = {
    "not known": partial(MySGD, lr=0.05, momentum=0.9),
    "sgd": PLAIN_SGD,
    "momentum": MOMENTUM,
    "adamw": ADAMW,
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fit_gives_the_masters_of_an_fp32_run_on_the_same_gradients_bit_for_bit(optimizer, accumulate):
    module = M(net(), OPTIMIZERS[optimizer])
    initial = values(module)
    plugin = fp16_master(bucket_mib=0 if accumulate == 2 else 4)
    quiet_trainer(plugin, max_epochs=2, accumulate_grad_batches=accumulate).fit(module)
    assert plugin.applied_steps == 8 // accumulate
    assert {gradient.dtype for step in module.gradients for gradient in step} == {FP32}
    assert_replays(module, initial)


class Image(M):
    """Convolutions with weights that are channels-last, or not contiguous at all."""

    def __init__(self, optimizer: Any) -> None:
        net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.Conv2d(4, 2, 3), nn.Flatten())
        super().__init__(net.to(memory_format=torch.channels_last), optimizer)
        self.turned = nn.Parameter(torch.randn(3, 2).t())

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layer(batch[0]) @ self.turned).float().square().mean()


def strides_of(module: nn.Module) -> list[list[int]]:
    """Of the dimensions that have more than one element."""
    return [
        [stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1] for param in module.parameters()
    ]


@pytest.mark.parametrize("bucket_mib", [0, 4])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_weights_of_another_memory_layout_are_stepped_as_in_fp32(optimizer, bucket_mib):
    module = Image(optimizer)
    initial = [param.detach().clone(memory_format=torch.preserve_format) for param in module.parameters()]
    strides = strides_of(module)
    quiet_trainer(fp16_master(bucket_mib=bucket_mib)).fit(module)
    assert_replays(module, initial)
    assert strides_of(module) == strides


def test_muon_gives_the_masters_of_an_fp32_run():
    module = M(nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False)), partial(torch.optim.Muon, lr=0.01))
    initial = values(module)
    quiet_trainer(fp16_master()).fit(module)
    assert_replays(module, initial)


def test_large_parameters_in_slices_are_stepped_as_in_fp32():
    class Wide(M):
        def loss(self, batch):
            return self.layer(batch[0]).float().square().mean()

    module = Wide(nn.Linear(4, 5000), ADAMW)
    initial = values(module)
    quiet_trainer(fp16_master(bucket_mib=0)).fit(module)
    assert_replays(module, initial)


def test_updates_too_small_for_fp16_add_up_in_the_masters():
    module = LinearLoss(torch.full((64, 4), 2.0**-14))
    with torch.no_grad():
        module.layer.weight.fill_(1.0)
    quiet_trainer(fp16_master()).fit(module)
    assert (module.layer.weight == 1 - 64 * 2.0**-14).all()


def test_tied_weights_have_one_master():
    class Tied(M):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)), ADAMW)
            self.layer[2].weight = self.layer[0].weight

        def on_train_batch_end(self, *args):
            self.names = set(self.plugin.masters())
            state = self.state_dict()
            self.one = state["layer.0.weight"] is state["layer.2.weight"]
            self.storage = sum(tensor.numel() for tensor in self.plugin.master_tensors())

    module = Tied()
    initial = values(module)
    quiet_trainer(fp16_master()).fit(module)
    assert "layer.2.weight" not in module.names
    assert module.one
    assert module.storage == sum(param.numel() for param in module.parameters())
    assert module.layer[2].weight is module.layer[0].weight
    assert_replays(module, initial)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_that_were_16_bit_before_get_masters_of_their_value(dtype, said):
    module = Looks(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), ADAMW)
    module.layer[0].to(dtype)
    initial = [value.float() for value in values(module)]
    quiet_trainer(fp16_master()).fit(module)
    assert set(module.dtypes.values()) == {FP16}
    assert_same(module.first.values(), initial)
    assert_replays(module, initial)
    assert "Masters start from the 16-bit value|layer.0.weight" in said


def test_values_beyond_fp16_are_reported_and_their_masters_stay_finite(said):
    module = Looks()
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[1e5, 0.1, 0.2, 0.3]]))
    initial = values(module)
    quiet_trainer(fp16_master(max_consecutive_skips=9)).fit(module)
    assert "infinite in the fp16 parameters|layer.weight" in said
    assert_same(module.first.values(), initial)
    assert module.plugin.applied_steps == 0
    assert_same(module.parameters(), initial)


def test_after_a_fit_the_module_and_its_gradients_are_fp32():
    module = M(net())
    quiet_trainer(fp16_master()).fit(module)
    for param in module.parameters():
        assert param.dtype == FP32
        assert param.grad is None or param.grad.dtype == FP32
    nn.functional.mse_loss(module.layer(module.rows[0]), module.rows[1]).backward()  # it trains by hand
    assert {param.grad.dtype for param in module.parameters()} == {FP32}
    module.zero_grad()
    module.half().layer(module.rows[0].half()).sum().backward()  # and is exported in fp16
    assert {param.grad.dtype for param in module.parameters()} == {torch.float16}


def test_the_state_dict_holds_fp32_masters_in_mid_run():
    class Reads(M):
        def on_train_batch_end(self, *args):
            assert_same(self.state_dict().values(), self.plugin.masters().values())
            assert_same(self.layer.state_dict().values(), self.plugin.masters().values())
            assert any(not same_bits(value, value.half().float()) for value in self.state_dict().values())
            self.seen = {value.dtype for value in self.state_dict().values()}

    module = Reads(net(), ADAMW)
    quiet_trainer(fp16_master()).fit(module)
    assert module.seen == {FP32}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_child_in_mid_run_has_its_masters(copier):
    class Copies(M):
        def on_train_batch_end(self, *args):
            self.copied = copier(self.layer)
            self.then = self.layer.state_dict()

        def __getstate__(self):
            return {**self.__dict__, "make_optimizer": None}

    module = Copies(net(), ADAMW)
    quiet_trainer(fp16_master()).fit(module)
    assert_same(module.copied.state_dict().values(), module.then.values())
    assert_same(module.copied.state_dict().values(), module.layer.state_dict().values())


def test_set_masters_sets_masters_and_fp16_parameters():
    wanted = torch.tensor([[1 / 3, 1e-9, 2.0, -0.1]])

    class Sets(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 3:
                self.plugin.set_masters({"layer.weight": wanted})
                self.held = self.layer.weight.detach().clone()
                self.kept = self.master()

    module = Sets()
    quiet_trainer(fp16_master()).fit(module)
    assert same_bits(module.held, wanted.half())
    assert same_bits(module.kept, wanted)
    assert same_bits(module.layer.weight.detach(), wanted)


def test_fp32_parameters_give_fp32_and_take_edits():
    class Exports(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with self.plugin.fp32_parameters():
                assert {param.dtype for param in self.parameters()} == {FP32}
                with torch.no_grad():
                    self.layer.bias.fill_(1 / 3)
            assert self.layer.bias.dtype == FP16
            self.kept = self.master("layer.bias")

    module = Exports()
    quiet_trainer(fp16_master()).fit(module)
    assert same_bits(module.kept, torch.tensor([1 / 3]))


# --- dtypes that are left alone ----------------------------------------------------------------------------------------------


def test_buffers_complex_and_float64_tensors_keep_their_dtype_and_train():
    class Dtypes(M):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), ADAMW)
            self.register_buffer("inv_freq", torch.rand(3))
            self.register_buffer("table", torch.rand(3, dtype=torch.float64))
            self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.fine = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def loss(self, batch):
            extra = (self.complex * self.phase).abs().square().sum() + (self.fine * self.table).square().sum().float()
            return super().loss(batch) + extra

        def on_train_batch_end(self, *args):
            named = [*self.named_parameters(), *self.named_buffers()]
            self.dtypes = {name: tensor.dtype for name, tensor in named}

    module = Dtypes()
    reference = copy.deepcopy(module)
    quiet_trainer(fp16_master()).fit(module)
    quiet_trainer("32-true").fit(reference)
    for name, tensor in [*reference.named_buffers(), ("complex", reference.complex), ("fine", reference.fine)]:
        assert module.dtypes[name] == tensor.dtype
    assert module.dtypes["layer.0.weight"] == FP16
    torch.testing.assert_close(module.complex, reference.complex)
    torch.testing.assert_close(module.fine, reference.fine)
    assert same_bits(module.inv_freq, reference.inv_freq)


def test_the_default_dtype_is_untouched():
    class Dtype(M):
        def training_step(self, batch, batch_idx):
            self.default = torch.get_default_dtype()
            self.distinct = len(set((torch.arange(3000) / 10.0).tolist()))
            return super().training_step(batch, batch_idx)

    module = Dtype()
    quiet_trainer(fp16_master()).fit(module)
    assert (module.default, module.distinct, torch.get_default_dtype()) == (FP32, 3000, FP32)


# --- frozen parameters -------------------------------------------------------------------------------------------------------


class Backbone(M):
    """A backbone and a head; the masters, dtypes and tensors kept at the end of each batch."""

    def __init__(self, optimizer: Any = ADAMW, frozen: bool = True, only_head: bool = False) -> None:
        super().__init__(None, optimizer)
        self.backbone = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 1)
        if frozen:
            self.backbone.requires_grad_(False)
        self.only_head = only_head
        self.records: list[dict[str, Any]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.backbone(batch[0])).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(
            filter(lambda p: p.requires_grad, self.parameters()) if self.only_head else self.parameters()
        )

    def on_train_batch_end(self, *args: Any) -> None:
        self.records.append(
            {
                "masters": self.plugin.masters(),
                "dtypes": {name: param.dtype for name, param in self.named_parameters()},
                "extra": sum(tensor.numel() for tensor in self.plugin.master_tensors()),
                "lr": [group["lr"] for group in self.trainer.optimizers[0].param_groups],
            }
        )


def test_frozen_parameters_stay_fp32_take_no_copy_and_keep_every_bit():
    module = Backbone()
    before = values(module.backbone)
    quiet_trainer(fp16_master()).fit(module)
    last = module.records[-1]
    assert last["dtypes"]["backbone.weight"] == FP32
    assert last["extra"] == 5  # the head
    assert_same(values(module.backbone), before)


def test_frozen_parameters_become_fp16_with_an_exact_master_at_their_first_gradient():
    class Unfreezes(Backbone):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.backbone.requires_grad_(True)

    module = Unfreezes(MOMENTUM)
    initial = values(module)
    quiet_trainer(fp16_master()).fit(module)
    kinds = [record["dtypes"]["backbone.weight"] for record in module.records]
    assert kinds == [FP32, FP32, FP16, FP16]
    assert [record["extra"] for record in module.records] == [5, 5, 25, 25]
    assert_replays(module, initial)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_module_with_frozen_parts_trains_with_and_without_autocast(autocast):
    module = Backbone()
    rows = random_rows()
    module.rows = rows if autocast else (rows[0].half(), rows[1])
    before = values(module.backbone)
    quiet_trainer(fp16_master(autocast=autocast)).fit(module)
    assert_same(values(module.backbone), before)
    assert module.plugin.applied_steps == 4


def test_a_frozen_parameter_that_is_unfrozen_in_mid_window_trains_as_in_fp32():
    class Unfreezes(Backbone):
        def on_train_batch_start(self, batch, batch_idx):
            self.backbone.requires_grad_(batch_idx % 2 == 1)

    module = Unfreezes(MOMENTUM)
    initial = values(module)
    quiet_trainer(fp16_master(), accumulate_grad_batches=2, max_epochs=2).fit(module)
    assert module.plugin.applied_steps == 4
    assert_replays(module, initial)


class Finetuning(BackboneFinetuning):
    """Unfreezes at epoch 1, and at a resume past it."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, verbose=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        super().finetune_function(pl_module, epoch, optimizer)
        if epoch > self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_backbone_finetuning_trains_and_resumes_bit_for_bit(optimizer, tmp_path):
    start = Backbone(optimizer, frozen=False, only_head=True)
    whole, first, resumed = (copy.deepcopy(start) for _ in range(3))
    quiet_trainer(fp16_master(), max_epochs=4, callbacks=[Finetuning()]).fit(whole)
    assert whole.records[3]["dtypes"]["backbone.weight"] == FP32
    assert whole.records[4]["dtypes"]["backbone.weight"] == FP16
    assert_same(list(whole.records[3]["masters"].values())[2:], values(start.backbone))
    trainer = quiet_trainer(fp16_master(), max_epochs=2, callbacks=[Finetuning()])
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    quiet_trainer(fp16_master(), max_epochs=4, callbacks=[Finetuning()]).fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert len(resumed.records) == 8
    for record, expected in zip(resumed.records, whole.records[8:], strict=True):
        assert_same(record["masters"].values(), expected["masters"].values())
        assert record["lr"] == expected["lr"]
        assert record["dtypes"] == expected["dtypes"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frozen_parameters_that_were_16_bit_before_take_no_copy_and_keep_their_value(dtype):
    class Base(Backbone):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            self.extra_bytes = sum(tensor.nbytes for tensor in self.plugin.master_tensors())

    module = Base()
    module.backbone.to(dtype)
    before = [value.float() for value in values(module.backbone)]
    quiet_trainer(fp16_master()).fit(module)
    assert_same([value.float() for value in values(module.backbone)], before)
    # at most what a parameter that never had a gradient may have beside it: 2 bytes per element
    assert module.extra_bytes <= 5 * 4 + 20 * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP32])
def test_a_frozen_base_of_any_dtype_can_be_unfrozen_skipped_trained_and_used_afterwards(dtype):
    class Unfreezes(Backbone):
        def training_step(self, batch, batch_idx):
            number = self.current_epoch * 4 + batch_idx
            self.backbone.requires_grad_(number >= 2)
            loss = super().training_step(batch, batch_idx)
            return loss * math.inf if number in (2, 3, 7) else loss

    module = Unfreezes(MOMENTUM)
    module.backbone.to(dtype)
    initial = [value.float() for value in values(module)]
    for epochs, applied in ((1, 2), (2, 5)):
        again = copy.deepcopy(module)
        again.gradients.clear()
        plugin = fp16_master()
        quiet_trainer(plugin, max_epochs=epochs).fit(again)
        assert plugin.applied_steps == applied
        for value, param in zip(fp32_run(initial, again.gradients, MOMENTUM), again.parameters(), strict=True):
            assert same_bits(param.detach().float(), value)
            assert param.grad is None or param.grad.dtype == param.dtype
        again.zero_grad()
        again.float()
        nn.functional.mse_loss(again.layer(again.backbone(again.rows[0])), again.rows[1]).backward()
        assert all(param.grad is not None and param.grad.dtype == FP32 for param in again.parameters())


def test_a_parameter_that_is_frozen_again_keeps_every_bit():
    class Refreezes(Backbone):
        def on_train_batch_start(self, batch, batch_idx):
            self.backbone.requires_grad_(batch_idx < 2)

    module = Refreezes(MOMENTUM, frozen=False)
    quiet_trainer(fp16_master()).fit(module)
    second, last = (list(module.records[index]["masters"].values())[2:] for index in (1, -1))
    assert_same(second, last)
    assert_same(values(module.backbone), last)


def test_a_module_that_is_frozen_entirely_trains_once_it_is_unfrozen():
    class AllFrozen(M):
        def on_train_batch_start(self, batch, batch_idx):
            self.layer.requires_grad_(True)

    module = AllFrozen(None, MOMENTUM)
    module.layer.requires_grad_(False)
    initial = values(module)
    quiet_trainer(fp16_master()).fit(module)
    assert_replays(module, initial)


# --- edits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_data", [False, True])
def test_clamping_between_steps_is_kept_and_elements_that_were_not_clamped_keep_their_bits(through_data):
    limit, half_ulp = 0.25, 2.0**-13

    class Clamps(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            before = self.plugin.masters()["layer.0.weight"]
            weight = self.layer[0].weight
            if through_data:
                weight.data.clamp_(-limit, limit)
            else:
                with torch.no_grad():
                    weight.clamp_(-limit, limit)
            after = self.plugin.masters()["layer.0.weight"]
            inside = before.abs() < limit * 0.99
            assert inside.any()
            assert not inside.all()
            assert same_bits(after[inside], before[inside])
            assert (weight.abs() <= limit).all()
            assert (after.abs() <= limit + half_ulp).all()
            self.clamped = after

        def on_before_optimizer_step(self, optimizer):
            if hasattr(self, "clamped"):
                assert same_bits(self.plugin.masters()["layer.0.weight"], self.clamped)

    module = Clamps(net(), ADAMW)
    quiet_trainer(fp16_master(), max_epochs=2).fit(module)
    assert (module.layer[0].weight.abs() <= limit + half_ulp).all()


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"])
def test_a_state_dict_that_is_loaded_in_mid_run_is_where_the_next_step_starts(hook):
    loaded = {"layer.weight": torch.tensor([[0.1, -0.3, 1 / 3, 1e-9]]), "layer.bias": torch.tensor([1e-5])}

    class Loads(M):
        pass

    setattr(Loads, hook, lambda self, *args: self.load_state_dict(loaded))
    module = Loads(None, partial(torch.optim.SGD, lr=1e-6, momentum=0.9))
    quiet_trainer(fp16_master(), max_steps=1).fit(module)
    assert_same(module.parameters(), fp32_run(list(loaded.values()), module.gradients, module.make_optimizer))


def test_a_weight_that_is_filled_starts_from_the_fill():
    class Fills(M):
        def on_train_start(self):
            with torch.no_grad():
                self.layer.weight.fill_(5)

    module = Fills()
    initial = [torch.full((1, 4), 5.0), module.layer.bias.detach().clone()]
    quiet_trainer(fp16_master(), max_steps=1).fit(module)
    assert_replays(module, initial)


def test_pruning_keeps_pruned_weights_at_zero():
    class Pruned(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            weight = module.layer[0].weight
            self.zero = (weight == 0).float().mean().item()

    watch = Pruned()
    pruning = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5, use_lottery_ticket_hypothesis=False)
    module = M(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)), ADAMW)
    trainer = quiet_trainer(fp16_master(), max_epochs=3, callbacks=[pruning, watch])
    trainer.fit(module)
    assert watch.zero >= 0.2
    assert trainer.precision_plugin.applied_steps == 12
    assert {param.dtype for param in module.parameters()} == {FP32}
    zeros = sum((layer.weight == 0).sum().item() for layer in (module.layer[0], module.layer[2]))
    assert zeros >= 40


@pytest.mark.parametrize("validate", [False, True])
def test_weight_averaging_ends_with_the_average_of_the_masters(validate):
    class Notes(M):
        def __init__(self, *args):
            super().__init__(*args)
            self.noted = []

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            self.noted.append(self.master())

    class EveryStep(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None

    module = Notes(None, MOMENTUM)
    limit = {"limit_val_batches": 1 if validate else 0, "val_check_interval": 2}
    quiet_trainer(fp16_master(), max_epochs=2, callbacks=[EveryStep()], **limit).fit(module)
    average = torch.stack(module.noted).mean(0)
    torch.testing.assert_close(module.layer.weight.detach(), average, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(average, module.noted[-1], rtol=1e-3)


def test_an_averaged_run_has_the_average_in_its_files_and_resumes_bit_for_bit(tmp_path):
    class Notes(M):
        def on_train_batch_end(self, *args):
            self.noted = [*getattr(self, "noted", []), self.plugin.masters()]

    def trainer(epochs):
        callbacks = [EMAWeightAveraging(decay=0.5), ModelCheckpoint(tmp_path, f"averaged-{epochs}")]
        return quiet_trainer(fp16_master(), max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks)

    start = Notes(net(), ADAMW)
    whole, half, resumed = (copy.deepcopy(start) for _ in range(3))
    trainer(4).fit(whole)
    trainer(2).fit(half)
    saved = torch.load(tmp_path / "averaged-2.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {FP32}
    assert_same(saved.values(), half.parameters())
    assert not same_bits(saved["layer.0.weight"], half.noted[-1]["layer.0.weight"])
    trainer(4).fit(resumed, ckpt_path=tmp_path / "averaged-2.ckpt")
    for record, expected in zip(resumed.noted, whole.noted[8:], strict=True):
        assert_same(record.values(), expected.values())
    assert_same(resumed.parameters(), whole.parameters())


def test_stochastic_weight_averaging_is_as_in_fp32():
    modules = [M(net(), partial(torch.optim.SGD, lr=0.01)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, precision in zip(modules, (fp16_master(), "32-true"), strict=True):
        quiet_trainer(precision, max_epochs=6, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=2)]).fit(module)
    for left, right in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-3)


def test_an_edit_while_steps_are_skipped_is_kept():
    class Edits(M):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.inf if batch_idx < 3 else loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                with torch.no_grad():
                    self.layer.weight[0, 1] = 0.5
            if batch_idx == 2:
                self.edited = self.plugin.masters()

    module = Edits()
    initial = values(module)
    initial[0][0, 1] = 0.5
    quiet_trainer(fp16_master()).fit(module)
    assert_same(module.edited.values(), initial)
    assert_replays(module, initial)


class SkipsAndEdits(M):
    """Three skipped steps, with an edit after the second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if batch_idx < 3 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                self.layer.weight[0, 1] = 0.5
        if batch_idx == 2:
            self.edited = self.plugin.masters()


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_an_edit_while_steps_are_skipped_is_kept_exactly_in_bf16_too(storage, said):
    module = SkipsAndEdits(optimizer=MOMENTUM)
    initial = values(module)
    initial[0][0, 1] = 0.5
    quiet_trainer(MasterWeightPrecision("bf16-master", master=storage, skip_nonfinite=True)).fit(module)
    assert_same(module.edited.values(), initial)
    assert_replays(module, initial)
    assert "edited where no edit is expected" not in said


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_an_edit_after_an_applied_step_and_before_a_skipped_one_is_kept_exactly_in_bf16(storage, said):
    class Edits(M):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx in (1, 2) else loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx < 3:
                with torch.no_grad():
                    self.layer.weight[0, batch_idx] = 1 / 3
                self.after = self.plugin.masters()["layer.weight"][0]

        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.before_step = self.plugin.masters()["layer.weight"][0]

    module = Edits(optimizer=MOMENTUM)
    quiet_trainer(MasterWeightPrecision("bf16-master", master=storage, skip_nonfinite=True)).fit(module)
    assert same_bits(module.before_step, module.after)
    assert module.after[:3].tolist() == [torch.tensor(1 / 3).bfloat16().item()] * 3
    assert "edited where no edit is expected" not in said


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "forward"])
def test_an_edit_within_a_step_is_kept_exactly(hook):
    class Edits(M):
        def edit(self, *args):
            with torch.no_grad():
                self.layer.weight[0, 0] = 0.3
            self.masters_then = self.plugin.masters()

        def training_step(self, batch, batch_idx):
            if hook == "forward":
                self.edit()
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            if hook == "on_before_optimizer_step":
                self.edit()

    if hook not in ("on_before_optimizer_step", "forward"):
        setattr(Edits, hook, Edits.edit)
    module = Edits()
    initial = values(module)
    quiet_trainer(fp16_master(), max_steps=1).fit(module)
    initial[0][0, 0] = torch.tensor(0.3).half().float()
    assert_same(module.masters_then.values(), initial)
    assert_replays(module, initial)


@pytest.mark.parametrize("cast", ["float", "half", "bfloat16", "double"])
def test_a_module_that_is_cast_in_mid_run_goes_on_with_16_bit_parameters_and_masters(cast):
    class Casts(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                getattr(self.layer, cast)()
            self.kind = self.layer.weight.dtype

    module = Casts(None, MOMENTUM)
    quiet_trainer(fp16_master()).fit(module)
    assert module.kind == FP16
    assert module.plugin.applied_steps == 4
    assert {param.dtype for param in module.parameters()} == {FP32}


def test_edits_in_validation_and_around_manual_steps_are_kept():
    class Edits(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.layer.weight[0, 0] = 0.125

        def validation_step(self, batch, batch_idx):
            with torch.no_grad():
                self.layer.weight[0, 1] = 0.25

    module = Edits(None, MOMENTUM)
    quiet_trainer(fp16_master(), limit_val_batches=1).fit(module)
    assert module.layer.weight[0, :2].tolist() == [0.125, 0.25]


@both_fp16
def test_the_learning_rate_finder_leaves_masters_scale_and_counts_as_they_were(precision, tmp_path):
    class Finds(M):
        def __init__(self):
            super().__init__(net())
            self.lr = 0.01

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 0 and self.trainer.num_val_batches != "tuning":
                plugin = self.plugin
                self.first = plugin.masters(), plugin.loss_scale, plugin.applied_steps, plugin.skipped_steps

    module = Finds()
    initial = values(module)
    scaler = DynamicLossScale(init_scale=2.0**7, growth_interval=2)
    finder = LearningRateFinder(num_training_steps=6, min_lr=1e-6, max_lr=1e-3)
    trainer = quiet_trainer(
        MasterWeightPrecision(precision, loss_scale=scaler), callbacks=[finder], default_root_dir=tmp_path,
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module)
    masters, loss_scale, applied, skipped = module.first
    assert_same(masters.values(), initial)
    assert (applied, skipped) == (0, 0)
    assert loss_scale == scaler
    assert trainer.precision_plugin.applied_steps == 4


# --- the cost of a step ------------------------------------------------------------------------------------------------------


class CountReads(TorchFunctionMode):
    """Counts the calls by which host code reads what is on a device; on a CPU they dispatch nothing."""

    READING = (
        Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.equal, torch.equal, Tensor.__bool__,
        Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__contains__, torch.nonzero, torch.allclose,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READING:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_in_a_fit(plugin: Precision, module: Any = None, **settings: Any) -> tuple[list[str], list[str]]:
    """What the plugin reads from the device in all its calls during a fit: as called, and as dispatched."""
    reads, dispatched = CountReads(), CountSyncs()

    def counted(name: str, base: type) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with reads, dispatched:
                return getattr(base, name)(self, *args, **kwargs)

        return run

    cls = type(plugin)
    names = ("optimizer_step", "backward")
    plugin.__class__ = type("Counted", (cls,), {name: counted(name, cls) for name in names})
    torch.manual_seed(0)
    module = CostNet() if module is None else module
    data = torch.utils.data.TensorDataset(torch.randn(16, 64), torch.randn(16, 1))
    quiet_trainer(plugin, **settings).fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return reads.seen, dispatched.seen


@pytest.mark.parametrize("like_a_device", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2])
@both_fp16
def test_an_fp16_step_reads_from_the_device_once(precision, accumulate, clip, like_a_device, monkeypatch):
    if like_a_device:
        monkeypatch.setattr(lightning_mp.masters, "known_equal", lambda left, right: False)
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    assert reads_in_a_fit(Precision(), **settings) == ([], [])
    plugin = MasterWeightPrecision(precision, loss_scale=LOW_SCALE)
    reads, dispatched = reads_in_a_fit(plugin, **settings)
    assert plugin.applied_steps == 8 // accumulate
    hosts = [name for name in reads if name != "numpy"]  # comparisons on a CPU, which `like_a_device` leaves out
    assert len(hosts) == 8 // accumulate, hosts
    assert set(hosts) == {"tolist"}
    assert dispatched == []
    if like_a_device:
        assert "numpy" not in reads


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed", "32-true"])
def test_without_a_check_of_gradients_a_step_reads_nothing(precision, monkeypatch):
    monkeypatch.setattr(lightning_mp.masters, "known_equal", lambda left, right: False)
    reads, dispatched = reads_in_a_fit(MasterWeightPrecision(precision), gradient_clip_val=1.0)
    assert [name for name in reads if name != "numpy"] == dispatched == []
    reads, _ = reads_in_a_fit(MasterWeightPrecision(precision, skip_nonfinite=True), gradient_clip_val=1.0)
    assert [name for name in reads if name != "numpy"] == ["tolist"] * 8


@both_fp16
def test_two_optimizers_on_one_backward_read_once(precision):
    class Two(CostNet):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            parts = (self.body, nn.ModuleList([self.norm, self.head]))
            return [torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True) for part in parts]

    plugin = MasterWeightPrecision(precision, loss_scale=LOW_SCALE)
    reads, _ = reads_in_a_fit(plugin, Two())
    assert plugin.applied_steps == 16
    assert [name for name in reads if name != "numpy"] == ["tolist"] * 8


@pytest.mark.parametrize("clip", ["lightning", "torch", "none"])
@both_fp16
def test_a_step_of_manual_optimization_reads_once_clipped_or_not(precision, clip):
    class Clips(CostNet):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            if clip == "lightning":
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            elif clip == "torch":
                nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()

    plugin = MasterWeightPrecision(precision, loss_scale=LOW_SCALE)
    reads, dispatched = reads_in_a_fit(plugin, Clips())
    assert plugin.applied_steps == 8
    assert [name for name in reads if name != "numpy"] == ["tolist"] * 8
    assert dispatched == []


@both_fp16
def test_gradients_that_are_written_to_or_replaced_in_manual_optimization_are_checked(precision):
    class Replaces(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx == 1:
                self.layer.weight.grad = torch.full_like(self.layer.weight.grad, math.inf)
            if batch_idx == 2:
                self.layer.weight.grad.mul_(math.nan)
            if batch_idx == 3:
                self.layer.weight.grad = torch.ones_like(self.layer.weight, dtype=FP32)
            optimizer.step()

    module = Replaces()
    initial = values(module)
    plugin = MasterWeightPrecision(precision, loss_scale=LOW_SCALE)
    quiet_trainer(plugin).fit(module)
    assert (plugin.applied_steps, plugin.skipped_steps) == (2, 2)
    assert same_bits(module.gradients[1][0], torch.ones(1, 4))
    assert_replays(module, initial)


def test_a_read_in_the_step_would_be_counted():
    class Reads(CostNet):
        def on_before_optimizer_step(self, optimizer):
            self.head.weight.sum().item()
            float(self.head.bias)
            bool(self.head.bias > 0)

    reads, _ = reads_in_a_fit(fp16_master(), Reads())
    assert reads.count("item") == 8
    assert len([name for name in reads if name not in ("numpy", "tolist")]) >= 24


# --- settings ----------------------------------------------------------------------------------------------------------------

BAD_SETTINGS = [
    ({"precision": "fp16-master"}, ("'fp16-master'", "16-master", "16-mixed")),
    ({"precision": "16-true"}, ("'16-true'", "Lightning's own")),
    ({"precision": 16}, ("16", "16-mixed")),
    ({"precision": None}, ("None", "16-mixed")),
    ({"precision": torch.float16}, ("torch.float16", "16-mixed")),
    ({"precision": ["16-mixed"]}, ("16-mixed", "16-master")),
    ({"loss_scale": "static"}, ("'static'", "'none', 'dynamic' or 'adaptive'")),
    ({"loss_scale": "Dynamic"}, ("'Dynamic'", "'none', 'dynamic' or 'adaptive'")),
    ({"loss_scale": "1024"}, ("'1024'", "a number above 0")),
    ({"loss_scale": 0}, ("0", "above 0")),
    ({"loss_scale": -2.0}, ("-2.0", "above 0")),
    ({"loss_scale": math.inf}, ("inf", "finite")),
    ({"loss_scale": math.nan}, ("nan", "finite")),
    ({"loss_scale": 2.0**200}, ("1.60694e+60", "fp32")),
    ({"loss_scale": True}, ("True", "DynamicLossScale(")),
    ({"loss_scale": [1024]}, ("[1024]", "DynamicLossScale(")),
    ({"loss_scale": {"scale": 2}}, ("{'scale': 2}", "DynamicLossScale(")),
    ({"loss_scale": DynamicLossScale}, ("DynamicLossScale", "'dynamic'")),
    ({"loss_scale": torch.amp.GradScaler("cpu")}, ("GradScaler", "DynamicLossScale(")),
    ({"loss_scale": torch.tensor([1.0, 2.0])}, ("tensor", "DynamicLossScale(")),
    ({"skip_nonfinite": "yes"}, ("'yes'", "True or False")),
    ({"skip_nonfinite": 1}, ("1", "True or False")),
    ({"skip_nonfinite": None}, ("None", "True or False")),
    ({"max_consecutive_skips": 0}, ("0", "1 or more")),
    ({"max_consecutive_skips": -1}, ("-1", "1 or more")),
    ({"max_consecutive_skips": 2.5}, ("2.5", "whole number")),
    ({"max_consecutive_skips": math.inf}, ("inf", "whole number")),
    ({"max_consecutive_skips": "3"}, ("'3'", "whole number")),
    ({"max_consecutive_skips": True}, ("True", "whole number")),
    ({"max_consecutive_skips": None}, ("None", "whole number")),
    ({"reduce_dtype": "parameter"}, ("'parameter'", "16-master", "fp32")),
    ({"reduce_dtype": "fp16"}, ("'fp16'", "'fp32'", "'parameter'")),
    ({"reduce_dtype": torch.float32}, ("torch.float32", "'fp32'")),
    ({"master": "full"}, ("'full'", "'split'", "'copy'")),
    ({"autocast": 0}, ("0", "True or False")),
    ({"bucket_mib": math.nan}, ("nan", "0 or more")),
    ({"bucket_mib": "4"}, ("'4'", "0 or more")),
]


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_a_bad_setting_is_refused_with_its_value_and_the_legal_ones(settings, words):
    with pytest.raises((ValueError, MisconfigurationException)) as caught:
        MasterWeightPrecision(**{"precision": "16-master", **settings})
    for word in words:
        assert word in str(caught.value), caught.value
    (name,) = settings
    assert name.replace("_", " ") in str(caught.value).lower().replace("_", " ")


BAD_SCALERS = [
    (DynamicLossScale, {"init_scale": 0}, ("init_scale", "0")),
    (DynamicLossScale, {"init_scale": "2**16"}, ("init_scale", "2**16", "number")),
    (DynamicLossScale, {"growth_factor": 1.0}, ("growth_factor", "above 1")),
    (DynamicLossScale, {"backoff_factor": 1.5}, ("backoff_factor", "1.5", "below 1")),
    (DynamicLossScale, {"growth_interval": 0}, ("growth_interval", "0", "at least 1")),
    (DynamicLossScale, {"growth_interval": 2.5}, ("growth_interval", "2.5", "whole")),
    (DynamicLossScale, {"hysteresis": 0}, ("hysteresis", "0", "at least 1")),
    (DynamicLossScale, {"hysteresis_mode": "both"}, ("both", "'cumulative' or 'consecutive'")),
    (DynamicLossScale, {"min_scale": 2.0**20}, ("min_scale", "1.04858e+06", "init_scale")),
    (DynamicLossScale, {"max_scale": 2.0}, ("max_scale = 2", "init_scale")),
    (AdaptiveLossScale, {"window": 0}, ("window", "0", "1 to 1024")),
    (AdaptiveLossScale, {"overflow_probability": 1.0}, ("overflow_probability", "between 0 and 1")),
    (AdaptiveLossScale, {"margin_bits": -1}, ("margin_bits", "-1")),
    (AdaptiveLossScale, {"growth_bits": 0}, ("growth_bits", "0", "1 to 64")),
    (StaticLossScale, {"scale": -1}, ("scale", "-1", "above 0")),
    (StaticLossScale, {"scale": None}, ("scale", "None", "number")),
]


@pytest.mark.parametrize(("cls", "settings", "words"), BAD_SCALERS, ids=lambda value: str(value)[:40])
def test_a_bad_setting_of_a_scaler_is_refused_with_its_value_and_the_legal_ones(cls, settings, words):
    with pytest.raises(ValueError, match="must") as caught:
        cls(**settings)
    for word in words:
        assert word in str(caught.value), caught.value


@both_fp16
@pytest.mark.parametrize("value", [None, 0, "static", True, -1.0, math.nan], ids=str)
def test_a_bad_loss_scale_cannot_be_set_later_either(precision, value):
    plugin = MasterWeightPrecision(precision, loss_scale=8.0)
    with pytest.raises(ValueError, match="must"):
        plugin.loss_scale = value
    assert plugin.loss_scale == StaticLossScale(8.0)


@pytest.mark.parametrize("number", [1, 3, 1000, 0.5, 2.0**-14, 2.0**20], ids=str)
@both_fp16
def test_a_number_is_a_static_scale_and_trains(precision, number):
    module = M()
    plugin = MasterWeightPrecision(precision, loss_scale=number)
    assert plugin.loss_scale == StaticLossScale(number)
    reference = copy.deepcopy(module)
    quiet_trainer(plugin).fit(module)
    assert plugin.loss_scale.scale == number
    quiet_trainer("32-true").fit(reference)
    if 1 <= number <= 1000:
        assert plugin.applied_steps == 4
        for left, right in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("loss_scale", "cls"),
    [(None, AdaptiveLossScale), ("adaptive", AdaptiveLossScale), ("dynamic", DynamicLossScale), ("none", NoLossScale)],
    ids=str,
)
@both_fp16
def test_names_and_the_default_choose_a_scaler(precision, loss_scale, cls):
    plugin = MasterWeightPrecision(precision, loss_scale=loss_scale)
    assert isinstance(plugin.loss_scale, cls)
    assert isinstance(MasterWeightPrecision("bf16-master").loss_scale, NoLossScale)
    module = M(batch=4)
    quiet_trainer(plugin).fit(module)
    assert isinstance(plugin.loss_scale, cls)
    assert plugin.applied_steps + plugin.skipped_steps == 2


# --- copies and configs ------------------------------------------------------------------------------------------------------

SCALERS = [None, 1024.0, "dynamic", NoLossScale(), DynamicLossScale(init_scale=2.0**9, growth_interval=3, hysteresis=2)]
SCALERS += [AdaptiveLossScale(init_scale=2.0**7, window=5)]


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
@pytest.mark.parametrize("loss_scale", SCALERS, ids=str)
def test_a_copy_of_the_plugin_has_every_setting(loss_scale, copier):
    plugin = MasterWeightPrecision(
        "16-master", loss_scale=loss_scale, skip_nonfinite=True, max_consecutive_skips=7, fp32_modules=["norm", nn.Linear]
    )
    copied = copier(plugin)
    assert copied.loss_scale == plugin.loss_scale
    assert (copied.skip_nonfinite, copied.max_consecutive_skips) == (True, 7)
    assert repr(copied) == repr(plugin)
    for word in ("'16-master'", "skip_nonfinite=True", "max_consecutive_skips=7", "loss_scale="):
        assert word in repr(plugin)


@pytest.mark.parametrize("when", ["mid-run", "after"])
def test_a_copy_of_a_plugin_that_ran_is_the_recipe_and_trains_alike(when):
    copies = []

    class Copies(M):
        def on_train_batch_end(self, *args):
            if when == "mid-run":
                copies[:] = [copy.deepcopy(self.plugin), pickle.loads(pickle.dumps(self.plugin))]

    module, again = Copies(), M()
    again.load_state_dict(module.state_dict())
    plugin = fp16_master(loss_scale=DynamicLossScale(init_scale=2.0**10, growth_interval=1))
    quiet_trainer(plugin).fit(module)
    if when == "after":
        copies[:] = [copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))]
    for copied in copies:
        assert copied.loss_scale.scale == 2.0**10
        assert (copied.applied_steps, copied.skipped_steps, copied.master_tensors()) == (0, 0, [])
    assert plugin.loss_scale.scale == 2.0**14
    quiet_trainer(copies[0]).fit(again)
    assert_same(module.parameters(), again.parameters())


CLI = Path(__file__).parent / "cli"


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(CLI)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(CLI))])
    monkeypatch.delitem(sys.modules, "toy_modules", raising=False)

    def call(plugin: Any, *args: str, command: str = "fit") -> int:
        (tmp_path / "plugin.yaml").write_text(yaml.safe_dump({"trainer": {"precision_plugin": plugin}}))
        files = [f"--config={CLI / 'toy.yaml'}", f"--config={tmp_path / 'plugin.yaml'}"]
        return main([command, *files, f"--trainer.default_root_dir={tmp_path}", *args])

    return call


def plugin_in_yaml(loss_scale: Any, **settings: Any) -> dict[str, Any]:
    init_args = {"precision": "16-master", "loss_scale": loss_scale, **settings}
    return {"class_path": "lightning_mp.MasterWeightPrecision", "init_args": init_args}


IN_YAML = {
    "none": (None, {"kind": "adaptive"}),
    "number": (256, {"kind": "static", "scale": 256.0}),
    "fraction": (0.5, {"kind": "static", "scale": 0.5}),
    "name": ("dynamic", {"kind": "dynamic", "init_scale": 2.0**15}),
    "class": ({"class_path": "lightning_mp.NoLossScale"}, {"kind": "none"}),
    "class with settings": (
        {"class_path": "lightning_mp.DynamicLossScale", "init_args": {"init_scale": 512, "growth_interval": 3}},
        {"kind": "dynamic", "init_scale": 512.0, "growth_interval": 3},
    ),
    "adaptive with settings": (
        {"class_path": "lightning_mp.AdaptiveLossScale", "init_args": {"window": 3}},
        {"kind": "adaptive", "window": 3},
    ),
}


@pytest.mark.parametrize("kind", IN_YAML)
def test_a_config_names_the_loss_scale(kind, cli, tmp_path):
    given, expected = IN_YAML[kind]
    assert cli(plugin_in_yaml(given, max_consecutive_skips=9)) == 0
    (path,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)["lightning_mp"]["loss_scaling"]["loss_scale"]
    assert {key: saved[key] for key in expected} == expected
    # and the config that the run saved can be used again
    (config,) = tmp_path.rglob("config.yaml")
    assert main(["fit", f"--config={config}", f"--trainer.default_root_dir={tmp_path / 'again'}"]) == 0


def test_a_printed_config_shows_the_scaler_and_can_be_used(cli, tmp_path, capsys):
    given = {"class_path": "lightning_mp.DynamicLossScale", "init_args": {"growth_interval": 3}}
    with pytest.raises(SystemExit) as ended:
        cli(plugin_in_yaml(given), "--print_config")
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed)
    plugin = config["trainer"]["precision_plugin"]["init_args"]
    assert plugin["loss_scale"]["init_args"]["growth_interval"] == 3
    assert plugin["max_consecutive_skips"] == 50
    (tmp_path / "printed.yaml").write_text(printed)
    assert main(["fit", f"--config={tmp_path / 'printed.yaml'}", f"--trainer.default_root_dir={tmp_path}"]) == 0


@pytest.mark.parametrize(
    ("loss_scale", "words"),
    [
        ("static", ("static",)),
        (-1, ("-1",)),
        ({"class_path": "lightning_mp.DynamicLossScale", "init_args": {"growth_interval": 0}}, ("growth_interval",)),
        ({"class_path": "lightning_mp.DynamicLossScale", "init_args": {"growth": 2}}, ("growth",)),
    ],
    ids=["name", "number", "setting", "argument"],
)
def test_a_bad_loss_scale_in_a_config_is_refused_before_training(loss_scale, words, cli, capsys):
    try:
        status: Any = cli(plugin_in_yaml(loss_scale))
    except SystemExit as ended:
        status = ended.code
    message = capsys.readouterr().err
    assert status == 2
    assert "Traceback" not in message
    for word in words:
        assert word in message


def test_the_command_line_sets_the_scaler_piece_by_piece(cli, tmp_path):
    plugin = "--trainer.precision_plugin"
    args = [f"{plugin}.loss_scale=DynamicLossScale", f"{plugin}.loss_scale.growth_interval=3", f"{plugin}.skip_nonfinite=true"]
    assert cli({"class_path": "lightning_mp.MasterWeightPrecision", "init_args": {"precision": "16-mixed"}}, *args) == 0
    (path,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)["lightning_mp"]["loss_scaling"]["loss_scale"]
    assert (saved["kind"], saved["growth_interval"]) == ("dynamic", 3)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_command_line_evaluates_and_resumes_from_a_file_of_an_fp16_run(command, cli, tmp_path):
    plugin = plugin_in_yaml({"class_path": "lightning_mp.DynamicLossScale", "init_args": {"init_scale": 512}})
    assert cli(plugin) == 0
    (path,) = tmp_path.rglob("*.ckpt")
    assert cli(plugin, f"--ckpt_path={path}", "--trainer.logger=false", command=command) == 0
    assert cli(plugin, f"--ckpt_path={path}", "--trainer.max_steps=8", "--trainer.logger=false") == 0


@pytest.mark.parametrize("name", ["16-master", "16-mixed"])
def test_the_command_line_takes_the_fp16_precisions_by_name(name, cli, tmp_path):
    assert cli(name) == 0
    (path,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_mp"]["precision"] == name
    assert {value.dtype for value in saved["state_dict"].values()} == {FP32}


def test_a_fit_with_a_file_shows_the_masters_to_everybody(tmp_path):
    module = M(net(), ADAMW)
    quiet_trainer(fp16_master(), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, "last")]).fit(module)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert_same(saved.values(), module.parameters())
