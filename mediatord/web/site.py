"""The HTTP site: stock Twisted, with the body capped before it is buffered and no access log."""

from __future__ import annotations

from io import BytesIO
from typing import Any, cast

from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, _IdentityTransferDecoder
from twisted.web.server import Request, Site

from mediatord.decentrl.exchange import refusal
from mediatord.errors import RateLimited, TooLarge
from mediatord.journal import Half
from mediatord.memory import LARGE
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.message import PLAIN_TYPE
from mediatord.protocol.didcomm.small import PROBLEM_REPORT
from mediatord.web.express import ExpressChannel, serialise
from mediatord.web.headers import CORS
from mediatord.web.posting import FLOODED, JSON, half_by_label, plain_error
from mediatord.web.resources import Front, addresses, token
from mediatord.web.tree import Root
from mediatord.web.unread import Unread, Untaken
from mediatord.wire import WIRE

# A client that is told 413 may go on sending for so long, or so much, before it is cut off.
_PATIENCE_SECONDS = 5.0
_PATIENCE_BYTES = 16_777_216
# Bytes that are read in one go, and requests that are served, in a quantum of the scheduler. A head is no longer.
_PIECE = 16_384
_QUANTUM = 2
# How long a request may take to arrive.
WHOLE_REQUEST_SECONDS = 60.0


class PatientChannel(HTTPChannel):
    """
    Serves a client no further request while it does not read the answers to those it has sent.

    Twisted's own pauses only what comes next from the network, and only between two requests: answers to requests
    that are small and many would pile up without end.
    """

    _began = 0.0
    _closing = False
    # What was received behind the piece that is served first; nothing of it is looked at before the next quantum.
    _ahead = b""
    _suspended = False
    # The client has said that it sends nothing more.
    _half_closed = False
    _quantum = _QUANTUM

    def connectionMade(self) -> None:
        """A client is there."""
        self.untaken = Untaken(cast(Any, self).site.unread)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        """Called with what comes; a request that takes a minute to arrive is given up, however steadily it drips."""
        if self._closing:  # the transport reads on, and nobody would ever look at what came
            return
        if self._suspended:
            self._ahead += data
            return
        now = cast(Any, self).site.clock.seconds()
        if data or self._ahead:
            self._began = self._began or now
        if self._began and now - self._began > WHOLE_REQUEST_SECONDS:
            cast(Any, self.transport).abortConnection()
        else:
            self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Read a piece, which may be a whole head; the rest in a later quantum."""
        if self._closing:
            return
        self._ahead = data[_PIECE:]
        super().dataReceived(data[:_PIECE])
        if cast(Any, self)._closing:
            return
        if self._ahead and not self._suspended and isinstance(self._transferDecoder, _IdentityTransferDecoder):
            # One body, which costs nothing to read.
            data, self._ahead = self._ahead, b""
            super().dataReceived(data)
        if self._ahead:
            self._suspend()

    def setLineMode(self, extra: bytes = b"") -> None:  # noqa: N802  Twisted's name
        """Called when a request is answered, with what came behind it; that is before what was not looked at yet."""
        self.line_mode = 1
        if self._busyReceiving:
            super().dataReceived(extra)
        elif extra:
            self._began = cast(Any, self).site.clock.seconds()
            self._read(extra + self._ahead)

    def _suspend(self) -> None:
        self._suspended = self.paused = True
        self._networkProducer.pauseProducing()
        cast(Any, self).site.scheduler.add(self)

    def run_quantum(self) -> None:
        """Serve some requests, or read some more of one."""
        self._suspended = False
        if self._closing or self._waitingForTransport:
            return
        self.paused = False
        self._quantum = _QUANTUM
        if not self._handlingRequest:
            self._networkProducer.resumeProducing()
        self.dataReceived(b"")
        self._close_if_done()

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """Called when the client sends nothing more; it waits for its answers."""
        self._half_closed = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close a connection on which no request will come, once all that came are answered."""
        if not self._half_closed or self._closing or self.transport is None:
            return
        if not (self._handlingRequest or self._busyReceiving or self._suspended or self._waitingForTransport):
            self.loseConnection()

    def headerReceived(self, line: bytes) -> bool:  # noqa: N802  Twisted's name
        """Called with a header. Digits that Python refuses to read are a mistake like others."""
        try:
            is_fine: bool = super().headerReceived(line)
            return is_fine
        except ValueError:
            self._respondToBadRequestAndDisconnect()
            return False

    def allContentReceived(self) -> None:
        """Called when a request is there."""
        self._began = 0.0
        self._quantum -= 1
        super().allContentReceived()

    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Called when what came is no HTTP; Twisted would say so in no words at all."""
        cast(Any, self.transport).write(_BAD_REQUEST)
        self.loseConnection()

    def wrote(self, payer: str, size: int) -> None:
        """
        Called when an answer is written.

        :param size: bytes, which count while the client does not take them.
        """
        if self._waitingForTransport:
            self.untaken.add(payer, size)

    def requestDone(self, request: Any) -> None:  # noqa: N802  Twisted's name
        """Called when an answer is written."""
        if self._waitingForTransport:
            self.paused = True
            self._networkProducer.pauseProducing()
        enough = self._quantum <= 0 and (self._buffer or self._dataBuffer or self._ahead) and self.persistent
        if enough and not self._waitingForTransport:
            self._suspend()
        super().requestDone(request)
        if self._suspended:
            self._networkProducer.pauseProducing()
        self._close_if_done()

    def resumeProducing(self) -> None:
        """The client has read what there was."""
        self.untaken.clear()
        super().resumeProducing()
        if self._suspended:
            self._networkProducer.pauseProducing()
        elif self.paused and not self._waitingForTransport:
            self.paused = False
            self.dataReceived(b"")
        self._close_if_done()

    def take_unread(self) -> bytes:
        """What has come behind the request that is being answered: it is for whoever gets the connection now."""
        behind, self._dataBuffer = b"".join(self._dataBuffer), []
        ahead, self._ahead = self._ahead, b""
        return behind + cast(bytes, self.clearLineBuffer()) + ahead

    def loseConnection(self) -> None:
        """Called when nothing more will be said; the client has a while to read what was."""
        self._closing = True
        self.setTimeout(cast(Any, self).site.timeOut)
        # Or TLS would never see that the client closes as well.
        self._networkProducer.resumeProducing()
        super().loseConnection()

    def timeoutConnection(self) -> None:  # noqa: N802  Twisted's name
        """Called when a client was silent too long, or did not read its answer; Twisted would wait for it on."""
        cast(Any, self.transport).abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The client is gone."""
        self.untaken.clear()
        super().connectionLost(reason)
        # The channel and its request are a reference cycle.
        site = cast(Any, self).site
        site.scheduler.discard(self)
        site.memory.released(sum(map(len, (*self._dataBuffer, self._ahead))))
        self._dataBuffer, self._ahead = [], b""
        self.clearLineBuffer()


