"""
The floor of HTTP: an ordinary `twisted.web` Site that reads a POST and answers an empty 202, as a process of its own.

Everything is at its default, as a server written in an hour would have it.

The floor of a command: an ordinary `twisted.web` Site that verifies it, stores it, and only then answers, as a
process of its own.

It does what nobody can do without and nothing else: no checks of shape or time, no nonces, contracts or limits. Site,
JSON and signatures are at their defaults, as a server written in a day would have them; requests that wait for the
disk at the same time share a commit, and what they wait for is as durable as the daemon's.

The daemon on a disk whose sync takes 50 ms: ``python -m mediatord.bench.baseline_servers slow-disk run --config ...``.

All is as in `mediatord`, but wherever SQLite has waited for the disk, the same thread waits for longer.
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

import nacl.encoding
from nacl.signing import VerifyKey
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IReactorFromThreads
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.protocol.decentrl.did_decentrl import parse_did


class _EmptyResource(Resource):
    isLeaf = True

    def render_POST(self, request: Request) -> bytes:
        request.setResponseCode(202)
        return b""


async def serve_empty_responses(reactor: Any) -> None:
    port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(Site(_EmptyResource()))
    sys.stdout.write(f"{port.getHost().port}\n")
    sys.stdout.flush()
    # Until the benchmark ends the process.
    await Deferred()


_SCHEMA = """
CREATE TABLE event (
    id INTEGER PRIMARY KEY, recipient TEXT NOT NULL, sender TEXT NOT NULL, payload TEXT NOT NULL
) STRICT;
CREATE INDEX waiting ON event (recipient, id);
"""
_INSERT = "INSERT INTO event (recipient, sender, payload) VALUES (?, ?, ?)"
_SUCCESS = b'{"type":"SUCCESS"}'

EventRow = tuple[str, str, str]


class _GroupCommitWriter:
    """Inserts rows in a thread of its own; all that wait are committed together."""

    def __init__(self, reactor: IReactorFromThreads, path: Path) -> None:
        self._reactor = reactor
        self._path = path
        self._waiting: SimpleQueue[tuple[EventRow, Deferred[None]]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def insert(self, row: EventRow) -> Deferred[None]:
        """Fires when it is durable."""
        done: Deferred[None] = Deferred()
        self._waiting.put((row, done))
        return done

    def _run(self) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            while True:
                rows, waiting = zip(*self._take(), strict=True)
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_INSERT, rows)
                connection.execute("COMMIT")
                self._reactor.callFromThread(_fire_all, waiting)

    def _take(self) -> list[tuple[EventRow, Deferred[None]]]:
        taken = [self._waiting.get()]
        while True:
            try:
                taken.append(self._waiting.get_nowait())
            except Empty:
                return taken


def _fire_all(waiting: tuple[Deferred[None], ...]) -> None:
    for done in waiting:
        done.callback(None)


class _CommandResource(Resource):
    isLeaf = True

    def __init__(self, rows: _GroupCommitWriter) -> None:
        super().__init__()
        self._rows = rows

    def render_POST(self, request: Request) -> int:
        assert request.content is not None
        command = json.loads(request.content.read())
        header, payload = command["header"], command["payload"]
        signed = json.dumps(
            {"header": header, "payload": payload}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        key = VerifyKey(parse_did(header["sender_did"]).signing_key)
        key.verify(signed.encode(), nacl.encoding.Base64Encoder.decode(command["signature"]))
        stored = self._rows.insert((header["recipient_did"], header["sender_did"], payload))
        stored.addCallback(lambda _: self._succeed(request))
        return NOT_DONE_YET

    def _succeed(self, request: Request) -> None:
        request.setHeader(b"Content-Type", b"application/json")
        request.setHeader(b"Content-Length", b"%d" % len(_SUCCESS))
        request.write(_SUCCESS)
        request.finish()


async def serve_commands(reactor: Any, path: str) -> None:
    rows = _GroupCommitWriter(reactor, Path(path))
    port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(Site(_CommandResource(rows)))
    sys.stdout.write(f"{port.getHost().port}\n")
    sys.stdout.flush()
    # Until the benchmark ends the process.
    await Deferred()


SYNC_SECONDS = 0.05

# How often each waits for the disk: a commit for the log, a checkpoint for the log and for the database.
_SYNCS_PER_STATEMENT = {"COMMIT": 1, "PRAGMA wal_checkpoint(PASSIVE)": 2, "PRAGMA wal_checkpoint(TRUNCATE)": 2}

_sqlite_connect = sqlite3.connect


def make_slow_class(factory: type[Connection]) -> type[Connection]:
    """Connections of a kind, to a database on such a disk."""

    class SlowConnection(factory):  # type: ignore[valid-type, misc]  # of whatever kind the store's are
        def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
            cursor: Cursor = super().execute(sql, parameters)
            syncs = _SYNCS_PER_STATEMENT.get(sql)
            if syncs is not None:
                sleep(syncs * SYNC_SECONDS)
            return cursor

    return SlowConnection


def connect_slowly(*arguments: Any, factory: type[Connection] = Connection, **options: Any) -> Connection:
    """As :func:`sqlite3.connect`."""
    return _sqlite_connect(*arguments, factory=make_slow_class(factory), **options)


def _run_on_slow_disk(arguments: list[str]) -> None:
    """Run the command line `arguments` of `mediatord` with slow synchronisation."""
    sys.argv[1:] = arguments
    vars(sqlite3)["connect"] = connect_slowly
    runpy.run_module("mediatord", run_name="__main__")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["empty"]:
            task.react(serve_empty_responses)
        case ["commands", path]:
            task.react(serve_commands, [path])
        case ["slow-disk", *arguments]:
            _run_on_slow_disk(arguments)
