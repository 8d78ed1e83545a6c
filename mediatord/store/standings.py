"""Who has how much of a queue that is full, remembered from one deposit to the next."""

from __future__ import annotations

from mediatord.store.shares import Part, Usage


class Standing:
    """
    What each has of a queue, as long as nothing but deposits into it is done to the queue.

    :ivar behind: of some messages, up to which place in the order of arrival there are none.
    """

    __slots__ = ("behind", "usage")

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.behind: dict[Part, int] = {}

    def change(self, origin: int, messages: int, size: int) -> None:
        """So much more, or less, is from there."""
        self.usage.change(origin, messages, size)
