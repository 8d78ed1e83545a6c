"""`mediatord check-config`: everything that is wrong at once, in the configuration and in what it names."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from mediatord.cli.check_config import _explain_unwritable
from mediatord.store.sqlite.database_file import open_database
from tests.certificate_authority import CertificateAuthority
from tests.cli.test_commands import Capture, call, made

__all__ = ["made"]


def problems(path: Path, status: int, capsys: Capture) -> list[tuple[int, str, str]]:
    """What is complained of: line, key and the rest."""
    assert call("check-config", "--config", str(path)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    found = []
    for line in captured.err.splitlines():
        place, key, text = line.split(": ", 2)
        file, _, number = place.rpartition(":")
        assert file == str(path)
        found.append((int(number), key, text))
    return found


def change(path: Path, *changes: tuple[str, str]) -> None:
    """Write other lines into a configuration that init has made."""
    text = path.read_text("utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text, "utf-8")


def line_of(path: Path, key: str) -> int:
    """Where the only line of this key is."""
    (number,) = [n for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.lstrip().startswith(key)]
    return number


def test_good(made: Path, capsys: Capture) -> None:
    """A good configuration is said to be one, and nothing is made by looking."""
    before = sorted(made.parent.iterdir())
    assert call("check-config", "--config", str(made)) == 0
    assert capsys.readouterr().out == f"{made}: ok\n"
    assert call("check-config", "--config", str(made), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(made), "ok": True, "problems": []}
    assert sorted(made.parent.iterdir()) == before


def test_five_mistakes_are_five_lines(made: Path, capsys: Capture) -> None:
    """Each mistake has its line, in the order of the file, and none hides another."""
    change(
        made,
        ("listen: ['tcp:8080:interface=127.0.0.1']", "listen: ['tcp:8080:interface=127.0.0.1', nowhere]"),
        ("drain_timeout: 8s", "drain_timeout: 30s"),
        ("backend: sqlite", "backend: postgres"),
        ("  ttl: 72h", "  ttl: soon"),
        ("workers: 1", "wrokers: 2"),
    )
    found = problems(made, 2, capsys)
    assert [(key, text.split(";")[0]) for _, key, text in found] == [
        ("listen[1]", "expected a Twisted endpoint string such as tcp:8080:interface=127.0.0.1"),
        ("drain_timeout", "expected less than 10"),
        ("storage.backend", "expected one of 'memory', 'sqlite' or 'mongodb'"),
        ("queue.ttl", "expected a duration such as 72h, 60s, 500ms or a number of seconds"),
        ("wrokers", "unknown key"),
    ]
    assert [line for line, _, _ in found] == [
        line_of(made, key) for key in ("listen: ['tcp", "drain_timeout", "backend", "ttl", "wrokers")
    ]


def test_mistakes_do_not_hide_what_is_around(made: Path, capsys: Capture) -> None:
    """Files are looked at in the same run, but for those that a mistake is about."""
    change(made, ("  ttl: 72h", "  ttl: soon"), ("directory: log", "directory: [log]"))
    (made.parent / "keys.jwks").chmod(0o644)
    (made.parent / "log").write_text("")
    assert problems(made, 2, capsys) == [
        (
            line_of(made, "keys:"),
            "identity.keys",
            f"{made.parent}/keys.jwks is accessible to other users (mode 0644); "
            f"run: chmod 600 {made.parent}/keys.jwks",
        ),
        (line_of(made, "ttl"), "queue.ttl", "expected a duration such as 72h, 60s, 500ms or a number of seconds"),
        (line_of(made, "directory"), "log.directory", "expected a path"),
    ]


def test_all_that_is_around(made: Path, capsys: Capture) -> None:
    """Five things that the configuration names are not right: five lines, and the status of an environment."""
    folder = made.parent
    change(
        made,
        ("  path: mediator.sqlite3", "  path: gone/mediator.sqlite3"),
        ("directory: log", "directory: keys.jwks"),
        ("  token_file: null", "  token_file: token"),
    )
    head, _, tail = made.read_text("utf-8").partition("\nadmin:")
    tail = tail.replace("listen: null", "listen: tcp:9090:interface=127.0.0.1", 1)
    made.write_text(f"{head}\nadmin:{tail}", "utf-8")
    (folder / "keys.jwks").chmod(0o640)
    (folder / "log.key").chmod(0o604)
    (folder / "token").write_text("short")
    (folder / "token").chmod(0o600)
    found = problems(made, 1, capsys)
    assert [(key, words.partition(";")[0].replace(str(folder), "")) for _, key, words in found] == [
        ("identity.keys", "/keys.jwks is accessible to other users (mode 0640)"),
        ("identity.keys", "/log.key is accessible to other users (mode 0604)"),
        ("storage.sqlite.path", "/gone does not exist"),
        ("log.directory", "/keys.jwks is not a directory"),
        ("admin.token_file", "/token is shorter than 32 characters"),
    ]
    assert call("check-config", "--config", str(made), "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], len(shown["problems"])) == (False, 5)


def test_the_key_of_the_log_elsewhere(made: Path, capsys: Capture) -> None:
    """It is looked for where `log.key_file` says, relative to the file, and nowhere else."""
    change(made, ("key_file: null", "key_file: state/pseudonyms"))
    (made.parent / "log.key").chmod(0o604)
    ((_, key, words),) = problems(made, 1, capsys)
    assert key == "log.key_file"
    assert words == f"{made.parent}/state does not exist; run: install -d -m 700 {made.parent}/state"
    (made.parent / "state").mkdir()
    assert call("check-config", "--config", str(made)) == 0
    capsys.readouterr()
    (made.parent / "log.key").rename(made.parent / "state/pseudonyms")
    ((_, key, words),) = problems(made, 1, capsys)
    assert (key, words.partition(" is ")[0]) == ("log.key_file", f"{made.parent}/state/pseudonyms")


def test_the_directory_of_the_control_socket(made: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands could not reach a daemon that can make no socket there."""
    change(made, ("control_socket: control.sock", "control_socket: run/control.sock"))
    folder = made.parent / "run"
    reason = f"{folder} does not exist; run: install -d -m 700 {folder}"
    assert problems(made, 1, capsys) == [(line_of(made, "control_socket"), "control_socket", reason)]
    folder.mkdir()
    assert call("check-config", "--config", str(made)) == 0
    capsys.readouterr()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    reason = f"this user cannot write to {folder}"
    assert problems(made, 1, capsys) == [(line_of(made, "control_socket"), "control_socket", reason)]
    change(made, ("control_socket: run/control.sock", "control_socket: null"))
    assert call("check-config", "--config", str(made)) == 0


