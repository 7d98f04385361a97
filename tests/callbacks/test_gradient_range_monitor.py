"""`GradientRangeMonitor` against gradients and updates that are known, under our precisions and Lightning's."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_mp import MasterWeightPrecision, StaticLossScale
from lightning_mp.callbacks import gradients
from lightning_mp.callbacks.gradients import GROUP_ELEMENTS, GradientRangeMonitor, _grouped, _sample, compute_format
from lightning_mp.numerics.formats import BF16, FP16, FP32
from tests.callbacks.stand_ins import Rows, Scripted, wandb_run
from tests.conftest import Said
from tests.ddp.launch import launch
from tests.instruments import CountSyncs
from tests.modules import LinearLoss, M, Manual, random_rows
from tests.report.wandb_file import isolate

pytestmark = pytest.mark.usefixtures("seeded")

ROOT = Path(__file__).parents[2]
NORM, UNDERFLOW, NEAR = "gradients/norm", "gradients/underflow_fraction", "gradients/near_overflow_fraction"
UNSCALED, IN_BF16 = "gradients/underflow_fraction_fp16_unscaled", "gradients/underflow_fraction_bf16"
LOST, STALLED = "gradients/updates_lost_fraction", "gradients/stalled_parameters"
KEYS = {NORM, UNDERFLOW, NEAR, UNSCALED, IN_BF16, LOST, STALLED}


#: A scale at which nothing here overflows.
FP16_MASTERS = partial(MasterWeightPrecision, "16-master", loss_scale=StaticLossScale(1.0))


def make_trainer(plugin: Precision, *callbacks: Callback, **options: Any) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        **options,
    }
    return Trainer(plugins=[plugin], callbacks=list(callbacks), **settings)


def sample(
    plugin: Precision, module: LightningModule, monitor: GradientRangeMonitor | None = None, **options: Any
) -> tuple[Rows, GradientRangeMonitor]:
    """Fit with every step sampled, unless a monitor is given."""
    rows, monitor = Rows(), monitor or GradientRangeMonitor(1)
    make_trainer(plugin, monitor, logger=rows, **options).fit(module)
    rows.rows = [row for row in rows.rows if any(key in row for key in KEYS)]
    return rows, monitor


def given(*gradients: list[float]) -> LinearLoss:
    """A module with one weight, all ones, whose gradient at step i is the i-th list; plain SGD with lr 1."""
    module = LinearLoss(torch.tensor(gradients))
    nn.init.ones_(module.layer.weight)
    return module


class Mlp(M):
    """Makes gradients of known true values: an embedding with unused rows, and a layer with dead units."""

    def __init__(self, loss_factor: float = 1.0) -> None:
        super().__init__(nn.Linear(16, 32, bias=False), rows=(torch.randint(0, 8, (64,)), torch.randn(64, 1)), batch=64)
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(32, 1, bias=False)
        self.loss_factor = loss_factor
        with torch.no_grad():
            self.layer.weight[:8] = 0
            self.head.weight[:, :8] = 0

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.layer(self.embedding(batch[0])).relu()
        return ((self.head(hidden).float() - batch[1]) ** 2).mean() * self.loss_factor


# --- range -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [Precision(), MixedPrecision("bf16-mixed", "cpu"), MasterWeightPrecision("32-true")])
def test_without_fp16_the_fractions_say_what_fp16_and_bf16_would_do_and_zeros_do_not_count(plugin: Precision) -> None:
    gradient = [0.0, -0.0, 2.0**-15, -(2.0**-30), 2.0**-14, 1.0, 3e4, -4e4, 1e-39, 1.0]
    rows, _ = sample(plugin, given(gradient))
    (row,) = rows.rows
    assert row[NORM] == pytest.approx(math.hypot(*gradient))
    assert row[UNDERFLOW] == row[UNSCALED] == pytest.approx(3 / 8)
    assert row[IN_BF16] == pytest.approx(1 / 8)
    assert row[NEAR] == pytest.approx(1 / 8)
    assert row["step"] == 0


def test_under_fp16_the_present_scale_decides() -> None:
    gradient = [2.0**-25, 2.0**-23, 1.0, 30.0, 40.0, -63.0, 1.0, 1.0]
    rows, _ = sample(Scripted(scale=2.0**10), given(gradient))
    (row,) = rows.rows
    assert row[UNDERFLOW] == pytest.approx(1 / 8)
    assert row[UNSCALED] == pytest.approx(2 / 8)
    assert row[IN_BF16] == 0
    assert row[NEAR] == pytest.approx(2 / 8)


def test_under_fp16_negative_zeros_stand_for_flushed_values() -> None:
    gradient = [-0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    rows, monitor = sample(Scripted(), given(gradient))
    (row,) = rows.rows
    assert row[UNDERFLOW] == row[UNSCALED] == pytest.approx(2 / 4)
    assert row[IN_BF16] == 0
    assert monitor.exponents is not None
    assert monitor.exponents.flushed == 2
    assert sample(Precision(), given(gradient))[0].rows[0][UNDERFLOW] == 0


def test_near_overflow_bits_move_the_limit() -> None:
    gradient = [65504.0, 32752.0, 16376.0, 1.0]
    for bits, expected in ((0, 0.25), (1, 0.5), (2, 0.75)):
        rows, _ = sample(Precision(), given(gradient), GradientRangeMonitor(1, near_overflow_bits=bits))
        assert rows.rows[0][NEAR] == expected


def true_fraction(module: Mlp, scale: float) -> float:
    """Of the nonzero gradient elements, in fp32, the fraction that is below fp16's smallest normal number when scaled."""
    exact = copy.deepcopy(module)
    exact.loss([*module.rows]).backward()
    gradients = torch.cat([param.grad.flatten() for param in exact.parameters()])
    gradients = gradients[gradients != 0]
    return ((gradients * scale).abs() < 2.0**-14).float().mean().item()


