"""The fast forward parser returns what the general path returns, or nothing."""

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
from tests.protocol.didcomm.foreign_jwe import JWEWriter, b64, compact, unb64
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
    flatten,
)
from tests.protocol.didcomm.test_key_agreement import LOW_ORDER

NEXT = "did:example:carol"
INNER = {"protected": "e30", "recipients": [{"header": {"kid": CAROL}}], "ciphertext": "AAAA", "é": ["\n", 1.5, None]}
KEY = BOBS["X25519"]
KEYS = {BOB: (KEY, BOBS["P-256"])}


USUAL = FastForwardParser(KEYS)


def forward(**members: Any) -> dict[str, Any]:
    """A common forward; members that are None are omitted."""
    value = {
        "id": "f-1",
        "type": FORWARD,
        "to": [BOB.partition("#")[0]],
        "body": {"next": NEXT},
        "attachments": [{"id": "a", "data": {"json": INNER}}],
        **members,
    }
    return {name: member for name, member in value.items() if member is not None}


def encrypt(message: dict[str, Any] | bytes, enc: Enc = "A256CBC-HS512") -> bytes:
    plaintext = message if isinstance(message, bytes) else compact(message)
    return encrypt_anoncrypt(plaintext, [(BOB, KEY.public)], enc=enc)


def parse_by_general_path(raw: bytes) -> FastForward | None:
    """Parse with the general modules; None unless it is an unsigned, undelayed forward."""
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


def assert_parsers_agree(raw: bytes) -> FastForward | None:
    """The fast parser returns the same as the general path, or nothing."""
    short = USUAL.read(raw)
    if short is not None:
        assert short == parse_by_general_path(raw)
        assert type(short.payload) is bytes
    return short


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("write", [encrypt, lambda message, enc: compact(flatten(json.loads(encrypt(message, enc))))])
def test_parses_common_forwards(enc: Enc, write: Callable[[dict[str, Any], Enc], bytes]) -> None:
    """With each content encryption, in General and flattened form."""
    found = assert_parsers_agree(write(forward(), enc))
    assert found is not None
    assert (found.next, found.form, json.loads(found.payload)) == (NEXT, "json", INNER)
    assert (found.id, found.thread, found.expires_time) == ("f-1", "f-1", None)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 15, 16, 17, 40_000])
def test_any_ciphertext_length(size: int) -> None:
    """Any end of the ciphertext, in three layouts of the JSON."""
    raw = encrypt(forward(note="x" * size))
    value = json.loads(raw)
    for written in (raw, json.dumps(value).encode(), json.dumps(value, indent=2).encode()):
        assert assert_parsers_agree(written) is not None


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
def test_parses_variants_of_released_clients(name: str) -> None:
    """Variants of released clients are parsed on the fast path."""
    assert assert_parsers_agree(encrypt(ALSO_USUAL[name])) is not None


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
def test_leaves_uncommon_messages(name: str) -> None:
    """Uncommon messages are left to the general path."""
    assert USUAL.read(encrypt(UNUSUAL[name])) is None


@pytest.mark.parametrize("name", [*TOLERATED, *REFUSED])
def test_all_envelope_forms(name: str) -> None:
    """All tolerated and refused forms of an envelope."""
    jwe = {**TOLERATED, **REFUSED}[name].write(compact(forward()), (BOB, KEY.public))
    for written in (jwe, flatten(jwe)):
        found = assert_parsers_agree(compact(written))
        assert found is None or name in TOLERATED


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_envelopes(name: str) -> None:
    """No damaged envelope is parsed."""
    jwe = JWEWriter().write(compact(forward()), (BOB, KEY.public))
    DAMAGED[name](jwe)
    assert assert_parsers_agree(compact(jwe)) is None


def test_leaves_other_envelopes() -> None:
    """Authcrypts, several recipients, other curves, other recipients and other bytes."""
    text, bob = compact(forward()), (BOB, KEY.public)
    for raw in (
        encrypt_authcrypt(text, (ALICE, ALICES["X25519"]), [bob]),
        encrypt_anoncrypt(text, [bob, (CAROL, CAROLS["X25519"].public)]),
        encrypt_anoncrypt(text, [(BOB, BOBS["P-256"].public)]),
        encrypt_anoncrypt(text, [(CAROL, CAROLS["X25519"].public)]),
        encrypt_anoncrypt(text, [(BOB, CAROLS["X25519"].public)]),
        encrypt(encrypt(forward())),
        text,
        b"",
        b"[]",
        b'"ciphertext":"',
        b'"ciphertext":""',
        b'{"ciphertext":""}',
        b'{"ciphertext":1}',
        b"\xff",
    ):
        assert assert_parsers_agree(raw) is None


