"""`mediatord check-config`: reports all problems of a configuration and of the files that it names."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from mediatord.cli import check_config
from mediatord.cli.check_config import _explain_unwritable
from mediatord.config.file import LAST_LINE
from mediatord.store.sqlite.database_file import open_database
from tests.certificate_authority import CertificateAuthority
from tests.cli.test_commands import Capture, call, config_path

__all__ = ["config_path"]


def read_problems(path: Path, status: int, capsys: Capture) -> list[tuple[int, str, str]]:
    """Run the command: line, key and text of each problem."""
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


def edit_config(path: Path, *changes: tuple[str, str]) -> None:
    """Replace lines of a configuration written by init."""
    text = path.read_text("utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text, "utf-8")


def find_line(path: Path, key: str) -> int:
    """Line number of a key."""
    (number,) = [n for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.lstrip().startswith(key)]
    return number


def test_valid_configuration(config_path: Path, capsys: Capture) -> None:
    """Is reported, and the check creates nothing."""
    before = sorted(config_path.parent.iterdir())
    assert call("check-config", "--config", str(config_path)) == 0
    assert capsys.readouterr().out == f"{config_path}: ok\n"
    assert call("check-config", "--config", str(config_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(config_path), "ok": True, "problems": []}
    assert sorted(config_path.parent.iterdir()) == before


def test_reports_each_error_on_one_line(config_path: Path, capsys: Capture) -> None:
    """In the order of the file."""
    edit_config(
        config_path,
        ("listen: ['tcp:8080:interface=127.0.0.1']", "listen: ['tcp:8080:interface=127.0.0.1', nowhere]"),
        ("drain_timeout: 8s", "drain_timeout: 30s"),
        ("backend: sqlite", "backend: postgres"),
        ("  ttl: 72h", "  ttl: soon"),
        ("workers: 1", "wrokers: 2"),
    )
    found = read_problems(config_path, 2, capsys)
    assert [(key, text.split(";")[0]) for _, key, text in found] == [
        ("listen[1]", "expected a Twisted endpoint string such as tcp:8080:interface=127.0.0.1"),
        ("drain_timeout", "expected less than 10s"),
        ("storage.backend", "expected 'memory', 'sqlite' or 'mongodb'"),
        ("queue.ttl", "expected a duration such as 72h, 60s, 500ms or a number of seconds"),
        ("wrokers", "unknown key"),
    ]
    assert [line for line, _, _ in found] == [
        find_line(config_path, key) for key in ("listen: ['tcp", "drain_timeout", "backend", "ttl", "wrokers")
    ]


def test_checks_files_despite_errors(config_path: Path, capsys: Capture) -> None:
    """Except files named by invalid settings."""
    edit_config(config_path, ("  ttl: 72h", "  ttl: soon"), ("directory: log", "directory: [log]"))
    (config_path.parent / "keys.jwks").chmod(0o644)
    (config_path.parent / "log").write_text("")
    assert read_problems(config_path, 2, capsys) == [
        (
            find_line(config_path, "keys:"),
            "identity.keys",
            f"{config_path.parent}/keys.jwks is accessible to other users (mode 0644); "
            f"run: chmod 600 {config_path.parent}/keys.jwks",
        ),
        (
            find_line(config_path, "ttl"),
            "queue.ttl",
            "expected a duration such as 72h, 60s, 500ms or a number of seconds",
        ),
        (find_line(config_path, "directory"), "log.directory", "expected a path"),
    ]


def test_reports_problems_of_environment(config_path: Path, capsys: Capture) -> None:
    """Five problems of named files: five lines, and the exit status of an environment error."""
    folder = config_path.parent
    edit_config(
        config_path,
        ("  path: mediator.sqlite3", "  path: gone/mediator.sqlite3"),
        ("directory: log", "directory: keys.jwks"),
        ("  token_file: null", "  token_file: token"),
    )
    head, _, tail = config_path.read_text("utf-8").partition("\nadmin:")
    tail = tail.replace("listen: null", "listen: tcp:9090:interface=127.0.0.1", 1)
    config_path.write_text(f"{head}\nadmin:{tail}", "utf-8")
    (folder / "keys.jwks").chmod(0o640)
    (folder / "log.key").chmod(0o604)
    (folder / "token").write_text("short")
    (folder / "token").chmod(0o600)
    found = read_problems(config_path, 1, capsys)
    assert [(key, words.partition(";")[0].replace(str(folder), "")) for _, key, words in found] == [
        ("identity.keys", "/keys.jwks is accessible to other users (mode 0640)"),
        ("identity.keys", "/log.key is accessible to other users (mode 0604)"),
        ("storage.sqlite.path", "/gone does not exist"),
        ("log.directory", "/keys.jwks is not a directory"),
        ("admin.token_file", "/token is shorter than 32 characters"),
    ]
    assert call("check-config", "--config", str(config_path), "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], len(document["problems"])) == (False, 5)


def test_checks_configured_pseudonym_key_file(config_path: Path, capsys: Capture) -> None:
    """Only the file of `log.key_file`, relative to the configuration."""
    before, _, after = config_path.read_text().rpartition("key_file: null")  # others are those of push services
    config_path.write_text(f"{before}key_file: state/pseudonyms{after}")
    (config_path.parent / "log.key").chmod(0o604)
    ((_, key, words),) = read_problems(config_path, 1, capsys)
    assert key == "log.key_file"
    assert words == f"{config_path.parent}/state does not exist; run: install -d -m 700 {config_path.parent}/state"
    (config_path.parent / "state").mkdir()
    assert call("check-config", "--config", str(config_path)) == 0
    capsys.readouterr()
    (config_path.parent / "log.key").rename(config_path.parent / "state/pseudonyms")
    ((_, key, words),) = read_problems(config_path, 1, capsys)
    assert (key, words.partition(" is ")[0]) == ("log.key_file", f"{config_path.parent}/state/pseudonyms")


def test_checks_directory_of_control_socket(
    config_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, commands could not reach the daemon."""
    edit_config(config_path, ("control_socket: control.sock", "control_socket: run/control.sock"))
    folder = config_path.parent / "run"
    reason = f"{folder} does not exist; run: install -d -m 700 {folder}"
    assert read_problems(config_path, 1, capsys) == [
        (find_line(config_path, "control_socket"), "control_socket", reason)
    ]
    folder.mkdir()
    assert call("check-config", "--config", str(config_path)) == 0
    capsys.readouterr()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    reason = f"this user cannot write to {folder}"
    assert read_problems(config_path, 1, capsys) == [
        (find_line(config_path, "control_socket"), "control_socket", reason)
    ]
    edit_config(config_path, ("control_socket: run/control.sock", "control_socket: null"))
    assert call("check-config", "--config", str(config_path)) == 0


