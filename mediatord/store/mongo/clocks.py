"""Our clock and that of the server, which may be a minute apart."""

from __future__ import annotations

from datetime import UTC

from mediatord.interfaces import CLOCKS_APART, ClockDiffers
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.server import Server


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
    :ivar differ: what was found when somebody last looked.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.differ = False

    def agreeing(self) -> Document:
        """As of now; see :func:`agreeing`."""
        return agreeing(self._server.clock.seconds())

    async def compare(self) -> None:
        """:raise ClockDiffers: they are too far apart."""
        asked = self._server.clock.seconds()
        hello = await self._server.command("clock", {"hello": 1}, database="admin")
        answered = self._server.clock.seconds()
        theirs = hello["localTime"].replace(tzinfo=UTC).timestamp()
        # It looked at its clock between the two.
        ahead = asked - theirs if asked > theirs else min(answered - theirs, 0.0)
        self.differ = abs(ahead) > CLOCKS_APART
        if self.differ:
            raise ClockDiffers(ahead)
