"""A killed import is continued by the same command, without duplicates or omissions."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mediatord.backup.archive import verify_archive, write_archive
from mediatord.backup.records import (
    AccountRecord,
    MessageRecord,
    NonceRecord,
    RecipientRecord,
    StoreRecord,
    open_record_source,
)
from mediatord.config.file import load_config
from tests.cli.test_commands import Capture, call, one_line
from tests.mongod import fresh_database, shared_replica_set

MESSAGES = 2_600


def make_records() -> Iterator[StoreRecord]:
    """More records than one batch has."""
    yield AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False, seen_at=2.0)
    for number in (1, 2):
        yield RecipientRecord(number=number, account=1, did=f"did:key:{number}", place=number)
    for number in range(MESSAGES):
        yield MessageRecord(
            id=f"{number:08d}",
            account=1,
            recipient=1 + number % 2,
            form="json",
            received_at=1.0,
            expires_at=4e9,
            due_at=None,
            arrived_at=1.0,
            pushes=0,
            payload=b"x" * (number % 50),
        )
    yield NonceRecord(key=b"nonce", until=2.0)


@pytest.fixture(params=["sqlite", "mongodb"])
def config(request: pytest.FixtureRequest, tmp_path: Path, capsys: Capture) -> Iterator[Path]:
    """Configuration of a mediator with an empty store."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    path = tmp_path / "m" / "mediator.yaml"
    capsys.readouterr()
    if request.param == "sqlite":
        yield path
        return
    servers = shared_replica_set()
    with fresh_database(servers) as name:
        text = path.read_text().replace("backend: sqlite", "backend: mongodb")
        path.write_text(text.replace("mongodb://127.0.0.1:27017/mediatord", servers.uri(name)))
        assert load_config(path).storage.mongodb.uri == servers.uri(name)
        yield path


def run_and_kill(archive: Path, config: Path, phase: str, batches: int) -> None:
    arguments = [str(archive), str(config), phase, str(batches)]
    ended = subprocess.run([sys.executable, "-m", "tests.backup.import_killer", *arguments], check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.exhaustive
def test_continues_after_kills(config: Path, tmp_path: Path, capsys: Capture) -> None:
    """After kills between batches and within one the store has all records of the archive."""
    archive = tmp_path / "a.gz"
    write_archive(archive, "sqlite", make_records())
    for phase, batches in (("committed", 0), ("writing", 0), ("committed", 2), ("writing", 1), ("committed", 1)):
        run_and_kill(archive, config, phase, batches)
    assert call("import", "--config", str(config), "--from", str(archive), "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["equal"] and output["store"]["message"] == MESSAGES
    other_archive = tmp_path / "b.gz"
    with open_record_source(load_config(config).storage) as store:
        write_archive(other_archive, store.backend, store.records())
    assert [one for one, _ in verify_archive(other_archive).records()] == list(make_records())
    read_counts(config)
    assert call("import", "--config", str(config), "--from", str(archive)) == 1
    assert "is not empty (1 accounts, 2 recipient DIDs, 2600 messages, 1 nonces)" in one_line(capsys)


def read_counts(config: Path) -> None:
    """Derived counts are those of each record once."""
    sizes = [sum(number % 50 for number in range(MESSAGES) if number % 2 == rest) for rest in (0, 1)]
    storage = load_config(config).storage
    if storage.backend == "sqlite":
        with closing(sqlite3.connect(storage.sqlite.path)) as connection:
            queues = connection.execute("SELECT messages, bytes FROM queue ORDER BY recipient_id").fetchall()
            assert queues == [(MESSAGES // 2, sizes[0]), (MESSAGES // 2, sizes[1])]
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("SELECT value FROM counter WHERE name = 'nonces'").fetchall() == [(1,)]
        assert sorted(path.name for path in config.parent.iterdir() if "sqlite" in path.name) == [
            "mediator.sqlite3",
            "mediator.sqlite3.lock",
        ]
    else:
        database = shared_replica_set().client[storage.mongodb.uri.rpartition("/")[2].partition("?")[0]]
        found = [
            (document["messages"], document["bytes"]) for document in database["recipients"].find().sort("_id", 1)
        ]
        assert found == [(MESSAGES // 2, sizes[0]), (MESSAGES // 2, sizes[1])]
        assert [(document["recipients"], document["places"]) for document in database["accounts"].find()] == [(2, 2)]


def test_unfinished_import_blocks_others(config: Path, tmp_path: Path, capsys: Capture) -> None:
    """Until the import is finished another archive is refused, and an export too, where that can be seen."""
    archive, other = tmp_path / "a.gz", tmp_path / "b.gz"
    write_archive(archive, "sqlite", make_records())
    write_archive(other, "sqlite", list(make_records())[:-1])
    run_and_kill(archive, config, "committed", 1)
    assert call("import", "--config", str(config), "--from", str(other)) == 1
    assert "an import of another archive into" in one_line(capsys)
    assert call("export", "--config", str(config), "--to", str(tmp_path / "c.gz")) == 1
    one_line(capsys)
    assert not (tmp_path / "c.gz").exists()
