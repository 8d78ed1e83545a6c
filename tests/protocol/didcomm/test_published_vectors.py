"""Published test vectors: see tests/vectors/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

from mediatord.protocol.didcomm.json_web_signature import is_jws, parse_jws
from mediatord.protocol.didcomm.jwe import (
    ANONCRYPT,
    AUTHCRYPT,
    CONTENT_CIPHERS,
    Enc,
    Envelope,
    build_other_info,
    compute_apv,
    decrypt_envelope,
    derive_kek,
    parse_envelope,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import decode_base64url, encode_base64url

VECTORS = Path(__file__).parents[2] / "vectors"
APPENDIX = json.loads((VECTORS / "didcomm-appendix.json").read_bytes())
PRIMITIVES = json.loads((VECTORS / "primitives.json").read_bytes())
KEYS = {jwk["kid"]: PrivateKey.from_jwk(jwk) for jwk in APPENDIX["alice"] + APPENDIX["bob"]}

# (curve, enc, authcrypt) of each encryption layer, and whether a JWS is inside.
LAYERS = [
    ([("X25519", "XC20P", False)], False),
    ([("P-384", "A256CBC-HS512", False)], False),
    ([("P-521", "A256GCM", False)], False),
    ([("X25519", "A256CBC-HS512", True)], False),
    ([("P-256", "A256CBC-HS512", True)], True),
    ([("P-521", "XC20P", False), ("P-521", "A256CBC-HS512", True)], True),
]


def unhex(values: dict[str, Any], *names: str) -> list[bytes]:
    return [bytes.fromhex(values[name]) for name in names]


def decrypt(envelope: Envelope, kid: str) -> bytes:
    sender = KEYS[envelope.sender_kid].public if envelope.sender_kid else None
    return decrypt_envelope(envelope, kid, KEYS[kid], sender)


@pytest.mark.parametrize("number", range(3))
def test_signed_messages(number: int) -> None:
    """The three signed messages verify, each with the key it names (DIDComm appendix C.2)."""
    jws = APPENDIX["signed"][number]
    signature = parse_jws(jws)
    assert signature.kid == f"did:example:alice#key-{number + 1}"
    assert json.loads(signature.verify(KEYS[signature.kid].public)) == APPENDIX["plaintext"]


@pytest.mark.parametrize("number", range(6))
def test_encrypted_messages(number: int) -> None:
    """The six encrypted messages decrypt to the plaintext, for every recipient key (DIDComm appendix C.3)."""
    layers, signed = LAYERS[number]
    raw = json.dumps(APPENDIX["encrypted"][number]).encode()
    for kid in parse_envelope(raw).encrypted_keys:
        inner, found = raw, []
        while "ciphertext" in json.loads(inner):
            envelope = parse_envelope(inner)
            found.append((envelope.curve, envelope.header["enc"], bool(envelope.sender_kid)))
            inner = decrypt(envelope, kid)
        assert found == layers
        assert is_jws(json.loads(inner)) == signed
        if signed:
            signature = parse_jws(json.loads(inner))
            inner = signature.verify(KEYS[signature.kid].public)
        assert json.loads(inner) == APPENDIX["plaintext"]


@pytest.mark.parametrize(("name", "enc"), [("a256cbc_hs512", "A256CBC-HS512"), ("xc20p", "XC20P")])
def test_content_encryption(name: str, enc: Enc) -> None:
    """RFC 7518 appendix B.3 and the XChaCha draft appendix A.3.1, in both directions."""
    key, iv, aad, plaintext, data, tag = unhex(PRIMITIVES[name], "key", "iv", "aad", "plaintext", "ciphertext", "tag")
    assert CONTENT_CIPHERS[enc].decrypt(key, iv, data, tag, aad) == plaintext
    assert CONTENT_CIPHERS[enc].encrypt(key, iv, plaintext, aad) == (data, tag)


def test_ecdh_es_and_concat_kdf() -> None:
    """RFC 7518 appendix C: the shared secret, and the derived key (the first half, for a 128-bit key)."""
    vector = PRIMITIVES["concat_kdf"]
    ephemeral, recipient = PrivateKey.from_jwk(vector["ephemeral"]), PrivateKey.from_jwk(vector["recipient"])
    z, info = unhex(vector, "z", "other_info")
    assert ephemeral.exchange(recipient.public) == recipient.exchange(ephemeral.public) == z
    assert derive_kek(z, info)[:16] == decode_base64url(vector["derived"])


@pytest.mark.parametrize("number", range(2))
def test_ecdh_1pu(number: int) -> None:
    """ECDH-1PU draft 04 appendix B: both secrets, and the key-encryption key derived with the tag."""
    vector = PRIMITIVES["ecdh_1pu"]
    recipient = vector["recipients"][number]
    ephemeral, sender = PrivateKey.from_jwk(vector["ephemeral"]), PrivateKey.from_jwk(vector["sender"])
    key = PrivateKey.from_jwk(recipient["key"])
    ze, zs, derived = unhex(recipient, "ze", "zs", "kek")
    assert (key.exchange(ephemeral.public), key.exchange(sender.public)) == (ze, zs)
    info, tag = bytes.fromhex(vector["other_info"]), decode_base64url(vector["tag"])
    assert derive_kek(ze + zs, info, tag)[:16] == derived
    assert aes_key_unwrap(derived, decode_base64url(recipient["encrypted_key"])).hex() == vector["cek"]


def test_ecdh_1pu_content() -> None:
    """ECDH-1PU draft 04 appendix B: the content, under the given key."""
    vector = PRIMITIVES["ecdh_1pu"]
    key, iv = unhex(vector, "cek", "iv")
    data, tag = decode_base64url(vector["ciphertext"]), decode_base64url(vector["tag"])
    aad = encode_base64url(vector["protected"].encode()).encode()
    assert CONTENT_CIPHERS["A256CBC-HS512"].decrypt(key, iv, data, tag, aad) == vector["plaintext"].encode()


def test_anoncrypt_intermediate_values() -> None:
    """From message C.3 number 1 to its content-encryption key, step by step (reference 13.2)."""
    vector = PRIMITIVES["anoncrypt_kdf"]
    z, info, derived = unhex(vector, "z", "other_info", "kek")
    envelope = parse_envelope(json.dumps(APPENDIX["encrypted"][0]).encode())
    assert envelope.info == info == build_other_info(ANONCRYPT, b"", compute_apv(envelope.encrypted_keys))
    encrypted_key, epk = next(iter(envelope.encrypted_keys.values()))
    assert KEYS[next(iter(envelope.encrypted_keys))].exchange(PublicKey.from_jwk(epk)) == z
    assert derive_kek(z, info) == derived
    assert aes_key_unwrap(derived, decode_base64url(encrypted_key)).hex() == vector["cek"]


def test_authcrypt_intermediate_values() -> None:
    """From message C.3 number 4 to its content-encryption key, step by step (reference 13.2)."""
    vector = PRIMITIVES["authcrypt_kdf"]
    ze, zs, info, tag, derived = unhex(vector, "ze", "zs", "other_info", "tag", "kek")
    envelope = parse_envelope(json.dumps(APPENDIX["encrypted"][3]).encode())
    sender = "did:example:alice#key-x25519-1"
    assert envelope.sender_kid == sender
    encrypted_key, epk = next(iter(envelope.encrypted_keys.values()))
    key = KEYS[next(iter(envelope.encrypted_keys))]
    assert (key.exchange(PublicKey.from_jwk(epk)), key.exchange(KEYS[sender].public)) == (ze, zs)
    assert envelope.info == info == build_other_info(AUTHCRYPT, sender.encode(), compute_apv(envelope.encrypted_keys))
    assert derive_kek(ze + zs, info, tag) == derived
    assert aes_key_unwrap(derived, decode_base64url(encrypted_key)).hex() == vector["cek"]
