"""The page: one for people, which runs no script and asks nobody for anything."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from string import Template
from urllib.parse import quote

from mediatord.admin import ledger
from mediatord.admin.markup import (
    Column,
    Markup,
    clock,
    count,
    element,
    facts,
    joined,
    rate,
    share,
    size,
    span,
    sparkline,
    table,
    text,
)
from mediatord.admin.overview import Overview
from mediatord.admin.reports import INDEX, Report
from mediatord.admin.troubles import Trouble
from mediatord.interfaces import Cohort

# Seconds until a browser asks again.
REFRESH = 10
_ABOUT = {
    "accepted": "payloads for a recipient",
    "delivered": "acknowledged",
    "refused": "requests and frames",
    "failed": "faults, or the store away",
    "requests": "and frames, all of them",
    "stored": "not pushed at once",
    "expired": "not fetched in time",
    "evicted": "for newer ones",
}
_AGES = ("under 1 min", "1 to 10 min", "10 min to 1 h", "1 to 6 h", "6 to 24 h", "over 24 h")
_NUMBER = "number"
_RATE = "number quiet wide-only"


def page(overview: Overview, *, refreshing: bool, now: float | None = None) -> bytes:
    """
    :param refreshing: whether it is to be asked for again by itself.
    :param now: when it is shown; by default as soon as it was made.
    """
    now = overview.at if now is None else now
    sections = [_state(overview), _traffic(overview), _ledger(overview, now), _ages(overview, now)]
    sections += [_largest(overview, now)]
    sections += [_troubles("Refused and failed requests", overview.refusals, overview.at, _REFUSALS)]
    sections += [_troubles("Warnings", overview.warnings, overview.at, _WARNINGS)]
    if len(overview.processes) > 1 or overview.asked > 1:
        sections.append(_processes(overview))
    if overview.reports is not None:
        sections.append(_reports(overview.reports, overview.at))
    body = _template().substitute(
        refresh=f'<meta http-equiv="refresh" content="{REFRESH}">\n' if refreshing else "",
        title=text(f"mediatord at {overview.node}"),
        pill=element("span", "well" if overview.well else overview.state, class_=_mood(overview.well)),
        updated=_updated(overview, refreshing, now),
        sections="\n".join(sections),
    )
    return body.encode("utf-8")


@cache
def security_policy() -> bytes:
    """The Content-Security-Policy of the page: its own style and nothing else."""
    style = _template().template.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return policy.encode("ascii")


@cache
def _template() -> Template:
    return Template(files("mediatord.admin").joinpath("page.html").read_text("utf-8"))


def _mood(well: bool) -> str:
    return "pill good" if well else "pill bad"


def _as_of(at: float, now: float) -> str:
    """A time of day, and how long ago that is."""
    return f"{clock(at)} UTC, {span(max(0.0, now - at))} ago"


def _of_store(overview: Overview, now: float, about: str = "") -> Markup:
    """Of which time figures of the store are, all of them the same."""
    at = overview.store_at
    return _quiet(" ".join([*([] if at is None else [f"As of {_as_of(at, now)}."]), *([about] if about else [])]))


def _updated(overview: Overview, refreshing: bool, now: float) -> Markup:
    if refreshing:
        link = joined(f"every {REFRESH} s, ", element("a", "pause", href="?refresh=0"))
    else:
        link = joined("paused, ", element("a", "resume", href="admin"))
    return joined(
        f"As of {_as_of(overview.at, now)}; ", link, "; ", element("a", "as JSON", href="admin/status.json")
    )


def _section(title: str, *content: object, whole: bool = False) -> Markup:
    return element("section", element("h2", title), *content, class_="whole" if whole else "")


def _quiet(words: str) -> Markup:
    return element("p", words, class_="quiet")


def _state(overview: Overview) -> Markup:
    gauges = overview.gauges
    pairs: list[tuple[str, object]] = [
        ("State", overview.state),
        ("Up for", span(overview.uptime)),
        ("Version", overview.version),
        ("Store", f"{overview.backend}, {'answers' if overview.cohorts is not None else 'does not answer'}"),
    ]
    if "ready" in gauges:
        pairs.append(("Messages get through", "yes" if gauges["ready"] else "no"))
    pairs.append(("Open sockets", count(gauges["sockets"]) if "sockets" in gauges else "unknown"))
    if overview.asked > 1:
        pairs.append(("Workers that answer", f"{len(overview.processes)} of {overview.asked}"))
    if overview.clustered:
        pairs.append(("Live nodes", count(gauges.get("nodes", 0))))
    if gauges.get("log_dropped"):
        pairs.append(("Log lines lost", count(gauges["log_dropped"])))
    notes = [_quiet("This is one node of a cluster; what waits is that of all.")] if overview.clustered else []
    return _section("State", facts(pairs), *notes, whole=True)


def _traffic(overview: Overview) -> Markup:
    columns = [
        Column("", "name"),
        Column("since start", _NUMBER),
        Column("last minute", _NUMBER),
        Column("", _RATE),
        Column("last hour", _NUMBER),
        Column("", _RATE),
        Column("by minute", "drawn"),
    ]
    rows = [
        (
            joined(name, " ", element("span", _ABOUT[name], class_="quiet wide-only")),
            "unknown" if overview.totals is None else count(overview.totals[name]),
            count(flow.minute),
            rate(flow.per_second[0]) if flow.minute else "",
            count(flow.hour),
            rate(flow.per_second[1]) if flow.hour else "",
            sparkline(flow.by_minute, f"{name}: {max(flow.by_minute)} in the busiest minute"),
        )
        for name, flow in overview.flows.items()
    ]
    note = []
    if overview.asked > 1:
        note = [
            _quiet(
                "The last minute and hour are those of the workers that run now; what others counted is in the total."
            )
        ]
    return _section("Traffic", table(columns, rows, "flow"), *note, whole=True)


def _ledger(overview: Overview, now: float) -> Markup:
    about = "Since the store was made. What was accepted is acknowledged, waits, or is gone. A difference is a fault."
    known = as_table(overview.books) if overview.books else _quiet("The store does not say.")
    return _section("The store's books", known, _of_store(overview, now, about), whole=True)


def _ages(overview: Overview, now: float) -> Markup:
    cohorts, total = overview.cohorts, overview.waiting
    if cohorts is None or total is None:
        return _section("What waits, by age", _quiet("The store does not say."))
    most = max(one.messages for one in cohorts)
    columns = [Column("came", "short"), Column("messages", _NUMBER), Column("bytes", _NUMBER), Column("", "drawn")]
    rows = [
        (name, _number(one), _size(one), share(one.messages, most)) for name, one in zip(_AGES, cohorts, strict=True)
    ]
    whole = ("together", _number(total), _size(total), "")
    return _section("What waits, by age", table(columns, [*rows, whole]), _of_store(overview, now))


def _number(cohort: Cohort) -> str:
    return count(cohort.messages) if cohort.exact else f"\N{GREATER-THAN OR EQUAL TO} {count(cohort.messages)}"


def _size(cohort: Cohort) -> str:
    if cohort.bytes is None or cohort.exact:
        return size(cohort.bytes)
    return f"\N{GREATER-THAN OR EQUAL TO} {size(cohort.bytes)}"


def _largest(overview: Overview, now: float) -> Markup:
    columns = [
        Column("recipient", "name"),
        Column("messages", _NUMBER),
        Column("bytes", f"{_NUMBER} wide-only"),
        Column("oldest", _NUMBER),
    ]
    rows = [
        (
            "(self-test)" if one.own else element("code", one.tag),
            count(one.messages),
            size(one.bytes),
            "unknown" if one.age is None else span(one.age),
        )
        for one in overview.largest
    ]
    if overview.waiting is None:
        return _section("The largest queues", _quiet("The store does not say."))
    known = table(columns, rows) if rows else _quiet("Nothing waits.")
    return _section("The largest queues", known, _of_store(overview, now))


_REFUSALS = (Column("situation", "name"), Column("code", "name wide-only"), Column("protocol", "wide-only"))
_WARNINGS = (Column("line", "name"), Column("level", "wide-only"), Column("from", "wide-only"))
_TIMES = (Column("times", _NUMBER), Column("last", _NUMBER))


def _troubles(title: str, troubles: Sequence[Trouble], now: float, columns: Sequence[Column]) -> Markup:
    if not troubles:
        return _section(title, _quiet("None since the start."))
    rows = []
    for one in troubles:
        words = one.kind.replace("_", " ")
        heads = (
            (one.text, words, one.where) if columns is _WARNINGS else (words, element("code", one.text), one.where)
        )
        rows.append((*heads, count(one.count), f"{span(now - one.last)} ago"))
    return _section(title, table([*columns, *_TIMES], rows))


def _processes(overview: Overview) -> Markup:
    columns = [
        Column("worker", "name"),
        Column("process", f"{_NUMBER} wide-only"),
        Column("sockets", f"{_NUMBER} wide-only"),
        Column("up for", _NUMBER),
        Column("state", "name"),
    ]
    rows = [
        (
            one.node,
            str(one.pid),
            "unknown" if one.sockets is None else count(one.sockets),
            span(one.uptime),
            one.state,
        )
        for one in overview.processes
    ]
    missing = overview.asked - len(overview.processes)
    note = [_quiet("The others did not answer in time; their figures are missing above.")] if missing > 0 else []
    return _section("Workers", table(columns, rows), *note, whole=True)


def _reports(reports: Sequence[Report], now: float) -> Markup:
    if not reports:
        return _section("Nightly report", _quiet("There is none yet."), whole=True)
    columns = [Column("day", "short"), Column("", ""), Column("written", f"{_NUMBER} wide-only")]
    rows = [
        (
            element("a", one.day, href=f"admin/report/{quote(one.day)}/{INDEX}"),
            one.verdict or "no summary",
            f"{span(now - one.written_at)} ago",
        )
        for one in reports
    ]
    return _section("Nightly report", table(columns, rows), whole=True)


def as_table(books: ledger.Books) -> Markup:
    """A column for each half: phones are narrow."""
    columns = [Column("", "name"), *(Column(half, _NUMBER) for half in books)]
    rows = [(entry, *(_ledger_number(half.get(entry)) for half in books.values())) for entry in ledger.ENTRIES]
    return table(columns, rows)


def _ledger_number(number: int | None) -> str | Markup:
    if number is None:
        return "unknown"
    return count(number) if number >= 0 else element("span", f"\N{MINUS SIGN}{count(-number)}")
