"""
What is stored for Decentrl: contracts, contract requests, and pending, stored and public events (DCTRL-0004).

Payloads, tags and contracts are opaque and come back as they were given. DIDs are compared as exact strings. Ids are
given by the caller (:func:`mediatord.store.interfaces.messages.new_stored_message_id`), unique and unguessable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage

Item = TypeVar("Item")


# Bytes of payload of one page at most: it is in memory at once, and so is the response made of it.
MAX_PAGE_BYTES = 16_777_216


def get_utf8_size(*texts: str) -> int:
    """Bytes of texts as UTF-8, which is how quotas count them."""
    return len("".join(texts).encode())


@dataclass(frozen=True, slots=True)
class CommandGuard:
    """
    Conditions of a command, checked in this order (reference 6.1 to 6.3).

    The nonce stays claimed also if the command is refused; only when the store fails nothing is kept.

    :param nonce: digest of nonce and sender DID.
    :param until: when the nonce may be forgotten.
    :param sender: DID that has to be registered; None when anybody may send this.
    :param recipient: another DID that has to be registered.
    :param share: as for :meth:`~mediatord.store.interfaces.store.INonceCache.claim_nonce`.
    """

    nonce: bytes
    until: float
    sender: str | None = None
    recipient: str | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Slice of the matching items: at most `limit` after the first `offset`; both may exceed the number of items."""

    offset: int = 0
    limit: int = 10


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[Item]):
    """
    A slice of matching items.

    :param total: number of all that match.
    """

    items: tuple[Item, ...]
    total: int


@dataclass(frozen=True, slots=True)
class DecentrlQuotas:
    """
    Limits per DID. What exceeds them is refused with :class:`~mediatord.errors.QuotaExceeded`; nothing is evicted.
    Bytes are those of UTF-8: of payload and tags of stored events, of event and tags of public ones.

    :param requests: queued contract requests to one DID; of one sender to one DID at most `requests_of_one`.
    :param contracts: contracts that one DID owns; with one peer at most `contracts_with_one`. Expired ones make room.
        For registrations, which the mediator owns, only the second limit counts, and the one that expires first makes
        room.
    :param pending: queued events for one DID, and their bytes: no more than a page may have, since a wallet that
        always asks for the same number of events could not get past those that are too large together.
    :param stored: stored and public events of one DID, and their bytes.
    """

    requests: int = 1000
    requests_of_one: int = 10
    contracts: int = 10_000
    contracts_with_one: int = 100
    pending: int = 10_000
    pending_bytes: int = MAX_PAGE_BYTES
    stored: int = 1_000_000
    stored_bytes: int = 1_073_741_824


@dataclass(frozen=True, slots=True)
class ContractRequest:
    """A request for a contract, encrypted for its recipient, queued until it is acknowledged."""

    id: str
    sender_did: str
    recipient_did: str
    encrypted_contract_request: str = field(repr=False)
    requestor_ephemeral_public_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Contract:
    """
    A signed communication contract, as seen from its owner.

    :param owner_did: None for a registration, which the mediator owns.
    :param peer_did: the other participant; of a registration the registered DID.
    :param expires_at: end of its validity, exclusive.
    :param digest: equal for the same signed contract, however it is serialised.
    :param text: the complete contract as JSON, as received.
    """

    id: str
    owner_did: str | None
    peer_did: str
    expires_at: float
    digest: bytes
    text: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ContractFilter:
    """
    Conditions that a contract has to meet.

    :param did: either participant.
    :param expires_before: inclusive, in seconds, like `expires_after`.
    """

    did: str | None = None
    expires_before: float | None = None
    expires_after: float | None = None


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """
    An event for `recipient_did`, queued until it is acknowledged.

    :cvar expires_at: None, as it does not expire.
    """

    expires_at: ClassVar[None] = None
    id: str
    recipient_did: str
    sender_did: str
    payload: str = field(repr=False)
    received_at: float


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """
    An event that its owner stores, encrypted for itself.

    :param timestamp: as given by the owner: seconds, or another unit of its choice.
    """

    id: str
    sender_did: str
    recipient_did: str
    payload: str = field(repr=False)
    tags: tuple[str, ...] = field(repr=False)
    timestamp: float
    contract_id: str | None = None


