"""Where messages wait: the backends behind :class:`~mediatord.interfaces.IStore`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from mediatord.interfaces import IStore, QueueLimits, Removed
from mediatord.interfaces.decentrl import Caps
from mediatord.interfaces.store import Fault
from mediatord.store.batches import Observer, unobserved
from mediatord.store.database_check import check_store
from mediatord.store.disk_space import SpaceLimits
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
    shared: bool = False,
    create: bool = True,
    space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
    uri: str = "",
    observe: Observer = unobserved,
    on_up: Callable[[bool], None] = lambda up: None,
    on_fault: Callable[[Fault, bool], None] = lambda fault, present: None,
    tell: Callable[[Sequence[Removed]], None] = lambda removed: None,
    tell_events: Callable[[Sequence[Removed]], None] = lambda removed: None,
) -> IStore:
    """
    A store of the chosen kind, yet to be opened.

    :param reactor: the clock; for `sqlite` it must also take calls from threads.
    :param caps: how much the Decentrl half keeps for whom.
    :param path: the file of the `sqlite` backend; its directory must exist.
    :param shared: whether other processes work on the same file.
    :param create: whether to make that file if it is not there.
    :param space_limits: how much space `sqlite` and `mongodb` may take.
    :param uri: of the `mongodb` backend.
    :param observe: told what each operation took; not by `memory`, which takes no time.
    :param on_up: told by `mongodb` whether it can be reached, when that changes.
    :param on_fault: told by `sqlite` and `mongodb` of a fault when it begins and ends.
    :param tell: told by `mongodb` of messages that were removed by what had failed for all that was known.
    :param tell_events: told the same of events of the Decentrl half.
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
        return SQLiteStore(
            path,
            reactor,
            limits,
            runners,
            caps=caps,
            shared=shared,
            create=create,
            space_limits=space_limits,
            observe=observe,
            on_fault=on_fault,
        )
    if backend == "mongodb":
        return _open_mongodb(uri, reactor, limits, caps, space_limits, observe, on_up, on_fault, tell, tell_events)
    raise ValueError(f"there is no backend {backend!r}; choose memory, sqlite or mongodb")


def _open_mongodb(
    uri: str,
    reactor: IReactorTime,
    limits: QueueLimits,
    caps: Caps,
    space_limits: SpaceLimits,
    observe: Observer,
    on_up: Callable[[bool], None],
    on_fault: Callable[[Fault, bool], None],
    tell: Callable[[Sequence[Removed]], None],
    tell_events: Callable[[Sequence[Removed]], None],
) -> IStore:
    try:
        from mediatord.store.mongo.server import Server
        from mediatord.store.mongo.store import MongoStore
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise ValueError('storage.backend mongodb needs pip install "mediatord[mongodb]"') from None
    from mediatord.store.mongo.uri import read_uri

    try:
        address = read_uri(uri)
    except ValueError as error:
        raise ValueError(f"storage.mongodb.uri: {error}") from None
    server = Server(address, reactor, observe=observe, on_up=on_up)
    return MongoStore(
        server,
        reactor,
        limits,
        caps=caps,
        space_limits=space_limits,
        on_fault=on_fault,
        tell=tell,
        tell_events=tell_events,
    )
