"""The ledger as a whole: read, carried forward, and opened where messages wait that nobody has noted."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import MessageLedger, StoreLedger
from mediatord.store.message_operations import LEDGER_ENTRIES
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_aggregate,
    build_deletes,
    build_find,
    build_updates,
)
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.executor import OperationExecutor, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.ledger_entries import CARRIED_FORWARD_ID, LEDGER, LEDGER_HALVES, LedgerHalf
from mediatord.store.mongo.schema import MESSAGES, NODES, PENDING_EVENTS, SESSION_OWNERS

# Seconds that it may take, as nobody's mail depends on it, and that what waits may be counted for.
_LEDGER_TIMEOUT, _COUNT_TIMEOUT = 3.0, 1.5
# Messages of a half that are counted.
_COUNT_LIMIT = 1_000_000
_WAITING_COLLECTIONS: dict[LedgerHalf, str] = {"didcomm": MESSAGES, "decentrl": PENDING_EVENTS.name}
# In the entry of a process that keeps the ledger; one of an older version has none.
KEEPS_LEDGER = "keeps_ledger"

T = TypeVar("T")
# Asks several questions at once, in a transaction; and what is to be done with that.
LedgerQuery = Callable[[Sequence[MongoCommand]], Awaitable[list[list[Document]]]]
LedgerReader = Callable[[LedgerQuery], Awaitable[T]]

_EntrySums = dict[LedgerHalf, dict[str, int]]


async def read_ledger(client: ReplicaSetClient) -> StoreLedger:
    """See `IMessageStore`; while a process runs that does not keep it, it is not known what waits."""
    books, _ = await client.operate(
        "ledger",
        lambda executor, deadline: read_ledger_with(executor, deadline, _read_nothing),
        until=get_ledger_deadline(client),
    )
    return books


def get_ledger_deadline(client: ReplicaSetClient) -> float:
    """Until when the ledger may be read, by the clock of the server's reactor."""
    return client.clock.seconds() + _LEDGER_TIMEOUT


async def read_ledger_with(
    executor: OperationExecutor, deadline: float, work: LedgerReader[T]
) -> tuple[StoreLedger, T]:
    """
    The ledger, and what some work finds in the state of the same moment.

    :param work: given what asks for documents; done again if the ledger has to be settled first.
    """
    books, settled, found = await _read_snapshot(executor, deadline, work)
    if settled:
        return books, found
    await retry_on_duplicate_key(lambda: executor.transact(_reconcile, deadline))
    books, settled, found = await _read_snapshot(executor, deadline, work)
    return books if settled else _without_waiting(books), found


async def _read_nothing(_: LedgerQuery) -> None:
    pass


async def open_ledger(client: ReplicaSetClient) -> None:
    """Carry forward, and open the books unless they are open. What cannot be done is done later."""
    with contextlib.suppress(StoreUnavailable, DuplicateKeyError):
        await carry_forward(client)
        await _initialize_ledger(client)


async def _initialize_ledger(client: ReplicaSetClient) -> None:
    """What waits was accepted, if nobody has noted anything of it."""

    async def look(transaction: Transaction) -> None:
        if not _is_reconciled(*await transaction.ask(*_build_page_queries())):
            await _reconcile(transaction)

    await retry_on_duplicate_key(lambda: client.transact("ledger", look))


async def carry_forward(client: ReplicaSetClient) -> None:
    """Add the pages of processes that are gone to what is carried forward; with another it would do no harm."""

    async def carry(transaction: Transaction) -> None:
        owners, nodes = await transaction.ask(
            build_find(SESSION_OWNERS, {}, projection={"_id": 1}), build_find(NODES, {}, projection={"_id": 1})
        )
        there = [one["_id"] for one in (*owners, *nodes)]
        pages = await transaction.find(LEDGER, {"owner": {"$exists": True, "$nin": there}})
        if not pages:
            return
        sums = _sum_pages(pages)
        more = {f"{half}.{entry}": sums[half][entry] for half in LEDGER_HALVES for entry in LEDGER_ENTRIES}
        transaction.write_at_end(build_deletes(LEDGER, {"_id": {"$in": [page["_id"] for page in pages]}}))
        transaction.write_at_end(
            build_updates(LEDGER, [{"q": {"_id": CARRIED_FORWARD_ID}, "u": {"$inc": more}, "upsert": True}])
        )

    await retry_on_duplicate_key(lambda: client.transact("ledger", carry))


