"""`lightning-mp compare`, from the command line to the files on disk. The workers are real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mp.cli import main

sys.path.append(str(Path(__file__).parents[1] / "report"))
from wandb_file import isolate, read

HERE = Path(__file__).parent


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Compare from the folder of the user's code; everything written goes to `tmp_path`."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*args: str) -> int:
        return main(["compare", f"--output-dir={tmp_path / 'runs'}", *args])

    return call


def run_folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []


def test_three_precisions_of_which_one_fails(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = compare(
        "--config", "toy.yaml", "--precisions=32-true,bf16-true,bf16-master", "--seed=11",
        "--set", "model.init_args.raise_in=bf16-true", "trainer.accumulate_grad_batches=2",
        "--trainer.max_steps=8", "--trainer.callbacks+=ModelCheckpoint", "--trainer.precision=32-true",
        "--trainer.precision_plugin.class_path=lightning_mp.MasterWeightPrecision",
        "--trainer.precision_plugin.init_args.master=copy",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0
    (folder,) = run_folders(tmp_path)
    content = json.loads((folder / "comparison.json").read_text())
    results = {result["precision"]: result for result in content["results"]}
    assert list(results) == ["32-true", "bf16-true", "bf16-master"]

    # what is printed
    assert "\x1b" not in printed
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines() if not line.startswith(("Files:", "Report:"))) <= 100
    assert "a [red]user's[/red] mistake in bf16-true" in printed
    assert str(folder) in printed
    assert "the configuration's checkpoint callbacks were left out" in printed

    # the one that fails is a result like the others
    assert [result["status"] for result in results.values()] == ["ok", "failed", "ok"]
    assert "RuntimeError" in results["bf16-true"]["error"]
    assert "Traceback" in (folder / "bf16-true" / "log.txt").read_text()

    # the masters keep the settings of the configuration's plugin: fp32 copies, 4 bytes but for the norm's parameters
    assert 3 < results["bf16-master"]["memory"]["per_parameter"]["masters"] < 4
    assert results["bf16-master"]["weights_fingerprint"] == results["32-true"]["weights_fingerprint"]
    assert results["bf16-master"]["data_order"] == results["32-true"]["data_order"] != {}

    # numbers, and how they were made
    base = results["32-true"]
    assert (base["status"], base["summary"]["steps"]) == ("ok", 8)
    assert base["summary"]["tokens"] == 8 * 2 * 16
    assert base["memory"]["per_parameter"]["total"] == pytest.approx(16, abs=0.2)
    assert base["peak_rss_bytes"] > 100 << 20
    assert content["seed"] == 11
    assert content["device"].startswith("cpu: ")
    assert set(content["versions"]) == {"lightning-mp", "lightning", "torch", "python"}
    assert content["command"][:2] == ["lightning-mp", "compare"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_steps"] == 8

    # files: a curve for each; no checkpoints; the user's output only in the log
    curve = json.loads((folder / "32-true" / "curve.json").read_text())["steps"]
    assert [row["step"] for row in curve] == list(range(1, 9))
    assert all(row["loss"] > 0 and row["step_time_ms"] > 0 and row["tokens"] == 32 for row in curve)
    assert not list(folder.rglob("*.ckpt"))
    assert "the user's own output" in (folder / "32-true" / "log.txt").read_text()
    assert "the user's own output" not in printed

    # Weights & Biases
    run = read(folder / "32-true")
    assert run.run["run_group"] == folder.name
    assert (run.config["precision"], run.config["seed"]) == ("32-true", 11)
    assert run.config["device"] == content["device"]
    assert [row["train/loss"] for row in run.history] == pytest.approx([row["loss"] for row in curve])
    assert run.summary["train/tail_loss"] == pytest.approx(base["summary"]["tail_loss"])
    assert read(folder / "bf16-true").summary["status"] == "failed"


def test_fp16_is_scaled_counted_and_said_to_be_slow_on_a_cpu(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = compare(
        "-c", "toy.yaml", "--precisions=16-master,16-mixed,bf16-master", "--wandb=disabled", "--trainer.max_steps=4",
        "--trainer.precision_plugin.class_path=lightning_mp.MasterWeightPrecision",
        "--trainer.precision_plugin.init_args.loss_scale=lightning_mp.DynamicLossScale",
        "--trainer.precision_plugin.init_args.loss_scale.init_args.init_scale=64",
        "--trainer.precision_plugin.init_args.loss_scale.init_args.growth_interval=1",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "Warning: 16-master, 16-mixed: this is a CPU" in printed.err
    assert "judge its speed on a GPU" in printed.out
    (folder,) = run_folders(tmp_path)
    results = {result["precision"]: result for result in json.loads((folder / "comparison.json").read_text())["results"]}
    for name in ("16-master", "16-mixed"):
        assert (results[name]["skipped_steps"], results[name]["loss_scale"]) == (0, 2.0**9)  # that of the fourth step
    assert (results["bf16-master"]["skipped_steps"], results["bf16-master"]["loss_scale"]) == (None, None)


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], Any]) -> str:
    capsys.readouterr()
    try:
        status = call()
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return " ".join(message.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-c", "toy.yaml", "--precisions=32-true,bf17"], ["bf17", "bf16-master", "32-true"]),
        (["-c", "toy.yaml", "--precisions=auto,auto"], ["auto more than once"]),
        (["-c", "toy.yaml", "--precisions="], ["empty", "bf16-master"]),
        (["-c", "absent.yaml"], ["no such configuration file", "absent.yaml"]),
        (["-c", "toy.yaml", "--trainer.nonsense=1"], ["nonsense"]),
        (["-c", "toy.yaml", "--trainer.max_steps=many"], ["max_steps", "many"]),
        (["-c", "toy.yaml", "--model=toy_modules.Absent"], ["Absent"]),
        (["-c", "toy.yaml", "--set", "trainer.max_steps"], ["KEY=VALUE", "trainer.max_steps"]),
        (["-c", "toy.yaml", "--wandb=cloud"], ["cloud", "offline"]),
        ([], ["--config"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    message = error_of(capsys, lambda: compare(*args))
    assert all(word in message for word in words), message
    assert not run_folders(tmp_path)


def test_a_comparison_of_which_nothing_is_left_ends_with_status_1_and_the_next_gets_its_own_folder(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        args = ["--precisions=32-true", "--wandb=disabled", "--model.kill_in=32-true"]
        assert compare("-c", "toy.yaml", *args) == 1
    folders = run_folders(tmp_path)
    assert len(folders) == 2
    for folder in folders:
        (result,) = json.loads((folder / "comparison.json").read_text())["results"]
        assert "SIGKILL" in result["error"]
        assert not list(folder.rglob("*.wandb"))
    assert "32-true failed: killed by SIGKILL" in capsys.readouterr().out
