"""Routing 2.0: reading a forward, and writing one when mediatord is the sender (reference section 4)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from mediatord.errors import BadAttachment, ForwardExpired, LinkedAttachment, NextMissing
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.attachments import json_texts
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Draft, Message
from mediatord.protocol.json_source import depth

FORWARD = "https://didcomm.org/routing/2.0/forward"
MAX_NEXT = 8192
# Each is a message of its own and paid for as one; nobody is allowed more than 60 a minute.
MAX_ATTACHMENTS = 20
# Objects and arrays within one another in a payload, the outermost counted. An envelope has four.
MAX_DEPTH = 254

Opaque = tuple[bytes, Literal["json", "base64"]]


class Expiring(Protocol):
    """What may say when it expires; :class:`Message`."""

    @property
    def expires_time(self) -> float | None: ...


def read_next(message: Message) -> str:
    """
    `body.next`, a DID, DID URL or key.

    :raise NextMissing: it is absent, empty, too long or not a string.
    """
    next_ = (message.body or {}).get("next")
    if isinstance(next_, str) and 0 < len(next_) <= MAX_NEXT:
        return next_
    raise NextMissing


def read_payloads(message: Message, *, encrypted_only: bool = True) -> list[Opaque]:
    """
    Every attachment as an opaque payload, in order: bytes, and the form they came in (reference 4.4).

    :raise BadAttachment: there is none, or one is unreadable or not encrypted.
    :raise LinkedAttachment: one has its data elsewhere; mediatord fetches nothing a sender names.
    """
    if not message.attachments or len(message.attachments) > MAX_ATTACHMENTS:
        raise BadAttachment
    try:
        texts = json_texts(message)
    except ValueError:
        raise BadAttachment from None
    return [
        read_payload(one.get("data"), text, encrypted_only)
        for one, text in zip(message.attachments, texts, strict=True)
    ]


def read_payload(data: object, text: bytes | None, encrypted_only: bool) -> Opaque:
    """
    The same for the `data` of one attachment.

    :param text: how its `json` is written, if it has one.
    :raise BadAttachment: as :func:`read_payloads`; likewise LinkedAttachment.
    """
    if not isinstance(data, dict):
        raise BadAttachment
    if "json" in data:
        value = data["json"]
        if text is None or not (isinstance(value, dict) and is_payload(value, text, encrypted_only)):
            raise BadAttachment
        return text, "json"
    if "base64" in data:
        return _read_base64(data, encrypted_only), "base64"
    raise LinkedAttachment if "links" in data else BadAttachment


def _read_base64(data: Mapping[str, Any], encrypted_only: bool) -> bytes:
    text = data["base64"]
    if not isinstance(text, str):
        raise BadAttachment
    try:
        payload = jsontext.b64_lenient_decode(text)
        value = jsontext.loads_object(payload)
    except ValueError:
        raise BadAttachment from None
    if not is_payload(value, payload, encrypted_only) or not _hash_agrees(data.get("hash"), payload):
        raise BadAttachment
    return payload


def is_payload(value: Mapping[str, Any], text: bytes, encrypted_only: bool) -> bool:
    """
    Whether the shape is that of an envelope, nested no deeper than recipients can be expected to read; the headers of
    the inner message are none of our business.
    """
    if encrypted_only and "ciphertext" not in value:
        if "payload" not in value or not ("signatures" in value or "signature" in value):
            return False
    return text.count(b"{") + text.count(b"[") <= MAX_DEPTH or depth(text) <= MAX_DEPTH


def _hash_agrees(hash_: object, payload: bytes) -> bool:
    """Check a hexadecimal sha2-256 multihash; other functions and encodings are not ours to judge."""
    if not isinstance(hash_, str) or len(hash_) != 68 or not hash_.startswith("1220"):
        return True
    return hash_[4:].lower() == hashlib.sha256(payload).hexdigest()


def expiry(message: Expiring, now: float, ttl: float) -> float:
    """
    When a forward stops waiting: its own `expires_time`, but never later than the TTL (reference 4.5).

    :raise ForwardExpired: that time has passed.
    """
    if message.expires_time is None:
        return now + ttl
    if message.expires_time <= now:
        raise ForwardExpired
    return min(now + ttl, message.expires_time)


def delay(message: Message, longest: float, uniform: Callable[[float, float], float]) -> float:
    """
    Seconds to hold a forward back: `delay_milli`, capped; a negative one is a random part of its size.

    :param longest: cap in seconds; 0 delivers everything at once.
    :param uniform: source of randomness, as `random.uniform`.
    """
    seconds = message.delay_milli / 1000
    if seconds < 0:
        return uniform(0.0, min(-seconds, longest))
    return min(seconds, longest)


def forward_of(payload: bytes, next_: str, id_: str) -> Draft:
    """A forward that carries one encrypted payload to `next_` as its one `json` attachment (reference 4.6)."""
    return Draft(
        id=id_,
        type=FORWARD,
        body={"next": next_},
        attachments=[{"id": f"{id_}-0", "media_type": ENCRYPTED_TYPE, "data": {"json": jsontext.verbatim(payload)}}],
    )
