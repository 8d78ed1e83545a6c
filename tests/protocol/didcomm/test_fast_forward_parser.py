"""The short way gives what the long way gives, or nothing."""

from __future__ import annotations

import gc
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.errors import MediatorError
from mediatord.protocol.didcomm.forward import FORWARD, FastForward, FastForwardParser, read_next, read_payloads
from mediatord.protocol.didcomm.jwe import Enc, decrypt_envelope, encrypt_anoncrypt, encrypt_authcrypt, parse_envelope
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm.message import parse_message
from tests.protocol.didcomm import foreign_jwe
from tests.protocol.didcomm.foreign_jwe import Writing, b64, compact, unb64
from tests.protocol.didcomm.test_jwe import (
    ALICE,
    ALICES,
    BOB,
    BOBS,
    CAROL,
    CAROLS,
    DAMAGED,
    ENCS,
    JSON,
    NAMES,
    REFUSED,
    TOLERATED,
    VALUES,
    flattened,
)
from tests.protocol.didcomm.test_key_agreement import LOW_ORDER

NEXT = "did:example:carol"
INNER = {"protected": "e30", "recipients": [{"header": {"kid": CAROL}}], "ciphertext": "AAAA", "é": ["\n", 1.5, None]}
KEY = BOBS["X25519"]
KEYS = {BOB: (KEY, BOBS["P-256"])}


USUAL = FastForwardParser(KEYS)


def forward(**members: Any) -> dict[str, Any]:
    """A usual one; what is None is left out."""
    value = {
        "id": "f-1",
        "type": FORWARD,
        "to": [BOB.partition("#")[0]],
        "body": {"next": NEXT},
        "attachments": [{"id": "a", "data": {"json": INNER}}],
        **members,
    }
    return {name: member for name, member in value.items() if member is not None}


def sealed(message: dict[str, Any] | bytes, enc: Enc = "A256CBC-HS512") -> bytes:
    plaintext = message if isinstance(message, bytes) else compact(message)
    return encrypt_anoncrypt(plaintext, [(BOB, KEY.public)], enc=enc)


def long_way(raw: bytes) -> FastForward | None:
    """What all the modules together make of it, as far as it is a forward that nobody has signed or delayed."""
    try:
        envelope = parse_envelope(raw)
        kid = next(kid for kid in envelope.encrypted_keys if kid in KEYS)
        (key,) = [key for key in KEYS[kid] if key.curve == envelope.curve]
        plaintext = decrypt_envelope(envelope, kid, key, None)
        value = json.loads(plaintext)
        message = parse_message(plaintext)
        ((payload, form),) = read_payloads(message)
        next_ = read_next(message)
    except (MediatorError, StopIteration, ValueError):
        return None
    if "ciphertext" in value or "payload" in value or message.sender or message.delay_milli:
        return None
    if message.type.key != ("routing", 2, "forward"):
        return None
    return FastForward(next_, payload, form, message.id, message.thread, message.expires_time, kid)


def agree(raw: bytes) -> FastForward | None:
    """Both ways, which may differ only in that the short one leaves it to the long one."""
    short = USUAL.read(raw)
    if short is not None:
        assert short == long_way(raw)
        assert type(short.payload) is bytes
    return short


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("write", [sealed, lambda message, enc: compact(flattened(json.loads(sealed(message, enc))))])
def test_usual_forwards(enc: Enc, write: Callable[[dict[str, Any], Enc], bytes]) -> None:
    """Taken with each content encryption, in General and in flattened form."""
    found = agree(write(forward(), enc))
    assert found is not None
    assert (found.next, found.form, json.loads(found.payload)) == (NEXT, "json", INNER)
    assert (found.id, found.thread, found.expires_time) == ("f-1", "f-1", None)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 15, 16, 17, 40_000])
def test_any_length(size: int) -> None:
    """Whatever the ciphertext ends with, and in three layouts of the JSON."""
    raw = sealed(forward(note="x" * size))
    value = json.loads(raw)
    for written in (raw, json.dumps(value).encode(), json.dumps(value, indent=2).encode()):
        assert agree(written) is not None


