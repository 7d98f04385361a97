"""The leaves of a batch, however it is nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of a nesting of mappings, sequences and dataclasses, in order, each with its path."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for key, item in items for leaf in leaves(item, f"{path}/{key}")]
