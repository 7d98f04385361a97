"""What the bf16 step does not do: wait for the device, or take more memory than it says."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.nn import Parameter
from torch.utils.data import DataLoader, TensorDataset

import lightning_mp.masters
from lightning_mp import MasterWeightPrecision
from lightning_mp.masters import Masters
from lightning_mp.swap import BucketedStep, prepare
from tests.instruments import CountSyncs, TrackBytes

MIB = 2**20


class Net(L.LightningModule):
    """Two layers and a norm, with an optimizer that makes no sync of its own."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 96)
        self.norm = torch.nn.LayerNorm(96)
        self.head = torch.nn.Linear(96, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.head(self.norm(self.body(batch[0]))), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def syncs_in_steps(plugin, clip=1.0, accumulate=1) -> list[str]:
    """Syncs within optimizer_step and the forward and backward contexts, over some steps."""
    torch.manual_seed(0)
    counter = CountSyncs()

    class Counting(type(plugin)):
        def _counted(self, name, *args, **kwargs):
            with counter:
                return getattr(super(), name)(*args, **kwargs)

        def optimizer_step(self, *args, **kwargs):
            return self._counted("optimizer_step", *args, **kwargs)

        def backward(self, *args, **kwargs):
            return self._counted("backward", *args, **kwargs)

        def train_step_context(self):
            with counter:
                context = super().train_step_context()
                context.__enter__()
            return _Entered(context)

    plugin.__class__ = Counting
    data = DataLoader(TensorDataset(torch.randn(16, 64), torch.randn(16, 1)), batch_size=2)
    trainer = L.Trainer(
        plugins=[plugin],
        max_epochs=1,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), data)
    return counter.seen


class _Entered:
    """A context that was entered already."""

    def __init__(self, context):
        self._context = context

    def __enter__(self):
        return None

    def __exit__(self, *exception):
        return self._context.__exit__(*exception)


