"""The shapes of commands, and what of them is signed (DCTRL-0004 sections 4, 8, 9 and 10.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mediatord.errors import InvalidCommand, InvalidMessage
from mediatord.protocol.decentrl import commands
from mediatord.protocol.decentrl.canonical_json import canonicalize
from mediatord.protocol.decentrl.commands import (
    DecentrlCommand,
    is_didcomm_envelope,
    parse_authentication_request,
    parse_command,
)
from tests.protocol.decentrl.samples import (
    ALICE,
    CHANNELS,
    DIRECT,
    MEDIATOR,
    NONCE,
    PUBLIC,
    SECRET,
    SIGNATURE,
    authenticate,
    command,
    payload,
)

Step = str | int

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
TOO_LONG = "x" * 1025
# Neither a text nor a number.
NEITHER: list[Any] = [None, True, [], {}]


def parse(document: Any) -> DecentrlCommand:
    """The command that a document is."""
    return parse_command(json.dumps(document).encode())


def refuses(document: Any) -> bool:
    """Whether a document is no command."""
    try:
        parse(document)
    except InvalidCommand:
        return True
    return False


def changed(name: str, path: tuple[Step, ...], value: Any) -> dict[str, Any]:
    """A command with one member of its payload replaced."""
    document = command(name)
    at: Any = document["payload"]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


def paths(value: Any, *above: Step) -> Iterator[tuple[Step, ...]]:
    """Where the members of objects are, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*above, name)
            yield from paths(inner, *above, name)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from paths(inner, *above, position)


def at(document: Any, path: tuple[Step, ...]) -> Any:
    """What is there."""
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC])
def test_every_command(name: str) -> None:
    """Every command of section 8 and both of public channels are read, with all their members."""
    given = parse(command(name))
    assert isinstance(given.payload, BaseModel)
    assert json.loads(given.payload.model_dump_json()) == payload(name)
    assert (given.name, given.header.channel, given.document) == (name, CHANNELS[name], payload(name))


def test_the_header() -> None:
    """What the header says comes through; a time may have a fraction."""
    given = parse(command("QUERY_EVENTS", timestamp=1760000000000.5))
    assert (given.header.sender_did, given.header.sender_signing_key_id) == (ALICE, f"{ALICE}#signing")
    assert (given.header.recipient_did, given.header.timestamp) == (MEDIATOR, 1760000000000.5)
    assert (given.header.nonce, given.signature) == (NONCE, SIGNATURE)


def test_an_event_for_another_identity() -> None:
    """The payload of TWO_WAY_PRIVATE is a text that nobody looks into (reference 6.3)."""
    given = parse({**command("TWO_WAY_PRIVATE"), "payload": "\x00 any text \U0001f600"})
    assert (given.name, given.payload, given.document) == ("TWO_WAY_PRIVATE", "\x00 any text \U0001f600", {})


def test_the_models_are_all_there() -> None:
    """Each type has the model that is named after it."""
    for union, names in ((commands.DirectPayload, DIRECT), (commands.PublicPayload, PUBLIC)):
        wanted = {name.title().replace("_", "") for name in names}
        assert {model.__name__ for model in get_args(union)} == wanted


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"])
@pytest.mark.parametrize("channel", [*sorted(set(CHANNELS.values())), "two_way_private", "", None, 1, [], {}])
def test_a_channel_takes_its_own_payloads(name: str, channel: Any) -> None:
    """A type of another channel is refused, and so is an unknown channel (reference 6.1)."""
    assert refuses(command(name, channel=channel)) is (channel != CHANNELS[name])


@pytest.mark.parametrize(
    "wrong", ["", 0, None, [], {}, ["QUERY_EVENTS"], {"type": "QUERY"}, {"type": ["QUERY_EVENTS"]}, {"filter": {}}]
)
def test_a_payload_of_no_kind(wrong: Any) -> None:
    """An unknown type, or what is no object with a type; on TWO_WAY_PRIVATE, whatever is no text or an empty one."""
    assert refuses({**command("QUERY_EVENTS"), "payload": wrong})
    assert refuses({**command("PUBLISH_PUBLIC_EVENT"), "payload": wrong})
    assert refuses({**command("TWO_WAY_PRIVATE"), "payload": wrong})


