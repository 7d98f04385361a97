"""Pictures of how close the runs are to the baseline: the gap at the end, and the losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_mp.numerics.divergence import Block
from lightning_mp.report.page.drawing import (
    DASHES,
    POINTS,
    Array,
    Canvas,
    Look,
    Missing,
    Picture,
    Rows,
    Style,
    Styled,
    Table,
    along,
    curve_table,
    has_points,
    mark,
    scale_gaps,
    some,
    spread,
    styled,
    thin,
    up,
)
from lightning_mp.report.page.wording import NAME_LENGTH, UNKNOWN, compact, each, known, number, shortened, signed
from lightning_mp.report.story import RunStory, Series, Story

#: The most alarms that are named in a picture; the others are only marked.
NAMED_ALARMS = 3
_BASELINE = Style("the baseline", "ink", "")


def verdicts(story: Story) -> Picture | Missing:
    """Each candidate's gap at the end with its interval, against the margin."""
    title = "Gap at the end of the run, against the margin"
    judged = [(run, style) for run, style in styled(story) if run.verdict is not None and known(run.verdict.gap)]
    if not judged:
        if any(run.verdict is not None for run in story.runs):
            return Missing(title, "No gap could be estimated; the verdicts say why.")
        return Missing(title, "No run was judged. Attach DivergenceMonitor with a baseline, or compare with an fp32 run.")
    rows = []
    for run, _ in judged:
        verdict = run.verdict
        assert verdict is not None
        margin = verdict.margin if known(verdict.margin) else None
        rows.append((run.name, verdict.status, signed(verdict.gap), interval_text(verdict.interval), number(margin, 3)))
    beyond = [row for row, (run, _) in zip(rows, judged, strict=True) if _is_beyond(run)]
    within = [row for row in rows if row not in beyond]
    finding = " ".join(
        f"{where} the margin: {each([row[0] for row in group], [row[2] for row in group])}."
        for where, group in (("Beyond", beyond), ("Within", within))
        if group
    )
    table = Table(("run", "verdict", "gap", "interval", "margin"), rows)
    return Picture(
        "verdicts",
        title,
        finding,
        "The mark is the estimated difference in loss, in nats, and the bar its interval. Right of zero is worse than the "
        "baseline. The tinted field is the margin of practical difference: inside it, a difference does not matter.",
        table,
        partial(_draw_verdicts, judged),
    )


def _is_beyond(run: RunStory) -> bool:
    verdict = run.verdict
    return verdict is not None and known(verdict.gap) and known(verdict.margin) and abs(verdict.gap) > verdict.margin


def _draw_verdicts(judged: Sequence[Styled], look: Look) -> Figure:
    colours = look.palette
    found = [run.verdict for run, _ in judged if run.verdict is not None]
    names = [run.name for run, _ in judged]
    values = [(signed(verdict.gap), verdict.status) for verdict in found]
    rows = Rows(look, names, values, "gap in loss, nats")
    margins = [verdict.margin or 0.0 for verdict in found]
    ends = [end for verdict in found for end in (*(verdict.interval or ()), verdict.gap) if end is not None]
    if scale_gaps(rows.axes, "x", ends, max(margins)):
        rows.canvas.text(look.width, rows.canvas.height - 14, "logarithmic beyond the margin", ha="right")
    rows.axes.axvline(0, color=colours["muted"], linewidth=1)
    for index, ((_, style), verdict) in enumerate(zip(judged, found, strict=True)):
        y, margin = rows.middle(index), margins[index]
        rows.axes.barh(
            y,
            2 * margin,
            left=-margin,
            height=1.3 * rows.thickness if look.is_narrow else 1.0,
            color=colours["margin"],
            zorder=0.5,
        )
        if verdict.interval is not None and all(map(known, verdict.interval)):
            rows.axes.plot(verdict.interval, [y, y], color=colours[style.accent], linewidth=3, solid_capstyle="butt")
        rows.axes.plot([verdict.gap or 0.0], [y], **mark(style, look, 9))
    return rows.canvas.figure


