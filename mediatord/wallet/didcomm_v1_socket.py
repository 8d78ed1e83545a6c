"""A DIDComm v1 wallet's WebSocket: requests, responses by thread, pushed messages, and implicit pickup."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.interfaces import IStreamClientEndpoint

from mediatord.errors import MediatorError
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.envelope import is_v1_envelope, parse_envelope
from mediatord.protocol.didcomm_v1.message import V1Message
from mediatord.wallet.didcomm_client import DeliveredMessage, MediatorProblem
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_socket import (
    SOCKET_TIMEOUT_SECONDS,
    SocketClosedError,
    WalletWebSocket,
    open_wallet_socket,
)
from mediatord.wallet.didcomm_v1_client import (
    PICKUP_2,
    PING,
    V1QueueStatus,
    V1Requests,
    V1Wallet,
    is_v1_problem,
    make_v1_problem,
    read_v1_delivery,
    read_v1_status,
)


class V1Socket(V1Requests, WalletWebSocket):  # type: ignore[misc]  # of Autobahn's bases
    """
    An open socket of a wallet; see :func:`connect_v1_socket`.

    :ivar pushed: pushed messages. A bare one, of implicit pickup, has no id; it is the SHA-256 of the payload then.
    :ivar problems: problem reports that belong to no pending request.
    :ivar sends_binary: whether frames are binary, as those of Credo are.
    :ivar answers_pings: whether WebSocket pings are answered, by which bare messages count as received.
    """

    def __init__(self, wallet: V1Wallet) -> None:
        V1Requests.__init__(self, wallet.spelling)
        WalletWebSocket.__init__(self)
        self.wallet = wallet
        self.pushed: DeferredQueue[DeliveredMessage] = DeferredQueue()
        self.problems: DeferredQueue[MediatorProblem] = DeferredQueue()
        self.sends_binary = False
        self.answers_pings = True
        self._pending: dict[str, Deferred[V1Message]] = {}

    async def request(self, type_: str, members: Mapping[str, Any] | None = None, /) -> V1Message:
        """
        Send a request; the response in the same thread, after all checks.

        :raise MediatorProblem: the response is a problem report.
        :raise SocketClosedError: the socket was closed before the response.
        """
        message, envelope = self.wallet.pack(type_, members)
        thread = message["@id"]
        answer: Deferred[V1Message] = Deferred()
        self._pending[thread] = answer
        try:
            self.send_frame(envelope, binary=self.sends_binary)
            return await answer.addTimeout(SOCKET_TIMEOUT_SECONDS, self.wallet.clock)
        finally:
            self._pending.pop(thread, None)

    async def live(self, on: bool = True) -> V1QueueStatus:
        """Switch live delivery on or off."""
        return read_v1_status(await self.request(f"{PICKUP_2}/live-delivery-change", {"live_delivery": on}))

    def start_implicit_pickup(self) -> None:
        """Ask for all messages that wait, and all that come, without a protocol of pickup."""
        _, envelope = self.wallet.pack(f"{PING}/ping", {"response_requested": False})
        self.send_frame(envelope, binary=self.sends_binary)

    def frame_received(self, payload: bytes) -> None:
        """Dispatch a frame: a response, a push, a problem report or a bare message. Never raises."""
        try:
            if self._is_to_connection(payload):
                self._take(self.wallet.from_mediator(payload).message)
            else:
                self.pushed.put(DeliveredMessage(hashlib.sha256(payload).hexdigest(), payload, "json"))
        except (MediatorError, UnreadableMessage, ValueError):
            self.unexpected.append(payload)

    def _is_to_connection(self, payload: bytes) -> bool:
        """
        Whether a frame is a message of the mediator, and not a bare message.

        :raise ValueError: it is neither.
        """
        if is_v1_envelope(payload):
            return any(one.key == self.wallet.key.did_key for one in parse_envelope(payload).recipients)
        if "ciphertext" not in encoding.loads_object(payload):
            raise ValueError("not encrypted")
        return False

    def _take(self, message: V1Message) -> None:
        answer = self._pending.pop(message.thid or message.pthid or "", None)
        if is_v1_problem(message):
            answer = answer or self._pending.pop(message.pthid or "", None)
            problem = make_v1_problem(None, message)
            if answer is None:
                self.problems.put(problem)
            else:
                answer.errback(problem)
        elif answer is not None:
            answer.callback(message)
        else:
            for delivered in read_v1_delivery(message):
                self.pushed.put(delivered)

    def fail_pending(self, code: int) -> None:
        """Fail pending requests."""
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.errback(SocketClosedError(code))

    def onPing(self, payload: bytes) -> None:  # noqa: N802  Autobahn's name
        if self.answers_pings:
            super().onPing(payload)


async def connect_v1_socket(
    reactor: Any,
    wallet: V1Wallet,
    *,
    url: str | None = None,
    endpoint: IStreamClientEndpoint | None = None,
) -> V1Socket:
    """
    Open a socket to the wallet's mediator.

    :param url: instead of the one in the mediator's DID document.
    :param endpoint: where to connect to, if not as `url` says.
    :raise SocketClosedError: the mediator refused.
    :raise UnreadableMessage: the mediator's document names no WebSocket.
    """
    url = url or wallet.mediator.ws_uri
    if url is None:
        raise UnreadableMessage("the mediator has no WebSocket")
    return await open_wallet_socket(reactor, url, V1Socket(wallet), endpoint)
