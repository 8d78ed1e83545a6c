"""Canonical form and digest of all forms of a DID and its DID URLs."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mediatord.protocol.canonical_did import (
    canonicalize_did,
    compute_did_digest,
    is_did_peer_3,
    is_same_did,
    make_did_comparison_key,
)
from mediatord.protocol.decentrl.did_decentrl import make_did
from mediatord.protocol.didcomm.did_document import is_did
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from tests.did_factories import make_did_peer_4

KEY = "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK"
PEER_2 = "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc.SeyJ0IjoiZG0ifQ"
LONG, SHORT = make_did_peer_4({"verificationMethod": []})
PRISM = "did:prism:" + "0a" * 32
KEYS = bytes(range(32)), bytes(range(32, 64))
DECENTRL = make_did("eve??>", *KEYS, "did:web:mediator.example")

# The canonical form, and other forms of the same DID.
FORMS = {
    KEY: (KEY.replace("z", "%7A"), KEY.replace("z", "%7a"), KEY.replace(":z", ":1.1:z"), f"{KEY}%23{KEY[8:]}"),
    SHORT: (LONG, SHORT.replace("4z", "%34z"), LONG.replace(":", "%3A").replace("did%3Apeer%3A", "did:peer:")),
    PEER_2: (PEER_2.replace("2.E", "2%2EE"),),
    "did:web:wallet.example": (
        "did:web:Wallet.EXAMPLE",
        "did:web:wallet.example%3A443",
        "did:web:wallet.example%3a443",
        "did:web:wallet.example.",
        "did:web:wallet.example:.well-known",
        "did:web:%77allet.example",
    ),
    "did:web:wallet.example%3A8443:a:B": ("did:web:WALLET.example%3a8443:%61:B",),
    "did:web:wallet.example:a%2Fb": ("did:web:wallet.example:a%2fb",),
    "did:webvh:QmScid:wallet.example:a": ("did:webvh:QmScid:Wallet.example:%61",),
    PRISM: (f"{PRISM}:CoIBCn8SPQ",),
    "did:ion:EiAbc": ("did:ion:EiAbc:eyJkZWx0YSI6e319",),
    "did:ion:test:EiAbc": ("did:ion:test:EiAbc:eyJkZWx0YSI6e319",),
    "did:ethr:0xab16a96d359ec26a11e2c2b3d8f8b8942d5bfcdb": ("did:ethr:0xAb16a96D359eC26a11e2C2b3d8f8B8942d5Bfcdb",),
    "did:example:x-1": ("did:example:x%2D1", "did:example:%78-1"),
    DECENTRL: (
        make_did("eve??>", *KEYS, "did:web:mediator.example", raw=True),
        DECENTRL.replace(DECENTRL.split(":")[2], base64.b64encode(b"eve??>").decode()),
    ),
}
URL_PARTS = ("", "#key-1", "#", "/path", "?service=a", "?a=b#c", ";service=agent", "/a;b?c#d")
NAMES = [
    (did, name + part)
    for did, forms in FORMS.items()
    for name in (did, *forms)
    for part in URL_PARTS
    if "%" not in name or "%23" not in name or not part
]


@pytest.mark.parametrize(("did", "name"), NAMES)
def test_canonical_form(did: str, name: str) -> None:
    """All forms of a DID have the same canonical form and digest."""
    assert canonicalize_did(name) == did
    assert compute_did_digest(name) == compute_did_digest(did)
    assert is_same_did(name, did)


def test_different_dids() -> None:
    """Similar but different DIDs stay different."""
    close = [
        f"{KEY}x",
        KEY.replace("did:key", "did:peer:0"),
        f"{PEER_2}x",
        "did:web:wallet.example:A",
        "did:web:wallet.example:a",
        "did:web:wallet.example.org",
        "did:web:wallet.example%3A444",
        "did:web:wallet.example:a:b",
        "did:example:X-1",
        "did:example:x-1%23a",
        "did:example:x",
        "6MkRawBase58Key",
        "",
    ]
    assert len({compute_did_digest(did) for did in (*FORMS, *close)}) == len(FORMS) + len(close)


@pytest.mark.parametrize("rest", ["", "#key-1"])
def test_did_peer_3_has_digest_of_peer_2(rest: str) -> None:
    """A did:peer:2, padded or not, and its did:peer:3 have one digest, although they keep their spelling."""
    short = derive_did_peer_3(PEER_2)
    for name in (short + rest, f"{PEER_2}=={rest}"):
        assert is_same_did(name, PEER_2)
    assert is_did_peer_3(canonicalize_did(short + rest)) and not is_did_peer_3(PEER_2)
    assert canonicalize_did(PEER_2 + rest) == PEER_2
    assert not is_same_did(derive_did_peer_3(PEER_2 + "x"), PEER_2)
    forms = {make_did_comparison_key(canonicalize_did(name + rest)) for name in (PEER_2, f"{PEER_2}==", short)}
    assert len(forms) == 1 and forms.isdisjoint(
        {PEER_2, short, make_did_comparison_key(derive_did_peer_3(PEER_2 + "x"))}
    )


@pytest.mark.parametrize(
    "text", ["", "did:", "did:key:", "a#b/c", "DID:KEY:z", "did:key:%zz", "did:x:%%341", "\ud800"]
)
def test_other_text(text: str) -> None:
    """Other text is compared unchanged, without errors."""
    assert canonicalize_did(text) == text
    assert len(compute_did_digest(text)) == 16


PIECES = st.sampled_from(
    [
        *FORMS,
        *(form for forms in FORMS.values() for form in forms),
        "did:web:",
        "did:key:",
        "did:peer:4",
        "%",
        "%25",
        "41",
    ]
    + [":", "#", "/", ";", "?", "=", "A", "z", ".", "1.", "test:", "main:", "%2541", "é", "%C3%A9", "%ff", "did:tdw:"]
)


@given(st.lists(PIECES, max_size=6).map("".join))
@example("did:peer:4zQmHash%3AzDocument:%2541")
@example("did:ion:test:EiHash%3Adelta:%2541")
def test_canonical_form_is_idempotent(text: str) -> None:
    """The canonical form is its own, keeps the digest, and that of a DID is a DID without parts of a DID URL."""
    canonical = canonicalize_did(text)
    assert canonicalize_did(canonical) == canonical
    assert compute_did_digest(canonical) == compute_did_digest(text)
    if is_did(text):
        assert canonicalize_did(f"{text}#key-1") == canonical
        assert is_did(canonical) or text.startswith(("did:web:", "did:webvh:", "did:tdw:"))


@given(st.sampled_from(list(FORMS)), st.data())
def test_percent_encoding(did: str, data: st.DataObject) -> None:
    """Percent-encoding unreserved characters makes no other DID."""
    method, _, specific = did.removeprefix("did:").partition(":")
    if method == "decentrl":
        return
    places = data.draw(st.sets(st.integers(0, len(specific) - 1), max_size=5))
    escaped = "".join(
        f"%{ord(one):02x}"
        if place in places and one not in ":%" and specific[place - 2 : place].find("%") < 0
        else one
        for place, one in enumerate(specific)
    )
    assert canonicalize_did(f"did:{method}:{escaped}#key-1") == did
