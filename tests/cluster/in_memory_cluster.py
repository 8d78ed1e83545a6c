"""Nodes in one process, with one memory store and one clock; requests between them are function calls."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app import cluster as wiring
from mediatord.app.cluster import build_cluster_services
from mediatord.app.core_services import CoreServices
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.cluster.peer_connection import PeerCallFailed, PeerServer
from mediatord.config.settings import Config
from mediatord.identity.key_file import create_keys
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.runtime.secret_files import create_secret_file
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.in_memory_identities import InMemoryIdentity
from tests.in_memory_mediator import NOW, FakeSocket, InMemoryMediator, InMemoryReactor, InMemoryWallet
from tests.integration.daemon import PLENTY, merge_settings

SECRET = b"what the nodes of this cluster know and nobody else"

T = TypeVar("T")


class InMemoryPeerNetwork:
    """
    Carries requests between in-memory nodes.

    :ivar cut: called with each request; true drops it.

    :ivar lost: the same for its response.

    :ivar requests: number of requests.
    """

    def __init__(self) -> None:
        self.in_memory_nodes: dict[str, InMemoryNode] = {}
        self.cut: Callable[[ClusterNode], bool] = lambda node: False
        self.lost: Callable[[ClusterNode], bool] = lambda node: False
        self.requests = 0

    def make_client(self, reactor: Any, keys: Any) -> _InMemoryPeerClient:
        """Stands in for :class:`~mediatord.cluster.peer_connection.PeerClient`."""
        return _InMemoryPeerClient(self)


class _InMemoryPeerClient:
    def __init__(self, network: InMemoryPeerNetwork) -> None:
        self._network = network

    def call(self, node: ClusterNode, body: bytes) -> Deferred[bytes]:
        return Deferred.fromCoroutine(self._call(node, body))

    async def _call(self, node: ClusterNode, body: bytes) -> bytes:
        server = self._find(node)
        answer = await server.serve(body)
        if self._network.lost(node) or not answer:
            raise PeerCallFailed
        return answer

    async def probe(self, node: ClusterNode) -> str | None:
        try:
            self._find(node)
        except PeerCallFailed:
            return None
        return node.boot

    def close(self) -> None:
        """Nothing to close."""

    def _find(self, node: ClusterNode) -> PeerServer:
        self._network.requests += 1
        if self._network.cut(node):
            raise PeerCallFailed
        in_memory = self._network.in_memory_nodes.get(node.boot)
        if in_memory is None:
            raise PeerCallFailed
        return in_memory.server


class InMemoryNode(InMemoryMediator):
    """
    One node.

    :ivar fatal_errors: lines with which it gave up.
    """

    def __init__(self, test_case: InMemoryClusterTestCase, name: str, **settings: Any) -> None:
        plain = {
            "storage": {"backend": "memory"},
            "node": name,
            "identity": {"keys": str(test_case.directory / "keys.jwks")},
            "log": {"directory": tempfile.mkdtemp(dir=test_case.directory), "rotate": {"compress": False}},
            "cluster": {"listen": "tcp:7070:interface=10.0.0.1", "secret_file": str(test_case.directory / "secret")},
        }
        self.test = test_case
        self.test_case = test_case
        self.clock = test_case.clock
        self.fatal_errors: list[str] = []
        self.config = Config.model_validate(merge_settings(merge_settings(plain, PLENTY), settings)).resolved(
            test_case.directory
        )
        self.base = CoreServices(self.clock, self.config, store=test_case.store)
        assert self.base.cluster is not None
        self.cluster = self.base.cluster
        self.didcomm = DIDCommServices(self.base, self.config)
        self.decentrl = DecentrlServices(self.base, self.config)
        self.store = test_case.store
        self.did = self.base.identity.now.did
        self.document = resolve_local(self.did)
        self.membership = self.cluster.build_membership(self.fatal_errors.append, lambda: None)
        node = build_cluster_services(self.base, self.cluster, self.didcomm, self.decentrl, self.membership)
        self.services: list[Any] = [
            self.base.events,
            self.membership,
            self.didcomm.due,
            self.didcomm.housekeeping,
            *node,
            self.base.connections,
            self.base.gate,
        ]
        self.server: PeerServer
        self.sockets: list[FakeSocket] = []
        self._running = False

    @property
    def boot(self) -> str:
        """Boot id of this start."""
        return self.cluster.node.boot

    def start(self) -> InMemoryNode:
        """Start and join the cluster."""
        self._running = True
        self.test_case.network.in_memory_nodes[self.boot] = self
        self.test.successResultOf(self.store.open())
        for service in self.services:
            service.privilegedStartService()
            service.startService()
        (self.server,) = [server[1] for server in self.clock.tcpServers if isinstance(server[1], PeerServer)][-1:]
        self.membership.store_opened()
        self.test_case.settle()
        return self

    def stop(self) -> None:
        """Stop in order."""
        if self._running:
            self._running = False
            for service in reversed(self.services):
                stopped = service.stopService()
                for socket in self.sockets:
                    self.base.connections.closed(socket)
                self.test_case.settle()
                if isinstance(stopped, Deferred):
                    self.test.successResultOf(stopped)
            self.test_case.network.in_memory_nodes.pop(self.boot, None)

    def freeze(self) -> None:
        """Stop without leaving the cluster, as after kill -9."""
        self._running = False
        self.test_case.network.in_memory_nodes.pop(self.boot, None)
        assert isinstance(self.cluster.links, wiring.NodeLinks)
        self.cluster.links.publisher.stop()
        task = self.membership._task
        self.membership._task = None
        if task is not None:
            task.cancel()
        for service in reversed(self.services):
            service.stopService()

    def socket(self, **options: Any) -> FakeSocket:
        """An open socket, which closes when it is told to."""
        socket = super().socket(**options)
        self.sockets.append(socket)
        return socket

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine, after all calls that are due."""
        return self.test_case.result_of(work)


