"""`BaselineRecorder` saves true losses and what decides comparability, in a file that is whole at every moment."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp import MasterWeightPrecision, monitors
from lightning_mp.callbacks import baseline as baseline_module
from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.fingerprint import weights_fingerprint
from lightning_mp.numerics.baseline import BaselineRun, is_paired, read_baseline
from tests.callbacks.language import (
    Language,
    Validated,
    checkpoint,
    columns,
    data,
    fit,
    losses_of,
    probes,
    reads_per_batch,
    resumable,
)
from tests.callbacks.stand_ins import Scripted

ROOT = Path(__file__).parents[2]


def run_in(path: Path) -> BaselineRun:
    (run,) = read_baseline(path).runs
    return run


def record(path: Path, module: Any = None, *callbacks: pl.Callback, overwrite: bool = False, **options: Any) -> BaselineRun:
    fit(module or Language(), *callbacks, BaselineRecorder(path, overwrite=overwrite), **options)
    return run_in(path)


class Snapshots(pl.Callback):
    """The status and the last step that the file holds at the end of each batch; None where there is no file."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[tuple[str, int] | None]()

    def on_train_batch_end(self, *args: Any) -> None:
        run = run_in(self.path) if self.path.exists() else None
        self.seen.append(run and (run.status, run.curve.last_step))


# --- what is saved -----------------------------------------------------------------------------------------------------------


def test_the_file_has_the_loss_of_each_step_against_steps_samples_and_tokens(tmp_path: Path) -> None:
    run = record(tmp_path / "new" / "b.json")
    assert columns(run.curve) == {
        "steps": list(range(1, 41)),
        "samples": list(range(4, 164, 4)),
        "tokens": list(range(24, 984, 24)),
        "losses": losses_of(Language(), data()),
    }
    assert (run.status, run.precision, run.is_fp32) == ("finished", "32-true", True)


def test_the_file_says_what_decides_comparability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    module = Language(weight_decay=0.25, betas=(0.5, 0.75))
    module.embed.requires_grad_(False)
    recorder = BaselineRecorder(tmp_path / "b.json", data="texts")
    fit(module, *monitors(), recorder, gradient_clip_val=0.5)
    run = run_in(tmp_path / "b.json")
    settings = dict(run.settings)
    (((group,),)) = settings.pop("hyperparameters")
    assert (group["weight_decay"], group["betas"]) == (0.25, [0.5, 0.75])
    assert not {"lr", "params", "fused"} & group.keys()
    assert settings == {
        "optimizer": "AdamW",
        "parameters": 272,
        "trainable_parameters": 144,
        "gradient_clip_val": 0.5,
        "dataset_samples": 160,
        "max_steps": 40,
        "data": "texts",
        "global_batch_samples": 4,
        "tokens_per_step": 24.0,
        "learning_rates": dict.fromkeys(("1", "2", "4", "8", "16", "32"), 1e-2),
    }
    assert run.seed == 7
    assert run.weights == weights_fingerprint(Language())
    assert list(run.data_order) == [str(position) for position in probes(160)]
    assert run.device.startswith("cpu: ")
    assert run.versions["torch"] == torch.__version__
    assert {"peak_rss_gib", "tokens_per_s", "step_time_ms", "bytes_per_parameter"} == set(run.numbers)
    assert all(number > 0 for number in run.numbers.values())


def test_without_monitors_there_are_no_numbers(tmp_path: Path) -> None:
    assert record(tmp_path / "b.json").numbers == {}


def test_the_size_of_a_batch_is_that_of_most_steps_and_unknown_where_it_varies(tmp_path: Path) -> None:
    short_last = torch.utils.data.DataLoader(data().dataset, 7)
    assert record(tmp_path / "a.json", loader=short_last).settings["global_batch_samples"] == 7
    assert record(tmp_path / "b.json", accumulate_grad_batches=4).settings["global_batch_samples"] == 16
    rows = torch.zeros(60, 6, dtype=torch.int64)
    varying = torch.utils.data.DataLoader([rows[:size] for size in range(1, 9)], batch_size=None)  # type: ignore[arg-type]
    settings = record(tmp_path / "c.json", loader=varying).settings
    assert "global_batch_samples" not in settings
    assert settings["tokens_per_step"] == 27.0


def test_an_accumulation_that_changes_from_epoch_to_epoch_is_recorded(tmp_path: Path) -> None:
    changes = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    run = record(tmp_path / "b.json", None, changes, loader=data(10), max_epochs=2)
    assert run.curve.samples == [*range(4, 44, 4), *range(48, 88, 8)]


