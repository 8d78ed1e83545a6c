"""Periodic tasks that survive failures, and delayed messages that come due (reference 4.5, 12)."""

from __future__ import annotations

from functools import partial
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.metrics_collection import refresh_store_metrics
from mediatord.cluster.leases import LEADER_LEASE, LeaderLease
from mediatord.didcomm.housekeeping import (
    BATCH_SIZE,
    CONNECTIONS_INTERVAL,
    MAX_TIMER_DELAY,
    DelayedMessageScheduler,
    Housekeeping,
)
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import MessageLedger, Payload, StoredMessage, StoreLedger, StoreStatistics
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_mediator import FakeSocket, InMemoryMediator, InMemoryWallet, pack_forward


class HousekeepingTestCase(SynchronousTestCase):
    ttl = "60s"

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, queue={"ttl": self.ttl}, limits={"ip_per_minute": 10_000})
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def forward(self, **headers: Any) -> None:
        """Forward a message to Bob anonymously."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(), **headers)
        self.assertEqual(self.in_memory.receive(raw).status, 202)

    def count_pushed(self, socket: FakeSocket) -> int:
        """Number of messages in the deliveries that were pushed to a socket of Bob's."""
        return sum(len(read_delivery(self.bob.open(frame).message)) for frame in socket.frames)

    def record_calls(self, operation: str) -> list[tuple[Any, ...]]:
        """Record the arguments of further calls of an operation of the store."""
        store: Any = self.in_memory.store
        real, calls = getattr(store, operation), []

        def recorded(*args: Any) -> Deferred[Any]:
            calls.append(args)
            result: Deferred[Any] = real(*args)
            return result

        setattr(store, operation, recorded)
        return calls


