"""Removal of messages from their queues: acknowledgement, purge, expiry and withdrawal."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

from bson import ObjectId
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.store.fair_share import KnownSenders, MessageVolume, get_party
from mediatord.store.interfaces.messages import LedgerEntry, RemovalReason, RemovedMessage
from mediatord.store.mongo.accounts import DIDCache, MessageDIDs, find_accounts_of_messages
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection as MongoCollection
from mediatord.store.mongo.driver.collection import Document, MongoCommand, batch_by_size
from mediatord.store.mongo.driver.errors import RepeatTransaction
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import (
    EVICTION_PROJECTION,
    REMOVAL_PROJECTION,
    MessageQueueState,
    build_removed,
    join_origin,
    split_origin,
)
from mediatord.store.mongo.schema import ABSENT, ACCOUNTS, MESSAGES, PRESENT, RECIPIENTS

RemovalListener = Callable[[Sequence[RemovedMessage]], None]
P = TypeVar("P", str, bytes)

_DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
# Messages that expire in one transaction, and seconds after which no other one is started.
_EXPIRY_BATCH = 100
_EXPIRY_SECONDS = 1.0
# Recipients of an account that are remembered.
_MAX_LIKELY_RECIPIENTS = 16
# Messages that are remembered, and recipients with their known senders.
_MAX_RECENT_MESSAGES = 4_096
_ACKNOWLEDGE_PROJECTION = {**EVICTION_PROJECTION, "seq": 1, "digest": 1}
# Bytes that an id adds to a query beside itself, with the digest that it may be; and bytes of a query.
_BYTES_PER_ID = 64
_MAX_QUERY_BYTES = 8_388_608

_log = Logger(namespace="mediatord.store")


class UncertainRemovalReporter:
    """
    Reports messages that a write has removed although it was reported as failed.

    It goes by whether they still exist. A message that another operation has removed meanwhile is reported twice;
    none is missed unless this process ends before.

    :param listener: called with them.
    """

    def __init__(self, listener: RemovalListener) -> None:
        self._listener = listener

    async def find_missing(
        self, transaction: Transaction, collection: MongoCollection, removed: Sequence[RemovedMessage]
    ) -> UndoCallback | None:
        """Part of an undo: find which of the messages do not exist, to report them when the undo is durable."""
        if not removed:
            return None
        ids = {"_id": {"$in": [one.id for one in removed]}}
        left = {
            one["_id"] for one in await transaction.query(collection.find(ids, projection={"_id": 1}, hint="_id_"))
        }
        missing = [one for one in removed if one.id not in left]
        return partial(self.report, missing) if missing else None

    def report(self, removed: Sequence[RemovedMessage]) -> None:
        if removed:
            reasons = Counter(one.reason or "acknowledged" for one in removed)
            _log.warn(
                "operations that were reported as failed have removed messages: {reasons}",
                reasons=", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items())),
            )
            self._listener(removed)


class RemovalRequest(NamedTuple):
    """
    Messages to be removed.

    :param ids: message ids, or digests if an account is given.
    :param account: remove only its messages; None: anybody's.
    :param now: time of the acknowledgement.
    """

    ids: Sequence[str]
    account: str | None = None
    now: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the queries for all ids, about."""
        return sum([len(id) for id in self.ids]) + _BYTES_PER_ID * len(self.ids)

    def digests(self) -> list[bytes]:
        if self.account is None:
            return []
        return [bytes.fromhex(id) for id in self.ids if _DIGEST_PATTERN.fullmatch(id)]


class _RecentMessage(NamedTuple):
    """:param document: what a removal needs of it; `seq` is only comparable with that of others of this kind."""

    queue: MessageQueueState
    document: Document


