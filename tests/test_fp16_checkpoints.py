"""Files of fp16 runs: what is in them, resume bit for bit, and resume across precisions."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import (
    AdaptiveLossScale,
    DynamicLossScale,
    MasterWeightPrecision,
    NoLossScale,
    StaticLossScale,
)
from tests.modules import quiet_trainer
from tests.reference import same_bits

pytestmark = pytest.mark.usefixtures("seeded")
FP16 = ("16-master", "16-mixed")
both_fp16 = pytest.mark.parametrize("precision", FP16)
BATCHES = 6  # per epoch
DYNAMIC = DynamicLossScale(init_scale=2.0**8, growth_interval=3, hysteresis=2)
ADAPTIVE = AdaptiveLossScale(init_scale=2.0**6, window=5)
both_scalers = pytest.mark.parametrize("scaler", [DYNAMIC, ADAPTIVE], ids=["dynamic", "adaptive"])


class Net(L.LightningModule):
    """A network with a norm, tied weights and a part that is frozen until epoch 2; some batches overflow, one has a NaN loss.

    ``records`` holds all that a resumed run has to share with the uninterrupted one, by batch.
    """

    #: Batches, counted from the start of the run, whose gradients overflow in fp16, and those whose loss is NaN.
    overflows: tuple[int, ...] = (2, 3, 9)
    nans: tuple[int, ...] = (7,)

    def __init__(self, optimizer: str = "adamw", order: int = 1) -> None:
        super().__init__()
        self.optimizer = optimizer
        with torch.random.fork_rng():
            torch.manual_seed(7)
            parts = {
                "embed": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "tied_in": nn.Linear(8, 8, bias=False),
                "tied_out": nn.Linear(8, 8, bias=False), "late": nn.Linear(8, 8).requires_grad_(False), "head": nn.Linear(8, 1),
            }  # fmt: skip
        for name in list(parts)[::order]:
            self.add_module(name, parts[name])
        self.tied_out.weight = self.tied_in.weight
        self.records: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.embed(x)))
        x = torch.tanh(self.tied_in(x)) + self.tied_out(x)
        return self.head(x + self.late(x))

    def batch_number(self, batch_idx: int) -> int:
        return self.current_epoch * BATCHES + batch_idx

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        number = self.batch_number(batch_idx)
        self.late.requires_grad_(self.current_epoch >= 2)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        loss = nn.functional.mse_loss(self(x).float(), x.sum(1, keepdim=True))
        if number in self.overflows:
            loss = loss * 2.0**60
        return loss * math.nan if number in self.nans else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(torch.linspace(-1, 1, 16).view(4, 4)).float().square().mean(), batch_size=1)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(torch.linspace(-1, 1, 16).view(4, 4)).float()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.records.append(record(self))

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        if self.optimizer == "adamw":
            optimizer: Any = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(BATCHES), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader


class Calm(Net):
    """The same with no overflow."""

    overflows, nans = (), ()


class Starts(Calm):
    """Keeps the masters, dtypes, optimizer state and loss scale with which a run starts."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "start"):
            self.start = record(self)
            self.kinds = {name: param.dtype for name, param in self.named_parameters()}


def ours(module: L.LightningModule) -> MasterWeightPrecision | None:
    plugin = module.trainer.precision_plugin
    return plugin if isinstance(plugin, MasterWeightPrecision) else None


def record(module: L.LightningModule) -> dict[str, Any]:
    plugin = ours(module)
    state = {key: value for optimizer in module.trainer.optimizers for key, value in optimizer.state.items()}
    named = dict(module.named_parameters())
    found: dict[str, Any] = {
        "masters": plugin.masters() if plugin else {name: param.detach().clone() for name, param in named.items()},
        "parameters": {name: param.detach().clone() for name, param in named.items()},
        "state": {name: copy.deepcopy(dict(state[param])) for name, param in named.items() if param in state},
        "lr": [group["lr"] for optimizer in module.trainer.optimizers for group in optimizer.param_groups],
    }
    if plugin:
        found["scale"] = plugin.loss_scale.state_dict()
        found["counts"] = (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses, plugin.last_step_skipped)
    return found