def test_numbers_of_numpy_in_an_optimizer_are_saved_as_python_s(tmp_path: Path) -> None:
    recorder = BaselineRecorder(tmp_path / "b.json")
    fit(Language(weight_decay=np.float64(0.25), betas=(np.float64(0.5), 0.75)), recorder)
    torch.save(recorder.state_dict(), tmp_path / "state.pt")
    group = torch.load(tmp_path / "state.pt", weights_only=True)["settings"]["hyperparameters"][0][0]
    assert (group["weight_decay"], group["betas"]) == (0.25, [0.5, 0.75])


class Scheduled(Language):
    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


def test_learning_rates_are_those_that_steps_used(tmp_path: Path) -> None:
    rates = record(tmp_path / "b.json", Scheduled()).settings["learning_rates"]
    assert rates == pytest.approx({str(step): 1e-2 / step for step in (1, 2, 4, 8, 16, 32)})
    set_in_hook = record(tmp_path / "c.json", SetsItsRate()).settings["learning_rates"]
    assert set_in_hook == pytest.approx({str(step): 0.5**step for step in (1, 2, 4, 8, 16, 32)})


class SetsItsRate(Language):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:  # type: ignore[override]
        optimizer.param_groups[0]["lr"] = 0.5 ** (batch_idx + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


def test_learning_rates_are_kept_by_applied_steps_where_steps_are_skipped(tmp_path: Path) -> None:
    class Lags(Scheduled):
        """As our plugin has it: a skipped step does not advance the schedule."""

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.trainer.precision_plugin.skipped_steps != len(self.seen):
                self.seen.append(1)
                return
            super().lr_scheduler_step(scheduler, metric)

    module = Lags()
    module.seen = []
    plugin = Scripted(["weight", None, "weight", None, None])
    rates = record(tmp_path / "b.json", module, plugins=[plugin]).settings["learning_rates"]
    assert plugin.skipped_steps == 2
    assert rates == pytest.approx({str(step): 1e-2 / step for step in (1, 2, 4, 8, 16, 32)})


def test_accumulating_micro_batches_gives_the_same_curve_and_the_same_fingerprints(tmp_path: Path) -> None:
    whole = record(tmp_path / "a.json")
    parts = record(tmp_path / "b.json", loader=torch.utils.data.DataLoader(data().dataset, 1), accumulate_grad_batches=4)
    assert parts.curve.losses == pytest.approx(whole.curve.losses, abs=1e-5)
    assert (parts.curve.samples, parts.curve.tokens) == (whole.curve.samples, whole.curve.tokens)
    assert is_paired(whole, parts)
    assert parts.settings["global_batch_samples"] == 4


def test_validation_metrics_are_kept_where_they_were_measured_and_sanity_checks_are_not(tmp_path: Path, said: Any) -> None:
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 15, "num_sanity_val_steps": 2}
    run = record(tmp_path / "a.json", Validated(), **options)
    assert set(run.validation) == {"val_loss", "val/rows"}
    rows = run.validation["val_loss"]
    assert [(row["step"], row["samples"], row["tokens"]) for row in rows] == [(15, 60, 360), (30, 120, 720)]
    assert all(row["value"] > 0 for row in rows)
    assert [row["value"] for row in run.validation["val/rows"]] == [4.0, 4.0]
    assert "no values of" not in said
    chosen = BaselineRecorder(tmp_path / "b.json", validation_metrics=["val_loss", "no such"])
    fit(Validated(), chosen, **options)
    assert set(run_in(tmp_path / "b.json").validation) == {"val_loss"}
    assert said.count("no values of no such|It has: val_loss") == 1


