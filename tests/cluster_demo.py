"""
`make cluster-demo`: two wallets converse through a load balancer while nodes and the primary are killed.

It starts three MongoDB servers, three nodes and the balancer, and leaves nothing behind.
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

# Messages to exchange before each step.
_MESSAGES_PER_STEP = 60
# Upper bound for live delivery, even on a busy machine; lost notifications are recovered later than this.
_LIVE_SECONDS = 10.0
# For one section; each takes a few seconds on an idle machine.
_SECTION_SECONDS = 120.0
_DATABASE = "mediatord"


class ClusterDemo:
    """The demo, which prints each step."""

    def __init__(self, reactor: Any, servers: ReplicaSet, cluster: DaemonCluster, balancer: int) -> None:
        self._reactor = reactor
        self._servers = servers
        self._cluster = cluster
        self._balancer_port = balancer
        self._balancer = LoadBalancer(reactor, [node.port for node in cluster.nodes])
        self._ledger = LatencyLedger(reactor)
        self._printer = DemoPrinter()
        self._clients: list[LatencyClient] = []

    async def run(self) -> None:
        """
        Run the demo.

        :raise DemoStepFailed: a step failed.
        """
        listening = self._reactor.listenTCP(self._balancer_port, self._balancer, interface="127.0.0.1")
        try:
            await self._run_section("Three nodes, one mediator", self._enrol_wallets)
            await self._run_section(
                "Alice and Bob exchange messages, connected to different nodes", self._start_conversation
            )
            await self._run_section("The node that Bob is at is killed", self._kill_node)
            await self._run_section("The primary of the database is killed", self._kill_primary)
            await self._run_section(
                "A node and the primary are killed at the same moment", self._kill_node_and_primary
            )
            await self._run_section("Delivery ledger", self._reconcile_ledger)
        finally:
            for latency_client in self._clients:
                await latency_client.stop()
            await maybeDeferred(listening.stopListening)

    async def _run_section(self, title: str, steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._printer.section(title)
        try:
            await Deferred.fromCoroutine(steps()).addTimeout(_SECTION_SECONDS, self._reactor)
        except DeferredTimeout:
            raise DemoStepFailed(f'"{title}" did not end within {_SECTION_SECONDS:.0f} s') from None

    async def _enrol_wallets(self) -> None:
        ports = ", ".join(f"{self._name(node)} on port {node.port}" for node in self._cluster.nodes)
        self._printer.step(f"Nodes: {ports}; a load balancer listens on port {self._balancer_port}.")
        http = open_http(self._reactor)
        mediator = await discover_mediator(http, f"http://127.0.0.1:{self._balancer_port}")
        self._printer.step("All have one DID, which names the balancer.", truncate_text(mediator.did, 80))
        documents = DIDDocumentCache()
        for name in ("Alice", "Bob"):
            wallet = DIDCommWallet.generate(mediator, http, self._reactor)
            wallet = DIDCommWallet(wallet.identity, http, self._reactor, mediator, documents)
            documents.add(wallet.identity.document)
            await wallet.enrol()
            self._printer.check(f"{name} has a mailbox", await wallet.register() == ["success"])
            self._clients.append(LatencyClient(name, wallet, self._balancer_port, self._ledger, self._reactor))

    async def _start_conversation(self) -> None:
        alice, bob = self._clients
        alice.start()
        bob.start()
        alice.start_sending_to(bob)
        bob.start_sending_to(alice)
        await self._ledger.wait_for_more(_MESSAGES_PER_STEP // 2)
        while self._node_of(alice) is self._node_of(bob):
            self._printer.step("The balancer chose the same node for both; Bob reconnects.")
            await bob.stop()
            bob.start()
            await self._ledger.wait_for_more(_MESSAGES_PER_STEP // 2)
        self._printer.step(f"Alice is at node {self._node_name_of(alice)}, Bob at node {self._node_name_of(bob)}.")
        self._ledger.take_latencies()
        longest = await self._report_latency("Their messages go from one node to the other.")
        self._printer.check("all of them live", longest < _LIVE_SECONDS)

    async def _kill_node(self) -> None:
        _, bob = self._clients
        node = self._node_of(bob)
        assert node is not None
        await deferToThread(node.kill)
        self._printer.step(f"Node {self._name(node)} was killed. Alice keeps sending.")
        await self._report_latency("Bob has reconnected through the balancer and missed nothing.")
        self._printer.step(f"Bob is at node {self._node_name_of(bob)} now.")
        await deferToThread(node.start)
        self._printer.step(f"Node {self._name(node)} is back.")

    async def _kill_primary(self) -> None:
        primary = await deferToThread(self._servers.primary)
        await deferToThread(self._servers.kill, primary)
        self._printer.step(
            f"Server {primary} was killed. Until there is a new one, nodes answer 503 and wallets retry."
        )
        await self._report_latency("The conversation continues.")
        other = await deferToThread(self._servers.primary)
        self._printer.check(f"server {other} is the primary now", other != primary)
        await deferToThread(self._servers.start, primary)
        self._printer.step(f"Server {primary} is back.")

    async def _kill_node_and_primary(self) -> None:
        alice, _ = self._clients
        node = self._node_of(alice) or self._cluster.nodes[0]
        primary = await deferToThread(self._servers.primary)
        await deferToThread(self._servers.kill, primary)
        await deferToThread(node.kill)
        self._printer.step(f"Server {primary} and node {self._name(node)}, which served Alice, were killed.")
        await self._report_latency("The conversation continues.")
        await deferToThread(self._servers.start, primary)
        await deferToThread(node.start)
        self._printer.step("Both are back.")

    async def _reconcile_ledger(self) -> None:
        for latency_client in self._clients:
            await latency_client.stop_sending()
        for latency_client in self._clients:
            await latency_client.drain()
        left = await deferToThread(self._servers.client[_DATABASE]["messages"].count_documents, {})
        balance = self._ledger.balance(left)
        self._printer.step("The ledger of senders, recipients and the database.", str(balance))
        self._printer.check("every message arrived, was acknowledged once and was deleted", balance.discrepancy == 0)

    async def _report_latency(self, text: str) -> float:
        """Exchange messages and print how long they took; return the longest time in seconds."""
        await self._ledger.wait_for_more(_MESSAGES_PER_STEP)
        latencies = self._ledger.take_latencies()
        median, longest = statistics.median(latencies) * 1000, max(latencies)
        figures = f"{len(latencies)} messages, half of them within {median:.0f} ms, all within {longest:.1f} s"
        self._printer.step(text, figures)
        return longest

    def _node_of(self, latency_client: LatencyClient) -> Daemon | None:
        port = self._balancer.node_of(latency_client.port)
        return next((node for node in self._cluster.nodes if node.port == port), None)

    def _node_name_of(self, latency_client: LatencyClient) -> str:
        node = self._node_of(latency_client)
        return "none" if node is None else self._name(node)

    def _name(self, node: Daemon) -> str:
        return "abc"[self._cluster.nodes.index(node)]


def main() -> int:
    """Run the demo. Exit status 1 means that a step failed or that there is no MongoDB server."""
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
        await ClusterDemo(reactor, servers, cluster, front).run()
    except (DemoStepFailed, MediatorProblem, AssertionError) as error:
        click.secho(f"The demo failed: {error}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("No message was lost or duplicated.", fg="green")


if __name__ == "__main__":
    sys.exit(main())
