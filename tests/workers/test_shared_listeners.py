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

# Large enough for all connections of a test.
LOOPBACK = "tcp:0:interface=127.0.0.1:backlog=100"
CONNECTIONS = 64
# The server may see a connection later than the client, on a busy machine much later.
PATIENCE_SECONDS = 60.0


class SharingTests(SynchronousTestCase):
    def share(self, *endpoints: str, count: int = 3) -> SharedListeners:
        """Bind sockets, and close them afterwards."""
        sharing = SharedListeners(reactor, endpoints, count)
        self.addCleanup(sharing.close)
        sharing.bind()
        return sharing

    def refusal_of(self, *endpoints: str) -> str:
        """Return why these endpoints cannot be shared."""
        with self.assertRaises(StartupError) as caught:
            self.share(*endpoints)
        return str(caught.exception)

    def socket_of(self, sharing: SharedListeners, number: int, index: int = 0) -> socket.socket:
        """A worker's own copy of a socket."""
        copy = socket.socket(fileno=os.dup(sharing.descriptors(number)[index]))
        self.addCleanup(copy.close)
        return copy

    def families(self, sharing: SharedListeners) -> list[socket.AddressFamily]:
        """Address families of the sockets of one worker."""
        return [self.socket_of(sharing, 1, index).family for index in range(len(sharing.descriptors(1)))]

    def connect(self, address: Any) -> None:
        """Connect often enough that every worker has some."""
        for _ in range(CONNECTIONS):
            self.addCleanup(socket.create_connection(address[:2], PATIENCE_SECONDS).close)

    def test_each_worker_has_its_sockets(self) -> None:
        """One address, one socket and connections for each worker; none is starved."""
        sharing = self.share(LOOPBACK)
        sockets = [self.socket_of(sharing, number) for number in range(3)]
        self.assertEqual(len({element.getsockname() for element in sockets}), 1)
        self.assertEqual([os.get_blocking(item.fileno()) for item in sockets], [False] * 3)
        self.connect(sockets[0].getsockname())
        numbers = count_backlogs(*sockets)
        self.assertEqual(sum(numbers), CONNECTIONS)
        self.assertGreater(min(numbers), 0)

    def test_backlog_survives_worker(self) -> None:
        """Connections that were not accepted go to the next process with the socket."""
        sharing = self.share(LOOPBACK, count=2)
        first = self.socket_of(sharing, 0)
        self.connect(first.getsockname())
        first.close()
        self.assertEqual(sum(count_backlogs(self.socket_of(sharing, 0), self.socket_of(sharing, 1))), CONNECTIONS)

    def test_suspended_worker(self) -> None:
        """Others get all connections until it resumes; the address stays bound if all are suspended."""
        sharing = self.share(LOOPBACK, count=2)
        one, two = (self.socket_of(sharing, number) for number in (0, 1))
        address = one.getsockname()
        sharing.suspend(0)
        self.connect(address)
        self.assertEqual(count_backlogs(two), [CONNECTIONS])
        sharing.suspend(1)
        self.assertRaises(ConnectionRefusedError, socket.create_connection, address, PATIENCE_SECONDS)
        with contextlib.closing(socket.socket()) as other:
            self.assertRaises(OSError, other.bind, address)
        sharing.resume(0)
        sharing.resume(1)
        self.connect(address)
        self.assertGreater(min(count_backlogs(one, two)), 0)

    def test_address_in_use(self) -> None:
        """By any process, including another supervisor of the same user, which the kernel would allow."""
        sharing = self.share(LOOPBACK)
        port = self.socket_of(sharing, 0).getsockname()[1]
        endpoint = f"tcp:{port}:interface=127.0.0.1"
        self.assertEqual(self.refusal_of(endpoint), f"cannot listen on {endpoint}: Address already in use")

    def test_failed_bind_releases_sockets(self) -> None:
        """Sockets bound before the failed one are closed."""
        accepted = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(accepted.close)
        path = Path(self.directory()) / "s"
        self.refusal_of(f"unix:{path}:lockfile=0", f"tcp:{accepted.getsockname()[1]}:interface=127.0.0.1")
        self.assertFalse(path.exists())

    def test_ipv6(self) -> None:
        """In either notation."""
        for endpoint in (r"tcp6:0:interface=\:\:1:backlog=100", r"tcp:0:interface=\:\:1:backlog=100"):
            sharing = self.share(endpoint, count=2)
            sockets = [self.socket_of(sharing, number) for number in (0, 1)]
            self.assertEqual({item.family for item in sockets}, {socket.AF_INET6})
            self.connect(sockets[0].getsockname())
            self.assertEqual(sum(count_backlogs(*sockets)), CONNECTIONS)

    def test_unix(self) -> None:
        """One socket for all, with its mode, removed at the end."""
        path = Path(self.directory()) / "s"
        sharing = self.share(f"unix:{path}:mode=660", LOOPBACK)
        self.assertEqual(len({sharing.descriptors(number)[0] for number in range(3)}), 1)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o660)
        self.assertFalse(os.get_blocking(sharing.descriptors(0)[0]))
        sharing.close()
        self.assertFalse(path.exists())

    def test_tls(self) -> None:
        """Like TCP: TLS is up to the worker."""
        directory = Path(self.directory())
        certificate = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        sharing = self.share(f"ssl:0:interface=127.0.0.1:privateKey={certificate}:certKey={certificate}:backlog=100")
        sockets = [self.socket_of(sharing, number) for number in range(3)]
        self.connect(sockets[0].getsockname())
        self.assertEqual(sum(count_backlogs(*sockets)), CONNECTIONS)

    def test_several_endpoints(self) -> None:
        """In the order of the configuration."""
        sharing = self.share(LOOPBACK, r"tcp6:0:interface=\:\:1", count=2)
        self.assertEqual(self.families(sharing), [socket.AF_INET, socket.AF_INET6])

    def test_control_socket(self) -> None:
        """It comes last, where it can be bound; that of another daemon is an error."""
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

    def test_invalid_endpoints(self) -> None:
        """One line each."""
        self.assertEqual(
            self.refusal_of("ssl:0:interface=127.0.0.1:privateKey=/nowhere.pem"),
            "cannot listen on ssl:0:interface=127.0.0.1:privateKey=/nowhere.pem: "
            "/nowhere.pem: No such file or directory",
        )
        garbage = Path(self.directory()) / "g.pem"
        garbage.write_text("x")
        self.assertIn("cannot use its key or certificate", self.refusal_of(f"ssl:0:privateKey={garbage}"))
        self.assertIn("Cannot assign requested address", self.refusal_of("tcp:0:interface=192.0.2.1"))

    def test_systemd_sockets(self) -> None:
        """Sockets of systemd cannot be shared."""
        self.assertEqual(
            self.refusal_of("systemd:domain=INET:index=0"),
            "cannot listen on systemd:domain=INET:index=0: workers cannot share sockets passed by systemd; "
            "set workers: 1",
        )

    def directory(self) -> str:
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        return directory


