"""Publication of presence: batches, retries after outages, and eventual consistency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.presence import PUBLISH_BATCH, PUBLISH_RETRY_DELAY, PresencePublisher
from mediatord.errors import StoreUnavailable
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT, request_deadline

BOB, EVE = "did:x:bob", "did:x:eve"


class FakePresenceStore:
    """
    Records presence writes, at once or when the test says so.

    :ivar away: fail instead.

    :ivar late: keep operations in `open`.
    """

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.calls: list[tuple[str, list[str]]] = []
        self.open: list[Deferred[None]] = []
        self.is_down = self.is_held = False

    def add_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        """Record presence."""
        return self._apply("announce", dids, self.present.update)

    def remove_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        """Record its removal."""
        return self._apply("withdraw", dids, self.present.difference_update)

    def _apply(self, what: str, dids: Sequence[str], how: Any) -> Deferred[None]:
        self.calls.append((what, list(dids)))
        if self.is_down:
            return fail(StoreUnavailable())
        how(dids)
        if not self.is_held:
            return succeed(None)
        self.open.append(Deferred())
        return self.open[-1]


class PresencePublisherTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = FakePresenceStore()
        self.publisher = PresencePublisher(self.clock, cast(Any, self.ledger), "aaaa")
        self.publisher.joined()

    def assert_unavailable(self, published: Deferred[None]) -> None:
        """It has failed."""
        self.failureResultOf(published, StoreUnavailable)

    def test_fires_when_written(self) -> None:
        """Adding a DID fires when the store has it."""
        self.ledger.is_held = True
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assertNoResult(published)
        self.ledger.open.pop().callback(None)
        self.successResultOf(published)
        self.assertEqual(self.ledger.present, {BOB})
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_second_socket_needs_no_write(self) -> None:
        """The second socket of a DID needs no write."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.ledger.calls.clear()
        self.successResultOf(self.publisher.add(BOB))
        self.clock.advance(1)
        self.assertEqual(self.ledger.calls, [])

    def test_one_write_per_iteration(self) -> None:
        """DIDs of one reactor iteration are written together, in chunks."""
        published = [self.publisher.add(f"did:x:{number}") for number in range(PUBLISH_BATCH + 1)]
        self.clock.advance(0)
        self.assertEqual([len(dids) for _, dids in self.ledger.calls], [PUBLISH_BATCH, 1])
        for one in published:
            self.successResultOf(one)

    def test_last_socket_removes_presence(self) -> None:
        """The last socket of a DID removes its presence."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.remove(BOB)
        self.clock.advance(0)
        self.assertEqual(self.ledger.present, set())

    def test_added_and_removed_at_once(self) -> None:
        """Nothing is written, and the Deferred fires."""
        published = self.publisher.add(BOB)
        self.publisher.remove(BOB)
        self.successResultOf(published)
        self.clock.advance(1)
        self.assertEqual(self.ledger.calls, [])

    def test_removed_during_write(self) -> None:
        """However slow the store is, the last state wins."""
        self.ledger.is_held = True
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.remove(BOB)
        self.clock.advance(1)
        self.assertEqual(len(self.ledger.calls), 1)
        self.ledger.open.pop().callback(None)
        self.assertEqual(self.ledger.calls[-1], ("withdraw", [BOB]))
        back = self.publisher.add(BOB)
        self.ledger.open.pop().callback(None)
        self.assertNoResult(back)
        self.ledger.open.pop().callback(None)
        self.successResultOf(back)
        self.assertEqual(self.ledger.present, {BOB})

    def test_store_outage(self) -> None:
        """The Deferred fails; the presence is written when the store is back."""
        self.ledger.is_down = True
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assert_unavailable(published)
        self.publisher.add(EVE).addErrback(lambda _: None)
        self.publisher.remove(EVE)
        self.clock.pump([PUBLISH_RETRY_DELAY] * 3)
        self.assertLess(len(self.ledger.calls), 8)
        self.ledger.is_down = False
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.present, {BOB})
        self.successResultOf(self.publisher.add(BOB))

    def test_uncertain_write_is_removed(self) -> None:
        """A write that was applied although it failed is removed too."""
        self.ledger.is_down = True
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assert_unavailable(published)
        self.ledger.present.add(BOB)
        self.ledger.is_down = False
        self.publisher.remove(BOB)
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.present, set())

    def test_uncertain_removal_is_repeated(self) -> None:
        """A removal that failed may have been applied: a new socket is announced again."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.ledger.is_down = True
        self.publisher.remove(BOB)
        self.clock.advance(0)
        self.ledger.present.clear()
        self.ledger.is_down = False
        published = self.publisher.add(BOB)
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.successResultOf(published)
        self.assertEqual(self.ledger.present, {BOB})

    def test_slow_store(self) -> None:
        """No Deferred waits longer than a request may take."""
        self.ledger.is_held = True
        published = self.publisher.add(BOB)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.assert_unavailable(published)
        self.ledger.open.pop().callback(None)
        self.successResultOf(self.publisher.add(BOB))

    def test_request_deadline(self) -> None:
        """Nor longer than the request's deadline; the write goes on."""
        self.ledger.is_held = True
        with request_deadline(self.clock):
            self.clock.advance(REQUEST_TIME_LIMIT - 0.5)
            published = self.publisher.add(BOB)
        self.clock.advance(0.5)
        self.assert_unavailable(published)
        self.ledger.open.pop().callback(None)
        self.successResultOf(self.publisher.add(BOB))

    def test_before_joining(self) -> None:
        """Nothing is written before the node has joined; Deferreds do not wait long."""
        self.publisher.parted()
        is_held = self.publisher.add(EVE)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.assert_unavailable(is_held)
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assertEqual(self.ledger.calls, [])
        self.publisher.joined()
        self.clock.advance(0)
        self.successResultOf(published)
        self.assertEqual(self.ledger.present, {BOB, EVE})

    def test_parted(self) -> None:
        """After the lease has ended new sockets wait until the node has joined again."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        published = self.publisher.add(BOB)
        self.assertNoResult(published)
        self.ledger.present.clear()
        self.publisher.joined()
        self.clock.advance(0)
        self.successResultOf(published)
        self.assertEqual(self.ledger.present, {BOB})

    def test_parted_during_write(self) -> None:
        """The result of that write does not count."""
        self.ledger.is_held = True
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.ledger.open.pop().callback(None)
        self.assertNoResult(published)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.assert_unavailable(published)

    def test_rejoined(self) -> None:
        """All presence is written again, since it was dropped with the lease."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.publisher.remove(BOB)
        self.publisher.add(EVE)
        self.publisher.joined()
        self.ledger.present.clear()
        self.clock.advance(0)
        self.assertEqual(self.ledger.present, {EVE})

    def test_late_result_after_parting(self) -> None:
        """A result from before the lease ended says nothing about the current state."""
        self.ledger.is_held = True
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.ledger.present.clear()
        self.publisher.joined()
        self.ledger.open.pop().callback(None)
        self.clock.advance(0)
        self.assertEqual(self.ledger.present, {BOB})

    def test_programming_error(self) -> None:
        """A programming error is logged, and the write is retried."""
        announce = self.ledger.add_presence
        self.ledger.add_presence = lambda boot, dids: fail(RuntimeError("boom"))  # type: ignore[method-assign]
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assert_unavailable(published)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.ledger.add_presence = announce  # type: ignore[method-assign]
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.present, {BOB})

    def test_stop(self) -> None:
        """Nothing more is written once pending writes have ended."""
        self.ledger.is_held = True
        self.publisher.add(BOB).addErrback(lambda _: None)
        self.clock.advance(0)
        waiting = self.publisher.add(EVE)
        stopped = self.publisher.stop()
        self.assert_unavailable(waiting)
        self.assertNoResult(stopped)
        self.ledger.open.pop().callback(None)
        self.successResultOf(stopped)
        self.publisher.remove(BOB)
        self.assert_unavailable(self.publisher.add("did:x:late"))
        self.clock.advance(60)
        self.assertEqual(len(self.ledger.calls), 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
