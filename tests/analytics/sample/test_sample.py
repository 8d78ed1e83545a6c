"""Generated logs: the daemon's format, and a ground truth that plain counting confirms."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from twisted.internet.task import Clock

from analytics.sample import generate_logs
from analytics.sample.ground_truth import COUNTER_NAMES, INCIDENT_SCHEDULE, SampleSpec, SampleTruth, get_counter_steps
from analytics.sample.simulation import (
    COMMON_FAULTS,
    KEY_EPOCH,
    RATE_LIMITED_CODES,
    REPLAYED_CODE,
    UNTIMELY_CODE,
    SimulatedNode,
)
from analytics.sample.traffic import DROPPED_LINES, LOST_LINES, NEW_ERROR_CODE
from mediatord import __version__
from mediatord.observability.event_log import EventLogWriter, LogOrigin
from mediatord.observability.event_schema import EVENTS, build_json_schema
from mediatord.observability.segments import seal_segment
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES, DECENTRL_ERROR_CODES, DIDCOMM_ERROR_CODES

SMALL = {"wallets": 120, "messages_per_day": 150, "gauge_s": 600, "segment_hours": 6}
# One incident for each way to lose lines.
LOSS_INCIDENTS = frozenset({"crash", "disk_full", "late_segment"})


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> SampleTruth:
    """30 days, with lost lines and a segment that is not delivered yet."""
    directory = tmp_path_factory.mktemp("month") / "logs"
    return generate_logs(directory, SampleSpec(**SMALL, days=30, incidents=LOSS_INCIDENTS))  # type: ignore[arg-type]


def list_segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("events*"))


def read_lines(directory: Path) -> Iterator[bytes]:
    """Lines of all segments, in any order."""
    for path in list_segments(directory):
        if path.is_file():
            content = path.read_bytes()
            yield from (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()


def parse_events(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Events in order of time, and the number of damaged lines."""
    events, damaged = [], 0
    for line in read_lines(directory):
        try:
            events.append(json.loads(line))
        except ValueError:
            damaged += 1
    return sorted(events, key=lambda event: (event["ts"], event["seq"])), damaged


def test_lines_conform_to_event_schema(tmp_path: Path) -> None:
    incidents = frozenset(INCIDENT_SCHEDULE) - LOSS_INCIDENTS
    generate_logs(tmp_path / "logs", SampleSpec(**SMALL, days=20, incidents=incidents))  # type: ignore[arg-type]
    validator = jsonschema_rs.validator_for(build_json_schema())
    seen = set()
    for line in read_lines(tmp_path / "logs"):
        event = json.loads(line)
        assert validator.is_valid(event), event
        seen.add(event["event"])
    not_generated = {"log.drop", "proc.reload", "msg.remove", "acct.deny", "acct.expire"}
    assert seen >= set(EVENTS) - not_generated


@pytest.mark.parametrize("compress", [False, True])
def test_segments_equal_those_of_the_daemon(tmp_path: Path, compress: bool) -> None:
    events = [
        ("msg.accept", {"msg": "m", "rcpt": "r", "proto": "didcomm", "size": 3, "ttl_s": None, "method": "queue"}),
        ("conn.close", {"conn": "c", "dur_ms": 12.34567, "ws_code": 1000, "reason": "peer"}),
        ("gauge", {"depth": 1, "lag_ms": 0.25}),
    ]
    clock = Clock()
    clock.advance(1_800_014_400.0)
    node = SimulatedNode("n", tmp_path / "sample", clock.seconds, Random(1), [], compress=compress)
    daemon = EventLogWriter(tmp_path / "daemon", clock, LogOrigin("n", __version__, KEY_EPOCH, node.boot))
    daemon.startService()
    daemon.emit("proc.start", version=__version__)
    for event, fields in events:
        clock.advance(0.5)
        node.log_event(event, **fields)  # type: ignore[arg-type]
        daemon.emit(event, **fields)  # type: ignore[arg-type]
    clock.advance(0.5)
    daemon.emit("proc.stop", version=__version__, reason="signal")
    daemon.emit("counters", **node.counters)
    daemon.stopService()
    node.stop()
    (daemon_segment,), (sample_segment,) = list_segments(tmp_path / "daemon"), list_segments(tmp_path / "sample")
    if compress:
        seal_segment(daemon_segment, compress=True)
        (daemon_segment,) = list_segments(tmp_path / "daemon")
    assert sample_segment.name == daemon_segment.name
    unpack = gzip.decompress if compress else bytes
    assert _drop_microseconds(unpack(sample_segment.read_bytes())) == _drop_microseconds(
        unpack(daemon_segment.read_bytes())
    )
    assert sample_segment.read_bytes()[:10] == daemon_segment.read_bytes()[:10]


