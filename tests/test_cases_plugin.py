"""Faults that users of neighbouring projects reported, met by the plugin and its masters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_mp.numerics.split import split
from tests.modules import (
    QUIET,
    LinearLoss,
    M,
    Manual,
    assert_replays,
    assert_same,
    bf16_master,
    quiet_trainer,
    random_rows,
    values,
)
from tests.reference import fp32_run, same_bits

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]
both_storages = pytest.mark.parametrize("storage", ["split", "copy"])

# relative to the quantity compared
TOLERANCES = {
    "gradient norms": 0.05,  # weights and activations are rounded to bf16, 2^-9 each, and errors of a fit are differences
    "minimum": 0.04,  # a minimum of a loss that is computed from weights in bf16 is known to bf16
    "gradients rounded one by one": 2**-9,  # half an ulp of bf16
}


# --- A1: masters start from the fp32 values, NVIDIA/TransformerEngine#1121 -------------------------------------------------


class KeepsFirstMasters(M):
    def on_train_start(self) -> None:
        self.first = self.plugin.masters()
        self.first_dtypes = [param.dtype for param in self.parameters()]


def test_masters_start_from_the_fresh_fp32_values_bit_for_bit(plugin):
    module = KeepsFirstMasters()
    before = values(module)
    quiet_trainer(plugin).fit(module)
    assert module.first_dtypes == [torch.bfloat16] * 2
    assert_same(module.first.values(), before)
    assert any(value.bfloat16().float().ne(value).any() for value in before)


def test_masters_start_from_the_values_of_a_plain_fp32_checkpoint_bit_for_bit(plugin, tmp_path):
    trained = M()
    trainer = pl.Trainer(**QUIET)
    trainer.fit(trained)
    trainer.save_checkpoint(tmp_path / "fp32.ckpt")
    module = KeepsFirstMasters()
    quiet_trainer(plugin, max_epochs=2).fit(module, ckpt_path=tmp_path / "fp32.ckpt", weights_only=True)
    assert module.first_dtypes == [torch.bfloat16] * 2
    assert_same(module.first.values(), values(trained))


# --- A2: edits between steps are kept, deepspeedai/DeepSpeed#2424 ------------------------------------------------------------


class Clamps(M):
    """Clamps its weight to +-0.01 after each step, and notes masters before, after, and at the next batch."""

    def __init__(self, through_data: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.through_data = through_data
        self.largest: list[float] = []
        self.touched: list[bool] = []
        self.edited: Tensor | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        weight, master = self.layer.weight, self.master()
        self.largest.append(master.abs().max().item())
        before = weight.detach().clone()
        if self.through_data:
            weight.data.clamp_(-0.01, 0.01)
        else:
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)
        touched = before != weight
        self.touched += touched.flatten().tolist()
        self.edited = torch.where(touched, weight.detach().float(), master)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.edited is not None:
            assert_same([self.master()], [self.edited])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.edited is not None:
            # what the step starts from: seen through the result, in on_train_batch_end
            self.expected = fp32_run([self.edited], [self.gradients[-1][:1]], self.make_optimizer)


@both_storages
@pytest.mark.parametrize("through_data", [False, True], ids=["no_grad", "data"])
def test_a_clamped_weight_steps_from_the_clamped_value_and_other_elements_keep_their_bits(storage, through_data):
    class Checked(Clamps):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.edited is not None:
                assert_same([self.master()], self.expected)
                self.checked = True
            super().on_train_batch_end(*args)

    # small gradients, so that some elements stay within the bounds
    module = Checked(through_data, rows=tuple(0.05 * part for part in random_rows()))
    quiet_trainer(bf16_master(storage), max_epochs=3).fit(module)
    assert module.checked
    assert True in module.touched
    assert False in module.touched
    assert max(module.largest[1:]) < 0.02


def test_a_weight_that_is_filled_in_on_train_start_steps_from_the_filled_value(plugin):
    class Fills(M):
        def on_train_start(self) -> None:
            self.bias_before = self.master("layer.bias")
            with torch.no_grad():
                self.layer.weight.fill_(5)

    module = Fills()
    quiet_trainer(plugin, max_steps=1).fit(module)
    assert_replays(module, [torch.full((1, 4), 5.0), module.bias_before])


# --- A3: finetuning callbacks, Lightning-AI/pytorch-lightning#6891 -----------------------------------------------------------


MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)


class Finetuned(M):
    def __init__(self, optimizer: Any = MOMENTUM) -> None:
        super().__init__(nn.Identity(), optimizer)
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.lrs: list[dict[int, float]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])).float(), batch[1])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.lrs.append({id(param): group["lr"] for group in optimizer.param_groups for param in group["params"]})

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(param for param in self.parameters() if param.requires_grad)


class Finetuning(BackboneFinetuning):
    """Lightning's, which restores its groups at resume but leaves the backbone frozen, in fp32 too; made up for here."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, verbose=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch > self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


