"""
The largest senders and recipients, the distribution of messages over them, recipient activity, retention.

The first day and the last acknowledgement of a recipient are carried from day to day, so its latest row is its whole
history. A recipient not seen for :data:`RECIPIENT_HISTORY_DAYS` days starts over, whether days are analysed one by
one or together.
"""

from __future__ import annotations

from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import scan_members
from analytics.sql_functions import suppress_small_group


def rank_members(run: JobRun) -> dict[str, str]:
    """`top_senders`, `top_recipients` and `concentration_daily`."""
    run.define(
        "member_messages",
        f"""
        SELECT dt, side, member, CAST(sum(accepted) AS BIGINT) AS n, CAST(sum(bytes) AS BIGINT) AS bytes
        FROM {scan_members(run)} WHERE accepted > 0 GROUP BY ALL
        """,
    )
    run.define(
        "top_members",
        f"""
        SELECT *, row_number() OVER (PARTITION BY dt, side ORDER BY n DESC, bytes DESC, member) AS rank
        FROM member_messages QUALIFY rank <= {run.settings.top}
        """,
    )
    _scan_partners(run)

    def select_side(side: str) -> str:
        return f"""
            SELECT dt, rank, member AS {side}, n, bytes, partners
            FROM top_members JOIN partner_counts USING (dt, side, member) WHERE side = '{side}'
        """

    return {
        "top_senders": select_side("sender"),
        "top_recipients": select_side("rcpt"),
        "concentration_daily": _measure_concentration(run.settings.k_anonymity),
    }


def _scan_partners(run: JobRun) -> None:
    """
    Table `partner_counts`: distinct partners of the top members.

    Pairs are grouped before they are counted, so one task does not get all messages of a large account.
    """
    run.scan(
        "partner_counts",
        f"""
        SELECT dt, side, member, count(partner) AS partners
        FROM (
            SELECT dt, side, member, partner
            FROM (
                SELECT dt, side, CASE WHEN side = 'sender' THEN sender ELSE rcpt END AS member,
                    CASE WHEN side = 'sender' THEN rcpt ELSE sender END AS partner
                FROM events CROSS JOIN (VALUES ('sender'), ('rcpt')) AS sides(side)
                WHERE event = 'msg.accept' AND dt BETWEEN {run.first} AND {run.last})
            SEMI JOIN top_members USING (dt, side, member)
            GROUP BY ALL)
        GROUP BY ALL
        """,
        small=["top_members"],
    )


def _measure_concentration(k: int) -> str:
    """
    Gini coefficient, and share of the largest 1 % of members, rounded up; messages of unknown senders are excluded on
    the side of the senders.

    :param k: minimum of members for their distribution to be shown.
    """
    top_share = "CAST(taken AS DOUBLE) / CAST(n AS DOUBLE)"
    gini = "1 - CAST(area AS DOUBLE) / CAST(members * n AS DOUBLE)"
    return f"""
        WITH spread AS (
            SELECT dt, side, n AS each, count(*) AS members, sum(n) AS messages FROM member_messages GROUP BY ALL),
        summed AS (
            SELECT *, sum(messages) OVER upwards AS upto, sum(members) OVER upwards AS members_upto,
                sum(members) OVER (PARTITION BY dt, side) AS all_members
            FROM spread WINDOW upwards AS (PARTITION BY dt, side ORDER BY each)),
        totals AS (
            SELECT dt, side, sum(members) AS members, sum(messages) AS n,
                sum(each * greatest(0, least(members, (all_members + 99) // 100 - (all_members - members_upto))))
                    AS taken,
                -- Twice the area under the Lorenz curve, times members and messages.
                sum(members * (2 * upto - messages)) AS area
            FROM summed GROUP BY ALL)
        SELECT dt, side, members, n, {suppress_small_group("members", k, top_share)} AS top_share,
            {suppress_small_group("members", k, gini)} AS gini
        FROM totals
    """


TALKERS_JOB = Job("talkers", ("events",), ("top_senders", "top_recipients", "concentration_daily"), rank_members)


RECIPIENT_HISTORY_DAYS = 35
"""Days of history of recipients; prune keeps as many by default."""


def make_recipients_daily(run: JobRun) -> dict[str, str]:
    """`recipients_daily`, of recipients of accepted messages and those that acknowledged."""
    query = f"""
        WITH seen AS (
            SELECT dt, member AS rcpt, epoch, accepted, acked, first_at, last_at, dt AS since,
                CASE WHEN acked > 0 THEN dt END AS acked_on
            FROM {scan_members(run)} WHERE side = 'rcpt'
            UNION ALL BY NAME {_select_latest_rows(run)}),
        in_order AS (
            SELECT *, coalesce(dt - lag(dt) OVER (PARTITION BY rcpt, epoch ORDER BY dt), {RECIPIENT_HISTORY_DAYS + 1})
                > {RECIPIENT_HISTORY_DAYS} AS anew
            FROM seen),
        activity_periods AS (
            SELECT *, count(*) FILTER (WHERE anew) OVER (PARTITION BY rcpt, epoch ORDER BY dt) AS period
            FROM in_order)
        SELECT dt, rcpt, epoch, accepted, acked, first_at, last_at,
            min(since) OVER so_far AS since, max(acked_on) OVER so_far AS acked_on
        FROM activity_periods
        WINDOW so_far AS (PARTITION BY rcpt, epoch, period ORDER BY dt)
        QUALIFY dt >= {run.first}
    """
    return {"recipients_daily": query}


