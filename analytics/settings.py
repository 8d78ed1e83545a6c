"""What an operator can set for the jobs: a YAML file, every key with a default."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
