"""What holds for a cluster as a whole: who may join, and how much is taken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, ClassVar

from mediatord.identity.key_file import create_keys
from tests.integration.cluster import fresh_storage
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import DaemonClient, send_request_on
from tests.skewed_clock import SkewedClock

# What the end of a lease and a start take, on a machine with other things to do; less than the minute that it takes
# where the server has to find out by itself that nobody goes on with a transaction.
BACK_SECONDS = 45.0


class RefusalTestCase(ClusterTestCase):
    """With nodes that are not let in."""

    def refusal(self, node: Daemon, **variables: str) -> str:
        """The one line that it ends with. :param variables: of its environment."""
        ran = subprocess.run(
            [sys.executable, "-m", "mediatord", "run", "--config", str(node.config)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
            env={**os.environ, **variables},
        )
        self.assertEqual(ran.returncode, 1, ran.stderr)
        (line,) = ran.stderr.strip().splitlines()
        return line


class RateLimitTests(RefusalTestCase):
    """Who may join."""

    def test_a_name_is_for_one(self) -> None:
        """A second node of the same name is refused while the first one lives (issue: same name)."""
        with self.intruder(cluster={"listen": "tcp:0:interface=127.0.0.1", "advertise": "127.0.0.1:1"}) as other:
            self.assertIn("node: ", self.refusal(other))

    def test_the_secret_is_the_same_for_all(self) -> None:
        """A node with another one is refused (issue: different secrets)."""
        changes = {"node": "d", "cluster": {"listen": "tcp:0:interface=127.0.0.1", "advertise": "127.0.0.1:1"}}
        with self.intruder(**changes) as other:
            (other.directory / "secret").write_text("another secret that is long enough for it", encoding="ascii")
            self.assertIn("cluster.secret_file: ", self.refusal(other))

    def test_the_keys_are_the_same_for_all(self) -> None:
        """Else every wallet would be a stranger at every other node: the line says what to do."""
        changes = {"node": "d", "cluster": {"listen": "tcp:0:interface=127.0.0.1", "advertise": "127.0.0.1:1"}}
        with self.intruder(**changes) as other:
            (other.directory / "keys.jwks").unlink()
            create_keys(other.directory / "keys.jwks")
            self.assertIn("copy keys.jwks", self.refusal(other))

    def test_the_clock_is_right(self) -> None:
        """Whoever would let everybody's messages expire is not let in, and does not work alone either."""
        clock = SkewedClock(4 * 86_400)
        self.addCleanup(clock.remove)
        listen = {"listen": "tcp:0:interface=127.0.0.1", "advertise": "127.0.0.1:1"}
        ways: list[dict[str, Any]] = [
            {"cluster": listen},
            {"cluster": {"listen": None}, "storage": fresh_storage(self)},
            {"cluster": {"listen": None}, "storage": fresh_storage(self), "workers": 2},
        ]
        for changes in ways:
            with self.intruder(node="d", **changes) as other:
                line = self.refusal(other, **clock.variables())
                self.assertIn("the clock of this host is 4 days ahead of the MongoDB server's", line)

    def test_a_single_node_does_not_work_beside_a_cluster(self) -> None:
        """Without cluster.listen, others would not hear of what it takes."""
        with self.intruder(node="d", cluster={"listen": None}) as other:
            self.assertIn("cluster.listen", self.refusal(other))


class SingleNodeTests(RefusalTestCase):
    """Beside a single node, which is the first there."""

    def setUp(self) -> None:
        """It runs on a database of its own; `others` are what is needed for another one."""
        self.storage = fresh_storage(self)
        self.lone = self.beside(node="lone", cluster={"listen": None})
        self.lone.start()

    def beside(self, **changes: Any) -> Daemon:
        """A node on the same database, not running."""
        intruder = self.intruder(storage=self.storage, **changes)
        self.addCleanup(intruder.__exit__, None, None, None)
        return intruder.__enter__()

    def test_nobody_works_beside_it(self) -> None:
        """Neither a node of a cluster, nor another that works alone, nor one with workers (issue: one mediator)."""
        listen = {"listen": "tcp:0:interface=127.0.0.1", "advertise": "127.0.0.1:1"}
        ways: list[dict[str, Any]] = [
            {"cluster": listen},
            {"cluster": {"listen": None}},
            {"cluster": {"listen": None}, "workers": 2},
        ]
        others = [self.beside(node="d", **changes) for changes in ways]
        with ThreadPoolExecutor(len(others)) as at_once:
            for line in at_once.map(self.refusal, others):
                self.assertIn("node lone uses this database exclusively", line)
        self.lone.await_health()
        self.lone.stop()

    def test_it_is_killed(self) -> None:
        """It can begin again within a few seconds, and at once after it has stopped in order."""
        self.lone.kill()
        began = time.monotonic()
        self.lone.start()
        self.assertLess(time.monotonic() - began, BACK_SECONDS)
        self.lone.restart()
        self.lone.stop()


class LimitTests(ClusterTestCase):
    """Limits are those of the cluster, not of each node."""

    settings: ClassVar[dict[str, Any]] = {"limits": {"ip_per_minute": 200}}

    def test_a_limit_holds_over_all_nodes(self) -> None:
        """Within 5 % (issue: rate limits)."""
        connections = [DaemonClient(node).connection() for node in self.cluster.nodes]
        taken = 0
        try:
            for connection, _ in zip(cycle(connections), range(2 * 200), strict=False):
                answered = send_request_on(
                    connection, "POST", "/didcomm", b"no envelope", {"Content-Type": "text/plain"}
                )
                taken += answered.status != 429
        finally:
            for connection in connections:
                connection.close()
        self.assertTrue(190 <= taken <= 210, taken)