@pytest.mark.parametrize("member", ["header", "payload", "signature"])
def test_a_member_of_the_envelope_is_missing(member: str) -> None:
    """All three are required (DCTRL-0004 4.1)."""
    for name in ("SAVE_EVENTS", "TWO_WAY_PRIVATE", "PUBLISH_PUBLIC_EVENT"):
        document = command(name)
        del document[member]
        assert refuses(document)


@pytest.mark.parametrize("wrong", [None, True, 1, "header", [], {}])
def test_a_header_that_is_none(wrong: Any) -> None:
    """An object without its members, or no object."""
    assert refuses({**command("QUERY_EVENTS"), "header": wrong})


@pytest.mark.parametrize("wrong", [None, True, 1, ["x"], {}])
def test_a_signature_that_is_no_text(wrong: Any) -> None:
    """A text that is no signature is none of the shape: that it does not verify is another answer."""
    assert refuses({**command("QUERY_EVENTS"), "signature": wrong})
    assert parse({**command("QUERY_EVENTS"), "signature": "?"}).signature == "?"


@pytest.mark.parametrize(
    "header",
    [
        {member: wrong}
        for member in ("sender_did", "sender_signing_key_id", "recipient_did", "nonce", "timestamp")
        for wrong in [*NEITHER, ""]
    ]
    + [{"timestamp": wrong} for wrong in ("1760000000000", False, [1760000000000], 10**400)]
    + [{"nonce": wrong} for wrong in (1, NONCE[:-1], NONCE + "0", "{" + NONCE + "}", NONCE + "\n", f" {NONCE}")]
    + [{"nonce": wrong} for wrong in (NONCE.replace("-", ""), NONCE[:-1] + "g", NONCE[:-1] + "٣")]
    + [{name: 1} for name in ("sender_did", "recipient_did", "sender_signing_key_id")],
)
def test_a_member_of_the_header_is_wrong(header: dict[str, Any]) -> None:
    """Numbers are numbers, nonces look like UUIDs, names are texts."""
    assert refuses(command("QUERY_EVENTS", **header))
    assert refuses(command("TWO_WAY_PRIVATE", **header))
    assert refuses(command("DELETE_PUBLIC_EVENT", **header))


@pytest.mark.parametrize(
    "member", ["channel", "sender_did", "sender_signing_key_id", "recipient_did", "timestamp", "nonce"]
)
def test_a_member_of_the_header_is_missing(member: str) -> None:
    """All six are required (DCTRL-0004 4.2)."""
    document = command("QUERY_EVENTS")
    del document["header"][member]
    assert refuses(document)


@pytest.mark.parametrize("nonce", [NONCE.upper(), "00000000-0000-0000-0000-000000000000", "f" * 8 + NONCE[8:]])
def test_a_nonce_is_a_uuid_of_any_version_and_case(nonce: str) -> None:
    """It is kept as it is spelled: the spelling is signed (reference 6.1)."""
    assert parse(command("QUERY_EVENTS", nonce=nonce)).header.nonce == nonce


@pytest.mark.parametrize(
    "did", ["did:x: y", "did:x:é", "did:x:\n", "did:x:\x7f", "nobody", "did:x:".ljust(100_000, "y")]
)
def test_any_text_may_claim_to_be_a_did(did: str) -> None:
    """Whether it resolves is another answer, and the same for all that does not."""
    given = parse(command("QUERY_EVENTS", sender_did=did, sender_signing_key_id=f"{did}#signing"))
    assert given.header.sender_did == did


