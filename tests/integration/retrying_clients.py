"""Senders and recipients that retry on other nodes until every message has arrived."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from threading import Condition, Event, Thread
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ConnectError, ConnectingCancelledError, ConnectionClosed, DNSLookupError
from twisted.internet.task import deferLater
from twisted.web.client import RequestTransmissionFailed, ResponseFailed

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, MediatorProblem
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from tests.integration.cluster import wallet_at_node
from tests.integration.delivery_ledger import DeliveryLedger
from tests.integration.message_load import MAX_DELIVERY, PATIENCE_SECONDS, SendAttempt, prepare_forward

# Concurrent senders.
SENDER_COUNT = 6
# Pause between two attempts of a sender or recipient.
PAUSE_SECONDS = 0.1
# Time after which an unaccepted message counts as lost.
GIVE_UP_SECONDS = 120.0
_CLOSED = DeliveredMessage("", b"", "json")
# Exceptions of a cancelled client, also while it connects.
_STOPPED = (CancelledError, ConnectingCancelledError, DNSLookupError)
# Errors to expect while the mediator fails.
TRANSIENT_ERRORS = (
    *(MediatorProblem, ConnectionClosed, ConnectError, DeferredTimeout),
    # The connection ended during the request or before the whole response had arrived.
    *(RequestTransmissionFailed, ResponseFailed),
)


@dataclass(frozen=True, slots=True)
class SendTask:
    """
    A message to send.

    :param message: its name in the ledger.
    """

    recipient: DIDCommWallet
    message: str


class RetryingSenders:
    """
    Threads that post messages to any node, each until it is accepted. Every attempt is encrypted anew.

    :param ports: ports of the nodes.
    """

    def __init__(self, ports: Sequence[int], ledger: DeliveryLedger) -> None:
        self._ports = ports
        self._ledger = ledger
        self._tasks: deque[SendTask] = deque()
        self._held = 0
        self._changed = Condition()
        self._stopped = Event()
        self._accepted = 0
        self._answers = 0
        self._running = 0
        self._threads: list[Thread] = []

    def start(self, send_tasks: Iterable[SendTask], held: int = 0) -> None:
        """
        Begin to send.

        :param held: number of the last tasks that wait for :meth:`send_held`.
        """
        self._tasks.extend(send_tasks)
        self._held = held
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(SENDER_COUNT)]
        self._running = SENDER_COUNT
        for thread in self._threads:
            thread.start()

    def send_held(self) -> None:
        """Send the held tasks as well."""
        with self._changed:
            self._held = 0
            self._changed.notify_all()

    def wait_for_accepted(self, more: int) -> None:
        """Return when `more` further messages were accepted, or no task is left."""
        self._wait(lambda: self._accepted, more, self._has_tasks)

    def wait_for_answers(self, more: int) -> None:
        """Return when `more` further attempts were answered, or no task is left."""
        self._wait(lambda: self._answers, more, self._has_tasks)

    def wait_for_refused(self, more: int) -> None:
        """Return when `more` further attempts were refused, or all senders have ended."""
        self._wait(lambda: self._answers - self._accepted, more, self._is_running)

    def join(self) -> None:
        """Return when every message was accepted or given up."""
        for thread in self._threads:
            thread.join(GIVE_UP_SECONDS + PATIENCE_SECONDS)
            assert not thread.is_alive(), "a sender is stuck"

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()
        self.send_held()

    def _wait(self, count: Callable[[], int], more: int, is_busy: Callable[[], bool]) -> None:
        with self._changed:
            goal = count() + more
            met = self._changed.wait_for(lambda: count() >= goal or not is_busy(), PATIENCE_SECONDS)
        assert met, "the senders are stuck"

    def _is_running(self) -> bool:
        return self._running > 0

    def _has_tasks(self) -> bool:
        return self._is_running() and len(self._tasks) > self._held

    def _run(self) -> None:
        try:
            while (send_task := self._next_task()) is not None and not self._stopped.is_set():
                self._deliver(send_task)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next_task(self) -> SendTask | None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._tasks) > self._held or not self._held)
            return self._tasks.popleft() if self._tasks else None

    def _deliver(self, send_task: SendTask) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline and not self._stopped.is_set():
            status = self._post(send_task, random.choice(self._ports))
            with self._changed:
                self._answers += status is not None
                self._accepted += status == 202
                self._changed.notify_all()
            if status == 202:
                return
            self._stopped.wait(PAUSE_SECONDS)

    def _post(self, send_task: SendTask, port: int) -> int | None:
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            connection.connect()
        except OSError:
            connection.close()
            return None  # nothing was sent
        forward = prepare_forward(send_task.recipient, self._ledger.begin_attempt(send_task.message))
        post = SendAttempt(forward.marker, time.monotonic())
        try:
            connection.request("POST", "/didcomm", forward.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
            response = connection.getresponse()
            post.status, post.retry_after = response.status, response.getheader("Retry-After")
        except (OSError, HTTPException):
            pass  # the connection broke: the post has no status
        finally:
            connection.close()
            post.duration = time.monotonic() - post.started_at
            self._ledger.record_attempt(post)
        return post.status


class ReconnectingRecipient:
    """
    A wallet with a live socket that reconnects to another node when it loses one. It acknowledges what it gets.

    :param ports: ports of the nodes.
    :ivar connected_port: port of the node that pushes to it; None while there is none.
    """

    def __init__(self, wallet: DIDCommWallet, ports: Sequence[int], ledger: DeliveryLedger, reactor: Any) -> None:
        self.wallet = wallet
        self._ports = ports
        self._ledger = ledger
        self._reactor = reactor
        self._running: Deferred[None] | None = None
        self.connected_port: int | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._running = Deferred.fromCoroutine(self._run())

    async def stop(self) -> None:
        """Stop receiving."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await running

    async def drain(self) -> None:
        """Stop receiving live; fetch and acknowledge until the queue is empty, at any node."""
        await self.stop()
        deadline = self._reactor.seconds() + GIVE_UP_SECONDS
        while True:
            try:
                wallet = wallet_at_node(self.wallet, random.choice(self._ports), self._reactor)
                if not await self._fetch_batch(wallet):
                    return
            except TRANSIENT_ERRORS:
                await self._pause()
            assert self._reactor.seconds() < deadline, "a wallet could not drain its queue"

    async def connect(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """A socket to the wallet's current node."""
        return await connect_didcomm_socket(self._reactor, wallet)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._receive_at(random.choice(self._ports))
                except TRANSIENT_ERRORS:
                    await self._pause()
        except _STOPPED:
            pass

    async def _receive_at(self, port: int) -> None:
        socket = await self.connect(wallet_at_node(self.wallet, port, self._reactor))
        socket.closed().addCallback(lambda _: socket.pushed.put(_CLOSED))
        try:
            backlog = (await socket.live()).message_count
            self.connected_port = port
            # Only the backlog must be fetched; later messages are pushed.
            while backlog > 0 and (count := await self._fetch_batch(socket)):
                backlog -= count
            while batch := await _receive_pushes(socket):
                await self._acknowledge(socket, batch)
        finally:
            self.connected_port = None
            await socket.close()

    async def _fetch_batch(self, client: DIDCommWallet | DIDCommSocket) -> int:
        """Fetch and acknowledge a batch; return its size."""
        batch = await client.fetch(MAX_DELIVERY)
        if batch:
            await self._acknowledge(client, batch)
        return len(batch)

    async def _acknowledge(self, client: DIDCommWallet | DIDCommSocket, batch: Sequence[DeliveredMessage]) -> None:
        self._ledger.record_deliveries(self.wallet, batch)
        await self._ledger.acknowledge(client, batch)
        if isinstance(client, DIDCommSocket):
            # Fetched messages may have been pushed as well, before the acknowledgement was answered.
            ids = {delivered.id for delivered in batch}
            client.pushed.pending[:] = [delivered for delivered in client.pushed.pending if delivered.id not in ids]

    async def _pause(self) -> None:
        await deferLater(self._reactor, PAUSE_SECONDS)


async def _receive_pushes(socket: DIDCommSocket) -> list[DeliveredMessage]:
    """At least one pushed message; none when the socket is closed."""
    batch = [await socket.pushed.get()]
    batch += [await socket.pushed.get() for _ in range(len(socket.pushed.pending))]
    return [] if _CLOSED in batch else batch
