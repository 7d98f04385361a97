"""A logger that keeps its rows, a precision plugin whose steps follow a script, and an accelerator's allocator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import Precision

from lightning_mp.cost.allocator import ALLOCATED, RESERVED, RETRIES


class Watched:
    """An experiment of Weights & Biases that tells what was asked of it, and does nothing."""

    def __init__(self, touched: list[str]) -> None:
        self.__dict__["touched"] = touched

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.touched.append(name)
        return lambda *args, **kwargs: None

    config = summary = property(lambda self: (self.touched.append("config or summary"), {})[1])


class WatchedWandb(WandbLogger):
    """As Lightning's, without a run: what is asked of its experiment is in ``touched``."""

    def __init__(self, touched: list[str]) -> None:
        Logger.__init__(self)
        self.touched = touched

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        """What WandbLogger does on other ranks."""

    experiment = property(lambda self: Watched(self.touched))
    name = version = save_dir = None  # type: ignore[assignment]
    log_metrics = log_hyperparams = save = finalize = after_save_checkpoint = ignore


class Rows(Logger):
    """Keeps what it is given, one row per call, and has a run summary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> Rows:
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def column(self, key: str) -> list[Any]:
        """The values of a key by row, None in rows that lack it; rows without any key of its group are left out."""
        group = key.split("/")[0] + "/"
        return [row.get(key) for row in self.rows if any(name.startswith(group) for name in row)]


def wandb_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History and summary of the only offline Weights & Biases run under the folder, once it is written to its end."""
    (path,) = folder.rglob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    deadline = time.monotonic() + 10
    while True:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        if any(record["type"] == "exit" for record in records) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    summary: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary.update(record["summary"].get("update", {}))
    return [record["history"]["item"] for record in records if record["type"] == "history"], summary


class Scripted(Precision):
    """Steps as usual, except where the script says that a gradient overflowed; it backs its scale off then.

    Args:
        overflows: for each attempt at a step, the name of the parameter where an overflow began, or None for a healthy one.
        after_hook: decide to skip only after ``on_before_optimizer_step``, as clipping does.
    """

    precision: Any = "16-mixed"

    def __init__(self, overflows: Iterable[str | None] = (), scale: float = 2.0**10, after_hook: bool = False) -> None:
        self.overflows = list(overflows)
        self.after_hook = after_hook
        self.scale = self.gradient_scale = scale
        self.applied_steps = self.skipped_steps = self.nonfinite_losses = 0
        self.headroom_bits: float | None = None
        self.last_overflow: str | None = None

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = closure()
        origin = self.overflows.pop(0) if self.overflows else None
        self.gradient_scale = self.scale
        if origin is None or self.after_hook:
            self._after_closure(model, optimizer)
        if origin is None:
            optimizer.step(**kwargs)
            self.applied_steps += 1
            self.headroom_bits = 3.5
        else:
            self.skipped_steps += 1
            self.last_overflow, self.headroom_bits = origin, None
            self.scale /= 2
        return result


class FakeAccelerator:
    """Stands in for torch's accelerator memory functions, or for those of ``torch.cuda`` where the former are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int = 10_000, module: Any = torch.accelerator) -> None:
        self.total, self.resets, self.used = total, 0, 0
        self.stats: dict[str, int] = {ALLOCATED: 0, RESERVED: 0, RETRIES: 0}
        if module is not torch.accelerator:
            for name in ("memory_stats", "reset_peak_memory_stats", "get_memory_info"):
                monkeypatch.delattr(torch.accelerator, name)
        monkeypatch.setattr(module, "memory_stats", lambda device: dict(self.stats))
        monkeypatch.setattr(module, "reset_peak_memory_stats", lambda device: self.reset())
        name = "get_memory_info" if module is torch.accelerator else "mem_get_info"
        monkeypatch.setattr(module, name, lambda device: (0, self.total))

    def use(self, size: int) -> None:
        """Let so many bytes be in tensors."""
        self.used = size
        self.stats[ALLOCATED] = max(self.stats[ALLOCATED], size)
        self.stats[RESERVED] = max(self.stats[RESERVED], 2 * size)

    def reset(self) -> None:
        self.resets += 1
        self.stats[ALLOCATED] = self.used  # what is reserved stays so, as it is cached
