"""Run a worker module on two ranks with gloo, and read what they found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(module: str, folder: Path, timeout_s: float = 150) -> None:
    """Run ``python -m module folder`` on two ranks, and end both when the time is up. Each has a log in the folder."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "NODE_RANK": "0"}
    command = [sys.executable, "-m", module, str(folder)]
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        processes = []
        for rank in (0, 1):
            log = stack.enter_context(open(folder / f"rank-{rank}.log", "w"))
            env = {**os.environ, **shared, "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(processes[-1].kill)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # the scenarios that are missing say so
                process.wait(timeout=max(0, deadline - time.monotonic()))


def run_scenarios(scenarios: Mapping[str, Callable[[Path], Any]], folder: Path) -> None:
    """In a worker: run every scenario, keep its results or its traceback, and leave.

    Not through the shutdown of a process group that may be broken.
    """
    rank = os.environ["LOCAL_RANK"]
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario(folder)
        except Exception:
            results[name] = traceback.format_exc()
        torch.save(results, folder / f"rank-{rank}.pt")
    os._exit(0)


def scenarios_of(module: str, folder: Path, timeout_s: float = 150) -> Callable[[str], tuple[Any, Any]]:
    """Launch a worker that saves a dict of scenarios as ``rank-*.pt``, a traceback where one failed.

    Returns:
        A function from a scenario's name to what both ranks found; it fails the test if one did not get there.
    """
    launch(module, folder, timeout_s)
    files = [folder / f"rank-{rank}.pt" for rank in (0, 1)]
    results = [torch.load(file, weights_only=False) if file.exists() else {} for file in files]

    def get(name: str) -> tuple[Any, Any]:
        for rank, found in enumerate(results):
            if name not in found:
                log = (folder / f"rank-{rank}.log").read_text()
                pytest.fail(f"rank {rank} did not come to {name!r}:\n{log[-2000:]}", pytrace=False)
            if isinstance(found[name], str):
                pytest.fail(f"rank {rank}:\n{found[name][-2000:]}", pytrace=False)
        return results[0][name], results[1][name]

    get.folder = folder  # type: ignore[attr-defined]
    return get
