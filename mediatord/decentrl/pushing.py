"""Telling the sockets of a DID what came for it (DCTRL-0004 10.5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from mediatord.interfaces import Removed
from mediatord.interfaces.decentrl import PendingEvent
from mediatord.journal import Journal
from mediatord.presence import Connections
from mediatord.protocol import jsontext

_UPDATED = jsontext.dumps({"type": "CONTRACTS_UPDATED"})
# Events pushed and not acknowledged whose way is remembered.
_MAX_PUSHED = 100_000


class Pushing:
    """
    Writes to all sockets that authenticated for a DID. What is pushed stays in the store until it is acknowledged.

    Whatever calls this has just found the DID to be registered, in the same transaction that kept what is pushed:
    that is why nothing is pushed for a registration that has expired.
    """

    def __init__(self, connections: Connections[None], journal: Journal) -> None:
        self._connections = connections
        self._journal = journal
        self._pushed: OrderedDict[str, None] = OrderedDict()

    def pending(self, event: PendingEvent) -> bool:
        """An event is kept for its recipient; whether a socket took it."""
        subscribers = self._connections.subscribers(event.recipient_did)
        if not subscribers:
            return False
        shown = {"id": event.id, "sender_did": event.sender_did, "payload": event.payload}
        frame = jsontext.dumps({"type": "PENDING_EVENTS", "events": [shown]})
        took = [session for session, _ in subscribers if session.send(frame)]
        for session in took:
            self._journal.pushed(event, session.name, "live")
        if took:
            self._pushed[event.id] = None
            if len(self._pushed) > _MAX_PUSHED:
                self._pushed.popitem(last=False)
        return bool(took)

    def contracts_updated(self, did: str) -> None:
        """A contract of `did`, or a request for one, is new."""
        for session, _ in self._connections.subscribers(did):
            session.send(_UPDATED)

    def settled(self, removed: Iterable[Removed]) -> None:
        """Events were acknowledged."""
        for one in removed:
            was_pushed = one.id in self._pushed
            self._pushed.pop(one.id, None)
            self._journal.acknowledged(one, "live" if was_pushed else "poll")
