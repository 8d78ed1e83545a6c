"""Reception of notifications, anti-entropy, and the sweep of lapsed nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
    PeerNotificationDelivery,
)
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, StoredMessage
from tests.in_memory_mediator import NOW

BOB = "did:x:bob"


def make_message(id_: str, *, age: float = 10.0) -> StoredMessage:
    """A message queued for Bob so many seconds ago."""
    return StoredMessage(id_, BOB, BOB, b"{}", "json", NOW - age, NOW + 1000)


class FakeMessageSource:
    """Message source of one protocol, with messages set by the test."""

    def __init__(self, *messages: StoredMessage) -> None:
        self.messages = {message.id: message for message in messages}
        self.dids = [BOB]
        self.most = 500
        self.pushed: list[str] = []
        self.unwanted: set[str] = set()
        self.lags: list[float] = []
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
        """Those of the DIDs that have sockets."""
        return self.dids

    def subscribers(self, did: str, *, by: float, message: str) -> list[object]:
        """One subscriber, unless the message is in the backlog."""
        return [] if message in self.unwanted else [did]

    def was_pushed(self, id_: str) -> bool:
        """Whether the message was pushed here."""
        return id_ in self.pushed

    def find_picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        """Those of the ids that were picked up."""
        return succeed(self.picked.intersection(ids))

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        """Messages by id, as many as fit."""
        self.found.append(list(ids))
        return succeed([self.messages[id_] for id_ in ids if id_ in self.messages][: self.most])

    def arrived(self, dids: Sequence[str], window: ArrivalWindow, limit: int) -> Deferred[list[MessageArrival]]:
        """Messages by time and id."""
        if self.is_away:
            return fail(StoreUnavailable())
        self.questions.append((list(dids), window))
        messages = self.messages.values()
        in_time = [
            (message.received_at, message.id) for message in messages if window.has(message.received_at, message.id)
        ]
        return succeed([MessageArrival(id_, BOB, at) for at, id_ in sorted(in_time)[:limit]])

    def push_remote(self, messages: Sequence[StoredMessage], by: Mapping[str, float] | None = None) -> list[str]:
        """Push, unless the socket is blocked."""
        if by is not None:
            self.lags += [by[one.id] - MAX_VISIBILITY_DELAY for one in messages]
        taken = [one.id for one in messages if one.id not in self.stuck]
        self.pushed += taken
        return taken


class NotificationReceiverTests(SynchronousTestCase):
    def push_notified(self, source: FakeMessageSource, *ids: str) -> list[str]:
        """Ids reported as pushed."""
        return self.successResultOf(Deferred.fromCoroutine(source.delivery.push_notified(ids)))

    def test_pushes_messages_found(self) -> None:
        """Messages that exist are pushed; missing and refused ones are left out."""
        source = FakeMessageSource(make_message("a"), make_message("b"), make_message("c"))
        source.stuck = {"b"}
        self.assertEqual(self.push_notified(source, "a", "b", "x"), ["a"])
        self.assertEqual(source.pushed, ["a"])

    def test_repeated_notification_is_answered_alike(self) -> None:
        """A notification repeated because its response was lost gets the same response."""
        source = FakeMessageSource(make_message("a"))
        self.push_notified(source, "a")
        self.assertEqual(self.push_notified(source, "a"), ["a"])
        self.assertEqual((source.pushed, source.found), (["a"], [["a"]]))

    def test_repeated_notification_during_lookup(self) -> None:
        """The same holds while the first one is still looked up."""
        source = FakeMessageSource(make_message("a"))
        lookups: list[Deferred[list[StoredMessage]]] = []
        source.find = lambda ids: lookups.append(Deferred()) or lookups[-1]  # type: ignore[func-returns-value, method-assign]
        both = [Deferred.fromCoroutine(source.delivery.push_notified(["a"])) for _ in range(2)]
        for lookup in lookups:
            lookup.callback([make_message("a")])
        self.assertEqual([self.successResultOf(item) for item in both], [["a"], ["a"]])
        self.assertEqual(source.pushed, ["a"])

    def test_reads_more_than_one_page(self) -> None:
        """Messages that the store does not return at once are requested again."""
        source = FakeMessageSource(*(make_message(str(number)) for number in range(5)))
        source.most = 2
        self.assertEqual(self.push_notified(source, *"01234x"), list("01234"))


class AntiEntropyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)

    def run_round(self, catch_up: AntiEntropy) -> None:
        """Run one round."""
        self.successResultOf(Deferred.fromCoroutine(catch_up.scan()))

    def test_window(self) -> None:
        """Very young messages may still be on their way, old ones were found by earlier rounds."""
        ages = {
            "young": MIN_MESSAGE_AGE,
            "new": MIN_MESSAGE_AGE + 0.1,
            "old": SCAN_WINDOW,
            "older": SCAN_WINDOW + 0.1,
        }
        source = FakeMessageSource(*(make_message(name, age=age) for name, age in ages.items()))
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual(source.pushed, ["old", "new"])

    def test_does_not_push_twice(self) -> None:
        """A message pushed here is not pushed again; one that no socket accepted is retried once."""
        source = FakeMessageSource(make_message("a"), make_message("b", age=5))
        source.stuck = {"b"}
        catch_up = AntiEntropy(self.clock, [source.delivery])
        self.run_round(catch_up)
        source.stuck = set()
        self.run_round(catch_up)
        self.assertEqual(source.pushed, ["a", "b"])

    def test_skips_picked_up_messages(self) -> None:
        """Messages that the recipient has picked up are skipped and not looked up."""
        source = FakeMessageSource(make_message("a"), make_message("b"))
        source.picked = frozenset("a")
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual((source.pushed, source.found), (["b"], [["b"]]))

    def test_forgets_backlogs_beyond_window(self) -> None:
        """
        Backlogs older than the window are forgotten, unless the round failed, as the next one looks further back.
        """
        forgotten: list[float] = []
        source = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [source.delivery], forgotten.append)
        self.run_round(catch_up)
        self.assertEqual(forgotten, [NOW - SCAN_WINDOW - MAX_VISIBILITY_DELAY])
        source.dids = [BOB] * 2
        source.is_away = True
        self.failureResultOf(Deferred.fromCoroutine(catch_up.scan()), StoreUnavailable)
        self.assertEqual(len(forgotten), 1)

    def test_next_round_covers_failed_rounds(self) -> None:
        """The next round covers the windows of rounds that failed or were skipped."""
        source = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [source.delivery])
        self.run_round(catch_up)
        self.clock.advance(100)
        source.is_away = True
        self.failureResultOf(Deferred.fromCoroutine(catch_up.scan()), StoreUnavailable)
        self.clock.advance(100)
        source.is_away = False
        self.run_round(catch_up)
        self.assertEqual(
            source.questions[-1][1], ArrivalWindow(NOW - MAX_VISIBILITY_DELAY, NOW + 200 - MIN_MESSAGE_AGE)
        )

    def test_clock_step_extends_window(self) -> None:
        """After a clock step the last round cannot be trusted; the window goes back to the one before."""
        for step in (7200.0, 200.0, -7200.0):
            clock = Clock()
            clock.advance(NOW)
            source = FakeMessageSource()
            catch_up = AntiEntropy(clock, [source.delivery])
            self.run_round(catch_up)
            clock.rightNow += step
            self.run_round(catch_up)
            clock.rightNow -= step
            clock.advance(300)
            self.run_round(catch_up)
            self.assertEqual(
                source.questions[-1][1],
                ArrivalWindow(NOW + min(step, 0) - MAX_VISIBILITY_DELAY, NOW + 300 - MIN_MESSAGE_AGE),
            )

    def test_window_is_bounded(self) -> None:
        """A round looks back no further than needed, however long ago the first one was."""
        source = FakeMessageSource()
        catch_up = AntiEntropy(self.clock, [source.delivery])
        for _ in range(3):
            self.run_round(catch_up)
            self.clock.advance(ANTI_ENTROPY_INTERVAL)
        now = NOW + 2 * ANTI_ENTROPY_INTERVAL
        self.assertEqual(source.questions[-1][1], ArrivalWindow(now - SCAN_WINDOW, now - MIN_MESSAGE_AGE))

    def test_reads_in_chunks(self) -> None:
        """Any number of DIDs and messages is read in chunks."""
        self.patch(anti_entropy, "BATCH_SIZE", 7)
        source = FakeMessageSource(*(make_message(str(number), age=29 - number) for number in range(20)))
        source.dids = [f"did:x:{number}" for number in range(2 * 7 + 1)]
        source.most = 3
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual([len(dids) for dids, _ in source.questions], [7] * 6 + [1] * 3)
        self.assertEqual(source.pushed, [str(number) for number in range(20)])
        self.assertEqual(source.lags, [source.messages[str(number)].received_at for number in range(20)])

    def test_many_messages_of_one_time(self) -> None:
        """Messages of the same instant are read completely, and reading ends."""
        self.patch(anti_entropy, "BATCH_SIZE", 7)
        for many, questions in ((20, 3), (21, 4)):
            source = FakeMessageSource(*(make_message(f"{number:02}") for number in range(many)))
            source.stuck = {f"{number:02}" for number in range(14)}
            self.run_round(AntiEntropy(self.clock, [source.delivery]))
            self.assertEqual(len(source.questions), questions)
            self.assertEqual(source.pushed, [f"{number:02}" for number in range(14, many)])

    def test_looks_up_missing_messages_only(self) -> None:
        """Only messages that were not pushed are read."""
        source = FakeMessageSource(make_message("a"), make_message("b"), make_message("c"))
        source.pushed, source.unwanted = ["a"], {"b"}
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual((source.found, source.pushed), ([["c"]], ["a", "c"]))

    def test_notification_during_lookup(self) -> None:
        """A notification that arrives during the lookup replaces it."""
        source = FakeMessageSource(make_message("a"))
        find = source.find

        def find_late(ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
            source.pushed.append("a")
            return find(ids)

        source.find = find_late  # type: ignore[method-assign]
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual(source.pushed, ["a"])

    def test_no_sockets_no_queries(self) -> None:
        """Without sockets there are no queries."""
        source = FakeMessageSource()
        source.dids = []
        self.run_round(AntiEntropy(self.clock, [source.delivery]))
        self.assertEqual(source.questions, [])


class LapsedNodeSweepTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.lapsed = ["dead", "aaaa", "late"]
        self.dropped: list[str] = []
        self.fell_back: list[int] = []
        self.my_turn = True
        self.number = 3
        self.clock = Clock()
        store: Any = self
        self.sweep = LapsedNodeSweeper(
            self.clock, store, "aaaa", self.is_leader, self.fell_back.append, lambda boot: boot.upper()
        )

    async def is_leader(self) -> bool:
        """As set by the test."""
        return self.my_turn

    def list_lapsed_nodes(self) -> Deferred[Iterable[str]]:
        """Nodes whose lease has ended."""
        return succeed(self.lapsed)

    def drop(self, boot: str) -> Deferred[int]:
        """Recorded."""
        self.dropped.append(boot)
        return succeed(self.number)

    def test_drops_lapsed_nodes(self) -> None:
        """All lapsed nodes but this one are dropped; their pushes are counted as requeued."""
        self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        self.assertEqual((self.dropped, self.fell_back), (["dead", "late"], [3, 3]))

    def test_reports_many_in_small_steps(self) -> None:
        """One reactor iteration reports a few messages, and all are reported."""
        self.lapsed, self.number = ["dead"], 2 * BATCH_SIZE + 1
        round_ = Deferred.fromCoroutine(self.sweep.sweep())
        self.assertEqual(self.fell_back, [BATCH_SIZE])
        self.clock.pump([0.01] * 2)
        self.successResultOf(round_)
        self.assertEqual(self.fell_back, [BATCH_SIZE, BATCH_SIZE, 1])

    def test_warns_with_name_of_lapsed_node(self) -> None:
        """The warning names the node."""
        with capturedLogs() as events:
            self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        log_lines = [formatEvent(event) for event in events]
        self.assertEqual(
            log_lines,
            [
                "removed node DEAD (boot dead), whose lease has expired; requeued 3 messages",
                "removed node LATE (boot late), whose lease has expired; requeued 3 messages",
            ],
        )

    def test_only_leader_sweeps(self) -> None:
        """Only the leader sweeps."""
        self.my_turn = False
        self.successResultOf(Deferred.fromCoroutine(self.sweep.sweep()))
        self.assertEqual(self.dropped, [])
