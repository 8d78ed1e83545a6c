"""Slices of what is kept for a party."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twisted.internet.interfaces import IReactorTime

from mediatord.deadline import PATIENCE
from mediatord.errors import TooLarge
from mediatord.interfaces.decentrl import LARGEST_SLICE, Found, Slice
from mediatord.store.mongo.decentrl_parties import Party, asking_for, party_among
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import finding

# More than any list has.
_FAR = 1 << 62


@dataclass(frozen=True, slots=True)
class Reading:
    """
    One operation that reads, perhaps in several steps.

    :param deadline: for all of them.
    :param patient: each has as long as an operation may take, however long they take together.
    """

    operations: Operations
    clock: IReactorTime
    deadline: float
    patient: bool = False

    async def ask(self, question: Request) -> list[Document]:
        return await self.operations.query(question, self._until())

    async def count(self, listing: Listing, skipped: int = 0) -> int:
        """How many there are, except so many."""
        counting = {"count": listing.collection, "query": listing.filter, "skip": skipped, "hint": listing.hint}
        number: int = (await self.operations.command(Request(counting), self._until()))["n"]
        return number

    async def party(self, did: str) -> Party:
        """The one with this DID, for whom nothing is kept if nothing is known of it."""
        return party_among(await self.ask(asking_for(did)), did)

    async def page(self, listing: Listing, part: Slice, total: int | None = None) -> tuple[list[Document], int]:
        """
        A slice of a list, and how long that is.

        :param total: the same, if it is known.
        """
        offset, limit = max(part.offset, 0), min(part.limit, _FAR)
        if total is None and limit and not offset:
            found = await self.ask(listing.slice(0, limit))
            return found, len(found) if len(found) < limit else await self.count(listing)
        if total is None:
            total = await self.count(listing)
        if not limit or offset >= total:
            return [], total
        return await self.ask(listing.slice(offset, min(limit, total - offset))), total

    def patiently(self) -> Reading:
        return replace(self, patient=True)

    def _until(self) -> float:
        return self.clock.seconds() + PATIENCE if self.patient else self.deadline


@dataclass(frozen=True, slots=True)
class Listing:
    """
    A list of documents.

    :param hint: the index that has them in this order.
    """

    collection: str
    filter: Document
    sort: Document
    hint: str
    projection: Document | None = None

    def slice(self, offset: int, limit: int) -> Request:
        """:param limit: not 0."""
        return finding(
            self.collection,
            self.filter,
            sort=self.sort,
            skip=offset,
            limit=limit,
            projection=self.projection,
            hint=self.hint,
        )


def nothing() -> Found[Any]:
    """What is found of somebody who has nothing here."""
    return Found((), 0)


def check_slice(documents: Sequence[Document]) -> None:
    """
    :param documents: with the `size` of their payloads.
    :raise TooLarge: those are more than a slice may have.
    """
    if sum([document["size"] for document in documents]) > LARGEST_SLICE:
        raise TooLarge()