class RecentMessages:
    """
    The messages that this process has queued last, and the known senders of their recipients as they were last.

    Other operations and nodes may have changed any of them.
    """

    def __init__(self) -> None:
        self._messages: OrderedDict[str, _RecentMessage] = OrderedDict()
        self._senders: OrderedDict[ObjectId, str | None] = OrderedDict()
        self._numbers = count()

    def add(self, id: str, size: int, received_at: float, origin: int, queue: MessageQueueState) -> None:
        """Add a message that is durable."""
        document = {
            "_id": id,
            "recipient": queue.recipient_id,
            "account": queue.account_id,
            "seq": next(self._numbers),
            "size": size,
            "received_at": received_at,
            "pushes": 0,
            "digest": b"",
            **split_origin(origin),
        }
        self._messages[id] = _RecentMessage(queue, document)
        if len(self._messages) > _MAX_RECENT_MESSAGES:
            self._messages.popitem(last=False)

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._messages.pop(id, None)

    def set_senders(self, recipient: ObjectId, senders: str | None) -> None:
        self._senders[recipient] = senders
        self._senders.move_to_end(recipient)
        if len(self._senders) > _MAX_RECENT_MESSAGES:
            self._senders.popitem(last=False)

    def recall(self, works: Sequence[RemovalRequest]) -> list[_RecentMessage] | None:
        """What was known of all messages that accounts acknowledge; None unless all are known, and their own."""
        found = {}
        for work in works:
            for id in work.ids:
                message = self._messages.get(id)
                if message is None or message.queue.account != work.account:
                    return None
                found[id] = message
        if any(one.queue.recipient_id not in self._senders for one in found.values()):
            return None
        return list(found.values())

    def get_senders(self, recipient: ObjectId) -> str | None:
        return self._senders[recipient]