@pytest.mark.parametrize("precision", ["16-mixed", "16-master"])
@pytest.mark.parametrize("scale", [1.0, 2.0**4, 2.0**6, 2.0**9, 2.0**13])
def test_under_real_fp16_the_fraction_is_near_that_of_the_fp32_gradient(precision: Any, scale: float) -> None:
    module = Mlp(2.0**-12)
    expected = true_fraction(module, scale)
    rows, _ = sample(MasterWeightPrecision(precision, loss_scale=StaticLossScale(scale)), module)
    # rounding in the forward pass, flushed values that lose their sign (embedding), and chance: 0.002 in all
    assert rows.rows[0][UNDERFLOW] == pytest.approx(expected, abs=0.01)
    assert rows.rows[0][UNSCALED] >= rows.rows[0][UNDERFLOW]


def test_these_scales_tell_much_underflow_from_little() -> None:
    module = Mlp(2.0**-12)
    assert true_fraction(module, 1.0) > 0.9
    assert 0.3 < true_fraction(module, 2.0**6) < 0.5
    assert 0 < true_fraction(module, 2.0**13) < 0.05


@pytest.mark.parametrize(
    ("expected", "precisions"),
    [
        (FP16, ["16-mixed", "16-master", "16-true"]),
        (BF16, ["bf16-mixed", "bf16-master", "bf16-true"]),
        (FP32, ["32-true"]),
        (None, ["64-true", "transformer-engine", "auto"]),
    ],
)
def test_the_compute_format_follows_from_the_name_of_the_precision(expected: Any, precisions: list[str]) -> None:
    assert [compute_format(precision) for precision in precisions] == [expected] * len(precisions)


def test_under_an_unknown_format_only_what_is_known_is_published() -> None:
    plugin = Precision()
    plugin.precision = "64-true"
    rows, _ = sample(plugin, given([1.0, 1e-9]))
    assert rows.rows[0].keys() - {"step"} == KEYS - {UNDERFLOW, NEAR}


def test_a_gradient_of_zeros_has_a_norm_and_no_fractions() -> None:
    rows, monitor = sample(Precision(), given([0.0, 0.0]))
    assert rows.rows == [{NORM: 0.0, STALLED: 1, "step": 0}]
    assert monitor.stalled == ("layer.weight",)


# --- the histogram -----------------------------------------------------------------------------------------------------


def test_the_histogram_has_every_nonzero_element_in_its_bin() -> None:
    _, monitor = sample(Precision(), given([1.0, -1.5, 2.0**-20, 0.0, 2.0**-149]))
    histogram = monitor.exponents
    assert histogram is not None
    assert histogram.edges.shape == (278,)
    filled = {histogram.edges[i]: count for i, count in enumerate(histogram.counts) if count}
    assert filled == {0.0: 2, -20.0: 1, -149.0: 1}
    assert (histogram.step, histogram.scale, histogram.flushed) == (1, 1.0, 0)


