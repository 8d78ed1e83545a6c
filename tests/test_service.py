"""Starting and stopping in order, and the whole daemon in memory."""

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


class Child(Service):
    """Notes when it is started and stopped; stopping ends when the test says so."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.stopped: Deferred[None] = Deferred()
        self._notes = notes

    def startService(self) -> None:
        super().startService()
        self._notes.append(f"start {self.name}")

    def stopService(self) -> Deferred[None]:
        super().stopService()
        self._notes.append(f"stop {self.name}")
        return self.stopped


class OrderedServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.notes: list[str] = []
        self.root = OrderedService(self.clock, timeout=8)
        self.children = [Child(name, self.notes) for name in "abc"]
        for child in self.children:
            child.setServiceParent(self.root)
        self.root.startService()

    def test_order(self) -> None:
        """First to last, and back, each only after the one before is done."""
        self.assertEqual(self.notes, ["start a", "start b", "start c"])
        self.notes.clear()
        stopped = self.root.stopService()
        for name, child in zip("cba", reversed(self.children), strict=True):
            self.assertEqual(self.notes.pop(), f"stop {name}")
            self.assertEqual(self.notes, [])
            self.assertNoResult(stopped)
            child.stopped.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertFalse(self.root.running)

    def test_a_child_that_does_not_stop(self) -> None:
        """It is left behind when time is up, and the others still get a moment."""
        stopped = self.root.stopService()
        self.clock.advance(8)
        self.assertEqual(self.notes[-1], "stop b")
        self.children[1].stopped.callback(None)
        self.assertEqual(self.notes[-1], "stop a")
        self.clock.advance(0.2)
        self.successResultOf(stopped)

    def test_patience_is_for_all_together(self) -> None:
        """Slow children share the time."""
        stopped = self.root.stopService()
        self.clock.advance(5)
        self.children[2].stopped.callback(None)
        self.clock.advance(3)
        self.assertEqual(self.notes[-1], "stop a")
        self.children[0].stopped.callback(None)
        self.successResultOf(stopped)

    def test_a_child_that_fails_to_stop(self) -> None:
        """Is logged, and the others stop all the same."""
        stopped = self.root.stopService()
        self.children[2].stopped.errback(RuntimeError("boom"))
        self.assertEqual(self.notes[-1], "stop b")
        for child in self.children[1::-1]:
            child.stopped.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class TakenReactor(MemoryReactorClock):
    """Every port is taken."""

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:  # noqa: N802
        raise CannotListenError(interface, port, OSError(98, "Address already in use"))


class DaemonTests(SynchronousTestCase):
    """The daemon as `build` makes it, on a reactor of memory."""

    def config(self, **settings: Any) -> Config:
        """A configuration in a directory of its own, with keys."""
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_keys(self.directory / "keys.jwks")
        plain = {"storage": {"backend": "memory"}, "log": {"rotate": {"compress": False}}, **settings}
        return Config.model_validate(plain).resolved(self.directory)

    def start(self, **settings: Any) -> IService:
        """Build and start."""
        self.reactor: Any = MemoryReactorClock()
        self.reactor.nameResolver = FakeResolver({"slow.example": None})
        self.reactor.advance(NOW)
        service = makeService(self.config(**settings), self.reactor)
        service.privilegedStartService()
        service.startService()
        return service

    def line(self) -> InMemoryTransport:
        """A new connection to the first listener."""
        line = InMemoryTransport(self.reactor, PEER)
        line.protocol = self.reactor.tcpServers[0][1].buildProtocol(line.getPeer())
        line.protocol.makeConnection(line)
        return line

    def settle(self) -> None:
        """Let everything happen that is to happen at once."""
        while any(call.getTime() <= self.reactor.seconds() for call in self.reactor.getDelayedCalls()):
            self.reactor.advance(0)

    def events(self) -> list[str]:
        """The names of all events, in order."""
        lines = [path.read_text("utf-8") for path in sorted((self.directory / "log").glob("events*.jsonl"))]
        return [json.loads(line)["event"] for line in "".join(lines).splitlines()]

    def test_nothing_happens_before_the_start(self) -> None:
        """Building opens no file of a log or store, binds nothing and arms no timer."""
        reactor: Any = MemoryReactorClock()
        service = makeService(self.config(), reactor)
        verifyObject(IService, service)
        self.assertEqual((reactor.tcpServers, reactor.getDelayedCalls()), ([], []))
        self.assertFalse((self.directory / "log").exists())

    def test_starts_listens_and_stops(self) -> None:
        """It listens where the configuration says, serves, and leaves nothing behind."""
        service = self.start(listen=["tcp:9001:interface=127.0.0.1", "tcp:9002"])
        self.assertEqual(
            [(port, interface) for port, _, _, interface in self.reactor.tcpServers],
            [(9001, "127.0.0.1"), (9002, "")],
        )
        line = self.line()
        line.feed(encode_request("GET", "/health"))
        self.assertEqual([one.status for one in parse_responses(line.take_output())], [200])
        line.disconnect()
        self.successResultOf(service.stopService())
        self.settle()
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        names = self.events()
        self.assertEqual(names[0], "log.open")
        self.assertIn("proc.start", names)
        self.assertEqual(names.count("ledger"), 4)
        self.assertEqual(names[-5:], ["proc.stop", "ledger", "ledger", "counters", "log.close"])

    def test_stopping_under_load(self) -> None:
        """
        A request that is under way is finished and answered, a socket is closed with 1001, and only then does the
        store close; what comes meanwhile is refused.
        """
        service = self.start()
        raw = self.slow_request()
        socket = self.socket()
        asking, late = self.line(), self.line()
        asking.feed(encode_request("POST", "/didcomm", raw))
        stopped = service.stopService()
        late.feed(encode_request("POST", "/didcomm", raw))
        self.assertEqual([one.status for one in parse_responses(late.take_output())], [503])
        self.assertEqual((asking.take_output(), socket.take_output()), (b"", b""))
        self.reactor.advance(5)
        (response,) = parse_responses(asking.take_output())
        self.assertEqual((response.status, response.json["body"]["code"]), (400, "e.p.did.unresolvable"))
        self.settle()
        self.assertNoResult(stopped)
        self.assertEqual(socket.take_output(), b"\x88\x0c\x03\xe9going away")
        socket.feed(encode_masked_frame(b"\x03\xe9", CLOSE))
        self.settle()
        self.successResultOf(stopped)

    def slow_request(self) -> bytes:
        """A request of somebody whose DID is looked for for five seconds, in vain."""
        key, did = PrivateKey.generate("X25519"), "did:web:slow.example"
        wallet = WalletIdentity(did, WalletKey(f"{did}#key-1", key), WalletKey(f"{did}#key-1", key))
        message = compose_message(f"{CM3}/mediate-request", return_route="all", **from_header(did))
        return authcrypt(message, wallet, resolve_local(self.did()))

    def did(self) -> str:
        """Of the daemon."""
        line = self.line()
        line.feed(encode_request("GET", "/did"))
        (response,) = parse_responses(line.take_output())
        line.disconnect()
        return response.body.decode()

    def socket(self) -> InMemoryTransport:
        """A line that has been upgraded."""
        line = self.line()
        opening = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        line.feed(encode_request("GET", "/ws", None, {**opening, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))
        self.assertTrue(line.take_output().startswith(b"HTTP/1.1 101 "))
        return line

    def test_a_socket_that_stays(self) -> None:
        """Stopping ends in time although a peer does not answer the closing handshake."""
        service = self.start(drain_timeout="8s")
        self.socket().peer_stalled = True
        stopped = service.stopService()
        self.assertNoResult(stopped)
        self.reactor.pump([1] * 8)
        self.successResultOf(stopped)

    def test_a_port_that_is_taken(self) -> None:
        """One line that names the endpoint and the reason."""
        service = makeService(self.config(), TakenReactor())
        with self.assertRaises(StartupError) as caught:
            service.privilegedStartService()
        self.assertEqual(
            str(caught.exception), "cannot listen on tcp:8080:interface=127.0.0.1: Address already in use"
        )

    def test_keys_that_are_not_there(self) -> None:
        """One line that names the file."""
        config = self.config()
        (self.directory / "keys.jwks").unlink()
        with self.assertRaises(StartupError) as caught:
            makeService(config, MemoryReactorClock())
        self.assertIn("keys.jwks", str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
