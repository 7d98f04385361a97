"""Saved runs of every kind become stories that have the values of their files; what is broken is named."""

from __future__ import annotations

import csv
import itertools
import math
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from wandb_file import isolate, read

from lightning_mp import Trainer, monitors
from lightning_mp.callbacks.baseline import BaselineRecorder
from lightning_mp.callbacks.divergence import DivergenceMonitor
from lightning_mp.callbacks.run_recorder import StepRecord
from lightning_mp.cost.memory import PersistentBytes
from lightning_mp.files import write_json
from lightning_mp.numerics.baseline import Baseline, BaselineRun, read_baseline, write_baseline
from lightning_mp.numerics.curve import LossCurve
from lightning_mp.numerics.divergence import Alarm, Block, Rule, Verdict
from lightning_mp.report.page.render import render
from lightning_mp.report.results import Comparison, Result, curve_json, summarise
from lightning_mp.report.saved import wandb as saved_wandb
from lightning_mp.report.saved.run import KEPT_POINTS
from lightning_mp.report.saved.sources import SourceError, story_of
from lightning_mp.report.story import RunStory, Story
from lightning_mp.report.wandb import open_run_log

STEPS = 60
MEMORY = PersistentBytes(weights=20, masters=20, gradients=40, optimizer_state=80, buffers=2**10, parameters=10)
WEIGHTS, ORDER = "w" * 64, {"1": "a", "2": "b"}
VERDICT = Verdict("DIVERGED", 0.2, (0.15, 0.25), 0.01, 0.03, 1.0, True, 1, Alarm(1, 2000.0, 20, 0.3), 0.001, "Too high.", ())
BLOCKS = [
    Block(0, 1000.0, 2.1, 2.0, 0.1, 0.01, 0.005, 0.5, None, None),
    Block(1, 2000.0, 2.3, 2.0, 0.3, 0.01, 0.005, 1.2, None, None),
]


# --- made-up comparisons -----------------------------------------------------------------------------------------------------


