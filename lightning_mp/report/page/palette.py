"""The colours of the page and its pictures, by role; and which precision has which.

Text (``ink``, ``muted``, and the states ``good`` to ``better``) has a contrast of at least 4.5 to 1 on ``paper`` and ``panel``
in both palettes, and ``ink`` on the parts of memory too; lines in the accents have 3 to 1 and more.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f5f6f8",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "rule": "#d0d7de",
    "grid": "#e8ebef",
    "band": "#dde2e9",
    "margin": "#dcebdd",
    "good": "#1a7f37",
    "bad": "#c02626",
    "unsure": "#855d00",
    "neutral": "#57606a",
    "better": "#1a5fc8",
    "accent-0": "#4a525b",
    "accent-1": "#1a63d6",
    "accent-2": "#b35400",
    "accent-3": "#0b7a75",
    "accent-4": "#7a3fc4",
    "accent-5": "#b8317f",
    "accent-6": "#7d5a3c",
    "accent-7": "#5f6f12",
    "accent-8": "#2f6f8f",
    "part-0": "#a9c3e6",
    "part-1": "#d8c3ea",
    "part-2": "#f3d59a",
    "part-3": "#aedcc0",
    "part-4": "#f0bfb4",
    "part-5": "#d5d6cc",
}
DARK = {
    "paper": "#14171a",
    "panel": "#1d2126",
    "ink": "#e6e8eb",
    "muted": "#9ea8b3",
    "rule": "#3a424b",
    "grid": "#262b31",
    "band": "#39414a",
    "margin": "#1f3526",
    "good": "#4cc272",
    "bad": "#ff7b72",
    "unsure": "#e3b341",
    "neutral": "#9ea8b3",
    "better": "#79b0ff",
    "accent-0": "#c3c9d0",
    "accent-1": "#6ea8ff",
    "accent-2": "#f0a04b",
    "accent-3": "#3fc1b4",
    "accent-4": "#b894f2",
    "accent-5": "#f285bd",
    "accent-6": "#c9a27e",
    "accent-7": "#b6c250",
    "accent-8": "#79b8d4",
    "part-0": "#2f4f78",
    "part-1": "#573f6b",
    "part-2": "#65501f",
    "part-3": "#2a5a41",
    "part-4": "#6b3c33",
    "part-5": "#4a4b44",
}
STAND_INS = {role: f"#00fe{index:02x}" for index, role in enumerate(LIGHT)}
PARTS = sum(role.startswith("part-") for role in LIGHT)
ACCENTS = sum(role.startswith("accent-") for role in LIGHT)
#: Accents of the precisions that have one of their own.
ACCENT_OF = {
    "32-true": 0,
    "32": 0,
    "64-true": 0,
    "bf16-mixed": 1,
    "bf16-true": 2,
    "bf16-master": 3,
    "16-mixed": 4,
    "16-master": 5,
    "16-true": 6,
}
