"""What the ranks of `test_speed_monitor_ddp` run: every scenario in one launch, each with its results in a file per rank.

``python -m tests.callbacks.speed_ddp_worker FOLDER`` with ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set.
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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_mp.callbacks import speed
from lightning_mp.callbacks.speed import SpeedMonitor
from tests.callbacks.stand_ins import Rows
from tests.callbacks.test_speed_monitor import LENGTHS, LanguageModel, World, padded, plain
from tests.ddp.launch import run_scenarios
from tests.modules import QUIET

RANK = int(os.environ.get("LOCAL_RANK", 0))
#: Rank 1 has texts of other lengths.
MORE = (0, 2)
TIMEOUT_S = 20


class Own(LanguageModel):
    """Every rank has batches of its own."""

    def __init__(self, world: World, make: Any) -> None:
        super().__init__(world.spend, lambda length: make(length + MORE[RANK]))


def run(module: Any, world: World, *callbacks: Any, monitor: SpeedMonitor, ckpt: Any = None, **options: Any) -> dict[str, Any]:
    rows = Rows()
    settings = {
        **QUIET,
        "devices": 2,
        "strategy": DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S)),
        "logger": rows,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "log_every_n_steps": 4,
        "enable_checkpointing": bool(callbacks),
        **options,
    }
    trainer = pl.Trainer(callbacks=[monitor, *callbacks], **settings)
    reductions: list[int] = []
    reduce = trainer.strategy.reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:  # the monitor's; Lightning's are not
            reductions.append(trainer.global_step)
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(speed, "clock_for", return_value=world), mock.patch.object(trainer.strategy, "reduce", counted):
        trainer.fit(module, ckpt_path=ckpt)
    published = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"published": published, "rows": rows.rows, "reductions": reductions, "state": monitor.state_dict()}


def rates(folder: Path, make: Any) -> dict[str, Any]:
    world = World()
    return run(Own(world, make), world, monitor=SpeedMonitor(peak_tflops=1e-3), max_epochs=2)


def slower_rank(folder: Path) -> dict[str, Any]:
    """Rank 1's clock runs twice as fast."""
    world = World()
    module = Own(world, plain)
    module.spend = lambda ms: world.spend(ms * (1 + RANK))
    return run(module, world, monitor=SpeedMonitor(), max_epochs=2)


def unknown_on_one_rank(folder: Path) -> dict[str, Any]:
    """Rank 1 cannot tell its tokens."""
    world = World()
    return run(Own(world, plain), world, monitor=SpeedMonitor(tokens=(lambda batch: None) if RANK else None))


def resume(folder: Path) -> dict[str, Any]:
    world = World()
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6)  # between log steps
    run(Own(world, padded), world, checkpoint, monitor=SpeedMonitor(), max_steps=6)
    saved = torch.load(folder / "step=6.ckpt", weights_only=True)["callbacks"]["SpeedMonitor"]
    resumed = run(Own(world, padded), world, monitor=SpeedMonitor(), max_epochs=2, ckpt=folder / "step=6.ckpt")
    return {**resumed, "saved": saved}


class Stops(pl.Callback):
    """On rank 1 alone a step is the last one, to all who ask before this callback's turn; then it thinks again."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = RANK == 1 and batch_idx == 5

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = False


def stops_on_one_rank(folder: Path) -> dict[str, Any]:
    world = World()
    return run(Own(world, plain), world, Stops(), monitor=SpeedMonitor(), enable_checkpointing=False)


def out_of_batches(folder: Path) -> dict[str, Any]:
    """Rank 1 has a batch less, and every step is a log step. The last scenario: Lightning itself does not survive it."""
    world = World()
    module = Own(world, plain)
    module.train_dataloader = lambda: DataLoader([plain(3)] * (8 - RANK), batch_size=None)
    began = time.monotonic()
    error = None
    try:
        run(module, world, monitor=SpeedMonitor(), log_every_n_steps=1)
    except RuntimeError as caught:
        error = str(caught)
    return {"seconds": time.monotonic() - began, "error": error, "steps": module.trainer.global_step}


SCENARIOS = {
    "plain": lambda folder: rates(folder, plain),
    "padded": lambda folder: rates(folder, padded),
    "slower rank": slower_rank,
    "unknown on one rank": unknown_on_one_rank,
    "resume": resume,
    "stops on one rank": stops_on_one_rank,
    "out of batches": out_of_batches,
}
TOKENS = {rank: 2 * sum(length + MORE[rank] for length in LENGTHS) for rank in (0, 1)}


if __name__ == "__main__":
    run_scenarios(SCENARIOS, Path(sys.argv[1]))
