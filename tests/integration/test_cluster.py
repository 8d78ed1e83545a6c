"""Three processes on a MongoDB server that act as one mediator (UC-021; DCTRL-0004 10)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the nodes are child processes, their sockets are real
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, discover_mediator, open_http
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.integration.cluster import say_to_listener, wallet_at_node
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, PreparedForward, prepare_forwards, read_marker
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient, RawWebSocket

reactor: Any = _reactor

PICKUP = "https://didcomm.org/messagepickup/3.0"
NODES = 3
# Figures that are about to change are looked at so often.
ASK_SECONDS = 0.05


class ChangeStreamRecorder:
    """Updates of stored messages, as they happen. :param stream: of pymongo's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait_for(self, what: str) -> None:
        """
        Return when there was one with the mark of a delivered message among `updatedFields`, or `removedFields`.

        :raise AssertionError: there was none for too long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            change = self._stream.try_next()
            if change is not None and "delivered" in change["updateDescription"][what]:
                return
        raise AssertionError(f"no mark of a delivered message among {what}")


class DIDCommTests(ClusterTestCase):
    """A wallet at one node, letters to another."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """Bob has an account; `bobs` is he at each node."""
        a, b, c = self.cluster.nodes
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, a.url), http, reactor)
        self.bobs = [wallet_at_node(bob, node.port, reactor) for node in (a, b, c)]
        await self.bobs[0].enrol()
        self.assertEqual(await self.bobs[1].register(), ["success"])

    async def socket(self, bob: DIDCommWallet) -> DIDCommSocket:
        """One that is live."""
        opened = await connect_didcomm_socket(reactor, bob)
        self.addCleanup(opened.close)
        self.assertTrue((await opened.live()).live_delivery)
        return opened

    async def post(self, letter: PreparedForward, node: int) -> None:
        """Hand a letter in."""
        response = await self.bobs[node].post(letter.body)
        self.assertEqual(response.status, 202, response.body)

    async def pushed(self, socket: DIDCommSocket) -> DeliveredMessage:
        """The next message that comes by itself."""
        waiting: Deferred[DeliveredMessage] = socket.pushed.get()
        return await waiting.addTimeout(PATIENCE_SECONDS, reactor)

    async def test_letters_are_pushed_whichever_node_takes_them(self) -> None:
        """In the order in which they were taken, one after the other (UC-021 "live delivery")."""
        socket = await self.socket(self.bobs[2])
        sent = prepare_forwards(self.bobs[0], "push", 9)
        came = []
        for letter, node in zip(sent, cycle(range(NODES)), strict=False):
            await self.post(letter, node)
            came.append(await self.pushed(socket))
        self.assertEqual([read_marker(self.bobs[0], one) for one in came], [one.marker for one in sent])
        self.assertEqual((await socket.acknowledge(came)).message_count, 0)

    async def test_a_wallet_may_have_sockets_at_several_nodes(self) -> None:
        """Each gets the message; acknowledging it at one is enough."""
        sockets = [await self.socket(bob) for bob in self.bobs]
        (letter,) = prepare_forwards(self.bobs[0], "several", 1)
        await self.post(letter, 1)
        came = [await self.pushed(socket) for socket in sockets]
        self.assertEqual(len({one.id for one in came}), 1)
        self.assertEqual((await sockets[0].acknowledge(came[:1])).message_count, 0)
        self.assertEqual(await self.bobs[2].fetch(), [])

    async def test_what_waits_is_the_same_everywhere(self) -> None:
        """Stored at one node, counted at another, fetched at a third, acknowledged at the first."""
        for node, letter in enumerate(prepare_forwards(self.bobs[0], "wait", 3)):
            await self.post(letter, node)
        self.assertEqual([(await bob.status()).message_count for bob in self.bobs], [3, 3, 3])
        fetched = [[one.id for one in await bob.fetch()] for bob in self.bobs]
        self.assertEqual(fetched, [fetched[0]] * NODES)
        await self.bobs[0].acknowledge(fetched[0][:2])
        self.assertEqual([[one.id for one in await bob.fetch()] for bob in self.bobs], [fetched[0][2:]] * NODES)
        await self.bobs[2].acknowledge(fetched[0][2:])

    async def test_a_request_is_new_once(self) -> None:
        """The same envelope again is a replay, at whichever node (reference 8.2)."""
        _, envelope = self.bobs[0].pack(f"{PICKUP}/status-request", {})
        first, second = [await bob.post(envelope) for bob in self.bobs[:2]]
        self.assertEqual(self.bobs[0].from_mediator(first.body).message.type.uri, f"{PICKUP}/status")
        refused = self.bobs[1].from_mediator(second.body).message
        self.assertEqual((refused.body or {})["code"], "e.p.crypto.message.dejavu")

    @pytest.mark.exhaustive
    async def test_messages_of_a_killed_node_are_pending_again(self) -> None:
        """
        Within the lease (issue: a node killed). Whoever it pushed them to may have read them or not. When the node
        comes back before that, at once.
        """
        for comes_back in (False, True):
            node = self.cluster.nodes[2]
            socket = await self.socket(self.bobs[2])
            (letter,) = prepare_forwards(self.bobs[0], "killed", 1)
            with self.changes() as changes:
                await self.post(letter, 0)
                delivered = await self.pushed(socket)
                await deferToThread(changes.wait_for, "updatedFields")
                await deferToThread(node.kill)
                await socket.closed()
                if comes_back:
                    await deferToThread(node.start)
                await deferToThread(changes.wait_for, "removedFields")
            if not comes_back:
                await deferToThread(node.start)
            again = await self.bobs[2].fetch()
            self.assertEqual([one.id for one in again], [delivered.id])
            await self.bobs[2].acknowledge(again)

    @contextmanager
    def changes(self) -> Iterator[ChangeStreamRecorder]:
        """What becomes of stored messages from now on."""
        messages = self.cluster.servers.client[self.cluster.database]["messages"]
        with messages.watch([{"$match": {"operationType": "update"}}], max_await_time_ms=500) as stream:
            yield ChangeStreamRecorder(stream)

    async def test_hints_are_counted(self) -> None:
        """What was pushed at another node than the one that took it is in its figures."""
        a, *_ = self.cluster.nodes
        before = figure(a, "mediator_cluster_hint_duration_seconds_count")
        socket = await self.socket(self.bobs[1])
        (letter,) = prepare_forwards(self.bobs[0], "counted", 1)
        await self.post(letter, 0)
        came = await self.pushed(socket)
        await socket.acknowledge([came])
        # The wallet may have it before the node that asked for that is told so.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while figure(a, "mediator_cluster_hint_duration_seconds_count") <= before:
            self.assertLess(time.monotonic(), deadline)
            await deferLater(reactor, ASK_SECONDS)
        # It may have waited too long for the store just now.
        while figure(a, "mediator_storage_up") != 1.0:
            self.assertLess(time.monotonic(), deadline)
            await deferLater(reactor, ASK_SECONDS)

    async def test_a_stranger_between_the_nodes_is_refused(self) -> None:
        """Whoever does not know the secret gets nothing from a node's own listener, and nothing of what it has."""
        a, *_ = self.cluster.nodes
        for said in (b"POST /hints HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", bytes(4), b"\xff" * 1000):
            answer = await deferToThread(say_to_listener, self.cluster.port_of(a), said)
            self.assertEqual(answer, bytes(4))


