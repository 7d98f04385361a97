"""`SpeedMonitor` attributes time and tokens rightly in real fits, on clocks that the tests hold in their hands."""

from __future__ import annotations

import contextlib
import copy
import csv
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_mp
from lightning_mp.callbacks import clock as clocks
from lightning_mp.callbacks import speed
from lightning_mp.callbacks.speed import SpeedMonitor
from tests.callbacks.stand_ins import Rows, Scripted, wandb_run
from tests.conftest import Said
from tests.instruments import CountSyncs
from tests.modules import QUIET, M, Manual, assert_same, values
from tests.report.wandb_file import isolate

pytestmark = pytest.mark.usefixtures("seeded")

DATA_MS, FORWARD_MS, OPTIMIZER_MS, VALIDATION_MS, SAVE_MS = 10, 15, 5, 200, 500
STEP_MS = DATA_MS + FORWARD_MS + OPTIMIZER_MS
#: Tokens per sample in each batch of an epoch; the batch has two samples.
LENGTHS = (3, 5, 2, 7, 4, 4, 1, 6, 3, 8, 2, 5)


@dataclass
class World:
    """Time, in seconds, that passes only when somebody says so; and the marks that were made."""

    now: float = 100.0
    marks: int = 0
    waits: int = 0
    free: list[float] = field(default_factory=list)

    def spend(self, ms: float) -> None:
        self.now += ms / 1e3

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def wait_for(self, mark: float) -> None:
        self.waits += 1

    def milliseconds(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def release(self, marks: Any) -> None:
        self.free.extend(marks)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(speed, "clock_for", lambda device: made)
    return made


class Texts(Dataset[Any]):
    """Batches of two texts of different lengths, each of which takes its time to load."""

    def __init__(self, spend: Callable[[float], None], make: Callable[[int], Any]) -> None:
        self.spend, self.make, self.lengths = spend, make, LENGTHS

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        self.spend(DATA_MS)
        return self.make(self.lengths[index])


def plain(length: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, length, dtype=torch.int64), torch.zeros(2, length, dtype=torch.int64)


def padded(length: int) -> dict[str, Tensor]:
    """A hundred positions of which `length` are real, twice (case E9)."""
    mask = (torch.arange(100) < length).long().expand(2, 100)
    return {"input_ids": torch.zeros(2, 100, dtype=torch.int64), "attention_mask": mask}


class Paced(LightningModule):
    """Every phase takes its time."""

    def __init__(self, spend: Callable[[float], None] = lambda ms: None, make: Callable[[int], Any] = plain) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.spend, self.make = spend, make
        self.val_len = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.spend(FORWARD_MS)
        return self.layer(torch.ones(2, 4)).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.spend(OPTIMIZER_MS)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.spend(VALIDATION_MS)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.spend(SAVE_MS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Texts(self.spend, self.make), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader([torch.zeros(1)], batch_size=None)


def fit(monitor: SpeedMonitor, module: LightningModule, *callbacks: Callback, ckpt: Any = None, **options: Any) -> Rows:
    rows = Rows()
    settings = {
        **QUIET,
        "logger": rows,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **options,
    }
    trainer = pl.Trainer(callbacks=[monitor, *callbacks], **settings)
    trainer.fit(module, ckpt_path=ckpt)
    assert "save_checkpoint" not in vars(trainer)
    assert not {"training_step", "backward"} & vars(trainer.strategy).keys()
    return rows


def last(rows: Rows) -> dict[str, float]:
    (found, *_) = [row for row in reversed(rows.rows) if "throughput/step_time_ms" in row]
    return {key.removeprefix("throughput/"): value for key, value in found.items()}


# --- where the time goes (case E7) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_part_of_a_step_has_its_time_and_validation_and_checkpoints_have_none(world, tmp_path, accumulate) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    rows = fit(
        SpeedMonitor(), Paced(world.spend), checkpoint, max_epochs=3, val_check_interval=3, limit_val_batches=1,
        num_sanity_val_steps=1, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    found = last(rows)
    assert found["step_time_ms"] == pytest.approx(accumulate * (DATA_MS + FORWARD_MS) + OPTIMIZER_MS)
    assert found["data_wait_ms"] == pytest.approx(accumulate * DATA_MS)
    assert found["forward_backward_ms"] == pytest.approx(accumulate * FORWARD_MS)
    assert found["optimizer_ms"] == pytest.approx(OPTIMIZER_MS)
    assert found["tokens"] == 3 * 2 * sum(LENGTHS)
    assert found["samples"] == 3 * 2 * len(LENGTHS)


def test_rates_with_validation_are_those_without(world) -> None:
    same = [4] * len(LENGTHS)
    found = []
    for options in ({}, {"val_check_interval": 3, "limit_val_batches": 1}, {"val_check_interval": 1, "limit_val_batches": 1}):
        module = Paced(world.spend, lambda length: plain(4))
        found.append(last(fit(SpeedMonitor(), module, max_epochs=3, **options)))
    for one in found:
        assert one["tokens_per_s"] == pytest.approx(2 * same[0] / STEP_MS * 1e3)
        assert one["samples_per_s"] == pytest.approx(2 / STEP_MS * 1e3)
        assert one["step_time_ms"] == one["step_time_p95_ms"] == pytest.approx(STEP_MS)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_at_every_step_costs_the_step_nothing(world, tmp_path, weights_only) -> None:
    class Slow(ModelCheckpoint):
        """Takes its time whether or not hooks tell of the checkpoint."""

        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            save = trainer.strategy.save_checkpoint
            trainer.strategy.save_checkpoint = lambda *args, **kwargs: (world.spend(SAVE_MS), save(*args, **kwargs))
            super()._save_checkpoint(trainer, filepath)
            del trainer.strategy.save_checkpoint

    slow = Slow(tmp_path, every_n_train_steps=1, save_top_k=-1, save_weights_only=weights_only)
    found = last(fit(SpeedMonitor(), Paced(world.spend), slow))
    assert len(list(tmp_path.glob("*.ckpt"))) == len(LENGTHS)
    assert found["step_time_ms"] == found["step_time_p95_ms"] == pytest.approx(STEP_MS)


def test_a_checkpoint_that_the_module_saves_within_a_step_costs_the_step_nothing(world, tmp_path) -> None:
    class Saves(Paced):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.save_checkpoint(tmp_path / "x.ckpt")
            return super().training_step(batch, batch_idx)

    found = last(fit(SpeedMonitor(), Saves(world.spend)))
    assert found["step_time_ms"] == pytest.approx(STEP_MS)
    assert not {"forward_backward_ms", "optimizer_ms"} & found.keys()


def test_time_that_other_callbacks_take_between_batches_is_in_the_step(world) -> None:
    class Idle(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            world.spend(7)

    found = last(fit(SpeedMonitor(), Paced(world.spend), Idle()))
    assert found["step_time_ms"] == pytest.approx(STEP_MS + 7)
    assert found["data_wait_ms"] == pytest.approx(DATA_MS + 7)


def test_the_first_steps_are_warm_up_and_two_more_report(world) -> None:
    class ColdStart(Paced):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.spend(1000 if batch_idx < 3 else 0)
            return super().training_step(batch, batch_idx)

    rows = fit(SpeedMonitor(), ColdStart(world.spend))
    known = ["throughput/step_time_ms" in row for row in rows.rows if "throughput/tokens" in row]
    assert known == [False] * 4 + [True] * 8
    assert last(rows)["step_time_p95_ms"] == pytest.approx(STEP_MS)
    assert last(fit(SpeedMonitor(warmup_steps=0), ColdStart(world.spend)))["step_time_p95_ms"] > 500


def test_the_window_forgets_older_steps(world) -> None:
    class Slower(Paced):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.spend(100 if batch_idx < 8 else 0)
            return super().training_step(batch, batch_idx)

    for every in (1, 12):  # read at each step, or after older steps have fallen out unread
        found = last(fit(SpeedMonitor(window=4), Slower(world.spend), log_every_n_steps=every))
        assert found["step_time_p95_ms"] == pytest.approx(STEP_MS)
        assert found["tokens_per_s"] == pytest.approx(2 * sum(LENGTHS[-4:]) / (4 * STEP_MS / 1e3))
        assert found["tokens"] == 2 * sum(LENGTHS)


def test_a_skipped_step_has_time_but_no_optimizer_part(world) -> None:
    rows, monitor = Rows(), SpeedMonitor(warmup_steps=0)
    trainer = pl.Trainer(
        **{**QUIET, "logger": rows}, log_every_n_steps=1, callbacks=[monitor], plugins=[Scripted(["layer.weight"] * 12)]
    )
    trainer.fit(Paced(world.spend))
    found = last(rows)
    assert found["step_time_ms"] == pytest.approx(STEP_MS)
    assert not {"forward_backward_ms", "optimizer_ms"} & found.keys()
    assert "optimizer_ms" in last(fit(SpeedMonitor(warmup_steps=0), Paced(world.spend)))


class TwoOptimizers(Paced):
    """Both step by hand, on every second batch, which is never one that is to be logged."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                self.spend(OPTIMIZER_MS)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]


def test_optimizers_that_step_in_one_batch_count_one_step_each_and_are_reported_though_no_log_step_is_theirs(world) -> None:
    rows = fit(SpeedMonitor(), TwoOptimizers(world.spend), max_epochs=2, log_every_n_steps=2)
    found = last(rows)
    assert found["step_time_ms"] == pytest.approx(DATA_MS + FORWARD_MS + OPTIMIZER_MS)  # two batches, two steps
    assert found["data_wait_ms"] == pytest.approx(DATA_MS)
    assert not {"forward_backward_ms", "optimizer_ms"} & found.keys()


def test_manual_optimization_with_one_step_per_batch_has_all_parts() -> None:
    found = last(fit(SpeedMonitor(warmup_steps=0), Manual()))
    assert {
        "step_time_ms",
        "data_wait_ms",
        "forward_backward_ms",
        "optimizer_ms",
        "samples_per_s",
        "tflops_per_s",
    } <= found.keys()


def test_a_clock_that_stands_still_gives_no_infinite_rates(world) -> None:
    rows = fit(SpeedMonitor(warmup_steps=0), Manual())
    assert {key for row in rows.rows for key in row if key.startswith("throughput")} == {"throughput/samples"}


# --- tokens ------------------------------------------------------------------------------------------------------------------


def test_padded_batches_have_both_counts(world) -> None:
    found = last(fit(SpeedMonitor(), Paced(world.spend, lambda length: padded(10))))
    assert found["tokens_per_s"] == pytest.approx(20 / STEP_MS * 1e3)
    assert found["padded_tokens_per_s"] == pytest.approx(200 / STEP_MS * 1e3)
    assert found["tokens"] == 20 * len(LENGTHS)


def test_without_a_mask_padding_is_unknown_and_not_guessed(world) -> None:
    assert "padded_tokens_per_s" not in last(fit(SpeedMonitor(), Paced(world.spend)))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("every", [1, 5, 12, 0])
def test_masked_tokens_are_exact_whenever_they_are_read(world, accumulate, every, monkeypatch) -> None:
    monkeypatch.setattr(speed, "EARLY_COUNTS", 5)
    monitor = SpeedMonitor(window=2)
    fit(monitor, Paced(world.spend, padded), max_epochs=3, log_every_n_steps=every, accumulate_grad_batches=accumulate)
    assert monitor.state_dict() == {"tokens": 3 * 2 * sum(LENGTHS), "samples": 3 * 2 * len(LENGTHS)}


def test_batches_without_integers_have_samples_and_no_tokens(world) -> None:
    rows = fit(SpeedMonitor(), Paced(world.spend, lambda length: torch.zeros(3, length)))
    found = last(rows)
    assert not {"tokens", "tokens_per_s", "padded_tokens_per_s"} & found.keys()
    assert found["samples"] == 3 * len(LENGTHS)


def test_once_a_batch_is_unknown_so_is_the_total_and_it_is_said(world, said: Said) -> None:
    make = iter([*(plain(3) for _ in range(6)), torch.zeros(2, 3), *(plain(3) for _ in range(5))])
    rows = fit(SpeedMonitor(), Paced(world.spend, lambda length: next(make)))
    assert rows.column("throughput/tokens") == [6, 12, 18, 24, 30, 36] + [None] * 6
    assert "logs no throughput/tokens any more" in said
    assert rows.column("throughput/samples")[-1] == 24


class Counts(Paced):
    def count_tokens(self, batch: Any) -> int:
        return 5


def test_the_module_counts_before_the_option_which_counts_before_the_batch(world, said: Said) -> None:
    option = SpeedMonitor(tokens=lambda batch: torch.tensor(7), samples=lambda batch: 9)
    assert last(fit(option, Paced(world.spend)))["tokens"] == 7 * 12
    assert last(fit(option, Paced(world.spend)))["samples"] == 9 * 12
    assert option.recipe()["tokens_counted_by"] == "the option tokens"
    assert "has no effect" not in said
    assert last(fit(option, Counts(world.spend)))["tokens"] == 5 * 12
    assert option.recipe()["tokens_counted_by"] == "count_tokens of the module"
    assert "tokens=...|has no effect" in said


def test_an_option_that_does_not_know_makes_no_number(world) -> None:
    found = last(fit(SpeedMonitor(tokens=lambda batch: None), Paced(world.spend)))
    assert "tokens" not in found
    assert "samples" in found


@pytest.mark.parametrize("count", [-1, 2.0, True, "3", torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("option", ["tokens", "samples"])
def test_what_is_no_count_is_refused_with_where_it_came_from(world, option, count) -> None:
    with pytest.raises(ValueError, match=rf"the option {option} returned .* must be a whole number, 0 or more"):
        fit(SpeedMonitor(**{option: lambda batch: count}), Paced(world.spend))


def test_a_mask_that_says_nothing_about_padding_is_named(world, said: Said) -> None:
    def float_mask(length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(2, length, dtype=torch.long), "attention_mask": torch.ones(2, length)}

    fit(SpeedMonitor(), Paced(world.spend, float_mask))
    assert "attention_mask (torch.float32, (2, " in said
    fit(SpeedMonitor(), Paced(world.spend, padded))
    assert said.count("counts padding as tokens") == 1


# --- totals over a resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, padded])
@pytest.mark.parametrize("every_n_train_steps", [1, 5])
def test_totals_go_on_after_a_resume_and_only_rise(world, tmp_path, make, every_n_train_steps) -> None:
    first, second = SpeedMonitor(), SpeedMonitor()
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every_n_train_steps, save_top_k=-1)
    rows = fit(first, Paced(world.spend, make), checkpoint, max_steps=10, log_every_n_steps=3)
    saved = tmp_path / "step=10.ckpt"
    state = torch.load(saved, weights_only=True)["callbacks"]["SpeedMonitor"]
    assert state == {"tokens": 2 * sum(LENGTHS[:10]), "samples": 20}
    resumed = fit(second, Paced(world.spend, make), max_epochs=2, ckpt=saved)
    totals = [total for total in (*rows.column("throughput/tokens"), *resumed.column("throughput/tokens")) if total is not None]
    assert totals == sorted(set(totals))
    # a plain loader begins its epoch again
    assert second.state_dict() == {"tokens": 2 * (sum(LENGTHS[:10]) + sum(LENGTHS[:2]) + sum(LENGTHS)), "samples": 48}


def test_a_resume_from_a_checkpoint_that_does_not_say_has_rates_but_no_totals(world, tmp_path, said: Said) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6)
    pl.Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[checkpoint], max_steps=6).fit(Paced())
    monitor = SpeedMonitor()
    found = last(fit(monitor, Paced(world.spend), ckpt=tmp_path / "step=6.ckpt", max_epochs=2))
    assert not {"tokens", "samples"} & found.keys()
    assert "tokens_per_s" in found
    assert monitor.state_dict() == {}
    assert said.count("goes on from step 6") == 1


def test_a_fresh_run_begins_at_zero_and_a_second_fit_of_the_same_trainer_goes_on(world) -> None:
    monitor = SpeedMonitor()
    fit(monitor, Paced(world.spend))
    assert fit(monitor, Paced(world.spend)).column("throughput/tokens")[0] == 2 * LENGTHS[0]
    trainer = pl.Trainer(**QUIET, callbacks=[monitor])
    module = Paced(world.spend)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert monitor.state_dict() == {"tokens": 3 * 2 * sum(LENGTHS), "samples": 3 * 2 * len(LENGTHS)}


# --- FLOPs -------------------------------------------------------------------------------------------------------------------


class LanguageModel(Paced):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.layer
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.spend(FORWARD_MS)
        ids = batch["input_ids"] if isinstance(batch, dict) else batch[0]
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


PER_TOKEN = 3 * 2 * 8 * 10  # forward, and the gradients of the head's weight and input


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", [None, "bf16-master", "16-master", "bf16-mixed", "32-true"])
def test_flops_are_counted_on_one_batch_and_follow_the_tokens(world, precision, accumulate) -> None:
    rows, monitor = Rows(), SpeedMonitor(warmup_steps=0, peak_tflops=1e-3)
    lightning_mp.Trainer(
        **{**QUIET, "logger": rows, "max_epochs": 2}, precision_plugin=precision, log_every_n_steps=1, callbacks=[monitor],
        accumulate_grad_batches=accumulate,
    ).fit(LanguageModel(world.spend))  # fmt: skip
    found = last(rows)
    assert monitor.recipe()["flops_per_position"] == PER_TOKEN
    assert found["tflops_per_s"] == pytest.approx(found["tokens_per_s"] * PER_TOKEN / 1e12)
    assert found["mfu"] == pytest.approx(found["tflops_per_s"] / 1e-3)


def test_flops_of_padding_are_flops(world) -> None:
    found = last(fit(SpeedMonitor(), LanguageModel(world.spend, padded)))
    assert found["tflops_per_s"] == pytest.approx(found["padded_tokens_per_s"] * PER_TOKEN / 1e12)


@pytest.mark.parametrize(
    ("option", "expected"),
    [({"flops_per_token": 1e12}, lambda found: found["tokens_per_s"]), ({"flops_per_step": 1e12}, lambda _: 1e3 / STEP_MS)],
)
def test_flops_that_are_given_are_not_counted(world, option, expected, monkeypatch) -> None:
    monkeypatch.setattr(speed, "_count_in", None)
    monitor = SpeedMonitor(**option)
    found = last(fit(monitor, LanguageModel(world.spend)))
    assert found["tflops_per_s"] == pytest.approx(expected(found))
    assert monitor.recipe()["flops_source"] == "given"


def test_the_batch_on_which_flops_are_counted_is_not_in_the_rates(world) -> None:
    class SlowThird(LanguageModel):
        """The first loss, and so the first backward to be counted, is that of the third batch."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.spend(1000 if batch_idx == 2 else 0)
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    monitor = SpeedMonitor(warmup_steps=0)
    assert last(fit(monitor, SlowThird(world.spend)))["step_time_p95_ms"] == pytest.approx(STEP_MS)
    assert "flops_per_position" in monitor.recipe()


def test_a_first_batch_without_a_loss_is_not_taken_for_the_whole(world) -> None:
    class NoLoss(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    monitor = SpeedMonitor()
    fit(monitor, NoLoss(world.spend))
    assert monitor.recipe()["flops_per_position"] == PER_TOKEN


def test_by_hand_the_backward_is_counted_too_whichever_way_it_is_called(world) -> None:
    class ByHand(LanguageModel):
        def __init__(self, through_lightning: bool) -> None:
            super().__init__()
            self.automatic_optimization, self.through_lightning = False, through_lightning

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss) if self.through_lightning else loss.backward()
            self.optimizers().step()

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    for through_lightning in (True, False):
        monitor = SpeedMonitor()
        fit(monitor, ByHand(through_lightning))
        assert monitor.recipe()["flops_per_position"] == PER_TOKEN


def test_an_unknown_device_has_no_mfu_and_it_is_said_once(world, said: Said) -> None:
    rows = fit(SpeedMonitor(), LanguageModel(world.spend), max_epochs=3)
    assert "mfu" not in last(rows)
    assert "tflops_per_s" in last(rows)
    assert said.count("no mfu|'cpu' in fp32|peak_tflops") == 1


def test_work_that_the_counter_does_not_know_is_unknown_not_zero(world, said: Said) -> None:
    class NoProducts(Paced):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer.weight * 2).sum()

    rows = fit(SpeedMonitor(peak_tflops=1.0), NoProducts(world.spend))
    assert not {"mfu", "tflops_per_s"} & last(rows).keys()
    assert said.count("no tflops_per_s|flops_per_token") == 1


def test_compiled_layers_are_not_counted_and_it_is_said(world, said: Said) -> None:
    module = LanguageModel(world.spend)
    module.head.compile(backend="eager")
    rows = fit(SpeedMonitor(peak_tflops=1.0), module)
    assert "tflops_per_s" not in last(rows)
    assert said.count("layers are compiled|flops_per_step") == 1


@pytest.mark.parametrize("precision", ["32-true", "bf16-master", "16-master"])
def test_the_monitor_changes_no_bit_of_training(precision) -> None:
    found = []
    for callbacks in ([], [SpeedMonitor()]):
        torch.manual_seed(3)
        module = M()
        lightning_mp.Trainer(**QUIET, precision_plugin=precision, callbacks=callbacks).fit(module)
        found.append(values(module))
    assert_same(*found)


def test_the_recipe_is_plain_and_names_the_denominator(world, monkeypatch) -> None:
    monkeypatch.setattr(speed, "peak_tflops", lambda name, fmt: (312.0, "a datasheet"))
    monitor = SpeedMonitor()
    fit(monitor, LanguageModel(world.spend))
    assert monitor.recipe() == {
        "window": 50,
        "warmup_steps": 3,
        "tokens_counted_by": "first integer tensor",
        "device": "cpu",
        "format": "fp32",
        "peak_tflops": 312.0,
        "peak_source": "a datasheet",
        "flops_per_position": float(PER_TOKEN),
        "flops_source": "counted on one batch",
    }
    assert all(type(value) in (str, int, float) for value in monitor.recipe().values())


# --- what is left ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps_left"),
    [
        ({"max_epochs": 3}, 26),  # at step 10
        ({"max_epochs": -1, "max_steps": 11}, 1),
        ({"max_epochs": 3, "max_steps": 20}, 10),
        ({"max_epochs": 1, "max_steps": 20}, 2),
    ],
)
def test_what_remains_follows_from_the_limit_that_comes_first(world, options, steps_left) -> None:
    rows = fit(SpeedMonitor(), Paced(world.spend), **options)
    assert rows.column("throughput/remaining_s")[9] == pytest.approx(steps_left * STEP_MS / 1e3)


def test_what_remains_ends_at_zero_also_with_accumulation(world) -> None:
    rows = fit(SpeedMonitor(warmup_steps=0), Paced(world.spend), max_epochs=2, accumulate_grad_batches=4)
    remaining = rows.column("throughput/remaining_s")
    assert remaining[-1] == 0
    assert remaining[-2] == pytest.approx((4 * (DATA_MS + FORWARD_MS) + OPTIMIZER_MS) / 1e3)


def test_a_limit_of_time_counts_before_there_is_a_pace(world) -> None:
    rows = fit(SpeedMonitor(), Paced(world.spend), max_epochs=-1, max_steps=12, max_time="00:01:00:00")
    assert 3500 < rows.column("throughput/remaining_s")[0] <= 3600
    assert rows.column("throughput/remaining_s")[-1] == 0  # by max_steps


def test_a_run_without_an_end_has_no_remaining_time(world) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 12

    rows = fit(SpeedMonitor(), Paced(world.spend), Stops(), max_epochs=-1)
    assert "step_time_ms" in last(rows)
    assert set(rows.column("throughput/remaining_s")) == {None}


# --- what it costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "expected"), [(padded, [8, 16, 24]), (plain, [])])
def test_between_log_steps_nothing_waits_for_the_device(world, monkeypatch, make, expected) -> None:
    read_at: list[int] = []

    class Watched(SpeedMonitor):
        """Counts syncs in its own hooks, batch by batch."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with CountSyncs() as syncs:
                super().on_train_batch_end(trainer, *args)
            if syncs.seen:
                read_at.append(trainer.global_step)

    # on the CPU `tolist` reads the memory itself; on a device it is one copy
    monkeypatch.setattr(Tensor, "tolist", lambda self: [int(element) for element in self][: self.numel()])
    fit(Watched(), Paced(world.spend, make), max_epochs=2, log_every_n_steps=8)
    assert read_at == expected
    assert world.waits == 3


def test_one_copy_to_the_host_reads_all_counts_of_a_log_step(world, monkeypatch) -> None:
    lists: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (lists.append(self.numel()), tolist(self))[1])
    fit(SpeedMonitor(), Paced(world.spend, padded), log_every_n_steps=6)
    assert lists == [6, 6]


def test_no_collective_with_one_process(world, monkeypatch) -> None:
    reduced: list[Any] = []
    monkeypatch.setattr(
        "lightning.pytorch.strategies.SingleDeviceStrategy.reduce",
        lambda self, value, **kwargs: (reduced.append(value), value)[1],
    )
    counts = []
    for callbacks in ([], [SpeedMonitor()]):
        reduced.clear()
        pl.Trainer(**QUIET, log_every_n_steps=1, callbacks=callbacks).fit(Paced(world.spend))
        counts.append(len(reduced))
    assert counts[0] == counts[1] > 0  # Lightning makes some itself


# --- CUDA events -------------------------------------------------------------------------------------------------------------


class FakeDevice:
    """A device whose time is the world's, and events that can be read once it was waited for."""

    def __init__(self, world: World) -> None:
        self.world, self.made, self.syncs, self.reached = world, 0, 0, -math.inf


class FakeEvent:
    device: FakeDevice

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.device.made += 1
        self.at: float | None = None

    def __reduce__(self) -> Any:
        raise TypeError("events cannot be pickled")

    def record(self, stream: Any) -> None:
        assert stream == "stream"
        self.at = self.device.world.now

    def synchronize(self) -> None:
        self.device.syncs += 1
        self.device.reached = max(self.device.reached, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert max(self.at, end.at) <= self.device.reached, "an event that the device has not reached"
        return (end.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice(World())
    monkeypatch.setattr(FakeEvent, "device", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(speed, "clock_for", lambda device: clocks.clock_for(torch.device("cuda", 0)))
    return made


@pytest.mark.parametrize("accumulate", [1, 4])
def test_events_measure_what_the_host_clock_would(device, accumulate) -> None:
    rows = fit(
        SpeedMonitor(), Paced(device.world.spend), max_epochs=3, val_check_interval=3, limit_val_batches=1,
        accumulate_grad_batches=accumulate, log_every_n_steps=4,
    )  # fmt: skip
    found = last(rows)
    assert found["step_time_ms"] == pytest.approx(accumulate * (DATA_MS + FORWARD_MS) + OPTIMIZER_MS)
    assert found["data_wait_ms"] == pytest.approx(accumulate * DATA_MS)
    assert found["optimizer_ms"] == pytest.approx(OPTIMIZER_MS)


def test_the_device_is_waited_for_once_per_log_step(device) -> None:
    fit(SpeedMonitor(), Paced(device.world.spend), max_epochs=4, log_every_n_steps=16)
    assert device.syncs == 3


@pytest.mark.parametrize("every", [4, 0])
def test_events_are_used_again_and_few_are_made_however_long_the_run(device, every) -> None:
    made = []
    for epochs in (2, 8):
        device.made = 0
        fit(SpeedMonitor(window=4), Paced(device.world.spend), max_epochs=epochs, log_every_n_steps=every)
        made.append(device.made)
    assert made[1] <= made[0] + 6  # the mark of a pause that nothing follows is let go, one per epoch
    assert made[1] < 3 * len(LENGTHS)


class Breaks(Paced):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 6:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "batches"), [(Paced, 12), (Breaks, 6)])
def test_no_event_is_kept_after_training_or_an_error(device, kind, batches) -> None:
    monitor = SpeedMonitor()
    with contextlib.suppress(ArithmeticError):
        fit(monitor, kind(device.world.spend, padded), log_every_n_steps=5)
    assert device.syncs > 0
    assert pickle.loads(pickle.dumps(monitor)).state_dict() == {"tokens": 2 * sum(LENGTHS[:batches]), "samples": 2 * batches}


@pytest.mark.gpu
def test_real_events_measure_the_device_and_not_the_launch() -> None:
    class Heavy(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4096, 4096))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return ((self.weight @ self.weight) @ self.weight).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def train_dataloader(self) -> Any:
            return DataLoader([torch.zeros(1, 1, dtype=torch.int64)] * 40, batch_size=None)

    rows = Rows()
    trainer = pl.Trainer(**{**QUIET, "accelerator": "gpu", "logger": rows}, log_every_n_steps=20, callbacks=[SpeedMonitor()])
    began = time.perf_counter()
    trainer.fit(Heavy())
    torch.cuda.synchronize()
    found = last(rows)
    assert found["step_time_ms"] * 20 < (time.perf_counter() - began) * 1e3
    assert found["forward_backward_ms"] > 0.5 * found["step_time_ms"]
    assert 0 < found.get("mfu", 0.5) < 1


# --- a real clock ------------------------------------------------------------------------------------------------------------


def test_with_real_sleeps_the_median_is_that_of_training_alone(tmp_path) -> None:
    def sleep(ms: float) -> None:
        time.sleep(ms / 1e3)

    class Checkpointed(Paced):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.spend(VALIDATION_MS)

    checkpoint = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    rows = fit(SpeedMonitor(), Checkpointed(sleep), checkpoint, max_epochs=2, val_check_interval=3, limit_val_batches=1)
    found = last(rows)
    assert STEP_MS <= found["step_time_ms"] < 1.1 * STEP_MS + 10  # a validation would add 200
    assert DATA_MS <= found["data_wait_ms"] < DATA_MS + 10
    assert FORWARD_MS <= found["forward_backward_ms"] < FORWARD_MS + 10
    assert OPTIMIZER_MS <= found["optimizer_ms"] < OPTIMIZER_MS + 10
    assert found["tokens"] == 2 * 2 * sum(LENGTHS)


# --- trainers of all kinds (case E4) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"fast_dev_run": True},
        {"barebones": True, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 0},
        {"overfit_batches": 2},
        {"logger": [Rows(), Rows()]},
        {"log_every_n_steps": 0},
        {"limit_train_batches": 0},
        {"max_steps": 1},
    ],
    ids=str,
)
def test_no_trainer_makes_it_fail(options) -> None:
    settings = {**QUIET, "limit_val_batches": 1, **options}
    if options.get("barebones"):
        settings = {key: value for key, value in settings.items() if key not in ("log_every_n_steps",)}
    pl.Trainer(callbacks=[SpeedMonitor(warmup_steps=0)], **settings).fit(Paced())


