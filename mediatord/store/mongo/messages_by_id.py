"""Messages by id, in one round trip unless they are too much for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Int64

from mediatord.interfaces import StoredMessage
from mediatord.store.mongo.collections import ACCOUNTS, MESSAGES
from mediatord.store.mongo.cursors import aggregating
from mediatord.store.mongo.names import NameBook
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.queues import Queues, visible
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.rows import stored

# Bytes of a message that is told with its account beside it, and of the DID of that: far from the largest document,
# which has no room for anything beside it.
_SMALL, _SHORT = 1_048_576, 8_192


@dataclass(frozen=True, slots=True)
class FindingMessages:
    """Finds those that are visible at a time, in order of arrival, as many as fit but at least one."""

    queues: Queues
    book: NameBook
    ids: Sequence[str]
    now: float

    async def __call__(self, operations: Operations, deadline: float) -> list[StoredMessage]:
        documents = await self._small_ones(operations, deadline)
        if len(documents) < len(set(self.ids)) or not all(one["owner"] for one in documents):
            return await operations.transact(
                lambda t: self.queues.find(t, self.ids, self.now), deadline, reading=True
            )
        accounts = {one["account"]: one["owner"][0]["did"] for one in documents}
        names = await self.book.look_up(lambda question: operations.query(question, deadline), documents, accounts)
        in_order = sorted(documents, key=lambda one: one["seq"])
        # What is asked for apart may be gone by then.
        return [stored(one, names.recipients, names.accounts) for one in in_order if names.of(one) is not None]

    async def _small_ones(self, operations: Operations, deadline: float) -> list[Document]:
        """One batch of them, each with its account as `owner`, a list of one unless its DID is too long."""
        wanted = {"_id": {"$in": list(dict.fromkeys(self.ids))}, **visible(self.now), "size": {"$lte": _SMALL}}
        short = [{"$match": {"$expr": {"$lte": [{"$strLenBytes": "$did"}, _SHORT]}}}, {"$project": {"did": 1}}]
        owner = {"from": ACCOUNTS, "localField": "account", "foreignField": "_id", "as": "owner", "pipeline": short}
        question = aggregating(MESSAGES, [{"$match": wanted}, {"$lookup": owner}], hint="_id_")
        cursor = (await operations.command(question, deadline))["cursor"]
        if cursor["id"]:
            over = Request({"killCursors": MESSAGES, "cursors": [Int64(cursor["id"])]})
            await operations.command(over, deadline, limited=False)
        found: list[Document] = cursor["firstBatch"]
        return found
