"""All monitors at once, in runs that break off, resume, alternate, and do what trainers seldom do."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable as Function
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_mp import DynamicLossScale, LossScaleMonitor, MasterWeightPrecision, Trainer, monitors
from tests.callbacks.stand_ins import Rows
from tests.ddp.launch import run_scenarios, scenarios_of
from tests.instruments import SYNCING, CountSyncs
from tests.modules import QUIET, values
from tests.reference import same_bits

sys.path.append(str(Path(__file__).parents[1] / "report"))
from wandb_file import WandbFile, isolate, read

GROUPS = ("throughput", "memory", "loss_scale", "gradients")
TOKENS = "throughput/tokens"
PER_BATCH = 12.0
OURS = ["bf16-master", "16-master", "16-mixed"]
STOCK = [None, "32-true", "bf16-mixed", "bf16-true"]


class Language(pl.LightningModule):
    """A model of tokens, with a layer of the test's own between embedding and head."""

    def __init__(self, body: Function[[], nn.Module] = nn.Identity, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(16, 8), body(), nn.Linear(8, 16)
        self.lr = lr
        self.losses: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(batch))).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ByHand(Language):
    """Two optimizers of its own; the second steps at every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer in (first, second)[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.embed, self.head)]


def data(batches: int = 8) -> DataLoader[Any]:
    tokens = torch.randint(0, 16, (batches * 2, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(list(tokens), batch_size=2)  # type: ignore[arg-type]


def make(plugin: Any = "16-master", logger: Any = False, callbacks: Any = None, **settings: Any) -> Trainer:
    """A quiet trainer with all monitors; ``plugin`` is ours by name, or ``stock:`` and Lightning's precision."""
    if plugin == "16-master":  # a scale that needs no skipped steps to begin with
        plugin = MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=64.0))
    elif isinstance(plugin, str) and plugin.startswith("stock:"):
        settings["precision"], plugin = plugin.removeprefix("stock:"), None
    watching = monitors(gradients_every_n_steps=3) if callbacks is None else callbacks
    options = {**QUIET, "log_every_n_steps": 2, **settings}
    return Trainer(precision_plugin=plugin, callbacks=watching, **{**options, "logger": logger})


def ours(rows: Rows) -> list[dict[str, Any]]:
    found = [{key: value for key, value in row.items() if key.split("/")[0] in (*GROUPS, "step")} for row in rows.rows]
    return [row for row in found if len(row) > 1]


def assert_in_order(rows: list[dict[str, Any]]) -> None:
    """Each row has its place on the axis of tokens, beyond the one before, and numbers as floats."""
    assert rows
    assert [row for row in rows if TOKENS not in row] == []
    places = [row[TOKENS] for row in rows]
    assert all(a < b for a, b in pairwise(places)), places
    steps = [row["step"] for row in rows]
    assert all(a < b for a, b in pairwise(steps)), steps
    assert {type(value) for row in rows for key, value in row.items() if key != "step"} == {float}


# --- rows ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("every", [0, 1, 3, 5, 50])
@pytest.mark.parametrize("plugin", ["bf16-master", "16-master", None])
def test_tokens_rise_strictly_from_row_to_row_and_every_row_has_them(plugin: Any, every: int, accumulate: int) -> None:
    rows = Rows()
    trainer = make(plugin, rows, log_every_n_steps=every, accumulate_grad_batches=accumulate)
    trainer.fit(Language(), data())
    assert_in_order(ours(rows))
    if plugin is not None:  # the fate of the last step is in the last row
        last = next(row for row in reversed(ours(rows)) if "loss_scale/applied_steps" in row)
        assert last["loss_scale/applied_steps"] == trainer.global_step
        assert last[TOKENS] == 8 * PER_BATCH


def test_every_value_that_callbacks_could_see_is_what_the_last_row_that_has_it_says() -> None:
    rows = Rows()
    trainer = make("16-master", rows, log_every_n_steps=3)
    trainer.fit(Language(), data())
    seen = {key: value for row in ours(rows) for key, value in row.items() if key not in ("step", TOKENS)}
    shown = {key: value.item() for key, value in trainer.callback_metrics.items() if key in seen}
    assert shown.keys() == seen.keys()
    places = ("throughput/samples",)  # asked again for rows of gradients
    assert {k: v for k, v in shown.items() if k not in places} == {k: v for k, v in seen.items() if k not in places}


