"""The floating formats of mixed-precision training: what they can hold, and what they lose of given tensors.

A format with ``E`` exponent bits and ``M`` explicit mantissa bits has, with ``bias = 2^(E-1) - 1``::

                          largest                   smallest normal   smallest subnormal   eps = ulp(1)
    general               (2 - 2^-M) * 2^bias       2^(1-bias)        2^(1-bias-M)         2^-M
    fp32  s e(8) m(23)    3.4028e38                 2^-126            2^-149               2^-23
    tf32  s e(8) m(10)    3.4012e38                 2^-126            2^-136               2^-10
    bf16  s e(8) m(7)     3.3895e38                 2^-126            2^-133               2^-7
    fp16  s e(5) m(10)    65504                     2^-14             2^-24                2^-10

fp16 therefore runs out of *range*: a gradient of 1e-8 is zero in it, unless the loss is scaled. bf16 runs out of
*resolution*: its neighbours at 1.0 are 2^-7 = 0.0078125 apart, so an update of a weight of 1.0 by +1e-3 is lost.

**What rounding really does.** All formats round to nearest, ties to even, and every function here answers as that rounding
does, on each of its edges:

* A value is zero or subnormal *after rounding* if it lies below ``smallest normal - half a smallest subnormal``: from there on
  it rounds up to the smallest normal.
* The spacing halves below a power of two. From 1.0, bf16 numbers are 2^-7 apart upwards and 2^-8 downwards, so +0.0039 and
  -0.00195 (half of these) are the limits of what is lost.
* An update of exactly half the spacing is a tie. It is lost if the last mantissa bit of the value is 0 and moves it if it is 1.

Worked example: bf16, value 1.0, updates of +2^-8 (a tie, and 1.0 is even: lost), -2^-8 (a whole step downwards: kept) and -2^-9
(a tie: lost).

**Fractions.** Exact zeros are never counted, neither above nor below the line: a layer that has no gradient does not make a
format look better or worse. NaNs are not counted either. Where nothing is left to count, a fraction is NaN, which says that
it is unknown.

**Cost.** Every function returns tensors on the device of its input, 0-dim ones where it reduces. None reads a value on the
host: there is no device-to-host sync. Inputs are fp16, bf16, fp32, or fp64, which is rounded to fp32 first; the arithmetic
is fp32, on exact powers of two.

Source of the formats: IEEE 754-2019 (fp32 is binary32, fp16 binary16); NVIDIA, "A100 Tensor Core GPU Architecture" (2020) for
tf32 and bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FP32_MIN_EXPONENT, _FP32_MAX_EXPONENT, _FP32_MANTISSA_BITS = -126, 127, 23
#: Exponents of the smallest subnormal and of the largest number of fp32: the first and last bin of a histogram.
LOWEST_EXPONENT, HIGHEST_EXPONENT = _FP32_MIN_EXPONENT - _FP32_MANTISSA_BITS, _FP32_MAX_EXPONENT
# bits of fp32, as int32: all but the sign, the smallest normal number, infinity (all of the exponent)
_MAGNITUDE, _SMALLEST_NORMAL, _INFINITY = 0x7FFF_FFFF, 0x0080_0000, 0x7F80_0000


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating format with subnormals, infinities and NaNs.

    Attributes:
        name: its short name.
        exponent_bits: width of the exponent field.
        mantissa_bits: explicit bits of the mantissa, without the leading one.

    Example:
        >>> FP16.largest, FP16.smallest_normal == 2**-14, BF16.eps
        (65504.0, True, 0.0078125)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def max_exponent(self) -> int:
        """Floor of log2 of the largest finite number; also the bias of the exponent field."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Log2 of the smallest normal number."""
        return 1 - self.max_exponent

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2.0 - self.eps, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its mantissa bits."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The distance from 1.0 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)


FP32 = FloatFormat("fp32", 8, 23)
TF32 = FloatFormat("tf32", 8, 10)
BF16 = FloatFormat("bf16", 8, 7)
FP16 = FloatFormat("fp16", 5, 10)

_OF_DTYPE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def format_of(dtype: torch.dtype) -> FloatFormat | None:
    """The format of a torch dtype, or None for one that is not fp32, bf16 or fp16 (tf32 has no dtype)."""
    return _OF_DTYPE.get(dtype)


