"""Accounts, their recipient DIDs, and caches of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bson import ObjectId
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediationNotGranted, StoreUnavailable
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.caches import OwnerCache
from mediatord.store.interfaces.store import (
    FIRST_DAY_SECONDS,
    Account,
    AccountUsage,
    ExpiredAccount,
    ExpiryReason,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_aggregate,
    build_deletes,
    build_find,
    build_inserts,
    build_updates,
)
from mediatord.store.mongo.driver.executor import OperationExecutor, operation, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.schema import ACCOUNTS, LONG_FORM_DIDS, RECIPIENTS, REGISTRATIONS, RETIRED_DIDS
from mediatord.store.mongo.space_quota import SpaceQuota
from mediatord.store.recipient_names import MAX_RECIPIENT_NAMES, RecipientNames, is_valid_unicode, slice_names

T = TypeVar("T")

# Recipient DIDs in a cache, and the length of the longest.
DID_CACHE_SIZE = 16_384
MAX_CACHED_DID_LENGTH = 2_048
# Seconds; a stale owner is noticed when a message is queued.
_OWNER_LIFETIME = 2.0
_REGISTERED = {"$exists": True}
# A recipient DID of an account with queued messages.
_QUEUED_MESSAGE_LOOKUP = {
    "from": RECIPIENTS,
    "localField": "_id",
    "foreignField": "account",
    "pipeline": [{"$match": {"messages": {"$gt": 0}}}, {"$limit": 1}, {"$project": {"_id": 1}}],
    "as": "mail",
}


class MongoAccountStore:
    """
    Account half of the store; see `IAccountStore`.

    :param clock: for times of contact.
    :ivar space_quota: refuses writes that need more space.
    """

    def __init__(self, client: ReplicaSetClient, clock: IReactorTime, space_quota: SpaceQuota) -> None:
        self._client = client
        self._clock = clock
        self._owner_cache = RecipientOwnerCache(client)
        self.space_quota = space_quota

    @operation
    async def get_account(self, did: str) -> Account | None:
        found = await self._client.find("account", ACCOUNTS, {"did": did})
        return _parse_account(found[0]) if found else None

    @operation
    async def grant(self, did: str) -> Account:
        if self.space_quota.refuses("grant"):
            raise StoreUnavailable()
        now = self._clock.seconds()

        async def grant(t: Transaction) -> Account:
            retired, found = await t.query_many(
                build_find(RETIRED_DIDS, {"_id": did}), build_find(ACCOUNTS, {"did": did})
            )
            if retired:
                raise MediationNotGranted()
            if found:
                return _parse_account(found[0])
            times = {"created_at": now, "seen_at": now, "fresh": True}
            account = {"did": did, **times, "draft03": False, "recipients": 0, "places": 0}
            t.write_at_end(build_inserts(ACCOUNTS, [account]))
            return _parse_account(account)

        return await self._transact("grant", grant)

    @operation
    async def record_contact(self, did: str) -> None:
        now = self._clock.seconds()
        is_used = {"$gte": [{"$subtract": [now, "$created_at"]}, FIRST_DAY_SECONDS]}
        change = [{"$set": {"seen_at": now, "fresh": {"$cond": [is_used, "$$REMOVE", "$fresh"]}}}]
        await self._client.write("touch", build_updates(ACCOUNTS, [{"q": {"did": did}, "u": change}]))

    @operation
    async def mark_draft03(self, did: str) -> None:
        update = {"q": {"did": did}, "u": {"$set": {"draft03": True}}}
        await self._client.write("mark_draft03", build_updates(ACCOUNTS, [update]))

    @operation
    async def move_account(self, prior: str, new: str) -> bool:
        if self.space_quota.refuses("move"):
            raise StoreUnavailable()

        async def move(t: Transaction) -> bool:
            found, retired = await t.query_many(
                build_find(ACCOUNTS, {"did": {"$in": [prior, new]}}, projection={"did": 1}),
                build_find(RETIRED_DIDS, {"_id": new}),
            )
            if retired or prior == new or [one["did"] for one in found] != [prior]:
                return False
            t.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": {"$set": {"did": new}}}]))
            t.write_at_end(build_inserts(RETIRED_DIDS, [{"_id": prior}]))
            return True

        try:
            return await self._transact("move", move)
        finally:
            self._owner_cache.clear()

    @operation
    async def is_retired(self, did: str) -> bool:
        return bool(await self._client.find("is_retired", RETIRED_DIDS, {"_id": did}))

    @operation
    async def remember_did(self, short: str, long: str) -> None:
        if self.space_quota.refuses("remember_did"):
            raise StoreUnavailable()
        update = {"q": {"_id": short}, "u": {"$set": {"long": long}}, "upsert": True}
        await self._client.write("remember_did", build_updates(LONG_FORM_DIDS, [update]))

    @operation
    async def recall_did(self, short: str) -> str | None:
        found = await self._client.find("recall_did", LONG_FORM_DIDS, {"_id": short})
        return found[0]["long"] if found else None

    @operation
    async def get_account_usage(self) -> AccountUsage:
        """Count accounts and bytes by the metadata, which may be a little wrong after a crash of the server."""

        async def read(executor: OperationExecutor, deadline: float) -> AccountUsage:
            count = size = 0
            for name in (ACCOUNTS, RECIPIENTS, RETIRED_DIDS, LONG_FORM_DIDS, REGISTRATIONS):
                stats = await executor.command(MongoCommand({"collStats": name}), deadline, low_latency=True)
                count += stats["count"] if name == ACCOUNTS else 0
                size += stats["size"]
            return AccountUsage(count, size)

        return await self._client.operate("account_usage", read)

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
                account = await self._transact("expire_accounts", expiring)
                if account is not None:
                    expired.append(account)
        if expired:
            self._owner_cache.clear()
        return expired

    async def _find_expiry_candidates(
        self, limit: int, unused_before: float | None, idle_before: float | None
    ) -> list[tuple[str, ExpiryReason]]:
        """Find accounts that may have expired; of the idle ones only those without queued messages."""
        found: list[tuple[str, ExpiryReason]] = []
        searches: tuple[tuple[ExpiryReason, Document, str, float | None], ...] = (
            ("unused", {"fresh": _REGISTERED, "created_at": {"$lte": unused_before}}, "created_at", unused_before),
            ("idle", {"seen_at": {"$lte": idle_before}}, "seen_at", idle_before),
        )
        for reason, condition, order, before in searches:
            if before is not None and len(found) < limit:
                stages: list[Document] = [{"$match": condition}, {"$sort": {order: 1}}]
                if reason == "idle":
                    stages += [{"$lookup": _QUEUED_MESSAGE_LOOKUP}, {"$match": {"mail": []}}]
                stages += [{"$limit": limit - len(found)}, {"$project": {"did": 1}}]
                accounts = await self._client.query("expire_accounts", build_aggregate(ACCOUNTS, stages))
                found += [(one["did"], reason) for one in accounts]
        return found

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        """Fire from the cache if it is recent enough."""
        return self._owner_cache.find_owner(canonicalize_did(recipient_did))

    @operation
    async def list_registered_names(self, recipient_did: str) -> list[str]:
        filter = {"did_digest": compute_did_digest(recipient_did), "registered": _REGISTERED}
        found = await self._client.find("spellings", RECIPIENTS, filter)
        return [name for one in found for _, name in _parse_names(one).spellings]

    @operation
    async def list_recipients(self, account: str, *, offset: int, limit: int) -> tuple[list[str], int]:
        async def read(t: Transaction) -> tuple[list[str], int]:
            found = await t.find(ACCOUNTS, {"did": account})
            if not found:
                return [], 0
            registered = {"account": found[0]["_id"], "registered": _REGISTERED}
            recipients: list[Document] = []
            if limit > 0:
                projection = {"did": 1, "registered": 1, "names": 1}
                recipients = await t.find(
                    RECIPIENTS, registered, sort={"registered": 1}, limit=offset + limit, projection=projection
                )
            return slice_names([_parse_names(one) for one in recipients], offset, limit), found[0]["recipients"]

        return await self._client.transact("recipients", read, reading=True)

    @operation
    async def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> list[RecipientUpdateResult]:
        wanted = tuple(updates)
        if self.space_quota.refuses("update", shrinking=all(action == "remove" for _, action in wanted)):
            raise StoreUnavailable()

        async def update(t: Transaction) -> list[RecipientUpdateResult]:
            found = await t.find(ACCOUNTS, {"did": account})
            if not found:
                raise MediationNotGranted()
            digests = list({compute_did_digest(name) for name, _ in wanted})
            registered, own = await t.query_many(
                build_find(RECIPIENTS, {"did_digest": {"$in": digests}, "registered": _REGISTERED}),
                build_find(RECIPIENTS, {"did_digest": {"$in": digests}, "account": found[0]["_id"]}),
            )
            existing = {bytes(one["did_digest"]): one for one in [*own, *registered]}
            change = _RecipientUpdate(found[0], max_recipients, existing)
            results = [change.add(name) if action == "add" else change.remove(name) for name, action in wanted]
            t.write_at_end(change.build_writes())
            return results

        try:
            return await self._transact("update", update)
        finally:
            self._owner_cache.forget([canonicalize_did(name) for name, _ in wanted])

    async def _transact(self, name: str, work: TransactionWork[T]) -> T:
        return await retry_on_duplicate_key(lambda: self._client.transact(name, work))


def _parse_account(document: Document) -> Account:
    return Account(document["did"], document["created_at"], document["draft03"], document["seen_at"])


async def _expire_account(t: Transaction, did: str, reason: ExpiryReason, before: float) -> ExpiredAccount | None:
    """Delete an account if the reason still holds; one that has received a message is not `fresh` any more."""
    time = "created_at" if reason == "unused" else "seen_at"
    found = await t.find(ACCOUNTS, {"did": did, time: {"$lte": before}})
    if not found or (reason == "unused" and "fresh" not in found[0]):
        return None
    id = found[0]["_id"]
    mail: Document = {"changes": {"$gt": 0}} if reason == "unused" else {"messages": {"$gt": 0}}
    if await t.find(RECIPIENTS, {"account": id, **mail}, limit=1):
        if reason == "unused":
            t.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": id}, "u": {"$unset": {"fresh": 1}}}]))
        return None
    t.write_at_end(build_account_deletes(id, did))
    return ExpiredAccount(did, found[0]["recipients"], reason)


def build_account_deletes(id: ObjectId, did: str) -> list[MongoCommand]:
    """Build the writes that delete an account with its recipient DIDs."""
    return [
        *build_deletes(RECIPIENTS, {"account": id}),
        *build_deletes(LONG_FORM_DIDS, {"_id": did}),
        *build_deletes(ACCOUNTS, {"_id": id}),
    ]


@dataclass(eq=False, slots=True)
class _RecipientRecord:
    """
    A recipient DID of the account, existing or new.

    :param did: in its canonical form.
    :param before: its document.
    :param names: the names it is registered under; none if it is not.
    """

    did: str
    before: Document | None
    names: RecipientNames


class _RecipientUpdate:
    """
    Updates of the recipient DIDs of an account, in memory.

    :param existing: documents of recipient DIDs by digest, registered ones of any account before others of this one.
    """

    def __init__(self, account: Document, max_recipients: int, existing: dict[bytes, Document]) -> None:
        self._account = account
        self._max_recipients = max_recipients
        self._existing = existing
        self._changed: dict[bytes, _RecipientRecord] = {}
        self._number: int = account["recipients"]
        self._places: int = account["places"]

    def add(self, name: str) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = self._get_recipient(digest, name)
        if recipient is None:
            return "client_error"
        if name in recipient.names:
            return "no_change"
        if self._number >= self._max_recipients or len(recipient.names) >= MAX_RECIPIENT_NAMES:
            return "client_error"
        self._number += 1
        self._places += 1
        recipient.names.add(name, self._places)
        self._changed[digest] = recipient
        return "success"

    def remove(self, name: str) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = self._get_recipient(digest, name)
        if recipient is None or name not in recipient.names:
            return "no_change"
        self._number -= 1
        recipient.names.remove(name)
        self._changed[digest] = recipient
        return "success"

    def build_writes(self) -> list[MongoCommand]:
        if not self._changed:
            return []
        change: Document = {"$set": {"recipients": self._number, "places": self._places}}
        removed: list[ObjectId] = []
        updates: list[Document] = []
        inserts: list[Document] = []
        for digest, recipient in self._changed.items():
            before, names = recipient.before, recipient.names
            fields = {
                name: value
                for name, value in (("registered", names.place), ("names", names.stored))
                if value is not None
            }
            if before is None:
                if names:
                    identity = {"account": self._account["_id"], "did": recipient.did, "did_digest": digest}
                    inserts.append({**identity, **fields, "messages": 0, "bytes": 0})
                continue
            if before.get("changes"):
                change["$unset"] = {"fresh": 1}  # the document that shows this may be deleted
            if not names and not before["messages"]:
                removed.append(before["_id"])
                continue
            parts = {"$unset": {name: 1 for name in ("registered", "names") if name not in fields}, "$set": fields}
            update = {name: value for name, value in parts.items() if value}
            updates.append({"q": {"_id": before["_id"]}, "u": update})
        return [
            *build_updates(ACCOUNTS, [{"q": {"_id": self._account["_id"]}, "u": change}]),
            *(build_deletes(RECIPIENTS, {"_id": {"$in": removed}}) if removed else ()),
            *build_updates(RECIPIENTS, updates),
            *build_inserts(RECIPIENTS, inserts),
        ]

    def _get_recipient(self, digest: bytes, name: str) -> _RecipientRecord | None:
        """Return the record of a DID; None if it is registered by another account."""
        if digest in self._changed:
            return self._changed[digest]
        before = self._existing.get(digest)
        if before is None:
            did = canonicalize_did(name)
            return _RecipientRecord(did, None, RecipientNames(did, None))
        if before["account"] != self._account["_id"]:
            return None
        return _RecipientRecord(before["did"], before, _parse_names(before))


def _parse_names(document: Document) -> RecipientNames:
    return RecipientNames(document["did"], document.get("registered"), document.get("names"))


@dataclass(frozen=True, slots=True)
class MessageDIDs:
    """DIDs of recipients and accounts by id."""

    recipients: Mapping[ObjectId, str]
    accounts: Mapping[ObjectId, str]

    def of(self, document: Document) -> tuple[str, str] | None:
        """Return the DIDs of recipient and account of a message; None if one was deleted meanwhile."""
        recipient = self.recipients.get(document["recipient"])
        account = self.accounts.get(document["account"])
        return None if recipient is None or account is None else (recipient, account)


class RecipientDIDCache:
    """Cache of recipient DIDs by id, which never change; DIDs of accounts do, and are queried every time."""

    def __init__(self, capacity: int = DID_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._recipients: OrderedDict[ObjectId, str] = OrderedDict()

    async def look_up(
        self,
        query: Callable[[MongoCommand], Awaitable[list[Document]]],
        documents: Collection[Document],
        accounts: Mapping[ObjectId, str] | None = None,
    ) -> MessageDIDs:
        """
        Find the DIDs of recipients and accounts of messages.

        :param accounts: those that are known already.
        """
        recipients = await self._find_recipients(query, {one["recipient"] for one in documents})
        known = dict(accounts or {})
        missing = {one["account"] for one in documents} - known.keys()
        if missing:
            found = await query(build_find(ACCOUNTS, {"_id": {"$in": list(missing)}}, projection={"did": 1}))
            known |= {one["_id"]: one["did"] for one in found}
        return MessageDIDs(recipients, known)

    async def _find_recipients(
        self, query: Callable[[MongoCommand], Awaitable[list[Document]]], ids: Iterable[ObjectId]
    ) -> dict[ObjectId, str]:
        known: dict[ObjectId, str] = {}
        missing: list[ObjectId] = []
        for id in ids:
            did = self._recipients.get(id)
            if did is None:
                missing.append(id)
            else:
                self._recipients.move_to_end(id)
                known[id] = did
        if missing:
            for one in await query(build_find(RECIPIENTS, {"_id": {"$in": missing}}, projection={"did": 1})):
                known[one["_id"]] = one["did"]
                if len(one["did"]) <= MAX_CACHED_DID_LENGTH:
                    self._recipients[one["_id"]] = one["did"]
            while len(self._recipients) > self._capacity:
                self._recipients.popitem(last=False)
        return known


class RecipientOwnerCache:
    """
    Finds who has registered a recipient DID, from a cache if it is recent enough.

    Lookups during a query are combined into the next one.
    """

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._owners: OwnerCache[str] = OwnerCache(now=client.clock.seconds, lifetime=_OWNER_LIFETIME)
        self._waiting: dict[str, list[Deferred[str | None]]] = {}
        self._since = 0.0
        self._is_querying = False

    def get_cached(self, recipient_did: str) -> str | None:
        return self._owners.get(recipient_did)

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        """Fire with the DID of the account; None if nobody has registered the recipient DID."""
        if not self._client.is_available:
            return fail(StoreUnavailable())
        account = self._owners.get(recipient_did)
        if account is not None or not is_valid_unicode(recipient_did):
            return succeed(account)
        answer: Deferred[str | None] = Deferred()
        client, clock = self._client, self._client.clock
        left = max(client.request_started_at + client.time_limit - clock.seconds(), 0.0)
        # Other requests share the query, which therefore has a deadline of its own.
        answer.addTimeout(left, clock, lambda _, __: fail(StoreUnavailable()))
        if not self._waiting:
            self._since = clock.seconds()
        self._waiting.setdefault(recipient_did, []).append(answer)
        if not self._is_querying:
            self._is_querying = True
            clock.callLater(0, self._query)
        return answer

    def forget(self, dids: Iterable[str]) -> None:
        """Drop DIDs whose registration may have changed."""
        self._owners.forget(dids)

    def clear(self) -> None:
        """Drop all, because an account has changed its DID."""
        self._owners.clear()

    def _query(self) -> None:
        answers, self._waiting = self._waiting, {}
        digests = [compute_did_digest(did) for did in answers]
        query = build_aggregate(
            RECIPIENTS,
            [
                {"$match": {"did_digest": {"$in": digests}, "registered": _REGISTERED}},
                {"$lookup": {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner"}},
            ],
        )
        queried = Deferred.fromCoroutine(self._client.query("owner", query, since=self._since, low_latency=True))
        queried.addCallback(lambda found: {bytes(one["did_digest"]): one["owner"][0]["did"] for one in found})
        queried.addCallbacks(self._resolve_found, self._resolve_failed, (answers, self._owners.age), {}, (answers,))

    def _resolve_found(
        self, owners: dict[bytes, str], answers: dict[str, list[Deferred[str | None]]], age: int
    ) -> None:
        self._schedule_next()
        for did, waiting in answers.items():
            account = owners.get(compute_did_digest(did))
            self._owners.keep(did, account, age)
            for answer in waiting:
                answer.callback(account)

    def _resolve_failed(self, _: object, answers: dict[str, list[Deferred[str | None]]]) -> None:
        self._schedule_next()
        for waiting in answers.values():
            for answer in waiting:
                answer.errback(StoreUnavailable())

    def _schedule_next(self) -> None:
        self._is_querying = bool(self._waiting)
        if self._is_querying:
            self._client.clock.callLater(0, self._query)
