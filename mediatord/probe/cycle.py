"""A cycle of the end-to-end probe: a store write, then a forward over each listener, pushed and acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.web.client import Agent, HTTPConnectionPool

from mediatord.errors import StoreUnavailable
from mediatord.probe.listener_endpoints import AbortableConnector
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.error_codes import DIDCOMM_ERROR_CODES
from mediatord.protocol.probe_markers import PROBE_HEADER
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommMediator,
    DIDCommWallet,
    MediatorProblem,
    QueueStatus,
    read_attachment,
)
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, build_attachment, compose_message
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket

_EMPTY_MESSAGE_TYPE = "https://didcomm.org/empty/1.0/empty"

# Seconds after which a message that was left behind is dropped.
PROBE_MESSAGE_SECONDS = 30
# Times that what earlier cycles left behind is fetched.
_MAX_PICKUP_ROUNDS = 5
# The listener is known to be ours, so that its name makes no difference.
_HOST = "localhost"
_HTTP_ACCEPTED, _HTTP_UNAVAILABLE = 202, 503


class ProbeError(Exception):
    """
    A probe cycle failed.

    :param stage: `store`, `listener`, `socket`, `forward`, `push` or `acknowledgement`.
    :param cause: name of the error.
    """

    def __init__(self, stage: str, cause: str = "") -> None:
        super().__init__(stage)
        self.stage = stage
        self.cause = cause


class _QueueNotEmpty(Exception):
    """Messages in the probe's queue could not be removed."""


class ProbeCycle:
    """
    Runs probe cycles, one at a time.

    :param reactor: for connections and time.
    :param endpoints: client endpoints of the listeners; None for one that does not listen.
    :param write: makes the store keep a small record for a while.
    :param mediator: current DID of the mediator.
    :param token: of probe requests.
    :ivar stage: current stage, or the last one of a finished cycle.
    """

    def __init__(
        self,
        reactor: Any,
        endpoints: Callable[[], Sequence[IStreamClientEndpoint | None]],
        write: Callable[[], Deferred[Any]],
        mediator: Callable[[], str],
        identity: WalletIdentity,
        token: bytes,
    ) -> None:
        self.stage = "store"
        self._reactor = reactor
        self._endpoints = endpoints
        self._write = write
        self._mediator = mediator
        self._identity = identity
        self._headers = {PROBE_HEADER: token.decode("ascii")}
        self._enrolled = False

    async def run(self) -> None:
        """
        Run one cycle.

        :raise ProbeError: it failed. After a cancellation, `stage` tells where it was.
        """
        try:
            await self._run()
        except Exception as error:
            self._enrolled = False
            if _is_store_failure(error):
                self.stage = "store"
            raise ProbeError(self.stage, "no answer" if _is_timeout(error) else type(error).__name__) from None

    async def _run(self) -> None:
        self.stage = "store"
        await _shield_from_cancellation(self._write())
        for endpoint in self._endpoints():
            self.stage = "listener"
            if endpoint is None:
                raise ConnectionError
            await self._over(endpoint)

    async def _over(self, endpoint: IStreamClientEndpoint) -> None:
        """Probe one listener: WebSocket for the receiving side, POST for the forward, on separate connections."""
        post = _ProbeHTTPClient(
            self._reactor, AbortableConnector(endpoint, lambda: self._at("forward")), self._headers
        )
        line = AbortableConnector(endpoint, lambda: self._at("socket"))
        mediator = DIDCommMediator.from_did(self._mediator())
        wallet = DIDCommWallet(self._identity, post, self._reactor, mediator)
        try:
            url = f"ws://{_HOST}/didcomm"
            socket = await connect_didcomm_socket(
                self._reactor, wallet, url=url, endpoint=line, headers=self._headers
            )
            await self._settle(socket)
            sent = await self._forward(wallet)
            self._at("push")
            delivered = await _wait_for_push(wallet, socket, sent)
            self._at("acknowledgement")
            await _empty_queue(socket, await socket.acknowledge(delivered))
            await socket.close()
        finally:
            line.abort()
            post.pool.closeCachedConnections()

    async def _settle(self, socket: DIDCommSocket) -> None:
        """Ensure an account, live delivery and an empty queue."""
        if not self._enrolled:
            await socket.grant()
            if (await socket.register())[0] not in ("success", "no_change"):
                raise _QueueNotEmpty
            self._enrolled = True
        await _empty_queue(socket, await socket.live())

    async def _forward(self, wallet: DIDCommWallet) -> str:
        """Forward a message to the probe identity; returns its id."""
        note = compose_message(_EMPTY_MESSAGE_TYPE, to=[wallet.did])
        sealed = build_attachment(anoncrypt(note, wallet.identity.document))
        expires = int(wallet.clock.seconds()) + PROBE_MESSAGE_SECONDS
        _, envelope = wallet.pack(FORWARD, {"next": wallet.did}, attachments=[sealed], expires_time=expires)
        self._at("listener")
        response = await wallet.post(envelope, url=f"http://{_HOST}/didcomm")
        if response.status != _HTTP_ACCEPTED:
            raise MediatorProblem(response.status)
        return str(note["id"])

    def _at(self, stage: str) -> None:
        self.stage = stage


