"""Cost of a socket in memory, timers, writes and store calls, counted."""

from __future__ import annotations

import gc
import socket
import sys
import tracemalloc
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.tcp import Server
from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import SendQueue
from mediatord.didcomm.pickup import MARK_DELAY, DeliveryMarkWriter
from mediatord.http.websocket import KEEPALIVE_SLOTS, PING_INTERVAL, KeepaliveScheduler, build_text_header
from mediatord.runtime.socket_writes import write_immediately
from mediatord.wallet.didcomm_client import read_delivery
from tests.http.in_memory_site import PING, PONG, InMemorySite, InMemoryWebSocketClient, encode_masked_frame
from tests.in_memory_mediator import MP, InMemoryReactor, InMemoryWallet, pack_forward

HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
SOCKET_COUNT = 40
# Modules whose memory counts. Memory of the store and the limits depends on messages.
COUNTED_MODULES = (
    *("mediatord/http/", "mediatord/delivery/", "mediatord/observability/event_recorder"),
    *("mediatord/didcomm/live", "mediatord/didcomm/messages", "autobahn/", "twisted/web/", "txaio/"),
)


class CostsTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits={**HIGH_LIMITS, "max_connections_per_ip": 10_000})

    def open_live_socket(self, wallet: InMemoryWallet) -> InMemoryWebSocketClient:
        """Open a socket with live delivery for a wallet."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(wallet.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        self.assertEqual(len(websocket_client.texts()), 1)
        return websocket_client

    def push(self, websocket_client: InMemoryWebSocketClient, wallet: InMemoryWallet, text: str = "hello") -> str:
        """Forward a message to a wallet; return the id pushed to its socket."""
        self.site_fixture.receive(pack_forward(self.site_fixture, wallet.did, wallet.make_payload(text)))
        (frame,) = websocket_client.texts()
        return read_delivery(wallet.open(frame).message)[0].id


class MemoryTests(CostsTestCase):
    def test_bytes_of_a_live_socket(self) -> None:
        """A live socket at rest takes less than three KiB in mediatord and Autobahn; it was over ten."""
        wallets = [InMemoryWallet(self.site_fixture).enrol() for _ in range(SOCKET_COUNT)]
        kept = [self.open_live_socket(wallets[0])]
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            kept += [self.open_live_socket(wallet) for wallet in wallets]
            gc.collect()
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        growth = [
            item
            for item in after.compare_to(before, "filename")
            if self._is_counted_module(item.traceback[0].filename)
        ]
        self.assertLess(sum(element.size_diff for element in growth) / SOCKET_COUNT, 3072)
        self.assertLess(sum(member.count_diff for member in growth) / SOCKET_COUNT, 40)

    @staticmethod
    def _is_counted_module(path: str) -> bool:
        return any(part in path.replace("\\", "/") for part in COUNTED_MODULES)

    def test_idle_socket_shares_class_attributes(self) -> None:
        """Autobahn's attributes of an idle socket are those of its class, also after fragments and control frames."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        own = vars(websocket_client.transport.protocol)
        self.assertEqual(own, {})
        websocket_client.transport.feed(
            encode_masked_frame(b"{", final=False) + encode_masked_frame(b"who", PING) + encode_masked_frame(b"}", 0)
        )
        self.assertEqual([opcode for opcode, _ in websocket_client.frames()], [PONG, 1])
        self.assertEqual(own, {})
        self.assertLess(sys.getsizeof(own), 100)

    def test_queues_are_created_on_demand(self) -> None:
        """An empty deque takes more memory than the rest of a socket."""
        send_queue = SendQueue(lambda frame: None)
        self.assertIsNone(send_queue._queued)
        send_queue.pauseProducing()
        send_queue.offer(b"x")
        self.assertEqual(send_queue.queued_bytes, 1)
        send_queue.resumeProducing()
        self.assertIsNone(send_queue._queued)

    def test_sockets_leave_no_reference_cycles(self) -> None:
        """
        What a socket leaves when it is opened, and all of it once it is closed, is freed by reference counts.

        The garbage collector looks at objects of its age after millions of messages only.
        """
        self.close_from_peer(self.open_live_socket(InMemoryWallet(self.site_fixture).enrol()))
        for close in (self.close_from_peer, self.close_by_timeout):
            wallet = InMemoryWallet(self.site_fixture).enrol()
            for _ in range(3):  # finalizing garbage of other tests may create more
                gc.collect()
            gc.disable()
            self.addCleanup(gc.enable)
            gc.freeze()  # what other tests have left may become garbage now
            self.addCleanup(gc.unfreeze)
            websocket_client = self.open_live_socket(wallet)
            self.assertEqual(gc.collect(), 0)
            kept = weakref.ref(websocket_client.transport.protocol)
            close(websocket_client)
            del websocket_client.transport.protocol  # as a transport of Twisted does
            self.assertIsNone(kept())
            self.assertEqual(gc.collect(), 0)

    @staticmethod
    def close_from_peer(websocket_client: InMemoryWebSocketClient) -> None:
        websocket_client.transport.disconnect()

    def close_by_timeout(self, websocket_client: InMemoryWebSocketClient) -> None:
        self.site_fixture.clock.pump([1] * int(2 * PING_INTERVAL + 2))
        self.assertTrue(websocket_client.transport.lost)

    def test_did_strings_are_shared(self) -> None:
        """The subscriber of a socket shares its DID string with the tables, and holds no document."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        connections = self.site_fixture.base.connections
        ((session, reader),) = connections.subscribers(wallet.did)
        self.assertIs(session, websocket_client.transport.protocol)
        self.assertIs(reader.name, next(iter(connections._live)))
        self.assertIs(reader.name, connections._dids.lookup(session)[0][0])
        self.assertFalse(hasattr(reader, "document"))
        self.assertEqual(reader.kid, wallet.identity.agreement.kid)


class TimerTests(CostsTestCase):
    def test_sockets_have_no_timers(self) -> None:
        """Open sockets have no timers of their own."""
        self.site_fixture.websocket_client()
        before = len(self.site_fixture.clock.getDelayedCalls())
        websocket_clients = [self.site_fixture.websocket_client() for _ in range(SOCKET_COUNT)]
        self.assertEqual(len(self.site_fixture.clock.getDelayedCalls()), before)
        for websocket_client in websocket_clients:
            websocket_client.transport.disconnect()


class KeepaliveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = InMemoryReactor()
        self.keepalive = KeepaliveScheduler(self.clock, 30.0)

    def test_pings_each_socket_once_per_interval(self) -> None:
        """Each socket is pinged once in an interval, the first time an interval after its opening."""
        sockets = [RecordingSocket(self.clock) for _ in range(70)]
        for socket_ in sockets:
            self.keepalive.add(socket_)
            socket_.opened = self.clock.seconds()
            self.clock.advance(1)
        self.clock.pump([1] * 200)
        for socket_ in sockets:
            first, *_ = socket_.pings
            self.assertTrue(29 <= first - socket_.opened <= 30)
            gaps = {after - before for before, after in zip(socket_.pings, socket_.pings[1:], strict=False)}
            self.assertEqual(gaps, {KEEPALIVE_SLOTS})

    def test_spreads_pings_of_simultaneous_sockets(self) -> None:
        """A thousand sockets opened at once are pinged in several iterations."""
        sockets = [RecordingSocket(self.clock) for _ in range(1000)]
        for socket_ in sockets:
            self.keepalive.add(socket_)
        delays: list[float] = []
        real = self.clock.callLater

        def call_later(delay: float, *rest: Any) -> Any:
            delays.append(delay)
            return real(delay, *rest)

        self.patch(self.clock, "callLater", call_later)
        self.clock.pump([1] * 30)
        self.assertEqual(delays.count(0), 9)
        self.assertEqual({len(socket_.pings) for socket_ in sockets}, {1})

    def test_failing_ping_spares_others(self) -> None:
        """A ping that fails does not stop those after it."""

        def fail() -> None:
            raise ZeroDivisionError

        sockets = [RecordingSocket(self.clock) for _ in range(250)]
        for socket_ in sockets:
            self.keepalive.add(socket_)
        broken = next(iter(self.keepalive))
        self.patch(broken, "ping", fail)
        self.clock.pump([1] * 61)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)
        self.assertEqual({len(socket_.pings) for socket_ in sockets if socket_ is not broken}, {2})

    def test_removed_socket_is_not_pinged(self) -> None:
        """A removed socket is not pinged; removing it twice is harmless."""
        socket_ = RecordingSocket(self.clock)
        self.keepalive.add(socket_)
        self.keepalive.remove(socket_)
        self.keepalive.remove(socket_)
        self.assertEqual((len(self.keepalive), self.clock.getDelayedCalls()), (0, []))


class RecordingSocket:
    """Socket that records its pings."""

    def __init__(self, clock: InMemoryReactor) -> None:
        self.keepalive_slot = 0
        self.opened = 0.0
        self.pings: list[float] = []
        self._clock = clock

    def ping(self) -> None:
        """Record the ping."""
        self.pings.append(self._clock.seconds())


class PushTests(CostsTestCase):
    def test_push_is_one_write(self) -> None:
        """A push is one write, header included."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        writes: list[bytes] = []
        real = websocket_client.transport.write

        def write(data: bytes) -> None:
            writes.append(data)
            real(data)

        self.patch(websocket_client.transport, "write", write)
        self.push(websocket_client, wallet)
        self.assertEqual(len(writes), 1)

    def test_delivery_marks_are_batched(self) -> None:
        """A message acknowledged soon is never marked as delivered; others are marked in batches."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        marked: list[list[str]] = []
        store: Any = self.site_fixture.store
        real = store.mark_delivered
        live = self.site_fixture.didcomm.live

        def mark(ids: list[str], *, node: str) -> Any:
            marked.append(list(ids))
            return real(ids, node=node)

        self.patch(store, "mark_delivered", mark)
        quick = self.push(websocket_client, wallet)
        slow = [self.push(websocket_client, wallet), self.push(websocket_client, wallet)]
        websocket_client.send(wallet.pack(f"{MP}/messages-received", {"message_id_list": [quick]}))
        self.assertEqual(len(websocket_client.texts()), 1)
        self.assertEqual(marked, [])
        self.site_fixture.clock.advance(MARK_DELAY)
        self.assertEqual(marked, [slow])
        self.assertEqual(live._marks._waiting, {})

    def test_acknowledgement_without_status_reads_no_store(self) -> None:
        """An acknowledgement without a wanted reply does not read the store."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        response: list[str] = []
        store: Any = self.site_fixture.store
        real = store.acknowledge_each

        def acknowledge(requests: Any) -> Any:
            response.extend(["status" for request in requests if request.with_status])
            return real(requests)

        self.patch(store, "acknowledge_each", acknowledge)
        for route in ("none", "all"):
            ids = {"message_id_list": [self.push(websocket_client, wallet)]}
            websocket_client.send(wallet.pack(f"{MP}/messages-received", ids, return_route=route))
            self.assertEqual(len(websocket_client.texts()), len(response))
        self.assertEqual(response, ["status"])
        self.assertEqual(wallet.count_queued(), 0)

    def test_unmarked_failed_pushes(self) -> None:
        """Failed pushes are reported; the store is not asked about unmarked ones."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        self.push(websocket_client, wallet)
        websocket_client.transport.disconnect()
        failed = [event for event in self.site_fixture.events("msg.push") if event["ok"] is False]
        self.assertEqual(len(failed), 1)
        self.assertEqual(wallet.count_queued(), 1)

    def test_partly_marked_failed_pushes(self) -> None:
        """All failed pushes are reported once; the store is asked about marked ones only."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.open_live_socket(wallet)
        pending: list[str] = []
        store: Any = self.site_fixture.store
        real = store.mark_pending

        def mark_pending(ids: list[str]) -> Any:
            pending.extend(ids)
            return real(ids)

        self.patch(store, "mark_pending", mark_pending)
        old = [self.push(websocket_client, wallet), self.push(websocket_client, wallet)]
        self.site_fixture.clock.advance(MARK_DELAY)
        self.push(websocket_client, wallet)
        websocket_client.transport.disconnect()
        self.assertEqual(pending, old)
        failed = [event["msg"] for event in self.site_fixture.events("msg.push") if event["ok"] is False]
        self.assertEqual((len(failed), len(set(failed))), (3, 3))