async def _read_snapshot(
    executor: OperationExecutor, deadline: float, work: LedgerReader[T]
) -> tuple[StoreLedger, bool, T]:
    """The books, whether every process keeps them, and what the work finds."""
    few = True
    for collection in _WAITING_COLLECTIONS.values():
        # It may be wrong after a crash of the server, but costs nothing.
        said = await executor.command(MongoCommand({"count": collection}), deadline, prompt=True)
        few = few and said["n"] <= _COUNT_LIMIT
    if few:
        try:
            return await executor.transact(
                partial(_read_with_counts, work), deadline - _LEDGER_TIMEOUT + _COUNT_TIMEOUT, reading=True
            )
        except (ServerUnreachable, MongoCommandError):
            pass
    return await executor.transact(partial(_read_without_counts, work), deadline, reading=True)


async def _read_without_counts(work: LedgerReader[T], transaction: Transaction) -> tuple[StoreLedger, bool, T]:
    pages, others = await transaction.ask(*_build_page_queries())
    return (
        _without_waiting(_build_ledgers(pages)),
        _is_reconciled(pages, others),
        await work(_bind_queries(transaction)),
    )


def _bind_queries(transaction: Transaction) -> LedgerQuery:
    return lambda questions: transaction.ask(*questions)


async def _read_with_counts(work: LedgerReader[T], transaction: Transaction) -> tuple[StoreLedger, bool, T]:
    """All of one moment."""
    found = await work(_bind_queries(transaction))
    pages, others, *counts = await transaction.ask(
        *_build_page_queries(), *[_build_count_query(half, _COUNT_LIMIT + 1) for half in LEDGER_HALVES]
    )
    didcomm, decentrl = [_parse_count(found) for found in counts]
    books = _build_ledgers(pages)
    if max(didcomm, decentrl) > _COUNT_LIMIT:
        return _without_waiting(books), _is_reconciled(pages, others), found
    didcomm_ledger = replace(books.didcomm, waiting=didcomm)
    return (
        StoreLedger(didcomm_ledger, replace(books.decentrl, waiting=decentrl)),
        _is_reconciled(pages, others),
        found,
    )


async def _reconcile(transaction: Transaction) -> None:
    """Write down as accepted what waits and what is noted as gone."""
    pages, others, *counts = await transaction.ask(*_build_page_queries(), *map(_build_count_query, LEDGER_HALVES))
    sums = _sum_pages(pages)
    change: Document = {}
    for half, found in zip(LEDGER_HALVES, counts, strict=True):
        gone = sum(sums[half].values()) - sums[half]["accepted"]
        change[f"{half}.accepted"] = _parse_count(found) + gone - sums[half]["accepted"]
    settled = {"$unset": {"settled": 1}} if others else {"$set": {"settled": True}}
    transaction.write_at_end(
        build_updates(LEDGER, [{"q": {"_id": CARRIED_FORWARD_ID}, "u": {"$inc": change, **settled}, "upsert": True}])
    )


def _build_page_queries() -> list[MongoCommand]:
    """For all pages, and whether there is a process that does not keep any."""
    return [
        build_find(LEDGER, {}),
        build_find(SESSION_OWNERS, {KEEPS_LEDGER: {"$exists": False}}, limit=1, projection={"_id": 1}),
    ]


def _is_reconciled(pages: Iterable[Document], others: Sequence[Document]) -> bool:
    return not others and any("settled" in page for page in pages)


def _build_count_query(half: LedgerHalf, most: int = 0) -> MongoCommand:
    """Rows of a half; by its index alone."""
    limit: list[Document] = [{"$limit": most}] if most else []
    return build_aggregate(_WAITING_COLLECTIONS[half], [*limit, {"$count": "n"}], hint="_id_")


def _parse_count(found: Sequence[Document]) -> int:
    number: int = found[0]["n"] if found else 0
    return number


def _sum_pages(pages: Sequence[Document]) -> _EntrySums:
    return {
        half: {entry: sum([page.get(half, {}).get(entry, 0) for page in pages]) for entry in LEDGER_ENTRIES}
        for half in LEDGER_HALVES
    }


def _build_ledgers(pages: Sequence[Document]) -> StoreLedger:
    sums = _sum_pages(pages)
    return StoreLedger(MessageLedger(**sums["didcomm"]), MessageLedger(**sums["decentrl"]))


def _without_waiting(books: StoreLedger) -> StoreLedger:
    """It is not known what waits."""
    return StoreLedger(replace(books.didcomm, waiting=None), replace(books.decentrl, waiting=None))