def untied(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the second name of tied weights, as ``named_parameters`` has it."""
    return {name: value for name, value in state_dict.items() if name != "tied_out.weight"}


def difference(left: Any, right: Any, path: str = "") -> str | None:
    """Where two nested containers differ first, tensors compared by their bits; None if they are the same."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return None if same_bits(left.detach(), right.detach()) else f"{path}: {left} != {right}"
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{path}: keys {sorted(map(str, left))} != {sorted(map(str, right))}"
        return next((found for key in left if (found := difference(left[key], right[key], f"{path}.{key}"))), None)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{path}: lengths {len(left)} != {len(right)}"
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for i, (a, b) in pairs if (found := difference(a, b, f"{path}[{i}]"))), None)
    return None if left == right else f"{path}: {left!r} != {right!r}"


def plugin_of(precision: str, scaler: Any = DYNAMIC, **settings: Any) -> Any:
    if precision == "bf16-master copy":
        return MasterWeightPrecision("bf16-master", master="copy")
    if precision == "stock 16-mixed":
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=4))
    return MasterWeightPrecision(precision, loss_scale=scaler if precision in FP16 else None, **settings)


def trainer_of(plugin: Any, folder: Any, **kwargs: Any) -> L.Trainer:
    checkpointing = any(isinstance(callback, Checkpoint) for callback in kwargs.get("callbacks", ()))
    return quiet_trainer(plugin, default_root_dir=folder, **{"enable_checkpointing": checkpointing, **kwargs})


def fitted(plugin: Any, folder: Any, module: L.LightningModule | None = None, epochs: int = 1, **kwargs: Any) -> Any:
    """The file of a run, and the module."""
    module = Net() if module is None else module
    callbacks = [ModelCheckpoint(folder, "fit", enable_version_counter=False)]
    trainer_of(plugin, folder, max_epochs=epochs, callbacks=callbacks, **kwargs).fit(module)
    return folder / "fit.ckpt", module


def leaves(value: Any) -> list[Any]:
    if type(value) is dict:
        return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
    if type(value) is list:
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


# --- C6, C9: resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@both_scalers
@both_fp16
def test_a_run_that_is_resumed_equals_the_uninterrupted_one_bit_for_bit(precision, scaler, optimizer, tmp_path):
    whole, resumed = Net(optimizer), Net(optimizer)
    trainer_of(plugin_of(precision, scaler), tmp_path, max_epochs=4).fit(whole)
    assert whole.records[-1]["counts"][:3] == (20, 4, 1)
    path, first = fitted(plugin_of(precision, scaler), tmp_path, Net(optimizer), epochs=2)
    # what the constructor says is not what was saved
    other = type(scaler)(init_scale=2.0**4)
    plugin = plugin_of(precision, other, max_consecutive_skips=17)
    trainer_of(plugin, tmp_path, max_epochs=4).fit(resumed, ckpt_path=path)
    assert difference(first.records + resumed.records, whole.records) is None
    assert len({record["scale"]["scale"] for record in whole.records}) > 2
    assert plugin.max_consecutive_skips == 17


