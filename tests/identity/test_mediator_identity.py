"""The mediator's DIDs, keys and documents (reference section 9; known answer of 8.3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mediatord.identity.key_file import KeySet, create_keys, generate_keys, load_keys
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity, make_mediator_document
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3, make_did_peer_2, resolve_local
from mediatord.protocol.didcomm.keys import PrivateKey, convert_ed25519_to_x25519_private
from mediatord.runtime.secret_files import SecretFileError
from tests.did_factories import make_did_key, make_did_peer_4
from tests.protocol.decentrl.vectors import MEDIATOR, VECTORS, agreement_key, signing_key

AGREEMENT = PrivateKey.from_secret("X25519", b"1" * 32)
SIGNING = PrivateKey.from_secret("Ed25519", b"2" * 32)
P256 = PrivateKey.from_secret("P-256", b"3" * 32)
KEYS = KeySet((("prekey", AGREEMENT), ("signing", SIGNING), ("p256", P256)))
URL = "http://127.0.0.1:8080"
# The known answer of reference 8.3, except the path of the WebSocket, which is /didcomm in the contract.
KNOWN_DID = (
    "did:peer:2.Ez6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR"
    ".Vz6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"
    ".SeyJ0IjoiZG0iLCJzIjp7InVyaSI6Imh0dHA6Ly8xMjcuMC4wLjE6ODA4MC9kaWRjb21tIiwiYSI6WyJkaWRjb21tL3YyIl19fQ"
    ".SeyJ0IjoiZG0iLCJzIjp7InVyaSI6IndzOi8vMTI3LjAuMC4xOjgwODAvZGlkY29tbSIsImEiOlsiZGlkY29tbS92MiJdfX0"
)
KNOWN_ALIAS = derive_did_peer_3(KNOWN_DID)


def build_peer_did(*keys: PrivateKey) -> str:
    """A did:peer:2 with these key agreement keys."""
    return make_did_peer_2([("E", key.public) for key in keys], [])


def test_known_answer() -> None:
    """The primary DID has one X25519 key, one Ed25519 key, then the HTTP and the WebSocket service."""
    assert MediatorIdentity(KEYS, URL).did == KNOWN_DID


def test_services_follow_public_url() -> None:
    """The endpoints are those of the public URL; https implies wss, a path is kept."""
    document = resolve_local(MediatorIdentity(KEYS, "https://m.example/x").did)
    uris = [endpoint.uri for endpoint in document.endpoints]
    assert uris == ["https://m.example/x/didcomm", "wss://m.example/x/didcomm"]


@pytest.mark.parametrize(
    ("url", "did"),
    [
        ("https://m.example", "did:web:m.example"),
        ("http://127.0.0.1:8080", "did:web:127.0.0.1%3A8080"),
        ("https://m.example:8443/a/b", "did:web:m.example%3A8443:a:b"),
        ("https://m.example/a%20b", "did:web:m.example:a%20b"),
    ],
)
def test_did_web(url: str, did: str) -> None:
    """The did:web has host, port and path of the public URL (reference 8.5)."""
    assert MediatorIdentity(KEYS, url).web_did == did


def test_did_web_document() -> None:
    """Its document has exactly what DCTRL-0004 3.2 prescribes first, and more after that."""
    identity = MediatorIdentity(KeySet(tuple(reversed(KEYS.keys))), "https://m.example:8443/x")
    did = "did:web:m.example%3A8443:x"
    prescribed = {
        "@context": ["https://www.w3.org/ns/did/v1", "https://w3id.org/security/suites/jws-2020/v1"],
        "id": did,
        "controller": did,
        "verificationMethod": [
            {
                "id": f"{did}#signing",
                "type": "Ed25519VerificationKey2020",
                "controller": did,
                "publicKeyMultibase": SIGNING.public.multibase(),
            }
        ],
        "keyAgreement": [
            {
                "id": f"{did}#prekey",
                "type": "X25519KeyAgreementKey2020",
                "controller": did,
                "publicKeyMultibase": AGREEMENT.public.multibase(),
            }
        ],
        "authentication": [f"{did}#signing"],
        "service": [
            {
                "id": "#mediator-service",
                "type": "DecentrlMediator",
                "serviceEndpoint": {"uri": "https://m.example:8443/x"},
            }
        ],
    }
    document = encoding.loads_object(encoding.dumps(identity.web_document))
    first = {**document, "keyAgreement": document["keyAgreement"][:1], "service": document["service"][:1]}
    assert list(first.items()) == [*prescribed.items(), ("alsoKnownAs", [identity.did])]


def test_raw_keys() -> None:
    """If configured, the keys of Decentrl have no multicodec prefix; they are the same keys."""
    plain = MediatorIdentity(KEYS, "https://mediator.example").web_document
    raw = MediatorIdentity(KEYS, "https://mediator.example", raw_keys=True).web_document
    for part in ("verificationMethod", "keyAgreement"):
        prefixed, bare = (encoding.decode_base58(item[part][0]["publicKeyMultibase"][1:]) for item in (plain, raw))
        assert (len(prefixed), prefixed[2:]) == (34, bare)


def test_did_web_document_for_didcomm() -> None:
    """A DIDComm wallet finds all curves for key agreement, both services, and the did:peer:2."""
    identity = MediatorIdentity(generate_keys(), "https://m.example")
    document = encoding.loads_object(encoding.dumps(identity.web_document))
    assert document["alsoKnownAs"] == [identity.did]
    assert all("d" not in method.get("publicKeyJwk", {}) for method in document["keyAgreement"])
    read = parse_did_document("did:web:m.example", document)
    assert [(method.id.partition("#")[2], method.key.curve) for method in read.key_agreement] == [
        ("prekey", "X25519"),
        ("p256", "P-256"),
        ("p384", "P-384"),
        ("p521", "P-521"),
    ]
    assert [(method.id, method.key.curve) for method in read.authentication] == [
        ("did:web:m.example#signing", "Ed25519")
    ]
    assert [service["id"] for service in document["service"]][-2:] == [
        "did:web:m.example#didcomm",
        "did:web:m.example#didcomm-ws",
    ]
    assert len(read.endpoints) == 2
    assert [endpoint.uri for endpoint in read.http_endpoints()] == ["https://m.example/didcomm"]


def test_key_ids_are_fixed() -> None:
    """The current keys are #signing and #prekey whatever the key file calls them, which decrypt too."""
    named = KeySet((("k1", AGREEMENT), ("k2", SIGNING), ("k3", P256)))
    identity = MediatorIdentity(named, "https://m.example", ["did:web:old.example"])
    read = parse_did_document(identity.web_did, identity.web_document)
    assert [method.id for method in read.key_agreement] == ["did:web:m.example#prekey", "did:web:m.example#k3"]
    assert [method.id for method in read.authentication] == ["did:web:m.example#signing"]
    for did in ("did:web:m.example", "did:web:old.example"):
        assert identity.find_agreement_key(f"{did}#prekey") == identity.find_agreement_key(f"{did}#k1") == AGREEMENT
        assert identity.find_agreement_key(f"{did}#k3") == P256
        assert identity.find_agreement_key(f"{did}#signing") is identity.find_agreement_key(f"{did}#k2") is None


