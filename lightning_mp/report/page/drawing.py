"""How a picture is drawn: for whom, with which colours and markers, and at which places.

**One drawing, many looks.** A :class:`Picture` knows how to draw itself for a :class:`Look`: a width in pixels and a palette.
The page has each picture twice, for a desk and for a phone, so that text has the size of text on both; it shows the one that
fits.

**Colours by role.** A palette gives each role (``ink``, ``accent-1``, ``bad``) a colour. For SVG the colours are stand-ins that
are not used for anything else, and become ``var(--ink)`` and so on, for the page's style sheet to fill in for light, dark and
paper. :mod:`lightning_mp.report.page.palette` has what the style sheet fills in, and what PNG uses.

**Text stays text** in SVG: small, searchable, and in the reader's font. It is laid out with the metrics of DejaVu Sans, which
is wider than what browsers use for a sans-serif, so what fits here fits there.

Only matplotlib's object API is used: no window, no global state that would outlast a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from lightning_mp.report.page.palette import ACCENT_OF, ACCENTS, PARTS
from lightning_mp.report.page.wording import MINUS, UNKNOWN, compact, number, shortened
from lightning_mp.report.story import UNKNOWN_PRECISION, RunStory, Series, Story

Array = np.ndarray[Any, np.dtype[np.float64]]
#: The most rows of the table behind a curve.
TABLE_ROWS = 50
_MARKERS_PER_LINE = 7
DASHES = (0, (5, 3))
_LETTER = 7.4  # about the width of a letter, in pixels
_STEPS = (1, 2, 2.5, 5, 10)  # of ticks
#: The most points of a line on the page.
POINTS = 600
WIDE, NARROW = 960, 358
DPI = 72  # one unit of SVG is one pixel

_MARKERS = "os^Dv<>pPXh*"


@dataclass(frozen=True)
class Look:
    """For whom a picture is drawn.

    Attributes:
        width: of the picture, in pixels.
        palette: colour by role.
        has_legend: whether the picture says itself which line is which run; on the page, the page does.

    Example:
        >>> Look(NARROW, palette={"ink": "#000000"}).is_narrow
        True
    """

    width: int
    palette: Mapping[str, str]
    has_legend: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < 600

    @property
    def font(self) -> float:
        """Size of text, in pixels."""
        return 12.0 if self.is_narrow else 12.5


@dataclass(frozen=True)
class Style:
    """What a run looks like in every picture: a colour for its precision, and a marker of its own.

    Attributes:
        name: the run's name.
        accent: the role of its colour.
        marker: matplotlib's letter for its marker; "" for a dashed line without one; None for an area.
    """

    name: str
    accent: str
    marker: str | None

    @property
    def label(self) -> str:
        """The name in a legend."""
        return shortened(self.name, 64)

    def swatch(self) -> str:
        """The marker as the ``d`` of an SVG path, about 9 units wide around the origin."""
        shape = MarkerStyle(self.marker or "")
        polygons = shape.get_path().transformed(shape.get_transform()).to_polygons()
        lines = ["L".join(f"{9 * x:.1f} {-9 * y:.1f}" for x, y in np.asarray(polygon)) for polygon in polygons]
        return "".join(f"M{line}Z" for line in lines)


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture, as they are shown.

    Attributes:
        columns: the heads; the first column names the row.
        rows: cells, each row as long as ``columns``.
        note: what a reader should know of it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture with all that stands around it.

    Attributes:
        key: a short name, unique on the page.
        title: what it shows.
        finding: what is to be seen in it, in words with numbers: its text alternative.
        reading: how to read it.
        table: the numbers behind it.
        draw: makes the figure.
        legend: which colour and marker is what.
    """

    key: str
    title: str
    finding: str
    reading: str
    table: Table
    draw: Callable[[Look], Figure]
    legend: Sequence[Style] = ()


@dataclass(frozen=True)
class Missing:
    """A picture that there is no data for.

    Attributes:
        title: what it would show.
        sentence: what is missing, and how to get it.
    """

    title: str
    sentence: str


Styled = tuple[RunStory, Style]


def styles(story: Story) -> list[Style]:
    """The style of each run, in order."""
    free = [n for n in range(ACCENTS) if n not in ACCENT_OF.values()] + list(range(1, ACCENTS))
    accents = {(precision, ""): accent for precision, accent in ACCENT_OF.items()}
    found = []
    for index, run in enumerate(story.runs):
        key = (run.precision, run.name if run.precision == UNKNOWN_PRECISION else "")
        if key not in accents:
            accents[key] = free[(len(accents) - len(ACCENT_OF)) % len(free)]
        found.append(Style(run.name, f"accent-{accents[key]}", _MARKERS[index % len(_MARKERS)]))
    return found


def part_style(index: int, name: str) -> Style:
    """The style of a part of memory."""
    return Style(name, f"part-{min(index, PARTS - 1)}", None)