def test_a_batch_that_ends_the_epoch_and_one_that_is_none_do_no_harm(world) -> None:
    class Ends(Paced):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 8 else None

    found = last(fit(SpeedMonitor(), Ends(world.spend), max_epochs=2))
    assert found["step_time_p95_ms"] == pytest.approx(STEP_MS)
    assert found["tokens"] == 2 * 2 * sum(LENGTHS[:8])
    make = iter([plain(1), None, plain(2), *(plain(1) for _ in range(9))])
    assert last(fit(SpeedMonitor(), Paced(world.spend, lambda length: next(make))))["tokens"] == 2 * 12


def test_it_logs_to_a_csv_file(tmp_path) -> None:
    fit(SpeedMonitor(), Paced(), logger=CSVLogger(tmp_path), log_every_n_steps=6)
    (path,) = tmp_path.rglob("metrics.csv")
    with open(path) as file:
        totals = [float(row["throughput/tokens"]) for row in csv.DictReader(file) if row.get("throughput/tokens")]
    assert totals == [2 * sum(LENGTHS[:6]), 2 * sum(LENGTHS)]


def test_weights_and_biases_gets_a_row_at_each_log_step(world, tmp_path, monkeypatch) -> None:
    isolate(monkeypatch, tmp_path)
    logger = WandbLogger(project="test", offline=True, save_dir=tmp_path)
    fit(SpeedMonitor(), Paced(world.spend), logger=logger, log_every_n_steps=3)
    logger.experiment.finish()
    history, _ = wandb_run(tmp_path)
    found = [row for row in history if "throughput/tokens" in row]
    assert [row["throughput/tokens"] for row in found] == [2 * sum(LENGTHS[:n]) for n in (3, 6, 9, 12)]
    assert ["throughput/step_time_ms" in row for row in found] == [False, True, True, True]


