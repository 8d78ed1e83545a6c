"""The report: its contents, and that text from logs stays text."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from analytics.database import Database
from analytics.files import LocalFileSystem
from analytics.job import Span
from analytics.report.content import (
    REPORT_QUERIES,
    ReportData,
    TableQuery,
    format_axis_count,
    format_count,
    format_days,
    format_duration,
    format_share,
    format_size,
    format_text,
    load_report_data,
)
from analytics.report.outputs import render_report, write_report
from analytics.schema import TABLES
from analytics.settings import Settings
from tests.analytics.busy_day import BUSY_ROWS, DAY, FORMULA, HOSTILE, RUN_INFO, Rows, fill_columns, make_report_data
from tests.analytics.job_tables import fill_table

# Elements without an end tag.
_VOID_ELEMENTS = {"meta", "link", "img", "br"}


class ParsedPage(HTMLParser):
    """
    Parsed HTML page.

    :ivar tags: (tag, attributes) in order.
    :ivar texts: tag to the texts directly in it.
    :ivar rows: texts of the cells of each row of a table.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID_ELEMENTS:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def values(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, attributes in self.tags if (value := attributes.get(name)) is not None]

    def find_row(self, label: str) -> list[str]:
        """The first row whose first cell begins so: its other cells, without blanks that do not break."""
        row = next(row for row in self.rows if row[0].strip().startswith(label))
        return [cell.replace("\N{NO-BREAK SPACE}", " ").strip() for cell in row[1:]]


@pytest.fixture(scope="module")
def report_files() -> dict[str, bytes]:
    return render_report(make_report_data(BUSY_ROWS))


@pytest.fixture(scope="module")
def page(report_files: dict[str, bytes]) -> ParsedPage:
    return ParsedPage(report_files["index.html"])


