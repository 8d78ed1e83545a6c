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

from mediatord.wallet.client import Wallet
from mediatord.wallet.demo_narration import Failed, Narrator, short
from mediatord.wallet.mediation import Problem
from mediatord.wallet.mediator import discover, open_http
from mediatord.wallet.packing import AddressBook
from mediatord.wallet.throwaway import free_port
from tests.balancer import Balancer
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.mongod import ReplicaSet
from tests.talkers import Talker, Times

# Messages that come before anything else happens.
_SOME = 60
# More than this is not "live", even where the machine is busy: what nobody was told of is looked for later.
_LIVE_SECONDS = 10.0
# For a chapter; each takes a few seconds where the machine has nothing else to do.
_CHAPTER_SECONDS = 120.0
_DATABASE = "mediatord"


class Demonstration:
    """All of it, told step by step."""

    def __init__(self, reactor: Any, servers: ReplicaSet, cluster: Cluster, balancer: int) -> None:
        self._reactor = reactor
        self._servers = servers
        self._cluster = cluster
        self._front = balancer
        self._balancer = Balancer(reactor, [node.port for node in cluster.nodes])
        self._times = Times(reactor)
        self._say = Narrator()
        self._talkers: list[Talker] = []

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
            for talker in self._talkers:
                await talker.stop()
            await maybeDeferred(listening.stopListening)

    async def _chapter(self, title: str, tell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._say.chapter(title)
        try:
            await Deferred.fromCoroutine(tell()).addTimeout(_CHAPTER_SECONDS, self._reactor)
        except DeferredTimeout:
            raise Failed(f'"{title}" was not over within {_CHAPTER_SECONDS:.0f} s') from None

    async def _meet(self) -> None:
        ports = ", ".join(f"{self._name(node)} on port {node.port}" for node in self._cluster.nodes)
        self._say.step(f"Nodes: {ports}; a balancer on port {self._front} deals connections out in turn.")
        http = open_http(self._reactor)
        mediator = await discover(http, f"http://127.0.0.1:{self._front}")
        self._say.step("All have one DID, which names the balancer.", short(mediator.did, 80))
        book = AddressBook()
        for name in ("Alice", "Bob"):
            wallet = Wallet.fresh(mediator, http, self._reactor)
            wallet = Wallet(wallet.identity, http, self._reactor, mediator, book)
            book.learn(wallet.identity.document)
            await wallet.enrol()
            self._say.check(f"{name} has a mailbox", await wallet.register() == ["success"])
            self._talkers.append(Talker(name, wallet, self._front, self._times, self._reactor))

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
        for talker in self._talkers:
            await talker.hush()
        for talker in self._talkers:
            await talker.settle()
        left = await deferToThread(self._servers.client[_DATABASE]["messages"].count_documents, {})
        balance = self._times.balance(left)
        self._say.step("The books of senders and recipients, and of what is left in the database.", str(balance))
        self._say.check("every message arrived, was acknowledged once, and is gone", balance.owed == 0)

    async def _heard(self, text: str) -> float:
        """Let them talk, and say how that went; seconds that the slowest message took."""
        await self._times.more(_SOME)
        taken = self._times.taken()
        middle, longest = statistics.median(taken) * 1000, max(taken)
        figures = f"{len(taken)} messages, half of them within {middle:.0f} ms, all within {longest:.1f} s"
        self._say.step(text, figures)
        return longest

    def _node_of(self, talker: Talker) -> Daemon | None:
        port = self._balancer.node_of(talker.port)
        return next((node for node in self._cluster.nodes if node.port == port), None)

    def _where(self, talker: Talker) -> str:
        node = self._node_of(talker)
        return "none" if node is None else self._name(node)

    def _name(self, node: Daemon) -> str:
        return "abc"[self._cluster.nodes.index(node)]


def main() -> int:
    """0, or 1 when a step failed or there is no MongoDB server to run."""
    front = free_port()
    with ExitStack() as stack:
        try:
            click.echo("Starting three MongoDB servers and three nodes.")
            servers = stack.enter_context(ReplicaSet(3))
            cluster = Cluster(servers.uri(_DATABASE), public_url=f"http://127.0.0.1:{front}")
            stack.callback(cluster.clean)
            cluster.start()
            task.react(_run, (servers, cluster, front))
        except SkipTest as reason:
            click.echo(f"cluster-demo: {reason}", err=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
    return 1


async def _run(reactor: Any, servers: ReplicaSet, cluster: Cluster, front: int) -> None:
    try:
        await Demonstration(reactor, servers, cluster, front).tell()
    except (Failed, Problem, AssertionError) as error:
        click.secho(f"The demonstration failed: {error}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("Nothing was lost, and nothing came twice.", fg="green")


if __name__ == "__main__":
    sys.exit(main())
