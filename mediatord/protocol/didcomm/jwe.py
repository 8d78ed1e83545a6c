"""
JWE envelopes of DIDComm: parsing, decryption and encryption of anoncrypt and authcrypt (reference section 1), and the
algorithms: key derivation, cached key agreement, content encryption (reference 1.2 to 1.5).

Parsing accepts what existing clients write (reference D3), but nothing ambiguous. Emitted envelopes have one shape,
which every tested client reads (reference 1.3). Cached secrets are bounded in number and never shown;
:meth:`mediatord.protocol.didcomm.keys.PrivateKey.exchange` is the uncached key agreement.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple, get_args

import nacl.exceptions
import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from nacl import bindings
from pybase64 import b64decode

from mediatord.errors import DecryptionError, EncryptionRequired, InvalidEnvelope, MediatorError
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, compute_x25519
from mediatord.protocol.encoding import (
    MAX_VALUES,
    decode_base64url,
    dumps,
    encode_base64url,
    loads_object,
    loads_unique_members,
)

JWEAlg = Literal["ECDH-ES+A256KW", "ECDH-1PU+A256KW"]

ANONCRYPT: JWEAlg = "ECDH-ES+A256KW"
AUTHCRYPT: JWEAlg = "ECDH-1PU+A256KW"

_KDF_FIRST_ROUND = b"\0\0\0\1"
_KEY_BITS = (256).to_bytes(4, "big")
_ALG_INFO = {alg: len(alg).to_bytes(4, "big") + alg.encode() for alg in (ANONCRYPT, AUTHCRYPT)}


def build_other_info(alg: JWEAlg, apu: bytes, apv: bytes) -> bytes:
    """
    OtherInfo of the Concat KDF, without the tag.

    :param apu: decoded, as received; empty if absent. Likewise `apv`.
    """
    return b"".join((_ALG_INFO[alg], len(apu).to_bytes(4, "big"), apu, len(apv).to_bytes(4, "big"), apv, _KEY_BITS))


def derive_kek(secret: bytes, info: bytes, tag: bytes | None = None) -> bytes:
    """
    Derive the 32-byte key-encryption key: one round of the Concat KDF with SHA-256.

    :param secret: Z, or Ze followed by Zs.
    :param info: from :func:`build_other_info`.
    :param tag: content tag for ECDH-1PU; None for ECDH-ES and for draft 03 of ECDH-1PU (reference 1.10).
    """
    private = b"" if tag is None else len(tag).to_bytes(4, "big") + tag
    return hashlib.sha256(_KDF_FIRST_ROUND + secret + info + private).digest()


def compute_apv(kids: Iterable[str]) -> bytes:
    """`apv` of an envelope: SHA-256 of the recipients' kids, sorted by code point (reference 1.3)."""
    return hashlib.sha256(".".join(sorted(kids)).encode()).digest()


# About 300 bytes each.
MAX_CACHED_PAIRS = 16_384
MAX_CACHED_KEYS = 1024
# Cached secrets per key. Few, so that replaying a set of envelopes, as benchmarks do, gains nothing.
_MAX_CACHED_SECRETS = 8
_X25519_KEY_SIZE = 32

KeyExchange = Callable[[bytes], bytes]

_load_private, _load_public = X25519PrivateKey.from_private_bytes, X25519PublicKey.from_public_bytes


@lru_cache(maxsize=MAX_CACHED_KEYS)
def load_key_exchange(secret: bytes) -> KeyExchange:
    """
    Load an X25519 private key; returns a function from public key (32 bytes) to shared secret, with a small cache.

    The cache spares the general path the agreement that the fast path has already computed. The function raises
    ValueError for a wrong size or a key of low order.
    """
    exchange = _load_private(secret).exchange
    return lru_cache(maxsize=_MAX_CACHED_SECRETS)(lambda public: exchange(_load_public(public)))


@lru_cache(maxsize=MAX_CACHED_PAIRS)
def _cached_static_secret(secret: bytes, public: bytes) -> bytes:
    return load_key_exchange(secret)(public)


