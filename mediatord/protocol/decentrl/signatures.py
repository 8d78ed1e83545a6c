"""
Ed25519 signatures over canonical JSON, texts and tags, and base64 as Decentrl writes it (reference section 5).

The publisher's signature of a public event (DCTRL-0007, reference 10.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nacl.exceptions
from nacl import bindings

from mediatord.protocol.decentrl.canonical_json import canonicalize
from mediatord.protocol.encoding import decode_base64, encode_base64

_SIGNATURE_BYTES = bindings.crypto_sign_BYTES
_KEY_BYTES = bindings.crypto_sign_PUBLICKEYBYTES


def sign_json(value: Any, seed: bytes) -> str:
    """
    The signature of a value, as base64.

    :param seed: the 32 bytes of an Ed25519 private key.
    :raise ValueError: a value that has no canonical form.
    """
    return _sign(canonicalize(value), seed)


def verify_json(value: Any, signature: str, key: bytes) -> bool:
    """Whether it is what the holder of `key` signed; what has no canonical form was signed by nobody."""
    try:
        message = canonicalize(value)
    except ValueError:
        return False
    return verify_bytes(message, signature, key)


def verify_bytes(message: bytes, signature: str, key: bytes) -> bool:
    """Whether `signature`, in base64, is one of `message` by the holder of `key`; never raises."""
    try:
        raw = decode_base64(signature)
    except ValueError:
        return False
    if len(raw) != _SIGNATURE_BYTES or len(key) != _KEY_BYTES:
        return False
    try:
        bindings.crypto_sign_open(raw + message, key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


def make_encrypted_tag(tag: str, seed: bytes) -> str:
    """
    What stands for a tag on the mediator, which only the owner of the seed can make (reference 5.3).

    :raise ValueError: half of a surrogate pair in the tag.
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
    Whether the publisher signed it; never raises.

    :param timestamp: as it came, Unix seconds.
    :param key: the publisher's Ed25519 public key.
    :param channel_id: where there is one, it is signed as well.
    """
    return verify_json(_signed_event_members(event, tags, timestamp, channel_id), signature, key)


def sign_event(
    event: str, tags: Sequence[str], timestamp: int | float, seed: bytes, channel_id: str | None = None
) -> str:
    """
    The signature, as base64.

    :param seed: the 32 bytes of the publisher's Ed25519 private key.
    :raise ValueError: a timestamp that is no number of JSON.
    """
    return sign_json(_signed_event_members(event, tags, timestamp, channel_id), seed)


def _signed_event_members(
    event: str, tags: Sequence[str], timestamp: int | float, channel_id: str | None
) -> dict[str, Any]:
    """Clients until 0.5.4 sign three fields; channels are newer."""
    signed = {"event": event, "tags": list(tags), "timestamp": timestamp}
    return signed if channel_id is None else {**signed, "channel_id": channel_id}
