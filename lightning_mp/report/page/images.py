"""What becomes of a picture: an ``<svg>`` element for the page, or a PNG file for Weights & Biases."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG

from lightning_mp.report.page.drawing import WIDE, Look, Picture
from lightning_mp.report.page.palette import DARK, LIGHT, STAND_INS


def to_svg(picture: Picture, width: int = WIDE) -> str:
    """The picture as an ``<svg>`` element whose colours are CSS custom properties, one for each role.

    Its ids begin with the picture's key and the width, so that several stand in one page. It has the picture's title and
    finding as its accessible name and description if the page gives the ids ``KEY-title`` and ``KEY-finding`` to these.

    Args:
        picture: what to draw.
        width: in pixels; the height follows.
    """
    with _settings():
        figure = picture.draw(Look(width, STAND_INS))
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    prefix = f"{picture.key}-{width}-"
    # tags only: a name in the text may look like anything
    text = re.sub(r"<[^>]+>", lambda match: _adapt(match[0], prefix, used), text)
    head = f'<svg role="img" aria-labelledby="{picture.key}-title" aria-describedby="{picture.key}-finding" viewBox='
    return re.sub(r"<svg .*?viewBox=", head, text, count=1, flags=re.DOTALL).strip()


def _adapt(tag: str, prefix: str, used: Collection[str]) -> str:
    """A tag of SVG with the page's colours and fonts, numbers that are not longer than needed, and ids of its own."""
    tag = re.sub(r"#00fe[0-9a-f]{2}", lambda match: f"var(--{_ROLE_OF[match[0]]})", tag)
    tag = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", tag)  # a hundredth of a pixel
    tag = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", tag)
    tag = re.sub(r'(?:xlink:)?(href="#|url\(#)', lambda match: match[1] + prefix, tag)
    return re.sub(r"font-family: [^;\"]*;? ?", "", tag)


def to_png(picture: Picture, dark: bool = False, dpi: int = 144) -> bytes:
    """The picture with its legend, as the bytes of a PNG file.

    Args:
        picture: what to draw.
        dark: for a dark page.
        dpi: 72 gives a width of 960 pixels.
    """
    palette = DARK if dark else LIGHT
    with _settings():
        figure = picture.draw(Look(WIDE, palette, has_legend=True))
        figure.set_facecolor(palette["paper"])
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(file, format="png", dpi=dpi, facecolor=palette["paper"], bbox_inches="tight")
    return file.getvalue()


_ROLE_OF = {colour: role for role, colour in STAND_INS.items()}


@contextmanager
def _settings() -> Iterator[None]:
    """Matplotlib's own defaults, whatever the user's are; the same picture gives the same bytes."""
    own = {"svg.fonttype": "none", "svg.hashsalt": "lightning_mp", "axes.unicode_minus": True}
    with matplotlib.style.context(["default", own]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # in a browser's fonts it may well be
        yield
