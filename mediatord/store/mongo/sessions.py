"""Server sessions, in which transactions are numbered."""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass
from itertools import count

from bson import Binary, Int64
from bson.binary import UUID_SUBTYPE
from twisted.internet.interfaces import IReactorTime

from mediatord.store.mongo.ledger import Page
from mediatord.store.mongo.requests import Document

# Seconds until whatever was going on in a session has ended.
_REST = 5.0
# Numbers begin with the time, in such parts of a second that no session has a transaction in each: so they are higher
# than those that it had before.
_A_SECOND = 1_000_000
_NAMED = 256
_LEFT = 1_000
_NAMESPACE = uuid.UUID("6f4ad6f2-02f5-4f2e-9d7e-3a6d1c3f6b0a")


@dataclass(eq=False, slots=True)
class Session:
    """
    Used for one transaction after another. A later number ends what an earlier one left open.

    :param id: as it is sent.
    :param owner: of the process.
    :param named: whether its id is made from that of the owner.
    :param page: of the ledger, where its transactions note what they do.
    """

    id: Document
    owner: str
    named: bool
    page: Page
    number: int
    rested_at: float = 0.0

    def begin(self) -> Document:
        """What the statements of the next transaction carry."""
        self.number += 1
        return {"lsid": self.id, "txnNumber": Int64(self.number), "autocommit": False}


class Sessions:
    """
    Sessions that can be used again, the latest first, so that they stay few; for as long as anybody likes, since a
    server that has forgotten one, which it does after half an hour, takes it for a new one.

    Their ids are made from that of the process: when it has died, another can make the same and end what is left.
    While very many are in use, more are made, each to be used once.

    :ivar owner: what their ids are made from.
    :ivar made: ids of all that there have been, of those for once only the latest in which something may go on.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.owner = uuid.uuid4().hex
        self._numbers = count()
        self._free: list[Session] = []
        self._resting: deque[Session] = deque()
        self._named: list[Document] = []
        self._for_once: deque[Document] = deque(maxlen=_LEFT)

    @property
    def made(self) -> list[Document]:
        return [*self._named, *self._for_once]

    def belong_to(self, owner: str) -> None:
        """Sessions from now on are those of a process of this id."""
        if owner != self.owner:
            self.owner, self._numbers = owner, count()
            self._free.clear()
            self._resting.clear()

    def take(self) -> Session:
        now = self._clock.seconds()
        if self._free:
            return self._free.pop()
        if self._resting and self._resting[0].rested_at <= now:
            return self._resting.popleft()
        return self._make(now)

    def give_back(self, session: Session) -> None:
        """Its transaction is over, or is to be ended by the next."""
        if session.named and session.owner == self.owner:
            self._free.append(session)

    def lay_aside(self, session: Session) -> None:
        """The server may still be at it, and would let another transaction wait."""
        if not session.named:
            self._for_once.append(session.id)
        elif session.owner == self.owner:
            session.rested_at = self._clock.seconds() + _REST
            self._resting.append(session)

    def _make(self, now: float) -> Session:
        number = next(self._numbers)
        named = number < _NAMED
        id = _id(_uuid(self.owner, number) if named else uuid.uuid4())
        if named:
            self._named.append(id)
        # Those for once share pages: rather that they run into each other than that pages become ever more.
        page = Page(self.owner, number % _NAMED)
        return Session(id, self.owner, named, page, int(now * _A_SECOND))


def sessions_of(owner: str) -> list[Document]:
    """Ids of the sessions that a process may have had, but for those that it had very many at a time of."""
    return [_id(_uuid(owner, number)) for number in range(_NAMED)]


def _uuid(owner: str, number: int) -> uuid.UUID:
    return uuid.uuid5(_NAMESPACE, f"{owner}:{number}")


def _id(made: uuid.UUID) -> Document:
    return {"id": Binary(made.bytes, UUID_SUBTYPE)}
