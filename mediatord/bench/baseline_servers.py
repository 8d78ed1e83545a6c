"""
Servers that the mediator is compared with, run as child processes by their first argument.

`empty`: an ordinary `twisted.web` Site that answers every POST with an empty 202. `commands PATH`: a Site that
verifies a Decentrl command, stores it durably with a group commit, and does nothing else. `slow-disk ARGUMENTS`:
mediatord with these arguments, on a disk whose sync takes 50 ms. `fcm CERTIFICATE`: a Site over TLS that accepts
everything, as Firebase Cloud Messaging and its token endpoint do. Site, JSON and signatures have their defaults.
"""

from __future__ import annotations

import json
import runpy
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from sqlite3 import Connection, Cursor
from threading import Thread
from time import sleep
from typing import Any

import click
import nacl.encoding
from nacl.signing import VerifyKey
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IReactorFromThreads
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.protocol.decentrl.did_decentrl import parse_did

_SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE event (
    id INTEGER PRIMARY KEY, recipient TEXT NOT NULL, sender TEXT NOT NULL, payload TEXT NOT NULL
) STRICT;
CREATE INDEX waiting ON event (recipient, id);
"""
_INSERT = "INSERT INTO event (recipient, sender, payload) VALUES (?, ?, ?)"
_SUCCESS = b'{"type":"SUCCESS"}'

_SYNC_SECONDS = 0.05
# Value of `PRAGMA synchronous` with which commits are durable.
_FULL = 2
# Number of syncs: a commit syncs the log if it is to be durable, a checkpoint the log and the database.
_SYNCS_PER_STATEMENT = {"COMMIT": 1, "PRAGMA wal_checkpoint(PASSIVE)": 2, "PRAGMA wal_checkpoint(TRUNCATE)": 2}

EventRow = tuple[str, str, str]


class _EmptyResource(Resource):
    isLeaf = True

    def render_POST(self, request: Request) -> bytes:
        request.setResponseCode(202)
        return b""


class _FCMResource(Resource):
    isLeaf = True

    def render_POST(self, request: Request) -> bytes:
        request.setHeader(b"Content-Type", b"application/json")
        return b'{"access_token":"token","expires_in":3600,"token_type":"Bearer","name":"projects/bench/messages/1"}'


class _CommandResource(Resource):
    isLeaf = True

    def __init__(self, writer: _GroupCommitWriter) -> None:
        super().__init__()
        self._writer = writer

    def render_POST(self, request: Request) -> int:
        assert request.content is not None
        command = json.loads(request.content.read())
        header, payload = command["header"], command["payload"]
        signed = json.dumps(
            {"header": header, "payload": payload}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        key = VerifyKey(parse_did(header["sender_did"]).signing_key)
        key.verify(signed.encode(), nacl.encoding.Base64Encoder.decode(command["signature"]))
        stored = self._writer.insert((header["recipient_did"], header["sender_did"], payload))
        stored.addCallback(lambda _: self._succeed(request))
        return NOT_DONE_YET

    def _succeed(self, request: Request) -> None:
        request.setHeader(b"Content-Type", b"application/json")
        request.setHeader(b"Content-Length", b"%d" % len(_SUCCESS))
        request.write(_SUCCESS)
        request.finish()


class _GroupCommitWriter:
    """Inserts rows on a thread of its own; rows that wait at the same time share a transaction."""

    def __init__(self, reactor: IReactorFromThreads, path: Path) -> None:
        self._reactor = reactor
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(_SCHEMA)
        self._queue: SimpleQueue[tuple[EventRow, Deferred[None]]] = SimpleQueue()
        Thread(target=self._work, args=[path], daemon=True).start()

    def insert(self, row: EventRow) -> Deferred[None]:
        """Fires once the row is on disk."""
        done: Deferred[None] = Deferred()
        self._queue.put((row, done))
        return done

    def _work(self, path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            while True:
                rows, deferreds = zip(*self._take_batch(), strict=True)
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_INSERT, rows)
                connection.execute("COMMIT")
                self._reactor.callFromThread(_fire_all, deferreds)

    def _take_batch(self) -> list[tuple[EventRow, Deferred[None]]]:
        batch = [self._queue.get()]
        while True:
            try:
                batch.append(self._queue.get_nowait())
            except Empty:
                return batch


def _fire_all(deferreds: tuple[Deferred[None], ...]) -> None:
    for deferred in deferreds:
        deferred.callback(None)


async def serve(reactor: Any, path: str | None = None) -> None:
    """
    Serve on a free port, print it, and run until the process is terminated.

    :param path: of the database for commands; None answers with empty responses.
    """
    resource = _EmptyResource() if path is None else _CommandResource(_GroupCommitWriter(reactor, Path(path)))
    await _serve_at(reactor, "tcp:0:interface=127.0.0.1", resource)


async def serve_fcm(reactor: Any, certificate: str) -> None:
    """As :func:`serve`, for FCM. :param certificate: PEM file with its key."""
    await _serve_at(
        reactor, f"ssl:0:interface=127.0.0.1:privateKey={certificate}:certKey={certificate}", _FCMResource()
    )


async def _serve_at(reactor: Any, endpoint: str, resource: Resource) -> None:
    port = await serverFromString(reactor, endpoint).listen(Site(resource))
    click.echo(port.getHost().port)
    await Deferred()


def run_on_slow_disk(arguments: list[str]) -> None:
    """Run mediatord with these arguments; SQLite's threads wait longer wherever they have waited for the disk."""
    connect = sqlite3.connect

    def connect_slowly(*positional: Any, factory: type[Connection] = Connection, **options: Any) -> Connection:
        class SlowSyncConnection(factory):  # type: ignore[valid-type, misc]
            def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
                cursor: Cursor = super().execute(sql, parameters)
                syncs = _SYNCS_PER_STATEMENT.get(sql)
                if syncs and (sql != "COMMIT" or super().execute("PRAGMA synchronous").fetchone() == (_FULL,)):
                    sleep(syncs * _SYNC_SECONDS)
                return cursor

        return connect(*positional, factory=SlowSyncConnection, **options)

    sys.argv[1:] = arguments
    vars(sqlite3)["connect"] = connect_slowly
    runpy.run_module("mediatord", run_name="__main__")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["empty"]:
            task.react(serve)
        case ["commands", path]:
            task.react(serve, [path])
        case ["fcm", certificate]:
            task.react(serve_fcm, [certificate])
        case ["slow-disk", *arguments]:
            run_on_slow_disk(arguments)