class DeliveryMarkTests(SynchronousTestCase):
    def test_marks_without_delay(self) -> None:
        """What another process has to know soon is marked within the iteration, all of it together."""
        clock, marked = Clock(), list[Sequence[str]]()

        def write(ids: Sequence[str]) -> Deferred[None]:
            marked.append(ids)
            return succeed(None)

        marks = DeliveryMarkWriter(clock, write, MARK_DELAY)
        marks.add("a")
        marks.flush_soon()
        marks.add("b")
        clock.advance(0)
        self.assertEqual(marked, [["a", "b"]])
        marks.flush_soon()
        marks.add("c")
        marks.cancel_mark("c")
        clock.advance(MARK_DELAY)
        self.assertEqual((len(marked), clock.getDelayedCalls()), (1, []))


class DirectWriteTests(SynchronousTestCase):
    """Writing to a TCP connection without the reactor."""

    def setUp(self) -> None:
        server_end, self.client_end = socket.socketpair()
        for end in (server_end, self.client_end):
            end.setblocking(False)
            self.addCleanup(end.close)
        self.reactor: Any = WriterCountingReactor()
        self.transport = Server(server_end, Protocol(), ("127.0.0.1", 1), None, 0, self.reactor)  # type: ignore[arg-type]
        self.transport.connected = 1

    def test_writes_to_kernel_at_once(self) -> None:
        """On a plain TCP connection nothing is left for the reactor to write, and epoll is not called."""
        write_immediately(self.transport, build_text_header(5) + b"hello")
        self.assertEqual(self.client_end.recv(100), b"\x81\x05hello")
        self.assertEqual(self.reactor.writers, 0)

    def test_keeps_order(self) -> None:
        """What the kernel does not take is buffered, and later writes queue behind it."""
        everything, output = b"", b""
        for number in range(40):
            piece = bytes([number]) * 100_000
            everything += piece
            write_immediately(self.transport, piece)
        self.assertGreater(self.reactor.writers, 0)
        while len(output) < len(everything):
            output += self.client_end.recv(1 << 20)
            self.transport.doWrite()
        self.assertEqual(output, everything)
        write_immediately(self.transport, b"behind")
        self.assertEqual(self.client_end.recv(100), b"behind")

    def test_pauses_producer(self) -> None:
        """A producer is paused when kernel and transport are full, and resumed afterwards."""
        producer = mock.Mock()
        self.transport.registerProducer(producer, True)
        write_immediately(self.transport, bytes(8_000_000))
        producer.pauseProducing.assert_called_once_with()
        output = 0
        while output < 8_000_000:
            output += len(self.client_end.recv(1 << 20))
            self.transport.doWrite()
        producer.resumeProducing.assert_called_once_with()

    def test_close_flushes_buffer(self) -> None:
        """After closing, the buffer is written and nothing more."""
        self.transport.loseWriteConnection()
        write_immediately(self.transport, b"late")
        self.transport.doWrite()
        self.assertEqual(self.client_end.recv(100), b"late")
        write_immediately(self.transport, b"too late")
        self.assertEqual(self.client_end.recv(100), b"")

    def test_abort_drops_buffer(self) -> None:
        """After an abort nothing is written, although the socket closes in the next iteration."""
        self.transport.abortConnection()
        write_immediately(self.transport, b"too late")
        self.assertRaises(BlockingIOError, self.client_end.recv, 100)

    def test_lost_peer_is_left_to_reactor(self) -> None:
        """A write to a lost peer is left to the reactor, which finds the error."""
        self.client_end.close()
        write_immediately(self.transport, b"hello")
        self.assertEqual(self.reactor.writers, 1)


class WriterCountingReactor(Clock):
    """Minimal reactor of a connection that counts registrations of writers."""

    def __init__(self) -> None:
        super().__init__()
        self.writers = 0

    def removeReader(self, reader: object) -> None:  # noqa: N802
        """Ignore."""

    def removeWriter(self, writer: object) -> None:  # noqa: N802
        """Ignore."""

    def addReader(self, reader: object) -> None:  # noqa: N802
        """Ignore."""

    def addWriter(self, writer: object) -> None:  # noqa: N802
        """Count."""
        self.writers += 1
