"""The event log of a daemon under load is complete and agrees with its counters (analytics 2.2, 4.2)."""

from __future__ import annotations

import json
import os
import signal
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from tests.integration.daemon import Daemon, merge_settings
from tests.integration.message_load import (
    ROOMY,
    LoadSenders,
    drain_queue,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
)
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient
from tests.integration.test_lifecycle import send_request
from tests.observability.counter_oracle import (
    NAMES,
    Line,
    expected_counters,
    read_lines,
    read_segments,
    wrong_counter_lines,
)

reactor: Any = _reactor

MESSAGES = 200
# Interval of polling.
POLL_SECONDS = 0.02
METRIC_NAMES = {
    "forwarded": "mediator_messages_forwarded_total",
    "stored": "mediator_messages_stored_total",
    "delivered": "mediator_messages_delivered_total",
    "expired": "mediator_messages_expired_total",
    "evicted": "mediator_messages_evicted_total",
    "connections": "mediator_active_connections",
}


def read_counters(daemon: Daemon) -> dict[str, int]:
    """Values of `/metrics` for the fields of the event `counters`."""
    connection = HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    values = {
        name: sum(int(sample.value) for sample in samples if sample.name == metric)
        for name, metric in METRIC_NAMES.items()
    }
    for outcome in ("accepted", "rejected", "failed"):
        values[f"requests_{outcome}"] = sum(
            int(sample.value)
            for sample in samples
            if sample.name == "mediator_requests_total" and sample.labels["outcome"] == outcome
        )
    return {name: values[name] for name in NAMES}


def closed_segments(directory: Path) -> set[str]:
    """Names of closed segments, without suffixes."""
    return {path.name.split(".jsonl")[0] for path in directory.glob("events-*.jsonl*")}


class EventLogTestCase(TestCase):
    def start_daemon(self, settings: dict[str, Any] | None = None) -> Daemon:
        daemon = prepare_daemon(merge_settings(ROOMY, settings or {}))
        self.addCleanup(daemon.clean)
        daemon.start()
        return daemon

    def assert_complete(self, lines: list[Line]) -> None:
        """Sequence numbers of each boot are complete and unique."""
        boots = {line["boot"] for line in lines}
        for boot in boots:
            numbers = [line["seq"] for line in lines if line["boot"] == boot]
            self.assertEqual(numbers, list(range(1, len(numbers) + 1)))


class SignalTests(EventLogTestCase):
    """Signals during traffic of both protocols."""

    async def test_rotation_by_signals_loses_no_line(self) -> None:
        """
        Signals close segments again and again, the last one is SIGTERM; their names stay. All lines are there once;
        every `counters` line agrees with them, with /metrics and with the clients.
        """
        daemon = self.start_daemon()
        bob = await enrol_wallet(daemon, reactor)
        socket = await connect_didcomm_socket(reactor, bob)
        await socket.live()
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "m", MESSAGES))
        senders.start()
        names: set[str] = set()
        for count in range(1, 5):
            await deferToThread(senders.wait_for_answers, count * MESSAGES // 8)
            # So that there are lines to seal, even if all forwards have been answered.
            await deferToThread(send_request, daemon.port, "POST", "/didcomm", b"{}")
            segments_before = closed_segments(daemon.log_directory)
            os.kill(daemon.pid, signal.SIGUSR1 if count % 2 else signal.SIGHUP)
            # Two pending signals of the same kind would be merged.
            while not closed_segments(daemon.log_directory) - segments_before:
                await deferLater(reactor, POLL_SECONDS)
            names |= closed_segments(daemon.log_directory)
        await deferToThread(senders.join)
        accepted = len(senders.markers(202))
        await socket.close()
        await deferToThread(self.send_event, daemon)
        drained = await drain_queue(bob)
        self.assertEqual((accepted, len(drained)), (MESSAGES, MESSAGES))
        await self.wait_until_sockets_closed(daemon)
        counters_seen = await deferToThread(read_counters, daemon)
        names |= closed_segments(daemon.log_directory)
        await deferToThread(daemon.stop)
        self.assertLessEqual(names, closed_segments(daemon.log_directory))
        self.assertFalse((daemon.log_directory / "events.jsonl").exists())
        lines = read_lines(daemon.log_directory)
        self.assert_complete(lines)
        self.assertEqual(wrong_counter_lines(lines), [])
        totals = expected_counters(lines)
        self.assertEqual(totals, counters_seen)
        self.assertEqual((totals["forwarded"], totals["delivered"]), (MESSAGES + 1, MESSAGES + 1))
        self.assertEqual(totals["expired"] + totals["evicted"] + totals["connections"], 0)
        segments = read_segments(daemon.log_directory)
        self.assertGreaterEqual(len(segments), 5)
        for name, content in segments.items():
            first, counters, last = (json.loads(content[number]) for number in (0, -2, -1))
            self.assertEqual(
                (first["event"], counters["event"], last["event"]), ("log.open", "counters", "log.close")
            )
            self.assertEqual((first["segment"], len(content)), (name.split(".jsonl")[0], last["lines"]))
        self.assertEqual(sum(line["event"] == "proc.reload" for line in lines), 2)

    def send_event(self, daemon: Daemon) -> None:
        """Send one event; fetch and acknowledge it."""
        daemon_client = DaemonClient(daemon)
        alice, bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        for identity in (alice, bob):
            identity.register()
        alice.permit_sender(bob)
        bob.send_event(alice)
        alice.execute("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[event["id"] for event in alice.pending_events()])

    async def wait_until_sockets_closed(self, daemon: Daemon) -> None:
        """Return when no socket is open."""
        while (await deferToThread(read_counters, daemon))["connections"]:
            await deferLater(reactor, POLL_SECONDS, lambda: None)


class KillTests(EventLogTestCase):
    async def test_kill_tears_at_most_the_last_line(self) -> None:
        """No line before it is missing; the next boot begins a new sequence."""
        daemon = self.start_daemon({"log": {"rotate": {"compress": False}}})
        bob = await enrol_wallet(daemon, reactor)
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "m", MESSAGES))
        senders.start()
        await deferToThread(senders.wait_for_answers, MESSAGES // 4)
        os.kill(daemon.pid, signal.SIGUSR1)
        await deferToThread(senders.wait_for_answers, MESSAGES // 2)
        daemon.kill()
        await deferToThread(senders.join)
        await deferToThread(daemon.start)
        await deferToThread(daemon.stop)
        torn = 0
        lines: list[Line] = []
        for content in read_segments(daemon.log_directory).values():
            if not content[-1].endswith(b"\n"):
                torn += 1
                content.pop()
            lines += map(json.loads, content)
        self.assertLessEqual(torn, 1)
        lines.sort(key=lambda line: (line["boot"], line["seq"]))
        self.assert_complete(lines)
        self.assertEqual(wrong_counter_lines(lines), [])
        self.assertEqual(len({line["boot"] for line in lines}), 2)
        # The lines of a reactor iteration are written before its responses.
        accepted = sum(line["event"] == "msg.accept" for line in lines)
        self.assertGreaterEqual(accepted, len(senders.markers(202)))