class _ProbeHTTPClient(HTTPClient):
    """HTTP client of the probe's wallet, over a fixed endpoint and with the probe header."""

    def __init__(self, reactor: Any, connector: AbortableConnector, headers: dict[str, str]) -> None:
        # Persistent connections resemble those of wallets; they are closed after the cycle.
        self.pool = HTTPConnectionPool(reactor, persistent=True)
        super().__init__(Agent.usingEndpointFactory(reactor, connector, self.pool))
        self._headers = headers

    def post(self, url: Any, /, *, headers: Any = None, **options: Any) -> Any:
        for name, value in self._headers.items():
            headers.setRawHeaders(name, [value])
        return super().post(url, headers=headers, unbuffered=True, **options)


def _shield_from_cancellation(work: Deferred[Any]) -> Deferred[Any]:
    """Fires with the result of `work`; cancelling it leaves `work` running, which others may wait for."""
    told: Deferred[Any] = Deferred()

    def tell(outcome: Any) -> None:
        if not told.called:
            told.callback(outcome)

    work.addBoth(tell)
    return told


async def _wait_for_push(wallet: DIDCommWallet, socket: DIDCommSocket, id_: str) -> list[DeliveredMessage]:
    """Deliveries pushed until a message arrives, that one included."""
    delivered: list[DeliveredMessage] = []
    while not delivered or _read_message_id(wallet, delivered[-1].payload) != id_:
        delivered.append(await socket.pushed.get())
    return delivered


def _read_message_id(wallet: DIDCommWallet, payload: bytes) -> str:
    """Id of the message in a payload, which `didcomm.rewrap` wraps into another forward."""
    message = wallet.open(payload).message
    if message.type.uri == FORWARD:
        (inner,) = message.attachments or ({},)
        message = wallet.open(read_attachment({"id": "0", **inner}).payload).message
    return message.id


async def _empty_queue(socket: DIDCommSocket, status: QueueStatus) -> None:
    """Acknowledge all queued messages."""
    for _ in range(_MAX_PICKUP_ROUNDS):
        if not status.message_count:
            return
        status = await socket.acknowledge(await socket.fetch())
    raise _QueueNotEmpty


def _is_timeout(error: Exception) -> bool:
    """Whether an error means cancellation; cancelled requests report it in a list."""
    reasons = getattr(error, "reasons", ())
    return isinstance(error, CancelledError) or any(reason.check(CancelledError) for reason in reasons)


def _is_store_failure(error: Exception) -> bool:
    if isinstance(error, MediatorProblem):
        return error.status == _HTTP_UNAVAILABLE or error.code == DIDCOMM_ERROR_CODES[StoreUnavailable].code
    return isinstance(error, StoreUnavailable)
