"""Key files encrypted at rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from mediatord.identity import encrypted_file
from mediatord.identity.encrypted_file import decrypt_content, encrypt_content, is_encrypted, make_passphrase_source
from mediatord.identity.key_file import create_keys, decrypt_keys, encrypt_keys, load_keys, retire_keys, rotate_keys
from mediatord.runtime.secret_files import SecretFileError, create_secret_file, read_secret_file

RIGHT, WRONG = b"correct horse battery", b"correct horse batterz"
# The cost before these tests lower it.
USUAL_N = encrypted_file._SCRYPT_N
CONTENT = b'{"keys": []}'


@pytest.fixture(scope="module", autouse=True)
def cheap_scrypt() -> Iterator[None]:
    """Encrypt with the lowest accepted cost, a quarter of the usual one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encrypted_file, "_SCRYPT_N", encrypted_file._MIN_SCRYPT_N)
        yield


@pytest.fixture(scope="module")
def encrypted(cheap_scrypt: None) -> bytes:
    """The content of an encrypted file."""
    return encrypt_content(CONTENT, RIGHT)


def change_member(content: bytes, *path: str, to: Any) -> bytes:
    """The content with one member changed."""
    document = json.loads(content)
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return json.dumps(document).encode()


def test_decrypts(encrypted: bytes) -> None:
    """With the passphrase, in any layout; the content shows nothing, and differs each time."""
    assert decrypt_content(encrypted, RIGHT, "it") == CONTENT
    assert decrypt_content(json.dumps(json.loads(encrypted)).encode(), RIGHT, "it") == CONTENT
    assert (
        is_encrypted(encrypted)
        and not is_encrypted(CONTENT)
        and not is_encrypted(b"[")
        and not is_encrypted(b"[" * 100_000)
    )
    assert CONTENT not in encrypted and b"keys" not in encrypted
    one, other = json.loads(encrypted), json.loads(encrypt_content(CONTENT, RIGHT))
    assert one["kdf"]["salt"] != other["kdf"]["salt"] and one["cipher"]["nonce"] != other["cipher"]["nonce"]


def test_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file uses 2**17 rounds of scrypt with blocks of 8, 128 MiB of memory (RFC 7914)."""
    monkeypatch.setattr(encrypted_file, "_SCRYPT_N", USUAL_N)
    kdf = json.loads(encrypt_content(CONTENT, RIGHT))["kdf"]
    assert (kdf["n"], kdf["r"], kdf["p"]) == (1 << 17, 8, 1)


def test_wrong_passphrase(encrypted: bytes) -> None:
    """The error is one line that repeats nothing."""
    for passphrase in (WRONG, RIGHT + b"\n", RIGHT[:-1], b""):
        with pytest.raises(SecretFileError) as caught:
            decrypt_content(encrypted, passphrase, "keys.jwks")
        assert str(caught.value) == "cannot decrypt keys.jwks: the passphrase is wrong, or the file was modified"


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("kdf", "n"), 1 << 14),
        (("kdf", "n"), 1 << 19),
        (("kdf", "n"), (1 << 17) + 1),
        (("kdf", "n"), True),
        (("kdf", "n"), "131072"),
        (("kdf", "r"), 1),
        (("kdf", "r"), 1 << 20),
        (("kdf", "p"), 0),
        (("kdf", "p"), 5),
        (("kdf", "name"), "pbkdf2"),
        (("kdf", "salt"), "AAAA"),
        (("kdf", "salt"), None),
        (("kdf",), []),
        (("cipher", "name"), "none"),
        (("cipher", "nonce"), "AAAA"),
        (("version",), 2),
        (("ciphertext",), "*"),
    ],
)
def test_refused_parameters(encrypted: bytes, path: tuple[str, ...], to: Any) -> None:
    """Weak parameters, and those that need more memory than a daemon has, are refused before computing."""
    with pytest.raises(SecretFileError, match="unknown format, or scrypt cost"):
        decrypt_content(change_member(encrypted, *path, to=to), RIGHT, "it")


def test_out_of_memory(encrypted: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small or busy host gets an error about memory."""
    monkeypatch.setattr(Scrypt, "derive", mock.Mock(side_effect=MemoryError))
    with pytest.raises(SecretFileError, match="^not enough memory for scrypt, which needs 32 MiB$"):
        decrypt_content(encrypted, RIGHT, "keys.jwks")


