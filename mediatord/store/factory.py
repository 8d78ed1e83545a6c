"""Construction of the storage backend that is configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from mediatord.store.disk_space import SpaceLimits
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import IStore, OperationObserver, StoreFault, ignore_observation
from mediatord.store.sqlite.executor import SQLiteExecutor, ThreadRunner
from mediatord.store.sqlite.memory_store import MemoryStore
from mediatord.store.sqlite.sqlite_store import SQLiteStore


def build_store(
    backend: str,
    reactor: IReactorTime,
    limits: QueueLimits,
    *,
    caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
    path: Path | None = None,
    shared: bool = False,
    create: bool = True,
    space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
    uri: str = "",
    observe: OperationObserver = ignore_observation,
    on_up: Callable[[bool], None] = lambda up: None,
    on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
    tell: Callable[[Sequence[RemovedMessage]], None] = lambda removed: None,
    tell_events: Callable[[Sequence[RemovedMessage]], None] = lambda removed: None,
) -> IStore:
    """
    A store of the chosen backend, not yet open.

    :param reactor: the clock; for `sqlite` it must also accept calls from threads.
    :param caps: Decentrl quotas.
    :param path: the file of the `sqlite` backend; its directory must exist.
    :param shared: whether other processes use the same file.
    :param create: whether to create that file if it does not exist.
    :param space_limits: of `sqlite` and `mongodb`.
    :param uri: of the `mongodb` backend.
    :param observe: called with the duration of each operation, except by `memory`.
    :param on_up: called by `mongodb` with whether it can be reached, when that changes.
    :param on_fault: called by `sqlite` and `mongodb` with each fault when it begins and ends.
    :param tell: called by `mongodb` with messages that were removed by an operation that had failed with an unknown
        outcome.
    :param tell_events: the same for pending Decentrl events.
    :raise ValueError: the backend is not available, or lacks a setting; the text is for the operator.
    """
    if backend == "memory":
        return MemoryStore(reactor, limits, caps=caps)
    if backend == "sqlite":
        if path is None:
            raise ValueError("storage.backend sqlite requires storage.sqlite.path")
        threads = IReactorFromThreads(reactor)
        executor = SQLiteExecutor(
            path,
            reactor,
            lambda name: ThreadRunner(threads, f"mediatord-store-{name}"),
            observe,
            shared=shared,
            create=create,
            space_limits=space_limits,
            on_fault=on_fault,
        )
        return SQLiteStore(executor, reactor, limits, caps=caps, shared=shared)
    if backend != "mongodb":
        raise ValueError(f"unknown storage.backend {backend!r}: expected memory, sqlite or mongodb")
    try:
        from mediatord.store.mongo.driver.client import ReplicaSetClient
        from mediatord.store.mongo.driver.uri import parse_mongo_uri
        from mediatord.store.mongo.store import MongoStore
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise ValueError(
            'storage.backend mongodb requires PyMongo and txmongo; run: pip install "mediatord[mongodb]"'
        ) from None
    try:
        address = parse_mongo_uri(uri)
    except ValueError as error:
        raise ValueError(f"storage.mongodb.uri: {error}") from None
    server = ReplicaSetClient(address, reactor, observe=observe, on_up=on_up)
    return MongoStore(
        server,
        reactor,
        limits,
        caps=caps,
        space_limits=space_limits,
        on_fault=on_fault,
        on_late_removals=tell,
        on_late_acknowledgements=tell_events,
    )
