"""What is asked of a store that is exported or imported into."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Protocol

from mediatord.transfer.errors import TransferError
from mediatord.transfer.records import KINDS, Counts, Record


class Source(Protocol):
    """A store that is read, all of it as it was at one time."""

    backend: str

    def counts(self) -> Counts:
        """How many records of each kind there are."""

    def records(self) -> Iterator[Record]:
        """All of them, in the order of an archive."""


class Target(Protocol):
    """
    A store that is written to by an import and by nobody else. What has been written stays if the import is
    interrupted, and no daemon uses the store before it is finished.
    """

    def accept(self, record: Record) -> None:
        """:raise ArchiveRefused: it cannot be kept here. Nothing is written."""

    def begin(self, archive: str) -> int:
        """
        Begin to import an archive, or go on with it; how many of its records are there already.

        :raise TransferError: something is in the store, or an import of another archive was not finished.
        """

    def write(self, first: int, records: Sequence[Record]) -> None:
        """
        Keep records, all of them or none.

        :param first: place of the first one in the archive, from 1.
        """

    def counts(self) -> Counts:
        """How many records of each kind there are."""

    def finish(self) -> None:
        """All of them are there: from now on a daemon may use the store."""


class Numbers:
    """
    Numbers from 1 for keys of a store, in the order in which they are given. They may be millions: SQLite keeps them,
    on disk if need be, and leaves nothing behind.
    """

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("CREATE TABLE number (key PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID")
        self._last = 0

    def give(self, key: int | bytes) -> int:
        """The next one. :raise TransferError: there is no room for them."""
        self._last += 1
        self._ask("INSERT INTO number VALUES (?, ?)", key, self._last)
        return self._last

    def of(self, key: int | bytes) -> int:
        """:raise TransferError: a key has none, or there is no room for them."""
        found = self._ask("SELECT number FROM number WHERE key = ?", key)
        if not found:
            raise TransferError("the store is damaged: something belongs to somebody who is not there")
        return int(found[0][0])

    def _ask(self, statement: str, *values: int | bytes) -> list[tuple[int]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise TransferError(f"a temporary file cannot be used: {error}") from None

    def close(self) -> None:
        """They are forgotten."""
        self._connection.close()


def refuse_counts(name: str, counts: Counts) -> None:
    """:raise TransferError: these are not all 0."""
    kept = ", ".join(f"{number} {KINDS[kind]}" for kind, number in counts.items() if number)
    if kept:
        raise TransferError(f"{name} is not empty ({kept}): an empty store is wanted")
