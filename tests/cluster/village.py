"""Several houses on one memory store and one clock: nodes whose requests to each other are function calls."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.calling import CallFailed, NotThere
from mediatord.cluster.hint import PROBE_PATH
from mediatord.cluster.listener import NodeSite
from mediatord.config import Config
from mediatord.interfaces import Node, QueueLimits
from mediatord.keyfile import create_keys
from mediatord.private_file import create_private
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.store.memory import MemoryStore
from mediatord.wiring import cluster as wiring
from mediatord.wiring.base import build_base
from mediatord.wiring.decentrl import build_decentrl
from mediatord.wiring.didcomm import build_didcomm
from mediatord.wiring.nodes import build_membership, build_node
from tests.citizens import Citizen
from tests.house import NOW, FakeSocket, Guest, House, Reactor
from tests.integration.daemon import PLENTY, merge

SECRET = b"what the nodes of this cluster know and nobody else"

T = TypeVar("T")


class Wires:
    """
    Carries requests from house to house.

    :ivar cut: told of each request that is about to go: true keeps it from arriving.
    :ivar lost: the same for its answer.
    :ivar requests: how many went.
    """

    def __init__(self) -> None:
        self.houses: dict[str, NodeHouse] = {}
        self.cut: Callable[[Node, str], bool] = lambda node, path: False
        self.lost: Callable[[Node, str], bool] = lambda node, path: False
        self.requests = 0

    def caller(self, reactor: Any, boot: str, sealing: Any) -> _Caller:
        """Takes the place of :class:`~mediatord.cluster.calling.Calling`."""
        return _Caller(self, boot, sealing)


class _Caller:
    def __init__(self, wires: Wires, boot: str, sealing: Any) -> None:
        self._wires = wires
        self._boot = boot
        self._sealing = sealing

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        self._wires.requests += 1
        if self._wires.cut(node, path):
            raise CallFailed
        house = self._wires.houses.get(node.boot)
        if house is None:
            raise NotThere
        stamp = self._sealing.stamp(self._boot, node.boot)
        answer = await house.serve("POST", path, self._sealing.seal_request(stamp, "POST", path, body), body)
        if self._wires.lost(node, path) or answer.status != 200:
            raise CallFailed
        body_: bytes = answer.body
        return body_

    async def probe(self, node: Node) -> str | None:
        try:
            await self.ask(node, PROBE_PATH, b"{}")
        except CallFailed:
            return None
        return node.boot

    def close(self) -> Deferred[None]:
        return succeed(None)


class NodeHouse(House):
    """
    One node.

    :ivar said: what it gave up with.
    """

    def __init__(self, village: Village, name: str, **settings: Any) -> None:
        plain = {
            "storage": {"backend": "memory"},
            "node": name,
            "identity": {"keys": str(village.directory / "keys.jwks")},
            "log": {"directory": tempfile.mkdtemp(dir=village.directory), "rotate": {"compress": False}},
            "cluster": {"listen": "tcp:7070:interface=10.0.0.1", "secret_file": str(village.directory / "secret")},
        }
        self.test = village
        self.village = village
        self.clock = village.clock
        self.said: list[str] = []
        self.config = Config.model_validate(merge(merge(plain, PLENTY), settings)).resolved(village.directory)
        self.base = build_base(self.clock, self.config, store=village.store)
        assert self.base.cluster is not None
        self.cluster = self.base.cluster
        self.half = build_didcomm(self.base, self.config)
        self.decentrl = build_decentrl(self.base, self.config)
        self.store = village.store
        self.did = self.base.identity.did
        self.document = resolve_local(self.did)
        self.membership = build_membership(self.base, self.cluster, self.said.append, lambda: None)
        node = build_node(self.base, self.cluster, self.half, self.decentrl, self.membership)
        self.services: list[Any] = [
            self.base.events,
            self.membership,
            self.half.due,
            self.half.housekeeping,
            *node,
            self.base.connections,
            self.base.gate,
        ]
        self.serve: Any = None
        self.sockets: list[FakeSocket] = []
        self._running = False

    @property
    def boot(self) -> str:
        """Of this start."""
        return self.cluster.node.boot

    def start(self) -> NodeHouse:
        """Begin, and join."""
        self._running = True
        self.village.wires.houses[self.boot] = self
        self.test.successResultOf(self.store.open())
        for service in self.services:
            service.privilegedStartService()
            service.startService()
        (site,) = [server[1] for server in self.clock.tcpServers if isinstance(server[1], NodeSite)][-1:]
        self.serve = site.serve
        self.membership.store_opened()
        self.village.settle()
        return self

    def stop(self) -> None:
        """In order."""
        if self._running:
            self._running = False
            for service in reversed(self.services):
                stopped = service.stopService()
                for socket in self.sockets:
                    self.base.connections.closed(socket)
                self.village.settle()
                if isinstance(stopped, Deferred):
                    self.test.successResultOf(stopped)
            self.village.wires.houses.pop(self.boot, None)

    def freeze(self) -> None:
        """Do nothing any more, not even say goodbye, as after kill -9."""
        self._running = False
        self.village.wires.houses.pop(self.boot, None)
        self.cluster.announcer.stop()
        life = self.membership._life
        self.membership._life = None
        if life is not None:
            life.cancel()
        for service in reversed(self.services):
            service.stopService()

    def socket(self, **options: Any) -> FakeSocket:
        """A socket that has finished its handshake, and goes when it is told to."""
        socket = super().socket(**options)
        self.sockets.append(socket)
        return socket

    def done(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of work, once everything has happened that is to happen at once."""
        return self.village.get(work)


class Village(SynchronousTestCase):
    """
    A test case with several houses.

    :cvar names: of those that are started before each test.
    """

    names: tuple[str, ...] = ("a", "b")
    settings: dict[str, Any] = {}

    def setUp(self) -> None:
        """Start them."""
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        create_private(self.directory / "secret", SECRET)
        self.clock = Reactor()
        self.clock.advance(NOW)
        self.store: Any = MemoryStore(self.clock, QueueLimits())
        self.wires = Wires()
        self.patch(wiring, "Calling", self.wires.caller)
        # As long as nobody else has it open, nothing is in it.
        self.successResultOf(self.store.open())
        self.houses = [self.house(name).start() for name in self.names]

    def house(self, name: str, **settings: Any) -> NodeHouse:
        """One more, yet to be started."""
        house = NodeHouse(self, name, **merge(self.settings, settings))
        self.addCleanup(house.stop)
        return house

    def settle(self) -> None:
        """Let everything happen that is to happen at once."""
        while any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()):
            self.clock.advance(0)

    def later(self, seconds: float) -> None:
        """Let time pass in small steps."""
        until = self.clock.seconds() + seconds
        while self.clock.seconds() < until:
            self.clock.advance(min(0.25, until - self.clock.seconds()))
            self.settle()

    def get(self, work: Awaitable[T] | Coroutine[Any, Any, T]) -> T:
        """What comes of work that needs no time."""
        done: Deferred[T] = Deferred.fromCoroutine(work)  # type: ignore[arg-type]
        self.settle()
        return self.successResultOf(done)

    def live(self) -> list[str]:
        """The names of the live nodes."""
        return [node.name for node in self.successResultOf(self.store.cluster.nodes())]

    def guest(self, house: NodeHouse) -> Guest:
        """A wallet with an account, which asks this node."""
        return Guest(house).enrol()

    def citizen(self, house: NodeHouse, name: str) -> Citizen:
        """A Decentrl identity that asks this node."""
        return Citizen(house, name)
