"""What a socket costs, counted: memory, timers, writes and turns of the store."""

from __future__ import annotations

import gc
import socket
import sys
import tracemalloc
from typing import Any
from unittest import mock

from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.tcp import Server
from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import SendQueue
from mediatord.didcomm.pickup import MARK_DELAY
from mediatord.http.channel import write_immediately
from mediatord.http.websocket import KEEPALIVE_SLOTS, KeepaliveScheduler, build_text_header
from mediatord.wallet.didcomm_client import read_delivery
from tests.http.in_memory_site import PING, PONG, InMemorySite, InMemoryWebSocketClient, encode_masked_frame
from tests.in_memory_mediator import MP, InMemoryReactor, InMemoryWallet, pack_forward

PLENTY = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
MANY = 40
# Modules whose memory is that of sockets. What the store and the limits remember of messages is not.
OURS = (
    *("mediatord/http/", "mediatord/delivery/", "mediatord/observability/event_recorder"),
    *("mediatord/didcomm/live", "mediatord/didcomm/messages", "autobahn/", "twisted/web/", "txaio/"),
)


class CostsTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits={**PLENTY, "max_connections_per_ip": 10_000})

    def live(self, wallet: InMemoryWallet) -> InMemoryWebSocketClient:
        """A socket that a wallet's messages are pushed to."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(wallet.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        self.assertEqual(len(websocket_client.texts()), 1)
        return websocket_client

    def pushed(self, websocket_client: InMemoryWebSocketClient, wallet: InMemoryWallet, text: str = "hello") -> str:
        """The id of a message that a stranger sends and that comes out of a socket."""
        self.site_fixture.receive(pack_forward(self.site_fixture, wallet.did, wallet.letter(text)))
        (frame,) = websocket_client.texts()
        return read_delivery(wallet.open(frame).message)[0].id


class MemoryTests(CostsTestCase):
    def test_bytes_of_a_live_socket(self) -> None:
        """At rest it takes less than three KiB in our modules and Autobahn's, where it was over ten."""
        wallets = [InMemoryWallet(self.site_fixture).enrol() for _ in range(MANY)]
        kept = [self.live(wallets[0])]
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            kept += [self.live(wallet) for wallet in wallets]
            gc.collect()
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        growth = [one for one in after.compare_to(before, "filename") if self._is_ours(one.traceback[0].filename)]
        self.assertLess(sum(one.size_diff for one in growth) / MANY, 3072)
        self.assertLess(sum(one.count_diff for one in growth) / MANY, 40)

    @staticmethod
    def _is_ours(path: str) -> bool:
        return any(part in path.replace("\\", "/") for part in OURS)

    def test_nothing_of_its_own(self) -> None:
        """What Autobahn keeps of a socket at rest is that of its class, also after fragments and control frames."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        own = vars(websocket_client.line.protocol)
        self.assertEqual(own, {})
        websocket_client.line.feed(
            encode_masked_frame(b"{", final=False) + encode_masked_frame(b"who", PING) + encode_masked_frame(b"}", 0)
        )
        self.assertEqual([opcode for opcode, _ in websocket_client.frames()], [PONG, 1])
        self.assertEqual(own, {})
        self.assertLess(sys.getsizeof(own), 100)

    def test_queues_are_made_when_needed(self) -> None:
        """An empty deque takes more than all the rest of a socket."""
        outbox = SendQueue(lambda frame: None)
        self.assertIsNone(outbox._queued)
        outbox.pauseProducing()
        outbox.offer(b"x")
        self.assertEqual(outbox.queued_bytes, 1)
        outbox.resumeProducing()
        self.assertIsNone(outbox._queued)

    def test_dids_are_kept_once(self) -> None:
        """The reader of a socket shares its DID with the tables, and needs no document."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        connections = self.site_fixture.base.connections
        ((session, reader),) = connections.subscribers(wallet.did)
        self.assertIs(session, websocket_client.line.protocol)
        self.assertIs(reader.name, next(iter(connections._live)))
        self.assertIs(reader.name, connections._dids.lookup(session)[0][0])
        self.assertFalse(hasattr(reader, "document"))
        self.assertEqual(reader.kid, wallet.identity.agreement.kid)


class TimerTests(CostsTestCase):
    def test_one_for_all(self) -> None:
        """Open sockets have no timers of their own."""
        self.site_fixture.websocket_client()
        before = len(self.site_fixture.clock.getDelayedCalls())
        visitors = [self.site_fixture.websocket_client() for _ in range(MANY)]
        self.assertEqual(len(self.site_fixture.clock.getDelayedCalls()), before)
        for websocket_client in visitors:
            websocket_client.line.hang_up()


class KeepaliveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = InMemoryReactor()
        self.keepalive = KeepaliveScheduler(self.clock, 30.0)

    def test_everybody_once_in_an_interval(self) -> None:
        """Whenever a socket was opened; the first time an interval after that."""
        hearts = [RecordingSocket(self.clock) for _ in range(70)]
        for socket_ in hearts:
            self.keepalive.add(socket_)
            socket_.opened = self.clock.seconds()
            self.clock.advance(1)
        self.clock.pump([1] * 200)
        for socket_ in hearts:
            first, *_ = socket_.beats
            self.assertTrue(29 <= first - socket_.opened <= 30)
            gaps = {after - before for before, after in zip(socket_.beats, socket_.beats[1:], strict=False)}
            self.assertEqual(gaps, {KEEPALIVE_SLOTS})

    def test_many_at_once_are_spread(self) -> None:
        """A thousand that came in the same moment do not hold up everybody else."""
        hearts = [RecordingSocket(self.clock) for _ in range(1000)]
        for socket_ in hearts:
            self.keepalive.add(socket_)
        turns: list[float] = []
        real = self.clock.callLater

        def call_later(delay: float, *rest: Any) -> Any:
            turns.append(delay)
            return real(delay, *rest)

        self.patch(self.clock, "callLater", call_later)
        self.clock.pump([1] * 30)
        self.assertEqual(turns.count(0), 9)
        self.assertEqual({len(socket_.beats) for socket_ in hearts}, {1})

    def test_one_that_fails(self) -> None:
        """The hearts of others go on, also of those that have their turn later."""

        def fail() -> None:
            raise ZeroDivisionError

        hearts = [RecordingSocket(self.clock) for _ in range(250)]
        for socket_ in hearts:
            self.keepalive.add(socket_)
        broken = next(iter(self.keepalive))
        self.patch(broken, "ping", fail)
        self.clock.pump([1] * 61)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)
        self.assertEqual({len(socket_.beats) for socket_ in hearts if socket_ is not broken}, {2})

    def test_no_timer_for_nobody(self) -> None:
        """Who has gone is not pinged, and removing it again does no harm."""
        socket_ = RecordingSocket(self.clock)
        self.keepalive.add(socket_)
        self.keepalive.remove(socket_)
        self.keepalive.remove(socket_)
        self.assertEqual((len(self.keepalive), self.clock.getDelayedCalls()), (0, []))


class RecordingSocket:
    """A socket that records its pings."""

    def __init__(self, clock: InMemoryReactor) -> None:
        self.keepalive_slot = 0
        self.opened = 0.0
        self.beats: list[float] = []
        self._clock = clock

    def ping(self) -> None:
        """Note it."""
        self.beats.append(self._clock.seconds())


class PushTests(CostsTestCase):
    def test_writes(self) -> None:
        """A push is one write, header and all."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        writes: list[bytes] = []
        real = websocket_client.line.write

        def write(data: bytes) -> None:
            writes.append(data)
            real(data)

        self.patch(websocket_client.line, "write", write)
        self.pushed(websocket_client, wallet)
        self.assertEqual(len(writes), 1)

    def test_marks(self) -> None:
        """A message that is acknowledged soon is never marked as delivered; others are, many in one go."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        marked: list[list[str]] = []
        store: Any = self.site_fixture.store
        real = store.mark_delivered
        live = self.site_fixture.didcomm.live

        def mark(ids: list[str], *, node: str) -> Any:
            marked.append(list(ids))
            return real(ids, node=node)

        self.patch(store, "mark_delivered", mark)
        quick = self.pushed(websocket_client, wallet)
        slow = [self.pushed(websocket_client, wallet), self.pushed(websocket_client, wallet)]
        websocket_client.send(wallet.pack(f"{MP}/messages-received", {"message_id_list": [quick]}))
        self.assertEqual(len(websocket_client.texts()), 1)
        self.assertEqual(marked, [])
        self.site_fixture.clock.advance(MARK_DELAY)
        self.assertEqual(marked, [slow])
        self.assertEqual(live._marks._waiting, {})

    def test_no_status_for_nobody(self) -> None:
        """Who wants no answer to an acknowledgement has none made: the store is asked nothing for it."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        asked: list[str] = []
        store: Any = self.site_fixture.store
        real = store.acknowledge_once

        def acknowledge(*args: Any, with_status: bool) -> Any:
            asked.extend(["status"] * with_status)
            return real(*args, with_status=with_status)

        self.patch(store, "acknowledge_once", acknowledge)
        for route in ("none", "all"):
            ids = {"message_id_list": [self.pushed(websocket_client, wallet)]}
            websocket_client.send(wallet.pack(f"{MP}/messages-received", ids, return_route=route))
            self.assertEqual(len(websocket_client.texts()), len(asked))
        self.assertEqual(asked, ["status"])
        self.assertEqual(wallet.waiting(), 0)

    def test_unmarked_pushes_that_came_to_nothing(self) -> None:
        """They are told of like others, and the store is not asked about what it was never told."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        self.pushed(websocket_client, wallet)
        websocket_client.line.hang_up()
        failed = [event for event in self.site_fixture.events("msg.push") if event["ok"] is False]
        self.assertEqual(len(failed), 1)
        self.assertEqual(wallet.waiting(), 1)

    def test_some_of_them_marked(self) -> None:
        """All are told of once; the store is asked about those alone that it knows to have been pushed."""
        wallet = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.live(wallet)
        pending: list[str] = []
        store: Any = self.site_fixture.store
        real = store.mark_pending

        def mark_pending(ids: list[str]) -> Any:
            pending.extend(ids)
            return real(ids)

        self.patch(store, "mark_pending", mark_pending)
        old = [self.pushed(websocket_client, wallet), self.pushed(websocket_client, wallet)]
        self.site_fixture.clock.advance(MARK_DELAY)
        self.pushed(websocket_client, wallet)
        websocket_client.line.hang_up()
        self.assertEqual(pending, old)
        failed = [event["msg"] for event in self.site_fixture.events("msg.push") if event["ok"] is False]
        self.assertEqual((len(failed), len(set(failed))), (3, 3))


