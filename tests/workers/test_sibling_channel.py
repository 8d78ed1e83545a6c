"""The channel between workers: frames, results, limits, and workers that do not answer."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_notifications import NotificationReceiver
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage
from mediatord.workers import sibling_channel
from mediatord.workers.live_did_counters import LiveDIDCounters, create_live_did_counters
from mediatord.workers.sibling_channel import (
    BATCH_BYTES,
    BATCH_PUSHES,
    CHANGED_RETRY_DELAY,
    HELLO,
    MAX_OUTSTANDING,
    MAX_OUTSTANDING_BYTES,
    MAX_PUSH_AGE,
    MAX_SENT_PAYLOAD_BYTES,
    PUSH_TIMEOUT,
    RECONNECT_DELAY,
    SiblingDelivery,
    SiblingListener,
    SiblingServer,
    get_socket_path,
    is_own_user,
)
from tests.in_memory_mediator import NOW

BOB = "did:x:bob"


def make_message(name: str = "m", payload: bytes = b"{}", expires_in: float = 1000.0) -> StoredMessage:
    """A queued message for Bob."""
    return StoredMessage(name, f"{BOB}#1", BOB, payload, "json", NOW, NOW + expires_in)


class FakeTransport(StringTransport):
    """One end of a UNIX connection, with the frames that were written."""

    def getHandle(self) -> None:  # noqa: N802  Twisted's name
        """No socket."""

    def take_frames(self) -> list[bytes]:
        """Frames since the last call."""
        data, frames = self.value(), []
        self.clear()
        while data:
            end = 4 + int.from_bytes(data[:4], "big")
            frames.append(data[4:end])
            data = data[end:]
        return frames


class FakePushes:
    """Sockets and store of one worker: a :class:`RemotePusher`, a connection manager, and what the store finds."""

    def __init__(self) -> None:
        self.pushed: list[Any] = []
        self.stored: dict[str, Any] = {}
        self.reads: list[list[str]] = []
        self.notified: list[str] = []
        self.together: list[int] = []
        self.live_dids: set[str] = {BOB}
        self.takes = True
        self.found: Callable[[list[Any]], Any] = succeed

    def was_pushed(self, id_: str) -> bool:
        """As was recorded."""
        return any(item.id == id_ for item in self.pushed)

    def resolve_push(self, id_: str) -> bool:
        """Forgotten."""
        was_pushed = self.was_pushed(id_)
        self.pushed = [item for item in self.pushed if item.id != id_]
        return was_pushed

    def push_remote(self, items: Sequence[Any]) -> list[str]:
        """Recorded."""
        if items:
            self.together.append(len(items))
        if not self.takes:
            return []
        self.pushed += items
        return [item.id for item in items]

    async def push_notified(self, ids: list[str]) -> list[str]:
        """Read from the store."""
        self.reads.append(ids)
        found = await self.found([self.stored[id_] for id_ in ids if id_ in self.stored])
        self.pushed += found
        return [item.id for item in found]

    def push_contracts_updated(self, did: str) -> bool:
        """Recorded."""
        self.notified.append(did)
        return True

    @property
    def delivery(self) -> Any:
        """Stands in for :class:`PeerNotificationDelivery`."""
        return SimpleNamespace(
            pusher=self, connections=self, push_notified=self.push_notified, is_live=self.live_dids.__contains__
        )


class SiblingChannelTestCase(SynchronousTestCase):
    """
    The first of several workers pushes to the others.

    :ivar client_ends: open connections of the first worker, by the number of the other.
    """

    workers = 2

    def setUp(self) -> None:
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.patch(sibling_channel, "is_own_user", lambda connection: True)
        self.reactor: Any = MemoryReactorClock()
        self.reactor.advance(NOW)
        create_live_did_counters(directory, self.workers)
        self.counters = [LiveDIDCounters(directory, number) for number in range(self.workers)]
        self.outcomes: Counter[str] = Counter()
        self.durations: list[float] = []
        metrics: Any = SimpleNamespace(
            cluster_pushes=SimpleNamespace(inc=lambda outcome: self.outcomes.update([outcome])),
            peer_notification_duration=SimpleNamespace(observe=self.durations.append),
        )
        self.steady_offset = 0.0
        self.delivery = SiblingDelivery(self.reactor, self.counters[0], directory, 0, metrics, self.read_steady)
        self.paths = {str(get_socket_path(directory, number)): number for number in range(self.workers)}
        self.pushes = [FakePushes() for _ in range(self.workers)]
        self.registered: Collection[str] | None = {BOB}
        self.asked: Deferred[None] = succeed(None)
        self.greeted: list[int] = []
        self.servers = [self.make_server(one) for one in self.pushes]
        self.client_ends: dict[int, Any] = {}
        self.server_ends: dict[int, Any] = {}
        for one in self.counters[1:]:
            one.add(BOB)
        self.delivery.connect()

    def read_steady(self) -> float:
        """The time that all workers share."""
        return float(self.reactor.seconds()) + self.steady_offset

    def make_server(self, pushes: FakePushes) -> SiblingServer:
        """The server of a worker."""

        async def filter_registered(dids: Collection[str]) -> Collection[str]:
            await self.asked
            if self.registered is None:
                raise StoreUnavailable
            return set(dids) & set(self.registered)

        receiver = NotificationReceiver(
            pushes.delivery, pushes.delivery, filter_registered, pushes.push_contracts_updated
        )
        return SiblingServer(self.reactor, receiver, pushes.resolve_push, self.greeted.append, self.read_steady)

    def accept(self) -> None:
        """Let the others accept connections."""
        for path, factory, *_ in self.reactor.unixClients:
            number = self.paths[path]
            client = self.client_ends[number] = factory.buildProtocol(None)
            server = self.server_ends[number] = self.servers[number].buildProtocol(None)
            for end in (server, client):
                end.makeConnection(FakeTransport())
        self.reactor.unixClients.clear()

    def connect(self) -> None:
        """Let the others accept connections, and exchange greetings."""
        self.accept()
        self.transfer()

    def transfer(self) -> list[bytes]:
        """End the iteration and carry what was written, in one read each way; frames of the answers."""
        self.reactor.advance(0)
        answers: list[bytes] = []
        for number, client in self.client_ends.items():
            server = self.server_ends[number]
            data = client.transport.value()
            client.transport.clear()
            if data:
                server.dataReceived(data)
            answers += (frames := server.transport.take_frames())
            for frame in frames:
                client.dataReceived(len(frame).to_bytes(4, "big") + frame)
        return answers

    def disconnect(self, number: int = 1) -> None:
        """The connection to a worker is lost."""
        reason = Failure(ConnectionDone())
        client = self.client_ends.pop(number)
        self.server_ends.pop(number).connectionLost(reason)
        client.connectionLost(reason)
        self.delivery._links[number].clientConnectionLost(None, reason)

    def push(self, name: str = "m", payload: bytes = b"{}", **more: Any) -> Deferred[bool | None]:
        """Push a message to Bob."""
        taken = self.delivery.deliver_message(make_message(name, payload, **more))
        assert taken is not None
        return taken


class PushTests(SiblingChannelTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.connect()

    def test_message_arrives_unchanged_and_is_not_read(self) -> None:
        """A message with any payload; the store is not asked."""
        message = make_message(payload=bytes(range(256)))
        taken = self.push(payload=message.payload)
        self.assertNoResult(taken)
        self.transfer()
        self.assertIs(self.successResultOf(taken), True)
        self.assertEqual((self.pushes[1].pushed, self.pushes[1].reads), ([message], []))
        self.assertEqual((self.outcomes, self.delivery.pending), ({"pushed": 1}, (0, 0)))

    def test_event_arrives_unchanged(self) -> None:
        """An event with any text."""
        event = PendingEvent("e", BOB, "did:x:eve", "sealed \u00e4\ud800", NOW)
        taken = self.delivery.deliver_event(event)
        self.transfer()
        self.assertEqual((taken and self.successResultOf(taken), self.pushes[1].pushed), (True, [event]))

    def test_pushes_of_an_iteration_share_a_frame_and_an_answer(self) -> None:
        """One frame, and one with a byte for each. They reach the sockets together, before what follows them."""
        waiting = [self.push(str(number), b"payload") for number in range(50)]
        self.delivery.resolve_push(BOB, "0")
        self.assertEqual(self.client_ends[1].transport.value(), b"")
        self.reactor.advance(0)
        data = self.client_ends[1].transport.value()
        self.assertEqual(len(data), 4 + int.from_bytes(data[:4], "big"))
        self.assertEqual([len(frame) for frame in self.transfer()], [51])
        self.assertEqual([self.successResultOf(one) for one in waiting], [True] * 50)
        pushed = [(one.id, one.payload) for one in self.pushes[1].pushed]
        self.assertEqual(pushed, [(str(number), b"payload") for number in range(1, 50)])
        self.assertEqual(self.pushes[1].together, [50])

    def test_protocols_and_events_in_one_frame(self) -> None:
        """Each payload belongs to its push, whatever is between them."""
        message, later = make_message("m", b"first"), make_message("n", b"")
        event = PendingEvent("e", BOB, "did:x:eve", "sealed", NOW)
        self.push("m", b"first")
        self.delivery.notify_contracts_changed(BOB)
        self.delivery.deliver_event(event)
        self.push("n", b"")
        self.assertEqual(self.transfer(), [b"1111"])
        self.assertEqual((self.pushes[1].pushed, self.pushes[1].notified), ([message, event, later], [BOB]))

    def test_frames_are_bounded(self) -> None:
        """In pushes and in bytes, as one is served without a pause."""
        for _ in range(2 * BATCH_PUSHES + 1):
            self.push(payload=b"")
        self.assertEqual([len(frame) for frame in self.transfer()], [BATCH_PUSHES, BATCH_PUSHES, 1])
        for _ in range(5):
            self.push(payload=bytes(BATCH_BYTES // 2))
        self.assertEqual([len(frame) for frame in self.transfer()], [2, 2, 1])

    def test_frames_are_bounded_in_bytes_of_dids(self) -> None:
        """Long DIDs count as payloads do."""
        account = BOB + "\1" * (BATCH_BYTES // 12)
        self.counters[1].add(account)
        for number in range(4):
            self.delivery.deliver_message(replace(make_message(str(number)), account=account))
        self.assertEqual([len(frame) for frame in self.transfer()], [2, 2])

    def test_push_that_cannot_be_encoded(self) -> None:
        """It fails alone: others of its frame, and of later ones, get their own results."""
        bad, good = replace(make_message("bad"), recipient_did="did:x:\ud800"), make_message("good")
        first, second = self.delivery.deliver_message(bad), self.delivery.deliver_message(good)
        self.assertEqual(self.transfer(), [b"1"])
        self.pushes[1].takes = False
        third = self.push("later")
        self.assertEqual(self.transfer(), [b"0"])
        results = [one and self.successResultOf(one) for one in (first, second, third)]
        self.assertEqual(results, [False, True, False])
        self.assertEqual(self.outcomes, {"failed": 1, "pushed": 1, "no_session": 1})
        self.assertEqual((self.pushes[1].pushed, self.delivery.pending), ([good], (0, 0)))

    def test_contract_change_that_cannot_be_encoded(self) -> None:
        """It is not repeated for ever."""
        self.counters[1].add("did:x:\ud800")
        self.delivery.notify_contracts_changed("did:x:\ud800")
        self.assertEqual((self.delivery.pending, self.outcomes), ((0, 0), {"failed": 1}))

    def test_not_taken(self) -> None:
        """A worker whose counter is shared has no socket."""
        self.pushes[1].takes = False
        taken = self.push()
        self.transfer()
        self.assertIs(self.successResultOf(taken), False)
        self.assertEqual(self.outcomes, {"no_session": 1})

    def test_nobody_is_asked_in_vain(self) -> None:
        """Where no other worker has sockets, nothing is encoded, written or waited for."""
        self.counters[1].remove(BOB)
        self.assertIsNone(self.delivery.deliver_message(make_message()))
        self.assertIsNone(self.delivery.deliver_event(PendingEvent("e", BOB, "did:x:eve", "", NOW)))
        self.delivery.notify_contracts_changed(BOB)
        self.assertIs(self.successResultOf(self.delivery.has_live_session(BOB)), False)
        self.assertEqual(self.client_ends[1].transport.value(), b"")

    def test_pushed_before(self) -> None:
        """What was pushed there before counts as taken, and is not pushed again."""
        for _ in range(2):
            taken = self.push()
            self.transfer()
            self.assertIs(self.successResultOf(taken), True)
        self.assertEqual(len(self.pushes[1].pushed), 1)

    def test_live_session(self) -> None:
        """The other worker knows for sure."""
        for live in (True, False):
            answer = self.delivery.has_live_session(BOB)
            self.transfer()
            self.assertIs(self.successResultOf(answer), live)
            self.pushes[1].live_dids.clear()

    def test_acknowledged_elsewhere(self) -> None:
        """The worker that has pushed a message forgets it; this is no push."""
        self.push()
        self.transfer()
        for account in ("did:x:eve", BOB):
            self.assertTrue(self.pushes[1].was_pushed("m"))
            self.delivery.resolve_push(account, "m")
            self.transfer()
        self.assertFalse(self.pushes[1].was_pushed("m"))
        self.assertEqual((self.outcomes, len(self.durations)), ({"pushed": 1}, 1))

    def test_large_message_is_read(self) -> None:
        """One that is too large for a frame is read from the store; that no socket took it is not known."""
        message = make_message(payload=bytes(MAX_SENT_PAYLOAD_BYTES + 1))
        self.pushes[1].stored["m"] = message
        taken = self.push(payload=message.payload)
        self.reactor.advance(0)
        self.assertLess(len(self.client_ends[1].transport.value()), 1000)
        self.transfer()
        self.assertIsNone(self.successResultOf(taken))
        self.assertEqual((self.pushes[1].pushed, self.pushes[1].reads), ([message], [["m"]]))
        self.assertEqual(self.outcomes, {"pushed": 1})


class LatePushTests(SiblingChannelTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.connect()

    def test_late_message_is_read(self) -> None:
        """One that was under way for long may have been acknowledged meanwhile."""
        for name in ("gone", "kept"):
            self.push(name)
        self.pushes[1].stored["kept"] = make_message("kept")
        self.reactor.advance(1.5 * MAX_PUSH_AGE)
        self.assertEqual(self.transfer(), [b"??"])
        self.assertEqual([one.id for one in self.pushes[1].pushed], ["kept"])
        self.assertEqual(self.pushes[1].reads, [["gone", "kept"]])

    def test_worker_with_another_clock(self) -> None:
        """The reactors of two workers may differ in time; nothing is late because of that."""
        for step in (-10.0, 10.0):
            self.push(str(step))
            self.reactor.advance(0)
            self.reactor.rightNow += step
            self.steady_offset -= step
            self.assertEqual(self.transfer(), [b"1"])

    def test_no_socket(self) -> None:
        """A worker without a socket says so at once, and reads nothing."""
        self.pushes[1].live_dids.clear()
        self.push()
        self.reactor.advance(1.5 * MAX_PUSH_AGE)
        self.assertEqual((self.transfer(), self.pushes[1].reads), ([b"0"], []))

    def test_flood(self) -> None:
        """Beyond a limit late pushes are dropped, and counted."""
        self.patch(sibling_channel, "MAX_LATE", 2)
        self.pushes[1].found = lambda found: Deferred()
        waiting = []
        for names, answer in (("abc", b"??-"), ("def", b"??-")):
            waiting += [self.push(name) for name in names]
            self.reactor.advance(1.5 * MAX_PUSH_AGE)
            self.assertEqual(self.transfer(), [answer])
        self.assertEqual([self.successResultOf(one) for one in waiting], [None, None, False] * 2)
        self.assertEqual((self.outcomes, self.servers[1].late), ({"pushed": 4, "dropped": 2}, 2))

    def test_expired_message(self) -> None:
        """One that has expired under way is not pushed."""
        self.push(expires_in=0.5 * MAX_PUSH_AGE)
        self.reactor.advance(0.75 * MAX_PUSH_AGE)
        self.transfer()
        self.assertEqual((self.pushes[1].pushed, self.pushes[1].reads), ([], [["m"]]))

    def test_order(self) -> None:
        """What follows a late message does not overtake it."""
        other = self.pushes[1]
        held: list[Deferred[Any]] = [Deferred(), Deferred()]
        reads = iter(held)
        other.found = lambda found: next(reads).addCallback(lambda _: found)
        other.stored |= {name: make_message(name) for name in "ab"}
        self.push("a")
        self.reactor.advance(1.5 * MAX_PUSH_AGE)
        self.transfer()
        self.push("b")
        self.transfer()
        for number in range(2):
            self.assertEqual(len(other.pushed), number)
            held[number].callback(None)
        self.assertEqual([one.id for one in other.pushed], ["a", "b"])
        self.push("c")
        self.assertEqual(self.transfer(), [b"1"])

    def test_order_within_a_frame(self) -> None:
        """What follows a message that has to be read is read as well, and what precedes it is pushed before."""
        other = self.pushes[1]
        large = make_message("b", bytes(MAX_SENT_PAYLOAD_BYTES + 1))
        other.stored |= {"b": large, "c": make_message("c")}
        for name, payload in (("a", b"{}"), ("b", large.payload), ("c", b"{}")):
            self.push(name, payload)
        self.assertEqual(self.transfer(), [b"1??"])
        self.assertEqual([one.id for one in other.pushed], ["a", "b", "c"])

    def test_store_outage(self) -> None:
        """Late messages are left to anti-entropy; new ones are pushed."""

        def fail(found: object) -> Any:
            raise StoreUnavailable

        self.pushes[1].found = fail
        self.push("a")
        self.reactor.advance(1.5 * MAX_PUSH_AGE)
        self.transfer()
        self.push("b")
        self.assertEqual(self.transfer(), [b"1"])


class SilentWorkerTests(SiblingChannelTestCase):
    """Workers that were killed or stopped."""

    def test_not_connected(self) -> None:
        """Nothing is waited for."""
        self.assertIs(self.successResultOf(self.push()), False)
        self.assertEqual(self.outcomes, {"failed": 1})

    def test_stopped_before_its_hello(self) -> None:
        """The kernel accepts connections for it; pushes wait for its hello, and are not kept meanwhile."""
        self.accept()
        self.assertIs(self.successResultOf(self.push()), False)
        self.transfer()
        self.assertNoResult(self.push())

    def test_killed(self) -> None:
        """What it did not answer is unknown, and it is connected to again after a while."""
        self.connect()
        taken = self.push()
        self.disconnect()
        self.assertIs(self.successResultOf(taken), False)
        self.assertEqual((self.outcomes, self.delivery.pending), ({"failed": 1}, (0, 0)))
        self.reactor.advance(RECONNECT_DELAY)
        self.connect()
        taken = self.push()
        self.transfer()
        self.assertIs(self.successResultOf(taken), True)

    def test_replacement_connects(self) -> None:
        """Its greeting has this worker connect at once."""
        self.connect()
        self.disconnect()
        self.delivery.connect([1])
        self.assertEqual(len(self.reactor.unixClients), 1)
        self.reactor.advance(RECONNECT_DELAY)
        self.assertEqual(len(self.reactor.unixClients), 1)
        self.assertEqual(self.greeted, [0])

    def test_stopped(self) -> None:
        """It stalls nobody: its connection is closed, and others do not wait for it."""
        self.connect()
        early, transport = self.push("a"), self.client_ends[1].transport
        self.reactor.advance(PUSH_TIMEOUT / 2)
        late = self.push("b")
        self.reactor.advance(PUSH_TIMEOUT / 2)
        self.assertTrue(transport.disconnected)
        self.disconnect()
        self.assertEqual([self.successResultOf(one) for one in (early, late)], [False, False])

    def test_slow_but_answering(self) -> None:
        """Each push has the whole time."""
        self.connect()
        self.push("a")
        self.reactor.advance(0.75 * PUSH_TIMEOUT)
        self.transfer()
        self.push("b")
        self.reactor.advance(0.75 * PUSH_TIMEOUT)
        self.assertFalse(self.client_ends[1].transport.disconnected)
        self.transfer()
        self.reactor.advance(PUSH_TIMEOUT)
        self.assertEqual((self.delivery.pending, self.reactor.getDelayedCalls()), ((0, 0), []))

    def test_flood(self) -> None:
        """Numbers and bytes of what is not answered are limited; one push always fits."""
        self.connect()
        for number in range(MAX_OUTSTANDING):
            self.push(str(number))
        self.assertIs(self.successResultOf(self.push("more")), False)
        self.assertEqual((self.outcomes, self.delivery.pending[0]), ({"dropped": 1}, MAX_OUTSTANDING))
        while self.delivery.pending[0]:
            self.transfer()
        self.patch(sibling_channel, "MAX_OUTSTANDING_BYTES", 100)
        self.assertNoResult(self.push("large", bytes(1000)))
        self.assertIs(self.successResultOf(self.push("more")), False)
        self.assertLess(MAX_SENT_PAYLOAD_BYTES, MAX_OUTSTANDING_BYTES)

    def test_end(self) -> None:
        """Nothing is waited for, and nobody connected to."""
        self.connect()
        taken = self.push()
        self.delivery.end()
        self.disconnect()
        self.assertIs(self.successResultOf(taken), False)
        self.delivery.connect()
        self.assertEqual((self.reactor.getDelayedCalls(), self.reactor.unixClients), ([], []))

    def test_push_after_the_end(self) -> None:
        """As without a connection, though it may yet exist."""
        self.connect()
        self.delivery.end()
        self.assertIs(self.successResultOf(self.push()), False)
        self.delivery.notify_contracts_changed(BOB)
        self.assertEqual((self.outcomes, self.reactor.getDelayedCalls()), ({"failed": 1}, []))
        self.assertEqual(self.client_ends[1].transport.value(), b"")


class ContractChangeTests(SiblingChannelTestCase):
    """Nothing in the store says later that contracts have changed."""

    def test_notified_once(self) -> None:
        """Once, also after the next connection."""
        self.connect()
        self.delivery.notify_contracts_changed(BOB)
        self.transfer()
        self.disconnect()
        self.reactor.advance(RECONNECT_DELAY)
        self.connect()
        self.transfer()
        self.assertEqual(self.pushes[1].notified, [BOB])

    def test_repeated_until_answered(self) -> None:
        """A change that the worker did not confirm is repeated when it is connected again."""
        self.delivery.notify_contracts_changed(BOB)
        self.connect()
        self.disconnect()
        self.reactor.advance(RECONNECT_DELAY)
        self.connect()
        self.transfer()
        self.assertEqual(self.pushes[1].notified, [BOB])

    def test_store_outage(self) -> None:
        """The worker has confirmed the change and asks the store again."""
        self.connect()
        self.registered = None
        self.delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.transfer(), [b"1"])
        self.assertEqual(self.pushes[1].notified, [])
        self.registered = {BOB}
        self.reactor.advance(CHANGED_RETRY_DELAY)
        self.assertEqual(self.pushes[1].notified, [BOB])

    def test_expired_registration(self) -> None:
        """Nobody is notified any more."""
        self.connect()
        self.registered = set()
        self.delivery.notify_contracts_changed(BOB)
        self.transfer()
        self.assertEqual(self.pushes[1].notified, [])

    def test_link_is_full(self) -> None:
        """A change that there was no room for is sent when there is."""
        self.connect()
        self.patch(sibling_channel, "MAX_OUTSTANDING", 1)
        self.push()
        self.delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.delivery.pending[0], 2)
        self.transfer()
        self.transfer()
        self.assertEqual((self.pushes[1].notified, self.outcomes), ([BOB], {"pushed": 2}))

    def test_dropped_while_the_store_is_asked(self) -> None:
        """A flood of changes does not end the notification of those before."""
        self.patch(sibling_channel, "MAX_CHANGED", 2)
        dids = [f"did:x:{number}" for number in range(4)]
        self.registered, self.asked = dids, (asked := Deferred[None]())
        self.pushes[1].live_dids.update(dids)
        self.connect()
        for did in dids:
            self.counters[1].add(did)
            self.delivery.notify_contracts_changed(did)
        self.transfer()
        asked.callback(None)
        self.assertEqual(self.pushes[1].notified, ["did:x:0", "did:x:2", "did:x:3"])
        self.assertEqual((self.outcomes, self.servers[1].late), ({"pushed": 2, "dropped": 2}, 0))

    def test_limit(self) -> None:
        """The oldest changes are dropped and counted."""
        self.patch(sibling_channel, "MAX_CHANGED", 2)
        self.registered = [f"did:x:{number}" for number in range(3)]
        self.pushes[1].live_dids.update(self.registered)
        for did in self.registered:
            self.counters[1].add(did)
            self.delivery.notify_contracts_changed(did)
        self.connect()
        self.transfer()
        self.assertEqual((self.pushes[1].notified, self.outcomes["dropped"]), (["did:x:1", "did:x:2"], 1))


class SeveralWorkersTests(SiblingChannelTestCase):
    workers = 3

    def test_one_of_two_may_yet_take_it(self) -> None:
        """One reads it from the store first: that no socket takes it is known only without that."""
        self.connect()
        self.pushes[2].live_dids.clear()
        for expected in (None, False):
            taken = self.push(str(expected))
            self.reactor.advance(1.5 * MAX_PUSH_AGE)
            self.transfer()
            self.assertIs(self.successResultOf(taken), expected)
            self.pushes[1].live_dids.clear()

    def test_one_of_two_takes_it(self) -> None:
        """It is known as soon as one does, and that none does once all have answered."""
        self.connect()
        for takes in (True, False):
            self.pushes[1].takes, self.pushes[2].takes = False, takes
            taken = self.push(str(takes))
            self.transfer()
            self.assertIs(self.successResultOf(taken), takes)

    def test_stopped_worker_holds_nobody_up(self) -> None:
        """The other one gets it, and it is known at once."""
        self.connect()
        stopped = self.client_ends.pop(1)
        taken = self.push()
        self.transfer()
        self.assertIs(self.successResultOf(taken), True)
        self.client_ends[1] = stopped


class CredentialTests(SiblingChannelTestCase):
    def test_process_of_another_user(self) -> None:
        """Neither end talks to it."""
        self.patch(sibling_channel, "is_own_user", lambda connection: False)
        self.connect()
        for ends in (self.client_ends, self.server_ends):
            self.assertTrue(ends[1].transport.disconnected)
            self.assertEqual(ends[1].transport.value(), b"")
        self.server_ends[1].dataReceived(b"\0\0\0\x010")
        self.assertEqual(self.greeted, [])

    def test_refusals_are_not_logged_at_every_attempt(self) -> None:
        """Once by each end, however often the other one tries."""
        self.patch(sibling_channel, "is_own_user", lambda connection: False)
        logged: list[Any] = []
        self.patch(sibling_channel, "_log", SimpleNamespace(error=lambda text, **more: logged.append(text)))
        for _ in range(3):
            self.connect()
            self.disconnect()
            self.reactor.advance(RECONNECT_DELAY)
        self.assertEqual(len(logged), 2)

    def test_other_version(self) -> None:
        """A worker with another version gets no pushes."""
        self.accept()
        hello = HELLO.replace(b"2", b"1")
        self.client_ends[1].dataReceived(len(hello).to_bytes(4, "big") + hello)
        self.assertTrue(self.client_ends[1].transport.disconnected)
        self.assertIs(self.successResultOf(self.push()), False)

    def test_frame_that_is_too_long(self) -> None:
        """The connection is closed."""
        self.connect()
        self.server_ends[1].dataReceived(b"\xff" * 4)
        self.assertTrue(self.server_ends[1].transport.disconnected)

    def test_credentials_of_the_kernel(self) -> None:
        """The user of the process at the other end."""
        self.patch(sibling_channel, "is_own_user", is_own_user)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.assertTrue(is_own_user(ours))
            self.patch(os, "geteuid", lambda: os.getuid() + 1)
            self.assertFalse(is_own_user(theirs))

    def test_listener(self) -> None:
        """The socket is for its user alone; others are connected to once it listens."""
        path = Path("/nowhere/1.sock")
        self.reactor.unixClients.clear()
        for link in self.delivery._links.values():
            link._connector = None
        listener = SiblingListener(self.reactor, path, self.servers[0], self.delivery)
        listener.startService()
        ((address, factory, _, mode, _),) = self.reactor.unixServers
        self.assertEqual((address, factory, mode), (str(path), self.servers[0], 0o600))
        self.assertEqual(len(self.reactor.unixClients), 1)
        self.successResultOf(listener.stopService())