class HousekeepingRoundTests(HousekeepingTestCase):
    def test_failed_run_is_repeated(self) -> None:
        """An internal error is logged, an unavailable store is not; the next run does the work."""
        for error, logged in ((RuntimeError("boom"), 1), (StoreUnavailable(), 0)):
            self.forward()
            with self.in_memory.failing("expire_messages", error):
                self.in_memory.clock.pump([15] * 5)
            self.assertGreaterEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
            before = self.in_memory.counter("mediator_messages_expired_total")
            self.in_memory.clock.advance(15)
            self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), before + 1)

    def test_other_tasks(self) -> None:
        """Nonces are pruned every ten minutes and the gauge is recorded every minute, also after failures."""
        for operation, interval in (("prune_nonces", 600), ("get_queue_totals", 60)):
            with self.in_memory.failing(operation, RuntimeError("boom")):
                self.in_memory.clock.advance(interval)
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
            calls = self.record_calls(operation)
            self.in_memory.clock.advance(interval)
            self.assertEqual(len(calls), 1)

    def test_expiry_in_chunks(self) -> None:
        """Many expired messages are removed in chunks with pauses, each with its event (AF-5)."""
        count = 0
        for number in range(3):
            did = f"did:example:{number}"
            self.bob.enrol(did)
            payloads = [Payload(f"{number}-{each}", b"{}", "json") for each in range(BATCH_SIZE - 20)]
            now = self.in_memory.clock.seconds()
            self.successResultOf(self.in_memory.store.enqueue(did, payloads, expires_at=now + 10))
            count += len(payloads)
        calls = self.record_calls("expire_messages")
        self.in_memory.clock.advance(15)
        self.assertEqual(len(calls), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), BATCH_SIZE)
        self.in_memory.clock.advance(0.01)
        self.assertEqual(len(calls), 2)
        self.in_memory.clock.advance(0.01)
        self.assertEqual([limit for (limit,) in calls], [BATCH_SIZE] * 3)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), count)
        events = self.in_memory.events("msg.expire")
        self.assertEqual((len(events), {event["reason"] for event in events}), (count, {"ttl"}))

    def test_gauge_event(self) -> None:
        """Once a minute: queued messages, sockets, memory and open files (analytics 2.2)."""
        self.forward()
        self.forward()
        waiting = self.successResultOf(self.in_memory.store.get_queue_status(self.bob.did, None))
        self.in_memory.socket()
        self.in_memory.clock.advance(59)
        self.assertEqual(self.in_memory.events("gauge"), [])
        self.in_memory.clock.advance(1)
        (event,) = self.in_memory.events("gauge")
        self.assertEqual((event["depth"], event["conns"], event["rcpts"]), (2, 1, 1))
        self.assertEqual(event["oldest_ms"], 60_000)
        self.assertEqual(event["bytes"], waiting.total_bytes)
        self.assertGreater(event["rss"], 1_000_000)
        self.assertEqual(self.in_memory.counter("mediator_messages_waiting"), 2)
        oldest = self.in_memory.counter("mediator_oldest_message_timestamp_seconds")
        self.assertEqual(oldest, self.in_memory.clock.seconds() - 60)

    def test_gauge_event_without_store(self) -> None:
        """Figures of the process and counters are recorded without the store."""
        with self.in_memory.failing("get_queue_totals", StoreUnavailable()):
            self.in_memory.clock.advance(60)
        (event,) = self.in_memory.events("gauge")
        self.assertNotIn("depth", event)
        self.assertEqual(event["conns"], 0)
        self.assertEqual(len(self.in_memory.events("counters")), 1)

    def test_ledger_event(self) -> None:
        """Once a minute, one event a protocol; the metrics on each scrape."""
        self.in_memory.clock.advance(30)
        self.forward()
        self.in_memory.clock.advance(30)
        didcomm, decentrl = self.in_memory.events("ledger")
        self.assertEqual((didcomm["proto"], decentrl["proto"]), ("didcomm", "decentrl"))
        self.assertEqual((didcomm["all_accepted"], didcomm["waiting"], didcomm["difference"]), (1, 1, 0))
        self.assertEqual((decentrl["all_accepted"], decentrl["waiting"], decentrl["difference"]), (0, 0, 0))
        self.assertEqual(didcomm["store"], decentrl["store"])
        self.successResultOf(Deferred.fromCoroutine(refresh_store_metrics(self.in_memory.base)))
        accepted = self.in_memory.counter("mediator_ledger_messages", entry="accepted", protocol="didcomm")
        self.assertEqual(accepted, 1)
        text = self.in_memory.base.recorder.metrics.render().decode()
        self.assertIn('mediator_ledger_difference{protocol="didcomm"} 0.0', text)
        self.in_memory.clock.pump([15] * 5)
        self.assertEqual(self.in_memory.events("ledger")[2]["all_expired"], 1)

    def test_unbalanced_ledger(self) -> None:
        """A difference is shown, and unknown values are not."""
        for ledger, shown in (
            (StoreLedger(MessageLedger(accepted=5, waiting=3)), 'mediator_ledger_difference{protocol="didcomm"} 2.0'),
            (StoreLedger(MessageLedger(accepted=5, waiting=None)), None),
        ):
            self.patch(self.in_memory.store, "read_ledger", lambda ledger=ledger: succeed(ledger))
            found = StoreStatistics((), 0, ledger)
            self.patch(self.in_memory.store, "read_statistics", lambda top, found=found: succeed(found))
            self.in_memory.clock.advance(60)
            line = self.in_memory.events("ledger")[-2]
            self.assertEqual(line.get("difference"), ledger.didcomm.difference)
            self.assertEqual(line.get("waiting"), ledger.didcomm.waiting)
            self.successResultOf(Deferred.fromCoroutine(refresh_store_metrics(self.in_memory.base)))
            text = self.in_memory.base.recorder.metrics.render().decode()
            self.assertEqual('mediator_ledger_difference{protocol="didcomm"}' in text, shown is not None)
            if shown is not None:
                self.assertIn(shown, text)

    def test_ledger_failure(self) -> None:
        """The gauge is recorded and the task repeated, whatever happens to the ledger."""
        for error, logged in ((RuntimeError("boom"), 1), (StoreUnavailable(), 0)):
            counts = len(self.in_memory.events("gauge")), len(self.in_memory.events("ledger"))
            with self.in_memory.failing("read_ledger", error):
                self.in_memory.clock.advance(60)
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
            self.assertEqual(
                (len(self.in_memory.events("gauge")), len(self.in_memory.events("ledger"))),
                (counts[0] + 1, counts[1]),
            )
            self.in_memory.clock.advance(60)
            self.assertEqual(len(self.in_memory.events("ledger")), counts[1] + 2)

    def test_reactor_lag(self) -> None:
        """The gauge event has the longest reactor lag since the one before, in milliseconds."""
        clock = self.in_memory.clock
        clock.pump([1.0] * 10 + [1.25] + [1.0] * 49)
        self.assertEqual(self.in_memory.events("gauge")[0]["lag_ms"], 250.0)
        clock.pump([1.0] * 60)
        self.assertEqual(self.in_memory.events("gauge")[1]["lag_ms"], 0.0)
        self.assertEqual(self.in_memory.counter("mediator_reactor_lag_seconds_count"), 120)
        self.assertEqual(self.in_memory.counter("mediator_reactor_lag_seconds_sum"), 0.25)

    def test_stop_waits_for_run(self) -> None:
        """A run in progress ends before the store is closed; no other one begins."""
        store: Any = self.in_memory.store
        held: Deferred[list[Any]] = Deferred()
        store.expire_messages = lambda limit: held
        self.in_memory.clock.advance(15)
        stopped = self.in_memory.didcomm.housekeeping.stopService()
        self.assertNoResult(stopped)
        held.callback([])
        self.successResultOf(stopped)
        calls = self.record_calls("prune_nonces")
        self.in_memory.clock.advance(3600)
        self.assertEqual(calls, [])

    def test_stop_interrupts_mass_expiry(self) -> None:
        """It ends at the next pause; the rest expires after the next start."""
        payloads = [Payload(f"{each}", b"{}", "json") for each in range(BATCH_SIZE + 1)]
        now = self.in_memory.clock.seconds()
        self.successResultOf(self.in_memory.store.enqueue(self.bob.did, payloads, expires_at=now + 10))
        self.in_memory.clock.advance(15)
        stopped = self.in_memory.didcomm.housekeeping.stopService()
        self.in_memory.clock.advance(0.01)
        self.successResultOf(stopped)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), BATCH_SIZE)
        self.in_memory.didcomm.housekeeping.startService()
        self.in_memory.clock.advance(15)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), BATCH_SIZE + 1)


