"""`mediatord store`: check, vacuum and create the database."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mediatord.cli.commands import main
from mediatord.cli.init import write_initial_files
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import DatabaseFileLock, create_database

ROWS = 500


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration written by `init`."""
    _, path = write_initial_files(tmp_path / "m", "http://127.0.0.1:8080")
    return path


@pytest.fixture
def database(config: Path) -> Path:
    """Its database, with some contents."""
    path = config.with_name("mediator.sqlite3")
    create_database(path)
    with closing(connect(path)) as connection:
        for number in range(ROWS):
            connection.execute("INSERT INTO did_document VALUES (?, ?)", (f"{number}", "x" * 2000))
    return path


def run_command(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out.strip(), err.strip()


@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_checks_database(
    deep: tuple[str, ...], config: Path, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem of a damaged database has a line; exit status 1."""
    command: tuple[str | Path, ...] = ("store", "check", *deep, "--config", config)
    assert run_command(*command, capsys=capsys) == (0, f"{database}: ok", "")
    with database.open("r+b") as file:
        file.seek(database.stat().st_size // 2)
        file.write(b"\xa5" * 65_536)
    status, out, _ = run_command(*command, capsys=capsys)
    assert status == 1
    assert all(line.startswith(f"{database}: ") for line in out.splitlines())
    status, out, _ = run_command(*command, "--json", capsys=capsys)
    output = json.loads(out)
    assert (status, output["ok"], bool(output["problems"])) == (1, False, True)


@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_check_finds_missing_tables(
    deep: tuple[str, ...], config: Path, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An intact database without tables, of another program, or with too few tables is not ok."""
    command: tuple[str | Path, ...] = ("store", "check", *deep, "--config", config)
    with closing(connect(database)) as connection:
        connection.execute("DROP TABLE did_document")
    expected = f"{database}: it lacks the tables did_document; restore a backup"
    assert run_command(*command, capsys=capsys) == (1, expected, "")
    for end in ("", "-wal", "-shm"):
        database.with_name(database.name + end).unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 0")
        connection.execute("VACUUM")
    status, out, _ = run_command(*command, capsys=capsys)
    assert (status, out.partition(";")[0]) == (1, f"{database}: it contains no tables")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE other (number INTEGER)")
    status, out, _ = run_command(*command, capsys=capsys)
    assert (status, out) == (1, f"{database}: it is a database of another program; check storage.sqlite.path")
    database.write_bytes(b"")
    assert run_command(*command, capsys=capsys)[2] == f"mediatord: the database {database} is empty"


def test_reports_unreadable_database(
    config: Path, database: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that this user may not read, for commands that read and for backups; root may, hence the patch."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != database)
    for command in (("store", "check"), ("backup", "--to", database.with_name("b.tar"))):
        status, _, error = run_command(*command, "--config", config, capsys=capsys)
        assert (status, error) == (1, f"mediatord: cannot read {database}: Permission denied")


def test_vacuum_shrinks_file(config: Path, database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused while a daemon runs."""
    with closing(connect(database)) as connection:
        connection.execute("DELETE FROM did_document")
    before = database.stat().st_size
    command = ("store", "vacuum", "--config", config, "--json")
    use = DatabaseFileLock(database)
    use.take()
    status, _, err = run_command(*command, capsys=capsys)
    assert (status, database.stat().st_size) == (1, before)
    assert err.endswith("another daemon uses it; stop it first")
    use.release()
    status, out, _ = run_command(*command, capsys=capsys)
    output = json.loads(out)
    assert (status, output["before"], output["after"]) == (0, before, database.stat().st_size)
    assert output["after"] < before / 2


def test_creates_missing_database_only(config: Path, database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("store", "create", "--config", config)
    assert run_command(*command, capsys=capsys)[0] == 1
    for end in ("", "-wal", "-shm"):
        database.with_name(database.name + end).unlink(missing_ok=True)
    assert (
        run_command("store", "check", "--config", config, capsys=capsys)[2]
        == f"mediatord: the database {database} does not exist"
    )
    assert run_command(*command, capsys=capsys)[0] == 0
    assert run_command("store", "check", "--config", config, capsys=capsys)[0] == 0


def test_refuses_other_backends(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text("utf-8").replace("backend: sqlite", "backend: memory"))
    for command in ("check", "vacuum", "create"):
        status, _, err = run_command("store", command, "--config", config, capsys=capsys)
        assert (status, err) == (1, "mediatord: storage.backend is memory: expected sqlite")
