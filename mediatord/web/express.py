"""
The short way for what is nearly all traffic: a plain POST of a message or a command.

twisted.web spends more on a request than everything else together. A request that could not be plainer
(:mod:`mediatord.web.head`) is therefore answered here. Whatever is anything else goes to twisted.web, with all that
follows on that connection.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import lru_cache, partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import RESPONSES, datetimeToString
from zope.interface import implementer

from mediatord.didcomm.exchange import ACCEPTED, Reply
from mediatord.errors import RateLimited
from mediatord.faults import without_text
from mediatord.journal import Half
from mediatord.memory import LARGE
from mediatord.web.direct import send
from mediatord.web.head import MAX_HEAD, Head, Heads
from mediatord.web.headers import CORS, EXPOSE_RETRY_AFTER, SERVER
from mediatord.web.posting import FAULT, FLOODED, LATE, TAKEN, UNREAD, carry_out, put, take
from mediatord.web.render import REASONS, Answer
from mediatord.web.unread import Untaken

_log = Logger()

# What may be read ahead of the request that is being served.
_MAX_AHEAD = 65_536
# Requests that are served in a quantum of the scheduler.
_QUANTUM = 8
_ALWAYS = b"".join(
    b"%b: %b\r\n" % (name.encode("ascii"), value.encode("ascii"))
    for name, value in [("Server", SERVER.decode()), *CORS]
)
_EXPOSE = b"%b: %b\r\n" % (EXPOSE_RETRY_AFTER[0].encode("ascii"), EXPOSE_RETRY_AFTER[1].encode("ascii"))


@implementer(IPushProducer, IHalfCloseableProtocol)
class ExpressChannel(Protocol):
    """
    A connection that is served here for as long as all its requests are plain.

    :param site: the :class:`~mediatord.web.site.MediatorSite`, whose stock channel takes what is not plain.
    """

    def __init__(self, site: Any, address: object) -> None:
        self._site = site
        self._front = site.front
        self._address = address
        self._host = getattr(address, "host", "") or ""
        self._stock: Any = None
        self._buffer = bytearray()
        self._head: Head | None = None
        self._half: Half = "didcomm"
        self._payer = ""
        self._untaken = Untaken(site.unread)
        self._body_at = 0
        self._serving = 0
        self._served = 0
        self._advancing = False
        self._congested = False
        self._reading = True
        # Nothing more is served before the next quantum, or at all.
        self._suspended = False
        # The client has said that it sends nothing more.
        self._half_closed = False
        self._is_closing = False
        self._since = self._begun = 0.0
        self._timer: IDelayedCall | None = None
        self._heads = Heads()
        # Of a client that tells nothing more of itself than where it is.
        self._own_payer = ""

    @property
    def _wire(self) -> Any:
        return self.transport

    @property
    def _busy(self) -> bool:
        return self._serving != self._served

    def connectionMade(self) -> None:
        """A client is there."""
        self._wire.registerProducer(self, True)
        self._since = self._front.clock.seconds()
        self._timer = self._front.clock.callLater(self._site.timeOut, self._look)
        self._own_payer = self._front.peers.payer(self._host, None)

    def dataReceived(self, data: bytes) -> None:
        """Some bytes of one or several requests, or a part of one."""
        if self._stock is not None:
            self._stock.dataReceived(data)
            return
        is_idle = not (self._buffer or self._serving != self._served or self._congested or self._suspended)
        if self._is_closing or is_idle and self._whole(data):
            return
        self._buffer += data
        if self._busy or self._congested or self._suspended:
            if len(self._buffer) > _MAX_AHEAD:
                self._pause()
        else:
            self._since = self._front.clock.seconds()
            self._begun = min(self._begun, self._since)  # later than now when the clock was set back
            if self._head is not None and self._since - self._begun > self._site.timeOut:
                self._wire.abortConnection()
            else:
                self._advance()
        if self._buffer:
            self._site.reading.add(self)

    @property
    def held(self) -> int:
        """Bytes of requests that are not complete, or not begun."""
        return len(self._buffer)

    def _whole(self, data: bytes) -> bool:
        """Serve what is exactly one request, as it nearly always comes, without putting it into the buffer."""
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
        head = self._heads.read(data[:end]) if end > 0 else None
        if head is None or len(data) != end + 4 + head.length or head.length > self._site.max_body:
            return False
        self._serve(head, data[end + 4 :])
        return True

    def _advance(self) -> None:
        """
        Serve what is complete, one request after the other, until one has to be waited for; after some of them, the
        others in later iterations of the reactor.
        """
        if self._advancing or self._suspended:
            return
        self._advancing = True
        quantum = _QUANTUM
        while self._buffer and not self._busy and not self._congested and self._stock is None:
            if not quantum:
                self._suspend()
                break
            quantum -= 1
            if self._head is None and not self._begin():
                self._hand_over()
                break
            head, body = self._head, self._take_body()
            if head is None or body is None:
                break
            self._head = None
            self._serve(head, body)
        self._advancing = False

    def _suspend(self) -> None:
        """Wait for a quantum."""
        self._suspended = True
        self._pause()
        self._site.scheduler.add(self)

    def run_quantum(self) -> None:
        """Serve some of what was read ahead."""
        self._suspended = False
        self._advance()
        self._read_on()
        self._close_if_done()

    def _begin(self) -> bool:
        """Read the head of the next request; False when that is not for us to do."""
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
        head = self._heads.read(bytes(self._buffer[:end])) if end > 0 else None
        if head is None or head.length > self._site.max_body:
            return False
        self._head, self._body_at = head, end + 4
        self._begun = self._since
        return True

    def _take_body(self) -> bytes | None:
        assert self._head is not None
        end = self._body_at + self._head.length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[self._body_at : end])
        del self._buffer[:end]
        return body

    def _serve(self, head: Head, body: bytes) -> None:
        front = self._front
        if head.length >= LARGE:
            self._site.memory.released(head.length)
        self._half = head.half
        self._serving += 1
        self._since = now = front.clock.seconds()
        if self._timer is not None and self._timer.getTime() > now + front.deadline:
            self._timer.reset(front.deadline)
        plain = head.forwarded_for is None and head.token is None
        payer = self._own_payer if plain else front.peers.payer(self._host, head.forwarded_for, head.token)
        self._payer = payer
        number = self._serving
        if head.half == "decentrl":
            if not front.admits(payer):
                self._turn_away(number)
                return
            self._begin_answer(number, head.half, carry_out(front.command(body, payer)))
            return
        long_way = partial(self._long_way, number, head, body, payer)
        if not front.short_way(body, payer, partial(self._at_once, number), long_way):
            long_way()

    def _long_way(self, number: int, head: Head, body: bytes, payer: str) -> None:
        if not self._front.admits(payer):
            self._turn_away(number)
            return
        self._begin_answer(number, head.half, take(self._front.receive, body, payer, head.content_type))

    def _turn_away(self, number: int) -> None:
        """The address sends too much: nothing more is served on this connection."""
        self._front.turned_away(self._half, self._payer, RateLimited())
        self._suspended = True
        self._buffer = bytearray()
        self._finish(number, FLOODED[self._half])
        self._close()

    def _begin_answer(self, number: int, half: Half, work: Awaitable[Answer]) -> None:
        Deferred.fromCoroutine(self._answer(number, half, work))

    def _at_once(self, number: int, reply: Reply) -> None:
        """The short way has led to an answer; nearly always to the same one."""
        self._finish(number, TAKEN if reply is ACCEPTED else put(reply))

    async def _answer(self, number: int, half: Half, work: Awaitable[Answer]) -> None:
        try:
            answer = await work
        except Exception:
            _log.failure("answering a request failed", without_text())
            answer = FAULT[half]
        self._finish(number, answer)

    def _finish(self, number: int, answer: Answer) -> None:
        """Write the answer to the request of this number, unless it was given up or answered late already."""
        if number != self._serving or number == self._served or self._timer is None:
            return
        self._served = number
        self._since = self._front.clock.seconds()
        if answer.body and not self._untaken.has_room(self._payer, len(answer.body)):
            answer = UNREAD[self._half]
        now = int(self._since)
        send(self._wire, _taken(now) if answer is TAKEN else serialise(answer, now))
        if self._congested:
            self._untaken.add(self._payer, len(answer.body))
        if self._buffer:
            self._advance()
        if not self._reading:
            self._read_on()
        if self._half_closed:
            self._close_if_done()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._wire.pauseProducing()

    def _read_on(self) -> None:
        """Read from the client again, unless what was read has to be served before."""
        waits = self._busy and len(self._buffer) > _MAX_AHEAD
        if not (self._reading or self._congested or self._suspended or self._half_closed or waits):
            self._reading = True
            self._wire.resumeProducing()

    def _look(self) -> None:
        """Time is up for a request, or for a client that sends none; or it is not, and then look again."""
        now = self._front.clock.seconds()
        patience = self._front.deadline if self._busy else self._site.timeOut
        self._since = min(self._since, now)  # as above
        left = self._since + patience - now
        self._timer = self._front.clock.callLater(max(left, 0.001) if left > 0 else patience, self._look)
        if left > 0:
            return
        if self._busy:
            self._finish(self._serving, LATE[self._half])
        else:
            self._wire.abortConnection()

    def _hand_over(self) -> None:
        """Let twisted.web have the connection, and all that was read of it."""
        self._read_on()
        self._stop_looking()
        self._site.reading.discard(self)
        self._wire.unregisterProducer()
        data, self._buffer = bytes(self._buffer), bytearray()
        self._stock = self._site.stock_channel(self._address)
        self._stock.makeConnection(self._wire)
        self._stock.dataReceived(data)
        if self._half_closed:
            self._stock.readConnectionLost()

    def _close_if_done(self) -> None:
        """Close a connection on which no request will come, once all that came are answered."""
        if not self._half_closed or self._is_closing or self._stock is not None:
            return
        if not (self._busy or self._suspended or self._congested or self._advancing):
            self._close()

    def _close(self) -> None:
        """Close the connection once the client has what was written; nothing more of it is looked at."""
        self._is_closing = True
        self._wire.unregisterProducer()  # or TLS would wait for us to write more
        if not self._reading:
            self._reading = True
            self._wire.resumeProducing()  # or TLS would never see that the client closes as well
        self._wire.loseConnection()

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pauseProducing(self) -> None:
        """The client does not read its answers: it is served nothing more."""
        self._congested = True

    def resumeProducing(self) -> None:
        """The client has read what there was."""
        self._congested = False
        self._untaken.clear()
        self._since = self._front.clock.seconds()
        self._advance()
        # What was read ahead may be a part of a request, which nobody would finish otherwise.
        self._read_on()
        self._close_if_done()

    def stopProducing(self) -> None:
        """The connection is gone; :meth:`connectionLost` is called as well."""

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client sends nothing more, and waits for its answers."""
        self._half_closed = True
        if self._stock is not None:
            self._stock.readConnectionLost()
        else:
            self._close_if_done()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client has been told that nothing more will come."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The client is gone; what is being done for it is done to its end."""
        self._stop_looking()
        self._untaken.clear()
        self._site.closed(self._address)
        self._site.memory.released(len(self._buffer))
        self._buffer = bytearray()
        self._site.reading.discard(self)
        self._site.scheduler.discard(self)
        if self._stock is not None:
            self._stock.connectionLost(reason)


def serialise(answer: Answer, now: int) -> bytes:
    """A whole response, for a connection that stays open."""
    lines = [b"HTTP/1.1 %d %b\r\nDate: %b\r\n" % (answer.status, _reason(answer.status), _date(now)), _ALWAYS]
    if answer.content_type:
        lines.append(b"Content-Type: %b\r\n" % answer.content_type)
    for name, value in answer.headers:
        lines.append(b"%b: %b\r\n" % (name, value))
        if name == b"Retry-After":
            lines.append(_EXPOSE)
    lines.append(b"Content-Length: %d\r\n\r\n" % len(answer.body))
    lines.append(answer.body)
    return b"".join(lines)


def _reason(status: int) -> bytes:
    return REASONS.get(status) or RESPONSES.get(status, b"Unknown Status")


@lru_cache(1)
def _taken(second: int) -> bytes:
    return serialise(TAKEN, second)


@lru_cache(1)
def _date(second: int) -> bytes:
    date: bytes = datetimeToString(second)
    return date
