"""`RunRecorder` records true losses, tokens, step times and memory in real fits."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.callbacks.run_recorder import RunRecorder, StepRecord, token_count


class Line(LightningModule):
    """One weight that does not move (lr 0), so the loss of batch `i` is known: the mean of its inputs."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.0)


def loader(batches: int = 8, batch_size: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Batch `i` holds the values 2i and 2i + 1 with the token ids (B, 3)."""
    values = torch.arange(float(batches * batch_size))
    return DataLoader(TensorDataset(values, torch.zeros(len(values), 3, dtype=torch.int64)), batch_size)


def fit(module: LightningModule, folder: Path, recorder: RunRecorder | None = None, **options: Any) -> RunRecorder:
    recorder = recorder or RunRecorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    batches = options.pop("loader", None) or loader()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(module, batches)
    return recorder


def losses(recorder: RunRecorder) -> list[float | None]:
    return [record.loss for record in recorder.records]


def test_the_loss_is_that_of_each_batch(tmp_path: Path) -> None:
    recorder = fit(Line(), tmp_path)
    assert losses(recorder) == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5, 12.5, 14.5]
    assert [record.step for record in recorder.records] == list(range(1, 9))
    assert [record.tokens for record in recorder.records] == [6] * 8


def test_accumulation_gives_the_undivided_mean_over_the_window(tmp_path: Path) -> None:
    recorder = fit(Line(), tmp_path, accumulate_grad_batches=4)
    assert losses(recorder) == [3.5, 11.5]
    assert [record.tokens for record in recorder.records] == [24, 24]


def test_a_short_last_window_is_the_mean_over_what_it_has(tmp_path: Path) -> None:
    recorder = fit(Line(), tmp_path, accumulate_grad_batches=3)
    assert losses(recorder) == pytest.approx([2.5, 8.5, 13.5])
    assert [record.tokens for record in recorder.records] == [18, 18, 12]


class Manual(Line):
    """Steps by hand on every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
        return {"loss": loss}


def test_manual_optimization_is_not_multiplied_and_windows_end_with_a_step(tmp_path: Path) -> None:
    assert losses(fit(Manual(), tmp_path)) == [1.5, 5.5, 9.5, 13.5]


class Sometimes(Line):
    """Returns nothing on odd batches and a dict on even ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else {"loss": super().training_step(batch, batch_idx), "other": 1}


def test_a_missing_loss_is_none_and_a_dict_is_read(tmp_path: Path) -> None:
    assert losses(fit(Sometimes(), tmp_path)) == [0.5, None, 4.5, None, 8.5, None, 12.5, None]


def test_a_window_with_one_missing_loss_is_the_mean_of_the_others(tmp_path: Path) -> None:
    assert losses(fit(Sometimes(), tmp_path, accumulate_grad_batches=4)) == [2.5, 10.5]


def test_losses_are_read_in_chunks_and_every_step_is_told(tmp_path: Path) -> None:
    chunks: list[Sequence[StepRecord]] = []
    steps: list[int] = []
    recorder = fit(Line(), tmp_path, RunRecorder(steps.append, chunks.append, chunk_steps=3))
    assert [len(chunk) for chunk in chunks] == [3, 3, 2]
    assert [record for chunk in chunks for record in chunk] == recorder.records
    assert steps == list(range(1, 9))


class Breaks(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


def test_an_exception_leaves_the_steps_before_it(tmp_path: Path) -> None:
    recorder = RunRecorder()
    with pytest.raises(ArithmeticError):
        fit(Breaks(), tmp_path, recorder)
    assert len(recorder.records) == 5


class NotANumber(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 3 else 1.0)


@pytest.mark.parametrize(("stop", "steps"), [(True, 4), (False, 8)])
def test_a_loss_that_is_not_finite_is_noted_and_stops_training_if_asked(tmp_path: Path, stop: bool, steps: int) -> None:
    recorder = fit(NotANumber(), tmp_path, RunRecorder(chunk_steps=2, stop_at_non_finite=stop))
    assert recorder.non_finite_step == 4
    assert len(recorder.records) == steps


class Slow(Line):
    """Trains for 10 ms a batch; everything else is slower."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05)

    def val_dataloader(self) -> Any:
        return loader(2)


def test_step_time_leaves_out_validation_and_sums_over_the_window(tmp_path: Path) -> None:
    one = fit(Slow(), tmp_path, val_check_interval=2)
    two = fit(Slow(), tmp_path, val_check_interval=2, accumulate_grad_batches=2)
    fastest_one = min(record.step_time_ms for record in one.records)
    fastest_two = min(record.step_time_ms for record in two.records)
    assert 10 <= fastest_one < 50  # a validation would add 100
    assert 20 <= fastest_two < 100


def test_memory_is_taken_at_the_second_step_with_state_and_gradients(tmp_path: Path) -> None:
    recorder = fit(Line(), tmp_path)
    memory = recorder.memory
    assert memory is not None
    # one parameter: weight, gradient, two moments, and AdamW's step counter
    assert (memory.weights, memory.gradients, memory.optimizer_state, memory.masters) == (4, 4, 12, 0)


def test_memory_of_a_single_step_is_unknown(tmp_path: Path) -> None:
    assert fit(Line(), tmp_path, max_steps=1).memory is None


def test_masters_are_asked_of_the_plugin(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import Precision

    class Holder(Precision):
        def master_tensors(self) -> list[Tensor]:
            return [torch.zeros(7, dtype=torch.int16)]

    memory = fit(Line(), tmp_path, plugins=[Holder()]).memory
    assert memory is not None
    assert memory.masters == 14


def test_stock_precisions_start_from_the_same_weights_and_data(tmp_path: Path) -> None:
    runs = []
    for precision in ("32-true", "bf16-true"):
        torch.manual_seed(3)
        runs.append(fit(Line(), tmp_path, precision=precision))
    assert runs[0].weights is not None
    assert runs[0].weights == runs[1].weights
    assert runs[0].data_order == runs[1].data_order
    assert list(runs[0].data_order) == [str(position) for position in range(1, 17)]


def test_another_weight_or_another_batch_gives_another_fingerprint(tmp_path: Path) -> None:
    base = fit(Line(), tmp_path)
    moved = Line()
    with torch.no_grad():
        moved.weight.add_(1e-7)
    assert fit(moved, tmp_path).weights != base.weights
    shorter = fit(Line(), tmp_path, loader=loader(6)).data_order
    assert shorter == {str(position): base.data_order[str(position)] for position in range(1, 13)}
    shuffled = DataLoader([next(iter(loader())), *reversed(list(loader()))], batch_size=None)  # type: ignore[arg-type]
    assert fit(Line(), tmp_path, loader=shuffled).data_order["4"] != base.data_order["4"]


class Late(Line):
    """Builds its layer in `configure_model`, where Lightning wants large layers to be built."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(2, 2)


def test_layers_built_in_configure_model_are_in_the_fingerprint(tmp_path: Path) -> None:
    weights = []
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        weights.append(fit(Late(), tmp_path).weights)
    assert weights[0] != weights[1] == weights[2]


def test_the_plugin_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[RunRecorder()],
    )  # fmt: skip
    trainer.fit(Line(), loader())
    assert "convert_module" not in vars(trainer.precision_plugin)


def test_a_second_fit_starts_afresh(tmp_path: Path) -> None:
    recorder = RunRecorder()
    fit(Line(), tmp_path, recorder)
    fit(Line(), tmp_path, recorder, max_steps=2)
    assert len(recorder.records) == 2


def test_a_module_that_counts_its_tokens_is_believed(tmp_path: Path) -> None:
    class Counts(Line):
        def count_tokens(self, batch: Any) -> int:
            return 5

    assert {record.tokens for record in fit(Counts(), tmp_path).records} == {5}


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), 10),
        ((torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32)), 2),
        ({"mask": torch.ones(4, dtype=torch.bool), "ids": torch.zeros(4, dtype=torch.uint8)}, 4),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.complex64)], None),
        (None, None),
    ],
)
def test_tokens_are_the_elements_of_the_first_integer_tensor(batch: Any, tokens: int | None) -> None:
    assert token_count(batch) == tokens