@both_storages
def test_a_backbone_that_is_unfrozen_late_gets_fp32_masters_with_its_first_gradient(storage):
    module = Finetuned(partial(SGD, lr=0.05))
    before = values(module)
    trainer = quiet_trainer(bf16_master(storage), max_epochs=4, callbacks=[Finetuning()])
    trainer.fit(module)
    assert len(trainer.optimizers[0].param_groups) == 2
    expected = [value.clone() for value in before]
    for lrs, gradients in zip(module.lrs, module.gradients, strict=True):
        for param, value, gradient in zip(module.parameters(), expected, gradients, strict=True):
            if gradient is not None:
                value.add_(gradient.float(), alpha=-lrs[id(param)])
    assert module.gradients[0][0] is None
    assert module.gradients[-1][0] is not None
    assert_same(module.parameters(), expected)


@both_storages
def test_a_finetuning_run_that_is_resumed_equals_the_uninterrupted_run(storage, tmp_path):
    start = Finetuned()
    whole = copy.deepcopy(start)
    trainer = quiet_trainer(bf16_master(storage), max_epochs=4, callbacks=[Finetuning()])
    trainer.fit(whole)

    first = quiet_trainer(bf16_master(storage), max_epochs=2, callbacks=[Finetuning()])
    first.fit(copy.deepcopy(start))
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Finetuned()
    second = quiet_trainer(bf16_master(storage), max_epochs=4, callbacks=[Finetuning()])
    second.fit(resumed, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert_same(resumed.parameters(), values(whole))
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert_same(
            [second.optimizers[0].state[one]["momentum_buffer"]], [trainer.optimizers[0].state[other]["momentum_buffer"]]
        )


@both_storages
def test_a_finetuning_run_that_is_resumed_from_a_checkpoint_written_in_mid_run_equals_the_uninterrupted_run(storage, tmp_path):
    start = Finetuned()
    whole = copy.deepcopy(start)
    saver = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    trainer = quiet_trainer(bf16_master(storage), max_epochs=4, callbacks=[Finetuning(), saver], enable_checkpointing=True)
    trainer.fit(whole)
    resumed = Finetuned()
    second = quiet_trainer(bf16_master(storage), max_epochs=4, callbacks=[Finetuning()])
    second.fit(resumed, ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    assert_same(resumed.parameters(), values(whole))


# --- A4: toggling, Lightning-AI/pytorch-lightning#5292 ---------------------------------------------------------------------


class Toggles(M):
    """Two networks with an optimizer each; ``b`` reads what ``a`` makes. One parameter of ``b`` is frozen by the user."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.b.bias.requires_grad_(False)
        self.seen: list[Any] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.b(self.a(batch[0])).float(), batch[1])

    def look(self) -> None:
        self.seen.append([(name, param.requires_grad, param.grad is None) for name, param in self.named_parameters()])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.look()
            self.manual_backward(self.loss(batch))
            self.look()
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.look()

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(self.a.parameters(), lr=0.1), Adam(self.b.parameters(), lr=0.1)]


def test_toggling_sets_the_flags_and_leaves_the_gradients_that_it_does_in_fp32(plugin):
    fp32 = Toggles()
    module = copy.deepcopy(fp32)
    quiet_trainer("32-true").fit(fp32)
    frozen = module.b.bias.detach().clone()
    quiet_trainer(plugin).fit(module)
    assert module.seen == fp32.seen
    assert ("b.weight", False, True) in module.seen[1]
    assert all(("b.bias", False, True) in seen for seen in module.seen)
    assert_same([module.b.bias], [frozen])


# --- A5: only parameters are cast, Lightning-AI/pytorch-lightning#18982 ----------------------------------------------------


class ManyDtypes(M):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.register_buffer("inv_freq", 10000.0 ** -torch.linspace(0, 1, 4))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.linspace(0, 1, 3)))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.spectrum = nn.Parameter(torch.polar(torch.ones(3), torch.linspace(0, 1, 3)))
        self.fine = nn.Parameter(torch.linspace(0, 1, 3, dtype=torch.float64))
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen = {name: tensor.dtype for name, tensor in [*self.named_parameters(), *self.named_buffers()]}
        self.seen["input"] = batch[0].dtype
        return self.loss(batch) + self.spectrum.abs().sum() + self.fine.square().sum().float()


def test_buffers_and_tensors_that_are_not_fp32_keep_their_dtype(plugin):
    module = ManyDtypes()
    before = values(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    quiet_trainer(plugin).fit(module)
    bf16 = {"layer.0.weight", "layer.0.bias", "layer.2.weight", "layer.2.bias"}
    assert {name for name, dtype in module.seen.items() if dtype == torch.bfloat16} == bf16
    assert module.seen["layer.1.weight"] == torch.float32
    assert module.seen["layer.1.running_mean"] == torch.float32
    assert module.seen["spectrum"] == torch.complex64
    assert module.seen["fine"] == torch.float64
    assert module.seen["input"] == torch.float32
    for name, buffer in module.named_buffers():
        assert module.seen[name] == buffer.dtype == buffers[name].dtype
        if not name.startswith("layer.1."):
            assert torch.equal(buffer, buffers[name])
    for (name, param), value in zip(module.named_parameters(), before, strict=True):
        assert param.dtype == value.dtype
        # the bias before a BatchNorm has no gradient to speak of
        assert name == "layer.0.bias" or not torch.equal(param, value)


# --- A6: one set of gradients, NVIDIA/apex#507 -----------------------------------------------------------------------------


class NotesNorms(M):
    def __init__(self, zeroing: str = "default") -> None:
        super().__init__()
        self.zeroing = zeroing
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        norms = [param.grad.float().norm() for param in self.parameters()]
        self.norms.append(torch.stack(norms).norm().item())

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self.zeroing == "optimizer to zero":
            optimizer.zero_grad(set_to_none=False)
        elif self.zeroing == "module":
            self.zero_grad()
        elif self.zeroing == "module to zero":
            self.zero_grad(set_to_none=False)
        elif self.zeroing != "in on_before_zero_grad":
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        if self.zeroing == "in on_before_zero_grad":
            for param in self.parameters():
                param.grad = None


@both_storages
@pytest.mark.parametrize(
    "zeroing",
    ["default", "optimizer to zero", "module", "module to zero", "in on_before_zero_grad"],
    ids=lambda z: z.replace(" ", "-"),
)
def test_gradients_do_not_pile_up(storage, zeroing):
    fp32 = NotesNorms(zeroing)
    module = copy.deepcopy(fp32)
    before = values(module)
    quiet_trainer("32-true", max_epochs=3).fit(fp32)
    quiet_trainer(bf16_master(storage), max_epochs=3).fit(module)
    assert len(module.norms) == 12
    assert module.norms == pytest.approx(fp32.norms, rel=TOLERANCES["gradient norms"], abs=0.02)
    assert_replays(module, before)


# --- A7: accumulation in fp32, deepspeedai/DeepSpeed#1800 ------------------------------------------------------------------

LARGE_THEN_SMALL = torch.tensor([256.0] + [0.25] * 64).view(-1, 1)


class OneScalar(LinearLoss):
    """Its gradient is the row's value; ``scale`` undoes the division by the number of micro-batches, which bf16 cannot hold."""

    def __init__(self, scale: float = 1.0, repeat: int = 1) -> None:
        super().__init__(LARGE_THEN_SMALL.repeat(repeat, 1))
        self.scale = scale
        nn.init.constant_(self.layer.weight, 0.3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * self.scale


@pytest.mark.parametrize("windows", [1, 2])
def test_small_gradients_after_a_large_one_are_accumulated_as_in_fp32(plugin, windows):
    module = OneScalar(65.0, windows)
    quiet_trainer(plugin, accumulate_grad_batches=65).fit(module)
    assert len(module.gradients) == windows
    assert [gradient[0].item() for gradient in module.gradients] == [272.0] * windows
    assert_replays(module, [torch.tensor([[0.3]])])
    assert module.layer.weight.item() == pytest.approx(0.3 - 272.0 * windows, rel=1e-6)


def test_accumulated_gradients_that_bf16_cannot_hold_lose_no_more_than_their_own_rounding(plugin):
    module = OneScalar()
    quiet_trainer(plugin, accumulate_grad_batches=65).fit(module)
    fp32 = OneScalar()
    quiet_trainer("32-true", accumulate_grad_batches=65).fit(fp32)
    step, expected = 0.3 - module.layer.weight.item(), 0.3 - fp32.layer.weight.item()
    assert step == pytest.approx(expected, rel=TOLERANCES["gradients rounded one by one"])
    assert expected - 256 / 65 == pytest.approx(16 / 65, rel=1e-4)


@both_storages
@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_manual_backwards_before_a_step_are_accumulated_as_in_fp32(storage, set_to_none):
    class Accumulates(OneScalar):
        def __init__(self) -> None:
            super().__init__(repeat=2)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            if batch_idx % 65 == 64:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    module = Accumulates()
    quiet_trainer(bf16_master(storage)).fit(module)
    assert [gradient[0].item() for gradient in module.gradients] == [272.0, 272.0]
    assert_replays(module, [torch.tensor([[0.3]])])


# --- A9: frozen parameters, deepspeedai/DeepSpeed#8029 ---------------------------------------------------------------------


class PartlyFrozen(M):
    def __init__(self) -> None:
        super().__init__(optimizer=partial(AdamW, lr=0.1, weight_decay=0.5))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.nothing = nn.Linear(4, 0)
        self.unused = nn.Linear(4, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.frozen(batch[0])).float(), batch[1]) + self.nothing(batch[0]).sum()

    def configure_optimizers(self) -> Optimizer:
        groups = [
            [*self.layer.parameters(), *self.unused.parameters()],
            [*self.frozen.parameters()],
            [*self.nothing.parameters()],
        ]
        return self.make_optimizer([{"params": group} for group in groups])

    def on_train_end(self) -> None:
        self.trainable = [name for name, param in self.named_parameters() if param.requires_grad]
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.plugin.master_tensors())
        self.flags = [tensor.requires_grad for tensor in self.plugin.master_tensors()]


@both_storages
def test_frozen_and_unused_weights_do_not_change_and_have_no_master_beyond_the_remainder(storage):
    module = PartlyFrozen()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    trainable = [name for name, param in module.named_parameters() if param.requires_grad]
    quiet_trainer(bf16_master(storage)).fit(module)
    for name, param in module.named_parameters():
        trained = name.startswith("layer")
        assert same_bits(param.detach(), before[name]) is not trained or not param.numel()
    assert module.trainable == trainable == [name for name, param in module.named_parameters() if param.requires_grad]
    trained, rest = 5, 20 + 20
    assert module.bytes == {"split": 2 * (trained + rest), "copy": 4 * trained + 2 * rest}[storage]
    assert not any(module.flags)


# --- A10: metric states, Lightning-AI/torchmetrics#1561 --------------------------------------------------------------------


def test_metrics_count_past_what_bf16_can_count(plugin):
    class Counts(M):
        def __init__(self) -> None:
            super().__init__(rows=(torch.ones(1000, 4), torch.ones(1000, 1)), batch=1, optimizer=partial(SGD, lr=0.0))
            self.mean, self.error = MeanMetric(), MeanSquaredError()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.mean.update(batch[1].squeeze())
            self.error.update(2 * batch[1], batch[1])
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.dtypes = (self.mean.mean_value.dtype, self.error.sum_squared_error.dtype)
            self.sums = (self.mean.mean_value.item(), self.mean.weight.item(), self.error.sum_squared_error.item())
            self.results = (self.mean.compute().item(), self.error.compute().item(), self.error.total.item())

    module = Counts()
    quiet_trainer(plugin).fit(module)
    assert module.dtypes == (torch.float32, torch.float32)
    assert module.sums == (1000.0, 1000.0, 1000.0)
    assert module.results == (1.0, 1.0, 1000)


# --- A12: the default dtype, Lightning-AI/pytorch-lightning#6927 -----------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed"])
def test_tensors_that_are_made_in_a_step_are_fp32(precision):
    class MakesTensors(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.positions = torch.arange(0.0, 300.0)
            self.made = [torch.zeros(2).dtype, torch.tensor(0.5).dtype, torch.empty(1).dtype, torch.get_default_dtype()]
            return self.loss(batch)

    module = MakesTensors()
    quiet_trainer(precision).fit(module)
    assert module.positions.unique().numel() == 300
    assert module.made == [torch.float32] * 4


def test_the_default_dtype_is_untouched_after_an_exception_in_a_step(plugin):
    class Breaks(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle of a step"):
        quiet_trainer(plugin).fit(Breaks())
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


# --- A13: optimizers that call the closure in step, davda54/sam#97 ---------------------------------------------------------


class SAM(Optimizer):
    """Sharpness-aware minimisation, as its users write it: a base optimizer over the same groups."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old"] = param.data.clone()
                    param.add_(param.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = self.state[param]["old"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


EXACT_ROWS = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 0.125, -0.5, 3.0], [-2.0, 0.5, 0.25, -0.75]])
CLOSURE_OPTIMIZERS = {
    # with no tolerance, as it ends a step early where two losses from rounded weights are equal
    "LBFGS": partial(LBFGS, lr=0.01, max_iter=4, tolerance_change=0.0),
    "LBFGS-strong-wolfe": partial(LBFGS, lr=0.01, max_iter=4, line_search_fn="strong_wolfe"),
    "SAM-SGD": partial(SAM, base=SGD, lr=0.01),
    "SAM-momentum": partial(SAM, base=SGD, lr=0.01, momentum=0.9),
    "SAM-AdamW": partial(SAM, base=AdamW, lr=0.01),
}


@both_storages
@pytest.mark.parametrize("name", ["LBFGS", "SAM-SGD", "SAM-momentum", "SAM-AdamW"])
def test_an_optimizer_with_a_closure_gives_the_fp32_result_where_gradients_are_exact(storage, name):
    fp32 = LinearLoss(EXACT_ROWS, CLOSURE_OPTIMIZERS[name])
    module = copy.deepcopy(fp32)
    quiet_trainer("32-true", max_epochs=3).fit(fp32)
    quiet_trainer(bf16_master(storage), max_epochs=3).fit(module)
    assert_same(module.parameters(), values(fp32))


@both_storages
@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
def test_an_optimizer_with_a_closure_reaches_the_fp32_minimum(storage, name):
    rows = random_rows(16)
    fp32 = M(optimizer=CLOSURE_OPTIMIZERS[name], rows=rows, batch=16)
    if name.startswith("LBFGS"):
        fp32.make_optimizer = partial(fp32.make_optimizer, lr=0.5)
    else:
        fp32.make_optimizer = partial(fp32.make_optimizer, lr=0.1)
    module = copy.deepcopy(fp32)
    before = values(module)
    quiet_trainer("32-true", max_epochs=10).fit(fp32)
    quiet_trainer(bf16_master(storage), max_epochs=10).fit(module)
    for param, expected, start in zip(module.parameters(), fp32.parameters(), before, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=TOLERANCES["minimum"])
        assert (expected - start).abs().max() > 0.05


def test_each_evaluation_of_the_closure_sees_the_weights_that_the_optimizer_asks_about(plugin):
    class Watches(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(self.layer.weight.detach().clone())
            return self.loss(batch)

    class Noting(SAM):
        def first_step(self) -> None:
            super().first_step()
            asked.append(self.param_groups[0]["params"][0].detach().clone())

    seen: list[Tensor] = []
    asked: list[Tensor] = []
    quiet_trainer(plugin).fit(Watches(optimizer=partial(Noting, base=SGD, lr=0.1)))
    assert len(seen) == 2 * len(asked) == 8
    for weight, wanted in zip(seen[1::2], asked, strict=True):
        assert wanted.dtype == torch.float32
        # ties are rounded away from zero in one storage and to even in the other
        assert same_bits(weight, split(wanted)[0]) or same_bits(weight, wanted.bfloat16())
    assert any(not torch.equal(first, second) for first, second in zip(seen[::2], seen[1::2], strict=True))


def test_gradients_that_the_optimizer_clears_in_its_step_are_cleared_for_the_next_evaluation(plugin):
    class WithoutZeroing(LinearLoss):
        """Its closure leaves it to the optimizer to clear gradients between the two evaluations."""

        def __init__(self) -> None:
            super().__init__(EXACT_ROWS, partial(SAM, base=SGD, lr=0.01))
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
            optimizer.zero_grad()

    fp32 = WithoutZeroing()
    module = copy.deepcopy(fp32)
    quiet_trainer("32-true").fit(fp32)
    quiet_trainer(plugin).fit(module)
    assert_same(module.parameters(), values(fp32))


def test_lbfgs_in_manual_optimization_steps_with_a_closure(plugin):
    class WithClosure(LinearLoss):
        def __init__(self) -> None:
            super().__init__(EXACT_ROWS, CLOSURE_OPTIMIZERS["LBFGS"])
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    fp32 = WithClosure()
    module = copy.deepcopy(fp32)
    quiet_trainer("32-true").fit(fp32)
    quiet_trainer(plugin).fit(module)
    assert_same(module.parameters(), values(fp32))


def test_lbfgs_in_manual_optimization_without_a_closure_is_a_clear_error(plugin):
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*closure"):
        quiet_trainer(plugin).fit(Manual(optimizer=CLOSURE_OPTIMIZERS["LBFGS"]))


def test_an_optimizer_with_a_closure_holds_the_modules_parameters_while_the_closure_runs(plugin):
    class Looks(M):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.look()
            return self.loss(batch)

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.look()

        def look(self) -> None:
            optimizer = self.trainer.optimizers[0]
            held = [param for group in optimizer.param_groups for param in group["params"]]
            own = [*self.parameters()]
            self.looks = getattr(self, "looks", 0) + 1
            assert all(one is other for one, other in zip(held, own, strict=True))
            assert all(any(key is param for param in own) for key in optimizer.state)
            assert {param.dtype for param in held} == {torch.bfloat16}

    module = Looks(optimizer=CLOSURE_OPTIMIZERS["LBFGS"])
    quiet_trainer(plugin).fit(module)
    assert module.looks >= 8
