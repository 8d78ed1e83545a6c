"""Messages whose notification was lost are delivered, with skewed clocks, failing nodes and large backlogs."""

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

NEXT_ROUND = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1


class _SkewedClock:
    """Clock with an adjustable error."""

    def __init__(self, clock: Any, error: float) -> None:
        self._clock = clock
        self._error = error

    def seconds(self) -> float:
        return float(self._clock.seconds() + self._error)


class CatchUpTestCase(DIDCommClusterTestCase):
    """Notifications can be dropped."""

    def drop_notifications(self, is_deaf: bool = True) -> None:
        """Whether nodes receive no notifications."""
        self.network.cut = lambda node: is_deaf

    def forward_with_skew(self, error: float, text: str) -> None:
        """Forward a message at a node whose clock has this error."""
        clock = self.store._clock
        self.store._clock = _SkewedClock(clock, error)
        try:
            self.forward(self.a, text)
        finally:
            self.store._clock = clock

    def read_sorted(self, socket: FakeSocket) -> list[str]:
        """Pushed texts, sorted."""
        return sorted(self.read_texts(socket))


class DelayedMessageTests(CatchUpTestCase):
    def test_lost_notification(self) -> None:
        """A message delayed beyond the anti-entropy window counts from its due time."""
        socket = self.open_live_socket(self.b)
        self.forward(self.a, "late", delay_milli=2000 * SCAN_WINDOW)
        self.drop_notifications()
        self.advance(2 * SCAN_WINDOW + NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["late"])
        self.advance(3 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_node_dies_with_due_message(self) -> None:
        """Another node finds a message that was taken as due and not dispatched."""
        socket = self.open_live_socket(self.b)
        self.forward(self.a, "late", delay_milli=2000 * SCAN_WINDOW)
        due: list[StoredMessage] = []
        for in_memory in (self.a, self.b):
            in_memory.didcomm.due._dispatch = due.extend
        self.advance(2 * SCAN_WINDOW + 2)
        self.assertEqual((len(due), self.read_texts(socket)), (1, []))
        self.a.freeze()
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["late"])

    def test_due_before_socket_is_backlog(self) -> None:
        """A message due before the socket subscribed is backlog."""
        self.forward(self.a, "late", delay_milli=1000)
        self.advance(1 + MAX_VISIBILITY_DELAY + 1)
        socket = self.open_live_socket(self.b)
        self.advance(SCAN_WINDOW + NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), [])


class MembershipTests(CatchUpTestCase):
    """Anti-entropy depends on membership."""

    def test_service_names(self) -> None:
        """The log names these tasks if they do not stop in time."""
        self.assertIn("cluster tasks", [service.name for service in self.a.services])

    def test_runs_only_as_member(self) -> None:
        """A node searches for missed messages and lapsed nodes only while it is a member."""
        calls: list[object] = []

        def note(*args: object, **options: object) -> Deferred[list[Any]]:
            calls.append(args)
            return succeed([])

        self.patch(self.store, "find_arrivals", note)
        self.patch(self.store.cluster, "list_lapsed_nodes", note)
        self.open_live_socket(self.a)
        calls.clear()
        self.a.membership._leave_cluster()
        self.b.membership._leave_cluster()
        self.clock.pump([1.0] * int(NEXT_ROUND))
        self.assertEqual(calls, [])
        for node in (self.a, self.b):
            node.membership._joined_at = 0.0
            node.cluster.node_health.joined()
        self.clock.pump([1.0] * int(NEXT_ROUND))
        self.assertGreater(len(calls), 1)


class RemotePushTests(CatchUpTestCase):
    settings = {"queue": {"delivered_timeout": "20s"}}

    def test_blocked_socket_elsewhere(self) -> None:
        """A blocked socket does not keep messages from sockets of other nodes."""
        self.open_live_socket(self.a)
        socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        self.assertEqual(self.read_texts(socket), [])
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_does_not_push_repeatedly(self) -> None:
        """A message pushed here that is overdue, or whose socket is gone, is not pushed by each round."""
        self.open_live_socket(self.a)
        first, second = self.open_live_socket(self.b), self.open_live_socket(self.b)
        self.forward(self.a)
        self.assertEqual((self.read_texts(first), self.read_texts(second)), (["hello"], ["hello"]))
        self.b.base.connections.closed(first)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(second), [])

    def test_acknowledged_message_is_gone(self) -> None:
        """An acknowledged message is gone for all nodes."""
        socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        (delivered,) = self.bob.fetch()
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])


