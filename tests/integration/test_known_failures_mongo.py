"""What other mediators are known to have done wrong with their database, each once, with a real MongoDB server."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.threads import deferToThread

from mediatord.wallet.didcomm_client import PICKUP
from tests.integration.devices import DeviceWallet
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import DaemonClient
from tests.integration.single_mongod import SingleMongodTestCase, send_request

CHECKS = 50
# It is asked so often whether it is ready.
LOOK_SECONDS = 0.05


class DatabaseTests(SingleMongodTestCase):
    """
    Failures of a database that is a server:

    * a health check opens a client at each call;
    * a server that is away is reported as "0 messages".
    """

    def opened(self) -> int:
        """Connections that the server has ever taken."""
        return int(self.servers.client.admin.command("serverStatus")["connections"]["totalCreated"])

    async def test_a_health_check_that_opens_a_client(self) -> None:
        """However often it is asked, the daemon goes on with the connections that it has."""

        def check() -> tuple[int, set[int]]:
            send_request(self.daemon, "GET", "/health")
            # The first self-test may take longer than an answer waits for it.
            deadline = time.monotonic() + PATIENCE_SECONDS
            while send_request(self.daemon, "GET", "/ready").status != 200:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(LOOK_SECONDS)
            before = self.opened()
            statuses = {
                send_request(self.daemon, "GET", path).status for _ in range(CHECKS) for path in ("/health", "/ready")
            }
            return self.opened() - before, statuses

        opened, statuses = await deferToThread(check)
        self.assertEqual(statuses, {200})
        self.assertLess(opened, CHECKS // 2)

    async def test_a_store_failure_is_no_empty_queue(self) -> None:
        """Neither a status nor a delivery says that nothing is there; when the server is back, it is."""

        def check() -> None:
            bob = DeviceWallet(DaemonClient(self.daemon)).enrol()
            bob.tell("there")
            requests: list[tuple[str, dict[str, Any]]] = [
                (f"{PICKUP}/status-request", {}),
                (f"{PICKUP}/delivery-request", {"limit": 1}),
            ]
            with self.servers.failpoint("find", "aggregate", errorCode=11_600):
                statuses = [send_request(self.daemon, "POST", "/didcomm", bob.pack(*one)).status for one in requests]
            self.assertEqual(statuses, [503, 503])
            self.daemon.await_health()
            self.assertEqual((bob.waiting(), bob.texts()), (1, ["there"]))

        await deferToThread(check)