def test_the_histograms_values_are_spread_as_its_counts_and_keep_rare_ones() -> None:
    _, monitor = sample(Precision(), given([1.0] * 3000 + [2.0**-5] * 1000 + [2.0**-40]))
    assert monitor.exponents is not None
    values = monitor.exponents.values(limit=400)
    bins, counts = np.unique(np.floor(values), return_counts=True)
    assert bins.tolist() == [-40, -5, 0]
    assert counts.tolist() == [1, 100, 300]
    assert np.histogram(values, bins=4, range=(-5, -4))[0].tolist() == [25] * 4  # even within a bin
    assert values[0] == -39.5


def test_weights_and_biases_gets_a_histogram_and_other_loggers_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    rows, logger = Rows(), WandbLogger(project="test", offline=True, save_dir=tmp_path)
    make_trainer(Precision(), GradientRangeMonitor(2), logger=[rows, logger]).fit(M())
    logger.experiment.finish()
    history, _ = wandb_run(tmp_path)
    histograms = [row for row in history if row.get("gradients/exponents._type") == "histogram"]
    assert all(sum(row["gradients/exponents.values"]) >= 4096 for row in histograms)
    assert [row["trainer/global_step"] for row in histograms] == [0, 2]
    assert [row["trainer/global_step"] for row in history if NORM in row] == [0, 2]
    assert len([row for row in rows.rows if NORM in row]) == 2
    assert "gradients/exponents" not in {key for row in rows.rows for key in row}


def test_it_does_not_import_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises
    assert sample(Precision(), M())[0].rows


# --- updates -----------------------------------------------------------------------------------------------------------

# from 1.0 bf16's next numbers are 2^-7 up and 2^-8 down; a gradient is subtracted
UPDATES = [2.0**-9, 2.0**-8, -(2.0**-8), -(2.0**-8) * 1.01, 0.0, 1e-5, 0.5, -1e-6]
LOST_OF_THEM = 4 / 7


@pytest.mark.parametrize("storage", ["split", "copy"])
def test_the_updates_that_bf16_would_have_lost_are_counted_from_the_masters(storage: Any) -> None:
    module = given(UPDATES)
    rows, _ = sample(MasterWeightPrecision("bf16-master", master=storage), module)
    assert rows.rows[0][LOST] == pytest.approx(LOST_OF_THEM)
    # what was counted as lost is what bf16 weights without masters do not do
    weight = torch.ones(8, dtype=torch.bfloat16)
    updates = -torch.tensor(UPDATES).bfloat16()
    unmoved = (weight.float() + updates.float()).bfloat16() == weight
    assert (unmoved & (updates != 0)).sum() / 7 == pytest.approx(LOST_OF_THEM)


def test_the_updates_that_fp16_would_have_lost_are_counted_from_the_masters() -> None:
    gradient = [2.0**-12, 2.0**-11, -(2.0**-11), -(2.0**-10), 0.0, 2.0**-14]
    rows, _ = sample(MasterWeightPrecision("16-master", loss_scale=StaticLossScale(1.0)), given(gradient))
    assert rows.rows[0][LOST] == pytest.approx(3 / 5)


def test_parameters_that_are_fp32_are_their_own_masters_and_lose_nothing() -> None:
    for plugin in (Precision(), MasterWeightPrecision("bf16-master", fp32_modules=("*",)), MasterWeightPrecision("16-mixed")):
        assert sample(plugin, given(UPDATES))[0].rows[0][LOST] == 0


def test_16_bit_parameters_without_masters_have_no_fraction_of_lost_updates() -> None:
    rows, monitor = sample(HalfPrecision("bf16-true"), M(rows=tuple(rows.bfloat16() for rows in random_rows())))
    assert rows.rows[0].keys() - {"step"} == KEYS - {LOST}
    assert monitor.stalled == ()


def test_without_a_nonzero_update_there_is_no_fraction() -> None:
    rows, monitor = sample(MasterWeightPrecision("bf16-master"), M(optimizer=partial(SGD, lr=0.0)))
    assert LOST not in rows.rows[0]
    assert monitor.stalled == ()


def test_a_small_learning_rate_loses_more_updates_than_a_large_one() -> None:
    def fraction(lr: float) -> float:
        torch.manual_seed(1)
        module = M(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1)), partial(SGD, lr=lr))
        return sample(MasterWeightPrecision("bf16-master"), module)[0].rows[0][LOST]

    assert fraction(1e-6) > 0.95 > fraction(1e-3) > fraction(1e-1) > 0


# --- stalled parameters ------------------------------------------------------------------------------------------------


