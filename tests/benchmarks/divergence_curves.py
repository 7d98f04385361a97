"""What the divergence rule says of real curves: byte-GPT in fp32, in 16 bits, and with planted faults.

    python -m tests.benchmarks.divergence_curves [--steps 150] [--seeds 6] [--only precisions,seeds,faults]

* *precisions*: for each of five seeds, `bf16-master`, Lightning's `bf16-mixed` and its `bf16-true` against the fp32 run of the
  same seed (paired).
* *seeds*: each fp32 seed against a band of three others (unpaired; leave one out).
* *faults*: `bf16-master` with one fault each, against the fp32 run of its seed. Where the recorded settings give the fault
  away, the verdict is NOT COMPARABLE and names it; what the loss alone shows is printed here (`force=True`), with what the
  settings say behind it. fp16 on a CPU is slow, so the stuck loss scale has a small model and a baseline of its own.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import lightning_mp
from examples.byte_gpt import ByteGPT, ByteText
from lightning_mp import BaselineRecorder, DivergenceMonitor, MasterWeightPrecision, StaticLossScale
from lightning_mp.numerics.baseline import join_baselines, read_baseline
from lightning_mp.numerics.divergence import DivergenceTest, Verdict
from tests.benchmarks.machine import describe

LR = 1e-4
SMALL: dict[str, int] = {"n_layer": 2, "width": 64, "context": 64}


class Model(ByteGPT):
    """byte-GPT with places for faults."""

    def __init__(self, *, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.factor


class FreezesALayer(Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.blocks[1].requires_grad_(False)


class HalvesGradients(Callback):
    """Of one layer."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.blocks[1].parameters():
            parameter.grad *= 0.5


class Breaks(Callback):
    """Gives a NaN to a weight before step 100."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 99:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = float("nan")


def fit(
    folder: Path, steps: int, callback: Callback, *, precision: str = "32-true", plugin: Any = None, seed: int = 0,
    data_seed: int | None = None, small: bool = False, callbacks: tuple[Callback, ...] = (), **model: Any,
) -> None:  # fmt: skip
    L.seed_everything(seed, verbose=False)
    size = SMALL if small else {}
    options = {"precision": precision} if plugin is None else {"precision_plugin": plugin}
    trainer = lightning_mp.Trainer(
        **options, max_steps=steps, callbacks=[callback, *callbacks], gradient_clip_val=1.0, accelerator="auto", devices=1,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=10, default_root_dir=folder,
    )  # fmt: skip
    data = ByteText(batch_size=12, seed=seed if data_seed is None else data_seed, context=size.get("context", 128))
    trainer.fit(Model(**{"lr": LR, **size, **model}), datamodule=data)


def record(folder: Path, steps: int, seed: int, **options: Any) -> Path:
    path = folder / f"seed{seed}{'-small' if options.get('small') else ''}.json"
    if not path.exists():
        fit(folder, steps, BaselineRecorder(path), seed=seed, **options)
    return path


def judge(folder: Path, baseline: Path, steps: int, **options: Any) -> DivergenceMonitor:
    monitor = DivergenceMonitor(baseline, force=True, path=folder / "verdict.json")
    fit(folder, steps, monitor, **options)
    return monitor


def line(name: str, verdict: Verdict, steps: int) -> str:
    alarm = verdict.alarm
    when = f"alarm at step {alarm.step} of {steps}" if alarm is not None else "no alarm"
    interval = "" if verdict.interval is None else f" [{verdict.interval[0]:+.4f}, {verdict.interval[1]:+.4f}]"
    gap = "   none" if verdict.gap is None else f"{verdict.gap:+.4f}"
    pairing = "paired" if verdict.paired else "unpaired"
    return f"{name:34s} {verdict.status:13s} gap {gap}{interval}, margin {verdict.margin or 0:.4f}, {pairing}, {when}"


def precisions(folder: Path, steps: int, seeds: int) -> None:
    print("\nPaired with fp32")
    for seed in range(min(seeds, 5)):
        baseline = record(folder, steps, seed)
        for name, options in (
            ("bf16-master", {"plugin": "bf16-master"}),
            ("bf16-mixed", {"precision": "bf16-mixed"}),
            ("bf16-true", {"precision": "bf16-true"}),
        ):
            verdict = judge(folder, baseline, steps, seed=seed, **options).verdict  # type: ignore[arg-type]
            assert verdict is not None
            print(line(f"seed {seed} {name}", verdict, steps), flush=True)


def other_seeds(folder: Path, steps: int, seeds: int) -> None:
    print("\nAn fp32 seed against a band of three others")
    baselines = [read_baseline(record(folder, steps, seed)) for seed in range(seeds)]
    for left_out in range(seeds):
        band = [baselines[(left_out + shift) % seeds] for shift in (1, 2, 3)]
        test = DivergenceTest(join_baselines(band))
        curve = baselines[left_out].runs[0].curve
        for step, loss, samples, tokens in zip(curve.steps, curve.losses, curve.samples, curve.tokens, strict=True):  # type: ignore[arg-type]
            test.add(step, loss, samples, tokens)
        print(line(f"seed {left_out} 32-true", test.verdict(), steps), flush=True)


def faults(folder: Path, steps: int) -> None:
    print("\nPlanted faults, bf16-master, seed 0: what the loss shows, and in brackets what the settings give away")
    planted: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("learning rate 10% higher", {"lr": 1.1 * LR}),
        ("weight decay missing", {"weight_decay": 0.0}),
        ("one layer frozen", {"callbacks": (FreezesALayer(),)}),
        ("gradients of one layer halved", {"callbacks": (HalvesGradients(),)}),
        ("data order changed", {"data_seed": 1}),
        ("NaN at step 100", {"callbacks": (Breaks(),)}),
    ]
    jobs: list[tuple[str, Path, dict[str, Any]]] = [
        (name, record(folder, steps, 0), {"plugin": "bf16-master", **options}) for name, options in planted
    ]
    # so small a factor that fp16 flushes many gradients without a scale; the fp32 run has it, too
    tiny: dict[str, Any] = {"small": True, "factor": 2.0**-12}
    small = record(folder, steps, 0, **tiny)
    for name, scale in (("none (16-master, small loss)", None), ("loss scale stuck at 1", StaticLossScale(1.0))):
        jobs.append((name, small, {"plugin": MasterWeightPrecision("16-master", loss_scale=scale), **tiny}))
    for name, baseline, options in jobs:
        monitor = judge(folder, baseline, steps, **options)
        assert monitor.verdict is not None
        known = "; ".join(difference.text for difference in monitor.verdict.differences)
        print(line(name, monitor.verdict, steps), f"[{known or 'nothing'}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", default="precisions,seeds,faults")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(describe(arguments.threads))
    print(f"byte-GPT, {arguments.steps} steps, lr {LR:g}")
    parts: dict[str, Callable[[Path], None]] = {
        "precisions": lambda folder: precisions(folder, arguments.steps, arguments.seeds),
        "seeds": lambda folder: other_seeds(folder, arguments.steps, arguments.seeds),
        "faults": lambda folder: faults(folder, arguments.steps),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only.split(","):
            parts[name](Path(folder))


if __name__ == "__main__":
    main()
