"""Handing a body that was POSTed to its half, however the request was read, and putting the reply into HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from mediatord.decentrl.exchange import Reply as CommandReply
from mediatord.decentrl.exchange import refusal as command_refusal
from mediatord.didcomm.exchange import ACCEPTED, Origin, Reply
from mediatord.errors import DeadlineExceeded, InternalFault, MediatorError, RateLimited, ShuttingDown
from mediatord.journal import Half
from mediatord.protocol import jsontext
from mediatord.web.render import Answer
from mediatord.wire import wire_for

JSON = b"application/json"

Receive = Callable[[bytes, Origin], Awaitable[Reply]]
Command = Callable[[bytes, str], Awaitable[CommandReply]]

# What clients are seen to label envelopes with, besides the right type (reference 3.1).
_TOLERATED = frozenset(
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


def half_by_label(content_type: bytes) -> Half:
    """
    Which half a body is for, where both are served.

    :param content_type: the header as sent; empty without one.
    """
    return "didcomm" if b"didcomm" in _media_type(content_type) else "decentrl"


async def take(receive: Receive, body: bytes, client: str, content_type: bytes) -> Answer:
    """
    Hand a message to the DIDComm half and put its reply into HTTP.

    :param content_type: the header as sent; of what is nothing like an envelope the mediator is told.
    """
    alien = _media_type(content_type) not in _TOLERATED
    try:
        reply = await receive(body, Origin(client, None, alien))
    except ShuttingDown as error:
        return refusal("didcomm", error)
    return put(reply)


def put(reply: Reply) -> Answer:
    """A reply of the DIDComm half as a response."""
    return Answer(reply.status, reply.body, reply.media_type.encode("ascii"), retry(reply.retry_after))


async def carry_out(work: Awaitable[CommandReply]) -> Answer:
    """Put what the Decentrl half replies into HTTP."""
    try:
        return _put(await work)
    except ShuttingDown as error:
        return refusal("decentrl", error)


def refusal(half: Half, error: MediatorError) -> Answer:
    """A refusal of the whole request; in the DIDComm half it is no DIDComm message, but a word for people."""
    if half == "decentrl":
        return _put(command_refusal(error))
    wire = wire_for(error)
    body = jsontext.dumps({"status": "error", "detail": wire.comment})
    return Answer(wire.status, body, JSON, retry(wire.retry_after))


def plain_error(status: int, code: str, *headers: tuple[bytes, bytes]) -> Answer:
    """A refusal that is none of a command, in the shape that those have (DCTRL-0004 11.1)."""
    return Answer(status, jsontext.dumps({"type": "ERROR", "code": code}), JSON, headers)


def retry(seconds: int | None) -> tuple[tuple[bytes, bytes], ...]:
    """The header that says when to come again, if that is known."""
    return () if seconds is None else ((b"Retry-After", b"%d" % seconds),)


def _put(reply: CommandReply) -> Answer:
    return Answer(reply.status, reply.body, JSON, retry(reply.retry_after))


def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


# Of what was taken and is answered with nothing else.
TAKEN = put(ACCEPTED)
LATE: dict[Half, Answer] = {half: refusal(half, DeadlineExceeded()) for half in ("didcomm", "decentrl")}
FAULT: dict[Half, Answer] = {half: refusal(half, InternalFault()) for half in ("didcomm", "decentrl")}
# In place of an answer, to a client that does not read those it has.
UNREAD: dict[Half, Answer] = {half: refusal(half, RateLimited()) for half in ("didcomm", "decentrl")}
# To an address with too many requests of any kind; what else it has sent on the connection is not served.
FLOODED: dict[Half, Answer] = {
    half: replace(answer, headers=(*answer.headers, (b"Connection", b"close"))) for half, answer in UNREAD.items()
}
