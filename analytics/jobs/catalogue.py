"""All jobs of a run, each after those whose tables it reads."""

from __future__ import annotations

from analytics.job import Job
from analytics.jobs import (
    anomalies,
    cost,
    errors_by_code,
    forecast,
    latency,
    ledger,
    limits,
    nodes,
    quality,
    queues,
    recipients,
    reconciliation,
    replay,
    retention,
    series,
    sessions,
    stores,
    talkers,
    traffic,
)

JOBS: tuple[Job, ...] = tuple(
    module.JOB
    for module in (
        quality,
        traffic,
        latency,
        ledger,
        reconciliation,
        stores,
        queues,
        errors_by_code,
        limits,
        replay,
        talkers,
        recipients,
        retention,
        sessions,
        nodes,
        cost,
        series,
        anomalies,
        forecast,
    )
)
