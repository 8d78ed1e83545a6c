"""The report as files: `index.html`, a CSV file for each table, and `summary.json`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analytics.facts import RunFacts
from analytics.files import Files
from analytics.report import future, integrity, load, machines, messages, people
from analytics.report.parts import Figure, Row, Section
from analytics.report.reading import WANTED, Day, read
from analytics.settings import Settings
from analytics.tables import TABLES
from analytics.warehouse import Warehouse

_TEMPLATES = Path(__file__).with_name("templates")
# Of these only sums are read.
_NO_CSV = {"latency_hist", "inputs", "concurrency_10m"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write(files: Files, warehouse: Warehouse, out: str, day: date, settings: Settings, facts: RunFacts) -> str:
    """
    Write the report of a day into `OUT/report/<day>/`.

    :return: the path of its index.html.
    """
    folder = f"{out}/report/{day}"
    files.make_dirs(folder)
    for name, content in rendered(read(warehouse, day, settings, facts)).items():
        files.write(f"{folder}/{name}", content)
    return f"{folder}/index.html"


def rendered(known: Day) -> dict[str, bytes]:
    """Its files, by name; a function of what is known and nothing else."""
    checks = integrity.checks(known)
    sections = _sections(known)
    tables = {name: _csv(name, known.today(name)) for name in WANTED if name not in _NO_CSV}
    return {
        "index.html": _html(known, checks, sections).encode(),
        "summary.json": _summary(known, checks, sections),
        **{f"{name}.csv": content.encode() for name, content in tables.items()},
    }


def _sections(known: Day) -> list[Section]:
    """Problems first."""
    return [
        integrity.integrity(known),
        messages.lost(known),
        future.anomalies(known),
        messages.traffic(known),
        messages.latency(known),
        load.queues(known),
        load.errors(known),
        load.limits(known),
        load.replay(known),
        people.talkers(known),
        people.recipients(known),
        machines.sessions(known),
        machines.nodes(known),
        machines.cost(known),
        future.forecast(known),
        integrity.quality(known),
        integrity.provenance(known),
    ]


def _html(known: Day, checks: Sequence[Figure], sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup(_TEMPLATES.joinpath("style.css").read_text(encoding="utf-8"))  # nosec B704 # a file of ours
    return environment.get_template("report.html").render(
        day=known.day,
        final=known.facts.is_final(known.day),
        facts=known.facts,
        verdict=integrity.verdict(checks),
        checks=checks,
        sections=sections,
        style=style,
        safe=Markup,
    )


def _summary(known: Day, checks: Sequence[Figure], sections: Iterable[Section]) -> bytes:
    state, sentence = integrity.verdict(checks)
    said = {
        "day": known.day,
        "final": known.facts.is_final(known.day),
        "version": known.facts.version,
        "state": state,
        "verdict": sentence,
        "checks": {check.key: {"value": check.value, "state": check.state} for check in checks},
        "figures": {
            section.id: {figure.key: figure.value for figure in section.figures}
            for section in sections
            if section.figures
        },
        "anomalies": [row["reason"] for row in known.today("anomalies")],
    }
    return json.dumps(said, indent=1, default=str).encode() + b"\n"


def _csv(name: str, rows: Iterable[Row]) -> str:
    """All columns as declared, with a head."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    columns = [column.name for column in TABLES[name].columns]
    lines.writerow(columns)
    lines.writerows([_cell(row[column]) for column in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """What a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
