"""Export and import between SQLite files: records and query results are the same."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import closing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred

from mediatord.backup.archive import CountMismatchError, import_archive, verify_archive, write_archive
from mediatord.backup.mongo_records import ImportBatch
from mediatord.backup.records import (
    RECORD_KINDS,
    AccountRecord,
    BackupError,
    DeviceRecord,
    MessageRecord,
    RecipientRecord,
    RetiredDIDRecord,
    StoreRecord,
    V1ConnectionRecord,
    WakeupRecord,
    encode_record,
)
from mediatord.backup.sqlite_records import make_import_path, open_sqlite_source, open_sqlite_target
from mediatord.store.interfaces.devices import WakeupClaim, WakeupRequest
from mediatord.store.interfaces.messages import MessageLedger, StoreLedger
from mediatord.store.sqlite import account_queries
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.backup.populated_store import (
    V1_WALLETS,
    WAKEUP_POLICY,
    WALLETS,
    StorePopulator,
    query_devices,
    query_everything,
    query_v1_connections,
)
from tests.cli.test_commands import Capture, call, one_line
from tests.store.builders import ImmediateClock, make_sqlite_store, result_of

ROUNDS = 6


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that waits for nothing."""
    results: list[Any] = []
    Deferred.fromCoroutine(work).addCallback(results.append)
    return results.pop()


def open_store(clock: ImmediateClock, path: Path) -> SQLiteStore:
    """A store as a daemon opens it."""
    store = make_sqlite_store(clock, path)
    store.open()
    return store


async def fill_store(store: SQLiteStore, seed: int, now: float) -> None:
    """Fill a store with data of all kinds."""
    populator = StorePopulator(store, Random(seed), now)
    await populator.fill(ROUNDS)
    await populator.register_devices()
    await populator.connect_v1_wallets()


def export_records(path: Path, archive: Path) -> list[StoreRecord]:
    """The records of a store."""
    with open_sqlite_source(path) as source:
        write_archive(archive, source.backend, source.records())
    return [record for record, _ in verify_archive(archive).records()]


@pytest.mark.exhaustive
@settings(max_examples=15)
@given(st.integers(0, 1 << 32))
def test_same_results_after_any_history(seed: int) -> None:
    """After random operations the results are the same, also once delayed messages are due and others expired."""
    folder = Path(mkdtemp(prefix="mediatord-transfer-"))
    try:
        clock = ImmediateClock()
        one, other = folder / "one.sqlite3", folder / "other.sqlite3"
        store = open_store(clock, one)
        run(fill_store(store, seed, clock.seconds()))
        store.close()
        records = export_records(one, folder / "a.gz")
        with open_sqlite_target(other) as target:
            import_archive(verify_archive(folder / "a.gz"), target)
        assert export_records(other, folder / "b.gz") == records
        stores = [open_store(clock, one), open_store(clock, other)]
        halves = [len([record for record in records if record.kind == kind]) for kind in ("message", "pending_event")]
        accepted = StoreLedger(*[MessageLedger(accepted=number, waiting=number) for number in halves])
        assert result_of(stores[1].read_ledger()) == accepted
        for seconds in (0.0, 601.0, 7200.0):
            clock.advance(seconds)
            results = [
                run(query_everything(store)) | run(query_devices(store)) | run(query_v1_connections(store))
                for store in stores
            ]
            assert results[0] == results[1]
            removed = [result_of(store.expire_messages(1000)) for store in stores]
            assert removed[0] == removed[1]
            due = [result_of(store.take_due_messages(1000)) for store in stores]
            assert due[0] == due[1]
            ledgers = [result_of(store.read_ledger()) for store in stores]
            assert [(ledger.didcomm.difference, ledger.decentrl.difference) for ledger in ledgers] == [(0, 0), (0, 0)]
        for store in stores:
            store.close()
    finally:
        rmtree(folder)


