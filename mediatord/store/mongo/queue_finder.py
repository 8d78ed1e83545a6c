"""Whose a recipient DID is, and what waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bson import ObjectId

from mediatord.protocol.canonical_did import did_digest
from mediatord.store.mongo.collections import ACCOUNTS, RECIPIENTS
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.rows import Place
from mediatord.store.mongo.transaction import Transaction

_CAPACITY = 16_384
_LONGEST = 2_048
# Which are long, and matter where a queue is full.
_WITHOUT_SENDERS = {"senders": 0}


@dataclass(frozen=True, slots=True)
class Queue:
    """
    What waits for a recipient.

    :param did: as it is stored, however it was asked for.
    :param account: DID of the account that has registered it.
    :param changes: how often what waits was changed; of a document that another version wrote, since then.
    """

    did: str
    place: Place
    account: str
    messages: int
    bytes: int
    changes: int = 0


class QueueFinder:
    """
    Finds queues with the DIDs of their accounts. Which account has a recipient is remembered, so that both can be
    asked for at once; whether that is still so is seen in the answers. A join at the server would cost it more.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, ObjectId] = OrderedDict()

    async def find(self, transaction: Transaction, dids: Collection[str]) -> dict[str, Queue]:
        """Those of the DIDs that somebody has registered; all spellings of one have the same queue."""
        likely = {account for account in map(self._accounts.get, dids) if account is not None}
        digests = {did: did_digest(did) for did in dids}
        registered = {"did_digest": {"$in": list(set(digests.values()))}, "registered": {"$exists": True}}
        found, owners = await transaction.ask(
            finding(RECIPIENTS, registered, projection=_WITHOUT_SENDERS), _asking_for_accounts(likely)
        )
        missing = {one["account"] for one in found} - {one["_id"] for one in owners}
        if missing:
            owners += await transaction.query(_asking_for_accounts(missing))
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        self._remember(found)
        queues = {
            one["did_digest"]: Queue(
                one["did"],
                Place(one["_id"], one["account"]),
                accounts[one["account"]],
                one["messages"],
                one["bytes"],
                one.get("changes", 0),
            )
            for one in found
        }
        return {did: queues[digest] for did, digest in digests.items() if digest in queues}

    def _remember(self, recipients: Iterable[Document]) -> None:
        for one in recipients:
            if len(one["did"]) <= _LONGEST:
                self._accounts[one["did"]] = one["account"]
                self._accounts.move_to_end(one["did"])
        while len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)


def _asking_for_accounts(ids: Collection[ObjectId]) -> Request:
    return finding(ACCOUNTS, {"_id": {"$in": list(ids)}}, projection={"did": 1})
