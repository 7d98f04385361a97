"""Faults of monitors and of logging that users of neighbouring projects reported, met by all monitors together."""

from __future__ import annotations

import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import (
    DynamicLossScale,
    GradientRangeMonitor,
    LossScaleMonitor,
    MasterWeightPrecision,
    MemoryMonitor,
    SpeedMonitor,
    Trainer,
    monitors,
)
from lightning_mp.callbacks.publish import describe
from lightning_mp.callbacks.run_recorder import RunRecorder
from tests.callbacks.stand_ins import Rows, WatchedWandb
from tests.modules import QUIET

sys.path.append(str(Path(__file__).parent / "report"))
from wandb_file import WandbFile, isolate, read

PRECISIONS = ["bf16-master", "16-master", None]
every_precision = pytest.mark.parametrize("plugin", PRECISIONS)
TOKENS = "throughput/tokens"


class Words(LightningModule):
    """Predicts each word from itself; its inputs are ``input_ids``, with an ``attention_mask`` if it is given any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        ids = batch["input_ids"]
        return nn.functional.cross_entropy(self.head(self.embed(ids)).float().flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def words(batches: int = 8, length: int = 6, real: int | None = None) -> DataLoader[Any]:
    """Batches of two texts; of each, the first ``real`` words are no padding."""
    ids = torch.randint(0, 16, (batches, 2, length), generator=torch.Generator().manual_seed(0))
    made: list[dict[str, Tensor]] = [{"input_ids": batch} for batch in ids]
    if real is not None:
        made = [{**batch, "attention_mask": (torch.arange(length) < real).expand(2, -1).long()} for batch in made]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def make(plugin: Any, callbacks: list[Callback] | None = None, logger: Any = False, **settings: Any) -> Trainer:
    """A quiet trainer with all monitors, or with the callbacks that are given."""
    if plugin == "16-master":
        plugin = MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=64.0))
    watching = monitors(gradients_every_n_steps=2) if callbacks is None else callbacks
    return Trainer(
        precision_plugin=plugin, callbacks=watching, **{**QUIET, "log_every_n_steps": 2, **settings, "logger": logger}
    )


# --- monitors --------------------------------------------------------------------------------------------------------------


@every_precision
def test_e1_the_recorded_loss_is_the_true_one_whatever_the_accumulation(plugin: Any) -> None:
    class Told(Words):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.told.append(loss.item())
            return {"loss": loss} if batch_idx % 2 else loss

    curves = {}
    for accumulate in (1, 4):
        module, recorder = Told(), RunRecorder()
        make(plugin, [recorder], accumulate_grad_batches=accumulate).fit(module, words(10))
        curves[accumulate] = [record.loss for record in recorder.records]
        assert all(loss is not None for loss in curves[accumulate])
        windows = [module.told[at : at + accumulate] for at in range(0, 10, accumulate)]
        assert curves[accumulate] == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-6)
    # weights do not move, so the windows of one run are means over steps of the other
    single = curves[1]
    assert curves[4][0] == pytest.approx(sum(single[:4]) / 4, rel=1e-6)


def test_e1_the_loss_of_manual_optimization_is_not_multiplied_and_missing_ones_are_none() -> None:
    class ByHand(Words):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return (loss, {"loss": loss}, None, {"other": loss})[batch_idx % 4]

    automatic, recorder = RunRecorder(), RunRecorder()
    make(None, [automatic]).fit(Words(), words(4))
    make(None, [recorder]).fit(ByHand(), words(4))
    expected = [record.loss for record in automatic.records]
    assert [record.loss for record in recorder.records] == [*expected[:2], None, None]


@every_precision
def test_e3_a_cpu_has_no_allocator_keys_and_no_peak_of_zero(plugin: Any) -> None:
    rows = Rows()
    make(plugin, logger=rows).fit(Words(), words())
    measured = {key: value for row in rows.rows for key, value in row.items() if key.startswith("memory/")}
    assert measured["memory/peak_rss_gib"] > 0.01
    assert not {"memory/peak_gib", "memory/peak_reserved_gib", "memory/run_peak_gib", "memory/alloc_retries"} & set(measured)


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"fast_dev_run": True},
        {"barebones": True},
        {"overfit_batches": 1},
        {"logger": "csv"},
        {"logger": "two"},
    ],
    ids=str,
)
@every_precision
def test_e4_no_kind_of_logger_or_none_makes_a_monitor_raise(plugin: Any, options: dict[str, Any], tmp_path: Path) -> None:
    logger = {"csv": CSVLogger(tmp_path), "two": [CSVLogger(tmp_path), Rows()]}.get(options.get("logger"), False)  # type: ignore[arg-type]
    settings = {key: value for key, value in options.items() if key != "logger"}
    if "barebones" in options:
        trainer = Trainer(precision_plugin=plugin, accelerator="cpu", max_epochs=1, callbacks=monitors(), barebones=True)
    else:
        trainer = make(plugin, logger=logger, **settings)
    trainer.fit(Words(), words())
    assert trainer.global_step > 0
    if logger:
        trainer.loggers[0].save()
        assert TOKENS in next(tmp_path.rglob("metrics.csv")).read_text()


@pytest.mark.parametrize(
    ("key", "mode", "threshold"),
    [("gradients/updates_lost_fraction", "max", -1.0), ("throughput/tokens", "max", 1.0), ("loss_scale/log2", "min", 100.0)],
)
def test_e5_checkpoints_and_stopping_see_what_monitors_publish(key: str, mode: str, threshold: float, tmp_path: Path) -> None:
    class Moves(Words):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saving = ModelCheckpoint(tmp_path, monitor=key, mode="max", every_n_train_steps=4)
    stopping = EarlyStopping(key, mode=mode, stopping_threshold=threshold, check_on_train_epoch_end=True)
    watching = [*monitors(gradients_every_n_steps=2), saving, stopping]
    trainer = make("16-master", watching, enable_checkpointing=True, max_epochs=5)
    trainer.fit(Moves(), words())
    assert trainer.current_epoch == 1
    assert saving.best_model_score is not None
    alone = EarlyStopping(key, mode=mode, check_on_train_epoch_end=True)
    with pytest.raises(RuntimeError, match="is not available"):
        make("16-master", [alone]).fit(Moves(), words())


class Paced(Words):
    """Sleeps in each step, and much longer in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2)


