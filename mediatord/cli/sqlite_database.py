"""`mediatord store`: check, compact and create the SQLite database."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import click

from mediatord.cli.console import config_option, group_config_option, json_option, print_result
from mediatord.config.file import load_config
from mediatord.errors import StartupError
from mediatord.runtime.progress_bar import progress_bar
from mediatord.store.sqlite.connection import connect, connect_reader
from mediatord.store.sqlite.database_file import (
    DatabaseFileLock,
    StoreInUse,
    check_integrity,
    check_structure,
    check_tables,
    create_database,
    is_missing_or_empty,
)


@click.group()
@group_config_option
def store() -> None:
    """Check, compact or create the SQLite database."""


@store.command("check")
@config_option
@click.option("--deep", is_flag=True, help="Also compare indexes with tables (several times slower).")
@json_option
def check(path: Path, deep: bool, as_json: bool) -> int:
    """
    Check the database for damage; the daemon can keep running.

    Changes nothing. Exits with 1 if the database is damaged, has no tables or belongs to another program. For
    recovery, see "Back up and restore" in the documentation.
    """
    database = _find_database(path)
    try:
        with closing(connect_reader(database)) as connection:
            with progress_bar("checking"):
                problems = check_integrity(connection) if deep else check_structure(connection)
            problems = problems or check_tables(connection)
    except sqlite3.Error as error:
        problems = [str(error)]
    text = "\n".join(f"{database}: {problem}" for problem in problems) or f"{database}: ok"
    print_result(as_json, {"database": str(database), "ok": not problems, "problems": problems}, text)
    return 1 if problems else 0


@store.command("vacuum")
@config_option
@json_option
def vacuum(path: Path, as_json: bool) -> None:
    """
    Return the space of deleted messages to the file system.

    Stop all daemons first. The disk needs space for a second copy of the database. Rarely necessary: the daemon
    reuses the space.
    """
    database = _find_database(path)
    use = DatabaseFileLock(database)
    try:
        use.take()
    except StoreInUse as error:
        raise StartupError(f"{error}; stop it first") from None
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        before = database.stat().st_size
        with closing(connect(database)) as connection:
            with progress_bar("compacting"):
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        after = database.stat().st_size
    except sqlite3.Error as error:
        raise StartupError(f"cannot compact the database {database}: {error}") from None
    finally:
        use.release()
    print_result(
        as_json,
        {"database": str(database), "before": before, "after": after},
        f"{database}: {before:,} bytes before, {after:,} after".replace(",", " "),
    )


@store.command("create")
@config_option
@json_option
def create(path: Path, as_json: bool) -> None:
    """
    Create an empty database to replace a lost one.

    The accounts and messages of the lost database stay lost: if you have a backup, restore it instead. Not needed
    after `mediatord init`.
    """
    database = _read_sqlite_path(path)
    try:
        create_database(database)
    except ValueError as error:
        raise StartupError(str(error)) from None
    print_result(as_json, {"database": str(database)}, f"created an empty database: {database}")


def _find_database(path: Path) -> Path:
    """Path of the database. :raise StartupError: it does not exist, is empty or cannot be read."""
    database = _read_sqlite_path(path)
    if is_missing_or_empty(database):
        raise StartupError(f"the database {database} {'is empty' if database.exists() else 'does not exist'}")
    if not os.access(database, os.R_OK):
        raise StartupError(f"cannot read {database}: {os.strerror(errno.EACCES)}")
    return database


def _read_sqlite_path(path: Path) -> Path:
    config = load_config(path)
    if config.storage.backend != "sqlite":
        raise StartupError(f"storage.backend is {config.storage.backend}: expected sqlite")
    return config.storage.sqlite.path
