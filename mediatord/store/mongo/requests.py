"""Commands as they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import encode

from mediatord.errors import TooLarge

Document = dict[str, Any]

LARGEST_DOCUMENT = 16_777_216
# Far below what a server takes in one message, 48 MB and 100 000 documents.
_MESSAGE_BYTES = 20_000_000
_MESSAGE_DOCUMENTS = 5_000


@dataclass(frozen=True, slots=True)
class Request:
    """
    One command.

    :param body: its name comes first.
    :param section: name of the list that is sent beside the body, in BSON already.
    :param database: ours unless given.
    """

    body: Document
    section: str = ""
    documents: Sequence[bytes] = field(default=(), repr=False)
    database: str = ""

    def having(self, more: Mapping[str, Any]) -> Request:
        """The same with more in its body."""
        return Request({**self.body, **more}, self.section, self.documents, self.database)


def inserting(collection: str, documents: Iterable[Document], *, ordered: bool = True) -> list[Request]:
    """:raise TooLarge: one of them could not be stored."""
    return list(_requests({"insert": collection, "ordered": ordered}, "documents", documents))


def updating(collection: str, updates: Iterable[Document], *, ordered: bool = True) -> list[Request]:
    """
    :param updates: `q`, `u` and perhaps `upsert`, `multi`, `hint`, `arrayFilters` each.
    :raise TooLarge: one of them is too much for a server.
    """
    return list(_requests({"update": collection, "ordered": ordered}, "updates", updates))


def deleting(collection: str, *filters: Document) -> list[Request]:
    """All documents that match one of the filters."""
    return list(_requests({"delete": collection}, "deletes", [{"q": filter, "limit": 0} for filter in filters]))


def modifying(
    collection: str,
    filter: Document,
    change: Document | Sequence[Document] | None,
    *,
    upsert: bool = False,
    new: bool = False,
    sort: Document | None = None,
    projection: Document | None = None,
) -> Request:
    """
    Change one document and tell what it was, or is now if `new`.

    :param change: an update, or a pipeline; None to remove it.
    """
    what: Document = {"remove": True} if change is None else {"update": change, "upsert": upsert, "new": new}
    more = {"sort": sort, "fields": projection}
    body = {"findAndModify": collection, "query": filter, **what}
    return Request(body | {name: value for name, value in more.items() if value})


def encoded(document: Mapping[str, Any]) -> bytes:
    """:raise TooLarge: no server would take it."""
    data = encode(document)
    if len(data) > LARGEST_DOCUMENT:
        raise TooLarge()
    return data


def _requests(body: Document, section: str, documents: Iterable[Document]) -> Iterator[Request]:
    """As many as it takes."""
    some: list[bytes] = []
    size = 0
    for data in map(encoded, documents):
        if some and (size + len(data) > _MESSAGE_BYTES or len(some) == _MESSAGE_DOCUMENTS):
            yield Request(body, section, some)
            some, size = [], 0
        some.append(data)
        size += len(data)
    if some:
        yield Request(body, section, some)
