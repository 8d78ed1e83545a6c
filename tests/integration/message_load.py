"""Load for a daemon that is about to be stopped, killed or starved: what was sent, and what became of it."""

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

# A daemon that says nothing for so long is stuck.
PATIENCE_SECONDS = 120.0
# All that a mediator puts into one delivery.
MANY = 100

# Queues that nothing falls out of.
ROOMY: dict[str, Any] = {"queue": {"max_messages": 1_000_000, "max_bytes": 1_000_000_000}}


def prepare_daemon(settings: Mapping[str, Any] | None = None) -> Daemon:
    """A daemon, yet to be started, whose files are there."""
    daemon = Daemon(settings)
    daemon.initialise()
    return daemon


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """
    A forward, ready to be posted.

    :param marker: what its recipient finds in it.
    """

    marker: str
    body: bytes = field(repr=False)


def prepare_forwards(recipient: DIDCommWallet, prefix: str, count: int) -> list[PreparedForward]:
    """So many letters to one wallet, each with a marker of its own."""
    return [prepare_forward(recipient, f"{prefix}-{number}") for number in range(count)]


def prepare_forward(recipient: DIDCommWallet, marker: str) -> PreparedForward:
    """One letter to this wallet."""
    message = compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    return PreparedForward(
        marker, wrap_in_forwards(envelope, recipient.did, [recipient.mediator.did], recipient.documents.resolve)
    )


def prepare_sized_forward(recipient: DIDCommWallet, marker: str, size: int) -> PreparedForward:
    """One letter of about `size` bytes."""
    message = compose_message(BASIC_MESSAGE, {"content": marker, "ballast": "x" * size}, to=[recipient.did])
    envelope = anoncrypt(message, recipient.identity.document)
    sealed = build_forward(recipient.did, [envelope], to=[recipient.mediator.did])
    return PreparedForward(marker, anoncrypt(sealed, recipient.mediator.document))


def read_marker(recipient: DIDCommWallet, delivered: DeliveredMessage) -> str:
    """What stands in a delivered letter."""
    return str((recipient.open(delivered).message.body or {})["content"])


async def enrol_wallet(daemon: Daemon, reactor: Any) -> DIDCommWallet:
    """A new wallet with an account at this daemon, and its own DID registered."""
    http = open_http(reactor)
    mediator: DIDCommMediator = await discover_mediator(http, daemon.url)
    wallet = DIDCommWallet.generate(mediator, http, reactor)
    await wallet.enrol()
    assert await wallet.register() == ["success"]
    return wallet


async def drain_queue(wallet: DIDCommWallet) -> dict[str, list[str]]:
    """Fetch and acknowledge until nothing is left: the ids by marker, oldest first."""
    found: dict[str, list[str]] = {}
    while batch := await wallet.fetch(MANY):
        for delivered in batch:
            found.setdefault(read_marker(wallet, delivered), []).append(delivered.id)
        await wallet.acknowledge(batch)
    return found


@dataclass(slots=True)
class SendAttempt:
    """
    One attempt to send a letter.

    :param begun: when, on the monotonic clock.
    :param sent: when all of it was; never, unless :class:`LoadSenders` did.
    :param status: of the answer; None when the connection ended without one.
    :param took: seconds.
    """

    marker: str
    begun: float
    status: int | None = None
    retry_after: str | None = None
    took: float = 0.0
    sent: float = inf


class LoadSenders:
    """
    Connections that post letters as fast as they are answered, each letter once.

    A sender whose connection is cut sends nothing more, as it does not know any better.

    :ivar posts: every attempt so far.
    :ivar done: set when no sender is left.
    """

    def __init__(self, port: int, stock: Sequence[PreparedForward], connections: int = 8) -> None:
        self.posts: list[SendAttempt] = []
        self.done = Event()
        self._port = port
        self._stock = iter(stock)
        self._changed = Condition()
        self._answers = 0
        self._left = self._unserved = connections
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(connections)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def wait_for_posts(self, count: int) -> None:
        """Return when so many posts were begun, or all have ended."""
        self._wait(lambda: len(self.posts) >= count)

    def wait_for_answers(self, count: int) -> None:
        """Return when so many posts were answered, or all have ended."""
        self._wait(lambda: self._answers >= count)

    def wait_for_connections(self) -> None:
        """Return when each connection has had an answer, and so was accepted, or all have ended."""
        self._wait(lambda: not self._unserved)

    def join(self) -> None:
        """Return when nobody sends any more."""
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), "a sender neither got an answer nor lost its connection"

    def markers(self, *statuses: int | None) -> list[str]:
        """Of the posts with one of these outcomes."""
        return [post.marker for post in self.posts if post.status in statuses]

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            met = self._changed.wait_for(lambda: reached() or not self._left, PATIENCE_SECONDS)
        assert met, "the senders are stuck"

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECONDS)
        served = False
        try:
            while (letter := self._next()) is not None:
                self._send(connection, *letter)
                if not served:
                    served = True
                    self._note_connection()
        except (OSError, HTTPException):
            pass  # cut off: the post has no status
        finally:
            connection.close()
            self._leave()

    def _next(self) -> tuple[PreparedForward, SendAttempt] | None:
        with self._changed:
            letter = next(self._stock, None)
            if letter is None:
                return None
            post = SendAttempt(letter.marker, time.monotonic())
            self.posts.append(post)
            self._changed.notify_all()
            return letter, post

    def _send(self, connection: HTTPConnection, letter: PreparedForward, post: SendAttempt) -> None:
        connection.request("POST", "/didcomm", letter.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
        post.sent = time.monotonic()
        response = connection.getresponse()
        with self._changed:
            post.status, post.retry_after = response.status, response.getheader("Retry-After")
            self._answers += 1
            self._changed.notify_all()
        response.read()

    def _note_connection(self) -> None:
        with self._changed:
            self._unserved -= 1
            self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._left -= 1
            if not self._left:
                self.done.set()
            self._changed.notify_all()
