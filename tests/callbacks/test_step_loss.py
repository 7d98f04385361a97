"""The true loss of a step, its samples and tokens, read at log steps and not in between."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import MasterWeightPrecision
from lightning_mp.callbacks import step_loss
from lightning_mp.callbacks.step_loss import StepLoss, StepLosses
from lightning_mp.callbacks.tokens import count_batch
from tests.callbacks.language import Language, data, fit, losses_of, reads_per_batch
from tests.callbacks.stand_ins import Scripted


class Reader(pl.Callback):
    """Reads steps as the callbacks do, and notes at which batch."""

    def __init__(self) -> None:
        self.steps = StepLosses()
        self.found: list[StepLoss] = []
        self.read_at: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps.start(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.batch_start(count_batch(batch), batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.steps.batch_end(trainer, module, outputs):
            self.read_at.append(batch_idx)
            self.read(trainer)

    def read(self, trainer: Any) -> None:
        self.found += self.steps.read(trainer)[0]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.read(trainer)

    @property
    def losses(self) -> list[float | None]:
        return [step.loss for step in self.found]


class Line(pl.LightningModule):
    """One weight that does not move, so the loss of batch `i` is known: the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def numbers(batches: int = 8) -> DataLoader[Any]:
    """Batch `i` holds 2i and 2i + 1, each with three tokens."""
    values = torch.arange(float(batches * 2))
    return DataLoader(torch.utils.data.TensorDataset(values, torch.zeros(len(values), 3, dtype=torch.int64)), 2)


def read(module: Any, **options: Any) -> Reader:
    reader = Reader()
    fit(module, reader, loader=options.pop("loader", None) or numbers(), **options)
    return reader


def test_the_loss_of_each_step_is_that_of_a_plain_loop_bit_for_bit() -> None:
    assert read(Language(), loader=data(20)).losses == losses_of(Language(), data(20))


def test_steps_samples_and_tokens_are_counted_up() -> None:
    assert read(Line()).found == [StepLoss(i + 1, 2 * i + 0.5, 2 * (i + 1), 6 * (i + 1)) for i in range(8)]


@pytest.mark.parametrize(("window", "means"), [(4, [3.5, 11.5]), (3, [2.5, 8.5, 13.5])])
def test_accumulation_gives_the_undivided_mean_also_of_a_short_last_window(window: int, means: list[float]) -> None:
    reader = read(Line(), accumulate_grad_batches=window)
    assert reader.losses == pytest.approx(means, abs=1e-6)
    assert reader.found[-1].samples == 16
    assert reader.found[0].tokens == 6 * window


class ByHand(Line):
    """Two optimizers step on every second batch; the loss is kept in a buffer that is written to again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("last", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
        self.last.copy_(loss.detach())
        return {"loss": self.last}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.0) for _ in range(2)]


def test_in_manual_optimization_a_batch_in_which_optimizers_step_is_one_step_and_its_loss_is_not_multiplied() -> None:
    reader = read(ByHand())
    assert reader.losses == [1.5, 5.5, 9.5, 13.5]
    assert [step.step for step in reader.found] == [1, 2, 3, 4]


class Sometimes(Line):
    """Returns nothing on odd batches and a dict on even ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else {"loss": super().training_step(batch, batch_idx), "other": 1}


def test_a_step_without_a_loss_has_none_and_a_window_is_the_mean_of_what_it_has() -> None:
    reader = read(Sometimes())
    assert reader.losses == [0.5, None, 4.5, None, 8.5, None, 12.5, None]
    assert [step.samples for step in reader.found] == list(range(2, 18, 2))
    assert read(Sometimes(), accumulate_grad_batches=4).losses == [2.5, 10.5]


def test_a_loss_that_is_not_finite_is_handed_on() -> None:
    assert [math.isnan(loss or 0.0) for loss in read(Language(spoiled={3: math.nan}), loader=data(6)).losses].index(True) == 3


def test_a_step_skipped_for_its_loss_has_none_but_counts_and_a_step_skipped_for_an_overflow_has_its_loss() -> None:
    reader = Reader()
    plugin = MasterWeightPrecision("bf16-master", skip_nonfinite=True)
    fit(Language(spoiled={2: math.inf}), reader, loader=data(5), plugins=[plugin])
    assert [loss is None for loss in reader.losses] == [False, False, True, False, False]
    assert all(math.isfinite(loss) for loss in reader.losses if loss is not None)
    assert (reader.steps.nonfinite_skipped, plugin.nonfinite_losses) == (1, 1)
    assert [step.samples for step in reader.found] == [4, 8, 12, 16, 20]
    scripted = read(Line(), plugins=[Scripted([None, "weight", None])])
    assert scripted.losses[1] == 2.5


