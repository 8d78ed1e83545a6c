"""Whole daemons that act as one, over real sockets."""

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
from tests.cluster.in_process_daemons import PATIENCE, STEP, InProcessClusterTestCase, InProcessNode, reactor
from tests.decentrl_contracts import make_contract
from tests.integration.message_load import read_marker


class TwoNodes(InProcessClusterTestCase):
    """Bob has an account."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.http = open_http(reactor)
        self.a, self.b = self.nodes
        self.bob = DIDCommWallet.generate(await discover_mediator(self.http, self.url), self.http, reactor)
        await self.bob.enrol()
        self.assertEqual(await self.bob.register(), ["success"])

    async def live_at(self, node: InProcessNode) -> DIDCommSocket:
        """A live socket of Bob's at this node."""
        opened = await connect_didcomm_socket(reactor, self.bob, endpoint=node.endpoint())
        self.addCleanup(opened.close)
        await opened.live()
        return opened

    async def leave(self, node: InProcessNode, text: str) -> None:
        """Somebody leaves something for Bob at this node."""
        letter = self.letter(text)
        raw = anoncrypt(build_forward(self.bob.did, [letter]), self.bob.mediator.document)
        self.assertEqual((await self.bob.post(raw, url=f"{node.url}/didcomm")).status, 202)

    def letter(self, text: str) -> bytes:
        """For Bob, from nobody."""
        message = {
            "id": text,
            "type": "https://didcomm.org/basicmessage/2.0/message",
            "typ": "application/didcomm-plain+json",
            "to": [self.bob.did],
            "body": {"content": text},
        }
        return anoncrypt(message, self.bob.identity.document)

    async def text(self, socket: DIDCommSocket) -> str:
        """What was pushed next."""
        return read_marker(self.bob, await socket.pushed.get().addTimeout(PATIENCE, reactor))

    async def ask(self, node: InProcessNode, method: str, path: str) -> tuple[int, bytes]:
        """A plain request."""
        client = treq.client.HTTPClient(Agent(reactor))
        response = await client.request(method, node.url + path, reactor=reactor, unbuffered=True)
        return response.code, await response.content()


class PushTests(TwoNodes):
    async def test_messages(self) -> None:
        """Accepted at one node, pushed to the socket at the other, both ways."""
        # Not by the holding node itself, which may look for them before it is told.
        self.patch(anti_entropy, "MIN_MESSAGE_AGE", 2 * PATIENCE)
        for accepting, holding in ((self.a, self.b), (self.b, self.a)):
            socket = await self.live_at(holding)
            await self.leave(accepting, "hello")
            self.assertEqual(await self.text(socket), "hello")
            self.assertEqual(await self.outcomes(accepting), [b'{outcome="pushed"} 1.0'])
            await socket.close()

    async def outcomes(self, node: InProcessNode) -> list[bytes]:
        """Outcomes of pushes to other nodes, once the first is counted, which happens after the push."""
        deadline, name = reactor.seconds() + PATIENCE, b"mediator_cluster_pushes_total"
        while True:
            _, metrics = await self.ask(node, "GET", "/metrics")
            found = [line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name + b"{")]
            if found or reactor.seconds() > deadline:
                return found
            await deferLater(reactor, STEP, lambda: None)

    async def test_listener_gone(self) -> None:
        """A node that cannot be asked gets it when it looks itself, and nobody waits for it."""
        socket = await self.live_at(self.b)
        await self.leave(self.a, "first")
        self.assertEqual(await self.text(socket), "first")
        await self.b.stop_only(f"listener {self.b.config.cluster.listen}")
        await self.leave(self.a, "second")
        self.assertEqual(await self.text(socket), "second")

    async def test_lease_over(self) -> None:
        """All leases end at once, as after a long stop of the store: everybody is back with all sockets."""
        socket = await self.live_at(self.b)
        self.watch.ahead += NODE_LEASE + 1
        self.assertEqual(self.live(), [])
        await self.until(lambda: self.live() == ["a", "b"] and self.has_sockets("b"))
        await self.leave(self.a, "hello")
        self.assertEqual(await self.text(socket), "hello")

    def has_sockets(self, name: str) -> bool:
        """Whether the store knows of sockets of Bob's at this node."""
        places = self.successResultOf(self.store.cluster.find_presence([self.bob.did]))
        return name in [place.node.name for place in places if place.node]

    async def test_decentrl(self) -> None:
        """Events too."""
        mediator = await discover_decentrl(self.http, self.url)
        alice, bob = (DecentrlWallet.generate(name, mediator, self.http, reactor) for name in ("alice", "bob"))
        for wallet in (alice, bob):
            await wallet.register()
        await make_contract(alice, bob)
        socket = await connect_decentrl(reactor, bob, endpoint=self.b.endpoint())
        self.addCleanup(socket.close)
        await alice.send(bob.did, "hello")
        frame = await socket.pushed.get().addTimeout(PATIENCE, reactor)
        self.assertEqual(frame["type"], "PENDING_EVENTS")


