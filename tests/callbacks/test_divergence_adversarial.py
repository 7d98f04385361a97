"""`BaselineRecorder` and `DivergenceMonitor` under what users do: odd modules, batches and trainers, errors, hostile files.

``python -m tests.callbacks.test_divergence_adversarial FOLDER`` runs one of two ranks.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceMonitor
from lightning_mp.callbacks.fingerprint import FingerprintMonitor, RunFingerprint
from lightning_mp.numerics.baseline import (
    Baseline,
    BaselineError,
    BaselineRun,
    differences,
    is_paired,
    join_baselines,
    read_baseline,
    read_csv,
    write_baseline,
)
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import DivergenceTest, Rule
from tests.callbacks.language import Language, Validated, checkpoint, data, fit, resumable
from tests.callbacks.stand_ins import Rows
from tests.ddp.launch import run_scenarios, scenarios_of

RULE = Rule(blocks=10)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 run of 40 steps."""
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    fit(Language(), BaselineRecorder(path))
    return path


def record(folder: Path, module: Any = None, *callbacks: pl.Callback, name: str = "b.json", **options: Any) -> BaselineRun:
    """What a recorder writes of a fit."""
    fit(module or Language(), BaselineRecorder(folder / name, overwrite=True), *callbacks, **options)
    (run,) = read_baseline(folder / name).runs
    return run


def watch(folder: Path, baseline: Any, module: Any = None, *callbacks: pl.Callback, **options: Any) -> DivergenceMonitor:
    monitor = DivergenceMonitor(baseline, rule=RULE)
    fit(module or Language(), monitor, *callbacks, **{"default_root_dir": folder, **options})
    return monitor


# --- odd modules --------------------------------------------------------------------------------------------------------------


class ByHand(Language):
    """In manual optimization; it returns what `told` makes of its loss."""

    def __init__(self, told: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.told = told

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return self.told(loss)


@pytest.mark.parametrize(
    ("told", "mean"),
    [
        (torch.tensor([3, 4]), 3.5),
        (torch.tensor([True, False]), 0.5),
        (torch.tensor([[2.5]], dtype=torch.float64), 2.5),
        (torch.tensor(7), 7.0),
    ],
)
def test_a_loss_of_any_dtype_and_shape_is_recorded_as_its_mean(tmp_path: Path, told: Tensor, mean: float) -> None:
    run = record(tmp_path, ByHand(lambda loss: told))
    assert run.curve.losses == [mean] * 40


class WithoutRate(torch.optim.SGD):
    """Keeps no learning rate in its groups, as optimizers do that find their own."""

    def __init__(self, params: Any, has_key: bool) -> None:
        super().__init__(params, 0.0)
        for group in self.param_groups:
            group["lr"] = None
            if not has_key:
                del group["lr"]

    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None else None


@pytest.mark.parametrize("has_key", [True, False])
def test_an_optimizer_without_a_learning_rate_is_recorded_without_one(tmp_path: Path, has_key: bool) -> None:
    class Module(Language):
        def configure_optimizers(self) -> Any:
            return WithoutRate(self.parameters(), has_key)

    run = record(tmp_path, Module())
    assert run.settings["learning_rates"] == {}
    assert run.curve.last_step == 40
    assert watch(tmp_path, tmp_path / "b.json", Module()).verdict.status == "MATCHES"


def test_a_module_without_an_optimizer_is_recorded(tmp_path: Path) -> None:
    class Module(Language):
        def configure_optimizers(self) -> Any:
            return None

    run = record(tmp_path, Module())
    assert (run.curve.last_step, run.settings["learning_rates"]) == (40, {})


def test_settings_that_json_does_not_have_do_not_keep_the_file_from_being_written(tmp_path: Path, said: Any) -> None:
    class Unbounded(Language):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0].update(growth_rate=float("inf"), bounds=[0.0, float("inf")], d=1.5)
            return optimizer

    run = record(tmp_path, Unbounded(), gradient_clip_val=float("inf"))
    (((group,),)) = run.settings["hyperparameters"]
    assert group["d"] == 1.5
    assert not {"growth_rate", "bounds"} & group.keys()
    assert run.settings["gradient_clip_val"] == 0.0
    assert "cannot write" not in said


