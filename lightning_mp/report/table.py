"""Lay a comparison out as a table of at most 100 columns: one column for each precision, one row for each number.

Pure formatting: every number comes from `report.results`. Precisions stand side by side because seventeen numbers
with their units do not fit beside each other, and because that is how they are compared: along a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_mp.report.candidates import REFERENCE
from lightning_mp.report.results import OK, Comparison, Result, pairing_notes, steps

WIDTH = 100
WORDY_COLUMNS = 5  # with more, "NOT COMPARABLE" does not fit
UNSTEADY = 2.0  # p95 over median; a quiet machine with equal batches stays well below
UNKNOWN = "n/a"
BASELINE = "baseline"  # instead of a verdict
_ERROR_CHARACTERS = 400

Cell = Callable[[Result], str]


def comparison_table(comparison: Comparison) -> Table:
    """The numbers of every precision that was run."""
    title = Text(f"{comparison.name} (seed {comparison.seed})", no_wrap=True, overflow="ignore")  # even if the table is narrow
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("")
    for result in comparison.results:
        table.add_column(result.precision, justify="right", no_wrap=True)
    for section in _sections(comparison):
        for label, cell in section:
            cells = [cell(result) for result in comparison.results]
            if any(text not in (UNKNOWN, BASELINE) for text in cells):  # a row that nobody has says nothing
                table.add_row(label, *cells)
        table.add_section()
    return table


def reading_help(comparison: Comparison) -> list[str]:
    """Plain sentences: the verdicts, what failed and why, and what makes the numbers hard to compare."""
    sentences = [
        *_verdict_sentences(comparison),
        *(
            f"{r.precision} {r.status}: {_shorten(r.error or 'no reason given')}"
            for r in (*comparison.results, *comparison.seed_results)
            if r.status != OK
        ),
        *_unsteady_sentences(comparison.results),
        *pairing_notes(comparison.results),
        *_candidate_notes(comparison.results),
    ]
    return [sentence for sentence in sentences if sentence]


def _sections(comparison: Comparison) -> list[list[tuple[str, Cell]]]:
    any_memory = any(result.memory for result in comparison.results)

    def memory(category: str) -> Cell:
        return lambda r: _number(r.memory.per_parameter[category] if r.memory else None, "{:.2f}")

    def verdict(key: str, form: str) -> Cell:
        return lambda r: _number(r.verdict[key] if r.verdict else None, form)

    def relative(key: str, form: str) -> Cell:
        return lambda r: _number(comparison.relative(r)[key], form)

    return [
        [("status", lambda r: r.status)],
        [
            ("bytes per parameter", lambda r: "" if any_memory else UNKNOWN),
            ("  weights", memory("weights")),
            ("  masters", memory("masters")),
            ("  gradients", memory("gradients")),
            ("  optimizer state", memory("optimizer_state")),
            ("  total", memory("total")),
            (f"  total / {REFERENCE}", relative("bytes_ratio", "{:.2f}x")),
            ("CUDA peak, GiB", lambda r: _number(r.peak_cuda_bytes and r.peak_cuda_bytes / 2**30, "{:.3f}")),
            (
                "process peak RSS, MiB",
                lambda r: _number(r.peak_rss_bytes and r.peak_rss_bytes / 2**20, "{:,.0f}"),
            ),
        ],
        [
            ("tokens per second", lambda r: _number(r.summary.tokens_per_s, "{:,.0f}")),
            ("step time median, ms", lambda r: _number(r.summary.step_time_median_ms, "{:,.2f}")),
            ("step time p95, ms", lambda r: _number(r.summary.step_time_p95_ms, "{:,.2f}")),
            (f"step time / {REFERENCE}", relative("step_time_ratio", "{:.2f}x")),
        ],
        [
            ("steps", lambda r: _number(r.summary.steps, "{:,}")),
            ("  of these skipped", lambda r: _number(r.skipped_steps, "{:,}")),
            ("loss scale, log2", lambda r: _number(r.loss_scale and math.log2(r.loss_scale), "{:g}")),
            ("tail loss", lambda r: _number(r.summary.tail_loss, "{:.4f}")),
            (f"tail loss - {REFERENCE}", relative("tail_loss_gap", "{:+.4f}")),
        ],
        # the sentences below the table say it, too; a wide table has no room for words
        [
            *([("verdict", _verdict_cell)] if len(comparison.results) <= WORDY_COLUMNS else []),
            ("  gap to the baseline", verdict("gap", "{:+.4f}")),
            ("  smallest visible gap", verdict("smallest_visible_gap", "{:.4f}")),
        ],
    ]


def _verdict_cell(result: Result) -> str:
    if result.verdict_status is None and result.precision == REFERENCE:
        return BASELINE
    return result.verdict_status or UNKNOWN


def _verdict_sentences(comparison: Comparison) -> list[str]:
    judged = [result for result in comparison.results if result.verdict]
    sentences = [f"{r.precision} {r.verdict_status}: {r.verdict['explanation']}" for r in judged if r.verdict]
    if not judged and not comparison.baselines:
        sentences.append(f"No baseline to judge by: {_why_no_baseline(comparison)}")
    if len(comparison.baselines) > 1:
        sentences.append(f"The baseline is {len(comparison.baselines)} runs of {REFERENCE} with different seeds.")
    summary = next((result.summary for result in comparison.results if result.summary.steps), None)
    if summary is not None:
        left_out = summary.steps - summary.measured_steps
        sentences.append(
            f"Tail loss is the mean over the last {steps(summary.tail_steps)}; "
            f"{f'step times leave out the first {steps(left_out)}; ' if left_out else ''}"
            "process RSS counts the interpreter and all libraries."
        )
    return sentences


def _why_no_baseline(comparison: Comparison) -> str:
    if REFERENCE not in comparison.precisions:
        return f"add {REFERENCE} to --precisions, or pass --baseline FILE."
    reference = next((result for result in comparison.results if result.precision == REFERENCE), None)
    if reference is None:
        return f"{REFERENCE} was not run."
    return f"{REFERENCE} recorded none." if reference.status == OK else f"{REFERENCE} ended as {reference.status}."


def _unsteady_sentences(results: Sequence[Result]) -> list[str]:
    """A warning where step times scatter so much that their ratios say little."""
    scatter = [
        f"{r.precision} ({r.summary.step_time_p95_ms / r.summary.step_time_median_ms:.1f}x)"
        for r in results
        if r.summary.step_time_p95_ms
        and r.summary.step_time_median_ms
        and r.summary.step_time_p95_ms > UNSTEADY * r.summary.step_time_median_ms
    ]
    if not scatter:
        return []
    return [
        f"Step times were unsteady, p95 over median: {', '.join(scatter)}. Something else used the machine, or the steps "
        "differ; run again before trusting the speeds."
    ]


def _candidate_notes(results: Sequence[Result]) -> list[str]:
    """Each note once, with the precisions it holds for."""
    names: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            names.setdefault(note, []).append(result.precision)
    return [f"{', '.join(of)}: {note}" for note, of in names.items()]


def _number(value: float | None, form: str) -> str:
    text = UNKNOWN if value is None else form.format(value)
    return text[1:] if text[:1] in ("+", "-") and not text.strip("+-0.") else text  # a zero has no sign


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _ERROR_CHARACTERS else f"{flat[:_ERROR_CHARACTERS]} [and so on; see its log.txt]"
