"""Law 6: every checkpoint is a plain fp32 checkpoint, resume is bit-exact, and every precision resumes from every other."""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    Checkpoint,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp
from lightning_mp import MasterWeightPrecision
from tests.reference import same_bits

OURS = ("split", "copy")
STOCK = ("32-true", "bf16-mixed", "bf16-true")
BATCHES = 6  # per epoch

#: fp32 values halfway between two bf16 values: "to even" and "away from zero" round half of them differently.
TIES = 1 + 2.0**-8 + torch.arange(8) * 2.0**-7


def make_trainer(precision: str, folder: Any, **kwargs: Any) -> L.Trainer:
    """A quiet trainer. ``precision`` is the storage of our masters (``OURS``), or the name of one of Lightning's."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in kwargs.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        **kwargs,
    }
    if precision in OURS:
        return lightning_mp.Trainer(precision_plugin=MasterWeightPrecision("bf16-master", master=precision), **settings)
    return L.Trainer(precision=precision, **settings)


class Net(L.LightningModule):
    """A small network with a norm, tied weights, a frozen part, a part that is unfrozen at epoch 2, and weights that are ties.

    It writes down its state at the start of each training step, and overrides no hook in which weights could be edited.
    """

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embed = nn.Linear(4, 8)
            self.norm = nn.LayerNorm(8)
            self.tied_in = nn.Linear(8, 8, bias=False)
            self.tied_out = nn.Linear(8, 8, bias=False)
            self.tied_out.weight = self.tied_in.weight
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.late = nn.Linear(8, 8).requires_grad_(False)
            self.ties = nn.Parameter(TIES.clone())
            self.frozen.bias.copy_(TIES)
            self.head = nn.Linear(8, 1)
        self.records: list[dict[str, Any]] = []
        self.losses: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.embed(x)))
        x = torch.tanh(self.tied_in(x)) + self.tied_out(x) + self.frozen(x)
        return self.head(x + self.late(x)) + 0 * self.ties.sum()  # the ties have a gradient of zero, so they stay

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.late.requires_grad_(self.current_epoch >= 2)
        self.records.append(record(self))
        # data by step, as a plain DataLoader does not resume within an epoch
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.trainer.global_step)).to(self.dtype)
        loss = nn.functional.mse_loss(self(x), x.sum(1, keepdim=True))
        self.losses[self.trainer.global_step] = loss.item()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = torch.linspace(-1, 1, 16).view(4, 4).to(self.dtype)
        self.log("val_loss", self(x).float().square().mean(), batch_size=1)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [param for name, param in self.named_parameters() if name != "ties"], "weight_decay": 0.1},
            {"params": [self.ties], "weight_decay": 0.0},
        ]
        if self.hparams.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        else:
            optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(BATCHES), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=None)


def masters_of(module: L.LightningModule) -> dict[str, Tensor]:
    """Snapshot of the fp32 weights by name, as the plugin in use gives them."""
    plugin = module.trainer.precision_plugin
    if isinstance(plugin, MasterWeightPrecision) and plugin.precision == "bf16-master":
        return plugin.masters()
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def optimizer_state_of(module: L.LightningModule) -> dict[str, dict[str, Any]]:
    """Snapshot of the optimizers' state, by parameter name."""
    state = {key: value for optimizer in module.trainer.optimizers for key, value in optimizer.state.items()}
    return {
        name: copy.deepcopy({key: value for key, value in state[param].items() if value is not None})
        for name, param in module.named_parameters()
        if param in state
    }


def record(module: L.LightningModule) -> dict[str, Any]:
    """Everything that has to be the same in a resumed run."""
    return {
        "step": module.trainer.global_step,
        "epoch": module.trainer.current_epoch,
        "lr": [group["lr"] for optimizer in module.trainer.optimizers for group in optimizer.param_groups],
        "parameters": {name: param.detach().clone() for name, param in module.named_parameters()},
        "masters": masters_of(module),
        "optimizer": optimizer_state_of(module),
    }


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


def plain_fp32(path: Any) -> dict[str, Any]:
    """Open a file with torch's safe loader, and check that its weights are fp32 under the usual names."""
    checkpoint = torch.load(path, weights_only=True)
    assert {name: tensor.dtype for name, tensor in checkpoint["state_dict"].items()} == dict.fromkeys(
        Net().state_dict(), torch.float32
    )
    return checkpoint


