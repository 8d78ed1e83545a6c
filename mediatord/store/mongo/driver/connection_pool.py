"""
Connections to the primary of a replica set, on txmongo: the only module that imports it.

txmongo connects in its constructors and by the global reactor, so this module is imported only when the backend is
chosen. Its errors repeat the commands that failed, with all data, so messages are sent beneath the layer that raises
them, and connections do not log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from bson import decode, encode
from pymongo.errors import ConnectionFailure
from twisted.internet.defer import Deferred, DeferredList, FirstError, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from txmongo.connection import ConnectionPool, _Connection, _Pinger
from txmongo.protocol import MongoDecoder, MongoProtocol, connectionDone

from mediatord.runtime.socket_writes import write_immediately
from mediatord.store.mongo.driver.collection import MongoCommand
from mediatord.store.mongo.driver.errors import NOT_PRIMARY_CODES, ServerUnreachable, is_unauthenticated_reply
from mediatord.store.mongo.driver.tls import describe_tls_failure

if TYPE_CHECKING:
    from mediatord.store.mongo.driver.uri import MongoConnectionSettings

# Seconds: for one attempt to connect, between attempts, and between pings and for each of them.
_CONNECT_TIMEOUT = 1.0
_RETRY_DELAY = 0.5
_PING_INTERVAL = 2.0
# Seconds for TLS, discovery of the primary and authentication, which txmongo does not limit.
_READY_TIMEOUT = 2 * _CONNECT_TIMEOUT
# Seconds after the deadline in which the server can still report that it was exceeded.
_REPLY_GRACE = 0.2

# Ten connections that log every attempt would fill the log while a server is down.
_Connection.noisy = _Pinger.noisy = False


_HEADER = struct.Struct("<iiii")
_SIZE = struct.Struct("<i")
_OP_MSG = 2013
# Flags and the kind of the first section of a command: none, and 0 for one document.
_BODY_PREFIX = bytes(5)
# Ids of commands have this bit, apart from those of txmongo, which counts from 1; they are positive in 32 bits.
_ID_BIT = 1 << 30
# Offset of the only section of a reply, after header, flags and the kind of the section, which is 0.
_BODY_OFFSET = 21


@dataclass(eq=False, slots=True)
class _Exchange:
    """
    Commands that were sent together.

    :param replies: None for each one that is missing.
    :param deadline: when they are given up.
    :param done: fires when none is missing, or the connection is lost.
    """

    replies: list[dict[str, Any] | None]
    missing: int
    deadline: float
    done: Deferred[None] = field(default_factory=Deferred)

    def receive(self, place: int, reply: dict[str, Any] | None) -> None:
        """:param reply: None if the connection is lost."""
        self.replies[place] = reply
        self.missing -= 1
        if not self.missing:
            self.done.callback(None)


class _PrimaryProtocol(MongoProtocol):
    """
    One connection that joins large replies in linear time and is aborted unless it becomes ready in time. Commands
    that are sent together are one write and have one Deferred; all of them share a timer.

    :param on_lost: called with the reason when the connection is lost.
    :ivar is_closing: whether the connection is being closed, so that nothing can be sent any more.
    """

    transport: Any
    factory: Any
    is_closing = False

    def __init__(self, clock: IReactorTime, on_lost: Callable[[Failure], None]) -> None:
        super().__init__()
        self._clock = clock
        self._on_lost = on_lost
        self._ready_timer: IDelayedCall | None = None
        self._pieces: list[bytes] = []
        self._received = 0
        self._bytes_needed = 4
        self._waiting: dict[int, tuple[_Exchange, int]] = {}
        self._sent = count()
        self._deadline_timer: IDelayedCall | None = None
        self._checked_at = 0.0

    @property
    def load(self) -> int:
        """Number of commands without a reply."""
        return len(self._waiting)

    async def exchange(self, messages: Sequence[bytes], deadline: float) -> list[dict[str, Any] | None]:
        """
        Send commands and return their replies; None for those that were lost with the connection.

        :param deadline: when to abort the connection, since later replies could not be attributed.
        """
        exchange = _Exchange([None] * len(messages), len(messages), deadline)
        pieces: list[bytes] = []
        for place, message in enumerate(messages):
            id_ = _ID_BIT | next(self._sent) & (_ID_BIT - 1)
            self._waiting[id_] = exchange, place
            pieces += _HEADER.pack(_HEADER.size + len(message), id_, 0, _OP_MSG), message
        if messages:
            self._check_at(deadline)
            write_immediately(self.transport, b"".join(pieces))
            await exchange.done
        return exchange.replies

    def _check_at(self, deadline: float) -> None:
        """Check at a deadline whether it was exceeded. The timer outlasts the replies, so that the next need none."""
        if self._deadline_timer is not None:
            if self._checked_at <= deadline:
                return
            self._deadline_timer.cancel()
        self._checked_at = deadline
        left = max(deadline - self._clock.seconds(), 0.0)
        self._deadline_timer = self._clock.callLater(left, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._deadline_timer = None
        earliest = min([exchange.deadline for exchange, _ in self._waiting.values()], default=None)
        if earliest is None:
            return
        if earliest <= self._clock.seconds():
            self.fail()
        else:
            self._check_at(earliest)

    def connectionReady(self) -> Any:
        return succeed(None) if self.transport else super().connectionReady()

    def connectionMade(self) -> None:
        self._ready_timer = self._clock.callLater(_READY_TIMEOUT, self._abort_unless_ready)
        super().connectionMade()

    def connectionLost(self, reason: Any = connectionDone) -> None:
        self.is_closing = True
        for timer in (self._ready_timer, self._deadline_timer):
            if timer is not None and timer.active():
                timer.cancel()
        self._on_lost(reason)
        super().connectionLost(reason)
        waiting, self._waiting = self._waiting, {}
        for exchange, place in waiting.values():
            exchange.receive(place, None)

    def _abort_unless_ready(self) -> None:
        if self.factory.instance is not self:
            self.fail()

    def fail(self, reason: object = None) -> None:
        self.is_closing = True
        self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        """Split the stream into messages, joining the pieces of each one once."""
        self._pieces.append(data)
        self._received += len(data)
        if self._received < self._bytes_needed:
            return
        try:
            self._decode_messages(b"".join(self._pieces))
        except Exception as error:
            self.fail(error)

    def _decode_messages(self, data: bytes) -> None:
        start, bytes_needed = 0, 4
        while len(data) - start >= 4:
            (bytes_needed,) = _SIZE.unpack_from(data, start)
            if bytes_needed < _HEADER.size:
                raise ConnectionFailure
            if len(data) - start < bytes_needed:
                break
            self._receive_message(data[start : start + bytes_needed])
            start, bytes_needed = start + bytes_needed, 4
        self._pieces, self._received, self._bytes_needed = [data[start:]], len(data) - start, bytes_needed

    def _receive_message(self, data: bytes) -> None:
        _, _, answered, kind = _HEADER.unpack_from(data)
        waiting = self._waiting.get(answered)
        if waiting is None:
            self.handle(MongoDecoder.decode(data))
            return
        if kind != _OP_MSG:
            raise ConnectionFailure
        exchange, place = waiting
        reply = decode(data[_BODY_OFFSET:])
        del self._waiting[answered]
        exchange.receive(place, reply)


class PrimaryConnectionPool:
    """
    Connections to the primary, reconnected whenever they are lost.

    Two fifths of them are for reads, which may be slow and delay the replies behind them; the others are for writes.
    """

    def __init__(self, address: MongoConnectionSettings, clock: IReactorTime, *, size: int) -> None:
        self._address = address
        self._clock = clock
        self._size = size
        self._pool: Any = None
        self._pending_attempts: list[Deferred[Any]] = []
        self._tls_failure: str | None = None
        readers = size * 2 // 5 or 1
        self._readers, self._writers = slice(0, readers), slice(readers if size > readers else 0, size)

    def start(self) -> None:
        """Connect, unless that was done before."""
        if self._pool is not None:
            return
        self._pool = ConnectionPool(
            self._address.uri,
            self._size,
            self._address.ssl_context_factory,
            ping_interval=_PING_INTERVAL,
            ping_timeout=_PING_INTERVAL,
            retry_delay=_CONNECT_TIMEOUT,
            max_delay=_RETRY_DELAY,
        )
        for connection in self._pool.getprotocols():
            connection.protocol = partial(_PrimaryProtocol, self._clock, self._record_loss)
        if self._address.x509_user is not None:
            self._pool.authenticate("$external", self._address.x509_user, "", "MONGODB-X509")

    def stop(self) -> Deferred[None]:
        """Close all connections; pending commands fail."""
        if self._pool is None:
            return succeed(None)
        self.drop()
        pool, self._pool = self._pool, None
        for one in self._pending_attempts[:]:
            one.cancel()
        stopped: Deferred[None] = pool.disconnect()
        return stopped

    @property
    def is_connected(self) -> bool:
        return bool(self._protocols())

    def drop(self) -> None:
        """Abort all connections, and reconnect."""
        for protocol in self._protocols():
            protocol.fail()

    async def exchange(
        self, commands: Sequence[MongoCommand], deadline: float, *, for_reads: bool = False
    ) -> list[dict[str, Any] | None]:
        """
        Send commands on one connection without waiting in between; the server runs them in order.

        :param deadline: when to give up and abort the connection, since later replies could not be attributed.
        :param for_reads: whether to use a connection for reads.
        :return: the replies; from the first None on it is unknown which commands were run.
        :raise ServerUnreachable: there is no connection; nothing was sent.
        """
        messages = [_encode_message(self._address.database, command) for command in commands]
        protocol = await self._select_connection(deadline, self._readers if for_reads else self._writers)
        replies = await protocol.exchange(messages, deadline + _REPLY_GRACE)
        refusals = [reply for reply in replies if reply is not None and not reply.get("ok")]
        if any(one.get("code") in NOT_PRIMARY_CODES or is_unauthenticated_reply(one) for one in refusals):
            # The next connection finds the primary and authenticates again.
            protocol.fail()
        return replies

    async def _select_connection(self, deadline: float, members: slice) -> _PrimaryProtocol:
        while not (protocols := self._protocols(members)):
            await self._await_connection(deadline, members)
        self._tls_failure = None
        return min(protocols, key=attrgetter("load"))

    def _protocols(self, members: slice = slice(None)) -> list[_PrimaryProtocol]:
        protocols = [one.instance for one in self._connections(members)]
        return [one for one in protocols if one is not None and not one.is_closing]

    def _connections(self, members: slice) -> Sequence[Any]:
        found: Sequence[Any] = self._pool.getprotocols() if self._pool is not None else ()
        return found[members]

    def _record_loss(self, reason: Failure) -> None:
        self._tls_failure = describe_tls_failure(reason)

    def _build_unreachable(self) -> ServerUnreachable:
        more = f": {self._tls_failure}" if self._tls_failure else ""
        return ServerUnreachable(f"no connection to a primary{more}", connected=False)

    async def _await_connection(self, deadline: float, members: slice) -> None:
        """Wait until a connection may have become ready."""
        connections = self._connections(members)
        attempts = [one.notifyReady() for one in connections if one.instance is None]
        if connections and not attempts:
            await deferLater(self._clock, 0)  # all of them are closing, and will be closed by then
            return
        if not attempts or self._clock.seconds() >= deadline:
            raise self._build_unreachable()
        self._pending_attempts.append(attempts[0])
        timer = self._clock.callLater(deadline - self._clock.seconds(), attempts[0].cancel)
        try:
            await DeferredList(attempts, fireOnOneCallback=True, fireOnOneErrback=True, consumeErrors=True)
        except FirstError:
            raise self._build_unreachable() from None
        finally:
            self._pending_attempts.remove(attempts[0])
            for one in attempts:
                one.cancel()
            if timer.active():
                timer.cancel()


def _encode_message(database: str, command: MongoCommand) -> bytes:
    """Encode a command, without the header."""
    pieces = [_BODY_PREFIX, encode({**command.body, "$db": command.database or database})]
    if command.section:
        section = [command.section.encode("ascii"), b"\0", *command.documents]
        pieces += b"\1", _SIZE.pack(_SIZE.size + sum(map(len, section))), *section
    return b"".join(pieces)
