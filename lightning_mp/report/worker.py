"""One candidate in a process of its own, and the lines it sends home.

A fresh process for each precision means that peak memory belongs to that precision alone and that a crash, or the
kernel's out-of-memory killer, ends one candidate and not the comparison.

The worker's standard output is the channel: one event a line, JSON behind a marker. `EventWriter` moves the real
standard output aside at once and points it at the log, so that nothing the user's code prints gets between the
events. The events:

| event    | content |
|----------|---------|
| started  | total_steps (or null), device, world_size, versions, precision_in_use, plugin |
| step     | step: how far it is; sent at most ten times a second |
| records  | records: a list of [step, loss, tokens, step_time_ms] |
| finished | memory, peak_rss_bytes, peak_cuda_bytes, weights_fingerprint, data_order, non_finite_step, |
|          | skipped_steps, loss_scale, details, notes |
| failed   | error |
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mp.callbacks.gradients import GradientRangeMonitor
from lightning_mp.callbacks.memory import PARTS
from lightning_mp.callbacks.run_recorder import RunRecorder, StepRecord
from lightning_mp.cost.devices import device_name, versions
from lightning_mp.cost.memory import peak_cuda_bytes, peak_rss_bytes

MARKER = "@lightning-mp "
_TERMINATE_GRACE_S = 3.0
_EXIT_GRACE_S = 60.0
_STEP_INTERVAL_S = 0.1
_POLL_S = 0.5


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to know; it travels as a JSON file.

    Attributes:
        precision: a name from `report.candidates`.
        config: the resolved configuration of the comparison.
        folder: where this candidate's files go.
        seed: for weights, data order and everything else.
        record_baseline: the file to record a baseline in, or None.
        baselines: the files of the baseline that the run is judged by; may be empty.
        force: judge it even if settings differ.
        verdict: where the verdict goes.
    """

    precision: str
    config: str
    folder: str
    seed: int
    record_baseline: str | None = None
    baselines: tuple[str, ...] = ()
    force: bool = False
    verdict: str | None = None

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, path: str) -> WorkerSpec:
        """From a JSON file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class EventWriter:
    """The worker's end. Only rank zero speaks."""

    def __init__(self) -> None:
        sys.stdout.flush()
        # a private copy of the channel; file descriptor 1 itself becomes a second standard error
        self._channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, event: str, **content: Any) -> None:
        """Write one event. Raises `BrokenPipeError` once the parent is gone, which ends an orphaned worker."""
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            self._channel.write(f"{MARKER}{json.dumps({'event': event, **content})}\n")
            self._channel.flush()