class RemovalBatch:
    """
    Removes messages; a BatchOperation on :class:`RemovalRequest`, answered with the removed messages.

    :param entry: of the ledger.
    :param recent: messages that need not be read before they are acknowledged.
    """

    def __init__(
        self,
        reporter: UncertainRemovalReporter,
        entry: LedgerEntry = "acknowledged",
        recent: RecentMessages | None = None,
    ) -> None:
        self._recent = recent
        self._reporter = reporter
        self._entry = entry
        # Recipients of the messages that an account had removed last, which are likely to be those of the next.
        self._likely_recipients: DIDCache[str, Collection[ObjectId]] = DIDCache()

    async def __call__(
        self, run: Operation, works: Sequence[RemovalRequest], tries: int | None
    ) -> Sequence[list[RemovedMessage]]:
        answers: list[list[RemovedMessage]] = []
        recalled = None if self._recent is None else self._recent.recall(works)

        async def remove(transaction: Transaction) -> None:
            nonlocal recalled
            if recalled:
                some, recalled = recalled, None  # if it fails for any reason, all is read
                answers[:], is_done = await self._remove_recalled(transaction, works, some)
                if is_done:
                    return
                raise RepeatTransaction
            answers[:] = await self._remove(transaction, works)

        async def report(transaction: Transaction) -> UndoCallback | None:
            return await self._reporter.find_missing(transaction, MESSAGES, [one for some in answers for one in some])

        await run.transact(remove, report, tries=tries)
        if self._recent is not None:
            self._recent.forget([id for work in works for id in work.ids])
        return answers

    async def expire(
        self, client: ReplicaSetClient, clocks: ClockSkewMonitor, now: float, limit: int
    ) -> list[RemovedMessage]:
        """
        Remove expired messages, the first first, in small transactions. While the clocks of this host and of the
        server differ none is removed, since it may not have expired.
        """
        expired: list[RemovedMessage] = []
        give_up = client.clock.seconds() + _EXPIRY_SECONDS
        while len(expired) < limit:
            number = min(limit - len(expired), _EXPIRY_BATCH)
            some: list[RemovedMessage] = []
            filter = {"expires_at": {"$lte": now}, "$expr": clocks.build_check()}
            try:
                await client.transact(
                    "expire",
                    partial(self._expire, some, filter, number),
                    undo=partial(self._reporter.find_missing, collection=MESSAGES, removed=some),
                )
            except StoreUnavailable:
                if not expired:
                    raise
                break  # those that were removed have to be reported
            expired += some
            if len(some) < number or client.clock.seconds() > give_up:
                break
        return expired

    async def _expire(
        self, expired: list[RemovedMessage], filter: Document, limit: int, transaction: Transaction
    ) -> None:
        """:param expired: set to the removed messages."""
        order = {"expires_at": 1, "seq": 1}
        found = await transaction.query(MESSAGES.find(filter, sort=order, limit=limit, projection=REMOVAL_PROJECTION))
        recipients = await _find_recipients(transaction, found)
        accounts = await find_accounts_of_messages(transaction.query, found)
        transaction.write_at_end(
            build_removals(found, recipients), build_ledger_entries(transaction.slot, "didcomm", expired=len(found))
        )
        expired[:] = _build_removed_list(found, _get_dids(recipients, accounts), "ttl")

    async def _remove(self, transaction: Transaction, works: Sequence[RemovalRequest]) -> list[list[RemovedMessage]]:
        account_dids = list({work.account for work in works if work.account is not None})
        likely = {id for did in account_dids for id in self._likely_recipients.get(did, ())}
        ids = list({id for work in works for id in work.ids})
        owners, known_recipients, *some = await transaction.query_many(
            ACCOUNTS.find({"did": {"$in": account_dids}}, projection={"did": 1}),
            _build_recipient_query(likely),
            *[
                MESSAGES.find({"_id": {"$in": chunk}}, projection=_ACKNOWLEDGE_PROJECTION)
                for chunk in _split_into_queries(ids)
            ],
        )
        some += await _find_by_digest(transaction, works, {one["did"]: one["_id"] for one in owners})
        found = [document for part in some for document in part]
        recipients = await _find_recipients(transaction, found, known_recipients)
        known_accounts = {one["_id"]: one["did"] for one in owners}
        accounts = await find_accounts_of_messages(transaction.query, found, known_accounts)
        candidates = _RemovalCandidates(found, _get_dids(recipients, accounts))
        answers, acknowledged = candidates.take_all(works)
        senders = _update_senders(acknowledged, recipients) if self._entry == "acknowledged" else {}
        self._remember_recipients(acknowledged)
        if self._recent is not None:
            for id, one in recipients.items():
                self._recent.set_senders(id, senders.get(id, one.get("senders")))
        transaction.write_at_end(
            build_removals(candidates.taken, recipients, senders),
            build_ledger_entries(transaction.slot, "didcomm", **{self._entry: len(candidates.taken)}),
        )
        return answers

    def _remember_recipients(self, acknowledged: Iterable[tuple[RemovalRequest, Sequence[Document]]]) -> None:
        for work, taken in acknowledged:
            concerned = {one["recipient"] for one in taken}
            if work.account is not None and 0 < len(concerned) <= _MAX_LIKELY_RECIPIENTS:
                self._likely_recipients.keep(work.account, work.account, concerned)

    async def _remove_recalled(
        self,
        transaction: Transaction,
        works: Sequence[RemovalRequest],
        messages: Sequence[_RecentMessage],
    ) -> tuple[list[list[RemovedMessage]], bool]:
        """
        Remove messages that were not read, on the condition that they and their recipients have not changed; return
        whether that holds. If not, the transaction must not be committed.
        """
        assert self._recent is not None
        queues = {one.queue.recipient_id: one.queue for one in messages}
        recipients = {id: {"senders": self._recent.get_senders(id)} for id in queues}
        dids = MessageDIDs(
            {id: one.did for id, one in queues.items()}, {one.account_id: one.account for one in queues.values()}
        )
        candidates = _RemovalCandidates([one.document for one in messages], dids)
        answers, acknowledged = candidates.take_all(works)
        taken = candidates.taken
        if _update_senders(acknowledged, recipients) or not taken:
            return answers, False
        volumes = _sum_volumes(taken)
        updates = [
            _build_conditional_update(queues[id], volume, recipients[id]["senders"]) for id, volume in volumes.items()
        ]
        updated, deleted, *_ = await transaction.write(
            [
                *RECIPIENTS.update_each(updates),
                *MESSAGES.delete({"_id": {"$in": [one["_id"] for one in taken]}, "pushes": 0}),
                *build_ledger_entries(transaction.slot, "didcomm", **{self._entry: len(taken)}),
            ]
        )
        return answers, (updated["n"], deleted["n"]) == (len(volumes), len(taken))


