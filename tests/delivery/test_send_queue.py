"""One socket's outgoing frames under back-pressure."""

from twisted.internet.interfaces import IPushProducer
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from mediatord.delivery.connections import SendQueue


class SendQueueTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.written: list[bytes] = []
        self.outbox = SendQueue(self.written.append, max_frames=3, max_bytes=10)
        verifyObject(IPushProducer, self.outbox)

    def test_frames_go_out_at_once(self) -> None:
        """While the peer reads, nothing waits."""
        self.assertTrue(self.outbox.offer(b"a"))
        self.assertEqual(self.written, [b"a"])

    def test_frames_wait_in_order_while_congested(self) -> None:
        """What was taken goes out in order once the transport drains."""
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"a") and self.outbox.offer(b"b"))
        self.assertEqual(self.written, [])
        self.outbox.resumeProducing()
        self.assertEqual(self.written, [b"a", b"b"])

    def test_it_stops_writing_when_the_transport_fills_up_again(self) -> None:
        """The transport pauses from within a write; what is left keeps waiting."""

        def write(frame: bytes) -> None:
            self.written.append(frame)
            outbox.pauseProducing()

        outbox = SendQueue(write, max_frames=3, max_bytes=10)
        outbox.pauseProducing()
        for frame in (b"a", b"b"):
            outbox.offer(frame)
        outbox.resumeProducing()
        self.assertEqual(self.written, [b"a"])

    def test_full_by_number(self) -> None:
        """Beyond max_frames a frame is refused, so that its message stays in the store."""
        self.outbox.pauseProducing()
        self.assertEqual([self.outbox.offer(b"x") for _ in range(4)], [True, True, True, False])

    def test_full_by_size(self) -> None:
        """Beyond max_bytes as well, but one frame of any size may wait."""
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"x" * 50))
        self.assertFalse(self.outbox.offer(b"x"))

    def test_room_comes_back(self) -> None:
        """What has gone out no longer counts."""
        self.outbox.pauseProducing()
        self.outbox.offer(b"x" * 10)
        self.outbox.resumeProducing()
        self.outbox.pauseProducing()
        self.assertTrue(self.outbox.offer(b"x" * 10))

    def test_a_closed_socket_takes_nothing(self) -> None:
        """After stopProducing nothing is written, now or later."""
        self.outbox.pauseProducing()
        self.outbox.offer(b"a")
        self.outbox.stopProducing()
        self.outbox.resumeProducing()
        self.assertFalse(self.outbox.offer(b"b"))
        self.assertEqual(self.written, [])
