"""
Documents of queued messages; reading of queues; delivery marks.

A message is visible from when it is due until it expires. All queued messages are counted with their recipient, and
those that are not visible are counted and subtracted, so that no query grows with the length of a queue. Functions
that take a transaction run inside it and see one state of the database.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TypeVar

from bson import Int64, ObjectId, Timestamp
from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.fair_share import ANONYMOUS, AUTHENTICATED, KNOWN, SENDER_MASK, SenderGroup
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import (
    ArrivalWindow,
    EnqueueResult,
    MessageArrival,
    Payload,
    QueueStatus,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.mongo.accounts import DID_CACHE_SIZE, MAX_CACHED_DID_LENGTH, RecipientDIDCache
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_aggregate, build_find, build_updates
from mediatord.store.mongo.driver.executor import KeyedMutex, OperationExecutor, start_operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, RECIPIENTS, build_window_filters
from mediatord.store.recipient_names import is_valid_unicode

# Fields that a removal needs, and those that an eviction needs.
REMOVAL_PROJECTION = {"recipient": 1, "account": 1, "size": 1, "received_at": 1, "pushes": 1}
EVICTION_PROJECTION = {**REMOVAL_PROJECTION, "network": 1, "sender": 1}
_NETWORK_BITS = 32
_SERVER_TIMESTAMP = Timestamp(0, 0)
_ABSENT = {"$exists": False}
_BY_ARRIVAL = {"seq": 1}
_ID = {"_id": 1}
# Leaves out a long field that matters only while a queue is full.
_WITHOUT_SENDERS = {"senders": 0}
_SIZE = {"seq": 1, "size": 1}
_RECEIVED = {"seq": 1, "received_at": 1}
# Bytes of a message and of the DID of its account that are read together; a full document has no room for a DID.
_SMALL_MESSAGE_BYTES, _SHORT_DID_BYTES = 1_048_576, 8_192
# Delivery marks that are deleted at a time.
_RELEASE_BATCH = 1_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MessageQueueState:
    """
    State of the queue of a recipient.

    :param did: in its stored form.
    :param account: DID of the account that has registered it.
    :param changes: number of changes of the queue so far.
    """

    did: str
    recipient_id: ObjectId
    account_id: ObjectId
    account: str
    messages: int
    bytes: int
    changes: int


class MessageQueueFinder:
    """
    Finds queues with the DIDs of their accounts.

    The account of a recipient is cached, so that both can be queried at once; the replies show whether it has
    changed. A `$lookup` would cost the server more.
    """

    def __init__(self, capacity: int = DID_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, ObjectId] = OrderedDict()

    async def find(self, transaction: Transaction, dids: Collection[str]) -> dict[str, MessageQueueState]:
        """Return the queues of the DIDs that are registered; all forms of a DID have the same queue."""
        likely = {account for account in map(self._accounts.get, dids) if account is not None}
        digests = {did: compute_did_digest(did) for did in dids}
        registered = {"did_digest": {"$in": list(set(digests.values()))}, "registered": {"$exists": True}}
        found, owners = await transaction.query_many(
            build_find(RECIPIENTS, registered, projection=_WITHOUT_SENDERS), _build_account_query(likely)
        )
        missing = {one["account"] for one in found} - {one["_id"] for one in owners}
        if missing:
            owners += await transaction.query(_build_account_query(missing))
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        self._remember(found)
        queues = {
            one["did_digest"]: MessageQueueState(
                one["did"],
                one["_id"],
                one["account"],
                accounts[one["account"]],
                one["messages"],
                one["bytes"],
                one.get("changes", 0),
            )
            for one in found
        }
        return {did: queues[digest] for did, digest in digests.items() if digest in queues}

    def _remember(self, recipients: Iterable[Document]) -> None:
        for one in recipients:
            if len(one["did"]) <= MAX_CACHED_DID_LENGTH:
                self._accounts[one["did"]] = one["account"]
                self._accounts.move_to_end(one["did"])
        while len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)


def _build_account_query(ids: Collection[ObjectId]) -> MongoCommand:
    return build_find(ACCOUNTS, {"_id": {"$in": list(ids)}}, projection={"did": 1})


@dataclass(frozen=True, slots=True)
class MongoEnqueueRequest:
    """Messages to be queued for a recipient."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None
    origin: int = 0

    def document(self, payload: Payload, queue: MessageQueueState) -> Document:
        document: Document = {
            "_id": payload.id,
            "recipient": queue.recipient_id,
            "account": queue.account_id,
            "seq": _SERVER_TIMESTAMP,
            "form": payload.form,
            "size": len(payload.data),
            "received_at": self.now,
            "expires_at": self.expires_at,
            "pushes": 0,
            "digest": sha256(payload.data).digest(),
            "payload": payload.data,
        }
        if self.due_at is None:
            document["arrived_at"] = self.now
        else:
            document["due_at"] = self.due_at
            if self.due_at < self.expires_at:
                document["wakes_at"] = self.due_at
        return document | split_origin(self.origin)

    def enqueued(self, account: str, evicted: Sequence[RemovedMessage]) -> EnqueueResult:
        """Build the result for the account's DID."""
        stored = [
            StoredMessage(
                id=payload.id,
                recipient_did=self.recipient_did,
                account=account,
                payload=payload.data,
                form=payload.form,
                received_at=self.now,
                expires_at=self.expires_at,
                due_at=self.due_at,
            )
            for payload in self.payloads
        ]
        return EnqueueResult(tuple(stored), tuple(evicted))

    def removed(self, payload: Payload, account: str, reason: RemovalReason) -> RemovedMessage:
        """Build the record of one of these messages that was evicted at once."""
        return RemovedMessage(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, reason)


