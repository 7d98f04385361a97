"""A comparison survives whatever its workers do. The workers here are fakes that need no torch."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_mp.report.compare import Plan, run_comparison
from lightning_mp.report.results import Comparison, Result
from lightning_mp.report.worker import worker_events

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


def run(folder: Path, *precisions: str) -> Comparison:
    comparison = Comparison("group", ("compare",), ("a.yaml",), (), 0, precisions)
    return run_comparison(comparison, Plan(folder, FAKE, "disabled"), Console(file=io.StringIO()))


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "comparison.json").read_text())


def only(comparison: Comparison) -> Result:
    (result,) = comparison.results
    return result


def test_a_finished_run_has_its_numbers_and_its_curve(tmp_path: Path) -> None:
    result = only(run(tmp_path, "32-true"))
    assert (result.status, result.error) == ("ok", None)
    assert result.summary.steps == 10
    assert result.bytes_per_parameter == 8
    curve = json.loads((tmp_path / "32-true" / "curve.json").read_text())
    assert [row["loss"] for row in curve["steps"]] == [2.0 / step for step in range(1, 11)]
    assert curve["steps"][-1] == {
        "step": 10, "loss": 0.2, "tokens": 100, "tokens_so_far": 1000, "step_time_ms": 20.0,
    }  # fmt: skip


def test_everything_a_worker_prints_is_in_its_log(tmp_path: Path) -> None:
    run(tmp_path, "32-true")
    log = (tmp_path / "32-true" / "log.txt").read_text()
    assert "printed before the first event" in log
    assert "to standard error" in log
    assert "@lightning-mp" not in log


def test_a_killed_worker_is_a_result_and_the_others_run(tmp_path: Path) -> None:
    comparison = run(tmp_path, "16-master", "bf16-true", "32-true")
    assert [result.precision for result in comparison.results] == ["32-true", "16-master", "bf16-true"]  # fp32 runs first
    _, killed, finished = comparison.results
    assert killed.status == "failed"
    assert "SIGKILL" in str(killed.error)
    assert finished.status == "ok"
    assert comparison.status == "complete"


def test_a_worker_that_exits_without_a_word_reports_its_last_line(tmp_path: Path) -> None:
    result = only(run(tmp_path, "bf16-mixed"))
    assert result.status == "failed"
    assert "exit status 7" in str(result.error)
    assert "last words" in str(result.error)
    assert result.summary.steps == 10  # what it sent before is kept


def test_a_loss_that_is_not_finite_is_not_ok_and_is_null_on_disk(tmp_path: Path) -> None:
    result = only(run(tmp_path, "16-mixed"))
    assert result.status == "non-finite"
    assert result.error == "the loss became nan at step 1; training was stopped at step 10."
    assert json.loads((tmp_path / "16-mixed" / "curve.json").read_text())["steps"][0]["loss"] is None


def test_ctrl_c_ends_the_worker_and_keeps_what_is_finished(tmp_path: Path) -> None:
    started = time.monotonic()
    comparison = run(tmp_path, "32-true", "auto", "bf16-true")
    assert time.monotonic() - started < 30
    assert comparison.status == "interrupted"
    assert [(r.precision, r.status) for r in comparison.results] == [("32-true", "ok"), ("auto", "interrupted")]
    content = written(tmp_path)
    assert content["status"] == "interrupted"
    assert content["results"][0]["summary"]["steps"] == 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "auto" / "pid").read_text()), 0)


def test_ctrl_c_between_two_runs_keeps_what_is_finished(tmp_path: Path) -> None:
    class Interrupted(Console):
        def print(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    comparison = Comparison("group", (), (), (), 0, ("32-true", "bf16-true"))
    done = run_comparison(comparison, Plan(tmp_path, FAKE, "disabled"), Interrupted(file=io.StringIO()))
    assert done.status == written(tmp_path)["status"] == "interrupted"
    assert [(r["precision"], r["status"]) for r in written(tmp_path)["results"]] == [("32-true", "ok")]


def test_every_finished_result_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    comparison = Comparison("group", (), (), (), 0, ("32-true", "bf16-true"))
    seen = []

    class Watching(Console):
        def print(self, *args: Any, **kwargs: Any) -> None:
            seen.append([r["precision"] for r in written(tmp_path)["results"]])

    run_comparison(comparison, Plan(tmp_path, FAKE, "disabled"), Watching(file=io.StringIO()))
    assert seen[-1] == ["32-true"]  # when the second one's line is printed


def test_the_file_says_how_it_was_made(tmp_path: Path) -> None:
    run(tmp_path, "32-true", "bf16-true")
    content = written(tmp_path)
    assert content["schema_version"] == 1
    assert content["status"] == "complete"
    assert content["versions"] == {"torch": "0"}
    assert content["device"] == "cpu: fake"
    second = content["results"][1]
    assert second["tail_loss_gap"] == pytest.approx(0.05)
    assert second["step_time_ratio"] == second["bytes_ratio"] == 1.0
    assert second["memory"]["per_parameter"]["total"] == 8


def test_closing_the_events_early_ends_the_worker(tmp_path: Path) -> None:
    script = 'import time; print(\'@lightning-mp {"event": "step", "step": 1}\', flush=True); time.sleep(60)'
    started = time.monotonic()
    events = worker_events([sys.executable, "-c", script], tmp_path / "log.txt")
    assert next(events)["step"] == 1
    events.close()
    assert time.monotonic() - started < 10
