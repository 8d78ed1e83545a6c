"""Whether a server is one to work with."""

from __future__ import annotations

from twisted.logger import Logger

from mediatord.interfaces import StoreRefused
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.pulse import feeling
from mediatord.store.mongo.requests import Request

OLDEST_TESTED = NEWEST_TESTED = (6, 0)

_log = Logger(namespace="mediatord.store")


class Inspection:
    """Looks at the server whenever the store is opened; what is only a warning is said once."""

    def __init__(self, hosts: str) -> None:
        self._hosts = hosts
        self._warned = False

    async def look(self, operations: Operations, deadline: float) -> None:
        """:raise StoreRefused: transactions are not to be had."""
        hello = await operations.command(Request({"hello": 1}, database="admin"), deadline)
        if "setName" not in hello:
            raise StoreRefused(f"the MongoDB server at {self._hosts} is not a member of a replica set")
        built = await operations.command(Request({"buildInfo": 1}, database="admin"), deadline)
        if not OLDEST_TESTED <= tuple(built["versionArray"][:2]) <= NEWEST_TESTED and not self._warned:
            self._warned = True
            _log.warn("MongoDB {version} is not among the versions this was tested with", version=built["version"])
        # The first that needs credentials.
        await operations.query(feeling(), deadline)
