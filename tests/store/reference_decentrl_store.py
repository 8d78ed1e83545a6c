"""The Decentrl part of the reference store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    MediatorError,
    PublicEventNotFound,
    QuotaExceeded,
    RecipientNotRegistered,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
    get_utf8_size,
)
from mediatord.store.interfaces.messages import MessageLedger, RemovedMessage

T = TypeVar("T")


class NonceClaims(Protocol):
    """The nonces of the store."""

    def holds(self, key: bytes, now: float) -> bool: ...

    def refuse_full(self, key: bytes, share: float = 1.0) -> None: ...

    def claim(self, key: bytes, until: float, now: float) -> bool: ...


class ReferenceDecentrlStore:
    """
    Keeps all items in lists, in order of arrival.

    :param answer: calls a function, and returns its result or error as a Deferred.
    """

    def __init__(
        self, answer: Callable[..., Deferred[Any]], clock: IReactorTime, caps: DecentrlQuotas, nonces: NonceClaims
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._caps = caps
        self._nonces = nonces
        self._registrations: list[Contract] = []
        self._contracts: list[Contract] = []
        self._until: dict[tuple[str | None, str], float] = {}
        self._requests: list[ContractRequest] = []
        self.pending: list[PendingEvent] = []
        self._acknowledged = 0
        self._stored: list[tuple[str, StoredEvent]] = []
        self._unprocessed: set[str] = set()
        self._public: list[tuple[str, PublicEvent]] = []

    def read_ledger(self) -> MessageLedger:
        waiting = len(self.pending)
        return MessageLedger(accepted=self._acknowledged + waiting, acknowledged=self._acknowledged, waiting=waiting)

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded(guard, lambda: None)

    def registered_until(self, did: str) -> Deferred[float | None]:
        return succeed(self._get_registration_end(did))

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        return self._guarded(guard, lambda: self._save_contract(contract))

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        after, before = wanted.expires_after, wanted.expires_before
        return _make_page(
            [
                contract
                for contract in self._contracts
                if contract.owner_did == owner
                and wanted.did in (None, owner, contract.peer_did)
                and (after is None or contract.expires_at >= after)
                and (before is None or contract.expires_at <= before)
            ],
            part,
        )

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        def add() -> None:
            waiting = [one.sender_did for one in self._requests if one.recipient_did == request.recipient_did]
            if len(waiting) >= self._caps.requests or waiting.count(request.sender_did) >= self._caps.requests_of_one:
                raise QuotaExceeded()
            _check_ids([request], self._requests)
            self._requests.append(request)

        return self._guarded(guard, add)

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        return _make_page([request for request in self._requests if request.recipient_did == recipient], part)

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        def acknowledge() -> None:
            self._requests = [
                request for request in self._requests if request.recipient_did != recipient or request.id not in ids
            ]

        return self._guarded(guard, acknowledge)

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        def add() -> None:
            now = self._clock.seconds()
            if self._until.get((event.recipient_did, event.sender_did), now) <= now:
                raise ContractNotFound()
            payloads = [item.payload for item in self.pending if item.recipient_did == event.recipient_did]
            size = get_utf8_size(event.payload)
            if (
                len(payloads) >= self._caps.pending
                or size
                and get_utf8_size(*payloads) + size > self._caps.pending_bytes
            ):
                raise QuotaExceeded()
            _check_ids([event], self.pending)
            self.pending.append(event)

        return self._guarded(guard, add)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return _make_page(
            [item for item in self.pending if item.recipient_did == recipient and sender in (None, item.sender_did)],
            part,
        )

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        def acknowledge() -> list[RemovedMessage]:
            gone = [item for item in self.pending if item.recipient_did == recipient and item.id in ids]
            self.pending = [item for item in self.pending if item not in gone]
            self._acknowledged += len(gone)
            return [
                RemovedMessage(item.id, recipient, recipient, get_utf8_size(item.payload), item.received_at, 0)
                for item in gone
            ]

        return self._guarded(guard, acknowledge)

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        def save() -> None:
            self._check_archive(
                owner, len(events), sum(get_utf8_size(event.payload, *event.tags) for event in events)
            )
            _check_ids(events, [one for _, one in self._stored])
            self._stored += [(owner, event) for event in events]
            self._unprocessed |= {event.id for event in events if event.sender_did != owner}

        return self._guarded(guard, save)

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        found = [
            one
            for holder, one in self._stored
            if holder == owner
            and _has_tags(one, wanted)
            and wanted.participant in (None, one.sender_did, one.recipient_did)
            and (one.id in self._unprocessed or not wanted.unprocessed_only)
        ]
        return _make_page(sorted(found, key=lambda one: one.timestamp), part)

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        def update() -> None:
            new = dict(tags)
            events = [one for holder, one in self._stored if holder == owner and one.id in new]
            growth = sum(get_utf8_size(*new[event.id]) - get_utf8_size(*event.tags) for event in events)
            self._check_archive(owner, 0, growth)
            self._stored = [
                (holder, replace(one, tags=new[one.id]) if one in events else one) for holder, one in self._stored
            ]
            self._unprocessed -= {event.id for event in events}

        return self._guarded(guard, update)

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        def publish() -> None:
            self._check_archive(publisher, 1, get_utf8_size(event.event, *event.tags))
            _check_ids([event], [one for _, one in self._public])
            self._public.append((publisher, event))

        return self._guarded(guard, publish)

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        def unpublish() -> None:
            kept = [(holder, one) for holder, one in self._public if holder != publisher or one.id != event_id]
            if len(kept) == len(self._public):
                raise PublicEventNotFound()
            self._public = kept

        return self._guarded(guard, unpublish)

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        found = [
            one
            for holder, one in self._public
            if holder == publisher and _has_tags(one, wanted) and wanted.channel_id in (None, one.channel_id)
        ]
        return _make_page(sorted(found, key=lambda one: one.timestamp)[::-1], part)

    def _guarded(self, guard: CommandGuard, work: Callable[[], T]) -> Deferred[T]:
        """Check a guard and do the work. The nonce stays claimed unless the store failed."""

        def check_and_work() -> T:
            now = self._clock.seconds()
            if self._nonces.holds(guard.nonce, now):
                raise DuplicateNonce()
            self._nonces.refuse_full(guard.nonce, guard.share)
            try:
                if guard.sender is not None and self._get_registration_end(guard.sender) is None:
                    raise UnauthorizedCommand()
                if guard.recipient is not None and self._get_registration_end(guard.recipient) is None:
                    raise RecipientNotRegistered()
                done = work()
            except StoreUnavailable:
                raise
            except MediatorError:
                self._nonces.claim(guard.nonce, guard.until, now)
                raise
            self._nonces.claim(guard.nonce, guard.until, now)
            return done

        return self._answer(check_and_work)

    def _get_registration_end(self, did: str) -> float | None:
        now = self._clock.seconds()
        latest = max(
            [registration.expires_at for registration in self._registrations if registration.peer_did == did],
            default=now,
        )
        return latest if latest > now else None

    def _save_contract(self, contract: Contract) -> None:
        """
        A registration, which has no owner, replaces the one that expires first if there are too many; a contract
        replaces an expired one.
        """
        now, owner, peer = self._clock.seconds(), contract.owner_did, contract.peer_did
        if owner is None:
            others = [registration for registration in self._registrations if registration.peer_did != peer]
            registrations = [
                registration
                for registration in self._registrations
                if registration.peer_did == peer and registration.expires_at > now
            ]
            if contract.digest not in [registration.digest for registration in registrations]:
                registrations.append(contract)
                while len(registrations) > self._caps.contracts_with_one:
                    registrations.remove(min(registrations, key=lambda one: one.expires_at))
                self._registrations = others + registrations
            return
        registrations = [one for one in self._contracts if one.owner_did == owner]
        if contract.digest in [registration.digest for registration in registrations]:
            return
        _check_ids([contract], self._contracts)
        with_peer = [registration for registration in registrations if registration.peer_did == peer]
        too_many = with_peer if len(with_peer) >= self._caps.contracts_with_one else registrations
        if too_many is with_peer or len(registrations) >= self._caps.contracts:
            oldest = next((one for one in too_many if one.expires_at <= now), None)
            if oldest is None:
                raise QuotaExceeded()
            self._contracts.remove(oldest)
        self._contracts.append(contract)
        self._until[owner, peer] = max(contract.expires_at, self._until.get((owner, peer), contract.expires_at))

    def _check_archive(self, owner: str, items: int, size: int) -> None:
        """:raise QuotaExceeded: there would be too much; less never is."""
        sizes = [get_utf8_size(one.payload, *one.tags) for holder, one in self._stored if holder == owner]
        sizes += [get_utf8_size(one.event, *one.tags) for holder, one in self._public if holder == owner]
        if (
            items > 0
            and len(sizes) + items > self._caps.stored
            or size > 0
            and sum(sizes) + size > self._caps.stored_bytes
        ):
            raise QuotaExceeded()


class _HasID(Protocol):
    @property
    def id(self) -> str: ...


def _check_ids(items: Sequence[_HasID], existing: Sequence[_HasID]) -> None:
    """:raise StoreUnavailable: an id exists, or occurs twice."""
    if max(Counter(one.id for one in (*existing, *items)).values(), default=0) > 1:
        raise StoreUnavailable()


def _has_tags(event: StoredEvent | PublicEvent, wanted: EventFilter | PublicEventFilter) -> bool:
    """Whether an event has one of the tags, if there are any, and is of that time."""
    return (
        (not wanted.tags or not set(wanted.tags).isdisjoint(event.tags))
        and (wanted.after is None or event.timestamp >= wanted.after)
        and (wanted.before is None or event.timestamp <= wanted.before)
    )


def _make_page(items: Sequence[T], part: PageRequest) -> Deferred[ResultPage[T]]:
    return succeed(ResultPage(tuple(items[part.offset : part.offset + part.limit]), len(items)))
