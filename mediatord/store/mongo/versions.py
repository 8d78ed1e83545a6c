"""The version of what is in the database, and the one to which somebody is bringing it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from twisted.logger import Logger

from mediatord.interfaces import StoreRefused
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.duplicates import retried
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Duplicate
from mediatord.store.mongo.requests import updating

_log = Logger(namespace="mediatord.store")

_SCHEMA = "schema"
# There while an import into the database is under way, or was interrupted.
IMPORTING = "importing"


@dataclass(frozen=True, slots=True)
class Version:
    """
    :param number: 1 if nothing is recorded.
    :param heading_for: the version that somebody has begun to bring it to, or the number.
    :param readable_from: the oldest version that can use it, and will be able to.
    :param importing: whether an import into it has begun and is not finished.
    """

    number: int = 1
    heading_for: int = 1
    readable_from: int = 1
    recorded: bool = False
    importing: bool = False

    def check(self, ours: int) -> None:
        """:raise StoreRefused: a mediatord of our version must not use it, or nobody yet."""
        if self.importing:
            raise StoreRefused(
                "cannot use the MongoDB database: an import into it is not finished: "
                "run it again, or drop the database"
            )
        if self.readable_from > ours:
            raise StoreRefused(
                f"cannot use the MongoDB database: its schema is version {self.heading_for}, "
                f"this mediatord knows {ours} at most"
            )
        if self.heading_for > ours:
            _log.warn("the database has schema version {version}, of a newer mediatord", version=self.heading_for)


async def read_version(operations: Operations, deadline: float) -> Version:
    found = await operations.query(finding(_SCHEMA, {"_id": _SCHEMA}), deadline)
    if not found:
        return Version()
    number, ahead = found[0]["version"], found[0].get("upgrading_to", 0)
    return Version(number, max(number, ahead), found[0]["readable_from"], True, IMPORTING in found[0])


async def announce_version(operations: Operations, version: Version, deadline: float) -> None:
    """Say that the database is being brought to a version, before anything of it is there."""
    change = {
        "version": {"$ifNull": ["$version", 1]},
        "readable_from": {"$max": ["$readable_from", version.readable_from]},
        "upgrading_to": {"$max": ["$upgrading_to", version.number]},
    }
    update = {"q": {"_id": _SCHEMA}, "u": [{"$set": change}], "upsert": True}
    await retried(lambda: operations.write(updating(_SCHEMA, [update]), deadline))


async def record_version(operations: Operations, version: Version, deadline: float) -> None:
    """Say that the database is of a version, unless it is of a newer one already."""
    number, oldest = version.number, version.readable_from
    ahead = {"$gt": ["$upgrading_to", number]}
    change = {
        "version": number,
        "readable_from": {"$cond": [ahead, {"$max": ["$readable_from", oldest]}, oldest]},
        "upgrading_to": {"$cond": [ahead, "$upgrading_to", "$$REMOVE"]},
    }
    query = {"_id": _SCHEMA, "version": {"$not": {"$gt": number}}}
    with suppress(Duplicate):  # somebody newer was faster
        await operations.write(updating(_SCHEMA, [{"q": query, "u": [{"$set": change}], "upsert": True}]), deadline)
