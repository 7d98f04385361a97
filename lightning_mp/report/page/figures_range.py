"""Pictures of what 16-bit formats can hold: the loss scale, the range of gradients, and the updates that would be lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_mp.numerics.formats import BF16, FP16, FP32, FloatFormat
from lightning_mp.report.page.drawing import (
    Array,
    Canvas,
    Look,
    Missing,
    Picture,
    Rows,
    Styled,
    Table,
    along,
    finite,
    has_points,
    mark,
    spread,
    styled,
    thin,
    up,
)
from lightning_mp.report.page.wording import NAME_LENGTH, each, known, listed, number, percent, power, shortened
from lightning_mp.report.story import Exponents, RunStory, Series, Story

_ALL = percent(1.0)
_MOST = 4  # runs that are told of one by one


def loss_scale(story: Story) -> Picture | Missing:
    """Log2 of the loss scale, with the steps that overflowed."""
    title = "Loss scale"
    shown = [(run, style) for run, style in styled(story) if has_points(run.loss_scale)]
    if not shown:
        if any(_format_of(run.precision) is FP16 for run in story.runs):
            return Missing(title, "The loss scale was not recorded. Attach LossScaleMonitor, or lightning_mp.monitors().")
        return Missing(title, "No run used a loss scale; only fp16 precisions need one (16-mixed, 16-master).")
    sentences, rows = [], []
    for run, _ in shown:
        assert run.loss_scale is not None
        scales = finite(run.loss_scale.y)
        skipped = run.skipped_count if run.skipped_count is not None else len(run.skipped_steps or ())
        steps = [f"{step:,}" for step in run.skipped_steps or ()]
        where = f" (step {listed(steps)})" if steps else ""
        sentences.append(
            f"{run.name}: from {power(scales.min())} to {power(scales.max())}, "
            f"at the end {power(scales[-1])}; "
            f"{skipped:,} skipped {'step' if skipped == 1 else 'steps'}{where}."
        )
        lowest, highest, last = (number(value, 3) for value in (scales.min(), scales.max(), scales[-1]))
        rows.append((run.name, lowest, highest, last, f"{skipped:,}", listed(steps, 20) or "none known"))
    return Picture(
        "loss-scale",
        title,
        " ".join(sentences),
        "Log2 of the scale against optimizer steps. A cross marks a step that overflowed, was skipped and changed nothing. "
        "One or two at the start are usual; many later are not.",
        Table(("run", "lowest log2", "highest log2", "last log2", "skipped steps", "which"), rows),
        partial(_draw_loss_scale, shown),
        [style for _, style in shown],
    )


def _draw_loss_scale(shown: Sequence[Styled], look: Look) -> Figure:
    left, height = (48, 170) if look.is_narrow else (56, 220)
    canvas = Canvas(look, height + 84, [style for _, style in shown])
    canvas.text(0, 10, "log2 of the loss scale", "ink")
    axes = canvas.axes(left, 30, look.width - left - 8, height)
    low, high = math.inf, -math.inf
    for index, (run, style) in enumerate(shown):
        assert run.loss_scale is not None
        x, y = thin(run.loss_scale)
        low, high = min(low, np.nanmin(y)), max(high, np.nanmax(y))
        every = spread(index, len(shown), len(x), style, look)
        axes.plot(x, y, color=look.palette[style.accent], linewidth=1.6, drawstyle="steps-post", **every)
        if run.skipped_steps:
            steps, _ = thin(Series(run.skipped_steps, [0.0] * len(run.skipped_steps)))
            at, scales = thin(run.loss_scale, 10**9)
            places = np.clip(np.searchsorted(at, steps, side="right") - 1, 0, len(at) - 1)
            cross: dict[str, Any] = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "linestyle": "none"}
            axes.plot(steps, scales[places], color=look.palette["bad"], zorder=5, clip_on=False, **cross)
    axes.set_ylim(low - 1, high + 1)
    axes.set_xlim(left=0)
    along(axes, count=4 if look.is_narrow else 8, is_whole=True)
    up(axes, is_whole=True)
    canvas.text(left, height + 72, "optimizer steps")
    return canvas.figure


def gradients(story: Story) -> Picture | Missing:
    """Where gradients lie, against the limits of the format that they were computed in."""
    title = "Range of gradients"
    shown = [(run, style) for run, style in styled(story) if run.exponents is not None and sum(run.exponents.counts) > 0]
    if not shown:
        return Missing(
            title, "The range of gradients was not sampled. Attach GradientRangeMonitor, or lightning_mp.monitors()."
        )
    rows = []
    for run, _ in shown:
        shares = _range_shares(run)
        cells = [percent(shares[key]) for key in ("normal", "subnormal", "zero", "over")]
        rows.append((run.name, _format_of(run.precision).name, power(_shift(run)), *cells))
    reading = (
        "Share of gradient elements by power of two, as the format sees them in backward: with the loss scale. Where there is "
        "one, the dashed outline is the same without it. Upright lines are the format's limits: its smallest subnormal, its "
        "smallest normal and its largest number."
    )
    return Picture(
        "gradients",
        title,
        _range_finding(rows),
        reading,
        Table(("run", "format", "loss scale", "normal", "subnormal", "flushed to zero", "too large"), rows),
        partial(_draw_gradients, shown),
    )


def _range_finding(rows: Sequence[Sequence[str]]) -> str:
    """The rows of the table in words, those together whose elements are all normal numbers."""
    whole = [row[0] for row in rows if row[3] == _ALL]
    others = [row for row in rows if row[3] != _ALL]
    sentences = [
        f"{shortened(name, NAME_LENGTH)} ({form}, loss scale {scale}): {normal} of the elements are normal numbers, "
        f"{subnormal} subnormal, {zero} flushed to zero, {over} too large."
        for name, form, scale, normal, subnormal, zero, over in others[:_MOST]
    ]
    if len(others) > _MOST:
        sentences.append(f"{len(others) - _MOST} more are in the table.")
    if whole:
        sentences.append(f"{listed(whole)}: {_ALL} of the elements are normal numbers of their format.")
    return " ".join(sentences)


def _shift(run: RunStory) -> float:
    assert run.exponents is not None
    return math.log2(run.exponents.scale)


def _range_shares(run: RunStory) -> dict[str, float]:
    """The share of the scaled elements that is flushed to zero, subnormal, normal, and larger than the largest."""
    form, found = _format_of(run.precision), run.exponents
    assert found is not None
    counts = np.asarray(found.counts, dtype=np.float64)
    lower = np.asarray(found.edges, dtype=np.float64)[:-1] + _shift(run)
    smallest, normal, largest = math.log2(form.smallest_subnormal), float(form.min_exponent), float(form.max_exponent + 1)
    total = counts.sum() + found.flushed
    zero = counts[lower < smallest].sum() + found.flushed
    over = counts[lower >= largest].sum()
    subnormal = counts[(lower >= smallest) & (lower < normal)].sum()
    return {
        "zero": zero / total,
        "subnormal": subnormal / total,
        "over": over / total,
        "normal": (total - zero - over - subnormal) / total,
    }


def _draw_gradients(shown: Sequence[Styled], look: Look) -> Figure:
    left, high, head = (48, 84, 60) if look.is_narrow else (56, 84, 56)
    canvas = Canvas(look, (high + head) * len(shown) + 60)
    limits = _exponent_limits([run for run, _ in shown])
    first: Axes | None = None
    for index, (run, style) in enumerate(shown):
        assert run.exponents is not None
        top = (high + head) * index
        form = _format_of(run.precision)
        name = shortened(run.name, 28 if look.is_narrow else 60)
        scale = f", loss scale {power(_shift(run))}" if _shift(run) else ""
        canvas.text(0, top + 24, f"{name} ({form.name}{scale})", "ink")
        axes = canvas.axes(left, top + head, look.width - left - 8, high, share_x=first)
        first = first or axes
        edges, shares = _shares(run.exponents)
        colour = look.palette[style.accent]
        axes.stairs(shares, edges + _shift(run), fill=True, color=colour, alpha=0.5, linewidth=0)
        axes.stairs(shares, edges + _shift(run), color=colour, linewidth=1.2)
        if _shift(run):
            axes.stairs(shares, edges, color=look.palette["muted"], linewidth=1.2, linestyle=(0, (3, 2)))
        axes.set_xlim(limits)
        axes.set_ylim(0, 1.15 * max(shares.max(), 1e-9))
        up(axes, lambda value: f"{100 * value:g}%", count=3)
        _draw_limits(axes, form, limits, look)
        along(axes, power, 8 if look.is_narrow else 12, is_whole=True)
        axes.tick_params(labelbottom=index == len(shown) - 1)
    canvas.text(left, (high + head) * len(shown) + 46, "magnitude of an element")
    return canvas.figure


def _shares(found: Exponents) -> tuple[Array, Array]:
    """Edges, and the share of all elements between them, without the empty ends."""
    edges, counts = np.asarray(found.edges, dtype=np.float64), np.asarray(found.counts, dtype=np.float64)
    full = np.flatnonzero(counts > 0)
    inside = slice(full[0], full[-1] + 1)
    return edges[full[0] : full[-1] + 2], counts[inside] / (counts.sum() + found.flushed)


def _exponent_limits(shown: Sequence[RunStory]) -> tuple[float, float]:
    """From the smallest to the largest magnitude that there is, scaled or not, and fp16's limits where they matter."""
    ends: list[float] = []
    for run in shown:
        assert run.exponents is not None
        edges, shares = _shares(run.exponents)
        visible = np.flatnonzero(shares > 1e-6)
        for shift in (0.0, _shift(run)):
            ends += [edges[visible[0]] + shift, edges[visible[-1] + 1] + shift]
        if _format_of(run.precision) is FP16:
            ends += [math.log2(FP16.smallest_subnormal) - 2, FP16.max_exponent + 3]
    return min(ends) - 1, max(ends) + 1


