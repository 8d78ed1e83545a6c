"""
Outputs of a report: `index.html`, `summary.json`, `report.eml`, a CSV file for each table, and a file for Prometheus.

`report.eml` is the report as a message to mail: text, HTML without style sheets, and charts as PNG.

The file for Prometheus is read by the textfile collector of the node exporter. Its gauges have no timestamps, which
the collector would refuse. It is replaced atomically, only after a run that published results, so alerts see the last
successful run and its age.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, timedelta
from email import policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from analytics.database import Database
from analytics.files import FileSystem
from analytics.jobs.time_series import METRICS
from analytics.report.content import REPORT_QUERIES, ReportData, Row, Section, load_report_data
from analytics.report.message_sections import (
    make_errors_section,
    make_latency_section,
    make_limits_section,
    make_lost_section,
    make_queues_section,
    make_replay_section,
    make_traffic_section,
    select_lost_rows,
)
from analytics.report.operations_sections import (
    make_anomalies_section,
    make_cost_section,
    make_forecast_section,
    make_nodes_section,
    make_push_section,
    make_recipients_section,
    make_sessions_section,
    make_talkers_section,
)
from analytics.report.overview_sections import (
    Overview,
    make_checks,
    make_integrity_section,
    make_overview,
    make_provenance_section,
    make_quality_section,
    make_words_section,
)
from analytics.schema import TABLES
from analytics.settings import Settings
from analytics.writing.runs import RunInfo

_TEMPLATE_DIRECTORY = Path(__file__).with_name("templates")
# Read as sums only.
_TABLES_WITHOUT_CSV = {"latency_hist", "inputs", "concurrency_10m"}
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def write_report(
    files: FileSystem, database: Database, out: str, day: date, settings: Settings, facts: RunInfo
) -> str:
    """
    Write the report of a day into `OUT/report/<day>/`.

    :return: path of its index.html.
    """
    folder = f"{out}/report/{day}"
    files.make_directories(folder)
    for name, content in render_report(load_report_data(database, day, settings, facts)).items():
        files.write(f"{folder}/{name}", content)
    return f"{folder}/index.html"


def render_report(data: ReportData) -> dict[str, bytes]:
    """Render the files of a report, by name; a pure function of the data."""
    sections = _make_sections(data)
    overview = make_overview(data, sections)
    tables = {
        name: _render_csv(name, data.get_rows(name)) for name in REPORT_QUERIES if name not in _TABLES_WITHOUT_CSV
    }
    return {
        "index.html": _render_html(data, overview, sections).encode(),
        "report.eml": _render_mail(data, overview, sections),
        "summary.json": _render_summary(data, overview, sections),
        **{f"{name}.csv": content.encode() for name, content in tables.items()},
    }


def _make_sections(data: ReportData) -> list[Section]:
    """Sections, problems first."""
    return [
        make_integrity_section(data),
        make_lost_section(data),
        make_anomalies_section(data),
        make_traffic_section(data),
        make_latency_section(data),
        make_queues_section(data),
        make_errors_section(data),
        make_limits_section(data),
        make_replay_section(data),
        make_talkers_section(data),
        make_recipients_section(data),
        make_sessions_section(data),
        make_push_section(data),
        make_nodes_section(data),
        make_cost_section(data),
        make_forecast_section(data),
        make_quality_section(data),
        make_provenance_section(data),
        make_words_section(data),
    ]


def _render_html(data: ReportData, overview: Overview, sections: Sequence[Section]) -> str:
    style = Markup(_TEMPLATE_DIRECTORY.joinpath("style.css").read_text(encoding="utf-8"))  # nosec B704 # a file of ours
    titles = {section.id: section.title for section in sections}
    return _render_template(
        "report.html", data, overview, sections, titles=titles, run_info=data.run_info, style=style, safe=Markup
    )


def _render_template(
    name: str, data: ReportData, overview: Overview, sections: Sequence[Section], **variables: object
) -> str:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE_DIRECTORY),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(
        day=data.day,
        final=data.run_info.is_final(data.day),
        final_on=data.day + timedelta(data.settings.look_back_days),
        overview=overview,
        sections=sections,
        **variables,
    )


# Sections whose first chart is in the mail.
_MAIL_CHARTS = ("lost", "traffic", "latency", "queues", "errors")
_MAIL_ROWS = 10


def _render_mail(data: ReportData, overview: Overview, sections: Sequence[Section]) -> bytes:
    """
    The overview, the main charts, and the tables of the sections to look at, as a message without addresses.

    Mail clients drop SVG and data: URIs, so charts are parts of the message; it also reads well without them. Without
    a date, a message id and random boundaries, the same data give the same bytes: the mail server adds the first two.
    """
    by_id = {section.id: section for section in sections}
    charts = [chart for name in _MAIL_CHARTS for chart in by_id[name].charts[:1]]
    wanted = {figure.section for figure in overview.actions}
    content_ids = [f"chart{number}.{data.day}@mediatord.invalid" for number in range(len(charts))]
    state, verdict = overview.verdict
    subject = f"{_STATE_NAMES[state]}: {verdict.partition('. ')[0]}, mediator {data.day}"
    shown = [section for section in sections if section.id in wanted]
    titles = {section.id: section.title for section in sections}
    message = EmailMessage(policy.default)
    message["Subject"] = subject
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(_render_template("mail.txt", data, overview, shown), cte="quoted-printable")
    message.add_alternative(
        _render_template(
            "mail.html",
            data,
            overview,
            shown,
            titles=titles,
            subject=subject,
            charts=charts,
            content_ids=content_ids,
            most_rows=_MAIL_ROWS,
        ),
        subtype="html",
        cte="quoted-printable",
    )
    page = message.get_payload(1)
    assert isinstance(page, EmailMessage)  # made by add_alternative
    for chart, content_id in zip(charts, content_ids, strict=True):
        page.add_related(chart.render_png(), "image", "png", cid=f"<{content_id}>", filename=f"{content_id}.png")
    for number, part in enumerate(part for part in message.walk() if part.is_multipart()):
        part.set_boundary(f"=_mediatord_{data.day}_{number}")
    return message.as_bytes()


_STATE_NAMES = {"good": "OK", "warn": "WARNING", "bad": "CRITICAL"}


def _render_summary(data: ReportData, overview: Overview, sections: Iterable[Section]) -> bytes:
    state, sentence = overview.verdict
    description = {
        "day": data.day,
        "final": data.run_info.is_final(data.day),
        "version": data.run_info.version,
        "state": state,
        "verdict": sentence,
        "checks": {check.key: {"value": check.value, "state": check.state} for check in make_checks(data)},
        "overview": {
            figure.key: {
                "value": figure.value,
                "normal": figure.normal and figure.normal.median,
                "day_before": figure.normal and figure.normal.before,
                "nights": figure.normal and figure.normal.nights,
                "unusual": figure.is_unusual,
                "section": figure.section,
            }
            for figure in overview.figures
        },
        "figures": {
            section.id: {figure.key: figure.value for figure in section.figures}
            for section in sections
            if section.figures
        },
        "anomalies": [row["reason"] for row in data.get_rows("anomalies")],
    }
    return json.dumps(description, indent=1, default=str).encode() + b"\n"


def _render_csv(name: str, rows: Iterable[Row]) -> str:
    """All declared columns, with a header."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    columns = [column.name for column in TABLES[name].columns]
    lines.writerow(columns)
    lines.writerows([_escape_formula(row[column]) for column in columns] for row in rows)
    return text.getvalue()