def named(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the second names of tied weights, as ``named_parameters`` has it."""
    return {name: tensor for name, tensor in state_dict.items() if name != "tied_out.weight"}


def digest(path: Any) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class OnBatch(Callback):
    """Calls a function at the end of each training batch."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.function(trainer, pl_module)


# --- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", OURS)
def test_every_file_of_a_run_holds_the_fp32_masters_of_its_step(storage, tmp_path):
    net = Net()
    by_step: dict[int, dict[str, Tensor]] = {}
    saved: dict[str, int] = {}

    def note(trainer, module):
        by_step[trainer.global_step] = masters_of(module)
        if trainer.global_step == 8:  # in the middle of an epoch, between a step and the next forward
            for name, weights_only in (("callback", False), ("callback-weights", True)):
                trainer.save_checkpoint(tmp_path / f"{name}.ckpt", weights_only=weights_only)
                saved[f"{name}.ckpt"] = 8

    folder = {"dirpath": tmp_path, "save_top_k": -1, "auto_insert_metric_name": False}
    checkpoints = [
        ModelCheckpoint(filename="full-{step}", every_n_train_steps=4, **folder),
        ModelCheckpoint(filename="weights-{step}", every_n_train_steps=5, save_weights_only=True, **folder),
        ModelCheckpoint(filename="validation-{step}", monitor="val_loss", save_on_train_epoch_end=False, **folder),
        ModelCheckpoint(filename="epoch-{step}", every_n_epochs=1, save_on_train_epoch_end=True, **folder),
    ]
    trainer = make_trainer(storage, tmp_path, max_epochs=2, val_check_interval=3, callbacks=[OnBatch(note), *checkpoints])
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "after-12.ckpt")
    trainer.save_checkpoint(tmp_path / "after-weights-12.ckpt", weights_only=True)

    saved |= {path.name: int(path.stem.rsplit("-", 1)[1]) for path in tmp_path.glob("*-*.ckpt") if path.name not in saved}
    kinds = {name.rsplit("-", 1)[0] for name in saved}
    assert kinds >= {"full", "weights", "validation", "epoch", "after", "after-weights", "callback.ckpt", "callback"}
    assert len(saved) >= 14
    for name, step in saved.items():
        checkpoint = plain_fp32(tmp_path / name)
        assert difference(named(checkpoint["state_dict"]), by_step[step], name) is None
        assert ("optimizer_states" in checkpoint) == ("weights" not in name)
    # the masters are not what the parameters would have given
    assert any(not same_bits(value, value.bfloat16().float()) for value in by_step[12].values())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("storage", OURS)
def test_a_file_loads_in_load_from_checkpoint_and_in_a_stock_trainer(storage, weights_only, tmp_path):
    net = Net()
    trainer = make_trainer(storage, tmp_path, max_epochs=1)
    trainer.fit(net)
    path = tmp_path / "file.ckpt"
    trainer.save_checkpoint(path, weights_only=weights_only)
    expected = {name: param.detach().clone() for name, param in net.named_parameters()}
    assert all(value.dtype == torch.float32 for value in expected.values())

    loaded = Net.load_from_checkpoint(path)
    assert difference(dict(loaded.named_parameters()), expected) is None

    stock = Net()
    metrics = make_trainer("32-true", tmp_path).validate(stock, ckpt_path=path, verbose=False)
    assert difference(dict(stock.named_parameters()), expected) is None
    assert metrics == make_trainer("32-true", tmp_path).validate(net, verbose=False)


@pytest.mark.parametrize("storage", OURS)
def test_state_dicts_of_the_module_and_its_children_hold_masters_in_mid_run(storage, tmp_path):
    class Reads(Net):
        def training_step(self, batch, batch_idx):
            self.compare()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.compare()

        def on_validation_end(self):
            self.compare()

        def compare(self):
            masters = self.trainer.precision_plugin.masters()
            whole = self.state_dict()
            assert difference(named(whole), masters) is None
            assert whole["tied_out.weight"] is whole["tied_in.weight"]
            for name in ("embed", "norm", "tied_in", "frozen", "late", "head"):
                child = getattr(self, name).state_dict()
                assert difference(child, {key: masters[f"{name}.{key}"] for key in child}) is None
            assert same_bits(self.tied_out.state_dict()["weight"], masters["tied_in.weight"])
            assert same_bits(self.head.state_dict(prefix="a.b.")["a.b.weight"], masters["head.weight"])
            assert isinstance(self.state_dict(keep_vars=True)["head.weight"], nn.Parameter)
            self.compared += 1

    net = Reads()
    net.compared = 0
    make_trainer(storage, tmp_path, max_epochs=2).fit(net)
    assert net.compared == 2 * (2 * BATCHES + 1)


