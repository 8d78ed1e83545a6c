"""
A cluster on a replica set, both of three, over a network that can be cut; and what can happen to them.

Every trouble is over when its context ends, and everything runs again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection
from twisted.internet.threads import blockingCallFromThread, deferToThread

from mediatord.cluster.peer_connection import CALL_TIMEOUT
from mediatord.cluster.peer_notifications import RETRY_DELAYS
from tests.integration.cluster import DaemonCluster
from tests.integration.daemon import Daemon
from tests.integration.database_counters import find_miscounts
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import DaemonClient
from tests.partition_proxy import PartitionProxy
from tests.replica_set import ReplicaSet
from tests.skewed_clock import SkewedClock

DATABASE = "mediatord"
# By how much a clock is set, in seconds: by less than those of nodes may be apart, and by more.
STEPS = (-120.0, -10.0, 10.0, 120.0)
LOOK_SECONDS = 0.1
# For which a node tries to have another one push something.
HINT_SECONDS = (len(RETRY_DELAYS) + 1) * CALL_TIMEOUT + sum(RETRY_DELAYS)

Trouble = Callable[[], AbstractAsyncContextManager[None]]


class FaultInjectionCluster:
    """
    All of it; runs between :meth:`open` and :meth:`close`.

    :param chance: decides whom troubles befall.
    """

    def __init__(self, reactor: Any, chance: random.Random, settings: dict[str, Any] | None = None) -> None:
        self._reactor = reactor
        self._chance = chance
        self._settings = settings
        self._clock = SkewedClock()
        self.network = PartitionProxy(reactor)
        self.servers = ReplicaSet(3, via=self._way_from_thread)
        self.cluster: DaemonCluster | None = None

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
        self.cluster = DaemonCluster(
            self.servers.uri(DATABASE), settings=self._settings, via=self.network.way_to, clocks={"c": self._clock}
        )
        await deferToThread(self.cluster.start)

    async def close(self) -> None:
        """End everything."""
        if self.cluster is not None:
            await deferToThread(self.cluster.clean)
        await deferToThread(self.servers.close)
        await self.network.close()
        self._clock.remove()

    async def recovered(self) -> None:
        """Returns when there is a primary and all nodes are well."""
        await deferToThread(self.servers.primary)
        for node in self.nodes:
            await deferToThread(node.await_health)

    def messages(self) -> int:
        """How many are in the store."""
        return self._collection("messages").count_documents({})

    def miscounted(self) -> list[str]:
        """Counters of the database that do not agree with what is in it."""
        return find_miscounts(self.servers.client, DATABASE)

    def pushes(self) -> dict[int, float]:
        """How many messages other nodes have pushed for each of them, by the port of the latter, since it started."""
        return {node.port: _take_pushes(node, "pushed") for node in self.nodes}

    @property
    def troubles(self) -> dict[str, Trouble]:
        """By name."""
        return {
            "node killed": self.node_killed,
            "node frozen": self.node_frozen,
            "clock of a node set": self.clock_set,
            "primary killed": self.primary_killed,
            "primary stepped down": self.primary_stepped_down,
            "primary frozen": self.primary_frozen,
            "primary cut off": self.primary_cut_off,
            "node cut off from the store": self.node_cut_off,
            "node loses its connections to the store": self.node_loses_connections,
            "two nodes cut off from each other": self.nodes_cut_off,
            "node cut off from all others": self.node_alone,
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
    async def node_frozen(self) -> AsyncIterator[None]:
        """One of the nodes stands still until the others have given it up, and does not know about it."""
        node = self._chance.choice(self.nodes)
        os.kill(node.pid, signal.SIGSTOP)
        given_up = deferToThread(self._thaw_when_given_up, node)
        try:
            yield
        finally:
            await given_up

    @asynccontextmanager
    async def clock_set(self) -> AsyncIterator[None]:
        """That of one host is wrong for a while; the node has seen it, and that it is right again."""
        await deferToThread(self._set_clock, self._chance.choice(STEPS))
        try:
            yield
        finally:
            await deferToThread(self._set_clock, 0.0)

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
        """One node tells another nothing, and gets no answer; what it has told arrives in the end."""
        one, other = self._chance.sample(self.nodes, 2)
        with self.network.cut(self._port_of(other), of=[one.pid], silently=True):
            yield

    @asynccontextmanager
    async def node_alone(self) -> AsyncIterator[None]:
        """One node reaches no other, until it has given up to tell them something, if there is anything to tell."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(self._port_of(other) for other in self.nodes), of=[node.pid]):
            given_up = deferToThread(_wait_for_failure, node)
            try:
                yield
            finally:
                await given_up

    def _thaw_when_given_up(self, node: Daemon) -> None:
        name = node.configuration()["node"]
        nodes = self._collection("nodes")
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while nodes.count_documents({"name": name}):
                assert time.monotonic() < deadline, f"node {name} is frozen, and nobody takes it for dead"
                time.sleep(LOOK_SECONDS)
        finally:
            os.kill(node.pid, signal.SIGCONT)

    def _set_clock(self, ahead: float) -> None:
        node = self.nodes[-1]
        said = len(node.output())
        self._clock.set(ahead)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "the system clock was set" not in node.output()[said:]:
            assert time.monotonic() < deadline, (
                f"the clock of a node was set, and it does not see it:\n{node.output()}"
            )
            time.sleep(LOOK_SECONDS)

    def _collection(self, name: str) -> Collection[dict[str, Any]]:
        client: MongoClient[dict[str, Any]] = self.servers.client
        return client[DATABASE][name]

    def _port_of(self, node: Daemon) -> int:
        assert self.cluster is not None, "there is no cluster yet"
        return self.cluster.port_of(node)

    def _way_from_thread(self, port: int) -> int:
        return int(blockingCallFromThread(self._reactor, self.network.way_to, port))


def _wait_for_failure(node: Daemon) -> None:
    before = _take_pushes(node, "failed")
    deadline = time.monotonic() + HINT_SECONDS
    while _take_pushes(node, "failed") == before and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _take_pushes(node: Daemon, outcome: str) -> float:
    figure = f'mediator_cluster_pushes_total{{outcome="{outcome}"}} '
    lines = DaemonClient(node).ask("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(figure)) for line in lines if line.startswith(figure))