def records(steps: int = STEPS, gap: float = 0.0) -> list[StepRecord]:
    return [
        StepRecord(step, 5.0 - step / 50 + (gap if step > steps // 4 else 0.0) + 0.001 * math.sin(step), 100, 10.0 + step % 7)
        for step in range(1, steps + 1)
    ]


def result(precision: str, steps: Sequence[StepRecord], **fields: Any) -> Result:
    started = {"device": "cpu: tested", "versions": {"torch": "2"}, "world_size": 1, "precision_in_use": precision}
    told: dict[str, Any] = {
        "summary": summarise(steps),
        "memory": MEMORY,
        "peak_rss_bytes": 3 << 30,
        "weights_fingerprint": WEIGHTS,
        "data_order": ORDER,
        "started": started,
    }
    return Result(precision, "ok", **{**told, **fields})


def save_comparison(
    folder: Path,
    runs: Mapping[str, Sequence[StepRecord]],
    more: Mapping[str, Mapping[str, Any]] | None = None,
    **fields: Any,
) -> Path:
    """A comparison's folder; ``more`` are further keys of its results, by precision."""
    results = [result(precision, steps) for precision, steps in runs.items()]
    command = ("lightning-mp", "compare", "-c", "a config.yaml")
    comparison = Comparison(
        folder.name, command, ("a config.yaml",), ("--x=1",), 7, tuple(runs), results=tuple(results), status="complete"
    )
    content = {**comparison.as_json(), **fields}
    for one in content["results"]:
        one.update((more or {}).get(one["precision"], {}))
    write_json(folder / "comparison.json", content)
    for precision, steps in runs.items():
        write_json(folder / precision / "curve.json", curve_json(precision, steps))
    return folder


def baseline_run(losses: Sequence[float], **fields: Any) -> BaselineRun:
    curve = LossCurve()
    for step, loss in enumerate(losses, start=1):
        curve.add(step, loss, samples=4 * step, tokens=100 * step)
    return BaselineRun(curve, **fields)


def save_baseline(path: Path, run: BaselineRun) -> Path:
    write_baseline(path, Baseline((run,), str(path)))
    return path


def by_name(story: Story) -> dict[str, RunStory]:
    return {run.name: run for run in story.runs}


def test_a_comparison_gives_the_values_of_its_files(tmp_path: Path) -> None:
    steps = records()
    folder = save_comparison(tmp_path / "compare-1", {"32-true": steps, "bf16-master": records()})
    story = story_of([folder])
    assert (story.title, story.reference, story.axis, story.baseline_curves) == ("compare-1", "32-true", "tokens", [])
    assert story.command == "lightning-mp compare -c 'a config.yaml'"
    run = by_name(story)["bf16-master"]
    assert run.loss is not None
    assert list(run.loss.x) == [100 * step for step in range(1, STEPS + 1)]
    assert list(run.loss.y) == [record.loss for record in steps]
    summary = summarise(steps)
    assert (run.tail_loss, run.step_time_ms, run.tokens_per_s) == (
        summary.tail_loss, summary.step_time_median_ms, summary.tokens_per_s,
    )  # fmt: skip
    assert run.step_times_ms == [record.step_time_ms for record in steps[3:]]
    assert run.tokens_per_s_series is not None
    assert list(run.tokens_per_s_series.x) == [100 * step for step in range(4, STEPS + 1)]
    assert list(run.tokens_per_s_series.y) == pytest.approx([100 / record.step_time_ms * 1e3 for record in steps[3:]])
    assert run.memory_gib == {
        "weights": 20 / 2**30, "masters": 20 / 2**30, "gradients": 40 / 2**30, "optimizer": 80 / 2**30, "buffers": 2**-20,
    }  # fmt: skip
    assert run.bytes_per_parameter == {"weights": 2, "masters": 2, "gradients": 4, "optimizer": 8}
    assert (run.peak_gib, run.peak_label) == (3.0, "peak resident memory of the process")
    assert (run.device, run.versions) == ("cpu: tested", {"torch": "2"})
    assert run.what == {
        "seed": "7", "config": "a config.yaml", "overrides": "--x=1", "steps": "60", "precision in use": "bf16-master",
    }  # fmt: skip
    assert (run.status, run.loss_scale, run.exponents, run.notes) == ("ok", None, None, [])


def test_a_comparison_gives_what_it_measured_of_gradients_memory_and_scale(tmp_path: Path) -> None:
    measured = {
        "exponents": {"edges": [-3, -2, -1], "counts": [5, 7], "flushed": 2.0, "scale": 1024.0},
        "loss_scale_changes": [[1, 15.0], [9, 14.0]],
        "skipped_steps": 1,
        "skipped_at": [8],
        "updates_lost_fraction": 0.25,
        "memory_gib": {"weights": 1.5, "activations": 0.5},
        "peak_gib": 4.5,
        "peak_label": "peak memory",
        "verdict": VERDICT.as_dict(),
        "blocks": [asdict(block) for block in BLOCKS],
    }
    folder = save_comparison(tmp_path, {"32-true": records(), "16-master": records()}, {"16-master": measured})
    run = by_name(story_of([folder]))["16-master"]
    assert run.exponents is not None
    assert asdict(run.exponents) == measured["exponents"]
    assert run.loss_scale is not None
    assert (list(run.loss_scale.x), list(run.loss_scale.y)) == ([1, 9, STEPS], [15, 14, 14])
    assert (run.skipped_count, run.skipped_steps, run.updates_lost_fraction) == (1, [8], 0.25)
    assert (run.memory_gib["weights"], run.memory_gib["activations"], run.memory_gib["masters"]) == (1.5, 0.5, 20 / 2**30)
    assert (run.peak_gib, run.peak_label) == (4.5, "peak memory")
    assert (run.verdict, run.blocks) == (VERDICT, BLOCKS)


def test_what_a_result_lacks_comes_from_the_log_of_its_monitors(tmp_path: Path) -> None:
    folder = save_comparison(tmp_path, {"16-master": records(), "32-true": records()})
    log = folder / "16-master" / "metrics" / "metrics.csv"
    log.parent.mkdir()
    log.write_text("step,loss_scale/log2,gradients/updates_lost_fraction,memory/activations_gib\n0,15,0.1,0.5\n9,14,0.2,0.75\n")
    run = by_name(story_of([folder]))["16-master"]
    assert run.loss_scale is not None
    assert (list(run.loss_scale.x), list(run.loss_scale.y)) == ([1, 10], [15, 14])
    assert (run.updates_lost_fraction, run.memory_gib["activations"]) == (0.2, 0.75)
    assert run.memory_gib["masters"] == 20 / 2**30


def test_a_candidate_without_a_verdict_is_judged_against_the_fp32_run(tmp_path: Path) -> None:
    runs = {"32-true": records(), "bf16-mixed": records(), "bf16-true": records(gap=0.5)}
    found = by_name(story_of([save_comparison(tmp_path, runs)]))
    matching, diverged = found["bf16-mixed"].verdict, found["bf16-true"].verdict
    assert found["32-true"].verdict is None
    assert matching is not None
    assert diverged is not None
    assert (matching.status, matching.paired, matching.gap) == ("MATCHES", True, 0.0)
    assert (diverged.status, diverged.gap) == ("DIVERGED", pytest.approx(0.5))
    assert diverged.alarm is not None
    assert diverged.alarm.step is not None
    assert 15 < diverged.alarm.step < 25
    assert [block.gap for block in found["bf16-true"].blocks] == pytest.approx([0.0] * 15 + [0.5] * 45)


def test_a_candidate_with_other_weights_is_not_paired(tmp_path: Path) -> None:
    more = {"bf16-mixed": {"weights_fingerprint": "other"}}
    found = by_name(story_of([save_comparison(tmp_path, {"32-true": records(), "bf16-mixed": records()}, more)]))
    verdict = found["bf16-mixed"].verdict
    assert verdict is not None
    assert (verdict.status, verdict.paired) == ("INCONCLUSIVE", False)
    assert [difference.name for difference in verdict.differences] == ["weights"]


def test_the_rule_and_the_name_of_the_reference_can_be_chosen(tmp_path: Path) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": records(gap=0.5)})
    story = story_of([folder], rule=Rule(margin=1.0), reference="bf16-true", title="Mine", command="make it so")
    assert (story.reference, story.title, story.command) == ("bf16-true", "Mine", "make it so")
    verdict = by_name(story)["32-true"].verdict
    assert verdict is not None
    assert (verdict.margin, verdict.gap) == (1.0, pytest.approx(-0.5))
    with pytest.raises(ValueError, match="no run is named '16-true'; the reference can be one of '32-true', 'bf16-true'"):
        story_of([folder], reference="16-true")


def test_a_verdict_in_a_file_of_its_own_is_taken(tmp_path: Path) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": records()})
    content = {**VERDICT.as_dict(), "axis": "tokens", "blocks": [asdict(block) for block in BLOCKS]}
    write_json(folder / "bf16-true" / "verdict.json", content)
    run = by_name(story_of([folder]))["bf16-true"]
    assert (run.verdict, run.blocks) == (VERDICT, BLOCKS)


@pytest.mark.parametrize(
    "text", ["", '{"status": "FINE"}', '{"status": "MATCHES"}', "[1]", '{"status": "MATCHES", "coverage": NaN}']
)
def test_a_broken_verdict_is_noted_and_the_run_judged_again(tmp_path: Path, text: str) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": records(gap=0.5)})
    (folder / "bf16-true" / "verdict.json").write_text(text)
    run = by_name(story_of([folder]))["bf16-true"]
    assert run.verdict is not None
    assert (run.status, run.verdict.status) == ("ok", "DIVERGED")
    assert "Its own verdict cannot be read" in run.notes[0]
    assert "verdict.json" in run.notes[0]


def test_further_seeds_are_the_band_and_part_of_the_baseline(tmp_path: Path) -> None:
    losses = [record.loss or 0.0 for record in records()]
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-mixed": records()})
    save_baseline(folder / "32-true" / "baseline.json", baseline_run(losses, seed=7, weights=WEIGHTS, data_order=ORDER))
    for seed in (1, 2):
        run = baseline_run([loss + 0.1 * seed for loss in losses], seed=seed, weights=str(seed), data_order={"1": str(seed)})
        save_baseline(folder / f"32-true-seed{seed}" / "baseline.json", run)
    (folder / "32-true-seed3").mkdir()
    (folder / "32-true-seed3" / "baseline.json").write_text("{")
    story = story_of([folder])
    assert [curve.y[0] for curve in story.baseline_curves] == pytest.approx([losses[0] + 0.1 * seed for seed in range(3)])
    run = by_name(story)["bf16-mixed"]
    assert run.verdict is not None
    assert (run.verdict.status, run.verdict.paired, run.verdict.seeds) == ("MATCHES", True, 3)
    assert (run.blocks[0].band_low, run.blocks[0].band_high) == pytest.approx((losses[0], losses[0] + 0.2))
    assert "A further seed cannot be read" in by_name(story)["32-true"].notes[0]


def test_blocks_on_another_axis_are_moved_to_the_axis_of_the_page(tmp_path: Path) -> None:
    losses = [record.loss or 0.0 for record in records()]
    untold = [replace(record, tokens=None) for record in records()]
    blocks = [asdict(replace(block, end=end)) for block, end in zip(BLOCKS, (40.0, 80.0), strict=True)]
    verdict = {**replace(VERDICT, alarm=Alarm(1, 80.0, 20, 0.3)).as_dict(), "axis": "samples"}
    more = {"bf16-true": {"verdict": verdict, "blocks": blocks}}
    folder = save_comparison(tmp_path / "run", {"32-true": untold, "bf16-true": untold}, more)
    save_baseline(folder / "32-true" / "baseline.json", baseline_run(losses))  # four samples a step
    assert story_of([folder]).axis == "samples"

    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},1.0\n" for step in range(50)))
    story = story_of([folder, tmp_path / "log.csv"])
    run = by_name(story)["bf16-true"]
    assert story.axis == "steps"
    assert [block.end for block in run.blocks] == [10, 20]
    assert run.verdict is not None
    assert run.verdict.alarm == Alarm(1, 20.0, 20, 0.3)
    assert run.loss is not None
    assert list(run.loss.x) == list(range(1, STEPS + 1))


def test_tokens_of_one_process_are_those_of_all_its_ranks(tmp_path: Path) -> None:
    losses = [record.loss or 0.0 for record in records()]
    half = [replace(record, tokens=50) for record in records()]  # on each of two ranks
    more = {name: {"started": {"world_size": 2}} for name in ("32-true", "bf16-mixed")}
    folder = save_comparison(tmp_path, {"32-true": half, "bf16-mixed": half}, more)
    save_baseline(folder / "32-true" / "baseline.json", baseline_run(losses, weights=WEIGHTS, data_order=ORDER))
    run = by_name(story_of([folder]))["bf16-mixed"]
    assert run.loss is not None
    assert list(run.loss.x) == [100 * step for step in range(1, STEPS + 1)]
    assert run.verdict is not None
    assert (run.verdict.status, run.verdict.differences) == ("MATCHES", ())


def test_a_precision_that_was_not_run_yet_is_told(tmp_path: Path) -> None:
    folder = save_comparison(tmp_path, {"32-true": records()}, precisions=["32-true", "bf16-true"], status="running")
    run = by_name(story_of([folder]))["bf16-true"]
    assert (run.status, run.loss) == ("interrupted", None)
    assert "before it was run" in (run.error or "")


def test_a_run_that_failed_before_its_first_step_keeps_its_reason(tmp_path: Path) -> None:
    more = {"bf16-true": {"status": "failed", "error": "killed by SIGKILL.", "memory": None, "summary": {}}}
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": []}, more)
    told = ("failed", "killed by SIGKILL.", None, None)
    run = by_name(story_of([folder]))["bf16-true"]
    assert (run.status, run.error, run.loss, run.verdict) == told  # its curve has no steps
    (folder / "bf16-true" / "curve.json").unlink()
    run = by_name(story_of([folder]))["bf16-true"]
    assert (run.status, run.error, run.loss, run.verdict) == told


def test_an_fp32_run_that_failed_is_no_reference_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(9), "bf16-true": records()}, {"32-true": {"status": "failed"}})
    assert story_of([folder]).reference is None
    assert story_of([folder], reference="32-true").reference == "32-true"


