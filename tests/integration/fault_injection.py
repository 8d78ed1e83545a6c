"""
A cluster of three nodes on a replica set of three servers, over a network that can be cut, with faults to inject.

A fault ends with its context; then everything runs again.
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
# Clock steps in seconds, below and above the permitted clock skew.
STEPS = (-120.0, -10.0, 10.0, 120.0)
POLL_SECONDS = 0.1
# Time for which a node tries to notify a peer.
HINT_SECONDS = (len(RETRY_DELAYS) + 1) * CALL_TIMEOUT + sum(RETRY_DELAYS)

Fault = Callable[[], AbstractAsyncContextManager[None]]


class FaultInjectionCluster:
    """
    The cluster; runs between :meth:`open` and :meth:`close`.

    :param chance: chooses the nodes that faults affect.
    """

    def __init__(self, reactor: Any, chance: random.Random, settings: dict[str, Any] | None = None) -> None:
        self._reactor = reactor
        self._chance = chance
        self._settings = settings
        self._clock = SkewedClock()
        self.network = PartitionProxy(reactor)
        self.servers = ReplicaSet(3, via=self._route_from_thread)
        self.cluster: DaemonCluster | None = None

    @property
    def nodes(self) -> list[Daemon]:
        """Nodes of the cluster."""
        assert self.cluster is not None, "there is no cluster yet"
        return self.cluster.nodes

    @property
    def ports(self) -> list[int]:
        """Ports on which the nodes serve wallets."""
        return [node.port for node in self.nodes]

    async def open(self) -> None:
        """
        Start servers, then nodes.

        :raise SkipTest: there is no MongoDB server.
        """
        await deferToThread(self.servers.open)
        self.cluster = DaemonCluster(
            self.servers.uri(DATABASE), settings=self._settings, via=self.network.route_to, clocks={"c": self._clock}
        )
        await deferToThread(self.cluster.start)

    async def close(self) -> None:
        """Stop nodes, servers and network."""
        if self.cluster is not None:
            await deferToThread(self.cluster.clean)
        await deferToThread(self.servers.close)
        await self.network.close()
        self._clock.remove()

    async def wait_until_recovered(self) -> None:
        """Return when there is a primary and all nodes are healthy."""
        await deferToThread(self.servers.primary)
        for node in self.nodes:
            await deferToThread(node.await_health)

    def count_messages(self) -> int:
        """Number of stored messages."""
        return self._collection("messages").count_documents({})

    def find_miscounts(self) -> list[str]:
        """Counters that do not match the documents."""
        return find_miscounts(self.servers.client, DATABASE)

    def count_remote_pushes(self) -> dict[int, float]:
        """Messages that peers have pushed for each node since it started, by the node's port."""
        return {node.port: _read_push_metric(node, "pushed") for node in self.nodes}

    @property
    def faults(self) -> dict[str, Fault]:
        """Faults by name."""
        return {
            "node killed": self.kill_node,
            "node frozen": self.freeze_node,
            "clock of a node stepped": self.step_clock,
            "primary killed": self.kill_primary,
            "primary stepped down": self.step_down_primary,
            "primary frozen": self.freeze_primary,
            "primary isolated": self.isolate_primary,
            "node isolated from the store": self.isolate_node_from_store,
            "node loses its connections to the store": self.reset_store_connections,
            "two nodes partitioned": self.partition_two_nodes,
            "node isolated from its peers": self.isolate_node_from_peers,
        }

    @asynccontextmanager
    async def kill_node(self) -> AsyncIterator[None]:
        """Kill a node, and with it its sockets."""
        node = self._chance.choice(self.nodes)
        port = self._port_of(node)
        await deferToThread(node.kill)
        await self.network.close_route(port)
        try:
            yield
        finally:
            self.network.open_route(port)
            await deferToThread(node.start)

    @asynccontextmanager
    async def freeze_node(self) -> AsyncIterator[None]:
        """Suspend a node until its lease has expired."""
        node = self._chance.choice(self.nodes)
        os.kill(node.pid, signal.SIGSTOP)
        resumed = deferToThread(self._resume_when_lease_expires, node)
        try:
            yield
        finally:
            await resumed

    @asynccontextmanager
    async def step_clock(self) -> AsyncIterator[None]:
        """Set the clock of one host; the node has noticed the step, and later the correction."""
        await deferToThread(self._set_clock, self._chance.choice(STEPS))
        try:
            yield
        finally:
            await deferToThread(self._set_clock, 0.0)

    @asynccontextmanager
    async def kill_primary(self) -> AsyncIterator[None]:
        """Its connections end at once."""
        primary = await deferToThread(self.servers.primary)
        await deferToThread(self.servers.kill, primary)
        try:
            yield
        finally:
            await deferToThread(self.servers.start, primary)

    @asynccontextmanager
    async def step_down_primary(self) -> AsyncIterator[None]:
        """It keeps its connections and refuses writes."""
        await deferToThread(self.servers.step_down)
        yield

    @asynccontextmanager
    async def freeze_primary(self) -> AsyncIterator[None]:
        """It keeps its connections and answers nothing."""
        primary = await deferToThread(self.servers.primary)
        self.servers.freeze(primary)
        try:
            yield
        finally:
            self.servers.thaw(primary)

    @asynccontextmanager
    async def isolate_primary(self) -> AsyncIterator[None]:
        """It has to find out by itself that it is no longer primary."""
        primary = self.servers.members[await deferToThread(self.servers.primary)]
        others = [member.port for member in self.servers.members if member is not primary]
        with (
            self.network.cut(primary.port, silently=True),
            self.network.cut(*others, of=[primary.pid], silently=True),
        ):
            yield

    @asynccontextmanager
    async def isolate_node_from_store(self) -> AsyncIterator[None]:
        """One node gets no responses from the store; its lease expires."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(member.port for member in self.servers.members), of=[node.pid], silently=True):
            yield

    @asynccontextmanager
    async def reset_store_connections(self) -> AsyncIterator[None]:
        """All connections of one node to the store end at once."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(member.port for member in self.servers.members), of=[node.pid]):
            yield

    @asynccontextmanager
    async def partition_two_nodes(self) -> AsyncIterator[None]:
        """Notifications of one node to another are delayed until the end."""
        node, peer = self._chance.sample(self.nodes, 2)
        with self.network.cut(self._port_of(peer), of=[node.pid], silently=True):
            yield

    @asynccontextmanager
    async def isolate_node_from_peers(self) -> AsyncIterator[None]:
        """One node reaches no peer until a notification has failed, if there is one to send."""
        node = self._chance.choice(self.nodes)
        with self.network.cut(*(self._port_of(other) for other in self.nodes), of=[node.pid]):
            failed = deferToThread(_wait_for_failure, node)
            try:
                yield
            finally:
                await failed

    def _resume_when_lease_expires(self, node: Daemon) -> None:
        name = node.configuration()["node"]
        nodes = self._collection("nodes")
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while nodes.count_documents({"name": name}):
                assert time.monotonic() < deadline, f"the lease of frozen node {name} did not expire"
                time.sleep(POLL_SECONDS)
        finally:
            os.kill(node.pid, signal.SIGCONT)

    def _set_clock(self, ahead: float) -> None:
        node = self.nodes[-1]
        read_until = len(node.output())
        self._clock.set(ahead)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "the system clock was set" not in node.output()[read_until:]:
            assert time.monotonic() < deadline, f"a node did not notice a clock step:\n{node.output()}"
            time.sleep(POLL_SECONDS)

    def _collection(self, name: str) -> Collection[dict[str, Any]]:
        client: MongoClient[dict[str, Any]] = self.servers.client
        return client[DATABASE][name]

    def _port_of(self, node: Daemon) -> int:
        assert self.cluster is not None, "there is no cluster yet"
        return self.cluster.port_of(node)

    def _route_from_thread(self, port: int) -> int:
        return int(blockingCallFromThread(self._reactor, self.network.route_to, port))


def _wait_for_failure(node: Daemon) -> None:
    initial = _read_push_metric(node, "failed")
    deadline = time.monotonic() + HINT_SECONDS
    while _read_push_metric(node, "failed") == initial and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _read_push_metric(node: Daemon, outcome: str) -> float:
    metric = f'mediator_cluster_pushes_total{{outcome="{outcome}"}} '
    lines = DaemonClient(node).request("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(metric)) for line in lines if line.startswith(metric))
