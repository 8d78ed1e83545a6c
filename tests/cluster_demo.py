"""
`make cluster-demo`: two wallets behind a balancer talk, while nodes and the database's primary are killed.

What it starts is three MongoDB servers, three nodes and the balancer; nothing of it is left afterwards.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any
from unittest import SkipTest

import click
from twisted.internet import task
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.threads import deferToThread

from mediatord.wallet.demo import DemoPrinter, DemoStepFailed, truncate_text
from mediatord.wallet.didcomm_client import DIDCommWallet, MediatorProblem, discover_mediator, open_http
from mediatord.wallet.didcomm_messages import DIDDocumentCache
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.cluster import DaemonCluster
from tests.integration.daemon import Daemon
from tests.latency_clients import LatencyClient, LatencyLedger
from tests.load_balancer import LoadBalancer
from tests.replica_set import ReplicaSet

# Messages that come before anything else happens.
_SOME = 60
# More than this is not "live", even where the machine is busy: what nobody was told of is looked for later.
_LIVE_SECONDS = 10.0
# For a chapter; each takes a few seconds where the machine has nothing else to do.
_CHAPTER_SECONDS = 120.0
_DATABASE = "mediatord"


class ClusterDemo:
    """All of it, told step by step."""

    def __init__(self, reactor: Any, servers: ReplicaSet, cluster: DaemonCluster, balancer: int) -> None:
        self._reactor = reactor
        self._servers = servers
        self._cluster = cluster
        self._front = balancer
        self._balancer = LoadBalancer(reactor, [node.port for node in cluster.nodes])
        self._times = LatencyLedger(reactor)
        self._say = DemoPrinter()
        self._talkers: list[LatencyClient] = []

    async def tell(self) -> None:
        """
        Run it.

        :raise Failed: a step did.
        """
        listening = self._reactor.listenTCP(self._front, self._balancer, interface="127.0.0.1")
        try:
            await self._chapter("Three nodes, one mediator", self._meet)
            await self._chapter("Alice and Bob talk, each over a socket to another node", self._talk)
            await self._chapter("The node that Bob is at is killed", self._lose_a_node)
            await self._chapter("The primary of the database is killed", self._lose_the_primary)
            await self._chapter("A node and the primary are killed at the same moment", self._lose_everything_once)
            await self._chapter("What became of the messages", self._close_the_books)
        finally:
            for latency_client in self._talkers:
                await latency_client.stop()
            await maybeDeferred(listening.stopListening)

    async def _chapter(self, title: str, tell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._say.section(title)
        try:
            await Deferred.fromCoroutine(tell()).addTimeout(_CHAPTER_SECONDS, self._reactor)
        except DeferredTimeout:
            raise DemoStepFailed(f'"{title}" was not over within {_CHAPTER_SECONDS:.0f} s') from None

    async def _meet(self) -> None:
        ports = ", ".join(f"{self._name(node)} on port {node.port}" for node in self._cluster.nodes)
        self._say.step(f"Nodes: {ports}; a balancer on port {self._front} deals connections out in turn.")
        http = open_http(self._reactor)
        mediator = await discover_mediator(http, f"http://127.0.0.1:{self._front}")
        self._say.step("All have one DID, which names the balancer.", truncate_text(mediator.did, 80))
        book = DIDDocumentCache()
        for name in ("Alice", "Bob"):
            wallet = DIDCommWallet.generate(mediator, http, self._reactor)
            wallet = DIDCommWallet(wallet.identity, http, self._reactor, mediator, book)
            book.add(wallet.identity.document)
            await wallet.enrol()
            self._say.check(f"{name} has a mailbox", await wallet.register() == ["success"])
            self._talkers.append(LatencyClient(name, wallet, self._front, self._times, self._reactor))

    async def _talk(self) -> None:
        alice, bob = self._talkers
        alice.start()
        bob.start()
        alice.talk_to(bob)
        bob.talk_to(alice)
        await self._times.more(_SOME // 2)
        while self._node_of(alice) is self._node_of(bob):
            self._say.step("The balancer led both to the same node; Bob connects again.")
            await bob.stop()
            bob.start()
            await self._times.more(_SOME // 2)
        self._say.step(f"Alice is at node {self._where(alice)}, Bob at node {self._where(bob)}.")
        self._times.taken()
        longest = await self._heard("Their messages go from one node to the other.")
        self._say.check("all of them live", longest < _LIVE_SECONDS)

    async def _lose_a_node(self) -> None:
        _, bob = self._talkers
        node = self._node_of(bob)
        assert node is not None
        await deferToThread(node.kill)
        self._say.step(f"Node {self._name(node)} is gone, without a word. Alice goes on writing.")
        await self._heard("Bob is connected again, by the balancer, and has missed nothing.")
        self._say.step(f"Bob is at node {self._where(bob)} now.")
        await deferToThread(node.start)
        self._say.step(f"Node {self._name(node)} is back.")

    async def _lose_the_primary(self) -> None:
        primary = await deferToThread(self._servers.primary)
        await deferToThread(self._servers.kill, primary)
        self._say.step(f"Server {primary} is gone. Nodes answer 503 until there is another; wallets try again.")
        await self._heard("The conversation goes on.")
        other = await deferToThread(self._servers.primary)
        self._say.check(f"server {other} is the primary now", other != primary)
        await deferToThread(self._servers.start, primary)
        self._say.step(f"Server {primary} is back.")

    async def _lose_everything_once(self) -> None:
        alice, _ = self._talkers
        node = self._node_of(alice) or self._cluster.nodes[0]
        primary = await deferToThread(self._servers.primary)
        await deferToThread(self._servers.kill, primary)
        await deferToThread(node.kill)
        self._say.step(f"Server {primary} and node {self._name(node)}, which Alice was at, are gone.")
        await self._heard("The conversation goes on.")
        await deferToThread(self._servers.start, primary)
        await deferToThread(node.start)
        self._say.step("Both are back.")

    async def _close_the_books(self) -> None:
        for latency_client in self._talkers:
            await latency_client.hush()
        for latency_client in self._talkers:
            await latency_client.settle()
        left = await deferToThread(self._servers.client[_DATABASE]["messages"].count_documents, {})
        balance = self._times.balance(left)
        self._say.step("The ledger of senders, recipients and the database.", str(balance))
        self._say.check("every message arrived, was acknowledged once, and is gone", balance.owed == 0)

    async def _heard(self, text: str) -> float:
        """Let them talk, and say how that went; seconds that the slowest message took."""
        await self._times.more(_SOME)
        taken = self._times.taken()
        middle, longest = statistics.median(taken) * 1000, max(taken)
        figures = f"{len(taken)} messages, half of them within {middle:.0f} ms, all within {longest:.1f} s"
        self._say.step(text, figures)
        return longest

    def _node_of(self, latency_client: LatencyClient) -> Daemon | None:
        port = self._balancer.node_of(latency_client.port)
        return next((node for node in self._cluster.nodes if node.port == port), None)

    def _where(self, latency_client: LatencyClient) -> str:
        node = self._node_of(latency_client)
        return "none" if node is None else self._name(node)

    def _name(self, node: Daemon) -> str:
        return "abc"[self._cluster.nodes.index(node)]


def main() -> int:
    """0, or 1 when a step failed or there is no MongoDB server to run."""
    front = find_free_port()
    with ExitStack() as stack:
        try:
            click.echo("Starting three MongoDB servers and three nodes.")
            servers = stack.enter_context(ReplicaSet(3))
            cluster = DaemonCluster(servers.uri(_DATABASE), public_url=f"http://127.0.0.1:{front}")
            stack.callback(cluster.clean)
            cluster.start()
            task.react(_run, (servers, cluster, front))
        except SkipTest as reason:
            click.echo(f"cluster-demo: {reason}", err=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
    return 1


async def _run(reactor: Any, servers: ReplicaSet, cluster: DaemonCluster, front: int) -> None:
    try:
        await ClusterDemo(reactor, servers, cluster, front).tell()
    except (DemoStepFailed, MediatorProblem, AssertionError) as error:
        click.secho(f"The demo failed: {error}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("Nothing was lost, and nothing came twice.", fg="green")


if __name__ == "__main__":
    sys.exit(main())
