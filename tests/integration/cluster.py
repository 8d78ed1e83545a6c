"""
Nodes of one cluster, each a process with a directory of its own.

::

    with Cluster(servers.uri("mediatord")) as (a, b, c):
        alice = await enrolled(a, reactor)
        elsewhere = at(alice, b.port, reactor)
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
    Configured, but not running before :meth:`start`; as a context manager it starts and stops.

    :param uri: of the database that they share.
    :param names: one node each.
    :param settings: what differs from the file that `mediatord init` writes, for all nodes.
    :param via: the port that leads to that of a node, for the other nodes.
    :param public_url: of all; the first node's unless given.
    :param clocks: what nodes of these names go by.
    :ivar nodes: as they were named.
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
        known = clocks or {}
        self.nodes = [ClockedDaemon(known[name]) if name in known else Daemon() for name in names]
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
        """Where other nodes reach it."""
        return self._ports[node]

    def start(self) -> None:
        """
        Run all of them.

        :raise AssertionError: one of them did not come up.
        """
        with ThreadPoolExecutor(len(self.nodes)) as at_once:
            list(at_once.map(lambda node: node.start(), self.nodes))

    def stop(self) -> None:
        """Stop those that run."""
        with ThreadPoolExecutor(len(self.nodes)) as at_once:
            list(at_once.map(Daemon.stop, [node for node in self.nodes if node.running]))

    def clean(self) -> None:
        """End those that still run, and delete what all have written."""
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
            # Whether the end is orderly matters only to a test that has not failed already.
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


def fresh_storage(test: unittest.TestCase) -> dict[str, Any]:
    """
    A `storage` section with a database on the shared servers that is the test's own until it is over.

    :raise SkipTest: there is no server to run.
    """
    servers = shared_replica_set()
    fresh = fresh_database()
    name = fresh.__enter__()
    test.addCleanup(fresh.__exit__, None, None, None)
    return {"backend": "mongodb", "mongodb": {"uri": servers.uri(name)}}


def update_configuration(node: Daemon, changes: Mapping[str, Any]) -> None:
    """Change the configuration of a node."""
    merged = merge_settings(node.configuration(), changes)
    node.config.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")


def mediator_at_node(mediator: DIDCommMediator, port: int) -> DIDCommMediator:
    """The same mediator, at one of its nodes."""
    address = f"127.0.0.1:{port}/didcomm"
    return replace(mediator, http_uri=f"http://{address}", ws_uri=f"ws://{address}")


def wallet_at_node(wallet: DIDCommWallet, port: int, reactor: Any) -> DIDCommWallet:
    """The same wallet at another node."""
    return DIDCommWallet(
        wallet.identity, open_http(reactor), reactor, mediator_at_node(wallet.mediator, port), wallet.documents
    )


def say_to_listener(port: int, data: bytes) -> bytes:
    """What the node-to-node listener on a port answers to somebody who knows no secret, until it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(data)
        return b"".join(iter(partial(connection.recv, 1024), b""))
