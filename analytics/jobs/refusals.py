"""
Errors by code and sender, hits on rate limits, and replayed or untimely requests.

Days without such lines are frequent: a scan for them runs only if the traffic has some.
"""

from __future__ import annotations

from collections.abc import Mapping

from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import REFUSED, scan_members, scan_requests, scan_traffic
from analytics.sql_functions import SECOND_MICROS, rank_per_day, suppress_small_group

_ERROR_HISTORY_DAYS = 400
_ERROR_KEY = ("proto", "mtype", "status", "code")


def count_errors(run: JobRun) -> Mapping[str, str]:
    """
    `errors_daily`, and `error_senders`: the senders of each day with most refusals.

    A request is refused if it has a code, or a status of 400 or above. Codes are new unless an earlier day has them.
    """
    key = ", ".join(_ERROR_KEY)
    _scan_refused_senders(run)
    return {
        "errors_daily": f"""
            WITH reasons AS (
                SELECT dt, refused, {key}, sum(n) AS n, sum(sum(n)) OVER (PARTITION BY dt) AS of_day
                FROM {scan_requests(run)} GROUP BY dt, refused, {key}),
            senders AS (SELECT dt, {key}, count(*) AS senders FROM refused_senders GROUP BY ALL),
            seen AS (
                SELECT dt, code FROM reasons WHERE refused
                UNION ALL SELECT dt, code FROM errors_daily
                WHERE dt BETWEEN {run.first} - {_ERROR_HISTORY_DAYS} AND {run.first} - 1),
            firsts AS (SELECT code, min(dt) AS first FROM seen GROUP BY code)
            SELECT dt, {key}, n, n / of_day AS share, dt = first AS is_new,
                {suppress_small_group("coalesce(senders, 0)", run.settings.k_anonymity)} AS senders
            FROM reasons JOIN firsts USING (code) LEFT JOIN senders USING (dt, {key})
            WHERE refused
        """,
        "error_senders": rank_per_day(
            """
            SELECT dt, sender, sum(n) AS n, count(*) AS codes, max((n, code))[2] AS worst
            FROM (SELECT dt, sender, code, sum(n) AS n FROM refused_senders GROUP BY ALL)
            GROUP BY dt, sender
            """,
            run.settings.top,
            "n DESC, sender",
        ),
    }


def _scan_refused_senders(run: JobRun) -> None:
    """Table `refused_senders`: refused requests of known senders, by day, reason and sender."""
    _scan_if_any(
        run,
        "refused",
        "refused_senders",
        "dt DATE, proto VARCHAR, mtype VARCHAR, status BIGINT, code VARCHAR, sender VARCHAR, n BIGINT",
        f"""
        SELECT dt, coalesce(proto, '') AS proto, coalesce(mtype, '') AS mtype, coalesce(status, 0) AS status,
            coalesce(code, '') AS code, sender, count(*) AS n
        FROM events
        WHERE event = 'req.done' AND {REFUSED} AND sender IS NOT NULL AND dt BETWEEN {run.first} AND {run.last}
        GROUP BY ALL
        """,
    )


def _scan_if_any(run: JobRun, condition: str, name: str, columns: str, query: str) -> None:
    """
    Run a scan if there are such lines, otherwise make an empty table.

    :param condition: on `traffic_counts`.
    :param columns: of the empty table.
    """
    if run.rows(f"SELECT 1 FROM {scan_traffic(run)} WHERE {condition} LIMIT 1"):
        run.scan(name, query)
    else:
        run.insert(name, columns, ())


ERRORS_JOB = Job(
    "errors",
    reads=("events",),
    writes=("errors_daily", "error_senders"),
    make_tables=count_errors,
    history_days={"errors_daily": _ERROR_HISTORY_DAYS},
)


def count_limit_hits(run: JobRun) -> Mapping[str, str]:
    """
    `limits_daily`, over all nodes, and `limits_top`: the parties of each day with most hits on one limit.

    Unknown parties count as one.
    """
    _scan_limited_parties(run)
    k = run.settings.k_anonymity
    return {
        "limits_daily": f"""
            WITH hits AS (
                SELECT dt, "limit", sum(hits) AS hits, count(who) AS who_n, sum(bursts) AS bursts,
                    max(longest_us) AS longest_us
                FROM limited_parties GROUP BY ALL)
            SELECT dt, "limit", hits, bursts, round(longest_us / {SECOND_MICROS}, 3) AS longest_burst_s,
                {suppress_small_group("who_n", k, "coalesce(share, 0)")} AS share,
                {suppress_small_group("who_n", k)} AS who_n
            FROM hits LEFT JOIN ({_compute_sender_shares(run)}) AS shares USING (dt, "limit")
        """,
        "limits_top": rank_per_day(
            'SELECT dt, who, "limit", hits, bursts FROM limited_parties WHERE who IS NOT NULL',
            run.settings.top,
            'hits DESC, who, "limit"',
        ),
    }


