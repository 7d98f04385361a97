"""What is logged to Weights & Biases is in the offline file, with no network and no key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from wandb_file import isolate, read

from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.report.results import Result, summarise
from lightning_mp.report.wandb import LOSS, STEP_TIME, TOKENS, NoRunLog, log_pictures, open_run_log, plain, summary

RECORDS = [StepRecord(step, 1.0 / step, 128, 5.0) for step in range(1, 6)]
MEMORY = PersistentBytes(weights=20, masters=20, gradients=20, optimizer_state=80, buffers=0, parameters=10)


def test_two_runs_in_one_process_are_two_files_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "shared")  # as a shell that resumed a run leaves it
    for name in ("32-true", "bf16-master"):
        (tmp_path / name).mkdir()
        log, problem = open_run_log("offline", name, "compare-1", tmp_path / name)
        assert problem is None
        log.configure({"precision": name, "seed": 3, "dtype": torch.bfloat16, "folder": tmp_path})
        log.log(RECORDS[:3])
        log.log(RECORDS[3:])
        log.finish(Result(name, "ok", summary=summarise(RECORDS), memory=MEMORY, peak_rss_bytes=1 << 30))

    files = [read(tmp_path / name) for name in ("32-true", "bf16-master")]
    assert files[0].run["run_id"] != files[1].run["run_id"]
    for name, file in zip(("32-true", "bf16-master"), files, strict=True):
        assert (file.run["display_name"], file.run["run_group"]) == (name, "compare-1")
        assert file.config["precision"] == name
        assert (file.config["seed"], file.config["dtype"]) == (3, "torch.bfloat16")
        assert [row[LOSS] for row in file.history] == pytest.approx([record.loss for record in RECORDS])
        assert [row[TOKENS] for row in file.history] == [128, 256, 384, 512, 640]
        assert {row[STEP_TIME] for row in file.history} == {5.0}
        assert {LOSS, STEP_TIME, TOKENS} <= set(file.metrics)
        assert all(file.metrics[key]["step_metric"] == TOKENS for key in (LOSS, STEP_TIME))
        assert file.summary["memory/bytes_per_parameter"] == 14
        assert file.summary["memory/peak_rss_mib"] == 1024
        assert file.summary["throughput/tokens_per_s"] == pytest.approx(128 / 0.005)
        assert file.summary["throughput/step_time_median_ms"] == 5
        assert file.summary["train/tail_loss"] == pytest.approx(0.2)
        assert file.exit_code == 0


def test_disabled_logs_nothing_and_needs_no_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises
    log, problem = open_run_log("disabled", "x", "g", tmp_path)
    assert isinstance(log, NoRunLog)
    assert problem is None


def test_a_wandb_that_does_not_start_is_a_note_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log, problem = open_run_log("offline", "x", "g", tmp_path)
    assert isinstance(log, NoRunLog)
    assert "not logged to Weights & Biases" in str(problem)


def test_a_summary_leaves_out_what_is_unknown() -> None:
    assert summary(Result("x", "failed", "why")) == {"status": "failed", "error": "why"}


def test_a_config_becomes_strings_and_numbers() -> None:
    assert plain({"a": [torch.float16, 1, None, True], 2: {"p": Path("x")}}) == {
        "a": ["torch.float16", 1, None, True],
        "2": {"p": "x"},
    }


def test_pictures_without_a_wandb_are_a_note_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "The pictures were not logged" in str(log_pictures("offline", "g", tmp_path, {"loss": b""}))
