"""Local resolution of all DID methods; no text causes another failure."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import DIDDocument, is_did
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    DIDWebLookupRequired,
    locate_did_web,
    make_did_peer_2,
    resolve_local,
)
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey
from tests.did_factories import make_did_peer_4

_CURVES: tuple[Curve, ...] = ("X25519", "Ed25519", "P-256", "P-384", "P-521", "secp256k1")
KEYS = [PrivateKey.generate(curve).public for curve in _CURVES]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["t", "s", "r", "a", "id", "type", "uri", "accept", "serviceEndpoint", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
methods = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["#k", "k", "did:x:y#k"]) | json_values,
        "type": st.sampled_from(["Multikey", "JsonWebKey2020", "X25519KeyAgreementKey2019"]) | json_values,
        "publicKeyMultibase": st.sampled_from([key.multibase() for key in KEYS]) | json_values,
        "publicKeyJwk": st.sampled_from([key.jwk() for key in KEYS]) | json_values,
        "publicKeyBase58": st.text("123456789ABCabc0", max_size=60) | json_values,
    },
)
documents = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(st.just("#k") | methods | json_values, max_size=5) | json_values
        for name in ("verificationMethod", "keyAgreement", "authentication", "service", "id")
    },
)


def resolve_or_none(did: str) -> DIDDocument | None:
    """The document, or None for one of the four resolution errors."""
    try:
        return resolve_local(did)
    except (UnresolvableDID, UnsupportedDIDMethod, DIDWebLookupRequired, DIDPeer4LongFormRequired):
        return None


@pytest.mark.parametrize(
    ("did", "error"),
    [
        ("did:web:example.com", DIDWebLookupRequired),
        ("did:peer:4zQmXgCFA4qsZQ1S7je6MqLEY8CLF1KNGahR6qqhekydCbnc", DIDPeer4LongFormRequired),
        ("did:prism:abc", UnsupportedDIDMethod),
        ("did:peer:3zQmNowBq4niaXgPzwk8jJ99SYc8vCEgD2KbUXyHDBPhKtt3", UnsupportedDIDMethod),
        ("did:key:z6Mk", UnresolvableDID),
        ("did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue#x", UnresolvableDID),
        ("hello", UnresolvableDID),
        ("did:peer:2." + "E" * 8192, UnresolvableDID),
    ],
)
def test_locally_unresolvable_dids(did: str, error: type[Exception]) -> None:
    """Each method fails as in reference 8.1."""
    with pytest.raises(error):
        resolve_local(did)


@given(st.text() | st.from_regex(r"did:(key|peer|web):[0-4]?[zA-Za-z0-9.:%=_-]*", fullmatch=True))
def test_arbitrary_text(text: str) -> None:
    """Any text gives a document or one of the four errors."""
    document = resolve_or_none(text)
    assert document is None or document.did == text


@given(
    st.lists(
        st.tuples(st.sampled_from("EVAIDSX"), st.sampled_from([key.multibase() for key in KEYS]) | st.text("z6LSM1")),
        max_size=6,
    ),
    st.lists(json_values, max_size=3),
)
def test_arbitrary_peer_2(keys: list[tuple[str, str]], services: list[object]) -> None:
    """A did:peer:2 of any elements resolves or is malformed, and all its ids are its own."""
    elements = [f".{purpose}{content}" for purpose, content in keys]
    elements += [f".S{encoding.encode_base64url(encoding.dumps(service))}" for service in services]
    did = "did:peer:2" + "".join(elements)
    document = resolve_or_none(did)
    if document is not None:
        for method in (*document.key_agreement, *document.authentication):
            assert method.id.startswith(f"{did}#key-")


@given(documents)
def test_arbitrary_peer_4(document: dict[str, object]) -> None:
    """A did:peer:4 of any document resolves, and all ids in it are its own."""
    long, short = make_did_peer_4(document)
    found = resolve_or_none(long)
    assert found is not None and found.also_known_as == (short,)
    for method in (*found.key_agreement, *found.authentication):
        assert method.id.startswith(f"{long}#")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_in_peer_4(data: bytes) -> None:
    """Any bytes may follow a valid hash."""
    encoded = "z" + encoding.encode_base58(data)
    hashed = "z" + encoding.encode_base58(b"\x12\x20" + sha256(encoded.encode()).digest())
    resolve_or_none(f"did:peer:4{hashed}:{encoded}")


@given(st.lists(st.tuples(st.sampled_from("EV"), st.sampled_from(KEYS)), min_size=1, max_size=8))
def test_peer_2_round_trip(keys: list[tuple[str, PublicKey]]) -> None:
    """A built DID resolves to its keys, each found by its number."""
    did = make_did_peer_2(keys, [])
    document = resolve_local(did)
    assert is_did(did)
    for number, (purpose, key) in enumerate(keys, 1):
        find = document.key_agreement_key if purpose == "E" else document.authentication_key
        found = find(f"{did}#key-{number}")
        assert found is None or found.key == key


@given(st.text() | st.from_regex(r"[a-z0-9.:%A-F-]*", fullmatch=True))
def test_arbitrary_web_location(rest: str) -> None:
    """Any did:web has a location on its own host, or none."""
    try:
        location = locate_did_web(f"did:web:{rest}")
    except UnresolvableDID:
        return
    assert location.url.startswith(f"https://{location.host}")
    assert location.url.endswith("/did.json")
    assert location.url.isascii()
