"""Several statements that are done together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import uniform

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from mediatord.store.mongo.cursors import collect, finding
from mediatord.store.mongo.ledger import Page
from mediatord.store.mongo.link import Lane
from mediatord.store.mongo.replies import Refused, Unreachable, check
from mediatord.store.mongo.requests import Document, Request, deleting, inserting, updating
from mediatord.store.mongo.sessions import Session

# Seconds that something that may succeed in a moment is given for it.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.03


class Doubtful(Exception):
    """Time is up, and nobody knows whether it was committed."""


async def pause(clock: IReactorTime, attempt: int = 0) -> None:
    """A moment, longer with every attempt, and never the same for two."""
    scale = min(2**attempt, 16)
    await deferLater(clock, uniform(SHORTEST_PAUSE, LONGEST_PAUSE) * scale)  # nosec B311 # no secret


class Transaction:
    """
    One attempt at a transaction. It sees what was there when it began, and what it wrote itself.

    What :meth:`later` was given is sent at once, right before the commit: a transaction that reads first and leaves
    all its writing to the end is in nobody's way while this process does something else, and hardly ever when it has
    died. The commit waits until everything was said to be done: a server carries it out after a statement that it
    never began with, too.
    """

    def __init__(self, lane: Lane, clock: IReactorTime, database: str, session: Session, deadline: float) -> None:
        self._lane = lane
        self._clock = clock
        self._database = database
        self._deadline = deadline
        self._session = session
        self._fields = session.begin()
        self._later: list[Request] = []
        self._begun = False
        self.wrote = False
        self.committed = False

    @property
    def page(self) -> Page:
        """Where it notes what becomes of messages; see :func:`~.ledger.entering`."""
        return self._session.page

    @property
    def open(self) -> bool:
        """Whether the server keeps it open."""
        return self._begun and not self.committed

    async def find(
        self,
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
        request = finding(collection, filter, sort=sort, limit=limit, skip=skip, projection=projection, hint=hint)
        return await self.query(request)

    async def query(self, question: Request) -> list[Document]:
        """What one of `finding` and `aggregating` finds."""
        (found,) = await self.ask(question)
        return found

    async def ask(self, *questions: Request) -> list[list[Document]]:
        """What several of `finding` and `aggregating` find, asked at once."""
        replies = await self._fly(questions)
        return [
            await collect(self._run, next(iter(question.body.values())), reply)
            for question, reply in zip(questions, replies, strict=True)
        ]

    async def insert(self, collection: str, documents: Iterable[Document]) -> None:
        """
        :raise Duplicate: one of them is there already, and the transaction is over.
        :raise TooLarge: one of them could not be stored.
        """
        await self._write(inserting(collection, documents))

    async def update(self, collection: str, *updates: Document) -> list[Document]:
        """
        :param updates: `q`, `u` and perhaps `upsert`, `multi`, `hint`, `arrayFilters` each.
        :return: replies, mostly one, with `n`, `nModified` and `upserted`.
        """
        return await self._write(updating(collection, updates))

    async def delete(self, collection: str, *filters: Document) -> int:
        """Delete all that match one of the filters; how many those were."""
        return sum(reply["n"] for reply in await self._write(deleting(collection, *filters)))

    def later(self, requests: Iterable[Request]) -> None:
        """Write this at the very end, in this order; see `inserting`, `updating` and `deleting`."""
        self._later += requests

    async def commit(self) -> None:
        """
        Durable on a majority when it returns; what only read stays open.

        :raise Doubtful: nobody knows whether it was done.
        :raise Duplicate: a unique index has a value already.
        :raise Refused: nothing was done.
        :raise Unreachable: nothing was done.
        """
        if self._later:
            await self._write(self._later)
        if not self.wrote:
            return
        (reply,) = await self._send([self._ending("commitTransaction", self._deadline)])
        if not self._is_committed(reply):
            await self._commit_again()
        self.committed = True

    async def abort(self, deadline: float) -> bool:
        """Whether the server knows that it is over."""
        try:
            (reply,) = await self._lane.exchange(
                self._database, [self._ending("abortTransaction", deadline)], deadline
            )
        except Unreachable:
            return False
        return reply is not None

    async def _write(self, requests: Iterable[Request]) -> list[Document]:
        self.wrote = True
        return await self._fly(list(requests))

    async def _run(self, request: Request) -> Document:
        (reply,) = await self._fly([request])
        return reply

    async def _fly(self, requests: Sequence[Request]) -> list[Document]:
        """Statements that are sent at once; all of them were done when it returns."""
        if not requests:
            return []
        replies = await self._send([self._statement(request) for request in requests])
        if None in replies:
            raise Unreachable("no answer to a statement")
        return [check(reply or {}) for reply in replies]

    def _statement(self, request: Request) -> Request:
        more: Document = {**self._fields, "maxTimeMS": self._milliseconds(self._deadline)}
        if "getMore" in request.body:
            del more["maxTimeMS"]
        if not self._begun:
            self._begun = True
            more |= {"startTransaction": True, "readConcern": {"level": "snapshot"}}
        return request.having(more)

    def _ending(self, name: str, deadline: float) -> Request:
        left = self._milliseconds(deadline)
        concern = {"w": "majority", "j": True, "wtimeout": left}
        return Request({name: 1, **self._fields, "maxTimeMS": left, "writeConcern": concern}, database="admin")

    async def _send(self, requests: Sequence[Request]) -> list[Document | None]:
        if self._clock.seconds() >= self._deadline:
            raise Unreachable("time is up")
        return await self._lane.exchange(self._database, requests, self._deadline)

    def _milliseconds(self, deadline: float) -> int:
        return max(int((deadline - self._clock.seconds()) * 1000), 1)

    async def _commit_again(self) -> None:
        """As often as it takes: one that was done is done again without harm."""
        attempt = 0
        while True:
            attempt += 1
            await pause(self._clock, attempt)
            if self._clock.seconds() >= self._deadline:
                raise Doubtful
            try:
                (reply,) = await self._send([self._ending("commitTransaction", self._deadline)])
            except Unreachable:
                continue
            if self._is_committed(reply):
                return

    def _is_committed(self, reply: Document | None) -> bool:
        """
        False when nobody knows.

        :raise Refused: it is not, and will not be.
        """
        if reply is None:
            return False
        try:
            check(reply)
        except Refused as error:
            if error.unsettled or "writeConcernError" in reply:
                return False
            raise
        return True
