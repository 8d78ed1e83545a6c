"""Envelopes of DIDComm v1: emitted forms, accepted forms and refused forms (RFC 0019)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import DecryptionError, InvalidEnvelope
from mediatord.protocol.didcomm.jwe import MAX_PROTECTED, encrypt_anoncrypt, encrypt_authcrypt
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm_v1.envelope import (
    Envelope,
    Opened,
    is_v1_envelope,
    open_envelope,
    pack_anoncrypt,
    pack_authcrypt,
    parse_envelope,
    parse_envelope_object,
)
from mediatord.protocol.didcomm_v1.keys import InvalidKey, SigningKey, encode_base58_key, encode_did_key
from tests.protocol.didcomm_v1.foreign_envelope import Change, EnvelopeWriter, KeyPair, b64, base58, unb64

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "didcomm-v1.json").read_bytes())
COMPUTED = VECTORS["computed"]
ALICE, BOB, CAROL = (KeyPair(bytes([number]) * 32) for number in (1, 2, 7))
ALICE_KEY, BOB_KEY, CAROL_KEY = (SigningKey.from_seed(pair.seed) for pair in (ALICE, BOB, CAROL))
TEXT = b'{"@type":"https://didcomm.org/trust_ping/1.0/ping","@id":"12345678"}'
# Low order, and not on the curve.
NO_POINTS = [encode_did_key(bytes(32)), encode_did_key(b"\2" + bytes(31))]


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def open_as(key: SigningKey, envelope: Envelope) -> Opened:
    (recipient,) = (entry for entry in envelope.recipients if entry.key == key.did_key)
    return open_envelope(envelope, recipient, key)


def open_as_bob(value: dict[str, Any]) -> Opened:
    return open_as(BOB_KEY, parse_envelope(compact(value)))


def authcrypt(**options: Any) -> dict[str, Any]:
    return EnvelopeWriter(ALICE, **options).write(TEXT, BOB)


def anoncrypt(**options: Any) -> dict[str, Any]:
    return EnvelopeWriter(**options).write(TEXT, BOB)


def protected_of(value: dict[str, Any]) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(unb64(value["protected"]))
    return header


# Vectors


@pytest.mark.parametrize("case", VECTORS["credo"], ids=lambda case: case["name"])
def test_envelopes_of_credo(case: dict[str, Any]) -> None:
    """Every recipient opens what Credo wrote, and knows its sender."""
    raw = compact(case["envelope"])
    assert is_v1_envelope(raw)
    envelope = parse_envelope(raw)
    assert len(envelope.recipients) == len(case["seeds"])
    for seed in case["seeds"]:
        opened = open_as(SigningKey.from_seed(bytes.fromhex(seed)), envelope)
        assert json.loads(opened.plaintext) == case["plaintext"]
        assert (opened.sender and encode_base58_key(opened.sender)) == case["sender"]


def test_computed_vectors() -> None:
    """An independent writer reproduces the computed vectors, and they open."""
    values = {name: bytes.fromhex(COMPUTED[name]) for name in ("sender_seed", "recipient_seed", "cek", "cek_nonce")}
    sender, recipient = KeyPair(values["sender_seed"]), KeyPair(values["recipient_seed"])
    assert (sender.name, recipient.name) == (COMPUTED["sender"], COMPUTED["recipient"])
    assert SigningKey.from_seed(recipient.seed).did_key == COMPUTED["recipient_did_key"]
    for who, tag in ((sender, "tag"), (None, "anoncrypt_tag")):
        keys: Any = {name: values[name] for name in ("cek", "cek_nonce")}
        writer = EnvelopeWriter(who, iv=bytes.fromhex(COMPUTED["content_nonce"]), ephemeral=b"\6" * 32, **keys)
        value = writer.write(COMPUTED["plaintext"].encode(), recipient)
        assert value["ciphertext"] == COMPUTED["ciphertext"]
        assert value["tag"] == COMPUTED[tag]
        assert open_as_bob(value) == (COMPUTED["plaintext"].encode(), who and ALICE_KEY.did_key)
    entry = protected_of(EnvelopeWriter(sender, ephemeral=b"\6" * 32).write(b"", recipient))["recipients"][0]
    assert entry["encrypted_key"] == COMPUTED["encrypted_key"]
    assert entry["header"]["sender"] == COMPUTED["sealed_sender"]


def test_packing_with_the_random_bytes_of_the_vector() -> None:
    """All but the sealed sender, and the tag that covers it, are the vector's."""
    source = {32: b"\3" * 32, 24: b"\4" * 24, 12: b"\5" * 12}
    plaintext = COMPUTED["plaintext"].encode()
    value = json.loads(pack_authcrypt(plaintext, BOB_KEY.did_key, ALICE_KEY, random=source.__getitem__))
    assert value["ciphertext"] == COMPUTED["ciphertext"]
    assert protected_of(value)["recipients"][0]["encrypted_key"] == COMPUTED["encrypted_key"]
    value = json.loads(pack_anoncrypt(plaintext, BOB_KEY.did_key, random=source.__getitem__))
    assert value["ciphertext"] == COMPUTED["ciphertext"]


