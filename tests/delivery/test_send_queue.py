"""The send queue of a socket under back-pressure."""

from twisted.internet.interfaces import IPushProducer
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from mediatord.delivery.connections import SendQueue


class SendQueueTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.written: list[bytes] = []
        self.outbox = SendQueue(self.written.append, max_frames=3, max_bytes=10)
        verifyObject(IPushProducer, self.outbox)

    def test_writes_at_once(self) -> None:
        """While the peer reads, frames are written at once."""
        self.assertTrue(self.outbox.offer(b"a"))
        self.assertEqual(self.written, [b"a"])

    def test_congested_frames_keep_order(self) -> None:
        """Accepted frames are written in order when the transport drains."""
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"a") and self.outbox.offer(b"b"))
        self.assertEqual(self.written, [])
        self.outbox.resumeProducing()
        self.assertEqual(self.written, [b"a", b"b"])

    def test_stops_when_transport_pauses_again(self) -> None:
        """The transport pauses during a write; the remaining frames keep waiting."""

        def write(frame: bytes) -> None:
            self.written.append(frame)
            outbox.pauseProducing()

        outbox = SendQueue(write, max_frames=3, max_bytes=10)
        outbox.pauseProducing()
        for frame in (b"a", b"b"):
            outbox.offer(frame)
        outbox.resumeProducing()
        self.assertEqual(self.written, [b"a"])

    def test_frames_are_limited(self) -> None:
        """Beyond max_frames a frame is refused, so that its message stays in the store."""
        self.outbox.pauseProducing()
        self.assertEqual([self.outbox.offer(b"x") for _ in range(4)], [True, True, True, False])

    def test_bytes_are_limited(self) -> None:
        """Beyond max_bytes too, but one frame of any size may wait."""
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"x" * 50))
        self.assertFalse(self.outbox.offer(b"x"))

    def test_written_frames_make_room(self) -> None:
        """Written frames no longer count."""
        self.outbox.pauseProducing()
        self.outbox.offer(b"x" * 10)
        self.outbox.resumeProducing()
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"x" * 10))

    def test_closed_socket_writes_nothing(self) -> None:
        """After stopProducing nothing is written, now or later."""
        self.outbox.pauseProducing()
        self.outbox.offer(b"a")
        self.outbox.stopProducing()
        self.outbox.resumeProducing()
        self.assertFalse(self.outbox.offer(b"b"))
        self.assertEqual(self.written, [])
