"""`DivergenceMonitor` in real fits: verdicts, alarms, what is published where, resuming, and refusals before training."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_mp import MasterWeightPrecision, monitors
from lightning_mp.callbacks import wandb as wandb_module
from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceError, DivergenceMonitor
from lightning_mp.numerics.baseline import Baseline, BaselineError, BaselineRun, read_baseline, write_baseline
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import Block, Rule
from tests.callbacks.language import (
    Language,
    Validated,
    checkpoint,
    data,
    fit,
    probes,
    reads_per_batch,
    resumable,
)
from tests.callbacks.stand_ins import Rows, Scripted

sys.path.append(str(Path(__file__).parents[1] / "report"))
from wandb_file import isolate, read

STEPS = 100
RULE = Rule(blocks=50)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 run of 100 steps."""
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    fit(Language(), BaselineRecorder(path), loader=data(STEPS))
    return path


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three fp32 runs of other weights."""
    folder = tmp_path_factory.mktemp("seeds")
    for seed in (1, 2, 3):
        fit(Language(seed=seed), BaselineRecorder(folder / f"{seed}.json"), loader=data(STEPS))
    return [folder / f"{seed}.json" for seed in (1, 2, 3)]


@pytest.fixture
def watch(tmp_path: Path) -> Any:
    """Fits with a monitor, whose files are in a folder of the test."""

    def run(baseline: Any, module: Any = None, *callbacks: pl.Callback, **options: Any) -> DivergenceMonitor:
        names = ("on_divergence", "force", "loss_key", "path", "data")
        own = {name: options.pop(name) for name in names if name in options}
        monitor = DivergenceMonitor(baseline, rule=options.pop("rule", RULE), **own)
        options = {"loader": data(STEPS), "default_root_dir": tmp_path, **options}
        fit(module or Language(), monitor, *callbacks, **options)
        return monitor

    return run


def worse(by: float = 0.3, since: int = 30) -> Language:
    """The same run, but that the loss that is reported is higher from some batch on; the gradients are not."""

    class Worse(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + by if batch_idx >= since else loss

    return Worse()


# --- verdicts ---------------------------------------------------------------------------------------------------------------


def test_the_same_run_matches_paired_and_without_a_gap(watch: Any, recorded: Path) -> None:
    monitor = watch(recorded)
    verdict = monitor.verdict
    assert (verdict.status, verdict.paired, verdict.gap, verdict.coverage) == ("MATCHES", True, 0.0, 1.0)
    assert verdict.differences == ()
    assert len(monitor.test.blocks) == 50
    assert [block.end for block in monitor.test.blocks] == [48 * (i + 1) for i in range(50)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-master"])
def test_16_bit_runs_are_paired_with_fp32_and_match(watch: Any, recorded: Path, precision: str) -> None:
    options = {"plugins": [MasterWeightPrecision("bf16-master")]} if precision == "bf16-master" else {"precision": precision}
    verdict = watch(recorded, **options).verdict
    assert (verdict.status, verdict.paired) == ("MATCHES", True)
    assert 0.0 < abs(verdict.gap) < 0.01


def test_a_run_that_is_worse_has_diverged_and_the_alarm_says_where(watch: Any, recorded: Path, said: Any) -> None:
    monitor = watch(recorded, worse())
    assert monitor.verdict.status == "DIVERGED"
    assert monitor.verdict.gap == pytest.approx(0.3, abs=1e-6)
    assert 15 < monitor.verdict.alarm.block < 25
    assert said.count("diverges from its baseline|b.json|+0.3000") == 1


def test_a_run_with_other_weights_is_not_paired_and_one_seed_is_too_few_to_judge_it(watch: Any, recorded: Path) -> None:
    verdict = watch(recorded, Language(seed=5)).verdict
    assert (verdict.status, verdict.paired) == ("INCONCLUSIVE", False)


def test_another_order_of_data_is_not_paired_and_said_so(watch: Any, recorded: Path) -> None:
    rows = torch.utils.data.Subset(data(STEPS).dataset, [*range(3), *range(STEPS * 4 - 1, 2, -1)])
    verdict = watch(recorded, loader=DataLoader(rows, 4)).verdict
    assert not verdict.paired
    assert [difference.text for difference in verdict.differences] == ["the data order differs from sample 4 on"]


def test_an_order_that_changes_in_the_middle_of_a_run_is_seen_and_where_is_said(watch: Any, recorded: Path) -> None:
    rows = torch.utils.data.Subset(data(STEPS).dataset, [*range(300), *range(STEPS * 4 - 1, 299, -1)])
    verdict = watch(recorded, loader=DataLoader(rows, 4)).verdict
    assert not verdict.paired
    assert [difference.text for difference in verdict.differences] == [
        "the data order differs from one of the samples 289 to 304 on"
    ]
    assert verdict.status == "INCONCLUSIVE"
    assert "What differs: the data order differs from one of the samples 289 to 304 on." in verdict.explanation


def test_several_files_make_a_band_and_a_run_of_one_of_its_seeds_is_paired_with_it(watch: Any, seeds: list[Path]) -> None:
    monitor = watch(seeds, Language(seed=9))
    assert (monitor.verdict.seeds, monitor.verdict.paired) == (3, False)
    assert all(block.band_low <= block.baseline <= block.band_high for block in monitor.test.blocks)
    paired = watch(seeds, Language(seed=2))
    assert (paired.verdict.status, paired.verdict.paired, paired.test.paired_with) == ("MATCHES", True, 1)


def test_accumulated_micro_batches_match_and_are_paired(watch: Any, recorded: Path) -> None:
    verdict = watch(recorded, loader=DataLoader(data(STEPS).dataset, 1), accumulate_grad_batches=4).verdict
    assert (verdict.status, verdict.paired) == ("MATCHES", True)
    assert abs(verdict.gap) < 1e-4


def test_how_often_is_logged_changes_neither_blocks_nor_verdict(watch: Any, recorded: Path) -> None:
    seen = [watch(recorded, worse(0.05), log_every_n_steps=every) for every in (1, 7, 50, 0)]
    assert seen[0].test.blocks == seen[1].test.blocks == seen[2].test.blocks == seen[3].test.blocks
    assert len({monitor.verdict for monitor in seen}) == 1


def test_settings_that_decide_make_it_not_comparable_and_no_alarm_is_acted_upon(watch: Any, recorded: Path, said: Any) -> None:
    module = Language(lr=1e-4, weight_decay=0.5)
    monitor = watch(recorded, module, on_divergence="raise")
    assert monitor.verdict.status == "NOT COMPARABLE"
    assert monitor.test.alarm is not None
    assert said.count("NOT COMPARABLE with the baseline|b.json|weight decay is 0.5|force=True") == 1
    assert not said.count("diverges from its baseline")
    assert monitor.verdict.gap > 1.0


def test_an_alarm_before_it_is_known_that_runs_cannot_be_compared_is_not_taken_back(
    recorded: Path, watch: Any, said: Any
) -> None:
    class ChangesItsRate(Language):
        """The loss is worse for a while, then the learning rate is another one, then the loss is well again."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 63:
                self.optimizers().param_groups[0]["lr"] *= 1.001
            return super().training_step(batch, batch_idx) + 0.3 * (20 <= batch_idx < 64)

    monitor = watch(recorded, ChangesItsRate())
    assert said.count("diverges from its baseline") == 1
    assert said.count("NOT COMPARABLE with the baseline|step 64") == 1
    assert not said.count("back at its baseline")
    assert monitor.verdict.status == "NOT COMPARABLE"


