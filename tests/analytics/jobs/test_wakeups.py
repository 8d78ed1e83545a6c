"""Push notifications, compared with a count in plain Python."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import date, datetime, timedelta
from math import ceil
from typing import Any, NamedTuple

from analytics.job import Span
from analytics.jobs.wakeups import WAKEUPS_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job

Row = dict[str, Any]
HOUR = timedelta(hours=1)
SERVICES = ("fcm", "apns", "web_push", "webhook")


def run(lines: list[Row], first: int = 0, last: int = 0) -> dict[str, list[Row]]:
    """Run the job for a span; it sees that and the day before."""
    span = Span(day(first), day(last))
    return run_job(WAKEUPS_JOB, span, [line for line in lines if line["dt"] in span.widen(1)])


def wake(ts: datetime, did: str, service: str = "fcm", outcome: str = "sent", **fields: Any) -> Row:
    """A request that began at `ts`, and was answered a tenth of a second later."""
    return event(
        "push.wake",
        ts + timedelta(milliseconds=100),
        did=did,
        service=service,
        outcome=outcome,
        dur_ms=100.0,
        **fields,
    )


def fetch(ts: datetime, did: str, **fields: Any) -> Row:
    return event(
        "req.done", ts, sender=did, **{"mtype": "messagepickup/3.0/delivery-request", "status": 200, **fields}
    )


def make_random_lines(seed: int, days: int) -> list[Row]:
    """Wake-ups of one to three devices, the requests of which last up to 3 s; contacts of all kinds, and refusals."""
    rng = random.Random(seed)
    lines = []
    for number in range(1500):
        did = f"d{rng.randrange(60)}"
        started = at(0, second=rng.random() * (days * 86_400 - 10))
        if number % 5 == 0:
            # Many close to midnight.
            started = at(rng.randrange(1, days)) + timedelta(seconds=rng.uniform(-4000, 4000))
        for service in rng.sample(SERVICES, rng.randrange(1, 4)):
            begin = started + timedelta(seconds=rng.choice((0.0, 0.5, 1.0)))
            duration = timedelta(microseconds=rng.randrange(20_000, 3_000_000))
            outcome = rng.choice(("sent", "sent", "sent", "retry", "gone"))
            about = {"did": did, "service": service, "dur_ms": duration / timedelta(milliseconds=1)}
            code = None if outcome == "sent" else f"code-{outcome}"
            lines.append(event("push.wake", begin + duration, outcome=outcome, code=code, **about))
            if outcome == "gone":
                lines.append(event("push.forget", begin + duration, did=did, service=service, reason="UNREGISTERED"))
        if rng.random() < 0.6 and not did.endswith("7"):
            ts = started + timedelta(seconds=rng.choice((0.2, 3, 40, 1200, 3599, 3601, 5000)) + rng.random())
            kind = rng.randrange(6)
            lines.append(
                event("conn.auth", ts, did=did, code=None if kind else "e.p.x")
                if kind < 2
                else fetch(ts, did, code="e.p.x" if kind == 2 else None)
                if kind < 4
                else fetch(ts, did, mtype="QUERY_PENDING_EVENTS" if kind == 4 else "routing/2.0/forward")
            )
    lines = [line for line in lines if line["ts"] < at(days)]
    rng.shuffle(lines)
    return lines


def is_contact(line: Row) -> bool:
    if line.get("code"):
        return False
    mtype = line.get("mtype") or ""
    return line["event"] == "conn.auth" or mtype[:14] == "messagepickup/" or mtype[:6] == "QUERY_"


class Request(NamedTuple):
    """A request that a push service accepted."""

    start: datetime
    logged: datetime
    service: str


def group_requests(requests: list[Request]) -> list[list[Request]]:
    """Requests of one account, those that start within a second of each other together."""
    groups: list[list[Request]] = []
    for request in sorted(requests):
        if groups and request.start - groups[-1][-1].start <= timedelta(seconds=1):
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def list_wakeups(lines: list[Row], days: int) -> list[tuple[date, str, frozenset[str], float | None]]:
    """Day, account, services, milliseconds until the contact, of all wake-ups that end in the days."""
    requests, contacts = defaultdict(list), defaultdict(list)
    for line in lines:
        if line["event"] == "push.wake" and line["outcome"] == "sent":
            start = line["ts"] - timedelta(milliseconds=line["dur_ms"])
            requests[line["did"]].append(Request(start, line["ts"], line["service"]))
        elif is_contact(line):
            contacts[line.get("did") or line["sender"]].append(line["ts"])
    found = []
    for did, group in ((did, group) for did, own in requests.items() for group in group_requests(own)):
        start, services = group[0].start, frozenset(request.service for request in group)
        pickup = min((ts for ts in contacts[did] if start <= ts <= start + HOUR), default=None)
        ended = max(pickup or start + HOUR, min(request.logged for request in group)).date()
        found.append((ended, did, services, None if pickup is None else (pickup - start) / timedelta(milliseconds=1)))
    return [wakeup for wakeup in found if wakeup[0] < day(days)]


def test_equals_plain_count_for_days_at_once_and_in_parts() -> None:
    lines = make_random_lines(4, 3)
    at_once = run(lines, 0, 2)
    parts = [run(lines, n, n) for n in range(3)]
    assert {name: [row for part in parts for row in part[name]] for name in at_once} == at_once

    counted = Counter(
        (r["dt"], r["event"], r["service"], r.get("outcome") or r["reason"], r.get("code") or "")
        for r in lines
        if r["event"].startswith("push.")
    )
    found = {(r["dt"], r["event"], r["service"], r["result"], r["code"]): r["n"] for r in at_once["push_daily"]}
    assert found == counted

    durations: defaultdict[tuple[date, str], list[float | None]] = defaultdict(list)
    accounts: defaultdict[tuple[date, str], list[float | None]] = defaultdict(list)
    for ended, did, services, ms in list_wakeups(lines, 3):
        accounts[ended, did].append(ms)
        for service in ("*", *services):
            durations[ended, service].append(ms)
    assert len(durations) == 15
    rows = {(row["dt"], row["service"]): row for row in at_once["wakeups_daily"]}
    assert rows.keys() == durations.keys()
    for key, values in durations.items():
        known, row = sorted(ms for ms in values if ms is not None), rows[key]
        assert (row["n"], row["missed"]) == (len(values), len(values) - len(known)), key
        assert row["missed_share"] == (len(values) - len(known)) / len(values)
        for name, share in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99)):
            assert abs(row[name] / known[ceil(round(share * len(known), 6)) - 1] - 1) < 0.0101, (key, name)

    for dt in {row["dt"] for row in at_once["wakeups_missed_top"]}:
        missed = {did: len(each) for (on, did), each in accounts.items() if on == dt and not any(each)}
        expected = sorted(missed.items(), key=lambda item: (-item[1], item[0]))[: Settings().top]
        ranked = sorted(
            (row["rank"], row["did"], row["n"]) for row in at_once["wakeups_missed_top"] if row["dt"] == dt
        )
        assert [row[1:] for row in ranked] == expected
        assert any(did.endswith("7") for did, _ in expected)


def test_wakeup_counts_on_the_day_it_ends() -> None:
    """Also at the very end of the hour, and if the contact came before the answer of the service."""
    lines = [
        wake(at(0, 22, 59, 59), "missed on day 0"),
        wake(at(0, 23, 0, 0), "missed on day 1"),
        wake(at(0, 23, 30), "picked up on day 0"),
        fetch(at(0, 23, 59), "picked up on day 0"),
        wake(at(0, 23, 30), "picked up on day 1"),
        fetch(at(1, 0, 30), "picked up on day 1"),
        wake(at(0, 23, 30), "too late"),
        fetch(at(1, 0, 30, 0.000001), "too late"),
        wake(at(0, 23, 59, 59.95), "answered on day 1"),
        fetch(at(0, 23, 59, 59.97), "answered on day 1"),
    ]
    one, two = (run(lines, number, number) for number in (0, 1))
    assert [(row["service"], row["n"], row["missed"]) for row in one["wakeups_daily"]] == [("*", 2, 1), ("fcm", 2, 1)]
    assert [(row["service"], row["n"], row["missed"]) for row in two["wakeups_daily"]] == [("*", 4, 2), ("fcm", 4, 2)]
    assert [row["did"] for row in one["wakeups_missed_top"]] == ["missed on day 0"]
    assert {row["did"] for row in two["wakeups_missed_top"]} == {"missed on day 1", "too late"}


def test_devices_woken_together_are_one_wakeup() -> None:
    """By the times at which requests began: the slower of two services does not make a second wake-up."""
    lines = [
        wake(at(0, 1), "a", "fcm"),
        event("push.wake", at(0, 1, second=9), did="a", service="apns", outcome="sent", dur_ms=8_000.0),
        wake(at(0, 1), "a", "web_push", "retry", code="busy"),
        fetch(at(0, 1, second=4), "a"),
        # Later, and to be counted again; the contact before it does not count.
        wake(at(0, 1, second=5), "a", "fcm"),
        # Of another account, at the same time.
        wake(at(0, 1), "b", "fcm"),
        # Neither accepted, nor of a known account.
        wake(at(0, 2), "c", "fcm", "gone", code="UNREGISTERED"),
        event("push.wake", at(0, 3), service="webhook", outcome="sent"),
        event("push.forget", at(0, 3), did="c", service="fcm", reason="UNREGISTERED"),
    ]
    result = run(lines)
    assert [tuple(row.values())[1:5] for row in result["wakeups_daily"]] == [
        ("*", 3, 2, 2 / 3),
        ("apns", 1, 0, 0.0),
        ("fcm", 3, 2, 2 / 3),
    ]
    assert [tuple(row.values())[1:] for row in result["wakeups_missed_top"]] == [(1, "b", 1, "fcm")]
    assert [tuple(row.values())[1:] for row in result["push_daily"]] == [
        ("push.forget", "fcm", "UNREGISTERED", "", 1),
        ("push.wake", "apns", "sent", "", 1),
        ("push.wake", "fcm", "gone", "UNREGISTERED", 1),
        ("push.wake", "fcm", "sent", "", 3),
        ("push.wake", "web_push", "retry", "busy", 1),
        ("push.wake", "webhook", "sent", "", 1),
    ]


def test_no_rows_without_push() -> None:
    result = run([fetch(at(0), "a")])
    assert result == {"push_daily": [], "wakeups_daily": [], "wakeups_missed_top": []}
