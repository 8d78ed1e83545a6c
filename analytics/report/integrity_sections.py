"""Checks at the top of the report, and the sections on integrity, log quality and provenance."""

from __future__ import annotations

from collections.abc import Sequence

from analytics.jobs.log_quality import FINDING_KINDS
from analytics.jobs.reconciliation import STORE_ENTRIES
from analytics.report.content import (
    Figure,
    ReportColumn,
    ReportData,
    ReportTable,
    Row,
    Section,
    Severity,
    format_count,
    format_share,
    format_size,
    format_text,
    limit_rows,
)
from analytics.report.message_sections import count_lost_messages
from analytics.report.operations_sections import sum_pushes

# Shares of fewer wake-ups or requests mean little.
_MIN_FOR_SHARE = 20
_SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "good")


def make_checks(data: ReportData) -> list[Figure]:
    """
    Checks at the top of the page: `good` (OK), `warn` (WARNING) or `bad` (CRITICAL: figures or messages are
    incomplete).
    """
    return [
        _check_ledger(data),
        _check_orphans(data),
        _check_vanished(data),
        _check_stores(data),
        _check_counters(data),
        _check_missing_lines(data),
        _check_quarantine(data),
        _check_lost(data),
        _check_anomalies(data),
        *_make_push_checks(data),
    ]


def summarize_checks(checks: Sequence[Figure]) -> tuple[Severity, str]:
    """The worst state, and a summary sentence."""
    by_state = {state: [check for check in checks if check.state == state] for state in _SEVERITIES}
    if by_state["bad"]:
        return (
            "bad",
            "Integrity errors: explain the checks marked CRITICAL before you rely on other figures.",
        )
    if by_state["warn"]:
        names = ", ".join(check.label.lower() for check in by_state["warn"])
        return "warn", f"The ledger balances. Warnings: {names}."
    return "good", "The ledger balances and no check failed."


def _check_ledger(data: ReportData) -> Figure:
    meaning = "Opening plus accepted, minus acknowledged, expired, evicted, removed and open. Must be 0."
    return _check_ledger_column(data, "difference", "ledger_difference", "Message ledger", meaning)


def _check_orphans(data: ReportData) -> Figure:
    meaning = "Messages that ended without a logged acceptance."
    return _check_ledger_column(data, "orphans", "messages_orphans", "Endings without acceptance", meaning)


def _check_vanished(data: ReportData) -> Figure:
    meaning = "Messages that became overdue while the mediator ran, without a logged ending."
    return _check_ledger_column(data, "vanished", "messages_vanished", "Vanished messages", meaning)


def _check_ledger_column(data: ReportData, column: str, key: str, label: str, meaning: str) -> Figure:
    row = data.get_row("ledger_daily")
    # Ledgers of older versions have no such column.
    value = (row[column] or 0) if row else None
    state: Severity = "warn" if value is None else "bad" if value else "good"
    shown = (
        "no ledger"
        if value is None
        else f"difference {format_count(value)}"
        if column == "difference"
        else format_count(value)
    )
    return Figure(key, label, value, shown, meaning, state)


def _check_counters(data: ReportData) -> Figure:
    rows = data.get_rows("reconciliation_daily")
    off = sum(abs(row["difference"]) for row in rows)
    state: Severity = "warn" if not rows else "bad" if off else "good"
    shown = "no counters" if not rows else f"difference {format_count(off)}"
    meaning = "Increase of the daemon's counters minus the log lines that they count. Must be 0."
    return Figure("reconciliation_difference", "Counters and log lines", off if rows else None, shown, meaning, state)


def _check_stores(data: ReportData) -> Figure:
    found = [row["total"] for row in data.get_rows("stores_daily") if row["entry"] == "difference"]
    off = sum(abs(total) for total in found if total is not None)
    shown = (
        "no ledger" if not found else "unknown" if None in found and not off else f"difference {format_count(off)}"
    )
    state: Severity = "bad" if off else "good" if found and None not in found else "plain"
    meaning = "Accepted minus ended and queued messages, by the ledgers of the stores. Must be 0."
    return Figure("store_messages_off", "Store ledgers", off if found else None, shown, meaning, state)


