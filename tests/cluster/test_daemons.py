"""Daemons as a cluster, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import treq
from twisted.internet.defer import fail
from twisted.internet.task import deferLater
from twisted.web.client import Agent

from mediatord.cluster import anti_entropy
from mediatord.cluster.membership import IDENTITY_DIFFERS, NODE_LEASE, SECRET_DIFFERS
from mediatord.errors import StoreUnavailable
from mediatord.identity.key_file import create_keys
from mediatord.runtime.secret_files import create_secret_file
from mediatord.store.interfaces.cluster_and_quotas import ClockSkewError
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.wallet.decentrl_client import DecentrlWallet
from mediatord.wallet.decentrl_client import connect_decentrl_socket as connect_decentrl
from mediatord.wallet.decentrl_client import discover_decentrl_mediator as discover_decentrl
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
from tests.decentrl_contracts import make_contract
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

    async def test_unreachable_node_catches_up(self) -> None:
        """A node that cannot be notified finds the message itself, and no response waits for it."""
        socket = await self.open_live_socket(self.b)
        await self.forward(self.a, "first")
        self.assertEqual(await self.read_text(socket), "first")
        await self.b.stop_services(f"listener {self.b.config.cluster.listen}")
        await self.forward(self.a, "second")
        self.assertEqual(await self.read_text(socket), "second")

    async def test_recovers_after_all_leases_lapsed(self) -> None:
        """If all leases lapse, as after a long outage of the store, all nodes return with all sockets."""
        socket = await self.open_live_socket(self.b)
        self.wall_clock.ahead += NODE_LEASE + 1
        self.assertEqual(self.list_live_names(), [])
        await self.wait_until(lambda: self.list_live_names() == ["a", "b"] and self.has_presence("b"))
        await self.forward(self.a, "hello")
        self.assertEqual(await self.read_text(socket), "hello")

    def has_presence(self, name: str) -> bool:
        """Whether the store has presence of Bob at this node."""
        records = self.successResultOf(self.store.cluster.find_presence([self.bob.did]))
        return name in [record.node.name for record in records if record.node]

    async def test_pushes_events(self) -> None:
        """Decentrl events are pushed too."""
        mediator = await discover_decentrl(self.http, self.url)
        alice, bob = (DecentrlWallet.generate(name, mediator, self.http, reactor) for name in ("alice", "bob"))
        for wallet in (alice, bob):
            await wallet.register()
        await make_contract(alice, bob)
        socket = await connect_decentrl(reactor, bob, endpoint=self.b.make_endpoint())
        self.addCleanup(socket.close)
        await alice.send(bob.did, "hello")
        frame = await socket.pushed.get().addTimeout(WAIT_TIMEOUT, reactor)
        self.assertEqual(frame["type"], "PENDING_EVENTS")


class RefusalTests(TwoNodeTestCase):
    async def test_another_secret(self) -> None:
        """A node with another secret ends with one line; the others are not affected."""
        create_secret_file(self.directory / "other.secret", b"something else of at least 32 bytes")
        refused_node = self.start_node("c", cluster={"secret_file": str(self.directory / "other.secret")})
        await self.wait_until(lambda: refused_node.fatal_errors)
        self.assertEqual((refused_node.fatal_errors, self.list_live_names()), ([SECRET_DIFFERS], ["a", "b"]))

    async def test_other_keys(self) -> None:
        """A node with keys of its own, as `mediatord init` creates them, ends with one line that says what to do."""
        create_keys(self.directory / "other.jwks")
        refused_node = self.start_node("c", identity={"keys": str(self.directory / "other.jwks")})
        await self.wait_until(lambda: refused_node.fatal_errors)
        self.assertEqual((refused_node.fatal_errors, self.list_live_names()), ([IDENTITY_DIFFERS], ["a", "b"]))

    async def test_another_public_url(self) -> None:
        """A node with another public URL, to which its DIDs lead, ends with one line."""
        refused_node = self.start_node("c", public_url="http://127.0.0.1:1")
        await self.wait_until(lambda: refused_node.fatal_errors)
        self.assertEqual((refused_node.fatal_errors, self.list_live_names()), ([IDENTITY_DIFFERS], ["a", "b"]))

    async def test_same_name(self) -> None:
        """A node with the name of another ends with one line that names the holder."""
        refused_node = self.start_node("b")
        await self.wait_until(lambda: refused_node.fatal_errors)
        (line,) = refused_node.fatal_errors
        self.assertEqual(
            line,
            f"node: the name b is in use by the node at {self.b.config.cluster.address}; "
            "give every node its own name",
        )
        self.assertEqual(self.list_live_names(), ["a", "b"])

    async def test_name_of_crashed_node(self) -> None:
        """The name of a crashed node is free at once, as nobody answers at its address."""
        await self.b.stop_services("membership", f"listener {self.b.config.cluster.listen}")
        await self.store.cluster.join(self.make_crashed_node(self.b), NODE_LEASE)
        new_node = self.start_node("b")
        await self.wait_until(lambda: new_node.fatal_errors or self.list_boots("b") != ["dead"])
        self.assertEqual((new_node.fatal_errors, len(self.list_boots("b"))), ([], 1))

    def make_crashed_node(self, node: InProcessNode) -> Any:
        """The record that such a daemon left in the store."""
        (other,) = [item for item in self.successResultOf(self.store.cluster.list_nodes()) if item.name == "a"]
        return type(other)(node.name, "dead", node.config.cluster.address or "", other.seal)

    def list_boots(self, name: str) -> list[str]:
        """Boots of the live nodes of this name."""
        return [item.boot for item in self.successResultOf(self.store.cluster.list_nodes()) if item.name == name]


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

    async def test_unhealthy_with_wrong_clock(self) -> None:
        """A node reports a wrong clock as long as that lasts, and recovers by itself."""
        store: Any = self.store
        error = ClockSkewError(4320)
        store.cluster.renew = store.cluster.join = lambda *_: fail(error)
        await self.wait_for_detail(self.a, str(error))
        self.assertNotIn("a", self.list_live_names())
        del store.cluster.renew
        del store.cluster.join
        await self.wait_for_detail(self.a, "")
        self.assertIn("a", self.list_live_names())
        self.assertEqual((self.a.fatal_errors, self.b.fatal_errors), ([], []))


class UnixSocketTests(TwoNodeTestCase):
    def get_peer_endpoint(self, name: str) -> str:
        """Path of a UNIX socket."""
        return f"unix:{self.directory}/{name}.sock"

    async def test_pushes_over_unix_socket(self) -> None:
        """Nodes of one host need no TCP."""
        socket = await self.open_live_socket(self.b)
        await self.forward(self.a, "hello")
        self.assertEqual(await self.read_text(socket), "hello")
