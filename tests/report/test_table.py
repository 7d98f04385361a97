"""The printed comparison fits 100 columns and hides nothing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.report.candidates import CANDIDATES
from lightning_mp.report.results import Comparison, Result, summarise
from lightning_mp.report.table import WIDTH, comparison_table, reading_help

MEMORY = PersistentBytes(
    weights=4 * 10**9, masters=0, gradients=4 * 10**9, optimizer_state=8 * 10**9 + 4, buffers=0, parameters=10**9
)


def result(name: str, loss: float = 2.34567, **changes: object) -> Result:
    records = [StepRecord(i + 1, loss, 524_288, 1234.5678) for i in range(10)]
    full = Result(
        name, "ok", summary=summarise(records), memory=MEMORY, peak_rss_bytes=123_456 << 20, peak_cuda_bytes=80 << 30,
        weights_fingerprint="a", data_order={"1": "b"},
    )  # fmt: skip
    return replace(full, **changes)  # type: ignore[arg-type]


def comparison(*results: Result) -> Comparison:
    names = tuple(r.precision for r in results)
    return Comparison("compare-20250131-120000", (), (), (), 17, names, results)


def rendered(of: Comparison) -> str:
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False, markup=False).print(comparison_table(of), *reading_help(of), sep="\n")
    return out.getvalue()


def test_all_known_precisions_with_large_numbers_fit_in_100_columns() -> None:
    text = rendered(comparison(*(result(name) for name in CANDIDATES)))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text
    assert "…" not in text
    header = next(line for line in text.splitlines() if "32-true" in line)
    assert header.split() == list(CANDIDATES)
    assert text.count("424,673") == len(CANDIDATES)  # no number is broken over lines


def test_a_failed_precision_has_its_column_and_its_whole_error() -> None:
    error = "RuntimeError: " + "a long story about sizes " * 10 + "the end"
    text = rendered(comparison(result("32-true"), Result("bf16-true", "failed", error)))
    assert "bf16-true failed: RuntimeError" in text
    assert "the end" in text
    assert "n/a" in text


def test_markup_in_an_error_is_shown_not_obeyed() -> None:
    assert "[red]x[/red]" in rendered(comparison(result("32-true"), Result("bf16-true", "failed", "[red]x[/red]")))


def test_rows_that_nobody_has_are_left_out() -> None:
    text = rendered(comparison(result("32-true", peak_cuda_bytes=None)))
    assert "CUDA" not in text
    assert "process peak RSS, MiB" in text


def test_skipped_steps_and_loss_scale_are_shown_where_there_is_one() -> None:
    text = rendered(comparison(result("32-true"), result("16-master", skipped_steps=3, loss_scale=2.0**19)))
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines()}
    assert rows["of these skipped"] == ["n/a", "3"]
    assert rows["loss scale, log2"] == ["n/a", "19"]
    assert "skipped" not in rendered(comparison(result("32-true")))


def judged(name: str, status: str, gap: float) -> Result:
    return result(
        name, verdict={"status": status, "gap": gap, "smallest_visible_gap": 0.0123, "explanation": f"{name} said so."}
    )


def test_each_verdict_has_its_sentence_and_its_row() -> None:
    runs = [result("32-true"), judged("bf16-mixed", "MATCHES", 0.0004), judged("bf16-true", "NOT COMPARABLE", 0.25)]
    compared = replace(comparison(*runs), baselines=("a", "b", "c"))
    sentences = reading_help(compared)
    assert sentences[:2] == ["bf16-mixed MATCHES: bf16-mixed said so.", "bf16-true NOT COMPARABLE: bf16-true said so."]
    assert "3 runs of 32-true with different seeds" in sentences[2]
    assert "the last 2 steps" in sentences[3]
    assert "first 3 steps" in sentences[3]
    rows = {line[:25].strip(): line[25:].split() for line in rendered(compared).splitlines()}
    assert rows["verdict"] == ["baseline", "MATCHES", "NOT", "COMPARABLE"]
    assert rows["gap to the baseline"] == ["n/a", "+0.0004", "+0.2500"]
    assert rows["smallest visible gap"] == ["n/a", "0.0123", "0.0123"]


def test_many_verdicts_fit_in_100_columns() -> None:
    text = rendered(comparison(*(judged(name, "NOT COMPARABLE", -0.123) for name in CANDIDATES)))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert all(f"{name} NOT COMPARABLE: {name} said so." in text for name in CANDIDATES)


def test_step_times_that_scatter_are_not_to_be_trusted() -> None:
    steady = result("32-true")
    slow = StepRecord(10, 2.0, 1, 5000.0)
    unsteady = summarise([*(StepRecord(i, 2.0, 1, 100.0) for i in range(1, 10)), slow])
    sentences = reading_help(comparison(steady, result("bf16-true", summary=unsteady)))
    assert any("unsteady, p95 over median: bf16-true (50.0x)." in sentence for sentence in sentences)
    assert not any("unsteady" in sentence for sentence in reading_help(comparison(steady)))


def test_without_fp32_the_sentence_says_how_to_get_ratios() -> None:
    assert "add 32-true to --precisions" in reading_help(comparison(result("bf16-true")))[0]


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Result("32-true", "non-finite", "nan"), "32-true ended as non-finite."),
        (Result("32-true", "ok"), "32-true recorded none."),
        (result("bf16-true"), "32-true was not run."),
    ],
)
def test_without_a_baseline_the_sentence_says_why(first: Result, why: str) -> None:
    compared = replace(comparison(first), precisions=("32-true", "bf16-true"))
    assert reading_help(compared)[0] == f"No baseline to judge by: {why}"


def test_a_further_seed_that_failed_is_told() -> None:
    compared = replace(comparison(result("32-true")), seed_results=(Result("32-true-seed1", "failed", "out of memory"),))
    assert "32-true-seed1 failed: out of memory" in reading_help(compared)


def test_the_title_of_a_narrow_table_stays_on_its_line() -> None:
    title = "compare-20250131-120000 (seed 17)"
    assert rendered(comparison(Result("auto", "failed"))).splitlines()[0].strip() == title


def test_a_short_run_is_told_of_in_the_singular_and_leaves_nothing_out() -> None:
    short = summarise([StepRecord(1, 2.0, 1, 5.0)])
    (sentence,) = [text for text in reading_help(comparison(result("32-true", summary=short))) if "Tail loss" in text]
    assert sentence.startswith("Tail loss is the mean over the last 1 step; process RSS")


def test_a_note_is_printed_once_for_all_it_holds_for() -> None:
    both = comparison(result("32-true", notes=("n.",)), result("bf16-true", notes=("n.",)))
    assert reading_help(both)[-1] == "32-true, bf16-true: n."


def test_a_comparison_that_was_interrupted_at_once_still_prints() -> None:
    assert "interrupted" in rendered(comparison(Result("32-true", "interrupted", "interrupted")))
