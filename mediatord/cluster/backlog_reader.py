"""Reads what waits for a DID when a socket has subscribed to it, so that catching up leaves that out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from mediatord.backlogs import MAX_IDS_EACH
from mediatord.cluster.rounds import CHUNK, LATE
from mediatord.interfaces import Arrival, Window
from mediatord.presence import Connections, Session


class BacklogReader:
    """
    Which of two came first, a message or a subscription, is what the store says: clocks of nodes differ.

    A message that is committed after other nodes know of the socket is pushed. One that was there before is part of
    the backlog, which is for the owner of the socket to ask for. Read before the owner is told that the socket is
    live, so what comes in between is found by the owner's first question.

    :param arrived: of the store.
    """

    def __init__(
        self,
        clock: IReactorTime,
        connections: Connections[object],
        arrived: Callable[[Sequence[str], Window, int], Deferred[list[Arrival]]],
    ) -> None:
        self._clock = clock
        self._connections = connections
        self._arrived = arrived

    async def __call__(self, session: Session, did: str) -> None:
        """
        Note what waits, unless that is known of this subscription.

        :raise StoreUnavailable: it is not known then, and what came shortly before may be pushed.
        """
        if self._connections.knows_backlog(session, did):
            return
        # Older than that, it is not looked for.
        window = Window(self._clock.seconds() - LATE, inf)
        ids: list[str] = []
        while arrived := await self._arrived([did], window, CHUNK):
            ids += [one.id for one in arrived]
            if len(arrived) < CHUNK or len(ids) >= MAX_IDS_EACH:
                break
            window = window.behind(arrived[-1])
        self._connections.waited(session, did, ids)