def split_origin(origin: int) -> Document:
    """Split the origin of a message into fields, so that the server can find the messages of a party."""
    halves = {"network": origin >> _NETWORK_BITS, "sender": origin & SENDER_MASK}
    return {name: value for name, value in halves.items() if value}


def join_origin(document: Document) -> int:
    origin: int = document.get("network", 0) << _NETWORK_BITS | document.get("sender", 0)
    return origin


def build_group_filter(group: SenderGroup, known: frozenset[int]) -> Document:
    """
    Build a filter for a group of senders; see :mod:`mediatord.store.fair_share`.

    :param known: parties whose messages the recipient has acknowledged before.
    """
    rank, network, sender = group
    conditions: list[Document] = []
    if sender is not None:
        conditions.append({"sender": sender})
    if network is not None:
        conditions.append({"network": network >> _NETWORK_BITS or _ABSENT})
    senders = sorted(party for party in known if party & SENDER_MASK)
    networks = sorted(party >> _NETWORK_BITS for party in known if not party & SENDER_MASK)
    if rank == ANONYMOUS:
        conditions.append({"sender": _ABSENT, "network": {"$nin": networks}})
    elif rank == AUTHENTICATED:
        conditions.append({"sender": {"$exists": True, "$nin": senders}})
    elif rank == KNOWN:
        anonymous = {"sender": _ABSENT, "network": {"$in": networks}}
        conditions.append({"$or": [{"sender": {"$in": senders}}, anonymous]})
    return {"$and": conditions} if conditions else {}


def parse_message(document: Document, recipient_did: str, account: str) -> StoredMessage:
    return StoredMessage(
        id=document["_id"],
        recipient_did=recipient_did,
        account=account,
        payload=document["payload"],
        form=document["form"],
        received_at=document["received_at"],
        expires_at=document["expires_at"],
        status="delivered" if "delivered" in document else "pending",
        due_at=document.get("due_at"),
    )


def build_removed(
    document: Document, recipient_did: str, account: str, reason: RemovalReason | None
) -> RemovedMessage:
    return RemovedMessage(
        id=document["_id"],
        recipient_did=recipient_did,
        account=account,
        size=document["size"],
        received_at=document["received_at"],
        pushes=document["pushes"],
        reason=reason,
    )