@pytest.mark.parametrize("name", ["keys.jwks", "log.key"])
def test_commands_refuse_accessible_keys_and_name_chmod(name: str, config_path: Path, capsys: Capture) -> None:
    path = config_path.parent / name
    path.chmod(0o644)
    commands: Sequence[Sequence[str]] = {
        "keys.jwks": [["run"], ["did"], ["invitation"]],
        "log.key": [["log-keys", "list"], ["whois", "x"]],
    }[name]
    for command in commands:
        assert call(*command, "--config", str(config_path)) == 1
        assert capsys.readouterr().err == (
            f"mediatord: {path} is accessible to other users (mode 0644); run: chmod 600 {path}\n"
        )


def test_checks_database(config_path: Path, capsys: Capture) -> None:
    """A file of another program or of a later version is reported before the daemon starts."""
    path = config_path.parent / "mediator.sqlite3"
    open_database(path, None).close()
    assert call("check-config", "--config", str(config_path)) == 0
    capsys.readouterr()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "is 99, but this release supports at most" in read_problems(config_path, 1, capsys)[0][2]
    path.unlink()
    (log := config_path.parent / "log").mkdir(exist_ok=True)
    (log / "events.jsonl").touch()
    assert (
        f"cannot use {path}: the file does not exist, but the event log in"
        in read_problems(config_path, 1, capsys)[0][2]
    )
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    assert read_problems(config_path, 1, capsys)[0][2] == f"{path} is a database of another program"
    path.write_text("no database at all, but as long as the first page of one would have to be" * 10)
    assert read_problems(config_path, 1, capsys)[0][2] == f"cannot use {path}: file is not a database"


