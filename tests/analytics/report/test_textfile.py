"""The metrics file for the node exporter, and the alerts on its metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from analytics.database import Database
from analytics.report.content import REPORT_QUERIES
from analytics.report.outputs import make_registry, write_textfile
from analytics.schema import TABLES
from tests.analytics.busy_day import BUSY_ROWS, DAY, RUN_INFO, make_report_data
from tests.analytics.job_tables import fill_table

RULES = Path(__file__).parents[3] / "etc" / "prometheus" / "mediatord-analytics.rules.yml"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def text() -> str:
    return generate_latest(make_registry(make_report_data(BUSY_ROWS))).decode()


def test_exports_figures_of_the_day(text: str) -> None:
    found = parse_samples(text)

    def get_value(name: str, **labels: str) -> float:
        return found[f"mediatord_{name}", tuple(sorted(labels.items()))]

    assert get_value("analytics_last_success_timestamp_seconds") == RUN_INFO.now.timestamp()
    assert get_value("analytics_day_timestamp_seconds") == 1_795_132_800
    assert get_value("analytics_run_duration_seconds") == 46.6
    assert get_value("analytics_segments") == 24
    assert get_value("analytics_corrupt_lines") == 1
    assert get_value("analytics_seq_missing") == 5
    assert get_value("analytics_seq_doubled") == 1
    assert get_value("analytics_ledger_difference") == 3
    assert get_value("analytics_ledger_orphans") == 2
    assert get_value("analytics_ledger_overdue") == 3
    assert get_value("analytics_ledger_vanished") == 1
    assert get_value("day_messages_lost_unaccepted") == 2
    assert get_value("analytics_reconciliation_difference") == 4
    assert get_value("day_messages", state="accepted") == 96_000
    assert get_value("day_messages", state="open") == 13_697
    # Two rows, of different size classes.
    assert get_value("day_messages_lost", reason="ttl") == 210
    assert get_value("day_messages_lost", reason="fifo_count") == 150
    assert get_value("day_latency_seconds", quantile="0.95", path="live") == 0.066
    assert get_value("day_requests_refused") == 2701
    assert get_value("day_error_codes_new") == 2
    assert get_value("day_anomalies") == 2
    assert get_value("day_queue_depth_max") == 13_000
    assert get_value("day_queue_days_to_capacity") == 0.8
    expected = [row for row in BUSY_ROWS["forecast"] if row["metric"] == "depth_max"]
    highest = max(expected, key=lambda row: row["value"])
    assert get_value("forecast_highest_day", metric="depth_max", end="value") == highest["value"]
    assert get_value("forecast_highest_day", metric="depth_max", end="high") == highest["high"]


def test_exports_only_documented_gauges(text: str) -> None:
    """Without timestamps and without metrics of the writing process."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]

    assert all(re.fullmatch(r"mediatord_\w+(\{[^}]*\})? [-+.\de]+", line) for line in lines)
    assert all(family.type == "gauge" and family.documentation for family in text_string_to_metric_families(text))


def test_omits_unknown_figures() -> None:
    found = parse_samples(generate_latest(make_registry(make_report_data({}))).decode())

    assert found["mediatord_analytics_last_success_timestamp_seconds", ()] > 0
    assert not any(name.startswith(("mediatord_analytics_ledger", "mediatord_forecast")) for name, _ in found)


def test_replaces_file_atomically(tmp_path: Path) -> None:
    """A failure leaves the file of the day before."""
    path = tmp_path / "collector" / "mediatord-analytics.prom"
    path.parent.mkdir()
    path.write_text("the day before\n")
    with Database(str(tmp_path)) as database:
        with pytest.raises(duckdb.CatalogException, match="does not exist"):
            write_textfile(database, DAY, str(path), RUN_INFO)
        assert path.read_text() == "the day before\n"

        for name in REPORT_QUERIES:
            fill_table(database, TABLES[name], BUSY_ROWS["ledger_daily"] if name == "ledger_daily" else ())
        write_textfile(database, DAY, str(path), RUN_INFO)

    assert parse_samples(path.read_text())["mediatord_analytics_ledger_difference", ()] == 3
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_alerts_use_existing_metrics(text: str) -> None:
    """An alert on a missing metric never fires."""
    exported = {family.name for family in text_string_to_metric_families(text)}
    rules: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]

    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        used = set(re.findall(r"mediatord_\w+", rule["expr"]))
        assert used and used <= exported, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_alerts_use_existing_label_values(text: str) -> None:
    found = parse_samples(text)
    for name, matchers in re.findall(r"(mediatord_\w+)\{([^}]*)\}", RULES.read_text()):
        for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', matchers):
            values = [dict(labels).get(label, "") for series, labels in found if series == name]
            assert any(
                re.fullmatch(value, label_value) if operator == "=~" else label_value == value
                for label_value in values
            ), (
                name,
                label,
            )
