"""`MemoryMonitor`: parts to the byte, peaks that are those of their window, and nothing where nothing is known."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_mp import MasterWeightPrecision, StaticLossScale, Trainer
from lightning_mp.callbacks import memory
from lightning_mp.callbacks.memory import GIB, MemoryMonitor
from lightning_mp.cost.allocator import RETRIES
from lightning_mp.cost.memory import GradientWatch, PersistentBytes, persistent_bytes
from tests.callbacks.stand_ins import FakeAccelerator, Rows
from tests.conftest import Said
from tests.ddp.launch import launch
from tests.instruments import CountSyncs
from tests.modules import QUIET, M, MakeOptimizer, Manual, assert_same, bf16_master, values

pytestmark = pytest.mark.usefixtures("seeded")

ROOT = Path(__file__).parents[2]
ADAMW, MOMENTUM, PLAIN = partial(AdamW, lr=1e-3), partial(SGD, lr=0.1, momentum=0.9), partial(SGD, lr=0.1)
PARTS = ("weights", "masters", "gradients", "gradients_at_step", "optimizer", "buffers")
#: Precision, weights, masters, gradients in backward, gradients at the step, one moment: bytes per parameter.
SIZES = {
    "32-true": (4, 0, 4, 4, 4),
    "bf16-mixed": (4, 0, 4, 4, 4),
    "bf16-true": (2, 0, 2, 2, 2),
    "split": (2, 2, 2, 2, 4),
    "copy": (2, 4, 2, 2, 4),
    "16-master": (2, 4, 2, 4, 4),
    "16-mixed": (4, 0, 4, 4, 4),
}
N, TENSORS = 4 * 32 + 32 + 32 + 1, 4  # of mlp()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))


def make_trainer(precision: str | Precision, *callbacks: Callback, **options: Any) -> lightning.Trainer:
    settings = {**QUIET, "log_every_n_steps": 1, "limit_val_batches": 0, **options}
    settings["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings["callbacks"] = list(callbacks)
    if precision == "bf16-true":
        return lightning.Trainer(precision="bf16-true", **settings)
    plugin = bf16_master(precision) if precision in ("split", "copy") else precision
    return Trainer(precision_plugin=plugin, **settings)


def rows_of(precision: str | Precision, module: M, *callbacks: Callback, **options: Any) -> Rows:
    rows = Rows()
    make_trainer(precision, *(callbacks or (MemoryMonitor(),)), logger=rows, **options).fit(module)
    rows.rows = [row for row in rows.rows if any(key.startswith("memory/") for key in row)]
    return rows


def in_bytes(row: dict[str, Any], *names: str) -> dict[str, int | None]:
    return {name: None if (gib := row.get(f"memory/{name}_gib")) is None else gib * GIB for name in names}


# --- parts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize(
    ("optimizer", "moments", "counters"),
    [(ADAMW, 2, TENSORS), (MOMENTUM, 1, 0), (PLAIN, 0, 0)],
    ids=["AdamW", "momentum", "SGD"],
)
def test_parts_are_exact_to_the_byte(precision: str, optimizer: MakeOptimizer, moments: int, counters: int) -> None:
    weight, master, gradient, at_step, moment = SIZES[precision]
    rows = rows_of(precision, M(mlp(), optimizer)).rows
    assert len(rows) == 4
    for row in rows:
        assert in_bytes(row, *PARTS) == {
            "weights": weight * N,
            "masters": master * N,
            "gradients": gradient * N,
            "gradients_at_step": at_step * N,
            "optimizer": moments * moment * N + 4 * counters,
            "buffers": 0,
        }
        assert row["memory/bytes_per_parameter"] == weight + master + gradient + moments * moment


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", 16), ("bf16-mixed", 16), ("bf16-true", 8), ("split", 14), ("copy", 16), ("16-master", 16)],
)
def test_bytes_per_parameter_with_adamw_are_those_of_the_documentation(precision: str, expected: int) -> None:
    assert rows_of(precision, M(mlp(), ADAMW)).column("memory/bytes_per_parameter") == [expected] * 4


class Tied(M):
    """Tied weights, a frozen layer, a norm that stays fp32, and buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), ADAMW)
        self.layer[1].weight = self.layer[0].weight
        self.layer[3].requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).float().square().mean()