def test_a_validation_metric_that_is_not_finite_is_saved_as_unknown(tmp_path: Path) -> None:
    class Infinite(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", math.inf)

    run = record(tmp_path / "b.json", Infinite(), limit_val_batches=1)
    assert [row["value"] for row in run.validation["val_loss"]] == [None]


def test_a_loss_that_is_not_finite_is_counted(tmp_path: Path) -> None:
    run = record(tmp_path / "b.json", Language(spoiled={6: math.nan}), max_steps=10)
    assert run.curve.first_nonfinite_step == 7


def test_the_last_line_says_where_the_baseline_is_and_how_many_steps_it_has(tmp_path: Path, said: Any) -> None:
    record(tmp_path / "b.json")
    assert said.count(f"The baseline of 40 steps is in {tmp_path / 'b.json'}.") == 1


# --- how it ends ------------------------------------------------------------------------------------------------------------


class Ends(pl.Callback):
    def __init__(self, how: str, at: int = 12) -> None:
        self.how, self.at = how, at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and self.how == "stop":
            trainer.should_stop = True
        elif batch_idx == self.at:
            raise KeyboardInterrupt if self.how == "interrupt" else ArithmeticError("on purpose")


@pytest.mark.parametrize(("how", "steps"), [("stop", 13), ("error", 12)])
def test_a_run_that_ends_early_is_saved_as_stopped_with_all_its_steps(tmp_path: Path, how: str, steps: int) -> None:
    recorder = BaselineRecorder(tmp_path / "b.json")
    if how == "stop":
        fit(Language(), Ends(how), recorder)
    else:
        with pytest.raises(ArithmeticError, match="on purpose"):
            fit(Language(), Ends(how), recorder)
    run = run_in(tmp_path / "b.json")
    assert (run.status, run.curve.last_step) == ("stopped", steps)
    assert run.curve.losses == losses_of(Language(), list(data())[:steps])


@pytest.mark.parametrize("options", [{"max_steps": 10}, {"max_epochs": 2}, {"limit_train_batches": 6}])
def test_a_run_that_reaches_its_limit_is_finished(tmp_path: Path, options: dict[str, Any]) -> None:
    assert record(tmp_path / "b.json", loader=data(10), **options).status == "finished"


def test_the_file_is_written_at_the_first_log_step_then_as_time_passes_and_before_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    seldom, often, saving = Snapshots(path), Snapshots(path), Snapshots(path)
    fit(Language(), BaselineRecorder(path, save_every_s=1000.0), seldom, loader=data(12), log_every_n_steps=4)
    assert seldom.seen == [None] * 3 + [("recording", 4)] * 9
    path.unlink()
    fit(Language(), BaselineRecorder(path, save_every_s=0.0), often, loader=data(12), log_every_n_steps=4)
    assert often.seen == [None] * 3 + [("recording", 4)] * 4 + [("recording", 8)] * 4 + [("recording", 12)]
    path.unlink()
    fit(
        Language(), BaselineRecorder(path, save_every_s=1000.0), checkpoint(tmp_path, 6), saving, loader=data(8),
        enable_checkpointing=True, log_every_n_steps=1000,
    )  # fmt: skip
    # Lightning moves callbacks that save checkpoints to the end, so a batch sees what the one before it saved
    assert saving.seen == [None] * 6 + [("recording", 6)] * 2


KILLED = """
    import sys
    from lightning_mp.callbacks.baseline import BaselineRecorder
    from tests.callbacks.language import Language, data, fit
    fit(Language(), BaselineRecorder(sys.argv[1], save_every_s=0.0), loader=data(100_000), log_every_n_steps=1)
"""


def test_a_process_that_is_killed_leaves_a_file_that_can_be_read_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), str(path)], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        steps: list[int] = []
        while len(set(steps)) < 8:
            assert time.monotonic() < deadline, "it does not train"
            if path.exists():
                steps.append(run_in(path).curve.last_step)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = run_in(path)
    assert run.status == "recording"
    assert run.curve.last_step >= steps[-1]
    assert steps == sorted(steps)


# --- resuming ---------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_file_as_one_in_a_piece_bit_for_bit(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole.json", loader=resumable(20), log_every_n_steps=4)
    path = tmp_path / "b.json"
    saves = checkpoint(tmp_path, 10)
    with pytest.raises(ArithmeticError):  # three steps after the checkpoint, of which the last is saved and then forgotten
        record(path, Language(), Ends("error", 13), saves, loader=resumable(20), enable_checkpointing=True)
    assert run_in(path).curve.last_step == 13
    resumed = record(path, loader=resumable(20), ckpt=tmp_path / "step=10.ckpt", log_every_n_steps=4)
    assert resumed.curve == whole.curve
    assert resumed.as_json() == whole.as_json()


