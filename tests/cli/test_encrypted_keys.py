"""`mediatord keys encrypt` and `decrypt`, and all commands that need keys, with encrypted keys."""

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
    """Encrypt with the lowest accepted cost, a quarter of the default."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encrypted_file, "_SCRYPT_N", encrypted_file._MIN_SCRYPT_N)
        yield


@pytest.fixture
def config_path(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration that names a passphrase file, with unencrypted keys."""
    path = tmp_path / "m" / "mediator.yaml"
    assert call("init", "--dir", str(path.parent), "--public-url", "https://m.example") == 0
    create_secret_file(path.with_name("passphrase"), PASSPHRASE.encode() + b"\n")
    set_passphrase_file(path, "passphrase")
    capsys.readouterr()
    return path


def set_passphrase_file(path: Path, passphrase_file: str | None) -> None:
    """Write the path of the passphrase file into the configuration."""
    lines = [line for line in path.read_text().splitlines() if "passphrase_file:" not in line]
    if passphrase_file is not None:
        lines.insert(lines.index("identity:") + 1, f"  passphrase_file: {passphrase_file}")
    path.write_text("\n".join(lines) + "\n")


def run_did(path: Path, capsys: Capture) -> str:
    """Output of `mediatord did`."""
    assert call("did", "--config", str(path)) == 0
    return capsys.readouterr().out.splitlines()[0]


def test_commands_work_with_encrypted_keys(config_path: Path, capsys: Capture) -> None:
    """What they write stays encrypted; decryption restores the same keys."""
    keys, config = config_path.with_name("keys.jwks"), ("--config", str(config_path))
    did = run_did(config_path, capsys)
    assert call("keys", "encrypt", *config, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(keys), "encrypted": True}
    assert is_encrypted(keys.read_bytes()) and keys.stat().st_mode & 0o777 == 0o600
    assert run_did(config_path, capsys) == did
    for command in (
        ("check-config", *config),
        ("invitation", *config),
        ("keys", "list", *config),
        ("keys", "rotate", *config),
        ("keys", "retire", "prekey", *config, "--yes"),
    ):
        assert call(*command) == 0, capsys.readouterr().err
        output = capsys.readouterr()
        assert PASSPHRASE not in output.out + output.err
        assert is_encrypted(keys.read_bytes())
    rotated = run_did(config_path, capsys)
    assert rotated != did
    assert call("keys", "decrypt", *config) == 0
    capsys.readouterr()
    set_passphrase_file(config_path, None)
    assert run_did(config_path, capsys) == rotated


def test_wrong_passphrase_is_one_line(config_path: Path, capsys: Capture) -> None:
    """Exit status 1 from each command; the daemon does not start."""
    keys = config_path.with_name("keys.jwks")
    assert call("keys", "encrypt", "--config", str(config_path)) == 0
    capsys.readouterr()
    before, error = keys.read_bytes(), f"cannot decrypt {keys}: the passphrase is wrong, or the file was modified"
    config_path.with_name("passphrase").write_text("another passphrase\n")
    for command in (
        ("did",),
        ("keys", "list"),
        ("keys", "rotate"),
        ("keys", "retire", "prekey"),
        ("keys", "decrypt"),
    ):
        assert call(*command, "--config", str(config_path)) == 1
        assert one_line(capsys) == error
    assert call("check-config", "--config", str(config_path)) == 1
    assert error in capsys.readouterr().err
    with pytest.raises(StartupError, match="the passphrase is wrong"):
        load_identity(load_config(config_path, {}))
    assert keys.read_bytes() == before


def test_missing_passphrase_is_one_line(config_path: Path, capsys: Capture) -> None:
    """Without a file and without a terminal; nothing changes."""
    set_passphrase_file(config_path, None)
    assert call("keys", "encrypt", "--config", str(config_path)) == 1
    assert "identity.passphrase_file, or run the command in a terminal" in one_line(capsys)
    assert not is_encrypted(config_path.with_name("keys.jwks").read_bytes())
    set_passphrase_file(config_path, "passphrase")
    assert call("keys", "encrypt", "--config", str(config_path)) == 0
    capsys.readouterr()
    for file in (None, "credential:passphrase"):
        set_passphrase_file(config_path, file)
        assert call("did", "--config", str(config_path)) == 1
        assert "identity.passphrase_file, or run the command in a terminal" in one_line(capsys)


def test_reads_systemd_credentials(
    config_path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passphrase and keys."""
    did = run_did(config_path, capsys)
    assert call("keys", "encrypt", "--config", str(config_path)) == 0
    capsys.readouterr()
    passphrase = tmp_path / "credentials"
    passphrase.mkdir()
    config_path.with_name("passphrase").rename(passphrase / "opener")
    (passphrase / "opener").chmod(0o440)
    set_passphrase_file(config_path, "credential:opener")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(passphrase))
    assert run_did(config_path, capsys) == did
    config_path.with_name("keys.jwks").rename(passphrase / "keys.jwks")
    text = config_path.read_text()
    assert "  keys: keys.jwks\n" in text
    config_path.write_text(text.replace("  keys: keys.jwks\n", "  keys: credential:keys.jwks\n"))
    assert run_did(config_path, capsys) == did