class IndependentCount(Callback):
    """Adds up elements times their size over distinct tensors, as the batch ends."""

    found: dict[str, int]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.at_step = self.sizes(p.grad for p in pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        plugin, (optimizer,) = trainer.precision_plugin, trainer.optimizers
        masters = plugin.master_tensors() if isinstance(plugin, MasterWeightPrecision) else []
        self.found = {
            "weights": self.sizes(pl_module.parameters()),
            "masters": self.sizes(masters),
            "gradients": sum(p.numel() * p.element_size() for p in set(pl_module.parameters()) if p.grad is not None),
            "gradients_at_step": self.at_step,
            "optimizer": self.sizes(value for state in optimizer.state.values() for value in state.values()),
            "buffers": self.sizes(pl_module.buffers()),
        }

    @staticmethod
    def sizes(tensors: Any) -> int:
        distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


@pytest.mark.parametrize("precision", SIZES)
def test_tied_and_frozen_and_fp32_parameters_count_as_an_independent_count_has_them(precision: str) -> None:
    other = IndependentCount()
    rows = rows_of(precision, Tied(), MemoryMonitor(), other).rows
    assert in_bytes(rows[-1], *PARTS) == other.found
    assert other.found["buffers"] > 0
    assert other.found["gradients"] < other.found["weights"]


@pytest.mark.parametrize(("precision", "gradient"), [("32-true", 4), ("bf16-true", 2), ("split", 4), ("16-master", 4)])
def test_sums_over_micro_batches_take_fp32_where_they_are_formed_in_fp32(precision: str, gradient: int) -> None:
    rows = rows_of(precision, M(mlp(), ADAMW), accumulate_grad_batches=2).rows
    assert [in_bytes(row, "gradients")["gradients"] for row in rows] == [gradient * N] * 2


def test_a_row_is_made_for_each_logged_step_not_for_each_batch() -> None:
    rows = rows_of("32-true", M(mlp(), ADAMW), accumulate_grad_batches=2, log_every_n_steps=2, max_epochs=3)
    assert [row["step"] for row in rows.rows] == [1, 3, 5]


# --- what is not known -----------------------------------------------------------------------------------------------------


class InfiniteAtFirst(M):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("inf") if batch_idx < 2 else 1.0)


@pytest.mark.parametrize("optimizer", [ADAMW, PLAIN])
def test_optimizer_state_is_unknown_until_a_step_was_applied(optimizer: MakeOptimizer) -> None:
    plugin = MasterWeightPrecision("16-master", loss_scale=StaticLossScale(8.0))
    rows = rows_of(plugin, InfiniteAtFirst(mlp(), optimizer)).rows
    known = ["memory/optimizer_gib" in row for row in rows]
    assert known == ["memory/bytes_per_parameter" in row for row in rows] == [False, False, True, True]
    assert ["memory/gradients_at_step_gib" in row for row in rows] == known
    assert [in_bytes(row, "gradients")["gradients"] for row in rows] == [2 * N] * 4, "the gradients of skipped steps are known"
    assert in_bytes(rows[2], "optimizer")["optimizer"] == (8 * N + 4 * TENSORS if optimizer is ADAMW else 0)


def test_the_state_of_a_resumed_optimizer_is_known_also_where_its_first_steps_are_skipped(tmp_path: Path) -> None:
    checkpoint, path = ModelCheckpoint(tmp_path, save_last=True), tmp_path / "last.ckpt"
    make_trainer("32-true", checkpoint).fit(M(mlp(), MOMENTUM))
    rows = Rows()
    plugin = MasterWeightPrecision("16-master", loss_scale=StaticLossScale(8.0))
    trainer = make_trainer(plugin, MemoryMonitor(), logger=rows, max_epochs=2)
    trainer.fit(InfiniteAtFirst(mlp(), MOMENTUM), ckpt_path=path)
    assert trainer.precision_plugin.skipped_steps == 2
    assert rows.column("memory/optimizer_gib") == [4 * N / GIB] * 4


def test_looking_for_optimizer_state_makes_no_sync() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    fresh, used = MOMENTUM([param]), MOMENTUM([param])
    used.step()
    with CountSyncs() as syncs:
        assert (memory._has_state(fresh), memory._has_state(used)) == (False, True)
    assert syncs.seen == []


