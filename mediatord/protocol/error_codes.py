"""
Status codes, problem codes and close codes of every :class:`~mediatord.errors.MediatorError`: one table per protocol.

Texts are constant; nothing that a peer sent is echoed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from mediatord import errors
from mediatord.errors import MediatorError

ErrorCode = TypeVar("ErrorCode")
# Lookups accept a class or an instance.
ErrorOrClass: TypeAlias = MediatorError | type[MediatorError]


@dataclass(frozen=True, slots=True)
class DIDCommErrorCode:
    """
    The report of one error to a DIDComm peer.

    :param status: HTTP status of an unencrypted report.
    :param code: problem code (Report Problem 2.0).
    :param comment: text for humans, constant per code.
    :param encrypted_status: HTTP status of a report that is encrypted to an authenticated sender; None if reports of
        this error are never encrypted.
    :param retry_after: seconds for the Retry-After header unless the error carries its own value.
    """

    status: int
    code: str
    comment: str
    encrypted_status: int | None = None
    retry_after: int | None = None

    @property
    def is_signed(self) -> bool:
        """
        Whether the report is signed if the sender is not authenticated: only for errors that a retry does not cure.
        """
        return self.encrypted_status is not None and self.retry_after is None


# One row per error of DIDComm reference section 11.
DIDCOMM_ERROR_CODES: dict[type[MediatorError], DIDCommErrorCode] = {
    errors.UnknownRecipient: DIDCommErrorCode(
        400, "e.p.me.res.not-found", "Recipient not registered with this mediator", 400
    ),
    errors.RateLimitExceeded: DIDCommErrorCode(429, "e.m.req.rate-limited", "Too many requests", retry_after=60),
    errors.RegistrationLimitExceeded: DIDCommErrorCode(
        429, "e.m.req.registration-limited", "Too many registrations from this address", 429, retry_after=3600
    ),
    errors.RegistrationCapacityExceeded: DIDCommErrorCode(
        503, "e.m.me.res.registrations", "The mediator accepts no more registrations", 503, retry_after=3600
    ),
    errors.DecryptionError: DIDCommErrorCode(400, "e.p.trust.crypto", "The message could not be decrypted"),
    errors.InvalidEnvelope: DIDCommErrorCode(400, "e.p.msg", "Not a DIDComm message"),
    errors.UnsupportedMediaType: DIDCommErrorCode(415, "e.p.msg", "Not a DIDComm message"),
    errors.EncryptionRequired: DIDCommErrorCode(
        400, "e.p.trust.not-encrypted", "Only encrypted messages are accepted"
    ),
    errors.InvalidPlaintext: DIDCommErrorCode(400, "e.p.msg", "Not a DIDComm message", 400),
    errors.MissingNext: DIDCommErrorCode(400, "e.p.msg.missing-next", "A forward requires a DID in next", 400),
    errors.InvalidAttachment: DIDCommErrorCode(
        400, "e.p.msg.bad-attachment", "A forward requires encrypted attachments", 400
    ),
    errors.LinkedAttachment: DIDCommErrorCode(
        400, "e.p.xfer.attachment-links-not-supported", "Attachments must be sent inline", 400
    ),
    errors.ExpiredForward: DIDCommErrorCode(400, "e.p.req.time.expired", "The message has expired", 400),
    errors.RoutingLoop: DIDCommErrorCode(400, "e.p.msg.routing-loop", "Too many hops through this mediator", 400),
    errors.PayloadTooLarge: DIDCommErrorCode(413, "e.p.me.res.storage.message_too_big", "The message is too large"),
    errors.QueueFull: DIDCommErrorCode(
        429, "e.m.me.res.storage", "The recipient's queue is full", 429, retry_after=600
    ),
    errors.StoreUnavailable: DIDCommErrorCode(
        503, "e.p.me.res.storage", "The mediator cannot store messages at the moment", 503, retry_after=5
    ),
    errors.ReplayCacheFull: DIDCommErrorCode(
        503, "e.p.me.res.storage", "The mediator cannot store messages at the moment", 503, retry_after=60
    ),
    errors.SenderMismatch: DIDCommErrorCode(
        400, "e.p.trust.sender-mismatch", "from does not match the key that authenticated the message"
    ),
    errors.AuthcryptRequired: DIDCommErrorCode(
        400, "e.p.trust.authcrypt-required", "This request must be encrypted with authcrypt"
    ),
    errors.UnresolvableDID: DIDCommErrorCode(400, "e.p.did.unresolvable", "The sender's DID does not resolve"),
    errors.UnsupportedDIDMethod: DIDCommErrorCode(
        400, "e.p.did.unsupported", "The sender's DID method is not supported"
    ),
    errors.UnsupportedMessageType: DIDCommErrorCode(
        400, "e.p.msg.unsupported", "The message type is not supported", 200
    ),
    errors.InvalidBody: DIDCommErrorCode(400, "e.p.msg.bad-body", "The body of the message is malformed", 200),
    errors.InvalidLimit: DIDCommErrorCode(400, "e.p.msg.bad-limit", "limit must be a positive integer", 200),
    errors.InvalidPagination: DIDCommErrorCode(
        400, "e.p.msg.bad-paginate", "paginate requires limit and offset, both non-negative integers", 200
    ),
    errors.InvalidUpdates: DIDCommErrorCode(
        400, "e.p.msg.bad-updates", "updates must be a list of recipient updates", 200
    ),
    errors.MisaddressedMessage: DIDCommErrorCode(
        400, "e.p.msg.misaddressed", "The message is addressed to another DID", 200
    ),
    errors.MediationNotGranted: DIDCommErrorCode(400, "e.p.req.not_enroll", "The sender has no mediation grant", 200),
    errors.ReplayedMessage: DIDCommErrorCode(
        400, "e.p.crypto.message.dejavu", "The message has already been received", 200
    ),
    errors.LiveModeUnsupported: DIDCommErrorCode(
        400, "e.m.live-mode-not-supported", "Connection does not support Live Delivery", 200
    ),
    errors.ExpiredMessage: DIDCommErrorCode(400, "e.p.req.time.expired", "The message has expired", 200),
    errors.TooManyErrors: DIDCommErrorCode(400, "e.p.req.max-errors-exceeded", "Too many problem reports", 200),
    errors.TooManyDevices: DIDCommErrorCode(
        400, "e.p.me.res.devices", "The account has too many devices for push notifications", 200
    ),
    # The codes of Aries RFC 0734 in the form of Report Problem 2.0.
    errors.MissingDeviceValue: DIDCommErrorCode(
        400, "e.p.msg.missing-value", "A registration requires all values, or null for all", 200
    ),
    errors.DeviceNotRegistered: DIDCommErrorCode(
        400, "e.p.req.not-registered-for-push-notifications", "No device is registered for push notifications", 200
    ),
    errors.ShutdownInProgress: DIDCommErrorCode(
        503, "e.p.me.stopping", "The mediator is shutting down", retry_after=5
    ),
    errors.DeadlineExceeded: DIDCommErrorCode(503, "e.p.me.busy", "The mediator is too busy", retry_after=5),
    errors.InternalFault: DIDCommErrorCode(500, "e.p.me.fault", "Internal mediator error"),
}


# Codes of Identus's mediator and of the public conformance suite that differ from UC-021.
IDENTUS_PROBLEM_CODES: dict[type[MediatorError], str] = {errors.UnknownRecipient: "e.p.req.not_enroll"}
# Codes that libraries of DIDComm v1 know (ACA-Py; Aries RFC 0734); for other errors they are those of v2.
V1_PROBLEM_CODES: dict[type[MediatorError], str] = {
    errors.MediationNotGranted: "mediation_not_granted",
    errors.MissingDeviceValue: "missing-value",
    errors.DeviceNotRegistered: "not-registered-for-push-notifications",
}


@dataclass(frozen=True, slots=True)
class DecentrlErrorCode:
    """
    The response to a Decentrl client, `{"type":"ERROR","code":...}`, and its HTTP status.

    :param retry_after: as in :class:`DIDCommErrorCode`.
    """

    status: int
    code: str
    retry_after: int | None = None


# DCTRL-0004 section 11.2, and additions of its reference section 12.
DECENTRL_ERROR_CODES: dict[type[MediatorError], DecentrlErrorCode] = {
    errors.InvalidCommand: DecentrlErrorCode(400, "INVALID_COMMAND"),
    errors.InvalidSignature: DecentrlErrorCode(401, "INVALID_SIGNATURE"),
    errors.InvalidContractSignatures: DecentrlErrorCode(401, "INVALID_SIGNATURES"),
    errors.InvalidEventSignature: DecentrlErrorCode(401, "INVALID_EVENT_SIGNATURE"),
    errors.UnauthorizedCommand: DecentrlErrorCode(401, "UNAUTHORIZED_COMMAND"),
    errors.TimestampOutOfRange: DecentrlErrorCode(401, "TIMESTAMP_OUT_OF_RANGE"),
    errors.DuplicateNonce: DecentrlErrorCode(401, "DUPLICATE_NONCE"),
    errors.SenderNotFound: DecentrlErrorCode(404, "SENDER_NOT_FOUND"),
    errors.SenderSigningKeyNotFound: DecentrlErrorCode(404, "SENDER_SIGNING_KEY_NOT_FOUND"),
    errors.RecipientNotFound: DecentrlErrorCode(404, "RECIPIENT_NOT_FOUND"),
    errors.RecipientNotRegistered: DecentrlErrorCode(404, "RECIPIENT_NOT_REGISTERED"),
    errors.ContractNotFound: DecentrlErrorCode(404, "COMMUNICATION_CONTRACT_NOT_FOUND"),
    errors.PublicEventNotFound: DecentrlErrorCode(404, "PUBLIC_EVENT_NOT_FOUND"),
    errors.PayloadTooLarge: DecentrlErrorCode(413, "PAYLOAD_TOO_LARGE"),
    errors.RateLimitExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=60),
    errors.RegistrationLimitExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=3600),
    errors.RegistrationCapacityExceeded: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=3600),
    errors.QuotaExceeded: DecentrlErrorCode(429, "RATE_LIMITED", retry_after=600),
    errors.StoreUnavailable: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    errors.ShutdownInProgress: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    errors.DeadlineExceeded: DecentrlErrorCode(503, "UNAVAILABLE", retry_after=5),
    errors.InternalFault: DecentrlErrorCode(500, "INTERNAL_ERROR"),
}


@dataclass(frozen=True, slots=True)
class DecentrlCloseCode:
    """
    How an error closes a Decentrl WebSocket before authentication (DCTRL-0004 section 10.3).

    :param close_code: code of the close frame that follows `AUTH_FAILED`.
    :param status: equivalent HTTP status for metrics and event log.
    """

    close_code: int
    code: str
    status: int


DECENTRL_CLOSE_CODES: dict[type[MediatorError], DecentrlCloseCode] = {
    errors.AuthTimeout: DecentrlCloseCode(4001, "AUTH_TIMEOUT", 401),
    errors.InvalidMessage: DecentrlCloseCode(4002, "INVALID_MESSAGE", 400),
    errors.TimestampOutOfRange: DecentrlCloseCode(4003, "TIMESTAMP_OUT_OF_RANGE", 401),
    errors.SenderNotFound: DecentrlCloseCode(4004, "DID_NOT_FOUND", 404),
    errors.SenderSigningKeyNotFound: DecentrlCloseCode(4005, "SIGNING_KEY_NOT_FOUND", 404),
    errors.InvalidSignature: DecentrlCloseCode(4006, "INVALID_SIGNATURE", 401),
    errors.DuplicateNonce: DecentrlCloseCode(4002, "INVALID_MESSAGE", 401),
    errors.UnauthorizedCommand: DecentrlCloseCode(4007, "NOT_REGISTERED", 401),
    # Not in the standard, which lists client errors only. 1013 means "try again later".
    errors.RateLimitExceeded: DecentrlCloseCode(1013, "RATE_LIMITED", 429),
    errors.StoreUnavailable: DecentrlCloseCode(1013, "UNAVAILABLE", 503),
    errors.InternalFault: DecentrlCloseCode(1011, "INTERNAL_ERROR", 500),
}


def get_didcomm_error_code(error: ErrorOrClass) -> DIDCommErrorCode:
    """The DIDComm report of an error."""
    return _look_up(DIDCOMM_ERROR_CODES, error)


def get_decentrl_error_code(error: ErrorOrClass) -> DecentrlErrorCode:
    """The Decentrl response to an error."""
    return _look_up(DECENTRL_ERROR_CODES, error)


def get_decentrl_close_code(error: ErrorOrClass) -> DecentrlCloseCode:
    """The WebSocket close code of an error."""
    return _look_up(DECENTRL_CLOSE_CODES, error)


def _look_up(table: Mapping[type[MediatorError], ErrorCode], error: ErrorOrClass) -> ErrorCode:
    """The row of the error's class or of its nearest base class; that of InternalFault if there is none."""
    for kind in (error if isinstance(error, type) else type(error)).__mro__:
        if kind in table:
            return table[kind]
    return table[errors.InternalFault]