@pytest.mark.parametrize("kid", ["prekey", "signing"])
def test_conflicting_key_id(kid: str) -> None:
    """A key on another curve with a Decentrl id in the key file is named by its value."""
    identity = MediatorIdentity(KeySet((("k1", AGREEMENT), ("k2", SIGNING), (kid, P256))), "https://m.example")
    names = [method["id"] for method in identity.web_document["keyAgreement"]]
    assert names == ["did:web:m.example#prekey", f"did:web:m.example#{P256.public.multibase()}"]
    assert [identity.find_agreement_key(name) for name in names] == [AGREEMENT, P256]


def test_earlier_prekey() -> None:
    """A later X25519 key of the file is not published, but decrypts by its id."""
    old = PrivateKey.from_secret("X25519", b"7" * 32)
    identity = MediatorIdentity(
        KeySet((("prekey-2", AGREEMENT), *KEYS.keys[1:], ("prekey-1", old))), "https://m.example"
    )
    read = parse_did_document(identity.web_did, identity.web_document)
    assert old.public not in [method.key for method in read.key_agreement]
    assert identity.find_agreement_key("did:web:m.example#prekey-1") == old
    assert identity.prekeys_private == (AGREEMENT.secret, old.secret)


def test_decentrl_keys() -> None:
    """Decentrl uses the first Ed25519 and X25519 key of the file."""
    later = [PrivateKey.from_secret(curve, b"8" * 32) for curve in ("Ed25519", "X25519")]
    named = tuple((f"k{number}", key) for number, key in enumerate(later))
    identity = MediatorIdentity(KeySet((*KEYS.keys, *named)), URL)
    assert (identity.signing_seed, identity.signing_key) == (SIGNING.secret, SIGNING.public.raw)
    assert identity.prekey_public == AGREEMENT.public.raw
    assert identity.prekeys_private == (AGREEMENT.secret, later[1].secret)


