"""Numbers and names as a reader sees them. What is not known, or not finite, is never a number: it is ``n/a``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

UNKNOWN = "n/a"
NAME_LENGTH = 48  # of a name within a sentence
MINUS = "\u2212"
_UNITS = ((1.0, "GiB"), (2.0**10, "MiB"), (2.0**20, "KiB"))


def known(value: float | None) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    """With so many significant digits, and commas between thousands: ``52,345`` or ``0.01234``."""
    if not known(value):
        return UNKNOWN
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size <= 12:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return f"{value:,.{max(digits - 1 - size, 0)}f}".replace("-", MINUS)


def signed(value: float | None, places: int = 4) -> str:
    """A difference: ``+0.0600``. Large ones have fewer places."""
    if not known(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:+.2e}".replace("-", MINUS)
    text = f"{value:+.{places if abs(value) < 10 else 1}f}"
    return f"+{text[1:]}" if not text.strip("+-0.") else text.replace("-", MINUS)  # no negative zero


def compact(value: float) -> str:
    """For the ticks of an axis: ``1.5k``, ``20M``."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}".replace("-", MINUS)
    return f"{value:.4g}".replace("-", MINUS)


def percent(fraction: float | None) -> str:
    """A fraction from 0 to 1, in percent. Small ones, and what lacks of large ones, keep two digits: only all is 100%."""
    if not known(fraction):
        return UNKNOWN
    share = 100 * fraction
    if share in (0, 100):
        return f"{share:.0f}%"
    if 0 < 100 - share < 0.05:
        return f"{share:.{1 - math.floor(math.log10(100 - share))}f}%"
    return f"{share:.1f}%" if share >= 1 else f"{share:.2g}%"


def power(exponent: float) -> str:
    """A power of two: ``2^15``, ``2^-13.6``."""
    return f"2^{exponent:.3g}"


def ratio(value: float | None, base: float | None) -> str | None:
    """``0.88x``; None if one of them is not known."""
    if not known(value) or not known(base) or not base:
        return None
    return f"{value / base:.2f}x" if value < 100 * base else f"{value / base:,.0f}x"


def memory_unit(gib: Iterable[float | None]) -> tuple[float, str]:
    """The unit in which the largest of these is at least 1, and how many of it are a GiB."""
    largest = max((value for value in gib if known(value)), default=1.0)
    return next((unit for unit in _UNITS if largest * unit[0] >= 1), _UNITS[-1])


def memory(gib: float | None) -> str:
    """Memory in the unit that suits it: ``1.25 GiB``."""
    factor, unit = memory_unit([gib])
    return f"{number(gib * factor, 3)} {unit}" if known(gib) else UNKNOWN


def each(names: Sequence[str], values: Sequence[str], compared: Sequence[str | None] = (), most: int = 8) -> str:
    """What each run has: ``32-true 220 ms, bf16-mixed 163 ms (0.74x)``."""
    compared = compared or [None] * len(names)
    parts = [
        f"{shortened(name, NAME_LENGTH)} {value}{f' ({ratio})' if ratio else ''}"
        for name, value, ratio in zip(names, values, compared, strict=True)
    ]
    rest = len(parts) - most
    return ", ".join([*parts[:most], *([f"and {rest} more in the table"] if rest > 0 else [])])


def listed(names: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; of more than ``most``, the first ones and how many there are beside them."""
    names = [shortened(name, NAME_LENGTH) for name in names]
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` characters on one line, with an ellipsis in the middle: names often differ at their end.

    What cannot be printed (control characters, halves of surrogate pairs) becomes a replacement character.
    """
    flat = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    if len(flat) <= limit:
        return flat
    tail = max(limit // 3, 1)
    return f"{flat[: max(limit - tail - 1, 1)]}\u2026{flat[-tail:]}"