def _escape_formula(value: Any) -> Any:
    """Prevent spreadsheets from evaluating text as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_PREFIXES) else value


_TEXTFILE_TABLES = (
    *("ledger_daily", "lost_daily", "latency_daily", "reconciliation_daily", "boots_daily", "inputs", "anomalies"),
    *("forecast", "errors_daily", "queue_risk", "queue_hourly"),
)
_QUANTILE_COLUMNS = {"p50_ms": "0.5", "p90_ms": "0.9", "p95_ms": "0.95", "p99_ms": "0.99"}
_MESSAGE_STATES = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open")
_FORECAST_DAYS = 30


def write_textfile(database: Database, day: date, path: str, facts: RunInfo) -> None:
    """
    Replace the file.

    :param path: local, in the directory of the collector; ends in `.prom`.
    :raise OSError: it is not writable; an existing file stays.
    """
    replace_textfile(
        Path(path),
        generate_latest(make_registry(load_report_data(database, day, Settings(), facts, _TEXTFILE_TABLES))),
    )


def replace_textfile(path: Path, content: bytes) -> None:
    """
    Replace the file atomically, readable by all whatever the umask: the node exporter is another user.

    :raise OSError: it is not writable; an existing file stays.
    """
    # The collector ignores files with other suffixes.
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        # nosemgrep: open-to-others  figures without secrets, which the node exporter reads as another user
        draft.chmod(0o644)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def make_registry(data: ReportData) -> CollectorRegistry:
    """All gauges of a day."""
    gauges = _GaugeRegistry(CollectorRegistry())
    _add_run_gauges(gauges, data)
    _add_integrity_gauges(gauges, data)
    _add_message_gauges(gauges, data)
    _add_forecast_gauges(gauges, data)
    return gauges.registry


class _GaugeRegistry:
    """:ivar registry: separate from the process's default registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def set_gauge(self, name: str, meaning: str, value: float | None) -> None:
        """Set a gauge without labels, if the value is known."""
        if value is not None:
            Gauge(f"mediatord_{name}", meaning, registry=self.registry).set(value)

    def add_gauges(
        self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
    ) -> None:
        """:param values: label values and values; equal labels are summed."""
        gauge = Gauge(f"mediatord_{name}", meaning, labels, registry=self.registry)
        for of, value in values:
            if value is not None:
                gauge.labels(*of).inc(value)