def interval_text(interval: tuple[float, float] | None) -> str:
    """Such as ``+0.0571 to +0.0629``."""
    return UNKNOWN if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def loss(story: Story) -> Picture | Missing:
    """Loss against the baseline with the band, and the gap below it with the margin and the alarm."""
    title = "Loss against the baseline"
    shown = [(run, style) for run, style in styled(story) if run.blocks or has_points(run.loss)]
    if not shown:
        return Missing(title, "No losses were recorded. Attach BaselineRecorder or DivergenceMonitor, or log them.")
    judged = [run for run, _ in shown if run.blocks]
    reading = [f"Against {story.axis}."]
    if judged:
        reading.append(
            "Strong lines are means of blocks, which is what is judged; faint ones are single steps. In the lower panel, the "
            "tinted field is the margin, and a ring marks the alarm."
        )
    if any(run.status == "non-finite" for run, _ in shown):
        reading.append("A cross marks the last finite loss.")
    if _band(story) is not None:
        reading.append("The grey band is the range of the baseline's seeds.")
    if any(run.loss is not None and len(run.loss.x) > POINTS for run, _ in shown):
        reading.append(f"Long curves are thinned to {POINTS} points for this page; the lowest and highest losses are kept.")
    table = _block_table(story, judged) if judged else curve_table(story.axis, [(run.name, run.loss) for run, _ in shown])
    return Picture(
        "loss",
        title,
        _loss_finding([run for run, _ in shown], story.axis),
        " ".join(reading),
        table,
        partial(_draw_loss, story, shown),
        _legend(story, shown),
    )


def _legend(story: Story, shown: Sequence[Styled]) -> list[Style]:
    return [*(style for _, style in shown), *([_BASELINE] if _baselines(story) else [])]


def _loss_finding(runs: Sequence[RunStory], axis: str) -> str:
    """How the runs ended, against the baseline if they were judged; and the alarms."""
    lasts = [(run, block) for run in runs for block in run.blocks[-1:]]
    alarms = [(run, run.verdict.alarm) for run in runs if run.verdict is not None and run.verdict.alarm is not None]
    tails = [run for run in runs if not run.blocks and known(run.tail_loss)]
    sentences = []
    if lasts:
        gaps = each([run.name for run, _ in lasts], [signed(block.gap) for _, block in lasts])
        sentences.append(f"Gap to the baseline in the last block: {gaps}; the margin there is {number(lasts[0][1].margin, 3)}.")
    if tails:
        sentences.append(f"Loss at the end: {each([run.name for run in tails], [number(run.tail_loss) for run in tails])}.")
    sentences += [
        f"{shortened(run.name, NAME_LENGTH)} is not finite after {compact(run.loss.x[last])} {axis}."
        for run in runs
        if run.status == "non-finite" and run.loss is not None
        for last in np.flatnonzero(np.isfinite(np.asarray(run.loss.y, dtype=np.float64)))[-1:]
    ]
    if alarms:
        places = [f"at {compact(alarm.position)} {axis}, with a gap of {signed(alarm.gap)}" for _, alarm in alarms]
        sentences.append(f"Alarm: {each([run.name for run, _ in alarms], places)}.")
    elif lasts:
        sentences.append("There was no alarm.")
    return " ".join(sentences)


def _draw_loss(story: Story, shown: Sequence[Styled], look: Look) -> Figure:
    judged = [(run, style) for run, style in shown if run.blocks]
    left, upper, lower = (48, 210, 170) if look.is_narrow else (56, 300, 210)
    width = look.width - left - 8
    height = 34 + upper + (44 + lower if judged else 0) + 48
    canvas = Canvas(look, height, _legend(story, shown))
    canvas.text(0, 10, "loss, nats", "ink")
    axes = canvas.axes(left, 30, width, upper)
    _draw_curves(axes, story, shown, look)
    axes.set_xlim(0, 1.01 * axes.dataLim.x1 or 1.0)
    along(axes, count=4 if look.is_narrow else 8)
    up(axes, lambda value: f"{value:.4g}")
    if judged:
        top = 34 + upper + 44
        axes.tick_params(labelbottom=False)
        gaps = canvas.axes(left, top, width, lower, share_x=axes)
        is_log = _draw_gaps(gaps, judged, look)
        head = "gap to the baseline, nats" + (" (logarithmic beyond the margin)" if is_log and not look.is_narrow else "")
        canvas.text(0, top - 22, head, "ink")
        if is_log and look.is_narrow:
            canvas.text(look.width - 8, top - 22, "log beyond margin", ha="right")
        _draw_alarms((axes, gaps), judged, look)
    canvas.text(left, height - 12, story.axis)
    return canvas.figure


