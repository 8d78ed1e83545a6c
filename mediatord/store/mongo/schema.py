"""
The version of what is in the database, and the one to which somebody is bringing it.

Collections and their indexes, made when the store is opened, and versions of what is in them.

Every version adds to the one before and says which is the oldest that can go on using the database after that: nodes
of two versions may run side by side. What is newer than we are is used as it is, if it allows that.

Collections of the DIDComm half and their indexes.

Times are seconds since the epoch, by the clock of whoever wrote them. `seq` is filled in by the server: the order of
arrival. Accounts and recipients have short ids of their own, so that indexes of messages stay small and an account
can go by another DID.

Collections of what nodes know of each other, and their indexes.

Times are those of the server, as it knows them itself. That the server may delete what is long over is only tidiness:
what counts is always asked for.

Collections of the Decentrl half and their indexes.

`_id` is the id that the caller chose, except of a party: there it is the key that stands for its DID, as `party`,
`sender` and `peer` do in the other collections. `seq` is filled in by the server: the order of arrival.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo.driver.commands import (
    HEARTBEAT_COLLECTION,
    Document,
    MongoCommand,
    build_deletes,
    build_find,
    build_updates,
)
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError
from mediatord.store.mongo.driver.executor import OperationExecutor, retry_on_duplicate_key
from mediatord.store.mongo.ledger_entries import LEDGER
from mediatord.store.recipient_names import RecipientNames

_log = Logger(namespace="mediatord.store")

_SCHEMA_COLLECTION = "schema"
# There while an import into the database is under way, or was interrupted.
IMPORT_MARKER = "importing"


@dataclass(frozen=True, slots=True)
class MongoSchemaVersion:
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
            raise StoreUnusable(
                "cannot use the MongoDB database: an import into it is not finished: "
                "run it again, or drop the database"
            )
        if self.readable_from > ours:
            raise StoreUnusable(
                f"cannot use the MongoDB database: its schema is version {self.heading_for}, "
                f"this mediatord knows {ours} at most"
            )
        if self.heading_for > ours:
            _log.warn("the database has schema version {version}, of a newer mediatord", version=self.heading_for)


async def read_version(executor: OperationExecutor, deadline: float) -> MongoSchemaVersion:
    found = await executor.query(build_find(_SCHEMA_COLLECTION, {"_id": _SCHEMA_COLLECTION}), deadline)
    if not found:
        return MongoSchemaVersion()
    number, ahead = found[0]["version"], found[0].get("upgrading_to", 0)
    return MongoSchemaVersion(number, max(number, ahead), found[0]["readable_from"], True, IMPORT_MARKER in found[0])


async def announce_version(executor: OperationExecutor, version: MongoSchemaVersion, deadline: float) -> None:
    """Say that the database is being brought to a version, before anything of it is there."""
    change = {
        "version": {"$ifNull": ["$version", 1]},
        "readable_from": {"$max": ["$readable_from", version.readable_from]},
        "upgrading_to": {"$max": ["$upgrading_to", version.number]},
    }
    update = {"q": {"_id": _SCHEMA_COLLECTION}, "u": [{"$set": change}], "upsert": True}
    await retry_on_duplicate_key(lambda: executor.write(build_updates(_SCHEMA_COLLECTION, [update]), deadline))


async def record_version(executor: OperationExecutor, version: MongoSchemaVersion, deadline: float) -> None:
    """Say that the database is of a version, unless it is of a newer one already."""
    number, oldest = version.number, version.readable_from
    ahead = {"$gt": ["$upgrading_to", number]}
    change = {
        "version": number,
        "readable_from": {"$cond": [ahead, {"$max": ["$readable_from", oldest]}, oldest]},
        "upgrading_to": {"$cond": [ahead, "$upgrading_to", "$$REMOVE"]},
    }
    query = {"_id": _SCHEMA_COLLECTION, "version": {"$not": {"$gt": number}}}
    with suppress(DuplicateKeyError):  # somebody newer was faster
        await executor.write(
            build_updates(_SCHEMA_COLLECTION, [{"q": query, "u": [{"$set": change}], "upsert": True}]), deadline
        )


# Seconds for looking and recording, and for building indexes of a large database, or going through it.
_COMMAND_TIMEOUT, _BUILD_TIMEOUT = 2.5, 600.0
_NAMESPACE_MISSING, _INDEX_MISSING, _NAMESPACE_EXISTS = 26, 27, 48
_INDEX_CONFLICT_CODES = {85, 86}
_MAX_INDEX_ATTEMPTS = 5

# Definitions of the indexes of a collection by name.
ExistingIndexes = dict[str, Document]


@dataclass(frozen=True, slots=True)
class IndexSpec:
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
class CollectionSpec:
    """A collection with the indexes that it has beside that of `_id`."""

    name: str
    indexes: tuple[IndexSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class MongoMigration:
    """
    The step from one version to the next. Several nodes may take it at once, and any of them again.

    :param change: what to do, until a time of the clock.
    :param readable_from: the oldest version that can use the database after it.
    """

    change: Callable[[OperationExecutor, float], Awaitable[object]]
    readable_from: int


@dataclass(frozen=True, slots=True)
class MongoSchema:
    """:param migrations: from version 1, which is what the collections say, onwards."""

    collections: Sequence[CollectionSpec]
    migrations: Sequence[MongoMigration] = field(default=())

    @property
    def version(self) -> int:
        return 1 + len(self.migrations)

    async def prepare(self, executor: OperationExecutor, clock: IReactorTime) -> None:
        """
        Bring a database up to this version.

        :raise StoreRefused: it is of one that we must not use.
        """
        found = await read_version(executor, _get_command_deadline(clock))
        found.check(self.version)
        if found.number > self.version:
            return
        ours = MongoSchemaVersion(
            self.version, self.version, self.migrations[-1].readable_from if self.migrations else 1
        )
        behind = found.number < self.version
        if behind:
            await announce_version(executor, ours, _get_command_deadline(clock))
        await self._make_indexes(executor, clock)
        for migration in self.migrations[found.number - 1 :]:
            await migration.change(executor, clock.seconds() + _BUILD_TIMEOUT)
        if behind or not found.recorded:
            await record_version(executor, ours, _get_command_deadline(clock))
        if behind:
            # Somebody older, who had looked before we said what is to come, may have undone some meanwhile.
            await self._make_indexes(executor, clock)

    async def _make_indexes(self, executor: OperationExecutor, clock: IReactorTime) -> None:
        """Make what is missing, and make anew what is different, but not while it is made for a newer version."""
        is_superseded = False
        for attempt in range(_MAX_INDEX_ATTEMPTS):
            there = await _list_indexes(executor, self.collections, _get_command_deadline(clock))
            if not any(_lacks_index(one, there[one.name], _is_different) for one in self.collections):
                return
            is_superseded = await self._is_superseded(executor, clock)
            wanting = _is_absent if is_superseded else _is_different
            todo = [one for one in self.collections if _lacks_index(one, there[one.name], wanting)]
            if not todo:
                return
            if attempt:
                _log.info("indexes were altered while they were made: once more")
            for collection in todo:
                await self._repair_indexes(executor, collection, there[collection.name], clock)
        if not is_superseded:
            raise StoreUnusable("the indexes of the MongoDB database keep changing: another program alters them")

    async def _is_superseded(self, executor: OperationExecutor, clock: IReactorTime) -> bool:
        """Whether somebody is bringing the database to a newer version, and knows better what there has to be."""
        return (await read_version(executor, _get_command_deadline(clock))).heading_for > self.version

    async def _repair_indexes(
        self,
        executor: OperationExecutor,
        collection: CollectionSpec,
        existing: ExistingIndexes | None,
        clock: IReactorTime,
    ) -> None:
        new = existing is None
        if existing is None:
            await _run_tolerant(
                executor, {"create": collection.name}, _get_command_deadline(clock), {_NAMESPACE_EXISTS}
            )
            existing = {}
        missing = [index for index in collection.indexes if _is_absent(index, existing)]
        await _build_indexes(executor, collection, missing, clock, new=new)
        # Nodes that run have to do without these until they are built, so nothing else is with them.
        altered: list[IndexSpec] = []
        for index in collection.indexes:
            if index in missing or not _is_different(index, existing) or await self._is_superseded(executor, clock):
                continue
            await _drop_conflicting_indexes(executor, collection, index, existing, _get_command_deadline(clock))
            altered.append(index)
        await _build_indexes(executor, collection, altered, clock, new=new)


def _get_command_deadline(clock: IReactorTime) -> float:
    return clock.seconds() + _COMMAND_TIMEOUT


async def _list_indexes(
    executor: OperationExecutor, collections: Sequence[CollectionSpec], deadline: float
) -> dict[str, ExistingIndexes | None]:
    """
    The definitions of all indexes by collection and name; None for a collection that is not there.

    One of ours that is still being built is none yet: to make it is to wait for it.
    """
    how: Document = {"includeBuildUUIDs": True, "cursor": {"batchSize": 1000}}
    questions = [MongoCommand({"listIndexes": one.name, **how}) for one in collections]
    replies = await executor.all(questions, deadline)
    there: dict[str, ExistingIndexes | None] = {}
    for collection, reply in zip(collections, replies, strict=True):
        if isinstance(reply, MongoCommandError):
            if reply.code != _NAMESPACE_MISSING:
                raise reply
            there[collection.name] = None
        else:
            found = [one for one in reply["cursor"]["firstBatch"] if not _is_being_built(one, collection)]
            specs = [one.get("spec", one) for one in found]
            there[collection.name] = {spec["name"]: _parse_definition(spec) for spec in specs}
    return there


def _is_being_built(found: Document, collection: CollectionSpec) -> bool:
    if "buildUUID" not in found:
        return False
    definition = _parse_definition(found["spec"])
    return any(_is_same_definition(index.definition(), definition) for index in collection.indexes)


def _parse_definition(index: Document) -> Document:
    return {name: value for name, value in index.items() if name not in {"v", "name", "ns"}}


def _is_same_definition(one: Document, other: Document) -> bool:
    return one == other and list(one["key"].items()) == list(other["key"].items())


def _lacks_index(
    collection: CollectionSpec,
    existing: ExistingIndexes | None,
    wanting: Callable[[IndexSpec, ExistingIndexes], bool],
) -> bool:
    return existing is None or any(wanting(index, existing) for index in collection.indexes)


def _is_different(index: IndexSpec, existing: ExistingIndexes) -> bool:
    """Whether there is no such index."""
    present = existing.get(index.name)
    return present is None or not _is_same_definition(index.definition(), present)


def _is_absent(index: IndexSpec, existing: ExistingIndexes) -> bool:
    """Whether there is nothing that has its place."""
    return not _find_conflicting_indexes(index, existing)


async def _build_indexes(
    executor: OperationExecutor,
    collection: CollectionSpec,
    indexes: Sequence[IndexSpec],
    clock: IReactorTime,
    *,
    new: bool,
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
    await _run_tolerant(executor, body, clock.seconds() + _BUILD_TIMEOUT, _INDEX_CONFLICT_CODES, limited=False)


async def _drop_conflicting_indexes(
    executor: OperationExecutor,
    collection: CollectionSpec,
    index: IndexSpec,
    existing: ExistingIndexes,
    deadline: float,
) -> None:
    for name in _find_conflicting_indexes(index, existing):
        _log.warn("index {name} is made anew: it was another one", name=name)
        await _run_tolerant(executor, {"dropIndexes": collection.name, "index": name}, deadline, {_INDEX_MISSING})


def _find_conflicting_indexes(index: IndexSpec, existing: ExistingIndexes) -> list[str]:
    """Indexes of this name, or that are the same but for their name, which no collection may have two of."""
    definition = _without_expiry(index.definition())
    return [
        name
        for name, one in existing.items()
        if name == index.name or _is_same_definition(definition, _without_expiry(one))
    ]


def _without_expiry(definition: Document) -> Document:
    return {name: value for name, value in definition.items() if name != "expireAfterSeconds"}


async def _run_tolerant(
    executor: OperationExecutor, body: Document, deadline: float, harmless: set[int], *, limited: bool = True
) -> None:
    try:
        await executor.command(executor.durably(MongoCommand(body), deadline), deadline, limited=limited)
    except MongoCommandError as error:
        if error.code not in harmless:
            raise
    except DuplicateKeyError as error:
        index = f"index {error.index} of the MongoDB collection {error.collection}"
        raise StoreUnusable(f"cannot make the {index}: several documents have the same value") from None


ACCOUNTS = "accounts"
RECIPIENTS = "recipients"
MESSAGES = "messages"
RETIRED_DIDS = "retired"
LONG_FORM_DIDS = "documents"
NONCES = "nonces"
SESSION_OWNERS = "owners"

# Documents that a migration reads together.
_MIGRATION_BATCH = 500

# `did`, `created_at`, `draft03`; `recipients`, under how many names DIDs are registered, and `places`, how many ever
# were; `seen_at`, the last authenticated contact, to a day; `fresh`, until it is known that the account is used.
_ACCOUNTS_SPEC = CollectionSpec(
    ACCOUNTS,
    (
        IndexSpec("account_did", {"did": 1}, unique=True),
        IndexSpec("account_fresh", {"created_at": 1}, partial={"fresh": {"$exists": True}}),
        IndexSpec("account_seen", {"seen_at": 1}),
    ),
)

# A DID that an account has registered, or had registered when something came that still waits. `account`, `did` in
# its canonical form, `compute_did_digest`, equal for all its forms, `registered`, its place in the order of registration,
# absent when it is not; `names`, the spellings it was registered under, unless that is the DID alone (see
# RecipientNames); `messages` and `bytes` that wait, `changes` of those, and `waited_for`, which is there when any do.
_RECIPIENTS_SPEC = CollectionSpec(
    RECIPIENTS,
    (
        IndexSpec(
            "recipient_did_registered",
            {"did_digest": 1},
            unique=True,
            partial={"did_digest": {"$exists": True}, "registered": {"$exists": True}},
        ),
        IndexSpec("recipient_did", {"did_digest": 1, "account": 1}),
        IndexSpec("recipient_order", {"account": 1, "registered": 1}),
        # By nothing that changes with every message: an index that depends on a counter doubles what an update costs.
        IndexSpec("recipient_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
    ),
)

# `_id` is the message id. `recipient`, `account`, `seq`, `form`, `size`, `received_at`, `expires_at`, `digest`,
# `pushes`, `payload`; `network` and `sender`, the halves of its origin, as far as they are known; `due_at` while
# delayed, and `wakes_at`, the same if it is due before it expires; once it is not delayed `arrived_at`, since when it
# can be pushed; `delivered`, the boot of the node that pushed it last, if it was pushed.
_MESSAGES_SPEC = CollectionSpec(
    MESSAGES,
    (
        IndexSpec("message_of_recipient", {"recipient": 1, "seq": 1}),
        # Those that are not delayed in order of arrival, whatever else waits; what has expired is known by its key.
        IndexSpec("message_of_account", {"account": 1, "due_at": 1, "seq": 1, "expires_at": 1}),
        IndexSpec("message_digest", {"account": 1, "digest": 1}),
        IndexSpec("message_expiry", {"expires_at": 1, "seq": 1}),
        IndexSpec("message_wakes", {"wakes_at": 1, "seq": 1}, partial={"wakes_at": {"$exists": True}}),
        # These two have all that is counted of what is not visible.
        IndexSpec("message_over", {"account": 1, "expires_at": 1, "recipient": 1, "size": 1}),
        IndexSpec(
            "message_delayed",
            {"account": 1, "recipient": 1, "due_at": 1, "expires_at": 1, "size": 1},
            partial={"due_at": {"$exists": True}},
        ),
        # All that is asked of these, so that only keys are read.
        IndexSpec("message_delivered", {"delivered": 1, "_id": 1}, partial={"delivered": {"$exists": True}}),
        IndexSpec(
            "message_arrived",
            {"account": 1, "arrived_at": 1, "_id": 1},
            partial={"arrived_at": {"$exists": True}},
        ),
    ),
)

# `_id` is the key. `until`, `seq`, and `token`, which says whose claim it is.
_NONCES_SPEC = CollectionSpec(NONCES, (IndexSpec("nonce_order", {"seq": 1}), IndexSpec("nonce_until", {"until": 1})))

# `owner`, of the sessions that write it; `didcomm` and `decentrl`, each with what there is of the entries. The
# page that is carried forward has no owner, but `settled`, once there is nobody left who keeps none.
_LEDGER_SPEC = CollectionSpec(LEDGER)

DIDCOMM_COLLECTIONS = (
    _ACCOUNTS_SPEC,
    _RECIPIENTS_SPEC,
    _MESSAGES_SPEC,
    _NONCES_SPEC,
    CollectionSpec(RETIRED_DIDS),
    CollectionSpec(LONG_FORM_DIDS),
    CollectionSpec(HEARTBEAT_COLLECTION),
    CollectionSpec(SESSION_OWNERS),
    _LEDGER_SPEC,
)


async def _begin_a_ledger(_executor: object, _deadline: float) -> None:
    """Whoever opens the books finds what waits; see :mod:`.books`."""


async def _make_canonical(executor: OperationExecutor, deadline: float) -> None:
    """
    DIDs that were kept in other forms. Of several accounts that turn out to be of one DID one stays, with what all of
    them have.
    """
    await _rename_accounts(executor, deadline)
    await _digest_recipients(executor, deadline)
    await _rename_keys(executor, deadline, RETIRED_DIDS)
    await _rename_keys(executor, deadline, LONG_FORM_DIDS)
    # When an account from before was last in contact is not known.
    now = [{"$set": {"seen_at": {"$divide": [{"$toLong": "$$NOW"}, 1000]}}}]
    unseen = {"q": {"seen_at": {"$exists": False}}, "u": now, "multi": True}
    await executor.write(build_updates(ACCOUNTS, [unseen]), deadline)


async def _rename_accounts(executor: OperationExecutor, deadline: float) -> None:
    async for one in _all_of(executor, deadline, ACCOUNTS):
        did = canonicalize_did(one["did"])
        if did == one["did"]:
            continue
        # One that only went over to another form of its DID goes by it still.
        await executor.write(build_deletes(RETIRED_DIDS, {"_id": did}), deadline)
        try:
            change = {"q": {"_id": one["_id"]}, "u": {"$set": {"did": did}}}
            await executor.write(build_updates(ACCOUNTS, [change]), deadline)
        except DuplicateKeyError:
            await _merge_account(executor, deadline, one, did)


async def _merge_account(executor: OperationExecutor, deadline: float, other: Document, did: str) -> None:
    """All that an account has goes to the one with this DID; again from the start, if that was interrupted."""
    (first,) = await executor.query(build_find(ACCOUNTS, {"did": did}), deadline)
    for name in (RECIPIENTS, MESSAGES):
        moved = {"q": {"account": other["_id"]}, "u": {"$set": {"account": first["_id"]}}, "multi": True}
        await executor.write(build_updates(name, [moved]), deadline)
    registered = {"account": first["_id"], "registered": {"$exists": True}}
    found = await executor.query(build_find(RECIPIENTS, registered), deadline)
    number = sum(len(one.get("names", (None,))) for one in found)
    places = max(first.get("places", 0), other.get("places", 0))
    counted = {"q": {"_id": first["_id"]}, "u": {"$set": {"recipients": number, "places": places}}}
    await executor.write(build_updates(ACCOUNTS, [counted]), deadline)
    await executor.write(build_deletes(ACCOUNTS, {"_id": other["_id"]}), deadline)


async def _rename_keys(executor: OperationExecutor, deadline: float, name: str) -> None:
    async for one in _all_of(executor, deadline, name):
        did = canonicalize_did(one["_id"])
        if did == one["_id"]:
            continue
        if name != RETIRED_DIDS or not await executor.query(build_find(ACCOUNTS, {"did": did}), deadline):
            kept = {"q": {"_id": did}, "u": {"$setOnInsert": one | {"_id": did}}, "upsert": True}
            await executor.write(build_updates(name, [kept]), deadline)
        await executor.write(build_deletes(name, {"_id": one["_id"]}), deadline)


async def _all_of(executor: OperationExecutor, deadline: float, name: str) -> AsyncIterator[Document]:
    """Some at a time, in the order of their ids; one that is changed meanwhile may come twice."""
    after: Document = {}
    while found := await executor.query(build_find(name, after, sort={"_id": 1}, limit=_MIGRATION_BATCH), deadline):
        for one in found:
            yield one
        after = {"_id": {"$gt": found[-1]["_id"]}}


async def _digest_recipients(executor: OperationExecutor, deadline: float) -> None:
    """Of several that turn out to be one DID the first that is met stays registered."""
    missing = {"did_digest": {"$exists": False}}
    while found := await executor.query(
        build_find(RECIPIENTS, missing, sort={"_id": 1}, limit=_MIGRATION_BATCH), deadline
    ):
        for one in found:
            did = canonicalize_did(one["did"])
            names = RecipientNames(did, None)
            place = one.get("registered")
            if place is not None:
                names.add(one["did"], place)
            change: Document = {"did": did, "did_digest": compute_did_digest(did)}
            if names.stored is not None:
                change["names"] = names.stored
            this = {"_id": one["_id"]}
            try:
                await executor.write(build_updates(RECIPIENTS, [{"q": this, "u": {"$set": change}}]), deadline)
            except DuplicateKeyError:
                change.pop("names", None)
                left_over = {"$set": change, "$unset": {"registered": 1}}
                fewer = {"q": {"_id": one["account"]}, "u": {"$inc": {"recipients": -1}}}
                await executor.write(build_updates(RECIPIENTS, [{"q": this, "u": left_over}]), deadline)
                await executor.write(build_updates(ACCOUNTS, [fewer]), deadline)


# Of version 2 is what has a ledger: who does not keep it may not change messages. Of version 3 is what knows
# recipients by digests and accounts by canonical forms: who does not would let a DID have two owners.
MIGRATIONS = (MongoMigration(_begin_a_ledger, readable_from=2), MongoMigration(_make_canonical, readable_from=3))

NODES = "nodes"
PRESENCE = "presence"
LEASES = "turns"
QUOTAS = "allowances"
PICKUPS = "pickups"

# Takes part in every join and every end, so that of two at the same time one sees the other.
MEMBERSHIP_LOCK_ID = ""
MEMBERSHIP_LOCK_UPDATE: Document = {"q": {"_id": MEMBERSHIP_LOCK_ID}, "u": {"$inc": {"joins": 1}}, "upsert": True}

CLUSTER_COLLECTIONS = (
    # `_id` is the boot. `name`, `address`, `seal`, `identity`, `until`. The roster has only `joins`.
    CollectionSpec(NODES),
    # `did`, `boot`: nothing that has to be renewed.
    CollectionSpec(
        PRESENCE,
        (
            IndexSpec("presence_of_did", {"did": 1, "boot": 1}, unique=True),
            IndexSpec("presence_of_node", {"boot": 1}),
        ),
    ),
    # `_id` is the turn. `boot`, `until`.
    CollectionSpec(LEASES, (IndexSpec("turn_over", {"until": 1}, expire_after=3600),)),
    # `_id` is the key. `lots`, of `at` in milliseconds and `n`; `until`, when none of them counts; of the latest
    # taking `taken`, whether there was enough, and `now`.
    CollectionSpec(QUOTAS, (IndexSpec("allowance_over", {"until": 1}, expire_after=60),)),
    # `_id` is that of a message or pending event that was handed out by pickup. `until`, when that counts no more.
    CollectionSpec(PICKUPS, (IndexSpec("pickup_over", {"until": 1}, expire_after=60),)),
)

PARTIES = "parties"
REGISTRATIONS = "registrations"


@dataclass(frozen=True, slots=True)
class PartyCollection:
    """
    A collection of what is kept for parties, and counted.

    :param counter: of its documents, in the party.
    :param bytes: of their `size` and `tags_size`, likewise; empty if nobody counts them.
    :param payloads: collection of what is long in them, under the same `_id`; empty if that is in them.
    """

    name: str
    counter: str
    bytes: str = ""
    payloads: str = ""


CONTRACTS = PartyCollection("contracts", "contracts")
CONTRACT_REQUESTS = PartyCollection("contract_requests", "requests")
PENDING_EVENTS = PartyCollection("pending_events", "pending", "pending_bytes")
STORED_EVENTS = PartyCollection("stored_events", "stored", "archive_bytes", "stored_payloads")
PUBLIC_EVENTS = PartyCollection("public_events", "published", "archive_bytes", "public_payloads")

PARTY_UNUSED = "party_unused"
REGISTRATION_OF_PARTY = "registration_of_party"
REGISTRATION_UNTIL = "registration_until"
CONTRACT_OF_PARTY = "contract_of_party"
CONTRACT_OF_PAIR = "contract_of_pair"
CONTRACT_DIGEST = "contract_digest"
REQUEST_OF_PARTY = "request_of_party"
REQUEST_OF_PAIR = "request_of_pair"
PENDING_OF_PARTY = "pending_of_party"
PENDING_OF_PAIR = "pending_of_pair"
PENDING_ARRIVED = "pending_arrived"
# Of stored and of public events.
EVENT_LABEL_INDEX = "labelled"

_EVENT_LABEL_INDEX_SPEC = IndexSpec(EVENT_LABEL_INDEX, {"labels": 1, "at": 1, "seq": 1})

DECENTRL_COLLECTIONS = (
    # `did`, `get_registration_expiry`, `edition` and counters; `waited_for` while there are pending events, and `unused` as
    # long as nothing is kept for it: a change of what an index depends on costs the server twice as much.
    CollectionSpec(
        PARTIES,
        (
            IndexSpec("party_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
            IndexSpec(PARTY_UNUSED, {"unused": 1, "registered_until": 1}, partial={"unused": {"$exists": True}}),
        ),
    ),
    # `party`, `until`, `digest`, `text`.
    CollectionSpec(
        REGISTRATIONS,
        (IndexSpec(REGISTRATION_OF_PARTY, {"party": 1, "until": 1}), IndexSpec(REGISTRATION_UNTIL, {"until": 1})),
    ),
    # `party`, `peer`, `make_mediator_peer_did`, `until`, `digest`, `text`, `seq`.
    CollectionSpec(
        CONTRACTS.name,
        (
            IndexSpec(CONTRACT_OF_PARTY, {"party": 1, "seq": 1, "until": 1}),
            IndexSpec(CONTRACT_OF_PAIR, {"party": 1, "peer": 1, "seq": 1, "until": 1}),
            IndexSpec(CONTRACT_DIGEST, {"party": 1, "digest": 1}, unique=True),
        ),
    ),
    # `party`, `sender`, `sender_did`, `text`, `public_key`, `seq`.
    CollectionSpec(
        CONTRACT_REQUESTS.name,
        (IndexSpec(REQUEST_OF_PARTY, {"party": 1, "seq": 1}), IndexSpec(REQUEST_OF_PAIR, {"party": 1, "sender": 1})),
    ),
    # `party`, `recipient_did`, `sender`, `sender_did`, `received_at`, `size`, `payload`, `seq`.
    CollectionSpec(
        PENDING_EVENTS.name,
        (
            IndexSpec(PENDING_OF_PARTY, {"party": 1, "seq": 1}),
            IndexSpec(PENDING_OF_PAIR, {"party": 1, "sender": 1, "seq": 1}),
            # All that is asked of these, so that only keys are read.
            IndexSpec(PENDING_ARRIVED, {"party": 1, "received_at": 1, "_id": 1}),
        ),
    ),
    # `party`, `labels`, `at`, `tags`, `tags_size`, `size` of the payload, `seq`.
    CollectionSpec(STORED_EVENTS.name, (_EVENT_LABEL_INDEX_SPEC,)),
    CollectionSpec(PUBLIC_EVENTS.name, (_EVENT_LABEL_INDEX_SPEC,)),
    # `sender_did`, `recipient_did`, `contract_id`, `payload`; `event`, `signature`, `channel`.
    CollectionSpec(STORED_EVENTS.payloads),
    CollectionSpec(PUBLIC_EVENTS.payloads),
)
