"""What forward saves for backward is counted from the graph, without touching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from lightning_mp.cost.activations import saved_bytes
from lightning_mp.cost.memory import StorageKey, storage_keys
from tests.instruments import CountSyncs

pytestmark = pytest.mark.usefixtures("seeded")


class Scaled(torch.autograd.Function):
    """Saves one tensor as it should be done, and keeps another as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        ctx.factor = torch.full((100,), 3.0)
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 8, 3, 2, 8).unbind(2)
        out = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return x + out.transpose(1, 2).reshape(2, 8, 16)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def known(module: nn.Module, *batch: Tensor) -> set[StorageKey]:
    return storage_keys([*module.parameters(), *module.buffers(), *batch])


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def reference(module: nn.Module, x: Tensor) -> int:
    """The bytes of unique storages that torch's own hooks see saved, without parameters, buffers and the batch."""
    there = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), x)}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(module, x)
    del loss
    return sum(storage.nbytes() for address, storage in kept.items() if address not in there)


def test_the_worked_example_saves_64_bytes() -> None:
    module, x = mlp(), torch.ones(2, 4)
    assert saved_bytes(module(x).sum(), known(module, x)) == 64
    assert saved_bytes(module(x).sum(), known(module)) == 64 + 32, "without the batch among the known"


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (mlp(), (2, 4)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()), (2, 3, 8, 8)),
        (nn.Sequential(Attention(), nn.Dropout(0.5), Attention()), (2, 8, 16)),
        (nn.LSTM(4, 8, num_layers=2, batch_first=True), (2, 5, 4)),
    ],
    ids=["mlp", "convolution", "attention", "lstm"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_it_counts_what_torchs_own_hooks_see(module: nn.Module, shape: tuple[int, ...], autocast: bool) -> None:
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        expected = reference(module, x)
        counted = saved_bytes(loss_of(module, x), known(module, x))
    assert counted == expected > 0


def test_it_agrees_with_torchs_memory_tracker() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid()), torch.ones(32, 64)
    counted = saved_bytes(module(x).sum(), known(module, x))
    tracker = MemTracker()
    tracker.track_external(module)
    with tracker:
        loss = module(x).sum()
        snapshot = tracker.get_tracker_snapshot("current")[x.device]
        loss.backward()
    by_kind = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}
    # the tracker also counts the loss, 4 bytes, which no operation saves
    assert by_kind["Activation"] - 4 == counted == 2 * 32 * 64 * 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_of_a_checkpointed_segment_the_input_counts_and_nothing_is_computed_again(use_reentrant: bool) -> None:
    outer, inner, x = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), torch.ones(2, 4)
    calls: list[int] = []
    inner[0].register_forward_hook(lambda *_: calls.append(1))
    hidden = outer(x)
    loss = checkpoint(inner, hidden, use_reentrant=use_reentrant).sum()
    both = nn.ModuleList([outer, inner])
    rng_state = torch.get_rng_state().nbytes if use_reentrant else 0  # an attribute of the context
    assert saved_bytes(loss, known(both, x)) == hidden.numel() * 4 + rng_state
    assert len(calls) == 1
    plain = inner(outer(x)).sum()
    assert saved_bytes(plain, known(both, x)) == (2 * 8 + 2 * 64) * 4
    loss.backward()
    assert len(calls) == 3, "backward computes the segment again"


def test_custom_functions_count_with_the_attributes_of_their_context() -> None:
    x = torch.ones(10, requires_grad=True)
    assert saved_bytes(Scaled.apply(x).sum()) == 10 * 4 + 100 * 4


def test_tensors_that_hooks_moved_count_where_they_are_now() -> None:
    x = torch.ones(10, requires_grad=True)
    with save_on_cpu():
        loss = x.exp().sum()
    assert saved_bytes(loss) == 10 * 4


def test_functional_transforms_in_the_forward_are_left_alone() -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)

    def forward() -> Tensor:
        return (torch.func.grad(lambda y: (weight * y**2).sum())(x) * weight).sum()

    assert saved_bytes(forward(), storage_keys([weight, x])) is not None
    with (
        pytest.raises(RuntimeError, match="saved tensor hooks"),
        saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    ):
        forward()  # why this module uses no hooks


def test_the_walk_changes_no_gradient_and_makes_no_sync() -> None:
    def gradients(look: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        module, x = nn.Sequential(Attention(), nn.Dropout(0.5)), torch.randn(2, 8, 16)
        loss = module(x).square().mean()
        look(loss)
        loss.backward()
        return [param.grad for param in module.parameters()]  # type: ignore[misc]

    syncs = CountSyncs()

    def walk(loss: Tensor) -> None:
        with syncs:
            assert saved_bytes(loss)

    assert all(torch.equal(a, b) for a, b in zip(gradients(walk), gradients(lambda loss: None), strict=True))
    assert syncs.seen == []


def test_without_a_graph_it_is_unknown_and_a_freed_graph_holds_nothing() -> None:
    assert saved_bytes(torch.ones(())) is None
    x = torch.ones(1000, requires_grad=True)
    loss = x.exp().sum()
    assert saved_bytes(loss) == 4000
    loss.backward()
    assert saved_bytes(loss) == 0


def test_the_graph_is_not_kept_alive() -> None:
    x = torch.ones(10, requires_grad=True)
    hidden = x.exp()
    storage = torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage())
    loss = hidden.sum()
    assert saved_bytes(loss) == 40
    del hidden, loss
    assert storage.expired()