OPTIONAL: dict[str, set[tuple[Step, ...]]] = {
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": {("pagination",)},
    "QUERY_COMMUNICATION_CONTRACTS": {
        ("filter",),
        ("filter", "did"),
        ("filter", "expires_at_before"),
        ("filter", "expires_at_after"),
    },
    "QUERY_PENDING_EVENTS": {("filter",), ("filter", "sender_did")},
    "SAVE_EVENTS": {("events", 0, "contract_id")},
    "QUERY_EVENTS": {
        ("filter",),
        ("filter", "after_timestamp"),
        ("filter", "before_timestamp"),
        ("filter", "participant_did"),
        ("filter", "encrypted_tags"),
        ("filter", "unprocessed_only"),
    },
    "PUBLISH_PUBLIC_EVENT": {("channel_id",)},
}
PAGES: set[tuple[Step, ...]] = {("pagination",), ("pagination", "page"), ("pagination", "page_size")}


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name in [*DIRECT, *PUBLIC] for path in paths(payload(name))]
)
def test_every_member(name: str, path: tuple[Step, ...]) -> None:
    """Optional members may be absent, all others not; none may be null, or a truth value where it has none."""
    document = command(name)
    value = at(document["payload"], path)
    del at(document["payload"], path[:-1])[path[-1]]
    assert refuses(document) is (path not in OPTIONAL.get(name, set()) | PAGES)
    assert refuses(changed(name, path, None))
    assert refuses(changed(name, path, True)) is (value is not True)
    assert refuses(changed(name, path, {"a": 1})) is not isinstance(value, dict) or path[-1] not in (
        "filter",
        "pagination",
    )


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name in [*DIRECT, *PUBLIC] for path in paths(payload(name))]
)
def test_numbers_and_texts_are_not_mistaken_for_each_other(name: str, path: tuple[Step, ...]) -> None:
    """A number in place of a text, and a text of digits in place of a number, are refused."""
    value = at(command(name)["payload"], path)
    assert refuses(changed(name, path, 1)) is isinstance(value, bool | str | dict | list)
    assert refuses(changed(name, path, "1")) is (not isinstance(value, str) or path[-1] in ("type",))


def test_a_query_without_anything() -> None:
    """Defaults: no filter, and the first ten (DCTRL-0004 9.1)."""
    given = parse({**command("QUERY_EVENTS"), "payload": {"type": "QUERY_EVENTS"}}).payload
    assert isinstance(given, commands.QueryEvents)
    assert (given.pagination.page, given.pagination.page_size) == (0, 10)
    assert given.filter == commands.EventsFilter()
    assert given.filter.encrypted_tags == ()
    assert given.filter.participant_did is None
    assert given.filter.unprocessed_only is False


@pytest.mark.parametrize("pagination", [{"page": 0, "page_size": 1}, {"page": 2**53 - 1, "page_size": 1000}])
def test_the_bounds_of_a_page(pagination: dict[str, int]) -> None:
    """The offset of the last page there can be is an integer of 64 bits (reference 9)."""
    given = parse(changed("QUERY_EVENTS", ("pagination",), pagination)).payload
    assert isinstance(given, commands.QueryEvents)
    assert given.pagination.page * given.pagination.page_size < 2**63
    assert given.pagination.model_dump() == pagination


@pytest.mark.parametrize(
    "pagination",
    [
        {"page": -1},
        {"page": 0.5},
        {"page": 2**53},
        {"page": 1e300},
        {"page_size": 0},
        {"page_size": -1},
        {"page_size": 1001},
        {"page_size": 10.5},
        {"page_size": "10"},
        [],
    ],
)
def test_no_page(pagination: Any) -> None:
    """Pages out of bounds are refused, never cut to size: the reply has to name the page that was asked for."""
    assert refuses(changed("QUERY_EVENTS", ("pagination",), pagination))


def test_integers_by_another_name() -> None:
    """JSON has one kind of number, so 1.0 and 1e2 are integers."""
    raw = (
        json.dumps(command("QUERY_EVENTS"))
        .encode()
        .replace(b'"page": 2, "page_size": 100', b'"page":1.0,"page_size":1e2')
    )
    given = parse_command(raw).payload
    assert isinstance(given, commands.QueryEvents)
    assert repr(given.pagination) == "Pagination(page=1, page_size=100)"


