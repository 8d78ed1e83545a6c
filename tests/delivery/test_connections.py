"""The connection manager (UC-021)."""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import (
    MAX_DIDS_PER_SOCKET,
    ConnectionManager,
    LiveDispatcher,
    TooManySubscriptions,
    WebSocketSession,
)

PHONE, LAPTOP = "did:a:phone", "did:a:laptop"


class FakeSocket:
    """Socket that records calls."""

    def __init__(self, client: str = "192.0.2.1") -> None:
        self.client = client
        self.name = "fake"
        self.codes: list[int] = []

    def send(self, frame: bytes) -> bool:
        """Accept any frame."""
        return True

    def send_with_receipt(self, frame: bytes, on_receipt: Callable[[], None]) -> bool:
        """Accept any frame; there is never a receipt."""
        return True

    def close(self, code: int, reason: str) -> None:
        """Record the code."""
        self.codes.append(code)


class ConnectionManagerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[str] = ConnectionManager(max_per_peer=2)
        self.connections.startService()

    def open_socket(self, client: str = "192.0.2.1") -> FakeSocket:
        socket = FakeSocket(client)
        self.connections.opened(socket)
        return socket

    def test_several_sockets_for_one_did(self) -> None:
        """Two devices of one identity both get its messages."""
        first, second = self.open_socket(), self.open_socket()
        self.connections.subscribe(first, PHONE, "x")
        self.connections.subscribe(second, PHONE, "y")
        self.assertEqual(self.connections.subscribers(PHONE), [(first, "x"), (second, "y")])

    def test_several_dids_on_one_socket(self) -> None:
        """A socket may serve several DIDs, each with its own reader."""
        socket = self.open_socket()
        self.connections.subscribe(socket, PHONE, "x")
        self.connections.subscribe(socket, LAPTOP, "y")
        self.assertEqual(self.connections.subscribers(LAPTOP), [(socket, "y")])
        self.connections.unsubscribe(socket, PHONE)
        self.assertFalse(self.connections.is_subscribed(socket, PHONE))
        self.assertTrue(self.connections.is_subscribed(socket, LAPTOP))

    def test_dids_per_socket_are_limited(self) -> None:
        """A socket serves a limited number of DIDs; unsubscribing makes room."""
        socket, other = self.open_socket(), self.open_socket()
        dids = [f"did:a:{number}" for number in range(MAX_DIDS_PER_SOCKET + 1)]
        for did in dids[:-1]:
            self.successResultOf(self.connections.subscribe(socket, did, "x"))
        self.failureResultOf(self.connections.subscribe(socket, dids[-1], "x"), TooManySubscriptions)
        self.failureResultOf(self.connections.announce_subscription(socket, dids[-1]), TooManySubscriptions)
        self.assertEqual(self.connections.subscribers(dids[-1]), [])
        self.successResultOf(self.connections.subscribe(socket, dids[0], "y"))
        self.successResultOf(self.connections.subscribe(other, dids[-1], "x"))
        self.connections.unsubscribe(socket, dids[0])
        self.successResultOf(self.connections.subscribe(socket, dids[-1], "x"))
        self.assertTrue(self.connections.is_subscribed(socket, dids[-1]))

    def test_closing_one_socket_keeps_others(self) -> None:
        """The second socket of a DID goes on when the first is closed."""
        first, second = self.open_socket(), self.open_socket()
        for socket in (first, second):
            self.connections.subscribe(socket, PHONE, "x")
        self.connections.closed(first)
        self.assertEqual(self.connections.subscribers(PHONE), [(second, "x")])
        self.assertEqual(len(self.connections), 1)

    def test_listeners_are_called_once(self) -> None:
        """However often a transport reports the end, listeners are called once."""
        closed: list[WebSocketSession] = []
        self.connections.on_close(closed.append)
        socket = self.open_socket()
        self.connections.closed(socket)
        self.connections.closed(socket)
        self.assertEqual(closed, [socket])

    def test_sockets_per_address_are_limited(self) -> None:
        """A third socket of one address is refused; other addresses are not, nor is a later one."""
        first, _ = self.open_socket(), self.open_socket()
        self.assertFalse(self.connections.has_room("192.0.2.1"))
        self.assertTrue(self.connections.has_room("192.0.2.2"))
        self.connections.closed(first)
        self.assertTrue(self.connections.has_room("192.0.2.1"))

    def test_closed_socket_cannot_subscribe(self) -> None:
        """A subscription that comes too late leaves nothing behind."""
        socket = self.open_socket()
        self.connections.closed(socket)
        self.successResultOf(self.connections.subscribe(socket, PHONE, "x"))
        self.successResultOf(self.connections.announce_subscription(socket, PHONE))
        self.assertEqual(self.connections.subscribers(PHONE), [])

    def test_stop_closes_sockets_and_waits(self) -> None:
        """Every socket is closed with 1001; stopping ends when the last is gone."""
        first, second = self.open_socket(), self.open_socket("192.0.2.2")
        stopped = self.connections.stopService()
        self.assertEqual((first.codes, second.codes), ([1001], [1001]))
        self.connections.closed(first)
        self.assertNoResult(stopped)
        self.connections.closed(second)
        self.assertIsNone(self.successResultOf(stopped))

    def test_new_sockets_are_closed_while_stopping(self) -> None:
        """A handshake that completes meanwhile is closed with 1001 too."""
        keep = self.open_socket()
        self.connections.stopService()
        self.assertTrue(self.connections.draining)
        new_socket = self.open_socket("192.0.2.9")
        self.assertEqual(new_socket.codes, [1001])
        self.connections.closed(keep)

    def test_single_process_publishes_nothing(self) -> None:
        """A single process does not wait for presence."""
        socket = self.open_socket()
        self.successResultOf(self.connections.announce_subscription(socket, PHONE))
        self.assertEqual(self.connections.subscribers(PHONE), [])
        self.successResultOf(self.connections.subscribe(socket, PHONE, "x"))
        self.connections.unsubscribe(socket, PHONE)
        self.connections.unsubscribe(socket, PHONE)

    def test_lists_live_dids_by_protocol(self) -> None:
        """The subscribed DIDs, by the class of the readers."""
        socket = self.open_socket()
        self.connections.subscribe(socket, PHONE, "x")
        self.connections.subscribe(socket, LAPTOP, "y")
        self.connections.announce_subscription(socket, "did:a:tablet")
        self.assertEqual(self.connections.live(lambda reader: reader == "x"), [PHONE])
        self.assertEqual(self.connections.live(lambda reader: True), [PHONE, LAPTOP])