class RefusalTests(TwoNodes):
    async def test_another_secret(self) -> None:
        """One line; the others do not notice."""
        create_secret_file(self.directory / "other.secret", b"something else of at least 32 bytes")
        stranger = self.start("c", cluster={"secret_file": str(self.directory / "other.secret")})
        await self.until(lambda: stranger.said)
        self.assertEqual((stranger.said, self.live()), ([SECRET_DIFFERS], ["a", "b"]))

    async def test_other_keys(self) -> None:
        """As made by `mediatord init` on each host: one line that says what to do."""
        create_keys(self.directory / "other.jwks")
        stranger = self.start("c", identity={"keys": str(self.directory / "other.jwks")})
        await self.until(lambda: stranger.said)
        self.assertEqual((stranger.said, self.live()), ([IDENTITY_DIFFERS], ["a", "b"]))

    async def test_another_public_url(self) -> None:
        """Its DIDs lead elsewhere."""
        stranger = self.start("c", public_url="http://127.0.0.1:1")
        await self.until(lambda: stranger.said)
        self.assertEqual((stranger.said, self.live()), ([IDENTITY_DIFFERS], ["a", "b"]))

    async def test_same_name(self) -> None:
        """One line that says who has it."""
        twin = self.start("b")
        await self.until(lambda: twin.said)
        (line,) = twin.said
        self.assertEqual(
            line,
            f"node: b is running already, at {self.b.config.cluster.address}; every node needs a name of its own",
        )
        self.assertEqual(self.live(), ["a", "b"])

    async def test_name_of_one_that_crashed(self) -> None:
        """Nobody is at its address any more: the name is free at once."""
        await self.b.stop_only("membership", f"listener {self.b.config.cluster.listen}")
        await self.store.cluster.join(self.node_of(self.b), NODE_LEASE)
        again = self.start("b")
        await self.until(lambda: again.said or self.boots("b") != ["dead"])
        self.assertEqual((again.said, len(self.boots("b"))), ([], 1))

    def node_of(self, node: InProcessNode) -> Any:
        """What such a daemon left in the store."""
        (other,) = [one for one in self.successResultOf(self.store.cluster.list_nodes()) if one.name == "a"]
        return type(other)(node.name, "dead", node.config.cluster.address or "", other.seal)

    def boots(self, name: str) -> list[str]:
        """The boots of live nodes of this name."""
        return [one.boot for one in self.successResultOf(self.store.cluster.list_nodes()) if one.name == name]


class StoreTests(TwoNodes):
    async def test_away_at_the_start(self) -> None:
        """The daemon is up and answers 503; when the store is there it joins, within a few seconds."""
        store: Any = self.store
        really, away = store.open, True
        store.open = lambda: fail(StoreUnavailable()) if away else really()
        store.ping = lambda: fail(StoreUnavailable())
        node = self.start("c")
        status, _ = await self.ask(node, "GET", "/health")
        self.assertEqual(status, 503)
        self.assertEqual((self.live(), await self.up(node)), (["a", "b"], 0))
        del store.ping
        away = False
        await self.until(lambda: "c" in self.live())
        self.assertEqual(await self.up(node), 1)

    async def test_away_later(self) -> None:
        """What /health finds shows in the metrics."""
        store: Any = self.store
        store.ping = lambda: fail(StoreUnavailable())
        self.assertEqual((await self.ask(self.a, "GET", "/health"))[0], 503)
        self.assertEqual(await self.up(self.a), 0)
        del store.ping
        self.assertEqual((await self.ask(self.a, "GET", "/health"))[0], 200)
        self.assertEqual(await self.up(self.a), 1)

    async def up(self, node: InProcessNode) -> int:
        """What a node says of the store."""
        _, metrics = await self.ask(node, "GET", "/metrics")
        (line,) = [line for line in metrics.splitlines() if line.startswith(b"mediator_storage_up ")]
        return int(float(line.split()[1]))

    async def test_refused(self) -> None:
        """A store that must not be used ends the daemon with its line, however late it says so."""
        store: Any = self.store
        store.open = lambda: fail(StoreUnusable("storage.mongodb.uri: no"))
        node = self.start("c")
        self.assertEqual(node.said, ["storage.mongodb.uri: no"])
        del store.open


class HealthTests(TwoNodes):
    """Whether a balancer should send wallets to a node."""

    async def detail(self, node: InProcessNode) -> str:
        """What a node has to complain of; empty for nothing."""
        status, body = await self.ask(node, "GET", "/health")
        said = json.loads(body)
        self.assertEqual((status, said["status"]), (503, "error") if "detail" in said else (200, "ok"))
        return str(said.get("detail", ""))

    async def until_detail(self, node: InProcessNode, detail: str) -> None:
        """Wait until that is what it says."""
        deadline = reactor.seconds() + PATIENCE
        while await self.detail(node) != detail:
            assert reactor.seconds() < deadline, await self.detail(node)
            await deferLater(reactor, STEP, lambda: None)

    async def test_not_joined(self) -> None:
        """Not before it is a node: live mode would be refused there."""
        store: Any = self.store
        store.cluster.join = lambda *_: fail(StoreUnavailable())
        node = self.start("c")
        self.assertEqual(await self.detail(node), "cluster: not joined")
        self.assertEqual(await self.detail(self.a), "")
        del store.cluster.join
        await self.until_detail(node, "")
        self.assertIn("c", self.live())

    async def test_clock(self) -> None:
        """It says so as long as it is wrong, and comes back by itself."""
        store: Any = self.store
        refused = ClockSkewError(4320)
        store.cluster.renew = store.cluster.join = lambda *_: fail(refused)
        await self.until_detail(self.a, str(refused))
        self.assertNotIn("a", self.live())
        del store.cluster.renew
        del store.cluster.join
        await self.until_detail(self.a, "")
        self.assertIn("a", self.live())
        self.assertEqual((self.a.said, self.b.said), ([], []))


class UnixTests(TwoNodes):
    def node_listen(self, name: str) -> str:
        """In the file system."""
        return f"unix:{self.directory}/{name}.sock"

    async def test_push(self) -> None:
        """Nodes of one host need no TCP."""
        socket = await self.live_at(self.b)
        await self.leave(self.a, "hello")
        self.assertEqual(await self.text(socket), "hello")