@pytest.mark.parametrize("name", ["keys.jwks", "log.key"])
def test_every_command_names_the_chmod(name: str, made: Path, capsys: Capture) -> None:
    """Keys that others could read are refused by whatever needs them, with what to type."""
    path = made.parent / name
    path.chmod(0o644)
    commands: Sequence[Sequence[str]] = {
        "keys.jwks": [["run"], ["did"], ["invitation"]],
        "log.key": [["log-keys", "list"], ["whois", "x"]],
    }[name]
    for command in commands:
        assert call(*command, "--config", str(made)) == 1
        assert capsys.readouterr().err == (
            f"mediatord: {path} is accessible to other users (mode 0644); run: chmod 600 {path}\n"
        )


def test_databases(made: Path, capsys: Capture) -> None:
    """A file of another program, and one of a later version, are found before the daemon is started."""
    path = made.parent / "mediator.sqlite3"
    open_database(path, None).close()
    assert call("check-config", "--config", str(made)) == 0
    capsys.readouterr()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "is 99, at most" in problems(made, 1, capsys)[0][2]
    path.unlink()
    (log := made.parent / "log").mkdir(exist_ok=True)
    (log / "events.jsonl").touch()
    assert f"cannot use {path}: the file does not exist, but the event log in" in problems(made, 1, capsys)[0][2]
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    assert problems(made, 1, capsys)[0][2] == f"{path} is a database of another program"
    path.write_text("no database at all, but as long as the first page of one would have to be" * 10)
    assert problems(made, 1, capsys)[0][2] == f"cannot use {path}: file is not a database"


def endpoint(path: Path, key: Path | str, certificate: Path | str, *more: str) -> None:
    """Have a configuration listen with these."""
    parts = ":".join(["ssl:8443", f"privateKey={key}", f"certKey={certificate}", *more])
    change(path, ("listen: ['tcp:8080:interface=127.0.0.1']", f"listen: ['{parts}']"))


def test_certificate(made: Path, capsys: Capture) -> None:
    """One that fits its key and is good has nothing against it."""
    pem = CertificateAuthority(made.parent).issue("localhost", ["localhost"])
    pem.chmod(0o600)
    endpoint(made, pem, pem)
    assert call("check-config", "--config", str(made)) == 0


def test_certificates_that_are_not_there(made: Path, capsys: Capture) -> None:
    """Each file that cannot be read has its line."""
    chain = CertificateAuthority(made.parent).path
    endpoint(made, "/gone/key.pem", made.parent, f"extraCertChain={chain}")
    assert [words for _, key, words in problems(made, 1, capsys) if key == "listen[0]"] == [
        f"certKey: {made.parent}: Is a directory",
        "privateKey: /gone/key.pem: No such file or directory",
    ]