# Emitted forms


def test_emitted_form() -> None:
    """Members and their order, compact JSON, and unpadded base64url are what the strictest library wants."""
    raw = pack_authcrypt(TEXT, BOB_KEY.did_key, ALICE_KEY)
    value = json.loads(raw)
    assert raw == compact(value)
    assert list(value) == ["protected", "iv", "ciphertext", "tag"]
    assert not set("=+/") & set("".join(value.values()))
    header = protected_of(value)
    assert unb64(value["protected"]) == compact(header)
    assert list(header.items())[:3] == [("enc", "xchacha20poly1305_ietf"), ("typ", "JWM/1.0"), ("alg", "Authcrypt")]
    (entry,) = header["recipients"]
    assert list(entry) == ["encrypted_key", "header"]
    assert list(entry["header"]) == ["kid", "sender", "iv"]
    assert entry["header"]["kid"] == BOB.name
    assert [len(unb64(value[name])) for name in ("iv", "tag", "ciphertext")] == [12, 16, len(TEXT)]
    header = protected_of(json.loads(pack_anoncrypt(TEXT, BOB_KEY.did_key)))
    assert header["alg"] == "Anoncrypt"
    assert list(header["recipients"][0]["header"].items()) == [("kid", BOB.name)]


@given(st.binary(max_size=6000), st.booleans(), st.integers(0, 2**256 - 1))
def test_round_trip(plaintext: bytes, anonymous: bool, seed: int) -> None:
    """Whatever is packed, by whomever, is recognised and opened, and its sender is known."""
    sender = SigningKey.from_seed(seed.to_bytes(32, "big"))
    to = BOB_KEY.did_key
    raw = pack_anoncrypt(plaintext, to) if anonymous else pack_authcrypt(plaintext, to, sender)
    assert is_v1_envelope(raw)
    envelope = parse_envelope(raw)
    assert envelope.is_authcrypt is not anonymous
    assert open_as(BOB_KEY, envelope) == (plaintext, None if anonymous else sender.did_key)


def test_large_message() -> None:
    """A large ciphertext is not parsed as JSON; the result is the same, wherever the member is."""
    plaintext = bytes(range(256)) * 4096
    value = json.loads(pack_authcrypt(plaintext, BOB_KEY.did_key, ALICE_KEY))
    for order in (list(value), ["ciphertext", "tag", "protected", "iv"]):
        assert open_as_bob({name: value[name] for name in order}).plaintext == plaintext
    first = value["ciphertext"][0]
    escaped = compact(value).replace(f'"ciphertext":"{first}'.encode(), b'"ciphertext":"\\u%04x' % ord(first))
    assert open_as(BOB_KEY, parse_envelope(escaped)).plaintext == plaintext
    for padding in ("=", "==="):
        cut = {**value, "ciphertext": value["ciphertext"] + padding}
        with pytest.raises(InvalidEnvelope):
            parse_envelope(compact(cut))
    standard = {**value, "ciphertext": base64.b64encode(unb64(value["ciphertext"])).decode()}
    assert open_as_bob(standard).plaintext == plaintext


def test_packing_never_repeats_itself() -> None:
    """Two envelopes of the same text share no key, nonce or box."""
    first, second = (json.loads(pack_authcrypt(TEXT, BOB_KEY.did_key, ALICE_KEY)) for _ in range(2))
    assert all(first[name] != second[name] for name in first)
    entries = [protected_of(value)["recipients"][0] for value in (first, second)]
    assert entries[0]["encrypted_key"] != entries[1]["encrypted_key"]
    assert all(entries[0]["header"][name] != entries[1]["header"][name] for name in ("sender", "iv"))


