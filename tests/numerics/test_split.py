"""The split of fp32 values into bf16 values and remainders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.numerics.split import canonical_nan_, join, join_, round_to_bf16_bits_, split
from tests.reference import bf16_half, float_of, same_bits


def fp32(bits) -> torch.Tensor:
    """fp32 values with these bits, given as integers below 2^32 or as an int64 tensor of them."""
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def check_round_trip(values: torch.Tensor) -> None:
    parameter, remainder = split(values)
    joined = join(parameter, remainder)
    nan = values.isnan()
    exact = joined.view(torch.int32) == values.view(torch.int32)
    assert bool((exact | nan).all())
    assert bool((parameter.isnan() == nan).all())
    assert bool((joined.isnan() == nan).all())


def boundary_bits() -> torch.Tensor:
    """Every upper half with the lower halves around each edge: 0, the tie 0x8000, and the largest."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF])
    return (upper[:, None] + lower).flatten()


def test_split_round_trips_at_every_boundary():
    check_round_trip(fp32(boundary_bits()))


def test_join_inverts_split_for_every_low_half():
    for upper in (0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F7F, 0x0080, 0x7F80, 0xFFFF):
        check_round_trip(fp32((upper << 16) + torch.arange(2**16)))


@pytest.mark.slow
def test_split_round_trips_all_2_to_the_32_patterns():
    size = 1 << 24
    for start in range(0, 2**32, size):
        check_round_trip(fp32(torch.arange(start, start + size)))


def test_the_parameter_is_the_nearest_bf16_with_ties_away_from_zero():
    bits = boundary_bits()
    values = fp32(bits)
    bits, values = bits[~values.isnan()], values[~values.isnan()]
    parameter, _ = split(values)
    expected = [bf16_half(int(b)) for b in bits[::7]]
    assert (parameter[::7].view(torch.int16).to(torch.int64) & 0xFFFF).tolist() == expected


def test_split_agrees_with_torch_except_at_ties():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    low = values.view(torch.int32) & 0xFFFF
    parameter, _ = split(values)
    assert same_bits(parameter[low != 0x8000], values.to(torch.bfloat16)[low != 0x8000])


@given(st.integers(0, 2**32 - 1))
def test_any_pattern_round_trips(bits):
    check_round_trip(fp32([bits]))


def test_the_worked_example_of_the_docstring():
    parameter, remainder = split(torch.tensor([1.001]))
    assert parameter.view(torch.int16).item() == 0x3F80
    assert remainder.item() == 0x20C5
    assert float_of(0x3F8020C5) == pytest.approx(1.001, abs=1e-7)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
def test_a_nan_is_a_nan_in_both_halves_whatever_its_payload(bits):
    parameter, remainder = split(fp32([bits]))
    assert parameter.isnan().all()
    assert join(parameter, remainder).isnan().all()


def test_values_beyond_the_largest_bf16_are_infinite_in_the_parameter_and_finite_when_joined():
    largest = torch.tensor([torch.finfo(torch.float32).max])
    parameter, remainder = split(largest)
    assert parameter.isinf().all()
    assert same_bits(join(parameter, remainder), largest)


def test_split_keeps_shape_layout_and_its_argument():
    values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before = values.clone()
    parameter, remainder = split(values)
    assert parameter.stride() == remainder.stride() == values.stride()
    assert same_bits(join(parameter, remainder), values)
    assert same_bits(values, before)


def test_join_into_a_given_tensor():
    values = torch.randn(100)
    out = torch.empty(100)
    assert join_(out, *split(values)) is out
    assert same_bits(out, values)


def test_the_in_place_steps_are_those_of_split():
    values = torch.randn(1000)
    values[0], values[1] = float("nan"), float("inf")
    parameter, _ = split(values)
    bits = round_to_bf16_bits_(canonical_nan_(values.clone()))
    assert same_bits(bits.to(torch.int16).view(torch.bfloat16), parameter)


def test_split_refuses_other_dtypes_by_name():
    with pytest.raises(TypeError, match="float64"):
        split(torch.zeros(1, dtype=torch.float64))