def _drop_microseconds(content: bytes) -> list[bytes]:
    """Truncate times to milliseconds: simultaneous lines of the sample are microseconds apart."""
    return re.sub(rb"(\.\d{3})\d{3}Z", rb"\1Z", content).split(b"\n")


def test_sample_is_reproducible(tmp_path: Path) -> None:
    spec = SampleSpec(**SMALL, days=2)  # type: ignore[arg-type]
    found = []
    for name in ("one", "two"):
        generate_logs(tmp_path / name, spec)
        found.append({path.name: path.read_bytes() for path in list_segments(tmp_path / name) if path.is_file()})
    assert found[0] == found[1]
    other = SampleSpec(**SMALL, days=2, seed=2)  # type: ignore[arg-type]
    generate_logs(tmp_path / "three", other)
    assert {path.name for path in list_segments(tmp_path / "three")} != set(found[0])


def test_workers_have_own_directories(tmp_path: Path) -> None:
    truth = generate_logs(tmp_path, SampleSpec(**SMALL, days=1, nodes=("a",), workers=2))  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "a-2"]
    assert {node for node, _ in truth.days[truth.spec.first_day].events} == {"a-1", "a-2"}


def test_codes_exist_in_daemon() -> None:
    known = {(row.status, row.code) for row in DIDCOMM_ERROR_CODES.values()}
    known |= {
        (row.encrypted_status, row.code) for row in DIDCOMM_ERROR_CODES.values() if row.encrypted_status is not None
    }
    known |= {(row.status, row.code) for row in DECENTRL_ERROR_CODES.values()}
    known |= {(row.status, row.code) for row in DECENTRL_CLOSE_CODES.values()}
    assert {(status, code) for _, _, status, code, _ in COMMON_FAULTS} <= known
    assert {NEW_ERROR_CODE, REPLAYED_CODE, UNTIMELY_CODE, *RATE_LIMITED_CODES.values()} <= {code for _, code in known}


@pytest.mark.exhaustive
def test_wallets_of_didcomm_v1(month: SampleTruth) -> None:
    """Their requests, connections and accounts are of v1, as the daemon logs them; messages have one queue."""
    names: dict[str, set[str]] = {}
    for line in parse_events(month.directory)[0]:
        names.setdefault(line.get("proto", ""), set()).add(line["event"])
    assert names["didcomm_v1"] == {"req.done", "conn.auth", "conn.close", "acct.grant", "acct.update"}


def test_ground_truth_agrees_with_lines(month: SampleTruth) -> None:
    events, damaged = parse_events(month.directory)
    before = month.days_before_late
    assert damaged == sum(sum(day.damaged.values()) for day in before.values()) == 2
    assert _count_events(events, month) == {name: day.events for name, day in before.items()}
    assert _count_missing(events, month) == {name: day.missing for name, day in before.items()}
    assert _keep_ledger(events, month) == {
        name: (day.ledger.accepted, day.ledger.open, day.ledger.orphans, sum(day.lost.values()))
        for name, day in before.items()
    }
    assert any(day.ledger.orphans for day in before.values())
    assert _count_pushes(events, month) == {name: day.pushes for name, day in before.items()}
    sent = sum(event.get("outcome") == "sent" for event in events)
    woken = sum(day.wakeups["*"] for day in before.values())
    # Phones have one device or two.
    assert sent / 2 < woken < sent
    assert 0 < sum(day.missed["*"] for day in before.values()) < woken / 2


