"""One of the two ranks of the `MemoryMonitor` tests: ``python -m tests.callbacks.memory_ddp_worker FOLDER``."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lightning_mp import Trainer
from lightning_mp.callbacks.memory import MemoryMonitor
from lightning_mp.cost.memory import peak_rss_bytes
from tests.callbacks.stand_ins import Rows
from tests.modules import QUIET, M


class CountingStrategy(DDPStrategy):
    """Counts gathers."""

    gathers = 0

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.gathers += 1
        return super().all_gather(tensor, *args, **kwargs)


class Uneven(M):
    """Manual optimization without reduction. Rank 0 has no batch at first, and rank 1 has no loss in the third."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1), partial(AdamW, lr=1e-3))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 2:
            return
        loss = self.layer(batch).square().mean()
        self.layer.weight.grad = torch.autograd.grad(loss, self.layer.weight)[0]
        self.optimizers().step()  # type: ignore[union-attr]

    def train_dataloader(self) -> Any:
        first = torch.zeros(0) if self.trainer.global_rank == 0 else torch.ones(2, 4)
        return DataLoader([first, *torch.ones(3, 2, 4)], batch_size=None, collate_fn=lambda x: x if x.numel() else None)


def make_trainer(rows: Rows | None, monitor: MemoryMonitor, **options: Any) -> Trainer:
    settings = {
        **QUIET,
        "devices": 2,
        "limit_val_batches": 0,
        "strategy": CountingStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20)),
        "logger": rows or False,
        "callbacks": [monitor],
        "use_distributed_sampler": False,
        **options,
    }
    return Trainer(precision_plugin="bf16-master", **settings)


def memory_of(trainer: Trainer) -> dict[str, float]:
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("memory/")}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rows = Rows()
    trainer = make_trainer(rows, MemoryMonitor(), log_every_n_steps=2)
    if trainer.global_rank == 1:
        block = torch.ones(400 << 18)  # 400 MiB
        del block
    torch.manual_seed(0)
    trainer.fit(M(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1)), partial(AdamW, lr=1e-3)))
    found: dict[str, Any] = {
        "metrics": memory_of(trainer),
        "rows": [row for row in rows.rows if "memory/peak_rank" in row] if trainer.is_global_zero else [],
        "rss_gib": (peak_rss_bytes() or 0) / 2**30,
        "gathers": trainer.strategy.gathers,
    }
    uneven = make_trainer(None, MemoryMonitor(), log_every_n_steps=1)
    uneven.fit(Uneven())
    found["uneven"], found["uneven_gathers"] = memory_of(uneven), uneven.strategy.gathers
    torch.save(found, folder / f"rank-{trainer.global_rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # or a rank that is still in use of it may die at exit


if __name__ == "__main__":
    main(Path(sys.argv[1]))
