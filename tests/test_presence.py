"""The connection manager (UC-021)."""

from twisted.trial.unittest import SynchronousTestCase

from mediatord.presence import Connections, Session

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
        self.connections: Connections[str] = Connections(max_per_peer=2)
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
        gone: list[Session] = []
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
        self.connections.subscribe(socket, PHONE, "x")
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
