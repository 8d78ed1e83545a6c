"""`mediatord store`: checking the database, making it smaller, making a new one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mediatord.cli.console import config_option, group_config_option, json_option, print_result

if TYPE_CHECKING:
    from mediatord.config.settings import Config


@click.group()
@group_config_option
def store() -> None:
    """Check the SQLite database, make it smaller, or make a new one."""


@store.command("check")
@config_option
@click.option("--deep", is_flag=True, help="Compare indexes with tables as well, which takes several times as long.")
@json_option
def check(path: Path, deep: bool, as_json: bool) -> int:
    """
    Look for damage in the database, whether the daemon runs or not.

    Nothing is changed. Exits with 1 if something is damaged; docs/backup.md says what can be recovered.
    """
    from mediatord.store.sqlite.database_file import check_integrity, check_structure, connect_reader

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
    Give the space that deleted messages have left in the database back to the disk.

    The daemon must not run, and the disk needs room for the database once more. The daemon does without this: it uses
    such space again by itself.
    """
    from mediatord.errors import StartupError
    from mediatord.store.sqlite.database_file import ExclusiveStoreLock, connect

    database = _find_database(path)
    use = ExclusiveStoreLock(database)
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
        raise StartupError(f"cannot make the database {database} smaller: {error}") from None
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
    Make an empty database although there was one before, whose accounts and messages are lost.

    Only for a database that is gone for good: put the old one back, or restore a backup, if there is any. The first
    start after `mediatord init` needs no such command.
    """
    from mediatord.errors import StartupError
    from mediatord.store.sqlite.database_file import create_database

    database = _read_sqlite_path(path)
    try:
        create_database(database)
    except ValueError as error:
        raise StartupError(str(error)) from None
    print_result(as_json, {"database": str(database)}, f"made an empty database, {database}")


def _find_database(path: Path) -> Path:
    """The one that a configuration names. :raise StartupError: it is not there."""
    from mediatord.errors import StartupError
    from mediatord.store.sqlite.database_file import is_missing_or_empty

    database = _read_sqlite_path(path)
    if is_missing_or_empty(database):
        raise StartupError(f"there is no database {database}")
    return database


def _read_sqlite_path(path: Path) -> Path:
    from mediatord.config.file import load_config
    from mediatord.errors import StartupError

    config: Config = load_config(path)
    if config.storage.backend != "sqlite":
        raise StartupError(f"storage.backend is {config.storage.backend}, and this is for sqlite")
    return config.storage.sqlite.path
