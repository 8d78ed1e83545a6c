"""The Decentrl half of the store in one SQLite file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import RateLimited
from mediatord.interfaces import Arrival, Removed, Window
from mediatord.interfaces.decentrl import (
    LARGEST_SLICE,
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
from mediatord.store import (
    sql_archive,
    sql_arrivals,
    sql_channels,
    sql_contracts,
    sql_pending,
    sql_requests,
    sql_tags,
)
from mediatord.store.sql_guards import REGISTRATION, Command, Guarded
from mediatord.store.sql_rows import size_of
from mediatord.store.sql_search import Reading
from mediatord.store.sqlite_bookmarks import Shelfmarks
from mediatord.store.sqlite_file import SQLiteFile

T = TypeVar("T")

# What an item of a page is taken for before it is read. Of the largest pages no two are read at the same time.
_ITEM_BYTES = 65_536
_PAGE_BYTES = 1 << 30

# Entries that are counted in some milliseconds, which others can wait.
_PATIENCE = 16_384

# Long searches among the events of one owner that may be waited for.
_SEARCHES_OF_ONE = 4

# Contracts decide what may be delivered.
_MAIL, _REQUESTS, _ARCHIVE = "mail", "requests", "archive"


@implementer(IDecentrlStore)
class SQLiteDecentrl:
    """
    Every command is one operation of a batch with its guard. Its many methods are those of the interface.

    :param max_nonces: as many as the store keeps, since they are the same.
    """

    def __init__(self, file: SQLiteFile, clock: IReactorTime, caps: Caps, max_nonces: int) -> None:
        self._file = file
        self._clock = clock
        self._caps = caps
        self._max_nonces = max_nonces
        self._shelfmarks = Shelfmarks()
        self._searching: Counter[str] = Counter()

    def opened(self) -> None:
        """The file may be another one than before."""
        self._shelfmarks.clear()

    def admit(self, guard: Guard) -> Deferred[None]:
        return self._guarded("admit", "", guard, _nothing)

    def registered_until(self, did: str) -> Deferred[float | None]:
        now = self._clock.seconds()
        asked = self._file.read("registered_until", lambda c: sql_contracts.registered_until(c, did))
        return asked.addCallback(lambda until: None if until is None or until <= now else until)

    def save_contract(self, guard: Guard, contract: Contract) -> Deferred[None]:
        caps, now = self._caps, self._clock.seconds()
        lane = REGISTRATION if contract.owner_did is None else _MAIL
        size = len(contract.text)
        return self._guarded("save_contract", lane, guard, lambda c: sql_contracts.save(c, contract, caps, now), size)

    def contracts(self, owner: str, wanted: ContractFilter, part: Slice) -> Deferred[Found[Contract]]:
        return self._file.read(
            "contracts", lambda c: sql_contracts.contracts(c, owner, wanted, part), _page_bytes(part)
        )

    def request_contract(self, guard: Guard, request: ContractRequest) -> Deferred[None]:
        caps, size = self._caps, size_of(request.encrypted_contract_request)
        return self._guarded(
            "request_contract", _REQUESTS, guard, lambda c: sql_requests.request(c, request, caps), size
        )

    def contract_requests(self, recipient: str, part: Slice) -> Deferred[Found[ContractRequest]]:
        return self._file.read(
            "contract_requests", lambda c: sql_requests.requests(c, recipient, part), _page_bytes(part)
        )

    def acknowledge_requests(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        gone = tuple(ids)
        return self._guarded(
            "acknowledge_requests", _REQUESTS, guard, lambda c: sql_requests.acknowledge(c, recipient, gone)
        )

    def deliver(self, guard: Guard, event: PendingEvent) -> Deferred[None]:
        size = size_of(event.payload)
        delivering = sql_pending.Delivering(event, size, self._caps, self._clock.seconds())
        return self._guarded("deliver", _MAIL, guard, delivering, size)

    def pending_events(self, recipient: str, sender: str | None, part: Slice) -> Deferred[Found[PendingEvent]]:
        return self._file.read(
            "pending_events", lambda c: sql_pending.pending_events(c, recipient, sender, part), _page_bytes(part)
        )

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        wanted = tuple(ids)
        return self._file.read(
            "find_pending", lambda c: sql_arrivals.find_pending(c, wanted), slice_bytes(len(wanted))
        )

    def arrived_pending(self, recipients: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        dids = tuple(recipients)
        return self._file.read("arrived_pending", lambda c: sql_arrivals.arrived_pending(c, dids, window, limit))

    def acknowledge_events(self, guard: Guard, recipient: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        gone = tuple(ids)
        return self._guarded(
            "acknowledge_events", _MAIL, guard, lambda c: sql_pending.acknowledge(c, recipient, gone)
        )

    def save_events(self, guard: Guard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        saved = tuple(events)
        size = sum([size_of(event.payload, *event.tags) for event in saved])
        return self._guarded("save_events", _ARCHIVE, guard, sql_archive.Saving(owner, saved, size, self._caps), size)

    def events(self, owner: str, wanted: EventFilter, part: Slice) -> Deferred[Found[StoredEvent]]:
        return self._search("events", owner, lambda c, reading: sql_archive.events(c, owner, wanted, reading), part)

    def update_tags(self, guard: Guard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> Deferred[None]:
        caps, updates = self._caps, tuple(tags)
        size = sum([size_of(*new) for _, new in updates])
        return self._guarded(
            "update_tags", _ARCHIVE, guard, lambda c: sql_tags.update_tags(c, owner, updates, caps), size
        )

    def publish(self, guard: Guard, publisher: str, event: PublicEvent) -> Deferred[None]:
        caps, size = self._caps, size_of(event.event, *event.tags)
        return self._guarded(
            "publish", _ARCHIVE, guard, lambda c: sql_channels.publish(c, publisher, event, caps), size
        )

    def unpublish(self, guard: Guard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded("unpublish", _ARCHIVE, guard, lambda c: sql_channels.unpublish(c, publisher, event_id))

    def public_events(self, publisher: str, wanted: PublicFilter, part: Slice) -> Deferred[Found[PublicEvent]]:
        return self._search(
            "public_events",
            publisher,
            lambda c, reading: sql_channels.public_events(c, publisher, wanted, reading),
            part,
        )

    def _search(
        self, name: str, owner: str, search: Callable[[Connection, Reading], Found[T] | None], part: Slice
    ) -> Deferred[Found[T]]:
        """In the thread for reading, or where it holds nobody up if it takes long."""
        reading, size = Reading(part, self._shelfmarks, _PATIENCE), _page_bytes(part)
        patient = replace(reading, patience=None)

        def insist(found: Found[T] | None) -> Any:
            if found is not None:
                return found
            if self._searching[owner] >= _SEARCHES_OF_ONE:
                raise RateLimited(retry_after=1)
            self._searching[owner] += 1
            return self._file.search(f"{name}_patiently", lambda c: search(c, patient)).addBoth(over)

        def over(result: T) -> T:
            self._searching[owner] -= 1
            if not self._searching[owner]:
                del self._searching[owner]
            return result

        return self._file.read(name, lambda c: search(c, reading), size).addCallback(insist)

    def _guarded(self, name: str, lane: str, guard: Guard, command: Command, size: int = 0) -> Deferred[Any]:
        """
        :param lane: what the command reads and changes.
        :param size: bytes that the command keeps in memory until it is done.
        """
        work = Guarded(guard, command, self._clock.seconds(), self._max_nonces, lane)
        return self._file.write(name, work, size)


def slice_bytes(items: int) -> int:
    """What so many items that are read together are taken for; never more than a slice may have."""
    return min(items * _ITEM_BYTES, LARGEST_SLICE)


def _page_bytes(part: Slice) -> int:
    return min(part.limit * _ITEM_BYTES, _PAGE_BYTES)


def _nothing(_: object) -> None:
    """All that was asked for is what the guard says."""
