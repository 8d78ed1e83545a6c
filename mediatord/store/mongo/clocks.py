"""Our clock and that of the server, which may be a minute apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC

from mediatord.interfaces import CLOCKS_APART, ClockDiffers
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.server import Server

# Seconds by which ours may be set, or be corrected between two looks, without being doubted.
_HARDLY_SET = 1.0


def agreeing(now: float) -> Document:
    """
    An expression of the server: whether its clock agrees with ours.

    What the server fills in as an order of arrival is of no use for that: it never goes back, whatever a clock does.

    :param now: by the clock of this host, not one that a store was given.
    """
    apart = {"$abs": {"$subtract": [{"$toLong": "$$NOW"}, round(now * 1000)]}}
    return {"$lte": [apart, round(CLOCKS_APART * 1000)]}


class Clocks:
    """
    What is known of the two.

    :param steady: seconds since any time, which nobody can set.
    """

    def __init__(self, server: Server, steady: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._steady = steady
        self._differ = False
        self._agreed_at: float | None = None

    @property
    def differ(self) -> bool:
        """Whether they do, or may do since ours was set after it was last found to agree."""
        return self._differ or self._was_set

    @property
    def standing(self) -> float:
        """Where ours stands against one that nobody can set."""
        return self._server.wall.seconds() - self._steady()

    def agreed(self, standing: float) -> None:
        """They were found to agree when ours stood like this."""
        self._differ, self._agreed_at = False, standing

    def agreeing(self) -> Document:
        """As of now; see :func:`agreeing`."""
        return agreeing(self._server.wall.seconds())

    async def compare(self) -> None:
        """:raise ClockDiffers: they are too far apart."""
        asked, standing = self._server.wall.seconds(), self.standing
        hello = await self._server.command("clock", {"hello": 1}, database="admin")
        answered = self._server.wall.seconds()
        theirs = hello["localTime"].replace(tzinfo=UTC).timestamp()
        # It looked at its clock between the two.
        ahead = asked - theirs if asked > theirs else min(answered - theirs, 0.0)
        if abs(ahead) > CLOCKS_APART:
            self._differ = True
            raise ClockDiffers(ahead)
        self.agreed(standing)

    @property
    def _was_set(self) -> bool:
        return self._agreed_at is not None and abs(self.standing - self._agreed_at) > _HARDLY_SET
