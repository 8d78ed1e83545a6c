"""The event log of a daemon under load: nothing is lost, and it says what the counters say (analytics 2.2, 4.2)."""

from __future__ import annotations

import json
import os
import signal
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import yaml
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
from tests.integration.test_lifecycle import ask
from tests.observability.counter_oracle import (
    NAMES,
    Line,
    expected_counters,
    read_lines,
    read_segments,
    wrong_counter_lines,
)

reactor: Any = _reactor

LETTERS = 200
# The daemon is looked at so often.
LOOK_SECONDS = 0.02
FIGURES = {
    "forwarded": "mediator_messages_forwarded_total",
    "stored": "mediator_messages_stored_total",
    "delivered": "mediator_messages_delivered_total",
    "expired": "mediator_messages_expired_total",
    "evicted": "mediator_messages_evicted_total",
    "connections": "mediator_active_connections",
}


def figures(daemon: Daemon) -> dict[str, int]:
    """What `/metrics` says of what the event `counters` has."""
    connection = HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {name: sum(int(one.value) for one in samples if one.name == metric) for name, metric in FIGURES.items()}
    for outcome in ("accepted", "rejected", "failed"):
        found[f"requests_{outcome}"] = sum(
            int(one.value)
            for one in samples
            if one.name == "mediator_requests_total" and one.labels["outcome"] == outcome
        )
    return {name: found[name] for name in NAMES}


def closed_names(directory: Path) -> set[str]:
    """Of closed segments, without suffixes."""
    return {path.name.split(".jsonl")[0] for path in directory.glob("events-*.jsonl*")}


class EventLogTestCase(TestCase):
    def start(self, settings: dict[str, Any] | None = None) -> Daemon:
        daemon = prepare_daemon(merge_settings(ROOMY, settings or {}))
        self.addCleanup(daemon.clean)
        daemon.start()
        return daemon

    def complete(self, lines: list[Line]) -> None:
        """Every number of a boot is there once, from the first line on."""
        boots = {line["boot"] for line in lines}
        for boot in boots:
            numbers = [line["seq"] for line in lines if line["boot"] == boot]
            self.assertEqual(numbers, list(range(1, len(numbers) + 1)))


class SignalTests(EventLogTestCase):
    """Signals in the middle of traffic of both protocols."""

    async def test_nothing_is_lost(self) -> None:
        """
        Segments are closed again and again by signals, the last one by SIGTERM; their names stay. All lines are there
        once, every `counters` line is right, and they agree with /metrics and with what the clients know.
        """
        daemon = self.start()
        bob = await enrol_wallet(daemon, reactor)
        socket = await connect_didcomm_socket(reactor, bob)
        await socket.live()
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "m", LETTERS))
        senders.start()
        names: set[str] = set()
        for count in range(1, 5):
            await deferToThread(senders.wait_for_answers, count * LETTERS // 8)
            # So that there is something to close, even if all letters have been answered by now.
            await deferToThread(ask, daemon.port, "POST", "/didcomm", b"{}")
            closed = closed_names(daemon.log_directory)
            os.kill(daemon.pid, signal.SIGUSR1 if count % 2 else signal.SIGHUP)
            # Two of the same signal at once would be one.
            while not closed_names(daemon.log_directory) - closed:
                await deferLater(reactor, LOOK_SECONDS)
            names |= closed_names(daemon.log_directory)
        await deferToThread(senders.join)
        posted = len(senders.markers(202))
        await socket.close()
        await deferToThread(self.converse, daemon)
        found = await drain_queue(bob)
        self.assertEqual((posted, len(found)), (LETTERS, LETTERS))
        await self.settled(daemon)
        said = await deferToThread(figures, daemon)
        names |= closed_names(daemon.log_directory)
        await deferToThread(daemon.stop)
        self.assertLessEqual(names, closed_names(daemon.log_directory))
        self.assertFalse((daemon.log_directory / "events.jsonl").exists())
        lines = read_lines(daemon.log_directory)
        self.complete(lines)
        self.assertEqual(wrong_counter_lines(lines), [])
        totals = expected_counters(lines)
        self.assertEqual(totals, said)
        self.assertEqual((totals["forwarded"], totals["delivered"]), (LETTERS + 1, LETTERS + 1))
        self.assertEqual(totals["expired"] + totals["evicted"] + totals["connections"], 0)
        segments = read_segments(daemon.log_directory)
        self.assertGreaterEqual(len(segments), 5)
        for name, whole in segments.items():
            first, counters, last = (json.loads(whole[number]) for number in (0, -2, -1))
            self.assertEqual(
                (first["event"], counters["event"], last["event"]), ("log.open", "counters", "log.close")
            )
            self.assertEqual((first["segment"], len(whole)), (name.split(".jsonl")[0], last["lines"]))
        self.assertEqual(sum(line["event"] == "proc.reload" for line in lines), 2)

    def converse(self, daemon: Daemon) -> None:
        """One event between two identities, fetched and acknowledged."""
        daemon_client = DaemonClient(daemon)
        alice, bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        for one in (alice, bob):
            one.register()
        alice.befriend(bob)
        bob.tell(alice)
        alice.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[event["id"] for event in alice.pending()])

    async def settled(self, daemon: Daemon) -> None:
        """No socket is open any more."""
        while (await deferToThread(figures, daemon))["connections"]:
            await deferLater(reactor, LOOK_SECONDS, lambda: None)


