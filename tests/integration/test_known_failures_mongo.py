"""Known failures of other mediators with their database, each tested with a real MongoDB server."""

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
# Interval of readiness checks.
POLL_SECONDS = 0.05


class DatabaseTests(SingleMongodTestCase):
    """
    Failures with a database server:

    * each health check opens a client;
    * an unreachable server is reported as "0 messages".
    """

    def count_connections(self) -> int:
        """Connections that the server has ever accepted."""
        return int(self.servers.client.admin.command("serverStatus")["connections"]["totalCreated"])

    async def test_health_checks_open_no_connections(self) -> None:
        """The daemon keeps using its connections."""

        def check() -> tuple[int, list[int]]:
            send_request(self.daemon, "GET", "/health")
            # The first probe may take longer than a response waits for it.
            deadline = time.monotonic() + PATIENCE_SECONDS
            while send_request(self.daemon, "GET", "/ready").status != 200:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(POLL_SECONDS)
            before = self.count_connections()
            statuses = [
                send_request(self.daemon, "GET", path).status for _ in range(CHECKS) for path in ("/health", "/ready")
            ]
            return self.count_connections() - before, statuses

        opened, statuses = await deferToThread(check)
        # A check that takes too long on a busy machine is answered with 503.
        self.assertLessEqual(set(statuses), {200, 503})
        self.assertGreaterEqual(statuses.count(200), CHECKS)
        self.assertLess(opened, CHECKS // 2)

    async def test_store_failure_is_not_reported_as_empty_queue(self) -> None:
        """Status and delivery are refused; when the server is back, the messages are there."""

        def check() -> None:
            bob = DeviceWallet(DaemonClient(self.daemon)).enrol()
            bob.send_text("there")
            requests: list[tuple[str, dict[str, Any]]] = [
                (f"{PICKUP}/status-request", {}),
                (f"{PICKUP}/delivery-request", {"limit": 1}),
            ]
            with self.servers.failpoint("find", "aggregate", errorCode=11_600):
                statuses = [
                    send_request(self.daemon, "POST", "/didcomm", bob.pack(*message)).status for message in requests
                ]
            self.assertEqual(statuses, [503, 503])
            self.daemon.await_health()
            self.assertEqual((bob.queued_count(), bob.queued_texts()), (1, ["there"]))

        await deferToThread(check)
