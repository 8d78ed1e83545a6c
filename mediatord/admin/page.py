"""The HTML of the status page, without scripts and external resources."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from urllib.parse import quote

from mediatord.admin.status import LEDGER_ENTRIES, DaemonStatus
from mediatord.admin.status_sources import REPORT_INDEX, TRAFFIC_KINDS, AnalysisReport, ProblemSummary
from mediatord.observability.push_statistics import PushStatistics
from mediatord.store.interfaces.messages import AgeBucket


class Markup(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


# Title, and CSS classes of the cells.
TableColumn = tuple[str, str]


def escape_text(value: object) -> Markup:
    """Escape a value; characters that are not printable, such as bidirectional controls, are replaced."""
    if isinstance(value, Markup):
        return value
    return Markup(escape("".join([one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(value)])))


def build_element(name: str, *content: object, **attributes: str) -> Markup:
    """An element. :param attributes: `class_` means `class`, `aria_label` `aria-label`; empty ones are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape_text(value)}"' for key, value in attributes.items() if value
    )
    return Markup(f"<{name}{written}>{join_markup(*content)}</{name}>")


def join_markup(*content: object, by: str = "") -> Markup:
    """Escape and concatenate."""
    return Markup(by.join(map(escape_text, content)))


def build_table(columns: Sequence[TableColumn], rows: Iterable[Sequence[object]], style: str = "") -> Markup:
    """A table whose first cell in each row is its header."""
    head = [build_element("th", title, class_=css, scope="col") for title, css in columns]
    body = []
    for first, *rest in rows:
        cells = [build_element("td", value, class_=css) for (_, css), value in zip(columns[1:], rest, strict=True)]
        body.append(build_element("tr", build_element("th", first, class_=columns[0][1], scope="row"), *cells))
    parts = build_element("thead", build_element("tr", *head)), build_element("tbody", *body)
    return build_element("div", build_element("table", *parts, class_=style), class_="scroll")


def draw_sparkline(numbers: Sequence[int], label: str) -> Markup:
    """A bar chart scaled to its largest number."""
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
        f'aria-label="{escape_text(label)}">{line}{drawn}</svg>'
    )


def draw_share_bar(number: int, most: int) -> Markup:
    """A horizontal bar scaled to the largest number."""
    width = 100 * number / most if most else 0
    return Markup(
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<path fill="currentColor" d="M0 0h{max(width, 0.5 if number else 0):.3g}v8H0z"/></svg>'
    )


def format_count(number: float) -> str:
    """Format a number; millions are abbreviated."""
    return f"{number:,.0f}" if number < 10_000_000 else f"{number / 1_000_000:,.1f} M"


def format_byte_count(number: int | None) -> str:
    """Format a number of bytes with a binary unit."""
    if number is None:
        return "unknown"
    amount, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or unit == "s" and not parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def format_rate(per_second: float) -> str:
    """Format a rate per second, minute or hour."""
    for seconds, unit in ((1, "s"), (60, "min")):
        number = per_second * seconds
        if number >= 0.95:
            return f"{number:,.0f}/{unit}" if number >= 100 else f"{number:.1f}/{unit}"
    return f"{3600 * per_second:.0f}/h"


