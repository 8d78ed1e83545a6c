"""
Collections and their indexes, made when the store is opened, and versions of what is in them.

Every version adds to the one before and says which is the oldest that can go on using the database after that: nodes
of two versions may run side by side. What is newer than we are is used as it is, if it allows that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.interfaces import StoreRefused
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Duplicate, Refused
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.versions import Version, announce_version, read_version, record_version

_log = Logger(namespace="mediatord.store")

# Seconds for looking and recording, and for building indexes of a large database, or going through it.
_QUICK, _SLOW = 2.5, 600.0
_NAMESPACE_MISSING, _INDEX_MISSING, _NAMESPACE_EXISTS = 26, 27, 48
_ALTERED_MEANWHILE = {85, 86}
_ATTEMPTS = 5


# Definitions of the indexes of a collection by name.
Existing = dict[str, Document]


@dataclass(frozen=True, slots=True)
class Index:
    """
    One that is altered gets another name, as nodes of the version before may run beside ours and ask by the old one.

    :param keys: fields and their direction.
    :param partial: only documents that match are in it.
    :param expire_after: seconds after the time in its field when the server may delete a document.
    """

    name: str
    keys: Document
    unique: bool = False
    partial: Document | None = None
    expire_after: int | None = None

    def definition(self) -> Document:
        """As the server gives it back."""
        options = {
            "unique": self.unique or None,
            "partialFilterExpression": self.partial,
            "expireAfterSeconds": self.expire_after,
        }
        return {"key": self.keys} | {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection with the indexes that it has beside that of `_id`."""

    name: str
    indexes: tuple[Index, ...] = ()


@dataclass(frozen=True, slots=True)
class Migration:
    """
    The step from one version to the next. Several nodes may take it at once, and any of them again.

    :param change: what to do, until a time of the clock.
    :param readable_from: the oldest version that can use the database after it.
    """

    change: Callable[[Operations, float], Awaitable[object]]
    readable_from: int


@dataclass(frozen=True, slots=True)
class Schema:
    """:param migrations: from version 1, which is what the collections say, onwards."""

    collections: Sequence[Collection]
    migrations: Sequence[Migration] = field(default=())

    @property
    def version(self) -> int:
        return 1 + len(self.migrations)

    async def prepare(self, operations: Operations, clock: IReactorTime) -> None:
        """
        Bring a database up to this version.

        :raise StoreRefused: it is of one that we must not use.
        """
        found = await read_version(operations, _soon(clock))
        found.check(self.version)
        if found.number > self.version:
            return
        ours = Version(self.version, self.version, self.migrations[-1].readable_from if self.migrations else 1)
        behind = found.number < self.version
        if behind:
            await announce_version(operations, ours, _soon(clock))
        await self._make_indexes(operations, clock)
        for migration in self.migrations[found.number - 1 :]:
            await migration.change(operations, clock.seconds() + _SLOW)
        if behind or not found.recorded:
            await record_version(operations, ours, _soon(clock))
        if behind:
            # Somebody older, who had looked before we said what is to come, may have undone some meanwhile.
            await self._make_indexes(operations, clock)

    async def _make_indexes(self, operations: Operations, clock: IReactorTime) -> None:
        """Make what is missing, and make anew what is different, but not while it is made for a newer version."""
        overtaken = False
        for attempt in range(_ATTEMPTS):
            there = await _look(operations, self.collections, _soon(clock))
            if not any(_missing(one, there[one.name], _differs) for one in self.collections):
                return
            overtaken = await self._is_overtaken(operations, clock)
            wanting = _absent if overtaken else _differs
            todo = [one for one in self.collections if _missing(one, there[one.name], wanting)]
            if not todo:
                return
            if attempt:
                _log.info("indexes were altered while they were made: once more")
            for collection in todo:
                await self._mend(operations, collection, there[collection.name], clock)
        if not overtaken:
            raise StoreRefused("the indexes of the MongoDB database keep changing: another program alters them")

    async def _is_overtaken(self, operations: Operations, clock: IReactorTime) -> bool:
        """Whether somebody is bringing the database to a newer version, and knows better what there has to be."""
        return (await read_version(operations, _soon(clock))).heading_for > self.version

    async def _mend(
        self, operations: Operations, collection: Collection, existing: Existing | None, clock: IReactorTime
    ) -> None:
        new = existing is None
        if existing is None:
            await _try(operations, {"create": collection.name}, _soon(clock), {_NAMESPACE_EXISTS})
            existing = {}
        missing = [index for index in collection.indexes if _absent(index, existing)]
        await _build(operations, collection, missing, clock, new=new)
        # Nodes that run have to do without these until they are built, so nothing else is with them.
        altered: list[Index] = []
        for index in collection.indexes:
            if index in missing or not _differs(index, existing) or await self._is_overtaken(operations, clock):
                continue
            await _clear_the_way(operations, collection, index, existing, _soon(clock))
            altered.append(index)
        await _build(operations, collection, altered, clock, new=new)


