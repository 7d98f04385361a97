"""How much of a device's arithmetic a run uses: FLOPs of a step, and what the device could do at most.

The share is the *model FLOPs utilisation*, MFU = FLOPs of a step / (step time x peak FLOP/s). (Chowdhery et al., "PaLM: Scaling
Language Modeling with Pathways", 2022, appendix B.) A worked number: a 1.3e9-parameter transformer takes about 6 FLOPs per
parameter and token, so 50,000 tokens/s on one H100 are 6 x 1.3e9 x 5e4 = 390 TFLOP/s, of 989.5 in bf16: an MFU of 39 %.

*The numerator* is counted by torch's own counter while one real micro-batch goes forward and backward; a multiplication with an
addition is two FLOPs. The counter knows matrix products, convolutions and attention, which is where the FLOPs are, and nothing
else. Attention counts in full also where a causal mask lets half be skipped. Layers that are computed again in backward
(activation checkpointing) count again.

*The denominator* is the vendor's figure for dense products with fp32 accumulation, which is what torch uses, and of the format
that the run multiplies in. Datasheets print figures for 2:4 sparsity, twice as large, more prominently; those with a star are
halved here. A device that is not in the table has no peak: it is unknown, not guessed from a relative's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper


@dataclass(frozen=True)
class Peak:
    """A device's dense peak by format.

    Attributes:
        pattern: a regular expression that the whole device name matches, as torch reports it.
        tflops: TFLOP/s by format: "fp32", "tf32", "bf16", "fp16". A format without units of its own has none.
        source: where the numbers stand.
    """

    pattern: str
    tflops: dict[str, float]
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet; figures with sparsity are halved"
_H100_PCIE = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table of H100 PCIe"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet; figures with sparsity are halved"
_B200 = "NVIDIA Blackwell datasheet, HGX B200, individual GPU; figures with sparsity are halved"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, FP16 and BF16 tensor with FP32 accumulate"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, FP16 and BF16 tensor with FP32 accumulate"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, FP16 and BF16 tensor with FP32 accumulate"


def _tflops(fp32: float, tf32: float | None, half: float, bf16: bool = True) -> dict[str, float]:
    found = {"fp32": fp32, "tf32": tf32, "bf16": half if bf16 else None, "fp16": half}
    return {name: value for name, value in found.items() if value is not None}


PEAKS = (
    Peak(r"NVIDIA A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe", _tflops(19.5, 156, 312), _A100),
    Peak(r"NVIDIA H100 80GB HBM3", _tflops(67, 494.5, 989.5), _H100),
    Peak(r"NVIDIA H100 PCIe", _tflops(51.2, 378, 756), _H100_PCIE),
    Peak(r"NVIDIA H100 NVL", _tflops(60, 417.5, 835.5), _H100),
    Peak(r"NVIDIA H200", _tflops(67, 494.5, 989.5), _H200),
    Peak(r"NVIDIA H200 NVL", _tflops(60, 417.5, 835.5), _H200),
    Peak(r"NVIDIA B200", _tflops(75, 1100, 2250), _B200),
    Peak(r"NVIDIA L4", _tflops(30.3, 60, 121), "NVIDIA L4 Tensor Core GPU datasheet; figures with sparsity are halved"),
    Peak(r"NVIDIA L40S", _tflops(91.6, 183, 362.05), "NVIDIA L40S datasheet"),
    Peak(r"NVIDIA A10", _tflops(31.2, 62.5, 125), "NVIDIA A10 Tensor Core GPU datasheet"),
    Peak(r"NVIDIA A40", _tflops(37.4, 74.8, 149.7), "NVIDIA A40 datasheet"),
    Peak(r"(NVIDIA|Tesla) T4", _tflops(8.1, None, 65, bf16=False), "NVIDIA T4 Tensor Core GPU datasheet"),
    Peak(r"Tesla V100-SXM2-(16|32)GB", _tflops(15.7, None, 125, bf16=False), _V100),
    Peak(r"Tesla V100-PCIE-(16|32)GB", _tflops(14, None, 112, bf16=False), _V100),
    Peak(r"Tesla V100S-PCIE-32GB", _tflops(16.4, None, 130, bf16=False), _V100),
    Peak(r"NVIDIA GeForce RTX 3080", _tflops(29.8, 29.8, 59.5), _GA102),
    Peak(r"NVIDIA GeForce RTX 3090", _tflops(35.6, 35.6, 71), _GA102),
    Peak(r"NVIDIA RTX A6000", _tflops(38.7, 77.4, 154.8), "NVIDIA RTX A6000 datasheet; figures with sparsity are halved"),
    Peak(r"NVIDIA GeForce RTX 4080", _tflops(48.7, 48.7, 97.5), _ADA),
    Peak(r"NVIDIA GeForce RTX 4090", _tflops(82.6, 82.6, 165.2), _ADA),
    Peak(r"NVIDIA GeForce RTX 5090", _tflops(104.8, 104.8, 209.5), _BLACKWELL),
    # torch sees each of the two dies of an MI250X as a device, so these are halves: 95.7 (fp32 matrix) and 383
    Peak(r"AMD Instinct MI250X", _tflops(47.85, None, 191.5), "AMD Instinct MI250X datasheet, halved: one of two dies"),
    Peak(r"AMD Instinct MI300X", _tflops(163.4, 653.7, 1307.4), "AMD Instinct MI300X datasheet"),
)


def matmul_format(precision: str, device: torch.device) -> str | None:
    """The format in which a run's large matrix products are multiplied.

    Args:
        precision: the name of a precision, Lightning's or ours.
        device: where the module runs. On CUDA torch's settings decide whether fp32 products are tf32 ones.

    Returns:
        "fp32", "tf32", "bf16" or "fp16"; None for a precision that is none of these.
    """
    for prefix, name in (("16", "fp16"), ("bf16", "bf16")):
        if precision.startswith(prefix):
            return name
    if not precision.startswith("32"):
        return None
    # not `get_float32_matmul_precision`: it raises once the newer setting has been used
    return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def peak_tflops(name: str, fmt: str) -> tuple[float, str] | None:
    """The dense peak of a device, in TFLOP/s, and its source; None if it is not known.

    Args:
        name: the device's name, as ``torch.cuda.get_device_name`` gives it.
        fmt: "fp32", "tf32", "bf16" or "fp16". tf32 on a device without it is fp32, which is what torch computes there.
    """
    for peak in PEAKS:
        if re.fullmatch(peak.pattern, name):
            found = peak.tflops.get(fmt, peak.tflops["fp32"] if fmt == "tf32" else None)
            return None if found is None else (found, peak.source)
    return None


class FlopCount:
    """FLOPs that were counted so far, over any number of blocks.

    Attributes:
        flops: operations; a multiplication with an addition is two.
        blocks: the names of the blocks that were entered.

    Example:
        >>> import torch
        >>> from lightning_mp.cost.roofline import FlopCount
        >>> count = FlopCount()
        >>> with count.counting():
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> count.flops
        48
    """

    def __init__(self) -> None:
        self.flops = 0
        self.blocks: set[str] = set()
        self._is_counting = False

    @contextmanager
    def counting(self, name: str = "") -> Iterator[None]:
        """Count what runs inside, forward and backward, on any device; a block inside another adds nothing.

        The operations run as they would without, but that torch does not apply autocast within a kernel meanwhile. Makes no
        device-to-host sync.
        """
        self.blocks.add(name)
        if self._is_counting:
            yield
            return
        counter = _Counter()
        self._is_counting = True
        try:
            with counter:
                yield
        finally:
            self._is_counting = False
            self.flops += counter.flops


class _Counter(TorchDispatchMode):
    """Counts operations by torch's formulas, and runs each as it is.

    torch's own ``FlopCounterMode`` takes operations apart that it has no formula for, and autocast then rounds in between, so
    that some results differ in their last bits. Such operations count nothing here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        own = {operation: shape_wrapper(formula) for operation, formula in _cpu_attention().items()}
        self._formulas = {**flop_registry, **own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile stands between some layer and the counter, which would then see little of it."""
    # `torch.compile(layer)` makes one of these; until somebody calls it, the package that has it need not be imported
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = () if dynamo is None else dynamo.OptimizedModule
    return getattr(module, "_compiler_ctx", None) is not None or any(
        getattr(part, "_compiled_call_impl", None) is not None or isinstance(part, wrapper) for part in module.modules()
    )


def _cpu_attention() -> dict[Any, Any]:
    """FLOPs of the CPU's fused attention, which torch's counter leaves out."""

    def forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad_out, query, key, value))

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
