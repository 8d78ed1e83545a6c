"""The DID method did:decentrl, whose identifier contains keys and mediator (reference 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from mediatord.protocol import encoding
from mediatord.protocol.encoding import decode_base64, encode_base64url

KeyType: TypeAlias = Literal["Ed25519", "X25519"]

MAX_DID_LENGTH = 2048

_METHOD = ["did", "decentrl"]
_KEY_BYTES = 32
_MULTICODEC: dict[KeyType, bytes] = {"Ed25519": b"\xed\x01", "X25519": b"\xec\x01"}
# A multicodec key of 34 bytes has at most 47 base58 digits, after the `z`.
_MAX_KEY_LENGTH = 48


@dataclass(frozen=True, slots=True)
class DecentrlDID:
    """
    A parsed did:decentrl.

    :param did: as received; did:decentrl DIDs are equal only as text.
    :param signing_key: Ed25519, 32 bytes.
    :param prekey: X25519, 32 bytes.
    """

    did: str
    alias: str
    signing_key: bytes = field(repr=False)
    prekey: bytes = field(repr=False)
    mediator_did: str

    @property
    def signing_key_id(self) -> str:
        """Key id of the signing key."""
        return f"{self.did}#signing"


@lru_cache(maxsize=4096)
def parse_did(text: str) -> DecentrlDID:
    """
    Parse a did:decentrl; base64 in either alphabet, keys with or without multicodec prefix.

    :raise ValueError: anything else, including DID URLs.
    """
    if len(text) > MAX_DID_LENGTH:
        raise ValueError("too long for a DID")
    parts = text.split(":")
    if len(parts) != 6 or parts[:2] != _METHOD:
        raise ValueError("not a did:decentrl")
    _, _, alias, signing_key, prekey, mediator = parts
    mediator_did = _decode_text(mediator)
    if not mediator_did.startswith("did:"):
        raise ValueError("the mediator has no DID")
    return DecentrlDID(
        text,
        _decode_text(alias),
        decode_multibase_key(signing_key, "Ed25519"),
        decode_multibase_key(prekey, "X25519"),
        mediator_did,
    )


def make_did(alias: str, signing_key: bytes, prekey: bytes, mediator_did: str, *, raw: bool = False) -> str:
    """
    The did:decentrl of two public keys.

    :param raw: as for :func:`encode_multibase_key`.
    :raise ValueError: invalid keys or mediator DID, a lone surrogate, or too long.
    """
    try:
        names = [encode_base64url(name.encode()) for name in (alias, mediator_did)]
    except UnicodeEncodeError:
        raise ValueError("not Unicode") from None
    keys = [encode_multibase_key(signing_key, "Ed25519", raw), encode_multibase_key(prekey, "X25519", raw)]
    return parse_did(":".join([*_METHOD, names[0], *keys, names[1]])).did


def encode_multibase_key(key: bytes, kind: KeyType, raw: bool = False) -> str:
    """
    A public key as base58btc multibase.

    :param raw: omit the multicodec prefix, which some readers reject (reference section 2).
    :raise ValueError: not 32 bytes.
    """
    if len(key) != _KEY_BYTES:
        raise ValueError("a key of the wrong size")
    return "z" + encoding.encode_base58(key if raw else _MULTICODEC[kind] + key)


def decode_multibase_key(text: str, kind: KeyType) -> bytes:
    """
    Inverse of :func:`encode_multibase_key`, with or without prefix.

    :raise ValueError: anything else, including a key of the other type.
    """
    if not text.startswith("z") or len(text) > _MAX_KEY_LENGTH:
        raise ValueError("not a key in multibase")
    data = encoding.decode_base58(text[1:])
    if len(data) == _KEY_BYTES:
        return data
    prefix = _MULTICODEC[kind]
    if len(data) != len(prefix) + _KEY_BYTES or not data.startswith(prefix):
        raise ValueError("not a key of this kind")
    return data.removeprefix(prefix)


def _decode_text(encoded: str) -> str:
    try:
        return decode_base64(encoded).decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