class NoneOnOddBatches(M):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 2 else self.loss(batch)


def test_a_step_without_a_backward_has_no_gradients_and_no_activations() -> None:
    rows = rows_of("32-true", NoneOnOddBatches(mlp(), ADAMW)).rows
    for key in ("memory/gradients_gib", "memory/activations_gib", "memory/bytes_per_parameter"):
        assert [key in row for row in rows] == [True, False, True, False], key
    assert all("memory/weights_gib" in row for row in rows)


def test_a_cpu_has_a_resident_peak_and_no_allocator_keys() -> None:
    rows = rows_of("32-true", M(mlp(), ADAMW)).rows
    for row in rows:
        assert row["memory/peak_rss_gib"] > 0.05
        assert not {"memory/peak_gib", "memory/peak_reserved_gib", "memory/run_peak_gib", "memory/alloc_retries"} & set(row)
        assert "memory/peak_rank" not in row, "there is one rank"
    # the output of the ReLU, for the loss the prediction, and the number by which Lightning divides the loss
    assert [in_bytes(row, "activations")["activations"] for row in rows] == [2 * 32 * 4 + 2 * 4 + 8] * 4


class TwoOptimizers(Manual):
    """Each optimizer has a loss of its own; the second one steps in every other batch."""

    def configure_optimizers(self) -> Any:
        return [AdamW(self.layer[0].parameters()), AdamW(self.layer[2].parameters())]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        self.zero_grad()


@pytest.mark.parametrize("precision", ["32-true", "split", "16-master"])
def test_manual_optimization_with_several_optimizers_and_cleared_gradients(precision: str) -> None:
    weight, master, gradient, at_step, moment = SIZES[precision]
    rows = rows_of(precision, TwoOptimizers(mlp())).rows
    assert ["memory/optimizer_gib" in row for row in rows] == [False, True, True, True]
    found = in_bytes(rows[-1], *PARTS)
    assert found["gradients"] == gradient * N
    assert found["gradients_at_step"] == at_step * N
    assert rows[-1]["memory/bytes_per_parameter"] == weight + master + gradient + 2 * moment


# --- cost ------------------------------------------------------------------------------------------------------------------


def test_nothing_is_counted_between_log_steps_and_nothing_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("persistent_bytes", "saved_bytes", "storage_keys", "peak_rss_bytes", "GradientWatch"):
        original = getattr(memory, name)
        monkeypatch.setattr(memory, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1])

    def fit(monitor: MemoryMonitor, every: int) -> list[str]:
        with CountSyncs() as syncs:
            make_trainer("split", monitor, logger=Rows(), log_every_n_steps=every).fit(M(mlp(), ADAMW))
        return syncs.seen

    class Syncing(MemoryMonitor):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            loss.item()

    without = len(fit(MemoryMonitor(), every=100))
    assert calls == []
    assert len(fit(MemoryMonitor(), every=1)) == without
    assert {"persistent_bytes", "saved_bytes", "GradientWatch"} <= set(calls)
    assert len(fit(Syncing(), every=1)) == without + 4, "a sync would be seen"


@pytest.mark.parametrize("precision", ["32-true", "split", "copy", "16-master"])
def test_training_is_the_same_with_and_without_it(precision: str) -> None:
    def trained(*callbacks: Callback) -> list[Tensor]:
        torch.manual_seed(1)
        module = M(mlp(), ADAMW)
        make_trainer(precision, *callbacks, accumulate_grad_batches=2, max_epochs=3).fit(module)
        return values(module)

    assert_same(trained(MemoryMonitor()), trained())


def test_it_leaves_no_hooks_behind_and_copies_and_pickles() -> None:
    monitor, module = MemoryMonitor(reset_peak=False, warn_fraction=0.5), M(mlp(), ADAMW)
    trainer = make_trainer("32-true", monitor)
    trainer.fit(module)
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert monitor.state_dict() == {}, "a CPU has no peak of the run"
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert (other.reset_peak, other.warn_fraction) == (False, 0.5)


def test_it_has_no_hook_that_would_make_a_precision_plugin_expect_edits_of_gradients() -> None:
    assert MemoryMonitor.on_after_backward is Callback.on_after_backward


