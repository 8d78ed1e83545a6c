"""
Exceptions for operators and for refused requests.

Use cases raise the latter without knowing status codes; :mod:`mediatord.protocol.error_codes` maps them to each
protocol.
"""

from __future__ import annotations

from typing import ClassVar


class OperatorError(Exception):
    """
    The text is one line for the operator.

    :cvar exit_status: of a command that fails with it.
    """

    exit_status: ClassVar[int] = 1

    @property
    def problems(self) -> list[str]:
        """One line each."""
        return [str(self)]


class StartupError(OperatorError):
    """The daemon cannot start, or a command cannot be carried out."""


class MediatorError(Exception):
    """
    A request that is refused or fails.

    :cvar reason: label of the class in metrics and the event log; each subclass states its own.
    """

    reason: ClassVar[str]

    def __init_subclass__(cls, *, reason: str) -> None:
        super().__init_subclass__()
        cls.reason = reason

    def __init__(self, *, retry_after: float | None = None) -> None:
        """:param retry_after: seconds after which a retry may succeed, if known."""
        super().__init__()
        self.retry_after = retry_after


class UnknownRecipient(MediatorError, reason="recipient_unknown"):
    """`next` is not registered with this mediator (UC-021 AF-1)."""


class RateLimitExceeded(MediatorError, reason="rate_limited"):
    """A rate limit of the sender or of its address is exceeded (UC-021 AF-2)."""


class DecryptionError(MediatorError, reason="undecryptable"):
    """The envelope cannot be decrypted (UC-021 AF-3); peers cannot tell the causes apart."""


class InvalidEnvelope(MediatorError, reason="not_an_envelope"):
    """The body is not JSON, or not a JWE."""


class UnsupportedMediaType(InvalidEnvelope, reason="alien_media_type"):
    """The body is not a JWE, and its Content-Type is not one of DIDComm's."""


class EncryptionRequired(MediatorError, reason="not_encrypted"):
    """The message is plaintext or only signed."""


class InvalidPlaintext(MediatorError, reason="not_a_message"):
    """The decrypted content is not a DIDComm message."""


class MissingNext(MediatorError, reason="next_missing"):
    """A forward without a usable `next`."""


class InvalidAttachment(MediatorError, reason="bad_attachment"):
    """A forward without attachments, or with one that is unreadable or not encrypted."""


class LinkedAttachment(MediatorError, reason="linked_attachment"):
    """A forward whose payload is only a link."""


class ExpiredForward(MediatorError, reason="forward_expired"):
    """A forward whose `expires_time` has passed."""


class RoutingLoop(MediatorError, reason="routing_loop"):
    """A forward that is addressed to this mediator too many times in a row."""


class PayloadTooLarge(MediatorError, reason="too_large"):
    """The body exceeds the size limit."""


class QueueFull(MediatorError, reason="queue_full"):
    """The recipient's queue is full and `queue.when_full` is `refuse`; nothing was stored."""


class StoreUnavailable(MediatorError, reason="store_unavailable"):
    """The store failed or did not respond; nothing was stored."""


class ReplayCacheFull(StoreUnavailable, reason="replay_memory_full"):
    """The replay cache is full, so a request that could be a replay is refused."""


class SenderMismatch(MediatorError, reason="sender_mismatch"):
    """`from` is not the DID whose key authenticated the message."""


class AuthcryptRequired(MediatorError, reason="authcrypt_required"):
    """A coordination or pickup request without an authenticated sender."""


class UnresolvableDID(MediatorError, reason="sender_unresolvable"):
    """The sender's DID does not resolve, or its document lacks the key."""


class UnsupportedDIDMethod(MediatorError, reason="sender_unsupported"):
    """The sender's DID method is not supported."""


class UnsupportedMessageType(MediatorError, reason="unsupported"):
    """The message type or its version is not supported."""


class InvalidBody(MediatorError, reason="bad_body"):
    """The body of a request lacks members that its type requires."""


class InvalidLimit(InvalidBody, reason="bad_limit"):
    """`limit` of a delivery-request is missing, not an integer, or below 1."""