@every_precision
def test_e7_validation_and_checkpoints_cost_the_step_nothing(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [0.0]  # a clock of the test's own: what sleeps, and nothing else, takes time
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    class Saves(ModelCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            time.sleep(0.5)
            return super().state_dict()

    def fit(**settings: Any) -> dict[str, float]:
        saving = Saves(tmp_path, every_n_train_steps=4, save_top_k=-1)
        watching = [*monitors(), *([saving] if settings else [])]
        trainer = make(plugin, watching, max_epochs=5, enable_checkpointing=bool(settings), **settings)
        trainer.fit(Paced(), words(9), words(1) if settings else None)
        return {key: value.item() for key, value in trainer.callback_metrics.items() if key.startswith("throughput/")}

    alone = fit()
    began = clock[0]
    beside = fit(val_check_interval=3, num_sanity_val_steps=1)
    assert clock[0] - began > 5 * 3 * 0.2 + 11 * 0.5, "validation and saving took time"
    for key in ("throughput/tokens_per_s", "throughput/step_time_ms", "throughput/step_time_p95_ms"):
        assert beside[key] == pytest.approx(alone[key])
    assert alone["throughput/step_time_ms"] == pytest.approx(10.0)


@every_precision
@pytest.mark.parametrize("accumulate", [1, 3])
def test_e9_padding_is_told_from_tokens_and_both_are_reported(plugin: Any, accumulate: int) -> None:
    rows = Rows()
    trainer = make(plugin, logger=rows, accumulate_grad_batches=accumulate, log_every_n_steps=1, max_epochs=2)
    trainer.fit(Words(), words(9, length=100, real=10))
    known = {key: value.item() for key, value in trainer.callback_metrics.items()}
    assert known["throughput/padded_tokens_per_s"] == pytest.approx(10 * known["throughput/tokens_per_s"])
    assert known[TOKENS] == 2 * 9 * 2 * 10
    places = [row[TOKENS] for row in rows.rows if TOKENS in row]
    assert places == [2 * 10 * accumulate * step for step in range(1, 18 // accumulate + 1)]
    assert describe(trainer)["monitors"]["SpeedMonitor"]["tokens_counted_by"] == "attention_mask"
    plain = make(plugin)
    plain.fit(Words(), words(9, length=100))
    assert "throughput/padded_tokens_per_s" not in plain.callback_metrics


# --- Weights & Biases and logging ------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No network, no key; a folder for all that wandb writes, and a way to a logger in a folder of its own."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    import wandb

    def logger(name: str, **settings: Any) -> WandbLogger:
        (tmp_path / name).mkdir()
        return WandbLogger(save_dir=tmp_path / name, project="cases", offline=True, **settings)

    yield logger
    wandb.finish()


def placed(file: WandbFile) -> list[float]:
    return [row[TOKENS] for row in file.history if TOKENS in row]


def test_f1_two_runs_in_one_process_have_two_ids_and_each_begins_at_its_own_zero(offline: Any, tmp_path: Path) -> None:
    import wandb

    for name, plugin in (("fp32", None), ("bf16", "bf16-master")):
        make(plugin, logger=offline(name)).fit(Words(), words())
        wandb.finish()
    files = [read(tmp_path / name) for name in ("fp32", "bf16")]
    assert files[0].run["run_id"] != files[1].run["run_id"]
    for file in files:
        assert placed(file)[-1] == 96.0
        assert all(a < b for a, b in pairwise(placed(file)))
    assert [file.config["lightning_mp"]["precision"] for file in files] == ["32-true", "bf16-master"]


def test_f1_one_trainer_with_a_new_run_for_each_fit_defines_and_describes_each(offline: Any, tmp_path: Path) -> None:
    import wandb

    trainer = make("bf16-master", logger=offline("first"))
    trainer.fit(Words(), words())
    wandb.finish()
    trainer.logger = offline("second")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Words(), words())
    wandb.finish()
    first, second = read(tmp_path / "first"), read(tmp_path / "second")
    assert placed(first)[-1] == 96.0
    assert placed(second)[0] > 96.0
    for file in (first, second):
        assert file.config["lightning_mp"]["precision"] == "bf16-master"
        logged = {key for row in file.history for key in row if key.split("/")[0] in ("throughput", "memory", "loss_scale")}
        assert logged <= set(file.metrics)


def test_f4_a_rank_other_than_0_leaves_its_experiment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []

    class Overflows(Words):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                loss.register_hook(lambda grad: grad * math.inf)
            return loss

    def fit() -> Trainer:
        touched.clear()
        scale = DynamicLossScale(init_scale=32.0, min_scale=16.0)
        plugin = MasterWeightPrecision("16-master", loss_scale=scale)
        trainer = make(plugin, logger=WatchedWandb(touched), log_every_n_steps=1)
        trainer.fit(Overflows(), words())
        return trainer

    first = fit()
    assert {"define_metric", "alert", "config or summary"} <= set(touched)
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda self: False))
    second = fit()
    assert touched == []
    assert first.callback_metrics.keys() == second.callback_metrics.keys()


def test_f5_an_offline_run_has_its_config_and_goes_on_offline(offline: Any, tmp_path: Path) -> None:
    import wandb

    def fit(name: str, ckpt: Any = None, epochs: int = 1) -> None:
        plugin = MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=64.0, max_scale=128.0))
        saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
        watching = [*monitors(), saving]
        logger = offline(name, id="same", resume="allow")
        make(plugin, watching, logger, enable_checkpointing=True, max_epochs=epochs).fit(Words(), words(), ckpt_path=ckpt)
        wandb.finish()

    fit("first")
    fit("second", tmp_path / "saved" / "last.ckpt", 2)
    files = [read(tmp_path / name) for name in ("first", "second")]
    for file in files:
        settings = file.config["lightning_mp"]
        assert settings["precision_plugin"]["loss_scale"]["max_scale"] == 128.0
        assert settings["strategy"] == "SingleDeviceStrategy"
        assert file.exit_code == 0
    assert [file.run["run_id"] for file in files] == ["same", "same"]
    places = [place for file in files for place in placed(file)]
    assert places[-1] == 192.0
    assert all(a < b for a, b in pairwise(places))


def count_words(batch: Any) -> int:
    return int(batch["input_ids"].numel())


def test_f6_settings_are_text_and_numbers_by_the_time_a_logger_has_them(offline: Any, tmp_path: Path) -> None:
    import wandb

    class Module(Words):
        def __init__(self, dtype: Any, folder: Path, function: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    plugin = MasterWeightPrecision("bf16-master", fp32_modules=(nn.LayerNorm, nn.modules.batchnorm._BatchNorm, "head"))
    watching: list[Callback] = [
        SpeedMonitor(tokens=count_words, samples=lambda batch: 2, peak_tflops=1.0),
        MemoryMonitor(),
        LossScaleMonitor(),
        GradientRangeMonitor(),
    ]
    trainer = make(plugin, watching, offline("run"))
    trainer.fit(Module(torch.bfloat16, tmp_path, count_words), words())
    wandb.finish()
    described = describe(trainer)
    assert json.loads(json.dumps(described)) == described
    assert yaml.safe_load(yaml.safe_dump(described)) == described
    file = read(tmp_path / "run")
    assert file.config["lightning_mp"] == described
    assert described["precision_plugin"]["fp32_modules"] == ["LayerNorm", "_BatchNorm", "head"]
