"""One socket's outgoing frames: written at once while the peer reads, kept within bounds while it does not."""

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
    :param max_frames: frames that may wait while the transport is congested.
    :param max_bytes: bytes that may wait, counted the same way; one frame may always wait.
    :param cleared: told when nothing waits any more and the transport takes frames again.
    """

    __slots__ = (
        "_cleared",
        "_max_bytes",
        "_max_frames",
        "_paused",
        "_stopped",
        "_waiting",
        "_waiting_bytes",
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
        self._cleared = on_drained
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        # An empty deque is larger than all the rest of a socket that has nothing to say.
        self._waiting: deque[bytes] | None = None
        self._waiting_bytes = 0
        self._paused = False
        self._stopped = False

    def limit(self, max_bytes: int) -> None:
        """Let so many bytes wait from now on; what waits already goes on waiting."""
        self._max_bytes = max_bytes

    @property
    def waiting(self) -> int:
        """Frames that wait."""
        return len(self._waiting or ())

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the peer to read, those that the transport has not counted."""
        return self._waiting_bytes

    @property
    def is_drained(self) -> bool:
        """Whether a frame would be sent now, or never: nothing is gained by waiting."""
        return self._stopped or not (self._paused or self._waiting)

    def put(self, frame: bytes) -> None:
        """Send now, or when the socket drains, full or not: for answers, which are not made while it is congested."""
        if self._stopped:
            return
        if self.is_drained:
            self._write(frame)
        else:
            self._keep(frame)

    def offer(self, frame: bytes) -> bool:
        """Send now, or when the socket drains. False when full or closed: the message stays in the store."""
        if self._stopped:
            return False
        if not self._paused:
            self._write(frame)
            return True
        waiting = self._waiting
        if waiting and (len(waiting) >= self._max_frames or self._waiting_bytes + len(frame) > self._max_bytes):
            return False
        self._keep(frame)
        return True

    def _keep(self, frame: bytes) -> None:
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)

    def pauseProducing(self) -> None:
        """The transport's buffer is full; called again for every write while it is."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The transport drained: write until it is full again."""
        self._paused = False
        while self._waiting and not self._paused:
            frame = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            self._write(frame)
        if not self._waiting:
            self._waiting = None
        if self.is_drained:
            self._cleared()

    def stopProducing(self) -> None:
        """The connection is gone, and what waited with it; the store has it all."""
        self._stopped = True
        self._waiting = None
        self._waiting_bytes = 0
        self._cleared()
