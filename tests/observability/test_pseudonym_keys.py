"""Pseudonym keys and their epochs: creation, rotation, deletion (analytics contract 2.6)."""

from __future__ import annotations

import errno
import json
import os
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import formatEvent
from twisted.logger._capture import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.daemon import build_daemon
from mediatord.app.pseudonym_key_rotation import to_utc_day
from mediatord.observability.pseudonyms import (
    Pseudonymizer,
    create_pseudonym_key,
    delete_epoch_key,
    load_pseudonym_key,
    read_pseudonym_keys,
    renew_pseudonym_key,
    start_key_epoch,
)
from mediatord.runtime.secret_files import SecretFileError
from tests.cli.test_commands import call, one_line
from tests.in_memory_mediator import NOW, InMemoryMediator, InMemoryWallet, pack_forward
from tests.observability.counter_oracle import read_lines

TODAY = date(2026, 11, 21)
DID = "did:web:alice.example"


def set_age(path: Path, days: int) -> None:
    """Set the age of a file, in days."""
    moment = (TODAY - date(1970, 1, 1)).days * 86_400 - days * 86_400
    os.utime(path, (moment, moment))


def test_single_key(tmp_path: Path) -> None:
    """A single key is as old as its file, which is unchanged until it expires."""
    path = tmp_path / "log.key"
    first = create_pseudonym_key(path)
    content = path.read_bytes()
    set_age(path, 89)
    assert renew_pseudonym_key(path, TODAY, 90, pytest.fail).secret == first.secret
    set_age(path, 1000)
    assert renew_pseudonym_key(path, TODAY, 0, pytest.fail).epoch == 1
    assert path.read_bytes() == content


def test_rotation(tmp_path: Path) -> None:
    """After its period a key is replaced by another one; old keys stay in the file, readable by its owner only."""
    path = tmp_path / "log.key"
    first = create_pseudonym_key(path)
    set_age(path, 90)
    second = renew_pseudonym_key(path, TODAY, 90, pytest.fail)
    assert (second.epoch, second.since) == (2, TODAY)
    assert second.secret != first.secret
    assert (
        renew_pseudonym_key(path, TODAY + timedelta(days=89), 90, pytest.fail) == second == load_pseudonym_key(path)
    )
    third = renew_pseudonym_key(path, TODAY + timedelta(days=90), 90, pytest.fail)
    assert [(key.epoch, key.since) for key in read_pseudonym_keys(path)] == [
        (1, TODAY - timedelta(days=90)),
        (2, TODAY),
        (3, third.since),
    ]
    assert read_pseudonym_keys(path)[0].secret == first.secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["log.key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner(tmp_path: Path) -> None:
    """A file that root rotates stays readable for the daemon."""
    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    os.chown(path, 12345, 23456)
    start_key_epoch(path, TODAY)
    assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (12345, 23456, 0o600)


def test_read_only_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing can be written, as under systemd, the daemon continues with the present key."""

    def read_only(path: Path, content: bytes) -> None:
        raise SecretFileError(f"cannot write {path}: Read-only file system")

    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    set_age(path, 500)
    monkeypatch.setattr("mediatord.observability.pseudonyms.replace_secret_file", read_only)
    failures: list[str] = []
    assert renew_pseudonym_key(path, TODAY, 90, failures.append).epoch == 1
    (failure,) = failures
    assert "Read-only file system" in failure


def test_clock_set_back(tmp_path: Path) -> None:
    """A key from tomorrow is valid; one from far in the future is replaced in time."""
    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    start_key_epoch(path, TODAY)
    assert renew_pseudonym_key(path, TODAY - timedelta(days=89), 90, pytest.fail).epoch == 2
    assert renew_pseudonym_key(path, TODAY - timedelta(days=400), 90, pytest.fail).epoch == 3


def test_lock_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file cannot be locked, as on some network file systems, the daemon continues with the present key."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    monkeypatch.setattr("mediatord.runtime.secret_files.fcntl.flock", refuse)
    with pytest.raises(SecretFileError, match="cannot lock .*: No locks available"):
        start_key_epoch(path, TODAY)
    failures: list[str] = []
    assert renew_pseudonym_key(path, TODAY + timedelta(days=500), 90, failures.append).epoch == 1
    (failure,) = failures
    assert "cannot lock" in failure


def test_inaccessible_path(tmp_path: Path) -> None:
    """An inaccessible path is a one-line error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretFileError, match="File name too long"):
        load_pseudonym_key(tmp_path / ("x" * 300) / "log.key")


