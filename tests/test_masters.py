"""One parameter's master, and a module's masters: values, edits, layouts, and the way back to fp32."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_mp.masters import CHUNK, Master, Masters, clear_edited_, take_edits_
from lightning_mp.numerics.split import split
from tests.reference import bf16_half, same_bits

pytestmark = pytest.mark.usefixtures("seeded")
both_storages = pytest.mark.parametrize("storage", ["split", "copy"])
BF16, FP32 = torch.bfloat16, torch.float32
TINY = 2.0**-149  # the smallest fp32 above 0
BF16_MAX = 3.3895313892515355e38
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.001, 1 + 2**-8, 1 + 3 * 2**-8, TINY, -TINY, 2.0**-126, -(2.0**-127), 2.0**-134]
SPECIAL += [BF16_MAX, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]


def float_of_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(FP32)


def patterns(count: int = 4096) -> Tensor:
    """Special values and random bit patterns, among them NaNs with a payload and denormals."""
    drawn = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(FP32)
    near_zero = float_of_bits(*range(0, 0x20000, 0x1111), *range(0x80000000, 0x80020000, 0x1111))
    return torch.cat([torch.tensor(SPECIAL), float_of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001), near_zero, drawn])


def canonical(value: Tensor) -> Tensor:
    return torch.where(value.isnan(), torch.tensor(math.nan), value)


def adopted(value: Tensor, storage: str, guarded: bool = True) -> tuple[Masters, Parameter, Master]:
    """A parameter under masters; with ``copy`` it has had its first gradient."""
    masters = Masters(storage)
    param = Parameter(value.clone(memory_format=torch.preserve_format))
    master = masters.adopt(param, "weight")
    if storage == "copy":
        masters.make_full([master])
    if guarded:
        masters.end_step()
    return masters, param, master


# --- values ----------------------------------------------------------------------------------------------------------------


@both_storages
def test_a_master_is_the_value_that_was_adopted_for_every_kind_of_number(storage):
    value = patterns()
    masters, param, master = adopted(value, storage)
    assert same_bits(master.value(), canonical(value))
    masters.settle()
    assert same_bits(master.value(), canonical(value))
    assert param.dtype == BF16
    assert same_bits(param.isnan(), value.isnan())


def test_a_split_parameter_is_its_master_rounded_to_nearest_with_ties_away_from_zero():
    value = patterns()
    _, param, _ = adopted(value, "split")
    finite = ~value.isnan()
    rounded = [bf16_half(bits & 0xFFFFFFFF) for bits in value.view(torch.int32)[finite].tolist()]
    assert [bits & 0xFFFF for bits in param.detach().view(torch.int16)[finite].tolist()] == rounded


def test_a_copied_parameter_is_its_master_as_torch_rounds_it():
    value = patterns()
    _, param, master = adopted(value, "copy")
    finite = ~value.isnan()
    assert same_bits(param.detach()[finite], value.bfloat16()[finite])
    assert master.remainder is None
    assert master.guard is None


def test_the_parameter_object_and_its_flags_stay(plugin):
    masters = Masters(plugin.master)
    for requires_grad in (True, False):
        param = Parameter(torch.randn(3), requires_grad=requires_grad)
        param.note = "mine"
        master = masters.adopt(param, "weight")
        assert master.param is param
        assert param.requires_grad is requires_grad
        assert param.note == "mine"
        assert param.is_leaf
        assert masters.get(param) is master
    assert masters.get(torch.zeros(3)) is None
    assert masters.get(Parameter(torch.zeros(3))) is None


def test_a_parameter_is_adopted_once_whatever_its_names():
    masters = Masters("split")
    param = Parameter(torch.randn(3))
    before = param.detach().clone()
    first = masters.adopt(param, "encoder.weight")
    assert masters.adopt(param, "decoder.weight") is first
    assert len(masters) == 1
    assert masters.name(first) == "encoder.weight"
    assert masters.named(["encoder.weight"]) == [first]
    assert masters.named(["decoder.weight"]) == []
    assert same_bits(first.value(), before)


def test_a_parameter_that_is_bf16_already_starts_from_its_value():
    value = patterns().bfloat16()
    master = Master(Parameter(value.clone()))
    assert same_bits(canonical(master.value()), canonical(value.float()))
    assert not master.remainder.any()


def test_a_parameter_that_shares_memory_gets_its_own():
    base = torch.randn(4, 1)
    for dtype in (FP32, BF16):
        whole = base.to(dtype)
        param = Parameter(whole.expand(4, 3))
        master = Master(param)
        with torch.no_grad():
            param[0, 0] = 9.0
        assert param[0, 1] == whole[0, 0].bfloat16()
        assert master.value().shape == (4, 3)
        assert 9.0 not in whole


def test_value_is_a_new_tensor_each_time(plugin):
    _, _, master = adopted(torch.randn(5), plugin.master)
    first = master.value()
    kept = first.clone()
    first.fill_(7)
    assert same_bits(master.value(), kept)
    assert not master.value().requires_grad


@both_storages
@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (1,), (3, 5)], ids=str)
def test_scalars_and_empty_parameters_have_masters(storage, shape):
    value = torch.randn(shape)
    masters, param, master = adopted(value, storage)
    assert same_bits(master.value(), value)
    masters.settle()
    new = torch.randn(shape)
    master.set_(new)
    assert same_bits(master.value(), new)
    assert param.shape == shape
    masters.release()
    assert same_bits(param.detach(), new)


LAYOUTS = {
    "channels-last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels-last-3d": lambda: torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(5, 3).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
}


@both_storages
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_layout_is_kept(storage, layout):
    value = LAYOUTS[layout]()
    assert not value.is_contiguous()
    masters, param, master = adopted(value, storage)
    assert param.stride() == value.stride()
    assert all(tensor.stride() == value.stride() for tensor in master.tensors)
    assert same_bits(master.value(), value)
    new = torch.randn(value.shape)  # in another layout
    master.set_(new)
    assert same_bits(master.value(), new)
    with torch.no_grad():
        param[0, 1] = 3.0
    new[0, 1] = 3.0
    assert same_bits(master.value(), new)
    masters.settle()
    assert same_bits(master.value(), new)
    masters.release()
    assert param.stride() == value.stride()
    assert same_bits(param.detach(), new)


def test_a_strided_view_becomes_dense():
    value = torch.randn(6, 8)[::2, 1::3]
    master = Master(Parameter(value))
    assert same_bits(master.value(), value.contiguous())
    assert master.param.is_contiguous()


# --- set_ -------------------------------------------------------------------------------------------------------------------


@both_storages
@pytest.mark.parametrize("guarded", [True, False])
def test_set_takes_every_kind_of_number(storage, guarded):
    value = patterns()
    masters, param, master = adopted(torch.randn(value.shape), storage, guarded)
    master.set_(value)
    assert same_bits(canonical(master.value()), canonical(value))
    masters.settle()
    assert same_bits(canonical(master.value()), canonical(value))
    masters.end_step()
    assert same_bits(canonical(master.value()), canonical(value))
    assert same_bits(param.isnan(), value.isnan())


@both_storages
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BF16])
def test_set_takes_any_floating_dtype(storage, dtype):
    _, _, master = adopted(torch.randn(7), storage)
    value = torch.randn(7).to(dtype)
    master.set_(value)
    assert same_bits(master.value(), value.float())


@both_storages
def test_set_is_no_edit_and_is_not_reported(storage, caplog):
    masters, _, master = adopted(torch.randn(7), storage, guarded=False)
    master.set_(torch.randn(7))
    masters.settle()
    assert not caplog.records


# --- edits ------------------------------------------------------------------------------------------------------------------


def edit_in_place(param: Parameter, mask: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        param[mask] = value[mask].to(param.dtype)


def edit_through_data(param: Parameter, mask: Tensor, value: Tensor) -> None:
    param.data[mask] = value[mask].to(param.dtype)


both_ways = pytest.mark.parametrize("edit", [edit_in_place, edit_through_data], ids=["in_place", "data"])


@both_storages
@both_ways
def test_edited_elements_are_taken_over_and_the_others_keep_their_bits(storage, edit):
    value = canonical(patterns())
    masters, param, master = adopted(value, storage)
    before = param.detach().clone()
    edit(param, torch.rand(value.shape) < 0.5, canonical(value.flip(0)))
    # an element that was given the bits that it had is not edited; NaN is NaN
    changed = before.view(torch.int16) != param.detach().view(torch.int16)
    expected = torch.where(changed, param.detach().float(), value)
    assert 0.3 < changed.float().mean() < 0.6
    assert same_bits(canonical(master.value()), canonical(expected))
    masters.settle()
    assert same_bits(canonical(master.value()), canonical(expected))
    assert same_bits(canonical(param.detach().float()), canonical(torch.where(changed, expected, before.float())))


@both_storages
@both_ways
@pytest.mark.parametrize(("old", "new"), [(0.0, -0.0), (-0.0, 0.0), (TINY, 0.0), (-TINY, 0.0), (1e-3, 0.0), (-1e-3, -0.0)])
def test_signed_zeros_and_values_beside_zero(storage, edit, old, new):
    masters, param, master = adopted(torch.full((3,), old), storage)
    unedited = master.value()[2:]
    present = param.detach().clone()
    edit(param, torch.tensor([True, True, False]), torch.full((3,), new))
    visible = not same_bits(present[:2], param.detach()[:2])  # a value that rounds to 0 cannot be seen to be set to 0
    expected = torch.full((2,), new) if visible else torch.full((2,), old)
    for _ in range(2):
        assert same_bits(master.value()[:2], expected)
        assert same_bits(master.value()[2:], unedited)
        masters.settle()


@both_storages
@pytest.mark.parametrize("new", [math.inf, -math.inf, math.nan, 3.39e38], ids=str)
def test_an_edit_to_a_number_that_is_not_finite_or_at_the_edge_is_kept(storage, new):
    masters, param, master = adopted(torch.tensor([1.001, -1.001, 3.4e38]), storage)
    edit_through_data(param, torch.tensor([True, True, False]), torch.full((3,), new))
    expected = torch.tensor([new, new, 3.4e38]).bfloat16().float()
    expected[2] = 3.4e38  # whose parameter is infinite
    for _ in range(2):
        assert same_bits(canonical(master.value()), canonical(expected))
        masters.settle()


@both_storages
def test_an_edit_that_is_undone_is_none(storage):
    value = torch.randn(100)
    masters, param, master = adopted(value, storage)
    kept = param.detach().clone()
    param.data.zero_()
    param.data.copy_(kept)
    assert same_bits(master.value(), value)
    masters.settle()
    assert same_bits(master.value(), value)


@both_storages
def test_an_edit_in_each_of_several_rounds_is_kept(storage):
    value = torch.randn(50)
    masters, param, master = adopted(value, storage)
    for index in range(5):
        param.data[index] = float(index) + 10
        value[index] = float(index) + 10
        masters.settle()
        masters.end_step()
        assert same_bits(master.value(), value)
    assert master.guard is None or storage == "split"


@both_storages
@both_ways
def test_without_a_guard_an_edit_is_kept_to_half_an_ulp_and_stays_finite(storage, edit):
    value = torch.cat([torch.full((50,), -1e-3), torch.full((50,), 1.005e-3), torch.randn(100)])
    masters, param, master = adopted(value, storage, guarded=False)
    new = torch.zeros(200)
    new[100:] = torch.randn(100)
    mask = torch.arange(200) % 2 == 0
    assert split(value[mask][:50])[1].sign().unique().tolist() == [-1, 1]
    edit(param, mask, new)
    for _ in range(2):
        present = master.value()
        assert present.isfinite().all()
        # half an ulp of bf16 at 0; an edit in place is noticed by the version counter, so that zero is zero
        assert present[mask][:50].abs().max() <= (0.0 if edit is edit_in_place or storage == "copy" else 2.0**-134)
        torch.testing.assert_close(present[mask][50:], new[mask][50:].bfloat16().float(), rtol=2**-8, atol=0)
        assert same_bits(present[~mask], value[~mask])
        masters.settle()


@both_storages
@both_ways
@pytest.mark.parametrize("new", [math.inf, -math.inf])
def test_without_a_guard_an_edit_to_infinity_is_no_nan(storage, edit, new):
    value = torch.cat([torch.full((4,), -1e-3), torch.full((4,), 1.005e-3)])
    masters, param, master = adopted(value, storage, guarded=False)
    mask = torch.arange(8) % 2 == 0
    edit(param, mask, torch.full((8,), new))
    for _ in range(2):
        # the largest numbers are half an ulp of bf16 away from infinity
        assert (master.value()[mask] * math.copysign(1, new) > BF16_MAX).all()
        assert same_bits(master.value()[~mask], value[~mask])
        masters.settle()


def test_edits_without_a_guard_are_reported_once_with_names_and_remedy(caplog):
    masters = Masters("split")
    params = [Parameter(torch.ones(2)) for _ in range(8)]
    for index, param in enumerate(params):
        masters.adopt(param, f"layers.{index}")
    masters.settle()
    assert not caplog.records
    for _ in range(2):
        with torch.no_grad():
            for param in params:
                param.add_(1.0)
        masters.settle()
    (record,) = caplog.records
    wanted = ("layers.0", "layers.4", "...", "bf16", "copy", "on_train_batch_end")
    assert [word for word in wanted if word not in record.message] == []
    assert "layers.5" not in record.message


@pytest.mark.parametrize("layout", ["dense", "transposed"])
@pytest.mark.parametrize("size", [1, 64, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_edits_of_full_copies_are_found_in_small_and_large_parameters(size, layout):
    sizes = [size, 3, 0, size]
    full = [torch.randn(count).view(-1, 1).expand(-1, 2).clone() for count in sizes]
    if layout == "transposed":
        full = [tensor.t() for tensor in full]
    params = [tensor.bfloat16() for tensor in full]
    expected = [tensor.clone() for tensor in full]
    take_edits_(full, params)
    for tensor, unchanged in zip(full, expected, strict=True):
        assert same_bits(tensor, unchanged)
    for index in (0, 3):
        where = (-1, -1)
        params[index][where] = 77.0
        expected[index][where] = 77.0
    take_edits_(full, params)
    for tensor, edited in zip(full, expected, strict=True):
        assert same_bits(tensor, edited)


def test_the_comparison_with_a_guard_sees_every_pair_of_different_bits():
    # differences of int16 wrap: 32767 - (-32768) is -1, and only equal bits may give 0
    bits = torch.tensor([0, 1, -1, 32767, -32768, 12345, -12345], dtype=torch.int16)
    guards, present = torch.cartesian_prod(bits, bits).unbind(1)
    remainder = torch.tensor([1, -1, 32767, -32768], dtype=torch.int16)
    for value in remainder:
        remainders = torch.full_like(guards, int(value))
        clear_edited_([remainders], [guards.clone()], [present.clone()])
        assert torch.equal(remainders, torch.where(guards == present, value, 0).to(torch.int16))


# --- guards, full copies, release ---------------------------------------------------------------------------------------------


def test_guards_cost_two_bytes_per_parameter_and_go_when_they_are_dropped():
    masters, _, master = adopted(torch.randn(10), "split")
    assert master.guard.dtype == torch.int16
    assert master.guard.shape == (10,)
    masters.drop_guards()
    assert master.guard is None
    assert [tensor.dtype for tensor in master.tensors] == [torch.int16]


def test_going_over_to_a_full_copy_keeps_every_bit_and_frees_the_remainder():
    value = canonical(patterns())
    masters = Masters("copy")
    param = Parameter(value.clone())
    other = Parameter(value.clone())
    master = masters.adopt(param, "trained")
    masters.adopt(other, "frozen")
    generation = masters.generation
    masters.make_full([master])
    assert masters.generation > generation
    assert same_bits(canonical(master.value()), value)
    assert masters.full_copies == ["trained"]
    assert [tensor.dtype for tensor in master.tensors] == [FP32]
    assert master.tensors[0].requires_grad is False
    pointer, generation = master.full.data_ptr(), masters.generation
    masters.make_full(masters)
    assert masters.full_copies == ["trained", "frozen"]
    assert master.full.data_ptr() == pointer
    masters.make_full(masters)
    assert masters.generation == generation + 1
    masters.settle()
    for each in masters:
        assert same_bits(canonical(each.value()), value)


@pytest.mark.parametrize("guarded", [True, False])
def test_edits_before_a_full_copy_is_made_are_in_it(guarded):
    value = torch.randn(9)
    masters = Masters("copy")
    param = Parameter(value.clone())
    master = masters.adopt(param, "weight")
    if guarded:
        masters.end_step()
    master.set_(value + 1)
    with torch.no_grad():
        param[0] = 0.0
    masters.settle()
    masters.make_full([master])
    expected = value + 1
    expected[0] = 0.0
    assert same_bits(master.value(), expected)


@both_storages
def test_release_gives_the_same_parameter_back_in_fp32_and_forgets_it(storage):
    value = canonical(patterns())
    masters, param, _ = adopted(value, storage)
    param.data[0] = 5.0
    value[0] = 5.0
    param.requires_grad_(False)
    masters.release()
    assert same_bits(canonical(param.detach()), value)
    assert not param.requires_grad
    assert len(masters) == 0
    assert masters.get(param) is None
    assert [*masters] == []


@both_storages
def test_a_gradient_keeps_its_bits_when_its_parameter_is_adopted_and_is_fp32_after_release(storage):
    masters = Masters(storage)
    param = Parameter(torch.randn(4))
    param.grad = torch.tensor([1.0, 2.0, 3.0, 1.001])
    master = masters.adopt(param, "weight")
    assert same_bits(param.grad, torch.tensor([1.0, 2.0, 3.0, 1.001]))
    if storage == "copy":
        masters.make_full([master])
    (param * torch.ones(4)).sum().backward()
    assert same_bits(param.grad, torch.tensor([2.0, 3.0, 4.0, 2.001]))
    masters.release()
    assert param.grad.dtype == FP32
    param.grad.zero_()
    (param * torch.tensor(1.001)).sum().backward()
    assert same_bits(param.grad, torch.full((4,), 1.001))
    param.grad = torch.ones(4)


@both_storages
def test_a_released_parameter_can_be_adopted_again(storage):
    value = torch.randn(4)
    masters, param, _ = adopted(value, storage)
    masters.release()
    other = Masters("split")
    assert same_bits(other.adopt(param, "weight").value(), value)
    param.grad = torch.ones(4, dtype=BF16)
    other.release()
    assert same_bits(param.detach(), value)


@both_storages
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_copy_of_a_master_is_exact_under_edits_and_apart_from_the_first(storage, copier, guarded):
    value = torch.randn(6)
    masters, param, master = adopted(value, storage, guarded)
    twin = copier(master)
    assert twin.param is not param
    twin.param.data[0] = 0.0
    expected = value.clone()
    expected[0] = 0.0
    assert same_bits(twin.value(), expected)
    twin.set_(value * 2)
    assert same_bits(twin.value(), value * 2)
    assert same_bits(master.value(), value)
    masters.settle()
    assert same_bits(master.value(), value)
