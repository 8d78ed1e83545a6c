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

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from twisted.logger import Logger

from mediatord.store.interfaces.administration import QueueProtocol
from mediatord.store.interfaces.messages import ArrivalWindow
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo.driver.collection import HEALTH_PROBE, Collection, Document, MongoCommand
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError
from mediatord.store.mongo.driver.operation import Operation, retry_on_duplicate_key

_log = Logger(namespace="mediatord.store")

PRESENT: Document = {"$exists": True}
ABSENT: Document = {"$exists": False}


def _index(keys: str, *, partial: str = "", **options: object) -> Document:
    """
    Build the definition of an index, as the server lists it.

    :param keys: fields, in ascending order.
    :param partial: fields that a document must have to be in the index.
    """
    definition: Document = {"key": dict.fromkeys(keys.split(), 1), **options}
    if partial:
        definition["partialFilterExpression"] = dict.fromkeys(partial.split(), PRESENT)
    return definition


# `did`, `created_at`, `draft03`; `recipients`, the number of registered spellings, and `places`, the number ever
# registered; `seen_at`, the last authenticated contact, to a day; `fresh` until the account is known to be used.
ACCOUNTS = Collection(
    "accounts",
    {
        "account_did": _index("did", unique=True),
        "account_fresh": _index("created_at", partial="fresh"),
        "account_seen": _index("seen_at"),
    },
)
# A DID that an account has registered, or had registered when a message arrived that is still queued. `account`;
# `did` in its canonical form; `did_digest`, equal for all its forms; `registered`, its place in the order of
# registration, absent if it is not registered; `names`, the spellings it is registered under, unless that is the DID
# alone (see RegisteredSpellings); `moves`, how often the account has got another DID; `messages` and `bytes` in the
# queue, `changes` of the queue so far, `waited_for` if it is not empty; `senders`, see KnownSenders.
RECIPIENTS = Collection(
    "recipients",
    {
        "recipient_did_registered": _index("did_digest", unique=True, partial="did_digest registered"),
        "recipient_did": _index("did_digest account"),
        "recipient_order": _index("account registered"),
        # Not by a counter: an index on a field that changes with every message doubles the cost of the update.
        "recipient_waited_for": _index("waited_for", partial="waited_for"),
    },
)
# `_id` is the message id. `recipient`, `account`, `seq`, `form`, `size`, `received_at`, `expires_at`, `digest`,
# `pushes`, `payload`; `network` and `sender`, the halves of its origin, if known; while delayed `due_at`, and
# `wakes_at`, the same if it is due before it expires; once not delayed `arrived_at`, since when it can be pushed, and
# if it was delayed `visible`, that time by the clock of the server; `delivered`, the boot of the node that pushed it
# last.
MESSAGES = Collection(
    "messages",
    {
        "message_of_recipient": _index("recipient seq"),
        # Messages that are not delayed in order of arrival; covers the check for expiry.
        "message_of_account": _index("account due_at seq expires_at"),
        "message_digest": _index("account digest"),
        "message_expiry": _index("expires_at seq"),
        "message_wakes": _index("wakes_at seq", partial="wakes_at"),
        # These two cover the counts of messages that are not visible.
        "message_over": _index("account expires_at recipient size"),
        "message_delayed": _index("account recipient due_at expires_at size", partial="due_at"),
        # These two cover their queries.
        "message_delivered": _index("delivered _id", partial="delivered"),
        "message_arrived": _index("account arrived_at _id", partial="arrived_at"),
    },
)
RETIRED_DIDS = Collection("retired_dids")
LONG_FORM_DIDS = Collection("long_form_dids")
# `_id` is the nonce. `until`, `seq`, and `token`, which identifies the claim.
NONCES = Collection("nonces", {"nonce_order": _index("seq"), "nonce_until": _index("until")})
SESSION_OWNERS = Collection("session_owners")
# `_id` is that of a SessionSlot. `owner`; `didcomm` and `decentrl`, each with the sums of the entries. The document
# with the sums of dead processes has no owner.
LEDGER = Collection("ledger")
CARRIED_FORWARD_ID = "carried"