@pytest.mark.parametrize("key", [*NO_POINTS, "did:key:z6Mk", BOB.name, f"{BOB_KEY.did_key}#a"])
def test_packing_to_no_key(key: str) -> None:
    """Neither a key of low order nor another name of a key is encrypted to."""
    with pytest.raises(InvalidKey):
        pack_anoncrypt(TEXT, key)
    with pytest.raises(InvalidKey):
        pack_authcrypt(TEXT, key, ALICE_KEY)


# Accepted forms


def padded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def standard(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")


def standard_padded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("encode", [padded, standard, standard_padded])
@pytest.mark.parametrize("write", [authcrypt, anoncrypt])
def test_accepted_encodings(encode: Callable[[bytes], str], write: Callable[..., dict[str, Any]]) -> None:
    """Either alphabet of base64, padded or not, in every place."""
    for number in range(8):  # other bytes, other characters
        opened = open_as_bob(write(encode=encode, cek=bytes([251 + number % 4]) * 32, iv=bytes([number * 31]) * 12))
        assert opened.plaintext == TEXT


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(enc="chacha20poly1305_ietf"),
        lambda header: header.update(enc="xchachapoly1305_ietf"),
        lambda header: header.update(more=[{"a": None}]),
        lambda header: header["recipients"][0].update(more=1),
        lambda header: header["recipients"][0]["header"].update(more=1),
    ],
)
def test_accepted_headers(change: Change) -> None:
    """Names of the one cipher, and members that nobody knows."""
    assert open_as_bob(authcrypt(change=change)) == (TEXT, ALICE_KEY.did_key)
    assert open_as_bob(anoncrypt(change=change)) == (TEXT, None)


def test_accepted_spelling_of_the_header() -> None:
    """White space in the header, as Python writes it, and a null sender and iv of an anoncrypt."""
    assert open_as_bob(authcrypt(dump=json.dumps)).sender == ALICE_KEY.did_key

    def add_null(header: dict[str, Any]) -> None:
        header["recipients"][0]["header"].update(sender=None, iv=None)

    assert open_as_bob(anoncrypt(change=add_null)).sender is None
    assert open_as(BOB_KEY, parse_envelope(json.dumps({**authcrypt(), "more": {}}, indent=1).encode()))


def test_several_recipients() -> None:
    """Each opens its own entry; nobody opens another's."""
    envelope = parse_envelope(compact(EnvelopeWriter(ALICE).write(TEXT, BOB, CAROL)))
    for key in (BOB_KEY, CAROL_KEY):
        assert open_as(key, envelope) == (TEXT, ALICE_KEY.did_key)
    with pytest.raises(DecryptionError):
        open_envelope(envelope, envelope.recipients[0], CAROL_KEY)
    with pytest.raises(DecryptionError):
        open_envelope(envelope, replace(envelope.recipients[0], key=CAROL_KEY.did_key), CAROL_KEY)


def test_hundred_recipients() -> None:
    """A hundred are read, one more is refused."""
    pairs = [KeyPair(number.to_bytes(32, "big")) for number in range(101)]
    envelope = parse_envelope(compact(EnvelopeWriter(ALICE).write(TEXT, *pairs[:100])))
    last = SigningKey.from_seed(pairs[99].seed)
    assert open_as(last, envelope).sender == ALICE_KEY.did_key
    with pytest.raises(InvalidEnvelope):
        parse_envelope(compact(EnvelopeWriter(ALICE).write(TEXT, *pairs)))


# The base58 of this verkey has 42 characters, as of one in half a million.
SHORT = KeyPair((123_120).to_bytes(32, "big"))


def test_sender_with_a_short_name() -> None:
    """The sealed sender may be shorter than usual."""
    assert len(SHORT.name) == 42
    assert open_as_bob(EnvelopeWriter(SHORT).write(TEXT, BOB)).sender == SigningKey.from_seed(SHORT.seed).did_key
    raw = pack_authcrypt(TEXT, SigningKey.from_seed(SHORT.seed).did_key, ALICE_KEY)
    assert parse_envelope(raw).recipients[0].key == SigningKey.from_seed(SHORT.seed).did_key


def test_digest() -> None:
    """Other encodings of a message have the same digest, other messages another one."""
    value = authcrypt()
    digest = parse_envelope(compact(value)).digest
    assert len(digest) == 32
    respelled = {"more": 1, **value, "tag": padded(unb64(value["tag"])), "iv": padded(unb64(value["iv"]))}
    assert parse_envelope(json.dumps(respelled).encode()).digest == digest
    assert parse_envelope(compact(authcrypt())).digest != digest
    other = EnvelopeWriter(ALICE, ephemeral=b"\6" * 32).write(TEXT, BOB)
    assert parse_envelope(compact({**other, "tag": value["tag"]})).digest != digest