class Masked(Language):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["input_ids"])


def masked(batches: int = 12) -> DataLoader[Any]:
    ids = torch.arange(batches * 2 * 6).reshape(-1, 6) % 16
    rows = [{"input_ids": row, "attention_mask": torch.arange(6) < 1 + i % 6} for i, row in enumerate(ids)]
    return DataLoader(rows, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 5])
def test_tokens_that_a_mask_hides_are_counted_on_the_device_and_read_with_the_losses(window: int) -> None:
    reader = read(Masked(), loader=masked(), accumulate_grad_batches=window)
    in_batches = [2 * (i % 3) * 2 + 3 for i in range(12)]  # rows of 1 and 2 tokens, 3 and 4, 5 and 6, and again
    ends = [*range(window, 12, window), 12]
    assert [step.tokens for step in reader.found] == [sum(in_batches[:end]) for end in ends]


def test_a_module_that_counts_its_tokens_is_believed_and_one_that_does_not_know_is_too() -> None:
    class Counts(Line):
        def count_tokens(self, batch: Any) -> Any:
            return {0: 5, 2: torch.tensor(7), 4: torch.tensor([8])}.get(int(batch[0][0]))

    assert [step.tokens for step in read(Counts()).found] == [5, 12, 20, None, None, None, None, None]


def test_steps_are_read_at_log_steps_also_if_no_optimizer_steps_in_that_batch() -> None:
    assert read(Line(), log_every_n_steps=3).read_at == [2, 5]
    # batch 2 is a log step of Lightning, the optimizers step in the next
    assert read(ByHand(), log_every_n_steps=3).read_at == [3, 5]


@pytest.mark.parametrize("options", [{"log_every_n_steps": 0}, {"log_every_n_steps": 1000}])
def test_without_log_steps_what_is_unread_is_bounded(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loss, "MOST_UNREAD", 5)
    monkeypatch.setattr(step_loss, "PACK", 2)
    reader = read(Line(), **options)
    assert reader.read_at == [4]
    assert reader.losses == [2 * i + 0.5 for i in range(8)]


def test_losses_of_many_micro_batches_are_packed_and_those_of_an_open_window_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loss, "PACK", 3)

    class ReadsInBetween(Reader):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            self.read(trainer)

    reader = ReadsInBetween()
    fit(Masked(), reader, loader=masked(), accumulate_grad_batches=4)
    assert reader.found == read(Masked(), loader=masked(), accumulate_grad_batches=4).found
    assert len(reader.found) == 3


class ReadsAlways(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


def test_between_log_steps_nothing_is_read_from_the_device() -> None:
    def reads(*callbacks: pl.Callback) -> list[int]:
        return reads_per_batch(lambda *counter: fit(Masked(), *counter, *callbacks, loader=masked(), log_every_n_steps=4))

    without = reads()
    assert [batch for batch, (one, other) in enumerate(zip(reads(Reader()), without, strict=True)) if one != other] == [3, 7]
    assert reads(ReadsAlways()) != without, "a read would be seen"


def test_a_second_fit_of_the_same_trainer_goes_on_and_a_run_that_was_joined_late_does_not_know_its_totals() -> None:
    reader = Reader()
    trainer = fit(Line(), reader, loader=numbers(), max_steps=3, max_epochs=-1)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(trainer.lightning_module, numbers())
    assert [step.step for step in reader.found] == [1, 2, 3, 4, 5]
    assert reader.found[-1].samples == 10
    late = Reader()
    trainer.callbacks.append(late)
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(trainer.lightning_module, numbers())
    assert late.steps.joined_late
    assert [step[0] for step in late.found] == [6, 7]
    assert {step[2:] for step in late.found} == {(None, None)}


def test_the_state_goes_on_exactly() -> None:
    first, second, whole = Reader(), Reader(), read(Line())
    fit(Line(), first, loader=numbers(), max_steps=3, max_epochs=-1)
    second.steps.load_state_dict(first.steps.state_dict())
    assert second.steps.state_dict() == first.steps.state_dict()
    fit(Line(), second, loader=DataLoader(list(numbers())[3:], batch_size=None))  # type: ignore[arg-type]
    assert first.found + second.found == whole.found
