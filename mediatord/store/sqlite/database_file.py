"""
The file of an SQLite database: locking it for one daemon, creating, opening and upgrading it, checking it before a
start, and measuring its tables.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from math import inf
from pathlib import Path
from threading import Timer
from time import monotonic

from mediatord.store.sqlite.connection import (
    BEGIN_IMMEDIATE,
    LOCK_TIMEOUT_SECONDS,
    StoreConnection,
    connect,
    retry_while_locked,
)
from mediatord.store.sqlite.coordination_queries import release_lost_deliveries


class StoreInUse(ValueError):
    """Another process uses the database; the text is for the operator."""


class DatabaseFileLock:
    """
    A lock on a file beside the database, which the system releases when this process ends, in any way.

    The file stays: deleting it could delete one that another process has locked meanwhile. Its content shows that
    there was a database.

    :param path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """
        Acquire the lock.

        :raise StoreInUse: another process has it.
        :raise ValueError: the file cannot be created; the text is for the operator.
        """
        with _explain_errors("use", self._path):
            self._descriptor = _open_lock_file(self._path)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.release()
                if isinstance(error, BlockingIOError):
                    raise StoreInUse(f"cannot use the database {self._path}: another daemon uses it") from None
                raise

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _get_lock_path(path: Path) -> Path:
    return path.resolve().with_name(f"{path.resolve().name}.lock")


def _open_lock_file(database: Path) -> int:
    path = _get_lock_path(database)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    if os.geteuid() == 0:
        # The next daemon may be started by the user that this one is about to become.
        folder = os.stat(path.parent)
        os.fchown(descriptor, folder.st_uid, folder.st_gid)
    return descriptor


@contextmanager
def _explain_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an error into ValueError with a line for the operator."""
    try:
        yield
    except (DatabaseUnusable, sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if _is_not_a_database(error):
            reason = f"{reason}; {_REPAIR_HINT}"
        elif isinstance(error, DatabaseDamaged) or is_damage_error(error):
            reason = f"it is damaged ({reason}); {_REPAIR_HINT}"
        raise ValueError(f"cannot {action} the database {path}: {reason}") from None


_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Missing pages, and errors of file systems that verify blocks.
_DAMAGE_EXTENDED = {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS, sqlite3.SQLITE_IOERR_DATA}


class DatabaseFileLost(Exception):
    """Transactions were committed to a file that has been removed or replaced."""


def is_damage_error(error: BaseException | None) -> bool:
    """Whether SQLite reports damage of the file."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF in _DAMAGE_CODES or code in _DAMAGE_EXTENDED)


# "mdrd": identifies databases of mediatord.
APPLICATION_ID = 0x6D647264

_SCHEMA_VERSION = 3
_NO_BUSY_TIMEOUT = "busy_timeout = 0"  # it is waited for in another way
# Rows of the store refer to numbers that were read in the same transaction, so the check is redundant.
NO_FOREIGN_KEYS = "foreign_keys = OFF"
_MIN_SQLITE_VERSION = (3, 38, 0)  # the first with JSON in every build; STRICT tables are one older


class DatabaseUnusable(Exception):
    """The database cannot be used; the text says why, in one line."""


def read_schema_steps() -> list[str]:
    """SQL scripts: the first creates the schema in an empty database, each further one upgrades it by one version."""
    names = ["schema.sql", *(f"upgrade-{version}.sql" for version in range(2, _SCHEMA_VERSION + 1))]
    return [files("mediatord.store.sqlite").joinpath(name).read_text("utf-8") for name in names]


