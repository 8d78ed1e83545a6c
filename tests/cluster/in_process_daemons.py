"""Daemons in one process, on one memory store, connected by real sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from mediatord.app.daemon import build_daemon
from mediatord.config.settings import Config
from mediatord.identity.key_file import create_keys
from mediatord.runtime.secret_files import create_secret_file
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.sqlite.memory_store import MemoryStore
from mediatord.wallet.didcomm_socket import make_client_endpoint
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.daemon import PLENTY, merge_settings
from tests.store.builders import enforce_identity

reactor: Any = _reactor
SECRET = b"what the nodes of this cluster know and nobody else"
WAIT_TIMEOUT = 120.0
POLL_INTERVAL = 0.01


class InProcessNode:
    """
    One of several daemons.

    :ivar fatal_errors: lines with which it gave up.
    """

    def __init__(self, test_case: InProcessClusterTestCase, name: str, settings: dict[str, Any]) -> None:
        port = find_free_port()
        self.name = name
        self.fatal_errors: list[str] = []
        self.url = f"http://127.0.0.1:{port}"
        plain = {
            "public_url": test_case.url or self.url,
            "node": name,
            "listen": [f"tcp:{port}:interface=127.0.0.1"],
            "storage": {"backend": "memory"},
            "identity": {"keys": str(test_case.directory / "keys.jwks")},
            "log": {"directory": str(test_case.directory / f"{name}-{port}"), "rotate": {"compress": False}},
            "drain_timeout": "2s",
            "control_socket": None,
            "cluster": {
                "listen": test_case.get_peer_endpoint(name),
                "secret_file": str(test_case.directory / "cluster.secret"),
            },
        }
        self.config = Config.model_validate(merge_settings(merge_settings(plain, PLENTY), settings))
        self.service: Any = build_daemon(
            reactor, self.config, give_up=self.fatal_errors.append, store=test_case.store
        )
        self._running = False

    def make_endpoint(self) -> Any:
        """Endpoint of this node, whatever URL the mediator's DID document has."""
        return make_client_endpoint(reactor, self.url)

    def start(self) -> None:
        """Bind and start."""
        self._running = True
        self.service.privilegedStartService()
        self.service.startService()

    async def stop(self) -> None:
        """Stop in order, if it runs."""
        if self._running:
            self._running = False
            await self.service.stopService()


class InProcessClusterTestCase(TestCase):
    """
    Test case with several daemons.

    :cvar names: daemons that are started before each test.
    """

    names: Sequence[str] = ("a", "b")

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """Start the daemons."""
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        create_secret_file(self.directory / "cluster.secret", SECRET)
        self.store: IStore = MemoryStore(reactor, QueueLimits())
        enforce_identity(self.store.cluster)
        self.url = ""
        self.nodes: list[InProcessNode] = []
        for name in self.names:
            self.start_node(name)
        await self.wait_until(lambda: self.list_live_names() == list(self.names))

    def get_peer_endpoint(self, name: str) -> str:
        """Endpoint at which a node listens for peers."""
        return f"tcp:{find_free_port()}:interface=127.0.0.1"

    def start_node(self, name: str, **settings: Any) -> InProcessNode:
        """Start a further daemon; all have the URL of the first one."""
        node = InProcessNode(self, name, settings)
        self.url = self.url or node.url
        self.nodes.append(node)
        node.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(node.stop()))
        return node

    def list_live_names(self) -> list[str]:
        """Names of the live nodes."""
        return [node.name for node in self.successResultOf(self.store.cluster.list_nodes())]

    async def wait_until(self, condition: Any) -> None:
        """Wait for a condition."""
        deadline = reactor.seconds() + WAIT_TIMEOUT
        while not condition():
            assert reactor.seconds() < deadline, "it did not happen"
            await deferLater(reactor, POLL_INTERVAL, lambda: None)
