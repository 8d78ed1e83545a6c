"""
Plaintext messages of DIDComm v1: flat JSON with `@type`, `@id` and decorators (Aries RFC 0008, 0020, 0092, 0348).

Types have two prefixes, which mean the same; answers have that of the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mediatord.errors import InvalidPlaintext
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import MAX_ID, parse_time
from mediatord.protocol.encoding import JSONSource

DIDCOMM_ORG = "https://didcomm.org/"
OLD_PREFIX = "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/"
# Prefix, family, version and name.
_TYPE_URI = re.compile(
    r"(https://didcomm\.org/|did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/)([a-z0-9._-]+)/(\d+)\.(\d+)/([a-z0-9._-]+)"
)
# Of protocols of our own, which have one prefix.
_OWN_TYPE_URI = re.compile(r"(urn:mediatord:)([a-z0-9._-]+)/(\d+)\.(\d+)/([a-z0-9._-]+)")
_MAX_TYPE = 512

# Key of a dispatch table: family, major version and name.
TypeKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class V1MessageType:
    """
    A parsed message type.

    :param prefix: of the URI; empty for one that no protocol has.
    :param family: such as `didexchange`; with the prefix if it is one of our own.
    :ivar key: key of dispatch tables.
    """

    prefix: str = ""
    family: str = ""
    major: int = -1
    minor: int = 0
    name: str = ""
    key: TypeKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.family, self.major, self.name))


# Requests to connect, of DID Exchange and of Connections.
HANDSHAKE_REQUESTS: frozenset[TypeKey] = frozenset((("didexchange", 1, "request"), ("connections", 1, "request")))


@lru_cache(256)
def parse_type(uri: str) -> V1MessageType:
    """Parse a type URI. Never fails: an invalid URI becomes a type that no protocol has."""
    match = _TYPE_URI.fullmatch(uri) or _OWN_TYPE_URI.fullmatch(uri)
    if match is None or len(match[3]) > 4 or len(match[4]) > 4:
        return V1MessageType()
    family = match[2] if match[1] in (DIDCOMM_ORG, OLD_PREFIX) else match[1] + match[2]
    return V1MessageType(match[1], family, int(match[3]), int(match[4]), match[5].replace("_", "-"))


@dataclass(frozen=True, slots=True)
class V1Message:
    """
    What a mediator uses of a message.

    :param members: all members, as parsed.
    :param thid: of `~thread`, as is `pthid`; None if absent or malformed.
    :param return_route: of `~transport`, as is `return_route_thread`.
    :param expires_time: of `~timing`; seconds since the epoch.
    :param source: the serialised plaintext.
    """

    id: str
    type: V1MessageType
    members: Mapping[str, Any] = field(repr=False)
    thid: str | None = None
    pthid: str | None = None
    return_route: str = "none"
    return_route_thread: str | None = None
    expires_time: float | None = None
    source: bytes = field(default=b"", repr=False, compare=False)

    @property
    def thread(self) -> str:
        """Thread id: `thid`, else `@id`."""
        return self.thid or self.id

    def source_of(self, member: str) -> bytes | None:
        """
        Source text of a member, byte by byte; None if there is none.

        :raise ValueError: more members than any message has, or nested too deep.
        """
        source = JSONSource(self.source)
        span = source.find(member)
        return None if span is None else source.text(span)


def parse_message(plaintext: bytes) -> V1Message:
    """
    Parse a serialised message; unknown members and malformed decorators are ignored.

    :raise InvalidPlaintext: not a JSON object, or no usable `@id` or `@type`.
    """
    try:
        value = encoding.loads_object(plaintext)
    except ValueError:
        raise InvalidPlaintext from None
    id_, uri = value.get("@id"), value.get("@type")
    if not (isinstance(id_, str) and 0 < len(id_) <= MAX_ID and isinstance(uri, str) and len(uri) <= _MAX_TYPE):
        raise InvalidPlaintext
    thread, transport, timing = (_read_object(value, name) for name in ("~thread", "~transport", "~timing"))
    return V1Message(
        id=id_,
        type=parse_type(uri),
        members=value,
        thid=_read_id(thread, "thid"),
        pthid=_read_id(thread, "pthid"),
        return_route=_read_id(transport, "return_route") or "none",
        return_route_thread=_read_id(transport, "return_route_thread"),
        expires_time=parse_time(timing["expires_time"]) if "expires_time" in timing else None,
        source=plaintext,
    )


def _read_object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _read_id(value: Mapping[str, Any], name: str) -> str | None:
    found = value.get(name)
    return found if isinstance(found, str) and 0 < len(found) <= MAX_ID else None


@dataclass(frozen=True, slots=True)
class V1Answer:
    """
    A message to send, without what depends on the one that it answers.

    :param type: without prefix, such as `trust_ping/1.0/ping_response`; a URN for a protocol of our own.
    :param members: all but `@type`, `@id` and `~thread`.
    :param thid: of `~thread`; None for that of the request.
    :param pthid: likewise; None for none.
    :param has_thread: whether it has a `~thread` at all.
    :param id: of the message; None for a new one.
    """

    type: str
    members: Mapping[str, Any] = field(default_factory=dict, repr=False)
    thid: str | None = None
    pthid: str | None = None
    has_thread: bool = True
    id: str | None = None


def serialize_answer(answer: V1Answer, id_: str, prefix: str, thread: str | None) -> bytes:
    """
    Serialise a message.

    :param id_: of the message, if the answer has none.
    :param prefix: of its type, unless that is a URI.
    :param thread: of the request, if the answer does not name another one; None if there is none.
    """
    uri = answer.type if ":" in answer.type else prefix + answer.type
    value: dict[str, Any] = {"@type": uri, "@id": answer.id or id_}
    if answer.has_thread:
        decorator = {"thid": answer.thid or thread, "pthid": answer.pthid}
        value["~thread"] = {name: text for name, text in decorator.items() if text is not None}
    return encoding.dumps({**value, **answer.members})
