"""
Connections to the database: making them with their settings, statements on many rows, transactions of batches, and
locks between processes.

SQLite releases the interpreter's lock at every step of a statement, and gets it back when a busy reactor lets go of
it: reading one row at a time would take as long as the reactor has other things to do. So many rows are inserted by
one statement, and read as one row of JSON. Statements come in few wordings, because SQLite caches them.

An operation is a function of the connection without other effects, so that it can be run again, or a
:class:`BatchOperation`. Its outcome is its result, or the exception that its Deferred fails with. Before its first
write it may raise a :class:`~mediatord.errors.MediatorError`, which does not affect the others; to refuse and keep
what it wrote it returns an exception. Any other exception rolls the transaction back; then each operation gets a
transaction of its own, so that a bad one fails alone, with StoreUnavailable and that exception as its cause.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from random import uniform
from sqlite3 import Connection
from time import monotonic, sleep
from typing import Any, TypeVar

import orjson

from mediatord.errors import MediatorError, PayloadTooLarge, StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.interfaces.administration import QueueProtocol
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import LedgerEntry

T = TypeVar("T")

ROWS_PER_STATEMENT = 64
VALUES_PER_STATEMENT = 512
BYTES_PER_READ = 4_194_304

# Columns, and everything from `FROM` on.
_SELECT_JSON = "SELECT CAST(json_group_array(json_array({})) AS BLOB) {}"
# Begins a transaction that may write.
BEGIN_IMMEDIATE = "BEGIN IMMEDIATE"
LOCK_TIMEOUT_SECONDS = 2.5
# SQLite itself waits longer before every retry, so that newcomers would win against those that wait.
_LOCK_RETRY_SECONDS = (0.0003, 0.001)
_LOCK_ERRORS = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}

MAX_WAL_BYTES = 67_108_864
CHECKPOINT_BUSY_TIMEOUT_MS = 5
_CACHE_KIB = 32_768
_READER_CACHE_KIB = 8_192  # for each of the connections that do not write
_PRAGMAS = (
    "foreign_keys = ON",
    "synchronous = FULL",
    "wal_autocheckpoint = 0",  # a checkpoint inside a commit would stall it
    f"journal_size_limit = {MAX_WAL_BYTES}",
    f"cache_size = -{_CACHE_KIB}",
    "temp_store = MEMORY",
    "secure_delete = FAST",  # what is freed is written again only if it is written anyway
)


def connect(path: Path | None, *pragmas: str) -> StoreConnection:
    """
    A connection whose commits are on disk when they return, with explicit transactions.

    :param path: of the database; None for an empty one in memory.
    """
    connection = sqlite3.connect(
        "file::memory:" if path is None else f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=LOCK_TIMEOUT_SECONDS,
        check_same_thread=False,
        cached_statements=1_024,
        factory=StoreConnection,
    )
    for pragma in (*_PRAGMAS, *pragmas):
        connection.execute(f"PRAGMA {pragma}")
    connection.create_function("did_digest", 1, compute_did_digest, deterministic=True)
    return connection


def connect_reader(path: Path) -> StoreConnection:
    """A connection that cannot write."""
    return connect(path, f"cache_size = -{_READER_CACHE_KIB}", "query_only = ON")


def connect_checkpointer(path: Path) -> StoreConnection:
    """A connection that gives up on locks quickly, because nobody can write while it waits for a reader."""
    return connect(path, f"cache_size = -{_READER_CACHE_KIB}", f"busy_timeout = {CHECKPOINT_BUSY_TIMEOUT_MS}")


class BatchOperation:
    """An operation that is performed together with its neighbours in a batch."""

    __slots__ = ()

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[Any], /) -> list[Any]:
        """Perform consecutive operations with the same `run_batch`, one or more, in order; returns their outcomes."""
        raise NotImplementedError


def make_failure(error: BaseException | None) -> Exception:
    """The outcome of an operation that has raised an exception."""
    if isinstance(error, MediatorError):
        return error.with_traceback(None)
    failure = StoreUnavailable()
    failure.__cause__ = None if error is None else error.with_traceback(None)
    return failure


def get_cause(outcome: Any) -> BaseException | None:
    """The exception behind the outcome of an operation that could not be performed."""
    return outcome.__cause__ if isinstance(outcome, StoreUnavailable) else None


class StoreConnection(Connection):
    """
    A connection with the state of its batches: a cache that lasts from one to the next, and ledger entries, which are
    written once before each commit.

    In other transactions there is no cache, and ledger entries are written at once.

    :ivar ticket_lock: puts the transactions of several processes in order; None where there is one process.
    :ivar is_durable: whether commits wait for the disk.
    """

    ticket_lock: WriteTicketLock | None = None
    is_durable = True
    _cache: Any = None
    _ledger: dict[QueueProtocol, dict[LedgerEntry, int]] | None = None
    _data_version = 0
    _is_cache_valid = False

    def commit_batch(self, operations: Sequence[SQLOperation], patience: float = 0.0) -> list[Any]:
        """
        Perform operations durably, and return their outcomes.

        :param patience: seconds to wait while another process writes.
        """
        has_begun = False
        try:
            left = patience if self.ticket_lock is None else self.ticket_lock.enter(patience)
            if self.in_transaction:
                self._roll_back()  # the last roll-back has failed
            retry_while_locked(left, self.execute, BEGIN_IMMEDIATE)
            has_begun, self._is_cache_valid, self._ledger = True, False, {}
            outcomes = self.run_operations(operations)
            entries, self._ledger = self._ledger, None
            if entries:
                self._write_ledger(entries)
            self.execute("COMMIT")
            return outcomes
        except Exception as error:
            self._roll_back()
            self._ledger = self._cache = None
            # If it has not begun, none of them is to blame, and there is no point in trying them one by one.
            if len(operations) == 1 or not has_begun:
                return [make_failure(error) for _ in operations]
        finally:
            if self.ticket_lock is not None:
                self.ticket_lock.leave()
        outcomes = []
        for operation in operations:
            if outcomes and is_lock_error(cause := get_cause(outcomes[-1])):
                outcomes.append(make_failure(cause))  # each would wait as long for the lock
            else:
                outcomes += self.commit_batch([operation], patience)
        return outcomes

    def set_durable(self, durable: bool) -> None:
        """
        Let commits wait for the disk, or not: then they are on disk with the next that waits, and a crash of the
        operating system before may undo them.
        """
        self.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self.is_durable = durable

    def retry_on_full_disk(
        self, operations: Sequence[SQLOperation], outcomes: Sequence[Any], patience: float
    ) -> list[Any]:
        """Retry operations that found no space, with the log written from its start, so that it need not grow."""
        if not any([is_disk_full_error(get_cause(outcome)) for outcome in outcomes]):
            return list(outcomes)
        left = patience if self.ticket_lock is None else self.ticket_lock.enter(patience)
        try:
            # Waits for others that read or write.
            self.execute(f"PRAGMA busy_timeout = {round(left * 1000)}")
            with suppress(sqlite3.Error):
                self.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            self.execute("PRAGMA busy_timeout = 0")
        finally:
            if self.ticket_lock is not None:
                self.ticket_lock.leave()
        return [
            self.commit_batch([operation], patience)[0] if is_disk_full_error(get_cause(outcome)) else outcome
            for operation, outcome in zip(operations, outcomes, strict=True)
        ]

    def read_batch(self, operations: Sequence[Callable[[StoreConnection], Any]]) -> list[Any]:
        """Outcomes of operations on one snapshot of the database; one that fails does not affect the others."""
        try:
            if self.in_transaction:
                self._roll_back()  # the last roll-back has failed
            self.execute("BEGIN")
            outcomes = []
            for operation in operations:
                try:
                    outcomes.append(operation(self))
                except Exception as error:
                    outcomes.append(make_failure(error))
            return outcomes
        except sqlite3.Error as error:
            return [make_failure(error) for _ in operations]
        finally:
            self._roll_back()

    def run_operations(self, operations: Sequence[SQLOperation]) -> list[Any]:
        """
        Outcomes of operations that are performed in order in the open transaction, neighbours of a kind together.
        """
        outcomes: list[Any] = []
        start, number = 0, len(operations)
        while start < number:
            operation, end = operations[start], start + 1
            if isinstance(operation, BatchOperation):
                run_batch = operation.run_batch
                while end < number and getattr(operations[end], "run_batch", None) is run_batch:
                    end += 1
                outcomes += run_batch(self, operations[start:end])
            else:
                before = self.total_changes
                try:
                    outcomes.append(operation(self))
                except MediatorError as error:
                    if self.total_changes != before:
                        raise  # what it wrote must not be committed
                    outcomes.append(error.with_traceback(None))
            start = end
        return outcomes

    def _roll_back(self) -> None:
        if self.in_transaction:
            # If it fails it is tried again before the next BEGIN; a connection that stays like this is replaced.
            with suppress(sqlite3.Error):
                self.execute("ROLLBACK")

    def get_cache(self, make: Callable[[], T]) -> T:
        """
        The cache that a batch uses, made if there is none; `PRAGMA data_version` differs once another connection has
        committed.
        """
        if self._ledger is None:
            return make()
        if self._cache is None or not self._is_cache_valid:
            ((version,),) = self.execute("PRAGMA data_version").fetchall()
            if self._cache is None:
                self._cache = make()
            elif version != self._data_version:
                self._cache.clear()
            self._data_version, self._is_cache_valid = version, True
        cache: T = self._cache
        return cache

    def clear_cache(self) -> None:
        """Forget what is cached, because this transaction may change who has registered which DID."""
        if self._cache is not None:
            self._cache.clear()

    def add_ledger_entry(self, protocol: QueueProtocol, entry: LedgerEntry, number: int) -> None:
        """Count messages or pending events; called by the code that inserts or deletes them."""
        if number and self._ledger is None:
            self._write_ledger({protocol: {entry: number}})
        elif number and self._ledger is not None:
            entries = self._ledger.setdefault(protocol, {})
            entries[entry] = entries.get(entry, 0) + number

    def _write_ledger(self, changes: Mapping[QueueProtocol, Mapping[LedgerEntry, int]]) -> None:
        entries = tuple(dict.fromkeys(chain(*changes.values())))
        values: list[int | str] = []
        for protocol, numbers in changes.items():
            values.append(protocol)
            for entry in entries:
                values.append(numbers.get(entry, 0))
        self.execute(_format_ledger_update(len(changes), entries), values)

    def insert_rows(self, into: str, rows: Sequence[tuple[Any, ...]], then: str = "") -> int:
        """
        Insert rows, given the statement up to `VALUES` and what follows them; the number of rows that were changed.

        `INSERT OR ROLLBACK` spares SQLite from copying every page first, in case a row cannot be inserted.
        """
        changed = 0
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            some = rows[start : start + ROWS_PER_STATEMENT]
            statement = f"{into} VALUES {format_values(len(some), len(some[0]))} {then}"
            changed += self.execute(statement, list(chain.from_iterable(some))).rowcount
        return changed

    def insert_numbered_rows(self, into: str, rows: Sequence[tuple[Any, ...]]) -> range:
        """Insert rows into a table that numbers them; returns their numbers, which follow one another."""
        last: int | None = 0
        for some in split_chunks(rows, ROWS_PER_STATEMENT):
            statement = f"{into} VALUES {format_values(len(some), len(some[0]))}"
            last = self.execute(statement, list(chain.from_iterable(some))).lastrowid
        assert last is not None
        return range(last - len(rows) + 1, last + 1)

    def execute_in(self, statement: str, values: Sequence[Any], *others: Any) -> None:
        """Execute a statement with `{}` for the values of an `IN`, and other parameters before those."""
        for start in range(0, len(values), VALUES_PER_STATEMENT):
            marks, padded = _bind_in(values[start : start + VALUES_PER_STATEMENT])
            self.execute(statement.format(marks), (*others, *padded))

    def execute_values(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement with `{}` for the rows of a `VALUES`."""
        for some in split_chunks(rows, ROWS_PER_STATEMENT):
            self.execute(statement.format(format_values(len(some), len(some[0]))), list(chain.from_iterable(some)))

    def select_value(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """The first column of the first row of a query; None if there is no row."""
        row = self.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def select_rows(self, columns: str, source: str, parameters: Sequence[Any] = ()) -> list[list[Any]]:
        """
        Rows of a query, given its columns, which are integers and texts, and everything from `FROM` on.

        They come in the order of a subquery after `FROM`, if that has one.
        """
        ((text,),) = self.execute(_SELECT_JSON.format(columns, source), parameters).fetchall()
        rows: list[list[Any]] = orjson.loads(text)
        return rows

    def select_rows_in(self, columns: str, source: str, values: Sequence[Any], *others: Any) -> list[list[Any]]:
        """As :meth:`select_rows`, with `{}` for the distinct values of an `IN`, and other parameters before those."""
        rows: list[list[Any]] = []
        for start in range(0, len(values), VALUES_PER_STATEMENT):
            marks, padded = _bind_in(values[start : start + VALUES_PER_STATEMENT])
            query = _SELECT_JSON.format(columns, source.format(marks))
            ((text,),) = self.execute(query, (*others, *padded)).fetchall()
            rows += orjson.loads(text)
        return rows

    def select_matching_rows(
        self, columns: str, source: str, keys: Sequence[tuple[Any, ...]], *others: Any
    ) -> list[tuple[int, list[Any]]]:
        """
        Index of a key and row of each match, given the columns and everything from `FROM` on, with `{}` for a table
        of the keys, whose columns are `column1` for the index and those of the key from `column2` on.

        :param others: parameters behind the keys.
        """
        rows: list[tuple[int, list[Any]]] = []
        for start in range(0, len(keys), ROWS_PER_STATEMENT):
            some = keys[start : start + ROWS_PER_STATEMENT]
            table = f"(SELECT * FROM (VALUES {_format_numbered_values(len(some), len(some[0]))}))"
            found = self.select_rows(f"w.column1, {columns}", source.format(table), [*chain(*some), *others])
            rows += [(start + number, row) for number, *row in found]
        return rows

    def select_exact_in(self, query: str, values: Sequence[Any], *others: Any) -> list[tuple[Any, ...]]:
        """As :meth:`select_rows_in`, a row at a time, for a few rows with numbers that JSON would round."""
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(values), VALUES_PER_STATEMENT):
            marks, padded = _bind_in(values[start : start + VALUES_PER_STATEMENT])
            rows += self.execute(query.format(marks), (*others, *padded))
        return rows

    def read_texts(
        self, table: str, column: str, sizes: dict[int, int], largest: int = MAX_PAGE_BYTES
    ) -> dict[int, str]:
        """
        Long texts of rows, by the numbers of those, concatenated, which costs less than JSON.

        :param sizes: bytes of each.
        :param largest: bytes that all may have.
        :raise PayloadTooLarge: together they have more.
        """
        if sum(sizes.values()) > largest:
            raise PayloadTooLarge()
        joined_text = f"SELECT group_concat(seq), CAST(group_concat({column}, '') AS BLOB) FROM {table}"
        texts: dict[int, str] = {}
        for some in _split_by_size(sizes):
            marks, padded = _bind_in(some)
            ((seqs, joined),) = self.execute(f"{joined_text} WHERE seq IN ({marks})", padded).fetchall()
            start = 0
            for seq in map(int, seqs.split(",")):
                end = start + sizes[seq]
                texts[seq] = joined[start:end].decode()
                start = end
        return texts


