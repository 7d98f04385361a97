"""The precisions that a comparison can run, by name, and the `Trainer` arguments that each one means.

All but one go through `precision_plugin`. `bf16-true` is stock Lightning, 16-bit weights without masters: it is there
to show what the masters save.
"""

from __future__ import annotations

from collections.abc import Mapping

REFERENCE = "32-true"
DEFAULT = (REFERENCE, "bf16-mixed", "bf16-true", "bf16-master")

CANDIDATES: Mapping[str, Mapping[str, str | None]] = {
    **{
        name: {"precision": None, "precision_plugin": name}
        for name in (REFERENCE, "bf16-mixed", "16-mixed", "bf16-master", "16-master", "auto")
    },
    "bf16-true": {"precision": "bf16-true", "precision_plugin": None},
}
#: Those that compute in fp16, under a loss scale.
FP16 = ("16-mixed", "16-master")
SLOW_FP16 = "this is a CPU, where fp16 matrix products are 10 to 40 times slower than fp32 ones: judge its speed on a GPU."


def parse_precisions(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of precisions and check every name.

    Raises:
        ValueError: the list is empty, has an unknown name, or has one twice. The message names the remedy.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"--precisions is empty. Give at least one of: {', '.join(CANDIDATES)}.")
    unknown = [name for name in names if name not in CANDIDATES]
    if unknown:
        raise ValueError(
            f"--precisions has unknown {', '.join(map(repr, unknown))}. Known precisions: {', '.join(CANDIDATES)}. "
            f"Separate them by commas, for example --precisions {','.join(DEFAULT)}."
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"--precisions lists {', '.join(repeated)} more than once. Name each precision once.")
    return names