@pytest.mark.parametrize("storage", OURS)
def test_a_state_dict_taken_in_mid_run_is_not_changed_by_later_steps(storage, tmp_path):
    net = Net()
    taken = []

    def take(trainer, module):
        if not taken:
            state = {name: value for name, value in module.state_dict().items() if "norm" not in name}
            taken.extend([state, {name: value.clone() for name, value in state.items()}])

    make_trainer(storage, tmp_path, max_epochs=1, callbacks=[OnBatch(take)]).fit(net)
    assert difference(taken[0], taken[1]) is None
    assert not same_bits(taken[0]["head.weight"], net.head.weight.detach())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("storage", OURS)
def test_a_copy_of_the_module_made_in_mid_run_gives_the_masters_of_that_moment(storage, copied, tmp_path):
    taken = []

    def take(trainer, module):
        if trainer.global_step == 3:
            taken.extend([masters_of(module), nn.ModuleList([copied(module.head), copied(module.frozen), copied(module.norm)])])

    make_trainer(storage, tmp_path, max_epochs=1, callbacks=[OnBatch(take)]).fit(Net())
    masters, (head, frozen, norm) = taken
    for name, child in (("head", head), ("frozen", frozen), ("norm", norm)):
        assert difference(child.state_dict(), {key: masters[f"{name}.{key}"] for key in child.state_dict()}) is None


@pytest.mark.parametrize("storage", OURS)
def test_tied_weights_take_the_space_of_one_in_the_file(storage, tmp_path):
    path = tmp_path / "in_run.ckpt"
    save = OnBatch(lambda trainer, _: trainer.save_checkpoint(path, weights_only=True))
    make_trainer(storage, tmp_path, max_epochs=1, callbacks=[save]).fit(Net())
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert weights["tied_in.weight"].data_ptr() == weights["tied_out.weight"].data_ptr()


@pytest.mark.parametrize("storage", OURS)
def test_masters_with_special_values_pass_through_a_file(storage, tmp_path):
    # beyond bf16's largest, negative zero, the least and the largest subnormal, ties, an infinity
    special = torch.tensor([3.4e38, -3.4e38, -0.0, 1e-45, 1.1754942e-38, 1 + 2.0**-8, -(1 + 3 * 2.0**-8), float("inf")])

    class Special(Net):
        def __init__(self):
            super().__init__("sgd")
            self.special = nn.Parameter(special.clone())

        def configure_optimizers(self):
            return torch.optim.SGD([self.special, *self.head.parameters()], lr=0.1)

        def training_step(self, batch, batch_idx):
            # a gradient of zero makes a full copy of it, and changes nothing
            return super().training_step(batch, batch_idx) + 0 * self.special[2]

    path = tmp_path / "file.ckpt"
    with pytest.warns(UserWarning, match="special"):
        make_trainer(storage, tmp_path, max_steps=2, callbacks=[OnBatch(lambda trainer, _: trainer.save_checkpoint(path))]).fit(
            Special()
        )
    assert same_bits(torch.load(path, weights_only=True)["state_dict"]["special"], special)
    resumed = Special()
    with pytest.warns(UserWarning, match="special"):
        make_trainer(storage, tmp_path, max_steps=4).fit(resumed, ckpt_path=path)
    assert same_bits(resumed.records[0]["masters"]["special"], special)
    assert same_bits(resumed.special.detach(), special)


