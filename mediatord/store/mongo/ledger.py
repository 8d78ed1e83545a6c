"""
Ledger of what became of all messages, written in the transactions that accept and remove them.

Each session has a document of its own, so concurrent transactions do not conflict; the ledger is the sum of all
documents. Those of dead processes are added to one document, so their number stays bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from mediatord.store.interfaces.administration import QUEUE_PROTOCOLS, QueueProtocol
from mediatord.store.interfaces.messages import LEDGER_ENTRIES, MessageLedger, StoreLedger
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction, TransactionWork
from mediatord.store.mongo.schema import CARRIED_FORWARD_ID, LEDGER, NODES, PRESENT, QUEUES, SESSION_OWNERS

# Seconds for a read in all, and for counting queued messages.
LEDGER_TIMEOUT, _COUNT_TIMEOUT = 3.0, 1.5
# Queued messages of a protocol beyond which they are not counted.
_COUNT_LIMIT = 1_000_000

T = TypeVar("T")


def build_ledger_entries(slot: SessionSlot, protocol: QueueProtocol, **more: int) -> list[MongoCommand]:
    """
    Build the update that adds to the ledger.

    :param slot: of the transaction.
    :param more: number of messages by entry; see :class:`~mediatord.store.interfaces.messages.MessageLedger`.
    """
    change = {f"{protocol}.{entry}": number for entry, number in more.items() if number}
    if not change:
        return []
    return LEDGER.update({"_id": slot.id}, {"$inc": change, "$setOnInsert": {"owner": slot.owner}}, upsert=True)


async def read_nothing(_: Transaction) -> None:
    """For :func:`read_ledger_with`, to read the ledger alone."""


async def read_ledger_with(run: Operation, work: TransactionWork[T]) -> tuple[StoreLedger, T]:
    """
    Read the ledger, and what `work` finds in the same snapshot; count queued messages if possible.

    :param run: an operation of :data:`LEDGER_TIMEOUT`.
    """
    # From metadata, which may be wrong after a crash of the server, but costs nothing.
    replies = [await run.command(one.messages.count(), low_latency=True) for one in QUEUES.values()]
    if max([reply["n"] for reply in replies]) <= _COUNT_LIMIT:
        briefly = run.until(run.deadline - LEDGER_TIMEOUT + _COUNT_TIMEOUT)
        try:
            return await briefly.transact(partial(_read, work, QUEUE_PROTOCOLS), reading=True)
        except (ServerUnreachable, MongoCommandError):
            pass
    return await run.transact(partial(_read, work, ()), reading=True)


async def carry_forward(client: ReplicaSetClient) -> None:
    """Add the documents of dead processes to one; one that is alive after all goes on with a new document."""

    async def carry(transaction: Transaction) -> None:
        owners, nodes = await transaction.query_many(
            SESSION_OWNERS.find({}, projection={"_id": 1}), NODES.find({}, projection={"_id": 1})
        )
        alive = [one["_id"] for one in (*owners, *nodes)]
        documents = await transaction.query(LEDGER.find({"owner": {**PRESENT, "$nin": alive}}))
        if not documents:
            return
        sums = _sum_entries(documents)
        more = {
            f"{protocol}.{entry}": sums[protocol][entry] for protocol in QUEUE_PROTOCOLS for entry in LEDGER_ENTRIES
        }
        transaction.write_at_end(
            LEDGER.delete({"_id": {"$in": [one["_id"] for one in documents]}}),
            LEDGER.update({"_id": CARRIED_FORWARD_ID}, {"$inc": more}, upsert=True),
        )

    await client.transact("ledger", carry)


async def _read(
    work: TransactionWork[T], counted: Sequence[QueueProtocol], transaction: Transaction
) -> tuple[StoreLedger, T]:
    """:param counted: the protocols of which queued messages are counted, all or none."""
    found = await work(transaction)
    # By keys alone.
    counting: list[Document] = [{"$limit": _COUNT_LIMIT + 1}, {"$count": "n"}]
    documents, *counts = await transaction.query_many(
        LEDGER.find({}), *[QUEUES[protocol].messages.aggregate(counting, hint="_id_") for protocol in counted]
    )
    waiting: list[int | None] = [sum([one["n"] for one in count]) for count in counts]
    if not waiting or any(number is None or number > _COUNT_LIMIT for number in waiting):
        waiting = [None for _ in QUEUE_PROTOCOLS]
    sums = _sum_entries(documents)
    didcomm, decentrl = [
        MessageLedger(**sums[protocol], waiting=number)
        for protocol, number in zip(QUEUE_PROTOCOLS, waiting, strict=True)
    ]
    return StoreLedger(didcomm, decentrl), found


def _sum_entries(documents: Sequence[Document]) -> dict[QueueProtocol, dict[str, int]]:
    return {
        protocol: {entry: sum([one.get(protocol, {}).get(entry, 0) for one in documents]) for entry in LEDGER_ENTRIES}
        for protocol in QUEUE_PROTOCOLS
    }
