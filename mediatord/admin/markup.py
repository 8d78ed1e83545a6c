"""Pieces of HTML: whatever is not marked as such is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape


class Markup(str):
    """HTML as it is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """:param style: classes of its cells."""

    title: str
    style: str = ""


def text(value: object) -> Markup:
    """A value as HTML. What cannot be printed, such as what turns the direction of writing, is replaced."""
    if isinstance(value, Markup):
        return value
    return Markup(escape("".join([one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(value)])))


def element(name: str, *content: object, **attributes: str) -> Markup:
    """:param attributes: `class_` is `class`, and `aria_label` is `aria-label`; without a value there is none."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value
    )
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: object, by: str = "") -> Markup:
    return Markup(by.join(map(text, content)))


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], style: str = "") -> Markup:
    """The first cell of each row is its head."""
    head = element("tr", *[element("th", one.title, class_=one.style, scope="col") for one in columns])
    body = [element("tr", *_cells(columns, row)) for row in rows]
    whole = element("table", element("thead", head), element("tbody", *body), class_=style)
    return element("div", whole, class_="scroll")


def _cells(columns: Sequence[Column], row: Sequence[object]) -> Iterable[Markup]:
    for place, (column, value) in enumerate(zip(columns, row, strict=True)):
        if place:
            yield element("td", value, class_=column.style)
        else:
            yield element("th", value, class_=column.style, scope="row")


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and values."""
    return element("dl", *[element("div", element("dt", name), element("dd", value)) for name, value in pairs])


def sparkline(numbers: Sequence[int], label: str) -> Markup:
    """Columns, as high as they are large; the largest is as high as the picture."""
    most = max(numbers, default=0)
    columns = [
        f"M{place} 20V{20 - max(1.0, 20 * number / most):.3g}h.8V20z"
        for place, number in enumerate(numbers)
        if number
    ]
    drawn = f'<path fill="currentColor" d="{"".join(columns)}"/>'
    line = f'<path fill="currentColor" opacity=".35" d="M0 19.6h{len(numbers)}v.4H0z"/>'
    return Markup(
        f'<svg class="spark" viewBox="0 0 {len(numbers)} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(label)}">{line}{drawn}</svg>'
    )


def share(number: int, most: int) -> Markup:
    """A bar as long as its share of the longest."""
    width = 100 * number / most if most else 0
    return Markup(
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<path fill="currentColor" d="M0 0h{max(width, 0.5 if number else 0):.3g}v8H0z"/></svg>'
    )


def count(number: float) -> str:
    """With few digits where it has many."""
    return f"{number:,.0f}" if number < 10_000_000 else f"{number / 1_000_000:,.1f} M"


def size(number: int | None) -> str:
    """Bytes."""
    if number is None:
        return "unknown"
    amount, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def span(seconds: float) -> str:
    """How long, in its two largest units."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or unit == "s" and not parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def rate(per_second: float) -> str:
    """So many a second; if they are few, a minute or an hour."""
    for seconds, unit in ((1, "s"), (60, "min")):
        number = per_second * seconds
        if number >= 0.95:
            return f"{number:,.0f}/{unit}" if number >= 100 else f"{number:.1f}/{unit}"
    return f"{3600 * per_second:.0f}/h"


def clock(at: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
