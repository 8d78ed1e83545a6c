"""The doors of the daemon, which open once there is something to serve those with who wait in front of them."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  what a kernel keeps for us is the subject
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.service import Listener
from mediatord.wiring.life import CLOSED, Doors

# As mypy knows it.
reactor: Any = _reactor

PATIENCE_SECONDS = 60.0


class Door(Listener):
    """Bound to nothing; knows whether it was told to take connections."""

    def __init__(self) -> None:
        super().__init__("tcp:9000", Factory(), MemoryReactorClock())
        self.told: list[str] = []

    def hold(self) -> None:
        self.told.append("hold")

    def let_in(self) -> None:
        self.told.append("let in")


class DoorsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.door = Door()
        self.opened: list[str] = []
        self.doors = Doors(self.clock, [self.door], lambda: self.opened.append("opened"))

    def start(self) -> None:
        """As services are."""
        self.doors.privilegedStartService()
        self.doors.startService()

    def test_bound_at_once(self) -> None:
        """So that who comes early waits, and whoever starts the daemon is told of an address that is taken."""
        self.doors.privilegedStartService()
        self.assertEqual(self.door.address.port, 9000)

    def test_opened_once_there_is_a_store(self) -> None:
        """However often that is said; each time it is passed on."""
        self.start()
        self.assertEqual(self.door.told, ["hold"])
        self.doors.open()
        self.doors.open()
        self.assertEqual((self.door.told, self.opened), (["hold", "let in"], ["opened", "opened"]))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.successResultOf(self.doors.stopService())
        self.assertFalse(self.door.running)

    def test_opened_without(self) -> None:
        """After a while, so that clients are told of the trouble."""
        self.start()
        self.clock.advance(CLOSED - 0.01)
        self.assertEqual(self.door.told, ["hold"])
        self.clock.advance(0.01)
        self.assertEqual(self.door.told, ["hold", "let in"])
        self.doors.open()
        self.assertEqual((self.door.told, self.opened), (["hold", "let in"], ["opened"]))

    def test_a_store_that_is_quick(self) -> None:
        """It may be open before there are doors."""
        self.doors.open()
        self.start()
        self.assertEqual((self.door.told, self.clock.getDelayedCalls()), ([], []))

    def test_stopped_before(self) -> None:
        """Then they stay closed."""
        self.start()
        self.successResultOf(self.doors.stopService())
        self.doors.open()
        self.clock.advance(10)
        self.assertEqual(self.door.told, ["hold"])


class Guest(Protocol):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.heard.callback(data)


class Host(Protocol):
    """Greets."""

    def connectionMade(self) -> None:
        self.transport.write(b"welcome")  # type: ignore[union-attr]  # it is made
        self.transport.loseConnection()  # type: ignore[union-attr]


class BacklogTests(TestCase):
    timeout = PATIENCE_SECONDS

    async def test_who_comes_early_waits(self) -> None:
        """Connected by the system, accepted by nobody; let in with the others once the doors are open."""
        clock, arrived = Clock(), Deferred[None]()
        factory = Factory.forProtocol(Host)
        listener = Listener("tcp:0:interface=127.0.0.1", factory, reactor)
        doors = Doors(clock, [listener], lambda: arrived.callback(None))
        doors.privilegedStartService()
        doors.startService()
        self.addCleanup(doors.stopService)
        port = listener.address.port
        early = await connectProtocol(HostnameEndpoint(reactor, "127.0.0.1", port), Guest())
        # The reactor has been through what it had to do when a second one is connected as well.
        second = await connectProtocol(HostnameEndpoint(reactor, "127.0.0.1", port), Guest())
        self.assertEqual((factory.numPorts, early.heard.called, second.heard.called), (1, False, False))
        doors.open()
        self.assertEqual([await early.heard, await second.heard], [b"welcome", b"welcome"])
        await arrived
