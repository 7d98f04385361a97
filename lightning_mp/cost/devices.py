"""What the devices can do."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def bf16_support(device: torch.device) -> tuple[bool, str]:
    """Whether the device computes bf16 matrix products natively.

    Args:
        device: where the module runs.

    Returns:
        ``(computes, reason)``; the reason is a clause for a log line. An unknown kind of device counts as one that does not.
    """
    if device.type == "cuda":
        # without emulation: devices before compute capability 8.0 take bf16 tensors, slowly
        computes = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
        return computes, f"{name} {'computes bf16' if computes else 'has no bf16 units (they came with compute capability 8.0)'}"
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        units = [name for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16") if capabilities.get(name)]
        name = capabilities.get("cpu_name") or capabilities.get("architecture", "CPU")
        return bool(units), f"the CPU ({name}) {'has ' + units[0] if units else 'has no bf16 instructions'}"
    if device.type == "mps":
        return False, "bf16 on mps is not tested"
    return False, f"nothing is known about bf16 on {device.type!r} devices"


def check_bf16(precision: str, device: torch.device) -> None:
    """Refuse a bf16 precision on a device that cannot do it. A CPU always can, natively or not.

    Raises:
        MisconfigurationException: with the device, the reason and what to use instead.
    """
    computes, reason = bf16_support(device)
    if not computes and device.type != "cpu":
        raise MisconfigurationException(
            f"precision {precision!r} needs a device that computes bf16, but {reason}. Use precision '32-true', or 'auto', which"
            " picks what the device can do."
        )
