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
from mediatord.store.message_operations import log_store_fault
from mediatord.store.sqlite.coordination_queries import release_lost_deliveries
from mediatord.store.sqlite.database_file import connect, disable_foreign_keys, migrate_schema, read_schema_steps
from mediatord.store.sqlite.group_commit import (
    BatchFunction,
    EarlyOutcomesCallback,
    OperationOutcome,
    SQLOperation,
    bind_arguments,
    commit_batch,
    get_single_value,
    read_batch,
)
from mediatord.store.sqlite.queue_accounting import StoreConnection
from mediatord.store.sqlite.sqlite_store import SQLiteStore


class InlineExecutor:
    """
    Runs each operation at once, in the calling thread.

    :param connect: opens the database, which is closed by the last close; by default an empty one in memory.
    """

    buffered = 0, 0
    trouble = ""

    def __init__(self, clock: IReactorTime, connect: Callable[[], StoreConnection] | None = None) -> None:
        self._clock = clock
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
        operation = bind_arguments(work, args) if callable(work) else work
        return self._perform(commit_batch, [operation]).addCallback(get_single_value)

    def write_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[OperationOutcome]]:
        return self._perform(commit_batch, [work for work, _ in works])

    def read(self, name: str, work: Callable[..., Any], *args: Any, size: int = 0) -> Deferred[Any]:
        return self._perform(read_batch, [bind_arguments(work, args)]).addCallback(get_single_value)

    def read_in_background(self, name: str, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        return self.read(name, work, *args)

    def search(self, name: str, work: Callable[[StoreConnection], Any]) -> Deferred[Any]:
        return self.read(name, work)

    def ping(self) -> Deferred[None]:
        return self.read("ping", lambda connection: None)

    def _perform(
        self, perform: BatchFunction, operations: Sequence[SQLOperation]
    ) -> Deferred[list[OperationOutcome]]:
        if self._connection is None:
            return fail(StoreUnavailable())
        outcomes = perform(self._connection, operations)
        for outcome in outcomes:
            if outcome.cause is not None:
                log_store_fault("store operation failed", outcome.cause)
        return succeed(outcomes)


def _create_in_memory() -> StoreConnection:
    connection = connect(None)
    _get_empty_database().backup(connection)
    disable_foreign_keys(connection)
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