def derive_ephemeral_secret(key: PrivateKey, epk: Mapping[str, Any]) -> bytes:
    """
    Z of a static key and the ephemeral key in a header.

    :raise ValueError: as :meth:`PublicKey.from_jwk` and :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == epk.get("crv") and epk.get("kty") == "OKP":
        return load_key_exchange(key.secret)(decode_base64url(epk.get("x")))
    return key.exchange(PublicKey.from_jwk(epk))


def derive_static_secret(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of two static keys, cached because it never changes.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return _cached_static_secret(key.secret, peer.raw)
    return key.exchange(peer)


class EphemeralKey(NamedTuple):
    """
    An ephemeral key pair.

    :param jwk: its public key.
    :param exchange: computes Z with a static key; raises ValueError as :meth:`PrivateKey.exchange`.
    """

    jwk: dict[str, str]
    exchange: Callable[[PublicKey], bytes]

    @classmethod
    def generate(cls, curve: Curve) -> EphemeralKey:
        """Generate a key."""
        if curve != "X25519":
            key = PrivateKey.generate(curve)
            return cls(key.public.jwk(), key.exchange)
        secret = secrets.token_bytes(_X25519_KEY_SIZE)

        def exchange(peer: PublicKey) -> bytes:
            if peer.curve != "X25519":
                raise ValueError("keys of different kinds")
            return compute_x25519(secret, peer.raw)

        public = encode_base64url(bindings.crypto_scalarmult_base(secret))
        return cls({"kty": "OKP", "crv": curve, "x": public}, exchange)


def clear_key_caches() -> None:
    """Drop all cached keys and secrets, for example after keys were retired."""
    load_key_exchange.cache_clear()
    _cached_static_secret.cache_clear()


Enc = Literal["A256CBC-HS512", "A256GCM", "XC20P"]

_BLOCK_SIZE = 16
_HALF_KEY = 32
_PADDINGS = tuple(bytes([count]) * count for count in range(_BLOCK_SIZE + 1))


class ContentCipher(NamedTuple):
    """
    A content encryption algorithm (`enc`); sizes in bytes.

    :param key_size: size of the content-encryption key.
    :param encrypt: (key, iv, plaintext, aad) -> (ciphertext, tag).
    :param decrypt: (key, iv, ciphertext, tag, aad) -> plaintext, for members of valid size; raises ValueError if
        authentication fails.
    """

    key_size: int
    iv_size: int
    tag_size: int
    encrypt: Callable[[bytes, bytes, bytes, bytes], tuple[bytes, bytes]]
    decrypt: Callable[[bytes, bytes, bytes, bytes, bytes], bytes]


class _UncheckedCipher(Cipher[CBC]):
    """AES-CBC without the size checks of `Cipher`, which cost as much as encrypting a short message."""

    def __init__(self, key: bytes, iv: bytes) -> None:
        self.algorithm = AES(key)
        self.mode = CBC(iv)


def _compute_mac(key: bytes, iv: bytes, data: bytes, aad: bytes) -> bytes:
    message = b"".join((aad, iv, data, (8 * len(aad)).to_bytes(8, "big")))
    return hmac.digest(key[:_HALF_KEY], message, "sha512")[:32]


def _encrypt_cbc(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    count = _BLOCK_SIZE - len(plaintext) % _BLOCK_SIZE
    data = _UncheckedCipher(key[_HALF_KEY:], iv).encryptor().update(plaintext + _PADDINGS[count])
    return data, _compute_mac(key, iv, data, aad)


def _decrypt_cbc(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    if not hmac.compare_digest(_compute_mac(key, iv, data, aad), tag):
        raise ValueError("not authentic")
    # The holder of the key wrote the rest, so errors below reveal nothing.
    if not data or len(data) % _BLOCK_SIZE:
        raise ValueError("not whole blocks")
    padded = _UncheckedCipher(key[_HALF_KEY:], iv).decryptor().update(data)  # whole blocks are output immediately
    count = padded[-1]
    if not 1 <= count <= _BLOCK_SIZE or not padded.endswith(_PADDINGS[count]):
        raise ValueError("not padded")
    return padded[:-count]


def _encrypt_gcm(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _split_tag(AESGCM(key).encrypt(iv, plaintext, aad))


def _decrypt_gcm(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(iv, data + tag, aad)
    except InvalidTag:
        raise ValueError("not authentic") from None


def _encrypt_xchacha(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _split_tag(bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, aad, iv, key))


def _decrypt_xchacha(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(data + tag, aad, iv, key)
    except nacl.exceptions.CryptoError:
        raise ValueError("not authentic") from None


def _split_tag(sealed: bytes) -> tuple[bytes, bytes]:
    return sealed[:-16], sealed[-16:]


CONTENT_CIPHERS: dict[Enc, ContentCipher] = {
    "A256CBC-HS512": ContentCipher(64, 16, 32, _encrypt_cbc, _decrypt_cbc),
    "A256GCM": ContentCipher(32, 12, 16, _encrypt_gcm, _decrypt_gcm),
    "XC20P": ContentCipher(32, 24, 16, _encrypt_xchacha, _decrypt_xchacha),
}

AgreementCurve = Literal["X25519", "P-256", "P-384", "P-521"]
JOSEHeader = Mapping[str, Any]

_MAX_RECIPIENTS = 100
# Enough for a key, an algorithm and three key ids.
MAX_PROTECTED = 65_536
_CURVES = get_args(AgreementCurve)
# Headers that all recipients must share. Each recipient may have its own epk.
_SHARED_HEADERS = ("alg", "enc", "apu", "apv", "skid")
# An absolute DID URL with a fragment and without white space; a relative one does not identify the key's owner.
ABSOLUTE_KID = re.compile(r"did:[a-z0-9]+:[!-\"$-~]+#[!-\"$-~]+")


# Longer names are not cached.
_MAX_CACHED_NAMES = 6_000

# Size from which it pays not to parse a ciphertext as JSON.
MIN_CUT_SIZE = 4096
_CIPHERTEXT_MEMBER = b'"ciphertext":'
# Replaces a ciphertext before the rest is parsed. It is random, so a member with this value is the one that was
# replaced.
CIPHERTEXT_PLACEHOLDER = secrets.token_hex(16)
_PLACEHOLDER_BYTES = CIPHERTEXT_PLACEHOLDER.encode()


@dataclass(slots=True)
class Envelope:
    """
    A JWE with valid structure; decryption may still fail.

    :param sender_kid: key id of an authcrypt's sender, an absolute DID URL with a fragment. It is a claim until
        decryption with that key succeeds. None for an anoncrypt.
    :param curve: of the ephemeral keys.
    :param header: headers shared by all recipients, and the `epk` of the first.
    :param info: OtherInfo of the key derivation, without the tag.
    :param encrypted_keys: `encrypted_key` and `epk` by kid, in their order and spelling; unchecked until decryption.
    :param protected: as written; `iv`, `ciphertext` and `tag` are decoded.
    """

    sender_kid: str | None
    curve: AgreementCurve
    header: JOSEHeader = field(repr=False)
    info: bytes = field(repr=False)
    encrypted_keys: Mapping[str, tuple[Any, Any]] = field(repr=False)
    protected: bytes = field(repr=False)
    iv: bytes = field(repr=False)
    ciphertext: bytes = field(repr=False)
    tag: bytes = field(repr=False)

    def compute_digest(self) -> bytes:
        """
        32 bytes that are equal for all encodings of the same encrypted message, and different for any other message.

        The tag authenticates the protected header (as text) and the ciphertext; everything else can be rewritten.
        """
        return sha256(self.protected + b"." + self.tag).digest()

    @property
    def lacks_apv(self) -> bool:
        """
        Whether the recipients are not authenticated; such an authcrypt may be ECDH-1PU draft 03 (reference 1.10).
        """
        return "apv" not in self.header


def cut_ciphertext(text: bytes, read: Callable[[bytes], bytes]) -> tuple[bytes, bytes | None]:
    """
    Replace the member `ciphertext` by :data:`CIPHERTEXT_PLACEHOLDER`; return the text and the result of `read`,
    which is None if nothing was replaced.

    :param read: called with the ciphertext; raises ValueError unless that is the content of a JSON string without
        escapes.
    """
    try:
        start = text.index(b'"', text.index(_CIPHERTEXT_MEMBER) + len(_CIPHERTEXT_MEMBER)) + 1
        end = text.index(b'"', start)
        return b"".join((text[:start], _PLACEHOLDER_BYTES, text[end:])), read(text[start:end])
    except ValueError:
        return text, None


def restore_ciphertext(text: bytes, ciphertext: bytes) -> bytes:
    """Undo :func:`cut_ciphertext` where `text` has the placeholder."""
    return text.replace(_PLACEHOLDER_BYTES, ciphertext)


def parse_envelope(raw: bytes) -> Envelope:
    """
    Parse a serialised envelope.

    :raise InvalidEnvelope: not a JSON object, or none that DIDComm defines.
    :raise EncryptionRequired: a JWS or a plaintext message.
    :raise DecryptionError: a JWE that violates a rule of reference 1.2 or 1.6.
    """
    text, ciphertext = cut_ciphertext(raw, decode_base64url) if len(raw) >= MIN_CUT_SIZE else (raw, None)
    try:
        value = loads_object(text)
        if ciphertext is not None and value.get("ciphertext") != CIPHERTEXT_PLACEHOLDER:
            value, ciphertext = loads_object(raw), None
    except ValueError:
        raise InvalidEnvelope from None
    return parse_envelope_object(value, ciphertext)


def parse_envelope_object(value: dict[str, Any], ciphertext: bytes | None = None) -> Envelope:  # noqa: C901
    """
    As :func:`parse_envelope`, for a parsed JSON object. All rules of the format are here, one after the other.

    :param ciphertext: the decoded member of this name, if it is known.
    """
    if "ciphertext" not in value:
        if "payload" in value or ("type" in value and "id" in value):
            raise EncryptionRequired
        raise InvalidEnvelope
    try:
        protected = value.get("protected")
        if "aad" in value or not isinstance(protected, str) or len(protected) > MAX_PROTECTED:
            raise ValueError("an aad, which DIDComm has not, or no header")
        shared: JOSEHeader = loads_unique_members(decode_base64url(protected))
        if "unprotected" in value:
            shared = _merge_headers(shared, value["unprotected"])
        entries = [value]  # flattened serialisation
        if "recipients" in value:
            entries = value["recipients"]
            if "encrypted_key" in value or "header" in value:
                raise ValueError("general and flattened at the same time")
            if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_RECIPIENTS:
                raise ValueError("no list of recipients, or too long a one")
        first: JOSEHeader = {}
        wrapped: dict[str, tuple[Any, Any]] = {}
        for entry in entries:
            if not isinstance(entry, dict):
                raise ValueError("a recipient that is not an object")
            header = _merge_headers(shared, entry.get("header"))
            kid, epk = header.get("kid"), header.get("epk")
            if "crit" in header or "zip" in header or not isinstance(kid, str) or not isinstance(epk, dict):
                raise ValueError("an extension, compression, or a missing key")
            first = first or header
            if header is not first and not _is_same_algorithm(header, first):
                raise ValueError("recipients that do not share one algorithm")
            wrapped[kid] = entry.get("encrypted_key"), epk
        curve: Any = first["epk"].get("crv")
        if curve not in _CURVES or len(wrapped) != len(entries):
            raise ValueError("another curve, or two keys for one recipient")
        sender_kid, info = read_parties(first, tuple(wrapped))
        iv, tag = decode_base64url(value.get("iv")), decode_base64url(value.get("tag"))
        data = decode_base64url(value["ciphertext"]) if ciphertext is None else ciphertext
    except ValueError:
        raise DecryptionError from None
    return Envelope(sender_kid, curve, first, info, wrapped, protected.encode(), iv, data, tag)


def _merge_headers(header: JOSEHeader, more: object) -> JOSEHeader:
    """Union of two headers; duplicate names are an error (RFC 7516 section 4)."""
    if more is None:
        return header
    if not isinstance(more, dict) or not header.keys().isdisjoint(more):
        raise ValueError("not a header that can be added")
    return {**header, **more}


def _is_same_algorithm(header: JOSEHeader, other: JOSEHeader) -> bool:
    same_curve = header["epk"].get("crv") == other["epk"].get("crv")
    return same_curve and all(header.get(name) == other.get(name) for name in _SHARED_HEADERS)


def read_parties(header: JOSEHeader, kids: tuple[str, ...]) -> tuple[str | None, bytes]:
    """Sender kid and OtherInfo."""
    alg, enc, apu, apv = header.get("alg"), header.get("enc"), header.get("apu"), header.get("apv")
    # The skid of an anoncrypt is ignored.
    skid = header.get("skid") if alg == AUTHCRYPT else None
    for name, text in (("alg", alg), ("enc", enc), ("apu", apu), ("apv", apv), ("skid", skid)):
        if not isinstance(text, str) and name in header and (name != "skid" or alg == AUTHCRYPT):
            raise ValueError("a member is no text")
    size = len(kids[0]) + len(apu or "") + len(skid or "")
    read = _derive_cached_parties if len(kids) == 1 and size <= _MAX_CACHED_NAMES else _derive_parties
    return read(alg, enc, skid, apu, apv, kids)


def _derive_parties(
    alg: object, enc: object, skid: str | None, apu: str | None, apv: str | None, kids: tuple[str, ...]
) -> tuple[str | None, bytes]:
    sender = b"" if apu is None else decode_base64url(apu)
    recipients = b"" if apv is None else decode_base64url(apv)
    if apv is not None and recipients != compute_apv(kids):
        raise ValueError("an apv for other recipients")
    if alg == ANONCRYPT and enc in CONTENT_CIPHERS:
        return None, build_other_info(ANONCRYPT, sender, recipients)
    # A256GCM without apv identifies draft 03 of ECDH-1PU (reference 1.10).
    if alg != AUTHCRYPT or not (enc == "A256CBC-HS512" or (enc == "A256GCM" and apv is None)):
        raise ValueError("other algorithms")
    kid = sender.decode() if skid is None else skid
    if apu is not None and sender.decode() != kid:
        raise ValueError("two senders")
    if not ABSOLUTE_KID.fullmatch(kid):
        raise ValueError("a sender that is not an absolute DID URL with a fragment")
    return kid, build_other_info(AUTHCRYPT, sender, recipients)


# Senders are few and recur. The cache is bounded in number and size.
_derive_cached_parties = lru_cache(maxsize=1024)(_derive_parties)


ENCRYPTED_MEDIA_TYPE = "application/didcomm-encrypted+json"

# What key wrapping adds to a content-encryption key.
KEY_WRAP_OVERHEAD = 8


def decrypt_envelope(
    envelope: Envelope, kid: str, key: PrivateKey, sender: PublicKey | None, *, draft03: bool = False
) -> bytes:
    """
    Decrypt an envelope: steps 10 and 11 of reference 1.6.

    Timing: once the kid and all sizes are valid, every failure costs the same operations: one key agreement (two for
    an authcrypt), one key unwrapping, one MAC. Only a valid tag leads to the padding check. What timing reveals is
    public anyway: whether the mediator has a kid, whether a point is on its curve, the ciphertext length, and whether
    an ephemeral key was seen shortly before (its secret is cached).

    :param kid: one of `envelope.encrypted_keys`, in that spelling.
    :param key: private key of that kid.
    :param sender: key of `envelope.sender_kid` of an authcrypt; None for an anoncrypt.
    :param draft03: treat an authcrypt without apv as draft 03 of ECDH-1PU, exclusively (reference 1.10).
    :raise DecryptionError: for any reason.
    """
    header, tag = envelope.header, envelope.tag
    cipher = CONTENT_CIPHERS[header["enc"]]
    try:
        if kid not in envelope.encrypted_keys or (sender is None) != (envelope.sender_kid is None):
            raise ValueError("not to this key, or not by this sender")
        encrypted_key, epk = envelope.encrypted_keys[kid]
        wrapped = decode_base64url(encrypted_key)
        if (len(wrapped) - KEY_WRAP_OVERHEAD, len(envelope.iv), len(tag)) != cipher[:3]:
            raise ValueError("a part of the wrong size")
        secret = derive_ephemeral_secret(key, epk)
        is_draft03 = draft03 and envelope.lacks_apv
        if sender is not None:
            if header["enc"] != "A256CBC-HS512" and not is_draft03:
                raise ValueError("an enc that authcrypt has not")
            secret += derive_static_secret(key, sender)
        kek = derive_kek(secret, envelope.info, None if sender is None or is_draft03 else tag)
        cek = unwrap_cek(kek, wrapped)
        return cipher.decrypt(cek, envelope.iv, envelope.ciphertext, tag, envelope.protected)
    except ValueError:
        raise DecryptionError from None


def unwrap_cek(kek: bytes, wrapped: bytes) -> bytes:
    """
    The content-encryption key; a random one if unwrapping fails (RFC 7516 11.5), so that the failure shows only at
    the tag, after the same amount of work.
    """
    try:
        return aes_key_unwrap(kek, wrapped)
    except InvalidUnwrap:
        return secrets.token_bytes(len(wrapped) - KEY_WRAP_OVERHEAD)


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
    find_sender_key: Callable[[str], PublicKey | None] | None = None,
) -> OpenedEnvelope | None:
    """
    Parse and decrypt an envelope; None if it has another form, or cannot be decrypted. Never raises.

    No key is used unless the envelope has the expected form.

    :param agreement_keys: the mediator's private keys by the kids that may denote them, the likeliest first.
    :param find_sender_key: finds the key of the sender; then only an authcrypt is opened, without it an anoncrypt.
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
        sender_key = None
        if find_sender_key is not None or sender_kid is not None:
            # Only this one form of authcrypt is not a draft.
            if sender_kid is not None and find_sender_key is not None and enc == "A256CBC-HS512" and "apv" in header:
                sender_key = find_sender_key(sender_kid)
            if sender_key is None or sender_key.curve != "X25519":
                return None
        layout, authenticated = _JWE_LAYOUTS[enc], jwe["protected"].encode()
        small = layout.decoded(epk["x"], jwe["tag"], jwe["iv"], entry["encrypted_key"])
        tag, static_secret, digest = None, b"", b""
        if sender_key is not None:
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


