"""
The main totals of log files by DuckDB, from their raw lines and from the published tables of the analysis.

An independent implementation: it shares no code with the analysis, and derives every total from the lines of all
days at once, where the analysis carries results from day to day. Definitions are those of the reference of tables.

`python -m tests.analytics.raw_log_totals LOGS OUT FIRST LAST` prints the totals that differ. Rankings are equal only
with the setting `k_anonymity: 1`, and if parties are pseudonyms in the log already.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import duckdb

Rows = list[tuple[Any, ...]]

# The fields of a line that a total needs, by their type in JSON.
_TEXTS = (
    "ts node boot event level segment msg rcpt sender proto method path code mtype reason limit who did conn service"
    " outcome"
)
_INTEGERS = (
    "v seq epoch size ttl_s latency_ms age_ms status ws_code n_in n_out bytes_in bytes_out depth dropped forwarded"
    " stored delivered expired evicted requests_accepted requests_rejected requests_failed connections"
)
_FIELDS = {
    **dict.fromkeys(_TEXTS.split(), "VARCHAR"),
    **dict.fromkeys(_INTEGERS.split(), "BIGINT"),
    **dict.fromkeys(("dur_ms", "crypto_ms"), "DOUBLE"),
    "ok": "BOOLEAN",
}
_ENVELOPE = ("v", "ts", "seq", "node", "boot", "event", "level", "epoch")

# Files are read as Latin-1, in which every byte is a character, so that no line is lost to the reader.
_UTF8 = (
    r"([\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    r"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*"
)


@dataclass(frozen=True, slots=True)
class Total:
    """:param raw: query of the tables of `raw_log.sql`. :param published: the same of published tables; day first."""

    raw: str
    published: str


# Columns of published tables that are not the field of the same name, or are not text.
_DERIVED_COLUMNS = {"status": "coalesce(status, 0)", "result": "coalesce(outcome, reason, '')"}


def _count(table: str, columns: str, where: str, n: str = "n") -> Total:
    """Number of events by some columns. :param n: column of the published table to sum."""
    names = columns.split()
    raw = ", ".join(_DERIVED_COLUMNS.get(name, f"coalesce(\"{name}\", '')") for name in names)
    published = ", ".join(f'"{name}"' for name in names)
    return Total(
        f"SELECT day, {raw}, count(*) FROM event WHERE {where} GROUP BY ALL",
        f"SELECT dt, {published}, sum({n})::BIGINT FROM {table} WHERE {n} > 0 GROUP BY ALL",
    )


_PROTO = "coalesce(proto, '') AS proto"
_REFUSED = "(code IS NOT NULL OR status >= 400)"

TOTALS: dict[str, Total] = {
    "lines": Total(
        """
        SELECT day, node, count(*) FROM (
            SELECT segment_day AS day, segment_node AS node FROM event UNION ALL SELECT day, node FROM damaged
            UNION ALL SELECT day, node FROM repeated)
        GROUP BY ALL
        """,
        "SELECT dt, node, n FROM quality_daily WHERE kind = 'lines' AND n > 0",
    ),
    "events": Total(
        "SELECT day, node, count(*) FROM event GROUP BY ALL",
        "SELECT dt, node, n FROM quality_daily WHERE kind = 'events' AND n > 0",
    ),
    "events_by_name": Total(
        "SELECT day, node, event, count(*) FROM event GROUP BY ALL",
        "SELECT dt, node, event, count(*) FROM events GROUP BY ALL",
    ),
    "damaged": Total(
        "SELECT day, node, cause, count(*) FROM damaged GROUP BY ALL",
        """
        SELECT dt, regexp_extract(stem, 'Z-(.*)-[0-9a-f]+-[0-9]+$', 1) AS node, cause, count(*) FROM quarantine
        GROUP BY ALL
        """,
    ),
    "missing": Total(
        """
        SELECT day, node, boot,
            last - coalesce(lag(last) OVER (PARTITION BY node, boot ORDER BY day), 0) - n AS missing
        FROM (SELECT day, node, boot, max(seq) AS last, count(*) AS n FROM event GROUP BY ALL)
        QUALIFY missing > 0
        """,
        "SELECT dt, node, boot, missing FROM boots_daily WHERE missing > 0",
    ),
    "duplicates": Total(
        "SELECT day, node, boot, count(*) FROM repeated GROUP BY ALL",
        "SELECT dt, node, boot, doubled FROM boots_daily WHERE doubled > 0",
    ),
    "dropped": Total(
        "SELECT day, node, sum(dropped)::BIGINT FROM event WHERE event = 'log.drop' GROUP BY ALL",
        "SELECT dt, node, n FROM quality_daily WHERE kind = 'dropped'",
    ),
    "ledger": Total(
        """
        WITH entry AS (
            SELECT accepted_at::DATE AS day, 'accepted' AS entry, 1 AS n FROM message
            UNION ALL SELECT ended_at::DATE, if(accepted_at IS NULL, 'orphans', state), 1 FROM message
            UNION ALL SELECT last_accepted_at::DATE, 'again', accepted_again FROM message
            UNION ALL SELECT last_ended_at::DATE, 'again', ended_again FROM message
            UNION ALL SELECT day, 'open', 1 FROM open_message
            UNION ALL SELECT day + 1, 'opening', 1 FROM open_message
            UNION ALL SELECT day, 'overdue', 1 FROM open_message
                WHERE accepted_at + to_seconds(ttl_s) + INTERVAL 1 HOUR < day + INTERVAL 1 DAY)
        SELECT day, entry, sum(n)::BIGINT AS n FROM entry WHERE day IS NOT NULL GROUP BY ALL HAVING n > 0
        """,
        """
        SELECT dt, entry, n FROM (
            UNPIVOT (SELECT *, orphans + around_crash + before_books AS unaccepted FROM ledger_daily)
            ON opening, accepted, acked, expired, evicted, removed, open, unaccepted AS orphans, again, overdue
            INTO NAME entry VALUE n)
        WHERE n > 0
        """,
    ),
    "lost": Total(
        """
        SELECT ended_at::DATE AS day, reason, count(*), sum(size)::BIGINT FROM message
        WHERE accepted_at IS NOT NULL AND state <> 'acked' GROUP BY ALL
        """,
        "SELECT dt, reason, sum(n)::BIGINT, sum(bytes)::BIGINT FROM lost_daily GROUP BY ALL",
    ),
    "messages": Total(
        """
        SELECT day, proto, state, count(*), sum(size)::BIGINT FROM (
            SELECT ended_at::DATE AS day, proto, state, size FROM message
            WHERE accepted_at IS NOT NULL AND state IS NOT NULL
            UNION ALL SELECT day, proto, 'open', size FROM open_message)
        GROUP BY ALL
        """,
        "SELECT dt, proto, state, sum(n)::BIGINT, sum(bytes)::BIGINT FROM messages_daily GROUP BY ALL",
    ),
    "open_messages": Total(
        "SELECT day, msg, rcpt, node, accepted_at, size FROM open_message",
        "SELECT dt, msg, rcpt, node, accepted_at::TIMESTAMP, size FROM open",
    ),
    "traffic": Total(
        f"""
        SELECT day, hour, node, {_PROTO}, event, count(*), coalesce(sum(size), 0)::BIGINT FROM event
        WHERE event = 'req.done' OR starts_with(event, 'msg.') GROUP BY ALL
        """,
        "SELECT dt, hour, node, proto, event, n, bytes FROM traffic_hourly",
    ),
    "traffic_by_day": _count("traffic_daily", "node proto event", "event = 'req.done' OR starts_with(event, 'msg.')"),
    "refused": _count("errors_daily", "proto mtype status code", f"event = 'req.done' AND {_REFUSED}"),
    "refused_senders": Total(
        f"""
        SELECT day, row_number() OVER (PARTITION BY day ORDER BY n DESC, sender) AS rank, sender, n, codes FROM (
            SELECT day, sender, count(*) AS n, count(DISTINCT coalesce(code, '')) AS codes FROM event
            WHERE event = 'req.done' AND sender IS NOT NULL AND {_REFUSED} GROUP BY ALL)
        QUALIFY rank <= 20
        """,
        "SELECT dt, rank, sender, n, codes FROM error_senders",
    ),
    "limits": _count("limits_daily", "limit", "event = 'limit.hit'", "hits"),
    "replays": _count("replay_daily", "code", "event = 'replay.drop'"),
    "sockets": Total(
        """
        WITH lines AS (
            SELECT day, node, count(*) FILTER (event = 'conn.open') AS opened,
                count(*) FILTER (event = 'conn.auth' AND code IS NULL) AS authenticated,
                count(*) FILTER (event = 'conn.close') AS closed
            FROM event WHERE starts_with(event, 'conn.') GROUP BY ALL),
        gone AS (SELECT gone_at::DATE AS day, node, sum(sockets) AS unclosed FROM unclosed GROUP BY ALL),
        peaks AS (
            SELECT day, node, greatest(max(level), arg_min(level_before, number)) AS peak
            FROM socket_level GROUP BY ALL)
        SELECT day, node, opened, authenticated, closed, coalesce(unclosed, 0)::BIGINT, peak::BIGINT
        FROM lines LEFT JOIN gone USING (day, node) LEFT JOIN peaks USING (day, node)
        """,
        "SELECT dt, node, opened, authenticated, closed, unclosed, peak FROM sockets_daily",
    ),
    "sessions": Total(
        f"""
        SELECT day, node, {_PROTO}, ws_code, reason, count(*), sum(n_in)::BIGINT, sum(n_out)::BIGINT,
            sum(bytes_in)::BIGINT, sum(bytes_out)::BIGINT
        FROM event WHERE event = 'conn.close' GROUP BY ALL
        """,
        "SELECT dt, node, proto, ws_code, reason, n, n_in, n_out, bytes_in, bytes_out FROM sessions_daily",
    ),
    **{
        f"top_{side}": Total(
            f"""
            SELECT day, row_number() OVER (PARTITION BY day ORDER BY n DESC, bytes DESC, {column}) AS rank,
                {column}, n, bytes, partners
            FROM (
                SELECT day, {column}, count(*) AS n, sum(size)::BIGINT AS bytes, count(DISTINCT {partner}) AS partners
                FROM event WHERE event = 'msg.accept' AND {column} IS NOT NULL GROUP BY ALL)
            QUALIFY rank <= 20
            """,
            f"SELECT dt, rank, {column}, n, bytes, partners FROM top_{side}",
        )
        for side, column, partner in (("senders", "sender", "rcpt"), ("recipients", "rcpt", "sender"))
    },
    "members": Total(
        """
        SELECT day, side, count(DISTINCT member), count(member) FROM (
            SELECT day, unnest([{side: 'sender', member: sender}, {side: 'rcpt', member: rcpt}], recursive := true)
            FROM event WHERE event = 'msg.accept')
        GROUP BY ALL
        """,
        "SELECT dt, side, members, n FROM concentration_daily",
    ),
    "pushes": _count("push_daily", "event service result code", "starts_with(event, 'push.')"),
    "wakeups": Total(
        """
        SELECT day, service, count(*), count(*) - count(picked_up_at)
        FROM (SELECT *, unnest(list_append(services, '*')) AS service FROM wakeup) GROUP BY ALL
        """,
        "SELECT dt, service, n, missed FROM wakeups_daily",
    ),
    "counters": Total(
        """
        SELECT *, counted - logged FROM (
            SELECT day, node, counter, sum(counted)::BIGINT AS counted, sum(logged)::BIGINT AS logged
            FROM counter_report GROUP BY ALL)
        """,
        """
        SELECT dt, node,
            rtrim(regexp_replace(
                counter, 'mediator_(?:active_|messages_|)([a-z]+)(?:_total|)(?:.outcome="(.*)".|)', '\\1_\\2'), '_'),
            counted, logged, difference
        FROM reconciliation_daily
        """,
    ),
    "queues": Total(
        "SELECT day, hour, node, max(depth) FROM event WHERE event = 'gauge' GROUP BY ALL",
        "SELECT dt, hour, node, depth_max FROM queue_hourly",
    ),
    "cost": Total(
        f"""
        SELECT day, {_PROTO}, coalesce(mtype, '') AS mtype, count(*), sum(round(dur_ms * 1000)::BIGINT)::BIGINT,
            coalesce(sum(round(crypto_ms * 1000)::BIGINT), 0)::BIGINT
        FROM event WHERE event = 'req.done' GROUP BY ALL
        """,
        """
        SELECT dt, proto, mtype, sum(n)::BIGINT, round(sum(dur_ms) * 1000)::BIGINT,
            round(coalesce(sum(crypto_ms), 0) * 1000)::BIGINT
        FROM cost_daily GROUP BY ALL
        """,
    ),
}

_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99}
# Exact values by nearest rank; the published ones are the middle of a bucket of 2 %.
_EXACT_LATENCY = f"""
    SELECT day, node, metric, path, count(*) AS n, max(ms) AS max_ms,
        {", ".join(f"list_sort(list(ms))[ceil(round(n * {q}, 6))::INTEGER] AS {p}" for p, q in _QUANTILES.items())}
    FROM (SELECT * REPLACE (unnest([node, '*']) AS node)
        FROM (SELECT * REPLACE (unnest([path, '*']) AS path) FROM duration))
    GROUP BY ALL
