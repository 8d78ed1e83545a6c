"""Senders and recipients that do not give up: they turn from node to node until everything has arrived."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from queue import Empty, SimpleQueue
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
from tests.integration.message_load import MANY, PATIENCE_SECONDS, SendAttempt, prepare_forward

# Who post at the same time.
COURIERS = 6
# Between two attempts of one sender, and of one recipient.
PAUSE_SECONDS = 0.1
# A letter that is not accepted within so long never will be.
GIVE_UP_SECONDS = 120.0
_END = DeliveredMessage("", b"", "json")
# What it comes to when it is cancelled, also while it connects.
_STOPPED = (CancelledError, ConnectingCancelledError, DNSLookupError)
# The answers to expect from a mediator that is in trouble.
TROUBLE = (
    *(MediatorProblem, ConnectionClosed, ConnectError, DeferredTimeout),
    # The connection ended while the request was written, or before all of the response had come.
    *(RequestTransmissionFailed, ResponseFailed),
)


@dataclass(frozen=True, slots=True)
class SendTask:
    """
    A letter that is to be sent.

    :param letter: by what it goes in the ledger.
    """

    recipient: DIDCommWallet
    letter: str


class RetryingSenders:
    """
    Threads that post letters to whichever node takes them, each until it is accepted. Every attempt is sealed anew.

    :param ports: of the nodes.
    """

    def __init__(self, ports: Sequence[int], ledger: DeliveryLedger) -> None:
        self._ports = ports
        self._ledger = ledger
        self._stock: SimpleQueue[SendTask] = SimpleQueue()
        self._changed = Condition()
        self._over = Event()
        self._accepted = 0
        self._answers = 0
        self._running = 0
        self._threads: list[Thread] = []

    def start(self, send_tasks: Iterable[SendTask]) -> None:
        """Begin to send these."""
        for send_task in send_tasks:
            self._stock.put(send_task)
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(COURIERS)]
        self._running = COURIERS
        for thread in self._threads:
            thread.start()

    def wait_for_accepted(self, more: int) -> None:
        """Return when so many more have been accepted than now, or all are out."""
        self._wait(lambda: self._accepted, more, self._has_stock)

    def wait_for_answers(self, more: int) -> None:
        """Return when so many more have been answered than now, whatever the answer, or all are out."""
        self._wait(lambda: self._answers, more, self._has_stock)

    def wait_for_refused(self, more: int) -> None:
        """Return when so many more have been refused than now, or all were accepted or given up."""
        self._wait(lambda: self._answers - self._accepted, more, self._is_running)

    def join(self) -> None:
        """Return when all letters are out, or were given up."""
        for thread in self._threads:
            thread.join(GIVE_UP_SECONDS + PATIENCE_SECONDS)
            assert not thread.is_alive(), "a sender is stuck"

    def stop(self) -> None:
        """Send nothing more."""
        self._over.set()

    def _wait(self, count: Callable[[], int], more: int, is_busy: Callable[[], bool]) -> None:
        with self._changed:
            wanted = count() + more
            met = self._changed.wait_for(lambda: count() >= wanted or not is_busy(), PATIENCE_SECONDS)
        assert met, "the senders are stuck"

    def _is_running(self) -> bool:
        return self._running > 0

    def _has_stock(self) -> bool:
        return self._is_running() and not self._stock.empty()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                try:
                    send_task = self._stock.get_nowait()
                except Empty:
                    break
                self._deliver(send_task)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _deliver(self, send_task: SendTask) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline and not self._over.is_set():
            status = self._post(send_task, random.choice(self._ports))
            with self._changed:
                self._answers += status is not None
                self._accepted += status == 202
                self._changed.notify_all()
            if status == 202:
                return
            self._over.wait(PAUSE_SECONDS)

    def _post(self, send_task: SendTask, port: int) -> int | None:
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            connection.connect()
        except OSError:
            connection.close()
            return None  # nothing was sent
        letter = prepare_forward(send_task.recipient, self._ledger.attempt(send_task.letter))
        post = SendAttempt(letter.marker, time.monotonic())
        try:
            connection.request("POST", "/didcomm", letter.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
            response = connection.getresponse()
            post.status, post.retry_after = response.status, response.getheader("Retry-After")
        except (OSError, HTTPException):
            pass  # cut off: the post has no status
        finally:
            connection.close()
            post.took = time.monotonic() - post.begun
            self._ledger.posted(post)
        return post.status


class ReconnectingRecipient:
    """
    A wallet that stays connected: to another node whenever it loses one. It acknowledges what it gets.

    :param ports: of the nodes.
    :ivar listens_at: the port of the node that pushes to it; None while there is none.
    """

    def __init__(self, wallet: DIDCommWallet, ports: Sequence[int], ledger: DeliveryLedger, reactor: Any) -> None:
        self.wallet = wallet
        self._ports = ports
        self._ledger = ledger
        self._reactor = reactor
        self._running: Deferred[None] | None = None
        self.listens_at: int | None = None

    def start(self) -> None:
        """Begin to listen."""
        self._running = Deferred.fromCoroutine(self._run())

    async def stop(self) -> None:
        """Listen no more."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await running

    async def settle(self) -> None:
        """Listen no more; fetch and acknowledge until nothing is left, at whichever node will have it."""
        await self.stop()
        until = self._reactor.seconds() + GIVE_UP_SECONDS
        while True:
            try:
                wallet = wallet_at_node(self.wallet, random.choice(self._ports), self._reactor)
                if not await self._take_some(wallet):
                    return
            except TROUBLE:
                await self._pause()
            assert self._reactor.seconds() < until, "there is no end to the messages of a wallet"

    async def connect(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """A socket to the node that this wallet is at."""
        return await connect_didcomm_socket(self._reactor, wallet)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._stay(random.choice(self._ports))
                except TROUBLE:
                    await self._pause()
        except _STOPPED:
            pass

    async def _stay(self, port: int) -> None:
        socket = await self.connect(wallet_at_node(self.wallet, port, self._reactor))
        socket.closed().addCallback(lambda _: socket.pushed.put(_END))
        try:
            waiting = (await socket.live()).message_count
            self.listens_at = port
            # Only what was there before; all that comes now is pushed.
            while waiting > 0 and (taken := await self._take_some(socket)):
                waiting -= taken
            while batch := await _take_pushes(socket):
                await self._take(socket, batch)
        finally:
            self.listens_at = None
            await socket.close()

    async def _take_some(self, way: DIDCommWallet | DIDCommSocket) -> int:
        """How many there were."""
        batch = await way.fetch(MANY)
        if batch:
            await self._take(way, batch)
        return len(batch)

    async def _take(self, way: DIDCommWallet | DIDCommSocket, batch: Sequence[DeliveredMessage]) -> None:
        self._ledger.delivered(self.wallet, batch)
        await self._ledger.acknowledge(way, batch)
        if isinstance(way, DIDCommSocket):
            # What was fetched may have been pushed as well, before the acknowledgement was answered.
            taken = {one.id for one in batch}
            way.pushed.pending[:] = [one for one in way.pushed.pending if one.id not in taken]

    async def _pause(self) -> None:
        await deferLater(self._reactor, PAUSE_SECONDS)


async def _take_pushes(socket: DIDCommSocket) -> list[DeliveredMessage]:
    """Those that have come, at least one; none when the socket is closed."""
    batch = [await socket.pushed.get()]
    batch += [await socket.pushed.get() for _ in range(len(socket.pushed.pending))]
    return [] if _END in batch else batch
