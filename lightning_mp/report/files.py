"""Folders that belong to one run."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path


def new_run_folder(parent: Path, prefix: str) -> Path:
    """Make a folder that did not exist: `<prefix>-<date>-<time>`, then with `-2`, `-3`, ... behind it."""
    parent.mkdir(parents=True, exist_ok=True)
    base = f"{prefix}-{datetime.now():%Y%m%d-%H%M%S}"
    for name in itertools.chain([base], (f"{base}-{n}" for n in itertools.count(2))):
        try:
            (parent / name).mkdir()  # atomic: of two processes one gets it
        except FileExistsError:
            continue
        return parent / name
    raise AssertionError("unreachable: the names do not end")
