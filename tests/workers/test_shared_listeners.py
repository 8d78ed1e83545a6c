"""Listening sockets that several processes share."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets are what this is about
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, UNIXClientEndpoint, serverFromString, wrapClientTLS
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import Certificate, optionsForClientTLS
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.control.server import ControlListener
from mediatord.errors import StartupError
from mediatord.net.listeners import Listener
from mediatord.workers.shared_listeners import InheritedSocketReactor, SharedListeners
from tests.certificate_authority import CertificateAuthority

reactor: Any = _reactor

# With room for all that a test connects.
LOOPBACK = "tcp:0:interface=127.0.0.1:backlog=100"
CONNECTIONS = 64
# A connection may be there for the client before it is for the server, on a busy machine long before.
PATIENCE_SECONDS = 60.0


class SharingTests(SynchronousTestCase):
    def sharing(self, *endpoints: str, count: int = 3) -> SharedListeners:
        """Bound, and closed again."""
        sharing = SharedListeners(reactor, endpoints, count)
        self.addCleanup(sharing.close)
        sharing.bind()
        return sharing

    def refusal(self, *endpoints: str) -> str:
        """Why these cannot be shared."""
        with self.assertRaises(StartupError) as caught:
            self.sharing(*endpoints)
        return str(caught.exception)

    def socket_of(self, sharing: SharedListeners, number: int, index: int = 0) -> socket.socket:
        """A worker's own copy of a socket."""
        copy = socket.socket(fileno=os.dup(sharing.descriptors(number)[index]))
        self.addCleanup(copy.close)
        return copy

    def families(self, sharing: SharedListeners) -> list[socket.AddressFamily]:
        """Of the sockets of one worker."""
        return [self.socket_of(sharing, 1, index).family for index in range(len(sharing.descriptors(1)))]

    def connected(self, address: Any) -> None:
        """Connect often enough that every worker has some."""
        for _ in range(CONNECTIONS):
            self.addCleanup(socket.create_connection(address[:2], PATIENCE_SECONDS).close)

    def test_each_has_its_own(self) -> None:
        """One address, a socket for each, and connections for each; none of them ever waits for one."""
        sharing = self.sharing(LOOPBACK)
        sockets = [self.socket_of(sharing, number) for number in range(3)]
        self.assertEqual(len({one.getsockname() for one in sockets}), 1)
        self.assertEqual([os.get_blocking(one.fileno()) for one in sockets], [False] * 3)
        self.connected(sockets[0].getsockname())
        numbers = waiting(*sockets)
        self.assertEqual(sum(numbers), CONNECTIONS)
        self.assertGreater(min(numbers), 0)

    def test_the_backlog_outlives_the_worker(self) -> None:
        """What nobody had accepted is there for whoever is given the socket next."""
        sharing = self.sharing(LOOPBACK, count=2)
        first = self.socket_of(sharing, 0)
        self.connected(first.getsockname())
        first.close()
        self.assertEqual(sum(waiting(self.socket_of(sharing, 0), self.socket_of(sharing, 1))), CONNECTIONS)

    def test_rest(self) -> None:
        """The others have all connections, until it wakes; the address stays ours even if all rest."""
        sharing = self.sharing(LOOPBACK, count=2)
        one, two = (self.socket_of(sharing, number) for number in (0, 1))
        address = one.getsockname()
        sharing.suspend(0)
        self.connected(address)
        self.assertEqual(waiting(two), [CONNECTIONS])
        sharing.suspend(1)
        self.assertRaises(ConnectionRefusedError, socket.create_connection, address, PATIENCE_SECONDS)
        with contextlib.closing(socket.socket()) as other:
            self.assertRaises(OSError, other.bind, address)
        sharing.resume(0)
        sharing.resume(1)
        self.connected(address)
        self.assertGreater(min(waiting(one, two)), 0)

    def test_address_taken(self) -> None:
        """By whomever, a second supervisor of the same user included, which the kernel would let in."""
        sharing = self.sharing(LOOPBACK)
        port = self.socket_of(sharing, 0).getsockname()[1]
        endpoint = f"tcp:{port}:interface=127.0.0.1"
        self.assertEqual(self.refusal(endpoint), f"cannot listen on {endpoint}: Address already in use")

    def test_nothing_is_left_of_a_refusal(self) -> None:
        """What was bound before the one that is taken is free again."""
        taken = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(taken.close)
        path = Path(self.directory()) / "s"
        self.refusal(f"unix:{path}:lockfile=0", f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1")
        self.assertFalse(path.exists())

    def test_ipv6(self) -> None:
        """Either way of writing it."""
        for endpoint in (r"tcp6:0:interface=\:\:1:backlog=100", r"tcp:0:interface=\:\:1:backlog=100"):
            sharing = self.sharing(endpoint, count=2)
            sockets = [self.socket_of(sharing, number) for number in (0, 1)]
            self.assertEqual({one.family for one in sockets}, {socket.AF_INET6})
            self.connected(sockets[0].getsockname())
            self.assertEqual(sum(waiting(*sockets)), CONNECTIONS)

    def test_unix(self) -> None:
        """One for all, with the mode that was asked for, and gone at the end."""
        path = Path(self.directory()) / "s"
        sharing = self.sharing(f"unix:{path}:mode=660", LOOPBACK)
        self.assertEqual(len({sharing.descriptors(number)[0] for number in range(3)}), 1)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o660)
        self.assertFalse(os.get_blocking(sharing.descriptors(0)[0]))
        sharing.close()
        self.assertFalse(path.exists())

    def test_tls(self) -> None:
        """As TCP: to encrypt is the worker's business."""
        directory = Path(self.directory())
        certificate = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        sharing = self.sharing(
            f"ssl:0:interface=127.0.0.1:privateKey={certificate}:certKey={certificate}:backlog=100"
        )
        sockets = [self.socket_of(sharing, number) for number in range(3)]
        self.connected(sockets[0].getsockname())
        self.assertEqual(sum(waiting(*sockets)), CONNECTIONS)

    def test_several_endpoints(self) -> None:
        """In the order in which they are written."""
        sharing = self.sharing(LOOPBACK, r"tcp6:0:interface=\:\:1", count=2)
        self.assertEqual(self.families(sharing), [socket.AF_INET, socket.AF_INET6])

    def test_control_socket(self) -> None:
        """It comes last, where it can be bound; another daemon's is an error."""
        path = Path(self.directory()) / "control.sock"
        for place, families in (
            (path, [socket.AF_INET, socket.AF_UNIX]),
            (path.parent / "gone" / "control.sock", [socket.AF_INET]),
        ):
            sharing = SharedListeners(reactor, [LOOPBACK], 2, ControlListener(place))
            self.addCleanup(sharing.close)
            sharing.bind()
            self.assertEqual(self.families(sharing), families)
            for number in (0, 1):
                sharing.suspend(number)
                sharing.resume(number)
        with self.assertRaisesRegex(StartupError, "another daemon listens on"):
            SharedListeners(reactor, [LOOPBACK], 2, ControlListener(path)).bind()

    def test_what_cannot_be_used(self) -> None:
        """One line each."""
        self.assertEqual(
            self.refusal("ssl:0:interface=127.0.0.1:privateKey=/nowhere.pem"),
            "cannot listen on ssl:0:interface=127.0.0.1:privateKey=/nowhere.pem: "
            "/nowhere.pem: No such file or directory",
        )
        garbage = Path(self.directory()) / "g.pem"
        garbage.write_text("x")
        self.assertIn("cannot use its key or certificate", self.refusal(f"ssl:0:privateKey={garbage}"))
        self.assertIn("Cannot assign requested address", self.refusal("tcp:0:interface=192.0.2.1"))

    def test_what_systemd_hands_over(self) -> None:
        """Cannot be had more than once."""
        self.assertEqual(
            self.refusal("systemd:domain=INET:index=0"),
            "cannot listen on systemd:domain=INET:index=0: workers cannot share sockets of systemd; set workers to 1",
        )

    def directory(self) -> str:
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        return directory