@pytest.mark.parametrize("plugin", ["16-master", None])
def test_batches_that_are_none_make_no_second_row_at_the_same_place(plugin: Any) -> None:
    batches = [None if index % 2 else batch for index, batch in enumerate(data())]
    rows = Rows()
    make(plugin, rows, log_every_n_steps=1).fit(Language(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert_in_order(ours(rows))
    assert ours(rows)[-1][TOKENS] == 4 * PER_BATCH


@pytest.mark.parametrize("plugin", ["16-master", "bf16-master", None])
def test_steps_without_a_loss_keep_rows_in_order(plugin: Any) -> None:
    class Sometimes(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    rows = Rows()
    make(plugin, rows, log_every_n_steps=1).fit(Sometimes(), data())
    assert_in_order(ours(rows))


@pytest.mark.parametrize("plugin", ["bf16-master", "16-master", "stock:32-true"])
@pytest.mark.parametrize("every", [1, 3])
def test_optimizers_by_hand_keep_rows_in_order(plugin: str, every: int) -> None:
    rows = Rows()
    make(plugin, rows, log_every_n_steps=every).fit(ByHand(), data())
    assert_in_order(ours(rows))


def test_skipped_steps_keep_rows_in_order_and_are_counted_to_the_last() -> None:
    class Overflows(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx in (2, 7):
                loss.register_hook(lambda grad: grad * math.inf)
            return loss

    rows = Rows()
    make("16-master", rows, log_every_n_steps=3).fit(Overflows(), data())
    assert_in_order(ours(rows))
    last = {key: value for row in ours(rows) for key, value in row.items()}
    assert (last["loss_scale/skipped_steps"], last["loss_scale/applied_steps"]) == (2, 6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_arrives_as_it_is(poison: float) -> None:
    rows = Rows()
    trainer = make("bf16-master", rows, callbacks=monitors(gradients_every_n_steps=1), log_every_n_steps=1)
    module = Language()
    with torch.no_grad():
        module.head.bias[0] = poison
    trainer.fit(module, data(3))
    norms = [row["gradients/norm"] for row in ours(rows)]
    assert len(norms) == 3
    assert not any(math.isfinite(norm) for norm in norms)
    assert not math.isfinite(trainer.callback_metrics["gradients/norm"].item())
    assert_in_order(ours(rows))


def test_two_fits_of_one_trainer_go_on_along_the_axis() -> None:
    rows = Rows()
    trainer = make("16-master", rows, log_every_n_steps=3)
    module = Language()
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data())
    assert_in_order(ours(rows))
    assert ours(rows)[-1][TOKENS] == trainer.global_step * PER_BATCH
    last = [row for row in ours(rows) if "throughput/samples" in row][-1]
    assert last["throughput/samples"] * 6 == last[TOKENS]


def test_trainers_that_run_one_inside_the_other_do_not_mix_their_rows() -> None:
    inner_rows, outer_rows = Rows(), Rows()

    class Nested(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:  # between log steps
                make("bf16-master", inner_rows, log_every_n_steps=3).fit(Language(), data(7))

    watching = monitors(gradients_every_n_steps=3)
    make("16-master", outer_rows, [*watching[:2], Nested(), *watching[2:]], log_every_n_steps=3).fit(Language(), data())
    for rows, count in ((inner_rows, 7), (outer_rows, 8)):
        assert_in_order(ours(rows))
        assert [row for row in ours(rows) if TOKENS in row][-1][TOKENS] == count * PER_BATCH
    assert {row["loss_scale/log2"] for row in ours(outer_rows) if "loss_scale/log2" in row} == {6.0}
    assert {row["loss_scale/log2"] for row in ours(inner_rows) if "loss_scale/log2" in row} == {0.0}


def test_nothing_of_a_trainer_is_kept_when_it_is_gone() -> None:
    trainer = make("16-master", Rows())
    trainer.fit(Language(), data(3))
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


# --- runs that break off ---------------------------------------------------------------------------------------------------


class Breaks(Language):
    """Raises once, in its seventh batch."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 6 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().training_step(batch, batch_idx)


errors = pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)


def break_off(trainer: Trainer, module: Breaks) -> None:
    with pytest.raises((ValueError, SystemExit)):
        trainer.fit(module, data())


@errors
def test_what_waits_for_a_row_is_written_when_training_breaks_off(error: BaseException) -> None:
    rows = Rows()
    break_off(make("16-master", rows, log_every_n_steps=4), Breaks(error))
    assert_in_order(ours(rows))
    counts = [row["loss_scale/applied_steps"] for row in ours(rows) if "loss_scale/applied_steps" in row]
    assert counts[-1] == 6


@errors
def test_a_fit_after_an_exception_does_not_write_what_the_last_one_left(error: BaseException) -> None:
    rows = Rows()
    trainer = make("16-master", rows, log_every_n_steps=4)
    break_off(trainer, Breaks(error))
    before = len(ours(rows))
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, LossScaleMonitor)]  # type: ignore[attr-defined]
    trainer.fit(Language(), data())
    assert_in_order(ours(rows)[before:])
    assert not any(key.startswith("loss_scale/") for row in ours(rows)[before:] for key in row)


@errors
def test_after_an_exception_trainer_strategy_module_and_optimizer_are_as_they_were(error: BaseException) -> None:
    module = Breaks(error)
    trainer = make("16-master", False, log_every_n_steps=1)
    break_off(trainer, module)
    assert "save_checkpoint" not in vars(trainer)
    assert not {"training_step", "backward"} & set(vars(trainer.strategy))
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
    for monitor in trainer.callbacks:  # type: ignore[attr-defined]
        pickle.loads(pickle.dumps(monitor))
        copy.deepcopy(monitor)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_exception_in_any_hook_of_another_callback_can_be_followed_by_a_fit(hook: str, is_first: bool) -> None:
    def raises(*args: Any) -> None:
        setattr(other, hook, lambda *args: None)
        raise ValueError("broken")

    rows, other = Rows(), Callback()
    setattr(other, hook, raises)
    watching = monitors(gradients_every_n_steps=3)
    trainer = make("16-master", rows, [other, *watching] if is_first else [*watching, other], log_every_n_steps=1)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Language(), data())
    trainer.fit(Language(), data())
    placed = [row for row in ours(rows) if TOKENS in row]
    assert all(a[TOKENS] < b[TOKENS] for a, b in pairwise(placed))
    assert trainer.global_step >= 8


@pytest.mark.parametrize("hook", ["setup", "configure_model", "configure_optimizers", "on_fit_start"])
@pytest.mark.parametrize("plugin", ["16-master", "stock:32-true"])
def test_an_exception_before_training_leaves_the_plugin_as_it_was(plugin: str, hook: str) -> None:
    def raises(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken")

    rows, module = Rows(), Language()
    setattr(module, hook, raises)
    trainer = make(plugin, rows)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(module, data())
    assert "convert_module" not in vars(trainer.precision_plugin)
    trainer.fit(Language(), data())
    assert_in_order(ours(rows))
    assert ours(rows)[-1][TOKENS] == 8 * PER_BATCH


# --- training is what it was -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return mixed.transpose(1, 2).reshape(x.shape)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class WithItself(nn.Bilinear):
    def __init__(self) -> None:
        super().__init__(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


class First(nn.Module):
    """The output of a layer that returns several things."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


BODIES: dict[str, Function[[], nn.Module]] = {
    "attention": Attention,
    "dropout": lambda: Attention(0.3),
    "lstm": lambda: First(nn.LSTM(8, 8, batch_first=True)),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "bilinear": WithItself,
}


def trained(module: Language, plugin: Any, callbacks: list[Callback], loader: Any = None, **settings: Any) -> list[Tensor]:
    """Losses, weights, optimizer state, and where the random numbers went on."""
    torch.manual_seed(1)
    trainer = make(plugin, Rows(), callbacks, **settings)
    trainer.fit(module, loader or data())
    state = [
        value
        for optimizer in trainer.optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return [*module.losses, *values(module), *state, torch.get_rng_state()]


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if not same_bits(a, b)] == []


@pytest.mark.parametrize(
    "plugin", ["bf16-master", "16-master", "bf16-mixed", "stock:32-true", "stock:bf16-mixed", "stock:bf16-true"]
)
@pytest.mark.parametrize("body", BODIES)
def test_training_is_bit_identical_with_and_without_monitors(body: str, plugin: str) -> None:
    runs = [
        trained(Language(BODIES[body]), plugin, callbacks, gradient_clip_val=0.5)
        for callbacks in ([], monitors(gradients_every_n_steps=3))
    ]
    assert_same_bits(*runs)


@pytest.mark.parametrize("plugin", ["bf16-master", "16-master", "stock:32-true", "stock:bf16-mixed"])
@pytest.mark.parametrize("kind", ["accumulated", "by hand", "validated"])
def test_ways_of_stepping_are_bit_identical_with_and_without_monitors(kind: str, plugin: str) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 3} if kind == "accumulated" else {}
    if kind == "validated":
        settings = {"val_check_interval": 3}
    runs = []
    for callbacks in ([], monitors(gradients_every_n_steps=1)):
        module = ByHand() if kind == "by hand" else Language()
        if kind == "validated":
            module.val_dataloader = lambda: data(2)  # type: ignore[method-assign, assignment]
        runs.append(trained(module, plugin, callbacks, log_every_n_steps=1, **settings))
    assert_same_bits(*runs)


# --- what it costs ---------------------------------------------------------------------------------------------------------


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


class PerBatch(Callback):
    """Counts reads of tensors by the host, batch by batch."""

    def __init__(self, syncs: CountSyncs) -> None:
        self.syncs, self.counts, self.reads = syncs, list[tuple[int, int]](), Counter[str]()
        self.before = (0, 0)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        now = (len(self.syncs.seen), self.reads.total())
        if trainer.fit_loop.batch_idx:
            self.counts.append((now[0] - self.before[0], now[1] - self.before[1]))
        self.before = now


def reads_per_batch(module: Language, plugin: Any, watching: list[Callback], batches: int = 18) -> list[tuple[int, int]]:
    with pytest.MonkeyPatch.context() as patch, CountSyncs() as syncs:
        counter = PerBatch(syncs)
        for name in READS:
            original = getattr(Tensor, name)

            def counted(self: Tensor, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                counter.reads[_name] += 1
                return _original(self, *args, **kwargs)

            patch.setattr(Tensor, name, counted)
        make(plugin, Rows(), [counter, *watching], log_every_n_steps=6).fit(module, data(batches))
    return counter.counts


class Reads(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        next(module.parameters()).sum().item()


@pytest.mark.parametrize("plugin", ["bf16-master", "16-master", "stock:32-true", "stock:bf16-mixed"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_between_log_steps_no_monitor_reads_a_tensor(plugin: str, by_hand: bool) -> None:
    assert SYNCING
    kind = ByHand if by_hand else Language
    without = reads_per_batch(kind(), plugin, [])
    watched = reads_per_batch(kind(), plugin, monitors(gradients_every_n_steps=1000, fingerprints=False))
    read = [batch for batch, (one, other) in enumerate(zip(without, watched, strict=True)) if one != other]
    # from the start of a batch to the start of the next: 5 and 11 are log steps, and the gradient's only sample is the first
    assert set(read) <= {0, 5, 11}
    unhashed = reads_per_batch(kind(), plugin, monitors(gradients_every_n_steps=1000, fingerprints=False), batches=40)
    hashed = reads_per_batch(kind(), plugin, monitors(gradients_every_n_steps=1000), batches=40)
    # a fingerprint reads the samples 1 to 32 and every second one up to 64, of two in a batch, and then none
    changed = [batch for batch, (one, other) in enumerate(zip(unhashed, hashed, strict=True)) if one != other]
    assert changed == list(range(32))
    assert len(unhashed) > 32
    assert reads_per_batch(kind(), plugin, [Reads()]) != without, "a read would be seen"


# --- copies ----------------------------------------------------------------------------------------------------------------


class Counts(Language):
    def count_tokens(self, batch: Tensor) -> int:
        return batch.numel()


class Copies(Callback):
    """Copies and pickles the monitors in the middle of a fit."""

    def __init__(self) -> None:
        self.copies: list[list[Callback]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        watching = [callback for callback in trainer.callbacks if callback is not self]
        self.copies.append(copy.deepcopy(watching))
        self.copies.append(pickle.loads(pickle.dumps(watching)))


@pytest.mark.parametrize("module", [Language, Counts])
@pytest.mark.parametrize("plugin", ["16-master", "stock:32-true"])
def test_monitors_can_be_copied_and_pickled_in_the_middle_and_the_copies_work(plugin: str, module: type[Language]) -> None:
    copies, rows = Copies(), Rows()
    make(plugin, rows, [*monitors(gradients_every_n_steps=3), copies], log_every_n_steps=3).fit(module(), data())
    assert_in_order(ours(rows))
    assert len(copies.copies) == 16
    for watching in (*copies.copies[4:6], *copies.copies[-2:]):
        again = Rows()
        make(plugin, again, watching, log_every_n_steps=3).fit(module(), data())
        assert_in_order(ours(again))
        assert [row[TOKENS] for row in ours(again)] == [row[TOKENS] for row in ours(rows)]


@pytest.mark.parametrize("plugin", ["16-master", "stock:32-true"])
def test_a_module_can_be_copied_and_pickled_while_its_gradients_are_watched(plugin: str) -> None:
    class CopiesModule(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            copy.deepcopy(module)
            pickle.loads(pickle.dumps(module))

    rows = Rows()
    trainer = make(plugin, rows, [*monitors(gradients_every_n_steps=1), CopiesModule()], log_every_n_steps=1)
    trainer.fit(Counts(), data(3))
    assert_in_order(ours(rows))


# --- checkpoints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["16-master", "bf16-master", "stock:32-true"])
def test_a_run_that_resumes_in_mid_epoch_goes_on_along_the_axis(plugin: str, tmp_path: Path) -> None:
    rows = Rows()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    watching = [*monitors(gradients_every_n_steps=3), saving]
    make(plugin, rows, watching, max_steps=5, max_epochs=2, log_every_n_steps=3, enable_checkpointing=True).fit(
        Language(), data()
    )
    saved = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert saved["callbacks"]["SpeedMonitor"] == {"tokens": 60, "samples": 10}
    trainer = make(plugin, rows, max_epochs=2, log_every_n_steps=3)
    trainer.fit(Language(), data(), ckpt_path=tmp_path / "step=5.ckpt")
    assert trainer.global_step == 16
    assert ours(rows)[-1][TOKENS] == 16 * PER_BATCH
    assert_in_order(ours(rows))


def test_a_checkpoint_that_is_saved_as_the_run_breaks_off_has_all_totals(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=1000)
    trainer = make("16-master", False, [*monitors(), saving], enable_checkpointing=True)
    break_off(trainer, Breaks(ValueError("broken")))
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=True)["callbacks"]["SpeedMonitor"] == {"tokens": 72, "samples": 12}


# --- trainers of every kind ------------------------------------------------------------------------------------------------


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from (torch.full((6,), index % 16) for index in range(16))


class Validates(Language):
    def val_dataloader(self) -> Any:
        return data(2)


@pytest.mark.parametrize("plugin", [*OURS, *(f"stock:{name}" for name in STOCK if name)])
@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3, "accumulate_grad_batches": 2},
        {"overfit_batches": 2, "max_epochs": 3},
        {"max_time": "00:00:10:00", "max_epochs": -1, "max_steps": 5},
        {"limit_train_batches": 0.5, "val_check_interval": 2, "num_sanity_val_steps": 2},
        {"limit_train_batches": 0},
        {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2},
        {"inference_mode": False, "detect_anomaly": True},
        {"max_steps": 0},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_trainer_makes_a_monitor_fail(plugin: str, options: dict[str, Any]) -> None:
    rows = Rows()
    make(plugin, rows, **{"log_every_n_steps": 1, **options}).fit(Validates(), data())
    found = ours(rows)
    assert found == [] or all(a[TOKENS] < b[TOKENS] for a, b in pairwise(found))


@pytest.mark.parametrize("plugin", ["bf16-master", "16-master", "stock:32-true"])
def test_data_without_a_length_are_counted(plugin: str) -> None:
    rows = Rows()
    make(plugin, rows, log_every_n_steps=1, accumulate_grad_batches=3).fit(Language(), DataLoader(Endless(), batch_size=2))
    assert_in_order(ours(rows))
    assert ours(rows)[-1][TOKENS] == 8 * PER_BATCH


@pytest.mark.parametrize("plugin", ["16-master", "stock:32-true"])
def test_a_module_that_takes_its_batches_itself_has_rows(plugin: str) -> None:
    class Takes(Language):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    rows = Rows()
    make(plugin, rows).fit(Takes(), data())
    assert_in_order(ours(rows))
    assert ours(rows)[-1][TOKENS] == 8 * PER_BATCH


@pytest.mark.parametrize("is_callback", [False, True])
def test_the_steps_of_a_search_for_the_learning_rate_are_not_in_the_totals(
    is_callback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, watching = Rows(), monitors(gradients_every_n_steps=3)
    search = [LearningRateFinder(num_training_steps=10)] if is_callback else []
    trainer = make("bf16-master", rows, [*watching, *search], enable_checkpointing=True, default_root_dir=tmp_path)
    module = Language()
    if not is_callback:
        Tuner(trainer).lr_find(module, data(40), num_training=10)
    trainer.fit(module, data(12))
    assert_in_order(ours(rows))
    assert trainer.callback_metrics[TOKENS] == 12 * PER_BATCH


def test_a_schedule_of_accumulation_keeps_rows_in_order() -> None:
    rows = Rows()
    schedule = GradientAccumulationScheduler({0: 2, 1: 4})
    make("16-master", rows, [*monitors(), schedule], log_every_n_steps=1, max_epochs=2).fit(Language(), data())
    assert [row[TOKENS] for row in ours(rows)] == [24, 48, 72, 96, 144, 192]


def test_validating_testing_and_predicting_need_no_fit() -> None:
    class Tests(Validates):
        test_step = Language.validation_step

        def predict_step(self, batch: Tensor) -> Tensor:
            return self.head(self.embed(batch))

    trainer, module = make("bf16-master", Rows()), Tests()
    trainer.validate(module)
    trainer.test(module, data(2))
    trainer.predict(module, data(2))
    trainer.fit(module, data())
    trainer.validate(module)
    assert trainer.global_step == 8


def test_the_plain_progress_bar_shows_text_among_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make("16-master", False, [*monitors(), TQDMProgressBar()], log_every_n_steps=1, enable_progress_bar=True)
    trainer.fit(Language(), data())
    out = capsys.readouterr()
    assert "log2_scale=6" in out.out + out.err
    assert trainer.progress_bar_metrics["log2_scale"] == "6"


def test_stopping_early_in_mid_epoch_writes_the_last_step(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 4

    for place in (0, 4):
        rows, watching = Rows(), monitors(gradients_every_n_steps=1000)
        watching.insert(place, Stops())
        make("16-master", [rows, CSVLogger(tmp_path / str(place))], watching, log_every_n_steps=4).fit(Language(), data())
        assert_in_order(ours(rows))
        last = {key: value for row in ours(rows) for key, value in row.items()}
        assert (last["loss_scale/applied_steps"], last[TOKENS]) == (5.0, 5 * PER_BATCH)


def test_early_stopping_on_a_value_of_a_monitor_meets_it_when_it_is_not_finite() -> None:
    module = Language()
    with torch.no_grad():
        module.head.bias[0] = math.nan
    stopping = EarlyStopping("gradients/norm", check_finite=True, check_on_train_epoch_end=True)
    trainer = make("bf16-master", False, [*monitors(), stopping], max_epochs=4)
    trainer.fit(module, data(3))
    assert trainer.current_epoch == 1


# --- Weights & Biases ------------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    isolate(monkeypatch, tmp_path)
    yield tmp_path
    import wandb

    wandb.finish()


def rows_of(file: WandbFile) -> list[dict[str, Any]]:
    found = [
        {key.replace("trainer/global_step", "step"): value for key, value in row.items() if not key.startswith("_")}
        for row in file.history
    ]
    plain = [{key: value for key, value in row.items() if key == "step" or key.split("/")[0] in GROUPS} for row in found]
    return [row for row in plain if len(row) > 1]


def test_a_run_that_the_user_opened_is_used_and_stays_open(wandb_folder: Path) -> None:
    import wandb

    run = wandb.init(project="mine", dir=str(wandb_folder), mode="offline", config={"lightning_mp": "mine", "lr": 1})
    run.log({"before": 1.0})
    make("16-master", WandbLogger(save_dir=wandb_folder), log_every_n_steps=3).fit(Language(), data())
    assert wandb.run is run
    run.log({"after": 1.0})
    run.finish()
    file = read(wandb_folder)
    rows = rows_of(file)
    places = [row.get(TOKENS) for row in rows]
    assert None not in places
    assert all(a < b for a, b in pairwise(places)), places
    assert file.config["lightning_mp"]["precision"] == "16-master"
    assert [row["after"] for row in file.history if "after" in row] == [1.0]
    defined = {key.split(".")[0] for row in rows for key in row if key != "step"}
    assert defined <= set(file.metrics)


def test_a_disabled_run_raises_nothing(wandb_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trainer = make("16-master", WandbLogger(save_dir=wandb_folder), log_every_n_steps=1)
    trainer.fit(Language(), data())
    assert trainer.callback_metrics[TOKENS] == 8 * PER_BATCH


class Alerts(WandbLogger):
    """Keeps its alerts, and opens no run."""

    def __init__(self) -> None:
        pl.loggers.logger.Logger.__init__(self)
        self.alerts: list[str] = []
        self.config, self.summary = self, self

    @property
    def experiment(self) -> Any:
        return self

    def alert(self, title: str, text: str, level: str) -> None:
        self.alerts.append(title)

    def update(self, *args: Any, **kwargs: Any) -> None:
        pass

    define_metric = log_metrics = log_hyperparams = save = finalize = after_save_checkpoint = update  # type: ignore[assignment]
    name = version = save_dir = None  # type: ignore[assignment]


def test_a_scale_that_leaves_its_floor_and_falls_again_is_two_alerts() -> None:
    class Overflows(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx in (0, 1, 6):
                loss.register_hook(lambda grad: grad * math.inf)
            return loss

    logger = Alerts()
    scale = DynamicLossScale(init_scale=32.0, min_scale=16.0, growth_interval=3)
    trainer = make(MasterWeightPrecision("16-master", loss_scale=scale), logger, log_every_n_steps=1)
    trainer.fit(Overflows(), data())
    assert len(logger.alerts) == 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Language(), data())  # its scale only grows
    assert len(logger.alerts) == 2


# --- two ranks -------------------------------------------------------------------------------------------------------------

RANK = int(os.environ.get("LOCAL_RANK", 0))
TIMEOUT_S = 10


class StopsAtOne(Callback):
    """On rank 1 alone a step is the last one, to all who ask before this callback's turn; then it thinks again."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = RANK == 1 and batch_idx == 1

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = False


def fit_two(
    module: Language, plugin: Any, logger: Any, *extra: Callback, batches: Any = None, **options: Any
) -> dict[str, Any]:
    began = time.monotonic()
    strategy = DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S))
    watching = [*monitors(gradients_every_n_steps=3), *extra]
    trainer = make(plugin, logger, watching, **{"devices": 2, "strategy": strategy, "log_every_n_steps": 4, **options})
    error = None
    try:
        trainer.fit(module, data(16) if batches is None else batches)
    except (RuntimeError, ValueError) as caught:
        error = repr(caught)
    known = {key: value.item() for key, value in trainer.callback_metrics.items() if key.split("/")[0] in GROUPS}
    return {
        "error": error,
        "steps": trainer.global_step,
        "seconds": time.monotonic() - began,
        "metrics": known,
        "rows": ours(logger) if isinstance(logger, Rows) else [],
    }


def two_with_wandb(folder: Path) -> dict[str, Any]:
    import wandb

    with pytest.MonkeyPatch.context() as patch:
        mine = folder / f"wandb-{RANK}"
        mine.mkdir()
        isolate(patch, mine)
        found = fit_two(Language(), "16-master", WandbLogger(save_dir=mine, project="ranks", offline=True))
        wandb.finish()
    return found


class SkipsAtOne(Language):
    """On rank 1 alone the gradients overflow in one step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if RANK == 1 and batch_idx == 2:
            loss.register_hook(lambda grad: grad * math.inf)
        return loss


def fewer(folder: Path) -> dict[str, Any]:
    batches = DataLoader(list(data(8).dataset)[: 16 - 2 * RANK], batch_size=2)  # type: ignore[call-overload, var-annotated]
    return fit_two(Language(), "16-master", Rows(), batches=batches, use_distributed_sampler=False, log_every_n_steps=1)


SCENARIOS: dict[str, Function[[Path], dict[str, Any]]] = {
    "ours": lambda folder: fit_two(Language(), "16-master", Rows()),
    "stock": lambda folder: fit_two(Language(), "stock:32-true", Rows()),
    "accumulated": lambda folder: fit_two(Language(), "stock:32-true", Rows(), accumulate_grad_batches=3, log_every_n_steps=2),
    "overflow": lambda folder: fit_two(SkipsAtOne(), "16-master", Rows()),
    "wandb": two_with_wandb,
    "stops": lambda folder: fit_two(Language(), "16-master", Rows(), StopsAtOne()),
    "fewer": fewer,  # at the end: Lightning itself does not survive it
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every scenario on both ranks. One launch serves all tests."""
    return scenarios_of("tests.callbacks.test_monitors_adversarial", tmp_path_factory.mktemp("monitor-ranks"))


@pytest.mark.parametrize("name", ["ours", "stock", "accumulated", "overflow"])
def test_ranks_agree_on_every_value_and_rows_are_in_order(two_ranks: Any, name: str) -> None:
    first, second = two_ranks(name)
    assert (first["error"], second["error"]) == (None, None)
    assert first["metrics"] == second["metrics"]
    assert first["steps"] == second["steps"] == (3 if name == "accumulated" else 8)
    assert_in_order(first["rows"])
    assert first["metrics"][TOKENS] == (12 if name == "accumulated" else 16) * PER_BATCH


def test_only_rank_0_opens_a_run_and_its_rows_count_both_ranks(two_ranks: Any) -> None:
    first, second = two_ranks("wandb")
    assert (first["error"], second["error"]) == (None, None)
    assert first["metrics"] == second["metrics"]
    assert not list((two_ranks.folder / "wandb-1").rglob("*.wandb"))
    file = read(two_ranks.folder / "wandb-0")
    places = [row.get(TOKENS) for row in rows_of(file)]
    assert places[-1] == 16 * PER_BATCH
    assert None not in places
    assert all(a < b for a, b in pairwise(places)), places
    assert file.config["lightning_mp"]["world_size"] == 2


def test_a_rank_that_means_to_stop_leaves_no_rank_waiting(two_ranks: Any) -> None:
    for found in two_ranks("stops"):
        assert (found["error"], found["steps"]) == (None, 8)
        assert found["seconds"] < TIMEOUT_S


def test_a_rank_with_fewer_batches_waits_for_no_collective_of_a_monitor(two_ranks: Any) -> None:
    first, second = two_ranks("fewer")
    assert (second["error"], second["steps"]) == (None, 7)
    assert first["seconds"] < 3 * TIMEOUT_S
    # DDP's own collectives of the eighth step find nobody, and it says so with or without monitors
    assert first["steps"] >= 7


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_scenarios(SCENARIOS, Path(sys.argv[1]))