def part_of(part: str, enc: Enc) -> tuple[str, Callable[[str], bytes]]:
    """A part of an envelope, and a function that replaces it."""
    jwe = flatten(json.loads(encrypt(forward(), enc)))
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
    """An envelope with a changed character is refused, even if a lenient decoder reads the same."""
    text, with_text = part_of(part, enc)
    assert assert_parsers_agree(with_text(text)) is not None
    for position in range(0, len(text), max(1, len(text) // 40)):
        for other in {"A", "-", "+", "/", "=", "é", " ", "\n", "", text[position] * 2} - {text[position]}:
            assert assert_parsers_agree(with_text(text[:position] + other + text[position + 1 :])) is None


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("part", PARTS)
def test_every_end_counts(enc: Enc, part: str) -> None:
    """Unused bits, padding, and missing or additional characters at the end of a part are refused."""
    text, with_text = part_of(part, enc)
    for message in set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") - {text[-1]}:
        assert assert_parsers_agree(with_text(text[:-1] + message)) is None
    for other in (text + "====", text + "A", text[:-1], "", text[1:], " " + text):
        assert assert_parsers_agree(with_text(other)) is None
    padded = assert_parsers_agree(with_text(text + "=" * (-len(text) % 4)))
    assert padded is None or part == "ciphertext" or not len(text) % 4


def test_position_of_ciphertext() -> None:
    """Only the last top-level ciphertext counts, whatever the spelling of others."""
    raw = encrypt(forward())
    value = json.loads(raw)
    member, empty = b'"ciphertext":"%s"' % value["ciphertext"].encode(), b'"ciphertext":""'
    assert assert_parsers_agree(raw.replace(member, b'"cipher\\u0074ext":"AAAA",' + member)) is not None
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
        assert assert_parsers_agree(other) is None


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
    """A long ciphertext inside comes out as from the general path, whatever its content."""
    message = forward(attachments=[{"data": {"json": {"ciphertext": f"{LONG}x", "tag": "é"}}}])
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    assert old in text
    found = assert_parsers_agree(encrypt(text.replace(old, new).encode()))
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
    """Where it is ambiguous which string is the payload, the general path decides."""
    for ciphertext in ("", "AAAA", LONG):
        message = forward(attachments=[{"data": {"json": {"ciphertext": ciphertext, "tag": LONG}}}])
        text = json.dumps(message, separators=(",", ":"))
        assert old in text
        assert_parsers_agree(encrypt(text.replace(old, new).encode()))


@pytest.mark.parametrize("new", ["\n", "\x00", "\x1f", "\\", "\\x", '"', "\udcff"])
def test_long_payloads_outside_json(new: str) -> None:
    """Control characters, invalid escapes and invalid UTF-8 are refused there too."""
    text = json.dumps(forward(attachments=[{"data": {"json": {"ciphertext": f"{LONG}x"}}}]))
    assert assert_parsers_agree(encrypt(text.replace("Ax", f"A{new}").encode("utf-8", "surrogateescape"))) is None


def test_long_base64_payload() -> None:
    """Long base64 payloads are decoded."""
    payload = compact({"ciphertext": LONG})
    found = assert_parsers_agree(encrypt(forward(attachments=[{"data": {"base64": b64(payload)}}])))
    assert found is not None and found.payload == payload


def test_additional_members() -> None:
    """Additional members are ignored or left to the general path."""
    value = json.loads(encrypt(forward()))
    for name in ("aad", "unprotected", "header", "encrypted_key", "x"):
        assert assert_parsers_agree(compact({**value, name: {}})) is None
        assert assert_parsers_agree(compact({**flatten(value), name: {}})) is None
    for name in value:
        assert assert_parsers_agree(compact({key: member for key, member in value.items() if key != name})) is None


@pytest.mark.parametrize("point", LOW_ORDER)
def test_low_order_key(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An envelope with a zero secret, which anybody can make, is not decrypted."""
    monkeypatch.setattr(foreign_jwe, "_exchange", lambda key, peer: bytes(32))
    x = b64(bytes.fromhex(point))
    writing = JWEWriter(change=lambda header: header["epk"].update(x=x))
    assert assert_parsers_agree(compact(writing.write(compact(forward()), (BOB, KEY.public)))) is None


def test_uses_current_keys() -> None:
    """A kid selects among the current keys: another one, one without, two, and the first again."""
    now: dict[str, Sequence[PrivateKey]] = {BOB: (KEY,)}
    usual = FastForwardParser(now)

    def change_keys(*keys: PrivateKey) -> None:
        now[BOB] = keys

    to_bob, to_carol = encrypt(forward()), encrypt_anoncrypt(compact(forward()), [(BOB, CAROLS["X25519"].public)])
    assert usual.read(to_bob) and not usual.read(to_carol)
    change_keys(CAROLS["X25519"])
    assert usual.read(to_carol) and not usual.read(to_bob)
    change_keys()
    assert not usual.read(to_bob)
    change_keys(KEY, CAROLS["X25519"])
    assert not usual.read(to_bob)
    change_keys(BOBS["P-256"], KEY)
    assert usual.read(to_bob)


def test_repr_hides_payload() -> None:
    """The payload is not in the representation."""
    found = USUAL.read(encrypt(forward()))
    assert found is not None
    assert repr(found) == f"FastForward(next={NEXT!r}, form='json')"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_arbitrary_changes_of_envelope(data: st.DataObject) -> None:
    """Any change, before or after encryption."""
    changes = data.draw(st.lists(st.tuples(st.sampled_from(["header", "epk", "entry", "own", "jwe"]), NAMES, VALUES)))
    before = {name: value for place, name, value in changes if place == "header" and value is not None}
    writing = JWEWriter(encode=lambda header: compact({**header, **before}))
    jwe = writing.write(compact(forward()), (BOB, KEY.public))
    entry = jwe["recipients"][0]
    places = {"entry": entry, "own": entry["header"], "jwe": jwe}
    for place, name, value in changes:
        if place in places:
            places[place][name] = value
    assert_parsers_agree(compact(jwe))
    assert_parsers_agree(compact({**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}))


MEMBERS = st.sampled_from(
    "id type from to thid body next attachments data json base64 hash links expires_time delay_milli payload "
    "ciphertext signatures from_prior return_route".split()
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_arbitrary_changes_of_message(data: st.DataObject) -> None:
    """Any change of the plaintext."""
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
    assert_parsers_agree(encrypt(message))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_arbitrary_changes_of_bytes(data: st.DataObject) -> None:
    """A byte changed, or a piece removed, doubled or inserted: the authenticated content is returned, or nothing."""
    raw = bytearray(encrypt(forward(), data.draw(st.sampled_from(ENCS))))
    start = data.draw(st.integers(0, len(raw) - 1))
    end = data.draw(st.integers(start, min(len(raw), start + 40)))
    raw[start:end] = data.draw(st.sampled_from([b"", raw[start:end] * 2]) | st.binary(max_size=3))
    assert_parsers_agree(bytes(raw))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(compact))
def test_arbitrary_bytes(raw: bytes) -> None:
    """Arbitrary bytes cause no error."""
    assert assert_parsers_agree(raw) is None


def count_calls(work: Callable[[], object]) -> int:
    """Count the Python functions that `work` calls."""
    count = 0

    def record_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    # Garbage collection calls functions, too.
    gc.disable()
    sys.setprofile(record_call)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_function_calls() -> None:
    """Few calls for a forward, and nearly none for authcrypts and messages to other recipients."""
    usual, once = encrypt(forward(note=secrets.token_hex(4000))), encrypt(forward())
    assert USUAL.read(once) is not None
    assert count_calls(lambda: USUAL.read(once)) <= 36
    assert count_calls(lambda: USUAL.read(usual)) <= 40
    authcrypt = encrypt_authcrypt(compact(forward()), (ALICE, ALICES["X25519"]), [(BOB, KEY.public)])
    foreign = encrypt_anoncrypt(compact(forward()), [(CAROL, KEY.public)])
    assert USUAL.read(authcrypt) is None
    assert count_calls(lambda: USUAL.read(authcrypt)) <= 8
    assert count_calls(lambda: USUAL.read(foreign)) <= 8