def test_checks_mongodb_settings(config_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URI that the driver cannot use is reported, and the missing extra of the package."""
    edit_config(config_path, ("backend: sqlite", "backend: mongodb"))
    uri = "uri: mongodb://127.0.0.1:27017/mediatord"
    edit_config(config_path, (uri, "uri: mongodb://127.0.0.1:27017/mediatord?unknown=1"))
    assert "unknown" in read_problems(config_path, 1, capsys)[0][2]
    monkeypatch.setattr(check_config, "find_spec", lambda name: None)
    assert 'pip install "mediatord[mongodb]"' in read_problems(config_path, 1, capsys)[0][2]


def test_reports_inaccessible_database(config_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this user may not read or write; root may, hence the patch."""
    path = config_path.parent / "mediator.sqlite3"
    open_database(path, None).close()
    access = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: name != path and access(name, mode))
    assert read_problems(config_path, 1, capsys)[0][2] == f"this user cannot read and write {path}"


def set_tls_endpoint(path: Path, key: Path | str, certificate: Path | str, *options: str) -> None:
    """Configure a TLS listener."""
    parts = ":".join(["ssl:8443", f"privateKey={key}", f"certKey={certificate}", *options])
    edit_config(path, ("listen: ['tcp:8080:interface=127.0.0.1']", f"listen: ['{parts}']"))


def test_accepts_valid_certificate(config_path: Path, capsys: Capture) -> None:
    pem = CertificateAuthority(config_path.parent).issue("localhost", ["localhost"])
    pem.chmod(0o600)
    set_tls_endpoint(config_path, pem, pem)
    assert call("check-config", "--config", str(config_path)) == 0


def test_reports_each_unreadable_certificate_file(config_path: Path, capsys: Capture) -> None:
    chain = CertificateAuthority(config_path.parent).path
    set_tls_endpoint(config_path, "/gone/key.pem", config_path.parent, f"extraCertChain={chain}")
    assert [words for _, key, words in read_problems(config_path, 1, capsys) if key == "listen[0]"] == [
        f"certKey: {config_path.parent}: Is a directory",
        "privateKey: /gone/key.pem: No such file or directory",
    ]


def test_reports_mismatched_and_accessible_key(config_path: Path, capsys: Capture) -> None:
    """Two lines."""
    authority = CertificateAuthority(config_path.parent)
    key, certificate = authority.issue("key"), authority.issue("certificate")
    # Twisted reads both from either file.
    begin = "-----BEGIN PRIVATE KEY"
    key.write_text(begin + key.read_text().partition(begin)[2])
    certificate.write_text(certificate.read_text().partition(begin)[0])
    key.chmod(0o644)
    set_tls_endpoint(config_path, key, certificate)
    assert [words for _, _, words in read_problems(config_path, 1, capsys)] == [
        "cannot use key and certificate, or they do not match",
        f"privateKey: {key} is accessible to all users; run: chmod o= {key}",
    ]


def test_reports_invalid_certificate_file(config_path: Path, capsys: Capture) -> None:
    """As a problem of the file, not of the endpoint string."""
    nonsense = config_path.parent / "nonsense.pem"
    nonsense.write_text("-----BEGIN NONSENSE-----\n")
    nonsense.chmod(0o600)
    pem = CertificateAuthority(config_path.parent).issue("good")
    pem.chmod(0o600)
    set_tls_endpoint(config_path, pem, pem, f"extraCertChain={nonsense}")
    assert [words for _, _, words in read_problems(config_path, 1, capsys)] == [
        "cannot use key and certificate, or they do not match"
    ]
    edit_config(config_path, (f"privateKey={pem}:certKey={pem}", f"privateKey={nonsense}:certKey={nonsense}"))
    assert [words for _, _, words in read_problems(config_path, 1, capsys)] == [
        "cannot use key and certificate, or they do not match"
    ]


