"""Ordered start and stop of services, and the whole daemon on an in-memory reactor."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.application.service import IService, Service
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from mediatord.app.lifecycle import OrderedService
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.key_file import create_keys
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.service import makeService
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.didcomm_messages import authcrypt, compose_message
from tests.http.in_memory_site import CLOSE, InMemoryTransport, encode_masked_frame, encode_request, parse_responses
from tests.in_memory_mediator import CM3, NOW, PEER, from_header
from tests.net.outbound_test_case import FakeResolver


class RecordingService(Service):
    """Records when it is started and stopped; stopping ends when the test fires `stopped`."""

    def __init__(self, name: str, events_seen: list[str]) -> None:
        self.name = name
        self.stopped: Deferred[None] = Deferred()
        self._events_seen = events_seen

    def startService(self) -> None:
        super().startService()
        self._events_seen.append(f"start {self.name}")

    def stopService(self) -> Deferred[None]:
        super().stopService()
        self._events_seen.append(f"stop {self.name}")
        return self.stopped


class OrderedServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.events_seen: list[str] = []
        self.root = OrderedService(self.clock, timeout=8)
        self.children = [RecordingService(name, self.events_seen) for name in "abc"]
        for child in self.children:
            child.setServiceParent(self.root)
        self.root.startService()

    def test_starts_in_order_and_stops_in_reverse(self) -> None:
        """Each service starts or stops only after the previous one is done."""
        self.assertEqual(self.events_seen, ["start a", "start b", "start c"])
        self.events_seen.clear()
        stopped = self.root.stopService()
        for name, child in zip("cba", reversed(self.children), strict=True):
            self.assertEqual(self.events_seen.pop(), f"stop {name}")
            self.assertEqual(self.events_seen, [])
            self.assertNoResult(stopped)
            child.stopped.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertFalse(self.root.running)

    def test_abandons_child_that_does_not_stop_in_time(self) -> None:
        """The others still get time to stop."""
        stopped = self.root.stopService()
        self.clock.advance(8)
        self.assertEqual(self.events_seen[-1], "stop b")
        self.children[1].stopped.callback(None)
        self.assertEqual(self.events_seen[-1], "stop a")
        self.clock.advance(0.2)
        self.successResultOf(stopped)

    def test_stop_timeout_covers_all_children(self) -> None:
        """Slow children share the time."""
        stopped = self.root.stopService()
        self.clock.advance(5)
        self.children[2].stopped.callback(None)
        self.clock.advance(3)
        self.assertEqual(self.events_seen[-1], "stop a")
        self.children[0].stopped.callback(None)
        self.successResultOf(stopped)

    def test_logs_child_that_fails_to_stop(self) -> None:
        """The others stop all the same."""
        stopped = self.root.stopService()
        self.children[2].stopped.errback(RuntimeError("boom"))
        self.assertEqual(self.events_seen[-1], "stop b")
        for child in self.children[1::-1]:
            child.stopped.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class AddressInUseReactor(MemoryReactorClock):
    """Reactor on which every port is in use."""

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:  # noqa: N802
        raise CannotListenError(interface, port, OSError(98, "Address already in use"))


class DaemonTests(SynchronousTestCase):
    """The daemon as `build` makes it, on an in-memory reactor."""

    def config(self, **settings: Any) -> Config:
        """A configuration in a temporary directory, with keys."""
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        plain = {"storage": {"backend": "memory"}, "log": {"rotate": {"compress": False}}, **settings}
        return Config.model_validate(plain).resolved(self.directory)

    def start(self, **settings: Any) -> IService:
        """Build and start the daemon."""
        self.reactor: Any = MemoryReactorClock()
        self.reactor.nameResolver = FakeResolver({"slow.example": None})
        self.reactor.advance(NOW)
        service = makeService(self.config(**settings), self.reactor)
        service.privilegedStartService()
        service.startService()
        return service

    def open_connection(self) -> InMemoryTransport:
        """A new connection to the first listener."""
        line = InMemoryTransport(self.reactor, PEER)
        line.protocol = self.reactor.tcpServers[0][1].buildProtocol(line.getPeer())
        line.protocol.makeConnection(line)
        return line

    def run_delayed_calls(self) -> None:
        """Run the delayed calls that are due."""
        while any(call.getTime() <= self.reactor.seconds() for call in self.reactor.getDelayedCalls()):
            self.reactor.advance(0)

    def events(self) -> list[str]:
        """Names of all events, in order."""
        lines = [path.read_text("utf-8") for path in sorted((self.directory / "log").glob("events*.jsonl"))]
        return [json.loads(line)["event"] for line in "".join(lines).splitlines()]

    def test_building_has_no_side_effects(self) -> None:
        """It opens no log or store, binds nothing and sets no timer."""
        reactor: Any = MemoryReactorClock()
        service = makeService(self.config(), reactor)
        verifyObject(IService, service)
        self.assertEqual((reactor.tcpServers, reactor.getDelayedCalls()), ([], []))
        self.assertFalse((self.directory / "log").exists())

    def test_starts_listens_and_stops(self) -> None:
        """It listens as configured, serves, and leaves nothing behind."""
        service = self.start(listen=["tcp:9001:interface=127.0.0.1", "tcp:9002"])
        self.assertEqual(
            [(port, interface) for port, _, _, interface in self.reactor.tcpServers],
            [(9001, "127.0.0.1"), (9002, "")],
        )
        line = self.open_connection()
        line.feed(encode_request("GET", "/health"))
        self.assertEqual([one.status for one in parse_responses(line.take_output())], [200])
        line.disconnect()
        self.successResultOf(service.stopService())
        self.run_delayed_calls()
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        names = self.events()
        self.assertEqual(names[0], "log.open")
        self.assertIn("proc.start", names)
        self.assertEqual(names.count("ledger"), 4)
        self.assertEqual(names[-5:], ["proc.stop", "ledger", "ledger", "counters", "log.close"])

    def test_stop_drains_requests_and_closes_sockets(self) -> None:
        """
        A request in flight is answered, sockets are closed with 1001, and only then the store closes; new requests
        are refused.
        """
        service = self.start()
        raw = self.slow_request()
        socket = self.open_websocket()
        asking, late = self.open_connection(), self.open_connection()
        asking.feed(encode_request("POST", "/didcomm", raw))
        stopped = service.stopService()
        late.feed(encode_request("POST", "/didcomm", raw))
        self.assertEqual([one.status for one in parse_responses(late.take_output())], [503])
        self.assertEqual((asking.take_output(), socket.take_output()), (b"", b""))
        self.reactor.advance(5)
        (response,) = parse_responses(asking.take_output())
        self.assertEqual((response.status, response.json["body"]["code"]), (400, "e.p.did.unresolvable"))
        self.run_delayed_calls()
        self.assertNoResult(stopped)
        self.assertEqual(socket.take_output(), b"\x88\x0c\x03\xe9going away")
        socket.feed(encode_masked_frame(b"\x03\xe9", CLOSE))
        self.run_delayed_calls()
        self.successResultOf(stopped)

    def slow_request(self) -> bytes:
        """A request whose sender's DID takes five seconds to resolve, in vain."""
        key, did = PrivateKey.generate("X25519"), "did:web:slow.example"
        wallet = WalletIdentity(did, WalletKey(f"{did}#key-1", key), WalletKey(f"{did}#key-1", key))
        message = compose_message(f"{CM3}/mediate-request", return_route="all", **from_header(did))
        return authcrypt(message, wallet, resolve_local(self.did()))

    def did(self) -> str:
        """DID of the daemon."""
        line = self.open_connection()
        line.feed(encode_request("GET", "/did"))
        (response,) = parse_responses(line.take_output())
        line.disconnect()
        return response.body.decode()

    def open_websocket(self) -> InMemoryTransport:
        """A connection upgraded to a WebSocket."""
        line = self.open_connection()
        opening = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        line.feed(encode_request("GET", "/ws", None, {**opening, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))
        self.assertTrue(line.take_output().startswith(b"HTTP/1.1 101 "))
        return line

    def test_stop_ends_although_peer_ignores_close(self) -> None:
        """Stopping ends in time although a peer does not answer the closing handshake."""
        service = self.start(drain_timeout="8s")
        self.open_websocket().peer_stalled = True
        stopped = service.stopService()
        self.assertNoResult(stopped)
        self.reactor.pump([1] * 8)
        self.successResultOf(stopped)

    def test_port_in_use_is_reported_in_one_line(self) -> None:
        """It names the endpoint and the reason."""
        service = makeService(self.config(), AddressInUseReactor())
        with self.assertRaises(StartupError) as caught:
            service.privilegedStartService()
        self.assertEqual(
            str(caught.exception), "cannot listen on tcp:8080:interface=127.0.0.1: Address already in use"
        )

    def test_missing_keys_are_reported_in_one_line(self) -> None:
        """It names the file."""
        config = self.config()
        (self.directory / "keys.jwks").unlink()
        with self.assertRaises(StartupError) as caught:
            makeService(config, MemoryReactorClock())
        self.assertIn("keys.jwks", str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
