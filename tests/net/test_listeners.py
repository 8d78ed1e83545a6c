"""TLS and the PROXY protocol on listeners: limits, handshakes, cipher suites."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from OpenSSL import SSL
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_connection import MAX_UNAUTHENTICATED_PER_ADDRESS, PeerServer, derive_cluster_keys
from mediatord.net.listeners import TLS_HANDSHAKE_TIMEOUT, Listener, find_self_signed_certificate
from tests.admin.in_memory_admin_site import InMemoryAdminSite
from tests.certificate_authority import CertificateAuthority
from tests.http.fake_protocols import FakeDecentrl
from tests.http.in_memory_site import InMemorySite, encode_masked_frame, encode_request
from tests.in_memory_mediator import PEER

OPENING = encode_request(
    "GET",
    "/ws",
    None,
    {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    },
)


def test_self_signed_certificate_of_the_public_url(tmp_path: Path) -> None:
    """Found at the port of the public URL only, and only if no authority signed it."""
    authority = CertificateAuthority(tmp_path)
    issued, own = authority.issue("localhost", ["localhost"]), authority.path

    def endpoint(port: int, certificate: Path) -> str:
        return f"ssl:{port}:interface=127.0.0.1:privateKey={issued}:certKey={certificate}"

    listen = ("tcp:8080", endpoint(8443, issued), endpoint(8444, own), endpoint(8445, tmp_path / "gone"))
    assert find_self_signed_certificate("https://localhost:8444", listen) == own
    for url in ("https://localhost:8443", "https://localhost:8445", "https://localhost", "http://localhost:8444"):
        assert find_self_signed_certificate(url, listen) is None


class LimitedFactory(Factory):
    """
    Accepts one connection.

    :ivar received: the received data.
    """

    noisy = False

    def __init__(self) -> None:
        self.received = b""
        self.is_full = False

    def buildProtocol(self, addr: Any) -> Protocol | None:
        if self.is_full:
            return None
        self.is_full = True
        protocol = Protocol()
        protocol.dataReceived = self.receive  # type: ignore[method-assign]
        return protocol

    def receive(self, data: bytes) -> None:
        """Record the data."""
        self.received += data


class TCPTransport(StringTransport):
    """The transport below the layers."""

    def setTcpNoDelay(self, enabled: bool) -> None:  # noqa: N802  Twisted's name
        """Ignore."""


class TLSClient:
    """A client's side of TLS, in memory."""

    def __init__(self, ciphers: bytes | None = None, latest: int = SSL.TLS1_3_VERSION) -> None:
        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(SSL.TLS1_VERSION)
        context.set_max_proto_version(latest)
        if ciphers is not None:
            context.set_cipher_list(ciphers)
        self.connection = SSL.Connection(context)
        self.connection.set_connect_state()

    def shake_hands(self, protocol: Any, transport: StringTransport) -> bool:
        """Return whether the handshake succeeds."""
        is_done = False
        for _ in range(4):
            try:
                self.connection.do_handshake()
                is_done = True
            except SSL.WantReadError:
                pass
            except SSL.Error:
                return False
            with contextlib.suppress(SSL.WantReadError):
                protocol.dataReceived(self.connection.bio_read(1 << 16))
            if transport.value():
                self.connection.bio_write(transport.value())
            transport.clear()
        return is_done


