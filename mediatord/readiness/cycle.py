"""One cycle: the store takes a write; then, over each listener, a forward comes in, is pushed and acknowledged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.readiness.way import Line
from mediatord.synthetic import HEADER
from mediatord.wallet.client import Wallet
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediation import Delivered, Problem, Status, read_attachment
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import anoncrypt, attach, compose
from mediatord.wallet.socket import WalletSocket, connect
from mediatord.wire import WIRE

_NOTE = "https://didcomm.org/empty/1.0/empty"

# Seconds after which a message that was left behind is dropped.
EXPIRES = 30
# Times that what earlier cycles left behind is fetched.
_ROUNDS = 5
# The listener is known to be ours, so that its name makes no difference.
_HOST = "localhost"
_ACCEPTED, _UNAVAILABLE = 202, 503


class Failed(Exception):
    """
    A cycle did not get through.

    :param stage: where: `store`, `listener`, `socket`, `forward`, `push` or `acknowledgement`.
    :param cause: name of what went wrong.
    """

    def __init__(self, stage: str, cause: str = "") -> None:
        super().__init__(stage)
        self.stage = stage
        self.cause = cause


class _Left(Exception):
    """Messages that cannot be got rid of."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """
    What a cycle works with.

    :param reactor: for connections and time.
    :param ways: to the listeners; None for one that does not listen.
    :param write: has the store keep something small for a while.
    :param mediator: the DID of the mediator, as it is now.
    """

    reactor: Any
    ways: Callable[[], Sequence[IStreamClientEndpoint | None]]
    write: Callable[[], Deferred[Any]]
    mediator: Callable[[], str]
    identity: Identity = field(repr=False)
    token: bytes = field(repr=False)


class Cycle:
    """
    Runs cycles, one at a time.

    :ivar stage: where it is, or was when it ended.
    """

    def __init__(self, rooms: Rooms) -> None:
        self.stage = "store"
        self._rooms = rooms
        self._headers = {HEADER: rooms.token.decode("ascii")}
        self._enrolled = False

    async def run(self) -> None:
        """
        Once.

        :raise Failed: it did not get through. Whoever cancels it finds the stage here.
        """
        try:
            await self._run()
        except Exception as error:
            self._enrolled = False
            if _is_the_store(error):
                self.stage = "store"
            raise Failed(self.stage, "no answer" if _is_given_up(error) else type(error).__name__) from None

    async def _run(self) -> None:
        self.stage = "store"
        await _unharmed(self._rooms.write())
        for way in self._rooms.ways():
            self.stage = "listener"
            if way is None:
                raise ConnectionError
            await self._over(way)

    async def _over(self, way: IStreamClientEndpoint) -> None:
        """With the receiving side on a socket, and the forward by POST, each on a connection of its own."""
        post = _Post(self._rooms.reactor, Line(way, lambda: self._at("forward")), self._headers)
        line = Line(way, lambda: self._at("socket"))
        mediator = Mediator.from_did(self._rooms.mediator())
        wallet = Wallet(self._rooms.identity, post, self._rooms.reactor, mediator)
        try:
            url = f"ws://{_HOST}/didcomm"
            socket = await connect(self._rooms.reactor, wallet, url=url, endpoint=line, headers=self._headers)
            await self._settle(socket)
            sent = await self._forward(wallet)
            self._at("push")
            delivered = await _pushed(wallet, socket, sent)
            self._at("acknowledgement")
            await _clear(socket, await socket.acknowledge(delivered))
            await socket.close()
        finally:
            line.cut()
            post.close()

    async def _settle(self, socket: WalletSocket) -> None:
        """Have an account and live delivery, and nothing that waits."""
        if not self._enrolled:
            await socket.grant()
            if (await socket.register())[0] not in ("success", "no_change"):
                raise _Left
            self._enrolled = True
        await _clear(socket, await socket.live())

    async def _forward(self, wallet: Wallet) -> str:
        """Send ourselves a message, as an account does; its id."""
        note = compose(_NOTE, to=[wallet.did])
        sealed = attach(anoncrypt(note, wallet.identity.document))
        expires = int(wallet.clock.seconds()) + EXPIRES
        _, envelope = wallet.pack(FORWARD, {"next": wallet.did}, attachments=[sealed], expires_time=expires)
        self._at("listener")
        response = await wallet.post(envelope, url=f"http://{_HOST}/didcomm")
        if response.status != _ACCEPTED:
            raise Problem(response.status)
        return str(note["id"])

    def _at(self, stage: str) -> None:
        self.stage = stage


class _Post:
    """POSTs over a given way, saying whose requests these are: the HTTP client of a wallet."""

    def __init__(self, reactor: Any, way: IStreamClientEndpoint, headers: dict[str, str]) -> None:
        # Connections that may be used again look like those of wallets; they are not kept.
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self._client = HTTPClient(Agent.usingEndpointFactory(reactor, _Only(way), self._pool))
        self._headers = headers

    def post(self, url: str, /, *, data: bytes, headers: Headers, allow_redirects: bool) -> Awaitable[Any]:
        for name, value in self._headers.items():
            headers.setRawHeaders(name, [value])
        posted: Awaitable[Any] = self._client.post(
            url, data=data, headers=headers, allow_redirects=allow_redirects, unbuffered=True
        )
        return posted

    def close(self) -> None:
        self._pool.closeCachedConnections()


@implementer(IAgentEndpointFactory)
class _Only:
    """There is one way, wherever it is to lead."""

    def __init__(self, way: IStreamClientEndpoint) -> None:
        self._way = way

    def endpointForURI(self, uri: object) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        return self._way


def _unharmed(work: Deferred[Any]) -> Deferred[Any]:
    """What comes of it; whoever gives that up leaves the work itself alone, which others may wait for."""
    told: Deferred[Any] = Deferred()

    def tell(outcome: Any) -> None:
        if not told.called:
            told.callback(outcome)

    work.addBoth(tell)
    return told


async def _pushed(wallet: Wallet, socket: WalletSocket, id_: str) -> list[Delivered]:
    """What is pushed until a message comes, that one included."""
    delivered: list[Delivered] = []
    while not delivered or _id_of(wallet, delivered[-1].payload) != id_:
        delivered.append(await socket.pushed.get())
    return delivered


def _id_of(wallet: Wallet, payload: bytes) -> str:
    """Of the message in a payload, which `didcomm.rewrap` puts into one more forward."""
    message = wallet.open(payload).message
    if message.type.uri == FORWARD:
        (inner,) = message.attachments or ({},)
        message = wallet.open(read_attachment({"id": "0", **inner}).payload).message
    return message.id


async def _clear(socket: WalletSocket, status: Status) -> None:
    """Remove what waits."""
    for _ in range(_ROUNDS):
        if not status.message_count:
            return
        status = await socket.acknowledge(await socket.fetch())
    raise _Left


def _is_given_up(error: Exception) -> bool:
    """Whether time was over; a request that is cancelled says so in a list."""
    reasons = getattr(error, "reasons", ())
    return isinstance(error, CancelledError) or any(reason.check(CancelledError) for reason in reasons)


def _is_the_store(error: Exception) -> bool:
    if isinstance(error, Problem):
        return error.status == _UNAVAILABLE or error.code == WIRE[StoreUnavailable].code
    return isinstance(error, StoreUnavailable)
