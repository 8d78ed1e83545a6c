"""
What clients have asked for and do not read.

An answer stays in memory until its client has taken it. One connection gets no second answer before that, but a
client may open many connections and ask on each for as much as there is.
"""

from __future__ import annotations

from collections.abc import Callable

PER_PAYER = 33_554_432
IN_ALL = 268_435_456
# As much as a transport holds before it calls itself full: every connection may have that.
SMALL = 65_536


class Unread:
    """
    The bodies of all answers that were written and not taken at once.

    :param per_payer: bytes that may wait for one payer.
    :param in_all: bytes that may wait for all of them.
    :param released: told how many bytes of an answer wait no longer.
    :ivar total: bytes that wait now.
    """

    def __init__(
        self,
        per_payer: int = PER_PAYER,
        in_all: int = IN_ALL,
        released: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._released = released
        self._per_payer = per_payer
        self._in_all = in_all
        self._waiting: dict[str, int] = {}
        self.total = 0

    def limit(self, in_all: int) -> None:
        """Let so many bytes wait from now on, and an eighth of them for one payer."""
        self._in_all, self._per_payer = in_all, in_all // 8

    @property
    def held(self) -> tuple[int, int]:
        """Payers with answers that wait, and the bytes of those."""
        return len(self._waiting), self.total

    def of(self, payer: str) -> int:
        """How many bytes wait for one payer."""
        return self._waiting.get(payer, 0)

    def has_room(self, payer: str, size: int) -> bool:
        """Whether an answer of so many bytes may be written; a small one always may."""
        if size <= SMALL:
            return True
        return self.of(payer) + size <= self._per_payer and self.total + size <= self._in_all

    def add(self, payer: str, size: int) -> None:
        """An answer waits to be read."""
        self._waiting[payer] = self.of(payer) + size
        self.total += size

    def remove(self, payer: str, size: int) -> None:
        """An answer was read, or will never be."""
        left = self.of(payer) - size
        if left > 0:
            self._waiting[payer] = left
        else:
            self._waiting.pop(payer, None)
        self.total -= size
        self._released(size)


class Untaken:
    """What one connection has of it: the answers since its client has taken all there was."""

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._answers: list[tuple[str, int]] = []

    def has_room(self, payer: str, size: int) -> bool:
        """Whether an answer of so many bytes may be written."""
        return self._unread.has_room(payer, size)

    def add(self, payer: str, size: int) -> None:
        """An answer was written, and the transport is full."""
        self._answers.append((payer, size))
        self._unread.add(payer, size)

    def clear(self) -> None:
        """The client has taken everything, or is gone."""
        answers, self._answers = self._answers, []
        for payer, size in answers:
            self._unread.remove(payer, size)