def open_database(path: Path, now: float | None = inf, *, create: bool = True) -> StoreConnection:
    """
    Open a database for writing; deliveries by no node, or by one that is not live, become pending.

    :param now: nodes are live if their lease ends later; with None nothing is changed but the schema version.
    :param create: whether to create the file if it does not exist.
    :raise DatabaseUnusable: the file is of a newer version, or of another program, or does not exist.
    """
    if sqlite3.sqlite_version_info < _MIN_SQLITE_VERSION:
        expected = ".".join(map(str, _MIN_SQLITE_VERSION))
        raise DatabaseUnusable(f"SQLite {sqlite3.sqlite_version} is too old: expected {expected} or newer")
    if is_missing_or_empty(path):
        _check_no_orphaned_log(path)
        if not create:
            raise DatabaseUnusable("the file does not exist")
        _create_file(path)
    connection = connect(path, _NO_BUSY_TIMEOUT)
    try:
        migrate_schema(connection, read_schema_steps())  # first, so that what is not ours stays untouched
        retry_while_locked(LOCK_TIMEOUT_SECONDS, connection.execute, "PRAGMA journal_mode = WAL")
        if now is not None:
            retry_while_locked(LOCK_TIMEOUT_SECONDS, connection.execute, BEGIN_IMMEDIATE)
            release_lost_deliveries(connection, now)
            connection.execute("COMMIT")
            connection.execute(f"PRAGMA {NO_FOREIGN_KEYS}")
    except BaseException:
        connection.close()
        raise
    return connection


def reopen_database(path: Path) -> StoreConnection:
    """
    Open a database for writing that :func:`open_database` has opened in this process before; changes nothing in it.
    """
    return connect(path, _NO_BUSY_TIMEOUT, NO_FOREIGN_KEYS)


