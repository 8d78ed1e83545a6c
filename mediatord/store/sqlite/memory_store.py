"""The store of one process, in an SQLite database in memory, which is empty again when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import log_store_fault
from mediatord.store.sqlite.connection import SQLOperation, StoreConnection, connect, get_cause
from mediatord.store.sqlite.coordination_queries import release_lost_deliveries
from mediatord.store.sqlite.database_file import NO_FOREIGN_KEYS, migrate_schema, read_schema_steps
from mediatord.store.sqlite.executor import EarlyOutcomesCallback, SliceSize, get_single_result
from mediatord.store.sqlite.sqlite_store import SQLiteStore


class InlineExecutor:
    """
    Runs each operation at once, in the calling thread.

    :param connect: opens the database, which is closed by the last close; by default an empty one in memory.
    :param patience: seconds to wait while another process writes.
    """

    buffered = 0, 0
    fault_description = ""

    def __init__(
        self, clock: IReactorTime, connect: Callable[[], StoreConnection] | None = None, patience: float = 0.0
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._connect = connect or _create_in_memory
        self._openings = 0
        self._connection: StoreConnection | None = None

    @property
    def is_readable(self) -> bool:
        return self._connection is not None

    def open(self) -> Deferred[None]:
        self._openings += 1
        if self._connection is None:
            self._connection = self._connect()
        return self.write("open", release_lost_deliveries, self._clock.seconds())

    def close(self) -> Deferred[None]:
        self._openings = max(self._openings - 1, 0)
        if self._connection is not None and not self._openings:
            self._connection.close()
            self._connection = None
        return succeed(None)

    def write(
        self, name: str, work: SQLOperation | Callable[..., Any], *args: Any, size: int = 0, shrinking: bool = False
    ) -> Deferred[Any]:
        operation = (lambda connection: work(connection, *args)) if callable(work) else work
        return self.write_each(name, [(operation, size)]).addCallback(get_single_result)

    def write_slice(self, name: str, size: SliceSize, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        return self.write(name, lambda connection: size.perform(work, connection, *args))

    def write_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[Any]]:
        return self._perform(self._commit, [work for work, _ in works])

    def read(self, name: str, work: Callable[..., Any], *args: Any, size: int = 0) -> Deferred[Any]:
        done = self._perform(StoreConnection.read_batch, [lambda connection: work(connection, *args)])
        return done.addCallback(get_single_result)

    read_in_background = search = read

    def ping(self) -> Deferred[None]:
        return self.read("ping", lambda connection: None)

    def _commit(self, connection: StoreConnection, operations: Sequence[SQLOperation]) -> list[Any]:
        outcomes = connection.commit_batch(operations, self._patience)
        if StoreUnavailable in map(type, outcomes):
            outcomes = connection.retry_on_full_disk(operations, outcomes, self._patience)
        return outcomes

    def _perform(self, perform: Callable[..., list[Any]], operations: Sequence[SQLOperation]) -> Deferred[list[Any]]:
        if self._connection is None:
            return fail(StoreUnavailable())
        outcomes = perform(self._connection, operations)
        for cause in map(get_cause, outcomes):
            if cause is not None:
                log_store_fault("store operation failed", cause)
        return succeed(outcomes)


def _create_in_memory() -> StoreConnection:
    connection = connect(None, NO_FOREIGN_KEYS)
    _get_empty_database().backup(connection)
    return connection


@cache
def _get_empty_database() -> StoreConnection:
    connection = connect(None)
    migrate_schema(connection, read_schema_steps())
    return connection


class MemoryStore(SQLiteStore):
    """
    A store in memory. Every Deferred has fired when it is returned.

    Several daemons of one process may open it, each as if it had a process of its own; it is emptied when the last of
    them has closed it.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        max_nonces: int = 250_000,
    ) -> None:
        super().__init__(InlineExecutor(clock), clock, limits, caps=caps, shared=True, max_nonces=max_nonces)

    def table_sizes(self) -> Deferred[dict[str, int]]:
        """Sizes are not measured."""
        return self.ping().addCallback(lambda _: {})
