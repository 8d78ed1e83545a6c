"""Whether the figures can be trusted: the checks on top, the quality of the logs, and where all this comes from."""

from __future__ import annotations

from collections.abc import Sequence

from analytics.jobs.quality import KINDS
from analytics.jobs.stores import ENTRIES
from analytics.report import numbers
from analytics.report.messages import lost_messages
from analytics.report.numbers import count
from analytics.report.parts import Column, Figure, Grid, Row, Section, State, capped
from analytics.report.reading import Day

_WORST: tuple[State, ...] = ("bad", "warn", "good")


def checks(known: Day) -> list[Figure]:
    """The banner: each is `good`, `warn` (look at it) or `bad` (the figures or messages are not whole)."""
    return [
        _ledger(known),
        _unaccepted(known),
        _vanished(known),
        _store(known),
        _reconciliation(known),
        _missing(known),
        _quarantine(known),
        _lost(known),
        _odd(known),
    ]


def verdict(checks: Sequence[Figure]) -> tuple[State, str]:
    """The worst state, and a sentence."""
    by_state = {state: [check for check in checks if check.state == state] for state in _WORST}
    if by_state["bad"]:
        return "bad", "The books do not close: see what is marked below before you rely on other figures."
    if by_state["warn"]:
        names = ", ".join(check.label.lower() for check in by_state["warn"])
        return "warn", f"The books close. Worth a look: {names}."
    return "good", "The books close and nothing stands out."


def _ledger(known: Day) -> Figure:
    meaning = "Opening plus accepted, less acknowledged, expired, evicted, removed and still open."
    return _of_ledger(known, "difference", "ledger_difference", "Message ledger", meaning)


def _unaccepted(known: Day) -> Figure:
    meaning = "Messages that ended, and of which no line says that they were accepted."
    return _of_ledger(known, "orphans", "messages_orphans", "Endings without acceptance", meaning)


def _vanished(known: Day) -> Figure:
    meaning = "Messages whose time ended while the mediator ran, without a line that says so."
    return _of_ledger(known, "vanished", "messages_vanished", "Vanished messages", meaning)


def _of_ledger(known: Day, column: str, key: str, label: str, meaning: str) -> Figure:
    row = known.one("ledger_daily")
    # Books of an older version have no such column.
    value = (row[column] or 0) if row else None
    state: State = "warn" if value is None else "bad" if value else "good"
    shown = "no ledger" if value is None else f"difference {count(value)}" if column == "difference" else count(value)
    return Figure(key, label, value, shown, meaning, state)


def _reconciliation(known: Day) -> Figure:
    rows = known.today("reconciliation_daily")
    off = sum(abs(row["difference"]) for row in rows)
    state: State = "warn" if not rows else "bad" if off else "good"
    shown = "no counters" if not rows else f"difference {count(off)}"
    meaning = "What the daemon's own counters grew by, less the lines in its log over the same stretch."
    return Figure("reconciliation_difference", "Counters against logs", off if rows else None, shown, meaning, state)


def _store(known: Day) -> Figure:
    found = [row["total"] for row in known.today("stores_daily") if row["entry"] == "difference"]
    off = sum(abs(total) for total in found if total is not None)
    shown = "not told" if not found else "unknown" if None in found and not off else f"difference {count(off)}"
    state: State = "bad" if off else "good" if found and None not in found else "plain"
    meaning = "Accepted less all that is gone and what waits, by the books that the store itself keeps."
    return Figure("store_messages_off", "The store's own books", off if found else None, shown, meaning, state)


def _missing(known: Day) -> Figure:
    missing = known.total("boots_daily", "missing")
    meaning = "Every line has a number; these are numbers that no line has: logs were lost or not collected."
    state: State = "bad" if missing else "good"
    return Figure("log_lines_missing", "Missing log lines", missing, count(missing), meaning, state)


def _quarantine(known: Day) -> Figure:
    corrupt = known.total("inputs", "corrupt")
    meaning = "Lines that are no events, torn by a crash for example: kept apart, counted by cause below."
    state: State = "warn" if corrupt else "good"
    return Figure("log_lines_in_quarantine", "Lines in quarantine", corrupt, count(corrupt), meaning, state)


def _lost(known: Day) -> Figure:
    lost = lost_messages(known)
    shown = count(lost.total)
    if lost.unaccepted:
        shown += f", {count(lost.unaccepted)} of them without acceptance line"
    meaning = "Messages that expired, were evicted or removed before their recipient acknowledged them."
    return Figure("messages_lost", "Messages lost", lost.total, shown, meaning, "warn" if lost.total else "good")