@pytest.mark.parametrize("step", range(1, 10))
@both_fp16
def test_a_file_of_any_step_resumes_the_same_scales_counters_and_masters(precision, step, tmp_path):
    """Among them steps just after an overflow, between two overflows, and after a loss that was not finite."""
    scaler = DynamicLossScale(init_scale=2.0**8, growth_interval=5, hysteresis=2)

    class Saves(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.batch_number(batch_idx) == step - 1:
                self.trainer.save_checkpoint(tmp_path / "mid.ckpt")

    whole, resumed = Saves(), Net()
    trainer_of(plugin_of(precision, scaler), tmp_path, max_epochs=2).fit(whole)
    plugin = plugin_of(precision, DynamicLossScale(init_scale=2.0))
    trainer_of(plugin, tmp_path, max_epochs=2).fit(resumed, ckpt_path=tmp_path / "mid.ckpt")
    assert difference(resumed.records, whole.records[step:]) is None


@both_fp16
def test_consecutive_skips_count_on_after_a_resume(precision, tmp_path):
    class Bad(Net):
        overflows = tuple(range(2, 99))

    settings = {"max_consecutive_skips": 6}
    scaler = DynamicLossScale(init_scale=2.0**8, min_scale=2.0**-100)
    path, _ = fitted(plugin_of(precision, scaler, **settings), tmp_path, Bad())  # 4 skips in a row
    module = Bad()
    plugin = plugin_of(precision, scaler, **settings)
    with pytest.raises(FloatingPointError, match="6 optimizer steps in a row"):
        trainer_of(plugin, tmp_path, max_epochs=3).fit(module, ckpt_path=path)
    assert len(module.records) == 1  # the fifth; the sixth raised
    assert plugin.skipped_steps == 6


@both_fp16
def test_masters_go_by_name_where_parameters_stand_in_another_order(precision, tmp_path):
    path, first = fitted(plugin_of(precision), tmp_path, Calm())
    assert list(first.state_dict()) != list(Starts(order=-1).state_dict())
    module = Starts(order=-1)
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    trainer_of(plugin_of(precision), tmp_path).fit(module)
    expected = first.records[-1]["masters"]
    assert difference(module.start["masters"]["tied_out.weight"], expected["tied_in.weight"]) is None
    shared = [name for name in expected if name != "tied_in.weight"]
    assert difference({n: module.start["masters"][n] for n in shared}, {n: expected[n] for n in shared}) is None


@both_scalers
@both_fp16
def test_counts_and_scale_can_be_read_and_saved_after_the_fit(precision, scaler, tmp_path):
    plugin, module = plugin_of(precision, scaler), Net()
    callbacks = [ModelCheckpoint(tmp_path, "during")]
    trainer = trainer_of(plugin, tmp_path, max_epochs=2, callbacks=callbacks)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    during, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("during", "after"))
    assert difference(after["lightning_mp"], during["lightning_mp"]) is None
    assert difference(after["state_dict"], during["state_dict"]) is None
    assert difference(after["optimizer_states"], during["optimizer_states"]) is None
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (8, 4, 1)
    assert after["lightning_mp"]["loss_scaling"]["applied_steps"] == 8
    whole, resumed = Net(), Net()
    trainer_of(plugin_of(precision, scaler), tmp_path, max_epochs=3).fit(whole)
    other = type(scaler)()
    trainer_of(plugin_of(precision, other), tmp_path, max_epochs=3).fit(resumed, ckpt_path=tmp_path / "after.ckpt")
    assert difference(resumed.records, whole.records[12:]) is None


@both_fp16
def test_a_second_fit_on_the_same_trainer_from_a_file_goes_on_with_its_counts(precision, tmp_path):
    path, _ = fitted(plugin_of(precision), tmp_path)
    plugin, module = plugin_of(precision), Net()
    trainer = trainer_of(plugin, tmp_path, max_epochs=1)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ckpt_path=path)
    whole = Net()
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(whole)
    assert difference(module.records[-6:], whole.records[6:]) is None


@both_fp16
def test_an_exception_leaves_a_file_that_resumes(precision, tmp_path):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if self.batch_number(batch_idx) == 8 and self.breaks:
                raise RuntimeError("the user's")
            return super().training_step(batch, batch_idx)

    module, whole, resumed = Breaks(), Net(), Net()
    module.breaks = True
    with pytest.raises(RuntimeError, match="the user's"):
        trainer_of(plugin_of(precision), tmp_path, max_epochs=2, callbacks=[OnExceptionCheckpoint(tmp_path, "broken")]).fit(
            module
        )
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(whole)
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(resumed, ckpt_path=tmp_path / "broken.ckpt")
    assert difference(resumed.records, whole.records[8:]) is None