# `_id` is the boot. `name`, `address`, `seal`, `identity`, `until`. The membership lock has only `joins`.
NODES = Collection("nodes")
# Every join and every removal of a node writes this document, so that concurrent ones conflict.
MEMBERSHIP_LOCK_ID = ""
MEMBERSHIP_LOCK_UPDATE: Document = {"q": {"_id": MEMBERSHIP_LOCK_ID}, "u": {"$inc": {"joins": 1}}, "upsert": True}
# `did`, `boot`; lasts as long as the lease of the node.
PRESENCE = Collection(
    "presence", {"presence_of_did": _index("did boot", unique=True), "presence_of_node": _index("boot")}
)
# `_id` is the name of the lease. `boot`, `until`.
LEASES = Collection("leases", {"lease_end": _index("until", expireAfterSeconds=3600)})
# `_id` is the key. `lots`, of `at` in milliseconds and `n`; `until`, when none of them counts any more; of the
# latest take `taken`, whether it succeeded, and `now`.
QUOTAS = Collection("quotas", {"quota_end": _index("until", expireAfterSeconds=60)})
# `_id` is the id of the device. `owner`, the id of an account, or of a party; `service`, `sealed`, `seq`;
# `expires_at`, unless the service accepts it for ever.
DEVICES = Collection(
    "devices",
    {
        "device_of_owner": _index("owner seq"),
        "device_expiry": _index("expires_at", partial="expires_at"),
        # Covers its count.
        "device_service": _index("service"),
    },
)
# `_id` is the owner, as in a device; everyone with a device has one. Dates of the server: `polled` and `woken`, the
# last poll and the last wake-up; `claimed`, `until`, the time and the end of a claim, and its `token`, if there is
# one; `changed`.
WAKEUPS = Collection("wakeups", {"wakeup_change": _index("changed", expireAfterSeconds=90 * 86_400)})
# `_id` is the key of the wallet, which is the DID of its account. The other fields of V1Connection; `pending_since`,
# the time of its creation, while it has no account.
V1_CONNECTIONS = Collection(
    "v1_connections",
    {
        "v1_connection_key": _index("own_key", unique=True),
        # Covers its count.
        "v1_connection_pending": _index("pending_since", partial="pending_since"),
    },
)
# `_id` is that of a message or pending event that was handed out by pickup. `until`, when the record expires.
PICKUPS = Collection("pickups", {"pickup_end": _index("until", expireAfterSeconds=60)})


@dataclass(frozen=True, eq=False)
class PartyCollection(Collection):
    """
    A collection of documents that belong to parties.

    :param counter: field of the party with the number of its documents.
    :param bytes: field of the party with the sum of their `size` and `tags_size`; empty if it has none.
    :param payloads: collection of their long fields, under the same `_id`, if there is one.
    """

    counter: str = ""
    bytes: str = ""
    payloads: Collection | None = None


# `did`, `registered_until`, `edition` and counters; `waited_for` while there are pending events,
# and `unused` while all counters are 0, for the indexes: one on a counter would double the cost of an update.
PARTIES = Collection(
    "parties",
    {
        "party_waited_for": _index("waited_for", partial="waited_for"),
        "party_unused": _index("unused registered_until", partial="unused"),
    },
)
# `party`, `until`, `digest`, `text`.
REGISTRATIONS = Collection(
    "registrations", {"registration_of_party": _index("party until"), "registration_until": _index("until")}
)
# `party`, `peer`, `peer_did`, `until`, `digest`, `text`, `seq`.
CONTRACTS = PartyCollection(
    "contracts",
    {
        "contract_of_party": _index("party seq until"),
        "contract_of_pair": _index("party peer seq until"),
        "contract_digest": _index("party digest", unique=True),
    },
    "contracts",
)
# `party`, `sender`, `sender_did`, `text`, `public_key`, `seq`.
CONTRACT_REQUESTS = PartyCollection(
    "contract_requests",
    {"request_of_party": _index("party seq"), "request_of_pair": _index("party sender")},
    "requests",
)
# `party`, `recipient_did`, `sender`, `sender_did`, `received_at`, `size`, `payload`, `seq`.
PENDING_EVENTS = PartyCollection(
    "pending_events",
    {
        "pending_of_party": _index("party seq"),
        "pending_of_pair": _index("party sender seq"),
        # Covers its query.
        "pending_arrived": _index("party received_at _id"),
    },
    "pending",
    "pending_bytes",
)
# `party`, `labels`, `at`, `tags`, `tags_size`, `size` of the payload, `seq`. In the collections of payloads
# `sender_did`, `recipient_did`, `contract_id`, `payload`; `event`, `event_signature`, `channel_id`.
_LABELLED = {"labelled": _index("labels at seq")}
STORED_PAYLOADS, PUBLIC_PAYLOADS = Collection("stored_payloads"), Collection("public_payloads")
STORED_EVENTS = PartyCollection("stored_events", _LABELLED, "stored", "archive_bytes", STORED_PAYLOADS)
PUBLIC_EVENTS = PartyCollection("public_events", _LABELLED, "published", "archive_bytes", PUBLIC_PAYLOADS)

