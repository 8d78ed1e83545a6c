"""Parsing and building forwards (reference section 4)."""

import base64
import hashlib
import json
from typing import Any

import pytest

from mediatord.errors import ExpiredForward, InvalidAttachment, LinkedAttachment, MediatorError, MissingNext
from mediatord.protocol.didcomm.forward import compute_delay, compute_expiry, make_forward, read_next, read_payloads
from mediatord.protocol.didcomm.message import Message, parse_message

NOW, TTL = 1_800_000_000.0, 259_200.0
INNER = {"ciphertext": "c", "protected": "p", "zebra": 1, "apple": "é"}


def forward(**headers: object) -> Message:
    value: dict[str, object] = {
        "id": "1",
        "type": "https://didcomm.org/routing/2.0/forward",
        "body": {"next": "did:a:b"},
    }
    return parse_message(json.dumps({**value, **headers}).encode())


def attached(*data: object) -> Message:
    return forward(attachments=[{"data": item} for item in data])


@pytest.mark.parametrize("body", [{}, {"next": ""}, {"next": ["did:a:b"]}, {"next": 1}, [], {"next": "d" * 8193}])
def test_invalid_next(body: object) -> None:
    """`next` missing, empty, too long or not a string (4.3; section 11 row 11)."""
    with pytest.raises(MissingNext):
        read_next(forward(body=body))


def test_json_payload_is_unchanged() -> None:
    """Member order, white space and escapes are kept (4.4)."""
    assert read_payloads(attached({"json": INNER})) == [
        (b'{"ciphertext": "c", "protected": "p", "zebra": 1, "apple": "\\u00e9"}', "json")
    ]


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_payload_is_unchanged(encode: Any) -> None:
    """Either alphabet, padded or not: the bytes are kept, with odd white space (4.4)."""
    payload = b'{ "ciphertext": "\xc3\xbf\xc3\xbe?>" }\n'
    for text in (encode(payload).decode(), encode(payload).decode().rstrip("="), encode(payload).decode() + "\n"):
        assert read_payloads(attached({"base64": text})) == [(payload, "base64")]


def test_json_takes_precedence_over_base64() -> None:
    """With both members `json` counts (2.2)."""
    assert read_payloads(attached({"json": INNER, "base64": "!"}))[0][1] == "json"


@pytest.mark.parametrize(
    ("attachments", "error"),
    [
        (None, InvalidAttachment),
        ([], InvalidAttachment),
        ("x", InvalidAttachment),
        ([1], InvalidAttachment),
        ([{}], InvalidAttachment),
        ([{"data": None}], InvalidAttachment),
        ([{"data": {"json": "text"}}], InvalidAttachment),
        ([{"data": {"json": {"type": "plain", "id": "1"}}}], InvalidAttachment),
        ([{"data": {"base64": "####"}}], InvalidAttachment),
        ([{"data": {"base64": base64.b64encode(b"not json").decode()}}], InvalidAttachment),
        ([{"data": {"base64": base64.b64encode(b'{"a":1}').decode()}}], InvalidAttachment),
        ([{"data": {"base64": 7}}], InvalidAttachment),
        ([{"data": {"links": ["https://a.example/x"], "hash": "1220"}}], LinkedAttachment),
        ([{"data": {"json": INNER}}, {"data": {}}], InvalidAttachment),
        ([{"data": {"json": INNER}}] * 21, InvalidAttachment),
    ],
)
def test_invalid_attachments(attachments: object, error: type[MediatorError]) -> None:
    """One unreadable, unencrypted or linked attachment refuses all (4.4; section 11 rows 12, 13)."""
    with pytest.raises(error):
        read_payloads(forward(attachments=attachments))


def test_accepts_signed_payload() -> None:
    """The check accepts a JWS, and can be disabled."""
    assert read_payloads(attached({"json": {"payload": "p", "signatures": []}}))
    assert read_payloads(attached({"json": {"a": 1}}), encrypted_only=False)


def test_hash_mismatch() -> None:
    """`hash` beside inline data is verified if it is sha2-256, else ignored (4.4)."""
    payload = json.dumps(INNER).encode()
    good = "1220" + hashlib.sha256(payload).hexdigest()
    text = base64.b64encode(payload).decode()
    assert read_payloads(attached({"base64": text, "hash": good}))
    assert read_payloads(attached({"base64": text, "hash": "zQmUnknown"}))
    with pytest.raises(InvalidAttachment):
        read_payloads(attached({"base64": text, "hash": "1220" + "0" * 64}))


def test_refuses_too_deep_payloads() -> None:
    """Payloads that could not be written again are refused."""
    deep: dict[str, object] = {"ciphertext": "c"}
    for _ in range(400):
        deep = {"ciphertext": deep}
    with pytest.raises(InvalidAttachment):
        read_payloads(attached({"json": deep}))


@pytest.mark.parametrize(
    ("expires_time", "expected"), [(None, NOW + TTL), (NOW + 10, NOW + 10), (NOW + 2 * TTL, NOW + TTL)]
)
def test_expiry_is_earlier_of_ttl_and_expires_time(expires_time: float | None, expected: float) -> None:
    """Never longer than the TTL (4.5)."""
    assert compute_expiry(forward(expires_time=expires_time).expires_time, NOW, TTL) == expected


def test_refuses_expired_forward() -> None:
    """A second ago, and at this second (section 11 row 14)."""
    for moment in (NOW - 1, NOW):
        with pytest.raises(ExpiredForward):
            compute_expiry(forward(expires_time=moment).expires_time, NOW, TTL)


@pytest.mark.parametrize(
    ("milli", "longest", "expected"),
    [
        (1500, 60, 1.5),
        (90_000, 60, 60),
        (-8000, 60, (0.0, 8.0)),
        (-90_000, 60, (0.0, 60)),
        (5000, 0, 0),
        (-5000, 0, (0.0, 0)),
        (10**30, 60, 60),
        (-(10**30), 60, (0.0, 60)),
        (True, 60, 0),
        ("7", 60, 0),
    ],
)
def test_delays(milli: object, longest: float, expected: object) -> None:
    """Positive as requested, negative a random part of it, both capped; 0 disables delays (4.5)."""
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return high

    held = compute_delay(forward(delay_milli=milli), longest, uniform)
    assert (drawn[0] if drawn else held) == expected


def test_built_forward_can_be_parsed() -> None:
    """For one routing key: one `json` attachment, and nothing that strict parsers refuse (4.6)."""
    payload = json.dumps(INNER, ensure_ascii=False, separators=(",", ":")).encode()
    draft = make_forward(payload, "did:a:next", "7")
    message = parse_message(draft.plaintext(sender=None, to="did:a:router", created_time=1))
    assert (read_next(message), message.to) == ("did:a:next", ("did:a:router",))
    assert read_payloads(message) == [(payload, "json")]
