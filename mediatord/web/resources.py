"""What is at each address of the public listener (contract section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from autobahn.twisted.resource import WebSocketResource
from twisted.internet.interfaces import IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from mediatord.decentrl.exchange import Reply as DecentrlReply
from mediatord.didcomm.exchange import Reply as DIDCommReply
from mediatord.errors import MediatorError, RateLimited, ShuttingDown
from mediatord.journal import Half
from mediatord.memory import MemoryReclaimer
from mediatord.metrics import Metrics
from mediatord.presence import Connections
from mediatord.readiness import Ask, Verdict
from mediatord.synthetic import HEADER
from mediatord.web.headers import PREFLIGHT
from mediatord.web.origins import AllowedOrigins
from mediatord.web.pages import Pages
from mediatord.web.peers import Network, Peers
from mediatord.web.posting import (
    FAULT,
    JSON,
    LATE,
    UNREAD,
    Command,
    Receive,
    carry_out,
    plain_error,
    refusal,
    retry,
    take,
)
from mediatord.web.render import Answer, respond, write
from mediatord.web.round_robin import RoundRobinScheduler

ShortWay = Callable[[bytes, str, Callable[[DIDCommReply], None], Callable[[], None]], bool]


def no_short_way(
    _body: bytes, _payer: str, _answer: Callable[[DIDCommReply], None], _otherwise: Callable[[], None]
) -> bool:
    """Of a site where there is none."""
    return False


async def nobody_looks() -> Verdict:
    """Of a site without listeners of its own."""
    return Verdict("not looked at")


@dataclass(frozen=True, slots=True)
class Front:
    """
    What the resources work with.

    :param receive: takes a DIDComm message, gives the reply; raises ShuttingDown.
    :param command: takes a Decentrl command and who pays for it, gives the reply; raises ShuttingDown.
    :param public: reads a public channel: DID as in the path, arguments of the query, who pays; raises ShuttingDown.
    :param ping_store: asks the store whether it answers; raises StoreUnavailable.
    :param store_trouble: what the store knows to be wrong with it; empty if nothing is.
    :param trouble: why nobody should be sent here even so, in a few words; empty if there is nothing.
    :param statistics: has the metrics say how the store is, before a scrape.
    :param figures: the metrics, rendered; raises TimeoutError.
    :param turned_away: told of a request that was refused unread: whose form the refusal has, and the address.
    :param admits: charges an address for any request: whether it is within its limit.
    :param scheduler: of connections that have sent more than is served at once.
    :param memory: told of large buffers that are free again.
    :param deadline: seconds a request may take.
    :param short_way: takes a DIDComm message if it is of the usual kind: the body, who pays for it, where the reply
        goes, and what is to be done if it turns out to be of another; False when neither will be called.
    :param ready: whether a message would be stored, pushed and acknowledged.
    """

    clock: IReactorTime
    receive: Receive
    command: Command
    public: Callable[[str, Mapping[bytes, Sequence[bytes]], str], Awaitable[DecentrlReply]]
    ping_store: Callable[[], Awaitable[None]]
    store_trouble: Callable[[], str]
    trouble: Callable[[], str]
    statistics: Callable[[], Awaitable[None]]
    figures: Callable[[], Awaitable[bytes]]
    pages: Pages
    metrics: Metrics
    peers: Peers
    connections: Connections[Any]
    sockets: WebSocketResource
    turned_away: Callable[[Half, str, MediatorError], None]
    origins: AllowedOrigins
    memory: MemoryReclaimer
    scheduler: RoundRobinScheduler
    admits: Callable[[str], bool]
    metrics_allow: Callable[[], Sequence[Network]] = tuple
    deadline: float = 10.0
    ready: Ask = nobody_looks
    short_way: ShortWay = no_short_way


class Leaf(Resource):
    """
    One path: GET pages by coroutine, everything else by choice.

    :cvar half: whose form a refusal has that nobody else gives.
    """

    isLeaf = True
    methods: tuple[bytes, ...] = (b"GET", b"HEAD", b"OPTIONS")
    half: Half = "decentrl"

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front

    def render(self, request: Request) -> int | bytes:
        """Dispatch by method."""
        if request.method == b"OPTIONS":
            return finish(request, PREFLIGHT_ANSWER)
        if not self.has(request):
            return finish(request, NOT_FOUND[self.half])
        if request.method not in self.methods:
            return self.not_allowed(request)
        if request.method == b"POST":
            return self.post(request)
        return self.get(request)

    def has(self, request: Request) -> bool:
        """Whether there is something at the path; there is nothing below one, but for its closing slash."""
        return request.postpath in ([], [b""])

    def get(self, request: Request) -> int | bytes:
        """Answer a GET."""
        return self.not_allowed(request)

    def post(self, request: Request) -> int | bytes:
        """Answer a POST."""
        return self.not_allowed(request)

    def take(self, request: Request, half: Half) -> int:
        """Take what was posted."""
        content: Any = request.content
        body, payer = content.getvalue(), self.payer(request)
        if half == "decentrl":
            return self.later(request, carry_out(self._front.command(body, payer)), half)
        content_type = request.getHeader(b"content-type") or b""
        return self.later(request, take(self._front.receive, body, payer, content_type), half)

    def payer(self, request: Request) -> str:
        """Who is charged for the request."""
        return self._front.peers.payer(*addresses(request), token(request))

    def later(self, request: Request, work: Awaitable[Answer], half: Half) -> int:
        """Answer when `work` is done."""
        return respond(
            request,
            work,
            self._front.clock,
            deadline=self._front.deadline,
            late=LATE[half],
            fault=FAULT[half],
            unread=UNREAD[half],
        )

    def upgrade(self, request: Request) -> int | bytes:
        """Hand the connection to a WebSocket, if the client may have one more."""
        if not self._front.origins.take_from(request.requestHeaders):
            return finish(request, _FOREIGN_ORIGIN[self.half])
        if self._front.connections.draining:
            self._front.turned_away(self.half, self.payer(request), ShuttingDown())
            return finish(request, refusal(self.half, ShuttingDown()))
        if not self._front.connections.has_room(self.payer(request)):
            self._front.turned_away(self.half, self.payer(request), RateLimited())
            return finish(request, _CROWDED[self.half])
        cast(Any, request).site.upgraded(addresses(request)[0])
        channel = cast(Any, request.channel)
        transport = channel.transport
        outcome: int | bytes = self._front.sockets.render(request)
        # A client may send its first frames right behind the upgrade.
        frames = channel.take_unread()
        if frames and not transport.disconnecting:
            _protocol_of(transport).dataReceived(frames)
        return outcome

    def not_allowed(self, request: Request) -> int:
        """Say which methods there are."""
        allowed = (b"Allow", b", ".join(self.methods))
        if self.half == "didcomm":
            return finish(request, Answer(405, headers=(allowed,)))
        return finish(request, plain_error(405, "METHOD_NOT_ALLOWED", allowed))


PREFLIGHT_ANSWER = Answer(
    204, headers=tuple((name.encode("ascii"), value.encode("ascii")) for name, value in PREFLIGHT)
)
NOT_FOUND: dict[Half, Answer] = {
    "didcomm": Answer(404, b'{"status":"error","detail":"not found"}', JSON),
    "decentrl": plain_error(404, "NOT_FOUND"),
}
_FOREIGN_ORIGIN: dict[Half, Answer] = {
    "didcomm": Answer(403, b"origin not allowed\n", b"text/plain"),
    "decentrl": plain_error(403, "ORIGIN_NOT_ALLOWED"),
}
_TOKEN = HEADER.encode("ascii")
_CROWDED: dict[Half, Answer] = {
    "didcomm": Answer(429, b"too many connections\n", b"text/plain", retry(5)),
    "decentrl": plain_error(429, "RATE_LIMITED", *retry(5)),
}


def _protocol_of(transport: Any) -> Any:
    """What gets the data of a connection, behind TLS and the like."""
    wrapper = transport if isinstance(transport, ProtocolWrapper) else transport.protocol
    return wrapper.wrappedProtocol if isinstance(wrapper, ProtocolWrapper) else wrapper


def finish(request: Request, answer: Answer, unread: Answer | None = None) -> int:
    """
    Answer at once.

    :param unread: as for :func:`~mediatord.web.render.write`.
    """
    write(request, answer, unread)
    return NOT_DONE_YET


def addresses(request: Request) -> tuple[str, str | None]:
    """Address of the TCP peer, and what `X-Forwarded-For` says."""
    # As bytes: what is no UTF-8 would be an error of ours.
    forwarded = request.requestHeaders.getRawHeaders(b"x-forwarded-for")
    said = b",".join(forwarded).decode("latin-1") if forwarded else None
    return getattr(request.getClientAddress(), "host", "") or "", said


def token(request: Request) -> bytes | None:
    """What the daemon's own requests are known by."""
    return request.requestHeaders.getRawHeaders(_TOKEN, [None])[0]