# --- loggers and other callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"fast_dev_run": True},
        {"barebones": True},
        {"logger": [Rows(), Rows()]},
        {"overfit_batches": 1},
        {"log_every_n_steps": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_it_never_raises(options: dict[str, Any], tmp_path: Path) -> None:
    if "barebones" in options:
        options = {
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")),
            **options,
        }
        options = {**options, "limit_val_batches": None, "log_every_n_steps": None}
    trainer = make_trainer("32-true", MemoryMonitor(), default_root_dir=tmp_path, **options)
    trainer.fit(M(mlp(), ADAMW))
    is_silent = "barebones" in options or options.get("log_every_n_steps", 1) == 0
    assert ("memory/weights_gib" in trainer.callback_metrics) != is_silent
    for logger in trainer.loggers:
        if isinstance(logger, Rows) and not is_silent:
            assert logger.column("memory/bytes_per_parameter") == [16] * 4


def test_a_csv_file_has_the_rows_and_callbacks_can_monitor_them(tmp_path: Path) -> None:
    stopping = EarlyStopping("memory/bytes_per_parameter", patience=1, check_on_train_epoch_end=True)
    checkpoint = ModelCheckpoint(
        tmp_path, "{memory/weights_gib:.12f}", monitor="memory/weights_gib", save_on_train_epoch_end=True
    )
    logger = CSVLogger(tmp_path)
    trainer = make_trainer("32-true", MemoryMonitor(), stopping, checkpoint, logger=logger, max_epochs=9)
    trainer.fit(M(mlp(), ADAMW))
    assert trainer.current_epoch == 2, "stopped as the value did not fall"
    assert checkpoint.best_model_score is not None
    assert "memory/bytes_per_parameter" in (Path(logger.log_dir) / "metrics.csv").read_text()
    torch.load(checkpoint.best_model_path, weights_only=True)


# --- an accelerator --------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """A stand-in for the memory functions. The monitor takes the CPU for a GPU, and the tensors of the CPU for that GPU's."""
    on_fit_start, bytes_of = MemoryMonitor.on_fit_start, GradientWatch.bytes

    def on_a_gpu(self: MemoryMonitor, trainer: Any, pl_module: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(trainer.strategy, "_root_device", torch.device("cuda", 0))
            on_fit_start(self, trainer, pl_module)

    def count(module: nn.Module, optimizers: Any, masters: Any = (), device: Any = None) -> PersistentBytes:
        return persistent_bytes(module, optimizers, masters)

    monkeypatch.setattr(MemoryMonitor, "on_fit_start", on_a_gpu)
    monkeypatch.setattr(memory, "persistent_bytes", count)
    monkeypatch.setattr(GradientWatch, "bytes", lambda self, device=None: bytes_of(self))
    return FakeAccelerator(monkeypatch, total=100_000)


class Uses(M):
    """Each training batch has its peak; validation has another."""

    def __init__(self, accelerator: FakeAccelerator, peaks: list[int], validation: int = 0) -> None:
        super().__init__(mlp(), ADAMW)
        self.accelerator, self.peaks, self.validation = accelerator, list(peaks), validation

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.accelerator.use(self.peaks.pop(0))
        self.accelerator.use(10)
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accelerator.use(self.validation)
        self.accelerator.use(10)


PERSISTENT = 16 * N + 4 * TENSORS


def test_an_accelerator_has_the_peak_of_the_window_and_of_the_run(accelerator: FakeAccelerator) -> None:
    rows = rows_of("32-true", Uses(accelerator, [9_000, 5_000, 7_000, 4_000])).rows
    found = [in_bytes(row, "peak", "run_peak", "peak_reserved", "activations") for row in rows]
    assert [row["peak"] for row in found] == [9_000, 5_000, 7_000, 4_000]
    assert [row["run_peak"] for row in found] == [9_000] * 4
    assert [row["peak_reserved"] for row in found] == [18_000] * 4
    assert [row["activations"] for row in found] == [peak - PERSISTENT for peak in (9_000, 5_000, 7_000, 4_000)]
    assert [row["memory/alloc_retries"] for row in rows] == [0] * 4
    assert not any("memory/peak_rss_gib" in row for row in rows)


def test_a_window_lasts_from_row_to_row_with_validation_in_it_and_sanity_checking_before_it(
    accelerator: FakeAccelerator,
) -> None:
    module = Uses(accelerator, [4_000, 6_000, 5_000, 4_500], validation=8_000)
    options = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 2}
    rows = rows_of("32-true", module, **options).rows
    found = [in_bytes(row, "peak", "run_peak") for row in rows]
    assert found == [{"peak": 6_000, "run_peak": 8_000}, {"peak": 8_000, "run_peak": 8_000}]


class Another(MemoryMonitor):
    """Lightning wants callbacks with a state to differ in class."""


@pytest.mark.parametrize("resets", [True, False])
def test_two_monitors_see_the_same_peaks_whichever_of_them_resets_the_counter(
    accelerator: FakeAccelerator, resets: bool
) -> None:
    monitors = [MemoryMonitor(), Another(reset_peak=resets)]
    rows = rows_of("32-true", Uses(accelerator, [9_000, 5_000, 7_000, 4_000]), *monitors).rows
    # they share a row, in which the second one's values stand
    assert [in_bytes(row, "peak")["peak"] for row in rows] == [9_000, 5_000, 7_000, 4_000]
    assert [in_bytes(row, "run_peak")["run_peak"] for row in rows] == [9_000] * 4


def test_without_resets_the_counter_is_left_alone_and_unknown_windows_are_left_out(accelerator: FakeAccelerator) -> None:
    module = Uses(accelerator, [5_000, 4_000, 7_000, 6_000])
    rows = rows_of("32-true", module, MemoryMonitor(reset_peak=False)).rows
    found = [in_bytes(row, "peak", "run_peak", "activations") for row in rows]
    assert accelerator.resets == 0
    assert [row["peak"] for row in found] == [5_000, None, 7_000, None]
    assert [row["run_peak"] for row in found] == [5_000, 5_000, 7_000, 7_000]
    assert [row["activations"] for row in found] == [peak - PERSISTENT for peak in (5_000, 5_000, 7_000, 7_000)]


def test_a_peak_below_the_parts_was_reset_by_somebody_and_gives_no_activations(accelerator: FakeAccelerator) -> None:
    rows = rows_of("32-true", Uses(accelerator, [PERSISTENT - 1, PERSISTENT, 4_000, 4_000])).rows
    assert [in_bytes(row, "activations")["activations"] for row in rows[:2]] == [None, 0]


def test_the_peak_of_the_run_survives_a_resume_under_the_same_precision_only(
    accelerator: FakeAccelerator, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    first = Uses(accelerator, [9_000, 4_000, 4_000, 4_000])
    make_trainer("32-true", MemoryMonitor(), checkpoint).fit(first)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["MemoryMonitor"]
    assert state == {"run_peak_bytes": 9_000, "precision": "32-true", "device": "cuda"}

    def resumed(precision: str, monitor: MemoryMonitor) -> list[float]:
        rows = Rows()
        trainer = make_trainer(precision, monitor, logger=rows, max_epochs=2)
        trainer.fit(Uses(accelerator, [5_000] * 4), ckpt_path=tmp_path / "last.ckpt")
        return [value * GIB for value in rows.column("memory/run_peak_gib")]

    monitor = MemoryMonitor()
    assert resumed("32-true", monitor) == [9_000] * 4
    assert monitor.state_dict()["run_peak_bytes"] == 9_000
    other = MemoryMonitor()
    other.load_state_dict({**state, "precision": "bf16-true"})
    rows = Rows()
    make_trainer("32-true", other, logger=rows).fit(Uses(accelerator, [5_000] * 4))
    assert [value * GIB for value in rows.column("memory/run_peak_gib")] == [5_000] * 4


def test_near_the_limit_it_warns_once_with_the_parts_and_what_would_help(accelerator: FakeAccelerator, said: Said) -> None:
    accelerator.stats[RETRIES] = 0
    module = Uses(accelerator, [50_000, 96_000, 97_000, 98_000])
    rows_of("32-true", module, MemoryMonitor(warn_fraction=0.95))
    assert said.count("Peak memory is 96.0%|optimizer|activations|activation checkpointing") == 1
    assert said.count("Peak memory") == 1


def test_far_from_the_limit_it_does_not_warn(accelerator: FakeAccelerator, said: Said) -> None:
    rows_of("32-true", Uses(accelerator, [95_000] * 4))
    assert "Peak memory" not in said


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"activations": 9, "optimizer": 4, "weights": 2}, "accumulate_grad_batches"),
        ({"activations": 1, "optimizer": 4, "weights": 2}, "optimizer state"),
        ({"optimizer": 1, "weights": 2}, "freeze"),
    ],
)
def test_the_advice_is_about_the_largest_part(parts: dict[str, int], advice: str) -> None:
    assert advice in memory._remedy(parts)


