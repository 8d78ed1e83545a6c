"""
Push notifications: requests to push services, devices they no longer know, and how soon wallets respond to a wake-up.

Requests to several devices of an account that start within a second of each other are one wake-up. It is picked up by
the first contact of the account within an hour, and otherwise missed. It counts on the day on which that is known:
that of the contact, or of the end of the hour. A day therefore depends on no later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import scan_traffic
from analytics.jobs.traffic_and_latency import ALL_VALUES
from analytics.sql_functions import EVENT_MICROS, SECOND_MICROS, compute_percentiles, quote_day, rank_per_day

PICKUP_WITHIN_S = 3600
_PICKUP_WITHIN_MICROS = PICKUP_WITHIN_S * SECOND_MICROS
# Longer than a wake-up lasts, so that its requests are complete if it ends in the span.
_LOOK_BACK = timedelta(hours=2)
# Of the contacts of an account in ten seconds only the first ones are kept.
_SLOT_MICROS = 10 * SECOND_MICROS
_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}

_SENT = "(event = 'push.wake' AND outcome = 'sent' AND did IS NOT NULL)"
# Its line is written when the service has answered.
_STARTED = f"({EVENT_MICROS} - coalesce(duration_micros(dur_ms), 0))"
# Refused requests may be those of others, such as replays.
_CONTACT = """(code IS NULL AND (event = 'conn.auth'
    OR (event = 'req.done' AND (mtype LIKE 'messagepickup/%' OR left(mtype, 6) = 'QUERY_'))))"""


def count_wakeups(run: JobRun) -> Mapping[str, str]:
    """`push_daily`, and the wake-ups that were picked up or missed in the span."""
    _scan_push_requests(run)
    _find_ended_wakeups(run)
    return {
        "push_daily": f"""
            SELECT dt, event, service, result, code, sum(n) AS n FROM push_requests
            WHERE dt >= {run.first} GROUP BY ALL
        """,
        "wakeups_daily": _summarize_wakeups(),
        "wakeups_missed_top": _rank_missed_accounts(run.settings.top),
    }


def _select_recent(run: JobRun) -> str:
    """Condition for lines of the span and of a period before it."""
    midnight = f"TIMESTAMP '{run.span.first} 00:00:00'"
    hours = _LOOK_BACK // timedelta(hours=1)
    before = quote_day(run.span.widen(before=1).first)
    return (
        f"(dt BETWEEN {run.first} AND {run.last} OR (dt = {before} AND ts >= {midnight} - INTERVAL '{hours}' HOUR))"
    )


def _scan_push_requests(run: JobRun) -> None:
    """
    Table `push_requests`: requests to push services and removed devices.

    Columns: `dt`, `event`, `service`, `result`, `code`, `n`; if a service accepted a request for a known account,
    also the account `did`, and in microseconds when it `started` and was `logged`.
    """
    if not _may_have_pushes(run):
        run.insert(
            "push_requests",
            "dt DATE, event VARCHAR, service VARCHAR, result VARCHAR, code VARCHAR, did VARCHAR, started BIGINT,"
            " logged BIGINT, n BIGINT",
            (),
        )
        return
    run.scan(
        "push_requests",
        f"""
        SELECT dt, event, coalesce(service, '') AS service, coalesce(outcome, reason, '') AS result,
            coalesce(code, '') AS code, CASE WHEN {_SENT} THEN did END AS did,
            CASE WHEN {_SENT} THEN {_STARTED} END AS started, CASE WHEN {_SENT} THEN {EVENT_MICROS} END AS logged,
            count(*) AS n
        FROM events
        WHERE event IN ('push.wake', 'push.forget') AND {_select_recent(run)}
        GROUP BY ALL
        """,
    )


def _may_have_pushes(run: JobRun) -> bool:
    """Whether the span has lines about push, or the day before had them or is unknown."""
    before = quote_day(run.span.widen(before=1).first)
    return bool(
        run.rows(f"SELECT 1 FROM {scan_traffic(run)} WHERE event LIKE 'push.%' LIMIT 1")
        or run.rows(f"SELECT 1 FROM push_daily WHERE dt = {before} LIMIT 1")
        or not run.rows(f"SELECT 1 FROM ledger_daily WHERE dt = {before}")
    )


def _find_ended_wakeups(run: JobRun) -> None:
    """
    Table `ended_wakeups`: wake-ups that were picked up or missed in the span.

    Columns: `dt`, `did`, `services`, `pickup_ms` (null: missed).
    """
    _scan_contacts(run)
    run.define(
        "ended_wakeups",
        f"""
        WITH begun AS (
            SELECT *, CASE WHEN started - lag(started) OVER (PARTITION BY did ORDER BY started)
                <= {SECOND_MICROS} THEN 0 ELSE 1 END AS begins
            FROM push_requests WHERE did IS NOT NULL),
        numbered AS (SELECT *, sum(begins) OVER (PARTITION BY did ORDER BY started) AS number FROM begun),
        wakeups AS (
            SELECT did, min(started) AS started, min(started) // {_SLOT_MICROS} AS slot, min(logged) AS logged,
                list(DISTINCT service) AS services
            FROM numbered GROUP BY did, number),
        slots AS (SELECT did, slot, min(first_at) AS first_at FROM contacts GROUP BY did, slot),
        contacted AS (
            SELECT wakeups.*, wakeups.started + {_PICKUP_WITHIN_MICROS} AS until,
                coalesce(contacts.next_at, slots.first_at) AS contact_at
            FROM wakeups
            LEFT JOIN contacts ON contacts.did = wakeups.did AND contacts.started = wakeups.started
            ASOF LEFT JOIN slots ON slots.did = wakeups.did AND slots.slot > wakeups.slot),
        -- A contact may precede the line about the request, which is written when it was answered.
        ended AS (
            SELECT *, CASE WHEN contact_at <= until THEN contact_at END AS pickup_at,
                greatest(coalesce(pickup_at, until), logged) AS ended_at
            FROM contacted)
        SELECT micros_day(ended_at) AS dt, did, services, (pickup_at - started) / 1000 AS pickup_ms
        FROM ended WHERE micros_day(ended_at) BETWEEN {run.first} AND {run.last}
        """,
    )


def _scan_contacts(run: JobRun) -> None:
    """
    Table `contacts`: the first contacts of woken accounts.

    Columns: account `did`; `slot` of time; `started`, of a request that started in the slot, or null; `first_at`, of
    the slot, and `next_at`, after that start, in microseconds.
    """
    if not run.rows("SELECT 1 FROM push_requests WHERE did IS NOT NULL LIMIT 1"):
        run.insert("contacts", "did VARCHAR, slot BIGINT, started BIGINT, first_at BIGINT, next_at BIGINT", ())
        return
    run.scan(
        "contacts",
        f"""
        WITH requests AS (
            SELECT did, {_STARTED} AS started, divide({_STARTED}, {_SLOT_MICROS}) AS slot
            FROM events WHERE {_SENT} AND {_select_recent(run)}
            GROUP BY ALL),
        lines AS (
            SELECT CASE WHEN event = 'conn.auth' THEN did ELSE sender END AS did, {EVENT_MICROS} AS contact_at
            FROM events WHERE {_CONTACT} AND {_select_recent(run)}),
        contacts AS (
            SELECT lines.did, contact_at, divide(contact_at, {_SLOT_MICROS}) AS slot
            FROM lines SEMI JOIN requests ON lines.did = requests.did)
        SELECT contacts.did, contacts.slot, started, min(contact_at) AS first_at,
            min(contact_at) FILTER (WHERE contact_at >= started) AS next_at
        FROM contacts LEFT JOIN requests ON contacts.did = requests.did AND contacts.slot = requests.slot
        GROUP BY ALL
        """,
    )


def _summarize_wakeups() -> str:
    hist = f"""
        SELECT dt, service, latency_bucket(pickup_ms) AS bucket, count(*) AS n
        FROM (SELECT dt, pickup_ms, unnest(list_prepend('{ALL_VALUES}', services)) AS service FROM ended_wakeups)
        GROUP BY ALL
    """
    percentiles = compute_percentiles(
        f"SELECT * FROM ({hist}) WHERE bucket IS NOT NULL", ("dt", "service"), _QUANTILES
    )
    return f"""
        SELECT dt, service, totals.n, missed, missed / totals.n AS missed_share, {", ".join(_QUANTILES)}
        FROM (
            SELECT dt, service, sum(n) AS n, coalesce(sum(n) FILTER (WHERE bucket IS NULL), 0) AS missed
            FROM ({hist}) GROUP BY dt, service) AS totals
        LEFT JOIN ({percentiles}) AS percentiles USING (dt, service)
    """


def _rank_missed_accounts(count: int) -> str:
    """Query for the accounts of each day with most wake-ups, of those that picked up none."""
    missed = """
        SELECT dt, did, count(*) AS n,
            array_to_string(list_sort(list_distinct(flatten(list(services)))), ', ') AS services
        FROM ended_wakeups GROUP BY dt, did HAVING count(pickup_ms) = 0
    """
    return rank_per_day(missed, count, "n DESC, did")


WAKEUPS_JOB = Job(
    "wakeups",
    reads=("events",),
    writes=("push_daily", "wakeups_daily", "wakeups_missed_top"),
    make_tables=count_wakeups,
    history_days={"push_daily": 1, "ledger_daily": 1},
)