ALSO_USUAL = {
    "base64": forward(attachments=[{"data": {"base64": b64(compact(INNER))}}]),
    "padded base64": forward(attachments=[{"data": {"base64": b64(compact(INNER)) + "="}}]),
    "a thread": forward(thid="t"),
    "a thread that is none": forward(thid=""),
    "an end": forward(expires_time=1_900_000_000),
    "an end in words": forward(expires_time="2033-01-01T00:00:00Z"),
    "an end that is none": forward(expires_time=[]),
    "nobody to": forward(to=None),
    "from null": {**forward(), "from": None},
    "no delay": forward(delay_milli=0),
    "headers that mean nothing here": forward(return_route="all", from_prior="x", lang="de", created_time="now"),
    "a JWS": forward(attachments=[{"data": {"json": {"payload": "", "signatures": []}}}]),
}


@pytest.mark.parametrize("name", ALSO_USUAL)
def test_also_usual(name: str) -> None:
    """What released clients vary is no reason for the long way."""
    assert agree(sealed(ALSO_USUAL[name])) is not None


DATA = {"json": INNER}
UNUSUAL: dict[str, dict[str, Any] | bytes] = {
    "another type": forward(type="https://didcomm.org/routing/2.0/other"),
    "a type in capitals": forward(type=FORWARD.upper()),
    "a sender": {**forward(), "from": ALICE.partition("#")[0]},
    "a sender that is none": {**forward(), "from": 1},
    "a delay": forward(delay_milli=5),
    "no id": forward(id=None),
    "an id that is no text": forward(id=1),
    "an empty id": forward(id=""),
    "a long id": forward(id="i" * 129),
    "to nothing": forward(to=[]),
    "to several": forward(to=["a", "b", "c"]),
    "to what is no text": forward(to=[1]),
    "to a text": forward(to="x"),
    "to an object": forward(to={"a": 1}),
    "no body": forward(body=None),
    "a body that is no object": forward(body=["next"]),
    "no next": forward(body={}),
    "an empty next": forward(body={"next": ""}),
    "a long next": forward(body={"next": "n" * 8193}),
    "a next that is no text": forward(body={"next": [NEXT]}),
    "no attachments": forward(attachments=None),
    "an empty list of attachments": forward(attachments=[]),
    "two attachments": forward(attachments=[{"data": DATA}] * 2),
    "attachments as an object": forward(attachments={"data": {"data": DATA}}),
    "an attachment that is no object": forward(attachments=["data"]),
    "no data": forward(attachments=[{}]),
    "a link": forward(attachments=[{"data": {"links": ["x"]}}]),
    "data that is no object": forward(attachments=[{"data": ["json"]}]),
    "json that is no object": forward(attachments=[{"data": {"json": ["ciphertext"]}}]),
    "json that is not encrypted": forward(attachments=[{"data": {"json": {}}}]),
    "base64 that is none": forward(attachments=[{"data": {"base64": "*"}}]),
    "base64 of what is no JSON": forward(attachments=[{"data": {"base64": "AAAA"}}]),
    "base64 with another hash": forward(
        attachments=[{"data": {"base64": b64(compact(INNER)), "hash": "1220" + 64 * "0"}}]
    ),
    "an envelope": {**forward(), "ciphertext": ""},
    "a JWS itself": {**forward(), "payload": ""},
    "no object": b"[]",
    "no JSON": b"x",
    "nothing": b"",
    "nested too deep": compact(forward()).replace(b'"AAAA"', b"[" * 300 + b"]" * 300),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_messages(name: str) -> None:
    """Left to the long way, which decides or refuses."""
    assert USUAL.read(sealed(UNUSUAL[name])) is None


@pytest.mark.parametrize("name", [*TOLERATED, *REFUSED])
def test_every_writing(name: str) -> None:
    """All odd and all wrong ways of writing an envelope."""
    jwe = {**TOLERATED, **REFUSED}[name].write(compact(forward()), (BOB, KEY.public))
    for written in (jwe, flattened(jwe)):
        found = agree(compact(written))
        assert found is None or name in TOLERATED


@pytest.mark.parametrize("name", DAMAGED)
def test_every_damage(name: str) -> None:
    """Nothing damaged is taken."""
    jwe = Writing().write(compact(forward()), (BOB, KEY.public))
    DAMAGED[name](jwe)
    assert agree(compact(jwe)) is None


def test_others() -> None:
    """Authcrypts, several recipients, other curves, other people's mail and other bytes."""
    text, bob = compact(forward()), (BOB, KEY.public)
    for raw in (
        encrypt_authcrypt(text, (ALICE, ALICES["X25519"]), [bob]),
        encrypt_anoncrypt(text, [bob, (CAROL, CAROLS["X25519"].public)]),
        encrypt_anoncrypt(text, [(BOB, BOBS["P-256"].public)]),
        encrypt_anoncrypt(text, [(CAROL, CAROLS["X25519"].public)]),
        encrypt_anoncrypt(text, [(BOB, CAROLS["X25519"].public)]),
        sealed(sealed(forward())),
        text,
        b"",
        b"[]",
        b'"ciphertext":"',
        b'"ciphertext":""',
        b'{"ciphertext":""}',
        b'{"ciphertext":1}',
        b"\xff",
    ):
        assert agree(raw) is None


def spelled(part: str, enc: Enc) -> tuple[str, Callable[[str], bytes]]:
    """A part of an envelope, and what writes the envelope with another text in its place."""
    jwe = flattened(json.loads(sealed(forward(), enc)))
    header = json.loads(unb64(jwe["protected"]))
    if part == "x":
        epk = header["epk"]
        return epk["x"], lambda text: compact(
            {**jwe, "protected": b64(compact({**header, "epk": {**epk, "x": text}}))}
        )
    return jwe[part], lambda text: compact({**jwe, part: text})


PARTS = ("protected", "iv", "ciphertext", "tag", "encrypted_key", "x")


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("part", PARTS)
def test_every_character_counts(enc: Enc, part: str) -> None:
    """Nothing is taken with a character changed, be it to one that a lenient decoder reads in the same way."""
    text, with_text = spelled(part, enc)
    assert agree(with_text(text)) is not None
    for position in range(0, len(text), max(1, len(text) // 40)):
        for other in {"A", "-", "+", "/", "=", "é", " ", "\n", "", text[position] * 2} - {text[position]}:
            assert agree(with_text(text[:position] + other + text[position + 1 :])) is None


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("part", PARTS)
def test_every_end_counts(enc: Enc, part: str) -> None:
    """Nor with another end: bits that stand for nothing, padding, more or less of it."""
    text, with_text = spelled(part, enc)
    for letter in set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") - {text[-1]}:
        assert agree(with_text(text[:-1] + letter)) is None
    for other in (text + "====", text + "A", text[:-1], "", text[1:], " " + text):
        assert agree(with_text(other)) is None
    padded = agree(with_text(text + "=" * (-len(text) % 4)))
    assert padded is None or part == "ciphertext" or not len(text) % 4


def test_where_the_ciphertext_stands() -> None:
    """Only the last one on the top level is the ciphertext, however the others are spelled."""
    raw = sealed(forward())
    value = json.loads(raw)
    member, empty = b'"ciphertext":"%s"' % value["ciphertext"].encode(), b'"ciphertext":""'
    assert agree(raw.replace(member, b'"cipher\\u0074ext":"AAAA",' + member)) is not None
    for other in (
        raw.replace(member, member + b"," + empty),
        raw.replace(member, member + b',"cipher\\u0074ext":"AAAA"'),
        raw.replace(member, b'"cipher\\u0074ext":"","x":{' + member + b"}"),
        raw.replace(member, b'"x":{' + member + b"}," + empty),
        raw.replace(member, b'"x":' + member),
        raw.replace(member, b'"ciphertext":[' + member.partition(b":")[2] + b"]"),
        raw.replace(member, b'"ciphertext":null,"x":' + member.partition(b":")[2]),
        raw.replace(member[:-1], member[:-1] + b"\\"),
        raw.replace(member[:-1], member[:-1] + b"\\n"),
        raw.replace(member[:-1], member[:-1] + b"\xff"),
    ):
        assert other != raw
        assert agree(other) is None


LONG = "A" * 9000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Ax", "Ax"),
        ("Ax", "A\x7f"),
        ("Ax", "Aé"),
        ("Ax", "A\\n"),
        ("Ax", "A\\u0041"),
        ("Ax", "A\\\\"),
        ("Ax", 'A\\"'),
        ('"ciphertext":', '"ciphertext" : '),
        ('"ciphertext":', '"cipher\\u0074ext":"","ciphertext":'),
        ('"body":', '"note":"\\"ciphertext\\":","body":'),
    ],
)
def test_long_payloads(old: str, new: str) -> None:
    """A long ciphertext inside comes out as the long way writes it, whatever it is made of."""
    message = forward(attachments=[{"data": {"json": {"ciphertext": f"{LONG}x", "tag": "é"}}}])
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    assert old in text
    found = agree(sealed(text.replace(old, new).encode()))
    assert found is not None and len(found.payload) > len(LONG)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ciphertext":', '"ciphertext":"","ciphertext":'),
        ('"ciphertext":', '"ciphertext":7,"ciphertext":'),
        ('"ciphertext":', '"payload":{"ciphertext":""},"signatures":'),
        ('"body":', '"note":{"ciphertext":"y"},"body":'),
        ('"ciphertext":', '"json":{},"ciphertext":'),
        ('"body":', '"note":{"json":{"ciphertext":"y"}},"body":'),
        ('"json":', '"json":{"ciphertext":"y"},"json":'),
        ('"json":', '"json":{"ciphertext":"y"},"js\\u006fn":'),
    ],
)
def test_long_payloads_in_odd_layouts(old: str, new: str) -> None:
    """Where it is not at once clear which text is the payload, it is left to the long way."""
    for ciphertext in ("", "AAAA", LONG):
        message = forward(attachments=[{"data": {"json": {"ciphertext": ciphertext, "tag": LONG}}}])
        text = json.dumps(message, separators=(",", ":"))
        assert old in text
        agree(sealed(text.replace(old, new).encode()))


