"""Scans that several jobs use. Names are never null in their results: empty instead."""

from __future__ import annotations

from analytics.job import JobRun

REFUSED = "(code IS NOT NULL OR coalesce(status, 0) >= 400)"
"""Whether a request was refused or failed."""


def scan_traffic(run: JobRun) -> str:
    """
    Table `traffic_counts`: lines by hour.

    Columns: `dt`, `hour`, `node`, `proto`, `event`, `refused` (of req.done; else false), `n`, `messages`
    (lines with a message id), `bytes` (sum of `size`).
    Events: req.done, msg.*, conn.open, limit.hit, replay.drop, push.*.
    """
    run.scan(
        "traffic_counts",
        f"""
        SELECT dt, hour(ts) AS hour, coalesce(node, '') AS node, coalesce(proto, '') AS proto, event,
            event = 'req.done' AND {REFUSED} AS refused,
            count(*) AS n, count(msg) AS messages, CAST(coalesce(sum(size), 0) AS BIGINT) AS bytes
        FROM events
        WHERE dt BETWEEN {run.first} AND {run.last} AND (
            event IN ('req.done', 'conn.open', 'limit.hit', 'replay.drop')
            OR event LIKE 'msg.%' OR event LIKE 'push.%')
        GROUP BY ALL
        """,
    )
    return "traffic_counts"


def scan_requests(run: JobRun) -> str:
    """
    Table `request_counts`: requests by day, kind, outcome and duration.

    Columns: `dt`, `node`, `proto`, `mtype`, `status` (0 if unknown), `code`, `refused`, `size_class`, `bucket` (null
    if the duration is unknown), `n`, `dur_us`, `timed` (requests with a duration), `crypto_us`, `crypto_timed`.
    """
    run.scan(
        "request_counts",
        f"""
        SELECT dt, coalesce(node, '') AS node, coalesce(proto, '') AS proto, coalesce(mtype, '') AS mtype,
            coalesce(status, 0) AS status, coalesce(code, '') AS code, {REFUSED} AS refused,
            size_class(size) AS size_class, latency_bucket(dur_ms) AS bucket, count(*) AS n,
            CAST(sum(duration_micros(dur_ms)) AS BIGINT) AS dur_us, count(dur_ms) AS timed,
            CAST(sum(duration_micros(crypto_ms)) AS BIGINT) AS crypto_us, count(crypto_ms) AS crypto_timed
        FROM events
        WHERE event = 'req.done' AND dt BETWEEN {run.first} AND {run.last}
        GROUP BY ALL
        """,
    )
    return "request_counts"


# Fields of the events that tell about a node itself rather than about a message or a wallet.
_STATE_EVENTS = (
    "gauge",
    "counters",
    "ledger",
    "proc.start",
    "proc.stop",
    "proc.reload",
    "log.open",
    "log.close",
    "log.drop",
)


def scan_state_events(run: JobRun) -> str:
    """
    Table `state_events`: lines that a node writes about itself, each minute or when it starts, of the span and the
    day before it. Also the first line of each start (seq 1), whatever its event.

    Columns: `dt`, `at` (microseconds, on its day), `ts`, `hour`, `node` (empty if unknown), `boot`, `seq`, `event`,
    and all declared fields of these events.
    """
    from analytics.sql_functions import EVENT_MICROS, list_texts, quote_day
    from mediatord.observability.event_schema import ENVELOPE, EVENTS

    fields = dict.fromkeys(
        name for event in _STATE_EVENTS if event in EVENTS for name in EVENTS[event].fields if name not in ENVELOPE
    )
    run.scan(
        "state_events",
        f"""
        SELECT dt, {EVENT_MICROS} AS at, ts, hour(ts) AS hour, coalesce(node, '') AS node, boot, seq, event,
            {", ".join(f'"{name}"' for name in fields)}
        FROM events
        WHERE dt BETWEEN {quote_day(run.span.widen(before=1).first)} AND {run.last}
            AND (event IN ({list_texts(_STATE_EVENTS)}) OR seq = 1)
        """,
    )
    return "state_events"


def scan_members(run: JobRun) -> str:
    """
    Table `member_counts`: messages by sender and by recipient, a row for each wallet and day.

    Columns: `dt`, `side` (sender or rcpt), `member`, `epoch` (0 if unknown), `accepted`, `acked` (0 for senders),
    `bytes` (of accepted messages), `first_at` and `last_at` (of these lines).
    """
    run.scan(
        "member_counts",
        f"""
        SELECT dt, CASE WHEN grouping(sender) = 0 THEN 'sender' ELSE 'rcpt' END AS side,
            coalesce(sender, rcpt) AS member, epoch,
            count(*) FILTER (WHERE event = 'msg.accept') AS accepted,
            count(*) FILTER (WHERE event = 'msg.ack') AS acked,
            CAST(coalesce(sum(size) FILTER (WHERE event = 'msg.accept'), 0) AS BIGINT) AS bytes,
            min(ts) AS first_at, max(ts) AS last_at
        FROM (
            SELECT dt, event, CASE WHEN event = 'msg.accept' THEN sender END AS sender, rcpt,
                coalesce(epoch, 0) AS epoch, size, ts
            FROM events
            WHERE event IN ('msg.accept', 'msg.ack') AND dt BETWEEN {run.first} AND {run.last})
        GROUP BY GROUPING SETS ((dt, sender, epoch), (dt, rcpt, epoch))
        HAVING member IS NOT NULL
        """,
    )
    return "member_counts"
