"""`mediatord store`: check, compact and create the SQLite database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import click

from mediatord.cli.console import config_option, group_config_option, json_option, print_result
from mediatord.config.file import load_config
from mediatord.errors import StartupError
from mediatord.store.sqlite.connection import connect, connect_reader
from mediatord.store.sqlite.database_file import (
    DatabaseFileLock,
    check_integrity,
    check_structure,
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
    Check the database for damage; the daemon may run.

    Changes nothing. Exits with 1 if the database is damaged; see docs/how-to/back-up-and-restore.md for recovery.
    """
    database = _find_database(path)
    try:
        with closing(connect_reader(database)) as connection:
            problems = check_integrity(connection) if deep else check_structure(connection)
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
    Return the space of deleted messages to the disk.

    No daemon may run, and the disk needs space for a second copy of the database. Rarely necessary: the daemon reuses
    the space.
    """
    database = _find_database(path)
    use = DatabaseFileLock(database)
    try:
        use.take()
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        before = database.stat().st_size
        with closing(connect(database)) as connection:
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
        f"{database}: {before:,} bytes before, {after:,} now".replace(",", " "),
    )


@store.command("create")
@config_option
@json_option
def create(path: Path, as_json: bool) -> None:
    """
    Create an empty database to replace one that is lost.

    Accounts and messages are gone then: if you have a backup, restore it instead. Not needed after `mediatord init`.
    """
    database = _read_sqlite_path(path)
    try:
        create_database(database)
    except ValueError as error:
        raise StartupError(str(error)) from None
    print_result(as_json, {"database": str(database)}, f"created an empty database, {database}")


def _find_database(path: Path) -> Path:
    """Path of the database. :raise StartupError: it does not exist."""
    database = _read_sqlite_path(path)
    if is_missing_or_empty(database):
        raise StartupError(f"there is no database {database}")
    return database


def _read_sqlite_path(path: Path) -> Path:
    config = load_config(path)
    if config.storage.backend != "sqlite":
        raise StartupError(f"storage.backend is {config.storage.backend}, and this is for sqlite")
    return config.storage.sqlite.path
