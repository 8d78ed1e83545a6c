"""Hints on their way to other nodes: batches, retries, limits, and nodes that are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import peers
from mediatord.cluster.calling import AT_ONCE, CallFailed, NotThere, Replaced, Turned
from mediatord.cluster.hint import MAX_BODY, Hint, Names, read_hints, write_pushed
from mediatord.cluster.peers import BATCH, BATCH_BYTES, GONE, MAX_WAITING, MAX_WAITING_BYTES, PAUSES, Outcome, Peers
from mediatord.interfaces import Node

BEA = Node("bea", "bbbb", "tcp:host=10.0.0.2:port=7070", b"seal")
CAL = Node("cal", "cccc", "tcp:host=10.0.0.3:port=7070", b"seal")


class Counts:
    """What is counted."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.took: list[float] = []

    def cluster_push(self, outcome: Outcome) -> None:
        """A hint came to this end."""
        self.outcomes[outcome] += 1

    def hint_took(self, seconds: float) -> None:
        """It was answered."""
        self.took.append(seconds)


def all_of(names: Names) -> Names:
    """Push everything."""
    return names


class PeersTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.counts = Counts()
        self.asked: list[tuple[Node, bytes, Deferred[bytes]]] = []
        self.peers = Peers(self.clock, self.ask, self.counts)

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        """Note a request and wait for the test to answer it."""
        answer: Deferred[bytes] = Deferred()
        self.asked.append((node, body, answer))
        return await answer

    def put(self, name: str = "m", *, node: Node = BEA, lane: str = "", weight: int = 0) -> Deferred[bool | None]:
        """One hint, in a lane of its own unless another one is named."""
        return self.peers.put(node, Hint("messages", name, lane or name, weight))

    def many(self, count: int, prefix: str = "m") -> list[Deferred[bool | None]]:
        """So many."""
        return [self.put(f"{prefix}{number}") for number in range(count)]

    def requests(self) -> list[list[str]]:
        """What is asked for now, request by request."""
        self.clock.advance(0)
        return [read_hints(body)["messages"] for _, body, _ in self.asked]

    def answer(self, push: Callable[[Names], Names] = all_of) -> None:
        """Answer the oldest request."""
        self.clock.advance(0)
        _, body, answer = self.asked.pop(0)
        answer.callback(write_pushed(push(read_hints(body))))

    def fail_with(self, error: type[Exception]) -> None:
        """Let the oldest request come to nothing."""
        self.clock.advance(0)
        self.asked.pop(0)[2].errback(error())


