"""
Files of SQLite databases for backup, restore and import: opened after checks, locked, upgraded, and put in place of
another.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import DatabaseError

from mediatord.backup.records import BackupError
from mediatord.store.sqlite.connection import StoreConnection, connect
from mediatord.store.sqlite.database_file import (
    APPLICATION_ID,
    DatabaseFileLock,
    StoreInUse,
    migrate_schema,
    read_schema_steps,
    sync_directory,
)


def connect_immutable(path: Path) -> StoreConnection:
    """A connection that creates no file beside the database."""
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, factory=StoreConnection)


def require_database(path: Path) -> None:
    if not path.exists():
        raise BackupError(f"{path} does not exist; the daemon creates it when it first starts")
    if not os.access(path, os.R_OK):
        raise BackupError(f"cannot read {path}: {os.strerror(errno.EACCES)}")


@contextmanager
def open_checked(
    path: Path, open_connection: Callable[[Path], StoreConnection], failure: str
) -> Iterator[StoreConnection]:
    """
    Open a database of this program and this schema version.

    :raise BackupError: it is another one, or an operation on it fails, with `failure` in the text.
    """
    try:
        with closing(open_connection(path)) as connection:
            check_schema(connection, path)
            yield connection
    except DatabaseError as error:
        raise BackupError(f"{path} {failure}: {error}") from None


def check_schema(connection: StoreConnection, path: Path) -> None:
    """:raise BackupError: a database is of another program, or of another schema version."""
    ask = connection.execute
    if ask("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise BackupError(f"{path} is not a mediatord database")
    version, ours = ask("PRAGMA user_version").fetchone()[0], len(read_schema_steps())
    if version != ours:
        hint = "start the daemon once to upgrade it" if version < ours else "use a newer mediatord"
        raise BackupError(f"{path} has schema version {version}, expected {ours}; {hint}")


@contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """
    Lock daemons out of a store.

    :raise BackupError: a daemon uses it.
    """
    use = DatabaseFileLock(path)
    try:
        use.take()
    except StoreInUse as error:
        raise BackupError(f"{error}; stop it first") from None
    except ValueError as error:
        raise BackupError(str(error)) from None
    try:
        yield
    finally:
        use.release()


def migrate_database(draft: Path) -> None:
    """
    Upgrade the schema of a database that no process has open; other files and newer versions are not changed.

    :raise BackupError: it is damaged.
    """
    try:
        with closing(connect(draft)) as connection:
            ((application,),) = connection.execute("PRAGMA application_id").fetchall()
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if application == APPLICATION_ID and version < len(read_schema_steps()):
                migrate_schema(connection, read_schema_steps())
    except DatabaseError as error:
        raise BackupError(f"{draft} is damaged: {error}") from None


def install_database(draft: Path, path: Path) -> None:
    """Durably replace an empty store by a file that no process has open."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    draft.rename(path)
    sync_directory(path.parent)
