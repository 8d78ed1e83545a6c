"""
The situations in which mediatord says no.

Domain code raises a situation and never knows a status code; :mod:`mediatord.protocol.error_codes` gives each its form.
"""

from __future__ import annotations

from typing import ClassVar


class StartupError(Exception):
    """The daemon cannot start; the text is one line for the operator."""


class MediatorError(Exception):
    """
    A refusal with a row in :mod:`mediatord.protocol.error_codes`.

    :cvar reason: label of this class in metrics and the event log; every subclass states its own.
    """

    reason: ClassVar[str]

    def __init_subclass__(cls, *, reason: str) -> None:
        super().__init_subclass__()
        cls.reason = reason

    def __init__(self, *, retry_after: float | None = None) -> None:
        """:param retry_after: seconds after which trying again makes sense, if that is known here."""
        super().__init__()
        self.retry_after = retry_after


class UnknownRecipient(MediatorError, reason="recipient_unknown"):
    """`next` is not registered here (UC-021 AF-1)."""


class RateLimitExceeded(MediatorError, reason="rate_limited"):
    """The sender or its address is over its limit (UC-021 AF-2)."""


class DecryptionError(MediatorError, reason="undecryptable"):
    """The envelope does not open, for whichever reason (UC-021 AF-3); all reasons look alike from outside."""


class InvalidEnvelope(MediatorError, reason="not_an_envelope"):
    """The body is not JSON, or not a JWE."""


class UnsupportedMediaType(InvalidEnvelope, reason="alien_media_type"):
    """The body is not a JWE and its Content-Type said so."""


class EncryptionRequired(MediatorError, reason="not_encrypted"):
    """A plaintext or merely signed message."""


class InvalidPlaintext(MediatorError, reason="not_a_message"):
    """The envelope opened, but what is inside is no DIDComm message."""


class MissingNext(MediatorError, reason="next_missing"):
    """A forward without a usable `next`."""


class InvalidAttachment(MediatorError, reason="bad_attachment"):
    """A forward without attachments, or with one that cannot be read or is not encrypted."""


class LinkedAttachment(MediatorError, reason="linked_attachment"):
    """A forward whose payload is only linked to."""


class ExpiredForward(MediatorError, reason="forward_expired"):
    """A forward whose `expires_time` has passed."""


class RoutingLoop(MediatorError, reason="routing_loop"):
    """A forward that names this mediator as next hop too many times in a row."""


class PayloadTooLarge(MediatorError, reason="too_large"):
    """The body is over the size limit."""


class QueueFull(MediatorError, reason="queue_full"):
    """What waits for the recipient leaves no room for this, by `queue.when_full: refuse`; nothing was stored."""


class StoreUnavailable(MediatorError, reason="store_unavailable"):
    """The store did not take or give what was asked; nothing was stored."""


class ReplayCacheFull(StoreUnavailable, reason="replay_memory_full"):
    """What was received before takes all the room there is: what could be a repetition is refused, and not done."""


class SenderMismatch(MediatorError, reason="sender_mismatch"):
    """`from` is not the DID of the key that authenticated the message."""


class AuthcryptRequired(MediatorError, reason="authcrypt_required"):
    """A coordination or pickup request without an authenticated sender."""


class UnresolvableDID(MediatorError, reason="sender_unresolvable"):
    """The sender's DID does not resolve, or has no usable key of that id."""


class UnsupportedDIDMethod(MediatorError, reason="sender_unsupported"):
    """The sender's DID method is not one that is resolved here."""


class UnsupportedMessageType(MediatorError, reason="unsupported"):
    """An unknown message type, or a version that is not served."""


class InvalidBody(MediatorError, reason="bad_body"):
    """The body of a request does not have the members its type asks for."""


class InvalidLimit(InvalidBody, reason="bad_limit"):
    """`limit` of a delivery-request is missing, not an integer, or below 1."""


class InvalidPagination(InvalidBody, reason="bad_paginate"):
    """`paginate` of a query is incomplete or not made of natural numbers."""


class InvalidUpdates(InvalidBody, reason="bad_updates"):
    """`updates` of a recipient-update is not a list of updates."""


class MisaddressedMessage(MediatorError, reason="misaddressed"):
    """A coordination or pickup request whose `to` names somebody else (a replay from another mediator)."""


class MediationNotGranted(MediatorError, reason="not_enrolled"):
    """The sender has no grant, or asks for a DID that is not its own."""


class ReplayedMessage(MediatorError, reason="replayed"):
    """The very same envelope came before."""


class LiveModeUnsupported(MediatorError, reason="live_mode_unsupported"):
    """Live delivery was asked for over a connection that cannot push."""


class ExpiredMessage(MediatorError, reason="message_expired"):
    """A protocol message whose `expires_time` has passed."""


class TooManyErrors(MediatorError, reason="too_many_errors"):
    """A peer that reports problem after problem."""


class ShutdownInProgress(MediatorError, reason="shutting_down"):
    """The daemon is stopping and takes no new work."""


class DeadlineExceeded(MediatorError, reason="deadline_exceeded"):
    """The answer took longer than the processing deadline."""


class InternalFault(MediatorError, reason="internal_fault"):
    """A fault of ours; the log has the details."""


class InvalidCommand(MediatorError, reason="invalid_command"):
    """The body of a Decentrl request fails its schema, or asks for what makes no sense (DCTRL-0004 11.2)."""


class InvalidSignature(MediatorError, reason="invalid_signature"):
    """The signature of a command or of a socket's authentication does not verify."""


class InvalidContractSignatures(MediatorError, reason="invalid_contract_signatures"):
    """A signature of a contract does not verify, or there is no key to verify it with."""


class InvalidEventSignature(MediatorError, reason="invalid_event_signature"):
    """The publisher's signature of a public event does not verify."""


class UnauthorizedCommand(MediatorError, reason="unauthorized_command"):
    """The sender is not registered, or its command is not addressed to this mediator."""


class TimestampOutOfRange(MediatorError, reason="timestamp_out_of_range"):
    """The clock of a sender is off by more than the window."""


class DuplicateNonce(MediatorError, reason="duplicate_nonce"):
    """The sender has used this nonce before."""


class SenderNotFound(MediatorError, reason="sender_not_found"):
    """The DID of a Decentrl sender does not resolve."""


class SenderSigningKeyNotFound(MediatorError, reason="sender_signing_key_not_found"):
    """The sender's DID document has no signing key of this id."""


class RecipientNotFound(MediatorError, reason="recipient_not_found"):
    """The DID of a Decentrl recipient does not resolve."""


class RecipientNotRegistered(MediatorError, reason="recipient_not_registered"):
    """The recipient has no registration here that has not expired."""


class ContractNotFound(MediatorError, reason="contract_not_found"):
    """The recipient owns no contract with the sender that has not expired."""


class PublicEventNotFound(MediatorError, reason="public_event_not_found"):
    """The publisher has no public event of this id."""


class RegistrationLimitExceeded(RateLimitExceeded, reason="registration_limited"):
    """As many accounts or registrations as are allowed have come from this address today."""


class RegistrationCapacityExceeded(RateLimitExceeded, reason="registrations_full"):
    """As many accounts are kept as are allowed, or as much of their registrations."""


class QuotaExceeded(RateLimitExceeded, reason="over_quota"):
    """As much is kept for this DID as is allowed."""


class AuthTimeout(MediatorError, reason="auth_timeout"):
    """A Decentrl socket did not authenticate in time."""


class InvalidMessage(MediatorError, reason="invalid_message"):
    """The first frame of a Decentrl socket is no authentication."""