@pytest.mark.parametrize(
    ("name", "path", "item"),
    [
        ("ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", ("communication_contract_ids",), "1"),
        ("ACKNOWLEDGE_PENDING_EVENTS", ("event_ids",), "1"),
        ("SAVE_EVENTS", ("events",), payload("SAVE_EVENTS")["events"][0]),
        ("SAVE_EVENTS", ("events", 0, "encrypted_tags"), "t"),
        ("QUERY_EVENTS", ("filter", "encrypted_tags"), "t"),
        ("UPDATE_EVENT_TAGS", ("events",), payload("UPDATE_EVENT_TAGS")["events"][0]),
        ("UPDATE_EVENT_TAGS", ("events", 0, "encrypted_tags"), "t"),
        ("PUBLISH_PUBLIC_EVENT", ("tags",), "t"),
    ],
)
def test_lists_have_an_end(name: str, path: tuple[Step, ...], item: Any) -> None:
    """A list may be empty and has 1000 items at most, each of which counts."""
    assert not refuses(changed(name, path, []))
    assert not refuses(changed(name, path, [item] * 1000))
    assert refuses(changed(name, path, [item] * 1001))
    assert refuses(changed(name, path, [item, 1]))
    assert refuses(changed(name, path, [item, None]))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("REQUEST_COMMUNICATION_CONTRACT", ("requestor_ephemeral_public_key",)),
        ("ACKNOWLEDGE_PENDING_EVENTS", ("event_ids", 0)),
        ("SAVE_EVENTS", ("events", 0, "contract_id")),
        ("SAVE_EVENTS", ("events", 0, "encrypted_tags", 0)),
        ("QUERY_EVENTS", ("filter", "encrypted_tags", 0)),
        ("UPDATE_EVENT_TAGS", ("events", 0, "event_id")),
        ("PUBLISH_PUBLIC_EVENT", ("tags", 0)),
        ("PUBLISH_PUBLIC_EVENT", ("channel_id",)),
        ("DELETE_PUBLIC_EVENT", ("public_event_id",)),
    ],
)
def test_short_texts_have_an_end(name: str, path: tuple[Step, ...]) -> None:
    """Ids, tags and keys have 1024 characters at most; payloads are bounded by the size of the body only."""
    assert not refuses(changed(name, path, TOO_LONG[1:]))
    assert refuses(changed(name, path, TOO_LONG))


def test_a_contract_with_oneself() -> None:
    """It is refused (reference 7.3)."""
    for name in ("SAVE_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"):
        path = ("signed_communication_contract", "communication_contract", "recipient_did")
        assert refuses(changed(name, path, ALICE))


def test_an_empty_channel_id() -> None:
    """A channel that is named has a name (reference 10.1)."""
    assert refuses(changed("PUBLISH_PUBLIC_EVENT", ("channel_id",), ""))


def test_models_do_not_change() -> None:
    """What was checked stays as it was."""
    given = parse(command("QUERY_EVENTS")).payload
    with pytest.raises(ValueError, match="frozen"):
        given.pagination.page = 7  # type: ignore[union-attr]


def test_what_is_signed() -> None:
    """Header and payload exactly as they came, unknown members included and nothing added (reference 4)."""
    document = command("QUERY_EVENTS", later={"a": 1})
    document["payload"] = {"type": "QUERY_EVENTS", "filter": {"new": None}, "é": 1.0}
    document["unsigned"] = 1
    given = parse(document)
    assert given.signed == canonicalize({"header": document["header"], "payload": document["payload"]})
    assert b'"filter":{"new":null}' in given.signed
    assert given.document == document["payload"]


def test_the_published_vector() -> None:
    """The signature of the reference, section 16, is over these bytes."""
    payload_ = {"type": "QUERY_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 10}}
    given = parse({**command("QUERY_EVENTS"), "payload": payload_})
    assert given.signed.startswith(b'{"header":{"channel":"DIRECT_AUTHENTICATED","nonce":"6f1c1d52')
    assert given.signed.endswith(
        b'"timestamp":1760000000000},"payload":{"filter":{},"pagination":{"page":0,"page_size":10},"type":"QUERY_EVENTS"}}'
    )


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"])
def test_nothing_secret_is_shown(name: str) -> None:
    """Payloads, tags, keys and signatures are in no representation, nor in the error of a bad command."""
    document = command(name)
    given = parse(document)
    shown = repr(given) + repr(given.payload if not isinstance(given.payload, str) else "")
    assert SECRET not in shown
    assert SIGNATURE not in shown
    document["header"]["timestamp"] = "now"
    with pytest.raises(InvalidCommand) as caught:
        parse(document)
    assert (str(caught.value), caught.value.__cause__) == ("", None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"\xff",
        b"{",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"header":{},"header":{}}',
        json.dumps(command("QUERY_EVENTS")).encode("utf-16"),
        json.dumps(command("QUERY_EVENTS")).encode().replace(b"1760000000000", b"NaN"),
        json.dumps(command("QUERY_EVENTS")).encode().replace(b"1760000000000", b"1e400"),
        json.dumps(command("TWO_WAY_PRIVATE")).encode().replace(SECRET.encode(), rb"\ud800"),
        json.dumps(command("TWO_WAY_PRIVATE")).encode()[:-1] + b',"signature":"x"}',
    ],
)
def test_no_command(raw: bytes) -> None:
    """What is not JSON, not an object, ambiguous or nested without end is refused like any other."""
    with pytest.raises(InvalidCommand):
        parse_command(raw)


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """Nothing but a refusal comes of noise."""
    for read, error in ((parse_command, InvalidCommand), (parse_authentication_request, InvalidMessage)):
        with pytest.raises(error):
            read(raw)
    is_didcomm_envelope(raw)


