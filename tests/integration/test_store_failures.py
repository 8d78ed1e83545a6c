"""A store in trouble: what senders, wallets, balancers and operators are told of it."""

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
    MANY,
    PATIENCE_SECONDS,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    prepare_sized_forward,
    read_marker,
)
from tests.integration.small_filesystem import mount_small_filesystem
from tests.integration.test_lifecycle import ask
from tests.mongod import fresh_database, shared_replica_set

DISK_BYTES = 16 << 20
LETTERS = 30
# How long another process reads.
HELD_SECONDS = 0.5


def metrics(daemon: Daemon) -> str:
    """The page for Prometheus, once the workers answer each other in time."""
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while (answered := ask(daemon.port, "GET", "/metrics"))[0] != 200:
        assert reactor.seconds() < deadline, answered
    return answered[2].decode()


def health(daemon: Daemon) -> str:
    """What is wrong, as the daemon says of itself."""
    return str(json.loads(ask(daemon.port, "GET", "/health")[2]).get("detail", ""))


async def all_say(daemon: Daemon, trouble: str) -> None:
    """Wait until every worker says that this is wrong: each finds out for itself, and any may answer."""
    await deferToThread(daemon.await_health, 503 if trouble else 200)
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while not all(health(daemon) == trouble for _ in range(20)):
        assert reactor.seconds() < deadline, f"not all report {trouble!r}"
        await deferLater(reactor, 0.1)


def fill(file: RawIOBase) -> None:
    """Write until there is no room."""
    for size in (65_536, 4096, 512):
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))


async def deleted(wallet: DIDCommWallet) -> list[str]:
    """What a wallet has fetched and acknowledged."""
    delivered = await wallet.fetch(MANY)
    markers = [read_marker(wallet, one) for one in delivered]
    await wallet.acknowledge([one.id for one in delivered])
    return markers


class FullDiskTests(TestCase):
    """A real disk with database and event log, which somebody else fills."""

    async def test_full(self) -> None:
        """One process."""
        await self.check_full(workers=1)

    async def test_full_with_workers(self) -> None:
        """Several processes that share the database."""
        await self.check_full(workers=2)

    async def check_full(self, *, workers: int) -> None:
        """
        Nothing more is stored, which `/health` and the metrics say; all that waits can be fetched and deleted, again
        and again while the disk stays full; with room it goes on.
        """
        disk = mount_small_filesystem(self, DISK_BYTES)
        storage = {"sqlite": {"path": str(disk / "mediator.sqlite3")}}
        daemon = prepare_daemon({"workers": workers, "storage": storage, "log": {"directory": str(disk / "log")}})
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        more, *waiting = prepare_forwards(bob, "letter", LETTERS + 1)
        for letter in waiting:
            self.assertEqual(ask(daemon.port, "POST", "/didcomm", letter.body)[0], 202)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            fill(file)
            await all_say(daemon, "store full: only reading and deleting")
            self.assertIn('mediator_storage_fault{fault="full"} 1.0', metrics(daemon))
            self.assertIn("mediator_storage_up 0.0", metrics(daemon))
            # What was kept in reserve is taken as well, if it can be.
            fill(file)
            for letter in (more, prepare_sized_forward(bob, "large", 100_000)):
                status, retry_after, body = ask(daemon.port, "POST", "/didcomm", letter.body)
                self.assertEqual((status, json.loads(body)["body"]["code"]), (503, "e.p.me.res.storage"))
                self.assertIsNotNone(retry_after)
            self.assertEqual(await deleted(bob), [letter.marker for letter in waiting])
            for _ in range(LETTERS):
                fill(file)
                self.assertEqual((await bob.status()).message_count, 0)
        filler.unlink()
        await all_say(daemon, "")
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", more.body)[0], 202)
        self.assertIn("mediator_storage_up 1.0", metrics(daemon))
        self.assertEqual(await deleted(bob), [more.marker])
        await deferToThread(daemon.__exit__, None, None, None)


class BusyLogTests(TestCase):
    """A disk without any room, and a write-ahead log that another process reads when it has to begin anew."""

    async def test_reader(self) -> None:
        """What needs no room waits for the reader, and is done."""
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
            fill(file)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM message").fetchall()
            for _ in range(500):
                # Only a write that finds no room takes so long.
                timer = reactor.callLater(HELD_SECONDS, other.execute, "ROLLBACK")
                await store.mark_delivered(ids)
                await store.mark_pending(ids)
                if not timer.active():
                    break
                timer.cancel()
            else:
                self.fail("there was room for everything")
        self.assertEqual(len(await store.acknowledge("did:example:alice", ids)), len(ids))


class MongoQuotaTests(TestCase):
    """A daemon whose MongoDB server has less space left than is to be."""

    async def test_full(self) -> None:
        """`/health` and the metrics say so, and a sender gets 503; what waits is fetched and deleted."""
        database = fresh_database()
        uri = shared_replica_set().uri(database.__enter__())
        self.addCleanup(database.__exit__, None, None, None)
        daemon = prepare_daemon({"storage": {"backend": "mongodb", "mongodb": {"uri": uri}}})
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        waiting, more = prepare_forwards(bob, "letter", 2)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", waiting.body)[0], 202)
        await deferToThread(daemon.stop)
        settings = daemon.configuration()
        settings["storage"]["mongodb"]["min_free_bytes"] = 1 << 60
        daemon.config.write_text(yaml.safe_dump(settings), "utf-8")
        await deferToThread(daemon.start, 503)
        await all_say(daemon, "store full: only reading and deleting")
        self.assertIn('mediator_storage_fault{fault="full"} 1.0', metrics(daemon))
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", more.body)[0], 503)
        self.assertEqual(await deleted(bob), [waiting.marker])


class MissingFileTests(TestCase):
    """A database that is taken away from under a daemon."""

    async def test_renamed(self) -> None:
        """Nothing is accepted for a file that has another name, and everything is there once it has its own again."""
        daemon = prepare_daemon()
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        bob = await enrol_wallet(daemon, reactor)
        before, meanwhile, after = prepare_forwards(bob, "letter", 3)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", before.body)[0], 202)
        database = daemon.directory / "mediator.sqlite3"
        database.rename(aside := database.with_name("aside"))
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", meanwhile.body)[0], 503)
        await deferToThread(daemon.await_health, 503)
        self.assertIn("removed, renamed or replaced", health(daemon))
        self.assertIn('mediator_storage_fault{fault="missing"} 1.0', metrics(daemon))
        self.assertIn("mediator_storage_up 0.0", metrics(daemon))
        aside.rename(database)
        await deferToThread(daemon.await_health)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", after.body)[0], 202)
        self.assertLessEqual({before.marker, after.marker}, set(await deleted(bob)))
        self.assertIn("was removed, renamed or replaced", daemon.output())
