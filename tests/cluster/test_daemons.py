"""Daemons as a cluster, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import treq
from twisted.internet.defer import fail
from twisted.internet.task import deferLater
from twisted.web.client import Agent

from mediatord.cluster import anti_entropy, membership
from mediatord.cluster.membership import IDENTITY_DIFFERS, SECRET_DIFFERS
from mediatord.errors import StoreUnavailable
from mediatord.runtime.secret_files import create_secret_file
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.wallet.didcomm_client import DIDCommWallet, discover_mediator, open_http
from mediatord.wallet.didcomm_messages import anoncrypt, build_forward
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.cluster.in_process_daemons import (
    POLL_INTERVAL,
    WAIT_TIMEOUT,
    InProcessClusterTestCase,
    InProcessNode,
    reactor,
)
from tests.integration.message_load import read_marker


class TwoNodeTestCase(InProcessClusterTestCase):
    """Bob has an account."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.http = open_http(reactor)
        self.a, self.b = self.nodes
        self.bob = DIDCommWallet.generate(await discover_mediator(self.http, self.url), self.http, reactor)
        await self.bob.enrol()
        self.assertEqual(await self.bob.register(), ["success"])

    async def open_live_socket(self, node: InProcessNode) -> DIDCommSocket:
        """A live socket of Bob's at this node."""
        opened = await connect_didcomm_socket(reactor, self.bob, endpoint=node.make_endpoint())
        self.addCleanup(opened.close)
        await opened.live()
        return opened

    async def forward(self, node: InProcessNode, text: str) -> None:
        """Forward an anonymous message to Bob at this node."""
        forward = self.make_forward(text)
        raw = anoncrypt(build_forward(self.bob.did, [forward]), self.bob.mediator.document)
        self.assertEqual((await self.bob.post(raw, url=f"{node.url}/didcomm")).status, 202)

    def make_forward(self, text: str) -> bytes:
        """An anonymous forward to Bob."""
        message = {
            "id": text,
            "type": "https://didcomm.org/basicmessage/2.0/message",
            "typ": "application/didcomm-plain+json",
            "to": [self.bob.did],
            "body": {"content": text},
        }
        return anoncrypt(message, self.bob.identity.document)

    async def read_text(self, socket: DIDCommSocket) -> str:
        """Text of the next push."""
        return read_marker(self.bob, await socket.pushed.get().addTimeout(WAIT_TIMEOUT, reactor))

    async def request(self, node: InProcessNode, method: str, path: str) -> tuple[int, bytes]:
        """A plain HTTP request."""
        client = treq.client.HTTPClient(Agent(reactor))
        response = await client.request(method, node.url + path, reactor=reactor, unbuffered=True)
        return response.code, await response.content()


class PushTests(TwoNodeTestCase):
    async def test_pushes_to_other_node(self) -> None:
        """A message accepted at one node is pushed to the socket at the other, in both directions."""
        # Not by the holding node itself, which anti-entropy might tell before the notification arrives.
        self.patch(anti_entropy, "MIN_MESSAGE_AGE", 2 * WAIT_TIMEOUT)
        for accepting, holding in ((self.a, self.b), (self.b, self.a)):
            socket = await self.open_live_socket(holding)
            await self.forward(accepting, "hello")
            self.assertEqual(await self.read_text(socket), "hello")
            self.assertEqual(await self.read_notification_outcomes(accepting), [b'{outcome="pushed"} 1.0'])
            await socket.close()

    async def read_notification_outcomes(self, node: InProcessNode) -> list[bytes]:
        """Outcomes of pushes to other nodes, once the first is counted, which happens after the push."""
        deadline, name = reactor.seconds() + WAIT_TIMEOUT, b"mediator_cluster_pushes_total"
        while True:
            _, metrics = await self.request(node, "GET", "/metrics")
            found = [line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name + b"{")]
            if found or reactor.seconds() > deadline:
                return found
            await deferLater(reactor, POLL_INTERVAL, lambda: None)