@both_fp16
def test_an_asynchronous_save_holds_the_state_of_its_step(precision, tmp_path):
    class Saves(Calm):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.save_checkpoint(tmp_path / "async.ckpt")

    module = Saves()
    plugins = {"plugins": [AsyncCheckpointIO()]}
    trainer_of(plugin_of(precision), tmp_path, max_epochs=1, **plugins).fit(module)
    saved = torch.load(tmp_path / "async.ckpt", weights_only=True)
    masters = untied(saved["state_dict"])
    assert difference(masters, module.records[2]["masters"]) is None
    assert saved["lightning_mp"]["loss_scaling"]["applied_steps"] == 3


# --- C4: what the files hold -------------------------------------------------------------------------------------------------

SCALERS = [NoLossScale(), StaticLossScale(64.0), DYNAMIC, ADAPTIVE, None]


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: getattr(scaler, "kind", "default"))
@both_fp16
def test_every_file_opens_with_the_safe_loader_and_holds_plain_things(precision, scaler, tmp_path):
    path, module = fitted(plugin_of(precision, scaler), tmp_path, Calm())
    saved = torch.load(path, weights_only=True)
    assert {type(leaf) for leaf in leaves(saved["lightning_mp"])} <= {str, int, float, bool, type(None)}
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert saved["lightning_mp"]["precision"] == precision
    for state in saved["optimizer_states"][0]["state"].values():
        assert {value.dtype for value in state.values()} == {torch.float32}
    assert difference(untied(saved["state_dict"]), dict(module.named_parameters())) is None


