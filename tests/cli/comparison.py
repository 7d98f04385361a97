"""What a comparison left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compared:
    """What a comparison left behind.

    Attributes:
        status: its exit status.
        folder: its folder.
        printed: on standard output.
        errors: on standard error.
    """

    status: int
    folder: Path
    printed: str
    errors: str
