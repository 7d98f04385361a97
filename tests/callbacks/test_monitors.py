"""All monitors together: one row for each logged step, in Weights & Biases and elsewhere, the config, the progress bar."""

from __future__ import annotations

import copy
import math
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn
from torch.utils.data import DataLoader

import lightning_mp
from lightning_mp import DynamicLossScale, MasterWeightPrecision, Trainer, monitors
from lightning_mp.callbacks.fingerprint import weights_fingerprint
from lightning_mp.callbacks.publish import BATCH_HOOKS, Monitor
from tests.callbacks.stand_ins import Rows

sys.path.append(str(Path(__file__).parents[1] / "report"))
from wandb_file import WandbFile, isolate, read


class Tokens(pl.LightningModule):
    """A model of tokens; the gradient is infinite at the batches in ``overflows``."""

    def __init__(self, overflows: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.overflows = overflows

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.embed(batch)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("train_loss", loss)
        if batch_idx in self.overflows:
            logits.register_hook(lambda grad: grad * math.inf)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", float(batch.numel()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(batches: int = 8) -> DataLoader[Any]:
    tokens = torch.randint(0, 16, (batches * 2, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(list(tokens), batch_size=2)  # type: ignore[arg-type]


def fit(module: Any, plugin: Any, logger: Any, *extra: Callback, ckpt_path: Any = None, **settings: Any) -> Trainer:
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 2, "enable_checkpointing": False, **settings}
    callbacks = [*monitors(gradients_every_n_steps=3), *extra]
    trainer = Trainer(
        precision_plugin=plugin, accelerator="cpu", logger=logger, callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer


def dynamic(**settings: Any) -> MasterWeightPrecision:
    return MasterWeightPrecision("16-master", loss_scale=DynamicLossScale(init_scale=64.0, **settings))


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fits with a WandbLogger of its own in a folder of its own, and reads what was written."""
    isolate(monkeypatch, tmp_path)
    count = iter(range(9))

    def run(module: Any, plugin: Any, *extra: Callback, **settings: Any) -> tuple[WandbFile, Trainer, WandbLogger]:
        import wandb

        folder = tmp_path / f"run{next(count)}"
        folder.mkdir()
        logger = WandbLogger(save_dir=folder, project="monitors", offline=True, id=settings.pop("id", None))
        trainer = fit(module, plugin, logger, *extra, **settings)
        wandb.finish()
        return read(folder), trainer, logger

    return run


def ours(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in row.items() if key.split("/")[0] in ("throughput", "memory", "loss_scale", "gradients")
    }


# --- Weights & Biases --------------------------------------------------------------------------------------------------


def test_weights_and_biases_gets_one_row_for_each_logged_step_on_the_axis_of_tokens(wandb_run: Any) -> None:
    file, trainer, _ = wandb_run(Tokens(), dynamic())
    rows = [row for row in file.history if ours(row)]
    # log steps 2, 4, 6, 8, and the samples of gradients: of the first step and every third from there, 1, 4, 7
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 3, 5, 6, 7]
    tokens = [row["throughput/tokens"] for row in rows]
    assert tokens == [12.0 * (row["trainer/global_step"] + 1) for row in rows]
    assert all(a < b for a, b in pairwise(tokens))
    for row in rows:
        if (row["trainer/global_step"] + 1) % 2 == 0:
            assert {"memory/weights_gib", "loss_scale/log2", "throughput/samples"} <= set(row)
    assert [row["trainer/global_step"] for row in rows if "gradients/norm" in row] == [0, 3, 6]
    assert trainer.global_step == 8


def test_every_metric_is_defined_by_its_exact_name_with_axis_and_summary(wandb_run: Any) -> None:
    file, _, _ = wandb_run(Tokens(), dynamic())
    logged = {key.split(".")[0] for row in file.history for key in ours(row)}  # a histogram is several values
    assert logged <= set(file.metrics)
    assert not any("*" in name for name in file.metrics if name.split("/")[0] in ("throughput", "memory"))
    index = dict(enumerate(file.metrics, 1))
    for key in logged:
        metric = file.metrics[key]
        axis = metric.get("step_metric") or index.get(metric.get("step_metric_index", 0))
        assert (axis == "throughput/tokens") == (key != "throughput/tokens"), (key, metric)
        assert metric.get("summary", {}) == ({"max": True} if key == "memory/peak_rss_gib" else {}), (key, metric)
    assert file.summary["memory/peak_rss_gib"]["max"] > 0.1
    assert file.summary["throughput/tokens"] == 96.0
    assert file.summary["loss_scale/log2"] == 6.0
    assert {"memory/peak_rss_gib", "throughput/step_time_ms", "throughput/tokens_per_s"} <= set(file.summary)


def test_the_config_says_what_the_numbers_depend_on_in_strings_and_numbers(wandb_run: Any) -> None:
    file, _, _ = wandb_run(Tokens(), dynamic(min_scale=0.5))
    config = file.config["lightning_mp"]
    assert config["precision"] == "16-master"
    assert config["precision_plugin"]["loss_scale"]["kind"] == "dynamic"
    assert config["precision_plugin"]["loss_scale"]["min_scale"] == 0.5
    assert config["precision_plugin"]["fp32_modules"] == ["norm"]
    assert config["strategy"] == "SingleDeviceStrategy"
    assert config["device"].startswith("cpu: ")
    assert config["versions"]["torch"] == torch.__version__
    assert config["monitors"]["SpeedMonitor"]["tokens_counted_by"] == "first integer tensor"
    assert config["monitors"]["GradientRangeMonitor"]["every_n_steps"] == 3
    assert config["monitors"]["MemoryMonitor"]["warn_fraction"] == 0.95
    assert config["monitors"]["FingerprintMonitor"]["weights"] == weights_fingerprint(Tokens())
    assert "data_order" not in config["monitors"]["FingerprintMonitor"], "there were 16 samples"

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]

    assert {type(leaf) for leaf in leaves(config)} <= {str, int, float, bool}


def test_a_stock_precision_is_measured_and_described_too(wandb_run: Any) -> None:
    file, _, _ = wandb_run(Tokens(), None, precision="32-true")
    assert file.config["lightning_mp"]["precision_plugin"] == {"class": "Precision"}
    rows = [row for row in file.history if "memory/weights_gib" in row]
    assert [row["throughput/tokens"] for row in rows] == [24.0, 48.0, 72.0, 96.0]
    assert not any(key.startswith("loss_scale/") for row in rows for key in row)


def test_a_scale_that_falls_to_its_floor_is_an_alert_once(wandb_run: Any) -> None:
    file, _, _ = wandb_run(Tokens(overflows=(1, 3)), dynamic(min_scale=16.0, growth_interval=100))
    assert file.summary["loss_scale/skipped_steps"] == 2
    (alert,) = file.alerts
    assert "minimum" in alert["title"]
    assert "16" in alert["text"]


def test_a_resumed_run_goes_on_along_the_axis_and_two_runs_have_two_ids(wandb_run: Any, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first, _, logger = wandb_run(Tokens(), dynamic(), checkpoint, enable_checkpointing=True)
    second, _, other = wandb_run(
        Tokens(), dynamic(), ModelCheckpoint(dirpath=tmp_path), enable_checkpointing=True, ckpt_path=tmp_path / "last.ckpt",
        max_epochs=2,
    )  # fmt: skip
    tokens = [row["throughput/tokens"] for file in (first, second) for row in file.history if "throughput/tokens" in row]
    assert all(a < b for a, b in pairwise(tokens))
    assert tokens[-1] == 192.0
    assert logger.version != other.version
    assert first.run["run_id"] != second.run["run_id"]


# --- other loggers -----------------------------------------------------------------------------------------------------


def test_other_loggers_get_the_same_rows_and_several_can_be_there(tmp_path: Path) -> None:
    one, other = Rows(), Rows()
    fit(Tokens(), dynamic(), [one, CSVLogger(tmp_path), other])
    assert one.rows == other.rows
    mine = [row for row in one.rows if ours(row)]
    assert [row["step"] for row in mine] == [0, 1, 3, 5, 6, 7]
    assert all(type(value) is float for row in mine for value in ours(row).values())
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert all(name in text.splitlines()[0] for name in ("throughput/tokens", "memory/weights_gib", "loss_scale/log2"))


@pytest.mark.parametrize(
    "settings", [{"fast_dev_run": True}, {"barebones": True}, {"overfit_batches": 2}, {"accumulate_grad_batches": 3}]
)
def test_no_logger_and_odd_modes_raise_nothing(settings: dict[str, Any]) -> None:
    if "barebones" in settings:
        trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=monitors())
        trainer.fit(Quiet(), data())
    else:
        fit(Tokens(), "16-master", False, **settings)


class Quiet(Tokens):
    """Barebones forbids `log`."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.embed(batch)).float().square().mean()


def test_values_can_be_monitored_by_checkpoints_and_early_stopping(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="loss_scale/log2", mode="max", every_n_train_steps=2)
    stopping = EarlyStopping(monitor="throughput/tokens", mode="max", stopping_threshold=20.0, check_on_train_epoch_end=True)
    trainer = fit(Tokens(), dynamic(), False, checkpoint, stopping, enable_checkpointing=True, max_epochs=5)
    assert checkpoint.best_model_score == 6.0
    assert trainer.current_epoch == 1
    assert trainer.callback_metrics["throughput/tokens"].item() == 96.0


# --- the progress bar -------------------------------------------------------------------------------------------------


def test_the_rich_progress_bar_shows_speed_memory_and_scale_without_being_told() -> None:
    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.shown = trainer.progress_bar_callback.get_metrics(trainer, module)

    looks = Looks()
    trainer = Trainer(
        precision_plugin=dynamic(), accelerator="cpu", logger=False, callbacks=[*monitors(), looks, RichProgressBar()],
        enable_checkpointing=False, enable_model_summary=False, max_epochs=1, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Tokens(), data())
    assert {"tokens/s", "rss_gib", "log2_scale"} <= set(looks.shown)
    assert looks.shown["log2_scale"] == "6"


def test_monitors_are_what_was_asked_for() -> None:
    names = [type(monitor).__name__ for monitor in monitors()]
    assert names == ["SpeedMonitor", "MemoryMonitor", "LossScaleMonitor", "GradientRangeMonitor", "FingerprintMonitor"]
    (only,) = monitors(speed=False, memory=False, loss_scale=False, fingerprints=False, gradients_every_n_steps=7)
    assert isinstance(only, lightning_mp.GradientRangeMonitor)
    assert only.every_n_steps == 7


def test_monitors_with_a_baseline_end_with_a_divergence_monitor_of_these_settings() -> None:
    *others, plain = monitors(baseline="b.json")
    assert [type(monitor) for monitor in others] == [type(monitor) for monitor in monitors()]
    assert isinstance(plain, lightning_mp.DivergenceMonitor)
    assert (plain.on_divergence, plain.force) == ("warn", False)
    forced = monitors(baseline=["a.json", "b.json"], on_divergence="stop", force=True)[-1]
    assert isinstance(forced, lightning_mp.DivergenceMonitor)
    assert (forced.on_divergence, forced.force) == ("stop", True)


# --- one call for several monitors -----------------------------------------------------------------------------------------


class Counts(Monitor):
    """How often it was called for each batch, and whether it had hooks of its own then."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hidden: set[bool] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append("start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("step")

    def batch_end(self, *_: Any) -> None:
        self.calls.append("end")
        self.hidden.add(self.__dict__.get("on_before_zero_grad", self) is None)


class Other(Callback):
    """Not a monitor; notes what it finds its neighbours to have done by then."""

    def __init__(self, before: Counts, after: Counts) -> None:
        self.before, self.after = before, after
        self.found: list[tuple[int, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.found.append((self.before.calls.count("start"), self.after.calls.count("start")))


class Second(Counts):
    """Lightning wants one callback of a class."""


class Third(Counts):
    pass


def test_neighbouring_monitors_are_called_once_for_each_batch_in_their_places() -> None:
    first, second, third = Counts(), Second(), Third()
    other = Other(second, third)
    names: list[str] = []

    class Notes(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            names.append(action_name)

        @contextmanager
        def profile(self, action_name: str) -> Any:
            names.append(action_name)
            yield

    trainer = Trainer(
        precision_plugin="bf16-master", accelerator="cpu", logger=False, callbacks=[first, second, other, third],
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, max_epochs=1, profiler=Notes(),
    )  # fmt: skip
    trainer.fit(Tokens(), data())
    batches = trainer.global_step
    for monitor in (first, second, third):
        assert monitor.calls == ["start", "step", "end"] * batches
        assert monitor.hidden == {True}  # empty hooks are passed over
        assert not set(BATCH_HOOKS) & set(vars(monitor)), "after the fit each has its own hooks"
    assert other.found == [(index + 1, index) for index in range(batches)]  # a callback between them keeps its place
    called = [name for name in names if name.endswith("on_train_batch_end") and "Callback" in name]
    assert sum("Counts" in name for name in called) == sum("Third" in name for name in called) == batches
    assert not any("Second" in name for name in called)


def test_a_copy_made_during_a_fit_has_its_own_hooks() -> None:
    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.copy = copy.deepcopy(trainer.callbacks[0])

    copies = Copies()
    trainer = Trainer(
        precision_plugin="bf16-master", accelerator="cpu", logger=False, callbacks=[Counts(), Second(), copies],
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, max_steps=2,
    )  # fmt: skip
    trainer.fit(Tokens(), data())
    assert not set(BATCH_HOOKS) & set(vars(copies.copy))