# --- resolution --------------------------------------------------------------------------------------------------------


def exponents(values: Tensor) -> Tensor:
    """Floor of log2 of the magnitudes: ``frexp``'s exponent less one, so that 1.0 has 0.

    Args:
        values: floating tensor of any shape.

    Returns:
        int32 tensor of the same shape, -149 to 127. Entries for zeros, infinities and NaNs have no meaning.
    """
    return torch.frexp(_fp32(values))[1].to(torch.int32) - 1


def exponent_histogram(values: Tensor) -> Tensor:
    """How many values have which exponent.

    Args:
        values: floating tensor of any shape, empty too.

    Returns:
        int64 tensor of shape ``(277,)``. Entry ``i`` counts the values with ``2^(i-149) <= |value| < 2^(i-148)``; zeros,
        infinities and NaNs are in none.
    """
    return exponent_histograms(values.reshape(-1), [values.numel()])[0]


def exponent_histograms(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """How many values of each of several tensors have which exponent: :func:`exponent_histogram`, for less than one by one.

    Args:
        values: floating tensor of shape ``(n,)``, the tensors behind one another.
        sizes: how many elements each of them has; ``n`` in all.

    Returns:
        int64 tensor of shape ``(len(sizes), 277)``.

    Example:
        >>> histograms = exponent_histograms(torch.tensor([1.0, 1.5, 0.25, 0.0]), [2, 2])
        >>> histograms[:, 149].tolist(), histograms[:, 147].tolist()
        ([2, 0], [0, 1])
    """
    count = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    bits = _fp32(values).abs().view(torch.int32)
    # Bin 1 is that of 2^-149. A normal number belongs into its exponent field + 23. Of a subnormal, the bits are the integer
    # that it is a multiple of 2^-149 by; as a float, that has an exponent field of 127 for bin 1 to 149 for bin 23, where
    # normal numbers have 150 at least. Zeros come into bin 0 and what is not finite into the last one, which are dropped.
    of_subnormal = (bits.float().view(torch.int32) >> _FP32_MANTISSA_BITS) - 149
    bins = (of_subnormal.clamp_(max=0) + (bits >> _FP32_MANTISSA_BITS)).add_(23).clamp_(min=0).long()
    for index, bins_of_one in enumerate(bins.split(sizes)):
        bins_of_one += index * (count + 2)
    histograms = torch.zeros(len(sizes) * (count + 2), dtype=torch.int64, device=bits.device)
    # not bincount: the number of its bins depends on values, so the host would have to wait for them
    histograms.scatter_add_(0, bins, torch.ones_like(bins))
    return histograms.view(len(sizes), count + 2)[:, 1:-1]


def ulp(values: Tensor, fmt: FloatFormat) -> Tensor:
    """The spacing of a format's numbers at the given values, away from zero.

    Args:
        values: floating tensor of any shape.
        fmt: the format.

    Returns:
        fp32 tensor of the same shape, powers of two; NaN for infinities and NaNs. Zeros and subnormals are a smallest
        subnormal away from the next number.
    """
    values = _fp32(values)
    spacing = _power_of_two(exponents(values).clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    spacing = torch.where(values == 0, fmt.smallest_subnormal, spacing)  # frexp has no exponent for zero
    return torch.where(values.isfinite(), spacing, math.nan)


def half_ulp(values: Tensor, fmt: FloatFormat, towards_zero: bool | Tensor = False) -> Tensor:
    """Half the spacing of a format's numbers at the given values: smaller steps are lost, larger ones are not.

    Args:
        values: floating tensor of any shape.
        fmt: the format. Values that it does not have are rounded to it first.
        towards_zero: which side of the value is meant; a bool tensor that broadcasts to ``values`` chooses for each. They
            differ at powers of two, where the spacing towards zero is half as wide.

    Returns:
        fp32 tensor of the same shape; NaN for infinities and NaNs. Half of fp32's own smallest subnormal is not a number of
        fp32, and reads 0.

    Example:
        >>> half_ulp(torch.tensor([1.0]), BF16) == 2**-8
        tensor([True])
        >>> half_ulp(torch.tensor([1.0]), BF16, towards_zero=True) == 2**-9
        tensor([True])
    """
    values = round_to(values, fmt)
    half = ulp(values, fmt) * 0.5
    has_no_mantissa = torch.frexp(values)[0].abs() == 0.5
    # at the smallest normal number and below, the spacing is the same on both sides
    halves = has_no_mantissa & (values.abs() > fmt.smallest_normal) & towards_zero
    return torch.where(halves, half * 0.5, half)


def round_to(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Round to the nearest number of a format, ties to even.

    Args:
        values: floating tensor of any shape.
        fmt: the format.

    Returns:
        fp32 tensor of the same shape. Magnitudes from ``largest + half an ulp`` on become infinite.
    """
    is_exact = fmt == FP32 or format_of(values.dtype) == fmt
    values = _fp32(values)
    if is_exact:
        return values
    spacing = ulp(values, fmt)
    rounded = (values / spacing).round() * spacing  # division by a power of two, below 2^11: exact
    rounded = torch.where(rounded.abs() > fmt.largest, rounded.sign() * math.inf, rounded)
    return torch.where(values.isfinite(), rounded, values)


def lost(values: Tensor, updates: Tensor, fmt: FloatFormat) -> Tensor:
    """Which updates a format would lose: rounding ``value + update`` to it gives ``value`` again.

    Args:
        values: floating tensor of any shape. Values that the format does not have are rounded to it first.
        updates: floating tensor of the same shape, what is added to them.
        fmt: the format.

    Returns:
        bool tensor of the same shape. False where the update is zero, and where value or update are not finite.

    Example:
        >>> lost(torch.ones(3), torch.tensor([2**-8, -(2**-8), -(2**-9)]), BF16)
        tensor([ True, False,  True])
    """
    values, updates = round_to(values, fmt), _fp32(updates)
    # brought down to where its smallest normal number is that of fp32, a format has its last mantissa bit in one place,
    # in subnormals too: exact, as no format has more mantissa bits than fp32
    lowered = (values * 2.0 ** (_FP32_MIN_EXPONENT - fmt.min_exponent)).view(torch.int32)
    bits = lowered & _MAGNITUDE
    towards_zero = (lowered ^ updates.view(torch.int32)) >> 31  # -1 if the signs differ, else 0
    # the next smaller number of fp32 has the exponent of the spacing on that side
    power_of_two = (bits + towards_zero).clamp_(min=_SMALLEST_NORMAL) & _INFINITY
    half = power_of_two.view(torch.float32) * 2.0 ** (fmt.min_exponent - _FP32_MIN_EXPONENT - fmt.mantissa_bits - 1)
    is_odd = (bits >> (_FP32_MANTISSA_BITS - fmt.mantissa_bits)) & 1
    # a tie moves an odd value: its limit is the number below half a spacing. Bits are ordered as magnitudes are, NaNs last
    size = updates.abs()
    return (size > 0) & (size.view(torch.int32) <= half.view(torch.int32) - is_odd) & (bits < _INFINITY)


def lost_fraction(values: Tensor, updates: Tensor, fmt: FloatFormat) -> Tensor:
    """The fraction of the nonzero, finite updates that a format would lose (see :func:`lost`).

    Returns:
        0-dim fp32 tensor; NaN if there is no such update.
    """
    return _fraction(lost(values, updates, fmt), (updates != 0) & updates.isfinite())


# --- range -------------------------------------------------------------------------------------------------------------


def underflows(values: Tensor, fmt: FloatFormat, scale: float = 1.0) -> Tensor:
    """Which nonzero values, times ``scale``, would be zero or subnormal in a format.

    Args:
        values: floating tensor of any shape.
        fmt: the format.
        scale: positive, finite. It is exact for powers of two.

    Returns:
        bool tensor of the same shape. False for zeros and NaNs.
    """
    # from half a spacing below the smallest normal number on, values are rounded up to it
    threshold = fmt.smallest_normal - fmt.smallest_subnormal / 2
    magnitudes = _fp32(values).abs()
    return (magnitudes > 0) & _less(magnitudes, threshold / _checked(scale))


def underflow_fraction(values: Tensor, fmt: FloatFormat, scale: float = 1.0) -> Tensor:
    """The fraction of the nonzero values that, times ``scale``, would be zero or subnormal in a format.

    Returns:
        0-dim fp32 tensor; NaN if there is no nonzero value.

    Example:
        >>> gradient = torch.tensor([0.0, 1e-8, 1e-5, 1.0])
        >>> underflow_fraction(gradient, FP16), underflow_fraction(gradient, FP16, scale=2**15)
        (tensor(0.6667), tensor(0.))
    """
    return _fraction(underflows(values, fmt, scale), nonzero(values))


def nears_overflow(values: Tensor, fmt: FloatFormat, scale: float = 1.0, bits: float = 1.0) -> Tensor:
    """Which values, times ``scale``, come within ``bits`` powers of two of a format's largest number, or exceed it.

    Args:
        values: floating tensor of any shape.
        fmt: the format.
        scale: positive, finite. It is exact for powers of two.
        bits: 0 or more. A magnitude of ``largest * 2^-bits`` is within.

    Returns:
        bool tensor of the same shape. True for infinities, False for NaNs.
    """
    return _at_least(_fp32(values).abs(), fmt.largest * 2.0**-bits / _checked(scale))


def near_overflow_fraction(values: Tensor, fmt: FloatFormat, scale: float = 1.0, bits: float = 1.0) -> Tensor:
    """The fraction of the nonzero values for which :func:`nears_overflow` is true.

    Returns:
        0-dim fp32 tensor; NaN if there is no nonzero value.
    """
    return _fraction(nears_overflow(values, fmt, scale, bits), nonzero(values))


# --- zeros -------------------------------------------------------------------------------------------------------------


def nonzero(values: Tensor) -> Tensor:
    """Which values are neither zero nor NaN, as a bool tensor: what fractions are fractions of."""
    return values.abs() > 0


def flushed_count(values: Tensor) -> Tensor:
    """Estimate how many zeros are values that a format was too small for.

    Rounding keeps the sign, so a small negative value becomes -0.0, whereas a sum of nothing (a dead unit, an embedding row
    that was not looked up) is +0.0. Small values being as often negative as positive, twice the number of negative zeros is
    the estimate, at most all zeros::

        min(2 * count(-0.0), count(0.0))

    It is right for a tensor that one matrix product made. It is a *lower bound* where flushed values were added up from +0.0,
    as the sign is lost then: sums over micro-batches or ranks, biases, embeddings and other scattered sums. It is too high
    where true zeros are negative, as in the product of a negative value and a mask.

    Args:
        values: floating tensor of any shape.

    Returns:
        0-dim int64 tensor.
    """
    zeros = values == 0
    return flushed_estimate(zeros.sum(), (zeros & values.signbit()).sum())


def flushed_estimate(zeros: Tensor, negative_zeros: Tensor) -> Tensor:
    """The estimate of :func:`flushed_count` from the counts of all zeros and of negative ones, integer tensors of one shape."""
    return torch.minimum(2 * negative_zeros, zeros)


# --- helpers -----------------------------------------------------------------------------------------------------------


def _fp32(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise TypeError(f"A floating tensor is needed, got {values.dtype}; view a complex one with torch.view_as_real first.")
    return values.detach().float()


def _checked(scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r} must be positive and finite.")
    return scale


def _less(magnitudes: Tensor, threshold: float) -> Tensor:
    """``magnitudes < threshold`` for any positive float, which need not be in fp32's range."""
    if threshold > FP32.largest:  # torch refuses it as an fp32 number; every finite magnitude is below
        return magnitudes.isfinite()
    return magnitudes < threshold


def _at_least(magnitudes: Tensor, threshold: float) -> Tensor:
    """``magnitudes >= threshold``, likewise."""
    return magnitudes.isinf() if threshold > FP32.largest else magnitudes >= threshold


def _fraction(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum().float() / whole.sum()


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 ``2^exponent``, subnormals included, put together from bits. Exponents below -149 give 0."""
    normal = (exponent.clamp(_FP32_MIN_EXPONENT, _FP32_MAX_EXPONENT) + 127) << _FP32_MANTISSA_BITS
    position = exponent - LOWEST_EXPONENT
    subnormal = torch.where(position >= 0, 1, 0) << position.clamp(0, _FP32_MANTISSA_BITS)
    bits = torch.where(exponent >= _FP32_MIN_EXPONENT, normal, subnormal)
    return bits.to(torch.int32).view(torch.float32)