class ConnectionExpiryTests(HousekeepingTestCase):
    """Connections of DIDComm v1 without an account."""

    def put_connections(self, number: int) -> None:
        for index in range(number):
            wallet = f"did:key:z6Mk{self.in_memory.clock.seconds():.0f}-{index}"
            connection = V1Connection(wallet, f"own key of {wallet}", "request")
            self.successResultOf(self.in_memory.store.v1_connections.put_connection(connection, max_pending=9_999))

    def count(self) -> tuple[int, int]:
        return self.successResultOf(self.in_memory.store.v1_connections.count_connections())

    def test_pending_connections_expire(self) -> None:
        """Those older than didcomm_v1.pending_connection_ttl are removed, however many; others and accounts stay."""
        ttl = self.in_memory.config.didcomm_v1.pending_connection_ttl
        self.put_connections(2 * BATCH_SIZE + 1)
        (first,) = self.successResultOf(self.in_memory.store.v1_connections.scan_connections("", 1))
        self.successResultOf(self.in_memory.store.grant(first.account))
        self.in_memory.clock.advance(ttl / 2)
        self.put_connections(3)
        self.in_memory.clock.advance(ttl / 2 - 1)
        self.assertEqual(self.count(), (1, 2 * BATCH_SIZE + 3))
        self.in_memory.clock.pump([CONNECTIONS_INTERVAL] + [0.01] * 100)
        self.assertEqual(self.count(), (1, 3))
        self.in_memory.clock.pump([ttl / 2 + CONNECTIONS_INTERVAL] + [0.01] * 100)
        self.assertEqual(self.count(), (1, 0))

    def test_leader_expires_connections(self) -> None:
        """A node removes connections only when it is the leader."""
        cluster, clock = self.in_memory.store.cluster, self.in_memory.clock
        self.in_memory.didcomm.housekeeping.stopService()
        self.put_connections(1)

        async def measure() -> None: ...

        node = Housekeeping(
            clock,
            self.in_memory.store,
            self.in_memory.didcomm.live,
            self.in_memory.base.recorder,
            measure,
            LeaderLease(clock, cluster, "node"),
            pending=60.0,
        )
        self.assertTrue(self.successResultOf(cluster.acquire_lease("housekeeping", "leader", LEADER_LEASE)))
        node.startService()
        for _ in range(int(3 * CONNECTIONS_INTERVAL)):
            clock.advance(1.0)
            self.assertTrue(self.successResultOf(cluster.acquire_lease("housekeeping", "leader", LEADER_LEASE)))
        self.assertEqual(self.count(), (0, 1))
        clock.pump([1.0] * int(LEADER_LEASE + CONNECTIONS_INTERVAL + 1))
        self.assertEqual(self.count(), (0, 0))
        self.successResultOf(node.stopService())

    def test_gauge_counts_connections(self) -> None:
        """The metric has connections with an account, and pending ones."""
        self.put_connections(3)
        (first,) = self.successResultOf(self.in_memory.store.v1_connections.scan_connections("", 1))
        self.successResultOf(self.in_memory.store.grant(first.account))
        self.in_memory.clock.advance(60)
        numbers = [self.in_memory.counter("mediator_v1_connections", state=state) for state in ("account", "pending")]
        self.assertEqual(numbers, [1, 2])


