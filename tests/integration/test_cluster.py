"""Three processes on a MongoDB server act as one mediator (UC-021; DCTRL-0004 10)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the nodes are child processes, their sockets are real
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, discover_mediator, open_http
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.integration.cluster import wallet_at_node
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.message_load import PATIENCE_SECONDS, PreparedForward, prepare_forwards, read_marker
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient, RawWebSocket

reactor: Any = _reactor
NODES = 3


class ChangeStreamRecorder:
    """Updates of stored messages. :param stream: pymongo change stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait_for(self, what: str) -> None:
        """
        Return when a delivery mark was in `updatedFields` or `removedFields`.

        :raise AssertionError: there was none in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            change = self._stream.try_next()
            if change is not None and "delivered" in change["updateDescription"][what]:
                return
        raise AssertionError(f"no mark of a delivered message among {what}")


class DIDCommTests(ClusterTestCase):
    """A wallet at one node, messages to another."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """Bob has an account; `bobs` are his wallet at each node."""
        a, b, c = self.cluster.nodes
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, a.url), http, reactor)
        self.bobs = [wallet_at_node(bob, node.port, reactor) for node in (a, b, c)]
        await self.bobs[0].enrol()
        self.assertEqual(await self.bobs[1].register(), ["success"])

    async def open_socket(self, bob: DIDCommWallet) -> DIDCommSocket:
        """A live socket."""
        socket = await connect_didcomm_socket(reactor, bob)
        self.addCleanup(socket.close)
        self.assertTrue((await socket.live()).live_delivery)
        return socket

    async def post_forward(self, letter: PreparedForward, node: int) -> None:
        """POST a forward to a node."""
        response = await self.bobs[node].post(letter.body)
        self.assertEqual(response.status, 202, response.body)

    async def next_push(self, socket: DIDCommSocket) -> DeliveredMessage:
        """The next pushed message."""
        push: Deferred[DeliveredMessage] = socket.pushed.get()
        return await push.addTimeout(PATIENCE_SECONDS, reactor)

    async def test_pushes_messages_accepted_by_any_node(self) -> None:
        """One after the other, in the order of acceptance (UC-021 "live delivery")."""
        socket = await self.open_socket(self.bobs[2])
        forwards = prepare_forwards(self.bobs[0], "push", 9)
        delivered = []
        for forward, node in zip(forwards, cycle(range(NODES)), strict=False):
            await self.post_forward(forward, node)
            delivered.append(await self.next_push(socket))
        self.assertEqual(
            [read_marker(self.bobs[0], message) for message in delivered], [forward.marker for forward in forwards]
        )
        self.assertEqual((await socket.acknowledge(delivered)).message_count, 0)

    async def test_nodes_share_queues(self) -> None:
        """Stored at one node, counted at another, fetched at a third, acknowledged at the first."""
        for node, forward in enumerate(prepare_forwards(self.bobs[0], "wait", 3)):
            await self.post_forward(forward, node)
        self.assertEqual([(await bob.status()).message_count for bob in self.bobs], [3, 3, 3])
        fetched = [[message.id for message in await bob.fetch()] for bob in self.bobs]
        self.assertEqual(fetched, [fetched[0]] * NODES)
        await self.bobs[0].acknowledge(fetched[0][:2])
        self.assertEqual(
            [[message.id for message in await bob.fetch()] for bob in self.bobs], [fetched[0][2:]] * NODES
        )
        await self.bobs[2].acknowledge(fetched[0][2:])

    @pytest.mark.exhaustive
    async def test_requeues_pushes_of_killed_node(self) -> None:
        """Within the lease, or at once when the node restarts (issue: a node killed)."""
        for restarts in (False, True):
            node = self.cluster.nodes[2]
            socket = await self.open_socket(self.bobs[2])
            (forward,) = prepare_forwards(self.bobs[0], "killed", 1)
            with self.watch_messages() as changes:
                await self.post_forward(forward, 0)
                delivered = await self.next_push(socket)
                await deferToThread(changes.wait_for, "updatedFields")
                await deferToThread(node.kill)
                await socket.closed()
                if restarts:
                    await deferToThread(node.start)
                await deferToThread(changes.wait_for, "removedFields")
            if not restarts:
                await deferToThread(node.start)
            redelivered = await self.bobs[2].fetch()
            self.assertEqual([message.id for message in redelivered], [delivered.id])
            await self.bobs[2].acknowledge(redelivered)

    @contextmanager
    def watch_messages(self) -> Iterator[ChangeStreamRecorder]:
        """Record updates of stored messages."""
        messages = self.cluster.servers.client[self.cluster.database]["messages"]
        with messages.watch([{"$match": {"operationType": "update"}}], max_await_time_ms=500) as stream:
            yield ChangeStreamRecorder(stream)


class DecentrlTests(ClusterTestCase):
    """Alice at one node, Bob at another."""

    def setUp(self) -> None:
        """They may send to each other; `daemon_clients` are the nodes."""
        self.daemon_clients = [DaemonClient(node) for node in self.cluster.nodes]
        self.alice, self.bob = (
            RawDecentrlClient(daemon_client, name)
            for daemon_client, name in zip(self.daemon_clients, ("alice", "bob"), strict=False)
        )
        for one in (self.alice, self.bob):
            one.register()
        self.alice.permit_sender(self.bob)
        self.bob.permit_sender(self.alice)

    def open_socket_at(self, identity: RawDecentrlClient, node: int) -> RawWebSocket:
        """A socket of an identity at this node."""
        daemon_client, identity.daemon_client = identity.daemon_client, self.daemon_clients[node]
        try:
            socket = identity.open_socket()
        finally:
            identity.daemon_client = daemon_client
        self.addCleanup(socket.close)
        return socket

    def test_pushes_events_accepted_by_any_node(self) -> None:
        """To sockets at any node (DCTRL-0004 10)."""
        socket = self.open_socket_at(self.bob, 2)
        response = self.alice.send_event(self.bob, "sealed")
        self.assertEqual(response.status, 200, response.body)
        push = socket.receive()
        self.assertEqual([event["id"] for event in push["events"]], [response.json["pendingEventId"]])

    def test_only_one_node_accepts_concurrent_copies(self) -> None:
        """All nodes get the same command at the same time."""
        raw = self.alice.command("sealed", to=self.bob.did, channel="TWO_WAY_PRIVATE")
        connections = [daemon_client.connection() for daemon_client in self.daemon_clients * 3]
        try:
            for connection in connections:
                connection.connect()
            for connection in connections:
                connection.request("POST", "/", raw, {"Content-Type": "application/json"})
            statuses = sorted(connection.getresponse().status for connection in connections)
        finally:
            for connection in connections:
                connection.close()
        self.assertEqual(statuses.count(200), 1, statuses)
