"""Finding other nodes, taking what they hint at, and what is done every few seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import rounds
from mediatord.cluster.elsewhere import AT_ONCE, CHUNK, Elsewhere, Whereabouts
from mediatord.cluster.hint import Hint
from mediatord.cluster.inbox import Half
from mediatord.cluster.rounds import LATE, WINDOW, YOUNG, CatchUp, Rounds, Sweep
from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Arrival, Node, Presence, StoredMessage, Window
from mediatord.interfaces.decentrl import PendingEvent
from tests.house import NOW

BOB = "did:x:bob"
ANN, BEA, CAL = (Node(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea", "cal"))


def message(id_: str, *, age: float = 10.0) -> StoredMessage:
    """One that waits for Bob, of so many seconds ago."""
    return StoredMessage(id_, BOB, BOB, b"{}", "json", NOW - age, NOW + 1000)


class Store:
    """What is asked of a store for sockets, answered by the test."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], Deferred[list[Presence]]]] = []

    def whereabouts(self, dids: Sequence[str]) -> Deferred[list[Presence]]:
        """Noted."""
        self.asked.append((list(dids), Deferred()))
        return self.asked[-1][1]


class WhereaboutsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.store = Store()
        self.finder = Whereabouts(self.clock, cast(Any, self.store))

    def test_one_turn_one_question(self) -> None:
        """And each is told of its own."""
        found = {did: self.finder.of(did) for did in ("did:x:a", "did:x:b")}
        again = self.finder.of("did:x:a")
        self.clock.advance(0)
        ((dids, answer),) = self.store.asked
        self.assertEqual(dids, ["did:x:a", "did:x:b"])
        here = Presence("did:x:a", ANN.boot, ANN)
        answer.callback([here])
        self.assertEqual(self.successResultOf(found["did:x:a"]), [here])
        self.assertEqual(self.successResultOf(again), [here])
        self.assertEqual(self.successResultOf(found["did:x:b"]), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_no_more_than_some_at_once(self) -> None:
        """Questions are short and few; what comes meanwhile is asked together as soon as one is answered."""
        found = [self.finder.of(f"did:x:{number}") for number in range(AT_ONCE * CHUNK + 3)]
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.asked], [CHUNK] * AT_ONCE)
        self.store.asked[0][1].callback([])
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.asked], [CHUNK] * AT_ONCE + [3])
        for _, answer in self.store.asked[1:]:
            answer.callback([])
        for one in found:
            self.assertEqual(self.successResultOf(one), [])

    def test_in_order(self) -> None:
        """The next question about a DID waits for the answer to the one before; those about others do not."""
        first = self.finder.of("did:x:a")
        self.clock.advance(0)
        second, other = self.finder.of("did:x:a"), self.finder.of("did:x:b")
        self.clock.advance(0)
        self.assertEqual([dids for dids, _ in self.store.asked], [["did:x:a"], ["did:x:b"]])
        self.store.asked[1][1].callback([])
        self.assertEqual(self.successResultOf(other), [])
        self.store.asked[0][1].callback([])
        self.assertEqual(self.successResultOf(first), [])
        self.assertNoResult(second)
        self.clock.advance(0)
        self.store.asked[2][1].callback([])
        self.assertEqual(self.successResultOf(second), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_away(self) -> None:
        """Whoever asked is told; the next question is asked all the same."""
        found = [self.finder.of("did:x:a"), self.finder.of("did:x:b")]
        self.clock.advance(0)
        self.store.asked.pop()[1].errback(StoreUnavailable())
        for one in found:
            self.failureResultOf(one, StoreUnavailable)
        again = self.finder.of("did:x:a")
        self.clock.advance(0)
        self.store.asked.pop()[1].callback([])
        self.assertEqual(self.successResultOf(again), [])


class ElsewhereTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.places: Deferred[list[Presence]] = succeed([])
        self.hints: list[tuple[str, Hint]] = []
        self.taken: dict[str, bool] = {}
        self.stale = 0
        self.elsewhere = Elsewhere(ANN.boot, self, self, self)  # type: ignore[arg-type]  # all that is used of them

    def of(self, did: str) -> Deferred[list[Presence]]:
        """What the test says."""
        return self.places

    def put(self, node: Node, hint: Hint) -> Deferred[bool]:
        """Noted."""
        self.hints.append((node.name, hint))
        return succeed(self.taken.get(node.name, False))

    def stale_presence(self) -> None:
        """Counted."""
        self.stale += 1

    def at(self, *nodes: Node) -> None:
        """Bob has sockets at these."""
        self.places = succeed([Presence(BOB, node.boot, node) for node in nodes])

    def test_every_other_node(self) -> None:
        """Not this one; taken when one of them took it."""
        self.at(ANN, BEA, CAL)
        self.taken = {"cal": True}
        self.assertIs(self.successResultOf(self.elsewhere.message(message("m"))), True)
        hint = Hint("messages", "m", BOB, 2)
        self.assertEqual(self.hints, [("bea", hint), ("cal", hint)])
        self.assertEqual([one.weight for _, one in self.hints], [2, 2])

    def test_kinds(self) -> None:
        """A message, an event and a change of contracts."""
        self.at(BEA)
        self.elsewhere.event(PendingEvent("e", BOB, "did:x:ann", "sealed", NOW))
        self.elsewhere.contracts(BOB)
        self.assertEqual([hint for _, hint in self.hints], [Hint("events", "e"), Hint("contracts", BOB)])

    def test_nowhere(self) -> None:
        """Nobody is told."""
        self.assertIs(self.successResultOf(self.elsewhere.message(message("m"))), False)

    def test_stale(self) -> None:
        """A node whose lease is over is counted, and not asked."""
        self.places = succeed([Presence(BOB, BEA.boot, None)])
        self.assertIs(self.successResultOf(self.elsewhere.message(message("m"))), False)
        self.assertEqual((self.stale, self.hints), (1, []))

    def test_store_away(self) -> None:
        """The message just waits; nothing is logged but what the store says itself."""
        self.places = fail(StoreUnavailable())
        self.assertIs(self.successResultOf(self.elsewhere.message(message("m"))), False)

    def test_fault(self) -> None:
        """A mistake of ours is logged."""
        self.places = fail(RuntimeError("boom"))
        self.assertIs(self.successResultOf(self.elsewhere.message(message("m"))), False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class Shelf:
    """A protocol half whose messages the test puts there."""

    def __init__(self, *messages: StoredMessage) -> None:
        self.messages = {one.id: one for one in messages}
        self.dids = [BOB]
        self.most = 500
        self.pushed: list[str] = []
        self.unwanted: set[str] = set()
        self.late: list[float] = []
        self.stuck: set[str] = set()
        self.found: list[list[str]] = []
        self.questions: list[tuple[list[str], Window]] = []
        self.half: Half[StoredMessage] = Half(
            live=lambda: self.dids,
            find=self.find,
            arrived=self.arrived,
            push=self.push,
            is_missed=lambda one: one.id not in [*self.pushed, *self.unwanted],
            push_late=self.push_late,
            was_pushed=self.pushed.__contains__,
        )

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        """By id, no more than fit."""
        self.found.append(list(ids))
        return succeed([self.messages[one] for one in ids if one in self.messages][: self.most])

    def arrived(self, dids: Sequence[str], window: Window, limit: int) -> Deferred[list[Arrival]]:
        """By time, and then by id."""
        self.questions.append((list(dids), window))
        messages = self.messages.values()
        in_time = [(one.received_at, one.id) for one in messages if window.has(one.received_at, one.id)]
        return succeed([Arrival(id_, BOB, at) for at, id_ in sorted(in_time)[:limit]])

    def push(self, one: StoredMessage) -> bool:
        """Unless its socket is stuck."""
        if one.id not in self.stuck:
            self.pushed.append(one.id)
        return one.id not in self.stuck

    def push_late(self, one: StoredMessage, at: float) -> bool:
        """Likewise."""
        self.late.append(at)
        return self.push(one)


class TakingTests(SynchronousTestCase):
    def take(self, shelf: Shelf, *ids: str) -> list[str]:
        """What is said to be pushed."""
        return self.successResultOf(Deferred.fromCoroutine(shelf.half.take(ids)))

    def test_take(self) -> None:
        """What is there is pushed; what is gone or not taken is left out."""
        shelf = Shelf(message("a"), message("b"), message("c"))
        shelf.stuck = {"b"}
        self.assertEqual(self.take(shelf, "a", "b", "x"), ["a"])
        self.assertEqual(shelf.pushed, ["a"])

    def test_once(self) -> None:
        """A hint that comes again, since its answer was lost, is answered as before."""
        shelf = Shelf(message("a"))
        self.take(shelf, "a")
        self.assertEqual(self.take(shelf, "a"), ["a"])
        self.assertEqual((shelf.pushed, shelf.found), (["a"], [["a"]]))

    def test_again_meanwhile(self) -> None:
        """Also while the first one is still being looked up."""
        shelf = Shelf(message("a"))
        asked: list[Deferred[list[StoredMessage]]] = []
        half = Half(
            live=shelf.half.live,
            find=lambda ids: asked.append(Deferred()) or asked[-1],  # type: ignore[func-returns-value]
            arrived=shelf.arrived,
            push=shelf.push,
            is_missed=lambda _: False,
            push_late=shelf.push_late,
            was_pushed=shelf.pushed.__contains__,
        )
        both = [Deferred.fromCoroutine(half.take(["a"])) for _ in range(2)]
        for one in asked:
            one.callback([message("a")])
        self.assertEqual([self.successResultOf(one) for one in both], [["a"], ["a"]])
        self.assertEqual(shelf.pushed, ["a"])

    def test_more_than_fits(self) -> None:
        """What the store does not give at once is asked for again."""
        shelf = Shelf(*(message(str(number)) for number in range(5)))
        shelf.most = 2
        self.assertEqual(self.take(shelf, *"01234x"), list("01234"))


class CatchUpTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)

    def round(self, catch_up: CatchUp) -> None:
        """One of them."""
        self.successResultOf(Deferred.fromCoroutine(catch_up.round()))

    def test_window(self) -> None:
        """What is very young may be on its way still, what is old was caught up with before."""
        ages = {"young": YOUNG, "new": YOUNG + 0.1, "old": WINDOW, "older": WINDOW + 0.1}
        shelf = Shelf(*(message(name, age=age) for name, age in ages.items()))
        self.round(CatchUp(self.clock, [shelf.half]))
        self.assertEqual(shelf.pushed, ["old", "new"])

    def test_not_twice(self) -> None:
        """What was pushed here is not pushed again; what no socket took is tried once more."""
        shelf = Shelf(message("a"), message("b", age=5))
        shelf.stuck = {"b"}
        catch_up = CatchUp(self.clock, [shelf.half])
        self.round(catch_up)
        shelf.stuck = set()
        self.round(catch_up)
        self.assertEqual(shelf.pushed, ["a", "b"])

    def test_after_a_gap(self) -> None:
        """Rounds that failed, or did not happen, are made up for."""
        shelf = Shelf()
        catch_up = CatchUp(self.clock, [shelf.half])
        self.round(catch_up)
        working, broken = shelf.half, Shelf()
        broken.half = Half(
            live=lambda: [BOB],
            find=broken.find,
            arrived=lambda *_: fail(StoreUnavailable()),
            push=broken.push,
            is_missed=lambda _: True,
            push_late=broken.push_late,
            was_pushed=lambda _: False,
        )
        self.clock.advance(100)
        catch_up._halves = (broken.half,)
        self.failureResultOf(Deferred.fromCoroutine(catch_up.round()), StoreUnavailable)
        self.clock.advance(100)
        catch_up._halves = (working,)
        self.round(catch_up)
        self.assertEqual(shelf.questions[-1][1], Window(NOW - LATE, NOW + 200 - YOUNG))

    def test_chunks(self) -> None:
        """However many DIDs there are, and however many messages."""
        self.patch(rounds, "CHUNK", 7)
        shelf = Shelf(*(message(str(number), age=29 - number) for number in range(20)))
        shelf.dids = [f"did:x:{number}" for number in range(2 * 7 + 1)]
        shelf.most = 3
        self.round(CatchUp(self.clock, [shelf.half]))
        self.assertEqual([len(dids) for dids, _ in shelf.questions], [7] * 6 + [1] * 3)
        self.assertEqual(shelf.pushed, [str(number) for number in range(20)])
        self.assertEqual(shelf.late, [shelf.messages[str(number)].received_at for number in range(20)])

    def test_many_of_one_time(self) -> None:
        """What all came at the same instant is gone through to its end, and not without end."""
        self.patch(rounds, "CHUNK", 7)
        for many, questions in ((20, 3), (21, 4)):
            shelf = Shelf(*(message(f"{number:02}") for number in range(many)))
            shelf.stuck = {f"{number:02}" for number in range(14)}
            self.round(CatchUp(self.clock, [shelf.half]))
            self.assertEqual(len(shelf.questions), questions)
            self.assertEqual(shelf.pushed, [f"{number:02}" for number in range(14, many)])

    def test_only_what_is_missed(self) -> None:
        """Nothing else is read."""
        shelf = Shelf(message("a"), message("b"), message("c"))
        shelf.pushed, shelf.unwanted = ["a"], {"b"}
        self.round(CatchUp(self.clock, [shelf.half]))
        self.assertEqual((shelf.found, shelf.pushed), ([["c"]], ["a", "c"]))

    def test_pushed_meanwhile(self) -> None:
        """A hint that comes while it is looked up is enough."""
        shelf = Shelf(message("a"))
        find = shelf.half.find

        def find_late(ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
            shelf.pushed.append("a")
            return find(ids)

        self.round(CatchUp(self.clock, [replace(shelf.half, find=find_late)]))
        self.assertEqual(shelf.pushed, ["a"])

    def test_nobody(self) -> None:
        """Without sockets nothing is asked."""
        shelf = Shelf()
        shelf.dids = []
        self.round(CatchUp(self.clock, [shelf.half]))
        self.assertEqual(shelf.questions, [])


class SweepTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.gone = ["dead", "aaaa", "late"]
        self.dropped: list[str] = []
        self.fell_back: list[int] = []
        self.my_turn = True
        self.sweep = Sweep(self, "aaaa", self.mine, self.fell_back.append)  # type: ignore[arg-type]

    async def mine(self) -> bool:
        """As the test says."""
        return self.my_turn

    def lapsed(self) -> Deferred[Iterable[str]]:
        """Those whose lease is over."""
        return succeed(self.gone)

    def drop(self, boot: str) -> Deferred[int]:
        """Noted."""
        self.dropped.append(boot)
        return succeed(3)

    def test_round(self) -> None:
        """All of them but ourselves; what they had pushed is counted as waiting again."""
        self.successResultOf(Deferred.fromCoroutine(self.sweep.round()))
        self.assertEqual((self.dropped, self.fell_back), (["dead", "late"], [3, 3]))

    def test_not_our_turn(self) -> None:
        """Somebody else does it."""
        self.my_turn = False
        self.successResultOf(Deferred.fromCoroutine(self.sweep.round()))
        self.assertEqual(self.dropped, [])


class RoundsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.member = True
        self.fault: Exception | None = None
        self.done = 0
        self.rounds = Rounds(self.clock, lambda: self.member, [(self.work, 5.0)])
        self.rounds.startService()

    async def work(self) -> None:
        """Counted."""
        self.done += 1
        if self.fault is not None:
            raise self.fault

    def test_every_so_often(self) -> None:
        """As long as this node is a member, whatever becomes of one of them."""
        self.clock.pump([5] * 2)
        self.fault = StoreUnavailable()
        self.clock.advance(5)
        self.fault = RuntimeError("boom")
        self.clock.advance(5)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.fault, self.member = None, False
        self.clock.advance(5)
        self.assertEqual(self.done, 4)
        self.member = True
        self.clock.advance(5)
        self.assertEqual(self.done, 5)
        self.successResultOf(self.rounds.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])