def test_blocks_that_cannot_be_placed_on_the_axis_of_the_page_are_not_drawn(tmp_path: Path) -> None:
    blocks, verdict = [asdict(block) for block in BLOCKS], {**VERDICT.as_dict(), "axis": "samples"}
    more = {"bf16-true": {"verdict": verdict, "blocks": blocks}, "bf16-mixed": {"verdict": verdict, "blocks": blocks}}
    found = by_name(
        story_of([save_comparison(tmp_path, {"32-true": records(), "bf16-true": records(), "bf16-mixed": []}, more)])
    )
    for name, alarm in (("bf16-true", Alarm(1, 2000.0, 20, 0.3)), ("bf16-mixed", None)):
        assert found[name].blocks == []
        assert found[name].verdict == replace(VERDICT, alarm=alarm)  # by its step, 20; the other has no curve
        assert "its blocks are not drawn" in found[name].notes[-1]


def test_a_loss_that_was_not_finite_is_a_divergence(tmp_path: Path) -> None:
    steps = [*records()[:40], StepRecord(41, math.nan, 100, 10.0)]
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": steps}, {"bf16-true": {"status": "non-finite"}})
    run = by_name(story_of([folder]))["bf16-true"]
    assert run.status == "non-finite"
    assert run.verdict is not None
    assert run.verdict.status == "DIVERGED"
    assert "step 41" in run.verdict.explanation
    assert run.loss is not None
    assert math.isnan(run.loss.y[-1])


