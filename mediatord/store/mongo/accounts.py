"""Accounts and recipient DIDs; functions that take a transaction run inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bson import ObjectId

from mediatord.errors import NotEnrolled
from mediatord.interfaces import Account, Action, UpdateResult
from mediatord.store.mongo.collections import ACCOUNTS, DOCUMENTS, RECIPIENTS, RETIRED
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.requests import Document, Request, deleting, inserting, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction

_REGISTERED = {"$exists": True}


def _account_of(document: Document) -> Account:
    return Account(document["did"], document["created_at"], document["draft03"])


async def grant(t: Transaction, did: str, now: float) -> Account:
    """:raise NotEnrolled: the DID was rotated away from."""
    retired, found = await t.ask(finding(RETIRED, {"_id": did}), finding(ACCOUNTS, {"did": did}))
    if retired:
        raise NotEnrolled()
    if found:
        return _account_of(found[0])
    made = {"did": did, "created_at": now, "draft03": False, "recipients": 0, "places": 0}
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
    dids = list({one for one, _ in updates})
    owned, left_over = await t.ask(
        finding(RECIPIENTS, {"did": {"$in": dids}, "registered": _REGISTERED}),
        finding(RECIPIENTS, {"account": found[0]["_id"], "did": {"$in": dids}}),
    )
    book = _Registrations(found[0], max_recipients, {one["did"]: one for one in [*left_over, *owned]})
    results = [book.add(one) if action == "add" else book.remove(one) for one, action in updates]
    t.later(book.requests())
    return results


async def recipients(t: Transaction, did: str, offset: int, limit: int) -> tuple[list[str], int]:
    found = await t.find(ACCOUNTS, {"did": did})
    if not found:
        return [], 0
    registered = {"account": found[0]["_id"], "registered": _REGISTERED}
    some = (
        await t.find(RECIPIENTS, registered, sort={"registered": 1}, skip=offset, limit=limit, projection={"did": 1})
        if limit > 0
        else []
    )
    return [one["did"] for one in some], found[0]["recipients"]


def asking_for_owners(dids: Sequence[str]) -> Request:
    """Who has registered these DIDs: documents with `did` and `owner`, a list of one account."""
    return aggregating(
        RECIPIENTS,
        [
            {"$match": {"did": {"$in": list(dids)}, "registered": _REGISTERED}},
            {"$lookup": {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner"}},
        ],
    )


async def account(server: Server, did: str) -> Account | None:
    found = await server.find("account", ACCOUNTS, {"did": did})
    return _account_of(found[0]) if found else None


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

    :param before: its document.
    :param place: in the order of registration; None when it is not registered.
    """

    did: str
    before: Document | None
    place: int | None


@dataclass(eq=False, slots=True)
class _Registrations:
    """
    What one account registers, as it is after some updates.

    :param there: documents of recipient DIDs, those that are registered by anybody before any other.
    """

    account: Document
    max_recipients: int
    there: dict[str, Document]
    changed: dict[str, _Recipient] = field(default_factory=dict)
    number: int = 0
    places: int = 0

    def __post_init__(self) -> None:
        self.number, self.places = self.account["recipients"], self.account["places"]

    def add(self, did: str) -> UpdateResult:
        recipient = self._recipient(did)
        if recipient is None:
            return "client_error"
        if recipient.place is not None:
            return "no_change"
        if self.number >= self.max_recipients:
            return "client_error"
        self.number += 1
        self.places += 1
        recipient.place = self.places
        self.changed[did] = recipient
        return "success"

    def remove(self, did: str) -> UpdateResult:
        recipient = self._recipient(did)
        if recipient is None or recipient.place is None:
            return "no_change"
        self.number -= 1
        recipient.place = None
        self.changed[did] = recipient
        return "success"

    def requests(self) -> list[Request]:
        """What is to be written."""
        if not self.changed:
            return []
        counters = {"recipients": self.number, "places": self.places}
        requests = updating(ACCOUNTS, [{"q": {"_id": self.account["_id"]}, "u": {"$set": counters}}])
        gone = [one.before["_id"] for one in self.changed.values() if one.before and _is_empty(one)]
        if gone:
            requests += deleting(RECIPIENTS, {"_id": {"$in": gone}})
        kept = [one for one in self.changed.values() if one.before and not _is_empty(one)]
        made = [one for one in self.changed.values() if not one.before and one.place is not None]
        requests += updating(RECIPIENTS, [_registering(one) for one in kept])
        return requests + inserting(RECIPIENTS, [_new(one, self.account["_id"]) for one in made])

    def _recipient(self, did: str) -> _Recipient | None:
        """None when another account has registered it."""
        if did in self.changed:
            return self.changed[did]
        before = self.there.get(did)
        if before is None:
            return _Recipient(did, None, None)
        if before["account"] != self.account["_id"]:
            return None
        return _Recipient(did, before, before.get("registered"))


def _is_empty(recipient: _Recipient) -> bool:
    """Whether there is no reason to keep its document."""
    return recipient.place is None and recipient.before is not None and not recipient.before["messages"]


def _registering(recipient: _Recipient) -> Document:
    place = recipient.place
    change = {"$unset": {"registered": 1}} if place is None else {"$set": {"registered": place}}
    assert recipient.before is not None
    return {"q": {"_id": recipient.before["_id"]}, "u": change}


def _new(recipient: _Recipient, account: ObjectId) -> Document:
    return {"account": account, "did": recipient.did, "registered": recipient.place, "messages": 0, "bytes": 0}