@pytest.mark.parametrize("storage", OURS)
def test_an_edit_is_in_the_file_that_is_saved_right_after_it(storage, tmp_path):
    def edit(trainer, module):
        with torch.no_grad():
            module.head.weight[0, 0] = 0.75
            module.head.weight[0, 1] = 0.0
        trainer.save_checkpoint(path)

    path = tmp_path / "file.ckpt"
    before: list[Tensor] = []

    class Remembers(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass  # a hook in which a user could edit

        def on_train_end(self):
            before.append(masters_of(self)["head.weight"])

    make_trainer(storage, tmp_path, max_steps=3, callbacks=[OnBatch(edit)]).fit(Remembers())
    saved = torch.load(path, weights_only=True)["state_dict"]["head.weight"]
    assert saved[0, :2].tolist() == [0.75, 0.0]
    assert same_bits(saved, before[0])
    assert not same_bits(saved, saved.bfloat16().float())  # elements that were not edited keep their master bits


@pytest.mark.parametrize("storage", OURS)
def test_the_file_of_a_run_that_broke_off_holds_the_masters_of_its_last_step(storage, tmp_path):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 4:
                self.records.append(record(self))
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    net = Breaks()
    callback = OnExceptionCheckpoint(tmp_path, "broken")
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(storage, tmp_path, max_epochs=1, callbacks=[callback]).fit(net)
    last = net.records[-1]["masters"]
    assert difference(named(plain_fp32(tmp_path / "broken.ckpt")["state_dict"]), last) is None
    # and the module is left in fp32 with the same weights
    assert difference({name: param.detach() for name, param in net.named_parameters()}, last) is None


# --- resume ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """Uninterrupted runs of 4 epochs, with a file for each third step; made when they are first asked for."""
    runs: dict[tuple[str, str], tuple[Net, Any]] = {}

    def get(storage: str, optimizer: str) -> tuple[Net, Any]:
        if (storage, optimizer) not in runs:
            folder = tmp_path_factory.mktemp(f"{storage}-{optimizer}")
            checkpoints = ModelCheckpoint(
                dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, auto_insert_metric_name=False
            )
            net = Net(optimizer)
            make_trainer(storage, folder, max_epochs=4, callbacks=[checkpoints]).fit(net)
            runs[storage, optimizer] = net, folder
        return runs[storage, optimizer]

    return get


def assert_goes_on_like(resumed: Net, whole: Net, first_step: int) -> None:
    assert [entry["step"] for entry in resumed.records] == list(range(first_step, 4 * BATCHES))
    assert difference(resumed.records, whole.records[first_step:]) is None
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= first_step}
    assert difference(dict(resumed.named_parameters()), dict(whole.named_parameters())) is None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("storage", OURS)
def test_4_epochs_equal_2_and_2_more_after_a_resume(storage, optimizer, whole_runs, tmp_path):
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="half")
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[checkpoints]).fit(Net(optimizer))
    resumed = Net(optimizer)
    make_trainer(storage, tmp_path, max_epochs=4).fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert_goes_on_like(resumed, whole_runs(storage, optimizer)[0], 2 * BATCHES)


@pytest.mark.parametrize("step", [9, 15], ids=["before the late part is unfrozen", "after it was"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("storage", OURS)
def test_a_resume_in_the_middle_of_an_epoch_is_bit_exact(storage, optimizer, step, whole_runs, tmp_path):
    whole, folder = whole_runs(storage, optimizer)
    resumed = Net(optimizer)
    make_trainer(storage, tmp_path, max_epochs=4).fit(resumed, ckpt_path=folder / f"{step}.ckpt")
    assert_goes_on_like(resumed, whole, step)


@pytest.mark.parametrize("storage", OURS)
def test_a_resume_from_a_file_saved_after_fit_has_ended_is_bit_exact(storage, whole_runs, tmp_path):
    trainer = make_trainer(storage, tmp_path, max_epochs=2)
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = Net()
    make_trainer(storage, tmp_path, max_epochs=4).fit(resumed, ckpt_path=tmp_path / "after.ckpt")
    assert_goes_on_like(resumed, whole_runs(storage, "adamw")[0], 2 * BATCHES)


@pytest.mark.parametrize("storage", OURS)
def test_a_resume_with_the_same_trainer_module_and_plugin_is_bit_exact(storage, whole_runs, tmp_path):
    whole, folder = whole_runs(storage, "adamw")
    net = Net()
    trainer = make_trainer(storage, tmp_path, max_steps=5)
    trainer.fit(net)
    net.records, net.losses = [], {}
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net, ckpt_path=folder / "15.ckpt")
    assert_goes_on_like(net, whole, 15)


@pytest.mark.parametrize(("before", "after"), [("split", "copy"), ("copy", "split")])
def test_masters_and_moments_are_exact_after_a_change_of_storage(before, after, whole_runs, tmp_path):
    whole, folder = whole_runs(before, "adamw")
    resumed = Net()
    make_trainer(after, tmp_path, max_steps=16).fit(resumed, ckpt_path=folder / "15.ckpt")
    for key in ("masters", "optimizer", "lr", "step"):
        assert difference(resumed.records[0][key], whole.records[15][key], key) is None


@pytest.mark.parametrize("storage", OURS)
def test_a_resume_continues_what_a_finetuning_callback_unfroze(storage, tmp_path):
    class Finetuned(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
            self.head = nn.Linear(8, 1)
            self.records = []

        def training_step(self, batch, batch_idx):
            # the callback freezes the backbone anew when a run is resumed, under any precision
            self.backbone.requires_grad_(self.current_epoch >= 1)
            self.records.append(record(self))
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.trainer.global_step))
            return self.head(self.backbone(x)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.head.parameters(), lr=1e-2)

        def train_dataloader(self):
            return DataLoader(range(3), batch_size=None)

    def callback():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, verbose=False)

    whole = Finetuned()
    make_trainer(storage, tmp_path, max_epochs=4, callbacks=[callback()]).fit(whole)
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="half")
    make_trainer(storage, tmp_path, max_epochs=2, callbacks=[callback(), checkpoints]).fit(Finetuned())
    resumed = Finetuned()
    make_trainer(storage, tmp_path, max_epochs=4, callbacks=[callback()]).fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert difference(resumed.records, whole.records[6:]) is None
    assert set(whole.records[-1]["optimizer"]) == {name for name, _ in whole.named_parameters()}


