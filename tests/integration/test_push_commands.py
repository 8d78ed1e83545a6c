"""`mediatord push test` and `mediatord status` beside a running daemon with push services."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread

from tests.integration.message_load import enrol_wallet
from tests.integration.test_push import PHONE, PushTestCase
from tests.integration.test_workers import await_workers

reactor: Any = _reactor

# So long that a second wake-up within a test shows that tests do not wait for it.
HOUR = {"min_interval": "1h"}
# For longer than any test.
SERVICE_FAILS = {"status": 503, "body": "{}", "headers": {"Retry-After": "3600"}}


class PushCommandTests(PushTestCase):
    """With one process and with workers, any of which may be asked."""

    async def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        command = [sys.executable, "-m", "mediatord", *arguments]
        result: subprocess.CompletedProcess[str] = await deferToThread(
            subprocess.run, command, capture_output=True, text=True, check=False, timeout=120
        )
        return result

    async def test_wakes_now(self) -> None:
        """Each test wakes, in spite of the minimum interval; without a daemon it is refused in one line."""
        daemon = self.start({"workers": 2}, **HOUR)
        await deferToThread(await_workers, daemon, 2)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        subscription = self.services.subscribe(await wallet.vapid_public_key())
        await wallet.set_push_device("web_push", subscription)
        arguments = ("push", "test", "--account", wallet.did, "--config", str(daemon.config))
        for number in (1, 2, 3):
            result = await self.run_command(*arguments, "--json")
            self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
            document = json.loads(result.stdout)
            self.assertEqual((document["did"], document["sent"]), (wallet.did, 2))
            received = self.services.received()
            self.assertEqual(len(received["fcm"]), number)
            self.assertEqual(len(received["web_push"][subscription["endpoint"]]), number)

        # A message still wakes: tests are no wake-ups for the schedule.
        await self.send(daemon, wallet, "one")
        await self.await_fcm(4)

        await deferToThread(daemon.stop)
        result = await self.run_command(*arguments)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertTrue(result.stderr.startswith("mediatord: this needs a running daemon; "), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1)

    async def test_shows_failures(self) -> None:
        """The answer of the service, and the exit status; `status` counts it."""
        daemon = self.start()
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        self.services.set_answers("fcm", always=SERVICE_FAILS)
        arguments = ("push", "test", "--account", wallet.did, "--config", str(daemon.config))
        result = await self.run_command(*arguments, "--json")
        self.assertEqual(result.returncode, 1)
        (shown,) = json.loads(result.stdout)["results"]
        self.assertEqual((shown["outcome"], shown["status"], shown["retry_after"]), ("retry", 503, 3600.0))

        # The host is left alone as it asked for.
        result = await self.run_command(*arguments)
        self.assertIn("backing_off, retry after ", result.stdout)
        self.assertEqual(self.services.received()["requests"]["fcm"], 1)

        result = await self.run_command("status", "--url", daemon.url, "--over", "0", "--json")
        services = json.loads(result.stdout)["push"]
        self.assertEqual(set(services), {"fcm", "web_push"})
        self.assertEqual((services["fcm"]["retry"], services["fcm"]["hosts_backing_off"]), (1, 1))
        self.assertEqual(services["web_push"]["hosts_backing_off"], 0)

    async def test_without_a_device(self) -> None:
        """Of an account, and of a DID that nobody has."""
        daemon = self.start()
        wallet = await enrol_wallet(daemon, reactor)
        config = ("--config", str(daemon.config))
        refused = [
            await self.run_command("push", "test", "--account", did, *config)
            for did in (wallet.did, "did:web:nobody.example")
        ]
        self.assertEqual([(one.returncode, one.stdout, one.stderr.count("\n")) for one in refused], [(1, "", 1)] * 2)
        self.assertIn("has no device; its wallet has to register one", refused[0].stderr)
        self.assertIn("did:web:nobody.example is not a registered DID", refused[1].stderr)
