"""Removal of messages from their queues: acknowledgement, purge, expiry and withdrawal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from bson import ObjectId
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.store.fair_share import KnownSenders, get_party
from mediatord.store.interfaces.messages import LedgerEntry, RemovalReason, RemovedMessage
from mediatord.store.mongo.accounts import MessageDIDFinder, MessageDIDs
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection, Document, MongoCommand, batch_by_size
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import EVICTION_PROJECTION, REMOVAL_PROJECTION, build_removed, join_origin
from mediatord.store.mongo.schema import ABSENT, ACCOUNTS, MESSAGES, RECIPIENTS

RemovalListener = Callable[[Sequence[RemovedMessage]], None]
P = TypeVar("P", str, bytes)

_DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
# Messages that expire in one transaction, and seconds after which no other one is started.
_EXPIRY_BATCH = 100
_EXPIRY_SECONDS = 1.0
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
        self, transaction: Transaction, collection: Collection, removed: Sequence[RemovedMessage]
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


class RemovalBatch:
    """
    Removes messages; a BatchOperation on :class:`RemovalRequest`, answered with the removed messages.

    :param entry: of the ledger.
    """

    def __init__(
        self, did_finder: MessageDIDFinder, reporter: UncertainRemovalReporter, entry: LedgerEntry = "acknowledged"
    ) -> None:
        self._did_finder = did_finder
        self._reporter = reporter
        self._entry = entry

    async def __call__(
        self, run: Operation, works: Sequence[RemovalRequest], tries: int | None
    ) -> Sequence[list[RemovedMessage]]:
        answers: list[list[RemovedMessage]] = []

        async def remove(transaction: Transaction) -> list[list[RemovedMessage]]:
            answers[:] = await self._remove(transaction, works)
            return answers

        async def report(transaction: Transaction) -> UndoCallback | None:
            return await self._reporter.find_missing(transaction, MESSAGES, [one for some in answers for one in some])

        return await run.transact(remove, report, tries=tries)

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
        dids = await self._did_finder.find(transaction.query, found)
        entries = build_ledger_entries(transaction.slot, "didcomm", expired=len(found))
        transaction.write_at_end(build_removals(found), entries)
        expired[:] = _build_removed_list(found, dids, "ttl")

    async def _remove(self, transaction: Transaction, works: Sequence[RemovalRequest]) -> list[list[RemovedMessage]]:
        account_dids = list({work.account for work in works if work.account is not None})
        ids = list({id for work in works for id in work.ids})
        owners, *some = await transaction.query_many(
            ACCOUNTS.find({"did": {"$in": account_dids}}, projection={"did": 1}),
            *[
                MESSAGES.find({"_id": {"$in": chunk}}, projection=_ACKNOWLEDGE_PROJECTION)
                for chunk in _split_into_queries(ids)
            ],
        )
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        some += await _find_by_digest(transaction, works, {did: id for id, did in accounts.items()})
        found = [document for part in some for document in part]
        dids = await self._did_finder.find(transaction.query, found, accounts)
        candidates = _RemovalCandidates(found, dids)
        taken = [candidates.take(work) for work in works]
        if self._entry == "acknowledged":
            await _record_senders(transaction, [(work.now, some) for work, some in zip(works, taken, strict=True)])
        entries = {self._entry: len(candidates.taken)}
        transaction.write_at_end(
            build_removals(candidates.taken), build_ledger_entries(transaction.slot, "didcomm", **entries)
        )
        return [_build_removed_list(some, dids, None) for some in taken]


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


async def _record_senders(transaction: Transaction, acknowledged: Sequence[tuple[float, Sequence[Document]]]) -> None:
    """Record whose messages the recipients have acknowledged, and when."""
    # Parties by recipient and time: ten thousand messages of a thousand recipients may be acknowledged at once.
    acknowledged_parties: dict[ObjectId, dict[float, list[int]]] = {}
    for now, some in acknowledged:
        for one in some:
            party = get_party(join_origin(one))
            if party:
                acknowledged_parties.setdefault(one["recipient"], {}).setdefault(now, []).append(party)
    if not acknowledged_parties:
        return
    wanted = {"_id": {"$in": list(acknowledged_parties)}}
    updates = []
    for one in await transaction.query(RECIPIENTS.find(wanted, projection={"senders": 1}, hint="_id_")):
        senders = KnownSenders(one.get("senders"))
        if any([senders.acknowledged(parties, now) for now, parties in acknowledged_parties[one["_id"]].items()]):
            updates.append({"q": {"_id": one["_id"]}, "u": {"$set": {"senders": senders.text()}}})
    transaction.write_at_end(RECIPIENTS.update_each(updates))


async def withdraw_messages(transaction: Transaction, ids: Sequence[str]) -> None:
    """Remove those of the messages that exist, to undo that they were queued."""
    found = await transaction.query(MESSAGES.find({"_id": {"$in": list(ids)}}, projection=REMOVAL_PROJECTION))
    entries = build_ledger_entries(transaction.slot, "didcomm", withdrawn=len(found))
    transaction.write_at_end(build_removals(found), entries)


def build_removals(documents: Iterable[Document]) -> list[MongoCommand]:
    """
    Build the writes that delete messages and update the counters of their recipients. A recipient that is not
    registered is deleted with its last message.

    :param documents: read in the same transaction.
    """
    ids: list[str] = []
    counts: dict[ObjectId, list[int]] = {}
    for one in documents:
        ids.append(one["_id"])
        count = counts.setdefault(one["recipient"], [0, 0])
        count[0] -= 1
        count[1] -= one["size"]
    if not ids:
        return []
    updates = [
        {"q": {"_id": recipient}, "u": {"$inc": {"messages": messages, "bytes": size, "changes": 1}}}
        for recipient, (messages, size) in counts.items()
    ]
    emptied = {"_id": {"$in": list(counts)}, "messages": 0}
    return [
        *MESSAGES.delete({"_id": {"$in": ids}}),
        *RECIPIENTS.update_each(updates),
        *RECIPIENTS.update(emptied, {"$unset": {"waited_for": 1}}, multi=True),
        *RECIPIENTS.delete({**emptied, "registered": ABSENT}),
    ]


def _split_into_queries(values: Iterable[P]) -> Iterator[list[P]]:
    return batch_by_size(values, lambda value: len(value) + _BYTES_PER_ID, _MAX_QUERY_BYTES)


def _build_removed_list(
    documents: Iterable[Document], dids: MessageDIDs, reason: RemovalReason | None
) -> list[RemovedMessage]:
    found = [(one, dids.of(one)) for one in documents]
    return [build_removed(one, *pair, reason) for one, pair in found if pair is not None]
