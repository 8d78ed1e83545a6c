"""The DID method did:decentrl (reference sections 2 and 16)."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.protocol import encoding
from mediatord.protocol.decentrl.did_decentrl import (
    MAX_DID_LENGTH,
    DecentrlDID,
    KeyType,
    decode_multibase_key,
    encode_multibase_key,
    make_did,
    parse_did,
)
from tests.protocol.decentrl.vectors import ALICE, MEDIATOR, VECTORS, agreement_key, signing_key

_, _, ALIAS, SIGNING, PREKEY, MEDIATOR_PART = ALICE.split(":")
RAW_ALICE = VECTORS["alice"]["did_of_raw_keys"]
TEXTS = (
    "too long for a DID",
    "not a did:decentrl",
    "the mediator has no DID",
    "not base64url",
    "not UTF-8",
    "not base58",
    "not a key in multibase",
    "not a key of this kind",
)
KEYS = st.binary(min_size=32, max_size=32)


def alice_did(
    alias: str = ALIAS,
    signing: str = SIGNING,
    prekey: str = PREKEY,
    mediator: str = MEDIATOR_PART,
    method: str = "decentrl",
) -> str:
    """Alice's DID with some of its parts replaced."""
    return f"did:{method}:{alias}:{signing}:{prekey}:{mediator}"


def encode(text: str | bytes) -> str:
    """Base64url without padding."""
    data = text.encode() if isinstance(text, str) else text
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.mark.parametrize("did", [ALICE, RAW_ALICE])
def test_known_answer(did: str) -> None:
    """Both forms of Alice's keys are the same keys (reference section 16)."""
    assert parse_did(did) == DecentrlDID(
        did, "alice", signing_key("alice"), agreement_key("alice", "prekey"), "did:web:mediator.example"
    )
    assert parse_did(did).signing_key_id == f"{did}#signing"


def test_known_answer_of_building() -> None:
    """The multicodec prefix is written unless disabled."""
    parts = "alice", signing_key("alice"), agreement_key("alice", "prekey"), MEDIATOR
    assert make_did(*parts) == ALICE
    assert make_did(*parts, raw=True) == RAW_ALICE


@pytest.mark.parametrize(("raw", "prefix"), [(False, ""), (True, "raw_")])
def test_keys_of_mediator(raw: bool, prefix: str) -> None:
    """The mediator's keys in both forms (reference section 16)."""
    wanted = VECTORS["mediator"]
    assert encode_multibase_key(signing_key("mediator"), "Ed25519", raw) == wanted[f"{prefix}signing"]
    assert encode_multibase_key(agreement_key("mediator", "prekey"), "X25519", raw) == wanted[f"{prefix}prekey"]


@settings(deadline=None)
@given(st.text(max_size=40), KEYS, KEYS, st.text(max_size=40), st.booleans())
def test_round_trip(alias: str, signing: bytes, prekey: bytes, mediator: str, raw: bool) -> None:
    """A built DID is parsed to its parts, and has only characters allowed in DIDs."""
    did = make_did(alias, signing, prekey, f"did:{mediator}", raw=raw)
    assert parse_did(did) == DecentrlDID(did, alias, signing, prekey, f"did:{mediator}")
    assert not set(did) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_:")


@pytest.mark.parametrize("alias", ["Pz4/Pj4+YQ==", "Pz4_Pj4-YQ==", "Pz4/Pj4+YQ", "Pz4_Pj4-YQ", "Pz4_Pj4+YQ"])
def test_base64_variants(alias: str) -> None:
    """Either alphabet, padded or not; the text is kept, so that another spelling is another DID."""
    found = parse_did(alice_did(alias))
    assert (found.alias, found.did) == ("?>?>>>a", alice_did(alias))


def test_empty_alias() -> None:
    """The alias may be empty."""
    assert parse_did(alice_did(alias="")).alias == ""


