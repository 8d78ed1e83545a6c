"""
Collections and indexes of the MongoDB store, and the version of its schema.

Each version adds to the one before, and records the oldest version that can use the database from then on, because
nodes of two versions may run side by side. A database of a newer version is used as it is, if that allows it.

Times are seconds since the epoch, by the clock of the node that wrote them; in the collections of the cluster they
are dates of the server. `seq` is a timestamp that the server fills in: the order of arrival. Accounts and recipients
have short ids of their own, so that indexes of messages stay small and an account can change its DID. In the
collections of Decentrl `_id` is the id that the client chose, but of a party the digest of its DID, as are `party`,
`sender` and `peer`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.store.interfaces.administration import QueueProtocol
from mediatord.store.interfaces.messages import ArrivalWindow
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo.driver.commands import (
    HEARTBEAT_COLLECTION,
    Document,
    MongoCommand,
    build_find,
    build_updates,
)
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError
from mediatord.store.mongo.driver.executor import OperationExecutor, retry_on_duplicate_key

_log = Logger(namespace="mediatord.store")

_SCHEMA_COLLECTION = "schema"
# A field of the schema document while an import into the database is unfinished.
IMPORT_MARKER = "importing"
# Seconds for a command, and for building indexes of a large database or migrating it.
_COMMAND_TIMEOUT, _BUILD_TIMEOUT = 2.5, 600.0
_NAMESPACE_MISSING, _INDEX_MISSING, _NAMESPACE_EXISTS = 26, 27, 48
_INDEX_CONFLICT_CODES = {85, 86}
_MAX_INDEX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class MongoSchemaVersion:
    """
    Schema version of a database.

    :param number: 1 if none is recorded.
    :param upgrading_to: the version that a migration in progress leads to, or the number.
    :param readable_from: the oldest version that can use the database, also after that migration.
    :param importing: whether an import into it is unfinished.
    """

    number: int = 1
    upgrading_to: int = 1
    readable_from: int = 1
    recorded: bool = False
    importing: bool = False

    def check(self, ours: int) -> None:
        """:raise StoreUnusable: our version must not use the database, or no version may use it yet."""
        if self.importing:
            raise StoreUnusable(
                "cannot use the MongoDB database: an import into it is not finished: "
                "run it again, or drop the database"
            )
        if self.readable_from > ours:
            raise StoreUnusable(
                f"cannot use the MongoDB database: its schema is version {self.upgrading_to}, "
                f"this mediatord knows {ours} at most"
            )
        if self.upgrading_to > ours:
            _log.warn("the database has schema version {version}, of a newer mediatord", version=self.upgrading_to)


async def read_version(executor: OperationExecutor, deadline: float) -> MongoSchemaVersion:
    found = await executor.query(build_find(_SCHEMA_COLLECTION, {"_id": _SCHEMA_COLLECTION}), deadline)
    if not found:
        return MongoSchemaVersion()
    number, ahead = found[0]["version"], found[0].get("upgrading_to", 0)
    return MongoSchemaVersion(number, max(number, ahead), found[0]["readable_from"], True, IMPORT_MARKER in found[0])


async def announce_version(executor: OperationExecutor, version: MongoSchemaVersion, deadline: float) -> None:
    """Record that a migration to a version begins."""
    change = {
        "version": {"$ifNull": ["$version", 1]},
        "readable_from": {"$max": ["$readable_from", version.readable_from]},
        "upgrading_to": {"$max": ["$upgrading_to", version.number]},
    }
    update = {"q": {"_id": _SCHEMA_COLLECTION}, "u": [{"$set": change}], "upsert": True}
    await retry_on_duplicate_key(lambda: executor.write(build_updates(_SCHEMA_COLLECTION, [update]), deadline))


async def record_version(executor: OperationExecutor, version: MongoSchemaVersion, deadline: float) -> None:
    """Record that the database has a version, unless it has a newer one already."""
    number, oldest = version.number, version.readable_from
    ahead = {"$gt": ["$upgrading_to", number]}
    change = {
        "version": number,
        "readable_from": {"$cond": [ahead, {"$max": ["$readable_from", oldest]}, oldest]},
        "upgrading_to": {"$cond": [ahead, "$upgrading_to", "$$REMOVE"]},
    }
    query = {"_id": _SCHEMA_COLLECTION, "version": {"$not": {"$gt": number}}}
    update = {"q": query, "u": [{"$set": change}], "upsert": True}
    with suppress(DuplicateKeyError):  # a newer version was recorded meanwhile
        await executor.write(build_updates(_SCHEMA_COLLECTION, [update]), deadline)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """
    An index. A changed definition gets another name, because nodes of the version before use the index by its name.

    :param keys: fields and their direction.
    :param partial: filter of the documents in a partial index.
    :param expire_after: seconds after the time in its field when the server deletes a document.
    """

    name: str
    keys: Document
    unique: bool = False
    partial: Document | None = None
    expire_after: int | None = None

    def definition(self) -> Document:
        """Build the definition as the server lists it."""
        options = {
            "unique": self.unique or None,
            "partialFilterExpression": self.partial,
            "expireAfterSeconds": self.expire_after,
        }
        return {"key": self.keys} | {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """A collection with its indexes, except that of `_id`."""

    name: str
    indexes: tuple[IndexSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class MongoMigration:
    """
    The step from one version to the next; idempotent, and safe to run on several nodes at once.

    :param change: called with the deadline.
    :param readable_from: the oldest version that can use the database afterwards.
    """

    change: Callable[[OperationExecutor, float], Awaitable[object]]
    readable_from: int


@dataclass(frozen=True, slots=True)
class MongoSchema:
    """:param migrations: from version 1, which the collections define, onwards."""

    collections: Sequence[CollectionSpec]
    migrations: Sequence[MongoMigration] = ()

    @property
    def version(self) -> int:
        return 1 + len(self.migrations)

    @property
    def readable_from(self) -> int:
        return self.migrations[-1].readable_from if self.migrations else 1

    async def prepare(self, executor: OperationExecutor, clock: IReactorTime) -> None:
        """
        Create collections and indexes, and migrate the database to this version.

        :raise StoreUnusable: this version must not use the database.
        """
        found = await read_version(executor, _get_command_deadline(clock))
        found.check(self.version)
        if found.number > self.version:
            return
        ours = MongoSchemaVersion(self.version, self.version, self.readable_from)
        is_behind = found.number < self.version
        if is_behind:
            await announce_version(executor, ours, _get_command_deadline(clock))
        indexes = _IndexBuilder(executor, clock, self)
        await indexes.build()
        for migration in self.migrations[found.number - 1 :]:
            await migration.change(executor, clock.seconds() + _BUILD_TIMEOUT)
        if is_behind or not found.recorded:
            await record_version(executor, ours, _get_command_deadline(clock))
        if is_behind:
            # A node of an older version that started before the announcement may have undone changes meanwhile.
            await indexes.build()


def _get_command_deadline(clock: IReactorTime) -> float:
    return clock.seconds() + _COMMAND_TIMEOUT


# Definitions of the indexes of a collection by name.
_ExistingIndexes = dict[str, Document]


class _IndexBuilder:
    """Creates missing collections and indexes, and rebuilds those with another definition."""

    def __init__(self, executor: OperationExecutor, clock: IReactorTime, schema: MongoSchema) -> None:
        self._executor = executor
        self._clock = clock
        self._schema = schema

    async def build(self) -> None:
        """Leave other definitions alone while the database is migrated to a newer version."""
        is_superseded = False
        for attempt in range(_MAX_INDEX_ATTEMPTS):
            existing = await self._list_indexes()
            if not self._find_deficient(existing, _is_different):
                return
            is_superseded = await self._is_superseded()
            deficient = self._find_deficient(existing, _is_absent if is_superseded else _is_different)
            if not deficient:
                return
            if attempt:
                _log.info("indexes were changed while they were built: trying again")
            for collection in deficient:
                await self._repair(collection, existing[collection.name])
        if not is_superseded:
            raise StoreUnusable("the indexes of the MongoDB database keep changing: another program alters them")

    def _find_deficient(
        self,
        existing: dict[str, _ExistingIndexes | None],
        is_deficient: Callable[[IndexSpec, _ExistingIndexes], bool],
    ) -> list[CollectionSpec]:
        """Find the collections that do not exist or have a deficient index."""
        found = []
        for collection in self._schema.collections:
            indexes = existing[collection.name]
            if indexes is None or any(is_deficient(index, indexes) for index in collection.indexes):
                found.append(collection)
        return found

    async def _is_superseded(self) -> bool:
        """Whether the database is being migrated to a newer version, which defines the indexes then."""
        version = await read_version(self._executor, _get_command_deadline(self._clock))
        return version.upgrading_to > self._schema.version

    async def _repair(self, collection: CollectionSpec, existing: _ExistingIndexes | None) -> None:
        is_new = existing is None
        if existing is None:
            await self._run({"create": collection.name}, {_NAMESPACE_EXISTS})
            existing = {}
        missing = [index for index in collection.indexes if _is_absent(index, existing)]
        await self._create_indexes(collection, missing, is_new)
        # Running nodes are without these until they are rebuilt, so nothing else is built with them.
        changed: list[IndexSpec] = []
        for index in collection.indexes:
            if index in missing or not _is_different(index, existing) or await self._is_superseded():
                continue
            for name in _find_conflicting_indexes(index, existing):
                _log.warn("rebuilding index {name}: its definition differs", name=name)
                await self._run({"dropIndexes": collection.name, "index": name}, {_INDEX_MISSING})
            changed.append(index)
        await self._create_indexes(collection, changed, is_new)

    async def _list_indexes(self) -> dict[str, _ExistingIndexes | None]:
        """
        List the definitions of all indexes by collection and name; None for a collection that does not exist.

        One of ours that is being built is left out: creating it waits for the build.
        """
        options: Document = {"includeBuildUUIDs": True, "cursor": {"batchSize": 1000}}
        collections = self._schema.collections
        commands = [MongoCommand({"listIndexes": one.name, **options}) for one in collections]
        replies = await self._executor.run_reads(commands, _get_command_deadline(self._clock))
        existing: dict[str, _ExistingIndexes | None] = {}
        for collection, reply in zip(collections, replies, strict=True):
            if isinstance(reply, MongoCommandError):
                if reply.code != _NAMESPACE_MISSING:
                    raise reply
                existing[collection.name] = None
            else:
                found = [one for one in reply["cursor"]["firstBatch"] if not _is_being_built(one, collection)]
                specs = [one.get("spec", one) for one in found]
                existing[collection.name] = {spec["name"]: _parse_definition(spec) for spec in specs}
        return existing

    async def _create_indexes(self, collection: CollectionSpec, indexes: Sequence[IndexSpec], is_new: bool) -> None:
        if not indexes:
            return
        if not is_new:
            names = ", ".join(index.name for index in indexes)
            _log.info("building indexes of {name}: {names}", name=collection.name, names=names)
        definitions = [{**index.definition(), "name": index.name} for index in indexes]
        # With the default quorum, a member that is down would block the build; it catches up later.
        body = {"createIndexes": collection.name, "indexes": definitions, "commitQuorum": "majority"}
        # Without `maxTimeMS` the servers go on when we stop waiting, and the next start waits for the same build.
        await self._run(body, _INDEX_CONFLICT_CODES, _BUILD_TIMEOUT, has_time_limit=False)

    async def _run(
        self, body: Document, harmless: set[int], timeout: float | None = None, *, has_time_limit: bool = True
    ) -> None:
        """:param harmless: error codes to ignore."""
        deadline = self._clock.seconds() + (_COMMAND_TIMEOUT if timeout is None else timeout)
        command = self._executor.with_majority(MongoCommand(body), deadline)
        try:
            await self._executor.command(command, deadline, has_time_limit=has_time_limit)
        except MongoCommandError as error:
            if error.code not in harmless:
                raise
        except DuplicateKeyError as error:
            index = f"index {error.index} of the MongoDB collection {error.collection}"
            raise StoreUnusable(f"cannot make the {index}: several documents have the same value") from None


def _is_being_built(found: Document, collection: CollectionSpec) -> bool:
    if "buildUUID" not in found:
        return False
    definition = _parse_definition(found["spec"])
    return any(_is_same_definition(index.definition(), definition) for index in collection.indexes)


def _parse_definition(index: Document) -> Document:
    return {name: value for name, value in index.items() if name not in {"v", "name", "ns"}}


def _is_same_definition(one: Document, other: Document) -> bool:
    return one == other and list(one["key"].items()) == list(other["key"].items())


def _is_different(index: IndexSpec, existing: _ExistingIndexes) -> bool:
    """Whether no index of this name has this definition."""
    present = existing.get(index.name)
    return present is None or not _is_same_definition(index.definition(), present)


def _is_absent(index: IndexSpec, existing: _ExistingIndexes) -> bool:
    """Whether the index can be created without dropping another one."""
    return not _find_conflicting_indexes(index, existing)


def _find_conflicting_indexes(index: IndexSpec, existing: _ExistingIndexes) -> list[str]:
    """Find indexes of the same name, or of the same definition but for the expiry, which would be rejected."""
    definition = _without_expiry(index.definition())
    return [
        name
        for name, one in existing.items()
        if name == index.name or _is_same_definition(definition, _without_expiry(one))
    ]


def _without_expiry(definition: Document) -> Document:
    return {name: value for name, value in definition.items() if name != "expireAfterSeconds"}


def build_window_filters(field: str, window: ArrivalWindow) -> list[Document]:
    """
    Build filters for a window of time; all matches of one come before all of the next.

    Each is a range of one index; with `$or` the server would read the documents.
    """
    since, until = float(window.since), float(window.until)
    if not window.after:
        return [{field: {"$gte": since, "$lt": until}}]
    later = {field: {"$gt": since, "$lt": until}}
    return [{field: since, "_id": {"$gt": window.after}}, later] if since < until else []


ACCOUNTS = "accounts"
RECIPIENTS = "recipients"
MESSAGES = "messages"
RETIRED_DIDS = "retired"
LONG_FORM_DIDS = "documents"
NONCES = "nonces"
SESSION_OWNERS = "owners"
LEDGER = "ledger"
# The document of the ledger with the sums of dead processes.
CARRIED_FORWARD_ID = "carried"

# `did`, `created_at`, `draft03`; `recipients`, the number of registered names, and `places`, the number ever
# registered; `seen_at`, the last authenticated contact, to a day; `fresh` until the account is known to be used.
_ACCOUNTS_SPEC = CollectionSpec(
    ACCOUNTS,
    (
        IndexSpec("account_did", {"did": 1}, unique=True),
        IndexSpec("account_fresh", {"created_at": 1}, partial={"fresh": {"$exists": True}}),
        IndexSpec("account_seen", {"seen_at": 1}),
    ),
)

# A DID that an account has registered, or had registered when a message arrived that is still queued. `account`;
# `did` in its canonical form; `did_digest`, equal for all its forms; `registered`, its place in the order of
# registration, absent if it is not registered; `names`, the spellings it is registered under, unless that is the DID
# alone (see RecipientNames); `messages` and `bytes` in the queue, `changes` of the queue so far, `waited_for` if it
# is not empty; `senders`, see KnownSenders.
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
        # Not by a counter: an index on a field that changes with every message doubles the cost of the update.
        IndexSpec("recipient_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
    ),
)

# `_id` is the message id. `recipient`, `account`, `seq`, `form`, `size`, `received_at`, `expires_at`, `digest`,
# `pushes`, `payload`; `network` and `sender`, the halves of its origin, if known; while delayed `due_at`, and
# `wakes_at`, the same if it is due before it expires; once not delayed `arrived_at`, since when it can be pushed;
# `delivered`, the boot of the node that pushed it last.
_MESSAGES_SPEC = CollectionSpec(
    MESSAGES,
    (
        IndexSpec("message_of_recipient", {"recipient": 1, "seq": 1}),
        # Messages that are not delayed in order of arrival; covers the check for expiry.
        IndexSpec("message_of_account", {"account": 1, "due_at": 1, "seq": 1, "expires_at": 1}),
        IndexSpec("message_digest", {"account": 1, "digest": 1}),
        IndexSpec("message_expiry", {"expires_at": 1, "seq": 1}),
        IndexSpec("message_wakes", {"wakes_at": 1, "seq": 1}, partial={"wakes_at": {"$exists": True}}),
        # These two cover the counts of messages that are not visible.
        IndexSpec("message_over", {"account": 1, "expires_at": 1, "recipient": 1, "size": 1}),
        IndexSpec(
            "message_delayed",
            {"account": 1, "recipient": 1, "due_at": 1, "expires_at": 1, "size": 1},
            partial={"due_at": {"$exists": True}},
        ),
        # These two cover their queries.
        IndexSpec("message_delivered", {"delivered": 1, "_id": 1}, partial={"delivered": {"$exists": True}}),
        IndexSpec(
            "message_arrived",
            {"account": 1, "arrived_at": 1, "_id": 1},
            partial={"arrived_at": {"$exists": True}},
        ),
    ),
)

# `_id` is the nonce. `until`, `seq`, and `token`, which identifies the claim.
_NONCES_SPEC = CollectionSpec(NONCES, (IndexSpec("nonce_order", {"seq": 1}), IndexSpec("nonce_until", {"until": 1})))

# `_id` is that of a SessionSlot. `owner`; `didcomm` and `decentrl`, each with the sums of the entries. The document
# with the sums of dead processes has no owner, but `settled` once the ledger is initialized.
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


# From version 1, which the collections define, onwards.
MIGRATIONS: tuple[MongoMigration, ...] = ()

NODES = "nodes"
PRESENCE = "presence"
LEASES = "turns"
QUOTAS = "allowances"
PICKUPS = "pickups"

# Every join and every removal of a node writes this document, so that concurrent ones conflict.
MEMBERSHIP_LOCK_ID = ""
MEMBERSHIP_LOCK_UPDATE: Document = {"q": {"_id": MEMBERSHIP_LOCK_ID}, "u": {"$inc": {"joins": 1}}, "upsert": True}

CLUSTER_COLLECTIONS = (
    # `_id` is the boot. `name`, `address`, `seal`, `identity`, `until`. The membership lock has only `joins`.
    CollectionSpec(NODES),
    # `did`, `boot`; lasts as long as the lease of the node.
    CollectionSpec(
        PRESENCE,
        (
            IndexSpec("presence_of_did", {"did": 1, "boot": 1}, unique=True),
            IndexSpec("presence_of_node", {"boot": 1}),
        ),
    ),
    # `_id` is the name of the lease. `boot`, `until`.
    CollectionSpec(LEASES, (IndexSpec("turn_over", {"until": 1}, expire_after=3600),)),
    # `_id` is the key. `lots`, of `at` in milliseconds and `n`; `until`, when none of them counts any more; of the
    # latest take `taken`, whether it succeeded, and `now`.
    CollectionSpec(QUOTAS, (IndexSpec("allowance_over", {"until": 1}, expire_after=60),)),
    # `_id` is that of a message or pending event that was handed out by pickup. `until`, when the record expires.
    CollectionSpec(PICKUPS, (IndexSpec("pickup_over", {"until": 1}, expire_after=60),)),
)

PARTIES = "parties"
REGISTRATIONS = "registrations"


@dataclass(frozen=True, slots=True)
class PartyCollection:
    """
    A collection of documents that belong to parties.

    :param counter: field of the party with the number of its documents.
    :param bytes: field of the party with the sum of their `size` and `tags_size`; empty if it has none.
    :param payloads: collection of their long fields, under the same `_id`; empty if it has none.
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


