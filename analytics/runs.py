"""Manifests: what each run read, made and found, as `runs/<run id>.json`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from analytics.files import Files
from analytics.job import Span
from analytics.settings import Settings
from mediatord import __version__
from mediatord.observability.event_schema import SCHEMA_VERSION

FOLDER = "runs"


def new_id(now: datetime) -> str:
    """An id that sorts by time: `20261121T010000Z-1f2e3d`."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def started(run_id: str) -> datetime | None:
    """When a run began, from its id; None if that is no id of a run."""
    try:
        return datetime.strptime(run_id.split("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Made:
    """:param tables: rows of each table that the job made. :param seconds: that it took."""

    job: str
    tables: Mapping[str, int]
    seconds: float


@dataclass(slots=True)
class Manifest:
    """
    What is known of a run; grows while it goes on.

    :ivar asked: the days asked for.
    :ivar span: the days that were computed, those asked for among them.
    :ivar inputs: segments read in this run: stem, path, bytes, modified, state, lines, corrupt.
    :ivar kept: batches of which segments read earlier were kept as they were, with the number of these segments.
    :ivar found: kinds of trouble with files found at discovery, with how often.
    :ivar changes: settings and versions that are not those of the run before, as sentences.
    :ivar broken: what is wrong with the integrity of the logs, as sentences; exit status 4.
    :ivar warnings: for the operator, as sentences.
    :ivar seconds: of each step beside the jobs.
    """

    run_id: str
    asked: Span
    span: Span
    settings: Settings
    inputs: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    jobs: list[Made] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    code_version: str = __version__
    schema_version: int = SCHEMA_VERSION

    def encode(self, exit_status: int, error: str = "") -> bytes:
        """:param error: why it failed."""
        said = {
            "run_id": self.run_id,
            "code_version": self.code_version,
            "schema_version": self.schema_version,
            "asked": _days(self.asked),
            "span": _days(self.span),
            "final_through": self.final_through,
            "exit_status": exit_status,
            **({"error": error} if error else {}),
            "broken": self.broken,
            "warnings": self.warnings,
            "changes": self.changes,
            "settings": self.settings.model_dump(),
            "found": self.found,
            "inputs": self.inputs,
            "kept": self.kept,
            "jobs": [asdict(made) for made in sorted(self.jobs, key=lambda made: made.job)],
            "seconds": self.seconds,
        }
        return json.dumps(said, indent=1, default=str).encode() + b"\n"

    @property
    def final_through(self) -> str:
        """The last day that no later nightly run will look at again."""
        return str(self.asked.last - timedelta(self.settings.look_back_days))


def path(out: str, run_id: str) -> str:
    """Where a manifest is."""
    return f"{out}/{FOLDER}/{run_id}.json"


def last(files: Files, out: str) -> dict[str, Any] | None:
    """The manifest of the latest run that published something; None before the first."""
    for name in reversed(names(files, out)):
        said: dict[str, Any] = json.loads(files.read(f"{out}/{FOLDER}/{name}"))
        if "error" not in said:
            return said
    return None


def names(files: Files, out: str) -> Sequence[str]:
    """Names of all manifests, oldest first."""
    folder = f"{out}/{FOLDER}"
    return [name for name in files.names(folder) if name.endswith(".json")] if files.exists(folder) else []


def changes(before: Mapping[str, Any] | None, settings: Settings) -> list[str]:
    """How this run is not like the one before, one sentence each."""
    if before is None:
        return []
    then = {**before["settings"], "code_version": before["code_version"], "schema_version": before["schema_version"]}
    now = {**settings.model_dump(), "code_version": __version__, "schema_version": SCHEMA_VERSION}
    return [
        f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _days(span: Span) -> list[str]:
    return [str(span.first), str(span.last)]