COMMANDS = st.sampled_from([*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"]).map(command)


@given(COMMANDS, st.data())
def test_any_value_anywhere(document: dict[str, Any], data: st.DataObject) -> None:
    """With any JSON value in any place it is a command or it is refused, and what is signed is what came."""
    document = deepcopy(document)
    path = data.draw(st.sampled_from([*paths(document)]))
    at(document, path[:-1])[path[-1]] = data.draw(JSON_VALUES)
    with suppress(InvalidCommand):
        given = parse(document)
        signed = {"header": document["header"], "payload": document["payload"]}
        assert json.loads(given.signed) == json.loads(canonicalize(signed))


@given(COMMANDS, st.data())
def test_unknown_members_are_passed_over(document: dict[str, Any], data: st.DataObject) -> None:
    """Newer clients may say more than is known here, anywhere (reference 4)."""
    document = deepcopy(document)
    objects = [(), *(path for path in paths(document) if isinstance(at(document, path), dict))]
    at(document, data.draw(st.sampled_from(objects)))["x-later"] = data.draw(JSON_VALUES)
    parse(document)


def test_the_authentication_of_a_socket() -> None:
    """What is signed is neither its type nor anything unknown (DCTRL-0004 10.2)."""
    said, signed = parse_authentication_request(json.dumps(authenticate(later=1)).encode())
    assert (said.did, said.signing_key_id, said.timestamp) == (ALICE, f"{ALICE}#signing", 1760000000000)
    assert (said.nonce, said.signature) == (NONCE, SIGNATURE)
    names = ("did", "signing_key_id", "timestamp", "nonce")
    assert signed == canonicalize({name: authenticate()[name] for name in names})
    assert SIGNATURE not in repr(said)


@pytest.mark.parametrize("member", ["type", "did", "signing_key_id", "timestamp", "nonce", "signature"])
def test_a_member_of_the_authentication(member: str) -> None:
    """All are required, and of the right kind."""
    for wrong in [*NEITHER, "" if member != "signature" else 1]:
        with pytest.raises(InvalidMessage):
            parse_authentication_request(json.dumps(authenticate(**{member: wrong})).encode())
    message = authenticate()
    del message[member]
    with pytest.raises(InvalidMessage):
        parse_authentication_request(json.dumps(message).encode())


@pytest.mark.parametrize("wrong", [{"type": "PONG"}, {"timestamp": "1760000000000"}, {"nonce": "1"}])
def test_no_authentication(wrong: dict[str, Any]) -> None:
    """A socket that begins with anything else has failed."""
    with pytest.raises(InvalidMessage):
        parse_authentication_request(json.dumps(authenticate(**wrong)).encode())


@pytest.mark.parametrize(
    ("frame", "envelope"),
    [
        (b'{"protected":"eyJ9","recipients":[],"iv":"","ciphertext":"","tag":""}', True),
        (b' {"ciphertext":"","protected":""}', True),
        (b'{"payload":{"protected":"x"}}', False),
        (b'["protected"]', False),
        (b'"protected"', False),
        (b"protected", False),
        (b"{", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
        (json.dumps(authenticate()).encode(), False),
    ],
)
def test_which_half_a_first_frame_is_for(frame: bytes, envelope: bool) -> None:
    """A JSON object with `protected` is a JWE, and nothing else is."""
    assert is_didcomm_envelope(frame) is envelope