def _cut(folder: Path) -> None:
    path = folder / "bf16-true" / "curve.json"
    path.write_text(path.read_text()[:-40])


def _back(folder: Path) -> None:
    write_json(folder / "bf16-true" / "curve.json", curve_json("bf16-true", [*records(5), *records(5)]))


def _remove(folder: Path) -> None:
    (folder / "bf16-true" / "curve.json").unlink()


@pytest.mark.parametrize("harm", [_cut, _back, _remove])
def test_a_broken_curve_makes_a_failed_run_that_says_so(tmp_path: Path, harm: Any) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": records(), "bf16-mixed": records()})
    harm(folder)
    found = by_name(story_of([folder]))
    run = found["bf16-true"]
    assert (run.status, run.loss, run.peak_gib) == ("failed", None, 3.0)
    assert str(folder / "bf16-true" / "curve.json") in run.notes[0]
    assert (found["32-true"].status, found["bf16-mixed"].status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("status", "splendid", "status is 'splendid'; it must be one of ok, failed"),
        ("summary", [1], "summary is a list, not a mapping"),
        ("memory", {"weights": "many"}, "weights is 'many'; it must be a finite number"),
        ("started", {"device": 3}, "device is 3; it must be text"),
        ("peak_rss_bytes", True, "peak_rss_bytes is True"),
        ("exponents", {"edges": [1], "counts": [1, 2]}, "2 bins have 3 edges, not 1"),
        ("loss_scale_changes", [[1]], "loss_scale_changes must be pairs"),
        ("skipped_at", 3, "skipped_at is a int, not a list"),
        ("skipped_steps", -1, "skipped_steps is -1"),
        ("precision", "../elsewhere", "precision is '../elsewhere'; it must be the name of a folder"),
        ("precision", 3, "precision is 3; it must be text"),
    ],
)
def test_a_broken_result_makes_a_failed_run_that_names_what_is_wrong(tmp_path: Path, key: str, value: Any, words: str) -> None:
    folder = save_comparison(tmp_path, {"32-true": records(), "bf16-true": records()}, {"bf16-true": {key: value}})
    first, broken, *_ = story_of([folder]).runs
    assert (first.status, broken.status) == ("ok", "failed")
    assert f"{folder / 'comparison.json'}: " in broken.notes[0]
    assert words in broken.notes[0]
    assert words in (broken.error or "")


# --- real runs ---------------------------------------------------------------------------------------------------------------


