"""What happens by itself: rounds that survive everything, and delayed messages that come due (reference 4.5, 12)."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.housekeeping import CHUNK
from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Payload
from tests.house import FakeSocket, Guest, House, sealed_forward


class HousekeepingTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.house = House(self, queue={"ttl": "60s"}, limits={"ip_per_minute": 10_000})
        self.bob = Guest(self.house).enrol()

    def forward(self, **headers: Any) -> None:
        """A stranger sends Bob something."""
        raw = sealed_forward(self.house, self.bob.did, self.bob.letter(), **headers)
        self.assertEqual(self.house.receive(raw).status, 202)

    def calls_of(self, operation: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of an operation of the store from now on."""
        store: Any = self.house.store
        real, calls = getattr(store, operation), []

        def noted(*args: Any) -> Deferred[Any]:
            calls.append(args)
            result: Deferred[Any] = real(*args)
            return result

        setattr(store, operation, noted)
        return calls


class RoundsTests(HousekeepingTestCase):
    def test_a_round_that_fails_is_not_the_last(self) -> None:
        """A fault of ours is logged, a store that is away is no fault; the next round does the work."""
        for error, logged in ((RuntimeError("boom"), 1), (StoreUnavailable(), 0)):
            self.forward()
            with self.house.failing("expire", error):
                self.house.clock.pump([15] * 5)
            self.assertGreaterEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
            before = self.house.counter("mediator_messages_expired_total")
            self.house.clock.advance(15)
            self.assertEqual(self.house.counter("mediator_messages_expired_total"), before + 1)

    def test_the_other_rounds(self) -> None:
        """Nonces are pruned every ten minutes and the gauge is told every minute, also after failures."""
        for operation, interval in (("prune", 600), ("queue_sizes", 60)):
            with self.house.failing(operation, RuntimeError("boom")):
                self.house.clock.advance(interval)
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
            calls = self.calls_of(operation)
            self.house.clock.advance(interval)
            self.assertEqual(len(calls), 1)

    def test_expiry_in_chunks(self) -> None:
        """A mass of old messages goes in steps with breaths between them, each message with its event (AF-5)."""
        count = 0
        for number in range(3):
            did = f"did:example:{number}"
            self.bob.enrol(did)
            payloads = [Payload(f"{number}-{each}", b"{}", "json") for each in range(CHUNK - 100)]
            now = self.house.clock.seconds()
            self.successResultOf(self.house.store.deposit(did, payloads, expires_at=now + 10))
            count += len(payloads)
        calls = self.calls_of("expire")
        self.house.clock.advance(15)
        self.assertEqual(len(calls), 1)
        self.assertEqual(self.house.counter("mediator_messages_expired_total"), CHUNK)
        self.house.clock.advance(0.01)
        self.assertEqual(len(calls), 2)
        self.house.clock.advance(0.01)
        self.assertEqual([limit for (limit,) in calls], [CHUNK] * 3)
        self.assertEqual(self.house.counter("mediator_messages_expired_total"), count)
        events = self.house.events("msg.expire")
        self.assertEqual((len(events), {event["reason"] for event in events}), (count, {"ttl"}))

    def test_gauge(self) -> None:
        """Once a minute: how much waits, how many sockets, how much memory and how many files (analytics 2.2)."""
        self.forward()
        self.forward()
        self.house.socket()
        self.house.clock.advance(59)
        self.assertEqual(self.house.events("gauge"), [])
        self.house.clock.advance(1)
        (event,) = self.house.events("gauge")
        self.assertEqual((event["depth"], event["conns"]), (2, 1))
        self.assertGreater(event["rss"], 1_000_000)

    def test_stopping_waits_for_a_round(self) -> None:
        """A round that is under way ends before the store is closed; no other one begins."""
        store: Any = self.house.store
        held: Deferred[list[Any]] = Deferred()
        store.expire = lambda limit: held
        self.house.clock.advance(15)
        stopped = self.house.half.housekeeping.stopService()
        self.assertNoResult(stopped)
        held.callback([])
        self.successResultOf(stopped)
        calls = self.calls_of("prune")
        self.house.clock.advance(3600)
        self.assertEqual(calls, [])

    def test_stopping_in_the_middle_of_a_mass_expiry(self) -> None:
        """It ends at the next breath; what is left expires after the next start."""
        payloads = [Payload(f"{each}", b"{}", "json") for each in range(CHUNK + 1)]
        now = self.house.clock.seconds()
        self.successResultOf(self.house.store.deposit(self.bob.did, payloads, expires_at=now + 10))
        self.house.clock.advance(15)
        stopped = self.house.half.housekeeping.stopService()
        self.house.clock.advance(0.01)
        self.successResultOf(stopped)
        self.assertEqual(self.house.counter("mediator_messages_expired_total"), CHUNK)
        self.house.half.housekeeping.startService()
        self.house.clock.advance(15)
        self.assertEqual(self.house.counter("mediator_messages_expired_total"), CHUNK + 1)


