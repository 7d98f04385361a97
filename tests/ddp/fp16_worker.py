"""What the two ranks of `test_ddp_fp16` run: every scenario in one launch, each with its results in a file per rank.

``python -m tests.ddp.fp16_worker FOLDER`` with ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment. A single
process that accumulates the halves of each batch is the reference. Lightning halves its losses, so its scale is twice that of
the ranks: then both compute the same fp16 numbers.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import AdaptiveLossScale, DynamicLossScale, MasterWeightPrecision
from tests.ddp import worker
from tests.ddp.worker import OPTIONS, quiet_trainer, rank, weights

PRECISIONS = ("16-master", "16-mixed")
WINDOWED = ("plain", "view", "unused")  # DistributedDataParallel itself has no windows in a static graph
CLIPPED = ("plain", "static-view")
#: What is run by precision and option. Under 16-mixed DistributedDataParallel averages in fp32 by itself.
CASES = [("16-master", option) for option in OPTIONS] + [("16-mixed", o) for o in ("plain", "static-view", "unused-view")]
SCALE = 2.0**8
STEPS = 6
#: (step, half): the half of a batch whose gradients overflow in fp16, and the one whose loss is NaN.
OVERFLOWS = ((1, 1), (2, 0))
NANS = ((4, 1),)


def dynamic(ranks: int, **settings: Any) -> DynamicLossScale:
    init_scale = SCALE if ranks == 2 else 2 * SCALE
    return DynamicLossScale(init_scale=init_scale, **{"growth_interval": 2, **settings})


def make_trainer(
    ranks: int, precision: str, scaler: Any = None, plugin: Any = None, ddp: Any = None, **kwargs: Any
) -> L.Trainer:
    """A quiet trainer over one or two processes."""
    scaler = dynamic(ranks) if scaler is None else scaler
    precision_plugin = MasterWeightPrecision(precision, loss_scale=scaler, **(plugin or {}))
    return quiet_trainer(ranks, precision_plugin, ddp, timeout_s=15, **kwargs)


class Notes:
    """For modules of the bf16 worker: notes scales and counts with the masters, and spoils the loss of some half batches."""

    trainer: Any
    steps = STEPS
    overflows: Any = OVERFLOWS
    nans: Any = NANS

    def note(self) -> None:
        super().note()  # type: ignore[misc]
        plugin = self.trainer.precision_plugin
        counts = (plugin.applied_steps, plugin.skipped_steps, plugin.nonfinite_losses)
        self.notes = [*getattr(self, "notes", []), (plugin.loss_scale.scale, *counts)]

    def spoil(self, loss: Tensor, step: int, half: int) -> Tensor:
        if (step, half) in self.overflows:
            loss = loss * 2.0**60
        return loss * math.nan if (step, half) in self.nans else loss

    def loss(self, step: int, half: int) -> Tensor:
        return self.spoil(super().loss(step, half), step, half)  # type: ignore[misc]

    def results(self) -> dict[str, Any]:
        plugin = self.trainer.precision_plugin
        return {
            "masters": self.masters,  # type: ignore[attr-defined]
            "notes": self.notes,
            "after": weights(self),  # type: ignore[arg-type]
            "state": plugin.loss_scale.state_dict(),
            "last": (plugin.last_step_skipped, plugin.last_overflow, plugin.headroom_bits),
            "gradients": getattr(self, "gradients", []),
        }


class Net(Notes, worker.Net):
    """A norm that stays fp32, a frozen layer, and, on demand, layers that are not always used."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})


class ManualNet(Notes, worker.ManualNet):
    """The same in manual optimization."""


class Windowed(Net):
    """Batches of each rank are micro-batches: windows of two, of which one overflows in its first on rank 1 only."""

    steps = 8
    overflows = ((2, 1), (7, 0))
    nans = ((5, 0),)