def thin(series: Series, points: int = POINTS) -> tuple[Array, Array]:
    """A series for a picture: at most ``points`` points, with the extremes of what is left out. NaN stands for no number.

    Neighbouring points are taken together, and of each group its lowest and its highest are kept.
    """
    x, y = np.asarray(series.x, dtype=np.float64), np.array(series.y, dtype=np.float64)
    y[~np.isfinite(y) | (np.abs(y) > 1e30)] = np.nan  # beyond what matplotlib can place
    keep = np.isfinite(x)
    x, y = x[keep], y[keep]
    if len(x) <= points:
        return x, y
    chosen: list[int] = []
    for group in np.array_split(np.arange(len(x)), points // 2):
        finite = group[np.isfinite(y[group])]
        if len(finite):
            ends = {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            ends = {int(group[0])}  # a gap stays a gap
        chosen.extend(sorted(ends))
    return x[chosen], y[chosen]


# --- the drawing surface ----------------------------------------------------------------------------------------------------


class Canvas:
    """A figure whose places are in pixels from its upper left corner.

    Args:
        look: for whom.
        height: in pixels, without the legend.
        legend: what the legend names, if the look has one.
    """

    def __init__(self, look: Look, height: float, legend: Sequence[Style] = ()) -> None:
        self.look = look
        per_line = max(look.width // 230, 1)
        self._offset = 22 * math.ceil(len(legend) / per_line) + 10 if look.has_legend and legend else 0
        self.height = height + self._offset
        self.figure = Figure(figsize=(look.width / DPI, self.height / DPI), dpi=DPI, facecolor="none")
        if self._offset:
            handles = [_handle(style, look.palette) for style in legend]
            labels = [shortened(style.name, 26) for style in legend]
            box = self.figure.legend(
                handles, labels, loc="upper left", ncols=per_line, frameon=False, fontsize=look.font, borderaxespad=0.2
            )
            for text in box.get_texts():
                text.set_color(look.palette["ink"])
                text.set_parse_math(False)

    def axes(self, left: float, top: float, width: float, height: float, share_x: Axes | None = None) -> Axes:
        """An axis frame without a frame: ticks, grid and labels as everywhere."""
        colours, font = self.look.palette, self.look.font
        place = (
            left / self.look.width,
            1 - (top + self._offset + height) / self.height,
            width / self.look.width,
            height / self.height,
        )
        axes = self.figure.add_axes(place, sharex=share_x, facecolor="none")
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(colours["rule"])
        axes.tick_params(color=colours["rule"], labelcolor=colours["muted"], labelsize=font, length=4, pad=4)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="y", color=colours["grid"], linewidth=1)
        axes.set_axisbelow(True)
        return axes

    def text(self, x: float, y: float, text: str, role: str = "muted", **options: Any) -> None:
        """Text whose middle line is at ``y``."""
        options = {"va": "center", "fontsize": self.look.font, "color": self.look.palette[role], **options}
        place = (x / self.look.width, 1 - (y + self._offset) / self.height)
        self.figure.text(*place, text, parse_math=False, **options)


@dataclass
class Rows:
    """A picture with a line for each run: its name, something drawn, its numbers.

    Attributes:
        look: for whom.
        names: on the left; above what is drawn on a phone.
        values: on the right, each a number and what is said of it.
        label: what the x axis is.
        legend: as for :class:`Canvas`.
    """

    look: Look
    names: Sequence[str]
    values: Sequence[tuple[str, str]]
    label: str
    legend: Sequence[Style] = ()
    canvas: Canvas = field(init=False)
    axes: Axes = field(init=False)

    def __post_init__(self) -> None:
        narrow, count = self.look.is_narrow, len(self.names)
        height = self._row * count
        self.canvas = Canvas(self.look, height + 52, self.legend)
        left, right = (4, 8) if narrow else (196, 216)
        self.axes = self.canvas.axes(left, 4, self.look.width - left - right, height)
        self.axes.set_ylim(count, 0)
        self.axes.set_yticks([])
        self.axes.grid(True, axis="x", color=self.look.palette["grid"], linewidth=1)
        self.axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 6, steps=_STEPS))
        self.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        self.canvas.text(left, 4 + height + 38, self.label)
        widths = [max(_width(value[side]) for value in self.values) for side in (0, 1)]
        second = self.look.width - (widths[1] + 14 if widths[1] else 0)
        room = second - widths[0] - 16 if narrow else left - 14
        for index, (name, (value, said)) in enumerate(zip(self.names, self.values, strict=True)):
            y = 4 + self._row * index + (13 if narrow else self._row / 2)
            # on a phone it stands on the grid
            ground: Any = {"backgroundcolor": self.look.palette["paper"]} if narrow else {}
            self.canvas.text(0, y, shortened(name, int(room / _LETTER)), "ink", **ground)
            self.canvas.text(second, y, value, "ink", ha="right", **ground)
            self.canvas.text(self.look.width, y, said, ha="right", **ground)

    @property
    def _row(self) -> float:
        return 52.0 if self.look.is_narrow else 38.0

    def middle(self, index: int) -> float:
        """Where in the axes a row's drawing has its middle."""
        return index + (0.69 if self.look.is_narrow else 0.5)

    @property
    def thickness(self) -> float:
        """How thick a bar is, in the axes."""
        return 20 / self._row