"""
_PUBLISHED_LATENCY = f"SELECT dt, node, metric, path, n, max_ms, {', '.join(_QUANTILES)} FROM latency_daily"
LATENCY_ERROR = 0.01


def open_raw_log(directory: Path) -> duckdb.DuckDBPyConnection:
    """Load all log files in a directory and below it, into the tables of `raw_log.sql`."""
    database = duckdb.connect()
    # It writes to standard output.
    database.execute("SET enable_progress_bar = false")
    values = {
        "files": sorted(str(path) for path in directory.rglob("events*.jsonl*")),
        "utf8": _UTF8,
        "fields": "{" + ", ".join(f'"{name}": "{kind}"' for name, kind in _FIELDS.items()) + "}",
        "envelope": list(_ENVELOPE),
    }
    for statement in duckdb.extract_statements(Path(__file__).with_name("raw_log.sql").read_text("utf-8")):
        database.execute(statement, {name: values[name] for name in statement.named_parameters})
    return database


def open_published(out: Path) -> duckdb.DuckDBPyConnection:
    """Views of the published tables of a results directory."""
    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    for table in sorted((out / "tables").iterdir()):
        if any(table.rglob("*.parquet")):
            source = f"read_parquet('{table}/**/*.parquet', hive_partitioning = true, union_by_name = true)"
            database.execute(f'CREATE VIEW "{table.name}" AS SELECT * FROM {source}')
    return database


def count_raw(database: duckdb.DuckDBPyConnection, first: date, last: date) -> dict[str, Rows]:
    """Rows of each total on these days, sorted."""
    return {name: _select(database, total.raw, first, last) for name, total in TOTALS.items()}


def count_published(database: duckdb.DuckDBPyConnection, first: date, last: date) -> dict[str, Rows]:
    """The same from published tables; a table that does not exist has no rows."""
    found = {}
    for name, total in TOTALS.items():
        try:
            found[name] = _select(database, total.published, first, last)
        except duckdb.CatalogException:
            found[name] = []
    return found


def _select(database: duckdb.DuckDBPyConnection, query: str, first: date, last: date) -> Rows:
    rows = database.execute(query).fetchall()
    return sorted((row for row in rows if first <= row[0] <= last), key=repr)


def find_latency_errors(
    raw: duckdb.DuckDBPyConnection, published: duckdb.DuckDBPyConnection, first: date, last: date
) -> list[str]:
    """Compare percentiles: groups and counts must be equal, values within :data:`LATENCY_ERROR`."""
    exact, rounded = (
        {row[:5]: row[5:] for row in _select(database, query, first, last)}
        for database, query in ((raw, _EXACT_LATENCY), (published, _PUBLISHED_LATENCY))
    )
    found = [f"latency of {key} in one of both only" for key in sorted(exact.keys() ^ rounded.keys(), key=repr)]
    for key in exact.keys() & rounded.keys():
        # The published maximum is the upper end of its bucket.
        if not exact[key][0] <= rounded[key][0] <= exact[key][0] * (1 + 2 * LATENCY_ERROR) + 1e-6:
            found.append(f"maximum of {key}: {rounded[key][0]}, exactly {exact[key][0]}")
        for value, true_value in zip(rounded[key][1:], exact[key][1:], strict=True):
            if abs(value / true_value - 1) > LATENCY_ERROR:
                found.append(f"latency of {key}: {value}, exactly {true_value}")
    return found


def describe_differences(raw: Mapping[str, Rows], published: Mapping[str, Rows]) -> list[str]:
    """The first rows of each total that only one of both has."""
    found = []
    for name in TOTALS:
        for where, rows, others in (
            ("raw lines", raw[name], published[name]),
            ("published", published[name], raw[name]),
        ):
            surplus = Counter(rows) - Counter(others)
            found += [f"{name}: {row} only in {where}" for row in sorted(surplus.elements(), key=repr)[:5]]
    return found


def main(logs: str, out: str, first: str, last: str) -> int:
    """Print differences; return 1 if there are any."""
    raw, published = open_raw_log(Path(logs)), open_published(Path(out))
    days = date.fromisoformat(first), date.fromisoformat(last)
    totals = count_raw(raw, *days)
    found = describe_differences(totals, count_published(published, *days))
    found += find_latency_errors(raw, published, *days)
    verdict = found or [f"{len(totals)} totals, {sum(map(len, totals.values()))} rows: no difference"]
    sys.stdout.write("".join(f"{line}\n" for line in verdict))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
