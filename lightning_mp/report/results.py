"""What a comparison found: one `Result` for each precision, and the `Comparison` that holds them.

Pure data and arithmetic. Every number is computed from the step records, so it can be computed again from `curve.json`.

- Step time: the first `WARMUP_STEPS` steps are left out (at least one step stays). p95 is the nearest-rank
percentile: the
  smallest time that at least 95% of the steps do not exceed.
- Tokens per second: tokens of those same steps over their summed step time, so waiting for data is not in it.
- Tail loss: mean loss over the last 20% of the steps, at least one.
- Gap: tail loss minus the reference's. Positive is worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.report.candidates import REFERENCE

SCHEMA_VERSION = 1
WARMUP_STEPS = 3
TAIL_FRACTION = 0.2

#: Verdicts of a run that is as good as the baseline.
MATCHING = ("MATCHES", "BETTER")

OK, FAILED, NON_FINITE, INTERRUPTED = "ok", "failed", "non-finite", "interrupted"


@dataclass(frozen=True)
class Summary:
    """The numbers of one run. None where there is nothing to compute it from."""

    steps: int = 0
    measured_steps: int = 0
    tokens: int | None = None
    tokens_per_s: float | None = None
    step_time_median_ms: float | None = None
    step_time_p95_ms: float | None = None
    tail_steps: int = 0
    tail_loss: float | None = None


@dataclass(frozen=True)
class Result:
    """One precision: how it ended, and what it cost.

    Attributes:
        precision: the name it was asked for by.
        status: `ok`, `failed`, `non-finite` or `interrupted`.
        error: why it is not `ok`.
        summary: step time, throughput and loss; also of the steps before a failure.
        memory: persistent bytes, or None if the run did not reach its second step.
        peak_rss_bytes: the worker process's peak resident set, interpreter and libraries included.
        peak_cuda_bytes: `torch.cuda.max_memory_allocated` of the worker, None without CUDA.
        weights_fingerprint: of the initial weights before conversion.
        data_order: hashes of some of the samples that were consumed, by position.
        started: what the worker said of itself when training began: device, versions, precision in use, plugin.
        skipped_steps: optimizer steps that were skipped by loss scaling; None without a loss scale.
        loss_scale: the loss scale at the end; None without one.
        verdict: the run against the baseline, as :meth:`lightning_mp.numerics.divergence.Verdict.as_dict` has it, with the
            ``blocks`` that it rests on; None if it was not judged.
        details: further measurements for the report: ``memory_gib`` by part, ``peak_gib`` with ``peak_label``, ``exponents`` of
            gradients, ``updates_lost_fraction``, ``loss_scale_changes`` (pairs of a step and the log2 of the scale from there
            on) and ``skipped_at`` (steps); what is unknown is left out.
        notes: what a reader should know, one sentence each.
    """

    precision: str
    status: str
    error: str | None = None
    summary: Summary = field(default_factory=Summary)
    memory: PersistentBytes | None = None
    peak_rss_bytes: int | None = None
    peak_cuda_bytes: int | None = None
    weights_fingerprint: str | None = None
    data_order: Mapping[str, str] = field(default_factory=dict)
    started: Mapping[str, Any] = field(default_factory=dict)
    skipped_steps: int | None = None
    loss_scale: float | None = None
    verdict: Mapping[str, Any] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def verdict_status(self) -> str | None:
        """``MATCHES``, ``DIVERGED`` and so on; None if it was not judged."""
        return self.verdict["status"] if self.verdict else None

    @property
    def bytes_per_parameter(self) -> float | None:
        """Persistent bytes per parameter, buffers left out."""
        return self.memory.per_parameter["total"] if self.memory else None


@dataclass(frozen=True)
class Comparison:
    """All results so far, with what is needed to run it again.

    Attributes:
        seeds: how many seeds of fp32 make the baseline, if one is recorded.
        baselines: files of the baseline: those that were given, or those that were recorded so far.
        required: precisions that have to match the baseline.
        seed_results: the fp32 runs with further seeds, named ``32-true-seed<N>``.
    """

    name: str
    command: tuple[str, ...]
    config_files: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int
    precisions: tuple[str, ...]
    results: tuple[Result, ...] = ()
    status: str = "running"
    seeds: int = 1
    baselines: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    seed_results: tuple[Result, ...] = ()

    @property
    def reference(self) -> Result | None:
        """The fp32 run, if it was asked for and reached a number."""
        return next((r for r in self.results if r.precision == REFERENCE and r.status == OK), None)

    @property
    def missed(self) -> tuple[Result | str, ...]:
        """Those of the required precisions that do not match the baseline: their results, or names if they were not run."""
        results = {result.precision: result for result in self.results}
        wanted = [results.get(name, name) for name in self.required]
        return tuple(r for r in wanted if isinstance(r, str) or r.status != OK or r.verdict_status not in MATCHING)

    def relative(self, result: Result) -> dict[str, float | None]:
        """A result against the reference: two ratios and the gap in tail loss."""
        base = self.reference or Result(REFERENCE, FAILED)
        same_length = result.summary.steps == base.summary.steps  # else the tails are of different parts of the curve
        return {
            "step_time_ratio": _ratio(result.summary.step_time_median_ms, base.summary.step_time_median_ms),
            "bytes_ratio": _ratio(result.bytes_per_parameter, base.bytes_per_parameter),
            "tail_loss_gap": _difference(result.summary.tail_loss, base.summary.tail_loss) if same_length else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Plain containers, strings and numbers: the content of `comparison.json`."""
        started = next((result.started for result in self.results if result.started), {})
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "status": self.status,
            "command": list(self.command),
            "config_files": list(self.config_files),
            "overrides": list(self.overrides),
            "seed": self.seed,
            "versions": started.get("versions"),
            "device": started.get("device"),
            "reference": REFERENCE,
            "warmup_steps": WARMUP_STEPS,
            "precisions": list(self.precisions),
            "seeds": self.seeds,
            "baselines": list(self.baselines),
            "required": list(self.required),
            "results": [self._result_json(result) for result in self.results],
            "seed_results": [self._result_json(result) for result in self.seed_results],
        }

    def _result_json(self, result: Result) -> dict[str, Any]:
        content = asdict(result)
        content.update(content.pop("details"))
        verdict = content["verdict"]
        content["blocks"] = verdict.pop("blocks", []) if verdict else []
        if result.memory:
            content["memory"]["total"] = result.memory.total
            content["memory"]["per_parameter"] = result.memory.per_parameter
        return {**content, **self.relative(result), "curve": f"{result.precision}/curve.json"}


