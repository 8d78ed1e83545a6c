"""
Messages as documents, and what is told of them.

Reading what waits, mostly inside a transaction of the caller, which sees one state of the database.

A message is visible from when it is due until it expires. All that waits is counted with its recipient; what is not
visible is counted apart and taken off, so that nothing here grows with the length of a queue.

Messages by id, in one round trip unless they are too much for that.

Reading for accounts in their turn.

What was pushed, and by whom.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import NamedTuple, TypeVar

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
from mediatord.store.mongo.accounts import RecipientDIDCache
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_aggregate,
    build_find,
    build_updates,
    build_window_filters,
)
from mediatord.store.mongo.driver.executor import KeyedMutex, OperationExecutor, start_operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, RECIPIENTS
from mediatord.store.recipient_names import is_valid_unicode

# What is needed of a message that is to go.
REMOVAL_PROJECTION = {"recipient": 1, "account": 1, "size": 1, "received_at": 1, "pushes": 1}
# In a queue that is shared.
EVICTION_PROJECTION = {**REMOVAL_PROJECTION, "network": 1, "sender": 1}
_NETWORK_BITS = 32
_SERVER_TIMESTAMP = Timestamp(0, 0)
_ABSENT = {"$exists": False}


class MessageQueueIDs(NamedTuple):
    """Where a message waits."""

    recipient: ObjectId
    account: ObjectId


@dataclass(frozen=True, slots=True)
class MongoEnqueueRequest:
    """What is to be queued for whom."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None
    origin: int = 0

    def document(self, payload: Payload, place: MessageQueueIDs) -> Document:
        document: Document = {
            "_id": payload.id,
            "recipient": place.recipient,
            "account": place.account,
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
        return EnqueueResult(tuple([self._stored(payload, account) for payload in self.payloads]), tuple(evicted))

    def removed(self, payload: Payload, account: str, reason: RemovalReason) -> RemovedMessage:
        """One of ours that had to go again."""
        return RemovedMessage(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, reason)

    def _stored(self, payload: Payload, account: str) -> StoredMessage:
        return StoredMessage(
            id=payload.id,
            recipient_did=self.recipient_did,
            account=account,
            payload=payload.data,
            form=payload.form,
            received_at=self.now,
            expires_at=self.expires_at,
            due_at=self.due_at,
        )


def split_origin(origin: int) -> Document:
    """What a message has of its origin: a value each, so that the server can find those of a party."""
    halves = {"network": origin >> _NETWORK_BITS, "sender": origin & SENDER_MASK}
    return {name: value for name, value in halves.items() if value}


def join_origin(document: Document) -> int:
    origin: int = document.get("network", 0) << _NETWORK_BITS | document.get("sender", 0)
    return origin


def build_part_filter(part: SenderGroup, known: frozenset[int]) -> Document:
    """
    What finds some messages of a queue; see :mod:`mediatord.store.fair_share`.

    :param known: parties whom the recipient has acknowledged before.
    """
    rank, network, sender = part
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


def parse_message(
    document: Document, recipients: Mapping[ObjectId, str], accounts: Mapping[ObjectId, str]
) -> StoredMessage:
    """
    A message as it was deposited.

    :param recipients: DIDs by id, like `accounts`.
    """
    return StoredMessage(
        id=document["_id"],
        recipient_did=recipients[document["recipient"]],
        account=accounts[document["account"]],
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


_BY_ARRIVAL = {"seq": 1}
_ID = {"_id": 1}
_SIZE = {"seq": 1, "size": 1}
_RECEIVED = {"seq": 1, "received_at": 1}


class MessageQueueReader:
    """What waits at a time; see `IMessageStore`."""

    def __init__(self, did_cache: RecipientDIDCache) -> None:
        self._did_cache = did_cache

    async def fetch(
        self, t: Transaction, account: str, recipient_did: str | None, now: float, limit: int, max_bytes: int
    ) -> list[StoredMessage]:
        """The oldest visible ones that fit, but at least one."""
        scope = await _find_scope(t, account, recipient_did)
        if scope is None:
            return []
        return await self._read(t, scope.seen(now), limit, max_bytes, scope.order)

    async def find(self, t: Transaction, ids: Sequence[str], now: float) -> list[StoredMessage]:
        wanted = {"_id": {"$in": list(dict.fromkeys(ids))}, **build_visible_filter(now)}
        return await self._read(t, [wanted], None, MAX_PAGE_BYTES, "_id_")

    async def take_due(self, t: Transaction, now: float, limit: int, agreeing: Document) -> list[StoredMessage]:
        """
        :param agreeing: an expression: whether the server has about the same time.
        :raise StoreUnavailable: it has not, and something seems to be due.
        """
        due = {"wakes_at": {"$lte": now}, "expires_at": {"$gt": now}}
        order, index = {"wakes_at": 1, "seq": 1}, "message_wakes"
        doubtful = {**due, "$expr": {"$not": [agreeing]}}
        found, seeming = await t.ask(
            build_find(MESSAGES, due, sort=order, limit=limit, hint=index),
            build_find(MESSAGES, doubtful, limit=1, projection=_ID, hint=index),
        )
        if seeming:
            raise StoreUnavailable()
        if not found:
            return []
        taken = {"_id": {"$in": [one["_id"] for one in found]}}
        handing_out = {"$unset": {"wakes_at": 1, "due_at": 1}, "$set": {"arrived_at": now}}
        t.write_at_end(build_updates(MESSAGES, [{"q": taken, "u": handing_out, "multi": True}]))
        return await self._tell(t, found)

    async def _read(
        self, t: Transaction, filters: Sequence[Document], limit: int | None, max_bytes: int, hint: str
    ) -> list[StoredMessage]:
        """
        The first in order of arrival that fit, but at least one; payloads are read of those only.

        :param filters: none of which finds what another does.
        :param hint: the index to use: there are others, in which is what waits for anybody.
        """
        parts = await t.ask(
            *[
                build_find(MESSAGES, filter, sort=_BY_ARRIVAL, limit=limit or 0, projection=_SIZE, hint=hint)
                for filter in filters
            ]
        )
        ids = _take_fitting_ids(sorted(chain(*parts), key=_get_seq)[:limit], max_bytes)
        if not ids:
            return []
        places = {id: place for place, id in enumerate(ids)}
        found = await t.find(MESSAGES, {"_id": {"$in": ids}})
        return await self._tell(t, sorted(found, key=lambda one: places[one["_id"]]))

    async def _tell(self, t: Transaction, documents: Sequence[Document]) -> list[StoredMessage]:
        names = await self._did_cache.look_up(t.query, documents)
        return [parse_message(one, names.recipients, names.accounts) for one in documents]


@dataclass(eq=False, slots=True)
class DueMessageTransaction:
    """Takes what is due, as the work of a transaction."""

    queues: MessageQueueReader
    clocks: ClockSkewMonitor
    now: float
    limit: int
    taken: list[StoredMessage] = field(default_factory=list)

    async def __call__(self, t: Transaction) -> list[StoredMessage]:
        self.taken = []
        if self.limit > 0:
            self.taken = await self.queues.take_due(t, self.now, self.limit, self.clocks.agreeing())
        return self.taken

    async def undo(self, t: Transaction) -> None:
        """They are due again, since nobody was told of them; but not what has been taken since."""
        again = [
            {
                "q": {"_id": one.id, "arrived_at": self.now, "wakes_at": {"$exists": False}},
                "u": {"$set": {"wakes_at": one.due_at, "due_at": one.due_at}},
            }
            for one in self.taken
        ]
        t.write_at_end(build_updates(MESSAGES, again))


@dataclass(frozen=True, slots=True)
class _QueueScope:
    """The messages of an account, or of one of its recipients."""

    account: ObjectId
    recipient: ObjectId | None

    @property
    def order(self) -> str:
        """An index by arrival."""
        return "message_of_account" if self.recipient is None else "message_of_recipient"

    def seen(self, now: float) -> list[Document]:
        """
        What finds those that can be seen, in that index, each by one.

        A recipient has never more than a full queue; an account may have so many, and those that were delayed are
        found apart: few of them are due and have not been handed out.
        """
        if self.recipient is not None:
            return [{"recipient": self.recipient, **build_visible_filter(now)}]
        fresh = {"account": self.account, "expires_at": {"$gt": now}}
        return [{**fresh, "due_at": {"$exists": False}}, {**fresh, "due_at": {"$lte": now}}]

    def within(self, more: Document) -> Document:
        """What finds those of them that match, in an index of something else."""
        recipient = {} if self.recipient is None else {"recipient": self.recipient}
        return {"account": self.account, **more, **recipient}


async def read_status(t: Transaction, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    """What waits, and when the first and the last of it came."""
    scope = await _find_scope(t, account, recipient_did)
    if scope is None:
        return QueueStatus(0, 0)
    counted = {"account": scope.account} if scope.recipient is None else {"_id": scope.recipient}
    expired, held = scope.within({"expires_at": {"$lte": now}}), scope.within({"due_at": {"$gt": now}})
    counts = await t.ask(
        build_aggregate(RECIPIENTS, [{"$match": counted}, _build_sum_stage("$messages", "$bytes")]),
        build_aggregate(MESSAGES, [{"$match": expired}, _build_sum_stage(1, "$size")], hint="message_over"),
        build_aggregate(
            MESSAGES,
            [{"$match": {**held, "expires_at": {"$gt": now}}}, _build_sum_stage(1, "$size")],
            hint="message_delayed",
        ),
        *[
            build_find(MESSAGES, some, sort={"seq": way}, limit=1, projection=_RECEIVED, hint=scope.order)
            for some in scope.seen(now)
            for way in (1, -1)
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
    """What came in a time; nothing but an index is read of it."""
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


async def _find_scope(t: Transaction, account: str, recipient_did: str | None) -> _QueueScope | None:
    """None when there is no such account, or it has no such recipient."""
    if not is_valid_unicode(account) or not is_valid_unicode(recipient_did or ""):
        return None
    owners = await t.find(ACCOUNTS, {"did": account}, projection=_ID)
    if not owners:
        return None
    number = owners[0]["_id"]
    if recipient_did is None:
        return _QueueScope(number, None)
    recipients = await t.find(
        RECIPIENTS, {"account": number, "did_digest": compute_did_digest(recipient_did)}, projection=_ID
    )
    return _QueueScope(number, recipients[0]["_id"]) if recipients else None


def build_visible_filter(now: float) -> Document:
    """What finds the messages that can be seen at a time."""
    return {"expires_at": {"$gt": now}, "$or": [{"due_at": {"$exists": False}}, {"due_at": {"$lte": now}}]}


def _build_sum_stage(number: object, size: object) -> Document:
    return {"$group": {"_id": None, "number": {"$sum": number}, "bytes": {"$sum": size}}}


def _parse_sums(found: Sequence[Document]) -> tuple[int, int]:
    return (found[0]["number"], found[0]["bytes"]) if found else (0, 0)


def _get_seq(document: Document) -> Timestamp:
    seq: Timestamp = document["seq"]
    return seq


def _take_fitting_ids(documents: Iterable[Document], max_bytes: int) -> list[str]:
    """Ids of the first that fit, but at least one."""
    ids: list[str] = []
    size = 0
    for one in documents:
        size += one["size"]
        if ids and size > max_bytes:
            break
        ids.append(one["_id"])
    return ids


# Bytes of a message that is told with its account beside it, and of the DID of that: far from the largest document,
# which has no room for anything beside it.
_SMALL_MESSAGE_BYTES, _SHORT_DID_BYTES = 1_048_576, 8_192


@dataclass(frozen=True, slots=True)
class MessageLookup:
    """Finds those that are visible at a time, in order of arrival, as many as fit but at least one."""

    queues: MessageQueueReader
    did_cache: RecipientDIDCache
    ids: Sequence[str]
    now: float

    async def __call__(self, executor: OperationExecutor, deadline: float) -> list[StoredMessage]:
        documents = await self._small_ones(executor, deadline)
        if len(documents) < len(set(self.ids)) or not all(one["owner"] for one in documents):
            return await executor.transact(lambda t: self.queues.find(t, self.ids, self.now), deadline, reading=True)
        accounts = {one["account"]: one["owner"][0]["did"] for one in documents}
        names = await self.did_cache.look_up(lambda question: executor.query(question, deadline), documents, accounts)
        in_order = sorted(documents, key=lambda one: one["seq"])
        # What is asked for apart may be gone by then.
        return [parse_message(one, names.recipients, names.accounts) for one in in_order if names.of(one) is not None]

    async def _small_ones(self, executor: OperationExecutor, deadline: float) -> list[Document]:
        """One batch of them, each with its account as `owner`, a list of one unless its DID is too long."""
        wanted = {
            "_id": {"$in": list(dict.fromkeys(self.ids))},
            **build_visible_filter(self.now),
            "size": {"$lte": _SMALL_MESSAGE_BYTES},
        }
        short = [
            {"$match": {"$expr": {"$lte": [{"$strLenBytes": "$did"}, _SHORT_DID_BYTES]}}},
            {"$project": {"did": 1}},
        ]
        owner = {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner", "pipeline": short}
        question = build_aggregate(MESSAGES, [{"$match": wanted}, {"$lookup": owner}], hint="_id_")
        cursor = (await executor.command(question, deadline))["cursor"]
        if cursor["id"]:
            over = MongoCommand({"killCursors": MESSAGES, "cursors": [Int64(cursor["id"])]})
            await executor.command(over, deadline, limited=False)
        found: list[Document] = cursor["firstBatch"]
        return found


T = TypeVar("T")


class AccountReadSerializer:
    """
    Reads once at a time for each account: one that has a lot that waits, and asks again and again, would keep all
    others from reading.
    """

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._mutex = KeyedMutex(client.clock)

    def read(self, name: str, account: str, work: TransactionWork[T]) -> Deferred[T]:
        """
        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it could not be read, or its turn did not come in time.
        """

        def run(executor: OperationExecutor, deadline: float) -> Awaitable[T]:
            read = partial(executor.transact, work, deadline, reading=True)
            return self._mutex.run_exclusive(account, read, deadline)

        return start_operation(self._client.operate(name, run))


# Messages that become pending again at a time when a node has gone.
_RELEASE_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class DeliveryMark:
    """:param node: the boot that pushed them."""

    ids: Sequence[str]
    node: str


async def mark_delivered(
    executor: OperationExecutor, works: Sequence[DeliveryMark], deadline: float, tries: int | None
) -> Sequence[None]:
    """See :class:`~.gathering.Together`."""

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
    """See :class:`~.gathering.Together`. The answers are the ids that were delivered."""

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
    """Boots that have delivered something which still waits."""
    # That it is a text is what the index can tell by itself.
    reply = await client.command(
        "delivered_by", {"distinct": MESSAGES, "key": "delivered", "query": {"delivered": {"$gte": ""}}}
    )
    boots: list[str] = reply["values"]
    return boots


async def release_delivered(client: ReplicaSetClient, boot: str) -> int:
    """What was delivered by a node, and still waits, is pending again; how many those were."""
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
        # By their ids: by who delivered them, all would be looked at for every slice.
        (reply,) = await client.write(
            "release_delivered", build_updates(MESSAGES, [_build_unmark(some) | {"hint": "_id_"}])
        )
        released += reply["nModified"]


def _build_unmark(filter: Document) -> Document:
    return {"q": filter, "u": {"$unset": {"delivered": 1}}, "multi": True}
