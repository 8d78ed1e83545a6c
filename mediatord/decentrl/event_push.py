"""Pushing events and contract notifications to the sockets of a DID (DCTRL-0004 10.5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from sys import intern
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from mediatord.delivery.connections import (
    CompactMultiMap,
    ConnectionManager,
    LiveDispatcher,
    WebSocketSession,
    send_to_subscribers,
)
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol import encoding
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import RemovedMessage

_log = Logger()

_Wake = Callable[[str], None]

_CONTRACTS_UPDATED_FRAME = encoding.dumps({"type": "CONTRACTS_UPDATED"})
# Unacknowledged events of which it is remembered that they were pushed.
_MAX_REMEMBERED_PUSHES = 100_000


class IRemoteEventPusher(Protocol):
    """
    Has other nodes push. Its Deferreds fire with whether a socket took the frame, None if unknown, and never fail.
    """

    def deliver_event(self, event: PendingEvent) -> Deferred[bool] | Deferred[bool | None] | None:
        """Push a stored event; None if no other node can have a socket."""

    def notify_contracts_changed(self, did: str) -> object:
        """Notify about a new contract of `did`, or a new request for one."""


class EventPusher:
    """
    Writes to all sockets that authenticated for a DID. Events stay in the store until they are acknowledged.

    Callers have found the DID to be registered in the transaction that stored what is pushed, so nothing is pushed
    for an expired registration. For pushes requested by other nodes it is looked up again.

    :param remote_delivery: None where there are no other nodes.
    :param wake: called with the recipients of events that no socket is known to have taken, or that were not
        acknowledged when the sockets that took them were closed; None to wake nobody.
    :ivar dispatch: pushes a stored event, here and at other nodes; see :meth:`LiveDispatcher.dispatch`.
    """

    def __init__(
        self,
        connections: ConnectionManager[None],
        recorder: EventRecorder,
        remote_delivery: IRemoteEventPusher | None = None,
        wake: _Wake | None = None,
    ) -> None:
        self._connections = connections
        self._recorder = recorder
        self._remote_delivery = remote_delivery
        # By event id: whether a socket of this process took it.
        self._pushed: OrderedDict[str, bool] = OrderedDict()
        self._wake = wake
        # Only with `wake`: by the id of an unacknowledged event, its recipient and the sockets here that took it; and
        # such events by socket.
        self._taken: OrderedDict[str, tuple[str, tuple[WebSocketSession, ...]]] = OrderedDict()
        self._taken_by: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        if wake is not None:
            connections.on_close(partial(self._wake_after_close, wake))
        self.dispatch = LiveDispatcher(
            self.push,
            self._push_elsewhere if remote_delivery else None,
            wake=None if wake is None else lambda event: wake(event.recipient_did),
        ).dispatch

    def push(self, events: Iterable[PendingEvent]) -> Container[str]:
        """Write events to the sockets of this process; the ids of those that one took. Never fails."""
        connections = self._connections
        live = [event for event in events if event.recipient_did in connections.live_dids]
        return self._push_all(live, lambda event: connections.subscribers(event.recipient_did)) if live else ()

    def push_remote(self, events: Iterable[PendingEvent], by: Mapping[str, float] | None = None) -> Container[str]:
        """
        As :meth:`push`, for events that another node accepted, but not to sockets whose backlog contains them.

        :param by: times by the id of an event, which is not pushed to sockets that subscribed after it.
        """
        by, subscribers = by or {}, self._connections.subscribers
        return self._push_all(
            events,
            lambda event: subscribers(event.recipient_did, by=by.get(event.id, inf), message=event.id),
        )

    def _push_elsewhere(self, event: PendingEvent) -> Deferred[bool] | Deferred[bool | None] | None:
        assert self._remote_delivery is not None
        taken = self._remote_delivery.deliver_event(event)
        return taken and taken.addCallback(self._remember, event, here=False)

    def _push_all(
        self,
        events: Iterable[PendingEvent],
        find_subscribers: Callable[[PendingEvent], Sequence[tuple[WebSocketSession, None]]],
    ) -> Container[str]:
        taken = set()
        for event in events:
            try:
                if self._push(event, find_subscribers(event)):
                    taken.add(event.id)
            except Exception:
                _log.failure("pushing an event failed", redact_failure())
        return taken

    def _push(self, event: PendingEvent, subscribers: Sequence[tuple[WebSocketSession, None]]) -> bool:
        shown = {"id": event.id, "sender_did": event.sender_did, "payload": event.payload}
        frame = encoding.dumps({"type": "PENDING_EVENTS", "events": [shown]})
        accepted_by = send_to_subscribers(subscribers, partial(_frame_for_decentrl, frame))
        if accepted_by:
            try:
                self._recorder.record_push(event, [session.name for session in accepted_by], "live", "decentrl")
            except Exception:
                _log.failure("recording a push failed", redact_failure())
            if self._wake is not None:
                self._track_sockets(event, accepted_by, self._wake)
        return self._remember(bool(accepted_by), event, here=True)

    def _track_sockets(self, event: PendingEvent, accepted_by: Sequence[WebSocketSession], wake: _Wake) -> None:
        """Keep the sockets that took an event; its recipient is woken once they are all closed."""
        _, before = self._taken.pop(event.id, ("", ()))
        self._taken[event.id] = intern(event.recipient_did), tuple({*accepted_by, *before})
        for session in accepted_by:
            self._taken_by.put(session, event.id, None)
        if len(self._taken) > _MAX_REMEMBERED_PUSHES:
            oldest, (did, _) = next(iter(self._taken.items()))
            self._forget_sockets(oldest)
            wake(did)

    def _forget_sockets(self, id_: str) -> None:
        _, sessions = self._taken.pop(id_, ("", ()))
        for session in sessions:
            self._taken_by.discard(session, id_)

    def _wake_after_close(self, wake: _Wake, session: WebSocketSession) -> None:
        """Wake the recipients of events that no other socket took."""
        lost = set()
        for id_, _ in self._taken_by.pop(session):
            did, sessions = self._taken[id_]
            if others := tuple(one for one in sessions if one is not session):
                self._taken[id_] = did, others
            else:
                del self._taken[id_]
                lost.add(did)
        for did in lost:
            wake(did)

    @property
    def remembered(self) -> int:
        """Number of events known to have been pushed."""
        return len(self._pushed)

    def was_pushed(self, id_: str) -> bool:
        """Whether an event is known to have been pushed here and not acknowledged."""
        return self._pushed.get(id_, False)

    def notify_contracts_updated(self, did: str) -> None:
        """Notify the sockets of `did`, here and at other nodes, of a new contract or request for one."""
        self.push_contracts_updated(did)
        if self._remote_delivery is not None:
            self._remote_delivery.notify_contracts_changed(did)

    def push_contracts_updated(self, did: str) -> bool:
        """Notify the sockets of this process; whether one took it."""
        return bool(
            send_to_subscribers(
                self._connections.subscribers(did), partial(_frame_for_decentrl, _CONTRACTS_UPDATED_FRAME)
            )
        )

    def resolve_pushes(self, removed: Iterable[RemovedMessage]) -> None:
        """Forget and record events that were acknowledged."""
        for one in removed:
            was_pushed = self._pushed.pop(one.id, None) is not None
            if self._taken:
                self._forget_sockets(one.id)
            self._recorder.record_acknowledgement(one, "live" if was_pushed else "poll", "decentrl")

    def _remember(self, pushed: bool | None, event: PendingEvent, *, here: bool) -> bool:
        if pushed:
            self._pushed[event.id] = here or self.was_pushed(event.id)
            if len(self._pushed) > _MAX_REMEMBERED_PUSHES:
                self._pushed.popitem(last=False)
        return bool(pushed)


def _frame_for_decentrl(frame: bytes, recipient: object) -> bytes | None:
    """A frame for a socket; None for one that speaks DIDComm, which may serve the same DID."""
    return frame if recipient is None else None