def _build_recipient_query(ids: Collection[ObjectId]) -> MongoCommand:
    fields = {"did": 1, "messages": 1, "registered": 1, "senders": 1}
    return RECIPIENTS.find({"_id": {"$in": list(ids)}}, projection=fields, hint="_id_")


async def _find_recipients(
    transaction: Transaction, messages: Iterable[Document], known: Iterable[Document] = ()
) -> dict[ObjectId, Document]:
    """
    Find the recipients of messages, by id.

    :param known: those that were read already, and perhaps others.
    """
    recipients = {one["_id"]: one for one in known}
    missing = {one["recipient"] for one in messages} - recipients.keys()
    if missing:
        recipients |= {one["_id"]: one for one in await transaction.query(_build_recipient_query(missing))}
    return recipients


def _get_dids(recipients: Mapping[ObjectId, Document], accounts: Mapping[ObjectId, str]) -> MessageDIDs:
    return MessageDIDs({id: one["did"] for id, one in recipients.items()}, accounts)


async def _find_by_digest(
    transaction: Transaction, works: Sequence[RemovalRequest], accounts: dict[str, ObjectId]
) -> list[list[Document]]:
    wanted: dict[ObjectId, list[bytes]] = defaultdict(list)
    for work in works:
        account = accounts.get(work.account or "")
        if account is not None:
            wanted[account] += work.digests()
    return await transaction.query_many(
        *[
            MESSAGES.find({"account": account, "digest": {"$in": chunk}}, projection=_ACKNOWLEDGE_PROJECTION)
            for account, digests in wanted.items()
            for chunk in _split_into_queries(digests)
        ]
    )


class _RemovalCandidates:
    """
    Messages that one removal after the other takes from.

    :ivar taken: those that are to be removed.
    """

    def __init__(self, documents: Iterable[Document], dids: MessageDIDs) -> None:
        self._dids = dids
        self._left = {one["_id"]: one for one in documents}
        self._ids_by_digest: dict[bytes, list[str]] = defaultdict(list)
        for id, one in self._left.items():
            self._ids_by_digest[one["digest"]].append(id)
        self.taken: list[Document] = []

    def take_all(
        self, works: Iterable[RemovalRequest]
    ) -> tuple[list[list[RemovedMessage]], list[tuple[RemovalRequest, list[Document]]]]:
        """Take the messages of all removals; return the answers, and what was taken for which removal."""
        taken = [(work, self.take(work)) for work in works]
        return [_build_removed_list(some, self._dids, None) for _, some in taken], taken

    def take(self, removal: RemovalRequest) -> list[Document]:
        """Take the messages of a removal, in order of arrival if it is of an account."""
        ids = dict.fromkeys(removal.ids)
        for digest in removal.digests():
            ids |= dict.fromkeys(self._ids_by_digest[digest])
        taken = [self._left.pop(id) for id in ids if id in self._left and self._matches(removal, self._left[id])]
        self.taken += taken
        return taken if removal.account is None else sorted(taken, key=lambda one: one["seq"])

    def _matches(self, removal: RemovalRequest, document: Document) -> bool:
        return removal.account is None or self._dids.accounts.get(document["account"]) == removal.account


