"""The rules and the dashboard by themselves: what `promtool` says, and what Grafana needs."""

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
    dashboard_panels,
    load_alert_rules,
    load_dashboard,
    metric_names,
    panel_queries,
)

CASES = Path(__file__).with_name("alerts.yml")


def promtool(*arguments: str | Path, folder: Path | None = None) -> str:
    """
    What it says when all is well.

    :raise AssertionError: it has something to find fault with.
    """
    done = subprocess.run(
        [find_program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_rules_are_valid(rules: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", rules)


def test_the_example_is_valid() -> None:
    """With the rules beside it."""
    said = promtool("check", "config", ETC / "prometheus" / "prometheus.yml")
    assert f"{len(RULES)} rule files found" in said and "FAILED" not in said


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """What is in `alerts.yml`, by Prometheus' own evaluation of the rules as they are shipped."""
    shutil.copy(CASES, tmp_path)
    shutil.copy(RULES[0], tmp_path)
    promtool("test", "rules", CASES.name, folder=tmp_path)


@pytest.mark.exhaustive
def test_promtool_sees_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    """By the cases of that alert only: all of them take `promtool` many seconds."""
    cases = yaml.safe_load(CASES.read_text("utf-8"))
    cases["tests"] = [case for case in cases["tests"] if "MediatordStoreDown" in str(case)]
    (tmp_path / CASES.name).write_text(yaml.safe_dump(cases), encoding="utf-8")
    broken = RULES[0].read_text("utf-8").replace("mediator_storage_up == 0", "mediator_storage_up == 2")
    (tmp_path / RULES[0].name).write_text(broken, encoding="utf-8")
    with pytest.raises(AssertionError, match="MediatordStoreDown"):
        promtool("test", "rules", CASES.name, folder=tmp_path)


def test_every_alert_of_the_daemon_has_a_case() -> None:
    """By name, in the cases that expect something to fire."""
    fired = set(re.findall(r'alertname="(\w+)"', CASES.read_text("utf-8")))
    of_the_daemon = set(re.findall(r"alert: (\w+)", RULES[0].read_text("utf-8")))
    mentioned = fired | set(re.findall(r"alertname: (\w+)", CASES.read_text("utf-8")))
    assert of_the_daemon <= mentioned


def test_alerts_say_what_to_do() -> None:
    for name, rule in load_alert_rules().items():
        assert name.startswith("Mediatord"), name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith("."), name


def test_alerts_link_to_their_runbooks() -> None:
    """Each has a section of its own, with its severity, and no section is of an alert that is gone."""
    page = (ETC.parent / "docs/runbooks/alerts.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)\n\n\*(\w+)\.\* ", page, re.M)
    assert sorted(sections) == sorted((name, rule["labels"]["severity"]) for name, rule in load_alert_rules().items())
    assert len(sections) == page.count("\n### ")
    for name, rule in load_alert_rules().items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/alerts.md#{name.lower()}"


def test_runbooks_fit_on_a_screen() -> None:
    """A section says what the alert means, and what to check and do."""
    page = (ETC.parent / "docs/runbooks/alerts.md").read_text("utf-8")
    for section in re.split(r"^### ", page, flags=re.M)[1:]:
        assert len(section.strip().splitlines()) <= 45, section
        assert max(map(len, section.splitlines())) <= 118, section
        assert "**Do" in section and ("**Check**" in section or "](#" in section), section


def test_panels_have_all_that_people_need() -> None:
    """A title of their own, an explanation, a unit, the data source and the nodes that were chosen."""
    titles = [panel["title"] for _, panel in dashboard_panels()]
    assert len(titles) == len(set(titles))
    for row, panel in dashboard_panels():
        assert row and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            ours = [name for name in metric_names(target["expr"]) if name.startswith(("mediator_", "process_"))]
            assert not ours or target["expr"].count('instance=~"$node"') >= len(ours), target["expr"]


def test_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in load_dashboard()["panels"]]
    assert len(ids) == len(set(ids))

    def corners(panel: dict[str, Any]) -> tuple[int, int, int, int]:
        at = panel["gridPos"]
        return at["x"], at["y"], at["x"] + at["w"], at["y"] + at["h"]

    for one, other in combinations(load_dashboard()["panels"], 2):
        left, top, right, bottom = corners(one)
        its_left, its_top, its_right, its_bottom = corners(other)
        apart = right <= its_left or its_right <= left or bottom <= its_top or its_bottom <= top
        assert apart and right <= 24 and its_right <= 24, (one["title"], other["title"])


def test_every_metric_is_watched() -> None:
    """What is documented is in the dashboard or in an alert, unless it only explains another one."""
    documented = set(
        re.findall(
            r"^`((?:mediator|process)_\w+)` \(",
            (ETC.parent / "docs/reference/metrics.md").read_text("utf-8"),
            re.M,
        )
    )
    asked = {
        name
        for each in [*panel_queries(), *(rule["expr"] for rule in load_alert_rules().values())]
        for name in metric_names(each)
    }
    asked = {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name) for name in asked}
    besides = {
        "mediator_config_last_reload_success_timestamp_seconds",
        "mediator_store_statistics_timestamp_seconds",
        "process_virtual_memory_bytes",
    }
    assert documented - asked <= besides


def test_the_dashboard_is_for_people_to_edit() -> None:
    """One thing a line, in UTF-8, ending as text does."""
    text = DASHBOARD.read_text("utf-8")
    assert text.endswith("}\n") and max(map(len, text.splitlines())) < 700
    assert load_dashboard()["schemaVersion"] == 42
    assert [each["name"] for each in load_dashboard()["templating"]["list"]] == ["datasource", "node"]