def migrate_schema(connection: sqlite3.Connection, steps: Sequence[str]) -> None:
    """
    Run the steps that are missing, in one transaction.

    :raise DatabaseUnusable: the schema is of a newer version, or the database is of another program.
    """
    if retry_while_locked(LOCK_TIMEOUT_SECONDS, _read_version, connection) == len(steps):
        return
    connection.execute(f"PRAGMA {NO_FOREIGN_KEYS}")  # a step may rebuild tables under their names
    retry_while_locked(LOCK_TIMEOUT_SECONDS, connection.execute, BEGIN_IMMEDIATE)
    try:
        # Read again under the lock: another process may have upgraded meanwhile.
        version = _read_version(connection)
        if version > len(steps):
            raise DatabaseUnusable(
                f"its schema version is {version}, but this release supports at most {len(steps)}; upgrade mediatord"
            )
        for step in steps[version:]:
            for statement in _split_statements(step):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        retry_while_locked(LOCK_TIMEOUT_SECONDS, connection.execute, "COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("PRAGMA foreign_keys = ON")


def is_missing_or_empty(path: Path) -> bool:
    """Whether the file does not exist, or is empty."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True


def _check_no_orphaned_log(path: Path) -> None:
    """
    Check that there is no write-ahead log without its database, which SQLite would delete.

    :raise DatabaseUnusable: there is.
    """
    log = path.with_name(f"{path.name}-wal")
    if log.exists():
        what = "is empty" if path.exists() else "does not exist"
        raise DatabaseUnusable(
            f"the file {what}, but its write-ahead log {log} exists; put the database back, or move {log} away "
            "and restore a backup"
        )


def _split_statements(script: str) -> Iterator[str]:
    """Split a script into statements, because `executescript` would commit first."""
    statement = ""
    for piece in script.split(";")[:-1]:
        statement += piece + ";"  # which may be one inside a string, a comment or a trigger
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _read_version(connection: sqlite3.Connection) -> int:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return 0
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise DatabaseUnusable("the file is a database of another program")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _create_file(path: Path) -> None:
    """
    Create an empty file that only its owner can read; SQLite gives the files beside it the same mode.

    Filling it is one transaction, so a crash in between leaves an empty database, which is filled the next time.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush to disk what files a directory has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Seconds that the check at a start may take. Damage that it does not reach is found when it is read.
STARTUP_CHECK_SECONDS = 5.0
_MAX_PROBLEMS = 100

_REPAIR_HINT = "restore a backup, or recover data as docs/how-to/back-up-and-restore.md describes"
_LOCK_FILE_TEXT = (
    b"A database was created here; without it the daemon does not start. See `mediatord store create --help`.\n"
)
_EVENT_LOG_PATTERN = "events*.jsonl*"


class DatabaseDamaged(DatabaseUnusable):
    """The content of the file is damaged."""


def check_store(backend: str, path: Path, logs: Path | None = None) -> None:
    """
    Check before the start whether the store can be opened, and create a database if there are no signs of an earlier
    one.

    :param logs: directory of the event log.
    :raise ValueError: the file cannot be created, is missing, damaged, of another program, or of a newer version; the
        text is for the operator.
    """
    if backend != "sqlite":
        return
    with _explain_errors("use", path):
        if loss := describe_database_loss(path, logs):
            raise DatabaseUnusable(loss)
        if not is_missing_or_empty(path):
            # Read-only, because the last connection that can write empties the write-ahead log.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                problems = check_structure(connection, STARTUP_CHECK_SECONDS)
            if problems:
                raise DatabaseDamaged(problems[0])
        open_database(path, None).close()
        _mark_used(path)


def describe_database_loss(path: Path, logs: Path | None) -> str:
    """Message for an operator whose database is missing although there are signs of it; empty otherwise."""
    if not (is_missing_or_empty(path) and path.parent.is_dir() and (sign := _find_sign_of_use(path, logs))):
        return ""
    return (
        f"the file {'is empty' if path.exists() else 'does not exist'}, but {sign}; put it back or restore a backup. "
        "If there was no database, as after a change of storage.backend, or if it is lost, create an empty one with "
        "`mediatord store create`"
    )


def create_database(path: Path) -> None:
    """
    Create an empty database, whatever signs of an earlier one there are.

    :raise ValueError: there is a database, or it cannot be created; the text is for the operator.
    """
    with _explain_errors("create", path):
        if not is_missing_or_empty(path):
            raise DatabaseUnusable("it already exists")
        open_database(path, None).close()
        _mark_used(path)


def check_structure(connection: sqlite3.Connection, seconds: float | None = None) -> list[str]:
    """
    Problems of the structure of the file.

    :param seconds: after which the check ends without a result.
    """
    return _run_check(connection, "quick_check", seconds)


def check_tables(connection: sqlite3.Connection) -> list[str]:
    """What is missing for a database of mediatord: its tables, which an intact file may lack."""
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not found:
        return ["it contains no tables; restore a backup, or move the file away and run `mediatord store create`"]
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        return ["it is a database of another program; check storage.sqlite.path"]
    steps = read_schema_steps()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(steps):
        return [f"its schema version is {version}, but this release supports at most {len(steps)}; upgrade mediatord"]
    if version < len(steps):
        return []  # the daemon upgrades it at its next start
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate_schema(fresh, steps)
        expected = {name for (name,) in fresh.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    missing = sorted(expected - found)
    return [f"it lacks the tables {', '.join(missing)}; restore a backup"] if missing else []


def check_integrity(connection: sqlite3.Connection) -> list[str]:
    """Problems of the structure, of indexes compared with tables, and of references between rows; takes long."""
    problems = _run_check(connection, "integrity_check", None)
    if not problems:
        missing = connection.execute("PRAGMA foreign_key_check").fetchmany(_MAX_PROBLEMS)
        problems = [f"row {row} of {table} refers to a missing row of {other}" for table, row, other, _ in missing]
    return problems


def _run_check(connection: sqlite3.Connection, check: str, seconds: float | None) -> list[str]:
    """:raise sqlite3.Error: the file cannot be read for another reason than damage."""
    # A check is a single step to SQLite, during which it calls no progress handler.
    timer = None if seconds is None else Timer(seconds, connection.interrupt)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        found = [text for (text,) in connection.execute(f"PRAGMA {check}({_MAX_PROBLEMS})")]
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            return []
        if is_damage_error(error) and not _is_not_a_database(error):
            return [str(error)]
        raise
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
    return [] if found == ["ok"] else [line for text in found for line in text.splitlines()]


def _is_not_a_database(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB


def _find_sign_of_use(path: Path, logs: Path | None) -> str:
    """A sign that there was a database; empty if there is none."""
    lock = _get_lock_path(path)
    with suppress(OSError):
        if lock.stat().st_size:
            return f"lock file {lock} shows that a database existed"
    if logs is not None and (
        next(logs.glob(_EVENT_LOG_PATTERN), None) or next(logs.glob(f"*/{_EVENT_LOG_PATTERN}"), None)
    ):
        return f"the event log in {logs} suggests that a database existed"
    return ""


def _mark_used(path: Path) -> None:
    """Record in the lock file that there is a database, if that is possible; there are other signs."""
    with suppress(OSError):
        descriptor = os.open(_get_lock_path(path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not os.fstat(descriptor).st_size:
                os.write(descriptor, _LOCK_FILE_TEXT)
        finally:
            os.close(descriptor)


# Seconds of one measurement: `dbstat` reads every page.
_MEASURE_SECONDS = 0.2
# Steps of SQLite's virtual machine between two checks of the time; a page takes about five.
_PROGRESS_STEPS = 1_000
# It took too long, or this SQLite was built without `dbstat`.
_EXPECTED_ERRORS = (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_ERROR)

_SELECT_TABLES = (
    "SELECT name, tbl_name FROM sqlite_schema WHERE rootpage UNION ALL SELECT 'sqlite_schema', 'sqlite_schema'"
)
# A row for each page, so that it can be interrupted between two of them.
_SELECT_SIZE = "SELECT sum(pgsize) FROM dbstat WHERE name = ?"


class TableSizeEstimator:
    """
    Sizes of tables: each call measures a few tables and indexes, and uses earlier measurements for the others.

    One that could not be measured in time is estimated from the remaining size of the database; if there are several,
    they are left out.

    :param monotonic_time: seconds by a monotonic clock.
    """

    def __init__(self, monotonic_time: Callable[[], float] = monotonic) -> None:
        self._time = monotonic_time
        self._known: dict[str, int] = {}
        self._slow: set[str] = set()
        self._next: list[str] = []

    def measure(self, connection: StoreConnection) -> dict[str, int]:
        """Bytes by table, with its indexes, and `free` for pages without content."""
        owners = dict(connection.execute(_SELECT_TABLES).fetchall())
        self._measure_some(connection, sorted(owners))
        page_size, pages, free_pages = (
            connection.select_value(f"PRAGMA {name}") for name in ("page_size", "page_count", "freelist_count")
        )
        sizes: dict[str, int] = {"free": free_pages * page_size}
        for name, owner in owners.items():
            if name in self._known:
                sizes[owner] = sizes.get(owner, 0) + self._known[name]
        missing = {owners[name] for name in owners if name not in self._known}
        if len(missing) == 1:
            rest = pages * page_size - sum(sizes.values())
            (owner,) = missing
            sizes[owner] = sizes.get(owner, 0) + max(0, rest)
            return sizes
        return {owner: size for owner, size in sizes.items() if owner not in missing}

    def _measure_some(self, connection: StoreConnection, names: list[str]) -> None:
        end = self._time() + _MEASURE_SECONDS
        # Tables that took too long come last, so that the others are measured.
        self._next = [name for name in self._next if name in names] or sorted(names, key=self._slow.__contains__)
        connection.set_progress_handler(lambda: self._time() > end, _PROGRESS_STEPS)
        try:
            while self._next and self._time() < end:
                name = self._next.pop(0)
                try:
                    self._known[name] = connection.select_value(_SELECT_SIZE, (name,)) or 0
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode not in _EXPECTED_ERRORS:
                        raise
                    self._slow.add(name)
        finally:
            connection.set_progress_handler(None, 0)
