"""Caches that backends share: owners of recipient DIDs, and cursors of event pages."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from math import inf
from threading import Lock
from typing import Any, Generic, TypeVar

from mediatord.protocol.canonical_did import is_did_peer_3

T = TypeVar("T")

# Limits the cache to 32 MiB of text.
OWNER_CACHE_CAPACITY = 16_384
_MAX_ENTRY_LENGTH = 2_048


class OwnerCache(Generic[T]):
    """
    A bounded LRU cache from recipient DID to account DID, or from that to the account.

    DIDs are in their canonical form; only registered ones are kept. Another process may remove a registration
    unnoticed, so where there are several, entries are kept for a short time or not at all; and an enqueue checks the
    registration again.

    A result that was being read while a registration changed is not kept: `age` differs then.

    :param now: the clock.
    :param lifetime: seconds for which an entry is valid.
    :param length: characters of an entry.
    """

    def __init__(
        self,
        capacity: int = OWNER_CACHE_CAPACITY,
        *,
        now: Callable[[], float] = lambda: 0.0,
        lifetime: float = inf,
        length: Callable[[Any], int] = len,
    ) -> None:
        self._capacity = capacity
        self._now = now
        self._lifetime = lifetime
        self._length = length
        self._accounts: OrderedDict[str, tuple[T, float]] = OrderedDict()
        self.age = 0

    def get(self, did: str) -> T | None:
        account, until = self._accounts.get(did, (None, 0.0))
        if account is None or until <= self._now():
            return None
        self._accounts.move_to_end(did)
        return account

    def keep(self, did: str, account: T | None, age: int) -> None:
        """Keep a result that was requested at this age of the cache."""
        if is_did_peer_3(did):
            return  # nobody would know when to forget it
        if account is None or age != self.age or len(did) + self._length(account) > _MAX_ENTRY_LENGTH:
            return
        self._accounts[did] = account, self._now() + self._lifetime
        if len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def forget(self, dids: Iterable[str]) -> None:
        """Remove DIDs whose registration may have changed."""
        self.age += 1
        for did in dids:
            if is_did_peer_3(did):
                self._accounts.clear()
            self._accounts.pop(did, None)

    def clear(self) -> None:
        """Remove everything, because an account has another DID now."""
        self.age += 1
        self._accounts.clear()


EventPosition = tuple[float, int]

_CURSOR_CACHE_CAPACITY = 256
_CURSORS_PER_LIST = 64


class PageCursors:
    """
    Cursors into one list of events as long as it does not change. Several threads may use them: state is replaced,
    never modified.

    :param edition: counter of changes of the list.
    :ivar total: number of events in it, once counted.
    """

    __slots__ = ("_marks", "edition", "total")

    def __init__(self, edition: int) -> None:
        self.edition = edition
        self.total: int | None = None
        self._marks: tuple[tuple[int, EventPosition], ...] = ()

    def before(self, offset: int) -> tuple[int, EventPosition | None]:
        """
        The last cursor that is not behind an offset: the number of events up to it, and the position of the last one.
        """
        marks = self._marks
        index = bisect_right(marks, offset, key=lambda mark: mark[0])
        return marks[index - 1] if index else (0, None)

    def add(self, offset: int, last: EventPosition) -> None:
        """Remember the position of the last of `offset` events."""
        marks = sorted({**dict(self._marks), offset: last}.items())
        # Readers go on from the last one; of the others every second one is enough.
        self._marks = tuple(marks if len(marks) <= _CURSORS_PER_LIST else [*marks[1:-1:2], marks[-1]])


class PageCursorCache:
    """
    A bounded cache of the cursors of recently read lists.

    Validity is checked by the edition, which is read in the transaction that relies on it, and which every process
    changes with every change of the list.
    """

    def __init__(self, capacity: int = _CURSOR_CACHE_CAPACITY) -> None:
        self._capacity = capacity
        self._lists: OrderedDict[Hashable, PageCursors] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Hashable, edition: int) -> PageCursors:
        """Cursors of a list; without any if those that are cached are of another edition."""
        with self._lock:
            cursors = self._lists.pop(key, None)
            if cursors is None or cursors.edition != edition:
                cursors = PageCursors(edition)
            self._lists[key] = cursors
            if len(self._lists) > self._capacity:
                self._lists.popitem(last=False)
            return cursors

    def clear(self) -> None:
        """Remove everything, because the database may be another one."""
        with self._lock:
            self._lists.clear()
