"""Keys of DIDComm v1: spellings, signatures, and the X25519 keys derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey, convert_ed25519_to_x25519
from mediatord.protocol.didcomm_v1 import keys
from mediatord.protocol.didcomm_v1.keys import (
    InvalidKey,
    SigningKey,
    decode_base58_key,
    decode_key,
    derive_agreement_key,
    encode_base58_key,
    encode_did_key,
    find_spelling,
    parse_key,
    spell_key,
    verify_signature,
)
from mediatord.protocol.encoding import encode_base58

# Example of RFC 0360.
DID_KEY, BASE58 = (
    "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH",
    "B12NYF8RrR3h41TDCTJojY59usg3mbtbjnFs7Eud1Y6u",
)
ALICE = SigningKey.from_seed(b"\1" * 32)
verkeys = st.binary(min_size=32, max_size=32) | st.just(bytes(32)) | st.just(b"\xff" * 32)


def test_example_of_rfc_0360() -> None:
    """Each spelling of the key in the RFC is the same key."""
    for text in (DID_KEY, BASE58, f"{DID_KEY}#{DID_KEY.removeprefix('did:key:')}", f"{DID_KEY}#"):
        assert parse_key(text) == DID_KEY
    assert spell_key(DID_KEY, "base58") == BASE58
    assert spell_key(DID_KEY, "did:key") == DID_KEY
    assert [find_spelling(text) for text in (DID_KEY, BASE58)] == ["did:key", "base58"]


@given(verkeys)
def test_spellings_of_any_key(verkey: bytes) -> None:
    """Whatever the bytes, each spelling is read back as the same name."""
    did_key = encode_did_key(verkey)
    base58 = encode_base58_key(did_key)
    assert decode_key(did_key) == verkey == decode_base58_key(base58)
    for spelling in (did_key, base58, f"{did_key}#key-1"):
        assert parse_key(spelling) == did_key
        assert parse_key(spell_key(did_key, find_spelling(spelling))) == did_key


@pytest.mark.parametrize(
    "text",
    [
        *(None, 7, b"did:key:z6Mk", [], "", "did:", "did:key:", "did:key:z", "did:key:#", "z6Mk", "1" * 31, "1" * 33),
        *("1" * 45, BASE58[:-2], BASE58 + "1", f"1{BASE58}", BASE58.replace("B", "0"), f" {BASE58}", f"{BASE58}\n"),
        *(BASE58[:-1] + "é", "z" * 44, f"{BASE58}#key-1", DID_KEY[:-1], DID_KEY + "1", DID_KEY.upper()),
        *(f" {DID_KEY}", DID_KEY.replace(":z", ":m"), f"did:key:z1{DID_KEY[9:]}", DID_KEY + "#" * 100),
        # An X25519 key, a P-256 key, and an X25519 key after a did:peer:0.
        *(
            "did:key:z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc",
            "did:peer:0z6LSbysY2xFMRpGMhb7t",
        ),
        "did:key:zDnaerDaTF5BXEavCrfRZEk316dpbLsfPDZ3WJ5hRTPFU2169",
    ],
)
def test_refused_texts(text: object) -> None:
    """Other types, codecs, lengths and alphabets are refused, twice the same."""
    for _ in range(2):
        with pytest.raises(InvalidKey):
            parse_key(text)


@given(st.text() | st.from_regex(r"(did:(key|peer):z?)?[1-9A-HJ-NP-Za-km-z]{0,60}(#.*)?", fullmatch=True))
def test_parse_key_is_total(text: str) -> None:
    """Any text is a key of one name, or refused."""
    try:
        key = parse_key(text)
    except InvalidKey:
        return
    assert parse_key(key) == key == encode_did_key(decode_key(key))


@pytest.mark.parametrize("text", ["", BASE58, f"{DID_KEY}#a", "did:key:z0", "did:key:z" + "1" * 200])
def test_decode_key_wants_the_name(text: str) -> None:
    """The raw key is only to be had by its one name."""
    with pytest.raises(InvalidKey):
        decode_key(text)


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_signatures(seed: bytes, data: bytes) -> None:
    """A signature is of its key and its data only."""
    key = SigningKey.from_seed(seed)
    signature = key.sign(data)
    assert len(signature) == 64
    assert verify_signature(key.did_key, data, signature)
    assert not verify_signature(key.did_key, data + b"\0", signature)
    assert key.did_key == ALICE.did_key or not verify_signature(ALICE.did_key, data, signature)


def test_signature_of_another_length() -> None:
    """Bytes moved between signature and data verify as little as a cut or an empty one."""
    signature = ALICE.sign(b"data")
    for shown, data in ((signature[:-1], b"data"), (signature[:-1], signature[-1:] + b"data"), (b"", b"data")):
        assert not verify_signature(ALICE.did_key, data, shown)
    assert not verify_signature(ALICE.did_key, b"ata", signature + b"d")
    assert not verify_signature(ALICE.did_key, b"", signature + b"data")
    assert not verify_signature("did:key:z6Mk", b"data", signature)


def test_signing_key_agrees_with_v2() -> None:
    """Public keys are those that the keys of v2 have for the same seed, and secrets are not shown."""
    private = PrivateKey.from_secret("Ed25519", b"\1" * 32)
    assert ALICE.verkey == private.public.raw
    assert ALICE.did_key == f"did:key:{private.public.multibase()}"
    assert ALICE.agreement_public == convert_ed25519_to_x25519(private.public).raw
    assert ALICE.agreement_public == derive_agreement_key(ALICE.did_key)
    for secret in (ALICE.secret, ALICE.agreement_secret, b"\1" * 32):
        assert repr(secret) not in repr(ALICE)
        assert secret.hex() not in repr(ALICE)


@pytest.mark.parametrize("seed", [b"", b"\1" * 31, b"\1" * 33])
def test_seed_of_another_size(seed: bytes) -> None:
    """A seed has 32 bytes."""
    with pytest.raises(ValueError, match="seed"):
        SigningKey.from_seed(seed)


# Points of order 1, 2, 4 and 8, and one that is not on the curve.
LOW_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "0200000000000000000000000000000000000000000000000000000000000000",
]


@pytest.mark.parametrize("verkey", LOW_ORDER)
def test_keys_of_low_order(verkey: str) -> None:
    """They have a name, but nothing can be encrypted to them and no signature is of them."""
    raw = bytes.fromhex(verkey)
    key = encode_did_key(raw)
    assert parse_key(encode_base58(raw)) == key
    with pytest.raises(InvalidKey):
        derive_agreement_key(key)
    assert not verify_signature(key, b"data", raw + bytes(32))


def test_caches_are_bounded() -> None:
    """Neither cache keeps more entries than it may, whatever arrives."""
    for cached in (keys._parse_cached_key, keys.derive_agreement_key):
        size = cached.cache_info().maxsize
        assert size is not None and size <= 4096
    assert PublicKey("Ed25519", ALICE.verkey).raw == decode_key(ALICE.did_key)
