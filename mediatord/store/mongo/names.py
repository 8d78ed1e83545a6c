"""Which DIDs the ids of recipients and accounts stand for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from bson import ObjectId

from mediatord.store.mongo.collections import ACCOUNTS, RECIPIENTS
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.requests import Document, Request

_CAPACITY = 16_384
_LONGEST = 2_048

Ask = Callable[[Request], Awaitable[list[Document]]]


@dataclass(frozen=True, slots=True)
class Names:
    """DIDs by id."""

    recipients: Mapping[ObjectId, str]
    accounts: Mapping[ObjectId, str]

    def of(self, document: Document) -> tuple[str, str] | None:
        """Those of the recipient and the account of a message; None when they have gone meanwhile."""
        recipient = self.recipients.get(document["recipient"])
        account = self.accounts.get(document["account"])
        return None if recipient is None or account is None else (recipient, account)


class NameBook:
    """Remembers recipients, which never change; accounts do, and are asked for every time."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._recipients: OrderedDict[ObjectId, str] = OrderedDict()

    async def look_up(
        self, ask: Ask, documents: Collection[Document], accounts: Mapping[ObjectId, str] | None = None
    ) -> Names:
        """
        What is needed to tell of messages.

        :param accounts: those that are known already.
        """
        recipients = await self._find_recipients(ask, {one["recipient"] for one in documents})
        known = dict(accounts or {})
        missing = {one["account"] for one in documents} - known.keys()
        if missing:
            found = await ask(finding(ACCOUNTS, {"_id": {"$in": list(missing)}}, projection={"did": 1}))
            known |= {one["_id"]: one["did"] for one in found}
        return Names(recipients, known)

    async def _find_recipients(self, ask: Ask, ids: Iterable[ObjectId]) -> dict[ObjectId, str]:
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
            found = await ask(finding(RECIPIENTS, {"_id": {"$in": missing}}, projection={"did": 1}))
            known |= {one["_id"]: self._keep(one["_id"], one["did"]) for one in found}
        return known

    def _keep(self, id: ObjectId, did: str) -> str:
        if len(did) <= _LONGEST:
            self._recipients[id] = did
            if len(self._recipients) > self._capacity:
                self._recipients.popitem(last=False)
        return did