def _odd(known: Day) -> Figure:
    hours = len(known.today("anomalies"))
    meaning = "Hours in which a figure was far from what the same hours of the weeks before were like."
    return Figure("anomalies", "Anomalies", hours, count(hours), meaning, "warn" if hours else "good")


def integrity(known: Day) -> Section:
    """The ledger and the reconciliation in full."""
    row = known.one("ledger_daily")
    ends = [
        ("opening", "opening", "open at the end of the day before"),
        ("accepted", "accepted", "accepted on the day"),
        ("acked", "acknowledged", "acknowledged by their recipients"),
        ("expired", "expired", "dropped at the end of their time"),
        ("evicted", "evicted", "dropped to make room"),
        ("removed", "removed", "removed by owner or operator"),
        ("open", "open", "still waiting"),
        ("difference", "difference", "first two less the others; anything but 0 is a fault"),
    ]
    ledger = [{"what": label, "n": row.get(name), "meaning": meaning} for name, label, meaning in ends] if row else []
    further = [
        (
            "orphans",
            "Orphans",
            "Messages that ended without any log of their acceptance since the books were opened.",
        ),
        (
            "around_crash",
            "Around a crash",
            "Ended, but accepted in the last moment of a daemon that was killed before it could log that.",
        ),
        ("lost_unaccepted", "Lost without acceptance", "Orphans and the like that expired, were evicted or removed."),
        ("vanished", "Vanished", "Overdue although the mediator ran; counted on the first day that this is known."),
        ("overdue", "Overdue", "Open for over an hour past the end of their time, also while the mediator was down."),
        ("again", "Ended again", "Further endings of messages that had ended already; counted nowhere else."),
        ("before_books", "Before the books", "Ended, and accepted before the first logs that were analysed."),
    ]
    figures = [
        Figure(f"messages_{key}", label, row[key] or 0, count(row[key] or 0), meaning, _of(key, row[key] or 0))
        for key, label, meaning in further
        if row
    ]
    columns = [
        Column("what", "Messages", numbers.text, number=False),
        Column("n", "Number", count),
        Column("meaning", "Meaning", numbers.text, number=False),
    ]
    return Section(
        "integrity",
        "Do the books close?",
        "Every message that was accepted must be somewhere, and every event that was counted must be in the logs. "
        "Only then do the figures below mean anything.",
        figures,
        grids=[Grid("Ledger of messages", columns, ledger, "ledger_daily"), _stores(known), _counters(known)],
    )


def _of(key: str, value: int) -> State:
    if not value:
        return "plain"
    return {"orphans": "bad", "vanished": "bad", "overdue": "warn"}.get(key, "plain")  # type: ignore[return-value]  # all are states


def _stores(known: Day) -> Grid:
    """Of each store, however many nodes share it."""
    rows = sorted(
        known.today("stores_daily"), key=lambda row: (row["store"], row["proto"], ENTRIES.index(row["entry"]))
    )
    shown, more = capped(rows, 48, "stores_daily")
    columns = [
        Column("store", "Store", numbers.text, number=False),
        Column("proto", "Protocol", numbers.text, number=False),
        Column("entry", "Messages", numbers.text, number=False),
        Column("total", "Ever, by its last ledger", count),
        Column("change", "Change of the day", count),
        Column("logged", "Log lines", count),
        Column("own", "To itself", count),
        Column("gap", "Gap", count),
    ]
    note = (
        "A gap is what changed in the store without a line: lines that a kill or full disk took, imported messages "
        "and what was between the store and the log when the books were read. The daemon's messages to itself, by "
        "which it finds out whether it is ready, have no lines either, and are counted by themselves."
    )
    marked = frozenset(
        place for place, row in enumerate(shown) if row["gap"] or (row["entry"] == "difference" and row["total"])
    )
    return Grid("The store's own books", columns, shown, "stores_daily", f"{more} {note}".strip(), marked)


def _counters(known: Day) -> Grid:
    rows = sorted(known.today("reconciliation_daily"), key=lambda row: (row["node"], row["counter"]))
    shown, note = capped(rows, 40, "reconciliation_daily")
    columns = [
        Column("node", "Node", numbers.text, number=False),
        Column("counter", "Counter of the daemon", numbers.text, number=False),
        Column("counted", "Counted", count),
        Column("logged", "Log lines", count),
        Column("difference", "Difference", count),
    ]
    marked = frozenset(place for place, row in enumerate(shown) if row["difference"])
    return Grid("Counters against log lines", columns, shown, "reconciliation_daily", note, marked)


