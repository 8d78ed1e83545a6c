"""
The tables that ingest and jobs make, declared once: Spark schema, documentation and checks are derived from here.

All are Parquet, partitioned by `dt`, the day in UTC. Tables that are `private` hold identifiers as they stand in the
logs; the others hold none, or pseudonyms only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Column:
    """:param type: as in Spark SQL DDL. :param meaning: with the unit."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """
    :param key: columns that no two rows share, `dt` among them; empty if rows may be alike.
    :param pseudonyms: columns with identifiers that are made pseudonyms, and shown only as k-anonymity allows,
        before the table is written.
    :param private: it holds identifiers as they are in the logs.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    pseudonyms: tuple[str, ...] = ()
    private: bool = False

    def struct(self) -> StructType:
        """Its schema, `dt` first."""
        from pyspark.sql.types import StructType

        struct = StructType.fromDDL(", ".join(f"`{column.name}` {column.type}" for column in self.columns))
        assert isinstance(struct, StructType)  # a list of columns is nothing else
        return struct


DT = Column("dt", "date", "day, UTC")
HOUR = Column("hour", "int", "hour of the day, UTC, 0 to 23")
NODE = Column("node", "string", "name of the node")
PROTO = Column("proto", "string", "didcomm or decentrl; empty where the log does not say")
N = Column("n", "bigint", "how many")
BYTES = Column("bytes", "bigint", "bytes of payloads or bodies")
AGE = Column("age_class", "string", "class of age: see :func:`analytics.classes.age_class`")
SIZE = Column("size_class", "string", "class of size: see :func:`analytics.classes.size_class`")


def _table(
    name: str,
    meaning: str,
    *columns: Column | tuple[str, str, str],
    key: str,
    pseudonyms: str = "",
    private: bool = False,
) -> Table:
    """:param key: columns beside `dt`, by blanks; `-` if rows may be alike."""
    every = (DT, *(column if isinstance(column, Column) else Column(*column) for column in columns))
    return Table(name, meaning, every, () if key == "-" else ("dt", *key.split()), tuple(pseudonyms.split()), private)