def _select_latest_rows(run: JobRun) -> str:
    """Last day before the span of each recipient and epoch, with `since` and `acked_on`: the state that matters."""
    return f"""
        SELECT max(dt) AS dt, rcpt, epoch, arg_max(since, dt) AS since, arg_max_null(acked_on, dt) AS acked_on
        FROM recipients_daily WHERE dt BETWEEN {run.first} - {RECIPIENT_HISTORY_DAYS} AND {run.first} - 1
        GROUP BY rcpt, epoch
    """


RECIPIENTS_JOB = Job(
    "recipients",
    ("events",),
    ("recipients_daily",),
    make_recipients_daily,
    history_days={"recipients_daily": RECIPIENT_HISTORY_DAYS},
)


_COHORT_WEEKS = 5


def make_retention(run: JobRun) -> dict[str, str]:
    """`dormant_daily` and `retention_weekly`."""
    days = f"SELECT CAST(unnest(generate_series({run.first}, {run.last}, INTERVAL 1 DAY)) AS DATE) AS dt"
    run.define("days_of_span", days)
    return {"dormant_daily": _count_dormant_recipients(run), "retention_weekly": _compute_retention(run)}


def _count_dormant_recipients(run: JobRun) -> str:
    """
    A row for each day of the span: recipients in the state that they have at its end, if they were seen or have open
    messages.

    Key epochs are ignored: identifiers that are no pseudonyms are the same in all of them. Dormant are recipients
    known, and without an acknowledgement, for `dormant_days`.
    """
    return f"""
        WITH seen AS (
            SELECT dt, rcpt, min(since) AS since, max(acked_on) AS acked_on
            FROM (
                SELECT dt, rcpt, since, acked_on FROM recipients_daily WHERE dt BETWEEN {run.first} AND {run.last}
                UNION ALL BY NAME SELECT * EXCLUDE (epoch) FROM ({_select_latest_rows(run)}))
            GROUP BY dt, rcpt),
        queues AS (
            SELECT dt, rcpt, count(*) AS waiting, coalesce(sum(size), 0) AS bytes,
                CAST(min(accepted_at) AS DATE) AS oldest
            FROM "open" WHERE rcpt IS NOT NULL AND dt BETWEEN {run.first} AND {run.last} GROUP BY dt, rcpt),
        states AS (
            SELECT dt, waiting, bytes, oldest, seen.since AS since_of_day,
                min(seen.since) OVER of_late AS since, max(seen.acked_on) OVER of_late AS acked_on
            FROM seen FULL JOIN queues USING (dt, rcpt)
            WINDOW of_late AS (PARTITION BY rcpt ORDER BY dt
                RANGE BETWEEN INTERVAL {RECIPIENT_HISTORY_DAYS} DAYS PRECEDING AND CURRENT ROW)),
        known AS (
            SELECT *, waiting IS NOT NULL AND least(since, oldest) <= dt - {run.settings.dormant_days}
                AND coalesce(acked_on <= dt - {run.settings.dormant_days}, true) AS quiet
            FROM states)
        SELECT dt, count(*) FILTER (WHERE quiet) AS dormant,
            coalesce(sum(waiting) FILTER (WHERE quiet), 0) AS waiting,
            coalesce(sum(bytes) FILTER (WHERE quiet), 0) AS bytes,
            count(*) FILTER (WHERE acked_on = dt) AS active,
            count(*) FILTER (WHERE since_of_day IS NOT NULL AND since = dt) AS fresh
        FROM days_of_span LEFT JOIN known USING (dt)
        GROUP BY dt
    """


def _compute_retention(run: JobRun) -> str:
    """As of each day of the span: the week that the day is in, and its four weeks' cohorts before."""
    k = run.settings.k_anonymity
    monday = "CAST(date_trunc('week', {}) AS DATE)".format
    earliest = f"{run.first} - {RECIPIENT_HISTORY_DAYS}"
    return f"""
        WITH recipients AS (
            SELECT dt, rcpt, epoch, {monday("since")} AS cohort, {monday("dt")} AS monday, since, acked_on
            FROM recipients_daily WHERE dt BETWEEN {earliest} AND {run.last}),
        joined AS (
            SELECT epoch, cohort, dt, count(*) AS n FROM recipients WHERE since = dt GROUP BY ALL),
        sizes AS (
            SELECT days.dt, epoch, cohort, sum(n) AS members
            FROM joined JOIN days_of_span days ON days.dt BETWEEN joined.dt AND cohort + {7 * _COHORT_WEEKS - 1}
            GROUP BY ALL),
        first_acked AS (
            SELECT rcpt, epoch, cohort, monday, min(dt) AS dt
            FROM recipients WHERE acked_on = dt AND dt >= {monday(run.first)} GROUP BY ALL),
        acked AS (
            SELECT epoch, cohort, monday, dt, count(*) AS n FROM first_acked GROUP BY ALL),
        returned AS (
            SELECT days.dt, epoch, cohort, sum(n) AS active
            FROM acked JOIN days_of_span days ON days.dt BETWEEN acked.dt AND monday + 6
            GROUP BY ALL)
        SELECT dt, epoch, cohort, ({monday("dt")} - cohort) // 7 AS week,
            {suppress_small_group("members", k)} AS members,
            {suppress_small_group("members", k, suppress_small_group("coalesce(active, 0)", k))} AS active
        FROM sizes LEFT JOIN returned USING (dt, epoch, cohort)
    """


RETENTION_JOB = Job(
    "retention",
    ("open",),
    ("dormant_daily", "retention_weekly"),
    make_retention,
    history_days={"recipients_daily": RECIPIENT_HISTORY_DAYS},
)
