"""Taking what other nodes hint at, and what is done every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import anti_entropy
from mediatord.cluster.anti_entropy import (
    ANTI_ENTROPY_INTERVAL,
    BATCH_SIZE,
    MIN_MESSAGE_AGE,
    SCAN_WINDOW,
    AntiEntropy,
    LapsedNodeSweeper,
)
from mediatord.cluster.peer_notifications import (
    MAX_VISIBILITY_DELAY,
    NotificationReceiver,
    PeerNotificationDelivery,
    decode_names,
    encode_names,
)
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, StoredMessage
from tests.in_memory_mediator import NOW

BOB = "did:x:bob"


def message(id_: str, *, age: float = 10.0) -> StoredMessage:
    """One that waits for Bob, of so many seconds ago."""
    return StoredMessage(id_, BOB, BOB, b"{}", "json", NOW - age, NOW + 1000)


class FakeMessageSource:
    """A protocol half whose messages the test puts there."""

    def __init__(self, *messages: StoredMessage) -> None:
        self.messages = {one.id: one for one in messages}
        self.dids = [BOB]
        self.most = 500
        self.pushed: list[str] = []
        self.unwanted: set[str] = set()
        self.late: list[float] = []
        self.stuck: set[str] = set()
        self.picked: frozenset[str] = frozenset()
        self.found: list[list[str]] = []
        self.questions: list[tuple[list[str], ArrivalWindow]] = []
        self.is_away = False
        store: Any = self
        self.delivery: PeerNotificationDelivery[StoredMessage] = PeerNotificationDelivery(
            store, store, lambda ids: self.find(ids), self.arrived, store, is_wanted=lambda _: True
        )

    def live(self, wanted: Callable[[object], bool]) -> list[str]:
        """Those with sockets."""
        return self.dids

    def subscribers(self, did: str, *, by: float, message: str) -> list[object]:
        """Somebody, unless the message is in the backlog."""
        return [] if message in self.unwanted else [did]

    def was_pushed(self, id_: str) -> bool:
        """Here."""
        return id_ in self.pushed

    def find_picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        """Those of them."""
        return succeed(self.picked.intersection(ids))

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        """By id, no more than fit."""
        self.found.append(list(ids))
        return succeed([self.messages[one] for one in ids if one in self.messages][: self.most])

    def arrived(self, dids: Sequence[str], window: ArrivalWindow, limit: int) -> Deferred[list[MessageArrival]]:
        """By time, and then by id."""
        if self.is_away:
            return fail(StoreUnavailable())
        self.questions.append((list(dids), window))
        messages = self.messages.values()
        in_time = [(one.received_at, one.id) for one in messages if window.has(one.received_at, one.id)]
        return succeed([MessageArrival(id_, BOB, at) for at, id_ in sorted(in_time)[:limit]])

    def push_remote(self, one: StoredMessage, *, by: float = inf) -> bool:
        """Unless its socket is stuck."""
        if by != inf:
            self.late.append(by - MAX_VISIBILITY_DELAY)
        if one.id not in self.stuck:
            self.pushed.append(one.id)
        return one.id not in self.stuck


class NotificationReceiverTests(SynchronousTestCase):
    def take(self, shelf: FakeMessageSource, *ids: str) -> list[str]:
        """What is said to be pushed."""
        return self.successResultOf(Deferred.fromCoroutine(shelf.delivery.push_notified(ids)))

    def test_take(self) -> None:
        """What is there is pushed; what is gone or not taken is left out."""
        shelf = FakeMessageSource(message("a"), message("b"), message("c"))
        shelf.stuck = {"b"}
        self.assertEqual(self.take(shelf, "a", "b", "x"), ["a"])
        self.assertEqual(shelf.pushed, ["a"])

    def test_once(self) -> None:
        """A hint that comes again, since its answer was lost, is answered as before."""
        shelf = FakeMessageSource(message("a"))
        self.take(shelf, "a")
        self.assertEqual(self.take(shelf, "a"), ["a"])
        self.assertEqual((shelf.pushed, shelf.found), (["a"], [["a"]]))

    def test_again_meanwhile(self) -> None:
        """Also while the first one is still being looked up."""
        shelf = FakeMessageSource(message("a"))
        asked: list[Deferred[list[StoredMessage]]] = []
        shelf.find = lambda ids: asked.append(Deferred()) or asked[-1]  # type: ignore[func-returns-value, method-assign]
        both = [Deferred.fromCoroutine(shelf.delivery.push_notified(["a"])) for _ in range(2)]
        for one in asked:
            one.callback([message("a")])
        self.assertEqual([self.successResultOf(one) for one in both], [["a"], ["a"]])
        self.assertEqual(shelf.pushed, ["a"])

    def test_with_messages(self) -> None:
        """What comes with the hint is pushed as it is, unless it has been, and without the store."""
        shelf = FakeMessageSource()
        shelf.pushed, shelf.stuck = ["a"], {"c"}
        self.assertEqual(self.receive(shelf, "abc", map(message, "abc")), ["a", "b"])
        self.assertEqual((shelf.pushed, shelf.found), (["a", "b"], []))

    def test_without_some_messages(self) -> None:
        """Nothing of a hint is pushed before what has to be read for it: they are pushed in order."""
        shelf = FakeMessageSource(*map(message, "abc"))
        self.assertEqual(self.receive(shelf, "abc", map(message, "ac")), ["a", "b", "c"])
        self.assertEqual((shelf.pushed, shelf.found), (["a", "b", "c"], [["a", "b", "c"]]))

    def test_expired_on_the_way(self) -> None:
        """A message whose time is over is read, so that it is not pushed."""
        shelf = FakeMessageSource()
        self.assertEqual(self.receive(shelf, "a", [replace(message("a"), expires_at=NOW)]), [])
        self.assertEqual((shelf.pushed, shelf.found), ([], [["a"]]))

    def receive(self, shelf: FakeMessageSource, ids: Iterable[str], messages: Iterable[StoredMessage]) -> list[str]:
        """What is said to be pushed of a request with messages."""
        clock = Clock()
        clock.advance(NOW)
        receiver = NotificationReceiver(clock, shelf.delivery, cast(Any, None), cast(Any, None), lambda did: False)
        body = encode_names("hints", {"messages": list(ids)}, list(messages))
        answer = self.successResultOf(Deferred.fromCoroutine(receiver.receive(body)))
        return decode_names("pushed", answer).get("messages", [])

    def test_more_than_fits(self) -> None:
        """What the store does not give at once is asked for again."""
        shelf = FakeMessageSource(*(message(str(number)) for number in range(5)))
        shelf.most = 2
        self.assertEqual(self.take(shelf, *"01234x"), list("01234"))


class CatchUpTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)

    def round(self, catch_up: AntiEntropy) -> None:
        """One of them."""
        self.successResultOf(Deferred.fromCoroutine(catch_up.scan()))

    def test_window(self) -> None:
        """What is very young may be on its way still, what is old was caught up with before."""
        ages = {
            "young": MIN_MESSAGE_AGE,
            "new": MIN_MESSAGE_AGE + 0.1,
            "old": SCAN_WINDOW,
            "older": SCAN_WINDOW + 0.1,
        }
        shelf = FakeMessageSource(*(message(name, age=age) for name, age in ages.items()))
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual(shelf.pushed, ["old", "new"])

    def test_not_twice(self) -> None:
        """What was pushed here is not pushed again; what no socket took is tried once more."""
        shelf = FakeMessageSource(message("a"), message("b", age=5))
        shelf.stuck = {"b"}
        catch_up = AntiEntropy(self.clock, [shelf.delivery])
        self.round(catch_up)
        shelf.stuck = set()
        self.round(catch_up)
        self.assertEqual(shelf.pushed, ["a", "b"])

    def test_picked_up(self) -> None:
        """What its recipient has got by pickup is left out, and not looked up."""
        shelf = FakeMessageSource(message("a"), message("b"))
        shelf.picked = frozenset("a")
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual((shelf.pushed, shelf.found), (["b"], [["b"]]))

    def test_backlogs_that_no_round_asks_for(self) -> None:
        """They are forgotten; not if the round failed, as the next one looks further back."""
        forgotten: list[float] = []
        shelf = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [shelf.delivery], forgotten.append)
        self.round(catch_up)
        self.assertEqual(forgotten, [NOW - SCAN_WINDOW - MAX_VISIBILITY_DELAY])
        shelf.dids = [BOB] * 2
        shelf.is_away = True
        self.failureResultOf(Deferred.fromCoroutine(catch_up.scan()), StoreUnavailable)
        self.assertEqual(len(forgotten), 1)

    def test_after_a_gap(self) -> None:
        """Rounds that failed, or did not happen, are made up for."""
        shelf = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [shelf.delivery])
        self.round(catch_up)
        self.clock.advance(100)
        shelf.is_away = True
        self.failureResultOf(Deferred.fromCoroutine(catch_up.scan()), StoreUnavailable)
        self.clock.advance(100)
        shelf.is_away = False
        self.round(catch_up)
        self.assertEqual(
            shelf.questions[-1][1], ArrivalWindow(NOW - MAX_VISIBILITY_DELAY, NOW + 200 - MIN_MESSAGE_AGE)
        )

    def test_after_a_wrong_clock(self) -> None:
        """By the last round before that is noticed it may have been any time; it looked back to the one before."""
        for step in (7200.0, 200.0, -7200.0):
            clock = Clock()
            clock.advance(NOW)
            shelf = FakeMessageSource()
            catch_up = AntiEntropy(clock, [shelf.delivery])
            self.round(catch_up)
            clock.rightNow += step
            self.round(catch_up)
            clock.rightNow -= step
            clock.advance(300)
            self.round(catch_up)
            self.assertEqual(
                shelf.questions[-1][1],
                ArrivalWindow(NOW + min(step, 0) - MAX_VISIBILITY_DELAY, NOW + 300 - MIN_MESSAGE_AGE),
            )

    def test_after_many_rounds(self) -> None:
        """A round looks back no further than it has to, however long ago the first one was."""
        shelf = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [shelf.delivery])
        for _ in range(3):
            self.round(catch_up)
            self.clock.advance(ANTI_ENTROPY_INTERVAL)
        now = NOW + 2 * ANTI_ENTROPY_INTERVAL
        self.assertEqual(shelf.questions[-1][1], ArrivalWindow(now - SCAN_WINDOW, now - MIN_MESSAGE_AGE))

    def test_chunks(self) -> None:
        """However many DIDs there are, and however many messages."""
        self.patch(anti_entropy, "BATCH_SIZE", 7)
        shelf = FakeMessageSource(*(message(str(number), age=29 - number) for number in range(20)))
        shelf.dids = [f"did:x:{number}" for number in range(2 * 7 + 1)]
        shelf.most = 3
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual([len(dids) for dids, _ in shelf.questions], [7] * 6 + [1] * 3)
        self.assertEqual(shelf.pushed, [str(number) for number in range(20)])
        self.assertEqual(shelf.late, [shelf.messages[str(number)].received_at for number in range(20)])

    def test_many_of_one_time(self) -> None:
        """What all came at the same instant is gone through to its end, and not without end."""
        self.patch(anti_entropy, "BATCH_SIZE", 7)
        for many, questions in ((20, 3), (21, 4)):
            shelf = FakeMessageSource(*(message(f"{number:02}") for number in range(many)))
            shelf.stuck = {f"{number:02}" for number in range(14)}
            self.round(AntiEntropy(self.clock, [shelf.delivery]))
            self.assertEqual(len(shelf.questions), questions)
            self.assertEqual(shelf.pushed, [f"{number:02}" for number in range(14, many)])

    def test_only_what_is_missed(self) -> None:
        """Nothing else is read."""
        shelf = FakeMessageSource(message("a"), message("b"), message("c"))
        shelf.pushed, shelf.unwanted = ["a"], {"b"}
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual((shelf.found, shelf.pushed), ([["c"]], ["a", "c"]))

    def test_pushed_meanwhile(self) -> None:
        """A hint that comes while it is looked up is enough."""
        shelf = FakeMessageSource(message("a"))
        find = shelf.find

        def find_late(ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
            shelf.pushed.append("a")
            return find(ids)

        shelf.find = find_late  # type: ignore[method-assign]
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual(shelf.pushed, ["a"])

    def test_nobody(self) -> None:
        """Without sockets nothing is asked."""
        shelf = FakeMessageSource()
        shelf.dids = []
        self.round(AntiEntropy(self.clock, [shelf.delivery]))
        self.assertEqual(shelf.questions, [])


class SweepTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.gone = ["dead", "aaaa", "late"]
        self.dropped: list[str] = []
        self.fell_back: list[int] = []
        self.my_turn = True
        self.number = 3
        self.clock = Clock()
        store: Any = self
        self.sweep = LapsedNodeSweeper(
            self.clock, store, "aaaa", self.mine, self.fell_back.append, lambda boot: boot.upper()
        )

    async def mine(self) -> bool:
        """As the test says."""
        return self.my_turn

    def list_lapsed_nodes(self) -> Deferred[Iterable[str]]:
        """Those whose lease is over."""
        return succeed(self.gone)

    def drop(self, boot: str) -> Deferred[int]:
        """Noted."""
        self.dropped.append(boot)
        return succeed(self.number)

    def test_round(self) -> None:
        """All of them but ourselves; what they had pushed is counted as waiting again."""
        self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        self.assertEqual((self.dropped, self.fell_back), (["dead", "late"], [3, 3]))

    def test_very_many(self) -> None:
        """No turn of the reactor tells of more than a few, and all are told of."""
        self.gone, self.number = ["dead"], 2 * BATCH_SIZE + 1
        round_ = Deferred.fromCoroutine(self.sweep.sweep())
        self.assertEqual(self.fell_back, [BATCH_SIZE])
        self.clock.pump([0.01] * 2)
        self.successResultOf(round_)
        self.assertEqual(self.fell_back, [BATCH_SIZE, BATCH_SIZE, 1])

    def test_who_is_gone(self) -> None:
        """The operator is told by name."""
        with capturedLogs() as events:
            self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        said = [formatEvent(event) for event in events]
        self.assertEqual(
            said,
            [
                "dropped lapsed node DEAD (boot dead); requeued 3 messages",
                "dropped lapsed node LATE (boot late); requeued 3 messages",
            ],
        )

    def test_not_our_turn(self) -> None:
        """Somebody else does it."""
        self.my_turn = False
        self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        self.assertEqual(self.dropped, [])
