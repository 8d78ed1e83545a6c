"""
Ledger of what became of all messages, written in the transactions that accept and remove them.

Each session has a document of its own, so concurrent transactions do not conflict; the ledger is the sum of all
documents. Those of dead processes are added to one document, so their number stays bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.administration import QUEUE_PROTOCOLS, QueueProtocol
from mediatord.store.interfaces.messages import LEDGER_ENTRIES, MessageLedger, StoreLedger
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
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction
from mediatord.store.mongo.schema import CARRIED_FORWARD_ID, LEDGER, NODES, QUEUES, SESSION_OWNERS

# Seconds for a read in all, and for counting queued messages.
_LEDGER_TIMEOUT, _COUNT_TIMEOUT = 3.0, 1.5
# Queued messages of a half beyond which they are not counted.
_COUNT_LIMIT = 1_000_000

T = TypeVar("T")
# Runs several queries at once in a transaction; and what uses it.
LedgerQuery = Callable[[Sequence[MongoCommand]], Awaitable[list[list[Document]]]]
LedgerReader = Callable[[LedgerQuery], Awaitable[T]]


def build_ledger_entries(slot: SessionSlot, half: QueueProtocol, **more: int) -> list[MongoCommand]:
    """
    Build the update that adds to the ledger.

    :param slot: of the transaction.
    :param more: number of messages by entry; see :class:`~mediatord.store.interfaces.messages.MessageLedger`.
    """
    change = {f"{half}.{entry}": number for entry, number in more.items() if number}
    if not change:
        return []
    update = {"$inc": change, "$setOnInsert": {"owner": slot.owner}}
    return build_updates(LEDGER, [{"q": {"_id": slot.id}, "u": update, "upsert": True}])


async def read_ledger(client: ReplicaSetClient) -> StoreLedger:
    """See `IMessageStore`."""
    ledger, _ = await client.operate(
        "ledger",
        lambda executor, deadline: read_ledger_with(executor, deadline, read_nothing),
        until=get_ledger_deadline(client),
    )
    return ledger


def get_ledger_deadline(client: ReplicaSetClient) -> float:
    return client.clock.seconds() + _LEDGER_TIMEOUT


async def read_nothing(_: LedgerQuery) -> None:
    """For :func:`read_ledger_with`, to read the ledger alone."""


async def read_ledger_with(
    executor: OperationExecutor, deadline: float, work: LedgerReader[T]
) -> tuple[StoreLedger, T]:
    """
    Read the ledger, and what `work` finds in the same snapshot.

    :param work: called again if the ledger has to be initialized first.
    """
    ledger, is_initialized, found = await _read_snapshot(executor, deadline, work)
    if not is_initialized:
        await retry_on_duplicate_key(lambda: executor.transact(_initialize, deadline))
        ledger, _, found = await _read_snapshot(executor, deadline, work)
    return ledger, found


async def open_ledger(client: ReplicaSetClient) -> None:
    """Carry forward, and initialize the ledger; on failure this is done later."""

    async def initialize(transaction: Transaction) -> None:
        if not _is_initialized(await transaction.find(LEDGER, {})):
            await _initialize(transaction)

    with contextlib.suppress(StoreUnavailable, DuplicateKeyError):
        await carry_forward(client)
        await retry_on_duplicate_key(lambda: client.transact("ledger", initialize))


async def carry_forward(client: ReplicaSetClient) -> None:
    """Add the documents of dead processes to one; one that is alive after all goes on with a new document."""

    async def carry(transaction: Transaction) -> None:
        owners, nodes = await transaction.query_many(
            build_find(SESSION_OWNERS, {}, projection={"_id": 1}), build_find(NODES, {}, projection={"_id": 1})
        )
        alive = [one["_id"] for one in (*owners, *nodes)]
        documents = await transaction.find(LEDGER, {"owner": {"$exists": True, "$nin": alive}})
        if not documents:
            return
        sums = _sum_entries(documents)
        more = {f"{half}.{entry}": sums[half][entry] for half in QUEUE_PROTOCOLS for entry in LEDGER_ENTRIES}
        transaction.write_at_end(build_deletes(LEDGER, {"_id": {"$in": [one["_id"] for one in documents]}}))
        transaction.write_at_end(
            build_updates(LEDGER, [{"q": {"_id": CARRIED_FORWARD_ID}, "u": {"$inc": more}, "upsert": True}])
        )

    await retry_on_duplicate_key(lambda: client.transact("ledger", carry))


async def _read_snapshot(
    executor: OperationExecutor, deadline: float, work: LedgerReader[T]
) -> tuple[StoreLedger, bool, T]:
    """Read the ledger, whether it is initialized, and what `work` finds; count queued messages if possible."""
    can_count = True
    for queues in QUEUES.values():
        # From metadata, which may be wrong after a crash of the server, but costs nothing.
        reply = await executor.command(MongoCommand({"count": queues.messages}), deadline, low_latency=True)
        can_count = can_count and reply["n"] <= _COUNT_LIMIT
    if can_count:
        try:
            return await executor.transact(
                partial(_read, work, QUEUE_PROTOCOLS), deadline - _LEDGER_TIMEOUT + _COUNT_TIMEOUT, reading=True
            )
        except (ServerUnreachable, MongoCommandError):
            pass
    return await executor.transact(partial(_read, work, ()), deadline, reading=True)


async def _read(
    work: LedgerReader[T], counted: Sequence[QueueProtocol], transaction: Transaction
) -> tuple[StoreLedger, bool, T]:
    """:param counted: the halves of which queued messages are counted, all or none."""
    found = await work(lambda queries: transaction.query_many(*queries))
    documents, *counts = await transaction.query_many(
        build_find(LEDGER, {}), *[_build_count_query(half, _COUNT_LIMIT + 1) for half in counted]
    )
    waiting: list[int | None] = [_parse_count(count) for count in counts]
    if not waiting or any(number is None or number > _COUNT_LIMIT for number in waiting):
        waiting = [None for _ in QUEUE_PROTOCOLS]
    sums = _sum_entries(documents)
    didcomm, decentrl = [
        MessageLedger(**sums[half], waiting=number) for half, number in zip(QUEUE_PROTOCOLS, waiting, strict=True)
    ]
    return StoreLedger(didcomm, decentrl), _is_initialized(documents), found


async def _initialize(transaction: Transaction) -> None:
    """Record everything that is queued or recorded as removed as accepted."""
    documents, *counts = await transaction.query_many(
        build_find(LEDGER, {}), *map(_build_count_query, QUEUE_PROTOCOLS)
    )
    sums = _sum_entries(documents)
    change: Document = {}
    for half, found in zip(QUEUE_PROTOCOLS, counts, strict=True):
        removed = sum(sums[half].values()) - sums[half]["accepted"]
        change[f"{half}.accepted"] = _parse_count(found) + removed - sums[half]["accepted"]
    update = {"$inc": change, "$set": {"settled": True}}
    transaction.write_at_end(build_updates(LEDGER, [{"q": {"_id": CARRIED_FORWARD_ID}, "u": update, "upsert": True}]))


def _is_initialized(documents: Sequence[Document]) -> bool:
    return any("settled" in document for document in documents)


def _build_count_query(half: QueueProtocol, limit: int = 0) -> MongoCommand:
    """Build a query that counts the queued messages of a half, by keys alone."""
    stages: list[Document] = [{"$limit": limit}] if limit else []
    return build_aggregate(QUEUES[half].messages, [*stages, {"$count": "n"}], hint="_id_")


def _parse_count(found: Sequence[Document]) -> int:
    number: int = found[0]["n"] if found else 0
    return number


def _sum_entries(documents: Sequence[Document]) -> dict[QueueProtocol, dict[str, int]]:
    return {
        half: {entry: sum([one.get(half, {}).get(entry, 0) for one in documents]) for entry in LEDGER_ENTRIES}
        for half in QUEUE_PROTOCOLS
    }
