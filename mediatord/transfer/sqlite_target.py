"""Writing a SQLite store: into a file beside it, which takes its place when all is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection, DatabaseError
from typing import Any

from mediatord.store.database import (
    APPLICATION_ID,
    DatabaseRefused,
    connect,
    connect_for_reading,
    migrate,
    prepare_database,
    schema_steps,
)
from mediatord.store.sole_use import InUse, SoleUse
from mediatord.transfer.draft import give_to_owner_of, sync_directory
from mediatord.transfer.errors import ArchiveRefused, TransferError
from mediatord.transfer.records import Counts, Message, Record
from mediatord.transfer.sqlite_loading import LOADERS
from mediatord.transfer.sqlite_source import SQLiteSource, check_version
from mediatord.transfer.stores import refuse_counts

# As SQLite is built: what a row may have at most, with room for all that is not the payload.
_LARGEST = 999_000_000
_CHECKPOINT_PAGES = 16_384
_PROGRESS = "CREATE TABLE IF NOT EXISTS import_progress (archive TEXT NOT NULL, done INTEGER NOT NULL) STRICT"


class SQLiteTarget:
    """
    :param path: of the store.
    :param draft: of the file that is written.
    """

    def __init__(self, path: Path, draft: Path) -> None:
        self._path = path
        self._draft = draft
        self._open: Connection | None = None

    @property
    def connection(self) -> Connection:
        """To the draft."""
        assert self._open is not None
        return self._open

    def accept(self, record: Record) -> None:
        if isinstance(record, Message) and len(record.payload) > _LARGEST:
            raise ArchiveRefused(f"message {record.id} is larger than SQLite takes")

    def begin(self, archive: str) -> int:
        refuse_kept(self._path)
        self._open = self._prepared()
        give_to_owner_of(self._path.parent, self._draft)
        # After a power cut it may have less than was written, and knows how much.
        self._open.execute("PRAGMA synchronous = NORMAL")
        self._open.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        self._open.execute(_PROGRESS)
        found = self._open.execute("SELECT archive, done FROM import_progress").fetchone()
        if found is None:
            self._open.execute("INSERT INTO import_progress VALUES (?, 0)", (archive,))
            return 0
        if found[0] != archive:
            raise TransferError(
                f"an import of another archive into {self._path} was not finished: run that again, "
                f"or delete {self._draft} to give it up"
            )
        return int(found[1])

    def write(self, first: int, records: Sequence[Record]) -> None:
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for kind, some in groupby(records, key=lambda record: record.kind):
                load: Callable[[Connection, Sequence[Any]], None] = LOADERS[kind]
                load(connection, list(some))
            done = first + len(records) - 1
            changed = connection.execute("UPDATE import_progress SET done = ? WHERE done = ?", (done, first - 1))
            if not changed.rowcount:
                raise TransferError(f"another import writes to {self._path}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def counts(self) -> Counts:
        return SQLiteSource(self.connection).counts()

    def finish(self) -> None:
        emptying = "PRAGMA wal_checkpoint(TRUNCATE)"
        self.connection.execute(emptying)  # which may fail, and then it is still known how far it is
        self.connection.execute("DROP TABLE import_progress")
        self.connection.execute(emptying)
        self.close()
        place_database(self._draft, self._path)

    def _prepared(self) -> Connection:
        """The draft. One that was complete, but did not get its place, has forgotten of what: it is begun anew."""
        connection = prepare_database(self._draft)
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'import_progress'").fetchone():
            return connection
        complete = any(SQLiteSource(connection).counts().values())
        if not complete:
            return connection
        connection.close()
        for suffix in ("", "-wal", "-shm"):
            self._draft.with_name(self._draft.name + suffix).unlink(missing_ok=True)
        return prepare_database(self._draft)

    def close(self) -> None:
        """Let go of the file."""
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def writing_sqlite(path: Path) -> Iterator[SQLiteTarget]:
    """
    An import into a file, of which no daemon can make use meanwhile.

    :raise TransferError: one does, or it cannot be written.
    """
    if not path.parent.is_dir():
        raise TransferError(f"{path.parent} is not there: make it first")
    with sole_use(path):
        target = SQLiteTarget(path, draft_of(path))
        try:
            yield target
        except (DatabaseError, DatabaseRefused) as error:
            raise TransferError(f"{path} cannot be written: {error}") from None
        finally:
            target.close()


def draft_of(path: Path) -> Path:
    """What is written before it takes the place of a store."""
    return path.with_name(f"{path.name}.import")


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """
    Keep daemons from using a store.

    :raise TransferError: one does.
    """
    use = SoleUse(path)
    try:
        use.take()
    except InUse as error:
        raise TransferError(f"{error}; stop it first") from None
    except ValueError as error:
        raise TransferError(str(error)) from None
    try:
        yield
    finally:
        use.release()


def refuse_kept(path: Path) -> None:
    """:raise TransferError: something is kept in this store, or it cannot be told."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with closing(connect_for_reading(path)) as connection:
            check_version(connection, path)
            refuse_counts(str(path), SQLiteSource(connection).counts())
    except DatabaseError as error:
        raise TransferError(f"{path} cannot be read: {error}") from None


def bring_up_to_date(draft: Path) -> None:
    """
    A file that nobody else has open may be of an earlier version; one that is none, or newer, is left as it is.

    :raise TransferError: it is damaged.
    """
    try:
        with closing(connect(draft)) as connection:
            ((application,),) = connection.execute("PRAGMA application_id").fetchall()
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if application == APPLICATION_ID and version < len(schema_steps()):
                migrate(connection, schema_steps())
    except DatabaseError as error:
        raise TransferError(f"{draft} is damaged: {error}") from None


def place_database(draft: Path, path: Path) -> None:
    """Have a file that nobody has open take the place of a store in which nothing is kept, durably."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    draft.rename(path)
    sync_directory(path.parent)
