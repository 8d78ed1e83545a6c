"""The Decentrl half of the memory store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    MediatorError,
    RecipientNotRegistered,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.interfaces import Arrival, Removed, Window
from mediatord.interfaces.decentrl import (
    Caps,
    Contract,
    ContractFilter,
    ContractRequest,
    EventFilter,
    Found,
    Guard,
    IDecentrlStore,
    PendingEvent,
    PublicEvent,
    PublicFilter,
    Slice,
    StoredEvent,
)
from mediatord.store.memory_contracts import Contracts, Registrations, Requests
from mediatord.store.memory_events import Archive, Pending
from mediatord.store.memory_nonces import Nonces
from mediatord.store.ranking import Ranking

T = TypeVar("T")


class DecentrlContents:
    """
    What is there between open and close.

    :param nonces: those of the whole store, as is the ranking.
    """

    def __init__(self, caps: Caps, nonces: Nonces, ranking: Ranking) -> None:
        self._nonces = nonces
        self.registrations = Registrations(caps)
        self.contracts = Contracts(caps)
        self.requests = Requests(caps)
        self.pending = Pending(caps, ranking)
        self.archive = Archive(caps)

    def guarded(self, guard: Guard, work: Callable[[], T], now: float) -> T:
        """
        Claim the nonce and do the work if nothing is against it; the nonce stays claimed unless the store failed.

        :raise MediatorError: what is against it.
        """
        if self._nonces.holds(guard.nonce, now):
            raise DuplicateNonce()
        self._nonces.refuse_full(guard.nonce, guard.share)
        try:
            self._check(guard, now)
            done = work()
        except StoreUnavailable:
            raise
        except MediatorError:
            self._nonces.claim(guard.nonce, guard.until, now)
            raise
        self._nonces.claim(guard.nonce, guard.until, now)
        return done

    def save_contract(self, contract: Contract, now: float) -> None:
        """:raise OverQuota: it would be one too many."""
        if contract.owner_did is None:
            self.registrations.save(contract, now)
        else:
            self.contracts.save(contract.owner_did, contract, now)

    def deliver(self, event: PendingEvent, now: float) -> None:
        """
        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired.
        :raise OverQuota: too much waits already.
        """
        if not self.contracts.allow(event.recipient_did, event.sender_did, now):
            raise ContractNotFound()
        self.pending.add(event)

    def _check(self, guard: Guard, now: float) -> None:
        if guard.sender is not None and self.registrations.until(guard.sender, now) is None:
            raise UnauthorizedCommand()
        if guard.recipient is not None and self.registrations.until(guard.recipient, now) is None:
            raise RecipientNotRegistered()


class Answer(Protocol):
    """Fires with what the work returns, or fails with what it raises, or because the store is not open."""

    def __call__(self, work: Callable[[DecentrlContents, float], T]) -> Deferred[T]:
        """Do it now."""


@implementer(IDecentrlStore)
class MemoryDecentrl:
    """Its many methods are those of the interface."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def admit(self, guard: Guard) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: None)

    def registered_until(self, did: str) -> Deferred[float | None]:
        return self._answer(lambda kept, now: kept.registrations.until(did, now))

    def save_contract(self, guard: Guard, contract: Contract) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.save_contract(contract, now))

    def contracts(self, owner: str, wanted: ContractFilter, part: Slice) -> Deferred[Found[Contract]]:
        return self._answer(lambda kept, now: kept.contracts.find(owner, wanted, part))

    def request_contract(self, guard: Guard, request: ContractRequest) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.requests.add(request))

    def contract_requests(self, recipient: str, part: Slice) -> Deferred[Found[ContractRequest]]:
        return self._answer(lambda kept, now: kept.requests.find(recipient, part))

    def acknowledge_requests(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.requests.acknowledge(recipient, ids))

    def deliver(self, guard: Guard, event: PendingEvent) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.deliver(event, now))

    def pending_events(self, recipient: str, sender: str | None, part: Slice) -> Deferred[Found[PendingEvent]]:
        return self._answer(lambda kept, now: kept.pending.find(recipient, sender, part))

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        return self._answer(lambda kept, now: kept.pending.find_by_id(ids))

    def arrived_pending(self, recipients: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        return self._answer(lambda kept, now: kept.pending.arrived(recipients, window, limit))

    def acknowledge_events(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        return self._guarded(guard, lambda kept, now: kept.pending.acknowledge(recipient, ids))

    def save_events(self, guard: Guard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.save(owner, events))

    def events(self, owner: str, wanted: EventFilter, part: Slice) -> Deferred[Found[StoredEvent]]:
        return self._answer(lambda kept, now: kept.archive.find(owner, wanted, part))

    def update_tags(self, guard: Guard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.update_tags(owner, tags))

    def publish(self, guard: Guard, publisher: str, event: PublicEvent) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.publish(publisher, event))

    def unpublish(self, guard: Guard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.unpublish(publisher, event_id))

    def public_events(self, publisher: str, wanted: PublicFilter, part: Slice) -> Deferred[Found[PublicEvent]]:
        return self._answer(lambda kept, now: kept.archive.find_public(publisher, wanted, part))

    def _guarded(self, guard: Guard, work: Callable[[DecentrlContents, float], T]) -> Deferred[T]:
        return self._answer(lambda kept, now: kept.guarded(guard, lambda: work(kept, now), now))
