"""Backups and what becomes of them: whole and where nothing is, or not at all."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from mediatord.backup import sqlite_database_files
from mediatord.backup.archive import write_archive
from mediatord.backup.records import AccountRecord, BackupError
from mediatord.backup.sqlite_records import copy_sqlite_store, require_empty_database
from mediatord.cli import check_config as check_config_module
from mediatord.config.file import load_config
from mediatord.store.sqlite import database_file
from mediatord.store.sqlite.database_file import DatabaseFileLock, open_database, read_schema_steps
from tests.backup.store_contents import add_account, read_tree
from tests.cli.test_commands import Capture, call, one_line
from tests.mongod import fresh_database, shared_replica_set


def test_there_and_back(made: Path, saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """Everything is where the configuration wants it, as it was, readable by its owner only; again is nothing new."""
    new = tmp_path / "new" / "place"
    for _ in range(2):
        assert call("restore", "--from", str(saved), "--dir", str(new), "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["records"] == told["store"] and told["store"]["account"] == 1
    files = ["mediator.yaml", "keys.jwks", "log.key", "secret", "token"]
    assert {name: (new / name).read_bytes() for name in files} == {
        name: (made.parent / name).read_bytes() for name in files
    }
    assert sorted(os.listdir(new)) == sorted([*files, "mediator.sqlite3", "mediator.sqlite3.lock"])
    assert all(stat.S_IMODE((new / name).stat().st_mode) == 0o600 for name in (*files[1:], "mediator.sqlite3"))
    with closing(sqlite3.connect(new / "mediator.sqlite3")) as connection:
        assert connection.execute("SELECT did FROM account").fetchall() == [("did:a",)]
    assert call("check-config", "--config", str(new / "mediator.yaml")) == 0


def test_the_daemon_gets_to_what_root_restores(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Its directory belongs to whom the configuration belonged to, like the files in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    nobody = pwd.getpwnam("nobody")
    for path in made.parent.iterdir():
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    new = tmp_path / "new"
    assert call("backup", "--config", str(made), "--to", str(tmp_path / "b.tar")) == 0
    assert call("restore", "--from", str(tmp_path / "b.tar"), "--dir", str(new)) == 0
    there = [path for path in (new, *new.iterdir()) if path.stat().st_uid != nobody.pw_uid]
    assert there == []
    assert stat.S_IMODE(new.stat().st_mode) == 0o750


def test_a_backup_is_private_and_leaves_nothing_else(saved: Path) -> None:
    """One file, of mode 0600; one that is there is not overwritten."""
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert sorted(os.listdir(saved.parent)) == ["backup.tar", "m"]


def test_what_is_only_in_the_write_ahead_log(tmp_path: Path) -> None:
    """Is in the copy if it is committed, and not if it is not, while the writer goes on."""
    path = tmp_path / "s.sqlite3"
    insert = "INSERT INTO account (did, created_at) VALUES (?, 1.0)"
    with closing(open_database(path, None)) as writer:
        writer.execute(insert, ("did:committed",))
        writer.execute("BEGIN IMMEDIATE")
        writer.execute(insert, ("did:begun",))
        assert b"did:committed" not in path.read_bytes()
        assert copy_sqlite_store(path, tmp_path / "copy")["account"] == 1
        writer.execute("COMMIT")
        assert copy_sqlite_store(path, tmp_path / "another")["account"] == 2
    with closing(sqlite3.connect(tmp_path / "copy")) as connection:
        assert connection.execute("SELECT did FROM account").fetchall() == [("did:committed",)]
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600


def test_the_ledger_goes_along(tmp_path: Path) -> None:
    """What became of what was accepted before is known after a backup is restored."""
    path, numbers = (
        tmp_path / "s.sqlite3",
        "SELECT accepted, expired, removed FROM ledger WHERE protocol = 'decentrl'",
    )
    with closing(open_database(path, None)) as writer:
        writer.execute("UPDATE ledger SET accepted = 3, expired = 2, removed = 1 WHERE protocol = 'decentrl'")
        copy_sqlite_store(path, tmp_path / "copy")
    with closing(sqlite3.connect(tmp_path / "copy")) as connection:
        assert connection.execute(numbers).fetchall() == [(3, 2, 1)]


def test_a_backup_of_an_earlier_version(
    made: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved before an upgrade can be brought back after it, with all that is kept since."""
    path, backup, new = load_config(made).storage.sqlite.path, tmp_path / "old.tar", tmp_path / "new"
    path.unlink()
    with closing(open_database(path, None)) as writer:
        writer.execute("INSERT INTO account (did, created_at) VALUES ('did:old', 1.0)")
    assert call("backup", "--config", str(made), "--to", str(backup)) == 0
    steps = [*read_schema_steps(), "CREATE TABLE extra (did TEXT); INSERT INTO extra SELECT did FROM account;"]
    for module in (database_file, sqlite_database_files, check_config_module):
        monkeypatch.setattr(module, "read_schema_steps", lambda: steps)
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0
    with closing(sqlite3.connect(new / "mediator.sqlite3")) as connection:
        assert connection.execute("SELECT did FROM account").fetchall() == [("did:old",)]
        assert connection.execute("SELECT did FROM extra").fetchall() == [("did:old",)]
    assert call("check-config", "--config", str(new / "mediator.yaml")) == 0


def test_what_is_there_is_not_overwritten(made: Path, saved: Path, capsys: Capture) -> None:
    """Neither by a backup."""
    before = saved.read_bytes()
    assert call("backup", "--config", str(made), "--to", str(saved)) == 1
    assert "is not overwritten" in one_line(capsys)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("name", ["mediator.yaml", "keys.jwks", "log.key", "secret", "token"])
