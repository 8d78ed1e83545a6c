"""The top of the report: what is normal, what changed and where to look; and what operators did is no fault."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from analytics.report.content import ReportData, find_normal, format_count, format_duration
from analytics.report.message_sections import count_lost_messages
from analytics.report.outputs import make_registry, render_report
from analytics.report.overview_sections import make_checks
from tests.analytics.busy_day import BUSY_ROWS, DAY, Rows, fill_columns, make_report_data
from tests.analytics.report.test_report import ParsedPage

ALERTS = Path(__file__).parents[3] / "docs" / "runbooks" / "alerts.md"
LEDGER = {"accepted": 900, "acked": 800, "open": 100, "opening": 0}


def make_data(rows: dict[str, list[dict[str, Any]]]) -> ReportData:
    """Report data of these rows, completed with nulls."""
    return make_report_data({name: [fill_columns(name, row) for row in each] for name, each in rows.items()})


def parse_report(rows: dict[str, list[dict[str, Any]]]) -> ParsedPage:
    return ParsedPage(render_report(make_data(rows))["index.html"])


def make_ledgers(*expired: int) -> list[dict[str, Any]]:
    """Ledgers of consecutive days, the last of which is that of the report."""
    return [{"dt": DAY - timedelta(n), **LEDGER, "expired": lost} for n, lost in enumerate(reversed(expired))]


def test_every_figure_has_a_normal_value_and_a_section() -> None:
    """A link to a section of the page in each row of the overview; on the busy day all have enough history."""
    page = ParsedPage(render_report(make_report_data(BUSY_ROWS))["index.html"])
    rows = [row for row in page.rows if len(row) == 5 and "normal" in row[2]]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"][: 2 * len(rows) + 40]

    assert len(rows) == 24
    for _, value, normal, before, _ in rows:
        assert value.strip() and normal.strip() and before.startswith("day before ")
    assert {f"#{name}" for name in ("lost", "queues", "integrity", "quality", "nodes", "traffic")} <= set(links)
    summary = json.loads(render_report(make_report_data(BUSY_ROWS))["summary.json"])
    assert len(summary["overview"]) == 24
    assert {figure["section"] for figure in summary["overview"].values()} <= set(page.values("id"))


def test_runbooks_exist() -> None:
    headings = set(re.findall(r"^### (\w+)$", ALERTS.read_text("utf-8"), re.MULTILINE))
    checks = make_checks(make_report_data(BUSY_ROWS))

    assert len(checks) == 13
    assert {check.advice.runbook for check in checks if check.advice} <= headings
    assert all(check.advice for check in checks)


@pytest.mark.parametrize(
    ("expired", "cells"),
    [
        ((5,), ["5", "no normal yet", "day before –", ""]),
        ((1, 2, 5), ["5", "no normal yet", "day before 2", ""]),
        ((1, 2, 3, 5), ["5", "normal 2", "day before 3", "2.5 times normal"]),
        ((*range(1, 8), 9), ["9", "normal 4", "day before 7", "2.2 times normal, highest of 7 nights"]),
        # The day before the last 28 does not count.
        ((999, *[4] * 28, 4), ["4", "normal 4", "day before 4", "as normal"]),
        ((*[10] * 28, 1), ["1", "normal 10", "day before 10", "-90 %, lowest of 28 nights"]),
        ((*[100, 101] * 14, 110), ["110", "normal 100", "day before 101", "as normal"]),
        ((*[0] * 28, 1), ["1", "normal 0", "day before 0", "above normal, highest of 28 nights"]),
    ],
)
def test_compares_with_the_nights_before(expired: tuple[int, ...], cells: list[str]) -> None:
    page = parse_report({"ledger_daily": make_ledgers(*expired)})

    assert page.find_row("Messages lost") == cells
    nights = min(len(expired) - 1, 28)
    basis = next(text for text in page.texts["p"] if "normal" in text.lower())
    if nights < 3:
        assert basis.startswith("There are no normal values yet: they need 3 nights.")
    else:
        so_far = ", so far" if nights < 28 else ""
        assert basis.startswith(f"Normal: the median of the {nights} nights before{so_far}.")


def test_missing_nights_do_not_count() -> None:
    values = {DAY - timedelta(n): 10.0 * n for n in (2, 3, 5)}
    normal = find_normal(values, DAY, format_duration)

    assert (normal.median, normal.before, normal.nights) == (30.0, None, 3)
    assert normal.describe_change(None) == normal.describe_change("unknown") == ""


def test_night_without_findings_counts_as_zero() -> None:
    """An analysed night has rows of quality_daily; others are unknown."""
    analysed = [{"dt": DAY - timedelta(n), "node": "a", "kind": "events", "n": 7} for n in range(5)]
    anomalies = [{"dt": DAY - timedelta(1), "metric": "requests", "hour": hour, "z": 9.0} for hour in range(4)]
    data = make_data({"quality_daily": analysed, "anomalies": anomalies})

    normal = data.count_normal("anomalies", lambda row: 1, format_count)

    assert (normal.median, normal.before, normal.nights) == (0, 4, 4)


PURGED = {"reason": "purged", "size_class": "0 <1K", "age_class": "6 <1d", "pushed": True, "n": 40, "bytes": 4000}


def test_purged_messages_are_not_lost() -> None:
    """A figure of its own; no loss, no warning and no gauge of lost messages."""
    rows: dict[str, list[dict[str, Any]]] = {
        "ledger_daily": [{**LEDGER, "removed": 40}],
        "lost_daily": [PURGED],
    }
    data = make_data(rows)
    files = render_report(data)
    page, summary = ParsedPage(files["index.html"]), json.loads(files["summary.json"])

    assert page.find_row("Messages lost")[0] == "0"
    assert page.find_row("Removed by owner or operator")[0] == "40"
    assert summary["checks"]["messages_lost"] == {"value": 0, "state": "good"}
    assert summary["overview"]["messages_removed"]["value"] == 40
    assert summary["figures"]["lost"]["bytes_lost"] == summary["figures"]["lost"]["messages_pushed_and_lost"] == 0
    assert "purged" not in page.texts["td"]
    assert "No messages were lost." in page.texts["p"]
    gauges = make_registry(data)
    assert gauges.get_sample_value("mediatord_day_messages_lost", {"reason": "purged"}) is None
    assert gauges.get_sample_value("mediatord_day_messages", {"state": "removed"}) == 40
    # Beside lost messages only those are counted.
    both = make_data(
        {"ledger_daily": [{**LEDGER, "removed": 40, "expired": 1, "evicted": 2}], "lost_daily": [PURGED]}
    )
    assert count_lost_messages(both).total == 3


def test_commands_of_operators_are_not_nodes() -> None:
    """They are neither counted nor named as nodes; what their logs lack still is CRITICAL."""
    names = ("mediator-a", "mediator-a-operator")
    boot = {"seq_first": 1, "seq_last": 9, "n": 9, "missing": 0, "doubled": 0, "stepped_back": 0}
    rows: dict[str, list[dict[str, Any]]] = {
        "ledger_daily": [LEDGER],
        "boots_daily": [{"node": node, "boot": f"boot of {node}", **boot} for node in names],
        "quality_daily": [{"node": node, "kind": kind, "n": 9} for node in names for kind in ("events", "dropped")],
        "traffic_daily": [{"node": node, "proto": "didcomm", "event": "msg.remove", "n": 3} for node in names],
        "node_compare": [{"node": node, "metric": "requests", "value": 1, "median": 1, "ratio": 1} for node in names],
    }
    rows["boots_daily"][1]["missing"] = 2

    files = render_report(make_data(rows))

    page = ParsedPage(files["index.html"])
    summary = json.loads(files["summary.json"])
    assert "mediator-a-operator" not in page.texts["td"]
    assert page.find_row("Nodes that logged")[0] == "1"
    assert summary["figures"]["nodes"]["nodes"] == summary["figures"]["quality"]["starts"] == 1
    assert page.find_row("dropped")[:2] == ["18", "1"]
    assert [row for row in page.rows if "boot of mediator-a-operator" in row] == [
        ["mediator-a", "boot of mediator-a-operator", "9", "2"]
    ]
    assert summary["checks"]["log_lines_missing"] == {"value": 2, "state": "bad"}


def test_unusual_and_marked_figures_are_named_at_the_top() -> None:
    """Figures that need no action by themselves, but are outside their range or marked in their sections."""
    series = [
        {"dt": DAY - timedelta(n), "metric": "connections_peak", "value": 90.0 if n else 12.0} for n in range(29)
    ]
    error = {"proto": "didcomm", "mtype": "", "status": 400, "code": "e.p.new", "n": 4, "is_new": True}

    page = parse_report({"series_daily": series, "errors_daily": [error]})

    text = " ".join(page.texts["p"])
    assert "12, -87" in text.replace("\N{NO-BREAK SPACE}%", "") and "lowest of 28 nights." in text
    assert "Also marked below:" in page.texts["strong"]
    # There, in the overview and in the contents.
    assert page.values("href").count("#errors") == 3


def test_lost_is_said_of_messages_only() -> None:
    """Lines are missing; sockets end; devices are forgotten."""
    page = ParsedPage(render_report(make_report_data(BUSY_ROWS))["index.html"])
    texts = [text for tag in ("dd", "dt", "p", "td", "li", "h2") for text in page.texts[tag]]
    said = [text for text in texts if re.search(r"\b(lost|loss|lose)\b", text, re.IGNORECASE)]

    assert len(said) > 10
    for text in said:
        assert not re.search(r"\blines? (was|were|are) lost|\blost (log )?lines?\b|connections? lost", text), text
    assert not [text for text in texts if re.search(r"\bbroken\b|\bis off\b", text)]


def test_words_are_defined_once() -> None:
    page = parse_report({})
    words = [row[0] for row in page.rows[[row[0] for row in page.rows].index("Word") + 1 :]]

    assert len(words) == len(set(words))
    assert {"normal", "acknowledged", "lost", "removed", "open", "missing", "node"} <= set(words)


def make_hours(day_hours: dict[int, range]) -> Rows:
    """Requests at these hours of days before the report."""
    return {
        "series_hourly": [
            {"dt": DAY - timedelta(n), "hour": hour, "metric": "requests", "value": 5.0}
            for n, hours in day_hours.items()
            for hour in hours
        ]
    }


def test_hours_without_logs_are_a_warning() -> None:
    rows = make_hours({0: range(20), 1: range(24), 2: range(24), 3: range(23)})
    page = parse_report(rows)

    assert page.find_row("Hours without logs")[:3] == ["4", "normal 0", "day before 0"]