def _check_missing_lines(data: ReportData) -> Figure:
    missing = data.sum_column("boots_daily", "missing")
    meaning = "Sequence numbers without a line: logs were lost or not collected."
    state: Severity = "bad" if missing else "good"
    return Figure("log_lines_missing", "Missing log lines", missing, format_count(missing), meaning, state)


def _check_quarantine(data: ReportData) -> Figure:
    corrupt = data.sum_column("inputs", "corrupt")
    meaning = "Lines that are not events, such as lines torn by a crash; counted by cause below."
    state: Severity = "warn" if corrupt else "good"
    return Figure("log_lines_in_quarantine", "Quarantined lines", corrupt, format_count(corrupt), meaning, state)


def _check_lost(data: ReportData) -> Figure:
    lost = count_lost_messages(data)
    shown = format_count(lost.total)
    if lost.unaccepted:
        shown += f", {format_count(lost.unaccepted)} of them without a logged acceptance"
    meaning = "Messages that expired, were evicted or were removed before being acknowledged."
    return Figure("messages_lost", "Messages lost", lost.total, shown, meaning, "warn" if lost.total else "good")


def _check_anomalies(data: ReportData) -> Figure:
    hours = len(data.get_rows("anomalies"))
    meaning = "Hourly figures that differ strongly from the same hours of earlier weeks."
    return Figure("anomalies", "Anomalies", hours, format_count(hours), meaning, "warn" if hours else "good")


def _make_push_checks(data: ReportData) -> list[Figure]:
    """Checks of push notifications, on days with any."""
    totals, settings = sum_pushes(data), data.settings
    checks = (
        (
            "wakeups_missed_share",
            "Wake-ups without pickup",
            totals.missed_share,
            totals.wakeups,
            settings.missed_wakeups_share,
            "Share of the wake-ups after which the account did not connect or fetch within an hour.",
        ),
        (
            "push_devices_forgotten_share",
            "Dead tokens",
            totals.forgotten_share,
            totals.requests,
            settings.dead_tokens_share,
            "Devices removed because their push service does not know them, divided by requests to push services.",
        ),
    )
    return [
        Figure(
            key,
            label,
            share,
            format_share(share),
            meaning,
            "warn" if n >= _MIN_FOR_SHARE and share > most else "good",
        )
        for key, label, share, n, most, meaning in checks
        if share is not None
    ]