ALL_COLLECTIONS = (
    *(ACCOUNTS, RECIPIENTS, MESSAGES, NONCES, RETIRED_DIDS, LONG_FORM_DIDS, HEALTH_PROBE, SESSION_OWNERS, LEDGER),
    *(PARTIES, REGISTRATIONS, CONTRACTS, CONTRACT_REQUESTS, PENDING_EVENTS),
    *(STORED_EVENTS, PUBLIC_EVENTS, STORED_PAYLOADS, PUBLIC_PAYLOADS),
    *(NODES, PRESENCE, LEASES, QUOTAS, PICKUPS),
    *(DEVICES, WAKEUPS),
    V1_CONNECTIONS,
)


# Owners of queues that are not empty.
NOT_EMPTY: Document = {"$match": {"waited_for": True}}


@dataclass(frozen=True, slots=True)
class QueueCollections:
    """
    Collections and fields of the queues of a protocol.

    :param messages: what is queued.
    :param owner: its field with the owner of the queue, and `index` an index by that and arrival.
    :param owners: collection of the owners, with `counter` and `bytes` of the queue.
    :param nonempty: index of the owners with queued messages.
    """

    messages: Collection
    owner: str
    index: str
    owners: Collection
    counter: str
    bytes: str
    nonempty: str

    def build_first_query(self, owner: Any) -> MongoCommand:
        """Build a query for the arrival of the first message of a queue."""
        arrival = {"_id": 0, "received_at": 1}
        return self.messages.find({self.owner: owner}, sort={"seq": 1}, limit=1, projection=arrival, hint=self.index)

    def build_sum_query(self) -> MongoCommand:
        """Build a query that sums up the queues that are not empty: `queues`, `messages` and `bytes`."""
        sums = {"messages": {"$sum": f"${self.counter}"}, "bytes": {"$sum": f"${self.bytes}"}}
        stages: list[Document] = [NOT_EMPTY, {"$group": {"_id": None, "queues": {"$sum": 1}, **sums}}]
        return self.owners.aggregate(stages, hint=self.nonempty)


QUEUES: dict[QueueProtocol, QueueCollections] = {
    "didcomm": QueueCollections(
        MESSAGES, "recipient", "message_of_recipient", RECIPIENTS, "messages", "bytes", "recipient_waited_for"
    ),
    "decentrl": QueueCollections(
        PENDING_EVENTS, "party", "pending_of_party", PARTIES, "pending", "pending_bytes", "party_waited_for"
    ),
}


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


_SCHEMA_VERSION = Collection("schema")
_VERSION_ID = "schema"
# A field of the schema document while an import into the database is unfinished.
IMPORT_MARKER = "importing"
# Seconds for a command, and for building indexes of a large database or migrating it.
_COMMAND_TIMEOUT, _BUILD_TIMEOUT = 2.5, 600.0
_NAMESPACE_MISSING, _INDEX_MISSING, _NAMESPACE_EXISTS = 26, 27, 48
_INDEX_CONFLICT_CODES = {85, 86}
_MAX_INDEX_ATTEMPTS = 5


class MongoMigration(NamedTuple):
    """
    The step from one version to the next; idempotent, and safe to run on several nodes at once.

    :param readable_from: the oldest version that can use the database afterwards.
    """

    change: Callable[[Operation], Awaitable[object]]
    readable_from: int


async def _change_nothing(run: Operation) -> None:
    """New collections are created anyway."""


# From version 1, which the collections define, onwards. Version 2 added DEVICES and WAKEUPS, and version 3
# V1_CONNECTIONS; nodes of a version before do not read these, and leave behind what an account that they remove has
# there.
MIGRATIONS: tuple[MongoMigration, ...] = (
    MongoMigration(_change_nothing, readable_from=1),
    MongoMigration(_change_nothing, readable_from=1),
)


