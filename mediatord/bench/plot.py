"""Figures as a picture: SVG, written by hand, without a script or a font of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b2d8b", "#b08900", "#555555")
_BAR, _GAP = 18, 8
_LABELS = 250
_STYLE = "font-family:sans-serif;font-size:12px"


@dataclass(frozen=True, slots=True)
class Curves:
    """
    Lines over a common axis; values upwards on a logarithmic scale.

    :param curves: name, and points as (x, y).
    """

    title: str
    x_name: str
    y_name: str
    curves: Mapping[str, Sequence[tuple[float, float]]]

    @property
    def height(self) -> int:
        """Of the picture, in pixels."""
        return _HEIGHT

    def draw(self) -> str:
        """The elements of the picture."""
        points = [point for curve in self.curves.values() for point in curve if point[1] > 0]
        if not points:
            return ""
        widest = max(x for x, _ in points) or 1.0
        low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)))
        scale = _Scale(widest, low, max(high, low + 1))
        parts = [_text(_LEFT, 20, self.title, bold=True), *self._axes(scale)]
        for number, (name, curve) in enumerate(self.curves.items()):
            parts += _curve(name, [scale.place(x, y) for x, y in curve if y > 0], number)
        return "\n".join(parts)

    def _axes(self, scale: _Scale) -> list[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for power in range(scale.low, scale.high + 1):
            _, y = scale.place(0, 10.0**power)
            parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"))
        for step in range(5):
            x, _ = scale.place(scale.widest * step / 4, 10.0**scale.low)
            parts.append(_text(x, bottom + 18, f"{scale.widest * step / 4:,.0f}", anchor="middle"))
        parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
        parts.append(_text((_LEFT + right) / 2, bottom + 38, self.x_name, anchor="middle"))
        parts.append(_text(_LEFT - 6, _TOP - 6, self.y_name, anchor="end"))
        return parts


@dataclass(frozen=True, slots=True)
class _Scale:
    """:param low: power of ten at the foot of the picture; :param high: at its head."""

    widest: float
    low: int
    high: int

    def place(self, x: float, y: float) -> tuple[float, float]:
        """In pixels."""
        across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * x / self.widest, _HEIGHT - _BOTTOM - up * (log10(y) - self.low) / (
            self.high - self.low
        )


def _curve(name: str, places: Sequence[tuple[float, float]], number: int) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    if not places:
        return []
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    drawn = f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [drawn, *dots, _text(_WIDTH - _RIGHT + 12, _TOP + 12 + 18 * number, name, colour=colour)]


@dataclass(frozen=True, slots=True)
class Bars:
    """
    Bars beside their names.

    :param unit: of the values.
    :param goal: drawn as a line; None for no line.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    goal: float | None = None

    @property
    def height(self) -> int:
        """Of the picture, in pixels."""
        return _TOP + len(self.values) * (_BAR + _GAP) + 24

    def draw(self) -> str:
        """The elements of the picture."""
        widest = max((*self.values.values(), self.goal or 0.0), default=0.0) or 1.0
        across = (_WIDTH - _LABELS - 80) / widest
        parts = [_text(_LEFT, 20, f"{self.title} ({self.unit})", bold=True)]
        for number, (name, value) in enumerate(self.values.items()):
            y = _TOP + number * (_BAR + _GAP)
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(_text(_LABELS - 8, y + 13, name, anchor="end"))
            parts.append(
                f'<rect x="{_LABELS}" y="{y}" width="{value * across:.1f}" height="{_BAR}" fill="{colour}"/>'
            )
            parts.append(_text(_LABELS + value * across + 6, y + 13, f"{value:.3g}"))
        if self.goal is not None:
            x = _LABELS + self.goal * across
            foot = self.height - 20
            parts.append(f'<path d="M{x:.1f} {_TOP - 6}V{foot}" stroke="#c00" stroke-dasharray="4 3"/>')
            parts.append(_text(x, foot + 12, f"goal {self.goal:g}", anchor="middle", colour="#c00"))
        return "\n".join(parts)


def svg(pictures: Sequence[Curves | Bars]) -> str:
    """A document with all pictures, one below the other."""
    parts, y = [], 0
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {y})">\n{picture.draw()}\n</g>')
        y += picture.height + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" '
        f'style="{_STYLE}">\n<rect width="{_WIDTH}" height="{y}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
