"""Coroutine in, HTTP response out."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET, Request

from mediatord.faults import without_text
from mediatord.web.headers import CORS, EXPOSE_RETRY_AFTER, SERVER

_log = Logger()

_CORS = [(name.encode("ascii"), [value.encode("ascii")]) for name, value in CORS]
# What Twisted has no words for.
REASONS = {426: b"Upgrade Required", 429: b"Too Many Requests"}
_EXPOSE = (EXPOSE_RETRY_AFTER[0].encode("ascii"), [EXPOSE_RETRY_AFTER[1].encode("ascii")])


@dataclass(frozen=True, slots=True)
class Answer:
    """
    An HTTP response.

    :param headers: beyond Content-Type, Content-Length and those that every answer has.
    :param shared: whether pages of any origin may read it.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    content_type: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    shared: bool = True


def write(request: Request, answer: Answer, unread: Answer | None = None) -> None:
    """
    Send the whole response and finish.

    :param unread: what is sent instead if the client leaves too much unread; without it `answer` is sent anyway.
    """
    client: Any = request
    if unread is not None and not client.has_room(_sent(request, answer)):
        answer = unread
    _put_head(request, answer)
    if size := _sent(request, answer):
        request.write(answer.body)
        client.wrote(size)
    request.finish()


def _sent(request: Request, answer: Answer) -> int:
    return 0 if request.method == b"HEAD" else len(answer.body)


def _put_head(request: Request, answer: Answer) -> None:
    request.setResponseCode(answer.status, REASONS.get(answer.status))
    headers = request.responseHeaders
    for name, values in _CORS if answer.shared else ():
        headers.setRawHeaders(name, values)
    headers.setRawHeaders(b"Server", [SERVER])
    if answer.content_type:
        headers.setRawHeaders(b"Content-Type", [answer.content_type])
    else:
        headers.removeHeader(b"Content-Type")
        request.defaultContentType = None
    for name, value in answer.headers:
        headers.setRawHeaders(name, [value])
        if name == b"Retry-After":
            headers.setRawHeaders(*_EXPOSE)
    if answer.status != 204:  # RFC 9110 section 8.6
        headers.setRawHeaders(b"Content-Length", [b"%d" % len(answer.body)])


def respond(
    request: Request,
    work: Awaitable[Answer],
    clock: IReactorTime,
    *,
    deadline: float,
    late: Answer,
    fault: Answer,
    unread: Answer,
) -> int:
    """
    Finish `request` with what `work` returns.

    :param deadline: seconds after which `late` is answered instead; the work itself goes on to its end.
    :param fault: the answer when `work` raises.
    :param unread: the answer when the client leaves too much unread.
    """
    gone: list[Failure] = []
    request.notifyFinish().addErrback(gone.append)
    finished = False

    def finish(answer: Answer) -> None:
        nonlocal finished
        if not finished and not gone:  # the peer may have left; the work is finished all the same
            finished = True
            write(request, answer, unread)

    timer = clock.callLater(deadline, finish, late)

    async def answer() -> None:
        try:
            outcome = await work
        except Exception:
            _log.failure("answering a request failed", without_text())
            outcome = fault
        if timer.active():
            timer.cancel()
        finish(outcome)

    Deferred.fromCoroutine(answer())
    return NOT_DONE_YET