@both_fp16
def test_a_file_loads_into_a_stock_trainer_and_into_load_from_checkpoint(precision, tmp_path):
    path, module = fitted(plugin_of(precision), tmp_path, Calm())
    assert difference(dict(Calm.load_from_checkpoint(path).named_parameters()), dict(module.named_parameters())) is None
    for stage in ("validate", "test", "predict", "fit"):
        stock = Calm()
        trainer = L.Trainer(
            accelerator="cpu", logger=False, max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        getattr(trainer, stage)(stock, ckpt_path=path)
        if stage != "fit":
            assert difference(dict(stock.named_parameters()), dict(module.named_parameters())) is None


@both_fp16
def test_a_weights_only_file_starts_a_run_on_exact_masters(precision, tmp_path):
    class Saves(Calm):
        def on_train_end(self):
            self.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    trained, module = Saves(), Starts()
    trainer_of(plugin_of(precision), tmp_path).fit(trained)
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in saved
    module.load_state_dict(saved["state_dict"])
    trainer_of(plugin_of(precision), tmp_path).fit(module)
    assert difference(module.start["masters"], trained.records[-1]["masters"]) is None


# --- C3: across precisions ---------------------------------------------------------------------------------------------------

PRECISIONS = (
    "32-true",
    "bf16-mixed",
    "bf16-master",
    "16-mixed",
    "16-master",
    "stock 16-mixed",
    "stock 32-true",
    "bf16-master copy",
)


def any_plugin(name: str) -> Any:
    if name == "stock 32-true":
        return None
    return plugin_of(name)


@pytest.mark.parametrize("after", PRECISIONS)
@pytest.mark.parametrize("before", PRECISIONS)
def test_a_file_goes_from_every_precision_to_every_other(before, after, tmp_path, said):
    path, first = fitted(any_plugin(before), tmp_path, Calm(), epochs=3)
    saved = torch.load(path, weights_only=True)
    module = Starts()
    trainer = trainer_of(any_plugin(after), tmp_path, max_epochs=4)
    trainer.fit(module, ckpt_path=path)
    assert trainer.current_epoch == 4
    masters = untied(saved["state_dict"])
    assert difference(module.start["masters"], masters) is None
    assert difference(module.start["state"], first.records[-1]["state"]) is None
    assert module.start["lr"] == first.records[-1]["lr"] or module.start["lr"]
    assert {state["exp_avg"].dtype for state in module.start["state"].values()} == {torch.float32}
    plugin = trainer.precision_plugin
    if after in FP16 and before in FP16:
        assert module.start["scale"] == saved["lightning_mp"]["loss_scaling"]["loss_scale"]
    elif after in FP16 and before == "stock 16-mixed":
        assert saved["MixedPrecision"]["scale"] != DYNAMIC.scale
        assert module.start["scale"]["scale"] == saved["MixedPrecision"]["scale"]
        assert "loss scale goes on at" in said
    elif after in FP16:
        assert module.start["scale"]["scale"] == DYNAMIC.scale
        assert "no loss scale|starts at" in said
    if isinstance(plugin, MasterWeightPrecision):
        assert module.records[-1]["counts"][1] == 0 or after in FP16


@both_fp16
def test_a_subclass_of_the_plugin_resumes_bit_for_bit(precision, tmp_path):
    class Renamed(MasterWeightPrecision):
        pass

    whole, resumed = Net(), Net()
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(whole)
    path, _ = fitted(plugin_of(precision), tmp_path)
    trainer_of(Renamed(precision, loss_scale=4.0), tmp_path, max_epochs=2).fit(resumed, ckpt_path=path)
    # a static scale of the constructor takes over the scale of another kind, and says so
    assert resumed.records[0]["scale"]["kind"] == "static"
    resumed = Net()
    trainer_of(Renamed(precision, loss_scale=DynamicLossScale()), tmp_path, max_epochs=2).fit(resumed, ckpt_path=path)
    assert difference(resumed.records, whole.records[6:]) is None


@pytest.mark.parametrize("after", [StaticLossScale(4.0), ADAPTIVE], ids=["static", "adaptive"])
@both_fp16
def test_another_kind_of_scaler_takes_over_the_scale_and_says_so(precision, after, tmp_path, said):
    path, _ = fitted(plugin_of(precision, DynamicLossScale(init_scale=2.0**9)), tmp_path, Calm())
    module = Starts()
    trainer_of(plugin_of(precision, after), tmp_path, max_epochs=2).fit(module, ckpt_path=path)
    assert module.start["scale"]["kind"] == after.kind
    assert module.start["scale"]["scale"] == 2.0**9
    assert "'dynamic'|takes over the scale" in said


@both_fp16
def test_a_file_of_a_run_without_a_scale_leaves_the_scale_of_the_constructor(precision, tmp_path, said):
    path, _ = fitted(plugin_of(precision, NoLossScale()), tmp_path, Calm())
    module = Starts()
    trainer_of(plugin_of(precision, DYNAMIC), tmp_path, max_epochs=2).fit(module, ckpt_path=path)
    assert module.start["scale"]["scale"] == DYNAMIC.scale
    assert module.start["counts"][0] == 6
    assert "loss scale" in said


@pytest.mark.parametrize("entry", ["loss_scaling", "lightning_mp", "one", "of the scaler"])
@both_fp16
def test_missing_keys_get_defaults_and_are_named_in_the_log(precision, entry, tmp_path, said):
    path, first = fitted(plugin_of(precision), tmp_path)
    saved = torch.load(path, weights_only=True)
    if entry == "loss_scaling":
        del saved["lightning_mp"]["loss_scaling"]
        words = "no loss scale"
    elif entry == "lightning_mp":
        del saved["lightning_mp"]
        words = "no loss scale"
    elif entry == "one":
        del saved["lightning_mp"]["loss_scaling"]["skipped_steps"]
        del saved["lightning_mp"]["loss_scaling"]["consecutive_skips"]
        words = "no|skipped_steps|consecutive_skips"
    else:
        del saved["lightning_mp"]["loss_scaling"]["loss_scale"]["streak"]
        words = "lacks|streak"
    torch.save(saved, tmp_path / "old.ckpt")
    module = Starts()
    before = len(said.messages)
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(module, ckpt_path=tmp_path / "old.ckpt")
    assert any(all(word in message for word in words.split("|")) for message in said.messages[before:])
    masters = untied(saved["state_dict"])
    assert difference(module.start["masters"], masters) is None
    if entry == "one":
        assert module.start["counts"][:3] == (4, 0, 0)
        assert module.start["scale"] == first.records[-1]["scale"]
    elif entry == "of the scaler":
        assert module.start["scale"]["streak"] == 0
        assert module.start["scale"]["scale"] == first.records[-1]["scale"]["scale"]
    else:
        assert module.start["scale"]["scale"] == DYNAMIC.scale


@pytest.mark.parametrize("bad", [math.nan, -1.0, "much", None], ids=str)
@both_fp16
def test_a_saved_scale_that_is_not_legal_is_refused_by_name(precision, bad, tmp_path):
    path, _ = fitted(plugin_of(precision), tmp_path)
    saved = torch.load(path, weights_only=True)
    saved["lightning_mp"]["loss_scaling"]["loss_scale"]["scale"] = bad
    torch.save(saved, path)
    with pytest.raises(ValueError, match="scale is"):
        trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(Net(), ckpt_path=path)


@both_fp16
def test_a_stock_grad_scaler_that_was_disabled_or_at_an_odd_scale_hands_over_what_it_can(precision, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=4)
    path, _ = fitted(MixedPrecision("16-mixed", "cpu", scaler), tmp_path, Calm())
    scale = torch.load(path, weights_only=True)["MixedPrecision"]["scale"]
    module = Starts()
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(module, ckpt_path=path)
    assert module.start["scale"]["scale"] == scale
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    (tmp_path / "disabled").mkdir()
    path, _ = fitted(MixedPrecision("16-mixed", "cpu", disabled), tmp_path / "disabled", Calm())
    module = Starts()
    trainer_of(plugin_of(precision), tmp_path, max_epochs=2).fit(module, ckpt_path=path)
    assert module.start["scale"]["scale"] == DYNAMIC.scale


def test_a_stock_16_true_file_starts_masters_from_its_rounded_values_and_says_so(tmp_path):
    class Half(Calm):
        def forward(self, x):
            return super().forward(x.half())

    with torch.random.fork_rng():
        stock = Half("sgd")
        trainer = L.Trainer(
            precision="16-true", accelerator="cpu", logger=False, max_epochs=1, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path, "half")],
        )  # fmt: skip
        trainer.fit(stock)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float16}
    module = Starts("sgd")
    with pytest.warns(UserWarning, match="masters start from rounded values"):
        trainer_of(plugin_of("16-master"), tmp_path, max_epochs=2).fit(module, ckpt_path=tmp_path / "half.ckpt")
    assert (
        difference(
            module.start["masters"],
            {name: value.float() for name, value in untied(saved["state_dict"]).items()},
        )
        is None
    )
    assert {state["momentum_buffer"].dtype for state in module.start["state"].values()} == {torch.float32}


