"""Outgoing requests to real HTTP and HTTPS servers on loopback (reference 8.5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from OpenSSL import SSL
from twisted.internet import reactor as _reactor  # noqa: TID251  sockets, TLS and the platform's resolver are the subject
from twisted.internet.ssl import Certificate, PrivateCertificate
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.net.outbound_http import OutboundAddressError, OutboundHTTPClient, OutboundRequestError
from tests.net.outbound_test_case import FakeResolver

reactor: Any = _reactor
LOOPBACK = ip_network("127.0.0.0/8")
NAME = "wallet.example"
# Upper bound for a request, generous for busy machines.
PATIENCE_SECONDS = 60.0


class NamedReactor:
    """The real reactor with another name resolver."""

    def __init__(self, names: FakeResolver) -> None:
        self.nameResolver = names

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


class RecordingResource(Resource):
    """Answers by path, and records requests."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[bytes, bytes, bytes | None]] = []

    def render(self, request: Request) -> bytes | int:
        body = request.content.read() if request.content is not None else b""
        self.requests.append((request.method, request.uri, request.getHeader(b"cookie")))
        request.setHeader(b"content-type", b"application/did+json")
        request.setHeader(b"set-cookie", b"a=b")
        if request.path == b"/elsewhere":
            request.setResponseCode(302)
            request.setHeader(b"location", b"/document")
        if request.path == b"/moved":
            request.setResponseCode(307)
            request.setHeader(b"location", b"http://wallet.example:%d/document" % request.getHost().port)
        if request.path == b"/chunks":
            for _ in range(20):
                request.write(b"x" * 100)
            request.finish()
            return NOT_DONE_YET
        return body or b"{}"


