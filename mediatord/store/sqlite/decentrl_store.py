"""
The Decentrl part of the store in an SQLite database, with guarded commands as operations of batches.

A guard and its command are one operation. Neighbouring commands of a batch share the statements that claim their
nonces and look up registrations. Then those of each conflict class are executed in their order, so that there are
more neighbours of a kind: commands of different classes never see each other's changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import RateLimitExceeded
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
    get_utf8_size,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.sqlite import arrival_queries, decentrl_queries, event_archive_queries
from mediatord.store.sqlite.connection import SQLOperation
from mediatord.store.sqlite.coordination_queries import NonceClaim
from mediatord.store.sqlite.decentrl_queries import ConflictClass, GuardedCommand
from mediatord.store.sqlite.event_archive_queries import PageReadOptions
from mediatord.store.sqlite.executor import SQLExecutor, sql_method, timed_sql_method

T = TypeVar("T")

# Bytes assumed for an item of a page before it is read. Of the largest pages no two are read at the same time.
_ITEM_BYTES = 65_536

# Index entries that are counted or skipped in some milliseconds, for which other reads can wait.
_QUICK_SEARCH_ENTRIES = 16_384

# Long searches among the events of one owner that may be queued.
_SEARCHES_PER_OWNER = 4


def estimate_items_bytes(items: int) -> int:
    """Bytes assumed for items that are read together, before they are read; at most the limit of a page."""
    return min(items * _ITEM_BYTES, MAX_PAGE_BYTES)


@implementer(IDecentrlStore)
class SQLiteDecentrlStore:
    """
    The Decentrl part of the store in an SQLite database. Every command is one operation of a batch with its guard.

    :param max_nonces: number of nonces that the store keeps, which both protocols share.
    """

    def __init__(self, executor: SQLExecutor, clock: IReactorTime, caps: DecentrlQuotas, max_nonces: int) -> None:
        self._executor = executor
        self._clock = clock
        self._caps = caps
        self._max_nonces = max_nonces
        self._page_cursors = PageCursorCache()
        self._searches: Counter[str] = Counter()

    def opened(self) -> None:
        """Forget what is cached: the file may be another one than before."""
        self._page_cursors.clear()

    registered_until = timed_sql_method("read", "registered_until", decentrl_queries.get_registration_expiry)
    find_pending_arrivals = sql_method("read", "arrived_pending", arrival_queries.find_pending_arrivals)

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._execute("admit", "none", guard, lambda c: None)

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        conflict_class: ConflictClass = "registration" if contract.owner_did is None else "mail"
        caps, now, save = self._caps, self._clock.seconds(), decentrl_queries.save_contract
        return self._execute(
            "save_contract", conflict_class, guard, lambda c: save(c, contract, caps, now), len(contract.text)
        )

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        return self._read_page("contracts", decentrl_queries.find_contracts, owner, wanted, part)

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        caps, add = self._caps, decentrl_queries.add_contract_request
        size = get_utf8_size(request.encrypted_contract_request)
        return self._execute("request_contract", "requests", guard, lambda c: add(c, request, caps), size)

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        return self._read_page("contract_requests", decentrl_queries.find_contract_requests, recipient, part)

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        remove = decentrl_queries.acknowledge_requests
        return self._execute("acknowledge_requests", "requests", guard, lambda c: remove(c, recipient, ids))

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        size = len(event.payload.encode())
        operation = decentrl_queries.EnqueueEventOperation(event, size, self._caps, self._clock.seconds())
        return self._execute("deliver", "mail", guard, operation, size)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return self._read_page("pending_events", decentrl_queries.find_pending_page, recipient, sender, part)

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        size = estimate_items_bytes(len(ids))
        return self._executor.read("find_pending", arrival_queries.find_pending_events, ids, size=size)

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        remove = decentrl_queries.acknowledge_events
        return self._execute("acknowledge_events", "mail", guard, lambda c: remove(c, recipient, ids))

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        size = sum([get_utf8_size(event.payload, *event.tags) for event in events])
        operation = event_archive_queries.SaveEventsOperation(owner, tuple(events), size, self._caps)
        return self._execute("save_events", "archive", guard, operation, size)

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._search("events", event_archive_queries.find_stored_events, owner, wanted, part)

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        caps, update = self._caps, event_archive_queries.update_tags
        size = sum([get_utf8_size(*new) for _, new in tags])
        return self._execute("update_tags", "archive", guard, lambda c: update(c, owner, tags, caps), size)

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        caps, publish = self._caps, event_archive_queries.publish_event
        size = get_utf8_size(event.event, *event.tags)
        return self._execute("publish", "archive", guard, lambda c: publish(c, publisher, event, caps), size)

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        delete = event_archive_queries.unpublish_event
        return self._execute("unpublish", "archive", guard, lambda c: delete(c, publisher, event_id))

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        return self._search("public_events", event_archive_queries.find_public_events, publisher, wanted, part)

    def _execute(
        self, name: str, conflict_class: ConflictClass, guard: CommandGuard, command: SQLOperation, size: int = 0
    ) -> Deferred[Any]:
        """
        Execute a command under its guard.

        :param size: bytes that the command keeps in memory until it is done.
        """
        claim = NonceClaim(guard.nonce, guard.until, self._clock.seconds(), guard.share, self._max_nonces)
        return self._executor.write(name, GuardedCommand(guard, command, claim, conflict_class), size=size)

    def _read_page(self, name: str, query: Callable[..., Any], *args: Any) -> Deferred[Any]:
        """Read a page, given by the last argument of its query."""
        return self._executor.read(name, query, *args, size=estimate_items_bytes(args[-1].limit))

    def _search(
        self, name: str, search: Callable[..., ResultPage[T] | None], owner: str, wanted: Any, part: PageRequest
    ) -> Deferred[ResultPage[T]]:
        """Search in the thread for reading, or in the one for long searches if it takes long."""
        quick = PageReadOptions(part, self._page_cursors, _QUICK_SEARCH_ENTRIES)

        def search_patiently(found: ResultPage[T] | None) -> Any:
            if found is not None:
                return found
            if self._searches[owner] >= _SEARCHES_PER_OWNER:
                raise RateLimitExceeded(retry_after=1)
            self._searches[owner] += 1
            patient = replace(quick, patience=None)
            return self._executor.search(f"{name}_patiently", search, owner, wanted, patient).addBoth(end)

        def end(result: T) -> T:
            self._searches[owner] -= 1
            if not self._searches[owner]:
                del self._searches[owner]
            return result

        size = estimate_items_bytes(part.limit)
        return self._executor.read(name, search, owner, wanted, quick, size=size).addCallback(search_patiently)
