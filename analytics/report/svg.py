"""
Charts as SVG that is part of a page: colours and letters are the page's own, so it is right in light and in dark.

The same data give the same bytes. Nothing from the logs is drawn as text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand for variables of the style sheet, since matplotlib knows real colours only.
INK = "#000001"
LINE = "#000002"
FIRST = "#000003"
SECOND = "#000004"
THIRD = "#000005"
BAD = "#000006"
_VARIABLES = {INK: "ink-soft", LINE: "line", FIRST: "first", SECOND: "second", THIRD: "third", BAD: "bad"}

# CSS pixels at 72 dots an inch.
_WIDTH, _HEIGHT = 400, 230
# Left, bottom, width and height: room for the names of five ticks, below and at the left, and for a legend on top.
_PLACE = (0.155, 0.125, 0.79, 0.755)
_PLACE_ALONE = (0.155, 0.125, 0.79, 0.835)
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 12,
    "axes.prop_cycle": "cycler('color', ['#000003', '#000004', '#000005'])",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "font.size": 12,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "mediatord",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "xtick.labelsize": 12,
    "xtick.major.pad": 6,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": INK,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


class Drawing:
    """:ivar svg: the finished chart, once the `with` block has ended."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.svg = ""


@contextmanager
def drawing(name: str, title: str, description: str) -> Iterator[Drawing]:
    """
    Draw on `axes` inside the block.

    :param name: no other chart of the page has it.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(_PLACE)
        axes.patch.set_visible(False)
        axes.grid(axis="x", visible=False)
        drawn = Drawing(axes)
        yield drawn
        _legend(axes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    drawn.svg = _embedded(buffer.getvalue(), name, title, description)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        axes.set_position(_PLACE_ALONE)
    else:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, handlelength=1.2, columnspacing=1.2
        )


def _embedded(svg: str, name: str, title: str, description: str) -> str:
    """As part of a page: named for those who do not see it, ids of its own, no declarations of its own."""
    body = svg[svg.index("<g ") : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;]*; ", "", body)
    body = re.sub(r"\bfont: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", body).replace("xlink:href", "href")
    body = re.sub(r">\s+<", "><", body).strip()
    body = re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", body)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{body}</svg>"
    )
