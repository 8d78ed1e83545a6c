"""Taking messages out of their queues."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bson import ObjectId

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Reason, Removed
from mediatord.store.books import Entry
from mediatord.store.known_senders import KnownSenders
from mediatord.store.mongo.aftermath import Aftermath
from mediatord.store.mongo.clocks import agreeing
from mediatord.store.mongo.collections import ACCOUNTS, MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.ledger import entering
from mediatord.store.mongo.names import NameBook, Names
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.requests import Document, Request, deleting, updating
from mediatord.store.mongo.rows import OUTLINE, OUTLINE_OF_PARTY, origin_of, removed
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled
from mediatord.store.shares import party_of

_DIGEST = re.compile("[0-9a-f]{64}")
# Messages that expire in one transaction, and seconds after which no other is begun.
_AT_A_TIME = 100
_EXPIRING = 1.0
_FOUND = {**OUTLINE_OF_PARTY, "seq": 1, "digest": 1}
# Bytes: what an id takes in a question beside itself, with the digest that it may be, and a question in all.
_PER_ID = 64
_LARGEST_QUESTION = 8_388_608

P = TypeVar("P", str, bytes)


@dataclass(frozen=True, slots=True)
class Removal:
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
        return sum([len(id) for id in self.ids]) + _PER_ID * len(self.ids)

    def digests(self) -> list[bytes]:
        return [bytes.fromhex(id) for id in self.ids if _DIGEST.fullmatch(id)] if self.account is not None else []


class Removing:
    """
    Does removals; see :class:`~.gathering.Together`. Each is answered with what it removed.

    :param entry: of the ledger, what becomes of messages by that.
    """

    def __init__(self, book: NameBook, aftermath: Aftermath, entry: Entry = "acknowledged") -> None:
        self._book = book
        self._aftermath = aftermath
        self._entry = entry

    async def __call__(
        self, operations: Operations, works: Sequence[Removal], deadline: float, tries: int | None
    ) -> Sequence[list[Removed]]:
        answers: list[list[Removed]] = []

        async def remove(transaction: Transaction) -> list[list[Removed]]:
            answers[:] = await self._remove(transaction, works)
            return answers

        async def look_after(transaction: Transaction) -> Settled | None:
            return await self._aftermath.look(transaction, [one for some in answers for one in some])

        return await operations.transact(remove, deadline, look_after, tries=tries)

    async def expire(self, server: Server, now: float, limit: int) -> list[Removed]:
        """
        Those that have expired, the first first; not all at once, so that little is in anybody's way. None while the
        server has another time than this host: who is wrong would remove what has not expired.
        """
        expired: list[Removed] = []
        give_up = server.clock.seconds() + _EXPIRING
        while len(expired) < limit:
            number = min(limit - len(expired), _AT_A_TIME)
            some: list[Removed] = []
            try:
                await server.transact(
                    "expire",
                    partial(self._expire, some, {"$expr": agreeing(server.wall.seconds())}, now=now, limit=number),
                    undo=partial(self._aftermath.look, removed=some),
                )
            except StoreUnavailable:
                if not expired:
                    raise
                break  # what was removed has to be told
            expired += some
            if len(some) < number or server.clock.seconds() > give_up:
                break
        return expired

    async def _expire(
        self, expired: list[Removed], condition: Document, transaction: Transaction, now: float, limit: int
    ) -> None:
        """:param expired: becomes what has expired."""
        order = {"expires_at": 1, "seq": 1}
        found = await transaction.find(
            MESSAGES, {"expires_at": {"$lte": now}, **condition}, sort=order, limit=limit, projection=OUTLINE
        )
        names = await self._book.look_up(transaction.query, found)
        transaction.later(taking_out(found))
        transaction.later(entering(transaction.page, "didcomm", expired=len(found)))
        expired[:] = _tell(found, names, "ttl")

    async def _remove(self, transaction: Transaction, works: Sequence[Removal]) -> list[list[Removed]]:
        dids = list({work.account for work in works if work.account is not None})
        ids = list({id for work in works for id in work.ids})
        owners, *some = await transaction.ask(
            finding(ACCOUNTS, {"did": {"$in": dids}}, projection={"did": 1}),
            *[finding(MESSAGES, {"_id": {"$in": piece}}, projection=_FOUND) for piece in _pieces(ids)],
        )
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        found = [document for part in some for document in part]
        found += await self._with_digests(transaction, works, {did: id for id, did in accounts.items()})
        names = await self._book.look_up(transaction.query, found, accounts)
        heap = _Heap(found, names)
        taken = [heap.take(work) for work in works]
        answers = [_tell(some, names, None) for some in taken]
        if self._entry == "acknowledged":
            await _note_senders(transaction, [(work.now, some) for work, some in zip(works, taken, strict=True)])
        transaction.later(taking_out(heap.taken))
        transaction.later(entering(transaction.page, "didcomm", **{self._entry: len(heap.taken)}))
        return answers

    async def _with_digests(
        self, transaction: Transaction, works: Sequence[Removal], accounts: dict[str, ObjectId]
    ) -> list[Document]:
        wanted: dict[ObjectId, list[bytes]] = defaultdict(list)
        for work in works:
            account = accounts.get(work.account or "")
            if account is not None:
                wanted[account] += work.digests()
        questions = [
            finding(MESSAGES, {"account": account, "digest": {"$in": piece}}, projection=_FOUND)
            for account, digests in wanted.items()
            for piece in _pieces(digests)
        ]
        found = await transaction.ask(*questions) if questions else []
        return [document for some in found for document in some]


class _Heap:
    """
    Messages that one removal after the other takes from.

    :ivar taken: those that are gone.
    """

    def __init__(self, documents: Iterable[Document], names: Names) -> None:
        self._names = names
        self._left = {one["_id"]: one for one in documents}
        self._with_digest: dict[bytes, list[str]] = defaultdict(list)
        for id, one in self._left.items():
            self._with_digest[one["digest"]].append(id)
        self.taken: list[Document] = []

    def take(self, removal: Removal) -> list[Document]:
        """What is meant; of an account, in order of arrival."""
        ids = dict.fromkeys(removal.ids)
        for digest in removal.digests():
            ids |= dict.fromkeys(self._with_digest[digest])
        taken = [self._left.pop(id) for id in ids if id in self._left and self._means(removal, self._left[id])]
        self.taken += taken
        return taken if removal.account is None else sorted(taken, key=_arrival)

    def _means(self, removal: Removal, document: Document) -> bool:
        return removal.account is None or self._names.accounts.get(document["account"]) == removal.account


async def _note_senders(transaction: Transaction, acknowledged: Sequence[tuple[float, Sequence[Document]]]) -> None:
    """Remember whom recipients have acknowledged, and when."""
    # Parties by recipient and time: ten thousand messages of a thousand recipients may be acknowledged at once.
    heard: dict[ObjectId, dict[float, list[int]]] = {}
    for now, some in acknowledged:
        for one in some:
            party = party_of(origin_of(one))
            if party:
                heard.setdefault(one["recipient"], {}).setdefault(now, []).append(party)
    if not heard:
        return
    wanted = {"_id": {"$in": list(heard)}}
    found = await transaction.find(RECIPIENTS, wanted, projection={"senders": 1}, hint="_id_")
    updates = []
    for one in found:
        senders = KnownSenders(one.get("senders"))
        if any([senders.acknowledged(parties, now) for now, parties in heard[one["_id"]].items()]):
            updates.append({"q": {"_id": one["_id"]}, "u": {"$set": {"senders": senders.text()}}})
    transaction.later(updating(RECIPIENTS, updates) if updates else [])


async def withdraw(transaction: Transaction, ids: Sequence[str]) -> None:
    """Take those out that are there, as if they had never been deposited."""
    found = await transaction.find(MESSAGES, {"_id": {"$in": list(ids)}}, projection=OUTLINE)
    transaction.later(taking_out(found))
    transaction.later(entering(transaction.page, "didcomm", withdrawn=len(found)))


def taking_out(documents: Iterable[Document]) -> list[Request]:
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
        *deleting(MESSAGES, {"_id": {"$in": ids}}),
        *updating(
            RECIPIENTS,
            [
                {"q": {"_id": recipient}, "u": {"$inc": {"messages": messages, "bytes": size, "changes": 1}}}
                for recipient, (messages, size) in counts.items()
            ],
        ),
        *updating(RECIPIENTS, [{"q": emptied, "u": {"$unset": {"waited_for": 1}}, "multi": True}]),
        *deleting(RECIPIENTS, {**emptied, "registered": {"$exists": False}}),
    ]


def _pieces(values: Iterable[P]) -> Iterator[list[P]]:
    """In questions that are not too large."""
    some: list[P] = []
    size = 0
    for value in values:
        more = len(value) + _PER_ID
        if some and size + more > _LARGEST_QUESTION:
            yield some
            some, size = [], 0
        some.append(value)
        size += more
    if some:
        yield some


def _arrival(document: Document) -> tuple[int, int]:
    return document["seq"].time, document["seq"].inc


def _tell(documents: Iterable[Document], names: Names, reason: Reason | None) -> list[Removed]:
    told = [(one, names.of(one)) for one in documents]
    return [removed(one, *name, reason) for one, name in told if name is not None]
