"""
The Decentrl part of the store in an SQLite database, with guarded commands as operations of batches.

A guard and its command are one operation. Neighbouring commands of a batch share the statements that claim their
nonces and look up registrations. Then those of each conflict class are executed in their order, so that there are
more neighbours of a kind: commands of different classes never see each other's changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import DuplicateNonce, RateLimitExceeded, RecipientNotRegistered, UnauthorizedCommand
from mediatord.store.caches import PageCursorCache
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
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
from mediatord.store.sqlite import decentrl_queries, event_queries, message_queries
from mediatord.store.sqlite.connection import BatchOperation, SQLOperation, StoreConnection
from mediatord.store.sqlite.coordination_queries import ClaimOutcome, NonceClaim, claim_nonces
from mediatord.store.sqlite.event_queries import PageReadOptions
from mediatord.store.sqlite.executor import SQLExecutor, sql_method, timed_sql_method

T = TypeVar("T")
P = ParamSpec("P")

# Conflict classes: contracts decide what may be delivered, and registrations who may do anything.
REGISTRATION_CLASS, _MAIL_CLASS, _REQUEST_CLASS, _ARCHIVE_CLASS = "registration", "mail", "requests", "archive"


@dataclass(slots=True)
class GuardedCommand(BatchOperation):
    """
    A command with its guard, as an operation of a batch.

    :param command: refuses, if it does, before its first write.
    :param claim: of its nonce, when it was given.
    :param conflict_class: names what it reads and changes; commands of other classes do not affect it.
    """

    guard: CommandGuard
    command: SQLOperation
    claim: NonceClaim
    conflict_class: str

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[GuardedCommand]) -> list[Any]:
        """
        Claim all nonces, then check the guards of commands and execute those that pass. A command that may change who
        is registered ends a run of operations that are checked together.
        """
        claims = []
        for one in operations:
            claims.append(one.claim)
        claimed = claim_nonces(connection, claims)
        outcomes: list[Any] = []
        start = 0
        for end, one in enumerate(operations, 1):
            if end == len(operations) or one.conflict_class == REGISTRATION_CLASS:
                outcomes += _execute_run(connection, operations[start:end], claimed[start:end])
                start = end
        return outcomes


def _execute_run(
    connection: StoreConnection, commands: Sequence[GuardedCommand], claimed: Sequence[ClaimOutcome]
) -> list[Any]:
    """
    Check guards and execute commands during which nobody is registered, sorted by conflict class, so that commands of
    a kind are neighbours.
    """
    dids: dict[str, None] = {}
    now = 0.0
    for one, is_new in zip(commands, claimed, strict=True):
        # A batch waits for a short time only, so one time will do: that of the last.
        now = max(now, one.claim.now)
        if is_new is True:
            dids |= dict.fromkeys([did for did in (one.guard.sender, one.guard.recipient) if did is not None])
    registered = {None, *decentrl_queries.find_registered(connection, list(dids), now)}
    outcomes: dict[int, Any] = {}
    passing: list[int] = []
    for place, (one, is_new) in enumerate(zip(commands, claimed, strict=True)):
        if is_new is not True:
            outcomes[place] = is_new or DuplicateNonce()
        elif one.guard.sender not in registered:
            outcomes[place] = UnauthorizedCommand()
        elif one.guard.recipient not in registered:
            outcomes[place] = RecipientNotRegistered()
        else:
            passing.append(place)
    if len(passing) > 1:
        passing.sort(key=lambda place: commands[place].conflict_class)
    done = connection.run_operations([commands[place].command for place in passing])
    outcomes.update(zip(passing, done, strict=True))
    return [outcomes[place] for place in range(len(commands))]


# Bytes assumed for an item of a page before it is read. Of the largest pages no two are read at the same time.
_ITEM_BYTES = 65_536
_MAX_PAGE_ESTIMATE = 1 << 30

# Index entries that are counted in some milliseconds, for which other reads can wait.
_QUICK_SEARCH_ENTRIES = 16_384

# Long searches among the events of one owner that may be queued.
_SEARCHES_PER_OWNER = 4


def estimate_items_bytes(items: int) -> int:
    """Bytes assumed for items that are read together, before they are read; at most the limit of a page."""
    return min(items * _ITEM_BYTES, MAX_PAGE_BYTES)


def _estimate_page_bytes(part: PageRequest) -> int:
    return min(part.limit * _ITEM_BYTES, _MAX_PAGE_ESTIMATE)


def _page_method(
    name: str, query: Callable[Concatenate[StoreConnection, P], ResultPage[T]]
) -> Callable[Concatenate[Any, P], Deferred[ResultPage[T]]]:
    """A method that reads a page, given by its last argument."""

    def read(self: Any, /, *args: P.args, **_kwargs: P.kwargs) -> Deferred[ResultPage[T]]:
        part: Any = args[-1]
        return self._executor.read(name, query, *args, size=_estimate_page_bytes(part))  # type: ignore[no-any-return]

    return read


def _guarded_method(
    name: str, conflict_class: str, query: Callable[Concatenate[StoreConnection, P], T]
) -> Callable[Concatenate[Any, CommandGuard, P], Deferred[T]]:
    """A method that executes a command."""

    def execute(self: Any, guard: CommandGuard, /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return self._guarded(name, conflict_class, guard, lambda c: query(c, *args, **kwargs))  # type: ignore[no-any-return]

    return execute


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
    contracts = _page_method("contracts", decentrl_queries.find_contracts)
    contract_requests = _page_method("contract_requests", decentrl_queries.find_contract_requests)
    pending_events = _page_method("pending_events", decentrl_queries.find_pending_page)
    find_pending_arrivals = sql_method("read", "arrived_pending", message_queries.find_pending_arrivals)
    acknowledge_requests = _guarded_method(
        "acknowledge_requests", _REQUEST_CLASS, decentrl_queries.acknowledge_requests
    )
    acknowledge_events = _guarded_method("acknowledge_events", _MAIL_CLASS, decentrl_queries.acknowledge_events)
    unpublish = _guarded_method("unpublish", _ARCHIVE_CLASS, event_queries.unpublish_event)

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded("admit", "", guard, lambda connection: None)

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        conflict_class = REGISTRATION_CLASS if contract.owner_did is None else _MAIL_CLASS
        caps, now, size = self._caps, self._clock.seconds(), len(contract.text)
        save = decentrl_queries.save_contract
        return self._guarded("save_contract", conflict_class, guard, lambda c: save(c, contract, caps, now), size)

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        caps, add = self._caps, decentrl_queries.add_contract_request
        size = get_utf8_size(request.encrypted_contract_request)
        return self._guarded("request_contract", _REQUEST_CLASS, guard, lambda c: add(c, request, caps), size)

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        size = get_utf8_size(event.payload)
        operation = decentrl_queries.EnqueueEventOperation(event, size, self._caps, self._clock.seconds())
        return self._guarded("deliver", _MAIL_CLASS, guard, operation, size)

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        size = estimate_items_bytes(len(ids))
        return self._executor.read("find_pending", message_queries.find_pending_events, ids, size=size)

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        size = sum([get_utf8_size(event.payload, *event.tags) for event in events])
        operation = event_queries.SaveEventsOperation(owner, tuple(events), size, self._caps)
        return self._guarded("save_events", _ARCHIVE_CLASS, guard, operation, size)

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._search("events", event_queries.find_stored_events, owner, wanted, part)

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        caps, update = self._caps, event_queries.update_tags
        size = sum([get_utf8_size(*new) for _, new in tags])
        return self._guarded("update_tags", _ARCHIVE_CLASS, guard, lambda c: update(c, owner, tags, caps), size)

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        caps, publish = self._caps, event_queries.publish_event
        size = get_utf8_size(event.event, *event.tags)
        return self._guarded("publish", _ARCHIVE_CLASS, guard, lambda c: publish(c, publisher, event, caps), size)

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        return self._search("public_events", event_queries.find_public_events, publisher, wanted, part)

    def _search(
        self, name: str, search: Callable[..., ResultPage[T] | None], owner: str, wanted: Any, part: PageRequest
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
            return self._executor.search(f"{name}_patiently", search, owner, wanted, patient).addBoth(end)

        def end(result: T) -> T:
            self._searches[owner] -= 1
            if not self._searches[owner]:
                del self._searches[owner]
            return result

        size = _estimate_page_bytes(part)
        return self._executor.read(name, search, owner, wanted, quick, size=size).addCallback(search_patiently)

    def _guarded(
        self, name: str, conflict_class: str, guard: CommandGuard, command: SQLOperation, size: int = 0
    ) -> Deferred[Any]:
        """
        :param conflict_class: what the command reads and changes.
        :param size: bytes that the command keeps in memory until it is done.
        """
        claim = NonceClaim(guard.nonce, guard.until, self._clock.seconds(), guard.share, self._max_nonces)
        return self._executor.write(name, GuardedCommand(guard, command, claim, conflict_class), size=size)
