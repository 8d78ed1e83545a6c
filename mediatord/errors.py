"""
The situations in which mediatord says no.

Domain code raises a situation and never knows a status code; :mod:`mediatord.protocol.error_codes` gives each its form.
"""

from __future__ import annotations


class StartupError(Exception):
    """The daemon cannot start; the text is one line for the operator."""


class MediatorError(Exception):
    """A situation with a row in :mod:`mediatord.protocol.error_codes`."""

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


class QueueFull(MediatorError):
    """What waits for the recipient leaves no room for this, by `queue.when_full: refuse`; nothing was stored."""


class StoreUnavailable(MediatorError):
    """The store did not take or give what was asked; nothing was stored."""


class ReplayMemoryFull(StoreUnavailable):
    """What was received before takes all the room there is: what could be a repetition is refused, and not done."""


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


class InvalidCommand(MediatorError):
    """The body of a Decentrl request fails its schema, or asks for what makes no sense (DCTRL-0004 11.2)."""


class InvalidSignature(MediatorError):
    """The signature of a command or of a socket's authentication does not verify."""


class InvalidContractSignatures(MediatorError):
    """A signature of a contract does not verify, or there is no key to verify it with."""


class InvalidEventSignature(MediatorError):
    """The publisher's signature of a public event does not verify."""


class UnauthorizedCommand(MediatorError):
    """The sender is not registered, or its command is not addressed to this mediator."""


class TimestampOutOfRange(MediatorError):
    """The clock of a sender is off by more than the window."""


class DuplicateNonce(MediatorError):
    """The sender has used this nonce before."""


class SenderNotFound(MediatorError):
    """The DID of a Decentrl sender does not resolve."""


class SenderSigningKeyNotFound(MediatorError):
    """The sender's DID document has no signing key of this id."""


class RecipientNotFound(MediatorError):
    """The DID of a Decentrl recipient does not resolve."""


class RecipientNotRegistered(MediatorError):
    """The recipient has no registration here that has not expired."""


class ContractNotFound(MediatorError):
    """The recipient owns no contract with the sender that has not expired."""


class PublicEventNotFound(MediatorError):
    """The publisher has no public event of this id."""


class RegistrationLimited(RateLimited):
    """As many accounts or registrations as are allowed have come from this address today."""


class RegistrationsFull(RateLimited):
    """As many accounts are kept as are allowed, or as much of their registrations."""


class OverQuota(RateLimited):
    """As much is kept for this DID as is allowed."""


class AuthTimeout(MediatorError):
    """A Decentrl socket did not authenticate in time."""


class InvalidMessage(MediatorError):
    """The first frame of a Decentrl socket is no authentication."""
