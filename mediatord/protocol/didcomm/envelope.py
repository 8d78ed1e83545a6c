"""
Opening and sealing envelopes: anoncrypt and authcrypt (reference section 1).

What is emitted has one shape, the one that every client tested can read (reference 1.3); what is accepted is
described in :mod:`mediatord.protocol.didcomm.jwe`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from mediatord.errors import Undecryptable
from mediatord.protocol.didcomm.agreement import Ephemeral, agree, agree_lasting
from mediatord.protocol.didcomm.content import CIPHERS, Enc
from mediatord.protocol.didcomm.jwe import Envelope, parse, parse_object
from mediatord.protocol.didcomm.kdf import ANONCRYPT, AUTHCRYPT, apv_of, kek, other_info
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.jsontext import b64url_decode, b64url_encode, dumps

__all__ = ["Enc", "Envelope", "open_envelope", "parse", "parse_object", "seal_anoncrypt", "seal_authcrypt"]

MEDIA_TYPE = "application/didcomm-encrypted+json"

# What key wrapping adds to a content-encryption key.
_WRAPPING = 8
# Characters in a key id of the sender.
_MAX_USUAL = 4096


def open_envelope(
    envelope: Envelope, kid: str, key: PrivateKey, sender: PublicKey | None, *, draft03: bool = False
) -> bytes:
    """
    The plaintext: steps 10 and 11 of reference 1.6.

    Once a kid of ours and all sizes are right, whatever is wrong costs the same operations: a key agreement (two for
    an authcrypt), an unwrapping, a tag. Only a right tag leads further, to padding. What is told apart by its cost is
    public: whether a kid is ours, whether a point is on its curve, how long the ciphertext is; and, for a moment, an
    ephemeral key that came before, whose secret is remembered.

    :param kid: one of `envelope.kids`, as written there.
    :param key: the key that this kid stands for.
    :param sender: of an authcrypt, the key of `envelope.sender_kid`; None for an anoncrypt.
    :param draft03: read an authcrypt without apv as draft 03 of ECDH-1PU, and as that only (reference 1.10).
    :raise Undecryptable: for whichever reason.
    """
    try:
        return _opened(envelope, kid, key, sender, draft03)
    except ValueError:
        raise Undecryptable from None


def _opened(envelope: Envelope, kid: str, key: PrivateKey, sender: PublicKey | None, draft03: bool) -> bytes:
    if kid not in envelope.wrapped:
        raise ValueError("not to this key")
    encrypted_key, epk = envelope.wrapped[kid]
    cipher = CIPHERS[envelope.header["enc"]]
    part = envelope.members.get
    iv, data, tag = b64url_decode(part("iv")), b64url_decode(part("ciphertext")), b64url_decode(part("tag"))
    wrapped = b64url_decode(encrypted_key)
    if len(wrapped) != cipher.key_size + _WRAPPING:
        raise ValueError("a wrapped key of the wrong size")
    secret = agree(key, PublicKey.from_jwk(epk))
    info_tag = None
    if envelope.sender_kid is not None:
        legacy = draft03 and envelope.without_apv
        secret += _sender_secret(envelope, key, sender, legacy)
        info_tag = None if legacy else tag
    elif sender is not None:
        raise ValueError("an anoncrypt has no sender")
    cek = unwrapped(kek(secret, envelope.info, info_tag), wrapped)
    return cipher.open(cek, iv, data, tag, envelope.members["protected"].encode())


def _sender_secret(envelope: Envelope, key: PrivateKey, sender: PublicKey | None, legacy: bool) -> bytes:
    if sender is None:
        raise ValueError("an authcrypt needs its sender's key")
    if envelope.enc != "A256CBC-HS512" and not legacy:
        raise ValueError("an enc that authcrypt has not")
    return agree_lasting(key, sender)


def unwrapped(wrapping_key: bytes, wrapped: bytes) -> bytes:
    """
    The content-encryption key. Where it was wrapped with another key it is one that nobody knows (RFC 7516 11.5), so
    that such an envelope is as much work as one with a wrong tag, and refused at the same place.
    """
    try:
        return aes_key_unwrap(wrapping_key, wrapped)
    except InvalidUnwrap:
        return secrets.token_bytes(len(wrapped) - _WRAPPING)


def seal_anoncrypt(
    plaintext: bytes, recipients: Sequence[tuple[str, PublicKey]], *, enc: Enc = "A256CBC-HS512"
) -> bytes:
    """
    An envelope that says nothing about its sender.

    :param recipients: one or more, as absolute kid and key, all on the same curve.
    :raise ValueError: no recipient, different curves, or a key that no secret can be agreed with.
    """
    return _sealed(plaintext, None, recipients, enc)


def seal_authcrypt(
    plaintext: bytes, sender: tuple[str, PrivateKey], recipients: Sequence[tuple[str, PublicKey]]
) -> bytes:
    """
    An envelope that proves to its recipients who sent it.

    :param sender: absolute kid and key, on the same curve as the recipients.
    :raise ValueError: as :func:`seal_anoncrypt`.
    """
    return _sealed(plaintext, sender, recipients, "A256CBC-HS512")


def _sealed(
    plaintext: bytes, sender: tuple[str, PrivateKey] | None, recipients: Sequence[tuple[str, PublicKey]], enc: Enc
) -> bytes:
    if not recipients:
        raise ValueError("nobody to seal for")
    ordered = sorted(recipients, key=lambda recipient: recipient[0])
    ephemeral = Ephemeral(ordered[0][1].curve)
    skid = sender[0] if sender else None
    frame = _usual_frame if len(skid or "") <= _MAX_USUAL else _frame
    before, after, apu = frame(skid, enc)
    apv = apv_of(kid for kid, _ in ordered)
    protected = b64url_encode(
        b"".join((before, dumps(ephemeral.jwk), b',"apv":"', b64url_encode(apv).encode(), after))
    )
    info = other_info(AUTHCRYPT if sender else ANONCRYPT, apu, apv)
    cipher = CIPHERS[enc]
    cek = secrets.token_bytes(cipher.key_size)
    iv, data, tag = cipher.seal(cek, plaintext, protected.encode())
    entries = []
    for kid, key in ordered:
        secret = ephemeral.exchange(key) + (agree_lasting(sender[1], key) if sender else b"")
        wrapped = aes_key_wrap(kek(secret, info, tag if sender else None), cek)
        entries.append({"header": {"kid": kid}, "encrypted_key": b64url_encode(wrapped)})
    return dumps(
        {
            "protected": protected,
            "recipients": entries,
            "iv": b64url_encode(iv),
            "ciphertext": b64url_encode(data),
            "tag": b64url_encode(tag),
        }
    )


def _frame(skid: str | None, enc: Enc) -> tuple[bytes, bytes, bytes]:
    """The protected header before the ephemeral key and after the apv, which are all that differs, and the apu."""
    before = dumps({"typ": MEDIA_TYPE, "alg": ANONCRYPT if skid is None else AUTHCRYPT, "enc": enc})[:-1] + b',"epk":'
    if skid is None:
        return before, b'"}', b""
    apu = skid.encode()
    return before, b'",' + dumps({"apu": b64url_encode(apu), "skid": skid})[1:], apu


# We are known by few names.
_usual_frame = lru_cache(maxsize=64)(_frame)