def test_secrets_are_not_shown() -> None:
    """An envelope shows its recipients, and nothing of its content."""
    envelope = parse_envelope(compact(authcrypt()))
    assert BOB_KEY.did_key in repr(envelope)
    for member in (envelope.protected, envelope.ciphertext, envelope.tag, envelope.recipients[0].encrypted_key):
        assert repr(member) not in repr(envelope)


# Refused forms

MALFORMED: tuple[Any, ...] = (None, 1, [], {}, "é", "A", "==")
OUTER: list[dict[str, Any]] = [
    *({name: value} for name in ("protected", "iv", "ciphertext", "tag") for value in MALFORMED),
    *({"iv": b64(bytes(size))} for size in (0, 11, 13, 24)),
    *({"tag": b64(bytes(size))} for size in (0, 15, 17, 32)),
    *({name: {}} for name in ("aad", "encrypted_key", "header", "recipients", "unprotected")),
    *({"protected": b64(text)} for text in (b"", b"1", b"[]", b"{}", b"{", b'{"a":1,"a":1}', b"[" * 9000)),
    {"protected": ""},
    {"iv": "BQUFBQUFBQUFBQUF\n"},
    {"iv": "BQUFBQUF BQUFBQUF"},
    {"protected": "A" * (MAX_PROTECTED + 4)},
]


@pytest.mark.parametrize("change", OUTER, ids=repr)
def test_refused_members(change: dict[str, Any]) -> None:
    """Each member has its type, alphabet and size; members of other serialisations are not allowed."""
    for value in (authcrypt(), anoncrypt()):
        with pytest.raises(InvalidEnvelope):
            parse_envelope(compact({**value, **change}))


@pytest.mark.parametrize("name", ["protected", "iv", "ciphertext", "tag"])
def test_missing_member(name: str) -> None:
    """All four are needed."""
    value = authcrypt()
    del value[name]
    with pytest.raises(InvalidEnvelope):
        parse_envelope(compact(value))


def header_change(**members: Any) -> Change:
    return lambda header: header.update(members)


def entry_change(**members: Any) -> Change:
    return lambda header: header["recipients"][0].update(members)


def inner_change(**members: Any) -> Change:
    return lambda header: header["recipients"][0]["header"].update(members)


HEADERS: list[Change] = [
    *map(lambda value: header_change(enc=value), (None, 1, [], "A256GCM", "XC20P")),
    *map(lambda value: header_change(typ=value), (None, 1, {}, "JWM/2.0", "jwm/1.0")),
    *map(lambda value: header_change(alg=value), (None, 1, [], "authcrypt", "ECDH-ES+A256KW")),
    *map(lambda value: header_change(recipients=value), (None, {}, [], [1], [None], [[]], [{}])),
    lambda header: header.pop("enc"),
    lambda header: header.pop("typ"),
    lambda header: header.pop("alg"),
    lambda header: header.pop("recipients"),
    lambda header: header["recipients"].append(header["recipients"][0]),
    lambda header: header["recipients"].extend(header["recipients"] * 100),
    *map(lambda value: entry_change(header=value), (None, 1, [], {})),
    *map(lambda value: entry_change(encrypted_key=value), (None, 1, "", "A")),
    *map(lambda size: entry_change(encrypted_key=b64(bytes(size))), (32, 47, 49, 79, 81)),
    *map(lambda value: inner_change(kid=value), (None, 1, [], "", "z" * 44, "1" * 31, BOB.name + "1", "0" * 43)),
    *map(lambda value: inner_change(kid=value), (BOB_KEY.did_key, f"{BOB.name}#a", f" {BOB.name}", BOB.name[:-2])),
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_refused_headers(number: int) -> None:
    """Each member of the protected header has its type, size and value."""
    for value in (authcrypt(change=HEADERS[number]), anoncrypt(change=HEADERS[number])):
        with pytest.raises(InvalidEnvelope):
            parse_envelope(compact(value))


@pytest.mark.parametrize("value", [None, 1, "", "A", b64(bytes(79)), b64(bytes(93)), b64(bytes(24 + 48))])
def test_refused_sender(value: object) -> None:
    """An authcrypt needs a sender that can hold a key."""
    with pytest.raises(InvalidEnvelope):
        parse_envelope(compact(authcrypt(change=inner_change(sender=value))))


@pytest.mark.parametrize("value", [None, 1, "", b64(bytes(12)), b64(bytes(23)), b64(bytes(25))])
def test_refused_nonce(value: object) -> None:
    """An authcrypt needs a nonce of 24 bytes."""
    with pytest.raises(InvalidEnvelope):
        parse_envelope(compact(authcrypt(change=inner_change(iv=value))))


def test_mix_of_both_kinds() -> None:
    """What `alg` says and what the recipients have must be the same, for each of them."""
    anonymous = protected_of(anoncrypt())["recipients"]
    authenticated = protected_of(EnvelopeWriter(ALICE).write(TEXT, CAROL))["recipients"]
    sender, iv = (authenticated[0]["header"][name] for name in ("sender", "iv"))
    changes: list[Change] = [
        inner_change(sender=sender, iv=iv),
        inner_change(sender=sender),
        inner_change(iv=iv),
        inner_change(sender=""),
        lambda header: header.update(alg="Authcrypt"),
        lambda header: header["recipients"].extend(authenticated),
    ]
    values = [anoncrypt(change=change) for change in changes]
    values.append(authcrypt(change=lambda header: header.update(alg="Anoncrypt")))
    values.append(EnvelopeWriter(ALICE, change=lambda h: h["recipients"].extend(anonymous)).write(TEXT, CAROL))
    for value in values:
        with pytest.raises(InvalidEnvelope):
            parse_envelope(compact(value))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'"a"', b"null", b"\xff", b"[" * 5000, b'{"a":' * 5000])