# --- C2: evaluation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@both_fp16
def test_evaluation_from_a_file_runs_with_its_weights_and_takes_no_state(precision, stage, tmp_path, said):
    path, _ = fitted(plugin_of(precision), tmp_path)
    saved = torch.load(path, weights_only=True)["state_dict"]

    class Looks(Net):
        def look(self, *args):
            self.seen = self.state_dict()
            self.held = {param.dtype for name, param in self.named_parameters() if "norm" not in name and "late" not in name}

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = look

    module, plugin = Looks(), plugin_of(precision)
    getattr(trainer_of(plugin, tmp_path), stage)(module, ckpt_path=path)
    assert module.held == {torch.float32}  # autocast rounds them to fp16 where they are used
    assert difference(module.seen, saved) is None
    assert (plugin.applied_steps, plugin.skipped_steps) == (0, 0)
    assert plugin.loss_scale.scale == DYNAMIC.scale
    assert {param.dtype for param in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("autocast", [True, False])
def test_evaluation_computes_what_validation_in_the_fit_computed(autocast, tmp_path):
    class Half(Net):
        def forward(self, x):
            return super().forward(x if autocast else x.to(self.embed.weight.dtype))

    plugin = partial(plugin_of, "16-master", autocast=autocast, fp32_modules=["norm"] if autocast else [])
    module = Half()
    trainer = trainer_of(plugin(), tmp_path, max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, "fit")])
    trainer.fit(module)
    seen = trainer.callback_metrics["val_loss"]
    for validated in (module, Half()):
        trainer = trainer_of(plugin(), tmp_path)
        (metrics,) = trainer.validate(validated, ckpt_path=tmp_path / "fit.ckpt", verbose=False)
        assert metrics["val_loss"] == seen.item()
        assert difference(dict(validated.named_parameters()), untied(torch.load(tmp_path / "fit.ckpt")["state_dict"])) is None


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@both_fp16
def test_evaluation_after_a_fit_on_the_same_trainer_keeps_counts_and_scale_for_a_later_save(precision, stage, tmp_path):
    plugin, module = plugin_of(precision), Net()
    trainer = trainer_of(plugin, tmp_path, callbacks=[ModelCheckpoint(tmp_path, "fit")])
    trainer.fit(module)
    scale = plugin.loss_scale
    getattr(trainer, stage)(module, ckpt_path=tmp_path / "fit.ckpt")
    getattr(trainer, stage)(module)
    assert (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses) == (4, 2, 0)
    assert plugin.loss_scale == scale
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    fit, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["lightning_mp"] for name in ("fit", "after"))
    assert difference(after["loss_scaling"], fit["loss_scaling"]) is None