_EVENT_LABEL_INDEX_SPEC = IndexSpec("labelled", {"labels": 1, "at": 1, "seq": 1})

DECENTRL_COLLECTIONS = (
    # `did`, `registered_until`, `edition` and counters; `waited_for` while there are pending events,
    # and `unused` while all counters are 0, for the indexes: one on a counter would double the cost of an update.
    CollectionSpec(
        PARTIES,
        (
            IndexSpec("party_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
            IndexSpec("party_unused", {"unused": 1, "registered_until": 1}, partial={"unused": {"$exists": True}}),
        ),
    ),
    # `party`, `until`, `digest`, `text`.
    CollectionSpec(
        REGISTRATIONS,
        (IndexSpec("registration_of_party", {"party": 1, "until": 1}), IndexSpec("registration_until", {"until": 1})),
    ),
    # `party`, `peer`, `peer_did`, `until`, `digest`, `text`, `seq`.
    CollectionSpec(
        CONTRACTS.name,
        (
            IndexSpec("contract_of_party", {"party": 1, "seq": 1, "until": 1}),
            IndexSpec("contract_of_pair", {"party": 1, "peer": 1, "seq": 1, "until": 1}),
            IndexSpec("contract_digest", {"party": 1, "digest": 1}, unique=True),
        ),
    ),
    # `party`, `sender`, `sender_did`, `text`, `public_key`, `seq`.
    CollectionSpec(
        CONTRACT_REQUESTS.name,
        (
            IndexSpec("request_of_party", {"party": 1, "seq": 1}),
            IndexSpec("request_of_pair", {"party": 1, "sender": 1}),
        ),
    ),
    # `party`, `recipient_did`, `sender`, `sender_did`, `received_at`, `size`, `payload`, `seq`.
    CollectionSpec(
        PENDING_EVENTS.name,
        (
            IndexSpec("pending_of_party", {"party": 1, "seq": 1}),
            IndexSpec("pending_of_pair", {"party": 1, "sender": 1, "seq": 1}),
            # Covers its query.
            IndexSpec("pending_arrived", {"party": 1, "received_at": 1, "_id": 1}),
        ),
    ),
    # `party`, `labels`, `at`, `tags`, `tags_size`, `size` of the payload, `seq`.
    CollectionSpec(STORED_EVENTS.name, (_EVENT_LABEL_INDEX_SPEC,)),
    CollectionSpec(PUBLIC_EVENTS.name, (_EVENT_LABEL_INDEX_SPEC,)),
    # `sender_did`, `recipient_did`, `contract_id`, `payload`; `event`, `signature`, `channel`.
    CollectionSpec(STORED_EVENTS.payloads),
    CollectionSpec(PUBLIC_EVENTS.payloads),
)


@dataclass(frozen=True, slots=True)
class QueueCollections:
    """
    Collections and fields of the queues of a protocol.

    :param messages: collection of what is queued.
    :param owner: its field with the owner of the queue, and `index` an index by that and arrival.
    :param owners: collection of the owners, with `counter` and `bytes` of the queue.
    :param nonempty: index of the owners with queued messages.
    """

    messages: str
    owner: str
    index: str
    owners: str
    counter: str
    bytes: str
    nonempty: str


QUEUES: dict[QueueProtocol, QueueCollections] = {
    "didcomm": QueueCollections(
        MESSAGES, "recipient", "message_of_recipient", RECIPIENTS, "messages", "bytes", "recipient_waited_for"
    ),
    "decentrl": QueueCollections(
        PENDING_EVENTS.name,
        "party",
        "pending_of_party",
        PARTIES,
        PENDING_EVENTS.counter,
        PENDING_EVENTS.bytes,
        "party_waited_for",
    ),
}

ALL_COLLECTIONS = (*DIDCOMM_COLLECTIONS, *DECENTRL_COLLECTIONS, *CLUSTER_COLLECTIONS)
