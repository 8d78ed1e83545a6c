"""
What each situation looks like from outside: one table a protocol.

Texts are fixed: nothing a peer sent is repeated to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from mediatord.errors import (
    AuthcryptRequired,
    AuthTimeout,
    ContractNotFound,
    DeadlineExceeded,
    DecryptionError,
    DuplicateNonce,
    EncryptionRequired,
    ExpiredForward,
    ExpiredMessage,
    InternalFault,
    InvalidAttachment,
    InvalidBody,
    InvalidCommand,
    InvalidContractSignatures,
    InvalidEnvelope,
    InvalidEventSignature,
    InvalidLimit,
    InvalidMessage,
    InvalidPagination,
    InvalidPlaintext,
    InvalidSignature,
    InvalidUpdates,
    LinkedAttachment,
    LiveModeUnsupported,
    MediationNotGranted,
    MediatorError,
    MisaddressedMessage,
    MissingNext,
    PayloadTooLarge,
    PublicEventNotFound,
    QueueFull,
    QuotaExceeded,
    RateLimitExceeded,
    RecipientNotFound,
    RecipientNotRegistered,
    RegistrationCapacityExceeded,
    RegistrationLimitExceeded,
    ReplayCacheFull,
    ReplayedMessage,
    RoutingLoop,
    SenderMismatch,
    SenderNotFound,
    SenderSigningKeyNotFound,
    ShutdownInProgress,
    StoreUnavailable,
    TimestampOutOfRange,
    TooManyErrors,
    UnauthorizedCommand,
    UnknownRecipient,
    UnresolvableDID,
    UnsupportedDIDMethod,
    UnsupportedMediaType,
    UnsupportedMessageType,
)

ErrorCode = TypeVar("ErrorCode")
# By its class, or by an error of that class.
ErrorOrClass: TypeAlias = MediatorError | type[MediatorError]


@dataclass(frozen=True, slots=True)
class DIDCommErrorCode:
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
DIDCOMM_ERROR_CODES: dict[type[MediatorError], DIDCommErrorCode] = {
    UnknownRecipient: DIDCommErrorCode(
        400, "e.p.me.res.not-found", "Recipient not registered with this mediator", packed=400
    ),
    RateLimitExceeded: DIDCommErrorCode(429, "e.m.req.rate-limited", "Too many requests", retry_after=60),
    RegistrationLimitExceeded: DIDCommErrorCode(
        429,
        "e.m.req.registration-limited",
        "Too many registrations from this address",
        packed=429,
        retry_after=3600,
    ),
    RegistrationCapacityExceeded: DIDCommErrorCode(
        503,
        "e.m.me.res.registrations",
        "No more registrations are taken",
        packed=503,
        retry_after=3600,
    ),
    DecryptionError: DIDCommErrorCode(400, "e.p.trust.crypto", "The message could not be decrypted"),
    InvalidEnvelope: DIDCommErrorCode(400, "e.p.msg", "There is no DIDComm message"),
    UnsupportedMediaType: DIDCommErrorCode(415, "e.p.msg", "There is no DIDComm message"),
    EncryptionRequired: DIDCommErrorCode(400, "e.p.trust.not-encrypted", "Only encrypted messages are accepted"),
    InvalidPlaintext: DIDCommErrorCode(400, "e.p.msg", "There is no DIDComm message", packed=400),
    MissingNext: DIDCommErrorCode(400, "e.p.msg.missing-next", "A forward needs a next recipient", packed=400),
    InvalidAttachment: DIDCommErrorCode(
        400, "e.p.msg.bad-attachment", "A forward carries encrypted attachments", packed=400
    ),
    LinkedAttachment: DIDCommErrorCode(
        400,
        "e.p.xfer.attachment-links-not-supported",
        "Attachments must be sent inline",
        packed=400,
    ),
    ExpiredForward: DIDCommErrorCode(400, "e.p.req.time.expired", "The message has expired", packed=400),
    RoutingLoop: DIDCommErrorCode(400, "e.p.msg.routing-loop", "Too many hops through here", packed=400),
    PayloadTooLarge: DIDCommErrorCode(413, "e.p.me.res.storage.message_too_big", "The message is too big"),
    QueueFull: DIDCommErrorCode(
        429, "e.m.me.res.storage", "The recipient's queue is full", packed=429, retry_after=600
    ),
    StoreUnavailable: DIDCommErrorCode(503, "e.p.me.res.storage", "Try again later", packed=503, retry_after=5),
    ReplayCacheFull: DIDCommErrorCode(503, "e.p.me.res.storage", "Try again later", packed=503, retry_after=60),
    SenderMismatch: DIDCommErrorCode(400, "e.p.trust.sender-mismatch", "The sender is not who the encryption says"),
    AuthcryptRequired: DIDCommErrorCode(400, "e.p.trust.authcrypt-required", "This request must be authenticated"),
    UnresolvableDID: DIDCommErrorCode(400, "e.p.did.unresolvable", "The sender's DID does not resolve"),
    UnsupportedDIDMethod: DIDCommErrorCode(400, "e.p.did.unsupported", "The sender's DID method is not supported"),
    UnsupportedMessageType: DIDCommErrorCode(
        400, "e.p.msg.unsupported", "The message type is not supported", packed=200
    ),
    InvalidBody: DIDCommErrorCode(400, "e.p.msg.bad-body", "The body of the message is malformed", packed=200),
    InvalidLimit: DIDCommErrorCode(400, "e.p.msg.bad-limit", "limit must be an integer above 0", packed=200),
    InvalidPagination: DIDCommErrorCode(
        400, "e.p.msg.bad-paginate", "paginate needs limit and offset, both natural", packed=200
    ),
    InvalidUpdates: DIDCommErrorCode(400, "e.p.msg.bad-updates", "updates must be a list of updates", packed=200),
    MisaddressedMessage: DIDCommErrorCode(
        400, "e.p.msg.misaddressed", "The message is addressed to somebody else", packed=200
    ),
    MediationNotGranted: DIDCommErrorCode(400, "e.p.req.not_enroll", "The sender has no mediation here", packed=200),
    ReplayedMessage: DIDCommErrorCode(
        400, "e.p.crypto.message.dejavu", "The message was received before", packed=200
    ),
    LiveModeUnsupported: DIDCommErrorCode(
        400,
        "e.m.live-mode-not-supported",
        "Connection does not support Live Delivery",
        packed=200,
    ),
    ExpiredMessage: DIDCommErrorCode(400, "e.p.req.time.expired", "The message has expired", packed=200),
    TooManyErrors: DIDCommErrorCode(400, "e.p.req.max-errors-exceeded", "Too many problems", packed=200),
    ShutdownInProgress: DIDCommErrorCode(503, "e.p.me.stopping", "The mediator is stopping", retry_after=5),
    DeadlineExceeded: DIDCommErrorCode(503, "e.p.me.busy", "The mediator is too busy", retry_after=5),
    InternalFault: DIDCommErrorCode(500, "e.p.me.fault", "The mediator has a fault"),
}


# What Identus's mediator and the public conformance suite say where UC-021 has another code.
IDENTUS_PROBLEM_CODES: dict[type[MediatorError], str] = {UnknownRecipient: "e.p.req.not_enroll"}


@dataclass(frozen=True, slots=True)
class DecentrlErrorCode:
    """
    How one situation looks to a Decentrl client, and to a plain HTTP client: `{"type":"ERROR","code":...}`.

    :param retry_after: as in :class:`Wire`.
    """

    status: int
    code: str
    retry_after: int | None = None


# DCTRL-0004 section 11.2, with what its reference section 12 adds.
DECENTRL_ERROR_CODES: dict[type[MediatorError], DecentrlErrorCode] = {
    InvalidCommand: DecentrlErrorCode(400, "INVALID_COMMAND"),
    InvalidSignature: DecentrlErrorCode(401, "INVALID_SIGNATURE"),
    InvalidContractSignatures: DecentrlErrorCode(401, "INVALID_SIGNATURES"),
    InvalidEventSignature: DecentrlErrorCode(401, "INVALID_EVENT_SIGNATURE"),
    UnauthorizedCommand: DecentrlErrorCode(401, "UNAUTHORIZED_COMMAND"),
    TimestampOutOfRange: DecentrlErrorCode(401, "TIMESTAMP_OUT_OF_RANGE"),
    DuplicateNonce: DecentrlErrorCode(401, "DUPLICATE_NONCE"),
    SenderNotFound: DecentrlErrorCode(404, "SENDER_NOT_FOUND"),
    SenderSigningKeyNotFound: DecentrlErrorCode(404, "SENDER_SIGNING_KEY_NOT_FOUND"),
    RecipientNotFound: DecentrlErrorCode(404, "RECIPIENT_NOT_FOUND"),
    RecipientNotRegistered: DecentrlErrorCode(404, "RECIPIENT_NOT_REGISTERED"),
    ContractNotFound: DecentrlErrorCode(404, "COMMUNICATION_CONTRACT_NOT_FOUND"),
    PublicEventNotFound: DecentrlErrorCode(404, "PUBLIC_EVENT_NOT_FOUND"),
    PayloadTooLarge: DecentrlErrorCode(413, "PAYLOAD_TOO_LARGE"),
    RateLimitExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=60),
    RegistrationLimitExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=3600),
    RegistrationCapacityExceeded: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=3600),
    QuotaExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=600),
    StoreUnavailable: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    ShutdownInProgress: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    DeadlineExceeded: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    InternalFault: DecentrlErrorCode(500, "INTERNAL_ERROR"),
}


@dataclass(frozen=True, slots=True)
class DecentrlCloseCode:
    """
    How one situation ends a Decentrl socket that is not authenticated yet (DCTRL-0004 section 10.3).

    :param close: code of the close frame that follows `AUTH_FAILED`.
    :param status: the HTTP status that says the same, for counters and log.
    """

    close: int
    code: str
    status: int


DECENTRL_CLOSE_CODES: dict[type[MediatorError], DecentrlCloseCode] = {
    AuthTimeout: DecentrlCloseCode(4001, "AUTH_TIMEOUT", 401),
    InvalidMessage: DecentrlCloseCode(4002, "INVALID_MESSAGE", 400),
    TimestampOutOfRange: DecentrlCloseCode(4003, "TIMESTAMP_OUT_OF_RANGE", 401),
    SenderNotFound: DecentrlCloseCode(4004, "DID_NOT_FOUND", 404),
    SenderSigningKeyNotFound: DecentrlCloseCode(4005, "SIGNING_KEY_NOT_FOUND", 404),
    InvalidSignature: DecentrlCloseCode(4006, "INVALID_SIGNATURE", 401),
    DuplicateNonce: DecentrlCloseCode(4002, "INVALID_MESSAGE", 401),
    UnauthorizedCommand: DecentrlCloseCode(4007, "NOT_REGISTERED", 401),
    # Not in the standard, which knows only failures of the client: 1013 is "try again later".
    RateLimitExceeded: DecentrlCloseCode(1013, "RATE_LIMITED", 429),
    StoreUnavailable: DecentrlCloseCode(1013, "UNAVAILABLE", 503),
    InternalFault: DecentrlCloseCode(1011, "INTERNAL_ERROR", 500),
}


def get_didcomm_error_code(error: ErrorOrClass) -> DIDCommErrorCode:
    """How `error` looks to a DIDComm peer."""
    return _look_up(DIDCOMM_ERROR_CODES, error)


def get_decentrl_error_code(error: ErrorOrClass) -> DecentrlErrorCode:
    """How `error` looks to a Decentrl client."""
    return _look_up(DECENTRL_ERROR_CODES, error)


def get_decentrl_close_code(error: ErrorOrClass) -> DecentrlCloseCode:
    """How `error` ends a Decentrl socket."""
    return _look_up(DECENTRL_CLOSE_CODES, error)


def _look_up(table: Mapping[type[MediatorError], ErrorCode], error: ErrorOrClass) -> ErrorCode:
    """The row of its class, or of the nearest class it derives from; a fault where there is none."""
    for kind in (error if isinstance(error, type) else type(error)).__mro__:
        if kind in table:
            return table[kind]
    return table[InternalFault]
