"""Probe cycles that fail early, probe identities, and connections to the daemon's own listeners."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.probe.cycle import ProbeCycle, ProbeError
from mediatord.probe.identities_and_recognition import ProbeIdentities, derive_probe_credentials
from mediatord.probe.listener_endpoints import make_listener_endpoint
from mediatord.protocol.didcomm.did_methods import make_did_peer_2, resolve_local
from mediatord.protocol.didcomm.keys import PrivateKey
from tests.http.in_memory_site import InMemorySite, InMemoryTransport

SEED = b"s" * 32
MEDIATOR = make_did_peer_2(
    [("E", PrivateKey.generate("X25519").public)], [{"t": "dm", "s": {"uri": "https://mediator.example/didcomm"}}]
)


@implementer(IStreamClientEndpoint)
class UnreachableConnector:
    """Connector without a listener."""

    def connect(self, protocolFactory: object) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        return fail(ConnectionRefusedError())


class CycleTests(SynchronousTestCase):
    """Cycles that fail early; complete ones need a mediator (tests/integration/test_readiness.py)."""

    def setUp(self) -> None:
        self.written: Deferred[bool] = Deferred()
        self.endpoint: UnreachableConnector | None = UnreachableConnector()
        self.cycle = ProbeCycle(
            reactor=MemoryReactorClock(),
            endpoints=lambda: [self.endpoint],
            write=lambda: self.written,
            mediator=lambda: MEDIATOR,
            identity=ProbeIdentities(SEED).identity("a"),
            token=b"token",
        )
        self.run_ = Deferred.fromCoroutine(self.cycle.run())

    def run_failing_cycle(self) -> tuple[str, str]:
        """Run a cycle; return the failed stage and the reason."""
        failed: Any = self.failureResultOf(self.run_, ProbeError).value
        self.assertEqual(self.cycle.stage, failed.stage)
        return failed.stage, failed.cause

    def test_store_refuses(self) -> None:
        """No further stage is tried."""
        self.written.errback(StoreUnavailable())
        self.assertEqual(self.run_failing_cycle(), ("store", "StoreUnavailable"))

    def test_store_does_not_answer(self) -> None:
        """Abandoning the cycle does not cancel the operation of the store."""
        self.run_.cancel()
        self.assertEqual(self.run_failing_cycle(), ("store", "no answer"))
        self.assertNoResult(self.written)
        self.written.errback(StoreUnavailable())  # whose result is ignored

    def test_no_listener(self) -> None:
        """Nothing listens, or this process has no port of its own."""
        self.written.callback(True)
        self.assertEqual(self.run_failing_cycle(), ("listener", "ConnectionRefusedError"))
        self.endpoint = None
        self.run_ = Deferred.fromCoroutine(self.cycle.run())
        self.assertEqual(self.run_failing_cycle()[0], "listener")


@implementer(IStreamClientEndpoint)
class InMemoryConnectors:
    """Connectors to an in-memory mediator; the connection with number `mute` gets no answer."""

    def __init__(self, site_fixture: InMemorySite, mute: int) -> None:
        self._site_fixture = site_fixture
        self._mute = mute
        self._ends: list[tuple[InMemoryTransport, InMemoryTransport]] = []
        self._count = 0

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        self._count += 1
        near, far = (InMemoryTransport(self._site_fixture.clock, "127.0.0.1") for _ in range(2))
        near.protocol = protocolFactory.buildProtocol(near.getPeer())
        near.protocol.makeConnection(near)
        if self._count != self._mute:
            far.protocol = self._site_fixture.site.buildProtocol(far.getPeer())
            far.protocol.makeConnection(far)
            self._ends.append((near, far))
        return succeed(near.protocol)

    def transfer(self) -> None:
        """Transfer what both ends have written, until they are silent."""
        written = True
        while written:
            self._site_fixture.clock.advance(0)
            written = False
            for pair in self._ends:
                for end, other in (pair, pair[::-1]):
                    data = end.take_output()
                    written |= bool(data)
                    if data:
                        other.feed(data)


class SilentListenerTests(SynchronousTestCase):
    """A listener that only accepts connections, like the kernel for a process that hangs."""

    def run_abandoned_cycle(self, mute: int) -> tuple[str, str]:
        """Abandon a cycle whose first or second connection gets no answer; return its stage and the reason."""
        site_fixture = InMemorySite(self)
        own_, endpoints = site_fixture.base.probe_credentials, InMemoryConnectors(site_fixture, mute)
        cycle = ProbeCycle(
            reactor=site_fixture.clock,
            endpoints=lambda: [endpoints],
            write=lambda: succeed(True),
            mediator=lambda: site_fixture.base.identity.now.did,
            identity=own_.identities.identity("a"),
            token=own_.token,
        )
        running = Deferred.fromCoroutine(cycle.run())
        endpoints.transfer()
        running.cancel()
        failed: Any = self.failureResultOf(running, ProbeError).value
        return failed.stage, failed.cause

    def test_failed_stage(self) -> None:
        """An accepted connection has found the listener: the next stage fails."""
        self.assertEqual(self.run_abandoned_cycle(1), ("socket", "no answer"))
        self.assertEqual(self.run_abandoned_cycle(2), ("forward", "no answer"))


class ProbeIdentityTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.identities = ProbeIdentities(SEED)
        self.did = self.identities.identity("a").did

    def test_identity_survives_restart(self) -> None:
        """The identity depends on the seed and the node name only."""
        self.assertEqual(ProbeIdentities(SEED).identity("a"), self.identities.identity("a"))
        others = {self.identities.identity("b").did, ProbeIdentities(b"t" * 32).identity("a").did}
        self.assertEqual(len({self.did, *others}), 3)

    def test_did_resolves(self) -> None:
        """The DID resolves to the keys, without service endpoints."""
        identity = self.identities.identity("a")
        document = resolve_local(identity.did)
        self.assertEqual([method.key for method in document.key_agreement], [identity.agreement.private.public])
        self.assertEqual([method.key for method in document.authentication], [identity.signing.private.public])
        self.assertEqual(document.endpoints, ())

    def test_all_processes_recognise_identity(self) -> None:
        """Whatever the name of the other node is."""
        self.assertTrue(ProbeIdentities(SEED).is_probe_did(self.did))
        self.assertTrue(self.identities.is_probe_did(ProbeIdentities(SEED).identity("another node").did))

    def test_identity_cannot_be_forged(self) -> None:
        """Not with other keys, another tag, or additional characters."""
        foreign = ProbeIdentities(b"t" * 32).identity("a").did
        keys, _, tag = self.did.partition(".S")
        for did in (
            foreign,
            f"{foreign.partition('.S')[0]}.S{tag}",
            f"{self.did}.S{tag}",
            f"{self.did}#key-1",
            self.did[:-2],
            f"{keys}.S",
            "did:web:a.example",
            "",
            "\ud800",
            f"{self.did}\ud800",
        ):
            self.assertFalse(self.identities.is_probe_did(did), did)

    def test_token(self) -> None:
        """Workers share the token; separate processes and restarts have others."""
        self.assertEqual(
            derive_probe_credentials(SEED, b"shared").token, derive_probe_credentials(SEED, b"shared").token
        )
        self.assertNotEqual(
            derive_probe_credentials(SEED, b"shared").token, derive_probe_credentials(SEED, b"other").token
        )
        self.assertNotEqual(derive_probe_credentials(SEED, None).token, derive_probe_credentials(SEED, None).token)
        self.assertNotIn(
            derive_probe_credentials(SEED, b"shared").token.decode(), repr(derive_probe_credentials(SEED, b"shared"))
        )


class AbortableConnectorTests(SynchronousTestCase):
    def target_of(self, address: Any, **options: bool) -> tuple[Any, ...]:
        """The address to which a connector for a listener connects."""
        reactor: Any = MemoryReactorClock()
        make_listener_endpoint(reactor, address, "mediator.example", **options).connect(Factory.forProtocol(Protocol))
        (client,) = reactor.tcpClients or reactor.unixClients
        return tuple(client[:2]) if reactor.tcpClients else (client[0],)

    def test_addresses(self) -> None:
        """To the listener's address; the loopback address if it listens on all."""
        self.assertEqual(self.target_of(IPv4Address("TCP", "192.0.2.1", 80)), ("192.0.2.1", 80))
        self.assertEqual(self.target_of(IPv4Address("TCP", "0.0.0.0", 80)), ("127.0.0.1", 80))
        self.assertEqual(self.target_of(IPv6Address("TCP", "2001:db8::1", 80)), ("2001:db8::1", 80))
        self.assertEqual(self.target_of(IPv6Address("TCP", "::", 80), tls=True), ("::1", 80))
        self.assertEqual(self.target_of(IPv4Address("TCP", "127.0.0.1", 80), proxied=True), ("127.0.0.1", 80))

    def test_unix_sockets(self) -> None:
        """By path, from Twisted's port and from the operating system."""
        self.assertEqual(self.target_of(UNIXAddress(b"/run/socket")), ("/run/socket",))
        self.assertEqual(self.target_of("/run/socket"), ("/run/socket",))