def test_forget(tmp_path: Path) -> None:
    """A former key can be deleted, the current one cannot; epoch numbers are never reused."""
    path = tmp_path / "log.key"
    create_pseudonym_key(path)
    with pytest.raises(SecretFileError, match="in use"):
        delete_epoch_key(path, 1)
    start_key_epoch(path, TODAY)
    delete_epoch_key(path, 1)
    assert [key.epoch for key in read_pseudonym_keys(path)] == [2]
    with pytest.raises(SecretFileError, match="no key of epoch 1"):
        delete_epoch_key(path, 1)
    assert start_key_epoch(path, TODAY).epoch == 3


@pytest.mark.parametrize(
    "value",
    [{"keys": []}, {"keys": [{"epoch": 1}]}, {"keys": 7}, [], {"keys": [{"epoch": 1, "key": "00" * 32}] * 2}, "keys"],
)
def test_invalid_file(value: Any, tmp_path: Path) -> None:
    """An invalid list of keys is refused in one line."""
    path = tmp_path / "log.key"
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    with pytest.raises(SecretFileError, match="is not a key file"):
        read_pseudonym_keys(path)


class KeyEpochTests(SynchronousTestCase):
    """A daemon over months."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, log={"dids": "keyed", "key_days": 2})
        self.path = self.in_memory.config.identity.keys.with_name("log.key")
        self.epochs = self.in_memory.base.key_rotation
        self.epochs.startService()
        self.addCleanup(self.epochs.stopService)

    def advance_days(self, number: int) -> None:
        """Advance by days, hour by hour."""
        self.in_memory.clock.pump([3600.0] * (24 * number))

    def test_rotation_at_midnight(self) -> None:
        """After two days pseudonyms use another key, in a new segment."""
        before = self.in_memory.base.recorder
        before.record_grant(DID, "didcomm")
        self.advance_days(3)
        self.in_memory.base.recorder.record_grant(DID, "didcomm")
        lines = [line for line in self.in_memory.events("acct.grant")]
        self.assertEqual([line["epoch"] for line in lines], [1, 2])
        keys = read_pseudonym_keys(self.path)
        self.assertEqual([line["did"] for line in lines], [Pseudonymizer("keyed", key).did(DID) for key in keys])
        self.assertEqual([key.since for key in keys], [to_utc_day(NOW), to_utc_day(NOW) + timedelta(days=2)])
        opened = {line["segment"]: line["epoch"] for line in self.in_memory.events("log.open")}
        self.assertEqual(sorted(opened.values())[0], 1)
        all_lines = read_lines(self.in_memory.config.log.directory)
        self.assertEqual([line["seq"] for line in all_lines], list(range(1, len(all_lines) + 1)))

    def test_metric_label(self) -> None:
        """The label of the queue size changes too."""
        bob = InMemoryWallet(self.in_memory).enrol()
        self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.make_payload()))
        start_key_epoch(self.path, to_utc_day(NOW))
        self.epochs.rotate_if_due()
        self.in_memory.base.recorder.metrics.set_queue_sizes([(bob.did, 1)], 0)
        tag = Pseudonymizer("keyed", load_pseudonym_key(self.path)).did(bob.did)
        self.assertEqual(self.in_memory.counter("mediator_message_queue_size", did=tag), 1)

    def test_reload(self) -> None:
        """A key added by the operator is used after SIGHUP."""
        start_key_epoch(self.path, to_utc_day(NOW))
        self.in_memory.base.reloader.reload(lambda: self.in_memory.config)
        self.assertEqual(self.in_memory.events("log.open")[-1]["epoch"], 2)

    def logged_line(self) -> str:
        """The one line logged when the key file is read."""
        with capturedLogs() as log_events:
            self.epochs.rotate_if_due()
        (event,) = log_events
        return formatEvent(event)

    def test_unusable_file(self) -> None:
        """An unusable file is logged, and the key stays."""
        self.path.chmod(0o644)
        self.assertIn("accessible to other users", self.logged_line())
        self.assertEqual(self.in_memory.base.events._origin.epoch, 1)

    def test_missing_file(self) -> None:
        """A running daemon does not create a key that it would not use."""
        self.path.unlink()
        self.assertIn("keeping the current pseudonym key", self.logged_line())
        self.assertFalse(self.path.exists())

    def test_other_key_of_same_epoch(self) -> None:
        """It is logged and not used: pseudonyms of both could not be told apart."""
        before = self.in_memory.base.recorder._pseudonymizer.did(DID)
        self.path.unlink()
        create_pseudonym_key(self.path)
        os.utime(self.path, (NOW, NOW))
        self.assertIn("a different key for epoch 1", self.logged_line())
        self.assertEqual(self.in_memory.base.recorder._pseudonymizer.did(DID), before)

    def test_connection_closed_in_later_epoch(self) -> None:
        """A connection that outlives a key ends with a pseudonym of the later epoch."""
        recorder = self.in_memory.base.recorder
        recorder.record_connection_opened("c", "192.0.2.1")
        recorder.record_connection_authenticated("didcomm", "c", DID)
        key = start_key_epoch(self.path, to_utc_day(NOW))
        self.epochs.rotate_if_due()
        recorder.record_connection_closed("c", "didcomm", 1000, "peer", (0, 0), (0, 0))
        (closed,) = self.in_memory.events("conn.close")
        self.assertEqual((closed["epoch"], closed["did"]), (2, Pseudonymizer("keyed", key).did(DID)))

    def test_failing_check(self) -> None:
        """After a failure the check is repeated the next day; reload and rotation continue."""

        def fail() -> int:
            raise ZeroDivisionError

        self.patch(self.epochs, "_epoch_days", fail)
        self.in_memory.base.recorder.record_grant("did:web:a", "didcomm")
        self.in_memory.base.reloader.reload(lambda: self.in_memory.config)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(len(self.in_memory.events("log.open")), 2)
        for _ in range(2):
            with self.assertRaises(ZeroDivisionError):  # which the reactor would have caught
                self.advance_days(2)


def test_rotation_at_start(tmp_path: Path) -> None:
    """A daemon begins a new epoch at start if the present one is over, and all its lines say so."""
    test = SynchronousTestCase()
    in_memory = InMemoryMediator(test)
    path = in_memory.config.identity.keys.with_name("log.key")
    os.utime(path, (NOW - 91 * 86_400, NOW - 91 * 86_400))
    clock = MemoryReactorClock()
    clock.advance(NOW)
    build_daemon(clock, in_memory.config.model_copy(update={"node": "other"}), give_up=print)
    assert [key.epoch for key in read_pseudonym_keys(path)] == [1, 2]
    test.doCleanups()


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are listed, rotated and forgotten; errors are one line and status 1."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    config = ["--config", str(tmp_path / "m" / "mediator.yaml")]
    capsys.readouterr()
    assert call("log-keys", "rotate", *config) == 0
    assert call("log-keys", "list", *config) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["1", "2"]
    assert call("log-keys", "forget", "2", *config) == 1
    assert "in use" in one_line(capsys)
    assert call("log-keys", "forget", "1", *config) == 0
    capsys.readouterr()
    assert call("log-keys", "list", *config) == 0
    assert capsys.readouterr().out.startswith("2  since 20")


def test_commands_print_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    config = ["--config", str(tmp_path / "m" / "mediator.yaml"), "--json"]
    capsys.readouterr()

    def run(*arguments: str) -> dict[str, Any]:
        assert call("log-keys", *arguments, *config) == 0
        value: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert value["file"] == str(tmp_path / "m" / "log.key")
        return value

    rotated = run("rotate")
    assert rotated["epoch"] == 2
    epochs = run("list")["epochs"]
    assert [one["epoch"] for one in epochs] == [1, 2]
    assert epochs[1]["since"] == rotated["since"]
    assert run("forget", "1")["epoch"] == 1