def make_integrity_section(data: ReportData) -> Section:
    """Ledger and reconciliation in detail."""
    row = data.get_row("ledger_daily")
    ends = [
        ("opening", "opening", "open at the end of the day before"),
        ("accepted", "accepted", "accepted on the day"),
        ("acked", "acknowledged", "acknowledged by their recipients"),
        ("expired", "expired", "expired before they were acknowledged"),
        ("evicted", "evicted", "evicted from full queues"),
        ("removed", "removed", "removed by owner or operator"),
        (
            "across_epochs",
            "written off",
            "past their expiry; endings unknown since the pseudonym key changed",
        ),
        ("open", "open", "still queued"),
        ("difference", "difference", "opening + accepted minus all others; nonzero is an error"),
    ]
    if not row.get("across_epochs"):
        ends = [end for end in ends if end[0] != "across_epochs"]
    ledger = [{"what": label, "n": row.get(name), "meaning": meaning} for name, label, meaning in ends] if row else []
    further = [
        (
            "orphans",
            "Endings without acceptance",
            "Ended without a logged acceptance since the first analysed day.",
        ),
        (
            "around_crash",
            "Accepted before a crash",
            "Ended; accepted just before the daemon was killed, which lost the log line.",
        ),
        (
            "lost_unaccepted",
            "Lost without acceptance",
            "Expired, evicted or removed without a logged acceptance.",
        ),
        (
            "vanished",
            "Vanished messages",
            "Became overdue while the mediator ran; counted once.",
        ),
        ("overdue", "Overdue", "Open more than an hour after their expiry, even if the mediator was down."),
        ("again", "Repeated lines", "Repeated acceptances and endings of a message; counted nowhere else."),
        ("before_books", "Before the first day", "Ended; accepted before the first analysed day."),
    ]
    figures = [
        Figure(
            f"messages_{key}",
            label,
            row[key] or 0,
            format_count(row[key] or 0),
            meaning,
            _get_ledger_severity(key, row[key] or 0),
        )
        for key, label, meaning in further
        if row
    ]
    columns = [
        ReportColumn("what", "Messages", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("meaning", "Meaning", format_text, number=False),
    ]
    return Section(
        "integrity",
        "Ledger and reconciliation",
        "Every accepted message must have an outcome or be queued, and every counted event must be logged; "
        "otherwise the other figures are unreliable.",
        figures,
        grids=[
            ReportTable("Message ledger", columns, ledger, "ledger_daily"),
            _make_store_table(data),
            _make_counter_table(data),
        ],
    )


def _get_ledger_severity(key: str, value: int) -> Severity:
    if not value:
        return "plain"
    return {"orphans": "bad", "vanished": "bad", "overdue": "warn"}.get(key, "plain")  # type: ignore[return-value]  # all are states


def _make_store_table(data: ReportData) -> ReportTable:
    """Ledger of each store."""
    rows = sorted(
        data.get_rows("stores_daily"), key=lambda row: (row["store"], row["proto"], STORE_ENTRIES.index(row["entry"]))
    )
    shown, more = limit_rows(rows, 48, "stores_daily")
    columns = [
        ReportColumn("store", "Store", format_text, number=False),
        ReportColumn("proto", "Protocol", format_text, number=False),
        ReportColumn("entry", "Outcome", format_text, number=False),
        ReportColumn("total", "Lifetime total", format_count),
        ReportColumn("change", "Change on this day", format_count),
        ReportColumn("logged", "Log lines", format_count),
        ReportColumn("own", "Self-test messages", format_count),
        ReportColumn("gap", "Unexplained", format_count),
    ]
    note = (
        "Unexplained: changes without a log line, because lines were lost in a crash or on a full disk, messages "
        "were imported, or the ledger was written between commit and logging. Self-test messages are the "
        "daemon's readiness probes, which are not logged."
    )
    marked = frozenset(
        index for index, row in enumerate(shown) if row["gap"] or (row["entry"] == "difference" and row["total"])
    )
    return ReportTable("Store ledgers", columns, shown, "stores_daily", f"{more} {note}".strip(), marked)


def _make_counter_table(data: ReportData) -> ReportTable:
    rows = sorted(data.get_rows("reconciliation_daily"), key=lambda row: (row["node"], row["counter"]))
    shown, note = limit_rows(rows, 40, "reconciliation_daily")
    columns = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("counter", "Counter", format_text, number=False),
        ReportColumn("counted", "Counted", format_count),
        ReportColumn("logged", "Log lines", format_count),
        ReportColumn("difference", "Difference", format_count),
    ]
    marked = frozenset(index for index, row in enumerate(shown) if row["difference"])
    return ReportTable("Counters and log lines by node", columns, shown, "reconciliation_daily", note, marked)


