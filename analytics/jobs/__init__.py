"""All jobs of a run, each after those whose tables it reads."""

from __future__ import annotations

from analytics.job import Job
from analytics.jobs.log_quality import QUALITY_JOB
from analytics.jobs.message_ledger import LEDGER_JOB
from analytics.jobs.node_comparison import NODES_JOB
from analytics.jobs.reconciliation import RECONCILIATION_JOB, STORES_JOB
from analytics.jobs.refusals import ERRORS_JOB, LIMITS_JOB, REPLAY_JOB
from analytics.jobs.senders_and_recipients import RECIPIENTS_JOB, RETENTION_JOB, TALKERS_JOB
from analytics.jobs.sessions import SESSIONS_JOB
from analytics.jobs.time_series import ANOMALIES_JOB, FORECAST_JOB, SERIES_JOB
from analytics.jobs.traffic_and_latency import COST_JOB, LATENCY_JOB, QUEUES_JOB, TRAFFIC_JOB
from analytics.jobs.wakeups import WAKEUPS_JOB

JOBS: tuple[Job, ...] = (
    QUALITY_JOB,
    TRAFFIC_JOB,
    LATENCY_JOB,
    LEDGER_JOB,
    RECONCILIATION_JOB,
    STORES_JOB,
    QUEUES_JOB,
    ERRORS_JOB,
    LIMITS_JOB,
    REPLAY_JOB,
    TALKERS_JOB,
    RECIPIENTS_JOB,
    RETENTION_JOB,
    SESSIONS_JOB,
    WAKEUPS_JOB,
    NODES_JOB,
    COST_JOB,
    SERIES_JOB,
    ANOMALIES_JOB,
    FORECAST_JOB,
)
