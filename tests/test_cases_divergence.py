"""Faults of monitors and of logging that users of neighbouring projects reported, met by recorder and divergence monitor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp import Trainer, monitors
from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceMonitor
from lightning_mp.callbacks.publish import describe
from lightning_mp.numerics.baseline import read_baseline
from lightning_mp.numerics.divergence import Rule
from tests.callbacks.language import Language, checkpoint, data, fit, losses_of, resumable
from tests.callbacks.stand_ins import Rows, WatchedWandb
from tests.modules import QUIET

sys.path.append(str(Path(__file__).parent / "report"))
from wandb_file import isolate, read

RULE = Rule(blocks=10)
TOKENS = "throughput/tokens"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 run of 40 steps."""
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    fit(Language(), BaselineRecorder(path))
    return path


class Worse(Language):
    """Its loss, not its gradient, is higher from the 21st step on."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (0.5 if batch_idx >= 20 else 0.0)


def watching(baseline: Path, folder: Path, **settings: Any) -> DivergenceMonitor:
    return DivergenceMonitor(baseline, rule=RULE, path=folder / "verdict.json", **settings)


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


# --- monitors --------------------------------------------------------------------------------------------------------------


def test_e1_a_baseline_of_one_accumulation_is_compared_with_a_run_of_another_by_their_true_losses(tmp_path: Path) -> None:
    class Told(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss} if batch_idx % 2 else loss

    expected = losses_of(Language(), data())
    small = DataLoader(data().dataset, 1)
    for loader, accumulate in ((data(), 1), (small, 4)):
        path = tmp_path / f"{accumulate}.json"
        fit(Told(), BaselineRecorder(path), loader=loader, accumulate_grad_batches=accumulate)
        assert read_baseline(path).runs[0].curve.losses == pytest.approx(expected, abs=1e-5)
        for other, divisor in ((data(), 1), (small, 4)):
            monitor = watching(path, tmp_path)
            fit(Told(), monitor, loader=other, accumulate_grad_batches=divisor)
            assert (monitor.verdict.status, monitor.verdict.paired) == ("MATCHES", True)  # type: ignore[union-attr]
            assert abs(monitor.verdict.gap) < 1e-5  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logger": "csv"},
        {"logger": "two"},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"barebones": True},
        {"overfit_batches": 2},
        {"overfit_batches": 0.25},
        {"limit_train_batches": 0.25},
        {"limit_train_batches": 0},
        {"max_steps": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("plugin", ["bf16-master", None])
def test_e4_no_kind_of_trainer_or_logger_makes_recorder_or_monitor_raise(
    plugin: Any, options: dict[str, Any], tmp_path: Path, recorded: Path
) -> None:
    logger = {"csv": CSVLogger(tmp_path), "two": [CSVLogger(tmp_path), Rows()]}.get(options.get("logger"), False)  # type: ignore[arg-type]
    settings = {key: value for key, value in options.items() if key != "logger"}
    recorder, monitor = BaselineRecorder(tmp_path / "b.json"), watching(recorded, tmp_path)
    if "barebones" in options:
        trainer = Trainer(
            precision_plugin=plugin, accelerator="cpu", max_epochs=1, callbacks=[recorder, monitor], barebones=True
        )
    else:
        quiet = {**QUIET, "log_every_n_steps": 5, "logger": logger, **settings}
        trainer = Trainer(precision_plugin=plugin, callbacks=[recorder, monitor], **quiet)
    trainer.fit(Language(), data())
    has_trained = 0 not in options.values() and "fast_dev_run" not in options
    assert (tmp_path / "b.json").exists() == (tmp_path / "verdict.json").exists() == has_trained
    if has_trained:
        assert read_baseline(tmp_path / "b.json").runs[0].curve.last_step == trainer.global_step > 0
        assert monitor.verdict is not None
    if logger:
        trainer.loggers[0].save()
        assert "divergence/gap" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_e5_checkpoints_and_stopping_see_the_gap(tmp_path: Path, recorded: Path) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="divergence/gap", mode="min", every_n_train_steps=10, filename="{step}")
    stopping = EarlyStopping("divergence/evidence", mode="max", stopping_threshold=0.99, check_on_train_epoch_end=True)
    monitor = watching(recorded, tmp_path)
    trainer = fit(Worse(), monitor, saving, stopping, enable_checkpointing=True, max_epochs=3)
    assert trainer.current_epoch == 1
    assert saving.best_model_score is not None
    assert saving.best_model_score.item() == 0.0
    assert Path(saving.best_model_path).name == "step=10.ckpt"
    assert trainer.callback_metrics["divergence/gap"].item() == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(RuntimeError, match="is not available"):
        fit(Worse(), EarlyStopping("divergence/evidence", mode="max", check_on_train_epoch_end=True))


# --- Weights & Biases ------------------------------------------------------------------------------------------------------


def test_f1_a_baseline_and_a_run_that_is_judged_by_it_are_two_runs_in_one_process(offline: Any, tmp_path: Path) -> None:
    import wandb

    path = tmp_path / "b.json"
    fit(Language(), BaselineRecorder(path), *monitors(gradients=False), logger=offline("fp32"))
    wandb.finish()
    fit(Worse(), watching(path, tmp_path), logger=offline("worse"))
    wandb.finish()
    first, second = read(tmp_path / "fp32"), read(tmp_path / "worse")
    assert first.run["run_id"] != second.run["run_id"]
    assert "divergence/verdict" not in first.summary
    assert second.summary["divergence/verdict"] == "DIVERGED"
    places = [row[TOKENS] for row in second.history if "divergence/gap" in row]
    assert places == [120.0 * number for number in range(1, 9)]


def test_f4_a_rank_other_than_0_leaves_its_experiment_and_the_files_alone(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []

    found = []
    for rank in (0, 1):
        touched.clear()
        monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda self, rank=rank: rank == 0))
        folder = tmp_path / str(rank)
        recorder, monitor = BaselineRecorder(folder / "b.json"), watching(recorded, folder, on_divergence="alert")
        if rank:  # it is told by rank 0
            monkeypatch.setattr("lightning_mp.callbacks.divergence.on_all_ranks", lambda trainer, check: check())
        trainer = fit(Worse(), recorder, monitor, logger=WatchedWandb(touched))
        found.append((set(touched), folder.exists(), set(trainer.callback_metrics)))
    assert {"alert", "log", "config or summary"} <= found[0][0]
    assert found[1][:2] == (set(), False)
    assert found[0][2] == found[1][2]
    assert "divergence/gap" in found[0][2]


def test_f5_an_offline_run_has_its_config_and_goes_on_offline_to_the_same_verdict(
    offline: Any, tmp_path: Path, recorded: Path
) -> None:
    import wandb

    def run(name: str, *callbacks: pl.Callback, **options: Any) -> DivergenceMonitor:
        monitor = watching(recorded, tmp_path)
        logger = offline(name, id="same", resume="allow")
        fit(Language(), monitor, *callbacks, loader=resumable(), logger=logger, **options)
        wandb.finish()
        return monitor

    run("first", checkpoint(tmp_path / "saved", 20), enable_checkpointing=True, max_steps=20)
    monitor = run("second", ckpt=tmp_path / "saved" / "step=20.ckpt")
    files = [read(tmp_path / name) for name in ("first", "second")]
    for file in files:
        recipe = file.config["lightning_mp"]["monitors"]["DivergenceMonitor"]
        assert (recipe["baseline"], recipe["blocks"], recipe["on_divergence"]) == (str(recorded), 10, "warn")
        assert file.exit_code == 0
    assert [file.run["run_id"] for file in files] == ["same", "same"]
    assert [file.summary["divergence/verdict"] for file in files] == ["INCONCLUSIVE", "MATCHES"]
    places = [row[TOKENS] for file in files for row in file.history if "divergence/gap" in row]
    assert places == [120.0 * number for number in range(1, 9)]
    assert (monitor.verdict.paired, monitor.verdict.coverage) == (True, 1.0)  # type: ignore[union-attr]


def test_f6_settings_are_text_and_numbers_in_config_verdict_and_checkpoint(tmp_path: Path, recorded: Path) -> None:
    recorder, monitor = BaselineRecorder(tmp_path / "b.json", data="texts"), watching(recorded, tmp_path)
    betas = {"betas": (0.5, torch.tensor(0.75).item())}
    trainer = fit(Language(**betas), recorder, monitor, checkpoint(tmp_path, 40), enable_checkpointing=True)
    described = describe(trainer)
    assert json.loads(json.dumps(described)) == described
    assert yaml.safe_load(yaml.safe_dump(described)) == described
    assert described["monitors"]["BaselineRecorder"] == {"path": str(tmp_path / "b.json"), "data": "texts"}
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["status"] == "NOT COMPARABLE"
    assert "betas is (0.5, 0.75)" in verdict["explanation"]
    saved = torch.load(tmp_path / "step=40.ckpt", weights_only=True)["callbacks"]
    assert saved["BaselineRecorder"]["curve"] == saved["DivergenceMonitor"]["run"]["curve"] == recorder.state_dict()["curve"]