def make_certificate(
    name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
) -> tuple[Any, Any]:
    """A certificate for a name or an address, valid for an hour, signed by its issuer or self-signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    authority, signer = (issuer[0].subject, issuer[1]) if issuer is not None else (subject, key)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return certificate, key


class HTTPSTests(TestCase):
    """GET over TLS."""

    def setUp(self) -> None:
        self.authority = make_certificate("authority.example", None)
        self.trust_root = Certificate.loadPEM(self.authority[0].public_bytes(serialization.Encoding.PEM))
        self.documents = RecordingResource()
        self.server_names: list[bytes | None] = []
        self.names = FakeResolver({NAME: ["127.0.0.1"], "other.example": ["127.0.0.1"]})
        self.outbound = self.make_client()

    def make_client(self, trust_root: Any = None) -> OutboundHTTPClient:
        """A client that may connect to loopback and trusts the test authority, or `trust_root`."""
        outbound = OutboundHTTPClient(
            NamedReactor(self.names), allow_private=[LOOPBACK], trust_root=trust_root or self.trust_root
        )
        self.addCleanup(outbound.close)
        return outbound

    def serve(self, name: str = NAME) -> int:
        """Serve the documents with a certificate for `name`; return the port."""
        certificate, key = make_certificate(name, self.authority)
        pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        options = PrivateCertificate.loadPEM(pem).options()
        options.getContext().set_tlsext_servername_callback(self.record_server_name)
        site = Site(self.documents, timeout=None)
        port = reactor.listenSSL(0, site, options, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        number: int = port.getHost().port
        return number

    def record_server_name(self, connection: SSL.Connection) -> None:
        """Record the server name of the TLS hello."""
        self.server_names.append(connection.get_servername())

    async def test_checks_certificate_by_name(self) -> None:
        """The name is checked and sent as SNI, although the connection goes to an address."""
        port = self.serve()
        response = await self.outbound.get(f"https://{NAME}:{port}/document", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(
            (response.status, response.content_type, response.body), (200, b"application/did+json", b"{}")
        )
        self.assertEqual(self.server_names, [NAME.encode()])

    async def test_sends_no_cookies(self) -> None:
        """A cookie of an earlier response is not sent."""
        port = self.serve()
        for _ in range(2):
            await self.outbound.get(f"https://{NAME}:{port}/document", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(self.documents.requests, [(b"GET", b"/document", None)] * 2)

    async def test_follows_no_redirect(self) -> None:
        """The redirect is returned as response."""
        port = self.serve()
        response = await self.outbound.get(f"https://{NAME}:{port}/elsewhere", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(response.status, 302)
        self.assertEqual([request[1] for request in self.documents.requests], [b"/elsewhere"])

    async def test_post_is_not_redirected_to_http(self) -> None:
        """A POST over TLS is not sent again without it."""
        port = self.serve()
        with self.assertRaises(OutboundAddressError):
            await self.outbound.post(
                f"https://{NAME}:{port}/moved", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS
            )
        self.assertEqual(self.names.asked, [NAME])

    async def test_response_size_is_limited(self) -> None:
        """With or without a length; a body of exactly the limit is accepted."""
        port = self.serve()
        for path, size in (("chunks", 2000), ("document", 2)):
            url = f"https://{NAME}:{port}/{path}"
            with self.assertRaises(OutboundRequestError) as caught:
                await self.outbound.get(url, limit=size - 1, timeout=PATIENCE_SECONDS)
            self.assertEqual(caught.exception.reason, "TooLong")
            self.assertEqual(len((await self.outbound.get(url, limit=size, timeout=PATIENCE_SECONDS)).body), size)

    async def test_accepts_certificate_for_address(self) -> None:
        """A host that is an address needs a certificate for that address."""
        port = self.serve("127.0.0.1")
        self.names.known = {"127.0.0.1": ["127.0.0.1"]}
        response = await self.outbound.get(f"https://127.0.0.1:{port}/document", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(response.status, 200)

    async def test_refuses_certificate_for_another_name(self) -> None:
        """Nothing is requested."""
        port = self.serve("other.example")
        with self.assertRaises(OutboundRequestError):
            await self.outbound.get(f"https://{NAME}:{port}/document", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(self.documents.requests, [])

    async def test_refuses_certificate_of_another_authority(self) -> None:
        """Nothing is requested."""
        port = self.serve()
        other_authority = make_certificate("stranger.example", None)[0].public_bytes(serialization.Encoding.PEM)
        outbound = self.make_client(Certificate.loadPEM(other_authority))
        with self.assertRaises(OutboundRequestError):
            await outbound.get(f"https://{NAME}:{port}/document", limit=1000, timeout=PATIENCE_SECONDS)
        self.assertEqual(self.documents.requests, [])


class LoopbackSpellingTests(TestCase):
    """Hosts that denote loopback, in every spelling that the system resolver accepts."""

    def setUp(self) -> None:
        self.documents = RecordingResource()
        port = reactor.listenTCP(0, Site(self.documents, timeout=None), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        self.port: int = port.getHost().port

    def make_client(self, *allowed: Any) -> OutboundHTTPClient:
        """A client on the real reactor, with the system resolver."""
        outbound = OutboundHTTPClient(reactor, allow_private=allowed)
        self.addCleanup(outbound.close)
        return outbound

    async def test_refuses_every_spelling(self) -> None:
        """The resolved address counts (8.5)."""
        outbound = self.make_client()
        for host in (
            "127.0.0.1",
            "127.1",
            "2130706433",
            "017700000001",
            "0x7f000001",
            "0177.0.0.1",
            "0x7f.0.0.1",
            "0",
            "0.0.0.0",
            "localhost",
            "LOCALHOST",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[0:0:0:0:0:0:0:1]",
            "[64:ff9b::7f00:1]",
            "[2002:7f00:1::]",
            "169.254.169.254",
            "[fd00:ec2::254]",
        ):
            with self.assertRaises(OutboundAddressError, msg=host):
                await outbound.post(f"http://{host}:{self.port}/", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
        self.assertEqual(self.documents.requests, [])

    async def test_spellings_reach_loopback_if_allowed(self) -> None:
        """So the address guard refuses them otherwise."""
        outbound = self.make_client(LOOPBACK, ip_network("::1"))
        hosts = ("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::ffff:127.0.0.1]")
        for host in hosts:
            response = await outbound.post(
                f"http://{host}:{self.port}/", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS
            )
            self.assertEqual((response.status, response.body), (200, b"sealed"))
        self.assertEqual(len(self.documents.requests), len(hosts))

    async def test_refused_connection_is_a_failure(self) -> None:
        """No process listens on the port."""
        port = reactor.listenTCP(0, Site(self.documents), interface="127.0.0.1")
        number = port.getHost().port
        await port.stopListening()
        outbound = self.make_client(LOOPBACK)
        with self.assertRaises(OutboundRequestError):
            await outbound.post(f"http://127.0.0.1:{number}/", b"sealed", b"text/plain", timeout=PATIENCE_SECONDS)
