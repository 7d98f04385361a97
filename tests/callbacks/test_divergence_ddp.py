"""`BaselineRecorder` and `DivergenceMonitor` on two ranks: one file, the mean over ranks, and all ranks act together."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mp.numerics.baseline import read_baseline
from tests.callbacks import divergence_ddp_worker as worker
from tests.ddp.launch import scenarios_of

STEPS = worker.STEPS


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every scenario on both ranks. One launch serves all tests."""
    return scenarios_of("tests.callbacks.divergence_ddp_worker", tmp_path_factory.mktemp("divergence"), timeout_s=120)


def test_one_file_has_the_mean_loss_over_ranks_and_the_samples_and_tokens_of_all(two_ranks: Any) -> None:
    first, second = two_ranks("record")
    folder = two_ranks.folder
    assert not (folder / "rank1.json").exists()
    (run,) = read_baseline(folder / "rank0.json").runs
    assert run.status == "finished"
    assert run.curve.losses == [10.0 * i + 5 for i in range(STEPS)]
    assert run.curve.samples == [5 * (i + 1) for i in range(STEPS)]
    assert run.curve.tokens == [15 * (i + 1) for i in range(STEPS)]
    assert first["state"]["curve"] == second["state"]["curve"] == run.curve.as_dict()


def test_the_order_of_data_is_that_of_rank_0(two_ranks: Any) -> None:
    first, second = two_ranks("record")
    (run,) = read_baseline(two_ranks.folder / "rank0.json").runs
    assert first["state"]["fingerprint"]["data_order"] == run.data_order
    assert second["state"]["fingerprint"]["data_order"]["1"] != run.data_order["1"]


def test_there_is_one_collective_per_log_step_and_none_in_between(two_ranks: Any) -> None:
    for found in two_ranks("record"):
        assert found["reductions"] == [10, 20, 24]


def test_the_same_run_matches_on_both_ranks_as_rank_0_is_paired(two_ranks: Any) -> None:
    first, second = two_ranks("watch")
    assert first["verdict"] == second["verdict"]
    assert (first["verdict"].status, first["verdict"].paired, second["paired"]) == ("MATCHES", True, 0)
    assert first["verdict"].gap == 0.0
    assert (two_ranks.folder / "verdicts" / "0.json").exists()
    assert not (two_ranks.folder / "verdicts" / "1.json").exists()
    assert [row["throughput/tokens"] for row in first["rows"] if "divergence/gap" in row] == [60.0 * i for i in range(1, 7)]


def test_stop_stops_both_ranks_after_the_same_step(two_ranks: Any) -> None:
    first, second = two_ranks("stop")
    assert first["steps"] == second["steps"] < STEPS
    assert first["steps"] % 4 == 0, "a log step"
    assert first["alarm"] == second["alarm"] is not None
    assert first["verdict"].status == second["verdict"].status == "DIVERGED"
    assert first["has_finished"]
    assert second["has_finished"]


def test_raise_raises_on_both_ranks(two_ranks: Any) -> None:
    first, second = two_ranks("raise")
    assert first["error"] == second["error"]
    assert first["error"].startswith("DivergenceError: The run diverges from its baseline")
    assert first["steps"] == second["steps"] < STEPS
    assert max(first["seconds"], second["seconds"]) < worker.TIMEOUT_S


def test_a_step_without_a_loss_on_one_rank_has_that_of_the_other(two_ranks: Any) -> None:
    first, second = two_ranks("silent")
    assert first["state"]["curve"] == second["state"]["curve"]
    assert first["state"]["curve"]["loss_sums"] == [10.0 * i + (4 if i % 2 else 5) for i in range(STEPS)]


def test_a_checkpoint_between_log_steps_has_the_steps_of_all_ranks(two_ranks: Any) -> None:
    first, second = two_ranks("resume")
    assert first["error"] is None
    assert first["whole"] == first["resumed"] == second["resumed"]
    assert first["resumed"]["steps"] == list(range(1, STEPS + 1))


def test_what_rank_0_refuses_all_ranks_refuse(two_ranks: Any) -> None:
    first, second = two_ranks("refused")
    assert first == second
    assert first["monitor"].startswith("BaselineError")
    assert "broken.json" in first["monitor"]
    assert "holds a finished baseline" in first["recorder"]


def test_nobody_waits_in_a_collective_for_a_rank_that_has_no_batch_left(two_ranks: Any) -> None:
    first, second = two_ranks("out of batches")
    assert (second["steps"], second["error"]) == (7, None)
    assert len(second["state"]["curve"]["steps"]) == 7
    assert max(first["seconds"], second["seconds"]) < worker.TIMEOUT_S
    # DDP alone is at a loss there, and says so with or without the callback: the collective that fails is not ours
    assert first["steps"] == 7