class Scalar(Notes, worker.Scalar):
    """One weight; its gradients by rank and micro-batch, of which each window is one step."""

    overflows, nans = (), ()

    def __init__(self, gradients: dict[int, list[float]], start: float = 0.0) -> None:
        super().__init__(gradients, start)
        self.notes: list[Any] = []

    def loss(self, step: int, half: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx)


class Gan(Notes, worker.TwoOptimizers):
    """Two networks that take turns; the second's gradients overflow on rank 1 in step 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note()
        single = self.trainer.world_size == 1
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for half in (0, 1) if single else (self.trainer.global_rank,):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * batch_idx + half))
                loss = (self.b(self.a(x)).float() - index).square().mean()
                if (batch_idx, half, index) == (1, 1, 1):
                    loss = loss * 2.0**60
                self.manual_backward(loss / (2 if single else 1))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(STEPS), batch_size=None)


class SharedBackward(Gan):
    """One backward for both optimizers; ``b`` alone overflows, on rank 1 in step 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note()
        single = self.trainer.world_size == 1
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        for half in (0, 1) if single else (self.trainer.global_rank,):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * batch_idx + half))
            loss = self.a(x).float().square().mean()
            factor = 2.0**60 if (batch_idx, half) == (1, 1) else 1.0
            loss = loss + factor * self.b(x).float().square().mean()
            self.manual_backward(loss / (2 if single else 1))
        for optimizer in self.optimizers():
            optimizer.step()


class Private(Net):
    """A layer of each rank's own, which DistributedDataParallel leaves alone, and which overflows on rank 1 only."""

    overflows, nans = (), ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(optimizer="sgd", **kwargs)
        with torch.random.fork_rng():
            torch.manual_seed(100 + rank())
            self.private = nn.Linear(4, 1)
        self._ddp_params_and_buffers_to_ignore = ["private.weight", "private.bias"]
        self.start = weights(self.private)

    def loss(self, step: int, half: int) -> Tensor:
        x = torch.ones(1, 4) * (half + 1)
        factor = 2.0**60 if (step, half) == (1, 1) else 1.0
        return super().loss(step, half) + factor * self.private(x).float().sum()


class OnlyOne(Net):
    """A layer that only rank 1 has, and that overflows there."""

    overflows, nans = (), ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if rank() == 1:
            self.private = nn.Linear(4, 1)
            self._ddp_params_and_buffers_to_ignore = ["private.weight", "private.bias"]

    def loss(self, step: int, half: int) -> Tensor:
        loss = super().loss(step, half)
        if half == 1:
            loss = loss + (2.0**60 if step == 1 else 1.0) * self.private(torch.ones(1, 4)).float().sum()
        return loss


class NoGradients(Net):
    """Manual optimization, in which every second step comes without a backward."""

    overflows, nans = (), ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        step, half = self.halves(batch_idx)
        self.note()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if step % 2 == 0:
            self.manual_backward(self.loss(step, half))
        optimizer.step()


class Hopeless(Net):
    """Overflows for good from step 2 on, on rank 1 only."""

    overflows = tuple((step, 1) for step in range(2, STEPS))
    nans = ()


# --- scenarios -----------------------------------------------------------------------------------------------------------


def fit(module: Any, *args: Any, ckpt_path: Any = None, **kwargs: Any) -> Any:
    make_trainer(*args, **kwargs).fit(module, ckpt_path=ckpt_path)
    return module


def windows(ranks: int) -> dict[str, Any]:
    return {"accumulate_grad_batches": 1 if ranks == 2 else 2}


def automatic(ranks: int, precision: str, option: str, **kwargs: Any) -> dict[str, Any]:
    module = Net(unused="unused" in option)
    return fit(module, ranks, precision, ddp=OPTIONS[option], **windows(ranks), **kwargs).results()


def adaptive(ranks: int, precision: str, option: str) -> dict[str, Any]:
    return automatic(ranks, precision, option, scaler=AdaptiveLossScale(init_scale=SCALE))