def test_every_field_of_the_state_survives(tmp_path: Path) -> None:
    recorder = BaselineRecorder(tmp_path / "b.json")
    fit(Validated(), recorder, checkpoint(tmp_path, 30), limit_val_batches=1, val_check_interval=10, enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=30.ckpt", weights_only=True)["callbacks"]["BaselineRecorder"]
    assert saved["curve"]["steps"] == list(range(1, 31))
    assert all(saved.values())

    class Loads(BaselineRecorder):
        state_key = "BaselineRecorder"

        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            self.loaded = self.state_dict()

    other = Loads(tmp_path / "other.json")
    fit(Validated(), other, ckpt=tmp_path / "step=30.ckpt")
    assert other.loaded == saved


def test_validating_a_checkpoint_does_not_disturb_what_is_recorded(tmp_path: Path) -> None:
    recorder = BaselineRecorder(tmp_path / "b.json")
    trainer = fit(Validated(), recorder, checkpoint(tmp_path, 10), enable_checkpointing=True)
    state = recorder.state_dict()
    trainer.validate(Validated(), ckpt_path=tmp_path / "step=10.ckpt", verbose=False)
    assert recorder.state_dict() == state


def test_a_run_that_is_joined_late_says_so_and_has_steps_only(tmp_path: Path, said: Any) -> None:
    fit(Language(), checkpoint(tmp_path, 10), loader=resumable(20), enable_checkpointing=True)
    run = record(tmp_path / "b.json", loader=resumable(20), ckpt=tmp_path / "step=10.ckpt")
    assert "begins at step 11" in said
    assert run.curve.steps == list(range(11, 21))
    assert (run.curve.samples, run.curve.tokens, run.weights, run.data_order) == (None, None, None, {})


def test_a_second_fit_of_the_same_trainer_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path, loader = tmp_path / "b.json", resumable(20)
    trainer = fit(Language(), BaselineRecorder(path), loader=loader, max_steps=12, max_epochs=-1)
    assert run_in(path).status == "finished"
    trainer.fit_loop.epoch_loop.max_steps = 20
    loader.at = 12
    trainer.fit(trainer.lightning_module, loader)
    run = run_in(path)
    assert (run.status, run.curve.steps) == ("finished", list(range(1, 21)))
    assert run.curve.samples == list(range(4, 84, 4))
    assert run.weights == weights_fingerprint(Language())


# --- refusals ---------------------------------------------------------------------------------------------------------------


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1


def refused(recorder: BaselineRecorder, words: str, **options: Any) -> None:
    counts = Counts()
    with pytest.raises(MisconfigurationException, match=words):
        fit(Language(), recorder, counts, **options)
    assert counts.batches == 0


def test_a_finished_baseline_is_replaced_only_if_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    first = record(path)
    refused(BaselineRecorder(path), r"b\.json'\): the path holds a finished baseline.*overwrite=True")
    assert run_in(path) == first
    assert record(path, Language(seed=1), overwrite=True).weights != first.weights


def test_the_run_of_a_finished_baseline_may_be_resumed_and_another_may_not(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    first = record(path, Language(), checkpoint(tmp_path, 10), loader=resumable(20), enable_checkpointing=True)
    assert record(path, loader=resumable(20), ckpt=tmp_path / "step=10.ckpt").curve == first.curve
    saves = checkpoint(tmp_path / "other", 10)
    record(tmp_path / "other.json", Language(seed=1), saves, loader=resumable(20), enable_checkpointing=True)
    refused(BaselineRecorder(path), "finished baseline", loader=resumable(20), ckpt=tmp_path / "other" / "step=10.ckpt")


def test_a_baseline_that_did_not_come_to_its_end_is_replaced_and_the_log_says_so(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "b.json"
    fit(Language(), Ends("stop"), BaselineRecorder(path))
    assert record(path).status == "finished"
    assert "replaces|b.json|did not come to its end" in said


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"schema": "other"}', "\x00"])
def test_a_file_that_is_no_baseline_is_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(content)
    refused(BaselineRecorder(path), r"holds a file that is no baseline.*b\.json")
    assert path.read_text() == content
    assert record(path, overwrite=True).status == "finished"


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.json").mkdir()
    refused(BaselineRecorder(tmp_path / "folder.json"), "folder.json is a folder")
    refused(BaselineRecorder(tmp_path / "folder.json", overwrite=True), "folder.json is a folder")
    (tmp_path / "file").write_text("")
    refused(BaselineRecorder(tmp_path / "file" / "b.json"), "file is not a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(BaselineRecorder(tmp_path / "b.json"), "allows no new files")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "b.csv"}, r"'b\.csv' must end in \.json"),
        ({"path": "b.json", "save_every_s": -1.0}, "save_every_s=-1"),
        ({"path": "b.json", "save_every_s": math.nan}, "save_every_s=nan"),
        ({"path": "b.json", "validation_metrics": "val_loss"}, "validation_metrics='val_loss' must be a list"),
    ],
)
def test_arguments_that_are_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BaselineRecorder(**options)


# --- warnings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_run_that_is_not_fp32_is_warned_of_and_the_file_says_so(tmp_path: Path, said: Any, precision: str) -> None:
    run = record(tmp_path / "b.json", precision=precision)
    assert (run.precision, run.is_fp32) == (precision, False)
    assert f"not fp32|{precision}" in said
    assert run.weights == weights_fingerprint(Language())


def test_a_run_of_masters_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    run = record(tmp_path / "b.json", plugins=[MasterWeightPrecision("bf16-master")])
    assert (run.precision, run.is_fp32) == ("bf16-master", False)
    assert run.settings["parameters"] == 272


def test_double_precision_is_not_warned_of(tmp_path: Path, said: Any) -> None:
    assert record(tmp_path / "b.json", precision="64-true").is_fp32
    assert "not fp32" not in said


def test_tf32_is_noted(tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_mp.callbacks import recorded_run

    monkeypatch.setattr(recorded_run, "matmul_format", lambda precision, device: "tf32")
    run = record(tmp_path / "b.json")
    assert ("tf32" in run.precision, run.is_fp32) == (True, False)
    assert "not fp32|tf32" in said


def test_a_run_without_a_loss_is_warned_of(tmp_path: Path, said: Any) -> None:
    class Silent(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    run = record(tmp_path / "b.json", Silent())
    assert run.curve.counts == [0] * 40
    assert "has no loss|return the loss" in said


def test_fast_dev_run_writes_nothing_and_no_step_writes_nothing(tmp_path: Path, said: Any) -> None:
    path = tmp_path / "b.json"
    fit(Language(), BaselineRecorder(path), fast_dev_run=True)
    assert "writes nothing|fast_dev_run" in said
    trainer = fit(Language(), BaselineRecorder(path), limit_train_batches=0)
    trainer.validate(Validated(), verbose=False)
    assert not path.exists()


def test_barebones_records_too(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    trainer = pl.Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[BaselineRecorder(path)])
    trainer.fit(Language(), data())
    assert run_in(path).curve.losses == losses_of(Language(), data())


# --- a disk that is full -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recovers", [True, False])
def test_a_full_disk_is_warned_of_once_and_loses_nothing_that_was_saved(
    tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    path, write, calls = tmp_path / "b.json", baseline_module.write_baseline, list[int]()

    def fails(to: Any, found: Any) -> None:
        calls.append(found.runs[0].curve.last_step)
        if found.runs[0].curve.last_step > 10 and (found.runs[0].status == "recording" or not recovers):
            raise OSError(errno.ENOSPC, "No space left on device", str(to))
        write(to, found)

    monkeypatch.setattr(baseline_module, "write_baseline", fails)
    trainer = fit(Language(), BaselineRecorder(path, save_every_s=0.0), log_every_n_steps=5)
    assert trainer.global_step == 40
    assert calls == [5, 10, 15, 20, 25, 30, 35, 40, 40]
    assert said.count("cannot write|b.json|No space left") == 1
    assert said.count("NOT saved to its end|b.json") == (0 if recovers else 1)
    assert said.count("The baseline of 40 steps is in|b.json") == (1 if recovers else 0)
    run = run_in(path)
    assert (run.status, run.curve.last_step) == (("finished", 40) if recovers else ("recording", 10))


# --- cost -------------------------------------------------------------------------------------------------------------------


class ReadsAlways(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


def test_between_log_steps_nothing_is_read_but_samples_ever_more_rarely(tmp_path: Path) -> None:
    def reads(*callbacks: pl.Callback) -> list[int]:
        options: dict[str, Any] = {"loader": data(160), "log_every_n_steps": 10}
        return reads_per_batch(lambda *counter: fit(Language(), *counter, *callbacks, **options))

    without, watched = reads(), reads(BaselineRecorder(tmp_path / "b.json"))
    # log steps, and the samples whose hashes are kept, four in a batch; the last batch is not counted
    read = {batch for batch, (one, other) in enumerate(zip(without, watched, strict=True)) if one != other}
    assert read == {*range(9, 159, 10), *((position - 1) // 4 for position in probes(159 * 4))}
    assert len(read) < 80
    assert reads(ReadsAlways()) != without, "a read would be seen"


def test_the_trainer_and_its_plugin_are_left_as_they_were(tmp_path: Path) -> None:
    for ending in ("none", "error"):
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Ends(ending, 2) if ending == "error" else Counts(), BaselineRecorder(tmp_path / f"{ending}.json")],
        )  # fmt: skip
        if ending == "error":
            with pytest.raises(ArithmeticError):
                trainer.fit(Language(), data())
        else:
            trainer.fit(Language(), data())
        assert "save_checkpoint" not in vars(trainer)
        assert "convert_module" not in vars(trainer.precision_plugin)


def test_a_file_of_a_long_run_is_small(tmp_path: Path) -> None:
    record(tmp_path / "b.json")
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["runs"][0]["curve"]["max_points"] == 4096