class ClockSkewTests(CatchUpTestCase):
    def test_slow_clock(self) -> None:
        """A message stored right after a subscription by a node with a slow clock is pushed."""
        self.drop_notifications()
        socket = self.open_live_socket(self.b)
        self.advance(MAX_COMMIT_DELAY)
        for error in (-2.0 * MAX_COMMIT_DELAY, -CLOCKS_DIFFER):
            self.forward_with_skew(error, str(error))
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_sorted(socket), ["-5.0", "-60.0"])

    def test_slow_commit(self) -> None:
        """A message with a slow commit is pushed."""
        self.drop_notifications()
        socket = self.open_live_socket(self.b)
        self.forward_with_skew(-MAX_VISIBILITY_DELAY, "slow")
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["slow"])

    def test_any_skew_and_time(self) -> None:
        """Messages are pushed with any clock skew, at any time between two rounds."""
        socket = self.open_live_socket(self.b)
        self.advance(MAX_VISIBILITY_DELAY + SCAN_WINDOW)
        self.drop_notifications()
        expected = []
        for number in range(int(ANTI_ENTROPY_INTERVAL) + 1):
            for error in (-MAX_VISIBILITY_DELAY, -25.0, 0.0, 25.0, CLOCKS_DIFFER):
                expected.append(f"{number} {error}")
                self.forward_with_skew(error, expected[-1])
            self.advance(1)
        self.advance(CLOCKS_DIFFER + NEXT_ROUND)
        self.assertEqual(self.read_sorted(socket), sorted(expected))
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])


class BacklogTests(CatchUpTestCase):
    """A message older than a subscription is for the wallet to fetch, whatever the clocks say."""

    def test_backlog_is_not_pushed(self) -> None:
        """A message older than the socket is not pushed, at this node or another."""
        for seconds in (30.0, 1.0, 0.0):
            self.forward(self.a, f"{seconds} a")
            self.forward(self.b, f"{seconds} b")
            self.advance(seconds)
        socket = self.open_live_socket(self.b)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual((self.read_texts(socket), self.bob.count_queued()), ([], 6))

    def test_backlog_with_skewed_clocks(self) -> None:
        """The same at a node whose clock is fast; later messages are pushed though a clock is slow."""
        for error in (-30.0, CLOCKS_DIFFER):
            self.forward_with_skew(error, f"before {error}")
        socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward_with_skew(-30.0, "after")
        self.advance(CLOCKS_DIFFER + NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["after"])
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_each_message_once_with_late_acknowledgement(self) -> None:
        """A wallet that goes live, fetches and acknowledges much later gets each message once."""
        self.forward(self.a)
        self.advance(30)
        socket = self.open_live_socket(self.b)
        (delivered,) = self.bob_at_b.fetch(socket=socket)
        socket.frames.clear()
        self.advance(22)
        self.assertEqual(self.read_texts(socket), [])
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_large_backlog(self) -> None:
        """A backlog of several pages."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        self.patch(duplicate_push_prevention, "BATCH_SIZE", 3)
        for number in range(10):
            self.forward(self.a, str(number))
            self.advance(number % 2)
        socket = self.open_live_socket(self.b)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_late_notification_of_backlog(self) -> None:
        """A late notification does not push backlog either."""
        self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        socket = self.open_live_socket(self.b)
        self.drop_notifications(False)
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_live_mode_off_and_on(self) -> None:
        """Messages that arrive while live mode is off are backlog."""
        socket = self.open_live_socket(self.b)
        for live in (False, True):
            self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": live}, socket=socket)
            socket.frames.clear()
            self.forward(self.a, f"after {live}")
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), ["after True"])

    def test_live_mode_switched_on_twice(self) -> None:
        """Switching live mode on twice changes nothing: messages in between are pushed."""
        socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        socket.frames.clear()
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_backlog_is_per_socket(self) -> None:
        """Backlog of one socket is pushed to another that subscribed earlier."""
        first_socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        second_socket = self.open_live_socket(self.b)
        self.advance(NEXT_ROUND)
        self.assertEqual((self.read_texts(first_socket), self.read_texts(second_socket)), (["hello"], []))

    def test_unknown_backlog_is_an_error(self) -> None:
        """If the store cannot list the backlog the wallet gets an error and retries."""
        self.forward(self.a)

        def fail_unavailable(*_: object) -> None:
            raise StoreUnavailable

        patch = self.patch(duplicate_push_prevention, "ArrivalWindow", fail_unavailable)
        socket = self.b.socket()
        reply = self.bob_at_b.ask(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        self.assertEqual(reply.status, 503)
        patch.restore()
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        socket.frames.clear()
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])

    def test_forgets_backlog(self) -> None:
        """A backlog is forgotten when no round needs it, or with its socket."""
        self.forward(self.a)
        connections = self.b.base.connections
        socket = self.open_live_socket(self.b)
        self.assertEqual(len(connections.backlogs), 1)
        connections.closed(socket)
        self.assertEqual(len(connections.backlogs), 0)
        self.open_live_socket(self.b)
        self.assertEqual(len(connections.backlogs), 1)
        self.advance(SCAN_WINDOW + MAX_VISIBILITY_DELAY + 2 * ANTI_ENTROPY_INTERVAL)
        self.assertEqual(len(connections.backlogs), 0)


class LostPushTests(CatchUpTestCase):
    """Pushes that nobody acknowledges are not lost."""

    settings = {"queue": {"delivered_timeout": "20s"}}

    def test_socket_dies(self) -> None:
        """The message stays for the wallet, which reconnects at the other node; it does not count as picked up."""
        socket = self.open_live_socket(self.b)
        self.forward(self.a)
        self.b.base.connections.closed(socket)
        self.assertEqual(len(socket.frames), 1)
        new_socket = self.open_live_socket(self.a)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual((self.read_texts(new_socket), self.bob.count_queued()), ([], 1))
        (delivered,) = self.bob.fetch()
        self.assertEqual(self.bob.open(delivered.payload).text, "hello")

    def test_one_of_two_sockets_dies(self) -> None:
        """The other socket gets the message though its notification was lost."""
        dying, socket = self.open_live_socket(self.a), self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)
        self.a.base.connections.closed(dying)
        self.advance(NEXT_ROUND)
        self.assertEqual((len(dying.frames), self.read_texts(socket)), (1, ["hello"]))

    def test_node_dies(self) -> None:
        """The node dies with the socket: the wallet reconnects and fetches the message."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        self.b.freeze()
        new_socket = self.open_live_socket(self.a)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual((self.read_texts(new_socket), len(self.bob.fetch())), ([], 1))


