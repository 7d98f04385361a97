"""Slow and obvious references, independent of the package."""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn import Parameter


def bf16_half(bits: int) -> int:
    """The bits of the bf16 nearest to the fp32 with these bits (an integer below 2^32), ties away from zero. Not for NaN."""
    upper, lower = bits >> 16, bits & 0xFFFF
    return (upper + (1 if lower >= 0x8000 else 0)) & 0xFFFF


def float_of(bits: int) -> float:
    """The value of the fp32 with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; NaNs are equal when their bits are."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return bool((left.contiguous().view(width) == right.contiguous().view(width)).all())


def fp32_run(initial: list[Tensor], gradients: list[list[Tensor | None]], make_optimizer) -> list[Tensor]:
    """Parameters after an ordinary fp32 run of a torch optimizer on the given gradients, one list of them per step."""
    params = [Parameter(value.clone()) for value in initial]
    optimizer = make_optimizer(params)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = None if gradient is None else gradient.float()
        optimizer.step()
    return [param.detach() for param in params]