def count_backlogs(*sockets: socket.socket) -> list[int]:
    """Accept connections until all have arrived; return how many each backlog had."""
    numbers = [0] * len(sockets)
    while sum(numbers) < CONNECTIONS and (ready := select.select(sockets, [], [], PATIENCE_SECONDS)[0]):
        for listening in ready:
            listening.accept()[0].close()
            numbers[sockets.index(listening)] += 1
    # There are no others: they would have arrived.
    return [number + count_accepted(listening) for number, listening in zip(numbers, sockets, strict=True)]


def count_accepted(listening: socket.socket) -> int:
    """Count further connections that are accepted now."""
    accepted = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            accepted += 1
    return accepted


class GreetingServer(Protocol):
    """Sends a greeting and closes."""

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.write(b"hello")
        transport.loseConnection()


class RecordingClient(Protocol):
    """Fires with all received data."""

    def __init__(self) -> None:
        self.received = b""
        self.closed: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.closed.callback(self.received)


class LimitedFactory(Factory):
    """Accepts one connection."""

    noisy = False
    is_full = False

    def buildProtocol(self, addr: Any) -> Protocol | None:
        if self.is_full:
            return None
        self.is_full = True
        return GreetingServer()


class InheritedListenersTests(TestCase):
    """A worker's endpoints use the sockets that the supervisor has bound."""

    async def test_unix(self) -> None:
        """Ports of two processes serve one socket, and closing one does not affect the other."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        path = f"{directory}/s"
        endpoint = f"unix:{path}:mode=600"
        sharing = SharedListeners(reactor, [endpoint], 2)
        sharing.bind()
        self.addCleanup(sharing.close)
        ports = [await self.listen(endpoint, sharing, number) for number in (0, 1)]
        self.assertEqual(await self.receive_greeting(path), b"hello")
        await ports[0].stopListening()
        await ports[0].stopListening()
        self.assertEqual([port.fileno() < 0 for port in ports], [True, False])
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        self.assertEqual(await self.receive_greeting(path), b"hello")
        await ports[1].stopListening()

    async def test_tls(self) -> None:
        """An inherited socket of an `ssl:` endpoint speaks TLS, and closes what its factory refuses."""
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
        greeted: Any = await wrapClientTLS(options, plain).connect(Factory.forProtocol(RecordingClient))
        self.assertEqual(await greeted.closed, b"hello")
        refused: Any = await plain.connect(Factory.forProtocol(RecordingClient))
        self.assertEqual(await refused.closed, b"")
        await listener.stopService()

    async def listen(self, endpoint: str, sharing: SharedListeners, number: int) -> Any:
        """Listen with a copy of the worker's socket, as if it were inherited."""
        descriptor = sharing.descriptors(number)[0]
        adopting: Any = InheritedSocketReactor(reactor, os.dup(descriptor))
        return await serverFromString(adopting, endpoint).listen(Factory.forProtocol(GreetingServer))

    async def receive_greeting(self, path: str) -> bytes:
        """Return the greeting of the process that accepts."""
        protocol = await UNIXClientEndpoint(reactor, path).connect(Factory.forProtocol(RecordingClient))
        received: bytes = await protocol.closed
        return received

    async def test_out_of_descriptors(self) -> None:
        """A connection waits until it can be accepted."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        listening = FailingSocket(socket.AF_UNIX)
        listening.setblocking(False)
        listening.bind(f"{directory}/s")
        listening.listen()
        adopting: Any = InheritedSocketReactor(reactor, listening.detach())
        self.patch(socket, "socket", FailingSocket)
        port = await serverFromString(adopting, "unix:unused").listen(Factory.forProtocol(GreetingServer))
        self.addCleanup(port.stopListening)
        FailingSocket.refusals = 1
        self.assertEqual(await self.receive_greeting(f"{directory}/s"), b"hello")
        self.assertEqual(FailingSocket.refusals, 0)


class FailingSocket(socket.socket):
    """Socket whose accept fails a number of times."""

    refusals = 0

    def accept(self) -> Any:
        if FailingSocket.refusals:
            FailingSocket.refusals -= 1
            raise OSError(24, "Too many open files")
        return super().accept()
