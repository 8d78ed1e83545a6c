"""
The JWE as it is written: its two serialisations and the rules for its headers (reference 1.6, steps 2 to 8).

No key is touched here. Clients write envelopes in many ways, so more is read than is ever emitted (reference D3), but
nothing that could be understood in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

from mediatord.errors import NotAnEnvelope, NotEncrypted, Undecryptable
from mediatord.protocol.didcomm.content import Enc
from mediatord.protocol.didcomm.kdf import ANONCRYPT, AUTHCRYPT, apv_of, other_info
from mediatord.protocol.jsontext import b64url_decode, loads_object, loads_unique

AgreementCurve = Literal["X25519", "P-256", "P-384", "P-521"]
Header = Mapping[str, Any]

_MAX_RECIPIENTS = 100
_MAX_USUAL = 6_000
# Ample for a key, an algorithm and three key ids.
MAX_PROTECTED = 65_536
_CURVES = frozenset(("X25519", "P-256", "P-384", "P-521"))
_ENCS = frozenset(("A256CBC-HS512", "A256GCM", "XC20P"))
# Everything that must be the same for all recipients. Each may have its own epk.
_COMMON = ("alg", "enc", "apu", "apv", "skid")
# A DID URL with a fragment and without white space. Relative ones say nothing about whose key it is.
ABSOLUTE_KID = re.compile(r"did:[a-z0-9]+:[!-\"$-~]+#[!-\"$-~]+")


@dataclass(frozen=True, slots=True)
class Envelope:
    """
    A JWE whose form is in order. Whether it opens is another matter.

    :param sender_kid: of an authcrypt, an absolute DID URL with a fragment; a mere claim until the envelope opened
        with that key. None for an anoncrypt, whatever its headers say.
    :param header: what holds for every recipient, and the `epk` of the first.
    :param info: the OtherInfo of the key derivation, without the tag.
    :param wrapped: by kid, `encrypted_key` and `epk`.
    :param members: of the JWE. Those that nothing here depends on, like the values of `wrapped`, are looked at when
        the envelope is opened; until then they can be anything.
    """

    sender_kid: str | None
    header: Header = field(repr=False)
    info: bytes = field(repr=False)
    wrapped: Mapping[str, tuple[Any, Any]] = field(repr=False)
    members: Header = field(repr=False)

    @property
    def kids(self) -> tuple[str, ...]:
        """The key ids of all recipients, as written and in their order."""
        return tuple(self.wrapped)

    @property
    def authenticated(self) -> bool:
        """Whether this is an authcrypt."""
        return self.sender_kid is not None

    @property
    def enc(self) -> Enc:
        """How the content is encrypted."""
        enc: Enc = self.header["enc"]
        return enc

    @property
    def curve(self) -> AgreementCurve:
        """Of the ephemeral keys."""
        curve: AgreementCurve = self.header["epk"]["crv"]
        return curve

    def fingerprint(self) -> bytes:
        """
        32 bytes that are the same for every spelling of what the sender encrypted, and for nothing else.

        The tag authenticates the protected header, as text, and the ciphertext; all around them can be rewritten.
        """
        return sha256(self.members["protected"].encode() + b"." + b64url_decode(self.members.get("tag"))).digest()

    @property
    def without_apv(self) -> bool:
        """Whether nothing binds the list of recipients; such an authcrypt may be draft 03 (reference 1.10)."""
        return "apv" not in self.header


def parse(raw: bytes) -> Envelope:
    """
    :raise NotAnEnvelope: not a JSON object, or none that DIDComm knows.
    :raise NotEncrypted: a JWS or a plaintext message.
    :raise Undecryptable: a JWE that breaks a rule of reference 1.2 or 1.6.
    """
    try:
        value = loads_object(raw)
    except ValueError:
        raise NotAnEnvelope from None
    return parse_object(value)


def parse_object(value: dict[str, Any]) -> Envelope:
    """:func:`parse` for what was read as JSON already."""
    if "ciphertext" not in value:
        if "payload" in value or ("type" in value and "id" in value):
            raise NotEncrypted
        raise NotAnEnvelope
    try:
        return _read(value)
    except ValueError:
        raise Undecryptable from None


def _read(value: dict[str, Any]) -> Envelope:
    if "aad" in value:
        raise ValueError("an aad, which DIDComm has not")
    protected = _text(value, "protected")
    if len(protected) > MAX_PROTECTED:
        raise ValueError("a header that is no header")
    shared: Header = loads_unique(b64url_decode(protected))
    if "unprotected" in value:
        shared = _merged(shared, value["unprotected"])
    entries = _recipients(value)
    header = _merged(shared, entries[0].get("header"))
    wrapped = {_checked(header): (entries[0].get("encrypted_key"), header["epk"])}
    for entry in entries[1:]:
        other = _merged(shared, entry.get("header"))
        wrapped[_checked(other)] = entry.get("encrypted_key"), other["epk"]
        if header["epk"]["crv"] != other["epk"]["crv"] or any(
            header.get(name) != other.get(name) for name in _COMMON
        ):
            raise ValueError("recipients that do not share one algorithm")
    if len(wrapped) != len(entries):
        raise ValueError("two keys for one recipient")
    sender_kid, info = _names(header, tuple(wrapped), len(protected))
    return Envelope(sender_kid, header, info, wrapped, value)


def _merged(header: Header, more: object) -> Header:
    """Both headers in one; a name that is in both is an error (RFC 7516 section 4)."""
    if more is None:
        return header
    if not isinstance(more, dict) or not header.keys().isdisjoint(more):
        raise ValueError("not a header that can be added")
    return {**header, **more}


def _recipients(value: dict[str, Any]) -> Sequence[dict[str, Any]]:
    if "recipients" not in value:
        return [value]  # flattened: header and encrypted_key are members of the JWE itself
    entries = value["recipients"]
    if "encrypted_key" in value or "header" in value:
        raise ValueError("general and flattened at the same time")
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_RECIPIENTS:
        raise ValueError("no list of recipients, or too long a one")
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("a recipient that is not an object")
    return entries


def _checked(header: Header) -> str:
    """The kid of one recipient, if the header is in order."""
    if "crit" in header or "zip" in header:
        raise ValueError("an extension or compression")
    if _text(header.get("epk"), "crv") not in _CURVES:
        raise ValueError("another curve")
    return _text(header, "kid")


def _names(header: Header, kids: tuple[str, ...], size: int) -> tuple[str | None, bytes]:
    """The sender, and what goes into the key derivation; `size` is that of the protected header as text."""
    alg, enc = _text(header, "alg"), _text(header, "enc")
    # In an anoncrypt a skid means nothing, whatever it is.
    skid = _optional_text(header, "skid") if alg == AUTHCRYPT else None
    read = _usual_names if len(kids) == 1 and len(kids[0]) + size <= _MAX_USUAL else _read_names
    return read(alg, enc, skid, _optional_text(header, "apu"), _optional_text(header, "apv"), kids)


def _read_names(
    alg: str, enc: str, skid: str | None, apu: str | None, apv: str | None, kids: tuple[str, ...]
) -> tuple[str | None, bytes]:
    sender = b"" if apu is None else b64url_decode(apu)
    recipients = b"" if apv is None else b64url_decode(apv)
    if apv is not None and recipients != apv_of(kids):
        raise ValueError("an apv for other recipients")
    if alg == ANONCRYPT and enc in _ENCS:
        return None, other_info(ANONCRYPT, sender, recipients)
    # A256GCM only without apv: that is how draft 03 of ECDH-1PU is recognised (reference 1.10).
    if alg != AUTHCRYPT or not (enc == "A256CBC-HS512" or (enc == "A256GCM" and apv is None)):
        raise ValueError("other algorithms")
    kid = _sender_kid(skid, None if apu is None else sender.decode())
    return kid, other_info(AUTHCRYPT, sender, recipients)


# Few write to us, and each again and again. What is remembered is bounded in number and in size.
_usual_names = lru_cache(maxsize=1024)(_read_names)


def _sender_kid(skid: str | None, apu: str | None) -> str:
    kid = apu if skid is None else skid
    if kid is None or (apu is not None and apu != kid):
        raise ValueError("no sender, or two")
    if not ABSOLUTE_KID.fullmatch(kid):
        raise ValueError("a sender that is not an absolute DID URL with a fragment")
    return kid


def _optional_text(header: Header, name: str) -> str | None:
    return _text(header, name) if name in header else None


def _text(members: object, name: str) -> str:
    value = members.get(name) if isinstance(members, dict) else None
    if not isinstance(value, str):
        raise ValueError("a member is missing or no text")
    return value