def clipped(ranks: int, precision: str) -> dict[str, Any]:
    return fit(Net(optimizer="sgd"), ranks, precision, gradient_clip_val=0.05, **windows(ranks)).results()


def manual(ranks: int, precision: str, option: str, clip: float | None = None) -> dict[str, Any]:
    module = ManualNet(clip=clip, optimizer="sgd", unused="unused" in option)
    return fit(module, ranks, precision, ddp=OPTIONS[option]).results()


def windowed(precision: str, option: str) -> dict[str, Any]:
    return fit(Windowed(), 2, precision, ddp=OPTIONS[option], accumulate_grad_batches=2).results()


def take_turns(ranks: int, precision: str, cls: type[Any]) -> dict[str, Any]:
    return fit(cls(), ranks, precision, ddp=OPTIONS["unused"]).results()


def gan(ranks: int, precision: str) -> dict[str, Any]:
    return take_turns(ranks, precision, Gan)


def shared_backward(ranks: int, precision: str) -> dict[str, Any]:
    return take_turns(ranks, precision, SharedBackward)


def two_gradients(precision: str, gradients: tuple[float, float], scale: float) -> dict[str, Any]:
    """``gradients`` are those of one step on rank 0 and rank 1."""
    module = fit(Scalar({0: [gradients[0]], 1: [gradients[1]]}, start=0.125), 2, precision, scale)
    return {**module.results(), "seen": module.seen}


def long_window(precision: str, option: str) -> dict[str, Any]:
    gradients = {0: [256.0 * 9] + [0.25 * 9] * 8, 1: [0.25 * 9] * 8 + [256.0 * 9]}
    module = fit(Scalar(gradients), 2, precision, 4.0, accumulate_grad_batches=9, ddp=OPTIONS[option])
    return {**module.results(), "seen": module.seen}


def private(precision: str, accumulate: int) -> dict[str, Any]:
    module = fit(Private(), 2, precision, accumulate_grad_batches=accumulate)
    return {**module.results(), "start": module.start}


def only_one(precision: str) -> dict[str, Any]:
    module = fit(OnlyOne(), 2, precision)
    shared = [{name: value for name, value in step.items() if "private" not in name} for step in module.masters]
    return {**module.results(), "masters": shared}


def no_gradients(precision: str) -> dict[str, Any]:
    return fit(NoGradients(), 2, precision).results()


def hopeless(precision: str) -> dict[str, Any]:
    module = Hopeless()
    try:
        fit(module, 2, precision, dynamic(2, min_scale=2.0**-60), {"max_consecutive_skips": 3})
    except FloatingPointError as error:
        return {"error": str(error), "masters": module.masters, "after": weights(module)}
    return {"error": None}


def different_seeds(precision: str) -> dict[str, Any]:
    net = Net(seed=rank())
    before = weights(net)
    return {**fit(net, 2, precision).results(), "before": before}


def evaluated(precision: str) -> dict[str, Any]:
    net = Net(seed=rank())
    before = weights(net)
    make_trainer(2, precision, limit_val_batches=1).validate(net, verbose=False)
    return {"before": before, "after": weights(net)}


class LeftOver(Notes, worker.ManualNet):
    """Manual optimization that clears gradients only before steps 0, 3 and 5; step 1 overflows on rank 1."""

    overflows, nans = ((1, 1),), ()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        step, half = self.halves(batch_idx)
        self.note()
        optimizer = self.optimizers()
        if step in (0, 3, 5):
            optimizer.zero_grad()
        self.manual_backward(self.loss(step, half))
        optimizer.step()


def left_over(precision: str, option: str) -> dict[str, Any]:
    return fit(LeftOver(optimizer="sgd"), 2, precision, ddp=OPTIONS[option]).results()