def _update_senders(
    acknowledged: Iterable[tuple[RemovalRequest, Sequence[Document]]], recipients: Mapping[ObjectId, Document]
) -> dict[ObjectId, str]:
    """
    Return the :class:`KnownSenders` of the recipients that have to remember others, or other times.

    :param acknowledged: what was taken for each acknowledgement.
    """
    # Parties by recipient and time: ten thousand messages of a thousand recipients may be acknowledged at once.
    acknowledged_parties: dict[ObjectId, dict[float, list[int]]] = {}
    for work, some in acknowledged:
        for one in some:
            party = get_party(join_origin(one))
            if party:
                acknowledged_parties.setdefault(one["recipient"], {}).setdefault(work.now, []).append(party)
    changed = {}
    for id, parties_by_time in acknowledged_parties.items():
        senders = KnownSenders(recipients.get(id, {}).get("senders"))
        if any([senders.acknowledged(parties, now) for now, parties in parties_by_time.items()]):
            changed[id] = senders.text()
    return changed


async def withdraw_messages(transaction: Transaction, ids: Sequence[str]) -> None:
    """Remove those of the messages that exist, to undo that they were queued."""
    found = await transaction.query(MESSAGES.find({"_id": {"$in": list(ids)}}, projection=REMOVAL_PROJECTION))
    removals = build_removals(found, await _find_recipients(transaction, found))
    transaction.write_at_end(removals, build_ledger_entries(transaction.slot, "didcomm", withdrawn=len(found)))


def build_removals(
    documents: Collection[Document],
    recipients: Mapping[ObjectId, Document],
    senders: Mapping[ObjectId, str] = {},  # noqa: B006  it is not changed
) -> list[MongoCommand]:
    """
    Build the writes that delete messages and update their recipients. A recipient that is not registered is deleted
    with its last message.

    :param documents: read in the same transaction, as were the `recipients`.
    :param senders: result of :func:`_update_senders`.
    """
    if not documents:
        return []
    updates, unused = [], []
    for id, volume in _sum_volumes(documents).items():
        if id not in recipients:
            continue
        change: Document = {"$inc": {"messages": -volume.messages, "bytes": -volume.size, "changes": 1}}
        if id in senders:
            change["$set"] = {"senders": senders[id]}
        if recipients[id]["messages"] == volume.messages:
            change["$unset"] = {"waited_for": 1}
            if "registered" not in recipients[id]:
                unused.append(id)
                continue
        updates.append({"q": {"_id": id}, "u": change})
    return [
        *MESSAGES.delete({"_id": {"$in": [one["_id"] for one in documents]}}),
        *RECIPIENTS.update_each(updates),
        *(RECIPIENTS.delete({"_id": {"$in": unused}}) if unused else ()),
    ]


def _sum_volumes(documents: Iterable[Document]) -> dict[ObjectId, MessageVolume]:
    """Return the volume of messages by recipient."""
    volumes: dict[ObjectId, MessageVolume] = {}
    for one in documents:
        volumes.setdefault(one["recipient"], MessageVolume()).add(1, one["size"])
    return volumes


def _build_conditional_update(queue: MessageQueueState, volume: MessageVolume, senders: str | None) -> Document:
    """Build the update of a recipient that is still registered by an account with this DID, and has these senders."""
    wanted = {
        "_id": queue.recipient_id,
        "registered": PRESENT,
        "moves": queue.moves or ABSENT,
        "senders": ABSENT if senders is None else senders,
    }
    counters = {
        "messages": {"$subtract": ["$messages", volume.messages]},
        "bytes": {"$subtract": ["$bytes", volume.size]},
        "changes": {"$add": ["$changes", 1]},
    }
    mark = {"waited_for": {"$cond": [{"$gt": ["$messages", 0]}, "$waited_for", "$$REMOVE"]}}
    return {"q": wanted, "u": [{"$set": counters}, {"$set": mark}]}


def _split_into_queries(values: Iterable[P]) -> Iterator[list[P]]:
    return batch_by_size(values, lambda value: len(value) + _BYTES_PER_ID, _MAX_QUERY_BYTES)


def _build_removed_list(
    documents: Iterable[Document], dids: MessageDIDs, reason: RemovalReason | None
) -> list[RemovedMessage]:
    found = [(one, dids.of(one)) for one in documents]
    return [build_removed(one, *pair, reason) for one, pair in found if pair is not None]
