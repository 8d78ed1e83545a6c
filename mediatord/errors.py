"""
The situations in which mediatord says no, and the one table that gives each its wire form.

Domain code raises a situation and never knows a status code. HTTP and WebSocket both read :data:`WIRE`, one row
per situation of the protocol reference section 11. Texts are fixed: nothing a peer sent is repeated to it.
"""

from __future__ import annotations

from dataclasses import dataclass


class MediatorError(Exception):
    """A situation with a row in :data:`WIRE`."""

    def __init__(self, *, retry_after: float | None = None) -> None:
        """:param retry_after: seconds after which trying again makes sense, if that is known here."""
        super().__init__()
        self.retry_after = retry_after


class RecipientUnknown(MediatorError):
    """`next` is not registered here (UC-021 AF-1)."""


class RateLimited(MediatorError):
    """The sender or its address is over its limit (UC-021 AF-2)."""


class Undecryptable(MediatorError):
    """The envelope does not open, for whichever reason (UC-021 AF-3); all reasons look alike from outside."""


class NotAnEnvelope(MediatorError):
    """The body is not JSON, or not a JWE."""


class AlienMediaType(NotAnEnvelope):
    """The body is not a JWE and its Content-Type said so."""


class NotEncrypted(MediatorError):
    """A plaintext or merely signed message."""


class NotAMessage(MediatorError):
    """The envelope opened, but what is inside is no DIDComm message."""


class NextMissing(MediatorError):
    """A forward without a usable `next`."""


class BadAttachment(MediatorError):
    """A forward without attachments, or with one that cannot be read or is not encrypted."""


class LinkedAttachment(MediatorError):
    """A forward whose payload is only linked to."""


class ForwardExpired(MediatorError):
    """A forward whose `expires_time` has passed."""


class RoutingLoop(MediatorError):
    """A forward that names this mediator as next hop too many times in a row."""


class TooLarge(MediatorError):
    """The body is over the size limit."""


class StoreUnavailable(MediatorError):
    """The store did not take or give what was asked; nothing was stored."""


class SenderMismatch(MediatorError):
    """`from` is not the DID of the key that authenticated the message."""


class AuthcryptRequired(MediatorError):
    """A coordination or pickup request without an authenticated sender."""


class SenderUnresolvable(MediatorError):
    """The sender's DID does not resolve, or has no usable key of that id."""


class SenderUnsupported(MediatorError):
    """The sender's DID method is not one that is resolved here."""


class Unsupported(MediatorError):
    """An unknown message type, or a version that is not served."""


class BadBody(MediatorError):
    """The body of a request does not have the members its type asks for."""


class BadLimit(BadBody):
    """`limit` of a delivery-request is missing, not an integer, or below 1."""


class BadPaginate(BadBody):
    """`paginate` of a query is incomplete or not made of natural numbers."""


class BadUpdates(BadBody):
    """`updates` of a recipient-update is not a list of updates."""


class Misaddressed(MediatorError):
    """A coordination or pickup request whose `to` names somebody else (a replay from another mediator)."""


class NotEnrolled(MediatorError):
    """The sender has no grant, or asks for a DID that is not its own."""


class Replayed(MediatorError):
    """The very same envelope came before."""


class LiveModeUnsupported(MediatorError):
    """Live delivery was asked for over a connection that cannot push."""


class MessageExpired(MediatorError):
    """A protocol message whose `expires_time` has passed."""


class TooManyErrors(MediatorError):
    """A peer that reports problem after problem."""


class ShuttingDown(MediatorError):
    """The daemon is stopping and takes no new work."""


class DeadlineExceeded(MediatorError):
    """The answer took longer than the processing deadline."""


class InternalFault(MediatorError):
    """A fault of ours; the log has the details."""


@dataclass(frozen=True, slots=True)
class Wire:
    """
    How one situation looks from outside.

    :param status: HTTP status when the report travels in the clear.
    :param code: problem code (Report Problem 2.0).
    :param comment: human text, always the same for the same code.
    :param packed: HTTP status when the report is encrypted to an authenticated sender;
        None when it always travels in the clear.
    :param retry_after: seconds for the Retry-After header, unless the error knows better.
    """

    status: int
    code: str
    comment: str
    packed: int | None = None
    retry_after: int | None = None