def test_certificates_that_do_not_fit(made: Path, capsys: Capture) -> None:
    """A key of another certificate, which everybody may read: two lines."""
    authority = CertificateAuthority(made.parent)
    key, certificate = authority.issue("key"), authority.issue("certificate")
    # Twisted looks for both in both files.
    begin = "-----BEGIN PRIVATE KEY"
    key.write_text(begin + key.read_text().partition(begin)[2])
    certificate.write_text(certificate.read_text().partition(begin)[0])
    key.chmod(0o644)
    endpoint(made, key, certificate)
    assert [words for _, _, words in problems(made, 1, capsys)] == [
        "cannot use key and certificate, or they do not match",
        f"privateKey: {key} is accessible to all users; run: chmod o= {key}",
    ]


def test_certificates_that_are_none(made: Path, capsys: Capture) -> None:
    """What is no certificate is not taken for a mistake in the endpoint."""
    nonsense = made.parent / "nonsense.pem"
    nonsense.write_text("-----BEGIN NONSENSE-----\n")
    nonsense.chmod(0o600)
    pem = CertificateAuthority(made.parent).issue("good")
    pem.chmod(0o600)
    endpoint(made, pem, pem, f"extraCertChain={nonsense}")
    assert [words for _, _, words in problems(made, 1, capsys)] == [
        "cannot use key and certificate, or they do not match"
    ]
    change(made, (f"privateKey={pem}:certKey={pem}", f"privateKey={nonsense}:certKey={nonsense}"))
    assert [words for _, _, words in problems(made, 1, capsys)] == [
        "cannot use key and certificate, or they do not match"
    ]


def test_certificates_that_are_over(made: Path, capsys: Capture) -> None:
    """Clients would refuse it."""
    pem = CertificateAuthority(made.parent).issue("old", expired=True)
    pem.chmod(0o600)
    endpoint(made, pem, pem)
    ((_, key, words),) = problems(made, 1, capsys)
    assert key == "listen[0]"
    assert words.startswith("the certificate expired on 20")


def test_cluster(made: Path, capsys: Capture) -> None:
    """The secret of a cluster is looked at, and that its store can be shared."""
    text = made.read_text("utf-8")
    head, _, tail = text.partition("\ncluster:")
    tail = tail.replace("listen: null", "listen: tcp:7070:interface=10.0.0.5", 1)
    tail = tail.replace("secret_file: null", "secret_file: secret", 1)
    made.write_text(f"{head}\ncluster:{tail}", "utf-8")
    assert [(key, words.rpartition("/")[2]) for _, key, words in problems(made, 1, capsys)] == [
        ("cluster.listen", "cluster.listen requires storage.backend: mongodb"),
        ("cluster.secret_file", "secret: No such file or directory"),
    ]


def test_passwords_are_nobody_elses(made: Path, capsys: Capture) -> None:
    """A configuration with the password of a database is for its readers only."""
    (line,) = [line for line in made.read_text("utf-8").splitlines() if line.lstrip().startswith("uri:")]
    change(made, (line, "    uri: mongodb://me:secret@127.0.0.1/mediatord?replicaSet=a"))
    assert call("check-config", "--config", str(made)) == 0
    capsys.readouterr()
    made.chmod(0o644)
    ((_, key, words),) = problems(made, 1, capsys)
    assert (key, words) == (
        "storage.mongodb.uri",
        f"all users can read the password in {made}; run: chmod o= {made}",
    )


def test_no_file(tmp_path: Path, capsys: Capture) -> None:
    """A configuration that is not there is one problem; what is no YAML hides everything else."""
    path = tmp_path / "m.yaml"
    assert call("check-config", "--config", str(path)) == 2
    assert capsys.readouterr().err == f"mediatord: {path}: No such file or directory\n"
    path.write_text("a: [\n")
    assert call("check-config", "--config", str(path)) == 2
    assert capsys.readouterr().err.startswith(f"{path}:2: invalid YAML: ")


def test_where_files_can_be_made(tmp_path: Path) -> None:
    """A directory that is not there yet can be made if the first one above it that is there can be written to."""
    assert list(_explain_unwritable(tmp_path / "a" / "b")) == []
    (tmp_path / "file").write_text("")
    assert list(_explain_unwritable(tmp_path / "file" / "b")) == [f"{tmp_path}/file is not a directory"]
    if os.geteuid() != 0:
        (tmp_path / "shut").mkdir(mode=0o500)
        assert list(_explain_unwritable(tmp_path / "shut")) == [f"this user cannot write to {tmp_path}/shut"]