def test_forced_it_is_compared_and_acted_upon(watch: Any, recorded: Path) -> None:
    assert watch(recorded, Language(lr=1e-3), force=True).verdict.status == "DIVERGED"
    with pytest.raises(DivergenceError):
        watch(recorded, Language(lr=1e-3), force=True, on_divergence="raise")


def test_another_batch_size_is_not_comparable_and_known_after_the_first_steps(watch: Any, recorded: Path, said: Any) -> None:
    verdict = watch(recorded, loader=DataLoader(data(STEPS).dataset, 8)).verdict
    assert verdict.status == "NOT COMPARABLE"
    assert "takes 8 samples, the baseline's 4" in verdict.explanation
    assert said.count("NOT COMPARABLE with the baseline") == 1


@pytest.mark.parametrize(("name", "status"), [("texts", "MATCHES"), ("others", "NOT COMPARABLE"), (None, "MATCHES")])
def test_data_of_another_name_is_not_comparable(tmp_path: Path, watch: Any, name: str | None, status: str) -> None:
    fit(Language(), BaselineRecorder(tmp_path / "b.json", data="texts"), loader=data(STEPS))
    assert watch(tmp_path / "b.json", data=name).verdict.status == status


def test_a_schedule_that_lags_by_skipped_steps_is_comparable(tmp_path: Path, watch: Any) -> None:
    class Scheduled(Language):
        skips = (0, 4)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}
            ]

    class Overflows(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx in (0, 4):
                loss.register_hook(lambda grad: grad * math.inf)
            return loss

    fit(Scheduled(), BaselineRecorder(tmp_path / "b.json"), loader=data(STEPS))
    plugin = MasterWeightPrecision("bf16-master", skip_nonfinite=True)
    verdict = watch(tmp_path / "b.json", Overflows(), plugins=[plugin]).verdict
    assert plugin.skipped_steps == 2
    assert not any(difference.name == "learning_rates" for difference in verdict.differences)
    assert verdict.paired
    assert verdict.lag_explained is not None


class ByEpoch(Language):
    """Its rate is halved when an epoch is over, which is no matter of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_a_schedule_by_epochs_is_comparable_although_steps_are_skipped(tmp_path: Path, watch: Any) -> None:
    options: dict[str, Any] = {"loader": data(8), "max_epochs": 4}
    fit(ByEpoch(), BaselineRecorder(tmp_path / "b.json"), **options)
    plugin = Scripted(["weight", None, "weight"])
    verdict = watch(tmp_path / "b.json", ByEpoch(), plugins=[plugin], **options).verdict
    assert plugin.skipped_steps == 2
    assert not any(difference.name == "learning_rates" for difference in verdict.differences)


# --- losses that are not finite ---------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_an_alarm_at_the_next_log_step(watch: Any, recorded: Path, said: Any) -> None:
    with pytest.raises(DivergenceError, match="not finite at step 43"):
        watch(recorded, Language(spoiled={42: math.nan}), on_divergence="raise")
    ended = Ended()
    monitor = watch(recorded, Language(spoiled={42: math.nan}), ended, on_divergence="stop")
    assert ended.steps == 45
    assert monitor.verdict.status == "DIVERGED"
    assert "43" in monitor.verdict.explanation
    assert said.count("not finite at step 43") >= 1


class Ended(pl.Callback):
    steps = -1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.steps = trainer.global_step


def test_a_loss_for_which_the_plugin_skipped_the_step_is_no_divergence(watch: Any, recorded: Path, tmp_path: Path) -> None:
    plugin = MasterWeightPrecision("bf16-master", skip_nonfinite=True)
    monitor = watch(recorded, Language(spoiled={42: math.nan}), plugins=[plugin])
    assert (monitor.test.nonfinite_step, plugin.nonfinite_losses) == (None, 1)
    assert monitor.verdict.lag_explained > 0.0
    assert json.loads((tmp_path / "verdict.json").read_text())["nonfinite_losses_skipped"] == 1


# --- what is done -----------------------------------------------------------------------------------------------------------


def test_stop_ends_training_at_the_log_step_of_the_alarm_and_says_so(watch: Any, recorded: Path, said: Any) -> None:
    ended = Ended()
    monitor = watch(recorded, worse(), ended, on_divergence="stop", log_every_n_steps=5)
    assert said.count('diverges from its baseline|Training ends here, as on_divergence="stop".') == 1
    watch(recorded, worse())
    assert (said.count("diverges from its baseline"), said.count("Training ends here")) == (2, 1)
    alarm = monitor.verdict.alarm.step
    assert alarm <= ended.steps < alarm + 5
    assert monitor.verdict.status == "DIVERGED"
    assert monitor.verdict.coverage == ended.steps / STEPS


def test_raise_raises_what_happened_and_leaves_the_verdict_and_the_file(watch: Any, recorded: Path, tmp_path: Path) -> None:
    monitor = DivergenceMonitor(recorded, on_divergence="raise", rule=RULE)
    with pytest.raises(DivergenceError, match=r"diverges from its baseline .*b\.json.*beyond the margin of"):
        fit(worse(), monitor, loader=data(STEPS), default_root_dir=tmp_path)
    assert monitor.verdict is not None
    assert monitor.verdict.status == "DIVERGED"
    assert json.loads((tmp_path / "verdict.json").read_text())["status"] == "DIVERGED"


def test_an_alarm_that_passes_is_said_to_have_passed_once(watch: Any, recorded: Path, said: Any) -> None:
    class Passes(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.3 * (20 <= batch_idx < 40)

    verdict = watch(recorded, Passes()).verdict
    assert said.count("diverges from its baseline") == 1
    assert said.count("back at its baseline|b.json") == 1
    assert (verdict.status, verdict.alarm is not None) == ("MATCHES", True)
    assert "recovered" in verdict.explanation


def test_a_run_that_ends_early_covers_a_part_and_one_that_goes_on_is_compared_as_far_as_the_baseline_goes(
    watch: Any, recorded: Path
) -> None:
    early = watch(recorded, max_steps=40).verdict
    assert (early.status, early.coverage) == ("INCONCLUSIVE", 0.4)
    longer = watch(recorded, loader=data(STEPS), max_epochs=2)
    assert (longer.verdict.status, longer.verdict.coverage) == ("MATCHES", 1.0)
    assert "beyond the baseline's end" in longer.verdict.explanation
    assert len(longer.test.blocks) == 50


def test_an_error_of_the_run_leaves_a_verdict_on_what_there_was(watch: Any, recorded: Path, tmp_path: Path) -> None:
    class Breaks(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 53:
                raise ArithmeticError("on purpose")
            return super().training_step(batch, batch_idx)

    monitor = DivergenceMonitor(recorded, rule=RULE)
    with pytest.raises(ArithmeticError, match="on purpose"):
        fit(Breaks(), monitor, loader=data(STEPS), default_root_dir=tmp_path)
    assert monitor.verdict is not None
    assert monitor.verdict.coverage == 0.53


# --- what is published ------------------------------------------------------------------------------------------------------


def test_the_last_block_is_published_at_the_log_step_after_it(watch: Any, recorded: Path) -> None:
    rows = Rows()
    monitor = watch(recorded, worse(0.05), logger=rows, log_every_n_steps=6, loader=data(99))
    mine = [row for row in rows.rows if "divergence/gap" in row]
    assert [row["step"] for row in mine] == [*range(5, 96, 6), 98]
    for row in mine[:-1]:
        block = monitor.test.blocks[(row["step"] + 1) // 2 - 1]
        values = {name: getattr(block, name) for name in ("baseline", "gap", "margin", "evidence")}
        assert {key.split("/")[1]: value for key, value in row.items() if key.startswith("divergence/")} == {
            "loss": block.candidate, **values,
        }  # fmt: skip
        assert row["throughput/tokens"] == 24.0 * (row["step"] + 1)
    assert rows.summary["divergence/verdict"] == monitor.verdict.status
    assert rows.summary["divergence/verdict_gap"] == monitor.verdict.gap
    assert rows.summary["divergence/coverage"] == pytest.approx(0.99)
    assert rows.summary["divergence/explanation"] == monitor.verdict.explanation


def test_bands_are_published_with_several_seeds_and_callbacks_can_monitor_the_gap(watch: Any, seeds: list[Path]) -> None:
    class Looks(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.seen = {key: float(value) for key, value in trainer.callback_metrics.items()}

    looks = Looks()
    monitor = watch(seeds, Language(seed=4), looks)
    last = monitor.test.blocks[-1]
    assert looks.seen["divergence/band_low"] == last.band_low
    assert looks.seen["divergence/band_high"] == last.band_high
    assert looks.seen["divergence/gap"] == last.gap


def test_the_verdict_is_a_json_file_with_all_blocks(watch: Any, recorded: Path, tmp_path: Path) -> None:
    monitor = watch(recorded, path=tmp_path / "deep" / "v.json")
    content = json.loads((tmp_path / "deep" / "v.json").read_text())
    assert content["status"] == "MATCHES"
    assert content["explanation"] == monitor.verdict.explanation
    assert [Block(**block) for block in content["blocks"]] == monitor.test.blocks
    assert (content["axis"], content["baseline"]) == ("tokens", str(recorded))
    assert not (tmp_path / "verdict.json").exists()


def test_the_file_lies_with_the_logger_and_a_disk_that_is_full_does_not_end_the_run(
    watch: Any, recorded: Path, tmp_path: Path, said: Any
) -> None:
    logger = CSVLogger(tmp_path)
    watch(recorded, logger=logger)
    assert (Path(logger.log_dir) / "verdict.json").exists()
    (tmp_path / "file").write_text("")
    monitor = watch(recorded, path=tmp_path / "file" / "v.json")
    assert monitor.verdict.status == "MATCHES"
    assert said.count("verdict could not be written|v.json") == 1


def test_under_weights_and_biases_each_run_has_a_verdict_of_its_own(
    watch: Any, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    isolate(monkeypatch, tmp_path)
    for version, module, status in (("ab12", Language(), "MATCHES"), ("cd34", worse(), "DIVERGED")):
        watch(recorded, module, logger=WandbLogger(save_dir=tmp_path / "runs", project="mine", offline=True, id=version))
        wandb.finish()
        assert json.loads((tmp_path / "runs" / "mine" / version / "verdict.json").read_text())["status"] == status
    assert json.loads((tmp_path / "runs" / "mine" / "ab12" / "verdict.json").read_text())["status"] == "MATCHES"
    assert len(list(tmp_path.rglob("verdict.json"))) == 2


def test_weights_and_biases_has_scalars_on_the_axis_of_tokens_a_picture_a_table_the_verdict_and_one_alert(
    watch: Any, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    isolate(monkeypatch, tmp_path)
    logger = WandbLogger(save_dir=tmp_path, project="divergence", offline=True)
    monitor = watch(recorded, worse(), logger=logger, on_divergence="alert", log_every_n_steps=10)
    wandb.finish()
    file = read(tmp_path)
    rows = [row for row in file.history if "divergence/gap" in row]
    assert [row["throughput/tokens"] for row in rows] == [240.0 * i for i in range(1, 11)]
    index = dict(enumerate(file.metrics, 1))
    for name in ("loss", "baseline", "gap", "margin", "evidence"):
        metric = file.metrics[f"divergence/{name}"]
        assert (metric.get("step_metric") or index[metric["step_metric_index"]]) == "throughput/tokens"
    assert file.summary["divergence/verdict"] == "DIVERGED"
    assert file.summary["divergence/verdict_low"] == monitor.verdict.interval[0]
    (alert,) = file.alerts
    assert "diverges from its baseline" in alert["text"]
    keys = {key for row in file.history for key in row}
    assert any(key.startswith("divergence/blocks") for key in keys)
    assert any(key.startswith("divergence/curves") for key in keys)


def test_rows_are_where_a_speed_monitor_puts_them(watch: Any, recorded: Path) -> None:
    rows = Rows()
    watch(recorded, None, *monitors(), logger=rows, log_every_n_steps=10)
    mine = [row for row in rows.rows if "divergence/gap" in row]
    assert len(mine) == 10
    assert all({"throughput/tokens", "throughput/samples"} <= set(row) for row in mine)


# --- resuming ---------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_blocks_and_the_same_verdict(tmp_path: Path, recorded: Path, watch: Any) -> None:
    whole = watch(recorded, worse(0.05), loader=resumable(STEPS))
    first = DivergenceMonitor(recorded, rule=RULE)
    saves = checkpoint(tmp_path, 33)
    fit(worse(0.05), first, saves, loader=resumable(STEPS), enable_checkpointing=True, max_steps=40, default_root_dir=tmp_path)
    assert 0 < len(first.test.blocks) < 50
    second = watch(recorded, worse(0.05), loader=resumable(STEPS), ckpt=tmp_path / "step=33.ckpt")
    assert second.test.blocks == whole.test.blocks
    assert second.verdict == whole.verdict


def test_a_resume_after_an_alarm_does_not_say_it_again(tmp_path: Path, recorded: Path, watch: Any, said: Any) -> None:
    options: dict[str, Any] = {"loader": resumable(STEPS), "enable_checkpointing": True}
    watch(recorded, worse(), checkpoint(tmp_path, 60), **options)
    assert said.count("diverges from its baseline") == 1
    monitor = watch(recorded, worse(), loader=resumable(STEPS), ckpt=tmp_path / "step=60.ckpt")
    assert said.count("diverges from its baseline") == 1
    assert monitor.verdict.status == "DIVERGED"


def test_a_checkpoint_opens_with_the_safe_loader_and_every_field_of_the_state_survives(
    tmp_path: Path, recorded: Path, watch: Any
) -> None:
    watch(recorded, worse(), checkpoint(tmp_path, 60), loader=resumable(STEPS), enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=60.ckpt", weights_only=True)["callbacks"]["DivergenceMonitor"]
    assert (saved["is_diverged"], saved["was_told"]) == (True, True)

    class Loads(DivergenceMonitor):
        state_key = "DivergenceMonitor"

        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            self.loaded = self.state_dict()

    other = Loads(recorded, rule=RULE)
    fit(worse(), other, loader=resumable(STEPS), ckpt=tmp_path / "step=60.ckpt", default_root_dir=tmp_path)
    assert other.loaded == saved


def test_with_another_baseline_than_the_checkpoint_s_the_run_is_compared_from_there_on(
    tmp_path: Path, recorded: Path, seeds: list[Path], watch: Any, said: Any
) -> None:
    watch(recorded, None, checkpoint(tmp_path, 50), loader=resumable(STEPS), enable_checkpointing=True)
    monitor = watch(seeds[0], loader=resumable(STEPS), ckpt=tmp_path / "step=50.ckpt")
    assert "not the one of the checkpoint" in said
    assert monitor.test.blocks[0].end > 50 * 24


def test_a_run_that_is_joined_late_is_compared_by_steps(tmp_path: Path, recorded: Path, watch: Any, said: Any) -> None:
    fit(Language(), checkpoint(tmp_path, 50), loader=resumable(STEPS), enable_checkpointing=True)
    monitor = watch(recorded, loader=resumable(STEPS), ckpt=tmp_path / "step=50.ckpt")
    assert "begins at step 51" in said
    assert monitor.test.axis == "steps"
    assert all(abs(block.gap) < 1e-6 for block in monitor.test.blocks)
    assert len(monitor.test.blocks) == 25


def test_a_second_fit_of_the_same_trainer_goes_on(recorded: Path, tmp_path: Path) -> None:
    monitor = DivergenceMonitor(recorded, rule=RULE)
    loader = resumable(STEPS)
    trainer = fit(Language(), monitor, loader=loader, max_steps=50, max_epochs=-1, default_root_dir=tmp_path)
    trainer.fit_loop.epoch_loop.max_steps = STEPS
    loader.at = 50
    trainer.fit(trainer.lightning_module, loader)
    assert monitor.verdict is not None
    assert monitor.verdict.coverage == 1.0


def test_a_loop_of_losses_without_tokens_falls_back_to_what_both_know(tmp_path: Path, watch: Any) -> None:
    class Floats(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0] * 16).long().clamp(0, 15), batch_idx)

    rows = DataLoader(torch.utils.data.TensorDataset(torch.rand(200, 6)), 4)
    fit(Floats(), BaselineRecorder(tmp_path / "b.json"), loader=rows)
    monitor = watch(tmp_path / "b.json", Floats(), loader=rows)
    assert (monitor.test.axis, monitor.verdict.status) == ("samples", "MATCHES")


def test_tokens_that_become_unknown_end_the_comparison_with_a_warning(recorded: Path, watch: Any, said: Any) -> None:
    class Forgets(Language):
        seen = 0

        def count_tokens(self, batch: Any) -> int | None:
            self.seen += 1
            return batch.numel() if self.seen <= 42 else None

    monitor = watch(recorded, Forgets())
    assert said.count("no further than step 42|tokens") == 1
    assert monitor.test.last_step == 42
    assert monitor.verdict.coverage == 0.42


# --- other sources ----------------------------------------------------------------------------------------------------------


def test_a_csv_of_lightning_is_a_baseline(tmp_path: Path, watch: Any) -> None:
    logger = CSVLogger(tmp_path)
    fit(Validated(), *monitors(), loader=data(STEPS), logger=logger, log_every_n_steps=1)
    monitor = watch(Path(logger.log_dir) / "metrics.csv")
    assert monitor.test.axis == "tokens"
    assert monitor.verdict.gap == pytest.approx(0.0, abs=1e-5)
    assert not monitor.verdict.paired
    with pytest.raises(BaselineError, match="train_loss"):
        watch(Path(logger.log_dir) / "metrics.csv", loss_key="no such")


def test_an_offline_run_of_weights_and_biases_is_a_baseline(
    tmp_path: Path, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    isolate(monkeypatch, tmp_path)
    logger = WandbLogger(save_dir=tmp_path, project="baseline", offline=True)
    fit(Validated(), *monitors(), loader=data(STEPS), logger=logger, log_every_n_steps=1)
    wandb.finish()
    read(tmp_path)
    (path,) = tmp_path.rglob("*.wandb")
    monitor = watch(path)
    assert (monitor.test.axis, monitor.test.baseline.source) == ("tokens", str(path))
    assert len(monitor.test.blocks) == 50
    assert monitor.verdict.gap == pytest.approx(0.0, abs=1e-5)
    with pytest.raises(BaselineError, match=r"\.wandb: .*no such"):
        watch(path, loss_key="no such")


def test_a_baseline_object_is_a_baseline(recorded: Path, watch: Any) -> None:
    assert watch(read_baseline(recorded)).verdict.status == "MATCHES"


class FakeApi:
    """Stands in for ``wandb.Api``."""

    def __init__(self, file: Path | None = None, rows: list[dict[str, Any]] | None = None) -> None:
        self.file, self.rows, self.asked = file, rows, list[str]()

    def __call__(self) -> FakeApi:
        return self

    def artifact(self, name: str) -> Any:
        self.asked.append(name)

        def download(root: str) -> str:
            assert self.file is not None
            (Path(root) / "b.json").write_bytes(self.file.read_bytes())
            return root

        return SimpleNamespace(name=name, download=download)

    def run(self, name: str) -> Any:
        self.asked.append(name)
        return SimpleNamespace(scan_history=lambda: iter(self.rows or []))


@pytest.mark.parametrize("first", [0, 1])
def test_a_history_without_steps_of_lightning_is_taken_by_its_own_from_the_first(
    cache: Path, recorded: Path, watch: Any, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    losses = read_baseline(recorded).runs[0].curve.losses
    rows = [{"_step": i, "loss": loss} for i, loss in enumerate(losses, first)]
    monkeypatch.setattr("wandb.Api", FakeApi(rows=rows))
    monitor = watch("wandb:me/project/ab12")
    assert (monitor.test.axis, monitor.verdict.gap) == ("steps", 0.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_MP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return tmp_path / "cache"


def test_an_artifact_is_fetched_once_and_then_taken_from_the_cache(
    cache: Path, recorded: Path, watch: Any, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    api = FakeApi(recorded)
    monkeypatch.setattr("wandb.Api", api)
    reference = "wandb:me/project/fp32:v3"
    first = watch(reference)
    assert first.verdict.status == "MATCHES"
    assert first.test.baseline.source == reference
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert watch(reference).verdict == first.verdict
    assert api.asked == ["me/project/fp32:v3"]
    assert "is taken from|cache" in said


def test_a_run_is_fetched_with_its_history(cache: Path, recorded: Path, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = read_baseline(recorded).runs[0].curve
    rows: list[dict[str, Any]] = [
        {"_step": 2 * i, "_timestamp": 1.0, "trainer/global_step": i, "train_loss": loss, "throughput/tokens": 24.0 * (i + 1)}
        for i, loss in enumerate(curve.losses)
    ]
    others = [{"_step": 0, "trainer/global_step": 0, "note": "text", "flag": True}, {"_step": 500, "train_loss": 99.0}]
    api = FakeApi(rows=[*others, *rows])
    monkeypatch.setattr("wandb.Api", api)
    monitor = watch("wandb:me/project/ab12")
    assert monitor.verdict.gap == 0.0
    assert watch("wandb:me/project/ab12").verdict == monitor.verdict
    assert api.asked == ["me/project/ab12"]


def test_a_history_of_losses_that_are_not_finite_is_refused_as_a_baseline(
    cache: Path, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"_step": i, "train_loss": "NaN" if i == 3 else 1.0} for i in range(1, 9)]
    monkeypatch.setattr("wandb.Api", FakeApi(rows=rows))
    with pytest.raises(BaselineError, match="step 3"):
        watch("wandb:me/project/ab12")


def test_offline_a_reference_that_is_not_in_the_cache_is_refused_with_the_remedy(
    cache: Path, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for reference in ("wandb:me/project/fp32:v3", "wandb:me/project/ab12"):
        with pytest.raises(
            BaselineError, match=rf"{reference}: cannot be fetched, as WANDB_MODE.*{cache}.*copy the file there"
        ):
            watch(reference)


def test_a_network_that_fails_is_an_error_with_the_remedy_and_caches_nothing(
    cache: Path, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("wandb.Api", fails)
    with pytest.raises(BaselineError, match=r"cannot be fetched .ConnectionError: no route to host"):
        watch("wandb:me/project/fp32:v3")
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize("reference", ["wandb:", "wandb:name:v1", "wandb:me/project", "wandb:me//x", "wandb:a/b/c/d"])
def test_what_is_no_reference_is_refused(cache: Path, watch: Any, reference: str) -> None:
    with pytest.raises(BaselineError, match="not a reference; write wandb:entity/project/name:alias"):
        watch(reference)


def test_an_artifact_without_a_baseline_is_refused(cache: Path, watch: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr("wandb.Api", FakeApi(tmp_path / "x.json"))
    with pytest.raises(BaselineError):
        watch("wandb:me/project/fp32:v3")
    assert wandb_module.cache_folder() == cache
    assert not list(cache.rglob("*.json"))


# --- refusals before training -----------------------------------------------------------------------------------------------


class NoBatch(pl.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        raise AssertionError("it trained")


def diverged(path: Path) -> None:
    curve = LossCurve()
    for step in range(1, 20):
        curve.add(step, math.nan if step == 7 else 1.0)
    write_baseline(path, Baseline((BaselineRun(curve),), str(path)))


BROKEN: dict[str, Any] = {
    "missing.json": None,
    "empty.json": b"",
    "broken.json": b'{"schema": "lightning-mp-baseline", "version": 1, "runs": [{"cur',
    "other.json": b'{"schema": "something else"}',
    "binary.json": b"\x00\xff\x80",
    "empty.csv": b"",
    "columns.csv": b"epoch,step,val_loss\n0,0,1.0\n",
    "broken.wandb": b"not a run",
    "missing.wandb": None,
}


@pytest.mark.parametrize("name", [*BROKEN, "folder.json", "diverged.json", "folder.wandb"])
def test_a_baseline_that_cannot_be_read_is_refused_before_training_with_its_path(tmp_path: Path, watch: Any, name: str) -> None:
    path = tmp_path / name
    if name == "diverged.json":
        diverged(path)
    elif name.startswith("folder"):
        path.mkdir()
    elif BROKEN[name] is not None:
        path.write_bytes(BROKEN[name])
    with pytest.raises(BaselineError, match=str(path)):
        watch(path, None, NoBatch())


def test_files_that_do_not_belong_together_are_refused(recorded: Path, watch: Any, tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="same run"):
        watch([recorded, recorded])
    fit(Language(lr=1e-3), BaselineRecorder(tmp_path / "other.json"), loader=data(STEPS))
    with pytest.raises(BaselineError, match="learning rate"):
        watch([recorded, tmp_path / "other.json"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"baseline": "b.json", "on_divergence": "shout"}, "'shout' is none of 'warn', 'stop', 'raise', 'alert'"),
        ({"baseline": []}, "names no baseline"),
        ({"baseline": ""}, "names no baseline"),
    ],
)
def test_arguments_that_are_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DivergenceMonitor(**arguments)


def test_a_baseline_that_is_not_fp32_is_warned_of(recorded: Path, watch: Any, said: Any) -> None:
    (run,) = read_baseline(recorded).runs
    watch(Baseline((replace(run, precision="bf16-true", is_fp32=False),), "made up"))
    assert said.count("not recorded in fp32|bf16-true") == 1
    watch(recorded)
    assert said.count("not recorded in fp32") == 1


class StopsAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def test_a_baseline_that_did_not_come_to_its_end_is_warned_of_and_no_match_unless_forced(
    watch: Any, tmp_path: Path, said: Any
) -> None:
    path = tmp_path / "b.json"
    fit(Language(), StopsAt(60), BaselineRecorder(path), loader=data(STEPS))
    verdict = watch(path, max_steps=60).verdict
    assert said.count("b.json is not finished|ended at step 60|not be MATCHES|force=True") == 1
    assert (verdict.status, verdict.paired, verdict.gap, verdict.coverage) == ("INCONCLUSIVE", True, 0.0, 1.0)
    assert "The baseline is not a whole run: it ended at step 60 of 100." in verdict.explanation
    assert watch(path, max_steps=60, force=True).verdict.status == "MATCHES"
    assert said.count("is not finished") == 1, "forced, it is known"
    assert watch(path, worse(since=10), max_steps=60).verdict.status == "DIVERGED"


def test_a_baseline_that_is_finished_is_not_warned_of(watch: Any, recorded: Path, said: Any) -> None:
    watch(recorded)
    assert not said.count("is not finished")


# --- odd modes --------------------------------------------------------------------------------------------------------------


def test_fast_dev_run_checks_the_baseline_and_does_nothing_else(recorded: Path, watch: Any, tmp_path: Path) -> None:
    assert watch(recorded, fast_dev_run=True).verdict is None
    with pytest.raises(BaselineError, match="missing"):
        watch(tmp_path / "missing.json", None, NoBatch(), fast_dev_run=True)
    assert not (tmp_path / "verdict.json").exists()


def test_validation_alone_says_nothing_and_does_not_disturb_the_fit(recorded: Path, tmp_path: Path) -> None:
    monitor = DivergenceMonitor(recorded, rule=RULE)
    saves = checkpoint(tmp_path, 50)
    trainer = fit(
        Validated(), monitor, saves, loader=data(STEPS), enable_checkpointing=True, default_root_dir=tmp_path,
        limit_val_batches=1,
    )  # fmt: skip
    verdict, state = monitor.verdict, monitor.state_dict()
    assert verdict is not None
    trainer.validate(Validated(), ckpt_path=tmp_path / "step=50.ckpt", verbose=False)
    assert monitor.verdict == verdict
    assert monitor.state_dict() == state
    alone = DivergenceMonitor("no such file.json")
    fit_nothing = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[alone]
    )
    fit_nothing.validate(Validated(), verbose=False)
    assert alone.verdict is None
    with pytest.raises(RuntimeError, match="no test before a fit"):
        _ = alone.test


def test_barebones_is_compared_too(recorded: Path, tmp_path: Path) -> None:
    monitor = DivergenceMonitor(recorded, rule=RULE, path=tmp_path / "v.json")
    trainer = pl.Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[monitor])
    trainer.fit(Language(), data(STEPS))
    assert monitor.verdict is not None
    assert monitor.verdict.status == "MATCHES"


def test_manual_optimization_is_compared_by_the_loss_that_it_returns(recorded: Path, watch: Any) -> None:
    class ByHand(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss}

    verdict = watch(recorded, ByHand()).verdict
    assert (verdict.status, verdict.paired, verdict.gap) == ("MATCHES", True, 0.0)


def test_a_run_of_too_few_steps_is_inconclusive_and_says_why(recorded: Path, watch: Any) -> None:
    verdict = watch(recorded, max_steps=1).verdict
    assert verdict.status == "INCONCLUSIVE"
    assert verdict.gap is None
    assert "blocks" in verdict.explanation


def test_a_recorder_and_a_monitor_can_watch_the_same_run(recorded: Path, watch: Any, tmp_path: Path) -> None:
    monitor = watch(recorded, None, BaselineRecorder(tmp_path / "new.json"))
    assert monitor.verdict.status == "MATCHES"
    (new,), (old,) = read_baseline(tmp_path / "new.json").runs, read_baseline(recorded).runs
    assert new.curve == old.curve
    assert new.weights == old.weights


# --- cost -------------------------------------------------------------------------------------------------------------------


class ReadsAlways(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


def test_between_log_steps_nothing_is_read_but_samples_ever_more_rarely(recorded: Path, tmp_path: Path) -> None:
    def reads(*callbacks: pl.Callback) -> list[int]:
        options: dict[str, Any] = {"loader": data(160), "log_every_n_steps": 10, "default_root_dir": tmp_path}
        return reads_per_batch(lambda *counter: fit(Language(), *counter, *callbacks, **options))

    without, watched = reads(), reads(DivergenceMonitor(recorded, rule=RULE))
    # log steps, and the samples whose hashes are kept, four in a batch; the last batch is not counted
    read_in = {batch for batch, (one, other) in enumerate(zip(without, watched, strict=True)) if one != other}
    assert read_in == {*range(9, 159, 10), *((position - 1) // 4 for position in probes(159 * 4))}
    assert len(read_in) < 80
    assert reads(ReadsAlways()) != without, "a read would be seen"
