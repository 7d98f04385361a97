"""Faults that users of neighbouring projects met with checkpoints and resume; each test names the report."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_mp
from lightning_mp import MasterWeightPrecision
from tests.reference import fp32_run, same_bits

both_storages = pytest.mark.parametrize("storage", ["split", "copy"])


class M(L.LightningModule):
    """One Linear(4, 1), MSE loss, SGD with lr 0.1 or AdamW, 8 random rows."""

    def __init__(self, optimizer: str = "sgd", lr: float = 0.1, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(11)
        self.layer = nn.Linear(4, 1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.rows = torch.randn(8, 4, generator=generator)
        self.gradients: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0].sum(1, keepdim=True))
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([param.grad.detach().float() for param in self.parameters() if param.grad is not None])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("metric", self(batch[0]).float().square().mean())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.rows), batch_size=self.hparams.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_trainer(plugin: str | MasterWeightPrecision, folder: Any, **kwargs: Any) -> L.Trainer:
    """A quiet trainer; ``plugin`` is a storage of masters, or a plugin."""
    if isinstance(plugin, str):
        plugin = MasterWeightPrecision("bf16-master", master=plugin)
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in kwargs.get("callbacks", ()))
    settings = {**quiet, "enable_checkpointing": checkpointing, "num_sanity_val_steps": 0, "default_root_dir": folder, **kwargs}
    return lightning_mp.Trainer(precision_plugin=plugin, **settings)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


class Note(Callback):
    """Masters, parameters and optimizer state at the end of each batch, by the number of steps; ``start`` before the first."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.masters: dict[int, dict[str, Tensor]] = {}
        self.states: dict[int, list[dict[str, Any]]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.start = self.start or trainer.precision_plugin.masters()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self.masters[step] = trainer.precision_plugin.masters()
        self.states[step] = copy.deepcopy([trainer.optimizers[0].state[param] for param in pl_module.parameters()])


def fitted_file(plugin: str | MasterWeightPrecision, folder: Any, name: str = "fit.ckpt", **kwargs: Any) -> Any:
    """The file of one epoch of ``M``."""
    trainer = make_trainer(plugin, folder, max_epochs=1, callbacks=[ModelCheckpoint(folder, name.removesuffix(".ckpt"))])
    trainer.fit(M(**kwargs))
    return folder / name


def messages_of(caught: Any, caplog: Any) -> str:
    return "\n".join([*(str(warning.message) for warning in caught), caplog.text])


# --- C1: deepspeedai/DeepSpeed#762 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"])
@both_storages
def test_weights_that_are_loaded_once_masters_exist_are_kept_by_the_next_step(storage, hook, tmp_path):
    loaded = {"layer.weight": torch.tensor([[0.1, -0.3, 1 / 3, 2.0**-9]]), "layer.bias": torch.tensor([1e-4])}

    class Loads(M):
        pass

    def load(self, *args, **kwargs):
        self.load_state_dict(loaded)

    setattr(Loads, hook, load)
    module, note = Loads(lr=1e-5), Note()
    make_trainer(storage, tmp_path, max_steps=1, callbacks=[note]).fit(module)
    if hook != "on_train_batch_start":  # which runs after the callback's
        assert same(note.start, loaded)
    expected = fp32_run(list(loaded.values()), module.gradients, lambda params: torch.optim.SGD(params, lr=1e-5, momentum=0.9))
    assert same(weights(module), dict(zip(loaded, expected, strict=True)))
    for name, value in loaded.items():
        torch.testing.assert_close(weights(module)[name], value, atol=1e-3, rtol=0)


@both_storages
def test_16_bit_weights_that_are_loaded_in_mid_run_become_the_masters_and_that_is_said(storage, tmp_path, caplog):
    loaded = {name: value.bfloat16() for name, value in M().state_dict().items()}

    class Loads(M):
        def on_train_start(self):
            self.load_state_dict(loaded)

    note = Note()
    caplog.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(storage, tmp_path, max_steps=1, callbacks=[note]).fit(Loads())
    assert same(note.start, {name: value.float() for name, value in loaded.items()})
    said = messages_of(caught, caplog)
    assert "16-bit" in said or "bfloat16" in said


@both_storages
def test_a_file_without_the_plugins_entry_gives_the_masters_all_the_same(storage, tmp_path):
    path = fitted_file(storage, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lightning_mp"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    note, module = Note(), M()
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[note]).fit(module, ckpt_path=tmp_path / "without.ckpt")
    assert same(note.start, checkpoint["state_dict"])


# --- C2: Lightning-AI/pytorch-lightning#9404 --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@both_storages
def test_evaluation_from_a_file_makes_no_fp32_copies(storage, stage, tmp_path):
    path = fitted_file(storage, tmp_path)
    saved = torch.load(path, weights_only=True)["state_dict"]

    class Looks(M):
        def look(self, *args):
            plugin = self.trainer.precision_plugin
            self.looked = [tensor.dtype for tensor in plugin.master_tensors()]
            self.held = {param.dtype for param in self.parameters()}
            self.seen = self.state_dict()

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = look

    module = Looks()
    result = getattr(make_trainer(storage, tmp_path), stage)(module, ckpt_path=path)
    assert torch.float32 not in module.looked
    assert module.held == {torch.bfloat16}
    assert same(module.seen, saved)
    assert same(weights(module), saved)  # and fp32 again afterwards

    again = M()
    again.load_state_dict(saved)
    assert str(result) == str(getattr(make_trainer(storage, tmp_path), stage)(again))


@both_storages
def test_validation_from_the_best_file_follows_a_fit_on_the_same_trainer(storage, tmp_path):
    module = M()
    trainer = make_trainer(storage, tmp_path, max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, monitor="metric")])
    trainer.fit(module)
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    trainer.validate(ckpt_path="best", verbose=False)
    assert same(weights(module), best)