def _draw_curves(axes: Axes, story: Story, shown: Sequence[Styled], look: Look) -> None:
    colours, seen = look.palette, list[Array]()
    band = _band(story)
    if band is not None:
        axes.fill_between(*band, color=colours["band"], linewidth=0, zorder=1)
        seen += [band[1], band[2]]
    for index, (run, style) in enumerate(shown):
        x, y = thin(run.loss) if run.loss is not None else (np.empty(0), np.empty(0))
        means = _block_means(run, story)
        faint = {"alpha": 0.22, "linewidth": 0.8} if means is not None else {"linewidth": 1.3}
        every = {} if means is not None else spread(index, len(shown), len(x), style, look)
        if means is not None and run.loss is not None and np.isfinite(run.loss.x).all() and len(x) > 1:
            x = x - np.median(np.diff(run.loss.x)) / 2  # the middle of a step, as means stand in the middle of their blocks
        axes.plot(x, y, color=colours[style.accent], zorder=2, solid_joinstyle="round", **{**faint, **every})
        seen.append(y)
        if run.status == "non-finite" and np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            cross: dict[str, Any] = {"marker": "x", "markersize": 9, "markeredgewidth": 2.2, "linestyle": "none"}
            axes.plot(x[last], y[last], color=colours["bad"], zorder=20, **cross)
        if means is not None:
            every = spread(index, len(shown), len(means[0]), style, look)
            axes.plot(*means, color=colours[style.accent], linewidth=1.8, zorder=3 + index, **every)
            seen.append(means[1])
    for x, y in _baselines(story):
        axes.plot(x, y, color=colours[_BASELINE.accent], linewidth=1.4, linestyle=DASHES, zorder=2.5)
        seen.append(y)
    _limit(axes, np.concatenate(seen) if seen else np.empty(0))


def _limit(axes: Axes, values: Array) -> None:
    """Show all values, unless a few would press the others flat: those are cut off above."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high, most = finite.min(), finite.max(), np.quantile(finite, 0.97)
    if high - low > 8 * (most - low) > 0:
        high = most + 0.5 * (most - low)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - pad, high + pad)


def _draw_gaps(axes: Axes, judged: Sequence[Styled], look: Look) -> bool:
    colours = look.palette
    longest = max((run.blocks for run, _ in judged), key=len)
    ends = [0.0, *(block.end for block in longest)]
    margins = np.array([longest[0].margin, *(block.margin for block in longest)])
    gaps = [block.gap for run, _ in judged for block in run.blocks]
    axes.fill_between(ends, -margins, margins, color=colours["margin"], linewidth=0)
    ranges = _ranges(longest)
    if ranges:
        lows = [low - block.baseline for block, low, _ in ranges]
        highs = [high - block.baseline for block, _, high in ranges]
        axes.fill_between([block.end for block, _, _ in ranges], lows, highs, color=colours["band"], linewidth=0, zorder=0.5)
        gaps += [*lows, *highs]
    axes.axhline(0, color=colours["muted"], linewidth=1)
    is_log = scale_gaps(axes, "y", gaps, float(margins.max()))
    for index, (run, style) in enumerate(judged):
        x, y = thin(Series([block.end for block in run.blocks], [block.gap for block in run.blocks]))
        every = spread(index, len(judged), len(x), style, look)
        axes.plot(x, y, color=colours[style.accent], linewidth=1.5, zorder=3 + index, **every)
    return is_log


def _draw_alarms(panels: Sequence[Axes], judged: Sequence[Styled], look: Look) -> None:
    """A ring at the alarm's gap, a line through both panels, and whose it is."""
    alarms = [(run, run.verdict.alarm) for run, _ in judged if run.verdict is not None and run.verdict.alarm is not None]
    right = panels[1].get_xlim()[1]
    for index, (run, alarm) in enumerate(alarms):
        for axes in panels:
            axes.axvline(alarm.position, color=look.palette["bad"], linewidth=1, linestyle=(0, (2, 2)), zorder=2)
        if known(alarm.gap):
            ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2}
            panels[1].plot([alarm.position], [alarm.gap], color=look.palette["bad"], zorder=20, clip_on=False, **ring)
        if index < NAMED_ALARMS:
            is_left = alarm.position < 0.55 * right
            panels[0].annotate(
                f"alarm: {shortened(run.name, 22 if look.is_narrow else 40)}",
                (alarm.position, 1),
                xycoords=("data", "axes fraction"),
                xytext=(6 if is_left else -6, -9 - 16 * index),
                textcoords="offset pixels",
                ha="left" if is_left else "right",
                va="center",
                color=look.palette["bad"],
                fontsize=look.font,
                parse_math=False,
                backgroundcolor=look.palette["paper"],
                zorder=20,
            )