def test_devices_survive(tmp_path: Path) -> None:
    """Devices, polls and wake-ups of both protocols are the same after an export and import; claims are not kept."""
    clock = ImmediateClock()
    one, other = tmp_path / "one.sqlite3", tmp_path / "other.sqlite3"
    store = open_store(clock, one)
    run(fill_store(store, 1, clock.seconds()))
    store.close()
    records = export_records(one, tmp_path / "a.gz")
    devices = [record for record in records if isinstance(record, DeviceRecord)]
    wakeups = [record for record in records if isinstance(record, WakeupRecord)]
    assert [sum(one.account is None for one in some) for some in (devices, wakeups)] == [6, 3]
    assert [sum(one.identity is None for one in some) for some in (devices, wakeups)] == [8, 3]
    assert any(one.woken_at is None for one in wakeups) and any(one.woken_at for one in wakeups)
    with open_sqlite_target(other) as target:
        counts = import_archive(verify_archive(tmp_path / "a.gz"), target)
    assert (counts["device"], counts["wakeup"]) == (14, 6)
    assert export_records(other, tmp_path / "b.gz") == records
    stores = [open_store(clock, one), open_store(clock, other)]
    results = [run(query_devices(store)) for store in stores]
    assert results[0] == results[1] and results[0]["devices"] == {"apns": 5, "fcm": 5, "web_push": 4}
    clock.advance(60.0)
    request = WakeupRequest(WALLETS[0])
    decisions = [result_of(store.devices.claim_wakeups([request], WAKEUP_POLICY)) for store in stores]
    assert [type(one) for (one,) in decisions] == [float, WakeupClaim]
    for store in stores:
        store.close()


def test_v1_connections_survive(tmp_path: Path) -> None:
    """Connections of DIDComm v1 are the same after an export and import, also in whether they have an account."""
    clock = ImmediateClock()
    one, other = tmp_path / "one.sqlite3", tmp_path / "other.sqlite3"
    store = open_store(clock, one)
    run(fill_store(store, 1, clock.seconds()))
    store.close()
    records = export_records(one, tmp_path / "a.gz")
    found = [record for record in records if isinstance(record, V1ConnectionRecord)]
    assert [record.wallet for record in found] == sorted(V1_WALLETS)
    assert [record.routing_keys for record in found].count(()) == 3
    with open_sqlite_target(other) as target:
        counts = import_archive(verify_archive(tmp_path / "a.gz"), target)
    assert counts["v1_connection"] == len(V1_WALLETS)
    assert export_records(other, tmp_path / "b.gz") == records
    stores = [open_store(clock, one), open_store(clock, other)]
    results = [run(query_v1_connections(store)) for store in stores]
    assert results[0] == results[1] and results[0]["v1 numbers"] == (2, 4)
    bytes_of_registrations = [result_of(store.get_account_usage()).bytes for store in stores]
    for store in stores:
        for wallet in V1_WALLETS:
            result_of(store.v1_connections.remove_connection(wallet))
        assert result_of(store.v1_connections.count_connections()) == (0, 0)
    smaller = [result_of(store.get_account_usage()).bytes for store in stores]
    assert bytes_of_registrations[0] - smaller[0] == bytes_of_registrations[1] - smaller[1] > 0
    for store in stores:
        store.close()


def test_connections_of_one_key(tmp_path: Path) -> None:
    """Two connections with one key of the mediator, which only the store can detect, are refused in one line."""
    known: dict[str, Any] = {
        "own_key": "did:key:z6MkOwn",
        "request_id": "request",
        "endpoint": None,
        "routing_keys": (),
        "has_base58_keys": False,
        "implicit_pickup": "unknown",
        "created_at": 1.0,
    }
    records: list[StoreRecord] = [V1ConnectionRecord(wallet=wallet, **known) for wallet in V1_WALLETS[:2]]
    write_archive(tmp_path / "a.gz", "sqlite", records)
    with pytest.raises(BackupError, match=f"the DIDComm v1 connection of {V1_WALLETS[1]} has a key"):
        with open_sqlite_target(tmp_path / "s.sqlite3") as target:
            import_archive(verify_archive(tmp_path / "a.gz"), target)
    assert not (tmp_path / "s.sqlite3").exists()


@pytest.mark.parametrize(("version", "missing"), [(1, ["device", "wakeup", "v1_connection"]), (2, ["v1_connection"])])
def test_imports_archive_of_earlier_version(tmp_path: Path, version: int, missing: list[str]) -> None:
    """An archive of a version before there were some kinds of records is imported, and has none of them."""
    account = AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False)
    lines = [b'{"kind":"header","format":"mediatord-store","version":%d}\n' % version, encode_record(account)]
    kinds = [kind for kind in RECORD_KINDS if kind not in missing]
    digests = {kind: {"count": 0, "sha256": sha256().hexdigest()} for kind in kinds}
    digests["account"] = {"count": 1, "sha256": sha256(lines[1]).hexdigest()}
    trailer = {"kind": "trailer", "records": digests, "header_sha256": sha256(lines[0]).hexdigest()}
    archive, store = tmp_path / "a.gz", tmp_path / "s.sqlite3"
    archive.write_bytes(gzip.compress(b"".join([*lines, json.dumps(trailer, separators=(",", ":")).encode(), b"\n"])))
    with open_sqlite_target(store) as target:
        counts = import_archive(verify_archive(archive), target)
    assert {kind: number for kind, number in counts.items() if number} == {"account": 1}
    assert [counts[kind] for kind in missing] == [0] * len(missing)