def make_quality_section(data: ReportData) -> Section:
    """Findings in the logs."""
    kinds: dict[str, Row] = {}
    for row in data.get_rows("quality_daily"):
        of_kind = {"kind": row["kind"], "n": 0, "nodes": 0, "meaning": FINDING_KINDS.get(row["kind"])}
        kind = kinds.setdefault(row["kind"], of_kind)
        kind["n"] += row["n"]
        kind["nodes"] += 1
    totals = {name: kinds.pop(name, {"n": 0})["n"] for name in ("lines", "events")}
    boots = data.get_rows("boots_daily")
    found = [row for row in kinds.values() if row["n"]]
    figures = [
        Figure(
            "log_lines",
            "Lines read",
            totals["lines"],
            format_count(totals["lines"]),
            "Lines in the segments of the day.",
        ),
        Figure("log_events", "Events", totals["events"], format_count(totals["events"]), "Valid events among them."),
        Figure(
            "starts",
            "Daemon starts",
            len(boots),
            format_count(len(boots)),
            "Processes that logged on the day: one per start of a node.",
        ),
        Figure(
            "hours_without_log",
            "Hours without logs",
            24 - _count_logged_hours(data),
            format_count(24 - _count_logged_hours(data)),
            "Hours in which no node wrote a line: all were down, or their logs were not collected.",
            "warn" if _count_logged_hours(data) < 24 else "plain",
        ),
    ]
    columns = [
        ReportColumn("kind", "Kind", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("nodes", "Nodes", format_count),
        ReportColumn("meaning", "Meaning", format_text, number=False),
    ]
    grids = [
        ReportTable("Findings by kind", columns, found, "quality_daily", "" if found else "No findings."),
        _make_boot_table(data),
    ]
    return Section(
        "quality",
        "Log quality",
        "Damaged, duplicate, misdated and missing lines, counted by kind.",
        figures,
        grids=grids,
    )


def _count_logged_hours(data: ReportData) -> int:
    """Hours with a gauge or a request; counts of hours without logs are 0."""
    requests = data.get_hours("requests")
    return len(data.get_hours("depth_max").keys() | {hour for hour, n in requests.items() if n})


def _make_boot_table(data: ReportData) -> ReportTable:
    columns = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("boot", "Start", format_text, number=False),
        ReportColumn("n", "Events", format_count),
        ReportColumn("missing", "Missing", format_count),
        ReportColumn("doubled", "Duplicates", format_count),
        ReportColumn("stepped_back", "Clock steps back", format_count),
    ]
    rows, note = limit_rows(data.get_rows("boots_daily"), data.settings.top, "boots_daily")
    marked = frozenset(index for index, row in enumerate(rows) if row["missing"])
    return ReportTable("Daemon starts by node", columns, rows, "boots_daily", note, marked)


def make_provenance_section(data: ReportData) -> Section:
    """Input and version of the report."""
    facts, settings = data.run_info, data.settings
    columns = [
        ReportColumn("state", "Segments", format_text, number=False),
        ReportColumn("packed", "Compression", format_text, number=False),
        ReportColumn("segments", "Number", format_count),
        ReportColumn("bytes", "Size", format_size),
        ReportColumn("lines", "Lines", format_count),
        ReportColumn("corrupt", "Quarantined", format_count),
    ]
    segments = data.sum_column("inputs", "segments")
    size = data.sum_column("inputs", "bytes")
    final = "Provisional: if segments of this day arrive late, the next run computes it again."
    if facts.is_final(data.day):
        final = "Final: later nightly runs do not change this day."
    notes = [
        f"Generated by mediatord {facts.version}. {final} Manifests of the runs are in runs/ beside the reports.",
        "Identifiers are replaced by pseudonyms. Their key changes every "
        f"{settings.pseudonym_days} days; mediatord-analytics pseudonyms forget destroys an old one.",
        f"Groups of fewer than {settings.k_anonymity} are suppressed: their counts read "
        f"\N{LEFT DOUBLE QUOTATION MARK}few\N{RIGHT DOUBLE QUOTATION MARK}, their rows are summed up as others.",
        "Percentiles are computed from histograms with buckets 2 % wide; their error is at most 1 %. "
        "Times are in UTC; 1 KiB is 1024 bytes.",
    ]
    if data.truncated_tables:
        notes.append(f"Only the largest rows are shown of: {', '.join(sorted(data.truncated_tables))}.")
    figures = [
        Figure(
            "segments", "Segments of the day", segments, format_count(segments), "Log segments named after the day."
        ),
        Figure("segment_bytes", "Size of the segments", size, format_size(size), "On disk, compressed or not."),
    ]
    return Section(
        "provenance",
        "Provenance",
        "Input of this report, and what is suppressed.",
        figures,
        grids=[ReportTable("Segments of the day", columns, data.get_rows("inputs"))],
        notes=notes,
    )
