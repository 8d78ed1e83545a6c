"""
TLS and authentication with MongoDB: the daemon sends nothing to a server that does not meet the URI's requirements.
"""

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
    Records received data and sends nothing.

    :param hang_up: close the connection afterwards.
    """

    def __init__(self, received: DeferredQueue[bytes], hang_up: bool) -> None:
        self._received = received
        self._hang_up = hang_up
        self._data = b""
        self._is_reported = False

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        self._report()

    def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008  Twisted's own default
        self._report()

    def _report(self) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._received.put(self._data)
            if self._hang_up and self.transport is not None:
                self.transport.loseConnection()


class MongoTLSTests(TestCase):
    """A certificate authority, and the servers of each test."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mediatord-test-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.authority = CertificateAuthority(self.directory)

    def connection_settings(
        self, port: int, *, host: str = "localhost", authority: CertificateAuthority | None = None
    ) -> MongoConnectionSettings:
        """Settings for a server that must prove its identity, with a password."""
        path = (authority or self.authority).path
        return parse_mongo_uri(f"mongodb://u:s3cret@{host}:{port}/m?tls=true&tlsCAFile={path}")

    def open_pool(self, address: MongoConnectionSettings) -> PrimaryConnectionPool:
        """A connection pool, closed at the end of the test."""
        pool = PrimaryConnectionPool(address, reactor, size=1)
        self.addCleanup(pool.stop)
        pool.start()
        return pool

    async def run_command(self, address: MongoConnectionSettings, request: MongoCommand) -> dict[str, Any]:
        """Response of the primary. :raise CommandError: it refused."""
        (reply,) = await self.open_pool(address).exchange([request], reactor.seconds() + PATIENCE_SECONDS)
        assert reply is not None
        return check_reply(reply)

    def listen(self, key: Path | None, *, hang_up: bool = False) -> tuple[int, DeferredQueue[bytes]]:
        """A server that only records, with TLS if it has a key: its port, and the first data of each connection."""
        received: DeferredQueue[bytes] = DeferredQueue()
        factory = Factory.forProtocol(lambda: RecordingListener(received, hang_up))
        if key is None:
            port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        else:
            options = CertificateOptions(**load_client_certificate(str(key)))
            port = reactor.listenSSL(0, factory, options, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return port.getHost().port, received

    def connect(self, host: str, port: int, protocol: type[Protocol], tls: Any) -> None:
        """Connect as txmongo does: the factory knows its connector."""
        factory: Any = ClientFactory()
        factory.protocol = protocol
        factory.noisy = False
        factory.connector = reactor.connectSSL(host, port, factory, tls)
        self.addCleanup(factory.connector.disconnect)

    async def data_received_by(self, key: Path | None, **address: Any) -> bytes:
        """First data that a server with this key receives from the driver."""
        port, received = self.listen(key)
        self.open_pool(self.connection_settings(port, **address))
        return await received.get().addTimeout(PATIENCE_SECONDS, reactor)

    async def test_connects_to_verified_server(self) -> None:
        """By the name in the URI, or its address."""
        key = self.authority.issue("server", ["localhost", "127.0.0.1"])
        self.assertIn(b"ismaster", await self.data_received_by(key))
        self.assertIn(b"ismaster", await self.data_received_by(key, host="127.0.0.1"))

    async def test_sends_nothing_to_another_host(self) -> None:
        """A certificate for another name, or for the name only when the address was given."""
        self.assertEqual(await self.data_received_by(self.authority.issue("server", ["db.example"])), b"")
        self.assertEqual(
            await self.data_received_by(self.authority.issue("other", ["localhost"]), host="127.0.0.1"), b""
        )

    async def test_sends_nothing_to_expired_certificate(self) -> None:
        """It expired yesterday."""
        self.assertEqual(
            await self.data_received_by(self.authority.issue("server", ["localhost"], expired=True)), b""
        )

    async def test_sends_nothing_to_untrusted_authority(self) -> None:
        """Whatever its name; authorities of the system are not trusted either."""
        other = CertificateAuthority(self.directory, "Other Authority")
        self.assertEqual(
            await self.data_received_by(self.authority.issue("server", ["localhost"]), authority=other), b""
        )

    async def test_sends_nothing_in_the_clear(self) -> None:
        """A server without TLS gets the beginning of a handshake."""
        received = await self.data_received_by(None)
        self.assertEqual(received[:1], HANDSHAKE)
        self.assertNotIn(b"ismaster", received)
        self.assertNotIn(b"s3cret", received)

    async def test_tls_errors_are_distinguished(self) -> None:
        """Each has its own text; a closed connection is no TLS error."""
        other = CertificateAuthority(self.directory, "Other Authority")
        await self.assert_fault(
            self.authority.issue("server", ["db.example"]), "its certificate is for another host name"
        )
        stale = "its certificate is not signed by a trusted authority, or has expired"
        await self.assert_fault(self.authority.issue("server", ["localhost"], expired=True), stale)
        await self.assert_fault(other.issue("server", ["localhost"]), stale)
        await self.assert_fault(self.authority.issue("server", ["localhost"]), None)

    async def test_tls_error_is_reported_without_primary(self) -> None:
        """The operation fails with that error."""
        port, received = self.listen(self.authority.issue("server", ["db.example"]))
        pool = self.open_pool(self.connection_settings(port))
        # The second attempt begins after the first one.
        for _ in range(2):
            await received.get().addTimeout(PATIENCE_SECONDS, reactor)
        with self.assertRaisesRegex(
            ServerUnreachable, "no connection to a primary: its certificate is for another host name"
        ):
            await pool.exchange([build_probe_read()], reactor.seconds() + 0.5)

    async def assert_fault(self, key: Path, expected: str | None) -> None:
        """A connection to a server with this key ends with this error."""
        port, received = self.listen(key, hang_up=True)
        lost: Deferred[str | None] = Deferred()

        class Speaker(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"hello")

            def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008
                lost.callback(describe_tls_failure(reason))

        self.connect("localhost", port, Speaker, self.connection_settings(port).ssl_context_factory)
        await received.get()
        self.assertEqual(await lost, expected)

    async def test_monitoring_checks_host_name(self) -> None:
        """txmongo pings addresses; the certificate is for the name that led there, which must be known."""
        port, received = self.listen(self.authority.issue("server", ["localhost"]))
        tls = self.connection_settings(port).ssl_context_factory
        self.connect_and_stay("127.0.0.1", port, tls)
        self.assertEqual(await received.get(), b"")
        for host in ("localhost", "127.0.0.1"):
            self.connect_and_stay(host, port, tls)
            self.assertEqual(await received.get(), b"hello")

    async def test_members_at_same_address_are_checked_by_name(self) -> None:
        """Each by its own name, in any order of connecting."""
        servers = [self.listen(self.authority.issue(host, [host])) for host in ("localhost", "127.0.0.1")]
        tls = self.connection_settings(servers[0][0]).ssl_context_factory
        for host, (port, received) in zip(("localhost", "127.0.0.1"), servers, strict=True):
            self.connect_and_stay(host, port, tls)
            self.assertEqual(await received.get().addTimeout(PATIENCE_SECONDS, reactor), b"hello")

    def connect_and_stay(self, host: str, port: int, tls: Any) -> None:
        """Connect, send data, and stay connected until the end of the test."""
        gone: Deferred[None] = Deferred()

        class Speaker(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"hello")

            def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008
                gone.callback(None)

        self.addCleanup(lambda: gone)
        self.connect(host, port, Speaker, tls)

    async def test_password_authentication(self) -> None:
        """SCRAM-SHA-1 over TLS; without credentials, or with wrong ones, all commands are refused."""
        key = self.authority.issue("server", ["localhost"], organisation="Servers")
        tls = TLSFiles(self.authority.path, key, host="localhost")
        with ReplicaSet(tls=tls, auth=Credentials("root", "r00t")) as servers:
            roles = [{"role": "readWrite", "db": "m"}]
            password = "s3:cr/et+é"
            servers.client["m"].command(
                "createUser", "u", pwd=password, roles=roles, mechanisms=["SCRAM-SHA-1", "SCRAM-SHA-256"]
            )
            good = servers.uri("m", credentials=f"u:{quote(password, safe='')}", authSource="")
            self.assertEqual((await self.run_command(parse_mongo_uri(good), FIND))["ok"], 1.0)
            for bad in (good.replace("u:s3", "u:S3"), servers.uri("m", credentials="", authSource="")):
                with self.assertRaises(MongoCommandError) as context:
                    await self.run_command(parse_mongo_uri(bad), FIND)
                self.assertTrue(context.exception.is_unauthorized)

    async def test_certificate_authentication(self) -> None:
        """X.509: the subject of the client certificate is the user."""
        key = self.authority.issue("server", ["localhost"], organisation="Servers")
        tls = TLSFiles(self.authority.path, key, host="localhost")
        node, other_client = self.authority.issue("node"), self.authority.issue("stranger")
        with ReplicaSet(tls=tls, auth=Credentials("root", "r00t")) as servers:
            roles = [{"role": "readWrite", "db": "m"}]
            servers.client["$external"].command("createUser", "CN=node,O=Test", roles=roles)

            def uri(certificate: Path) -> str:
                options = {"tlsCertificateKeyFile": str(certificate), "authMechanism": "MONGODB-X509"}
                return servers.uri("m", credentials="", authSource="", **options)

            self.assertEqual((await self.run_command(parse_mongo_uri(uri(node)), FIND))["ok"], 1.0)
            with self.assertRaises(MongoCommandError) as context:
                await self.run_command(parse_mongo_uri(uri(other_client)), FIND)
            self.assertTrue(context.exception.is_unauthorized)