def _width(text: str) -> float:
    """About how wide a text is, in pixels; rather too wide than too narrow."""
    return sum(1.25 * _LETTER if letter.isupper() else _LETTER for letter in text)


def along(axes: Axes, label_of: Callable[[float], str] = compact, count: int = 6, is_whole: bool = False) -> None:
    """Ticks of an x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(count, integer=is_whole, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label_of(value)))


def up(axes: Axes, label_of: Callable[[float], str] = compact, count: int = 5, is_whole: bool = False) -> None:
    """Ticks of a y axis."""
    axes.yaxis.set_major_locator(MaxNLocator(count, integer=is_whole, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label_of(value)))


def scale_gaps(axes: Axes, which: str, gaps: Sequence[float], margin: float) -> bool:
    """Fit an axis to gaps, so that the margin is to be seen on it however large they are.

    Returns:
        Whether the axis is logarithmic beyond the margin.
    """
    margin = margin if math.isfinite(margin) and margin > 0 else 1e-9
    finite = [gap for gap in gaps if math.isfinite(gap)]
    low, high = min([*finite, -1.6 * margin]), max([*finite, 1.6 * margin])
    axis = axes.xaxis if which == "x" else axes.yaxis
    limits = axes.set_xlim if which == "x" else axes.set_ylim
    is_log = max(-low, high) > 30 * margin
    if not is_log:
        pad = 0.06 * (high - low)
        limits(low - pad, high + pad)
        axis.set_major_locator(MaxNLocator(4, steps=_STEPS))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}".replace("-", MINUS) if value else "0"))
        return False
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=margin, linscale=1.0)
    limits(_beyond(low, margin), _beyond(high, margin))
    first, last = math.floor(math.log10(1.5 * margin)) + 1, math.ceil(math.log10(max(-low, high)))
    decades = [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / 4) or 1)]
    axis.set_major_locator(FixedLocator([-ten for ten in decades if -ten >= _beyond(low, margin)] + [0.0, *decades]))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}".replace("-", MINUS) if value else "0"))
    return True


def _beyond(value: float, margin: float) -> float:
    return value * 1.8 if abs(value) > margin else math.copysign(1.6 * margin, value)


def _handle(style: Style, palette: Mapping[str, str]) -> Any:
    colour = palette[style.accent]
    if style.marker is None:
        return Rectangle((0, 0), 1, 1, facecolor=colour)
    dashes: Any = "solid" if style.marker else DASHES
    return Line2D([], [], color=colour, marker=style.marker, markersize=6, linewidth=1.6, linestyle=dashes)


# --- what pictures share ------------------------------------------------------------------------------------------------------


def styled(story: Story) -> list[Styled]:
    """The runs with their styles."""
    return list(zip(story.runs, styles(story), strict=True))


def mark(style: Style, look: Look, size: float) -> dict[str, Any]:
    """How the mark of a run is plotted."""
    colour = look.palette[style.accent]
    edge = {"markeredgecolor": look.palette["paper"], "markeredgewidth": 1.2}
    return {"color": colour, "marker": style.marker, "markersize": size, "linestyle": "none", "zorder": 6, **edge}


def spread(index: int, count: int, points: int, style: Style, look: Look) -> dict[str, Any]:
    """A few markers along a line, each run's at other places, so that lines that lie on each other can be told apart."""
    every = max(points // _MARKERS_PER_LINE, 1)
    edge = {"markeredgecolor": look.palette["paper"], "markeredgewidth": 0.8}
    return {"marker": style.marker, "markersize": 6.5, "markevery": (index * every // count, every), **edge}


def finite(values: Sequence[float]) -> Array:
    """The finite numbers among them."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def has_points(series: Series | None) -> bool:
    """Whether there is anything to draw."""
    return series is not None and bool(np.isfinite(np.asarray(series.y, dtype=np.float64)).any())


def some(items: Sequence[Any], most: int = TABLE_ROWS) -> list[Any]:
    """Evenly spread ones, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def curve_table(axis: str, curves: Sequence[tuple[str, Series | None]]) -> Table:
    """Curves at some positions: of each, the value there or the last one before."""
    points = [(name, thin(series, 10**9)) for name, series in curves if series is not None]
    ends = some(np.unique(np.concatenate([x for _, (x, _) in points])).tolist())
    rows = []
    for end in ends:
        row = [f"{end:,.0f}"]
        for _, (x, y) in points:
            place = int(np.searchsorted(x, end, side="right")) - 1
            row.append(number(float(y[place]), 5) if place >= 0 else UNKNOWN)
        rows.append(row)
    return Table([axis, *(name for name, _ in points)], rows, "At some positions: the value there, or the last one before.")
