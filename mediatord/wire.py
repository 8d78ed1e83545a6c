"""
What each situation looks like from outside: one table a protocol.

Texts are fixed: nothing a peer sent is repeated to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from mediatord.errors import (
    AlienMediaType,
    AuthcryptRequired,
    AuthTimeout,
    BadAttachment,
    BadBody,
    BadLimit,
    BadPaginate,
    BadUpdates,
    ContractNotFound,
    DeadlineExceeded,
    DuplicateNonce,
    ForwardExpired,
    InternalFault,
    InvalidCommand,
    InvalidContractSignatures,
    InvalidEventSignature,
    InvalidMessage,
    InvalidSignature,
    LinkedAttachment,
    LiveModeUnsupported,
    MediatorError,
    MessageExpired,
    Misaddressed,
    NextMissing,
    NotAMessage,
    NotAnEnvelope,
    NotEncrypted,
    NotEnrolled,
    OverQuota,
    PublicEventNotFound,
    QueueFull,
    RateLimited,
    RecipientNotFound,
    RecipientNotRegistered,
    RecipientUnknown,
    RegistrationLimited,
    RegistrationsFull,
    Replayed,
    ReplayMemoryFull,
    RoutingLoop,
    SenderMismatch,
    SenderNotFound,
    SenderSigningKeyNotFound,
    SenderUnresolvable,
    SenderUnsupported,
    ShuttingDown,
    StoreUnavailable,
    TimestampOutOfRange,
    TooLarge,
    TooManyErrors,
    UnauthorizedCommand,
    Undecryptable,
    Unsupported,
)

Row = TypeVar("Row")
# By its class, or by an error of that class.
Situation: TypeAlias = MediatorError | type[MediatorError]


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

    @property
    def signed(self) -> bool:
        """
        Whether the report is signed for a sender who is not authenticated: where it would be encrypted to one who
        is, and trying again later is of no use.
        """
        return self.packed is not None and self.retry_after is None


# DIDComm: one row per situation of its reference section 11.
WIRE: dict[type[MediatorError], Wire] = {
    RecipientUnknown: Wire(400, "e.p.me.res.not-found", "Recipient not registered with this mediator", packed=400),
    RateLimited: Wire(429, "e.m.req.rate-limited", "Too many requests", retry_after=60),
    RegistrationLimited: Wire(
        429,
        "e.m.req.registration-limited",
        "Too many registrations from this address",
        packed=429,
        retry_after=3600,
    ),
    RegistrationsFull: Wire(
        503,
        "e.m.me.res.registrations",
        "No more registrations are taken",
        packed=503,
        retry_after=3600,
    ),
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
    QueueFull: Wire(429, "e.m.me.res.storage", "The recipient's queue is full", packed=429, retry_after=600),
    StoreUnavailable: Wire(503, "e.p.me.res.storage", "Try again later", packed=503, retry_after=5),
    ReplayMemoryFull: Wire(503, "e.p.me.res.storage", "Try again later", packed=503, retry_after=60),
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


# What Identus's mediator and the public conformance suite say where UC-021 has another code.
IDENTUS_CODES: dict[type[MediatorError], str] = {RecipientUnknown: "e.p.req.not_enroll"}


@dataclass(frozen=True, slots=True)
class DecentrlWire:
    """
    How one situation looks to a Decentrl client, and to a plain HTTP client: `{"type":"ERROR","code":...}`.

    :param retry_after: as in :class:`Wire`.
    """

    status: int
    code: str
    retry_after: int | None = None


# DCTRL-0004 section 11.2, with what its reference section 12 adds.
DECENTRL_WIRE: dict[type[MediatorError], DecentrlWire] = {
    InvalidCommand: DecentrlWire(400, "INVALID_COMMAND"),
    InvalidSignature: DecentrlWire(401, "INVALID_SIGNATURE"),
    InvalidContractSignatures: DecentrlWire(401, "INVALID_SIGNATURES"),
    InvalidEventSignature: DecentrlWire(401, "INVALID_EVENT_SIGNATURE"),
    UnauthorizedCommand: DecentrlWire(401, "UNAUTHORIZED_COMMAND"),
    TimestampOutOfRange: DecentrlWire(401, "TIMESTAMP_OUT_OF_RANGE"),
    DuplicateNonce: DecentrlWire(401, "DUPLICATE_NONCE"),
    SenderNotFound: DecentrlWire(404, "SENDER_NOT_FOUND"),
    SenderSigningKeyNotFound: DecentrlWire(404, "SENDER_SIGNING_KEY_NOT_FOUND"),
    RecipientNotFound: DecentrlWire(404, "RECIPIENT_NOT_FOUND"),
    RecipientNotRegistered: DecentrlWire(404, "RECIPIENT_NOT_REGISTERED"),
    ContractNotFound: DecentrlWire(404, "COMMUNICATION_CONTRACT_NOT_FOUND"),
    PublicEventNotFound: DecentrlWire(404, "PUBLIC_EVENT_NOT_FOUND"),
    TooLarge: DecentrlWire(413, "PAYLOAD_TOO_LARGE"),
    RateLimited: DecentrlWire(429, "RATE_LIMITED", retry_after=60),
    RegistrationLimited: DecentrlWire(429, "RATE_LIMITED", retry_after=3600),
    RegistrationsFull: DecentrlWire(503, "UNAVAILABLE", retry_after=3600),
    OverQuota: DecentrlWire(429, "RATE_LIMITED", retry_after=600),
    StoreUnavailable: DecentrlWire(503, "UNAVAILABLE", retry_after=5),
    ShuttingDown: DecentrlWire(503, "UNAVAILABLE", retry_after=5),
    DeadlineExceeded: DecentrlWire(503, "UNAVAILABLE", retry_after=5),
    InternalFault: DecentrlWire(500, "INTERNAL_ERROR"),
}


@dataclass(frozen=True, slots=True)
class SocketWire:
    """
    How one situation ends a Decentrl socket that is not authenticated yet (DCTRL-0004 section 10.3).

    :param close: code of the close frame that follows `AUTH_FAILED`.
    :param status: the HTTP status that says the same, for counters and log.
    """

    close: int
    code: str
    status: int


SOCKET_WIRE: dict[type[MediatorError], SocketWire] = {
    AuthTimeout: SocketWire(4001, "AUTH_TIMEOUT", 401),
    InvalidMessage: SocketWire(4002, "INVALID_MESSAGE", 400),
    TimestampOutOfRange: SocketWire(4003, "TIMESTAMP_OUT_OF_RANGE", 401),
    SenderNotFound: SocketWire(4004, "DID_NOT_FOUND", 404),
    SenderSigningKeyNotFound: SocketWire(4005, "SIGNING_KEY_NOT_FOUND", 404),
    InvalidSignature: SocketWire(4006, "INVALID_SIGNATURE", 401),
    DuplicateNonce: SocketWire(4002, "INVALID_MESSAGE", 401),
    UnauthorizedCommand: SocketWire(4007, "NOT_REGISTERED", 401),
    # Not in the standard, which knows only failures of the client: 1013 is "try again later".
    RateLimited: SocketWire(1013, "RATE_LIMITED", 429),
    StoreUnavailable: SocketWire(1013, "UNAVAILABLE", 503),
    InternalFault: SocketWire(1011, "INTERNAL_ERROR", 500),
}


def wire_for(error: Situation) -> Wire:
    """How `error` looks to a DIDComm peer."""
    return _row(WIRE, error)


def decentrl_wire_for(error: Situation) -> DecentrlWire:
    """How `error` looks to a Decentrl client."""
    return _row(DECENTRL_WIRE, error)


def socket_wire_for(error: Situation) -> SocketWire:
    """How `error` ends a Decentrl socket."""
    return _row(SOCKET_WIRE, error)


def _row(table: Mapping[type[MediatorError], Row], error: Situation) -> Row:
    """The row of its class, or of the nearest class it derives from; a fault where there is none."""
    for kind in (error if isinstance(error, type) else type(error)).__mro__:
        if kind in table:
            return table[kind]
    return table[InternalFault]