def test_refused_texts(raw: bytes) -> None:
    """Anything but a JSON object."""
    assert not is_v1_envelope(raw)
    with pytest.raises(InvalidEnvelope):
        parse_envelope(raw)


@pytest.mark.parametrize("value", [None, 1, "a", [], b"{}", {}])
def test_refused_values(value: object) -> None:
    """A parsed value that is not an envelope."""
    with pytest.raises(InvalidEnvelope):
        parse_envelope_object(value)


# Decryption


def flip(text: str, position: int) -> str:
    data = bytearray(unb64(text))
    data[position] ^= 1
    return b64(bytes(data))


@pytest.mark.parametrize("name", ["iv", "ciphertext", "tag"])
@pytest.mark.parametrize("position", [0, -1])
def test_changed_content(name: str, position: int) -> None:
    """A changed bit of content, nonce or tag."""
    for value in (authcrypt(), anoncrypt()):
        with pytest.raises(DecryptionError):
            open_as_bob({**value, name: flip(value[name], position)})


@pytest.mark.parametrize("name", ["encrypted_key", "sender", "iv"])
@pytest.mark.parametrize("position", [0, 31, 32, -1])
def test_changed_entry(name: str, position: int) -> None:
    """A changed bit of what is encrypted to the recipient."""

    def change(header: dict[str, Any]) -> None:
        entry = header["recipients"][0]
        members = entry if name == "encrypted_key" else entry["header"]
        if name in members:
            members[name] = flip(members[name], position % len(unb64(members[name])))

    with pytest.raises(DecryptionError):
        open_as_bob(authcrypt(change=change))
    if name == "encrypted_key":
        with pytest.raises(DecryptionError):
            open_as_bob(anoncrypt(change=change))


def test_respelled_header() -> None:
    """The header is authenticated as it is spelled: padding that was added afterwards breaks the tag."""
    value = authcrypt(change=lambda header: header.update(more="ab"))
    while not padded(unb64(value["protected"])).endswith("="):
        value = authcrypt(change=lambda header: header.update(more="a"))
    with pytest.raises(DecryptionError):
        open_as_bob({**value, "protected": padded(unb64(value["protected"]))})


SENDER_TEXTS = [
    *(b"\xff" * 43, b"0" * 43, b"z" * 44, b"1" * 33, ALICE.name.encode() + b" ", CAROL.name.encode()),
    *(base58(bytes(32)).encode(), base58(b"\2" + bytes(31)).encode(), b"did:key:z" + b"1" * 35),
]


@pytest.mark.parametrize("text", SENDER_TEXTS)
def test_impossible_senders(text: bytes) -> None:
    """A sealed sender that is no key, no point, or not the key that the box was made with."""
    if not 80 <= 48 + len(text) <= 92:
        with pytest.raises(InvalidEnvelope):
            open_as_bob(authcrypt(sender_text=text))
        return
    with pytest.raises(DecryptionError):
        open_as_bob(authcrypt(sender_text=text))


