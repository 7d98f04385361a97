"""Time of a whole training step of byte-GPT: master weights against Lightning's own precisions.

    python -m tests.benchmarks.train_step [--threads 2] [--rounds 16] [--steps 8]

Short fits of each candidate alternate in one process, so that what else the machine does falls on all of them alike. A step is
timed by RunRecorder, from batch start to batch end; the first three of each fit are left out. Printed are the median over all
steps, and the median over rounds of the ratio to ``bf16-mixed`` in the same round.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from typing import Any

import lightning as L
import torch

import lightning_mp
from examples.byte_gpt import ByteGPT, ByteText
from lightning_mp import MasterWeightPrecision
from lightning_mp.callbacks.run_recorder import RunRecorder
from tests.benchmarks.machine import describe

WARM_UP = 3


def trainer_for(candidate: str, **kwargs: Any) -> L.Trainer:
    if candidate.startswith("bf16-master"):
        storage = "copy" if candidate.endswith("copy") else "split"
        return lightning_mp.Trainer(precision_plugin=MasterWeightPrecision("bf16-master", master=storage), **kwargs)
    return L.Trainer(precision=candidate, **kwargs)


def fit(candidate: str, steps: int, batch_size: int, clip: float | None) -> list[float]:
    L.seed_everything(0, verbose=False)
    recorder = RunRecorder()
    with tempfile.TemporaryDirectory() as root:
        trainer = trainer_for(
            candidate,
            max_steps=steps + WARM_UP,
            callbacks=[recorder],
            gradient_clip_val=clip,
            accelerator="auto",
            devices=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
        )
        trainer.fit(ByteGPT(lr=1e-4), datamodule=ByteText(batch_size=batch_size))
    return [record.step_time_ms for record in recorder.records[WARM_UP:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient_clip_val; 0 for none")
    parser.add_argument(
        "--candidates", default="bf16-mixed,32-true,bf16-true,bf16-master,bf16-master copy", help="the first is the reference"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    candidates = arguments.candidates.split(",")
    times: dict[str, list[list[float]]] = {candidate: [] for candidate in candidates}
    for round_index in range(arguments.rounds):
        # each candidate comes first as often as any other
        shift = round_index % len(candidates)
        for candidate in candidates[shift:] + candidates[:shift]:
            times[candidate].append(fit(candidate, arguments.steps, arguments.batch_size, arguments.clip or None))
    print(describe(arguments.threads))
    print(f"{arguments.rounds} rounds of {arguments.steps} steps, batch size {arguments.batch_size}, clip {arguments.clip}")
    print(f"{'':18s} {'median step':>12s} {'ratio':>7s}   ratios by round")
    reference = [statistics.median(milliseconds) for milliseconds in times[candidates[0]]]
    for candidate in candidates:
        medians = [statistics.median(milliseconds) for milliseconds in times[candidate]]
        ratios = [median / base for median, base in zip(medians, reference, strict=True)]
        everything = statistics.median([ms for milliseconds in times[candidate] for ms in milliseconds])
        by_round = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{candidate:18s} {everything:9.1f} ms {statistics.median(ratios):7.3f}   {by_round}")


if __name__ == "__main__":
    main()