class SendingTests(PeersTestCase):
    def test_one_turn_one_request(self) -> None:
        """What comes in one turn of the reactor goes together; each learns what became of it."""
        first, second = self.many(2)
        self.assertEqual(self.requests(), [["m0", "m1"]])
        self.clock.advance(0.5)
        self.answer(lambda names: {"messages": ["m1"]})
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (False, True))
        self.assertEqual(self.counts.outcomes, {"pushed": 1, "no_session": 1})
        self.assertEqual(self.counts.took, [0.5, 0.5])

    def test_two_at_a_time(self) -> None:
        """Two requests are under way at most, each of a hundred hints; the rest waits for its turn."""
        hints = self.many(3 * BATCH + 1)
        self.assertEqual([len(names) for names in self.requests()], [BATCH] * AT_ONCE)
        self.answer()
        self.assertEqual([len(names) for names in self.requests()], [BATCH] * AT_ONCE)
        self.answer()
        self.answer()
        self.assertEqual(self.requests(), [[f"m{3 * BATCH}"]])
        self.answer()
        self.assertTrue(all(self.successResultOf(hint) for hint in hints))

    def test_long_names(self) -> None:
        """A request is never longer than what the other side reads."""
        names = [f"{number:02d}" * 2000 for number in range(50)]
        for name in names:
            self.put(name)
        sent: list[str] = []
        while self.requests():
            self.assertLessEqual(len(self.asked[0][1]), MAX_BODY)
            sent += read_hints(self.asked[0][1])["messages"]
            self.answer()
        self.assertEqual(sent, names)

    def test_heavy_messages(self) -> None:
        """The other node is not made to read more than a few megabytes at once."""
        for number in range(4):
            self.put(f"m{number}", weight=BATCH_BYTES // 2)
        self.assertEqual(self.requests(), [["m0", "m1"], ["m2", "m3"]])

    def test_in_order(self) -> None:
        """While a hint of a DID is under way its next one waits; those of others pass it."""
        self.put("m0", lane="bob")
        self.requests()
        for name, lane in (("m1", "bob"), ("m2", "eve"), ("m3", "bob")):
            self.put(name, lane=lane)
        self.assertEqual(self.requests(), [["m0"], ["m2"]])
        self.fail_with(CallFailed)
        self.answer()
        self.assertEqual(self.requests(), [])
        self.clock.advance(PAUSES[0])
        self.answer()
        self.assertEqual(self.requests(), [["m1", "m3"]])

    def test_other_nodes_do_not_wait(self) -> None:
        """A node that is slow is in the way of its own hints only."""
        self.many(3 * BATCH)
        self.put("x", node=CAL)
        self.clock.advance(0)
        self.assertEqual([node for node, _, _ in self.asked].count(CAL), 1)


class LimitTests(PeersTestCase):
    def test_full(self) -> None:
        """What is too much is dropped at once, and counted; there is room again when something was answered."""
        hints = self.many(MAX_WAITING)
        self.assertIsNone(self.successResultOf(self.put("late")))
        self.assertEqual(self.counts.outcomes, {"dropped": 1})
        self.requests()  # two batches have left the queue
        self.assertNoResult(self.put("fits"))
        self.assertNoResult(hints[0])

    def test_bytes(self) -> None:
        """The messages themselves are in memory meanwhile; but one always fits."""
        self.assertNoResult(self.put("huge", weight=2 * MAX_WAITING_BYTES))
        self.assertIsNone(self.successResultOf(self.put("more", weight=1)))
        self.requests()
        self.assertNoResult(self.put("again", weight=1))

    def test_bytes_that_have_gone(self) -> None:
        """However much has been sent, only what waits is counted."""
        self.put("huge", weight=2 * MAX_WAITING_BYTES)
        self.requests()
        self.assertNoResult(self.put("again", weight=1))
        self.assertNoResult(self.put("and again", weight=1))


class FailureTests(PeersTestCase):
    def test_three_attempts(self) -> None:
        """With pauses between them; then the hint is given up."""
        hint = self.put()
        for pause in PAUSES:
            self.fail_with(CallFailed)
            self.assertEqual(self.requests(), [])
            self.clock.advance(pause)
            self.assertEqual(self.requests(), [["m"]])
        self.assertNoResult(hint)
        self.fail_with(CallFailed)
        self.assertIsNone(self.successResultOf(hint))
        self.assertEqual((self.counts.outcomes, self.counts.took), ({"failed": 1}, []))
        self.clock.advance(60)
        self.assertEqual(self.asked, [])

    def test_answer_at_last(self) -> None:
        """An attempt that succeeds is enough, also after an answer that is none."""
        hint = self.put()
        self.clock.advance(0)
        self.asked.pop(0)[2].callback(b"<html>")
        self.clock.advance(PAUSES[0])
        self.answer()
        self.assertIs(self.successResultOf(hint), True)

    def test_another_secret(self) -> None:
        """There is no use in trying again; it is said once a minute."""
        for _ in range(3):
            hint = self.put()
            self.fail_with(Turned)
            self.assertIsNone(self.successResultOf(hint))
        self.assertEqual(self.counts.outcomes, {"failed": 3})

    def test_nobody_listens(self) -> None:
        """That may change: it is tried again, for this hint and for the next."""
        hint = self.put()
        for pause in (*PAUSES, 0):
            self.fail_with(NotThere)
            self.clock.advance(pause)
        self.assertIsNone(self.successResultOf(hint))
        hint = self.put()
        self.answer()
        self.assertIs(self.successResultOf(hint), True)

    def test_gone(self) -> None:
        """Another node is there: hints fail at once, those that wait and those that come."""
        hints = self.many(3 * BATCH)
        self.replace()
        self.assertTrue(all(self.successResultOf(hint) is None for hint in hints))
        self.assertEqual(self.counts.outcomes, {"failed": 3 * BATCH})
        self.assertEqual(len(self.peers), 0)
        self.asked.clear()
        self.assertIsNone(self.successResultOf(self.put("late")))
        self.assertEqual(self.requests(), [])
        self.assertNoResult(self.put("other", node=CAL))

    def test_gone_is_forgotten_with_the_node(self) -> None:
        """Boots do not come back, and are not remembered for longer than the store lists them."""
        self.put()
        self.replace()
        self.peers.keep({BEA.boot})
        self.assertIsNone(self.successResultOf(self.put()))
        self.peers.keep(set())
        self.assertNoResult(self.put())

    def test_gone_for_a_while(self) -> None:
        """A node that is live by its lease is asked again later: its address may have led elsewhere for a moment."""
        self.put()
        self.replace()
        self.clock.advance(GONE - 0.5)
        self.peers.keep({BEA.boot})
        self.assertIsNone(self.successResultOf(self.put()))
        self.clock.advance(0.5)
        hint = self.put()
        self.answer()
        self.assertIs(self.successResultOf(hint), True)

    def test_gone_before_the_clock_was_set_back(self) -> None:
        """For no longer than that."""
        for is_live in (lambda: None, lambda: self.peers.keep({BEA.boot})):
            self.put()
            self.replace()
            self.clock.rightNow -= 7200
            is_live()
            hint = self.put()
            self.answer()
            self.assertIs(self.successResultOf(hint), True)

    def replace(self) -> None:
        """Let the oldest request be answered by another boot."""
        self.clock.advance(0)
        self.asked.pop(0)[2].errback(Replaced("dddd"))

    def test_not_live_any_more(self) -> None:
        """What waits for a node that the store does not list is given up; one miss may be because it is so new."""
        hint = self.put()
        self.peers.keep(set())
        self.assertNoResult(hint)
        self.peers.keep({BEA.boot})
        self.peers.keep(set())
        self.assertNoResult(hint)
        self.peers.keep(set())
        self.assertIsNone(self.successResultOf(hint))
        self.assertEqual(len(self.peers), 0)

    def test_end(self) -> None:
        """Everything is given up, wherever it is: before it is sent, under way, in a pause; and no timer is left."""
        waiting = self.put("w", node=CAL)
        paused = self.put("p")
        self.fail_with(CallFailed)
        self.fail_with(CallFailed)
        under_way = self.many(3)
        self.peers.end()
        for hint in (waiting, paused, *under_way):
            self.assertIsNone(self.successResultOf(hint))
        self.assertIsNone(self.successResultOf(self.put("late")))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end_while_asking(self) -> None:
        """A request that fails because it is given up is not tried again."""
        hint = self.put()
        self.requests()
        answer = self.asked[0][2]
        answer._canceller = lambda cancelled: cancelled.errback(CallFailed())
        self.peers.end()
        self.assertIsNone(self.successResultOf(hint))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_fault(self) -> None:
        """A mistake of ours costs the batch and is logged."""

        async def broken(node: Node, path: str, body: bytes) -> bytes:
            raise RuntimeError("boom")

        self.peers = Peers(self.clock, broken, self.counts)
        hint = self.put()
        self.clock.advance(0)
        self.assertIsNone(self.successResultOf(hint))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.patch(peers, "write_hints", lambda hints: b"")
        self.assertEqual(self.clock.getDelayedCalls(), [])
