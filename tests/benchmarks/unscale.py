"""Time to unscale and check gradients, against torch's GradScaler on the same gradients.

    python -m tests.benchmarks.unscale [--threads 1] [--rounds 31]

Ours finds the largest magnitude too, which the adaptive scale needs, and reads the result; `GradScaler.unscale_` ends before
it reads whether there was an overflow. With fp16 gradients both make fp32 ones: GradScaler refuses fp16 gradients, so that they
have to be widened before. The candidates alternate in one process; printed are medians, and the median of the ratio in the same
round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import Module, Parameter, ParameterList

from lightning_mp.numerics.loss_scale import StaticLossScale
from lightning_mp.scaling import LossScaling
from tests.benchmarks.machine import describe

SCALE = 2.0
SHAPES = {
    "10 tensors of 1,000,000": [(1000, 1000)] * 10,
    "100 tensors of 65,536": [(256, 256)] * 100,
    "200 tensors of 4,096": [(64, 64)] * 200,
    "2,000 tensors of 100": [(100,)] * 2000,
    "byte-GPT, 3.3M in 4 layers": [
        *[(256,), (256,), (768, 256), (768,), (256, 256), (256,)] * 4,
        *[(256,), (256,), (1024, 256), (1024,), (256, 1024), (256,)] * 4,
        *[(256, 256), (128, 256), (256,), (256,), (256, 256)],
    ],
    "48 layers of 1.8M in 6 tensors": [(384, 384), (384, 1536), (1536, 384), (384, 384), (384,), (1536,)] * 48,
}


def module_with(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> tuple[Module, list[torch.Tensor]]:
    params = [Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
    for param in params:
        param.grad_dtype = None
    return ParameterList(params), [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def give(module: Module, gradients: list[torch.Tensor], dtype: torch.dtype) -> None:
    # fp32 gradients are unscaled in place, and scaled again here
    for param, gradient in zip(module.parameters(), gradients, strict=True):
        param.grad = gradient.mul_(SCALE) if dtype == torch.float32 else gradient.clone()


def with_grad_scaler(module: Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    device = next(module.parameters()).device
    scaler = torch.amp.GradScaler(device=device.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))

    def run() -> None:
        for param in module.parameters():
            if param.grad is not None and param.grad.dtype == torch.float16:
                param.grad = param.grad.float()
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()

    return run


def with_ours(module: Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaling = LossScaling(StaticLossScale(SCALE), checks=True, is_fp16=True)
    scaling.connect(module, [optimizer], may_edit_gradients=False)
    loss = torch.zeros((), device=next(module.parameters()).device)

    def run() -> None:
        # what before_backward does that is no part of the comparison: autograd has just made the gradients
        scaling.after_backward()
        assert scaling.may_step(optimizer)

    def prepare() -> None:
        gradients = [param.grad for param in module.parameters()]
        for param in module.parameters():
            param.grad = None
        scaling.before_backward(loss)
        for param, gradient in zip(module.parameters(), gradients, strict=True):
            param.grad = gradient

    run.prepare = prepare  # type: ignore[attr-defined]
    return run


def measure(name: str, dtype: torch.dtype, rounds: int, device: torch.device) -> None:
    module, gradients = module_with(SHAPES[name], dtype, device)
    times: dict[str, list[float]] = {"GradScaler": [], "ours": []}
    give(module, gradients, dtype)
    candidates = {"GradScaler": with_grad_scaler(module), "ours": with_ours(module)}
    for index in range(rounds + 3):
        for candidate, run in candidates.items():
            give(module, gradients, dtype)
            if hasattr(run, "prepare"):
                run.prepare()
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index >= 3:
                times[candidate].append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["GradScaler"], strict=True))
    medians = {candidate: statistics.median(seconds) * 1e6 for candidate, seconds in times.items()}
    kind = "fp32" if dtype == torch.float32 else "fp16 to fp32"
    print(f"{name:32s} {kind:13s} {medians['GradScaler']:9.0f} us {medians['ours']:9.0f} us {ratio:8.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe(arguments.threads))
    print(f"{'':32s} {'gradients':13s} {'GradScaler':>12s} {'ours':>12s} {'ratio':>9s}")
    for dtype in (torch.float32, torch.float16):
        for name in SHAPES:
            measure(name, dtype, arguments.rounds, device)


if __name__ == "__main__":
    main()