def test_other_callbacks_can_monitor_it(world, tmp_path) -> None:
    stopping = EarlyStopping("throughput/tokens", mode="max", stopping_threshold=10, check_on_train_epoch_end=True)
    checkpoint = ModelCheckpoint(tmp_path, monitor="throughput/tokens_per_s", mode="max", every_n_epochs=1)
    rows = fit(SpeedMonitor(), Paced(world.spend), stopping, checkpoint, max_epochs=5)
    assert last(rows)["tokens"] == 2 * sum(LENGTHS)
    assert float(checkpoint.best_model_score) == pytest.approx(last(rows)["tokens_per_s"])


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_after_an_error_trainer_and_strategy_are_as_they_were(world, where) -> None:
    class Fails(Paced):
        pass

    def fail(*args: Any) -> None:
        raise ArithmeticError("on purpose")

    setattr(Fails, where, fail)
    monitor = SpeedMonitor()
    trainer = pl.Trainer(**QUIET, callbacks=[monitor])
    with pytest.raises(ArithmeticError):
        trainer.fit(Fails(world.spend))
    assert "save_checkpoint" not in vars(trainer)
    assert not {"training_step", "backward"} & vars(trainer.strategy).keys()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_after_training_it_can_be_copied_and_pickled_and_holds_no_tensor(world) -> None:
    monitor = SpeedMonitor()
    fit(monitor, Paced(world.spend, padded), log_every_n_steps=5)

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [found for part in parts for found in tensors(part)]

    assert tensors([*vars(monitor).values(), [vars(step) for step in monitor._unread], vars(monitor._step)]) == []
    assert pickle.loads(pickle.dumps(monitor)).state_dict() == copy.deepcopy(monitor).state_dict() == monitor.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1}, {"window": 2.5}, {"window": True}, {"warmup_steps": -1}, {"flops_per_token": 0},
        {"tokens": 5}, {"samples": "batch"},
        {"flops_per_step": math.nan}, {"peak_tflops": -1.0}, {"flops_per_token": 1.0, "flops_per_step": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SpeedMonitor(**options)
