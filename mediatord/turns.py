"""What only one of several nodes does at a time, whichever it is."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from mediatord.interfaces import IClusterStore

HOUSEKEEPING = "housekeeping"

# Seconds for which a turn is held, and after which it is asked for again at the earliest.
LEASE = 10.0
ASK_EVERY = 3.0


class Turn:
    """
    A turn as one node sees it.

    It is held for as long as this node keeps asking whether it is, and is anybody's :data:`LEASE` seconds after that.

    :param boot: of this node.
    """

    def __init__(self, clock: IReactorTime, store: IClusterStore, boot: str, turn: str = HOUSEKEEPING) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._turn = turn
        self._asked_at = float("-inf")
        self._until = float("-inf")

    async def is_mine(self) -> bool:
        """
        Whether it is this node's turn now.

        :raise StoreUnavailable: that is not known.
        """
        asked_at = self._clock.seconds()
        if not 0 <= asked_at - self._asked_at < ASK_EVERY:
            mine = await self._store.hold(self._turn, self._boot, LEASE)
            # Another one may have it as soon as the store's lease is over, which began when it was asked or later.
            self._until = asked_at + LEASE if mine else asked_at
            self._asked_at = asked_at
        return self._clock.seconds() < self._until
