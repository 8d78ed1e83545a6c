"""Whole daemons in one process, on one memory store, with real sockets between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from twisted.application.service import Service
from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from mediatord.cluster import rounds
from mediatord.config import Config
from mediatord.interfaces import IStore, QueueLimits
from mediatord.keyfile import create_keys
from mediatord.private_file import create_private
from mediatord.store.memory import MemoryStore
from mediatord.wallet.socket import endpoint_for
from mediatord.wallet.throwaway import free_port
from mediatord.wiring import build, nodes
from tests.integration.daemon import PLENTY, merge

reactor: Any = _reactor
SECRET = b"what the nodes of this cluster know and nobody else"
PATIENCE = 30.0
STEP = 0.01


class Watch:
    """The reactor's time, which a test may set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def seconds(self) -> float:
        """Since the epoch."""
        return float(reactor.seconds()) + self.ahead


class Node:
    """
    One of several daemons.

    :ivar said: what it gave up with.
    """

    def __init__(self, town: Town, name: str, settings: dict[str, Any]) -> None:
        port = free_port()
        self.name = name
        self.said: list[str] = []
        self.url = f"http://127.0.0.1:{port}"
        plain = {
            "public_url": town.url or self.url,
            "node": name,
            "listen": [f"tcp:{port}:interface=127.0.0.1"],
            "storage": {"backend": "memory"},
            "identity": {"keys": str(town.directory / "keys.jwks")},
            "log": {"directory": str(town.directory / f"{name}-{port}"), "rotate": {"compress": False}},
            "drain_timeout": "2s",
            "cluster": {
                "listen": town.node_listen(name),
                "secret_file": str(town.directory / "cluster.secret"),
            },
        }
        self.config = Config.model_validate(merge(merge(plain, PLENTY), settings))
        self.service: Any = build(reactor, self.config, give_up=self.said.append, store=town.store)
        self._running = False

    def endpoint(self) -> Any:
        """How wallets get here, whatever the mediator's document names."""
        return endpoint_for(reactor, self.url)

    def start(self) -> None:
        """Bind and begin."""
        self._running = True
        self.service.privilegedStartService()
        self.service.startService()

    async def stop(self) -> None:
        """In order, if it runs."""
        if self._running:
            self._running = False
            await self.service.stopService()

    async def stop_only(self, *names: str) -> None:
        """Have some of its services end, as if they had been killed."""
        for child in list(self.service):
            if child.name in names:
                await self._end(child)

    async def _end(self, child: Service) -> None:
        stopped: Any = child.stopService()
        if isinstance(stopped, Deferred):
            await stopped


class Town(TestCase):
    """
    A test case with several daemons.

    :cvar names: of those that are started before each test.
    """

    names: Sequence[str] = ("a", "b")

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """Start them; rounds come often."""
        self.patch(nodes, "CATCH_UP", 0.3)
        self.patch(nodes, "SWEEP", 0.3)
        self.patch(rounds, "YOUNG", 0.05)
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        create_private(self.directory / "cluster.secret", SECRET)
        self.watch = Watch()
        self.store: IStore = MemoryStore(cast(Any, self.watch), QueueLimits())
        self.url = ""
        self.nodes: list[Node] = []
        for name in self.names:
            self.start(name)
        await self.until(lambda: self.live() == list(self.names))

    def node_listen(self, name: str) -> str:
        """Where a node listens for others."""
        return f"tcp:{free_port()}:interface=127.0.0.1"

    def start(self, name: str, **settings: Any) -> Node:
        """One more daemon; the first one's URL is that of all."""
        node = Node(self, name, settings)
        self.url = self.url or node.url
        self.nodes.append(node)
        node.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(node.stop()))
        return node

    def live(self) -> list[str]:
        """The names of the nodes that are live."""
        return [node.name for node in self.successResultOf(self.store.cluster.nodes())]

    async def until(self, condition: Any) -> None:
        """Wait for something that is about to happen."""
        deadline = reactor.seconds() + PATIENCE
        while not condition():
            assert reactor.seconds() < deadline, "it did not happen"
            await deferLater(reactor, STEP, lambda: None)