@pytest.mark.parametrize("storage", OURS)
def test_the_lr_finder_puts_the_masters_back(storage, tmp_path):
    class Tuned(Net):
        def __init__(self):
            super().__init__()
            self.lr = 1e-2

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    net = Tuned()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    trainer = make_trainer(storage, tmp_path, max_epochs=1)
    Tuner(trainer).lr_find(net, num_training=4, update_attr=True)
    assert len(net.records) >= 4
    assert difference({name: param.detach() for name, param in net.named_parameters()}, before) is None


# --- from every precision to every other -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The file of a run of 2 epochs under each precision; made when it is first asked for."""
    paths: dict[str, Any] = {}

    def get(precision: str) -> Any:
        if precision not in paths:
            folder = tmp_path_factory.mktemp(precision)
            checkpoints = ModelCheckpoint(dirpath=folder, filename="2-epochs")
            make_trainer(precision, folder, max_epochs=2, callbacks=[checkpoints]).fit(Net())
            paths[precision] = folder / "2-epochs.ckpt"
        return paths[precision]

    return get


@pytest.mark.parametrize("after", [*STOCK, *OURS])
@pytest.mark.parametrize("before", [*STOCK, *OURS])
def test_a_run_goes_on_under_every_other_precision(before, after, files, tmp_path):
    checkpoint = torch.load(files(before), weights_only=True)
    net = Net()
    trainer = make_trainer(after, tmp_path, max_epochs=3)
    if after in OURS and before == "bf16-true":
        with pytest.warns(UserWarning, match="16-bit weights"):
            trainer.fit(net, ckpt_path=files(before))
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*16-bit")
            trainer.fit(net, ckpt_path=files(before))

    assert len(net.records) == BATCHES
    first = net.records[0]
    assert first["step"] == 2 * BATCHES
    dtype = torch.bfloat16 if after == "bf16-true" else torch.float32
    expected = {name: value.to(dtype) for name, value in named(checkpoint["state_dict"]).items()}
    assert difference(first["masters"], expected) is None
    if after in OURS:
        cast = {name for name, param in first["parameters"].items() if param.dtype == torch.bfloat16}
        assert cast == {name for name in expected if not name.startswith("norm.")}

    # by index in the file, over the groups in order
    order = [name for name, _ in net.named_parameters() if name != "ties"] + ["ties"]
    assert len(first["optimizer"]) == len(checkpoint["optimizer_states"][0]["state"]) == 8
    for index, saved in checkpoint["optimizer_states"][0]["state"].items():
        state = first["optimizer"][order[index]]
        assert state["step"] == saved["step"] == 2 * BATCHES
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype == dtype
            assert same_bits(state[key], saved[key].to(dtype))
    # never silently 16-bit, afterwards either
    for state in net.records[-1]["optimizer"].values():
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {dtype}