class MessageQueueReader:
    """Reads visible messages; see `IMessageStore`."""

    def __init__(self, did_cache: RecipientDIDCache) -> None:
        self._did_cache = did_cache

    async def fetch(
        self, t: Transaction, account: str, recipient_did: str | None, now: float, limit: int, max_bytes: int
    ) -> list[StoredMessage]:
        """Return the oldest messages that fit, but at least one."""
        scope = await _find_scope(t, account, recipient_did)
        if scope is None:
            return []
        return await self._read(t, scope.build_visible_filters(now), limit, max_bytes, scope.index)

    async def find(
        self, executor: OperationExecutor, deadline: float, ids: Sequence[str], now: float
    ) -> list[StoredMessage]:
        """Return messages by id in order of arrival, those that fit but at least one; small ones in one query."""
        unique = list(dict.fromkeys(ids))
        documents = await _find_small_messages(executor, deadline, unique, now)
        if len(documents) < len(unique) or not all(one["owner"] for one in documents):
            filter = {"_id": {"$in": unique}, **build_visible_filter(now)}
            return await executor.transact(
                lambda t: self._read(t, [filter], None, MAX_PAGE_BYTES, "_id_"), deadline, reading=True
            )
        accounts = {one["account"]: one["owner"][0]["did"] for one in documents}
        dids = await self._did_cache.look_up(lambda query: executor.query(query, deadline), documents, accounts)
        found = [(one, dids.of(one)) for one in sorted(documents, key=_get_seq)]
        # A recipient may have been deleted between the two queries.
        return [parse_message(one, *pair) for one, pair in found if pair is not None]

    async def _read(
        self, t: Transaction, filters: Sequence[Document], limit: int | None, max_bytes: int, hint: str
    ) -> list[StoredMessage]:
        """
        Return the first messages in order of arrival that fit, but at least one, and read the payloads of those only.

        :param filters: without common matches.
        :param hint: the index to use; there are others with messages of all accounts.
        """
        parts = await t.query_many(
            *[
                build_find(MESSAGES, filter, sort=_BY_ARRIVAL, limit=limit or 0, projection=_SIZE, hint=hint)
                for filter in filters
            ]
        )
        ids: list[str] = []
        size = 0
        for one in sorted(chain(*parts), key=_get_seq)[:limit]:
            size += one["size"]
            if ids and size > max_bytes:
                break
            ids.append(one["_id"])
        if not ids:
            return []
        places = {id: place for place, id in enumerate(ids)}
        found = await t.find(MESSAGES, {"_id": {"$in": ids}})
        return await self.parse(t, sorted(found, key=lambda one: places[one["_id"]]))

    async def parse(self, t: Transaction, documents: Sequence[Document]) -> list[StoredMessage]:
        dids = await self._did_cache.look_up(t.query, documents)
        return [
            parse_message(one, dids.recipients[one["recipient"]], dids.accounts[one["account"]]) for one in documents
        ]