class InvalidPagination(InvalidBody, reason="bad_paginate"):
    """`paginate` of a query is incomplete or contains anything but natural numbers."""


class InvalidUpdates(InvalidBody, reason="bad_updates"):
    """`updates` of a recipient-update is not a list of updates."""


class MisaddressedMessage(MediatorError, reason="misaddressed"):
    """`to` of a coordination or pickup request names another DID; it may be replayed from another mediator."""


class MediationNotGranted(MediatorError, reason="not_enrolled"):
    """The sender has no mediation grant, or requests a DID that is not its own."""


class ReplayedMessage(MediatorError, reason="replayed"):
    """The same envelope was received before."""


class LiveModeUnsupported(MediatorError, reason="live_mode_unsupported"):
    """Live delivery was requested on a transport that cannot push."""


class ExpiredMessage(MediatorError, reason="message_expired"):
    """A protocol message whose `expires_time` has passed."""


class TooManyErrors(MediatorError, reason="too_many_errors"):
    """A peer sends too many problem reports."""


class ShutdownInProgress(MediatorError, reason="shutting_down"):
    """The daemon is shutting down and accepts no requests."""


class DeadlineExceeded(MediatorError, reason="deadline_exceeded"):
    """The request took longer than the processing deadline."""


class InternalFault(MediatorError, reason="internal_fault"):
    """An internal error; details are in the daemon's log."""


class InvalidCommand(MediatorError, reason="invalid_command"):
    """The body of a Decentrl request does not match its schema, or is inconsistent (DCTRL-0004 11.2)."""


class InvalidSignature(MediatorError, reason="invalid_signature"):
    """The signature of a command or of a socket authentication does not verify."""


class InvalidContractSignatures(MediatorError, reason="invalid_contract_signatures"):
    """A signature of a contract does not verify, or its key is unknown."""


class InvalidEventSignature(MediatorError, reason="invalid_event_signature"):
    """The publisher's signature of a public event does not verify."""


class UnauthorizedCommand(MediatorError, reason="unauthorized_command"):
    """The sender is not registered, or the command is not addressed to this mediator."""


class TimestampOutOfRange(MediatorError, reason="timestamp_out_of_range"):
    """The timestamp of a command is outside the accepted window."""


class DuplicateNonce(MediatorError, reason="duplicate_nonce"):
    """The sender has used this nonce before."""


class SenderNotFound(MediatorError, reason="sender_not_found"):
    """The DID of a Decentrl sender does not resolve."""


class SenderSigningKeyNotFound(MediatorError, reason="sender_signing_key_not_found"):
    """The sender's DID document has no signing key with this id."""


class RecipientNotFound(MediatorError, reason="recipient_not_found"):
    """The DID of a Decentrl recipient does not resolve."""


class RecipientNotRegistered(MediatorError, reason="recipient_not_registered"):
    """The recipient has no unexpired registration here."""


class ContractNotFound(MediatorError, reason="contract_not_found"):
    """The recipient has no unexpired contract with the sender."""


class PublicEventNotFound(MediatorError, reason="public_event_not_found"):
    """The publisher has no public event with this id."""


class RegistrationLimitExceeded(RateLimitExceeded, reason="registration_limited"):
    """The daily limit of accounts or registrations of the address is exceeded."""


class RegistrationCapacityExceeded(RateLimitExceeded, reason="registrations_full"):
    """The total limit of accounts or of registration bytes is reached."""


class QuotaExceeded(RateLimitExceeded, reason="over_quota"):
    """The storage quota of the DID is exceeded."""


class TooManyDevices(QuotaExceeded, reason="too_many_devices"):
    """The account has as many devices for push notifications as one may have."""


class MissingDeviceValue(InvalidBody, reason="device_value_missing"):
    """A registration for push notifications lacks a value that others of it have."""


class DeviceNotRegistered(MediatorError, reason="device_not_registered"):
    """The account has no device for push notifications with the service that it asks about."""


class AuthTimeout(MediatorError, reason="auth_timeout"):
    """A Decentrl socket did not authenticate in time."""


class InvalidMessage(MediatorError, reason="invalid_message"):
    """The first frame of a Decentrl socket is not an authentication."""
