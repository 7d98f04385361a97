"""A language model of 272 parameters, its data, and a fit that is quick and quiet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mp.numerics.curve import LossCurve
from tests.instruments import CountSyncs

VOCABULARY, LENGTH = 16, 6


class Language(pl.LightningModule):
    """Predicts each token from itself. The loss of the batches in ``spoiled`` is multiplied."""

    def __init__(self, lr: float = 1e-2, seed: int = 0, spoiled: dict[int, float] | None = None, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.lr, self.spoiled, self.settings = lr, spoiled or {}, settings

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(batch)).float().flatten(0, 1), batch.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) * self.spoiled.get(batch_idx, 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, **self.settings)


class Validated(Language):
    """Logs two metrics of validation, and one of training."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val/rows", float(len(batch)))

    def val_dataloader(self) -> Any:
        return data(2, seed=1)


class Texts(Dataset[Tensor]):
    """Texts of random tokens."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Resumable(DataLoader[Tensor]):
    """Goes on where a checkpoint was saved."""

    def __iter__(self) -> Any:
        at = getattr(self, "at", 0)
        for index, batch in enumerate(super().__iter__()):
            if index >= at:
                self.at = index + 1
                yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": getattr(self, "at", 0)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def data(steps: int = 40, batch_size: int = 4, seed: int = 0) -> DataLoader[Tensor]:
    """So many batches; the samples are the same whatever the size of a batch."""
    return DataLoader(Texts(steps * batch_size, seed), batch_size)


def resumable(steps: int = 40, batch_size: int = 4, seed: int = 0) -> Resumable:
    """The same batches, from a loader that checkpoints hold the place of."""
    return Resumable(Texts(steps * batch_size, seed), batch_size)


def probes(samples: int) -> list[int]:
    """The positions, among so many samples, of those whose hash tells the order of the data: 32, then 16 in each doubling."""
    positions, apart = list(range(1, 33)), 2
    while positions[-1] < samples:
        positions += range(positions[-1] + apart, 2 * positions[-1] + 1, apart)
        apart *= 2
    return [position for position in positions if position <= samples]


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, loader: Any = None, ckpt: Any = None, **options: Any
) -> pl.Trainer:
    """Fit for an epoch, without logger and files unless asked for."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 5,
        **options,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **settings)
    trainer.fit(module, loader or data(), ckpt_path=ckpt)
    return trainer


def losses_of(module: Language, batches: Any) -> list[float]:
    """The loss of each batch in a plain loop of torch, a reference that knows nothing of Lightning."""
    optimizer = module.configure_optimizers()
    found = []
    for batch in batches:
        loss = module.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def columns(curve: LossCurve) -> dict[str, Any]:
    """A curve's columns by name."""
    return {name: getattr(curve, name) for name in ("steps", "samples", "tokens", "losses")}


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


class Marks(pl.Callback):
    """How many reads there were at the start of each batch."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count, self.marks = count, list[int]()

    def on_train_batch_start(self, *args: Any) -> None:
        self.marks.append(self.count())


def reads_per_batch(run: Callable[[pl.Callback], Any]) -> list[int]:
    """How often the host reads tensors in each batch of a fit that has the callback given to it, up to the last one's start."""
    calls = Counter[str]()
    with pytest.MonkeyPatch.context() as patch, CountSyncs() as syncs:
        for name in READS:
            original = getattr(Tensor, name)

            def counted(self: Tensor, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                calls[_name] += 1
                return _original(self, *args, **kwargs)

            patch.setattr(Tensor, name, counted)
        marks = Marks(lambda: len(syncs.seen) + calls.total())
        run(marks)
    return [after - before for before, after in pairwise(marks.marks)]


def checkpoint(folder: Path, every: int) -> pl.Callback:
    """Saves a checkpoint after every so many steps."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