def test_export_is_a_snapshot(tmp_path: Path) -> None:
    """An export has the data of its start."""
    clock = ImmediateClock()
    store = open_store(clock, tmp_path / "s.sqlite3")
    store.grant("did:before")
    with open_sqlite_source(tmp_path / "s.sqlite3") as source:
        store.grant("did:after")
        assert [record.did for record in source.records() if isinstance(record, AccountRecord)] == ["did:before"]
        assert source.counts()["account"] == 1
    store.close()


def test_refuses_other_database(tmp_path: Path) -> None:
    """A database of another version or program is refused and unchanged."""
    path = tmp_path / "s.sqlite3"
    open_database(path, None).close()
    for pragma, error in (
        ("user_version = 99", "version 99"),
        ("application_id = 1", "is not a mediatord database"),
    ):
        with closing(connect(path)) as connection:
            connection.execute(f"PRAGMA {pragma}")
        with pytest.raises(BackupError, match=error), open_sqlite_source(path):
            pass
        with pytest.raises(BackupError, match=error), open_sqlite_target(path) as target:
            target.begin("archive")


def test_counts_that_differ(tmp_path: Path, capsys: Capture) -> None:
    """Exit status 1 and the table of counts; the store is unchanged, and no daemon finds unfinished data."""
    assert call("init", "--dir", str(tmp_path)) == 0
    capsys.readouterr()
    archive, path = tmp_path / "a.gz", tmp_path / "mediator.sqlite3"
    write_archive(archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False)])
    read = verify_archive(archive)
    with open_sqlite_target(path) as target:
        target.begin(read.id)
        target.connection.execute("INSERT INTO retired VALUES ('did:lost')")
    assert call("import", "--config", str(tmp_path / "mediator.yaml"), "--from", str(archive)) == 1
    output = capsys.readouterr()
    assert "retired DIDs                  0      1  differs" in output.out
    assert (
        output.err.startswith("mediatord: import incomplete: the store has 1 retired DIDs (expected 0)")
        and output.err.count("\n") == 1
    )
    assert not path.exists() and make_import_path(path).exists()
    with open_sqlite_target(path) as target, pytest.raises(CountMismatchError):
        import_archive(read, target)


def test_duplicate_ids(tmp_path: Path) -> None:
    """Two records with one id, which only the store can detect, are refused, and no daemon finds them."""
    message: dict[str, Any] = {
        "account": 1,
        "recipient": 1,
        "form": "json",
        "received_at": 1.0,
        "expires_at": 2.0,
        "pushes": 0,
    }
    records: list[StoreRecord] = [
        AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False),
        RecipientRecord(number=1, account=1, did="did:key:z", place=1),
        *[MessageRecord(id="twice", **message, due_at=None, arrived_at=1.0, payload=b"") for _ in range(2)],
    ]
    write_archive(tmp_path / "a.gz", "sqlite", records)
    with pytest.raises(BackupError, match="UNIQUE"), open_sqlite_target(tmp_path / "s.sqlite3") as target:
        import_archive(verify_archive(tmp_path / "a.gz"), target)
    assert not (tmp_path / "s.sqlite3").exists()