@dataclass(frozen=True, slots=True)
class MongoSchema:
    """:param migrations: from version 1, which the collections define, onwards."""

    collections: Sequence[Collection]
    migrations: Sequence[MongoMigration] = ()

    @property
    def version(self) -> int:
        return 1 + len(self.migrations)

    @property
    def readable_from(self) -> int:
        return self.migrations[-1].readable_from if self.migrations else 1

    async def prepare(self, run: Operation) -> None:
        """
        Create collections and indexes, and migrate the database to this version.

        :raise StoreUnusable: this version must not use the database.
        """
        found = await _read_version(run)
        self._check(found)
        number = found.get("version", 1)
        if number > self.version:
            return
        if number < self.version:
            await self._announce(_for_command(run))
        indexes = _IndexBuilder(run, self)
        await indexes.build()
        for migration in self.migrations[number - 1 :]:
            await migration.change(_for_seconds(run, _BUILD_TIMEOUT))
        if number < self.version or not found:
            await self._record(_for_command(run))
        if number < self.version:
            # A node of an older version that started before the announcement may have undone changes meanwhile.
            await indexes.build()

    def _check(self, found: Document) -> None:
        """:raise StoreUnusable: our version must not use the database, or no version may use it yet."""
        if IMPORT_MARKER in found:
            raise StoreUnusable(
                "cannot use the MongoDB database: an import into it is incomplete; run it again, or drop the database"
            )
        theirs = _get_final_version(found)
        if found.get("readable_from", 1) > self.version:
            raise StoreUnusable(
                f"cannot use the MongoDB database: its schema version is {theirs}, "
                f"but this release supports at most {self.version}; upgrade mediatord"
            )
        if theirs > self.version:
            _log.warn("the database has schema version {version}, written by a newer mediatord", version=theirs)

    async def _announce(self, run: Operation) -> None:
        """Record that a migration to this version begins."""
        change = {
            "version": {"$ifNull": ["$version", 1]},
            "readable_from": {"$max": ["$readable_from", self.readable_from]},
            "upgrading_to": {"$max": ["$upgrading_to", self.version]},
        }
        writes = _SCHEMA_VERSION.update({"_id": _VERSION_ID}, [{"$set": change}], upsert=True)
        await retry_on_duplicate_key(lambda: run.write(writes))

    async def _record(self, run: Operation) -> None:
        """Record that the database has this version, unless it has a newer one already."""
        ahead = {"$gt": ["$upgrading_to", self.version]}
        change = {
            "version": self.version,
            "readable_from": {"$cond": [ahead, {"$max": ["$readable_from", self.readable_from]}, self.readable_from]},
            "upgrading_to": {"$cond": [ahead, "$upgrading_to", "$$REMOVE"]},
        }
        not_newer = {"_id": _VERSION_ID, "version": {"$not": {"$gt": self.version}}}
        with suppress(DuplicateKeyError):  # a newer version was recorded meanwhile
            await run.write(_SCHEMA_VERSION.update(not_newer, [{"$set": change}], upsert=True))


def _for_seconds(run: Operation, seconds: float) -> Operation:
    return run.until(run.clock.seconds() + seconds)


def _for_command(run: Operation) -> Operation:
    return _for_seconds(run, _COMMAND_TIMEOUT)


async def _read_version(run: Operation) -> Document:
    """
    Read what is recorded of the version; nothing in a new database.

    :return: `version`, `readable_from`; `upgrading_to`, the version that a migration in progress leads to.
    """
    found = await _for_command(run).query(_SCHEMA_VERSION.find({"_id": _VERSION_ID}))
    return found[0] if found else {}


def _get_final_version(found: Document) -> int:
    """Return the version that the database has, or will have after the migration in progress."""
    return max(int(found.get("version", 1)), int(found.get("upgrading_to", 1)))


# Definitions of the indexes of a collection by name.
_Indexes = Mapping[str, Document]