def test_tampered(encrypted: bytes) -> None:
    """Any change is detected: parameters and names are authenticated too."""
    document = json.loads(encrypted)
    nonce = document["cipher"]["nonce"]
    for content in (
        change_member(encrypted, "kdf", "p", to=2),
        change_member(encrypted, "cipher", "nonce", to=nonce[:-4] + ("AAAA" if nonce[-4:] != "AAAA" else "BBBB")),
        change_member(encrypted, "ciphertext", to="A" * 24 + document["ciphertext"][24:]),
        change_member(encrypted, "comment", to="mine"),
    ):
        with pytest.raises(SecretFileError, match="cannot decrypt"):
            decrypt_content(content, RIGHT, "it")


def test_changes_leave_it_encrypted(tmp_path: Path) -> None:
    """Rotation, preparation and retirement keep the file encrypted by its passphrase, with mode 0600."""
    path, right = tmp_path / "keys.jwks", tmp_path / "passphrase"
    create_secret_file(right, RIGHT + b"\n")
    first, passphrase = create_keys(path), make_passphrase_source(right)
    encrypt_keys(path, RIGHT)
    assert load_keys(path, passphrase) == first
    for change in (
        lambda: rotate_keys(path, str, passphrase=passphrase),
        lambda: rotate_keys(path, str, prepare=True, passphrase=passphrase),
        lambda: retire_keys(path, "prekey", str, passphrase=passphrase),
    ):
        change()
        content = path.read_bytes()
        assert is_encrypted(content) and b'"d"' not in content and path.stat().st_mode & 0o777 == 0o600
    kids = [kid for kid, _ in load_keys(path, passphrase)]
    assert kids[0] == "prekey-2" and "prekey-3" in kids and "prekey" not in kids
    decrypt_keys(path, passphrase)
    assert [kid for kid, _ in load_keys(path)] == kids
    assert path.stat().st_mode & 0o777 == 0o600


def test_refusals(tmp_path: Path) -> None:
    """Without the passphrase, with another one, or onto an existing file, nothing changes."""
    path, wrong, short = tmp_path / "keys.jwks", tmp_path / "wrong", tmp_path / "short"
    create_keys(path)
    with pytest.raises(SecretFileError, match="is not encrypted"):
        decrypt_keys(path, make_passphrase_source(None))
    encrypt_keys(path, RIGHT)
    before = path.read_bytes()
    create_secret_file(wrong, WRONG)
    create_secret_file(short, b"eleven byte\n")
    with pytest.raises(SecretFileError, match="is already encrypted"):
        encrypt_keys(path, WRONG)
    for source, message in (
        (None, "set identity.passphrase_file"),
        (wrong, "the passphrase is wrong"),
        (short, "is shorter than 12 bytes"),
        (tmp_path / "none", "cannot read"),
        (Path("credential:passphrase"), "no such credential"),
    ):
        with pytest.raises(SecretFileError, match=message):
            load_keys(path, make_passphrase_source(source))
        with pytest.raises(SecretFileError, match=message):
            rotate_keys(path, str, passphrase=make_passphrase_source(source))
    assert path.read_bytes() == before


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemd credential may show the group's bit, as its ACL does; no other bit, and no other file."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    path = tmp_path / "passphrase"
    create_secret_file(path, RIGHT)
    for mode, fits in ((0o400, True), (0o440, True), (0o600, True), (0o460, False), (0o444, False)):
        path.chmod(mode)
        if fits:
            assert read_secret_file(path) == RIGHT
        else:
            with pytest.raises(SecretFileError, match="accessible to other users"):
                read_secret_file(path)
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "another"))
    with pytest.raises(SecretFileError, match="accessible to other users"):
        read_secret_file(path)
