"""What the two ranks of `test_ddp` run: every scenario in one launch, each with its results in a file per rank.

``python -m tests.ddp.worker FOLDER`` with ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment. The modules
are also run in a single process, by the tests, as the reference: two ranks see the halves of a batch at the same time, a single
process sees them one after the other and accumulates them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp
from lightning_mp import MasterWeightPrecision

STORAGES = ("split", "copy")
STEPS = 4
#: Options of DistributedDataParallel.
OPTIONS = {
    "plain": {},
    "static": {"static_graph": True},
    "static-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused-view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "small-buckets": {"bucket_cap_mb": 1e-4},
}
A7 = 65  # micro-batches in the window of case A7


def quiet_trainer(ranks: int, plugin: MasterWeightPrecision, ddp: Any = None, timeout_s: int = 20, **kwargs: Any) -> L.Trainer:
    """A quiet trainer over one or two processes."""
    strategy: Any = DDPStrategy(timeout=timedelta(seconds=timeout_s), **(ddp or {})) if ranks == 2 else "auto"
    settings = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": strategy,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in kwargs.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        **kwargs,
    }
    return lightning_mp.Trainer(precision_plugin=plugin, **settings)


def make_trainer(ranks: int, storage: str, plugin: dict[str, Any] | None = None, ddp: Any = None, **kwargs: Any) -> L.Trainer:
    """A trainer with bf16 masters. Over one process, each pair of micro-batches is accumulated."""
    return quiet_trainer(ranks, MasterWeightPrecision("bf16-master", master=storage, **(plugin or {})), ddp, **kwargs)


class Module(L.LightningModule):
    """Writes the masters down at the start of each step and at the end; subclasses give the loss of a half batch."""

    steps = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.masters: list[dict[str, Tensor]] = []

    def halves(self, batch_idx: int) -> tuple[int, int]:
        """The step, and which half of its batch is due here."""
        return (batch_idx, self.trainer.global_rank) if self.trainer.world_size == 2 else divmod(batch_idx, 2)

    def note(self) -> None:
        self.masters.append(self.trainer.precision_plugin.masters())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step, half = self.halves(batch_idx)
        if half == 0 or self.trainer.world_size == 2:
            self.note()
        return self.loss(step, half)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch_idx, 0)

    def on_train_end(self) -> None:
        self.note()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(self.steps if self.trainer.world_size == 2 else 2 * self.steps), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=None)


class Net(Module):
    """A norm that stays fp32, a frozen layer, and, on demand, tied weights and layers that are not always used."""

    def __init__(self, seed: int = 0, optimizer: str = "adamw", unused: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.optimizer, self.unused = optimizer, unused
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(4, 16)
            self.norm = nn.LayerNorm(16)
            self.second = nn.Linear(16, 16, bias=False)
            self.third = nn.Linear(16, 16, bias=False)
            if tied:
                self.third.weight = self.second.weight
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.last = nn.Linear(16, 1)
            if unused:
                self.never, self.sometimes, self.by_rank = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def loss(self, step: int, half: int) -> Tensor:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + half))
        hidden = self.norm(torch.relu(self.first(x)))
        hidden = self.third(torch.tanh(self.second(hidden))) + self.frozen(hidden)
        if self.unused and step % 2 == 1:
            hidden = hidden + self.sometimes(hidden)
        if self.unused and half == step % 2:
            hidden = hidden + self.by_rank(hidden)
        return (self.last(hidden) - x.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class ManualNet(Net):
    """The same in manual optimization, with clipping if asked for. ``halves`` are accumulated in a single process."""

    def __init__(self, clip: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.clip = clip
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        step, half = self.halves(batch_idx)
        optimizer = self.optimizers()
        if self.trainer.world_size == 2:
            self.note()
            optimizer.zero_grad()
            self.manual_backward(self.loss(step, half))
        else:
            if half == 0:
                self.note()
                optimizer.zero_grad()
            self.manual_backward(self.loss(step, half) / 2)
            if half == 0:
                return
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})


class Scalar(Module):
    """One weight, whose gradient is what ``gradient`` says, and SGD with lr 1."""

    steps = 1

    def __init__(self, gradients: dict[int, list[float]], start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))
        self.by_rank = gradients
        self.seen: list[tuple[torch.dtype, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * self.by_rank[self.trainer.global_rank][batch_idx]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append((self.weight.grad.dtype, self.weight.grad.item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(len(self.by_rank[0])), batch_size=None)


class ManualScalar(Scalar):
    """The same in manual optimization: one step after all micro-batches, each of which is synchronised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == len(self.by_rank[0]) - 1:
            self.optimizers().step()