def summarise(records: Sequence[StepRecord]) -> Summary:
    """The numbers of a run from its steps; see the module's docstring for each definition."""
    if not records:
        return Summary()
    measured = records[min(WARMUP_STEPS, len(records) - 1) :]
    times = sorted(record.step_time_ms for record in measured)
    tail = records[-max(1, round(len(records) * TAIL_FRACTION)) :]
    losses = [record.loss for record in tail if record.loss is not None]
    tokens = _sum_tokens(measured)
    return Summary(
        steps=len(records),
        measured_steps=len(measured),
        tokens=_sum_tokens(records),
        tokens_per_s=_ratio(tokens, sum(times) / 1e3),
        step_time_median_ms=statistics.median(times),
        step_time_p95_ms=times[math.ceil(0.95 * len(times)) - 1],
        tail_steps=len(tail),
        tail_loss=statistics.fmean(losses) if losses else None,
    )


def curve_json(precision: str, records: Sequence[StepRecord]) -> dict[str, Any]:
    """The content of `curve.json`: for each step its loss, tokens, tokens consumed so far, and time."""
    rows, consumed = [], 0
    for record in records:
        consumed += record.tokens or 0
        rows.append({**asdict(record), "tokens_so_far": consumed if record.tokens is not None else None})
    return {"schema_version": SCHEMA_VERSION, "precision": precision, "steps": rows}


def pairing_notes(results: Sequence[Result]) -> list[str]:
    """Sentences on runs that did not start from the first run's weights, or did not see its data."""
    notes = []
    for field_name, what in (("weights_fingerprint", "initial weights"), ("data_order", "order of data")):
        known = [(r.precision, getattr(r, field_name)) for r in results if getattr(r, field_name)]
        different = [name for name, fingerprint in known if not _agree(fingerprint, known[0][1])]
        if different:
            notes.append(
                f"{', '.join(different)}: not the same {what} as {known[0][0]}, so do not compare losses point by "
                "point. Something draws random numbers in another order, or without the seed."
            )
        unknown = [r.precision for r in results if r.status == OK and not getattr(r, field_name)]
        if unknown:
            notes.append(f"{', '.join(unknown)}: {what} could not be fingerprinted, so the same {what} is not proven.")
    return notes


def _agree(fingerprint: Any, other: Any) -> bool:
    """Whether fingerprints are equal; those of data where both have one, as one run may be the longer one."""
    if isinstance(fingerprint, Mapping):
        return all(fingerprint[position] == other[position] for position in fingerprint.keys() & other.keys())
    return bool(fingerprint == other)


def steps(count: int) -> str:
    """Such as ``1 step`` or ``1,500 steps``."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def _sum_tokens(records: Sequence[StepRecord]) -> int | None:
    counts = [record.tokens for record in records if record.tokens is not None]
    return sum(counts) if counts else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _difference(value: float | None, base: float | None) -> float | None:
    return value - base if value is not None and base is not None else None
