"""Making backups while the daemon runs."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from mediatord.store.database import connect
from mediatord.transfer.archive import Tell, silent, write_archive
from mediatord.transfer.bundle import DATABASE, RECORDS, Manifest, check_bundle, write_bundle
from mediatord.transfer.draft import new_file
from mediatord.transfer.errors import TransferError
from mediatord.transfer.records import Counts
from mediatord.transfer.sqlite_source import SQLiteSource, check_version
from mediatord.transfer.stores import Source

# Copies a store to a new file, and says how many records of each kind are in that.
Copy = Callable[[Path], Counts]


def backup(path: Path, files: Mapping[str, Path], backend: str, copy: Copy) -> Manifest:
    """
    Make a backup, and read it back before it gets its name.

    :param files: by their names in it.
    :raise TransferError: it could not be made; nothing is left of it.
    :raise OSError: likewise.
    """
    with new_file(path) as file, _workshop(path) as workshop:
        name = DATABASE if backend == "sqlite" else RECORDS
        store = workshop / name
        counts = copy(store)
        copies = {name: _copied(source, workshop / name) for name, source in files.items()}
        manifest = write_bundle(file, backend, counts, {**copies, name: store})
        file.flush()
        if check_bundle(path, file) != manifest:
            raise TransferError(f"{path} is not what was written: is the disk damaged?")
        return manifest


def copy_sqlite(source: Path, to: Path) -> Counts:
    """
    Copy a database as it is at one time, whatever is written meanwhile, into a file of its own.

    :raise TransferError: it cannot be read, or the copy is damaged.
    """
    if not source.exists():
        raise TransferError(f"{source} is not there: nothing has been kept yet")
    to.touch(mode=0o600)
    try:
        with closing(connect(source)) as connection:
            check_version(connection, source)
            connection.execute("VACUUM INTO ?", (str(to),))
        _give_to_owner_of(source, to)
        return counted(to)
    except sqlite3.DatabaseError as error:
        raise TransferError(f"{source} cannot be copied to {to.parent}: {error}") from None


def counted(path: Path) -> Counts:
    """
    The records in a database that nobody else has open, after looking whether it is sound.

    :raise TransferError: it is not.
    """
    try:
        # Nothing is written beside it.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            check_version(connection, path)
            found = [text for (text,) in connection.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise TransferError(f"{path} is damaged: {found[0]}")
            return SQLiteSource(connection).counts()
    except sqlite3.DatabaseError as error:
        raise TransferError(f"{path} is damaged: {error}") from None


def copy_records(source: Source, to: Path, tell: Tell = silent) -> Counts:
    """As an archive of records."""
    return write_archive(to, source.backend, source.records(), tell)


def _copied(source: Path, to: Path) -> Path:
    """As it is now: it may change before all is written. With mode and owner, as far as those can be given."""
    shutil.copyfile(source, to)
    shutil.copymode(source, to)
    _give_to_owner_of(source, to)
    return to


def _give_to_owner_of(source: Path, to: Path) -> None:
    """As far as that can be done: whose it was is in the manifest."""
    found = source.stat()
    with suppress(PermissionError):
        shutil.chown(to, found.st_uid, found.st_gid)


@contextmanager
def _workshop(path: Path) -> Iterator[Path]:
    """A directory beside a file that is being made; what an earlier run that was killed has left goes first."""
    workshop = path.with_name(f".{path.name}.parts")
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir(mode=0o700)
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop)
