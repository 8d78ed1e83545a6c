"""Authenticated encryption of the content of an envelope: the three `enc` of DIDComm (reference 1.2 and 1.5)."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import nacl.exceptions
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from nacl import bindings

Enc = Literal["A256CBC-HS512", "A256GCM", "XC20P"]
# Key, IV, ciphertext, tag and aad to plaintext.
Opening = Callable[[bytes, bytes, bytes, bytes, bytes], bytes]

_BLOCK = 16
_HALF = 32
_PADDINGS = tuple(bytes([count]) * count for count in range(_BLOCK + 1))


@dataclass(frozen=True, slots=True)
class ContentCipher:
    """
    One `enc`: sizes in bytes, and both directions.

    :param key_size: of the content-encryption key.
    :param sealing: (key, iv, plaintext, aad) -> (ciphertext, tag).
    :param opening: for parts of the right size; ValueError if this is not what was sealed under that key.
    """

    key_size: int
    iv_size: int
    tag_size: int
    sealing: Callable[[bytes, bytes, bytes, bytes], tuple[bytes, bytes]]
    opening: Opening

    def seal(self, key: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes, bytes]:
        """Encrypt under a fresh IV, and return that, the ciphertext and the tag."""
        iv = secrets.token_bytes(self.iv_size)
        return iv, *self.sealing(key, iv, plaintext, aad)

    def open(self, key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
        """
        Verify, then decrypt.

        :raise ValueError: a part has the wrong size, or this is not what was sealed under that key.
        """
        if len(key) != self.key_size or len(iv) != self.iv_size or len(tag) != self.tag_size:
            raise ValueError("a part of the wrong size")
        return self.opening(key, iv, data, tag, aad)


class _Ready(Cipher[CBC]):
    """A cipher whose key and IV are known to have the right sizes; looking again costs as much as a short message."""

    def __init__(self, key: bytes, iv: bytes) -> None:
        self.algorithm = AES(key)
        self.mode = CBC(iv)


def _mac(key: bytes, iv: bytes, data: bytes, aad: bytes) -> bytes:
    message = b"".join((aad, iv, data, (8 * len(aad)).to_bytes(8, "big")))
    return hmac.digest(key[:_HALF], message, "sha512")[:32]


def _seal_cbc(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    count = _BLOCK - len(plaintext) % _BLOCK
    data = _Ready(key[_HALF:], iv).encryptor().update(plaintext + _PADDINGS[count])
    return data, _mac(key, iv, data, aad)


def _open_cbc(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    if not hmac.compare_digest(_mac(key, iv, data, aad), tag):
        raise ValueError("not authentic")
    # From here on it was written by a holder of the key, so what goes wrong tells nobody anything.
    if not data or len(data) % _BLOCK:
        raise ValueError("not whole blocks")
    padded = _Ready(key[_HALF:], iv).decryptor().update(data)  # whole blocks come out at once
    count = padded[-1]
    if not 1 <= count <= _BLOCK or not padded.endswith(_PADDINGS[count]):
        raise ValueError("not padded")
    return padded[:-count]


def _seal_gcm(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _parted(AESGCM(key).encrypt(iv, plaintext, aad))


def _open_gcm(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(iv, data + tag, aad)
    except InvalidTag:
        raise ValueError("not authentic") from None


def _seal_xchacha(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _parted(bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, aad, iv, key))


def _open_xchacha(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(data + tag, aad, iv, key)
    except nacl.exceptions.CryptoError:
        raise ValueError("not authentic") from None


def _parted(sealed: bytes) -> tuple[bytes, bytes]:
    return sealed[:-16], sealed[-16:]


CIPHERS: dict[Enc, ContentCipher] = {
    "A256CBC-HS512": ContentCipher(64, 16, 32, _seal_cbc, _open_cbc),
    "A256GCM": ContentCipher(32, 12, 16, _seal_gcm, _open_gcm),
    "XC20P": ContentCipher(32, 24, 16, _seal_xchacha, _open_xchacha),
}
