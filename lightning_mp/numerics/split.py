"""Split an fp32 value into a bf16 value and a 16-bit remainder, exactly.

A bf16 number is the upper half of an fp32 number, so an fp32 master weight can be stored as the bf16 parameter that the
model uses anyway plus the 16 bits that the parameter lacks::

     fp32   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
            |  8 bits  7 bits |    16 bits     |
     bf16   s eeeeeeee mmmmmmm                      the upper half, rounded to nearest
     int16                     rrrrrrrrrrrrrrrr     the lower half, read as a signed number

With ``B`` the fp32 bits as int32::

    split:  hi = (B + 0x8000) >> 16        rem = B - (hi << 16)        -32768 <= rem <= 32767
    join:   B  = (hi << 16) + rem

Adding half a unit before the shift rounds to nearest, ties away from zero. Rounding ties to *even* would not do: a tie that
rounds down leaves a remainder of +32768, which 16 signed bits cannot hold. As ``rem`` is ``B`` modulo 2^16, the remainder is
simply the low half of the bits.

Worked example: the bf16 neighbours of 1.0 are 2^-7 = 0.0078125 apart. The master 1.001 has bits 0x3F8020C5; its parameter is
0x3F80 = 1.0 and its remainder 0x20C5 = 8389. After a thousand updates of 1e-6 the parameter still reads 1.0, but the
remainder has counted every one of them.

Every finite value, both infinities and both zeros round-trip to the same bits. A NaN stays a NaN in both halves, without its
payload: it is made canonical first, because a payload of all ones would carry into the sign. A finite value beyond bf16's
largest (3.3895e38) rounds to infinity in the parameter while the joined value stays finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_UNIT = 0x8000  # half of the last bit that bf16 keeps, in units of the last bit of fp32


def canonical_nan_(master: Tensor) -> Tensor:
    """Replace every NaN by the canonical one, in place; all other values keep their bits.

    Args:
        master: fp32 tensor of any shape.

    Returns:
        ``master``.
    """
    # posinf and neginf must be named: nan_to_num_ would clamp infinities to the largest finite value
    return master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


def round_to_bf16_bits_(master: Tensor) -> Tensor:
    """Round to the nearest bf16, ties away from zero, in place of the fp32 values.

    Args:
        master: contiguous fp32 tensor without non-canonical NaNs (see :func:`canonical_nan_`). It is overwritten.

    Returns:
        The bf16 bits as an int32 tensor of the same shape, a view of ``master``'s memory; copying it to int16 keeps the
        low 16 bits, which are the bits of the bf16 value.
    """
    return master.view(torch.int32).add_(HALF_UNIT).bitwise_right_shift_(16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 values and int16 remainders.

    Args:
        master: fp32 tensor of any shape; it is not changed.

    Returns:
        ``(parameter, remainder)``: bf16 and int16 tensors with the shape and memory layout of ``master``.

    Raises:
        TypeError: ``master`` is not fp32.

    Example:
        >>> parameter, remainder = split(torch.tensor([1.001]))
        >>> parameter.item(), remainder.item()
        (1.0, 8389)
        >>> join(parameter, remainder) == torch.tensor([1.001])
        tensor([True])
    """
    if master.dtype != torch.float32:
        raise TypeError(f"split takes an fp32 tensor, got {master.dtype}; convert it with .float() first.")
    bits = canonical_nan_(master.detach().clone())
    # the bits wrap: int32 -> int16 keeps the low half
    remainder = bits.view(torch.int32).to(torch.int16)
    parameter = round_to_bf16_bits_(bits).to(torch.int16).view(torch.bfloat16)
    return parameter, remainder


def join_(out: Tensor, parameter: Tensor, remainder: Tensor) -> Tensor:
    """Join bf16 values and int16 remainders into fp32 values, into ``out``.

    Args:
        out: fp32 tensor that receives the result.
        parameter: bf16 tensor of the same shape.
        remainder: int16 tensor of the same shape.

    Returns:
        ``out``.
    """
    out.copy_(parameter)  # hi << 16
    out.view(torch.int32).add_(remainder)
    return out


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Join bf16 values and int16 remainders into fp32 values: the inverse of :func:`split`.

    Args:
        parameter: bf16 tensor of any shape.
        remainder: int16 tensor of the same shape.

    Returns:
        A new fp32 tensor with the shape and memory layout of ``parameter``.
    """
    return join_(torch.empty_like(parameter, dtype=torch.float32, requires_grad=False), parameter.detach(), remainder)
