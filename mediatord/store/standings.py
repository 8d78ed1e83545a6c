"""Who has how much of a queue that is full, remembered from one deposit to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mediatord.store.shares import Amount, parties_of

# No more than this of a party that has nothing.
_NOTHING = Amount()


class Standing:
    """
    What each party has of a queue, as long as nothing but deposits into it is done to the queue.

    :ivar behind: of a party, up to which place in the order of arrival it has nothing.
    """

    __slots__ = ("_amounts", "behind")

    def __init__(self, found: Iterable[Sequence[int]]) -> None:
        """:param found: origin and bytes of each message."""
        self._amounts: dict[int, Amount] = {}
        self.behind: dict[int, int] = {}
        for origin, size in found:
            self.change(origin, 1, size)

    def amount(self, party: int) -> Amount:
        """What it has."""
        return self._amounts.get(party, _NOTHING)

    def change(self, origin: int, messages: int, size: int) -> None:
        """So much more, or less, is from there."""
        for party in parties_of(origin):
            amount = self._amounts.get(party)
            if amount is None:
                amount = self._amounts[party] = Amount()
            amount.add(messages, size)
            if not amount.messages:
                del self._amounts[party]
                self.behind.pop(party, None)