class InMemoryClusterTestCase(SynchronousTestCase):
    """
    Test case with several nodes.

    :cvar names: nodes that are started before each test.
    """

    names: tuple[str, ...] = ("a", "b")
    settings: dict[str, Any] = {}

    def setUp(self) -> None:
        """Start the nodes."""
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        create_secret_file(self.directory / "secret", SECRET)
        self.clock = InMemoryReactor()
        self.clock.advance(NOW)
        self.store: Any = MemoryStore(self.clock, QueueLimits())
        self.network = InMemoryPeerNetwork()
        self.patch(wiring, "PeerClient", self.network.make_client)
        # The memory store is cleared when its last user closes it.
        self.successResultOf(self.store.open())
        self.in_memory_nodes = [self.make_node(name).start() for name in self.names]

    def make_node(self, name: str, **settings: Any) -> InMemoryNode:
        """A further node, not started."""
        in_memory = InMemoryNode(self, name, **merge_settings(self.settings, settings))
        self.addCleanup(in_memory.stop)
        return in_memory

    def settle(self) -> None:
        """Run all calls that are due."""
        while any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()):
            self.clock.advance(0)

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps."""
        until = self.clock.seconds() + seconds
        while self.clock.seconds() < until:
            self.clock.advance(min(0.25, until - self.clock.seconds()))
            self.settle()

    def result_of(self, work: Awaitable[T] | Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine that takes no time."""
        done: Deferred[T] = Deferred.fromCoroutine(work)  # type: ignore[arg-type]
        self.settle()
        return self.successResultOf(done)

    def list_live_names(self) -> list[str]:
        """Names of the live nodes."""
        return [node.name for node in self.successResultOf(self.store.cluster.list_nodes())]

    def new_wallet(self, in_memory: InMemoryNode) -> InMemoryWallet:
        """A wallet with an account, connected to this node."""
        return InMemoryWallet(in_memory).enrol()

    def new_identity(self, in_memory: InMemoryNode, name: str) -> InMemoryIdentity:
        """A Decentrl identity, connected to this node."""
        return InMemoryIdentity(in_memory, name)
