"""
Schema of all tables, declared once: Spark schemas, documentation and checks are derived from it.

The schema of an event is declared once, by the daemon, in :mod:`mediatord.observability.event_schema`; the table
`events` and the schema for parsing a line are derived from it. All tables are Parquet, partitioned by `dt`, the day
in UTC. Tables that are `private` hold identifiers as the logs do; the others hold none, or pseudonyms only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS, FieldType

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Column:
    """:param type: in Spark SQL DDL. :param meaning: includes the unit."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """
    :param key: columns that identify a row, including `dt`; empty if rows may be equal.
    :param pseudonyms: columns whose identifiers are replaced by pseudonyms, subject to k-anonymity, before the table
        is written.
    :param private: it holds identifiers as in the logs.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    pseudonyms: tuple[str, ...] = ()
    private: bool = False

    def struct(self) -> StructType:
        """Spark schema, `dt` first."""
        from pyspark.sql.types import StructType

        struct = StructType.fromDDL(", ".join(f"`{column.name}` {column.type}" for column in self.columns))
        assert isinstance(struct, StructType)  # a list of columns is always a struct
        return struct


DT = Column("dt", "date", "day, UTC")
HOUR = Column("hour", "int", "hour of the day, UTC, 0 to 23")
# Commands that remove messages without a daemon log as a node of their own, NODE-operator: see PurgeEventLog.
OPERATOR_NODE_SUFFIX = "-operator"
NODE = Column("node", "string", "name of the node")
PROTO = Column("proto", "string", "didcomm, didcomm_v1 (not of messages) or decentrl; empty if unknown")
N = Column("n", "bigint", "how many")
BYTES = Column("bytes", "bigint", "bytes of payloads or bodies")
AGE = Column("age_class", "string", "age class, such as `4 <1h`")
SIZE = Column("size_class", "string", "size class, such as `2 <16K`")


def _declare_table(
    name: str,
    meaning: str,
    *columns: Column | tuple[str, str, str],
    key: str,
    pseudonyms: str = "",
    private: bool = False,
) -> Table:
    """:param key: columns besides `dt`, separated by blanks; `-` if rows may be equal."""
    every = (DT, *(column if isinstance(column, Column) else Column(*column) for column in columns))
    return Table(name, meaning, every, () if key == "-" else ("dt", *key.split()), tuple(pseudonyms.split()), private)