def wants_upgrade(request: Request) -> bool:
    """Whether a WebSocket is asked for."""
    return (request.getHeader(b"upgrade") or b"").strip().lower() == b"websocket"


class MessagePath(Leaf):
    """`/didcomm`: messages by POST, a socket by upgrade (reference 3.1, 3.2)."""

    methods = (b"POST", b"OPTIONS")
    half = "didcomm"

    def render(self, request: Request) -> int | bytes:
        """An upgrade is a GET, which this path does not have otherwise."""
        if request.method == b"GET" and wants_upgrade(request) and self.has(request):
            return self.upgrade(request)
        return super().render(request)

    def post(self, request: Request) -> int | bytes:
        """Take a message, whatever it is labelled with."""
        return self.take(request, "didcomm")


class SocketPath(Leaf):
    """`/ws`: a socket, of either protocol."""

    methods = (b"GET", b"OPTIONS")

    def get(self, request: Request) -> int | bytes:
        """Upgrade, or say that this is what the path is for."""
        if wants_upgrade(request):
            return self.upgrade(request)
        return finish(request, _UPGRADE_REQUIRED)


_UPGRADE_REQUIRED = plain_error(426, "UPGRADE_REQUIRED", (b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))


class PublicPath(Leaf):
    """`/public/:did`: a public channel (DCTRL-0004 3.1, reference 10.3)."""

    def has(self, request: Request) -> bool:
        """Everything below the path is a DID, or a mistake in one."""
        return True

    def get(self, request: Request) -> int | bytes:
        """The events that were published there."""
        work = self._front.public(_named(request.path), request.args or {}, self.payer(request))
        return self.later(request, carry_out(work), "decentrl")


def _named(path: bytes) -> str:
    """
    The DID in a path below another, as a client may have put it there: plain, with slashes in it, or encoded.

    :return: empty, which is no DID, when it is not UTF-8.
    """
    try:
        return unquote_to_bytes(path[1:].partition(b"/")[2]).decode("utf-8")
    except UnicodeDecodeError:
        return ""


class Page(Leaf):
    """A page that is the same for everybody."""

    def __init__(self, front: Front, page: Callable[[Request], Answer]) -> None:
        super().__init__(front)
        self._page = page

    def get(self, request: Request) -> int | bytes:
        """The page."""
        return finish(request, self._page(request), UNREAD[self.half])