def quality(known: Day) -> Section:
    """What was wrong with the logs."""
    kinds: dict[str, Row] = {}
    for row in known.today("quality_daily"):
        of_kind = {"kind": row["kind"], "n": 0, "nodes": 0, "meaning": KINDS.get(row["kind"])}
        kind = kinds.setdefault(row["kind"], of_kind)
        kind["n"] += row["n"]
        kind["nodes"] += 1
    totals = {name: kinds.pop(name, {"n": 0})["n"] for name in ("lines", "events")}
    boots = known.today("boots_daily")
    found = [row for row in kinds.values() if row["n"]]
    figures = [
        Figure("log_lines", "Lines read", totals["lines"], count(totals["lines"]), "Lines of the day's segments."),
        Figure("log_events", "Events", totals["events"], count(totals["events"]), "Lines that were good events."),
        Figure(
            "starts",
            "Starts seen",
            len(boots),
            count(len(boots)),
            "Processes, one for each start of each node, that logged on the day.",
        ),
        Figure(
            "hours_without_log",
            "Hours without any log",
            24 - _logged(known),
            count(24 - _logged(known)),
            "Hours in which no node wrote a line: all were down, or their logs are not here.",
            "warn" if _logged(known) < 24 else "plain",
        ),
    ]
    columns = [
        Column("kind", "Kind", numbers.text, number=False),
        Column("n", "Number", count),
        Column("nodes", "Nodes", count),
        Column("meaning", "Meaning", numbers.text, number=False),
    ]
    grids = [
        Grid("Findings in the logs, by kind", columns, found, "quality_daily", "" if found else "Nothing was found."),
        _starts(known),
    ]
    return Section(
        "quality",
        "Quality of the logs",
        "Damaged, doubled, misdated and missing lines are counted by kind and never dropped in silence.",
        figures,
        grids=grids,
    )


def _logged(known: Day) -> int:
    """Hours with a gauge, or a request at least: of those without any log the counts are 0."""
    requests = known.hours("requests")
    return len(known.hours("depth_max").keys() | {hour for hour, n in requests.items() if n})


def _starts(known: Day) -> Grid:
    columns = [
        Column("node", "Node", numbers.text, number=False),
        Column("boot", "Start", numbers.text, number=False),
        Column("n", "Events", count),
        Column("missing", "Missing", count),
        Column("doubled", "Doubled", count),
        Column("stepped_back", "Clock went back (minutes)", count),
    ]
    rows, note = capped(known.today("boots_daily"), known.settings.top, "boots_daily")
    marked = frozenset(place for place, row in enumerate(rows) if row["missing"])
    return Grid("Starts of nodes", columns, rows, "boots_daily", note, marked)


def provenance(known: Day) -> Section:
    """Which run, from what."""
    facts, settings = known.facts, known.settings
    columns = [
        Column("state", "Segments", numbers.text, number=False),
        Column("packed", "Packed", numbers.text, number=False),
        Column("segments", "Number", count),
        Column("bytes", "Size", numbers.size),
        Column("lines", "Lines", count),
        Column("corrupt", "In quarantine", count),
    ]
    segments = known.total("inputs", "segments")
    size = known.total("inputs", "bytes")
    final = "Late segments can still change this day: it will be made anew."
    if facts.is_final(known.day):
        final = "The day is final: a nightly run does not look at it again."
    notes = [
        f"Made by mediatord {facts.version}. {final} The runs that made it are in runs/ beside the reports.",
        "Identifiers of people are pseudonyms made with a key that changes every "
        f"{settings.pseudonym_days} days and can be destroyed.",
        f"Groups of fewer than {settings.k_anonymity} are not shown by themselves: such counts read "
        f"\N{LEFT DOUBLE QUOTATION MARK}few\N{RIGHT DOUBLE QUOTATION MARK}, such rows are added up as others.",
        "Percentiles come from histograms whose buckets are 2 % wide, so they are at most 1 % off. "
        "Times are UTC; a KiB is 1024 bytes.",
    ]
    if known.cut:
        notes.append(f"Only the largest rows were read of: {', '.join(sorted(known.cut))}.")
    figures = [
        Figure("segments", "Segments of the day", segments, count(segments), "Log files whose name is of the day."),
        Figure("segment_bytes", "Their size", size, numbers.size(size), "As they lie on disk, packed or not."),
    ]
    return Section(
        "provenance",
        "Where this comes from",
        "What was read, and what is left out on purpose.",
        figures,
        grids=[Grid("Segments of the day", columns, known.today("inputs"))],
        notes=notes,
    )