class ThreeLayers(M):
    """``net.tiny`` moves by less than bf16 can hold, ``net.dead`` has a gradient of zeros, ``net.alive`` moves."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1), partial(SGD, lr=1.0))
        self.net = nn.ParameterDict({name: nn.Parameter(torch.ones(50)) for name in ("tiny", "dead", "alive")})
        self.factors = {"tiny": 1e-4, "dead": 0.0, "alive": 0.1}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.factors = dict.fromkeys(self.factors, 0.1)
        return sum((param * self.factors[name]).sum() for name, param in self.net.items())  # type: ignore[return-value]


def test_stalled_parameters_are_named_and_a_change_is_said_once(said: Said) -> None:
    rows, monitor = sample(MasterWeightPrecision("bf16-master"), ThreeLayers())
    assert rows.column(STALLED) == [2, 2, 2, 0]
    assert monitor.stalled == ()
    assert said.count("Step 1: 2 parameters are stalled: net.dead, net.tiny.") == 1
    assert said.count("parameters are stalled") == 1
    assert said.count("Step 4: no parameter is stalled any more") == 1
    # the layer that takes no part has no gradient, and is passed over


def test_with_fp32_weights_the_tiny_updates_are_no_stall() -> None:
    rows, _ = sample(Precision(), ThreeLayers())
    assert rows.column(STALLED) == [1, 1, 1, 0]


def test_the_stall_fraction_sets_how_many_lost_updates_are_a_stall() -> None:
    for fraction, stalled in ((LOST_OF_THEM - 0.01, ("layer.weight",)), (LOST_OF_THEM + 0.01, ())):
        monitor = GradientRangeMonitor(1, stall_fraction=fraction)
        assert sample(MasterWeightPrecision("bf16-master"), given(UPDATES), monitor)[1].stalled == stalled


# --- which steps -------------------------------------------------------------------------------------------------------


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Watched(GradientRangeMonitor):
    """Watches the tensor operations of its hooks, batch by batch."""

    def __init__(self, every_n_steps: int, watch: Callable[[], Any] = CountOperations) -> None:
        super().__init__(every_n_steps)
        self.make_watch = watch
        self.watches: list[Any] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.watches.append(self.make_watch())

    def on_before_optimizer_step(self, *args: Any) -> None:
        with self.watches[-1]:
            super().on_before_optimizer_step(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        with self.watches[-1]:
            super().on_train_batch_end(*args)


@pytest.mark.parametrize("plugin", [Precision(), MasterWeightPrecision("bf16-master"), FP16_MASTERS()])
def test_steps_that_are_not_sampled_cost_no_tensor_operation(plugin: Precision) -> None:
    monitor = Watched(3)
    rows, _ = sample(plugin, M(rows=random_rows(16)), monitor)
    assert [row["step"] for row in rows.rows] == [0, 3, 6]
    assert [watch.count > 0 for watch in monitor.watches] == [step in (0, 3, 6) for step in range(8)]


def test_a_sample_takes_few_operations_for_each_of_many_parameters() -> None:
    def operations(layers: int) -> int:
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)], nn.Linear(4, 1))
        monitor = Watched(1)
        sample(Precision(), M(net), monitor, limit_train_batches=1)
        return monitor.watches[0].count

    few, many = operations(1), operations(21)
    assert 0 < many - few <= 40 * 20  # for each of 40 more parameters; measured one by one they take more than a hundred


class CountSyncsAndTransfers(CountSyncs):
    """Counts ``Tensor.cpu`` too."""

    def __enter__(self) -> CountSyncsAndTransfers:
        self.patch = pytest.MonkeyPatch()
        to_host = Tensor.cpu
        self.patch.setattr(Tensor, "cpu", lambda tensor: self.seen.append("cpu") or to_host(tensor))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.patch.undo()
        super().__exit__(*args)


def test_a_sampled_step_brings_one_tensor_to_the_host_and_reads_nothing_else() -> None:
    monitor = Watched(2, CountSyncsAndTransfers)
    sample(MasterWeightPrecision("bf16-master"), M(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))), monitor)
    assert [watch.seen for watch in monitor.watches] == [["cpu"], [], ["cpu"], []]


def test_every_sample_is_logged_whatever_the_loggers_interval_and_never_repeated() -> None:
    rows, _ = sample(Precision(), M(rows=random_rows(16)), GradientRangeMonitor(3), log_every_n_steps=1)
    assert [row["step"] for row in rows.rows] == [0, 3, 6]
    rows, _ = sample(Precision(), M(rows=random_rows(16)), GradientRangeMonitor(3), log_every_n_steps=50)
    assert [row["step"] for row in rows.rows] == [0, 3, 6]


def test_an_accumulated_step_is_one_sample_of_the_sum() -> None:
    module = given([1.0, 2.0], [3.0, 2.0], [1.0, 0.0], [1.0, 0.0])
    rows, _ = sample(Precision(), module, accumulate_grad_batches=2)
    assert rows.column(NORM) == pytest.approx([math.hypot(2, 2), 1.0])


def test_gradients_are_measured_before_clipping() -> None:
    rows, _ = sample(Precision(), given([3.0, 4.0]), gradient_clip_val=1.0)
    assert rows.column(NORM) == [5.0]


def test_a_skipped_step_is_no_sample_and_the_next_one_takes_its_place() -> None:
    rows, monitor = sample(Scripted(["a", None, None, None, None]), given(*[[1.0, 2.0]] * 6), GradientRangeMonitor(2))
    assert [row["step"] for row in rows.rows] == [1, 3, 5]
    assert monitor._pending == []


def test_a_sample_whose_step_was_skipped_after_the_hook_is_dropped() -> None:
    rows, monitor = sample(Scripted(["a", None, None], after_hook=True), given(*[[1.0, 2.0]] * 3))
    assert [row["step"] for row in rows.rows] == [1, 2]
    assert monitor._pending == []


def test_steps_that_a_stock_scaler_skips_are_no_samples() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    module = M(optimizer=partial(SGD, lr=1e-3), rows=(torch.ones(24, 4), torch.ones(24, 1)))
    rows, _ = sample(MixedPrecision("16-mixed", "cpu", scaler), module, GradientRangeMonitor(4))
    steps = [row["step"] for row in rows.rows]
    assert steps[0] > 0
    assert np.diff(steps).tolist() == [4] * (len(steps) - 1)
    assert all(math.isfinite(norm) for norm in rows.column(NORM))


class Gan(M):
    """Two optimizers on two layers, and one parameter in both, in manual optimization."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1, bias=False))
        self.other = nn.Linear(4, 1, bias=False)
        self.shared = nn.Parameter(torch.ones(1))
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for size, layer, optimizer in zip((3.0, 4.0), (self.layer, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward((layer.weight * torch.tensor([size, 0, 0, 0])).sum() + 12 * self.shared.sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        make = partial(SGD, lr=0.1)
        return [make([*self.layer.parameters(), self.shared]), make([*self.other.parameters(), self.shared])]


@pytest.mark.parametrize("plugin", [Precision(), MasterWeightPrecision("bf16-master"), FP16_MASTERS()])
def test_two_optimizers_in_a_batch_make_one_sample_and_a_shared_parameter_counts_once(plugin: Precision) -> None:
    rows, _ = sample(plugin, Gan(), GradientRangeMonitor(2))
    assert [row["step"] for row in rows.rows] == [0, 2]
    assert rows.column(NORM) == [13.0, 13.0]


def test_of_two_optimizers_only_the_skipped_one_is_left_out() -> None:
    rows, _ = sample(Scripted([None, "a", "a", None], after_hook=True), Gan(), limit_train_batches=2)
    assert rows.column(NORM) == [math.hypot(3, 12), math.hypot(4, 12)]


def test_an_optimizer_that_evaluates_the_model_again_makes_one_sample() -> None:
    for plugin in (Precision(), MasterWeightPrecision("bf16-master")):
        rows, _ = sample(plugin, M(optimizer=partial(LBFGS, lr=0.1, max_iter=4)))
        assert [row["step"] for row in rows.rows] == [0, 1, 2, 3]
        assert all(norm > 0 for norm in rows.column(NORM))


def test_manual_optimization_with_one_optimizer_is_sampled_per_batch() -> None:
    rows, _ = sample(MasterWeightPrecision("bf16-master"), Manual(), GradientRangeMonitor(3))
    assert [row["step"] for row in rows.rows] == [0, 3]


# --- which elements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (50, 64), (48, 96), (8, 3, 5, 5), (1000,), (2,)])
@pytest.mark.parametrize("limit", [1, 10, 100, 10**6])
def test_a_sample_is_bounded_spread_evenly_and_whole_when_it_may_be(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    taken = _sample(tensor, limit)
    assert taken.numel() <= limit
    assert len(set(taken.tolist())) == taken.numel()
    assert taken.numel() == tensor.numel() or taken.numel() >= min(limit, tensor.numel()) // 3
    assert not taken.numel() or taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_sample_sees_every_column() -> None:
    columns = torch.arange(64).expand(300, 64).contiguous()
    assert len(set(_sample(columns, 300).tolist())) == 64
    assert len(set(columns.flatten()[::64].tolist())) == 1  # as a plain stride would not


@pytest.mark.parametrize("tensor", [torch.randn(6, 8, 5, 5).to(memory_format=torch.channels_last), torch.randn(9, 7).T])
def test_a_sample_of_permuted_memory_is_a_view_and_two_tensors_are_sampled_alike(tensor: Tensor) -> None:
    assert _sample(tensor, 10**6).data_ptr() == tensor.data_ptr()
    assert torch.equal(_sample(tensor, 20), _sample(tensor.contiguous(), 20, like=tensor))


def test_a_bounded_sample_estimates_the_whole_and_weighs_parameters_by_their_size() -> None:
    class Two(M):
        def __init__(self) -> None:
            super().__init__(nn.Linear(1, 1, bias=False))
            self.large = nn.Parameter(torch.zeros(90_000))
            self.small = nn.Parameter(torch.zeros(100))
            self.direction = torch.where(torch.rand(90_000) < 0.3, 1e-8, 1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.large * self.direction).sum() + self.small.sum()

    module = Two()
    lost, kept = (module.direction < 0.5).sum().item(), (module.direction > 0.5).sum().item()
    rows, monitor = sample(Precision(), module, GradientRangeMonitor(1, max_elements=1000), limit_train_batches=1)
    assert rows.rows[0][UNDERFLOW] == pytest.approx(lost / 90_100, abs=0.05)
    assert rows.rows[0][NORM] == pytest.approx(math.sqrt(kept + 100), rel=1e-4)
    assert monitor.exponents is not None
    assert monitor.exponents.counts.sum() == pytest.approx(90_100)


class Mixed(M):
    """16-bit and fp32 parameters in turn, and some of each that stand still."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(4, 4), nn.LayerNorm(4))], nn.Linear(4, 1))
        )
        self.still = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (3, 700, 40)])

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + sum(param.sum() * factor for param, factor in zip(self.still, (0, 1e-9, 1), strict=True))


@pytest.mark.parametrize("plugin", [MasterWeightPrecision("bf16-master"), FP16_MASTERS(), Precision()])
def test_how_parameters_are_grouped_changes_no_value(plugin: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (1, 50, GROUP_ELEMENTS):
        monkeypatch.setattr(gradients, "GROUP_ELEMENTS", limit)
        torch.manual_seed(1)
        rows, monitor = sample(plugin, Mixed(), GradientRangeMonitor(1, max_elements=500))
        assert monitor.exponents is not None
        found.append((rows.rows, monitor.stalled, monitor.exponents.counts.tolist()))
    assert found[0] == found[1] == found[2]
    names = [name for name, _ in Mixed().named_parameters()]
    assert "still.0" in found[0][1]
    assert sorted(found[0][1], key=names.index) == list(found[0][1])  # in the module's order


def test_a_group_is_of_one_kind_and_bounded_in_what_is_sampled_and_copied() -> None:
    sizes = [10, 2**14, 2**20, 2**26, 2**14, 3] * 40
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    params = {
        str(index): nn.Parameter(torch.empty(size, dtype=dtypes[index % 3], device="meta")) for index, size in enumerate(sizes)
    }
    groups = list(_grouped(params, 2**14))
    assert sorted(name for group in groups for name in group) == sorted(params)
    assert len(groups) < len(params)
    for group in groups:
        assert len({param.dtype for param in group.values()}) == 1
        *but_one, _ = sorted(param.numel() for param in group.values())
        assert sum(min(size, 2**14) for size in but_one) <= GROUP_ELEMENTS
        assert sum(but_one) <= 16 * GROUP_ELEMENTS


class SomeMasters(Precision):
    """Knows fp32 values of ``layer.weight`` only."""

    def masters(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self.known if name == "layer.weight" else torch.ones(1, dtype=torch.bfloat16) for name in names}


def test_a_parameter_without_a_master_beside_one_that_has_one_is_left_out() -> None:
    plugin, module = SomeMasters(), M(rows=tuple(rows.bfloat16() for rows in random_rows()))  # type: ignore[arg-type]
    module.to(torch.bfloat16)
    plugin.known = torch.ones(1, 4)

    class Moves(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            plugin.known = plugin.known + torch.tensor([2.0**-10, 0.0, 1.0, 0.0])

    rows = Rows()
    nn.init.ones_(module.layer.weight)
    make_trainer(plugin, Moves(), GradientRangeMonitor(1), logger=rows, limit_train_batches=1).fit(module)
    assert rows.column(LOST) == [0.5]


def test_a_sparse_gradient_without_a_row_is_a_gradient_of_zeros() -> None:
    class NoRows(M):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) + self.table(torch.empty(0, dtype=torch.int64)).sum()

    rows, monitor = sample(Precision(), NoRows(), limit_train_batches=1)
    assert monitor.stalled == ("table.weight",)
    assert monitor.exponents is not None
    assert monitor.exponents.counts.sum() == 5  # of the linear layer
    assert rows.rows[0][NORM] > 0


class Odd(M):
    """Every odd kind of parameter; the gradient is that of a sum, unless it says otherwise."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4, bias=False))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight
        self.sparse = nn.Embedding(1000, 2, sparse=True)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.ones(()))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.fp64 = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.conv = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        twice = self.sparse(torch.tensor([5, 5, 7])).sum()  # row 5 has a gradient of 2
        total = self.layer.weight.sum() + twice + self.scalar + self.conv.sum() + self.fp64.sum() + self.empty.sum()
        return total.float() + torch.view_as_real(self.complex).sum()


def test_parameters_of_every_kind_are_measured_once_or_passed_over() -> None:
    rows, monitor = sample(Precision(), Odd(), limit_train_batches=1)
    ones = 16 + 1 + 2 * 3 * 16 + 2 + 4 + 2  # layer, scalar, conv, double, complex, and row 7 of the embedding
    assert rows.rows[0][NORM] == pytest.approx(math.sqrt(ones + 2 * 2.0**2))
    assert monitor.exponents is not None
    assert monitor.exponents.counts.sum() == ones + 2
    assert monitor.stalled == ()


def test_odd_parameters_go_with_16_bit_weights_too() -> None:
    rows, _ = sample(MasterWeightPrecision("bf16-master"), WithoutSparse(), limit_train_batches=1)
    assert rows.rows[0][NORM] == pytest.approx(math.sqrt(16 + 1 + 96 + 2 + 4))
    assert LOST in rows.rows[0]


class WithoutSparse(Odd):
    def __init__(self) -> None:
        super().__init__()
        del self.sparse

    def sparse(self, ids: Tensor) -> Tensor:
        return torch.zeros(())


# --- loggers, other callbacks, and the life of the callback ------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"barebones": True}, {"fast_dev_run": True}, {"overfit_batches": 1}, {"max_steps": 0}],
    ids=str,
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-master", "16-master"])
def test_it_raises_nothing_and_warns_nothing_without_a_logger(options: Any, precision: Any, said: Said) -> None:
    unset = dict.fromkeys(["enable_progress_bar", "enable_model_summary"]) if options.get("barebones") else {}
    make_trainer(MasterWeightPrecision(precision), GradientRangeMonitor(1), **options, **unset).fit(M())
    assert said.count("self.log(") == 0


def test_every_logger_gets_the_samples_and_callback_metrics_keep_the_last(tmp_path: Path) -> None:
    rows, files = Rows(), CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(MasterWeightPrecision("bf16-master"), GradientRangeMonitor(3), logger=[rows, files])
    trainer.fit(M())
    samples = [row for row in rows.rows if NORM in row]
    assert len(samples) == 2
    assert {key: value.item() for key, value in trainer.callback_metrics.items() if key in KEYS} == pytest.approx(
        {key: value for key, value in samples[-1].items() if key in KEYS}
    )
    assert trainer.callback_metrics.keys() >= KEYS
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 1 + len(rows.rows)


def test_checkpoints_and_stopping_can_follow_a_sample(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor=NORM, mode="min", every_n_train_steps=1)
    stop = EarlyStopping(LOST, mode="min", patience=1, check_on_train_epoch_end=True)
    trainer = make_trainer(MasterWeightPrecision("bf16-master"), GradientRangeMonitor(1), best, stop, max_epochs=50)
    trainer.fit(given(*[[2.0**-10] * 2] * 4))
    assert best.best_model_score == pytest.approx(math.hypot(2**-10, 2**-10))
    assert trainer.current_epoch < 49


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 must be a whole number, 1 or more"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        ({"every_n_steps": 1.5}, "every_n_steps=1.5"),
        ({"max_elements": -1}, "max_elements=-1 must be a whole number, 1 or more"),
        ({"near_overflow_bits": -1}, "near_overflow_bits=-1 must be a number of bits, 0 or more"),
        ({"near_overflow_bits": math.nan}, "near_overflow_bits=nan"),
        ({"stall_fraction": 0}, "stall_fraction=0 must be a fraction above 0, at most 1"),
        ({"stall_fraction": 1.1}, "stall_fraction=1.1"),
    ],
)
def test_an_argument_out_of_range_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientRangeMonitor(**arguments)


def test_sharded_parameters_are_refused_once_in_the_log(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    trainer = make_trainer(Precision(), GradientRangeMonitor(1))
    monkeypatch.setattr(type(trainer), "strategy", ModelParallelStrategy())
    monitor, optimizer = GradientRangeMonitor(1), SGD([nn.Parameter(torch.ones(1))], 0.1)
    monitor.on_train_start(trainer, M())
    monitor.on_before_optimizer_step(trainer, M(), optimizer)
    monitor.on_train_batch_end(trainer, M(), None, None, 0)
    assert said.count("GradientRangeMonitor does nothing under ModelParallelStrategy") == 1
    assert not monitor._has_stepped


class FailsInStep(M):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("module", [M, FailsInStep])
def test_no_tensor_is_held_after_training_or_an_exception(module: Any) -> None:
    monitor = GradientRangeMonitor(1)
    fit = partial(make_trainer(MasterWeightPrecision("bf16-master"), monitor).fit, module())
    if module is FailsInStep:
        with pytest.raises(ArithmeticError):
            fit()
    else:
        fit()
    assert not reaches_a_tensor(monitor)
    assert monitor.state_dict() == {}
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert other.every_n_steps == 1
    monitor._pending = [torch.zeros(1)]  # type: ignore[list-item]
    assert reaches_a_tensor(monitor)  # the search can find one


def reaches_a_tensor(start: Any) -> bool:
    found, todo, seen = False, [start.__dict__], set()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, type(sys))):
            continue
        seen.add(id(item))
        found |= isinstance(item, Tensor)
        todo += [other for other in gc.get_referents(item) if not callable(other)]
    return found