class KillTests(EventLogTestCase):
    async def test_kill(self) -> None:
        """After kill -9 at most the last line is torn, and none before it is missing; the next boot begins anew."""
        daemon = self.start({"log": {"rotate": {"compress": False}}})
        bob = await enrol_wallet(daemon, reactor)
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "m", LETTERS))
        senders.start()
        await deferToThread(senders.wait_for_answers, LETTERS // 4)
        os.kill(daemon.pid, signal.SIGUSR1)
        await deferToThread(senders.wait_for_answers, LETTERS // 2)
        daemon.kill()
        await deferToThread(senders.join)
        await deferToThread(daemon.start)
        await deferToThread(daemon.stop)
        torn = 0
        lines: list[Line] = []
        for whole in read_segments(daemon.log_directory).values():
            if not whole[-1].endswith(b"\n"):
                torn += 1
                whole.pop()
            lines += map(json.loads, whole)
        self.assertLessEqual(torn, 1)
        lines.sort(key=lambda line: (line["boot"], line["seq"]))
        self.complete(lines)
        self.assertEqual(wrong_counter_lines(lines), [])
        self.assertEqual(len({line["boot"] for line in lines}), 2)
        # A turn's lines are written before its answers.
        accepted = sum(line["event"] == "msg.accept" for line in lines)
        self.assertGreaterEqual(accepted, len(senders.markers(202)))


# "configuration reloaded" or "configuration rejected".
RELOADED = "configuration re"


class ReloadTests(EventLogTestCase):
    async def test_reload(self) -> None:
        """SIGHUP has the file read: what can be applied is, the rest is named, and a broken file changes nothing."""
        daemon = self.start({"log": {"rotate": {"compress": False}}})
        values, self.directory = daemon.configuration(), daemon.log_directory
        await self.reload(
            daemon, yaml.safe_dump(merge_settings(values, {"log": {"level": "warn"}, "queue": {"ttl": "60s"}}))
        )
        await deferToThread(daemon.await_output, "a restart is needed for queue.ttl")
        await self.reload(daemon, "log: [")
        await deferToThread(daemon.await_output, "configuration rejected, keeping the previous settings")
        await enrol_wallet(daemon, reactor)
        await self.reload(daemon, yaml.safe_dump(values))
        await deferToThread(daemon.stop)
        lines = read_lines(self.directory)
        self.complete(lines)
        # With level warn nothing was written of those two, nor of who enrolled in between.
        self.assertEqual([line["reason"] for line in lines if line["event"] == "proc.reload"], ["ok"])
        self.assertEqual([line for line in lines if line["event"] == "acct.grant"], [])

    async def reload(self, daemon: Daemon, text: str) -> None:
        """Have the daemon read this; it has done so when it has said one more time what became of that."""
        before = daemon.output().count(RELOADED)
        daemon.config.write_text(text, encoding="utf-8")
        os.kill(daemon.pid, signal.SIGHUP)
        while daemon.output().count(RELOADED) == before:
            await deferLater(reactor, LOOK_SECONDS, lambda: None)
