"""Attacks on a daemon by DIDComm v1: replays after a restart, and endpoints that lead astray."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  a daemon is spoken to over real sockets
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from mediatord.didcomm.endpoint_delivery import MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.wallet.didcomm_v1_client import V1Wallet, fetch_v1_invitation
from mediatord.wallet.didcomm_v1_messages import V1Handshake, V1Mediator, generate_key
from tests.integration.daemon import PLENTY
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon
from tests.integration.test_canary import SECRET, find_text
from tests.integration.test_didcomm_v1_wallet import V1DaemonTestCase
from tests.observability.counter_oracle import read_segments

reactor: Any = _reactor

# The only address on loopback to which the daemon may connect.
ALLOWED = "127.0.0.2"
# Endless bodies are cut off long before that.
FAR_TOO_MUCH = 50_000_000


class ReplayTests(V1DaemonTestCase):
    """Messages that somebody has recorded, sent again from a socket of somebody else."""

    async def record(self, wallet: V1Wallet, key: SigningKey) -> dict[str, bytes]:
        """Have messages of every kind served once; the envelopes."""
        recorded = {}
        entry = {"recipient_key": key.did_key}
        for type_, members in (
            ("coordinate-mediation/1.0/keylist-update", {"updates": [{**entry, "action": "remove"}]}),
            ("messagepickup/2.0/live-delivery-change", {"live_delivery": True}),
            ("messagepickup/1.0/batch-pickup", {"batch_size": 10}),
            ("trust_ping/1.0/ping", {"response_requested": False}),
        ):
            _, recorded[type_] = wallet.pack(type_, members)
            response = await wallet.post(recorded[type_])
            self.assertIn(response.status, (200, 202), type_)
        self.assertEqual(await wallet.register(key.did_key), ["success"])
        return recorded

    async def test_after_restart(self) -> None:
        """
        Nothing is removed, changed, or pushed to the stranger, neither at once nor after a restart: all that comes is
        a refusal, which the owner alone can read.
        """
        wallet, key = await self.enrol()
        stranger, _ = await self.enrol()
        recorded = await self.record(wallet, key)
        for restarts in (False, True):
            if restarts:
                self.daemon.restart()
            socket = await self.open_socket(stranger)
            for envelope in recorded.values():
                socket.send_frame(envelope)
            await wallet.send(key.did_key, "for the owner alone")
            # Frames are served in their order, so all of the others were.
            await socket.ping()
            answers = [wallet.from_mediator(frame.payload).message for frame in socket.pushed.pending]
            self.assertEqual([answer.type.name for answer in answers], len(recorded) * ["problem-report"])
            self.assertEqual(await wallet.registered(), [key.did_key])
        self.assertEqual(await wallet.count(), 2)
        texts = [wallet.open(one).text for one in await wallet.fetch()]
        self.assertEqual(texts, 2 * ["for the owner alone"])

    async def test_former_request_to_connect(self) -> None:
        """A replayed request brings back no former endpoint, and a replayed hangup removes no later account."""
        invitation, key = await fetch_v1_invitation(self.http, self.daemon.url), generate_key()
        wallet = await V1Wallet.connect(invitation, self.http, reactor, key=key)
        await wallet.enrol()
        _, hangup = wallet.pack("did-rotate/1.0/hangup")
        self.assertEqual((await wallet.post(hangup)).status, 202)
        former = V1Handshake(invitation, key, endpoint="https://former.example/")
        connected = wallet.mediator
        wallet.mediator = V1Mediator("", invitation.key, invitation.endpoint, None)
        request = wallet.encrypt(former.make_request())
        self.assertEqual((await wallet.post(request)).status, 200)
        wallet = await V1Wallet.connect(invitation, self.http, reactor, key=key)
        self.assertEqual(wallet.mediator.key, connected.key)
        await wallet.enrol()
        self.daemon.restart()
        for envelope in (hangup, request):
            await wallet.post(envelope)
        # With an endpoint, the answer would be posted there.
        _, asked = wallet.pack("coordinate-mediation/1.0/keylist-query", return_route=None)
        response = await wallet.post(asked)
        self.assertEqual((response.status, wallet.from_mediator(response.body).message.type.name), (200, "keylist"))


class HostileServer(Factory[Protocol]):
    """
    Counts connections, and answers with a body without end, or not at all.

    :ivar requested: gets the local address of each connection.
    :ivar closed: gets the number of bytes that were written until a connection was closed.
    """

    noisy = False

    def __init__(self, *, floods: bool = False) -> None:
        self.floods = floods
        self.requested: DeferredQueue[str] = DeferredQueue()
        self.closed: DeferredQueue[int] = DeferredQueue()
        self.open: set[_HostileConnection] = set()
        self.most_open = 0
        self._emptied: list[Deferred[None]] = []

    def close(self) -> Deferred[None]:
        """Abort all connections; fires when they are closed."""
        emptied: Deferred[None] = Deferred()
        self._emptied.append(emptied)
        for connection in tuple(self.open):
            connection.transport.abortConnection()  # type: ignore[union-attr]
        self.note_closed()
        return emptied

    def note_closed(self) -> None:
        """A connection was closed."""
        while self._emptied and not self.open:
            self._emptied.pop().callback(None)

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return _HostileConnection(self)


class _HostileConnection(Protocol):
    def __init__(self, server: HostileServer) -> None:
        self._server = server
        self._written = 0

    def connectionMade(self) -> None:
        self._server.open.add(self)
        self._server.most_open = max(self._server.most_open, len(self._server.open))
        self._server.requested.put(self.transport.getHost().host)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if self._server.floods and not self._written:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")  # type: ignore[union-attr]
            self.transport.registerProducer(self, False)  # type: ignore[union-attr]

    def resumeProducing(self) -> None:
        self._written += 65_536
        self.transport.write(bytes(65_536))  # type: ignore[union-attr]

    def stopProducing(self) -> None:
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._server.open.discard(self)
        self._server.closed.put(self._written)
        self._server.note_closed()


class EndpointTests(V1DaemonTestCase):
    """Endpoints of wallets; the daemon may connect to one address on loopback."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = prepare_daemon({**PLENTY, "outbound": {"allow_private": [f"{ALLOWED}/32"]}})
        cls.daemon.__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)

    def listen(self, server: HostileServer) -> int:
        """Listen on all addresses; the port."""
        port = reactor.listenTCP(0, server)
        self.addCleanup(server.close)
        self.addCleanup(port.stopListening)
        number: int = port.getHost().port
        return number

    async def connect_with_endpoint(self, endpoint: str) -> tuple[V1Wallet, SigningKey]:
        """A wallet with this endpoint, whose answers come on the connection."""
        return await self.enrol(endpoint=endpoint, label=SECRET)

    async def provoke(self, wallet: V1Wallet, key: SigningKey, number: int = 1) -> None:
        """Have a reply and some messages posted."""
        _, ping = wallet.pack("trust_ping/1.0/ping", {"response_requested": True}, return_route=None)
        self.assertIn((await wallet.post(ping)).status, (200, 202))
        for one in range(number):
            await wallet.send(key.did_key, f"{SECRET} {one}")

    async def test_private_addresses(self) -> None:
        """No reply and no message gets to loopback, under whatever name, or to the mediator's own ports."""
        server = HostileServer()
        port = self.listen(server)
        for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "127.1", "2130706433", "[::ffff:127.0.0.1]"):
            await self.provoke(*await self.connect_with_endpoint(f"http://{host}:{port}/"))
        for own in (self.daemon.url, f"{self.daemon.url}/didcomm?a", f"http://127.0.0.1:{self.daemon.port}/admin"):
            await self.provoke(*await self.connect_with_endpoint(own))
        # An address that is allowed is reached, and is the only one.
        await self.provoke(*await self.connect_with_endpoint(f"http://{ALLOWED}:{port}/"))
        reached = [await self.next_of(server.requested) for _ in range(2)]
        self.assertEqual(reached, [ALLOWED, ALLOWED])
        self.assertEqual(server.requested.pending, [])

    async def test_silent_endpoint(self) -> None:
        """An endpoint that never answers holds few connections, and no other wallet's mail."""
        server = HostileServer()
        wallet, key = await self.connect_with_endpoint(f"http://{ALLOWED}:{self.listen(server)}/")
        await self.provoke(wallet, key, 20)
        for _ in range(MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT + 1):
            await self.next_of(server.requested)
        other, other_key = await self.enrol()
        await other.send(other_key.did_key, "hello")
        self.assertEqual([other.open(one).text for one in await other.fetch()], ["hello"])
        self.assertLessEqual(server.most_open, MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT + 1)
        self.assertEqual(await wallet.count(), 20)

    async def test_endless_answer(self) -> None:
        """A gigabyte in answer to a POST is not read."""
        server = HostileServer(floods=True)
        wallet, key = await self.connect_with_endpoint(f"http://{ALLOWED}:{self.listen(server)}/")
        await self.provoke(wallet, key)
        for _ in range(2):
            self.assertLess(await self.next_of(server.closed), FAR_TOO_MUCH)

    async def test_nothing_is_told(self) -> None:
        """Neither labels, nor endpoints, nor messages are in logs, metrics or output."""
        wallet, key = await self.connect_with_endpoint(f"http://{ALLOWED}:1/{SECRET}")
        await self.provoke(wallet, key)
        metrics = await (await self.http.get(f"{self.daemon.url}/metrics")).content()
        places = {name: b"".join(lines) for name, lines in read_segments(self.daemon.log_directory).items()}
        places |= {"metrics": metrics, "output": self.daemon.output().encode()}
        self.assertIn(b"mediator_messages_forwarded_total", metrics)
        self.assertEqual(find_text(SECRET, places), [])

    async def next_of(self, queue: DeferredQueue[Any]) -> Any:
        """The next item."""
        waiting: Deferred[Any] = queue.get()
        return await waiting.addTimeout(PATIENCE_SECONDS, reactor)
