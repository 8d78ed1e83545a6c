"""Whether a database can be used: checked before the daemon starts, and by `mediatord store check`."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from threading import Timer

from mediatord.store.database import DatabaseRefused, is_empty, prepare_database
from mediatord.store.file_health import shows_damage

# Seconds that the check at a start may take. What it has not looked at by then is found when it is read.
START_SECONDS = 5.0
_PROBLEMS = 100

_REPAIR = "restore a backup, or see docs/backup.md on what can be recovered"
_USED = b"A database was made here. Without it the daemon does not start; see `mediatord store create --help`.\n"
_SEGMENTS = "events*.jsonl*"


class Damaged(DatabaseRefused):
    """What is in the file is not what SQLite wrote."""


def check_store(backend: str, path: Path, logs: Path | None = None) -> None:
    """
    Find out whether the store can be opened at all, before anything else is begun. A database is made if nothing says
    that there was one.

    :param logs: where the daemon writes its event log.
    :raise ValueError: the file cannot be made, is gone, damaged, not ours, or of a newer version; the text is for the
        operator.
    """
    if backend != "sqlite":
        return
    try:
        if loss := loss_of(path, logs):
            raise DatabaseRefused(loss)
        if not is_empty(path):
            # Before anything is written to it: by the last connection that can, SQLite empties the write-ahead log.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                problems = quick_check(connection, START_SECONDS)
            if problems:
                raise Damaged(problems[0])
        prepare_database(path).close()
        _note_use(path)
    except (DatabaseRefused, sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if _is_no_database(error):
            reason = f"{reason}; {_REPAIR}"
        elif isinstance(error, Damaged) or shows_damage(error):
            reason = f"it is damaged ({reason}); {_REPAIR}"
        raise ValueError(f"cannot use the database {path}: {reason}") from None


def loss_of(path: Path, logs: Path | None) -> str:
    """What to tell an operator whose database is not there although it was; empty if it is, or never was."""
    if not (is_empty(path) and path.parent.is_dir() and (sign := _sign_of_use(path, logs))):
        return ""
    return (
        f"it is {'empty' if path.exists() else 'not there'}, and {sign}; put it back, or restore a backup. "
        "If there was none, as after a change of storage.backend, or if it is lost, `mediatord store create` makes a "
        "new, empty one"
    )


def create_store(path: Path) -> None:
    """
    Make an empty database, whatever was there before.

    :raise ValueError: there is one, or it cannot be made; the text is for the operator.
    """
    try:
        if not is_empty(path):
            raise DatabaseRefused("there is one already")
        prepare_database(path).close()
        _note_use(path)
    except (DatabaseRefused, sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot make the database {path}: {reason}") from None


def quick_check(connection: sqlite3.Connection, seconds: float | None = None) -> list[str]:
    """
    What is wrong with the structure of the file.

    :param seconds: after which to stop looking, without a finding.
    """
    return _examine(connection, "quick_check", seconds)


def deep_check(connection: sqlite3.Connection) -> list[str]:
    """The same with indexes compared to tables, and rows to those that they refer to; it takes its time."""
    problems = _examine(connection, "integrity_check", None)
    if not problems:
        missing = connection.execute("PRAGMA foreign_key_check").fetchmany(_PROBLEMS)
        problems = [f"row {row} of {table} refers to no row of {other}" for table, row, other, _ in missing]
    return problems


def _examine(connection: sqlite3.Connection, check: str, seconds: float | None) -> list[str]:
    """:raise sqlite3.Error: the file cannot be read for another reason than damage."""
    # A check is a single step to SQLite, during which it calls no progress handler.
    timer = None if seconds is None else Timer(seconds, connection.interrupt)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        found = [text for (text,) in connection.execute(f"PRAGMA {check}({_PROBLEMS})")]
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            return []
        if shows_damage(error) and not _is_no_database(error):
            return [str(error)]
        raise
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
    return [] if found == ["ok"] else [line for text in found for line in text.splitlines()]


def _is_no_database(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB


def _lock_file(path: Path) -> Path:
    return path.resolve().with_name(f"{path.resolve().name}.lock")


def _sign_of_use(path: Path, logs: Path | None) -> str:
    """What says that there was a database; empty if nothing does."""
    lock = _lock_file(path)
    with suppress(OSError):
        if lock.stat().st_size:
            return f"{lock} says that there was one"
    if logs is not None and (next(logs.glob(_SEGMENTS), None) or next(logs.glob(f"*/{_SEGMENTS}"), None)):
        return f"there may have been one: {logs} has an event log"
    return ""


def _note_use(path: Path) -> None:
    """Have the file with the lock say that there is a database; where it cannot, there are other signs."""
    with suppress(OSError):
        descriptor = os.open(_lock_file(path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not os.fstat(descriptor).st_size:
                os.write(descriptor, _USED)
        finally:
            os.close(descriptor)
