"""
The Decentrl half of the store in an SQLite database, with guarded commands as operations of batches.

A guard and its command are one operation. Neighbouring commands of a batch share the statements that claim their
nonces and look up registrations. Then those of each conflict class are executed in their order, so that there are
more neighbours of a kind: commands of different classes never see each other's changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import DuplicateNonce, RateLimitExceeded, RecipientNotRegistered, UnauthorizedCommand
from mediatord.store.caches import PageCursorCache
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage
from mediatord.store.quotas import get_utf8_size
from mediatord.store.sqlite import decentrl_queries, event_queries, message_queries
from mediatord.store.sqlite.coordination_queries import ClaimOutcome, NonceClaim, claim_nonces
from mediatord.store.sqlite.decentrl_queries import find_registered
from mediatord.store.sqlite.event_search import PageReadOptions
from mediatord.store.sqlite.executor import SQLExecutor
from mediatord.store.sqlite.group_commit import OperationOutcome, SQLOperation, run_operations
from mediatord.store.sqlite.queue_accounting import StoreConnection


@dataclass(slots=True)
class GuardedCommand:
    """
    A command with its guard, as an operation of a batch.

    :param command: refuses, if it does, before its first write.
    :param now: when it was given.
    :param max_nonces: number of nonces that are kept.
    :param conflict_class: names what it reads and changes; commands of other classes do not affect it.
    """

    guard: CommandGuard
    command: SQLOperation
    now: float
    max_nonces: int
    conflict_class: str

    @staticmethod
    def run_batch(connection: StoreConnection, commands: Sequence[GuardedCommand]) -> list[OperationOutcome]:
        """
        Perform neighbouring operations of a batch: claim all nonces, then check the guards of commands and execute
        those that pass. A command that may change who is registered ends a run of commands that are checked together.
        """
        claims = []
        for one in commands:
            claims.append(NonceClaim(one.guard.nonce, one.guard.until, one.now, one.guard.share))
        claimed = claim_nonces(connection, claims, commands[0].max_nonces)
        outcomes: list[OperationOutcome] = []
        start = 0
        for end, one in enumerate(commands, 1):
            if end == len(commands) or one.conflict_class == REGISTRATION_CLASS:
                outcomes += _execute_run(connection, commands[start:end], claimed[start:end])
                start = end
        return outcomes


# Of commands that change who is registered.
REGISTRATION_CLASS = "registration"


def _execute_run(
    connection: StoreConnection, commands: Sequence[GuardedCommand], claimed: Sequence[ClaimOutcome]
) -> list[OperationOutcome]:
    """
    Check guards and execute commands during which nobody is registered, sorted by conflict class, so that commands of
    a kind are neighbours.
    """
    dids: dict[str | None, None] = {}
    now = 0.0
    for one, is_new in zip(commands, claimed, strict=True):
        # A batch waits for a short time only, so one time will do: that of the last.
        now = max(now, one.now)
        if is_new is True:
            dids[one.guard.sender] = dids[one.guard.recipient] = None
    registered = {None, *find_registered(connection, [did for did in dids if did is not None], now)}
    outcomes: dict[int, OperationOutcome] = {}
    passing: list[int] = []
    for place, (one, is_new) in enumerate(zip(commands, claimed, strict=True)):
        if is_new is not True:
            outcomes[place] = OperationOutcome(error=is_new or DuplicateNonce())
        elif one.guard.sender not in registered:
            outcomes[place] = OperationOutcome(error=UnauthorizedCommand())
        elif one.guard.recipient not in registered:
            outcomes[place] = OperationOutcome(error=RecipientNotRegistered())
        else:
            passing.append(place)
    if len(passing) > 1:
        passing.sort(key=lambda place: commands[place].conflict_class)
    done = run_operations(connection, [commands[place].command for place in passing])
    outcomes.update(zip(passing, done, strict=True))
    return [outcomes[place] for place in range(len(commands))]


T = TypeVar("T")

# Bytes assumed for an item of a page before it is read. Of the largest pages no two are read at the same time.
_ITEM_BYTES = 65_536
_MAX_PAGE_ESTIMATE = 1 << 30

# Index entries that are counted in some milliseconds, for which other reads can wait.
_QUICK_SEARCH_ENTRIES = 16_384

# Long searches among the events of one owner that may be queued.
_SEARCHES_PER_OWNER = 4

# Contracts decide what may be delivered.
_MAIL_CLASS, _REQUEST_CLASS, _ARCHIVE_CLASS = "mail", "requests", "archive"


@implementer(IDecentrlStore)
class SQLiteDecentrlStore:
    """
    The Decentrl half of the store in an SQLite database. Every command is one operation of a batch with its guard.

    :param max_nonces: number of nonces that the store keeps, which both halves share.
    """

    def __init__(self, executor: SQLExecutor, clock: IReactorTime, caps: DecentrlQuotas, max_nonces: int) -> None:
        self._executor = executor
        self._read = executor.read
        self._clock = clock
        self._caps = caps
        self._max_nonces = max_nonces
        self._page_cursors = PageCursorCache()
        self._searches: Counter[str] = Counter()

    def opened(self) -> None:
        """Forget what is cached: the file may be another one than before."""
        self._page_cursors.clear()

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded("admit", "", guard, lambda connection: None)

    def registered_until(self, did: str) -> Deferred[float | None]:
        now = self._clock.seconds()
        found = self._read("registered_until", decentrl_queries.get_registration_expiry, did)
        return found.addCallback(lambda until: None if until is None or until <= now else until)

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        return self._guarded(
            "save_contract",
            REGISTRATION_CLASS if contract.owner_did is None else _MAIL_CLASS,
            guard,
            lambda c: decentrl_queries.save_contract(c, contract, caps, now),
            len(contract.text),
        )

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        size = _estimate_page_bytes(part)
        return self._read("contracts", decentrl_queries.find_contracts, owner, wanted, part, size=size)

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        caps, size = self._caps, get_utf8_size(request.encrypted_contract_request)
        return self._guarded(
            "request_contract",
            _REQUEST_CLASS,
            guard,
            lambda c: decentrl_queries.add_contract_request(c, request, caps),
            size,
        )

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        size = _estimate_page_bytes(part)
        return self._read("contract_requests", decentrl_queries.find_contract_requests, recipient, part, size=size)

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        known = tuple(ids)
        return self._guarded(
            "acknowledge_requests",
            _REQUEST_CLASS,
            guard,
            lambda c: decentrl_queries.acknowledge_requests(c, recipient, known),
        )

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        size = get_utf8_size(event.payload)
        operation = decentrl_queries.EnqueueEventOperation(event, size, self._caps, self._clock.seconds())
        return self._guarded("deliver", _MAIL_CLASS, guard, operation, size)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        size = _estimate_page_bytes(part)
        return self._read("pending_events", decentrl_queries.find_pending_page, recipient, sender, part, size=size)

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        size = estimate_items_bytes(len(ids))
        return self._read("find_pending", message_queries.find_pending_events, tuple(ids), size=size)

    def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        find = message_queries.find_pending_arrivals
        return self._read("arrived_pending", find, tuple(recipients), window, limit)

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        known = tuple(ids)
        return self._guarded(
            "acknowledge_events",
            _MAIL_CLASS,
            guard,
            lambda c: decentrl_queries.acknowledge_events(c, recipient, known),
        )

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        size = sum([get_utf8_size(event.payload, *event.tags) for event in events])
        operation = event_queries.SaveEventsOperation(owner, tuple(events), size, self._caps)
        return self._guarded("save_events", _ARCHIVE_CLASS, guard, operation, size)

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._search(
            "events", owner, lambda c, options: event_queries.find_stored_events(c, owner, wanted, options), part
        )

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        caps, updates = self._caps, tuple(tags)
        size = sum([get_utf8_size(*new) for _, new in updates])
        return self._guarded(
            "update_tags", _ARCHIVE_CLASS, guard, lambda c: event_queries.update_tags(c, owner, updates, caps), size
        )

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        caps, size = self._caps, get_utf8_size(event.event, *event.tags)
        return self._guarded(
            "publish", _ARCHIVE_CLASS, guard, lambda c: event_queries.publish_event(c, publisher, event, caps), size
        )

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded(
            "unpublish", _ARCHIVE_CLASS, guard, lambda c: event_queries.unpublish_event(c, publisher, event_id)
        )

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        return self._search(
            "public_events",
            publisher,
            lambda c, options: event_queries.find_public_events(c, publisher, wanted, options),
            part,
        )

    def _search(
        self,
        name: str,
        owner: str,
        search: Callable[[Connection, PageReadOptions], ResultPage[T] | None],
        part: PageRequest,
    ) -> Deferred[ResultPage[T]]:
        """Search in the thread for reading, or in the one for long searches if it takes long."""
        quick = PageReadOptions(part, self._page_cursors, _QUICK_SEARCH_ENTRIES)
        patient = replace(quick, patience=None)

        def search_patiently(found: ResultPage[T] | None) -> Any:
            if found is not None:
                return found
            if self._searches[owner] >= _SEARCHES_PER_OWNER:
                raise RateLimitExceeded(retry_after=1)
            self._searches[owner] += 1
            return self._executor.search(f"{name}_patiently", lambda c: search(c, patient)).addBoth(end)

        def end(result: T) -> T:
            self._searches[owner] -= 1
            if not self._searches[owner]:
                del self._searches[owner]
            return result

        return self._read(name, search, quick, size=_estimate_page_bytes(part)).addCallback(search_patiently)

    def _guarded(
        self, name: str, conflict_class: str, guard: CommandGuard, command: SQLOperation, size: int = 0
    ) -> Deferred[Any]:
        """
        :param conflict_class: what the command reads and changes.
        :param size: bytes that the command keeps in memory until it is done.
        """
        operation = GuardedCommand(guard, command, self._clock.seconds(), self._max_nonces, conflict_class)
        return self._executor.write(name, operation, size=size)


def estimate_items_bytes(items: int) -> int:
    """Bytes assumed for items that are read together, before they are read; at most the limit of a page."""
    return min(items * _ITEM_BYTES, MAX_PAGE_BYTES)


def _estimate_page_bytes(part: PageRequest) -> int:
    return min(part.limit * _ITEM_BYTES, _MAX_PAGE_ESTIMATE)
