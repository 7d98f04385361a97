"""fp16 trains as fp32 does: no update is lost, and small gradients are not flushed to zero, as they are without our parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import GradientRangeMonitor, MasterWeightPrecision, Trainer
from lightning_mp.numerics.formats import FP16, underflow_fraction
from tests.modules import QUIET

TOLERANCES = {
    "lost updates": 1e-3,  # relative, tail loss of 16-master to fp32: fp16 rounds activations to 2^-11
    "tiny loss": 1e-2,  # the same
}
STEPS, BATCH = 200, 64
TINY = 2.0**-12


def data(steps: int, batch: int, inputs: int, outputs: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * batch, inputs, generator=generator)
    y = torch.sin(x @ torch.randn(inputs, outputs, generator=generator) / 4) * 0.3
    return DataLoader(TensorDataset(x, y), batch_size=batch)


class Regression(pl.LightningModule):
    """Its loss is multiplied by ``factor``, as a long sum or a small weight in a loss of many terms would."""

    def __init__(self, widths: tuple[int, ...], factor: float, make_optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.GELU())]
        self.net = nn.Sequential(*layers[:-1])
        self.factor, self.make_optimizer = factor, make_optimizer
        self.losses: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss * self.factor

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    @property
    def tail_loss(self) -> float:
        return torch.stack(self.losses[-50:]).mean().item()


class Underflow(Callback):
    """The share of gradients that fp16 cannot hold at the scale of each step, from fp32 gradients of the same weights."""

    def __init__(self) -> None:
        self.underflows: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.skipped = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        twin = tiny_loss_module()
        twin.load_state_dict(module.state_dict())
        (twin.loss(batch) * twin.factor).backward()
        self.gradients = torch.cat([param.grad.flatten() for param in twin.parameters() if param.grad is not None])
        self.scale_before = scale_of(trainer.precision_plugin)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plugin = trainer.precision_plugin
        stock = isinstance(plugin, MixedPrecision)
        scale = self.scale_before if stock else plugin.gradient_scale
        self.underflows.append(underflow_fraction(self.gradients, FP16, scale=scale))
        self.zeros.append(((self.gradients != 0) & ((self.gradients * scale).half() == 0)).float().mean())
        self.skipped = self.skipped + (scale_of(plugin) < scale) if stock else plugin.skipped_steps

    @property
    def fraction(self) -> float:
        return torch.stack(self.underflows).mean().item()


def scale_of(plugin: Any) -> float:
    return plugin.scaler.get_scale() if isinstance(plugin, MixedPrecision) else plugin.loss_scale.scale


def tiny_loss_module() -> Regression:
    return Regression((32, 64, 64, 32), TINY, lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-12))


def fit(plugin: Any, module: Regression, loader: DataLoader[Any], *callbacks: Callback, epochs: int = 1) -> Regression:
    if isinstance(plugin, MixedPrecision):
        trainer = pl.Trainer(plugins=[plugin], callbacks=list(callbacks), **{**QUIET, "max_epochs": epochs})
    else:
        trainer = Trainer(precision_plugin=plugin, callbacks=list(callbacks), **{**QUIET, "max_epochs": epochs})
    trainer.fit(module, loader)
    return module


# --- no update is lost -------------------------------------------------------------------------------------------------


def test_fp16_without_masters_stalls_at_a_small_learning_rate_and_16_master_does_not():
    def train(plugin: Any = None, **kwargs: Any) -> list[float]:
        # eps as large as fp16 can hold, or Adam divides by zero in fp16
        module = Regression((8, 16, 1), 1.0, lambda params: torch.optim.Adam(params, lr=1e-5, eps=1e-4))
        with torch.no_grad():
            module.net[-1].bias.fill_(1.0)  # a bias that has to come down
        loader = data(1500, 4, 8, 1)
        if plugin is None:
            pl.Trainer(**kwargs, **{**QUIET, "max_epochs": 1}).fit(module, loader)
        else:
            fit(plugin, module, loader)
        losses = torch.stack(module.losses).float()
        return [losses[:100].mean().item(), losses[-100:].mean().item()]

    first, expected = train("32-true")
    _, with_masters = train("16-master")
    _, without = train(precision="16-true")
    learned = first - expected
    assert learned > 0.02
    assert abs(with_masters - expected) <= TOLERANCES["lost updates"] * expected
    assert without - expected > 0.3 * learned


# --- small gradients are not flushed -----------------------------------------------------------------------------------


def test_a_tiny_loss_at_scale_1_lags_and_under_the_adaptive_scale_trains_as_in_fp32():
    loader = data(STEPS, BATCH, 32, 32)
    underflow = Underflow()
    fit(MasterWeightPrecision("16-master", loss_scale=1.0), tiny_loss_module(), loader, underflow)
    zeros = torch.stack(underflow.zeros).mean().item()
    assert zeros > 0.1
    expected = fit("32-true", tiny_loss_module(), loader, epochs=3).tail_loss
    unscaled = fit(MasterWeightPrecision("16-master", loss_scale=1.0), tiny_loss_module(), loader, epochs=3).tail_loss
    adaptive = fit("16-master", tiny_loss_module(), loader, epochs=3).tail_loss
    assert abs(adaptive - expected) <= TOLERANCES["tiny loss"] * expected
    assert unscaled - expected > 5 * TOLERANCES["tiny loss"] * expected


@pytest.mark.parametrize("growth_interval", [2000, 20, 5, 3])
def test_the_adaptive_scale_loses_fewer_gradients_to_underflow_than_grad_scaler_with_no_more_skipped_steps(growth_interval):
    loader = data(STEPS, BATCH, 32, 32)
    ours, theirs = Underflow(), Underflow()
    fit("16-master", tiny_loss_module(), loader, ours)
    scaler = torch.amp.GradScaler(device="cpu", growth_interval=growth_interval)
    fit(MixedPrecision("16-mixed", "cpu", scaler), tiny_loss_module(), loader, theirs)
    assert len(ours.underflows) == len(theirs.underflows) == STEPS
    assert ours.fraction < theirs.fraction / 2
    # GradScaler's default interval does not probe within 200 steps, and so skips none; short ones skip many
    assert ours.skipped == 0
    assert theirs.skipped > 5 if growth_interval <= 5 else theirs.skipped == 0


def test_the_monitors_estimate_of_underflow_is_what_fp32_gradients_show():
    for scale in (1.0, 2.0**4, 2.0**8):
        truth, estimates = Underflow(), []

        class Reads(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                estimates.append(trainer.callback_metrics["gradients/underflow_fraction"].item())  # noqa: B023

        loader = data(10, BATCH, 32, 32)
        monitor = GradientRangeMonitor(every_n_steps=1)
        plugin = MasterWeightPrecision("16-master", loss_scale=scale)
        fit(plugin, tiny_loss_module(), loader, truth, monitor, Reads())
        assert abs(sum(estimates) / len(estimates) - truth.fraction) < 0.02
