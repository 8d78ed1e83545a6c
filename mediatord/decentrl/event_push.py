"""Telling the sockets of a DID what came for it (DCTRL-0004 10.5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from mediatord.delivery.connections import ConnectionManager, WebSocketSession, send_to_subscribers
from mediatord.failure_logging import redact_failure
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol import encoding
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import RemovedMessage

_log = Logger()

_CONTRACTS_UPDATED_FRAME = encoding.dumps({"type": "CONTRACTS_UPDATED"})
# Events pushed and not acknowledged whose way is remembered.
_MAX_REMEMBERED_PUSHES = 100_000


class IRemoteEventPusher(Protocol):
    """Has other nodes push. Its Deferreds fire with whether a socket took it, and never fail."""

    def deliver_event(self, event: PendingEvent) -> Deferred[bool]:
        """An event that is kept for its recipient."""

    def notify_contracts_changed(self, did: str) -> Deferred[bool]:
        """That a contract of `did`, or a request for one, is new."""


class EventPusher:
    """
    Writes to all sockets that authenticated for a DID. What is pushed stays in the store until it is acknowledged.

    Whatever calls this has just found the DID to be registered, in the same transaction that kept what is pushed:
    that is why nothing is pushed for a registration that has expired. What other nodes ask for is looked up again.

    :param elsewhere: None where there are no other nodes.
    :param record_pickups: lets them know what was asked for; None likewise.
    """

    def __init__(
        self,
        connections: ConnectionManager[None],
        recorder: EventRecorder,
        remote_delivery: IRemoteEventPusher | None = None,
        record_pickups: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._connections = connections
        self._recorder = recorder
        self._remote_delivery = remote_delivery
        self._record_pickups = record_pickups
        # Whether a socket of this process took it.
        self._pushed: OrderedDict[str, bool] = OrderedDict()

    def pending(self, event: PendingEvent, tell: Callable[[bool], None]) -> None:
        """
        An event is kept for its recipient: push it, here and at other nodes.

        :param tell: told whether a socket took it, as soon as that is known.
        """
        pushed = self.push(event)
        if self._remote_delivery is None:
            tell(pushed)
            return
        taken = self._remote_delivery.deliver_event(event)
        taken.addCallback(self._taken, event, here=False)
        if pushed:
            tell(True)
        else:
            taken.addCallback(tell)
        taken.addErrback(lambda failure: _log.failure("telling of an event failed", redact_failure(failure)))

    def push(self, event: PendingEvent) -> bool:
        """Write an event to the sockets that are here; whether one took it."""
        return self._push(event, self._connections.subscribers(event.recipient_did))

    def push_remote(self, event: PendingEvent, *, by: float = inf) -> bool:
        """
        As :meth:`push`, for an event that another node accepted: not to sockets for which it waited already.

        :param by: leaves out sockets that subscribed after this time, too.
        """
        return self._push(event, self._connections.subscribers(event.recipient_did, by=by, message=event.id))

    def _push(self, event: PendingEvent, subscribers: Sequence[tuple[WebSocketSession, None]]) -> bool:
        if not subscribers:
            return False
        shown = {"id": event.id, "sender_did": event.sender_did, "payload": event.payload}
        frame = encoding.dumps({"type": "PENDING_EVENTS", "events": [shown]})
        accepted_by = send_to_subscribers(subscribers, partial(_frame_for_decentrl, frame))
        if accepted_by:
            try:
                self._recorder.pushed(event, [session.name for session in accepted_by], "live", "decentrl")
            except Exception:
                _log.failure("taking note of a push failed", redact_failure())
        return self._taken(bool(accepted_by), event, here=True)

    def record_pickup(self, ids: Sequence[str]) -> None:
        """The recipient of these events has asked for them, and gets them."""
        if self._record_pickups is not None:
            self._record_pickups(ids)

    @property
    def remembered(self) -> int:
        """Events that are known to have been pushed."""
        return len(self._pushed)

    def was_pushed(self, id_: str) -> bool:
        """Whether an event is known to have been pushed here, and not to have been acknowledged."""
        return self._pushed.get(id_, False)

    def contracts_updated(self, did: str) -> None:
        """A contract of `did`, or a request for one, is new."""
        self.push_contracts_updated(did)
        if self._remote_delivery is not None:
            self._remote_delivery.notify_contracts_changed(did)

    def push_contracts_updated(self, did: str) -> bool:
        """Say so to the sockets that are here; whether one took it."""
        return bool(
            send_to_subscribers(
                self._connections.subscribers(did), partial(_frame_for_decentrl, _CONTRACTS_UPDATED_FRAME)
            )
        )

    def resolve_pushes(self, removed: Iterable[RemovedMessage]) -> None:
        """Events were acknowledged."""
        for one in removed:
            was_pushed = one.id in self._pushed
            self._pushed.pop(one.id, None)
            self._recorder.acknowledged(one, "live" if was_pushed else "poll", "decentrl")

    def _taken(self, pushed: bool, event: PendingEvent, *, here: bool) -> bool:
        if pushed:
            self._pushed[event.id] = here or self.was_pushed(event.id)
            if len(self._pushed) > _MAX_REMEMBERED_PUSHES:
                self._pushed.popitem(last=False)
        return pushed


def _frame_for_decentrl(frame: bytes, recipient: object) -> bytes | None:
    """A frame for a socket; None for one that speaks DIDComm, which may serve the same DID."""
    return frame if recipient is None else None