class Toy(LightningModule):
    """Token ids to the same ids; logs its loss."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]).float().flatten(0, 1), batch[0].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["lr"])


def fit(precision: str, callbacks: list[Any], logger: Any) -> None:
    seed_everything(0, verbose=False)
    ids = torch.randint(8, (4 * STEPS, 4))
    trainer = Trainer(
        precision_plugin=precision, callbacks=callbacks, logger=logger, accelerator="cpu", max_epochs=1, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Toy(), DataLoader(TensorDataset(ids), batch_size=4))


@dataclass
class Saved:
    """One fp32 run with its baseline, and an fp16 run that was logged in three ways and judged."""

    baseline: Path
    log: Path
    offline: Path
    monitor: DivergenceMonitor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, folder)
        import wandb

        baseline = folder / "fp32.json"
        fit("32-true", [*monitors(), BaselineRecorder(baseline)], False)
        monitor = DivergenceMonitor(baseline, rule=Rule(blocks=20))
        loggers = [
            CSVLogger(folder, name="toy", version="fp16"),
            WandbLogger(name="offline fp16", project="p", save_dir=folder, offline=True),
        ]
        fit("16-master", [*monitors(gradients_every_n_steps=20), monitor], loggers)
        wandb.finish()
        read(folder)  # waits until the file is whole
        (offline,) = folder.rglob("*.wandb")
        yield Saved(baseline, folder / "toy" / "fp16", offline, monitor)


def column(folder: Path, name: str) -> list[tuple[int, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]) + 1, float(row[name])) for row in csv.DictReader(file) if row[name]]


def test_a_log_gives_the_values_of_its_rows(saved: Saved) -> None:
    story = story_of([saved.log])
    (run,) = story.runs
    assert (story.title, story.axis, story.reference, run.name, run.precision) == ("fp16", "tokens", None, "fp16", "unknown")
    losses = column(saved.log, "train_loss")
    assert len(losses) == STEPS
    assert run.loss is not None
    assert (list(run.loss.x), list(run.loss.y)) == ([16 * step for step, _ in losses], [loss for _, loss in losses])
    assert run.tail_loss == pytest.approx(sum(loss for _, loss in losses[-12:]) / 12)
    rates = column(saved.log, "throughput/tokens_per_s")
    assert run.tokens_per_s_series is not None
    assert list(run.tokens_per_s_series.x) == [16 * step for step, _ in rates]
    assert list(run.tokens_per_s_series.y) == [rate for _, rate in rates]
    assert run.tokens_per_s == rates[-1][1]
    assert run.step_time_ms == column(saved.log, "throughput/step_time_ms")[-1][1]
    assert run.step_times_ms == ()  # the log holds medians, which are spread less than steps
    for part in ("weights", "masters", "gradients", "optimizer", "activations", "buffers"):
        assert run.memory_gib[part] == column(saved.log, f"memory/{part}_gib")[-1][1]
    assert run.bytes_per_parameter == {"total": 16.0}
    assert (run.peak_gib, run.peak_label) == (
        max(value for _, value in column(saved.log, "memory/peak_rss_gib")), "peak resident memory of the process",
    )  # fmt: skip
    scales = dict(column(saved.log, "loss_scale/log2"))
    assert run.loss_scale is not None
    assert all(scales[int(step)] == scale for step, scale in zip(run.loss_scale.x, run.loss_scale.y, strict=True))
    assert run.skipped_count == column(saved.log, "loss_scale/skipped_steps")[-1][1]
    assert run.updates_lost_fraction == column(saved.log, "gradients/updates_lost_fraction")[-1][1]
    assert run.what == {"lr": "0.02"}
    assert (run.verdict, run.blocks) == (saved.monitor.verdict, saved.monitor.test.blocks)
    assert story_of([saved.log / "metrics.csv"]).runs == story.runs


def test_an_offline_run_gives_what_its_csv_gives_and_its_config(saved: Saved) -> None:
    story, offline = story_of([saved.log]), story_of([saved.offline.parent])
    (run,), (logged,) = offline.runs, story.runs
    assert (run.name, run.precision, run.status, run.error) == ("offline fp16", "16-master", "ok", None)
    assert (run.device, set(run.versions)) == (saved.monitor._run._device, {"lightning", "lightning-mp", "python", "torch"})
    assert run.what["lr"] == "0.02"
    assert run.what["precision_plugin.loss_scale.kind"] == "adaptive"
    for name in (
        "loss", "tail_loss", "tokens_per_s_series", "tokens_per_s", "step_time_ms", "memory_gib", "bytes_per_parameter",
        "peak_gib", "peak_label", "loss_scale", "skipped_steps", "skipped_count", "updates_lost_fraction",
    ):  # fmt: skip
        assert getattr(run, name) == getattr(logged, name), name
    assert run.exponents is not None
    assert len(run.exponents.counts) == 32
    assert math.log2(run.exponents.scale) in {scale for _, scale in column(saved.log, "loss_scale/log2")}
    assert run.verdict is not None
    assert saved.monitor.verdict is not None
    assert run.verdict == replace(saved.monitor.verdict, lag_explained=None, differences=())
    # the table does not hold the noise scale
    assert [replace(block, scale=0.0) for block in run.blocks] == [replace(b, scale=0.0) for b in saved.monitor.test.blocks]
    assert story_of([saved.offline]).runs[0].loss == run.loss


def test_an_offline_run_without_an_end_was_interrupted(saved: Saved, tmp_path: Path) -> None:
    path = tmp_path / "run-cut.wandb"
    path.write_bytes(saved.offline.read_bytes()[:60_000])
    (run,) = story_of([path]).runs
    assert run.status == "interrupted"
    assert run.loss is not None
    assert 0 < len(run.loss.y) < STEPS


def test_a_run_of_a_comparison_can_be_read_from_its_offline_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    log, _ = open_run_log("offline", "bf16-true", "a group", tmp_path)
    log.configure({"precision": "bf16-true", "device": "cpu: tested", "versions": {"torch": "2"}, "seed": 3})
    steps = records(10)
    log.log(steps)
    log.finish(result("bf16-true", steps))
    read(tmp_path)
    (path,) = tmp_path.rglob("*.wandb")
    (run,) = story_of([path]).runs
    assert (run.name, run.precision, run.status, run.device, run.what) == (
        "bf16-true", "bf16-true", "ok", "cpu: tested", {"seed": "3"},
    )  # fmt: skip
    assert run.loss is not None
    assert (list(run.loss.x), list(run.loss.y)) == ([100 * n for n in range(1, 11)], [record.loss for record in steps])
    assert run.step_times_ms == [record.step_time_ms for record in steps]
    summary = summarise(steps)
    assert (run.step_time_ms, run.tokens_per_s) == (summary.step_time_median_ms, summary.tokens_per_s)
    assert (run.peak_gib, run.bytes_per_parameter) == (3.0, {"total": 16.0})


def test_an_offline_run_that_only_counts_its_own_steps_and_logs_no_loss_tells_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    import wandb

    run = wandb.init(project="p", name="by hand", dir=str(tmp_path), config={"batch": {"size": 4}})
    for step in range(3):
        run.log({"throughput/tokens": 10 * (step + 1), "throughput/tokens_per_s": 100.0 + step, "other": "text"})
    run.finish(exit_code=3)
    read(tmp_path)
    (path,) = tmp_path.rglob("*.wandb")
    story = story_of([path.parent])
    (found,) = story.runs
    assert (found.name, found.precision, found.what, story.axis) == ("by hand", "unknown", {"batch.size": "4"}, "tokens")
    assert (found.status, found.error, found.loss) == ("failed", "the run ended with exit status 3.", None)
    assert found.tokens_per_s_series is not None
    assert (list(found.tokens_per_s_series.x), list(found.tokens_per_s_series.y)) == ([10, 20, 30], [100, 101, 102])


def test_a_baseline_file_is_a_run(saved: Saved) -> None:
    story = story_of([saved.baseline])
    (run,) = story.runs
    (recorded,) = read_baseline(saved.baseline).runs
    assert (run.name, run.precision, run.status, story.reference) == ("fp32", "32-true", "ok", "fp32")
    assert run.loss is not None
    assert (run.loss.x, run.loss.y) == (recorded.curve.tokens, recorded.curve.losses)
    numbers = recorded.numbers
    assert (run.tokens_per_s, run.step_time_ms, run.peak_gib, run.bytes_per_parameter) == (
        numbers["tokens_per_s"], numbers["step_time_ms"], numbers["peak_rss_gib"], {"total": numbers["bytes_per_parameter"]},
    )  # fmt: skip
    assert (run.what["seed"], run.what["optimizer"]) == ("0", "AdamW")
    assert (run.device, run.versions) == (recorded.device, recorded.versions)


def test_a_log_is_judged_by_a_baseline_block_by_block_as_it_would_have_been_online(saved: Saved, tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_bytes((saved.log / "metrics.csv").read_bytes())  # without the verdict beside it
    story = story_of([log], baseline=read_baseline(saved.baseline), rule=Rule(blocks=20))
    (run,) = story.runs
    online = saved.monitor.test.blocks
    assert [(b.end, b.candidate, b.baseline, b.gap) for b in run.blocks] == [
        (b.end, b.candidate, b.baseline, b.gap) for b in online
    ]
    assert run.verdict is not None
    assert (run.verdict.status, run.verdict.paired) == ("INCONCLUSIVE", False)  # a log has no fingerprints
    assert [curve.x for curve in story.baseline_curves] == [read_baseline(saved.baseline).runs[0].curve.tokens]


def test_sources_of_all_kinds_stand_side_by_side(saved: Saved, tmp_path: Path) -> None:
    folder = save_comparison(tmp_path / "compare-1", {"bf16-true": records()})
    story = story_of([folder, saved.log, saved.offline, saved.baseline])
    assert [run.name for run in story.runs] == ["bf16-true", "fp16", "offline fp16", "fp32"]
    assert (story.title, story.reference, story.axis) == ("4 saved runs", "fp32", "tokens")
    verdict = by_name(story)["bf16-true"].verdict
    assert verdict is not None
    assert verdict.status == "NOT COMPARABLE"
    assert "an optimizer step takes 100 tokens, the baseline's 16" in verdict.explanation
    forced = by_name(story_of([folder, saved.baseline], force=True))["bf16-true"].verdict
    assert forced is not None
    assert forced.status != "NOT COMPARABLE"
    assert "offline fp16" in render(story)


# --- names -------------------------------------------------------------------------------------------------------------------


def test_runs_of_the_same_name_are_told_apart_by_folder_or_number(tmp_path: Path) -> None:
    first = save_comparison(tmp_path / "one", {"32-true": records(5), "bf16-true": records(5)})
    second = save_comparison(tmp_path / "two", {"bf16-true": records(5), "bf16-mixed": records(5)})
    story = story_of([first, second, second])
    assert [run.name for run in story.runs] == [
        "32-true", "bf16-true (one)", "bf16-true (two)", "bf16-mixed", "bf16-true (two) 2", "bf16-mixed 2",
    ]  # fmt: skip
    assert story.reference == "32-true"
    assert story_of([first, first]).reference is None  # two fp32 runs: which one is not known


def test_a_log_is_named_after_its_folders(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        folder = tmp_path / parent / "lightning_logs" / "version_0"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step,loss\n0,1.5\n")
    story = story_of([tmp_path / "a" / "lightning_logs" / "version_0", tmp_path / "b" / "lightning_logs" / "version_0"])
    assert [run.name for run in story.runs] == [
        "lightning_logs/version_0 (a/lightning_logs/version_0)", "lightning_logs/version_0 (b/lightning_logs/version_0)",
    ]  # fmt: skip


# --- logs that were made up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("trainer:\n  precision_plugin: bf16-master\n  precision: null\n", "bf16-master"),
        ("trainer:\n  precision_plugin: null\n  precision: 16-mixed\n", "16-mixed"),
        ("trainer:\n  precision: 32\n", "32"),
        ("trainer:\n  precision: null\n", "32-true"),
        ("trainer:\n  precision_plugin:\n    class_path: x\n    init_args:\n      precision: 16-master\n", "16-master"),
        ("trainer: {}\n", "unknown"),
    ],
)
def test_the_precision_of_a_log_is_that_of_the_config_beside_it(tmp_path: Path, text: str, precision: str) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.5\n")
    (tmp_path / "config.yaml").write_text(text)
    story = story_of([tmp_path])
    assert story.runs[0].precision == precision
    assert (story.reference is not None) == (precision in ("32", "32-true"))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "a: !!python/object:os.system x", "[" * 5000])
def test_a_broken_file_of_hyperparameters_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.5\n")
    (tmp_path / "hparams.yaml").write_text(text)
    (run,) = story_of([tmp_path]).runs
    assert run.what == {}
    assert "hparams.yaml beside the log cannot be read" in run.notes[0]


def test_hyperparameters_that_hold_themselves_are_shown_as_far_as_they_are_plain(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.5\n")
    (tmp_path / "hparams.yaml").write_text("a: &a\n  b: *a\n  c: 1\nbetas: [0.9, 0.95]\nempty: null\n")
    (run,) = story_of([tmp_path]).runs
    assert (run.what["a.c"], run.what["betas"]) == ("1", "0.9, 0.95")
    assert len(run.what) < 10


def test_a_log_without_a_loss_still_tells_what_it_measured(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,throughput/tokens,throughput/tokens_per_s\n0,64,\n9,640,1000\n19,1280,1200\n")
    story = story_of([tmp_path])
    (run,) = story.runs
    assert (run.loss, run.tail_loss, run.tokens_per_s, story.axis) == (None, None, 1200, "tokens")
    assert run.tokens_per_s_series is not None
    assert list(run.tokens_per_s_series.x) == [640, 1280]
    assert "Its log has no loss" in run.notes[0]


def test_steps_are_named_as_skipped_only_where_the_log_tells_which(tmp_path: Path) -> None:
    rows = [(0, 1), (1, 2), (2, 2), (12, 3), (13, 3), (14, 4)]  # between steps 3 and 13 one was skipped: which is not known
    text = "step,loss_scale/skipped_steps\n" + "".join(f"{step},{count}\n" for step, count in rows)
    (tmp_path / "metrics.csv").write_text(text)
    (run,) = story_of([tmp_path]).runs
    assert (run.skipped_steps, run.skipped_count) == ([1, 2, 15], 4)


def test_a_scale_of_1_throughout_is_no_loss_scaling(tmp_path: Path) -> None:
    head = "step,loss_scale/log2,loss_scale/skipped_steps\n"
    (tmp_path / "none.csv").write_text(head + "0,0.0,0\n1,0.0,0\n")
    (tmp_path / "some.csv").write_text(head + "0,1.0,0\n1,0.0,0\n")
    none, some = story_of([tmp_path / "none.csv", tmp_path / "some.csv"]).runs
    assert (none.loss_scale, none.skipped_steps, none.skipped_count) == (None, None, None)
    assert some.loss_scale is not None
    assert (list(some.loss_scale.y), some.skipped_steps, some.skipped_count) == ([1, 0], [], 0)


def test_a_loss_that_is_not_finite_ends_a_run_unless_its_step_was_skipped(tmp_path: Path) -> None:
    head = "step,train_loss,loss_scale/nonfinite_losses\n"
    (tmp_path / "a.csv").write_text(head + "0,1.0,0\n1,nan,0\n2,1.0,0\n")
    (tmp_path / "b.csv").write_text(head + "0,1.0,0\n1,nan,1\n2,1.0,1\n")
    curve = LossCurve()
    for step in range(1, 4):
        curve.add(step, 1.0)
    story = story_of([tmp_path / "a.csv", tmp_path / "b.csv"], baseline=Baseline((BaselineRun(curve),), "given"))
    diverged, skipped = story.runs
    assert (diverged.status, skipped.status) == ("non-finite", "ok")
    assert "step 2" in (diverged.error or "")
    assert "1 steps, which were skipped" in skipped.notes[0]
    assert diverged.verdict is not None
    assert skipped.verdict is not None
    assert (diverged.verdict.status, skipped.verdict.status) == ("DIVERGED", "INCONCLUSIVE")


def long_log(path: Path, steps: int) -> None:
    with path.open("w") as file:
        file.write("step,train_loss,throughput/tokens,throughput/tokens_per_s,loss_scale/log2\n")
        for step in range(steps):
            file.write(f"{step},{5 - 3 * step / steps},{64 * (step + 1)},{1000 + step},{15 + (step == 7777)}\n")


def test_a_long_log_is_thinned_evenly_and_keeps_its_last_row_and_every_change_of_the_scale(tmp_path: Path) -> None:
    steps = 20_000
    long_log(tmp_path / "metrics.csv", steps)
    (run,) = story_of([tmp_path]).runs
    assert run.tokens_per_s_series is not None
    assert run.loss is not None
    assert run.loss_scale is not None
    places = list(run.tokens_per_s_series.x)
    assert KEPT_POINTS // 2 < len(places) <= KEPT_POINTS + 1
    assert (places[0], places[-1], run.tokens_per_s_series.y[-1]) == (64, 64 * steps, 1000 + steps - 1)
    assert {b - a for a, b in itertools.pairwise(places[:-1])} == {8 * 64}
    assert len(run.loss.x) <= 4096
    assert run.loss.x[-1] == 64 * steps
    assert list(run.loss_scale.x) == [1, 7778, 7779, steps]
    assert list(run.loss_scale.y) == [15, 16, 15, 15]
    loss = [5 - 3 * step / steps for step in range(steps)]
    assert run.tail_loss == pytest.approx(sum(loss[-4000:]) / 4000, abs=1e-12)  # 500 of 2500 groups, all of them full


def test_a_long_log_takes_little_memory(tmp_path: Path) -> None:
    long_log(tmp_path / "metrics.csv", 15_000)
    story_of([tmp_path])  # what is imported and cached stays
    tracemalloc.start()
    story_of([tmp_path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 2**20  # and not more for more rows


def test_a_thinned_curve_is_judged_where_its_means_were_taken(tmp_path: Path) -> None:
    steps, fall = 20_000, 1e-4  # groups of 8: at their ends instead of their middles, the gap would be 3.5 falls
    run = baseline_run([5.0 - fall * step for step in range(steps)], weights=WEIGHTS, data_order=ORDER)
    path = save_baseline(tmp_path / "run.json", replace(run, precision="bf16-true", is_fp32=False))
    (judged,) = story_of([path], baseline=Baseline((run,), "given")).runs
    assert judged.verdict is not None
    assert (judged.verdict.status, judged.verdict.paired, judged.verdict.coverage) == ("MATCHES", True, 1.0)
    assert len(judged.blocks) == 100
    assert max(abs(block.gap) for block in judged.blocks) < 0.51 * fall


# --- hostile -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("comparison.json", "", "not valid JSON"),
        ("comparison.json", '{"schema_version": 1, "results": [', "perhaps it was cut short"),
        ("comparison.json", "[" * 100_000, "nested too deeply"),
        ("comparison.json", "[]", "not a comparison"),
        ("comparison.json", "{}", "not a comparison"),
        ("comparison.json", '{"schema_version": 99}', "its schema has version 99"),
        ("comparison.json", '{"schema_version": 1, "results": 3}', "results is a int"),
        ("comparison.json", '{"schema_version": 1, "seed": "x"}', "seed is 'x'"),
        ("metrics.csv", "", "it is empty"),
        ("metrics.csv", "epoch,loss\n0,1\n", "no column 'step'"),
        ("metrics.csv", "step,accuracy\n0,1\n", "no loss column (train/loss"),
        ("metrics.csv", "step,loss\n0,much\n", "line 2 has 'much'"),
        ("metrics.csv", "step,loss\n0,1\n-4,1\n", "line 3 has step -4"),
        ("metrics.csv", "step,loss\nnan,1\n", "line 2 has step nan"),
        ("metrics.csv", "step,loss\n0,1\n1,1\n0,1\n", "more than one run"),
        ("metrics.csv", "step,loss\n0,\n", "holds no loss"),
        ("metrics.csv", "step,loss_scale/log2\n0,big\n", "line 2 has 'big'"),
        ("metrics.csv", "step,loss\n0,\0\n", "line"),
        ("run.wandb", "", "it holds no records"),
        ("run.wandb", "this is not a run of any kind", "wandb cannot read it"),
        ("other.json", '{"a": 1}', "not a baseline"),
        ("other.json", "", "it is empty"),
        ("run.ckpt", "", "ends in .csv, .wandb or .json"),
    ],
)
def test_a_broken_source_is_an_error_that_begins_with_its_path(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SourceError) as caught:
        story_of([path])
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert message.count(str(path)) == 1
    assert "/tmp" not in message.replace(str(tmp_path), "")  # no file of ours that is gone by then


ROW = {"type": "history", "history": {"item": {"_step": 1, "train_loss": 1.5}}}


def offline(monkeypatch: pytest.MonkeyPatch, path: Path, *more: Mapping[str, Any]) -> Path:
    """A file of which wandb's reader gives one row and some more records."""
    path.touch()
    monkeypatch.setattr(saved_wandb, "_records", lambda path: iter([ROW, *more]))
    return path


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"type": "history", "history": {"item": {"_step": "x", "train_loss": 1}}}, "_step is 'x'"),
        ({"type": "history", "history": [1]}, "history is a list"),
        ({"type": "config", "config": {"update": {"lightning_mp": 3}}}, "config.lightning_mp is a int"),
        ({"type": "config", "config": {"update": {"precision": 16}}}, "precision is 16; it must be text"),
        ({"type": "exit", "exit": {"exit_code": "x"}}, "exit_code is 'x'"),
        ({"type": "history", "history": {"item": {f"gradients/exponents.{k}": [1] for k in ("bins", "values")}}}, "2 edges"),
    ],
)
def test_a_record_of_an_offline_run_that_is_not_legal_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Mapping[str, Any], words: str
) -> None:
    path = offline(monkeypatch, tmp_path / "run.wandb", record)
    with pytest.raises(SourceError, match=r"Give the \.wandb file of another run") as caught:
        story_of([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("table", ["../secret.json", "media/gone.json", "media/odd.json"])
def test_a_table_of_blocks_that_cannot_be_read_is_noted_and_the_verdict_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    legal = {"columns": ["steps", "candidate"], "data": [[1.0, 2.0]]}
    write_json(tmp_path / "secret.json", legal)
    write_json(tmp_path / "files" / "media" / "odd.json", {**legal, "data": [[1.0]]})
    write_json(tmp_path / "files" / "media" / "good.json", legal)
    update = {"divergence/verdict": "MATCHES", "divergence/coverage": 1.0, "divergence/blocks.path": table}
    path = offline(monkeypatch, tmp_path / "run.wandb", {"type": "summary", "summary": {"update": update}})
    (run,) = story_of([path]).runs
    assert run.verdict is not None
    assert (run.verdict.status, run.blocks) == ("MATCHES", [])
    assert "The table of its blocks cannot be read" in run.notes[0]
    update["divergence/blocks.path"] = "media/good.json"
    offline(monkeypatch, path, {"type": "summary", "summary": {"update": update}})
    assert [block.end for block in story_of([path]).runs[0].blocks] == [1.0]


def test_a_verdict_in_a_summary_that_is_not_legal_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"type": "summary", "summary": {"update": {"divergence/verdict": "FINE"}}}
    (run,) = story_of([offline(monkeypatch, tmp_path / "run.wandb", summary)]).runs
    assert run.verdict is None
    assert "Its own verdict cannot be read: the verdict's status is 'FINE'" in run.notes[0]


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    for name in ("comparison.json", "metrics.csv", "baseline.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00step,loss\n")
        with pytest.raises(SourceError, match=name):
            story_of([tmp_path / name])


def test_a_folder_that_holds_no_run_says_what_was_looked_for_and_where_one_is(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"looked for comparison\.json .*metrics\.csv .*\*\.wandb") as caught:
        story_of([tmp_path])
    assert str(caught.value).startswith(f"{tmp_path}: ")
    (tmp_path / "version_3").mkdir()
    (tmp_path / "version_3" / "metrics.csv").write_text("step,loss\n0,1\n")
    with pytest.raises(SourceError, match=f"Give {tmp_path / 'version_3'}"):
        story_of([tmp_path])


def test_a_folder_of_several_offline_runs_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.wandb", "b.wandb"):
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match=r"2 \.wandb files\. Give one of them, such as a\.wandb"):
        story_of([tmp_path])


def test_what_is_missing_or_a_folder_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    for name in ("comparison.json", "metrics.csv"):
        folder = tmp_path / name.split(".")[0]
        (folder / name).mkdir(parents=True)
        with pytest.raises(SourceError, match=str(folder / name)):
            story_of([folder])
    with pytest.raises(SourceError, match="there is no such file or folder"):
        story_of([tmp_path / "gone"])
    with pytest.raises(ValueError, match="there is no run to report"):
        story_of([])


def test_a_baseline_that_diverged_itself_is_refused_if_given_and_noted_if_it_is_the_reference(tmp_path: Path) -> None:
    bad = baseline_run([5.0, math.nan, 4.0])
    save_baseline(tmp_path / "fp32.json", bad)
    (tmp_path / "log.csv").write_text("step,loss\n0,1.5\n1,1.4\n")
    with pytest.raises(SourceError, match="given: the baseline itself diverged"):
        story_of([tmp_path / "log.csv"], baseline=Baseline((bad,), "given"))
    story = story_of([tmp_path / "fp32.json", tmp_path / "log.csv"])
    assert story.runs[0].status == "non-finite"
    assert "It was not judged: fp32: the baseline itself diverged" in story.runs[1].notes[0]