def test_evaluation_makes_no_fp32_copies_of_fp16_parameters(tmp_path):
    path, _ = fitted(plugin_of("16-master"), tmp_path)

    class Looks(Net):
        def on_validation_batch_end(self, *args):
            self.extra = sum(t.numel() for t in self.trainer.precision_plugin.master_tensors() if t.dtype == torch.float32)

    module = Looks()
    trainer_of(plugin_of("16-master"), tmp_path).validate(module, ckpt_path=path, verbose=False)
    assert module.extra == 0


# --- C11: mid-window ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4])
@both_fp16
def test_a_file_of_the_middle_of_a_window_is_warned_of_and_leaves_nothing_behind(precision, batch, tmp_path):
    class Saves(Calm):
        def on_train_batch_end(self, outputs, batch_, batch_idx):
            if self.batch_number(batch_idx) == batch:
                self.trainer.save_checkpoint(tmp_path / "mid.ckpt")

    with pytest.warns(UserWarning, match="middle of an accumulation window"):
        trainer_of(plugin_of(precision), tmp_path, accumulate_grad_batches=4).fit(Saves())
    saved = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    assert saved["lightning_mp"]["loss_scaling"]["applied_steps"] == (1 if batch == 4 else 0)
    module = Starts()
    plugin = plugin_of(precision)
    trainer_of(plugin, tmp_path, accumulate_grad_batches=4, max_epochs=2).fit(module, ckpt_path=tmp_path / "mid.ckpt")
    masters = untied(saved["state_dict"])
    assert difference(module.start["masters"], masters) is None
    # and a fit of the same module afterwards starts from clean gradients
    again, fresh = trainer_of(plugin_of(precision), tmp_path), Calm()
    fresh.load_state_dict(module.state_dict())
    module.records.clear()
    again.fit(module)
    trainer_of(plugin_of(precision), tmp_path).fit(fresh)
    assert difference([r["masters"] for r in module.records], [r["masters"] for r in fresh.records]) is None


@both_fp16
def test_an_overflow_before_a_save_in_mid_window_does_not_reach_the_resumed_run(precision, tmp_path):
    class Saves(Net):
        overflows, nans = (0,), ()

        def on_train_batch_end(self, outputs, batch_, batch_idx):
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "mid.ckpt")

    trainer_of(plugin_of(precision), tmp_path, accumulate_grad_batches=3).fit(Saves())
    module, plugin = Calm(), plugin_of(precision)
    trainer_of(plugin, tmp_path, accumulate_grad_batches=3, max_epochs=2).fit(module, ckpt_path=tmp_path / "mid.ckpt")
    assert plugin.skipped_steps == 0
    assert plugin.applied_steps == len(module.records) > 0