class DecentrlTests(ClusterTestCase):
    """Alice at one node, Bob at another."""

    def setUp(self) -> None:
        """They may write to each other; `doors` are the nodes."""
        self.doors = [DaemonClient(node) for node in self.cluster.nodes]
        self.alice, self.bob = (
            RawDecentrlClient(daemon_client, name)
            for daemon_client, name in zip(self.doors, ("alice", "bob"), strict=False)
        )
        for one in (self.alice, self.bob):
            one.register()
        self.alice.befriend(self.bob)
        self.bob.befriend(self.alice)

    def line(self, resident: RawDecentrlClient, node: int) -> RawWebSocket:
        """A socket of a resident at another node than its own."""
        daemon_client, resident.daemon_client = resident.daemon_client, self.doors[node]
        try:
            line = resident.socket()
        finally:
            resident.daemon_client = daemon_client
        self.addCleanup(line.close)
        return line

    def test_events_are_pushed_whichever_node_takes_them(self) -> None:
        """To sockets at any node (DCTRL-0004 10)."""
        line = self.line(self.bob, 2)
        answered = self.alice.tell(self.bob, "sealed")
        self.assertEqual(answered.status, 200, answered.body)
        heard = line.hear()
        self.assertEqual([event["id"] for event in heard["events"]], [answered.json["pendingEventId"]])

    def test_a_command_is_carried_out_once(self) -> None:
        """The same again is refused, at whichever node it is tried (DCTRL-0004 12.2)."""
        raw = self.alice.command("sealed", to=self.bob.did, channel="TWO_WAY_PRIVATE")
        self.assertEqual(self.doors[0].command(raw).status, 200)
        for daemon_client in self.doors:
            self.assertEqual(daemon_client.command(raw).json["code"], "DUPLICATE_NONCE")

    def test_one_of_many_nodes_carries_it_out(self) -> None:
        """All are asked at the same time."""
        raw = self.alice.command("sealed", to=self.bob.did, channel="TWO_WAY_PRIVATE")
        connections = [daemon_client.connection() for daemon_client in self.doors * 3]
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


def figure(node: Daemon, name: str) -> float:
    """A number among the figures of a node; the sum over all labels."""
    lines = DaemonClient(node).ask("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)
