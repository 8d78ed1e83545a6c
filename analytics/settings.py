"""Settings of the jobs: a YAML file, every key with a default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analytics.errors import EXIT_USAGE, AnalyticsError

Count = Annotated[int, Field(ge=1)]
Days = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Handed to every job. Durations in days, seconds or milliseconds as named."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    look_back_days: Days = Field(
        default=2, description="days before the one asked for that late segments may still change"
    )
    top: Count = Field(default=20, description="rows in each table of the largest")
    k_anonymity: Count = Field(default=5, description="members that a group needs to be shown by itself")
    pseudonym_days: Count = Field(default=90, description="days after which pseudonyms in reports change")
    queue_max_messages: Count = Field(default=1000, description="queue.max_messages of the daemon")
    dormant_days: Count = Field(
        default=14, description="days without an acknowledgement after which a recipient is dormant"
    )
    burst_gap_s: Count = Field(default=60, description="seconds without a hit that end a burst of hits on a limit")
    node_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0, description="a node is flagged outside 1/this to this times the fleet's median"
    )
    baseline_days: Annotated[Count, Field(le=92)] = Field(
        default=28, description="trailing days that anomalies are judged by"
    )
    baseline_samples: Count = Field(
        default=3, description="samples of the same hour of the week that a baseline needs"
    )
    anomaly_z: Annotated[float, Field(gt=0)] = Field(
        default=6.0, description="robust z beyond which an hour is an anomaly"
    )
    forecast_days: Count = Field(default=30, description="days ahead that capacity is forecast")
    forecast_history_days: Annotated[Count, Field(le=183)] = Field(
        default=56, description="days that a forecast is made from"
    )
    held_back_days: Count = Field(default=7, description="last days held back to measure the error of the forecast")
    keep_events_days: Count = Field(
        default=35, description="days that prune keeps events and other tables with identifiers"
    )
    keep_tables_days: Count = Field(default=400, description="days that prune keeps all other tables and reports")
    keep_logs_days: Count = Field(
        default=14, description="days that prune keeps log segments that were read, if it is asked to delete any"
    )


_FILE_HEADER = """\
# mediatord-analytics: every setting, at its default. Unknown keys and impossible values are refused:
# `mediatord-analytics nightly --settings FILE` tells which.
"""


def load_settings(path: Path | None) -> Settings:
    """
    What a file sets, defaults for the rest; without a file defaults for everything.

    :raise AnalyticsError: it cannot be read or used; the text names every key that is wrong.
    """
    try:
        return Settings() if path is None else Settings.model_validate(_read_yaml(path))
    except ValidationError as error:
        mistakes = "; ".join(f"{_format_location(one['loc'])}: {_format_error(dict(one))}" for one in error.errors())
        raise AnalyticsError(f"{path}: {mistakes}", EXIT_USAGE) from None


def render_default_settings() -> str:
    """The text of a file that :func:`load_settings` reads as the defaults."""
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
        raise AnalyticsError(f"{path}: not YAML: {' '.join(str(error).split())}", EXIT_USAGE) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise AnalyticsError(f"{path}: expected a mapping of keys to values", EXIT_USAGE)
    return {str(key): value for key, value in content.items()}


def _format_location(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _format_error(error: dict[str, Any]) -> str:
    return "unknown key" if error["type"] == "extra_forbidden" else str(error["msg"])