class TwoOptimizers(Module):
    """Two networks and two optimizers that take turns, as in adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note()
        both = self.trainer.world_size == 1
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for half in (0, 1) if both else (self.trainer.global_rank,):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * batch_idx + half))
                self.manual_backward((self.b(self.a(x)) - index).square().mean() / (2 if both else 1))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.a, self.b)], []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(STEPS), batch_size=None)


# --- scenarios: (folder) -> results --------------------------------------------------------------------------------------


def fit(module: Module, *args: Any, ckpt_path: Any = None, **kwargs: Any) -> Module:
    make_trainer(*args, **kwargs).fit(module, ckpt_path=ckpt_path)
    return module


def automatic(ranks: int, storage: str, option: str) -> dict[str, Any]:
    module = fit(Net(unused="unused" in option), ranks, storage, ddp=OPTIONS[option], **windows(ranks))
    return {"masters": module.masters, "after": weights(module)}


def clipped(ranks: int, storage: str) -> dict[str, Any]:
    module = fit(Net(optimizer="sgd"), ranks, storage, gradient_clip_val=0.05, **windows(ranks))
    return {"masters": module.masters}


def manual(ranks: int, storage: str, option: str, clip: float | None = None) -> dict[str, Any]:
    module = fit(ManualNet(clip=clip, optimizer="sgd", unused="unused" in option), ranks, storage, ddp=OPTIONS[option])
    return {"masters": module.masters, "gradients": module.gradients}


def two_optimizers(ranks: int, storage: str) -> dict[str, Any]:
    return {"masters": fit(TwoOptimizers(), ranks, storage, ddp=OPTIONS["unused"]).masters}


def tied(storage: str, option: str) -> dict[str, Any]:
    return {"masters": fit(Net(tied=True), 2, storage, ddp=OPTIONS[option]).masters}


def different_seeds(storage: str) -> dict[str, Any]:
    net = Net(seed=rank())
    before = weights(net)
    fit(net, 2, storage)
    return {"before": before, "masters": net.masters, "after": weights(net)}


def evaluated(storage: str) -> dict[str, Any]:
    net = Net(seed=rank())
    before = weights(net)
    make_trainer(2, storage, limit_val_batches=1).validate(net, verbose=False)
    return {"before": before, "after": weights(net)}


def two_gradients(storage: str, reduce_dtype: str) -> dict[str, Any]:
    module = fit(Scalar({0: [1.0], 1: [2.0**-9]}, start=1.0), 2, storage, {"reduce_dtype": reduce_dtype})
    return {"masters": module.masters, "seen": module.seen}


def long_window(storage: str, option: str) -> dict[str, Any]:
    large, small = 256.0 * A7, 0.25 * A7  # Lightning divides the loss by the number of micro-batches
    gradients = {0: [large] + [small] * (A7 - 1), 1: [small] * (A7 - 1) + [large]}
    module = fit(Scalar(gradients), 2, storage, accumulate_grad_batches=A7, ddp=OPTIONS[option])
    return {"masters": module.masters, "seen": module.seen}


def long_manual_window(storage: str, option: str) -> dict[str, Any]:
    gradients = {0: [256.0] + [0.25] * 8, 1: [256.0] + [0.5] * 8}
    module = fit(ManualScalar(gradients), 2, storage, ddp=OPTIONS[option])
    return {"masters": module.masters, "seen": module.seen}


def accumulated(storage: str, reduce_dtype: str, option: str) -> dict[str, Any]:
    ddp = OPTIONS[option]
    return {"masters": fit(Net(), 2, storage, {"reduce_dtype": reduce_dtype}, accumulate_grad_batches=2, ddp=ddp).masters}


def second_fit(ranks: int, storage: str, reduce_dtype: str) -> dict[str, Any]:
    net = Net()
    for _ in range(2):
        fit(net, ranks, storage, {"reduce_dtype": reduce_dtype}, **windows(ranks))
    dtypes = {param.dtype for param in net.parameters()} | {
        param.grad.dtype for param in net.parameters() if param.grad is not None
    }
    return {"masters": net.masters, "after": weights(net), "dtypes": sorted(map(str, dtypes))}


def files(ranks: int, storage: str, folder: Path) -> dict[str, Any]:
    """One run of two epochs with a file after the first, and a run that goes on from that file."""
    whole = fit(Net(), ranks, storage, max_epochs=2, **windows(ranks))
    half = Net()
    name = f"{ranks}-{storage}"
    fit(half, ranks, storage, callbacks=[ModelCheckpoint(folder, name)], **windows(ranks))
    rest = fit(Net(seed=5), ranks, storage, max_epochs=2, ckpt_path=folder / f"{name}.ckpt", **windows(ranks))
    return {"whole": whole.masters, "half": half.masters, "rest": rest.masters, "after": weights(rest)}


def windows(ranks: int) -> dict[str, Any]:
    return {"accumulate_grad_batches": 1 if ranks == 2 else 2}


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def scenarios(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """All that two ranks run, by name."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for storage in STORAGES:
        for option in OPTIONS:
            found[f"automatic {storage} {option}"] = lambda s=storage, o=option: automatic(2, s, o)
            if option in ("plain", "static-view"):
                found[f"tied {storage} {option}"] = lambda s=storage, o=option: tied(s, o)
            found[f"manual {storage} {option}"] = lambda s=storage, o=option: manual(2, s, o)
            if "unused" not in option:  # a single process clips what is in only one of two micro-batches in bf16
                found[f"manual clipped {storage} {option}"] = lambda s=storage, o=option: manual(2, s, o, clip=0.05)
        found[f"clipped {storage}"] = lambda s=storage: clipped(2, s)
        found[f"two optimizers {storage}"] = lambda s=storage: two_optimizers(2, s)
        found[f"evaluated {storage}"] = lambda s=storage: evaluated(s)
        found[f"different seeds {storage}"] = lambda s=storage: different_seeds(s)
        for option in ("plain", "view"):  # DistributedDataParallel itself has no windows in a static graph
            found[f"long window {storage} {option}"] = lambda s=storage, o=option: long_window(s, o)
        for option in ("plain", "static", "view", "static-view"):
            found[f"long manual window {storage} {option}"] = lambda s=storage, o=option: long_manual_window(s, o)
        for reduce_dtype in ("fp32", "parameter"):
            found[f"two gradients {storage} {reduce_dtype}"] = lambda s=storage, r=reduce_dtype: two_gradients(s, r)
            found[f"second fit {storage} {reduce_dtype}"] = lambda s=storage, r=reduce_dtype: second_fit(2, s, r)
            for option in ("plain", "view"):
                name = f"accumulated {storage} {reduce_dtype} {option}"
                found[name] = lambda s=storage, r=reduce_dtype, o=option: accumulated(s, r, o)
        found[f"files {storage}"] = lambda s=storage: files(2, s, folder)
    return found


def main(folder: Path) -> None:
    """Run every scenario, and keep its results or its traceback."""
    results: dict[str, Any] = {}
    for name, scenario in scenarios(folder).items():
        try:
            results[name] = scenario()
        except Exception:
            results[name] = traceback.format_exc()
        torch.save(results, folder / f"rank-{rank()}.pt")
        torch.distributed.barrier()  # if the ranks have lost each other, what follows means nothing


if __name__ == "__main__":
    main(Path(sys.argv[1]))
