"""
The message ledger.

It balances each day: opening + accepted = acked + expired + evicted + removed + across_epochs + open. The opening
comes from the snapshot of the day before; accepted is a count of lines that the other entries are not derived from.

The lines of a span are grouped by message id once, together with the messages that were open before it
(`message_outcomes`). Messages that were accepted and acknowledged on one day, once each, are then counted only; all
others keep a row each, and a second scan collects further columns of these (`message_details`). All times are
microseconds.

A message's first acceptance and first ending count. Ids are unique and a message ends once; lines that contradict
this count as `again` only. An ending without an acceptance is an orphan, unless

* by its own age the message was accepted before the first day with events (`before_books`), or
* it may have been accepted under an earlier key, under another pseudonym (`ended_across_epochs`), or
* the acceptance is in the logs of earlier days, so that the message had ended already (`again`), or
* it was accepted just before a daemon was killed, before the line was written (`around_crash`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from itertools import pairwise

from analytics.job import EVENT_HISTORY_DAYS, Job, JobRun
from analytics.jobs.shared_scans import scan_state_events, scan_traffic
from analytics.sql_functions import (
    DAY_MICROS,
    EVENT_MICROS,
    SECOND_MICROS,
    day_to_micros,
    list_texts,
    quote_day,
    quote_text,
)

# Lines of a message may be in any order across nodes, even an acknowledgement before its acceptance: clocks differ,
# and an acceptance is logged after the response to a push.
CLOCK_TOLERANCE = 600 * SECOND_MICROS

ENDING_EVENTS = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}
ENDED_STATES = tuple(ENDING_EVENTS.values())
_LOSS_EVENTS = tuple(ENDING_EVENTS)[1:]
_LOSS_STATES = ENDED_STATES[1:]
_PROTOS = ("didcomm", "decentrl")

# Kinds of lines; those that end a message count from 1.
_CARRIED, _PUSHED, _ACCEPTED = -2, -1, 0
_KINDS = {"msg.push": _PUSHED, "msg.accept": _ACCEPTED} | {name: n for n, name in enumerate(ENDING_EVENTS, 1)}
# Reserves the low bits of an ending's time for its kind.
_KIND_BITS = 3
_HAS_ACCEPTANCE = f"kind IN ({_CARRIED}, {_ACCEPTED})"


def scan_message_outcomes(run: JobRun, before: date | None) -> None:
    """
    Table `message_outcomes`: messages that were open before the span or have a line in it.

    Columns: `accepted_on`: day, null if open before the span or without an acceptance; `ended_on`: null if open;
    `state`; `proto`; `epoch` (null of plain identifiers); `ended_age`, `ended_pushes`: classes; `n`; `bytes`. The
    others are null where `n` messages were accepted and acknowledged on one day, once each: `msg`; `accepted_at`;
    `size`; `ttl_s`; `since`: time of acceptance according to the ending; `ending_epoch`; `pushes_before`: pushes
    before the span; `repeats`, `repeated_on`: acceptances after the first; `surplus`, `surplus_on`: endings after the
    first; `past`: accepted and ended before the span, and now once more. `ended_pushes` is null where `msg` is not.

    Only numbers and days are aggregated by message, because Spark hashes numbers but sorts strings.

    :param before: last day with a ledger before the span.
    """
    start = day_to_micros(run.span.first)
    states = _decode("ending & 7", ENDED_STATES)
    ended_at = f"ending >> {_KIND_BITS}"
    # A missing acceptance may still follow just after midnight.
    may_follow = f"accepted_at IS NULL AND ({ended_at}) - since < {CLOCK_TOLERANCE}"
    rest = (
        *("msg", "accepted_at", "size", "ttl_s", "since", "ending_epoch", "pushes_before"),
        *("repeats", "repeated_on", "surplus", "surplus_on", "past"),
    )
    run.scan(
        "message_outcomes",
        f"""
        WITH lines AS ({" UNION ALL ".join(_select_message_lines(run, before))}),
        grouped AS (
            SELECT msg,
                count(*) FILTER (WHERE kind = {_CARRIED}) > 0 AS carried,
                min(line_at) FILTER (WHERE {_HAS_ACCEPTANCE}) AS accepted_at,
                count(*) FILTER (WHERE kind = {_ACCEPTED} AND line_at >= {start}) AS accepts,
                max(line_at) FILTER (WHERE kind = {_ACCEPTED}) AS repeated_at,
                min(line_at * {2**_KIND_BITS} + kind) FILTER (WHERE kind > 0) AS ending,
                count(*) FILTER (WHERE kind > 0) AS endings,
                max(line_at) FILTER (WHERE kind > 0) AS surplus_at,
                count(*) FILTER (WHERE kind > 0 AND line_at >= {start}) AS recent_endings,
                max(line_at - age) FILTER (WHERE kind > 0) AS since,
                max(size) AS size, max(ttl_s) AS ttl_s, max(proto) AS proto,
                max(epoch) FILTER (WHERE {_HAS_ACCEPTANCE}) AS epoch,
                max(epoch) FILTER (WHERE kind > 0) AS ending_epoch,
                max(pushes) AS carried_pushes,
                count(*) FILTER (WHERE kind = {_PUSHED} AND dt < {run.first}) AS early_pushes,
                count(*) FILTER (WHERE kind = {_PUSHED} AND dt >= {run.first}) AS pushes,
                max(dt) FILTER (WHERE kind = {_PUSHED}) AS pushed_on
            FROM lines GROUP BY msg),
        classified AS (
            SELECT *, coalesce(NOT carried AND accepted_at < {start}, false) AS past FROM grouped),
        resolved AS (
            SELECT msg, accepted_at, past, ending, since, ttl_s, ending_epoch, pushes, pushed_on,
                CASE WHEN NOT carried THEN micros_day(accepted_at) END AS accepted_on,
                CASE WHEN ending IS NOT NULL AND NOT past
                    THEN greatest(({ended_at}) + CASE WHEN {may_follow} THEN {CLOCK_TOLERANCE} ELSE 0 END,
                        accepted_at, {start}) END AS ended_at,
                coalesce(size, 0) AS size,
                {_decode("proto", _PROTOS)} AS proto,
                coalesce(epoch, ending_epoch) AS epoch,
                -- The snapshot of an open message includes the pushes of the day before.
                CASE WHEN carried THEN coalesce(carried_pushes, 0) ELSE early_pushes END AS pushes_before,
                -- Acceptances in the span beyond the first, which was earlier if it was open or has ended.
                greatest(accepts - CASE WHEN carried OR past THEN 0 ELSE 1 END, 0) AS repeats,
                micros_day(repeated_at) AS repeated_on,
                CASE WHEN past THEN recent_endings ELSE greatest(endings - 1, 0) END AS surplus,
                micros_day(greatest(surplus_at, {start})) AS surplus_on
            FROM classified),
        outcomes AS (
            SELECT *, micros_day(ended_at) AS ended_on, CASE WHEN ended_at IS NOT NULL THEN {states} END AS state
            FROM resolved WHERE NOT past OR repeats + surplus > 0),
        messages AS (
            SELECT *, {_IS_SIMPLE} AND coalesce(pushed_on <= ended_on, true) AS counted FROM outcomes)
        SELECT accepted_on, ended_on, state, proto, epoch,
            CASE WHEN ended_at IS NOT NULL THEN age_class(divide(ended_at - accepted_at, 1000)) END AS ended_age,
            CASE WHEN counted THEN pushes_class(pushes_before + pushes) END AS ended_pushes,
            {", ".join(f"CASE WHEN NOT counted THEN {name} END AS {name}" for name in rest)},
            count(*) AS n, CAST(sum(size) AS BIGINT) AS bytes
        FROM messages GROUP BY ALL
        """,
    )


# Accepted and acknowledged on one day, once each.
_IS_SIMPLE = (
    f"coalesce(accepted_on = ended_on AND state = '{ENDED_STATES[0]}' AND repeats = 0 AND surplus = 0, false)"
)


def _decode(number: str, names: tuple[str, ...]) -> str:
    """Expression for a name by its number, from 1; empty for others."""
    cases = " ".join(f"WHEN {n} THEN {quote_text(name)}" for n, name in enumerate(names, 1))
    return f"CASE {number} {cases} ELSE '' END"


def _select_message_lines(run: JobRun, before: date | None) -> Iterator[str]:
    """Queries for lines of the span, earlier ones that may belong to messages accepted in it, and open messages."""
    start = day_to_micros(run.span.first)
    proto = "CASE proto " + " ".join(f"WHEN '{name}' THEN {n}" for n, name in enumerate(_PROTOS, 1)) + " ELSE 0 END"
    kind = "CASE event " + " ".join(f"WHEN '{name}' THEN {n}" for name, n in _KINDS.items()) + " END"
    age = "coalesce(CAST(floor(latency_ms) AS BIGINT), age_ms, 0) * 1000"
    lines = f"""
        SELECT msg, dt, {EVENT_MICROS} AS line_at, {kind} AS kind, {age} AS age,
            CASE WHEN event = 'msg.accept' THEN size END AS size,
            CASE WHEN event = 'msg.accept' THEN ttl_s END AS ttl_s,
            {proto} AS proto,
            -- Plain identifiers are the same under any key.
            CASE WHEN NOT coalesce(rcpt LIKE 'did:%', false) THEN epoch END AS epoch,
            CAST(NULL AS BIGINT) AS pushes
        FROM events
        WHERE event IN ({list_texts(_KINDS)}) AND msg IS NOT NULL AND (event <> 'msg.push' OR coalesce(ok, true))
    """
    yield f"{lines} AND dt BETWEEN {run.first} AND {run.last}"
    yield f"""
        {lines} AND {_is_late(run, 3 * CLOCK_TOLERANCE)}
        AND (event = 'msg.accept' OR {EVENT_MICROS} >= {start - CLOCK_TOLERANCE} AND {age} < {CLOCK_TOLERANCE})
    """
    yield f"""
        SELECT msg, dt, micros(accepted_at) AS line_at, {_CARRIED} AS kind, 0 AS age, size, ttl_s, {proto} AS proto,
            epoch, pushes
        FROM open WHERE dt = {quote_day(before) if before else "NULL"}
    """


def _is_late(run: JobRun, before: int) -> str:
    """Condition for lines of the end of the day before the span, which reads little of that day."""
    yesterday = run.span.widen(before=1).first
    since = timedelta(days=1) - timedelta(microseconds=before)
    return f"dt = {quote_day(yesterday)} AND CAST(ts AS DATE) = dt AND ts >= TIMESTAMP '{yesterday} {since}'"


def scan_message_details(run: JobRun, has_orphans: bool) -> None:
    """
    Table `message_details`: lines of the messages that have a row in `message_outcomes`, those of one kind and day
    counted.

    Columns: `msg`, `dt`, `event`, `node` and `rcpt` (of msg.accept), `reason` (of losses), `n`.

    :param has_orphans: look for acceptances on the days before the span.
    """
    accepting, losing = "event = 'msg.accept'", f"event IN ({list_texts(_LOSS_EVENTS)})"
    earlier = f"{losing} AND {_is_late(run, CLOCK_TOLERANCE)}"
    if has_orphans:
        days = run.span.widen(before=EVENT_HISTORY_DAYS).first, run.span.widen(before=1).first
        earlier = f"({accepting} OR {losing}) AND dt BETWEEN {quote_day(days[0])} AND {quote_day(days[1])}"
    lines = f"""
        SELECT msg, dt, event, CASE WHEN {accepting} THEN node END AS node,
            CASE WHEN {accepting} THEN rcpt END AS rcpt, CASE WHEN {losing} THEN reason END AS reason
        FROM events WHERE msg IS NOT NULL
    """
    run.scan(
        "message_details",
        f"""
        WITH lines AS (
            {lines} AND dt BETWEEN {run.first} AND {run.last}
                AND ({accepting} OR {losing} OR event = 'msg.push' AND coalesce(ok, true))
            UNION ALL {lines} AND {earlier}),
        known AS (SELECT msg FROM message_outcomes WHERE msg IS NOT NULL)
        SELECT msg, dt, event, node, rcpt, reason, count(*) AS n
        FROM lines SEMI JOIN known USING (msg) GROUP BY ALL
        """,
    )


# A day without logs leaves a gap; open messages are carried over gaps of up to this length.
LEDGER_HISTORY_DAYS = 7
# Longer than messages live, because only their ending shows that an acceptance was lost.
CRASH_HISTORY_DAYS = 40
_OVERDUE_AFTER = 3600 * SECOND_MICROS
# When to write off messages without a time to live that were accepted under an earlier key.
_WRITE_OFF_AFTER = 7 * DAY_MICROS
_OUTGOING_ENTRIES = (*ENDED_STATES, "across_epochs", "open")
_LEDGER_ENTRIES = (
    "opening",
    "accepted",
    *_OUTGOING_ENTRIES,
    "orphans",
    "around_crash",
    "before_books",
    "again",
    "overdue",
    "vanished",
    "lost_unaccepted",
    "ended_across_epochs",
)


def make_ledger(run: JobRun) -> dict[str, str]:
    """`ledger_daily`, `messages_daily`, `lost_daily` and `open`."""
    before, first_ledger_day = _find_previous_ledger(run)
    scan_message_outcomes(run, before)
    _define_boots(run)
    _define_key_epochs(run)
    _define_orphans(run, first_ledger_day)
    scan_message_details(run, bool(run.rows("SELECT 1 FROM ledger_orphans WHERE excuse IS NULL LIMIT 1")))
    _insert_days(run, before)
    _define_messages(run)
    return {
        "ledger_daily": _make_ledger_daily(run, before, first_ledger_day),
        "messages_daily": _MESSAGES_DAILY,
        "lost_daily": _LOST_DAILY,
        "open": _make_open_snapshot(run, before),
    }


def _find_previous_ledger(run: JobRun) -> tuple[date | None, date]:
    """Last day before the span that has a ledger, or None, and the first day of the ledger."""
    (row,) = run.rows(f"""
        SELECT max(dt) AS dt, max_by(books, dt) AS books FROM ledger_daily
        WHERE dt < {run.first} AND dt >= {quote_day(run.span.widen(before=LEDGER_HISTORY_DAYS).first)}
    """)
    return row["dt"], row["books"] or _find_first_event_day(run)


def _find_first_event_day(run: JobRun) -> date:
    """First day of the span that has events; the first day if none has."""
    (row,) = run.rows(f"SELECT min(dt) AS dt FROM boots_daily WHERE dt BETWEEN {run.first} AND {run.last}")
    day: date | None = row["dt"]
    return day or run.span.first


def _define_boots(run: JobRun) -> None:
    """Table `ledger_boots`: `boots_daily` of the days in which crashes are searched."""
    since = quote_day(run.span.widen(before=CRASH_HISTORY_DAYS).first)
    run.define("ledger_boots", f"SELECT * FROM boots_daily WHERE dt BETWEEN {since} AND {run.last}")


def _define_key_epochs(run: JobRun) -> None:
    """
    Table `key_epochs`: key epochs in the ledger, a handful; none if identifiers are plain.

    Columns: `number`; `first_day`; `superseded`: the first day of the next one; `latest`: last acceptance of
    a message that was not acknowledged on the same day, microseconds.
    """
    run.define(
        "key_epochs",
        f"""
        SELECT *, lead(first_day) OVER (ORDER BY number) AS superseded FROM (
            SELECT epoch AS number,
                min(coalesce(accepted_on, CASE WHEN accepted_at IS NOT NULL THEN {run.first} END, ended_on))
                    AS first_day,
                coalesce(max(accepted_at) FILTER (WHERE NOT {_IS_SIMPLE}), 0) AS latest
            FROM message_outcomes WHERE epoch IS NOT NULL GROUP BY ALL)
        """,
    )


# Distance from the last line of a killed start within which acceptances may be lost.
_CRASH_WINDOW = 10 * SECOND_MICROS
# Starts without proc.stop that were followed by another start of the node. `killed_at`: time of the last line;
# `known_on`: the day on which the next one began.
_CRASHES = """
    SELECT killed_at, known_on FROM (
        SELECT *, lead(began_on) OVER (PARTITION BY node ORDER BY killed_at, stopped, began_on) AS known_on FROM (
            SELECT node, boot, max(micros(last_at)) AS killed_at, bool_or(stopped) AS stopped, min(dt) AS began_on
            FROM ledger_boots GROUP BY ALL)
        WHERE killed_at IS NOT NULL)
    WHERE NOT stopped AND known_on IS NOT NULL