def files(ranks: int, precision: str, folder: Path) -> dict[str, Any]:
    """One run of two epochs with a file after the first, and a run that goes on from that file."""
    whole = fit(Net(), ranks, precision, max_epochs=2, **windows(ranks)).results()
    name = f"fp16-{ranks}-{precision}"
    half = fit(Net(), ranks, precision, callbacks=[ModelCheckpoint(folder, name)], **windows(ranks)).results()
    path, scaler = folder / f"{name}.ckpt", DynamicLossScale(init_scale=2.0)
    rest = fit(Net(seed=5), ranks, precision, scaler, max_epochs=2, ckpt_path=path, **windows(ranks)).results()
    return {"whole": whole, "half": half, "rest": rest}


def without_a_scale(precision: str) -> dict[str, Any]:
    """``skip_nonfinite`` alone; an infinite gradient without a scale."""

    class Infinite(Net):
        overflows = ()
        nans = ((1, 1),)

    return fit(Infinite(), 2, precision, "none", {"skip_nonfinite": True}).results()


def scenarios(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """All that two ranks run, by name."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for p in PRECISIONS:
        for option in (option for precision, option in CASES if precision == p):
            found[f"automatic {p} {option}"] = lambda p=p, o=option: automatic(2, p, o)
            found[f"manual {p} {option}"] = lambda p=p, o=option: manual(2, p, o)
            if option in CLIPPED:
                found[f"manual clipped {p} {option}"] = lambda p=p, o=option: manual(2, p, o, 0.05)
        for option in ("plain", "static-view", "unused"):
            found[f"adaptive {p} {option}"] = lambda p=p, o=option: adaptive(2, p, o)
        for option in WINDOWED:
            found[f"windowed {p} {option}"] = lambda p=p, o=option: windowed(p, o)
        for option in ("plain", "view"):
            found[f"long window {p} {option}"] = lambda p=p, o=option: long_window(p, o)
        found[f"clipped {p}"] = lambda p=p: clipped(2, p)
        found[f"gan {p}"] = lambda p=p: gan(2, p)
        found[f"shared backward {p}"] = lambda p=p: shared_backward(2, p)
        found[f"fine average {p}"] = lambda p=p: two_gradients(p, (1.0, 2.0**-12), 2.0**10)
        found[f"large average {p}"] = lambda p=p: two_gradients(p, (60000.0, 60000.0), 1.0)
        found[f"too large {p}"] = lambda p=p: two_gradients(p, (1.0, 70000.0), 1.0)
        for accumulate in (1, 2):
            found[f"private {p} {accumulate}"] = lambda p=p, a=accumulate: private(p, a)
        found[f"no gradients {p}"] = lambda p=p: no_gradients(p)
        found[f"different seeds {p}"] = lambda p=p: different_seeds(p)
        found[f"evaluated {p}"] = lambda p=p: evaluated(p)
        for option in ("plain", "static-view"):
            found[f"left over {p} {option}"] = lambda p=p, o=option: left_over(p, o)
        found[f"files {p}"] = lambda p=p: files(2, p, folder)
    for p in ("bf16-master", "bf16-mixed", "32-true"):
        found[f"without a scale {p}"] = lambda p=p: without_a_scale(p)
    for p in PRECISIONS:  # last, as these may end with the ranks apart
        found[f"hopeless {p}"] = lambda p=p: hopeless(p)
    for p in PRECISIONS:
        found[f"only one {p}"] = lambda p=p: only_one(p)
    return found


def main(folder: Path) -> None:
    """Run every scenario, and keep its results or its traceback."""
    results: dict[str, Any] = {}
    for name, scenario in scenarios(folder).items():
        print(f"--- {name}", flush=True)
        try:
            results[name] = scenario()
        except Exception:
            results[name] = traceback.format_exc()
        torch.save(results, folder / f"rank-{rank()}.pt")
        torch.distributed.barrier()  # if the ranks have lost each other, what follows means nothing


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
