"""
DIDComm plaintext messages: tolerant parsing, strict serialisation, and the source text of attachments (reference
section 2 and 4.4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from mediatord.errors import InvalidBody, InvalidPlaintext
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.protocol.encoding import EACH_ITEM, JSONSource

PLAINTEXT_MEDIA_TYPE = "application/didcomm-plain+json"
PROBLEM_REPORT = "https://didcomm.org/report-problem/2.0/problem-report"

DIDCOMM_ORG = "https://didcomm.org/"
# Of protocols of our own.
_OWN_NAMESPACE = "urn:mediatord:"
_TYPE_URI = re.compile(r"(.*?)([a-z0-9._-]+)/(\d[^/]*)/([a-z0-9._-]+)", re.IGNORECASE | re.DOTALL)
MAX_ID = 128
# With their maximum lengths; longer ones count as absent.
_OPTIONAL_TEXTS = (
    ("thid", MAX_ID),
    ("return_route", MAX_ID),
    ("return_route_thread", MAX_ID),
    ("from_prior", 16_384),
)
_MAX_TYPE = 512


@dataclass(frozen=True, slots=True)
class MessageType:
    """
    A parsed message type URI; names are normalised, since they compare without case and punctuation (reference 2.1).

    :param protocol: normalised protocol name, such as `coordinatemediation`; with the prefix of the URI if it is one
        of our own.
    :param major: major version; -1 for a URI outside didcomm.org and our own namespace.
    :param name: normalised message name, such as `mediaterequest`.
    :ivar key: key of dispatch tables.
    """

    uri: str
    protocol: str = ""
    major: int = -1
    name: str = ""
    key: tuple[str, int, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.protocol, self.major, self.name))

    @classmethod
    def parse(cls, uri: str) -> MessageType:
        """Parse a type URI. Never fails: an invalid URI becomes a type that no protocol has."""
        return _parse_type(uri) if len(uri) <= _MAX_TYPE else cls(uri)


@lru_cache(256)
def _parse_type(uri: str) -> MessageType:
    match = _TYPE_URI.fullmatch(uri)
    prefix = "" if match is None else match[1].lower()
    if match is None or prefix not in (DIDCOMM_ORG, _OWN_NAMESPACE):
        return MessageType(uri)
    protocol, major = _normalize_name(match[2]), re.match(r"\d{1,4}(?=\.|$)", match[3])
    if prefix == _OWN_NAMESPACE:
        protocol = prefix + protocol
    return MessageType(uri, protocol, int(major[0]) if major else -1, _normalize_name(match[4]))


def _normalize_name(name: str) -> str:
    return re.sub(r"[._-]", "", name.lower())


@dataclass(frozen=True, slots=True)
class Message:
    """
    The headers of a plaintext message that a mediator uses.

    :param body: None if present but not an object; `{}` if absent.
    :param attachments: None if absent or not a list of objects.
    :param created_time: seconds since the epoch, as is `expires_time`.
    :param source: the serialised plaintext.
    """

    id: str
    type: MessageType
    body: dict[str, Any] | None = field(repr=False)
    sender: str | None = None
    to: tuple[str, ...] = ()
    thid: str | None = None
    created_time: float | None = None
    expires_time: float | None = None
    return_route: str | None = None
    return_route_thread: str | None = None
    from_prior: str | None = field(default=None, repr=False)
    delay_milli: float = 0
    attachments: tuple[dict[str, Any], ...] | None = field(default=None, repr=False)
    source: bytes = field(default=b"", repr=False, compare=False)

    @property
    def thread(self) -> str:
        """Thread id: `thid`, else `id`."""
        return self.thid or self.id

    def require_body(self) -> dict[str, Any]:
        """
        The body.

        :raise InvalidBody: present but not an object.
        """
        if self.body is None:
            raise InvalidBody
        return self.body


def parse_message(raw: bytes) -> Message:
    """
    Parse a serialised plaintext message.

    :raise InvalidPlaintext: not a JSON object, or not a message.
    """
    try:
        value = encoding.loads_object(raw)
    except ValueError:
        raise InvalidPlaintext from None
    return parse_message_object(value, raw)


def parse_message_object(value: Mapping[str, Any], source: bytes) -> Message:
    """
    Read a parsed message; unknown headers and malformed optional headers are ignored.

    :param source: the text that `value` was parsed from.
    :raise InvalidPlaintext: no usable `id` or `type`, or a malformed `from` or `to`.
    """
    id_, uri = value.get("id"), value.get("type")
    if not (isinstance(id_, str) and 0 < len(id_) <= MAX_ID and isinstance(uri, str)):
        raise InvalidPlaintext
    sender = value.get("from")
    if not (sender is None or (isinstance(sender, str) and (is_did(sender) or is_did(strip_did_url(sender))))):
        raise InvalidPlaintext
    body, delay, attachments = value.get("body"), value.get("delay_milli"), value.get("attachments")
    to: Any = () if value.get("to") is None else value["to"]
    to = (to,) if isinstance(to, str) else to
    texts: dict[str, str] = {}
    for name, longest in _OPTIONAL_TEXTS:
        text = value.get(name)
        if isinstance(text, str) and 0 < len(text) <= longest:
            texts[name] = text
    if not (isinstance(to, (list, tuple)) and set(map(type, to)) <= {str}):
        raise InvalidPlaintext
    if not isinstance(attachments, list) or not set(map(type, attachments)) <= {dict}:
        attachments = None
    return Message(
        id=id_,
        type=MessageType.parse(uri),
        body={} if body is None else body if isinstance(body, dict) else None,
        sender=sender,
        to=tuple(to),
        thid=texts.get("thid"),
        created_time=parse_time(value["created_time"]) if "created_time" in value else None,
        expires_time=parse_time(value["expires_time"]) if "expires_time" in value else None,
        return_route=texts.get("return_route"),
        return_route_thread=texts.get("return_route_thread"),
        from_prior=texts.get("from_prior"),
        delay_milli=delay if isinstance(delay, (int, float)) and not isinstance(delay, bool) else 0,
        attachments=None if attachments is None else tuple(attachments),
        source=source,
    )


def parse_time(value: object) -> float | None:
    """
    Parse a time as clients write it: integer, float, numeric string or ISO 8601 text; seconds since the epoch.

    None for anything else: a malformed time counts as absent (reference 2.1).
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e15 else None
    if not isinstance(value, str) or len(value) > 64:
        return None
    if re.fullmatch(r"\d{1,15}(\.\d+)?", value):
        return float(value)
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """
    A message to send; constant headers are added by :meth:`plaintext`.

    :param attachments: complete attachment objects; omitted if empty.
    """

    id: str
    type: str
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    thid: str | None = None
    pthid: str | None = None
    ack: Sequence[str] = ()
    attachments: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    def plaintext(self, *, sender: str | None, to: str | None, created_time: int) -> bytes:
        """Serialise in the strict form that every client reads (reference 2.1, column "Emit")."""
        value: dict[str, Any] = {"id": self.id, "type": self.type, "typ": PLAINTEXT_MEDIA_TYPE}
        if sender is not None:
            value["from"] = sender
        if to is not None:
            value["to"] = [to]
        if self.thid is not None:
            value["thid"] = self.thid
        if self.pthid is not None:
            value["pthid"] = self.pthid
        if self.ack:
            value["ack"] = list(self.ack)
        value["created_time"] = created_time
        value["body"] = dict(self.body)
        if self.attachments:
            value["attachments"] = list(self.attachments)
        return encoding.dumps(value)


def extract_attachment_json(message: Message) -> list[bytes | None]:
    """
    Source text of `data.json` of each attachment; None where an attachment has none.

    :raise ValueError: more members than any message has, or nested too deep.
    """
    attachments = message.attachments or ()
    if not any(_has_json(one.get("data")) for one in attachments):
        return [None] * len(attachments)
    source = JSONSource(message.source)
    spans = source.find("attachments", EACH_ITEM, "data", "json")
    return [None if span is None else source.text(span) for span in spans]


def _has_json(data: object) -> bool:
    return isinstance(data, dict) and "json" in data