class PickupTests(CatchUpTestCase):
    """Messages that a recipient has fetched count as delivered at every node."""

    settings = {"queue": {"delivered_timeout": "20s"}}

    def setUp(self) -> None:
        super().setUp()
        self.socket = self.open_live_socket(self.b)
        self.drop_notifications()
        self.forward(self.a)

    def test_picked_up_message_is_not_pushed(self) -> None:
        """A fetched message is not pushed as well, wherever it was fetched."""
        for in_memory in (self.a, self.b):
            (delivered,) = InMemoryWallet(in_memory, self.bob.identity).fetch()
            self.advance(19)
            self.assertEqual(self.read_texts(self.socket), [])
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(self.socket), [])
        self.assertEqual([event["path"] for event in self.a.events("msg.ack")], ["pickup"])

    def test_unacknowledged_pickup_is_pushed_once(self) -> None:
        """A fetched message that is not acknowledged in time is pushed, once."""
        self.bob.fetch()
        self.advance(20)
        self.assertEqual(self.read_texts(self.socket), [])
        self.advance(ANTI_ENTROPY_INTERVAL + 1)
        self.assertEqual(self.read_texts(self.socket), ["hello"])
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual((self.read_texts(self.socket), self.bob.count_queued()), ([], 1))

    def test_unrecorded_pickup_is_pushed(self) -> None:
        """If the pickup cannot be recorded the message is pushed as well; nobody waits for the record."""
        with self.a.failing("record_pickups", StoreUnavailable()):
            self.assertEqual(len(self.bob.fetch()), 1)
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(self.socket), ["hello"])


class ManyMessagesTests(CatchUpTestCase):
    def test_many_of_one_time(self) -> None:
        """More messages of one time than one query returns."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        socket = self.open_live_socket(self.b)
        self.drop_notifications()
        texts = [f"{number:02}" for number in range(11)]
        for text in texts:
            self.forward(self.a, text)
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_sorted(socket), texts)

    def test_many_of_different_clocks(self) -> None:
        """Messages of nodes with different clocks, in any order."""
        self.patch(anti_entropy, "BATCH_SIZE", 3)
        socket = self.open_live_socket(self.b)
        self.advance(SCAN_WINDOW)
        self.drop_notifications()
        texts = [f"{number:02}" for number in range(20)]
        for number, text in enumerate(texts):
            self.forward_with_skew(-(number * 7 % 20), text)
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_sorted(socket), texts)
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])