def test_a_global_seed_that_is_no_number_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "today's")
    assert record(tmp_path).seed is None


def test_clipping_by_value_is_not_comparable_with_clipping_by_norm(tmp_path: Path) -> None:
    record(tmp_path, gradient_clip_val=0.5)
    same = watch(tmp_path, tmp_path / "b.json", gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    assert same.verdict.status == "MATCHES"
    other = watch(tmp_path, tmp_path / "b.json", gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert other.verdict.status == "NOT COMPARABLE"
    assert [difference.text for difference in other.verdict.differences] == [
        "gradient_clip_algorithm is value, the baseline's norm"
    ]


@pytest.mark.parametrize(
    "make", [lambda data: BaselineRecorder("b.json", data=data), lambda data: DivergenceMonitor("b", data=data)]
)
def test_a_name_of_the_data_that_is_no_text_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"data=.*Path\('x'\).* as text"):
        make(Path("x"))


@pytest.mark.parametrize("baseline", [None, [], "", [None], ["b.json", ""], [3]])
def test_what_names_no_baseline_is_refused(baseline: Any) -> None:
    with pytest.raises(ValueError, match="names no baseline"):
        DivergenceMonitor(baseline)


# --- odd batches --------------------------------------------------------------------------------------------------------------


class Opaque:
    """A batch of a class of its own."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class OfOpaque(Language):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch.tokens)


def opaque(reverse: bool = False) -> DataLoader[Any]:
    batches = [Opaque(batch) for batch in data()]
    return DataLoader(batches[::-1] if reverse else batches, batch_size=None)  # type: ignore[arg-type]


def test_batches_without_values_that_can_be_hashed_are_never_paired_and_that_is_said(tmp_path: Path, said: Any) -> None:
    run = record(tmp_path, OfOpaque(), loader=opaque())
    assert run.data_order == {}
    assert said.count("does not know the order of its data|b.json") == 1
    for reverse in (False, True):
        verdict = watch(tmp_path, tmp_path / "b.json", OfOpaque(), loader=opaque(reverse)).verdict
        assert (verdict.status, verdict.paired) == ("INCONCLUSIVE", False)


def test_values_beside_what_cannot_be_hashed_tell_the_order() -> None:
    one, other = RunFingerprint(), RunFingerprint()
    one.add({"graph": Opaque(torch.zeros(1)), "label": 1}, None)
    other.add({"graph": Opaque(torch.zeros(1)), "label": 2}, None)
    assert one.data_order.keys() == other.data_order.keys() == {"1"}
    assert one.data_order != other.data_order


def test_a_run_of_batches_that_cannot_be_hashed_has_no_data_order_in_its_config() -> None:
    monitor = FingerprintMonitor()
    fit(OfOpaque(), monitor, loader=opaque(), max_epochs=2)
    assert list(monitor.recipe()) == ["weights"]


def test_a_run_of_empty_batches_is_compared_by_steps(tmp_path: Path) -> None:
    class Module(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.head.weight.square().sum()

    loader = DataLoader([torch.zeros(0, 4)] * 40, batch_size=None)  # type: ignore[arg-type]
    run = record(tmp_path, Module(), loader=loader)
    assert run.curve.last_samples == 0
    monitor = watch(tmp_path, tmp_path / "b.json", Module(), loader=loader)
    assert monitor.test.axis == "steps"
    assert (monitor.verdict.gap, monitor.verdict.coverage) == (0.0, 1.0)


def test_metrics_of_several_validation_loaders_are_all_kept(tmp_path: Path) -> None:
    class Several(Validated):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val/a=b", float(dataloader_idx))

        def on_validation_epoch_end(self) -> None:
            self.log("val/whole", 5.0)

        def val_dataloader(self) -> Any:
            return [data(2, seed=1), data(1, seed=2)]

    run = record(tmp_path, Several(), limit_val_batches=1.0, val_check_interval=20)
    values = {name: [row["value"] for row in rows] for name, rows in run.validation.items()}
    names = [f"val/a=b/dataloader_idx_{index}" for index in (0, 1)]
    assert values == {names[0]: [0.0, 0.0], names[1]: [1.0, 1.0], "val/whole": [5.0, 5.0]}


# --- odd trainers -------------------------------------------------------------------------------------------------------------


class Tuned(pl.LightningDataModule):
    """Batches of a size that a finder may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1

    def train_dataloader(self) -> Any:
        return data(160 // self.batch_size, self.batch_size)

    def val_dataloader(self) -> Any:
        return data(2, seed=1)


def quiet(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 5,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**settings, **options})


def test_searching_for_a_learning_rate_or_a_batch_size_leaves_no_trace(tmp_path: Path, recorded: Path) -> None:
    recorder, monitor = BaselineRecorder(tmp_path / "b.json"), DivergenceMonitor(recorded, rule=RULE)
    trainer, loader = quiet(tmp_path, recorder, monitor), Tuned()
    Tuner(trainer).lr_find(Language(), data(), num_training=5, update_attr=False)
    Tuner(trainer).scale_batch_size(Language(), datamodule=loader, steps_per_trial=2, max_trials=3, init_val=1)
    assert loader.batch_size == 4
    assert monitor.verdict is None
    assert not (tmp_path / "b.json").exists()
    trainer.fit(Language(), data())
    assert (monitor.verdict.status, monitor.verdict.paired, monitor.verdict.gap) == ("MATCHES", True, 0.0)
    assert read_baseline(tmp_path / "b.json").runs[0].curve == read_baseline(recorded).runs[0].curve


def test_a_finder_that_runs_first_in_the_fit_itself_leaves_no_trace(tmp_path: Path, recorded: Path) -> None:
    finders = [
        LearningRateFinder(num_training_steps=5, update_attr=False),
        BatchSizeFinder(steps_per_trial=2, max_trials=3, init_val=1),
    ]
    for finder in finders:
        loader = Tuned()
        loader.batch_size = 4
        monitor = DivergenceMonitor(recorded, rule=RULE)
        trainer = quiet(tmp_path, BaselineRecorder(tmp_path / "b.json", overwrite=True), monitor, finder)
        trainer.fit(Language(), datamodule=loader)
        assert (monitor.verdict.status, monitor.verdict.paired, monitor.verdict.gap) == ("MATCHES", True, 0.0)
        assert read_baseline(tmp_path / "b.json").runs[0].curve == read_baseline(recorded).runs[0].curve


def test_a_trainer_refuses_two_monitors_at_once(recorded: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        pl.Trainer(callbacks=[DivergenceMonitor(recorded), DivergenceMonitor(recorded)], logger=False)


def test_early_stopping_waits_for_the_first_block_if_it_is_not_strict(tmp_path: Path, recorded: Path) -> None:
    def stopping(strict: bool) -> EarlyStopping:
        return EarlyStopping("divergence/gap", patience=100, strict=strict, check_on_train_epoch_end=True)

    assert watch(tmp_path, recorded, None, stopping(False), loader=data(2), max_epochs=20).verdict.coverage == 1.0
    with pytest.raises(RuntimeError, match="divergence/gap"):
        watch(tmp_path, recorded, None, stopping(True), loader=data(2), max_epochs=20)


def test_a_recorder_and_a_monitor_of_the_same_file_compare_with_what_it_was(tmp_path: Path) -> None:
    record(tmp_path, spoiled := Language(spoiled=dict.fromkeys(range(40), 2.0)))
    assert spoiled.trainer.global_step == 40
    again = BaselineRecorder(tmp_path / "b.json", overwrite=True)
    monitor = watch(tmp_path, tmp_path / "b.json", Language(), again)
    assert monitor.verdict.status == "BETTER"
    assert watch(tmp_path, tmp_path / "b.json").verdict.gap == 0.0


def test_one_callback_records_and_watches_one_trainer_after_another(tmp_path: Path, recorded: Path) -> None:
    recorder, monitor = BaselineRecorder(tmp_path / "b.json", overwrite=True), DivergenceMonitor(recorded, rule=RULE)
    for steps, coverage in ((40, 1.0), (20, 0.5)):
        fit(Language(), recorder, monitor, max_steps=steps, default_root_dir=tmp_path)
        assert (monitor.verdict.coverage, monitor.verdict.paired) == (coverage, True)
        assert read_baseline(tmp_path / "b.json").runs[0].curve.last_step == steps


def test_a_fit_that_has_nothing_left_to_do_keeps_verdict_and_file(tmp_path: Path, recorded: Path) -> None:
    monitor = DivergenceMonitor(recorded, rule=RULE)
    trainer = quiet(tmp_path, monitor, BaselineRecorder(tmp_path / "b.json"))
    trainer.fit(Language(), data())
    verdict, text = monitor.verdict, (tmp_path / "b.json").read_text()
    assert verdict.status == "MATCHES"
    trainer.fit(Language(), data())
    assert monitor.verdict == verdict
    assert (tmp_path / "b.json").read_text() == text


# --- paths --------------------------------------------------------------------------------------------------------------------


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "b.json").symlink_to(tmp_path / "real" / "of month.json")
    record(tmp_path)
    assert (tmp_path / "b.json").is_symlink()
    assert read_baseline(tmp_path / "real" / "of month.json").runs[0].status == "finished"


class Moves(pl.Callback):
    """Changes the working folder during training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            os.chdir(self.folder)


def test_relative_paths_are_those_of_the_beginning(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "ein Ordner ü", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    monkeypatch.chdir(folder)
    monitor = DivergenceMonitor(recorded, path="v=1/verdict.json")
    fit(Language(), BaselineRecorder("a b.json"), monitor, Moves(other))
    assert read_baseline(folder / "a b.json").runs[0].status == "finished"
    assert json.loads((folder / "v=1" / "verdict.json").read_text())["status"] == "MATCHES"
    assert list(other.iterdir()) == []


def test_where_the_root_is_not_on_this_machine_the_verdict_is_in_the_working_folder(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    watch(tmp_path, recorded, default_root_dir="memory://runs")
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.json"]
    assert said.count("working folder|memory://runs") == 1


def test_the_key_of_a_loss_is_heeded_whatever_the_case_of_the_suffix(tmp_path: Path) -> None:
    rows = [f"{step},{step + 2.0},{step + 1.0}" for step in range(20)]
    (tmp_path / "M.CSV").write_text("\n".join(["step,loss,mine", *rows]))
    fit(Language(), monitor := DivergenceMonitor(tmp_path / "M.CSV", loss_key="mine"), default_root_dir=tmp_path)
    assert monitor.baseline.runs[0].curve.losses[0] == 1.0


# --- errors -------------------------------------------------------------------------------------------------------------------


def failing(hook: str, error: BaseException) -> pl.Callback:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return type("Failing", (pl.Callback,), {hook: fail})()


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown"])
def test_a_baseline_that_is_finished_stays_so_whatever_fails_after_it(tmp_path: Path, recorded: Path, hook: str) -> None:
    for position in (0, 1):
        watching = [BaselineRecorder(tmp_path / "b.json", overwrite=True), DivergenceMonitor(recorded)]
        watching.insert(position * 2, failing(hook, OSError("later")))
        with pytest.raises(OSError, match="later"):
            fit(Language(), *watching, default_root_dir=tmp_path)
        assert read_baseline(tmp_path / "b.json").runs[0].status == "finished"


@pytest.mark.parametrize(
    "hook",
    ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_epoch_end"],
)
def test_errors_of_others_are_what_is_raised_and_trainer_and_plugin_are_as_before(
    tmp_path: Path, recorded: Path, hook: str
) -> None:
    for position in (0, 1):
        watching = [BaselineRecorder(tmp_path / "b.json", overwrite=True), DivergenceMonitor(recorded)]
        watching.insert(position * 2, failing(hook, LookupError("theirs")))
        trainer = quiet(tmp_path, *watching)
        with pytest.raises(LookupError, match="theirs") as caught:
            trainer.fit(Language(), data())
        assert caught.value.__context__ is None
        assert "save_checkpoint" not in trainer.__dict__
        assert "convert_module" not in trainer.precision_plugin.__dict__


def test_a_resume_that_fails_before_training_raises_its_own_error_and_writes_nothing(tmp_path: Path, recorded: Path) -> None:
    class Split(Language):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": list(part.parameters())} for part in (self.embed, self.head)], self.lr)

    folder = tmp_path / "second"
    watch(tmp_path, recorded, None, checkpoint(tmp_path, 7), enable_checkpointing=True)
    with pytest.raises(ValueError, match="parameter groups") as caught:
        watch(folder, recorded, Split(), ckpt=tmp_path / "step=7.ckpt")
    assert caught.value.__context__ is None
    assert not folder.exists()


def test_a_service_that_fails_at_the_end_does_not_keep_the_verdict_from_its_file(tmp_path: Path, recorded: Path) -> None:
    class Down(dict[str, Any]):
        def update(self, *args: Any) -> None:
            raise ConnectionError("the service is down")

    rows = Rows()
    rows.summary = Down()
    with pytest.raises(ConnectionError):
        watch(tmp_path, recorded, logger=rows)
    assert json.loads((tmp_path / str(rows.name) / str(rows.version) / "verdict.json").read_text())["status"] == "MATCHES"


def test_a_run_that_was_killed_after_its_last_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    whole = record(tmp_path, Language(), name="whole.json", loader=resumable())
    recorder = BaselineRecorder(tmp_path / "b.json", save_every_s=0.0)

    class Killed(pl.Callback):
        """Keeps what is on disk in the middle, behind the checkpoint."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 29:
                self.text = (tmp_path / "b.json").read_text()

    killed = Killed()
    fit(Language(), recorder, checkpoint(tmp_path, 20), killed, loader=resumable(), enable_checkpointing=True)
    (tmp_path / "b.json").write_text(killed.text)
    (left,) = read_baseline(tmp_path / "b.json").runs
    assert (left.status, left.curve.last_step) == ("recording", 30)
    fit(Language(), BaselineRecorder(tmp_path / "b.json"), loader=resumable(), ckpt=tmp_path / "step=20.ckpt")
    assert read_baseline(tmp_path / "b.json").runs == (whole,)


def test_a_checkpoint_without_a_record_in_a_trainer_that_has_one_begins_a_new_curve(tmp_path: Path, recorded: Path) -> None:
    fit(Language(), checkpoint(tmp_path, 10), enable_checkpointing=True)
    recorder, monitor = BaselineRecorder(tmp_path / "b.json", overwrite=True), DivergenceMonitor(recorded, rule=RULE)
    trainer = quiet(tmp_path, recorder, monitor)
    trainer.fit(Language(), data())
    assert monitor.verdict.paired
    trainer.fit(Language(), data(), ckpt_path=tmp_path / "step=10.ckpt")
    (run,) = read_baseline(tmp_path / "b.json").runs
    assert (run.curve.steps[0], run.curve.last_step, run.curve.last_samples, run.weights) == (11, 40, None, None)
    assert (monitor.verdict.status, monitor.verdict.paired, monitor.test.axis) == ("INCONCLUSIVE", False, "steps")
    # the first step of a block of four was seen before
    assert [block.index for block in monitor.test.blocks] == list(range(2, 10))


def test_a_run_that_was_joined_late_goes_on_in_its_own_file(tmp_path: Path) -> None:
    fit(Language(), checkpoint(tmp_path, 10), enable_checkpointing=True)
    trainer = quiet(tmp_path, BaselineRecorder(tmp_path / "b.json"))
    trainer.fit(Language(), data(), ckpt_path=tmp_path / "step=10.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Language(), data())
    (run,) = read_baseline(tmp_path / "b.json").runs
    assert (run.status, run.curve.steps[0], run.curve.last_step) == ("finished", 11, 80)


class Counting(Language):
    """Counts its own tokens."""

    def count_tokens(self, batch: Tensor) -> int:
        return batch.numel()


class Copies(pl.Callback):
    """Copies all neighbours in the middle of a window."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            self.copies = [pickle.loads(pickle.dumps(callback)) for callback in trainer.callbacks[:2]]
            self.copies += [copy.deepcopy(callback) for callback in trainer.callbacks[:2]]


def test_copies_that_are_made_during_a_fit_are_whole_and_do_not_disturb_it(tmp_path: Path, recorded: Path) -> None:
    recorder, copies = BaselineRecorder(tmp_path / "b.json"), Copies()
    monitor = DivergenceMonitor(recorded, rule=RULE)
    fit(Counting(), recorder, monitor, copies, default_root_dir=tmp_path)
    assert monitor.verdict.status == "MATCHES"
    for other in copies.copies:
        (state,) = [value for value in (other.state_dict(), other.state_dict().get("run")) if value and "curve" in value]
        assert state["curve"]["steps"] == [1, 2, 3, 4, 5]
    assert copies.copies[1].state_dict() == copies.copies[3].state_dict()
    for original in (recorder, monitor):
        assert pickle.loads(pickle.dumps(original)).state_dict() == original.state_dict()


# --- hostile files ------------------------------------------------------------------------------------------------------------


def small_baseline() -> Baseline:
    curve = LossCurve(4)
    for step in range(1, 9):
        curve.add(step, 4.0 - step / 10, samples=4 * step, tokens=24 * step)
    run = BaselineRun(
        curve,
        seed=1,
        weights="ab",
        data_order={"1": "x", "2": "y"},
        settings={
            "global_batch_samples": 4,
            "tokens_per_step": 24.0,
            "optimizer": "SGD",
            "hyperparameters": [[{"betas": [0.9, 0.99], "momentum": 0.9}]],
            "learning_rates": {"1": 0.1, "2": 0.1},
            "parameters": 5,
            "gradient_clip_val": 0.5,
        },
        validation={"v": [{"step": 1, "samples": 4, "tokens": 24, "value": 1.0}]},
        numbers={"peak_gib": 1.0},
        device="cpu",
        versions={"torch": "2"},
    )
    return Baseline((run,), "small.json")


def use(path: Path) -> None:
    """Use a baseline for all that it is used for."""
    (candidate,) = small_baseline().runs
    other = replace(candidate, seed=2, weights="cd", curve=LossCurve())
    baseline = read_baseline(path)
    test = DivergenceTest(baseline)
    for step in range(1, 9):
        test.add(step, 4.0 - step / 10, samples=4 * step, tokens=24 * step)
    found = [difference for run in baseline.runs for difference in differences(run, candidate)]
    test.set_pairing(0 if is_paired(baseline.runs[0], candidate) else None)
    json.dumps([baseline.as_json(), test.verdict(differences=found).as_dict()], sort_keys=True, allow_nan=False)
    join_baselines([baseline, Baseline((other,), "small.json")])


def can_be_used(path: Path) -> bool:
    """Whether a baseline can be used. Nothing but a `BaselineError` that names the file may come of it."""
    try:
        use(path)
    except BaselineError as error:
        refusal = str(error)
    else:
        return True
    assert str(path) in refusal or "small.json" in refusal
    return False


def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    write_baseline(tmp_path / "whole.json", small_baseline())
    text = (tmp_path / "whole.json").read_bytes()
    path = tmp_path / "cut.json"
    for length in range(len(text) - 1):  # the last byte ends the line
        path.write_bytes(text[:length])
        with pytest.raises(BaselineError, match=r"cut\.json"):
            read_baseline(path)


def test_bytes_that_were_changed_give_a_baseline_or_a_clear_error(tmp_path: Path) -> None:
    write_baseline(tmp_path / "whole.json", small_baseline())
    text, chance, path = (tmp_path / "whole.json").read_bytes(), random.Random(0), tmp_path / "changed.json"
    for _ in range(500):
        changed = bytearray(text)
        for _ in range(chance.choice((1, 1, 2, 5))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed)
        can_be_used(path)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


#: None of them is what stands there, wherever it is put.
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**29, 10**400, 1e308, 1e-320, "", "\ud800", [], {}, [[]], [None], [10**400] * 4, {"0": 1}),
    *({"a": 1}, {"9" * 5000: 0.1}, [[{"betas": "x"}]], [[{"betas": [[0.9]]}]], {"v": {}}, {"v": [{"step": "x"}]}),
)


def test_a_wrong_value_in_any_place_gives_a_baseline_or_a_clear_error(tmp_path: Path) -> None:
    whole = small_baseline().as_json()
    path = tmp_path / "wrong.json"
    read = 0
    for place in places(whole):
        for wrong in WRONG:
            value = copy.deepcopy(whole)
            inner: Any = value
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            path.write_text(json.dumps(value))
            read += can_be_used(path)
    assert read > 0, "some of them are legal"


@pytest.mark.parametrize("depth", [50, 400, 900, 100_000])
@pytest.mark.parametrize("place", ['"optimizer": "SGD"', '"betas": [0.9, 0.99]', '"seed": 1'])
def test_deep_nesting_is_refused_or_ignored(tmp_path: Path, depth: int, place: str) -> None:
    text = json.dumps(small_baseline().as_json())
    assert place in text
    nested = "[" * depth + "]" * depth
    key = place.split(":")[0]
    path = tmp_path / "deep.json"
    path.write_text(text.replace(place, f"{key}: {nested}"))
    assert not can_be_used(path)
    path.write_text(text.replace(place, f'{place}, "unknown": {nested}'))
    can_be_used(path)


@pytest.mark.parametrize("column", ["samples", "tokens"])
def test_a_total_that_never_grows_is_no_axis(tmp_path: Path, column: str) -> None:
    value = small_baseline().as_json()
    value["runs"][0]["curve"][column] = [0] * 4
    (tmp_path / "b.json").write_text(json.dumps(value))
    test = DivergenceTest(read_baseline(tmp_path / "b.json"))
    assert test.axis == ("tokens" if column == "samples" else "samples")
    with pytest.raises(ValueError, match=f"axis is '{column}'"):
        DivergenceTest(read_baseline(tmp_path / "b.json"), axis=column)  # type: ignore[arg-type]


def test_seeds_whose_totals_stand_still_for_long_have_blocks_of_some_length() -> None:
    slow, fast = LossCurve(), LossCurve()
    for step in range(1, 11):
        fast.add(step, 1.0, samples=step)
    slow.add(1, 1.0, samples=0)
    slow.add(2, 1.0, samples=1000)
    test = DivergenceTest(Baseline((BaselineRun(slow, seed=1), BaselineRun(fast, seed=2)), "seeds"))
    assert all(edge > 0 for edge in test.edges)
    assert test.coverage == 0.0


CSV = "step,train_loss\n" + "".join(f"{step},{4 - step / 10}\n" for step in range(10))


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        "\ufeff" + CSV,
        CSV.replace("\n", "\r\n"),
        CSV.replace("\n", "\r"),
        CSV.replace(",", ".0,").replace("step.0", "step"),
        CSV.replace("4.0", '"4.0"'),
        CSV.replace("train_loss", "train_loss,véluste 😀"),
        CSV + "\n\n",
    ],
    ids=["plain", "byte order mark", "CRLF", "CR", "steps with a point", "quotes", "unicode", "empty lines"],
)
def test_a_csv_of_any_writer_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ü.csv"
    path.write_bytes(text.encode())
    (run,) = read_csv(path).runs
    assert run.curve.steps == list(range(1, 11))
    assert run.curve.losses == [4 - step / 10 for step in range(10)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CSV.replace(",", ";"), "no column 'step'; its columns are step;train_loss"),
        (CSV.encode("utf-16").decode("latin1"), "can't decode"),
        (CSV.replace("\n3,", "\n2.5,"), "must be a whole number"),
        (CSV.replace("\n3,", "\n1e300,"), "must be a whole number"),
        (CSV.replace("\n3,", "\n" + "9" * 5000 + ","), "must be finite"),
        ("step,loss,throughput/samples\n0,1,1e308\n3,1,\n5,1,1.7e308\n", "must be a whole number"),
        (CSV.replace("3.9", '"3,9"'), "not a number"),
        (CSV.replace("3.9", "1" * 200_000), "field limit"),
        (CSV + "4,1\n", "more than one run"),
    ],
    ids=range(9),
)
def test_a_csv_that_is_odd_is_refused_with_its_path_in_few_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(BaselineError, match=r"m\.csv") as caught:
        read_csv(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bytes_of_a_csv_that_were_changed_give_a_baseline_or_a_clear_error(tmp_path: Path) -> None:
    rows = "".join(f"{step},{4 - step / 10},{4 * step + 4}\n" for step in range(10))
    text, chance, path = ("step,loss,throughput/samples\n" + rows).encode(), random.Random(1), tmp_path / "m.csv"
    for _ in range(500):
        changed = bytearray(text)
        for _ in range(chance.choice((1, 2, 4))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed)
        can_be_used(path)


# --- ranks --------------------------------------------------------------------------------------------------------------------

RANK = int(os.environ.get("LOCAL_RANK", 0))


def error_on_one_rank(folder: Path) -> dict[str, Any]:
    """The last scenario: the other rank is waiting for this one, and goes on when it has left."""

    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if RANK == 1 and batch_idx == 7:
                raise LookupError("on one rank")

    settings: dict[str, Any] = {
        "devices": 2,
        "strategy": DDPStrategy(timeout=timedelta(seconds=20)),
        "default_root_dir": folder,
    }
    fit(Language(), BaselineRecorder(folder / "b.json"), **settings)
    settings["strategy"] = DDPStrategy(timeout=timedelta(seconds=20))
    monitor, error = DivergenceMonitor(folder / "b.json", rule=RULE), ""
    try:
        fit(Language(), monitor, BaselineRecorder(folder / "c.json"), Fails(), **settings)
    except (LookupError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "status": monitor.verdict and monitor.verdict.status, "step": monitor.test.last_step}


def test_an_error_on_one_rank_leaves_nobody_waiting_and_saves_what_was_read(tmp_path: Path) -> None:
    found = scenarios_of("tests.callbacks.test_divergence_adversarial", tmp_path, timeout_s=60)
    first, second = found("error")
    assert second["error"] == "LookupError: on one rank"
    assert first["error"].startswith("RuntimeError")
    for rank in (first, second):
        assert (rank["status"], rank["step"]) == ("INCONCLUSIVE", 5)
    (run,) = read_baseline(tmp_path / "c.json").runs
    assert (run.status, run.curve.last_step) == ("stopped", 5)
    assert json.loads((tmp_path / "verdict.json").read_text())["status"] == "INCONCLUSIVE"


if __name__ == "__main__":
    run_scenarios({"error": error_on_one_rank}, Path(sys.argv[1]))