def test_decentrl_dids() -> None:
    """Decentrl accepts the did:web and former ones, as they were written, and no other DID."""
    former = [build_peer_did(AGREEMENT), "did:web:old.example%3a8080", make_did_key(SIGNING.public)]
    assert MediatorIdentity(KEYS, URL, former).decentrl_dids == {
        "did:web:127.0.0.1%3A8080",
        "did:web:old.example%3a8080",
    }


def test_published_keys_decrypt() -> None:
    """Every published key agreement key has its private key."""
    identity = MediatorIdentity(generate_keys(), "https://m.example")
    web = parse_did_document(identity.web_did, identity.web_document)
    for document in (resolve_local(identity.did), web):
        for method in document.key_agreement:
            key = identity.find_agreement_key(method.id)
            assert key is not None and key.public == method.key


@pytest.mark.parametrize("did", [KNOWN_DID, KNOWN_ALIAS])
@pytest.mark.parametrize(
    "fragment",
    [
        "key-1",
        "6LSc1YK7",
        "6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR",
        "z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR",
    ],
)
def test_key_id_spellings(did: str, fragment: str) -> None:
    """A key is found by every spelling of its id that clients use (reference 8.6)."""
    assert MediatorIdentity(KEYS, URL).find_agreement_key(f"{did}#{fragment}") == AGREEMENT


@pytest.mark.parametrize(
    "kid",
    [
        "#key-1",
        KNOWN_DID,
        f"{KNOWN_DID}#",
        f"{KNOWN_DID}#key-2",
        f"{KNOWN_DID}#key-3",
        f"{KNOWN_DID}#6LSc1YK",
        "did:web:elsewhere.example#prekey",
        build_peer_did(PrivateKey.from_secret("X25519", b"9" * 32)) + "#key-1",
        "",
    ],
)
def test_unknown_key_id(kid: str) -> None:
    """Anything else, a relative id and the signing key included, finds no key agreement key."""
    assert MediatorIdentity(KEYS, URL).find_agreement_key(kid) is None


def test_ambiguous_prefix() -> None:
    """If two keys share a prefix, eight characters find neither (reference 8.6)."""
    # Found by search: both multibase values begin with DnaebBUb.
    one, two = (PrivateKey.from_secret("P-256", number.to_bytes(32, "big")) for number in (3521, 5385))
    for keys, found in (((one, two), None), ((one,), one)):
        named = tuple((f"k{number}", key) for number, key in enumerate(keys))
        identity = MediatorIdentity(KeySet((*KEYS.keys, *named)), "https://m.example")
        assert identity.find_agreement_key("did:web:m.example#DnaebBUb") == found
        assert identity.find_agreement_key(f"did:web:m.example#{one.public.multibase()}") == one


def test_owns() -> None:
    """Own DIDs in all their forms, and no others."""
    identity = MediatorIdentity(KEYS, URL)
    assert all(identity.owns(did) for did in (KNOWN_DID, KNOWN_ALIAS, "did:web:127.0.0.1%3A8080"))
    assert all(identity.owns(did) for did in (f"{KNOWN_DID}#key-1", f"{KNOWN_ALIAS}/a", "did:web:127.0.0.1%3a8080?b"))
    assert not any(identity.owns(did) for did in ("did:web:127.0.0.1", KNOWN_DID[:-1], ""))


