"""
What the Decentrl half keeps: contracts, contract requests, and pending, stored and public events (DCTRL-0004).

Payloads, tags and contracts are opaque and come back as they were given. DIDs are compared as exact strings. Ids are
given by the caller (:func:`mediatord.store.interfaces.messages.new_stored_message_id`), unique and unguessable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage

Item = TypeVar("Item")


# Bytes of payload that one slice may have: it is in memory at once, and so is the answer made of it.
MAX_PAGE_BYTES = 16_777_216


@dataclass(frozen=True, slots=True)
class CommandGuard:
    """
    What has to hold before a command is carried out, looked at in this order (reference 6.1 to 6.3).

    The nonce stays claimed whatever comes after it, a refusal included; only when the store fails is nothing kept.

    :param nonce: what stands for the pair of nonce and sender DID.
    :param until: when it may be forgotten.
    :param sender: DID that has to be registered; None when anybody may send this.
    :param recipient: DID that has to be registered as well.
    :param share: as :meth:`~mediatord.store.interfaces.store.INonceCache.claim_nonce` has it.
    """

    nonce: bytes
    until: float
    sender: str | None = None
    recipient: str | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which of the matching items: at most `limit` after the first `offset`; either may be beyond all there is."""

    offset: int = 0
    limit: int = 10


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[Item]):
    """:param total: how many match in all, of which `items` are a slice."""

    items: tuple[Item, ...]
    total: int


@dataclass(frozen=True, slots=True)
class DecentrlQuotas:
    """
    How much is kept for whom; what is over is refused with :class:`~mediatord.errors.QuotaExceeded`, and nothing that
    still counts is evicted. Bytes are those of UTF-8: of payload and tags of stored events, of event and
    tags of public ones.

    :param requests: contract requests that may wait for one DID; of one sender to one DID at most `requests_of_one`.
    :param contracts: contracts that one DID may own; with one and the same peer at most `contracts_with_one`. Expired
        ones make room. Of registrations, which the mediator owns, only the second counts, and there the one that
        expires first makes room.
    :param pending: events that may wait for one DID, and their bytes: no more than a slice may have, since a wallet
        that always asks for the same number of events could not get past those that are too long together.
    :param stored: stored and public events that one DID may keep, and their bytes.
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
    """A request for a contract, encrypted for its recipient, until acknowledged."""

    id: str
    sender_did: str
    recipient_did: str
    encrypted_contract_request: str = field(repr=False)
    requestor_ephemeral_public_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Contract:
    """
    A signed communication contract, seen from its owner.

    :param owner_did: None for a registration, which the mediator owns.
    :param peer_did: the other participant; of a registration the one who is registered.
    :param expires_at: until when it authorises anything, exclusively.
    :param digest: the same for the same signed contract, however it is spelled.
    :param text: all of it as JSON, as it came.
    """

    id: str
    owner_did: str | None
    peer_did: str
    expires_at: float
    digest: bytes
    text: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ContractFilter:
    """:param did: either participant; bounds are inclusive, in seconds."""

    did: str | None = None
    expires_before: float | None = None
    expires_after: float | None = None


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event on its way to `recipient_did`, until acknowledged."""

    id: str
    recipient_did: str
    sender_did: str
    payload: str = field(repr=False)
    received_at: float

    @property
    def expires_at(self) -> None:
        """Never: it waits until it is acknowledged."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """
    An event that its owner keeps here, encrypted for itself.

    :param timestamp: as the owner gave it: seconds, or whatever it chose to call so.
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
    All of it has to match.

    :param tags: at least one of them; none is no filter.
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
    """An event of a public channel, in the clear (DCTRL-0007)."""

    id: str
    event: str = field(repr=False)
    tags: tuple[str, ...] = field(repr=False)
    timestamp: float
    event_signature: str = field(repr=False)
    channel_id: str | None = None


@dataclass(frozen=True, slots=True)
class PublicEventFilter:
    """As :class:`EventFilter`."""

    tags: tuple[str, ...] = ()
    after: float | None = None
    before: float | None = None
    channel_id: str | None = None


class IDecentrlStore(Interface):
    """
    All that DCTRL-0004 asks a mediator to keep.

    A DID is registered while a registration of it is kept that has not expired; that is looked up every time. Every
    write takes the guard of its command and is one transaction with it, durable when its Deferred fires, which may
    fail with the errors of :meth:`admit`. Orders are total and stable. A slice of events whose payloads are more than
    :data:`MAX_PAGE_BYTES` together fails with :class:`~mediatord.errors.PayloadTooLarge`: a smaller one can be asked for.
    An id that its kind has already fails with StoreUnavailable.
    """

    def check_guard(guard: CommandGuard) -> Deferred[None]:
        """
        Only what the guard says, for a command that goes on to read or is to be refused.

        :raise DuplicateNonce: it was claimed before.
        :raise UnauthorizedCommand: the sender is not registered.
        :raise RecipientNotRegistered: the recipient is not.
        """

    def registered_until(did: str) -> Deferred[float | None]:
        """When the last of its registrations expires; None when it is not registered now."""

    def save_contract(guard: CommandGuard, contract: Contract) -> Deferred[None]:
        """
        Keep a contract or registration; of those with the same owner and digest the first is kept.

        :raise QuotaExceeded: it would be one too many, and no other has expired.
        """

    def contracts(owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        """Contracts of one owner, expired ones too, oldest first."""

    def request_contract(guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        """:raise QuotaExceeded: too many wait already."""

    def contract_requests(recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        """What waits for a DID, oldest first."""

    def acknowledge_requests(guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        """Remove requests to `recipient`; ids that are unknown or of others are ignored."""

    def enqueue_event(guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        """
        Keep an event for its recipient (reference 6.3); `event.received_at` is kept as it is.

        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired, by the store's
            clock.
        :raise QuotaExceeded: too much waits already.
        """

    def pending_events(recipient: str, sender: str | None, part: PageRequest) -> Deferred[ResultPage[PendingEvent]]:
        """What waits for a DID, of one sender or of all, in order of arrival."""

    def find_pending(ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        """
        The events with these ids that still wait, whoever for, in order of arrival, but no more than the first whose
        payloads fit in :data:`MAX_PAGE_BYTES`, and at least one if there is one.
        """

    def find_pending_arrivals(
        recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        """
        What came for these DIDs in a time, by `received_at`, and still waits: the first `limit` of it, or less if
        there is no more.
        """

    def acknowledge_events(guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """
        Remove events that wait for `recipient`; ids that are unknown or of others are ignored. Fires with those that
        were there in order of arrival, `account` being the recipient and `pushes` 0.
        """

    def save_events(guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        """
        Keep all of them or none; processed are those whose sender is the owner.

        :raise QuotaExceeded: they would be too much.
        """

    def events(owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        """Stored events of one owner by timestamp, then in the order in which they were saved."""

    def update_tags(guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> Deferred[None]:
        """
        Replace the tags of events and mark them processed, given as pairs of id and tags; ids that are unknown or of
        others are ignored, of an id that is there twice the last counts.

        :raise QuotaExceeded: they would be too much.
        """

    def publish(guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        """:raise QuotaExceeded: it would be one too many."""

    def unpublish(guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        """:raise PublicEventNotFound: the publisher has none with this id."""

    def public_events(
        publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        """By timestamp, newest first, then the one that was published last."""