_TABLES = (
    # Ingest and log quality. `events` is declared below.
    _declare_table(
        "quarantine",
        "lines that are not events",
        ("stem", "string", "segment, without suffix"),
        ("cause", "string", "kind of damage, a kind of quality_daily"),
        ("line", "string", "the line, cut at 4096 characters"),
        key="-",
        private=True,
    ),
    _declare_table(
        "inputs",
        "segments that were read, by the day in their name",
        ("stem", "string", "segment, without suffix"),
        ("path", "string", "file that was read"),
        ("bytes", "bigint", "size of the file"),
        ("modified", "timestamp", "time of its last change"),
        ("packed", "string", "plain, gzip or zstd"),
        (
            "state",
            "string",
            "closed, crashed, active, partial, empty, unread or vanished: see the kinds of quality_daily",
        ),
        ("lines", "bigint", "lines read: events, duplicates, corrupt and unfinished ones"),
        ("corrupt", "bigint", "lines in quarantine"),
        ("seq_first", "bigint", "lowest seq"),
        ("seq_last", "bigint", "highest seq"),
        ("lines_said", "bigint", "number of lines by its log.close event; null without one"),
        ("unfinished", "bigint", "1 if its last line was incomplete"),
        ("doubled", "bigint", "duplicate lines, omitted"),
        ("remarks", "string", "conflict, separators, shrunk: see the kinds of quality_daily"),
        key="stem",
    ),
    _declare_table(
        "boots_daily",
        "completeness of the log lines of each start of a node",
        NODE,
        ("boot", "string", "random id of the start"),
        ("seq_first", "bigint", "lowest seq"),
        ("seq_last", "bigint", "highest seq"),
        ("n", "bigint", "events of the day"),
        ("missing", "bigint", "seq numbers without an event"),
        ("doubled", "bigint", "duplicate lines, omitted: same seq as another line"),
        (
            "stepped_back",
            "bigint",
            "clock steps back: minutes that begin with a lower seq than the minute before ended with",
        ),
        ("last_at", "timestamp", "time of its last line"),
        ("stopped", "boolean", "whether it logged proc.stop"),
        key="node boot",
    ),
    _declare_table(
        "quality_daily",
        "findings in the logs",
        NODE,
        ("kind", "string", "kind of finding; `lines` and `events` are totals"),
        N,
        key="node kind",
    ),
    # Traffic
    _declare_table(
        "traffic_hourly",
        "events and bytes by hour, of req.done and msg.* only",
        HOUR,
        NODE,
        PROTO,
        ("event", "string", "name of the event"),
        N,
        BYTES,
        key="hour node proto event",
    ),
    _declare_table(
        "traffic_daily",
        "events and bytes by day, of req.done and msg.* only",
        NODE,
        PROTO,
        ("event", "string", "name of the event"),
        N,
        BYTES,
        key="node proto event",
    ),
    # Latency
    _declare_table(
        "latency_hist",
        "histogram of durations",
        HOUR,
        NODE,
        ("metric", "string", "push or ack (since acceptance), or request"),
        ("path", "string", "live, pickup, poll or http; of requests the protocol"),
        ("bucket", "int", "b: durations from 1.02**b to 1.02**(b+1) ms"),
        N,
        key="hour node metric path bucket",
    ),
    _declare_table(
        "latency_daily",
        "percentiles from the histogram, error at most 1 %",
        ("node", "string", "name of the node, or * for all"),
        ("metric", "string", "as in latency_hist"),
        ("path", "string", "as in latency_hist, or * for all"),
        N,
        ("p50_ms", "double", "milliseconds"),
        ("p90_ms", "double", "milliseconds"),
        ("p95_ms", "double", "milliseconds"),
        ("p99_ms", "double", "milliseconds"),
        ("max_ms", "double", "upper end of the highest bucket"),
        key="node metric path",
    ),
    # Message ledger and reconciliation
    _declare_table(
        "ledger_daily",
        "message ledger: opening + accepted = acked + expired + evicted + removed + across_epochs + open",
        ("opening", "bigint", "open at the end of the day before"),
        ("accepted", "bigint", "accepted, each message once"),
        ("acked", "bigint", "acknowledged"),
        ("expired", "bigint", "expired"),
        ("evicted", "bigint", "evicted from full queues"),
        ("removed", "bigint", "removed by owner or operator"),
        ("open", "bigint", "open at the end of the day"),
        (
            "difference",
            "bigint",
            "opening + accepted minus acked, expired, evicted, removed, across_epochs and open; an error unless 0",
        ),
        (
            "orphans",
            "bigint",
            "ended without a logged acceptance since the first day of the ledger (books)",
        ),
        (
            "around_crash",
            "bigint",
            "ended without a logged acceptance; accepted just before a daemon was killed",
        ),
        (
            "before_books",
            "bigint",
            "ended without a logged acceptance; accepted before the first day of the ledger",
        ),
        ("again", "bigint", "repeated acceptances and endings of a message"),
        ("overdue", "bigint", "open more than an hour after their expiry"),
        ("vanished", "bigint", "became overdue while a daemon ran; counted once"),
        (
            "lost_unaccepted",
            "bigint",
            "expired or evicted without a logged acceptance",
        ),
        (
            "across_epochs",
            "bigint",
            "written off: accepted under an earlier key epoch, and past their expiry",
        ),
        ("ended_across_epochs", "bigint", "ended without an acceptance under their key epoch"),
        ("books", "date", "first day of the ledger: since then every day has events"),
        key="",
    ),
    _declare_table(
        "messages_daily",
        "messages by outcome, on the day of the outcome; open ones on each day",
        PROTO,
        ("state", "string", "acked, expired, evicted, removed or open"),
        AGE,
        ("pushes_class", "string", "0, 1, 2-4 or 5+ pushes"),
        N,
        BYTES,
        key="proto state age_class pushes_class",
    ),
    _declare_table(
        "lost_daily",
        "messages that expired, were evicted, or were removed by owner or operator (`purged`)",
        ("reason", "string", "ttl, fifo_count, fifo_bytes, purged, ..."),
        SIZE,
        AGE,
        ("pushed", "boolean", "whether it was pushed and not acknowledged"),
        N,
        BYTES,
        key="reason size_class age_class pushed",
    ),
    _declare_table(
        "open",
        "messages open at the end of the day",
        ("msg", "string", "message id, as in the log"),
        ("rcpt", "string", "recipient, as in the log"),
        PROTO,
        ("node", "string", "node that accepted it"),
        ("accepted_at", "timestamp", "time of acceptance"),
        ("size", "bigint", "bytes"),
        ("ttl_s", "bigint", "time to live in seconds; null: unlimited"),
        ("pushes", "bigint", "pushes so far"),
        ("epoch", "int", "key epoch of its pseudonyms"),
        key="msg",
        private=True,
    ),
    _declare_table(
        "reconciliation_daily",
        "counters of the daemon compared with log lines",
        NODE,
        ("counter", "string", "metric with its labels"),
        ("counted", "bigint", "increase of the counter"),
        ("logged", "bigint", "log lines over the same range of seq"),
        ("difference", "bigint", "counted minus logged; an error unless 0"),
        key="node counter",
    ),
    _declare_table(
        "counters",
        "last counters of each start, carried from day to day",
        NODE,
        ("boot", "string", "random id of the start"),
        ("seq", "bigint", "of the line with the counters"),
        ("counter", "string", "metric with its labels"),
        ("value", "bigint", "since the start"),
        key="node boot counter",
    ),
    _declare_table(
        "stores_daily",
        "ledger of each store, compared with log lines",
        ("store", "string", "identifier of the database"),
        PROTO,
        (
            "entry",
            "string",
            "accepted, acknowledged, expired, evicted, removed, withdrawn, waiting or difference",
        ),
        ("total", "bigint", "lifetime total by the last ledger of the day; null if unknown"),
        (
            "change",
            "bigint",
            "increase since the last ledger of the two hours before the day, or else since its first",
        ),
        ("logged", "bigint", "log lines of that kind in the same period; null if there is no such kind of line"),
        ("own", "bigint", "probe messages in the same period, which have no log lines"),
        (
            "gap",
            "bigint",
            "change minus logged and own; for accepted also minus the change of withdrawn",
        ),
        key="store proto entry",
    ),
    # Queues
    _declare_table(
        "queue_hourly",
        "maxima of the hour: queues, sockets, memory, reactor lag",
        HOUR,
        NODE,
        ("depth_max", "bigint", "queued messages in the store"),
        ("depth_mean", "double", "the same, mean"),
        ("bytes_max", "bigint", "queued bytes"),
        ("rcpts_max", "bigint", "recipients with queued messages"),
        ("oldest_ms_max", "bigint", "age of the oldest message"),
        ("conns_max", "bigint", "open sockets"),
        ("rss_max", "bigint", "resident memory in bytes"),
        ("fds_max", "bigint", "open file descriptors"),
        ("lag_ms_max", "double", "reactor lag"),
        key="hour node",
    ),
    _declare_table(
        "queue_risk",
        "queues that will lose messages soonest if they grow as on the day",
        ("rank", "int", "1 is the most urgent: by at_risk, then waiting"),
        ("rcpt", "string", "pseudonym"),
        (
            "at_risk",
            "bigint",
            "messages that will expire or be evicted within a day",
        ),
        ("waiting", "bigint", "queued messages"),
        BYTES,
        (
            "per_day",
            "double",
            "growth in messages; null: unknown, without a ledger of the day before",
        ),
        (
            "days_to_cap",
            "double",
            "days until the queue is full (queue.max_messages); null: it does not grow, or growth is unknown",
        ),
        ("days_to_ttl", "double", "days until the first expires; null: never"),
        key="rank",
        pseudonyms="rcpt",
    ),
    # Errors
    _declare_table(
        "errors_daily",
        "requests and frames that were refused or failed",
        PROTO,
        ("mtype", "string", "message type or command; empty if unknown"),
        ("status", "bigint", "HTTP status; 0 if unknown"),
        ("code", "string", "problem or error code; empty if there is only a status"),
        N,
        ("senders", "bigint", "distinct senders; null: fewer than k_anonymity"),
        ("share", "double", "of all requests, 0 to 1"),
        ("is_new", "boolean", "not seen on any earlier day"),
        key="proto mtype status code",
    ),
    _declare_table(
        "error_senders",
        "senders with the most refusals",
        ("rank", "int", "1 is the largest"),
        ("sender", "string", "pseudonym"),
        N,
        ("codes", "bigint", "distinct codes"),
        ("worst", "string", "most frequent code"),
        key="rank",
        pseudonyms="sender",
    ),
    # Rate limits
    _declare_table(
        "limits_daily",
        "rate limits that were hit",
        ("limit", "string", "name of the limit"),
        ("hits", "bigint", "refusals"),
        ("who_n", "bigint", "distinct parties; null: fewer than k_anonymity"),
        ("bursts", "bigint", "series of hits by one party without a pause longer than burst_gap_s"),
        ("longest_burst_s", "double", "seconds"),
        ("share", "double", "share of the senders of accepted messages that hit it, 0 to 1; null if who_n is"),
        key="limit",
    ),
    _declare_table(
        "limits_top",
        "parties with the most hits on rate limits",
        ("rank", "int", "1 is the largest"),
        ("who", "string", "pseudonym of a DID or network"),
        ("limit", "string", "name of the limit"),
        ("hits", "bigint", "refusals"),
        ("bursts", "bigint", "series of hits"),
        key="rank",
        pseudonyms="who",
    ),
    # Replays
    _declare_table(
        "replay_daily",
        "replayed or untimely requests",
        ("code", "string", "error code"),
        (
            "age_class",
            "string",
            "age by its timestamp: fresh (within 5 min), skew (10 min), old (a day), ancient, future (over 10 min"
            " ahead); empty if unknown",
        ),
        N,
        ("senders", "bigint", "distinct senders; null: fewer than k_anonymity"),
        ("on_nodes", "bigint", "of them, seen by several nodes; null: fewer than k_anonymity"),
        key="code age_class",
    ),
    # Senders and recipients
    _declare_table(
        "top_senders",
        "largest senders",
        ("rank", "int", "1 is the largest"),
        ("sender", "string", "pseudonym"),
        N,
        BYTES,
        ("partners", "bigint", "distinct recipients"),
        key="rank",
        pseudonyms="sender",
    ),
    _declare_table(
        "top_recipients",
        "largest recipients",
        ("rank", "int", "1 is the largest"),
        ("rcpt", "string", "pseudonym"),
        N,
        BYTES,
        ("partners", "bigint", "distinct senders"),
        key="rank",
        pseudonyms="rcpt",
    ),
    _declare_table(
        "concentration_daily",
        "distribution of messages over senders and recipients",
        ("side", "string", "sender or rcpt"),
        ("members", "bigint", "distinct DIDs"),
        ("n", "bigint", "messages accepted; on the side of senders, from known ones only"),
        (
            "top_share",
            "double",
            "share of the largest 1 % of members, 0 to 1; null: fewer than k_anonymity",
        ),
        (
            "gini",
            "double",
            "Gini coefficient: 0 if all are equal, near 1 if one dominates; null: fewer than k_anonymity",
        ),
        key="side",
    ),
    # Recipient activity and retention
    _declare_table(
        "recipients_daily",
        "activity of each recipient",
        ("rcpt", "string", "recipient, as in the log"),
        ("epoch", "int", "key epoch of its pseudonyms"),
        ("accepted", "bigint", "messages accepted for it"),
        ("acked", "bigint", "messages it acknowledged"),
        ("first_at", "timestamp", "first of these events"),
        ("last_at", "timestamp", "last of these events"),
        ("since", "date", "first day of activity without a pause of more than 35 days"),
        ("acked_on", "date", "last day with an acknowledgement; null: none"),
        key="rcpt epoch",
        private=True,
    ),
    _declare_table(
        "dormant_daily",
        "dormant, active and new recipients",
        (
            "dormant",
            "bigint",
            "recipients with open messages that acknowledged nothing for dormant_days",
        ),
        ("waiting", "bigint", "their open messages"),
        BYTES,
        ("active", "bigint", "recipients that acknowledged"),
        ("fresh", "bigint", "recipients not seen in the 35 days before"),
        key="",
    ),
    _declare_table(
        "retention_weekly",
        "retention: recipients that still acknowledge, by the week in which they were first seen",
        ("epoch", "int", "key epoch"),
        ("cohort", "date", "Monday of the first week"),
        ("week", "int", "weeks since, 0 to 4"),
        ("members", "bigint", "recipients first seen then; null: fewer than k_anonymity"),
        (
            "active",
            "bigint",
            "of them, acknowledged in this week; null: fewer than k_anonymity",
        ),
        key="epoch cohort week",
    ),
    # Sockets
    _declare_table(
        "sessions_daily",
        "closed sockets by close code",
        NODE,
        PROTO,
        ("ws_code", "bigint", "close code; 1006 without a close frame"),
        ("reason", "string", "side that closed it: us (the mediator) or peer"),
        N,
        ("dur_p50_ms", "double", "median duration"),
        ("dur_p95_ms", "double", "95th percentile of the duration"),
        ("n_in", "bigint", "messages received"),
        ("n_out", "bigint", "messages sent"),
        ("bytes_in", "bigint", "bytes received"),
        ("bytes_out", "bigint", "bytes sent"),
        key="node proto ws_code reason",
    ),
    _declare_table(
        "sockets_daily",
        "sockets opened, closed and left open",
        NODE,
        ("opened", "bigint", "opened"),
        ("authenticated", "bigint", "bound to a DID"),
        ("closed", "bigint", "closed"),
        ("unclosed", "bigint", "still open when their process ended: a crash or missing lines"),
        ("storm_minutes", "bigint", "minutes with more than 100 opened sockets and more than ten times the median"),
        ("peak", "bigint", "maximum of concurrent sockets"),
        key="node",
    ),
    _declare_table(
        "concurrency_10m",
        "concurrent sockets by ten minutes",
        NODE,
        ("at", "timestamp", "start of the ten minutes"),
        ("peak", "bigint", "maximum of concurrent sockets"),
        ("at_end", "bigint", "sockets open at the end of the ten minutes"),
        key="node at",
    ),
    # Push notifications
    _declare_table(
        "push_daily",
        "requests to push services by outcome, and devices forgotten as dead, by reason",
        ("event", "string", "push.wake or push.forget"),
        ("service", "string", "push service"),
        ("result", "string", "outcome of the request, or reason why the device was forgotten"),
        ("code", "string", "error code of the service; empty if there is none"),
        N,
        key="event service result code",
    ),
    _declare_table(
        "wakeups_daily",
        "wake-ups of accounts that ended on the day, and how soon the wallet responded",
        ("service", "string", "push service, or * for all; a wake-up by several services counts for each"),
        ("n", "bigint", "wake-ups; devices of an account woken within a second count once"),
        ("missed", "bigint", "of them, without a contact of the account within an hour"),
        ("missed_share", "double", "missed divided by n, 0 to 1"),
        ("p50_ms", "double", "milliseconds from the request to the next contact, median"),
        ("p90_ms", "double", "the same, 90th percentile"),
        ("p99_ms", "double", "the same, 99th percentile"),
        key="service",
    ),
    _declare_table(
        "wakeups_missed_top",
        "accounts with the most wake-ups, of those that picked up none",
        ("rank", "int", "1 is the largest"),
        ("did", "string", "pseudonym"),
        ("n", "bigint", "wake-ups that ended on the day"),
        ("services", "string", "push services"),
        key="rank",
        pseudonyms="did",
    ),
    # Nodes
    _declare_table(
        "node_compare",
        "each node compared with the median of all",
        NODE,
        (
            "metric",
            "string",
            "name of the figure, with its unit",
        ),
        ("value", "double", "value of the node; counts are 0 if it had none"),
        ("median", "double", "median of all nodes"),
        ("ratio", "double", "value divided by the median"),
        ("flagged", "boolean", "ratio outside 1/node_factor to node_factor"),
        key="node metric",
    ),
    # Time series, anomalies, forecast
    _declare_table(
        "series_hourly",
        "figures of all nodes by hour; counts are 0 in an outage",
        HOUR,
        ("metric", "string", "name of the figure"),
        ("value", "double", "value of the hour"),
        key="hour metric",
    ),
    _declare_table(
        "anomalies",
        "hours that differ strongly from the same hours of earlier days",
        HOUR,
        ("metric", "string", "name of the figure"),
        ("value", "double", "value of the hour"),
        ("expected", "double", "median of the baseline"),
        ("spread", "double", "1.4826 times the median absolute deviation, with a floor"),
        ("z", "double", "(value - expected) / spread"),
        ("samples", "int", "hours in the baseline"),
        ("baseline", "string", "hour_of_week or hour_of_day"),
        ("reason", "string", "the finding as a sentence"),
        key="hour metric",
    ),
    _declare_table(
        "series_daily",
        "figures of all nodes by day",
        ("metric", "string", "name of the figure"),
        ("value", "double", "value of the day"),
        key="metric",
    ),
    _declare_table(
        "forecast",
        "forecast made on the day",
        ("metric", "string", "name of the figure"),
        ("day", "date", "day of the forecast"),
        ("value", "double", "expected"),
        ("low", "double", "lower end of the 80 % interval"),
        ("high", "double", "upper end of the 80 % interval"),
        key="metric day",
    ),
    _declare_table(
        "forecast_error",
        "error of a forecast that leaves out the last days",
        ("metric", "string", "name of the figure"),
        ("held_back", "int", "last days that were left out"),
        ("trained_on", "int", "days of history it was made from"),
        ("mape", "double", "mean absolute error divided by the mean value"),
        ("naive_mape", "double", "the same for a forecast that repeats the week before"),
        ("inside", "double", "share of the days left out that were inside the interval"),
        key="metric",
    ),
    # Cost
    _declare_table(
        "cost_daily",
        "processing time of requests by type and size",
        PROTO,
        ("mtype", "string", "message type or command; empty if unknown"),
        SIZE,
        N,
        ("dur_ms", "double", "sum, milliseconds"),
        ("crypto_ms", "double", "of it, cryptography, milliseconds"),
        ("dur_p50_ms", "double", "median duration"),
        ("dur_p95_ms", "double", "95th percentile of the duration"),
        key="proto mtype size_class",
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}


_SQL_TYPES: dict[FieldType, str] = {"string": "string", "integer": "bigint", "number": "double", "boolean": "boolean"}
_NARROWER_TYPES = {"v": "int", "epoch": "int", "ts": "timestamp"}

_INGEST_COLUMNS = (
    DT,
    Column("batch", "date", "day in the name of the segment, UTC"),
    Column("stem", "string", "segment, without suffix"),
)


def make_event_columns() -> tuple[Column, ...]:
    """`dt`, `batch`, `stem`, the envelope, and every field that an event may have."""
    declared = {**ENVELOPE, **FIELDS}
    return (
        *_INGEST_COLUMNS,
        *(Column(name, _get_sql_type(name, kind), about) for name, (kind, about) in declared.items()),
    )


def make_events_table() -> Table:
    """The table `events`; partitioned by `dt`, the day of the event, and `batch`."""
    return Table("events", "one row for each event", make_event_columns(), key=(), private=True)


def list_known_events() -> list[str]:
    """Names of all declared events."""
    return list(EVENTS)


def _get_sql_type(name: str, kind: FieldType) -> str:
    return _NARROWER_TYPES.get(name) or _SQL_TYPES[kind]