def test_other_recipient() -> None:
    """A key opens what is encrypted to it, and nothing else, even if the header names it."""
    envelope = parse_envelope(compact(authcrypt(change=inner_change(kid=CAROL.name))))
    with pytest.raises(DecryptionError):
        open_envelope(envelope, envelope.recipients[0], BOB_KEY)
    with pytest.raises(DecryptionError):
        open_envelope(envelope, envelope.recipients[0], CAROL_KEY)


# Recognition


def v2_envelopes() -> list[bytes]:
    key = PrivateKey.generate("X25519")
    to = [("did:example:bob#Authcrypt", key.public)]
    sender = ("did:example:alice#Anoncrypt", PrivateKey.generate("X25519"))
    nested = {"next": json.loads(pack_anoncrypt(TEXT, BOB_KEY.did_key))}
    return [
        encrypt_anoncrypt(TEXT, to),
        encrypt_authcrypt(TEXT, sender, to),
        encrypt_anoncrypt(compact(nested), to),
        encrypt_anoncrypt(TEXT * 1000, to),
    ]


def test_v2_is_not_v1() -> None:
    """No envelope of v2 is taken for one of v1, whatever its key ids say and wherever its members are."""
    for raw in v2_envelopes():
        assert not is_v1_envelope(raw)
        value = json.loads(raw)
        assert not is_v1_envelope(json.dumps(dict(reversed(value.items())), indent=1).encode())
        # A member of a recipient that looks like the header of v1; what comes first counts.
        value["recipients"][0]["header"]["protected"] = authcrypt()["protected"]
        assert not is_v1_envelope(compact(value))


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"protected": 1}, {"protected": None}, {"protected": ""}, {"protected": {}}, {"protected": "e30"}),
        *({"protected": b64(text)} for text in (b'"Authcrypt"', b'["Authcrypt"]', b'{"alg":["Authcrypt"]}')),
        *({"protected": b64(text)} for text in (b'{"kid":"Authcrypt"}', b'{"alg":"Authcrypt"', b'{"alg":"Anon"}')),
        {"protected": b64(compact({"alg": "Authcrypt", "more": "a" * MAX_PROTECTED}))},
        {"payload": "protected"},
        {"protected": "é"},
        {"protected": '"'},
        {"protected": "A"},
    ],
)
def test_not_recognised(value: dict[str, Any]) -> None:
    """Only `alg` in a well-formed protected header counts."""
    assert not is_v1_envelope(compact(value))
    assert not is_v1_envelope(json.dumps(value, ensure_ascii=False).encode())


def test_recognised_without_being_valid() -> None:
    """An envelope with an `alg` of v1 is judged by the rules of v1, so that its sender gets an error of v1."""
    assert is_v1_envelope(compact({"protected": b64(b'{"alg":"Authcrypt"}')}))
    assert is_v1_envelope(json.dumps(authcrypt(), indent=2).encode())
    assert is_v1_envelope(compact({**authcrypt(), "more": {"protected": "e30"}}))
    assert is_v1_envelope(compact({"more": {"protected": "e30"}, **authcrypt()})) is False


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from([b64(bytes(size)) for size in range(100)]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=20,
)


@given(st.binary() | json_values.map(compact))
def test_any_bytes(raw: bytes) -> None:
    """Recognition never raises; parsing raises only what it declares."""
    recognised = is_v1_envelope(raw)
    try:
        parse_envelope(raw)
    except InvalidEnvelope:
        return
    assert recognised


@given(
    st.sampled_from(["enc", "typ", "alg", "recipients", "encrypted_key", "header", "kid", "sender", "iv"]),
    json_values,
    st.booleans(),
)
def test_any_header(name: str, value: object, anonymous: bool) -> None:
    """Any value of any member of the header is refused, or opened as before, or not decryptable."""

    def change(header: dict[str, Any]) -> None:
        entry = header["recipients"][0]
        (header if name in header else entry if name in entry else entry["header"])[name] = value

    written = anoncrypt(change=change) if anonymous else authcrypt(change=change)
    try:
        opened = open_as_bob(written)
    except (InvalidEnvelope, DecryptionError):
        return
    assert opened == (TEXT, None if anonymous else ALICE_KEY.did_key)
