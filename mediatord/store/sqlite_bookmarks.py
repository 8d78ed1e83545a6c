"""Where pages begin, as far as somebody has read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

Place = tuple[float, int]

_CAPACITY = 256
_PLACES = 64


class Bookmarks:
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
        self._marks: tuple[tuple[int, Place], ...] = ()

    def before(self, offset: int) -> tuple[int, Place | None]:
        """The last bookmark that is not behind an offset: how many events are up to it, and the last of them."""
        marks = self._marks
        index = bisect_right(marks, offset, key=lambda mark: mark[0])
        return marks[index - 1] if index else (0, None)

    def add(self, offset: int, last: Place) -> None:
        """So many events are up to this one."""
        marks = sorted({**dict(self._marks), offset: last}.items())
        # Who reads on needs the last one most, and the others the less the closer they are together.
        self._marks = tuple(marks if len(marks) <= _PLACES else [*marks[1:-1:2], marks[-1]])


class Shelfmarks:
    """
    Bookmarks of the lists that were read lately, a bounded number of them.

    Nothing here is known to be true by itself: the edition is read in the transaction that relies on it, and it
    changes with every change, whichever process makes it.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._lists: OrderedDict[Hashable, Bookmarks] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Hashable, edition: int) -> Bookmarks:
        """Those of a list, if they are of this edition, or none."""
        with self._lock:
            bookmarks = self._lists.pop(key, None)
            if bookmarks is None or bookmarks.edition != edition:
                bookmarks = Bookmarks(edition)
            self._lists[key] = bookmarks
            if len(self._lists) > self._capacity:
                self._lists.popitem(last=False)
            return bookmarks

    def clear(self) -> None:
        """It may be another file."""
        with self._lock:
            self._lists.clear()