"""


def _define_orphans(run: JobRun, first_ledger_day: date) -> None:
    """
    Table `ledger_orphans`: endings without an acceptance.

    Columns: `msg`, `dt`, `state`, `excuse`: ledger entry by its own age and key; null if there is none;
    `around_crash`: accepted just before any node was killed, as far as that was known by the end of `dt`.
    """
    run.define(
        "ledger_orphans",
        f"""
        WITH crashes AS ({_CRASHES})
        SELECT msg, ended_on AS dt, state,
            CASE WHEN since < {day_to_micros(first_ledger_day) + CLOCK_TOLERANCE} THEN 'before_books'
                WHEN EXISTS (FROM key_epochs
                    WHERE ending_epoch > number AND since <= latest + {CLOCK_TOLERANCE}) THEN 'ended_across_epochs'
            END AS excuse,
            EXISTS (FROM crashes
                WHERE killed_at BETWEEN message.since - {_CRASH_WINDOW} AND message.since + {_CRASH_WINDOW}
                    AND known_on <= ended_on) AS around_crash
        FROM message_outcomes AS message
        WHERE msg IS NOT NULL AND accepted_at IS NULL AND ended_on <= {run.last}
        """,
    )


def _insert_days(run: JobRun, before: date | None) -> None:
    """
    Table `ledger_days`: days of the span, each with the range of times (microseconds) in which a message that became
    overdue counts as vanished on that day: later than `after_at`, up to `until_at`.

    A daemon that is down cannot expire messages, so the bounds are last lines of starts that had run for an hour.
    """
    lines = {row["dt"]: row["last"] for row in run.rows(_make_last_lines_query(run))}
    known = [max((at for day, at in lines.items() if day <= last), default=0) for last in run.span.days]
    earlier = max((at for day, at in lines.items() if before is not None and day <= before), default=0)
    bounds = zip(run.span.days, pairwise([earlier, *known]), strict=True)
    run.insert("ledger_days", "dt DATE, after_at BIGINT, until_at BIGINT", ((day, *times) for day, times in bounds))


_MIN_UPTIME = 3600 * SECOND_MICROS


def _make_last_lines_query(run: JobRun) -> str:
    """
    Query for the last line on each day of any start that had run for an hour by then.

    A start without proc.start counts from the beginning of its first day.

    Columns: `dt`, `last`: microseconds. Days without such a line are missing.
    """
    starts = f"SELECT node, boot, micros(ts) AS began FROM {scan_state_events(run)} WHERE event = 'proc.start'"
    days = run.span.widen(before=EVENT_HISTORY_DAYS).first, run.span.widen(before=2).first
    recent = f"BETWEEN {quote_day(days[0])} AND {quote_day(days[1])}"
    if run.rows(f"SELECT 1 FROM ledger_boots GROUP BY node, boot HAVING min(dt) {recent} LIMIT 1"):
        run.scan(
            "earlier_starts",
            f"""
            SELECT coalesce(node, '') AS node, boot, micros(ts) AS began FROM events
            WHERE event = 'proc.start' AND dt {recent}
            """,
        )
        starts += " UNION ALL FROM earlier_starts"
    return f"""
        WITH starts AS (SELECT node, boot, min(began) AS began FROM ({starts}) GROUP BY ALL),
        firsts AS (SELECT node, boot, day_micros(min(dt)) AS midnight FROM ledger_boots GROUP BY ALL)
        SELECT dt, max(micros(last_at)) AS last
        FROM ledger_boots JOIN firsts USING (node, boot) LEFT JOIN starts USING (node, boot)
        WHERE micros(last_at) - coalesce(began, midnight) >= {_MIN_UPTIME} GROUP BY ALL
    """


def _define_messages(run: JobRun) -> None:
    """
    Table `ledger_messages`: messages in the ledger, and further lines of those that had ended. As `message_outcomes`,
    with `ended_pushes` of all that ended, and `lapsed_at`: when they become overdue, microseconds; `written_off`: the
    day; `open_first` and `open_last`: first and last day at whose end they were open, if not null and in this order.

    Table `ledger_open`: of each of these days. Columns: `dt`, `msg`, `proto`, `accepted_at`, `size`, `ttl_s`,
    `epoch`, `pushes` by the end of the day, `overdue`, `vanished`: whether it is, or became so on that day.
    """
    run.define(
        "ledger_pushes",
        """
        SELECT msg, dt, sum(n) OVER (PARTITION BY msg ORDER BY dt) AS upto FROM message_details
        WHERE event = 'msg.push'
        """,
    )
    patience = f"coalesce(ttl_s * {SECOND_MICROS} + {_OVERDUE_AFTER}, {_WRITE_OFF_AFTER})"
    run.define(
        "ledger_messages",
        f"""
        WITH messages AS (
            SELECT outcome.* REPLACE (coalesce(past, false) AS past), superseded,
                accepted_at + ttl_s * {SECOND_MICROS} + {_OVERDUE_AFTER} AS lapsed_at,
                greatest(micros_day(accepted_at + {patience}), superseded, {run.first}) AS given_up
            FROM message_outcomes AS outcome LEFT JOIN key_epochs ON epoch = number
            WHERE msg IS NULL OR accepted_at IS NOT NULL),
        followed AS (
            SELECT *, CASE WHEN superseded IS NOT NULL AND ended_on IS NULL AND NOT past AND given_up <= {run.last}
                THEN given_up END AS written_off
            FROM messages)
        SELECT message.* REPLACE (CASE WHEN message.msg IS NULL THEN ended_pushes
                WHEN ended_on IS NOT NULL THEN pushes_class(pushes_before + coalesce(upto, 0)) END AS ended_pushes),
            CASE WHEN message.msg IS NOT NULL AND NOT past THEN coalesce(accepted_on, {run.first}) END AS open_first,
            least({run.last}, coalesce(ended_on, written_off) - 1) AS open_last
        FROM followed AS message
        ASOF LEFT JOIN ledger_pushes AS pushed ON message.msg = pushed.msg AND message.ended_on >= pushed.dt
        """,
    )
    run.define(
        "ledger_open",
        """
        WITH days AS (
            FROM ledger_messages JOIN ledger_days ON ledger_days.dt BETWEEN open_first AND open_last
            SELECT ledger_days.*, msg, proto, accepted_at, size, ttl_s, epoch, pushes_before, lapsed_at)
        SELECT day.dt, day.msg, proto, accepted_at, size, ttl_s, epoch, pushes_before + coalesce(upto, 0) AS pushes,
            coalesce(micros_day(lapsed_at) <= day.dt, false) AS overdue,
            coalesce(lapsed_at > after_at AND lapsed_at <= until_at, false) AS vanished
        FROM days AS day
        ASOF LEFT JOIN ledger_pushes AS pushed ON day.msg = pushed.msg AND day.dt >= pushed.dt
        """,
    )


def _make_ledger_daily(run: JobRun, before: date | None, first_ledger_day: date) -> str:
    """`ledger_daily`: sum of the entries; a row for each day of the span even without events."""
    totals = ", ".join(
        f"CAST(coalesce(sum(n) FILTER (WHERE entry = '{name}'), 0) AS BIGINT) AS {name}" for name in _LEDGER_ENTRIES
    )
    return f"""
        WITH entries AS ({" UNION ALL ".join(_select_entries(run, before))}),
        totals AS (SELECT dt, {totals} FROM ledger_days LEFT JOIN entries USING (dt) GROUP BY ALL)
        SELECT *, opening + accepted - ({" + ".join(_OUTGOING_ENTRIES)}) AS difference,
            {quote_day(first_ledger_day)} AS books
        FROM totals
    """


def _select_entries(run: JobRun, before: date | None) -> Iterator[str]:
    """Queries for ledger entries: `dt`, `entry`, `n`."""
    opening = f"SELECT count(*) FROM open WHERE dt = {quote_day(before)}" if before else "0"
    yield f"SELECT {run.first} AS dt, 'opening' AS entry, ({opening}) AS n"
    yield f"SELECT dt, 'accepted', messages FROM {scan_traffic(run)} WHERE event = 'msg.accept'"
    for day, entry, n in (
        ("ended_on", "state", "n"),
        ("written_off", "'across_epochs'", "n"),
        ("repeated_on", "'accepted'", "-repeats"),
        ("repeated_on", "'again'", "repeats"),
        ("surplus_on", "'again'", "surplus"),
    ):
        yield f"SELECT {day}, {entry}, {n} FROM ledger_messages"
    for day, entry, condition in (
        ("dt", "open", "true"),
        ("dt + 1", "opening", "true"),
        ("dt", "overdue", "overdue"),
        ("dt", "vanished", "vanished"),
    ):
        yield f"SELECT {day}, '{entry}', count(*) FROM ledger_open WHERE {condition} GROUP BY ALL"
    orphans = f"""
        SELECT dt, state, CASE WHEN excuse IS NOT NULL THEN excuse
            WHEN msg IN (SELECT msg FROM message_details WHERE event = 'msg.accept' AND dt < {run.first}) THEN 'again'
            WHEN around_crash THEN 'around_crash' ELSE 'orphans' END AS entry
        FROM ledger_orphans
    """
    loss = "CASE WHEN state IN ('expired', 'evicted') AND entry <> 'again' THEN 'lost_unaccepted' END"
    yield f"SELECT dt, unnest([entry, {loss}]), 1 FROM ({orphans})"


_MESSAGES_DAILY = f"""
    SELECT dt, proto, state, age_class, pushes_class, sum(n) AS n, sum(bytes) AS bytes FROM (
        SELECT ended_on AS dt, proto, state, ended_age AS age_class, ended_pushes AS pushes_class, n, bytes
        FROM ledger_messages WHERE ended_on IS NOT NULL
        UNION ALL
        SELECT dt, proto, 'open', age_class((day_micros(dt) + {DAY_MICROS} - accepted_at) / 1000),
            pushes_class(pushes), 1, size
        FROM ledger_open)
    GROUP BY ALL
