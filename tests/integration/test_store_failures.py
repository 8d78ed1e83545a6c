"""Store failures as senders, wallets, load balancers and operators see them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from io import RawIOBase

import yaml
from twisted.internet import reactor  # noqa: TID251  trial runs it
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.store.factory import build_store
from mediatord.store.interfaces.messages import Payload, QueueLimits
from mediatord.wallet.didcomm_client import DIDCommWallet
from tests.integration.daemon import Daemon
from tests.integration.message_load import (
    MAX_DELIVERY,
    PATIENCE_SECONDS,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    prepare_sized_forward,
    read_marker,
)
from tests.integration.small_filesystem import mount_small_filesystem
from tests.integration.test_lifecycle import send_request
from tests.mongod import fresh_database, shared_replica_set

DISK_BYTES = 16 << 20
MESSAGES = 30
# Duration of another process's read transaction.
READ_SECONDS = 0.5


def read_metrics(daemon: Daemon) -> str:
    """The metrics page, once all workers answer in time."""
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while (response := send_request(daemon.port, "GET", "/metrics"))[0] != 200:
        assert reactor.seconds() < deadline, response
    return response[2].decode()


def read_health(daemon: Daemon) -> str:
    """Detail of `/health`."""
    return str(json.loads(send_request(daemon.port, "GET", "/health")[2]).get("detail", ""))


async def wait_for_detail(daemon: Daemon, expected: str) -> None:
    """Wait until every worker reports this detail: each notices by itself, and any may answer."""
    await deferToThread(daemon.await_health, 503 if expected else 200)
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while not all(read_health(daemon) == expected for _ in range(20)):
        assert reactor.seconds() < deadline, f"not all report {expected!r}"
        await deferLater(reactor, 0.1)


def fill_disk(file: RawIOBase) -> None:
    """Write until the disk is full."""
    for size in (65_536, 4096, 512):
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))


async def fetch_and_acknowledge(wallet: DIDCommWallet) -> list[str]:
    """Fetch and acknowledge all messages; return their markers."""
    delivered = await wallet.fetch(MAX_DELIVERY)
    markers = [read_marker(wallet, message) for message in delivered]
    await wallet.acknowledge([message.id for message in delivered])
    return markers


class FullDiskTests(TestCase):
    """A real file system with database and event log, filled by another process."""

    async def test_full_disk_with_one_process(self) -> None:
        """Fetching and deleting still work."""
        await self.check_full_disk(workers=1)

    async def test_full_disk_with_workers(self) -> None:
        """Processes that share the database."""
        await self.check_full_disk(workers=2)

    async def check_full_disk(self, *, workers: int) -> None:
        """
        Nothing is stored, as `/health` and metrics report; queued messages can be fetched and deleted while the disk
        is full; with space, service resumes.
        """
        disk = mount_small_filesystem(self, DISK_BYTES)
        storage = {"sqlite": {"path": str(disk / "mediator.sqlite3")}}
        daemon = prepare_daemon({"workers": workers, "storage": storage, "log": {"directory": str(disk / "log")}})
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        another_forward, *waiting = prepare_forwards(bob, "letter", MESSAGES + 1)
        for forward in waiting:
            self.assertEqual(send_request(daemon.port, "POST", "/didcomm", forward.body)[0], 202)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            fill_disk(file)
            await wait_for_detail(daemon, "store full: only reads and deletions succeed")
            self.assertIn('mediator_storage_fault{fault="full"} 1.0', read_metrics(daemon))
            self.assertIn("mediator_storage_up 0.0", read_metrics(daemon))
            # Take the daemon's reserve as well, if possible.
            fill_disk(file)
            for forward in (another_forward, prepare_sized_forward(bob, "large", 100_000)):
                status, retry_after, body = send_request(daemon.port, "POST", "/didcomm", forward.body)
                self.assertEqual((status, json.loads(body)["body"]["code"]), (503, "e.p.me.res.storage"))
                self.assertIsNotNone(retry_after)
            self.assertEqual(await fetch_and_acknowledge(bob), [forward.marker for forward in waiting])
            for _ in range(MESSAGES):
                fill_disk(file)
                self.assertEqual((await bob.status()).message_count, 0)
        filler.unlink()
        await wait_for_detail(daemon, "")
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", another_forward.body)[0], 202)
        self.assertIn("mediator_storage_up 1.0", read_metrics(daemon))
        self.assertEqual(await fetch_and_acknowledge(bob), [another_forward.marker])
        await deferToThread(daemon.__exit__, None, None, None)


class BusyWALTests(TestCase):
    """A full disk, and a write-ahead log that another process reads when it has to restart."""

    async def test_removal_waits_for_reader(self) -> None:
        """Operations that need no space wait for the reader and succeed."""
        path = mount_small_filesystem(self, DISK_BYTES) / "mediator.sqlite3"
        store = build_store("sqlite", IReactorTime(reactor), QueueLimits(), path=path, shared=True)
        self.addCleanup(store.close)
        await store.open()
        ids = [f"m{number}" for number in range(200)]
        await store.grant("did:example:alice")
        await store.update_recipients("did:example:alice", [("did:example:inbox", "add")], max_recipients=1)
        payloads = [Payload(id, b"payload", "json") for id in ids]
        await store.enqueue("did:example:inbox", payloads, expires_at=reactor.seconds() + 3600)
        with (path.parent / "filler").open("wb", buffering=0) as file:
            fill_disk(file)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM message").fetchall()
            for _ in range(500):
                # Only a write without space takes so long.
                timer = reactor.callLater(READ_SECONDS, other.execute, "ROLLBACK")
                await store.mark_delivered(ids)
                await store.mark_pending(ids)
                if not timer.active():
                    break
                timer.cancel()
            else:
                self.fail("there was room for everything")
        self.assertEqual(len(await store.acknowledge("did:example:alice", ids)), len(ids))


class MongoQuotaTests(TestCase):
    """A MongoDB server with less free space than required."""

    async def test_full_server_is_reported(self) -> None:
        """`/health` and metrics report it, senders get 503; queued messages are fetched and deleted."""
        database = fresh_database()
        uri = shared_replica_set().uri(database.__enter__())
        self.addCleanup(database.__exit__, None, None, None)
        daemon = prepare_daemon({"storage": {"backend": "mongodb", "mongodb": {"uri": uri}}})
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        queued_forward, refused_forward = prepare_forwards(bob, "letter", 2)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", queued_forward.body)[0], 202)
        await deferToThread(daemon.stop)
        settings = daemon.configuration()
        settings["storage"]["mongodb"]["min_free_bytes"] = 1 << 60
        daemon.config.write_text(yaml.safe_dump(settings), "utf-8")
        await deferToThread(daemon.start, 503)
        await wait_for_detail(daemon, "store full: only reads and deletions succeed")
        self.assertIn('mediator_storage_fault{fault="full"} 1.0', read_metrics(daemon))
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", refused_forward.body)[0], 503)
        self.assertEqual(await fetch_and_acknowledge(bob), [queued_forward.marker])


class MissingFileTests(TestCase):
    """A database file that is moved away from a running daemon."""

    async def test_moved_database_accepts_nothing(self) -> None:
        """Everything is there once it has its name again."""
        daemon = prepare_daemon()
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        accepted_before, refused_forward, accepted_after = prepare_forwards(bob, "letter", 3)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", accepted_before.body)[0], 202)
        database = daemon.directory / "mediator.sqlite3"
        database.rename(moved := database.with_name("aside"))
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", refused_forward.body)[0], 503)
        await deferToThread(daemon.await_health, 503)
        self.assertIn("removed, renamed or replaced", read_health(daemon))
        self.assertIn('mediator_storage_fault{fault="missing"} 1.0', read_metrics(daemon))
        self.assertIn("mediator_storage_up 0.0", read_metrics(daemon))
        moved.rename(database)
        await deferToThread(daemon.await_health)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", accepted_after.body)[0], 202)
        self.assertLessEqual({accepted_before.marker, accepted_after.marker}, set(await fetch_and_acknowledge(bob)))
        self.assertIn("was removed, renamed or replaced", daemon.output())