class FakePresencePublisher:
    """Records calls; the test says when presence is published."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.published: Deferred[None] = Deferred()

    def add(self, did: str) -> Deferred[None]:
        """Recorded."""
        self.calls.append(("here", did))
        return self.published

    def remove(self, did: str) -> None:
        """Recorded."""
        self.calls.append(("gone", did))


class FakeItem(NamedTuple):
    """What a dispatcher reads of a message."""

    id: str
    account: str = ""


class LiveDispatcherTests(SynchronousTestCase):
    def test_unknown_result(self) -> None:
        """What another worker may yet push goes to no endpoint, which would get it a second time."""
        failed_over: list[FakeItem] = []
        results: list[bool] = []
        taken: dict[str, bool | None] = {"taken": True, "refused": False, "late": None}
        dispatcher = LiveDispatcher[FakeItem](
            lambda items: (), lambda item: succeed(taken[item.id]), failed_over.append
        )
        for id_ in taken:
            dispatcher.dispatch(FakeItem(id_), results.append)
        self.assertEqual((results, failed_over), ([True, False, False], [FakeItem("refused")]))

    def test_several_items_are_pushed_together(self) -> None:
        """In one call; what no socket took fails over by itself."""
        pushes: list[list[str]] = []
        failed_over: list[FakeItem] = []

        def push(items: Sequence[FakeItem]) -> list[str]:
            pushes.append([item.id for item in items])
            return pushes[-1][:1]

        LiveDispatcher[FakeItem](push, None, failed_over.append).dispatch_all([FakeItem("a"), FakeItem("b")])
        self.assertEqual((pushes, failed_over), ([["a", "b"]], [FakeItem("b")]))

    def test_fails_over_for_some_accounts(self) -> None:
        """Only what is for accounts with a certain prefix fails over, if there is one."""
        failed_over: list[FakeItem] = []
        items = [FakeItem("a", "did:key:z6Mk"), FakeItem("b", "did:peer:2.Ez6LS"), FakeItem("c", "did:key:z6LS")]
        dispatcher = LiveDispatcher[FakeItem](lambda items: (), None, failed_over.append)
        dispatcher.fail_over_prefix = "did:key:z6Mk"
        dispatcher.dispatch_all(items)
        self.assertEqual(failed_over, items[:1])
        dispatcher.fail_over_prefix = ""
        dispatcher.dispatch_all(items)
        self.assertEqual(failed_over, [items[0], *items])


class PublishedPresenceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[str] = ConnectionManager(max_per_peer=5)
        self.town, self.clock = FakePresencePublisher(), Clock()
        self.connections.set_presence_publisher(self.town, self.clock)
        self.connections.startService()

    def open_socket(self) -> FakeSocket:
        """Open a further socket."""
        socket = FakeSocket()
        self.connections.opened(socket)
        return socket

    def test_subscription_waits_for_publication(self) -> None:
        """A socket is pushed to at once; the publication can be awaited."""
        socket = self.open_socket()
        published = self.connections.subscribe(socket, PHONE, "x")
        self.assertEqual(self.connections.subscribers(PHONE), [(socket, "x")])
        self.assertNoResult(published)
        self.town.published.callback(None)
        self.successResultOf(published)

    def test_last_socket_withdraws_presence(self) -> None:
        """Presence is withdrawn once, after the last socket of a DID."""
        first, second = self.open_socket(), self.open_socket()
        for socket in (first, second):
            self.connections.subscribe(socket, PHONE, "x")
        self.connections.unsubscribe(first, PHONE)
        self.connections.unsubscribe(first, PHONE)
        self.assertNotIn(("gone", PHONE), self.town.calls)
        self.connections.closed(second)
        self.connections.closed(second)
        self.assertEqual(self.town.calls, [("here", PHONE), ("here", PHONE), ("gone", PHONE)])

    def test_expected_subscription(self) -> None:
        """A socket that is expected to subscribe is published and not pushed to, also if it never subscribes."""
        socket = self.open_socket()
        self.connections.announce_subscription(socket, PHONE)
        self.assertEqual((self.town.calls, self.connections.subscribers(PHONE)), ([("here", PHONE)], []))
        self.assertFalse(self.connections.is_subscribed(socket, PHONE))
        self.connections.closed(socket)
        self.assertEqual(self.town.calls[-1], ("gone", PHONE))

    def test_subscribers_since(self) -> None:
        """Sockets that subscribed after a message can be excluded; repeating a subscription changes nothing."""
        first, second = self.open_socket(), self.open_socket()
        self.connections.subscribe(first, PHONE, "x")
        self.clock.advance(10)
        self.connections.subscribe(second, PHONE, "y")
        self.clock.advance(10)
        self.connections.subscribe(first, PHONE, "z")
        self.assertEqual(self.connections.subscribers(PHONE, by=5), [(first, "z")])
        self.assertEqual(self.connections.subscribers(PHONE, by=-1), [])
        self.assertEqual(len(self.connections.subscribers(PHONE, by=inf)), 2)
        self.connections.unsubscribe(first, PHONE)
        self.connections.subscribe(first, PHONE, "x")
        self.assertEqual(self.connections.subscribers(PHONE, by=19), [(second, "y")])

    def test_subscribers_since_after_clock_set_back(self) -> None:
        """Sockets subscribed all the time are not excluded."""
        socket = self.open_socket()
        self.clock.advance(100)
        self.connections.subscribe(socket, PHONE, "x")
        self.clock.rightNow -= 50
        self.assertEqual(self.connections.subscribers(PHONE, by=49), [(socket, "x")])
