"""Wallets of DIDComm v1 at several nodes and workers, which act as one mediator."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the nodes are child processes, their sockets are real
from twisted.internet.threads import deferToThread

from mediatord.wallet.didcomm_client import DeliveredMessage, MediatorProblem, open_http
from mediatord.wallet.didcomm_v1_client import V1Grant, V1Wallet, is_v1_problem
from mediatord.wallet.didcomm_v1_messages import V1Handshake, V1Invitation, V1Mediator, generate_key
from mediatord.wallet.didcomm_v1_socket import V1Socket, connect_v1_socket
from tests.integration.cluster import make_mongo_storage
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.test_lifecycle import DaemonTestCase, send_request
from tests.integration.test_workers import MAX_SOCKETS, await_workers, count_connections
from tests.store.mongo.mongo_test_case import wait_until

reactor: Any = _reactor
NODES = 3


def read_invitation(daemon: Daemon) -> V1Invitation:
    """The invitation that a daemon serves."""
    status, _, text = send_request(daemon.port, "GET", "/invitation/v1")
    assert status == 200, text
    return V1Invitation.from_json(json.loads(text))


def wallet_at_port(wallet: V1Wallet, port: int) -> V1Wallet:
    """The wallet with the address of one node, also in what it was granted."""
    address = f"127.0.0.1:{port}/didcomm"
    mediator = replace(wallet.mediator, http_uri=f"http://{address}", ws_uri=f"ws://{address}")
    at_port = V1Wallet(wallet.key, mediator, open_http(reactor), reactor)
    at_port.keys = wallet.keys
    if wallet.granted is not None:
        at_port.granted = V1Grant(mediator.http_uri, wallet.granted.routing_keys)
    return at_port


async def open_live_socket(wallet: V1Wallet) -> V1Socket:
    """A socket with live delivery."""
    socket = await connect_v1_socket(reactor, wallet)
    assert (await socket.live()).live_delivery
    return socket


async def next_push(socket: V1Socket) -> DeliveredMessage:
    """The next pushed message."""
    return await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)


class NodeTests(ClusterTestCase):
    """Three nodes."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """Bob has connected at the first node; `bobs` are his wallet at each node, and `inbox` its recipient key."""
        self.ports = [node.port for node in self.cluster.nodes]
        self.invitation = read_invitation(self.cluster.nodes[0])
        bob = await V1Wallet.connect(self.invitation, open_http(reactor), reactor)
        await wallet_at_port(bob, self.ports[1]).enrol()
        bob.granted = await wallet_at_port(bob, self.ports[2]).grant()
        self.bobs = [wallet_at_port(bob, port) for port in self.ports]
        self.inbox = (await self.bobs[1].add_key()).did_key

    async def open_socket(self, wallet: V1Wallet) -> V1Socket:
        """A live socket, closed at the end of the test."""
        socket = await open_live_socket(wallet)
        self.addCleanup(socket.close)
        return socket

    def read_text(self, delivered: DeliveredMessage) -> str:
        return self.bobs[0].open(delivered).text

    async def test_handshake_over_several_nodes(self) -> None:
        """Each message of a handshake may come to another node, and a repeated request has the same response."""
        handshake = V1Handshake(self.invitation, generate_key())
        mediators = []
        for port in self.ports:
            unconnected = V1Mediator("", self.invitation.key, "", None)
            wallet = wallet_at_port(V1Wallet(handshake.key, unconnected, open_http(reactor), reactor), port)
            mediators.append(handshake.read_response(await wallet.exchange(handshake.make_request())))
        self.assertEqual(mediators, [mediators[0]] * NODES)
        wallet = V1Wallet(handshake.key, mediators[0], open_http(reactor), reactor)
        wallets = [wallet_at_port(wallet, port) for port in self.ports]
        await wallets[2].notify(handshake.make_complete())
        for one in wallets:
            await one.ping()
        grants = [await one.grant() for one in wallets]
        self.assertEqual(grants, [grants[0]] * NODES)
        connections = self.cluster.servers.client[self.cluster.database]["v1_connections"]
        (connection,) = connections.find({"_id": wallet.key.did_key})
        self.assertNotIn("pending_since", connection)

    async def test_nodes_have_the_same_invitation(self) -> None:
        """The invitation is the same at each node."""
        self.assertEqual([read_invitation(node) for node in self.cluster.nodes], [self.invitation] * NODES)

    async def test_pushes_messages_accepted_by_any_node(self) -> None:
        """Messages that any node accepts are pushed to the socket, in the order of acceptance."""
        socket = await self.open_socket(self.bobs[2])
        texts = [f"push {number}" for number in range(9)]
        delivered = []
        for text, bob in zip(texts, cycle(self.bobs), strict=False):
            await bob.send(self.inbox, text)
            delivered.append(await next_push(socket))
        self.assertEqual([self.read_text(message) for message in delivered], texts)
        self.assertEqual((await self.bobs[1].acknowledge(delivered)).message_count, 0)
        self.assertEqual((await socket.status()).message_count, 0)

    async def test_pushes_bare_messages_of_any_node(self) -> None:
        """A socket of implicit pickup gets what waits and what other nodes accept, and takes it off the queue."""
        await self.bobs[0].send(self.inbox, "waits")
        socket = await self.open_implicit_socket(self.bobs[2])
        expected = ["waits", *(f"comes {number}" for number in range(NODES))]
        received = [self.read_text(await next_push(socket))]
        for text, bob in zip(expected[1:], self.bobs, strict=True):
            await bob.send(self.inbox, text)
            # Before the next is sent: another node may be faster with that.
            while received[-1] != text:
                received.append(self.read_text(await next_push(socket)))
        # A status request would show that the wallet speaks Message Pickup.
        await wait_until(lambda: self.count_queued() == 0)
        while socket.pushed.pending:
            received.append(self.read_text(await next_push(socket)))
        # What waited came twice, as the first push was not acknowledged.
        self.assertEqual((list(dict.fromkeys(received)), len(received)), (expected, len(expected) + 1))

    @pytest.mark.exhaustive
    async def test_killed_node_loses_no_bare_message(self) -> None:
        """What a killed node has pushed to a wallet that did not confirm it comes again at another node."""
        node = self.cluster.nodes[2]
        socket = await self.open_implicit_socket(self.bobs[2])
        socket.answers_pings = False
        await self.bobs[0].send(self.inbox, "not read")
        pushed = await next_push(socket)
        await deferToThread(node.kill)
        await socket.closed()
        again = await next_push(await self.open_implicit_socket(self.bobs[1]))
        await deferToThread(node.start)
        self.assertEqual([self.read_text(one) for one in (pushed, again)], ["not read"] * 2)
        await wait_until(lambda: self.count_queued() == 0)

    async def open_implicit_socket(self, wallet: V1Wallet) -> V1Socket:
        """A socket that has asked for all messages, closed at the end of the test."""
        socket = await connect_v1_socket(reactor, wallet)
        self.addCleanup(socket.close)
        socket.start_implicit_pickup()
        return socket

    def count_queued(self) -> int:
        """Messages of Bob's in the database."""
        database = self.cluster.servers.client[self.cluster.database]
        (account,) = database["accounts"].find({"did": self.bobs[0].key.did_key})
        return database["messages"].count_documents({"account": account["_id"]})

    async def test_nodes_share_queues(self) -> None:
        """Messages are accepted at one node, counted and fetched at another, and acknowledged at a third."""
        for number, bob in enumerate(self.bobs):
            await bob.send(self.inbox, f"wait {number}")
        self.assertEqual([(await bob.status()).message_count for bob in self.bobs], [NODES] * NODES)
        fetched = [[message.id for message in await bob.fetch()] for bob in self.bobs]
        self.assertEqual(fetched, [fetched[0]] * NODES)
        self.assertEqual((await self.bobs[0].acknowledge(fetched[0][:2])).message_count, 1)
        left = await self.bobs[0].fetch()
        self.assertEqual([self.read_text(message) for message in left], [f"wait {NODES - 1}"])
        self.assertEqual((await self.bobs[2].acknowledge(left)).message_count, 0)

    async def test_keys_have_one_owner_at_all_nodes(self) -> None:
        """A key that a wallet has registered at one node cannot be registered by another wallet at another node."""
        thief = wallet_at_port(await V1Wallet.connect(self.invitation, open_http(reactor), reactor), self.ports[2])
        await thief.enrol()
        self.assertEqual(await thief.register(self.inbox), ["client_error"])
        self.assertEqual(await self.bobs[0].register(self.inbox), ["no_change"])

    async def test_replay_at_another_node(self) -> None:
        """A change that one node has served is refused when it is sent to another node again."""
        key = self.bobs[0].spell(generate_key().did_key)
        updates = {"updates": [{"recipient_key": key, "action": "add"}]}
        message, _ = self.bobs[0].pack("coordinate-mediation/1.0/keylist-update", updates)
        envelope = self.bobs[0].encrypt(message)
        self.assertEqual([(await bob.post(envelope)).status for bob in self.bobs[:1]], [200])
        self.assertEqual(await self.bobs[2].update_keys("remove", [key]), ["success"])
        for bob in self.bobs:
            answer = bob.from_mediator((await bob.post(envelope)).body)
            self.assertTrue(is_v1_problem(answer.message))
        self.assertEqual(await self.bobs[0].registered(), [self.bobs[0].spell(self.inbox)])

    async def test_removed_account_is_unknown_at_all_nodes(self) -> None:
        """A wallet that has hung up at one node is unknown to the others once what they have cached is too old."""
        for bob in self.bobs:
            await bob.ping()
        await self.bobs[0].notify(self.bobs[0].pack("did-rotate/1.0/hangup", return_route="none")[0])
        deadline = reactor.seconds() + PATIENCE_SECONDS
        for bob in self.bobs:
            with self.assertRaises(MediatorProblem):
                while reactor.seconds() < deadline:
                    await bob.status()
        database = self.cluster.servers.client[self.cluster.database]
        self.assertIsNone(database["v1_connections"].find_one(self.bobs[0].key.did_key))
        self.assertIsNone(database["accounts"].find_one({"did": self.bobs[0].key.did_key}))