def format_utc_time(at: float) -> str:
    """Format a time in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


# Seconds until a browser reloads the page.
REFRESH_SECONDS = 10
_AGE_LABELS = ("under 1 min", "1 to 10 min", "10 min to 1 h", "1 to 6 h", "6 to 24 h", "over 24 h")
_AT_LEAST = "\N{GREATER-THAN OR EQUAL TO} "
_NO_STORE = "Unavailable: the store did not respond."


def render_status_page(status: DaemonStatus, now: float, *, refreshing: bool) -> bytes:
    """
    Render the whole page.

    :param now: current time.
    :param refreshing: whether the browser reloads it.
    """
    store_at = status.store.at
    store_time = "" if store_at is None else f"As of {_format_as_of(store_at, now)}."
    sections = [
        _render_state(status),
        _render_traffic(status),
        _render_ledger(status, store_time),
        _render_ages(status, store_time),
        _render_largest_queues(status, store_time),
        _render_problems("Rejected and failed requests", status.refusals, status.at, _REFUSAL_COLUMNS),
        _render_problems("Warnings", status.warnings, status.at, _WARNING_COLUMNS),
    ]
    if status.push:
        sections.append(_render_push(status.push))
    if len(status.processes.answered) > 1 or status.processes.asked > 1:
        sections.append(_render_processes(status))
    if status.reports is not None:
        sections.append(_render_reports(status.reports, status.at))
    body = _load_page_template().substitute(
        refresh=f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if refreshing else "",
        title=escape_text(f"mediatord at {status.node}"),
        pill=build_element(
            "span", "OK" if status.well else status.state, class_="pill good" if status.well else "pill bad"
        ),
        updated=_render_refresh_line(status, refreshing, now),
        sections="\n".join(sections),
    )
    return body.encode("utf-8")


@cache
def build_security_policy() -> bytes:
    """The Content-Security-Policy of the page, which allows its own style only."""
    style = _load_page_template().template.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return policy.encode("ascii")


@cache
def _load_page_template() -> Template:
    return Template(files("mediatord.admin").joinpath("page.html").read_text("utf-8"))


def _format_as_of(at: float, now: float) -> str:
    """A time and its age."""
    return f"{format_utc_time(at)} UTC, {format_duration(max(0.0, now - at))} ago"


def _render_refresh_line(status: DaemonStatus, refreshing: bool, now: float) -> Markup:
    if refreshing:
        link = join_markup(
            f"refreshed every {REFRESH_SECONDS} s (", build_element("a", "pause", href="?refresh=0"), ")"
        )
    else:
        link = join_markup("refresh paused (", build_element("a", "resume", href="admin"), ")")
    return join_markup(
        f"As of {_format_as_of(status.at, now)}, ",
        link,
        " \N{MIDDLE DOT} ",
        build_element("a", "JSON", href="admin/status.json"),
    )


def _render_section(title: str, *content: object, whole: bool = False) -> Markup:
    return build_element("section", build_element("h2", title), *content, class_="whole" if whole else "")


def _render_note(words: str) -> Markup:
    return build_element("p", words, class_="quiet") if words else Markup()


def _render_state(status: DaemonStatus) -> Markup:
    gauges, processes = status.gauges, status.processes
    available = "not responding" if status.store.at is None else "available"
    pairs: list[tuple[str, object]] = [
        ("State", status.state),
        ("Uptime", format_duration(status.uptime)),
        ("Version", status.version),
        ("Store", f"{status.store.backend}, {available}"),
    ]
    if "ready" in gauges:
        pairs.append(("End-to-end probe", "passing" if gauges["ready"] else "failing"))
    pairs.append(("Open sockets", _format_known(gauges.get("sockets"))))
    if processes.asked > 1:
        pairs.append(("Workers responding", f"{len(processes.answered)} of {processes.asked}"))
    if status.clustered:
        pairs.append(("Live nodes", format_count(gauges.get("nodes", 0))))
    if gauges.get("log_dropped"):
        pairs.append(("Log lines lost", format_count(gauges["log_dropped"])))
    items = [build_element("div", build_element("dt", name), build_element("dd", value)) for name, value in pairs]
    note = "This is one node of a cluster; queued messages are those of all nodes." if status.clustered else ""
    return _render_section("State", build_element("dl", *items), _render_note(note), whole=True)


def _render_traffic(status: DaemonStatus) -> Markup:
    rate = ("", "number quiet wide-only")
    columns = [("kind", "name"), ("since start", "number"), ("last minute", "number"), rate]
    columns += [("last hour", "number"), rate, ("by minute", "drawn")]
    minute, hour = status.traffic_spans
    rows = [
        (
            join_markup(name, " ", build_element("span", TRAFFIC_KINDS[name].description, class_="quiet wide-only")),
            _format_known(counts.total),
            format_count(counts.last_minute),
            format_rate(counts.last_minute / minute) if counts.last_minute else "",
            format_count(counts.last_hour),
            format_rate(counts.last_hour / hour) if counts.last_hour else "",
            draw_sparkline(counts.by_minute, f"{name}: {max(counts.by_minute)} in the busiest minute"),
        )
        for name, counts in status.traffic.items()
    ]
    text = "Last minute and last hour cover running workers only; totals include former workers."
    note = _render_note(text if status.processes.asked > 1 else "")
    return _render_section("Traffic", build_table(columns, rows, "flow"), note, whole=True)


def _render_ledger(status: DaemonStatus, store_time: str) -> Markup:
    about = "All messages accepted since the store was created, by outcome. A difference other than 0 is an error."
    known = _render_note(_NO_STORE)
    if ledger := status.ledger:
        rows = [
            [name, *(_format_ledger_entry(entries[name]) for entries in ledger.values())] for name in LEDGER_ENTRIES
        ]
        known = build_table([("outcome", "name"), *((protocol, "number") for protocol in ledger)], rows)
    return _render_section("Message ledger", known, _render_note(f"{store_time} {about}".strip()), whole=True)


def _render_ages(status: DaemonStatus, store_time: str) -> Markup:
    title, waiting = "Queued messages by age", status.waiting
    if waiting is None:
        return _render_section(title, _render_note(_NO_STORE))
    most = max(one.messages for one in waiting.by_age)
    rows = [
        (name, *_format_age_bucket(one), draw_share_bar(one.messages, most))
        for name, one in zip(_AGE_LABELS, waiting.by_age, strict=True)
    ]
    rows.append(("total", *_format_age_bucket(AgeBucket(waiting.messages, waiting.bytes)), Markup()))
    columns = (("age", "short"), ("messages", "number"), ("bytes", "number"), ("", "drawn"))
    return _render_section(title, build_table(columns, rows), _render_note(store_time))


def _format_age_bucket(bucket: AgeBucket) -> tuple[str, str]:
    """Messages and bytes."""
    least = "" if bucket.exact else _AT_LEAST
    size = format_byte_count(bucket.bytes)
    return least + format_count(bucket.messages), size if bucket.bytes is None else least + size


def _render_largest_queues(status: DaemonStatus, store_time: str) -> Markup:
    if status.waiting is None:
        return _render_section("Largest queues", _render_note(_NO_STORE))
    rows = [
        (
            "(self-test)" if one.self_test else build_element("code", one.recipient),
            format_count(one.messages),
            format_byte_count(one.bytes),
            "unknown" if one.oldest_seconds is None else format_duration(one.oldest_seconds),
        )
        for one in status.waiting.largest
    ]
    columns = (("recipient", "name"), ("messages", "number"), ("bytes", "number wide-only"), ("oldest", "number"))
    known = build_table(columns, rows) if rows else _render_note("No messages are queued.")
    return _render_section("Largest queues", known, _render_note(store_time))


_REFUSAL_COLUMNS = (("reason", "name"), ("code", "name wide-only"), ("protocol", "wide-only"))
_WARNING_COLUMNS = (("message", "name"), ("level", "wide-only"), ("source", "wide-only"))


def _render_problems(
    title: str, problems: Sequence[ProblemSummary], now: float, columns: Sequence[TableColumn]
) -> Markup:
    if not problems:
        return _render_section(title, _render_note("None since start."))
    rows = []
    for one in problems:
        words = one.kind.replace("_", " ")
        is_warning = columns is _WARNING_COLUMNS
        heads = (one.text, words) if is_warning else (words, build_element("code", one.text))
        rows.append((*heads, one.where, format_count(one.count), f"{format_duration(now - one.last)} ago"))
    return _render_section(title, build_table([*columns, ("count", "number"), ("last seen", "number")], rows))


def _render_push(services: Sequence[PushStatistics]) -> Markup:
    columns = [("service", "name"), ("devices", "number"), ("sent", "number"), ("to retry", "number")]
    columns += [("rejected", "number"), ("devices forgotten", "number wide-only"), ("hosts backing off", "number")]
    rows = [
        (
            one.service,
            "" if one.devices is None else format_count(one.devices),
            *map(format_count, (one.sent, one.retry, one.rejected, one.forgotten, one.hosts_backing_off)),
        )
        for one in services
    ]
    note = _render_note("Requests and forgotten devices since start.")
    return _render_section("Push notifications", build_table(columns, rows), note, whole=True)


def _render_processes(status: DaemonStatus) -> Markup:
    columns = [("worker", "name"), ("process", "number wide-only"), ("sockets", "number wide-only")]
    columns += [("uptime", "number"), ("state", "name")]
    processes = status.processes
    rows = [
        (one.node, str(one.pid), _format_known(one.sockets), format_duration(one.uptime), one.state)
        for one in processes.answered
    ]
    text = "Other workers did not respond in time; their figures are not included."
    note = _render_note(text if processes.asked > len(processes.answered) else "")
    return _render_section("Workers", build_table(columns, rows), note, whole=True)


def _render_reports(reports: Sequence[AnalysisReport], now: float) -> Markup:
    if not reports:
        return _render_section(
            "Nightly report",
            _render_note("No report yet: the nightly analysis has written none to admin.reports."),
            whole=True,
        )
    columns = [("day", "short"), ("result", ""), ("written", "number wide-only")]
    rows = [
        (
            build_element("a", one.day, href=f"admin/report/{quote(one.day)}/{REPORT_INDEX}"),
            one.verdict or "no summary",
            f"{format_duration(now - one.written_at)} ago",
        )
        for one in reports
    ]
    return _render_section("Nightly report", build_table(columns, rows), whole=True)


def _format_ledger_entry(number: int | None) -> str | Markup:
    if number is None or number >= 0:
        return _format_known(number)
    return build_element("span", f"\N{MINUS SIGN}{format_count(-number)}")


def _format_known(number: float | None) -> str:
    return "unknown" if number is None else format_count(number)