def test_reports_expired_certificate(config_path: Path, capsys: Capture) -> None:
    pem = CertificateAuthority(config_path.parent).issue("old", expired=True)
    pem.chmod(0o600)
    set_tls_endpoint(config_path, pem, pem)
    ((_, key, words),) = read_problems(config_path, 1, capsys)
    assert key == "listen[0]"
    assert words.startswith("the certificate expired on 20")


def test_checks_cluster_secret_and_store(config_path: Path, capsys: Capture) -> None:
    text = config_path.read_text("utf-8")
    head, _, tail = text.partition("\ncluster:")
    tail = tail.replace("listen: null", "listen: tcp:7070:interface=10.0.0.5", 1)
    tail = tail.replace("secret_file: null", "secret_file: secret", 1)
    config_path.write_text(f"{head}\ncluster:{tail}", "utf-8")
    assert [(key, words.rpartition("/")[2]) for _, key, words in read_problems(config_path, 1, capsys)] == [
        ("cluster.listen", "requires storage.backend: mongodb"),
        ("cluster.secret_file", "secret: No such file or directory"),
    ]


def test_reports_accessible_configuration_with_password(config_path: Path, capsys: Capture) -> None:
    (line,) = [line for line in config_path.read_text("utf-8").splitlines() if line.lstrip().startswith("uri:")]
    edit_config(config_path, (line, "    uri: mongodb://me:secret@127.0.0.1/mediatord?replicaSet=a"))
    assert call("check-config", "--config", str(config_path)) == 0
    capsys.readouterr()
    config_path.chmod(0o644)
    ((_, key, words),) = read_problems(config_path, 1, capsys)
    assert (key, words) == (
        "storage.mongodb.uri",
        f"all users can read the password in {config_path}; run: chmod o= {config_path}",
    )


