"""
A cluster on a replica set, both of three, over a network that can be cut; and what can happen to them.

Every trouble is over when its context ends, and everything runs again.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from pymongo import MongoClient
from twisted.internet.threads import blockingCallFromThread, deferToThread

from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.mongod import ReplicaSet
from tests.network import Network

DATABASE = "mediatord"

Trouble = Callable[[], AbstractAsyncContextManager[None]]


class Stage:
    """
    All of it; runs between :meth:`open` and :meth:`close`.

    :param chance: decides whom troubles befall.
    """

    def __init__(self, reactor: Any, chance: random.Random, settings: dict[str, Any] | None = None) -> None:
        self._reactor = reactor
        self._chance = chance
        self._settings = settings
        self.network = Network(reactor)
        self.servers = ReplicaSet(3, via=self._way_from_thread)
        self.cluster: Cluster | None = None

    @property
    def nodes(self) -> list[Daemon]:
        """Those of the cluster."""
        assert self.cluster is not None, "there is no cluster yet"
        return self.cluster.nodes

    @property
    def ports(self) -> list[int]:
        """Where the nodes serve wallets."""
        return [node.port for node in self.nodes]

    async def open(self) -> None:
        """
        Start servers, then nodes.

        :raise SkipTest: there is no server to run.
        """
        await deferToThread(self.servers.open)
        self.cluster = Cluster(self.servers.uri(DATABASE), settings=self._settings, via=self.network.way_to)
        await deferToThread(self.cluster.start)

    async def close(self) -> None:
        """End everything."""
        if self.cluster is not None:
            await deferToThread(self.cluster.clean)
        await deferToThread(self.servers.close)
        await self.network.close()

    async def recovered(self) -> None:
        """Returns when there is a primary and all nodes are well."""
        await deferToThread(self.servers.primary)
        for node in self.nodes:
            await deferToThread(node.await_health)

    def messages(self) -> int:
        """How many are in the store."""
        client: MongoClient[dict[str, Any]] = self.servers.client
        return client[DATABASE]["messages"].count_documents({})

    @property
    def troubles(self) -> dict[str, Trouble]:
        """By name."""
        return {
            "node killed": self.node_killed,
            "primary killed": self.primary_killed,
            "primary stepped down": self.primary_stepped_down,
            "primary frozen": self.primary_frozen,
            "primary cut off": self.primary_cut_off,
            "node cut off from the store": self.node_cut_off,
            "node loses its connections to the store": self.node_loses_connections,
            "two nodes cut off from each other": self.nodes_cut_off,
        }

    @asynccontextmanager
    async def node_killed(self) -> AsyncIterator[None]:
        """One of the nodes, and with it its sockets."""
        node = self._chance.choice(self.nodes)
        port = self._port_of(node)
        await deferToThread(node.kill)
        await self.network.close_way(port)
        try:
            yield
        finally:
            self.network.open_way(port)
            await deferToThread(node.start)

    @asynccontextmanager
    async def primary_killed(self) -> AsyncIterator[None]:
        """Its connections end at once."""
        primary = await deferToThread(self.servers.primary)
        await deferToThread(self.servers.kill, primary)
        try:
            yield
        finally:
            await deferToThread(self.servers.start, primary)

    @asynccontextmanager
    async def primary_stepped_down(self) -> AsyncIterator[None]:
        """It keeps its connections, and takes no more writes."""
        await deferToThread(self.servers.step_down)
        yield

    @asynccontextmanager
    async def primary_frozen(self) -> AsyncIterator[None]:
        """It keeps its connections, says nothing, and does not know about it when it thaws."""
        primary = await deferToThread(self.servers.primary)
        self.servers.freeze(primary)
        try:
            yield
        finally:
            self.servers.thaw(primary)

    @asynccontextmanager
    async def primary_cut_off(self) -> AsyncIterator[None]:
        """Nobody reaches it, and it reaches nobody; it finds out by itself that it is none any more."""
        primary = self.servers.members[await deferToThread(self.servers.primary)]
        others = [member.port for member in self.servers.members if member is not primary]
        with (
            self.network.cut(primary.port, silently=True),
            self.network.cut(*others, of=[primary.pid], silently=True),
        ):
            yield

    @asynccontextmanager
    async def node_cut_off(self) -> AsyncIterator[None]:
        """One node gets no answers from the store; the others see its lease end."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(member.port for member in self.servers.members), of=[node.pid], silently=True):
            yield

    @asynccontextmanager
    async def node_loses_connections(self) -> AsyncIterator[None]:
        """Whatever one node begins with the store ends at once."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(member.port for member in self.servers.members), of=[node.pid]):
            yield

    @asynccontextmanager
    async def nodes_cut_off(self) -> AsyncIterator[None]:
        """One node tells another nothing, and gets no answer."""
        one, other = self._chance.sample(self.nodes, 2)
        with self.network.cut(self._port_of(other), of=[one.pid], silently=True):
            yield

    def _port_of(self, node: Daemon) -> int:
        assert self.cluster is not None, "there is no cluster yet"
        return self.cluster.port_of(node)

    def _way_from_thread(self, port: int) -> int:
        return int(blockingCallFromThread(self._reactor, self.network.way_to, port))