@pytest.mark.parametrize(
    "did",
    [
        "",
        "did:decentrl",
        alice_did(method="web"),
        alice_did(method="DECENTRL"),
        f"{ALICE}:",
        f"{ALICE}:x",
        ALICE.rpartition(":")[0],
        f" {ALICE}",
        f"{ALICE}\n",
        f"{ALICE}#signing",
        f"{ALICE}?a=b",
        f"{ALICE}/path",
        f"{ALICE}%",
        f"{ALICE}\0",
        f"{ALICE}é",
        alice_did(alias="YWxpY2U=="),
        alice_did(alias="YWxp Y2U"),
        alice_did(alias="YWxpY2V"),
        alice_did(alias="Y"),
        alice_did(alias=encode(b"\xff\xfe")),
        alice_did(mediator=""),
        alice_did(mediator=encode("mediator.example")),
        alice_did(mediator=encode("DID:web:mediator.example")),
        alice_did(mediator=encode(b"did:\xff")),
        alice_did(signing=""),
        alice_did(signing="z"),
        alice_did(signing=SIGNING[1:]),
        alice_did(signing=f"m{SIGNING[1:]}"),
        alice_did(signing=PREKEY),
        alice_did(prekey=SIGNING),
        alice_did(signing=SIGNING[:-1]),
        alice_did(signing=f"{SIGNING}1"),
        alice_did(signing="z" + encoding.encode_base58(b"\1" * 31)),
        alice_did(signing="z" + encoding.encode_base58(b"\1" * 33)),
        alice_did(signing="z" + encoding.encode_base58(b"\1" * 34)),
        alice_did(signing="z" + encoding.encode_base58(b"\xed\x01" + b"\1" * 31)),
        alice_did(signing="z" + encoding.encode_base58(b"\xed\x01" + b"\1" * 33)),
        alice_did(signing=SIGNING.replace("k", "0")),
        alice_did(signing="z" + "1" * 1000),
        alice_did(alias="QUFB" * 500),
    ],
)
def test_invalid_dids(did: str) -> None:
    """Anything else, DID URLs included, is a ValueError without the input (reference section 2)."""
    with pytest.raises(ValueError, match=f"^({'|'.join(TEXTS)})$") as caught:
        parse_did(did)
    assert type(caught.value) is ValueError


def test_maximum_length() -> None:
    """A DID has at most 2048 characters."""
    alias = "A" * (MAX_DID_LENGTH - len(alice_did(alias="")))
    longest = alice_did(alias)
    assert len(longest) == MAX_DID_LENGTH == 2048
    assert parse_did(longest).did == longest
    with pytest.raises(ValueError, match="^too long for a DID$"):
        parse_did(f"{longest}A")


def test_long_keys_are_not_decoded() -> None:
    """A key that is too long is refused before decoding, whose cost is quadratic."""
    with pytest.raises(ValueError, match="^not a key in multibase$"):
        decode_multibase_key("z" + "2" * 48, "Ed25519")


@pytest.mark.parametrize(
    ("alias", "signing", "prekey", "mediator"),
    [
        ("alice", b"1" * 31, b"2" * 32, MEDIATOR),
        ("alice", b"1" * 32, b"2" * 33, MEDIATOR),
        ("alice", b"1" * 32, b"2" * 32, "mediator.example"),
        ("a" * 2000, b"1" * 32, b"2" * 32, MEDIATOR),
        ("\ud800", b"1" * 32, b"2" * 32, MEDIATOR),
    ],
)
def test_refuses_to_build_invalid_dids(alias: str, signing: bytes, prekey: bytes, mediator: str) -> None:
    """No keys, no mediator, too long, not Unicode: nothing is built that could not be parsed."""
    with pytest.raises(ValueError) as caught:
        make_did(alias, signing, prekey, mediator)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("size", [0, 31, 33, 34])
def test_key_size(size: int) -> None:
    """A key has 32 bytes."""
    with pytest.raises(ValueError, match="^a key of the wrong size$"):
        encode_multibase_key(bytes(size), "Ed25519", raw=True)


@settings(deadline=None)
@given(KEYS, st.sampled_from(["Ed25519", "X25519"]), st.booleans())
def test_multibase_round_trip(key: bytes, kind: KeyType, raw: bool) -> None:
    """With or without prefix; the prefix of the other key type is refused."""
    text = encode_multibase_key(key, kind, raw)
    assert decode_multibase_key(text, kind) == key
    other: KeyType = "X25519" if kind == "Ed25519" else "Ed25519"
    if raw:
        assert decode_multibase_key(text, other) == key
    else:
        with pytest.raises(ValueError):
            decode_multibase_key(text, other)


def test_repr_hides_keys() -> None:
    """Keys are in the representation only as part of the DID."""
    assert repr(signing_key("alice")) not in repr(parse_did(ALICE))
