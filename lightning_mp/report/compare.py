"""Train one configuration under several precisions, one after another, and keep what each one gave.

The order of events: for each precision start a worker (`report.worker`), show its progress, collect its records, log
them, and when it ends write `<precision>/curve.json` and then `comparison.json` with every result so far. Whatever
happens later, a finished precision is on disk.

```
runs/compare-20250131-120000/
  config.yaml            the resolved configuration that every precision trains
  comparison.json
  bf16-master/
    worker.json  log.txt  curve.json  wandb/
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.report.files import write_json, write_text
from lightning_mp.report.results import (
    FAILED,
    INTERRUPTED,
    NON_FINITE,
    OK,
    Comparison,
    Result,
    curve_json,
    summarise,
)
from lightning_mp.report.wandb import Mode, NoRunLog, RunLog, open_run_log
from lightning_mp.report.worker import WorkerSpec, worker_events


@dataclass(frozen=True)
class Plan:
    """How to run a comparison.

    Attributes:
        folder: the comparison's own folder; holds the resolved configuration as `config.yaml`.
        worker_command: the command that runs a worker, to which the path of its `WorkerSpec` is added.
        wandb_mode: "offline", "online" or "disabled".
        settings: further entries for each run's config in Weights & Biases.
    """

    folder: Path
    worker_command: tuple[str, ...]
    wandb_mode: Mode = "offline"
    settings: Mapping[str, Any] | None = None


def run_comparison(comparison: Comparison, plan: Plan, console: Console) -> Comparison:
    """Run every precision of `comparison` and return it with the results; `comparison.json` is rewritten after each.

    Ctrl-C ends the worker, keeps what is finished, and returns with status "interrupted".

    Args:
        comparison: names, seed and configuration; without results.
        plan: where and how.
        console: for progress; a terminal gets a bar, anything else one line for each precision.
    """
    _save(comparison, plan)
    for name in comparison.precisions:
        with _progress(console) as progress:
            candidate = _Candidate(name, comparison, plan, progress)
            result = candidate.run()
        comparison = replace(comparison, results=(*comparison.results, result))
        if not console.is_terminal:
            console.print(_one_line(result), soft_wrap=True, markup=False, highlight=False)
        if result.status == INTERRUPTED:
            comparison = replace(comparison, status=INTERRUPTED)
            break
        _save(comparison, plan)
    else:
        comparison = replace(comparison, status="complete")
    _save(comparison, plan)
    return comparison


class _Candidate:
    """One precision while it runs."""

    def __init__(self, name: str, comparison: Comparison, plan: Plan, progress: Progress) -> None:
        self._name, self._comparison, self._plan = name, comparison, plan
        self._folder = plan.folder / name
        self._records: list[StepRecord] = []
        self._result = Result(name, FAILED, "the worker said nothing")
        self._log: RunLog = NoRunLog()
        self._progress = progress
        self._bar = progress.add_task(f"{name}: starting", total=None)

    def run(self) -> Result:
        """Train it in a worker; never raises for what the worker does, nor for Ctrl-C."""
        self._folder.mkdir(parents=True, exist_ok=True)
        spec_file = self._folder / "worker.json"
        config = str(self._plan.folder / "config.yaml")
        spec = WorkerSpec(self._name, config, str(self._folder), self._comparison.seed)
        write_text(spec_file, spec.dump() + "\n")
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "started": self._started,
            "step": self._advance,
            "records": self._read,
            "finished": self._finished,
            "failed": self._failed,
        }
        try:
            self._open_log()
            command = [*self._plan.worker_command, str(spec_file)]
            with closing(worker_events(command, self._folder / "log.txt")) as events:
                for event in events:
                    handlers[event["event"]](event)
        except KeyboardInterrupt:
            self._update(status=INTERRUPTED, error="stopped before it finished")
        self._update(summary=summarise(self._records))
        write_json(self._folder / "curve.json", curve_json(self._name, self._records))
        self._log.finish(self._result)
        return self._result

    def _open_log(self) -> None:
        self._log, problem = open_run_log(self._plan.wandb_mode, self._name, self._comparison.name, self._folder)
        if problem:
            self._update(notes=(problem,))
        self._log.configure({"precision": self._name, "seed": self._comparison.seed, **(self._plan.settings or {})})

    def _started(self, event: Mapping[str, Any]) -> None:
        started = {key: value for key, value in event.items() if key != "event"}
        self._update(started=started)
        self._log.configure(started)
        self._progress.update(self._bar, description=self._name, total=event["total_steps"])

    def _advance(self, event: Mapping[str, Any]) -> None:
        self._progress.update(self._bar, completed=event["step"])

    def _read(self, event: Mapping[str, Any]) -> None:
        records = [StepRecord(*values) for values in event["records"]]
        self._records += records
        self._log.log(records)
        loss = records[-1].loss
        shown = self._name if loss is None else f"{self._name}: loss {loss:.4f}"
        self._progress.update(self._bar, completed=records[-1].step, description=shown)

    def _finished(self, event: Mapping[str, Any]) -> None:
        step = event["non_finite_step"]
        status, error = OK, None
        if step is not None:
            status = NON_FINITE
            error = f"the loss became {self._records[step - 1].loss} at step {step}; training stopped there."
        elif not self._records:
            status, error = FAILED, "training ended before the first optimizer step."
        self._update(
            status=status,
            error=error,
            memory=PersistentBytes(**event["memory"]) if event["memory"] else None,
            peak_rss_bytes=event["peak_rss_bytes"],
            peak_cuda_bytes=event["peak_cuda_bytes"],
            weights_fingerprint=event["weights_fingerprint"],
            batches_fingerprint=event["batches_fingerprint"],
            skipped_steps=event["skipped_steps"],
            loss_scale=event["loss_scale"],
            notes=(*self._result.notes, *event["notes"]),
        )

    def _failed(self, event: Mapping[str, Any]) -> None:
        self._update(status=FAILED, error=event["error"])

    def _update(self, **changes: Any) -> None:
        self._result = replace(self._result, **changes)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _one_line(result: Result) -> str:
    return f"{result.precision}: {result.error or result.status} ({result.summary.steps} steps)"


def _save(comparison: Comparison, plan: Plan) -> None:
    write_json(plan.folder / "comparison.json", comparison.as_json())
