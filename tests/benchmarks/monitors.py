"""What the monitors cost: byte-GPT, and steps of about a millisecond, with all of them against none.

    python -m tests.benchmarks.monitors [--threads 2] [--rounds 8]

A step is timed from the start of a batch to the start of the next, so that all that callbacks and loggers do is in it. Of
byte-GPT, fits with and without monitors alternate in one process, and the median step counts. Of tiny steps, blocks of 100
alternate within one fit, and in every second block the monitors are taken off the trainer. There the median over blocks of the
first step of a block counts, of the second, and so on, and the mean of these: log steps and gradient samples are in it, as each
has its place in a block; what the machine does besides at times, and garbage collection, are not.
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
BLOCK = 100


class Starts(Callback):
    """When each batch started."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter())

    @property
    def steps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.seconds[WARM_UP:], self.seconds[WARM_UP + 1 :], strict=False)]


class Alternates(Starts):
    """Takes the monitors off the trainer for every second block of steps. To be the last of the callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._others: list[Any] | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if len(self.seconds) % BLOCK == 0:
            if self._others is None:
                self._others, trainer.callbacks = trainer.callbacks, [self]
            else:
                trainer.callbacks, self._others = self._others, None

    def by_place_ms(self) -> tuple[list[float], list[float]]:
        """The median time of the first, second, ... step of a block, of those with monitors and of those without."""
        ms = [(b - a) * 1e3 for a, b in zip(self.seconds, self.seconds[1:], strict=False)]
        blocks = [ms[i : i + BLOCK] for i in range(0, len(ms) - BLOCK + 1, BLOCK)]
        with_them, without = blocks[2::2], blocks[3::2]  # without the first pair, which warms up
        return [statistics.median(place) for place in zip(*with_them, strict=True)], [
            statistics.median(place) for place in zip(*without, strict=True)
        ]


class Tiny(L.LightningModule):
    """About a millisecond a step, most of it Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def empty() -> list[Callback]:
    """As many callbacks as there are monitors, that do nothing."""
    return [type(f"Empty{index}", (Callback,), {})() for index in range(len(monitors()))]


def fit(module: L.LightningModule, data: Any, steps: int, measuring: list[Callback], starts: Starts) -> None:
    with tempfile.TemporaryDirectory() as root:
        callbacks = [*measuring, starts]
        trainer = Trainer(
            precision_plugin="bf16-master", max_steps=steps + WARM_UP, callbacks=callbacks, accelerator="auto", devices=1,
            limit_val_batches=0, logger=CSVLogger(root), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
        )  # fmt: skip
        trainer.fit(module, data)


def byte_gpt(steps: int, with_monitors: bool) -> float:
    L.seed_everything(0, verbose=False)
    starts = Starts()
    fit(ByteGPT(lr=1e-4), ByteText(), steps, monitors() if with_monitors else [], starts)
    return statistics.median(starts.steps_ms)


def tiny(steps: int, measuring: list[Callback]) -> tuple[list[float], list[float]]:
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(8 * (steps + WARM_UP + 1), 64))
    starts = Alternates()
    fit(Tiny(), DataLoader(data, batch_size=8), steps, measuring, starts)
    return starts.by_place_ms()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of byte-GPT in each round")
    parser.add_argument("--tiny-steps", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(describe(arguments.threads))

    ratios, times = [], []
    for index in range(arguments.rounds):
        found = {}
        for with_monitors in (True, False) if index % 2 else (False, True):
            found[with_monitors] = byte_gpt(arguments.steps, with_monitors)
        ratios.append(found[True] / found[False])
        times.append(found[False])
    print(
        f"byte-GPT, median step {statistics.median(times):9.3f} ms without monitors; with them"
        f" {statistics.median(ratios):6.3f}x   by round: {' '.join(f'{ratio:.3f}' for ratio in ratios)}"
    )
    for name, make in (("the monitors", monitors), ("as many empty callbacks", empty), ("the monitors", monitors)):
        with_them, without = tiny(arguments.tiny_steps, make())
        added = [(a - b) * 1e3 for a, b in zip(with_them, without, strict=True)]
        print(
            f"tiny, mean step {statistics.fmean(without):6.3f} ms; {name} add {statistics.fmean(added):+6.1f} us:"
            f" {statistics.median(added):+.1f} us at most steps, {max(added):+.0f} us at the costliest of {BLOCK}"
        )


if __name__ == "__main__":
    main()