def _draw_limits(axes: Axes, form: FloatFormat, limits: tuple[float, float], look: Look) -> None:
    """Lines at what the format can hold, and an arrow towards those that are beyond the picture."""
    places = {
        "subnormal": math.log2(form.smallest_subnormal),
        "normal": float(form.min_exponent),
        "largest": math.log2(form.largest),
    }
    options: dict[str, Any] = {"fontsize": look.font - 1, "va": "bottom", "annotation_clip": False, "xytext": (0, 3)}
    options |= {"xycoords": ("data", "axes fraction"), "textcoords": "offset pixels"}
    bad, muted = look.palette["bad"], look.palette["muted"]
    for place in places.values():
        if limits[0] <= place <= limits[1]:
            axes.axvline(place, color=bad, linewidth=1.2, linestyle=(0, (4, 2)))
    word = {key: "" if look.is_narrow else f"{key} " for key in places}
    if limits[0] <= places["subnormal"]:
        axes.axvspan(limits[0], places["subnormal"], color=bad, alpha=0.08, linewidth=0)
        text = f"{word['subnormal']}{power(places['subnormal'])}"
        axes.annotate(text, (places["subnormal"], 1), ha="center", color=bad, **options)
    if limits[0] <= places["normal"]:
        text = f"{word['normal']}{power(places['normal'])}"
        axes.annotate(text, (places["normal"], 1), ha="center", color=bad, **options)
    else:
        text = f"\u2190 smallest normal {power(places['normal'])}"
        axes.annotate(text, (limits[0], 1), ha="left", color=muted, **options)
    if places["largest"] <= limits[1]:
        axes.axvspan(places["largest"], limits[1], color=bad, alpha=0.08, linewidth=0)
        text = f"{word['largest']}{number(form.largest, 5)}"
        axes.annotate(text, (places["largest"], 1), ha="center", color=bad, **options)
    else:
        text = f"largest {power(places['largest'])} \u2192"
        axes.annotate(text, (limits[1], 1), ha="right", color=muted, **options)


