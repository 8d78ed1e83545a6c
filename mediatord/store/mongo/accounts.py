"""Accounts, their recipient DIDs, and caches of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from bson import ObjectId
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediationNotGranted, StoreUnavailable
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.caches import OwnerCache
from mediatord.store.interfaces.messages import is_valid_unicode
from mediatord.store.interfaces.store import (
    FIRST_DAY_SECONDS,
    Account,
    AccountUsage,
    ExpiredAccount,
    ExpiryReason,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.mongo import schema
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.operation import Operation, operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.schema import (
    ABSENT,
    ACCOUNTS,
    LONG_FORM_DIDS,
    PRESENT,
    RECIPIENTS,
    RETIRED_DIDS,
    V1_CONNECTIONS,
)
from mediatord.store.mongo.space_limit import MongoSpaceLimit
from mediatord.store.mongo.transaction_batcher import TransactionBatcher
from mediatord.store.mongo.v1_connections import MongoV1ConnectionStore, build_granted_updates
from mediatord.store.registered_spellings import MAX_REGISTERED_SPELLINGS, RegisteredSpellings, slice_spellings

K = TypeVar("K")
V = TypeVar("V")

# DIDs in a cache, and the length of the longest.
_DID_CACHE_SIZE = 16_384
_MAX_CACHED_DID_LENGTH = 2_048
# Seconds; a stale owner is noticed when a message is queued.
_OWNER_LIFETIME = 2.0
_LOOKUPS_AT_ONCE = 2
# A recipient DID of an account with queued messages.
_QUEUED_MESSAGE_LOOKUP = {
    "from": RECIPIENTS.name,
    "localField": "_id",
    "foreignField": "account",
    "pipeline": [{"$match": {"messages": {"$gt": 0}}}, {"$limit": 1}, {"$project": {"_id": 1}}],
    "as": "mail",
}


class MongoAccountStore:
    """
    Accounts of the store; see `IAccountStore`.

    :param clock: for times of contact.
    :ivar space_limit: refuses writes that need more space.
    """

    def __init__(self, client: ReplicaSetClient, clock: IReactorTime, space_limit: MongoSpaceLimit) -> None:
        self._client = client
        self._clock = clock
        self._owner_cache: OwnerCache[str] = OwnerCache(now=client.clock.seconds, lifetime=_OWNER_LIFETIME)
        self._account_cache: OwnerCache[Account] = OwnerCache(
            now=client.clock.seconds, lifetime=_OWNER_LIFETIME, length=lambda account: len(account.did)
        )
        self._lookup_batcher = TransactionBatcher(client, "lookup", at_once=_LOOKUPS_AT_ONCE)
        self.space_limit = space_limit
        self._v1_connections = MongoV1ConnectionStore(client, clock, space_limit, self._lookup_batcher)

    def get_account(self, did: str) -> Deferred[Account | None]:
        """Fire from the cache if it is recent enough; concurrent lookups share a query."""
        if not self._client.is_available:
            return fail(StoreUnavailable())
        account = self._account_cache.get(did)
        if account is not None:
            return succeed(account)
        return self._lookup_batcher.submit("account", self._find_accounts, did, ())

    async def _find_accounts(self, run: Operation, dids: Sequence[str], _: int | None) -> list[Account | None]:
        """Find accounts by DID; a BatchOperation."""
        age = self._account_cache.age
        found = await run.query(ACCOUNTS.find({"did": {"$in": list(set(dids))}}), low_latency=True)
        accounts = {one["did"]: _parse_account(one) for one in found}
        for did, account in accounts.items():
            self._account_cache.keep(did, account, age)
        return [accounts.get(did) for did in dids]

    def forget_accounts(self) -> None:
        """Forget what was cached, because accounts have changed."""
        self._account_cache.clear()
        self._owner_cache.clear()
        self._v1_connections.forget_connections()

    @operation
    async def grant(self, did: str) -> Account:
        self.space_limit.admit("grant")
        now = self._clock.seconds()

        async def grant(t: Transaction) -> Account:
            retired, found = await t.query_many(RETIRED_DIDS.find({"_id": did}), ACCOUNTS.find({"did": did}))
            if retired:
                raise MediationNotGranted()
            if found:
                return _parse_account(found[0])
            times = {"created_at": now, "seen_at": now, "fresh": True}
            account = {"did": did, **times, "draft03": False, "recipients": 0, "places": 0}
            t.write_at_end(ACCOUNTS.insert([account]), build_granted_updates([did]))
            return _parse_account(account)

        return await self._client.transact("grant", grant)

    @operation
    async def record_contact(self, did: str) -> None:
        now = self._clock.seconds()
        is_used = {"$gte": [{"$subtract": [now, "$created_at"]}, FIRST_DAY_SECONDS]}
        change: Document = {"$set": {"seen_at": now, "fresh": {"$cond": [is_used, "$$REMOVE", "$fresh"]}}}
        await self._change_account("touch", did, [change])

    @operation
    async def mark_draft03(self, did: str) -> None:
        await self._change_account("mark_draft03", did, {"$set": {"draft03": True}})

    async def _change_account(self, name: str, did: str, change: Document | list[Document]) -> None:
        try:
            await self._client.write(name, ACCOUNTS.update({"did": did}, change))
        finally:
            self._account_cache.forget([did])

    @operation
    async def move_account(self, prior: str, new: str) -> bool:
        self.space_limit.admit("move")

        async def move(t: Transaction) -> bool:
            found, retired = await t.query_many(
                ACCOUNTS.find({"did": {"$in": [prior, new]}}, projection={"did": 1}), RETIRED_DIDS.find({"_id": new})
            )
            if retired or prior == new or [one["did"] for one in found] != [prior]:
                return False
            renaming = ACCOUNTS.update({"_id": found[0]["_id"]}, {"$set": {"did": new}})
            moved = RECIPIENTS.update({"account": found[0]["_id"]}, {"$inc": {"moves": 1}}, multi=True)
            t.write_at_end(
                renaming,
                moved,
                RETIRED_DIDS.insert([{"_id": prior}]),
                V1_CONNECTIONS.delete({"_id": prior}),
                build_granted_updates([new]),
            )
            return True

        try:
            return await self._client.transact("move", move)
        finally:
            self.forget_accounts()

    @operation
    async def is_retired(self, did: str) -> bool:
        return bool(await self._client.query("is_retired", RETIRED_DIDS.find({"_id": did})))

    @operation
    async def remember_did(self, short: str, long: str) -> None:
        self.space_limit.admit("remember_did")
        update = LONG_FORM_DIDS.update({"_id": short}, {"$set": {"long": long}}, upsert=True)
        await self._client.write("remember_did", update)

    @operation
    async def recall_did(self, short: str) -> str | None:
        found = await self._client.query("recall_did", LONG_FORM_DIDS.find({"_id": short}))
        return found[0]["long"] if found else None

    @operation
    async def get_account_usage(self) -> AccountUsage:
        """Count accounts and bytes by the metadata, which may be a little wrong after a crash of the server."""
        with self._client.operate("account_usage") as run:
            stats = [
                await run.command(MongoCommand({"collStats": one.name}), low_latency=True)
                for one in (ACCOUNTS, RECIPIENTS, RETIRED_DIDS, LONG_FORM_DIDS, schema.REGISTRATIONS, V1_CONNECTIONS)
            ]
            return AccountUsage(stats[0]["count"], sum([one["size"] for one in stats]))

    @operation
    async def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> list[ExpiredAccount]:
        before = {"unused": unused_before or 0.0, "idle": idle_before or 0.0}
        expired: list[ExpiredAccount] = []
        tried: set[str] = set()
        # An unused account with messages is not `fresh` any more once it was tried, so others are found next.
        while not expired:
            found = await self._find_expiry_candidates(limit, unused_before, idle_before)
            if all(did in tried for did, _ in found):
                break
            for did, reason in found:
                tried.add(did)
                expiring = partial(_expire_account, did=did, reason=reason, before=before[reason])
                account = await self._client.transact("expire_accounts", expiring)
                if account is not None:
                    expired.append(account)
        if expired:
            self.forget_accounts()
        return expired

    async def _find_expiry_candidates(
        self, limit: int, unused_before: float | None, idle_before: float | None
    ) -> list[tuple[str, ExpiryReason]]:
        """Find accounts that may have expired; of the idle ones only those without queued messages."""
        found: list[tuple[str, ExpiryReason]] = []
        unqueued: list[Document] = [{"$lookup": _QUEUED_MESSAGE_LOOKUP}, {"$match": {"mail": []}}]
        searches: tuple[tuple[ExpiryReason, float | None, str, Document, list[Document]], ...] = (
            ("unused", unused_before, "created_at", {"fresh": PRESENT}, []),
            ("idle", idle_before, "seen_at", {}, unqueued),
        )
        for reason, before, time, condition, more in searches:
            if before is not None and len(found) < limit:
                match = {"$match": {**condition, time: {"$lte": before}}}
                last: list[Document] = [{"$limit": limit - len(found)}, {"$project": {"did": 1}}]
                query = ACCOUNTS.aggregate([match, {"$sort": {time: 1}}, *more, *last])
                found += [(one["did"], reason) for one in await self._client.query("expire_accounts", query)]
        return found

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        """Fire from the cache if it is recent enough; concurrent lookups share a query."""
        if not self._client.is_available:
            return fail(StoreUnavailable())
        did = canonicalize_did(recipient_did)
        account = self._owner_cache.get(did)
        if account is not None or not is_valid_unicode(did):
            return succeed(account)
        return self._lookup_batcher.submit("owner", self._find_owners, did, ())

    async def _find_owners(self, run: Operation, dids: Sequence[str], _: int | None) -> list[str | None]:
        """Find the accounts that have registered recipient DIDs; a BatchOperation."""
        age, digests = self._owner_cache.age, [compute_did_digest(did) for did in dids]
        lookup = {"from": ACCOUNTS.name, "localField": "account", "foreignField": "_id", "as": "owner"}
        registered = {"did_digest": {"$in": list(set(digests))}, "registered": PRESENT}
        query = RECIPIENTS.aggregate([{"$match": registered}, {"$lookup": lookup}])
        found = await run.query(query, low_latency=True)
        owners = {bytes(one["did_digest"]): one["owner"][0]["did"] for one in found}
        accounts = [owners.get(digest) for digest in digests]
        for did, account in zip(dids, accounts, strict=True):
            self._owner_cache.keep(did, account, age)
        return accounts

    @operation
    async def list_spellings(self, recipient_did: str) -> list[str]:
        query = RECIPIENTS.find({"did_digest": compute_did_digest(recipient_did), "registered": PRESENT})
        found = await self._client.query("spellings", query)
        return [name for one in found for _, name in _parse_spellings(one).spellings]

    @operation
    async def list_recipients(self, account: str, *, offset: int, limit: int) -> tuple[list[str], int]:
        async def read(t: Transaction) -> tuple[list[str], int]:
            found = await t.query(ACCOUNTS.find({"did": account}))
            if not found:
                return [], 0
            recipients: list[Document] = []
            if limit > 0:
                query = RECIPIENTS.find(
                    {"account": found[0]["_id"], "registered": PRESENT},
                    projection={"did": 1, "registered": 1, "names": 1},
                    sort={"registered": 1},
                    limit=offset + limit,
                )
                recipients = await t.query(query)
            return slice_spellings([_parse_spellings(one) for one in recipients], offset, limit), found[0][
                "recipients"
            ]

        return await self._client.transact("recipients", read, reading=True)

    @operation
    async def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> list[RecipientUpdateResult]:
        wanted = tuple(updates)
        self.space_limit.admit("update", shrinking=all(action == "remove" for _, action in wanted))

        async def update(t: Transaction) -> list[RecipientUpdateResult]:
            found = await t.query(ACCOUNTS.find({"did": account}))
            if not found:
                raise MediationNotGranted()
            same = {"did_digest": {"$in": list({compute_did_digest(name) for name, _ in wanted})}}
            registered, own = await t.query_many(
                RECIPIENTS.find({**same, "registered": PRESENT}),
                RECIPIENTS.find({**same, "account": found[0]["_id"]}),
            )
            existing = {bytes(one["did_digest"]): one for one in [*own, *registered]}
            change = _RecipientUpdate(found[0], max_recipients, existing)
            results = [change.apply(name, action) for name, action in wanted]
            t.write_at_end(change.build_writes())
            return results

        try:
            return await self._client.transact("update", update)
        finally:
            self._owner_cache.forget([canonicalize_did(name) for name, _ in wanted])


def _parse_account(document: Document) -> Account:
    return Account(document["did"], document["created_at"], document["draft03"], document["seen_at"])


async def _expire_account(t: Transaction, did: str, reason: ExpiryReason, before: float) -> ExpiredAccount | None:
    """Delete an account if the reason still holds; one that has received a message is not `fresh` any more."""
    time = "created_at" if reason == "unused" else "seen_at"
    found = await t.query(ACCOUNTS.find({"did": did, time: {"$lte": before}}))
    if not found or (reason == "unused" and "fresh" not in found[0]):
        return None
    id = found[0]["_id"]
    mail: Document = {"changes": {"$gt": 0}} if reason == "unused" else {"messages": {"$gt": 0}}
    if await t.query(RECIPIENTS.find({"account": id, **mail}, limit=1)):
        if reason == "unused":
            t.write_at_end(ACCOUNTS.update({"_id": id}, {"$unset": {"fresh": 1}}))
        return None
    t.write_at_end(build_account_deletes(id, did))
    return ExpiredAccount(did, found[0]["recipients"], reason)


def build_account_deletes(id: ObjectId, did: str) -> list[MongoCommand]:
    """Build the writes that delete an account with its recipient DIDs, devices and connection."""
    return [
        *RECIPIENTS.delete({"account": id}),
        *schema.DEVICES.delete({"owner": id}),
        *schema.WAKEUPS.delete({"_id": id}),
        *LONG_FORM_DIDS.delete({"_id": did}),
        *V1_CONNECTIONS.delete({"_id": did}),
        *ACCOUNTS.delete({"_id": id}),
    ]


class _RecipientUpdate:
    """
    Updates of the recipient DIDs of an account, in memory.

    :param existing: documents of recipient DIDs by digest, registered ones of any account before others of this one.
    """

    def __init__(self, account: Document, max_recipients: int, existing: dict[bytes, Document]) -> None:
        self._account = account
        self._max_recipients = max_recipients
        self._existing = existing
        self._changed: dict[bytes, RegisteredSpellings] = {}
        self._number: int = account["recipients"]
        self._places: int = account["places"]

    def apply(self, name: str, action: RecipientUpdateAction) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        names = self._changed[digest] if digest in self._changed else self._find_spellings(digest, name)
        if names is None:
            return "client_error" if action == "add" else "no_change"
        if (name in names) == (action == "add"):
            return "no_change"
        if action == "remove":
            self._number -= 1
            names.remove(name)
        elif self._number >= self._max_recipients or len(names) >= MAX_REGISTERED_SPELLINGS:
            return "client_error"
        else:
            self._number += 1
            self._places += 1
            names.add(name, self._places)
        self._changed[digest] = names
        return "success"

    def build_writes(self) -> list[MongoCommand]:
        if not self._changed:
            return []
        change: Document = {"$set": {"recipients": self._number, "places": self._places}}
        if any(self._existing.get(digest, {}).get("changes") for digest in self._changed):
            change["$unset"] = {"fresh": 1}  # the document that shows this may be deleted
        account, updates = self._account["_id"], []
        for digest, names in self._changed.items():
            fields = {"registered": names.place, "names": names.stored}
            update = {
                "$set": {name: value for name, value in fields.items() if value is not None},
                "$unset": {name: 1 for name, value in fields.items() if value is None},
                "$setOnInsert": {"did": names.did, "messages": 0, "bytes": 0},
            }
            wanted = {"account": account, "did_digest": digest}
            updates.append({"q": wanted, "u": update, "upsert": bool(names)})
        unused = {"account": account, "did_digest": {"$in": list(self._changed)}, "registered": ABSENT, "messages": 0}
        return [
            *ACCOUNTS.update({"_id": account}, change),
            *RECIPIENTS.update_each(updates),
            *RECIPIENTS.delete(unused),
        ]

    def _find_spellings(self, digest: bytes, name: str) -> RegisteredSpellings | None:
        """Return the spellings of a DID before the update; None if it is registered by another account."""
        before = self._existing.get(digest)
        if before is None:
            return RegisteredSpellings(canonicalize_did(name), None)
        return _parse_spellings(before) if before["account"] == self._account["_id"] else None


def _parse_spellings(document: Document) -> RegisteredSpellings:
    return RegisteredSpellings(document["did"], document.get("registered"), document.get("names"))


class DIDCache(OrderedDict[K, V], Generic[K, V]):
    """A bounded FIFO cache of or by DIDs, except very long ones."""

    def keep(self, did: str, key: K, value: V) -> None:
        """:param did: the key or the value."""
        if len(did) <= _MAX_CACHED_DID_LENGTH:
            self[key] = value
            self.move_to_end(key)
            if len(self) > _DID_CACHE_SIZE:
                self.popitem(last=False)


class MessageDIDs(NamedTuple):
    """DIDs of recipients and accounts by id."""

    recipients: Mapping[ObjectId, str]
    accounts: Mapping[ObjectId, str]

    def of(self, document: Document) -> tuple[str, str] | None:
        """Return the DIDs of recipient and account of a message; None if one was deleted meanwhile."""
        recipient = self.recipients.get(document["recipient"])
        account = self.accounts.get(document["account"])
        return None if recipient is None or account is None else (recipient, account)


class MessageDIDFinder:
    """Finds DIDs by id. Those of recipients never change, and are cached; those of accounts do."""

    def __init__(self) -> None:
        self._recipients: DIDCache[ObjectId, str] = DIDCache()

    async def find(
        self,
        query: Callable[[MongoCommand], Awaitable[list[Document]]],
        documents: Collection[Document],
        accounts: Mapping[ObjectId, str] | None = None,
    ) -> MessageDIDs:
        """
        Find the DIDs of recipients and accounts of messages.

        :param accounts: those that are known already.
        """
        ids = {one["recipient"] for one in documents}
        recipients = {id: did for id in ids if (did := self._recipients.get(id)) is not None}
        missing = [id for id in ids if id not in recipients]
        if missing:
            for one in await query(RECIPIENTS.find({"_id": {"$in": missing}}, projection={"did": 1})):
                recipients[one["_id"]] = one["did"]
                self._recipients.keep(one["did"], one["_id"], one["did"])
        return MessageDIDs(recipients, await find_accounts_of_messages(query, documents, accounts or {}))


async def find_accounts_of_messages(
    query: Callable[[MongoCommand], Awaitable[list[Document]]],
    documents: Collection[Document],
    known: Mapping[ObjectId, str] = {},  # noqa: B006  it is not changed
) -> Mapping[ObjectId, str]:
    """Find the DIDs of the accounts of messages, beside those that are known."""
    missing = {one["account"] for one in documents} - known.keys()
    if not missing:
        return known
    found = await query(ACCOUNTS.find({"_id": {"$in": list(missing)}}, projection={"did": 1}))
    return {**known, **{one["_id"]: one["did"] for one in found}}
