"""
Independent JWE writer, for forms that mediatord reads and never writes.

It shares no key derivation and no cipher with the code under test; everything goes through the high-level interfaces
of `cryptography`. It encrypts every form consistently: an envelope is refused for its form, not as damaged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import padding
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.keywrap import aes_key_wrap

from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey

_CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass
class JWEWriter:
    """
    How to write an envelope; the default is anoncrypt as it should be.

    :param sender: makes it authcrypt.
    :param change: of the protected header, before anything is derived from it.
    :param headers: more members for the unprotected header of each recipient.
    :param moved: members of the protected header to be written into that of each recipient instead.
    :param encode: the protected header as JSON.
    :param cek: the content-encryption key, to write one of the wrong size.
    """

    sender: tuple[str, PrivateKey] | None = None
    enc: str = "A256CBC-HS512"
    draft03: bool = False
    change: Callable[[dict[str, Any]], object] = lambda header: None
    headers: dict[str, Any] = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    encode: Callable[[dict[str, Any]], bytes] = compact
    cek: bytes | None = None

    def write(self, plaintext: bytes, *recipients: tuple[str, PublicKey]) -> dict[str, Any]:
        """Return the JWE in General form, as an object."""
        ephemeral = PrivateKey.generate(recipients[0][1].curve)
        header = self._header([kid for kid, _ in recipients], ephemeral.public)
        self.change(header)
        own = {name: header[name] for name in self.moved if name in header}
        kept = {name: value for name, value in header.items() if name not in own}
        protected = b64(self.encode(kept))
        cek = os.urandom(64 if "CBC" in self.enc else 32) if self.cek is None else self.cek
        iv, data, tag = _encrypt(self.enc, cek, plaintext, protected.encode())
        entries = []
        for kid, key in recipients:
            z = _exchange(ephemeral, key) + (_exchange(self.sender[1], key) if self.sender else b"")
            wrapped = aes_key_wrap(_kek(z, header, tag if self.sender and not self.draft03 else None), cek)
            entries.append({"header": {"kid": kid, **own, **self.headers}, "encrypted_key": b64(wrapped)})
        return {
            "protected": protected,
            "recipients": entries,
            "iv": b64(iv),
            "ciphertext": b64(data),
            "tag": b64(tag),
        }

    def _header(self, kids: list[str], epk: PublicKey) -> dict[str, Any]:
        header: dict[str, Any] = {
            "typ": "application/didcomm-encrypted+json",
            "alg": "ECDH-1PU+A256KW" if self.sender else "ECDH-ES+A256KW",
            "enc": self.enc,
            "epk": epk.jwk(),
            "apv": b64(hashlib.sha256(".".join(sorted(kids)).encode()).digest()),
        }
        if self.sender:
            header |= {"skid": self.sender[0], "apu": b64(self.sender[0].encode())}
        if self.draft03:
            del header["apu"], header["apv"]
        return header


def _exchange(key: PrivateKey, peer: PublicKey) -> bytes:
    if key.curve == "X25519":
        secret = x25519.X25519PrivateKey.from_private_bytes(key.secret)
        return secret.exchange(x25519.X25519PublicKey.from_public_bytes(peer.raw))
    curve = _CURVES[key.curve]
    number = ec.derive_private_key(int.from_bytes(key.secret, "big"), curve)
    return number.exchange(ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(curve, peer.raw))


def _kek(z: bytes, header: dict[str, Any], tag: bytes | None) -> bytes:
    parts = [str(header.get("alg")).encode(), unb64(header.get("apu", "")), unb64(header.get("apv", ""))]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts) + (256).to_bytes(4, "big")
    info += b"" if tag is None else len(tag).to_bytes(4, "big") + tag
    return ConcatKDFHash(SHA256(), 32, info).derive(z)


def _encrypt(enc: str, cek: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes, bytes]:
    if enc == "A256GCM":
        iv = os.urandom(12)
        sealed = AESGCM(cek).encrypt(iv, plaintext, aad)
        return iv, sealed[:-16], sealed[-16:]
    iv = os.urandom(16)
    padder = padding.PKCS7(128).padder()
    cipher = Cipher(algorithms.AES(cek[-32:]), modes.CBC(iv)).encryptor()
    data = cipher.update(padder.update(plaintext) + padder.finalize()) + cipher.finalize()
    mac = hmac.new(cek[:32], aad + iv + data + (8 * len(aad)).to_bytes(8, "big"), "sha512").digest()
    return iv, data, mac[:32]