@dataclass(frozen=True, slots=True)
class EventFilter:
    """
    Conditions that an event has to meet.

    :param tags: at least one of them; empty for no condition.
    :param participant: sender or recipient.
    :param after: inclusive, like `before`.
    """

    tags: tuple[str, ...] = field(default=(), repr=False)
    participant: str | None = None
    after: float | None = None
    before: float | None = None
    unprocessed_only: bool = False


@dataclass(frozen=True, slots=True)
class PublicEvent:
    """An event of a public channel, not encrypted (DCTRL-0007)."""

    id: str
    event: str = field(repr=False)
    tags: tuple[str, ...] = field(repr=False)
    timestamp: float
    event_signature: str = field(repr=False)
    channel_id: str | None = None


@dataclass(frozen=True, slots=True)
class PublicEventFilter:
    """Conditions that a public event has to meet, as in :class:`EventFilter`."""

    tags: tuple[str, ...] = ()
    after: float | None = None
    before: float | None = None
    channel_id: str | None = None


class IDecentrlStore(Interface):
    """
    Everything that DCTRL-0004 requires a mediator to store.

    A DID is registered while it has a registration that has not expired, which is checked every time. Every write
    takes the guard of its command and is one transaction with it, durable when its Deferred fires; it may fail with
    the errors of :meth:`check_guard`. Orders are total and stable. A page of events whose payloads have more than
    :data:`MAX_PAGE_BYTES` fails with :class:`~mediatord.errors.PayloadTooLarge`: a smaller one can be requested. An
    id that exists already fails with StoreUnavailable.
    """

    def check_guard(guard: CommandGuard) -> Deferred[None]:
        """
        Check the guard alone, for a command that reads, or is refused.

        :raise DuplicateNonce: the nonce was claimed before.
        :raise UnauthorizedCommand: the sender is not registered.
        :raise RecipientNotRegistered: the recipient is not registered.
        """

    def registered_until(did: str) -> Deferred[float | None]:
        """When the last registration of a DID expires; None when it is not registered now."""

    def save_contract(guard: CommandGuard, contract: Contract) -> Deferred[None]:
        """
        Store a contract or registration; of those with the same owner and digest the first is kept.

        :raise QuotaExceeded: there are too many, and none has expired.
        """

    def contracts(owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        """Contracts of one owner, including expired ones, oldest first."""

    def request_contract(guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        """
        Queue a contract request.

        :raise QuotaExceeded: too many are queued.
        """

    def contract_requests(recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        """Contract requests that are queued for a DID, oldest first."""

    def acknowledge_requests(guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        """Remove requests to `recipient`; ids that are unknown or of others are ignored."""

    def enqueue_event(guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        """
        Queue an event for its recipient (reference 6.3), with the given `event.received_at`.

        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired, by the store's
            clock.
        :raise QuotaExceeded: too much is queued.
        """

    def pending_events(recipient: str, sender: str | None, part: PageRequest) -> Deferred[ResultPage[PendingEvent]]:
        """Events that are queued for a DID, of one sender or of all, in order of arrival."""

    def find_pending(ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        """
        Queued events with these ids, for any recipient, in order of arrival, but no more than the first whose
        payloads fit in :data:`MAX_PAGE_BYTES`, and at least one if there is one.
        """

    def find_pending_arrivals(
        recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        """
        Queued events for these DIDs that arrived in a window, by `received_at`; fewer than `limit` only if there are
        no more.
        """

    def acknowledge_events(guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """
        Remove events that are queued for `recipient`; ids that are unknown or of others are ignored. Fires with the
        removed ones in order of arrival; their `account` is the recipient, and `pushes` 0.
        """

    def save_events(guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        """
        Store all events or none; those whose sender is the owner are processed.

        :raise QuotaExceeded: they would exceed the quota.
        """

    def events(owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        """Stored events of one owner by timestamp, then in the order in which they were saved."""

    def update_tags(guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> Deferred[None]:
        """
        Replace the tags of events, given as pairs of id and tags, and mark them processed. Ids that are unknown or of
        others are ignored; of a repeated id the last pair counts.

        :raise QuotaExceeded: they would exceed the quota.
        """

    def publish(guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        """
        Store a public event.

        :raise QuotaExceeded: it would exceed the quota.
        """

    def unpublish(guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        """
        Remove a public event.

        :raise PublicEventNotFound: the publisher has none with this id.
        """

    def public_events(
        publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        """Public events of a publisher by timestamp, newest first, then the last published one first."""