class _IndexBuilder:
    """Creates missing collections and indexes, and rebuilds those with another definition."""

    def __init__(self, run: Operation, schema: MongoSchema) -> None:
        self._operation = run
        self._schema = schema

    async def build(self) -> None:
        for attempt in range(_MAX_INDEX_ATTEMPTS):
            existing = await self._list_indexes()
            repaired = [await self._repair(one, existing[one.name]) for one in self._schema.collections]
            if not any(repaired):
                return
            if attempt:
                _log.info("indexes were changed while they were built; retrying")
        if not await self._is_superseded():
            raise StoreUnusable(
                "the indexes of the MongoDB database keep changing; stop the program that alters them"
            )

    async def _is_superseded(self) -> bool:
        """Whether the database is being migrated to a newer version, which defines the indexes then."""
        return _get_final_version(await _read_version(self._operation)) > self._schema.version

    async def _repair(self, collection: Collection, existing: _Indexes | None) -> bool:
        """
        Create a collection or indexes; return whether that was necessary. Other definitions are left alone while the
        database is migrated to a newer version.
        """
        is_new = existing is None
        if existing is None:
            await self._run({"create": collection.name}, {_NAMESPACE_EXISTS})
            existing = {}
        missing: dict[str, Document] = {}
        # Running nodes are without these until they are rebuilt, so nothing else is built with them.
        changed: dict[str, Document] = {}
        conflicts: list[str] = []
        for name, index in collection.indexes.items():
            conflicting = _find_conflicting_indexes(name, index, existing)
            if not conflicting:
                missing[name] = index
            elif existing.get(name) != _normalize(index):
                changed[name] = index
                conflicts += conflicting
        await self._create_indexes(collection, missing, is_new)
        if changed and await self._is_superseded():
            changed = {}
        elif changed:
            for other in dict.fromkeys(conflicts):
                _log.warn("rebuilding index {name}: its definition differs", name=other)
                await self._run({"dropIndexes": collection.name, "index": other}, {_INDEX_MISSING})
            await self._create_indexes(collection, changed, is_new)
        return is_new or bool(missing or changed)

    async def _list_indexes(self) -> dict[str, _Indexes | None]:
        """
        List the definitions of all indexes by collection and name; None for a collection that does not exist.

        One of ours that is being built is left out: creating it waits for the build.
        """
        options: Document = {"includeBuildUUIDs": True, "cursor": {"batchSize": 1000}}
        collections = self._schema.collections
        commands = [MongoCommand({"listIndexes": one.name, **options}) for one in collections]
        replies = await _for_command(self._operation).run_reads(commands)
        existing: dict[str, _Indexes | None] = {}
        for collection, reply in zip(collections, replies, strict=True):
            if isinstance(reply, MongoCommandError):
                if reply.code != _NAMESPACE_MISSING:
                    raise reply
                existing[collection.name] = None
            else:
                found = [one for one in reply["cursor"]["firstBatch"] if not _is_being_built(one, collection)]
                specs = [one.get("spec", one) for one in found]
                existing[collection.name] = {spec["name"]: _normalize(spec) for spec in specs}
        return existing

    async def _create_indexes(self, collection: Collection, indexes: _Indexes, is_new: bool) -> None:
        if not indexes:
            return
        if not is_new:
            _log.info("building indexes of {name}: {names}", name=collection.name, names=", ".join(indexes))
        definitions = [{**index, "name": name} for name, index in indexes.items()]
        # With the default quorum, a member that is down would block the build; it catches up later.
        body = {"createIndexes": collection.name, "indexes": definitions, "commitQuorum": "majority"}
        # Without `maxTimeMS` the servers go on when we stop waiting, and the next start waits for the same build.
        await self._run(body, _INDEX_CONFLICT_CODES, _BUILD_TIMEOUT, has_time_limit=False)

    async def _run(
        self, body: Document, harmless: set[int], timeout: float | None = None, *, has_time_limit: bool = True
    ) -> None:
        """:param harmless: error codes to ignore."""
        run = _for_seconds(self._operation, _COMMAND_TIMEOUT if timeout is None else timeout)
        try:
            await run.command(run.with_majority(MongoCommand(body)), has_time_limit=has_time_limit)
        except MongoCommandError as error:
            if error.code not in harmless:
                raise
        except DuplicateKeyError as error:
            index = f"index {error.index} of the MongoDB collection {error.collection}"
            raise StoreUnusable(f"cannot create {index}: several documents have the same value") from None


def _is_being_built(found: Document, collection: Collection) -> bool:
    ours = [_normalize(index) for index in collection.indexes.values()]
    return "buildUUID" in found and _normalize(found["spec"]) in ours


def _normalize(index: Document) -> Document:
    """Return what tells two definitions apart, in which the order of keys matters."""
    definition = {name: value for name, value in index.items() if name not in {"v", "name", "ns"}}
    return definition | {"key": list(index["key"].items())}


def _find_conflicting_indexes(name: str, index: Document, existing: _Indexes) -> list[str]:
    """
    Find indexes of the same name, or of the same definition but for the expiry, which would be rejected.

    :param existing: normalized.
    """
    any_expiry = {"expireAfterSeconds": None}
    definition = _normalize(index) | any_expiry
    return [other for other, one in existing.items() if other == name or one | any_expiry == definition]