def find_recipient_key(
    envelope: Envelope, agreement_keys: Mapping[str, Sequence[PrivateKey]]
) -> tuple[str, Sequence[PrivateKey]]:
    """
    The first recipient with a key in `agreement_keys`, and the keys on the envelope's curve that it may denote.

    :param agreement_keys: private keys by kid, the likeliest first.
    :raise DecryptionError: there is none.
    """
    for kid in envelope.encrypted_keys:
        keys = agreement_keys.get(kid, ())
        if len(keys) > 1:
            keys = [key for key in keys if key.curve == envelope.curve]
        if keys and keys[0].curve == envelope.curve:
            return kid, keys
    raise DecryptionError


def encrypt_anoncrypt(
    plaintext: bytes, recipients: Sequence[tuple[str, PublicKey]], *, enc: Enc = "A256CBC-HS512"
) -> bytes:
    """
    Encrypt without authenticating the sender.

    :param recipients: absolute kid and key of each, all on the same curve.
    :raise ValueError: no recipient, different curves, or a key that no secret can be derived with.
    """
    return encrypt(plaintext, recipients, None, enc)


def encrypt_authcrypt(
    plaintext: bytes,
    sender: tuple[str, PrivateKey],
    recipients: Sequence[tuple[str, PublicKey]],
    ephemeral: EphemeralKey | None = None,
) -> bytes:
    """
    Encrypt and authenticate the sender.

    :param sender: absolute kid and key, on the recipients' curve.
    :param ephemeral: as of :func:`encrypt`.
    :raise ValueError: as :func:`encrypt_anoncrypt`.
    """
    return encrypt(plaintext, recipients, sender, ephemeral=ephemeral)


