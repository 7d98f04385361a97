"""`LossScaleMonitor` logs the scale and the fate of every optimizer step, with our plugin, a scripted one, and Lightning's."""

from __future__ import annotations

import copy
import csv
import math
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import SGD

from lightning_mp import DynamicLossScale, MasterWeightPrecision
from lightning_mp.callbacks.loss_scale import LossScaleMonitor
from tests.callbacks.stand_ins import Rows, Scripted, wandb_run
from tests.conftest import Said
from tests.instruments import CountSyncs
from tests.modules import M, random_rows
from tests.report.wandb_file import isolate

pytestmark = pytest.mark.usefixtures("seeded")

LOG2, SKIPPED, APPLIED = "loss_scale/log2", "loss_scale/skipped_steps", "loss_scale/applied_steps"
NONFINITE, HEADROOM = "loss_scale/nonfinite_losses", "loss_scale/headroom_bits"
KEYS = {LOG2, SKIPPED, APPLIED, NONFINITE, HEADROOM}


class Snapshots(LossScaleMonitor):
    """Keeps ``callback_metrics`` as they are when the hooks of each batch are over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop._batches_that_stepped:
            self.keep(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.keep(trainer)

    def keep(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        self.seen.append({key: metrics[key].item() for key in KEYS & set(metrics)})


def make_trainer(plugin: Precision, *callbacks: Any, **options: Any) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        **options,
    }
    return Trainer(plugins=[plugin], callbacks=list(callbacks), **settings)


def rows_of(plugin: Precision, module: M | None = None, **options: Any) -> Rows:
    rows = Rows()
    make_trainer(plugin, LossScaleMonitor(), logger=rows, **options).fit(module or M())
    return rows


def test_each_step_has_the_scale_that_made_its_gradients_and_skipped_steps_show() -> None:
    rows = rows_of(Scripted([None, "a", None, None]))
    assert rows.column(LOG2) == [10, 10, 9, 9]
    assert rows.column(SKIPPED) == [0, 1, 1, 1]
    assert rows.column(APPLIED) == [1, 1, 2, 3]
    assert rows.column(NONFINITE) == [0, 0, 0, 0]
    assert [row["step"] for row in rows.rows] == [0, 1, 2, 3]


def test_an_unknown_headroom_is_not_logged_again() -> None:
    assert rows_of(Scripted([None, "a", None, "a"])).column(HEADROOM) == [3.5, None, 3.5, None]


def test_log_every_n_steps_thins_the_log_but_callback_metrics_know_of_a_skip_at_once() -> None:
    rows, monitor = Rows(), Snapshots()
    make_trainer(Scripted(["a", None, None]), monitor, logger=rows, log_every_n_steps=2).fit(M())
    assert [row["step"] for row in rows.rows] == [1, 3]
    assert rows.column(APPLIED) == [1, 3]
    assert [seen[SKIPPED] for seen in monitor.seen] == [1, 1, 1, 1]
    assert [seen[LOG2] for seen in monitor.seen] == [10, 9, 9, 9]
    assert monitor.seen[0].keys() == KEYS - {HEADROOM}
    assert monitor.seen[-1].keys() == KEYS


def test_accumulation_logs_once_per_attempt() -> None:
    rows = rows_of(Scripted([None, "a"]), accumulate_grad_batches=2)
    assert rows.column(APPLIED) == [1, 1]
    assert rows.column(SKIPPED) == [0, 1]


class TwoOptimizers(M):
    """Both step on every second batch; the second one is the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer([self.layer.weight]), self.make_optimizer([self.layer.bias])]


def test_two_optimizers_in_manual_optimization_make_one_row_per_batch_that_steps() -> None:
    rows = rows_of(Scripted([None, "a", None, None]), TwoOptimizers())
    assert rows.column(APPLIED) == [1, 3]
    assert rows.column(SKIPPED) == [1, 1]
    assert rows.column(LOG2) == [10, 9]


class SkipsBatches(M):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)


def test_a_batch_without_an_attempt_has_no_row() -> None:
    rows = rows_of(MasterWeightPrecision("16-master"), SkipsBatches())
    assert [row["step"] for row in rows.rows] == [0, 2]


# --- plugins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [Precision(), MixedPrecision("bf16-mixed", "cpu")], ids=["32-true", "bf16-mixed"])
def test_a_plugin_with_nothing_to_say_is_named_once_and_left_alone(plugin: Precision, said: Said) -> None:
    rows, monitor = Rows(), Snapshots()
    make_trainer(plugin, monitor, logger=rows).fit(M())
    assert said.count(f"LossScaleMonitor has nothing to log|{plugin.precision!r}") == 1
    assert rows.rows == []
    assert monitor.seen == [{}, {}, {}, {}]


