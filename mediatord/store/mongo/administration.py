"""Administration of the MongoDB store: listing of queues and accounts, purge and removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack

from bson import ObjectId, Timestamp
from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.administration import (
    AccountSummary,
    DIDPage,
    EntryPage,
    IStoreAdministration,
    LatePurgeListener,
    QueuedMessage,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.mongo.accounts import RecipientDIDCache, build_account_deletes
from mediatord.store.mongo.decentrl_parties import (
    build_party_changes,
    build_party_documents_query,
    build_party_query,
    find_party,
    make_party_key,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, FindOptions, build_aggregate, build_deletes, build_updates
from mediatord.store.mongo.driver.executor import (
    OperationExecutor,
    operation,
    retry_on_duplicate_key,
    start_operation,
)
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.removal import LateCommitReporter, RemovalRequest, RemoveBatchOperation
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, PARTIES, PENDING_EVENTS, QUEUES, RECIPIENTS

T = TypeVar("T")

_DID_COLLECTIONS = (ACCOUNTS, RECIPIENTS, PARTIES)
_NON_EMPTY = {"waited_for": True}
_MESSAGE_FIELDS = ("account", "size", "received_at", "expires_at", "delivered", "pushes", "due_at", "seq")


@implementer(IStoreAdministration)
class MongoStoreAdministration:
    """
    Implements the operator's commands.

    :param forget_accounts: called after a change of accounts, which may be cached.
    """

    def __init__(
        self, client: ReplicaSetClient, did_cache: RecipientDIDCache, forget_accounts: Callable[[], None]
    ) -> None:
        self._client = client
        self._forget_accounts = forget_accounts
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None
        reporter = LateCommitReporter(lambda removed: self.on_late_purge("didcomm", removed))
        self._remove_messages = RemoveBatchOperation(did_cache, reporter, "removed")

    @operation
    async def list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> list[QueueInfo]:
        found: list[tuple[QueueProtocol, Document]] = []
        for half in protocols:
            queues = QUEUES[half]
            fields = {"did": 1, "account": 1, queues.counter: 1, queues.bytes: 1}
            longest = await self._find(
                queues.owners, _NON_EMPTY, sort={queues.counter: -1}, limit=offset + limit, projection=fields
            )
            found += [(half, {**one, "n": one[queues.counter], "size": one[queues.bytes]}) for one in longest]
        page = sorted(found, key=lambda one: -one[1]["n"])[offset : offset + limit]
        account_dids = await self._find_account_dids([one for _, one in page])
        infos = []
        for half, one in page:
            queues = QUEUES[half]
            oldest = await self._find(
                queues.messages, {queues.owner: one["_id"]}, sort={"seq": 1}, limit=1, projection={"received_at": 1}
            )
            account = account_dids[one["account"]] if one.get("account") in account_dids else str(one["did"])
            received_at = oldest[0]["received_at"] if oldest else None
            infos.append(QueueInfo(half, one["did"], account, one["n"], one["size"], received_at))
        return infos

    @operation
    async def sum_queues(self, protocols: Sequence[QueueProtocol]) -> QueueListTotals:
        sums = [0, 0, 0]
        for queues in map(QUEUES.__getitem__, protocols):
            total = {
                "_id": None,
                "n": {"$sum": 1},
                "messages": {"$sum": f"${queues.counter}"},
                "bytes": {"$sum": f"${queues.bytes}"},
            }
            for one in await self._aggregate(queues.owners, [{"$match": _NON_EMPTY}, {"$group": total}]):
                sums = [sums[0] + one["n"], sums[1] + one["messages"], sums[2] + one["bytes"]]
        return QueueListTotals(*sums)

    @operation
    async def list_dids(self, after: str, limit: int) -> DIDPage:
        collection, _, last = (after or f"{_DID_COLLECTIONS[0]}:").partition(":")
        number = _DID_COLLECTIONS.index(collection)
        condition: Document = {}
        if last:
            condition = {"_id": {"$gt": bytes.fromhex(last) if collection == PARTIES else ObjectId(last)}}
        found = await self._find(collection, condition, sort={"_id": 1}, limit=limit, projection={"did": 1})
        if len(found) == limit:
            key = found[-1]["_id"]
            following: str | None = f"{collection}:{bytes(key).hex() if collection == PARTIES else key}"
        else:
            following = f"{_DID_COLLECTIONS[number + 1]}:" if number + 1 < len(_DID_COLLECTIONS) else None
        return DIDPage([one["did"] for one in found], following)

    @operation
    async def find_did(self, did: str) -> str | None:
        canonical = canonicalize_did(did)
        queries: tuple[tuple[str, Document], ...] = (
            (PARTIES, {"_id": make_party_key(did)}),
            (RECIPIENTS, {"did_digest": compute_did_digest(did)}),
            (ACCOUNTS, {"did": canonical}),
            (PARTIES, {"_id": make_party_key(canonical)}),
        )
        for collection, condition in queries:
            found = await self._find(collection, condition, limit=1, projection={"did": 1})
            if found:
                return str(found[0]["did"])
        return None

    def list_entries(self, did: str, protocol: QueueProtocol, after: str, limit: int) -> Deferred[EntryPage]:
        return start_operation(
            self._list_messages(did, after, limit) if protocol == "didcomm" else self._list_events(did, after, limit)
        )

    async def _list_messages(self, did: str, after: str, limit: int) -> EntryPage:
        recipients = await self._find(RECIPIENTS, {"did_digest": compute_did_digest(did)}, projection={"_id": 1})
        found = await self._find(
            MESSAGES,
            {"recipient": {"$in": [one["_id"] for one in recipients]}, **_build_seq_filter(after)},
            sort={"seq": 1},
            limit=limit,
            projection=dict.fromkeys(_MESSAGE_FIELDS, 1),
        )
        account_dids = await self._find_account_dids(found)
        entries = [
            QueuedMessage(
                half="didcomm",
                id=one["_id"],
                did=did,
                account=account_dids.get(one["account"], ""),
                size=one["size"],
                received_at=one["received_at"],
                expires_at=one["expires_at"],
                status="delivered" if "delivered" in one else "pending",
                pushes=one["pushes"],
                due_at=one.get("due_at"),
            )
            for one in found
        ]
        return EntryPage(entries, _make_seq_cursor(found, limit))

    async def _list_events(self, did: str, after: str, limit: int) -> EntryPage:
        found = await self._find(
            PENDING_EVENTS.name,
            {"party": make_party_key(did), **_build_seq_filter(after)},
            sort={"seq": 1},
            limit=limit,
            projection={"size": 1, "received_at": 1, "seq": 1},
        )
        entries = [QueuedMessage("decentrl", one["_id"], did, did, one["size"], one["received_at"]) for one in found]
        return EntryPage(entries, _make_seq_cursor(found, limit))

    def purge(self, did: str, protocol: QueueProtocol, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return start_operation(self._purge_messages(ids) if protocol == "didcomm" else self._purge_events(did, ids))

    async def _purge_messages(self, ids: Sequence[str]) -> list[RemovedMessage]:
        async def remove(executor: OperationExecutor, deadline: float) -> Sequence[list[RemovedMessage]]:
            return await self._remove_messages(executor, [RemovalRequest(list(ids))], deadline, None)

        (removed,) = await self._client.operate("purge", remove)
        return removed

    async def _purge_events(self, did: str, ids: Sequence[str]) -> list[RemovedMessage]:
        removed: list[RemovedMessage] = []

        async def remove(transaction: Transaction) -> None:
            parties, found = await transaction.query_many(
                build_party_query(did),
                build_party_documents_query(PENDING_EVENTS, did, list(ids), {"received_at": 1}),
            )
            transaction.write_at_end(build_party_changes(PENDING_EVENTS, find_party(parties, did), gone=found))
            transaction.write_at_end(build_ledger_entries(transaction.slot, "decentrl", removed=len(found)))
            removed[:] = [RemovedMessage(one["_id"], did, did, one["size"], one["received_at"], 0) for one in found]

        async def report_late(transaction: Transaction) -> UndoCallback | None:
            condition = {"_id": {"$in": [one.id for one in removed]}}
            left = {one["_id"] for one in await transaction.find(PENDING_EVENTS.name, condition, hint="_id_")}
            gone = [one for one in removed if one.id not in left]
            return partial(self.on_late_purge, "decentrl", gone) if gone else None

        await retry_on_duplicate_key(lambda: self._client.transact("purge", remove, undo=report_late))
        return removed

    def list_accounts(self, offset: int, limit: int) -> Deferred[list[AccountSummary]]:
        return start_operation(self._summarize(sort={"created_at": -1, "_id": -1}, skip=offset, limit=limit))

    @operation
    async def count_accounts(self) -> int:
        counted = await self._aggregate(ACCOUNTS, [{"$group": {"_id": None, "n": {"$sum": 1}}}])
        return int(counted[0]["n"]) if counted else 0

    @operation
    async def find_account(self, did: str) -> AccountSummary | None:
        return next(iter(await self._summarize({"did": did})), None)

    @operation
    async def list_queued_dids(self, account: str) -> list[str]:
        found = await self._find(ACCOUNTS, {"did": account}, projection={"_id": 1})
        condition = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        return [one["did"] for one in await self._find(RECIPIENTS, condition, projection={"did": 1})]

    @operation
    async def unregister_recipients(self, account: str) -> None:
        async def unregister(transaction: Transaction) -> None:
            found = await transaction.find(ACCOUNTS, {"did": account}, projection={"_id": 1})
            if not found:
                return
            mine = {"account": found[0]["_id"]}
            change = {"$set": {"recipients": 0}, "$unset": {"fresh": 1}}
            transaction.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": change}]))
            transaction.write_at_end(build_deletes(RECIPIENTS, {**mine, "messages": 0}))
            unregistered = {"$unset": {"registered": 1, "names": 1}}
            transaction.write_at_end(build_updates(RECIPIENTS, [{"q": mine, "u": unregistered, "multi": True}]))

        await self._change("unregister_recipients", unregister)

    @operation
    async def remove_account(self, account: str) -> bool:
        async def remove(transaction: Transaction) -> bool:
            found = await transaction.find(ACCOUNTS, {"did": account}, projection={"_id": 1})
            if not found:
                return False
            id = found[0]["_id"]
            if await transaction.find(RECIPIENTS, {"account": id, "messages": {"$gt": 0}}, limit=1):
                return False
            transaction.write_at_end(build_account_deletes(id, account))
            return True

        return await self._change("remove_account", remove)

    async def _change(self, name: str, work: TransactionWork[T]) -> T:
        try:
            return await retry_on_duplicate_key(lambda: self._client.transact(name, work))
        finally:
            self._forget_accounts()

    async def _find(self, collection: str, filter: Document, **options: Unpack[FindOptions]) -> list[Document]:
        return await self._client.find("administration", collection, filter, **options)

    async def _aggregate(self, collection: str, pipeline: Sequence[Document]) -> list[Document]:
        return await self._client.query("administration", build_aggregate(collection, pipeline))

    async def _find_account_dids(self, documents: Sequence[Document]) -> dict[Any, str]:
        """Find the DIDs of the accounts of documents, by the ids of the accounts."""
        ids = list({one["account"] for one in documents if "account" in one})
        found = await self._find(ACCOUNTS, {"_id": {"$in": ids}}, projection={"did": 1}) if ids else []
        return {one["_id"]: one["did"] for one in found}

    async def _summarize(
        self, condition: Document | None = None, **options: Unpack[FindOptions]
    ) -> list[AccountSummary]:
        found = await self._find(ACCOUNTS, condition or {}, **options)
        queued = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        total = {"_id": "$account", "messages": {"$sum": "$messages"}, "bytes": {"$sum": "$bytes"}}
        pipeline: list[Document] = [{"$match": queued}, {"$group": total}]
        sums = {one["_id"]: one for one in await self._aggregate(RECIPIENTS, pipeline)}
        empty: Document = {"messages": 0, "bytes": 0}
        return [
            AccountSummary(
                did=one["did"],
                created_at=one["created_at"],
                seen_at=one["seen_at"],
                used="fresh" not in one,
                recipients=one["recipients"],
                messages=sums.get(one["_id"], empty)["messages"],
                bytes=sums.get(one["_id"], empty)["bytes"],
            )
            for one in found
        ]


def _build_seq_filter(after: str) -> Document:
    if not after:
        return {}
    time, increment = after.split(".")
    return {"seq": {"$gt": Timestamp(int(time), int(increment))}}


def _make_seq_cursor(found: Sequence[Document], limit: int) -> str | None:
    return f"{found[-1]['seq'].time}.{found[-1]['seq'].inc}" if len(found) == limit else None
