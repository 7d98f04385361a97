"""What the ranks of `test_divergence_ddp` run: every scenario in one launch, each with its results in a file per rank.

``python -m tests.callbacks.divergence_ddp_worker FOLDER`` with ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceError, DivergenceMonitor
from lightning_mp.numerics.divergence import Rule
from tests.callbacks.language import Language, Resumable, Texts, checkpoint, fit
from tests.callbacks.stand_ins import Rows
from tests.ddp.launch import run_scenarios

RANK = int(os.environ.get("LOCAL_RANK", 0))
STEPS = 24
TIMEOUT_S = 20


class Line(pl.LightningModule):
    """The loss of batch `i` is known: 10 i + 4 on rank 0, 10 i + 6 on rank 1, where batches are longer."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.extra = extra

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.weight * (10.0 * batch_idx + 4 + 2 * RANK + self.extra * (batch_idx >= 6))}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def batches(count: int = STEPS) -> DataLoader[Any]:
    """Samples of 3 tokens, two in a batch of rank 0 and three in one of rank 1."""
    rows = [torch.full((2 + RANK, 3), index + 100 * RANK) for index in range(count)]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def run(module: Any, *callbacks: pl.Callback, loader: Any = None, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "devices": 2,
        "strategy": DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S)),
        "use_distributed_sampler": False,
        "logger": Rows(),
        "log_every_n_steps": 4,
        **options,
    }
    reductions: list[int] = []
    reduce = DDPStrategy.reduce

    def counted(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:  # ours; Lightning's are not
            reductions.append(self.lightning_module.trainer.global_step)
        return reduce(self, tensor, *args, **kwargs)

    began, error, trainer = time.monotonic(), None, None
    with mock.patch.object(DDPStrategy, "reduce", counted):
        try:
            trainer = fit(module, *callbacks, loader=loader or batches(), **settings)
        except (DivergenceError, ValueError, RuntimeError, pl.utilities.exceptions.MisconfigurationException) as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {
        "reductions": reductions,
        "error": error,
        "steps": module.trainer.global_step,
        "rows": settings["logger"].rows,
        "seconds": time.monotonic() - began,
        "has_finished": trainer is not None,
    }


def record(folder: Path) -> dict[str, Any]:
    recorder = BaselineRecorder(folder / f"rank{RANK}.json")
    found = run(Line(), recorder, log_every_n_steps=10)
    return {**found, "state": recorder.state_dict()}


def of_a_run(folder: Path) -> Path:
    return folder / "rank0.json"


def watch(folder: Path, module: Any, action: str = "warn", **options: Any) -> dict[str, Any]:
    """Rank 1 names a file that it does not have, as on a machine of its own."""
    monitor = DivergenceMonitor(
        of_a_run(folder) if RANK == 0 else folder / "elsewhere.json", on_divergence=action, rule=Rule(blocks=12),  # type: ignore[arg-type]
        path=folder / "verdicts" / f"{RANK}.json",
    )  # fmt: skip
    found = run(module, monitor, **options)
    test = monitor.test
    return {**found, "verdict": monitor.verdict, "blocks": test.blocks, "paired": test.paired_with, "alarm": test.alarm}


def silent_on_one_rank(folder: Path) -> dict[str, Any]:
    recorder = BaselineRecorder(folder / "silent.json")
    found = run(Silent(), recorder)
    return {**found, "state": recorder.state_dict()}


class Silent(Line):
    """In manual optimization; rank 1 returns no loss on odd batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.manual_backward(loss)
        self.optimizers().step()
        return None if RANK and batch_idx % 2 else {"loss": loss}


def resume(folder: Path) -> dict[str, Any]:
    """A checkpoint between log steps."""
    loader = Resumable(Texts(4 * STEPS, seed=RANK), 4)
    whole = BaselineRecorder(folder / "whole.json")
    run(Language(), whole, checkpoint(folder, 10), loader=loader, enable_checkpointing=True)
    resumed = BaselineRecorder(folder / "resumed.json")
    loader = Resumable(Texts(4 * STEPS, seed=RANK), 4)
    found = run(Language(), resumed, loader=loader, ckpt=folder / "step=10.ckpt")
    return {**found, "whole": whole.state_dict()["curve"], "resumed": resumed.state_dict()["curve"]}


def refused(folder: Path) -> dict[str, Any]:
    """Only rank 0 sees what is wrong."""
    if RANK == 0:
        (folder / "broken.json").write_text("{")
    monitor = DivergenceMonitor(folder / "broken.json" if RANK == 0 else of_a_run(folder))
    recorder = BaselineRecorder(of_a_run(folder) if RANK == 0 else folder / "free.json")
    return {"monitor": run(Line(), monitor)["error"], "recorder": run(Line(), recorder)["error"]}


def out_of_batches(folder: Path) -> dict[str, Any]:
    """Rank 1 has a batch less, and every step is a log step. The last scenario: Lightning itself does not survive it."""
    recorder = BaselineRecorder(folder / "short.json")
    found = run(Line(), recorder, loader=batches(8 - RANK), log_every_n_steps=1)
    return {**found, "state": recorder.state_dict()}


SCENARIOS = {
    "record": record,
    "watch": lambda folder: watch(folder, Line()),
    "stop": lambda folder: watch(folder, Line(extra=50.0), "stop"),
    "raise": lambda folder: watch(folder, Line(extra=50.0), "raise"),
    "silent": silent_on_one_rank,
    "resume": resume,
    "refused": refused,
    "out of batches": out_of_batches,
}


if __name__ == "__main__":
    run_scenarios(SCENARIOS, Path(sys.argv[1]))
