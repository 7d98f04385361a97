"""One line about the machine and the versions, for the head of each table."""

from __future__ import annotations

import lightning
import torch

from lightning_mp.cost.devices import bf16_support


def describe(threads: int) -> str:
    """Device, whether it computes bf16, threads and versions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"{bf16_support(device)[1]}; {threads} threads; torch {torch.__version__}, lightning {lightning.__version__}"