class RefusalTests(TwoNodeTestCase):
    async def test_another_secret(self) -> None:
        """A node with another secret ends with one line; the others are not affected."""
        create_secret_file(self.directory / "other.secret", b"something else of at least 32 bytes")
        refused_node = self.start_node("c", cluster={"secret_file": str(self.directory / "other.secret")})
        await self.wait_until(lambda: refused_node.fatal_errors)
        self.assertEqual((refused_node.fatal_errors, self.list_live_names()), ([SECRET_DIFFERS], ["a", "b"]))

    async def test_another_public_url(self) -> None:
        """A node with another public URL, to which its DIDs lead, ends with one line."""
        refused_node = self.start_node("c", public_url="http://127.0.0.1:1")
        await self.wait_until(lambda: refused_node.fatal_errors)
        self.assertEqual((refused_node.fatal_errors, self.list_live_names()), ([IDENTITY_DIFFERS], ["a", "b"]))

    async def test_name_in_use(self) -> None:
        """A node whose name another one uses ends with one line that says where that is, which goes on."""
        # The answer of the other node suffices: its next renewal of its lease is not awaited.
        self.patch(membership, "LEASE_POLL_INTERVAL", 2 * WAIT_TIMEOUT)
        nodes = self.successResultOf(self.store.cluster.list_nodes())
        refused_node = self.start_node("b")
        await self.wait_until(lambda: refused_node.fatal_errors)
        line = f"node: the name b is in use by the node at {nodes[1].address}; give every node its own name"
        self.assertEqual(refused_node.fatal_errors, [line])
        live_nodes = self.successResultOf(self.store.cluster.list_nodes())
        self.assertEqual([node.boot for node in live_nodes], [node.boot for node in nodes])


class StoreOutageTests(TwoNodeTestCase):
    async def test_store_down_at_start(self) -> None:
        """The daemon starts and answers 503; when the store is up it joins within a few seconds."""
        store: Any = self.store
        really, away = store.open, True
        store.open = lambda: fail(StoreUnavailable()) if away else really()
        store.ping = lambda: fail(StoreUnavailable())
        node = self.start_node("c")
        status, _ = await self.request(node, "GET", "/health")
        self.assertEqual(status, 503)
        self.assertEqual((self.list_live_names(), await self.is_store_up(node)), (["a", "b"], 0))
        del store.ping
        away = False
        await self.wait_until(lambda: "c" in self.list_live_names())
        self.assertEqual(await self.is_store_up(node), 1)

    async def test_outage_shows_in_metrics(self) -> None:
        """The state found by /health shows in the metrics."""
        store: Any = self.store
        store.ping = lambda: fail(StoreUnavailable())
        self.assertEqual((await self.request(self.a, "GET", "/health"))[0], 503)
        self.assertEqual(await self.is_store_up(self.a), 0)
        del store.ping
        self.assertEqual((await self.request(self.a, "GET", "/health"))[0], 200)
        self.assertEqual(await self.is_store_up(self.a), 1)

    async def is_store_up(self, node: InProcessNode) -> int:
        """The node's metric of the store's state."""
        _, metrics = await self.request(node, "GET", "/metrics")
        (line,) = [line for line in metrics.splitlines() if line.startswith(b"mediator_storage_up ")]
        return int(float(line.split()[1]))

    async def test_unusable_store_ends_daemon(self) -> None:
        """A store that must not be used ends the daemon with its line, at any time."""
        store: Any = self.store
        store.open = lambda: fail(StoreUnusable("storage.mongodb.uri: no"))
        node = self.start_node("c")
        self.assertEqual(node.fatal_errors, ["storage.mongodb.uri: no"])
        del store.open


class HealthTests(TwoNodeTestCase):
    """Health of a node, by which a load balancer decides."""

    async def read_detail(self, node: InProcessNode) -> str:
        """Reasons against the node; empty for none."""
        status, body = await self.request(node, "GET", "/health")
        health = json.loads(body)
        self.assertEqual((status, health["status"]), (503, "error") if "detail" in health else (200, "ok"))
        return str(health.get("detail", ""))

    async def wait_for_detail(self, node: InProcessNode, detail: str) -> None:
        """Wait until the node reports this."""
        deadline = reactor.seconds() + WAIT_TIMEOUT
        while await self.read_detail(node) != detail:
            assert reactor.seconds() < deadline, await self.read_detail(node)
            await deferLater(reactor, POLL_INTERVAL, lambda: None)

    async def test_unhealthy_until_joined(self) -> None:
        """A node is unhealthy until it has joined: live mode would be refused there."""
        store: Any = self.store
        store.cluster.join = lambda *_: fail(StoreUnavailable())
        node = self.start_node("c")
        self.assertEqual(await self.read_detail(node), "cluster: not joined")
        self.assertEqual(await self.read_detail(self.a), "")
        del store.cluster.join
        await self.wait_for_detail(node, "")
        self.assertIn("c", self.list_live_names())


class UnixSocketTests(TwoNodeTestCase):
    def get_peer_endpoint(self, name: str) -> str:
        """Path of a UNIX socket."""
        return f"unix:{self.directory}/{name}.sock"

    async def test_pushes_over_unix_socket(self) -> None:
        """Nodes of one host need no TCP."""
        socket = await self.open_live_socket(self.b)
        await self.forward(self.a, "hello")
        self.assertEqual(await self.read_text(socket), "hello")
