"""Settings of the analysis: a YAML file; every key has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analytics.errors import EXIT_USAGE, AnalyticsError

Count = Annotated[int, Field(ge=1)]
Days = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseModel):
    """Settings of a run, passed to every job. Names include the unit of durations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    look_back_days: Days = Field(
        default=2, description="days before the requested ones that are computed again if segments arrive late"
    )
    top: Count = Field(default=20, description="rows in rankings, such as the largest senders")
    k_anonymity: Count = Field(
        default=5, description="smallest group that is reported; smaller ones are merged or suppressed"
    )
    pseudonym_days: Count = Field(default=90, description="days until the key of the pseudonyms in reports changes")
    queue_max_messages: Count = Field(
        default=1000, description="capacity of a queue: queue.max_messages of the daemon"
    )
    dormant_days: Count = Field(
        default=14, description="days without an acknowledgement after which a recipient counts as dormant"
    )
    burst_gap_s: Count = Field(default=60, description="seconds without a hit on a rate limit that end a burst")
    missed_wakeups_share: Share = Field(
        default=0.5, description="share of wake-ups without a pickup within an hour above which the report warns"
    )
    dead_tokens_share: Share = Field(
        default=0.1, description="removed devices per request to a push service above which the report warns"
    )
    node_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0,
        description="a node is flagged if a figure differs from the median of all nodes by more than this factor",
    )
    baseline_days: Annotated[Count, Field(le=92)] = Field(
        default=28, description="days of history that hours are compared with to find anomalies"
    )
    baseline_samples: Count = Field(
        default=3, description="weeks of history needed to compare an hour with the same hour of the week"
    )
    anomaly_z: Annotated[float, Field(gt=0)] = Field(
        default=6.0, description="an hour is an anomaly if it deviates by more than this many times the usual spread"
    )
    forecast_days: Count = Field(default=30, description="days to forecast")
    forecast_history_days: Annotated[Count, Field(le=183)] = Field(
        default=56, description="days of history for the forecast"
    )
    held_back_days: Count = Field(
        default=7, description="last days that a second forecast leaves out, to measure its error on them"
    )
    keep_events_days: Count = Field(
        default=35, description="retention of events and other tables with identifiers, in days"
    )
    keep_tables_days: Count = Field(default=400, description="retention of all other tables and of reports, in days")
    keep_logs_days: Count = Field(
        default=14, description="retention of analysed log segments, in days; used by `prune --logs` only"
    )


_FILE_HEADER = """\
# Settings of mediatord-analytics and their defaults. Pass this file with --settings. Unknown keys and invalid values
# are errors.
"""


def load_settings(path: Path | None) -> Settings:
    """
    Load a settings file; keys that it omits, or all keys without a file, have their defaults.

    :raise AnalyticsError: it cannot be read or used; the error names every invalid key.
    """
    try:
        return Settings() if path is None else Settings.model_validate(_read_yaml(path))
    except ValidationError as error:
        mistakes = "; ".join(f"{_format_location(one['loc'])}: {_format_error(dict(one))}" for one in error.errors())
        raise AnalyticsError(f"{path}: {mistakes}", EXIT_USAGE) from None


def render_default_settings() -> str:
    """Render a settings file with all defaults."""
    return _FILE_HEADER + "".join(
        f"\n# {field.description}\n{name}: {field.default}\n" for name, field in Settings.model_fields.items()
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise AnalyticsError(f"{path}: {error.strerror}", EXIT_USAGE) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AnalyticsError(f"{path}: invalid YAML: {' '.join(str(error).split())}", EXIT_USAGE) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise AnalyticsError(f"{path}: expected a mapping of keys to values", EXIT_USAGE)
    return {str(key): value for key, value in content.items()}


def _format_location(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _format_error(error: dict[str, Any]) -> str:
    return "unknown key" if error["type"] == "extra_forbidden" else str(error["msg"])
