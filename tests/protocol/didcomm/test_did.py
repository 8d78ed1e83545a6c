"""Syntax of DIDs, and lookup of keys by the ids that wallets use."""

from __future__ import annotations

import pytest

from mediatord.protocol.didcomm.did_document import (
    MAX_DID_LENGTH,
    DIDDocument,
    ServiceEndpoint,
    VerificationMethod,
    is_did,
    strip_did_url,
)
from mediatord.protocol.didcomm.keys import PublicKey

X25519 = PublicKey.from_multibase("z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR")
OTHER_X25519 = PublicKey.from_multibase("z6LSrSBwAXWz5HV7peV57WE3fau3LBCWtuC1zzJCvK58cvw7")
ED25519 = PublicKey.from_multibase("z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue")
DID = "did:peer:2.Ez6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR"


def build_document(did: str = DID, *agreement: VerificationMethod) -> DIDDocument:
    """A document whose only key agreement key is `#key-1`, unless others are given."""
    keys = agreement or (VerificationMethod(f"{did}#key-1", X25519),)
    return DIDDocument(did, keys, (VerificationMethod(f"{did}#key-2", ED25519),))


@pytest.mark.parametrize(
    "text",
    [
        "did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue",
        "did:web:example.com%3A8443:a:b",
        "did:example::x",
        "did:peer:2.Ez6LS.SeyJ0IjoiZG0ifQ==",
        "did:x:" + "a" * (MAX_DID_LENGTH - 6),
    ],
)
def test_valid_dids(text: str) -> None:
    """W3C's grammar (DID Core 3.1), and the padding of old did:peer:2 generators (reference 8.3)."""
    assert is_did(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "did",
        "did:key",
        "did:key:",
        "did:key:a:",
        "did::a",
        "DID:key:a",
        "did:Key:a",
        "did:key:a#b",
        "did:key:a?b",
        "did:key:a/b",
        "did:key:a b",
        "did:key:ä",
        "did:key:a\n",
        "did:key:%4",
        "did:key:%zz",
        "did:key:a=",
        "did:x:" + "a" * (MAX_DID_LENGTH - 5),
    ],
)
def test_invalid_dids(text: str) -> None:
    """Violations of the grammar, DID URLs, and anything over 8192 characters."""
    assert not is_did(text)


@pytest.mark.parametrize("rest", ["", "#key-1", "/path", "?query", "/path?query#fragment", "#a/b?c"])
def test_did_of_did_url(rest: str) -> None:
    """Path, query and fragment are not part of the DID (DID Core 3.2)."""
    assert strip_did_url(DID + rest) == DID


@pytest.mark.parametrize(
    "fragment",
    ["key-1", "6LSc1YK7", "6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR", X25519.multibase()],
)
def test_key_id_spellings(fragment: str) -> None:
    """All four absolute spellings find the key (reference 8.6)."""
    document = build_document()
    assert document.key_agreement_key(f"{DID}#{fragment}") == document.key_agreement[0]
    assert document.authentication_key(f"{DID}#{fragment}") is None


@pytest.mark.parametrize(
    "kid",
    ["#key-1", "key-1", "", DID, f"{DID}#", f"{DID}#key-3", f"{DID}#6LSc1YK", f"{DID}#z6LSc1YK", "did:x:y#key-1"],
)
def test_unknown_key_id(kid: str) -> None:
    """A relative id, one without fragment, of another DID, or with a prefix of another length finds nothing."""
    assert build_document().key_agreement_key(kid) is None


def test_ambiguous_prefix() -> None:
    """Eight characters count only if they identify one key (reference 8.6)."""
    twin = PublicKey("X25519", OTHER_X25519.raw)
    same_beginning = _key_with_same_prefix(X25519)
    document = build_document(
        DID, VerificationMethod(f"{DID}#a", X25519), VerificationMethod(f"{DID}#b", same_beginning)
    )
    assert document.key_agreement_key(f"{DID}#6LSc1YK7") is None
    document = build_document(DID, VerificationMethod(f"{DID}#a", X25519), VerificationMethod(f"{DID}#b", twin))
    assert document.key_agreement_key(f"{DID}#6LSc1YK7") == document.key_agreement[0]
    document = build_document(DID, VerificationMethod(f"{DID}#a", X25519), VerificationMethod(f"{DID}#b", X25519))
    assert document.key_agreement_key(f"{DID}#6LSc1YK7") == document.key_agreement[0]


def _key_with_same_prefix(key: PublicKey) -> PublicKey:
    """A key that differs in its last byte only, so that its multibase value has the same prefix."""
    other = PublicKey(key.curve, key.raw[:-1] + bytes([key.raw[-1] ^ 1]))
    assert other.multibase()[:9] == key.multibase()[:9]
    return other


def test_exact_id_takes_precedence() -> None:
    """A key whose id looks like the value of another one is found by its id."""
    imitation = VerificationMethod(f"{DID}#{X25519.multibase()}", OTHER_X25519)
    document = build_document(DID, VerificationMethod(f"{DID}#key-1", X25519), imitation)
    assert document.key_agreement_key(f"{DID}#{X25519.multibase()}") == imitation


def test_both_forms_of_peer_4_identify_the_same_key() -> None:
    """A kid with the short form finds the key in the long form's document, and vice versa (8.4)."""
    long, short = "did:peer:4zQmHash:zDocument", "did:peer:4zQmHash"
    document = build_document(long)
    assert document.key_agreement_key(f"{short}#key-1") == document.key_agreement[0]
    document = build_document(short)
    assert document.key_agreement_key(f"{long}#key-1") == document.key_agreement[0]
    assert document.key_agreement_key("did:peer:4zQmOther#key-1") is None


def test_http_endpoints() -> None:
    """Only http(s) endpoints for DIDComm v2 can be posted to: no socket, no queue, no DID (reference 3.4, 8.1)."""
    wanted = (
        ServiceEndpoint("http://a.example/", ("didcomm/v2",)),
        ServiceEndpoint("HTTPS://b.example/"),
        ServiceEndpoint("https://d.example/", ("didcomm/aip1", "didcomm/v2;env=x")),
    )
    others = (
        ServiceEndpoint("ws://a.example/", ("didcomm/v2",)),
        ServiceEndpoint("didcomm:transport/queue"),
        ServiceEndpoint("did:web:a.example"),
        ServiceEndpoint("https://c.example/", ("didcomm/aip2;env=rfc19",)),
    )
    endpoints = (wanted[0], *others, *wanted[1:])
    assert DIDDocument(DID, (), (), endpoints).http_endpoints() == wanted
