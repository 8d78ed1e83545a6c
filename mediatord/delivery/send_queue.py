"""Bounded queue of one socket's outgoing frames, used while the peer does not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer


@implementer(IPushProducer)
class SendQueue:
    """
    The producer of one WebSocket's transport.

    :param write: sends one frame.
    :param max_frames: frames that may be queued while the transport is congested.
    :param max_bytes: bytes that may be queued; a first frame always may.
    :param on_drained: called when the queue is empty and the transport takes frames again.
    """

    __slots__ = (
        "_on_drained",
        "_max_bytes",
        "_max_frames",
        "_paused",
        "_stopped",
        "_queued",
        "_queued_bytes",
        "_write",
    )

    def __init__(
        self,
        write: Callable[[bytes], None],
        max_frames: int = 64,
        max_bytes: int = 1_048_576,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._write = write
        self._on_drained = on_drained
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        # An empty deque would be larger than all other state of an idle socket.
        self._queued: deque[bytes] | None = None
        self._queued_bytes = 0
        self._paused = False
        self._stopped = False

    def limit(self, max_bytes: int) -> None:
        """Change the limit of bytes; queued frames are kept."""
        self._max_bytes = max_bytes

    @property
    def queued_frames(self) -> int:
        """Number of queued frames."""
        return len(self._queued or ())

    @property
    def queued_bytes(self) -> int:
        """Bytes of queued frames."""
        return self._queued_bytes

    @property
    def is_drained(self) -> bool:
        """Whether a frame would be sent at once, or never because the connection is closed."""
        return self._stopped or not (self._paused or self._queued)

    def put(self, frame: bytes) -> None:
        """Send now or when the socket drains, beyond the limits: for replies, which are not made while congested."""
        if self._stopped:
            return
        if self._paused or self._queued:
            self._keep(frame)
        else:
            self._write(frame)

    def offer(self, frame: bytes) -> bool:
        """Send now or when the socket drains; False when full or closed."""
        if self._stopped:
            return False
        if not self._paused:
            self._write(frame)
            return True
        queued = self._queued
        if queued and (len(queued) >= self._max_frames or self._queued_bytes + len(frame) > self._max_bytes):
            return False
        self._keep(frame)
        return True

    def _keep(self, frame: bytes) -> None:
        if self._queued is None:
            self._queued = deque()
        self._queued.append(frame)
        self._queued_bytes += len(frame)

    def pauseProducing(self) -> None:
        """The transport's buffer is full; called for every write while it is."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The transport drained: write queued frames until it is full again."""
        self._paused = False
        while self._queued and not self._paused:
            frame = self._queued.popleft()
            self._queued_bytes -= len(frame)
            self._write(frame)
        if not self._queued:
            self._queued = None
        if self.is_drained:
            self._on_drained()

    def stopProducing(self) -> None:
        """The connection is closed: drop queued frames, which are still in the store."""
        self._stopped = True
        self._queued = None
        self._queued_bytes = 0
        self._on_drained()