SQLOperation = Callable[[StoreConnection], Any] | BatchOperation


@lru_cache(maxsize=256)
def _format_ledger_update(protocols: int, entries: Sequence[LedgerEntry]) -> str:
    rows = format_values(protocols, len(entries) + 1)
    changes = ", ".join(f"{entry} = {entry} + excluded.{entry}" for entry in entries)
    into = f"INSERT OR ROLLBACK INTO ledger (protocol, {', '.join(entries)})"
    return f"{into} VALUES {rows} ON CONFLICT DO UPDATE SET {changes}"


def split_chunks(items: Sequence[T], size: int) -> Sequence[Sequence[T]]:
    """Slices of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@lru_cache(maxsize=1024)
def format_placeholders(number: int) -> str:
    """Question marks for an `IN`."""
    return ",".join("?" * number)


@lru_cache(maxsize=1024)
def format_values(number: int, columns: int) -> str:
    """Rows of a `VALUES`."""
    return ",".join([f"({format_placeholders(columns)})"] * number)


@lru_cache(maxsize=1024)
def _format_numbered_values(number: int, columns: int) -> str:
    return ",".join(f"({row},{format_placeholders(columns)})" for row in range(number))


def hash_did(did: str) -> bytes:
    """Hash that stands for a DID in indexes; also of an invalid one, which no row has."""
    return blake2b(did.encode(errors="surrogatepass"), digest_size=16).digest()


def _bind_in(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """
    Placeholders and parameters for an `IN`, of which the last is repeated up to a power of two: in a set it counts
    once, and there are few different statements.
    """
    width = 1 << (len(values) - 1).bit_length()
    return format_placeholders(width), [*values, *[values[-1]] * (width - len(values))]


def _split_by_size(sizes: dict[int, int]) -> list[list[int]]:
    """Numbers of texts that are read together: within the limits, or a single one."""
    batches: list[list[int]] = []
    room = 0
    for number, size in sizes.items():
        if not batches or size > room or len(batches[-1]) == VALUES_PER_STATEMENT:
            batches.append([])
            room = BYTES_PER_READ
        batches[-1].append(number)
        room -= size
    return batches


def is_lock_error(error: BaseException | None) -> bool:
    """Whether another connection held the lock."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _LOCK_ERRORS