async def _find_small_messages(
    executor: OperationExecutor, deadline: float, ids: Sequence[str], now: float
) -> list[Document]:
    """Return one batch of messages, each with its account as `owner`, a list of one unless its DID is too long."""
    wanted = {"_id": {"$in": ids}, **build_visible_filter(now), "size": {"$lte": _SMALL_MESSAGE_BYTES}}
    short = [
        {"$match": {"$expr": {"$lte": [{"$strLenBytes": "$did"}, _SHORT_DID_BYTES]}}},
        {"$project": {"did": 1}},
    ]
    owner = {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner", "pipeline": short}
    query = build_aggregate(MESSAGES, [{"$match": wanted}, {"$lookup": owner}], hint="_id_")
    cursor = (await executor.command(query, deadline))["cursor"]
    if cursor["id"]:
        kill = MongoCommand({"killCursors": MESSAGES, "cursors": [Int64(cursor["id"])]})
        await executor.command(kill, deadline, has_time_limit=False)
    found: list[Document] = cursor["firstBatch"]
    return found


@dataclass(eq=False, slots=True)
class DueMessageTransaction:
    """Makes delayed messages pending that are due, and returns them; the work of a transaction."""

    reader: MessageQueueReader
    clocks: ClockSkewMonitor
    now: float
    limit: int
    taken: list[StoredMessage] = field(default_factory=list)

    async def __call__(self, t: Transaction) -> list[StoredMessage]:
        """:raise StoreUnavailable: a message seems to be due, but the clocks of host and server differ."""
        self.taken = []
        if self.limit <= 0:
            return []
        due = {"wakes_at": {"$lte": self.now}, "expires_at": {"$gt": self.now}}
        doubtful = {**due, "$expr": {"$not": [self.clocks.build_check()]}}
        order, index = {"wakes_at": 1, "seq": 1}, "message_wakes"
        found, differing = await t.query_many(
            build_find(MESSAGES, due, sort=order, limit=self.limit, hint=index),
            build_find(MESSAGES, doubtful, limit=1, projection=_ID, hint=index),
        )
        if differing:
            raise StoreUnavailable()
        if found:
            taken = {"_id": {"$in": [one["_id"] for one in found]}}
            change = {"$unset": {"wakes_at": 1, "due_at": 1}, "$set": {"arrived_at": self.now}}
            t.write_at_end(build_updates(MESSAGES, [{"q": taken, "u": change, "multi": True}]))
            self.taken = await self.reader.parse(t, found)
        return self.taken

    async def undo(self, t: Transaction) -> None:
        """Delay the messages again, except those that were taken since, because nobody has received them."""
        updates = [
            {
                "q": {"_id": one.id, "arrived_at": self.now, "wakes_at": {"$exists": False}},
                "u": {"$set": {"wakes_at": one.due_at, "due_at": one.due_at}},
            }
            for one in self.taken
        ]
        t.write_at_end(build_updates(MESSAGES, updates))


@dataclass(frozen=True, slots=True)
class _QueueFilter:
    """The messages of an account, or of one of its recipients."""

    account: ObjectId
    recipient: ObjectId | None

    @property
    def index(self) -> str:
        """Name of an index by arrival."""
        return "message_of_account" if self.recipient is None else "message_of_recipient"

    def build_visible_filters(self, now: float) -> list[Document]:
        """
        Build filters for visible messages, without common matches, each a range of the index.

        The queue of a recipient is bounded. An account may have very many messages, so formerly delayed ones are
        found apart: few of them are due and not handed out.
        """
        if self.recipient is not None:
            return [{"recipient": self.recipient, **build_visible_filter(now)}]
        unexpired = {"account": self.account, "expires_at": {"$gt": now}}
        return [{**unexpired, "due_at": _ABSENT}, {**unexpired, "due_at": {"$lte": now}}]

    def within(self, more: Document) -> Document:
        """Build a filter for those messages that match, for an index that begins with the account."""
        recipient = {} if self.recipient is None else {"recipient": self.recipient}
        return {"account": self.account, **more, **recipient}


async def read_status(t: Transaction, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    """Count visible messages, and find when the first and the last of them arrived."""
    scope = await _find_scope(t, account, recipient_did)
    if scope is None:
        return QueueStatus(0, 0)
    counted = {"account": scope.account} if scope.recipient is None else {"_id": scope.recipient}
    expired, delayed = scope.within({"expires_at": {"$lte": now}}), scope.within({"due_at": {"$gt": now}})
    counts = await t.query_many(
        build_aggregate(RECIPIENTS, [{"$match": counted}, _build_sum_stage("$messages", "$bytes")]),
        build_aggregate(MESSAGES, [{"$match": expired}, _build_sum_stage(1, "$size")], hint="message_over"),
        build_aggregate(
            MESSAGES,
            [{"$match": {**delayed, "expires_at": {"$gt": now}}}, _build_sum_stage(1, "$size")],
            hint="message_delayed",
        ),
        *[
            build_find(MESSAGES, filter, sort={"seq": order}, limit=1, projection=_RECEIVED, hint=scope.index)
            for filter in scope.build_visible_filters(now)
            for order in (1, -1)
        ],
    )
    ends = sorted(chain(*counts[3:]), key=_get_seq)
    if not ends:
        return QueueStatus(0, 0)
    (messages, size), *hidden = [_parse_sums(some) for some in counts[:3]]
    return QueueStatus(
        messages - sum(number for number, _ in hidden),
        size - sum(number for _, number in hidden),
        ends[0]["received_at"],
        ends[-1]["received_at"],
    )


async def list_arrivals(
    t: Transaction, accounts: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    """List messages that arrived in a window of time, by a covered query."""
    owners = await t.find(ACCOUNTS, {"did": {"$in": list(dict.fromkeys(accounts))}}, projection={"did": 1})
    dids = {owner["_id"]: owner["did"] for owner in owners}
    if not dids:
        return []
    found: list[Document] = []
    for part in build_window_filters("arrived_at", window):
        if len(found) < limit:
            found += await t.find(
                MESSAGES,
                {"account": {"$in": list(dids)}, **part},
                sort={"arrived_at": 1, "_id": 1},
                limit=limit - len(found),
                projection={"account": 1, "arrived_at": 1},
                hint="message_arrived",
            )
    return [MessageArrival(one["_id"], dids[one["account"]], one["arrived_at"]) for one in found]


async def find_next_due(client: ReplicaSetClient, now: float) -> float | None:
    waiting = {"wakes_at": {"$exists": True}, "expires_at": {"$gt": now}}
    found = await client.find(
        "next_due", MESSAGES, waiting, sort={"wakes_at": 1}, limit=1, projection={"wakes_at": 1}, hint="message_wakes"
    )
    return found[0]["wakes_at"] if found else None


async def _find_scope(t: Transaction, account: str, recipient_did: str | None) -> _QueueFilter | None:
    """Return None if the account does not exist or has no such recipient."""
    if not is_valid_unicode(account) or not is_valid_unicode(recipient_did or ""):
        return None
    owners = await t.find(ACCOUNTS, {"did": account}, projection=_ID)
    if not owners:
        return None
    account_id = owners[0]["_id"]
    if recipient_did is None:
        return _QueueFilter(account_id, None)
    recipients = await t.find(
        RECIPIENTS, {"account": account_id, "did_digest": compute_did_digest(recipient_did)}, projection=_ID
    )
    return _QueueFilter(account_id, recipients[0]["_id"]) if recipients else None


def build_visible_filter(now: float) -> Document:
    """Build a filter for messages that are visible at a time."""
    return {"expires_at": {"$gt": now}, "$or": [{"due_at": _ABSENT}, {"due_at": {"$lte": now}}]}


def _build_sum_stage(number: object, size: object) -> Document:
    return {"$group": {"_id": None, "number": {"$sum": number}, "bytes": {"$sum": size}}}


def _parse_sums(found: Sequence[Document]) -> tuple[int, int]:
    return (found[0]["number"], found[0]["bytes"]) if found else (0, 0)


def _get_seq(document: Document) -> Timestamp:
    seq: Timestamp = document["seq"]
    return seq


class AccountReadSerializer:
    """Runs one read at a time for each account, so that one with a long queue cannot use up all readers."""

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._mutex = KeyedMutex(client.clock)

    def read(self, name: str, account: str, work: TransactionWork[T]) -> Deferred[T]:
        """
        Run a transaction that only reads.

        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it failed, or did not start in time.
        """

        def run(executor: OperationExecutor, deadline: float) -> Awaitable[T]:
            read = partial(executor.transact, work, deadline, reading=True)
            return self._mutex.run_exclusive(account, read, deadline)

        return start_operation(self._client.operate(name, run))


@dataclass(frozen=True, slots=True)
class DeliveryMark:
    """
    Messages that were pushed.

    :param node: the boot that pushed them.
    """

    ids: Sequence[str]
    node: str


async def mark_delivered(
    executor: OperationExecutor, works: Sequence[DeliveryMark], deadline: float, tries: int | None
) -> Sequence[None]:
    """Mark messages as delivered; a MongoBatchOperation on :class:`DeliveryMark`."""

    async def mark(transaction: Transaction) -> None:
        updates = [
            {
                "q": {"_id": {"$in": list(dict.fromkeys(work.ids))}},
                "u": {"$set": {"delivered": work.node}, "$inc": {"pushes": 1}},
                "multi": True,
            }
            for work in works
            if work.ids
        ]
        transaction.write_at_end(build_updates(MESSAGES, updates))

    await executor.transact(mark, deadline, tries=tries)
    return [None] * len(works)


async def mark_pending(
    executor: OperationExecutor, works: Sequence[Sequence[str]], deadline: float, tries: int | None
) -> Sequence[list[str]]:
    """Delete delivery marks; a MongoBatchOperation on message ids, answered with those that were delivered."""

    async def mark(transaction: Transaction) -> list[list[str]]:
        ids = {id for work in works for id in work}
        found = await transaction.find(
            MESSAGES, {"_id": {"$in": list(ids)}, "delivered": {"$exists": True}}, projection={"_id": 1}, hint="_id_"
        )
        delivered = {one["_id"] for one in found}
        if delivered:
            transaction.write_at_end(build_updates(MESSAGES, [_build_unmark({"_id": {"$in": list(delivered)}})]))
        answers: list[list[str]] = []
        for work in works:
            mine = [id for id in dict.fromkeys(work) if id in delivered]
            delivered.difference_update(mine)
            answers.append(mine)
        return answers

    return await executor.transact(mark, deadline, tries=tries)


async def list_delivering_boots(client: ReplicaSetClient) -> list[str]:
    """List boots that have delivered messages which are still queued."""
    # The condition makes the partial index usable, and only its keys are read.
    reply = await client.command(
        "delivered_by", {"distinct": MESSAGES, "key": "delivered", "query": {"delivered": {"$gte": ""}}}
    )
    boots: list[str] = reply["values"]
    return boots


async def release_delivered(client: ReplicaSetClient, boot: str) -> int:
    """Make messages pending again that a node has delivered and that are still queued; return their number."""
    released = 0
    while True:
        found = await client.find(
            "release_delivered",
            MESSAGES,
            {"delivered": boot},
            limit=_RELEASE_BATCH,
            projection={"_id": 1},
            hint="message_delivered",
        )
        if not found:
            return released
        some = {"_id": {"$in": [one["_id"] for one in found]}, "delivered": boot}
        # By id: the index of marks would be read from the start for every batch.
        (reply,) = await client.write(
            "release_delivered", build_updates(MESSAGES, [_build_unmark(some) | {"hint": "_id_"}])
        )
        released += reply["nModified"]


def _build_unmark(filter: Document) -> Document:
    return {"q": filter, "u": {"$unset": {"delivered": 1}}, "multi": True}