WIRE: dict[type[MediatorError], Wire] = {
    RecipientUnknown: Wire(400, "e.p.me.res.not-found", "Recipient not registered with this mediator", packed=400),
    RateLimited: Wire(429, "e.m.req.rate-limited", "Too many requests", retry_after=60),
    Undecryptable: Wire(400, "e.p.trust.crypto", "The message could not be decrypted"),
    NotAnEnvelope: Wire(400, "e.p.msg", "There is no DIDComm message"),
    AlienMediaType: Wire(415, "e.p.msg", "There is no DIDComm message"),
    NotEncrypted: Wire(400, "e.p.trust.not-encrypted", "Only encrypted messages are accepted"),
    NotAMessage: Wire(400, "e.p.msg", "There is no DIDComm message", packed=400),
    NextMissing: Wire(400, "e.p.msg.missing-next", "A forward needs a next recipient", packed=400),
    BadAttachment: Wire(400, "e.p.msg.bad-attachment", "A forward carries encrypted attachments", packed=400),
    LinkedAttachment: Wire(
        400,
        "e.p.xfer.attachment-links-not-supported",
        "Attachments must be sent inline",
        packed=400,
    ),
    ForwardExpired: Wire(400, "e.p.req.time.expired", "The message has expired", packed=400),
    RoutingLoop: Wire(400, "e.p.msg.routing-loop", "Too many hops through here", packed=400),
    TooLarge: Wire(413, "e.p.me.res.storage.message_too_big", "The message is too big"),
    StoreUnavailable: Wire(503, "e.p.me.res.storage", "Try again later", packed=503, retry_after=5),
    SenderMismatch: Wire(400, "e.p.trust.sender-mismatch", "The sender is not who the encryption says"),
    AuthcryptRequired: Wire(400, "e.p.trust.authcrypt-required", "This request must be authenticated"),
    SenderUnresolvable: Wire(400, "e.p.did.unresolvable", "The sender's DID does not resolve"),
    SenderUnsupported: Wire(400, "e.p.did.unsupported", "The sender's DID method is not supported"),
    Unsupported: Wire(400, "e.p.msg.unsupported", "The message type is not supported", packed=200),
    BadBody: Wire(400, "e.p.msg.bad-body", "The body of the message is malformed", packed=200),
    BadLimit: Wire(400, "e.p.msg.bad-limit", "limit must be an integer above 0", packed=200),
    BadPaginate: Wire(400, "e.p.msg.bad-paginate", "paginate needs limit and offset, both natural", packed=200),
    BadUpdates: Wire(400, "e.p.msg.bad-updates", "updates must be a list of updates", packed=200),
    Misaddressed: Wire(400, "e.p.msg.misaddressed", "The message is addressed to somebody else", packed=200),
    NotEnrolled: Wire(400, "e.p.req.not_enroll", "The sender has no mediation here", packed=200),
    Replayed: Wire(400, "e.p.crypto.message.dejavu", "The message was received before", packed=200),
    LiveModeUnsupported: Wire(
        400,
        "e.m.live-mode-not-supported",
        "Connection does not support Live Delivery",
        packed=200,
    ),
    MessageExpired: Wire(400, "e.p.req.time.expired", "The message has expired", packed=200),
    TooManyErrors: Wire(400, "e.p.req.max-errors-exceeded", "Too many problems", packed=200),
    ShuttingDown: Wire(503, "e.p.me.stopping", "The mediator is stopping", retry_after=5),
    DeadlineExceeded: Wire(503, "e.p.me.busy", "The mediator is too busy", retry_after=5),
    InternalFault: Wire(500, "e.p.me.fault", "The mediator has a fault"),
}


def wire_for(error: MediatorError) -> Wire:
    """The row of `error`: of its class, or of the nearest class it derives from."""
    for kind in type(error).__mro__:
        if kind in WIRE:
            return WIRE[kind]
    return WIRE[InternalFault]
