"""Test case for tests that share three nodes on a MongoDB server."""

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
    A server for shared nodes only. They use it all the time: a failpoint of another test might fail their commands
    instead.

    :raise SkipTest: there is no MongoDB server.
    """
    servers = ReplicaSet()
    servers.open()
    atexit.register(servers.close)
    return servers


class SharedCluster(DaemonCluster):
    """
    Three nodes that run until this process ends.

    :ivar servers: MongoDB servers.
    :ivar database: name of the database.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.servers = _cluster_servers()
        self.database = f"cluster-{next(_numbers)}"
        super().__init__(self.servers.uri(self.database), settings=settings)
        self._read_until = dict.fromkeys(self.nodes, 0)
        atexit.register(self.clean)
        self.start()

    def new_output(self) -> str:
        """What the nodes have written since the last call."""
        outputs = {node: node.output() for node in self.nodes}
        output = "".join(output[self._read_until[node] :] for node, output in outputs.items())
        self._read_until = {node: len(output) for node, output in outputs.items()}
        return output


@functools.cache
def _shared(settings: str) -> SharedCluster:
    return SharedCluster(json.loads(settings))


class ClusterTestCase(TestCase):
    """Test case with shared nodes for each set of settings, which tests leave running."""

    settings: ClassVar[dict[str, Any]] = {}
    cluster: ClassVar[SharedCluster]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cluster = _shared(json.dumps(cls.settings))

    def tearDown(self) -> None:
        """No node has logged a traceback."""
        self.assertNotIn("Traceback", self.cluster.new_output())

    @contextmanager
    def extra_node(self, **changes: Any) -> Iterator[Daemon]:
        """A fourth node, not running, configured like the first one with these changes."""
        first = self.cluster.nodes[0]
        node = Daemon()
        node.directory.mkdir(parents=True)
        try:
            for name in ("mediator.yaml", "keys.jwks", "log.key", "secret"):
                (node.directory / name).write_bytes((first.directory / name).read_bytes())
                (node.directory / name).chmod(0o600)
            settings = {"listen": [f"tcp:{node.port}:interface=127.0.0.1"]}
            update_configuration(node, merge_settings(settings, changes))
            yield node
        finally:
            node.clean()
