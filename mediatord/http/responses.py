"""HTTP responses: common headers, deadlines, and the replies of both protocols as responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET, Request

from mediatord.decentrl.context import DecentrlReply as CommandReply
from mediatord.decentrl.context import build_error_reply as command_refusal
from mediatord.didcomm.messages import ACCEPTED, DIDCommReply, MessageOrigin
from mediatord.errors import DeadlineExceeded, InternalFault, MediatorError, RateLimitExceeded, ShutdownInProgress
from mediatord.http.protocol_switch import ReceiveMessage
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol import encoding
from mediatord.protocol.error_codes import get_didcomm_error_code

# Pages of any origin may read all responses. Browser wallets preflight every message, because of its Content-Type
# (reference 3.1).
CORS_HEADERS = [("Access-Control-Allow-Origin", "*")]
PREFLIGHT_HEADERS = [
    ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
    ("Access-Control-Allow-Headers", "Content-Type"),
    ("Access-Control-Max-Age", "86400"),
]
EXPOSE_RETRY_AFTER_HEADER = ("Access-Control-Expose-Headers", "Retry-After")

SERVER_NAME = b"mediatord"

_log = Logger()

_RAW_CORS_HEADERS = [(name.encode("ascii"), [value.encode("ascii")]) for name, value in CORS_HEADERS]
# Phrases that Twisted lacks.
REASON_PHRASES = {426: b"Upgrade Required", 429: b"Too Many Requests"}
_RAW_EXPOSE_HEADER = (EXPOSE_RETRY_AFTER_HEADER[0].encode("ascii"), [EXPOSE_RETRY_AFTER_HEADER[1].encode("ascii")])


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


def write_response(request: Request, answer: HTTPResponse, unread: HTTPResponse | None = None) -> int:
    """
    Send a complete response and finish; NOT_DONE_YET.

    :param unread: sent instead if the client has too many unread responses; without it `answer` is sent anyway.
    """
    client: Any = request
    if unread is not None and not client.has_room(_get_body_size(request, answer)):
        answer = unread
    _set_response_head(request, answer)
    if size := _get_body_size(request, answer):
        request.write(answer.body)
        client.response_written(size)
    request.finish()
    return NOT_DONE_YET


def _get_body_size(request: Request, answer: HTTPResponse) -> int:
    return 0 if request.method == b"HEAD" else len(answer.body)


def _set_response_head(request: Request, answer: HTTPResponse) -> None:
    request.setResponseCode(answer.status, REASON_PHRASES.get(answer.status))
    headers = request.responseHeaders
    for name, values in _RAW_CORS_HEADERS if answer.shared else ():
        headers.setRawHeaders(name, values)
    headers.setRawHeaders(b"Server", [SERVER_NAME])
    if answer.content_type:
        headers.setRawHeaders(b"Content-Type", [answer.content_type])
    else:
        headers.removeHeader(b"Content-Type")
        request.defaultContentType = None
    for name, value in answer.headers:
        headers.setRawHeaders(name, [value])
        if name == b"Retry-After":
            headers.setRawHeaders(*_RAW_EXPOSE_HEADER)
    if answer.status != 204:  # RFC 9110 section 8.6
        headers.setRawHeaders(b"Content-Length", [b"%d" % len(answer.body)])


def respond_with_deadline(
    request: Request,
    work: Awaitable[HTTPResponse],
    clock: IReactorTime,
    *,
    deadline: float,
    late: HTTPResponse,
    fault: HTTPResponse,
    unread: HTTPResponse,
) -> int:
    """
    Finish a request with the result of `work`.

    :param deadline: seconds after which `late` is sent instead; the work continues to its end.
    :param fault: response when `work` raises.
    :param unread: response when the client has too many unread responses.
    """
    gone: list[Failure] = []
    request.notifyFinish().addErrback(gone.append)
    finished = False

    def finish(answer: HTTPResponse) -> None:
        nonlocal finished
        if not finished and not gone:  # the client may have closed the connection
            finished = True
            write_response(request, answer, unread)

    timer = clock.callLater(deadline, finish, late)

    async def answer() -> None:
        try:
            outcome = await work
        except Exception:
            _log.failure("answering a request failed", redact_failure())
            outcome = fault
        if timer.active():
            timer.cancel()
        finish(outcome)

    Deferred.fromCoroutine(answer())
    return NOT_DONE_YET


JSON_CONTENT_TYPE = b"application/json"

ExecuteCommand = Callable[[bytes, str], Awaitable[CommandReply]]

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
    }
)


def select_protocol(content_type: bytes) -> ProtocolName:
    """
    The protocol of a body at a path that serves both.

    :param content_type: the header as sent; empty without one.
    """
    return "didcomm" if b"didcomm" in _parse_media_type(content_type) else "decentrl"


async def respond_to_message(receive: ReceiveMessage, body: bytes, client: str, content_type: bytes) -> HTTPResponse:
    """
    Process a DIDComm message; its reply as a response.

    :param content_type: the header as sent; the mediator is informed of one that is no envelope's.
    """
    has_foreign_content_type = _parse_media_type(content_type) not in _TOLERATED_MEDIA_TYPES
    try:
        reply = await receive(body, MessageOrigin(client, None, has_foreign_content_type))
    except ShutdownInProgress as error:
        return build_refusal("didcomm", error)
    return build_didcomm_response(reply)


def build_didcomm_response(reply: DIDCommReply) -> HTTPResponse:
    """A DIDComm reply as a response."""
    return HTTPResponse(
        reply.status, reply.body, reply.media_type.encode("ascii"), build_retry_after(reply.retry_after)
    )


async def respond_to_command(work: Awaitable[CommandReply]) -> HTTPResponse:
    """A Decentrl reply as a response."""
    try:
        return _build_decentrl_response(await work)
    except ShutdownInProgress as error:
        return build_refusal("decentrl", error)


def build_refusal(half: ProtocolName, error: MediatorError) -> HTTPResponse:
    """The response to a rejected request; for DIDComm it is JSON and no DIDComm message."""
    if half == "decentrl":
        return _build_decentrl_response(command_refusal(error))
    wire = get_didcomm_error_code(error)
    body = encoding.dumps({"status": "error", "detail": wire.comment})
    return HTTPResponse(wire.status, body, JSON_CONTENT_TYPE, build_retry_after(wire.retry_after))


def build_error(status: int, code: str, *headers: tuple[bytes, bytes]) -> HTTPResponse:
    """An error that belongs to no command, in the form of command errors (DCTRL-0004 11.1)."""
    return HTTPResponse(status, encoding.dumps({"type": "ERROR", "code": code}), JSON_CONTENT_TYPE, headers)


def build_retry_after(seconds: int | None) -> tuple[tuple[bytes, bytes], ...]:
    """The Retry-After header, if the time is known."""
    return () if seconds is None else ((b"Retry-After", b"%d" % seconds),)


def _build_decentrl_response(reply: CommandReply) -> HTTPResponse:
    return HTTPResponse(reply.status, reply.body, JSON_CONTENT_TYPE, build_retry_after(reply.retry_after))


def _parse_media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


# For accepted messages without a reply.
ACCEPTED_RESPONSE = build_didcomm_response(ACCEPTED)
TIMEOUT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    half: build_refusal(half, DeadlineExceeded()) for half in ("didcomm", "decentrl")
}
FAULT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    half: build_refusal(half, InternalFault()) for half in ("didcomm", "decentrl")
}
# For clients that do not read their responses.
UNREAD_LIMIT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    half: build_refusal(half, RateLimitExceeded()) for half in ("didcomm", "decentrl")
}
# For addresses with too many requests of any kind; the connection is closed.
RATE_LIMIT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    half: replace(answer, headers=(*answer.headers, (b"Connection", b"close")))
    for half, answer in UNREAD_LIMIT_RESPONSES.items()
}
