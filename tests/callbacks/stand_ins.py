"""A logger that keeps its rows, and a precision plugin whose steps follow a script."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import Precision


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
            summary.update(record["summary"]["update"])
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
