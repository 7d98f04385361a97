"""The formats' limits, and what they lose, against what torch's own conversions do: for every fp16 and bf16 value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics import formats
from lightning_mp.numerics.formats import BF16, FP16, FP32, TF32, FloatFormat
from tests.instruments import CountSyncs

DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}
SHORT = [BF16, FP16]
INF, NAN = math.inf, math.nan


def name(fmt: FloatFormat) -> str:
    return fmt.name


def every_value(fmt: FloatFormat) -> Tensor:
    """All 2^16 values of a 16-bit format, as fp32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(DTYPES[fmt]).float()


def finite_values(fmt: FloatFormat) -> Tensor:
    values = every_value(fmt)
    return values[values.isfinite()]


def random_bits(count: int = 200_000, seed: int = 0) -> Tensor:
    """fp32 values of all magnitudes, subnormals, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def with_neighbours(values: Tensor) -> Tensor:
    """The fp32 values and the fp32 numbers just above and below them."""
    up, down = torch.tensor(INF), torch.tensor(-INF)
    return torch.cat([values, torch.nextafter(values, up), torch.nextafter(values, down)])


def neighbour(values: Tensor, fmt: FloatFormat, away_from_zero: bool) -> Tensor:
    """The next number of a 16-bit format in fp64, found by counting bit patterns; past the largest, where it would be."""
    bits = values.to(DTYPES[fmt]).view(torch.int16).int() & 0x7FFF
    step = 1 if away_from_zero else -1
    next_value = (bits + step).to(torch.int16).view(DTYPES[fmt]).double()
    beyond = 2.0 ** (fmt.max_exponent + 1)
    next_value = torch.where(next_value.isinf(), beyond, next_value)
    smallest = torch.tensor(-fmt.smallest_subnormal, dtype=torch.float64)
    next_value = torch.where(bits + step < 0, smallest, next_value)  # across zero
    return torch.where(values < 0, -next_value, next_value)


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=name)
def test_the_limits_are_those_of_the_dtype(fmt: FloatFormat) -> None:
    info = torch.finfo(DTYPES[fmt])
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.eps == info.eps
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    assert formats.format_of(DTYPES[fmt]) == fmt


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16() -> None:
    assert TF32.smallest_normal == FP32.smallest_normal
    assert TF32.eps == FP16.eps
    assert TF32.largest == (2 - 2**-10) * 2.0**127
    assert TF32.smallest_subnormal == 2.0**-136


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_without_a_known_format_has_none(dtype: torch.dtype) -> None:
    assert formats.format_of(dtype) is None


# --- resolution --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", SHORT, ids=name)
def test_rounding_is_torchs_at_every_value_and_every_midpoint(fmt: FloatFormat) -> None:
    values = finite_values(fmt)
    midpoints = ((values.double() + neighbour(values, fmt, True)) / 2).float()
    for given in (every_value(fmt), with_neighbours(values), with_neighbours(midpoints), random_bits()):
        expected = given.to(DTYPES[fmt]).float()
        torch.testing.assert_close(formats.round_to(given, fmt), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", [TF32, BF16], ids=name)
def test_rounding_agrees_with_integer_arithmetic_on_the_bits(fmt: FloatFormat) -> None:
    values = random_bits()
    values = values[values.isfinite()]
    bits, drop = values.view(torch.int32).long(), 23 - fmt.mantissa_bits
    is_odd = (bits >> drop) & 1
    expected = ((bits + (1 << (drop - 1)) - 1 + is_odd) >> drop << drop).to(torch.int32).view(torch.float32)
    assert torch.equal(formats.round_to(values, fmt), expected)


def test_rounding_to_fp32_changes_nothing() -> None:
    values = random_bits()
    torch.testing.assert_close(formats.round_to(values, FP32), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", SHORT, ids=name)
def test_the_ulp_is_the_distance_to_the_next_value_away_from_zero(fmt: FloatFormat) -> None:
    values = finite_values(fmt)
    distance = (neighbour(values, fmt, True) - values.double()).abs()
    assert torch.equal(formats.ulp(values, fmt).double(), distance)
    assert torch.equal(formats.half_ulp(values, fmt).double(), distance / 2)


@pytest.mark.parametrize("fmt", SHORT, ids=name)
def test_half_an_ulp_towards_zero_is_half_the_distance_to_the_next_value_there(fmt: FloatFormat) -> None:
    values = finite_values(fmt)
    distance = (neighbour(values, fmt, False) - values.double()).abs()
    assert torch.equal(formats.half_ulp(values, fmt, towards_zero=True).double(), distance / 2)


def test_the_spacing_of_bf16_halves_below_one() -> None:
    values = torch.tensor([1.0, -1.0, 1.5, 2.0])
    assert formats.half_ulp(values, BF16).tolist() == [2**-8, 2**-8, 2**-8, 2**-7]
    assert formats.half_ulp(values, BF16, towards_zero=True).tolist() == [2**-9, 2**-9, 2**-8, 2**-8]


def test_a_bool_tensor_chooses_the_side_of_each_value() -> None:
    side = torch.tensor([True, False])
    assert formats.half_ulp(torch.ones(2), FP16, towards_zero=side).tolist() == [2**-12, 2**-11]


def test_the_ulp_of_fp32_is_the_distance_that_nextafter_finds() -> None:
    values = torch.cat([random_bits(), torch.tensor([0.0, 1.0, 2**-126, 2**-149])])
    values = values[values.isfinite() & (values.abs() < FP32.largest)]
    away = torch.where(values < 0, -INF, INF)
    distance = (torch.nextafter(values, away).double() - values.double()).abs()
    assert torch.equal(formats.ulp(values, FP32).double(), distance)


def test_a_value_that_is_not_finite_has_no_ulp() -> None:
    assert formats.ulp(torch.tensor([INF, -INF, NAN]), BF16).isnan().all()
    assert formats.half_ulp(torch.tensor([INF, -INF, NAN]), FP16).isnan().all()


def is_lost(values: Tensor, updates: Tensor, fmt: FloatFormat) -> Tensor:
    """The reference: which of the value and its two neighbours is nearest to the exact sum, and at a tie, which is even."""
    value, total = values.double(), values.double() + updates.double()
    far = neighbour(values, fmt, True), neighbour(values, fmt, False)
    to_others = torch.minimum((total - far[0]).abs(), (total - far[1]).abs())
    is_even = values.to(DTYPES[fmt]).view(torch.int16) & 1 == 0
    stays = (total - value).abs()
    return (updates != 0) & ((stays < to_others) | ((stays == to_others) & is_even))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fmt", SHORT, ids=name)
def test_an_update_is_lost_exactly_when_rounding_the_sum_gives_the_value_again(fmt: FloatFormat, sign: int) -> None:
    values = finite_values(fmt)
    decided = set()
    for towards_zero in (False, True):
        # half the distance to either neighbour is where rounding changes its mind
        halves = formats.half_ulp(values, fmt, towards_zero=towards_zero)
        for size in (halves, torch.nextafter(halves, torch.tensor(INF)), torch.nextafter(halves, torch.tensor(0.0))):
            updates = sign * size
            found = formats.lost(values, updates, fmt)
            assert torch.equal(found, is_lost(values, updates, fmt))
            decided |= set(found.unique().tolist())
    assert decided == {True, False}


@pytest.mark.parametrize("fmt", [FP32, TF32, BF16, FP16], ids=name)
def test_values_of_any_kind_are_rounded_first_and_then_half_the_spacing_decides(fmt: FloatFormat) -> None:
    values = torch.cat([random_bits(seed=2), torch.tensor([0.0, -0.0, INF, -INF, NAN])])
    rounded = formats.round_to(values, fmt)
    is_even = (rounded / formats.ulp(rounded, fmt)).remainder(2) == 0
    decided = set()
    for sign in (1, -1):
        half = formats.half_ulp(rounded, fmt, towards_zero=(rounded > 0) != (sign > 0))
        for size in (half, torch.nextafter(half, torch.tensor(INF)), torch.nextafter(half, torch.tensor(0.0)), half / 3):
            expected = (size > 0) & ((size < half) | ((size == half) & is_even))
            found = formats.lost(values, sign * size, fmt)
            assert torch.equal(found, expected)
            decided |= set(found.unique().tolist())
    assert decided == {True, False}


@pytest.mark.parametrize("fmt", SHORT, ids=name)
def test_values_of_the_formats_own_dtype_are_taken_as_they_are(fmt: FloatFormat) -> None:
    values = every_value(fmt)
    updates = 0.7 * formats.half_ulp(values, fmt)
    assert torch.equal(formats.lost(values.to(DTYPES[fmt]), updates, fmt), formats.lost(values, updates, fmt))
    stored = formats.round_to(values.to(DTYPES[fmt]), fmt)
    torch.testing.assert_close(stored, values, rtol=0, atol=0, equal_nan=True)


def test_fp32_loses_what_its_own_addition_loses() -> None:
    values = random_bits(seed=1)
    values = values[values.isfinite() & (values != 0)]
    halves = formats.half_ulp(values, FP32)
    for factor in (0.25, 0.49, 0.5, 0.51, 1.0, 1.01, 2.0):
        for sign in (1, -1):
            updates = sign * factor * halves
            expected = (updates != 0) & ((values.double() + updates.double()).float() == values)
            assert torch.equal(formats.lost(values, updates, FP32), expected)


def test_at_a_power_of_two_a_step_down_is_kept_where_a_step_up_is_lost() -> None:
    updates = torch.tensor([2**-8, -(2**-8), -(2**-9), -(2**-9) * (1 + 2**-20)])
    assert formats.lost(torch.ones(4), updates, BF16).tolist() == [True, False, True, False]
    assert formats.lost(-torch.ones(4), -updates, BF16).tolist() == [True, False, True, False]


def test_a_tie_moves_an_odd_value_and_leaves_an_even_one() -> None:
    odd, even = 1 + 2**-7, 1 + 2**-6
    values, tie = torch.tensor([odd, even]), torch.full((2,), 2.0**-8)
    assert formats.lost(values, tie, BF16).tolist() == [False, True]
    assert ((values + tie).bfloat16().float() == values).tolist() == [False, True]


def test_zero_updates_and_what_is_not_finite_are_not_lost() -> None:
    values = torch.tensor([1.0, 1.0, INF, NAN, 1.0, 1.0])
    updates = torch.tensor([0.0, -0.0, 1e-9, 1e-9, NAN, INF])
    assert not formats.lost(values, updates, BF16).any()


def test_the_largest_value_keeps_an_update_that_makes_it_infinite() -> None:
    values = torch.full((2,), 65504.0)
    updates = torch.tensor([16.0, 15.99])
    assert ((values + updates).half() == values).tolist() == [False, True]
    assert formats.lost(values, updates, FP16).tolist() == [False, True]


def test_the_lost_fraction_is_of_the_nonzero_updates() -> None:
    values, updates = torch.ones(5), torch.tensor([0.0, 1e-4, 1e-4, 0.1, NAN])
    assert formats.lost_fraction(values, updates, BF16).item() == pytest.approx(2 / 3)
    assert formats.lost_fraction(values, torch.zeros(5), BF16).isnan()


# --- range -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "scale"),
    [(FP16, 1.0), (FP16, 2.0**15), (FP16, 2.0**-3), (BF16, 1.0), (BF16, 2.0**15)],  # the products are exact in fp32
)
def test_underflow_is_what_the_conversion_does(fmt: FloatFormat, scale: float) -> None:
    edge = torch.tensor(fmt.smallest_normal - fmt.smallest_subnormal / 2) / scale
    assert edge.item() * scale == fmt.smallest_normal - fmt.smallest_subnormal / 2
    given = torch.cat([every_value(BF16), every_value(FP16), random_bits(), with_neighbours(torch.stack([edge, -edge]))])
    converted = (given * scale).to(DTYPES[fmt]).float()
    expected = (given != 0) & (converted.abs() < fmt.smallest_normal)
    found = formats.underflows(given, fmt, scale)
    assert torch.equal(found, expected)
    assert found.any()
    assert not found.all()


def test_fp32_underflows_at_its_subnormals() -> None:
    values = torch.tensor([2.0**-126, 2.0**-126 - 2.0**-149, 2.0**-149, 0.0])
    assert formats.underflows(values, FP32).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_of_every_floating_dtype_are_read_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([2.0**-14, 2.0**-15, -(2.0**-16), 0.0, 1.0], dtype=dtype)
    assert formats.underflows(values, FP16).tolist() == [False, True, True, False, False]
    assert formats.underflow_fraction(values, FP16).item() == 0.5
    assert formats.exponents(values)[[0, 1, 2, 4]].tolist() == [-14, -15, -16, 0]


def test_true_zeros_and_nans_are_on_neither_side_of_the_fraction() -> None:
    some = torch.tensor([1e-8, 1.0])
    padded = torch.cat([some, torch.zeros(1000), torch.full((10,), NAN)])
    for fraction in (formats.underflow_fraction, formats.near_overflow_fraction):
        assert fraction(padded, FP16, 2.0**15).item() == fraction(some, FP16, 2.0**15).item()
    assert formats.underflow_fraction(padded, FP16).item() == 0.5
    assert formats.near_overflow_fraction(padded, FP16, 2.0**15).item() == 0.5


@pytest.mark.parametrize("values", [torch.empty(0), torch.zeros(3), torch.tensor(NAN)])
def test_a_fraction_of_nothing_is_unknown(values: Tensor) -> None:
    assert formats.underflow_fraction(values, FP16).isnan()
    assert formats.near_overflow_fraction(values, FP16).isnan()


def test_near_overflow_starts_the_given_bits_below_the_largest_and_goes_on() -> None:
    values = torch.tensor([65504.0, 32752.0, 32751.0, 1e6, INF, -INF, NAN, 0.0])
    assert formats.nears_overflow(values, FP16).tolist() == [True, True, False, True, True, True, False, False]
    assert formats.nears_overflow(values, FP16, bits=0).tolist() == [True, False, False, True, True, True, False, False]
    assert formats.nears_overflow(values / 2**10, FP16, 2.0**10).tolist() == formats.nears_overflow(values, FP16).tolist()


def test_a_scale_so_small_that_the_limit_leaves_fp32_leaves_only_infinities() -> None:
    values = torch.tensor([FP32.largest, INF, 1.0])
    assert formats.nears_overflow(values, FP16, scale=2.0**-120).tolist() == [False, True, False]
    assert formats.underflows(values, FP16, scale=2.0**-149).tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN])
def test_a_scale_that_is_not_positive_and_finite_is_refused(scale: float) -> None:
    for function in (formats.underflows, formats.nears_overflow):
        with pytest.raises(ValueError, match=r"scale=.* must be positive and finite"):
            function(torch.ones(1), FP16, scale)


@pytest.mark.parametrize("values", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)])
def test_a_tensor_that_is_not_floating_is_refused(values: Tensor) -> None:
    with pytest.raises(TypeError, match=r"floating tensor is needed, got torch\."):
        formats.underflow_fraction(values, FP16)


# --- exponents and zeros -----------------------------------------------------------------------------------------------


def test_exponents_are_those_of_pythons_frexp_for_every_short_value() -> None:
    for fmt in SHORT:
        values = finite_values(fmt)
        values = values[values != 0]
        assert formats.exponents(values).tolist() == [math.frexp(value)[1] - 1 for value in values.tolist()]


def test_the_histogram_counts_every_finite_nonzero_value_once() -> None:
    values = torch.cat([random_bits(20_000), torch.tensor([0.0, -0.0, INF, NAN, 2.0**-149, FP32.largest, 1.0])])
    expected = Counter(math.frexp(v)[1] - 1 for v in values.tolist() if v and math.isfinite(v))
    counts = formats.exponent_histogram(values.reshape(-1, 1)).tolist()
    assert len(counts) == 277
    assert {index - 149: count for index, count in enumerate(counts) if count} == expected


def test_the_histogram_of_nothing_is_empty() -> None:
    assert formats.exponent_histogram(torch.empty(0, 3)).sum() == 0


def test_histograms_of_several_tensors_are_those_of_each() -> None:
    parts = [random_bits(1000, seed) for seed in range(3)] + [torch.empty(0), torch.tensor([0.0, INF, NAN, 2.0**-149])]
    together = formats.exponent_histograms(torch.cat(parts), [len(part) for part in parts])
    assert torch.equal(together, torch.stack([formats.exponent_histogram(part) for part in parts]))
    assert together.sum(1)[-2:].tolist() == [0, 1]


def test_flushed_values_are_estimated_from_negative_zeros() -> None:
    zeros = torch.tensor([0.0, 0.0, 0.0, -0.0, 1.0, -1.0])
    assert formats.flushed_count(zeros) == 2
    assert formats.flushed_count(torch.tensor([-0.0, -0.0, 0.0])) == 3  # never more than there are zeros
    assert formats.flushed_count(torch.zeros(5)) == 0
    assert formats.flushed_count(torch.empty(0)) == 0
    assert formats.flushed_estimate(torch.tensor([4, 3, 5]), torch.tensor([1, 2, 0])).tolist() == [2, 3, 0]


def test_the_estimate_is_near_the_truth_for_a_matrix_product_in_fp16() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, 16, generator=generator) * 2.0**-13
    right = torch.randn(16, 64, generator=generator) * 2.0**-13
    left[:8] = 0  # dead units
    exact, product = left.double() @ right.double(), left.half() @ right.half()
    flushed = ((exact != 0) & (product == 0)).sum().item()
    assert flushed > 500
    assert (product == 0).sum() >= flushed + 8 * 64
    assert formats.flushed_count(product).item() == pytest.approx(flushed, rel=0.1)


# --- cost --------------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "exponents": formats.exponents,
    "exponent_histogram": formats.exponent_histogram,
    "exponent_histograms": lambda x: formats.exponent_histograms(x, [40, 60]),
    "ulp": lambda x: formats.ulp(x, BF16),
    "half_ulp": lambda x: formats.half_ulp(x, BF16, x > 0),
    "round_to": lambda x: formats.round_to(x, BF16),
    "lost_fraction": lambda x: formats.lost_fraction(x, x * 1e-3, BF16),
    "underflow_fraction": lambda x: formats.underflow_fraction(x, FP16, 8.0),
    "near_overflow_fraction": lambda x: formats.near_overflow_fraction(x, FP16, 8.0),
    "flushed_count": formats.flushed_count,
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS.keys())
def test_nothing_is_read_on_the_host_and_the_input_is_left_alone(function: Callable[[Tensor], Any]) -> None:
    values = random_bits(100)
    before = values.clone()
    with CountSyncs() as syncs:
        result = function(values)
    assert isinstance(result, Tensor)
    assert syncs.seen == []
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    with CountSyncs() as syncs:
        float(result.reshape(-1)[0])  # the count can see a read
    assert syncs.seen