def stock_16_mixed(init_scale: float, growth_interval: int = 2000, enabled: bool = True) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, enabled=enabled)
    return MixedPrecision("16-mixed", "cpu", scaler)


def test_lightnings_own_scaler_is_read_before_the_step_changes_it() -> None:
    assert rows_of(stock_16_mixed(2.0**4, growth_interval=1)).column(LOG2) == [4, 5, 6, 7]


def test_an_overflow_under_lightnings_own_scaler_shows_as_a_lower_scale() -> None:
    scales = rows_of(stock_16_mixed(2.0**40)).column(LOG2)
    assert scales == [40, 39, 38, 37]


def test_a_stock_scaler_that_fell_to_zero_has_no_log2(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = stock_16_mixed(2.0**4)
    monkeypatch.setattr(plugin.scaler, "get_scale", lambda: 0.0)
    assert rows_of(plugin).column(LOG2) == []


def test_a_disabled_stock_scaler_has_nothing_to_say(said: Said) -> None:
    assert rows_of(stock_16_mixed(2.0**4, enabled=False)).rows == []
    assert said.count("LossScaleMonitor has nothing to log") == 1


@pytest.mark.parametrize(("every", "reads"), [(1, 4), (2, 2), (10, 0)])
def test_lightnings_own_scaler_is_read_once_per_logged_step(every: int, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_scales = []
    plugin = stock_16_mixed(2.0**4)
    get_scale = plugin.scaler.get_scale  # type: ignore[union-attr]
    monkeypatch.setattr(plugin.scaler, "get_scale", lambda: read_scales.append(1) or get_scale())
    make_trainer(plugin, LossScaleMonitor(), log_every_n_steps=every).fit(M())
    assert len(read_scales) == reads


class CountedSyncs(LossScaleMonitor):
    """Counts what its hooks read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = CountSyncs()

    def on_before_optimizer_step(self, *args: Any) -> None:
        with self.syncs:
            super().on_before_optimizer_step(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        with self.syncs:
            super().on_train_batch_end(*args)


class ShowsItsLoss(M):
    """In the progress bar, for which ``trainer.callback_metrics`` reads the loss whenever it is asked for."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def test_reading_our_plugin_makes_no_sync() -> None:
    monitor = CountedSyncs()
    make_trainer(MasterWeightPrecision("16-master"), monitor, logger=Rows()).fit(ShowsItsLoss())
    assert monitor.syncs.seen == []
    make_trainer(stock_16_mixed(2.0**4), monitor).fit(M())
    assert len(monitor.syncs.seen) == 4  # the count can see one


@pytest.mark.parametrize("precision", ["16-master", "16-mixed"])
def test_the_rows_of_our_plugin_are_its_own_numbers(precision: Any) -> None:
    scale = DynamicLossScale(init_scale=2.0**40, max_scale=2.0**60, growth_interval=2)
    plugin = MasterWeightPrecision(precision, loss_scale=scale)
    rows = rows_of(plugin, M(rows=random_rows(64)))
    attempts = len(rows.rows)
    assert attempts == 32
    assert rows.column(APPLIED)[-1] == plugin.applied_steps > 0
    assert rows.column(SKIPPED)[-1] == plugin.skipped_steps > 0
    scales, skipped = rows.column(LOG2), rows.column(SKIPPED)
    assert scales[:2] == [40, 39]
    for step in range(attempts):
        is_skipped = skipped[step] > (skipped[step - 1] if step else 0)
        assert (rows.column(HEADROOM)[step] is None) == is_skipped
        if is_skipped and step + 1 < attempts:
            assert scales[step + 1] == scales[step] - 1


def test_bf16_masters_log_a_scale_of_one_and_their_counts() -> None:
    rows = rows_of(MasterWeightPrecision("bf16-master"))
    assert rows.column(LOG2) == [0] * 4
    assert rows.column(APPLIED) == [1, 2, 3, 4]
    assert rows.column(HEADROOM) == [None] * 4


# --- where the overflow began ------------------------------------------------------------------------------------------


def test_where_an_overflow_began_is_said_when_it_is_news_and_stands_in_the_summary(said: Said) -> None:
    rows = rows_of(Scripted(["a.weight", "a.weight", "b.bias", None]))
    assert said.count("first in 'a.weight'") == 1
    assert said.count("first in 'b.bias'|loss scale 2^8") == 1
    assert rows.summary == {"loss_scale/last_overflow": "b.bias"}


def test_without_an_overflow_nothing_is_said(said: Said) -> None:
    assert rows_of(Scripted()).summary == {}
    assert said.count("first in") == 0


def test_our_plugin_names_the_parameter(said: Said) -> None:
    plugin = MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=2.0**40, max_scale=2.0**60))
    rows = rows_of(plugin)
    assert rows.summary["loss_scale/last_overflow"] in ("layer.weight", "layer.bias")
    assert said.count(f"The gradients overflowed|{plugin.last_overflow!r}") == 1


