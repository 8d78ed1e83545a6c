"""Accounts and recipient DIDs; functions that take a transaction run inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bson import ObjectId

from mediatord.errors import NotEnrolled
from mediatord.interfaces import FIRST_DAY, Account, AccountUsage, Action, ExpiredAccount, ExpiryReason, UpdateResult
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.mongo.collections import ACCOUNTS, DOCUMENTS, RECIPIENTS, RETIRED
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.decentrl_schema import REGISTRATIONS
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.requests import Document, Request, deleting, inserting, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.recipient_names import MAX_NAMES, RecipientNames, page

_REGISTERED = {"$exists": True}
# One DID of an account for which something waits.
_MAIL = {
    "from": RECIPIENTS,
    "localField": "_id",
    "foreignField": "account",
    "pipeline": [{"$match": {"messages": {"$gt": 0}}}, {"$limit": 1}, {"$project": {"_id": 1}}],
    "as": "mail",
}


def _account_of(document: Document) -> Account:
    created_at: float = document["created_at"]
    return Account(document["did"], created_at, document["draft03"], document.get("seen_at", created_at))


async def grant(t: Transaction, did: str, now: float) -> Account:
    """:raise NotEnrolled: the DID was rotated away from."""
    retired, found = await t.ask(finding(RETIRED, {"_id": did}), finding(ACCOUNTS, {"did": did}))
    if retired:
        raise NotEnrolled()
    if found:
        return _account_of(found[0])
    times = {"created_at": now, "seen_at": now, "fresh": True}
    made = {"did": did, **times, "draft03": False, "recipients": 0, "places": 0}
    t.later(inserting(ACCOUNTS, [made]))
    return _account_of(made)


async def move(t: Transaction, prior: str, new: str) -> bool:
    found, retired = await t.ask(
        finding(ACCOUNTS, {"did": {"$in": [prior, new]}}, projection={"did": 1}), finding(RETIRED, {"_id": new})
    )
    if retired or prior == new or [one["did"] for one in found] != [prior]:
        return False
    t.later(updating(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": {"$set": {"did": new}}}]))
    t.later(inserting(RETIRED, [{"_id": prior}]))
    return True


async def update(
    t: Transaction, did: str, updates: Sequence[tuple[str, Action]], max_recipients: int
) -> list[UpdateResult]:
    """:raise NotEnrolled: there is no such account."""
    found = await t.find(ACCOUNTS, {"did": did})
    if not found:
        raise NotEnrolled()
    digests = list({did_digest(one) for one, _ in updates})
    owned, left_over = await t.ask(
        finding(RECIPIENTS, {"did_digest": {"$in": digests}, "registered": _REGISTERED}),
        finding(RECIPIENTS, {"did_digest": {"$in": digests}, "account": found[0]["_id"]}),
    )
    there = {bytes(one["did_digest"]): one for one in [*left_over, *owned]}
    book = _Registrations(found[0], max_recipients, there)
    results = [book.add(one) if action == "add" else book.remove(one) for one, action in updates]
    t.later(book.requests())
    return results


async def recipients(t: Transaction, did: str, offset: int, limit: int) -> tuple[list[str], int]:
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
    return page([_names(one) for one in some], offset, limit), found[0]["recipients"]


async def spellings(server: Server, recipient_did: str) -> list[str]:
    """Those under which somebody has registered it, in order of registration."""
    this = {"did_digest": did_digest(recipient_did), "registered": _REGISTERED}
    found = await server.find("spellings", RECIPIENTS, this)
    return [name for one in found for _, name in _names(one).spellings]


def asking_for_owners(dids: Sequence[str]) -> Request:
    """Who has registered these DIDs: documents with `did_digest` and `owner`, a list of one account."""
    return aggregating(
        RECIPIENTS,
        [
            {"$match": {"did_digest": {"$in": [did_digest(did) for did in dids]}, "registered": _REGISTERED}},
            {"$lookup": {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner"}},
        ],
    )


async def account(server: Server, did: str) -> Account | None:
    found = await server.find("account", ACCOUNTS, {"did": did})
    return _account_of(found[0]) if found else None


async def touch(server: Server, did: str, now: float) -> None:
    old = {"$gte": [{"$subtract": [now, "$created_at"]}, FIRST_DAY]}
    change = [{"$set": {"seen_at": now, "fresh": {"$cond": [old, "$$REMOVE", "$fresh"]}}}]
    await server.write("touch", updating(ACCOUNTS, [{"q": {"did": did}, "u": change}]))


async def usage(server: Server) -> AccountUsage:
    """As the server says, which may be a little wrong after it was killed."""

    async def look(operations: Operations, deadline: float) -> AccountUsage:
        count = size = 0
        for name in (ACCOUNTS, RECIPIENTS, RETIRED, DOCUMENTS, REGISTRATIONS):
            said = await operations.command(Request({"collStats": name}), deadline, prompt=True)
            count += said["count"] if name == ACCOUNTS else 0
            size += said["size"]
        return AccountUsage(count, size)

    return await server.operate("account_usage", look)


async def candidates(
    server: Server, limit: int, unused_before: float | None, idle_before: float | None
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
                stages += [{"$lookup": _MAIL}, {"$match": {"mail": []}}]
            stages += [{"$limit": limit - len(found)}, {"$project": {"did": 1}}]
            some = await server.ask("expire_accounts", aggregating(ACCOUNTS, stages))
            found += [(one["did"], reason) for one in some]
    return found


async def expire(t: Transaction, did: str, reason: ExpiryReason, before: float) -> ExpiredAccount | None:
    """Remove an account, if there still is the reason to; one for which something came is not fresh from now on."""
    time = "created_at" if reason == "unused" else "seen_at"
    found = await t.find(ACCOUNTS, {"did": did, time: {"$lte": before}})
    if not found or (reason == "unused" and "fresh" not in found[0]):
        return None
    mail: Document = {"changes": {"$gt": 0}} if reason == "unused" else {"messages": {"$gt": 0}}
    if await t.find(RECIPIENTS, {"account": found[0]["_id"], **mail}, limit=1):
        if reason == "unused":
            t.later(updating(ACCOUNTS, [{"q": {"_id": found[0]["_id"]}, "u": {"$unset": {"fresh": 1}}}]))
        return None
    t.later(_deleting(found[0]))
    return ExpiredAccount(did, found[0]["recipients"], reason)


async def remove(t: Transaction, did: str) -> bool:
    """Remove an account with all that it has registered, unless something waits for it; whether that was done."""
    found = await t.find(ACCOUNTS, {"did": did})
    if not found or await t.find(RECIPIENTS, {"account": found[0]["_id"], "messages": {"$gt": 0}}, limit=1):
        return False
    t.later(_deleting(found[0]))
    return True


def _deleting(account: Document) -> list[Request]:
    return [
        *deleting(RECIPIENTS, {"account": account["_id"]}),
        *deleting(DOCUMENTS, {"_id": account["did"]}),
        *deleting(ACCOUNTS, {"_id": account["_id"]}),
    ]


async def mark_draft03(server: Server, did: str) -> None:
    await server.write("mark_draft03", updating(ACCOUNTS, [{"q": {"did": did}, "u": {"$set": {"draft03": True}}}]))


async def is_retired(server: Server, did: str) -> bool:
    return bool(await server.find("is_retired", RETIRED, {"_id": did}))


async def remember_did(server: Server, short: str, long: str) -> None:
    remembered = {"q": {"_id": short}, "u": {"$set": {"long": long}}, "upsert": True}
    await server.write("remember_did", updating(DOCUMENTS, [remembered]))


async def recall_did(server: Server, short: str) -> str | None:
    found = await server.find("recall_did", DOCUMENTS, {"_id": short})
    return found[0]["long"] if found else None


@dataclass(eq=False, slots=True)
class _Recipient:
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
class _Registrations:
    """
    What one account registers, as it is after some updates.

    :param there: documents of recipient DIDs by digest, those that are registered by anybody before any other.
    """

    account: Document
    max_recipients: int
    there: dict[bytes, Document]
    changed: dict[bytes, _Recipient] = field(default_factory=dict)
    number: int = 0
    places: int = 0

    def __post_init__(self) -> None:
        self.number, self.places = self.account["recipients"], self.account["places"]

    def add(self, name: str) -> UpdateResult:
        digest = did_digest(name)
        recipient = self._recipient(digest, name)
        if recipient is None:
            return "client_error"
        if name in recipient.names:
            return "no_change"
        if self.number >= self.max_recipients or len(recipient.names) >= MAX_NAMES:
            return "client_error"
        self.number += 1
        self.places += 1
        recipient.names.add(name, self.places)
        self.changed[digest] = recipient
        return "success"

    def remove(self, name: str) -> UpdateResult:
        digest = did_digest(name)
        recipient = self._recipient(digest, name)
        if recipient is None or name not in recipient.names:
            return "no_change"
        self.number -= 1
        recipient.names.remove(name)
        self.changed[digest] = recipient
        return "success"

    def requests(self) -> list[Request]:
        """What is to be written."""
        if not self.changed:
            return []
        counters = {"recipients": self.number, "places": self.places}
        change: Document = {"$set": counters}
        if any(one.before is not None and one.before.get("changes") for one in self.changed.values()):
            change["$unset"] = {"fresh": 1}  # the documents that say so may go
        requests = updating(ACCOUNTS, [{"q": {"_id": self.account["_id"]}, "u": change}])
        gone = [one.before["_id"] for one in self.changed.values() if one.before and _is_empty(one)]
        if gone:
            requests += deleting(RECIPIENTS, {"_id": {"$in": gone}})
        kept = [one for one in self.changed.values() if one.before and not _is_empty(one)]
        made = [one for one in self.changed.values() if not one.before and one.names]
        requests += updating(RECIPIENTS, [_registering(one) for one in kept])
        return requests + inserting(RECIPIENTS, [_new(one, self.account["_id"]) for one in made])

    def _recipient(self, digest: bytes, name: str) -> _Recipient | None:
        """None when another account has registered it."""
        if digest in self.changed:
            return self.changed[digest]
        before = self.there.get(digest)
        if before is None:
            did = canonical_did(name)
            return _Recipient(did, None, RecipientNames(did, None))
        if before["account"] != self.account["_id"]:
            return None
        return _Recipient(before["did"], before, _names(before))


def _names(document: Document) -> RecipientNames:
    return RecipientNames(document["did"], document.get("registered"), document.get("names"))


def _is_empty(recipient: _Recipient) -> bool:
    """Whether there is no reason to keep its document."""
    return not recipient.names and recipient.before is not None and not recipient.before["messages"]


def _registering(recipient: _Recipient) -> Document:
    fields = _fields(recipient.names)
    change: Document = {"$unset": {name: 1 for name in ("registered", "names") if name not in fields}}
    if fields:
        change["$set"] = fields
    assert recipient.before is not None
    return {"q": {"_id": recipient.before["_id"]}, "u": {name: value for name, value in change.items() if value}}


def _new(recipient: _Recipient, account: ObjectId) -> Document:
    digest = did_digest(recipient.did)
    identity = {"account": account, "did": recipient.did, "did_digest": digest}
    return {**identity, **_fields(recipient.names), "messages": 0, "bytes": 0}


def _fields(names: RecipientNames) -> Document:
    fields = {"registered": names.place, "names": names.stored}
    return {name: value for name, value in fields.items() if value is not None}
