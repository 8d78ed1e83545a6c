"""
The channel between the workers of one daemon: pushes of what one has accepted for sockets at another.

Each worker listens on a UNIX socket, and connects to those of all others to push to them. Everything is in frames:
four bytes of length, then the content. The server begins with a hello, the client with its number. Pushes of one
reactor iteration share a frame: four bytes of length, a JSON array with the time and an array for each push, and the
payloads; so the other worker need not read them from the store. It answers with a frame that has a byte for each of
them, in order.

Nothing is sealed, since the kernel vouches that both ends are processes of one user. What is lost, because a worker
was killed, stopped or too slow, is in the store, where anti-entropy finds it. A contract change is not: it is
repeated when the worker answers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic

import orjson
from twisted.application.service import Service
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import ClientFactory, Factory, connectionDone
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.protocols.basic import Int32StringReceiver
from twisted.python.failure import Failure

from mediatord.cluster.peer_notifications import Item, NotificationReceiver, PeerNotificationDelivery
from mediatord.errors import StoreUnavailable
from mediatord.observability.metrics import Metrics
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage
from mediatord.workers.live_did_counters import LiveDIDCounters

_log = Logger()

# Another version, which the replacement of a worker may have after an upgrade, gets no pushes.
HELLO = b"mediatord siblings 2\n"
# Bytes of a frame, and of the largest payload that is sent along.
MAX_FRAME_BYTES = 4_194_304
MAX_SENT_PAYLOAD_BYTES = 1_048_576

# A frame with so many pushes or bytes takes no more: the other worker pushes them without a pause. Whatever its last
# push adds, a payload and the DIDs of a wallet, the frame has far less than MAX_FRAME_BYTES.
BATCH_PUSHES, BATCH_BYTES = 64, 65_536

_MESSAGE, _EVENT, _CONTRACTS, _LIVE, _RESOLVE = "m", "e", "c", "l", "r"
# Those that push something, and are counted.
_PUSHES = (_MESSAGE, _EVENT, _CONTRACTS)
# Results. A late push is read from the store first, for sockets that are there. The last one is never sent.
_TAKEN, _NOT_TAKEN, _LATE, _DROPPED, _UNANSWERED = b"1", b"0", b"?", b"-", b""
_OUTCOMES = {_TAKEN: "pushed", _NOT_TAKEN: "no_session", _LATE: "pushed", _DROPPED: "dropped", _UNANSWERED: "failed"}
# Whether a socket took it, if that is known; False for all others.
_IS_TAKEN = {_TAKEN: True, _LATE: None}

# Pushes to one worker whose results are awaited, and their bytes.
MAX_OUTSTANDING = 10_000
MAX_OUTSTANDING_BYTES = 33_554_432
# Seconds until a result is given up, with the connection: the worker was stopped, or is too busy.
PUSH_TIMEOUT = 2.0
# Seconds between attempts to connect.
RECONNECT_DELAY = 0.25
# Seconds for which a push may have been under way. After that its message may have been acknowledged or expired, so
# it is read from the store.
MAX_PUSH_AGE = 1.0
# Pushes that wait to be read from the store, and how many are read at a time.
MAX_LATE = 10_000
LATE_BATCH = 100
# DIDs whose contracts have changed, and that a worker or its sockets have not been notified of.
MAX_CHANGED = 10_000
CHANGED_RETRY_DELAY = 1.0

_PEER_CREDENTIALS = struct.Struct("3i")


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a UNIX socket belongs to the user of this one."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


class _SiblingConnection(Int32StringReceiver):
    """One end of a connection between two workers."""

    MAX_LENGTH = MAX_FRAME_BYTES

    def __init__(self, refusals: LogThrottle) -> None:
        self._refusals = refusals

    def connectionMade(self) -> None:
        if is_own_user(self.transport.getHandle()):  # type: ignore[union-attr]  # a socket
            self.connected_to_sibling()
            return
        if count := self._refusals.count_occurrence():
            _log.error(
                "refused a connection between workers: the other process belongs to another user"
                " ({count} times since the last report)",
                count=count,
            )
        self.abort()

    def connected_to_sibling(self) -> None:
        """The other end belongs to the same user."""
        raise NotImplementedError

    def lengthLimitExceeded(self, length: int) -> None:  # noqa: N802  Twisted's name
        self.abort()

    def abort(self) -> None:
        """Close the connection at once, and read no more of it."""
        self.paused = True
        self.transport.abortConnection()  # type: ignore[union-attr]  # it is connected


class _SiblingClientConnection(_SiblingConnection):
    def __init__(self, link: SiblingLink, number: int, refusals: LogThrottle) -> None:
        super().__init__(refusals)
        self._link = link
        self._number = number

    def connected_to_sibling(self) -> None:
        self.sendString(b"%d" % self._number)

    def stringReceived(self, string: bytes) -> None:  # noqa: N802  Twisted's name
        self._link.received(self, string)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._link.lost(self)


ResultCallback = Callable[[bytes], object]


@dataclass(eq=False, slots=True)
class _Batch:
    """
    Pushes in one frame.

    :ivar since: time of the first by the reactor's clock.
    :ivar sent_at: the same by the clock that all workers share.
    :ivar pushes: in JSON.
    :ivar answered: called with the results; each with whether the push is counted.
    :ivar size: bytes of the pushes and the payloads.
    """

    since: float
    sent_at: float
    pushes: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    answered: list[tuple[ResultCallback, bool]] = field(default_factory=list)
    size: int = 0


class SiblingLink(ClientFactory):
    """
    Pushes to one other worker.

    :param path: of its socket.
    :param number: of this worker.
    :param steady: as for :class:`SiblingDelivery`.
    """

    noisy = False

    def __init__(self, reactor: Any, path: str, number: int, metrics: Metrics, steady: Callable[[], float]) -> None:
        self._reactor = reactor
        self._steady = steady
        self._path = path
        self._number = number
        self._metrics = metrics
        # Once it has said hello: one that is stopped accepts connections, but says nothing.
        self._connection: _SiblingClientConnection | None = None
        self._connector: Any = None
        self._retry_timer: IDelayedCall | None = None
        # In the order of their frames; the last one may yet take pushes.
        self._batches: deque[_Batch] = deque()
        self._collecting: _Batch | None = None
        self._sending: IDelayedCall | None = None
        self._outstanding = self._bytes = 0
        self._timer: IDelayedCall | None = None
        self._changed: dict[str, None] = {}
        self._warning, self._refusals = LogThrottle(reactor), LogThrottle(reactor)
        self._encoding_errors = LogThrottle(reactor)
        self._is_closed = False

    @property
    def pending(self) -> tuple[int, int]:
        """Pushes that are to be sent or whose results are awaited, and their bytes, without the heads of frames."""
        return self._outstanding + len(self._changed), self._bytes

    def connect(self) -> None:
        """Connect, unless that is done or under way."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if self._connector is None and not self._is_closed:
            self._connector = self._reactor.connectUNIX(self._path, self)

    def buildProtocol(self, addr: IAddress | None) -> _SiblingClientConnection:
        return _SiblingClientConnection(self, self._number, self._refusals)

    def clientConnectionFailed(self, connector: Any, reason: Failure) -> None:
        self.clientConnectionLost(connector, reason)

    def clientConnectionLost(self, connector: Any, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Connect again after a while, or when the other worker connects."""
        self._connector = None
        if not self._is_closed and self._retry_timer is None:
            self._retry_timer = self._reactor.callLater(RECONNECT_DELAY, self._retry)

    def push(self, kind: str, fields: Sequence[Any], payload: bytes | None, answered: ResultCallback) -> None:
        """
        Push at the end of the reactor iteration, and call `answered` with the result.

        :param payload: None if the other worker has to read it from the store.
        """
        is_counted, size = kind in _PUSHES, 0 if payload is None else len(payload)
        is_open = self._connection is not None and not self._is_closed
        if not is_open or not self._has_room(size):
            self._refuse(is_counted, answered, _UNANSWERED, "dropped" if is_open else "failed")
            return
        try:
            encoded = orjson.dumps((kind, None if payload is None else size, *fields))
        except orjson.JSONEncodeError:
            if count := self._encoding_errors.count_occurrence():
                _log.error(
                    "a push to another worker cannot be encoded ({count} times since the last report)", count=count
                )
            self._refuse(is_counted, answered, _DROPPED, "failed")  # it would be in vain to repeat it
            return
        batch = self._collecting or self._begin_batch()
        batch.pushes.append(encoded)
        batch.answered.append((answered, is_counted))
        if payload:
            batch.payloads.append(payload)
        size += len(encoded)
        batch.size += size
        self._bytes += size
        self._outstanding += 1
        if len(batch.answered) >= BATCH_PUSHES or batch.size >= BATCH_BYTES:
            self._send()

    def notify_changed(self, did: str) -> None:
        """Notify it, sooner or later, that the contracts of a DID have changed."""
        self._keep_changed(did)
        self._send_changed()

    def received(self, connection: _SiblingClientConnection, string: bytes) -> None:
        """The hello, or the results of the pushes in one frame."""
        if self._connection is not connection:
            self._greet(connection, string)
            return
        metrics, batch = self._metrics, self._batches.popleft()
        duration = self._reactor.seconds() - batch.since
        self._bytes -= batch.size
        self._outstanding -= len(batch.answered)
        for number, (answered, is_counted) in enumerate(batch.answered):
            result = string[number : number + 1]
            if is_counted:
                metrics.cluster_pushes.inc(_OUTCOMES[result])
                metrics.peer_notification_duration.observe(duration)
            answered(result)
        if self._changed:
            self._send_changed()

    def lost(self, connection: _SiblingClientConnection) -> None:
        """The connection has ended: the results of what was pushed are unknown."""
        if self._connection is connection:
            self._connection = self._collecting = None
            batches, self._batches = self._batches, deque()
            self._outstanding = self._bytes = 0
            for batch in batches:
                for answered, is_counted in batch.answered:
                    self._refuse(is_counted, answered, _UNANSWERED, "failed")

    def end(self) -> None:
        """Send what was pushed, and close the connection for good; what is pushed later fails."""
        self._send()
        self._is_closed = True
        for timer in (self._retry_timer, self._timer, self._sending):
            if timer is not None and timer.active():
                timer.cancel()
        self._retry_timer = self._timer = self._sending = None
        if self._connector is not None:
            self._connector.disconnect()

    def _begin_batch(self) -> _Batch:
        batch = self._collecting = _Batch(self._reactor.seconds(), self._steady())
        self._batches.append(batch)
        if self._sending is None or not self._sending.active():
            self._sending = self._reactor.callLater(0, self._send)
        if self._timer is None:
            self._timer = self._reactor.callLater(PUSH_TIMEOUT, self._check_age)
        return batch

    def _refuse(self, is_counted: bool, answered: ResultCallback, result: bytes, outcome: str) -> None:
        if is_counted:
            self._metrics.cluster_pushes.inc(outcome)
        answered(result)

    def _greet(self, connection: _SiblingClientConnection, string: bytes) -> None:
        if string == HELLO:
            self._connection = connection
            self._send_changed()
        else:
            connection.abort()

    def _retry(self) -> None:
        self._retry_timer = None
        self.connect()

    def _send(self) -> None:
        """Send the pushes that were collected."""
        batch, self._collecting = self._collecting, None
        if batch is None or self._connection is None:
            return
        head = b"[%b,[%b]]" % (orjson.dumps(batch.sent_at), b",".join(batch.pushes))
        lengths = struct.pack(">II", 4 + len(head) + sum(map(len, batch.payloads)), len(head))
        frame = b"".join((lengths, head, *batch.payloads))
        batch.pushes, batch.payloads = [], []
        self._connection.transport.write(frame)  # type: ignore[union-attr]  # it is connected

    def _has_room(self, size: int) -> bool:
        outstanding = self._outstanding
        return not outstanding or (outstanding < MAX_OUTSTANDING and self._bytes + size <= MAX_OUTSTANDING_BYTES)

    def _keep_changed(self, did: str) -> None:
        self._changed.pop(did, None)
        self._changed[did] = None
        if len(self._changed) > MAX_CHANGED:
            self._changed.pop(next(iter(self._changed)))
            self._metrics.cluster_pushes.inc("dropped")

    def _send_changed(self) -> None:
        """Send the changes that it has not been sent, as far as there is room."""
        while self._changed and self._connection is not None and not self._is_closed:
            did = next(iter(self._changed))
            if not self._has_room(len(did)):
                return
            del self._changed[did]
            self.push(_CONTRACTS, [did], b"", partial(self._changed_answered, did))

    def _changed_answered(self, did: str, result: bytes) -> None:
        if result == _UNANSWERED:
            self._keep_changed(did)

    def _check_age(self) -> None:
        self._timer = None
        if not self._batches or self._connection is None:
            return
        waited = self._reactor.seconds() - self._batches[0].since
        if 0.0 <= waited < PUSH_TIMEOUT:  # the clock may have been set back
            self._timer = self._reactor.callLater(PUSH_TIMEOUT - waited, self._check_age)
            return
        if count := self._warning.count_occurrence():
            _log.warn(
                "another worker does not respond at {path} ({count} times since the last report)",
                path=self._path,
                count=count,
            )
        self._connection.abort()


class SiblingDelivery:
    """
    Pushes to sockets at other workers of what was accepted here. None of its Deferreds fails.

    :param counters: say which workers may have sockets of a DID.
    :param directory: of the sockets.
    :param number: of this worker, from 0.
    :param steady: seconds since a time that is the same in all workers, as the clocks of their reactors may differ.
    """

    def __init__(
        self,
        reactor: Any,
        counters: LiveDIDCounters,
        directory: Path,
        number: int,
        metrics: Metrics,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._links = {
            other: SiblingLink(reactor, str(get_socket_path(directory, other)), number, metrics, steady)
            for other in counters.others
        }

    @property
    def pending(self) -> tuple[int, int]:
        """As :attr:`SiblingLink.pending`, of all links."""
        pending = [link.pending for link in self._links.values()]
        return sum(entries for entries, _ in pending), sum(size for _, size in pending)

    def connect(self, numbers: Iterable[int] | None = None) -> None:
        """Connect to workers; to all by default."""
        for number in self._links if numbers is None else numbers:
            if number in self._links:
                self._links[number].connect()

    def deliver_message(self, message: StoredMessage) -> Deferred[bool | None] | None:
        """
        Fires with whether a socket of another worker took a message, with None if one may yet take it. Returns None
        if no other can have one.
        """
        numbers = self._counters.find_workers(message.account)
        if not numbers:
            return None
        did, times = message.recipient_did, (message.received_at, message.expires_at)
        return self._push(
            numbers, _MESSAGE, (message.id, did, message.account, message.form, *times), message.payload
        )

    def deliver_event(self, event: PendingEvent) -> Deferred[bool | None] | None:
        """As :meth:`deliver_message`, for an event."""
        numbers = self._counters.find_workers(event.recipient_did)
        if not numbers:
            return None
        fields = event.id, event.recipient_did, event.sender_did, event.received_at
        return self._push(numbers, _EVENT, fields, event.payload.encode("utf-8", "surrogatepass"))

    def notify_contracts_changed(self, did: str) -> None:
        """Have other workers notify the sockets of `did` that its contracts have changed."""
        for number in self._counters.find_workers(did):
            self._links[number].notify_changed(did)

    def resolve_push(self, account: str, id_: str) -> None:
        """Have other workers forget the push of a removed message."""
        if numbers := self._counters.find_workers(account):
            self._push(numbers, _RESOLVE, [id_])

    def has_live_session(self, did: str) -> Deferred[bool]:
        """Fires with whether another worker has a socket that is subscribed to `did`."""
        numbers = self._counters.find_workers(did)
        return self._push(numbers, _LIVE, [did]).addCallback(bool) if numbers else succeed(False)

    def end(self) -> None:
        """Push nothing more."""
        for link in self._links.values():
            link.end()

    def _push(
        self, numbers: Sequence[int], kind: str, fields: Sequence[Any], payload: bytes = b""
    ) -> Deferred[bool | None]:
        answer: Deferred[bytes] = Deferred()
        sent = payload if len(payload) <= MAX_SENT_PAYLOAD_BYTES else None
        answered: ResultCallback = answer.callback if len(numbers) == 1 else _CombinedResult(answer, len(numbers))
        for number in numbers:
            self._links[number].push(kind, fields, sent, answered)
        return answer.addCallback(_IS_TAKEN.get, False)


class _CombinedResult:
    """
    Fires with one result for several workers: as soon as one has taken a push, or when all have answered.

    :param missing: number of workers.
    """

    __slots__ = ("_answer", "_is_late", "_missing")

    def __init__(self, answer: Deferred[bytes], missing: int) -> None:
        self._answer = answer
        self._missing = missing
        self._is_late = False

    def __call__(self, result: bytes) -> None:
        self._missing -= 1
        self._is_late = self._is_late or result == _LATE
        if not self._answer.called and (result == _TAKEN or not self._missing):
            self._answer.callback(_LATE if self._is_late and result != _TAKEN else result)


def get_socket_path(directory: Path, number: int) -> Path:
    """The socket of a worker, numbered from 0."""
    return directory / f"{number + 1}.sock"


def get_worker_number(path: Path) -> int:
    """The number of the worker with a socket."""
    return int(path.stem) - 1


class _OrderedPusher(Generic[Item]):
    """
    Pushes items of one protocol from other workers: those of a frame together and at once, or in order behind those
    that are read from the store.

    :param make: makes an item from the fields and the payload of a frame.
    :param find_did: the DID of an item whose sockets get it, from the fields.
    """

    def __init__(
        self,
        delivery: PeerNotificationDelivery[Item],
        make: Callable[[Sequence[Any], bytes], Item],
        find_did: Callable[[Sequence[Any]], str],
    ) -> None:
        self._delivery: PeerNotificationDelivery[Item] = delivery
        self._make: Callable[[Sequence[Any], bytes], Item] = make
        self._find_did = find_did
        self._late: deque[str] = deque()
        self._is_reading = False

    def __len__(self) -> int:
        """Number of pushes that are to be read from the store."""
        return len(self._late)

    def push(self, arrived: Sequence[tuple[Sequence[Any], bytes | None]], now: float) -> list[bytes]:
        """
        Push the items of one frame together.

        :param arrived: fields and payload of each; without a payload it has to be read from the store.
        :return: the results.
        """
        pusher, items, late = self._delivery.pusher, dict[str, Item](), dict[str, None]()
        results: dict[str, bytes] = {}
        for fields, payload in arrived:
            id_ = fields[0]
            if pusher.was_pushed(id_):
                results[id_] = _TAKEN
                continue
            if payload is not None and not late and not self._is_reading:
                item = self._make(fields, payload)
                if item.expires_at is None or item.expires_at > now:
                    items[id_] = item
                    continue
            if self._delivery.is_live(self._find_did(fields)):
                late[id_] = None
            else:
                results[id_] = _NOT_TAKEN
        taken = pusher.push_remote(list(items.values()))
        for id_ in items:
            results[id_] = _TAKEN if id_ in taken else _NOT_TAKEN
        if late:
            results |= self._read_later(late)
        return [results[fields[0]] for fields, _ in arrived]

    def _read_later(self, ids: Iterable[str]) -> dict[str, bytes]:
        results = {}
        for id_ in ids:
            is_full = len(self._late) >= MAX_LATE
            results[id_] = _DROPPED if is_full else _LATE
            if not is_full:
                self._late.append(id_)
        if self._late and not self._is_reading:
            self._is_reading = True
            Deferred.fromCoroutine(self._push_late()).addErrback(_log_late_failure)
        return results

    async def _push_late(self) -> None:
        try:
            while self._late:
                ids = [self._late.popleft() for _ in range(min(LATE_BATCH, len(self._late)))]
                await self._delivery.push_notified(ids)
        except StoreUnavailable:
            self._late.clear()  # anti-entropy finds them
        finally:
            self._is_reading = False


def _log_late_failure(failure: Failure) -> None:
    _log.failure("pushing late messages failed", redact_failure(failure))


def _make_message(fields: Sequence[Any], payload: bytes) -> StoredMessage:
    id_, recipient_did, account, form, received_at, expires_at = fields
    return StoredMessage(id_, recipient_did, account, payload, form, received_at, expires_at)


def _make_event(fields: Sequence[Any], payload: bytes) -> PendingEvent:
    id_, recipient_did, sender_did, received_at = fields
    return PendingEvent(id_, recipient_did, sender_did, payload.decode("utf-8", "surrogatepass"), received_at)


class _SiblingServerConnection(_SiblingConnection):
    def __init__(self, server: SiblingServer, refusals: LogThrottle) -> None:
        super().__init__(refusals)
        self._server = server
        self._is_greeted = False

    def connected_to_sibling(self) -> None:
        self.sendString(HELLO)
        self._server.connections.add(self)

    def stringReceived(self, string: bytes) -> None:  # noqa: N802  Twisted's name
        if not self._is_greeted:
            self._is_greeted = True
            self._server.greeted(int(string))
            return
        self.sendString(self._server.receive(string))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._server.connections.discard(self)


class SiblingServer(Factory):
    """
    Receives what other workers push.

    :param receiver: pushes it to the sockets of this worker.
    :param resolve_push: forgets the push of a message that was removed.
    :param greeted: called with the number of a worker that has connected.
    :param steady: as for :class:`SiblingDelivery`.
    """

    noisy = False

    def __init__(
        self,
        clock: IReactorTime,
        receiver: NotificationReceiver,
        resolve_push: Callable[[str], object],
        greeted: Callable[[int], None],
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._steady = steady
        self._receiver = receiver
        self._resolve_push = resolve_push
        self._pushers: dict[str, _OrderedPusher[Any]] = {
            _MESSAGE: _OrderedPusher(receiver.didcomm, _make_message, itemgetter(2)),
            _EVENT: _OrderedPusher(receiver.decentrl, _make_event, itemgetter(1)),
        }
        self._live_dids = receiver.didcomm.connections.live_dids
        self.greeted = greeted
        self._changed: dict[str, None] = {}
        self._is_notifying = False
        self._refusals = LogThrottle(clock)
        self.connections: set[_SiblingServerConnection] = set()

    @property
    def late(self) -> int:
        """Number of pushes and contract changes that wait for the store."""
        return sum(map(len, self._pushers.values())) + len(self._changed)

    def buildProtocol(self, addr: IAddress | None) -> _SiblingServerConnection:
        return _SiblingServerConnection(self, self._refusals)

    def stopFactory(self) -> None:
        """Close the connections that are still open."""
        for connection in tuple(self.connections):
            connection.abort()

    def receive(self, frame: bytes) -> bytes:
        """Push what a frame contains; returns the results."""
        start = 4 + int.from_bytes(frame[:4], "big")
        sent_at, pushes = orjson.loads(frame[4:start])
        now, is_late = self._clock.seconds(), self._steady() - sent_at > MAX_PUSH_AGE
        results: list[bytes] = []
        for kind, group in groupby(pushes, itemgetter(0)):
            if kind not in self._pushers:
                results += [self._receive(kind, name) for _, _, name in group]
                continue
            arrived: list[tuple[Sequence[Any], bytes | None]] = []
            for _, size, *fields in group:
                payload = None
                if size is not None:
                    end = start + size
                    payload, start = None if is_late else frame[start:end], end
                arrived.append((fields, payload))
            results += self._pushers[kind].push(arrived, now)
        return b"".join(results)

    def _receive(self, kind: str, name: str) -> bytes:
        """
        Serve what is no push of an item.

        :param name: a DID, or the id of a message that was removed.
        """
        if kind == _RESOLVE:
            self._resolve_push(name)
            return _TAKEN
        if name not in self._live_dids:
            return _NOT_TAKEN
        if kind == _CONTRACTS:
            self._changed[name] = None
            if not self._is_notifying:
                self._is_notifying = True
                Deferred.fromCoroutine(self._notify_changed()).addErrback(_log_late_failure)
            if len(self._changed) > MAX_CHANGED:
                self._changed.pop(next(iter(self._changed)))
                return _DROPPED
        return _TAKEN

    async def _notify_changed(self) -> None:
        try:
            while self._changed:
                dids = list(self._changed)[:LATE_BATCH]
                try:
                    registered = await self._receiver.filter_registered(dids)
                except StoreUnavailable:
                    await deferLater(self._clock, CHANGED_RETRY_DELAY)
                    continue
                for did in dids:
                    self._changed.pop(did, None)  # it may have been dropped meanwhile
                    if did in registered:
                        self._receiver.push_contracts_updated(did)
        finally:
            self._is_notifying = False


class SiblingListener(Service):
    """
    Listens for other workers, and connects to them.

    :param path: of the socket.
    """

    name = "sibling listener"

    def __init__(self, reactor: Any, path: Path, server: SiblingServer, delivery: SiblingDelivery) -> None:
        self._reactor = reactor
        self._path = path
        self._server = server
        self._delivery = delivery
        self._port: Any = None

    def startService(self) -> None:
        """
        Listen before others learn of this worker.

        :raise CannotListenError: the path cannot be used.
        """
        super().startService()
        self._port = self._reactor.listenUNIX(str(self._path), self._server, mode=0o600)
        self._delivery.connect()

    def stopService(self) -> Deferred[None]:
        """Close the socket and its connections."""
        super().stopService()
        port, self._port = self._port, None
        return maybeDeferred(port.stopListening) if port is not None else succeed(None)
