"""`lightning-mp compare`, from the command line to the files on disk. The workers are real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparison import Compared

from lightning_mp import cli
from lightning_mp.cli import main
from lightning_mp.numerics.baseline import join_baselines, read_baseline
from lightning_mp.report.results import Result

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
        (["-c", "toy.yaml", "--output-dir=toy.yaml"], ["--output-dir", "toy.yaml", "exists"]),
        (["-c", "toy.yaml", "--output-dir=toy.yaml/runs"], ["--output-dir", "toy.yaml/runs", "Not a directory"]),
        (["-c", "toy.yaml", "--baseline=absent.json"], ["--baseline", "absent.json", "no such file"]),
        (["-c", "toy.yaml", "--baseline=toy.yaml"], ["--baseline", "toy.yaml", "not valid JSON"]),
        (["-c", "toy.yaml", "--baseline=."], ["--baseline", "a directory, not a file"]),
        (["-c", "toy.yaml", "--seeds=0"], ["--seeds 0", "1 or more"]),
        (["-c", "toy.yaml", "--seeds=2", "--precisions=auto"], ["--seeds 2", "32-true"]),
        (["-c", "toy.yaml", "--require=bf17"], ["'bf17'", "bf16-mixed, bf16-true, bf16-master."]),
        (["-c", "toy.yaml", "--require="], ["no precision", "bf16-mixed, bf16-true, bf16-master."]),
        (["-c", "toy.yaml", "--require=all", "--precisions=32-true"], ["no precision", "only 32-true is run"]),
        (["-c", "toy.yaml", "--require=32-true"], ["32-true is the baseline here", "--baseline FILE"]),
        (["-c", "toy.yaml", "--require=auto", "--precisions=auto"], ["nothing to match", "Add 32-true", "--baseline FILE"]),
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


# with a baseline


def results_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "comparison.json").read_text())
    return {result["precision"]: result for result in [*content["results"], *content["seed_results"]]}


def test_fp32_runs_first_and_records_a_baseline_for_each_seed(compared: Compared) -> None:
    content = json.loads((compared.folder / "comparison.json").read_text())
    names = ["32-true", "32-true-seed6", "32-true-seed7"]
    files = [str(compared.folder / name / "baseline.json") for name in names]
    assert content["baselines"] == files
    assert [result["precision"] for result in content["seed_results"]] == names[1:]
    assert [result["precision"] for result in content["results"]] == ["32-true", "bf16-master", "bf16-true"]
    joined = join_baselines([read_baseline(file) for file in files])
    assert [(run.seed, run.status, run.is_fp32, run.curve.last_step) for run in joined.runs] == [
        (seed, "finished", True, 25) for seed in (5, 6, 7)
    ]
    assert "The baseline is 3 runs of 32-true with different seeds." in compared.printed
    assert not (compared.folder / "32-true" / "verdict.json").exists()


def test_the_verdict_is_in_every_place(compared: Compared) -> None:
    results = results_of(compared.folder)
    rows = {line[:25].strip(): line[25:].split() for line in compared.printed.splitlines()}
    assert rows["verdict"] == ["baseline", "MATCHES", "DIVERGED"]
    for name, status in (("bf16-master", "MATCHES"), ("bf16-true", "DIVERGED")):
        verdict = results[name]["verdict"]
        assert (verdict["status"], verdict["paired"], verdict["seeds"]) == (status, True, 3)
        assert json.loads((compared.folder / name / "verdict.json").read_text())["status"] == status
        assert len(results[name]["blocks"]) == 25
        assert all(block["band_low"] <= block["band_high"] for block in results[name]["blocks"])
        assert f"{name} {status}: " in compared.printed
        assert f"{name}: ok (25 steps, {status})" in compared.errors
        logged = read(compared.folder / name).summary
        assert logged["divergence/verdict"] == status
        assert logged["divergence/verdict_gap"] == pytest.approx(verdict["gap"])
        assert [logged["divergence/verdict_low"], logged["divergence/verdict_high"]] == pytest.approx(verdict["interval"])
        for key in ("smallest_visible_gap", "coverage", "paired", "seeds", "explanation"):
            assert logged[f"divergence/{key}"] == verdict[key]
    assert results["bf16-true"]["verdict"]["gap"] == pytest.approx(0.5, abs=0.05)
    assert "divergence/verdict" not in read(compared.folder / "32-true").summary


def test_the_exit_status_is_1_if_a_required_precision_diverged(compared: Compared) -> None:
    assert compared.status == 1
    assert "required: bf16-true does not match the baseline (DIVERGED)." in compared.errors
    assert "required: bf16-master" not in compared.errors


def test_a_comparison_has_a_page_and_its_pictures_in_weights_and_biases(compared: Compared) -> None:
    page = (compared.folder / "report.html").read_text()
    assert f"Report: {compared.folder / 'report.html'}" in compared.printed
    assert "bf16-true diverged from 32-true." in page
    assert "bf16-master matches 32-true." in page
    assert "the range of the baseline&#39;s seeds" in page
    run = read(compared.folder / "wandb")
    assert (run.run["display_name"], run.run["run_group"], run.exit_code) == ("report", compared.folder.name, 0)
    pictures = {key.split(".")[0] for row in run.history for key in row if key.startswith("report/")}
    assert {"report/verdicts", "report/loss", "report/memory", "report/step-times"} <= pictures
    assert len(list(compared.folder.glob("wandb/**/*.png"))) == len(pictures)


def test_monitors_of_the_configuration_give_way_to_those_of_the_comparison(compared: Compared) -> None:
    assert [result["status"] for result in results_of(compared.folder).values()] == ["ok"] * 5
    assert "the configuration's MemoryMonitor, DivergenceMonitor gave way to" in compared.printed


def test_a_given_baseline_judges_fp32_too_and_other_settings_are_not_comparable_unless_forced(
    compare: Callable[..., int], compared: Compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = compared.folder / "32-true" / "baseline.json"
    args = ["-c", "toy.yaml", "--precisions=32-true", "--require=all", f"--baseline={baseline}", "--wandb=disabled"]
    for force, status, told in (
        ([], "NOT COMPARABLE", "32-true cannot be compared with the baseline."),
        (["--force"], "MATCHES", "32-true matches the baseline."),
    ):
        # of two rates that are this close, the rule forbids a comparison, and the losses say that they match
        code = compare(*args, "--trainer.max_steps=25", "--model.lr=0.01001", *force)
        printed = capsys.readouterr()
        folder = run_folders(tmp_path)[-1]
        result = results_of(folder)["32-true"]
        assert result["verdict"]["status"] == status
        assert code == (0 if force else 1)
        assert ("required: 32-true does not match the baseline (NOT COMPARABLE)." in printed.err) == (not force)
        assert "the learning rate" in result["verdict"]["explanation"] or force
        assert json.loads((folder / "comparison.json").read_text())["baselines"] == [str(baseline)]
        assert not (folder / "32-true" / "baseline.json").exists()
        page = (folder / "report.html").read_text()
        assert told in page
        assert f'judged by <span class="name">{baseline}</span>' in page
        assert not list(folder.rglob("*.wandb"))


def test_ctrl_c_ends_with_status_130_and_a_page_of_what_there_is(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = compare("-c", "toy.yaml", "--precisions=32-true,bf16-true", "--model.interrupt_in=32-true", "--wandb=disabled")
    assert status == 130
    (folder,) = run_folders(tmp_path)
    assert json.loads((folder / "comparison.json").read_text())["status"] == "interrupted"
    assert "32-true interrupted: it was stopped by Ctrl-C or a signal." in capsys.readouterr().out
    assert "32-true and bf16-true did not finish." in (folder / "report.html").read_text()


def pretend(monkeypatch: pytest.MonkeyPatch, *results: Result) -> None:
    """Compare without workers."""

    def run(comparison: Any, plan: Any, console: Any) -> Any:
        return replace(comparison, results=results, status="complete")

    monkeypatch.setattr(cli, "run_comparison", run)


def test_a_page_that_cannot_be_made_does_not_change_what_the_comparison_found(
    compare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, Result("auto", "ok"))  # and no comparison.json
    assert compare("-c", "toy.yaml", "--precisions=auto") == 0
    printed = capsys.readouterr()
    assert "The report could not be made: " in printed.err
    assert "comparison.json" in printed.err
    assert "Files: " in printed.out


def test_what_is_required_and_was_not_judged_is_said_to_be_so(
    compare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diverged = Result("bf16-true", "non-finite", verdict={"status": "DIVERGED", "explanation": "", "gap": None,
        "smallest_visible_gap": None})  # fmt: skip
    pretend(monkeypatch, Result("32-true", "failed"), Result("auto", "ok"), diverged)
    assert compare("-c", "toy.yaml", "--precisions=32-true,auto,bf16-true,bf16-mixed", "--require=all") == 1
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("required: ")] == [
        "required: auto was not judged, as there is no baseline.",
        "required: bf16-true does not match the baseline (non-finite, DIVERGED).",
        "required: bf16-mixed was not run.",
    ]


def test_an_interrupt_outside_of_the_runs_is_no_traceback(
    compare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    pretend(monkeypatch, Result("auto", "ok"))
    monkeypatch.setattr(cli, "_write_page", interrupted)
    assert compare("-c", "toy.yaml", "--precisions=auto") == 130
    assert capsys.readouterr().err.endswith("Interrupted.\n")
