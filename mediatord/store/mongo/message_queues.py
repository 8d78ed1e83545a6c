"""
Documents of queued messages; reading of queues; delivery marks.

A message is visible from when it is due until it expires. All queued messages are counted with their recipient, and
those that are not visible are counted and subtracted, so that no query grows with the length of a queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from bson import Int64, ObjectId, Timestamp
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.fair_share import SENDER_MASK
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import (
    ArrivalWindow,
    MessageArrival,
    QueueStatus,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
    filter_valid_ids,
    is_valid_unicode,
)
from mediatord.store.mongo.accounts import DIDCache, MessageDIDFinder, MessageDIDs
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection as MongoCollection
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.operation import KeyedMutex, Operation, operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.schema import ABSENT, ACCOUNTS, MESSAGES, PRESENT, RECIPIENTS, build_window_filters

# Fields that a removal needs, and those that an eviction needs.
REMOVAL_PROJECTION = {"recipient": 1, "account": 1, "size": 1, "received_at": 1, "pushes": 1}
EVICTION_PROJECTION = {**REMOVAL_PROJECTION, "network": 1, "sender": 1}
NETWORK_BITS = 32
_BY_ARRIVAL = {"seq": 1}
# Bytes of a message and of the DID of its account that are read together; a full document has no room for a DID.
_SMALL_MESSAGE_BYTES, _SHORT_DID_BYTES = 1_048_576, 8_192
# Delivery marks that are deleted at a time.
_RELEASE_BATCH = 1_000

T = TypeVar("T")


class MessageQueueState(NamedTuple):
    """
    State of the queue of a recipient.

    :param did: in its stored form.
    :param account: DID of the account that has registered it.
    :param changes: number of changes of the queue so far.
    :param moves: how often the account has got another DID.
    """

    did: str
    recipient_id: ObjectId
    account_id: ObjectId
    account: str
    messages: int
    bytes: int
    changes: int
    moves: int


class MessageQueueFinder:
    """
    Finds queues with the DIDs of their accounts, and remembers them.

    Reads the accounts that recipients had last at once with the recipients; the replies show whether they have
    changed. A `$lookup` would cost the server more.
    """

    def __init__(self) -> None:
        self._remembered: DIDCache[str, MessageQueueState] = DIDCache()

    def recall(self, dids: Collection[str]) -> dict[str, MessageQueueState] | None:
        """
        The queues of all these DIDs as they were last, None unless all are known. Other operations and nodes may have
        changed any of them.
        """
        remembered = self._remembered
        if any(did not in remembered for did in dids):
            return None
        return {did: remembered[did] for did in dids}

    def remember(self, queues: Mapping[str, MessageQueueState]) -> None:
        """Remember queues as they are after a change that is durable."""
        for did, one in queues.items():
            self._remembered.keep(did + one.account, did, one)

    def forget(self, dids: Iterable[str]) -> None:
        for did in dids:
            self._remembered.pop(did, None)

    async def find(self, transaction: Transaction, dids: Collection[str]) -> dict[str, MessageQueueState]:
        """Return the queues of the DIDs that are registered; all forms of a DID have the same queue."""
        likely = {self._remembered[did].account_id for did in dids if did in self._remembered}
        digests = {did: compute_did_digest(did) for did in dids}
        registered = {"did_digest": {"$in": list(set(digests.values()))}, "registered": PRESENT}
        found, owners = await transaction.query_many(
            # `senders` is long, and matters only while a queue is full.
            RECIPIENTS.find(registered, projection={"senders": 0}),
            _build_account_query(likely),
        )
        missing = {one["account"] for one in found} - {one["_id"] for one in owners}
        if missing:
            owners += await transaction.query(_build_account_query(missing))
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        queues: dict[bytes, MessageQueueState] = {}
        for one in found:
            did, account = one["did"], one["account"]
            numbers = one["messages"], one["bytes"], one.get("changes", 0), one.get("moves", 0)
            queues[one["did_digest"]] = MessageQueueState(did, one["_id"], account, accounts[account], *numbers)
        return {did: queues[digest] for did, digest in digests.items() if digest in queues}


def _build_account_query(ids: Collection[ObjectId]) -> MongoCommand:
    return ACCOUNTS.find({"_id": {"$in": list(ids)}}, projection={"did": 1})


def join_origin(document: Document) -> int:
    """Return the origin of a message, of which a document has the halves."""
    origin: int = document.get("network", 0) << NETWORK_BITS | document.get("sender", 0)
    return origin


def split_origin(origin: int) -> Document:
    """Split the origin of a message into fields, so that the server can find the messages of a party."""
    halves = {"network": origin >> NETWORK_BITS, "sender": origin & SENDER_MASK}
    return {name: value for name, value in halves.items() if value}


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


def _parse_messages(documents: Iterable[Document], dids: MessageDIDs) -> list[StoredMessage]:
    """Return the messages; one whose recipient was deleted meanwhile is left out."""
    return [
        StoredMessage(
            id=one["_id"],
            recipient_did=pair[0],
            account=pair[1],
            payload=one["payload"],
            form=one["form"],
            received_at=one["received_at"],
            expires_at=one["expires_at"],
            status="delivered" if "delivered" in one else "pending",
            due_at=one.get("due_at"),
        )
        for one in documents
        if (pair := dids.of(one)) is not None
    ]


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
            return [{"recipient": self.recipient, **_build_visible_filter(now)}]
        unexpired = {"account": self.account, "expires_at": {"$gt": now}}
        return [{**unexpired, "due_at": ABSENT}, {**unexpired, "due_at": {"$lte": now}}]

    def within(self, more: Document) -> Document:
        """Build a filter for those messages that match, for an index that begins with the account."""
        recipient = {} if self.recipient is None else {"recipient": self.recipient}
        return {"account": self.account, **more, **recipient}


class MongoQueueReader:
    """
    Reads of the message store; see `IMessageStore`. All that one method reads is of one state of the database.
    """

    _client: ReplicaSetClient
    _clock: IReactorTime
    _clocks: ClockSkewMonitor
    _did_finder: MessageDIDFinder
    _account_mutex: KeyedMutex

    @operation
    async def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> list[StoredMessage]:
        self._clocks.check()
        now = self._clock.seconds()

        async def fetch(t: Transaction) -> list[StoredMessage]:
            scope = await _find_scope(t, account, recipient_did) if limit > 0 else None
            if scope is None:
                return []
            return await self._read_oldest(t, scope.build_visible_filters(now), limit, max_bytes, scope.index)

        return await self._read_exclusively("fetch", account, fetch)

    @operation
    async def get_queue_status(self, account: str, recipient_did: str | None) -> QueueStatus:
        """Count visible messages, and find when the first and the last of them arrived."""
        self._clocks.check()
        now = self._clock.seconds()
        read = partial(_read_status, account=account, recipient_did=recipient_did, now=now)
        return await self._read_exclusively("status", account, read)

    @operation
    async def find_messages(self, ids: Sequence[str]) -> list[StoredMessage]:
        """Read small messages in one query."""
        self._clocks.check()
        known = list(filter_valid_ids(ids))
        now = self._clock.seconds()
        with self._client.operate("find") as run:
            documents = await _find_small_messages(run, known, now) if known else []
            if len(documents) < len(known) or not all(one["owner"] for one in documents):
                filter = {"_id": {"$in": known}, **_build_visible_filter(now)}
                read = partial(self._read_oldest, filters=[filter], limit=None, max_bytes=MAX_PAGE_BYTES, hint="_id_")
                return await run.transact(read, reading=True)
            accounts = {one["account"]: one["owner"][0]["did"] for one in documents}
            dids = await self._did_finder.find(run.query, documents, accounts)
            return _parse_messages(sorted(documents, key=_get_seq), dids)

    @operation
    async def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> list[MessageArrival]:
        wanted = list(dict.fromkeys(accounts))

        async def find(t: Transaction) -> list[MessageArrival]:
            if limit <= 0:
                return []
            owners = await t.query(ACCOUNTS.find({"did": {"$in": wanted}}, projection={"did": 1}))
            dids = {owner["_id"]: owner["did"] for owner in owners}
            fields = "account", "arrived_at", "message_arrived"
            return await list_arrivals(t.query, MESSAGES, fields, dids, window, limit)

        return await self._client.transact("arrived", find, reading=True)

    @operation
    async def find_next_due(self) -> float | None:
        waiting = {"wakes_at": PRESENT, "expires_at": {"$gt": self._clock.seconds()}}
        query = MESSAGES.find(
            waiting, sort={"wakes_at": 1}, limit=1, projection={"wakes_at": 1}, hint="message_wakes"
        )
        found = await self._client.query("next_due", query)
        return found[0]["wakes_at"] if found else None

    @operation
    async def take_due_messages(self, limit: int) -> list[StoredMessage]:
        """:raise StoreUnavailable: a message seems to be due, but the clocks of host and server differ."""
        self._clocks.check()
        now = self._clock.seconds()
        taken: list[StoredMessage] = []

        async def take(t: Transaction) -> list[StoredMessage]:
            taken.clear()
            if limit <= 0:
                return []
            due: Document = {"wakes_at": {"$lte": now}, "expires_at": {"$gt": now}}
            doubtful = {**due, "$expr": {"$not": [self._clocks.build_check()]}}
            found, differing = await t.query_many(
                MESSAGES.find(due, sort={"wakes_at": 1, "seq": 1}, limit=limit, hint="message_wakes"),
                MESSAGES.find(doubtful, limit=1, projection={"_id": 1}, hint="message_wakes"),
            )
            if differing:
                raise StoreUnavailable()
            if found:
                due = {"_id": {"$in": [one["_id"] for one in found]}}
                change = {
                    "$unset": {"wakes_at": 1, "due_at": 1},
                    "$set": {"arrived_at": now},
                    "$currentDate": {"visible": {"$type": "timestamp"}},
                }
                t.write_at_end(MESSAGES.update(due, change, multi=True))
                taken[:] = _parse_messages(found, await self._did_finder.find(t.query, found))
            return taken

        async def undo(t: Transaction) -> None:
            """Delay the messages again, except those that were taken since, because nobody has received them."""
            updates = [
                {
                    "q": {"_id": one.id, "arrived_at": now, "wakes_at": ABSENT},
                    "u": {"$set": {"wakes_at": one.due_at, "due_at": one.due_at}},
                }
                for one in taken
            ]
            t.write_at_end(MESSAGES.update_each(updates))

        return await self._client.transact("take_due", take, undo=undo)

    async def _read_exclusively(self, name: str, account: str, work: TransactionWork[T]) -> T:
        """Run one read at a time for each account, so that one with a long queue cannot use up all readers."""
        with self._client.operate(name) as run:
            reading = partial(run.transact, work, reading=True)
            return await self._account_mutex.run_exclusive(account, reading, run.deadline)

    async def _read_oldest(
        self, t: Transaction, filters: Sequence[Document], limit: int | None, max_bytes: int, hint: str
    ) -> list[StoredMessage]:
        """
        Return the first messages in order of arrival that fit, but at least one, and read the payloads of those only.

        :param filters: without common matches.
        :param hint: the index to use; there are others with messages of all accounts.
        """
        outline = {"seq": 1, "size": 1}
        parts = await t.query_many(
            *[
                MESSAGES.find(filter, projection=outline, sort=_BY_ARRIVAL, limit=limit or 0, hint=hint)
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
        found = await t.query(MESSAGES.find({"_id": {"$in": ids}})) if ids else []
        return _parse_messages(sorted(found, key=_get_seq), await self._did_finder.find(t.query, found))


async def _find_scope(t: Transaction, account: str, recipient_did: str | None) -> _QueueFilter | None:
    """Return None if the account does not exist or has no such recipient."""
    if not is_valid_unicode(account) or not is_valid_unicode(recipient_did or ""):
        return None
    owners = await t.query(ACCOUNTS.find({"did": account}, projection={"_id": 1}))
    if not owners:
        return None
    account_id = owners[0]["_id"]
    if recipient_did is None:
        return _QueueFilter(account_id, None)
    wanted = {"account": account_id, "did_digest": compute_did_digest(recipient_did)}
    recipients = await t.query(RECIPIENTS.find(wanted, projection={"_id": 1}))
    return _QueueFilter(account_id, recipients[0]["_id"]) if recipients else None


async def _find_small_messages(run: Operation, ids: Sequence[str], now: float) -> list[Document]:
    """Return one batch of messages, each with its account as `owner`, a list of one unless its DID is too long."""
    wanted = {"_id": {"$in": ids}, **_build_visible_filter(now), "size": {"$lte": _SMALL_MESSAGE_BYTES}}
    is_short = {"$expr": {"$lte": [{"$strLenBytes": "$did"}, _SHORT_DID_BYTES]}}
    short = [{"$match": is_short}, {"$project": {"did": 1}}]
    owner = {"from": ACCOUNTS.name, "localField": "account", "foreignField": "_id", "as": "owner", "pipeline": short}
    cursor = (await run.command(MESSAGES.aggregate([{"$match": wanted}, {"$lookup": owner}], hint="_id_")))["cursor"]
    if cursor["id"]:
        kill = MongoCommand({"killCursors": MESSAGES.name, "cursors": [Int64(cursor["id"])]})
        await run.command(kill, has_time_limit=False)
    found: list[Document] = cursor["firstBatch"]
    return found


async def _read_status(t: Transaction, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    scope = await _find_scope(t, account, recipient_did)
    if scope is None:
        return QueueStatus(0, 0)
    counted = {"account": scope.account} if scope.recipient is None else {"_id": scope.recipient}
    expired = scope.within({"expires_at": {"$lte": now}})
    delayed = {**scope.within({"due_at": {"$gt": now}}), "expires_at": {"$gt": now}}
    counts = await t.query_many(
        RECIPIENTS.aggregate([{"$match": counted}, _build_sum_stage("$messages", "$bytes")]),
        MESSAGES.aggregate([{"$match": expired}, _build_sum_stage(1, "$size")], hint="message_over"),
        MESSAGES.aggregate([{"$match": delayed}, _build_sum_stage(1, "$size")], hint="message_delayed"),
        *[
            MESSAGES.find(
                filter, sort={"seq": order}, limit=1, projection={"seq": 1, "received_at": 1}, hint=scope.index
            )
            for filter in scope.build_visible_filters(now)
            for order in (1, -1)
        ],
    )
    ends = sorted(chain(*counts[3:]), key=_get_seq)
    if not ends:
        return QueueStatus(0, 0)
    (messages, size), *hidden = [(one["number"], one["bytes"]) for some in counts[:3] for one in some]
    messages -= sum([number for number, _ in hidden])
    size -= sum([number for _, number in hidden])
    return QueueStatus(messages, size, ends[0]["received_at"], ends[-1]["received_at"])


async def list_arrivals(
    query: Callable[[MongoCommand], Awaitable[list[Document]]],
    collection: MongoCollection,
    fields: tuple[str, str, str],
    dids: Mapping[Any, str],
    window: ArrivalWindow,
    limit: int,
) -> list[MessageArrival]:
    """
    List what arrived in a window of time, by a covered query.

    :param fields: those with the owner and with the time of arrival; and the name of an index by them.
    :param dids: of the owners.
    """
    owner, time, index = fields
    found: list[Document] = []
    for part in build_window_filters(time, window) if dids else ():
        if len(found) < limit:
            wanted = collection.find(
                {owner: {"$in": list(dids)}, **part},
                sort={time: 1, "_id": 1},
                limit=limit - len(found),
                projection={owner: 1, time: 1},
                hint=index,
            )
            found += await query(wanted)
    return [MessageArrival(one["_id"], dids[one[owner]], one[time]) for one in found]


def _build_visible_filter(now: float) -> Document:
    """Build a filter for messages that are visible at a time."""
    return {"expires_at": {"$gt": now}, "$or": [{"due_at": ABSENT}, {"due_at": {"$lte": now}}]}


def _build_sum_stage(number: object, size: object) -> Document:
    return {"$group": {"_id": None, "number": {"$sum": number}, "bytes": {"$sum": size}}}


def _get_seq(document: Document) -> Timestamp:
    seq: Timestamp = document["seq"]
    return seq


async def mark_delivered(run: Operation, works: Sequence[tuple[Sequence[str], str]], tries: int | None) -> list[None]:
    """Mark messages as delivered; a BatchOperation on pairs of ids and the boot that pushed them."""

    async def mark(transaction: Transaction) -> None:
        updates = [
            {
                "q": {"_id": {"$in": list(ids)}},
                "u": {"$set": {"delivered": boot}, "$inc": {"pushes": 1}},
                "multi": True,
            }
            for ids, boot in works
            if ids
        ]
        transaction.write_at_end(MESSAGES.update_each(updates))

    await run.transact(mark, tries=tries)
    return [None] * len(works)


async def mark_pending(run: Operation, works: Sequence[Sequence[str]], tries: int | None) -> list[list[str]]:
    """Delete delivery marks; a BatchOperation on message ids, answered with those that were delivered."""

    async def mark(transaction: Transaction) -> list[list[str]]:
        marked = {"_id": {"$in": list({id for work in works for id in work})}, "delivered": PRESENT}
        found = await transaction.query(MESSAGES.find(marked, projection={"_id": 1}, hint="_id_"))
        delivered = {one["_id"] for one in found}
        if delivered:
            wanted = {"_id": {"$in": list(delivered)}}
            transaction.write_at_end(MESSAGES.update(wanted, {"$unset": {"delivered": 1}}, multi=True))
        answers: list[list[str]] = []
        for work in works:
            mine = [id for id in work if id in delivered]
            delivered.difference_update(mine)
            answers.append(mine)
        return answers

    return await run.transact(mark, tries=tries)


async def list_delivering_boots(client: ReplicaSetClient) -> list[str]:
    """List boots that have delivered messages which are still queued."""
    # The condition makes the partial index usable, and only its keys are read.
    body = {"distinct": MESSAGES.name, "key": "delivered", "query": {"delivered": {"$gte": ""}}}
    boots: list[str] = (await client.command("delivered_by", body))["values"]
    return boots


async def release_delivered(client: ReplicaSetClient, boot: str) -> int:
    """Make messages pending again that a node has delivered and that are still queued; return their number."""
    released = 0
    marked = MESSAGES.find({"delivered": boot}, limit=_RELEASE_BATCH, projection={"_id": 1}, hint="message_delivered")
    while found := await client.query("release_delivered", marked):
        some = {"_id": {"$in": [one["_id"] for one in found]}, "delivered": boot}
        # By id: the index of marks would be read from the start for every batch.
        unmark = MESSAGES.update(some, {"$unset": {"delivered": 1}}, multi=True, hint="_id_")
        (reply,) = await client.write("release_delivered", unmark)
        released += reply["nModified"]
    return released
