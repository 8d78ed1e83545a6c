"""Daemons whose clock is stepped while they run."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, enrol_wallet, prepare_forwards, read_marker
from tests.integration.test_workers import POLL_SECONDS, await_workers, workers_of
from tests.notify_socket import NotifySocket
from tests.skewed_clock import ClockedDaemon, SkewedClock

reactor: Any = _reactor

STEP = 120.0
WATCHDOG_SECONDS = 2
# Lease renewals of each worker to wait for after a step.
RENEWALS = 1


class ClockTestCase(TestCase):
    def setUp(self) -> None:
        self.clock = SkewedClock()
        self.addCleanup(self.clock.remove)

    async def start_daemon(self, settings: dict[str, Any] | None = None, **variables: str) -> Daemon:
        """Start a daemon that uses the clock."""
        daemon = ClockedDaemon(self.clock, settings, variables)
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        return daemon

    async def step_clock(self, daemon: Daemon, ahead: float, processes: int = 1) -> None:
        """Set the clock; return when all processes have noticed it."""
        read_until = len(daemon.output())
        self.clock.set(ahead)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while daemon.output()[read_until:].count("the system clock was set") < processes:
            assert time.monotonic() < deadline, daemon.output()
            await deferToThread(time.sleep, POLL_SECONDS)

    async def post_message(self, bob: DIDCommWallet, text: str) -> str:
        """POST a message to Bob; return its marker."""
        (letter,) = prepare_forwards(bob, text, 1)
        self.assertEqual((await bob.post(letter.body)).status, 202)
        return letter.marker


@pytest.mark.exhaustive
class WorkersTests(ClockTestCase):
    """Two workers; every process logs the step."""

    def setUp(self) -> None:
        super().setUp()
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.manager = NotifySocket(directory, PATIENCE_SECONDS)

    def await_watchdog(self) -> None:
        """The supervisor keeps notifying. Earlier notifications are discarded."""
        while not self.manager.is_empty():
            pass
        for _ in range(2):
            self.assertEqual(self.manager.next_state(), "WATCHDOG=1")

    def await_renewals(self, daemon: Daemon, ahead: float) -> None:
        """Every worker renews its lease by this clock."""
        seen: dict[str, set[float]] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        path = daemon.directory / "mediator.sqlite3"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            while len(seen) < 2 or any(len(times) <= RENEWALS for times in seen.values()):
                assert time.monotonic() < deadline, daemon.output()
                for boot, until in connection.execute("SELECT boot, until FROM node"):
                    if abs(until - time.time() - ahead) < STEP / 2:  # noqa: TID251  the true one
                        seen.setdefault(boot, set()).add(until)
                time.sleep(POLL_SECONDS)

    async def test_clock_steps_do_not_interrupt_workers(self) -> None:
        """No worker is killed, leases are renewed, and messages are pushed at once."""
        with self.manager:
            daemon = await self.start_daemon(
                {"workers": 2, "node": "n"},
                NOTIFY_SOCKET=self.manager.address,
                WATCHDOG_USEC=str(WATCHDOG_SECONDS * 1_000_000),
            )
            # A worker that starts after the step does not notice it.
            await deferToThread(await_workers, daemon, 2)
            workers = workers_of(daemon.pid)
            bob = await enrol_wallet(daemon, reactor)
            for ahead in (-STEP, 0.0):
                await self.step_clock(daemon, ahead, processes=3)
                await deferToThread(self.await_watchdog)
                await deferToThread(self.await_renewals, daemon, ahead)
                socket = await connect_didcomm_socket(reactor, bob)
                await socket.live()
                for number in range(2):
                    marker = await self.post_message(bob, f"{ahead:.0f}-{number}")
                    pushed = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
                    self.assertEqual(read_marker(bob, pushed), marker)
                    await socket.acknowledge([pushed])
                await socket.close()
            self.assertEqual(workers_of(daemon.pid), workers)
            await deferToThread(daemon.stop)
        self.assertNotIn("Traceback", daemon.output())


class QueuedMessageTests(ClockTestCase):
    async def test_queued_messages_survive_clock_correction(self) -> None:
        """Messages accepted under a wrong clock stay queued, whether it was ahead or behind."""
        for ahead in (-STEP, STEP):
            self.clock.set(ahead)
            daemon = await self.start_daemon()
            bob = await enrol_wallet(daemon, reactor)
            marker = await self.post_message(bob, "early")
            await self.step_clock(daemon, 0.0)
            self.assertEqual((await bob.status()).message_count, 1)
            (waiting,) = await bob.fetch()
            self.assertEqual(read_marker(bob, waiting), marker)
            await deferToThread(daemon.stop)
