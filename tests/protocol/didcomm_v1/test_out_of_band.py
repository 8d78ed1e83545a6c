"""The invitations of DIDComm v1."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.out_of_band import (
    build_connection_invitation,
    build_invitation,
    build_url,
    derive_invitation_id,
)

KEY = SigningKey.from_seed(b"\x01" * 32).did_key
OTHER = SigningKey.from_seed(b"\x02" * 32).did_key
URL = "https://m.example"
ENDPOINT = f"{URL}/didcomm"


def test_invitation() -> None:
    """The message that Credo, ACA-Py and Bifold read: one inline service, by did:key."""
    message = build_invitation(URL, ENDPOINT, KEY, "Our mediator")
    assert message == {
        "@type": "https://didcomm.org/out-of-band/1.1/invitation",
        "@id": derive_invitation_id(URL),
        "label": "Our mediator",
        "goal_code": "aries.vc.mediate",
        "goal": "Mediate",
        "accept": ["didcomm/aip2;env=rfc19", "didcomm/aip1"],
        "handshake_protocols": ["https://didcomm.org/didexchange/1.1", "https://didcomm.org/didexchange/1.0"],
        "services": [
            {
                "id": "#inline-0",
                "type": "did-communication",
                "recipientKeys": [KEY],
                "serviceEndpoint": "https://m.example/didcomm",
            }
        ],
    }


def test_connection_invitation() -> None:
    """The older form has bare keys, and the same id."""
    message = build_connection_invitation(URL, ENDPOINT, KEY, "Our mediator")
    assert message == {
        "@type": "https://didcomm.org/connections/1.0/invitation",
        "@id": derive_invitation_id(URL),
        "label": "Our mediator",
        "recipientKeys": [encode_base58_key(KEY)],
        "serviceEndpoint": "https://m.example/didcomm",
    }


def test_id_depends_on_url_only() -> None:
    """Wallets that start again look for the same id; another mediator has another one."""
    ids = {build_invitation(URL, ENDPOINT, key, label)["@id"] for key in (KEY, OTHER) for label in ("a", "b")}
    assert ids == {derive_invitation_id(URL)}
    assert derive_invitation_id(URL + "/x") not in ids


def test_url() -> None:
    """The URL has the message as base64url without padding, whatever its length."""
    for label in ("", "a", "ab", "abc"):
        message = build_invitation(URL, ENDPOINT, KEY, label)
        parts = urlsplit(build_url(f"{URL}/i", "oob", message))
        assert f"{parts.scheme}://{parts.netloc}{parts.path}" == "https://m.example/i"
        (encoded,) = parse_qs(parts.query, strict_parsing=True)["oob"]
        assert "=" not in encoded
        assert encoding.loads_object(encoding.decode_base64url(encoded)) == message
