"""Wallets that talk to each other through a balancer, and how long their messages take."""

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
from tests.integration.retrying_clients import TROUBLE, ReconnectingRecipient

# Between two messages of one wallet.
_BETWEEN_SECONDS = 0.05
# A machine that has other things to do may take its time.
_ARRIVAL_SECONDS = 60.0


class LatencyLedger(DeliveryLedger):
    """A ledger that also knows how long messages took, and who waits for how many."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self._clock = clock
        self._sent: dict[str, float] = {}
        self._took: list[float] = []
        self._waiting: list[tuple[int, Deferred[None]]] = []
        self._came: set[str] = set()

    def begun(self, letter: str) -> None:
        """A message is to be sent now."""
        self.due([letter])
        self._sent[letter] = self._clock.seconds()

    def delivered(self, wallet: DIDCommWallet, batch: Iterable[DeliveredMessage]) -> None:
        batch = list(batch)
        super().delivered(wallet, batch)
        for letter in {message_of_attempt(read_marker(wallet, one)) for one in batch} - self._came:
            self._came.add(letter)
            self._took.append(self._clock.seconds() - self._sent[letter])
        ready = [waiter for count, waiter in self._waiting if count <= len(self._came)]
        self._waiting = [one for one in self._waiting if one[0] > len(self._came)]
        for waiter in ready:
            waiter.callback(None)

    async def more(self, count: int) -> None:
        """
        Returns when so many more have come.

        :raise Failed: they did not.
        """
        waiter: Deferred[None] = Deferred()
        self._waiting.append((len(self._came) + count, waiter))
        try:
            await waiter.addTimeout(_ARRIVAL_SECONDS, self._clock)
        except DeferredTimeout:
            raise DemoStepFailed(f"{count} more messages did not come within {_ARRIVAL_SECONDS:.0f} s") from None

    def taken(self) -> list[float]:
        """Seconds that the messages since last time took from the first attempt to their arrival."""
        taken, self._took = self._took, []
        return taken


class LatencyClient(ReconnectingRecipient):
    """
    A wallet that gets messages live, and sends some to another one all the time.

    :ivar port: where its socket comes from.
    """

    def __init__(self, name: str, wallet: DIDCommWallet, balancer: int, ledger: LatencyLedger, reactor: Any) -> None:
        super().__init__(wallet, [balancer], ledger, reactor)
        self.name = name
        self.port = 0
        self._balancer = balancer
        self._times = ledger
        self._clock = reactor
        self._talking: Deferred[None] | None = None

    async def connect(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """Through the balancer, wherever that leads."""
        endpoint = TCP4ClientEndpoint(self._clock, "127.0.0.1", self._balancer)
        return await connect_didcomm_socket(self._clock, wallet, endpoint=_RecordingEndpoint(endpoint, self))

    def talk_to(self, other: LatencyClient) -> None:
        """Begin to send."""
        self._talking = Deferred.fromCoroutine(self._talk(other))

    async def hush(self) -> None:
        """Finish the message that is being sent, and send no more."""
        talking, self._talking = self._talking, None
        if talking is not None:
            await talking

    async def _talk(self, other: LatencyClient) -> None:
        number = 0
        while self._talking is not None or not number:
            number += 1
            letter = f"{self.name}-{number}"
            self._times.begun(letter)
            while not await self._sent(other, self._times.attempt(letter)):
                await deferLater(self._clock, _BETWEEN_SECONDS)
            await deferLater(self._clock, _BETWEEN_SECONDS)

    async def _sent(self, other: LatencyClient, marker: str) -> bool:
        post = SendAttempt(marker, self._clock.seconds())
        try:
            await self.wallet.send(other.wallet.did, marker)
            post.status = 202
        except MediatorProblem as problem:
            post.status = problem.status
        except ConnectError:
            return False
        except TROUBLE:
            pass
        post.took = self._clock.seconds() - post.begun
        self._times.posted(post)
        return post.status == 202


@implementer(IStreamClientEndpoint)
class _RecordingEndpoint:
    """An endpoint that tells where its connection comes from."""

    def __init__(self, endpoint: Any, latency_client: LatencyClient) -> None:
        self._endpoint = endpoint
        self._talker = latency_client

    def connect(self, factory: Any) -> Any:
        return self._endpoint.connect(factory).addCallback(self._note)

    def _note(self, protocol: Any) -> Any:
        self._talker.port = protocol.transport.getHost().port
        return protocol
