"""The report: what it says of a day, and that nothing from the logs is more than text in it."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from analytics.job import Span
from analytics.reading.files import FileSystem
from analytics.report.content import (
    REPORT_QUERIES,
    ReportData,
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
from analytics.writing.warehouse import Warehouse
from tests.analytics.busy_day import BUSY, DAY, FACTS, FORMULA, HOSTILE, Rows, known

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Without an end tag.
_VOID = {"meta", "link"}


class Page(HTMLParser):
    """
    What a browser would make of a page.

    :ivar tags: (tag, attributes) in order.
    :ivar texts: tag to the texts directly in it.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())

    def values(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, attributes in self.tags if (value := attributes.get(name)) is not None]


@pytest.fixture(scope="module")
def busy() -> dict[str, bytes]:
    return render_report(known(BUSY))


@pytest.fixture(scope="module")
def page(busy: dict[str, bytes]) -> Page:
    return Page(busy["index.html"])


def test_it_is_one_file_that_asks_nobody_for_anything(page: Page, busy: dict[str, bytes]) -> None:
    assert not page.open
    assert not {"script", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    beside = {value for value in page.values("href") if not value.startswith(("#", "data:"))}
    assert beside <= busy.keys()
    assert not page.values("src")
    assert b"url(" not in re.sub(rb"url\(#", b"", busy["index.html"])
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert (
        policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


def test_places_within_the_page(page: Page) -> None:
    """Ids are there once, also those of charts; whatever is pointed at is there."""
    ids = page.values("id")
    pointed = [value[1:] for value in page.values("href") if value.startswith("#")]
    pointed += [name for value in page.values("aria-labelledby") for name in value.split()]
    pointed += [value.removeprefix("url(#").removesuffix(")") for value in page.values("clip-path")]

    assert [name for name, times in Counter(ids).items() if times > 1] == []
    assert set(pointed) <= set(ids)


def test_problems_come_first(page: Page) -> None:
    assert page.texts["h1"] == ["Friday, 20 November 2026"]
    assert (
        page.texts["h2"][0]
        == "Integrity errors: explain the checks marked CRITICAL before you rely on other figures."
    )
    assert page.texts["h2"][1:5] == ["Ledger and reconciliation", "Lost messages", "Anomalies", "Traffic"]
    assert len(page.texts["h2"]) == 18
    shown = dict(zip(page.texts["dt"], page.texts["dd"][::2], strict=True))
    assert shown["Message ledger"] == "difference 3"
    assert shown["Endings without acceptance"] == "2"
    assert shown["Vanished messages"] == "1"
    assert shown["Store ledgers"] == "difference 2"
    assert shown["Counters and log lines"] == "difference 4"
    assert shown["Missing log lines"] == "5"
    assert shown["Quarantined lines"] == "1"
    assert shown["Lost, acceptance logged"] == "360"
    assert shown["Lost, acceptance not logged"] == "2"
    lost = [
        said for label, said in zip(page.texts["dt"], page.texts["dd"][::2], strict=True) if label == "Messages lost"
    ]
    assert lost == ["362, 2 of them without a logged acceptance", "362"]
    assert page.texts["span"][:9] == ["CRITICAL"] * 6 + ["WARNING"] * 3


def test_every_number_has_a_sentence(page: Page) -> None:
    meanings = page.texts["dd"][1::2]

    assert len(meanings) == len(page.texts["dt"]) > 50
    assert all(text[0].isupper() and text.endswith(".") for text in meanings)


def test_charts_can_be_read_without_being_seen(page: Page) -> None:
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]

    assert len(charts) == 15
    assert all(attributes["role"] == "img" for attributes in charts)
    assert len(page.texts["desc"]) == len(charts)
    assert len([tag for tag, _ in page.tags if tag == "details"]) == len(charts)
    assert "Messages accepted by hour on 2026-11-20; maximum 7,091 in the hour from 16:00 UTC." in page.texts["desc"]
    # Colours are those of the style sheet, which has them for light and dark.
    assert not re.search(r"#0000|#[0-9a-f]{6}", "".join(page.values("style")))


def test_what_strings_from_logs_do(page: Page, busy: dict[str, bytes]) -> None:
    """They are text in the page, and no formulas in a spreadsheet."""
    cells = page.texts["td"]
    assert cells.count(HOSTILE) == 4 + sum(row["store"] == HOSTILE for row in BUSY["stores_daily"])
    assert f"{HOSTILE}$x^2$" in cells
    assert b"<script" not in busy["index.html"]
    errors = list(csv.DictReader(busy["errors_daily.csv"].decode().splitlines()))
    assert {row["mtype"] for row in errors} >= {f"'{FORMULA}", HOSTILE}
    assert "e" * 160 + "\N{HORIZONTAL ELLIPSIS}" == format_text("e" * 4000)


def test_new_codes_and_small_groups(page: Page) -> None:
    cells = page.texts["td"]

    assert cells.count("new") == 2
    # Senders of one error, senders of the repeated requests, partners of the others, twice.
    assert cells.count("few") == 4


def test_csv_files_are_the_tables(busy: dict[str, bytes]) -> None:
    names = {name.removesuffix(".csv") for name in busy if name.endswith(".csv")}
    assert names == REPORT_QUERIES.keys() - {"latency_hist", "inputs", "concurrency_10m"}
    for name in names:
        rows = list(csv.DictReader(busy[f"{name}.csv"].decode().splitlines()))
        assert len(rows) == sum(row["dt"] == DAY for row in BUSY[name])
        assert all(list(row) == [column.name for column in TABLES[name].columns] for row in rows)


def test_the_summary(busy: dict[str, bytes]) -> None:
    summary = json.loads(busy["summary.json"])

    assert (summary["day"], summary["final"], summary["state"]) == ("2026-11-20", False, "bad")
    assert summary["checks"] == {
        "ledger_difference": {"value": 3, "state": "bad"},
        "messages_orphans": {"value": 2, "state": "bad"},
        "messages_vanished": {"value": 1, "state": "bad"},
        "store_messages_off": {"value": 2, "state": "bad"},
        "reconciliation_difference": {"value": 4, "state": "bad"},
        "log_lines_missing": {"value": 5, "state": "bad"},
        "log_lines_in_quarantine": {"value": 1, "state": "warn"},
        "messages_lost": {"value": 362, "state": "warn"},
        "anomalies": {"value": 2, "state": "warn"},
    }
    assert summary["figures"]["latency"]["push_live_p95_ms"] == 66.0
    assert summary["figures"]["quality"]["hours_without_log"] == 1
    assert len(summary["anomalies"]) == 2


def test_the_same_day_makes_the_same_bytes(busy: dict[str, bytes]) -> None:
    assert render_report(known(BUSY)) == busy


BROKEN_BOOKS = ("difference", "orphans", "overdue", "vanished", "lost_unaccepted")


@pytest.mark.parametrize("column", ["difference", "orphans", "vanished"])
def test_any_of_these_makes_the_day_bad(column: str) -> None:
    books = {**BUSY["ledger_daily"][-1], **dict.fromkeys(BROKEN_BOOKS, 0), column: 1}
    files = render_report(known({"ledger_daily": [books]}))
    assert json.loads(files["summary.json"])["state"] == "bad"


def test_the_same_input_makes_the_same_report_in_every_run(busy: dict[str, bytes]) -> None:
    """Nothing of the run itself is in it: neither its time nor how long it took or which days it made."""
    other = replace(FACTS, span=Span(DAY, DAY), now=FACTS.now + timedelta(hours=9), duration_s=1.0)
    assert render_report(replace(known(BUSY), run_info=other)) == busy


def test_a_day_with_nothing_wrong() -> None:
    good: Rows = {
        **BUSY,
        "ledger_daily": [{**BUSY["ledger_daily"][-1], **dict.fromkeys(BROKEN_BOOKS, 0)}],
        "stores_daily": [row for row in BUSY["stores_daily"] if row["store"] != HOSTILE],
        "reconciliation_daily": [row for row in BUSY["reconciliation_daily"] if not row["difference"]],
        "boots_daily": [row for row in BUSY["boots_daily"] if not row["missing"]],
        "inputs": [{**row, "corrupt": 0} for row in BUSY["inputs"]],
        "lost_daily": [],
        "anomalies": [],
    }

    files = render_report(known(good))

    assert json.loads(files["summary.json"])["state"] == "good"
    page = Page(files["index.html"])
    assert page.texts["h2"][0] == "The ledger balances and no check failed."
    assert page.texts["span"][:9] == ["OK"] * 9


def test_books_of_a_store_that_are_not_known() -> None:
    """Too many messages to be counted, or a mediator that does not tell: that is said, and nothing is broken."""
    unknown = [{**row, "total": None} for row in BUSY["stores_daily"] if row["entry"] == "difference"]
    for rows, words in (([], "no ledger"), (unknown, "unknown")):
        files = render_report(known({**BUSY, "stores_daily": rows}))
        page = Page(files["index.html"])
        shown = dict(zip(page.texts["dt"], page.texts["dd"][::2], strict=True))
        assert shown["Store ledgers"] == words
        assert json.loads(files["summary.json"])["checks"]["store_messages_off"]["state"] == "plain"


def test_a_day_without_anything() -> None:
    """The first day ever, or one on which all were down: no charts, no forecast, and the report says so."""
    files = render_report(known({}))
    page = Page(files["index.html"])

    assert "svg" not in {tag for tag, _ in page.tags}
    assert "no ledger" in page.texts["dd"]
    assert any(
        note.startswith("Too little history (fewer than 14 days) for: messages acc") for note in page.texts["p"]
    )
    assert json.loads(files["summary.json"])["state"] == "warn"


# Counts that jobs make.
NEVER_NULL = {"n", "hits", "value", "difference"}


def test_a_day_with_holes_in_every_row() -> None:
    """Beside keys and counts anything may be null, and is not in the way of a report."""
    whole = {"ledger_daily", "inputs", "forecast", "forecast_error", "anomalies", "concurrency_10m"}
    holes: Rows = {
        name: [
            {key: row[key] if name in whole or key in (*TABLES[name].key, *NEVER_NULL) else None for key in row}
            for row in rows
        ]
        for name, rows in BUSY.items()
    }

    page = Page(render_report(known(holes))["index.html"])

    assert len(page.texts["h2"]) == 18


WRITTEN = ("errors_daily", "inputs", "latency_hist", "concurrency_10m", "series_hourly", "ledger_daily")


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Warehouse, FileSystem, Path]:
    """A directory of results with some tables of the busy day, and an error of the day before."""
    out = tmp_path_factory.mktemp("out")
    yesterday = {**BUSY["errors_daily"][0], "dt": DAY - timedelta(1), "n": 77_777}
    for name in WRITTEN:
        struct = TABLES[name].struct()
        rows = [*BUSY[name], *([yesterday] if name == "errors_daily" else [])]
        frame = spark.createDataFrame([tuple(row[column] for column in struct.names) for row in rows], struct)
        frame.coalesce(1).write.partitionBy("dt").parquet(f"{out}/tables/{name}")
    files = FileSystem(spark)
    return Warehouse(spark, files, str(out)), files, out