def _scan_limited_parties(run: JobRun) -> None:
    """
    Table `limited_parties`: hits, bursts and the longest burst, by day, limit and party.

    A burst goes on for as long as no pause exceeds `burst_gap_s`. As that is at least a second, the hits of a second
    belong together.
    """
    party = 'dt, "limit", who'
    _scan_if_any(
        run,
        "event = 'limit.hit'",
        "limited_parties",
        'dt DATE, "limit" VARCHAR, who VARCHAR, hits BIGINT, bursts BIGINT, longest_us BIGINT',
        f"""
        WITH seconds AS (
            SELECT dt, coalesce("limit", '') AS "limit", who, divide(micros(ts), {SECOND_MICROS}) AS second,
                count(*) AS hits, min(micros(ts)) AS first_at, max(micros(ts)) AS last_at
            FROM events
            WHERE event = 'limit.hit' AND dt BETWEEN {run.first} AND {run.last}
            GROUP BY ALL),
        begun AS (
            SELECT *, CASE WHEN first_at - lag(last_at) OVER (PARTITION BY {party} ORDER BY second)
                <= {run.settings.burst_gap_s * SECOND_MICROS} THEN 0 ELSE 1 END AS begins
            FROM seconds),
        numbered AS (SELECT *, sum(begins) OVER (PARTITION BY {party} ORDER BY second) AS burst FROM begun),
        bursts AS (
            SELECT {party}, burst, sum(hits) AS hits, max(last_at) - min(first_at) AS lasted_us
            FROM numbered GROUP BY ALL)
        SELECT {party}, CAST(sum(hits) AS BIGINT) AS hits, count(*) AS bursts, max(lasted_us) AS longest_us
        FROM bursts GROUP BY ALL
        """,
    )


def _compute_sender_shares(run: JobRun) -> str:
    """Query for `dt`, `limit`, and the share of senders of accepted messages that hit it."""
    if not run.rows("SELECT 1 FROM limited_parties LIMIT 1"):
        return """SELECT dt, "limit", 0.0 AS share FROM limited_parties"""
    return f"""
        WITH senders AS (
            SELECT DISTINCT dt, member AS who FROM {scan_members(run)} WHERE side = 'sender' AND accepted > 0),
        everybody AS (SELECT dt, count(*) AS senders FROM senders GROUP BY dt)
        SELECT dt, "limit", count(*) / any_value(everybody.senders) AS share
        FROM senders JOIN limited_parties USING (dt, who) JOIN everybody USING (dt)
        GROUP BY dt, "limit"
    """


LIMITS_JOB = Job("limits", reads=("events",), writes=("limits_daily", "limits_top"), make_tables=count_limit_hits)


_MINUTE_MS = 60_000
_DAY_MS = 24 * 60 * _MINUTE_MS

# The window is 5 minutes either way: ages just beyond it are clock skew, ages far beyond it are replays.
_CLOCK_AGE_CLASS = f"""
    CASE WHEN age_ms IS NULL THEN ''
        WHEN abs(age_ms) <= {5 * _MINUTE_MS} THEN 'fresh'
        WHEN abs(age_ms) <= {10 * _MINUTE_MS} THEN 'skew'
        WHEN age_ms < 0 THEN 'future'
        WHEN age_ms <= {_DAY_MS} THEN 'old'
        ELSE 'ancient' END
"""


def count_replays(run: JobRun) -> Mapping[str, str]:
    """`replay_daily`, over all nodes."""
    k = run.settings.k_anonymity
    _scan_if_any(
        run,
        "event = 'replay.drop'",
        "replays",
        "dt DATE, code VARCHAR, age_class VARCHAR, sender VARCHAR, n BIGINT, nodes BIGINT",
        f"""
        SELECT dt, coalesce(code, '') AS code, {_CLOCK_AGE_CLASS} AS age_class, sender, count(*) AS n,
            count(DISTINCT node) AS nodes
        FROM events
        WHERE event = 'replay.drop' AND dt BETWEEN {run.first} AND {run.last}
        GROUP BY ALL
        """,
    )
    return {
        "replay_daily": f"""
            SELECT dt, code, age_class, sum(n) AS n, {suppress_small_group("count(sender)", k)} AS senders,
                {suppress_small_group("count(sender) FILTER (WHERE nodes > 1)", k)} AS on_nodes
            FROM replays GROUP BY ALL
        """
    }


REPLAY_JOB = Job("replay", reads=("events",), writes=("replay_daily",), make_tables=count_replays)
