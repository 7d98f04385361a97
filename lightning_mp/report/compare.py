"""Train one configuration under several precisions, one after another, and keep what each one gave.

The order of events: for each precision start a worker (`report.worker`), show its progress, collect its records, log
them, and when it ends write `<precision>/curve.json` and then `comparison.json` with every result so far. Whatever
happens later, a finished precision is on disk.

fp32 runs first, with as many seeds as were asked for, and records the baseline; the others are judged by it while they train.
A baseline that was given takes its place, and then fp32 is judged like the others.

```
runs/compare-20250131-120000/
  config.yaml            the resolved configuration that every precision trains
  comparison.json
  32-true/               and 32-true-seed1/, ... with more seeds
    worker.json  log.txt  curve.json  metrics/metrics.csv  baseline.json  wandb/
  bf16-master/
    worker.json  log.txt  curve.json  metrics/metrics.csv  verdict.json  wandb/
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_mp.callbacks.divergence import VERDICT_FILE
from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.files import write_json, write_text
from lightning_mp.report.candidates import REFERENCE
from lightning_mp.report.results import (
    FAILED,
    INTERRUPTED,
    NON_FINITE,
    OK,
    Comparison,
    Result,
    curve_json,
    steps,
    summarise,
)
from lightning_mp.report.wandb import Mode, NoRunLog, RunLog, open_run_log
from lightning_mp.report.worker import WorkerSpec, worker_events

BASELINE_FILE = "baseline.json"


@dataclass(frozen=True)
class Plan:
    """How to run a comparison.

    Attributes:
        folder: the comparison's own folder; holds the resolved configuration as `config.yaml`.
        worker_command: the command that runs a worker, to which the path of its `WorkerSpec` is added.
        wandb_mode: "offline", "online" or "disabled".
        settings: further entries for each run's config in Weights & Biases.
        force: judge runs even if their settings differ from the baseline's.
    """

    folder: Path
    worker_command: tuple[str, ...]
    wandb_mode: Mode = "offline"
    settings: Mapping[str, Any] | None = None
    force: bool = False


@dataclass(frozen=True)
class _Job:
    """A run that is to be made."""

    name: str
    precision: str
    seed: int
    records: bool  # a baseline

    @property
    def is_further_seed(self) -> bool:
        return self.name != self.precision


def run_comparison(comparison: Comparison, plan: Plan, console: Console) -> Comparison:
    """Run every precision of `comparison` and return it with the results; `comparison.json` is rewritten after each.

    Ctrl-C ends the worker, keeps what is finished, and returns with status "interrupted".

    Args:
        comparison: names, seed and configuration; without results.
        plan: where and how.
        console: for progress; a terminal gets a bar, anything else one line for each precision.
    """
    _save(comparison, plan)
    try:
        for job in _jobs(comparison):
            with _progress(console) as progress:
                result = _Candidate(job, comparison, plan, progress).run()
            comparison = _with(comparison, job, result, plan)
            if not console.is_terminal:
                console.print(_one_line(result), soft_wrap=True, markup=False, highlight=False)
            if result.status == INTERRUPTED:
                raise KeyboardInterrupt
            _save(comparison, plan)
        comparison = replace(comparison, status="complete")
    except KeyboardInterrupt:  # here, or between two runs
        comparison = replace(comparison, status=INTERRUPTED)
    _save(comparison, plan)
    return comparison


def _jobs(comparison: Comparison) -> list[_Job]:
    """What is run, in order: fp32 with its seeds, then the others as they were asked for."""
    records = not comparison.baselines
    jobs = []
    if REFERENCE in comparison.precisions:
        jobs.append(_Job(REFERENCE, REFERENCE, comparison.seed, records))
        for index in range(1, comparison.seeds):
            seed = comparison.seed + index
            jobs.append(_Job(f"{REFERENCE}-seed{seed}", REFERENCE, seed, records))
    jobs += [_Job(name, name, comparison.seed, False) for name in comparison.precisions if name != REFERENCE]
    return jobs


def _with(comparison: Comparison, job: _Job, result: Result, plan: Plan) -> Comparison:
    """The comparison with one more result, and with its baseline if it made one."""
    if job.is_further_seed:
        comparison = replace(comparison, seed_results=(*comparison.seed_results, result))
    else:
        comparison = replace(comparison, results=(*comparison.results, result))
    file = plan.folder / job.name / BASELINE_FILE
    if job.records and result.status == OK and file.is_file():
        comparison = replace(comparison, baselines=(*comparison.baselines, str(file)))
    return comparison


class _Candidate:
    """One run while it runs."""

    def __init__(self, job: _Job, comparison: Comparison, plan: Plan, progress: Progress) -> None:
        self._job, self._comparison, self._plan = job, comparison, plan
        self._name = name = job.name
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
        spec = WorkerSpec(
            precision=self._job.precision,
            config=config,
            folder=str(self._folder),
            seed=self._job.seed,
            record_baseline=str(self._folder / BASELINE_FILE) if self._job.records else None,
            baselines=() if self._job.records else self._comparison.baselines,
            force=self._plan.force,
            verdict=str(self._folder / VERDICT_FILE),
        )
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
            self._update(status=INTERRUPTED, error="it was stopped by Ctrl-C or a signal.")
        self._update(summary=summarise(self._records), verdict=_read_verdict(self._folder / VERDICT_FILE))
        write_json(self._folder / "curve.json", curve_json(self._name, self._records))
        self._log.finish(self._result)
        return self._result

    def _open_log(self) -> None:
        self._log, problem = open_run_log(self._plan.wandb_mode, self._name, self._comparison.name, self._folder)
        if problem:
            self._update(notes=(problem,))
        self._log.configure({"precision": self._job.precision, "seed": self._job.seed, **(self._plan.settings or {})})

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
            loss = self._records[step - 1].loss
            error = f"the loss became {loss} at step {step}; training was stopped at step {self._records[-1].step}."
        elif not self._records:
            status, error = FAILED, "training ended before the first optimizer step."
        self._update(
            status=status,
            error=error,
            memory=PersistentBytes(**event["memory"]) if event["memory"] else None,
            peak_rss_bytes=event["peak_rss_bytes"],
            peak_cuda_bytes=event["peak_cuda_bytes"],
            weights_fingerprint=event["weights_fingerprint"],
            data_order=event["data_order"],
            skipped_steps=event["skipped_steps"],
            loss_scale=event["loss_scale"],
            details=event["details"],
            notes=(*self._result.notes, *event["notes"]),
        )

    def _failed(self, event: Mapping[str, Any]) -> None:
        self._update(status=FAILED, error=event["error"])

    def _update(self, **changes: Any) -> None:
        self._result = replace(self._result, **changes)


def _read_verdict(file: Path) -> dict[str, Any] | None:
    """What the worker's `DivergenceMonitor` wrote, if it came to that."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


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
    judged = f", {result.verdict_status}" if result.verdict_status else ""
    return f"{result.precision}: {result.error or result.status} ({steps(result.summary.steps)}{judged})"


def _save(comparison: Comparison, plan: Plan) -> None:
    write_json(plan.folder / "comparison.json", comparison.as_json())