_ALL = (
    # J0: ingest and quality. `events` has the columns of the event schema: see analytics.schema.
    _table(
        "quarantine",
        "lines that are no events",
        ("stem", "string", "segment, without suffix"),
        ("cause", "string", "kind of damage: see docs/how-to/read-a-nightly-report.md"),
        ("line", "string", "the line as it was read, 4096 characters at most"),
        key="-",
        private=True,
    ),
    _table(
        "inputs",
        "segments read, under the day in their name",
        ("stem", "string", "segment, without suffix"),
        ("path", "string", "where it was read"),
        ("bytes", "bigint", "bytes of the file"),
        ("modified", "timestamp", "time of its last change"),
        ("packed", "string", "plain, gzip or zstd"),
        (
            "state",
            "string",
            "closed, crashed (no log.close), active (growing), partial (damaged archive), empty, unread or vanished",
        ),
        ("lines", "bigint", "lines read, damaged, unfinished and doubled ones too"),
        ("corrupt", "bigint", "lines that are in quarantine"),
        ("seq_first", "bigint", "lowest seq of an event"),
        ("seq_last", "bigint", "highest seq of an event"),
        ("lines_said", "bigint", "lines by its own log.close; null without one"),
        ("unfinished", "bigint", "1 if its last line had no end yet, as it was still written; not in quarantine"),
        ("doubled", "bigint", "lines left out as another one of the batch has their node, boot and seq"),
        ("remarks", "string", "conflict, separators, shrunk, by blanks: see docs/how-to/read-a-nightly-report.md"),
        key="stem",
    ),
    _table(
        "boots_daily",
        "lines of each start of each node",
        NODE,
        ("boot", "string", "random id of the start"),
        ("seq_first", "bigint", "lowest seq of the day"),
        ("seq_last", "bigint", "highest seq of the day"),
        ("n", "bigint", "events of the day"),
        ("missing", "bigint", "seq up to the last of the day, from the last of all days before, that no event has"),
        ("doubled", "bigint", "events whose seq was there already; they count once everywhere"),
        (
            "stepped_back",
            "bigint",
            "minutes that begin with a lower seq than the one before ended with, or a day did: the clock went back",
        ),
        ("last_at", "timestamp", "time of its last line of the day"),
        ("stopped", "boolean", "whether it stopped in order on the day: it logged proc.stop"),
        key="node boot",
    ),
    _table(
        "quality_daily",
        "what was found wrong with the logs, by kind",
        NODE,
        ("kind", "string", "see docs/how-to/read-a-nightly-report.md; `lines` and `events` are the totals"),
        N,
        key="node kind",
    ),
    # J1
    _table(
        "traffic_hourly",
        "events and bytes; of req.done and msg.* only",
        HOUR,
        NODE,
        PROTO,
        ("event", "string", "name of the event"),
        N,
        BYTES,
        key="hour node proto event",
    ),
    _table(
        "traffic_daily",
        "the same a day",
        NODE,
        PROTO,
        ("event", "string", "name of the event"),
        N,
        BYTES,
        key="node proto event",
    ),
    # J2
    _table(
        "latency_hist",
        "histogram of durations; bucket b holds 1.02**b to 1.02**(b+1) ms",
        HOUR,
        NODE,
        ("metric", "string", "push or ack (since acceptance), request (dur_ms of req.done)"),
        ("path", "string", "live, pickup, poll or http; of requests the protocol"),
        ("bucket", "int", "floor(ln ms / ln 1.02); what is below 0.001 ms counts as that"),
        N,
        key="hour node metric path bucket",
    ),
    _table(
        "latency_daily",
        "percentiles from the histogram, at most 2 % wrong",
        ("node", "string", "name of the node; * is all of them"),
        ("metric", "string", "as in latency_hist"),
        ("path", "string", "as in latency_hist; * is all of them"),
        N,
        ("p50_ms", "double", "milliseconds"),
        ("p90_ms", "double", "milliseconds"),
        ("p95_ms", "double", "milliseconds"),
        ("p99_ms", "double", "milliseconds"),
        ("max_ms", "double", "milliseconds, upper end of the highest bucket"),
        key="node metric path",
    ),
    # J3
    _table(
        "ledger_daily",
        "where the messages went: opening + accepted = acked + expired + evicted + removed + across_epochs + open",
        ("opening", "bigint", "open at the end of the day before"),
        ("accepted", "bigint", "messages accepted, each once"),
        ("acked", "bigint", "acknowledged: delivered"),
        ("expired", "bigint", "dropped at the end of their time"),
        ("evicted", "bigint", "dropped to make room"),
        ("removed", "bigint", "removed by owner or operator"),
        ("open", "bigint", "open at the end of the day"),
        ("difference", "bigint", "opening + accepted less all the others; anything but 0 is a fault"),
        (
            "orphans",
            "bigint",
            "messages that ended without having been accepted in any log since the books were opened",
        ),
        (
            "around_crash",
            "bigint",
            "messages that ended whose acceptance was lost with the last moment of a start that was killed",
        ),
        (
            "before_books",
            "bigint",
            "messages that ended and were accepted before the books were opened, by their age",
        ),
        ("again", "bigint", "further lines that accept or end a message once more; not counted elsewhere"),
        ("overdue", "bigint", "open more than an hour past the end of their time, whenever that was"),
        ("vanished", "bigint", "messages that became overdue although a daemon ran; each counts once"),
        (
            "lost_unaccepted",
            "bigint",
            "messages that expired, were evicted or removed, and of which no line says that they were accepted",
        ),
        (
            "across_epochs",
            "bigint",
            "written off: accepted under an earlier key epoch and past their time, as their ending has another tag",
        ),
        ("ended_across_epochs", "bigint", "endings without an acceptance under their own key epoch"),
        ("books", "date", "the day the books were opened: the first with events in an unbroken row of days"),
        key="",
    ),
    _table(
        "messages_daily",
        "messages by what became of them, on the day it did; open ones each day",
        PROTO,
        ("state", "string", "acked, expired, evicted, removed or open"),
        AGE,
        ("pushes_class", "string", "0, 1, 2-4 or 5+ times handed over"),
        N,
        BYTES,
        key="proto state age_class pushes_class",
    ),
    _table(
        "lost_daily",
        "messages that were never delivered: expired, evicted, removed",
        ("reason", "string", "ttl, fifo_count, fifo_bytes, deregistered, admin, ..."),
        SIZE,
        AGE,
        ("pushed", "boolean", "whether it was handed over and not acknowledged"),
        N,
        BYTES,
        key="reason size_class age_class pushed",
    ),
    _table(
        "open",
        "messages open at the end of the day",
        ("msg", "string", "tag of the message"),
        ("rcpt", "string", "tag of the recipient"),
        PROTO,
        ("node", "string", "that accepted it"),
        ("accepted_at", "timestamp", "when it was accepted"),
        ("size", "bigint", "bytes"),
        ("ttl_s", "bigint", "seconds it may wait; null: for ever"),
        ("pushes", "bigint", "times handed over so far"),
        ("epoch", "int", "of the key that its tags were made with"),
        key="msg",
        private=True,
    ),
    _table(
        "reconciliation_daily",
        "the daemon's own counters against its log lines",
        NODE,
        ("counter", "string", "metric of the daemon, with its labels"),
        ("counted", "bigint", "by how much the counter grew"),
        ("logged", "bigint", "log lines over the same stretch of seq"),
        ("difference", "bigint", "counted less logged; anything but 0 is a fault"),
        key="node counter",
    ),
    _table(
        "counters",
        "last counters of each start at the end of the day, carried on from day to day",
        NODE,
        ("boot", "string", "random id of the start"),
        ("seq", "bigint", "of the line with the counters"),
        ("counter", "string", "metric of the daemon, with its labels"),
        ("value", "bigint", "since the start"),
        key="node boot counter",
    ),
    _table(
        "stores_daily",
        "the store's own books at the end of the day, and what they grew by against the lines of the log",
        ("store", "string", "what stands for the database: all that share one have the same"),
        PROTO,
        (
            "entry",
            "string",
            "accepted, acknowledged, expired, evicted, removed, withdrawn, waiting or difference",
        ),
        ("total", "bigint", "by the last ledger of the day; null where that does not know what waits"),
        ("change", "bigint", "since the last ledger of the two hours before the day, or else its own first one"),
        ("logged", "bigint", "log lines of that kind since then; null where there are none of that kind"),
        ("own", "bigint", "messages of the daemon to itself since then, which have no lines"),
        (
            "gap",
            "bigint",
            "change less logged and own, of accepted also less the change of withdrawn; what it may be: see"
            " docs/how-to/read-a-nightly-report.md",
        ),
        key="store proto entry",
    ),
    # J4
    _table(
        "queue_hourly",
        "state of queues and process",
        HOUR,
        NODE,
        ("depth_max", "bigint", "messages in all queues of the store, highest of the hour"),
        ("depth_mean", "double", "the same, mean"),
        ("bytes_max", "bigint", "bytes in all queues"),
        ("rcpts_max", "bigint", "recipients with waiting messages"),
        ("oldest_ms_max", "bigint", "age of the oldest message, milliseconds"),
        ("conns_max", "bigint", "open sockets"),
        ("rss_max", "bigint", "resident bytes of the process"),
        ("fds_max", "bigint", "open file descriptors"),
        ("lag_ms_max", "double", "how late the reactor was, milliseconds"),
        key="hour node",
    ),
    _table(
        "queue_risk",
        "the queues that lose most messages next, and when, at the day's slope",
        ("rank", "int", "1 is the most urgent: by at_risk, then waiting"),
        ("rcpt", "string", "pseudonym of the recipient"),
        (
            "at_risk",
            "bigint",
            "messages that expire within the next day unless fetched, or exceed queue.max_messages at that slope if"
            " there is one",
        ),
        ("waiting", "bigint", "messages open at the end of the day"),
        BYTES,
        (
            "per_day",
            "double",
            "by how many more messages wait than a day before: accepted less ended; null: no books of that day",
        ),
        ("days_to_cap", "double", "days until queue.max_messages at that slope; null: never, or no slope"),
        ("days_to_ttl", "double", "days from the end of the day until the first of them expires; null: never"),
        key="rank",
        pseudonyms="rcpt",
    ),
    # J5
    _table(
        "errors_daily",
        "requests and frames that were refused or failed",
        PROTO,
        ("mtype", "string", "message type or command; empty where unknown"),
        ("status", "bigint", "HTTP status; 0 where unknown"),
        ("code", "string", "problem or error code; empty where there is only a status of 400 or above"),
        N,
        ("senders", "bigint", "distinct senders known by DID; null: at least 1, fewer than k_anonymity"),
        ("share", "double", "of all requests of the day, 0 to 1"),
        ("is_new", "boolean", "the code was not seen on any earlier day that there is"),
        key="proto mtype status code",
    ),
    _table(
        "error_senders",
        "senders with most refusals",
        ("rank", "int", "1 is the largest"),
        ("sender", "string", "pseudonym"),
        N,
        ("codes", "bigint", "distinct codes"),
        ("worst", "string", "its most frequent code"),
        key="rank",
        pseudonyms="sender",
    ),
    # J6
    _table(
        "limits_daily",
        "rate limits that were hit",
        ("limit", "string", "which limit"),
        ("hits", "bigint", "refusals"),
        ("who_n", "bigint", "distinct parties that hit it; null: at least 1, fewer than k_anonymity"),
        ("bursts", "bigint", "runs of hits of one party without a gap over burst_gap_s"),
        ("longest_burst_s", "double", "seconds"),
        ("share", "double", "parties that sent accepted messages, of all who did, 0 to 1; null with who_n"),
        key="limit",
    ),
    _table(
        "limits_top",
        "parties that hit limits most",
        ("rank", "int", "1 is the largest"),
        ("who", "string", "pseudonym of a DID or network"),
        ("limit", "string", "which limit"),
        ("hits", "bigint", "refusals"),
        ("bursts", "bigint", "runs of hits"),
        key="rank",
        pseudonyms="who",
    ),
    # J7
    _table(
        "replay_daily",
        "repeated or untimely requests",
        ("code", "string", "error code"),
        (
            "age_class",
            "string",
            "age by its own clock: fresh (off by 5 minutes at most, either way), skew (by 5 to 10 minutes), old (to a"
            " day), ancient (more), future (over 10 minutes ahead); empty where unknown",
        ),
        N,
        ("senders", "bigint", "distinct senders; null: at least 1, fewer than k_anonymity"),
        ("on_nodes", "bigint", "of them, those seen at several nodes; null: at least 1, fewer than k_anonymity"),
        key="code age_class",
    ),
    # J8
    _table(
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
    _table(
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
    _table(
        "concentration_daily",
        "how unevenly messages are spread",
        ("side", "string", "sender or rcpt"),
        ("members", "bigint", "distinct DIDs"),
        ("n", "bigint", "messages accepted; without those of unknown senders where side is sender"),
        (
            "top_share",
            "double",
            "of messages, by the largest 1 % of members, at least one; 0 to 1; null: fewer than k_anonymity",
        ),
        ("gini", "double", "0 all alike, towards 1 all with one; null: fewer members than k_anonymity"),
        key="side",
    ),
    # J9
    _table(
        "recipients_daily",
        "what each recipient did",
        ("rcpt", "string", "tag of the recipient"),
        ("epoch", "int", "of the key that its tag was made with"),
        ("accepted", "bigint", "messages accepted for it"),
        ("acked", "bigint", "messages it acknowledged"),
        ("first_at", "timestamp", "first of these events"),
        ("last_at", "timestamp", "last of these events"),
        ("since", "date", "day that it is known since, without a pause of over 35 days"),
        ("acked_on", "date", "last day on which it acknowledged; null: never since then"),
        key="rcpt epoch",
        private=True,
    ),
    _table(
        "dormant_daily",
        "recipients that fetch nothing",
        (
            "dormant",
            "bigint",
            "recipients with open messages, known for dormant_days, that acknowledged nothing in them",
        ),
        ("waiting", "bigint", "messages open for them"),
        BYTES,
        ("active", "bigint", "recipients that acknowledged on the day"),
        ("fresh", "bigint", "recipients that were not seen in the 35 days before"),
        key="",
    ),
    _table(
        "retention_weekly",
        "as of each day: recipients that acknowledged in the week of the day, by the week they were first seen in;"
        " never across a key epoch; the last day of a week has its final figures",
        ("epoch", "int", "of the key of the tags"),
        ("cohort", "date", "Monday of the first week"),
        ("week", "int", "weeks since, 0 is the first, 4 the last"),
        ("members", "bigint", "recipients first seen in that week; null: fewer than k_anonymity"),
        (
            "active",
            "bigint",
            "of them, those that acknowledged in this week; null: at least 1, fewer than k_anonymity",
        ),
        key="epoch cohort week",
    ),
    # J10
    _table(
        "sessions_daily",
        "sockets that closed on the day",
        NODE,
        PROTO,
        ("ws_code", "bigint", "close code; 1006 without a close frame"),
        ("reason", "string", "who began to close: us or peer"),
        N,
        ("dur_p50_ms", "double", "duration, milliseconds"),
        ("dur_p95_ms", "double", "duration, milliseconds"),
        ("n_in", "bigint", "messages in"),
        ("n_out", "bigint", "messages out"),
        ("bytes_in", "bigint", "bytes in"),
        ("bytes_out", "bigint", "bytes out"),
        key="node proto ws_code reason",
    ),
    _table(
        "sockets_daily",
        "sockets of a day",
        NODE,
        ("opened", "bigint", "sockets opened"),
        ("authenticated", "bigint", "bound to a DID"),
        ("closed", "bigint", "sockets closed"),
        ("unclosed", "bigint", "opened by starts that ended, and never closed: a crash or lost lines"),
        ("storm_minutes", "bigint", "minutes with over ten times the median of opened sockets, and over 100"),
        ("peak", "bigint", "most open sockets at a time"),
        key="node",
    ),
    _table(
        "concurrency_10m",
        "open sockets in each ten minutes",
        NODE,
        ("at", "timestamp", "beginning of the ten minutes"),
        ("peak", "bigint", "most at a time"),
        ("at_end", "bigint", "open at their end"),
        key="node at",
    ),
    # J11
    _table(
        "node_compare",
        "each node against the fleet",
        NODE,
        (
            "metric",
            "string",
            "what is compared, with its unit: see :data:`analytics.jobs.nodes.METRICS`; push_live_p95_ms is the 95th"
            " percentile of live pushes, request_p95_ms of requests",
        ),
        ("value", "double", "of the node; of a count 0 where it had none"),
        ("median", "double", "of all nodes"),
        ("ratio", "double", "value by median, each at least what is worth comparing"),
        ("flagged", "boolean", "outside 1/node_factor to node_factor"),
        key="node metric",
    ),
    # J12
    _table(
        "series_hourly",
        "the fleet's figures that anomalies are looked for in; counts are 0 in hours between logs",
        HOUR,
        ("metric", "string", "name, with its unit"),
        ("value", "double", "of the hour"),
        key="hour metric",
    ),
    _table(
        "anomalies",
        "hours unlike the same hours of the weeks before",
        HOUR,
        ("metric", "string", "as in series_hourly"),
        ("value", "double", "of the hour"),
        ("expected", "double", "median of the baseline"),
        ("spread", "double", "1.4826 times the median deviation from it, with a floor"),
        ("z", "double", "(value - expected) / spread"),
        ("samples", "int", "hours in the baseline"),
        ("baseline", "string", "hour_of_week or hour_of_day"),
        ("reason", "string", "the finding as a sentence"),
        key="hour metric",
    ),
    _table(
        "series_daily",
        "the fleet's figures that are forecast",
        ("metric", "string", "name, with its unit"),
        ("value", "double", "of the day"),
        key="metric",
    ),
    _table(
        "forecast",
        "days to come, as expected on the day",
        ("metric", "string", "as in series_daily"),
        ("day", "date", "the day it is about"),
        ("value", "double", "expected"),
        ("low", "double", "lower end of the 80 % interval"),
        ("high", "double", "upper end of the 80 % interval"),
        key="metric day",
    ),
    _table(
        "forecast_error",
        "how wrong a forecast without the last days would have been on them",
        ("metric", "string", "as in series_daily"),
        ("held_back", "int", "days held back"),
        ("trained_on", "int", "days it was made from"),
        ("mape", "double", "mean absolute error by mean value, 0 is perfect"),
        ("naive_mape", "double", "the same for repeating the week before"),
        ("inside", "double", "share of held-back days inside the interval"),
        key="metric",
    ),
    # J13
    _table(
        "cost_daily",
        "time spent on requests",
        PROTO,
        ("mtype", "string", "message type or command; empty where unknown"),
        SIZE,
        N,
        ("dur_ms", "double", "sum of dur_ms, milliseconds"),
        ("crypto_ms", "double", "sum of crypto_ms, milliseconds"),
        ("dur_p50_ms", "double", "median of dur_ms"),
        ("dur_p95_ms", "double", "95th percentile of dur_ms"),
        key="proto mtype size_class",
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _ALL}
