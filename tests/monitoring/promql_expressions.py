"""Expressions of the alert rules and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ETC = Path(__file__).parents[2] / "etc"
RULES = (ETC / "prometheus" / "mediatord.rules.yml", ETC / "prometheus" / "mediatord-analytics.rules.yml")
DASHBOARD = ETC / "grafana" / "mediatord.json"
_NAME = re.compile(r"\b(?:mediatord?|process)_[a-z_0-9]+\b")


def load_alert_rules() -> dict[str, dict[str, Any]]:
    """All alert rules by name."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def load_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana loads it."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return dashboard


def list_panels() -> list[tuple[str, dict[str, Any]]]:
    """Those that show something, with the title of their row, from top to bottom."""
    row, dashboard = "", []
    for panel in load_dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            dashboard.append((row, panel))
    return dashboard


def list_panel_queries(row: str | None = None) -> list[str]:
    """The expressions of panels, of one row or all, as Grafana would send them for all nodes and a short time."""
    expressions = [
        target["expr"] for title, panel in list_panels() if row in (None, title) for target in panel["targets"]
    ]
    return [expression.replace("$__rate_interval", "1m").replace("$node", ".*") for expression in expressions]


def find_metric_names(expression: str) -> set[str]:
    """The metrics that an expression is about, besides those of Prometheus itself."""
    return set(_NAME.findall(re.sub(r'"[^"]*"', '""', expression)))
