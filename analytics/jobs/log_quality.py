"""
Completeness and damage of the logs of a day.

Every start of a node numbers its lines from 1, so missing lines are known exactly: the numbers between the highest of
the days before and the highest of the day that no event has. An event of a later day may have such a number, because
clocks step back, also over midnight. On the first day of a node the first start may begin with any number.
"""

from __future__ import annotations

from collections.abc import Iterator

from analytics.job import Job, JobRun
from analytics.reading.lines import QUARANTINE_CAUSES
from analytics.reading.segments import SEGMENT_REMARKS, SEGMENT_STATES, STEM_PATTERN
from analytics.schema import TABLES, list_known_events
from analytics.sql_functions import list_texts, quote_day, quote_text
from mediatord.observability.event_schema import SCHEMA_VERSION

# Days of silence after which a start is forgotten.
_HISTORY_DAYS = 40

_TOTAL_KINDS = {
    "lines": "lines of the segments of the day",
    "events": "events of the day",
}
_EVENT_KINDS = {
    "misdated": "events more than a day away from the day of their segment; counted on the day of the segment",
    "unknown_event": "events unknown to this version; stored, but counted nowhere else",
    "unknown_version": "events of another schema version, read as if they were of this one",
    "dropped": "lines that the daemon reports as dropped; their sequence numbers are missing too",
}
_BOOT_KINDS = {
    "seq_missing": "sequence numbers without a line: lost, or not collected yet",
    "doubled_left": "events with a sequence number that occurs in segments of another day or run",
    "stepped_back": "minutes that begin with a lower sequence number than the minute before ended with: a clock step",
}
_SEGMENT_KINDS = {
    "unfinished": "incomplete last lines of active segments",
    "doubled": "duplicate lines, omitted",
    "lines_lost": "lines counted by log.close that are not in the segment",
}
FINDING_KINDS: dict[str, str] = {
    **_TOTAL_KINDS,
    **QUARANTINE_CAUSES,
    **_SEGMENT_KINDS,
    **_BOOT_KINDS,
    **_EVENT_KINDS,
    **{f"segments_{state}": meaning for state, meaning in SEGMENT_STATES.items() if state != "closed"},
    **{f"segments_{remark}": meaning for remark, meaning in SEGMENT_REMARKS.items()},
}
"""Meaning of each `kind` in quality_daily. Kinds that do not occur have no row, except for the totals."""


def assess_log_quality(run: JobRun) -> dict[str, str]:
    """`boots_daily` and `quality_daily`."""
    _scan_blocks(run)
    _define_inputs(run)
    _define_days(run)
    _define_boots(run)
    columns = ", ".join(column.name for column in TABLES["boots_daily"].columns)
    return {"boots_daily": f"SELECT {columns} FROM boots", "quality_daily": _make_findings_query(run)}


def _scan_blocks(run: JobRun) -> None:
    """`seq_blocks`: a row for each 64 numbers of each minute, with all that is needed of the events."""
    run.scan(
        "seq_blocks",
        f"""
        SELECT dt, node, boot, date_trunc('minute', ts) AS minute, seq_block(seq) AS block,
            count(*) AS n, bit_or(seq_bit(seq)) AS mask, min(seq) AS seq_first, max(seq) AS seq_last,
            max(CASE WHEN CAST(ts AS DATE) = dt THEN ts END) AS last_at, bool_or(event = 'proc.stop') AS stopped,
            count(*) FILTER (WHERE CAST(ts AS DATE) <> dt) AS misdated,
            count(*) FILTER (WHERE event NOT IN ({list_texts(list_known_events())})) AS unknown_event,
            count(*) FILTER (WHERE v <> {SCHEMA_VERSION}) AS unknown_version,
            CAST(sum(CASE WHEN event = 'log.drop' THEN dropped END) AS BIGINT) AS dropped
        FROM events WHERE dt BETWEEN {run.first} AND {run.last} GROUP BY ALL
        """,
    )


def _define_inputs(run: JobRun) -> None:
    """`named_inputs`: `inputs` of the span, with node, start, and number of lines that were lost."""
    run.define(
        "named_inputs",
        f"""
        SELECT *, {_extract_from_stem(2)} AS node, {_extract_from_stem(3)} AS boot,
            greatest(lines_said - lines, 0) AS lines_lost
        FROM inputs WHERE dt BETWEEN {run.first} AND {run.last}
        """,
    )


