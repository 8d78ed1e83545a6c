"""The store is told of sockets: in batches, again when it was away, and always the truth in the end."""

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


class Ledger:
    """
    A store that notes what it is told, and does it now or when the test says so.

    :ivar away: fail instead.
    :ivar late: keep what is asked for in `open`.
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.calls: list[tuple[str, list[str]]] = []
        self.open: list[Deferred[None]] = []
        self.away = self.late = False

    def add_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        """Note who is there."""
        return self._do("announce", dids, self.there.update)

    def remove_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        """Note who is gone."""
        return self._do("withdraw", dids, self.there.difference_update)

    def _do(self, what: str, dids: Sequence[str], how: Any) -> Deferred[None]:
        self.calls.append((what, list(dids)))
        if self.away:
            return fail(StoreUnavailable())
        how(dids)
        if not self.late:
            return succeed(None)
        self.open.append(Deferred())
        return self.open[-1]


class PresencePublisherTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger()
        self.publisher = PresencePublisher(self.clock, cast(Any, self.ledger), "aaaa")
        self.publisher.joined()

    def unavailable(self, known: Deferred[None]) -> None:
        """It has to have failed."""
        self.failureResultOf(known, StoreUnavailable)

    def test_fires_when_others_can_know(self) -> None:
        """Not before the store has it."""
        self.ledger.late = True
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assertNoResult(known)
        self.ledger.open.pop().callback(None)
        self.successResultOf(known)
        self.assertEqual(self.ledger.there, {BOB})
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_one_more(self) -> None:
        """The second socket of a DID needs no word to the store."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.ledger.calls.clear()
        self.successResultOf(self.publisher.add(BOB))
        self.clock.advance(1)
        self.assertEqual(self.ledger.calls, [])

    def test_one_turn_one_call(self) -> None:
        """What comes in one turn goes together, in chunks."""
        known = [self.publisher.add(f"did:x:{number}") for number in range(PUBLISH_BATCH + 1)]
        self.clock.advance(0)
        self.assertEqual([len(dids) for _, dids in self.ledger.calls], [PUBLISH_BATCH, 1])
        for one in known:
            self.successResultOf(one)

    def test_gone(self) -> None:
        """The last socket of a DID takes it away."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.remove(BOB)
        self.clock.advance(0)
        self.assertEqual(self.ledger.there, set())

    def test_here_and_gone_at_once(self) -> None:
        """Nothing is said at all; who asked is not kept waiting."""
        known = self.publisher.add(BOB)
        self.publisher.remove(BOB)
        self.successResultOf(known)
        self.clock.advance(1)
        self.assertEqual(self.ledger.calls, [])

    def test_gone_while_it_is_said_to_be_here(self) -> None:
        """However slow the store is, the last word is the truth."""
        self.ledger.late = True
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
        self.assertEqual(self.ledger.there, {BOB})

    def test_store_away(self) -> None:
        """Who waits learns that others cannot know; they are told when the store is back."""
        self.ledger.away = True
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.unavailable(known)
        self.publisher.add(EVE).addErrback(lambda _: None)
        self.publisher.remove(EVE)
        self.clock.pump([PUBLISH_RETRY_DELAY] * 3)
        self.assertLess(len(self.ledger.calls), 8)
        self.ledger.away = False
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.there, {BOB})
        self.successResultOf(self.publisher.add(BOB))

    def test_perhaps(self) -> None:
        """What the store did although it said that it could not is taken back as well."""
        self.ledger.away = True
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.unavailable(known)
        self.ledger.there.add(BOB)
        self.ledger.away = False
        self.publisher.remove(BOB)
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.there, set())

    def test_withdrawal_that_failed(self) -> None:
        """It may have been done: who comes back is announced again."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.ledger.away = True
        self.publisher.remove(BOB)
        self.clock.advance(0)
        self.ledger.there.clear()
        self.ledger.away = False
        known = self.publisher.add(BOB)
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.successResultOf(known)
        self.assertEqual(self.ledger.there, {BOB})

    def test_slow_store(self) -> None:
        """Nobody waits longer than a request may take."""
        self.ledger.late = True
        known = self.publisher.add(BOB)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.unavailable(known)
        self.ledger.open.pop().callback(None)
        self.successResultOf(self.publisher.add(BOB))

    def test_slow_request(self) -> None:
        """Nor longer than is left of its time, while what it asked for is said in any case."""
        self.ledger.late = True
        with request_deadline(self.clock):
            self.clock.advance(REQUEST_TIME_LIMIT - 0.5)
            known = self.publisher.add(BOB)
        self.clock.advance(0.5)
        self.unavailable(known)
        self.ledger.open.pop().callback(None)
        self.successResultOf(self.publisher.add(BOB))

    def test_not_joined(self) -> None:
        """Nothing is said before this node is one of the cluster; who waits is not kept for long."""
        self.publisher.parted()
        late = self.publisher.add(EVE)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.unavailable(late)
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.assertEqual(self.ledger.calls, [])
        self.publisher.joined()
        self.clock.advance(0)
        self.successResultOf(known)
        self.assertEqual(self.ledger.there, {BOB, EVE})

    def test_parted(self) -> None:
        """With the lease others have forgotten: who comes then waits until they know again."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        known = self.publisher.add(BOB)
        self.assertNoResult(known)
        self.ledger.there.clear()
        self.publisher.joined()
        self.clock.advance(0)
        self.successResultOf(known)
        self.assertEqual(self.ledger.there, {BOB})

    def test_parted_while_it_is_said(self) -> None:
        """The answer is of no use then."""
        self.ledger.late = True
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.ledger.open.pop().callback(None)
        self.assertNoResult(known)
        self.clock.advance(REQUEST_TIME_LIMIT)
        self.unavailable(known)

    def test_joined_again(self) -> None:
        """Everything is said once more, since it was all forgotten with the lease."""
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.publisher.remove(BOB)
        self.publisher.add(EVE)
        self.publisher.joined()
        self.ledger.there.clear()
        self.clock.advance(0)
        self.assertEqual(self.ledger.there, {EVE})

    def test_answer_from_before(self) -> None:
        """An answer that comes after the lease was lost says nothing of what the store knows now."""
        self.ledger.late = True
        self.publisher.add(BOB)
        self.clock.advance(0)
        self.publisher.parted()
        self.ledger.there.clear()
        self.publisher.joined()
        self.ledger.open.pop().callback(None)
        self.clock.advance(0)
        self.assertEqual(self.ledger.there, {BOB})

    def test_fault(self) -> None:
        """A mistake of ours is logged, and it is tried again."""
        announce = self.ledger.add_presence
        self.ledger.add_presence = lambda boot, dids: fail(RuntimeError("boom"))  # type: ignore[method-assign]
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.unavailable(known)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.ledger.add_presence = announce  # type: ignore[method-assign]
        self.clock.advance(PUBLISH_RETRY_DELAY)
        self.assertEqual(self.ledger.there, {BOB})

    def test_stop(self) -> None:
        """Nothing more is said, which is sure once what is under way is over."""
        self.ledger.late = True
        self.publisher.add(BOB).addErrback(lambda _: None)
        self.clock.advance(0)
        waiting = self.publisher.add(EVE)
        stopped = self.publisher.stop()
        self.unavailable(waiting)
        self.assertNoResult(stopped)
        self.ledger.open.pop().callback(None)
        self.successResultOf(stopped)
        self.publisher.remove(BOB)
        self.unavailable(self.publisher.add("did:x:late"))
        self.clock.advance(60)
        self.assertEqual(len(self.ledger.calls), 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