def is_disk_full_error(error: BaseException | None) -> bool:
    """Whether SQLite reports that the disk is full."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def retry_while_locked(patience: float, work: Callable[..., T], *args: Any) -> T:
    """
    Retry while another process holds the lock; blocks the thread.

    :raise sqlite3.Error: it is still held after `patience` seconds, or another error.
    """
    end = monotonic() + patience
    while True:
        try:
            return work(*args)
        except sqlite3.OperationalError as error:
            if not is_lock_error(error) or monotonic() >= end:
                raise
        sleep(uniform(*_LOCK_RETRY_SECONDS))  # nosec B311 # no secret


_TICKET_RETRY_SECONDS = (0.0003, 0.001)

# Bytes that are locked, which need not exist in the file: one for drawing a ticket, then one for each ticket.
_COUNTER_BYTE, _FIRST_TICKET_BYTE = 0, 1
_TICKET_STRUCT = struct.Struct("<Q")
# Share of its patience that a writer waits for earlier tickets. Then it competes for SQLite's lock, which guarantees
# exclusion in any case: an earlier ticket may be held by a process that was stopped.
_TICKET_WAIT_SHARE = 0.5


class WriteTicketLock:
    """
    Grants writes in the order of tickets, which are drawn from a file beside the database.

    SQLite's own lock is polled, so a process that has just ended a transaction gets it more easily than those that
    wait. A ticket is a locked byte of the file; the system unlocks those of a process that ends. Where the file
    cannot be used, there are no tickets.

    :param path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.writers")
        self._descriptor: int | None = None
        self._ticket: int | None = None
        # Earlier tickets were waited for in vain once, and are not waited for again; numbers are not reused.
        self._first = 0

    def enter(self, patience: float) -> float:
        """
        Wait for all earlier tickets.

        :param patience: seconds to wait at most.
        :return: seconds that are left of them.
        """
        now = monotonic()
        until = now + patience * _TICKET_WAIT_SHARE
        try:
            self._ticket = ticket = self._draw(until)
            while ticket is not None and not self._is_next(ticket):
                if monotonic() >= until:
                    self._first = ticket
                    break
                sleep(uniform(*_TICKET_RETRY_SECONDS))  # nosec B311 # no secret
        except OSError:
            self.leave()
        return max(0.0, patience - (monotonic() - now))

    def leave(self) -> None:
        """Give the ticket back."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _FIRST_TICKET_BYTE + ticket)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._first = None, 0

    def _draw(self, until: float) -> int | None:
        """The next ticket, whose byte is locked; None if there was none in time."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        file = self._descriptor
        while not _try_lock_bytes(file, fcntl.LOCK_EX, 1, _COUNTER_BYTE):
            if monotonic() >= until:
                return None
            sleep(_TICKET_RETRY_SECONDS[0])
        try:
            stored = os.pread(file, _TICKET_STRUCT.size, 0)
            ticket = (_TICKET_STRUCT.unpack(stored)[0] if len(stored) == _TICKET_STRUCT.size else 0) % (1 << 60)
            os.pwrite(file, _TICKET_STRUCT.pack(ticket + 1), 0)
            return ticket if _try_lock_bytes(file, fcntl.LOCK_EX, 1, _FIRST_TICKET_BYTE + ticket) else None
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _COUNTER_BYTE)

    def _is_next(self, ticket: int) -> bool:
        """Whether all earlier tickets that are waited for have been given back."""
        file, number = self._descriptor, ticket - self._first
        if file is None or number <= 0:
            return True
        if not _try_lock_bytes(file, fcntl.LOCK_SH, number, _FIRST_TICKET_BYTE + self._first):
            return False
        fcntl.lockf(file, fcntl.LOCK_UN, number, _FIRST_TICKET_BYTE + self._first)
        return True


def _try_lock_bytes(file: int, kind: int, length: int, start: int) -> bool:
    """Lock bytes, unless another process has locked one of them."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        return False
    return True
