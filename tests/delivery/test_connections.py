"""The connection manager (UC-021)."""

from math import inf

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import (
    MAX_DIDS_PER_SOCKET,
    ConnectionManager,
    TooManySubscriptions,
    WebSocketSession,
)

PHONE, LAPTOP = "did:a:phone", "did:a:laptop"


class FakeSocket:
    """A socket that notes what it was told."""

    def __init__(self, client: str = "192.0.2.1") -> None:
        self.client = client
        self.name = "fake"
        self.codes: list[int] = []

    def send(self, frame: bytes) -> bool:
        """Take anything."""
        return True

    def close(self, code: int, reason: str) -> None:
        """Note the code."""
        self.codes.append(code)


class ConnectionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[str] = ConnectionManager(max_per_peer=2)
        self.connections.startService()

    def open(self, client: str = "192.0.2.1") -> FakeSocket:
        socket = FakeSocket(client)
        self.connections.opened(socket)
        return socket

    def test_several_sockets_for_one_did(self) -> None:
        """Desktop and phone of one identity both get what comes for it."""
        first, second = self.open(), self.open()
        self.connections.subscribe(first, PHONE, "x")
        self.connections.subscribe(second, PHONE, "y")
        self.assertEqual(self.connections.subscribers(PHONE), [(first, "x"), (second, "y")])

    def test_several_dids_on_one_socket(self) -> None:
        """A socket may serve several DIDs, each with a reader of its own."""
        socket = self.open()
        self.connections.subscribe(socket, PHONE, "x")
        self.connections.subscribe(socket, LAPTOP, "y")
        self.assertEqual(self.connections.subscribers(LAPTOP), [(socket, "y")])
        self.connections.unsubscribe(socket, PHONE)
        self.assertFalse(self.connections.is_subscribed(socket, PHONE))
        self.assertTrue(self.connections.is_subscribed(socket, LAPTOP))

    def test_too_many_dids_on_one_socket(self) -> None:
        """No more than some, so that one socket is not the work of thousands; there is room when it gives one up."""
        socket, other = self.open(), self.open()
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

    def test_closing_one_socket_leaves_the_others(self) -> None:
        """The second socket of a DID goes on when the first is gone."""
        first, second = self.open(), self.open()
        for socket in (first, second):
            self.connections.subscribe(socket, PHONE, "x")
        self.connections.closed(first)
        self.assertEqual(self.connections.subscribers(PHONE), [(second, "x")])
        self.assertEqual(len(self.connections), 1)

    def test_closing_is_told_once(self) -> None:
        """However often a transport reports the end, listeners hear of it once."""
        gone: list[WebSocketSession] = []
        self.connections.on_close(gone.append)
        socket = self.open()
        self.connections.closed(socket)
        self.connections.closed(socket)
        self.assertEqual(gone, [socket])

    def test_sockets_per_address_are_limited(self) -> None:
        """A third socket of one address has no room; another address has, and so has the first again later."""
        first, _ = self.open(), self.open()
        self.assertFalse(self.connections.has_room("192.0.2.1"))
        self.assertTrue(self.connections.has_room("192.0.2.2"))
        self.connections.closed(first)
        self.assertTrue(self.connections.has_room("192.0.2.1"))

    def test_a_socket_that_is_gone_cannot_subscribe(self) -> None:
        """An answer that comes too late leaves nothing behind."""
        socket = self.open()
        self.connections.closed(socket)
        self.successResultOf(self.connections.subscribe(socket, PHONE, "x"))
        self.successResultOf(self.connections.announce_subscription(socket, PHONE))
        self.assertEqual(self.connections.subscribers(PHONE), [])

    def test_stopping_closes_with_1001_and_waits(self) -> None:
        """Every socket is told that we go away; stopping is done when the last is gone."""
        first, second = self.open(), self.open("192.0.2.2")
        stopped = self.connections.stopService()
        self.assertEqual((first.codes, second.codes), ([1001], [1001]))
        self.connections.closed(first)
        self.assertNoResult(stopped)
        self.connections.closed(second)
        self.assertIsNone(self.successResultOf(stopped))

    def test_while_stopping_no_socket_is_welcome(self) -> None:
        """A handshake that was under way ends with 1001 as well."""
        keep = self.open()
        self.connections.stopService()
        self.assertTrue(self.connections.draining)
        late = self.open("192.0.2.9")
        self.assertEqual(late.codes, [1001])
        self.connections.closed(keep)

    def test_nobody_to_tell(self) -> None:
        """With a single process there is nothing to wait for."""
        socket = self.open()
        self.successResultOf(self.connections.announce_subscription(socket, PHONE))
        self.assertEqual(self.connections.subscribers(PHONE), [])
        self.successResultOf(self.connections.subscribe(socket, PHONE, "x"))
        self.connections.unsubscribe(socket, PHONE)
        self.connections.unsubscribe(socket, PHONE)

    def test_live(self) -> None:
        """The DIDs that somebody is subscribed to, by what the readers are."""
        socket = self.open()
        self.connections.subscribe(socket, PHONE, "x")
        self.connections.subscribe(socket, LAPTOP, "y")
        self.connections.announce_subscription(socket, "did:a:tablet")
        self.assertEqual(self.connections.live(lambda reader: reader == "x"), [PHONE])
        self.assertEqual(self.connections.live(lambda reader: True), [PHONE, LAPTOP])


