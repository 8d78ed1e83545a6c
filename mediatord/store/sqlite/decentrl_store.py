"""
Commands with their guards.

A guard and its command are one operation, and commands that stand next to each other in a batch share the statements
that claim their nonces and look up who is registered. Then those of each lane are carried out in their order, so that
there are more neighbours of a kind: commands of different lanes never see what the other has done.

The Decentrl half of the store in one SQLite file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import (
    DuplicateNonce,
    MediatorError,
    RateLimitExceeded,
    RecipientNotRegistered,
    UnauthorizedCommand,
)
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
from mediatord.store.sqlite import decentrl_queries, event_queries, message_queries
from mediatord.store.sqlite.bulk_sql import get_utf8_size
from mediatord.store.sqlite.coordination_queries import ClaimOutcome, NonceClaim, claim_nonces
from mediatord.store.sqlite.decentrl_queries import find_registered
from mediatord.store.sqlite.event_search import PageReadOptions
from mediatord.store.sqlite.executor import SQLiteExecutor
from mediatord.store.sqlite.group_commit import OperationOutcome, SQLOperation, run_operations

GuardedFunction = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class GuardedCommand:
    """
    A command with its guard, as an operation of a batch.

    :param command: refuses, if it does, before its first write.
    :param now: when it was given.
    :param capacity: how many nonces are kept.
    :param lane: name of what it reads and changes, which commands of no other lane do.
    """

    guard: CommandGuard
    command: GuardedFunction
    now: float
    capacity: int
    conflict_class: str

    def __call__(self, connection: Connection) -> OperationOutcome:
        """By itself; a refusal is an outcome, so that the nonce is kept."""
        return self.together(connection, [self])[0]

    def together(self, connection: Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
        """This one and the commands after it, in their order."""
        commands = [work for work in works if isinstance(work, GuardedCommand)]
        claims = [NonceClaim(one.guard.nonce, one.guard.until, one.now, one.guard.share) for one in commands]
        pairs = zip(commands, claim_nonces(connection, claims, self.capacity), strict=True)
        return [outcome for run in _split_runs(pairs) for outcome in _execute_run(connection, run)]

    def refusal(self, new: ClaimOutcome, present: set[str | None]) -> MediatorError | None:
        """
        The first reason not to carry it out.

        :param new: what became of its nonce.
        :param present: those who are registered, and nobody.
        """
        if new is not True:
            return new or DuplicateNonce()
        if self.guard.sender not in present:
            return UnauthorizedCommand()
        if self.guard.recipient not in present:
            return RecipientNotRegistered()
        return None


# Of what changes who is registered.
REGISTRATION_CLASS = "registration"

_CommandRun = list[tuple[GuardedCommand, ClaimOutcome]]


def _split_runs(pairs: Iterator[tuple[GuardedCommand, ClaimOutcome]]) -> Iterator[_CommandRun]:
    """Commands during which the same DIDs stay registered: one that may change that ends a run."""
    run: _CommandRun = []
    for one, new in pairs:
        run.append((one, new))
        if one.conflict_class == REGISTRATION_CLASS:
            yield run
            run = []
    if run:
        yield run


def _execute_run(connection: Connection, run: _CommandRun) -> list[OperationOutcome]:
    guards = [one.guard for one, new in run if new is True]
    dids = {did for guard in guards for did in (guard.sender, guard.recipient) if did is not None}
    # What a batch waits for is short, so one time will do for all: that of the last.
    now = max([one.now for one, _ in run])
    present = {None, *find_registered(connection, list(dids), now)}
    outcomes = {
        place: OperationOutcome(error=refusal)
        for place, (one, new) in enumerate(run)
        if (refusal := one.refusal(new, present)) is not None
    }
    passing = [place for place in range(len(run)) if place not in outcomes]
    passing.sort(key=lambda place: run[place][0].conflict_class)
    done = run_operations(connection, [run[place][0].command for place in passing])
    outcomes |= zip(passing, done, strict=True)
    return [outcomes[place] for place in range(len(run))]


T = TypeVar("T")

# What an item of a page is taken for before it is read. Of the largest pages no two are read at the same time.
_ITEM_BYTES = 65_536
_MAX_PAGE_ESTIMATE = 1 << 30

# Entries that are counted in some milliseconds, which others can wait.
_QUICK_SEARCH_ENTRIES = 16_384

# Long searches among the events of one owner that may be waited for.
_SEARCHES_PER_OWNER = 4

# Contracts decide what may be delivered.
_MAIL_CLASS, _REQUEST_CLASS, _ARCHIVE_CLASS = "mail", "requests", "archive"


@implementer(IDecentrlStore)
class SQLiteDecentrlStore:
    """
    Every command is one operation of a batch with its guard. Its many methods are those of the interface.

    :param max_nonces: as many as the store keeps, since they are the same.
    """

    def __init__(self, file: SQLiteExecutor, clock: IReactorTime, caps: DecentrlQuotas, max_nonces: int) -> None:
        self._file = file
        self._clock = clock
        self._caps = caps
        self._max_nonces = max_nonces
        self._page_cursors = PageCursorCache()
        self._searching: Counter[str] = Counter()

    def opened(self) -> None:
        """The file may be another one than before."""
        self._page_cursors.clear()

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded("admit", "", guard, _do_nothing)

    def registered_until(self, did: str) -> Deferred[float | None]:
        now = self._clock.seconds()
        asked = self._file.read("registered_until", lambda c: decentrl_queries.get_registration_expiry(c, did))
        return asked.addCallback(lambda until: None if until is None or until <= now else until)

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        conflict_class = REGISTRATION_CLASS if contract.owner_did is None else _MAIL_CLASS
        size = len(contract.text)
        return self._guarded(
            "save_contract",
            conflict_class,
            guard,
            lambda c: decentrl_queries.save_contract(c, contract, caps, now),
            size,
        )

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        return self._file.read(
            "contracts", lambda c: decentrl_queries.find_contracts(c, owner, wanted, part), _estimate_page_bytes(part)
        )

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
        return self._file.read(
            "contract_requests",
            lambda c: decentrl_queries.find_contract_requests(c, recipient, part),
            _estimate_page_bytes(part),
        )

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        gone = tuple(ids)
        return self._guarded(
            "acknowledge_requests",
            _REQUEST_CLASS,
            guard,
            lambda c: decentrl_queries.acknowledge_requests(c, recipient, gone),
        )

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        size = get_utf8_size(event.payload)
        delivering = decentrl_queries.DeliverOperation(event, size, self._caps, self._clock.seconds())
        return self._guarded("deliver", _MAIL_CLASS, guard, delivering, size)

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return self._file.read(
            "pending_events",
            lambda c: decentrl_queries.find_pending_page(c, recipient, sender, part),
            _estimate_page_bytes(part),
        )

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        wanted = tuple(ids)
        return self._file.read(
            "find_pending",
            lambda c: message_queries.find_pending_events(c, wanted),
            estimate_items_bytes(len(wanted)),
        )

    def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(recipients)
        return self._file.read(
            "arrived_pending", lambda c: message_queries.find_pending_arrivals(c, dids, window, limit)
        )

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        gone = tuple(ids)
        return self._guarded(
            "acknowledge_events",
            _MAIL_CLASS,
            guard,
            lambda c: decentrl_queries.acknowledge_events(c, recipient, gone),
        )

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        saved = tuple(events)
        size = sum([get_utf8_size(event.payload, *event.tags) for event in saved])
        return self._guarded(
            "save_events",
            _ARCHIVE_CLASS,
            guard,
            event_queries.SaveEventsOperation(owner, saved, size, self._caps),
            size,
        )

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._search(
            "events", owner, lambda c, reading: event_queries.find_stored_events(c, owner, wanted, reading), part
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
            lambda c, reading: event_queries.find_public_events(c, publisher, wanted, reading),
            part,
        )

    def _search(
        self,
        name: str,
        owner: str,
        search: Callable[[Connection, PageReadOptions], ResultPage[T] | None],
        part: PageRequest,
    ) -> Deferred[ResultPage[T]]:
        """In the thread for reading, or where it holds nobody up if it takes long."""
        reading, size = PageReadOptions(part, self._page_cursors, _QUICK_SEARCH_ENTRIES), _estimate_page_bytes(part)
        patient = replace(reading, patience=None)

        def insist(found: ResultPage[T] | None) -> Any:
            if found is not None:
                return found
            if self._searching[owner] >= _SEARCHES_PER_OWNER:
                raise RateLimitExceeded(retry_after=1)
            self._searching[owner] += 1
            return self._file.search(f"{name}_patiently", lambda c: search(c, patient)).addBoth(over)

        def over(result: T) -> T:
            self._searching[owner] -= 1
            if not self._searching[owner]:
                del self._searching[owner]
            return result

        return self._file.read(name, lambda c: search(c, reading), size).addCallback(insist)

    def _guarded(
        self, name: str, conflict_class: str, guard: CommandGuard, command: GuardedFunction, size: int = 0
    ) -> Deferred[Any]:
        """
        :param lane: what the command reads and changes.
        :param size: bytes that the command keeps in memory until it is done.
        """
        work = GuardedCommand(guard, command, self._clock.seconds(), self._max_nonces, conflict_class)
        return self._file.write(name, work, size)


def estimate_items_bytes(items: int) -> int:
    """What so many items that are read together are taken for; never more than a slice may have."""
    return min(items * _ITEM_BYTES, MAX_PAGE_BYTES)


def _estimate_page_bytes(part: PageRequest) -> int:
    return min(part.limit * _ITEM_BYTES, _MAX_PAGE_ESTIMATE)


def _do_nothing(_: object) -> None:
    """All that was asked for is what the guard says."""