def test_archive_of_earlier_version(tmp_path: Path) -> None:
    """
    Accounts get the canonical forms of their DIDs and count as seen now; two with the same form are both refused.
    """
    archive, path = tmp_path / "a.gz", tmp_path / "s.sqlite3"
    records: list[StoreRecord] = [
        AccountRecord(number=1, did="did:web:Wallet.example%3A443", created_at=1.0, draft03=False),
        RetiredDIDRecord(did="did:web:Gone.example"),
    ]
    began = datetime.now(UTC).timestamp()
    write_archive(archive, "sqlite", records)
    with open_sqlite_target(path) as target:
        import_archive(verify_archive(archive), target)
    with closing(connect(path)) as connection:
        account = account_queries.get_account(connection, "did:web:wallet.example")
        assert account is not None and account.seen_at >= began
        assert account_queries.is_retired(connection, "did:web:gone.example")
    more = AccountRecord(number=2, did="did:web:wallet.example", created_at=2.0, draft03=False)
    write_archive(tmp_path / "b.gz", "sqlite", [records[0], more])
    with pytest.raises(BackupError, match="account 2 has a DID that another account has"):
        with open_sqlite_target(tmp_path / "t.sqlite3") as target:
            import_archive(verify_archive(tmp_path / "b.gz"), target)
    document = ImportBatch(1, records).documents
    assert document["accounts"][0]["did"] == "did:web:wallet.example" and document["accounts"][0]["seen_at"] >= began
    assert document["retired_dids"] == [{"_id": "did:web:gone.example"}]


def test_target_that_cannot_be_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the finished file cannot be placed, the same command continues or starts again."""
    path, archive = tmp_path / "s.sqlite3", tmp_path / "a.gz"
    write_archive(archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False)])

    def fail_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mediatord.backup.sqlite_records.install_database", fail_full)
        with pytest.raises(OSError, match="No space"), open_sqlite_target(path) as target:
            import_archive(verify_archive(archive), target)
    assert not path.exists()
    with open_sqlite_target(path) as target:
        assert import_archive(verify_archive(archive), target)["account"] == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.gz", "s.sqlite3", "s.sqlite3.lock"]


def test_missing_lock_does_not_prevent_import(tmp_path: Path) -> None:
    """If the lock cannot be created the import goes on."""
    (tmp_path / "s.sqlite3.lock").symlink_to("elsewhere")
    with (
        pytest.raises(BackupError, match="Too many levels of symbolic links$"),
        open_sqlite_target(tmp_path / "s.sqlite3"),
    ):
        pass


def test_damaged_store(tmp_path: Path) -> None:
    """A message without owner is reported in one line."""
    path = tmp_path / "s.sqlite3"
    with closing(open_database(path, None)) as connection:
        connection.execute("INSERT INTO account (did, created_at) VALUES ('did:a', 1.0)")
        connection.execute("INSERT INTO recipient (account_id, did, registered) VALUES (1, 'did:r', 1)")
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("DELETE FROM account")
    with pytest.raises(BackupError, match="damaged"):
        export_records(path, tmp_path / "a.gz")


def test_missing_directory(tmp_path: Path, capsys: Capture) -> None:
    """A missing directory is reported in one line."""
    assert call("init", "--dir", str(tmp_path)) == 0
    text = (tmp_path / "mediator.yaml").read_text().replace("path: mediator.sqlite3", "path: data/mediator.sqlite3")
    (tmp_path / "mediator.yaml").write_text(text)
    capsys.readouterr()
    write_archive(tmp_path / "a.gz", "sqlite", [])
    assert call("import", "--config", str(tmp_path / "mediator.yaml"), "--from", str(tmp_path / "a.gz")) == 1
    assert "data does not exist" in one_line(capsys)


# The program, with progress bars also for work that takes less than a second.
SHOW_BAR_AT_ONCE = """
from mediatord.runtime.progress_bar import progress_bar

progress_bar.__wrapped__.__kwdefaults__["delay"] = 0
import mediatord.__main__
"""


def test_progress_bar_on_terminal(tmp_path: Path) -> None:
    """The progress bar is on standard error, the result on standard output."""
    assert call("init", "--dir", str(tmp_path)) == 0
    records: list[StoreRecord] = [
        AccountRecord(number=number, did=f"did:{number}", created_at=1.0, draft03=False) for number in range(1, 2001)
    ]
    write_archive(tmp_path / "a.gz", "sqlite", records)
    controller, terminal = pty.openpty()
    arguments = ["import", "--config", str(tmp_path / "mediator.yaml"), "--from", str(tmp_path / "a.gz"), "--json"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", SHOW_BAR_AT_ONCE, *arguments], stderr=terminal, stdout=subprocess.PIPE, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while some := os.read(controller, 4096):
                shown += some
        except OSError:  # read errors of a terminal whose other side is closed
            pass
        output = process.communicate()[0]
    os.close(controller)
    assert process.returncode == 0 and output.startswith(b'{"archive"')
    assert b"importing" in shown and b"100%" in shown