def updates_lost(story: Story) -> Picture | Missing:
    """How many weight updates the parameters' own format would have lost."""
    title = "Updates that 16-bit weights would lose"
    shown = [(run, style) for run, style in styled(story) if known(run.updates_lost_fraction)]
    if not shown:
        return Missing(title, "Lost updates were not sampled. Attach GradientRangeMonitor, or lightning_mp.monitors().")
    rows = [(run.name, percent(run.updates_lost_fraction)) for run, _ in shown]
    others = [run.name for run in story.runs if not known(run.updates_lost_fraction)]
    return Picture(
        "updates-lost",
        title,
        f"Updates lost: {each([name for name, _ in rows], [lost for _, lost in rows])}."
        + (f" Not measured: {listed(others)}." if others else ""),
        "Share of the weight updates that would round to nothing in the parameters' own format. Under a master precision, "
        "masters keep them. It is measured on masters, or on fp32 weights; 16-bit weights without masters show no update "
        "that they lost.",
        Table(("run", "updates lost"), rows),
        partial(_draw_updates_lost, shown),
    )


def _draw_updates_lost(shown: Sequence[Styled], look: Look) -> Figure:
    shares = [100 * (run.updates_lost_fraction or 0.0) for run, _ in shown]
    values = [(percent(run.updates_lost_fraction), "") for run, _ in shown]
    rows = Rows(look, [run.name for run, _ in shown], values, "percent of the updates")
    rows.axes.set_xlim(0, 1.08 * max(shares) or 1.0)
    for index, ((_, style), share) in enumerate(zip(shown, shares, strict=True)):
        y = rows.middle(index)
        rows.axes.plot([0, share], [y, y], color=look.palette[style.accent], linewidth=3, solid_capstyle="butt", alpha=0.6)
        rows.axes.plot([share], [y], **mark(style, look, 9), clip_on=False)
    return rows.canvas.figure


def _format_of(precision: str) -> FloatFormat:
    """The format that a precision computes gradients in."""
    return FP16 if precision.startswith("16") else BF16 if precision.startswith("bf16") else FP32
