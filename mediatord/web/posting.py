"""Taking a message that was POSTed, however the request was read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mediatord.didcomm.exchange import Origin, Reply
from mediatord.errors import DeadlineExceeded, InternalFault, MediatorError, ShuttingDown
from mediatord.protocol import jsontext
from mediatord.web.render import Answer
from mediatord.wire import wire_for

JSON = b"application/json"

Receive = Callable[[bytes, Origin], Awaitable[Reply]]

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


async def take(receive: Receive, body: bytes, client: str, content_type: bytes) -> Answer:
    """
    Hand a body to the mediator and put its reply into HTTP.

    :param content_type: the header as sent; of what is nothing like an envelope the mediator is told.
    """
    alien = content_type.partition(b";")[0].strip().lower() not in _TOLERATED
    try:
        reply = await receive(body, Origin(client, None, alien))
    except ShuttingDown as error:
        return refusal(error)
    headers = ((b"Retry-After", b"%d" % reply.retry_after),) if reply.retry_after is not None else ()
    return Answer(reply.status, reply.body, reply.media_type.encode("ascii"), headers)


def refusal(error: MediatorError) -> Answer:
    """A refusal that is no DIDComm message: status, and a word for people."""
    wire = wire_for(error)
    headers = ((b"Retry-After", b"%d" % wire.retry_after),) if wire.retry_after is not None else ()
    body = jsontext.dumps({"status": "error", "detail": wire.comment})
    return Answer(wire.status, body, JSON, headers)


LATE, FAULT = refusal(DeadlineExceeded()), refusal(InternalFault())