def waiting(*sockets: socket.socket) -> list[int]:
    """How many connections are in each backlog, once there are as many in all as were made; they are accepted."""
    numbers = [0] * len(sockets)
    while sum(numbers) < CONNECTIONS and (ready := select.select(sockets, [], [], PATIENCE_SECONDS)[0]):
        for listening in ready:
            listening.accept()[0].close()
            numbers[sockets.index(listening)] += 1
    # No others: what is there beyond those is there at once.
    return [number + count_accepted(listening) for number, listening in zip(numbers, sockets, strict=True)]


def count_accepted(listening: socket.socket) -> int:
    """How many more are accepted now."""
    accepted = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            accepted += 1
    return accepted


class Greeting(Protocol):
    """Says hello and hangs up."""

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.write(b"hello")
        transport.loseConnection()


class Listening(Protocol):
    """Fires with everything that is said."""

    def __init__(self) -> None:
        self.heard = b""
        self.over: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.heard += data

    def connectionLost(self, reason: Any = None) -> None:
        self.over.callback(self.heard)


class LimitedFactory(Factory):
    """Lets one connection in."""

    noisy = False
    is_full = False

    def buildProtocol(self, addr: Any) -> Protocol | None:
        if self.is_full:
            return None
        self.is_full = True
        return Greeting()