def test_page_is_self_contained(page: ParsedPage, report_files: dict[str, bytes]) -> None:
    assert not page.open
    assert not {"script", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    linked = {value for value in page.values("href") if not value.startswith(("#", "data:"))}
    assert linked <= report_files.keys()
    assert not page.values("src")
    assert b"url(" not in re.sub(rb"url\(#", b"", report_files["index.html"])
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert (
        policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


def test_ids_are_unique_and_references_resolve(page: ParsedPage) -> None:
    """Also within charts."""
    ids = page.values("id")
    referenced = [value[1:] for value in page.values("href") if value.startswith("#")]
    referenced += [name for value in page.values("aria-labelledby") for name in value.split()]
    referenced += [value.removeprefix("url(#").removesuffix(")") for value in page.values("clip-path")]

    assert [name for name, times in Counter(ids).items() if times > 1] == []
    assert set(referenced) <= set(ids)


def test_integrity_errors_come_first(page: ParsedPage) -> None:
    assert page.texts["h1"] == ["Friday, 20 November 2026"]
    assert (
        page.texts["h2"][0]
        == "362 messages lost (normal: 23.5). The logs or a ledger are incomplete: explain what is "
        "CRITICAL before you rely on figures."
    )
    assert page.texts["h2"][1:6] == ["Overview", "Ledger and reconciliation", "Lost messages", "Anomalies", "Traffic"]
    assert len(page.texts["h2"]) == 21
    actions = [text for text in page.texts["strong"] if ":" in text]
    assert actions[:7] == [
        "Missing log lines: 5",
        "Message ledger, difference: 3",
        "Endings without acceptance: 2",
        "Vanished messages: 1",
        "Store ledgers, difference: 2",
        "Counters and log lines, difference: 4",
        "Messages lost: 362",
    ]
    assert page.texts["span"][:14] == ["CRITICAL"] * 7 + ["WARNING"] * 7
    values = dict(zip(page.texts["dt"], page.texts["dd"][::2], strict=True))
    assert values["Lost, acceptance logged"] == "360"
    assert values["Lost, acceptance not logged"] == "2"


def test_every_figure_has_an_explanation(page: ParsedPage) -> None:
    meanings = page.texts["dd"][1::2]

    assert len(meanings) == len(page.texts["dt"]) > 50
    assert all(text[0].isupper() and text.endswith(".") for text in meanings)


def test_charts_are_accessible(page: ParsedPage) -> None:
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]

    assert len(charts) == 15
    assert all(attributes["role"] == "img" for attributes in charts)
    assert len(page.texts["desc"]) == len(charts)
    assert len([tag for tag, _ in page.tags if tag == "details"]) == len(charts)
    assert "Messages accepted by hour on 2026-11-20; maximum 7,091 in the hour from 16:00 UTC." in page.texts["desc"]
    # Colours come from the style sheet, for light and dark; without it they are those of light mode.
    styles = "".join(page.values("style"))
    assert re.search(r"var\(--bad, #[0-9a-f]{6}\)", styles)
    assert "#" not in re.sub(r"var\(--[a-z-]+, #[0-9a-f]{6}\)|url\(#", "", styles)


def test_escapes_text_from_logs(page: ParsedPage, report_files: dict[str, bytes]) -> None:
    """In the page and, against formulas, in CSV files."""
    cells = page.texts["td"]
    assert cells.count(HOSTILE) == 5 + sum(row["store"] == HOSTILE for row in BUSY_ROWS["stores_daily"])
    assert f"{HOSTILE}$x^2$" in cells
    assert b"<script" not in report_files["index.html"]
    errors = list(csv.DictReader(report_files["errors_daily.csv"].decode().splitlines()))
    assert {row["mtype"] for row in errors} >= {f"'{FORMULA}", HOSTILE}
    assert "e" * 160 + "\N{HORIZONTAL ELLIPSIS}" == format_text("e" * 4000)


def test_marks_new_codes_and_small_groups(page: ParsedPage) -> None:
    cells = page.texts["td"]

    assert cells.count("new") == 2
    # Senders of one error, senders of replays, and twice the partners of `others`.
    assert cells.count("few") == 4


def test_csv_files_equal_tables(report_files: dict[str, bytes]) -> None:
    names = {name.removesuffix(".csv") for name in report_files if name.endswith(".csv")}
    assert names == REPORT_QUERIES.keys() - {"latency_hist", "inputs", "concurrency_10m"}
    for name in names:
        rows = list(csv.DictReader(report_files[f"{name}.csv"].decode().splitlines()))
        assert len(rows) == sum(row["dt"] == DAY for row in BUSY_ROWS[name])
        assert all(list(row) == [column.name for column in TABLES[name].columns] for row in rows)


def test_summary_has_checks_and_figures(report_files: dict[str, bytes]) -> None:
    summary = json.loads(report_files["summary.json"])

    assert (summary["day"], summary["final"], summary["state"]) == ("2026-11-20", False, "bad")
    assert summary["checks"] == {
        "ledger_difference": {"value": 3, "state": "bad"},
        "messages_orphans": {"value": 2, "state": "bad"},
        "messages_vanished": {"value": 1, "state": "bad"},
        "store_messages_off": {"value": 2, "state": "bad"},
        "reconciliation_difference": {"value": 4, "state": "bad"},
        "log_lines_missing": {"value": 5, "state": "bad"},
        "hours_without_log": {"value": 1, "state": "warn"},
        "log_lines_in_quarantine": {"value": 1, "state": "warn"},
        "messages_overdue": {"value": 3, "state": "warn"},
        "messages_lost": {"value": 362, "state": "warn"},
        "anomalies": {"value": 2, "state": "warn"},
        "wakeups_missed_share": {"value": 0.6, "state": "warn"},
        "push_devices_forgotten_share": {"value": 120 / 1100, "state": "warn"},
    }
    assert summary["figures"]["push"] == {
        "push_requests": 1100,
        "push_sent_share": 980 / 1100,
        "wakeups": 800,
        "wakeups_missed": 480,
        "wakeups_missed_share": 0.6,
        "wakeup_p50_ms": 2_500.0,
        "wakeup_p90_ms": 31_000.0,
        "wakeup_p99_ms": 1_900_000.0,
        "push_devices_forgotten": 120,
    }
    assert summary["figures"]["latency"]["push_live_p95_ms"] == 66.0
    assert summary["figures"]["quality"]["hours_without_log"] == 1
    assert len(summary["anomalies"]) == 2
    assert summary["overview"]["messages_lost"] == {
        "value": 362,
        "normal": 23.5,
        "day_before": 10,
        "nights": 28,
        "unusual": True,
        "section": "lost",
    }


def test_report_is_reproducible(report_files: dict[str, bytes]) -> None:
    assert render_report(make_report_data(BUSY_ROWS)) == report_files


LEDGER_ERRORS = ("difference", "orphans", "overdue", "vanished", "lost_unaccepted")


@pytest.mark.parametrize("column", ["difference", "orphans", "vanished"])
def test_ledger_error_makes_state_bad(column: str) -> None:
    ledger_row = {**BUSY_ROWS["ledger_daily"][-1], **dict.fromkeys(LEDGER_ERRORS, 0), column: 1}
    files = render_report(make_report_data({"ledger_daily": [ledger_row]}))
    assert json.loads(files["summary.json"])["state"] == "bad"


def test_report_does_not_depend_on_the_run(report_files: dict[str, bytes]) -> None:
    """Neither on its time, nor on its duration or days."""
    other = replace(RUN_INFO, span=Span(DAY, DAY), now=RUN_INFO.now + timedelta(hours=9), duration_s=1.0)
    assert render_report(replace(make_report_data(BUSY_ROWS), run_info=other)) == report_files


def test_state_is_good_without_findings() -> None:
    rows: Rows = {
        **BUSY_ROWS,
        "series_hourly": [{**row, "value": max(1.0, row["value"])} for row in BUSY_ROWS["series_hourly"]],
        "ledger_daily": [
            {**BUSY_ROWS["ledger_daily"][-1], **dict.fromkeys((*LEDGER_ERRORS, "expired", "evicted"), 0)}
        ],
        "stores_daily": [row for row in BUSY_ROWS["stores_daily"] if row["store"] != HOSTILE],
        "reconciliation_daily": [row for row in BUSY_ROWS["reconciliation_daily"] if not row["difference"]],
        "boots_daily": [row for row in BUSY_ROWS["boots_daily"] if not row["missing"]],
        "inputs": [{**row, "corrupt": 0} for row in BUSY_ROWS["inputs"]],
        "lost_daily": [],
        "anomalies": [],
        "push_daily": [row for row in BUSY_ROWS["push_daily"] if row["result"] == "sent"],
        "wakeups_daily": [{**row, "missed": row["n"] // 2} for row in BUSY_ROWS["wakeups_daily"]],
    }

    files = render_report(make_report_data(rows))

    assert json.loads(files["summary.json"])["state"] == "good"
    page = ParsedPage(files["index.html"])
    assert page.texts["h2"][0] == "No message was lost. The ledger balances and no check failed."
    assert "Nothing to do." in page.texts["p"]
    assert {"WARNING", "CRITICAL"}.isdisjoint(page.texts["span"][:14])


def make_push_states(requests: int, forgotten: int, missed: int) -> dict[str, str]:
    """States of the checks of push notifications, with as many wake-ups as requests."""
    pushes = [("push.wake", "sent", requests), ("push.forget", "UNREGISTERED", forgotten)]
    rows = {
        "push_daily": [
            {"event": event, "service": "fcm", "result": result, "n": n} for event, result, n in pushes if n
        ],
        "wakeups_daily": [{"service": "*", "n": requests, "missed": missed}] if requests else [],
    }
    data = make_report_data({name: [fill_columns(name, row) for row in each] for name, each in rows.items()})
    checks = json.loads(render_report(data)["summary.json"])["checks"]
    return {name: check["state"] for name, check in checks.items() if name.endswith("_share")}


@pytest.mark.parametrize(
    ("requests", "forgotten", "missed", "states"),
    [
        (100, 10, 50, ("good", "good")),
        (100, 10, 51, ("warn", "good")),
        (100, 11, 50, ("good", "warn")),
        (19, 19, 19, ("good", "good")),
        (20, 3, 11, ("warn", "warn")),
        (0, 0, 0, ()),
    ],
)
def test_warns_of_missed_wakeups_and_dead_tokens(
    requests: int, forgotten: int, missed: int, states: tuple[str, ...]
) -> None:
    """Above the thresholds of the settings, of at least 20; there is no check on days without push notifications."""
    assert tuple(make_push_states(requests, forgotten, missed).values()) == states


def test_unknown_store_ledger_is_neutral() -> None:
    """The store has too many messages to count, or the mediator reports no ledger."""
    unknown = [{**row, "total": None} for row in BUSY_ROWS["stores_daily"] if row["entry"] == "difference"]
    for rows, words in (([], "no ledger"), (unknown, "unknown")):
        files = render_report(make_report_data({**BUSY_ROWS, "stores_daily": rows}))
        page = ParsedPage(files["index.html"])
        assert page.find_row("Store ledgers, difference")[0] == words
        assert json.loads(files["summary.json"])["checks"]["store_messages_off"]["state"] == "plain"


def test_report_without_data() -> None:
    """No charts and no forecast, and a note about it."""
    files = render_report(make_report_data({}))
    page = ParsedPage(files["index.html"])

    assert "svg" not in {tag for tag, _ in page.tags}
    assert page.texts["h2"][0].startswith("No message ledger for this day.")
    assert page.find_row("Messages lost")[0] == page.find_row("Message ledger")[0] == "no ledger"
    assert any(
        note.startswith("Too little history (fewer than 14 days) for: messages acc") for note in page.texts["p"]
    )
    assert json.loads(files["summary.json"])["state"] == "warn"


# Counts that are never null.
NEVER_NULL = {"n", "hits", "value", "difference"}


def test_report_with_nulls_in_every_row() -> None:
    """All columns except keys and counts may be null."""
    tables_without_nulls = {"ledger_daily", "inputs", "forecast", "forecast_error", "anomalies", "concurrency_10m"}
    rows_with_nulls: Rows = {
        name: [
            {
                key: row[key] if name in tables_without_nulls or key in (*TABLES[name].key, *NEVER_NULL) else None
                for key in row
            }
            for row in rows
        ]
        for name, rows in BUSY_ROWS.items()
    }

    page = ParsedPage(render_report(make_report_data(rows_with_nulls))["index.html"])

    assert len(page.texts["h2"]) == 21


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The tables of the busy day, with an error of the day before."""
    yesterday = {**BUSY_ROWS["errors_daily"][0], "dt": DAY - timedelta(1), "n": 77_777}
    with Database(str(tmp_path_factory.mktemp("scratch"))) as database:
        for name in REPORT_QUERIES:
            fill_table(database, TABLES[name], [*BUSY_ROWS.get(name, []), *[yesterday] * (name == "errors_daily")])
        yield database


def test_writes_report_from_tables(database: Database, tmp_path: Path, report_files: dict[str, bytes]) -> None:
    """Only rows of the days that are needed are read."""
    path = write_report(LocalFileSystem(), database, str(tmp_path), DAY, Settings(), RUN_INFO)

    assert path == f"{tmp_path}/report/2026-11-20/index.html"
    written = {file.name: file.read_bytes() for file in Path(path).parent.iterdir()}
    assert written.keys() == report_files.keys()
    for name in written.keys() - {"index.html", "report.eml"}:
        assert sorted(written[name].splitlines()) == sorted(report_files[name].splitlines()), name
    assert ParsedPage(written["index.html"]).texts["desc"] == ParsedPage(report_files["index.html"]).texts["desc"]


def test_truncates_large_tables(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest rows are read, and the report has a note."""
    query = TableQuery(order=("n",), max_rows=2)
    monkeypatch.setitem(REPORT_QUERIES, "errors_daily", query)

    found = load_report_data(database, DAY, Settings(), RUN_INFO, ["errors_daily"])

    assert [row["n"] for row in found.rows["errors_daily"]] == [900, 900]
    assert found.truncated_tables == {"errors_daily"}
    notes = render_report(
        ReportData(DAY, Settings(), RUN_INFO, make_report_data(BUSY_ROWS).rows, found.truncated_tables)
    )["index.html"].decode()
    assert "Only the largest rows are shown of: errors_daily." in notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(None), "–"),
        (format_count(1_234_567), "1,234,567"),
        (format_count(0.25), "0.2"),
        (format_count(float("nan")), "–"),
        (format_size(0), "0 B"),
        (format_size(1536), "1.50 KiB"),
        (format_size(250 * 1024**3), "250 GiB"),
        (format_duration(0.5), "0.50 ms"),
        (format_duration(90_000), "1.50 min"),
        (format_duration(-5000), "-5 s"),
        (format_share(0), "0 %"),
        (format_share(0.0004), "0.04 %"),
        (format_share(0.995), "99.5 %"),
        (format_share(1.0), "100 %"),
        (format_days(None), "–"),
        (format_axis_count(15_000_000), "15 M"),
        (format_text(""), "–"),
    ],
)
def test_formats_numbers(text: str, expected: str) -> None:
    assert text.replace("\N{NO-BREAK SPACE}", " ") == expected
