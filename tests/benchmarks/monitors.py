"""What the monitors cost: byte-GPT, and steps of about a millisecond, with all of them against none.

    python -m tests.benchmarks.monitors [--threads 2] [--rounds 8]

Fits alternate in one process. A step is timed from the start of a batch to the start of the next, so that all that callbacks
and loggers do is in it. Of byte-GPT the median step counts; of tiny steps the mean over all steps, log steps and samples
included, and what the monitors add to it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.byte_gpt import ByteGPT, ByteText
from lightning_mp import Trainer, monitors
from tests.benchmarks.machine import describe

WARM_UP = 5


class Starts(Callback):
    """When each batch started."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter())

    @property
    def steps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.seconds[WARM_UP:], self.seconds[WARM_UP + 1 :], strict=False)]


class Tiny(L.LightningModule):
    """About a millisecond a step, most of it Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def fit(module: L.LightningModule, data: Any, steps: int, with_monitors: bool) -> list[float]:
    starts = Starts()
    with tempfile.TemporaryDirectory() as root:
        callbacks = [*(monitors() if with_monitors else []), starts]
        trainer = Trainer(
            precision_plugin="bf16-master", max_steps=steps + WARM_UP, callbacks=callbacks, accelerator="auto", devices=1,
            limit_val_batches=0, logger=CSVLogger(root), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
        )  # fmt: skip
        trainer.fit(module, data)
    return starts.steps_ms


def byte_gpt(steps: int, with_monitors: bool) -> list[float]:
    L.seed_everything(0, verbose=False)
    return fit(ByteGPT(lr=1e-4), ByteText(), steps, with_monitors)


def tiny(steps: int, with_monitors: bool) -> list[float]:
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(8 * (steps + WARM_UP + 1), 64))
    return fit(Tiny(), DataLoader(data, batch_size=8), steps, with_monitors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of byte-GPT in each round")
    parser.add_argument("--tiny-steps", type=int, default=1250, help="in each round")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(describe(arguments.threads))

    for name, run, steps, middle in (
        ("byte-GPT, median step", byte_gpt, arguments.steps, statistics.median),
        ("tiny, mean step", tiny, arguments.tiny_steps, statistics.fmean),
    ):
        ratios, added, times = [], [], []
        for index in range(arguments.rounds):
            found = {}
            for with_monitors in (True, False) if index % 2 else (False, True):
                found[with_monitors] = middle(run(steps, with_monitors))
            ratios.append(found[True] / found[False])
            added.append((found[True] - found[False]) * 1e3)
            times.append(found[False])
        print(
            f"{name:24s} {statistics.median(times):9.3f} ms without monitors; with them {statistics.median(ratios):6.3f}x,"
            f" {statistics.median(added):+7.1f} us   by round: {' '.join(f'{ratio:.3f}' for ratio in ratios)}"
        )


if __name__ == "__main__":
    main()
