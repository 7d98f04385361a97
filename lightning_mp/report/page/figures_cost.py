"""Pictures of what the runs cost: memory, the time of a step, and tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

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
    curve_table,
    finite,
    has_points,
    mark,
    part_style,
    spread,
    styled,
    thin,
    up,
)
from lightning_mp.report.page.wording import UNKNOWN, each, known, memory, memory_unit, number, ratio
from lightning_mp.report.story import MEMORY_PARTS, RunStory, Story


def memory_parts(story: Story) -> Picture | Missing:
    """What memory is made of, the runs above each other."""
    title = "What memory is made of"
    shown = [run for run in story.runs if any(known(size) and size > 0 for size in run.memory_gib.values())]
    if not shown:
        return Missing(title, "Memory was not measured. Attach MemoryMonitor, or lightning_mp.monitors().")
    known_parts = {part for run in shown for part, size in run.memory_gib.items() if known(size) and size > 0}
    parts = [part for part in MEMORY_PARTS if part in known_parts] + sorted(known_parts - set(MEMORY_PARTS))
    sums = {id(run): sum(run.memory_gib[part] for part in parts if known(run.memory_gib.get(part))) for run in shown}
    reference = next((sums[id(run)] for run in shown if run is story.reference_run), None)
    rows, per_parameter = [], []
    for run in shown:
        per_parameter.append(f"{sum(run.bytes_per_parameter.values()):.2f}" if run.bytes_per_parameter else UNKNOWN)
        sizes = [memory(run.memory_gib.get(part)) for part in parts]
        rows.append((run.name, *sizes, memory(sums[id(run)]), memory(run.peak_gib), per_parameter[-1]))
    names = [run.name for run in shown]
    compared = [ratio(sums[id(run)], reference) if run is not story.reference_run else None for run in shown]
    finding = f"Sum of the parts: {each(names, [memory(sums[id(run)]) for run in shown], compared)}."
    if any(text != UNKNOWN for text in per_parameter):
        finding += f" In bytes per parameter: {each(names, per_parameter)}."
    reading = "The parts are counted from the tensors"
    peaks = _peaks(shown, max(sums.values()))
    reading += f"; the upright mark is the {shown[0].peak_label}." if any(map(known, peaks)) else "."
    return Picture(
        "memory",
        title,
        finding,
        reading,
        Table(("run", *parts, "sum", "peak", "bytes per parameter"), rows),
        partial(_draw_memory, shown, parts, [sums[id(run)] for run in shown], reference, peaks),
        [part_style(index, part) for index, part in enumerate(parts)],
    )


def _peaks(shown: Sequence[RunStory], largest: float) -> list[float]:
    """The peaks, if they can be drawn on the scale of the parts: a process's can be many times as large. Else NaN."""
    peaks = [run.peak_gib if run.peak_gib is not None else math.nan for run in shown]
    fits = all(peak <= 2.5 * largest for peak in peaks if known(peak))
    return peaks if fits else [math.nan] * len(peaks)


def _draw_memory(
    shown: Sequence[RunStory],
    parts: Sequence[str],
    sums: Sequence[float],
    reference: float | None,
    peaks: Sequence[float],
    look: Look,
) -> Figure:
    factor, unit = memory_unit([*sums, *peaks])
    values = [(memory(size), ratio(size, reference) or "") for size in sums]
    legend = [part_style(index, part) for index, part in enumerate(parts)]
    rows = Rows(look, [run.name for run in shown], values, unit, legend)
    longest = factor * max([*sums, *(peak for peak in peaks if known(peak))])
    rows.axes.set_xlim(0, 1.02 * longest)
    pixels = rows.axes.get_window_extent().width / (1.02 * longest)
    for index, run in enumerate(shown):
        left, y = 0.0, rows.middle(index)
        for part, style in zip(parts, legend, strict=True):
            size = run.memory_gib.get(part)
            if size is None or not known(size) or size <= 0:
                continue
            width = factor * size
            rows.axes.barh(
                y,
                width,
                left=left,
                height=rows.thickness,
                color=look.palette[style.accent],
                edgecolor=look.palette["paper"],
                linewidth=1,
            )
            if width * pixels > 0.56 * look.font * len(style.label) + 4:
                label: dict[str, Any] = {
                    "ha": "center",
                    "va": "center_baseline",
                    "fontsize": look.font - 1,
                    "color": look.palette["ink"],
                }
                rows.axes.text(left + width / 2, y, style.label, parse_math=False, **label)
            left += width
        if known(peaks[index]):
            place = [factor * peaks[index]] * 2
            half = 0.65 * rows.thickness
            rows.axes.plot(place, [y - half, y + half], color=look.palette["ink"], linewidth=2, clip_on=False)
    return rows.canvas.figure