@pytest.mark.parametrize("new", ["\n", "\x00", "\x1f", "\\", "\\x", '"', "\udcff"])
def test_long_payloads_that_are_no_json(new: str) -> None:
    """Nor is a control character, a stray escape or what is no UTF-8 let through there."""
    text = json.dumps(forward(attachments=[{"data": {"json": {"ciphertext": f"{LONG}x"}}}]))
    assert agree(sealed(text.replace("Ax", f"A{new}").encode("utf-8", "surrogateescape"))) is None


def test_long_base64() -> None:
    """There is nothing to leave alone in base64."""
    payload = compact({"ciphertext": LONG})
    found = agree(sealed(forward(attachments=[{"data": {"base64": b64(payload)}}])))
    assert found is not None and found.payload == payload


def test_more_members_than_usual() -> None:
    """Others are none of our business here, and may be of the long way's."""
    value = json.loads(sealed(forward()))
    for name in ("aad", "unprotected", "header", "encrypted_key", "x"):
        assert agree(compact({**value, name: {}})) is None
        assert agree(compact({**flattened(value), name: {}})) is None
    for name in value:
        assert agree(compact({key: member for key, member in value.items() if key != name})) is None


@pytest.mark.parametrize("point", LOW_ORDER)
def test_low_order(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What anybody can seal, because the secret is zero whoever the recipient is, is not opened."""
    monkeypatch.setattr(foreign_jwe, "_exchange", lambda key, peer: bytes(32))
    x = b64(bytes.fromhex(point))
    writing = Writing(change=lambda header: header["epk"].update(x=x))
    assert agree(compact(writing.write(compact(forward()), (BOB, KEY.public)))) is None


def test_keys_come_and_go() -> None:
    """A kid means the keys of the moment: another one, none, two, and the first again."""
    now: dict[str, Sequence[PrivateKey]] = {BOB: (KEY,)}
    usual = FastForwardParser(now)

    def change(*keys: PrivateKey) -> None:
        now[BOB] = keys

    to_bob, to_carol = sealed(forward()), encrypt_anoncrypt(compact(forward()), [(BOB, CAROLS["X25519"].public)])
    assert usual.read(to_bob) and not usual.read(to_carol)
    change(CAROLS["X25519"])
    assert usual.read(to_carol) and not usual.read(to_bob)
    change()
    assert not usual.read(to_bob)
    change(KEY, CAROLS["X25519"])
    assert not usual.read(to_bob)
    change(BOBS["P-256"], KEY)
    assert usual.read(to_bob)


def test_nothing_opaque_in_repr() -> None:
    """The payload is not shown."""
    found = USUAL.read(sealed(forward()))
    assert found is not None
    assert repr(found) == f"FastForward(next={NEXT!r}, form='json')"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_an_envelope(data: st.DataObject) -> None:
    """Whatever is done to it, before or after it is sealed."""
    changes = data.draw(st.lists(st.tuples(st.sampled_from(["header", "epk", "entry", "own", "jwe"]), NAMES, VALUES)))
    before = {name: value for place, name, value in changes if place == "header" and value is not None}
    writing = Writing(encode=lambda header: compact({**header, **before}))
    jwe = writing.write(compact(forward()), (BOB, KEY.public))
    entry = jwe["recipients"][0]
    places = {"entry": entry, "own": entry["header"], "jwe": jwe}
    for place, name, value in changes:
        if place in places:
            places[place][name] = value
    agree(compact(jwe))
    agree(compact({**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}))


MEMBERS = st.sampled_from(
    "id type from to thid body next attachments data json base64 hash links expires_time delay_milli payload "
    "ciphertext signatures from_prior return_route".split()
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_a_message(data: st.DataObject) -> None:
    """Whatever is in it."""
    message = forward()
    places = {
        "message": message,
        "body": message["body"],
        "attachment": message["attachments"][0],
        "data": message["attachments"][0]["data"],
    }
    values = JSON | st.sampled_from([INNER, [BOB], BOB, "", 0, b64(compact(INNER)), FORWARD, "x" * 200, [{}]])
    for place, name, value in data.draw(st.lists(st.tuples(st.sampled_from([*places]), MEMBERS, values), max_size=3)):
        places[place][name] = value
    for place, name in data.draw(st.lists(st.tuples(st.sampled_from([*places]), MEMBERS), max_size=1)):
        places[place].pop(name, None)
    agree(sealed(message))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_the_bytes(data: st.DataObject) -> None:
    """One byte changed, or a piece taken out, doubled or put in: the one thing signed for is opened or nothing."""
    raw = bytearray(sealed(forward(), data.draw(st.sampled_from(ENCS))))
    start = data.draw(st.integers(0, len(raw) - 1))
    end = data.draw(st.integers(start, min(len(raw), start + 40)))
    raw[start:end] = data.draw(st.sampled_from([b"", raw[start:end] * 2]) | st.binary(max_size=3))
    agree(bytes(raw))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(compact))
def test_any_bytes(raw: bytes) -> None:
    """Nothing escapes."""
    assert agree(raw) is None


def calls_of(work: Callable[[], object]) -> int:
    """How many functions written in Python it calls."""
    count = 0

    def told(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    # The collector calls functions of its own, and those of what it collects.
    gc.disable()
    sys.setprofile(told)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_calls() -> None:
    """Few calls for a forward, and next to none for what is not one of ours or an authcrypt."""
    usual, once = sealed(forward(note=secrets.token_hex(4000))), sealed(forward())
    assert USUAL.read(once) is not None
    assert calls_of(lambda: USUAL.read(once)) <= 34
    assert calls_of(lambda: USUAL.read(usual)) <= 37
    authcrypt = encrypt_authcrypt(compact(forward()), (ALICE, ALICES["X25519"]), [(BOB, KEY.public)])
    foreign = encrypt_anoncrypt(compact(forward()), [(CAROL, KEY.public)])
    assert USUAL.read(authcrypt) is None
    assert calls_of(lambda: USUAL.read(authcrypt)) <= 8
    assert calls_of(lambda: USUAL.read(foreign)) <= 8
