"""The network that kill tests cut: it lets through, drops, or keeps silent."""

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
    """Says what it is told."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class RecordingClient(Protocol):
    """Keeps what it is told, one piece at a time; None is the end."""

    def __init__(self) -> None:
        self.told: DeferredQueue[bytes | None] = DeferredQueue()

    def say(self, data: bytes) -> None:
        """Send."""
        assert self.transport is not None
        self.transport.write(data)

    async def hear(self) -> bytes | None:
        """The next piece."""
        waiting: Deferred[bytes | None] = self.told.get()
        return await waiting.addTimeout(PATIENCE_SECONDS, reactor)

    def dataReceived(self, data: bytes) -> None:
        self.told.put(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008  Twisted's own default
        self.told.put(None)


class PartitionProxyTests(TestCase):
    """An echo, and ways to it."""

    def setUp(self) -> None:
        listening = reactor.listenTCP(0, Factory.forProtocol(EchoServer), interface="127.0.0.1")
        self.addCleanup(lambda: maybeDeferred(listening.stopListening))
        self.port = listening.getHost().port
        self.network = PartitionProxy(reactor)
        self.addCleanup(self.network.close)
        self.way = self.network.way_to(self.port)

    async def call(self) -> RecordingClient:
        """A connection through the network."""
        caller = RecordingClient()
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", self.way), caller)
        self.addCleanup(self.network.close)
        return caller

    async def test_what_is_said_arrives(self) -> None:
        """In both directions."""
        caller = await self.call()
        caller.say(b"a")
        self.assertEqual(await caller.hear(), b"a")

    async def test_a_cut_ends_connections(self) -> None:
        """Those that are there, and those that are made; later ones are none of its business."""
        caller = await self.call()
        with self.network.cut(self.port):
            self.assertIsNone(await caller.hear())
            self.assertIsNone(await (await self.call()).hear())
        caller = await self.call()
        caller.say(b"b")
        self.assertEqual(await caller.hear(), b"b")

    async def test_a_silent_cut_keeps_everything_back(self) -> None:
        """Nobody is told of it; what was sent meanwhile arrives when it is over, on connections old and new."""
        old = await self.call()
        old.say(b"1")
        self.assertEqual(await old.hear(), b"1")
        with self.network.cut(self.port, silently=True):
            old.say(b"2")
            new = await self.call()
            new.say(b"3")
            other = await self.call()
            other.say(b"4")
            self.assertEqual([len(one.told.pending) for one in (old, new, other)], [0, 0, 0])
        self.assertEqual([await one.hear() for one in (old, new, other)], [b"2", b"3", b"4"])

    async def test_a_cut_may_concern_some_processes_only(self) -> None:
        """Connections of others go on, as do those to other servers."""
        caller = await self.call()
        with self.network.cut(self.port, of=[os.getppid()]), self.network.cut(self.port + 1):
            caller.say(b"a")
            self.assertEqual(await caller.hear(), b"a")
        with self.network.cut(self.port, of=[os.getpid()]):
            self.assertIsNone(await caller.hear())

    async def test_a_way_can_be_closed(self) -> None:
        """Connections are refused then; the entrance stays the same."""
        await self.network.close_way(self.port)
        with self.assertRaises(ConnectionRefused):
            await self.call()
        self.network.open_way(self.port)
        caller = await self.call()
        caller.say(b"a")
        self.assertEqual(await caller.hear(), b"a")
