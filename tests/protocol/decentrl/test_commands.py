"""Schemas of commands, and what of them is signed (DCTRL-0004 sections 4, 8, 9 and 10.2)."""

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
# Neither strings nor numbers.
NEITHER: list[Any] = [None, True, [], {}]


def parse(document: Any) -> DecentrlCommand:
    """Parse a document as a command."""
    return parse_command(json.dumps(document).encode())


def is_refused(document: Any) -> bool:
    """Whether a document is refused as a command."""
    try:
        parse(document)
    except InvalidCommand:
        return True
    return False


def change_payload(name: str, path: tuple[Step, ...], value: Any) -> dict[str, Any]:
    """A command with one member of its payload replaced."""
    document = command(name)
    value_at: Any = document["payload"]
    for step in path[:-1]:
        value_at = value_at[step]
    value_at[path[-1]] = value
    return document


def paths(value: Any, *above: Step) -> Iterator[tuple[Step, ...]]:
    """Paths of all object members, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*above, name)
            yield from paths(inner, *above, name)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from paths(inner, *above, position)


def value_at(document: Any, path: tuple[Step, ...]) -> Any:
    """The value at a path."""
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC])
def test_parses_all_commands(name: str) -> None:
    """Every command of section 8 and of public channels, with all members."""
    given = parse(command(name))
    assert isinstance(given.payload, BaseModel)
    assert json.loads(given.payload.model_dump_json()) == payload(name)
    assert (given.name, given.header.channel, given.document) == (name, CHANNELS[name], payload(name))


def test_header() -> None:
    """The header is parsed; a time may have a fraction."""
    given = parse(command("QUERY_EVENTS", timestamp=1760000000000.5))
    assert (given.header.sender_did, given.header.sender_signing_key_id) == (ALICE, f"{ALICE}#signing")
    assert (given.header.recipient_did, given.header.timestamp) == (MEDIATOR, 1760000000000.5)
    assert (given.header.nonce, given.signature) == (NONCE, SIGNATURE)


def test_two_way_private_payload_is_opaque() -> None:
    """The payload of TWO_WAY_PRIVATE is an opaque string (reference 6.3)."""
    given = parse({**command("TWO_WAY_PRIVATE"), "payload": "\x00 any text \U0001f600"})
    assert (given.name, given.payload, given.document) == ("TWO_WAY_PRIVATE", "\x00 any text \U0001f600", {})


def test_models_are_named_after_types() -> None:
    """Each type has a model of that name."""
    for union, names in ((commands.DirectPayload, DIRECT), (commands.PublicPayload, PUBLIC)):
        wanted = {name.title().replace("_", "") for name in names}
        assert {model.__name__ for model in get_args(union)} == wanted


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"])
@pytest.mark.parametrize("channel", [*sorted(set(CHANNELS.values())), "two_way_private", "", None, 1, [], {}])
def test_channel_accepts_its_own_types_only(name: str, channel: Any) -> None:
    """A type of another channel and an unknown channel are refused (reference 6.1)."""
    assert is_refused(command(name, channel=channel)) is (channel != CHANNELS[name])


@pytest.mark.parametrize(
    "wrong", ["", 0, None, [], {}, ["QUERY_EVENTS"], {"type": "QUERY"}, {"type": ["QUERY_EVENTS"]}, {"filter": {}}]
)
def test_invalid_payloads(wrong: Any) -> None:
    """Unknown types and values without a type; on TWO_WAY_PRIVATE, anything but a non-empty string."""
    assert is_refused({**command("QUERY_EVENTS"), "payload": wrong})
    assert is_refused({**command("PUBLISH_PUBLIC_EVENT"), "payload": wrong})
    assert is_refused({**command("TWO_WAY_PRIVATE"), "payload": wrong})


@pytest.mark.parametrize("member", ["header", "payload", "signature"])
def test_missing_envelope_member(member: str) -> None:
    """All three are required (DCTRL-0004 4.1)."""
    for name in ("SAVE_EVENTS", "TWO_WAY_PRIVATE", "PUBLISH_PUBLIC_EVENT"):
        document = command(name)
        del document[member]
        assert is_refused(document)


@pytest.mark.parametrize("wrong", [None, True, 1, "header", [], {}])
def test_invalid_header(wrong: Any) -> None:
    """An object without the members, or no object."""
    assert is_refused({**command("QUERY_EVENTS"), "header": wrong})


@pytest.mark.parametrize("wrong", [None, True, 1, ["x"], {}])
def test_non_string_signature(wrong: Any) -> None:
    """A signature must be a string; one that does not verify is refused elsewhere."""
    assert is_refused({**command("QUERY_EVENTS"), "signature": wrong})
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
def test_invalid_header_members(header: dict[str, Any]) -> None:
    """Numbers are numbers, nonces look like UUIDs, names are strings."""
    assert is_refused(command("QUERY_EVENTS", **header))
    assert is_refused(command("TWO_WAY_PRIVATE", **header))
    assert is_refused(command("DELETE_PUBLIC_EVENT", **header))


@pytest.mark.parametrize(
    "member", ["channel", "sender_did", "sender_signing_key_id", "recipient_did", "timestamp", "nonce"]
)
def test_missing_header_member(member: str) -> None:
    """All six are required (DCTRL-0004 4.2)."""
    document = command("QUERY_EVENTS")
    del document["header"][member]
    assert is_refused(document)


@pytest.mark.parametrize("nonce", [NONCE.upper(), "00000000-0000-0000-0000-000000000000", "f" * 8 + NONCE[8:]])
def test_nonce_may_be_any_uuid(nonce: str) -> None:
    """Any version and case; its spelling is kept, as it is signed (reference 6.1)."""
    assert parse(command("QUERY_EVENTS", nonce=nonce)).header.nonce == nonce


@pytest.mark.parametrize(
    "did", ["did:x: y", "did:x:é", "did:x:\n", "did:x:\x7f", "nobody", "did:x:".ljust(100_000, "y")]
)
def test_any_string_may_claim_to_be_a_did(did: str) -> None:
    """Resolution is checked elsewhere, with one refusal for all failures."""
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
def test_payload_members(name: str, path: tuple[Step, ...]) -> None:
    """Optional members may be absent, others not; none may be null or an unexpected boolean."""
    document = command(name)
    value = value_at(document["payload"], path)
    del value_at(document["payload"], path[:-1])[path[-1]]
    assert is_refused(document) is (path not in OPTIONAL.get(name, set()) | PAGES)
    assert is_refused(change_payload(name, path, None))
    assert is_refused(change_payload(name, path, True)) is (value is not True)
    assert is_refused(change_payload(name, path, {"a": 1})) is not isinstance(value, dict) or path[-1] not in (
        "filter",
        "pagination",
    )


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name in [*DIRECT, *PUBLIC] for path in paths(payload(name))]
)
def test_numbers_and_strings_are_not_converted(name: str, path: tuple[Step, ...]) -> None:
    """A number in place of a string, and digits in place of a number, are refused."""
    value = value_at(command(name)["payload"], path)
    assert is_refused(change_payload(name, path, 1)) is isinstance(value, bool | str | dict | list)
    assert is_refused(change_payload(name, path, "1")) is (
        not isinstance(value, str) or path[-1] in ("type", "service")
    )


def test_query_defaults() -> None:
    """Defaults: no filter, and the first ten (DCTRL-0004 9.1)."""
    given = parse({**command("QUERY_EVENTS"), "payload": {"type": "QUERY_EVENTS"}}).payload
    assert isinstance(given, commands.QueryEvents)
    assert (given.pagination.page, given.pagination.page_size) == (0, 10)
    assert given.filter == commands.EventsFilter()
    assert given.filter.encrypted_tags == ()
    assert given.filter.participant_did is None
    assert given.filter.unprocessed_only is False


@pytest.mark.parametrize("pagination", [{"page": 0, "page_size": 1}, {"page": 2**53 - 1, "page_size": 1000}])
def test_largest_page(pagination: dict[str, int]) -> None:
    """The offset of the last possible page is a 64-bit integer (reference 9)."""
    given = parse(change_payload("QUERY_EVENTS", ("pagination",), pagination)).payload
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
def test_invalid_pages(pagination: Any) -> None:
    """Pages out of bounds are refused, not clipped: the reply must name the requested page."""
    assert is_refused(change_payload("QUERY_EVENTS", ("pagination",), pagination))


def test_integral_floats_are_integers() -> None:
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
def test_list_length_limit(name: str, path: tuple[Step, ...], item: Any) -> None:
    """Lists may be empty and have at most 1000 items."""
    assert not is_refused(change_payload(name, path, []))
    assert not is_refused(change_payload(name, path, [item] * 1000))
    assert is_refused(change_payload(name, path, [item] * 1001))
    assert is_refused(change_payload(name, path, [item, 1]))
    assert is_refused(change_payload(name, path, [item, None]))


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
def test_string_length_limit(name: str, path: tuple[Step, ...]) -> None:
    """Ids, tags and keys have at most 1024 characters; payloads are bounded by the body only."""
    assert not is_refused(change_payload(name, path, TOO_LONG[1:]))
    assert is_refused(change_payload(name, path, TOO_LONG))


def test_contract_with_oneself() -> None:
    """Refused (reference 7.3)."""
    for name in ("SAVE_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"):
        path = ("signed_communication_contract", "communication_contract", "recipient_did")
        assert is_refused(change_payload(name, path, ALICE))


def test_empty_channel_id() -> None:
    """A channel id must not be empty (reference 10.1)."""
    assert is_refused(change_payload("PUBLISH_PUBLIC_EVENT", ("channel_id",), ""))


def test_models_are_immutable() -> None:
    """Parsed commands cannot be changed."""
    given = parse(command("QUERY_EVENTS")).payload
    with pytest.raises(ValueError, match="frozen"):
        given.pagination.page = 7  # type: ignore[union-attr]


def test_signed_content() -> None:
    """Header and payload exactly as received, unknown members included, nothing added (reference 4)."""
    document = command("QUERY_EVENTS", later={"a": 1})
    document["payload"] = {"type": "QUERY_EVENTS", "filter": {"new": None}, "é": 1.0}
    document["unsigned"] = 1
    given = parse(document)
    assert given.signed == canonicalize({"header": document["header"], "payload": document["payload"]})
    assert b'"filter":{"new":null}' in given.signed
    assert given.document == document["payload"]


def test_published_vector() -> None:
    """The signature of the reference, section 16, is over these bytes."""
    payload_ = {"type": "QUERY_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 10}}
    given = parse({**command("QUERY_EVENTS"), "payload": payload_})
    assert given.signed.startswith(b'{"header":{"channel":"DIRECT_AUTHENTICATED","nonce":"6f1c1d52')
    assert given.signed.endswith(
        b'"timestamp":1760000000000},"payload":{"filter":{},"pagination":{"page":0,"page_size":10},"type":"QUERY_EVENTS"}}'
    )


@pytest.mark.parametrize("name", [*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"])
def test_repr_hides_secrets(name: str) -> None:
    """Payloads, tags, keys and signatures are not in representations or errors."""
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
def test_malformed_json(raw: bytes) -> None:
    """Invalid, ambiguous and endlessly nested JSON is refused like any other."""
    with pytest.raises(InvalidCommand):
        parse_command(raw)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(raw: bytes) -> None:
    """Arbitrary bytes are refused without another error."""
    for read, error in ((parse_command, InvalidCommand), (parse_authentication_request, InvalidMessage)):
        with pytest.raises(error):
            read(raw)
    is_didcomm_envelope(raw)


COMMANDS = st.sampled_from([*DIRECT, *PUBLIC, "TWO_WAY_PRIVATE"]).map(command)


@given(COMMANDS, st.data())
def test_arbitrary_values(document: dict[str, Any], data: st.DataObject) -> None:
    """With any JSON value at any path, the command is parsed or refused; the signed content is unchanged."""
    document = deepcopy(document)
    path = data.draw(st.sampled_from([*paths(document)]))
    value_at(document, path[:-1])[path[-1]] = data.draw(JSON_VALUES)
    with suppress(InvalidCommand):
        given = parse(document)
        signed = {"header": document["header"], "payload": document["payload"]}
        assert json.loads(given.signed) == json.loads(canonicalize(signed))


@given(COMMANDS, st.data())
def test_unknown_members_are_ignored(document: dict[str, Any], data: st.DataObject) -> None:
    """Newer clients may add members anywhere (reference 4)."""
    document = deepcopy(document)
    objects = [(), *(path for path in paths(document) if isinstance(value_at(document, path), dict))]
    value_at(document, data.draw(st.sampled_from(objects)))["x-later"] = data.draw(JSON_VALUES)
    parse(document)


def test_socket_authentication() -> None:
    """The signed content has neither the type nor unknown members (DCTRL-0004 10.2)."""
    request, signed = parse_authentication_request(json.dumps(authenticate(later=1)).encode())
    assert (request.did, request.signing_key_id, request.timestamp) == (ALICE, f"{ALICE}#signing", 1760000000000)
    assert (request.nonce, request.signature) == (NONCE, SIGNATURE)
    names = ("did", "signing_key_id", "timestamp", "nonce")
    assert signed == canonicalize({name: authenticate()[name] for name in names})
    assert SIGNATURE not in repr(request)


@pytest.mark.parametrize("member", ["type", "did", "signing_key_id", "timestamp", "nonce", "signature"])
def test_missing_authentication_member(member: str) -> None:
    """All members are required, with the right types."""
    for wrong in [*NEITHER, "" if member != "signature" else 1]:
        with pytest.raises(InvalidMessage):
            parse_authentication_request(json.dumps(authenticate(**{member: wrong})).encode())
    message = authenticate()
    del message[member]
    with pytest.raises(InvalidMessage):
        parse_authentication_request(json.dumps(message).encode())


@pytest.mark.parametrize("wrong", [{"type": "PONG"}, {"timestamp": "1760000000000"}, {"nonce": "1"}])
def test_invalid_authentication(wrong: dict[str, Any]) -> None:
    """Any other first frame fails."""
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
def test_first_frame_selects_protocol(frame: bytes, envelope: bool) -> None:
    """A JSON object with `protected` is a JWE, nothing else is."""
    assert is_didcomm_envelope(frame) is envelope
