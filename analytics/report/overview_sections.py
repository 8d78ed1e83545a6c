"""Overview at the top of the report, and the sections on integrity, log quality, provenance and words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from analytics.jobs.log_quality import FINDING_KINDS
from analytics.jobs.reconciliation import STORE_ENTRIES
from analytics.report.content import (
    MIN_NIGHTS,
    NORMAL_NIGHTS,
    Advice,
    Figure,
    ReportColumn,
    ReportData,
    ReportTable,
    Row,
    Section,
    Severity,
    find_normal,
    format_count,
    format_plural,
    format_share,
    format_size,
    format_text,
    get_formatter,
    is_operator,
    limit_rows,
)
from analytics.report.message_sections import (
    count_lost_messages,
    make_ledger_normal,
    make_lost_normal,
    make_volume_figures,
    select_lost_rows,
)
from analytics.report.operations_sections import sum_pushes
from analytics.schema import OPERATOR_NODE_SUFFIX

# Shares of fewer wake-ups or requests mean little.
_MIN_FOR_SHARE = 20
_SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "good")


@dataclass(frozen=True, slots=True)
class FigureGroup:
    """Figures that answer one question of the operator. :param title: the question."""

    title: str
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Overview:
    """
    The top of the report.

    :param verdict: worst state of the checks, and what it means.
    :param actions: the figures that need an action, in the order in which to look at them.
    :param unusual: further figures outside the range of the nights before.
    :param others: figures of sections that are WARNING or CRITICAL, and not among those of the groups.
    :param nights: most nights that a normal value is the median of.
    """

    verdict: tuple[Severity, str]
    actions: Sequence[Figure]
    unusual: Sequence[Figure]
    others: Sequence[Figure]
    groups: Sequence[FigureGroup]
    nights: int

    @property
    def figures(self) -> list[Figure]:
        """Of all groups."""
        return [figure for group in self.groups for figure in group.figures]

    @property
    def basis(self) -> str:
        """What normal values are computed from."""
        if self.nights < MIN_NIGHTS:
            return f"There are no normal values yet: they need {MIN_NIGHTS} nights."
        so_far = ", so far" if self.nights < NORMAL_NIGHTS else ""
        return f"Normal: the median of the {self.nights} nights before{so_far}."


def make_overview(data: ReportData, sections: Sequence[Section]) -> Overview:
    """Figures an operator acts on, each with its normal value and the section to look at."""
    checks = make_checks(data)
    by_key = {check.key: check for check in checks}
    groups = [
        FigureGroup(
            "Is mail being lost?",
            [
                by_key["messages_lost"],
                _make_removed_figure(data),
                _make_risk_figure(data),
                *(by_key[key] for key in ("messages_overdue", "messages_vanished", "messages_orphans")),
                *(by_key[key] for key in ("ledger_difference", "store_messages_off")),
            ],
        ),
        FigureGroup(
            "Are the logs complete?",
            [
                *(by_key[key] for key in ("log_lines_missing", "hours_without_log", "log_lines_in_quarantine")),
                by_key["reconciliation_difference"],
                _make_node_figure(data),
            ],
        ),
        FigureGroup(
            "What else changed?",
            [
                by_key["anomalies"],
                *make_volume_figures(data),
                *_make_load_figures(data),
                *(by_key[key] for key in ("wakeups_missed_share", "push_devices_forgotten_share") if key in by_key),
            ],
        ),
    ]
    figures = [figure for group in groups for figure in group.figures]
    return Overview(
        summarize_checks(checks),
        sorted((each for each in checks if _needs_action(each)), key=_get_action_order),
        [figure for figure in figures if figure.is_unusual and not _needs_action(figure)],
        [
            replace(figure, section=section.id)
            for section in sections
            for figure in section.figures
            if _needs_action(figure) and figure.key not in by_key
        ],
        groups,
        max(figure.normal.nights for figure in figures if figure.normal),
    )


def _needs_action(figure: Figure) -> bool:
    return figure.state in ("bad", "warn")


def _get_action_order(check: Figure) -> tuple[int, bool]:
    """Missing lines explain most of the other findings."""
    return _SEVERITIES.index(check.state), check.key != "log_lines_missing"


def make_checks(data: ReportData) -> list[Figure]:
    """Figures that are `good` (OK), `warn` (WARNING) or `bad` (CRITICAL: the logs or a ledger are incomplete)."""
    return [
        _check_lost(data),
        _check_ledger(data),
        _check_orphans(data),
        _check_vanished(data),
        _check_overdue(data),
        _check_stores(data),
        _check_counters(data),
        _check_missing_lines(data),
        _check_hours(data),
        _check_quarantine(data),
        _check_anomalies(data),
        *_make_push_checks(data),
    ]


def summarize_checks(checks: Sequence[Figure]) -> tuple[Severity, str]:
    """The worst state, and what it means; says first how many messages were lost."""
    by_state = {state: [check for check in checks if check.state == state] for state in _SEVERITIES}
    lost = next(check for check in checks if check.key == "messages_lost")
    if lost.value is None:
        words = "No message ledger for this day"
    elif not lost.value:
        words = "No message was lost"
    else:
        words = f"{format_plural(int(lost.value), 'message')} lost"
        if lost.normal is not None and lost.normal.median is not None:
            words += f" (normal: {format_count(lost.normal.median)})"
    if by_state["bad"]:
        return (
            "bad",
            f"{words}. The logs or a ledger are incomplete: explain what is CRITICAL before you rely on figures.",
        )
    if by_state["warn"]:
        return "warn", f"{words}. Warnings: {', '.join(check.label.lower() for check in by_state['warn'])}."
    return "good", f"{words}. The ledger balances and no check failed."


def _check_ledger(data: ReportData) -> Figure:
    meaning = "Opening plus accepted, minus acknowledged, expired, evicted, removed and open. Must be 0."
    advice = Advice("Rule out missing log lines; if there are none, report it.", "MediatordLedgerBroken")
    return _check_ledger_column(
        data, "difference", "ledger_difference", "Message ledger, difference", meaning, advice
    )


def _check_orphans(data: ReportData) -> Figure:
    meaning = "Messages that ended without a logged acceptance."
    advice = Advice("Look for segments of earlier days that were not collected.", "MediatordLedgerBroken")
    return _check_ledger_column(data, "orphans", "messages_orphans", "Endings without acceptance", meaning, advice)


def _check_vanished(data: ReportData) -> Figure:
    meaning = "Messages that became overdue while the mediator ran, without a logged ending."
    advice = Advice("Look for missing log lines, or a restart with storage.backend: memory.", "MediatordLedgerBroken")
    return _check_ledger_column(data, "vanished", "messages_vanished", "Vanished messages", meaning, advice)


def _check_overdue(data: ReportData) -> Figure:
    meaning = "Messages still open more than an hour after their expiry."
    advice = Advice("Nothing if the mediator was down; otherwise look for missing lines.", "MediatordMessagesOverdue")
    check = _check_ledger_column(data, "overdue", "messages_overdue", "Overdue messages", meaning, advice)
    return replace(check, state="warn") if check.state == "bad" else check


def _check_ledger_column(data: ReportData, column: str, key: str, label: str, meaning: str, advice: Advice) -> Figure:
    # Ledgers of older versions have no such column.
    values = {row["dt"]: abs(row[column] or 0) for row in data.rows["ledger_daily"]}
    row = data.get_row("ledger_daily")
    value = (row[column] or 0) if row else None
    state: Severity = "warn" if value is None else "bad" if value else "good"
    shown = "no ledger" if value is None else format_count(value)
    normal = find_normal(values, data.day, format_count)
    return Figure(key, label, value, shown, meaning, state, normal, "integrity", advice)


def _check_counters(data: ReportData) -> Figure:
    rows = data.get_rows("reconciliation_daily")
    difference = sum(abs(row["difference"]) for row in rows)
    normal = data.count_normal("reconciliation_daily", lambda row: abs(row["difference"]), format_count)
    return Figure(
        "reconciliation_difference",
        "Counters and log lines, difference",
        difference if rows else None,
        format_count(difference) if rows else "no counters",
        "Increase of the daemon's counters minus the log lines that they count. Must be 0.",
        "warn" if not rows else "bad" if difference else "good",
        normal,
        "integrity",
        Advice("Rule out missing log lines; if there are none, report it.", "MediatordReconciliationBroken"),
    )


def _check_stores(data: ReportData) -> Figure:
    found = [row["total"] for row in data.get_rows("stores_daily") if row["entry"] == "difference"]
    difference = sum(abs(total) for total in found if total is not None)
    unknown = None in found and not difference
    by_day: dict[date, int] = {}
    for row in data.rows["stores_daily"]:
        if row["entry"] == "difference" and row["total"] is not None:
            by_day[row["dt"]] = by_day.get(row["dt"], 0) + abs(row["total"])
    return Figure(
        "store_messages_off",
        "Store ledgers, difference",
        difference if found else None,
        "no ledger" if not found else "unknown" if unknown else format_count(difference),
        "Accepted minus ended and queued messages, by the ledgers of the stores. Must be 0.",
        "bad" if difference else "good" if found and None not in found else "plain",
        find_normal(by_day, data.day, format_count),
        "integrity",
        Advice("Compare the entries of the store ledgers.", "MediatordLedgerOpen"),
    )


def _check_missing_lines(data: ReportData) -> Figure:
    missing = data.sum_column("boots_daily", "missing")
    kind = "seq_missing"
    return Figure(
        "log_lines_missing",
        "Missing log lines",
        missing,
        format_count(missing),
        "Sequence numbers without a line: not written, deleted, or not collected.",
        "bad" if missing else "good",
        data.count_normal("quality_daily", lambda row: row["n"] if row["kind"] == kind else 0, format_count),
        "quality",
        Advice(
            "They explain most other findings: copy the segments of all nodes below --logs, and run the day again.",
            "MediatordLogLinesMissing",
        ),
    )


def _check_hours(data: ReportData) -> Figure:
    hours = 24 - len(_find_logged_hours(data, data.day))
    past = {row["dt"] for row in data.rows["series_hourly"]}
    return Figure(
        "hours_without_log",
        "Hours without logs",
        hours,
        format_count(hours),
        "Hours in which no node wrote a line: all were down, or their logs were not collected.",
        "warn" if hours else "good",
        find_normal({day: 24 - len(_find_logged_hours(data, day)) for day in past}, data.day, format_count),
        "quality",
        Advice("Find out whether all nodes were down; otherwise collect their logs.", "MediatordLogLinesMissing"),
    )


def _check_quarantine(data: ReportData) -> Figure:
    corrupt = data.sum_column("inputs", "corrupt")
    return Figure(
        "log_lines_in_quarantine",
        "Quarantined lines",
        corrupt,
        format_count(corrupt),
        "Lines that are not events, such as the line being written at a crash; counted by kind below.",
        "warn" if corrupt else "good",
        data.count_normal("inputs", lambda row: row["corrupt"], format_count),
        "quality",
        Advice("One for each crash needs no action; if there are more, check the disk.", "MediatordLogLinesCorrupt"),
    )


def _check_lost(data: ReportData) -> Figure:
    lost = count_lost_messages(data) if data.get_row("ledger_daily") else None
    reasons = {row["reason"] for row in select_lost_rows(data)}
    evicted = any(reason.startswith("fifo") for reason in reasons if reason)
    texts = {
        True: "Queues were full, so their oldest messages were evicted: see which, and raise queue.max_messages.",
        False: "Messages expired before their recipients fetched them: see their ages, and whether they were pushed.",
    }
    return Figure(
        "messages_lost",
        "Messages lost",
        lost.total if lost else None,
        format_count(lost.total) if lost else "no ledger",
        "Expired or evicted before they were acknowledged.",
        "good" if lost and not lost.total else "warn",
        make_lost_normal(data),
        "lost",
        Advice(texts[evicted], "MediatordMessagesEvicted"),
    )


def _check_anomalies(data: ReportData) -> Figure:
    count = len(data.get_rows("anomalies"))
    return Figure(
        "anomalies",
        "Anomalies",
        count,
        format_count(count),
        "Hourly figures that differ strongly from the usual ones.",
        "warn" if count else "good",
        data.count_normal("anomalies", lambda row: 1, format_count),
        "anomalies",
        Advice("Read which figures, and at which hours; nothing to do if you know the reason.", "MediatordAnomalies"),
    )


def _make_push_checks(data: ReportData) -> list[Figure]:
    """Checks of push notifications, on days with any."""
    days = {row["dt"] for table in ("push_daily", "wakeups_daily") for row in data.rows[table]}
    totals = {day: sum_pushes(data, day) for day in days | {data.day}}
    today, settings = totals[data.day], data.settings
    checks = (
        (
            "wakeups_missed_share",
            "Wake-ups without pickup",
            "missed_share",
            today.wakeups,
            settings.missed_wakeups_share,
            "Share of the wake-ups after which the account did not connect or fetch within an hour.",
            Advice("Look at the services and accounts concerned.", "MediatordWakeupsFailing"),
        ),
        (
            "push_devices_forgotten_share",
            "Dead tokens",
            "forgotten_share",
            today.requests,
            settings.dead_tokens_share,
            "Devices forgotten because their push service does not know them, divided by requests to push services.",
            Advice("Look at their services and reasons.", "MediatordDevicesForgotten"),
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
            find_normal(
                {day: past for day, each in totals.items() if (past := getattr(each, name)) is not None},
                data.day,
                format_share,
            ),
            "push",
            advice,
        )
        for key, label, name, n, most, meaning, advice in checks
        if (share := getattr(today, name)) is not None
    ]


def _make_removed_figure(data: ReportData) -> Figure:
    removed = data.get_row("ledger_daily").get("removed")
    return Figure(
        "messages_removed",
        "Removed by owner or operator",
        removed,
        format_count(removed),
        "By mediatord queue purge or accounts remove, or as a v1 wallet hung up; not lost.",
        normal=make_ledger_normal(data, "removed"),
        section="lost",
    )


def _make_risk_figure(data: ReportData) -> Figure:
    at_risk = data.sum_column("queue_risk", "at_risk")
    return Figure(
        "messages_at_risk",
        "Will be lost within a day",
        at_risk,
        format_count(at_risk),
        "Messages of the queues at risk that will expire or be evicted if nobody fetches them.",
        normal=data.count_normal("queue_risk", lambda row: row["at_risk"], format_count),
        section="queues",
    )


def _make_node_figure(data: ReportData) -> Figure:
    nodes = {(row["dt"], row["node"]) for row in data.rows["quality_daily"] if not is_operator(row["node"])}
    by_day = Counter(day for day, node in nodes if node)
    return Figure(
        "nodes",
        "Nodes that logged",
        by_day[data.day],
        format_count(by_day[data.day]),
        "Nodes with lines on the day, without commands of operators.",
        normal=find_normal(by_day, data.day, format_count),
        section="nodes",
    )


# Of series_daily: metric, label, section, meaning.
_LOAD_FIGURES = (
    ("latency_live_p95_ms", "Live push, p95", "latency", "95 of 100 live pushes took at most this long."),
    ("error_share", "Requests refused or failed", "errors", "Share of all requests."),
    ("depth_max", "Queued messages, maximum", "queues", "In all queues, sampled every minute."),
    ("lag_ms_max", "Reactor lag, maximum", "queues", "Longest delay of timed calls in a node's event loop."),
    ("connections_peak", "Concurrent sockets, maximum", "sessions", "Sum over nodes of each node's maximum."),
    ("limit_hits", "Rate-limit hits", "limits", "Requests refused by a rate limit."),
)


def _make_load_figures(data: ReportData) -> list[Figure]:
    figures = []
    for metric, label, section, meaning in _LOAD_FIGURES:
        value = data.get_past_days(metric).get(data.day)
        shown = get_formatter(metric)(value)
        figures.append(Figure(metric, label, value, shown, meaning, normal=data.get_normal(metric), section=section))
    return figures


def make_integrity_section(data: ReportData) -> Section:
    """Ledger and reconciliation in detail."""
    row = data.get_row("ledger_daily")
    ends = [
        ("opening", "opening", "open at the end of the day before: accepted, and neither of the endings below"),
        ("accepted", "accepted", "accepted on the day"),
        ("acked", "acknowledged", "acknowledged by their recipients"),
        ("expired", "expired", "expired before they were acknowledged"),
        ("evicted", "evicted", "evicted from full queues"),
        ("removed", "removed", "removed by their owner or an operator; not lost"),
        (
            "across_epochs",
            "written off",
            "past their expiry; endings unknown since the pseudonym key changed",
        ),
        ("open", "open", "none of these by the end of the day"),
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
            "Ended; accepted just before the daemon was killed, before the line was written.",
        ),
        (
            "lost_unaccepted",
            "Lost without acceptance",
            "Expired or evicted without a logged acceptance.",
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
            make_ledger_normal(data, key),
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
        "Unexplained: changes without a log line, because it was not written in a crash or on a full disk, messages "
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
        kind["nodes"] += not is_operator(row["node"])
    totals = {name: kinds.pop(name, {"n": 0})["n"] for name in ("lines", "events")}
    boots = [row for row in data.get_rows("boots_daily") if not is_operator(row["node"])]
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
        _check_hours(data),
    ]
    columns = [
        ReportColumn("kind", "Kind", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("nodes", "Nodes", format_count),
        ReportColumn("meaning", "Meaning", format_text, number=False),
    ]
    grids = [
        ReportTable("Findings by kind", columns, found, "quality_daily", "" if found else "No findings."),
        _make_boot_table(data, boots),
        *_make_command_tables(data),
    ]
    return Section(
        "quality",
        "Log quality",
        "Damaged, duplicate, misdated and missing lines, counted by kind.",
        figures,
        grids=grids,
    )


def _find_logged_hours(data: ReportData, day: date) -> set[int]:
    """Hours with a gauge or a request; counts of hours without logs are 0."""
    return {
        row["hour"]
        for row in data.rows["series_hourly"]
        if row["dt"] == day and (row["metric"] == "depth_max" or (row["metric"] == "requests" and row["value"]))
    }


def _make_command_tables(data: ReportData) -> list[ReportTable]:
    """Commands of operators; no table without any."""
    rows = [
        row | {"node": row["node"].removesuffix(OPERATOR_NODE_SUFFIX)}
        for row in data.get_rows("boots_daily")
        if is_operator(row["node"])
    ]
    if not rows:
        return []
    shown, more = limit_rows(rows, data.settings.top, "boots_daily")
    columns = [
        ReportColumn("node", "For the store of", format_text, number=False),
        ReportColumn("boot", "Start", format_text, number=False),
        ReportColumn("n", "Events", format_count),
        ReportColumn("missing", "Missing", format_count),
    ]
    note = "Commands that removed messages while no daemon ran. They are not nodes."
    marked = frozenset(index for index, row in enumerate(shown) if row["missing"])
    return [ReportTable("Commands of operators", columns, shown, "boots_daily", f"{more} {note}".strip(), marked)]


def _make_boot_table(data: ReportData, boots: Sequence[Row]) -> ReportTable:
    columns = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("boot", "Start", format_text, number=False),
        ReportColumn("n", "Events", format_count),
        ReportColumn("missing", "Missing", format_count),
        ReportColumn("doubled", "Duplicates", format_count),
        ReportColumn("stepped_back", "Clock steps back", format_count),
    ]
    rows, note = limit_rows(boots, data.settings.top, "boots_daily")
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


# Words of the report that could be read in two ways, and their one meaning.
_WORDS = (
    (
        "normal",
        f"Median of the {NORMAL_NIGHTS} nights before, at least {MIN_NIGHTS}. Unusual figures are outside their "
        "range, and more than a quarter above or below the median.",
    ),
    ("usual", "Of an hour: median of that hour on the same weekday of the weeks before, else on all days before."),
    ("accepted", "The mediator took charge of the message, by its log line msg.accept."),
    (
        "acknowledged",
        "The recipient confirmed receipt, so the message was deleted; by the log line msg.ack. What the daemon's "
        "counters and the ledgers of stores count is only in the tables that compare them with the log.",
    ),
    ("lost", "Expired or evicted before it was acknowledged. Nothing else is called lost."),
    (
        "removed",
        "Deleted by an operator (queue purge, accounts remove), or by its owner (a v1 wallet hung up); not lost.",
    ),
    ("open", "Accepted, and neither acknowledged, lost nor removed by the end of the day, by the log."),
    ("queued", "In a queue of the store, by the daemon's gauges."),
    ("overdue", "Open more than an hour after its expiry."),
    ("vanished", "Became overdue while the mediator ran, which should have logged an ending."),
    ("missing", "Of log lines: a sequence number without a line."),
    ("difference", "Of two counts that must be equal."),
    ("node", "A process of the daemon, by its name in the log. Commands of operators are not nodes."),
)


def make_words_section(data: ReportData) -> Section:
    """Definitions."""
    columns = [
        ReportColumn("word", "Word", format_text, number=False),
        ReportColumn("meaning", "Meaning", str, number=False),
    ]
    rows = [{"word": word, "meaning": meaning} for word, meaning in _WORDS]
    return Section(
        "words", "Words", "What the words of this report mean.", grids=[ReportTable("Words", columns, rows)]
    )