@pytest.mark.parametrize("ours", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("before", ["32-true", "split"])
def test_a_run_goes_on_under_our_plugin_without_masters(before, ours, files, tmp_path):
    saved = torch.load(files(before), weights_only=True)
    net = Net()
    trainer = lightning_mp.Trainer(
        precision_plugin=ours, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, max_epochs=3,
    )  # fmt: skip
    trainer.fit(net, ckpt_path=files(before))
    assert difference(net.records[0]["masters"], named(saved["state_dict"])) is None
    trainer.save_checkpoint(tmp_path / "third.ckpt")
    resumed = Net()
    make_trainer("split", tmp_path, max_epochs=4).fit(resumed, ckpt_path=tmp_path / "third.ckpt")
    assert difference(resumed.records[0]["masters"], {name: p.detach() for name, p in net.named_parameters()}) is None


def test_a_file_of_ours_with_a_16_bit_buffer_is_not_reported_as_rounded(tmp_path):
    class Buffered(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3, dtype=torch.bfloat16))

    trainer = make_trainer("split", tmp_path, max_epochs=1)
    trainer.fit(Buffered())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*16-bit")
        make_trainer("split", tmp_path, max_epochs=2).fit(Buffered(), ckpt_path=tmp_path / "file.ckpt")


# --- bad input -------------------------------------------------------------------------------------------------------------


