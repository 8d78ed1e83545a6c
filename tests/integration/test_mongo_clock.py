"""A daemon whose clock is wrong at its start, or becomes wrong later, while MongoDB's is right."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.integration.cluster import make_mongo_storage
from tests.integration.daemon import clean_environment
from tests.integration.message_load import PATIENCE_SECONDS, enrol_wallet, prepare_daemon, prepare_forwards
from tests.integration.test_lifecycle import send_request
from tests.skewed_clock import ClockedDaemon, SkewedClock

reactor: Any = _reactor

DAYS = 4 * 86_400.0
# Interval of polling.
POLL_SECONDS = 0.05


class ClockSkewTests(TestCase):
    async def test_refuses_messages_while_clock_is_wrong(self) -> None:
        """Health names the clock; queued messages stay throughout."""
        clock = SkewedClock()
        self.addCleanup(clock.remove)
        daemon = ClockedDaemon(clock, {"storage": make_mongo_storage(self)})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrol_wallet(daemon, reactor)
        forwards = iter(prepare_forwards(bob, "clock", 6))

        async def leave() -> int:
            return (await bob.post(next(forwards).body)).status

        waiting = 0
        for ahead, direction in ((DAYS, "ahead of"), (-DAYS, "behind")):
            self.assertEqual(await leave(), 202)
            waiting += 1
            clock.set(ahead)
            detail = f"the clock of this host is 4 days {direction} the MongoDB server's"
            deadline = reactor.seconds() + PATIENCE_SECONDS
            # A request at the moment of the step may have failed.
            while (
                detail
                not in (drained := await deferToThread(send_request, daemon.port, "GET", "/health"))[2].decode()
            ):
                self.assertLess(reactor.seconds(), deadline, drained)
                await deferLater(reactor, POLL_SECONDS)
            status, retry, body = drained
            self.assertEqual((status, retry, json.loads(body)), (503, "5", {"status": "error", "detail": detail}))
            self.assertEqual(await leave(), 503)
            clock.set(0.0)
            await deferToThread(daemon.await_health, 200)
            self.assertEqual((await bob.status()).message_count, waiting)
        self.assertEqual(await leave(), 202)
        await deferToThread(daemon.stop)
        self.assertNotIn("Traceback", daemon.output())

    def test_wrong_clock_at_start_ends_daemon(self) -> None:
        """With one line that names the difference, from one process as from workers."""
        clock = SkewedClock(DAYS)
        self.addCleanup(clock.remove)
        for workers in (1, 2):
            daemon = prepare_daemon({"storage": make_mongo_storage(self), "workers": workers})
            self.addCleanup(daemon.clean)
            result = subprocess.run(
                [sys.executable, "-m", "mediatord", "run", "--config", str(daemon.config)],
                env={**clean_environment(), **clock.variables()},
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            self.assertEqual(result.returncode, 1, result.stderr)
            (line,) = result.stderr.strip().splitlines()
            self.assertIn("the clock of this host is 4 days ahead of the MongoDB server's", line)