class DueTimesTests(HousekeepingTestCase):
    def open_live_socket(self) -> FakeSocket:
        """Open a live socket of Bob's."""
        socket = self.bob.go_live()
        socket.frames.clear()
        return socket

    def test_due_messages_after_restart(self) -> None:
        """Messages that came due while stopped are dispatched at once, others when due (reference 4.5)."""
        socket = self.open_live_socket()
        for seconds in (10, 30):
            self.forward(delay_milli=seconds * 1000)
        self.in_memory.didcomm.due.stopService()
        self.in_memory.clock.advance(20)
        self.assertEqual(len(socket.frames), 0)
        self.in_memory.didcomm.due.startService()
        self.in_memory.clock.advance(0)
        self.assertEqual(len(socket.frames), 1)
        self.in_memory.clock.advance(9)
        self.assertEqual(len(socket.frames), 1)
        self.in_memory.clock.advance(2)
        self.assertEqual(len(socket.frames), 2)

    def test_one_timer_for_all_delayed_messages(self) -> None:
        """One timer serves any number of delayed messages."""
        self.in_memory.clock.advance(0)
        before = len(self.in_memory.clock.getDelayedCalls())
        for seconds in (30, 10, 20):
            self.forward(delay_milli=seconds * 1000)
        self.in_memory.clock.advance(0)
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), before + 1)

    def test_retries_after_store_failure(self) -> None:
        """Due messages are dispatched a second after the store is back, whichever operation failed."""
        for operation in ("take_due_messages", "find_next_due"):
            for error in (StoreUnavailable(), RuntimeError("boom")):
                socket = self.open_live_socket()
                self.forward(delay_milli=1000)
                self.forward(delay_milli=5000)
                with self.in_memory.failing(operation, error):
                    self.in_memory.clock.pump([0.5] * 14)
                self.in_memory.clock.advance(1)
                self.assertEqual(self.count_pushed(socket), 2, (operation, error))
                self.in_memory.base.connections.closed(socket)
                self.flushLoggedErrors(RuntimeError)

    def test_retries_first_due_time(self) -> None:
        """The first due time is read until the store answers."""
        socket = self.open_live_socket()
        self.forward(delay_milli=3000)
        self.in_memory.didcomm.due.stopService()
        with self.in_memory.failing("find_next_due", StoreUnavailable()):
            self.in_memory.didcomm.due.startService()
            self.in_memory.clock.advance(1)
        self.in_memory.clock.pump([1] * 3)
        self.assertEqual(len(socket.frames), 1)

    def test_more_than_one_chunk(self) -> None:
        """All due messages are dispatched."""
        now = self.in_memory.clock.seconds()
        payloads = [Payload(f"{each}", b"{}", "json") for each in range(BATCH_SIZE + 10)]
        self.successResultOf(
            self.in_memory.store.enqueue(self.bob.did, payloads, expires_at=now + 50, due_at=now + 5)
        )
        socket = self.open_live_socket()
        self.in_memory.didcomm.due.schedule_wakeup(now + 5)
        self.in_memory.clock.advance(5)
        self.assertEqual(self.count_pushed(socket), BATCH_SIZE + 10)

    def test_stop_waits_for_dispatch(self) -> None:
        """A dispatch in progress ends before the store is closed."""
        store: Any = self.in_memory.store
        held: Deferred[list[Any]] = Deferred()
        self.forward(delay_milli=1000)
        store.take_due_messages = lambda limit: held
        self.in_memory.clock.advance(1)
        stopped = self.in_memory.didcomm.due.stopService()
        assert stopped is not None
        self.assertNoResult(stopped)
        held.callback([])
        self.successResultOf(stopped)