def test_former_peer_did() -> None:
    """A DID from before a change of URL or key stays own, with its key (reference section 9)."""
    old = PrivateKey.from_secret("X25519", b"7" * 32)
    former = build_peer_did(old)
    identity = MediatorIdentity(KeySet((*KEYS.keys, ("prekey-0", old))), URL, [former])
    assert identity.did == KNOWN_DID
    assert identity.owns(former)
    assert identity.find_agreement_key(f"{former}#key-1") == old


def test_former_peer_4() -> None:
    """A former did:peer:4 is own in its long and its short form (reference 8.4)."""
    document = {
        "verificationMethod": [{"id": "#k", "type": "Multikey", "publicKeyMultibase": AGREEMENT.public.multibase()}],
        "keyAgreement": ["#k"],
    }
    forms = make_did_peer_4(document)
    identity = MediatorIdentity(KEYS, URL, [max(forms, key=len)])
    assert all(identity.owns(did) and identity.find_agreement_key(f"{did}#k") == AGREEMENT for did in forms)
    with pytest.raises(IdentityError, match="long form"):
        MediatorIdentity(KEYS, URL, [min(forms, key=len)])


def test_former_did_key() -> None:
    """A former did:key of the Ed25519 key decrypts with the X25519 key derived from it (reference 8.2)."""
    former = make_did_key(SIGNING.public)
    (method,) = resolve_local(former).key_agreement
    assert MediatorIdentity(KEYS, URL, [former]).find_agreement_key(method.id) == convert_ed25519_to_x25519_private(
        SIGNING
    )


def test_former_did_web() -> None:
    """A former did:web, of another host name, has the key ids of the key set."""
    identity = MediatorIdentity(KEYS, URL, ["did:web:old.example"])
    assert identity.find_agreement_key("did:web:old.example#prekey") == AGREEMENT
    assert identity.owns("did:web:old.example")


@pytest.mark.parametrize(
    "did", [build_peer_did(PrivateKey.from_secret("X25519", b"9" * 32)), "did:peer:2.Ez6", "did:example:1"]
)
def test_former_did_without_own_key(did: str) -> None:
    """A former DID without an own key is a configuration error of one line."""
    with pytest.raises(IdentityError, match=r"^former DID [^\n]+$"):
        MediatorIdentity(KEYS, URL, [did])


def test_signing_keys() -> None:
    """Every own DID signs with the key of its own document; only a did:peer has several spellings of ids."""
    old, older = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
    keys = KeySet((*KEYS.keys, ("prekey-0", old), ("signing-0", older)))
    key_did, bare = make_did_key(SIGNING.public), build_peer_did(old)
    identity = MediatorIdentity(keys, URL, [key_did, bare])
    (former,) = identity.former_peer_dids
    (derived,) = resolve_local(key_did).key_agreement
    agreement, signing = AGREEMENT.public.multibase(), SIGNING.public.multibase()
    for kid, expected in (
        (f"{identity.did}#key-1", (f"{identity.did}#key-2", SIGNING)),
        (f"{identity.did}#{agreement}", (f"{identity.did}#{signing}", SIGNING)),
        (f"{identity.did}#{agreement[1:]}", (f"{identity.did}#{signing[1:]}", SIGNING)),
        (f"{identity.did}#{agreement[1:9]}", (f"{identity.did}#{signing[1:9]}", SIGNING)),
        (f"{KNOWN_ALIAS}#key-1", (f"{KNOWN_ALIAS}#key-2", SIGNING)),
        (f"{former}#key-1", (f"{former}#key-2", older)),
        (derived.id, (f"{key_did}#{signing}", SIGNING)),
        (f"{identity.web_did}#prekey", (f"{identity.web_did}#signing", SIGNING)),
        (f"{identity.web_did}#p256", (f"{identity.web_did}#signing", SIGNING)),
        (f"{identity.web_did}#{agreement}", (f"{identity.web_did}#signing", SIGNING)),
        (f"{bare}#key-1", None),
        (f"{identity.did}#key-9", None),
        ("did:example:x#key-1", None),
        ("nonsense", None),
    ):
        assert identity.find_signing_key(kid) == expected, kid
        if expected is not None and not kid.startswith(("did:web:", KNOWN_ALIAS)):
            method = resolve_local(kid.partition("#")[0]).authentication_key(expected[0])
            assert method is not None and method.key == expected[1].public


