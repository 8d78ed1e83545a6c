"""
Who has registered which DID, as far as was asked lately.

Where pages begin, as far as somebody has read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from math import inf
from threading import Lock
from typing import Any, Generic, TypeVar

from mediatord.protocol.canonical_did import is_did_peer_3

T = TypeVar("T")

# With this, the cache holds 32 MiB of text at most.
OWNER_CACHE_CAPACITY = 16_384
_MAX_ENTRY_LENGTH = 2_048


class OwnerCache(Generic[T]):
    """
    A bounded cache from recipient DID to account DID, or from that to the account; it loses the least recently used.

    DIDs are in their canonical form. Only what is registered is kept. Another process may take a DID away unnoticed,
    so where there are several an answer is good for a short time or not kept at all; and what is stored is checked
    again where it is stored.

    An answer that was under way while something changed is not kept: `age` differs then.

    :param now: the clock.
    :param lifetime: seconds for which an answer is good.
    :param length: characters of an answer.
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
        """Keep an answer that was asked for when the cache was of this age."""
        if is_did_peer_3(did):
            return  # nobody would know when to forget it
        if account is None or age != self.age or len(did) + self._length(account) > _MAX_ENTRY_LENGTH:
            return
        self._accounts[did] = account, self._now() + self._lifetime
        if len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def forget(self, dids: Iterable[str]) -> None:
        """Their registration may have changed."""
        self.age += 1
        for did in dids:
            if is_did_peer_3(did):
                self._accounts.clear()
            self._accounts.pop(did, None)

    def clear(self) -> None:
        """An account has another DID now."""
        self.age += 1
        self._accounts.clear()


EventPosition = tuple[float, int]

_CURSOR_CACHE_CAPACITY = 256
_CURSORS_PER_LIST = 64


class PageCursors:
    """
    What is known of one list of events while it does not change. Several threads may use it: what it knows is
    replaced, never changed.

    :param edition: which state of the list that is.
    :ivar total: how many events are in it, once that was counted.
    """

    __slots__ = ("_marks", "edition", "total")

    def __init__(self, edition: int) -> None:
        self.edition = edition
        self.total: int | None = None
        self._marks: tuple[tuple[int, EventPosition], ...] = ()

    def before(self, offset: int) -> tuple[int, EventPosition | None]:
        """The last bookmark that is not behind an offset: how many events are up to it, and the last of them."""
        marks = self._marks
        index = bisect_right(marks, offset, key=lambda mark: mark[0])
        return marks[index - 1] if index else (0, None)

    def add(self, offset: int, last: EventPosition) -> None:
        """So many events are up to this one."""
        marks = sorted({**dict(self._marks), offset: last}.items())
        # Who reads on needs the last one most, and the others the less the closer they are together.
        self._marks = tuple(marks if len(marks) <= _CURSORS_PER_LIST else [*marks[1:-1:2], marks[-1]])


class PageCursorCache:
    """
    Bookmarks of the lists that were read lately, a bounded number of them.

    Nothing here is known to be true by itself: the edition is read in the transaction that relies on it, and it
    changes with every change, whichever process makes it.
    """

    def __init__(self, capacity: int = _CURSOR_CACHE_CAPACITY) -> None:
        self._capacity = capacity
        self._lists: OrderedDict[Hashable, PageCursors] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Hashable, edition: int) -> PageCursors:
        """Those of a list, if they are of this edition, or none."""
        with self._lock:
            cursors = self._lists.pop(key, None)
            if cursors is None or cursors.edition != edition:
                cursors = PageCursors(edition)
            self._lists[key] = cursors
            if len(self._lists) > self._capacity:
                self._lists.popitem(last=False)
            return cursors

    def clear(self) -> None:
        """It may be another file."""
        with self._lock:
            self._lists.clear()