class FakePresencePublisher:
    """Notes what a presence publisher is given; the test says when others know."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.known: Deferred[None] = Deferred()

    def add(self, did: str) -> Deferred[None]:
        """Noted."""
        self.told.append(("here", did))
        return self.known

    def remove(self, did: str) -> None:
        """Noted."""
        self.told.append(("gone", did))


class PublishedPresenceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[str] = ConnectionManager(max_per_peer=5)
        self.town, self.clock = FakePresencePublisher(), Clock()
        self.connections.set_presence_publisher(self.town, self.clock)
        self.connections.startService()

    def open(self) -> FakeSocket:
        """One more socket."""
        socket = FakeSocket()
        self.connections.opened(socket)
        return socket

    def test_until_others_know(self) -> None:
        """A socket is pushed to at once; that others know is something to wait for."""
        socket = self.open()
        known = self.connections.subscribe(socket, PHONE, "x")
        self.assertEqual(self.connections.subscribers(PHONE), [(socket, "x")])
        self.assertNoResult(known)
        self.town.known.callback(None)
        self.successResultOf(known)

    def test_the_last_one(self) -> None:
        """Nobody is told before the last socket of a DID is gone, and then once."""
        first, second = self.open(), self.open()
        for socket in (first, second):
            self.connections.subscribe(socket, PHONE, "x")
        self.connections.unsubscribe(first, PHONE)
        self.connections.unsubscribe(first, PHONE)
        self.assertNotIn(("gone", PHONE), self.town.told)
        self.connections.closed(second)
        self.connections.closed(second)
        self.assertEqual(self.town.told, [("here", PHONE), ("here", PHONE), ("gone", PHONE)])

    def test_expected(self) -> None:
        """A socket that is expected to subscribe counts for others and is not pushed to, also if it never does."""
        socket = self.open()
        self.connections.announce_subscription(socket, PHONE)
        self.assertEqual((self.town.told, self.connections.subscribers(PHONE)), ([("here", PHONE)], []))
        self.assertFalse(self.connections.is_subscribed(socket, PHONE))
        self.connections.closed(socket)
        self.assertEqual(self.town.told[-1], ("gone", PHONE))

    def test_since(self) -> None:
        """Who subscribed after a message came can be left out; to subscribe once more changes nothing."""
        early, late = self.open(), self.open()
        self.connections.subscribe(early, PHONE, "x")
        self.clock.advance(10)
        self.connections.subscribe(late, PHONE, "y")
        self.clock.advance(10)
        self.connections.subscribe(early, PHONE, "z")
        self.assertEqual(self.connections.subscribers(PHONE, by=5), [(early, "z")])
        self.assertEqual(self.connections.subscribers(PHONE, by=-1), [])
        self.assertEqual(len(self.connections.subscribers(PHONE, by=inf)), 2)
        self.connections.unsubscribe(early, PHONE)
        self.connections.subscribe(early, PHONE, "x")
        self.assertEqual(self.connections.subscribers(PHONE, by=19), [(late, "y")])

    def test_since_before_a_clock_was_set_back(self) -> None:
        """Nobody is left out who has been there all the time."""
        socket = self.open()
        self.clock.advance(100)
        self.connections.subscribe(socket, PHONE, "x")
        self.clock.rightNow -= 50
        self.assertEqual(self.connections.subscribers(PHONE, by=49), [(socket, "x")])