class WorkerReport(Callback):
    """Sends a fit's events as they happen; owns the `RunRecorder` that makes them."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._last_sent = 0.0
        self._scaling = _ScalingHistory()
        self.recorder = RunRecorder(self._send_step, self._send_records, stop_at_non_finite=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is about to run."""
        total = trainer.estimated_stepping_batches
        plugin = type(trainer.precision_plugin)
        self._events.send(
            "started",
            total_steps=int(total) if total != float("inf") else None,
            device=device_name(pl_module.device),
            world_size=trainer.world_size,
            versions=versions(),
            precision_in_use=str(trainer.precision),
            plugin=f"{plugin.__module__}.{plugin.__qualname__}",
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follow the loss scale. Numbers on the host: no sync."""
        self._scaling.follow(trainer)

    def finish(self, trainer: Trainer, notes: Sequence[str]) -> None:
        """Say what it cost. Call when `fit` has returned."""
        recorder = self.recorder
        self._events.send(
            "finished",
            memory=asdict(recorder.memory) if recorder.memory else None,
            peak_rss_bytes=peak_rss_bytes(),
            peak_cuda_bytes=peak_cuda_bytes(trainer.strategy.root_device),
            weights_fingerprint=recorder.weights,
            data_order=recorder.data_order,
            non_finite_step=recorder.non_finite_step,
            **_loss_scaling(trainer.precision_plugin),
            details={**_measured(trainer), **self._scaling.as_dict()},
            notes=list(notes),
        )

    def _send_step(self, step: int) -> None:
        now = time.monotonic()
        if now - self._last_sent >= _STEP_INTERVAL_S:
            self._last_sent = now
            self._events.send("step", step=step)

    def _send_records(self, records: Sequence[StepRecord]) -> None:
        self._events.send("records", records=[astuple(record) for record in records])


class _ScalingHistory:
    """At which steps the loss scale changed, and which steps were skipped."""

    def __init__(self) -> None:
        self._scale: float | None = None
        self._skipped = 0
        self._changes: list[tuple[int, float]] = []
        self._skipped_at: list[int] = []

    def follow(self, trainer: Trainer) -> None:
        plugin: Any = trainer.precision_plugin
        scale = getattr(plugin, "loss_scale", None)
        if scale is None or scale.kind == "none":
            return
        if plugin.skipped_steps != self._skipped:
            self._skipped = plugin.skipped_steps
            self._skipped_at.append(trainer.global_step)
        if plugin.gradient_scale != self._scale:
            self._scale = plugin.gradient_scale
            self._changes.append((trainer.global_step, math.log2(plugin.gradient_scale)))

    def as_dict(self) -> dict[str, Any]:
        if not self._changes:
            return {}
        return {"loss_scale_changes": self._changes, "skipped_at": self._skipped_at}


def _measured(trainer: Trainer) -> dict[str, Any]:
    """What the monitors know in the end, for the report."""
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    details: dict[str, Any] = {
        "memory_gib": {part: metrics[key] for part in PARTS if (key := f"memory/{part}_gib") in metrics},
        "updates_lost_fraction": metrics.get("gradients/updates_lost_fraction"),
    }
    for key, label in (
        ("memory/run_peak_gib", "peak memory of the device"),
        ("memory/peak_rss_gib", "peak resident memory of the process"),
    ):
        if key in metrics:
            details |= {"peak_gib": metrics[key], "peak_label": label}
            break
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientRangeMonitor) and (found := callback.exponents) is not None:
            used = found.counts.nonzero()[0]
            if len(used):
                low, high = used[0], used[-1] + 1
                details["exponents"] = {
                    "edges": found.edges[low : high + 1].tolist(),
                    "counts": found.counts[low:high].tolist(),
                    "flushed": found.flushed,
                    "scale": found.scale,
                }
    return {name: value for name, value in details.items() if value is not None}


def _loss_scaling(plugin: Any) -> dict[str, float | None]:
    """How loss scaling ended: null where there is none."""
    scale = getattr(plugin, "loss_scale", None)
    if scale is None or scale.kind == "none":
        return {"skipped_steps": None, "loss_scale": None}
    return {"skipped_steps": plugin.skipped_steps, "loss_scale": plugin.gradient_scale}


def worker_events(command: Sequence[str], log: Path) -> Generator[Mapping[str, Any], None, None]:
    """Start a worker and yield its events; the last one is always `finished` or `failed`.

    Whatever ends the iteration early (Ctrl-C, an exception, closing the generator) ends the worker and its children.

    Args:
        command: the worker's command line.
        log: where its output goes.
    """
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log_file, start_new_session=True
        )
        try:
            for line in _lines(process):
                event = _parse(line)
                if event is None:
                    log_file.write(line)  # printed before the worker moved its output
                    log_file.flush()
                    continue
                yield event
                if event["event"] in ("finished", "failed"):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_EXIT_GRACE_S)
                    return
            yield {"event": "failed", "error": _death(process.wait(), log)}
        finally:
            _end(process)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines of a process's standard output until it is closed, or the process is dead and silent.

    A thread reads. A signal that arrives just before a blocking read would wait for the next line, and Ctrl-C with it;
    waiting for the queue with a timeout lets it through.
    """
    queue: SimpleQueue[bytes | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                queue.put(line)
        queue.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        dead = process.poll() is not None
        try:
            line = queue.get(timeout=_POLL_S)
        except Empty:
            if dead:
                return  # a child of its own still holds the pipe
            continue
        if line is None:
            return
        yield line


def _parse(line: bytes) -> Mapping[str, Any] | None:
    text = line.decode("utf-8", errors="replace")
    return json.loads(text[len(MARKER) :]) if text.startswith(MARKER) else None


def _death(code: int, log: Path) -> str:
    """Why a worker ended without a word."""
    if code < 0:
        name = signal.Signals(-code).name
        reason = " The kernel does this when memory runs out." if name == "SIGKILL" else ""
        return f"killed by {name}.{reason}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit status {code}{f': {lines[-1]}' if lines else ''}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker that still runs, and every process in its group."""
    if process.poll() is None:
        for send in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            with contextlib.suppress(ProcessLookupError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, send)  # it leads its own group
                else:
                    process.send_signal(send)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_GRACE_S)
                break