@both_fp16
def test_a_file_that_is_saved_between_windows_is_not_warned_of_and_resumes_bit_for_bit(precision, tmp_path, said):
    whole, resumed = Net(), Net()
    settings = {"accumulate_grad_batches": 3}
    trainer_of(plugin_of(precision), tmp_path, max_epochs=3, **settings).fit(whole)
    path, first = fitted(plugin_of(precision), tmp_path, Net(), epochs=2, **settings)
    trainer_of(plugin_of(precision), tmp_path, max_epochs=3, **settings).fit(resumed, ckpt_path=path)
    assert difference(first.records + resumed.records, whole.records) is None
    assert "middle of an accumulation window" not in said


@both_fp16
def test_windows_of_an_adaptive_scaler_are_in_the_file(precision, tmp_path):
    path, module = fitted(plugin_of(precision, ADAPTIVE), tmp_path, Calm())
    saved = torch.load(path, weights_only=True)["lightning_mp"]["loss_scaling"]["loss_scale"]
    assert len(saved["log2_amax"]) == 5
    assert saved == module.records[-1]["scale"]


@both_fp16
def test_skip_nonfinite_without_a_scale_keeps_its_counts_across_a_resume(precision, tmp_path):
    def plugin(name):
        return MasterWeightPrecision(name, skip_nonfinite=True)

    class Infinite(Net):
        overflows = ()
        nans = (2, 3, 7)

    name = {"16-master": "bf16-master", "16-mixed": "bf16-mixed"}[precision]
    whole, resumed = Infinite(), Infinite()
    trainer_of(plugin(name), tmp_path, max_epochs=2).fit(whole)
    path, _ = fitted(plugin(name), tmp_path, Infinite())
    trainer_of(plugin(name), tmp_path, max_epochs=2).fit(resumed, ckpt_path=path)
    assert difference(resumed.records, whole.records[6:]) is None
    assert whole.records[-1]["counts"] == (9, 3, 3, False)
    # and its counts go on under fp16
    module, other = Calm(), plugin_of(precision)
    trainer_of(other, tmp_path, max_epochs=2).fit(module, ckpt_path=path)
    assert (other.applied_steps, other.skipped_steps) == (10, 2)
    assert module.records[0]["scale"]["kind"] == "dynamic"


# --- manual optimization -----------------------------------------------------------------------------------------------------


class Two(L.LightningModule):
    """Two networks with an optimizer each; ``b`` overflows in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.records: list[dict[str, Any]] = []
        self.save_between = ""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        number = self.current_epoch * BATCHES + batch_idx
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        factor = 2.0**60 if number in (1, 2, 5, 6) else 1.0
        self.manual_backward(self.a(x).float().square().mean() + factor * self.b(x).float().square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
            if self.save_between and number == 5:
                self.trainer.save_checkpoint(self.save_between)
                self.save_between = ""
        self.records.append(record(self))

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.a, self.b)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(BATCHES), batch_size=None)


@both_scalers
@both_fp16
def test_two_optimizers_of_which_one_was_skipped_resume_bit_for_bit(precision, scaler, tmp_path):
    whole, resumed = Two(), Two()
    trainer_of(plugin_of(precision, scaler), tmp_path, max_epochs=2).fit(whole)
    assert whole.records[-1]["counts"][:2] == (20, 4)
    path, _ = fitted(plugin_of(precision, scaler), tmp_path, Two())
    saved = torch.load(path, weights_only=True)["lightning_mp"]["loss_scaling"]
    assert saved["consecutive_skips"] == [0, 1]
    trainer_of(plugin_of(precision, type(scaler)()), tmp_path, max_epochs=2).fit(resumed, ckpt_path=path)
    assert difference(resumed.records, whole.records[6:]) is None


@both_fp16
def test_a_file_that_is_saved_between_the_steps_of_two_optimizers_has_the_scale_of_the_next_round(precision, tmp_path):
    module = Two()
    module.save_between = str(tmp_path / "between.ckpt")
    trainer_of(plugin_of(precision), tmp_path).fit(module)
    saved = torch.load(tmp_path / "between.ckpt", weights_only=True)["lightning_mp"]["loss_scaling"]
    assert saved["loss_scale"] == module.records[-1]["scale"]
    assert saved["applied_steps"] == module.records[-1]["counts"][0]
    assert saved["skipped_steps"] == module.records[-1]["counts"][1] - 1