class WorkerTests(DaemonTestCase):
    """Two workers of one daemon on MongoDB."""

    async def test_pushes_between_workers(self) -> None:
        """Wallets that any worker has connected exchange messages between workers."""
        settings = {"workers": 2, "node": "n", "log": {"rotate": {"compress": False}}}
        daemon = self.start_daemon({**settings, "storage": make_mongo_storage(self)})
        await_workers(daemon, 2)
        wallets = []
        for _ in range(2):
            wallets.append(await V1Wallet.connect(read_invitation(daemon), open_http(reactor), reactor))
            await wallets[-1].enrol()
            await wallets[-1].add_key()
        sockets = await self.open_socket_at_each_worker(daemon, wallets)
        for sender, recipient in (sockets, sockets[::-1]):
            inbox = list(recipient.wallet.keys)[-1]
            for number in range(3):
                sender.send_frame(sender.wallet.make_forward(inbox, f"between {number}"))
                delivered = await next_push(recipient)
                self.assertEqual(recipient.wallet.open(delivered).text, f"between {number}")
                self.assertEqual((await recipient.acknowledge([delivered])).message_count, 0)
        await self.stop(daemon)

    async def open_socket_at_each_worker(self, daemon: Daemon, wallets: list[V1Wallet]) -> list[V1Socket]:
        """A live socket for each wallet, on different workers."""
        sockets: dict[str, V1Socket] = {}
        for _ in range(MAX_SOCKETS):
            before = count_connections(daemon)
            socket = await open_live_socket(wallets[len(sockets)])
            self.addCleanup(socket.close)
            (node,) = [node for node, count in count_connections(daemon).items() if count > before.get(node, 0)]
            if node in sockets:
                await socket.close()
            else:
                sockets[node] = socket
            if len(sockets) == len(wallets):
                return list(sockets.values())
        raise AssertionError(f"all on one worker: {count_connections(daemon)}")
