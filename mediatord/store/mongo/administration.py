"""Administration of the MongoDB store: listing of queues and accounts, purge and removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bson import ObjectId, Timestamp
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
from mediatord.store.mongo.accounts import build_account_deletes
from mediatord.store.mongo.decentrl_parties import (
    build_party_documents_query,
    build_party_query,
    find_party,
    make_party_key,
)
from mediatord.store.mongo.decentrl_store import build_pending_removal
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection, Document, MongoCommand
from mediatord.store.mongo.driver.operation import operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork, UndoCallback
from mediatord.store.mongo.removal import RemovalBatch, RemovalRequest, UncertainRemovalReporter
from mediatord.store.mongo.schema import (
    ACCOUNTS,
    PARTIES,
    PENDING_EVENTS,
    QUEUES,
    RECIPIENTS,
    V1_CONNECTIONS,
)

T = TypeVar("T")

_DID_COLLECTIONS = {one.name: one for one in (ACCOUNTS, RECIPIENTS, PARTIES)}
_NON_EMPTY = {"waited_for": True}
_MESSAGE_FIELDS = ("account", "size", "received_at", "expires_at", "delivered", "pushes", "due_at", "seq")


@implementer(IStoreAdministration)
class MongoStoreAdministration:
    """
    Implements the operator's commands.

    :param forget_accounts: called after a change of accounts, which may be cached.
    """

    def __init__(self, client: ReplicaSetClient, forget_accounts: Callable[[], None]) -> None:
        self._client = client
        self._forget_accounts = forget_accounts
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None
        reporter = UncertainRemovalReporter(lambda removed: self.on_late_purge("didcomm", removed))
        self._remove_messages = RemovalBatch(reporter, "removed")

    @operation
    async def list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> list[QueueInfo]:
        found: list[tuple[QueueProtocol, Document]] = []
        for protocol in protocols:
            queues = QUEUES[protocol]
            fields = {"did": 1, "account": 1, queues.counter: 1, queues.bytes: 1}
            longest = queues.owners.find(
                _NON_EMPTY, sort={queues.counter: -1}, limit=offset + limit, projection=fields
            )
            found += [(protocol, one) for one in await self._query(longest)]
        page = sorted(found, key=lambda one: -one[1][QUEUES[one[0]].counter])[offset : offset + limit]
        account_dids = await self._find_account_dids([one for _, one in page])
        infos = []
        for protocol, one in page:
            queues = QUEUES[protocol]
            oldest = await self._query(queues.build_first_query(one["_id"]))
            account = str(account_dids.get(one.get("account"), one["did"]))
            received_at = oldest[0]["received_at"] if oldest else None
            infos.append(
                QueueInfo(protocol, one["did"], account, one[queues.counter], one[queues.bytes], received_at)
            )
        return infos

    @operation
    async def sum_queues(self, protocols: Sequence[QueueProtocol]) -> QueueListTotals:
        sums = [0, 0, 0]
        for protocol in protocols:
            for one in await self._query(QUEUES[protocol].build_sum_query()):
                sums = [sums[0] + one["queues"], sums[1] + one["messages"], sums[2] + one["bytes"]]
        return QueueListTotals(*sums)

    @operation
    async def list_dids(self, after: str, limit: int) -> DIDPage:
        names = list(_DID_COLLECTIONS)
        name, _, last = (after or f"{names[0]}:").partition(":")
        condition: Document = {}
        if last:
            condition = {"_id": {"$gt": bytes.fromhex(last) if name == PARTIES.name else ObjectId(last)}}
        query = _DID_COLLECTIONS[name].find(condition, sort={"_id": 1}, limit=limit, projection={"did": 1})
        found = await self._query(query)
        following: str | None = None
        if len(found) == limit:
            key = found[-1]["_id"]
            following = f"{name}:{bytes(key).hex() if name == PARTIES.name else key}"
        elif name != names[-1]:
            following = f"{names[names.index(name) + 1]}:"
        return DIDPage([one["did"] for one in found], following)

    @operation
    async def find_did(self, did: str) -> str | None:
        canonical = canonicalize_did(did)
        conditions: tuple[tuple[Collection, Document], ...] = (
            (PARTIES, {"_id": make_party_key(did)}),
            (RECIPIENTS, {"did_digest": compute_did_digest(did)}),
            (ACCOUNTS, {"did": canonical}),
            (PARTIES, {"_id": make_party_key(canonical)}),
        )
        for collection, condition in conditions:
            found = await self._query(collection.find(condition, limit=1, projection={"did": 1}))
            if found:
                return str(found[0]["did"])
        return None

    @operation
    async def list_entries(self, did: str, protocol: QueueProtocol, after: str, limit: int) -> EntryPage:
        mine: Document = {"party": make_party_key(did)}
        if protocol == "didcomm":
            query = RECIPIENTS.find({"did_digest": compute_did_digest(did)}, projection={"_id": 1})
            mine = {"recipient": {"$in": [one["_id"] for one in await self._query(query)]}}
        if after:
            time, increment = after.split(".")
            mine["seq"] = {"$gt": Timestamp(int(time), int(increment))}
        entries = QUEUES[protocol].messages.find(
            mine,
            sort={"seq": 1},
            limit=limit,
            projection=dict.fromkeys(_MESSAGE_FIELDS, 1),
        )
        found = await self._query(entries)
        following = f"{found[-1]['seq'].time}.{found[-1]['seq'].inc}" if len(found) == limit else None
        account_dids, unknown = await self._find_account_dids(found), did if protocol == "decentrl" else ""
        messages = [
            QueuedMessage(
                protocol=protocol,
                id=one["_id"],
                did=did,
                account=account_dids.get(one.get("account"), unknown),
                size=one["size"],
                received_at=one["received_at"],
                expires_at=one.get("expires_at"),
                status="delivered" if "delivered" in one else "pending",
                pushes=one.get("pushes", 0),
                due_at=one.get("due_at"),
            )
            for one in found
        ]
        return EntryPage(messages, following)

    @operation
    async def purge(self, did: str, protocol: QueueProtocol, ids: Sequence[str]) -> list[RemovedMessage]:
        if protocol == "didcomm":
            work = [RemovalRequest(list(ids))]
            with self._client.operate("purge") as run:
                (removed,) = await self._remove_messages(run, work, None)
            return removed
        return await self._purge_events(did, ids)

    async def _purge_events(self, did: str, ids: Sequence[str]) -> list[RemovedMessage]:
        removed: list[RemovedMessage] = []
        reporter = UncertainRemovalReporter(lambda removed: self.on_late_purge("decentrl", removed))

        async def remove(transaction: Transaction) -> list[RemovedMessage]:
            parties, found = await transaction.query_many(
                build_party_query(did), build_party_documents_query(PENDING_EVENTS, did, ids, {"received_at": 1})
            )
            writes, removed[:] = build_pending_removal(find_party(parties, did), found, transaction.slot, "removed")
            transaction.write_at_end(writes)
            return removed

        async def report(transaction: Transaction) -> UndoCallback | None:
            return await reporter.find_missing(transaction, PENDING_EVENTS, removed)

        return await self._client.transact("purge", remove, undo=report)

    @operation
    async def list_accounts(self, offset: int, limit: int) -> list[AccountSummary]:
        return await self._summarize(ACCOUNTS.find({}, sort={"created_at": -1, "_id": -1}, skip=offset, limit=limit))

    @operation
    async def count_accounts(self) -> int:
        total: Document = {"$group": {"_id": None, "n": {"$sum": 1}}}
        return sum([one["n"] for one in await self._query(ACCOUNTS.aggregate([total]))])

    @operation
    async def find_account(self, did: str) -> AccountSummary | None:
        return next(iter(await self._summarize(ACCOUNTS.find({"did": did}))), None)

    @operation
    async def list_queued_dids(self, account: str) -> list[str]:
        found = await self._query(ACCOUNTS.find({"did": account}, projection={"_id": 1}))
        condition = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        return [one["did"] for one in await self._query(RECIPIENTS.find(condition, projection={"did": 1}))]

    @operation
    async def unregister_recipients(self, account: str) -> None:
        async def unregister(transaction: Transaction) -> None:
            for one in await transaction.query(ACCOUNTS.find({"did": account}, projection={"_id": 1})):
                mine = {"account": one["_id"]}
                transaction.write_at_end(
                    ACCOUNTS.update({"_id": one["_id"]}, {"$set": {"recipients": 0}, "$unset": {"fresh": 1}}),
                    RECIPIENTS.delete({**mine, "messages": 0}),
                    RECIPIENTS.update(mine, {"$unset": {"registered": 1, "names": 1}}, multi=True),
                )

        await self._change("unregister_recipients", unregister)

    @operation
    async def remove_account(self, account: str) -> bool:
        async def remove(transaction: Transaction) -> bool:
            found = await transaction.query(ACCOUNTS.find({"did": account}, projection={"_id": 1}))
            if not found:
                return False
            id = found[0]["_id"]
            if await transaction.query(RECIPIENTS.find({"account": id, "messages": {"$gt": 0}}, limit=1)):
                return False
            transaction.write_at_end(build_account_deletes(id, account))
            return True

        return await self._change("remove_account", remove)

    async def _change(self, name: str, work: TransactionWork[T]) -> T:
        try:
            return await self._client.transact(name, work)
        finally:
            self._forget_accounts()

    async def _query(self, query: MongoCommand) -> list[Document]:
        return await self._client.query("administration", query)

    async def _find_account_dids(self, documents: Sequence[Document]) -> dict[Any, str]:
        """Find the DIDs of the accounts of documents, by the ids of the accounts."""
        ids = {"_id": {"$in": list({one["account"] for one in documents if "account" in one})}}
        return {one["_id"]: one["did"] for one in await self._query(ACCOUNTS.find(ids, projection={"did": 1}))}

    async def _summarize(self, query: MongoCommand) -> list[AccountSummary]:
        """:param query: for accounts."""
        found = await self._query(query)
        queued = {"account": {"$in": [one["_id"] for one in found]}, "messages": {"$gt": 0}}
        total = {"_id": "$account", "messages": {"$sum": "$messages"}, "bytes": {"$sum": "$bytes"}}
        pipeline: list[Document] = [{"$match": queued}, {"$group": total}]
        sums = {one["_id"]: one for one in await self._query(RECIPIENTS.aggregate(pipeline))}
        empty: Document = {"messages": 0, "bytes": 0}
        own = {"_id": {"$in": [one["did"] for one in found]}}
        connections = await self._query(V1_CONNECTIONS.find(own, projection={"created_at": 1}))
        connected_at = {one["_id"]: one["created_at"] for one in connections}
        return [
            AccountSummary(
                did=one["did"],
                created_at=one["created_at"],
                seen_at=one["seen_at"],
                used="fresh" not in one,
                recipients=one["recipients"],
                messages=sums.get(one["_id"], empty)["messages"],
                bytes=sums.get(one["_id"], empty)["bytes"],
                protocol="didcomm_v1" if one["did"] in connected_at else "didcomm",
                connected_at=connected_at.get(one["did"]),
            )
            for one in found
        ]
