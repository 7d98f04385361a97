"""Time and memory of an optimizer step on masters, against torch's own fused AdamW on fp32 parameters.

    python -m tests.benchmarks.optimizer_step [--threads 1] [--rounds 15]

The candidates alternate in one process, so that what else the machine does falls on all of them alike. Printed are medians over
the rounds, and the median of the ratio to torch in the same round. "edit check" is what it takes, beside the step, to find out
whether somebody wrote to the parameters since the last one: for split masters, where hooks or callbacks could edit them, to
remember the parameters and to compare them when the next forward begins; for copies, to compare them with the copies. That of
copies is part of the step as the plugin makes it, and is also in the row "copy, checked".
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import Parameter

from lightning_mp.masters import Masters
from lightning_mp.swap import BucketedStep, prepare
from tests.benchmarks.machine import describe
from tests.instruments import TrackBytes

MIB = 2**20
BUCKET_MIB = 4.0  # the plugin's default


def parameters(count: int, size: int, device: torch.device) -> list[Parameter]:
    return [Parameter(torch.randn(size, device=device) * 0.02) for _ in range(count)]


def give_gradients(params: list[Parameter]) -> None:
    for param in params:
        param.grad = torch.randn_like(param, requires_grad=False)


def torch_fp32(count: int, size: int, device: torch.device) -> Callable[[], object]:
    params = parameters(count, size, device)
    give_gradients(params)
    return torch.optim.AdamW(params, lr=1e-5, fused=True).step


def on_masters(storage: str, count: int, size: int, device: torch.device) -> tuple[Masters, BucketedStep]:
    params = parameters(count, size, device)
    masters = Masters(storage)  # type: ignore[arg-type]
    masters.guarding = False
    for index, param in enumerate(params):
        masters.adopt(param, str(index))
    give_gradients(params)
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
    prepare(optimizer, masters)
    return masters, BucketedStep(optimizer, masters, BUCKET_MIB * MIB)


def without_check(masters: Masters, step: BucketedStep) -> Callable[[], object]:
    def run() -> None:
        masters.settle, settle = (lambda: None), masters.settle  # type: ignore[method-assign]
        step.run()
        masters.settle = settle  # type: ignore[method-assign]

    return run


def candidates(count: int, size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    split, split_step = on_masters("split", count, size, device)
    copy, copy_step = on_masters("copy", count, size, device)

    def guard() -> None:
        split.guarding = True
        split.end_step()
        split.drop_guards()
        split.guarding = False  # the step itself is timed without

    return {
        "torch fp32": torch_fp32(count, size, device),
        "split": split_step.run,
        "split edit check": guard,
        "copy": without_check(copy, copy_step),
        "copy edit check": copy.settle,
        "copy, checked": copy_step.run,
    }


def measure(steps: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 2):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def peak_temporary_mib(storage: str, count: int, size: int, device: torch.device) -> float:
    masters, step = on_masters(storage, count, size, device)
    step.run()
    again = BucketedStep(step._optimizer, masters, BUCKET_MIB * MIB)
    with TrackBytes() as tracker:
        again.run()
    return tracker.peak / MIB


def table(count: int, size: int, rounds: int, device: torch.device) -> None:
    times = measure(candidates(count, size, device), rounds, device)
    print(f"\n{count} tensors of {size:,} elements")
    print(f"  {'':18s} {'per step':>11s} {'per parameter':>14s} {'per tensor':>12s} {'ratio':>7s} {'temporary memory':>17s}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, times["torch fp32"], strict=True))
        memory = f"{peak_temporary_mib(name, count, size, device):.2f} MiB" if name in ("split", "copy") else ""
        print(
            f"  {name:18s} {median * 1e3:8.2f} ms {median / count / size * 1e9:11.2f} ns {median / count * 1e6:9.1f} us"
            f" {ratio:6.2f}x {memory:>17s}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe(arguments.threads) + f"; bucket {BUCKET_MIB} MiB")
    for count, size in ((1, 1_000_000), (10, 1_000_000), (100, 1_000_000), (2_000, 100), (2_000, 5_000)):
        table(count, size, arguments.rounds, device)


if __name__ == "__main__":
    main()
