"""The pictures of a comparison, each with what it shows in words, and with the numbers behind it.

Every function takes a :class:`~lightning_mp.report.story.Story` and returns a
:class:`~lightning_mp.report.page.drawing.Picture`, or :class:`~lightning_mp.report.page.drawing.Missing` with a sentence on
what to do, where there is nothing to draw.
:func:`~lightning_mp.report.page.images.to_svg` and :func:`~lightning_mp.report.page.images.to_png` do the rest.
"""

from __future__ import annotations

from lightning_mp.report.page.drawing import Missing, Picture
from lightning_mp.report.page.figures_cost import memory_parts, step_times, throughput
from lightning_mp.report.page.figures_loss import loss, verdicts
from lightning_mp.report.page.figures_range import gradients, loss_scale, updates_lost
from lightning_mp.report.page.images import to_png, to_svg
from lightning_mp.report.story import Story

__all__ = [
    "Missing",
    "Picture",
    "gradients",
    "loss",
    "loss_scale",
    "memory_parts",
    "pictures",
    "step_times",
    "throughput",
    "to_png",
    "to_svg",
    "updates_lost",
    "verdicts",
]

_ALL = (verdicts, loss, memory_parts, step_times, throughput, loss_scale, gradients, updates_lost)


def pictures(story: Story) -> list[Picture | Missing]:
    """All of them, in the order of the page."""
    return [make(story) for make in _ALL]
