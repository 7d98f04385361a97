"""Small user code for the command line's tests, imported by its plain name from the current directory."""

from __future__ import annotations

import os
import signal
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ToyModel(LightningModule):
    """Token ids to the same ids, with a fault under one precision.

    Args:
        width: of the embedding.
        lr: learning rate.
        raise_in: the precision under which it raises an error.
        kill_in: its process is killed.
        drift_in: its loss is 0.5 too high.
        nan_in: its third loss is not a number.
        overflow_in: its gradients are infinite.
        interrupt_in: the process that started it gets a Ctrl-C at the third step.
    """

    def __init__(
        self,
        width: int = 16,
        lr: float = 0.01,
        raise_in: str = "",
        kill_in: str = "",
        drift_in: str = "",
        nan_in: str = "",
        overflow_in: str = "",
        interrupt_in: str = "",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(8, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.head(self.norm(self.embed(batch[0])))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[0].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        precision = str(self.trainer.precision)
        if precision == self.hparams.get("raise_in"):
            raise RuntimeError(f"a [red]user's[/red] mistake in {precision}")
        if precision == self.hparams.get("kill_in"):
            os.kill(os.getpid(), signal.SIGKILL)
        print("the user's own output")
        loss = self.loss(batch)
        if precision == self.hparams.get("drift_in"):
            loss = loss + 0.5
        if precision == self.hparams.get("overflow_in"):
            loss.register_hook(lambda gradient: gradient * float("inf"))
        if self.trainer.global_step == 2 and precision == self.hparams.get("nan_in"):
            loss = loss * float("nan")
        if self.trainer.global_step == 2 and precision == self.hparams.get("interrupt_in"):
            for _ in range(15):  # Python drops an interrupt that comes while it collects garbage; a person presses again
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(4)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.norm(self.embed(batch[0]))).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.get("lr", 0.01))


class OtherModel(ToyModel):
    """The same layers under other arguments."""

    def __init__(self, size: int = 16) -> None:
        super().__init__(width=size)


class TakesPlugin(ToyModel):
    """Takes a plugin as an argument, and saves what it was given."""

    def __init__(self, plugin: Precision | None = None, width: int = 16) -> None:
        LightningModule.__init__(self)
        self.save_hyperparameters()
        ToyModel.__init__(self, width)


class ToyData(LightningDataModule):
    """Random token ids, (B, 4), in an order that depends on the seed."""

    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        self.rows = rows

    def loader(self, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        ids = torch.randint(8, (self.rows, 4), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(ids), batch_size=4, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.loader(True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.loader(False)

    test_dataloader = predict_dataloader = val_dataloader
