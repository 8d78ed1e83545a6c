"""Generates load for a daemon that is about to be stopped, killed or starved, and records the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from math import inf
from threading import Condition, Event, Thread
from typing import Any

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommMediator,
    DIDCommWallet,
    discover_mediator,
    open_http,
)
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    anoncrypt,
    build_forward,
    compose_message,
    wrap_in_forwards,
)
from tests.integration.daemon import Daemon

# Longer than any response takes.
PATIENCE_SECONDS = 120.0
# Limit of a delivery.
MAX_DELIVERY = 100

# Queues large enough that nothing is evicted.
ROOMY: dict[str, Any] = {"queue": {"max_messages": 1_000_000, "max_bytes": 1_000_000_000}}


def prepare_daemon(settings: Mapping[str, Any] | None = None) -> Daemon:
    """A daemon, not running, whose files exist."""
    daemon = Daemon(settings)
    daemon.initialise()
    return daemon


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """
    A forward, ready to be posted.

    :param marker: text that its recipient finds in it.
    """

    marker: str
    body: bytes = field(repr=False)


def prepare_forwards(recipient: DIDCommWallet, prefix: str, count: int) -> list[PreparedForward]:
    """Forwards to one wallet, each with its own marker."""
    return [prepare_forward(recipient, f"{prefix}-{number}") for number in range(count)]


def prepare_forward(recipient: DIDCommWallet, marker: str) -> PreparedForward:
    """One forward to a wallet."""
    message = compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    return PreparedForward(
        marker, wrap_in_forwards(envelope, recipient.did, [recipient.mediator.did], recipient.documents.resolve)
    )


def prepare_sized_forward(recipient: DIDCommWallet, marker: str, size: int) -> PreparedForward:
    """One forward of about `size` bytes."""
    message = compose_message(BASIC_MESSAGE, {"content": marker, "ballast": "x" * size}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    forward = build_forward(recipient.did, [envelope], to=[recipient.mediator.did])
    return PreparedForward(marker, anoncrypt(forward, recipient.mediator.document))


def read_marker(recipient: DIDCommWallet, delivered: DeliveredMessage) -> str:
    """Marker of a delivered message."""
    return str((recipient.open(delivered).message.body or {})["content"])


async def enrol_wallet(daemon: Daemon, reactor: Any) -> DIDCommWallet:
    """A new wallet with an account and its own DID registered."""
    http = open_http(reactor)
    mediator: DIDCommMediator = await discover_mediator(http, daemon.url)
    wallet = DIDCommWallet.generate(mediator, http, reactor)
    await wallet.enrol()
    assert await wallet.register() == ["success"]
    return wallet


async def drain_queue(wallet: DIDCommWallet) -> dict[str, list[str]]:
    """Fetch and acknowledge until the queue is empty; ids by marker, oldest first."""
    ids_by_marker: dict[str, list[str]] = {}
    while batch := await wallet.fetch(MAX_DELIVERY):
        for delivered in batch:
            ids_by_marker.setdefault(read_marker(wallet, delivered), []).append(delivered.id)
        await wallet.acknowledge(batch)
    return ids_by_marker


@dataclass(slots=True)
class SendAttempt:
    """
    One attempt to send a message.

    :param started_at: start, on the monotonic clock.
    :param sent_at: when the whole request was sent; infinity unless set by :class:`LoadSenders`.
    :param status: response status; None if the connection ended without a response.
    :param duration: seconds.
    """

    marker: str
    started_at: float
    status: int | None = None
    retry_after: str | None = None
    duration: float = 0.0
    sent_at: float = inf


class LoadSenders:
    """
    Connections that post forwards in a closed loop, each forward once.

    A sender whose connection breaks stops.

    :ivar posts: all attempts so far.
    :ivar done: set when no sender is left.
    """

    def __init__(self, port: int, forwards: Sequence[PreparedForward], connections: int = 8) -> None:
        self.posts: list[SendAttempt] = []
        self.done = Event()
        self._port = port
        self._forwards = iter(forwards)
        self._changed = Condition()
        self._answers = 0
        self._running = self._unserved = connections
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(connections)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def wait_for_posts(self, count: int) -> None:
        """Return when `count` posts were begun, or all senders have ended."""
        self._wait(lambda: len(self.posts) >= count)

    def wait_for_answers(self, count: int) -> None:
        """Return when `count` posts were answered, or all senders have ended."""
        self._wait(lambda: self._answers >= count)

    def wait_for_connections(self) -> None:
        """Return when each connection has had a response, or all senders have ended."""
        self._wait(lambda: not self._unserved)

    def join(self) -> None:
        """Return when all senders have ended."""
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), "a sender neither got an answer nor lost its connection"

    def markers(self, *statuses: int | None) -> list[str]:
        """Markers of posts with one of these statuses."""
        return [post.marker for post in self.posts if post.status in statuses]

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            met = self._changed.wait_for(lambda: reached() or not self._running, PATIENCE_SECONDS)
        assert met, "the senders are stuck"

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECONDS)
        served = False
        try:
            while (next_post := self._next()) is not None:
                self._send(connection, *next_post)
                if not served:
                    served = True
                    self._record_connection()
        except (OSError, HTTPException):
            pass  # the connection broke: the post has no status
        finally:
            connection.close()
            self._record_exit()

    def _next(self) -> tuple[PreparedForward, SendAttempt] | None:
        with self._changed:
            forward = next(self._forwards, None)
            if forward is None:
                return None
            post = SendAttempt(forward.marker, time.monotonic())
            self.posts.append(post)
            self._changed.notify_all()
            return forward, post

    def _send(self, connection: HTTPConnection, forward: PreparedForward, post: SendAttempt) -> None:
        connection.request("POST", "/didcomm", forward.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
        post.sent_at = time.monotonic()
        response = connection.getresponse()
        with self._changed:
            post.status, post.retry_after = response.status, response.getheader("Retry-After")
            self._answers += 1
            self._changed.notify_all()
        response.read()

    def _record_connection(self) -> None:
        with self._changed:
            self._unserved -= 1
            self._changed.notify_all()

    def _record_exit(self) -> None:
        with self._changed:
            self._running -= 1
            if not self._running:
                self.done.set()
            self._changed.notify_all()
