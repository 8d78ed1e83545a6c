"""What the alert rules and the dashboard ask for."""

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
    """What Grafana would load."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return found


def dashboard_panels() -> list[tuple[str, dict[str, Any]]]:
    """Those that show something, with the title of their row, from top to bottom."""
    row, found = "", []
    for panel in load_dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            found.append((row, panel))
    return found


def panel_queries(row: str | None = None) -> list[str]:
    """The expressions of panels, of one row or all, as Grafana would send them for all nodes and a short time."""
    written = [
        target["expr"] for title, panel in dashboard_panels() if row in (None, title) for target in panel["targets"]
    ]
    return [each.replace("$__rate_interval", "1m").replace("$node", ".*") for each in written]


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression is about, besides those of Prometheus itself."""
    return set(_NAME.findall(re.sub(r'"[^"]*"', '""', expression)))