class CappedRequest(Request):
    """
    A request whose body is refused with 413 as soon as it is known to be too long.

    The refusal goes out at once and the rest of the body is read and thrown away for a while: closing on a client
    that is still sending would make its kernel discard our answer.
    """

    _received = 0
    _refused = False

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()
        if length is not None and length > self._site.max_body:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body, chunked or not."""
        self._received += len(data)
        if self._refused:
            if self._received > _PATIENCE_BYTES:
                self._transport.abortConnection()
        elif self._received > self._site.max_body:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Called once the whole body is there."""
        self._release()
        if self._refused:
            self.channel.loseConnection()
        elif self._site.front.admits(self._payer):
            super().requestReceived(command, path, version)
        else:
            self._turn_away(path)

    def _turn_away(self, path: bytes) -> None:
        """The address sends too much: nothing more is served on this connection."""
        half: Half = "didcomm" if path == b"/didcomm" else "decentrl"
        self._site.front.turned_away(half, self._payer, RateLimited())
        self._transport.write(serialise(FLOODED[half], int(self._site.clock.seconds())))
        self.channel.loseConnection()

    def connectionLost(self, reason: Failure) -> None:
        """The client is gone, perhaps in the middle of the body."""
        self._release()
        super().connectionLost(reason)

    def _release(self) -> None:
        if self._received >= LARGE:
            self._site.memory.released(self._received)
        self._received = 0

    def has_room(self, size: int) -> bool:
        """Whether an answer of so many bytes may be written, seeing what its payer has not read yet."""
        untaken: Untaken = cast(Any, self.channel).untaken
        return untaken.has_room(self._payer, size)

    def wrote(self, size: int) -> None:
        """An answer of so many bytes was written."""
        cast(Any, self.channel).wrote(self._payer, size)

    @property
    def _payer(self) -> str:
        return self._site.front.peers.payer(*addresses(self), token(self))

    @property
    def _site(self) -> MediatorSite:
        site: MediatorSite = cast(Any, self.channel).site
        return site

    @property
    def _transport(self) -> Any:
        return self.channel.transport

    def _refuse(self) -> None:
        self._refused = True
        self.content = BytesIO()
        # Or the channel would tell the client to go on.
        self.requestHeaders.removeHeader(b"Expect")
        half = self._half()
        self._site.front.turned_away(half, self._payer, TooLarge())
        transport = self._transport
        transport.write(_TOO_LARGE[half])
        getattr(transport, "loseWriteConnection", transport.loseConnection)()
        timer = self._site.clock.callLater(_PATIENCE_SECONDS, transport.abortConnection)
        self.notifyFinish().addErrback(lambda _: timer.cancel() if timer.active() else None)

    def _half(self) -> Half:
        """Whose client this is, by address or label: the request is not there yet, only its head."""
        path: bytes = cast(Any, self.channel)._path.partition(b"?")[0]
        if path == b"/didcomm" or path.startswith(b"/didcomm/"):
            return "didcomm"
        return half_by_label(self.getHeader(b"content-type") or b"")