def test_key_file(tmp_path: Path) -> None:
    """The key file is created once, for its owner only, and reads as it was created."""
    path = tmp_path / "keys.jwks"
    keys = create_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_keys(path) == keys
    assert [key.curve for _, key in keys] == ["X25519", "Ed25519", "P-256", "P-384", "P-521"]
    content = path.read_bytes()
    with pytest.raises(SecretFileError, match="already exists"):
        create_keys(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["keys.jwks"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_readable_key_file(tmp_path: Path, mode: int) -> None:
    """A key file that others can read is refused with the command that fixes it."""
    path = tmp_path / "keys.jwks"
    create_keys(path)
    path.chmod(mode)
    with pytest.raises(SecretFileError, match=f"^{path} is accessible to other users.*run: chmod 600 {path}$"):
        load_keys(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"keys": [{}]}',
        b'{"keys": 3}',
        b'{"keys": []}',
        encoding.dumps({"keys": [{"kid": "a", **AGREEMENT.jwk()}]}),
        encoding.dumps({"keys": [{"kid": "a", **AGREEMENT.jwk()}, {"kid": "a", **SIGNING.jwk()}]}),
        encoding.dumps({"keys": [{"kid": "a", **AGREEMENT.jwk()}, {"kid": "b", **SIGNING.public.jwk()}]}),
        encoding.dumps({"keys": [{"kid": "a#b", **AGREEMENT.jwk()}, {"kid": "b", **SIGNING.jwk()}]}),
    ],
)
def test_invalid_key_file(tmp_path: Path, content: bytes) -> None:
    """A file without the necessary keys is refused in one line that shows nothing of it."""
    path = tmp_path / "keys.jwks"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(SecretFileError, match=r"^[^\n]+: expected [^\n]+$") as caught:
        load_keys(path)
    assert AGREEMENT.jwk()["d"] not in str(caught.value)


def test_missing_key_file(tmp_path: Path) -> None:
    """The error is one line."""
    with pytest.raises(
        SecretFileError, match=r"cannot read .*keys.jwks: No such file or directory; restore it from "
    ):
        load_keys(tmp_path / "keys.jwks")


def test_repr_hides_secrets() -> None:
    """No representation has a private key."""
    shown = repr(KEYS) + repr(MediatorIdentity(KEYS, URL)) + repr(MediatorIdentity(KEYS, URL).__dict__)
    for key in (AGREEMENT, SIGNING, P256):
        assert key.jwk()["d"] not in shown
        assert repr(key.secret) not in shown


@pytest.mark.parametrize(("raw", "prefix"), [(False, ""), (True, "raw_")])
def test_mediator_document(raw: bool, prefix: str) -> None:
    """A mediator's document has its keys and a service with a URL (DCTRL-0004 3.2)."""
    keys = signing_key("mediator"), agreement_key("mediator", "prekey")
    assert make_mediator_document(MEDIATOR, *keys, "https://mediator.example", raw=raw) == {
        "@context": ["https://www.w3.org/ns/did/v1", "https://w3id.org/security/suites/jws-2020/v1"],
        "id": MEDIATOR,
        "controller": MEDIATOR,
        "verificationMethod": [
            {
                "id": f"{MEDIATOR}#signing",
                "type": "Ed25519VerificationKey2020",
                "controller": MEDIATOR,
                "publicKeyMultibase": VECTORS["mediator"][f"{prefix}signing"],
            }
        ],
        "keyAgreement": [
            {
                "id": f"{MEDIATOR}#prekey",
                "type": "X25519KeyAgreementKey2020",
                "controller": MEDIATOR,
                "publicKeyMultibase": VECTORS["mediator"][f"{prefix}prekey"],
            }
        ],
        "authentication": [f"{MEDIATOR}#signing"],
        "service": [
            {
                "id": "#mediator-service",
                "type": "DecentrlMediator",
                "serviceEndpoint": {"uri": "https://mediator.example"},
            }
        ],
    }
