"""Nodes on MongoDB for the benchmark: databases of their own, and what is in them."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mediatord.bench.plan import DAEMON_SETTINGS
from mediatord.wallet.throwaway import Daemon, free_port, throw_away_daemon

_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class Database:
    """
    One that is dropped afterwards.

    :param uri: with the name of the database as its path.
    :param handle: pymongo's.
    """

    uri: str
    handle: Any

    def messages(self) -> int:
        """How many wait in all queues."""
        return int(self.handle.messages.count_documents({}))

    def round_trips(self) -> list[float]:
        """Milliseconds that each of many small reads takes."""
        took = []
        for _ in range(_LOOKS):
            begun = perf_counter()
            self.handle.schema.find_one({})
            took.append((perf_counter() - begun) * 1000)
        return took


@contextmanager
def database(uri: str) -> Iterator[Database]:
    """
    A new database on the server that `uri` names.

    :raise RuntimeError: pymongo is missing.
    """
    try:
        from pymongo import MongoClient
    except ImportError:
        raise RuntimeError('MongoDB needs pip install "mediatord[mongodb]"') from None
    name = f"mediatord_bench_{secrets.token_hex(6)}"
    client: Any = MongoClient(uri)
    try:
        yield Database(urlunsplit(urlsplit(uri)._replace(path=f"/{name}")), client[name])
    finally:
        client.drop_database(name)
        client.close()


@contextmanager
def on_mongodb(uri: str, settings: Mapping[str, str] | None = None) -> Iterator[tuple[Daemon, Database]]:
    """A single node."""
    with database(uri) as place:
        with throw_away_daemon({**_settings(place), **(settings or {})}) as daemon:
            yield daemon, place


@contextmanager
def cluster_of(count: int, uri: str) -> Iterator[tuple[list[Daemon], Database]]:
    """Nodes of one cluster; the public URL of all is that of the first."""
    with ExitStack() as stack:
        place = stack.enter_context(database(uri))
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mediatord-bench-"))) / "secret"
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        daemons: list[Daemon] = []
        for number in range(count):
            settings = {
                **_settings(place),
                "MEDIATORD_NODE": f"node-{number}",
                "MEDIATORD_CLUSTER__LISTEN": f"tcp:{free_port()}:interface=127.0.0.1",
                "MEDIATORD_CLUSTER__SECRET_FILE": str(secret),
            }
            beside = daemons[0] if daemons else None
            daemons.append(stack.enter_context(throw_away_daemon(settings, beside=beside)))
        yield daemons, place


def _settings(place: Database) -> dict[str, str]:
    return {
        **DAEMON_SETTINGS,
        "MEDIATORD_STORAGE__BACKEND": "mongodb",
        "MEDIATORD_STORAGE__MONGODB__URI": place.uri,
    }
