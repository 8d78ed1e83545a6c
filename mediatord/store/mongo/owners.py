"""Processes that have sessions, so that what they had begun can be ended when they have died."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.books import KEEPS
from mediatord.store.mongo.collections import OWNERS
from mediatord.store.mongo.requests import deleting, updating
from mediatord.store.mongo.server import Server

_log = Logger(namespace="mediatord.store")


class Entry:
    """Ours among them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._owner = server.owner
        self._warned: set[str] = set()

    async def enter(self, live: Collection[str]) -> None:
        """
        Be one of them, and end what those have begun that have died. Should one of them be alive after all, it does
        again what it was about.

        :param live: those that are alive.
        """
        server = self._server
        user = await self._user()
        for other in await server.find("enter", OWNERS, {"_id": {"$nin": [self._owner, *live]}}):
            self._compare(user, other.get("user", user))
            await server.end_sessions(other["_id"])
            await server.write("enter", deleting(OWNERS, {"_id": other["_id"]}))
        entry = {"since": "$$NOW", "user": {"$literal": user}, KEEPS: True}
        ours = {"q": {"_id": self._owner}, "u": [{"$set": entry}], "upsert": True}
        await server.write("enter", updating(OWNERS, [ours]))

    async def leave(self) -> None:
        """Be none of them any more, if that can be said."""
        if self._server.answers:
            with suppress(StoreUnavailable):
                await self._server.write("leave", deleting(OWNERS, {"_id": self._owner}))

    async def _user(self) -> str:
        """As whom the server knows us; empty if it lets everybody in."""
        status = await self._server.command("enter", {"connectionStatus": 1}, database="admin")
        return ", ".join(f"{one['user']}@{one['db']}" for one in status["authInfo"]["authenticatedUsers"])

    def _compare(self, ours: str, theirs: str) -> None:
        """The server lets nobody end the sessions of another user, and says that it has."""
        if theirs == ours or theirs in self._warned:
            return
        self._warned.add(theirs)
        _log.warn(
            "this node is MongoDB user {ours}, another one {theirs}: neither can end what the other leaves behind"
            " when it is killed, which is in the way for a minute; give all nodes the same user",
            ours=ours or "nobody",
            theirs=theirs or "nobody",
        )