def test_missing_or_unparsable_file_is_one_problem(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "m.yaml"
    assert call("check-config", "--config", str(path)) == 2
    assert capsys.readouterr().err == f"mediatord: {path}: No such file or directory\n"
    path.write_text("a: [\n")
    assert call("check-config", "--config", str(path)) == 2
    assert capsys.readouterr().err.startswith(f"{path}:2: invalid YAML: ")


def test_accepts_missing_directory_with_writable_ancestor(tmp_path: Path) -> None:
    assert list(_explain_unwritable(tmp_path / "a" / "b")) == []
    (tmp_path / "file").write_text("")
    assert list(_explain_unwritable(tmp_path / "file" / "b")) == [f"{tmp_path}/file is not a directory"]
    if os.geteuid() != 0:
        (tmp_path / "shut").mkdir(mode=0o500)
        assert list(_explain_unwritable(tmp_path / "shut")) == [f"this user cannot write to {tmp_path}/shut"]


def configure_push(path: Path, **changes: dict[str, str]) -> None:
    """Replace the section `push` by these settings."""
    document = yaml.safe_load(path.read_text("utf-8"))
    document["push"] = changes
    path.write_text(yaml.safe_dump(document, sort_keys=False) + LAST_LINE + "\n", "utf-8")


def write_secret(path: Path, content: bytes) -> None:
    """Write a file of mode 0600."""
    path.touch(0o600)
    path.write_bytes(content)


def make_private_key(curve: ec.EllipticCurve) -> bytes:
    """A private key as PEM."""
    return ec.generate_private_key(curve).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_service_account(**changes: object) -> bytes:
    """A key file as Firebase issues it."""
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = {
        "type": "service_account",
        "project_id": "wallet",
        "private_key": pem.decode(),
        "client_email": "push@wallet.example",
        "token_uri": "https://oauth2.example/token",
    }
    return json.dumps(account | changes).encode()


PUSH_SETTINGS = {
    "fcm": {"credentials": "fcm.json"},
    "apns": {"key_file": "key.p8", "key_id": "ABC123DEFG", "team_id": "DEF123GHIJ", "topic": "com.example.wallet"},
    "web_push": {"key_file": "vapid.pem", "contact": "mailto:ops@example.org"},
    "webhook": {"url": "https://hook.example", "secret_file": "secret"},
}
PUSH_KEYS = ["push.fcm.credentials", "push.apns.key_file", "push.web_push.key_file", "push.webhook.secret_file"]


@pytest.fixture
def push_config(config_path: Path) -> Path:
    """A configuration with all push services and their keys."""
    configure_push(config_path, **PUSH_SETTINGS)
    folder = config_path.parent
    write_secret(folder / "fcm.json", make_service_account())
    write_secret(folder / "key.p8", make_private_key(ec.SECP256R1()))
    write_secret(folder / "vapid.pem", make_private_key(ec.SECP256R1()))
    write_secret(folder / "secret", b"s" * 32)
    return config_path


def test_checks_keys_of_push_services(push_config: Path, capsys: Capture) -> None:
    """Valid ones are reported as valid; one line for each that others can read, is of another kind or too short."""
    assert call("check-config", "--config", str(push_config)) == 0
    capsys.readouterr()
    folder = push_config.parent
    names = [folder / name for name in ("fcm.json", "key.p8", "vapid.pem", "secret")]
    for name in names:
        name.chmod(0o640)
    found = read_problems(push_config, 1, capsys)
    assert [key for _, key, _ in found] == PUSH_KEYS
    for name, (_, _, text) in zip(names, found, strict=True):
        assert text == f"{name} is accessible to other users (mode 0640); run: chmod 600 {name}"
        name.chmod(0o600)
    names[0].write_bytes(make_service_account(private_key="nonsense"))
    names[1].write_bytes(make_private_key(ec.SECP384R1()))
    names[2].write_bytes(b"nonsense")
    names[3].write_bytes(b"s" * 31 + b"\n")
    found = read_problems(push_config, 1, capsys)
    assert [(key, text.removeprefix(str(folder))) for _, key, text in found] == list(
        zip(
            PUSH_KEYS,
            (
                "/fcm.json: private_key is not an RSA key in PEM",
                "/key.p8 is not a signing key of APNs (.p8: PEM, not encrypted, P-256)",
                "/vapid.pem: expected an unencrypted private key of the curve P-256, in PEM or base64url",
                "/secret: expected at least 32 bytes, as the key of a signature",
            ),
            strict=True,
        )
    )
    for name in names:
        name.unlink()
    assert [text for _, _, text in read_problems(push_config, 1, capsys)] == [
        f"cannot read {name}: No such file or directory" for name in names
    ]


def test_checks_ids_of_apns(push_config: Path, capsys: Capture) -> None:
    """They have a form."""
    configure_push(push_config, apns=PUSH_SETTINGS["apns"] | {"team_id": "my team"})
    ((_, key, text),) = read_problems(push_config, 1, capsys)
    assert (key, text) == ("push.apns.team_id", "expected 10 capital letters and digits")


def test_push_keys_can_be_credentials(push_config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of systemd, which passes them with an ACL; one that it does not pass is reported."""
    credentials = push_config.parent / "credentials"
    credentials.mkdir()
    (push_config.parent / "fcm.json").rename(credentials / "fcm")
    (credentials / "fcm").chmod(0o440)
    configure_push(push_config, fcm={"credentials": "credential:fcm"})
    ((_, key, text),) = read_problems(push_config, 1, capsys)
    assert key == "push.fcm.credentials"
    assert text.endswith("systemd passed no such credential; add LoadCredential=fcm:PATH to the unit")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert call("check-config", "--config", str(push_config)) == 0