# --- C3: Lightning-AI/pytorch-lightning#11638 -------------------------------------------------------------------------------


class Renamed(MasterWeightPrecision):
    """The plugin under another name."""


@pytest.mark.parametrize(("before", "after"), [(MasterWeightPrecision, Renamed), (Renamed, MasterWeightPrecision)])
@both_storages
def test_a_resume_does_not_depend_on_the_name_of_the_plugins_class(storage, before, after, tmp_path):
    def plugin(cls):
        return cls("bf16-master", master=storage)

    whole, resumed = M("adamw"), M("adamw")
    make_trainer(plugin(before), tmp_path, max_epochs=2).fit(whole)
    path = fitted_file(plugin(before), tmp_path, optimizer="adamw")
    checkpoint = torch.load(path, weights_only=True)
    assert "lightning_mp" in checkpoint
    assert not {"MasterWeightPrecision", "Renamed"} & set(checkpoint)
    make_trainer(plugin(after), tmp_path, max_epochs=2).fit(resumed, ckpt_path=path)
    assert same(weights(resumed), weights(whole))


@both_storages
def test_a_stock_16_bit_file_is_reported_as_lacking_masters(storage, tmp_path):
    stock = L.Trainer(
        precision="bf16-true", accelerator="cpu", logger=False, max_epochs=1, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path, "stock")],
    )  # fmt: skip

    class Half(M):
        def forward(self, x):
            return self.layer(x.to(self.layer.weight.dtype))

    stock.fit(Half("adamw"))
    saved = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.bfloat16}
    note = Note()
    with pytest.warns(UserWarning, match="masters start from rounded values"):
        make_trainer(storage, tmp_path, max_epochs=2, callbacks=[note]).fit(M("adamw"), ckpt_path=tmp_path / "stock.ckpt")
    assert same(note.start, {name: value.float() for name, value in saved["state_dict"].items()})
    for state in note.states[5]:
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