class DueTimesTests(HousekeepingTestCase):
    def live(self) -> FakeSocket:
        """A socket of Bob's with nothing on it yet."""
        socket = self.bob.go_live()
        socket.frames.clear()
        return socket

    def test_after_a_restart(self) -> None:
        """What came due while nothing ran is handed over at once, the rest when it is due (reference 4.5)."""
        socket = self.live()
        for seconds in (10, 30):
            self.forward(delay_milli=seconds * 1000)
        self.house.half.due.stopService()
        self.house.clock.advance(20)
        self.assertEqual(len(socket.frames), 0)
        self.house.half.due.startService()
        self.house.clock.advance(0)
        self.assertEqual(len(socket.frames), 1)
        self.house.clock.advance(9)
        self.assertEqual(len(socket.frames), 1)
        self.house.clock.advance(2)
        self.assertEqual(len(socket.frames), 2)

    def test_one_timer_for_any_number(self) -> None:
        """However many wait."""
        self.house.clock.advance(0)
        before = len(self.house.clock.getDelayedCalls())
        for seconds in (30, 10, 20):
            self.forward(delay_milli=seconds * 1000)
        self.house.clock.advance(0)
        self.assertEqual(len(self.house.clock.getDelayedCalls()), before + 1)

    def test_a_store_that_fails(self) -> None:
        """Due messages are handed over a second after it is back, whichever operation failed, and how."""
        for operation in ("take_due", "next_due"):
            for error in (StoreUnavailable(), RuntimeError("boom")):
                socket = self.live()
                self.forward(delay_milli=1000)
                self.forward(delay_milli=5000)
                with self.house.failing(operation, error):
                    self.house.clock.pump([0.5] * 14)
                self.house.clock.advance(1)
                self.assertEqual(len(socket.frames), 2, (operation, error))
                self.house.base.connections.closed(socket)
                self.flushLoggedErrors(RuntimeError)

    def test_a_store_that_is_away_at_the_start(self) -> None:
        """The first due time is asked for until it is known."""
        socket = self.live()
        self.forward(delay_milli=3000)
        self.house.half.due.stopService()
        with self.house.failing("next_due", StoreUnavailable()):
            self.house.half.due.startService()
            self.house.clock.advance(1)
        self.house.clock.pump([1] * 3)
        self.assertEqual(len(socket.frames), 1)

    def test_more_than_a_chunk(self) -> None:
        """All that is due is handed over."""
        now = self.house.clock.seconds()
        payloads = [Payload(f"{each}", b"{}", "json") for each in range(CHUNK + 10)]
        self.successResultOf(self.house.store.deposit(self.bob.did, payloads, expires_at=now + 50, due_at=now + 5))
        socket = self.live()
        self.house.half.due.wait_for(now + 5)
        self.house.clock.advance(5)
        self.assertEqual(len(socket.frames), CHUNK + 10)

    def test_stopping_waits_for_a_delivery(self) -> None:
        """A hand-over that is under way ends before the store is closed."""
        store: Any = self.house.store
        held: Deferred[list[Any]] = Deferred()
        self.forward(delay_milli=1000)
        store.take_due = lambda limit: held
        self.house.clock.advance(1)
        stopped = self.house.half.due.stopService()
        assert stopped is not None
        self.assertNoResult(stopped)
        held.callback([])
        self.successResultOf(stopped)
