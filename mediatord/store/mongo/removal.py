"""
What becomes known late: of writes of which nobody knew whether they were done.

Taking messages out of their queues.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bson import ObjectId
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.store.fair_share import KnownSenders, get_party
from mediatord.store.interfaces.messages import RemovalReason, RemovedMessage
from mediatord.store.message_operations import LedgerEntry
from mediatord.store.mongo.accounts import MessageDIDs, RecipientDIDCache
from mediatord.store.mongo.driver.client import ReplicaSetClient, build_clock_check
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_deletes, build_find, build_updates
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger_entries import build_ledger_entries
from mediatord.store.mongo.message_queues import EVICTION_PROJECTION, REMOVAL_PROJECTION, build_removed, join_origin
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, RECIPIENTS

RemovalListener = Callable[[Sequence[RemovedMessage]], None]

_log = Logger(namespace="mediatord.store")


def log_removed(removed: Sequence[RemovedMessage]) -> None:
    """Say how many messages have gone, and why."""
    reasons = Counter(one.reason or "acknowledged" for one in removed)
    _log.warn(
        "messages were removed by operations that seemed to have failed: {reasons}",
        reasons=", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items())),
    )


class LateCommitReporter:
    """
    Tells of messages that a write has removed although it was said to have failed.

    It goes by whether they are still there: one that the write did not remove, and that somebody else has removed
    before this was looked at, is told twice. None is not told at all, unless this process ends before.

    :param tell: what it tells.
    """

    def __init__(self, tell: RemovalListener) -> None:
        self._tell = tell

    async def look(self, transaction: Transaction, removed: Sequence[RemovedMessage]) -> UndoCallback | None:
        """Part of an undo: see what is not there any more, to be told when the undo is durable."""
        if not removed:
            return None
        ids = [one.id for one in removed]
        found = await transaction.find(MESSAGES, {"_id": {"$in": ids}}, projection={"_id": 1}, hint="_id_")
        left = {one["_id"] for one in found}
        gone = [one for one in removed if one.id not in left]
        return partial(self.tell, gone) if gone else None

    def tell(self, gone: Sequence[RemovedMessage]) -> None:
        """These are gone after all."""
        if gone:
            log_removed(gone)
            self._tell(gone)


_DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
# Messages that expire in one transaction, and seconds after which no other is begun.
_EXPIRY_BATCH = 100
_EXPIRY_SECONDS = 1.0
_ACKNOWLEDGE_PROJECTION = {**EVICTION_PROJECTION, "seq": 1, "digest": 1}
# Bytes: what an id takes in a question beside itself, with the digest that it may be, and a question in all.
_BYTES_PER_ID = 64
_MAX_QUERY_BYTES = 8_388_608

P = TypeVar("P", str, bytes)


@dataclass(frozen=True, slots=True)
class RemovalRequest:
    """
    :param ids: or digests, if an account is given.
    :param account: whose messages alone are meant; None for anybody's.
    :param now: when they are acknowledged.
    """

    ids: Sequence[str]
    account: str | None = None
    now: float = 0.0

    @property
    def size(self) -> int:
        """Bytes that it takes to ask for all of them, about."""
        return sum([len(id) for id in self.ids]) + _BYTES_PER_ID * len(self.ids)

    def digests(self) -> list[bytes]:
        return (
            [bytes.fromhex(id) for id in self.ids if _DIGEST_PATTERN.fullmatch(id)]
            if self.account is not None
            else []
        )


class RemoveBatchOperation:
    """
    Does removals; see :class:`~.gathering.Together`. Each is answered with what it removed.

    :param entry: of the ledger, what becomes of messages by that.
    """

    def __init__(
        self, did_cache: RecipientDIDCache, late_commits: LateCommitReporter, entry: LedgerEntry = "acknowledged"
    ) -> None:
        self._did_cache = did_cache
        self._late_commits = late_commits
        self._entry = entry

    async def __call__(
        self, executor: OperationExecutor, works: Sequence[RemovalRequest], deadline: float, tries: int | None
    ) -> Sequence[list[RemovedMessage]]:
        answers: list[list[RemovedMessage]] = []

        async def remove(transaction: Transaction) -> list[list[RemovedMessage]]:
            answers[:] = await self._remove(transaction, works)
            return answers

        async def report_late(transaction: Transaction) -> UndoCallback | None:
            return await self._late_commits.look(transaction, [one for some in answers for one in some])

        return await executor.transact(remove, deadline, report_late, tries=tries)

    async def expire(self, client: ReplicaSetClient, now: float, limit: int) -> list[RemovedMessage]:
        """
        Those that have expired, the first first; not all at once, so that little is in anybody's way. None while the
        server has another time than this host: who is wrong would remove what has not expired.
        """
        expired: list[RemovedMessage] = []
        give_up = client.clock.seconds() + _EXPIRY_SECONDS
        while len(expired) < limit:
            number = min(limit - len(expired), _EXPIRY_BATCH)
            some: list[RemovedMessage] = []
            try:
                await client.transact(
                    "expire",
                    partial(
                        self._expire, some, {"$expr": build_clock_check(client.wall.seconds())}, now=now, limit=number
                    ),
                    undo=partial(self._late_commits.look, removed=some),
                )
            except StoreUnavailable:
                if not expired:
                    raise
                break  # what was removed has to be told
            expired += some
            if len(some) < number or client.clock.seconds() > give_up:
                break
        return expired

    async def _expire(
        self, expired: list[RemovedMessage], condition: Document, transaction: Transaction, now: float, limit: int
    ) -> None:
        """:param expired: becomes what has expired."""
        order = {"expires_at": 1, "seq": 1}
        found = await transaction.find(
            MESSAGES,
            {"expires_at": {"$lte": now}, **condition},
            sort=order,
            limit=limit,
            projection=REMOVAL_PROJECTION,
        )
        names = await self._did_cache.look_up(transaction.query, found)
        transaction.write_at_end(build_removals(found))
        transaction.write_at_end(build_ledger_entries(transaction.page, "didcomm", expired=len(found)))
        expired[:] = _build_removed_list(found, names, "ttl")

    async def _remove(self, transaction: Transaction, works: Sequence[RemovalRequest]) -> list[list[RemovedMessage]]:
        dids = list({work.account for work in works if work.account is not None})
        ids = list({id for work in works for id in work.ids})
        owners, *some = await transaction.ask(
            build_find(ACCOUNTS, {"did": {"$in": dids}}, projection={"did": 1}),
            *[
                build_find(MESSAGES, {"_id": {"$in": piece}}, projection=_ACKNOWLEDGE_PROJECTION)
                for piece in _split_into_queries(ids)
            ],
        )
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        found = [document for part in some for document in part]
        found += await self._find_by_digest(transaction, works, {did: id for id, did in accounts.items()})
        names = await self._did_cache.look_up(transaction.query, found, accounts)
        candidates = _RemovalCandidates(found, names)
        taken = [candidates.take(work) for work in works]
        answers = [_build_removed_list(some, names, None) for some in taken]
        if self._entry == "acknowledged":
            await _record_senders(transaction, [(work.now, some) for work, some in zip(works, taken, strict=True)])
        transaction.write_at_end(build_removals(candidates.taken))
        transaction.write_at_end(
            build_ledger_entries(transaction.page, "didcomm", **{self._entry: len(candidates.taken)})
        )
        return answers

    async def _find_by_digest(
        self, transaction: Transaction, works: Sequence[RemovalRequest], accounts: dict[str, ObjectId]
    ) -> list[Document]:
        wanted: dict[ObjectId, list[bytes]] = defaultdict(list)
        for work in works:
            account = accounts.get(work.account or "")
            if account is not None:
                wanted[account] += work.digests()
        questions = [
            build_find(MESSAGES, {"account": account, "digest": {"$in": piece}}, projection=_ACKNOWLEDGE_PROJECTION)
            for account, digests in wanted.items()
            for piece in _split_into_queries(digests)
        ]
        found = await transaction.ask(*questions) if questions else []
        return [document for some in found for document in some]


class _RemovalCandidates:
    """
    Messages that one removal after the other takes from.

    :ivar taken: those that are gone.
    """

    def __init__(self, documents: Iterable[Document], names: MessageDIDs) -> None:
        self._names = names
        self._left = {one["_id"]: one for one in documents}
        self._with_digest: dict[bytes, list[str]] = defaultdict(list)
        for id, one in self._left.items():
            self._with_digest[one["digest"]].append(id)
        self.taken: list[Document] = []

    def take(self, removal: RemovalRequest) -> list[Document]:
        """What is meant; of an account, in order of arrival."""
        ids = dict.fromkeys(removal.ids)
        for digest in removal.digests():
            ids |= dict.fromkeys(self._with_digest[digest])
        taken = [self._left.pop(id) for id in ids if id in self._left and self._matches(removal, self._left[id])]
        self.taken += taken
        return taken if removal.account is None else sorted(taken, key=_get_arrival)

    def _matches(self, removal: RemovalRequest, document: Document) -> bool:
        return removal.account is None or self._names.accounts.get(document["account"]) == removal.account


async def _record_senders(transaction: Transaction, acknowledged: Sequence[tuple[float, Sequence[Document]]]) -> None:
    """Remember whom recipients have acknowledged, and when."""
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
    found = await transaction.find(RECIPIENTS, wanted, projection={"senders": 1}, hint="_id_")
    updates = []
    for one in found:
        senders = KnownSenders(one.get("senders"))
        if any([senders.acknowledged(parties, now) for now, parties in acknowledged_parties[one["_id"]].items()]):
            updates.append({"q": {"_id": one["_id"]}, "u": {"$set": {"senders": senders.text()}}})
    transaction.write_at_end(build_updates(RECIPIENTS, updates) if updates else [])


async def withdraw_messages(transaction: Transaction, ids: Sequence[str]) -> None:
    """Take those out that are there, as if they had never been deposited."""
    found = await transaction.find(MESSAGES, {"_id": {"$in": list(ids)}}, projection=REMOVAL_PROJECTION)
    transaction.write_at_end(build_removals(found))
    transaction.write_at_end(build_ledger_entries(transaction.page, "didcomm", withdrawn=len(found)))


def build_removals(documents: Iterable[Document]) -> list[MongoCommand]:
    """
    Delete messages and count them off. A recipient that is not registered goes with its last message.

    :param documents: all of them there, in the same transaction.
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
    emptied = {"_id": {"$in": list(counts)}, "messages": 0}
    return [
        *build_deletes(MESSAGES, {"_id": {"$in": ids}}),
        *build_updates(
            RECIPIENTS,
            [
                {"q": {"_id": recipient}, "u": {"$inc": {"messages": messages, "bytes": size, "changes": 1}}}
                for recipient, (messages, size) in counts.items()
            ],
        ),
        *build_updates(RECIPIENTS, [{"q": emptied, "u": {"$unset": {"waited_for": 1}}, "multi": True}]),
        *build_deletes(RECIPIENTS, {**emptied, "registered": {"$exists": False}}),
    ]


def _split_into_queries(values: Iterable[P]) -> Iterator[list[P]]:
    """In questions that are not too large."""
    some: list[P] = []
    size = 0
    for value in values:
        more = len(value) + _BYTES_PER_ID
        if some and size + more > _MAX_QUERY_BYTES:
            yield some
            some, size = [], 0
        some.append(value)
        size += more
    if some:
        yield some


def _get_arrival(document: Document) -> tuple[int, int]:
    return document["seq"].time, document["seq"].inc


def _build_removed_list(
    documents: Iterable[Document], names: MessageDIDs, reason: RemovalReason | None
) -> list[RemovedMessage]:
    told = [(one, names.of(one)) for one in documents]
    return [build_removed(one, *name, reason) for one, name in told if name is not None]