class Other(L.LightningModule):
    """A different model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(2, 4)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(2), batch_size=None)


@pytest.mark.parametrize("storage", OURS)
def test_the_file_of_another_model_is_refused_and_harms_neither_module_nor_file(storage, files, tmp_path):
    path = files("split")
    content = digest(path)
    other = Other()
    before = {name: param.detach().clone() for name, param in other.named_parameters()}
    with pytest.raises(RuntimeError, match=r"Missing key.*layer\.weight"):
        make_trainer(storage, tmp_path, max_epochs=3).fit(other, ckpt_path=path)
    assert difference({name: param.detach() for name, param in other.named_parameters()}, before) is None
    assert digest(path) == content
    make_trainer(storage, tmp_path, max_epochs=1).fit(other)
    assert other.layer.weight.dtype == torch.float32


@pytest.mark.parametrize("storage", OURS)
def test_a_missing_file_is_named_and_the_module_stays_as_it_was(storage, tmp_path):
    other = Other()
    before = other.layer.weight.detach().clone()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        make_trainer(storage, tmp_path, max_epochs=3).fit(other, ckpt_path=tmp_path / "nowhere.ckpt")
    assert same_bits(other.layer.weight.detach(), before)


@pytest.mark.parametrize("storage", OURS)
def test_a_weights_only_file_is_refused_for_resume_and_leaves_an_fp32_module(storage, tmp_path):
    trainer = make_trainer(storage, tmp_path, max_epochs=1)
    trainer.fit(Net())
    path = tmp_path / "weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    net = Net()
    with pytest.raises(KeyError, match="contains only the model"):
        make_trainer(storage, tmp_path, max_epochs=2).fit(net, ckpt_path=path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert difference({name: param.detach() for name, param in net.named_parameters()}, named(saved)) is None


@pytest.mark.parametrize("storage", OURS)
def test_a_state_dict_that_does_not_fit_is_refused_in_mid_run_and_training_can_go_on(storage, tmp_path):
    class Loads(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 2:
                before = masters_of(self)
                with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
                    self.head.load_state_dict({"weight": torch.ones(2, 8), "bias": before["head.bias"]})
                assert difference(masters_of(self), before) is None

    net = Loads()
    make_trainer(storage, tmp_path, max_epochs=1).fit(net)
    plain = Net()
    make_trainer(storage, tmp_path, max_epochs=1).fit(plain)
    assert difference(dict(net.named_parameters()), dict(plain.named_parameters())) is None


# --- averaging callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", OURS)
def test_a_file_with_averaged_weights_also_holds_the_exact_masters(storage, tmp_path):
    masters: dict[int, dict[str, Tensor]] = {}
    checkpoints = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1, auto_insert_metric_name=False
    )
    note = OnBatch(lambda trainer, module: masters.update({trainer.global_step: masters_of(module)}))
    make_trainer(
        storage, tmp_path, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9), note, checkpoints], val_check_interval=2
    ).fit(Net())
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    for step in (3, 6, 9, 12):
        checkpoint = plain_fp32(tmp_path / f"{step}.ckpt")
        assert difference(named(checkpoint["current_model_state"]), masters[step]) is None
        assert not same_bits(checkpoint["state_dict"]["head.weight"], checkpoint["current_model_state"]["head.weight"])


@pytest.mark.parametrize("step", [6, 9])
@pytest.mark.parametrize("storage", OURS)
def test_a_resume_with_averaged_weights_is_bit_exact(storage, step, tmp_path):
    def run(net, max_steps, **kwargs):
        averaging = EMAWeightAveraging(decay=0.9)
        checkpoints = ModelCheckpoint(
            dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1, auto_insert_metric_name=False
        )
        callbacks = [averaging] if kwargs else [averaging, checkpoints]
        make_trainer(storage, tmp_path, max_steps=max_steps, callbacks=callbacks, limit_val_batches=0).fit(net, **kwargs)

    whole, resumed = Net(), Net()
    run(whole, 12)
    run(resumed, 12, ckpt_path=tmp_path / f"{step}.ckpt")
    assert difference(resumed.records, whole.records[step:]) is None
    assert difference(dict(resumed.named_parameters()), dict(whole.named_parameters())) is None


@pytest.mark.parametrize("validate", [False, True], ids=["without validation", "with validation"])
@pytest.mark.parametrize("storage", OURS)
def test_averaged_weights_are_averages_of_the_masters_in_fp32(storage, validate, tmp_path):
    masters: list[dict[str, Tensor]] = []
    averaging = WeightAveraging(avg_fn=lambda average, current, count: average + (current.float() - average) * 0.5)
    net = Net()
    make_trainer(
        storage,
        tmp_path,
        max_steps=5,
        callbacks=[averaging, OnBatch(lambda trainer, module: masters.append(masters_of(module)))],
        val_check_interval=2,
        limit_val_batches=1 if validate else 0,
    ).fit(net)
    expected = masters[0]
    for current in masters[1:]:
        expected = {name: value + (current[name] - value) * 0.5 for name, value in expected.items()}
    # training ends with the averages in place of the weights
    assert difference({name: param.detach() for name, param in net.named_parameters()}, expected) is None


@pytest.mark.parametrize("storage", OURS)
def test_validation_with_averaged_weights_leaves_the_masters_as_they_were(storage, tmp_path):
    def run(limit):
        net = Net()
        make_trainer(
            storage, tmp_path, max_epochs=2, callbacks=[WeightAveraging()], val_check_interval=2, limit_val_batches=limit
        ).fit(net)
        return net

    assert difference(run(1).records, run(0).records) is None


@pytest.mark.parametrize("storage", OURS)
def test_a_plain_file_resumes_into_a_run_with_averaged_weights(storage, files, tmp_path):
    net = Net()
    with pytest.warns(UserWarning, match="not created with WeightAveraging"):
        make_trainer(storage, tmp_path, max_epochs=3, callbacks=[WeightAveraging()]).fit(net, ckpt_path=files("32-true"))
    saved = torch.load(files("32-true"), weights_only=True)
    assert difference(net.records[0]["masters"], named(saved["state_dict"])) is None


@pytest.mark.parametrize("storage", OURS)
def test_stochastic_weight_averaging_ends_with_the_fp32_averages_of_the_masters_in_module_and_file(storage, tmp_path):
    starts: list[dict[str, Tensor]] = []

    class OneLr(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_epoch_start(self):
            starts.append(masters_of(self))

    averaging = StochasticWeightAveraging(
        1e-3, swa_epoch_start=2, avg_fn=lambda average, current, count: average + (current.float() - average) * 0.5
    )
    net = OneLr()
    trainer = make_trainer(storage, tmp_path, max_epochs=4, callbacks=[averaging])
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert {param.dtype for param in net.parameters()} == {torch.float32}
    assert difference(named(plain_fp32(tmp_path / "file.ckpt")["state_dict"]), dict(net.named_parameters())) is None
    expected = starts[1]
    for current in starts[2:]:
        expected = {name: value + (current[name] - value) * 0.5 for name, value in expected.items()}
    assert difference({name: param.detach() for name, param in net.named_parameters()}, expected) is None
