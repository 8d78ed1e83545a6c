"""The resource tree of the public listener (contract section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autobahn.twisted.resource import WebSocketResource
from twisted.internet.interfaces import IReactorTime
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request

from mediatord.errors import MediatorError, RateLimited, ShuttingDown, StoreUnavailable
from mediatord.metrics import CONTENT_TYPE, Metrics
from mediatord.presence import Connections
from mediatord.protocol import jsontext
from mediatord.web.headers import PREFLIGHT
from mediatord.web.pages import Pages
from mediatord.web.peers import Network, Peers, is_within
from mediatord.web.posting import FAULT, JSON, LATE, Receive, refusal, take
from mediatord.web.render import Answer, respond, write


@dataclass(frozen=True, slots=True)
class Front:
    """
    What the resources work with.

    :param receive: takes a message, gives the reply; raises ShuttingDown.
    :param ping_store: really asks the store; raises StoreUnavailable.
    :param queue_sizes: refreshes the queue gauge before a scrape.
    :param turned_away: told of an address whose request was refused unread.
    :param deadline: seconds a request may take.
    """

    clock: IReactorTime
    receive: Receive
    ping_store: Callable[[], Awaitable[None]]
    queue_sizes: Callable[[], Awaitable[None]]
    pages: Pages
    metrics: Metrics
    peers: Peers
    connections: Connections[Any]
    sockets: WebSocketResource
    turned_away: Callable[[str, MediatorError], None]
    metrics_allow: Sequence[Network] = ()
    deadline: float = 10.0


class _Leaf(Resource):
    """One path: GET pages by coroutine, everything else by choice."""

    isLeaf = True
    methods: tuple[bytes, ...] = (b"GET", b"HEAD", b"OPTIONS")

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front

    def render(self, request: Request) -> int | bytes:
        """Dispatch by method."""
        if request.postpath and request.postpath != [b""]:
            return _finish(request, NOT_FOUND)
        if request.method == b"OPTIONS":
            return _finish(request, _PREFLIGHT)
        if request.method not in self.methods:
            return self._not_allowed(request)
        if request.method == b"POST":
            return self.post(request)
        return self.get(request)

    def get(self, request: Request) -> int | bytes:
        """Answer a GET."""
        return self._not_allowed(request)

    def post(self, request: Request) -> int | bytes:
        """Take a message."""
        content: Any = request.content
        content_type = request.getHeader(b"content-type") or b""
        return self.later(request, take(self._front.receive, content.getvalue(), self.payer(request), content_type))

    def payer(self, request: Request) -> str:
        """Who is charged for the request."""
        return self._front.peers.payer(*_addresses(request))

    def later(self, request: Request, work: Awaitable[Answer]) -> int:
        """Answer when `work` is done."""
        return respond(
            request,
            work,
            self._front.clock,
            deadline=self._front.deadline,
            late=LATE,
            fault=FAULT,
        )

    def upgrade(self, request: Request) -> int | bytes:
        """Hand the connection to a WebSocket, if the client may have one more."""
        if self._front.connections.draining:
            self._front.turned_away(self.payer(request), ShuttingDown())
            return _finish(request, refusal(ShuttingDown()))
        if not self._front.connections.has_room(self.payer(request)):
            self._front.turned_away(self.payer(request), RateLimited())
            return _finish(request, Answer(429, b"too many connections\n", b"text/plain", _retry(5)))
        cast(Any, request).site.upgraded(_addresses(request)[0])
        outcome: int | bytes = self._front.sockets.render(request)
        return outcome

    def _not_allowed(self, request: Request) -> bytes | int:
        return _finish(request, Answer(405, headers=((b"Allow", b", ".join(self.methods)),)))


def _retry(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"Retry-After", b"%d" % seconds),)


_PREFLIGHT = Answer(204, headers=tuple((name.encode("ascii"), value.encode("ascii")) for name, value in PREFLIGHT))
NOT_FOUND = Answer(404, b'{"status":"error","detail":"not found"}', JSON)


def _finish(request: Request, answer: Answer) -> int:
    write(request, answer)
    return NOT_DONE_YET


def _addresses(request: Request) -> tuple[str, str | None]:
    """Address of the TCP peer, and what `X-Forwarded-For` says."""
    forwarded = request.requestHeaders.getRawHeaders("x-forwarded-for")
    return getattr(request.getClientAddress(), "host", "") or "", ",".join(forwarded) if forwarded else None


def _wants_upgrade(request: Request) -> bool:
    return (request.getHeader(b"upgrade") or b"").strip().lower() == b"websocket"


class MessagePath(_Leaf):
    """`/didcomm`: messages by POST, a socket by upgrade (reference 3.1, 3.2)."""

    methods = (b"POST", b"OPTIONS")

    def render(self, request: Request) -> int | bytes:
        """An upgrade is a GET, which this path does not have otherwise."""
        if request.method == b"GET" and _wants_upgrade(request) and request.postpath in ([], [b""]):
            return self.upgrade(request)
        return super().render(request)


class SocketPath(_Leaf):
    """`/ws`: a socket."""

    methods = (b"GET", b"OPTIONS")

    def get(self, request: Request) -> int | bytes:
        """Upgrade, or say that this is what the path is for."""
        if _wants_upgrade(request):
            return self.upgrade(request)
        return _finish(request, Answer(426, headers=((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))))


class Page(_Leaf):
    """A page that is the same for everybody."""

    def __init__(self, front: Front, page: Callable[[Request], Answer]) -> None:
        super().__init__(front)
        self._page = page

    def get(self, request: Request) -> int | bytes:
        """The page."""
        return _finish(request, self._page(request))


class Health(_Leaf):
    """`/health`: whether the store answers."""

    def get(self, request: Request) -> int | bytes:
        """200, or 503 with what is wrong."""

        async def asked() -> Answer:
            try:
                await self._front.ping_store()
            except (StoreUnavailable, ShuttingDown) as error:
                self._front.metrics.storage_up(False)
                detail = "store unavailable" if isinstance(error, StoreUnavailable) else "stopping"
                return Answer(503, jsontext.dumps({"status": "error", "detail": detail}), JSON, _retry(5))
            self._front.metrics.storage_up(True)
            return Answer(200, b'{"status":"ok"}', JSON)

        return self.later(request, asked())


class MetricsPath(_Leaf):
    """`/metrics`: Prometheus text, for those who may see it."""

    def get(self, request: Request) -> int | bytes:
        """The metrics, or 403: they name recipients."""
        client = self._front.peers.client(*_addresses(request))
        if not is_within(client, self._front.metrics_allow):
            return _finish(request, Answer(403, b'{"status":"error","detail":"forbidden"}', JSON))

        async def scraped() -> Answer:
            try:
                await self._front.queue_sizes()
            except StoreUnavailable:
                self._front.metrics.storage_up(False)
            # A page in the operator's browser is on an address that may see this; the page itself may not.
            return Answer(200, self._front.metrics.render(), CONTENT_TYPE.encode("ascii"), shared=False)

        return self.later(request, scraped())


class Root(_Leaf):
    """`/`: the DID document by GET, messages by POST, a socket by upgrade, and the parent of everything else."""

    isLeaf = False
    methods = (b"GET", b"HEAD", b"POST", b"OPTIONS")

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        pages = front.pages
        well_known = _Folder()
        well_known.putChild(b"did.json", Page(front, pages.did_document))
        children: dict[bytes, IResource] = {
            b"didcomm": MessagePath(front),
            b"ws": SocketPath(front),
            b"did": Page(front, pages.did),
            b"invitation": Page(front, pages.invitation),
            b"invitationOOB": Page(front, pages.invitation_url),
            b"health": Health(front),
            b"metrics": MetricsPath(front),
            b".well-known": well_known,
            # Where the document of a did:web with a path is, behind a proxy that takes the path off.
            b"did.json": Page(front, pages.did_document),
        }
        for name, child in children.items():
            self.putChild(name, child)

    def getChild(self, path: bytes, request: Request) -> IResource:
        """The root itself, or nothing."""
        return self if path == b"" and not request.postpath else _Nothing()

    def get(self, request: Request) -> int | bytes:
        """The DID document, or a socket."""
        if _wants_upgrade(request):
            return self.upgrade(request)
        return _finish(request, self._front.pages.root(request))


class _Nothing(Resource):
    isLeaf = True

    def render(self, request: Request) -> int | bytes:
        """404, in the form that programs read."""
        return _finish(request, NOT_FOUND)


class _Folder(Resource):
    def getChild(self, path: bytes, request: Request) -> IResource:
        """Nothing but what was put here."""
        return _Nothing()

    def render(self, request: Request) -> int | bytes:
        """A folder has no page."""
        return _finish(request, NOT_FOUND)
