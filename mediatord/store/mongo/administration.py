"""Listings and removals for the operator, in MongoDB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from mediatord.store.mongo import accounts
from mediatord.store.mongo.accounts import RecipientDIDCache
from mediatord.store.mongo.decentrl_parties import (
    build_party_changes,
    build_party_documents_query,
    build_party_query,
    find_party,
    make_party_key,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document
from mediatord.store.mongo.driver.executor import OperationExecutor, retry_on_duplicate_key, start_operation
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.ledger_entries import build_ledger_entries
from mediatord.store.mongo.removal import LateCommitReporter, RemovalRequest, RemoveBatchOperation
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, PARTIES, PENDING_EVENTS, RECIPIENTS

_DID_COLLECTIONS = (ACCOUNTS, RECIPIENTS, PARTIES)
_NON_EMPTY = {"waited_for": True}
# For each protocol: the collection with the counters of queues, the names of the counters, the collection of entries
# and the field of an entry that names its queue.
_QUEUE_COUNTERS: dict[QueueProtocol, tuple[str, str, str, str, str]] = {
    "didcomm": (RECIPIENTS, "messages", "bytes", MESSAGES, "recipient"),
    "decentrl": (PARTIES, PENDING_EVENTS.counter, PENDING_EVENTS.bytes, PENDING_EVENTS.name, "party"),
}
_MESSAGE_FIELDS = ("account", "size", "received_at", "expires_at", "delivered", "pushes", "due_at", "seq")


@implementer(IStoreAdministration)
class MongoStoreAdministration:
    """:param forget_accounts: called after a change of accounts, which may be cached."""

    def __init__(
        self, client: ReplicaSetClient, did_cache: RecipientDIDCache, forget_accounts: Callable[[], None]
    ) -> None:
        self._client = client
        self._forget_accounts = forget_accounts
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None
        reporter = LateCommitReporter(lambda removed: self.on_late_purge("didcomm", removed))
        self._remove_messages = RemoveBatchOperation(did_cache, reporter, "removed")

    def list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> Deferred[list[QueueInfo]]:
        return start_operation(self._list_queues(protocols, offset, limit))

    async def _list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> list[QueueInfo]:
        found: list[tuple[QueueProtocol, Document]] = []
        for half in protocols:
            counters, messages, size, _, _ = _QUEUE_COUNTERS[half]
            fields = {"did": 1, "account": 1, messages: 1, size: 1}
            longest = await self._find(
                counters, _NON_EMPTY, sort={messages: -1}, limit=offset + limit, projection=fields
            )
            found += [(half, {**one, "n": one[messages], "size": one[size]}) for one in longest]
        page = sorted(found, key=lambda one: -one[1]["n"])[offset : offset + limit]
        account_dids = await self._find_account_dids([one for _, one in page])
        queues = []
        for half, one in page:
            _, _, _, entries, key = _QUEUE_COUNTERS[half]
            oldest = await self._find(
                entries, {key: one["_id"]}, sort={"seq": 1}, limit=1, projection={"received_at": 1}
            )
            account = account_dids[one["account"]] if one.get("account") in account_dids else str(one["did"])
            received_at = oldest[0]["received_at"] if oldest else None
            queues.append(QueueInfo(half, one["did"], account, one["n"], one["size"], received_at))
        return queues

    def sum_queues(self, protocols: Sequence[QueueProtocol]) -> Deferred[QueueListTotals]:
        return start_operation(self._sum_queues(protocols))

    async def _sum_queues(self, protocols: Sequence[QueueProtocol]) -> QueueListTotals:
        sums = [0, 0, 0]
        for half in protocols:
            counters, messages, size, _, _ = _QUEUE_COUNTERS[half]
            total = {
                "_id": None,
                "n": {"$sum": 1},
                "messages": {"$sum": f"${messages}"},
                "bytes": {"$sum": f"${size}"},
            }
            for one in await self._client.aggregate(
                "administration", counters, [{"$match": _NON_EMPTY}, {"$group": total}]
            ):
                sums = [sums[0] + one["n"], sums[1] + one["messages"], sums[2] + one["bytes"]]
        return QueueListTotals(*sums)

    def list_dids(self, after: str, limit: int) -> Deferred[DIDPage]:
        return start_operation(self._list_dids(after, limit))

    async def _list_dids(self, after: str, limit: int) -> DIDPage:
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

    def find_did(self, did: str) -> Deferred[str | None]:
        return start_operation(self._find_did(did))

    async def _find_did(self, did: str) -> str | None:
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
            parties, found = await transaction.ask(
                build_party_query(did),
                build_party_documents_query(PENDING_EVENTS, did, list(ids), {"received_at": 1}),
            )
            transaction.write_at_end(build_party_changes(PENDING_EVENTS, find_party(parties, did), gone=found))
            transaction.write_at_end(build_ledger_entries(transaction.page, "decentrl", removed=len(found)))
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

    def count_accounts(self) -> Deferred[int]:
        return start_operation(self._count_accounts())

    async def _count_accounts(self) -> int:
        counted = await self._client.aggregate(
            "administration", ACCOUNTS, [{"$group": {"_id": None, "n": {"$sum": 1}}}]
        )
        return int(counted[0]["n"]) if counted else 0

    def find_account(self, did: str) -> Deferred[AccountSummary | None]:
        return start_operation(self._find_account(did))

    async def _find_account(self, did: str) -> AccountSummary | None:
        return next(iter(await self._summarize({"did": did})), None)

    def list_queued_dids(self, account: str) -> Deferred[list[str]]:
        return start_operation(self._list_queued_dids(account))

    async def _list_queued_dids(self, account: str) -> list[str]:
        found = await self._find(ACCOUNTS, {"did": account}, projection={"_id": 1})
        condition = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        return [one["did"] for one in await self._find(RECIPIENTS, condition, projection={"did": 1})]

    def unregister_recipients(self, account: str) -> Deferred[None]:
        return self._change("unregister_recipients", partial(accounts.unregister_recipients, did=account))

    def remove_account(self, account: str) -> Deferred[bool]:
        return self._change("remove_account", partial(accounts.remove_account, did=account))

    def _change(self, name: str, work: Callable[[Transaction], Any]) -> Deferred[Any]:
        def forget(result: Any) -> Any:
            self._forget_accounts()
            return result

        return start_operation(retry_on_duplicate_key(lambda: self._client.transact(name, work))).addBoth(forget)

    async def _find(self, collection: str, condition: Document, **options: Any) -> list[Document]:
        return await self._client.find("administration", collection, condition, **options)

    async def _find_account_dids(self, documents: Sequence[Document]) -> dict[Any, str]:
        """DIDs of the accounts that documents name, by the ids of the accounts."""
        ids = list({one["account"] for one in documents if "account" in one})
        found = await self._find(ACCOUNTS, {"_id": {"$in": ids}}, projection={"did": 1}) if ids else []
        return {one["_id"]: one["did"] for one in found}

    async def _summarize(self, condition: Document | None = None, **options: Any) -> list[AccountSummary]:
        found = await self._find(ACCOUNTS, condition or {}, **options)
        queued = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        total = {"_id": "$account", "messages": {"$sum": "$messages"}, "bytes": {"$sum": "$bytes"}}
        pipeline: list[Document] = [{"$match": queued}, {"$group": total}]
        sums = {one["_id"]: one for one in await self._client.aggregate("administration", RECIPIENTS, pipeline)}
        empty: Document = {"messages": 0, "bytes": 0}
        return [
            AccountSummary(
                did=one["did"],
                created_at=one["created_at"],
                seen_at=one["seen_at"] if "seen_at" in one else one["created_at"],
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
