"""The saved file, what it refuses, and what decides whether two runs can be compared."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.numerics import baseline as module
from lightning_mp.numerics.baseline import (
    Baseline,
    BaselineError,
    BaselineRun,
    differences,
    is_paired,
    join_baselines,
    read_baseline,
    read_csv,
    write_baseline,
)
from lightning_mp.numerics.curve import LossCurve

ORDER = {"1": "a", "2": "b", "4": "c", "8": "d"}
SETTINGS: dict[str, Any] = {
    "global_batch_samples": 8,
    "tokens_per_step": 512,
    "optimizer": ["AdamW"],
    "hyperparameters": [
        [{"weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}, {"weight_decay": 0.1, "betas": [0.9, 0.95]}]
    ],
    "learning_rates": {"1": 1e-5, "2": 2e-5, "64": 1e-3},
    "parameters": 3_300_000,
    "trainable_parameters": 3_300_000,
    "dataset_samples": 1000,
    "data": "python source",
    "gradient_clip_val": 1.0,
    "max_steps": 100,
}


def run(seed: int = 1, **changes: Any) -> BaselineRun:
    curve = LossCurve()
    for step in range(1, 21):
        curve.add(step, 4.0 - step / 10 + seed / 1000, samples=8 * step, tokens=512 * step)
    values: dict[str, Any] = {
        "curve": curve,
        "status": "stopped",
        "precision": "bf16-mixed",
        "is_fp32": False,
        "seed": seed,
        "weights": f"w{seed}",
        "data_order": ORDER,
        "settings": SETTINGS,
        "validation": {"val_loss": [{"step": 10, "samples": 80, "tokens": None, "value": 2.5}]},
        "numbers": {"peak_gib": 1.5, "step_time_ms": 12.0},
        "device": "cpu",
        "versions": {"torch": "2"},
    }
    return BaselineRun(**values | changes)


def test_every_field_goes_through_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fp32.json"
    write_baseline(path, Baseline((run(1), run(2)), "memory"))
    read = read_baseline(path)
    assert read.runs == (run(1), run(2))
    assert read.source == str(path)


def test_a_failed_write_names_the_path_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fp32.json"
    write_baseline(path, Baseline((run(1),), ""))
    before = path.read_bytes()
    with pytest.raises(BaselineError, match=r"fp32.json: .*JSON"):
        write_baseline(path, Baseline((run(numbers={"peak_gib": math.nan}),), ""))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"could not be written: No space left on device: '.*fp32.json'"):
        write_baseline(path, Baseline((run(2),), ""))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["fp32.json"]


def test_writing_over_a_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        write_baseline(tmp_path, Baseline((run(),), ""))


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    value = Baseline((run(),), "").as_json()
    edit(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("{", "cut short"),
        (edited(lambda v: None)[:-300], "cut short"),
        ("[]", "its schema is None"),
        ("3", "its schema is None"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": "other"}', "its schema is 'other'"),
        (edited(lambda v: v.update(version=2)), "version 2"),
        (edited(lambda v: v.update(runs=[])), "no runs"),
        (edited(lambda v: v.update(runs=[3])), "run 1 is broken: the run is a int"),
        (edited(lambda v: v["runs"][0].pop("curve")), "curve"),
        (edited(lambda v: v["runs"][0].update(status="done")), "recording, finished, stopped"),
        (edited(lambda v: v["runs"][0].update(seed="1")), "seed"),
        (edited(lambda v: v["runs"][0].update(weights=1)), "weights"),
        (edited(lambda v: v["runs"][0].update(is_fp32=1)), "is_fp32"),
        (edited(lambda v: v["runs"][0].update(precision=None)), "precision"),
        (edited(lambda v: v["runs"][0].update(data_order={"0": "a"})), "data_order"),
        (edited(lambda v: v["runs"][0].update(data_order={"1": 3})), "data_order"),
        (edited(lambda v: v["runs"][0].update(numbers={"peak_gib": "1"})), "peak_gib"),
        (edited(lambda v: v["runs"][0].update(settings=[])), "settings"),
        (edited(lambda v: v["runs"][0]["settings"].update(learning_rates={"x": 1})), "learning_rates"),
        (edited(lambda v: v["runs"][0]["settings"].update(hyperparameters=[{}])), "hyperparameters"),
        (edited(lambda v: v["runs"][0].update(validation={"val": [{"value": "x"}]})), "value"),
        (edited(lambda v: v["runs"][0]["curve"].update(steps=[-1, *range(2, 21)])), "steps"),
        (edited(lambda v: v["runs"][0]["curve"].update(steps=[2, *range(2, 21)])), "steps"),
        (edited(lambda v: v["runs"][0]["curve"]["loss_sums"].__setitem__(3, math.nan)), "NaN"),
        (edited(lambda v: v["runs"][0]["curve"]["loss_sums"].__setitem__(3, math.inf)), "Infinity"),
        (edited(lambda v: v["runs"][0]["curve"]["loss_sums"].__setitem__(3, 10**400)), "broken"),
    ],
)
def test_a_broken_file_is_refused_with_its_path_and_the_reason(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fp32.json"
    path.write_text(text)
    with pytest.raises(BaselineError) as error:
        read_baseline(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)


def test_a_missing_file_a_directory_bytes_and_a_huge_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaselineError, match="no such file"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(BaselineError, match="a directory"):
        read_baseline(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BaselineError, match="not a text file"):
        read_baseline(tmp_path / "b.json")
    monkeypatch.setattr(module, "LARGEST_FILE_MIB", 0)
    with pytest.raises(BaselineError, match="MiB at most"):
        read_baseline(tmp_path / "b.json")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "b.json").chmod(0)
    with pytest.raises(BaselineError, match="Permission denied"):
        read_baseline(tmp_path / "b.json")


def test_equal_runs_have_no_differences_and_are_paired() -> None:
    assert differences(run(), run()) == []
    assert is_paired(run(), run())


@pytest.mark.parametrize(
    ("changes", "text", "decides"),
    [
        ({"global_batch_samples": 16}, "an optimizer step takes 16 samples, the baseline's 8", True),
        (
            {"learning_rates": {"2": 2e-5, "64": 1.1e-3}},
            "the learning rate at step 64 is 0.0011, the baseline's 0.001 (1.1 times)",
            True,
        ),
        ({"optimizer": ["SGD"]}, "the optimizer is (SGD), the baseline's (AdamW)", True),
        (
            {"hyperparameters": [[{"weight_decay": 0}, {"weight_decay": 0}]]},
            "weight decay is 0 for 2 of 2 groups, the baseline's 0.1",
            True,
        ),
        ({"hyperparameters": [[{"betas": (0.9, 0.95)}, {}]]}, None, True),
        ({"hyperparameters": [[{}]]}, "the optimizer has 1 parameter groups, the baseline's 2", True),
        ({"trainable_parameters": 3_000_000}, "trains 3,000,000 of 3,300,000 parameters, the baseline all", True),
        ({"dataset_samples": 999}, "the number of samples in the dataset is 999, the baseline's 1,000", True),
        ({"data": "text"}, "the dataset is text, the baseline's python source", True),
        ({"gradient_clip_val": None}, "gradient_clip_val is None, the baseline's 1", True),
        ({"max_steps": 50}, "max_steps is 50, the baseline's 100", False),
        ({"tokens_per_step": 600}, None, True),  # the samples agree; tokens count only where those are unknown
    ],
)
def test_each_setting_that_differs_is_named_as_what_it_is(changes: dict[str, Any], text: str | None, decides: bool) -> None:
    found = differences(run(), run(settings=SETTINGS | changes))
    assert [(difference.text, difference.decides) for difference in found] == ([(text, decides)] if text else [])


def test_tokens_per_step_decide_where_samples_are_unknown() -> None:
    mine = {"tokens_per_step": 600}
    assert [difference.decides for difference in differences(run(), run(settings=mine))] == [True]
    assert differences(run(), run(settings={"tokens_per_step": 513})) == []


def test_another_data_order_is_not_paired_and_does_not_decide() -> None:
    other = run(data_order=ORDER | {"4": "x"})
    text = "the data order differs from one of the samples 3 to 4 on"
    assert [(d.text, d.decides) for d in differences(run(), other)] == [(text, False)]
    assert not is_paired(run(), other)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"1": "x", "8": "x"}, "sample 1"),
        ({"2": "x"}, "sample 2"),
        ({"4": "x", "8": "x"}, "one of the samples 3 to 4"),
        ({"8": "x"}, "one of the samples 5 to 8"),
    ],
)
def test_where_the_data_order_begins_to_differ_is_said_as_exactly_as_it_is_known(changes: dict[str, str], where: str) -> None:
    (difference,) = differences(run(), run(data_order=ORDER | changes))
    assert difference.text == f"the data order differs from {where} on"


def test_a_position_that_only_one_run_knows_does_not_narrow_where_the_order_differs() -> None:
    (difference,) = differences(run(), run(data_order={"1": "a", "3": "z", "8": "x"}))
    assert difference.text == "the data order differs from one of the samples 2 to 8 on"


@pytest.mark.parametrize("changes", [{"weights": None}, {"weights": "x"}, {"data_order": {}}, {"data_order": {"16": "z"}}])
def test_what_is_not_known_to_be_equal_is_not_paired(changes: dict[str, Any]) -> None:
    assert not is_paired(run(), run(**changes))


def test_fewer_known_positions_are_still_paired() -> None:
    assert is_paired(run(), run(data_order={"1": "a", "2": "b"}))


def test_joining_makes_a_band_and_refuses_the_same_run_twice() -> None:
    one, two = Baseline((run(1),), "a.json"), Baseline((run(2),), "b.json")
    assert join_baselines([one, two]) == Baseline((run(1), run(2)), "a.json, b.json")
    with pytest.raises(BaselineError, match=r"b.json: the same run \(seed 1\) as in a.json"):
        join_baselines([one, Baseline((run(1, precision="x"),), "b.json")])
    with pytest.raises(BaselineError, match=r"b.json: not a seed of the same run as a.json: the dataset is text"):
        join_baselines([one, Baseline((run(2, settings=SETTINGS | {"data": "text"}),), "b.json")])


def test_a_csv_gives_the_curve_with_rows_of_a_step_merged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(
        "epoch,step,train_loss,val_loss,throughput/tokens\n0,9,3.5,,\n0,9,,3.6,\n0,19,3.0,,\n0,19,,,2000\n0,29,nan,,\n0,39,2.5,,4000\n0,49,2.0,,\n"
    )
    curve = read_baseline(path).runs[0].curve
    assert curve.steps == [10, 20, 30, 40, 50]
    assert curve.losses == [3.5, 3.0, None, 2.5, 2.0]
    assert curve.tokens == [1000, 2000, 3000, 4000, 5000]
    assert (curve.samples, curve.first_nonfinite_step) == (None, 30)


def test_a_named_loss_column_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss,mine\n0,1.0,2.0\n")
    assert read_csv(path, "mine").runs[0].curve.losses == [2.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "no column 'step'; its columns are a, b"),
        ("step,b\n1,2\n", "no loss column train/loss or"),
        ("step,loss\n", "holds no loss"),
        ("step,loss\n-1,2\n", "step -1"),
        ("step,loss\n1,2\n1,2\n", "line 3 repeats the loss of step 1"),
        ("step,loss\n2,2\n1,2\n", "line 3 goes back from step 2 to 1"),
        ("step,loss\n1,x\n", "'x' in column 'loss'"),
        ("step,loss\nnan,1\n", "must be finite"),
        ("step,loss,throughput/tokens\n1,1,10\n2,1,5\n", "shrinks from 10 to 5"),
        ("step,loss,throughput/tokens\n1,1,inf\n", "must be finite"),
    ],
)
def test_a_broken_csv_is_refused_with_its_path(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(BaselineError) as error:
        read_csv(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)


def test_a_csv_without_later_totals_does_not_keep_rows_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_ROWS", 10)
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,throughput/tokens\n" + "".join(f"{step},1.0,\n" for step in range(100)))
    curve = read_csv(path).runs[0].curve
    assert (sum(curve.counts), curve.tokens) == (100, None)