# --- C4: pytorch-tabular/pytorch_tabular#621 --------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    if type(value) is dict:
        return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
    if type(value) is list:
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed", "32-true", "auto"])
def test_what_the_plugin_writes_is_plain_and_every_file_opens_with_the_safe_loader(precision, tmp_path):
    plugin = MasterWeightPrecision(precision, master="copy")
    callbacks = [ModelCheckpoint(tmp_path, "fit"), EarlyStopping("metric", patience=9)]
    make_trainer(plugin, tmp_path, max_epochs=1, callbacks=callbacks).fit(M("adamw"))
    entry = torch.load(tmp_path / "fit.ckpt", weights_only=True)["lightning_mp"]
    assert {type(leaf) for leaf in leaves(entry)} <= {str, int, float, bool, type(None)}
    make_trainer(copy.deepcopy(plugin), tmp_path, max_epochs=2).fit(M("adamw"), ckpt_path=tmp_path / "fit.ckpt")


# --- C5: hiyouga/LlamaFactory#2847 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_run", [False, True], ids=["after fit", "in mid-run"])
@both_storages
def test_the_weights_that_leave_the_run_are_the_masters_at_4_bytes_each(storage, in_run, tmp_path):
    path = tmp_path / "weights.ckpt"

    class Wide(M):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 20_000)

        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.masters = self.trainer.precision_plugin.masters()
            if in_run:
                self.trainer.save_checkpoint(path, weights_only=True)

    module = Wide()
    trainer = make_trainer(storage, tmp_path, max_epochs=1)
    trainer.fit(module)
    if not in_run:
        trainer.save_checkpoint(path, weights_only=True)
    plain = Wide()
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert same(weights(plain), module.masters)
    assert any(not same_bits(value, value.bfloat16().float()) for value in weights(plain).values())
    assert 0 < path.stat().st_size - 4 * 100_000 < 16_000


# --- C6: TensorAuto/OpenTau#185 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@both_storages
def test_masters_and_moments_of_4_epochs_equal_those_of_2_and_2_more(storage, optimizer, tmp_path):
    whole, half, rest = Note(), Note(), Note()
    make_trainer(storage, tmp_path, max_epochs=4, callbacks=[whole]).fit(M(optimizer))
    file = ModelCheckpoint(tmp_path, "half")
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[half, file]).fit(M(optimizer))
    make_trainer(storage, tmp_path, max_epochs=4, callbacks=[rest]).fit(M(optimizer), ckpt_path=tmp_path / "half.ckpt")
    assert same(rest.start, whole.masters[8])
    assert list(whole.masters) == [*half.masters, *rest.masters] == list(range(1, 17))
    for step, masters in (half.masters | rest.masters).items():
        assert same(masters, whole.masters[step])
        for left, right in zip((half.states | rest.states)[step], whole.states[step], strict=True):
            assert same(left, right)


class TwoLayers(L.LightningModule):
    def __init__(self, names: tuple[str, str] = ("first", "second")) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = (getattr(self, name) for name in sorted(dict(self.named_children())))
        x = torch.ones(2, 4) * (batch + 1)
        return second(torch.tanh(first(x))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(3), batch_size=None)


@both_storages
def test_masters_find_their_parameters_by_name_where_these_are_in_another_order(storage, tmp_path):
    file = ModelCheckpoint(tmp_path, "fit")
    make_trainer(storage, tmp_path, max_epochs=1, callbacks=[file]).fit(TwoLayers())
    saved = torch.load(tmp_path / "fit.ckpt", weights_only=True)["state_dict"]
    note = Note()
    reordered = TwoLayers(("second", "first"))
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[note]).fit(reordered, ckpt_path=tmp_path / "fit.ckpt")
    assert list(saved) != list(note.start)
    assert same({name: note.start[name] for name in saved}, saved)


@both_storages
def test_masters_follow_a_module_that_renames_its_parameters_as_it_loads(storage, tmp_path):
    class NewNames(TwoLayers):
        def __init__(self):
            super().__init__(("new_first", "new_second"))

        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {f"new_{name}": value for name, value in checkpoint["state_dict"].items()}

    file = ModelCheckpoint(tmp_path, "fit")
    whole, rest = Note(), Note()
    torch.manual_seed(0)
    make_trainer(storage, tmp_path, max_epochs=1, callbacks=[file]).fit(TwoLayers())
    torch.manual_seed(0)
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[whole]).fit(TwoLayers())
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[rest]).fit(NewNames(), ckpt_path=tmp_path / "fit.ckpt")
    for step in (4, 5, 6):
        assert same(rest.masters[step], {f"new_{name}": value for name, value in whole.masters[step].items()})


