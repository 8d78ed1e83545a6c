"""Listeners that accept connections once the store is open; until then clients wait in the backlog."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  what a kernel keeps for us is the subject
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, UNIXClientEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.app.lifecycle import MAX_ACCEPT_DELAY, AcceptDelay
from mediatord.net.listeners import Listener, add_backlog
from mediatord.workers.shared_listeners import InheritedSocketReactor

# For mypy.
reactor: Any = _reactor

PATIENCE_SECONDS = 60.0
# More than Twisted's default backlog.
MANY = 80


class FakeListener(Listener):
    """Unbound listener that records whether it accepts connections."""

    def __init__(self) -> None:
        super().__init__("tcp:9000", Factory(), MemoryReactorClock())
        self.calls: list[str] = []

    def hold(self) -> None:
        self.calls.append("hold")

    def resume_accepting(self) -> None:
        self.calls.append("resume")


class DeferredListenersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.listener = FakeListener()
        self.accept_delay = AcceptDelay(self.clock, [self.listener])

    def test_opens_with_store(self) -> None:
        """Opening is idempotent."""
        self.accept_delay.startService()
        self.assertEqual(self.listener.calls, ["hold"])
        self.accept_delay.open()
        self.accept_delay.open()
        self.assertEqual(self.listener.calls, ["hold", "resume"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_pauses_when_bound(self) -> None:
        """A listener does not accept from binding, which needs privileges, until the start."""
        self.accept_delay.privilegedStartService()
        self.assertEqual(self.listener.calls, ["hold"])

    def test_opens_after_timeout(self) -> None:
        """After a while listeners open without a store, so that clients get errors."""
        self.accept_delay.startService()
        self.clock.advance(MAX_ACCEPT_DELAY - 0.01)
        self.assertEqual(self.listener.calls, ["hold"])
        self.clock.advance(0.01)
        self.assertEqual(self.listener.calls, ["hold", "resume"])
        self.accept_delay.open()
        self.assertEqual(self.listener.calls, ["hold", "resume"])

    def test_store_opens_before_listeners(self) -> None:
        """The store may be open before listeners are bound."""
        self.accept_delay.privilegedStartService()
        self.accept_delay.open()
        self.accept_delay.startService()
        self.assertEqual((self.listener.calls[-1], self.clock.getDelayedCalls()), ("resume", []))

    def test_stopped_before_opening(self) -> None:
        """Then they stay closed."""
        self.accept_delay.startService()
        self.accept_delay.stopService()
        self.accept_delay.open()
        self.clock.advance(10)
        self.assertEqual(self.listener.calls, ["hold"])


class RecordingClient(Protocol):
    """Records received data."""

    def __init__(self) -> None:
        self.received: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received.callback(data)


class GreetingServer(Protocol):
    """Sends a greeting."""

    def connectionMade(self) -> None:
        self.transport.write(b"welcome")  # type: ignore[union-attr]  # it is made
        self.transport.loseConnection()  # type: ignore[union-attr]


class BacklogTests(TestCase):
    """With real sockets: connections queue in the kernel and are accepted once the listeners open."""

    timeout = PATIENCE_SECONDS

    async def test_tcp_port(self) -> None:
        """The port of a single process."""
        factory = Factory.forProtocol(GreetingServer)
        listener = Listener("tcp:0:interface=127.0.0.1", factory, reactor)
        await self.check_backlog(
            listener, factory, lambda: TCP4ClientEndpoint(reactor, "127.0.0.1", listener.address.port)
        )

    async def test_unix_socket_of_worker(self) -> None:
        """Other workers listen too, and may accept connections that this one does not."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        path = f"{directory}/s"
        adopted = socket.socket(socket.AF_UNIX)
        adopted.setblocking(False)
        adopted.bind(path)
        adopted.listen(2 * MANY)
        factory = Factory.forProtocol(GreetingServer)
        adopting = InheritedSocketReactor(reactor, adopted.detach())
        await self.check_backlog(
            Listener(f"unix:{path}", factory, adopting), factory, lambda: UNIXClientEndpoint(reactor, path)
        )

    async def check_backlog(self, listener: Listener, factory: Any, way: Callable[[], Any]) -> None:
        """Connect before the listeners open, and be greeted afterwards."""
        accept_delay = AcceptDelay(Clock(), [listener])
        for service in (listener, accept_delay):
            service.privilegedStartService()
        for service in (listener, accept_delay):
            service.startService()
        self.addCleanup(listener.stopService)
        self.addCleanup(accept_delay.stopService)
        # The reactor finishes one connection before the next.
        clients = [await connectProtocol(way(), RecordingClient()) for _ in range(MANY)]
        self.assertEqual((factory.numPorts, [client.received.called for client in clients]), (1, [False] * MANY))
        accept_delay.open()
        self.assertEqual([await client.received for client in clients], [b"welcome"] * MANY)


@pytest.mark.parametrize(
    ("endpoint", "used"),
    [
        ("tcp:80", "tcp:80:backlog=1024"),
        ("tcp6:80:interface=\\:\\:", "tcp6:80:interface=\\:\\::backlog=1024"),
        ("haproxy:ssl:443:privateKey=k", "haproxy:ssl:443:privateKey=k:backlog=1024"),
        ("unix:/s:mode=660", "unix:/s:mode=660:backlog=1024"),
        ("tcp:80:backlog=7:interface=::1", "tcp:80:backlog=7:interface=::1"),
        ("systemd:domain=INET:index=0", "systemd:domain=INET:index=0"),
        ("tcp:80:127.0.0.1:100", "tcp:80:127.0.0.1:100"),
    ],
)
def test_backlog_size(endpoint: str, used: str) -> None:
    """The configured size, or enough for wallets that all reconnect at once."""
    assert add_backlog(endpoint) == used
