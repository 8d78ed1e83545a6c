"""Tests that share three nodes on a MongoDB server."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from twisted.trial.unittest import TestCase

from tests.integration.cluster import DaemonCluster, update_configuration
from tests.integration.daemon import Daemon, merge_settings
from tests.replica_set import ReplicaSet

_numbers = itertools.count()


@functools.cache
def _cluster_servers() -> ReplicaSet:
    """
    A server for such nodes alone. They ask it all the time: commands that other tests have their server fail, once,
    might otherwise be those of a node.

    :raise SkipTest: there is no server to run.
    """
    servers = ReplicaSet()
    servers.open()
    atexit.register(servers.close)
    return servers


class SharedCluster(DaemonCluster):
    """
    Three nodes that run until this process ends.

    :ivar servers: where they keep everything.
    :ivar database: name of theirs.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.servers = _cluster_servers()
        self.database = f"cluster-{next(_numbers)}"
        super().__init__(self.servers.uri(self.database), settings=settings)
        self._checked = dict.fromkeys(self.nodes, 0)
        atexit.register(self.clean)
        self.start()

    def news(self) -> str:
        """What the nodes have written since this was asked."""
        said = {node: node.output() for node in self.nodes}
        news = "".join(text[self._checked[node] :] for node, text in said.items())
        self._checked = {node: len(text) for node, text in said.items()}
        return news


@functools.cache
def _shared(settings: str) -> SharedCluster:
    return SharedCluster(json.loads(settings))


class ClusterTestCase(TestCase):
    """Tests with nodes of the same settings, which they leave running."""

    settings: ClassVar[dict[str, Any]] = {}
    cluster: ClassVar[SharedCluster]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cluster = _shared(json.dumps(cls.settings))

    def tearDown(self) -> None:
        """Nothing has gone wrong inside."""
        self.assertNotIn("Traceback", self.cluster.news())

    @contextmanager
    def intruder(self, **changes: Any) -> Iterator[Daemon]:
        """A fourth node, like the first but for these settings; not running."""
        like = self.cluster.nodes[0]
        other = Daemon()
        other.directory.mkdir(parents=True)
        try:
            for name in ("mediator.yaml", "keys.jwks", "log.key", "secret"):
                (other.directory / name).write_bytes((like.directory / name).read_bytes())
                (other.directory / name).chmod(0o600)
            settings = {"listen": [f"tcp:{other.port}:interface=127.0.0.1"]}
            update_configuration(other, merge_settings(settings, changes))
            yield other
        finally:
            other.clean()
