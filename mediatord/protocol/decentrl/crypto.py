"""
Cryptography of Decentrl: Ed25519 signatures over canonical JSON, X25519 with AES-256-GCM (reference section 5, 10.1).

The X25519 shared secret is the AES key, without key derivation (reference 5.1, 5.2).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import nacl.exceptions
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from nacl import bindings

from mediatord.protocol.decentrl.canonical_json import canonicalize
from mediatord.protocol.decentrl.did_decentrl import decode_multibase_key
from mediatord.protocol.encoding import decode_base64, encode_base64

_SIGNATURE_BYTES = bindings.crypto_sign_BYTES
_SIGNING_KEY_BYTES = bindings.crypto_sign_PUBLICKEYBYTES


def sign_json(value: Any, seed: bytes) -> str:
    """
    Signature of a JSON value, as base64.

    :param seed: 32-byte seed of an Ed25519 key.
    :raise ValueError: the value has no canonical form.
    """
    return _sign(canonicalize(value), seed)


def verify_json(value: Any, signature: str, key: bytes) -> bool:
    """Whether the holder of `key` signed a JSON value; False if it has no canonical form."""
    try:
        message = canonicalize(value)
    except ValueError:
        return False
    return verify_bytes(message, signature, key)


def verify_bytes(message: bytes, signature: str, key: bytes) -> bool:
    """Whether the base64 `signature` over `message` is valid; never raises."""
    try:
        raw = decode_base64(signature)
    except ValueError:
        return False
    if len(raw) != _SIGNATURE_BYTES or len(key) != _SIGNING_KEY_BYTES:
        return False
    try:
        bindings.crypto_sign_open(raw + message, key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


def make_encrypted_tag(tag: str, seed: bytes) -> str:
    """
    A tag as the mediator sees it: its deterministic signature, which only the holder of the seed can make (reference
    5.3).

    :raise ValueError: a lone surrogate in the tag.
    """
    return _sign(tag.encode(), seed)


def _sign(message: bytes, seed: bytes) -> str:
    _, secret = bindings.crypto_sign_seed_keypair(seed)
    return encode_base64(bindings.crypto_sign(message, secret)[:_SIGNATURE_BYTES])


def verify_event_signature(
    event: str,
    tags: Sequence[str],
    timestamp: int | float,
    signature: str,
    key: bytes,
    channel_id: str | None = None,
) -> bool:
    """
    Whether the publisher signed a public event (DCTRL-0007); never raises.

    :param timestamp: as received, Unix seconds.
    :param key: the publisher's Ed25519 public key.
    :param channel_id: covered by the signature if present.
    """
    return verify_json(_signed_event_members(event, tags, timestamp, channel_id), signature, key)


def sign_event(
    event: str, tags: Sequence[str], timestamp: int | float, seed: bytes, channel_id: str | None = None
) -> str:
    """
    Signature of a public event, as base64.

    :param seed: 32-byte seed of the publisher's Ed25519 key.
    :raise ValueError: a timestamp that JSON cannot express.
    """
    return sign_json(_signed_event_members(event, tags, timestamp, channel_id), seed)


def _signed_event_members(
    event: str, tags: Sequence[str], timestamp: int | float, channel_id: str | None
) -> dict[str, Any]:
    """Members that a publisher signs: three until client 0.5.4; channel ids were added later."""
    signed = {"event": event, "tags": list(tags), "timestamp": timestamp}
    return signed if channel_id is None else {**signed, "channel_id": channel_id}


_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16


def encrypt(plaintext: bytes, key: bytes, nonce: bytes | None = None) -> str:
    """
    Encrypt; returns nonce, ciphertext and tag as base64.

    :param key: 32 bytes.
    :param nonce: 12 bytes, unique for the key; random by default.
    :raise ValueError: wrong size of key or nonce.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES) if nonce is None else nonce
    if len(nonce) != _NONCE_BYTES:
        raise ValueError("a nonce of the wrong size")
    return encode_base64(nonce + _make_cipher(key).encrypt(nonce, plaintext, None))


def decrypt(text: str, key: bytes) -> bytes:
    """
    Inverse of :func:`encrypt`.

    :raise ValueError: not base64, too short, or authentication fails.
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
    X25519 shared secret, 32 bytes.

    :raise ValueError: wrong key size, or a public key of low order, whose secret is the same for everybody.
    """
    if len(private) != _KEY_BYTES or len(public) != _KEY_BYTES:
        raise ValueError("a key of the wrong size")
    try:
        return bindings.crypto_scalarmult(private, public)
    except nacl.exceptions.RuntimeError:
        raise ValueError("a public key of low order") from None


def generate_key_pair() -> tuple[bytes, bytes]:
    """A private and public X25519 key."""
    private = secrets.token_bytes(_KEY_BYTES)
    return private, bindings.crypto_scalarmult_base(private)


def decode_public_key(text: str) -> bytes:
    """
    An X25519 public key, 32 bytes, from base64 (as mediatord writes it) or multibase.

    :raise ValueError: neither.
    """
    try:
        key = decode_base64(text)
    except ValueError:
        key = b""
    return key if len(key) == _KEY_BYTES else decode_multibase_key(text, "X25519")


def _make_cipher(key: bytes) -> AESGCM:
    # AESGCM would also accept shorter keys.
    if len(key) != _KEY_BYTES:
        raise ValueError("a key of the wrong size")
    return AESGCM(key)