# --- running out -----------------------------------------------------------------------------------------------------------


class Fails(M):
    def __init__(self, error: Exception, at: int) -> None:
        super().__init__(mlp(), ADAMW)
        self.error, self.at = error, at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            raise self.error
        return self.loss(batch)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")],
)
@pytest.mark.parametrize(("at", "when"), [(2, "as last logged"), (0, "before anything was logged")])
def test_when_memory_runs_out_the_parts_are_written_down_and_the_error_goes_on(
    error: Exception, at: int, when: str, said: Said
) -> None:
    module = Fails(error, at)
    with pytest.raises(type(error)) as raised:
        make_trainer("split", MemoryMonitor()).fit(module)
    assert raised.value is error
    assert said.count(f"Out of memory on rank 0|{when}|weights|optimizer|masters") == 1
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


def test_another_error_is_none_of_its_business(said: Said) -> None:
    with pytest.raises(KeyError):
        make_trainer("split", MemoryMonitor()).fit(Fails(KeyError("x"), 1))
    assert "Out of memory" not in said


# --- arguments, stock scaler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{"reset_peak": 1}, {"warn_fraction": 0}, {"warn_fraction": 1.1}, {"warn_fraction": True}, {"warn_fraction": "x"}],
)
def test_an_argument_out_of_range_is_refused_with_the_legal_values(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        MemoryMonitor(**arguments)


def test_under_a_stock_scaler_state_is_unknown_until_it_lets_a_step_through() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    rows = Rows()
    settings = {**QUIET, "logger": rows, "log_every_n_steps": 1, "limit_val_batches": 0}
    trainer = lightning.Trainer(plugins=[plugin], callbacks=[MemoryMonitor()], **settings)
    trainer.fit(InfiniteAtFirst(mlp(), PLAIN))
    known = ["memory/optimizer_gib" in row for row in rows.rows if "memory/weights_gib" in row]
    assert known == [False, False, True, True]


# --- several ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks of the worker found."""
    folder = tmp_path_factory.mktemp("ranks")
    launch("tests.callbacks.memory_ddp_worker", folder)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_both_ranks_publish_the_largest_peak_and_whose_it_is(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["memory/peak_rank"] == 1, "the rank that holds a large block"
    assert first["metrics"]["memory/peak_rss_gib"] == pytest.approx(second["rss_gib"], abs=0.05)
    assert second["rss_gib"] > first["rss_gib"] + 0.2
    assert [row["step"] for row in first["rows"]] == [1, 3]
    assert second["rows"] == [], "only rank 0 has a logger that writes"


def test_ranks_exchange_numbers_once_for_each_row_and_not_in_between(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["gathers"] for found in two_ranks] == [2, 2]


def test_a_rank_without_a_batch_or_a_loss_takes_part_all_the_same(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["uneven"] == second["uneven"]
    assert first["uneven_gathers"] == second["uneven_gathers"] == 4


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "expected"), [("32-true", 16), ("split", 14), ("copy", 16), ("16-master", 16)])
def test_on_a_real_device_the_peak_is_that_of_torch_and_more_than_the_parts(precision: str, expected: int) -> None:
    module = M(nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.Linear(2048, 1)), ADAMW)
    rows = rows_of(precision, module, accelerator="gpu").rows
    for row in rows:
        assert row["memory/bytes_per_parameter"] == expected
        assert row["memory/activations_gib"] >= 0
        assert row["memory/run_peak_gib"] >= row["memory/peak_gib"]
        assert row["memory/peak_reserved_gib"] >= row["memory/peak_gib"]
        assert "memory/peak_rss_gib" not in row
    assert rows[-1]["memory/peak_gib"] * GIB >= torch.cuda.memory_allocated()
