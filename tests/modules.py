"""Small LightningModules and quiet trainers for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import MasterWeightPrecision, Trainer
from tests.reference import fp32_run, same_bits

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
PLAIN_SGD, UNIT_SGD = partial(SGD, lr=0.1), partial(SGD, lr=1.0)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


def bf16_master(storage: str, **settings: Any) -> MasterWeightPrecision:
    return MasterWeightPrecision("bf16-master", master=storage, **settings)


def quiet_trainer(plugin: str | Precision | None, **settings: Any) -> Trainer:
    """A CPU trainer that runs one epoch, prints nothing, and writes nothing."""
    return Trainer(precision_plugin=plugin, **{**QUIET, **settings})


class M(LightningModule):
    """One linear layer, or another network, under MSE loss; 8 random rows in batches of 2 and SGD with lr 0.1.

    ``gradients`` holds what each optimizer step saw: the gradients of ``parameters()``, in their order. They are recorded in a
    hook in which nobody edits weights, so that a module without other hooks runs as one that nobody edits.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: MakeOptimizer = PLAIN_SGD,
        rows: tuple[Tensor, Tensor] | None = None,
        batch: int = 2,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1) if net is None else net
        self.make_optimizer = optimizer
        self.rows = random_rows() if rows is None else rows
        self.batch = batch
        self.gradients: list[list[Tensor | None]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.gradients.append([None if p.grad is None else p.grad.detach().clone() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(*self.rows), batch_size=self.batch)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    @property
    def plugin(self) -> MasterWeightPrecision:
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, MasterWeightPrecision)
        return plugin

    def master(self, name: str = "layer.weight") -> Tensor:
        """A master of the present run."""
        return self.plugin.masters()[name]


class Manual(M):
    """The same under manual optimization, with one step per batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class LinearLoss(M):
    """Its gradient is the batch's first row, whatever the weight: exact in bf16 if that row is."""

    def __init__(self, inputs: Tensor, optimizer: MakeOptimizer = UNIT_SGD) -> None:
        super().__init__(nn.Linear(inputs.shape[1], 1, bias=False), optimizer, (inputs, inputs), batch=1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layer.weight * batch[0]).sum()


def random_rows(count: int = 8, width: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator), torch.randn(count, 1, generator=generator)


def values(module: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [param.detach().clone() for param in module.parameters()]


def assert_same(left: Iterable[Tensor], right: Iterable[Tensor]) -> None:
    """The same tensors, bit for bit."""
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert same_bits(one.detach(), other.detach()), f"{index}: {one} is not {other}"


def assert_replays(module: M, initial: list[Tensor], make_optimizer: MakeOptimizer | None = None) -> None:
    """The module, after a fit, is what an fp32 run of the optimizer makes of ``initial`` on the gradients that the fit saw."""
    assert module.gradients
    assert all(param.dtype == torch.float32 for param in module.parameters())
    expected = fp32_run(initial, module.gradients, make_optimizer or module.make_optimizer)
    assert_same(module.parameters(), expected)
    assert not all(same_bits(one, other) for one, other in zip(expected, initial, strict=True))
