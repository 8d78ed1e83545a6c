"""Processes that have sessions, so that what they had begun can be ended when they have died."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.collections import OWNERS
from mediatord.store.mongo.requests import deleting, updating
from mediatord.store.mongo.server import Server


class Entry:
    """Ours among them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._owner = server.owner

    async def enter(self, live: Collection[str]) -> None:
        """
        Be one of them, and end what those have begun that have died. Should one of them be alive after all, it does
        again what it was about.

        :param live: those that are alive.
        """
        server = self._server
        for other in await server.find("enter", OWNERS, {"_id": {"$nin": [self._owner, *live]}}):
            await server.end_sessions(other["_id"])
            await server.write("enter", deleting(OWNERS, {"_id": other["_id"]}))
        ours = {"q": {"_id": self._owner}, "u": [{"$set": {"since": "$$NOW"}}], "upsert": True}
        await server.write("enter", updating(OWNERS, [ours]))

    async def leave(self) -> None:
        """Be none of them any more, if that can be said."""
        if self._server.answers:
            with suppress(StoreUnavailable):
                await self._server.write("leave", deleting(OWNERS, {"_id": self._owner}))
