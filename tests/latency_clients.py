"""Wallets that exchange messages through a load balancer and measure latency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from zope.interface import implementer

from mediatord.wallet.demo import DemoStepFailed
from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, MediatorProblem
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.integration.delivery_ledger import DeliveryLedger, message_of_attempt
from tests.integration.message_load import SendAttempt, read_marker
from tests.integration.retrying_clients import TRANSIENT_ERRORS, ReconnectingRecipient

# Pause between two messages of a wallet.
_PAUSE_SECONDS = 0.05
# Upper bound for an arrival, generous for busy machines.
_ARRIVAL_SECONDS = 60.0


class LatencyLedger(DeliveryLedger):
    """Delivery ledger that also records latencies."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self._clock = clock
        self._sent_at: dict[str, float] = {}
        self._latencies: list[float] = []
        self._waiters: list[tuple[int, Deferred[None]]] = []
        self._arrived: set[str] = set()

    def record_begin(self, message: str) -> None:
        """Record that the sending of a message begins."""
        self.expect([message])
        self._sent_at[message] = self._clock.seconds()

    def record_deliveries(self, wallet: DIDCommWallet, batch: Iterable[DeliveredMessage]) -> None:
        batch = list(batch)
        super().record_deliveries(wallet, batch)
        for message in {message_of_attempt(read_marker(wallet, delivered)) for delivered in batch} - self._arrived:
            self._arrived.add(message)
            self._latencies.append(self._clock.seconds() - self._sent_at[message])
        ready = [waiter for count, waiter in self._waiters if count <= len(self._arrived)]
        self._waiters = [entry for entry in self._waiters if entry[0] > len(self._arrived)]
        for waiter in ready:
            waiter.callback(None)

    async def wait_for_more(self, count: int) -> None:
        """
        Return when `count` more messages have arrived.

        :raise DemoStepFailed: they did not arrive in time.
        """
        waiter: Deferred[None] = Deferred()
        self._waiters.append((len(self._arrived) + count, waiter))
        try:
            await waiter.addTimeout(_ARRIVAL_SECONDS, self._clock)
        except DeferredTimeout:
            raise DemoStepFailed(f"{count} more messages did not come within {_ARRIVAL_SECONDS:.0f} s") from None

    def take_latencies(self) -> list[float]:
        """Seconds from first attempt to arrival, of messages since the last call."""
        latencies, self._latencies = self._latencies, []
        return latencies


class LatencyClient(ReconnectingRecipient):
    """
    A wallet with a live socket that sends to another wallet continuously.

    :ivar port: local port of its socket.
    """

    def __init__(self, name: str, wallet: DIDCommWallet, balancer: int, ledger: LatencyLedger, reactor: Any) -> None:
        super().__init__(wallet, [balancer], ledger, reactor)
        self.name = name
        self.port = 0
        self._balancer = balancer
        self._latency_ledger = ledger
        self._clock = reactor
        self._sending: Deferred[None] | None = None

    async def connect(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """Connect through the balancer."""
        endpoint = TCP4ClientEndpoint(self._clock, "127.0.0.1", self._balancer)
        return await connect_didcomm_socket(self._clock, wallet, endpoint=_RecordingEndpoint(endpoint, self))

    def start_sending_to(self, other: LatencyClient) -> None:
        """Begin to send."""
        self._sending = Deferred.fromCoroutine(self._send_continuously(other))

    async def stop_sending(self) -> None:
        """Finish the current message and send no more."""
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending

    async def _send_continuously(self, other: LatencyClient) -> None:
        number = 0
        while self._sending is not None or not number:
            number += 1
            message = f"{self.name}-{number}"
            self._latency_ledger.record_begin(message)
            while not await self._send(other, self._latency_ledger.begin_attempt(message)):
                await deferLater(self._clock, _PAUSE_SECONDS)
            await deferLater(self._clock, _PAUSE_SECONDS)

    async def _send(self, other: LatencyClient, marker: str) -> bool:
        post = SendAttempt(marker, self._clock.seconds())
        try:
            await self.wallet.send(other.wallet.did, marker)
            post.status = 202
        except MediatorProblem as problem:
            post.status = problem.status
        except ConnectError:
            return False
        except TRANSIENT_ERRORS:
            pass
        post.duration = self._clock.seconds() - post.started_at
        self._latency_ledger.record_attempt(post)
        return post.status == 202


@implementer(IStreamClientEndpoint)
class _RecordingEndpoint:
    """Endpoint that records the local port of its connection."""

    def __init__(self, endpoint: Any, latency_client: LatencyClient) -> None:
        self._endpoint = endpoint
        self._client = latency_client

    def connect(self, factory: Any) -> Any:
        return self._endpoint.connect(factory).addCallback(self._record_port)

    def _record_port(self, protocol: Any) -> Any:
        self._client.port = protocol.transport.getHost().port
        return protocol
