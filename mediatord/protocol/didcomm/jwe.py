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
from typing import Any, Literal, NamedTuple

import nacl.exceptions
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from nacl import bindings

from mediatord.errors import DecryptionError, EncryptionRequired, InvalidEnvelope
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, compute_x25519
from mediatord.protocol.encoding import decode_base64url, dumps, encode_base64url, loads_object, loads_unique_members

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


def derive_ephemeral_secret(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of a static and an ephemeral key.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return load_key_exchange(key.secret)(peer.raw)
    return key.exchange(peer)


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
# (key, iv, ciphertext, tag, aad) -> plaintext
DecryptFunction = Callable[[bytes, bytes, bytes, bytes, bytes], bytes]

_BLOCK_SIZE = 16
_HALF_KEY = 32
_PADDINGS = tuple(bytes([count]) * count for count in range(_BLOCK_SIZE + 1))


@dataclass(frozen=True, slots=True)
class ContentCipher:
    """
    A content encryption algorithm (`enc`); sizes in bytes.

    :param key_size: size of the content-encryption key.
    :param encrypt_raw: (key, iv, plaintext, aad) -> (ciphertext, tag).
    :param decrypt_raw: for members of valid size; raises ValueError if authentication fails.
    """

    key_size: int
    iv_size: int
    tag_size: int
    encrypt_raw: Callable[[bytes, bytes, bytes, bytes], tuple[bytes, bytes]]
    decrypt_raw: DecryptFunction

    def encrypt(self, key: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes, bytes]:
        """Encrypt with a fresh IV; returns IV, ciphertext and tag."""
        iv = secrets.token_bytes(self.iv_size)
        return iv, *self.encrypt_raw(key, iv, plaintext, aad)

    def decrypt(self, key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
        """
        Authenticate and decrypt.

        :raise ValueError: a member of the wrong size, or authentication fails.
        """
        if len(key) != self.key_size or len(iv) != self.iv_size or len(tag) != self.tag_size:
            raise ValueError("a part of the wrong size")
        return self.decrypt_raw(key, iv, data, tag, aad)


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
_MAX_CACHED_NAMES = 6_000
# Enough for a key, an algorithm and three key ids.
MAX_PROTECTED = 65_536
_CURVES = frozenset(("X25519", "P-256", "P-384", "P-521"))
_ENCS = frozenset(("A256CBC-HS512", "A256GCM", "XC20P"))
# Headers that all recipients must share. Each recipient may have its own epk.
_SHARED_HEADERS = ("alg", "enc", "apu", "apv", "skid")
# An absolute DID URL with a fragment and without white space; a relative one does not identify the key's owner.
ABSOLUTE_KID = re.compile(r"did:[a-z0-9]+:[!-\"$-~]+#[!-\"$-~]+")


@dataclass(frozen=True, slots=True)
class Envelope:
    """
    A JWE with valid structure; decryption may still fail.

    :param sender_kid: key id of an authcrypt's sender, an absolute DID URL with a fragment. It is a claim until
        decryption with that key succeeds. None for an anoncrypt.
    :param header: headers shared by all recipients, and the `epk` of the first.
    :param info: OtherInfo of the key derivation, without the tag.
    :param encrypted_keys: `encrypted_key` and `epk` by kid; unchecked until decryption.
    :param members: members of the JWE; those not read by the parser are unchecked until decryption.
    """

    sender_kid: str | None
    header: JOSEHeader = field(repr=False)
    info: bytes = field(repr=False)
    encrypted_keys: Mapping[str, tuple[Any, Any]] = field(repr=False)
    members: JOSEHeader = field(repr=False)

    @property
    def kids(self) -> tuple[str, ...]:
        """Key ids of all recipients, in their order and spelling."""
        return tuple(self.encrypted_keys)

    @property
    def authenticated(self) -> bool:
        """Whether this is an authcrypt."""
        return self.sender_kid is not None

    @property
    def curve(self) -> AgreementCurve:
        """Curve of the ephemeral keys."""
        curve: AgreementCurve = self.header["epk"]["crv"]
        return curve

    def fingerprint(self) -> bytes:
        """
        32 bytes that are equal for all encodings of the same encrypted message, and different for any other message.

        The tag authenticates the protected header (as text) and the ciphertext; everything else can be rewritten.
        """
        return sha256(self.members["protected"].encode() + b"." + decode_base64url(self.members.get("tag"))).digest()

    @property
    def lacks_apv(self) -> bool:
        """
        Whether the recipients are not authenticated; such an authcrypt may be ECDH-1PU draft 03 (reference 1.10).
        """
        return "apv" not in self.header


def parse_envelope(raw: bytes) -> Envelope:
    """
    Parse a serialised envelope.

    :raise InvalidEnvelope: not a JSON object, or none that DIDComm defines.
    :raise EncryptionRequired: a JWS or a plaintext message.
    :raise DecryptionError: a JWE that violates a rule of reference 1.2 or 1.6.
    """
    try:
        value = loads_object(raw)
    except ValueError:
        raise InvalidEnvelope from None
    return parse_envelope_object(value)


def parse_envelope_object(value: dict[str, Any]) -> Envelope:
    """As :func:`parse_envelope`, for a parsed JSON object."""
    if "ciphertext" not in value:
        if "payload" in value or ("type" in value and "id" in value):
            raise EncryptionRequired
        raise InvalidEnvelope
    try:
        return _read_jwe(value)
    except ValueError:
        raise DecryptionError from None


def _read_jwe(value: dict[str, Any]) -> Envelope:
    if "aad" in value:
        raise ValueError("an aad, which DIDComm has not")
    protected = value.get("protected")
    if not isinstance(protected, str) or len(protected) > MAX_PROTECTED:
        raise ValueError("a header that is no header")
    shared: JOSEHeader = loads_unique_members(decode_base64url(protected))
    if "unprotected" in value:
        shared = _merge_headers(shared, value["unprotected"])
    entries = _list_recipients(value)
    header = _merge_headers(shared, entries[0].get("header"))
    wrapped = {_check_recipient(header): (entries[0].get("encrypted_key"), header["epk"])}
    for entry in entries[1:]:
        other = _merge_headers(shared, entry.get("header"))
        wrapped[_check_recipient(other)] = entry.get("encrypted_key"), other["epk"]
        if header["epk"]["crv"] != other["epk"]["crv"] or any(
            header.get(name) != other.get(name) for name in _SHARED_HEADERS
        ):
            raise ValueError("recipients that do not share one algorithm")
    if len(wrapped) != len(entries):
        raise ValueError("two keys for one recipient")
    sender_kid, info = _party_info(header, tuple(wrapped), len(protected))
    return Envelope(sender_kid, header, info, wrapped, value)


def _merge_headers(header: JOSEHeader, more: object) -> JOSEHeader:
    """Union of two headers; duplicate names are an error (RFC 7516 section 4)."""
    if more is None:
        return header
    if not isinstance(more, dict) or not header.keys().isdisjoint(more):
        raise ValueError("not a header that can be added")
    return {**header, **more}


def _list_recipients(value: dict[str, Any]) -> Sequence[dict[str, Any]]:
    if "recipients" not in value:
        return [value]  # flattened serialisation
    entries = value["recipients"]
    if "encrypted_key" in value or "header" in value:
        raise ValueError("general and flattened at the same time")
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_RECIPIENTS:
        raise ValueError("no list of recipients, or too long a one")
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("a recipient that is not an object")
    return entries


def _check_recipient(header: JOSEHeader) -> str:
    """Validate the header of one recipient; returns its kid."""
    if "crit" in header or "zip" in header:
        raise ValueError("an extension or compression")
    epk, kid = header.get("epk"), header.get("kid")
    curve = epk.get("crv") if isinstance(epk, dict) else None
    if not isinstance(curve, str) or curve not in _CURVES:
        raise ValueError("another curve")
    if not isinstance(kid, str):
        raise ValueError("no kid")
    return kid


def _party_info(header: JOSEHeader, kids: tuple[str, ...], size: int) -> tuple[str | None, bytes]:
    """Sender kid and OtherInfo; `size` is the length of the encoded protected header."""
    alg, enc, apu, apv = header.get("alg"), header.get("enc"), header.get("apu"), header.get("apv")
    if not (isinstance(alg, str) and isinstance(enc, str)):
        raise ValueError("no algorithm")
    # The skid of an anoncrypt is ignored.
    skid = header.get("skid") if alg == AUTHCRYPT else None
    for name, text in (("apu", apu), ("apv", apv), ("skid", skid)):
        if not isinstance(text, str) and name in header and (name != "skid" or alg == AUTHCRYPT):
            raise ValueError("a member is no text")
    read = _cached_party_info if len(kids) == 1 and len(kids[0]) + size <= _MAX_CACHED_NAMES else _read_party_info
    return read(alg, enc, skid, apu, apv, kids)


def _read_party_info(
    alg: str, enc: str, skid: str | None, apu: str | None, apv: str | None, kids: tuple[str, ...]
) -> tuple[str | None, bytes]:
    sender = b"" if apu is None else decode_base64url(apu)
    recipients = b"" if apv is None else decode_base64url(apv)
    if apv is not None and recipients != compute_apv(kids):
        raise ValueError("an apv for other recipients")
    if alg == ANONCRYPT and enc in _ENCS:
        return None, build_other_info(ANONCRYPT, sender, recipients)
    # A256GCM without apv identifies draft 03 of ECDH-1PU (reference 1.10).
    if alg != AUTHCRYPT or not (enc == "A256CBC-HS512" or (enc == "A256GCM" and apv is None)):
        raise ValueError("other algorithms")
    kid = _check_sender_kid(skid, None if apu is None else sender.decode())
    return kid, build_other_info(AUTHCRYPT, sender, recipients)


# Senders are few and recur. The cache is bounded in number and size.
_cached_party_info = lru_cache(maxsize=1024)(_read_party_info)


def _check_sender_kid(skid: str | None, apu: str | None) -> str:
    kid = apu if skid is None else skid
    if kid is None or (apu is not None and apu != kid):
        raise ValueError("no sender, or two")
    if not ABSOLUTE_KID.fullmatch(kid):
        raise ValueError("a sender that is not an absolute DID URL with a fragment")
    return kid


ENCRYPTED_MEDIA_TYPE = "application/didcomm-encrypted+json"

# What key wrapping adds to a content-encryption key.
_KEY_WRAP_OVERHEAD = 8
# Longer sender kids are not cached.
_MAX_CACHED_SENDER_KID = 4096


def decrypt_envelope(
    envelope: Envelope, kid: str, key: PrivateKey, sender: PublicKey | None, *, draft03: bool = False
) -> bytes:
    """
    Decrypt an envelope: steps 10 and 11 of reference 1.6.

    Timing: once the kid and all sizes are valid, every failure costs the same operations: one key agreement (two for
    an authcrypt), one key unwrapping, one MAC. Only a valid tag leads to the padding check. What timing reveals is
    public anyway: whether the mediator has a kid, whether a point is on its curve, the ciphertext length, and whether
    an ephemeral key was seen shortly before (its secret is cached).

    :param kid: one of `envelope.kids`, in that spelling.
    :param key: private key of that kid.
    :param sender: key of `envelope.sender_kid` of an authcrypt; None for an anoncrypt.
    :param draft03: treat an authcrypt without apv as draft 03 of ECDH-1PU, exclusively (reference 1.10).
    :raise DecryptionError: for any reason.
    """
    try:
        return _decrypt(envelope, kid, key, sender, draft03)
    except ValueError:
        raise DecryptionError from None


def _decrypt(envelope: Envelope, kid: str, key: PrivateKey, sender: PublicKey | None, draft03: bool) -> bytes:
    if kid not in envelope.encrypted_keys:
        raise ValueError("not to this key")
    encrypted_key, epk = envelope.encrypted_keys[kid]
    cipher = CONTENT_CIPHERS[envelope.header["enc"]]
    part = envelope.members.get
    iv, data, tag = decode_base64url(part("iv")), decode_base64url(part("ciphertext")), decode_base64url(part("tag"))
    wrapped = decode_base64url(encrypted_key)
    if len(wrapped) != cipher.key_size + _KEY_WRAP_OVERHEAD:
        raise ValueError("a wrapped key of the wrong size")
    secret = derive_ephemeral_secret(key, PublicKey.from_jwk(epk))
    info_tag = None
    if envelope.sender_kid is not None:
        legacy = draft03 and envelope.lacks_apv
        if sender is None:
            raise ValueError("an authcrypt needs its sender's key")
        if envelope.header["enc"] != "A256CBC-HS512" and not legacy:
            raise ValueError("an enc that authcrypt has not")
        secret += derive_static_secret(key, sender)
        info_tag = None if legacy else tag
    elif sender is not None:
        raise ValueError("an anoncrypt has no sender")
    cek = unwrap_cek(derive_kek(secret, envelope.info, info_tag), wrapped)
    return cipher.decrypt(cek, iv, data, tag, envelope.members["protected"].encode())


def unwrap_cek(wrapping_key: bytes, wrapped: bytes) -> bytes:
    """
    The content-encryption key; a random one if unwrapping fails (RFC 7516 11.5), so that the failure shows only at
    the tag, after the same amount of work.
    """
    try:
        return aes_key_unwrap(wrapping_key, wrapped)
    except InvalidUnwrap:
        return secrets.token_bytes(len(wrapped) - _KEY_WRAP_OVERHEAD)


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
    ephemeral = ephemeral or EphemeralKey.generate(ordered[0][1].curve)
    skid = sender[0] if sender else None
    frame = _cached_header_frame if len(skid or "") <= _MAX_CACHED_SENDER_KID else _build_header_frame
    before, after, apu = frame(skid, enc)
    apv = compute_apv([kid for kid, _ in ordered])
    protected = encode_base64url(
        b"".join((before, dumps(ephemeral.jwk), b',"apv":"', encode_base64url(apv).encode(), after))
    )
    info = build_other_info(AUTHCRYPT if sender else ANONCRYPT, apu, apv)
    cipher = CONTENT_CIPHERS[enc]
    cek = secrets.token_bytes(cipher.key_size)
    iv, data, tag = cipher.encrypt(cek, plaintext, protected.encode())
    entries = []
    for kid, key in ordered:
        secret = ephemeral.exchange(key) + (derive_static_secret(sender[1], key) if sender else b"")
        wrapped = aes_key_wrap(derive_kek(secret, info, tag if sender else None), cek)
        entries.append({"header": {"kid": kid}, "encrypted_key": encode_base64url(wrapped)})
    return dumps(
        {
            "protected": protected,
            "recipients": entries,
            "iv": encode_base64url(iv),
            "ciphertext": encode_base64url(data),
            "tag": encode_base64url(tag),
        }
    )


def _build_header_frame(skid: str | None, enc: Enc) -> tuple[bytes, bytes, bytes]:
    """The protected header before the ephemeral key and after the apv, its only variable parts; and the apu."""
    before = (
        dumps({"typ": ENCRYPTED_MEDIA_TYPE, "alg": ANONCRYPT if skid is None else AUTHCRYPT, "enc": enc})[:-1]
        + b',"epk":'
    )
    if skid is None:
        return before, b'"}', b""
    apu = skid.encode()
    return before, b'",' + dumps({"apu": encode_base64url(apu), "skid": skid})[1:], apu


# The mediator has few key ids.
_cached_header_frame = lru_cache(maxsize=64)(_build_header_frame)