@pytest.mark.parametrize("storage", ["split", "copy"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("like_a_device", [False, True])
def test_a_bf16_step_makes_no_sync_that_fp32_does_not_make(storage, accumulate, like_a_device, monkeypatch):
    if like_a_device:  # where a comparison would be a sync, so that the other branch runs
        monkeypatch.setattr(lightning_mp.masters, "known_equal", lambda left, right: False)
    assert syncs_in_steps(Precision(), accumulate=accumulate) == []
    assert syncs_in_steps(MasterWeightPrecision("bf16-master", master=storage), accumulate=accumulate) == []


def test_a_sync_in_the_step_would_be_counted(monkeypatch):
    original = Masters.settle

    def settle(self):
        original(self)
        for master in self:
            master.param.sum().item()

    monkeypatch.setattr(Masters, "settle", settle)
    assert syncs_in_steps(MasterWeightPrecision("bf16-master"))


def build(sizes, storage, optimizer=torch.optim.AdamW, **kwargs):
    masters = Masters(storage)
    masters.guarding = False  # guards are memory between steps
    params = [Parameter(torch.randn(size)) for size in sizes]
    for index, param in enumerate(params):
        masters.adopt(param, str(index))
    optimizer = optimizer(params, lr=1e-3, **kwargs)
    prepare(optimizer, masters)
    for param in params:
        param.grad = torch.randn(param.shape).bfloat16()
    return params, masters, optimizer


def peak_bytes_of_a_step(sizes, storage, bucket_mib, optimizer=torch.optim.AdamW, **kwargs) -> int:
    """Most bytes of temporary memory alive at a time in a step whose optimizer state exists already."""
    _, masters, optimizer = build(sizes, storage, optimizer, **kwargs)
    BucketedStep(optimizer, masters, bucket_mib * MIB).run()  # makes the optimizer's state
    stepper = BucketedStep(optimizer, masters, bucket_mib * MIB)  # with no scratch yet
    with TrackBytes() as tracker:
        masters.settle()
        stepper.run()
    return tracker.peak


@pytest.mark.parametrize("storage", ["split", "copy"])
@pytest.mark.parametrize("bucket_mib", [0.25, 1, 4])
@pytest.mark.parametrize("count", [3, 12])
def test_temporary_memory_of_a_step_is_one_bucket_whatever_the_model(storage, bucket_mib, count):
    peak = peak_bytes_of_a_step([300_000, 1000, 77] * count, storage, bucket_mib, fused=True)
    assert peak <= (bucket_mib + 1) * MIB


def test_a_parameter_that_cannot_be_sliced_takes_memory_for_itself_alone():
    # Adafactor's update looks at whole rows and columns, and makes temporaries of the parameter's size of its own
    size, mib = 500 * 500, 0.5
    own = 3 * size * 4
    one = peak_bytes_of_a_step([(500, 500)], "split", mib, torch.optim.Adafactor, foreach=False)
    five = peak_bytes_of_a_step([(500, 500)] * 5, "split", mib, torch.optim.Adafactor, foreach=False)
    assert five <= one + 0.1 * MIB
    assert five <= size * 8 + own + MIB


def test_memory_without_buckets_would_be_the_models():
    sizes = [300_000] * 6
    assert peak_bytes_of_a_step(sizes, "split", math.inf, fused=True) >= sum(sizes) * 8


@pytest.mark.parametrize(("storage", "expected"), [("split", 14), ("copy", 16)])
def test_bytes_per_parameter_with_adamw(storage, expected):
    params, masters, optimizer = build([10_000, 50], storage, fused=True)
    BucketedStep(optimizer, masters, MIB).run()
    held = [*params, *(param.grad for param in params), *(t for master in masters for t in master.tensors)]
    held += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert sum(t.numel() * t.element_size() for t in held) == expected * sum(param.numel() for param in params)


def test_a_parameter_that_never_had_a_gradient_keeps_its_remainder_and_no_copy():
    params, masters, optimizer = build([100, 100], "copy")
    params[1].grad = None
    BucketedStep(optimizer, masters, MIB).run()
    assert [t.dtype for t in masters.get(params[0]).tensors] == [torch.float32]
    assert [t.dtype for t in masters.get(params[1]).tensors] == [torch.int16]


def test_guards_are_gone_while_gradients_are_alive():
    alive = {}

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, *_):
            alive["step"] = [master.guard for master in trainer.precision_plugin._masters]

        def on_train_batch_end(self, trainer, *_):
            alive["between"] = [master.guard for master in trainer.precision_plugin._masters]

    plugin = MasterWeightPrecision("bf16-master")
    trainer = L.Trainer(
        plugins=[plugin],
        max_epochs=1,
        accelerator="cpu",
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4, 64), torch.randn(4, 1)), batch_size=2))
    assert all(guard is None for guard in alive["step"])
    assert all(guard is not None for guard in alive["between"])


# --- gradients do not outlive their step -------------------------------------------------------------------------------------


class Looks(Net):
    """Looks in training_step whether there are gradients of the step before."""

    def __init__(self):
        super().__init__()
        self.had_gradients = []

    def training_step(self, batch, batch_idx):
        self.had_gradients.append(any(param.grad is not None for param in self.parameters()))
        return super().training_step(batch, batch_idx)


def had_gradients(precision, module, accumulate=1, callbacks=()):
    trainer = L.Trainer(
        plugins=[MasterWeightPrecision(precision)], max_epochs=1, accumulate_grad_batches=accumulate, callbacks=list(callbacks),
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 64), torch.randn(8, 1)), batch_size=2))
    return module.had_gradients


@pytest.mark.parametrize("precision", ["bf16-master", "16-master"])
def test_gradients_of_a_finished_step_take_no_memory_in_the_next_forward(precision):
    assert had_gradients(precision, Looks()) == [False] * 4
    assert had_gradients("32-true", Looks()) == [False, True, True, True]  # Lightning clears them later


def test_gradients_of_an_open_window_stay():
    assert had_gradients("bf16-master", Looks(), accumulate=2) == [False, True, False, True]


def test_gradients_stay_for_those_who_may_want_them():
    class Own(Looks):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad()

    class Sees(L.Callback):
        def __init__(self):
            self.norms = []

        def on_before_zero_grad(self, trainer, module, optimizer):
            self.norms += [param.grad.norm().item() for param in module.body.parameters() if param.grad is not None]

    sees = Sees()
    assert had_gradients("bf16-master", Own()) == [False, True, True, True]
    assert had_gradients("bf16-master", Looks(), callbacks=[sees]) == [False, True, True, True]
    assert len(sees.norms) == 6
