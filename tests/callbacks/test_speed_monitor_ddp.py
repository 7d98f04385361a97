"""`SpeedMonitor` on two ranks: sums are those of both, and no rank waits for the other in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks import speed_ddp_worker as worker
from tests.callbacks.test_speed_monitor import LENGTHS, PER_TOKEN, STEP_MS
from tests.ddp.launch import scenarios_of

ROOT = Path(__file__).parents[2]
STEPS = len(LENGTHS)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every scenario on both ranks. One launch serves all tests."""
    return scenarios_of("tests.callbacks.speed_ddp_worker", tmp_path_factory.mktemp("speed-ranks"), timeout_s=100)


def test_both_ranks_publish_the_same_and_only_rank_0_logs(two_ranks) -> None:
    first, second = two_ranks("plain")
    assert first["published"] == second["published"]
    assert first["published"]["throughput/step_time_ms"] == pytest.approx(STEP_MS)


def test_global_rates_are_sums_and_those_per_device_are_named_so(two_ranks) -> None:
    for name in ("plain", "padded"):
        found = two_ranks(name)[0]["published"]
        # without three steps of warm-up, and without the first after the epoch's end
        both = sum(2 * (2 * length + sum(worker.MORE)) for length in (*LENGTHS[3:], *LENGTHS[1:]))
        assert found["throughput/tokens_per_s"] == pytest.approx(both / (20 * STEP_MS / 1e3))
        assert found["throughput/tokens_per_s_per_device"] == found["throughput/tokens_per_s"] / 2
        assert found["throughput/samples_per_s"] == pytest.approx(4 / (STEP_MS / 1e3))
        assert found["throughput/tokens"] == 2 * sum(worker.TOKENS.values())
        assert found["throughput/samples"] == 2 * 4 * STEPS


def test_padding_and_flops_are_those_of_both_ranks(two_ranks) -> None:
    found = two_ranks("padded")[0]["published"]
    positions = found["throughput/padded_tokens_per_s"]
    assert positions == pytest.approx(400 / (STEP_MS / 1e3))
    assert found["throughput/tflops_per_s"] == pytest.approx(positions * PER_TOKEN / 1e12)
    assert found["throughput/mfu"] == pytest.approx(found["throughput/tflops_per_s_per_device"] / 1e-3)
    assert "throughput/padded_tokens_per_s" not in two_ranks("plain")[0]["published"]


def test_times_are_means_over_ranks(two_ranks) -> None:
    first, second = two_ranks("slower rank")
    assert first["published"] == second["published"]
    assert first["published"]["throughput/step_time_ms"] == pytest.approx(1.5 * STEP_MS)


def test_what_one_rank_does_not_know_is_unknown(two_ranks) -> None:
    for found in two_ranks("unknown on one rank"):
        assert not any("tokens" in key for key in found["published"])
        assert "throughput/samples_per_s" in found["published"]


def test_there_is_one_collective_per_log_step_and_none_in_between(two_ranks) -> None:
    for found in two_ranks("plain"):
        assert found["reductions"] == [4, 8, 12, 16, 20, 24]


def test_a_rank_that_means_to_stop_makes_no_collective_of_its_own(two_ranks) -> None:
    for found in two_ranks("stops on one rank"):
        assert found["reductions"] == [4, 8, 12]


def test_a_checkpoint_has_the_totals_of_all_ranks_also_between_log_steps(two_ranks) -> None:
    first, second = two_ranks("resume")
    before = sum(2 * (2 * length + sum(worker.MORE)) for length in LENGTHS[:6])
    # a plain loader begins its epoch again, and the epoch ends after as many batches as are left
    after = sum(2 * (2 * length + sum(worker.MORE)) for length in (*LENGTHS[:6], *LENGTHS))
    assert first["saved"] == second["saved"] == {"tokens": before, "samples": 24}
    assert first["published"]["throughput/tokens"] == before + after
    assert first["state"] == second["state"]


def test_nobody_waits_in_a_collective_for_a_rank_that_has_no_batch_left(two_ranks) -> None:
    first, second = two_ranks("out of batches")
    assert (second["steps"], second["error"]) == (7, None)
    assert max(first["seconds"], second["seconds"]) < worker.TIMEOUT_S
    # DDP alone is at a loss there, and says so with or without the monitor: the collective that fails is not ours
    assert first["steps"] == 7
