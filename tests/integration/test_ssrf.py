"""A real server on loopback that no place of the corpus has the mediator connect to (reference 8.5)."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets are the subject
from twisted.internet.defer import succeed
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from mediatord.errors import MediatorError
from mediatord.net.did_resolver import DIDResolver, DIDWebResolver
from mediatord.net.outbound_http import OutboundError, OutboundHTTPClient
from tests.integration.test_outbound import PATIENCE_SECONDS, NamedReactor
from tests.net.ssrf_corpus import PLACES, ScriptedResolver, SSRFTarget
from tests.net.test_ssrf import did_web_of

reactor: Any = _reactor
ELSEWHERE = "127.0.0.2"
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1"), ip_network("0.0.0.0/32"), ip_network("::/128"))


class CountingFactory(Factory[Protocol]):
    """Counts who comes, and answers like a server that takes everything, or that sends elsewhere."""

    noisy = False

    def __init__(self, location: str | None = None) -> None:
        self.visits = 0
        self.open: set[Protocol] = set()
        head = "200 OK" if location is None else f"307 There\r\nLocation: {location}"
        self.answer = f"HTTP/1.1 {head}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    def buildProtocol(self, addr: Any) -> Protocol:
        self.visits += 1
        return _Visit(self)


class _Visit(Protocol):
    def __init__(self, visited: CountingFactory) -> None:
        self._visited = visited

    def connectionMade(self) -> None:
        self._visited.open.add(self)

    def dataReceived(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(self._visited.answer)
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._visited.open.discard(self)


async def _free(peer: str) -> int:
    return 0


class LoopbackTests(TestCase):
    def setUp(self) -> None:
        self.server = CountingFactory()
        self.port = self.serve(self.server)

    def serve(self, server: CountingFactory, interface: str = "127.0.0.1", port: int = 0) -> int:
        """Have it listen; its port."""
        listening = reactor.listenTCP(port, server, interface=interface)
        self.addCleanup(listening.stopListening)
        number: int = listening.getHost().port
        return number

    def an_outbound(self, *allowed: Any, names: ScriptedResolver | None = None) -> OutboundHTTPClient:
        """The real way out, on the real reactor with the names of the corpus."""
        outbound = OutboundHTTPClient(NamedReactor(names or ScriptedResolver()), allow_private=allowed)
        self.addCleanup(outbound.close)
        return outbound

    async def reaches(self, outbound: OutboundHTTPClient, place: SSRFTarget) -> bool:
        """Whether a POST to a place arrives at the server."""
        before = self.server.visits
        try:
            await outbound.post(
                f"http://{place.host}:{self.port}/inbox", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS
            )
        except OutboundError:
            return self.server.visits > before
        return True

    async def test_endpoints(self) -> None:
        """No POST reaches it, whatever the endpoint is."""
        outbound = self.an_outbound()
        self.assertEqual([place.host for place in PLACES if await self.reaches(outbound, place)], [])

    async def test_documents(self) -> None:
        """No did:web reaches it, whatever its host is."""
        outbound = self.an_outbound()
        web = DIDWebResolver(reactor, outbound.get, _free)
        resolver = DIDResolver(web, lambda short, long: succeed(None), lambda short: succeed(None))
        for place in PLACES:
            with self.assertRaises(MediatorError, msg=place.host):
                await resolver.resolve(did_web_of(place.host, self.port), "198.51.100.7")
        self.assertEqual(self.server.visits, 0)

    async def test_redirects(self) -> None:
        """Nor does a redirect of a server that may be connected to."""
        outbound = self.an_outbound(ip_network(f"{ELSEWHERE}/32"))
        for place in (place for place in PLACES if place.means == "127.0.0.1"):
            sender = CountingFactory(f"http://{place.host}:{self.port}/inside")
            port = self.serve(sender, ELSEWHERE)
            with self.assertRaises(OutboundError, msg=place.host):
                await outbound.post(f"http://{ELSEWHERE}:{port}/", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
            self.assertEqual(sender.visits, 1)
        self.assertEqual(self.server.visits, 0)

    async def test_rebinding(self) -> None:
        """A name that resolves to what may be connected to, and then to this: the second answer is never gone by."""
        allowed = CountingFactory()
        self.serve(allowed, ELSEWHERE, self.port)
        names = ScriptedResolver({"rebinding.example": [[ELSEWHERE], ["127.0.0.1"]]})
        outbound = self.an_outbound(ip_network(f"{ELSEWHERE}/32"), names=names)
        url = f"http://rebinding.example:{self.port}/"
        await outbound.post(url, b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
        self.assertEqual(names.asked, ["rebinding.example"])
        with self.assertRaises(OutboundError):
            await outbound.post(url, b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
        self.assertEqual((allowed.visits, self.server.visits), (1, 0))

    async def test_they_would_reach_it(self) -> None:
        """With loopback allowed each place that means 127.0.0.1 does reach it: it is the guard that stops them."""
        outbound = self.an_outbound(*LOOPBACK)
        missing = [
            place.host
            for place in PLACES
            if place.means in ("127.0.0.1", "::ffff:127.0.0.1") and not await self.reaches(outbound, place)
        ]
        self.assertEqual(missing, [])
