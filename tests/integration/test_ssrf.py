"""No target of the SSRF corpus makes the mediator connect to a real server on loopback (reference 8.5)."""

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
OTHER_ADDRESS = "127.0.0.2"
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1"), ip_network("0.0.0.0/32"), ip_network("::/128"))


class CountingFactory(Factory[Protocol]):
    """Counts connections, and answers 202 or with a redirect."""

    noisy = False

    def __init__(self, location: str | None = None) -> None:
        self.connection_count = 0
        self.open: set[Protocol] = set()
        head = "200 OK" if location is None else f"307 There\r\nLocation: {location}"
        self.answer = f"HTTP/1.1 {head}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    def buildProtocol(self, addr: Any) -> Protocol:
        self.connection_count += 1
        return _ConnectionCounter(self)


class _ConnectionCounter(Protocol):
    def __init__(self, visited: CountingFactory) -> None:
        self._counting_factory = visited

    def connectionMade(self) -> None:
        self._counting_factory.open.add(self)

    def dataReceived(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(self._counting_factory.answer)
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._counting_factory.open.discard(self)


async def _free(peer: str) -> int:
    return 0


class LoopbackTests(TestCase):
    def setUp(self) -> None:
        self.server = CountingFactory()
        self.port = self.listen(self.server)

    def listen(self, server: CountingFactory, interface: str = "127.0.0.1", port: int = 0) -> int:
        """Listen with this server; return the port."""
        port_object = reactor.listenTCP(port, server, interface=interface)
        self.addCleanup(port_object.stopListening)
        number: int = port_object.getHost().port
        return number

    def make_client(self, *allowed: Any, names: ScriptedResolver | None = None) -> OutboundHTTPClient:
        """The real HTTP client on the real reactor, with the names of the corpus."""
        outbound = OutboundHTTPClient(NamedReactor(names or ScriptedResolver()), allow_private=allowed)
        self.addCleanup(outbound.close)
        return outbound

    async def reaches(self, outbound: OutboundHTTPClient, target: SSRFTarget) -> bool:
        """Whether a POST to a target arrives at the server."""
        before = self.server.connection_count
        try:
            await outbound.post(
                f"http://{target.host}:{self.port}/inbox", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS
            )
        except OutboundError:
            return self.server.connection_count > before
        return True

    async def test_no_endpoint_reaches_loopback(self) -> None:
        """No POST, whatever the endpoint."""
        outbound = self.make_client()
        self.assertEqual([target.host for target in PLACES if await self.reaches(outbound, target)], [])

    async def test_no_did_web_reaches_loopback(self) -> None:
        """No resolution, whatever the host."""
        outbound = self.make_client()
        web = DIDWebResolver(reactor, outbound.get, _free)
        resolver = DIDResolver(web, lambda short, long: succeed(None), lambda short: succeed(None))
        for target in PLACES:
            with self.assertRaises(MediatorError, msg=target.host):
                await resolver.resolve(did_web_of(target.host, self.port), "198.51.100.7")
        self.assertEqual(self.server.connection_count, 0)

    async def test_no_redirect_reaches_loopback(self) -> None:
        """Redirects of a permitted server."""
        outbound = self.make_client(ip_network(f"{OTHER_ADDRESS}/32"))
        for target in (target for target in PLACES if target.means == "127.0.0.1"):
            sender = CountingFactory(f"http://{target.host}:{self.port}/inside")
            port = self.listen(sender, OTHER_ADDRESS)
            with self.assertRaises(OutboundError, msg=target.host):
                await outbound.post(
                    f"http://{OTHER_ADDRESS}:{port}/", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS
                )
            self.assertEqual(sender.connection_count, 1)
        self.assertEqual(self.server.connection_count, 0)

    async def test_dns_rebinding_does_not_reach_loopback(self) -> None:
        """A name that resolves to a permitted address first: the second answer is never used."""
        allowed = CountingFactory()
        self.listen(allowed, OTHER_ADDRESS, self.port)
        names = ScriptedResolver({"rebinding.example": [[OTHER_ADDRESS], ["127.0.0.1"]]})
        outbound = self.make_client(ip_network(f"{OTHER_ADDRESS}/32"), names=names)
        url = f"http://rebinding.example:{self.port}/"
        await outbound.post(url, b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
        self.assertEqual(names.asked, ["rebinding.example"])
        with self.assertRaises(OutboundError):
            await outbound.post(url, b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
        self.assertEqual((allowed.connection_count, self.server.connection_count), (1, 0))

    async def test_targets_reach_loopback_if_allowed(self) -> None:
        """So the address guard stops them otherwise."""
        outbound = self.make_client(*LOOPBACK)
        missing = [
            target.host
            for target in PLACES
            if target.means in ("127.0.0.1", "::ffff:127.0.0.1") and not await self.reaches(outbound, target)
        ]
        self.assertEqual(missing, [])
