"""HTTP responses: common headers, their form on the wire, and the replies of both protocols as responses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import get_args

from twisted.web.http import RESPONSES, datetimeToString

from mediatord.decentrl.context import build_error_reply
from mediatord.didcomm.messages import ACCEPTED
from mediatord.errors import DeadlineExceeded, InternalFault, MediatorError, PayloadTooLarge, RateLimitExceeded
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE, PROBLEM_REPORT
from mediatord.protocol.error_codes import DIDCOMM_ERROR_CODES, get_didcomm_error_code
from mediatord.ratelimit.admission import RequestReply

# Pages of any origin may read all responses. Browser wallets preflight every message, because of its Content-Type
# (reference 3.1).
CORS_HEADERS = [(b"Access-Control-Allow-Origin", b"*")]
SERVER_NAME = b"mediatord"
# Phrases that Twisted lacks.
REASON_PHRASES = {426: b"Upgrade Required", 429: b"Too Many Requests"}

JSON_CONTENT_TYPE = b"application/json"


@dataclass(frozen=True, slots=True)
class HTTPResponse:
    """
    An HTTP response.

    :param headers: in addition to Content-Type, Content-Length and the common ones.
    :param shared: whether pages of any origin may read it.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    content_type: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    shared: bool = True


ProtocolReply = HTTPResponse | RequestReply


def serialize_response(answer: HTTPResponse, now: int | None, reason: bytes = b"") -> bytes:
    """
    The bytes of a response.

    :param now: Unix seconds; None for a response without a date, after which the connection is closed.
    :param reason: in place of the usual phrase.
    """
    reason = reason or REASON_PHRASES.get(answer.status) or RESPONSES.get(answer.status, b"Unknown Status")
    common = [(b"Connection", b"close")] if now is None else [(b"Date", _format_date(now)), (b"Server", SERVER_NAME)]
    headers = [*common, *CORS_HEADERS, *answer.headers, (b"Content-Length", b"%d" % len(answer.body))]
    if answer.content_type:
        headers.append((b"Content-Type", answer.content_type))
    lines = map(b"%b: %b\r\n".__mod__, headers)
    return b"".join((b"HTTP/1.1 %d %b\r\n" % (answer.status, reason), *lines, b"\r\n", answer.body))


@lru_cache(1)
def serialize_accepted(second: int) -> bytes:
    """The bytes of :data:`ACCEPTED_RESPONSE`."""
    return serialize_response(ACCEPTED_RESPONSE, second)


@lru_cache(1)
def _format_date(second: int) -> bytes:
    date: bytes = datetimeToString(second)
    return date


# Content types of envelopes of DIDComm v1: of Aries RFC 0044, those before it, and of some libraries.
_V1_MEDIA_TYPES = (
    b"application/didcomm-envelope-enc",
    b"application/ssi-agent-wire",
    b"application/didcomm-enc-env",
    b"application/jwe",
)
# Content types of envelopes seen in practice (reference 3.1).
_TOLERATED_MEDIA_TYPES = frozenset(
    {
        b"",
        b"application/didcomm-encrypted+json",
        b"didcomm-encrypted+json",
        b"application/didcomm+encrypted",
        b"application/json",
        b"application/octet-stream",
        b"application/x-www-form-urlencoded",
        *_V1_MEDIA_TYPES,
    }
)


def select_protocol(content_type: bytes) -> ProtocolName:
    """
    The protocol of a body at a path that serves both.

    :param content_type: the header as sent; empty without one.
    """
    media_type = _parse_media_type(content_type)
    return "didcomm" if b"didcomm" in media_type or media_type in _V1_MEDIA_TYPES else "decentrl"


def is_envelope_type(content_type: bytes) -> bool:
    """Whether a Content-Type header as sent is one that wallets use for envelopes."""
    return _parse_media_type(content_type) in _TOLERATED_MEDIA_TYPES


def build_response(reply: RequestReply) -> HTTPResponse:
    """A reply of one of the protocols as a response."""
    headers = () if reply.retry_after is None else build_retry_after(reply.retry_after)
    return HTTPResponse(reply.status, reply.body, reply.media_type.encode("ascii"), headers)


def build_refusal(protocol: ProtocolName, error: MediatorError) -> HTTPResponse:
    """The response to a rejected request; for DIDComm it is JSON and no DIDComm message."""
    if protocol == "decentrl":
        return build_response(build_error_reply(error))
    wire = get_didcomm_error_code(error)
    body = encoding.dumps({"status": "error", "detail": wire.comment})
    return build_response(RequestReply(wire.status, body, retry_after=wire.retry_after))


def build_error(status: int, code: str, *headers: tuple[bytes, bytes]) -> HTTPResponse:
    """An error that belongs to no command, in the form of command errors (DCTRL-0004 11.1)."""
    return HTTPResponse(status, encoding.dumps({"type": "ERROR", "code": code}), JSON_CONTENT_TYPE, headers)


def build_retry_after(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    """The Retry-After header, which pages may read."""
    return (b"Retry-After", b"%d" % seconds), (b"Access-Control-Expose-Headers", b"Retry-After")


def _parse_media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


# For accepted messages without a reply.
ACCEPTED_RESPONSE = build_response(ACCEPTED)


def _build_refusals(error: MediatorError, *headers: tuple[bytes, bytes]) -> dict[ProtocolName, HTTPResponse]:
    refusals = {protocol: build_refusal(protocol, error) for protocol in get_args(ProtocolName)}
    return {protocol: replace(one, headers=(*one.headers, *headers)) for protocol, one in refusals.items()}


TIMEOUT_RESPONSES = _build_refusals(DeadlineExceeded())
FAULT_RESPONSES = _build_refusals(InternalFault())
# For clients that do not read their responses.
UNREAD_LIMIT_RESPONSES = _build_refusals(RateLimitExceeded())
# For addresses with too many requests of any kind; the connection is closed.
RATE_LIMIT_RESPONSES = _build_refusals(RateLimitExceeded(), (b"Connection", b"close"))


BAD_REQUEST_BYTES = serialize_response(build_error(400, "BAD_REQUEST"), None)
_TOO_LARGE = DIDCOMM_ERROR_CODES[PayloadTooLarge]
_TOO_LARGE_REPORT = {
    "id": "too-large",
    "typ": PLAINTEXT_MEDIA_TYPE,
    "type": PROBLEM_REPORT,
    "body": {"code": _TOO_LARGE.code, "comment": _TOO_LARGE.comment},
}
_TOO_LARGE_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(413, encoding.dumps(_TOO_LARGE_REPORT), PLAINTEXT_MEDIA_TYPE.encode("ascii")),
    "decentrl": build_refusal("decentrl", PayloadTooLarge()),
}
TOO_LARGE_BYTES = {
    protocol: serialize_response(answer, None, b"Content Too Large")
    for protocol, answer in _TOO_LARGE_RESPONSES.items()
}
