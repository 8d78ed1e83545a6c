"""
Clusters of daemons, each node a process with its own directory.

::

    with DaemonCluster(servers.uri("mediatord")) as (a, b, c):
        alice = await enrol_wallet(a, reactor)
        alice_at_b = wallet_at_node(alice, b.port, reactor)
        c.kill()
"""

from __future__ import annotations

import secrets
import shutil
import socket
import unittest
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import yaml

from mediatord.cli.init import write_initial_files
from mediatord.wallet.didcomm_client import DIDCommMediator, DIDCommWallet, open_http
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.daemon import PLENTY, Daemon, merge_settings
from tests.integration.message_load import PATIENCE_SECONDS, ROOMY
from tests.mongod import fresh_database, shared_replica_set
from tests.skewed_clock import ClockedDaemon, SkewedClock


class DaemonCluster:
    """
    Nodes of a cluster; as a context manager it starts and stops them.

    :param uri: URI of the shared database.
    :param names: names of the nodes.
    :param settings: changes to the configuration of `mediatord init`, for all nodes.
    :param via: proxy port for a node's port, used by the other nodes.
    :param public_url: URL of the mediator; the first node's unless given.
    :param clocks: clocks of the nodes with these names.
    :ivar nodes: in the order of their names.
    """

    def __init__(
        self,
        uri: str,
        names: Sequence[str] = ("a", "b", "c"),
        settings: Mapping[str, Any] | None = None,
        *,
        via: Callable[[int], int] | None = None,
        public_url: str | None = None,
        clocks: Mapping[str, SkewedClock] | None = None,
    ) -> None:
        clock_of = clocks or {}
        self.nodes = [ClockedDaemon(clock_of[name]) if name in clock_of else Daemon() for name in names]
        first = self.nodes[0]
        write_initial_files(first.directory, public_url or first.url)
        self.secret = first.directory / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(secrets.token_hex(32), encoding="ascii")
        self._ports = {node: find_free_port() for node in self.nodes}
        for name, node in zip(names, self.nodes, strict=True):
            if node is not first:
                shutil.copytree(first.directory, node.directory)
            members = self._membership(name, node, uri, via)
            update_configuration(
                node, merge_settings(merge_settings(merge_settings(PLENTY, ROOMY), settings or {}), members)
            )

    def port_of(self, node: Daemon) -> int:
        """Port on which other nodes reach it."""
        return self._ports[node]

    def start(self) -> None:
        """
        Start all nodes.

        :raise AssertionError: a node did not start.
        """
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.start(), self.nodes))

    def stop(self) -> None:
        """Stop the nodes that run."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Daemon.stop, [node for node in self.nodes if node.running]))

    def clean(self) -> None:
        """End the nodes that run, and delete all files."""
        for node in self.nodes:
            node.clean()

    def __enter__(self) -> list[Daemon]:
        try:
            self.start()
        except BaseException:
            self.clean()
            raise
        return self.nodes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # An unclean stop is reported only if the test has not failed already.
            if kind is None:
                self.stop()
        finally:
            self.clean()

    def _membership(self, name: str, node: Daemon, uri: str, via: Callable[[int], int] | None) -> dict[str, Any]:
        port = self._ports[node]
        cluster: dict[str, Any] = {"listen": f"tcp:{port}:interface=127.0.0.1", "secret_file": "secret"}
        if via is not None:
            cluster["advertise"] = f"127.0.0.1:{via(port)}"
        return {
            "node": name,
            "listen": [f"tcp:{node.port}:interface=127.0.0.1"],
            "storage": {"backend": "mongodb", "mongodb": {"uri": uri}},
            "cluster": cluster,
        }


def make_mongo_storage(test: unittest.TestCase) -> dict[str, Any]:
    """
    A `storage` section with a database on the shared servers, for the duration of the test.

    :raise SkipTest: there is no MongoDB server.
    """
    servers = shared_replica_set()
    database = fresh_database()
    name = database.__enter__()
    test.addCleanup(database.__exit__, None, None, None)
    return {"backend": "mongodb", "mongodb": {"uri": servers.uri(name)}}


def update_configuration(node: Daemon, changes: Mapping[str, Any]) -> None:
    """Merge changes into the configuration of a node."""
    merged = merge_settings(node.configuration(), changes)
    node.config.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")


def mediator_at_node(mediator: DIDCommMediator, port: int) -> DIDCommMediator:
    """The mediator with the address of one node."""
    address = f"127.0.0.1:{port}/didcomm"
    return replace(mediator, http_uri=f"http://{address}", ws_uri=f"ws://{address}")


def wallet_at_node(wallet: DIDCommWallet, port: int, reactor: Any) -> DIDCommWallet:
    """The wallet connected to another node."""
    return DIDCommWallet(
        wallet.identity, open_http(reactor), reactor, mediator_at_node(wallet.mediator, port), wallet.documents
    )


def send_to_peer_listener(port: int, data: bytes) -> bytes:
    """Response of the node-to-node listener to a client without the secret, until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(data)
        return b"".join(iter(partial(connection.recv, 1024), b""))