class ListenerLayerTests(SynchronousTestCase):
    """Listeners on an in-memory reactor."""

    def setUp(self) -> None:
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.authority = CertificateAuthority(directory)
        both = self.authority.issue("here", ["127.0.0.1"])
        self.tls = f"ssl:8443:privateKey={both}:certKey={both}"
        self.reactor: Any = MemoryReactorClock()
        self.address = IPv4Address("TCP", PEER, 50_000)

    def listen(self, endpoint: str, factory: Any) -> Any:
        """Return the factory of a listener's port."""
        Listener(endpoint, factory, self.reactor).privilegedStartService()
        return self.reactor.tcpServers[-1][1]

    def connect(self, factory: Any) -> tuple[Any, StringTransport]:
        """Open a connection that the factory accepts."""
        transport = TCPTransport(peerAddress=self.address)
        protocol = factory.buildProtocol(self.address)
        protocol.makeConnection(transport)
        return protocol, transport

    def test_refusal_reaches_port(self) -> None:
        """A connection that the inner factory refuses is refused by all layers, so that the port closes it."""
        for endpoint in ("tcp:8080", self.tls, "haproxy:tcp:8080", f"haproxy:{self.tls}"):
            inner = LimitedFactory()
            outer = self.listen(endpoint, inner)
            with self.subTest(endpoint):
                self.assertIsNotNone(outer.buildProtocol(self.address))
                self.assertIsNone(outer.buildProtocol(self.address))

    def peer_server(self) -> PeerServer:
        """The listener for peers."""
        keys = derive_cluster_keys(b"s" * 32)
        return PeerServer(self.reactor, keys, "bbbb", lambda body: self.fail("nobody asks"), lambda reason: None)

    def test_connection_limits_behind_tls(self) -> None:
        """Limits of the public, admin and peer listeners hold behind TLS; pending handshakes count."""
        nodes = self.peer_server()
        site_fixture = InMemorySite(self, limits={"max_connections_per_ip": 1})
        for site, limit in (
            (site_fixture.site, 4),
            (InMemoryAdminSite(self).site, 64),
            (nodes, MAX_UNAUTHENTICATED_PER_ADDRESS),
        ):
            outer = self.listen(self.tls, site)
            connections = [self.connect(outer) for _ in range(limit)]
            if site is not nodes:  # where the oldest silent connection is evicted
                self.assertIsNone(outer.buildProtocol(self.address))
            for protocol, _ in connections:
                protocol.connectionLost()
            self.assertIsNotNone(outer.buildProtocol(self.address))

    def test_peer_listener_at_its_limit(self) -> None:
        """The peer listener refuses behind TLS too, if no connection can be evicted."""
        site = self.peer_server()
        outer = self.listen(self.tls, site)
        for _ in range(MAX_UNAUTHENTICATED_PER_ADDRESS):
            protocol, _ = self.connect(outer)
            protocol.wrappedProtocol._serving = Deferred()
        self.assertIsNone(outer.buildProtocol(self.address))

    def test_proxy_header(self) -> None:
        """A listener behind HAProxy reads the first line, and passes on what follows."""
        inner = LimitedFactory()
        protocol, _ = self.connect(self.listen("haproxy:tcp:8080", inner))
        protocol.dataReceived(b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\nrest")
        self.assertEqual((inner.received, protocol.getPeer().host), (b"rest", "192.0.2.1"))

    def test_unfinished_handshake_times_out(self) -> None:
        """It is aborted after its time, also if the client keeps sending."""
        outer = self.listen(self.tls, LimitedFactory())
        protocol, transport = self.connect(outer)
        protocol.dataReceived(b"\x16\x03\x01")
        self.reactor.advance(TLS_HANDSHAKE_TIMEOUT - 1)
        protocol.dataReceived(b"\x02")
        self.assertFalse(transport.disconnected)
        self.reactor.advance(1)
        self.assertTrue(transport.disconnected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_finished_handshake(self) -> None:
        """The connection stays, and leaves no timer."""
        inner = LimitedFactory()
        protocol, transport = self.connect(self.listen(self.tls, inner))
        client = TLSClient()
        self.assertTrue(client.shake_hands(protocol, transport))
        self.reactor.advance(TLS_HANDSHAKE_TIMEOUT)
        self.assertFalse(transport.disconnected)
        client.connection.send(b"hello")
        protocol.dataReceived(client.connection.bio_read(1 << 16))
        self.assertEqual(inner.received, b"hello")

    def test_client_disconnects_before_handshake(self) -> None:
        """No timer remains."""
        protocol, _ = self.connect(self.listen(self.tls, LimitedFactory()))
        protocol.connectionLost()
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_frames_behind_upgrade(self) -> None:
        """A WebSocket gets frames in the TLS record of its upgrade, also behind a PROXY header within TLS."""
        for before, header in (("", b""), ("haproxy:", b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n")):
            decentrl = FakeDecentrl()
            site_fixture = InMemorySite(self, fake_decentrl=decentrl)
            protocol, transport = self.connect(self.listen(before + self.tls, site_fixture.site))
            client = TLSClient()
            self.assertTrue(client.shake_hands(protocol, transport))
            client.connection.send(header + OPENING + encode_masked_frame(b"first") + encode_masked_frame(b"second"))
            protocol.dataReceived(client.connection.bio_read(1 << 16))
            client.connection.send(encode_masked_frame(b"third"))
            protocol.dataReceived(client.connection.bio_read(1 << 16))
            (socket,) = decentrl.sockets
            self.assertEqual(socket.calls, ["begin", *((item, False) for item in (b"first", b"second", b"third"))])

    def test_cipher_suites(self) -> None:
        """Suites without forward secrecy or authenticated encryption are refused, and TLS before 1.2."""
        by_rsa = self.authority.issue("rsa", ["127.0.0.1"], with_rsa=True)
        for name, is_accepted in {
            "ECDHE-ECDSA-AES128-GCM-SHA256": True,
            "ECDHE-ECDSA-CHACHA20-POLY1305": True,
            "ECDHE-ECDSA-AES256-SHA384": False,
            "ECDHE-RSA-AES256-GCM-SHA384": True,
            "ECDHE-RSA-AES128-SHA": False,
            "AES128-SHA": False,
            "AES256-GCM-SHA384": False,
        }.items():
            with self.subTest(name):
                self.assertIs(self.is_accepted(name.encode(), by_rsa if "ECDSA" not in name else None), is_accepted)
        self.assertTrue(self.is_accepted(None, latest=SSL.TLS1_3_VERSION))
        self.assertFalse(self.is_accepted(b"ALL:@SECLEVEL=0", by_rsa, latest=SSL.TLS1_1_VERSION))

    def is_accepted(
        self, ciphers: bytes | None, key: Path | None = None, *, latest: int = SSL.TLS1_2_VERSION
    ) -> bool:
        """Whether a client that offers these gets a connection."""
        endpoint = self.tls if key is None else f"ssl:8443:privateKey={key}:certKey={key}"
        protocol, transport = self.connect(self.listen(endpoint, LimitedFactory()))
        return TLSClient(ciphers, latest).shake_hands(protocol, transport)