def test_a_second_fit_starts_afresh() -> None:
    monitor = GradientRangeMonitor(3)
    for _ in range(2):
        rows, _ = sample(Precision(), M(), monitor)
        assert [row["step"] for row in rows.rows] == [0, 3]


def test_training_is_not_changed_by_being_watched() -> None:
    def weights(*callbacks: Callback) -> list[Tensor]:
        torch.manual_seed(3)
        module = M(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
        make_trainer(MasterWeightPrecision("16-master"), *callbacks, max_epochs=2).fit(module)
        return [param.detach() for param in module.parameters()]

    for one, other in zip(weights(), weights(GradientRangeMonitor(1)), strict=True):
        assert torch.equal(one, other)


# --- two ranks ---------------------------------------------------------------------------------------------------------


class Halves(M):
    """Rank r sees every second row."""

    def train_dataloader(self) -> DataLoader[Any]:
        inputs, targets = random_rows(16)
        mine = slice(self.trainer.global_rank, None, 2)
        return DataLoader(list(zip(inputs[mine], targets[mine], strict=True)), batch_size=2)


def run_rank(folder: Path) -> None:
    """What a process of the test below does."""
    torch.manual_seed(0)
    best = ModelCheckpoint(folder, monitor=NORM, every_n_train_steps=1)
    rows = Rows()
    trainer = make_trainer(
        FP16_MASTERS(), GradientRangeMonitor(2), best,
        devices=2, strategy="ddp", use_distributed_sampler=False, logger=rows,
    )  # fmt: skip
    trainer.fit(Halves())
    metrics = {key: value.item() for key, value in trainer.callback_metrics.items() if key in KEYS}
    torch.save({"metrics": metrics, "rows": rows.rows}, folder / f"rank-{trainer.global_rank}.pt")


def test_two_ranks_have_equal_values_and_do_not_wait_for_each_other(tmp_path: Path) -> None:
    launch("tests.callbacks.test_gradient_range_monitor", tmp_path, timeout_s=90)
    zero, one = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert zero["metrics"].keys() == KEYS
    assert zero["metrics"] == one["metrics"]
    assert [row["step"] for row in zero["rows"] if NORM in row] == [0, 2]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
