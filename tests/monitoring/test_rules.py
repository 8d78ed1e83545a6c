"""Alert rules and dashboard: validation by `promtool`, and conventions."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.external_programs import find_program
from tests.monitoring.promql_expressions import (
    DASHBOARD,
    ETC,
    RULES,
    find_metric_names,
    list_panel_queries,
    list_panels,
    load_alert_rules,
    load_dashboard,
)

CASES = Path(__file__).with_name("alerts.yml")


def run_promtool(*arguments: str | Path, folder: Path | None = None) -> str:
    """
    Run `promtool`; return its output.

    :raise AssertionError: it reports an error.

    :raise AssertionError: it has something to find fault with.
    """
    completed = subprocess.run(
        [find_program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_rules_are_valid(rules: Path) -> None:
    assert "SUCCESS" in run_promtool("check", "rules", rules)


def test_example_configuration_is_valid() -> None:
    """With the rules beside it."""
    output = run_promtool("check", "config", ETC / "prometheus" / "prometheus.yml")
    assert f"{len(RULES)} rule files found" in output and "FAILED" not in output


def test_alerts_fire_in_cases(tmp_path: Path) -> None:
    """The cases of `alerts.yml`, with the rules as shipped."""
    shutil.copy(CASES, tmp_path)
    shutil.copy(RULES[0], tmp_path)
    run_promtool("test", "rules", CASES.name, folder=tmp_path)


@pytest.mark.exhaustive
def test_case_fails_if_alert_does_not_fire(tmp_path: Path) -> None:
    """With the cases of one alert only, because all of them take long."""
    cases = yaml.safe_load(CASES.read_text("utf-8"))
    cases["tests"] = [case for case in cases["tests"] if "MediatordStoreDown" in str(case)]
    (tmp_path / CASES.name).write_text(yaml.safe_dump(cases), encoding="utf-8")
    wrong_rules = RULES[0].read_text("utf-8").replace("mediator_storage_up == 0", "mediator_storage_up == 2")
    (tmp_path / RULES[0].name).write_text(wrong_rules, encoding="utf-8")
    with pytest.raises(AssertionError, match="MediatordStoreDown"):
        run_promtool("test", "rules", CASES.name, folder=tmp_path)


def test_every_daemon_alert_has_a_case() -> None:
    firing = set(re.findall(r'alertname="(\w+)"', CASES.read_text("utf-8")))
    daemon_alerts = set(re.findall(r"alert: (\w+)", RULES[0].read_text("utf-8")))
    mentioned = firing | set(re.findall(r"alertname: (\w+)", CASES.read_text("utf-8")))
    assert daemon_alerts <= mentioned


def test_alerts_have_severity_and_annotations() -> None:
    for name, rule in load_alert_rules().items():
        assert name.startswith("Mediatord"), name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith("."), name


def test_alerts_link_to_their_runbooks() -> None:
    """Each alert has a section with its severity, and no other sections exist."""
    page = (ETC.parent / "docs/runbooks/alerts.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)\n\n\*(\w+)\.\* ", page, re.M)
    assert sorted(sections) == sorted((name, rule["labels"]["severity"]) for name, rule in load_alert_rules().items())
    assert len(sections) == page.count("\n### ")
    for name, rule in load_alert_rules().items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/alerts.md#{name.lower()}"


def test_panels_have_title_description_unit_and_variables() -> None:
    titles = [panel["title"] for _, panel in list_panels()]
    assert len(titles) == len(set(titles))
    for row, panel in list_panels():
        assert row and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            exported = [
                name for name in find_metric_names(target["expr"]) if name.startswith(("mediator_", "process_"))
            ]
            assert not exported or target["expr"].count('instance=~"$node"') >= len(exported), target["expr"]


def test_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in load_dashboard()["panels"]]
    assert len(ids) == len(set(ids))

    def corners(panel: dict[str, Any]) -> tuple[int, int, int, int]:
        at = panel["gridPos"]
        return at["x"], at["y"], at["x"] + at["w"], at["y"] + at["h"]

    for panel, other_panel in combinations(load_dashboard()["panels"], 2):
        left, top, right, bottom = corners(panel)
        its_left, its_top, its_right, its_bottom = corners(other_panel)
        are_disjoint = right <= its_left or its_right <= left or bottom <= its_top or its_bottom <= top
        assert are_disjoint and right <= 24 and its_right <= 24, (panel["title"], other_panel["title"])


def test_every_metric_is_in_dashboard_or_alert() -> None:
    """Except metrics that only explain others."""
    documented = set(
        re.findall(
            r"^\* `((?:mediator|process)_\w+)` \(",
            (ETC.parent / "docs/reference/metrics.md").read_text("utf-8"),
            re.M,
        )
    )
    used = {
        name
        for expression in [*list_panel_queries(), *(rule["expr"] for rule in load_alert_rules().values())]
        for name in find_metric_names(expression)
    }
    used = {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name) for name in used}
    exceptions = {
        "mediator_config_last_reload_success_timestamp_seconds",
        "mediator_store_statistics_timestamp_seconds",
        "process_virtual_memory_bytes",
    }
    assert documented - used <= exceptions


def test_dashboard_file_is_editable() -> None:
    """Short lines, UTF-8, a final line feed."""
    text = DASHBOARD.read_text("utf-8")
    assert text.endswith("}\n") and max(map(len, text.splitlines())) < 700
    assert load_dashboard()["schemaVersion"] == 42
    assert [variable["name"] for variable in load_dashboard()["templating"]["list"]] == ["datasource", "node"]
