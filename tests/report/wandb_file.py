"""Read an offline Weights & Biases run back from its file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class WandbFile:
    """What the file holds, in order."""

    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep wandb offline, and everything it writes in `folder`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        path = folder / name.lower()
        path.mkdir(exist_ok=True)
        monkeypatch.setenv(name, str(path))


def read(folder: Path) -> WandbFile:
    """Read the only `.wandb` file under `folder`; it may be completed some milliseconds after `finish`."""
    (path,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + 10
    while True:
        content = _parse(path)
        if content.exit_code is not None or time.monotonic() > deadline:
            return content
        time.sleep(0.05)


def _parse(path: Path) -> WandbFile:
    lines = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    content = WandbFile()
    for record in map(json.loads, lines):
        body = record.get(record["type"], {})
        if record["type"] == "run":
            content.run = body
        elif record["type"] == "exit":
            content.exit_code = body.get("exit_code", 0)
        elif record["type"] == "config":
            content.config.update(body["update"])
        elif record["type"] == "history":
            content.history.append(body["item"])
        elif record["type"] == "summary":
            content.summary.update(body.get("update", {}))
        elif record["type"] == "alert":
            content.alerts.append(body)
        elif record["type"] == "metric":
            content.metrics[body.get("name") or body["glob_name"]] = body
    return content