def _band(story: Story) -> tuple[Array, Array, Array] | None:
    """Positions, lowest and highest loss of the baseline's seeds: of the blocks, else of means of the seeds' curves."""
    for run in story.runs:
        ranges = _ranges(run.blocks)
        if ranges:
            blocks, low, high = zip(*ranges, strict=True)
            return _middles(blocks), np.array(low), np.array(high)
    curves = [thin(curve, 10**9) for curve in story.baseline_curves]
    curves = [(x, y) for x, y in curves if len(x) > 1]
    if len(curves) < 2:
        return None
    edges = np.linspace(0, min(x[-1] for x, _ in curves), 61)[1:]
    means = np.array([_means_between(x, y, edges) for x, y in curves])
    full = np.isfinite(means).all(axis=0)
    return (edges[full], means[:, full].min(axis=0), means[:, full].max(axis=0)) if full.any() else None


def _ranges(blocks: Sequence[Block]) -> list[tuple[Block, float, float]]:
    """Blocks with the lowest and highest mean of the baseline's seeds, where there are several."""
    limits = ((block, block.band_low, block.band_high) for block in blocks)
    return [(block, low, high) for block, low, high in limits if known(low) and known(high)]


def _means_between(x: Array, y: Array, edges: Array) -> Array:
    """The mean of ``y`` up to each edge, from the one before; NaN where there is no point."""
    inside = np.isfinite(y) & (x <= edges[-1])
    places = np.searchsorted(edges, x[inside])
    counts = np.bincount(places, minlength=len(edges))
    sums = np.bincount(places, weights=y[inside], minlength=len(edges))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _block_means(run: RunStory, story: Story) -> tuple[Array, Array] | None:
    """A judged run's own means; for the reference, what the others were judged against."""
    if run.blocks:
        return _middles(run.blocks), np.array([block.candidate for block in run.blocks])
    if run is story.reference_run and any(other.blocks for other in story.runs):
        return _baseline_means(story)
    return None


def _baselines(story: Story) -> list[tuple[Array, Array]]:
    """What the runs were judged against, where no run shows it; else the baseline's own curves."""
    if story.reference_run is not None:
        return []
    if any(run.blocks for run in story.runs):
        return [_baseline_means(story)]
    return [thin(curve) for curve in story.baseline_curves]


def _baseline_means(story: Story) -> tuple[Array, Array]:
    longest = max((run.blocks for run in story.runs), key=len)
    return _middles(longest), np.array([block.baseline for block in longest])


def _middles(blocks: Sequence[Block]) -> Array:
    """Where the means of blocks stand among single steps; judged they are at the ends."""
    ends = np.array([block.end for block in blocks])
    return ends - np.diff(ends, prepend=0.0) / 2


def _block_table(story: Story, judged: Sequence[RunStory]) -> Table:
    by_run: list[dict[float, Block]] = [{block.end: block for block in run.blocks} for run in judged]
    ends = some(sorted(set().union(*by_run)))
    columns = [story.axis, "baseline"]
    for run in judged:
        columns += [f"{run.name}, loss", f"{run.name}, gap"]
    rows = []
    for end in ends:
        blocks = [of_run.get(end) for of_run in by_run]
        baseline = next((block.baseline for block in blocks if block is not None), None)
        row = [f"{end:,.0f}", number(baseline, 5)]
        for block in blocks:
            row += [number(block.candidate, 5), signed(block.gap)] if block else [UNKNOWN, UNKNOWN]
        rows.append(row)
    return Table(columns, rows, "Means of blocks, by the block's end.")