def test_another_file_is_in_the_way(name: str, saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """Nothing is written then."""
    new = tmp_path / "new"
    new.mkdir()
    (new / name).write_text("public_url: http://127.0.0.1:9999\n")
    before = read_tree(new)
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 1
    assert f"{new / name} exists and differs" in one_line(capsys)
    assert read_tree(new) == before


def test_a_store_is_in_the_way(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """With anything in it; an empty one is replaced."""
    new = tmp_path / "new"
    new.mkdir()
    add_account(new / "mediator.sqlite3", "did:b")
    before = read_tree(new)
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 1
    assert "is not empty (1 accounts)" in one_line(capsys)
    assert {name: content for name, content in read_tree(new).items() if "lock" not in name} == before
    (new / "mediator.sqlite3").unlink()
    open_database(new / "mediator.sqlite3", None).close()
    require_empty_database(new / "mediator.sqlite3")
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 0
    with pytest.raises(BackupError, match="1 accounts"):
        require_empty_database(new / "mediator.sqlite3")


def test_a_daemon_is_in_the_way(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """One that runs on the database, even if nothing is in that."""
    new = tmp_path / "new"
    new.mkdir()
    daemon = DatabaseFileLock(new / "mediator.sqlite3")
    daemon.take()
    for command in ("restore", "import"):
        arguments = {"restore": ["--dir", str(new)], "import": ["--config", str(new / "mediator.yaml")]}[command]
        archive = saved if command == "restore" else tmp_path / "a.gz"
        if command == "import":
            write_archive(archive, "sqlite", [])
            shutil.copy(tmp_path / "m" / "mediator.yaml", new)
        assert call(command, "--from", str(archive), *arguments) == 1
        assert "another daemon uses it; stop it first" in one_line(capsys)
    daemon.release()
    assert sorted(os.listdir(new)) == ["mediator.sqlite3.lock", "mediator.yaml"]


def test_a_place_that_fails_at_the_end(
    saved: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing: what had its place already leaves it."""
    new = tmp_path / "new"
    new.mkdir()
    link = os.link

    def full(source: Path, path: Path) -> None:
        if path.name == "mediator.yaml":
            raise OSError(28, "No space left on device", str(path))
        link(source, path)

    monkeypatch.setattr(os, "link", full)
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 1
    assert "No space left on device" in one_line(capsys)
    assert sorted(os.listdir(new)) == ["mediator.sqlite3.lock"]
    monkeypatch.undo()
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 0


def test_killed_before_its_end(saved: Path, tmp_path: Path) -> None:
    """Whatever of it is there is the same, and the rest follows."""
    new = tmp_path / "new"
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 0
    whole = read_tree(new)
    for name in ("mediator.yaml", "keys.jwks"):
        (new / name).unlink()
    (new / ".log.key.restore").write_text("left over")
    assert call("restore", "--from", str(saved), "--dir", str(new)) == 0
    (new / ".log.key.restore").unlink(missing_ok=True)
    assert read_tree(new) == whole


def test_with_mongodb(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """The store is in it as records; there and back, and into what is not empty it is refused."""
    servers = shared_replica_set()
    with fresh_database(servers) as name:
        given = yaml.safe_load(made.read_text())
        given["storage"] = {"backend": "mongodb", "mongodb": {"uri": servers.uri(name)}}
        made.write_text(yaml.safe_dump(given))
        archive, saved = tmp_path / "a.gz", tmp_path / "b.tar"
        write_archive(archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False)])
        assert call("import", "--config", str(made), "--from", str(archive)) == 0
        assert call("backup", "--config", str(made), "--to", str(saved)) == 0
        capsys.readouterr()
        assert call("restore", "--from", str(saved), "--dir", str(tmp_path / "new")) == 1
        assert "is not empty (1 accounts)" in one_line(capsys)
        assert not (tmp_path / "new").exists()
        servers.client.drop_database(name)
        assert call("restore", "--from", str(saved), "--dir", str(tmp_path / "new")) == 0
        assert [one["did"] for one in servers.client[name]["accounts"].find()] == ["did:a"]
        assert load_config(tmp_path / "new" / "mediator.yaml").storage.mongodb.uri == servers.uri(name)
        assert sorted(os.listdir(tmp_path / "new")) == ["keys.jwks", "log.key", "mediator.yaml", "secret", "token"]


@pytest.mark.parametrize("command", ["export", "backup"])
def test_there_is_nothing_to_be_read(command: str, tmp_path: Path, capsys: Capture) -> None:
    """A store that was never opened, or that is in memory: one line, and no file."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    path = tmp_path / "m" / "mediator.yaml"
    for backend, told in (
        ("sqlite", "a daemon creates it at its first start"),
        ("memory", "storage.backend memory cannot be exported"),
    ):
        path.write_text(path.read_text().replace("backend: sqlite", f"backend: {backend}"))
        assert call(command, "--config", str(path), "--to", str(tmp_path / "x")) == 1
        assert told in one_line(capsys)
    assert os.listdir(tmp_path) == ["m"]


def test_wrong_usage(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """Exit status 2, one line."""
    for arguments in (
        ["restore", "--from", str(saved)],
        ["restore", "--from", str(saved), "--dir", str(tmp_path), "--config", str(tmp_path / "x")],
        ["restore", "--from", str(tmp_path / "none"), "--dir", str(tmp_path)],
        ["export", "--to", str(tmp_path / "x")],
    ):
        assert call(*arguments) == 2
        one_line(capsys)
