"""
Writers of pushes to sockets of DIDComm v1: in live delivery of Message Pickup 2.0, and in implicit pickup.

A wallet of implicit pickup asks with one trust ping for all that is queued and all that comes. Aries has it sent as
bare envelopes, which are never acknowledged, so mediators lose them. Here a wallet that understands Message Pickup
2.0 gets `delivery` messages instead, which it acknowledges; any other gets bare envelopes, each followed by a ping of
the WebSocket, whose pong shows that the wallet has read it. One that is not known yet is first sent one `delivery`.

What is queued is read in pages, while little is unacknowledged, and by few wallets at a time. Meanwhile new messages
are not pushed, but read in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred, DeferredSemaphore
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.delivery.connections import MAX_RECEIPTS, WebSocketSession, close_ignoring_errors
from mediatord.didcomm.context import DIDCommContext
from mediatord.didcomm.pickup import LiveDelivery, QueuePickup
from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm_v1.message import V1Answer
from mediatord.protocol.didcomm_v1.message_pickup import DELIVERY, MAX_DELIVERY, make_delivery_members
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.messages import ArrivalWindow, StoredMessage, new_didcomm_message_id
from mediatord.store.interfaces.v1_connections import ImplicitPickup

_log = Logger()

# Seconds that a wallet has to acknowledge the first `delivery`, once it has read it.
PROBE_SECONDS = 5.0
# Seconds until another attempt to push what a socket did not take or its wallet did not acknowledge.
RETRY_SECONDS = 1.0
# Messages that are read from the store at once.
PAGE_SIZE = MAX_DELIVERY
# Unacknowledged messages of one wallet, in `delivery` messages and as bare envelopes.
MAX_DELIVERED, MAX_BARE = 2 * MAX_DELIVERY, MAX_RECEIPTS
# Wallets whose queues are read at the same time.
MAX_READERS = 4

# Packs a message to an account, with a prefix of its type.
PushPacker = Callable[[V1Answer, str, str], bytes]


class LiveWriter:
    """
    Writes `delivery` messages to one wallet.

    :param prefix: of their type.
    """

    __slots__ = ("_pack", "_prefix", "account")

    reads_queue = False

    def __init__(self, account: str, prefix: str, pack: PushPacker) -> None:
        self.account = account
        self._prefix = prefix
        self._pack = pack

    def push(self, session: WebSocketSession, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        """As :meth:`mediatord.didcomm.messages.PushWriter.push`; at most ten messages in each `delivery`."""
        for start in range(0, len(messages), MAX_DELIVERY):
            some = messages[start : start + MAX_DELIVERY]
            if not write_safely(session, partial(self._send_delivery, session, some)):
                return messages[:start]
        return messages

    def _send_delivery(self, session: WebSocketSession, messages: Sequence[StoredMessage]) -> bool:
        return session.send(self.make_delivery(messages))

    def make_delivery(self, messages: Sequence[StoredMessage], id_: str | None = None) -> bytes:
        """A packed `delivery` that answers no request. :param id_: of it; None for a new one."""
        members = make_delivery_members([(message.id, message.payload) for message in messages])
        return self._pack(V1Answer(DELIVERY, members, has_thread=False, id=id_), self.account, self._prefix)


def write_safely(session: WebSocketSession, write: Callable[[], bool]) -> bool:
    """
    Write to a socket; whether it took the frame. Never fails.

    A socket for which writing raises is closed, so that its wallet does not wait in vain.
    """
    try:
        return write()
    except Exception:
        _log.failure("writing to a socket failed", redact_failure())
        close_ignoring_errors(session, 1011, "internal error")
        return False


class _Probe(NamedTuple):
    """A first `delivery` that is not acknowledged yet, and the message in it."""

    delivery_id: str
    message_id: str


class ImplicitWriter(LiveWriter):
    """
    Writes what is queued and what comes to one wallet of implicit pickup.

    :param how: how the wallet takes mail on a socket, as far as that is known.
    :param readers: limits how many read at the same time.
    :param remember: called with how the wallet takes mail, once that is found out.
    :param recall: what was found out about it, perhaps by another worker or node.
    """

    __slots__ = (
        "_context",
        "_how",
        "_is_behind",
        "_is_ended",
        "_is_pushing_page",
        "_is_reading",
        "_is_removing",
        "_live",
        "_probe",
        "_probe_timer",
        "_queue",
        "_read_ids",
        "_readers",
        "_recall",
        "_remember",
        "_retry_timer",
        "_unacknowledged",
        "session",
    )

    reads_queue = True

    def __init__(
        self,
        session: WebSocketSession,
        account: str,
        prefix: str,
        pack: PushPacker,
        how: ImplicitPickup,
        context: DIDCommContext,
        live: LiveDelivery,
        queue: QueuePickup,
        readers: DeferredSemaphore,
        remember: Callable[[str, ImplicitPickup], Coroutine[Any, Any, None]],
        recall: Callable[[str], Coroutine[Any, Any, ImplicitPickup]],
    ) -> None:
        super().__init__(account, prefix, pack)
        self.session = session
        self._how = how
        self._context = context
        self._live = live
        self._queue = queue
        self._readers = readers
        self._remember = remember
        self._recall = recall
        # Pushed, and neither removed nor pending again.
        self._unacknowledged: set[str] = set()
        # Whether messages may be queued that were not pushed.
        self._is_behind = True
        self._is_reading = False
        self._is_pushing_page = False
        self._is_ended = False
        self._retry_timer: IDelayedCall | None = None
        self._probe: _Probe | None = None
        self._probe_timer: IDelayedCall | None = None
        # Of bare envelopes that the wallet has read.
        self._read_ids: list[str] = []
        self._is_removing = False

    def begin(self) -> None:
        """Push what is queued."""
        self._unacknowledged.update(self._live.find_unacknowledged(self.account))
        self._live.follow(self.account, self._push_ended)
        self._schedule(0.0)

    def end(self) -> None:
        """Stop; the socket has been closed, or is used in another way."""
        self._is_ended = True
        self._live.unfollow(self.account)
        for timer in (self._retry_timer, self._probe_timer):
            if timer is not None and timer.active():
                timer.cancel()
        has_other = bool(self._context.connections.subscribers(self.account))
        has_unread_mail = bool(self._is_behind or self._is_reading or self._unacknowledged)
        if self._context.wake is not None and not has_other and has_unread_mail:
            self._context.wake(self.account)

    def accept_deliveries(self) -> None:
        """The wallet has been seen to speak Message Pickup 2.0."""
        if self._how != "delivery":
            self._how = "delivery"
            self._stop_probe()
            self._schedule(0.0)

    def note_problem_report(self, named: Collection[str]) -> None:
        """
        The wallet has reported a problem; with the first `delivery`, if that is not acknowledged yet.

        :param named: the threads that the report names, if any.
        """
        if self._probe is not None and (not named or self._probe.delivery_id in named):
            self._reject_delivery()

    def _reject_delivery(self) -> None:
        """The wallet does not speak Message Pickup 2.0."""
        self._how = "raw"
        self._is_behind = True
        self._stop_probe()
        self._schedule(0.0)
        self._live.requeue_pushes(self.session, self.account)
        self._run(self._remember(self.account, "raw"))

    def push(self, session: WebSocketSession, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        """Write as many messages as may be unacknowledged, unless others have to be read before."""
        if not self._is_pushing_page and (self._is_behind or self._is_reading):
            self._is_behind = True
            return ()
        return self._write(messages)

    def _write(self, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        new = [message for message in messages if message.id not in self._unacknowledged]
        some = new[: self._count_free()]
        if self._how == "unknown":
            taken = some[:1] if some and self._send_probe(some[0]) else []
        elif self._how == "delivery":
            taken = list(super().push(self.session, some))
        else:
            taken = []
            for message in some:
                if not self._write_bare(message):
                    break
                taken.append(message)
        self._unacknowledged.update([message.id for message in taken])
        if len(taken) < len(new):
            self._is_behind = True
            self._schedule(RETRY_SECONDS)
        return taken

    def _count_free(self) -> int:
        """Number of messages that may be pushed now."""
        if self._how == "unknown":
            return 0 if self._probe is not None else 1
        return max(0, (MAX_DELIVERED if self._how == "delivery" else MAX_BARE) - len(self._unacknowledged))

    def _write_bare(self, message: StoredMessage) -> bool:
        on_receipt = partial(self._bare_envelope_read, message.id)
        return write_safely(self.session, lambda: self.session.send_with_receipt(message.payload, on_receipt))

    def _bare_envelope_read(self, id_: str) -> None:
        self._read_ids.append(id_)
        if not self._is_removing:
            self._is_removing = True
            self._run(self._remove_read())

    async def _remove_read(self) -> None:
        try:
            while self._read_ids:
                ids, self._read_ids = self._read_ids, []
                await self._queue.acknowledge(self.account, ids)
        except StoreUnavailable:
            pass  # they are pending again after the timeout
        finally:
            self._is_removing = False

    def _send_probe(self, message: StoredMessage) -> bool:
        """Write a single message as `delivery`, to find out whether the wallet acknowledges it."""
        probe = _Probe(new_didcomm_message_id(), message.id)
        frame = self.make_delivery([message], probe.delivery_id)
        if not write_safely(self.session, lambda: self.session.send_with_receipt(frame, self._probe_read)):
            return False
        self._probe = probe
        return True

    def _probe_read(self) -> None:
        if self._probe is not None and self._probe_timer is None and not self._is_ended:
            self._probe_timer = self._context.clock.callLater(PROBE_SECONDS, self._probe_overdue)

    def _probe_overdue(self) -> None:
        self._run(self._judge_probe(is_overdue=True))

    async def _judge_probe(self, *, is_overdue: bool) -> None:
        """
        The wallet may have acknowledged elsewhere; if it has not, and had the time, it does not acknowledge. Else the
        message was removed otherwise, which says nothing, and the next one is the probe.
        """
        probe, how = self._probe, await self._recall(self.account)
        if self._is_ended or probe is None or self._probe is not probe:
            return
        if how == "delivery":
            self.accept_deliveries()
        elif is_overdue:
            self._reject_delivery()
        else:
            self._stop_probe()
            self._schedule(0.0)

    def _stop_probe(self) -> None:
        self._probe = None
        if self._probe_timer is not None and self._probe_timer.active():
            self._probe_timer.cancel()
        self._probe_timer = None

    def _push_ended(self, id_: str, is_removed: bool) -> None:
        """A message was removed, or is pending again; if it was the probe, another one follows."""
        self._unacknowledged.discard(id_)
        self._is_behind = self._is_behind or not is_removed
        if self._probe is not None and self._probe.message_id == id_:
            if is_removed:
                self._run(self._judge_probe(is_overdue=False))
            else:
                self._stop_probe()
        self._schedule(0.0 if is_removed else RETRY_SECONDS)

    def _schedule(self, delay: float) -> None:
        """Read what is queued after some seconds, if anything may be."""
        if self._is_ended or not self._is_behind:
            return
        clock = self._context.clock
        if self._retry_timer is not None:
            if self._retry_timer.getTime() <= clock.seconds() + delay:
                return
            self._retry_timer.cancel()
        self._retry_timer = clock.callLater(delay, self._read_if_free)

    def _read_if_free(self) -> None:
        self._retry_timer = None
        if self._is_reading:
            return
        if self._has_room():
            self._is_reading = True
            self._run(self._read_queue())
        elif self._context.node and self._unacknowledged:
            self._run(self._find_removed())

    def _has_room(self) -> bool:
        """Whether anything may be queued, and a page of it may be pushed."""
        if self._is_ended or not self._is_behind:
            return False
        free = self._count_free()
        return free >= PAGE_SIZE or (free > 0 and not self._unacknowledged)

    async def _read_queue(self) -> None:
        try:
            while self._has_room() and await self._readers.run(self._begin_page):
                pass
        except Exception as error:
            self._is_behind = True
            if not isinstance(error, StoreUnavailable):
                raise
        finally:
            self._is_reading = False
        self._schedule(RETRY_SECONDS)

    async def _find_removed(self) -> None:
        """Forget pushes that were acknowledged at another node, which does not tell."""
        pushed, store = frozenset(self._unacknowledged), self._context.store
        with suppress(StoreUnavailable):
            limit = len(pushed) + PAGE_SIZE
            arrivals = await store.find_arrivals([self.account], ArrivalWindow(0.0, inf), limit=limit)
            for id_ in pushed.difference(one.id for one in arrivals):
                self._live.resolve_push(id_)
        self._schedule(RETRY_SECONDS)

    def _begin_page(self) -> Deferred[bool]:
        return Deferred.fromCoroutine(self._push_page())

    async def _push_page(self) -> bool:
        """Push some of the oldest messages; whether the socket took any."""
        self._is_behind = False
        messages = await self._read_page()
        if self._is_ended or not messages:
            return False
        before = len(self._unacknowledged)
        self._is_pushing_page = True
        try:
            self._live.push_queued(self.session, self, messages)
        finally:
            self._is_pushing_page = False
        return len(self._unacknowledged) > before

    async def _read_page(self) -> list[StoredMessage]:
        """Some of the oldest messages that are to be pushed; there may be more if that is noted."""
        store, limit = self._context.store, len(self._unacknowledged) + PAGE_SIZE + 1
        window = ArrivalWindow(0.0, inf)
        while not self._is_ended:
            arrivals = await store.find_arrivals([self.account], window, limit=limit)
            unpushed = [one for one in arrivals if one.id not in self._unacknowledged]
            page = unpushed[:PAGE_SIZE]
            messages = await store.find_messages([one.id for one in page]) if page else []
            if messages:
                self._is_behind |= len(unpushed) > len(messages)
                return messages
            # All of the page have expired, or were removed meanwhile.
            if len(unpushed) > PAGE_SIZE:
                window = window.behind(page[-1])
            elif len(arrivals) == limit:
                window = window.behind(arrivals[-1])
            else:
                break
        return []

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        with outside_request():
            done = Deferred.fromCoroutine(work)
        done.addErrback(self._fail)

    def _fail(self, failure: Failure) -> None:
        _log.failure("implicit pickup failed", redact_failure(failure))
        close_ignoring_errors(self.session, 1011, "internal error")