class SendTests(SynchronousTestCase):
    """Writing to a TCP connection without the reactor."""

    def setUp(self) -> None:
        ours, self.theirs = socket.socketpair()
        for end in (ours, self.theirs):
            end.setblocking(False)
            self.addCleanup(end.close)
        self.reactor: Any = Watched()
        self.transport = Server(ours, Protocol(), ("127.0.0.1", 1), None, 0, self.reactor)  # type: ignore[arg-type]
        self.transport.connected = 1

    def test_the_kernel_takes_it_at_once(self) -> None:
        """On a plain TCP connection nothing is left for the reactor to write, and nothing to be asked of epoll."""
        write_immediately(self.transport, build_text_header(5) + b"hello")
        self.assertEqual(self.theirs.recv(100), b"\x81\x05hello")
        self.assertEqual(self.reactor.writers, 0)

    def test_order(self) -> None:
        """What the kernel does not take is kept, and what comes behind that waits behind it."""
        everything, got = b"", b""
        for number in range(40):
            piece = bytes([number]) * 100_000
            everything += piece
            write_immediately(self.transport, piece)
        self.assertGreater(self.reactor.writers, 0)
        while len(got) < len(everything):
            got += self.theirs.recv(1 << 20)
            self.transport.doWrite()
        self.assertEqual(got, everything)
        write_immediately(self.transport, b"behind")
        self.assertEqual(self.theirs.recv(100), b"behind")

    def test_producers(self) -> None:
        """Who has written more than the kernel and the transport hold is told so, and when there is room again."""
        producer = mock.Mock()
        self.transport.registerProducer(producer, True)
        write_immediately(self.transport, bytes(8_000_000))
        producer.pauseProducing.assert_called_once_with()
        got = 0
        while got < 8_000_000:
            got += len(self.theirs.recv(1 << 20))
            self.transport.doWrite()
        producer.resumeProducing.assert_called_once_with()

    def test_the_end(self) -> None:
        """Once our side is closed nothing goes out, and until then what was to go."""
        self.transport.loseWriteConnection()
        write_immediately(self.transport, b"late")
        self.transport.doWrite()
        self.assertEqual(self.theirs.recv(100), b"late")
        write_immediately(self.transport, b"too late")
        self.assertEqual(self.theirs.recv(100), b"")

    def test_aborted(self) -> None:
        """Nothing goes out, although the socket is closed only in the next turn."""
        self.transport.abortConnection()
        write_immediately(self.transport, b"too late")
        self.assertRaises(BlockingIOError, self.theirs.recv, 100)

    def test_the_peer_is_gone(self) -> None:
        """Left to the reactor to find, with what is to be written."""
        self.theirs.close()
        write_immediately(self.transport, b"hello")
        self.assertEqual(self.reactor.writers, 1)


class Watched(Clock):
    """As much of a reactor as a connection needs; counts how often it is asked to be told of room."""

    def __init__(self) -> None:
        super().__init__()
        self.writers = 0

    def removeReader(self, reader: object) -> None:  # noqa: N802
        """Nobody reads."""

    def removeWriter(self, writer: object) -> None:  # noqa: N802
        """Nobody writes any more."""

    def addReader(self, reader: object) -> None:  # noqa: N802
        """Nobody reads."""

    def addWriter(self, writer: object) -> None:  # noqa: N802
        """Count."""
        self.writers += 1
