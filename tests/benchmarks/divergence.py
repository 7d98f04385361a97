"""What a recorded step costs: time in the hooks of `BaselineRecorder` and `DivergenceMonitor`, and memory of a million steps.

    python -m tests.benchmarks.divergence [--steps 1000000]

The hooks are called as Lightning calls them, with a stand-in for the trainer, so that the loop around them is not in the time.
Losses are new 0-dim tensors; a step reads a batch of tokens. Every 50th step is a log step, at which losses are read. Times are
the means of equal parts of the run, so that a cost that grows would show.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceMonitor
from lightning_mp.numerics.baseline import Baseline, BaselineRun
from lightning_mp.numerics.curve import LossCurve
from tests.benchmarks.machine import describe

PARTS = 5
LOG_EVERY = 50


class StandIn(SimpleNamespace):
    """A trainer that only counts."""

    def __init__(self, folder: Path) -> None:
        device = torch.device("cpu")
        parameter = torch.nn.Parameter(torch.zeros(()))
        super().__init__(
            global_step=0, world_size=1, is_global_zero=True, accumulate_grad_batches=1, log_every_n_steps=LOG_EVERY,
            fast_dev_run=False, optimizers=[torch.optim.AdamW([parameter], lr=1e-3)], logger=None, loggers=[],
            log_dir=str(folder), default_root_dir=str(folder), gradient_clip_val=None, estimated_stepping_batches=float("inf"),
            precision_plugin=SimpleNamespace(precision="32-true", convert_module=lambda module: module),
            train_dataloader=None, strategy=SimpleNamespace(root_device=device, broadcast=lambda value: value),
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)), max_steps=-1, max_epochs=None,
            _logger_connector=SimpleNamespace(_callback_metrics={}, _progress_bar_metrics={}), save_checkpoint=lambda: None,
            callbacks=[], should_stop=False,
        )  # fmt: skip

    __hash__ = object.__hash__


class Module(torch.nn.Module):
    automatic_optimization = True


def baseline(steps: int) -> Baseline:
    """A baseline as long as the run, of the batches that it has."""
    curve = LossCurve()
    for step in range(1, steps + 1):
        curve.add(step, 2.0, 4 * step, 64 * step)
    return Baseline((BaselineRun(curve),), "made up")


def run(callback: Any, steps: int, folder: Path) -> list[float]:
    """Microseconds for each step, in each part of the run."""
    trainer, module = StandIn(folder), Module()
    trainer.callbacks = [callback]
    callback.setup(trainer, module, "fit")
    if hasattr(callback, "on_fit_start"):
        callback.on_fit_start(trainer, module)
    callback.on_train_start(trainer, module)
    batch = torch.zeros(4, 16, dtype=torch.int64)
    optimizer = trainer.optimizers[0]
    value = torch.tensor(2.0)
    times = []
    for _part in range(PARTS):
        spent = 0.0
        for _ in range(steps // PARTS):
            loss = value.clone()
            began = time.perf_counter()
            callback.on_train_batch_start(trainer, module, batch, 0)
            callback.on_before_optimizer_step(trainer, module, optimizer)
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, module, {"loss": loss}, batch, 0)
            spent += time.perf_counter() - began
            trainer.fit_loop.epoch_loop._batches_that_stepped += 1
        times.append(spent / (steps // PARTS) * 1e6)
    callback.on_train_end(trainer, module)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(describe(1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder, monitor = BaselineRecorder(folder / "b.json"), DivergenceMonitor(baseline(steps))
        run(BaselineRecorder(folder / "warm-up.json"), 1000, folder)
        for callback in (recorder, monitor):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            times = run(callback, steps, folder)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            shown = " ".join(f"{microseconds:.1f}" for microseconds in times)
            print(f"{type(callback).__name__}: {steps:,} steps, us per step by fifths of the run: {shown}")
            print(f"  peak memory grew by {grown:.1f} MiB")
        print(f"file of the baseline: {(folder / 'b.json').stat().st_size / 1024:.0f} KiB; {monitor.verdict.status}")


if __name__ == "__main__":
    main()
