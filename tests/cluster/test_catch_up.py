"""Nothing is lost that a hint was lost of: whatever clocks say, whatever others did, and however much there is."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, succeed

from mediatord.cluster import anti_entropy, duplicate_push_prevention
from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, MIN_MESSAGE_AGE, SCAN_WINDOW
from mediatord.cluster.peer_notifications import MAX_COMMIT_DELAY, MAX_VISIBILITY_DELAY
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW as CLOCKS_DIFFER
from mediatord.store.interfaces.messages import StoredMessage
from tests.cluster.test_didcomm_cluster import DIDCommClusterTestCase
from tests.in_memory_mediator import MP, FakeSocket, InMemoryWallet

SOON = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1


class _Wrong:
    """A clock that goes wrong by so many seconds."""

    def __init__(self, clock: Any, error: float) -> None:
        self._clock = clock
        self._error = error

    def seconds(self) -> float:
        return float(self._clock.seconds() + self._error)


class CatchUpTestCase(DIDCommClusterTestCase):
    """Hints can be lost."""

    def deaf(self, is_deaf: bool = True) -> None:
        """Whether no node hears of another."""
        self.network.cut = lambda node: is_deaf

    def forward_by(self, error: float, text: str) -> None:
        """Leave something at a node whose clock is wrong by so much."""
        clock = self.store._clock
        self.store._clock = _Wrong(clock, error)
        try:
            self.forward(self.a, text)
        finally:
            self.store._clock = clock

    def heard(self, socket: FakeSocket) -> list[str]:
        """What was pushed, in any order."""
        return sorted(self.texts(socket))


class DelayedTests(CatchUpTestCase):
    def test_lost_hint(self) -> None:
        """What was delayed for longer than rounds look back counts from when it was due."""
        socket = self.live_at(self.b)
        self.forward(self.a, "late", delay_milli=2000 * SCAN_WINDOW)
        self.deaf()
        self.later(2 * SCAN_WINDOW + SOON)
        self.assertEqual(self.texts(socket), ["late"])
        self.later(3 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_node_dies_with_it(self) -> None:
        """Another one finds what was taken from the store and not handed over."""
        socket = self.live_at(self.b)
        self.forward(self.a, "late", delay_milli=2000 * SCAN_WINDOW)
        taken: list[StoredMessage] = []
        for in_memory in (self.a, self.b):
            in_memory.didcomm.due._dispatch = taken.append
        self.later(2 * SCAN_WINDOW + 2)
        self.assertEqual((len(taken), self.texts(socket)), (1, []))
        self.a.freeze()
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["late"])

    def test_no_backlog(self) -> None:
        """What was due before the socket was there waits to be asked for."""
        self.forward(self.a, "late", delay_milli=1000)
        self.later(1 + MAX_VISIBILITY_DELAY + 1)
        socket = self.live_at(self.b)
        self.later(SCAN_WINDOW + SOON)
        self.assertEqual(self.texts(socket), [])


class MembershipTests(CatchUpTestCase):
    def test_name(self) -> None:
        """What the log calls the tasks if they do not stop in time."""
        self.assertIn("cluster tasks", [service.name for service in self.a.services])

    def test_no_member(self) -> None:
        """A node looks for what it was not notified of, and for dead ones, only while it is a member."""
        asked: list[object] = []

        def note(*args: object, **options: object) -> Deferred[list[Any]]:
            asked.append(args)
            return succeed([])

        self.patch(self.store, "find_arrivals", note)
        self.patch(self.store.cluster, "list_lapsed_nodes", note)
        self.live_at(self.a)
        asked.clear()
        self.a.membership._leave_cluster()
        self.b.membership._leave_cluster()
        self.clock.pump([1.0] * int(SOON))
        self.assertEqual(asked, [])
        for node in (self.a, self.b):
            node.membership._joined_at = 0.0
            node.cluster.node_health.joined()
        self.clock.pump([1.0] * int(SOON))
        self.assertGreater(len(asked), 1)


class RemotePushTests(CatchUpTestCase):
    settings = {"queue": {"delivered_timeout": "20s"}}

    def test_dead_socket_elsewhere(self) -> None:
        """A socket that nobody reads any more keeps nothing from those of other nodes."""
        self.live_at(self.a)
        socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        self.assertEqual(self.texts(socket), [])
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_not_over_and_over(self) -> None:
        """What was pushed here and is overdue, or whose socket is gone, is not pushed by each round."""
        self.live_at(self.a)
        first, second = self.live_at(self.b), self.live_at(self.b)
        self.forward(self.a)
        self.assertEqual((self.texts(first), self.texts(second)), (["hello"], ["hello"]))
        self.b.base.connections.closed(first)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(second), [])

    def test_acknowledged(self) -> None:
        """What was acknowledged is gone for everybody."""
        socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        (delivered,) = self.bob.fetch()
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])


class ClockTests(CatchUpTestCase):
    def test_slow_clock(self) -> None:
        """What came right after a socket, at a node that has the time of right before it, is pushed."""
        self.deaf()
        socket = self.live_at(self.b)
        self.later(MAX_COMMIT_DELAY)
        for error in (-2.0 * MAX_COMMIT_DELAY, -CLOCKS_DIFFER):
            self.forward_by(error, str(error))
        self.later(SOON)
        self.assertEqual(self.heard(socket), ["-5.0", "-60.0"])

    def test_slow_commit(self) -> None:
        """Likewise when it took its time to be written."""
        self.deaf()
        socket = self.live_at(self.b)
        self.forward_by(-MAX_VISIBILITY_DELAY, "slow")
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["slow"])

    def test_any_time(self) -> None:
        """However far clocks are apart, and whenever it comes between two rounds."""
        socket = self.live_at(self.b)
        self.later(MAX_VISIBILITY_DELAY + SCAN_WINDOW)
        self.deaf()
        expected = []
        for number in range(int(ANTI_ENTROPY_INTERVAL) + 1):
            for error in (-MAX_VISIBILITY_DELAY, -25.0, 0.0, 25.0, CLOCKS_DIFFER):
                expected.append(f"{number} {error}")
                self.forward_by(error, expected[-1])
            self.later(1)
        self.later(CLOCKS_DIFFER + SOON)
        self.assertEqual(self.heard(socket), sorted(expected))
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])


class BacklogTests(CatchUpTestCase):
    """What came before a socket is for the wallet to ask for, whatever the clocks say."""

    def test_no_backlog(self) -> None:
        """However shortly before, at this node or another."""
        for seconds in (30.0, 1.0, 0.0):
            self.forward(self.a, f"{seconds} a")
            self.forward(self.b, f"{seconds} b")
            self.later(seconds)
        socket = self.live_at(self.b)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual((self.texts(socket), self.bob.waiting()), ([], 6))

    def test_wrong_clocks(self) -> None:
        """Also what came at a node whose clock is ahead; and later ones are pushed though one is behind."""
        for error in (-30.0, CLOCKS_DIFFER):
            self.forward_by(error, f"before {error}")
        socket = self.live_at(self.b)
        self.deaf()
        self.forward_by(-30.0, "after")
        self.later(CLOCKS_DIFFER + SOON)
        self.assertEqual(self.texts(socket), ["after"])
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_picked_up_and_acknowledged(self) -> None:
        """A wallet that goes live, asks, and acknowledges much later gets each message once."""
        self.forward(self.a)
        self.later(30)
        socket = self.live_at(self.b)
        (delivered,) = self.bob_at_b.fetch(socket=socket)
        socket.frames.clear()
        self.later(22)
        self.assertEqual(self.texts(socket), [])
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_much(self) -> None:
        """More than the store says at once."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        self.patch(duplicate_push_prevention, "BATCH_SIZE", 3)
        for number in range(10):
            self.forward(self.a, str(number))
            self.later(number % 2)
        socket = self.live_at(self.b)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_hint_that_is_late(self) -> None:
        """What waited when the socket came is not pushed by a hint either."""
        self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        socket = self.live_at(self.b)
        self.deaf(False)
        self.later(SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_off_and_on(self) -> None:
        """What came while live mode was off is backlog."""
        socket = self.live_at(self.b)
        for live in (False, True):
            self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": live}, socket=socket)
            socket.frames.clear()
            self.forward(self.a, f"after {live}")
        self.later(SCAN_WINDOW)
        self.assertEqual(self.texts(socket), ["after True"])

    def test_on_again(self) -> None:
        """To switch it on twice changes nothing: what came in between is pushed."""
        socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        socket.frames.clear()
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_each_socket(self) -> None:
        """What is backlog to one is missing to the other."""
        early = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        late = self.live_at(self.b)
        self.later(SOON)
        self.assertEqual((self.texts(early), self.texts(late)), (["hello"], []))

    def test_not_known(self) -> None:
        """A store that does not say what waits is told to the wallet, which tries again."""
        self.forward(self.a)

        def away(*_: object) -> None:
            raise StoreUnavailable

        asked = self.patch(duplicate_push_prevention, "ArrivalWindow", away)
        socket = self.b.socket()
        reply = self.bob_at_b.ask(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        self.assertEqual(reply.status, 503)
        asked.restore()
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        socket.frames.clear()
        self.later(SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_forgotten(self) -> None:
        """Nothing is remembered of it when no round looks for it any more, or the socket is gone."""
        self.forward(self.a)
        connections = self.b.base.connections
        socket = self.live_at(self.b)
        self.assertEqual(len(connections.backlogs), 1)
        connections.closed(socket)
        self.assertEqual(len(connections.backlogs), 0)
        self.live_at(self.b)
        self.assertEqual(len(connections.backlogs), 1)
        self.later(SCAN_WINDOW + MAX_VISIBILITY_DELAY + 2 * ANTI_ENTROPY_INTERVAL)
        self.assertEqual(len(connections.backlogs), 0)


class LostPushTests(CatchUpTestCase):
    """What was pushed to nobody who acknowledges is not lost."""

    settings = {"queue": {"delivered_timeout": "20s"}}

    def test_socket_dies(self) -> None:
        """It waits for the wallet, which comes back at the other node, and is not taken for picked up."""
        socket = self.live_at(self.b)
        self.forward(self.a)
        self.b.base.connections.closed(socket)
        self.assertEqual(len(socket.frames), 1)
        again = self.live_at(self.a)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual((self.texts(again), self.bob.waiting()), ([], 1))
        (delivered,) = self.bob.fetch()
        self.assertEqual(self.bob.open(delivered.payload).text, "hello")

    def test_one_of_two_sockets_dies(self) -> None:
        """The other one gets it though its hint was lost."""
        dead, socket = self.live_at(self.a), self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        self.a.base.connections.closed(dead)
        self.later(SOON)
        self.assertEqual((len(dead.frames), self.texts(socket)), (1, ["hello"]))

    def test_node_dies(self) -> None:
        """With the socket that it had pushed to: the wallet comes back, and asks."""
        self.live_at(self.b)
        self.forward(self.a)
        self.b.freeze()
        again = self.live_at(self.a)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual((self.texts(again), len(self.bob.fetch())), ([], 1))


class PickupTests(CatchUpTestCase):
    """What a recipient has asked for and got counts as handed out, at every node."""

    settings = {"queue": {"delivered_timeout": "20s"}}

    def setUp(self) -> None:
        super().setUp()
        self.socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)

    def test_picked_up(self) -> None:
        """It is not pushed as well, wherever it was asked for."""
        for in_memory in (self.a, self.b):
            (delivered,) = InMemoryWallet(in_memory, self.bob.identity).fetch()
            self.later(19)
            self.assertEqual(self.texts(self.socket), [])
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(self.socket), [])
        self.assertEqual([event["path"] for event in self.a.events("msg.ack")], ["pickup"])

    def test_picked_up_in_vain(self) -> None:
        """What is not acknowledged in time is pushed, once."""
        self.bob.fetch()
        self.later(20)
        self.assertEqual(self.texts(self.socket), [])
        self.later(ANTI_ENTROPY_INTERVAL + 1)
        self.assertEqual(self.texts(self.socket), ["hello"])
        self.later(2 * SCAN_WINDOW)
        self.assertEqual((self.texts(self.socket), self.bob.waiting()), ([], 1))

    def test_nothing_is_recorded(self) -> None:
        """Without a record it is pushed as well; nobody waits for that, or is told."""
        with self.a.failing("record_pickups", StoreUnavailable()):
            self.assertEqual(len(self.bob.fetch()), 1)
        self.later(SOON)
        self.assertEqual(self.texts(self.socket), ["hello"])


class ManyTests(CatchUpTestCase):
    def test_of_one_time(self) -> None:
        """More of one time than one question is answered with."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        socket = self.live_at(self.b)
        self.deaf()
        texts = [f"{number:02}" for number in range(11)]
        for text in texts:
            self.forward(self.a, text)
        self.later(SOON)
        self.assertEqual(self.heard(socket), texts)

    def test_of_different_clocks(self) -> None:
        """In whichever order they have come."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        socket = self.live_at(self.b)
        self.later(SCAN_WINDOW)
        self.deaf()
        texts = [f"{number:02}" for number in range(20)]
        for number, text in enumerate(texts):
            self.forward_by(-(number * 7 % 20), text)
        self.later(SOON)
        self.assertEqual(self.heard(socket), texts)
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])