def encrypt(
    plaintext: bytes,
    recipients: Sequence[tuple[str, PublicKey]],
    sender: tuple[str, PrivateKey] | None,
    enc: Enc = "A256CBC-HS512",
    ephemeral: EphemeralKey | None = None,
) -> bytes:
    """
    As :func:`encrypt_authcrypt`, or as :func:`encrypt_anoncrypt` without a sender.

    :param ephemeral: a key on the recipients' curve to use again, which saves half of the time; by default a new one.
    """
    if not recipients:
        raise ValueError("no recipients")
    ordered = recipients if len(recipients) == 1 else sorted(recipients, key=lambda recipient: recipient[0])
    kids, _ = zip(*ordered, strict=True)
    sender_kid = sender[0] if sender else ""
    is_cached = len(kids) == 1 and len(kids[0]) + len(sender_kid) <= _MAX_CACHED_NAMES
    before_epk, after_epk, info, heads = (_write_cached_parties if is_cached else _write_parties)(
        sender_kid, kids, enc
    )
    ephemeral = ephemeral or EphemeralKey.generate(ordered[0][1].curve)
    protected = encode_base64url(b"".join((before_epk, orjson.dumps(ephemeral.jwk), after_epk)))
    cipher = CONTENT_CIPHERS[enc]
    random = secrets.token_bytes(cipher.key_size + cipher.iv_size)
    cek, iv = random[: cipher.key_size], random[cipher.key_size :]
    data, tag = cipher.encrypt(cek, iv, plaintext, protected.encode())
    entries = []
    for (_, key), head in zip(ordered, heads, strict=True):
        secret = ephemeral.exchange(key) + (derive_static_secret(sender[1], key) if sender else b"")
        wrapped = aes_key_wrap(derive_kek(secret, info, tag if sender else None), cek)
        entries.append(f'{head}{encode_base64url(wrapped)}"}}')
    # Base64url needs no escapes, for which a JSON encoder would reserve eight times the size.
    return (
        f'{{"protected":"{protected}","recipients":[{",".join(entries)}],"iv":"{encode_base64url(iv)}",'
        f'"ciphertext":"{encode_base64url(data)}","tag":"{encode_base64url(tag)}"}}'
    ).encode()


def _write_parties(sender_kid: str, kids: tuple[str, ...], enc: Enc) -> tuple[bytes, bytes, bytes, list[str]]:
    """
    What all envelopes of a sender to the same recipients have in common: the text of the protected header before and
    after the value of `epk`, OtherInfo, and the text of each recipient before the value of `encrypted_key`.

    :param sender_kid: empty for an anoncrypt.
    """
    alg, apu, apv = (AUTHCRYPT if sender_kid else ANONCRYPT), sender_kid.encode(), compute_apv(kids)
    header = {"typ": ENCRYPTED_MEDIA_TYPE, "alg": alg, "enc": enc, "epk": None, "apv": encode_base64url(apv)}
    if sender_kid:
        header |= {"apu": encode_base64url(apu), "skid": sender_kid}
    before_epk, after_epk = dumps(header).split(b"null", 1)
    heads = [f'{{"header":{{"kid":{dumps(kid).decode()}}},"encrypted_key":"' for kid in kids]
    return before_epk, after_epk, build_other_info(alg, apu, apv), heads


# As for those of received envelopes.
_write_cached_parties = lru_cache(maxsize=1024)(_write_parties)
