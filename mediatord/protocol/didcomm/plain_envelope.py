"""
Opening of JWE envelopes of the most common form: one recipient, X25519, the ciphertext without escapes.

Nearly all envelopes have it, and reading them so takes half the time of :mod:`mediatord.protocol.didcomm.jwe`, whose
rules hold here too: whatever they would treat in another way is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any, NamedTuple

import orjson
from pybase64 import b64decode

from mediatord.errors import MediatorError
from mediatord.protocol.didcomm.jwe import (
    CIPHERTEXT_PLACEHOLDER,
    CONTENT_CIPHERS,
    KEY_WRAP_OVERHEAD,
    MAX_PROTECTED,
    Enc,
    cut_ciphertext,
    derive_kek,
    derive_static_secret,
    load_key_exchange,
    read_parties,
    unwrap_cek,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import MAX_VALUES, decode_base64url, loads_unique_members

# Number of members of a JWE for one recipient. If all of them are read, there are no others.
_GENERAL_MEMBERS, _FLATTENED_MEMBERS = 5, 6

_EPK_SIZE = 32
# By size modulo 3: allowed last characters of unpadded base64url, and filler up to a multiple of four characters.
_FINAL_CHARACTERS = (f"{ascii_letters}{digits}-_", "AQgw", "AEIMQUYcgkosw048")
_FILLERS = ("", "AA", "A")

# Raised by unexpected JSON shapes and by failed decryption.
FALLBACK_ERRORS = (ValueError, TypeError, LookupError, AttributeError, MediatorError)


class OpenedEnvelope(NamedTuple):
    """
    The content of an envelope.

    :param key: the mediator's key, and `kid` its id as the sender spelled it.
    :param sender_kid: of an authcrypt; None for an anoncrypt.
    :param digest: as of :meth:`~mediatord.protocol.didcomm.jwe.Envelope.compute_digest`; empty for an anoncrypt.
    """

    plaintext: bytes
    kid: str
    key: PrivateKey
    sender_kid: str | None
    digest: bytes

    def __repr__(self) -> str:
        """Omits the content."""
        return f"OpenedEnvelope(kid={self.kid!r}, sender_kid={self.sender_kid!r})"


def open_plain_envelope(
    raw: bytes,
    agreement_keys: Mapping[str, Sequence[PrivateKey]],
    find_sender_key: Callable[[str], PublicKey | None] = lambda sender_kid: None,
) -> OpenedEnvelope | None:
    """
    Parse and decrypt an envelope; None if it has another form, or cannot be decrypted. Never raises.

    No key is used unless the envelope has the expected form.

    :param agreement_keys: the mediator's private keys by the kids that may denote them, the likeliest first.
    :param find_sender_key: finds the key of the sender of an authcrypt; without one the envelope is not decrypted.
    """
    try:
        jwe, entry, shared, ciphertext = _parse(raw)
        header = shared | entry["header"]
        kid, epk, enc = header["kid"], header["epk"], header["enc"]
        keys = agreement_keys[kid]
        (key,) = keys if len(keys) == 1 else [one for one in keys if one.curve == "X25519"]
        if not key.curve == epk["crv"] == "X25519" or epk["kty"] != "OKP":
            return None
        sender_kid, info = read_parties(header, (kid,))
        layout, authenticated = _JWE_LAYOUTS[enc], jwe["protected"].encode()
        small = layout.decoded(epk["x"], jwe["tag"], jwe["iv"], entry["encrypted_key"])
        tag, static_secret, digest = None, b"", b""
        if sender_kid is not None:
            # Only this one form of authcrypt is not a draft.
            sender_key = find_sender_key(sender_kid) if enc == "A256CBC-HS512" and "apv" in header else None
            if sender_key is None or sender_key.curve != "X25519":
                return None
            tag, static_secret = small[layout.tag_at], derive_static_secret(key, sender_key)
            digest = sha256(authenticated + b"." + tag).digest()
        data = decode_base64url(ciphertext)
        secret = load_key_exchange(key.secret)(small[:_EPK_SIZE]) + static_secret
        cek = unwrap_cek(derive_kek(secret, info, tag), small[layout.key_at])
        plaintext = layout.decrypt(cek, small[layout.iv_at], data, small[layout.tag_at], authenticated)
        return OpenedEnvelope(plaintext, kid, key, sender_kid, digest)
    except FALLBACK_ERRORS:
        return None


def _parse(raw: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bytes]:
    """
    The members of an envelope, those of its recipient, the protected header, and the ciphertext.

    :raise ValueError: it has another form; or one of :data:`FALLBACK_ERRORS`.
    """
    text, ciphertext = cut_ciphertext(raw, bytes)
    if ciphertext is None or len(text) > MAX_VALUES:
        raise ValueError("a ciphertext that is not alone, or too much around it")
    jwe = orjson.loads(text)
    protected = jwe["protected"]
    if jwe["ciphertext"] != CIPHERTEXT_PLACEHOLDER or len(protected) > MAX_PROTECTED:
        raise ValueError("another ciphertext, or a long header")
    (entry,) = jwe["recipients"] if len(jwe) == _GENERAL_MEMBERS else (jwe,)
    if entry is jwe and len(jwe) != _FLATTENED_MEMBERS:
        raise ValueError("other members")
    text = decode_base64url(protected)
    shared, more = orjson.loads(text), entry["header"]
    if orjson.dumps(shared) != text:
        shared = loads_unique_members(text)
    if not shared.keys().isdisjoint(more) or not {"crit", "zip"}.isdisjoint((*shared, *more)):
        raise ValueError("a header twice, an extension, or compression")
    return jwe, entry, shared, ciphertext


class _JWELayout(NamedTuple):
    """
    Lengths, last characters and fillers of the short base64url members, so that they are decoded together in one
    call; and the slices of the result, behind the ephemeral key.
    """

    lengths: tuple[int, ...]
    ends: tuple[str, ...]
    fills: tuple[str, ...]
    tag_at: slice
    iv_at: slice
    key_at: slice
    decrypt: Callable[[bytes, bytes, bytes, bytes, bytes], bytes]

    @classmethod
    def of(cls, enc: Enc) -> _JWELayout:
        cipher = CONTENT_CIPHERS[enc]
        sizes = (_EPK_SIZE, cipher.tag_size, cipher.iv_size, cipher.key_size + KEY_WRAP_OVERHEAD)
        places, start = [], 0
        for size in sizes:
            places.append(slice(start, start + size))
            start += -(-size // 3) * 3
        _, tag_at, iv_at, key_at = places
        lengths = tuple(-(-size * 4 // 3) for size in sizes)
        ends = tuple(_FINAL_CHARACTERS[size % 3] for size in sizes)
        fills = tuple(_FILLERS[size % 3] for size in sizes)
        return cls(lengths, ends, fills, tag_at, iv_at, key_at, cipher.decrypt)

    def decoded(self, x: str, tag: str, iv: str, wrapped: str) -> bytes:
        """
        Decode the short members together.

        :raise ValueError: one has another length, or is not strict unpadded base64url.
        """
        x_end, tag_end, iv_end, wrapped_end = self.ends
        x_fill, tag_fill, iv_fill, wrapped_fill = self.fills
        text = "".join((x, x_fill, tag, tag_fill, iv, iv_fill, wrapped, wrapped_fill))
        if (
            (len(x), len(tag), len(iv), len(wrapped)) != self.lengths
            or x[-1] not in x_end
            or tag[-1] not in tag_end
            or iv[-1] not in iv_end
            or wrapped[-1] not in wrapped_end
            or "+" in text
            or "/" in text
        ):
            raise ValueError("another spelling")
        return b64decode(text, b"-_", True)


_JWE_LAYOUTS: dict[Any, _JWELayout] = {enc: _JWELayout.of(enc) for enc in CONTENT_CIPHERS}
