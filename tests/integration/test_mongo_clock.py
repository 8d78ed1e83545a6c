"""A daemon whose clock goes wrong beside a MongoDB whose clock is right."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.integration.cluster import fresh_storage
from tests.integration.message_load import PATIENCE_SECONDS, enrol_wallet, prepare_forwards
from tests.integration.test_lifecycle import ask
from tests.skewed_clock import ClockedDaemon, SkewedClock

reactor: Any = _reactor

DAYS = 4 * 86_400.0
# It is asked so often.
LOOK_SECONDS = 0.05


class ClockSkewTests(TestCase):
    async def test_set_wrong_and_right(self) -> None:
        """Health names the clock and nothing is accepted until it is right; what waits is there all the time."""
        clock = SkewedClock()
        self.addCleanup(clock.remove)
        daemon = ClockedDaemon(clock, {"storage": fresh_storage(self)})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrol_wallet(daemon, reactor)
        stock = iter(prepare_forwards(bob, "clock", 6))

        async def leave() -> int:
            return (await bob.post(next(stock).body)).status

        waiting = 0
        for ahead, way in ((DAYS, "ahead of"), (-DAYS, "behind")):
            self.assertEqual(await leave(), 202)
            waiting += 1
            clock.set(ahead)
            detail = f"the clock of this host is 4 days {way} the MongoDB server's"
            deadline = reactor.seconds() + PATIENCE_SECONDS
            # What it was asked when the clock was set may have failed for that.
            while detail not in (found := await deferToThread(ask, daemon.port, "GET", "/health"))[2].decode():
                self.assertLess(reactor.seconds(), deadline, found)
                await deferLater(reactor, LOOK_SECONDS)
            status, retry, body = found
            self.assertEqual((status, retry, json.loads(body)), (503, "5", {"status": "error", "detail": detail}))
            self.assertEqual(await leave(), 503)
            clock.set(0.0)
            await deferToThread(daemon.await_health, 200)
            self.assertEqual((await bob.status()).message_count, waiting)
        self.assertEqual(await leave(), 202)
        await deferToThread(daemon.stop)
        self.assertNotIn("Traceback", daemon.output())
