"""`lightning-mp fit | validate | test | predict`, run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_mp.cli import main

HERE = Path(__file__).parent
CONFIG = str(HERE / "toy.yaml")

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line as from the folder of the user's code, with everything it writes in `tmp_path`."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(HERE))])
    for name in ("toy_modules",):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(command: str, *args: str, config: str | None = CONFIG) -> int:
        files = ["--config", config] if config else []
        return main([command, *files, f"--trainer.default_root_dir={tmp_path}", *args])

    return call


def configs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("config*.yaml"))


def checkpoint(folder: Path) -> str:
    (path,) = folder.rglob("*.ckpt")
    return str(path)


def error_of(call: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that must end with status 2 and without a traceback."""
    capsys.readouterr()
    try:
        status: Any = call()
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return " ".join(message.split())


# running


def test_fit_finds_classes_in_the_current_directory_and_saves_a_config_that_reloads(run: Run, tmp_path: Path) -> None:
    assert run("fit") == 0
    (saved,) = configs(tmp_path)
    assert saved.parent.name == "version_0"
    assert yaml.safe_load(saved.read_text())["trainer"]["precision_plugin"] == "bf16-master"
    assert run("fit", config=str(saved)) == 0
    first, second = configs(tmp_path)
    assert first.parent != second.parent
    old, new = (yaml.safe_load(path.read_text()) for path in (first, second))
    assert old["model"] == new["model"]
    assert old["trainer"] == new["trainer"]


