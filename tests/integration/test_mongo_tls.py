"""TLS and authentication at MongoDB: what a URI asks for happens, or nothing is said at all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from twisted.internet import reactor as _reactor  # noqa: TID251  sockets are real
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.ssl import CertificateOptions
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from mediatord.store.mongo.driver.collection import MongoCommand, build_probe_read
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable, check_reply
from mediatord.store.mongo.driver.tls import describe_tls_failure, load_client_certificate
from mediatord.store.mongo.driver.uri import MongoConnectionSettings, parse_mongo_uri
from tests.certificate_authority import CertificateAuthority
from tests.replica_set import Credentials, ReplicaSet, TLSFiles

reactor: Any = _reactor

PATIENCE_SECONDS = 120.0
PING = MongoCommand({"ping": 1})
FIND = MongoCommand({"find": "things"})
# First byte of a TLS record with a handshake in it.
HANDSHAKE = b"\x16"


class RecordingListener(Protocol):
    """
    Hears what is said, says nothing.

    :param hang_up: end the connection then.
    """

    def __init__(self, heard: DeferredQueue[bytes], hang_up: bool) -> None:
        self._heard = heard
        self._hang_up = hang_up
        self._data = b""
        self._told = False

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        self._tell()

    def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008  Twisted's own default
        self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._heard.put(self._data)
            if self._hang_up and self.transport is not None:
                self.transport.loseConnection()


class MongoTLSTests(TestCase):
    """An authority, and whatever servers a test wants."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mediatord-test-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.authority = CertificateAuthority(self.directory)

    def address(
        self, port: int, *, host: str = "localhost", authority: CertificateAuthority | None = None
    ) -> MongoConnectionSettings:
        """Of a server that has to prove who it is to somebody with a password."""
        path = (authority or self.authority).path
        return parse_mongo_uri(f"mongodb://u:s3cret@{host}:{port}/m?tls=true&tlsCAFile={path}")

    def link(self, address: MongoConnectionSettings) -> PrimaryConnectionPool:
        """Connections that are given up when the test is over."""
        link = PrimaryConnectionPool(address, reactor, size=1)
        self.addCleanup(link.stop)
        link.start()
        return link

    async def ask(self, address: MongoConnectionSettings, request: MongoCommand) -> dict[str, Any]:
        """What the primary answers. :raise Refused: no."""
        (reply,) = await self.link(address).exchange([request], reactor.seconds() + PATIENCE_SECONDS)
        assert reply is not None
        return check_reply(reply)

    def listen(self, key: Path | None, *, hang_up: bool = False) -> tuple[int, DeferredQueue[bytes]]:
        """A server that only listens, with TLS if it has a key: its port, and what each connection hears first."""
        heard: DeferredQueue[bytes] = DeferredQueue()
        factory = Factory.forProtocol(lambda: RecordingListener(heard, hang_up))
        if key is None:
            port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        else:
            options = CertificateOptions(**load_client_certificate(str(key)))
            port = reactor.listenSSL(0, factory, options, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return port.getHost().port, heard

    def dial(self, host: str, port: int, protocol: type[Protocol], tls: Any) -> None:
        """Connect as txmongo does: a factory knows its connector."""
        factory: Any = ClientFactory()
        factory.protocol = protocol
        factory.noisy = False
        factory.connector = reactor.connectSSL(host, port, factory, tls)
        self.addCleanup(factory.connector.disconnect)

    async def heard_by(self, key: Path | None, **address: Any) -> bytes:
        """What a server with this key hears of us."""
        port, heard = self.listen(key)
        self.link(self.address(port, **address))
        return await heard.get().addTimeout(PATIENCE_SECONDS, reactor)

    async def test_a_server_that_proves_who_it_is_is_spoken_to(self) -> None:
        """By the name in the URI, or its address."""
        key = self.authority.issue("server", ["localhost", "127.0.0.1"])
        self.assertIn(b"ismaster", await self.heard_by(key))
        self.assertIn(b"ismaster", await self.heard_by(key, host="127.0.0.1"))

    async def test_another_host_hears_nothing(self) -> None:
        """A certificate of the same authority for another name, or for the name alone where the address was meant."""
        self.assertEqual(await self.heard_by(self.authority.issue("server", ["db.example"])), b"")
        self.assertEqual(await self.heard_by(self.authority.issue("other", ["localhost"]), host="127.0.0.1"), b"")

    async def test_an_expired_certificate_hears_nothing(self) -> None:
        """It was good until yesterday."""
        self.assertEqual(await self.heard_by(self.authority.issue("server", ["localhost"], expired=True)), b"")

    async def test_another_authority_hears_nothing(self) -> None:
        """Whatever name it is under; one that the system trusts would not do either."""
        other = CertificateAuthority(self.directory, "Other Authority")
        self.assertEqual(await self.heard_by(self.authority.issue("server", ["localhost"]), authority=other), b"")

    async def test_nothing_is_ever_said_in_the_clear(self) -> None:
        """A server without TLS hears the beginning of a handshake."""
        heard = await self.heard_by(None)
        self.assertEqual(heard[:1], HANDSHAKE)
        self.assertNotIn(b"ismaster", heard)
        self.assertNotIn(b"s3cret", heard)

    async def test_what_was_wrong_can_be_told(self) -> None:
        """Each in words of its own; a connection that just ends says nothing about TLS."""
        other = CertificateAuthority(self.directory, "Other Authority")
        await self.assert_fault(
            self.authority.issue("server", ["db.example"]), "its certificate is for another host name"
        )
        stale = "its certificate is not signed by a trusted authority, or has expired"
        await self.assert_fault(self.authority.issue("server", ["localhost"], expired=True), stale)
        await self.assert_fault(other.issue("server", ["localhost"]), stale)
        await self.assert_fault(self.authority.issue("server", ["localhost"]), None)

    async def test_what_was_wrong_is_told(self) -> None:
        """When there is nobody to ask, by what that failed with."""
        port, heard = self.listen(self.authority.issue("server", ["db.example"]))
        link = self.link(self.address(port))
        # The second attempt begins when the first is over.
        for _ in range(2):
            await heard.get().addTimeout(PATIENCE_SECONDS, reactor)
        with self.assertRaisesRegex(
            ServerUnreachable, "no connection to a primary: its certificate is for another host name"
        ):
            await link.exchange([build_probe_read()], reactor.seconds() + 0.5)

    async def assert_fault(self, key: Path, expected: str | None) -> None:
        """What a connection to a server with this key ends with."""
        port, heard = self.listen(key, hang_up=True)
        lost: Deferred[str | None] = Deferred()

        class Speaker(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"hello")

            def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008
                lost.callback(describe_tls_failure(reason))

        self.dial("localhost", port, Speaker, self.address(port).ssl_context_factory)
        await heard.get()
        self.assertEqual(await lost, expected)

    async def test_a_member_is_watched_by_its_address(self) -> None:
        """txmongo pings addresses; the certificate is for the name that led there, and there has to be one."""
        port, heard = self.listen(self.authority.issue("server", ["localhost"]))
        tls = self.address(port).ssl_context_factory
        self.greet("127.0.0.1", port, tls)
        self.assertEqual(await heard.get(), b"")
        for host in ("localhost", "127.0.0.1"):
            self.greet(host, port, tls)
            self.assertEqual(await heard.get(), b"hello")

    async def test_members_at_one_address(self) -> None:
        """Each is held to a name of its own, whichever was connected first."""
        servers = [self.listen(self.authority.issue(host, [host])) for host in ("localhost", "127.0.0.1")]
        tls = self.address(servers[0][0]).ssl_context_factory
        for host, (port, heard) in zip(("localhost", "127.0.0.1"), servers, strict=True):
            self.greet(host, port, tls)
            self.assertEqual(await heard.get().addTimeout(PATIENCE_SECONDS, reactor), b"hello")

    def greet(self, host: str, port: int, tls: Any) -> None:
        """Connect, say hello, and stay until the test is over."""
        gone: Deferred[None] = Deferred()

        class Speaker(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"hello")

            def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008
                gone.callback(None)

        self.addCleanup(lambda: gone)
        self.dial(host, port, Speaker, tls)

    async def test_passwords(self) -> None:
        """SCRAM-SHA-1 over TLS; without credentials, or with wrong ones, everything is refused."""
        key = self.authority.issue("server", ["localhost"], organisation="Servers")
        tls = TLSFiles(self.authority.path, key, host="localhost")
        with ReplicaSet(tls=tls, auth=Credentials("root", "r00t")) as servers:
            roles = [{"role": "readWrite", "db": "m"}]
            password = "s3:cr/et+é"
            servers.client["m"].command(
                "createUser", "u", pwd=password, roles=roles, mechanisms=["SCRAM-SHA-1", "SCRAM-SHA-256"]
            )
            good = servers.uri("m", credentials=f"u:{quote(password, safe='')}", authSource="")
            self.assertEqual((await self.ask(parse_mongo_uri(good), FIND))["ok"], 1.0)
            for bad in (good.replace("u:s3", "u:S3"), servers.uri("m", credentials="", authSource="")):
                with self.assertRaises(MongoCommandError) as caught:
                    await self.ask(parse_mongo_uri(bad), FIND)
                self.assertTrue(caught.exception.is_unauthorized)

    async def test_certificates(self) -> None:
        """X.509: the subject of our certificate is the user."""
        key = self.authority.issue("server", ["localhost"], organisation="Servers")
        tls = TLSFiles(self.authority.path, key, host="localhost")
        node, stranger = self.authority.issue("node"), self.authority.issue("stranger")
        with ReplicaSet(tls=tls, auth=Credentials("root", "r00t")) as servers:
            roles = [{"role": "readWrite", "db": "m"}]
            servers.client["$external"].command("createUser", "CN=node,O=Test", roles=roles)

            def uri(certificate: Path) -> str:
                options = {"tlsCertificateKeyFile": str(certificate), "authMechanism": "MONGODB-X509"}
                return servers.uri("m", credentials="", authSource="", **options)

            self.assertEqual((await self.ask(parse_mongo_uri(uri(node)), FIND))["ok"], 1.0)
            with self.assertRaises(MongoCommandError) as caught:
                await self.ask(parse_mongo_uri(uri(stranger)), FIND)
            self.assertTrue(caught.exception.is_unauthorized)