"""

_CASES = " ".join(f"WHEN '{event}' THEN '{state}'" for event, state in ENDING_EVENTS.items())
_LOST_DAILY = f"""
    WITH reasons AS (
        SELECT msg, CASE event {_CASES} END AS state, min(reason) AS reason FROM message_details
        WHERE event IN ({list_texts(_LOSS_EVENTS)}) GROUP BY ALL)
    SELECT ended_on AS dt, coalesce(reason, '') AS reason, size_class(size) AS size_class, ended_age AS age_class,
        ended_pushes <> '0' AS pushed, count(*) AS n, sum(bytes) AS bytes
    FROM ledger_messages LEFT JOIN reasons USING (msg, state)
    WHERE state IN ({list_texts(_LOSS_STATES)})
    GROUP BY ALL
"""


def _make_open_snapshot(run: JobRun, before: date | None) -> str:
    """`open`."""
    opening = f"UNION ALL SELECT msg, rcpt, node FROM open WHERE dt = {quote_day(before)}" if before else ""
    return f"""
        WITH names AS (
            FROM (
                SELECT msg, rcpt, node FROM message_details WHERE event = 'msg.accept' AND dt >= {run.first}
                {opening})
            QUALIFY row_number() OVER (PARTITION BY msg ORDER BY node NULLS FIRST, rcpt NULLS FIRST) = 1)
        SELECT dt, msg, rcpt, proto, node, micros_time(accepted_at) AS accepted_at, size, ttl_s, pushes, epoch
        FROM ledger_open JOIN names USING (msg)
    """


LEDGER_JOB = Job(
    "ledger",
    reads=("events", "boots_daily"),
    writes=("ledger_daily", "messages_daily", "lost_daily", "open"),
    make_tables=make_ledger,
    history_days={
        "open": LEDGER_HISTORY_DAYS,
        "ledger_daily": LEDGER_HISTORY_DAYS,
        "boots_daily": CRASH_HISTORY_DAYS,
    },
)
