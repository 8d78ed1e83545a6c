"""
Envelopes of DIDComm v1 (RFC 0019): recognition, parsing, decryption and encryption of authcrypt and anoncrypt.

Parsing accepts either alphabet of base64, padded or not, and the three names that libraries have for the content
cipher, ChaCha20-Poly1305 with a nonce of 12 bytes. Emitted envelopes have one shape, which all known libraries read.
Only the entry of one recipient is ever decrypted, so the work per message is bounded whatever its header says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from secrets import token_bytes
from typing import Any, NamedTuple

import nacl.exceptions
from nacl import bindings

from mediatord.errors import DecryptionError, InvalidEnvelope
from mediatord.protocol.didcomm.jwe import CIPHERTEXT_PLACEHOLDER, MAX_PROTECTED, MIN_CUT_SIZE, cut_ciphertext
from mediatord.protocol.didcomm_v1.keys import (
    MAX_BASE58_KEY,
    MIN_BASE58_KEY,
    InvalidKey,
    SigningKey,
    decode_base58_key,
    derive_agreement_key,
    encode_base58_key,
    encode_did_key,
    parse_key,
)
from mediatord.protocol.encoding import (
    decode_base64,
    dumps,
    encode_base64url,
    loads_object,
    loads_unique_members,
    wrap_json_fragment,
)

AUTHCRYPT = "Authcrypt"
ANONCRYPT = "Anoncrypt"
ENVELOPE_MEDIA_TYPE = "application/didcomm-envelope-enc"
MAX_RECIPIENTS = 100

_TYP = "JWM/1.0"
_ENC = "xchacha20poly1305_ietf"
# All of them mean the same cipher: the first is of most libraries, the second of Go and .NET, the third of RFC 0019.
_ENC_NAMES = (_ENC, "chacha20poly1305_ietf", "xchachapoly1305_ietf")
# Members of other serialisations of a JWE. An envelope that has one could be read in two ways.
_FOREIGN_MEMBERS = frozenset({"aad", "encrypted_key", "header", "recipients", "unprotected"})

_KEY_SIZE, _IV_SIZE, _TAG_SIZE = 32, 12, 16
_BOX_NONCE_SIZE, _BOX_OVERHEAD, _SEAL_OVERHEAD = 24, 16, 48
_WRONG_KEY = bytes(_KEY_SIZE)
_SENDER_SIZES = range(_SEAL_OVERHEAD + MIN_BASE58_KEY, _SEAL_OVERHEAD + MAX_BASE58_KEY + 1)

_PROTECTED_NAME = b'"protected"'
_match_protected_value = re.compile(rb'\s*+:\s*+"([^"\\]{1,%d})"' % MAX_PROTECTED).match
_ALG_VALUES = (f'"{AUTHCRYPT}"'.encode(), f'"{ANONCRYPT}"'.encode())

# Returns that many random bytes.
RandomSource = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Recipient:
    """
    One entry of an envelope.

    :param key: did:key of the recipient.
    :param sender: sealed base58 text of the sender's key; None in an anoncrypt.
    :param iv: nonce of the box that holds the content-encryption key; None in an anoncrypt.
    """

    key: str
    encrypted_key: bytes = field(repr=False)
    sender: bytes | None = field(default=None, repr=False)
    iv: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Envelope:
    """
    An envelope with valid structure; decryption may still fail.

    :param protected: as received, since it is authenticated in this spelling.
    """

    is_authcrypt: bool
    recipients: tuple[Recipient, ...]
    protected: bytes = field(repr=False)
    iv: bytes = field(repr=False)
    ciphertext: bytes = field(repr=False)
    tag: bytes = field(repr=False)

    @property
    def digest(self) -> bytes:
        """
        32 bytes that are equal for all encodings of the same encrypted message, and different for any other message.

        The tag authenticates the protected header (as text) and the ciphertext; everything else can be rewritten.
        """
        return sha256(self.protected + b"." + self.tag).digest()


class Opened(NamedTuple):
    """
    A decrypted envelope.

    :param sender: did:key of the sender, proven by the encryption; None if anonymous.
    """

    plaintext: bytes
    sender: str | None


def is_v1_envelope(raw: bytes) -> bool:
    """
    Whether this is to be read as an envelope of DIDComm v1, judged by `alg` in its protected header; never raises.

    It is False for every JWE of DIDComm v2, at the cost of decoding that header. Only the first member of the name
    counts, at any depth, as nothing may be parsed before the sender's limits are known.
    """
    start = raw.find(_PROTECTED_NAME)
    if start < 0:
        return False
    found = _match_protected_value(raw, start + len(_PROTECTED_NAME))
    return found is not None and _has_v1_alg(found[1])


def _has_v1_alg(protected: bytes) -> bool:
    try:
        header = decode_base64(protected.decode("ascii"))
        if _ALG_VALUES[0] not in header and _ALG_VALUES[1] not in header:
            return False
        return loads_object(header).get("alg") in (AUTHCRYPT, ANONCRYPT)
    except ValueError:
        return False


def parse_envelope(raw: bytes) -> Envelope:
    """
    Parse a serialised envelope.

    :raise InvalidEnvelope: not JSON, or it violates a rule of the format.
    """
    text, ciphertext = cut_ciphertext(raw, _decode_bytes) if len(raw) >= MIN_CUT_SIZE else (raw, None)
    try:
        value = loads_object(text)
        if ciphertext is not None and value.get("ciphertext") != CIPHERTEXT_PLACEHOLDER:
            value, ciphertext = loads_object(raw), None
    except ValueError:
        raise InvalidEnvelope from None
    return parse_envelope_object(value, ciphertext)


def parse_envelope_object(value: object, ciphertext: bytes | None = None) -> Envelope:
    """
    As :func:`parse_envelope`, for a parsed JSON value.

    :param ciphertext: the decoded member of this name, if it is known.
    """
    try:
        if not isinstance(value, dict) or not _FOREIGN_MEMBERS.isdisjoint(value):
            raise ValueError("not an object, or another serialisation")
        protected = value.get("protected")
        if not isinstance(protected, str) or len(protected) > MAX_PROTECTED:
            raise ValueError("no header, or too long a one")
        header = loads_unique_members(decode_base64(protected))
        if header.get("typ") != _TYP or header.get("enc") not in _ENC_NAMES:
            raise ValueError("another format or cipher")
        alg = header.get("alg")
        if alg not in (AUTHCRYPT, ANONCRYPT):
            raise ValueError("neither authcrypt nor anoncrypt")
        recipients = _parse_recipients(header.get("recipients"), alg == AUTHCRYPT)
        iv, tag = _decode_sized(value.get("iv"), _IV_SIZE), _decode_sized(value.get("tag"), _TAG_SIZE)
        data = decode_base64(value.get("ciphertext")) if ciphertext is None else ciphertext
        return Envelope(alg == AUTHCRYPT, recipients, protected.encode(), iv, data, tag)
    except ValueError:
        raise InvalidEnvelope from None


def _parse_recipients(entries: object, is_authcrypt: bool) -> tuple[Recipient, ...]:
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_RECIPIENTS:
        raise ValueError("no list of recipients, or too long a one")
    recipients = tuple(_parse_recipient(entry, is_authcrypt) for entry in entries)
    if len({recipient.key for recipient in recipients}) != len(recipients):
        raise ValueError("two entries for one recipient")
    return recipients


def _parse_recipient(entry: Any, is_authcrypt: bool) -> Recipient:
    header = entry.get("header") if isinstance(entry, dict) else None
    if not isinstance(header, dict):
        raise ValueError("a recipient without header")
    kid, sender, iv = header.get("kid"), header.get("sender"), header.get("iv")
    if not isinstance(kid, str) or not MIN_BASE58_KEY <= len(kid) <= MAX_BASE58_KEY:
        raise ValueError("a kid that is not the base58 of a key")
    key = parse_key(kid)
    if not is_authcrypt:
        # Libraries look at these members and not at `alg`, so a mix could be read in two ways.
        if sender is not None or iv is not None:
            raise ValueError("an anoncrypt with a sender")
        return Recipient(key, _decode_sized(entry.get("encrypted_key"), _SEAL_OVERHEAD + _KEY_SIZE))
    encrypted_key = _decode_sized(entry.get("encrypted_key"), _BOX_OVERHEAD + _KEY_SIZE)
    sealed = decode_base64(sender)
    if len(sealed) not in _SENDER_SIZES:
        raise ValueError("a sender of the wrong size")
    return Recipient(key, encrypted_key, sealed, _decode_sized(iv, _BOX_NONCE_SIZE))


def _decode_bytes(text: bytes) -> bytes:
    return decode_base64(text.decode("ascii"))


def _decode_sized(text: object, size: int) -> bytes:
    data = decode_base64(text)
    if len(data) != size:
        raise ValueError("a member of the wrong size")
    return data


def open_envelope(envelope: Envelope, recipient: Recipient, key: SigningKey) -> Opened:
    """
    Decrypt an envelope as one of its recipients. After a failure, the work continues with another key, so that its
    time does not tell what has failed.

    :param key: of this recipient.
    :raise DecryptionError: for any reason.
    """
    if recipient.key != key.did_key:
        raise DecryptionError
    sender = None if recipient.sender is None else _open_sender(recipient.sender, key)
    cek = _open_content_key(recipient, key, sender)
    try:
        plaintext = bindings.crypto_aead_chacha20poly1305_ietf_decrypt(
            envelope.ciphertext + envelope.tag, envelope.protected, envelope.iv, cek or _WRONG_KEY
        )
    except nacl.exceptions.CryptoError:
        raise DecryptionError from None
    if cek is None or (sender is None and recipient.sender is not None):
        raise DecryptionError
    return Opened(plaintext, sender)


def _open_sender(sealed: bytes, key: SigningKey) -> str | None:
    """The sender of an authcrypt; None if it cannot be read, or is no key to which a message can be encrypted."""
    try:
        text = bindings.crypto_box_seal_open(sealed, key.agreement_public, key.agreement_secret)
        sender = encode_did_key(decode_base58_key(text.decode("ascii")))
        derive_agreement_key(sender)
    except (InvalidKey, UnicodeDecodeError, nacl.exceptions.CryptoError):
        return None
    return sender


def _open_content_key(recipient: Recipient, key: SigningKey, sender: str | None) -> bytes | None:
    """The content-encryption key; None if it cannot be decrypted."""
    public, secret = key.agreement_public, key.agreement_secret
    try:
        if recipient.iv is None:
            return bindings.crypto_box_seal_open(recipient.encrypted_key, public, secret)
        sender_public = public if sender is None else derive_agreement_key(sender)
        return bindings.crypto_box_open(recipient.encrypted_key, recipient.iv, sender_public, secret)
    except nacl.exceptions.CryptoError:
        return None


def pack_authcrypt(plaintext: bytes, to: str, sender: SigningKey, *, random: RandomSource = token_bytes) -> bytes:
    """
    Encrypt to a recipient and authenticate the sender.

    :param to: did:key.
    :raise InvalidKey: `to` is not a key that can be encrypted to.
    """
    public, cek, nonce = derive_agreement_key(to), random(_KEY_SIZE), random(_BOX_NONCE_SIZE)
    encrypted_key = bindings.crypto_box(cek, nonce, public, sender.agreement_secret)
    sealed = bindings.crypto_box_seal(encode_base58_key(sender.did_key).encode(), public)
    entry = _build_entry(encrypted_key, to, sender=encode_base64url(sealed), iv=encode_base64url(nonce))
    return _seal_content(plaintext, AUTHCRYPT, entry, cek, random)


def pack_anoncrypt(plaintext: bytes, to: str, *, random: RandomSource = token_bytes) -> bytes:
    """
    Encrypt to a recipient without naming a sender.

    :param to: did:key.
    :raise InvalidKey: `to` is not a key that can be encrypted to.
    """
    cek = random(_KEY_SIZE)
    encrypted_key = bindings.crypto_box_seal(cek, derive_agreement_key(to))
    return _seal_content(plaintext, ANONCRYPT, _build_entry(encrypted_key, to), cek, random)


def _build_entry(encrypted_key: bytes, to: str, **header: str) -> dict[str, Any]:
    return {"encrypted_key": encode_base64url(encrypted_key), "header": {"kid": encode_base58_key(to), **header}}


def _seal_content(plaintext: bytes, alg: str, entry: dict[str, Any], cek: bytes, random: RandomSource) -> bytes:
    header = dumps({"enc": _ENC, "typ": _TYP, "alg": alg, "recipients": [entry]})
    protected, iv = encode_base64url(header), random(_IV_SIZE)
    sealed = bindings.crypto_aead_chacha20poly1305_ietf_encrypt(plaintext, protected.encode(), iv, cek)
    # Large texts are not scanned for characters to escape: base64url has none.
    ciphertext = wrap_json_fragment(b'"%b"' % encode_base64url(sealed[:-_TAG_SIZE]).encode())
    return dumps(
        {
            "protected": protected,
            "iv": encode_base64url(iv),
            "ciphertext": ciphertext,
            "tag": encode_base64url(sealed[-_TAG_SIZE:]),
        }
    )
