"""What the devices can do, and their names and versions for the record."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn


def bf16_support(device: torch.device) -> tuple[bool, str]:
    """Whether the device is known to compute bf16 matrix products natively.

    Args:
        device: where the module runs.

    Returns:
        ``(computes, reason)``; the reason is a clause for a log line. What is not known counts as no.
    """
    if device.type == "cuda":
        # without emulation: devices before compute capability 8.0 take bf16 tensors, slowly
        computes = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
        return computes, f"{name} computes bf16" if computes else f"{name} has no bf16 units (compute capability 8.0 has)"
    if device.type == "cpu":
        units = _cpu_bf16_units()
        return bool(units), f"the CPU has {units[0]}" if units else "the CPU is not known to have bf16 instructions"
    return False, f"nothing is known about bf16 on {device.type!r} devices"


def _cpu_bf16_units() -> list[str]:
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if capabilities.get(name)]
    # torch 2.10 knows x86 only
    checks = {"amx_bf16": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    return [name for name, check in checks.items() if hasattr(torch.cpu, check) and getattr(torch.cpu, check)()]


def check_bf16(precision: str, device: torch.device) -> None:
    """Refuse a bf16 precision on a device that cannot do it. A CPU always can, natively or not.

    Raises:
        MisconfigurationException: with the device, the reason and what to use instead.
    """
    computes, reason = bf16_support(device)
    if not computes and device.type != "cpu":
        raise MisconfigurationException(
            f"precision {precision!r} needs a device that computes bf16, but {reason}. Use precision '16-master' or '16-mixed'"
            " on a GPU, '32-true' anywhere, or 'auto', which picks what the device can do."
        )


def check_fp16(precision: str, device: torch.device) -> None:
    """Say what is to be known about fp16 on the device. None is refused.

    fp16 works wherever torch has a kernel for it; a CPU computes it without units of its own.
    """
    if device.type == "cpu":
        rank_zero_info(
            f"precision {precision!r} runs on a CPU as on a GPU, but fp16 matrix products are 10 to 40 times slower there than"
            " fp32 ones. Use 'bf16-master' or '32-true' for speed."
        )
    elif device.type not in ("cuda", "mps"):
        rank_zero_warn(
            f"Nothing is known about fp16 on {device.type!r} devices, so precision {precision!r} may be slow or fail there."
        )


def device_name(device: torch.device) -> str:
    """The device in words, with what decides its speed: the GPU's name, or the CPU's and its thread count."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return str(device)
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), model)
    return f"cpu: {model}, {torch.get_num_threads()} threads"


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = {name: importlib.metadata.version(name) for name in ("lightning-mp", "lightning")}
    return {**packages, "torch": str(torch.__version__), "python": platform.python_version()}