class ClockStepTests(HousekeepingTestCase):
    """Timers keep their remaining time when the clock is set."""

    ttl = "7d"

    def setUp(self) -> None:
        super().setUp()
        self.clock = self.in_memory.clock
        self.socket = self.bob.go_live()
        self.socket.frames.clear()

    def pushes_within(self, seconds: float) -> int:
        """Count messages pushed within the next seconds, inclusive."""
        self.clock.advance(seconds)
        count = self.count_pushed(self.socket)
        self.socket.frames.clear()
        return count

    def test_delayed_messages_after_step_forward(self) -> None:
        """Messages that are now due are dispatched within a minute, new ones when due."""
        self.forward(delay_milli=600_000)
        self.assertEqual(self.pushes_within(10), 0)
        self.clock.step_wall_clock(900)
        self.forward(delay_milli=3_000)
        self.assertEqual(self.pushes_within(3), 2)
        self.forward(delay_milli=600_000)
        self.clock.step_wall_clock(900)
        self.assertEqual(self.pushes_within(MAX_TIMER_DELAY), 1)

    def test_delayed_messages_after_step_back(self) -> None:
        """Older messages are due by the new time, new ones when due."""
        self.forward(delay_milli=30_000)
        self.clock.step_wall_clock(-600)
        self.forward(delay_milli=3_000)
        self.assertEqual(self.pushes_within(3), 1)
        self.assertEqual(self.pushes_within(626), 0)
        self.assertEqual(self.pushes_within(1), 1)

    def test_pushes_after_step_back(self) -> None:
        """Older pushes become pending again and do not delay newer ones."""
        timeout = self.in_memory.config.queue.delivered_timeout
        pending = partial(self.in_memory.counter, "mediator_messages_stored_total")
        self.forward()
        self.assertEqual((self.pushes_within(0), pending()), (1, 0))
        self.clock.step_wall_clock(-86_400)
        self.forward()
        self.clock.advance(1)
        self.assertEqual(pending(), 1)
        self.clock.advance(timeout - 2)
        self.assertEqual(pending(), 1)
        self.clock.advance(1)
        self.assertEqual(pending(), 2)


class ClusterNode:
    """
    Housekeeping of one of several nodes, with its own view of the shared store.

    :ivar calls: operations of the store that it called, and when.
    :ivar dispatched: messages that came due on this node.
    """

    def __init__(self, in_memory: InMemoryMediator, boot: str) -> None:
        self.in_memory = in_memory
        self.boot = boot
        self.calls: list[tuple[str, float]] = []
        self.dispatched: list[StoredMessage] = []
        self.measured = 0
        store: Any = self
        leader_lease = LeaderLease(in_memory.clock, in_memory.store.cluster, boot)
        self.due = DelayedMessageScheduler(in_memory.clock, store, self.dispatched.extend, leader_lease)
        self.rounds = Housekeeping(
            in_memory.clock, store, in_memory.didcomm.live, in_memory.base.recorder, self.measure, leader_lease
        )

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.in_memory.store, name)

        def recorded(*args: Any) -> Any:
            self.calls.append((name, self.in_memory.clock.seconds()))
            return operation(*args)

        return recorded

    async def measure(self) -> None:
        self.measured += 1

    def start(self) -> None:
        """Start housekeeping."""
        self.due.startService()
        self.rounds.startService()

    def stop(self) -> None:
        """Stop in order, without releasing the lease."""
        self.in_memory.test.successResultOf(self.due.stopService())
        self.in_memory.test.successResultOf(self.rounds.stopService())

    def count(self, operation: str) -> int:
        """Count calls of an operation."""
        return sum(name == operation for name, _ in self.calls)


