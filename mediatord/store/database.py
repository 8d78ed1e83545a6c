"""The database file: creating it, opening it, bringing its schema up to date."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from importlib.resources import files
from math import inf
from pathlib import Path

from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.known_queues import StoreConnection
from mediatord.store.locking import PATIENCE_SECONDS, begin, patiently
from mediatord.store.sql_cluster import release_lost
from mediatord.store.sql_rows import key_of

# "mdrd": what tells our file from any other SQLite database.
APPLICATION_ID = 0x6D647264

WAL_CAP_BYTES = 67_108_864
CHECKPOINT_PATIENCE_MS = 5
_VERSION = 6
_CACHE_KIB = 32_768
_READING_CACHE_KIB = 8_192  # for each of the connections that do not write
_OLDEST_SQLITE = (3, 38, 0)  # the first with JSON in every build; STRICT tables are one older


class DatabaseRefused(Exception):
    """The file is not one to work with; the text says why, in one line."""


def schema_steps() -> list[str]:
    """The SQL that leads from each version of the schema to the next, beginning at an empty database."""
    folder = files("mediatord.store")
    return [folder.joinpath(f"schema-{version}.sql").read_text("utf-8") for version in range(1, _VERSION + 1)]


def open_database(path: Path, now: float = inf, *, create: bool = True) -> StoreConnection:
    """
    Open for writing; what was delivered by no node or one that is not live is
    pending again.

    :param now: nodes are live if their lease is not over then.
    :param create: whether to make the file if it is not there.
    :raise DatabaseRefused: the file is of a newer version, or of another program, or it is not there.
    """
    connection = prepare_database(path, create=create)
    try:
        begin(connection, PATIENCE_SECONDS)
        release_lost(connection, now)
        connection.execute("COMMIT")
        _relax(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def reopen_database(path: Path) -> StoreConnection:
    """Open for writing what :func:`open_database` has opened in this process before, and change nothing in it."""
    connection = connect(path)
    try:
        connection.execute("PRAGMA busy_timeout = 0")
        _relax(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _relax(connection: sqlite3.Connection) -> None:
    # Rows refer to others by numbers that were read in the same transaction: it was found out already.
    connection.execute("PRAGMA foreign_keys = OFF")


def prepare_database(path: Path, *, create: bool = True) -> StoreConnection:
    """
    Open for writing, and change nothing in it but its version.

    :param create: as for :func:`open_database`.
    :raise DatabaseRefused: as :func:`open_database`.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise DatabaseRefused(f"SQLite {sqlite3.sqlite_version} is too old for it")
    if is_empty(path):
        _refuse_to_lose_log(path)
        if not create:
            raise DatabaseRefused("it is gone")
        _create(path)
    connection = connect(path)
    try:
        connection.execute("PRAGMA busy_timeout = 0")  # it is waited for in another way
        migrate(connection, schema_steps())  # before anything else, so that what is not ours stays untouched
        patiently(lambda: connection.execute("PRAGMA journal_mode = WAL"), PATIENCE_SECONDS)
    except BaseException:
        connection.close()
        raise
    return connection


def connect(path: Path) -> StoreConnection:
    """A connection in which every commit is on disk when it returns, and transactions are begun by hand."""
    connection: StoreConnection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=PATIENCE_SECONDS,
        check_same_thread=False,
        cached_statements=1_024,
        factory=StoreConnection,
    )
    for pragma in (
        "foreign_keys = ON",
        "synchronous = FULL",
        "wal_autocheckpoint = 0",  # a checkpoint inside a commit would stall it
        f"journal_size_limit = {WAL_CAP_BYTES}",
        f"cache_size = -{_CACHE_KIB}",
        "temp_store = MEMORY",
        "secure_delete = FAST",  # what is freed is written again only if it is written anyway
    ):
        connection.execute(f"PRAGMA {pragma}")
    _add_functions(connection)
    return connection


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = connect(path)
    connection.execute(f"PRAGMA cache_size = -{_READING_CACHE_KIB}")
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect_for_checkpoints(path: Path) -> sqlite3.Connection:
    """A connection that gives up quickly, because while it waits for a reader to end nobody can write."""
    connection = connect(path)
    connection.execute(f"PRAGMA cache_size = -{_READING_CACHE_KIB}")
    connection.execute(f"PRAGMA busy_timeout = {CHECKPOINT_PATIENCE_MS}")
    return connection


def migrate(connection: sqlite3.Connection, steps: Sequence[str]) -> None:
    """
    Run the steps that are missing, all in one transaction.

    :raise DatabaseRefused: the database has more steps behind it than there are, or is not ours.
    """
    if patiently(lambda: _version(connection), PATIENCE_SECONDS) == len(steps):
        return
    _add_functions(connection)
    connection.execute("PRAGMA foreign_keys = OFF")  # tables are made anew, under their names
    begin(connection, PATIENCE_SECONDS)
    try:
        # Asked again under the lock: another process may have been faster.
        version = _version(connection)
        if version > len(steps):
            raise DatabaseRefused(f"its schema is version {version}, this mediatord knows {len(steps)} at most")
        for step in steps[version:]:
            for statement in _statements(step):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        patiently(lambda: connection.execute("COMMIT"), PATIENCE_SECONDS)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("PRAGMA foreign_keys = ON")


def is_empty(path: Path) -> bool:
    """Whether there is no database, or a file without content."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True


def _refuse_to_lose_log(path: Path) -> None:
    """:raise DatabaseRefused: there is the write-ahead log of a database, which SQLite would delete."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists():
        what = "empty" if path.exists() else "gone"
        raise DatabaseRefused(
            f"it is {what}, but its write-ahead log {log} is there; put the database back, or restore a backup "
            f"after moving {log} away"
        )


def _add_functions(connection: sqlite3.Connection) -> None:
    """What SQL is to know of DIDs."""
    for name, function in (("canonical_did", canonical_did), ("did_digest", did_digest), ("account_key", key_of)):
        connection.create_function(name, 1, function, deterministic=True)


def _statements(script: str) -> Iterator[str]:
    """Split a script, because `executescript` would commit before it begins."""
    statement = ""
    for piece in script.split(";")[:-1]:
        statement += piece + ";"  # which may be one inside a string, a comment or a trigger
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _version(connection: sqlite3.Connection) -> int:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return 0
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise DatabaseRefused("it is a database of another program")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _create(path: Path) -> None:
    """
    Make an empty file that only its owner can read, which SQLite carries over to the files it puts beside it.

    Filling it is one transaction, so a crash between leaves an empty database, and that is filled the next time.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
