"""What a server can be asked, each as one operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.pulse import beating
from mediatord.store.mongo.requests import Document, Request, modifying
from mediatord.store.mongo.sessions import sessions_of
from mediatord.store.mongo.transactions import Undo, Work

T = TypeVar("T")


class Asking(ABC):
    """All of it fails with StoreUnavailable unless something else is said."""

    @abstractmethod
    async def operate(
        self,
        name: str,
        work: Callable[[Operations, float], Awaitable[T]],
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> T:
        """
        Do something by a deadline, as one operation.

        :param name: of the operation, for the metric.
        :param since: when it was asked for, if that was before.
        :param until: the deadline, unless it is that of the request it is for; see :mod:`mediatord.deadline`.
        """

    async def command(self, name: str, body: Document, *, database: str = "", limited: bool = True) -> Document:
        """
        One command that does no harm when it is done twice.

        :param name: of the operation, for the metric.
        :param limited: whether the command knows `maxTimeMS`.
        :raise Duplicate: a unique index has this value already.
        """
        request = Request(body, database=database)
        return await self.operate(name, lambda ops, deadline: ops.command(request, deadline, limited=limited))

    async def find(
        self,
        name: str,
        collection: str,
        filter: Document,
        *,
        sort: Document | None = None,
        limit: int = 0,
        skip: int = 0,
        projection: Document | None = None,
        hint: str | None = None,
    ) -> list[Document]:
        """:param limit: 0 for all."""
        question = finding(collection, filter, sort=sort, limit=limit, skip=skip, projection=projection, hint=hint)
        return await self.ask(name, question)

    async def aggregate(self, name: str, collection: str, pipeline: Sequence[Document]) -> list[Document]:
        return await self.ask(name, aggregating(collection, pipeline))

    async def ask(
        self, name: str, question: Request, *, since: float | None = None, prompt: bool = False
    ) -> list[Document]:
        """
        What one of `finding` and `aggregating` finds; see :meth:`operate`.

        :param prompt: it takes no time, and is not to wait for what does.
        """
        return await self.operate(
            name, lambda ops, deadline: ops.query(question, deadline, prompt=prompt), since=since
        )

    async def write(self, name: str, requests: Sequence[Request]) -> list[Document]:
        """
        Write what does no harm when it is written twice, one document at a time and durably; see `inserting`,
        `updating` and `deleting`. Each document of them is written or not, whatever becomes of the others.

        :raise Duplicate: a unique index has this value already.
        """
        return await self.operate(name, lambda ops, deadline: ops.write(requests, deadline))

    async def find_and_modify(
        self,
        name: str,
        collection: str,
        filter: Document,
        change: Document | Sequence[Document] | None,
        *,
        upsert: bool = False,
        new: bool = False,
        sort: Document | None = None,
        projection: Document | None = None,
    ) -> Document | None:
        """
        Change one document, or remove it if `change` is None, durably; what it was, or is now if `new`. It must do no
        harm when that is done twice.
        """
        request = modifying(collection, filter, change, upsert=upsert, new=new, sort=sort, projection=projection)
        (reply,) = await self.write(name, [request])
        found: Document | None = reply["value"]
        return found

    async def transact(self, name: str, work: Work[T], *, undo: Undo | None = None, reading: bool = False) -> T:
        """
        Do all of `work` or nothing, durably; it is called again when something was in its way, so it must have no
        other effect. A MediatorError that it raises is the answer and undoes what it wrote, but not in a
        :class:`Kept`.

        :param undo: when nobody knows whether it was done: called once the server answers again, to undo by our own
            ids what may have been. What it returns is called when that is durable.
        :param reading: it only reads, which must not hold up what writes.
        :raise Duplicate: a unique index has this value already.
        """
        return await self.operate(name, lambda ops, deadline: ops.transact(work, deadline, undo, reading=reading))

    async def beat(self, name: str) -> None:
        """A write, since a server that has lost its majority can still be read."""
        await self.write(name, beating())

    async def end_sessions(self, owner: str) -> None:
        """Undo what a process has begun and, having died, will not commit; else it is in the way for a minute."""
        await self.command("end_sessions", {"killSessions": sessions_of(owner)}, database="admin", limited=False)
