"""The partition proxy passes, drops or holds back data."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  sockets are real
from twisted.internet.defer import Deferred, DeferredQueue, maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from tests.partition_proxy import PartitionProxy

reactor: Any = _reactor

PATIENCE_SECONDS = 120.0


class EchoServer(Protocol):
    """Sends back what it receives."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class RecordingClient(Protocol):
    """Records received data, a chunk at a time; None is the end."""

    def __init__(self) -> None:
        self.received: DeferredQueue[bytes | None] = DeferredQueue()

    def send(self, data: bytes) -> None:
        """Send data."""
        assert self.transport is not None
        self.transport.write(data)

    async def receive(self) -> bytes | None:
        """The next chunk."""
        chunk: Deferred[bytes | None] = self.received.get()
        return await chunk.addTimeout(PATIENCE_SECONDS, reactor)

    def dataReceived(self, data: bytes) -> None:
        self.received.put(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008  Twisted's own default
        self.received.put(None)


class PartitionProxyTests(TestCase):
    """An echo server behind the proxy."""

    def setUp(self) -> None:
        listening = reactor.listenTCP(0, Factory.forProtocol(EchoServer), interface="127.0.0.1")
        self.addCleanup(lambda: maybeDeferred(listening.stopListening))
        self.port = listening.getHost().port
        self.network = PartitionProxy(reactor)
        self.addCleanup(self.network.close)
        self.proxy_port = self.network.route_to(self.port)

    async def connect(self) -> RecordingClient:
        """A connection through the proxy."""
        client = RecordingClient()
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", self.proxy_port), client)
        self.addCleanup(self.network.close)
        return client

    async def test_passes_data_in_both_directions(self) -> None:
        """Without a cut."""
        client = await self.connect()
        client.send(b"a")
        self.assertEqual(await client.receive(), b"a")

    async def test_cut_closes_connections(self) -> None:
        """Open and new ones; later connections are not affected."""
        client = await self.connect()
        with self.network.cut(self.port):
            self.assertIsNone(await client.receive())
            self.assertIsNone(await (await self.connect()).receive())
        client = await self.connect()
        client.send(b"b")
        self.assertEqual(await client.receive(), b"b")

    async def test_silent_cut_holds_data_back(self) -> None:
        """Until it ends, on old and new connections."""
        old = await self.connect()
        old.send(b"1")
        self.assertEqual(await old.receive(), b"1")
        with self.network.cut(self.port, silently=True):
            old.send(b"2")
            new = await self.connect()
            new.send(b"3")
            other = await self.connect()
            other.send(b"4")
            self.assertEqual([len(one.received.pending) for one in (old, new, other)], [0, 0, 0])
        self.assertEqual([await one.receive() for one in (old, new, other)], [b"2", b"3", b"4"])

    async def test_cut_affects_only_given_processes(self) -> None:
        """Connections of others, and to other servers, are not affected."""
        client = await self.connect()
        with self.network.cut(self.port, of=[os.getppid()]), self.network.cut(self.port + 1):
            client.send(b"a")
            self.assertEqual(await client.receive(), b"a")
        with self.network.cut(self.port, of=[os.getpid()]):
            self.assertIsNone(await client.receive())

    async def test_closed_route_refuses_connections(self) -> None:
        """The proxy port stays the same."""
        await self.network.close_route(self.port)
        with self.assertRaises(ConnectionRefused):
            await self.connect()
        self.network.open_route(self.port)
        client = await self.connect()
        client.send(b"a")
        self.assertEqual(await client.receive(), b"a")
