"""Commands and transactions, tried again until they are done or time is up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.interfaces import IReactorTime

from mediatord.store.mongo.cursors import collect
from mediatord.store.mongo.faults import Faults
from mediatord.store.mongo.link import Link
from mediatord.store.mongo.replies import Refused, Unreachable, check
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.transaction import pause
from mediatord.store.mongo.transactions import Transactions

# Commands that may take long, and are done after one another on a connection.
_READS = frozenset({"find", "aggregate", "getMore", "count", "distinct", "listIndexes", "dbStats"})


class Operations:
    """
    What a server can be asked. A deadline is a time of the clock.

    :param database: where commands go that do not name another.
    """

    def __init__(
        self, link: Link, clock: IReactorTime, database: str, faults: Faults, on_doubt: Callable[[], None]
    ) -> None:
        self._link = link
        self._clock = clock
        self._database = database
        self.transactions = Transactions(link, clock, database, faults, on_doubt)
        self.transact = self.transactions.transact

    async def command(
        self, request: Request, deadline: float, *, limited: bool = True, prompt: bool = False
    ) -> Document:
        """
        One command that does no harm when it is done twice.

        :param limited: whether the command knows `maxTimeMS`.
        :param prompt: whether it is not to wait for other reads.
        :raise Duplicate: a unique index has this value already.
        :raise Refused: the server said no.
        :raise Unreachable: time is up.
        """
        attempt = 0
        while True:
            attempt += 1
            reply = await self._once(request, deadline, limited, prompt)
            try:
                return check(reply)
            except Refused as error:
                if not error.passing or self._clock.seconds() >= deadline:
                    raise
            await pause(self._clock, attempt)

    async def all(self, requests: Sequence[Request], deadline: float) -> list[Document | Refused]:
        """Reads that are sent at once: the reply to each, or what it was refused for."""
        while True:
            replies = await self._link.reading.exchange(self._database, requests, deadline)
            if None not in replies:
                return [_reply_or_refusal(reply or {}) for reply in replies]
            if self._clock.seconds() >= deadline:
                raise Unreachable("no answer")
            await pause(self._clock)

    async def query(self, question: Request, deadline: float, *, prompt: bool = False) -> list[Document]:
        """
        All that one of `finding` and `aggregating` finds; begun again when the server loses its place.

        :param prompt: it takes no time, and is not to wait for what does.
        """
        attempt = 0
        collection: str = next(iter(question.body.values()))
        while True:
            attempt += 1
            try:
                reply = await self.command(question, deadline, prompt=prompt)
                return await collect(lambda more: self._more(more, deadline), collection, reply)
            except Refused as error:
                if not error.passing or self._clock.seconds() >= deadline:
                    raise
                await pause(self._clock, attempt)

    async def write(self, requests: Sequence[Request], deadline: float) -> list[Document]:
        """Writes that do no harm when they are done twice, durable on a majority."""
        return [await self.command(self.durably(request, deadline), deadline) for request in requests]

    async def finish(self, deadline: float) -> None:
        """Leave nothing behind, if that can be helped: what is begun and not ended is in the way for a minute."""
        await self.transactions.settle(deadline)
        made = self.transactions.sessions.made
        if not made:
            return
        try:
            await self.command(Request({"killSessions": made}, database="admin"), deadline, limited=False)
        except (Refused, Unreachable):
            pass  # others can end them when we are gone

    def durably(self, request: Request, deadline: float) -> Request:
        """The same, to be answered when a majority has it on disk."""
        return request.having({"writeConcern": {"w": "majority", "j": True, "wtimeout": self._left(deadline)}})

    async def _once(self, request: Request, deadline: float, limited: bool, prompt: bool = False) -> Document:
        """:raise Unreachable: time is up."""
        reading = next(iter(request.body)) in _READS and not prompt
        lane = self._link.reading if reading else self._link.writing
        while True:
            left = self._left(deadline)
            sent = request.having({"maxTimeMS": left}) if limited else request
            (reply,) = await lane.exchange(self._database, [sent], deadline)
            if reply is not None:
                return reply
            if self._clock.seconds() >= deadline:
                raise Unreachable("no answer")
            await pause(self._clock)

    async def _more(self, request: Request, deadline: float) -> Document:
        return check(await self._once(request, deadline, limited=False))

    def _left(self, deadline: float) -> int:
        """Milliseconds."""
        return max(int((deadline - self._clock.seconds()) * 1000), 1)


def _reply_or_refusal(reply: Document) -> Document | Refused:
    try:
        return check(reply)
    except Refused as error:
        return error
