"""`mediatord store`: checking the database, making it smaller, making a new one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mediatord.cli.options import answer, config_option, group_config_option, json_option

if TYPE_CHECKING:
    from mediatord.config import Config


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
    from mediatord.store.database import connect_for_reading
    from mediatord.store.database_check import deep_check, quick_check

    database = _database(path)
    try:
        with closing(connect_for_reading(database)) as connection:
            problems = deep_check(connection) if deep else quick_check(connection)
    except sqlite3.Error as error:
        problems = [str(error)]
    text = "\n".join(f"{database}: {problem}" for problem in problems) or f"{database}: ok"
    answer(as_json, {"database": str(database), "ok": not problems, "problems": problems}, text)
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
    from mediatord.service import StartupError
    from mediatord.store.database import connect
    from mediatord.store.sole_use import SoleUse

    database = _database(path)
    use = SoleUse(database)
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
    answer(
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
    from mediatord.service import StartupError
    from mediatord.store.database_check import create_store

    database = _sqlite_path(path)
    try:
        create_store(database)
    except ValueError as error:
        raise StartupError(str(error)) from None
    answer(as_json, {"database": str(database)}, f"made an empty database, {database}")


def _database(path: Path) -> Path:
    """The one that a configuration names. :raise StartupError: it is not there."""
    from mediatord.service import StartupError
    from mediatord.store.database import is_empty

    database = _sqlite_path(path)
    if is_empty(database):
        raise StartupError(f"there is no database {database}")
    return database


def _sqlite_path(path: Path) -> Path:
    from mediatord.config import load
    from mediatord.service import StartupError

    config: Config = load(path)
    if config.storage.backend != "sqlite":
        raise StartupError(f"storage.backend is {config.storage.backend}, and this is for sqlite")
    return config.storage.sqlite.path
