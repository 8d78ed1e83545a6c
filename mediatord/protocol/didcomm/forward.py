"""
Routing 2.0 forwards (reference section 4): reading, writing, and a fast parser for the common kind.

:class:`FastForwardParser` handles an anoncrypt to one of the mediator's X25519 keys that contains one forward. It
    reads such a message exactly as :mod:`~mediatord.protocol.didcomm.jwe` and
    :mod:`~mediatord.protocol.didcomm.message` do, and leaves everything else, invalid messages included, to them: the
    general path.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from mediatord.errors import ExpiredForward, InvalidAttachment, LinkedAttachment, MissingNext
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.jwe import (
    CIPHERTEXT_PLACEHOLDER,
    ENCRYPTED_MEDIA_TYPE,
    FALLBACK_ERRORS,
    MIN_CUT_SIZE,
    cut_ciphertext,
    open_plain_envelope,
    restore_ciphertext,
)
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm.message import MAX_ID, Message, OutgoingMessage, extract_attachment_json, parse_time
from mediatord.protocol.encoding import (
    MAX_MEMBERS,
    MAX_VALUES,
    check_value_count,
    measure_nesting_depth,
)

FORWARD = "https://didcomm.org/routing/2.0/forward"
MAX_NEXT = 8192
# Each attachment is charged as one message, and no sender is allowed more than 60 messages a minute by default.
MAX_ATTACHMENTS = 20
# Nesting depth of a payload, the outermost object counted. An envelope has four levels.
MAX_PAYLOAD_DEPTH = 254

ForwardPayload = tuple[bytes, Literal["json", "base64"]]


def read_next(message: Message) -> str:
    """
    The recipient in `body.next`: a DID, DID URL or key.

    :raise MissingNext: absent, empty, too long or not a string.
    """
    next_ = (message.body or {}).get("next")
    if isinstance(next_, str) and 0 < len(next_) <= MAX_NEXT:
        return next_
    raise MissingNext


def read_payloads(message: Message, *, encrypted_only: bool = True) -> list[ForwardPayload]:
    """
    All attachments as opaque payloads, in order, each with the form it arrived in (reference 4.4).

    :raise InvalidAttachment: there is none, or one is unreadable or not encrypted.
    :raise LinkedAttachment: one is only a link; mediatord fetches nothing that a sender names.
    """
    if not message.attachments or len(message.attachments) > MAX_ATTACHMENTS:
        raise InvalidAttachment
    try:
        texts = extract_attachment_json(message)
    except ValueError:
        raise InvalidAttachment from None
    return [
        read_payload(one.get("data"), text, encrypted_only)
        for one, text in zip(message.attachments, texts, strict=True)
    ]


def read_payload(data: object, text: bytes | None, encrypted_only: bool) -> ForwardPayload:
    """
    The payload in `data` of one attachment.

    :param text: source text of its `json` member, if present.
    :raise InvalidAttachment: as :func:`read_payloads`; likewise LinkedAttachment.
    """
    if not isinstance(data, dict):
        raise InvalidAttachment
    if "json" in data:
        value = data["json"]
        if text is None or not (isinstance(value, dict) and is_payload(value, text, encrypted_only)):
            raise InvalidAttachment
        return text, "json"
    if "base64" in data:
        return _read_base64(data, encrypted_only), "base64"
    raise LinkedAttachment if "links" in data else InvalidAttachment


def _read_base64(data: Mapping[str, Any], encrypted_only: bool) -> bytes:
    text = data["base64"]
    if not isinstance(text, str):
        raise InvalidAttachment
    try:
        payload = encoding.decode_lenient_base64(text)
        value = encoding.loads_object(payload)
    except ValueError:
        raise InvalidAttachment from None
    if not is_payload(value, payload, encrypted_only) or not _matches_hash(data.get("hash"), payload):
        raise InvalidAttachment
    return payload


def is_payload(value: Mapping[str, Any], text: bytes, encrypted_only: bool) -> bool:
    """
    Whether a value has the shape of an envelope and a nesting depth that recipients can parse.

    The headers of the inner message are not inspected.
    """
    if encrypted_only and "ciphertext" not in value:
        if "payload" not in value or not ("signatures" in value or "signature" in value):
            return False
    return (
        text.count(b"{") + text.count(b"[") <= MAX_PAYLOAD_DEPTH or measure_nesting_depth(text) <= MAX_PAYLOAD_DEPTH
    )


def _matches_hash(hash_: object, payload: bytes) -> bool:
    """Check a hexadecimal sha2-256 multihash; other hash functions and encodings are accepted unchecked."""
    if not isinstance(hash_, str) or len(hash_) != 68 or not hash_.startswith("1220"):
        return True
    return hash_[4:].lower() == hashlib.sha256(payload).hexdigest()


def compute_expiry(expires_time: float | None, now: float, ttl: float) -> float:
    """
    When a queued forward expires: at its `expires_time`, and no later than the TTL (reference 4.5).

    :raise ExpiredForward: `expires_time` has passed.
    """
    if expires_time is None:
        return now + ttl
    if expires_time <= now:
        raise ExpiredForward
    return min(now + ttl, expires_time)


def compute_delay(message: Message, longest: float, uniform: Callable[[float, float], float]) -> float:
    """
    Seconds by which a forward is delayed: `delay_milli`, capped; a negative value means a random delay up to its
    absolute value.

    :param longest: cap in seconds; 0 delivers immediately.
    :param uniform: source of randomness, such as `random.uniform`.
    """
    seconds = message.delay_milli / 1000
    if seconds < 0:
        return uniform(0.0, min(-seconds, longest))
    return min(seconds, longest)


def make_forward(payload: bytes, next_: str, id_: str) -> OutgoingMessage:
    """A forward of one encrypted payload to `next_`, as a single `json` attachment (reference 4.6)."""
    return OutgoingMessage(
        id=id_,
        type=FORWARD,
        body={"next": next_},
        attachments=[
            {
                "id": f"{id_}-0",
                "media_type": ENCRYPTED_MEDIA_TYPE,
                "data": {"json": encoding.wrap_json_fragment(payload)},
            }
        ],
    )


# Replaces the payload before the message is parsed. It is random, so a member with this value is the one that was
# replaced.
_PAYLOAD_PLACEHOLDER = secrets.token_hex(16)
_PAYLOAD_PLACEHOLDER_JSON = orjson.dumps(_PAYLOAD_PLACEHOLDER)
# Matches an envelope as payload: an object with nested objects. Possessive and without repetition of alternatives,
# hence linear time on any input.
_STRING_PATTERN = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OBJECT_PATTERN = rb"\{(?:[^\"{}]++|%b)*+\}" % _STRING_PATTERN
for _ in range(4):
    _OBJECT_PATTERN = rb"\{(?:[^\"{}]++|%b|%b)*+\}" % (_STRING_PATTERN, _OBJECT_PATTERN)
_match_json_member = re.compile(rb'"json"[ \t\n\r]*+:[ \t\n\r]*+(%b)' % _OBJECT_PATTERN, re.DOTALL).match


class FastForward(NamedTuple):
    """
    A forward without an authenticated or claimed sender.

    :param next: `body.next`.
    :param payload: bytes to store; `form` is how they arrived.
    :param id: message id; `thread` is the thread id that a reply would refer to.
    :param expires_time: seconds since the epoch, if any.
    :param kid: the mediator's key id, as the sender spelled it.
    """

    next: str
    payload: bytes
    form: Literal["json", "base64"]
    id: str
    thread: str
    expires_time: float | None
    kid: str

    def __repr__(self) -> str:
        """Omits the payload."""
        return f"FastForward(next={self.next!r}, form={self.form!r})"


class FastForwardParser:
    """
    Parser for the most common forwards.

    :param agreement_keys: the mediator's private keys by the kids that may denote them, the likeliest first.
    """

    def __init__(self, agreement_keys: Mapping[str, Sequence[PrivateKey]]) -> None:
        self._agreement_keys = agreement_keys

    def read(self, raw: bytes) -> FastForward | None:
        """
        Parse and decrypt a forward; None if the general path has to handle it. Never raises.

        No key is used unless the envelope has the expected form.
        """
        opened = open_plain_envelope(raw, self._agreement_keys)
        try:
            return None if opened is None else _parse_forward(opened.plaintext, opened.kid)
        except FALLBACK_ERRORS:
            return None


def _check_plain_string(text: bytes) -> bytes:
    """
    The text, if it is the content of a JSON string without escapes, which takes less time than parsing it.

    :raise ValueError: it is not.
    """
    if len(orjson.dumps(text.decode("ascii"))) != len(text) + 2:
        raise ValueError("escapes")
    return text


# The text that may be the payload, its parsed value, and the ciphertext that was replaced in both.
_PayloadCandidate: TypeAlias = tuple[bytes, Any, bytes | None]


def _split_payload(plaintext: bytes) -> tuple[bytes, _PayloadCandidate | None]:
    """
    Replace the `json` payload in a message by a placeholder; return the message and the payload.

    The end of the payload is a guess: at the last braces, or after as many nested objects as an envelope has.
    :func:`_check_payload` verifies it.

    :raise ValueError: no guess is possible, or there are too many values.
    """
    text, ciphertext = plaintext, None
    if len(plaintext) >= MIN_CUT_SIZE:
        text, ciphertext = cut_ciphertext(plaintext, _check_plain_string)
    if len(text) > MAX_VALUES:
        check_value_count(text)
    at = text.find(b'"json"')
    if at < 0:
        return plaintext, None
    start, end = text.find(b"{", at), text.rfind(b"}}}", at) + 1
    try:
        envelope = orjson.loads(text[start:end])
    except orjson.JSONDecodeError:
        found = _match_json_member(text, at)
        if found is None:
            raise ValueError("another layout") from None
        start, end = found.span(1)
        envelope = orjson.loads(text[start:end])
    around = b"".join((text[:start], _PAYLOAD_PLACEHOLDER_JSON, text[end:]))
    if around.count(b",") >= MAX_MEMBERS:
        raise ValueError("many members")
    return around, (text[start:end], envelope, ciphertext)


def _check_payload(data: Any, guess: _PayloadCandidate | None) -> ForwardPayload:
    """
    The payload of an attachment, if the guess was right.

    :raise ValueError: it was wrong, or this is not an envelope; likewise LookupError and TypeError.
    """
    if guess is None:
        return read_payload(data, None, True)
    text, envelope, ciphertext = guess
    if data["json"] != _PAYLOAD_PLACEHOLDER or type(envelope) is not dict or not is_payload(envelope, text, True):
        raise ValueError("another layout")
    if ciphertext is None:
        return text, "json"
    if envelope["ciphertext"] != CIPHERTEXT_PLACEHOLDER:
        raise ValueError("another ciphertext")
    return restore_ciphertext(text, ciphertext), "json"


def _parse_forward(plaintext: bytes, kid: str) -> FastForward | None:
    around, guess = _split_payload(plaintext)
    message = orjson.loads(around)
    has = message.get
    id_, next_, attachments = message["id"], message["body"]["next"], message["attachments"]
    to, thread, expires_time = has("to"), has("thid"), has("expires_time")
    if message["type"] != FORWARD or "ciphertext" in message or "payload" in message:
        return None
    if has("from") is not None or has("delay_milli"):
        return None
    if type(id_) is not str or not 0 < len(id_) <= MAX_ID or type(next_) is not str or not 0 < len(next_) <= MAX_NEXT:
        return None
    if to is not None and (type(to) is not list or len(to) != 1 or type(to[0]) is not str):
        return None
    if type(attachments) is not list:
        return None
    (attachment,) = attachments
    payload, form = _check_payload(attachment["data"], guess)
    if thread is None or type(thread) is not str or not 0 < len(thread) <= MAX_ID:
        thread = id_
    if expires_time is not None:
        expires_time = parse_time(expires_time)
    return FastForward(next_, payload, form, id_, thread, expires_time, kid)
