"""X25519 and AES-256-GCM, the shared secret being the key as it is (reference 5.1 and 5.2)."""

from __future__ import annotations

import secrets

import nacl.exceptions
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from nacl import bindings

from mediatord.protocol.decentrl.did_decentrl import decode_multibase_key
from mediatord.protocol.encoding import decode_base64, encode_base64

_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16


def encrypt(plaintext: bytes, key: bytes, nonce: bytes | None = None) -> str:
    """
    Nonce, ciphertext and tag, as base64.

    :param key: 32 bytes.
    :param nonce: 12 bytes, never used with this key before; made up where there is none.
    :raise ValueError: a key or nonce of another size.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES) if nonce is None else nonce
    if len(nonce) != _NONCE_BYTES:
        raise ValueError("a nonce of the wrong size")
    return encode_base64(nonce + _make_cipher(key).encrypt(nonce, plaintext, None))


def decrypt(text: str, key: bytes) -> bytes:
    """
    The plaintext that :func:`seal` was given.

    :raise ValueError: not base64, too short, or not sealed with this key.
    """
    data = decode_base64(text)
    if len(data) < _NONCE_BYTES + _TAG_BYTES:
        raise ValueError("too short for a ciphertext")
    try:
        return _make_cipher(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None)
    except InvalidTag:
        raise ValueError("not sealed with this key") from None


def derive_shared_secret(private: bytes, public: bytes) -> bytes:
    """
    What two X25519 keys have in common: 32 bytes.

    :raise ValueError: a key of another size, or a public key of low order: everyone shares the same with that.
    """
    if len(private) != _KEY_BYTES or len(public) != _KEY_BYTES:
        raise ValueError("a key of the wrong size")
    try:
        return bindings.crypto_scalarmult(private, public)
    except nacl.exceptions.RuntimeError:
        raise ValueError("a public key of low order") from None


def generate_key_pair() -> tuple[bytes, bytes]:
    """A private X25519 key, and its public one."""
    private = secrets.token_bytes(_KEY_BYTES)
    return private, bindings.crypto_scalarmult_base(private)


def decode_public_key(text: str) -> bytes:
    """
    The 32 bytes of an X25519 key in base64, which is what we write, or in multibase.

    :raise ValueError: neither.
    """
    try:
        key = decode_base64(text)
    except ValueError:
        key = b""
    return key if len(key) == _KEY_BYTES else decode_multibase_key(text, "X25519")


def _make_cipher(key: bytes) -> AESGCM:
    # AES with shorter keys would do as well.
    if len(key) != _KEY_BYTES:
        raise ValueError("a key of the wrong size")
    return AESGCM(key)
