"""Where messages wait: the backends behind :class:`~mediatord.interfaces.IStore`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import Caps
from mediatord.store.batches import Observer, unobserved
from mediatord.store.database import DatabaseRefused, prepare_database
from mediatord.store.memory import MemoryStore
from mediatord.store.sqlite import SQLiteStore
from mediatord.store.sqlite_file import Runners
from mediatord.store.threads import ThreadRunner

__all__ = ["check_store", "open_store"]


def open_store(
    backend: str,
    reactor: IReactorTime,
    limits: QueueLimits,
    *,
    caps: Caps = Caps(),  # noqa: B008  it is frozen
    path: Path | None = None,
    observe: Observer = unobserved,
) -> IStore:
    """
    A store of the chosen kind, yet to be opened.

    :param reactor: the clock; for `sqlite` it must also take calls from threads.
    :param caps: how much the Decentrl half keeps for whom.
    :param path: the file of the `sqlite` backend; its directory must exist.
    :param observe: told what each operation of the `sqlite` backend took.
    :raise ValueError: the backend is not available, or lacks what it needs; the text is for the operator.
    """
    if backend == "memory":
        return MemoryStore(reactor, limits, caps=caps)
    if backend == "sqlite":
        if path is None:
            raise ValueError("backend sqlite needs a path")
        threads = IReactorFromThreads(reactor)
        names = ("write", "read", "survey", "search")
        runners = Runners(*(ThreadRunner(threads, f"mediatord-store-{name}") for name in names))
        return SQLiteStore(path, reactor, limits, runners, caps=caps, observe=observe)
    if backend == "mongodb":
        raise ValueError("backend mongodb is not available in this version")
    raise ValueError(f"there is no backend {backend!r}; choose memory or sqlite")


def check_store(backend: str, path: Path) -> None:
    """
    Find out whether the store can be opened at all, before anything else is begun.

    :raise ValueError: the file cannot be made, is not ours, or of a newer version; the text is for the operator.
    """
    if backend != "sqlite":
        return
    try:
        prepare_database(path).close()
    except (DatabaseRefused, sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot use the database {path}: {reason}") from None
