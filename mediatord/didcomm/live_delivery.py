"""
Live delivery: dispatches stored messages to sockets here, at other nodes, or to endpoints, and tracks pushes until
they are acknowledged (reference 6.3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from sys import intern
from typing import Literal

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.clock import outside_request
from mediatord.delivery.connections import (
    CompactMultiMap,
    ConnectionManager,
    TooManySubscriptions,
    WebSocketSession,
    send_to_subscribers,
)
from mediatord.didcomm.messages import AuthcryptSender, MessagePacker, RecipientKeys
from mediatord.errors import StoreUnavailable
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import DELIVERY, AttachmentFormat, make_delivery_attachment
from mediatord.store.interfaces.messages import IMessageStore, RemovedMessage, StoredMessage

_log = Logger()


class DeliveryDispatcher:
    """
    Passes stored messages to sockets of this process, to other nodes, or to an endpoint of the account.

    :param push: writes to the sockets of this process; False when none took it.
    :param remote_delivery: has other nodes push; fires with whether a socket took it and never fails. None for one
        process.
    :param fail_over: called with a message that no socket took; None to leave it in the queue.
    """

    def __init__(
        self,
        push: Callable[[StoredMessage], bool],
        remote_delivery: Callable[[StoredMessage], Deferred[bool]] | None,
        fail_over: Callable[[StoredMessage], None] | None,
    ) -> None:
        self._push = push
        self._remote_delivery = remote_delivery
        self._fail_over = fail_over

    def dispatch(self, message: StoredMessage, on_result: Callable[[bool], None] | None = None) -> None:
        """
        Waits for nothing and never fails; what nobody takes stays in the queue.

        :param on_result: called with whether a socket took it, as soon as that is known.
        """
        pushed = self._push(message)
        if self._remote_delivery is not None:
            # The recipient may have sockets at several nodes, and all of them get it.
            taken = self._remote_delivery(message)
            if not pushed:
                taken.addCallback(self._finish, message, on_result)
                taken.addErrback(
                    lambda failure: _log.failure("dispatching a message failed", redact_failure(failure))
                )
                return
        self._finish(pushed, message, on_result)

    def _finish(self, pushed: bool, message: StoredMessage, on_result: Callable[[bool], None] | None) -> None:
        if on_result is not None:
            on_result(pushed)
        if not pushed and self._fail_over is not None:
            self._fail_over(message)


# Seconds until a push is marked in the store; one that is acknowledged before is never marked.
MARK_DELAY = 1.0
# Number of unmarked pushes at which they are marked at once.
MARK_BATCH_SIZE = 1000


class DeliveryMarker:
    """
    Marks messages in the store as delivered.

    Marks are for operators, counters and other nodes. With a single node they are delayed, since nearly every push is
    acknowledged soon and then needs no write.

    :param write: `mark_delivered` of the store.
    :param delay: seconds until a mark is written.
    """

    def __init__(self, clock: IReactorTime, write: Callable[[Sequence[str]], Deferred[None]], delay: float) -> None:
        self._clock = clock
        self._write = write
        self._delay = delay
        self._waiting: dict[str, None] = {}
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, id_: str) -> None:
        """A message was pushed."""
        self._waiting[id_] = None
        if not self._delay or len(self._waiting) >= MARK_BATCH_SIZE:
            self._flush()
        elif self._timer is None:
            self._timer = self._clock.callLater(self._delay, self._flush)

    def cancel_mark(self, id_: str) -> bool:
        """Do not mark a message; whether it was still unmarked."""
        if id_ not in self._waiting:
            return False
        del self._waiting[id_]
        if not self._waiting:
            self._stop()
        return True

    def _flush(self) -> None:
        ids = list(self._waiting)
        self._waiting.clear()
        self._stop()
        with outside_request():
            log_mark_failure(self._write(ids))

    def _stop(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


def log_mark_failure(done: Deferred[None]) -> None:
    """Log a failed mark; the message itself is safe without it."""

    def failed(failure: object) -> None:
        _log.warn("the store did not take a delivery mark")

    done.addErrback(lambda failure: failed(failure) if failure.check(StoreUnavailable) else failure)
    done.addErrback(lambda failure: _log.failure("marking a delivery failed", redact_failure(failure)))


# DIDs of one socket that are remembered to be authenticated there.
MAX_BOUND_DIDS = 256
# Messages that are remembered to have been pushed here.
MAX_REMEMBERED_PUSHES = 100_000
# Unacknowledged pushes; beyond that the oldest is pending again before its timeout.
MAX_UNACKNOWLEDGED_PUSHES = 100_000


@dataclass(frozen=True, slots=True)
class ClusterDeliveryHooks:
    """
    What keeps several nodes from delivering a message twice.

    :param read_backlog: notes what waits for a DID when a socket has subscribed to it.
    :param record_pickups: lets other nodes know that messages were handed out by pickup.
    """

    read_backlog: Callable[[WebSocketSession, str], Awaitable[None]]
    record_pickups: Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class LiveDeliverySettings:
    """
    :param timeout: seconds after which an unacknowledged push is pending again.
    :param form: form of the attachment in a pushed delivery.
    :param mode: `delivery` pushes a pickup message, `raw` the payload itself.
    :param by_default: whether a socket is live as soon as an account authenticates on it.
    :param node: boot id of this node, which marks contain; empty for a single node.
    """

    timeout: float = 60.0
    form: AttachmentFormat = "as-received"
    mode: Literal["delivery", "raw"] = "delivery"
    by_default: bool = False
    node: str = ""


@dataclass(slots=True)
class _UnacknowledgedPush:
    """
    :param at: when it was written.
    :param sessions: the sockets that it was written to.
    """

    at: float
    recipient_did: str
    received_at: float
    sessions: tuple[WebSocketSession, ...]


class LiveDelivery:
    """
    Pushes messages to the sockets that subscribed to their account.

    Pushed messages stay in the store until they are acknowledged (decision D11).

    :param hooks: None where there are no other nodes.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IMessageStore,
        connections: ConnectionManager[RecipientKeys],
        packer: MessagePacker,
        recorder: EventRecorder,
        settings: LiveDeliverySettings,
        hooks: ClusterDeliveryHooks | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._connections = connections
        self._packer = packer
        self._recorder = recorder
        self._settings = settings
        self._read_backlog = hooks.read_backlog if hooks else None
        self._record_pickups = hooks.record_pickups if hooks else None
        self._pushes: OrderedDict[str, _UnacknowledgedPush] = OrderedDict()
        # With several nodes, each keeps what it has pushed to its own sockets.
        self._pushed: OrderedDict[str, None] = OrderedDict()
        self._by_session: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._bound: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._marks = DeliveryMarker(clock, self._mark, 0.0 if settings.node else MARK_DELAY)
        connections.on_close(self._session_closed)

    def can_bind(self, session: WebSocketSession, did: str) -> bool:
        """Whether :meth:`bind` would have an effect."""
        bound = self._bound
        return not bound.has(session, did) and session in self._connections and bound.count(session) < MAX_BOUND_DIDS

    async def bind(self, session: WebSocketSession, recipient: AuthcryptSender) -> None:
        """
        Record that a DID authenticated on a socket (reference 3.2), which may have been closed meanwhile.

        :raise StoreUnavailable: presence cannot be published.
        """
        if self.can_bind(session, recipient.did):
            did = intern(recipient.did)
            self._bound.put(session, did, None)
            self._recorder.record_connection_authenticated("didcomm", session.name, did)
            if self._settings.by_default:
                with suppress(TooManySubscriptions):
                    await self.subscribe(session, recipient)

    async def subscribe(self, session: WebSocketSession, recipient: AuthcryptSender) -> None:
        """
        Push messages for an account to this socket; see
        :meth:`~mediatord.delivery.connections.ConnectionManager.subscribe`.

        :raise TooManySubscriptions: the socket has as many as one may have, and is not subscribed.
        :raise StoreUnavailable: messages that other nodes accept are not pushed until the store is available again.
        """
        await self._connections.subscribe(session, intern(recipient.did), RecipientKeys(recipient))
        if self._read_backlog is not None:
            await self._read_backlog(session, recipient.did)

    async def rotate(self, prior: str, recipient: AuthcryptSender, session: WebSocketSession | None) -> None:
        """
        Move subscriptions after a DID rotation (reference 2.3): the socket that the rotation came on stays live.

        Other sockets of the account are unsubscribed: the new DID has not authenticated on them.

        :raise StoreUnavailable: presence cannot be published.
        """
        was_pushed_live = session is not None and self._connections.is_subscribed(session, prior)
        for other, other_recipient in self._connections.subscribers(prior):
            if other is not session and other_recipient is not None:  # or it speaks Decentrl
                self._connections.unsubscribe(other, prior)
        if session is not None and was_pushed_live:
            await self._connections.transfer_subscription(
                session, prior, intern(recipient.did), RecipientKeys(recipient)
            )

    def push(self, message: StoredMessage) -> bool:
        """
        Write a stored message to every socket that subscribed to its account; whether one took it. Never fails.
        """
        subscribers = self._connections.subscribers(message.account)
        return bool(subscribers) and self._push(message, subscribers)

    def push_remote(self, message: StoredMessage, *, by: float = inf) -> bool:
        """
        As :meth:`push`, for a message that another node accepted, but not to sockets whose backlog contains it.

        :param by: also leaves out sockets that subscribed after this time.
        """
        return self._push(message, self._connections.subscribers(message.account, by=by, message=message.id))

    def record_pickup(self, ids: Sequence[str]) -> None:
        """Messages were returned by a pickup."""
        if self._record_pickups is not None:
            self._record_pickups(ids)

    def was_pushed(self, id_: str) -> bool:
        """
        Whether a message was pushed here and is neither acknowledged nor overdue; with several nodes, whether it is
        remembered to have been pushed here and was not acknowledged here.
        """
        return id_ in self._pushes or id_ in self._pushed

    def _push(self, message: StoredMessage, subscribers: Sequence[tuple[WebSocketSession, RecipientKeys]]) -> bool:
        accepted_by = send_to_subscribers(subscribers, partial(self._frame, message))
        if not accepted_by:
            return False
        try:
            self._record_push(message, accepted_by)
        except Exception:
            _log.failure("recording a push failed", redact_failure())
        return True

    def _record_push(self, message: StoredMessage, accepted_by: Sequence[WebSocketSession]) -> None:
        """Track a push to these sockets."""
        if self._recorder.is_own(message.recipient_did):
            # Of the probe: no mark, as it expires soon, and a failed push is not recorded.
            self._remember(message.id)
            return
        before = self._pushes.pop(message.id, None)  # a late read of the backlog may find it again
        sessions = tuple({*accepted_by, *before.sessions}) if before else tuple(accepted_by)
        did = intern(message.recipient_did)
        self._pushes[message.id] = _UnacknowledgedPush(self._clock.seconds(), did, message.received_at, sessions)
        for session in accepted_by:
            self._by_session.put(session, message.id, None)
        self._limit_pushes()
        self._recorder.record_push(message, [session.name for session in accepted_by], "live", "didcomm")
        self._remember(message.id)
        self._marks.add(message.id)

    def _limit_pushes(self) -> None:
        """Bound the memory for pushes that nobody acknowledges."""
        if len(self._pushes) > MAX_UNACKNOWLEDGED_PUSHES:
            id_, push = next(iter(self._pushes.items()))
            self._remove_push(id_)
            self._requeue_pushes({id_: push})

    @property
    def unacknowledged_pushes(self) -> int:
        """Number of pushes that are neither acknowledged nor overdue."""
        return len(self._pushes)

    @property
    def remembered(self) -> int:
        """Number of messages remembered to have been pushed, with several nodes."""
        return len(self._pushed)

    def was_pushed_live(self, removed: RemovedMessage, resolved: Collection[str]) -> bool:
        """
        Whether an acknowledged message had been pushed.

        :param resolved: result of :meth:`resolve_pushes`; pushes of other nodes are marked in the store.
        """
        return removed.id in resolved or bool(self._settings.node and removed.pushes)

    def resolve_pushes(self, ids: Iterable[str]) -> set[str]:
        """Forget the pushes of removed messages; returns the ids of those that had been pushed."""
        resolved = set()
        for id_ in ids:
            self._pushed.pop(id_, None)
            self._marks.cancel_mark(id_)
            if self._remove_push(id_):
                resolved.add(id_)
        return resolved

    def requeue_overdue_pushes(self) -> None:
        """Make unacknowledged pushes pending again after the timeout, or when the clock was set back."""
        now = self._clock.seconds()
        late = {}
        while self._pushes:
            id_, push = next(iter(self._pushes.items()))
            if 0.0 <= now - push.at < self._settings.timeout:
                break
            late[id_] = push
            self._remove_push(id_)
        self._requeue_pushes(late)

    def _frame(self, message: StoredMessage, recipient: RecipientKeys | None) -> bytes | None:
        """The frame for a subscriber; None for a socket that speaks Decentrl."""
        if recipient is None:
            return None
        if self._settings.mode == "raw":
            return message.payload
        attachment = make_delivery_attachment(message.id, message.payload, message.form, self._settings.form)
        draft = OutgoingMessage(id=self._packer.new_id(), type=DELIVERY, attachments=[attachment])
        return self._packer.pack(draft, recipient)

    def _session_closed(self, session: WebSocketSession) -> None:
        self._bound.pop(session)
        lost = {}
        for id_, _ in self._by_session.pop(session):
            push = self._pushes[id_]
            push.sessions = tuple(one for one in push.sessions if one is not session)
            if not push.sessions:
                del self._pushes[id_]
                lost[id_] = push
        self._requeue_pushes(lost)

    def _remember(self, id_: str) -> None:
        if self._settings.node:
            self._pushed[id_] = None
            self._pushed.move_to_end(id_)
            if len(self._pushed) > MAX_REMEMBERED_PUSHES:
                self._pushed.popitem(last=False)

    def _remove_push(self, id_: str) -> bool:
        """Forget a push; whether there was one."""
        push = self._pushes.pop(id_, None)
        if push is None:
            return False
        for session in push.sessions:
            self._by_session.discard(session, id_)
        return True

    def _mark(self, ids: Sequence[str]) -> Deferred[None]:
        return self._store.mark_delivered(ids, node=self._settings.node)

    def _requeue_pushes(self, pushes: Mapping[str, _UnacknowledgedPush]) -> None:
        """Make pushes pending again (UC-021 AF-6)."""
        marked: list[str] = []
        unmarked: list[str] = []
        for id_ in pushes:
            (unmarked if self._marks.cancel_mark(id_) else marked).append(id_)
        self._record_requeued(unmarked, pushes)
        if marked:
            log_mark_failure(self._store.mark_pending(marked).addCallback(self._record_requeued, pushes))

    def _record_requeued(self, ids: Iterable[str], pushes: Mapping[str, _UnacknowledgedPush]) -> None:
        for id_ in ids:
            self._recorder.record_push_failure(id_, pushes[id_].recipient_did, pushes[id_].received_at)