def _report() -> bytes:
    wire = WIRE[TooLarge]
    report = {"type": PROBLEM_REPORT, "body": {"code": wire.code, "comment": wire.comment}}
    return jsontext.dumps({"id": "too-large", "typ": PLAIN_TYPE, **report})


def _last_words(status: int, reason: str, content_type: str, body: bytes) -> bytes:
    """A whole response after which the connection is closed."""
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Connection", "close"), *CORS]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {reason}\r\n{lines}\r\n".encode("ascii") + body


def _too_large(content_type: str, body: bytes) -> bytes:
    return _last_words(WIRE[TooLarge].status, "Content Too Large", content_type, body)


_BAD_REQUEST = _last_words(400, "Bad Request", JSON.decode("ascii"), plain_error(400, "BAD_REQUEST").body)
_TOO_LARGE: dict[Half, bytes] = {
    "didcomm": _too_large(PLAIN_TYPE, _report()),
    "decentrl": _too_large(JSON.decode("ascii"), refusal(TooLarge()).body),
}


class MediatorSite(Site):
    """
    A site without forms and access log: both cost more than all the rest of a request.

    :param max_body: bytes.
    :param max_per_host: connections of one address that are no sockets, which have a limit of their own.
    :param max_of_trusted: the same of an address in a community (:class:`~mediatord.web.peers.Peers`).
    """

    protocol = PatientChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = CappedRequest
    noisy = False

    def __init__(self, front: Front, max_body: int, max_per_host: int, max_of_trusted: int = 0) -> None:
        super().__init__(Root(front), reactor=front.clock, parsePOSTFormSubmission=False)
        self._max_per_host = max_per_host
        self._max_of_trusted = max(max_per_host, max_of_trusted)
        self._per_host: dict[str, int] = {}
        self.front = front
        self.clock = front.clock
        self.scheduler = front.scheduler
        self.max_body = max_body
        self.reading: set[ExpressChannel] = set()
        self.memory = front.memory
        self.unread = Unread(released=self.memory.released)

    def limit(self, max_body: int, max_per_host: int, max_of_trusted: int = 0) -> None:
        """Go by other limits from now on; what is open already stays open."""
        self.max_body = max_body
        self._max_per_host = max_per_host
        self._max_of_trusted = max(max_per_host, max_of_trusted)

    def read_ahead(self) -> tuple[int, int]:
        """Connections with requests that are not complete or not begun, and the bytes of those; on the short way."""
        self.reading = {channel for channel in self.reading if channel.held}
        return len(self.reading), sum(channel.held for channel in self.reading)

    def buildProtocol(self, addr: object) -> Any:
        """An :class:`~mediatord.web.express.ExpressChannel`: a connection begins on the short way."""
        host = self._payer(addr)
        open_ones = self._per_host.get(host, 0)
        if host and open_ones >= self._max_per_host and open_ones >= self._most(addr):
            return None
        self._per_host[host] = open_ones + 1
        return ExpressChannel(self, addr)

    def upgraded(self, connected: str) -> None:
        """A connection has become a socket."""
        self._gone("" if self.front.peers.trusts(connected) else self.front.peers.host(connected))

    def closed(self, address: object) -> None:
        """A connection is gone that has not become a socket."""
        self._gone(self._payer(address))

    def _payer(self, address: object) -> str:
        """Who pays for a connection; nobody for those of trusted proxies and UNIX sockets."""
        host = getattr(address, "host", "") or ""
        return "" if self.front.peers.trusts(host) else self.front.peers.host(host)

    def _most(self, address: object) -> int:
        host = self.front.peers.client(getattr(address, "host", "") or "", None)
        return self._max_of_trusted if self.front.peers.community_of(host) else self._max_per_host

    def _gone(self, host: str) -> None:
        left = self._per_host.get(host, 0) - 1
        if left > 0:
            self._per_host[host] = left
        else:
            self._per_host.pop(host, None)

    def stock_channel(self, address: object) -> IProtocol | None:
        """A connection as twisted.web serves it."""
        channel: IProtocol | None = super().buildProtocol(cast(Any, address))
        return channel

    def log(self, request: object) -> None:
        """Nothing: what matters of a request is an event."""