class MultipleNodesTests(HousekeepingTestCase):
    """Several nodes on one store."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = self.in_memory.clock
        self.in_memory.didcomm.due.stopService()
        self.in_memory.didcomm.housekeeping.stopService()
        self.first, self.second = ClusterNode(self.in_memory, "first"), ClusterNode(self.in_memory, "second")

    def run_for(self, seconds: float) -> None:
        """Advance time in small steps."""
        self.clock.pump([0.5] * int(seconds * 2))

    def test_one_node_runs_shared_tasks(self) -> None:
        """One node expires messages and prunes nonces; each node records gauges."""
        self.first.start()
        self.run_for(7)
        self.second.start()
        self.run_for(1293)
        self.assertEqual((self.first.count("expire_messages"), self.second.count("expire_messages")), (86, 0))
        self.assertEqual((self.first.count("prune_nonces"), self.second.count("prune_nonces")), (2, 0))
        self.assertEqual((self.first.measured, self.second.measured), (21, 21))

    def test_takeover(self) -> None:
        """When the leader stops, another takes over after the lease, or at once if it is known to be gone."""
        for known, patience in ((False, LEADER_LEASE + 15), (True, 15)):
            self.first, self.second = (
                ClusterNode(self.in_memory, f"first {known}"),
                ClusterNode(self.in_memory, f"second {known}"),
            )
            self.first.start()
            self.second.start()
            self.run_for(60)
            self.first.stop()
            if known:
                self.in_memory.store.cluster.drop(self.first.boot)
            self.assertEqual(self.second.count("expire_messages"), 0)
            self.run_for(patience)
            self.assertGreater(self.second.count("expire_messages"), 0)
            self.second.stop()
            self.in_memory.store.cluster.drop(self.second.boot)

    def test_lease_lost_during_run(self) -> None:
        """A node that was suspended stops after the current chunk."""
        payloads = [Payload(f"{each}", b"{}", "json") for each in range(3 * BATCH_SIZE)]
        now = self.clock.seconds()
        for number in range(3):
            self.bob.enrol(f"did:example:{number}")
            part = payloads[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
            self.in_memory.store.enqueue(f"did:example:{number}", part, expires_at=now + 10)
        self.first.rounds.startService()
        self.clock.advance(15)
        self.assertEqual(self.first.count("expire_messages"), 1)
        self.in_memory.store.cluster.drop(self.first.boot)
        self.assertTrue(
            self.successResultOf(self.in_memory.store.cluster.acquire_lease("housekeeping", "second", LEADER_LEASE))
        )
        self.clock.advance(4)
        self.assertEqual(self.first.count("expire_messages"), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), BATCH_SIZE)

    def test_unavailable_store(self) -> None:
        """No node expires messages until the store is back."""
        self.first.start()
        with self.in_memory.failing("acquire_lease", StoreUnavailable()):
            self.run_for(60)
        self.assertEqual(self.first.count("expire_messages"), 0)
        self.run_for(15)
        self.assertEqual(self.first.count("expire_messages"), 1)

    def test_delayed_messages_of_dead_node(self) -> None:
        """The leader finds them within five seconds."""
        self.first.start()
        self.second.start()
        self.forward(delay_milli=30_000)  # accepted by a third node
        self.run_for(36)
        self.assertEqual((len(self.first.dispatched), len(self.second.dispatched)), (1, 0))
        (message,) = self.first.dispatched
        assert message.due_at is not None
        ((_, at),) = [
            call for call in self.first.calls if call[0] == "take_due_messages" and call[1] >= message.due_at
        ][:1]
        self.assertLessEqual(at - message.due_at, 5)

    def test_delayed_messages_are_dispatched_once(self) -> None:
        """The accepting node, or any other, dispatches a message once."""
        self.first.start()
        self.second.start()
        self.forward(delay_milli=32_000)
        self.second.due.schedule_wakeup(self.clock.seconds() + 32)
        self.run_for(60)
        self.assertEqual((len(self.first.dispatched), len(self.second.dispatched)), (0, 1))

    def test_stop_waits_for_lease_request(self) -> None:
        """Stopping waits also for a pending request of the lease."""
        held: Deferred[bool] = Deferred()
        cluster: Any = self.in_memory.store.cluster
        cluster.acquire_lease = lambda *args: held
        self.first.due.startService()
        self.clock.advance(5)
        stopped = self.first.due.stopService()
        self.assertNoResult(stopped)
        before = self.first.count("take_due_messages")
        held.callback(True)
        self.successResultOf(stopped)
        self.assertEqual(self.first.count("take_due_messages"), before)

    def test_pushes_of_messages_removed_by_other_node(self) -> None:
        """They are forgotten when they would become pending again, without an event."""
        self.first.start()
        socket = self.bob.go_live()
        self.forward()
        self.assertEqual(len(socket.frames), 1)
        waiting = self.in_memory.store.fetch_messages(self.bob.did, None, limit=10, max_bytes=100_000)
        (message,) = self.successResultOf(waiting)
        self.assertTrue(self.in_memory.didcomm.live.was_pushed(message.id))
        self.successResultOf(self.in_memory.store.acknowledge(self.bob.did, [message.id]))
        stored = self.in_memory.counter("mediator_messages_stored_total")
        self.run_for(self.in_memory.config.queue.delivered_timeout + 1)
        self.assertFalse(self.in_memory.didcomm.live.was_pushed(message.id))
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), stored)


class LeaderLeaseTests(SynchronousTestCase):
    """The leader lease as one node sees it."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.clock = self.in_memory.clock
        self.asked = 0
        cluster: Any = self
        self.first, self.second = (LeaderLease(self.clock, cluster, boot) for boot in ("first", "second"))

    def acquire_lease(self, *args: Any) -> Deferred[bool]:
        """Acquire the lease of the store, and count the calls."""
        self.asked += 1
        return self.in_memory.store.cluster.acquire_lease(*args)

    def is_held(self, leader_lease: LeaderLease) -> bool:
        return self.successResultOf(Deferred.fromCoroutine(leader_lease.is_leader()))

    def test_lease_request_is_throttled(self) -> None:
        """The store is asked at most every three seconds, whatever the answer."""
        for _ in range(60):
            self.assertTrue(self.is_held(self.first))
            self.assertFalse(self.is_held(self.second))
            self.clock.advance(0.5)
        self.assertEqual(self.asked, 20)

    def test_lease_lapses_without_store(self) -> None:
        """Without the store, a held lease ends at its deadline."""
        self.assertTrue(self.is_held(self.first))
        self.clock.advance(3)
        with self.in_memory.failing("acquire_lease", StoreUnavailable()):
            self.failureResultOf(Deferred.fromCoroutine(self.first.is_leader()), StoreUnavailable)

    def test_late_answer_is_ignored(self) -> None:
        """After a slow answer another node may be the leader."""
        held: Deferred[bool] = Deferred()
        cluster: Any = self.in_memory.store.cluster
        cluster.acquire_lease = lambda *args: held
        asking = Deferred.fromCoroutine(self.first.is_leader())
        self.clock.advance(LEADER_LEASE)
        held.callback(True)
        self.assertFalse(self.successResultOf(asking))

    def test_clock_step_renews_request(self) -> None:
        """After a clock step the store is asked again."""
        self.assertTrue(self.is_held(self.first))
        self.clock.rightNow -= 3600
        self.assertTrue(self.is_held(self.first))
        self.assertEqual(self.asked, 2)
