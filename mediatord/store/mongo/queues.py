"""
Reading what waits, mostly inside a transaction of the caller, which sees one state of the database.

A message is visible from when it is due until it expires. All that waits is counted with its recipient; what is not
visible is counted apart and taken off, so that nothing here grows with the length of a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from bson import ObjectId, Timestamp

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Arrival, QueueStatus, StoredMessage, Window
from mediatord.interfaces.decentrl import LARGEST_SLICE
from mediatord.protocol.canonical_did import did_digest
from mediatord.store.mongo.clocks import Clocks
from mediatord.store.mongo.collections import ACCOUNTS, MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import aggregating, finding, within
from mediatord.store.mongo.names import NameBook
from mediatord.store.mongo.requests import Document, updating
from mediatord.store.mongo.rows import stored
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.texts import is_storable

_BY_ARRIVAL = {"seq": 1}
_ID = {"_id": 1}
_SIZE = {"seq": 1, "size": 1}
_RECEIVED = {"seq": 1, "received_at": 1}


class Queues:
    """What waits at a time; see `IMessageStore`."""

    def __init__(self, book: NameBook) -> None:
        self._book = book

    async def fetch(
        self, t: Transaction, account: str, recipient_did: str | None, now: float, limit: int, max_bytes: int
    ) -> list[StoredMessage]:
        """The oldest visible ones that fit, but at least one."""
        lane = await _lane(t, account, recipient_did)
        if lane is None:
            return []
        return await self._read(t, lane.seen(now), limit, max_bytes, lane.order)

    async def find(self, t: Transaction, ids: Sequence[str], now: float) -> list[StoredMessage]:
        wanted = {"_id": {"$in": list(dict.fromkeys(ids))}, **visible(now)}
        return await self._read(t, [wanted], None, LARGEST_SLICE, "_id_")

    async def take_due(self, t: Transaction, now: float, limit: int, agreeing: Document) -> list[StoredMessage]:
        """
        :param agreeing: an expression: whether the server has about the same time.
        :raise StoreUnavailable: it has not, and something seems to be due.
        """
        due = {"wakes_at": {"$lte": now}, "expires_at": {"$gt": now}}
        order, index = {"wakes_at": 1, "seq": 1}, "message_wakes"
        doubtful = {**due, "$expr": {"$not": [agreeing]}}
        found, seeming = await t.ask(
            finding(MESSAGES, due, sort=order, limit=limit, hint=index),
            finding(MESSAGES, doubtful, limit=1, projection=_ID, hint=index),
        )
        if seeming:
            raise StoreUnavailable()
        if not found:
            return []
        taken = {"_id": {"$in": [one["_id"] for one in found]}}
        handing_out = {"$unset": {"wakes_at": 1, "due_at": 1}, "$set": {"arrived_at": now}}
        t.later(updating(MESSAGES, [{"q": taken, "u": handing_out, "multi": True}]))
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
                finding(MESSAGES, filter, sort=_BY_ARRIVAL, limit=limit or 0, projection=_SIZE, hint=hint)
                for filter in filters
            ]
        )
        ids = _fitting(sorted(chain(*parts), key=_seq)[:limit], max_bytes)
        if not ids:
            return []
        places = {id: place for place, id in enumerate(ids)}
        found = await t.find(MESSAGES, {"_id": {"$in": ids}})
        return await self._tell(t, sorted(found, key=lambda one: places[one["_id"]]))

    async def _tell(self, t: Transaction, documents: Sequence[Document]) -> list[StoredMessage]:
        names = await self._book.look_up(t.query, documents)
        return [stored(one, names.recipients, names.accounts) for one in documents]


@dataclass(eq=False, slots=True)
class TakingDue:
    """Takes what is due, as the work of a transaction."""

    queues: Queues
    clocks: Clocks
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
        t.later(updating(MESSAGES, again))


@dataclass(frozen=True, slots=True)
class _Lane:
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
            return [{"recipient": self.recipient, **visible(now)}]
        fresh = {"account": self.account, "expires_at": {"$gt": now}}
        return [{**fresh, "due_at": {"$exists": False}}, {**fresh, "due_at": {"$lte": now}}]

    def within(self, more: Document) -> Document:
        """What finds those of them that match, in an index of something else."""
        recipient = {} if self.recipient is None else {"recipient": self.recipient}
        return {"account": self.account, **more, **recipient}


async def status(t: Transaction, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    """What waits, and when the first and the last of it came."""
    lane = await _lane(t, account, recipient_did)
    if lane is None:
        return QueueStatus(0, 0)
    counted = {"account": lane.account} if lane.recipient is None else {"_id": lane.recipient}
    expired, held = lane.within({"expires_at": {"$lte": now}}), lane.within({"due_at": {"$gt": now}})
    counts = await t.ask(
        aggregating(RECIPIENTS, [{"$match": counted}, _summing("$messages", "$bytes")]),
        aggregating(MESSAGES, [{"$match": expired}, _summing(1, "$size")], hint="message_over"),
        aggregating(
            MESSAGES, [{"$match": {**held, "expires_at": {"$gt": now}}}, _summing(1, "$size")], hint="message_delayed"
        ),
        *[
            finding(MESSAGES, some, sort={"seq": way}, limit=1, projection=_RECEIVED, hint=lane.order)
            for some in lane.seen(now)
            for way in (1, -1)
        ],
    )
    ends = sorted(chain(*counts[3:]), key=_seq)
    if not ends:
        return QueueStatus(0, 0)
    (messages, size), *hidden = [_sums(some) for some in counts[:3]]
    return QueueStatus(
        messages - sum(number for number, _ in hidden),
        size - sum(number for _, number in hidden),
        ends[0]["received_at"],
        ends[-1]["received_at"],
    )


async def arrived(t: Transaction, accounts: Sequence[str], window: Window, limit: int) -> list[Arrival]:
    """What came in a time; nothing but an index is read of it."""
    owners = await t.find(ACCOUNTS, {"did": {"$in": list(dict.fromkeys(accounts))}}, projection={"did": 1})
    dids = {owner["_id"]: owner["did"] for owner in owners}
    if not dids:
        return []
    found: list[Document] = []
    for part in within("arrived_at", window):
        if len(found) < limit:
            found += await t.find(
                MESSAGES,
                {"account": {"$in": list(dids)}, **part},
                sort={"arrived_at": 1, "_id": 1},
                limit=limit - len(found),
                projection={"account": 1, "arrived_at": 1},
                hint="message_arrived",
            )
    return [Arrival(one["_id"], dids[one["account"]], one["arrived_at"]) for one in found]


async def next_due(server: Server, now: float) -> float | None:
    waiting = {"wakes_at": {"$exists": True}, "expires_at": {"$gt": now}}
    found = await server.find(
        "next_due", MESSAGES, waiting, sort={"wakes_at": 1}, limit=1, projection={"wakes_at": 1}, hint="message_wakes"
    )
    return found[0]["wakes_at"] if found else None


async def _lane(t: Transaction, account: str, recipient_did: str | None) -> _Lane | None:
    """None when there is no such account, or it has no such recipient."""
    if not is_storable(account) or not is_storable(recipient_did or ""):
        return None
    owners = await t.find(ACCOUNTS, {"did": account}, projection=_ID)
    if not owners:
        return None
    number = owners[0]["_id"]
    if recipient_did is None:
        return _Lane(number, None)
    recipients = await t.find(
        RECIPIENTS, {"account": number, "did_digest": did_digest(recipient_did)}, projection=_ID
    )
    return _Lane(number, recipients[0]["_id"]) if recipients else None


def visible(now: float) -> Document:
    """What finds the messages that can be seen at a time."""
    return {"expires_at": {"$gt": now}, "$or": [{"due_at": {"$exists": False}}, {"due_at": {"$lte": now}}]}


def _summing(number: object, size: object) -> Document:
    return {"$group": {"_id": None, "number": {"$sum": number}, "bytes": {"$sum": size}}}


def _sums(found: Sequence[Document]) -> tuple[int, int]:
    return (found[0]["number"], found[0]["bytes"]) if found else (0, 0)


def _seq(document: Document) -> Timestamp:
    seq: Timestamp = document["seq"]
    return seq


def _fitting(documents: Iterable[Document], max_bytes: int) -> list[str]:
    """Ids of the first that fit, but at least one."""
    ids: list[str] = []
    size = 0
    for one in documents:
        size += one["size"]
        if ids and size > max_bytes:
            break
        ids.append(one["_id"])
    return ids