def test_two_runs_under_wandb_both_finish_and_both_keep_their_config(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for lr in (0.1, 0.2):
        logger = ["--trainer.logger=WandbLogger", f"--trainer.logger.save_dir={tmp_path}"]
        assert run("fit", *logger, "--trainer.logger.offline=true", f"--model.lr={lr}") == 0
        wandb.finish()
    files = [path for path in configs(tmp_path) if "wandb" not in path.relative_to(tmp_path).parts]
    assert len({path.parent for path in files}) == 2
    assert {yaml.safe_load(path.read_text())["model"]["init_args"]["lr"] for path in files} == {0.1, 0.2}


def test_a_run_without_a_logger_keeps_its_config_too(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("fit", "--trainer.logger=false", "--trainer.enable_checkpointing=false") == 0
    assert len(configs(tmp_path)) == 2


def test_a_folder_that_is_used_again_keeps_both_configs(run: Run, tmp_path: Path) -> None:
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.version=fixed"]
    for _ in range(2):
        assert run("fit", *logger) == 0
    assert [path.name for path in configs(tmp_path)] == ["config-2.yaml", "config.yaml"]


def test_callbacks_can_be_appended(run: Run, tmp_path: Path) -> None:
    add = ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks+=RichModelSummary"]
    assert run("fit", *add) == 0
    (saved,) = configs(tmp_path)
    names = [entry["class_path"].rsplit(".")[-1] for entry in yaml.safe_load(saved.read_text())["trainer"]["callbacks"]]
    assert names == ["LearningRateMonitor", "RichModelSummary"]


def test_predict_runs(run: Run) -> None:
    assert run("predict", "--trainer.logger=false") == 0


# checkpoints


def test_every_subcommand_takes_our_checkpoint(run: Run, tmp_path: Path) -> None:
    assert run("fit", "--model.width=24") == 0
    path = checkpoint(tmp_path)
    # the model's arguments are in the checkpoint, and are not given again
    for command in ("validate", "test"):
        assert run(command, f"--ckpt_path={path}") == 0
    assert run("fit", f"--ckpt_path={path}", "--trainer.max_steps=8") == 0
    loaded = torch.load(path, weights_only=True)
    assert loaded["hyper_parameters"]["width"] == 24
    assert loaded["state_dict"]["head.weight"].dtype == torch.float32


def test_what_the_user_gives_wins_over_the_checkpoint(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run("fit", "--model.width=24", "--model.lr=0.5") == 0
    path = checkpoint(tmp_path)
    for saved in configs(tmp_path):
        saved.unlink()
    with pytest.warns(UserWarning, match=r"saved with lr=0.5; using what you gave: lr=0.25"):
        assert run("fit", f"--ckpt_path={path}", "--model.lr=0.25", "--trainer.max_steps=8") == 0
    (resumed,) = configs(tmp_path)
    arguments = yaml.safe_load(resumed.read_text())["model"]["init_args"]
    assert (arguments["lr"], arguments["width"]) == (0.25, 24)


def test_hyperparameters_that_the_model_does_not_take_are_passed_over(run: Run, tmp_path: Path) -> None:
    assert run("fit", "--model.width=24") == 0
    path = checkpoint(tmp_path)
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["gone_since"] = 1
    del content["hyper_parameters"]["_class_path"]  # as when it was saved from a script
    torch.save(content, path)
    assert run("test", f"--ckpt_path={path}") == 0


def test_a_checkpoint_of_another_class_is_loaded_without_its_hyperparameters(run: Run, tmp_path: Path) -> None:
    assert run("fit") == 0
    with pytest.warns(UserWarning, match=r"toy_modules.ToyModel, and the model is toy_modules.OtherModel"):
        assert run("test", f"--ckpt_path={checkpoint(tmp_path)}", "--model=toy_modules.OtherModel") == 0


def test_a_plugin_given_to_a_model_is_plain_data_in_its_checkpoint(run: Run, tmp_path: Path) -> None:
    plugin = ["--model.plugin=lightning_mp.MasterWeightPrecision", "--model.plugin.precision=bf16-master"]
    assert run("fit", "--model=toy_modules.TakesPlugin", *plugin) == 0
    loaded = torch.load(checkpoint(tmp_path), weights_only=True)
    assert loaded["hyper_parameters"]["plugin"]["class_path"].endswith("MasterWeightPrecision")


# precision


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_precision_beside_precision_plugin_is_refused_naming_both(
    run: Run, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    message = error_of(lambda: run("fit", f"--trainer.precision={precision}"), capsys)
    assert "precision_plugin" in message
    assert f"precision='{precision}'" in message or f"precision={precision}" in message


def test_precision_alone_works_as_in_lightning(run: Run) -> None:
    assert run("fit", "--trainer.precision_plugin=null", "--trainer.precision=bf16-true") == 0


def test_a_plugin_with_settings_can_be_written_in_yaml(run: Run, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    settings = {"precision": "bf16-master", "master": "copy"}
    plugin = {"class_path": "lightning_mp.MasterWeightPrecision", "init_args": settings}
    overlay.write_text(yaml.safe_dump({"trainer": {"precision": None, "precision_plugin": plugin}}))
    assert run("fit", f"--config={overlay}") == 0
    (saved,) = configs(tmp_path)
    assert yaml.safe_load(saved.read_text())["trainer"]["precision_plugin"]["init_args"]["master"] == "copy"
    assert run("fit", config=str(saved)) == 0


def test_print_config_prints_a_config_that_loads(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run("fit", "--print_config")
    assert exit_.value.code in (0, None)
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert yaml.safe_load(printed.read_text())["trainer"]["precision_plugin"] == "bf16-master"
    assert run("fit", config=str(printed)) == 0


@pytest.mark.parametrize(
    "value", ["bf17", '{"class_path": "lightning_mp.MasterWeightPrecision", "init_args": {"master": "halves"}}']
)
def test_a_wrong_plugin_is_refused_when_the_command_line_is_read(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    message = error_of(lambda: run("fit", f"--trainer.precision_plugin={value}", "--model.width=-1"), capsys)
    assert "precision_plugin" in message
    assert ("bf16-master" in message) if value == "bf17" else ("halves" in message)
    assert not list(tmp_path.iterdir())


def test_a_value_that_only_the_plugin_can_judge_is_refused_without_a_traceback(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = '{"class_path": "lightning_mp.MasterWeightPrecision", "init_args": {"bucket_mib": -1}}'
    message = error_of(lambda: run("fit", f"--trainer.precision_plugin={plugin}"), capsys)
    assert "error: trainer.precision_plugin: bucket_mib=-1" in message


def test_a_class_given_as_a_name_is_told_where_classes_go(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    name = "lightning_mp.MasterWeightPrecision"
    message = error_of(lambda: run("fit", "--trainer.precision_plugin=null", f"--trainer.precision_plugin={name}"), capsys)
    assert f"trainer.precision_plugin.class_path={name}" in message


def test_a_wrong_key_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nonsense" in error_of(lambda: run("fit", "--trainer.nonsense=1"), capsys)


# baselines


def last_line(call: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why a command ended with status 2."""
    capsys.readouterr()
    assert call() == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert error == lines[-1]
    assert not any("Traceback" in line for line in lines)
    return error


def test_a_baseline_that_is_missing_is_one_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing.json"
    error = last_line(lambda: run("fit", f"--monitors.baseline={path}"), capsys)
    assert error == f"error: {path}: there is no such file. Record a baseline with BaselineRecorder, or correct the path."


def test_a_path_that_holds_a_finished_baseline_is_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.json"
    record = ["--trainer.callbacks+=lightning_mp.BaselineRecorder", f"--trainer.callbacks.path={path}"]
    assert run("fit", *record) == 0
    before = path.read_bytes()
    error = last_line(lambda: run("fit", *record), capsys)
    assert str(path) in error
    assert "holds a finished baseline" in error
    assert "overwrite=True" in error
    assert path.read_bytes() == before


def test_an_error_of_the_user_s_code_keeps_its_traceback(run: Run) -> None:
    with pytest.raises(RuntimeError, match="mistake in bf16-master"):
        run("fit", "--model.raise_in=bf16-master")


def test_a_run_is_judged_by_a_baseline_and_forced_where_settings_differ(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    record = ["--trainer.callbacks+=lightning_mp.BaselineRecorder", f"--trainer.callbacks.path={path}"]
    assert run("fit", *record) == 0
    for number, (force, is_refused) in enumerate([("false", True), ("true", False)], start=1):
        judge = [f"--monitors.baseline={path}", f"--monitors.force={force}", "--model.lr=0.02"]
        assert run("fit", *judge) == 0
        verdict = tmp_path / "lightning_logs" / f"version_{number}" / "verdict.json"
        assert (json.loads(verdict.read_text())["status"] == "NOT COMPARABLE") == is_refused


# the program


def test_an_unknown_command_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(lambda: main(["train"]), capsys)
    assert "unknown command 'train'" in message
    assert "fit, validate, test, predict, compare" in message


def test_the_module_runs_as_a_program_and_lists_its_commands() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_mp", "--help"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("fit", "validate", "test", "predict", "compare"))


def test_a_fit_has_the_monitors_once_and_they_can_be_switched_off(run: Run, tmp_path: Path) -> None:
    assert run("fit", "--trainer.log_every_n_steps=1", "--trainer.callbacks+=lightning_mp.MemoryMonitor") == 0
    (table,) = tmp_path.rglob("metrics.csv")
    header, *rows = table.read_text().splitlines()
    for key in ("throughput/tokens", "memory/bytes_per_parameter", "gradients/norm"):
        assert key in header
    at = header.split(",").index("memory/weights_gib")
    assert sum(bool(row.split(",")[at]) for row in rows) == 6  # one for each step, though two were asked for


def test_monitors_are_configured_by_name(run: Run, tmp_path: Path) -> None:
    assert run("fit", "--trainer.log_every_n_steps=1", "--monitors.memory=false", "--monitors.gradients_every_n_steps=3") == 0
    (table,) = tmp_path.rglob("metrics.csv")
    header, *rows = table.read_text().splitlines()
    assert "memory/" not in header
    at = header.split(",").index("gradients/norm")
    assert sum(bool(row.split(",")[at]) for row in rows) == 2
    saved = yaml.safe_load(next(iter(configs(tmp_path))).read_text())
    assert saved["monitors"]["memory"] is False
