"""`mediatord keys encrypt` and `decrypt`, and every command that needs keys, on keys that are encrypted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mediatord.app.current_identity import load_identity
from mediatord.config.file import load_config
from mediatord.errors import StartupError
from mediatord.identity import encrypted_file
from mediatord.identity.encrypted_file import is_encrypted
from mediatord.runtime.secret_files import create_secret_file
from tests.cli.test_commands import Capture, call, one_line

PASSPHRASE = "correct horse battery"


@pytest.fixture(scope="module", autouse=True)
def cheap_scrypt() -> Iterator[None]:
    """Encrypt with the least cost that is accepted, a quarter of what is usual."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encrypted_file, "_SCRYPT_N", encrypted_file._MIN_SCRYPT_N)
        yield


@pytest.fixture
def made(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration that names a file with a passphrase, and keys that are in the clear as yet."""
    path = tmp_path / "m" / "mediator.yaml"
    assert call("init", "--dir", str(path.parent), "--public-url", "https://m.example") == 0
    create_secret_file(path.with_name("passphrase"), PASSPHRASE.encode() + b"\n")
    name(path, "passphrase")
    capsys.readouterr()
    return path


def name(path: Path, passphrase_file: str | None) -> None:
    """Have the configuration say where the passphrase is."""
    lines = [line for line in path.read_text().splitlines() if "passphrase_file:" not in line]
    if passphrase_file is not None:
        lines.insert(lines.index("identity:") + 1, f"  passphrase_file: {passphrase_file}")
    path.write_text("\n".join(lines) + "\n")


def did_of(path: Path, capsys: Capture) -> str:
    """What `mediatord did` prints."""
    assert call("did", "--config", str(path)) == 0
    return capsys.readouterr().out.splitlines()[0]


def test_all_commands(made: Path, capsys: Capture) -> None:
    """Each works as before; what they write stays encrypted; decrypting brings back the same."""
    keys, config = made.with_name("keys.jwks"), ("--config", str(made))
    did = did_of(made, capsys)
    assert call("keys", "encrypt", *config, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(keys), "encrypted": True}
    assert is_encrypted(keys.read_bytes()) and keys.stat().st_mode & 0o777 == 0o600
    assert did_of(made, capsys) == did
    for command in (
        ("check-config", *config),
        ("invitation", *config),
        ("keys", "list", *config),
        ("keys", "rotate", *config),
        ("keys", "retire", "prekey", *config, "--yes"),
    ):
        assert call(*command) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert PASSPHRASE not in shown.out + shown.err
        assert is_encrypted(keys.read_bytes())
    rotated = did_of(made, capsys)
    assert rotated != did
    assert call("keys", "decrypt", *config) == 0
    capsys.readouterr()
    name(made, None)
    assert did_of(made, capsys) == rotated


def test_wrong_passphrase(made: Path, capsys: Capture) -> None:
    """One clear line and exit status 1, of each command; the daemon does not start for the same reason."""
    keys = made.with_name("keys.jwks")
    assert call("keys", "encrypt", "--config", str(made)) == 0
    capsys.readouterr()
    before, said = keys.read_bytes(), f"cannot decrypt {keys}: the passphrase is wrong, or the file was modified"
    made.with_name("passphrase").write_text("another passphrase\n")
    for command in (
        ("did",),
        ("keys", "list"),
        ("keys", "rotate"),
        ("keys", "retire", "prekey"),
        ("keys", "decrypt"),
    ):
        assert call(*command, "--config", str(made)) == 1
        assert one_line(capsys) == said
    assert call("check-config", "--config", str(made)) == 1
    assert said in capsys.readouterr().err
    with pytest.raises(StartupError, match="the passphrase is wrong"):
        load_identity(load_config(made, {}))
    assert keys.read_bytes() == before


def test_nobody_to_ask(made: Path, capsys: Capture) -> None:
    """Without a file and without a terminal it is one line, too; nothing is changed."""
    name(made, None)
    assert call("keys", "encrypt", "--config", str(made)) == 1
    assert "identity.passphrase_file, or run the command on a terminal" in one_line(capsys)
    assert not is_encrypted(made.with_name("keys.jwks").read_bytes())
    name(made, "passphrase")
    assert call("keys", "encrypt", "--config", str(made)) == 0
    capsys.readouterr()
    for file in (None, "credential:passphrase"):
        name(made, file)
        assert call("did", "--config", str(made)) == 1
        assert "identity.passphrase_file, or run the command on a terminal" in one_line(capsys)


def test_credential(made: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passphrase and keys may be credentials that systemd hands over, wherever it has put them."""
    did = did_of(made, capsys)
    assert call("keys", "encrypt", "--config", str(made)) == 0
    capsys.readouterr()
    given = tmp_path / "credentials"
    given.mkdir()
    made.with_name("passphrase").rename(given / "opener")
    (given / "opener").chmod(0o440)
    name(made, "credential:opener")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    assert did_of(made, capsys) == did
    made.with_name("keys.jwks").rename(given / "keys.jwks")
    text = made.read_text()
    assert "  keys: keys.jwks\n" in text
    made.write_text(text.replace("  keys: keys.jwks\n", "  keys: credential:keys.jwks\n"))
    assert did_of(made, capsys) == did
