"""The ledger as a whole: read, carried forward, and opened where messages wait that nobody has noted."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Books, Ledger
from mediatord.store.books import ENTRIES
from mediatord.store.mongo.cluster_schema import NODES
from mediatord.store.mongo.collections import MESSAGES, OWNERS
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.decentrl_schema import PENDING
from mediatord.store.mongo.duplicates import retried
from mediatord.store.mongo.ledger import CARRIED, HALVES, LEDGER, Half
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Duplicate, Refused, Unreachable
from mediatord.store.mongo.requests import Document, Request, deleting, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction

# Seconds that it may take, as nobody's mail depends on it, and that what waits may be counted for.
_PATIENCE, _COUNTING = 3.0, 1.5
# Messages of a half that are counted.
_COUNTED = 1_000_000
_WAITING: dict[Half, str] = {"didcomm": MESSAGES, "decentrl": PENDING.name}
# In the entry of a process that keeps the ledger; one of an older version has none.
KEEPS = "keeps_ledger"

T = TypeVar("T")
# Asks several questions at once, in a transaction; and what is to be done with that.
Ask = Callable[[Sequence[Request]], Awaitable[list[list[Document]]]]
Work = Callable[[Ask], Awaitable[T]]

_Sums = dict[Half, dict[str, int]]


async def ledger(server: Server) -> Books:
    """See `IMessageStore`; while a process runs that does not keep it, it is not known what waits."""
    books, _ = await server.operate(
        "ledger", lambda operations, deadline: read_with(operations, deadline, _nothing), until=patience(server)
    )
    return books


def patience(server: Server) -> float:
    """Until when the ledger may be read, by the clock of the server's reactor."""
    return server.clock.seconds() + _PATIENCE


async def read_with(operations: Operations, deadline: float, work: Work[T]) -> tuple[Books, T]:
    """
    The ledger, and what some work finds in the state of the same moment.

    :param work: given what asks for documents; done again if the ledger has to be settled first.
    """
    books, settled, found = await _look(operations, deadline, work)
    if settled:
        return books, found
    await retried(lambda: operations.transact(_settle, deadline))
    books, settled, found = await _look(operations, deadline, work)
    return books if settled else _unknown(books), found


async def _nothing(_: Ask) -> None:
    pass


async def begin(server: Server) -> None:
    """Carry forward, and open the books unless they are open. What cannot be done is done later."""
    with contextlib.suppress(StoreUnavailable, Duplicate):
        await carry_forward(server)
        await _open(server)


async def _open(server: Server) -> None:
    """What waits was accepted, if nobody has noted anything of it."""

    async def look(transaction: Transaction) -> None:
        if not _is_settled(*await transaction.ask(*_asking())):
            await _settle(transaction)

    await retried(lambda: server.transact("ledger", look))


async def carry_forward(server: Server) -> None:
    """Add the pages of processes that are gone to what is carried forward; with another it would do no harm."""

    async def carry(transaction: Transaction) -> None:
        owners, nodes = await transaction.ask(
            finding(OWNERS, {}, projection={"_id": 1}), finding(NODES, {}, projection={"_id": 1})
        )
        there = [one["_id"] for one in (*owners, *nodes)]
        pages = await transaction.find(LEDGER, {"owner": {"$exists": True, "$nin": there}})
        if not pages:
            return
        sums = _sums(pages)
        more = {f"{half}.{entry}": sums[half][entry] for half in HALVES for entry in ENTRIES}
        transaction.later(deleting(LEDGER, {"_id": {"$in": [page["_id"] for page in pages]}}))
        transaction.later(updating(LEDGER, [{"q": {"_id": CARRIED}, "u": {"$inc": more}, "upsert": True}]))

    await retried(lambda: server.transact("ledger", carry))


async def _look(operations: Operations, deadline: float, work: Work[T]) -> tuple[Books, bool, T]:
    """The books, whether every process keeps them, and what the work finds."""
    few = True
    for collection in _WAITING.values():
        # It may be wrong after a crash of the server, but costs nothing.
        said = await operations.command(Request({"count": collection}), deadline, prompt=True)
        few = few and said["n"] <= _COUNTED
    if few:
        try:
            return await operations.transact(partial(_counted, work), deadline - _PATIENCE + _COUNTING, reading=True)
        except (Unreachable, Refused):
            pass
    return await operations.transact(partial(_uncounted, work), deadline, reading=True)


async def _uncounted(work: Work[T], transaction: Transaction) -> tuple[Books, bool, T]:
    pages, others = await transaction.ask(*_asking())
    return _unknown(_books(pages)), _is_settled(pages, others), await work(_asked_in(transaction))


def _asked_in(transaction: Transaction) -> Ask:
    return lambda questions: transaction.ask(*questions)


async def _counted(work: Work[T], transaction: Transaction) -> tuple[Books, bool, T]:
    """All of one moment."""
    found = await work(_asked_in(transaction))
    pages, others, *counts = await transaction.ask(*_asking(), *[_counting(half, _COUNTED + 1) for half in HALVES])
    didcomm, decentrl = [_number(found) for found in counts]
    books = _books(pages)
    if max(didcomm, decentrl) > _COUNTED:
        return _unknown(books), _is_settled(pages, others), found
    didcomm_ledger = replace(books.didcomm, waiting=didcomm)
    return Books(didcomm_ledger, replace(books.decentrl, waiting=decentrl)), _is_settled(pages, others), found


async def _settle(transaction: Transaction) -> None:
    """Write down as accepted what waits and what is noted as gone."""
    pages, others, *counts = await transaction.ask(*_asking(), *map(_counting, HALVES))
    sums = _sums(pages)
    change: Document = {}
    for half, found in zip(HALVES, counts, strict=True):
        gone = sum(sums[half].values()) - sums[half]["accepted"]
        change[f"{half}.accepted"] = _number(found) + gone - sums[half]["accepted"]
    settled = {"$unset": {"settled": 1}} if others else {"$set": {"settled": True}}
    transaction.later(updating(LEDGER, [{"q": {"_id": CARRIED}, "u": {"$inc": change, **settled}, "upsert": True}]))


def _asking() -> list[Request]:
    """For all pages, and whether there is a process that does not keep any."""
    return [finding(LEDGER, {}), finding(OWNERS, {KEEPS: {"$exists": False}}, limit=1, projection={"_id": 1})]


def _is_settled(pages: Iterable[Document], others: Sequence[Document]) -> bool:
    return not others and any("settled" in page for page in pages)


def _counting(half: Half, most: int = 0) -> Request:
    """Rows of a half; by its index alone."""
    limit: list[Document] = [{"$limit": most}] if most else []
    return aggregating(_WAITING[half], [*limit, {"$count": "n"}], hint="_id_")


def _number(found: Sequence[Document]) -> int:
    number: int = found[0]["n"] if found else 0
    return number


def _sums(pages: Sequence[Document]) -> _Sums:
    return {
        half: {entry: sum([page.get(half, {}).get(entry, 0) for page in pages]) for entry in ENTRIES}
        for half in HALVES
    }


def _books(pages: Sequence[Document]) -> Books:
    sums = _sums(pages)
    return Books(Ledger(**sums["didcomm"]), Ledger(**sums["decentrl"]))


def _unknown(books: Books) -> Books:
    """It is not known what waits."""
    return Books(replace(books.didcomm, waiting=None), replace(books.decentrl, waiting=None))