def test_ledger_balances_with_late_segments(month: SampleTruth, tmp_path: Path) -> None:
    assert month.late
    late = [path.read_bytes() for path, _ in month.late]
    for name, day in month.days.items():
        ledger = day.ledger
        ended = ledger.acked + ledger.expired + ledger.evicted + ledger.removed
        assert ledger.opening + ledger.accepted == ended + ledger.open, name
    (incident,) = (incident for name, incident in month.incidents.items() if name == "late_segment")
    late_lines = sum(len(gzip.decompress(content).splitlines()) for content in late)
    assert month.days[incident.day].lines == month.days_before_late[incident.day].lines + late_lines


def test_counters_equal_lines_without_loss(month: SampleTruth) -> None:
    events, _ = parse_events(month.directory)
    logged: Counter[tuple[str, str]] = Counter()
    compared = 0
    for event in events:
        if event["node"] == "mediator-b" and event["ts"] < "2026-10-30":
            for counter, step in get_counter_steps(event["event"], event):
                logged[event["boot"], counter] += step
            if event["event"] == "counters":
                compared += 1
                assert all(event[name] == logged[event["boot"], name] for name in COUNTER_NAMES)
    assert compared > 100


def test_lost_lines_appear_in_counters_and_sequence_numbers(month: SampleTruth) -> None:
    crash, full = month.incidents["crash"], month.incidents["disk_full"]
    drifted = {(day, node) for day, truth in month.days.items() for node, _ in truth.drift}
    assert drifted == {(incident.day, incident.details["node"]) for incident in (crash, full)}
    missing = {day: truth.missing for day, truth in month.days.items() if truth.missing}
    assert missing == {crash.day: LOST_LINES, full.day: DROPPED_LINES}
    assert month.days[crash.day].unclosed[crash.details["node"]] > 0


def _count_events(events: list[dict[str, Any]], truth: SampleTruth) -> dict[date, Counter[tuple[str, str]]]:
    found: dict[date, Counter[tuple[str, str]]] = {day: Counter() for day in truth.days}
    for event in events:
        day = date.fromisoformat(event["ts"][:10])
        if day in found:
            found[day][event["node"], event["event"]] += 1
    return found


def _count_pushes(events: list[dict[str, Any]], truth: SampleTruth) -> dict[date, Counter[tuple[str, str, str]]]:
    found: dict[date, Counter[tuple[str, str, str]]] = {day: Counter() for day in truth.days}
    for event in events:
        day = date.fromisoformat(event["ts"][:10])
        if day in found and event["event"].startswith("push."):
            found[day][event["event"], event["service"], event.get("outcome") or event["reason"]] += 1
    return found


def _count_missing(events: list[dict[str, Any]], truth: SampleTruth) -> dict[date, int]:
    found, seen = dict.fromkeys(truth.days, 0), dict[str, int]()
    for event in events:
        day = date.fromisoformat(event["ts"][:10])
        if day in found:
            found[day] += event["seq"] - seen.get(event["boot"], 0) - 1
            seen[event["boot"]] = event["seq"]
    return found


def _keep_ledger(events: list[dict[str, Any]], truth: SampleTruth) -> dict[date, tuple[int, int, int, int]]:
    """Messages accepted, open at the end of the day, ended without acceptance, and lost."""
    found = {}
    waiting, by_day = set(), {day: [0, 0, 0] for day in truth.days}
    days = iter(events)
    event = next(days, None)
    for day, (accepted, orphans, lost) in by_day.items():
        while event is not None and event["ts"][:10] <= day.isoformat():
            match event["event"]:
                case "msg.accept":
                    accepted += 1
                    waiting.add(event["msg"])
                case "msg.ack" | "msg.expire" | "msg.evict" | "msg.remove" as kind:
                    known = event["msg"] in waiting
                    waiting.discard(event["msg"])
                    orphans += not known
                    lost += known and kind != "msg.ack"
            event = next(days, None)
        found[day] = accepted, len(waiting), orphans, lost
    return found