# --- C7: Lightning-AI/pytorch-lightning#20953 -------------------------------------------------------------------------------


@both_storages
def test_masters_and_plugin_state_are_snapshots(storage, tmp_path):
    taken: list[Any] = []

    class Takes(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            plugin = self.trainer.precision_plugin
            live = (plugin.masters(), plugin.state_dict(), self.state_dict())
            taken.append((live, copy.deepcopy(live)))

    make_trainer(storage, tmp_path, max_epochs=1).fit(Takes())
    assert len(taken) == 4
    for (masters, state, weights_then), (masters_then, state_then, weights_copy) in taken:
        assert same(masters, masters_then)
        assert state == state_then
        assert same(weights_then, weights_copy)
    assert not same(taken[0][0][0], taken[1][0][0])


class SlowIO(TorchCheckpointIO):
    """Writes later, when training has gone on for some steps."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        super().save_checkpoint(*args, **kwargs)


@both_storages
def test_masters_and_moments_of_one_file_belong_to_one_step_when_files_are_written_asynchronously(storage, tmp_path):
    note = Note()
    file = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False)
    trainer = make_trainer(storage, tmp_path, max_epochs=2, callbacks=[note, file], plugins=[AsyncCheckpointIO(SlowIO())])
    trainer.fit(M("adamw"))
    for step in range(1, 9):
        checkpoint = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        assert checkpoint["global_step"] == step
        assert same(checkpoint["state_dict"], note.masters[step])
        saved = checkpoint["optimizer_states"][0]["state"]
        for index, state in enumerate(note.states[step]):
            assert same(saved[index], state)
            assert saved[index]["step"] == step
    # and the parameters are those of the masters: the resumed run equals the whole one
    rest = Note()
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[rest]).fit(M("adamw"), ckpt_path=tmp_path / "4.ckpt")
    assert same(rest.masters[8], note.masters[8])


# --- C11: Nerogar/OneTrainer#1465 -------------------------------------------------------------------------------------------


@both_storages
def test_a_file_saved_within_an_accumulation_window_says_that_the_gradients_so_far_are_lost(storage, tmp_path, caplog):
    path = tmp_path / "within.ckpt"

    class Saves(M):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.save_checkpoint(path)

    caplog.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(storage, tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(Saves(batch_size=1))
        resumed = M(batch_size=1)
        make_trainer(storage, tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(resumed, ckpt_path=path)
    assert len(resumed.gradients) == 2
    assert "accumulat" in messages_of(caught, caplog)


@pytest.mark.parametrize("same_plugin", [False, True])
@both_storages
def test_gradients_of_a_window_that_was_broken_off_do_not_leak_into_the_next_fit(storage, same_plugin, tmp_path):
    class Breaks(M):
        def training_step(self, batch, batch_idx):
            if self.broken is False and batch_idx == 2:
                self.broken = True
                raise RuntimeError("broken off")
            return super().training_step(batch, batch_idx)

    module = Breaks(batch_size=1)
    module.broken = False
    plugin = MasterWeightPrecision("bf16-master", master=storage)
    with pytest.raises(RuntimeError, match="broken off"):
        make_trainer(plugin, tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(module)
    assert module.layer.weight.dtype == torch.float32
    assert not module.gradients
    make_trainer(plugin if same_plugin else storage, tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(module)

    fresh = M(batch_size=1)
    make_trainer(storage, tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(fresh)
    assert all(
        same_bits(left, right)
        for lefts, rights in zip(module.gradients, fresh.gradients, strict=True)
        for left, right in zip(lefts, rights, strict=True)
    )
    assert same(weights(module), weights(fresh))
