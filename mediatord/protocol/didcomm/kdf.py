"""From a shared secret to the key-encryption key, and the values that go in with it (reference 1.3 and 1.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

Alg = Literal["ECDH-ES+A256KW", "ECDH-1PU+A256KW"]

ANONCRYPT: Alg = "ECDH-ES+A256KW"
AUTHCRYPT: Alg = "ECDH-1PU+A256KW"

_FIRST_ROUND = b"\0\0\0\1"
_KEY_BITS = (256).to_bytes(4, "big")
_ALG_INFO = {alg: len(alg).to_bytes(4, "big") + alg.encode() for alg in (ANONCRYPT, AUTHCRYPT)}


def other_info(alg: Alg, apu: bytes, apv: bytes) -> bytes:
    """
    What both sides put into the derivation besides the secret, without the tag.

    :param apu: decoded, as received; empty if absent. Likewise `apv`.
    """
    return b"".join((_ALG_INFO[alg], len(apu).to_bytes(4, "big"), apu, len(apv).to_bytes(4, "big"), apv, _KEY_BITS))


def kek(secret: bytes, info: bytes, tag: bytes | None = None) -> bytes:
    """
    The 32-byte key-encryption key: Concat KDF with SHA-256, of which one round is enough.

    :param secret: Z, or Ze followed by Zs.
    :param info: from :func:`other_info`.
    :param tag: of the content, for ECDH-1PU; None for ECDH-ES, and for draft 03 of ECDH-1PU (reference 1.10).
    """
    private = b"" if tag is None else len(tag).to_bytes(4, "big") + tag
    return hashlib.sha256(_FIRST_ROUND + secret + info + private).digest()


def apv_of(kids: Iterable[str]) -> bytes:
    """The `apv` of an envelope to these recipients: SHA-256 of the kids, sorted by code point (reference 1.3)."""
    return hashlib.sha256(".".join(sorted(kids)).encode()).digest()
