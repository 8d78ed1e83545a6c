"""
Passphrase encryption of files at rest.

A file is one JSON object: `kdf` is scrypt (RFC 7914) with `n`, `r`, `p` and `salt`; `cipher` is AES-256-GCM with
`nonce`; salt, nonce and `ciphertext` (with tag) are base64. Everything but the ciphertext is authenticated, as JSON
with sorted names and without white space. Salt and nonce are new for every write.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from mediatord.runtime import secret_files
from mediatord.runtime.secret_files import SecretFileError, read_secret_file

MIN_PASSPHRASE_BYTES = 12
_TYPE = "mediatord encrypted file"
_VERSION = 1
# 128 MiB and a third of a second. Lower costs are weak; higher ones could stop a daemon that reads such a file.
_SCRYPT_N, _MIN_SCRYPT_N, _MAX_SCRYPT_N = 1 << 17, 1 << 15, 1 << 18
_SCRYPT_R, _SCRYPT_P, _MAX_SCRYPT_P = 8, 1, 4
_SALT_BYTES, _NONCE_BYTES, _KEY_BYTES = 16, 12, 32
_MAX_FILE_BYTES = 1_048_576

PassphraseSource = Callable[[Path], bytes]


def is_encrypted(content: bytes) -> bool:
    """Whether this is the content of an encrypted file."""
    return _parse_document(content).get("type") == _TYPE


def encrypt_content(content: bytes, passphrase: bytes) -> bytes:
    """Encrypt the content of a file."""
    header = {
        "type": _TYPE,
        "version": _VERSION,
        "kdf": {
            "name": "scrypt",
            "n": _SCRYPT_N,
            "r": _SCRYPT_R,
            "p": _SCRYPT_P,
            "salt": _encode_base64(os.urandom(_SALT_BYTES)),
        },
        "cipher": {"name": "AES-256-GCM", "nonce": _encode_base64(os.urandom(_NONCE_BYTES))},
    }
    key, nonce = _derive_key(header, passphrase), _decode_base64(header["cipher"], "nonce", _NONCE_BYTES)  # type: ignore[arg-type]  # a dict
    sealed = AESGCM(key).encrypt(nonce, content, _encode_header(header))
    return json.dumps({**header, "ciphertext": _encode_base64(sealed)}, indent=1).encode() + b"\n"


def decrypt_content(content: bytes, passphrase: bytes, name: object) -> bytes:
    """
    Decrypt the content of a file.

    :param name: of the file, for error messages.
    :raise SecretFileError: another format, a wrong passphrase, or not enough memory.
    """
    document = _parse_document(content)
    try:
        sealed = _decode_base64(document, "ciphertext", None)
        header = {member: value for member, value in document.items() if member != "ciphertext"}
        if header.get("version") != _VERSION or header["cipher"]["name"] != "AES-256-GCM":
            raise ValueError("not of this kind")
        key, nonce = _derive_key(header, passphrase), _decode_base64(header["cipher"], "nonce", _NONCE_BYTES)
    except (KeyError, TypeError, ValueError):
        raise SecretFileError(f"cannot decrypt {name}: unknown format, or scrypt cost outside 2^15 to 2^18") from None
    try:
        return AESGCM(key).decrypt(nonce, sealed, _encode_header(header))
    except InvalidTag:
        raise SecretFileError(f"cannot decrypt {name}: the passphrase is wrong, or the file was modified") from None


def make_passphrase_source(file: Path | None, ask: PassphraseSource | None = None) -> PassphraseSource:
    """
    A source of passphrases: a file, or `ask` if there is none.

    :param file: mode 0600, or a credential; a trailing line break is ignored.
    :param ask: asks for the passphrase of a file; raises SecretFileError if that is impossible.
    """

    def read(of: Path) -> bytes:
        if file is None or (ask is not None and secret_files.is_missing_credential(file)):
            if ask is None:
                raise SecretFileError(f"{of} is encrypted; set identity.passphrase_file")
            return ask(of)
        return check_passphrase(read_secret_file(file).rstrip(b"\r\n"), file)

    return read


def check_passphrase(passphrase: bytes, name: object) -> bytes:
    """:raise SecretFileError: too short."""
    if len(passphrase) < MIN_PASSPHRASE_BYTES:
        raise SecretFileError(
            f"{name} is shorter than {MIN_PASSPHRASE_BYTES} bytes; run: openssl rand -base64 24 > FILE"
        )
    return passphrase


def _derive_key(header: dict[str, Any], passphrase: bytes) -> bytes:
    kdf = header["kdf"]
    n, r, p = kdf["n"], kdf["r"], kdf["p"]
    fits = all(type(one) is int for one in (n, r, p)) and _MIN_SCRYPT_N <= n <= _MAX_SCRYPT_N and n & (n - 1) == 0
    if kdf["name"] != "scrypt" or not fits or r != _SCRYPT_R or not 1 <= p <= _MAX_SCRYPT_P:
        raise ValueError("not of this kind")
    try:
        return Scrypt(salt=_decode_base64(kdf, "salt", _SALT_BYTES), length=_KEY_BYTES, n=n, r=r, p=p).derive(
            passphrase
        )
    except MemoryError:
        raise SecretFileError(f"not enough memory for scrypt, which needs {128 * n * r >> 20} MiB") from None


def _encode_header(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _parse_document(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content) if len(content) <= _MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode_base64(members: dict[str, Any], name: str, length: int | None) -> bytes:
    try:
        value = base64.b64decode(members[name], validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None
    if length is not None and len(value) != length:
        raise ValueError("of another length")
    return value