def test_other_ranks_leave_the_summary_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    assert rows_of(Scripted(["a"])).summary == {}


# --- loggers and other callbacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"logger": False, "barebones": True, "log_every_n_steps": None},
        {"fast_dev_run": True},
        {"overfit_batches": 1},
        {"max_steps": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [lambda: Scripted(["a", None]), lambda: stock_16_mixed(8.0), Precision])
def test_it_raises_nothing_and_warns_nothing_where_there_is_nothing_to_log_to(options: Any, make: Any, said: Said) -> None:
    unset = dict.fromkeys(["enable_progress_bar", "enable_model_summary"]) if options.get("barebones") else {}
    make_trainer(make(), LossScaleMonitor(), **{**options, **unset}).fit(M())
    assert said.count("self.log(") == 0


def test_every_logger_gets_the_rows(tmp_path: Path) -> None:
    first, second = Rows(), Rows()
    loggers = [first, CSVLogger(tmp_path, name="", version=""), second]
    make_trainer(Scripted([None, "a", None, None]), LossScaleMonitor(), logger=loggers).fit(M())
    assert len(first.rows) == 4
    assert first.rows == second.rows
    with open(tmp_path / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert [row[LOG2] for row in table] == ["10.0", "10.0", "9.0", "9.0"]
    assert [row[HEADROOM] for row in table] == ["3.5", "", "3.5", "3.5"]


def test_the_name_is_in_the_run_summary_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    logger = WandbLogger(project="test", offline=True, save_dir=tmp_path)
    make_trainer(Scripted([None, "a.weight"]), LossScaleMonitor(), logger=logger).fit(M())
    logger.experiment.finish()
    history, summary = wandb_run(tmp_path)
    assert summary["loss_scale/last_overflow"] == "a.weight"
    assert [row[LOG2] for row in history if LOG2 in row] == [10, 10, 9, 9]
    assert [row["trainer/global_step"] for row in history if LOG2 in row] == [0, 1, 2, 3]


def test_a_checkpoint_can_follow_the_scale(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "{step}", monitor=LOG2, mode="min", every_n_train_steps=1)
    make_trainer(Scripted([None, "a", None]), LossScaleMonitor(), best).fit(M())
    assert best.best_model_score == 9


def test_training_can_stop_on_skipped_steps() -> None:
    stop = EarlyStopping(SKIPPED, mode="min", patience=2, check_on_train_epoch_end=True)
    trainer = make_trainer(Scripted([None] * 4 + ["a"] * 40), LossScaleMonitor(), stop, max_epochs=8)
    trainer.fit(M())
    assert trainer.current_epoch == 3
    assert stop.best_score == 0


def test_a_resumed_run_goes_on_with_the_counts_and_repeats_no_news(tmp_path: Path, said: Said) -> None:
    def fit(epochs: int, **options: Any) -> Rows:
        plugin = MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=2.0**20, max_scale=2.0**60))
        rows, save = Rows(), ModelCheckpoint(tmp_path, "last")
        trainer = make_trainer(plugin, LossScaleMonitor(), save, logger=rows, max_epochs=epochs)
        trainer.fit(M(optimizer=partial(SGD, lr=0.0)), **options)  # no gradient of the second epoch is news
        return rows

    before = fit(4)
    assert before.column(SKIPPED)[-1] > 0
    news = said.count("The gradients overflowed")
    after = fit(5, ckpt_path=tmp_path / "last.ckpt")
    assert after.column(APPLIED)[0] == before.column(APPLIED)[-1] + 1
    assert after.column(SKIPPED)[0] == before.column(SKIPPED)[-1]
    assert said.count("The gradients overflowed") == news > 0
    assert after.summary == before.summary


def test_it_has_no_state_and_copies_and_pickles() -> None:
    monitor = LossScaleMonitor()
    make_trainer(stock_16_mixed(8.0), monitor, logger=Rows()).fit(M())
    assert monitor.state_dict() == {}
    assert all(not isinstance(value, Tensor) for value in vars(monitor).values())
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert isinstance(other, LossScaleMonitor)


def test_it_does_not_import_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises
    assert math.isfinite(rows_of(Scripted(["a"])).column(LOG2)[0])
