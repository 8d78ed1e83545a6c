"""did:web: location and validity of a document (reference 8.5)."""

from __future__ import annotations

import pytest

from mediatord.errors import UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import DIDWebLocation, locate_did_web, parse_did_web_document


@pytest.mark.parametrize(
    ("did", "host", "url"),
    [
        ("did:web:example.com", "example.com", "https://example.com/.well-known/did.json"),
        ("did:web:example.com:a:b", "example.com", "https://example.com/a/b/did.json"),
        ("did:web:example.com%3A8443", "example.com", "https://example.com:8443/.well-known/did.json"),
        ("did:web:example.com%3a8443:a", "example.com", "https://example.com:8443/a/did.json"),
        ("did:web:example.com:%61:b-c_d.e", "example.com", "https://example.com/a/b-c_d.e/did.json"),
        ("did:web:example.com:a%2Fb", "example.com", "https://example.com/a%2Fb/did.json"),
        ("did:web:example.com:a%252e", "example.com", "https://example.com/a%252e/did.json"),
        ("did:web:example.com:a%3Fb%23c", "example.com", "https://example.com/a%3Fb%23c/did.json"),
        ("did:web:localhost", "localhost", "https://localhost/.well-known/did.json"),
        ("did:web:127.0.0.1%3A8443", "127.0.0.1", "https://127.0.0.1:8443/.well-known/did.json"),
    ],
)
def test_location(did: str, host: str, url: str) -> None:
    """Segments are decoded once, after splitting; only the port's colon is encoded (8.5)."""
    assert locate_did_web(did) == DIDWebLocation(host, url)


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "%20",
        "example.com%3A",
        "example.com%3A0",
        "example.com%3A65536",
        "example.com%3A80%3A80",
        "example.com%3A8x",
        "user%40example.com",
        "example.com%2Fpath",
        "example.com%3Fquery",
        "example.com%23",
        "exa%0Ample.com",
        "ex%C3%A4mple.com",
        "%FF.example",
        "example..com",
        ".example.com",
        "example.com.",
        "-a.example",
        "%5B%3A%3A1%5D",
        "a" * 64 + ".example",
        "a." * 130 + "example",
        "example.com::a",
        "example.com:.:a",
        "example.com:..:a",
        "example.com:%2E%2E:a",
        "example.com:%FF",
    ],
)
def test_invalid_locations(rest: str) -> None:
    """User information, IP literals, invalid names or ports, and paths that ascend are refused."""
    with pytest.raises(UnresolvableDID):
        locate_did_web(f"did:web:{rest}")


def test_document() -> None:
    """The document of the DID itself is read."""
    did = "did:web:example.com"
    assert parse_did_web_document(did, encoding.dumps({"id": did, "alsoKnownAs": ["did:x:y"]})).also_known_as == ()


@pytest.mark.parametrize(
    "raw",
    [b"", b"<html>", b"[]", b"{}", b'{"id":"did:web:other.example"}', b'{"id":["did:web:example.com"]}', b"[" * 9999],
)
def test_invalid_documents(raw: bytes) -> None:
    """Invalid JSON, and documents of another DID (8.5)."""
    with pytest.raises(UnresolvableDID):
        parse_did_web_document("did:web:example.com", raw)
