"""Backup and restore: complete, into an empty place, or not at all."""

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

from mediatord.backup import backup_file, sqlite_database_files
from mediatord.backup.archive import write_archive
from mediatord.backup.records import KINDS_BY_VERSION, AccountRecord, BackupError
from mediatord.backup.sqlite_records import copy_sqlite_store, require_empty_database
from mediatord.cli import check_config as check_config_module
from mediatord.config.file import load_config
from mediatord.store.sqlite import database_file
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import DatabaseFileLock, migrate_schema, open_database, read_schema_steps
from tests.backup.store_contents import add_account, read_tree
from tests.cli.test_commands import Capture, call, one_line
from tests.mongod import fresh_database, shared_replica_set


def test_round_trip(mediator_config: Path, backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """
    All files are restored to where the configuration wants them, readable by their owner only; a repetition changes
    nothing.
    """
    new = tmp_path / "new" / "place"
    for _ in range(2):
        assert call("restore", "--from", str(backup), "--dir", str(new), "--json") == 0
        output = json.loads(capsys.readouterr().out)
        assert output["records"] == output["store"] and output["store"]["account"] == 1
    files = ["mediator.yaml", "keys.jwks", "log.key", "secret", "token"]
    assert {name: (new / name).read_bytes() for name in files} == {
        name: (mediator_config.parent / name).read_bytes() for name in files
    }
    assert sorted(os.listdir(new)) == sorted([*files, "mediator.sqlite3", "mediator.sqlite3.lock"])
    assert all(stat.S_IMODE((new / name).stat().st_mode) == 0o600 for name in (*files[1:], "mediator.sqlite3"))
    with closing(sqlite3.connect(new / "mediator.sqlite3")) as connection:
        assert connection.execute("SELECT did FROM account").fetchall() == [("did:a",)]
    assert call("check-config", "--config", str(new / "mediator.yaml")) == 0


def test_restored_files_belong_to_owner_of_configuration(
    mediator_config: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Files and directories restored by root belong to the owner of the configuration."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    other_user = pwd.getpwnam("nobody")
    for path in mediator_config.parent.iterdir():
        os.chown(path, other_user.pw_uid, other_user.pw_gid)
    new = tmp_path / "new"
    assert call("backup", "--config", str(mediator_config), "--to", str(tmp_path / "b.tar")) == 0
    assert call("restore", "--from", str(tmp_path / "b.tar"), "--dir", str(new)) == 0
    wrong_owner = [path for path in (new, *new.iterdir()) if path.stat().st_uid != other_user.pw_uid]
    assert wrong_owner == []
    assert stat.S_IMODE(new.stat().st_mode) == 0o750


def test_backup_is_one_private_file(backup: Path) -> None:
    """A backup is one file of mode 0600, which is never overwritten."""
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert sorted(os.listdir(backup.parent)) == ["backup.tar", "m"]


def test_includes_committed_data_of_write_ahead_log(tmp_path: Path) -> None:
    """Committed data in the log is copied and uncommitted data is not, while the writer goes on."""
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


def test_restores_ledger(tmp_path: Path) -> None:
    """A restored store has the ledger of earlier messages."""
    path, numbers = (
        tmp_path / "s.sqlite3",
        "SELECT accepted, expired, removed FROM ledger WHERE protocol = 'decentrl'",
    )
    with closing(open_database(path, None)) as writer:
        writer.execute("UPDATE ledger SET accepted = 3, expired = 2, removed = 1 WHERE protocol = 'decentrl'")
        copy_sqlite_store(path, tmp_path / "copy")
    with closing(sqlite3.connect(tmp_path / "copy")) as connection:
        assert connection.execute(numbers).fetchall() == [(3, 2, 1)]


def test_restores_backup_of_earlier_version(
    mediator_config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup made before an upgrade can be restored after it, with all that is stored by now."""
    path, backup, new = load_config(mediator_config).storage.sqlite.path, tmp_path / "old.tar", tmp_path / "new"
    path.unlink()
    with closing(open_database(path, None)) as writer:
        writer.execute("INSERT INTO account (did, created_at) VALUES ('did:old', 1.0)")
    assert call("backup", "--config", str(mediator_config), "--to", str(backup)) == 0
    steps = [*read_schema_steps(), "CREATE TABLE extra (did TEXT); INSERT INTO extra SELECT did FROM account;"]
    for module in (database_file, sqlite_database_files, check_config_module):
        monkeypatch.setattr(module, "read_schema_steps", lambda: steps)
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0
    with closing(sqlite3.connect(new / "mediator.sqlite3")) as connection:
        assert connection.execute("SELECT did FROM account").fetchall() == [("did:old",)]
        assert connection.execute("SELECT did FROM extra").fetchall() == [("did:old",)]
    assert call("check-config", "--config", str(new / "mediator.yaml")) == 0


@pytest.mark.parametrize(("version", "missing"), [(1, ("device", "v1_connection")), (2, ("v1_connection",))])
def test_restores_backup_of_earlier_schema(
    version: int,
    missing: tuple[str, ...],
    mediator_config: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backup of a version before there were devices, or connections of DIDComm v1, can be restored."""
    database, backup, new = tmp_path / "old.sqlite3", tmp_path / "old.tar", tmp_path / "new"
    database.touch()
    with closing(connect(database)) as connection:
        migrate_schema(connection, read_schema_steps()[:version])
        connection.execute("INSERT INTO account (did, created_at) VALUES ('did:old', 1.0)")
    members = {name: mediator_config.parent / name for name in ("mediator.yaml", "keys.jwks", "log.key")}
    counts = dict.fromkeys(KINDS_BY_VERSION[version], 0) | {"account": 1}
    monkeypatch.setattr(backup_file, "BACKUP_VERSION", version)
    with backup.open("wb") as file:
        backup_file.write_backup_file(file, "sqlite", counts, members | {"store.sqlite3": database})
    assert not set(missing) & counts.keys()
    assert call("restore", "--from", str(backup), "--dir", str(new), "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["records"]["account"] == 1
    with closing(sqlite3.connect(new / "mediator.sqlite3")) as connection:
        for kind in missing:
            assert output["records"][kind] == 0
            assert connection.execute(f"SELECT count(*) FROM {kind}").fetchone() == (0,)


def test_restore_does_not_overwrite(mediator_config: Path, backup: Path, capsys: Capture) -> None:
    """Neither a restore nor a backup overwrites a file."""
    before = backup.read_bytes()
    assert call("backup", "--config", str(mediator_config), "--to", str(backup)) == 1
    assert "will not be overwritten" in one_line(capsys)
    assert backup.read_bytes() == before


@pytest.mark.parametrize("name", ["mediator.yaml", "keys.jwks", "log.key", "secret", "token"])
def test_existing_file_prevents_restore(name: str, backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """Nothing is written if a file exists."""
    new = tmp_path / "new"
    new.mkdir()
    (new / name).write_text("public_url: http://127.0.0.1:9999\n")
    before = read_tree(new)
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 1
    assert f"{new / name} exists and differs" in one_line(capsys)
    assert read_tree(new) == before


def test_non_empty_store_prevents_restore(backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """A store with data prevents a restore; an empty one is replaced."""
    new = tmp_path / "new"
    new.mkdir()
    add_account(new / "mediator.sqlite3", "did:b")
    before = read_tree(new)
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 1
    assert "is not empty (1 accounts)" in one_line(capsys)
    assert {name: content for name, content in read_tree(new).items() if "lock" not in name} == before
    (new / "mediator.sqlite3").unlink()
    open_database(new / "mediator.sqlite3", None).close()
    require_empty_database(new / "mediator.sqlite3")
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0
    with pytest.raises(BackupError, match="1 accounts"):
        require_empty_database(new / "mediator.sqlite3")


def test_running_daemon_prevents_restore(backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """A daemon that runs on the database prevents a restore, even if that is empty."""
    new = tmp_path / "new"
    new.mkdir()
    daemon = DatabaseFileLock(new / "mediator.sqlite3")
    daemon.take()
    for command in ("restore", "import"):
        arguments = {"restore": ["--dir", str(new)], "import": ["--config", str(new / "mediator.yaml")]}[command]
        archive = backup if command == "restore" else tmp_path / "a.gz"
        if command == "import":
            write_archive(archive, "sqlite", [])
            shutil.copy(tmp_path / "m" / "mediator.yaml", new)
        assert call(command, "--from", str(archive), *arguments) == 1
        assert "another daemon uses it; stop it first" in one_line(capsys)
    daemon.release()
    assert sorted(os.listdir(new)) == ["mediator.sqlite3.lock", "mediator.yaml"]


def test_restores_all_or_nothing(
    backup: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last file cannot be placed the others are removed."""
    new = tmp_path / "new"
    new.mkdir()
    link = os.link

    def fail_full(source: Path, path: Path) -> None:
        if path.name == "mediator.yaml":
            raise OSError(28, "No space left on device", str(path))
        link(source, path)

    monkeypatch.setattr(os, "link", fail_full)
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 1
    assert "No space left on device" in one_line(capsys)
    assert sorted(os.listdir(new)) == ["mediator.sqlite3.lock"]
    monkeypatch.undo()
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0


def test_continues_after_kill(backup: Path, tmp_path: Path) -> None:
    """After a kill the same command restores the remaining files."""
    new = tmp_path / "new"
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0
    tree = read_tree(new)
    for name in ("mediator.yaml", "keys.jwks"):
        (new / name).unlink()
    (new / ".log.key.restore").write_text("left over")
    assert call("restore", "--from", str(backup), "--dir", str(new)) == 0
    (new / ".log.key.restore").unlink(missing_ok=True)
    assert read_tree(new) == tree


def test_mongodb(mediator_config: Path, tmp_path: Path, capsys: Capture) -> None:
    """A MongoDB store is backed up as records, restored, and refused by a store that is not empty."""
    servers = shared_replica_set()
    with fresh_database(servers) as name:
        settings = yaml.safe_load(mediator_config.read_text())
        settings["storage"] = {"backend": "mongodb", "mongodb": {"uri": servers.uri(name)}}
        mediator_config.write_text(yaml.safe_dump(settings))
        archive, backup = tmp_path / "a.gz", tmp_path / "b.tar"
        write_archive(archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False)])
        assert call("import", "--config", str(mediator_config), "--from", str(archive)) == 0
        assert call("backup", "--config", str(mediator_config), "--to", str(backup)) == 0
        capsys.readouterr()
        assert call("restore", "--from", str(backup), "--dir", str(tmp_path / "new")) == 1
        assert "is not empty (1 accounts)" in one_line(capsys)
        assert not (tmp_path / "new").exists()
        servers.client.drop_database(name)
        assert call("restore", "--from", str(backup), "--dir", str(tmp_path / "new")) == 0
        assert [document["did"] for document in servers.client[name]["accounts"].find()] == ["did:a"]
        assert load_config(tmp_path / "new" / "mediator.yaml").storage.mongodb.uri == servers.uri(name)
        assert sorted(os.listdir(tmp_path / "new")) == ["keys.jwks", "log.key", "mediator.yaml", "secret", "token"]


@pytest.mark.parametrize("command", ["export", "backup"])
def test_nothing_to_read(command: str, tmp_path: Path, capsys: Capture) -> None:
    """A store that was never opened, or is in memory: one line and no file."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    path = tmp_path / "m" / "mediator.yaml"
    for backend, error in (
        ("sqlite", "the daemon creates it when it first starts"),
        ("memory", "storage.backend memory cannot be exported"),
    ):
        path.write_text(path.read_text().replace("backend: sqlite", f"backend: {backend}"))
        assert call(command, "--config", str(path), "--to", str(tmp_path / "x")) == 1
        assert error in one_line(capsys)
    assert os.listdir(tmp_path) == ["m"]


def test_wrong_usage(backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """Exit status 2 and one line."""
    for arguments in (
        ["restore", "--from", str(backup)],
        ["restore", "--from", str(backup), "--dir", str(tmp_path), "--config", str(tmp_path / "x")],
        ["restore", "--from", str(tmp_path / "none"), "--dir", str(tmp_path)],
        ["export", "--to", str(tmp_path / "x")],
    ):
        assert call(*arguments) == 2
        one_line(capsys)
