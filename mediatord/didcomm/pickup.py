"""
Message Pickup 3.0: status, delivery, acknowledgement and live mode (reference section 6). Pushes of live mode are
tracked until they are acknowledged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from sys import intern

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.delivery.connections import (
    CompactMultiMap,
    TooManySubscriptions,
    WebSocketSession,
    send_to_subscribers,
)
from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.didcomm.messages import AuthcryptSender, PushRecipient, PushWriter, RecipientKeys
from mediatord.errors import LiveModeUnsupported, MediationNotGranted, MediatorError, StoreUnavailable
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import (
    DELIVERY,
    STATUS,
    make_delivery_attachment,
    make_delivery_body,
    make_status_body,
    parse_limit,
    parse_live_delivery,
    parse_message_ids,
    parse_recipient,
)
from mediatord.protocol.probe_markers import PROBE_DID_INFIX
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.messages import (
    AcknowledgementRequest,
    AcknowledgementResult,
    QueueStatus,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.interfaces.store import Account

_log = Logger()

# Seconds until a push is marked in the store; one that is acknowledged before is never marked.
MARK_DELAY = 1.0
# Number of unmarked pushes at which they are marked at once.
MARK_BATCH_SIZE = 1000


class DeliveryMarkWriter:
    """
    Marks messages in the store as delivered.

    Marks are for operators, counters and other nodes. Without other nodes they are delayed, as nearly every push is
    acknowledged soon and then needs no write.

    :param write: `mark_delivered` of the store.
    :param delay: seconds until a mark is written.
    """

    def __init__(self, clock: IReactorTime, write: Callable[[Sequence[str]], Deferred[None]], delay: float) -> None:
        self._clock = clock
        self._write = write
        self._delay = delay
        self._waiting: dict[str, bool] = {}  # the values are True
        self._timer: IDelayedCall | None = None

    def add(self, id_: str) -> None:
        """A message was pushed."""
        self._waiting[id_] = True
        if not self._delay or len(self._waiting) >= MARK_BATCH_SIZE:
            self._flush()
        elif self._timer is None:
            self._timer = self._clock.callLater(self._delay, self._flush)

    def flush_soon(self) -> None:
        """Mark what was pushed, and what will be in this reactor iteration, without the delay."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.callLater(0.0, self._flush)

    def cancel_mark(self, id_: str) -> bool:
        """Do not mark a message; whether it was still unmarked."""
        was_unmarked = self._waiting.pop(id_, False)
        if was_unmarked and not self._waiting:
            self._stop()
        return was_unmarked

    def _flush(self) -> None:
        ids = list(self._waiting)
        self._waiting.clear()
        self._stop()
        if ids:
            with outside_request():
                log_mark_failure(self._write(ids))

    def _stop(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


def log_mark_failure(done: Deferred[None]) -> None:
    """Log a failed mark; the message itself is safe without it."""

    def log(failure: Failure) -> None:
        if failure.check(StoreUnavailable):
            _log.warn("could not mark messages as delivered: the store was unavailable")
        else:
            _log.failure("marking messages as delivered failed", redact_failure(failure))

    done.addErrback(log)


# DIDs of one socket that are remembered to be authenticated there.
MAX_BOUND_DIDS = 256
# Messages that are remembered to have been pushed here.
MAX_REMEMBERED_PUSHES = 100_000
# Unacknowledged pushes; beyond that the oldest is pending again before its timeout.
MAX_UNACKNOWLEDGED_PUSHES = 100_000


# Payload bytes in one push; a first message always may.
MAX_PUSH_BYTES = 65_536

# A message and the subscribers that it is for; None for a socket that speaks Decentrl.
_PushTarget = tuple[StoredMessage, Sequence[tuple[WebSocketSession, PushRecipient | None]]]
# A socket, and the messages in one frame to it.
_PushBatch = tuple[WebSocketSession, PushRecipient, list[StoredMessage]]


# Called with the id of a message, and whether it was removed.
PushFollower = Callable[[str, bool], None]


@dataclass(slots=True)
class _UnacknowledgedPush:
    """
    :param at: when it was written.
    :param sessions: the sockets that it was written to.
    """

    at: float
    recipient_did: str
    account: str
    received_at: float
    sessions: tuple[WebSocketSession, ...]


class LiveDelivery:
    """
    Pushes messages to the sockets that subscribed to their account.

    Pushed messages stay in the store until they are acknowledged (decision D11).

    :param record_backlog: notes what waits for a DID when a socket has subscribed to it, so that several nodes do not
        deliver it twice; None where there are no other nodes.
    :param resolve_elsewhere: has other workers forget the push of a message, by account and id; None where there are
        none.
    """

    def __init__(
        self,
        context: DIDCommContext,
        record_backlog: Callable[[WebSocketSession, str], Awaitable[None]] | None = None,
        resolve_elsewhere: Callable[[str, str], None] | None = None,
    ) -> None:
        self._context = context
        self._connections = context.connections
        self._packer = context.packer
        self._record_backlog = record_backlog
        self._resolve_elsewhere = resolve_elsewhere
        self._pushes: OrderedDict[str, _UnacknowledgedPush] = OrderedDict()
        # With several nodes, each keeps what it has pushed to its own sockets.
        self._pushed: OrderedDict[str, None] = OrderedDict()
        self._by_session: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._bound: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._followers: dict[str, PushFollower] = {}
        # Other nodes know of pushes by their marks only; workers are told.
        delay = MARK_DELAY if record_backlog is None or resolve_elsewhere is not None else 0.0
        self._marks = DeliveryMarkWriter(context.clock, self._mark, delay)
        self._connections.on_close(self._session_closed)

    def can_bind(self, session: WebSocketSession, did: str) -> bool:
        """Whether :meth:`bind` would have an effect."""
        bound = self._bound
        return not bound.has(session, did) and session in self._connections and bound.count(session) < MAX_BOUND_DIDS

    async def bind(self, session: WebSocketSession, recipient: AuthcryptSender) -> None:
        """
        Record that a DID authenticated on a socket (reference 3.2), which may have been closed meanwhile.

        :raise StoreUnavailable: presence cannot be published.
        """
        if self.record_authenticated(session, recipient.did, "didcomm") and self._context.live_by_default:
            with suppress(TooManySubscriptions):
                await self.subscribe(session, recipient)

    def record_authenticated(self, session: WebSocketSession, did: str, protocol: ProtocolName) -> bool:
        """Record that a DID authenticated on a socket; whether that is new."""
        if not self.can_bind(session, did):
            return False
        did = intern(did)
        self._bound.put(session, did, None)
        self._context.recorder.record_connection_authenticated(protocol, session.name, did)
        return True

    async def subscribe(self, session: WebSocketSession, recipient: AuthcryptSender) -> None:
        """
        Push messages for an account to this socket; see
        :meth:`~mediatord.delivery.connections.ConnectionManager.subscribe`.

        :raise TooManySubscriptions: the socket has as many as one may have, and is not subscribed.
        :raise StoreUnavailable: messages that other nodes accept are not pushed until the store is available again.
        """
        await self.subscribe_recipient(session, recipient.did, RecipientKeys(recipient))

    async def subscribe_recipient(self, session: WebSocketSession, account: str, recipient: PushRecipient) -> None:
        """As :meth:`subscribe`."""
        await self._connections.subscribe(session, intern(account), recipient)
        if self._record_backlog is not None:
            await self._record_backlog(session, account)

    async def rotate(self, prior: str, recipient: AuthcryptSender, session: WebSocketSession | None) -> None:
        """
        Move subscriptions after a DID rotation (reference 2.3): the socket that the rotation came on stays live.

        Other sockets of the account are unsubscribed: the new DID has not authenticated on them.

        :raise StoreUnavailable: presence cannot be published.
        """
        connections = self._connections
        was_live = session is not None and connections.is_subscribed(session, prior)
        for other, other_recipient in connections.subscribers(prior):
            if other is not session and other_recipient is not None:  # or it speaks Decentrl
                connections.unsubscribe(other, prior)
        if session is not None and was_live:
            await connections.transfer_subscription(session, prior, intern(recipient.did), RecipientKeys(recipient))

    def push(self, messages: Iterable[StoredMessage]) -> Container[str]:
        """
        Write stored messages to every socket that subscribed to their accounts, those of one account together; the
        ids of the messages that a socket took. Never fails.
        """
        connections, targets = self._connections, []
        try:
            for message in messages:
                if message.account in connections.live_dids:
                    targets.append((message, connections.subscribers(message.account)))
            return self._push(targets) if targets else ()
        except Exception:
            _log.failure("pushing messages failed", redact_failure())
            return ()

    def push_remote(self, messages: Iterable[StoredMessage], by: Mapping[str, float] | None = None) -> Container[str]:
        """
        As :meth:`push`, for messages that another node accepted, but not to sockets whose backlog contains them.

        :param by: times by the id of a message, which is not pushed to sockets that subscribed after it.
        """
        targets, by, subscribers = [], by or {}, self._connections.subscribers
        try:
            for message in messages:
                wanted = subscribers(message.account, by=by.get(message.id, inf), message=message.id)
                targets.append((message, wanted))
            return self._push(targets)
        except Exception:
            _log.failure("pushing messages failed", redact_failure())
            return ()

    def push_queued(
        self, session: WebSocketSession, recipient: PushWriter, messages: Iterable[StoredMessage]
    ) -> Container[str]:
        """As :meth:`push`, for messages that were read from the store for one subscriber."""
        return self._push([(message, ((session, recipient),)) for message in messages])

    def was_pushed(self, id_: str) -> bool:
        """
        Whether a message was pushed here and is neither acknowledged nor overdue; with several nodes, whether it is
        remembered to have been pushed here and was not acknowledged here.
        """
        return id_ in self._pushes or id_ in self._pushed

    def _push(self, targets: Sequence[_PushTarget]) -> Container[str]:
        """The ids of the messages that a socket took or will take; fails only before the first is written."""
        accepted_by: dict[str, list[WebSocketSession]] = {}
        for session, recipient, messages in self._batch(targets):
            if not isinstance(recipient, RecipientKeys):
                self._push_by_writer(session, recipient, messages, accepted_by)
            elif send_to_subscribers(((session, recipient),), partial(self._make_frame, messages)):
                for message in messages:
                    accepted_by.setdefault(message.id, []).append(session)
        for message, _ in targets:
            if accepted_by.get(message.id):
                try:
                    self._record_push(message, accepted_by[message.id])
                except Exception:
                    _log.failure("recording a push failed", redact_failure())
        return accepted_by

    def _push_by_writer(
        self,
        session: WebSocketSession,
        writer: PushWriter,
        messages: Sequence[StoredMessage],
        accepted_by: dict[str, list[WebSocketSession]],
    ) -> None:
        for message in writer.push(session, messages):
            accepted_by.setdefault(message.id, []).append(session)
        if self._context.node:
            self._marks.flush_soon()  # the next request of the wallet may come to another process
        if writer.reads_queue:
            for message in messages:
                accepted_by.setdefault(message.id, [])

    def _batch(self, targets: Sequence[_PushTarget]) -> list[_PushBatch]:
        """Sockets, each with the messages of one frame: as many of an account as a frame may have, in their order."""
        most = 1 if self._context.push_mode == "raw" else self._context.delivery_limit
        batches: list[_PushBatch] = []
        filling: dict[tuple[WebSocketSession, str], tuple[list[StoredMessage], int]] = {}
        for message, subscribers in targets:
            size = len(message.payload)
            for session, recipient in subscribers:
                if recipient is None:
                    continue  # the socket speaks Decentrl
                key = session, message.account
                batch, held = filling.get(key) or ([], 0)
                if not batch or len(batch) >= most or held + size > MAX_PUSH_BYTES:
                    batch, held = [], 0
                    batches.append((session, recipient, batch))
                batch.append(message)
                filling[key] = batch, held + size
        return batches

    def _make_frame(self, messages: Sequence[StoredMessage], recipient: RecipientKeys) -> bytes:
        """The frame that pushes some messages to a subscriber."""
        if self._context.push_mode == "raw":
            (message,) = messages
            return message.payload
        form, attachments = self._context.delivery_form, []
        for message in messages:
            attachments.append(make_delivery_attachment(message.id, message.payload, message.form, form))
        return self._packer.pack(OutgoingMessage(self._packer.new_id(), DELIVERY, attachments=attachments), recipient)

    def _record_push(self, message: StoredMessage, accepted_by: Sequence[WebSocketSession]) -> None:
        """Track a push to these sockets."""
        recorder, id_ = self._context.recorder, message.id
        if self._context.node:
            self._pushed[id_] = None
            self._pushed.move_to_end(id_)
            if len(self._pushed) > MAX_REMEMBERED_PUSHES:
                self._pushed.popitem(last=False)
        if PROBE_DID_INFIX in message.recipient_did and recorder.is_own(message.recipient_did):
            return  # no mark, as it expires soon, and a failed push is not recorded
        before = self._pushes.pop(id_, None)  # a late read of the backlog may find it again
        sessions = tuple({*accepted_by, *before.sessions}) if before else tuple(accepted_by)
        self._pushes[id_] = _UnacknowledgedPush(
            self._context.clock.seconds(),
            intern(message.recipient_did),
            intern(message.account),
            message.received_at,
            sessions,
        )
        for session in accepted_by:
            self._by_session.put(session, id_, None)
        if len(self._pushes) > MAX_UNACKNOWLEDGED_PUSHES:
            oldest, push = next(iter(self._pushes.items()))
            self._remove_push(oldest)
            self._requeue_pushes({oldest: push})
        recorder.record_push(message, [session.name for session in accepted_by], "live", "didcomm")
        self._marks.add(id_)

    def find_unacknowledged(self, account: str) -> dict[str, float]:
        """
        Ids and times of arrival of the messages that were pushed to sockets that are subscribed to an account, and
        that are neither acknowledged nor overdue.
        """
        found: dict[str, float] = {}
        for session, _ in self._connections.subscribers(account):
            for id_, _ in self._by_session.lookup(session):
                push = self._pushes[id_]
                if push.account == account:
                    found[id_] = push.received_at
        return found

    def follow(self, account: str, callback: PushFollower) -> None:
        """Call back when pushes for an account are acknowledged, or pending again, for which nobody is woken then."""
        self._followers[account] = callback

    def unfollow(self, account: str) -> None:
        """Undo :meth:`follow`."""
        self._followers.pop(account, None)

    @property
    def unacknowledged_pushes(self) -> int:
        """Number of pushes that are neither acknowledged nor overdue."""
        return len(self._pushes)

    @property
    def remembered(self) -> int:
        """Number of messages remembered to have been pushed, with several nodes."""
        return len(self._pushed)

    def record_removed(self, removed: Sequence[RemovedMessage]) -> None:
        """Record acknowledged messages, and that their pushes arrived."""
        for one in removed:
            # Pushes of other nodes and workers are marked in the store.
            live = self.resolve_push(one.id) or bool(self._context.node and one.pushes)
            self._context.recorder.record_acknowledgement(one, "live" if live else "pickup", "didcomm")
            if self._resolve_elsewhere is not None:
                self._resolve_elsewhere(one.account, one.id)

    def resolve_push(self, id_: str) -> bool:
        """Forget the push of a removed message; whether it had been pushed here."""
        self._pushed.pop(id_, None)
        self._marks.cancel_mark(id_)
        push = self._remove_push(id_)
        if push is not None and push.account in self._followers:
            self._followers[push.account](id_, True)
        return push is not None

    def requeue_overdue_pushes(self) -> None:
        """Make unacknowledged pushes pending again after the timeout, or when the clock was set back."""
        now = self._context.clock.seconds()
        late = {}
        for id_, push in self._pushes.items():
            if 0.0 <= now - push.at < self._context.push_timeout:
                break
            late[id_] = push
        for id_ in late:
            self._remove_push(id_)
        self._requeue_pushes(late)

    def requeue_pushes(self, session: WebSocketSession, account: str) -> None:
        """Make the pushes of an account to a socket pending again, as it has another one."""
        ids = [id_ for id_, _ in self._by_session.lookup(session) if self._pushes[id_].account == account]
        for id_ in ids:
            self._by_session.discard(session, id_)
        self._requeue_pushes(self._withdraw_pushes(session, ids), is_connected=True)

    def _session_closed(self, session: WebSocketSession) -> None:
        self._bound.pop(session)
        self._requeue_pushes(self._withdraw_pushes(session, [id_ for id_, _ in self._by_session.pop(session)]))

    def _withdraw_pushes(self, session: WebSocketSession, ids: Iterable[str]) -> dict[str, _UnacknowledgedPush]:
        """Forget that messages were pushed to a socket; the pushes of those that were pushed to no other one."""
        lost = {}
        for id_ in ids:
            push = self._pushes[id_]
            push.sessions = tuple(one for one in push.sessions if one is not session)
            if not push.sessions:
                del self._pushes[id_]
                lost[id_] = push
        return lost

    def _remove_push(self, id_: str) -> _UnacknowledgedPush | None:
        """Forget a push; None if there was none."""
        push = self._pushes.pop(id_, None)
        if push is not None:
            for session in push.sessions:
                self._by_session.discard(session, id_)
        return push

    def _mark(self, ids: Sequence[str]) -> Deferred[None]:
        return self._context.store.mark_delivered(ids, node=self._context.node)

    def _requeue_pushes(self, pushes: Mapping[str, _UnacknowledgedPush], *, is_connected: bool = False) -> None:
        """
        Make pushes pending again (UC-021 AF-6).

        :param is_connected: whether they will be pushed to another socket.
        """

        followers, wake = self._followers, self._context.wake

        def record(ids: Iterable[str]) -> None:
            for id_ in ids:
                push = pushes[id_]
                self._context.recorder.record_push_failure(id_, push.recipient_did, push.received_at)
                if wake is not None and not is_connected and push.account not in followers:
                    wake(push.account)

        for id_, push in pushes.items():
            if push.account in followers:
                followers[push.account](id_, False)
        unmarked = {id_: None for id_ in pushes if self._marks.cancel_mark(id_)}
        record(unmarked)
        if marked := [id_ for id_ in pushes if id_ not in unmarked]:
            log_mark_failure(self._context.store.mark_pending(marked).addCallback(record))


# A packed reply grows by 4/3 for base64url, and once more where the attachments are base64 themselves.
DELIVERY_BYTES = 1_048_576 * 9 // 16


class QueuePickup:
    """
    What all versions of Message Pickup do with the queue of an account.

    :param record_pickups: lets other nodes know that messages were handed out; None where there are none.
    """

    def __init__(
        self,
        context: DIDCommContext,
        live: LiveDelivery,
        record_pickups: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._context = context
        self._live = live
        self._record_pickups = record_pickups

    def note_poll(self, account: Account, recipient: str | None = None) -> None:
        """
        The state of the queue is about to be read: whatever arrives from now on may not be shown.

        :param recipient: what the request is restricted to, which says nothing about other messages.
        """
        if self._context.note_poll is not None and recipient is None:
            self._context.note_poll(account.did)

    async def find_recipient(self, account: Account, named: str | None) -> str | None:
        """
        A recipient DID of this account, given in any form.

        :raise MediationNotGranted: it is unknown or somebody else's, which look the same.
        """
        if named is None:
            return None
        did = canonicalize_did(named)
        if await self._context.store.find_owner(did) == account.did:
            return did
        raise MediationNotGranted

    async def fetch(
        self,
        account: Account,
        recipient: str | None,
        limit: int,
        session: str | None,
        *,
        leave_out: Set[str] = frozenset(),
    ) -> list[StoredMessage]:
        """
        The oldest messages, recorded as delivered; removes nothing.

        :param recipient: as for :meth:`~mediatord.store.interfaces.messages.IMessageStore.fetch_messages`.
        :param session: name of the socket of the request; None for HTTP.
        :param leave_out: ids of messages that the wallet has; of large ones, all others may be left out, too.
        """
        reading = self._context.store.fetch_messages(
            account.did, recipient, limit=limit + len(leave_out), max_bytes=DELIVERY_BYTES
        )
        messages = [message for message in await reading if message.id not in leave_out][:limit]
        self.record_delivery(messages, session)
        return messages

    def record_delivery(self, messages: Sequence[StoredMessage], session: str | None) -> None:
        """Messages are about to be handed out in the answer to a request."""
        for message in messages:
            self._context.recorder.record_push(message, [session], "pickup", "didcomm")
        if self._record_pickups is not None:
            self._record_pickups([message.id for message in messages])

    async def acknowledge(
        self, account: str, ids: Sequence[str], *, with_status: bool = False
    ) -> AcknowledgementResult:
        """
        Remove messages of an account.

        :param with_status: whether the result has the status of the queue, if that can be read.
        """
        request = AcknowledgementRequest(account, ids, with_status)
        (result,) = await self._context.store.acknowledge_each([request])
        if isinstance(result, MediatorError):
            raise result
        self._live.record_removed(result.removed)
        return result


class Pickup:
    """Serves the requests of an account about its messages."""

    def __init__(self, context: DIDCommContext, live: LiveDelivery, queue: QueuePickup) -> None:
        self._context = context
        self._live = live
        self._queue = queue

    async def status_request(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """Status of the queue of the account, or of one of its recipient DIDs."""
        named = parse_recipient(request.received.message.require_body())
        recipient = await self._queue.find_recipient(account, named)
        self._queue.note_poll(account, recipient)
        return await self.status(request, account, named, recipient)

    async def delivery_request(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """The oldest messages, or a `status` if there are none; removes nothing."""
        context, body = self._context, request.received.message.require_body()
        named = parse_recipient(body)
        limit = parse_limit(body, context.delivery_limit)
        recipient = await self._queue.find_recipient(account, named)
        self._queue.note_poll(account, recipient)
        messages = await self._queue.fetch(account, recipient, limit, request.record.session)
        if not messages:
            return await self.status(request, account, named, recipient)
        attachments = [
            make_delivery_attachment(message.id, message.payload, message.form, context.delivery_form)
            for message in messages
        ]
        return context.packer.answer(request.received.message, DELIVERY, make_delivery_body(named), attachments)

    async def acknowledge(
        self, request: MessageRequest, account: Account, *, with_status: bool
    ) -> OutgoingMessage | None:
        """
        Remove the messages of this account that a `messages-received` names.

        :param with_status: whether to answer with the status of the queue.
        """
        if ids := parse_message_ids(request.received.message.require_body()):
            result = await self._queue.acknowledge(account.did, ids, with_status=with_status)
            if result.status is not None:
                return self.make_status(request, account, result.status)
        return await self.status(request, account) if with_status else None

    def finish_acknowledgement(
        self, request: MessageRequest, account: Account, result: AcknowledgementResult
    ) -> OutgoingMessage | None:
        """Record what was removed; the status of the queue, if it was read."""
        self._live.record_removed(result.removed)
        return None if result.status is None else self.make_status(request, account, result.status)

    async def live_delivery_change(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """
        Switch pushing to this socket on or off; the backlog is fetched by delivery requests.

        The status counts messages from before presence was published; later ones are pushed.
        """
        wanted = parse_live_delivery(request.received.message.require_body())
        session, sender = request.origin.session, request.received.authcrypt_sender
        if wanted and session is None:
            raise LiveModeUnsupported
        if session is not None and wanted and sender is not None:
            try:
                await self._live.subscribe(session, sender)
            except TooManySubscriptions:
                raise LiveModeUnsupported from None
        elif session is not None:
            self._context.connections.unsubscribe(session, account.did)
        self._queue.note_poll(account)
        return await self.status(request, account)

    async def status(
        self, request: MessageRequest, account: Account, named: str | None = None, recipient: str | None = None
    ) -> OutgoingMessage:
        """
        Status of the queue of the account.

        :param named: the recipient DID that it is restricted to, as the request spells it, with `recipient` as its
            canonical form; None for the whole account.
        """
        status = await self._context.store.get_queue_status(account.did, recipient)
        return self.make_status(request, account, status, named)

    def make_status(
        self, request: MessageRequest, account: Account, status: QueueStatus, named: str | None = None
    ) -> OutgoingMessage:
        """A `status` with these contents; `named` as for :meth:`status`."""
        context, session = self._context, request.origin.session
        body = make_status_body(
            count=status.message_count,
            total_bytes=status.total_bytes,
            oldest=status.oldest_received_time,
            newest=status.newest_received_time,
            now=context.clock.seconds(),
            recipient_did=named,
            live=session is not None and context.connections.is_subscribed(session, account.did),
        )
        return context.packer.answer(request.received.message, STATUS, body)