class InheritedListenersTests(TestCase):
    """A worker's side: an endpoint is given the socket that the supervisor has bound for it."""

    async def test_unix(self) -> None:
        """Two processes' worth of ports serve one socket, and the end of one takes nothing from the other."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        path = f"{directory}/s"
        endpoint = f"unix:{path}:mode=600"
        sharing = SharedListeners(reactor, [endpoint], 2)
        sharing.bind()
        self.addCleanup(sharing.close)
        ports = [await self.adopted(endpoint, sharing, number) for number in (0, 1)]
        self.assertEqual(await self.greeting(path), b"hello")
        await ports[0].stopListening()
        await ports[0].stopListening()
        self.assertEqual([port.fileno() < 0 for port in ports], [True, False])
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        self.assertEqual(await self.greeting(path), b"hello")
        await ports[1].stopListening()

    async def test_tls(self) -> None:
        """What is inherited for an `ssl:` address speaks TLS, and closes what its factory refuses."""
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        authority = CertificateAuthority(directory)
        files = authority.issue("here", ["127.0.0.1"])
        endpoint = f"ssl:0:interface=127.0.0.1:privateKey={files}:certKey={files}"
        sharing = SharedListeners(reactor, [endpoint], 1)
        sharing.bind()
        self.addCleanup(sharing.close)
        descriptor = sharing.descriptors(0)[0]
        factory = LimitedFactory()
        adopting = InheritedSocketReactor(reactor, os.dup(descriptor))
        listener = Listener(endpoint, factory, adopting)
        listener.privilegedStartService()
        plain = TCP4ClientEndpoint(reactor, "127.0.0.1", listener.address.port)
        options = optionsForClientTLS("127.0.0.1", Certificate.loadPEM(authority.path.read_bytes()))
        greeted: Any = await wrapClientTLS(options, plain).connect(Factory.forProtocol(Listening))
        self.assertEqual(await greeted.over, b"hello")
        refused: Any = await plain.connect(Factory.forProtocol(Listening))
        self.assertEqual(await refused.over, b"")
        await listener.stopService()

    async def adopted(self, endpoint: str, sharing: SharedListeners, number: int) -> Any:
        """Listen with a copy of the worker's socket, as if it were inherited."""
        descriptor = sharing.descriptors(number)[0]
        adopting: Any = InheritedSocketReactor(reactor, os.dup(descriptor))
        return await serverFromString(adopting, endpoint).listen(Factory.forProtocol(Greeting))

    async def greeting(self, path: str) -> bytes:
        """What is said by whoever accepts."""
        protocol = await UNIXClientEndpoint(reactor, path).connect(Factory.forProtocol(Listening))
        heard: bytes = await protocol.over
        return heard

    async def test_no_more_descriptors(self) -> None:
        """A connection that cannot be accepted waits, and is accepted once that is possible."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        listening = Refusing(socket.AF_UNIX)
        listening.setblocking(False)
        listening.bind(f"{directory}/s")
        listening.listen()
        adopting: Any = InheritedSocketReactor(reactor, listening.detach())
        self.patch(socket, "socket", Refusing)
        port = await serverFromString(adopting, "unix:unused").listen(Factory.forProtocol(Greeting))
        self.addCleanup(port.stopListening)
        Refusing.refusals = 1
        self.assertEqual(await self.greeting(f"{directory}/s"), b"hello")
        self.assertEqual(Refusing.refusals, 0)


class Refusing(socket.socket):
    """Does not accept as often as it is told."""

    refusals = 0

    def accept(self) -> Any:
        if Refusing.refusals:
            Refusing.refusals -= 1
            raise OSError(24, "Too many open files")
        return super().accept()
