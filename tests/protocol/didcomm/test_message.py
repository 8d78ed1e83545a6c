"""Plaintext headers: tolerant parsing, strict writing (reference section 2)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import InvalidPlaintext
from mediatord.protocol.didcomm.message import MessageType, OutgoingMessage, parse_message, parse_time


def plaintext(**headers: object) -> bytes:
    return json.dumps({"id": "1", "type": "https://didcomm.org/empty/1.0/empty", **headers}).encode()


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        (
            "https://didcomm.org/coordinate-mediation/3.0/mediate-request",
            ("coordinatemediation", 3, "mediaterequest"),
        ),
        (
            "https://didcomm.org/Coordinate_Mediation/2.7/MediateRequest",
            ("coordinatemediation", 2, "mediaterequest"),
        ),
        ("https://didcomm.org/unsupported-protocol", ("", -1, "")),
        ("https://example.org/routing/2.0/forward", ("", -1, "")),
        ("https://didcomm.org.evil.example/routing/2.0/forward", ("", -1, "")),
        ("https://didcomm.org/routing/2x/forward", ("routing", -1, "forward")),
        ("", ("", -1, "")),
    ],
)
def test_type_comparison_ignores_case_and_punctuation(uri: str, key: tuple[str, int, str]) -> None:
    """Names ignore case and punctuation, versions compare by major number, one base URI counts (2.1)."""
    assert MessageType.parse(uri).key == key


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"id":"1"}',
        b'{"type":"t"}',
        b'{"id":1,"type":"t"}',
        b'{"id":"","type":"t"}',
        b'{"id":"1","type":null}',
        json.dumps({"id": "x" * 129, "type": "t"}).encode(),
        b'{"id":"1","type":"t","from":["did:a:b"]}',
        b'{"id":"1","type":"t","to":[1]}',
        b'{"id":"1","type":"t","to":{}}',
    ],
)
def test_invalid_messages(raw: bytes) -> None:
    """Without a usable `id` and `type` it is no message (reference section 11 row 10)."""
    with pytest.raises(InvalidPlaintext):
        parse_message(raw)


def test_tolerates_headers_of_released_clients() -> None:
    """A string `to`, no body, ISO times and unknown headers (2.1, 10.3)."""
    message = parse_message(
        plaintext(
            to="did:a:b", expires_time="2027-01-15T08:00:00Z", lang="fr", created_time=[], return_route=3, thid=7
        )
    )
    assert message.to == ("did:a:b",)
    assert message.body == {}
    assert message.expires_time == 1_800_000_000.0
    assert message.return_route is None
    assert message.thread == "1"


def test_distinguishes_missing_body_from_non_object() -> None:
    """A missing body is `{}`, anything but an object is an error that the protocol reports (2.1)."""
    assert parse_message(plaintext(body=[])).body is None
    assert parse_message(plaintext(body=None)).body == {}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_800_000_000, 1_800_000_000.0),
        (1.5, 1.5),
        ("1800000000", 1_800_000_000.0),
        ("2027-01-15T08:00:00", 1_800_000_000.0),
        ("2027-01-15T09:00:00+01:00", 1_800_000_000.0),
        (True, None),
        ("soon", None),
        (None, None),
        (1e300, None),
        ("9" * 65, None),
    ],
)
def test_time_formats(value: object, seconds: float | None) -> None:
    """Integers, floats, numeric strings and ISO 8601; unreadable ones are ignored (2.1)."""
    assert parse_time(value) == seconds


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists))
def test_arbitrary_times(value: object) -> None:
    """Any value gives seconds or nothing."""
    assert isinstance(parse_time(value), (float, type(None)))


@given(st.binary())
def test_arbitrary_bytes(raw: bytes) -> None:
    """Any bytes give a message or InvalidPlaintext."""
    try:
        parse_message(raw)
    except InvalidPlaintext:
        pass


@given(
    st.dictionaries(
        st.sampled_from(["id", "type", "body", "from", "to", "thid", "expires_time", "delay_milli", "attachments"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        ),
    )
)
def test_arbitrary_headers(headers: dict[str, object]) -> None:
    """Members of any type give a message or InvalidPlaintext."""
    try:
        parse_message(json.dumps(headers).encode())
    except InvalidPlaintext:
        pass


def test_written_messages_are_strict() -> None:
    """Full `typ`, an array `to`, integer times, a body even if empty, no nulls (2.1, column Emit)."""
    draft = OutgoingMessage(id="1", type="https://didcomm.org/empty/1.0/empty", thid="2")
    value = json.loads(draft.plaintext(sender="did:a:me", to="did:a:you", created_time=5))
    assert value == {
        "id": "1",
        "type": "https://didcomm.org/empty/1.0/empty",
        "typ": "application/didcomm-plain+json",
        "from": "did:a:me",
        "to": ["did:a:you"],
        "thid": "2",
        "created_time": 5,
        "body": {},
    }