def step_times(story: Story) -> Picture | Missing:
    """How the times of steps are spread."""
    title = "Time of a step"
    shown = [(run, style) for run, style in styled(story) if len(finite(run.step_times_ms))]
    if not shown:
        return Missing(title, "No step times were recorded. Attach SpeedMonitor, or lightning_mp.monitors().")
    spreads = [np.quantile(finite(run.step_times_ms), (0.05, 0.25, 0.5, 0.75, 0.95)) for run, _ in shown]
    medians = [
        run.step_time_ms if known(run.step_time_ms) else spread[2] for (run, _), spread in zip(shown, spreads, strict=True)
    ]
    base = next((median for (run, _), median in zip(shown, medians, strict=True) if run is story.reference_run), None)
    rows = []
    for (run, _), times in zip(shown, spreads, strict=True):
        measured = finite(run.step_times_ms)
        cells = (number(time) for time in (*times, measured.max()))
        rows.append((run.name, f"{len(measured):,}", *cells))
    names = [run.name for run, _ in shown]
    compared = [
        ratio(median, base) if run is not story.reference_run else None for (run, _), median in zip(shown, medians, strict=True)
    ]
    finding = f"Median time of an optimizer step: {each(names, [f'{number(median)} ms' for median in medians], compared)}."
    return Picture(
        "step-times",
        title,
        finding,
        "The mark is the median, the thick bar the middle half of the steps, and the thin line 9 of 10 steps.",
        Table(("run", "steps", "5%", "25%", "median", "75%", "95%", "longest"), rows, "Milliseconds."),
        partial(_draw_step_times, shown, spreads, medians, base),
    )


def _draw_step_times(
    shown: Sequence[Styled],
    spreads: Sequence[Array],
    medians: Sequence[float],
    base: float | None,
    look: Look,
) -> Figure:
    values = [(f"{number(median)} ms", ratio(median, base) or "") for median in medians]
    rows = Rows(look, [run.name for run, _ in shown], values, "milliseconds")
    rows.axes.set_xlim(0, 1.05 * max(times[4] for times in spreads))
    for index, ((_, style), times, median) in enumerate(zip(shown, spreads, medians, strict=True)):
        y, colour = rows.middle(index), look.palette[style.accent]
        rows.axes.plot(times[[0, 4]], [y, y], color=colour, linewidth=1.5, solid_capstyle="butt")
        rows.axes.plot(times[[1, 3]], [y, y], color=colour, linewidth=9, solid_capstyle="butt", alpha=0.45)
        rows.axes.plot([median], [y], **mark(style, look, 9))
    return rows.canvas.figure


def throughput(story: Story) -> Picture | Missing:
    """Tokens per second as the runs go on."""
    title = "Tokens per second"
    shown = [(run, style) for run, style in styled(story) if has_points(run.tokens_per_s_series)]
    if not shown:
        return Missing(title, "Throughput over time was not recorded. Attach SpeedMonitor, or lightning_mp.monitors().")
    reference = story.reference_run
    base = reference.tokens_per_s if reference is not None else None
    told = [run for run, _ in shown if known(run.tokens_per_s)]
    compared = [ratio(run.tokens_per_s, base) if run is not reference else None for run in told]
    speeds = each([run.name for run in told], [number(run.tokens_per_s) for run in told], compared)
    return Picture(
        "throughput",
        title,
        f"Tokens per second over the run: {speeds or UNKNOWN}.",
        f"Against {story.axis}. A line that falls means that the run became slower.",
        curve_table(story.axis, [(run.name, run.tokens_per_s_series) for run, _ in shown]),
        partial(_draw_throughput, shown, story.axis),
        [style for _, style in shown],
    )


def _draw_throughput(shown: Sequence[Styled], axis: str, look: Look) -> Figure:
    left, height = (48, 180) if look.is_narrow else (56, 230)
    canvas = Canvas(look, height + 84, [style for _, style in shown])
    canvas.text(0, 10, "tokens per second", "ink")
    axes = canvas.axes(left, 30, look.width - left - 8, height)
    for index, (run, style) in enumerate(shown):
        assert run.tokens_per_s_series is not None
        x, y = thin(run.tokens_per_s_series)
        every = spread(index, len(shown), len(x), style, look)
        axes.plot(x, y, color=look.palette[style.accent], linewidth=1.5, **every)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.01 * axes.dataLim.x1 or 1.0)
    along(axes, count=4 if look.is_narrow else 8)
    up(axes)
    canvas.text(left, height + 72, axis)
    return canvas.figure
