"""
Accounts and recipient DIDs; functions that take a transaction run inside it.

Which DIDs the ids of recipients and accounts stand for.

Who has registered a recipient DID: asked for every forward, so from memory where that is recent enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bson import ObjectId
from twisted.internet.defer import Deferred, fail, succeed

from mediatord.errors import MediationNotGranted, StoreUnavailable
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.caches import OwnerCache
from mediatord.store.interfaces.accounts import (
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
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.schema import ACCOUNTS, LONG_FORM_DIDS, RECIPIENTS, REGISTRATIONS, RETIRED_DIDS
from mediatord.store.recipient_names import MAX_RECIPIENT_NAMES, RecipientNames, is_valid_unicode, slice_names

_REGISTERED = {"$exists": True}
# One DID of an account for which something waits.
_QUEUED_MESSAGE_LOOKUP = {
    "from": RECIPIENTS,
    "localField": "_id",
    "foreignField": "account",
    "pipeline": [{"$match": {"messages": {"$gt": 0}}}, {"$limit": 1}, {"$project": {"_id": 1}}],
    "as": "mail",
}


def _parse_account(document: Document) -> Account:
    created_at: float = document["created_at"]
    return Account(document["did"], created_at, document["draft03"], document.get("seen_at", created_at))


async def grant_account(t: Transaction, did: str, now: float) -> Account:
    """:raise MediationNotGranted: the DID was rotated away from."""
    retired, found = await t.ask(build_find(RETIRED_DIDS, {"_id": did}), build_find(ACCOUNTS, {"did": did}))
    if retired:
        raise MediationNotGranted()
    if found:
        return _parse_account(found[0])
    times = {"created_at": now, "seen_at": now, "fresh": True}
    made = {"did": did, **times, "draft03": False, "recipients": 0, "places": 0}
    t.write_at_end(build_inserts(ACCOUNTS, [made]))
    return _parse_account(made)


async def move_account(t: Transaction, prior: str, new: str) -> bool:
    found, retired = await t.ask(
        build_find(ACCOUNTS, {"did": {"$in": [prior, new]}}, projection={"did": 1}),
        build_find(RETIRED_DIDS, {"_id": new}),
    )
    if retired or prior == new or [one["did"] for one in found] != [prior]:
        return False
    t.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": {"$set": {"did": new}}}]))
    t.write_at_end(build_inserts(RETIRED_DIDS, [{"_id": prior}]))
    return True


async def update_recipients(
    t: Transaction, did: str, updates: Sequence[tuple[str, RecipientUpdateAction]], max_recipients: int
) -> list[RecipientUpdateResult]:
    """:raise MediationNotGranted: there is no such account."""
    found = await t.find(ACCOUNTS, {"did": did})
    if not found:
        raise MediationNotGranted()
    digests = list({compute_did_digest(one) for one, _ in updates})
    owned, left_over = await t.ask(
        build_find(RECIPIENTS, {"did_digest": {"$in": digests}, "registered": _REGISTERED}),
        build_find(RECIPIENTS, {"did_digest": {"$in": digests}, "account": found[0]["_id"]}),
    )
    there = {bytes(one["did_digest"]): one for one in [*left_over, *owned]}
    book = _RecipientUpdate(found[0], max_recipients, there)
    results = [book.add(one) if action == "add" else book.remove(one) for one, action in updates]
    t.write_at_end(book.requests())
    return results


async def list_recipients(t: Transaction, did: str, offset: int, limit: int) -> tuple[list[str], int]:
    found = await t.find(ACCOUNTS, {"did": did})
    if not found:
        return [], 0
    registered = {"account": found[0]["_id"], "registered": _REGISTERED}
    some = (
        await t.find(
            RECIPIENTS,
            registered,
            sort={"registered": 1},
            limit=offset + limit,
            projection={"did": 1, "registered": 1, "names": 1},
        )
        if limit > 0
        else []
    )
    return slice_names([_parse_names(one) for one in some], offset, limit), found[0]["recipients"]


async def list_spellings(client: ReplicaSetClient, recipient_did: str) -> list[str]:
    """Those under which somebody has registered it, in order of registration."""
    this = {"did_digest": compute_did_digest(recipient_did), "registered": _REGISTERED}
    found = await client.find("spellings", RECIPIENTS, this)
    return [name for one in found for _, name in _parse_names(one).spellings]


def build_owner_query(dids: Sequence[str]) -> MongoCommand:
    """Who has registered these DIDs: documents with `compute_did_digest` and `owner`, a list of one account."""
    return build_aggregate(
        RECIPIENTS,
        [
            {"$match": {"did_digest": {"$in": [compute_did_digest(did) for did in dids]}, "registered": _REGISTERED}},
            {"$lookup": {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner"}},
        ],
    )


async def find_account(client: ReplicaSetClient, did: str) -> Account | None:
    found = await client.find("account", ACCOUNTS, {"did": did})
    return _parse_account(found[0]) if found else None


async def touch_account(client: ReplicaSetClient, did: str, now: float) -> None:
    old = {"$gte": [{"$subtract": [now, "$created_at"]}, FIRST_DAY_SECONDS]}
    change = [{"$set": {"seen_at": now, "fresh": {"$cond": [old, "$$REMOVE", "$fresh"]}}}]
    await client.write("touch", build_updates(ACCOUNTS, [{"q": {"did": did}, "u": change}]))


async def measure_accounts(client: ReplicaSetClient) -> AccountUsage:
    """As the server says, which may be a little wrong after it was killed."""

    async def look(executor: OperationExecutor, deadline: float) -> AccountUsage:
        count = size = 0
        for name in (ACCOUNTS, RECIPIENTS, RETIRED_DIDS, LONG_FORM_DIDS, REGISTRATIONS):
            said = await executor.command(MongoCommand({"collStats": name}), deadline, prompt=True)
            count += said["count"] if name == ACCOUNTS else 0
            size += said["size"]
        return AccountUsage(count, size)

    return await client.operate("account_usage", look)


async def find_expiry_candidates(
    client: ReplicaSetClient, limit: int, unused_before: float | None, idle_before: float | None
) -> list[tuple[str, ExpiryReason]]:
    """
    Accounts that may have to go; among the idle ones none for which something waits, however many of those there are.
    """
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
            some = await client.ask("expire_accounts", build_aggregate(ACCOUNTS, stages))
            found += [(one["did"], reason) for one in some]
    return found


async def expire_account(t: Transaction, did: str, reason: ExpiryReason, before: float) -> ExpiredAccount | None:
    """Remove an account, if there still is the reason to; one for which something came is not fresh from now on."""
    time = "created_at" if reason == "unused" else "seen_at"
    found = await t.find(ACCOUNTS, {"did": did, time: {"$lte": before}})
    if not found or (reason == "unused" and "fresh" not in found[0]):
        return None
    mail: Document = {"changes": {"$gt": 0}} if reason == "unused" else {"messages": {"$gt": 0}}
    if await t.find(RECIPIENTS, {"account": found[0]["_id"], **mail}, limit=1):
        if reason == "unused":
            t.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": {"$unset": {"fresh": 1}}}]))
        return None
    t.write_at_end(_build_account_deletes(found[0]))
    return ExpiredAccount(did, found[0]["recipients"], reason)


async def remove_account(t: Transaction, did: str) -> bool:
    """Remove an account with all that it has registered, unless something waits for it; whether that was done."""
    found = await t.find(ACCOUNTS, {"did": did})
    if not found or await t.find(RECIPIENTS, {"account": found[0]["_id"], "messages": {"$gt": 0}}, limit=1):
        return False
    t.write_at_end(_build_account_deletes(found[0]))
    return True


async def unregister_recipients(t: Transaction, did: str) -> None:
    """Remove all that an account has registered; what is queued for it stays."""
    found = await t.find(ACCOUNTS, {"did": did}, projection={"_id": 1})
    if not found:
        return
    mine = {"account": found[0]["_id"]}
    change = {"$set": {"recipients": 0}, "$unset": {"fresh": 1}}
    t.write_at_end(build_updates(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": change}]))
    t.write_at_end(build_deletes(RECIPIENTS, {**mine, "messages": 0}))
    unregistered = {"$unset": {"registered": 1, "names": 1}}
    t.write_at_end(build_updates(RECIPIENTS, [{"q": mine, "u": unregistered, "multi": True}]))


def _build_account_deletes(account: Document) -> list[MongoCommand]:
    return [
        *build_deletes(RECIPIENTS, {"account": account["_id"]}),
        *build_deletes(LONG_FORM_DIDS, {"_id": account["did"]}),
        *build_deletes(ACCOUNTS, {"_id": account["_id"]}),
    ]


async def mark_draft03(client: ReplicaSetClient, did: str) -> None:
    await client.write(
        "mark_draft03", build_updates(ACCOUNTS, [{"q": {"did": did}, "u": {"$set": {"draft03": True}}}])
    )


async def is_retired(client: ReplicaSetClient, did: str) -> bool:
    return bool(await client.find("is_retired", RETIRED_DIDS, {"_id": did}))


async def remember_did(client: ReplicaSetClient, short: str, long: str) -> None:
    remembered = {"q": {"_id": short}, "u": {"$set": {"long": long}}, "upsert": True}
    await client.write("remember_did", build_updates(LONG_FORM_DIDS, [remembered]))


async def recall_did(client: ReplicaSetClient, short: str) -> str | None:
    found = await client.find("recall_did", LONG_FORM_DIDS, {"_id": short})
    return found[0]["long"] if found else None


@dataclass(eq=False, slots=True)
class _RecipientRecord:
    """
    A recipient DID of our account, or one that is to be.

    :param did: in its canonical form.
    :param before: its document.
    :param names: under which it is registered; none when it is not.
    """

    did: str
    before: Document | None
    names: RecipientNames


@dataclass(eq=False, slots=True)
class _RecipientUpdate:
    """
    What one account registers, as it is after some updates.

    :param there: documents of recipient DIDs by digest, those that are registered by anybody before any other.
    """

    account: Document
    max_recipients: int
    there: dict[bytes, Document]
    changed: dict[bytes, _RecipientRecord] = field(default_factory=dict)
    number: int = 0
    places: int = 0

    def __post_init__(self) -> None:
        self.number, self.places = self.account["recipients"], self.account["places"]

    def add(self, name: str) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = self._recipient(digest, name)
        if recipient is None:
            return "client_error"
        if name in recipient.names:
            return "no_change"
        if self.number >= self.max_recipients or len(recipient.names) >= MAX_RECIPIENT_NAMES:
            return "client_error"
        self.number += 1
        self.places += 1
        recipient.names.add(name, self.places)
        self.changed[digest] = recipient
        return "success"

    def remove(self, name: str) -> RecipientUpdateResult:
        digest = compute_did_digest(name)
        recipient = self._recipient(digest, name)
        if recipient is None or name not in recipient.names:
            return "no_change"
        self.number -= 1
        recipient.names.remove(name)
        self.changed[digest] = recipient
        return "success"

    def requests(self) -> list[MongoCommand]:
        """What is to be written."""
        if not self.changed:
            return []
        counters = {"recipients": self.number, "places": self.places}
        change: Document = {"$set": counters}
        if any(one.before is not None and one.before.get("changes") for one in self.changed.values()):
            change["$unset"] = {"fresh": 1}  # the documents that say so may go
        requests = build_updates(ACCOUNTS, [{"q": {"_id": self.account["_id"]}, "u": change}])
        gone = [one.before["_id"] for one in self.changed.values() if one.before and _is_removable(one)]
        if gone:
            requests += build_deletes(RECIPIENTS, {"_id": {"$in": gone}})
        kept = [one for one in self.changed.values() if one.before and not _is_removable(one)]
        made = [one for one in self.changed.values() if not one.before and one.names]
        requests += build_updates(RECIPIENTS, [_build_recipient_update(one) for one in kept])
        return requests + build_inserts(RECIPIENTS, [_build_recipient(one, self.account["_id"]) for one in made])

    def _recipient(self, digest: bytes, name: str) -> _RecipientRecord | None:
        """None when another account has registered it."""
        if digest in self.changed:
            return self.changed[digest]
        before = self.there.get(digest)
        if before is None:
            did = canonicalize_did(name)
            return _RecipientRecord(did, None, RecipientNames(did, None))
        if before["account"] != self.account["_id"]:
            return None
        return _RecipientRecord(before["did"], before, _parse_names(before))


def _parse_names(document: Document) -> RecipientNames:
    return RecipientNames(document["did"], document.get("registered"), document.get("names"))


def _is_removable(recipient: _RecipientRecord) -> bool:
    """Whether there is no reason to keep its document."""
    return not recipient.names and recipient.before is not None and not recipient.before["messages"]


def _build_recipient_update(recipient: _RecipientRecord) -> Document:
    fields = _build_name_fields(recipient.names)
    change: Document = {"$unset": {name: 1 for name in ("registered", "names") if name not in fields}}
    if fields:
        change["$set"] = fields
    assert recipient.before is not None
    return {"q": {"_id": recipient.before["_id"]}, "u": {name: value for name, value in change.items() if value}}


def _build_recipient(recipient: _RecipientRecord, account: ObjectId) -> Document:
    digest = compute_did_digest(recipient.did)
    identity = {"account": account, "did": recipient.did, "did_digest": digest}
    return {**identity, **_build_name_fields(recipient.names), "messages": 0, "bytes": 0}


def _build_name_fields(names: RecipientNames) -> Document:
    fields = {"registered": names.place, "names": names.stored}
    return {name: value for name, value in fields.items() if value is not None}


_DID_CACHE_SIZE = 16_384
_MAX_CACHED_DID_LENGTH = 2_048

DocumentQuery = Callable[[MongoCommand], Awaitable[list[Document]]]


@dataclass(frozen=True, slots=True)
class MessageDIDs:
    """DIDs by id."""

    recipients: Mapping[ObjectId, str]
    accounts: Mapping[ObjectId, str]

    def of(self, document: Document) -> tuple[str, str] | None:
        """Those of the recipient and the account of a message; None when they have gone meanwhile."""
        recipient = self.recipients.get(document["recipient"])
        account = self.accounts.get(document["account"])
        return None if recipient is None or account is None else (recipient, account)


class RecipientDIDCache:
    """Remembers recipients, which never change; accounts do, and are asked for every time."""

    def __init__(self, capacity: int = _DID_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._recipients: OrderedDict[ObjectId, str] = OrderedDict()

    async def look_up(
        self, ask: DocumentQuery, documents: Collection[Document], accounts: Mapping[ObjectId, str] | None = None
    ) -> MessageDIDs:
        """
        What is needed to tell of messages.

        :param accounts: those that are known already.
        """
        recipients = await self._find_recipients(ask, {one["recipient"] for one in documents})
        known = dict(accounts or {})
        missing = {one["account"] for one in documents} - known.keys()
        if missing:
            found = await ask(build_find(ACCOUNTS, {"_id": {"$in": list(missing)}}, projection={"did": 1}))
            known |= {one["_id"]: one["did"] for one in found}
        return MessageDIDs(recipients, known)

    async def _find_recipients(self, ask: DocumentQuery, ids: Iterable[ObjectId]) -> dict[ObjectId, str]:
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
            found = await ask(build_find(RECIPIENTS, {"_id": {"$in": missing}}, projection={"did": 1}))
            known |= {one["_id"]: self._keep(one["_id"], one["did"]) for one in found}
        return known

    def _keep(self, id: ObjectId, did: str) -> str:
        if len(did) <= _MAX_CACHED_DID_LENGTH:
            self._recipients[id] = did
            if len(self._recipients) > self._capacity:
                self._recipients.popitem(last=False)
        return did


# Seconds; another node may have taken a DID away, which a deposit finds out in any case.
_OWNER_LIFETIME = 2.0


class RecipientOwnerCache:
    """Questions that come while another one is under way are asked together."""

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._owners: OwnerCache[str] = OwnerCache(now=client.clock.seconds, lifetime=_OWNER_LIFETIME)
        self._waiting: dict[str, list[Deferred[str | None]]] = {}
        self._since = 0.0
        self._asking = False

    def known(self, recipient_did: str) -> str | None:
        """The account, if that was asked lately."""
        return self._owners.get(recipient_did)

    def owner(self, recipient_did: str) -> Deferred[str | None]:
        if not self._client.answers:
            return fail(StoreUnavailable())
        account = self._owners.get(recipient_did)
        if account is not None or not is_valid_unicode(recipient_did):
            return succeed(account)
        answer: Deferred[str | None] = Deferred()
        client, clock = self._client, self._client.clock
        left = max(client.began + client.patience - clock.seconds(), 0.0)
        # Others wait for the same question, which therefore has its own time.
        answer.addTimeout(left, clock, lambda _, __: fail(StoreUnavailable()))
        if not self._waiting:
            self._since = clock.seconds()
        self._waiting.setdefault(recipient_did, []).append(answer)
        if not self._asking:
            self._asking = True
            clock.callLater(0, self._ask)
        return answer

    def forget(self, dids: Iterable[str]) -> None:
        """Their registration may have changed."""
        self._owners.forget(dids)

    def clear(self) -> None:
        """An account has another DID now."""
        self._owners.clear()

    def _ask(self) -> None:
        answers, self._waiting = self._waiting, {}
        question = build_owner_query(list(answers))
        asked = Deferred.fromCoroutine(self._client.ask("owner", question, since=self._since, prompt=True))
        asked.addCallback(lambda found: {bytes(one["did_digest"]): one["owner"][0]["did"] for one in found})
        asked.addCallbacks(self._resolve_found, self._resolve_failed, (answers, self._owners.age), {}, (answers,))

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
        self._asking = bool(self._waiting)
        if self._asking:
            self._client.clock.callLater(0, self._ask)