def test_read_and_written(warehouse: tuple[Warehouse, FileSystem, Path]) -> None:
    """It reads what is there and of the day; tables without rows are empty."""
    tables, files, out = warehouse

    path = write_report(files, tables, str(out), DAY, Settings(), FACTS)

    assert path == f"{out}/report/2026-11-20/index.html"
    expected = render_report(known({name: BUSY[name] for name in WRITTEN}))
    written = {file.name: file.read_bytes() for file in Path(path).parent.iterdir()}
    assert written.keys() == expected.keys()
    for name in written.keys() - {"index.html"}:
        assert sorted(written[name].splitlines()) == sorted(expected[name].splitlines()), name
    assert Page(written["index.html"]).texts["desc"] == Page(expected["index.html"]).texts["desc"]


def test_what_is_too_much_is_cut(
    warehouse: tuple[Warehouse, FileSystem, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows with most are read, and the report says that there are more."""
    from analytics.report.content import TableQuery

    few = TableQuery(order=("n",), max_rows=2)
    monkeypatch.setitem(REPORT_QUERIES, "errors_daily", few)

    found = load_report_data(warehouse[0], DAY, Settings(), FACTS, ["errors_daily"])

    assert [row["n"] for row in found.rows["errors_daily"]] == [900, 900]
    assert found.truncated_tables == {"errors_daily"}
    notes = render_report(ReportData(DAY, Settings(), FACTS, known(BUSY).rows, found.truncated_tables))[
        "index.html"
    ].decode()
    assert "Only the largest rows are shown of: errors_daily." in notes


@pytest.mark.parametrize(
    ("told", "expected"),
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
def test_numbers(told: str, expected: str) -> None:
    assert told.replace("\N{NO-BREAK SPACE}", " ") == expected