def _define_days(run: JobRun) -> None:
    """`boot_days`: a row for each start and day. `start` is the highest number before those of the day."""
    history = quote_day(run.span.widen(before=_HISTORY_DAYS).first)
    run.define(
        "boot_days",
        f"""
        WITH days AS (
            SELECT dt, node, boot, sum(n) AS n, min(seq_first) AS seq_first, max(seq_last) AS seq_last,
                min(minute) AS begin, max(last_at) AS last_at, bool_or(stopped) AS stopped
            FROM seq_blocks GROUP BY ALL),
        blocks AS (SELECT dt, node, boot, block, bit_or(mask) AS mask FROM seq_blocks GROUP BY ALL),
        numbers AS (SELECT dt, node, boot, sum(bit_count(mask)) AS numbers FROM blocks GROUP BY ALL),
        history AS (
            SELECT node, boot, max(seq_last) AS seq_before
            FROM boots_daily WHERE dt >= {history} AND dt < {run.first} GROUP BY ALL)
        SELECT days.*, numbers,
            coalesce(
                greatest(max(seq_last) OVER earlier, seq_before),
                -- In order of time; starts in the same minute by their numbers.
                CASE WHEN node NOT IN (SELECT node FROM history) AND row_number() OVER starts = 1
                    THEN seq_first - 1 ELSE 0 END
            ) AS start
        FROM days JOIN numbers USING (dt, node, boot) LEFT JOIN history USING (node, boot)
        WINDOW earlier AS (PARTITION BY node, boot ORDER BY dt ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
            starts AS (PARTITION BY node ORDER BY dt, begin, seq_first, boot)
        """,
    )


def _define_boots(run: JobRun) -> None:
    """`boots`: the columns of `boots_daily`, and `numbers`, how many distinct ones the events of the day have."""
    run.define(
        "boots",
        """
        WITH seen AS (SELECT node, boot, block, bit_or(mask) AS mask FROM seq_blocks GROUP BY ALL),
        -- How many numbers from `start` + 1 to `seq_last` occur in events of any day.
        found AS (
            SELECT dt, node, boot,
                sum(bit_count(mask::HUGEINT & ((1::HUGEINT << high + 1) - (1::HUGEINT << low)))) AS found
            FROM (
                SELECT dt, node, boot, mask, CAST(greatest(start + 1 - (block << 6), 0) AS INTEGER) AS low,
                    CAST(least(seq_last - (block << 6), 63) AS INTEGER) AS high
                FROM seen JOIN boot_days USING (node, boot)
                WHERE block BETWEEN (start + 1) >> 6 AND seq_last >> 6)
            WHERE low <= high GROUP BY ALL),
        minutes AS (
            SELECT dt, node, boot, minute, min(seq_first) AS low, max(seq_last) AS high
            FROM seq_blocks GROUP BY ALL),
        steps AS (
            SELECT dt, node, boot, count(*) FILTER (WHERE low < before) AS back, arg_min(low, minute) AS low
            FROM (
                SELECT *, lag(high) OVER (PARTITION BY dt, node, boot ORDER BY minute) AS before FROM minutes)
            GROUP BY ALL),
        duplicates AS (SELECT dt, node, boot, sum(doubled) AS doubled FROM named_inputs GROUP BY ALL)
        SELECT dt, node, boot, seq_first, seq_last, n, numbers, last_at, stopped,
            greatest(seq_last, start) - start - coalesce(found, 0) AS missing, coalesce(doubled, 0) AS doubled,
            -- Detect steps across midnight by the numbers of all earlier days, whose minutes may not be loaded.
            back + CAST(low < start AS INTEGER) AS stepped_back
        FROM boot_days JOIN steps USING (dt, node, boot) LEFT JOIN found USING (dt, node, boot)
            LEFT JOIN duplicates USING (dt, node, boot)
        """,
    )


def _make_findings_query(run: JobRun) -> str:
    """`quality_daily`."""
    findings = " UNION ALL ".join(_list_findings(run))
    return f"""
        SELECT dt, node, kind, coalesce(sum(n), 0) AS n FROM ({findings}) GROUP BY dt, node, kind
        HAVING sum(n) > 0 OR kind IN ({list_texts(_TOTAL_KINDS)})
    """


def _list_findings(run: JobRun) -> Iterator[str]:
    """Queries with the columns `dt`, `node`, `kind` and `n`."""
    for table, sums in (
        ("seq_blocks", {"events": "n", **{kind: kind for kind in _EVENT_KINDS}}),
        ("boots", {"seq_missing": "missing", "doubled_left": "n - numbers", "stepped_back": "stepped_back"}),
        ("named_inputs", {kind: kind for kind in ("lines", *_SEGMENT_KINDS)}),
    ):
        for kind, column in sums.items():
            yield f"SELECT dt, node, {quote_text(kind)} AS kind, sum({column}) AS n FROM {table} GROUP BY ALL"
    yield """
        SELECT dt, node, 'segments_' || word AS kind, 1 AS n
        FROM (SELECT dt, node, unnest(string_split(concat_ws(' ', state, remarks), ' ')) AS word FROM named_inputs)
        WHERE word NOT IN ('', 'closed')
    """
    yield f"""
        SELECT dt, {_extract_from_stem(2)} AS node, cause AS kind, count(*) AS n
        FROM quarantine WHERE dt BETWEEN {run.first} AND {run.last} GROUP BY ALL
    """


def _extract_from_stem(group: int) -> str:
    """Expression for the node (2) or the start (3) in the name of a segment; group 1 is the time."""
    return f"regexp_extract(stem, {quote_text(STEM_PATTERN)}, {group})"


QUALITY_JOB = Job(
    "quality",
    reads=("events", "inputs", "quarantine"),
    writes=("boots_daily", "quality_daily"),
    make_tables=assess_log_quality,
    history_days={"boots_daily": _HISTORY_DAYS},
)