def _soon(clock: IReactorTime) -> float:
    return clock.seconds() + _QUICK


async def _look(
    operations: Operations, collections: Sequence[Collection], deadline: float
) -> dict[str, Existing | None]:
    """
    The definitions of all indexes by collection and name; None for a collection that is not there.

    One of ours that is still being built is none yet: to make it is to wait for it.
    """
    how: Document = {"includeBuildUUIDs": True, "cursor": {"batchSize": 1000}}
    questions = [Request({"listIndexes": one.name, **how}) for one in collections]
    replies = await operations.all(questions, deadline)
    there: dict[str, Existing | None] = {}
    for collection, reply in zip(collections, replies, strict=True):
        if isinstance(reply, Refused):
            if reply.code != _NAMESPACE_MISSING:
                raise reply
            there[collection.name] = None
        else:
            found = [one for one in reply["cursor"]["firstBatch"] if not _is_being_built(one, collection)]
            specs = [one.get("spec", one) for one in found]
            there[collection.name] = {spec["name"]: _definition(spec) for spec in specs}
    return there


def _is_being_built(found: Document, collection: Collection) -> bool:
    if "buildUUID" not in found:
        return False
    definition = _definition(found["spec"])
    return any(_same(index.definition(), definition) for index in collection.indexes)


def _definition(index: Document) -> Document:
    return {name: value for name, value in index.items() if name not in {"v", "name", "ns"}}


def _same(one: Document, other: Document) -> bool:
    return one == other and list(one["key"].items()) == list(other["key"].items())


def _missing(collection: Collection, existing: Existing | None, wanting: Callable[[Index, Existing], bool]) -> bool:
    return existing is None or any(wanting(index, existing) for index in collection.indexes)


def _differs(index: Index, existing: Existing) -> bool:
    """Whether there is no such index."""
    present = existing.get(index.name)
    return present is None or not _same(index.definition(), present)


def _absent(index: Index, existing: Existing) -> bool:
    """Whether there is nothing that has its place."""
    return not _in_the_way(index, existing)


async def _build(
    operations: Operations, collection: Collection, indexes: Sequence[Index], clock: IReactorTime, *, new: bool
) -> None:
    """:param new: whether the collection is."""
    if not indexes:
        return
    if not new:
        names = ", ".join(index.name for index in indexes)
        _log.info("building indexes of {name}: {names}", name=collection.name, names=names)
    definitions = [{**index.definition(), "name": index.name} for index in indexes]
    # Members that are away catch up; by default all of them would be waited for.
    body = {"createIndexes": collection.name, "indexes": definitions, "commitQuorum": "majority"}
    # When we give up waiting, the servers go on, and the next start waits for them; with a limit they would give up.
    await _try(operations, body, clock.seconds() + _SLOW, _ALTERED_MEANWHILE, limited=False)


async def _clear_the_way(
    operations: Operations, collection: Collection, index: Index, existing: Existing, deadline: float
) -> None:
    for name in _in_the_way(index, existing):
        _log.warn("index {name} is made anew: it was another one", name=name)
        await _try(operations, {"dropIndexes": collection.name, "index": name}, deadline, {_INDEX_MISSING})


def _in_the_way(index: Index, existing: Existing) -> list[str]:
    """Indexes of this name, or that are the same but for their name, which no collection may have two of."""
    definition = _timeless(index.definition())
    return [name for name, one in existing.items() if name == index.name or _same(definition, _timeless(one))]


def _timeless(definition: Document) -> Document:
    return {name: value for name, value in definition.items() if name != "expireAfterSeconds"}


async def _try(
    operations: Operations, body: Document, deadline: float, harmless: set[int], *, limited: bool = True
) -> None:
    try:
        await operations.command(operations.durably(Request(body), deadline), deadline, limited=limited)
    except Refused as error:
        if error.code not in harmless:
            raise
    except Duplicate as error:
        index = f"index {error.index} of the MongoDB collection {error.collection}"
        raise StoreRefused(f"cannot make the {index}: several documents have the same value") from None