def _add_run_gauges(gauges: _GaugeRegistry, data: ReportData) -> None:
    name = "analytics_last_success_timestamp_seconds"
    gauges.set_gauge(name, "Time at which the last successful run finished", data.run_info.now.timestamp())
    gauges.set_gauge(
        "analytics_day_timestamp_seconds",
        "Start of the analysed day, midnight UTC",
        (data.day.toordinal() - date(1970, 1, 1).toordinal()) * 86_400,
    )
    gauges.set_gauge(
        "analytics_run_duration_seconds", "Duration of the last successful run", data.run_info.duration_s
    )
    gauges.set_gauge("analytics_segments", "Log segments of the day", data.sum_column("inputs", "segments"))


def _add_integrity_gauges(gauges: _GaugeRegistry, data: ReportData) -> None:
    ledger = data.get_row("ledger_daily")
    gauges.set_gauge(
        "analytics_corrupt_lines", "Log lines of the day that are not events", data.sum_column("inputs", "corrupt")
    )
    gauges.set_gauge(
        "analytics_seq_missing", "Log lines of the day that are missing", data.sum_column("boots_daily", "missing")
    )
    gauges.set_gauge(
        "analytics_seq_doubled", "Duplicate log lines of the day", data.sum_column("boots_daily", "doubled")
    )
    difference = ledger.get("difference")
    gauges.set_gauge("analytics_ledger_difference", "Difference of the message ledger", difference)
    gauges.set_gauge(
        "analytics_ledger_orphans", "Messages that ended without a logged acceptance", ledger.get("orphans")
    )
    gauges.set_gauge(
        "analytics_ledger_vanished",
        "Messages overdue while the daemon ran, without a logged ending",
        ledger.get("vanished"),
    )
    gauges.set_gauge("analytics_ledger_overdue", "Open messages past their expiry", ledger.get("overdue"))
    gauges.set_gauge(
        "analytics_reconciliation_difference",
        "Difference between the daemon's counters and its log lines, summed over counters and nodes",
        sum(abs(row["difference"]) for row in data.get_rows("reconciliation_daily")),
    )


def _add_message_gauges(gauges: _GaugeRegistry, data: ReportData) -> None:
    ledger = data.get_row("ledger_daily")
    states = [((state,), ledger.get(state)) for state in _MESSAGE_STATES]
    gauges.add_gauges("day_messages", "Messages of the day by state", ["state"], states)
    lost = [((row["reason"],), row["n"]) for row in select_lost_rows(data)]
    gauges.add_gauges("day_messages_lost", "Messages lost, by reason", ["reason"], lost)
    unaccepted = ledger.get("lost_unaccepted")
    gauges.set_gauge("day_messages_lost_unaccepted", "Messages lost without a logged acceptance", unaccepted)
    latencies = [
        ((quantile, row["path"]), row[column] / 1000)
        for row in data.get_rows("latency_daily")
        if row["node"] == "*" and row["metric"] == "push" and row["path"] != "*"
        for column, quantile in _QUANTILE_COLUMNS.items()
        if row[column] is not None
    ]
    gauges.add_gauges(
        "day_latency_seconds", "Time from acceptance to delivery, by path", ["quantile", "path"], latencies
    )
    gauges.set_gauge("day_requests_refused", "Requests refused or failed", data.sum_column("errors_daily", "n"))
    new = {row["code"] for row in data.get_rows("errors_daily") if row["is_new"]}
    gauges.set_gauge("day_error_codes_new", "Error codes not seen on any earlier day", len(new))
    gauges.set_gauge("day_anomalies", "Anomalies of the day", len(data.get_rows("anomalies")))


def _add_forecast_gauges(gauges: _GaugeRegistry, data: ReportData) -> None:
    depths = [row["depth_max"] for row in data.get_rows("queue_hourly") if row["depth_max"] is not None]
    gauges.set_gauge("day_queue_depth_max", "Maximum number of queued messages", max(depths, default=None))
    fullest = [row["days_to_cap"] for row in data.get_rows("queue_risk") if row["days_to_cap"] is not None]
    soonest = min(fullest, default=None)
    gauges.set_gauge(
        "day_queue_days_to_capacity", "Days until the first queue is full at its growth of the day", soonest
    )
    highest: dict[str, Row] = {}
    for row in data.get_rows("forecast"):
        if (row["day"] - data.day).days <= _FORECAST_DAYS and row["metric"] in METRICS:
            highest[row["metric"]] = max(row, highest.get(row["metric"], row), key=lambda each: each["value"])
    meaning = "Highest expected day of the next 30, and its 80 % interval"
    ends = [((metric, end), row[end]) for metric, row in highest.items() for end in ("value", "low", "high")]
    gauges.add_gauges("forecast_highest_day", meaning, ["metric", "end"], ends)
